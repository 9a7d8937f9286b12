"""Reads the windows that the sampler names. It is only a cache: it never changes the answer.

Blocks are decoded once and shared by all threads; a block that another thread is already reading is waited for, not
read twice. Room for a block is made before it is read, so that the limit of memory holds; where there is none, because
other threads are filling it, just the window is read; so it is where a block has bad data, which the window may not
touch. Of sources that read straight, by chunks, a block is filled only as far as windows of it are asked for; windows
that are known all at once are read together, with nothing kept between (data/chunk_layers.py). Without blocks such a
source keeps chunks itself and puts the window straight into its place in the batch; so it is where the cache holds much
of the source, because blocks overlap, and chunks are shared by all of them.

What a window becomes on the host, in this order: the axis across which it is a slice is dropped, images are fitted, a
scale of two or more is pooled by powers of two. Labels of voxels go through the same; where only a slab of the crop is
asked for, they are still those of the whole crop.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.bad import ShortRead, read_again
from vitrail.data.batch import Labelling
from vitrail.data.buffers import Buffers
from vitrail.data.chunk_layers import Layer, find_layers
from vitrail.data.chunks import copy_part
from vitrail.data.sampler import Sample
from vitrail.data.shrink import fit_image, pool, pool_factors, whole_image_factors
from vitrail.data.source import Item, ManySource, Source
from vitrail.errors import BadData, UserError

# PyTorch computes little with unsigned types wider than a byte, and no device needs float64 inputs.
_HOST_TYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32", "bool": "uint8"}

Touched = Callable[[Sequence[np.ndarray]], np.ndarray | None]  # of boxes of a window, those that are needed; None: all

MOST_KEPT = 4096  # items, and layouts of their windows
MUCH_MORE = 4  # times the bytes of the cache: below that, chunks that are met again by chance count


def host_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which samples of a source travel to the device."""
    native = np.dtype(dtype).newbyteorder("=")
    return np.dtype(_HOST_TYPES.get(native.name, native.name))


class Block(NamedTuple):
    """A window of an item as its source gave it."""

    values: np.ndarray  # [C, *S]
    labels: np.ndarray | None  # [*S], where voxels have labels; of a larger window, where values are of a slab
    fill: Callable[[tuple[slice, ...]], None] | None = None  # reads what is not there yet of a region of the item

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.labels is None else self.labels.nbytes)


class Place(NamedTuple):
    """Where a window of a sample goes."""

    out: np.ndarray  # [C, *S]
    sample: Sample
    window: tuple[slice, ...]  # of the crop


class Layout(NamedTuple):
    """What a window has become on the host, along the axes of a sample."""

    size: tuple[int, ...]  # voxels
    scale: tuple[float, ...]  # voxels of it to one of a sample
    spacing: tuple[float, ...]  # physical size of a voxel


