"""Layers of the view: what lies at a path, as levels that are read chunk by chunk.

- any source that a recipe can name; labels inside an OME-Zarr are layers of their own, and so are those of a run's data
- nothing is read at the start but metadata and one small window of the coarsest level, which tells the contrast
- flat images that are all alike are slices of one volume; of other items one is shown
- axes are called z, y, x whatever the file calls them, so that layers lie over each other
- a layer that tells no unit, and has as many voxels as one that does, lies where that one lies
"""

import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np

from vitrail.credentials import strip
from vitrail.data.files.places import find_place
from vitrail.data.formats.ngff import read_multiscale
from vitrail.data.grid import GridConfig, GridSource, Window, without_labels
from vitrail.data.look.found import pair_of_folders
from vitrail.data.look.inspect import LetThrough, entry_of, open_source
from vitrail.data.source import Source, label_dtype, label_names, notes_of
from vitrail.data.sources import guess_kind
from vitrail.data.sources.folders import LABEL_WORDS
from vitrail.data.sources.image_folder import IMAGES, MASKS, ImageSource
from vitrail.data.sources.zarr import list_labels, name_labels
from vitrail.data.stored import TOLERANCE, by, unit_ratio
from vitrail.errors import BadData, UserError
from vitrail.recipe import kinds
from vitrail.report.views import find_range

AXES = ("z", "y", "x")
CHUNK = {2: 512, 3: 64}  # voxels along an axis of what is sent at once
SENT = 2**18  # voxels of a chunk that is sent, about
MOST_READ = 2**24  # values of all channels that are read at once
SAMPLE = {2: 1024, 3: 96}  # voxels along an axis of the window that tells the contrast
MOST_VALUES = 24  # in a sample of classes; what has more is an image, or numbers things
HIGHEST = 64  # class of a store that nothing calls labels
KEPT = 256 << 20  # bytes of decoded images
MOST_SLICES = 10_000  # of a stack
MIXED = 8  # channels that are drawn over each other; of more, one at a time
WORDS = {*LABEL_WORDS, "classes", "class", "prediction", "predictions"}


@dataclass(frozen=True)
class Level:
    """One resolution of a layer."""

    shape: tuple[int, ...]  # along the layer's axes
    spacing: tuple[float, ...]
    origin: tuple[float, ...]  # of the centre of the first voxel
    chunk: tuple[int, ...]  # in which it is sent
    read: Callable[[Window], np.ndarray]  # [C, *spatial]


@dataclass(frozen=True)
class Layer:
    """What is shown as one layer."""

    name: str
    kind: Literal["image", "labels"]
    axes: tuple[str, ...]
    unit: str | None
    levels: tuple[Level, ...]  # finest first
    dtype: np.dtype  # as it is sent
    channels: tuple[str, ...]
    names: Mapping[int, str] = field(default_factory=dict)  # of classes
    classes: tuple[int, ...] = ()  # that are listed, without 0; empty where no name is known
    few: bool = False  # whether labels are classes, and do not number things
    ranges: tuple[tuple[float, float], ...] = ()  # of values, of each channel of an image
    notes: tuple[str, ...] = ()

    def chunk(self, level: int, place: Sequence[int]) -> bytes:
        """Return one chunk, [C, *spatial] or [*spatial] of labels, as it is sent; what lies beyond the edge is 0."""
        found = self.levels[level]
        number, *inside = place if self.channel_axis else (0, *place)
        starts = [p * c for p, c in zip(inside, found.chunk, strict=True)]
        if any(a >= n for a, n in zip(starts, found.shape, strict=True)) or not 0 <= number < self.channel_chunks:
            raise IndexError(place)
        window = tuple(slice(a, min(a + c, n)) for a, c, n in zip(starts, found.chunk, found.shape, strict=True))
        values = found.read(window)
        if self.channel_chunks > 1:
            values = values[number : number + 1]
        values = as_sent(values, self.dtype, labels=self.kind == "labels")
        whole = np.zeros((len(values), *found.chunk), self.dtype.newbyteorder("<"))
        whole[(slice(None), *(slice(0, w.stop - w.start) for w in window))] = values
        return whole.tobytes()

    @property
    def channel_axis(self) -> bool:
        return self.kind == "image" and len(self.channels) > 1

    @property
    def channel_chunks(self) -> int:
        """Count chunks along the channels: few are drawn together, of many one at a time."""
        return len(self.channels) if self.channel_axis and len(self.channels) > MIXED else 1


