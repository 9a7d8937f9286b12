"""Zarr stores of xarray: ordinary coordinates of words pass, and what libraries would choke on is refused."""

import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray

from vitrail import foreign
from vitrail.data.places import Remote, find_place
from vitrail.data.xarray_stores import _arrays, check_store
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
