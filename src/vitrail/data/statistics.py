"""How variables are normalised: measured once on crops drawn like training samples, and kept in the cache.

- by mean and standard deviation, or by two percentiles, which become -1 and 1
- of all entries together, or of each entry alone; an entry may also bring its own
- what was measured is kept by a fingerprint of the data and the settings, and in every checkpoint
"""

import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.bad import BadData
from vitrail.data.batch import Statistics
from vitrail.data.files import cache_folder
from vitrail.data.reader import Reader
from vitrail.data.sampler import Order, Sample
from vitrail.errors import UserError

SAMPLES, VOXELS = 128, 2**27  # that are looked at, at most
SPREAD = 2**16  # voxels of a crop and variable that percentiles are taken from
MOST_FILES = 10_000  # whose age is part of a fingerprint


def measure(
    order: Order,
    reader: Reader,
    *,
    samples: int = SAMPLES,
    percentiles: tuple[float, float] | None = None,
    skip: bool = False,
) -> Statistics:
    """Mean and std, or what stands for them, of each variable over the first samples of an order, in float64."""
    voxels = max(math.prod(e.window or order.crop) for e in order.extents)
    number = max(4, min(samples, VOXELS // voxels))
    channels = len(reader.sources[order.extents[0].source].variables)
    total, first = np.zeros((2, channels)), np.zeros((channels, 1))
    looked: list[np.ndarray] = []
    for counter in range(number):
        flat = _read(order, reader, counter, skip)
        if percentiles is not None:
            looked.append(flat[:, :: max(1, flat.shape[1] // SPREAD)])
            continue
        if counter == 0:
            # Sums of differences from a first value: exactly 0 for constants, and no loss under a large mean.
            first = flat[:, :1].copy()
        flat -= first
        total += [flat.mean(axis=1), np.square(flat).mean(axis=1)]
    if percentiles is not None:
        low, high = np.percentile(np.concatenate(looked, axis=1), percentiles, axis=1)
        mean, std = (low + high) / 2, (high - low) / 2
    else:
        mean, square = total / number
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        mean = mean + first[:, 0]
    # A constant variable carries nothing to scale.
    return Statistics(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def _read(order: Order, reader: Reader, counter: int, skip: bool) -> np.ndarray:
    """The values of a sample [C, voxels] in float64, or of the next that can be read."""
    for attempt in range(10):
        sample: Sample = order(counter, attempt)
        size = reader.size_of(sample.source, sample.item, sample.window)
        crop = np.empty((len(reader.sources[sample.source].variables), *size), reader.dtype)
        try:
            reader.read_into(crop, sample)
            return crop.reshape(len(crop), -1).astype(np.float64)
        except BadData as error:
            if not skip:
                raise
            last = error
    raise UserError(f"data.bad: nothing to measure statistics on was found in 10 attempts; the last: {last}")


def fingerprint(configs: Sequence[Any], settings: dict[str, Any]) -> str | None:
    """Names sources and settings, and changes with the files: their names, sizes and ages. None: they are not known."""
    facts = [json.dumps(settings, sort_keys=True, default=str)]
    for c in configs:
        place = Path(os.path.expanduser(str(getattr(c, "path", "")).partition("::")[0]))
        if not is_dataclass(c) or isinstance(c, type) or not getattr(c, "path", "") or not place.exists():
            return None
        facts += [f"{type(c).__qualname__}{asdict(c)}", *_ages(place)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=16).hexdigest()


def _ages(place: Path) -> list[str]:
    facts = [_age(place.resolve())]
    for folder, names, files in os.walk(place):
        names.sort()
        facts += [_age(Path(folder, name)) for name in sorted([*names, *files])]
        if len(facts) > MOST_FILES:
            break
    return facts


def _age(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def remembered(name: str | None, make: Callable[[], Any]) -> Any:
    """A JSON value from the cache, or made now and kept there; a cache that cannot be used is done without."""
    if name is None:
        return make()
    try:
        file = cache_folder("statistics") / f"{name}.json"
        return json.loads(file.read_text())
    except UserError:
        return make()
    except (OSError, ValueError):
        value = make()
        draft = file.with_name(f".{name}.{uuid.uuid4().hex[:8]}")
        try:
            draft.write_text(json.dumps(value))
            draft.replace(file)
        except OSError:
            draft.unlink(missing_ok=True)
        return value
