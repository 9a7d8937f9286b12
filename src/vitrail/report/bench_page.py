"""The page of a sweep: `report.html`, one file that opens offline, and its pictures as PNG and SVG in `plots/`."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.disk import is_ours, remove, write_own
from vitrail.errors import UserError
from vitrail.report.bench_cells import WORDS, name_spread, plural, read_bench
from vitrail.report.bench_facts import summarize_bench
from vitrail.report.bench_plots import KINDS, draw_all
from vitrail.report.bench_study import split_studies
from vitrail.report.bench_style import save_picture
from vitrail.report.bench_words import signed
from vitrail.report.facts import describe_time
from vitrail.report.files import embed_image
from vitrail.report.units import MISSING, compact, number_of, percent, plain

Row = tuple[str, ...]


def write_bench_report(folder: str | Path, *, now: float | None = None) -> Path:
    """Write `report.html` and `plots/` into a bench folder, however far the sweep came, and return the page's path."""
    sweep, cells, notes = read_bench(folder)
    path = Path(folder)
    studies = split_studies(cells, sweep.get("tree"))
    facts = summarize_bench(path, sweep, studies, notes)
    pictures = []
    for place in (path, path / "plots"):
        disk.sweep(place)
    try:
        for picture in draw_all(facts, studies, facts["warnings"]):
            svg, png = save_picture(picture.figure)
            write_own(path / "plots" / f"{picture.name}.svg", svg.encode(), parents=True)
            write_own(path / "plots" / f"{picture.name}.png", png)
            pictures.append(
                {
                    "name": picture.name,
                    "title": picture.title,
                    "caption": picture.caption,
                    "uri": embed_image(svg.encode(), "image/svg+xml"),
                }
            )
        _clear(path / "plots", {picture["name"] for picture in pictures})
        html = _render(facts, pictures, time.time() if now is None else now)
        return write_own(path / "report.html", html.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            f"{path / 'report.html'} cannot be written: {error.strerror}; make the folder writable."
        ) from error


def _clear(folder: Path, kept: set[str]) -> None:
    """Remove pictures of an earlier report that this one does not have: they show fewer cells."""
    for path in folder.glob("*.svg"):
        twin = path.with_suffix(".png")
        if path.stem not in kept and path.stem.startswith(KINDS) and is_ours(path) and is_ours(twin):
            remove(path, inside=folder)
            remove(twin, inside=folder)


def _render(facts: dict[str, Any], pictures: list[dict[str, str]], now: float) -> str:
    from jinja2 import Environment, StrictUndefined

    files = resources.files("vitrail.report")
    heads, cells = _list_cells(facts)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # One look for all pages: the style is that of a run's page.
    style = files.joinpath("page.html").read_text("utf-8").partition("<style>")[2].partition("</style>")[0]
    return environment.from_string(files.joinpath("bench.html").read_text("utf-8")).render(
        facts=facts,
        style=style,
        headline=_state_headline(facts),
        complete=not facts["open"] and not facts["counts"]["failed"],
        tiles=_list_tiles(facts),
        pictures=pictures,
        effects=_list_effects(facts),
        heads=heads,
        cells=cells,
        remarks=any(cell["remark"] for cell in cells),
        hardware=_list_hardware(facts),
        written=describe_time(now),
    )


def _state_headline(facts: dict[str, Any]) -> str:
    counts, total = facts["counts"], len(facts["cells"]) + len(facts["open"])
    if not facts["cells"]:
        return "No cell has a result yet"
    parts = [f"{counts['ok']} of {plural(total, 'cell')} measured"]
    parts += [f"{counts[status]} {WORDS[status]}" for status in ("oom", "failed", "skipped") if counts[status]]
    return ", ".join(parts + [f"{len(facts['open'])} not run yet"] * bool(facts["open"]))


