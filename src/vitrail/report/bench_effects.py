"""Effects of factors on the speed, all else equal, and lines through the cells of a study: over ranks, batches, rungs.

- two levels are compared in pairs of cells that differ in nothing else, at the largest batch that both ran; the effect
  is the geometric mean of the pairs' ratios
- the interval holds 95 in 100 bootstrap samples of the windows of every cell: what measuring alone leaves open. How
  much the pairs differ from each other is told apart from it
- a larger batch may be what a factor is for, checkpointing for one, so the effect with each level at its own best batch
  stands beside
- scaling is weak where every rank keeps its batch and strong where all ranks share one; the ideal starts at the fewest
- a curve over the batch that falls is told, if the fall is outside the spread of both cells
- a ladder changes one key a rung and never takes one back, so that each rung has one cause; a rung stands at its own
  best batch, because a larger batch is what some rungs are for"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_cells import Cell, Factor, Study, group_by, plural
from vitrail.report.units import compact

if TYPE_CHECKING:
    import numpy as np


Pair = tuple[Cell, Cell]
Sides = tuple[dict[float, Cell], dict[float, Cell]]  # of two levels, the cells by batch
_LADDER = ("strategy", "wrap", "compute", "prefetch", "recompute", "compile")  # in the order in which one adds them
_DRAWS = 1000
FEWEST = 5  # windows of a cell that can be drawn from: from 3 the interval is too narrow, and alarms for nothing


def find_effects(study: Study) -> list[dict[str, Any]]:
    """Return the percent change of samples/s for each level of each factor against the first that it has pairs with."""
    effects = []
    for factor in study.factors:
        for level in factor.levels[1:]:
            base = _find_base(study, factor, level)
            if base is not None:
                effects.append(_describe(study, factor, base, level))
    return effects


def _find_base(study: Study, factor: Factor, level: str) -> str | None:
    """Return the first level to compare with: an optional key may be null just where others cannot be set."""
    earlier = factor.levels[: factor.levels.index(level)]
    return next((base for base in earlier if any(match(study, factor, base, level))), None)


def match(study: Study, factor: Factor, base: str, level: str) -> Iterator[Pair]:
    """Yield cells that differ in this factor alone, a pair for each setting of the others, at their largest batch."""
    for sides in _settings(study, factor, base, level).values():
        common = set(sides[0]) & set(sides[1])
        if common:
            yield sides[0][max(common)], sides[1][max(common)]


def _settings(study: Study, factor: Factor, base: str, level: str) -> dict[Any, Sides]:
    """Return the measured cells of both levels, by setting of the other factors."""
    table: dict[Any, Sides] = {}
    for cell in study.cells:
        if cell.ok and cell.levels[factor.name] in (base, level):
            sides = table.setdefault(cell.rest(factor.name), ({}, {}))
            sides[cell.levels[factor.name] == level][cell.size] = cell
    return table


def _describe(study: Study, factor: Factor, base: str, level: str) -> dict[str, Any]:
    pairs = list(match(study, factor, base, level))
    low, high = interval(pairs)
    single = [percent(math.log(b.rate / a.rate)) for a, b in pairs]
    memory = [math.log(b.memory / a.memory) for a, b in pairs if a.memory > 0 and b.memory > 0]
    own = [
        math.log(max(c.rate for c in second.values()) / max(c.rate for c in first.values()))
        for first, second in _settings(study, factor, base, level).values()
        if first and second
    ]
    return {
        **study.place,
        "factor": factor.name,
        "keys": list(factor.keys),
        "from": base,
        "to": level,
        "percent": percent(fmean(math.log(b.rate / a.rate) for a, b in pairs)),
        "low": low,
        "high": high,
        "sure": low is not None and high is not None and (low > 0 or high < 0),
        "pairs": len(pairs),
        "pair_percent": [min(single), max(single)],
        "batches": sorted({a.size for a, _ in pairs}) if study.batched else [],
        "own_percent": percent(fmean(own)) if study.batched else None,
        "memory_percent": percent(fmean(memory)) if memory else None,
        "changes_work": factor.changes_work,
        "cells": [[a.name, b.name] for a, b in pairs],
    }


def percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def interval(pairs: Sequence[Pair]) -> tuple[float, float] | tuple[None, None]:
    """Return bounds of the mean effect in percent; None where a cell has too few windows."""
    drawn = _draw(pairs)
    if drawn is None:
        return None, None
    import numpy as np

    low, high = np.percentile(drawn, [2.5, 97.5])
    return percent(low), percent(high)


def _draw(pairs: Sequence[Pair]) -> np.ndarray | None:
    """Draw bootstrap samples of the mean log ratio of the pairs' medians."""
    if any(len(cell.rates) < FEWEST for pair in pairs for cell in pair):
        return None
    drawn = [_draw_median(b) - _draw_median(a) for a, b in pairs]
    return sum(drawn[1:], drawn[0]) / len(pairs)


