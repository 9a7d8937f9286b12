"""Pictures of a sweep: bars of configurations, parts of the step, effects and the ladder; lines over ranks and batches.

There is one of a kind for each study, and for each kind of work where samples do not compare. They look as a run's
curves do, but wider; lines differ in marker and dash as in colour."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_cells import FEW, WORDS, Cell, Study, group_by, name_spread, plural
from vitrail.report.figures import (
    BLUE,
    DPI,
    FAINT,
    FONT,
    GREEN,
    INK,
    LINE,
    ORANGE,
    PALE,
    RED,
    any_letters,
    make_figure,
    measure,
    put_legend,
    put_legend_below,
    scale_log,
    shorten_middle,
    try_to_draw,
)
from vitrail.report.units import compact, number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 9.4  # inches; the page shows a picture at its full width
NARROW_WIDTH = 4.9  # inches, of a narrow screen
NARROW: ContextVar[bool] = ContextVar(
    "NARROW", default=False
)  # whether panels stand below each other, for such a screen
COLOURS = (BLUE, ORANGE, GREEN, "#a03e99", INK, "#4aa3df", "#c9a100", RED)
MARKERS = "os^DvPX*"
MOST_LINES = len(COLOURS)
# How what was not measured is shown: marker, colour.
BROKEN = {"oom": ("x", RED), "failed": ("+", "#8a4b00"), "skipped": ("|", FAINT)}


@dataclass(frozen=True)
class Picture:
    """A picture of the page."""

    name: str  # of its files
    title: str
    caption: str
    figure: Figure
    narrow: Figure | None = None  # the same for narrow screens


def make_panels(title: str, height: float, widths: Sequence[float] = (1,), rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Make an empty picture with panels side by side, in rows; for narrow screens all of them below each other."""
    wide, several = WIDTH, len(widths) * rows
    if NARROW.get():
        wide, height = NARROW_WIDTH, height if several == 1 else 0.5 + 0.85 * several * max((height - 0.5) / rows, 1.2)
        widths, rows = (1,), several
    figure, axes = make_figure(
        shorten_middle(title, min(int(14 * wide), 100)), (wide, height), widths=widths, heights=[1] * rows
    )
    figure.set_dpi(DPI)  # of the PNG, which words beside bars are measured for
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.08, h_pad=0.06)
    return figure, axes


def name_panel(ax: Axes, title: str, *, most: int = 36) -> None:
    ax.set_title(shorten_middle(title, most), fontsize=9, color=INK, loc="left", parse_math=False)