def _list_tiles(facts: dict[str, Any]) -> list[Row]:
    """The few numbers to see first: label, value, remark."""
    tiles: list[Row] = []
    for best in facts["fastest"][:3]:
        tiles.append(("Fastest, samples/s", compact(best["samples_per_s"]), best["name"]))
    done = [cell for cell in facts["cells"] if cell["status"] == "ok"]
    known = [cell for cell in done if number_of(cell["mfu"]) > 0]
    if known:
        top = max(known, key=lambda cell: cell["mfu"])
        tiles.append(("Highest MFU", percent(top["mfu"]), top["name"]))
    heavy = [cell for cell in done if number_of(cell["memory_gib"]) > 0]
    if heavy:
        top = max(heavy, key=lambda cell: cell["memory_gib"])
        tiles.append(("Most memory, GiB", plain(top["memory_gib"], 3), top["name"]))
    return tiles


def _list_effects(facts: dict[str, Any]) -> list[Row]:
    """Heads and rows, without columns that say nothing."""
    rows: list[Row] = []
    for effect in facts["effects"]:
        sure = MISSING if effect["low"] is None else f"{signed(effect['low'])} to {signed(effect['high'])}"
        pairs = " to ".join(map(signed, effect["pair_percent"])) if effect["pairs"] > 1 else MISSING
        row: Row = (f"{effect['factor']}: {effect['from']} → {effect['to']}", signed(effect["percent"]), sure)
        row += (str(effect["pairs"]), pairs, ", ".join(f"{size:g}" for size in effect["batches"]) or MISSING)
        row += tuple(MISSING if (v := effect[k]) is None else signed(v) for k in ("own_percent", "memory_percent"))
        place = f"{effect['device']}, {effect['mode']}" if len(facts["hardware"]) > 1 else MISSING
        rows.append((*row, "other work a sample" if effect["changes_work"] else MISSING, place))
    heads = ("factor", "samples/s", "interval", "pairs", "least to most of the pairs", "at batch")
    return _drop_empty([(*heads, "each at its best batch", "memory", "note", "on"), *rows]) if rows else []


def _drop_empty(rows: list[Row]) -> list[Row]:
    kept = [i for i in range(len(rows[0])) if any(row[i] not in ("", MISSING) for row in rows[1:])]
    return [tuple(row[i] for i in kept) for row in rows]


_HEADS: Row = (
    *("on", "mode", "samples/s", "quartiles", "step, ms", "MFU", "HFU", "peak, GiB", "reserved, GiB"),
    *("J a sample", "batch", "ranks"),
)


def _list_cells(facts: dict[str, Any]) -> tuple[Row, list[dict[str, Any]]]:
    """Heads and cells, without columns that say nothing."""
    spread = name_spread(cell["windows"] for cell in facts["cells"] if cell["status"] == "ok")
    table: list[Row] = [tuple(spread if head == "quartiles" else head for head in _HEADS)]
    apart = len(facts["hardware"]) > 1
    for cell in facts["cells"]:
        place = (cell["device"], cell["mode"]) if apart else (MISSING, MISSING)
        row: Row = ("",) * (len(_HEADS) - 4)
        if cell["status"] == "ok":
            row = (compact(cell["samples_per_s"]), f"{compact(cell['low'])} to {compact(cell['high'])}")
            row += (plain(1000 * number_of(cell["step_seconds"]), 3), percent(cell["mfu"]), percent(cell["hfu"]))
            row += tuple(plain(cell[name], 3) for name in ("memory_gib", "reserved_gib", "energy_j"))
        table.append((*place, *row, plain(cell["batch"]), plain(cell["gpus"])))
    heads, *rows = _drop_empty(table) if facts["cells"] else [_HEADS]
    cells = []
    for cell, values in zip(facts["cells"], rows, strict=True):
        remark = "; ".join(filter(None, [cell["error"], *cell["notes"]]))[:400]
        words = {"name": cell["name"], "status": cell["status"], "words": WORDS[cell["status"]]}
        cells.append(words | {"values": values, "remark": remark})
    return heads, cells


def _list_hardware(facts: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    cards = []
    for one in facts["hardware"]:
        rows: list[Row] = [("cells", str(one["cells"])), ("measured", " to ".join(one["dates"]) or MISSING)]
        rows += [(name, ", ".join(one[name]) or MISSING) for name in ("torch", "python", "vitrail", "commit", "host")]
        cards.append((f"{one['device']}, mode {one['mode']}", rows))
    return cards
