"""The tags of the first page of a TIFF file, read without any library: enough to tell what kind of file it is."""

import struct

from vitrail.data.files import read_bytes


def read_tags(path: str) -> tuple[set[int], bytes, bool]:
    """Tags and description of the first page, and whether it is the last; struct.error or ValueError if broken."""
    head = read_bytes(path, 0, 16)
    order = "<" if head[:1] == b"I" else ">"
    big = struct.unpack(order + "H", head[2:4])[0] == 43
    width, entry, number = (8, 20, "Q") if big else (4, 12, "I")
    (offset,) = struct.unpack(order + number, head[8:16] if big else head[4:8])
    size = 8 if big else 2
    (count,) = struct.unpack(order + ("Q" if big else "H"), read_bytes(path, offset, size))
    if count > 4096:
        raise ValueError("no list of tags")
    table = read_bytes(path, offset + size, count * entry + width)
    (following,) = struct.unpack(order + number, table[count * entry :])
    tags, description = set(), b""
    for start in range(0, count * entry, entry):
        tag, _ = struct.unpack(order + "HH", table[start : start + 4])
        tags.add(tag)
        if tag == 270:
            length, place = struct.unpack(order + 2 * number, table[start + 4 : start + 4 + 2 * width])
            description = read_bytes(path, place, min(length, 4096)) if length > width else b""
    return tags, description, following == 0
