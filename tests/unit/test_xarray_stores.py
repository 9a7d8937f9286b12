"""Zarr stores of xarray: ordinary coordinates of words pass, and what libraries would choke on is refused."""

import bz2
import functools
import http.server
import json
import lzma
import os
import threading
from pathlib import Path
from typing import Any

import fsspec
import numcodecs
import numpy as np
import pytest
import xarray

from vitrail import foreign
from vitrail.data.files.places import Remote, find_place, read_remote
from vitrail.data.formats import xarray as xarray_stores
from vitrail.data.formats.xarray import _arrays, check_store
from vitrail.data.sources.netcdf import NetcdfConfig
from vitrail.errors import BadData

WORDS = np.array([f"station-{number:05d}-{'x' * 90}" for number in range(30_000)], object)


def store(path: Path, version: int, **encoding: Any) -> Path:
    values = np.ones(len(WORDS), np.float32)
    xarray.Dataset({"u": (("s",), values)}, {"s": WORDS}).to_zarr(
        path, zarr_format=version, encoding={"s": {"compressors": None} | encoding}
    )
    return path


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize(
    ("version", "encoding", "last"),
    [(2, {}, "0"), (3, {}, "c/0"), (3, {"chunks": (1000,), "shards": (15_000,)}, "c/1")],
    ids=["v2", "v3", "shards"],
)
def test_words_may_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, encoding: dict[str, Any], last: str
) -> None:
    top = store(tmp_path / "a.zarr", version, **encoding)
    file = top / "s" / last
    assert file.stat().st_size > 2**20
    check_store(str(top))
    with monkeypatch.context() as patch:
        patch.setattr(foreign, "room", lambda: 2**20)
        with pytest.raises(BadData, match="at once"):
            check_store(str(top))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(BadData, match="is a FIFO"):
        check_store(str(top))


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("version", [2, 3])
def test_one_file_that_tells_of_all_arrays_is_asked_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    top = store(tmp_path / "a.zarr", version)
    assert sorted(name for name, _, _ in _arrays(top)) == ["s", "u"]  # each once, though two files tell of it
    system = fsspec.filesystem("memory")
    system.put(str(top), f"/told{version}.zarr", recursive=True)
    listed: list[str] = []
    listing = Remote.iterdir
    monkeypatch.setattr(Remote, "iterdir", lambda place: listed.append(place.url) or listing(place))
    try:
        place = find_place(f"memory://told{version}.zarr")
        assert sorted(name for name, _, _ in _arrays(place)) == ["s", "u"]
        assert listed == []
    finally:
        system.rm(f"/told{version}.zarr", recursive=True)


# ---------------------------------------------------------------- what becomes more than it says

