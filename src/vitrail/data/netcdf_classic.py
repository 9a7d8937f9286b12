"""Where the data of a classic netCDF file end, by its header: libraries read zeros beyond the end of a shorter file."""

import struct
from typing import BinaryIO

SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}  # bytes of each type
MOST = 2**31  # bytes of a name or an attribute
STREAMING = 2**32 - 1  # for the number of records: it was never filled in


class _Header:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        magic = file.read(4)
        self.known = magic[:3] == b"CDF" and magic[3] in (1, 2, 5)
        self.wide = self.known and magic[3] == 5  # counts of 64 bits
        self.far = self.known and magic[3] in (2, 5)  # offsets of 64 bits

    def number(self, form: str) -> int:
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise EOFError("the header is cut short")
        return int(struct.unpack(form, data)[0])

    def count(self) -> int:
        return self.number(">Q" if self.wide else ">I")

    def skip(self, size: int) -> None:
        if size > MOST:
            raise EOFError(f"the header says that something in it has {size:,} bytes")
        self.file.seek(_padded(size), 1)

    def name(self) -> None:
        self.skip(self.count())

    def entries(self) -> range:
        self.number(">I")  # what the list is of
        return range(self.count())  # each of them has bytes of its own, so that the file's end ends a false one

    def attributes(self) -> None:
        for _ in self.entries():
            self.name()
            size = SIZES[self.number(">I")]
            self.skip(size * self.count())


def expected_size(file: BinaryIO) -> int | None:
    """Bytes that a classic file must have; None for another format."""
    header = _Header(file)
    if not header.known:
        return None
    records = header.count()
    lengths = []
    for _ in header.entries():
        header.name()
        lengths.append(header.count())
    header.attributes()
    fixed, varying = [0], []
    for _ in header.entries():
        header.name()
        axes = [header.count() for _ in range(header.count())]
        header.attributes()
        size = SIZES[header.number(">I")]
        header.count()  # its own idea of the bytes, which is wrong for large ones
        begin = header.number(">Q" if header.far else ">I")
        grows = bool(axes) and lengths[axes[0]] == 0
        for axis in axes[1:] if grows else axes:
            size *= lengths[axis]
        varying.append((begin, size)) if grows else fixed.append(begin + size)
    if not varying or records in (0, STREAMING):
        return max(fixed)
    step = varying[0][1] if len(varying) == 1 else sum(_padded(size) for _, size in varying)
    return max(*fixed, *(begin + (records - 1) * step + size for begin, size in varying))


def _padded(size: int) -> int:
    return -(-size // 4) * 4
