"""Staging: the needed files are copied once a node, whole or not at all, within a limit, and opened instead."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import zarr
from PIL import Image
from support import LONG, environment

from vitrail.data.files import stage as staging
from vitrail.data.files.cache import keep
from vitrail.data.files.fingerprint import data_state
from vitrail.data.files.paths import local_copy
from vitrail.data.files.stage import LOCK, configs_to_open, stage
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.reading import pool
from vitrail.data.source import ReadArray, Reads
from vitrail.data.sources.arrays import NumpyConfig
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.data.sources.items import DummyConfig
from vitrail.data.sources.zarr import OmeZarrConfig, ZarrConfig
from vitrail.disk import is_draft
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.recipe import config
from vitrail.recipe.sections import Stage

MIB = 2**20
WHOLE = (slice(None),) * 3


@config
class FileConfig:
    """A file, or a folder of files."""

    path: str
    labels: str | None = None
    stage: bool = True
    missing: str = "error"

    def open(self) -> Any:
        return SimpleNamespace()


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != LOCK}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    for number in range(20):
        (folder / ("deep" if number % 2 else ".") / f"f{number}.bin").write_bytes(bytes([number]) * 1000)
    return folder


# ---------------------------------------------------------------- what is copied, and where


def test_a_folder_is_copied_and_opened_instead(data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (staged,) = stage([FileConfig(path=str(data))], tmp_path / "fast", MIB, tell=lines.append)
    copy = Path(staged.path)
    assert copy == (tmp_path / "fast").joinpath(*data.parts[1:])
    assert files_below(copy) == files_below(data)
    for name in files_below(data):
        assert (copy / name).read_bytes() == (data / name).read_bytes()
        assert (copy / name).stat().st_mtime_ns == (data / name).stat().st_mtime_ns
    assert lines[0] == f"staging: copying 0.02 MiB in 20 files to {tmp_path / 'fast'}"


def test_a_file_with_a_key_and_labels_beside_it(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FileConfig(path=f"{data}/f0.bin::raw/em", labels=str(data / "f2.bin"))
    more = {"f0.bin": (f"{data}/f4.bin",), "f2.bin": ()}  # an array may be read from several files
    arrays = [SimpleNamespace(name=f"{data}/{name}::key", files=f, chunk_reader=None) for name, f in more.items()]
    read = Reads(arrays=[ReadArray(array, array is arrays[1], lambda: None) for array in arrays])
    monkeypatch.setattr(FileConfig, "open", lambda self: SimpleNamespace(reads=lambda: read))
    (data / "f0.json").write_text("{}")
    (staged,) = stage([given], tmp_path / "fast", MIB)
    below = (tmp_path / "fast").joinpath(*data.parts[1:])
    assert staged.path == f"{below}/f0.bin::raw/em"
    assert staged.labels == f"{below}/f2.bin"
    assert files_below(below) == {"f0.bin", "f0.json", "f2.bin", "f4.bin"}


def test_what_is_not_copied(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [
        FileConfig(path=str(data), stage=False),
        FileConfig(path="https://example.org/v.zarr"),
        FileConfig(path="memory://v.zarr"),
        FileConfig(path=str(data / "not there")),  # opening it tells what is wrong
        SimpleNamespace(path=str(data)),
        SimpleNamespace(size=3),
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dummy").mkdir()
    (tmp_path / "dummy" / "a.bin").write_bytes(b"not read")
    kept.append(DummyConfig())
    assert stage(kept, tmp_path / "fast", MIB) == kept
    assert not (tmp_path / "fast").exists()


def test_of_an_array_the_region_and_the_level_are_copied(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (32, 32, 32), dtype=np.uint8)
    write_ome_zarr(tmp_path / "v.zarr", Volume(values, values), levels=2, chunk=8)
    given = OmeZarrConfig(path=str(tmp_path / "v.zarr"), region={"x": [5, 14], "y": [0.5, 1.0]})
    (staged,) = stage([given], tmp_path / "fast", MIB)
    one, two = given.open(), staged.open()
    assert [i.shape for i in one.items] == [i.shape for i in two.items]
    window = tuple(slice(0, s) for s in one.items[0].shape)
    np.testing.assert_array_equal(one.read(0, window), two.read(0, window))
    copied, there = files_below(Path(staged.path)), files_below(tmp_path / "v.zarr")
    assert copied < there
    chunks = {name for name in copied if not name.endswith(".json")}
    assert len(chunks) == 4 * 2 * 2  # of the finest level alone, along z, y and x
    assert {name for name in there if name.endswith(".json")} <= copied


def test_what_stars_stand_for_is_copied(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (16, 16, 16), dtype=np.uint8)
    data = tmp_path / "data"
    for folder in ("x", "y", "v"):
        (data / folder).mkdir(parents=True)
    for number in range(3):
        write_ome_zarr(data / "v" / f"{number}.zarr", Volume(values + number, values), levels=1, chunk=8)
        np.save(data / "x" / f"x{number}.npy", values + number)
        np.save(data / "y" / f"{number}y.npy", values - number)
    given: list[Any] = [
        OmeZarrConfig(path=f"{data}/v/*.zarr", region={"x": [0, 8]}, end=0.7),
        OmeZarrConfig(path=f"{data}/v", region={"x": [8, 16]}),
        NumpyConfig(path=f"{data}/x/x*.npy", labels=f"{data}/y/*y.npy"),
    ]
    expected = [[source.read(n, WHOLE) for n in range(len(source.items))] for source in (c.open() for c in given)]
    marks = [data_state(c, c.open()) for c in given]
    staged = stage(given, tmp_path / "fast", MIB)
    data.rename(tmp_path / "gone")
    for c, values_of in zip(staged, expected, strict=True):
        source = c.open()
        np.testing.assert_array_equal([source.read(n, WHOLE) for n in range(len(source.items))], values_of)
    assert staged[2].open().read_labels(2, WHOLE).tolist() == (values - 2).tolist()
    assert None not in marks
    assert marks[0]["files"] == marks[1]["files"] > 3  # type: ignore[index]


@pytest.mark.parametrize("kind", ["zarr2", "shards", "n5"])
def test_of_other_hierarchies_too(kind: str, tmp_path: Path) -> None:
    import tensorstore
    import zarr

    from vitrail.data.sources.zarr import N5Config, ZarrConfig

    values = np.random.default_rng(0).integers(0, 255, (32, 32, 32), dtype=np.uint8)
    path = tmp_path / ("v.n5" if kind == "n5" else "v.zarr") / "deep" / "em"
    if kind == "n5":
        metadata = {"dataType": "uint8", "dimensions": [32, 32, 32], "blockSize": [8, 8, 8], "axes": ["z", "y", "x"]}
        spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(path)}, "create": True}
        spec["metadata"] = {k: v for k, v in metadata.items() if k != "axes"} | {"compression": {"type": "gzip"}}
        tensorstore.open(spec).result().write(values).result()
        given: Any = N5Config(path=str(path), region={"x": [0, 8]})
    else:
        zarr.open_group(tmp_path / "v.zarr", mode="w", zarr_format=2 if kind == "zarr2" else 3)
        extra = {"shards": (16, 16, 16)} if kind == "shards" else {}
        version = 2 if kind == "zarr2" else 3
        group = zarr.open_group(tmp_path / "v.zarr", mode="a").require_group("deep")
        array = group.create_array("em", shape=(32, 32, 32), chunks=(8, 8, 8), dtype="uint8", **extra)
        assert array.metadata.zarr_format == version
        array[...] = values
        given = ZarrConfig(path=str(path), region={"x": [0, 8]})
    (staged,) = stage([given], tmp_path / "fast", MIB)
    one, two = given.open(), staged.open()
    window = tuple(slice(0, size) for size in one.items[0].shape)
    np.testing.assert_array_equal(one.read(0, window), two.read(0, window))
    chunks = {name for name in files_below(Path(staged.path)) if not name.endswith(("json", ".zarray", ".zattrs"))}
    assert len(chunks) == (4 if kind == "shards" else 16)


def test_of_channels_moments_and_labels_what_is_read_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zarr

    from vitrail.data.sources.zarr import ZarrConfig

    rng = np.random.default_rng(0)
    group = zarr.open_group(tmp_path / "v.zarr", mode="w", zarr_format=2)
    em = group.create_array("em", shape=(3, 2, 16, 16), chunks=(1, 1, 8, 8), dtype="uint8")
    em[...] = rng.integers(1, 255, em.shape, dtype=np.uint8)
    truth = group.require_group("truth").create_array("cells", shape=(16, 16), chunks=(8, 8), dtype="uint8")
    truth[...] = rng.integers(1, 5, truth.shape, dtype=np.uint8)
    other = zarr.open_group(tmp_path / "other.zarr", mode="w", zarr_format=2)
    other.create_array("cells", shape=(16, 16), chunks=(8, 8), dtype="uint8")[...] = truth[...]
    monkeypatch.chdir(tmp_path)  # a path may be relative
    options: dict[str, Any] = {"axes": "tcyx", "time": 2, "variables": ["channel1"], "region": {"x": [0, 8]}}
    for labels in ("truth/cells", "other.zarr/cells", str(tmp_path / "other.zarr" / "cells")):
        given = ZarrConfig(path="v.zarr/em", labels=labels, **options)
        fast = tmp_path / f"fast{len(labels)}"
        (staged,) = stage([given], fast, MIB)
        one, two = given.open(), staged.open()
        window = tuple(slice(0, size) for size in one.items[0].shape)
        np.testing.assert_array_equal(one.read(0, window), two.read(0, window))
        np.testing.assert_array_equal(one.read(0, window), em[2, 1:2, :, :8])
        np.testing.assert_array_equal(one.read_labels(0, window), two.read_labels(0, window))
        assert str(two.entries[0].labels.name).startswith(str(fast))
        chunks = {name for name in files_below(fast) if not Path(name).name.startswith(".z")}
        assert {Path(name).name for name in chunks} == {"2.1.0.0", "2.1.1.0", "0.0", "1.0"}
        assert len(chunks) == 4


def write_companions(root: Path) -> dict[str, tuple[str, dict[str, Any], set[str]]]:
    """Data that are read from more than the file at their path: (path, keys, names of the other files)."""
    h5py, nibabel, rasterio, tifffile, xarray = map(
        pytest.importorskip, ("h5py", "nibabel", "rasterio", "tifffile", "xarray")
    )
    rng = np.random.default_rng(0)
    values = rng.integers(1, 255, (4, 8, 8), dtype=np.uint8)
    with h5py.File(root / "part.h5", "w") as file:
        file["raw"] = values
    with h5py.File(root / "virtual.h5", "w") as file:
        layout = h5py.VirtualLayout(values.shape, "uint8")
        layout[:] = h5py.VirtualSource("part.h5", "raw", values.shape)
        file.create_virtual_dataset("raw", layout)
    with h5py.File(root / "linked.h5", "w") as file:
        file["raw"] = h5py.ExternalLink("part.h5", "raw")
    shape = {"width": 8, "height": 8, "count": 4, "dtype": "uint8", "crs": "EPSG:32633"}
    shape["transform"] = rasterio.transform.from_origin(0, 0, 10, 10)
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False),
        rasterio.open(root / "masked.tif", "w", driver="GTiff", **shape) as raster,
    ):
        raster.write(values)
        raster.write_mask(values[0] > 99)
    with rasterio.open(root / "e.img", "w", driver="ENVI", **shape) as raster:
        raster.write(values)
    nibabel.save(nibabel.Nifti1Pair(values, np.eye(4)), root / "p.img")
    for folder in ("images", "labels"):
        (root / folder).mkdir()
        for number in range(2):
            np.save(root / folder / f"{number}.npy", values[number])
    fields = {name: (("time", "lat", "lon"), rng.normal(size=(4, 8, 8)).astype("f4")) for name in "uv"}
    xarray.Dataset(fields, {"time": range(4), "lat": range(8)}).to_zarr(root / "x.zarr", zarr_format=2)
    tifffile.imwrite(root / "scan.a_0000.tif", values)
    (root / "scan.a.json").write_text('{"spacing": [3, 2, 2]}')
    return {
        "tiff": ("scan.a_0000.tif", {"kind": "tiff"}, {"scan.a.json"}),
        "hdf5, virtual": ("virtual.h5", {"kind": "hdf5"}, {"part.h5"}),
        "hdf5, linked": ("linked.h5", {"kind": "hdf5", "key": "raw"}, {"part.h5"}),
        "geotiff": ("masked.tif", {"kind": "geotiff", "nodata": "fill"}, {"masked.tif.msk"}),
        "envi": ("e.img", {"kind": "geotiff"}, {"e.hdr"}),
        "nifti": ("p.hdr", {"kind": "nifti"}, {"p.img"}),
        "labels": ("images", {"kind": "numpy", "labels": str(root / "labels")}, {"labels/0.npy", "labels/1.npy"}),
        "xarray": ("x.zarr", {"kind": "netcdf", "variables": ["u"]}, {"x.zarr/u/0.0.0", "x.zarr/lat/0"}),
    }


def test_what_belongs_to_a_file_is_copied_with_it(tmp_path: Path) -> None:
    from vitrail.recipe import kinds

    for name, (path, keys, others) in write_companions(tmp_path).items():
        kind = keys.pop("kind")
        given = kinds.find("source", kind)(path=str(tmp_path / path), **keys)
        one, fast = given.open(), tmp_path / f"fast {name}"
        (staged,) = stage([given], fast, MIB)
        copied = files_below(fast.joinpath(*tmp_path.parts[1:]))
        assert others <= copied, name
        assert "x.zarr/v/0.0.0" not in copied  # which is not read
        two = staged.open()
        assert one.items[0].spacing == two.items[0].spacing
        for item in range(len(one.items)):
            window = tuple(slice(0, size) for size in one.items[item].shape)
            np.testing.assert_array_equal(one.read(item, window), two.read(item, window), name)
            if one.label_dtype is not None:
                np.testing.assert_array_equal(one.read_labels(item, window), two.read_labels(item, window))
                assert two.entries[item].labels.name.startswith(str(fast))


def test_patterns_of_shards_and_labels_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import tarfile

    from PIL import Image

    from vitrail.data.sources.shards import WebdatasetConfig

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    held = io.BytesIO()
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(held, "PNG")
    for number in range(3):
        with tarfile.open(tmp_path / f"s-{number}.tar", "w") as tar:
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(held.getvalue())
            tar.addfile(member, io.BytesIO(held.getvalue()))
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{number}.png").write_bytes(held.getvalue())
    shards = WebdatasetConfig(path=str(tmp_path / "s-{0..1}.tar"))
    images = ImageFolderConfig(path=str(tmp_path / "images"), labels=str(tmp_path / "masks"))
    lost = WebdatasetConfig(path=str(tmp_path / "lost-{0..1}.tar"))  # opening it tells what is wrong
    one, two, three = stage([shards, images, lost], tmp_path / "fast", MIB)
    below = (tmp_path / "fast").joinpath(*tmp_path.parts[1:])
    assert (one.path, two.path, two.labels) == (f"{below}/s-{{0..1}}.tar", f"{below}/images", f"{below}/masks")
    assert three is lost
    assert files_below(below) == {f"{f}/{n}.png" for f in ("images", "masks") for n in range(3)} | {
        "s-0.tar",
        "s-1.tar",
    }
    assert len(one.open().items) == 2
    assert two.open().read_labels(2, (slice(0, 8), slice(0, 8))).min() == 7


def test_classes_and_shares_do_not_depend_on_where_the_copy_lies(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(24):
        folder = tmp_path / "images" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    given = ImageFolderConfig(path=str(tmp_path / "images"), split=(0.0, 0.5))
    (staged,) = stage([given], tmp_path / "fast", MIB)
    one, two = given.open(), staged.open()
    assert one.class_names == two.class_names
    assert 0 < len(one.items) < 24
    window = (slice(0, 8), slice(0, 8))
    seen = [[s.read(i, window)[0, 0, 0] for i in range(len(s.items))] for s in (one, two)]
    assert seen[0] == seen[1]


# ---------------------------------------------------------------- once, and whole


def test_what_is_there_is_not_copied_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [FileConfig(path=str(data))]
    (staged,) = stage(given, tmp_path / "fast", MIB)
    copied: list[str] = []
    true_copy = staging._copy
    monkeypatch.setattr(
        staging, "_copy", lambda copy, moved: (copied.append(copy.original.name), true_copy(copy, moved))
    )
    stage(given, tmp_path / "fast", MIB)
    assert copied == []
    (data / "f0.bin").write_bytes(b"new")  # another size
    os.utime(data / "deep" / "f1.bin", ns=(1, 1))  # another time
    (Path(staged.path) / "f4.bin").unlink()
    stage(given, tmp_path / "fast", MIB)
    assert sorted(copied) == ["f0.bin", "f1.bin", "f4.bin"]
    assert (Path(staged.path) / "f0.bin").read_bytes() == b"new"


COPY_SLOWLY = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {unit!r})
    from test_stage import FileConfig
    from vitrail.data.files import stage as staging
    copy_bytes, number = staging._copy_bytes, iter(range(1000))
    def slowly(source, target, moved):
        if next(number) >= 6:
            target.write(Path(source).read_bytes()[:500])  # half of it
            target.flush()
            print("stuck", flush=True)
            time.sleep(600)
        return copy_bytes(source, target, moved)
    staging._copy_bytes, staging.THREADS = slowly, 1
    staging.stage([FileConfig(path={data!r})], Path({fast!r}), 2**20)
"""


