"""Layouts of the chunks of an array in zarr (2, 3, with shards) and N5: names of files, codecs, order, byte order.

- only what is common is understood, and decoded by bare decoders that release the GIL: zstd, blosc, lz4, gzip, zlib,
  bz2, xz, raw bytes, crc32c; `read_layout` gives None for everything else, which tensorstore then reads
- a decoder is told how many bytes may come, and gives up at one more: a few bytes can stand for any number
- axes are in C order: N5 stores x, y, z with x fastest, which is z, y, x here
"""

import bz2
import lzma
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vitrail.data.files.places import Place, read_facts

T = TypeVar("T")
Index = tuple[int, ...]
# Bytes-like, and the most that may come of them, to bytes-like; raises some exception for broken input.
Decoder = Callable[[Any, int], Any]

N5_TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64")
PACKERS = ("zstd", "blosc", "lz4", "gzip", "zlib", "bz2", "crc32c")
SAME = ("shuffle", "bitround")  # filters that leave as many bytes
CHANGING = ("delta", "fixedscaleoffset", "quantize", "astype", "packbits")  # those that leave as many values
TYPES = ("dtype", "astype", "encode_dtype", "decode_dtype")  # settings of filters
MOST_NUMBER = 16  # bytes
MOST_ITEM = 2**20  # bytes of a word, where all have as many


class Unknown(Exception):
    """A layout that is left to tensorstore."""


@dataclass(frozen=True)
class Shards:
    """Files that hold many chunks, with an index of (offset, bytes) at one end."""

    chunks: Index  # a shard has so many along each axis
    decode_index: Callable[[Any], np.ndarray]
    index_bytes: int  # as stored
    at_end: bool


@dataclass(frozen=True)
class Layout:
    shape: Index
    grid: Index  # shape of a chunk, of those inside a shard where there are shards
    dtype: np.dtype  # in this machine's byte order
    fill: Any
    name: Callable[[Index], str]  # file of a chunk or shard, relative to the array
    unpack: Callable[[Any, Index], np.ndarray]  # from the bytes of a chunk, and its number, to its voxels
    shards: Shards | None = None
    direct: "Direct | None" = None  # where voxels can be decoded right to their place
    most: int | None = None  # bytes of a chunk as stored; None: what its voxels can need
    codecs: tuple[str, ...] = ()  # names, in the order in which a writer applies them


@dataclass(frozen=True)
class Direct:
    """A decoder that writes to memory it is given; it does not tell how much, so the size is asked for before."""

    size: Callable[[Any], int | None]  # bytes that will be written, where the head of the data tells
    decode: Callable[[Any, np.ndarray], Any]


# Whatever metadata are not understood: tensorstore opens the array, or explains.
_MISREAD = (Unknown, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError, OSError)


def read_layout(array: Place) -> Layout | None:
    """Return the layout of a stored array, or None where it has parts that are not understood here."""
    return _attempt(lambda: _by_metadata(array, _PARSERS))


def read_names(array: Place) -> Callable[[Index], str] | None:
    """Return the names of the files of an array's chunks or shards, or None where they are not understood here."""
    return _attempt(lambda: _by_metadata(array, _NAMES))


def parse_layout(document: Any, version: int) -> Layout | None:
    """Return the layout that metadata of zarr tell, wherever they were found."""
    return _attempt(lambda: (_parse_zarr2 if version == 2 else _parse_zarr3)(document))


def parse_packing(document: Any, version: int, count: Callable[[Any], None], most: int) -> Layout | None:
    """Return a layout that unpacks chunks of any values, within bounds, and reads them as zeros; None where it cannot.

    For chunks that another library decodes: compressors come off, and what one filter makes of the rest is known.
    Words have no size: of each of their chunks up to `most` bytes come, and are given to `count`.
    """
    return _attempt(lambda: _parse_packing(document, version, count, most))


