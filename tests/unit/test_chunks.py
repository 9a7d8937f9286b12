"""Chunks decoded one by one: every layout as its own library writes it, read exactly; what is broken is named."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr

from vitrail.data.chunks import decoded
from vitrail.data.chunks.decoded import ChunkCache, ChunkReader, open_array, open_chunks, parts
from vitrail.errors import BadData, MissingData

SHAPE, GRID = (20, 30, 41), (8, 8, 16)
WINDOW = (slice(3, 19), slice(7, 30), slice(15, 41))


def values_of(dtype: str = "uint8", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 120, shape).astype(dtype)


def write(path: Path, values: np.ndarray, **options: Any) -> Path:
    array = zarr.create_array(str(path), shape=values.shape, dtype=values.dtype, **{"chunks": GRID, **options})
    array[...] = values
    return path


def write_n5(path: Path, values: np.ndarray, compression: dict[str, Any], block: tuple[int, ...] = GRID) -> Path:
    """By tensorstore; shape and block in C order."""
    metadata = {
        "dimensions": values.shape[::-1],
        "blockSize": block[::-1],
        "dataType": str(values.dtype),
        "compression": compression,
    }
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().T.write(values).result()
    return path


def check(path: Path, values: np.ndarray, grid: tuple[int, ...] = GRID) -> ChunkReader:
    reader = open_chunks(path)
    assert reader is not None
    assert (reader.shape, reader.grid, reader.dtype) == (values.shape, grid, values.dtype.newbyteorder("="))
    cache = ChunkCache()
    whole = cache.read(reader, tuple(slice(0, n) for n in values.shape))
    assert np.array_equal(whole, values)
    assert np.array_equal(cache.read(reader, WINDOW), values[WINDOW])
    return reader


V2_CODECS = {
    "zstd": numcodecs.Zstd(),
    "blosc": numcodecs.Blosc("lz4", shuffle=1),
    "gzip": numcodecs.GZip(),
    "zlib": numcodecs.Zlib(),
    "lz4": numcodecs.LZ4(),
    "bz2": numcodecs.BZ2(),
    "raw": None,
}


@pytest.mark.parametrize("name", V2_CODECS)
@pytest.mark.parametrize(("dtype", "order"), [("|u1", "C"), (">u2", "C"), ("<f4", "F")])
def test_zarr_2(tmp_path: Path, name: str, dtype: str, order: str) -> None:
    values = values_of(dtype)
    check(write(tmp_path / "a", values, zarr_format=2, compressors=V2_CODECS[name], order=order), values)


@pytest.mark.parametrize("separator", [".", "/"])
def test_names_of_zarr_2(tmp_path: Path, separator: str) -> None:
    encoding = {"name": "v2", "separator": separator}
    path = write(tmp_path / "a", values_of(), zarr_format=2, chunk_key_encoding=encoding)
    check(path, values_of())
    assert (path / separator.join("011")).is_file()


@pytest.mark.parametrize(
    "codecs",
    [
        [{"name": "zstd", "configuration": {"level": 1, "checksum": True}}],
        [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}, {"name": "crc32c"}],
        [{"name": "gzip", "configuration": {"level": 1}}],
        [{"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "bitshuffle", "typesize": 2}}],
        [],
    ],
    ids=["zstd", "zstd-crc32c", "gzip", "blosc", "raw"],
)
@pytest.mark.parametrize("shards", [None, (16, 16, 32)])
def test_zarr_3(tmp_path: Path, codecs: list, shards: Any) -> None:
    for name, serializer, dtype in (("little", "little", "uint16"), ("big", "big", "int32")):
        values = values_of(dtype)
        bytes_codec = zarr.codecs.BytesCodec(endian=serializer)
        check(write(tmp_path / name, values, compressors=codecs, serializer=bytes_codec, shards=shards), values)


def test_zarr_3_turned_and_named_otherwise(tmp_path: Path) -> None:
    turned = zarr.codecs.TransposeCodec(order=(2, 0, 1))
    check(write(tmp_path / "a", values_of("uint16"), filters=[turned]), values_of("uint16"))
    named = write(tmp_path / "b", values_of(), chunk_key_encoding={"name": "v2", "separator": "."})
    check(named, values_of())
    assert (named / "0.1.1").is_file()


def test_the_index_of_a_shard_may_come_first(tmp_path: Path) -> None:
    codec = zarr.codecs.ShardingCodec(chunk_shape=GRID, index_location="start")
    path = write(tmp_path / "a", values_of(), chunks=(16, 16, 32), serializer=codec, compressors=None)
    assert "start" in (path / "zarr.json").read_text()
    check(path, values_of())


@pytest.mark.parametrize(
    "compression",
    [
        {"type": "raw"},
        {"type": "gzip", "level": 1},
        {"type": "gzip", "level": 1, "useZlib": True},
        {"type": "bzip2", "blockSize": 1},
        {"type": "blosc", "cname": "lz4", "clevel": 3, "shuffle": 1},
        {"type": "zstd", "level": 1},
        {"type": "xz", "preset": 1},
    ],
    ids=lambda c: c["type"] + ("-zlib" if c.get("useZlib") else ""),
)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_n5(tmp_path: Path, compression: dict, dtype: str) -> None:
    values = values_of(dtype)
    check(write_n5(tmp_path / "a", values, compression), values)


def test_other_layouts_are_left_to_tensorstore(tmp_path: Path) -> None:
    values = values_of("int32")
    path = write(tmp_path / "a", values, zarr_format=2, filters=[numcodecs.Delta("<i4")])
    assert open_chunks(path) is None
    document = json.loads((path / ".zarray").read_text())
    plain = write(tmp_path / "b", values, zarr_format=2)
    assert open_chunks(plain) is not None
    (plain / ".zarray").write_text(json.dumps(document | {"filters": None, "dtype": [["a", "<i4"]]}))
    assert open_chunks(plain) is None


# What is broken --------------------------------------------------------------------------------------------------


def test_a_missing_chunk_is_named_or_filled(tmp_path: Path) -> None:
    for name, options, lost in (
        ("2", {"zarr_format": 2, "fill_value": 7}, "1.2.0"),
        ("3", {"fill_value": 7}, "c/1/2/0"),
    ):
        path = write(tmp_path / name, values_of(), **options)
        (path / lost).unlink()
        with pytest.raises(MissingData, match=r"chunk \{1, 2, 0\} in .* is missing.*missing: fill") as caught:
            open_chunks(path).decode((1, 2, 0))  # type: ignore[union-attr]
        assert str(path / lost) in str(caught.value)
        reader = open_chunks(path, fill=True)
        assert reader is not None
        assert (reader.decode((1, 2, 0)) == 7).all()
        assert reader.filled == 1


@pytest.mark.parametrize("codec", ["zstd", "blosc", "gzip", "lz4", "bz2", "raw"])
@pytest.mark.parametrize("keep", [0, 9, -1])
def test_chunks_cut_short_are_named(tmp_path: Path, codec: str, keep: int) -> None:
    path = write(tmp_path / "a", values_of(), zarr_format=2, compressors=V2_CODECS[codec])
    chunk = path / "1.2.0"
    chunk.write_bytes(chunk.read_bytes()[:keep])
    with pytest.raises(BadData, match=r"chunk \{1, 2, 0\} in .*1\.2\.0 cannot be read: .*restore the file") as caught:
        open_chunks(path).decode((1, 2, 0))  # type: ignore[union-attr]
    assert not isinstance(caught.value, MissingData)


def test_a_chunk_of_another_size_is_refused(tmp_path: Path) -> None:
    """Decoders fill what they can of a larger place and say nothing."""
    for codec in ("zstd", "blosc", "lz4", "gzip"):
        path = write(tmp_path / codec, values_of(), zarr_format=2, compressors=V2_CODECS[codec])
        (path / "0.0.0").write_bytes(V2_CODECS[codec].encode(np.zeros(100, np.uint8)))  # type: ignore[union-attr]
        with pytest.raises(BadData, match="holds 100 bytes instead of 1024"):
            open_chunks(path).decode((0, 0, 0))  # type: ignore[union-attr]


def test_checksums_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a", values_of(), compressors=[{"name": "crc32c"}])
    chunk = path / "c" / "0" / "0" / "0"
    chunk.write_bytes(b"\0" + chunk.read_bytes()[1:])
    with pytest.raises(BadData, match="checksum is wrong"):
        open_chunks(path).decode((0, 0, 0))  # type: ignore[union-attr]


def test_a_shard_of_no_bytes_is_no_shard_of_zeros(tmp_path: Path) -> None:
    path = write(tmp_path / "a", values_of(), shards=(16, 16, 32))
    shard = path / "c" / "0" / "1" / "0"
    whole = shard.read_bytes()
    for bad, words in ((b"", "has 0 bytes, its index alone needs"), (whole[:20], "has 20 bytes"), (whole[40:], "")):
        shard.write_bytes(bad)
        reader = open_chunks(path)
        assert reader is not None
        with pytest.raises(BadData, match=rf"chunk \{{0, 2, 0\}} in .*c/0/1/0 cannot be read: .*{words}"):
            reader.decode((0, 2, 0))


def test_shards_that_tensorstore_reads_are_no_zeros_either(tmp_path: Path) -> None:
    """As shards within shards are."""
    inner = {"chunk_shape": [4, 4, 8], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]}
    outer = {"chunk_shape": [8, 8, 16], "codecs": [{"name": "sharding_indexed", "configuration": inner}]}
    codecs = [{"name": "sharding_indexed", "configuration": outer | {"index_codecs": [{"name": "bytes"}]}}]
    regular = {"name": "regular", "configuration": {"chunk_shape": [16, 16, 32]}}
    metadata = {"shape": SHAPE, "data_type": "uint8", "chunk_grid": regular, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(values_of()).result()
    assert open_chunks(tmp_path / "a") is None
    stored = open_array(tmp_path / "a", fill=False)
    assert np.array_equal(stored.read(WINDOW), values_of()[WINDOW])
    (tmp_path / "a" / "c" / "0" / "1" / "0").write_bytes(b"")
    for fill in (False, True):
        with pytest.raises(BadData, match=r"cannot be read .*c/0/1/0"):
            open_array(tmp_path / "a", fill=fill).read(WINDOW)


def test_shards_without_some_chunks(tmp_path: Path) -> None:
    values = values_of()
    values[0:8, 16:24, 0:16] = 0  # zarr-python leaves it out
    path = write(tmp_path / "a", values, shards=(16, 16, 32))
    with pytest.raises(MissingData, match=r"chunk \{0, 2, 0\}"):
        open_chunks(path).decode((0, 2, 0))  # type: ignore[union-attr]
    reader = open_chunks(path, fill=True)
    assert reader is not None
    assert np.array_equal(ChunkCache().read(reader, WINDOW), values[WINDOW])


# The cache -------------------------------------------------------------------------------------------------------


def test_parts_cover_a_window_once() -> None:
    seen = np.zeros((16, 23, 26), int)
    for part in parts(GRID, WINDOW):
        seen[part.target] += 1
        for number, inside, target, size, w in zip(*part, GRID, WINDOW, strict=True):
            assert number * size + inside.start == w.start + target.start
            assert inside.stop - inside.start == target.stop - target.start
    assert (seen == 1).all()


@pytest.mark.parametrize("limit", [0, 3000, 20_000, 2**20])
def test_windows_from_many_threads(tmp_path: Path, limit: int) -> None:
    values = values_of()
    reader = open_chunks(write(tmp_path / "a", values))
    wide = open_chunks(write(tmp_path / "b", values.astype(np.uint16)))
    assert reader is not None
    assert wide is not None
    cache = ChunkCache(limit)
    rng = np.random.default_rng(1)
    starts = [[int(rng.integers(n)) for n in SHAPE] for _ in range(200)]
    windows = [tuple(slice(a, int(rng.integers(a + 1, n + 1))) for a, n in zip(s, SHAPE, strict=True)) for s in starts]

    def work(job: int) -> None:
        array, window = (reader, wide)[job % 2], windows[job]
        target = np.full([w.stop - w.start for w in window], 200, (np.uint8, np.float32)[job % 3 == 0])
        cache.read_into(array, target, window)
        assert np.array_equal(target, values[window])
        assert cache.bytes <= limit

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(200)))


def test_a_chunk_is_decoded_once_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of()
    reader = open_chunks(write(tmp_path / "a", values))
    assert reader is not None
    decode, calls = ChunkReader.decode, []

    def slow(self: ChunkReader, index: tuple[int, ...], *memory: Any) -> np.ndarray:
        calls.append(index)
        time.sleep(0.002)
        return decode(self, index, *memory)

    monkeypatch.setattr(ChunkReader, "decode", slow)
    cache = ChunkCache()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: cache.read(reader, WINDOW), range(8)):
            assert np.array_equal(found, values[WINDOW])
    assert len(calls) == len(set(calls)) == 36


def test_errors_reach_all_who_wait_and_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of()
    reader = open_chunks(write(tmp_path / "a", values))
    assert reader is not None
    gate, failing = threading.Event(), [True]
    unpack = ChunkReader._unpack

    def broken(self: ChunkReader, *rest: Any) -> None:
        gate.wait()
        if failing[0]:
            raise OSError(5, "Input/output error")
        unpack(self, *rest)

    monkeypatch.setattr(ChunkReader, "_unpack", broken)
    cache = ChunkCache()
    window = (slice(0, 8), slice(0, 8), slice(0, 16))
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(cache.read, reader, window) for _ in range(3)]
        time.sleep(0.05)
        gate.set()
        assert all(isinstance(job.exception(), OSError) for job in jobs)
    failing[0] = False
    assert np.array_equal(cache.read(reader, window), values[window])


def test_a_chunk_that_found_no_memory_can_be_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(shape=(8, 8, 8))
    reader = open_chunks(write(tmp_path / "a", values, chunks=(8, 8, 8)))
    assert reader is not None
    cache, window = ChunkCache(), (slice(0, 8),) * 3
    with monkeypatch.context() as patch:
        patch.setattr(decoded, "_decode_into", lambda *_: np.empty(2**60, np.uint8))
        with pytest.raises(MemoryError):
            cache.read(reader, window)
    assert np.array_equal(cache.read(reader, window), values)


def test_many_chunks_are_shared_out_among_threads(tmp_path: Path) -> None:
    values = values_of(shape=(20, 20, 20))
    path = write(tmp_path / "a", values, chunks=(4, 4, 4))
    reader = open_chunks(path)
    assert reader is not None
    whole = (slice(0, 20),) * 3
    assert np.array_equal(ChunkCache().read(reader, whole), values)
    (path / "c" / "3" / "3" / "3").unlink()
    with pytest.raises(MissingData, match=r"\{3, 3, 3\}"):
        ChunkCache().read(reader, whole)