def scale_counts(ax: Axes, values: Iterable[float], name: str) -> None:
    """Make a logarithmic axis of counts with a tick for each that occurs."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ticks = sorted(set(values))
    if len(ticks) > 9:
        ticks = ticks[:: math.ceil(len(ticks) / 9)]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(round(value))))
    ax.set_xlabel(name)


def name_bars(ax: Axes, names: Sequence[str], *, most: int = 64) -> None:
    """Write names down the left side, the first on top."""
    most, size = (min(most, 38), 7) if NARROW.get() else (most, 8)
    ax.set_yticks(range(len(names)))
    ax.set_yticklabels([shorten_middle(name, most) for name in names], fontsize=size, color=INK, parse_math=False)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def fit_values(figure: Figure, ax: Axes) -> None:
    """Start the axis at 0 and end it so that the bars, their thin lines and the words beside them are inside.

    The words take no part in the layout: far outside the panel they would undo it.
    """
    for text in ax.texts:
        text.set_in_layout(False)
    drawn: list[Any] = [*ax.get_lines()]
    bars: list[Any] = [*ax.patches]
    ends = [float(value) for line in drawn for value in line.get_xdata()]
    ends += [bar.get_x() + bar.get_width() for bar in bars]
    top = 1.02 * max(filter(math.isfinite, ends), default=1.0)
    ax.set_xlim(0, top)
    with any_letters():
        figure.draw_without_rendering()
    room = ax.get_window_extent().width
    for text in ax.texts:
        left = max(room - 1.05 * measure(text, figure), 0.2 * room)  # what remains for the bar
        top = max(top, text.get_position()[0] * room / left)
    ax.set_xlim(0, top)


MOST_BARS = 32
_MOST_PANELS = 6
_PARTS = {"data": ORANGE, "forward": BLUE, "backward": PALE, "optimizer": GREEN}


def choose_bars(cells: Sequence[Cell]) -> tuple[list[Cell], int]:
    """Return the cells to draw, fastest first and those without a speed last, and how many were left out.

    Of many, each configuration stands with its fastest batch alone; the slowest are left out before those without.
    """
    ordered = sorted(cells, key=lambda cell: (not cell.ok, -cell.rate if cell.ok else list(BROKEN).index(cell.status)))
    if len(ordered) > MOST_BARS:
        ordered = [cells[0] for cells in group_by(ordered, Cell.rest).values()]
    done = [cell for cell in ordered if cell.ok]
    broken = [cell for cell in ordered if not cell.ok][: MOST_BARS // 2]
    kept = done[: MOST_BARS - len(broken)] + broken
    return kept, len(cells) - len(kept)


def draw_bars(study: Study, cells: Sequence[Cell], work: str) -> Figure | None:
    """Draw samples per second of each cell."""
    chosen, left = choose_bars(cells)
    if not any(cell.ok for cell in chosen):
        return None
    bars = []
    for row, cell in enumerate(chosen):
        mfu = cell.number("mfu")
        words = f"{compact(cell.rate)} /s" + (f", MFU {100 * mfu:.1f} %" if math.isfinite(mfu) else "")
        full = [c.size for c in cells if c.status == "oom" and c.rest() == cell.rest()] if left else []
        words += f"; out of memory from {min(full):g}" if full else ""
        name, colour = study.describe(cell, work=False, batch=True), BLUE if row == 0 else PALE
        bars.append(Bar(name, cell.status, cell.rate, cell.low, cell.high, words, {"color": colour}))
    return _draw_bars(_title("Configurations, fastest first", work), "samples/s", bars)


def draw_ladder(ladder: dict[str, Any], unit: str) -> Figure:
    """Draw relative throughput, one change a rung."""
    bars = []
    for row, rung in enumerate(ladder["rungs"]):
        where = "" if rung["batch"] is None else f", batch {rung['batch']:g}{unit}"
        words = f"{rung['relative']:.2f} ×  ({compact(rung['samples_per_s'])} /s{where})"
        look = {"color": BLUE, "alpha": 0.45 + 0.55 * row / (len(ladder["rungs"]) - 1)}
        name = ("" if row == 0 else "+ ") + rung["added"]
        bars.append(Bar(name, rung["status"], rung["relative"], rung["low"], rung["high"], words, look))
    title = _title("Ladder: one change a rung, against the first that ran", ladder["label"])
    figure = _draw_bars(title, "times as fast", bars, 0.34)
    figure.axes[0].axvline(1, color=LINE, linewidth=1, zorder=0)
    return figure


@dataclass(frozen=True)
class Bar:
    """A bar with its spread as a thin line, and words beside it."""

    name: str
    status: str
    value: float
    low: float
    high: float
    words: str
    look: dict[str, Any]


def _draw_bars(title: str, axis: str, bars: Sequence[Bar], each: float = 0.27) -> Figure:
    """Draw bars, the first on top; what was not measured is named in place of its bar."""
    figure, (ax,) = make_panels(title, _height(bars, each))
    gap = (0.025 if NARROW.get() else 0.01) * max(max(bar.value, bar.high) for bar in bars if bar.status == "ok")
    for row, bar in enumerate(bars):
        x, words, colour = max(bar.value, bar.high) + gap, bar.words, FAINT
        if bar.status == "ok":
            ax.barh(row, bar.value, height=0.64, linewidth=0, **bar.look)
            ax.plot([bar.low, bar.high], [row, row], color=INK, linewidth=1.2)
        else:
            marker, colour = BROKEN[bar.status]
            ax.plot(gap, row, marker, color=colour, markersize=6, markeredgewidth=1.6)
            x, words = 2.5 * gap, WORDS[bar.status]
        ax.text(x, row, words, va="center", fontsize=FONT - 1, color=colour, parse_math=False)
    name_bars(ax, [bar.name for bar in bars])
    ax.set_xlabel(axis)
    fit_values(figure, ax)
    return figure


def draw_split(study: Study, cells: Sequence[Cell], work: str) -> Figure | None:
    """Draw the parts of a step as stacked bars; communication runs beside the others and so has its own thin bar."""
    chosen, _ = choose_bars([c for c in cells if c.ok and any(c.number("split", part) > 0 for part in _PARTS)])
    if not chosen:
        return None
    from matplotlib.patches import Patch

    figure, (ax,) = make_panels(_title("Where a step goes", work), _height(chosen) + 0.3)
    talks = [cell.number("split", "communication") for cell in chosen]
    for row, cell in enumerate(chosen):
        start = 0.0
        for part, colour in _PARTS.items():
            width = 1000 * cell.number("split", part)
            if width > 0:
                ax.barh(row, width, left=start, height=0.62, color=colour, edgecolor="white", linewidth=0.6)
                start += width
        rest = 1000 * cell.number("step_seconds", "median") - start
        if rest > 0:
            ax.barh(row, rest, left=start, height=0.62, color="white", edgecolor=FAINT, linewidth=0.6)
        if talks[row] > 0:
            ax.barh(row + 0.4, 1000 * talks[row], height=0.14, color=INK, linewidth=0)
    name_bars(ax, [study.describe(cell, work=False, batch=True) for cell in chosen])
    ax.set_xlabel("milliseconds of a step")
    handles = [Patch(facecolor=colour) for colour in _PARTS.values()] + [Patch(facecolor="white", edgecolor=FAINT)]
    labels = [*_PARTS, "rest"]
    if any(talk > 0 for talk in talks):
        handles.append(Patch(facecolor=INK))
        labels.append("communication (beside the others)")
    put_legend_below(figure, handles, labels)
    return figure


def draw_effects(effects: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw percent change of speed and of memory, with the interval of the speed and each pair's own change."""
    effects = [effect for effect in effects if not effect["changes_work"]] or list(effects)
    if not effects:
        return None
    effects = sorted(effects, key=lambda effect: -effect["percent"])[:MOST_BARS]
    figure, (speed, memory) = make_panels("What each factor does, all else equal", _height(effects), (2, 1))
    for row, effect in enumerate(effects):
        value = effect["percent"]
        speed.barh(row, value, height=0.6, color=BLUE if effect["sure"] else PALE, linewidth=0)
        if effect["low"] is not None:
            speed.plot([effect["low"], effect["high"]], [row, row], color=INK, linewidth=1.6, zorder=4)
        if effect["pairs"] > 1:
            speed.plot(effect["pair_percent"], [row + 0.4] * 2, "|-", color=FAINT, linewidth=0.8, markersize=5)
        if effect["memory_percent"] is not None:
            memory.barh(row, effect["memory_percent"], height=0.6, color=ORANGE, linewidth=0)
    name_bars(speed, [f"{e['factor']}: {e['from']} → {e['to']}  (n={e['pairs']})" for e in effects], most=52)
    name_bars(memory, [""] * len(effects))
    for ax, name in ((speed, "samples/s, % change"), (memory, "peak memory, % change")):
        ax.axvline(0, color=FAINT, linewidth=0.8)
        ax.set_xlabel(name)
        ax.margins(x=0.08)
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, -2), max(high, 2))  # a fraction of a percent does not fill the panel
    return figure


