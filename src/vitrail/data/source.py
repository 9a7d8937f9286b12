"""The contract of data sources: named variables on a grid, items of known shape, and reads of any window.

- an item is one volume, image or scene; its shape is that of the usable region, spatial axes only
- a read returns [C, *spatial]: one channel per variable, in the order of `variables`
- sources are read from several threads at once, and each read must be a pure function of its arguments
- labels are the class of an item (`Item.label`, with `class_names`) or of each voxel (`read_labels`)

`label_map: {255: 1}` says which stored values of labels are which classes.

Sources of many small items: the keys they share, which items an entry takes, and items made when asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np

from vitrail.draws import key
from vitrail.errors import UserError, some
from vitrail.recipe import config
from vitrail.recipe.kinds import nearest


@dataclass(frozen=True)
class Item:
    """One volume or image of a source."""

    name: str
    shape: tuple[int, ...]  # spatial, of the usable region
    chunk: tuple[int, ...]  # spatial read granularity: reading part of a chunk costs the whole of it
    origin: tuple[int, ...]  # region start modulo chunk, so chunk boundaries lie at -origin, chunk - origin, ...
    spacing: tuple[float, ...]  # physical size of a voxel
    unit: str | None  # of the spacing; None where the file does not say
    label: int | None = None  # class of the item, a place in the source's `class_names`, where it knows one
    scale: tuple[float, ...] = ()  # voxels of the file to one of a sample, where another voxel size is wanted; else 1
    slices: int | None = None  # number of the axis across which samples are 2-D slices

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", (1.0,) * len(self.shape))


def without(values: Sequence[Any], across: int | None) -> tuple[Any, ...]:
    """Return one value an axis of a sample, out of one an axis of its item."""
    return tuple(value for axis, value in enumerate(values) if axis != across)


@runtime_checkable
class Source(Protocol):
    """Random access to items that share axes, variables and type."""

    @property
    def axes(self) -> tuple[str, ...]: ...  # spatial names, for example ("z", "y", "x")
    @property
    def variables(self) -> tuple[str, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def items(self) -> Sequence[Item]: ...

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window of an item, [C, *spatial]; the region is relative to the usable region."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what `vitrail data inspect` shows; plain JSON values only."""
        ...


@runtime_checkable
class ClassifiedSource(Source, Protocol):
    """A source whose items have classes: each item's `label` is a place in `class_names`."""

    @property
    def class_names(self) -> tuple[str, ...]: ...  # empty where this one has none after all


@runtime_checkable
class LabelledSource(Source, Protocol):
    """A source whose voxels have classes, on the grid of the image."""

    @property
    def label_dtype(self) -> np.dtype | None: ...  # whole numbers; None where this one has no labels after all
    @property
    def label_names(self) -> dict[int, str]: ...  # of the values that the file names; may be empty

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read the labels of a window, [*spatial]: of the same voxels as `read` gives for it."""
        ...


@runtime_checkable
class ManySource(Source, Protocol):
    """A source of small items that are all alike and lie ready, so that many of them are copied at once."""

    @property
    def alike(self) -> Item: ...  # what all items have in common: all but name and label

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """Read whole items [B, C, *shape]; many of them have the time to be read that one sample has."""
        ...

    def labels_of(self, items: np.ndarray) -> np.ndarray | None:
        """Return the classes of items [B]; None where some have none."""
        ...


class ReadArray(NamedTuple):
    """An array that a source reads."""

    stored: Any  # data/stored.py
    is_labels: bool
    window: Callable[[], Any] | None  # what an item reads of it; None: of the items that the share leaves out, too


class Reads(NamedTuple):
    """The files that a source reads: all of them, or those of its arrays, or else what lies at its path."""

    files: tuple[str, ...] | None = None  # and folders
    arrays: Sequence[ReadArray] = ()
    hierarchy: bool = False  # whether its path is one of groups and arrays, whose chunks are files
    settings: Any = None  # of the entry as it was opened, which may be that of a copy


# A source leaves out what it has no use for: these are asked instead of it.


def reads_of(source: Any) -> Reads:
    """Return which files a source reads, by its `reads()`, or by `files()`, a list of them all; None has none open."""
    told = getattr(source, "reads", None)
    if callable(told):
        found: Reads = told()
        return found
    files, settings = getattr(source, "files", None), getattr(source, "config", None)
    return Reads(tuple(files()) if callable(files) else None, settings=settings)


def class_names(source: Source) -> tuple[str, ...]:
    """Return the names of the classes of a source's items; none where they have no class."""
    return tuple(getattr(source, "class_names", ()))


def keeps_chunks(source: Source) -> bool:
    """Tell whether a source keeps decoded chunks itself, so that nobody need keep blocks of it."""
    return getattr(source, "keeps_chunks", False)


def label_dtype(source: Source) -> np.dtype | None:
    """Return the type of a source's labels of voxels; None where it has none."""
    return getattr(source, "label_dtype", None)


def label_names(source: Source) -> dict[int, str]:
    """Return the names that a source knows of values of its labels."""
    return getattr(source, "label_names", {})


def notes_of(source: Source) -> list[str]:
    """Return what a source has to say of how it took the data, such as by which names it found labels."""
    return list(getattr(source, "notes", ()))


