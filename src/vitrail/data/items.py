"""Sources of many small items: the keys they share, which items an entry takes, and items made when asked for."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, overload

import numpy as np

from vitrail.data.source import Item
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.recipe import config
from vitrail.recipe.kinds import nearest


@config
class ItemsConfig:
    """Keys of every such source."""

    path: str
    variables: list[str] | None = None  # which channels to read, in this order, or new names for all of them
    split: tuple[float, float] = (0.0, 1.0)  # which share of the items: [0, 0.8] to train, [0.8, 1] to validate
    start: float = 0.0  # first of the sorted items, as a share of them
    end: float = 1.0  # and the last
    weight: float = 1.0  # times its size (items here, crops in volumes): its share of the samples
    statistics: dict[Literal["mean", "std"], list[float]] | None = None  # of this entry alone
    stage: bool = True  # copy it to the node's own disk where data.stage says so

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise UserError(
                f"weight = {self.weight} of {self.path} must be above 0; leave the entry out to give it no samples"
            )
        for name, (low, high) in {"split": self.split, "start and end": (self.start, self.end)}.items():
            if not 0 <= low < high <= 1:
                raise UserError(
                    f"{name} = {[low, high]} of {self.path} must be two rising numbers from 0 to 1, such as [0, 0.8]"
                )
        given = self.statistics
        if given is not None and (set(given) != {"mean", "std"} or min(given["std"], default=0) <= 0):
            raise UserError(
                f"statistics = {given} of {self.path} must give the mean and a positive std of each variable, "
                "such as {mean: [128], std: [40]}"
            )


def keep_share(settings: ItemsConfig, names: Sequence[str]) -> np.ndarray:
    """Places of the items that an entry's start, end and split leave.

    The split goes by hashes of names: adding items moves none of the others in or out of it.
    """
    total, (low, high) = len(names), settings.split
    kept = np.arange(round(settings.start * total), round(settings.end * total))
    if (low, high) != (0, 1):
        kept = np.array([n for n in kept.tolist() if low <= key(0, "split", names[n]) / 2**63 < high], np.int64)
    if not len(kept):
        raise UserError(
            f"split = {[low, high]} with start = {settings.start} and end = {settings.end} of {settings.path} "
            f"holds none of its {total} items; widen it"
        )
    return kept


def refuse_mixed_names(given: Sequence[str], known: Sequence[str], path: str) -> None:
    """New names are given to all channels or to none: with some of the known ones among them, one is misspelt."""
    unknown = [name for name in given if name not in known]
    folded, alike = [name.casefold() for name in known], [name.casefold() for name in given]
    if unknown and alike != folded and set(alike) & set(folded):
        near = nearest(unknown[0], [name for name in known if name not in given])
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(
            f"variables = {list(given)}: {path} has no {unknown[0]!r}; {hint}choose from {', '.join(known)}, or give "
            "all channels names that are none of these"
        )


def choose_channels(given: list[str] | None, known: Sequence[str], path: str) -> tuple[tuple[str, ...], list[int]]:
    """Names of the variables and their channels: some of the known ones, or as many names as there are channels."""
    if given is None:
        return tuple(known), list(range(len(known)))
    if given and len(set(given)) == len(given):
        if set(given) <= set(known):
            return tuple(given), [list(known).index(name) for name in given]
        refuse_mixed_names(given, known, path)
        if len(given) == len(known):
            return tuple(given), list(range(len(known)))
    raise UserError(
        f"variables = {given} cannot be read from {path}; choose from {', '.join(known)}, or give {len(known)} names"
    )


class LazySequence(Sequence[Any]):
    """Things made when they are asked for: a million of them take no memory. The latest are kept, to be asked again."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._count, self._make = count, make
        self._kept = lru_cache(maxsize=4096)(make)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        return self._kept(range(self._count)[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._count))


def whole_item(name: str, shape: tuple[int, ...], label: int | None) -> Item:
    """An item that is stored as one piece, of unknown voxel size."""
    return Item(name, shape, shape, (0,) * len(shape), (1.0,) * len(shape), None, label)
