"""Reads the windows that the sampler names. It is only a cache: it never changes the answer.

There are three ways, for images and labels of voxels alike, but for the first, which knows labels of items alone:

- many whole items at once, of sources whose items are small and alike
- straight: sources of chunks (data/sources/zarr.py) keep decoded chunks themselves and put a window into its place in
  the batch. Windows that are known all at once, of one much larger than the cache, are read together, layer by layer,
  with nothing kept between (data/chunks/layers.py)
- by blocks: of any other source the block that holds all crops of a visit is read once, kept, and shared by all
  threads. Room for it is made before it is read, so that the limit of memory holds. Where there is none, because other
  threads are filling it, just the window is read; so it is where a block has bad data, which the window may not touch

What a window becomes on the host, in this order: the axis across which it is a slice is dropped, images are fitted, a
scale of two or more is pooled by powers of two, which leaves a factor below two for the device to resample: less is
sent there and nothing is aliased. Labels of voxels go through the same; where only a slab of the crop is asked for,
they are still those of the whole crop.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data.batch import Labelling
from vitrail.data.chunks.decoded import ChunkCache, ChunkReader, copy_part
from vitrail.data.chunks.layers import Layer, find_layers
from vitrail.data.order.sampler import Sample
from vitrail.data.reading.pool import ShortRead, read_again
from vitrail.data.source import (
    Item,
    LabelledSource,
    ManySource,
    Source,
    class_names,
    keeps_chunks,
    label_dtype,
    without,
)
from vitrail.data.stored import shrink
from vitrail.errors import BadData, UserError

ENOUGH = 1.5


def item_factors(item: Item) -> tuple[int, ...]:
    """Return powers of two by which an item's axes are pooled; 1 along the axis across which it is sliced."""
    if all(scale < 2 for scale in item.scale):
        return (1,) * len(item.shape)
    return tuple(
        1 if scale < 2 or axis == item.slices else 2 ** math.floor(math.log2(scale))
        for axis, scale in enumerate(item.scale)
    )


def whole_image_factors(window: Sequence[int], crop: Sequence[int]) -> tuple[int, ...]:
    """Return powers of two by which a whole image is pooled, of which boxes are resized to the crop on the device.

    The shorter side stays above ENOUGH crops: as much as is left of most photographs, and all have room in a batch.
    """
    ratio = min(window) / (ENOUGH * max(crop))
    return (2 ** max(0, math.floor(math.log2(ratio))),) * len(window)


