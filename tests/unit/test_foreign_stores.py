"""Hierarchies, tables and archives that others made: names without an end, bombs, and what libraries would run."""

import io
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray
from numcodecs import Zlib
from PIL import Image
from xarray.backends.locks import HDF5_LOCK

from vitrail import foreign
from vitrail.data.chunks.decoded import open_chunks
from vitrail.data.chunks.nodes import list_arrays
from vitrail.data.files.paths import natural_key, read_bytes
from vitrail.data.files.places import Remote, read_remote
from vitrail.data.formats import hdf5 as hdf5_links
from vitrail.data.formats import hdf5 as hdf5_words
from vitrail.data.formats.hdf5 import check_whole, walk
from vitrail.data.formats.ngff import find_images
from vitrail.data.sources import netcdf, shards
from vitrail.data.sources.shards import Samples, WebdatasetConfig, expand
from vitrail.errors import BadData, UserError
from vitrail.foreign import METADATA, trusted
from vitrail.recipe import kinds


def opened(kind: str, path: object, **keys: Any) -> Any:
    return kinds.find("source", kind)(path=str(path), **keys).open()


# ---------------------------------------------------------------- names without an end


def test_groups_that_hold_each_other_twice_are_walked_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        below = file
        for _ in range(50):  # 2^50 names
            one = below.create_group("a")
            below["b"] = one
            below = one
        below["raw"] = np.zeros((4, 4), np.uint8)
        file["ring"] = file["/"]
    with h5py.File(tmp_path / "a.h5") as file:
        assert len(list(walk(file))) == 102
    assert opened("hdf5", tmp_path / "a.h5").entries[0].images[0].shape == (4, 4)


def test_groups_too_deep_to_be_walked_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        deep = file.create_group("/".join(["g"] * 70))
        deep["out"] = h5py.ExternalLink("/elsewhere/secret.h5", "/raw")
    with h5py.File(tmp_path / "a.h5") as file, pytest.raises(BadData, match="more than 64 deep"):
        check_whole(file, tmp_path / "a.h5")


def test_folders_with_links_to_themselves_are_looked_at_once(tmp_path: Path) -> None:
    top = tmp_path / "a.zarr"
    (top / "one").mkdir(parents=True)
    (top / ".zgroup").write_text('{"zarr_format": 2}')
    for number in range(12):  # 12^6 names
        (top / f"l{number}").symlink_to(".")
    (top / "loop").symlink_to("loop")
    (top / "one" / ".zarray").write_text("{}")
    assert list_arrays(top) == [top / "one"]
    assert find_images(top) == []


# ---------------------------------------------------------------- many suffixes, long numbers


def test_suffixes_that_few_samples_have_take_no_memory() -> None:
    alike = [[f"k{n}", {f"{frame}.jpg": [n, 1] for frame in range(100)}, None] for n in range(20_000)]
    assert Samples([("a.tar", alike)]).has(19_999, "99.jpg")
    unlike = [[f"k{n}", {f"{n}.jpg": [n, 1]}, None] for n in range(2000)]
    with pytest.raises(BadData, match=r"a\.tar: the 2,000 samples have members with 2,000 suffixes \(0\.jpg, 1\.jpg"):
        Samples([("a.tar", unlike)])


def test_numbers_of_many_digits_are_compared_and_refused() -> None:
    names = [f"image{number}" for number in ("9" * 5000, "1" + "0" * 5000, "007", "7", "10", "0", "")]
    assert sorted(names, key=natural_key) == [names[i] for i in (6, 5, 2, 3, 4, 0, 1)]

    def classes(*texts: str) -> Any:
        rows = [[f"k{number}", {"jpg": [0, 1], "cls": [0, 1]}, text] for number, text in enumerate(texts)]
        return WebdatasetConfig(path="a.tar")._read_classes(Samples([("a.tar", rows)]))

    assert classes("0" * 5000 + "2", "0")[0] == [2, 0]
    with pytest.raises(UserError, match="sample k1 has the class 9"):
        classes("0", "9" * 5000)
    with pytest.raises(UserError, match="more than 100,000 shards"):
        expand("{0.." + "9" * 5000 + "}.tar")


# ---------------------------------------------------------------- files at URLs