def as_sent(values: np.ndarray, dtype: np.dtype, *, labels: bool) -> np.ndarray:
    """Return values in the type in which they are sent; labels below 0 are none."""
    if labels and values.dtype.kind in "if":
        values = np.maximum(np.nan_to_num(values, posinf=0), 0)
    if dtype.kind != "f":
        return values.astype(dtype, copy=False)
    with np.errstate(over="ignore"):  # of float64, which are drawn as the largest of float32
        return np.nan_to_num(values.astype(dtype, copy=False))


def sent_type(dtype: np.dtype, *, labels: bool) -> np.dtype:
    """Return a type that the page can draw: whole numbers of 32 bits at most, or float32; unsigned ones for labels."""
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if labels:
        return np.dtype(f"u{dtype.itemsize}")
    return dtype.newbyteorder("=") if dtype.kind in "iu" and dtype.itemsize <= 4 else np.dtype(np.float32)


def open_path(path: str, *, settings: Mapping[str, Any] | None = None, item: str | None = None) -> list[Layer]:
    """Open what lies at a path: one layer, and one for each group of labels inside an OME-Zarr."""
    given = dict(settings or {})
    pair = None if "labels" in given else pair_of_folders(path)
    kind = given.pop("kind", None) or guess_kind(pair[0] if pair else path)
    cls: Any = kinds.find("source", kind, key="kind")
    if "labels" in given:
        return open_entry(entry_of(cls, {"path": path, **given}), item=item)
    with without_labels():
        config, source = open_source(path, kind=kind, settings=given)
    if getattr(config, "labels", None) is not None:
        if kind != "ome_zarr":  # a folder of images and one of their labels
            return open_entry(config, item=item)
        config = replace(config, labels=None)
    layers = [image_layer(config, source, item=item)]
    if kind == "ome_zarr" and not any(star in path for star in "*?"):
        group = find_place(path)
        for name in list_labels(group):
            below = entry_of(cls, {"path": str(group / "labels" / name)})
            with without_labels():
                opened, name = below.open(), f"{base(path)}: {name}"
                layers.append(image_layer(below, opened, name=name, labels=len(opened.variables) == 1))
    return layers


def open_entry(config: Any, *, names: Sequence[str] = (), item: str | None = None) -> list[Layer]:
    """Open an entry of a recipe's data: the whole image, and the labels that it names, where they lie."""
    whole = {"region": {}, "split": (0.0, 1.0), "start": 0.0, "end": 1.0, "slices": None, "spacing": None}
    keys = {each.name for each in dataclasses.fields(config)}
    config = replace(config, **{key: value for key, value in whole.items() if key in keys})
    plain = replace(config, **{key: None for key in ("labels",) if key in keys})
    with without_labels():
        image = plain.open()
    layers = [image_layer(plain, image, item=item)]
    labelled = config.open()
    if label_dtype(labelled) is not None:
        layer = label_layer(config, labelled, image, names=names, item=item)
        if layer is None:
            note = f"{base(config.path)}: the item that is shown has no labels in {strip(str(config.labels))}"
            layers[0] = replace(layers[0], notes=(*layers[0].notes, note))
        else:
            layers.append(layer)
    return layers


def base(path: str) -> str:
    """Return the name of a path to show, with that of its folder where it says little by itself."""
    place = PurePosixPath(strip(path).rstrip("/"))
    plain = place.name.lower() in IMAGES | MASKS and place.parent.name
    return f"{place.parent.name}/{place.name}" if plain else place.name or strip(path)


