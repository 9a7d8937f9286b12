"""How variables are normalised: measured once on crops drawn like training samples, and kept in the cache.

- by mean and standard deviation, or by two percentiles, which become -1 and 1
- of all entries together, or of each entry alone; an entry may also bring its own
- what was measured is kept by a fingerprint of the data and the settings, and in every checkpoint
"""

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vitrail.data.bad import Policy
from vitrail.data.batch import Statistics
from vitrail.data.cache import keep
from vitrail.data.pool import timed
from vitrail.data.reader import Reader
from vitrail.data.sampler import Order, Sample
from vitrail.errors import BadData, UserError

SAMPLES, VOXELS = 128, 2**27  # that are looked at, at most
SPREAD = 2**23  # values of all crops and variables that percentiles are taken from
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


def remembered(name: str | None, make: Callable[[], Any], check: Callable[[Any], Any] = lambda value: value) -> Any:
    """What `check` makes of a JSON value from the cache, or of one made now and kept there; it may raise ValueError."""
    if name is None:
        return check(make())
    return keep(
        "statistics", name, lambda: json.dumps(make()).encode(), lambda kept: check(json.loads(kept)), wait=False
    )


def checked(number: int) -> Callable[[Any], Statistics]:
    """Statistics of so many variables out of a JSON value; ValueError where they are none."""

    def check(value: Any) -> Statistics:
        mean, std = (tuple(float(v) for v in part) for part in value)
        if len(mean) != number or len(std) != number or not np.isfinite([*mean, *std]).all() or min(std) <= 0:
            raise ValueError(f"no statistics of {number} variables")
        return Statistics(mean, std)

    return check