def draw_interactions(found: Sequence[dict[str, Any]]) -> Figure | None:
    """Draw how the effect of one factor depends on another; a panel for each two, the clearest first."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        panels.setdefault((one["factor"], one["by"]), []).append(one)
    shown = list(panels.items())[:_MOST_PANELS]
    if not shown:
        return None
    columns = 1 if NARROW.get() else 2 if len(shown) in (1, 2, 4) else 3
    rows = math.ceil(len(shown) / columns)
    figure, axes = make_panels("How one factor's effect depends on another", 0.5 + 2.7 * rows, [1] * columns, rows)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    for ax, ((factor, by), lines) in zip(axes, shown, strict=False):
        names = list(dict.fromkeys(point["level"] for line in lines for point in line["points"]))
        for place, line in enumerate(lines[: len(COLOURS)]):
            x = [names.index(point["level"]) + 0.06 * place for point in line["points"]]
            style: dict[str, Any] = {
                "color": COLOURS[place],
                "marker": MARKERS[place],
                "linestyle": "-" if line["sure"] else ":",
            }
            label = f"{line['from']} → {line['to']}"
            style |= {"linewidth": 1.5, "markersize": 5, "capsize": 3, "label": label}
            _plot_spread(ax, x, line["points"], "percent", style)
        ax.axhline(0, color=FAINT, linewidth=0.8)
        ax.set_xticks(range(len(names)))
        shown_names = [name.split()[1] for name in names] if by == "batch" else names  # "batch 16 a rank" is too long
        ax.set_xticklabels(shown_names, fontsize=8, parse_math=False)
        ax.set_xlim(-0.35, len(names) - 0.65)
        most = 50 if NARROW.get() else 100 // columns  # letters above and below a panel
        name_panel(ax, f"{factor}, by {by}", most=most)
        ax.set_xlabel(shorten_middle(by, most), parse_math=False)
        ax.set_ylabel("samples/s, % change")
        put_legend(ax, size=7.5, place="best", length=1.8)
    return figure


def _height(rows: Sequence[Any], each: float = 0.27) -> float:
    return 1.0 + each * max(len(rows), 2)


def _title(words: str, more: str) -> str:
    return f"{words}: {more}" if more else words


Line = dict[str, Any]
_CAPS = {"capsize": 2.5, "elinewidth": 1}  # of the spread


def draw_scaling(lines: Sequence[Line], kind: str) -> Figure | None:
    """Draw throughput with the ideal, efficiency and memory over ranks; of each strategy the fastest line."""
    lines = _choose(lines)
    if not lines:
        return None
    figure, (speed, share, memory) = make_panels(f"{kind.capitalize()} scaling", 3.6, (1.15, 1, 1))
    points = [point for line in lines for point in line["points"]]
    first = max((line["points"][0] for line in lines), key=lambda point: point["samples_per_s"] / point["gpus"])
    counts = [point["gpus"] for point in [*points, *(one for line in lines for one in line["broken"])]]
    ends = [min(counts), max(counts)]
    ideal = [first["samples_per_s"] / first["gpus"] * count for count in ends]
    speed.plot(ends, ideal, "--", color=FAINT, linewidth=1.2, label="ideal")
    share.axhline(100, linestyle="--", color=FAINT, linewidth=1.2)
    _draw_lines(speed, "samples/s", lines, ("gpus", "ranks"), "samples_per_s", label="label", marks=False)
    _draw_lines(share, "efficiency, % of ideal", lines, ("gpus", "ranks"), "efficiency", factor=100, marks=False)
    _draw_lines(memory, "peak memory of a rank, GiB", lines, ("gpus", "ranks"), "memory_gib")
    rates = [point[name] for point in points for name in ("samples_per_s", "low", "high")] + ideal
    scale_log(speed, rates)
    speed.set_ylim(min(rates) / 1.3, max(rates) * 1.3)
    share.set_ylim(0, max(110, *(105 * point["efficiency"] for point in points)))
    _from_zero(memory)
    _finish(figure, speed, lines)
    return figure


def draw_batches(lines: Sequence[Line], work: str, unit: str) -> Figure | None:
    """Draw throughput, MFU and memory over the batch."""
    lines = _choose(lines)
    if not lines:
        return None
    known = any(math.isfinite(number_of(point["mfu"])) for line in lines for point in line["points"])
    panels = [("samples_per_s", "samples/s", 1.0), ("mfu", "MFU, %", 100.0), ("memory_gib", "peak memory, GiB", 1.0)]
    panels = [panel for panel in panels if known or panel[0] != "mfu"]
    title = _title(f"Throughput{', MFU' if known else ''} and memory against the batch", work)
    figure, axes = make_panels(title, 3.7, [1] * len(panels))
    for ax, (field, name, factor) in zip(axes, panels, strict=True):
        label = "short" if field == "samples_per_s" else None
        _draw_lines(ax, name, lines, ("batch", f"batch{unit}"), field, label=label, factor=factor)
    if falls := [(p["batch"], p["samples_per_s"]) for line in lines for p in line["points"] if p["falls"]]:
        style: Any = {"color": RED, "fillstyle": "none", "markersize": 11, "label": "falls, outside the spread"}
        axes[0].plot(*zip(*falls, strict=True), "o", **style)
    for ax in axes:
        _from_zero(ax)
    _finish(figure, axes[0], lines)
    return figure


def _draw_lines(
    ax: Axes,
    name: str,
    lines: Sequence[Line],
    along: tuple[str, str],
    field: str,
    *,
    label: str | None = None,
    factor: float = 1.0,
    marks: bool = True,
) -> None:
    """Draw a field of all lines; with a label also its spread, and with `marks` what was not measured, at the foot."""
    axis, words = along
    for place, line in enumerate(lines):
        style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place], "linewidth": 1.5, "markersize": 4.5}
        style["linestyle"] = ("-", (0, (5, 1.5)))[place % 2]
        x = [point[axis] for point in line["points"]]
        if label:
            _plot_spread(ax, x, line["points"], field, style | _CAPS | {"label": line[label]})
        else:
            ax.plot(x, [factor * number_of(point[field]) for point in line["points"]], **style)
        for one in line["broken"] if marks else ():
            look: Any = {"color": COLOURS[place], "markersize": 6, "markeredgewidth": 1.6}
            foot = 0.04 + 0.045 * place  # a row for each line
            ax.plot(one[axis], foot, BROKEN[one["status"]][0], transform=ax.get_xaxis_transform(), **look)
    name_panel(ax, name)
    scale_counts(ax, [point[axis] for line in lines for point in line["points"] + line["broken"]], words)


def _choose(lines: Sequence[Line]) -> list[Line]:
    """Choose each strategy's fastest line first, then the rest, as many as can be told apart; in their own order."""

    def top(line: Line) -> float:
        return max(point["samples_per_s"] for point in line["points"])

    seen: dict[Any, int] = {}
    ranked = []
    for line in sorted(lines, key=top, reverse=True):
        turn = seen[line.get("strategy")] = seen.get(line.get("strategy"), 0) + 1
        ranked.append((turn, -top(line), line))
    kept = [id(line) for _, _, line in sorted(ranked, key=lambda entry: entry[:2])[:MOST_LINES]]
    return [line for line in lines if id(line) in kept]