def image_layer(
    config: Any, source: Source, *, item: str | None = None, name: str | None = None, labels: bool | None = None
) -> Layer:
    """Make a layer of what a source reads; whole numbers of few values are labels, if `labels` does not say."""
    name = name or base(config.path)
    if labels and len(source.variables) > 1:
        raise UserError(
            f"labels {strip(config.path)} have {len(source.variables)} channels; give labels of one whole "
            "number a voxel, or name the path without --labels"
        )
    stack, number, notes = choose_item(source, item, strip(config.path))
    levels, axes = levels_of(config, source, number, stack, labels=False)
    sample = sample_of(levels[-1], len(source.variables))
    told, named = names_of(config)
    if labels is None:
        labels = are_classes(source, sample, name, told=told)
    dtype = sent_type(source.dtype, labels=labels)
    unit = source.items[number].unit
    if labels:
        return labels_of(name, axes, unit, levels, dtype, sample, named, notes)
    ranges = tuple(range_of(channel) for channel in sample)
    channels = tuple(source.variables)
    return Layer(name, "image", axes, unit, levels, dtype, channels, ranges=ranges, notes=tuple(notes))


def label_layer(
    config: Any, source: Source, image: Source, *, names: Sequence[str] = (), item: str | None = None
) -> Layer | None:
    """Make a layer of the labels that a source has of the item that is shown, or of slices; None where it has none."""
    name, notes = f"{base(config.path)}: labels", notes_of(source)
    stack, shown, _ = choose_item(image, item, strip(config.path))
    number = 0
    if stack:
        levels, axes = labels_in_stack(source, image)
    else:
        wanted = image.items[shown].name  # of all images; fewer may have labels
        found = range(len(source.items)) if len(source.items) < len(image.items) else [shown]
        chosen = next((n for n in found if source.items[n].name == wanted), None)
        if chosen is None:
            return None
        number = chosen
        levels, axes = levels_of(config, source, number, stack, labels=True)
    named = dict(label_names(source)) or dict(enumerate(names))
    dtype = sent_type(np.dtype(label_dtype(source)), labels=True)
    return labels_of(name, axes, source.items[number].unit, levels, dtype, sample_of(levels[-1]), named, notes)


def labels_of(
    name: str,
    axes: tuple[str, ...],
    unit: str | None,
    levels: tuple[Level, ...],
    dtype: np.dtype,
    sample: np.ndarray,
    named: Mapping[int, str],
    notes: Sequence[str],
) -> Layer:
    seen = {int(value) for value in np.unique(as_sent(sample, dtype, labels=True))}
    # Only what is listed is drawn, so a list of what was met in the sample alone would hide the rest.
    classes = sorted(number for number in {*named, *seen} if number > 0) if named else []
    few = bool(named) or (len(seen) <= MOST_VALUES and max(seen, default=0) <= HIGHEST)
    return Layer(name, "labels", axes, unit, levels, dtype, ("labels",), named, tuple(classes), few, notes=tuple(notes))


def choose_item(source: Source, item: str | None, path: str) -> tuple[bool, int, list[str]]:
    """Return whether the items are slices of one stack, the number of the item that is shown, and notes."""
    items, notes = source.items, list(notes_of(source))
    if item is not None:
        names = [each.name for each in items]
        if item in names:
            return False, names.index(item), notes
        if item.isdecimal() and len(item) < 12 and int(item) < len(items):
            return False, int(item), notes
        raise UserError(
            f"--item {item}: {path} has {len(items)} items, such as {names[0]!r}; give such a name or a number from 0"
        )
    if len(items) == 1:
        return False, 0, notes
    first = items[0]
    if len(first.shape) == 2 and len(items) <= MOST_SLICES and all(each.shape == first.shape for each in items):
        return True, 0, notes
    notes.append(f"{path} has {len(items)} items; the first, {first.name}, is shown, and --item chooses another")
    return False, 0, notes