def test_a_copy_that_was_killed_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = tmp_path / "fast"
    script = textwrap.dedent(COPY_SLOWLY.format(unit=str(Path(__file__).parent), data=str(data), fast=str(fast)))
    process = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "stuck"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = files_below(fast)
    assert any(is_draft(name) for name in left)
    whole = {name for name in left if not is_draft(name)}
    assert len(whole) == 6
    assert all((fast / name).stat().st_size == 1000 for name in whole)
    stranger = fast / "notes.txt"
    stranger.write_text("mine")
    copied: list[Path] = []
    true_copy = staging._copy
    monkeypatch.setattr(staging, "_copy", lambda copy, moved: (copied.append(copy.original), true_copy(copy, moved)))
    (staged,) = stage([FileConfig(path=str(data))], fast, MIB)
    assert len(copied) == 14
    assert files_below(Path(staged.path)) == files_below(data)
    assert stranger.read_text() == "mine"  # not ours to delete
    assert not any(is_draft(name) for name in files_below(fast))


def _stage_in_child(data: str, fast: str, results: Any) -> None:
    copied = []
    true_copy = staging._copy

    def copy(each: Any, moved: Any) -> None:
        time.sleep(0.01)
        copied.append(each.original.name)
        true_copy(each, moved)

    staging._copy = copy
    stage([FileConfig(path=data)], Path(fast), MIB)
    results.put((len(copied), len(files_below(Path(fast)))))


