"""One array as its format stores it, and its transformations before any voxel is read.

- axes are named: "c" holds channels, "t" moments, every other name is an axis of space; "n", which a recipe may give,
  counts items, and is read as moments are
- origin is the world coordinate of the centre of voxel 0; a spacing or origin that a file does not tell is not invented
- the level of a pyramid is the coarsest that is not coarser than wanted, and what remains of a factor of two or more is
  pooled while reading, so that only a factor in [1, 2) is left to resample
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vitrail.errors import BadData, MissingData, UserError

TOLERANCE = 0.01  # spacings and places that differ by less, in parts of a voxel, are the same
NOT_SPACE = ("c", "t")
ITEMS = "n"  # the axis along which each slice is an item

Window = tuple[slice, ...]

# Full name of a unit, its meters (None: an angle), and how else it is written.
_UNITS: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "angstrom": (1e-10, ("a", "å", "ang")),
    "nanometer": (1e-9, ("nm", "nanometre", "nanometers", "nanometres")),
    "micrometer": (
        1e-6,
        ("um", "µm", "μm", "micron", "microns", "micrometre", "micrometers", "micrometres", r"\u00b5m"),
    ),
    "millimeter": (1e-3, ("mm", "millimetre", "millimeters", "millimetres")),
    "centimeter": (1e-2, ("cm", "centimetre", "centimeters", "centimetres")),
    "meter": (1.0, ("m", "metre", "meters", "metres")),
    "kilometer": (1e3, ("km", "kilometre", "kilometers", "kilometres")),
    "inch": (0.0254, ("in", "inches")),
    "degree": (None, ("deg", "degrees")),
}
_METERS = {name: meters for name, (meters, _) in _UNITS.items() if meters is not None}


class Filling:
    """A count of chunks that were never written and are read as the fill value, where that is `allowed`."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed, self.filled, self._lock = allowed, 0, threading.Lock()

    def add(self, problem: str) -> None:
        """Count a chunk; MissingData with the problem where chunks must not be missing."""
        if not self.allowed:
            raise MissingData(problem)
        with self._lock:
            self.filled += 1