def _plot_spread(ax: Axes, x: Sequence[float], points: Sequence[Line], field: str, style: dict[str, Any]) -> None:
    """Draw a line with the spread of each point, where it is known."""
    y = [point[field] for point in points]
    ends = [
        (v, v) if point["low"] is None else (point["low"], point["high"]) for v, point in zip(y, points, strict=True)
    ]
    below = [max(0.0, v - low) for v, (low, _) in zip(y, ends, strict=True)]
    above = [max(0.0, high - v) for v, (_, high) in zip(y, ends, strict=True)]
    ax.errorbar(x, y, yerr=[below, above], **style)


def _from_zero(ax: Axes) -> None:
    drawn: Any = [line.get_ydata() for line in ax.get_lines()]
    tops = [float(value) for values in drawn for value in values if math.isfinite(value)]
    ax.set_ylim(0, 1.12 * max(tops, default=1.0) or 1.0)


def _finish(figure: Figure, ax: Axes, lines: Sequence[Line]) -> None:
    """Put the legend, with the marks of what was not measured."""
    from matplotlib.lines import Line2D

    handles, labels = ax.get_legend_handles_labels()
    for status, (marker, _) in BROKEN.items():
        if any(one["status"] == status for line in lines for one in line["broken"]):
            handles.append(Line2D([], [], color=FAINT, marker=marker, linestyle="", markeredgewidth=1.6))
            labels.append(WORDS[status])
    put_legend_below(figure, handles, labels)


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
    """Draw every picture that the cells allow."""
    pictures: list[Picture] = []
    taken: set[str] = set()
    for study in studies:
        where = f" ({study.device}, {study.mode})" if len(studies) > 1 else ""
        for kind, title, caption, draw in _list_drawings(facts, study):
            figure = try_to_draw(f"picture {kind!r}", draw, notes)
            if figure is not None:
                narrow = try_to_draw(f"picture {kind!r}", partial(_draw_narrow, draw), notes)
                pictures.append(Picture(_name_file(f"{kind}{where}", taken), title + where, caption, figure, narrow))
    return pictures


