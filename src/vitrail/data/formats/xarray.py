"""Zarr stores that xarray wrote, looked at before zarr's own library opens them.

The library runs whatever codecs the metadata name, waits for a FIFO in place of a chunk, and takes as much memory as
either says: so codecs are those that unpack alone, sizes fit in memory, and what it decodes, coordinates at once and
fields that vitrail's own decoders do not know, was unpacked by those decoders before, as far as it says it goes.

`expected_size` tells where the data of a classic netCDF file end: libraries read zeros beyond the end of a shorter one.
"""

import itertools
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.chunks.decoded import ChunkReader, check_file, open_array, shared
from vitrail.data.chunks.layout import parse_layout, parse_packing, read_names
from vitrail.data.files.fingerprint import METADATA
from vitrail.data.files.places import Place, Remote, find_place, read_facts
from vitrail.data.stored import Stored
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_plain, check_room, is_trusting, room

# None of them makes objects of bytes, as pickle does.
CODECS = {
    "bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zlib", "zstd", "lz4", "bz2", "lzma", "crc32", "crc32c",
    "adler32", "fletcher32", "jenkins_lookup3", "shuffle", "delta", "fixedscaleoffset", "quantize", "bitround",
    "astype", "packbits", "vlen-utf8", "vlen-bytes", "zfpy", "pcodec",
}  # fmt: skip
MOST_CHUNKS = 1_000_000  # of a coordinate
MOST_WORDS = 1 << 30  # bytes of a chunk of words
POINTER = 8  # bytes that a word takes at least
LETTER = 4  # bytes

# Of classic netCDF.
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}  # bytes of each type
MOST = 2**31  # bytes of a name or an attribute
STREAMING = 2**32 - 1  # for the number of records: it was never filled in


def open_known(path: str, name: str, *, fill: bool) -> Stored | None:
    """Open an array of a store; None where only zarr's own library knows its codecs."""
    try:
        return open_array(find_place(path) / name, fill=fill)
    except UserError:
        return None


def check_store(path: str) -> None:
    """Refuse what zarr's own library would run, wait for, or take too much memory for."""
    for name, document, version in _arrays(find_place(path)):
        try:
            shape, _, chunks, itemsize, codecs = _parse(document, version)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadData(
                f"{path}::{name} has metadata that are no array's ({error}); restore or rewrite it"
            ) from error
        other = [codec for codec in codecs if codec.removeprefix("numcodecs.") not in CODECS]
        if other and not is_trusting():
            raise BadData(
                f"{path}::{name} has the codec {other[0]!r}, which may be any program; save it with another, or give "
                "--trust if you know who made it"
            )
        check_room(f"a chunk of {path}::{name}", math.prod(chunks) * (itemsize or POINTER))
        if 0 not in shape and (len(shape) == 1 or not _is_number(document, version)):
            _check_coordinate(path, name, document, version)


def open_checkers(path: str, name: str) -> list[ChunkReader]:
    """Open readers for chunks that zarr's own library decodes: a look at them before has a bound.

    One for each of the metadata that the library may go by. With `--trust` those that are not known are left out.
    """
    found = [
        _open_checker(path, name, told, version) for own, told, version in _arrays(find_place(path)) if own == name
    ]
    return [reader for reader in found if reader is not None]


