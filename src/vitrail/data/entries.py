"""Statistics of all entries of a recipe: shared, or each entry's own; measured once and kept in the cache.

An entry's own are those that it brings along, or with `data.statistics: each` those that are measured on it alone. A
held-out entry with the path of a training entry takes the same ones.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.batch import EntryStatistics, Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.statistics import fingerprint, remembered
from vitrail.errors import UserError
from vitrail.recipe.sections import Data


def fit(dataset: Dataset, sources: Sequence[int], *, seed: int) -> Statistics:
    """Statistics of some sources together, measured now or before."""
    c = dataset.settings
    percentiles = None if isinstance(c.normalize, str) else c.normalize.percentiles
    what = c.model_dump(include={"tiles", "fit", "filter", "mix"})
    mark = fingerprint(
        [dataset.configs[n] for n in sources],
        {"seed": seed, "crop": dataset.crop, "percentiles": percentiles, **what},
    )
    found = remembered(mark, lambda: dataset.fit_statistics(seed=seed, sources=sources, percentiles=percentiles))
    return Statistics(*(tuple(part) for part in found))


def shared(dataset: Dataset, *, seed: int) -> Statistics:
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
        return fit(dataset, parts[0], seed=seed)
    return pool(names, [(dataset.sources[part[0]].variables, fit(dataset, part, seed=seed)) for part in parts])


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
    dataset: Dataset, base: Statistics, *, names: Sequence[str], seed: int, known: Sequence[tuple[str, Statistics]] = ()
) -> list[Statistics] | None:
    """The statistics of each entry, or None where all have the shared ones; `known` are those of other entries."""
    found, own = [], len(dataset.groups) > 1 or tuple(names) != dataset.variables
    for number, (source, c) in enumerate(zip(dataset.sources, dataset.configs, strict=True)):
        given, there = getattr(c, "statistics", None), dict(known).get(_place(c))
        if given is not None:
            mean, std = (tuple(float(v) for v in _field(given, name)) for name in ("mean", "std"))
            if len(mean) != len(source.variables) or len(std) != len(source.variables):
                raise UserError(
                    f"{dataset.where}.{number}.statistics: give {len(source.variables)} means and stds, "
                    f"one for each of {list(source.variables)}"
                )
            found.append(Statistics(mean, std))
        elif dataset.settings.statistics == "each":
            usable = there is not None and len(there.mean) == len(source.variables)
            found.append(there if usable and there is not None else fit(dataset, [number], seed=seed))
        else:
            places = [list(names).index(name) for name in source.variables]
            found.append(Statistics(*(tuple(part[i] for i in places) for part in (base.mean, base.std))))
            continue
        own = True
    return found if own else None


def with_entries(base: Statistics, entries: Sequence[Statistics] | None) -> Statistics:
    """The shared statistics, which carry those of the entries into every checkpoint."""
    if entries is None:
        return base
    both = EntryStatistics(base.mean, base.std)
    both.entries = [[list(s.mean), list(s.std)] for s in entries]
    return both


def check(data: Data) -> None:
    if data.statistics == "each" and (
        data.normalize == "none" or (not isinstance(data.normalize, str) and bool(data.normalize.mean))
    ):
        raise UserError(
            "data.statistics: 'each' measures every entry, but data.normalize does not; leave one of them out"
        )


def _place(config: Any) -> str:
    return f"{getattr(config, 'kind', '')}:{getattr(config, 'path', '')}"


def places(dataset: Dataset, entries: Sequence[Statistics] | None) -> list[tuple[str, Statistics]]:
    """The paths of entries with their statistics."""
    return [] if entries is None else [(_place(c), s) for c, s in zip(dataset.configs, entries, strict=True)]


def _field(given: Any, name: str) -> Any:
    return given[name] if isinstance(given, dict) else getattr(given, name)
