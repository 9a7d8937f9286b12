"""Reads the crops that the sampler names. It is only a cache: it never changes the answer.

Blocks are decoded once and shared by all threads; a block that another thread is already reading is waited for, not
read twice. Room for a block is made before it is read, so that the limit of memory holds; where there is none, because
other threads are filling it, just the crop is read. Labels of voxels are read, kept and cut together with the image;
where only a window of the crop is asked for, they are still those of the whole crop.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.batch import Labelling
from vitrail.data.sampler import Sample
from vitrail.data.source import Source
from vitrail.errors import UserError

# PyTorch computes little with unsigned types wider than a byte, and no device needs float64 inputs.
_HOST_TYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32", "bool": "uint8"}


def host_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which samples of a source travel to the device."""
    native = np.dtype(dtype).newbyteorder("=")
    return np.dtype(_HOST_TYPES.get(native.name, native.name))


class Block(NamedTuple):
    """A window of an item as its source gave it."""

    values: np.ndarray  # [C, *S]
    labels: np.ndarray | None  # [*S], where voxels have labels; of a larger window, where values are of a slab

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.labels is None else self.labels.nbytes)


class Reader:
    def __init__(
        self,
        sources: Sequence[Source],
        crop: tuple[int, ...],
        *,
        whole_blocks: bool,
        cache_bytes: int,
        labelling: Labelling | None = None,
    ):
        self.sources, self.crop, self.labelling = list(sources), crop, labelling
        self.whole_blocks = whole_blocks  # decode the block once for several crops, or just the crop
        self.cache_bytes = cache_bytes
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
        self._lock = threading.Lock()

    def read_into(
        self,
        out: np.ndarray,
        sample: Sample,
        labels: np.ndarray | None = None,
        window: tuple[slice, ...] | None = None,
    ) -> None:
        """Write the sample's crop, unturned, into out [C, *crop]; and the labels of its voxels into labels [*crop].

        Of the image just a `window` of the crop, if there is one.
        """
        whole = tuple(slice(0, size) for size in self.crop)
        window = whole if window is None else window
        block = self._block(sample) if self.whole_blocks else None
        if block is not None:
            first = [s - b.start for s, b in zip(sample.start, sample.block, strict=True)]
            inside, around = _shift(window, first), _shift(whole, first)
            crop = Block(block.values[(slice(None), *inside)], None if block.labels is None else block.labels[around])
        else:
            inside, around = _shift(window, sample.start), _shift(whole, sample.start)
            crop = self._read(sample, inside, around)
        if labels is not None:
            assert crop.labels is not None
            assert crop.labels.shape == labels.shape
            self._check_labels(crop.labels, sample)
            labels[...] = crop.labels
        with np.errstate(over="ignore"):  # what is too large for the type is named below
            out[...] = crop.values
        if out.dtype.kind == "f" and not np.isfinite(out).all():
            name = self.sources[sample.source].items[sample.item].name
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(out))[0])
            position = [s + w.start + i for s, w, i in zip(sample.start, window, where[1:], strict=True)]
            variable = self.sources[sample.source].variables[where[0]]
            raise UserError(
                f"{name}: variable {variable!r} is NaN or infinite at voxel {position} of the region that is read; "
                "fill or mask such values in the file, or leave them out with `region`"
            )

    def item_label(self, sample: Sample) -> int:
        """The class of a sample's item, as a place in the names of the labelling."""
        item = self.sources[sample.source].items[sample.item]
        if item.label is None:
            raise UserError(f"{item.name} has no class; give every item one, or leave it out")
        return self._classes[sample.source][item.label]

    def _read(self, sample: Sample, region: tuple[slice, ...], labelled: tuple[slice, ...]) -> Block:
        """A window of the sample's item: voxels of one region, labels of another."""
        source: Any = self.sources[sample.source]
        values = source.read(sample.item, region)
        return Block(values, None if self.label_dtype is None else source.read_labels(sample.item, labelled))

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
            name = self.sources[sample.source].items[sample.item].name
            raise UserError(
                f"{name}: label {value} at voxel {position} of the region that is read, but the "
                f"{len(names)} classes are 0 ({names[0]}) to {len(names) - 1} ({names[-1]}); "
                f"set objective.ignore: {value} if such voxels are not to be scored, or name all in objective.names"
            )

    def _block(self, sample: Sample) -> Block | None:
        """The block of a sample, or None if there is no room for it."""
        name = (sample.source, sample.item, *[(b.start, b.stop) for b in sample.block])
        size = self._size(sample)
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
                future.set_result(self._read(sample, sample.block, sample.block))
            except BaseException as error:
                with self._lock:
                    del self._blocks[name]
                    self._bytes -= size
                future.set_exception(error)
                raise
        return future.result()

    def _size(self, sample: Sample) -> int:
        """Bytes of a block as its source gives it."""
        return math.prod(b.stop - b.start for b in sample.block) * self.voxel_bytes(self.sources[sample.source])

    def voxel_bytes(self, source: Source) -> int:
        """Bytes of one voxel of a source with all that is read of it."""
        labels = 0 if self.label_dtype is None else _label_dtype(source).itemsize
        return self.channels * source.dtype.itemsize + labels

    def _make_room(self, size: int) -> bool:
        """Forget the blocks that were used longest ago; blocks that are being read stay."""
        if size > self.cache_bytes:
            return False
        for name in [name for name, (future, _) in self._blocks.items() if future.done()]:
            if self._bytes + size <= self.cache_bytes:
                break
            self._bytes -= self._blocks.pop(name)[1]
        return self._bytes + size <= self.cache_bytes


def _shift(window: tuple[slice, ...], by: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(w.start + b, w.stop + b) for w, b in zip(window, by, strict=True))


def _label_dtype(source: Any) -> np.dtype:
    assert source.label_dtype is not None  # the dataset has checked it
    return source.label_dtype