BOMB = bz2.compress(bytes(1 << 20))
DELTA = {"id": "delta", "dtype": "<i4", "astype": "<i4"}
CASES = {  # changes of a coordinate's metadata, and words of the refusal
    "bz2": ({}, "holds more than 64 bytes"),
    "filter": ({"filters": [DELTA]}, "holds more than 64 bytes"),
    "two filters": ({"filters": [DELTA, DELTA]}, "codecs of which any number of bytes may come"),
    "packed twice": ({"filters": [{"id": "zlib"}, DELTA]}, "codecs of which any number of bytes may come"),
    "wide filter": (
        {"filters": [{"id": "astype", "encode_dtype": "|i1", "decode_dtype": "<U9999"}]},
        "codecs of which any number of bytes may come",
    ),
    "lzma": ({"compressor": {"id": "lzma"}}, "codecs of which any number of bytes may come"),
    "words": ({"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "fill_value": ""}, "holds more than 1000 bytes"),
    "letters": ({"dtype": "<U4"}, "holds more than 256 bytes"),
}


def bomb(top: Path, *, consolidated: bool = True, **changes: Any) -> Path:
    """A store of version 2 with a coordinate `x` that becomes a megabyte, and a field `u` on it."""
    plain = {"zarr_format": 2, "dtype": "<i4", "compressor": {"id": "bz2", "level": 9}, "fill_value": 0, "order": "C"}
    x = plain | {"shape": [16], "chunks": [16], "filters": None} | changes
    u = plain | {"shape": [16, 16], "chunks": [16, 16], "filters": None}
    told = {
        ".zgroup": {"zarr_format": 2},
        "x/.zarray": x,
        "x/.zattrs": {"_ARRAY_DIMENSIONS": ["x"]},
        "u/.zarray": u,
        "u/.zattrs": {"_ARRAY_DIMENSIONS": ["y", "x"]},
    }
    for name, facts in told.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(json.dumps(facts))
    if consolidated:
        (top / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": told}))
    (top / "x" / "0").write_bytes(BOMB)
    (top / "u" / "0.0").write_bytes(bz2.compress(np.arange(256, dtype="<i4").tobytes()))
    return top


@pytest.mark.parametrize("case", CASES)
def test_coordinates_become_no_more_than_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    changes, words = CASES[case]
    monkeypatch.setattr(xarray_stores, "MOST_WORDS", 1000)
    top = bomb(tmp_path / "a.zarr", **changes)
    monkeypatch.setattr(xarray, "open_zarr", lambda *_, **__: pytest.fail("the library was asked"))
    system = fsspec.filesystem("memory")
    system.put(str(top), "/bomb.zarr", recursive=True)
    try:
        for path in (str(top), "memory://bomb.zarr"):
            with pytest.raises(BadData, match=words):
                NetcdfConfig(path=path).open()
    finally:
        system.rm("/bomb.zarr", recursive=True)
        read_remote.cache_clear()


def test_words_that_say_they_are_more_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = store(tmp_path / "a.zarr", 2)
    content = (top / "s" / "0").read_bytes()
    (top / "s" / "0").write_bytes((2**32 - 1).to_bytes(4, "little") + content[4:])
    with pytest.raises(BadData, match="says that it holds 4,294,967,295 words, and ends before"):
        check_store(str(top))
    (top / "s" / "0").write_bytes(content)
    monkeypatch.setattr(foreign, "room", lambda: 4 * len(WORDS[0]) * len(WORDS) - 1)  # of words as long as the longest
    with pytest.raises(BadData, match=r"a\.zarr::s says that it takes"):
        check_store(str(top))


def test_coordinates_by_http_become_no_more_than_they_say(tmp_path: Path) -> None:
    bomb(tmp_path / "a.zarr")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(BadData, match="holds more than 64 bytes"):
            check_store(f"http://127.0.0.1:{server.server_port}/a.zarr")
    finally:
        server.shutdown()
        server.server_close()


def test_metadata_beside_a_coordinate_do_not_stand_in_for_those_that_count(tmp_path: Path) -> None:
    top = bomb(tmp_path / "a.zarr", shape=[len(BOMB)], chunks=[len(BOMB)], dtype="|u1")
    beside = json.loads((top / "x" / ".zarray").read_text())
    (top / "x" / ".zarray").write_text(json.dumps(beside | {"compressor": None}))  # as if it were its bytes
    with pytest.raises(BadData, match=f"holds more than {len(BOMB)} bytes"):
        check_store(str(top))


def test_fields_that_the_library_decodes_become_no_more_than_they_say(tmp_path: Path) -> None:
    top = bomb(tmp_path / "a.zarr", consolidated=False)
    values = np.arange(1, 257, dtype="<i4").reshape(16, 16)
    (top / "x" / "0").write_bytes(bz2.compress(np.arange(16, dtype="<i4").tobytes()))
    field = json.loads((top / "u" / ".zarray").read_text())
    (top / "u" / ".zarray").write_text(json.dumps(field | {"filters": [DELTA]}))
    (top / "u" / "0.0").write_bytes(bz2.compress(np.diff(values.ravel(), prepend=0).astype("<i4").tobytes()))
    source = NetcdfConfig(path=str(top)).open()
    assert np.array_equal(source.read(0, (slice(0, 16),) * 2)[0], values)  # one filter is ordinary
    (top / "u" / "0.0").write_bytes(BOMB)
    with pytest.raises(BadData, match="holds more than 1024 bytes"):
        source.read(0, (slice(0, 16),) * 2)
    (top / "u" / ".zarray").write_text(json.dumps(field | {"compressor": {"id": "lzma"}}))
    with pytest.raises(
        BadData, match=r"a\.zarr::u has codecs of which any number of bytes may come.*\(lzma\).*--trust"
    ):
        NetcdfConfig(path=str(top)).open()
    (top / "u" / "0.0").write_bytes(lzma.compress(values.tobytes()))
    with foreign.trusted():
        assert np.array_equal(NetcdfConfig(path=str(top)).open().read(0, (slice(0, 16),) * 2)[0], values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
def test_ordinary_coordinates_of_any_type_are_read(tmp_path: Path, version: int) -> None:
    names = np.array(["first", "second ü"])
    for number, (words, encoding) in enumerate(
        (
            (names, {}),
            (names.astype(object), {}),
            (np.array([b"first", b"second"]), {}),
            (np.array(["2020-01-01", "2021-01-01"], "M8[ns]"), {}),
            (np.array([1, 2]), {"filters": [numcodecs.Delta("<i8")]} if version == 2 else {}),
            (np.array([0.5, 1.5]), {"compressors": None}),
        )
    ):
        data = xarray.Dataset({"u": (("t", "y", "x"), np.ones((2, 4, 4), np.float32))}, {"t": words})
        data.to_zarr(tmp_path / f"{number}.zarr", zarr_format=version, encoding={"t": encoding})
        system = fsspec.filesystem("memory")
        system.put(f"{tmp_path}/{number}.zarr", f"/any{version}{number}.zarr", recursive=True)
        try:
            for path in (f"{tmp_path}/{number}.zarr", f"memory://any{version}{number}.zarr"):
                source = NetcdfConfig(path=path).open()
                assert len(source.entries) == 2
                assert source.read(1, (slice(0, 4),) * 2).all()
        finally:
            system.rm(f"/any{version}{number}.zarr", recursive=True)
