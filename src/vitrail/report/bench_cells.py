"""Cells of a sweep, read from `results.jsonl` however it ended, and what was varied in them.

- a cell measured twice counts once, the newest; a torn line is left out and told
- out of memory, failed and skipped stay apart; a result that claims success without a speed has failed
- cells of one device and one mode make a study: nothing is ever compared across studies
- keys that only change together are one factor, since nothing can tell them apart
- the batch is no factor but an axis: others are compared at the largest one that they share"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from vitrail.contents import BENCH, check_layout
from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.report.metrics import parse_lines, read_json
from vitrail.report.units import number_of
from vitrail.sums import check_version

SWEEP_VERSION = 1  # of sweep.json
LARGEST = 256 << 20  # bytes of results.jsonl

FEW = 4  # windows from which there are quartiles; of fewer the slowest and the fastest are told
STATUSES = ("ok", "oom", "failed", "skipped")
WORDS = {"ok": "measured", "oom": "out of memory", "failed": "failed", "skipped": "skipped"}


@dataclass(frozen=True)
class Cell:
    """One configuration that was tried."""

    name: str
    status: str
    error: str | None
    mode: str
    device: str
    keys: dict[str, Any]
    gpus: float
    nodes: float
    strategy: str
    batch: float  # of all ranks
    batch_per_rank: float
    rate: float  # samples a second
    windows: tuple[float, ...]  # seconds of a step in each
    low: float  # quartiles of the rate; the extremes of few windows
    high: float
    environment: dict[str, Any]
    raw: dict[str, Any]  # the line itself
    size: float = 0.0  # the swept batch; 0 where none is
    values: dict[str, str] = field(default_factory=dict)  # by swept key, as text
    levels: dict[str, str] = field(default_factory=dict)  # by factor

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def rates(self) -> tuple[float, ...]:
        """Return samples a second of each window."""
        return rates_of(self.windows, self.rate)

    @property
    def memory(self) -> float:
        return self.number("memory", "allocated_gib")

    @property
    def work(self) -> tuple[str, ...]:
        """Return what one sample costs: equal for cells whose speeds compare."""
        return tuple(str(self.raw.get(name)) for name in ("parameters", "tokens_all", "tokens_visible"))

    @property
    def point(self) -> dict[str, Any]:
        """Return what a line through cells shows of this one."""
        speed = {"samples_per_s": self.rate, "low": self.low, "high": self.high}
        return {"name": self.name, **speed, "memory_gib": self.memory}

    def number(self, *path: str) -> float:
        """Return a number of the line, NaN where it is not there."""
        value: Any = self.raw
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return number_of(value)

    def rest(self, *without: str) -> tuple[Any, ...]:
        """Return all that is fixed when some factors vary; the batch is apart."""
        chosen = tuple((name, level) for name, level in self.levels.items() if name not in without)
        return chosen if "gpus" in without else (*chosen, ("gpus", self.gpus), ("nodes", self.nodes))


def group_by(cells: Iterable[Cell], by: Callable[[Cell], Any]) -> dict[Any, list[Cell]]:
    """Return the cells in groups that are alike, in the order in which these begin."""
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(by(cell), []).append(cell)
    return groups


def plural(count: float, noun: str) -> str:
    """Return a count with its noun: 1 rank, 2 ranks."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def name_spread(windows: Iterable[float]) -> str:
    """Name what low and high are for cells with so many windows."""
    few = {count < FEW for count in windows if count > 0}
    if few == {True}:
        return "slowest and fastest"
    return "quartiles, or slowest and fastest" if True in few else "quartiles"


def open_bench(folder: str | Path) -> Path:
    """Return the bench folder as a path; refuse what is not one."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"bench folder {str(path)!r} does not exist; give the folder that `vitrail bench` made.")
    if not (path / "sweep.json").is_file() and not (path / "results.jsonl").is_file():
        raise UserError(
            f"{str(path)!r} is not a bench folder, it holds neither sweep.json nor results.jsonl; "
            "give the folder that `vitrail bench` made, for example runs/bench-NAME."
        )
    check_layout(path, BENCH)
    return path


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of results.jsonl, oldest first, and how many cannot be read; none where there is no file."""
    try:
        raws = read_plain(path, LARGEST).split(b"\n")
    except FileNotFoundError:
        return [], 0
    found = list(parse_lines(raws, first="schema", named="name"))
    return [line for line, _ in found if line is not None], sum(not whole for _, whole in found)


def read_bench(folder: str | Path) -> tuple[dict[str, Any], list[Cell], list[str]]:
    """Return the sweep as it was asked for, its cells in the file's order, and sentences on what could not be read."""
    path = open_bench(folder)
    sweep, complaint = read_json(path / "sweep.json")
    if isinstance(sweep, dict):
        check_version(sweep.get("version", 1), SWEEP_VERSION, str(path / "sweep.json"))
    notes = [complaint] if complaint else []
    try:
        lines, torn = read_log(path / "results.jsonl")
    except OSError as error:
        raise UserError(f"{path / 'results.jsonl'} cannot be read: {error.strerror}; check its permissions.") from error
    if torn:
        notes.append(f"results.jsonl holds {plural(torn, 'line')} that cannot be read; the rest was.")
    return sweep if isinstance(sweep, dict) else {}, _newest(map(make_cell, lines)), notes


