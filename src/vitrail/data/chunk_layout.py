"""How zarr (2, 3, with shards) and N5 lay out the chunks of an array: names of files, codecs, order, byte order.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.places import Place, read_facts

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


@dataclass(frozen=True)
class Direct:
    """A decoder that writes to memory it is given; it does not tell how much, so the size is asked for before."""

    size: Callable[[Any], int | None]  # bytes that will be written, where the head of the data tells
    decode: Callable[[Any, np.ndarray], Any]


def read_layout(array: Place) -> Layout | None:
    """The layout of a stored array, or None where it has parts that are not understood here."""
    try:
        for name, parse in (("zarr.json", _parse_zarr3), (".zarray", _parse_zarr2), ("attributes.json", _parse_n5)):
            if (array / name).is_file():
                return parse(read_facts(array / name))
    except (Unknown, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError, OSError):
        return None  # tensorstore opens it or explains
    return None


def read_names(array: Place) -> Callable[[Index], str] | None:
    """The names of the files of an array's chunks or shards, or None where they are not understood here."""
    try:
        for name, find in (("zarr.json", _names_zarr3), (".zarray", _names_zarr2), ("attributes.json", _names_n5)):
            if (array / name).is_file():
                return find(read_facts(array / name))
    except (Unknown, AttributeError, LookupError, TypeError, ValueError, OSError):
        return None
    return None


def parse_layout(document: Any, version: int) -> Layout | None:
    """The layout that metadata of zarr tell, wherever they were found."""
    try:
        return (_parse_zarr2 if version == 2 else _parse_zarr3)(document)
    except (Unknown, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError):
        return None


def parse_packing(document: Any, version: int, count: Callable[[Any], None], most: int) -> Layout | None:
    """A layout that unpacks chunks of any values, within bounds, and reads them as zeros; None where it cannot.

    For chunks that another library decodes: compressors come off, and what one filter makes of the rest is known.
    Words have no size: of each of their chunks up to `most` bytes come, and are given to `count`.
    """
    try:
        return _parse_packing(document, version, count, most)
    except (Unknown, ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError):
        return None


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


def _parse_zarr2(document: dict[str, Any]) -> Layout:
    if document.get("filters"):
        raise Unknown
    shape, grid = _alike(document["shape"], document["chunks"])
    stored = _plain(np.dtype(document["dtype"]))
    compressor = document.get("compressor")
    steps = [] if compressor is None else [_decoder(compressor["id"])]
    order = document.get("order", "C")
    if order not in ("C", "F"):
        raise Unknown
    axes = tuple(range(len(grid)))
    fill = _fill(document.get("fill_value"), stored)
    unpack = _any_chunk(_unpacker(grid, stored, steps, axes if order == "C" else axes[::-1]))
    direct = _direct(compressor["id"]) if compressor is not None and order == "C" and _native(stored) else None
    return Layout(shape, grid, stored.newbyteorder("="), fill, _names_zarr2(document), unpack, direct=direct)


