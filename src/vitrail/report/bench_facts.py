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
    """What share of the step each mode leaves out, for cells that were measured in several."""
    same: dict[Any, dict[str, Cell]] = {}
    for cell in cells:
        if cell.ok:
            keys = {key: value for key, value in cell.keys.items() if key != "mode"}
            same.setdefault((json.dumps(keys, sort_keys=True, default=str), cell.device), {})[cell.mode] = cell
    for modes in same.values():
        for slow, quick, words in (
            ("real", "syn", "of the step waits for data"),
            ("syn", "compute", "of the step is communication that nothing hides, and waiting for other ranks"),
        ):
            seconds = [modes[m].number("step_seconds", "median") if m in modes else math.nan for m in (slow, quick)]
            if seconds[0] > 0 and seconds[1] > 0:
                share = max(0.0, 1 - seconds[1] / seconds[0])
                name = modes[slow].name
                text = f"{name}: {100 * share:.0f} % {words} ({slow} against {quick})."
                known = {"name": name, "device": modes[slow].device, "slow": slow, "quick": quick}
                yield known | {"share": share, "sentence": text}


def _names(sweep: dict[str, Any]) -> list[str]:
    """The cells that were asked for."""
    names = sweep.get("cells")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
