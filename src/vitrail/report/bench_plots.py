"""Which pictures a sweep gets: one of a kind for each study, and for each kind of work where samples do not compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_bars import choose_bars, draw_bars, draw_effects, draw_interactions, draw_ladder, draw_split
from vitrail.report.bench_cells import FEW, Cell, name_spread, plural
from vitrail.report.bench_lines import draw_batches, draw_scaling
from vitrail.report.bench_study import Study
from vitrail.report.bench_style import MOST_LINES, Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = tuple[str, str, str, Callable[[], "Figure | None"]]  # file name, title, caption, how to draw
KINDS = ("weak-scaling", "strong-scaling", "configurations", "effects", "interactions", "ladder", "batch", "step")
_CAPTIONS = {
    "weak": "Every rank keeps its batch. The ideal starts from the fastest on the fewest ranks, efficiency from each "
    "line's own.",
    "strong": "All ranks share one batch. The ideal starts from the fastest on the fewest ranks, efficiency from each "
    "line's own.",
    "effects": "Pairs of cells that differ in nothing else, at the largest batch that both ran; n is their number. "
    "Black: 95 % of bootstrap samples of the windows. Pale bars: that range holds 0, or is not known. Grey below a "
    "bar: from the least to the most of the pairs.",
    "interactions": "The effect at each level of the other factor, over the settings that all of them share. Dotted: "
    "no clear difference.",
    "ladder": "Each rung changes one key of the rung above and stands at its own best batch. Another order would share "
    "the gain out otherwise.",
    "batch": "Marks at the foot: batches that were not measured.",
    "step": "Measured in steps of their own, so the sum may differ from the step; white is the rest of it.",
}


def draw_all(facts: dict[str, Any], studies: Sequence[Study], notes: list[str]) -> list[Picture]:
    """Every picture that the cells allow; one that cannot be drawn must not cost the reader the page."""
    pictures: list[Picture] = []
    taken: set[str] = set()
    for study in studies:
        where = f" ({study.device}, {study.mode})" if len(studies) > 1 else ""
        for kind, title, caption, draw in _list_drawings(facts, study):
            try:
                figure = draw()
            except Exception as error:  # whatever the drawing library raises
                notes.append(f"The picture {kind!r} could not be drawn: {error}.")
                continue
            if figure is not None:
                pictures.append(Picture(_name_file(f"{kind}{where}", taken), title + where, caption, figure))
    return pictures


def _list_drawings(facts: dict[str, Any], study: Study) -> Iterator[Drawing]:
    def mine(name: str) -> list[dict[str, Any]]:
        return [one for one in facts[name] if (one["device"], one["mode"]) == (study.device, study.mode)]

    spread = _describe_spread(study.cells)
    for kind in ("weak", "strong"):
        lines = [line for line in mine("scaling") if line["kind"] == kind]
        caption = f"{_CAPTIONS[kind]} {spread}" + _left_out(len(lines))
        yield f"{kind}-scaling", f"{kind.capitalize()} scaling", caption, _with(draw_scaling, lines, kind)
    works: dict[str, list[Cell]] = {}
    for cell in study.cells:
        works.setdefault(study.work(cell), []).append(cell)
    for work, cells in works.items():
        kept, left = choose_bars(cells)
        best = f" {len(kept)} of {len(cells)} cells, each configuration at its fastest batch. The table holds all."
        yield (
            f"configurations {work}",
            "Configurations",
            spread + best * bool(left),
            _with(draw_bars, study, cells, work),
        )
    yield "effects", "Factor effects", _CAPTIONS["effects"], _with(draw_effects, mine("effects"))
    yield "interactions", "Interactions", _CAPTIONS["interactions"], _with(draw_interactions, mine("interactions"))
    for ladder in mine("ladders"):
        yield f"ladder {ladder['label']}", "Ladder", _CAPTIONS["ladder"], _with(draw_ladder, ladder, study.unit)
    for work in works:
        lines = [line for line in mine("batches") if line["work"] == work]
        caption = f"{spread} {_CAPTIONS['batch']}" + _left_out(len(lines))
        yield f"batch {work}", "Against the batch", caption, _with(draw_batches, lines, work, study.unit)
    for work, cells in works.items():
        yield f"step {work}", "Parts of the step", _CAPTIONS["step"], _with(draw_split, study, cells, work)


def _with(draw: Callable[..., Any], *values: Any) -> Callable[[], Any]:
    return lambda: draw(*values)


def _left_out(lines: int) -> str:
    return f" {plural(lines - MOST_LINES, 'line')} more in the facts (--json)." if lines > MOST_LINES else ""


def _describe_spread(cells: Sequence[Cell]) -> str:
    found, _, other = name_spread(len(cell.rates) for cell in cells if cell.ok).partition(", or ")
    return f"Thin lines are the {found} of the windows" + (f", the {other} of fewer than {FEW}." if other else ".")


def _name_file(words: str, taken: set[str]) -> str:
    """A plain file name that no other picture has."""
    stem = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")[:80] or "picture"
    name, turn = stem, 2
    while name in taken:
        name, turn = f"{stem}-{turn}", turn + 1
    taken.add(name)
    return name