def check_label_map(mapping: Mapping[int, int], dtype: np.dtype, path: str) -> None:
    for value in mapping.values():
        if not fits(value, dtype):
            raise UserError(
                f"label_map = {dict(mapping)} of {path} maps to {value}, which is no {dtype}, the type of the labels; "
                "choose another number"
            )


def map_labels(values: np.ndarray, mapping: Mapping[int, int]) -> np.ndarray:
    """Change some values of labels; other values stay as they are."""
    if not mapping:
        return values
    mapped = values.copy()
    for value, number in mapping.items():
        mapped[values == value] = number
    return mapped


def fits(value: float, dtype: np.dtype) -> bool:
    """Tell whether a type can hold a number."""
    if dtype.kind == "f":
        return bool(np.isfinite(value))
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(low <= value <= high and value == int(value))


@config
class ItemsConfig:
    """Keys that all sources of stored data have."""

    path: str
    variables: list[str] | None = None  # which channels to read, in this order, or new names for all of them
    split: tuple[float, float] = (0.0, 1.0)  # which share of the items: [0, 0.8] to train, [0.8, 1] to validate
    start: float = 0.0  # first of the sorted items, as a share of them
    end: float = 1.0  # and the last
    weight: float = 1.0  # times its size (items here, crops in volumes): its share of the samples
    draw: Literal["voxels", "items"] = "voxels"  # whether items are drawn in proportion to their voxels, or all alike
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


def keep_share(settings: ItemsConfig, names: Sequence[str], *, remedy: str = "widen it") -> np.ndarray:
    """Return the places of the items that an entry's start, end and split leave.

    The split goes by hashes of names: adding items moves none of the others in or out of it.
    """
    total, (low, high) = len(names), settings.split
    kept = np.arange(round(settings.start * total), round(settings.end * total))
    if (low, high) != (0, 1):
        kept = np.array([n for n in kept.tolist() if low <= key(0, "split", names[n]) / 2**63 < high], np.int64)
    if not len(kept):
        raise UserError(
            f"split = {[low, high]} with start = {settings.start} and end = {settings.end} of {settings.path} "
            f"holds none of its {total} items; {remedy}"
        )
    return kept


def refuse_mixed_names(given: Sequence[str], known: Sequence[str], path: str) -> None:
    """Refuse new names with known ones among them: one is misspelt, as all channels get new names or none."""
    unknown = [name for name in given if name not in known]
    folded, alike = [name.casefold() for name in known], [name.casefold() for name in given]
    if unknown and alike != folded and set(alike) & set(folded):
        near = nearest(unknown[0], [name for name in known if name not in given])
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(
            f"variables = {list(given)}: {path} has no {unknown[0]!r}; {hint}choose from {some(known)}, or give "
            "all channels names that are none of these"
        )


def choose_channels(given: list[str] | None, known: Sequence[str], path: str) -> tuple[tuple[str, ...], list[int]]:
    """Return names of the variables and their channels: some of the known ones, or as many names as channels."""
    if given is None:
        return tuple(known), list(range(len(known)))
    if given and len(set(given)) == len(given):
        if set(given) <= set(known):
            return tuple(given), [list(known).index(name) for name in given]
        refuse_mixed_names(given, known, path)
        if len(given) == len(known):
            return tuple(given), list(range(len(known)))
    raise UserError(
        f"variables = {given} cannot be read from {path}; choose from {some(known)}, or give {len(known)} names"
    )


class ItemSource:
    """A source of items that are stored one by one; it says what they have in common."""

    axes: tuple[str, ...]
    variables: tuple[str, ...]
    dtype: np.dtype
    shape: tuple[int, ...]  # of every item, unless `make_item` knows better
    class_names: tuple[str, ...] = ()

    def __init__(self, settings: Any, names: Sequence[str], labels: Sequence[int] | np.ndarray | None = None) -> None:
        self.config, self.names, self._labels = settings, names, labels
        self.kept = keep_share(settings, names)  # numbers of the items among all
        self.items: Sequence[Item] = LazySequence(len(self.kept), self.make_item)

    def make_item(self, item: int) -> Item:
        return whole_item(self.names[self.kept[item]], self.shape, self.label(item))

    def label(self, item: int) -> int | None:
        """Return the class of an item; None where it has none."""
        number = -1 if self._labels is None else int(self._labels[self.kept[item]])
        return None if number < 0 else number

    def describe(self) -> dict[str, Any]:
        first = self.items[0]
        return {
            "kind": self.config.kind,
            "path": self.config.path,
            "axes": list(self.axes),
            "shape": list(first.shape),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": list(first.spacing),
            "unit": first.unit,
            "items": len(self.items),
            "classes": list(self.class_names),
        }


class LazySequence(Sequence[Any]):
    """A sequence whose things are made when they are asked for, so that a million take no memory; some are kept."""

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

    def forget(self) -> None:
        """Make everything anew when it is asked for."""
        self._kept.cache_clear()


def whole_item(name: str, shape: tuple[int, ...], label: int | None) -> Item:
    """Return an item that is stored as one piece, of unknown voxel size."""
    return Item(name, shape, shape, (0,) * len(shape), (1.0,) * len(shape), None, label)