def _open_checker(path: str, name: str, document: Any, version: int) -> ChunkReader | None:
    """Open a reader by the document alone: the library may go by another than the one beside the chunks."""
    place = find_place(path) / name
    layout = parse_layout(document, version)
    if layout is None:
        words = _Words(f"{path}::{name}", math.prod(_parse(document, version)[0]))
        layout = parse_packing(document, version, words, min(MOST_WORDS, room() // 4))
    if layout is not None and not (layout.shards is not None and isinstance(place, Remote) and place.uses_tensorstore):
        return ChunkReader(place.absolute(), layout, fill=True)
    if is_trusting():
        return None
    raise BadData(
        f"{path}::{name} has codecs of which any number of bytes may come, as far as vitrail knows "
        f"({', '.join(_parse(document, version)[-1])}); save it with zstd, blosc, lz4, gzip, zlib or bz2 and at most "
        "one filter, or give --trust if you know who made it"
    )


class _Words:
    """A count of the words of an array, which take as much memory each as the longest."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.total = self.longest = 0

    def __call__(self, data: Any) -> None:
        view = memoryview(data)
        number = int.from_bytes(view[:4], "little")
        at = 4
        for _ in range(number):
            size = int.from_bytes(view[at : at + 4], "little")
            at += 4 + size
            if at > len(view):
                raise ValueError(f"it says that it holds {number:,} words, and ends before")
            self.longest = max(self.longest, size)
        self.total += len(view)
        check_room(self.name, max(self.total, self.number * self.longest * LETTER))


def _check_coordinate(path: str, name: str, document: Any, version: int) -> None:
    """Read what xarray reads as a whole when it opens a store, before it does; words have no size of their own."""
    shape, files, chunks, itemsize, _ = _parse(document, version)
    check_room(f"{path}::{name}", math.prod(shape) * (itemsize or POINTER))
    number = math.prod(-(-length // max(1, chunk)) for length, chunk in zip(shape, chunks, strict=True))
    if number > MOST_CHUNKS:
        raise BadData(f"{path}::{name} has {number:,} chunks, more than {MOST_CHUNKS:,}; save it in larger ones")
    place, whole = find_place(path) / name, tuple(slice(0, length) for length in shape)
    if isinstance(place, Path) and not place.is_dir():
        return
    if isinstance(place, Path) and (file := read_names(place)) is not None:
        for index in itertools.product(*(range(-(-n // max(1, side))) for n, side in zip(shape, files, strict=True))):
            _check_size(f"{place}/{file(index)}", math.prod(files) * itemsize if itemsize else None)
    # Shards of a server can be read by tensorstore alone, which goes by the metadata beside them.
    alone = isinstance(place, Remote) and place.uses_tensorstore and _is_alone(place, document, version)
    if alone and (array := open_known(path, name, fill=True)) is not None:
        array.read(whole)
        return
    reader = _open_checker(path, name, document, version)
    if reader is not None:
        shared.read(reader, whole)  # what comes of a chunk has a bound here


def _is_alone(place: Remote, document: Any, version: int) -> bool:
    """Tell whether an array has shards, and the metadata beside them are those that the library goes by."""
    layout = parse_layout(document, version)
    return layout is not None and layout.shards is not None and read_facts(place / "zarr.json") == document


def _is_number(document: Any, version: int) -> bool:
    """Tell whether values are numbers; others may be words of letters, which are read as a whole, too."""
    kind = document["dtype" if version == 2 else "data_type"]
    try:
        return not isinstance(kind, dict) and np.dtype(kind).kind in "biuf"
    except TypeError:
        return False


def _check_size(file: str, size: int | None) -> None:
    if size is not None:
        check_file(file, size)
        return
    check_plain(file)
    if os.path.exists(file):
        check_room(file, os.path.getsize(file))


def _arrays(top: Place) -> Iterator[tuple[str, Any, int]]:
    """List name, metadata and their version of each array, as it tells itself and as one file tells of all.

    Of a store elsewhere the one file is enough, as it is for zarr's own library: each question takes time.
    """
    told = [found for file in ("zarr.json", ".zmetadata") if (found := _consolidated(top / file)) is not None]
    if not isinstance(top, Path) and told and all(told):
        yield from itertools.chain(*told)
        return
    folders = [child for child in top.iterdir() if child.is_dir()]
    for folder in [top, *folders]:
        for file in METADATA:
            if isinstance(folder, Path):
                check_plain(folder / file)
    seen = []
    for folder in folders:
        if (folder / ".zarray").is_file():
            seen.append((folder.name, read_facts(folder / ".zarray"), 2))
        if (folder / "zarr.json").is_file() and _is_array(found := read_facts(folder / "zarr.json")):
            seen.append((folder.name, found, 3))
    yield from seen
    known = {(name, version): document for name, document, version in seen}
    for name, document, version in itertools.chain(*told):
        if known.get((name, version)) != document:  # else it was looked at above
            yield name, document, version


def _consolidated(file: Place) -> list[tuple[str, Any, int]] | None:
    """Read what one file tells of all arrays; None where it is not there."""
    if not file.is_file():
        return None
    found = read_facts(file)
    if file.name == "zarr.json":  # where the library looks: a list elsewhere in the file must not stand in for it
        found = found.get("consolidated_metadata") if isinstance(found, dict) else {}
    found = found.get("metadata") if isinstance(found, dict) else {}
    return [
        (name.removesuffix("/.zarray"), document, 2 if name.endswith("/.zarray") else 3)
        for name, document in (found.items() if isinstance(found, dict) else ())
        if name.endswith("/.zarray") or _is_array(document)
    ]


def _is_array(document: Any) -> bool:
    return isinstance(document, dict) and document.get("node_type") == "array"


def _parse(document: Any, version: int) -> tuple[list[int], list[int], list[int], int | None, list[str]]:
    """Return shape, sides of a file and of a chunk, bytes of a value (None: they differ), names of the codecs."""
    if version == 2:
        steps = [document.get("compressor"), *(document.get("filters") or [])]
        codecs = [step["id"] for step in steps if step is not None]
        chunks = _whole(document["chunks"])
        return _whole(document["shape"]), chunks, chunks, _itemsize(document["dtype"]), codecs
    files = chunks = document["chunk_grid"]["configuration"]["chunk_shape"]
    codecs, todo = [], list(document["codecs"])
    while todo:
        step = todo.pop(0)
        codecs.append(step if isinstance(step, str) else step["name"])
        settings = {} if isinstance(step, str) else step.get("configuration") or {}
        if codecs[-1] == "sharding_indexed":
            chunks = settings["chunk_shape"]
            todo += [*settings["codecs"], *settings.get("index_codecs", [])]
    return _whole(document["shape"]), _whole(files), _whole(chunks), _itemsize(document["data_type"]), codecs


def _whole(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} are no sizes")
    return values


def _itemsize(dtype: Any) -> int | None:
    if isinstance(dtype, dict):
        settings = dtype.get("configuration") or {}
        return max([8, *(value for value in settings.values() if isinstance(value, int))])
    try:
        found = np.dtype(dtype)
    except TypeError:  # of zarr alone, such as string
        return None
    return None if found.hasobject else found.itemsize


def expected_size(file: BinaryIO) -> int | None:
    """Return the bytes that a classic netCDF file must have; None for another format."""
    magic = file.read(4)
    if magic not in (b"CDF\1", b"CDF\2", b"CDF\5"):
        return None
    count_form = ">Q" if magic[3] == 5 else ">I"
    begin_form = ">I" if magic[3] == 1 else ">Q"

    def number(form: str = count_form) -> int:
        data = file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise EOFError("the header is cut short")
        return int(struct.unpack(form, data)[0])

    def skip(size: int) -> None:
        if size > MOST:
            raise EOFError(f"the header says that something in it has {size:,} bytes")
        file.seek(_padded(size), 1)

    def entries() -> range:
        number(">I")  # what the list is of
        return range(number())  # each of them has bytes of its own, so that the file's end ends a false one

    def skip_attributes() -> None:
        for _ in entries():
            skip(number())  # the name
            size = SIZES[number(">I")]
            skip(size * number())

    records, lengths = number(), []
    for _ in entries():
        skip(number())
        lengths.append(number())
    skip_attributes()
    fixed, varying = [0], []
    for _ in entries():
        skip(number())
        axes = [number() for _ in range(number())]
        skip_attributes()
        size = SIZES[number(">I")]
        number()  # its own idea of the bytes, which is wrong for large ones
        begin = number(begin_form)
        grows = bool(axes) and lengths[axes[0]] == 0
        size *= math.prod(lengths[axis] for axis in (axes[1:] if grows else axes))
        varying.append((begin, size)) if grows else fixed.append(begin + size)
    if not varying or records in (0, STREAMING):
        return max(fixed)
    step = varying[0][1] if len(varying) == 1 else sum(_padded(size) for _, size in varying)
    return max(*fixed, *(begin + (records - 1) * step + size for begin, size in varying))


def _padded(size: int) -> int:
    return -(-size // 4) * 4