def test_metadata_and_chunks_at_urls_are_read_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    system, asked = fsspec.filesystem("memory"), []
    system.pipe_file("/stores/large/zarr.json", bytes(METADATA + 1))
    system.pipe_file("/stores/small/zarr.json", b"{}")
    plain = type(system).cat_file
    monkeypatch.setattr(
        type(system), "cat_file", lambda self, p, start=None, end=None: asked.append(end) or plain(self, p, start, end)
    )
    try:
        with pytest.raises(BadData, match="too many for a list of facts"):
            read_bytes("memory://stores/large/zarr.json")
        with pytest.raises(BadData, match="too many for a list of facts"):
            read_remote(Remote("memory://stores/large/zarr.json"))
        assert read_remote(Remote("memory://stores/small/zarr.json")) == b"{}"
        assert read_remote(Remote("memory://stores/small")) is None
        assert read_remote(Remote("memory://stores/none/zarr.json")) is None
        assert asked == [METADATA + 1] * 3

        array = {"zarr_format": 2, "shape": [8], "chunks": [8], "dtype": "|u1", "compressor": None, "filters": None}
        system.pipe_file("/stores/array/.zarray", json.dumps(array | {"fill_value": 0, "order": "C"}).encode())
        system.pipe_file("/stores/array/0", bytes(2 * METADATA))
        reader = open_chunks(Remote("memory://stores/array"))
        assert reader is not None
        with pytest.raises(BadData, match="more than a chunk can need"):
            reader.decode((0,))
        assert asked[-1] == 2 * 8 + 2**20 + 1
    finally:
        system.rm("/stores", recursive=True)


# ---------------------------------------------------------------- stores of xarray


def store(folder: Path, *, consolidated: bool = True) -> Path:
    data = xarray.Dataset(
        {"u": (("t", "y", "x"), np.ones((2, 8, 8), np.float32))}, {"y": np.arange(8.0), "t": ["first", "second"]}
    )
    data.to_zarr(folder / "a.zarr", zarr_format=2, consolidated=consolidated, encoding={"y": {"compressors": [Zlib()]}})
    return folder / "a.zarr"


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


PICKLED = {"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "compressor": {"id": "pickle", "protocol": 5}}


def test_stores_of_xarray_name_codecs_that_unpack_alone(tmp_path: Path) -> None:
    for number, consolidated in enumerate((True, False)):
        (tmp_path / str(number)).mkdir()
        top = store(tmp_path / str(number), consolidated=consolidated)
        source = opened("netcdf", top)
        assert source.read(1, (slice(0, 8),) * 2).all()
        assert [entry.name for entry in source.entries] == ["t=first", "t=second"]
        change(top / "y" / ".zarray", **PICKLED)
        with pytest.raises(BadData, match=r"a\.zarr::y has the codec 'pickle', which may be any program"):
            opened("netcdf", top)
    top = store(tmp_path)
    metadata = json.loads((top / ".zmetadata").read_text())
    metadata["metadata"]["y/.zarray"] |= PICKLED
    (top / ".zmetadata").write_text(json.dumps(metadata))
    with pytest.raises(BadData, match="has the codec 'pickle'"):
        opened("netcdf", top)


def test_coordinates_of_xarray_are_read_within_bounds(tmp_path: Path) -> None:
    top = store(tmp_path, consolidated=False)
    whole = (top / "y" / "0").read_bytes()
    (top / "y" / "0").write_bytes(zlib.compress(bytes(1 << 20)))
    with pytest.raises(BadData, match="holds more than 64 bytes"):
        opened("netcdf", top)
    (top / "y" / "0").unlink()
    os.mkfifo(top / "y" / "0")
    with pytest.raises(BadData, match="is a FIFO"):
        opened("netcdf", top)
    (top / "y" / "0").unlink()
    (top / "y" / "0").write_bytes(whole)
    os.rename(top / "t" / "0", tmp_path / "words")
    os.mkfifo(top / "t" / "0")  # of words, which vitrail's own decoders do not read
    with pytest.raises(BadData, match="is a FIFO"):
        opened("netcdf", top)
    os.replace(tmp_path / "words", top / "t" / "0")
    opened("netcdf", top)
    for changes, words in (
        ({"shape": [2**50], "chunks": [2**50]}, "GiB at once"),
        ({"shape": [2**50]}, "GiB at once"),
        ({"shape": [2**22], "chunks": [1]}, "has 4,194,304 chunks"),
        ({"shape": -1}, "no sizes"),
    ):
        content = (top / "y" / ".zarray").read_text()
        change(top / "y" / ".zarray", **changes)
        with pytest.raises(BadData, match=words):
            opened("netcdf", top)
        (top / "y" / ".zarray").write_text(content)


def test_a_store_at_a_url_is_opened_with_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netcdf, "reveal", lambda url: url.replace("://", "://user:secret@"))
    asked: list[str] = []
    monkeypatch.setattr(xarray, "open_zarr", lambda path, **_: asked.append(path))
    netcdf._open("memory://nowhere/a.zarr")
    assert asked == ["memory://user:secret@nowhere/a.zarr"]


