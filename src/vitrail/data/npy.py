"""Headers of NumPy's files: nothing is unpickled, and nothing allocated before what they say is checked."""

import io
import math
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from vitrail.data.formats import decoding
from vitrail.errors import BadData

MOST_HEADER = 2**16  # bytes


class Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    order: str  # C, or F where the first axis runs fastest
    offset: int  # of the first value, in bytes

    @property
    def end(self) -> int:
        """The byte after the last value."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


def read_header(file: BinaryIO | Any, name: str) -> Header:
    """The header of an .npy file that is open at its beginning."""
    with decoding(name):
        start = file.read(12)
        wide = len(start) > 6 and start[6] > 1  # a version with a longer length
        length = int.from_bytes(start[8:12] if wide else start[8:10], "little")
        if length > MOST_HEADER:
            raise BadData(f"{name} cannot be read: its header would have {length:,} bytes; restore or remove the file")
        text = io.BytesIO(start + file.read(length))
        version = np.lib.format.read_magic(text)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(text)
        if dtype.hasobject:
            raise BadData(f"{name} cannot be read: it holds Python objects, which can run code; save it as numbers")
        if any(size < 0 for size in shape):
            raise BadData(f"{name} says that its shape is {list(shape)}; restore or remove the file")
        return Header(tuple(shape), dtype, "F" if fortran else "C", text.tell())
