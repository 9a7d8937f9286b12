"""How variables are normalised: measured on crops drawn like training samples, once, and kept in the cache.

- by mean and standard deviation, or by two percentiles, which become -1 and 1
- of all entries together, or with `data.statistics: each` of each entry alone; an entry may also bring its own, and
  stored latents know theirs exactly
- what was measured is kept by a fingerprint of the data and the settings, and in every checkpoint: a run that goes on
  or is evaluated uses it again
- a held-out entry with the path and the variables of a training entry takes the same statistics; of several such
  entries, those of all of them together
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.batch import EntryStatistics, Statistics
from vitrail.data.files.cache import keep
from vitrail.data.files.fingerprint import fingerprint
from vitrail.data.order.sampler import Order, Sample
from vitrail.data.reading.pool import Policy, timed
from vitrail.data.reading.reader import Reader
from vitrail.errors import BadData, UserError
from vitrail.recipe.sections import Data

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

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
    """Measure mean and std, or the percentiles that stand for them, on the first samples of an order, in float64.

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
    return _made(mean, std)


def _made(mean: Any, std: Any) -> Statistics:
    """Return statistics of some numbers; a constant variable carries nothing to scale."""
    return Statistics(tuple(np.asarray(mean).tolist()), tuple(np.where(np.asarray(std) > 0, std, 1.0).tolist()))


def _read_pair(mean: Any, std: Any) -> Statistics:
    """Return statistics as they are given or stored."""
    return Statistics(tuple(float(value) for value in mean), tuple(float(value) for value in std))


def _read(order: Order, reader: Reader, counter: int, policy: Policy, told: set[str]) -> np.ndarray | None:
    """Read the values [C, voxels] of a sample, or of the next that can be read; None where several cannot."""
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
    """Return a JSON value from the cache, or one made now and kept there; `check` reads it or raises ValueError."""
    if name is None:
        return check(make())
    return keep(
        "statistics", name, lambda: json.dumps(make()).encode(), lambda kept: check(json.loads(kept)), wait=False
    )


def checked(number: int) -> Callable[[Any], Statistics]:
    """Return a function that reads statistics of `number` variables from a JSON value, or raises ValueError."""

    def check(value: Any) -> Statistics:
        found = _read_pair(*value)
        if {len(part) for part in found} != {number} or not np.isfinite(found).all() or min(found.std) <= 0:
            raise ValueError(f"no statistics of {number} variables")
        return found

    return check


# ---------------------------------------------------------------- of a recipe's entries


def fit(
    dataset: "Dataset", sources: Sequence[int], *, seed: int, tick: Callable[[], None] = lambda: None
) -> Statistics:
    """Return statistics of some sources together, measured now or before."""
    c = dataset.settings
    percentiles = None if isinstance(c.normalize, str) else c.normalize.percentiles
    exact = getattr(dataset.sources[sources[0]], "statistics", None)
    if len(sources) == 1 and exact is not None and percentiles is None:
        return _made(exact["mean"], exact["std"])
    what = c.model_dump(include={"tiles", "fit", "filter", "mix"})
    mark = fingerprint(
        [dataset.configs[n] for n in sources],
        {"seed": seed, "crop": dataset.crop, "percentiles": percentiles, **what},
        [dataset.sources[n] for n in sources],
    )
    return remembered(
        mark,
        lambda: dataset.fit_statistics(seed=seed, sources=sources, percentiles=percentiles, tick=tick),
        checked(len(dataset.sources[sources[0]].variables)),
    )


def shared(dataset: "Dataset", *, seed: int, tick: Callable[[], None] = lambda: None) -> Statistics:
    """Return one mean and std for each of the dataset's variables, as data.normalize says."""
    normalize, names = dataset.settings.normalize, dataset.variables
    if normalize == "none":
        return Statistics((0.0,) * len(names), (1.0,) * len(names))
    if not isinstance(normalize, str) and normalize.mean:
        if len(normalize.mean) != len(names) or len(normalize.std) != len(names):
            raise UserError(f"data.normalize: give {len(names)} means and stds, one for each of {list(names)}")
        return Statistics(normalize.mean, normalize.std)
    if dataset.settings.statistics == "each":
        parts = [[number] for number in range(len(dataset.sources))]
    else:
        parts = dataset.groups
    if len(parts) == 1:
        return fit(dataset, parts[0], seed=seed, tick=tick)
    found = [(dataset.sources[part[0]].variables, fit(dataset, part, seed=seed, tick=tick)) for part in parts]
    return pool(names, found)


