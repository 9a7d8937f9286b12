"""Lines through the cells of a study: over ranks, over batches, and up the ladder of what was switched on.

- Scaling is weak where every rank keeps its batch and strong where all ranks share one; the ideal starts at the fewest.
- A curve over the batch that falls is told, if the fall is outside the spread of both cells.
- A ladder changes one key a rung and never takes one back, so that each rung has one cause; a rung stands at its own
  best batch, because a larger batch is what some rungs are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from vitrail.report.bench_cells import Cell, plural
from vitrail.report.bench_effects import rung_of
from vitrail.report.bench_study import Factor, Study
from vitrail.report.units import compact

_MOST_PATHS = 5000  # looked at for a ladder


def find_scaling(study: Study) -> list[dict[str, Any]]:
    """One line for each configuration that was run on several numbers of ranks."""
    lines = []
    for cells in _split(study.cells, lambda cell: cell.rest("gpus")):
        cells = [cell for cell in cells if cell.gpus > 0]
        for kind, unit in (("weak", "batch_per_rank"), ("strong", "batch")):
            runs = [run for run in _split(cells, lambda cell, unit=unit: getattr(cell, unit)) if _counts(run) > 1]
            if runs:  # most ranks first, then the largest batch
                best = max(runs, key=lambda run: (_counts(run), getattr(run[0], unit)))
                lines.append(_describe_scaling(study, kind, getattr(best[0], unit), best))
                break
    return sorted(lines, key=lambda line: (line["kind"] != "weak", line["strategy"]))


def _counts(cells: Iterable[Cell]) -> int:
    return len({cell.gpus for cell in cells if cell.ok})


def _describe_scaling(study: Study, kind: str, batch: float, run: Sequence[Cell]) -> dict[str, Any]:
    fastest: dict[float, Cell] = {}  # so many ranks may lie on few nodes or on many
    for cell in sorted((cell for cell in run if cell.ok), key=lambda cell: cell.rate):
        fastest[cell.gpus] = cell
    cells = [fastest[gpus] for gpus in sorted(fastest)]
    first = cells[0]
    broken = {cell.gpus: cell for cell in run if not cell.ok and cell.gpus not in fastest}
    return {
        "device": study.device,
        "mode": study.mode,
        "kind": kind,
        "strategy": first.strategy,
        "label": _label(first),
        "batch": batch,
        "points": [
            {
                "gpus": cell.gpus,
                "samples_per_s": cell.rate,
                "low": cell.low,
                "high": cell.high,
                "efficiency": (cell.rate / cell.gpus) / (first.rate / first.gpus),
                "memory_gib": cell.memory,
                "name": cell.name,
            }
            for cell in cells
        ],
        "broken": [{"gpus": gpus, "status": cell.status} for gpus, cell in sorted(broken.items())],
    }


def _label(cell: Cell) -> str:
    """The strategy, and what else was chosen."""
    levels = [f"{name}={level}" for name, level in cell.levels.items() if name not in ("strategy", "group")]
    return ", ".join([cell.strategy or "one copy", *levels])


def find_batches(study: Study) -> list[dict[str, Any]]:
    """Throughput, MFU and memory over the batch, one line for each configuration that ran with several."""
    if not study.batched:
        return []
    lines = []
    for cells in _split(study.cells, lambda cell: cell.rest()):
        cells = sorted((c for c in cells if math.isfinite(c.size)), key=lambda cell: cell.size)
        done = [cell for cell in cells if cell.ok]
        if len({cell.size for cell in done}) < 2:
            continue
        label = study.describe(done[0])
        lines.append(
            {
                "device": study.device,
                "mode": study.mode,
                "label": label,
                "short": study.describe(done[0], work=False),
                "work": study.work(done[0]),
                "points": [
                    {
                        "batch": cell.size,
                        "samples_per_s": cell.rate,
                        "low": cell.low,
                        "high": cell.high,
                        "mfu": cell.number("mfu"),
                        "memory_gib": cell.memory,
                        "falls": before is not None and _falls(before, cell),
                        "name": cell.name,
                    }
                    for before, cell in pairwise([None, *done])
                    if cell is not None
                ],
                "broken": [{"batch": cell.size, "status": cell.status} for cell in cells if not cell.ok],
                "flags": [flag for a, b in pairwise(done) for flag in _find_falls(study, label, a, b)],
            }
        )
    return lines


def _falls(a: Cell, b: Cell) -> bool:
    """Whether the quartiles of the second lie below those of the first."""
    return b.high < a.low


def _find_falls(study: Study, label: str, a: Cell, b: Cell) -> Iterable[str]:
    """What goes down from one batch to the next, in words."""
    where = f"between {study.batch(a.size)} and {study.batch(b.size)}"
    if _falls(a, b):
        rates = f"from {compact(a.rate)} to {compact(b.rate)} samples/s"
        yield f"{label}: throughput falls {rates} {where}, outside the spread."
    if b.memory < 0.99 * a.memory:
        yield f"{label}: peak memory falls from {a.memory:.3g} to {b.memory:.3g} GiB {where}."


def find_ladders(study: Study) -> list[dict[str, Any]]:
    """For each model and number of ranks the longest chain of configurations, if it has three rungs or more."""
    factors = sorted((factor for factor in study.factors if not factor.changes_work), key=rung_of)
    ladders = []
    for cells in _split(study.cells, lambda cell: cell.rest(*(factor.name for factor in factors))):
        rungs: dict[Any, list[Cell]] = {}
        for cell in cells:
            rungs.setdefault(tuple(cell.levels[factor.name] for factor in factors), []).append(cell)
        tops = [_top(rungs[place]) for place in _climb(factors, rungs)]
        if len(tops) >= 3 and sum(cell.ok for cell in tops) > 1:
            many = len({cell.gpus for cell in study.cells}) > 1
            label = ", ".join(filter(None, [study.work(tops[0]), plural(tops[0].gpus, "rank") if many else ""]))
            ladders.append(
                {"device": study.device, "mode": study.mode, "label": label, "rungs": _list_rungs(study, tops)}
            )
    return ladders


def _list_rungs(study: Study, tops: Sequence[Cell]) -> list[dict[str, Any]]:
    first = next(cell for cell in tops if cell.ok)
    shown = {f.name for f in study.factors if not f.changes_work}
    rungs = []
    for place, cell in enumerate(tops):
        changed = [n for n in cell.levels if n in shown and (place == 0 or tops[place - 1].levels[n] != cell.levels[n])]
        rungs.append(
            {
                "name": cell.name,
                "added": ", ".join(f"{name}={cell.levels[name]}" for name in changed),
                "status": cell.status,
                "samples_per_s": cell.rate,
                "relative": cell.rate / first.rate,
                "low": cell.low / first.rate,
                "high": cell.high / first.rate,
                "batch": cell.size if study.batched else None,
            }
        )
    return rungs


def _top(rung: Sequence[Cell]) -> Cell:
    """The fastest cell of a rung; where none ran, the one that tells most: out of memory before failed and skipped."""
    order = {"oom": 0, "failed": 1, "skipped": 2}
    done = [cell for cell in rung if cell.ok]
    return max(done, key=lambda cell: cell.rate) if done else min(rung, key=lambda cell: order[cell.status])


def _climb(factors: Sequence[Factor], rungs: dict[Any, list[Cell]]) -> list[Any]:
    """The longest path that changes one factor a step, each at most once.

    Of equals the one whose foot is nearest to all first levels, with the factors in their order.
    """
    best: list[Any] = []
    looked = 0

    def walk(path: list[Any], left: tuple[int, ...]) -> None:
        nonlocal best, looked
        looked += 1
        if len(path) > len(best):
            best = list(path)
        for index in left:
            steps = [place for place in rungs if _differ(path[-1], place) == [index]]
            for place in sorted(steps, key=lambda place: -_top(rungs[place]).rate if _top(rungs[place]).ok else 0.0):
                if len(best) == len(factors) + 1 or looked > _MOST_PATHS:
                    return
                walk([*path, place], tuple(i for i in left if i != index))

    for start in sorted(rungs, key=lambda place: sum(p != f.levels[0] for p, f in zip(place, factors, strict=True))):
        if len(best) < len(factors) + 1 and looked <= _MOST_PATHS:
            walk([start], tuple(range(len(factors))))
    return best


def _differ(a: Sequence[str], b: Sequence[str]) -> list[int]:
    return [index for index, (one, two) in enumerate(zip(a, b, strict=True)) if one != two]


def _split(cells: Iterable[Cell], by: Any) -> list[list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(by(cell), []).append(cell)
    return list(groups.values())
