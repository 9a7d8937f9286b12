"""Facts and page of a sweep: its cells, what each factor does, and what follows, in sentences.

- the facts are one JSON-able dictionary; the page, `report.html`, is one file that opens offline, made of them
- pictures also lie in `plots/`, as PNG and SVG
- what the cells cannot tell is named with the sweep that would tell it"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.disk import is_ours, remove, write_own
from vitrail.report.bench_cells import (
    STATUSES,
    WORDS,
    Cell,
    Study,
    group_by,
    name_spread,
    plural,
    read_bench,
    split_studies,
)
from vitrail.report.bench_effects import (
    FEWEST,
    find_batches,
    find_effects,
    find_interactions,
    find_ladders,
    find_scaling,
)
from vitrail.report.bench_plots import KINDS, draw_all
from vitrail.report.facts import SLOW_DATA, describe_time, strict
from vitrail.report.figures import embed_image, save_png, save_svg
from vitrail.report.modes import MODES, explain
from vitrail.report.page import Row, load_template, writing
from vitrail.report.units import MISSING, compact, number_of, percent, plain

_VERSIONS = ("torch", "python", "vitrail", "commit", "host")  # of an environment
_MOST_SENTENCES = 6  # on effects; the table holds the rest


def find_fastest(study: Study) -> list[Cell]:
    """Return the fastest cell for each kind of work, since samples of other patches or models do not compare."""
    works = group_by((cell for cell in study.cells if cell.ok), study.work)
    return [max(cells, key=lambda cell: cell.rate) for cells in works.values()]


def name_fastest(study: Study, cell: Cell, *, apart: bool) -> str:
    """Name the fastest cell of its kind of work; with the study, where there are several."""
    work = study.work(cell)
    return "Fastest" + (f" with {work}" if work else "") + (f" ({study.device}, {study.mode})" if apart else "")


def describe_hardware(study: Study) -> dict[str, Any]:
    """Return what the cells of a study ran on and with; a list of versions where they differ."""
    dates = sorted(str(cell.raw["date"]) for cell in study.cells if cell.raw.get("date"))
    found: dict[str, Any] = {**study.place, "cells": len(study.cells), "dates": dates[:1] + dates[1:][-1:]}
    for name in _VERSIONS:
        told = (cell.environment.get(name) for cell in study.cells)
        found[name] = list(dict.fromkeys(str(value) for value in told if value))
    return found


def find_warnings(cells: Sequence[Cell], studies: Sequence[Study]) -> list[str]:
    """Say what a reader should know before trusting the numbers."""
    found = []
    devices = list(dict.fromkeys(study.device for study in studies))
    if len(devices) > 1:
        found.append(f"The cells ran on {len(devices)} kinds of hardware ({', '.join(devices)}), which are kept apart.")
    for study in studies:
        hardware = describe_hardware(study)
        for name in ("torch", "vitrail"):
            if len(hardware[name]) > 1:
                versions = ", ".join(hardware[name])
                found.append(
                    f"Cells on {study.device} ran with several versions of {name} ({versions}): compare with care."
                )
    retried = [cell.name for cell in cells if cell.ok and cell.number("retries") > 0]
    if retried:
        found.append(
            f"The allocator had to free and try again in {plural(len(retried), 'cell')} "
            f"({_some(retried)}), at the edge of the memory: that costs speed."
        )
    slow = [c.name for c in cells if c.mode == "real" and _data_share(c) >= SLOW_DATA]
    if slow:
        top = max((c for c in cells if c.name in slow), key=_data_share)
        found.append(
            f"{percent(_data_share(top))} of the step waits for data in {top.name}, and {percent(SLOW_DATA)} or more "
            f"in {len(slow)} of {plural(len(cells), 'cell')}: measure with --mode syn what the model alone can do."
        )
    thin = [cell.name for cell in cells if cell.ok and len(cell.rates) < FEWEST]
    if thin:
        found.append(
            f"{plural(len(thin), 'measured cell')} with fewer than {FEWEST} windows: effects there have no interval."
        )
    return found


def _data_share(cell: Cell) -> float:
    """Return the share of the step that waits for data; 0 where it is not known."""
    share = cell.number("split", "data") / (cell.number("step_seconds", "median") or math.nan)
    return share if cell.ok and math.isfinite(share) else 0.0


def find_needed(facts: dict[str, Any]) -> list[str]:
    """Say what was left out, and which sweep would show it."""
    needs = {
        "effects": "Factor effects need two cells that differ in one key: --sweep parallel.compile=true,false.",
        "interactions": "Interactions need two factors swept together: two --sweep options in one call.",
        "ladders": "A ladder needs three configurations or more, each with one key changed against the one before.",
        "scaling": "Scaling and memory against ranks need one configuration on several numbers of ranks: "
        "--sweep ranks=1,2 or --sweep nodes=1,2,4.",
        "batches": "Curves over the batch need two batches of one configuration: --sweep data.batch=16/rank,32/rank.",
    }
    found = [sentence for name, sentence in needs.items() if not facts[name]]
    if facts["scaling"] and len({line["strategy"] for line in facts["scaling"]}) == 1:
        found.append("Strategies are compared where several were run: --sweep parallel.strategy=FULL_SHARD,DDP.")
    if facts["counts"]["ok"] and not any(math.isfinite(cell["mfu"]) for cell in facts["cells"]):
        found.append("There is no MFU: the peak rate of the device is not on record.")
    return found


def conclude(facts: dict[str, Any], studies: Sequence[Study]) -> Iterator[str]:
    """Yield the findings in sentences, the largest effects first."""
    apart = len(studies) > 1
    for study in studies:
        where = f" ({study.device}, {study.mode})" if apart else ""
        for cell in find_fastest(study):
            mfu = f", MFU {percent(cell.number('mfu'))}" if math.isfinite(cell.number("mfu")) else ""
            title = name_fastest(study, cell, apart=apart)
            yield f"{title}: {cell.name} with {compact(cell.rate)} samples/s{mfu}."
        mine = [e for e in facts["effects"] if (e["device"], e["mode"]) == (study.device, study.mode)]
        for effect in sorted(mine, key=lambda e: (e["changes_work"], -abs(e["percent"])))[:_MOST_SENTENCES]:
            yield describe_effect(effect, study) + f"{where}."
    for one in [one for one in facts["interactions"] if one["sure"]][:2]:
        ends = sorted(one["points"], key=lambda point: point["percent"])
        by = "" if one["by"] == "batch" else f"{one['by']}="
        least, most = (f"{signed(point['percent'])} at {by}{point['level']}" for point in (ends[0], ends[-1]))
        yield f"What {one['factor']}={one['to']} gives depends on {one['by']}: {least}, {most}."
    for kind in ("weak", "strong"):
        lines = [(line["label"], line["points"][-1]) for line in facts["scaling"] if line["kind"] == kind]
        lines.sort(key=lambda line: -line[1]["efficiency"])
        shares = [f"{label} {percent(last['efficiency'])} at {plural(last['gpus'], 'rank')}" for label, last in lines]
        if shares:
            yield f"{kind.capitalize()} scaling, share of the ideal: {_some(shares, 8)}."
    for ladder in facts["ladders"][:1]:
        yield describe_ladder([rung for rung in ladder["rungs"] if rung["status"] == "ok"])
    yield from (mode["sentence"] for mode in facts["modes"][:3])
    broken = {status: [cell["name"] for cell in facts["cells"] if cell["status"] == status] for status in STATUSES[1:]}
    total = plural(len(facts["cells"]), "cell")
    for status, names in broken.items():
        if names:
            yield f"{WORDS[status].capitalize()}: {len(names)} of {total} ({_some(names)})."


def describe_effect(effect: dict[str, Any], study: Study) -> str:
    """Say an effect: compile=true: +41 % (36 to 47 %) at batch 64, 3 pairs; memory -12 %."""
    unsure = ""
    if effect["low"] is not None:
        unsure = f" ({signed(effect['low'])} to {signed(effect['high'])})"
    where = ""
    if effect["batches"]:
        several = f"batch {effect['batches'][0]:g} to {effect['batches'][-1]:g}{study.unit}"
        where = f" at {several if len(effect['batches']) > 1 else study.batch(effect['batches'][0])}"
    pairs = ", 1 pair"
    if effect["pairs"] > 1:
        pairs = f", {effect['pairs']} pairs from {' to '.join(map(signed, effect['pair_percent']))}"
    text = (
        f"{effect['factor']}={effect['to']} against {effect['from']}: {signed(effect['percent'])}{unsure}{where}{pairs}"
    )
    if effect["own_percent"] is not None and abs(effect["own_percent"] - effect["percent"]) >= 1:
        text += f"; {signed(effect['own_percent'])} with each at its best batch"
    if effect["memory_percent"] is not None and abs(effect["memory_percent"]) >= 1:
        text += f"; memory {signed(effect['memory_percent'])}"
    if effect["changes_work"]:
        text += "; a sample is then other work, compare MFU"
    return text


def describe_ladder(rungs: Sequence[dict[str, Any]]) -> str:
    top = max(rungs, key=lambda rung: rung["relative"])
    if top["relative"] < 1.01:
        return f"Nothing on the ladder helped: no rung is even 1 % faster than the first that ran, {rungs[0]['name']}."
    return f"The ladder's best rung, {top['name']}, is {top['relative']:.2f} times as fast as the first that ran."


def signed(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.1f} %"


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def bench_summary(folder: str | Path) -> dict[str, Any]:
    """Read a bench folder and sum it up."""
    sweep, cells, notes = read_bench(folder)
    return strict(summarize_bench(Path(folder), sweep, split_studies(cells, sweep.get("tree")), notes))


def summarize_bench(folder: Path, sweep: dict[str, Any], studies: Sequence[Study], notes: list[str]) -> dict[str, Any]:
    """Make the summary of what was read."""
    cells = [cell for study in studies for cell in study.cells]
    names = {str(cell.raw["recipe"]) for cell in cells if cell.raw.get("recipe")}
    facts: dict[str, Any] = {
        "bench": folder.resolve().name,
        "dir": str(folder),
        "recipe": ", ".join(sorted(names)) or str(sweep.get("recipe") or "") or None,
        "open": [name for name in _names(sweep) if name not in {cell.name for cell in cells}],
        "counts": {status: sum(cell.status == status for cell in cells) for status in STATUSES},
        "hardware": [describe_hardware(study) for study in studies],
        "factors": [
            s.place | {"factor": f.name, "keys": list(f.keys), "levels": list(f.levels)}
            for s in studies
            for f in s.factors
        ],
        "fastest": [
            _describe_cell(cell) | {"title": name_fastest(study, cell, apart=len(studies) > 1)}
            for study in studies
            for cell in find_fastest(study)
        ],
        **{name: [one for study in studies for one in find(study)] for name, find in _FINDINGS.items()},
        "modes": list(_compare_modes(cells)),
        "cells": [_describe_cell(cell) for cell in cells],
    }
    facts["flags"] = [flag for line in facts["batches"] for flag in line["flags"]]
    facts["warnings"] = notes + find_warnings(cells, studies)
    facts["needed"] = find_needed(facts)
    facts["conclusions"] = list(conclude(facts, studies))
    return facts


_FINDINGS = {
    "effects": find_effects,
    "interactions": find_interactions,
    "ladders": find_ladders,
    "scaling": find_scaling,
    "batches": find_batches,
}
_TOLD = ("name", "status", "error", "device", "mode", "levels", "strategy", "gpus", "batch", "batch_per_rank")


def _describe_cell(cell: Cell) -> dict[str, Any]:
    return {
        **{name: getattr(cell, name) for name in _TOLD},
        "samples_per_s": cell.rate,
        "low": cell.low if cell.ok else None,
        "high": cell.high if cell.ok else None,
        "windows": len(cell.rates),
        "step_seconds": cell.number("step_seconds", "median"),
        "mfu": cell.number("mfu"),
        "hfu": cell.number("hfu"),
        "memory_gib": cell.memory,
        "reserved_gib": cell.number("memory", "reserved_gib"),
        "retries": cell.number("retries"),
        "notes": [str(note) for note in notes] if isinstance(notes := cell.raw.get("notes"), list) else [],
        "energy_j": cell.number("energy_j"),
    }


def _compare_modes(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield what the modes say together, for cells that were measured in several."""
    same: dict[Any, dict[str, Cell]] = {}
    for cell in cells:
        if cell.ok and cell.mode in MODES and _timed(cell) is not None:
            keys = {key: value for key, value in cell.keys.items() if key != "mode"}
            same.setdefault((json.dumps(keys, sort_keys=True, default=str), cell.device), {})[cell.mode] = cell
    for modes in same.values():
        if len(modes) < 2:
            continue
        first = next(modes[mode] for mode in MODES if mode in modes)
        text = explain([found for cell in modes.values() if (found := _timed(cell)) is not None])
        if text:
            sentence = f"{first.name}: {text}."
            yield {"name": first.name, "device": first.device, "modes": sorted(modes), "sentence": sentence}