def levels_of(
    config: Any, source: Source, item: int, stack: bool, *, labels: bool
) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Return the levels of an item, finest first, and the names of its axes."""
    axes = canonical(source.axes)
    if stack:
        return (stack_level(source),), AXES
    given: Any = getattr(source, "_source", source)  # behind one that lets places without data through
    if not isinstance(config, GridConfig) or not isinstance(given, GridSource) or config.spacing is not None:
        return (level_of(source, item, labels=labels),), axes
    levels: list[Level] = []
    for number in range(level_count(config, given)):
        keys: dict[str, Any] = {"level": (config.level or 0) + number, "missing": "fill"}
        keys["region"] = as_shares(config.region, given, item)
        try:
            with nullcontext() if labels else without_labels():
                opened = with_keys(config, keys)
        except UserError:  # the labels have no such level, or the file has lost it
            if not levels:
                raise
            break
        levels.append(level_of(opened, item, labels=labels))
    return tuple(levels), axes


def with_keys(config: Any, keys: Mapping[str, Any]) -> Any:
    """Open an entry with some other keys."""
    return replace(config, **keys).open()


def as_shares(region: Mapping[str, Sequence[float]], source: GridSource, item: int) -> dict[str, list[float]]:
    """Return a region as shares of the axes, which are the same of all levels."""
    entry = source.entries[item].images[0]
    sizes = dict(zip(entry.grid, entry.spatial(entry.shape), strict=True))
    return {
        axis: [place / sizes[axis] if bounds[1] > 1 else place for place in bounds] for axis, bounds in region.items()
    }


def level_count(config: Any, source: GridSource) -> int:
    """Count the levels from the one that the entry asks for; those that lack are refused when they are opened."""
    with without_labels():
        finest = with_keys(config, {"level": 0, "labels": None, "region": {}}) if config.level else source
    return max(1, len(finest._given.images[0].levels) + 1 - (config.level or 0))


def level_of(source: Any, item: int, *, labels: bool) -> Level:
    found = source.items[item]
    origin = source.origin_of(item) if hasattr(source, "origin_of") else None
    if labels:

        def read(window: Window) -> np.ndarray:
            return np.asarray(source.read_labels(item, window))[None]

    else:
        through = LetThrough(source, source.config) if isinstance(source, GridSource) else source
        whole = Whole(source) if isinstance(source, ImageSource) else None

        def read(window: Window) -> np.ndarray:
            return np.asarray(through.read(item, window) if whole is None else whole.read(item, window))

    return Level(
        found.shape,
        tuple(map(float, found.spacing)),
        tuple(origin or (0.0,) * len(found.shape)),
        sent_chunk(found.shape, found.chunk, 1 if labels else len(source.variables)),
        read,
    )


class Whole:
    """Images that can only be decoded whole, of which some are kept."""

    def __init__(self, source: Any, *, labels: bool = False):
        self.source, self.labels = source, labels
        self.kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self.size, self.lock = 0, threading.Lock()

    def read(self, item: int, window: Window) -> np.ndarray:
        """Read a window, [C, y, x]."""
        with self.lock:
            values = self.kept.get(item)
            if values is not None:
                self.kept.move_to_end(item)
        if values is None:
            box = tuple(slice(0, n) for n in self.source.items[item].shape)
            values = self.source.read_labels(item, box)[None] if self.labels else self.source.read(item, box)
            with self.lock:
                if item not in self.kept:
                    self.size += values.nbytes
                self.kept[item] = values
                while self.size > KEPT and len(self.kept) > 1:
                    self.size -= self.kept.popitem(last=False)[1].nbytes
        return values[(slice(None), *window)]


def stack_level(source: Any) -> Level:
    """Return flat images, all alike, as slices of one volume."""
    first, whole = source.items[0], Whole(source)

    def read(window: Window) -> np.ndarray:
        parts = range(window[0].start, window[0].stop)
        return np.stack([whole.read(number, window[1:]) for number in parts], axis=1)

    shape = (len(source.items), *first.shape)
    spacing = (1.0, *map(float, first.spacing))
    return Level(shape, spacing, (0.0,) * 3, sent_chunk(shape, (1, *first.chunk)), read)


def labels_in_stack(source: Any, image: Source) -> tuple[tuple[Level, ...], tuple[str, ...]]:
    """Return the labels of some of the slices of a stack; the others have none."""
    places = {each.name: number for number, each in enumerate(image.items)}
    known = {places[each.name]: number for number, each in enumerate(source.items) if each.name in places}
    whole, drawn = Whole(source, labels=True), stack_level(image)
    dtype = label_dtype(source)

    def read(window: Window) -> np.ndarray:
        flat = tuple(w.stop - w.start for w in window[1:])
        parts = [
            whole.read(known[z], window[1:])[0] if z in known else np.zeros(flat, dtype)
            for z in range(window[0].start, window[0].stop)
        ]
        return np.stack(parts)[None]

    return (replace(drawn, read=read),), AXES


def canonical(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of axes as all layers have them: z, y, x as they are, others by their order."""
    return tuple(axes) if set(axes) <= set(AXES) and len(set(axes)) == len(axes) else AXES[-len(axes) :]


