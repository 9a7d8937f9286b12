"""Reads the crops that the sampler names. It is only a cache: it never changes the answer.

Blocks are decoded once and shared by all threads; a block that another thread is already reading is waited for, not
read twice. Room for a block is made before it is read, so that the limit of memory holds; where there is none, because
other threads are filling it, just the crop is read.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from vitrail.data.sampler import Sample
from vitrail.data.source import Source
from vitrail.errors import UserError

# PyTorch computes little with unsigned types wider than a byte, and no device needs float64 inputs.
_HOST_TYPES = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32", "bool": "uint8"}


def host_dtype(dtype: np.dtype) -> np.dtype:
    """The type in which samples of a source travel to the device."""
    native = np.dtype(dtype).newbyteorder("=")
    return np.dtype(_HOST_TYPES.get(native.name, native.name))


class Reader:
    def __init__(self, sources: Sequence[Source], crop: tuple[int, ...], *, whole_blocks: bool, cache_bytes: int):
        self.sources, self.crop = list(sources), crop
        self.whole_blocks = whole_blocks  # decode the block once for several crops, or just the crop
        self.cache_bytes = cache_bytes
        self.dtype = host_dtype(np.result_type(*[host_dtype(s.dtype) for s in sources]))
        self.channels = len(sources[0].variables)
        self._blocks: OrderedDict[tuple, tuple[Future[np.ndarray], int]] = OrderedDict()  # with their bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def read_into(self, out: np.ndarray, sample: Sample) -> None:
        """Write the sample's crop, unturned, into out [C, *crop]."""
        block = self._block(sample) if self.whole_blocks else None
        if block is not None:
            window = tuple(
                slice(s - b.start, s - b.start + c)
                for s, b, c in zip(sample.start, sample.block, self.crop, strict=True)
            )
            crop = block[(slice(None), *window)]
        else:
            region = tuple(slice(s, s + c) for s, c in zip(sample.start, self.crop, strict=True))
            crop = self.sources[sample.source].read(sample.item, region)
        with np.errstate(over="ignore"):  # what is too large for the type is named below
            out[...] = crop
        if out.dtype.kind == "f" and not np.isfinite(out).all():
            name = self.sources[sample.source].items[sample.item].name
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(out))[0])
            position = [s + w for s, w in zip(sample.start, where[1:], strict=True)]
            variable = self.sources[sample.source].variables[where[0]]
            raise UserError(
                f"{name}: variable {variable!r} is NaN or infinite at voxel {position} of the region that is read; "
                "fill or mask such values in the file, or leave them out with `region`"
            )

    def _block(self, sample: Sample) -> np.ndarray | None:
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
                future.set_result(self.sources[sample.source].read(sample.item, sample.block))
            except BaseException as error:
                with self._lock:
                    del self._blocks[name]
                    self._bytes -= size
                future.set_exception(error)
                raise
        return future.result()

    def _size(self, sample: Sample) -> int:
        """Bytes of a block as its source gives it."""
        voxels = math.prod(b.stop - b.start for b in sample.block)
        return voxels * self.channels * self.sources[sample.source].dtype.itemsize

    def _make_room(self, size: int) -> bool:
        """Forget the blocks that were used longest ago; blocks that are being read stay."""
        if size > self.cache_bytes:
            return False
        for name in [name for name, (future, _) in self._blocks.items() if future.done()]:
            if self._bytes + size <= self.cache_bytes:
                break
            self._bytes -= self._blocks.pop(name)[1]
        return self._bytes + size <= self.cache_bytes
