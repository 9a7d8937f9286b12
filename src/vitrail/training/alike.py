"""Ranks that would train different things are refused at the start: recipe, call, versions, code, device, data.

- all ranks reduce one digest; nothing else is exchanged where they are alike, however many there are
- where they are not, rank 0's facts go to all, and each tells in a few words what it has instead
- what only says how one process reads may differ (`OWN`): nodes have disks, cores and memory of their own. Host names,
  numbers of devices and threads are no facts at all
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import vitrail
from vitrail.data.bad import Policy
from vitrail.data.dataset import Dataset
from vitrail.data.pool import timed
from vitrail.errors import UserError
from vitrail.recipe import Recipe, kinds
from vitrail.recipe.changes import diff
from vitrail.recipe.trees import show
from vitrail.training.collective import broadcast_json, gather_json

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
ATTEMPTS = 3  # to read one

START = "start every rank with the same recipe, the same call and the same software"
DATA = "see that every node reads the same files"


def compare(facts: Mapping[str, Any], group: Any, remedy: str) -> None:
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
    """One sentence on what ranks have that rank 0 has not: of each rank, the (key, rank 0's, its own)."""
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
    """Some ranks in words: rank 3, ranks 0-2, ranks 0, 2-5, 9, ..."""
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
    """What a rank is about to do, and with what; the keys are words of a sentence."""
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
    """A digest of each file of this package, and of the modules that plugins have brought in."""
    package = Path(vitrail.__file__).parent
    files = {f"vitrail/{path.relative_to(package).as_posix()}": path for path in package.rglob("*.py")}
    slots = (recipe.model, recipe.objective, recipe.optimizer, recipe.schedule, recipe.codec)
    used = [type(part) for part in (*slots, *recipe.data.train, *recipe.data.valid)]
    tops = {cls.__module__.partition(".")[0] for cls in (*used, *kinds.registered())} - {"vitrail", "builtins"}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in tops and getattr(module, "__file__", None):
            files[name] = Path(str(module.__file__))
    return {name: _file_digest(path) for name, path in sorted(files.items())}


def data_facts(datasets: Sequence[Dataset], policy: Policy) -> dict[str, Any]:
    """What opened sources say of themselves, and a digest of a few of their values."""
    found: dict[str, Any] = {}
    for dataset in datasets:
        for number, source in enumerate(dataset.sources):
            items = [e.item for e in dataset.extents if e.source == number]
            found[f"{dataset.where}.{number}"] = {
                "items": len(items),
                "axes": list(source.axes),
                "variables": list(source.variables),
                "type": str(source.dtype),
                "classes": list(getattr(source, "class_names", ())),
                "sizes": _digest([[e.item, e.shape] for e in dataset.extents if e.source == number]).hex(),
                "values": [_values(source, item, policy) for item in items[:: max(1, len(items) // LOOKED)][:LOOKED]],
            }
    return found


def _values(source: Any, item: int, policy: Policy) -> str:
    """A digest of a small window in the middle of an item, and of its labels; or why it cannot be read."""
    shape = source.items[item].shape
    window = tuple(slice((size - min(EDGE, size)) // 2, (size + min(EDGE, size)) // 2) for size in shape)
    for attempt in range(ATTEMPTS):
        try:
            return timed(partial(_read, source, item, window), lambda: f"item {item}", policy.limit)
        except (OSError, ValueError, RuntimeError) as error:
            if attempt == ATTEMPTS - 1:
                return type(error).__name__
    raise AssertionError


def _read(source: Any, item: int, window: tuple[slice, ...]) -> str:
    parts = [source.read(item, window)]
    if getattr(source, "label_dtype", None) is not None:
        parts.append(source.read_labels(item, window))
    return hashlib.blake2b(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), digest_size=8).hexdigest()


def _digest(facts: Any) -> bytes:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


def _file_digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        return error.strerror or type(error).__name__