def sent_chunk(shape: Sequence[int], stored: Sequence[int], channels: int = 1) -> tuple[int, ...]:
    """Choose what is sent at once: what is stored together, but neither tiny nor huge; all channels are read for it."""
    side, most = CHUNK[len(shape)], min(SENT, MOST_READ // channels)
    if all(c == 1 for c in stored):  # any window can be read alone
        return tuple(halved([min(n, side) for n in shape], most))
    chunk = halved([min(n, c) for n, c in zip(shape, stored, strict=True)], most)
    while 4 * math.prod(chunk) < most:
        growing = [axis for axis in range(len(chunk)) if chunk[axis] < min(shape[axis], side)]
        if not growing:
            break
        shortest = min(growing, key=lambda axis: chunk[axis])
        chunk[shortest] = min(shape[shortest], 2 * chunk[shortest])
    return tuple(chunk)


def halved(sides: list[int], most: int) -> list[int]:
    """Return sides of which the longest are halved until a box has so many voxels at most."""
    while math.prod(sides) > max(1, most):
        longest = max(range(len(sides)), key=lambda axis: sides[axis])
        sides[longest] = -(-sides[longest] // 2)
    return sides


def sample_of(level: Level, channels: int = 1) -> np.ndarray:
    """Read the middle of a level, [C, *spatial]."""
    sides = halved([min(n, SAMPLE[len(level.shape)]) for n in level.shape], MOST_READ // channels)
    return level.read(
        tuple(slice((n - side) // 2, (n - side) // 2 + side) for n, side in zip(level.shape, sides, strict=True))
    )


def range_of(values: np.ndarray) -> tuple[float, float]:
    """Return the values that are drawn black and white; shares keep their range from 0 to 1."""
    if values.dtype.kind == "f" and values.size and values.min() >= 0 and 0.5 < values.max() <= 1:
        return 0.0, 1.0
    with np.errstate(over="ignore"):  # of float64, as in what is sent
        return find_range([values[None].astype(np.float32)])


def names_of(config: Any) -> tuple[bool, dict[int, str]]:
    """Return whether an OME-Zarr says that it holds labels, and the names of classes that it tells."""
    if config.kind != "ome_zarr":
        return False, {}
    try:
        found = read_multiscale(config.path)
        return "image-label" in found.attributes, name_labels(found)
    except (BadData, UserError, OSError):
        return False, {}


def are_classes(source: Source, sample: np.ndarray, name: str, *, told: bool) -> bool:
    """Tell whether a store of whole numbers holds labels rather than grey values; `told`: it says so itself."""
    if source.dtype.kind not in "biu" or len(source.variables) > 1:
        return False
    values = np.unique(sample)
    words = {word for part in name.lower().split(".") for word in part.replace("_", "-").split("-")}
    if told or (words & WORDS and len(values) <= HIGHEST):
        return True
    return 1 < len(values) <= MOST_VALUES and int(values.max()) < HIGHEST


# ------------------------------------------------------------ all of them in one space


def together(layers: Sequence[Layer]) -> list[Layer]:
    """Give layers different names, one unit, and a place to those that tell none."""
    unit = next((layer.unit for layer in layers if layer.unit is not None), None)
    reference = next((layer for layer in layers if layer.unit == unit), None)
    placed: list[Layer] = []
    for layer in layers:
        made = layer
        if layer.unit != unit and reference is not None:
            made = _converted(layer, unit, _alike(layer, layers, unit) or reference)
        taken = {other.name for other in placed}
        name, number = made.name, 2
        while name in taken:
            name, number = f"{made.name} ({number})", number + 1
        placed.append(replace(made, name=name))
    return placed


def _alike(layer: Layer, layers: Sequence[Layer], unit: str | None) -> Layer | None:
    """Return the first layer of as many voxels whose places are known, in a unit."""
    for other in layers:
        ratio = None if other.unit is None else unit_ratio(other.unit, unit)
        if ratio is not None and other.axes == layer.axes and other.levels[0].shape == layer.levels[0].shape:
            return other if ratio == 1 else _converted(other, unit, other)
    return None


def _converted(layer: Layer, unit: str | None, reference: Layer) -> Layer:
    ratio = unit_ratio(layer.unit, unit)
    if ratio is not None:
        levels = tuple(
            replace(
                level, spacing=tuple(s * ratio for s in level.spacing), origin=tuple(o * ratio for o in level.origin)
            )
            for level in layer.levels
        )
        return replace(layer, levels=levels, unit=unit)
    first, given = layer.levels[0], reference.levels[0]
    if layer.axes == reference.axes and first.shape == given.shape:
        factors = [now / before for now, before in zip(given.spacing, first.spacing, strict=True)]
        levels = tuple(
            replace(
                level,
                spacing=tuple(s * f for s, f in zip(level.spacing, factors, strict=True)),
                origin=tuple(
                    g + (o - a) * f
                    for g, o, a, f in zip(given.origin, level.origin, first.origin, factors, strict=True)
                ),
            )
            for level in layer.levels
        )
        return replace(layer, levels=levels, unit=unit)
    told = f"in {layer.unit}" if layer.unit else "in no unit"
    note = (
        f"{layer.name} is placed {told}, {reference.name} in {unit}; its sizes of {by_size(first.spacing)} are taken "
        "for the latter's, so it may lie elsewhere than it should"
    )
    return replace(layer, unit=unit, notes=(*layer.notes, note))


def by_size(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:g}" for size in sizes)


def far_apart(layers: Sequence[Layer]) -> list[str]:
    """Say which layers share no place with the first, so that they are not seen over each other."""
    if not layers:
        return []

    def box(layer: Layer) -> dict[str, tuple[float, float]]:
        level = layer.levels[0]
        return {
            axis: (o - s / 2, o + s * (n - 0.5))
            for axis, o, s, n in zip(layer.axes, level.origin, level.spacing, level.shape, strict=True)
        }

    first, told = box(layers[0]), []
    least = {axis: TOLERANCE * size for axis, size in zip(layers[0].axes, layers[0].levels[0].spacing, strict=True)}
    for layer in layers[1:]:
        own = box(layer)
        if any(
            own[axis][0] >= first[axis][1] - least[axis] or own[axis][1] <= first[axis][0] + least[axis]
            for axis in own
            if axis in first
        ):
            told.append(f"{layer.name} and {layers[0].name} share no place, as their files tell it")
    return told


def words_of(layer: Layer) -> str:
    """Say what a layer is, in a line."""
    level = layer.levels[0]
    size = f", voxels of {by_size(level.spacing)} {layer.unit or ''}".rstrip()
    many = f", {len(layer.channels)} channels" if layer.channel_axis else ""
    steps = f", {len(layer.levels)} levels" if len(layer.levels) > 1 else ""
    return f"{layer.name}: {layer.kind}, {by(level.shape)} ({', '.join(layer.axes)}){size}{many}{steps}"
