"""The common part of all formats that store arrays on a grid, so that a format is a small file.

A format's config inherits `GridConfig`, lists its items as entries of stored arrays, and opens a `GridSource` of them:

- it chooses variables, the moment, the level and the region, and refuses numbers that are none
- `Entry` and `Stored` are of stored.py
- labels have the voxel size of the image, and lie on all of it or on a box inside it; then only that box is used, and
  `region` counts from its corner
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from vitrail.data.axes import items_along, note_of_axes
from vitrail.data.source import (
    Item,
    ItemsConfig,
    ReadArray,
    Reads,
    check_label_map,
    fits,
    keep_share,
    map_labels,
    refuse_mixed_names,
)
from vitrail.data.stored import (
    TOLERANCE,
    Entry,
    Stored,
    Window,
    by,
    choose_level,
    normalize_window,
    plain_unit,
    pool_factors,
    pooled,
    resolve_region,
    scale_of,
    split_axes,
    unit_ratio,
    with_given,
    without_nodata,
)
from vitrail.errors import BadData, UserError, some
from vitrail.recipe import config


def placed_like(image: Stored, labels: Stored, *, always: bool) -> Stored:
    """Place labels whose file tells no voxel size, as pictures do, like the image of the same shape.

    So have all, `always`, where the recipe gives another voxel size than the files.
    """
    for level in (image, *image.levels):
        same = labels.grid == level.grid and labels.spatial(labels.shape) == level.spatial(level.shape)
        if same and (always or not set(level.grid) <= set(labels.spacing)):
            return replace(labels, spacing=level.spacing, origin=level.origin)
    return labels


def labels_for(image: Stored, labels: Stored, *, pool: bool) -> Stored:
    """Return the level of the labels that lies on the image; a finer one is thinned out, where `pool` allows it."""
    where = f"labels {labels.name}"
    if labels.grid != image.grid:
        raise BadData(
            f"{where} have the axes {', '.join(labels.grid)}, the image {', '.join(image.grid)}; "
            "write them in the same order"
        )
    for level in (labels, *labels.levels):
        if level.dtype.kind not in "biu" or (level.num_channels or 1) > 1:
            raise BadData(
                f"{where} have {level.num_channels or 1} channels of type {level.dtype}; they must be one whole "
                "number a voxel, the number of its class"
            )
    for level in (labels, *labels.levels):
        if np.allclose(level.voxel(), image.voxel(), rtol=TOLERANCE, atol=0):
            return level
    wanted = image.voxel()
    finest = (labels, *labels.levels)[choose_level(labels, wanted)]
    made = pooled(finest, pool_factors(finest, wanted), labels=True)
    if pool and np.allclose(made.voxel(), wanted, rtol=TOLERANCE, atol=0):
        return made
    raise BadData(
        f"{where} have no level of spacing {list(wanted)}, only {list(labels.voxel())}; "
        "choose another level of the image or resample them"
    )


def label_box(image: Stored, labels: Stored) -> Window:
    """Find where the labels lie in the image, in whole voxels: all of it, or a box inside it."""
    shape, size = image.spatial(image.shape), labels.spatial(labels.shape)
    placed = all(set(s.grid) <= set(s.origin) for s in (image, labels))
    starts = [
        (labels.origin[n] - image.origin[n]) / v if placed else 0.0
        for n, v in zip(image.grid, image.voxel(), strict=True)
    ]
    whole = [round(start) for start in starts]
    fits = (
        all(abs(a - b) <= TOLERANCE for a, b in zip(starts, whole, strict=True))
        and all(0 <= a <= a + n <= m for a, n, m in zip(whole, size, shape, strict=True))
        and (placed or size == shape)
    )
    if not fits:
        at = f" at voxel {[round(s, 3) for s in starts]} of the image" if placed else ""
        raise BadData(
            f"labels {labels.name} do not cover the image {image.name} or a box inside it: they are "
            f"{by(size)} voxels{at}, the image {by(shape)}; resample them onto the image"
        )
    return tuple(slice(a, a + n) for a, n in zip(whole, size, strict=True))


__all__ = [
    "TOLERANCE",
    "Entry",
    "GridConfig",
    "GridSource",
    "Stored",
    "Window",
    "choose_level",
    "plain_unit",
    "pooled",
    "split_axes",
]

log = logging.getLogger(__name__)
_alone: ContextVar[bool] = ContextVar("_alone", default=False)


@contextmanager
def without_labels() -> Iterator[None]:
    """Open sources without labels inside, also where some are found beside the images: these cover all of them then."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@config