@dataclass(frozen=True)
class Stored:
    """One array: where it lies, and how a window of it is read."""

    name: str  # path, and key inside, to show in errors
    shape: tuple[int, ...]  # of all axes, as are the next two
    axes: tuple[str, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    read: Callable[[Window], np.ndarray]  # one slice an axis, the same axes back; from any thread; raises BadData
    spacing: dict[str, float] = field(default_factory=dict)  # of the axes of space that the file tells; others count 1
    unit: str | None = None
    origin: dict[str, float] = field(default_factory=dict)
    channels: tuple[str, ...] | None = None  # names along "c"; or one name for an array without "c"
    names: dict[int, str] = field(default_factory=dict)  # meaning of label values
    nodata: float | None = None  # a value that marks voxels without data
    valid: Callable[[Window], np.ndarray] | None = None  # or where there are data, in any shape that broadcasts
    levels: tuple["Stored", ...] = ()  # coarser versions of it, finest first
    filling: Any = None  # counts, as `filled`, the chunks that were never written and were read all the same
    chunk_reader: Any = None  # data/chunks/decoded.py, where whole chunks can be decoded one by one
    files: tuple[str, ...] = ()  # and folders that it is read from, where these are others than its name tells
    guessed: bool = False  # whether its axes are just the usual ones for their number

    @property
    def space(self) -> tuple[int, ...]:
        """Return numbers of the axes of space."""
        return tuple(i for i, name in enumerate(self.axes) if name not in NOT_SPACE)

    @property
    def grid(self) -> tuple[str, ...]:
        """Return names of the axes of space."""
        return tuple(self.axes[i] for i in self.space)

    @property
    def num_channels(self) -> int | None:
        return self.shape[self.axes.index("c")] if "c" in self.axes else None

    def spatial(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Pick what belongs to the axes of space out of a list for all axes."""
        return tuple(int(sizes[i]) for i in self.space)

    def voxel(self) -> tuple[float, ...]:
        """Return size of a voxel along the axes of space."""
        return tuple(float(self.spacing.get(name, 1.0)) for name in self.grid)


@dataclass(frozen=True)
class Entry:
    """One item of a source: a volume, an image or a scene."""

    name: str
    images: tuple[Stored, ...]  # their channels follow each other as variables
    labels: Stored | None = None
    label: int | None = None  # class of the item
    moment: int | None = None  # of the axis of time, where each is an item; None: the recipe's `time`
    facts: dict[str, Any] = field(default_factory=dict)  # for describe(): affine, CRS, ...


def plain_unit(unit: Any) -> str | None:
    """Return the full name of a unit; None where there is none."""
    text = str(unit).strip() if unit is not None else ""
    if not text or text.lower() in ("none", "unknown", "pixel", "pixels", "voxel", "px"):
        return None
    return next((full for full, (_, short) in _UNITS.items() if text.lower() == full or text.lower() in short), text)


def unit_ratio(unit: str | None, other: str | None) -> float | None:
    """Return how many of another unit one unit is; None where that is not known."""
    if unit == other:
        return 1.0
    return _METERS[unit] / _METERS[other] if unit in _METERS and other in _METERS else None


def chunks_in(window: Window, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """List the numbers of the chunks, of some sides, that a window touches."""
    return itertools.product(*(range(w.start // n, -(-w.stop // n)) for w, n in zip(window, sizes, strict=True)))


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


def split_axes(axes: str) -> tuple[str, ...]:
    """Split "czyx" or "time, latitude, longitude" into names of axes."""
    names = [part.strip() for part in axes.split(",")] if "," in axes else list(axes)
    return tuple(names)


def label_axes(names: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the axes of labels that have so many: those of their image, without channels, and then without time."""
    kept = tuple(names)
    for spare in NOT_SPACE:
        if number < len(kept):
            kept = tuple(name for name in kept if name != spare)
    return kept


def with_given(
    stored: Stored, axes: str | None, voxel_size: Sequence[float] | None, unit: str | None, *, labels: bool = False
) -> Stored:
    """Return the array with what the recipe says of it; sizes of the file are converted to the unit that is given."""
    if axes is not None:
        given = split_axes(axes)
        names = label_axes(given, len(stored.shape)) if labels else given
        if len(names) != len(stored.shape) or len(set(names)) < len(names) or "" in names:
            raise UserError(
                f"axes = {axes!r}: {stored.name} has {len(stored.shape)} axes of sizes {list(stored.shape)}; "
                'give one name for each, such as "czyx", with c for channels, t for time and n for items'
            )
        names = tuple("t" if name == ITEMS else name for name in names)  # each item is a moment
        new = dict(zip(stored.axes, names, strict=True))
        stored = replace(
            stored,
            axes=names,
            spacing={new[name]: value for name, value in stored.spacing.items()},
            origin={new[name]: value for name, value in stored.origin.items()},
            levels=tuple(with_given(level, axes, None, None) for level in stored.levels),
        )
    wanted, told = plain_unit(unit), plain_unit(stored.unit)
    if voxel_size is not None:
        if len(voxel_size) != len(stored.space) or min(voxel_size) <= 0:
            raise UserError(
                f"voxel_size = {list(voxel_size)} must be one positive number for each of the axes "
                f"{', '.join(stored.grid)} of {stored.name}; mend it"
            )
        factors = {n: v / old for n, v, old in zip(stored.grid, voxel_size, stored.voxel(), strict=True)}
        return _rescaled(stored, factors, wanted or told)
    if wanted is not None and told is not None and wanted != told:
        ratio = unit_ratio(told, wanted)
        if ratio is None:
            raise UserError(f"unit = {unit!r}: {stored.name} is in {told}, which cannot be converted; leave `unit` out")
        return _rescaled(stored, dict.fromkeys(stored.grid, ratio), wanted)
    return _rescaled(stored, {}, wanted or told)


def _rescaled(stored: Stored, factors: dict[str, float], unit: str | None) -> Stored:
    def times(values: dict[str, float]) -> dict[str, float]:
        return {name: value * factors.get(name, 1.0) for name, value in values.items()}

    spacing = times({**dict.fromkeys(factors, 1.0), **stored.spacing})
    levels = tuple(_rescaled(level, factors, unit) for level in stored.levels)
    return replace(stored, spacing=spacing, origin=times(stored.origin), unit=unit, levels=levels)


def choose_level(stored: Stored, wanted: Sequence[float]) -> int:
    """Return the number of the coarsest level that is nowhere coarser than wanted, within 1 %; else the finest."""
    if len(wanted) != len(stored.space) or min(wanted) <= 0:
        raise UserError(
            f"spacing = {list(wanted)} of {stored.name} must be one positive number for each of the axes "
            f"{', '.join(stored.grid)}; mend it"
        )
    sizes = [level.voxel() for level in (stored, *stored.levels)]
    fits = [
        number
        for number, size in enumerate(sizes)
        if all(have <= want * (1 + TOLERANCE) for have, want in zip(size, wanted, strict=True))
    ]
    return max(fits or [0], key=lambda number: math.prod(sizes[number]))


def scale_of(stored: Stored, wanted: Sequence[float] | None) -> tuple[float, ...]:
    """Return the wanted size of a voxel over the stored one, 1 where they are the same within 1 %."""
    ratios = [want / have for want, have in zip(wanted or stored.voxel(), stored.voxel(), strict=True)]
    return tuple(1.0 if abs(ratio - 1) <= TOLERANCE else ratio for ratio in ratios)


def pool_factors(stored: Stored, wanted: Sequence[float]) -> tuple[int, ...]:
    """Return the powers of two by which an array is pooled so that less than a factor of two is left."""
    return tuple(
        2 ** max(0, math.floor(math.log2(ratio * (1 + TOLERANCE))))
        for ratio in (want / have for want, have in zip(wanted, stored.voxel(), strict=True))
    )


def without_nodata(stored: Stored, fill_value: float | None) -> Stored:
    """Return the array with another value for what is no number, or one that refuses it where that is None."""
    nodata, valid = stored.nodata, stored.valid
    if stored.dtype.kind != "f" and nodata is None and valid is None:
        return stored

    def read(window: Window) -> np.ndarray:
        values = stored.read(window)
        bad = find_nodata(values, nodata)
        if valid is not None:
            absent = np.broadcast_to(~valid(window), values.shape)
            bad = absent if bad is None else bad | absent
        if bad is None or not bad.any():
            return values
        if fill_value is not None:
            return np.where(bad, np.asarray(fill_value, values.dtype), values)
        first = np.unravel_index(int(bad.argmax()), bad.shape)
        place = (f"{n} = {int(i) + w.start}" for n, i, w in zip(stored.axes, first, window, strict=True))
        raise BadData(
            f"{stored.name} holds {values[first]} at {', '.join(place)}, which marks no data; leave the place out "
            "with `region`, or set `nodata: fill` and `fill_value`"
        )

    return replace(stored, read=read, nodata=None, valid=None)


def find_nodata(values: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Find where values are NaN, infinite or the mark of no data; None where nothing is."""
    bad = None
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        bad = ~np.isfinite(values)
    if nodata is not None and math.isfinite(nodata):
        marked = values == values.dtype.type(nodata) if values.dtype.kind == "f" else values == nodata
        bad = marked if bad is None else bad | marked
    return bad


def shrink(values: np.ndarray, factors: Sequence[int], *, labels: bool) -> np.ndarray:
    """Return means of whole boxes along all axes, rounded where the type is whole; or first voxels, of labels."""
    if labels:
        return values[tuple(slice(None, None, f) for f in factors)]
    boxes = values.reshape([n for size, f in zip(values.shape, factors, strict=True) for n in (size // f, f)])
    mean = boxes.mean(axis=tuple(range(1, boxes.ndim, 2)), dtype=np.float64 if values.itemsize > 2 else np.float32)
    return (mean if values.dtype.kind == "f" else np.rint(mean)).astype(values.dtype)


def pooled(stored: Stored, factors: Sequence[int], *, labels: bool = False) -> Stored:
    """Return the array at a fraction of its resolution: means of boxes, or the label of their first voxel."""
    if all(factor == 1 for factor in factors):
        return stored
    every = [1] * len(stored.shape)  # a factor for each axis
    for axis, factor in zip(stored.space, factors, strict=True):
        every[axis] = factor
    shape = tuple(size // factor for size, factor in zip(stored.shape, every, strict=True))
    if 0 in shape:
        axis = shape.index(0)
        raise BadData(
            f"{stored.name} has {stored.shape[axis]} voxels along {stored.axes[axis]}, of which {every[axis]} become "
            "one at the `spacing` that is wanted, so that none is left; ask for a finer one, or leave the file out"
        )

    def read(window: Window) -> np.ndarray:
        values = stored.read(tuple(slice(w.start * f, w.stop * f) for w, f in zip(window, every, strict=True)))
        return np.ascontiguousarray(shrink(values, every, labels=labels))

    steps = dict(zip(stored.grid, factors, strict=True))
    size = dict(zip(stored.grid, stored.voxel(), strict=True))
    return replace(
        stored,
        shape=shape,
        chunk=tuple(max(1, chunk // f) for chunk, f in zip(stored.chunk, every, strict=True)),
        read=read,
        spacing={name: size[name] * steps[name] for name in stored.grid},
        # The centre of a box lies half of its size less half a voxel after the centre of its first voxel.
        origin={name: place + size[name] * (steps[name] - 1) / 2 for name, place in stored.origin.items()},
        levels=(),
        filling=stored.filling or stored.chunk_reader,
        chunk_reader=None,  # its chunks are not those of this array
    )


def by(shape: Sequence[int]) -> str:
    """Write a shape in words."""
    return " x ".join(map(str, shape))