def make_cell(raw: dict[str, Any]) -> Cell:
    """Make a cell of its line, whatever is missing there."""
    status, error = raw.get("status"), raw.get("error")
    rate = number_of(raw.get("samples_per_s"))
    if status not in STATUSES:
        status, error = "failed", f"its status is {status!r}, which is none of {', '.join(STATUSES)}"
    elif status == "ok" and not (math.isfinite(rate) and rate > 0):
        status, error = "failed", "the result tells no speed"
    told = raw.get("windows")
    windows = tuple(s for s in map(number_of, told if isinstance(told, list) else []) if math.isfinite(s) and s > 0)
    low, high = spread(rates_of(windows, rate) or (rate,))
    keys, told = raw.get("keys"), raw.get("environment")
    environment = told if isinstance(told, dict) else {}
    batch, own = number_of(raw.get("batch")), number_of(raw.get("batch_per_rank"))
    return Cell(
        name=raw["name"] or "the recipe",
        status=status,
        error=str(error) if error else None,
        mode=str(raw.get("mode") or "real"),
        device=device if isinstance(device := environment.get("device"), str) else "",
        keys=keys if isinstance(keys, dict) else {},
        gpus=number_of(raw.get("gpus")),
        nodes=number_of(raw.get("nodes")),
        strategy=_name_strategy(raw),
        batch=batch,
        batch_per_rank=own,
        rate=rate if status == "ok" else math.nan,
        windows=windows,
        low=low,
        high=high,
        environment=environment,
        raw=raw,
    )


def rates_of(windows: Sequence[float], rate: float) -> tuple[float, ...]:
    """Return the rate of each window, where `rate` is that of the median."""
    middle = median(windows) if windows else math.nan
    return tuple(rate * middle / seconds for seconds in windows)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles, or the extremes of fewer than four."""
    if len(values) < FEW:
        return min(values), max(values)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _name_strategy(raw: dict[str, Any]) -> str:
    name, group, layout = raw.get("strategy"), raw.get("group"), raw.get("layout")
    if name:
        return f"{name} {group}" if group else str(name)
    if isinstance(layout, dict):
        return f"replicate {layout.get('replicate', 1)}, shard {layout.get('shard', 1)}"
    return ""


def _when(cell: Cell) -> float:
    try:
        return datetime.fromisoformat(str(cell.raw.get("date"))).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.nan


def _newest(cells: Iterable[Cell]) -> list[Cell]:
    """Keep the newest result of a cell on a device; a result that does not tell its device replaces any."""
    kept: list[Cell] = []
    for cell in cells:
        twins = [
            i
            for i, old in enumerate(kept)
            if (old.name, old.mode) == (cell.name, cell.mode)
            and (not old.device or not cell.device or old.device == cell.device)
            and (old.gpus == cell.gpus or math.isnan(old.gpus) or math.isnan(cell.gpus))
        ]
        if any(_when(kept[i]) > _when(cell) for i in twins):
            continue
        if twins:
            kept[twins[0]] = cell
            kept = [old for i, old in enumerate(kept) if i not in twins[1:]]
        else:
            kept.append(cell)
    return kept


BATCH = "data.batch"
OUTSIDE = ("mode", "ranks", "nodes")  # swept, but no keys of a recipe
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

    @property
    def place(self) -> dict[str, str]:
        return {"device": self.device, "mode": self.mode}

    def batch(self, size: float) -> str:
        return f"batch {size:g}{self.unit}"

    def describe(self, cell: Cell, *, work: bool = True, batch: bool = False) -> str:
        """Name what was chosen in a cell; without what changes its work where the title says that."""
        words = [f"{f.name}={cell.levels[f.name]}" for f in self.factors if work or not f.changes_work]
        if len({one.gpus for one in self.cells}) > 1:
            words.append(plural(cell.gpus, "rank"))
        if batch and self.batched:
            words.append(self.batch(cell.size))
        return ", ".join(words) or cell.name

    def work(self, cell: Cell) -> str:
        """Name what was chosen that makes samples other work: cells of one such choice compare in samples/s."""
        return ", ".join(f"{f.name}={cell.levels[f.name]}" for f in self.factors if f.changes_work)


def split_studies(cells: Sequence[Cell], tree: Any = None) -> list[Study]:
    """Split the cells by device and mode; one that does not tell its device goes with the only device there is.

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
    """Return the batch as the result tells it, since "8" and "8/rank" are not the same; else as swept."""
    told = cell.batch_per_rank if per_rank else cell.batch
    swept = batch_size(cell.keys.get(BATCH))
    if 0 < told < math.inf or swept is None:
        return told
    size, of = swept
    ranks = cell.gpus if cell.gpus > 0 else 1.0
    return size * {(True, "all"): 1 / ranks, (False, "rank"): ranks}.get((per_rank, of), 1.0)


def batch_size(value: Any) -> tuple[int, str] | None:
    """Return the number of a batch, and whether it is a rank's."""
    found = re.fullmatch(r"\s*([0-9]+)\s*(/\s*rank)?\s*", str(value))
    return (int(found[1]), "rank" if found[2] else "all") if found else None


def _group_keys(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the swept keys that vary, but for batch and ranks; those that always change together in one group."""
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
    """Return the value of a key in a cell as text: as swept, else as the result or the recipe tells it."""
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
    """Return each key without its section, unless two are then alike."""
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
    """Return whether cells that differ in nothing else compute something else."""
    works: dict[Any, set[Any]] = {}
    for cell in cells:
        if cell.ok:
            works.setdefault(cell.rest(factor.name), set()).add(cell.work)
    return any(len(found) > 1 for found in works.values())
