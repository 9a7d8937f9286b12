"""Mean and std that variables are normalised with, measured once as data.normalize says, and kept in the cache.

- of all entries together, or with `data.statistics: each` of each entry alone, on crops drawn like training samples; an
  entry may also bring its own, and stored latents know theirs exactly
- with `data.statistics: volume` of each volume alone, on all of it, or on parts of one larger than WHOLE voxels; what
  belongs to no volume has the average of all
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
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vitrail.data.batch import EntryStatistics, Statistics
from vitrail.data.files.cache import keep
from vitrail.data.files.fingerprint import fingerprint
from vitrail.data.order.sampler import Order, Sample
from vitrail.data.reading.pool import Policy, read_again, timed
from vitrail.data.reading.reader import Reader
from vitrail.draws import stream
from vitrail.errors import BadData, UserError
from vitrail.recipe.kinds import nearest
from vitrail.recipe.normalize import ByVariable, Given, MinMax, Percentiles, Standard, Window, kind_of
from vitrail.recipe.sections import Data

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

SAMPLES, VOXELS = 128, 2**27  # that are looked at, at most
SPREAD = 2**23  # values of all crops and variables that percentiles are taken from
ATTEMPTS = 10  # to find a sample that can be read, with bad: skip
FEWEST = 4  # samples that statistics are measured on
WHOLE, PART = 2**26, 2**22  # voxels of a volume that are looked at, at most, and at a time
MOST_VOLUMES = 20_000  # that are measured one by one

log = logging.getLogger(__name__)


class Looked:
    """Measurements of one variable."""

    def __init__(self, mean: float, std: float, low: float, high: float, values: np.ndarray):
        self.mean, self.std, self.low, self.high, self.values = mean, std, low, high, values

    def percentiles(self, pair: tuple[float, float]) -> tuple[float, float]:
        low, high = np.percentile(self.values, pair)
        return float(low), float(high)


class Gathered:
    """Sums over parts of the data, in float64, of values as the kind of each variable changes them."""

    def __init__(self, kinds: Sequence[Any], parts: int):
        self.kinds, number = list(kinds), len(kinds)
        self.spread = max(1024, SPREAD // (parts * number))  # voxels of a part that percentiles are taken from
        self.total, self.first, self.weight, self.parts = np.zeros((2, number)), np.zeros((number, 1)), 0.0, 0
        self.low, self.high = np.full(number, np.inf), np.full(number, -np.inf)
        self.looked: list[np.ndarray] = []

    def add(self, flat: np.ndarray, weight: float = 1.0) -> None:
        """Take values [C, voxels] in, which are changed for it."""
        for kind, row in zip(self.kinds, flat, strict=True):
            row[:] = kind.change(torch.from_numpy(row)).numpy()
        if any(isinstance(kind, Percentiles) for kind in self.kinds):
            self.looked.append(flat[:, :: math.ceil(flat.shape[1] / self.spread)].copy())  # a view would keep it whole
        self.low, self.high = np.minimum(self.low, flat.min(axis=1)), np.maximum(self.high, flat.max(axis=1))
        if not self.parts:
            # Sums of differences from a first value: exactly 0 for constants, and no loss under a large mean.
            self.first = flat[:, :1].copy()
        flat -= self.first
        self.total += weight * np.array([flat.mean(axis=1), np.square(flat).mean(axis=1)])
        self.weight, self.parts = self.weight + weight, self.parts + 1

    def statistics(self) -> Statistics:
        mean, square = self.total / self.weight
        std = np.sqrt(np.maximum(square - mean**2, 0.0))
        mean = mean + self.first[:, 0]
        values = np.concatenate(self.looked, axis=1) if self.looked else np.zeros((len(self.kinds), 1))
        each = zip(mean, std, self.low, self.high, values, strict=True)
        return _made(*zip(*(kind.pair(Looked(*one)) for kind, one in zip(self.kinds, each, strict=True)), strict=True))


def measure(
    order: Order,
    reader: Reader,
    *,
    samples: int = SAMPLES,
    kinds: Sequence[Any] | None = None,
    policy: Policy | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Statistics:
    """Measure what kinds of normalisation need on the first samples of an order; without kinds mean and std.

    `tick` is called after every sample.
    """
    voxels = max(math.prod(e.window or order.crop) for e in order.extents)
    number = max(FEWEST, min(samples, VOXELS // voxels))
    channels = len(reader.sources[order.extents[0].source].variables)
    found = Gathered(kinds or [Standard()] * channels, number)
    told: set[str] = set()
    for counter in range(number):
        flat = _read(order, reader, counter, policy or Policy(), told)
        tick()
        if flat is not None:
            found.add(flat)
    measured = found.parts
    if measured < FEWEST:
        raise UserError(
            f"data.bad: only {measured} of {number} samples could be read to measure statistics on, each of them tried "
            f"at {ATTEMPTS} places; mend the data, or give `statistics` or data.normalize"
        )
    return found.statistics()


def _made(mean: Any, std: Any) -> Statistics:
    """Return statistics of some numbers; a constant variable carries nothing to scale."""
    return Statistics(tuple(np.asarray(mean).tolist()), tuple(np.where(np.asarray(std) > 0, std, 1.0).tolist()))


def _read_pair(mean: Any, std: Any) -> Statistics:
    """Return statistics as they are given or stored."""
    return Statistics(tuple(float(value) for value in mean), tuple(float(value) for value in std))


def _read(order: Order, reader: Reader, counter: int, policy: Policy, told: set[str]) -> np.ndarray | None:
    """Read the values [C, voxels] of a sample, or of the next that can be read; None where several cannot."""
    for attempt in range(ATTEMPTS):
        flat = _read_one(order(counter, attempt), reader, policy, told)
        if flat is not None:
            return flat
    return None


def _read_one(sample: Sample, reader: Reader, policy: Policy, told: set[str]) -> np.ndarray | None:
    """Read the values [C, voxels] of a sample; None where it is bad and may be left out."""
    size = reader.size_of(sample.source, sample.item, sample.window)
    crop = np.empty((len(reader.sources[sample.source].variables), *size), reader.dtype)
    call = partial(timed, partial(reader.read_into, crop, sample), partial(reader.name_of, sample), policy.limit)
    if policy.or_none(lambda: call() or True, told, _warn) is None:
        return None
    return crop.reshape(len(crop), -1).astype(np.float64)


def _warn(error: BadData) -> None:
    log.warning("bad data, statistics are measured without it: %s", error)


# ---------------------------------------------------------------- of volumes


def parts_of(item: Any, size: int) -> list[list[tuple[int, int]]]:
    """Cut an item along its axes into parts of whole chunks, of about so many voxels."""
    part = [min(c, s) for c, s in zip(item.chunk, item.shape, strict=True)]
    for axis in reversed(range(len(part))):
        room = size // math.prod(part)
        if room > 1:
            part[axis] = min(item.shape[axis], part[axis] * room)
    cuts = []
    for length, shape, chunk, origin in zip(part, item.shape, item.chunk, item.origin, strict=True):
        first = -(origin % chunk) if length >= chunk else 0
        starts = [max(0, start) for start in range(first, shape, length)]
        cuts.append(list(zip(starts, [*starts[1:], shape], strict=True)))
    return cuts


def measure_volume(
    dataset: "Dataset",
    source: int,
    item: int,
    kinds: Sequence[Any],
    *,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Statistics | None:
    """Measure a volume as it is stored: all of it, or some of its parts; None where no part of it can be read."""
    volume, policy = dataset.sources[source].items[item], dataset.policy
    cuts = parts_of(volume, PART)
    number = math.prod(map(len, cuts))
    voxels = math.prod(max(stop - start for start, stop in along) for along in cuts)
    most = max(FEWEST, WHOLE // voxels)
    chosen = np.arange(number)
    if math.prod(volume.shape) > WHOLE and number > most:
        chosen = np.sort(stream(seed, "volume", source, item).choice(number, most, replace=False))
    found, told = Gathered(kinds, len(chosen)), set[str]()
    for place in chosen:
        at = np.unravel_index(int(place), [len(along) for along in cuts])
        region = tuple(slice(*along[i]) for along, i in zip(cuts, at, strict=True))
        name = f"{volume.name} at {', '.join(f'{s.start}:{s.stop}' for s in region)}"
        read = partial(dataset.sources[source].read, item, region)
        again = partial(read_again, read, partial(str, name), retries=policy.retries)
        values = policy.or_none(partial(timed, again, partial(str, name), policy.limit), told, _warn)
        if values is not None:
            flat = values.reshape(len(values), -1).astype(np.float64)
            flat = flat[:, np.isfinite(flat).all(axis=0)]  # crops that meet others are bad data
            if flat.size:
                found.add(flat, flat.shape[1] / voxels)
        tick()
    return found.statistics() if found.parts else None


def of_volumes(
    dataset: "Dataset", source: int, *, seed: int, tick: Callable[[], None] = lambda: None
) -> list[Statistics]:
    """Return the statistics of each volume of a source, measured now or before."""
    if source in dataset.volumes:
        return dataset.volumes[source]
    items, names = dataset.sources[source].items, dataset.sources[source].variables
    kinds = [kind_of(dataset.settings.normalize, name) for name in names]

    def make() -> list[Any]:
        options: dict[str, Any] = {"seed": seed, "tick": tick}
        found = [measure_volume(dataset, source, number, kinds, **options) for number in range(len(items))]
        known = [one for one in found if one is not None]
        if not known:
            raise UserError(f"{dataset.where}.{source}: no volume can be read to measure statistics on; mend the data")
        average = pool(names, [(names, s) for s in known], kinds)
        return [one or average for one in found]

    mark = fingerprint(
        [dataset.configs[source]],
        {"seed": seed, "volumes": [repr(kind) for kind in kinds]},
        [dataset.sources[source]],
    )
    check = checked(len(kinds))

    def read(rows: Any) -> list[Statistics]:
        if len(rows) != len(items):
            raise ValueError(f"no statistics of {len(items)} volumes")
        return [check(row) for row in rows]

    dataset.volumes[source] = remembered(mark, make, read)
    return dataset.volumes[source]


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
    c, names = dataset.settings, dataset.sources[sources[0]].variables
    kinds = [kind_of(c.normalize, name) for name in names]
    exact = getattr(dataset.sources[sources[0]], "statistics", None)
    if len(sources) == 1 and exact is not None and set(kinds) == {Standard()}:
        return _made(exact["mean"], exact["std"])
    what = c.model_dump(include={"tiles", "fit", "filter", "mix"})
    mark = fingerprint(
        [dataset.configs[n] for n in sources],
        {"seed": seed, "crop": dataset.crop, "kinds": [repr(kind) for kind in kinds], **what},
        [dataset.sources[n] for n in sources],
    )
    return remembered(
        mark,
        lambda: dataset.fit_statistics(seed=seed, sources=sources, kinds=kinds, tick=tick),
        checked(len(names)),
    )


def shared(dataset: "Dataset", *, seed: int, tick: Callable[[], None] = lambda: None) -> Statistics:
    """Return one mean and std for each of the dataset's variables, as data.normalize says."""
    c, names, sources = dataset.settings, dataset.variables, dataset.sources
    kinds = check_kinds(c.normalize, names)
    if not any(kind.measured for kind in kinds):
        return Statistics(*(tuple(part) for part in zip(*(kind.pair(None) for kind in kinds), strict=True)))
    if c.statistics == "volume":
        each = [(s.variables, of_volumes(dataset, number, seed=seed, tick=tick)) for number, s in enumerate(sources)]
        return pool(names, [(variables, one) for variables, some in each for one in some], kinds)
    parts = [[number] for number in range(len(sources))] if c.statistics == "each" else dataset.groups
    if len(parts) == 1:
        return fit(dataset, parts[0], seed=seed, tick=tick)
    found = [(sources[part[0]].variables, fit(dataset, part, seed=seed, tick=tick)) for part in parts]
    return pool(names, found, kinds)