# ---------------------------------------------------------------- words of parquet, filters of HDF5


def test_classes_of_parquet_are_numbers_of_sorted_words(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(image, "PNG")
    words = ["dog", None, "cat", "dog", "ant", "cat"]
    for name, column in {
        "plain": pa.array(words),
        "large": pa.array(words, pa.large_string()),
        "categories": pa.array(words).dictionary_encode(),
        "unused": pa.DictionaryArray.from_arrays(
            pa.array([3, None, 1, 3, 0, 1], pa.uint8()), ["ant", "cat", "x", "dog"]
        ),
    }.items():
        table = pa.table({"image": [image.getvalue()] * 6, "label": column})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
        source = opened("parquet", tmp_path / f"{name}.parquet")
        assert [source.label(item) for item in range(6)] == [2, None, 1, 2, 0, 1], name
        assert list(source.class_names) == ["ant", "cat", "dog"]
    for kind in (pa.uint8(), pa.int64()):
        table = pa.table({"image": [image.getvalue()] * 3, "label": pa.array([2, None, 0], kind)})
        pq.write_table(table, tmp_path / "numbers.parquet")
        source = opened("parquet", tmp_path / "numbers.parquet")
        assert [source.label(item) for item in range(3)] == [2, None, 0]


def test_odd_names_of_classes_in_parquet_are_none(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(image, "PNG")
    table = pa.table({"image": [image.getvalue()] * 2, "label": [0, 1]})
    for names, classes in (
        (["cat", "dog"], ["cat", "dog"]),
        *((odd, ["0", "1"]) for odd in (5, None, "abc", {"a": 1, "b": 2}, [1, 2], [["a"], "b"], [])),
    ):
        told = json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
        pq.write_table(table.replace_schema_metadata({b"huggingface": told}), tmp_path / "a.parquet")
        assert list(opened("parquet", tmp_path / "a.parquet").class_names) == classes, names


def test_images_of_parquet_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    for values in ([5, 6], ["5", "6"], [[5], [6]], [[b"5"], [b"6"]]):
        column = pa.StructArray.from_arrays([pa.array(values), pa.array(["a", "b"])], ["bytes", "path"])
        pq.write_table(pa.table({"image": column}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"a\.parquet has no column of encoded images; name one with `image`"):
            opened("parquet", tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"image = 'image' of .*a\.parquet holds struct<.*not the bytes of images"):
            opened("parquet", tmp_path / "a.parquet", image="image")


def test_row_groups_without_rows_are_left_out(tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(image, "PNG")
    for column, classes in ((["dog", "cat"], [1, 0]), ([2, 1], [2, 1])):
        table = pa.table({"image": [image.getvalue()] * 2, "label": column})
        with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
            for start, length in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
                writer.write_table(table.slice(start, length))
        assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups > 2
        source = opened("parquet", tmp_path / "a.parquet")
        assert [source.label(item) for item in range(2)] == classes
        assert source.read(1, (slice(0, 4),) * 2).shape[-2:] == (4, 4)


def test_rows_of_one_large_value_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(image, "PNG")
    large = image.getvalue() + bytes(1 << 20)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([large], pa.binary()))
    table = pa.table({"image": column})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False, dictionary_pagesize_limit=1 << 30)
    monkeypatch.setattr(shards, "AT_ONCE_BYTES", 3 << 20)
    monkeypatch.setattr(shards, "FEW_BYTES", 0)
    sizes: list[int] = []
    batches = shards._Shard.batches

    def spy(*words: Any, **more: Any) -> Any:
        for piece in batches(*words, **more):
            sizes.append(piece.nbytes)
            yield piece

    monkeypatch.setattr(shards._Shard, "batches", spy)
    with pytest.raises(BadData, match=r"row group 0 says that it has 1,.* bytes, but becomes more than 8,"):
        opened("parquet", tmp_path / "a.parquet")
    assert max(sizes) < 3 << 20


def test_hdf5_filters_of_which_anything_may_come_need_trust(tmp_path: Path) -> None:
    values = np.arange(512, dtype=np.int32).reshape(8, 8, 8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("gzip", data=values, chunks=(4, 8, 8), compression="gzip", shuffle=True, fletcher32=True)
        file.create_dataset("lzf", data=values, chunks=(4, 8, 8), compression="lzf", shuffle=True)
        file.create_dataset("sum", data=values, chunks=(4, 8, 8), fletcher32=True)
        file.create_dataset("offset", data=values, chunks=(4, 8, 8), scaleoffset=0)
    for key in ("gzip", "lzf", "sum"):
        assert (opened("hdf5", tmp_path / "a.h5", key=key).read(0, (slice(0, 8),) * 3) == values).all()
    with pytest.raises(BadData, match=r"a\.h5::offset is packed by the HDF5 filters 'scaleoffset' \(6\), .*--trust"):
        opened("hdf5", tmp_path / "a.h5", key="offset")
    with trusted():
        source = opened("hdf5", tmp_path / "a.h5", key="offset")
    assert (source.read(0, (slice(0, 8),) * 3) == values).all()


def count_calls(monkeypatch: pytest.MonkeyPatch, place: Any, *names: str) -> list[str]:
    """Names of the functions of a module, each time that they are called."""
    calls: list[str] = []
    for name in names:
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *w, n=name, f=plain, **k: (calls.append(n), f(*w, **k))[1])
    return calls


def test_chunks_that_fit_in_memory_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 finds one chunk's size by a search of all of them: of many chunks that takes longer than reading them."""
    values = np.random.default_rng(0).integers(0, 255, (64, 8), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=(1, 8), compression="gzip")
    data = xarray.Dataset({"u": (("t", "y", "x"), values.reshape(64, 2, 4))}, {"t": np.arange(64.0)})
    packed = {"zlib": True, "chunksizes": (1,)}
    data.to_netcdf(tmp_path / "a.nc", encoding={"t": packed, "u": packed | {"chunksizes": (1, 2, 4)}})
    asked = count_calls(monkeypatch, hdf5_links, "_inflate", "_filters")

    def read() -> None:
        image = opened("hdf5", tmp_path / "a.h5")
        fields = opened("netcdf", tmp_path / "a.nc")
        asked.append("opened")
        for row in range(0, 64, 8):
            assert (image.read(0, (slice(row, row + 8), slice(0, 8))) == values[row : row + 8]).all()
            assert (fields.read(row, (slice(0, 2), slice(0, 4))).ravel() == values[row]).all()

    read()
    assert asked.index("opened") == len(asked) - 1 < 12
    monkeypatch.setattr(hdf5_links, "room", lambda: 8000)  # of 8 values, packed, more may come; of a few of them not
    asked.clear()
    read()
    assert asked[: asked.index("opened")].count("_inflate") == 64  # of the coordinate
    assert asked[asked.index("opened") :].count("_inflate") == 64 + 8  # of the images and the fields, each once


def test_fields_of_netcdf_are_looked_into_by_one_handle_under_one_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 255, (16, 4, 4), np.uint8)
    packed = {"zlib": True, "chunksizes": (1, 4, 4)}
    data = xarray.Dataset({"u": (("t", "y", "x"), values)})
    data.to_netcdf(tmp_path / "a.nc", encoding={"u": packed})
    monkeypatch.setattr(hdf5_links, "room", lambda: 8000)
    source = opened("netcdf", tmp_path / "a.nc")
    opens = count_calls(monkeypatch, h5py, "File")
    held: list[bool] = []
    plain = hdf5_links._inflate
    monkeypatch.setattr(hdf5_links, "_inflate", lambda *w: (held.append(HDF5_LOCK.locked()), plain(*w))[1])
    for item in range(16):
        assert (source.read(item, (slice(0, 4),) * 2) == values[item]).all()
    assert opens == ["File"]
    assert held == [True] * 16


def test_ordinary_words_and_lists_of_netcdf_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import netCDF4

    names = [f"station {number} ü" for number in range(9)]
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("s", 9)
        file.createDimension("y", 4)
        file.createVariable("s", str, ("s",))[:] = np.array(names, object)
        lists = file.createVariable("lists", file.createVLType(np.int32, "list"), ("s",))
        lists[:] = np.array([np.arange(n, dtype=np.int32) for n in range(9)], object)
        field = file.createVariable("u", "f4", ("s", "y", "y"))
        field[:] = 1
        field.told = [f"ü {number}" for number in range(500)]
    for words in (hdf5_words.AT_ONCE, 2):
        monkeypatch.setattr(hdf5_words, "AT_ONCE", words)
        source = opened("netcdf", tmp_path / "a.nc")
        assert [entry.name for entry in source.entries] == [f"s={name}" for name in names]
        assert source.read(8, (slice(0, 4),) * 2).all()
    monkeypatch.setattr(hdf5_words, "MOST_READS", 4)
    with pytest.raises(BadData, match=r"a\.nc::lists has 9 words, too many to be looked at; .*--trust"):
        opened("netcdf", tmp_path / "a.nc")
    with trusted():
        opened("netcdf", tmp_path / "a.nc")


def test_names_of_items_are_counted_by_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = xarray.Dataset(
        {"u": (("t", "m", "y", "x"), np.ones((2, 100, 4, 4), np.float32))}, {"t": ["a", "b" * 5000], "m": range(100)}
    )
    data.to_netcdf(tmp_path / "a.nc")
    assert len(opened("netcdf", tmp_path / "a.nc").entries) == 200
    monkeypatch.setattr(foreign, "room", lambda: 200 * 5000)
    with pytest.raises(BadData, match=r"a\.nc: the list of its 200 items says that it takes"):
        opened("netcdf", tmp_path / "a.nc")


def test_hdf5_filters_matter_where_netcdf_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["u"] = np.ones((4, 4), np.int32)
        file.create_dataset("v", data=np.ones((4, 4), np.int32), chunks=(4, 4), scaleoffset=0)
        file.create_dataset("below/w", data=np.ones(4, np.int32), chunks=(4,), scaleoffset=0)
    assert opened("netcdf", tmp_path / "a.nc", variables=["u"]).read(0, (slice(0, 4),) * 2).all()
    with pytest.raises(BadData, match=r"a\.nc::v is packed by the HDF5 filters 'scaleoffset' \(6\).*hdf5plugin"):
        opened("netcdf", tmp_path / "a.nc", variables=["v"])
    with h5py.File(tmp_path / "a.nc", "a") as file:
        file.create_dataset("x", data=np.ones(4, np.int32), chunks=(4,), scaleoffset=0)
    with pytest.raises(BadData, match=r"a\.nc::x is packed by"):
        opened("netcdf", tmp_path / "a.nc", variables=["u"])


def test_hdf5_filters_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("raw", data=np.ones((4, 4), np.int32), chunks=(4, 4), scaleoffset=0)
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: sys.modules.get("hdf5plugin") is not None)
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)  # as if it were not installed
    with trusted(), pytest.raises(UserError, match=r"'scaleoffset' \(6\), which h5py does not have; install hdf5plug"):
        opened("hdf5", tmp_path / "a.h5")
    monkeypatch.delitem(sys.modules, "hdf5plugin")
    (tmp_path / "hdf5plugin.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with trusted():
        assert opened("hdf5", tmp_path / "a.h5").read(0, (slice(0, 4),) * 2).all()


def virtual(file: h5py.File, name: str, parts: list[str]) -> None:
    layout = h5py.VirtualLayout((len(parts), 64), "u1")
    for row, part in enumerate(parts):
        layout[row] = h5py.VirtualSource(".", part, (len(parts), 64) if part != "raw" else (4, 64))[row % 4]
    file.create_virtual_dataset(name, layout)


def test_parts_of_virtual_datasets_are_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 255, (4, 64), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=(1, 64), compression="gzip")
        virtual(file, "all", ["raw"] * 20)
    monkeypatch.setattr(hdf5_links, "room", lambda: 8000)
    looks = count_calls(monkeypatch, hdf5_links, "_inflate", "large_chunks")
    source = opened("hdf5", tmp_path / "a.h5", key="all")
    assert looks.count("large_chunks") == 1
    assert looks.count("_inflate") == 4  # large, but as large as they say
    assert (source.read(0, (slice(0, 4), slice(0, 64))) == values).all()
    with h5py.File(tmp_path / "b.h5", "w") as file:
        raw = file.create_dataset("raw", (4, 64), "u1", chunks=(1, 64), compression="gzip")
        raw.id.write_direct_chunk((0, 0), zlib.compress(values.tobytes()))
        virtual(file, "all", ["raw"] * 4)
    with pytest.raises(BadData, match=r"b\.h5::/raw: the chunk at voxel \[0, 0\] holds more than 64 bytes"):
        opened("hdf5", tmp_path / "b.h5", key="all")


def test_virtual_datasets_of_each_other_are_counted_by_the_longest_way(tmp_path: Path) -> None:
    for number, length in enumerate((15, 16)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["raw"] = np.ones((4, 64), np.uint8)
            names = [f"v{n}" for n in range(length)]
            for name, part in zip(names, ["raw", *names], strict=False):
                virtual(file, name, [part] * 4)
            virtual(file, "all", ["raw", *names])  # the short ways first
        if number == 0:
            opened("hdf5", tmp_path / "0.h5", key="all")
            continue
        with pytest.raises(BadData, match="virtual datasets in a ring, or too many"):
            opened("hdf5", tmp_path / "1.h5", key="all")
