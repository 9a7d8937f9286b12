"""What a sweep has shown, in sentences: conclusions, warnings, and what it would take to show more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.report.bench_cells import STATUSES, WORDS, Cell, plural
from vitrail.report.bench_effects import FEWEST
from vitrail.report.bench_study import Study
from vitrail.report.units import compact, percent

_SLOW_DATA = 0.2  # share of the step from which waiting for data is told
_MOST_SENTENCES = 6  # on effects; the table holds the rest


def find_fastest(study: Study) -> list[Cell]:
    """The fastest cell for each kind of work, since samples of other patches or models do not compare."""
    by_work: dict[str, Cell] = {}
    for cell in study.cells:
        best = by_work.get(study.work(cell))
        if cell.ok and (best is None or cell.rate > best.rate):
            by_work[study.work(cell)] = cell
    return list(by_work.values())


def describe_hardware(study: Study) -> dict[str, Any]:
    """What the cells of a study ran on and with; a list of versions where they differ."""
    found: dict[str, list[str]] = {name: [] for name in ("torch", "python", "vitrail", "commit", "host")}
    for cell in study.cells:
        environment = cell.raw.get("environment")
        tree: dict[str, Any] = environment if isinstance(environment, dict) else {}
        packages = tree.get("packages")
        for name, values in found.items():
            value = tree.get(name) or (packages.get(name) if isinstance(packages, dict) else None)
            if value and str(value) not in values:
                values.append(str(value))
    dates = sorted(str(cell.raw["date"]) for cell in study.cells if cell.raw.get("date"))
    return {
        "device": study.device,
        "mode": study.mode,
        "cells": len(study.cells),
        "dates": dates[:1] + dates[1:][-1:],
    } | found


def find_warnings(cells: Sequence[Cell], studies: Sequence[Study]) -> list[str]:
    """What a reader should know before trusting the numbers."""
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
    slow = [c.name for c in cells if c.mode == "real" and _data_share(c) >= _SLOW_DATA]
    if slow:
        top = max((c for c in cells if c.name in slow), key=_data_share)
        found.append(
            f"{percent(_data_share(top))} of the step waits for data in {top.name}, and {percent(_SLOW_DATA)} or more "
            f"in {len(slow)} of {plural(len(cells), 'cell')}: measure with --mode syn what the model alone can do."
        )
    thin = [cell.name for cell in cells if cell.ok and len(cell.rates) < FEWEST]
    if thin:
        found.append(
            f"{plural(len(thin), 'measured cell')} with fewer than {FEWEST} windows: effects there have no interval."
        )
    return found


def _data_share(cell: Cell) -> float:
    """Share of the step that waits for data; 0 where it is not known."""
    share = cell.number("split", "data") / (cell.number("step_seconds", "median") or math.nan)
    return share if cell.ok and math.isfinite(share) else 0.0


def find_needed(facts: dict[str, Any]) -> list[str]:
    """What was left out, and the sweep that would show it."""
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
    """The findings in sentences, the largest effects first."""
    apart = len(studies) > 1
    for study in studies:
        where = f" ({study.device}, {study.mode})" if apart else ""
        for cell in find_fastest(study):
            mfu = f", MFU {percent(cell.number('mfu'))}" if math.isfinite(cell.number("mfu")) else ""
            yield f"Fastest{where}: {cell.name} with {compact(cell.rate)} samples/s{mfu}."
        mine = [e for e in facts["effects"] if (e["device"], e["mode"]) == (study.device, study.mode)]
        for effect in sorted(mine, key=lambda e: (e["changes_work"], -abs(e["percent"])))[:_MOST_SENTENCES]:
            yield describe_effect(effect, study) + f"{where}."
    for one in [one for one in facts["interactions"] if one["sure"]][:2]:
        ends = sorted(one["points"], key=lambda point: point["percent"])
        least, most = (f"{signed(point['percent'])} at {one['by']}={point['level']}" for point in (ends[0], ends[-1]))
        if one["by"] == "batch":
            least, most = (f"{signed(point['percent'])} at {point['level']}" for point in (ends[0], ends[-1]))
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
    """compile=true: +41 % (36 to 47 %) at batch 64, 3 pairs; memory -12 %."""
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
    """What the rungs that ran have brought."""
    top = max(rungs, key=lambda rung: rung["relative"])
    if top["relative"] < 1.01:
        return f"Nothing on the ladder helped: no rung is even 1 % faster than the first that ran, {rungs[0]['name']}."
    return f"The ladder's best rung, {top['name']}, is {top['relative']:.2f} times as fast as the first that ran."


def signed(value: float) -> str:
    return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.1f} %"


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