def check_kinds(normalize: Any, names: Sequence[str]) -> list[Any]:
    """Return the kind of each variable; refuse names that the data do not have, and other numbers than they need."""
    if isinstance(normalize, ByVariable):
        if strange := [name for name in normalize.of if name not in names]:
            near = nearest(strange[0], list(names))
            raise UserError(
                f"data.normalize.of.{strange[0]}: the data have no such variable"
                f"{f'; did you mean {near!r}?' if near else ''} (they have {', '.join(names)})"
            )
    elif isinstance(normalize, Given):
        if len(normalize.mean) != len(names) or len(normalize.std) != len(names):
            raise UserError(f"data.normalize: give {len(names)} means and stds, one for each of {list(names)}")
        each = zip(normalize.mean, normalize.std, strict=True)
        return [Given(mean=(mean,), std=(std,)) for mean, std in each]
    return [kind_of(normalize, name) for name in names]


def pool(
    names: Sequence[str], parts: Sequence[tuple[Sequence[str], Statistics]], kinds: Sequence[Any] | None = None
) -> Statistics:
    """Average each variable over the sets of variables that have it: its moments, or the ends of its range."""
    mean, square = np.zeros(len(names)), np.zeros(len(names))
    for place, name in enumerate(names):
        found = [(s.mean[v.index(name)], s.std[v.index(name)]) for v, s in parts if name in v]
        mean[place] = np.mean([m for m, _ in found])
        if kinds is not None and isinstance(kinds[place], MinMax | Percentiles | Window):
            square[place] = np.mean([s for _, s in found]) ** 2 + mean[place] ** 2
        else:
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
    c, found, at = dataset.settings, [], 0
    own = len(dataset.groups) > 1 or tuple(names) != dataset.variables
    volumes = c.statistics == "volume"
    find = _finder(known, places or places_of(dataset, dataset.configs))
    for number, (source, entry) in enumerate(zip(dataset.sources, dataset.configs, strict=True)):
        given, size = getattr(entry, "statistics", None), len(source.items) if volumes else 1
        at += size
        if given is not None:
            mine = _read_pair(given["mean"], given["std"])
            if {len(part) for part in mine} != {len(source.variables)}:
                raise UserError(
                    f"{dataset.where}.{number}.statistics: give {len(source.variables)} means and stds, "
                    f"one for each of {list(source.variables)}"
                )
            rows = [mine] * size
        elif c.statistics != "shared":
            there = [find(place, source.variables) for place in range(at - size, at)]
            if None in there:
                measured = (
                    of_volumes(dataset, number, seed=seed, tick=tick)
                    if volumes
                    else [fit(dataset, [number], seed=seed, tick=tick)]
                )
                there = [one or other for one, other in zip(there, measured, strict=True)]
            rows = [one for one in there if one is not None]
        else:
            own_ones = [list(names).index(name) for name in source.variables]
            found.append(Statistics(*(tuple(part[i] for i in own_ones) for part in (base.mean, base.std))))
            continue
        own = True
        found.append(_table(rows) if volumes else rows[0])
    return found if own else None


