"""What every data source offers: named variables on a grid, items of known shape, and reads of any window.

- an item is one volume, image or scene; its shape is that of the usable region, spatial axes only
- a read returns [C, *spatial]: one channel per variable, in the order of `variables`
- sources are read from several threads at once, and each read must be a pure function of its arguments
- labels are the class of an item (`Item.label`, with `class_names`) or of each voxel (`read_labels`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vitrail.errors import UserError


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
        """The window of an item, [C, *spatial]; the region is relative to the usable region."""
        ...

    def describe(self) -> dict[str, Any]:
        """What `vitrail data inspect` shows; plain JSON values only."""
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
        """The labels of a window, [*spatial]: of the same voxels as `read` gives for it."""
        ...


@runtime_checkable
class ManySource(Source, Protocol):
    """A source of small items that are all alike and lie ready, so that many of them are copied at once."""

    @property
    def alike(self) -> Item: ...  # what all items have in common: all but name and label

    def read_many(self, items: np.ndarray) -> np.ndarray:
        """Whole items [B, C, *shape]; many of them have the time to be read that one sample has."""
        ...

    def labels_of(self, items: np.ndarray) -> np.ndarray | None:
        """The classes of items [B]; None where some have none."""
        ...


def resolve_region(
    axes: Sequence[str], shape: Sequence[int], region: Mapping[str, Sequence[float]] | None
) -> tuple[slice, ...]:
    """Turn {axis: [lo, hi]} into one slice per axis; an axis that is not named is taken whole.

    Two ints with hi > 1 are voxels; otherwise lo and hi are fractions of the axis. A fraction f falls on voxel
    round(f * size), so [0, 0.8] and [0.8, 1] meet without overlap.
    """
    region = region or {}
    for name in region:
        if name not in axes:
            raise UserError(
                f"region names the axis {name!r}, but the data has the axes {', '.join(axes)}; use one of these"
            )
    slices = []
    for name, size in zip(axes, shape, strict=True):
        if name not in region:
            slices.append(slice(0, size))
            continue
        bounds = region[name]
        shown = f"region.{name} = {list(bounds)!r}"
        if len(bounds) != 2:
            raise UserError(f"{shown} must be two numbers, [lo, hi]; give a start and an end")
        lo, hi = bounds
        if isinstance(lo, bool) or isinstance(hi, bool) or not (np.isfinite(lo) and np.isfinite(hi)):
            raise UserError(f"{shown} must be two numbers; give fractions such as [0, 0.8] or voxels such as [0, 512]")
        if lo < 0 or hi <= lo:
            raise UserError(f"{shown} must have 0 <= lo < hi; give the start first and no negative numbers")
        if hi > 1:
            if not (isinstance(lo, int | np.integer) and isinstance(hi, int | np.integer)):
                raise UserError(f"{shown} must be fractions up to 1 or whole voxels; write [0, 0.8] or [0, 512]")
            if hi > size:
                raise UserError(f"{shown} ends beyond the axis, which has {size} voxels; end at {size} or before")
            start, stop = int(lo), int(hi)
        else:
            start, stop = round(lo * size), round(hi * size)
        if stop <= start:
            raise UserError(f"{shown} holds no voxel of the {size} on this axis; widen it")
        slices.append(slice(start, stop))
    return tuple(slices)


def normalize_window(shape: Sequence[int], region: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    """Start and stop per axis of a window inside shape; refuses steps and windows that leave it."""
    if len(region) != len(shape):
        raise ValueError(f"the window has {len(region)} slices but the item has {len(shape)} axes")
    bounds = []
    for window, size in zip(region, shape, strict=True):
        start = 0 if window.start is None else int(window.start)
        stop = size if window.stop is None else int(window.stop)
        if window.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"the window {window} does not lie inside an axis of {size} voxels")
        bounds.append((start, stop))
    return tuple(bounds)
