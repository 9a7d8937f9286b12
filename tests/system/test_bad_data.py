"""Bad data, each kind of it with the sentence that a person sees: the file, the place, what is wrong, what to do.

The table is that of docs/bad-data.md. Most cases are read through Python, since the command line shows the same
sentence (test_bad_input.py); the policies are run by training.
"""

import builtins
import errno
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import ROOT, environment, events, losses, run, tiny_recipe, torchrun, vitrail, write_recipe
from watching import WATCHED

import vitrail as library
from vitrail import cli
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.look.inspect import open_source
from vitrail.errors import BadData, MissingData, RunFailed, UserError
from vitrail.recipe import load_recipe
from vitrail.report.facts import summary
from vitrail.report.page import write_report

Case = Callable[[Path], tuple[Path | str, dict[str, Any]]]  # writes bad data; gives the path and keys of the entry
CASES: dict[str, tuple[Case, type[UserError], str]] = {}  # with the error and what its sentence says


def case(name: str, kind: type[UserError], sentence: str) -> Callable[[Case], Case]:
    def keep(write: Case) -> Case:
        CASES[name] = (write, kind, sentence)
        return write

    return keep


def noise(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, shape).astype(dtype)


def cut(path: Path, share: float = 0.5) -> Path:
    """Leave the first part of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    return path


def spoil(path: Path, start: float = 0.5, number: int = 64) -> Path:
    """Other bytes in the middle of a file."""
    whole = bytearray(path.read_bytes())
    first = int(len(whole) * start)
    whole[first : first + number] = bytes(255 - b for b in whole[first : first + number])
    path.write_bytes(bytes(whole))
    return path


def png(path: Path, *shape: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*(shape or (24, 24, 3)))).save(path)
    return path


# ---------------------------------------------------------------- missing chunks, shards of no bytes


def zarr_array(path: Path, *, version: int, shards: bool = False, **options: Any) -> Path:
    import zarr

    extra = {"shards": (16, 16, 16)} if shards else {}
    array = zarr.create_array(
        path, shape=(32, 32, 32), chunks=(8, 8, 8), dtype="uint8", zarr_format=version, **extra, **options
    )
    array[...] = noise(32, 32, 32)
    return path


def n5_array(path: Path) -> Path:
    import tensorstore

    spec = {
        "driver": "n5",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "dataType": "uint8",
            "dimensions": [32, 32, 32],
            "blockSize": [8, 8, 8],
            "compression": {"type": "gzip"},
        },
        "create": True,
    }
    tensorstore.open(spec).result().write(noise(32, 32, 32)).result()
    return path


def hdf5(path: Path, change: Callable[[Any], None]) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        change(file)
    return path


@case("zarr 2: chunk missing", MissingData, r"v\.zarr.*(chunk|1\.2\.3).*missing.*`missing: fill`")
def _(tmp: Path):
    (zarr_array(tmp / "v.zarr", version=2) / "1.2.3").unlink()
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: chunk missing", MissingData, r"v\.zarr.*c/1/2/3.*missing.*`missing: fill`")
def _(tmp: Path):
    (zarr_array(tmp / "v.zarr", version=3) / "c/1/2/3").unlink()
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: shard missing", MissingData, r"v\.zarr.*c/1/0/1.*missing.*`missing: fill`")
def _(tmp: Path):
    (zarr_array(tmp / "v.zarr", version=3, shards=True) / "c/1/0/1").unlink()
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: shard of no bytes", BadData, r"v\.zarr/c/1/0/1.* 0 bytes.*restore")
def _(tmp: Path):
    (zarr_array(tmp / "v.zarr", version=3, shards=True) / "c/1/0/1").write_bytes(b"")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 2: chunk of no bytes", BadData, r"v\.zarr.*1\.2\.3.*no bytes.*restore")
def _(tmp: Path):
    (zarr_array(tmp / "v.zarr", version=2) / "1.2.3").write_bytes(b"")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: chunk cut short", BadData, r"v\.zarr.*c/1/2/3.*cannot be read.*restore")
def _(tmp: Path):
    cut(zarr_array(tmp / "v.zarr", version=3) / "c/1/2/3")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: shard cut short", BadData, r"v\.zarr.*c/1/0/1.*restore")
def _(tmp: Path):
    cut(zarr_array(tmp / "v.zarr", version=3, shards=True) / "c/1/0/1")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("zarr 3: uncompressed chunk cut short", BadData, r"v\.zarr.*c/1/2/3.*restore")
def _(tmp: Path):
    cut(zarr_array(tmp / "v.zarr", version=3, compressors=None) / "c/1/2/3")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("ome_zarr: chunk missing", MissingData, r"v\.zarr.*missing")
def _(tmp: Path):
    write_ome_zarr(tmp / "v.zarr", Volume(noise(32, 32, 32), noise(32, 32, 32)), levels=1, chunk=16)
    (tmp / "v.zarr/s0/c/1/0/1").unlink()
    return tmp / "v.zarr", {}


@case("n5: chunk missing", MissingData, r"v\.n5.*3/2/1.*missing.*`missing: fill`")
def _(tmp: Path):
    (n5_array(tmp / "v.n5") / "3/2/1").unlink()
    return tmp / "v.n5", {"kind": "n5"}


@case("n5: chunk of no bytes", BadData, r"v\.n5.*3/2/1.*no bytes.*restore")
def _(tmp: Path):
    (n5_array(tmp / "v.n5") / "3/2/1").write_bytes(b"")
    return tmp / "v.n5", {"kind": "n5"}


@case("hdf5: chunk never written", MissingData, r"v\.h5.*raw.*`missing: fill`")
def _(tmp: Path):
    def write(file: Any) -> None:
        node = file.create_dataset("raw", (32, 32, 32), "uint8", chunks=(8, 8, 8))
        node[:16] = noise(16, 32, 32)

    return hdf5(tmp / "v.h5", write), {}


# ---------------------------------------------------------------- files cut short, and broken ones


@case("tiff: pages lost", BadData, r"stack\.tif.*(cut|pages|incomplete|bytes)")
def _(tmp: Path):
    import tifffile

    tifffile.imwrite(tmp / "stack.tif", noise(16, 32, 32), compression="zlib", metadata={"axes": "ZYX"}, imagej=False)
    return cut(tmp / "stack.tif"), {"kind": "tiff"}


@case("tiff: pages of ImageJ lost", BadData, r"stack\.tif.*(cut|pages|bytes)")
def _(tmp: Path):
    import tifffile

    tifffile.imwrite(tmp / "stack.tif", noise(16, 32, 32), imagej=True, metadata={"axes": "ZYX"})
    return cut(tmp / "stack.tif", 0.7), {"kind": "tiff"}


@case("nifti: cut short", BadData, r"ct\.nii.*(restore|cut)")
def _(tmp: Path):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(noise(24, 24, 24, dtype="int16"), np.eye(4)), tmp / "ct.nii")
    return cut(tmp / "ct.nii"), {}


@case("nifti: compressed, cut short", BadData, r"ct\.nii\.gz.*(restore|cut)")
def _(tmp: Path):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(noise(24, 24, 24, dtype="int16"), np.eye(4)), tmp / "ct.nii.gz")
    return cut(tmp / "ct.nii.gz"), {}


@case("hdf5: cut short", BadData, r"v\.h5.*restore")
def _(tmp: Path):
    return cut(hdf5(tmp / "v.h5", lambda f: f.create_dataset("raw", data=noise(32, 32, 32)))), {}


@case("nifti: corrupt", BadData, r"ct\.nii\.gz.*restore")
def _(tmp: Path):
    import nibabel

    nibabel.save(nibabel.Nifti1Image(noise(24, 24, 24, dtype="int16"), np.eye(4)), tmp / "ct.nii.gz")
    return spoil(tmp / "ct.nii.gz"), {}


@case("image: corrupt", BadData, r"images/0\.png.*(restore|remove)")
def _(tmp: Path):
    spoil(png(tmp / "images/0.png", 64, 64, 3))
    return tmp / "images", {"kind": "image_folder"}


@case("hdf5: corrupt", BadData, r"v\.h5.*restore")
def _(tmp: Path):
    def write(file: Any) -> None:
        file.create_dataset("raw", data=noise(64, 64, 64), chunks=(32, 32, 32), fletcher32=True)

    return spoil(hdf5(tmp / "v.h5", write)), {}


@case("zarr 3: corrupt, with a checksum", BadData, r"v\.zarr/c/1/2/3.*checksum.*restore")
def _(tmp: Path):
    from zarr.codecs import Crc32cCodec

    spoil(zarr_array(tmp / "v.zarr", version=3, compressors=[Crc32cCodec()]) / "c/1/2/3")
    return tmp / "v.zarr", {"kind": "zarr"}


@case("netcdf: cut short", BadData, r"f\.nc.*restore")
def _(tmp: Path):
    import xarray

    xarray.Dataset({"u": (("time", "lat", "lon"), noise(4, 24, 24, dtype="float32"))}).to_netcdf(tmp / "f.nc")
    return cut(tmp / "f.nc"), {}


@case("geotiff: cut short", BadData, r"s\.tif.*(restore|cut)")
def _(tmp: Path):
    import rasterio

    shape = {"width": 64, "height": 64, "count": 3, "dtype": "uint8", "tiled": True, "blockxsize": 16, "blockysize": 16}
    with rasterio.open(tmp / "s.tif", "w", driver="GTiff", compress="deflate", **shape) as file:
        file.write(noise(3, 64, 64))
    return cut(tmp / "s.tif", 0.8), {"kind": "geotiff"}


@case("numpy: cut short", BadData, r"a\.npy.*(restore|bytes)")
def _(tmp: Path):
    np.save(tmp / "a.npy", noise(32, 32, 32))
    return cut(tmp / "a.npy"), {}


@case("raw: another size than told", BadData, r"a\.raw.*bytes")
def _(tmp: Path):
    (tmp / "a.raw").write_bytes(bytes(1000))
    return tmp / "a.raw", {"shape": [16, 16, 16], "dtype": "uint8", "kind": "numpy"}


@case("image: cut short", BadData, r"images/1\.png.*(restore|remove)")
def _(tmp: Path):
    png(tmp / "images/0.png", 64, 64, 3)
    cut(png(tmp / "images/1.png", 64, 64, 3))
    return tmp / "images", {"kind": "image_folder"}


@case("image: not an image", BadData, r"images/1\.png.*(restore|remove)")
def _(tmp: Path):
    png(tmp / "images/0.png")
    (tmp / "images/1.png").write_bytes(b"this is no picture" * 20)
    return tmp / "images", {"kind": "image_folder"}


@case("image: no bytes", BadData, r"images/1\.png.*(restore|remove)")
def _(tmp: Path):
    png(tmp / "images/0.png")
    (tmp / "images/1.png").write_bytes(b"")
    return tmp / "images", {"kind": "image_folder"}


@case("parquet: cut short", BadData, r"p\.parquet.*restore")
def _(tmp: Path):
    return cut(parquet(tmp / "p.parquet", [png_bytes() for _ in range(4)])), {}


@case("parquet: a broken image", BadData, r"p\.parquet.*(restore|remove)")
def _(tmp: Path):
    return parquet(tmp / "p.parquet", [png_bytes(), png_bytes()[:60], png_bytes()]), {}


@case("webdataset: cut short", BadData, r"s\.tar.*(restore|cut)")
def _(tmp: Path):
    with tarfile.open(tmp / "s.tar", "w") as tar:
        for number in range(4):
            data = png_bytes(64)
            info = tarfile.TarInfo(f"{number:04}.png")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return cut(tmp / "s.tar", 0.6), {}


@case("cifar10: cut short", BadData, r"data_batch_1\.bin.*(again|restore|bytes)")
def _(tmp: Path):
    (tmp / "cifar").mkdir()
    (tmp / "cifar/data_batch_1.bin").write_bytes(bytes(3073 * 3 - 100))
    return tmp / "cifar", {"kind": "cifar10"}


def png_bytes(size: int = 24) -> bytes:
    out = io.BytesIO()
    Image.fromarray(noise(size, size, 3)).save(out, "png")
    return out.getvalue()


def parquet(path: Path, images: list[bytes]) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = [{"bytes": data, "path": None} for data in images]
    pyarrow.parquet.write_table(pyarrow.table({"image": rows, "label": list(range(len(rows)))}), path)
    return path


# ---------------------------------------------------------------- values that no sample may have


@case("numpy: wrong type", UserError, r"a\.npy.*(object|pickle)")
def _(tmp: Path):
    np.save(tmp / "a.npy", np.array([[{}] * 16] * 16, dtype=object), allow_pickle=True)
    return tmp / "a.npy", {}


@case("numpy: complex numbers", BadData, r"a\.npy.*complex.*convert")
def _(tmp: Path):
    np.save(tmp / "a.npy", np.ones((16, 16), np.complex64))
    return tmp / "a.npy", {}


@case("hdf5: text", UserError, r"v\.h5.*")
def _(tmp: Path):
    return hdf5(tmp / "v.h5", lambda f: f.create_dataset("raw", data=[b"a", b"b"])), {}


@case("nan", BadData, r"a\.npy.*nan.*z = 3, y = 4, x = 5.*`region`")
def _(tmp: Path):
    values = np.ones((8, 16, 16), np.float32)
    values[3, 4, 5] = np.nan
    np.save(tmp / "a.npy", values)
    return tmp / "a.npy", {}


@case("infinity", BadData, r"a\.npy.*-inf.*y = 4, x = 5.*`region`")
def _(tmp: Path):
    values = np.ones((16, 16), np.float32)
    values[4, 5] = -np.inf
    np.save(tmp / "a.npy", values)
    return tmp / "a.npy", {}


@case("labels of another size", BadData, r"l\.npy.*(8 x 16|16 x 8).*resample")
def _(tmp: Path):
    np.save(tmp / "a.npy", noise(16, 16))
    np.save(tmp / "l.npy", noise(8, 16))
    return tmp / "a.npy", {"labels": str(tmp / "l.npy")}


@case("labels that are no whole numbers", BadData, r"l\.npy.*float32.*whole")
def _(tmp: Path):
    np.save(tmp / "a.npy", noise(16, 16))
    np.save(tmp / "l.npy", np.ones((16, 16), np.float32))
    return tmp / "a.npy", {"labels": str(tmp / "l.npy")}


@case("labels that are not there", UserError, r"labels = .*l\.npy' does not exist")
def _(tmp: Path):
    np.save(tmp / "a.npy", noise(16, 16))
    return tmp / "a.npy", {"labels": str(tmp / "l.npy")}


# ---------------------------------------------------------------- nothing there


@case("image folder: empty", UserError, r"empty.*(no images|nothing|empty|holds)")
def _(tmp: Path):
    (tmp / "empty").mkdir()
    return tmp / "empty", {"kind": "image_folder"}


@case("tiff: empty folder", UserError, r"empty holds no files")
def _(tmp: Path):
    (tmp / "empty").mkdir()
    return tmp / "empty", {"kind": "tiff"}


@case("any: empty folder", UserError, r"empty")
def _(tmp: Path):
    (tmp / "empty").mkdir()
    return tmp / "empty", {}


@case("nothing there", UserError, r"nowhere\.nii' does not exist")
def _(tmp: Path):
    return tmp / "nowhere.nii", {}


@case("array of no voxels", BadData, r"a\.npy is empty.*16 x 0")
def _(tmp: Path):
    np.save(tmp / "a.npy", np.zeros((16, 0), np.uint8))
    return tmp / "a.npy", {}


@case("image of no pixels", UserError, r"images.*0")
def _(tmp: Path):
    (tmp / "images").mkdir()
    np.save(tmp / "images/0.npy", np.zeros((0, 16, 3), np.uint8))
    return tmp / "images", {"kind": "numpy"}


def is_there(kind: str | None) -> bool:
    return kind is None or (ROOT / "src/vitrail/data/sources" / f"{kind}.py").is_file()


def read_all(path: Path | str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    kind = settings.pop("kind", None)
    _, source = open_source(str(path), kind=kind, settings=settings)
    for number, item in enumerate(source.items):
        window = tuple(slice(0, size) for size in item.shape)
        source.read(number, window)
        if getattr(source, "label_dtype", None) is not None:
            source.read_labels(number, window)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_its_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    write, kind, words = CASES[name]
    path, settings = write(tmp_path)
    if not is_there(settings.get("kind")):
        pytest.skip("no such source")
    with pytest.raises(UserError) as caught:
        read_all(path, settings)
    sentence = str(caught.value)
    assert isinstance(caught.value, kind), (type(caught.value), sentence)
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert re.search(r"; |, so |restore|choose|give|check", sentence), f"no remedy: {sentence}"


def test_inspecting_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tifffile

    tifffile.imwrite(tmp_path / "stack.tif", noise(16, 32, 32), compression="zlib")
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "inspect", str(cut(tmp_path / "stack.tif"))])
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert re.search(r"^error: .*stack\.tif is cut short: .*; restore it$", line)


def test_the_page_has_every_case() -> None:
    page = (ROOT / "docs" / "bad-data.md").read_text(encoding="utf-8")
    for word in ("zarr", "N5", "HDF5", "TIFF", "NIfTI", "no bytes", "NaN", "labels", "empty", "permission"):
        assert word.lower() in page.lower(), word


# ---------------------------------------------------------------- permissions


@pytest.mark.parametrize("kind", ["numpy", "image_folder"])
def test_a_file_that_may_not_be_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the system's answer is made up."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    if kind == "numpy":
        path = secret = tmp_path / "a.npy"
        np.save(path, noise(16, 16))
    else:
        path, secret = tmp_path / "images", png(tmp_path / "images/0.png")
    opened, os_open = builtins.open, os.open

    def refuse(file: Any, *arguments: Any, true: Any = opened, **options: Any) -> Any:
        if not isinstance(file, int) and Path(os.fsdecode(file)) == secret:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return true(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(os, "open", lambda *a, **o: refuse(*a, true=os_open, **o))
    with pytest.raises(UserError, match=rf"{secret.name}.*(?i:permission)"):
        read_all(path, {"kind": kind})


# ---------------------------------------------------------------- what a run does about it


def spoilt(tmp: Path) -> Path:
    """A volume of which one chunk is missing."""
    if not (tmp / "v.zarr").exists():
        write_ome_zarr(tmp / "v.zarr", Volume(noise(48, 48, 48), noise(48, 48, 48)), levels=1, chunk=16)
        (tmp / "v.zarr/s0/c/1/0/1").unlink()
    return tmp / "v.zarr"


def short(path: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "run__steps": 6,
        "data__train": [{"path": str(path)}],
        "data__valid": [],
        "data__normalize": {"mean": [128], "std": [64]},
        "log__pictures": 100,
        "eval__samples": 2,
        "checkpoint__every": "off",
        **changes,
    }
    return tiny_recipe(path, run_dir, **options)


@pytest.fixture
def run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains on the spoilt volume with a policy; gives the folder of the run."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))

    def train(**changes: Any) -> Path:
        library.train(load_recipe(short(spoilt(tmp_path), tmp_path / "run", **changes)), quiet=True)
        return tmp_path / "run"

    return train


def test_a_run_that_skips(run_with: Any) -> None:
    run_dir = run_with(data__bad="skip")
    (last,) = events(run_dir, "train")[-1:]
    assert last["step"] == 6
    assert last["bad_samples"] > 0
    told = [sentence for e in events(run_dir, "bad") for sentence in e["sentences"]]
    assert len(told) == 1  # one item, once
    assert "v.zarr" in told[0]
    assert "another sample is taken instead" in told[0]


def test_a_run_that_fills(run_with: Any) -> None:
    run_dir = run_with(data__bad="fill")
    assert len(losses(run_dir)) == 6
    assert "bad_samples" not in events(run_dir, "train")[-1]
    assert events(run_dir, "train")[-1]["filled_chunks"] >= 1


@pytest.mark.slow
def test_a_run_ends_at_a_bad_sample(run_with: Any) -> None:
    with pytest.raises(UserError, match=r"missing"):
        run_with()


IMAGES = {
    "run__steps": 12,
    "data__bad": "skip",
    "data__batch": 4,
    "data__crop": 8,
    "model__ndim": 2,
    "eval__every": 1000,
    "checkpoint__every": 1,
    "checkpoint__background": False,
}


def images(tmp: Path) -> Path:
    """A folder of images of which one is cut short."""
    (tmp / "images").mkdir()
    for number in range(8):
        Image.fromarray(noise(16, 16)).save(tmp / f"images/{number}.png")
    cut(tmp / "images/5.png")
    return tmp / "images"


def shown(run_dir: Path) -> tuple[dict[str, Any], str]:
    write_report(run_dir)
    return summary(run_dir), (run_dir / "report.html").read_text()


def test_a_run_that_ended_on_bad_data_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its count is that of the run, not of a process; each skip is told with the step of its batch."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    folder, run_dir = images(tmp_path), tmp_path / "run"
    whole = folder.joinpath("4.png").read_bytes()

    def train(**changes: Any) -> None:
        library.train(load_recipe(short(folder, run_dir, **IMAGES | changes)), quiet=True)

    def counts() -> list[tuple[int, int]]:
        return [(line["step"], line["samples"]) for line in events(run_dir, "bad")]

    train(run__steps=5)  # which is as good as a stop
    before = counts()[-1][1]
    assert before >= 1
    with pytest.raises(RunFailed) as caught:
        train(data__most_bad=before + 2)
    told = str(caught.value)
    assert re.search(
        rf"^{before + 2} samples were skipped \(\S*5\.png {before + 2} times\), as many as data\.most", told
    )
    end = events(run_dir, "end")[-1]
    saved = f"step {end['step']}, which is saved"
    assert f"`vitrail train {run_dir} data.most_bad={2 * (before + 2)}` goes on from {saved}; if you mend" in told
    assert told.endswith("bad data, add --other-data")
    assert end["message"] == told
    facts, page = shown(run_dir)
    assert facts["verdict"] == f"Failed at step {end['step']} of 12, saved up to step {end['step']}: {told}"
    assert list(facts["bad"]["items"].values()) == [facts["bad"]["samples"]] == [counts()[-1][1]]
    assert f"samples skipped ({next(iter(facts['bad']['items']))} {counts()[-1][1]} times)" in page

    folder.joinpath("5.png").write_bytes(whole)
    with pytest.raises(UserError, match=r"with --other-data, as after bad data were mended or removed"):
        train(data__most_bad=before + 2)
    mended = load_recipe(short(folder, run_dir, **IMAGES | {"data__most_bad": before + 2}))
    library.train(mended, quiet=True, other_data=True)
    assert len(losses(run_dir)) == 12
    facts, _ = shown(run_dir)
    assert facts["status"] == "done"
    assert facts["bad"]["samples"] == events(run_dir, "train")[-1]["bad_samples"] == counts()[-1][1]


def test_skips_are_told_with_the_step_of_their_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far data are read ahead, and after a continuation as without one."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    folder, told = images(tmp_path), []
    for prefetch, stops in ((1, [12]), (6, [12]), (3, [5, 12])):
        run_dir = tmp_path / f"run-{prefetch}"
        for steps in stops:
            changes: dict[str, Any] = {"run__steps": steps, "data__prefetch": prefetch}
            library.train(load_recipe(short(folder, run_dir, **IMAGES | changes)), quiet=True)
        told.append([(line["step"], line["samples"], line["items"]) for line in events(run_dir, "bad")])
    assert told[0] == told[1] == told[2]
    assert len(told[0]) > 2
    assert told[0][-1][1] == sum(sum(items.values()) for _, _, items in told[0])


def test_a_continued_run_that_ends_at_once_is_no_run_that_fell_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    folder, run_dir = images(tmp_path), tmp_path / "run"
    library.train(load_recipe(short(folder, run_dir, **IMAGES | {"run__steps": 2})), quiet=True)
    for number in range(8):
        cut(folder / f"{number}.png")
    recipe = load_recipe(short(folder, run_dir, **IMAGES | {"data__bad": "error"}))
    with pytest.raises(UserError, match=r"data\.bad=skip` goes on from step 2, which is saved"):
        library.train(recipe, quiet=True, other_data=True)
    assert events(run_dir, "end")[-1]["reason"] == "failed"
    assert summary(run_dir)["verdict"].startswith("Failed at step 2 of 12, saved up to step 2: ")


PLUGIN = """
import os
import time
from typing import Literal
import numpy as np
from vitrail.data.source import Item
from vitrail.recipe import config, kinds

