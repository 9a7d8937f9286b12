"""Windows of one array that are known all at once: each chunk is decoded once and nothing is kept.

Chunks that lie side by side along the last two axes are put together in a layer, which stays in the cache of the
processor while all windows take their part of it, in long rows. Layers are read independently, by any thread.
"""

import itertools
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from vitrail.data.chunks.decoded import ChunkReader, copy_part
from vitrail.data.chunks.layout import Index
from vitrail.data.reading.pool import LINE, aligned

MOST = 16 * 2**20  # bytes of a layer; if chunks are larger it has fewer axes, or is one chunk

Window = Sequence[slice]
Finish = Callable[[np.ndarray], None]  # changes voxels in their place, or refuses them


class Layer:
    """Chunks side by side: one along the first axes, all that windows touch along the others."""

    def __init__(
        self,
        reader: ChunkReader,
        index: Index,
        around: Sequence[range],
        windows: Sequence[tuple[np.ndarray, Window]],
        finish: Finish | None,
    ):
        self.reader, self.windows = reader, windows  # those of all layers, with the memory that they are copied to
        self.index, self.around = index, around  # of its chunks along the first axes; along the others
        self.finish = finish  # of voxels once they are copied

    def read(self) -> None:
        """Decode the chunks that windows touch, and copy to each window its part of them."""
        reader, ahead = self.reader, len(self.index)
        sizes = reader.grid[ahead:]
        wanted = [found for out, window in self.windows if (found := self._find(out, window)) is not None]
        needed = {place for _, _, rest in wanted for place in itertools.product(*map(_touched, rest, sizes))}
        if not needed:
            return
        shape = (*reader.grid[:ahead], *[len(a) * size for a, size in zip(self.around, sizes, strict=True)])
        memory = _memory(reader.chunk_bytes + math.prod(shape) * reader.dtype.itemsize)
        chunk, values = memory[: reader.chunk_bytes], memory[reader.chunk_bytes :]
        values = values.view(reader.dtype).reshape(shape)
        first = [a.start * size for a, size in zip(self.around, sizes, strict=True)]
        used = _around([inside for _, inside, _ in wanted])  # the rest of the chunks is not copied
        for place in sorted(needed):
            along = [slice(p * size, (p + 1) * size) for p, size in zip(place, sizes, strict=True)]
            copy_part(values[(*used, *_shift(along, first))], reader.decode((*self.index, *place), chunk)[used])
        for out, inside, rest in wanted:
            copy_part(out, values[(*inside, *_shift(rest, first))])
            if self.finish is not None:
                self.finish(out)

    def _find(self, out: np.ndarray, window: Window) -> tuple[np.ndarray, tuple[slice, ...], Window] | None:
        """Return where a window's part goes; and its voxels: of the layer along the first axes, else of the array."""
        begin = [n * size for n, size in zip(self.index, self.reader.grid, strict=False)]
        parts = [
            slice(max(w.start, b), min(w.stop, b + size))
            for w, b, size in zip(window, begin, self.reader.grid, strict=False)
        ]
        if any(part.start >= part.stop for part in parts):
            return None
        return out[_shift(parts, [w.start for w in window])], _shift(parts, begin), window[len(begin) :]


def find_layers(
    reader: ChunkReader, windows: Sequence[tuple[np.ndarray, Window]], finish: Finish | None = None
) -> list[Layer]:
    """Return layers that hold all the windows; each comes with the memory that it is copied to."""
    around = [_touched(w, size) for w, size in zip(_around([w for _, w in windows]), reader.grid, strict=True)]
    ahead = max(0, len(around) - 2)
    while math.prod(map(len, around[ahead:])) * reader.chunk_bytes > MOST and ahead < len(around):
        ahead += 1
    return [Layer(reader, index, around[ahead:], windows, finish) for index in itertools.product(*around[:ahead])]


def _around(windows: Sequence[Window]) -> tuple[slice, ...]:
    return tuple(slice(min(w.start for w in axis), max(w.stop for w in axis)) for axis in zip(*windows, strict=True))


def _touched(window: slice, size: int) -> range:
    """Return the numbers of the chunks along an axis that a window touches."""
    return range(window.start // size, -(-window.stop // size))


def _shift(window: Window, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(w.start - o, w.stop - o) for w, o in zip(window, origin, strict=False))


_local = threading.local()


def _memory(size: int) -> np.ndarray:
    """Return bytes of this thread's own, used again."""
    memory: np.ndarray | None = getattr(_local, "memory", None)
    if memory is None or len(memory) < size + LINE:
        memory = _local.memory = np.empty(size + LINE, np.uint8)
    return aligned(memory, size)