def pool(names: Sequence[str], parts: Sequence[tuple[Sequence[str], Statistics]]) -> Statistics:
    """Average the moments of each variable over the sets of variables that have it."""
    mean, square = np.zeros(len(names)), np.zeros(len(names))
    for place, name in enumerate(names):
        found = [(s.mean[v.index(name)], s.std[v.index(name)]) for v, s in parts if name in v]
        mean[place] = np.mean([m for m, _ in found])
        square[place] = np.mean([s**2 + m**2 for m, s in found])
    return _made(mean, np.sqrt(np.maximum(square - mean**2, 0.0)))


def of_entries(
    dataset: "Dataset",
    base: Statistics,
    *,
    names: Sequence[str],
    seed: int,
    places: Sequence[str] | None = None,
    known: Sequence[tuple[str, Statistics]] = (),
    tick: Callable[[], None] = lambda: None,
) -> list[Statistics] | None:
    """Return the statistics of each entry, or None where all have the shared ones.

    `known` are those of other entries, or of these ones before; they belong to the same `places`.
    """
    found, own = [], len(dataset.groups) > 1 or tuple(names) != dataset.variables
    places = places or places_of(dataset, dataset.configs)
    for number, (source, c) in enumerate(zip(dataset.sources, dataset.configs, strict=True)):
        given = getattr(c, "statistics", None)
        if given is not None:
            mine = _read_pair(given["mean"], given["std"])
            if {len(part) for part in mine} != {len(source.variables)}:
                raise UserError(
                    f"{dataset.where}.{number}.statistics: give {len(source.variables)} means and stds, "
                    f"one for each of {list(source.variables)}"
                )
            found.append(mine)
        elif dataset.settings.statistics == "each":
            there = _find(known, places, number, source.variables)
            found.append(there if there is not None else fit(dataset, [number], seed=seed, tick=tick))
        else:
            own_ones = [list(names).index(name) for name in source.variables]
            found.append(Statistics(*(tuple(part[i] for i in own_ones) for part in (base.mean, base.std))))
            continue
        own = True
    return found if own else None


def _find(
    known: Sequence[tuple[str, Statistics]], places: Sequence[str], number: int, names: Sequence[str]
) -> Statistics | None:
    """Return what is known of an entry: of the same one in the same list, else of those with its place."""
    if [place for place, _ in known] == list(places):
        same = [known[number][1]]
    else:
        same = [statistics for place, statistics in known if place == places[number]]
    same = [s for s in same if len(s.mean) == len(names)]
    return same[0] if len(set(same)) == 1 else pool(names, [(names, s) for s in same]) if same else None


def with_entries(base: Statistics, entries: Sequence[Statistics] | None, places: Sequence[str] = ()) -> Statistics:
    """Return the shared statistics, which carry those of the entries into every checkpoint."""
    if entries is None:
        return base
    both = EntryStatistics(base.mean, base.std)
    both.entries, both.places = [[list(s.mean), list(s.std)] for s in entries], list(places)
    return both


def stored(found: Any) -> Statistics:
    """Read the statistics in a checkpoint: the shared ones, and those of the entries where it has them."""
    base = _read_pair(found["mean"], found["std"])
    each = [_read_pair(*one) for one in found.get("entries", ())]
    return with_entries(base, each or None, [str(place) for place in found.get("places", ())])


def known_of(statistics: Statistics | None) -> list[tuple[str, Statistics]]:
    """Return the entries' statistics that shared ones carry, with their places."""
    if not isinstance(statistics, EntryStatistics) or len(statistics.places) != len(statistics.entries):
        return []
    each = (_read_pair(*one) for one in statistics.entries)
    return list(zip(statistics.places, each, strict=True))


def check(data: Data) -> None:
    if data.statistics == "each" and (
        data.normalize == "none" or (not isinstance(data.normalize, str) and bool(data.normalize.mean))
    ):
        raise UserError(
            "data.statistics: 'each' measures every entry, but data.normalize does not; leave one of them out"
        )


def places_of(dataset: "Dataset", configs: Sequence[Any]) -> list[str]:
    """Name what each entry reads, by kind, path and variables; `configs` are those of the recipe, not of copies."""
    return [
        f"{getattr(c, 'kind', '')}:{getattr(c, 'path', '')}:{','.join(source.variables)}"
        for c, source in zip(configs, dataset.sources, strict=True)
    ]