class Reader:
    def __init__(
        self,
        sources: Sequence[Source],
        crop: tuple[int, ...],
        *,
        whole_blocks: bool,
        cache_bytes: int,
        labelling: Labelling | None = None,
        retries: int = 3,
        fit: int | None = None,
    ):
        self.sources, self.crop, self.labelling = list(sources), crop, labelling
        self.whole_blocks = whole_blocks  # decode the block once for several crops, or just the crop
        self.cache_bytes, self.retries = cache_bytes, retries
        self.fit = fit  # shorter side that images are resized to before their centre is cut out
        self.whole_images = False  # whether boxes of whole images are resized to the crop on the device
        self.dtype = host_dtype(np.result_type(*[host_dtype(s.dtype) for s in sources]))
        self.variables = tuple(sources[0].variables)
        self.channels = len(self.variables)
        self.label_dtype: np.dtype | None = None  # of labels of voxels, where they are read
        self._classes: list[list[int]] = []  # of each source: its classes as places in the names
        if labelling is not None and labelling.of == "voxel":
            self.label_dtype = host_dtype(np.result_type(*[host_dtype(_label_dtype(s)) for s in sources]))
        elif labelling is not None:
            self._classes = [[labelling.names.index(n) for n in getattr(s, "class_names", ())] for s in sources]
        self._blocks: OrderedDict[tuple, tuple[Future[Block], int]] = OrderedDict()  # with their bytes
        self._bytes = 0
        self._buffers = Buffers()
        # The latest items: some sources make one anew whenever it is asked for, and each is asked for several times.
        self.item = lru_cache(maxsize=MOST_KEPT)(partial(_item, self.sources))
        self._alike = [_alike(source) for source in self.sources]  # an item that is like all of them, or None
        self._layouts: dict[Any, Layout] = {}
        self._large: dict[int, bool] = {}  # sources of chunks, by number: whether they are larger than the cache by far
        self._lock = threading.Lock()

    def size_of(self, source: int, item: int, window: Sequence[int]) -> tuple[int, ...]:
        """Voxels that `read_into` writes for a window of an item."""
        if self.fit is not None:
            return self.crop
        factors = self.factors(source, item, window)
        return self.kept(source, item, [max(1, size // f) for size, f in zip(window, factors, strict=True)])

    def factors(self, source: int, item: int, window: Sequence[int]) -> tuple[int, ...]:
        """By how much a window of an item is pooled, along each axis of the item."""
        if self.whole_images:
            return whole_image_factors(window, self.crop)
        return pool_factors(self.item(source, item))

    def kept(self, source: int, item: int, values: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to the axes of a sample, out of one value an axis of its item."""
        across = self.item(source, item).slices
        return tuple(value for axis, value in enumerate(values) if axis != across)

    def layouts(self, samples: Sequence[Sample]) -> list[Layout]:
        """What the windows of samples become; found out once for all that are alike."""
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
                    self.kept(s.source, s.item, values)
                    for values in (
                        [each / f for each, f in zip(item.scale, factors, strict=True)],
                        [each * f for each, f in zip(item.spacing, factors, strict=True)],
                    )
                )
                layout = self._layouts[name] = Layout(self.size_of(s.source, s.item, window), scale, spacing)
            found.append(layout)
        return found

    def reads_many(self, samples: Sequence[Sample]) -> tuple[int, ...] | None:
        """The size of samples that can be read many at once, as whole items that are alike; None where they cannot."""
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
                source: Any = self.sources[number]
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
        whole = tuple(slice(0, size) for size in sample.window or self.crop)
        window = whole if window is None else window
        if labels is None and self._copies_straight(out, sample):
            source: Any = self.sources[sample.source]
            region = _shift(window, sample.start)
            name = partial(self.name_of, sample)
            read = partial(source.read_into, sample.item, region, out, touched)
            return read_again(read, name, retries=self.retries)
        crop = self._cut(sample, window, whole)
        item = self.item(sample.source, sample.item)
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

    def reads_together(self, number: int) -> bool:
        """Whether windows of a source can be read together."""
        source = self.sources[number]
        has_chunks = _reads_straight(source) and hasattr(source, "locate")  # data/hierarchy.py
        return has_chunks and self._is_large(number) and self.label_dtype is None

    def read_together(self, places: Sequence[Place]) -> list[Callable[[], None]]:
        """Calls for any threads that read windows of one block, each chunk once; none where that cannot be done.

        They try once: after an error of any of them the windows are to be read one by one.
        """
        number, item = places[0].sample.source, places[0].sample.item
        if not self.reads_together(number) or not all(self._is_as_stored(p.out, p.sample) for p in places):
            return []
        source: Any = self.sources[number]
        found = [source.locate(item, _shift(p.window, p.sample.start), p.out) for p in places]
        layers = find_layers(found[0][0], [(out, window) for _, out, window in found])
        return [partial(self._read_layer, layer) for layer in layers]

    def _read_layer(self, layer: Layer) -> None:
        try:
            layer.read()
        finally:
            layer.windows = ()  # the memory of batches, which others wait for

    def item_label(self, sample: Sample) -> int:
        """The class of a sample's item, as a place in the names of the labelling."""
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
        """The classes of the samples' items [B], int64."""
        sources = np.array([sample.source for sample in samples], np.int64)
        labels = np.empty(len(samples), np.int64)
        for number in np.unique(sources).tolist():
            source: Any = self.sources[number]
            here = np.flatnonzero(sources == number)
            some = [samples[row] for row in here.tolist()]
            classes, known = np.array(self._classes[number]), None
            if self._alike[number] is not None:
                known = source.labels_of(np.array([sample.item for sample in some]))
                known = None if known is None else np.asarray(known)
            if known is None or known.shape != here.shape or known.min() < 0 or known.max() >= len(classes):
                labels[here] = [self.item_label(sample) for sample in some]  # which tells what is wrong
            else:
                labels[here] = classes[known]
        return labels

    def name_of(self, sample: Sample) -> str:
        """Where a sample lies, for errors."""
        source = self.sources[sample.source]
        sizes = sample.window or self.crop
        places = [f"{a} {s} to {s + n - 1}" for a, s, n in zip(source.axes, sample.start, sizes, strict=True)]
        return f"{self.item(sample.source, sample.item).name} (voxels {', '.join(places)})"

    def voxel_bytes(self, source: Source) -> int:
        """Bytes of one voxel of a source with all that is read of it."""
        labels = 0 if self.label_dtype is None else _label_dtype(source).itemsize
        return _value_bytes(source) + labels

    # ------------------------------------------------------------ from the source, or from a block of it

    def _cut(self, sample: Sample, window: tuple[slice, ...], whole: tuple[slice, ...]) -> Block:
        """Voxels of one window of the sample, labels of all of it."""
        block = None
        if self._in_blocks(sample.source):
            try:
                block = self._block(sample)
            except BadData:
                block = None  # some of the block is bad, or failed just now; the window decides
        inside, around = _shift(window, sample.start), _shift(whole, sample.start)
        if block is None:
            return self._read(sample, inside, around, retries=self.retries)
        first = [s - b.start for s, b in zip(sample.start, sample.block, strict=True)]
        if block.fill is not None:
            fill = partial(block.fill, inside)
            read_again(fill, partial(self.name_of, sample), retries=self.retries)
            labels = self._read_labels(sample, around, retries=self.retries)
        else:
            labels = None if block.labels is None else block.labels[_shift(whole, first)]
        return Block(block.values[(slice(None), *_shift(window, first))], labels)

    def _in_blocks(self, number: int) -> bool:
        """Whether windows of a source are cut out of blocks that are kept here."""
        source = self.sources[number]
        if not self.whole_blocks or not _keeps_chunks(source):
            return self.whole_blocks
        return _reads_straight(source) and self._is_large(number)

    def _is_large(self, number: int) -> bool:
        """Whether a source is larger than the cache by far, so that its chunks are hardly met again."""
        if number not in self._large:
            source = self.sources[number]
            size = sum(math.prod(item.shape) for item in source.items) * _value_bytes(source)
            self._large[number] = size > MUCH_MORE * self.cache_bytes
        return self._large[number]

    def _copies_straight(self, out: np.ndarray, sample: Sample) -> bool:
        """Whether a source can put a window where it belongs, and no block is kept for it."""
        straight = _reads_straight(self.sources[sample.source]) and not self._in_blocks(sample.source)
        return straight and self._is_as_stored(out, sample)

    def _is_as_stored(self, out: np.ndarray, sample: Sample) -> bool:
        """Whether a window goes to the batch as it is: whole numbers, neither sliced nor shrunk."""
        if out.dtype.kind == "f" or self.fit is not None:
            return False
        shrunk = max(self.factors(sample.source, sample.item, sample.window or self.crop)) > 1
        return self.item(sample.source, sample.item).slices is None and not shrunk

    def _read(self, sample: Sample, region: tuple[slice, ...], labelled: tuple[slice, ...], *, retries: int) -> Block:
        """A window of the sample's item: voxels of one region, labels of another."""
        source: Any = self.sources[sample.source]

        def read_values() -> np.ndarray:
            return _complete(source.read(sample.item, region), (len(source.variables), *_sizes(region)))

        values = read_again(read_values, partial(self.name_of, sample), retries=retries)
        return Block(values, self._read_labels(sample, labelled, retries=retries))

    def _read_labels(self, sample: Sample, region: tuple[slice, ...], *, retries: int) -> np.ndarray | None:
        """The labels of a window's voxels, where they are wanted."""
        if self.label_dtype is None:
            return None
        source: Any = self.sources[sample.source]

        def read_labels() -> np.ndarray:
            return _complete(source.read_labels(sample.item, region), _sizes(region))

        return read_again(read_labels, lambda: f"labels of {self.name_of(sample)}", retries=retries)

    def _shrink(self, values: np.ndarray, factors: Sequence[int], across: int | None, *, labels: bool) -> np.ndarray:
        if across is not None:
            values, factors = values.squeeze(across + 1), [f for axis, f in enumerate(factors) if axis != across]
        if self.fit is not None:
            return fit_image(values, self.fit, self.crop, labels=labels)
        return pool(values, factors, labels=labels)

    def _check_labels(self, crop: np.ndarray, sample: Sample) -> None:
        """Refuse a value that no class has, here where its place can be told."""
        assert self.labelling is not None
        names, ignore = self.labelling.names, self.labelling.ignore
        if crop.min() >= 0 and crop.max() < len(names):
            return
        wrong = (crop < 0) | (crop >= len(names))
        if ignore is not None:
            wrong &= crop != ignore
        if wrong.any():
            where = tuple(np.argwhere(wrong)[0])
            value, position = int(crop[where]), [int(s + w) for s, w in zip(sample.start, where, strict=True)]
            name = self.item(sample.source, sample.item).name
            raise BadData(
                f"{name}: label {value} at voxel {position} of the region that is read, but the "
                f"{len(names)} classes are 0 ({names[0]}) to {len(names) - 1} ({names[-1]}); "
                f"set objective.ignore: {value} if such voxels are not to be scored, or name all in objective.names"
            )

    # ------------------------------------------------------------ blocks

    def _block(self, sample: Sample) -> Block | None:
        """The block of a sample, or None if there is no room for it."""
        name = (sample.source, sample.item, *[(b.start, b.stop) for b in sample.block])
        source = self.sources[sample.source]
        voxel = _value_bytes(source) if _reads_straight(source) else self.voxel_bytes(source)
        size = math.prod(_sizes(sample.block)) * voxel
        with self._lock:
            mine = name not in self._blocks
            if mine:
                if not self._make_room(size):
                    return None
                self._blocks[name] = (Future(), size)
                self._bytes += size
            self._blocks.move_to_end(name)
            future, _ = self._blocks[name]
        if mine:
            try:
                future.set_result(self._open_block(sample))
            except BaseException as error:
                with self._lock:
                    del self._blocks[name]
                    self._bytes -= size
                future.set_exception(error)
                raise
        return future.result()

    def _open_block(self, sample: Sample) -> Block:
        source: Any = self.sources[sample.source]
        if not _reads_straight(source):
            return self._read(sample, sample.block, sample.block, retries=0)
        shape = (len(source.variables), *_sizes(sample.block))
        values = self._buffers.take(shape, source.dtype, limit=self.cache_bytes)
        return Block(values, None, source.read_later(sample.item, sample.block, values))

    def _make_room(self, size: int) -> bool:
        """Forget the blocks that were used longest ago; blocks that are being read stay."""
        if size > self.cache_bytes:
            return False
        for name in [name for name, (future, _) in self._blocks.items() if future.done()]:
            if self._bytes + size <= self.cache_bytes:
                break
            self._bytes -= self._blocks.pop(name)[1]
        return self._bytes + size <= self.cache_bytes


def _item(sources: Sequence[Source], source: int, item: int) -> Item:
    return sources[source].items[item]


def _alike(source: Source) -> Item | None:
    """What all items of a source have in common, where it says so and many are read at once."""
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


def _value_bytes(source: Source) -> int:
    return len(source.variables) * source.dtype.itemsize


def _reads_straight(source: Any) -> bool:
    """Whether a source writes voxels where they belong, chunk by chunk (data/hierarchy.py)."""
    return bool(getattr(source, "reads_straight", False))


def _keeps_chunks(source: Any) -> bool:
    """Whether a source keeps decoded chunks itself (data/chunks.py), so that blocks of them need not be kept here."""
    return bool(getattr(source, "keeps_chunks", False))


def _complete(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values.shape != shape:
        raise ShortRead(f"{list(values.shape)} values came for the {list(shape)} that were asked for")
    return values


def _sizes(region: Sequence[slice]) -> tuple[int, ...]:
    return tuple(r.stop - r.start for r in region)


def _shift(window: tuple[slice, ...], by: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(w.start + b, w.stop + b) for w, b in zip(window, by, strict=True))


def _label_dtype(source: Any) -> np.dtype:
    assert source.label_dtype is not None  # the dataset has checked it
    return source.label_dtype