def _draw_median(cell: Cell) -> np.ndarray:
    import numpy as np

    seed = list(cell.name.encode())  # a cell in two pairs varies alike in both; two cells vary apart
    chosen = np.random.default_rng(seed).integers(len(cell.rates), size=(_DRAWS, len(cell.rates)))
    return np.median(np.log(cell.rates)[chosen], axis=1)


def find_interactions(study: Study) -> list[dict[str, Any]]:
    """Return, for each two factors, the effect of one at each level of the other; the batch too is such another."""
    ordered = sorted(study.factors, key=lambda factor: (factor.changes_work, -rung_of(factor)))
    found = []
    for place, factor in enumerate(ordered):
        if factor.changes_work:  # its own effect is known beforehand, so others depend on it and not the other way
            break
        for level in factor.levels[1:]:
            others: list[Factor | None] = [*ordered[place + 1 :], *([None] if study.batched else [])]
            found += [one for other in others if (one := _interact(study, factor, level, other))]
    return sorted(found, key=lambda one: (not one["sure"], -one["difference"]))


def _interact(study: Study, factor: Factor, level: str, other: Factor | None) -> dict[str, Any] | None:
    """Return a level's effect at each level of another factor, over the settings and batches that all share."""
    base = _find_base(study, factor, level)
    if base is None:
        return None
    table: dict[Any, dict[Any, Pair]] = {}  # level of the other -> setting and batch -> pair
    for (first, second), rest in ((sides, rest) for rest, sides in _settings(study, factor, base, level).items()):
        for size in set(first) & set(second):
            pair = first[size], second[size]
            if other is None:
                table.setdefault(size, {})[rest] = pair
            else:
                place = (pair[0].rest(factor.name, other.name), size)
                table.setdefault(pair[0].levels[other.name], {})[place] = pair
    while len(table) > 1 and not set.intersection(*(set(pairs) for pairs in table.values())):
        del table[min(table, key=lambda key: len(table[key]))]  # the level that was tried in the fewest settings
    if len(table) < 2:
        return None
    shared = set.intersection(*(set(pairs) for pairs in table.values()))
    if other is not None:  # of each setting the largest batch
        largest = {rest: max(size for place, size in shared if place == rest) for rest, _ in shared}
        shared = set(largest.items())
    order: list[Any] = sorted(table) if other is None else [name for name in other.levels if name in table]
    places = sorted(shared, key=repr)
    points: list[dict[str, Any]] = []
    for name in order:
        pairs = [table[name][place] for place in places]
        low, high = interval(pairs)
        mean = percent(fmean(math.log(b.rate / a.rate) for a, b in pairs))
        points.append(
            {"level": study.batch(name) if other is None else name, "percent": mean, "low": low, "high": high}
        )
    least, most = (pick(range(len(order)), key=lambda i: points[i]["percent"]) for pick in (min, max))
    ends = [_draw([table[order[i]][place] for place in places]) for i in (least, most)]
    # More than 975 in 1,000 samples agree on which is larger.
    sure = ends[0] is not None and ends[1] is not None and float((ends[1] > ends[0]).mean()) > 0.975
    return {
        **study.place,
        "factor": factor.name,
        "from": base,
        "to": level,
        "by": "batch" if other is None else other.name,
        "points": points,
        "difference": points[most]["percent"] - points[least]["percent"],  # percent points
        "sure": sure,
        "settings": len(places),
    }


def rung_of(factor: Factor) -> int:
    """Return the place of a factor on a ladder; what has no usual place comes last."""
    parts = {part for key in factor.keys for part in key.split(".")[1:2]}
    return min((place for place, name in enumerate(_LADDER) if name in parts), default=len(_LADDER))


_MOST_PATHS = 5000  # looked at for a ladder


