"""The cells of a bench folder, read from `results.jsonl` however the sweep ended.

- A cell measured twice counts once, the newest; a torn line is left out and told.
- Out of memory, failed and skipped stay apart; a result that claims success without a speed has failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from vitrail.contents import BENCH, check_layout
from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.report.metrics import parse_line, read_json
from vitrail.report.units import number_of
from vitrail.versions import check_version

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
    rates: tuple[float, ...]  # of each window
    low: float  # quartiles of the rate; the extremes of few windows
    high: float
    raw: dict[str, Any]  # the line itself
    size: float = 0.0  # the swept batch; 0 where none is
    values: dict[str, str] = field(default_factory=dict)  # by swept key, as text
    levels: dict[str, str] = field(default_factory=dict)  # by factor

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def memory(self) -> float:
        return self.number("memory", "allocated_gib")

    @property
    def work(self) -> tuple[str, ...]:
        """What one sample costs: equal for cells whose speeds compare."""
        return tuple(str(self.raw.get(name)) for name in ("parameters", "tokens_all", "tokens_visible"))

    def number(self, *path: str) -> float:
        """A number of the line, NaN where it is not there."""
        value: Any = self.raw
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return number_of(value)

    def rest(self, *without: str) -> tuple[Any, ...]:
        """All that is fixed when some factors vary; the batch is apart."""
        chosen = tuple((name, level) for name, level in self.levels.items() if name not in without)
        return chosen if "gpus" in without else (*chosen, ("gpus", self.gpus), ("nodes", self.nodes))


def plural(count: float, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def name_spread(windows: Iterable[float]) -> str:
    """What low and high are, for cells with so many windows."""
    few = {count < FEW for count in windows if count > 0}
    if few == {True}:
        return "slowest and fastest"
    return "quartiles, or slowest and fastest" if True in few else "quartiles"


def open_bench(folder: str | Path) -> Path:
    """The bench folder as a path; refuses what is not one."""
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


def read_log(path: Path) -> bytes:
    """All of results.jsonl, a line of a few KiB for each result."""
    return read_plain(path, LARGEST)


def read_bench(folder: str | Path) -> tuple[dict[str, Any], list[Cell], list[str]]:
    """The sweep as it was asked for, its cells in the order of the file, and sentences on what could not be read."""
    path = open_bench(folder)
    sweep, complaint = read_json(path / "sweep.json")
    if isinstance(sweep, dict):
        check_version(sweep.get("version", 1), SWEEP_VERSION, str(path / "sweep.json"))
    notes = [complaint] if complaint else []
    try:
        text = read_log(path / "results.jsonl").decode("utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    except OSError as error:
        raise UserError(f"{path / 'results.jsonl'} cannot be read: {error.strerror}; check its permissions.") from error
    lines, torn = _parse_lines(text)
    if torn:
        notes.append(f"results.jsonl holds {plural(torn, 'line')} that cannot be read; the rest was.")
    return sweep if isinstance(sweep, dict) else {}, _newest(map(make_cell, lines)), notes


def _parse_lines(text: str) -> tuple[list[dict[str, Any]], int]:
    lines: list[dict[str, Any]] = []
    torn = 0
    for raw in text.split("\n"):
        raw = raw.strip("\x00\r\t ")  # a power cut can leave zeros where the line was to be
        if not raw:
            continue
        line, whole = parse_line(raw, first="schema", named="name")
        torn += not whole
        if line is not None:
            lines.append(line)
    return lines, torn


def make_cell(raw: dict[str, Any]) -> Cell:
    """A cell from its line, whatever is missing there."""
    status, error = raw.get("status"), raw.get("error")
    rate = number_of(raw.get("samples_per_s"))
    if status not in STATUSES:
        status, error = "failed", f"its status is {status!r}, which is none of {', '.join(STATUSES)}"
    elif status == "ok" and not (math.isfinite(rate) and rate > 0):
        status, error = "failed", "the result tells no speed"
    windows = raw.get("windows")
    seconds = [s for s in map(number_of, windows if isinstance(windows, list) else []) if math.isfinite(s) and s > 0]
    middle = median(seconds) if seconds else math.nan
    rates = tuple(rate * middle / s for s in seconds)
    low, high = (min(rates, default=rate), max(rates, default=rate))
    if len(rates) >= FEW:
        low, _, high = quantiles(rates, n=4, method="inclusive")
    keys = raw.get("keys")
    batch, own = number_of(raw.get("batch")), number_of(raw.get("batch_per_rank"))
    return Cell(
        name=raw["name"] or "the recipe",
        status=status,
        error=str(error) if error else None,
        mode=str(raw.get("mode") or "real"),
        device=find_device(raw.get("environment")),
        keys=keys if isinstance(keys, dict) else {},
        gpus=number_of(raw.get("gpus")),
        nodes=number_of(raw.get("nodes")),
        strategy=_name_strategy(raw),
        batch=batch,
        batch_per_rank=own,
        rate=rate if status == "ok" else math.nan,
        rates=rates,
        low=low,
        high=high,
        raw=raw,
    )


def find_device(environment: Any) -> str:
    """The name of the hardware; empty where the result does not tell."""
    tree = environment if isinstance(environment, dict) else {}
    device, devices = tree.get("device"), tree.get("devices")
    if isinstance(devices, list) and devices and not str(device).startswith("cpu"):
        device = device if isinstance(device, str) and not device.startswith("cuda") else devices[0]
    elif not device or str(device).startswith("cpu"):
        device = tree.get("cpu") or device
    if isinstance(device, dict):
        device = device.get("name") or device.get("model")
    return device if isinstance(device, str) else ""


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
    """Of results of one cell on one device the newest; a result that does not tell its device replaces any."""
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