def _parse_zarr3(document: dict[str, Any]) -> Layout:
    if document["chunk_grid"]["name"] != "regular" or document.get("storage_transformers"):
        raise Unknown
    shape, grid = _alike(document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"])
    dtype = _plain(np.dtype(document["data_type"]))
    fill = _fill(document.get("fill_value"), dtype)
    name, codecs = _names_zarr3(document), document["codecs"]
    if codecs[0]["name"] != "sharding_indexed":
        unpack = _any_chunk(_chain(codecs, grid, dtype))
        return Layout(shape, grid, dtype, fill, name, unpack, direct=_direct_chain(codecs, dtype))
    if len(codecs) > 1:
        raise Unknown
    inner, small, shards = _parse_shards(codecs[0], grid)
    unpack = _any_chunk(_chain(inner["codecs"], small, dtype))
    return Layout(shape, small, dtype, fill, name, unpack, shards, _direct_chain(inner["codecs"], dtype))


def _parse_shards(codec: dict[str, Any], grid: Index) -> tuple[dict[str, Any], Index, Shards]:
    """Settings of shards, the shape of a chunk inside, and where chunks lie."""
    inner = codec["configuration"]
    small = _whole(inner["chunk_shape"])
    if any(a % b for a, b in zip(grid, small, strict=True)):
        raise Unknown
    chunks = tuple(a // b for a, b in zip(grid, small, strict=True))
    for codec in inner["index_codecs"]:
        if codec["name"] not in ("bytes", "crc32c"):
            raise Unknown  # the index must have a known size
    checked = any(codec["name"] == "crc32c" for codec in inner["index_codecs"])
    shards = Shards(
        chunks,
        _chain(inner["index_codecs"], (*chunks, 2), np.dtype(np.uint64)),
        16 * math.prod(chunks) + 4 * checked,
        inner.get("index_location", "end") == "end",
    )
    return inner, small, shards


def _parse_packing(document: dict[str, Any], version: int, count: Callable[[Any], None], most: int) -> Layout:
    shards = None
    if version == 2:
        shape, grid = _alike(document["shape"], document["chunks"])
        names, kind = _names_zarr2(document), document["dtype"]
        written = [step for step in (*(document.get("filters") or ()), document.get("compressor")) if step is not None]
        codecs = [(step["id"], step) for step in written]
    else:
        if document["chunk_grid"]["name"] != "regular" or document.get("storage_transformers"):
            raise Unknown
        shape, grid = _alike(document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"])
        names, kind, written = _names_zarr3(document), document["data_type"], document["codecs"]
        if written[0]["name"] == "sharding_indexed" and len(written) == 1:
            inner, grid, shards = _parse_shards(written[0], grid)
            written = inner["codecs"]
        codecs = [(step["name"].removeprefix("numcodecs."), step.get("configuration") or {}) for step in written]
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
    """Bytes of a chunk as filters leave it; not of filters that make others of it more than once."""
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


def _chain(codecs: Sequence[dict[str, Any]], grid: Index, dtype: np.dtype) -> Callable[[Any], np.ndarray]:
    """Zarr 3 lists codecs as a writer applies them: transposes, then bytes, then compressors."""
    order, stored = tuple(range(len(grid))), None
    steps: list[Decoder] = []
    for codec in codecs:
        settings = codec.get("configuration") or {}
        if codec["name"] == "transpose":
            order = tuple(order[i] for i in settings["order"])
            if stored is not None or sorted(order) != list(range(len(grid))):
                raise Unknown
        elif codec["name"] == "bytes":
            stored = dtype.newbyteorder(">" if settings.get("endian") == "big" else "<")
        elif stored is None:
            raise Unknown
        else:
            steps.insert(0, _decoder(codec["name"]))
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

    return Layout(shape, grid, stored.newbyteorder("="), 0, _names_n5(document), unpack)


def _any_chunk(unpack: Callable[[Any], np.ndarray]) -> Callable[[Any, Index], np.ndarray]:
    """The same for all chunks, whatever their number."""
    return lambda data, index: unpack(data)


def _unpacker(
    grid: Index, stored: np.dtype, steps: Sequence[Decoder], order: Sequence[int]
) -> Callable[[Any], np.ndarray]:
    """Decode, then shape and turn; `order` names the array's axes from slowest to fastest as they are stored."""
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


def _direct_chain(codecs: Sequence[dict[str, Any]], dtype: np.dtype) -> Direct | None:
    plain = len(codecs) == 2 and codecs[0]["name"] == "bytes"
    big = plain and (codecs[0].get("configuration") or {}).get("endian") == "big"
    return _direct(codecs[1]["name"]) if plain and _native(dtype.newbyteorder(">" if big else "<")) else None


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


def _native(dtype: np.dtype) -> bool:
    return dtype == dtype.newbyteorder("=")


def _zstd_size(data: Any) -> int | None:
    """The size that the head of a zstd frame tells, or None."""
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
    """Decoders that write to memory of the size that the head of the data tells, or of all that may come."""

    def decode(data: Any, most: int) -> Any:
        told = direct.size(data)
        if told is not None and told > most:
            raise ValueError(f"it says that it holds {told} bytes instead of {most}")
        out = np.empty(most if told is None else told, np.uint8)
        found = direct.decode(data, out)
        return out if told is not None else out[: len(found)]

    return decode


def _bounded(start: Callable[[], Any], *, alone: bool = False) -> Decoder:
    """Decoders of streams that do not tell their size; several may follow each other, unless one stands alone."""

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
    """Blosc trusts the length in its header: a file cut short would be read beyond its end."""

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
    """The value of chunks that are not stored."""
    found = np.array(0 if value is None else value)
    if found.ndim:
        raise Unknown
    return found.astype(dtype.newbyteorder("="))[()]  # "NaN" and "Infinity" as text