def test_processes_of_a_node_copy_once(data: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (str(data), str(tmp_path / "fast"), results)
    processes = [context.Process(target=_stage_in_child, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=LONG) for _ in processes]
    for process in processes:
        process.join(LONG)
    assert sorted(copied for copied, _ in found) == [0, 0, 0, 20]
    assert {there for _, there in found} == {20}  # each goes on when everything is there


def test_waiting_ticks(data: Path, tmp_path: Path) -> None:
    """A watchdog hears from those who wait, and people hear why."""
    import fcntl

    fast = tmp_path / "fast"
    fast.mkdir()
    handle = os.open(fast / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    ticks = 0

    def tick() -> None:
        nonlocal ticks, handle
        ticks += 1
        if ticks == 3 and handle >= 0:
            os.close(handle)
            handle = -1

    lines: list[str] = []
    stage([FileConfig(path=str(data))], fast, MIB, tell=lines.append, tick=tick)
    assert ticks >= 3
    assert any("another process copies" in line for line in lines)


# ---------------------------------------------------------------- refusals


def test_the_limit_is_refused_with_numbers(data: Path, tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    sentence = r"data\.stage: 0\.02 MiB in 20 files .*, more than data\.stage\.limit_gib .*; raise it"
    with pytest.raises(UserError, match=sentence):
        stage([FileConfig(path=str(data))], fast, 19_999)
    assert files_below(fast) == set()
    (fast / "other.bin").write_bytes(bytes(5000))
    with pytest.raises(UserError, match=r"0\.00 MiB of others are there already"):
        stage([FileConfig(path=str(data))], fast, 22_000)
    stage([FileConfig(path=str(data))], fast, 25_000)
    assert (fast / "other.bin").exists()


def test_a_full_disk_and_other_errors_are_told(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = tmp_path / "fast"
    usage = SimpleNamespace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(UserError, match=r"data\.stage\.dir: .* just 0\.00 MiB are free there"):
            stage([FileConfig(path=str(data))], fast, MIB)

    def full(source: Any, target: Any, moved: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy_bytes", full)
        with pytest.raises(UserError, match=r"cannot be copied to .* \(the disk is full\)"):
            stage([FileConfig(path=str(data))], fast, MIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.stage\.dir: .* cannot be written"):
        stage([FileConfig(path=str(data))], tmp_path / "file" / "fast", MIB)
    with pytest.raises(UserError, match=r"data\.stage\.dir: .* lies inside the data of"):
        stage([FileConfig(path=str(data))], data / "fast", MIB)


def test_a_file_that_grows_while_it_is_copied_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_bytes = staging._copy_bytes

    def grow(source: Any, target: Any, moved: Any) -> None:
        with open(source, "ab") as file:
            file.write(b"more")
        copy_bytes(source, target, moved)

    monkeypatch.setattr(staging, "_copy_bytes", grow)
    with pytest.raises(UserError, match="changes while it is copied"):
        stage([FileConfig(path=str(data / "f0.bin"))], tmp_path / "fast", MIB)
    assert files_below(tmp_path / "fast") == set()


def test_a_copy_that_stands_still_ends(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(staging, "STALLED", 0.3)
    monkeypatch.setattr(pool, "PATIENCE", 0.1)
    monkeypatch.setattr(staging, "_copy_bytes", lambda source, target, moved: release.wait())
    with pytest.raises(UserError, match=rf"nothing was copied for 0 s, .*; check the disk of .* behind {data}"):
        stage([FileConfig(path=str(data))], tmp_path / "fast", MIB)
    release.set()


# ---------------------------------------------------------------- from a recipe


def test_the_recipe_decides(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [FileConfig(path=str(data)), SimpleNamespace(path="x")]
    plain = SimpleNamespace(bad="error", stage=None)
    assert configs_to_open(plain, given) == given
    (filled, other) = configs_to_open(SimpleNamespace(bad="fill", stage=None), given)
    assert filled.missing == "fill"
    assert other is given[1]
    monkeypatch.setenv("FAST_DISK", str(tmp_path / "fast"))
    section = SimpleNamespace(bad="error", stage=Stage(dir="$FAST_DISK/vitrail", limit_gib=1))
    (staged, _) = configs_to_open(section, given, tell=lambda line: None)
    assert staged.path.startswith(str(tmp_path / "fast" / "vitrail"))
    monkeypatch.delenv("FAST_DISK")
    with pytest.raises(UserError, match=r"data\.stage\.dir: '\$FAST_DISK/vitrail' names a variable that is not set"):
        configs_to_open(section, given)
    assert json.loads(section.stage.model_dump_json()) == {"dir": "$FAST_DISK/vitrail", "limit_gib": 1.0}


# ---------------------------------------------------------------- whose copies they are


def test_a_copy_that_this_user_did_not_make_is_made_anew(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size and the time of its original can be given to any file."""
    given, fast = [FileConfig(path=str(data))], tmp_path / "fast"
    (staged,) = stage(given, fast, MIB)
    copies = {name: Path(staged.path) / name for name in sorted(files_below(data))}
    copied: list[str] = []
    true_copy = staging._copy
    monkeypatch.setattr(
        staging, "_copy", lambda copy, moved: (copied.append(copy.original.name), true_copy(copy, moved))
    )

    def pretend(copy: Path, content: bytes) -> None:
        found = copy.stat()
        copy.write_bytes(content)
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))

    for number, (name, copy) in enumerate(list(copies.items())[:8]):  # other content, in the same file or another
        bad = bytearray((data / name).read_bytes())
        bad[number * 100] ^= 1 << number
        if number % 2:
            copy.rename(tmp_path / "old")
            copy.write_bytes(bad)
            os.utime(copy, ns=((tmp_path / "old").stat().st_mtime_ns,) * 2)
        else:
            pretend(copy, bytes(bad))
    touched = copies["f8.bin"]
    pretend(touched, touched.read_bytes())  # its bytes are compared
    copies["f6.bin"].chmod(0o666)  # anybody may write it
    stage(given, fast, MIB)
    assert sorted(copied) == sorted({Path(name).name for name in [*list(copies)[:8], "f6.bin"]})
    for name, copy in copies.items():
        assert copy.read_bytes() == (data / name).read_bytes()
    copied.clear()
    stage(given, fast, MIB)
    assert copied == []

    lines = (fast / LOCK).read_bytes().splitlines(keepends=True)
    (fast / LOCK).write_bytes(b"".join([b"torn {\n", b'["a"]\n', *lines[5:]])[:-9])  # records that are lost
    stage(given, fast, MIB)
    assert 0 < len(copied) < 20
    copied.clear()
    stage(given, fast, MIB)
    assert copied == []


def test_files_that_lie_where_copies_go_are_not_replaced(data: Path, tmp_path: Path) -> None:
    backup = (tmp_path / "backup").joinpath(*data.parts[1:])
    backup.mkdir(parents=True)
    (backup / "f0.bin").write_text("an older state, and dear to somebody")
    with pytest.raises(
        UserError, match=r"data\.stage\.dir: '.*f0\.bin' lies there already, and vitrail has not put it"
    ):
        stage([FileConfig(path=str(data))], tmp_path / "backup", MIB)
    assert files_below(tmp_path / "backup") == {str((backup / "f0.bin").relative_to(tmp_path / "backup"))}
    assert (backup / "f0.bin").read_text() == "an older state, and dear to somebody"


def test_folders_and_links_of_others_are_not_used(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, fast = [FileConfig(path=str(data))], tmp_path / "fast"
    fast.mkdir()
    fast.chmod(0o1777)  # as /tmp: everybody may have put something there
    decoy = fast.joinpath(*(data / "f0.bin").parts[1:])
    decoy.parent.mkdir(parents=True)
    decoy.write_bytes(b"x" * 1000)
    os.utime(decoy, ns=((data / "f0.bin").stat().st_mtime_ns,) * 2)
    (staged,) = stage(given, fast, MIB)
    mine = fast / f"vitrail-{os.geteuid()}"
    assert Path(staged.path).is_relative_to(mine)
    assert mine.stat().st_mode & 0o022 == 0
    assert (Path(staged.path) / "f0.bin").read_bytes() == (data / "f0.bin").read_bytes()
    assert decoy.read_bytes() == b"x" * 1000

    copy = Path(staged.path) / "f2.bin"
    copy.unlink()
    copy.symlink_to(data / "f4.bin")  # that no copy is written through, nor read
    with pytest.raises(UserError, match=r"f2\.bin is a link and not replaced"):
        stage(given, fast, MIB)
    copy.unlink()
    deep = Path(staged.path) / "deep"
    deep.rename(tmp_path / "elsewhere")
    deep.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"deep' is not a folder that you alone may write; remove it, or give another"):
        stage(given, fast, MIB)
    deep.unlink()
    (tmp_path / "elsewhere").rename(deep)
    deep.chmod(0o777)
    with pytest.raises(UserError, match=r"deep' is not a folder that you alone may write"):
        stage(given, fast, MIB)
    deep.chmod(0o755)
    stage(given, fast, MIB)

    mine.rename(fast / "vitrail-4242")  # of a user who made what another one is going to use
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(UserError, match=r"vitrail-4242' is not a folder that you alone may write"):
        stage(given, fast, MIB)


def modes_below(folder: Path) -> set[str]:
    return {oct(path.lstat().st_mode & 0o777) for path in [folder, *folder.rglob("*")]}


def test_copies_are_readable_for_their_user_alone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "f0.bin").chmod(0o600)
    mask = os.umask(0)
    try:
        stage([FileConfig(path=str(data))], tmp_path / "fast", MIB)
        monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
        (tmp_path / "cache").mkdir(mode=0o777)
        keep("facts", "key", lambda: b"made", bytes, wait=False)
        fsspec.filesystem("memory").pipe_file("/private.bin", b"fetched")
        local_copy("memory://private.bin")
    finally:
        os.umask(mask)
        fsspec.filesystem("memory").store.pop("/private.bin", None)
    assert modes_below(tmp_path / "fast") == {"0o700", "0o600"}
    assert modes_below(tmp_path / "cache" / "facts") == modes_below(tmp_path / "cache" / "files") == {"0o700", "0o600"}


def test_links_out_of_the_data_are_copied_if_the_source_reads_them(data: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("secret")
    (data / "inside").symlink_to("deep")
    (data / "again").symlink_to(".")
    stage([FileConfig(path=str(data))], tmp_path / "fast", MIB)
    for link, target in (("notes", "home/key"), ("more", "home")):
        (data / link).symlink_to(tmp_path / target)
        with pytest.raises(UserError, match=rf"{link} is a link to .*{target}, which lies outside of the data"):
            stage([FileConfig(path=str(data))], tmp_path / "fast", MIB)
        assert not [name for name in files_below(tmp_path / "fast") if "key" in name or "notes" in name]
        with trusted():
            stage([FileConfig(path=str(data))], tmp_path / f"trusted {link}", MIB)
        (data / link).unlink()

    images = tmp_path / "archive" / "cats"
    images.mkdir(parents=True)
    image = Image.fromarray(np.zeros((4, 4), np.uint8))
    image.save(images / "a.png")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cats").symlink_to(images)  # as people link large data into place
    (staged,) = stage([ImageFolderConfig(path=str(tmp_path / "linked"))], tmp_path / "fast", MIB)
    assert files_below(Path(staged.path)) == {"cats/a.png"}
    (tmp_path / "linked" / "dogs").symlink_to(tmp_path / "home")
    image.save(images / "b.png")
    lines: list[str] = []
    (staged,) = stage([ImageFolderConfig(path=str(tmp_path / "linked"))], tmp_path / "fast", MIB, tell=lines.append)
    assert files_below(Path(staged.path)) == {"cats/a.png", "cats/b.png"}
    assert "left out, 1 of them, such as" in lines[-1]
    assert lines[-1].endswith("dogs")


def test_folders_of_links_are_staged_as_the_source_reads_them(tmp_path: Path) -> None:
    """Links to blobs, as of Hugging Face's snapshots, datalad and git-annex."""
    nibabel, tifffile = map(pytest.importorskip, ("nibabel", "tifffile"))
    from vitrail.recipe import kinds

    blobs = tmp_path / "blobs"
    blobs.mkdir()

    def save(folder: str, name: str, write: Any) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        write(blobs / f"{folder}-{name}")
        (tmp_path / folder / name).symlink_to(blobs / f"{folder}-{name}")

    values = np.arange(64, dtype=np.uint8).reshape(4, 4, 4)
    for number in range(4):
        image = Image.fromarray(values[number])
        save("images", f"{number}.png", lambda file, image=image: image.save(file))
        for folder in ("scans", "labels"):
            scan = nibabel.Nifti1Image(values + number, np.eye(4))
            save(folder, f"{number}.nii", lambda file, scan=scan: nibabel.save(scan, file))
    save("tiffs", "scan_0000.tif", lambda file: tifffile.imwrite(file, values))
    save("tiffs", "scan.json", lambda file: file.write_text('{"spacing": [3, 2, 2]}'))
    for folder in ("images", "scans", "tiffs"):
        for name in (".gitattributes", "README.md", "other.json"):
            save(folder, name, lambda file: file.write_text("secret"))
    scans = {"labels": str(tmp_path / "labels"), "end": 0.5}
    for kind, folder, keys in (
        ("image_folder", "images", {"split": (0.0, 0.6)}),
        ("nifti", "scans", scans),
        ("tiff", "tiffs", {}),
    ):
        given = kinds.find("source", kind)(path=str(tmp_path / folder), **keys)
        lines: list[str] = []
        (staged,) = stage([given], tmp_path / f"fast {folder}", MIB, tell=lines.append)
        assert "left out, 3 of them" in lines[-1], kind
        one, two = given.open(), staged.open()
        assert [item.spacing for item in one.items] == [item.spacing for item in two.items]
        for number, item in enumerate(one.items):
            window = tuple(slice(0, size) for size in item.shape)
            np.testing.assert_array_equal(one.read(number, window), two.read(number, window))
            if kind == "nifti":
                np.testing.assert_array_equal(one.read_labels(number, window), two.read_labels(number, window))
    (staged,) = stage([kinds.find("source", "nifti")(path=str(tmp_path / "scans"), **scans)], tmp_path / "fast", MIB)
    copied = files_below((tmp_path / "fast").joinpath(*tmp_path.parts[1:]))
    assert copied == {f"{folder}/{number}.nii" for folder in ("scans", "labels") for number in range(4)}


def test_a_hierarchy_with_links_to_itself_is_staged(tmp_path: Path) -> None:
    top = tmp_path / "a.zarr"
    top.mkdir()
    (top / ".zgroup").write_text('{"zarr_format": 2}')
    zarr.create_array(str(top / "raw"), data=np.ones((4, 4, 4), np.uint8), chunks=(4, 4, 4), zarr_format=2)
    for number in range(6):
        (top / f"l{number}").symlink_to(".")
    (top / "loop").symlink_to("loop")
    (staged,) = stage([ZarrConfig(path=str(top))], tmp_path / "fast", MIB)
    assert staged.open().read(0, (slice(0, 4),) * 3).all()
