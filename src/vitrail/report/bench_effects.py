"""What a factor does to the speed, all else equal, and how that depends on another factor.

- Two levels are compared in pairs of cells that differ in nothing else, at the largest batch that both ran; the effect
  is the geometric mean of the pairs' ratios.
- The interval holds 95 in 100 bootstrap samples of the windows of every cell: what measuring alone leaves open. How
  much the pairs differ from each other is told apart from it.
- A larger batch may be what a factor is for, checkpointing for one, so the effect with each level at its own best batch
  stands beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_cells import Cell
from vitrail.report.bench_study import Factor, Study

if TYPE_CHECKING:
    import numpy as np

Pair = tuple[Cell, Cell]
Sides = tuple[dict[float, Cell], dict[float, Cell]]  # of two levels, the cells by batch
_LADDER = ("strategy", "wrap", "compute", "prefetch", "recompute", "compile")  # in the order in which one adds them
_DRAWS = 1000
FEWEST = 5  # windows of a cell that can be drawn from: from 3 the interval is too narrow, and alarms for nothing


def find_effects(study: Study) -> list[dict[str, Any]]:
    """Percent change of samples per second for each level of each factor against the first that it has pairs with."""
    effects = []
    for factor in study.factors:
        for level in factor.levels[1:]:
            base = _find_base(study, factor, level)
            if base is not None:
                effects.append(_describe(study, factor, base, level))
    return effects


def _find_base(study: Study, factor: Factor, level: str) -> str | None:
    """The first level to compare with: an optional key may be null just where others cannot be set."""
    earlier = factor.levels[: factor.levels.index(level)]
    return next((base for base in earlier if any(match(study, factor, base, level))), None)


def match(study: Study, factor: Factor, base: str, level: str) -> Iterator[Pair]:
    """Cells that differ in this factor alone, one pair for each setting of the others, at the largest common batch."""
    for sides in _settings(study, factor, base, level).values():
        common = set(sides[0]) & set(sides[1])
        if common:
            yield sides[0][max(common)], sides[1][max(common)]


def _settings(study: Study, factor: Factor, base: str, level: str) -> dict[Any, Sides]:
    """By setting of the other factors: the measured cells of both levels."""
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
        "device": study.device,
        "mode": study.mode,
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
    """Bounds of the mean effect in percent; None where a cell has too few windows."""
    drawn = _draw(pairs)
    if drawn is None:
        return None, None
    import numpy as np

    low, high = np.percentile(drawn, [2.5, 97.5])
    return percent(low), percent(high)


def _draw(pairs: Sequence[Pair]) -> np.ndarray | None:
    """Bootstrap samples of the mean log ratio of the pairs' medians."""
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
    """For each two factors: the effect of one at each level of the other; the batch too is such another."""
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
    """The effect of a level at each level of another factor, over the settings and batches that all of those share."""
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
        "device": study.device,
        "mode": study.mode,
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
    """The place of a factor on a ladder; what has no usual place comes last."""
    parts = {part for key in factor.keys for part in key.split(".")[1:2]}
    return min((place for place, name in enumerate(_LADDER) if name in parts), default=len(_LADDER))