def _timed(cell: Cell) -> dict[str, Any] | None:
    """Return what comparing modes needs of a result, with numbers alone; None where some are missing."""
    step = cell.number("step_seconds", "median")
    if not (0 < step < math.inf and math.isfinite(cell.gpus) and cell.windows):
        return None
    data = cell.number("split", "data")
    return {
        "mode": cell.mode,
        "status": cell.status,
        "gpus": int(cell.gpus),
        "windows": cell.windows,
        "step_seconds": {"median": step},
        "samples_per_s": cell.rate,
        "split": {"data": data if math.isfinite(data) else None},
    }


def _names(sweep: dict[str, Any]) -> list[str]:
    names = sweep.get("cells")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def write_bench_report(folder: str | Path, *, now: float | None = None) -> Path:
    """Write `report.html` and `plots/` into a bench folder, however far the sweep came, and return the page's path."""
    sweep, cells, notes = read_bench(folder)
    path, plots = Path(folder), Path(folder, "plots")
    studies = split_studies(cells, sweep.get("tree"))
    facts = summarize_bench(path, sweep, studies, notes)
    for place in (path, plots):
        disk.sweep(place)
    drawn = draw_all(facts, studies, facts["warnings"])
    pictures = []
    with writing(path / "report.html"):
        for picture in drawn:
            svg = save_svg(picture.figure).encode()
            write_own(plots / f"{picture.name}.svg", svg, parents=True)
            write_own(plots / f"{picture.name}.png", save_png(picture.figure))
            small = None if picture.narrow is None else embed_image(save_svg(picture.narrow).encode())
            shown = {"title": picture.title, "caption": picture.caption, "uri": embed_image(svg), "narrow": small}
            pictures.append(shown)
        _clear(plots, {picture.name for picture in drawn})
        found = _gather(facts, time.time() if now is None else now)
        html = load_template("bench.html").render(found, pictures=pictures)
        return write_own(path / "report.html", html.encode("utf-8", errors="replace"))