def _attempt(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except _MISREAD:
        return None


def _by_metadata(array: Place, tables: Mapping[str, Callable[[dict[str, Any]], T]]) -> T:
    """Return what the function for an array's format makes of its metadata."""
    for name, find in tables.items():
        if (array / name).is_file():
            return find(read_facts(array / name))
    raise Unknown


def _names_zarr2(document: dict[str, Any]) -> Callable[[Index], str]:
    separator = document.get("dimension_separator", ".")
    if separator not in ("/", "."):
        raise Unknown
    return lambda index: separator.join(map(str, index))


def _names_zarr3(document: dict[str, Any]) -> Callable[[Index], str]:
    encoding = document["chunk_key_encoding"]
    slashed = encoding["name"] == "default"
    separator = (encoding.get("configuration") or {}).get("separator", "/" if slashed else ".")
    if separator not in ("/", "."):
        raise Unknown
    return lambda index: separator.join(["c", *map(str, index)] if slashed else map(str, index))


def _names_n5(document: dict[str, Any]) -> Callable[[Index], str]:
    return lambda index: "/".join(map(str, index[::-1]))


class _Zarr(NamedTuple):
    """Metadata of zarr, in the same form for both versions."""

    shape: Index
    grid: Index  # shape of a chunk, of those inside a shard
    kind: Any  # of the values
    name: Callable[[Index], str]
    codecs: list[tuple[str, dict[str, Any]]]  # with settings, in the order in which a writer applies them
    shards: Shards | None


def _read_zarr(document: dict[str, Any], version: int) -> _Zarr:
    if version == 2:
        shape, grid = _alike(document["shape"], document["chunks"])
        steps = [step for step in (*(document.get("filters") or ()), document.get("compressor")) if step is not None]
        named = [(step["id"], step) for step in steps]
        return _Zarr(shape, grid, document["dtype"], _names_zarr2(document), named, None)
    if document["chunk_grid"]["name"] != "regular" or document.get("storage_transformers"):
        raise Unknown
    shape, grid = _alike(document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"])
    codecs, shards = document["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        if len(codecs) > 1:
            raise Unknown
        codecs, grid, shards = _parse_shards(codecs[0], grid)
    return _Zarr(shape, grid, document["data_type"], _names_zarr3(document), _named(codecs), shards)


def _named(codecs: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(codec["name"], codec.get("configuration") or {}) for codec in codecs]


def _parse_zarr2(document: dict[str, Any]) -> Layout:
    """Return the layout of version 2, with its order and byte order as the codecs that version 3 has for them."""
    if document.get("filters"):
        raise Unknown
    found = _read_zarr(document, 2)
    stored, order = _plain(np.dtype(found.kind)), document.get("order", "C")
    if order not in ("C", "F"):
        raise Unknown
    turned = [("transpose", {"order": list(range(len(found.grid)))[::-1]})] if order == "F" else []
    codecs: list[tuple[str, dict[str, Any]]] = [
        *turned,
        ("bytes", {"endian": "big" if stored.str[0] == ">" else "little"}),
        *found.codecs,
    ]
    return _lay_out(found._replace(codecs=codecs), stored.newbyteorder("="), document)


def _parse_zarr3(document: dict[str, Any]) -> Layout:
    found = _read_zarr(document, 3)
    return _lay_out(found, _plain(np.dtype(found.kind)), document)


def _lay_out(found: _Zarr, dtype: np.dtype, document: dict[str, Any]) -> Layout:
    shape, grid, _, name, codecs, shards = found
    fill, decode = _fill(document.get("fill_value"), dtype), _chain(codecs, grid, dtype)
    names = tuple(str(codec).removeprefix("numcodecs.") for codec, _ in codecs)
    direct = _direct_chain(codecs, dtype)
    return Layout(shape, grid, dtype, fill, name, lambda data, _: decode(data), shards, direct, codecs=names)


def _parse_shards(codec: dict[str, Any], grid: Index) -> tuple[list[dict[str, Any]], Index, Shards]:
    """Return the codecs of chunks inside shards, their shape, and where they lie."""
    inner = codec["configuration"]
    small = _whole(inner["chunk_shape"])
    if any(a % b for a, b in zip(grid, small, strict=True)):
        raise Unknown
    chunks = tuple(a // b for a, b in zip(grid, small, strict=True))
    codecs = _named(inner["index_codecs"])
    names = [name for name, _ in codecs]
    if not set(names) <= {"bytes", "crc32c"}:
        raise Unknown  # the index must have a known size
    shards = Shards(
        chunks,
        _chain(codecs, (*chunks, 2), np.dtype(np.uint64)),
        16 * math.prod(chunks) + 4 * ("crc32c" in names),
        inner.get("index_location", "end") == "end",
    )
    return inner["codecs"], small, shards


def _parse_packing(document: dict[str, Any], version: int, count: Callable[[Any], None], most: int) -> Layout:
    shape, grid, kind, names, codecs, shards = _read_zarr(document, version)
    codecs = [(name.removeprefix("numcodecs."), settings) for name, settings in codecs]
    packers = []
    while codecs and codecs[-1][0] in PACKERS:
        packers.append(_decoder(codecs.pop()[0]))
    words = [name for name, _ in codecs] in (["vlen-utf8"], ["vlen-bytes"])
    expected = most if words else _encoded_size(math.prod(grid), kind, codecs)

    def unpack(data: Any, index: Index) -> np.ndarray:
        for number, decode in enumerate(packers, 1):
            data = decode(data, expected if number == len(packers) else 2 * expected + 2**16)
        if len(data) > expected:
            raise ValueError(f"it holds more than {expected} bytes")
        if words:
            count(data)
        return np.zeros((), np.uint8)

    return Layout(shape, grid, np.dtype(np.uint8), 0, names, unpack, shards, most=expected + expected // 8 + 2**20)


def _encoded_size(elements: int, kind: Any, codecs: Sequence[tuple[str, dict[str, Any]]]) -> int:
    """Return the bytes of a chunk as one filter leaves it; several filters in a row are not understood."""
    if isinstance(kind, dict):
        kind = f"V{int(kind['configuration'].get('length_bytes', 8))}"
    itemsize = _sized_type(kind, MOST_ITEM).itemsize
    filters = [(name, settings) for name, settings in codecs if name not in ("bytes", "transpose", *SAME)]
    if not filters:
        return elements * itemsize
    ((name, settings),) = filters
    if name not in CHANGING:
        raise Unknown
    types = {key: _sized_type(value, MOST_NUMBER) for key, value in settings.items() if key in TYPES}
    if name == "packbits":
        return elements // 8 + 2
    return elements * types[{"astype": "encode_dtype"}.get(name, "astype" if "astype" in types else "dtype")].itemsize


def _sized_type(kind: Any, most: int) -> np.dtype:
    found = np.dtype(kind)
    if found.hasobject or not 0 < found.itemsize <= most:
        raise Unknown
    return found


def _chain(codecs: Sequence[tuple[str, dict[str, Any]]], grid: Index, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """Return a decoder of codecs as zarr 3 lists them: transposes, then bytes, then compressors."""
    order, stored = tuple(range(len(grid))), None
    steps: list[Decoder] = []
    for name, settings in codecs:
        if name == "transpose":
            order = tuple(order[i] for i in settings["order"])
            if stored is not None or sorted(order) != list(range(len(grid))):
                raise Unknown
        elif name == "bytes":
            stored = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
        elif stored is None:
            raise Unknown
        else:
            steps.insert(0, _decoder(name))
    if stored is None:
        raise Unknown
    return _unpacker(grid, stored, steps, order)


def _parse_n5(document: dict[str, Any]) -> Layout:
    shape, grid = _alike(document["dimensions"][::-1], document["blockSize"][::-1])
    if document["dataType"] not in N5_TYPES:
        raise Unknown
    stored = np.dtype(document["dataType"]).newbyteorder(">")
    compression = document.get("compression") or {"type": document["compressionType"]}
    name = {"bzip2": "bz2", "raw": "raw"}.get(compression["type"], compression["type"])
    if name not in ("gzip", "zstd", "bz2", "blosc", "xz", "raw"):  # lz4 is framed in Java's own way
        raise Unknown
    decode = _decoder("zlib" if name == "gzip" and compression.get("useZlib") else name)
    rank = len(grid)

    def unpack(data: Any, index: Index) -> np.ndarray:
        mode, dims = struct.unpack_from(">HH", data)
        if mode != 0 or dims != rank:
            raise ValueError(f"it is a block of mode {mode} and {dims} dimensions")
        size = struct.unpack_from(f">{rank}I", data, 4)[::-1]
        if any(s > g for s, g in zip(size, grid, strict=True)):
            raise ValueError(f"it holds {size} voxels, more than the {grid} of a block")
        if any(s < min(g, n - i * g) for s, g, n, i in zip(size, grid, shape, index, strict=True)):
            raise ValueError(f"it holds {size} voxels, fewer than the array has there")
        values = _unpacker(size, stored, [decode], tuple(range(rank)))(memoryview(data)[4 + 4 * rank :])
        if size == grid:
            return values
        whole = np.zeros(grid, values.dtype)  # blocks at the far end may be cut; what is beyond is never read
        whole[tuple(slice(0, s) for s in size)] = values
        return whole

    codecs = (compression["type"],)
    return Layout(shape, grid, stored.newbyteorder("="), 0, _names_n5(document), unpack, codecs=codecs)


_NAMES = {"zarr.json": _names_zarr3, ".zarray": _names_zarr2, "attributes.json": _names_n5}
_PARSERS = {"zarr.json": _parse_zarr3, ".zarray": _parse_zarr2, "attributes.json": _parse_n5}


def _unpacker(
    grid: Index, stored: np.dtype, steps: Sequence[Decoder], order: Sequence[int]
) -> Callable[[Any], np.ndarray]:
    """Return a call that decodes, shapes and turns; `order` names the axes from slowest to fastest as stored."""
    turned = tuple(grid[i] for i in order)
    back = tuple(int(i) for i in np.argsort(order))
    expected = math.prod(grid) * stored.itemsize

    def unpack(data: Any) -> np.ndarray:
        for number, decode in enumerate(steps, 1):
            # What is still packed may be larger than what is in it, by a little.
            data = decode(data, expected if number == len(steps) else 2 * expected + 2**16)
        if len(data) != expected:
            raise ValueError(f"it holds {len(data)} bytes instead of {expected}")
        values = np.frombuffer(data, stored).reshape(turned).transpose(back)
        return np.ascontiguousarray(values, dtype=stored.newbyteorder("="))

    return unpack


def _direct_chain(codecs: Sequence[tuple[str, dict[str, Any]]], dtype: np.dtype) -> Direct | None:
    if len(codecs) != 2 or codecs[0][0] != "bytes":
        return None
    stored = dtype.newbyteorder(">" if codecs[0][1].get("endian") == "big" else "<")
    return _direct(codecs[1][0]) if stored == dtype.newbyteorder("=") else None


def _direct(name: str) -> Direct | None:
    if name == "zstd":
        from numcodecs import Zstd

        return Direct(_zstd_size, Zstd().decode)
    if name == "blosc":
        from numcodecs import Blosc

        return Direct(lambda data: struct.unpack_from("<I", data, 4)[0], _checked_blosc(Blosc().decode))
    if name == "lz4":
        from numcodecs import LZ4

        return Direct(lambda data: struct.unpack_from("<I", data)[0], LZ4().decode)
    return None


def _zstd_size(data: Any) -> int | None:
    """Return the size that the head of a zstd frame tells, or None."""
    if len(data) < 6 or struct.unpack_from("<I", data)[0] != 0xFD2FB528:
        raise ValueError("it is no frame of zstd")
    flags = data[4]
    single, width = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
    width = width or single
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]  # after the window and the number of a dictionary
    size = int.from_bytes(data[start : start + width], "little")
    return None if width == 0 else size + 256 if width == 2 else size


def _decoder(name: str) -> Decoder:
    direct = _direct(name)
    if direct is not None:
        return _sized(direct)
    known: dict[str, Decoder] = {
        "gzip": _bounded(lambda: zlib.decompressobj(31)),
        "zlib": _bounded(zlib.decompressobj, alone=True),
        "bz2": _bounded(bz2.BZ2Decompressor),
        "xz": _bounded(lzma.LZMADecompressor),
        "raw": lambda data, most: bytes(data),
    }
    if name == "crc32c":
        return _checked_crc32c()
    if name not in known:
        raise Unknown
    return known[name]


def _sized(direct: Direct) -> Decoder:
    """Return a decoder that writes to memory of the size that the head of the data tells, or of all that may come."""

    def decode(data: Any, most: int) -> Any:
        told = direct.size(data)
        if told is not None and told > most:
            raise ValueError(f"it says that it holds {told} bytes instead of {most}")
        out = np.empty(most if told is None else told, np.uint8)
        found = direct.decode(data, out)
        return out if told is not None else out[: len(found)]

    return decode


def _bounded(start: Callable[[], Any], *, alone: bool = False) -> Decoder:
    """Return a decoder of streams that do not tell their size; several may follow each other, unless `alone`."""

    def decode(data: Any, most: int) -> Any:
        pieces, size, rest = [], 0, bytes(data)
        while rest:
            stream = start()
            piece = stream.decompress(rest, most + 1 - size)
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise ValueError(f"it holds more than {most} bytes")
            if not stream.eof:
                raise ValueError("it is cut short")
            rest = b"" if alone else stream.unused_data.lstrip(b"\0")  # some writers pad
        return b"".join(pieces)

    return decode


def _checked_blosc(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse data cut short: Blosc trusts the length in its header, and would read beyond the end."""

    def checked(data: Any, *out: Any) -> Any:
        if len(data) < 16 or struct.unpack_from("<I", data, 12)[0] != len(data):
            raise ValueError("it is cut short")
        return decode(data, *out)

    return checked


def _checked_crc32c() -> Decoder:
    from google_crc32c import value

    def checked(data: Any, most: int) -> Any:
        view = memoryview(data)
        if len(view) < 4 or value(bytes(view[:-4])) != struct.unpack("<I", view[-4:])[0]:
            raise ValueError("its checksum is wrong")
        return view[:-4]

    return checked


def _alike(shape: Sequence[Any], grid: Sequence[Any]) -> tuple[Index, Index]:
    if len(shape) != len(grid):
        raise Unknown
    return _whole(shape), _whole(grid)


def _whole(values: Sequence[Any]) -> Index:
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        raise Unknown
    return tuple(values)


def _plain(dtype: np.dtype) -> np.dtype:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise Unknown
    return dtype


def _fill(value: Any, dtype: np.dtype) -> Any:
    """Return the value of chunks that are not stored."""
    found = np.array(0 if value is None else value)
    if found.ndim:
        raise Unknown
    return found.astype(dtype.newbyteorder("="))[()]  # "NaN" and "Infinity" as text