def _table(rows: Sequence[Statistics]) -> Statistics:
    """Join statistics of volumes: a row of each."""
    mean, std = (tuple(part) for part in zip(*rows, strict=True))
    return Statistics(*cast(Any, (mean, std)))


def rows_of(entry: Statistics) -> list[list[list[float]]]:
    """Return [mean, std] of an entry, or of each of its volumes."""
    if not isinstance(entry.mean[0], list | tuple):
        return [[list(entry.mean), list(entry.std)]]
    return [[list(mean), list(std)] for mean, std in zip(entry.mean, entry.std, strict=True)]


def _finder(
    known: Sequence[tuple[str, Statistics]], places: Sequence[str]
) -> Callable[[int, Sequence[str]], Statistics | None]:
    """Return what tells what is known of a place: of the same one in the same list, else of those with its name."""
    same, named = [place for place, _ in known] == list(places), dict[str, list[Statistics]]()
    for place, statistics in known:
        named.setdefault(place, []).append(statistics)

    def find(number: int, names: Sequence[str]) -> Statistics | None:
        some = [known[number][1]] if same else named.get(places[number], [])
        some = [s for s in some if len(s.mean) == len(names)]
        return some[0] if len(set(some)) == 1 else pool(names, [(names, s) for s in some]) if some else None

    return find