def _clear(folder: Path, kept: set[str]) -> None:
    """Remove pictures of an earlier report that this one does not have: they show fewer cells."""
    for path in folder.glob("*.svg"):
        twin = path.with_suffix(".png")
        if path.stem not in kept and path.stem.startswith(KINDS) and is_ours(path) and is_ours(twin):
            remove(path, inside=folder)
            remove(twin, inside=folder)


def _gather(facts: dict[str, Any], now: float) -> dict[str, Any]:
    """Gather everything that the template shows but the pictures."""
    effect_heads, effects = _list_effects(facts)
    cell_heads, cells = _list_cells(facts)
    return {
        "facts": facts,
        "name": facts["bench"],
        "status": "stopped" if facts["open"] or facts["counts"]["failed"] else "done",
        "pill": facts["recipe"],
        "headline": _state_headline(facts),
        "dir": facts["dir"],
        "written": describe_time(now),
        "tiles": _list_tiles(facts),
        "warnings": facts["warnings"] + facts["flags"],
        "effect_heads": effect_heads,
        "effects": effects,
        "cell_heads": cell_heads,
        "cells": cells,
        "hardware": _list_hardware(facts),
    }


def _state_headline(facts: dict[str, Any]) -> str:
    counts, total = facts["counts"], len(facts["cells"]) + len(facts["open"])
    if not facts["cells"]:
        return "No cell has a result yet"
    parts = [f"{counts['ok']} of {plural(total, 'cell')} measured"]
    parts += [f"{counts[status]} {WORDS[status]}" for status in ("oom", "failed", "skipped") if counts[status]]
    return ", ".join(parts + [f"{len(facts['open'])} not run yet"] * bool(facts["open"]))