@config
class StuckConfig:
    kind: Literal["stuck"] = "stuck"
    path: str
    weight: float = 1.0
    after: int = 60  # reads: some are at the start, to know the data again
    def open(self):
        return Stuck(self)

class Stuck:
    axes, variables, dtype = ("z", "y", "x"), ("em",), np.dtype("uint8")
    def __init__(self, settings):
        self.after, self.reads = settings.after, 0
        self.items = [Item("volume of a lost server", (32, 32, 32), (8, 8, 8), (0, 0, 0), (1.0, 1.0, 1.0), None)]
    def read(self, item, region):
        self.reads += 1
        if self.reads > self.after and os.environ.get("RANK", "1") == "1":
            time.sleep(3600)
        return np.random.default_rng(0).integers(0, 255, (1, *(r.stop - r.start for r in region)), dtype=np.uint8)
    def describe(self):
        return {"kind": "stuck"}

kinds.register("source", "stuck", StuckConfig)
"""


def test_a_read_that_never_ends_ends_the_run(tmp_path: Path) -> None:
    """Through the command line, since the process has to end too, with threads that still wait for the file."""
    (tmp_path / "stuck_plugin.py").write_text(PLUGIN)
    tree = short(Path("x"), tmp_path / "run", data__read_limit="1s", data__cache_mib=0, data__workers=2, run__steps=50)
    tree["data"]["train"] = [{"kind": "stuck", "path": "x"}]
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    code, output = vitrail("train", recipe, "--plugin", "stuck_plugin", env=environment(PYTHONPATH=paths))
    assert code == 1, output
    assert re.search(r"error: volume of a lost server \(voxels z .*\): the read has not ended after \d+ s", output)
    assert "Traceback" not in output
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["reason"] == "failed"


def test_a_rank_whose_read_never_ends_is_named_with_its_file(tmp_path: Path) -> None:
    """Before the other ranks would give up on it, which here they never do; its own limit is far longer."""
    (tmp_path / "stuck_plugin.py").write_text(PLUGIN)
    tree = short(Path("x"), tmp_path / "run", data__cache_mib=0, data__workers=2, run__steps=50, run__hang_limit="6s")
    tree["data"]["train"] = [{"kind": "stuck", "path": "x"}]
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = torchrun(2, "-m", "vitrail", "train", recipe, "--plugin", "stuck_plugin", *WATCHED)
    code, output = run(*command, env=environment(PYTHONPATH=paths))
    assert code == 1, output
    sentence = r"rank 1: volume of a lost server \(voxels z .*\): the read has not ended after \d+ s"
    assert re.search(sentence, output), output


def test_all_ranks_count_what_they_skip(tmp_path: Path) -> None:
    tree = short(spoilt(tmp_path), tmp_path / "run", data__bad="skip", run__steps=4)
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    code, output = run(*torchrun(2, "-m", "vitrail", "train", recipe), env=environment())
    assert code == 0, output
    alone = write_recipe(tmp_path / "alone.yaml", tree | {"run": tree["run"] | {"dir": str(tmp_path / "alone")}})
    code, output = vitrail("train", alone)
    assert code == 0, output
    last = [events(tmp_path / name, "train")[-1] for name in ("run", "alone")]
    assert last[0]["bad_samples"] > 0
    assert last[0]["bad_samples"] == sum(sum(line["items"].values()) for line in events(tmp_path / "run", "bad"))
    np.testing.assert_allclose(last[0]["loss"], last[1]["loss"], rtol=1e-4)  # the same samples stood in


def test_staging_through_a_recipe(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    stage = {"dir": str(tmp_path / "fast"), "limit_gib": 1}
    library.train(load_recipe(short(volume, tmp_path / "plain")), quiet=True)
    library.train(load_recipe(short(volume, tmp_path / "staged", data__stage=stage)), quiet=True)
    assert np.array_equal(losses(tmp_path / "plain"), losses(tmp_path / "staged"))
    assert (tmp_path / "fast").joinpath(*volume.parts[1:]).is_dir()
    assert str(volume) in (tmp_path / "staged/recipe.yaml").read_text()  # the recipe is about the data, not the copies
    stage["limit_gib"] = 1e-6
    stage["dir"] = str(tmp_path / "small")
    with pytest.raises(UserError, match=r"data\.stage: .* more than data\.stage\.limit_gib 1e-06"):
        library.train(load_recipe(short(volume, tmp_path / "refused", data__stage=stage)), quiet=True)
