"""Whether a run goes on with the data that it began with: what every checkpoint keeps of them, and what differs.

- kept of each entry: its items and their shapes, variables, type and classes, the names, sizes and times of its files,
  and checksums of the values at a few places, whatever they are stored in
- where the data lie does not count, so a copy or a folder that was moved is the same data
- other values, sizes or numbers are refused; other times alone are noted, since copying changes those
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.fingerprint import changed, data_state
from vitrail.data.pool import timed
from vitrail.errors import UserError

PLACES = 16  # that are looked at in each list of entries, and at least one in each of the first so many
SIDE = 16  # voxels along each axis of such a place

Facts = dict[str, Any]


def data_facts(
    datasets: Mapping[str, Dataset | None],
    configs: Mapping[str, Sequence[Any]],
    before: Any,
    run_dir: Path,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, list[Facts]]:
    """What a checkpoint keeps of data.train and data.valid; `configs` are those of the recipe, not of staged copies.

    `before` are the facts of an earlier checkpoint: values are not read again of files that are untouched since then.
    """
    found: dict[str, list[Facts]] = {}
    for name, dataset in datasets.items():
        found[name] = []
        for number in range(0 if dataset is None else len(dataset.sources)):
            assert dataset is not None
            tick()
            facts = _describe(dataset, number) | {"files": _files(dataset, number, configs[name][number], run_dir)}
            then = _entry(before, name, number)
            if not (_untouched(then, facts) and isinstance(then.get("values"), list)):
                then = {"values": _look(dataset, number, tick)}
            found[name].append(facts | {"values": then["values"]})
    return found


def compare_data(before: Any, now: dict[str, list[Facts]]) -> tuple[list[str], list[str]]:
    """What has become of the data since a checkpoint: what makes them others, and what may be nothing."""
    others, notes = [], []
    for name, entries in now.items():
        for number, facts in enumerate(entries):
            then = _entry(before, name, number)
            other, note = _compare(then, facts) if then else (None, None)
            where = f"data.{name}.{number}: "
            others += [where + other] if other else []
            notes += [where + note] if note else []
    return others, notes


def _compare(then: Facts, now: Facts) -> tuple[str | None, str | None]:
    words = {"items": "items", "shape": "shape", "variables": "variables", "dtype": "type"}
    for key, word in words.items():
        if key in then and then[key] != now[key]:
            return f"{word} {then[key]} became {now[key]}", None
    for key, word in (("shapes", "shapes of its items"), ("classes", "classes of its items")):
        if key in then and then[key] != now[key]:
            return f"the {word} are others", None
    if _untouched(then, now):
        return None, None
    values = then["values"] if isinstance(then.get("values"), list) else []
    pairs = [(a, b) for a, b in zip(values, now["values"], strict=False) if None not in (a, b)]
    differ = sum(a != b for a, b in pairs)
    if differ:
        return f"values differ at {differ} of {len(pairs)} places that were looked at", None
    files = changed(then.get("files"), now["files"])
    if files is None:
        return None, None
    same = all(then["files"].get(key) == now["files"].get(key) for key in ("files", "bytes"))
    if not same:
        return files, None
    return None, f"{files}, but not their sizes nor the values at {len(pairs)} places: taken for the same data"


def _entry(facts: Any, name: str, number: int) -> Facts:
    """What a checkpoint tells of an entry; it may come from anywhere, so it may be of any form."""
    entries = facts.get(name) if isinstance(facts, dict) else None
    found = entries[number] if isinstance(entries, list) and number < len(entries) else None
    return found if isinstance(found, dict) else {}


def _untouched(then: Facts, now: Facts) -> bool:
    """Whether names, sizes and times of all files are known and the same."""
    known = isinstance(then.get("files"), dict) and isinstance(now["files"], dict)
    return known and then["files"].get("mark") == now["files"]["mark"]


def _describe(dataset: Dataset, number: int) -> Facts:
    source = dataset.sources[number]
    shapes = [extent.shape for extent in dataset.extents if extent.source == number]
    classes = None
    if dataset.labels == "item":
        classes = _sum(repr([(item.name.rpartition("/")[2], item.label) for item in source.items]).encode())
    return {
        "items": len(shapes),
        "shape": list(shapes[0]) if len(set(shapes)) == 1 else None,
        "shapes": _sum(repr(shapes).encode()),
        "variables": list(source.variables),
        "dtype": str(source.dtype),
        "classes": classes,
    }


def _files(dataset: Dataset, number: int, config: Any, run_dir: Path) -> dict[str, Any] | None:
    return data_state(config, dataset.sources[number], leave_out=[run_dir])  # which may lie in the folder of its data


def _look(dataset: Dataset, number: int, tick: Callable[[], None]) -> list[int | None]:
    """Checksums of the values, and of the labels, at a few places of an entry; None for one that cannot be read."""
    source, total = dataset.sources[number], len(dataset.sources)
    places = max(PLACES // total, int(number < PLACES))
    items = [extent for extent in dataset.extents if extent.source == number]
    found: list[int | None] = []
    for place in range(places):
        extent = items[place * len(items) // places]
        draw = np.random.default_rng(place)
        sides = [min(SIDE, size) for size in extent.shape]
        starts = [int(draw.integers(size - side + 1)) for size, side in zip(extent.shape, sides, strict=True)]
        window = tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))
        found.append(_read(dataset, partial(source.read, extent.item, window)))
        if dataset.labels == "voxel":
            found.append(_read(dataset, partial(source.read_labels, extent.item, window)))  # type: ignore[attr-defined]
        tick()
    return found


def _read(dataset: Dataset, read: Callable[[], np.ndarray]) -> int | None:
    try:
        return _sum(np.ascontiguousarray(timed(read, lambda: dataset.where, dataset.policy.limit)).tobytes())
    except (UserError, OSError, ValueError):  # training finds out, and does with bad data what the recipe says
        return None


def _sum(content: bytes) -> int:
    return zlib.crc32(content)
