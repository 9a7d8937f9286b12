"""What was varied in the cells of a sweep.

- Cells of one device and one mode make a study: nothing is ever compared across studies.
- Keys that only change together are one factor, since nothing can tell them apart.
- The batch is no factor but an axis: others are compared at the largest one that they share.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitrail.report.bench_cells import Cell, plural

BATCH = "data.batch"
OUTSIDE = ("mode", "ranks", "nodes", "gpus")  # not keys of a recipe
_LAYOUT = tuple(f"parallel.{name}" for name in ("strategy", "group", "replicate", "shard", "reshard"))
_FIELDS = {  # where a result tells the value of a key that it did not sweep
    "parallel.strategy": "strategy",
    "parallel.group": "group",
    "parallel.recompute": "recompute",
    "parallel.compile": "compile",
    "precision.compute": "precision",
}
_PLAIN = ("false", "null", "none", "off", "fp32", "0")  # what a factor is compared with, where it has such a level
_UNKNOWN = "as in the recipe"


@dataclass(frozen=True)
class Factor:
    """Something that was varied."""

    name: str
    keys: tuple[str, ...]
    levels: tuple[str, ...]  # the one to compare with first
    changes_work: bool = False  # another patch, say: samples are then not the same work


@dataclass(frozen=True)
class Study:
    """The cells of one device and mode."""

    device: str
    mode: str
    cells: tuple[Cell, ...]
    factors: tuple[Factor, ...]
    batched: bool  # whether batches were swept
    unit: str  # of a batch: " a rank" or ""

    def batch(self, size: float) -> str:
        return f"batch {size:g}{self.unit}"

    def describe(self, cell: Cell, *, work: bool = True, batch: bool = False) -> str:
        """What was chosen in a cell; without what changes its work where the title says that."""
        words = [f"{f.name}={cell.levels[f.name]}" for f in self.factors if work or not f.changes_work]
        if len({one.gpus for one in self.cells}) > 1:
            words.append(plural(cell.gpus, "rank"))
        if batch and self.batched:
            words.append(self.batch(cell.size))
        return ", ".join(words) or cell.name

    def work(self, cell: Cell) -> str:
        """What was chosen that makes samples other work: cells of one such choice compare in samples per second."""
        return ", ".join(f"{f.name}={cell.levels[f.name]}" for f in self.factors if f.changes_work)


def split_studies(cells: Sequence[Cell], tree: Any = None) -> list[Study]:
    """The cells by device and mode; one that does not tell its device goes with the only device there is.

    `tree` is the recipe, for keys that only some of the cells have swept.
    """
    devices = list(dict.fromkeys(cell.device for cell in cells if cell.device))
    alone = devices[0] if len(devices) == 1 else ""
    cells = [replace(cell, device=cell.device or alone or "unknown device") for cell in cells]
    keys = [key for key in dict.fromkeys(key for cell in cells for key in cell.keys) if key not in OUTSIDE]
    cells = [replace(cell, values={key: _show(cell, key, tree) for key in keys if key != BATCH}) for cell in cells]
    kinds = dict.fromkeys((cell.device, cell.mode) for cell in cells)
    return [_make_study([c for c in cells if (c.device, c.mode) == kind]) for kind in kinds]


def _make_study(cells: list[Cell]) -> Study:
    batched = len({str(cell.keys[BATCH]) for cell in cells if BATCH in cell.keys}) > 1
    per_rank = any("/rank" in str(cell.keys.get(BATCH)) for cell in cells)
    if batched:
        cells = [replace(cell, size=_read_size(cell, per_rank)) for cell in cells]
    groups = _group_keys(cells)
    names = _short_names([keys[0] for keys in groups])
    factors = []
    for keys, name in zip(groups, names, strict=True):
        name = name if len(keys) == 1 or keys[0] == _LAYOUT[0] else " + ".join(_short_names(keys))
        cells = [replace(cell, levels=cell.levels | {name: _level(cell, keys)}) for cell in cells]
        factors.append(Factor(name, tuple(keys), _sort_levels(cell.levels[name] for cell in cells)))
    factors = [replace(factor, changes_work=_changes_work(cells, factor)) for factor in factors]
    return Study(cells[0].device, cells[0].mode, tuple(cells), tuple(factors), batched, " a rank" if per_rank else "")


def _read_size(cell: Cell, per_rank: bool) -> float:
    """As the result tells it, since "8" and "8/rank" are not the same; else as swept."""
    told = cell.batch_per_rank if per_rank else cell.batch
    found = re.match(r"(\d+)(/rank)?", str(cell.keys.get(BATCH, "")))
    if 0 < told < math.inf or not found:
        return told
    ranks = cell.gpus if cell.gpus > 0 else 1.0
    return float(found[1]) * {(True, False): 1 / ranks, (False, True): ranks}.get((per_rank, bool(found[2])), 1.0)


def _group_keys(cells: Sequence[Cell]) -> list[list[str]]:
    """The swept keys that vary, but for batch and ranks; those that always change together in one group."""
    keys = [key for key in cells[0].values if len({cell.values[key] for cell in cells}) > 1]
    layout = [key for key in _LAYOUT if key in keys]
    groups: list[list[str]] = []
    for key in keys:
        for group in groups:
            both = {(c.values[group[0]], c.values[key]) for c in cells}
            tied = len(both) == len({a for a, _ in both}) == len({b for _, b in both})
            if tied or (key in layout and group[0] in layout):
                group.append(key)
                break
        else:
            groups.append([key])
    return [sorted(g, key=lambda k: _LAYOUT.index(k) if k in _LAYOUT else 99) for g in groups]


def _show(cell: Cell, key: str, tree: Any) -> str:
    """The value of a key in a cell, as text: as swept, else as the result or the recipe tells it."""
    told = cell.raw.get(_FIELDS.get(key, ""))
    value = cell.keys.get(key, told)
    if isinstance(value, dict) and isinstance(told, str):
        value = told
    if key not in cell.keys and key not in _FIELDS:
        for name in key.split("."):
            tree = tree.get(name, _UNKNOWN) if isinstance(tree, dict) else _UNKNOWN
        value = tree
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def _level(cell: Cell, keys: Sequence[str]) -> str:
    values = [cell.values[key] for key in keys]
    if keys[0] not in _LAYOUT or len(keys) == 1:
        return ", ".join(values)
    words = [
        v if k in _LAYOUT[:2] else f"{k.split('.')[1]}={v}" for k, v in zip(keys, values, strict=True) if v != "null"
    ]
    return " ".join(words) or "null"


def _short_names(keys: Sequence[str]) -> list[str]:
    """Each key without its section, unless two are then alike."""
    ends = [key.split(".", 1)[-1] for key in keys]
    return [key if ends.count(end) > 1 else end for key, end in zip(keys, ends, strict=True)]


def _sort_levels(levels: Iterable[str]) -> tuple[str, ...]:
    found = list(dict.fromkeys(levels))
    if all(math.isfinite(_as_number(level)) for level in found):
        return tuple(sorted(found, key=_as_number))
    return tuple(sorted(found, key=lambda level: _PLAIN.index(level) if level in _PLAIN else len(_PLAIN)))


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _changes_work(cells: Sequence[Cell], factor: Factor) -> bool:
    """Whether cells that differ in nothing else compute something else."""
    works: dict[Any, set[Any]] = {}
    for cell in cells:
        if cell.ok:
            works.setdefault(cell.rest(factor.name), set()).add(cell.work)
    return any(len(found) > 1 for found in works.values())