def with_entries(base: Statistics, entries: Sequence[Statistics] | None, places: Sequence[str] = ()) -> Statistics:
    """Return the shared statistics, which carry those of the entries into every checkpoint."""
    if entries is None:
        return base
    both = EntryStatistics(base.mean, base.std)
    both.entries, both.places = [row for s in entries for row in rows_of(s)], list(places)
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
    """Refuse statistics of parts of the data where nothing is measured."""
    c, what = data.normalize, "volume" if data.statistics == "volume" else "entry"
    kinds = [*c.of.values(), c.others] if isinstance(c, ByVariable) else [kind_of(c, "")]
    if data.statistics != "shared" and not any(kind.measured for kind in kinds):
        raise UserError(
            f"data.statistics: {data.statistics!r} measures every {what}, but data.normalize does not; leave one of "
            "them out"
        )


def places_of(dataset: "Dataset", configs: Sequence[Any]) -> list[str]:
    """Name what each entry reads, by kind, path and variables; `configs` are those of the recipe, not of copies.

    With statistics of volumes each item is named.
    """
    found = []
    for number, (c, source) in enumerate(zip(configs, dataset.sources, strict=True)):
        place = f"{getattr(c, 'kind', '')}:{getattr(c, 'path', '')}:{','.join(source.variables)}"
        if dataset.settings.statistics != "volume":
            found.append(place)
        elif len(source.items) > MOST_VOLUMES:
            raise UserError(
                f"data.statistics: 'volume' measures each volume before the first step, and {dataset.where}.{number} "
                f"has {len(source.items)} items; use shared or each"
            )
        else:
            found += [f"{place}#{item.name}" for item in source.items]
    return found