def _draw_narrow(draw: Callable[[], Figure | None]) -> Figure | None:
    token = NARROW.set(True)
    try:
        return draw()
    finally:
        NARROW.reset(token)


def _list_drawings(facts: dict[str, Any], study: Study) -> Iterator[Drawing]:
    def mine(name: str) -> list[dict[str, Any]]:
        return [one for one in facts[name] if (one["device"], one["mode"]) == (study.device, study.mode)]

    spread = _describe_spread(study.cells)
    for kind in ("weak", "strong"):
        lines = [line for line in mine("scaling") if line["kind"] == kind]
        caption = f"{_CAPTIONS[kind]} {spread}" + _left_out(len(lines))
        yield f"{kind}-scaling", f"{kind.capitalize()} scaling", caption, partial(draw_scaling, lines, kind)
    works = group_by(study.cells, study.work)
    for work, cells in works.items():
        kept, left = choose_bars(cells)
        best = f" {len(kept)} of {len(cells)} cells, each configuration at its fastest batch. The table holds all."
        yield (
            f"configurations {work}",
            _title("Configurations", work),
            spread + best * bool(left),
            partial(draw_bars, study, cells, work),
        )
    yield "effects", "Factor effects", _CAPTIONS["effects"], partial(draw_effects, mine("effects"))
    yield "interactions", "Interactions", _CAPTIONS["interactions"], partial(draw_interactions, mine("interactions"))
    for ladder in mine("ladders"):
        title = _title("Ladder", ladder["label"])
        yield f"ladder {ladder['label']}", title, _CAPTIONS["ladder"], partial(draw_ladder, ladder, study.unit)
    for work in works:
        lines = [line for line in mine("batches") if line["work"] == work]
        caption = f"{spread} {_CAPTIONS['batch']}" + _left_out(len(lines))
        title = _title("Against the batch", work)
        yield f"batch {work}", title, caption, partial(draw_batches, lines, work, study.unit)
    for work, cells in works.items():
        title = _title("Parts of the step", work)
        yield f"step {work}", title, _CAPTIONS["step"], partial(draw_split, study, cells, work)


def _left_out(lines: int) -> str:
    return f" {plural(lines - MOST_LINES, 'line')} more in the facts (--json)." if lines > MOST_LINES else ""


def _describe_spread(cells: Sequence[Cell]) -> str:
    found, _, other = name_spread(len(cell.rates) for cell in cells if cell.ok).partition(", or ")
    return f"Thin lines are the {found} of the windows" + (f", the {other} of fewer than {FEW}." if other else ".")


def _name_file(words: str, taken: set[str]) -> str:
    """Return a plain file name that no other picture has."""
    stem = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")[:80] or "picture"
    name, turn = stem, 2
    while name in taken:
        name, turn = f"{stem}-{turn}", turn + 1
    taken.add(name)
    return name
