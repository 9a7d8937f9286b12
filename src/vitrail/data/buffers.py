"""Memory that is used again once nobody holds it: fresh memory costs a page fault for every few KiB of it."""

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np


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
            fitting = next((number for number in free if known[number].nbytes == size), None)
            if fitting is not None:
                return known[fitting].view(dtype).reshape(shape)
            total = size + sum(array.nbytes for array in known)
            gone = 0
            for number in free:  # of other sizes
                if total > limit:
                    total -= known.pop(number - gone).nbytes
                    gone += 1
            memory = np.empty(size, np.uint8)
            if total <= limit:
                known.append(memory)
            return memory.view(dtype).reshape(shape)


def _holders(arrays: list[np.ndarray], number: int) -> int:
    return sys.getrefcount(arrays[number])


_NONE = _holders([np.empty(0)], 0)  # what is counted where nobody else holds an array
