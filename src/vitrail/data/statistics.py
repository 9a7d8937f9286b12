"""How variables are normalised: measured once on crops drawn like training samples, and kept in the cache.

- by mean and standard deviation, or by two percentiles, which become -1 and 1
- of all entries together, or of each entry alone; an entry may also bring its own
- what was measured is kept by a fingerprint of the data and the settings, and in every checkpoint
"""

import hashlib
import itertools
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.bad import BadData, Policy
from vitrail.data.batch import Statistics
from vitrail.data.files import cache_folder
from vitrail.data.pool import timed
from vitrail.data.reader import Reader
from vitrail.data.sampler import Order, Sample
from vitrail.errors import UserError

SAMPLES, VOXELS = 128, 2**27  # that are looked at, at most
SPREAD = 2**23  # values of all crops and variables that percentiles are taken from
MOST_FILES = 200_000  # whose age is part of a fingerprint, each by itself
ATTEMPTS = 10  # to find a sample that can be read, with bad: skip
FEWEST = 4  # samples that statistics are measured on

log = logging.getLogger(__name__)


def measure(
    order: Order,
    reader: Reader,
    *,
    samples: int = SAMPLES,
    percentiles: tuple[float, float] | None = None,
    policy: Policy | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Statistics:
    """Mean and std, or what stands for them, of each variable over the first samples of an order, in float64.

    `tick` is called after every sample.
    """
    voxels = max(math.prod(e.window or order.crop) for e in order.extents)
    number, measured = max(FEWEST, min(samples, VOXELS // voxels)), 0
    channels = len(reader.sources[order.extents[0].source].variables)
    total, first = np.zeros((2, channels)), np.zeros((channels, 1))
    looked: list[np.ndarray] = []
    told: set[str] = set()
    spread = max(1024, SPREAD // (number * channels))  # voxels of a crop
    for counter in range(number):
        flat = _read(order, reader, counter, policy or Policy(), told)
        tick()
        if flat is None:
            continue
        measured += 1
        if percentiles is not None:
            looked.append(flat[:, :: math.ceil(flat.shape[1] / spread)].copy())  # a view would keep the whole crop
            continue
        if measured == 1:
            # Sums of differences from a first value: exactly 0 for constants, and no loss under a large mean.
            first = flat[:, :1].copy()
        flat -= first
        total += [flat.mean(axis=1), np.square(flat).mean(axis=1)]
    if measured < FEWEST:
        raise UserError(
            f"data.bad: only {measured} of {number} samples could be read to measure statistics on, each of them tried "
            f"at {ATTEMPTS} places; mend the data, or give `statistics` or data.normalize"
        )
    if percentiles is not None:
        ends = [np.percentile(np.concatenate([part[c] for part in looked]), percentiles) for c in range(channels)]
        low, high = np.array(ends).T
        mean, std = (low + high) / 2, (high - low) / 2
    else:
        mean, square = total / measured
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        mean = mean + first[:, 0]
    # A constant variable carries nothing to scale.
    return Statistics(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def _read(order: Order, reader: Reader, counter: int, policy: Policy, told: set[str]) -> np.ndarray | None:
    """The values of a sample [C, voxels] in float64, or of the next that can be read; None where several cannot."""
    for attempt in range(ATTEMPTS):
        sample: Sample = order(counter, attempt)
        size = reader.size_of(sample.source, sample.item, sample.window)
        crop = np.empty((len(reader.sources[sample.source].variables), *size), reader.dtype)
        try:
            timed(partial(reader.read_into, crop, sample), partial(reader.name_of, sample), policy.limit)
            return crop.reshape(len(crop), -1).astype(np.float64)
        except BadData as error:
            if not policy.skips(error):
                raise
            if str(error) not in told:
                log.warning("bad data, statistics are measured without it: %s", error)
                told.add(str(error))
    return None


def fingerprint(configs: Sequence[Any], settings: dict[str, Any], sources: Sequence[Any] = ()) -> str | None:
    """Names sources and settings, and changes with the files: their names, sizes and ages. None: they are not known.

    `sources` are those of the configs, where they are open: they know files, such as labels, that lie elsewhere.
    """
    facts = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    for number, c in enumerate(configs):
        place = _local(getattr(c, "path", ""))
        if not is_dataclass(c) or isinstance(c, type) or not getattr(c, "path", "") or not place.exists():
            return None
        others = _files_beside(place, c, sources[number] if sources else None)
        facts.update(f"\n{type(c).__qualname__}{asdict(c)}".encode())
        for fact in itertools.chain(_ages(place), *map(_ages, others)):
            facts.update(f"\n{fact}".encode(errors="surrogateescape"))
    return facts.hexdigest()


def _local(path: Any) -> Path:
    return Path(os.path.expanduser(str(path).partition("::")[0]))


def _files_beside(place: Path, config: Any, source: Any) -> list[Path]:
    """What is read that does not lie at the path: other fields that are paths, and labels that a source found."""
    names = {value for key, value in vars(config).items() if key != "path" and isinstance(value, str) and value}
    for entry in getattr(source, "entries", ()):
        if (labels := getattr(entry, "labels", None)) is not None:
            names |= {*(labels.files or (labels.name,))}
    own = place.absolute()
    found = {_local(name).absolute() for name in names if "\0" not in name}
    return sorted(path for path in found if own not in (path, *path.parents) and path.exists())


def _ages(place: Path) -> Iterator[str]:
    """Of each file; beyond so many, folders by their number of entries and the time when one came or went."""
    yield _age(place.resolve())
    number = 0
    for folder, names, files in os.walk(place):
        names.sort()
        number += len(names) + len(files)
        if number > MOST_FILES:
            yield f"{_age(Path(folder))} {len(names)} {len(files)}"
        else:
            yield from (_age(Path(folder, name)) for name in sorted([*names, *files]))


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
