"""Statistics of all entries of a recipe: shared, or each entry's own; measured once and kept in the cache.

An entry's own are those that it brings along, or with `data.statistics: each` those that are measured on it alone. They
are stored in every checkpoint, and a run that goes on or is evaluated uses them again. A held-out entry with the path
and the variables of a training entry takes the same ones; of several such entries, those of all of them together.
Nothing is measured on an entry alone that knows its exact mean and std, as stored latents do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vitrail.data.batch import EntryStatistics, Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.fingerprint import fingerprint
from vitrail.data.statistics import checked, remembered
from vitrail.errors import UserError
from vitrail.recipe.sections import Data


def fit(dataset: Dataset, sources: Sequence[int], *, seed: int, tick: Callable[[], None] = lambda: None) -> Statistics:
    """Statistics of some sources together, measured now or before."""
    c = dataset.settings
    percentiles = None if isinstance(c.normalize, str) else c.normalize.percentiles
    exact = getattr(dataset.sources[sources[0]], "statistics", None)
    if len(sources) == 1 and exact is not None and percentiles is None:
        return Statistics(tuple(exact["mean"]), tuple(std if std > 0 else 1.0 for std in exact["std"]))
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


def shared(dataset: Dataset, *, seed: int, tick: Callable[[], None] = lambda: None) -> Statistics:
    """One mean and std for each of the dataset's variables, as data.normalize says."""
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
    """Of several sets of variables: the moments of each variable, averaged over the sets that have it."""
    mean, square = np.zeros(len(names)), np.zeros(len(names))
    for place, name in enumerate(names):
        found = [(s.mean[v.index(name)], s.std[v.index(name)]) for v, s in parts if name in v]
        mean[place] = np.mean([m for m, _ in found])
        square[place] = np.mean([s**2 + m**2 for m, s in found])
    std = np.sqrt(np.maximum(square - mean**2, 0.0))
    return Statistics(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist()))


def of_entries(
    dataset: Dataset,
    base: Statistics,
    *,
    names: Sequence[str],
    seed: int,
    places: Sequence[str] | None = None,
    known: Sequence[tuple[str, Statistics]] = (),
    tick: Callable[[], None] = lambda: None,
) -> list[Statistics] | None:
    """The statistics of each entry, or None where all have the shared ones.

    `known` are those of other entries, or of these ones before; they belong to the same `places`.
    """
    found, own = [], len(dataset.groups) > 1 or tuple(names) != dataset.variables
    places = places or places_of(dataset, dataset.configs)
    for number, (source, c) in enumerate(zip(dataset.sources, dataset.configs, strict=True)):
        given = getattr(c, "statistics", None)
        if given is not None:
            mean, std = (tuple(float(v) for v in _field(given, name)) for name in ("mean", "std"))
            if len(mean) != len(source.variables) or len(std) != len(source.variables):
                raise UserError(
                    f"{dataset.where}.{number}.statistics: give {len(source.variables)} means and stds, "
                    f"one for each of {list(source.variables)}"
                )
            found.append(Statistics(mean, std))
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
    """What is known of an entry: of the same one in the same list, else of those with its place."""
    if [place for place, _ in known] == list(places):
        same = [known[number][1]]
    else:
        same = [statistics for place, statistics in known if place == places[number]]
    same = [s for s in same if len(s.mean) == len(names)]
    return same[0] if len(set(same)) == 1 else pool(names, [(names, s) for s in same]) if same else None


def with_entries(base: Statistics, entries: Sequence[Statistics] | None, places: Sequence[str] = ()) -> Statistics:
    """The shared statistics, which carry those of the entries into every checkpoint."""
    if entries is None:
        return base
    both = EntryStatistics(base.mean, base.std)
    both.entries, both.places = [[list(s.mean), list(s.std)] for s in entries], list(places)
    return both


def stored(found: Any) -> Statistics:
    """What a checkpoint has: the shared statistics, and those of the entries where it has them."""
    base = Statistics(*(tuple(float(value) for value in found[name]) for name in ("mean", "std")))
    each = [Statistics(*(tuple(float(v) for v in part) for part in one)) for one in found.get("entries", ())]
    return with_entries(base, each or None, [str(place) for place in found.get("places", ())])


def known_of(statistics: Statistics | None) -> list[tuple[str, Statistics]]:
    """The entries' statistics that shared ones carry, with their places."""
    if not isinstance(statistics, EntryStatistics) or len(statistics.places) != len(statistics.entries):
        return []
    each = (Statistics(tuple(mean), tuple(std)) for mean, std in statistics.entries)
    return list(zip(statistics.places, each, strict=True))


def check(data: Data) -> None:
    if data.statistics == "each" and (
        data.normalize == "none" or (not isinstance(data.normalize, str) and bool(data.normalize.mean))
    ):
        raise UserError(
            "data.statistics: 'each' measures every entry, but data.normalize does not; leave one of them out"
        )


def places_of(dataset: Dataset, configs: Sequence[Any]) -> list[str]:
    """What each entry reads: kind, path and variables. `configs` are those of the recipe, not of staged copies."""
    return [
        f"{getattr(c, 'kind', '')}:{getattr(c, 'path', '')}:{','.join(source.variables)}"
        for c, source in zip(configs, dataset.sources, strict=True)
    ]


def _field(given: Any, name: str) -> Any:
    return given[name] if isinstance(given, dict) else getattr(given, name)
