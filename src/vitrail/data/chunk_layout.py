"""How zarr (2, 3, with shards) and N5 lay out the chunks of an array: names of files, codecs, order, byte order.

- only what is common is understood, and decoded by bare decoders that release the GIL: zstd, blosc, lz4, gzip, zlib,
  bz2, raw bytes, crc32c; `read_layout` gives None for everything else, which tensorstore then reads
- axes are in C order: N5 stores x, y, z with x fastest, which is z, y, x here
"""

import bz2
import gzip
import json
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.data.places import Place

Index = tuple[int, ...]
Decoder = Callable[[Any], Any]  # bytes-like to bytes-like; raises some exception for broken input

N5_TYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64")


class Unknown(Exception):
    """A layout that is left to tensorstore."""


@dataclass(frozen=True)
class Shards:
    """Files that hold many chunks, with an index of (offset, bytes) at one end."""

    chunks: Index  # a shard has so many along each axis
    decode_index: Decoder
    index_bytes: int  # as stored
    at_end: bool


@dataclass(frozen=True)
class Layout:
    shape: Index
    grid: Index  # shape of a chunk, of those inside a shard where there are shards
    dtype: np.dtype  # in this machine's byte order
    fill: Any
    name: Callable[[Index], str]  # file of a chunk or shard, relative to the array
    unpack: Callable[[Any], np.ndarray]  # from the bytes of a chunk to its voxels
    shards: Shards | None = None
    direct: "Direct | None" = None  # where voxels can be decoded right to their place


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
                return parse(json.loads((array / name).read_text(encoding="utf-8")))
    except (Unknown, AttributeError, ImportError, KeyError, TypeError, ValueError, OSError):
        return None  # tensorstore opens it or explains
    return None


def _parse_zarr2(document: dict[str, Any]) -> Layout:
    if document.get("filters"):
        raise Unknown
    shape, grid = _whole(document["shape"]), _whole(document["chunks"])
    stored = _plain(np.dtype(document["dtype"]))
    compressor = document.get("compressor")
    steps = [] if compressor is None else [_decoder(compressor["id"])]
    order = document.get("order", "C")
    axes = tuple(range(len(grid)))
    separator = document.get("dimension_separator", ".")
    fill = _fill(document.get("fill_value"), stored)
    unpack = _unpacker(grid, stored, steps, axes if order == "C" else axes[::-1])
    direct = _direct(compressor["id"]) if compressor is not None and order == "C" and _native(stored) else None
    return Layout(
        shape, grid, stored.newbyteorder("="), fill, lambda i: separator.join(map(str, i)), unpack, direct=direct
    )