class GridConfig(ItemsConfig):
    """Keys that all sources of grids have."""

    region: dict[str, list[int | float]] = field(default_factory=dict)  # axis: [lo, hi], fractions or voxels
    axes: str | None = (
        None  # names of the axes where the file does not tell: "zyx", "czyx", "time, latitude, longitude"
    )
    voxel_size: list[float] | None = None  # instead of what the file tells
    unit: str | None = None  # of voxel sizes; those that the file tells in another unit are converted
    level: int | None = None  # of a pyramid, 0 is the finest; None is 0, or what spacing finds
    spacing: list[float] | None = None  # wanted size of a voxel: picks the level, and the rest is resampled
    slices: str | None = None  # an axis: samples are 2-D slices across it
    labels: str | None = None  # a name inside the file, or a path; with stars, which stand for what those of path do
    label_map: dict[int, int] = field(default_factory=dict)  # stored value: class; other values stay as they are
    time: int = 0  # moment to read, where there is an axis of time
    missing: Literal["error", "fill"] = "error"  # what an absent chunk means: a loss, or the fill value
    nodata: Literal["error", "fill"] = "error"  # NaN, infinity and the file's own mark of no data
    fill_value: float = 0.0  # what stands for no data, with nodata: fill


class GridSource:
    """Items out of arrays on grids that share axes and variables."""

    def __init__(
        self,
        settings: GridConfig,
        entries: Sequence[Entry],
        *,
        kind: str,
        class_names: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.config, self.kind, self.class_names = settings, kind, tuple(class_names)
        self.notes = list(notes)
        if _alone.get():
            entries, self.notes = [replace(entry, labels=None) for entry in entries], []
        if settings.axes is not None:
            entries = items_along(entries, settings.axes)
        kept = self._keep_split(entries)
        self._listed = entries
        # Moments of one file are items that share its arrays, which are prepared once.
        known: dict[tuple[int, int], tuple[Entry, Entry]] = {}
        self.entries: list[Entry] = []
        self._pooled: list[tuple[float, ...]] = []  # voxels of the file to one of each item, along its axes
        self._sizes: list[tuple[float, ...] | None] = []  # of a voxel of the file, in its unit, where others are given
        for entry in kept:
            mark = (id(entry.images), id(entry.labels))
            if mark not in known:
                given = self._as_given(entry)
                known[mark] = (given, self._prepare(given))
            made = known[mark][1]
            self.entries.append(replace(entry, images=made.images, labels=made.labels))
            sizes = (stored.voxel() for stored in (made.images[0], known[mark][0].images[0]))
            self._pooled.append(tuple(now / before for now, before in zip(*sizes, strict=True)))
            self._sizes.append(self._given_sizes(entry.images[0], known[mark][0].images[0]))
        self._given = known[id(kept[0].images), id(kept[0].labels)][0]
        self._different = [made for _, made in known.values()]
        first = self.entries[0].images[0]
        if settings.axes is None and self._given.images[0].guessed:
            self.notes += note_of_axes(self._given.images[0])
        self.axes = first.grid
        self.dtype = self._common_dtype()
        if settings.nodata == "fill" and not fits(settings.fill_value, self.dtype):
            raise UserError(
                f"fill_value = {settings.fill_value} of {settings.path} is no {self.dtype}, the type of the data; "
                "choose one that is"
            )
        self.variables, self._picked = self._pick_variables()
        self._needed = {  # image: the channels of it that are read
            image: slice(
                min(c for n, c in self._picked if n == image), max(c for n, c in self._picked if n == image) + 1
            )
            for image in sorted({image for image, _ in self._picked})
        }
        if settings.slices is not None and (settings.slices not in self.axes or len(self.axes) != 3):
            raise UserError(
                f"slices = {settings.slices!r} must be one of the three axes of a volume, but {settings.path} has "
                f"{', '.join(self.axes)}; choose one of these, or leave `slices` out of flat data"
            )
        self._regions: list[Window] = []
        self._label_offsets: list[tuple[int, ...]] = []
        self.items: Sequence[Item] = [self._make_item(entry) for entry in self.entries]
        labelled = [entry.labels for entry in self._different if entry.labels is not None]
        if len(labelled) < len(self._different):
            if labelled:
                self.notes.append(
                    f"{settings.path}: {len(labelled)} of {len(self._different)} items have labels, such as "
                    f"{labelled[0].name}; without those of the others, none is used"
                )
            labelled = []
        self.label_dtype = _label_dtype(labelled) if labelled else None
        self.label_names = labelled[0].names if labelled else {}
        if self.label_dtype is not None:
            check_label_map(settings.label_map, self.label_dtype, settings.path)

    @property
    def level(self) -> int:
        """Return the number of the level that is read, of the first item."""
        return self._level(self._given.images[0])

    @property
    def filled(self) -> int:
        """Count the chunks that were never written and have been read as the fill value so far."""
        arrays = [s for entry in self._different for s in (*entry.images, entry.labels) if s is not None]
        counts = {id(c): c.filled for s in arrays for c in (s.filling, s.chunk_reader) if c is not None}
        return sum(counts.values())

    def read(self, item: int, region: Window) -> np.ndarray:
        """Read a window of the usable region, [C, *spatial]."""
        entry, window = self.entries[item], self._shift(item, region)
        parts = {n: self._fetch(entry, entry.images[n], window, wanted) for n, wanted in self._needed.items()}
        if len(parts) == 1:
            ((n, values),) = parts.items()  # [C, *spatial]
            if [c for _, c in self._picked] == list(range(self._needed[n].start, self._needed[n].stop)):
                return np.ascontiguousarray(values, self.dtype)
        return np.stack([parts[n][c - self._needed[n].start] for n, c in self._picked]).astype(self.dtype, copy=False)

    def read_labels(self, item: int, region: Window) -> np.ndarray:
        """Read the labels of a window, [*spatial]."""
        entry = self.entries[item]
        labels = entry.labels
        if labels is None:
            raise UserError(f"{self.config.path} was opened without labels; name them with `labels`")
        window = self._on_labels(item, self._shift(item, region))
        values = np.ascontiguousarray(self._fetch(entry, labels, window, slice(0, 1))[0], self.label_dtype)
        return map_labels(values, self.config.label_map)

    def reads(self) -> Reads:
        """Tell the arrays that items read; and those of all items, as shares of a copy count those that are there."""
        listed = {id(stored): ReadArray(stored, labels, None) for _, stored, labels in _arrays(self._listed)}
        own = [
            ReadArray(stored, labels, partial(self._stored_window, number, stored))
            for number, stored, labels in _arrays(self.entries)
        ]
        return Reads(arrays=[*own, *listed.values()], settings=self.config)

    def _stored_window(self, item: int, stored: Stored) -> Window | None:
        """Return what reads may touch of one of an item's arrays, one slice for every axis; None: nothing of it."""
        entry, region = self.entries[item], self._regions[item]
        if stored is entry.labels:
            return self._full_window(entry, stored, self._on_labels(item, region), slice(0, 1))
        number = next(n for n, image in enumerate(entry.images) if image is stored)
        return self._full_window(entry, stored, region, self._needed[number]) if number in self._needed else None

    def origin_of(self, item: int) -> tuple[float, ...] | None:
        """Return where the centre of an item's first voxel lies in the world, or in a file that tells no place.

        None of all of such a file.
        """
        first, spacing, starts = self.entries[item].images[0], self.items[item].spacing, self.start_of(item)
        if not any(starts) and not set(self.axes) <= set(first.origin):
            return None
        return tuple(first.origin.get(n, 0.0) + s * size for n, s, size in zip(self.axes, starts, spacing, strict=True))

    def start_of(self, item: int) -> tuple[int, ...]:
        """Return how many voxels of an item's array lie before those that are used."""
        return tuple(window.start for window in self._regions[item])

    def affine_of(self, item: int) -> np.ndarray | None:
        """Return the affine of NIfTI from places x, y, z of an item's voxels to the world; None of other files."""
        affine = self.entries[item].facts.get("affine")
        if affine is None or sorted(self.axes) != ["x", "y", "z"][: len(self.axes)]:
            return None
        return self._moved(item, np.array(affine, np.float64), centres=True)

    def map_of(self, item: int) -> tuple[str | None, tuple[float, ...]] | None:
        """Return the coordinate system and the transform of an item's pixels; None of data that are no map."""
        facts = self.entries[item].facts
        transform = facts.get("transform")
        if transform is None or self.axes != ("y", "x") or list(transform) == [1, 0, 0, 0, 1, 0]:
            return None
        matrix = np.vstack([np.reshape(transform, (2, 3)), [0.0, 0.0, 1.0]])
        return facts.get("crs"), tuple(self._moved(item, matrix, centres=False)[:2].ravel().tolist())

    def _moved(self, item: int, matrix: np.ndarray, *, centres: bool) -> np.ndarray:
        """Return a matrix from voxels of a file to the world as one from those of an item, by centres or corners."""
        move = np.eye(len(matrix))  # from voxels of the item to those of the file
        given = self._sizes[item] or (None,) * len(self.axes)
        for n, size, factor, window in zip(self.axes, given, self._pooled[item], self._regions[item], strict=True):
            at = "xyz".index(n)
            if size is not None:
                matrix[:-1, at] *= size / np.linalg.norm(matrix[:-1, at])
            move[at, at], move[at, -1] = factor, factor * window.start + (factor - 1) / 2 * centres
        return matrix @ move

    def _given_sizes(self, told: Stored, given: Stored) -> tuple[float, ...] | None:
        """Return the voxel sizes that the recipe gives, in the unit of the file."""
        if self.config.voxel_size is None:
            return None
        ratio = unit_ratio(plain_unit(given.unit), plain_unit(told.unit)) or 1.0
        return tuple(size * ratio for size in given.voxel())

    def describe(self) -> dict[str, Any]:
        item, entry, given = self.items[0], self.entries[0], self._given.images[0]
        first = entry.images[0]
        facts = {
            "kind": self.kind,
            "path": self.config.path,
            "axes": list(self.axes),
            "shape": list(item.shape),
            "region": {n: [w.start, w.stop] for n, w in zip(self.axes, self._regions[0], strict=True)},
            "chunk": list(item.chunk),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": list(item.spacing),
            "unit": item.unit,
            "translation": [first.origin[n] for n in self.axes] if set(self.axes) <= set(first.origin) else None,
            "level": self.level,
            "levels": [
                {"path": level.name, "spacing": list(level.voxel())} for level in (given, *given.levels) if given.levels
            ],
            "labels": [] if entry.labels is None else [self.config.labels or entry.labels.name],
            "label_names": {str(value): name for value, name in self.label_names.items()},
            "classes": list(self.class_names),
            "items": len(self.items),
        }
        return facts | entry.facts

    def _keep_split(self, entries: Sequence[Entry]) -> list[Entry]:
        if not entries:
            raise UserError(f"{self.config.path} holds no item that can be read; give a path with data")
        names, remedy = [entry.name for entry in entries], "widen it, or cut them with `region`"
        return [entries[n] for n in keep_share(self.config, names, remedy=remedy).tolist()]

    def _as_given(self, entry: Entry) -> Entry:
        """Return the arrays with what the recipe says of them."""
        c = self.config
        images = tuple(with_given(stored, c.axes, c.voxel_size, c.unit) for stored in entry.images)
        for stored in images:
            self._check(stored)
        if entry.labels is None:
            return replace(entry, images=images)
        labels = with_given(entry.labels, c.axes, None, c.unit, labels=True)
        labels = placed_like(images[0], labels, always=c.voxel_size is not None)
        return replace(entry, images=images, labels=labels)

    def _prepare(self, entry: Entry) -> Entry:
        """Return the arrays as they are read, at their level."""
        images = tuple(self._at_level(stored) for stored in entry.images)
        first = images[0]
        for stored in images[1:]:
            if stored.grid != first.grid or stored.spatial(stored.shape) != first.spatial(first.shape):
                raise BadData(
                    f"{stored.name} is {by(stored.spatial(stored.shape))} ({', '.join(stored.grid)}) but {first.name} "
                    f"is {by(first.spatial(first.shape))} ({', '.join(first.grid)}); channels of one item must have "
                    "the same shape"
                )
        labels = None if entry.labels is None else labels_for(first, entry.labels, pool=self.config.spacing is not None)
        return replace(entry, images=images, labels=labels)

    def _check(self, stored: Stored) -> None:
        if stored.dtype.kind not in "biuf" or stored.dtype.itemsize > 8:
            raise BadData(
                f"{stored.name} has the type {stored.dtype}; only whole numbers, floats and booleans can be read, "
                "so convert it"
            )
        if not 2 <= len(stored.space) <= 3 or stored.axes.count("c") > 1:
            raise UserError(
                f"{stored.name} has {len(stored.space)} axes of space ({', '.join(stored.axes)} of sizes "
                f'{list(stored.shape)}); 2 or 3 can be read, so name the others with `axes`, such as "czyx"'
            )
        if 0 in stored.shape:
            raise BadData(f"{stored.name} is empty: its shape is {by(stored.shape)}; restore or remove it")
        moments = stored.shape[stored.axes.index("t")] if "t" in stored.axes else 1
        if not 0 <= self.config.time < moments:
            raise UserError(f"time = {self.config.time} does not exist in {stored.name}; choose 0 to {moments - 1}")

    def _level(self, stored: Stored) -> int:
        level, wanted = self.config.level, self.config.spacing
        if level is not None and wanted is not None:
            raise UserError(f"{self.config.path} is given both level and spacing; give one of them")
        if level is not None and not 0 <= level <= len(stored.levels):
            raise UserError(f"level = {level} does not exist in {stored.name}; choose 0 to {len(stored.levels)}")
        return level if level is not None else choose_level(stored, wanted) if wanted is not None else 0

    def _at_level(self, stored: Stored) -> Stored:
        wanted, fill = self.config.spacing, self.config.nodata == "fill"
        chosen = (stored, *stored.levels)[self._level(stored)]
        # Before any pooling: a mean over marks of no data would be a silently wrong number.
        chosen = without_nodata(chosen, self.config.fill_value if fill else None)
        if wanted is None:
            return chosen
        untold = [name for name in chosen.grid if name not in chosen.spacing]
        if untold:
            raise UserError(
                f"spacing = {list(wanted)}: {chosen.name} does not tell its voxel size along {', '.join(untold)}; "
                "give it as `voxel_size`"
            )
        if any(ratio < 1 for ratio in scale_of(chosen, wanted)):
            log.warning(
                "%s has voxels of %s, coarser than the spacing %s that is asked for; they are resampled and hold no "
                "finer detail",
                chosen.name,
                list(chosen.voxel()),
                list(wanted),
            )
        return pooled(chosen, pool_factors(chosen, wanted))

    def _make_item(self, entry: Entry) -> Item:
        first = entry.images[0]
        if first.grid != self.axes:
            raise UserError(
                f"{first.name} has the axes {', '.join(first.grid)}, but {self.entries[0].images[0].name} has "
                f"{', '.join(self.axes)}; give entries of their own to data of different axes"
            )
        box = tuple(slice(0, n) for n in first.spatial(first.shape))
        if entry.labels is not None:
            box = label_box(first, entry.labels)
        inner = resolve_region(self.axes, [b.stop - b.start for b in box], self.config.region)
        region = tuple(slice(b.start + w.start, b.start + w.stop) for b, w in zip(box, inner, strict=True))
        self._regions.append(region)
        self._label_offsets.append(tuple(b.start for b in box))
        chunk = first.spatial(first.chunk)
        return Item(
            name=entry.name,
            shape=tuple(w.stop - w.start for w in region),
            chunk=chunk,
            origin=tuple(w.start % size for w, size in zip(region, chunk, strict=True)),
            spacing=first.voxel(),
            unit=first.unit,
            label=entry.label,
            scale=scale_of(first, self.config.spacing),
            slices=None if self.config.slices is None else self.axes.index(self.config.slices),
        )

    def _common_dtype(self) -> np.dtype:
        """Return one type for all; refuse unsigned numbers of different widths, which are different scales."""
        found: dict[np.dtype, str] = {}
        for entry in self._different:
            for stored in entry.images:
                found.setdefault(stored.dtype.newbyteorder("="), stored.name)
        unsigned = [dtype for dtype in found if dtype.kind == "u"]
        if len(unsigned) > 1:
            a, b = unsigned[:2]
            raise BadData(
                f"{found[b]} has {b} values but {found[a]} has {a}, which are likely on another scale; "
                "convert one of them, or give them entries of their own"
            )
        return np.result_type(*found)

    def _pick_variables(self) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
        """Return the names of the variables, and (image, channel) of each."""
        given, path = self.config.variables, self.config.path
        if given is not None and (not given or len(set(given)) < len(given)):
            raise UserError(f"variables = {given} of {path} must be different names, at least one; mend the list")
        names, places = _channels(self.entries[0])
        for entry in self._different[1:]:
            other, _ = _channels(entry)
            if other != names:
                raise UserError(
                    f"{entry.images[0].name} has the channels {some(other)}, but {self.entries[0].images[0].name} "
                    f"has {some(names)}; give entries of their own to data of different channels"
                )
        count = len(names)
        if given is None or tuple(given) == names:
            return names, places
        unknown = [name for name in given if name not in names]
        if len(given) == count:
            refuse_mixed_names(given, names, path)
        if unknown and len(given) == count:  # as many names as channels: the recipe renames them in their order
            return tuple(given), places
        if unknown and any(s.channels for s in self.entries[0].images):
            raise UserError(
                f"variables = {given}: {path} has no {unknown[0]!r}; choose from {some(names)}, or rename all {count}"
            )
        if unknown:
            what = f"{count} unnamed channels; name each" if count > 1 else "no channel axis; give one name"
            raise UserError(f"variables = {given} names {len(given)} variables but {path} has {what}")
        return tuple(given), [places[names.index(name)] for name in given]

    def _shift(self, item: int, region: Window) -> Window:
        """Turn a window of the usable region into one of the array."""
        bounds = normalize_window(self.items[item].shape, region)
        return tuple(slice(w.start + a, w.start + b) for w, (a, b) in zip(self._regions[item], bounds, strict=True))

    def _on_labels(self, item: int, window: Window) -> Window:
        """Turn a window of the image's array into one of the labels, which may cover a box of it."""
        return tuple(slice(w.start - o, w.stop - o) for w, o in zip(window, self._label_offsets[item], strict=True))

    def _full_window(self, entry: Entry, stored: Stored, window: Window, channels: slice) -> Window:
        """Return one slice for every axis: the moment in time, the channels, the window in space."""
        parts: Iterator[slice] = iter(window)
        time = self.config.time if entry.moment is None else entry.moment
        moments = dict(zip(stored.axes, stored.shape, strict=True)).get("t", 1)
        moment = time if moments > 1 else 0  # labels are often of one moment, for all of the image's
        return tuple(
            slice(moment, moment + 1) if name == "t" else channels if name == "c" else next(parts)
            for name in stored.axes
        )

    def _fetch(self, entry: Entry, stored: Stored, window: Window, channels: slice) -> np.ndarray:
        """Read a window of an array, [C, *spatial]."""
        full = self._full_window(entry, stored, window, channels)
        values = stored.read(full)
        if values.shape != tuple(w.stop - w.start for w in full):
            raise BadData(
                f"{stored.name} gave {by(values.shape)} values for a window of "
                f"{by([w.stop - w.start for w in full])}: it is cut short or has changed; restore it"
            )
        if "t" in stored.axes:
            values = values.take(0, axis=stored.axes.index("t"))
        rest = [name for name in stored.axes if name != "t"]
        return np.moveaxis(values, rest.index("c"), 0) if "c" in rest else values[None]


def _arrays(entries: Sequence[Entry]) -> Iterator[tuple[int, Stored, bool]]:
    """List the arrays of items, each with the number of its item, and whether it holds labels."""
    for number, entry in enumerate(entries):
        yield from ((number, stored, False) for stored in entry.images)
        if entry.labels is not None:
            yield number, entry.labels, True


def _label_dtype(labels: Sequence[Stored]) -> np.dtype:
    """Return one type of whole numbers for all labels; uint64 and signed numbers together have none."""
    found = {stored.dtype.newbyteorder("="): stored.name for stored in labels}
    made = np.result_type(*found)
    if made.kind == "f":
        (a, first), (b, second) = (next((d, n) for d, n in found.items() if d.kind == kind) for kind in "ui")
        raise BadData(
            f"labels {first} are {a} but {second} {b}, which no type of whole numbers holds together; "
            "convert one of them, or give them entries of their own"
        )
    return made


def _channels(entry: Entry) -> tuple[tuple[str, ...], list[tuple[int, int]]]:
    """Return the names of the channels of an item's images, one after the other, and where each lies."""
    names: list[str] = []
    places: list[tuple[int, int]] = []
    several = len(entry.images) > 1
    for number, stored in enumerate(entry.images):
        count = stored.num_channels or 1
        told = stored.channels
        if told is None or len(told) != count or len(set(told)) < count:
            told = tuple(f"channel{len(names) + i}" for i in range(count)) if count > 1 or several else ("image",)
        names += told
        places += [(number, i) for i in range(count)]
    if len(set(names)) < len(names):
        names = [f"channel{i}" for i in range(len(names))]
    return tuple(names), places