def pool(values: np.ndarray, factors: Sequence[int], *, labels: bool = False) -> np.ndarray:
    """Return means of whole boxes of [C, *S], rounded where the type is whole; or first voxels, of labels."""
    if all(factor == 1 for factor in factors):
        return values
    # A window thinner than a box is one box.
    factors = [min(factor, size) for factor, size in zip(factors, values.shape[1:], strict=True)]
    whole = values[(slice(None), *(slice(0, n // f * f) for n, f in zip(values.shape[1:], factors, strict=True)))]
    return shrink(whole, (1, *factors), labels=labels)


def fit_image(
    values: np.ndarray, resize: int | tuple[int, int], crop: tuple[int, ...], *, labels: bool = False
) -> np.ndarray:
    """Resize [C, H, W] without aliasing, and cut the crop out of its centre.

    The shorter side becomes `resize`, or both sides, whatever their ratio.
    """
    height, width = values.shape[1:]
    if isinstance(resize, int):
        scale = resize / min(height, width)
        size = [max(resize, round(n * scale)) for n in (height, width)]
    else:
        size = list(resize)
    if (height, width) != tuple(size):
        whole = torch.from_numpy(np.ascontiguousarray(values))[None]
        if labels:
            resized = F.interpolate(whole.double(), size=size, mode="nearest-exact")
        elif values.dtype == np.uint8:
            resized = F.interpolate(whole, size=size, mode="bilinear", antialias=True)
        else:
            resized = F.interpolate(whole.double(), size=size, mode="bilinear", antialias=True)
        if not labels and values.dtype.kind != "f":
            resized = resized.round() if resized.is_floating_point() else resized
        values = resized[0].numpy().astype(values.dtype, copy=False)
    top, left = ((n - c) // 2 for n, c in zip(size, crop, strict=True))
    return values[:, top : top + crop[0], left : left + crop[1]]


# PyTorch computes little with unsigned types wider than a byte, and no device needs float64 inputs.
_HOST_TYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32", "bool": "uint8"}

Window = tuple[slice, ...]
Touched = Callable[[Sequence[np.ndarray]], np.ndarray | None]  # of boxes of a window, those that are needed; None: all

MOST_KEPT = 4096  # items, and layouts of their windows
MUCH_MORE = 4  # times the bytes of the cache: below that, chunks that are met again by chance count


def host_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which samples of a source travel to the device."""
    native = np.dtype(dtype).newbyteorder("=")
    return np.dtype(_HOST_TYPES.get(native.name, native.name))


class Block(NamedTuple):
    """A window of an item as its source gave it."""

    values: np.ndarray  # [C, *S]
    labels: np.ndarray | None  # [*S], where voxels have labels; of a larger window, where values are of a slab


class Destination(NamedTuple):
    """A window of a sample, and the memory that it goes to."""

    sample: Sample
    window: tuple[slice, ...]  # of the crop
    out: np.ndarray  # [C, *S] of the window
    labels: np.ndarray | None  # [*S] of the whole crop, where voxels have labels


class WindowLayout(NamedTuple):
    """The form of a window on the host, along the axes of a sample."""

    size: tuple[int, ...]  # voxels
    scale: tuple[float, ...]  # voxels of it to one of a sample
    spacing: tuple[float, ...]  # physical size of a voxel


class Reader:
    """Windows of samples out of sources, with a cache of blocks."""

    def __init__(
        self,
        sources: Sequence[Source],
        crop: tuple[int, ...],
        *,
        whole_blocks: bool,
        cache_bytes: int,
        labelling: Labelling | None = None,
        retries: int = 3,
        fit: int | tuple[int, int] | None = None,
    ):
        self.sources, self.crop, self.labelling = list(sources), crop, labelling
        self.whole_blocks = whole_blocks  # decode the block once for several crops, or just the crop
        self.cache_bytes, self.retries = cache_bytes, retries
        self.fit = fit  # shorter side, or both, that images are resized to before their centre is cut out
        self.whole_images = False  # whether boxes of whole images are resized to the crop on the device
        self.dtype = host_dtype(np.result_type(*[host_dtype(s.dtype) for s in sources]))
        self.variables = tuple(sources[0].variables)
        self.channels = len(self.variables)
        self.label_dtype: np.dtype | None = None  # of labels of voxels, where they are read
        self._classes: list[list[int]] = []  # of each source: its classes as places in the names
        if labelling is not None and labelling.of == "voxel":
            self.label_dtype = host_dtype(np.result_type(*[host_dtype(_label_dtype(s)) for s in sources]))
        elif labelling is not None:
            self._classes = [[labelling.names.index(n) for n in class_names(s)] for s in sources]
        self.blocks = ChunkCache(cache_bytes)
        # The latest items: some sources make one anew whenever it is asked for, and each is asked for several times.
        self.item = lru_cache(maxsize=MOST_KEPT)(partial(_item, self.sources))
        self._alike = [_alike(source) for source in self.sources]  # an item that is like all of them, or None
        self._layouts: dict[Any, WindowLayout] = {}
        self._large: dict[int, bool] = {}  # sources of chunks, by number: whether they are larger than the cache by far

    def size_of(self, source: int, item: int, window: Sequence[int]) -> tuple[int, ...]:
        """Return the voxels that `read_into` writes for a window of an item."""
        if self.fit is not None:
            return self.crop
        factors = self.factors(source, item, window)
        sizes = [max(1, size // f) for size, f in zip(window, factors, strict=True)]
        return without(sizes, self.item(source, item).slices)

    def factors(self, source: int, item: int, window: Sequence[int]) -> tuple[int, ...]:
        """Return by how much a window of an item is pooled, along each axis of the item."""
        if self.whole_images:
            return whole_image_factors(window, self.crop)
        return item_factors(self.item(source, item))

    def layouts(self, samples: Sequence[Sample]) -> list[WindowLayout]:
        """Find what the windows of samples become, once for all that are alike."""
        found = []
        for s in samples:
            item = self._alike[s.source] or self.item(s.source, s.item)
            name = (s.window, item.scale, item.spacing, item.slices, self.whole_images)
            layout = self._layouts.get(name)
            if layout is None:
                if len(self._layouts) >= MOST_KEPT:  # images of many sizes
                    self._layouts = {}
                window = s.window or self.crop
                factors = self.factors(s.source, s.item, window)
                scale, spacing = (
                    without(values, item.slices)
                    for values in (
                        [each / f for each, f in zip(item.scale, factors, strict=True)],
                        [each * f for each, f in zip(item.spacing, factors, strict=True)],
                    )
                )
                layout = self._layouts[name] = WindowLayout(self.size_of(s.source, s.item, window), scale, spacing)
            found.append(layout)
        return found

    def reads_many(self, samples: Sequence[Sample]) -> tuple[int, ...] | None:
        """Return the size of samples that can be read at once, as whole items that are alike; None if they cannot."""
        kinds = {(s.source, s.window or self.crop) for s in samples}
        if self.fit is not None or self.label_dtype is not None or len({window for _, window in kinds}) != 1:
            return None
        for number, window in kinds:
            item = self._alike[number]
            if item is None or self._in_blocks(number):
                return None
            if item.slices is not None or window != item.shape or max(self.factors(number, 0, window)) > 1:
                return None
        return window

    def read_many(self, samples: Sequence[Sample], out: np.ndarray) -> None:
        """Write samples into out [B, C, *size]; it tries once: after an error they are to be read one by one."""
        sources = np.array([sample.source for sample in samples])
        items = np.array([sample.item for sample in samples])
        with np.errstate(over="ignore"):  # what is too large for the type is found below
            for number in np.unique(sources).tolist():
                here = np.flatnonzero(sources == number)
                source = cast(ManySource, self.sources[number])
                found = _complete(source.read_many(items[here]), (len(here), *out.shape[1:]))
                out[slice(None) if len(here) == len(samples) else here] = found
        if out.dtype.kind == "f" and not np.isfinite(out).all():
            raise BadData("some value is NaN or infinite; read by itself, its sample tells where")

    def read_into(
        self,
        out: np.ndarray,
        sample: Sample,
        labels: np.ndarray | None = None,
        window: tuple[slice, ...] | None = None,
        touched: Touched | None = None,
    ) -> None:
        """Write the sample's window, unturned, into out [C, *size]; and the labels of its voxels into labels [*size].

        Of the image just a `window` of the crop, if there is one; of that at least what is `touched`.
        """
        whole = self._whole(sample)
        window = whole if window is None else window
        inside, around = _shift(window, sample.start), _shift(whole, sample.start)
        item = self.item(sample.source, sample.item)
        if self._goes_straight(out, sample):
            straight = cast(StraightSource, self.sources[sample.source])
            read = partial(straight.read_into, sample.item, inside, out, touched)
            read_again(read, partial(self.name_of, sample), retries=self.retries)
            if labels is not None:
                labels[...] = self.labels_of(sample)
            return
        crop = self._block(sample, window, whole)
        if crop is None:
            crop = self._read(sample, inside, around, retries=self.retries)
        if labels is not None:
            assert crop.labels is not None
            self._check_labels(crop.labels, sample)
        with np.errstate(over="ignore"):  # what is too large for the type is named below
            values = crop.values.astype(self.dtype, copy=False)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            position = [s + w.start + i for s, w, i in zip(sample.start, window, where[1:], strict=True)]
            variable = self.sources[sample.source].variables[where[0]]
            raise BadData(
                f"{item.name}: variable {variable!r} is NaN or infinite at voxel {position} of the region that is "
                "read; fill or mask such values in the file, or leave them out with `region`"
            )
        factors = self.factors(sample.source, sample.item, sample.window or self.crop)
        copy_part(out, self._shrink(values, factors, item.slices, labels=False))
        if labels is not None:
            labels[...] = self._shrink(crop.labels[None], factors, item.slices, labels=True)[0]  # type: ignore[index]

    def labels_of(self, sample: Sample) -> np.ndarray:
        """Read the labels of a sample's window after `label_map`, neither sliced nor shrunk."""
        found = self._read_labels(sample, _shift(self._whole(sample), sample.start), retries=self.retries)
        assert found is not None
        self._check_labels(found, sample)
        return found

    def reads_together(self, number: int) -> bool:
        """Tell whether windows can be read together, of a source so large that its chunks are hardly met again."""
        source = self.sources[number]
        if not _reads_straight(source) or not hasattr(source, "locate"):
            return False
        labels = self.label_dtype
        if labels is not None and not (source.labels_straight and np.can_cast(_label_dtype(source), labels)):
            return False
        if number not in self._large:
            size = sum(math.prod(item.shape) for item in source.items) * self.voxel_bytes(source)
            self._large[number] = size > MUCH_MORE * self.cache_bytes
        return self._large[number]

    def read_together(self, places: Sequence[Destination]) -> list[Callable[[], None]]:
        """Return calls, for any threads, that read windows of one block, each chunk once; none where that cannot be.

        They try once: after an error of any of them the windows are to be read one by one.
        """
        number, item = places[0].sample.source, places[0].sample.item
        if not self.reads_together(number) or not all(self._goes_straight(p.out, p.sample) for p in places):
            return []
        source = cast(StraightSource, self.sources[number])
        found = [source.locate(item, _shift(p.window, p.sample.start), p.out) for p in places]
        layers = find_layers(found[0][0], [(out, window) for _, out, window in found], source.finish)
        if self.label_dtype is not None:
            whole = [(_shift(self._whole(p.sample), p.sample.start), cast(np.ndarray, p.labels)) for p in places]
            found = [source.locate(item, region, labels, labels=True) for region, labels in whole]
            finish = partial(self._finish_labels, source)
            layers += find_layers(found[0][0], [(out, window) for _, out, window in found], finish)
        return [partial(self._read_layer, layer) for layer in layers]

    def _read_layer(self, layer: Layer) -> None:
        try:
            layer.read()
        finally:
            layer.windows = ()  # the memory of batches, which others wait for

    def _finish_labels(self, source: "StraightSource", labels: np.ndarray) -> None:
        source.finish_labels(labels)
        if self._is_wrong(labels).any():
            raise BadData("some label is of no class; read by itself, its sample tells which")

    def item_label(self, sample: Sample) -> int:
        """Return the class of a sample's item, as a place in the names of the labelling."""
        item = self.item(sample.source, sample.item)
        if item.label is None:
            raise UserError(f"{item.name} has no class; give every item one, or leave it out")
        classes = self._classes[sample.source]
        if not 0 <= item.label < len(classes):
            raise UserError(
                f"{item.name} has the class {item.label}, but its source has {len(classes)} names of classes, from 0; "
                "mend it, or leave it out"
            )
        return classes[item.label]

    def item_labels(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return the classes of the samples' items [B], int64."""
        sources = np.array([sample.source for sample in samples], np.int64)
        labels = np.empty(len(samples), np.int64)
        for number in np.unique(sources).tolist():
            here = np.flatnonzero(sources == number)
            some = [samples[row] for row in here.tolist()]
            classes, known = np.array(self._classes[number]), None
            if self._alike[number] is not None:
                known = cast(ManySource, self.sources[number]).labels_of(np.array([sample.item for sample in some]))
                known = None if known is None else np.asarray(known)
            if known is None or known.shape != here.shape or known.min() < 0 or known.max() >= len(classes):
                labels[here] = [self.item_label(sample) for sample in some]  # which tells what is wrong
            else:
                labels[here] = classes[known]
        return labels

    def name_of(self, sample: Sample) -> str:
        """Say where a sample lies, for errors."""
        source = self.sources[sample.source]
        sizes = sample.window or self.crop
        places = [f"{a} {s} to {s + n - 1}" for a, s, n in zip(source.axes, sample.start, sizes, strict=True)]
        return f"{self.item(sample.source, sample.item).name} (voxels {', '.join(places)})"

    def voxel_bytes(self, source: Source) -> int:
        """Return the bytes of one voxel of a source with all that is read of it."""
        labels = 0 if self.label_dtype is None else _label_dtype(source).itemsize
        return len(source.variables) * source.dtype.itemsize + labels

    # ------------------------------------------------------------ from the source, or from a block of it

    def _whole(self, sample: Sample) -> tuple[slice, ...]:
        return tuple(slice(0, size) for size in sample.window or self.crop)

    def _goes_straight(self, out: np.ndarray, sample: Sample) -> bool:
        """Tell whether a source can put a window into the batch as it is, neither sliced nor shrunk."""
        source = self.sources[sample.source]
        if not _reads_straight(source) or self.fit is not None or (out.dtype.kind == "f" and out.dtype != source.dtype):
            return False
        shrunk = max(self.factors(sample.source, sample.item, sample.window or self.crop)) > 1
        return self.item(sample.source, sample.item).slices is None and not shrunk

    def _block(self, sample: Sample, window: tuple[slice, ...], whole: tuple[slice, ...]) -> Block | None:
        """Cut one window of the sample, and labels of all of it, out of its block; None where that is not kept."""
        if not self._in_blocks(sample.source):
            return None
        name = (sample.source, sample.item, *[(b.start, b.stop) for b in sample.block])
        size = math.prod(_sizes(sample.block)) * self.voxel_bytes(self.sources[sample.source])
        try:
            read = partial(self._read, sample, sample.block, sample.block, retries=0)
            block: Block | None = self.blocks.get(name, size, read)
        except BadData:  # some of the block is bad, or failed just now; the window decides
            return None
        if block is None:
            return None
        first = [s - b.start for s, b in zip(sample.start, sample.block, strict=True)]
        labels = None if block.labels is None else block.labels[_shift(whole, first)]
        return Block(block.values[(slice(None), *_shift(window, first))], labels)

    def _in_blocks(self, number: int) -> bool:
        """Tell whether windows of a source are cut out of blocks that are kept here: it keeps no chunks itself."""
        return self.whole_blocks and not keeps_chunks(self.sources[number])

    def _read(self, sample: Sample, region: tuple[slice, ...], labelled: tuple[slice, ...], *, retries: int) -> Block:
        """Read a window of the sample's item: voxels of one region, labels of another."""
        source = self.sources[sample.source]

        def read_values() -> np.ndarray:
            return _complete(source.read(sample.item, region), (len(source.variables), *_sizes(region)))

        values = read_again(read_values, partial(self.name_of, sample), retries=retries)
        return Block(values, self._read_labels(sample, labelled, retries=retries))

    def _read_labels(self, sample: Sample, region: tuple[slice, ...], *, retries: int) -> np.ndarray | None:
        """Read the labels of a window's voxels, where they are wanted."""
        if self.label_dtype is None:
            return None
        source = cast(LabelledSource, self.sources[sample.source])

        def read_labels() -> np.ndarray:
            return _complete(source.read_labels(sample.item, region), _sizes(region))

        return read_again(read_labels, lambda: f"labels of {self.name_of(sample)}", retries=retries)

    def _shrink(self, values: np.ndarray, factors: Sequence[int], across: int | None, *, labels: bool) -> np.ndarray:
        if across is not None:
            values, factors = values.squeeze(across + 1), without(factors, across)
        if self.fit is not None:
            return fit_image(values, self.fit, self.crop, labels=labels)
        return pool(values, factors, labels=labels)

    def _is_wrong(self, labels: np.ndarray) -> np.ndarray:
        """Find labels of no class, nor to be ignored: return a place for each, or one for all where none is wrong."""
        assert self.labelling is not None
        names, ignore = self.labelling.names, self.labelling.ignore
        if not names:  # instances may have any number
            return np.zeros((), bool)
        if labels.min() >= 0 and labels.max() < len(names):
            return np.zeros((), bool)
        wrong = (labels < 0) | (labels >= len(names))
        if ignore is not None:
            wrong &= labels != ignore
        return wrong

    def _check_labels(self, crop: np.ndarray, sample: Sample) -> None:
        """Refuse a value that no class has, here where its place can be told."""
        assert self.labelling is not None
        names = self.labelling.names
        wrong = self._is_wrong(crop)
        if wrong.any():
            where = tuple(np.argwhere(wrong)[0])
            value, position = int(crop[where]), [int(s + w) for s, w in zip(sample.start, where, strict=True)]
            name = self.item(sample.source, sample.item).name
            raise BadData(
                f"{name}: label {value} at voxel {position} of the region that is read, but the "
                f"{len(names)} classes are 0 ({names[0]}) to {len(names) - 1} ({names[-1]}); "
                f"set objective.ignore: {value} if such voxels are not to be scored, renumber them with label_map "
                "in the entry of the data, or name all in objective.names"
            )


def _item(sources: Sequence[Source], source: int, item: int) -> Item:
    return sources[source].items[item]


def _alike(source: Source) -> Item | None:
    """Return what all items of a source have in common, where it says so and many are read at once."""
    if not isinstance(source, ManySource) or not source.items:
        return None
    told, first = source.alike, source.items[0]
    for name in ("shape", "spacing", "scale", "slices"):
        mine, its = getattr(told, name, None), getattr(first, name)
        if mine != its:
            raise UserError(
                f"{first.name} has the {name} {its}, but `alike` of its source {type(source).__name__} has {mine}; "
                "mend `alike`, or leave it out"
            )
    return told


class StraightSource(Source, Protocol):
    """A source of chunks that puts windows into their place in a batch (data/sources/zarr.py)."""

    labels_straight: bool  # labels, too

    def read_into(self, item: int, region: Window, out: np.ndarray, touched: Touched | None = None) -> None:
        """Read as `read` does, into memory that is there; what is not touched may stay as it was."""

    def locate(
        self, item: int, region: Window, out: np.ndarray, *, labels: bool = False
    ) -> tuple[ChunkReader, np.ndarray, Window]:
        """Find the array of a window, memory with the axes of that, and the window of it."""

    def finish(self, values: np.ndarray) -> None:
        """Make what `read` gives of voxels that were copied from there."""

    def finish_labels(self, labels: np.ndarray) -> None:
        """Make what `read_labels` gives of such labels."""


def _reads_straight(source: Source) -> TypeGuard[StraightSource]:
    return bool(getattr(source, "reads_straight", False))


def _complete(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values.shape != shape:
        raise ShortRead(f"{list(values.shape)} values came for the {list(shape)} that were asked for")
    return values


def _sizes(region: Sequence[slice]) -> tuple[int, ...]:
    return tuple(r.stop - r.start for r in region)


def _shift(window: tuple[slice, ...], by: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(w.start + b, w.stop + b) for w, b in zip(window, by, strict=True))


def _label_dtype(source: Source) -> np.dtype:
    found = label_dtype(source)
    assert found is not None  # the dataset has checked it
    return found
