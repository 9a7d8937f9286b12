"""Checks of what must be the same: on all ranks of a run, and in its data from one session to the next.

Ranks that would train different things are refused at the start: recipe, call, versions, code, device, data.

- all ranks reduce one digest; nothing else is exchanged where they are alike, however many there are
- where they are not, rank 0's facts go to all, and each tells in a few words what it has instead
- what only says how one process reads may differ (`OWN`): nodes have disks, cores and memory of their own. Host names,
  numbers of devices and threads are no facts at all

Whether a run goes on with the data that it began with: what every checkpoint keeps of them, and what differs.

- kept of each entry: its items and their shapes, variables, type and classes, the names, sizes and times of its files,
  and checksums of the values at a few places, whatever they are stored in
- where the data lie does not count, so a copy or a folder that was moved is the same data
- other values, sizes or numbers are refused; other times alone are noted, since copying changes those
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

import vitrail
from vitrail.data.dataset import Dataset
from vitrail.data.files.fingerprint import changed, data_state
from vitrail.data.reading.pool import Policy, read_again, timed
from vitrail.data.source import LabelledSource, Source, class_names, label_dtype
from vitrail.errors import UserError
from vitrail.parallel.agree import Group, broadcast_json, gather_json
from vitrail.recipe import Recipe, kinds
from vitrail.recipe.load import diff
from vitrail.recipe.yaml import show

# Keys of a recipe that may differ, since they decide no number of a training: where a node keeps copies (a folder that
# its own $TMPDIR names), and how much a process reads ahead, with how many threads, and how patiently.
OWN = (
    "data.cache_mib",
    "data.prefetch",
    "data.read_limit",
    "data.retries",
    "data.stage.dir",
    "data.stage.limit_gib",
    "data.workers",
)
MOST = 20  # differences that a rank tells of
LOOKED = 3  # items of each source whose values are compared
EDGE = 4  # voxels of the compared windows along each axis

START = "start every rank with the same recipe, the same call and the same software"
DATA = "see that every node reads the same files"


def compare(facts: Mapping[str, Any], group: Group, remedy: str) -> None:
    """Refuse, on every rank and in the same words, facts (JSON) that are not the same on all of them."""
    if dist.get_world_size(group) == 1:
        return
    facts = json.loads(json.dumps(facts))
    mark = np.frombuffer(_digest(facts), np.uint32).astype(np.int64)
    both = torch.from_numpy(np.concatenate([mark, -mark]))  # the largest and, turned over, the smallest of all ranks
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    largest, smallest = both.chunk(2)
    if torch.equal(largest, -smallest):
        return
    first = broadcast_json(facts, group)
    changes = [(key, show(old), show(new)) for key, old, new in diff(first, facts)]
    raise UserError(tell(gather_json(changes[:MOST], group), remedy))


def tell(changes: Sequence[Sequence[Sequence[str]]], remedy: str) -> str:
    """Say in one sentence how ranks differ from the first: `changes` has (key, rank 0's, its own) for each rank."""
    keys = list(dict.fromkeys(key for rank in changes for key, _, _ in rank))
    if not keys:
        return f"what ranks have is not the same, though no value of it differs (1 is not 1.0 here); {remedy}"
    key = keys[0]
    values: dict[str, list[int]] = {}
    common = next(old for rank in changes for name, old, _ in rank if name == key)
    for number, rank in enumerate(changes):
        values.setdefault(next((new for name, _, new in rank if name == key), common), []).append(number)
    shown = [f"{value} on {_ranks(numbers)}" for value, numbers in values.items()]
    several = f"{', '.join(shown[:3])} and others" if len(shown) > 4 else " and ".join(shown)
    more = f" (and {', '.join(keys[1:4])}{', ...' * (len(keys) > 4)})" if len(keys) > 1 else ""
    return f"{key}{more} is not the same on all ranks: {several}; {remedy}"


def _ranks(numbers: Sequence[int]) -> str:
    """Name ranks in words: rank 3, ranks 0-2, ranks 0, 2-5, 9, ..."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in parts]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(words[:4])}{', ...' * (len(words) > 4)}"


# ---------------------------------------------------------------- facts


def start_facts(recipe: Recipe, device: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of what a rank is about to do, and with what; the keys are words of a sentence."""
    versions = {
        "vitrail": vitrail.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    return {
        **_without_own(recipe.to_tree()),
        "the type of device": device,
        **{f"--{name}": value for name, value in call.items()},
        **{f"the version of {name}": version for name, version in versions.items()},
        **{f"the file {name}": mark for name, mark in code_facts(recipe).items()},
    }


def _without_own(tree: dict[str, Any]) -> dict[str, Any]:
    for key in OWN:
        *parents, last = key.split(".")
        place: Any = tree
        for name in parents:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(last, None)
    return tree


def code_facts(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each file of this package, and of the modules that plugins have brought in."""
    package = Path(vitrail.__file__).parent
    files = {f"vitrail/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    slots = (recipe.model, recipe.objective, recipe.optimizer, recipe.schedule, recipe.codec)
    used = [type(part) for part in (*slots, *recipe.data.train, *recipe.data.valid)]
    tops = {cls.__module__.partition(".")[0] for cls in (*used, *kinds.registered())} - {"vitrail", "builtins"}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in tops and getattr(module, "__file__", None):
            files[name] = Path(str(module.__file__))
    return {name: _file_digest(path) for name, path in sorted(files.items())}


def facts_of_ranks(datasets: Sequence[Dataset], policy: Policy) -> dict[str, Any]:
    """Return what opened sources say of themselves, and a digest of a few of their values."""
    found: dict[str, Any] = {}
    for dataset in datasets:
        for number, source in enumerate(dataset.sources):
            items = [e.item for e in dataset.extents if e.source == number]
            found[f"{dataset.where}.{number}"] = {
                "items": len(items),
                "axes": list(source.axes),
                "variables": list(source.variables),
                "type": str(source.dtype),
                "classes": list(class_names(source)),
                "sizes": _digest([[e.item, e.shape] for e in dataset.extents if e.source == number]).hex(),
                "values": [_values(source, item, policy) for item in items[:: max(1, len(items) // LOOKED)][:LOOKED]],
            }
    return found


def _values(source: Source, item: int, policy: Policy) -> str:
    """Return a digest of a small window in the middle of an item, and of its labels; or why it cannot be read."""
    shape = source.items[item].shape
    window = tuple(slice((size - min(EDGE, size)) // 2, (size + min(EDGE, size)) // 2) for size in shape)

    def read() -> str:
        return timed(partial(_read_few, source, item, window), lambda: f"item {item}", policy.limit)

    try:
        return read_again(read, lambda: f"item {item}", retries=policy.retries)
    except (UserError, OSError, ValueError, RuntimeError) as error:
        return type(error.__cause__ or error).__name__


def _read_few(source: Source, item: int, window: tuple[slice, ...]) -> str:
    parts = [source.read(item, window)]
    if label_dtype(source) is not None:
        parts.append(cast(LabelledSource, source).read_labels(item, window))
    return hashlib.blake2b(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), digest_size=8).hexdigest()


def _digest(facts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


def _file_digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return error.strerror or type(error).__name__


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
    """Return facts of data.train and data.valid for a checkpoint; `configs` are the recipe's, not of staged copies.

    `before` are the facts of an earlier checkpoint: values are not read again of files that are untouched since then.
    """
    found: dict[str, list[Facts]] = {}
    for name, dataset in datasets.items():
        found[name] = []
        for number in range(0 if dataset is None else len(dataset.sources)):
            assert dataset is not None
            tick()
            # The run may lie in the folder of its data.
            files = data_state(configs[name][number], dataset.sources[number], tick, [run_dir])
            facts = _describe(dataset, number) | {"files": files}
            then = _entry(before, name, number)
            if not (_untouched(then, facts) and isinstance(then.get("values"), list)):
                then = {"values": _look(dataset, number, tick)}
            found[name].append(facts | {"values": then["values"]})
    return found


def compare_data(before: Any, now: dict[str, list[Facts]]) -> tuple[list[str], list[str]]:
    """Compare the data with a checkpoint's facts: return differences that make them other data, and harmless ones."""
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
    """Return the facts that a checkpoint has of an entry, which may have any form: it may come from anywhere."""
    entries = facts.get(name) if isinstance(facts, dict) else None
    found = entries[number] if isinstance(entries, list) and number < len(entries) else None
    return found if isinstance(found, dict) else {}


def _untouched(then: Facts, now: Facts) -> bool:
    """Tell whether names, sizes and times of all files are known and the same."""
    known = isinstance(then.get("files"), dict) and isinstance(now["files"], dict)
    return known and then["files"].get("mark") == now["files"]["mark"]


def _describe(dataset: Dataset, number: int) -> Facts:
    source = dataset.sources[number]
    shapes = [extent.shape for extent in dataset.extents if extent.source == number]
    classes = None
    if dataset.labels == "item":
        classes = crc32(repr([(item.name.rpartition("/")[2], item.label) for item in source.items]).encode())
    return {
        "items": len(shapes),
        "shape": list(shapes[0]) if len(set(shapes)) == 1 else None,
        "shapes": crc32(repr(shapes).encode()),
        "variables": list(source.variables),
        "dtype": str(source.dtype),
        "classes": classes,
    }


def _look(dataset: Dataset, number: int, tick: Callable[[], None]) -> list[int | None]:
    """Return checksums of values and labels at a few places of an entry; None for a place that cannot be read."""
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
        return crc32(np.ascontiguousarray(timed(read, lambda: dataset.where, dataset.policy.limit)).tobytes())
    except (UserError, OSError, ValueError):  # training finds out, and does with bad data what the recipe says
        return None