def _parse_zarr3(document: dict[str, Any]) -> Layout:
    if document["chunk_grid"]["name"] != "regular" or document.get("storage_transformers"):
        raise Unknown
    shape, grid = _whole(document["shape"]), _whole(document["chunk_grid"]["configuration"]["chunk_shape"])
    dtype = _plain(np.dtype(document["data_type"]))
    fill = _fill(document.get("fill_value"), dtype)
    encoding = document["chunk_key_encoding"]
    slashed = encoding["name"] == "default"
    separator = (encoding.get("configuration") or {}).get("separator", "/" if slashed else ".")

    def name(index: Index) -> str:
        return separator.join(["c", *map(str, index)] if slashed else map(str, index))

    codecs = document["codecs"]
    if codecs[0]["name"] != "sharding_indexed":
        return Layout(shape, grid, dtype, fill, name, _chain(codecs, grid, dtype), direct=_direct_chain(codecs, dtype))
    if len(codecs) > 1:
        raise Unknown
    inner = codecs[0]["configuration"]
    small = _whole(inner["chunk_shape"])
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
    unpack = _chain(inner["codecs"], small, dtype)
    return Layout(shape, small, dtype, fill, name, unpack, shards, _direct_chain(inner["codecs"], dtype))


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
    shape, grid = _whole(document["dimensions"])[::-1], _whole(document["blockSize"])[::-1]
    if document["dataType"] not in N5_TYPES:
        raise Unknown
    stored = np.dtype(document["dataType"]).newbyteorder(">")
    compression = document.get("compression") or {"type": document["compressionType"]}
    name = {"bzip2": "bz2", "raw": "raw"}.get(compression["type"], compression["type"])
    if name not in ("gzip", "zstd", "bz2", "blosc", "raw"):  # lz4 is framed in Java's own way
        raise Unknown
    decode = _decoder("zlib" if name == "gzip" and compression.get("useZlib") else name)
    rank = len(grid)

    def unpack(data: Any) -> np.ndarray:
        mode, dims = struct.unpack_from(">HH", data)
        if mode != 0 or dims != rank:
            raise ValueError(f"it is a block of mode {mode} and {dims} dimensions")
        size = struct.unpack_from(f">{rank}I", data, 4)[::-1]
        if any(s > g for s, g in zip(size, grid, strict=True)):
            raise ValueError(f"it holds {size} voxels, more than the {grid} of a block")
        values = _unpacker(size, stored, [decode], tuple(range(rank)))(memoryview(data)[4 + 4 * rank :])
        if size == grid:
            return values
        whole = np.zeros(grid, values.dtype)  # blocks at the far end may be cut; what is beyond is never read
        whole[tuple(slice(0, s) for s in size)] = values
        return whole

    return Layout(shape, grid, stored.newbyteorder("="), 0, lambda i: "/".join(map(str, i[::-1])), unpack)


def _unpacker(
    grid: Index, stored: np.dtype, steps: Sequence[Decoder], order: Sequence[int]
) -> Callable[[Any], np.ndarray]:
    """Decode, then shape and turn; `order` names the array's axes from slowest to fastest as they are stored."""
    turned = tuple(grid[i] for i in order)
    back = tuple(int(i) for i in np.argsort(order))
    expected = math.prod(grid) * stored.itemsize

    def unpack(data: Any) -> np.ndarray:
        for decode in steps:
            data = decode(data)
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
    if len(data) < 18 or struct.unpack_from("<I", data)[0] != 0xFD2FB528:
        return None
    flags = data[4]
    single, width = flags >> 5 & 1, (0, 2, 4, 8)[flags >> 6]
    width = width or single
    start = 5 + (not single) + (0, 1, 2, 4)[flags & 3]  # after the window and the number of a dictionary
    size = int.from_bytes(data[start : start + width], "little")
    return None if width == 0 else size + 256 if width == 2 else size


def _decoder(name: str) -> Decoder:
    if name == "zstd":
        from numcodecs import Zstd

        return Zstd().decode
    if name == "blosc":
        from numcodecs import Blosc

        return _checked_blosc(Blosc().decode)
    if name == "lz4":
        from numcodecs import LZ4

        return LZ4().decode
    known: dict[str, Decoder] = {
        "gzip": gzip.decompress,
        "zlib": zlib.decompress,
        "bz2": bz2.decompress,
        "raw": bytes,
    }
    if name == "crc32c":
        return _checked_crc32c()
    if name not in known:
        raise Unknown
    return known[name]


def _checked_blosc(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Blosc trusts the length in its header: a file cut short would be read beyond its end."""

    def checked(data: Any, *out: Any) -> Any:
        if len(data) < 16 or struct.unpack_from("<I", data, 12)[0] != len(data):
            raise ValueError("it is cut short")
        return decode(data, *out)

    return checked


def _checked_crc32c() -> Decoder:
    from google_crc32c import value

    def checked(data: Any) -> Any:
        view = memoryview(data)
        if len(view) < 4 or value(bytes(view[:-4])) != struct.unpack("<I", view[-4:])[0]:
            raise ValueError("its checksum is wrong")
        return view[:-4]

    return checked


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
    return np.array(0 if value is None else value).astype(dtype.newbyteorder("="))[()]  # "NaN" and "Infinity" as text
