"""The facts of a sweep as one JSON-able dictionary: its cells, what each factor does, and what follows, in sentences.

What the cells cannot tell is named with the sweep that would tell it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitrail.report.bench_cells import STATUSES, Cell, read_bench
from vitrail.report.bench_curves import find_batches, find_ladders, find_scaling
from vitrail.report.bench_effects import find_effects, find_interactions
from vitrail.report.bench_study import Study, split_studies
from vitrail.report.bench_words import conclude, describe_hardware, find_fastest, find_needed, find_warnings
from vitrail.report.facts import strict
from vitrail.report.units import number_of

MODES = ("real", "syn", "io", "compute")


def bench_summary(folder: str | Path) -> dict[str, Any]:
    """Read a bench folder and sum it up."""
    sweep, cells, notes = read_bench(folder)
    return strict(summarize_bench(Path(folder), sweep, split_studies(cells, sweep.get("tree")), notes))


def summarize_bench(folder: Path, sweep: dict[str, Any], studies: Sequence[Study], notes: list[str]) -> dict[str, Any]:
    """The summary from what was read."""
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
            {"device": s.device, "mode": s.mode, "factor": f.name, "keys": list(f.keys), "levels": list(f.levels)}
            for s in studies
            for f in s.factors
        ],
        "fastest": [_describe_cell(cell) for study in studies for cell in find_fastest(study)],
        "effects": [one for study in studies for one in find_effects(study)],
        "interactions": [one for study in studies for one in find_interactions(study)],
        "ladders": [one for study in studies for one in find_ladders(study)],
        "scaling": [one for study in studies for one in find_scaling(study)],
        "batches": [one for study in studies for one in find_batches(study)],
        "modes": list(_compare_modes(cells)),
        "cells": [_describe_cell(cell) for cell in cells],
    }
    facts["flags"] = [flag for line in facts["batches"] for flag in line["flags"]]
    facts["warnings"] = notes + find_warnings(cells, studies)
    facts["needed"] = find_needed(facts)
    facts["conclusions"] = list(conclude(facts, studies))
    return facts


def _describe_cell(cell: Cell) -> dict[str, Any]:
    return {
        "name": cell.name,
        "status": cell.status,
        "error": cell.error,
        "device": cell.device,
        "mode": cell.mode,
        "levels": cell.levels,
        "strategy": cell.strategy,
        "gpus": cell.gpus,
        "batch": cell.batch,
        "batch_per_rank": cell.batch_per_rank,
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
    """What the modes say together, for cells that were measured in several."""
    same: dict[Any, dict[str, Cell]] = {}
    for cell in cells:
        if cell.ok and cell.mode in MODES and _timed(cell) is not None:
            keys = {key: value for key, value in cell.keys.items() if key != "mode"}
            same.setdefault((json.dumps(keys, sort_keys=True, default=str), cell.device), {})[cell.mode] = cell
    for modes in same.values():
        if len(modes) < 2:
            continue
        from vitrail.bench.explain import explain  # only here: it brings PyTorch

        first = next(modes[mode] for mode in MODES if mode in modes)
        text = explain([found for cell in modes.values() if (found := _timed(cell)) is not None])
        if text:
            sentence = f"{first.name}: {text}."
            yield {"name": first.name, "device": first.device, "modes": sorted(modes), "sentence": sentence}


def _timed(cell: Cell) -> dict[str, Any] | None:
    """What comparing modes needs of a result, with numbers alone; None where some are missing."""
    step, windows = cell.number("step_seconds", "median"), cell.raw.get("windows")
    seconds = [s for s in map(number_of, windows if isinstance(windows, list) else []) if 0 < s < math.inf]
    if not (0 < step < math.inf and math.isfinite(cell.gpus) and seconds):
        return None
    data = cell.number("split", "data")
    return {
        "mode": cell.mode,
        "status": cell.status,
        "gpus": int(cell.gpus),
        "windows": seconds,
        "step_seconds": {"median": step},
        "samples_per_s": cell.rate,
        "split": {"data": data if math.isfinite(data) else None},
    }


def _names(sweep: dict[str, Any]) -> list[str]:
    """The cells that were asked for."""
    names = sweep.get("cells")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