def find_scaling(study: Study) -> list[dict[str, Any]]:
    """Return a line for each configuration that was run on several numbers of ranks."""
    lines = []
    for cells in group_by(study.cells, lambda cell: cell.rest("gpus")).values():
        cells = [cell for cell in cells if cell.gpus > 0]
        for kind, unit in (("weak", "batch_per_rank"), ("strong", "batch")):
            runs = [run for run in group_by(cells, attrgetter(unit)).values() if _counts(run) > 1]
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
        **study.place,
        "kind": kind,
        "strategy": first.strategy,
        "label": _label(first),
        "batch": batch,
        "points": [
            cell.point | {"gpus": cell.gpus, "efficiency": (cell.rate / cell.gpus) / (first.rate / first.gpus)}
            for cell in cells
        ],
        "broken": [{"gpus": gpus, "status": cell.status} for gpus, cell in sorted(broken.items())],
    }


def _label(cell: Cell) -> str:
    levels = [f"{name}={level}" for name, level in cell.levels.items() if name not in ("strategy", "group")]
    return ", ".join([cell.strategy or "one copy", *levels])


def find_batches(study: Study) -> list[dict[str, Any]]:
    """Return throughput, MFU and memory over the batch, a line for each configuration that ran with several."""
    if not study.batched:
        return []
    lines = []
    for cells in group_by(study.cells, Cell.rest).values():
        cells = sorted((c for c in cells if math.isfinite(c.size)), key=lambda cell: cell.size)
        done = [cell for cell in cells if cell.ok]
        if len({cell.size for cell in done}) < 2:
            continue
        label = study.describe(done[0])
        lines.append(
            {
                **study.place,
                "label": label,
                "short": study.describe(done[0], work=False),
                "work": study.work(done[0]),
                "points": [
                    cell.point | {"batch": cell.size, "mfu": cell.number("mfu"), "falls": falls}
                    for cell, falls in zip(done, [False, *(_falls(a, b) for a, b in pairwise(done))], strict=True)
                ],
                "broken": [{"batch": cell.size, "status": cell.status} for cell in cells if not cell.ok],
                "flags": [flag for a, b in pairwise(done) for flag in _find_falls(study, label, a, b)],
            }
        )
    return lines


def _falls(a: Cell, b: Cell) -> bool:
    """Return whether the quartiles of the second lie below those of the first."""
    return b.high < a.low


def _find_falls(study: Study, label: str, a: Cell, b: Cell) -> Iterable[str]:
    """Say what goes down from one batch to the next."""
    where = f"between {study.batch(a.size)} and {study.batch(b.size)}"
    if _falls(a, b):
        rates = f"from {compact(a.rate)} to {compact(b.rate)} samples/s"
        yield f"{label}: throughput falls {rates} {where}, outside the spread."
    if b.memory < 0.99 * a.memory:
        yield f"{label}: peak memory falls from {a.memory:.3g} to {b.memory:.3g} GiB {where}."


def find_ladders(study: Study) -> list[dict[str, Any]]:
    """Return the longest chain of configurations of each model and number of ranks, if it has three rungs or more."""
    factors = sorted((factor for factor in study.factors if not factor.changes_work), key=rung_of)
    ladders = []
    for cells in group_by(study.cells, lambda cell: cell.rest(*(factor.name for factor in factors))).values():
        rungs = group_by(cells, lambda cell: tuple(cell.levels[factor.name] for factor in factors))
        tops = [_top(rungs[place]) for place in _climb(factors, rungs)]
        if len(tops) >= 3 and sum(cell.ok for cell in tops) > 1:
            many = len({cell.gpus for cell in study.cells}) > 1
            label = ", ".join(filter(None, [study.work(tops[0]), plural(tops[0].gpus, "rank") if many else ""]))
            ladders.append(study.place | {"label": label, "rungs": _list_rungs(study, tops)})
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
    """Return the fastest cell of a rung; if none ran, the one that tells most: oom before failed and skipped."""
    order = {"oom": 0, "failed": 1, "skipped": 2}
    done = [cell for cell in rung if cell.ok]
    return max(done, key=lambda cell: cell.rate) if done else min(rung, key=lambda cell: order[cell.status])


def _climb(factors: Sequence[Factor], rungs: dict[Any, list[Cell]]) -> list[Any]:
    """Return the longest path that changes one factor a step, each at most once.

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