def _list_tiles(facts: dict[str, Any]) -> list[Row]:
    """List the few numbers to see first: label, value, remark."""
    tiles: list[Row] = [
        (f"{best['title']}, samples/s", compact(best["samples_per_s"]), best["name"]) for best in facts["fastest"][:3]
    ]
    most = (("Highest MFU", "mfu", percent), ("Most memory, GiB", "memory_gib", partial(plain, digits=3)))
    for label, key, show in most:
        known = [cell for cell in facts["cells"] if cell["status"] == "ok" and number_of(cell[key]) > 0]
        if known:
            top = max(known, key=lambda cell: cell[key])
            tiles.append((label, show(top[key]), top["name"]))
    return tiles


def _tabulate(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return heads and rows, without columns that say nothing."""
    idle = ("", MISSING, ("", "remark"))
    heads = [head for head in rows[0] if any(row[head] not in idle for row in rows)] if rows else []
    return heads, [[row[head] for head in heads] for row in rows]


def _list_effects(facts: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    apart = len(facts["hardware"]) > 1
    rows = [
        {
            "factor": f"{effect['factor']}: {effect['from']} → {effect['to']}",
            "samples/s": signed(effect["percent"]),
            "interval": MISSING if effect["low"] is None else f"{signed(effect['low'])} to {signed(effect['high'])}",
            "pairs": str(effect["pairs"]),
            "least to most of the pairs": " to ".join(map(signed, effect["pair_percent"] * (effect["pairs"] > 1)))
            or MISSING,
            "at batch": ", ".join(f"{size:g}" for size in effect["batches"]) or MISSING,
            "each at its best batch": signed(effect["own_percent"]),
            "memory": signed(effect["memory_percent"]),
            "note": "other work a sample" if effect["changes_work"] else MISSING,
            "on": f"{effect['device']}, {effect['mode']}" if apart else "",
        }
        for effect in facts["effects"]
    ]
    return _tabulate(rows)


def _list_cells(facts: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """List heads and rows; of a cell that was not measured what was asked for alone."""
    spread = name_spread(cell["windows"] for cell in facts["cells"] if cell["status"] == "ok")
    apart = len(facts["hardware"]) > 1
    rows = []
    for cell in facts["cells"]:
        ok = cell["status"] == "ok"
        numbers = {
            "samples/s": compact(cell["samples_per_s"]),
            spread: f"{compact(cell['low'])} to {compact(cell['high'])}",
            "step, ms": plain(1000 * number_of(cell["step_seconds"]), 3),
            "MFU": percent(cell["mfu"]),
            "HFU": percent(cell["hfu"]),
            "peak, GiB": plain(cell["memory_gib"], 3),
            "reserved, GiB": plain(cell["reserved_gib"], 3),
            "J a sample": plain(cell["energy_j"], 3),
        }
        rows.append(
            {
                "cell": (cell["name"], "cell"),
                "status": (WORDS[cell["status"]], f"state {cell['status']}"),
                "on": cell["device"] if apart else "",
                "mode": cell["mode"] if apart else "",
                **{head: words if ok else "" for head, words in numbers.items()},
                "batch": plain(cell["batch"]),
                "ranks": plain(cell["gpus"]),
                "remark": ("; ".join(filter(None, [cell["error"], *cell["notes"]]))[:400], "remark"),
            }
        )
    return _tabulate(rows)


def _list_hardware(facts: dict[str, Any]) -> list[tuple[str, list[Row]]]:
    cards = []
    for one in facts["hardware"]:
        rows: list[Row] = [("cells", str(one["cells"])), ("measured", " to ".join(one["dates"]) or MISSING)]
        rows += [(name, ", ".join(one[name]) or MISSING) for name in _VERSIONS]
        cards.append((f"{one['device']}, mode {one['mode']}", rows))
    return cards
