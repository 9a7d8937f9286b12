"""Memory that is used again once nobody holds it: fresh memory costs a page fault for every few KiB of it.

It begins at a whole line of the processor's cache, so that short rows of it do not lie in one line more than they need.
"""

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np

LINE = 64  # bytes


def aligned(memory: np.ndarray, size: int) -> np.ndarray:
    """So many of some bytes, from a whole line on; there must be LINE more of them."""
    first = -memory.ctypes.data % LINE
    return memory[first : first + size]


class Buffers:
    """Arrays that are handed out, and handed out again when nothing but this list refers to their memory.

    Views of an array do refer to it, and so do tensors made of it: whoever still has a batch, keeps it as it is.
    """

    def __init__(self) -> None:
        self._known: list[np.ndarray] = []  # bytes, longest known first
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: np.dtype, *, limit: int) -> np.ndarray:
        """An array with whatever was in it before; beyond `limit` bytes in all, memory is not remembered."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            known = self._known
            free = [number for number in range(len(known)) if _holders(known, number) == _NONE]
            fitting = next((number for number in free if _room(known[number]) == size), None)
            if fitting is not None:
                return aligned(known[fitting], size).view(dtype).reshape(shape)
            total = size + sum(_room(array) for array in known)
            gone = 0
            for number in free:  # of other sizes
                if total > limit:
                    total -= _room(known.pop(number - gone))
                    gone += 1
            memory = np.empty(size + LINE, np.uint8)
            if total <= limit:
                known.append(memory)
            return aligned(memory, size).view(dtype).reshape(shape)


def _room(memory: np.ndarray) -> int:
    return memory.nbytes - LINE


def _holders(arrays: list[np.ndarray], number: int) -> int:
    return sys.getrefcount(arrays[number])


_NONE = _holders([np.empty(0)], 0)  # what is counted where nobody else holds an array
