"""File formats: written by their own libraries, read back exactly, in windows, by threads; bad files are named."""

import builtins
import errno
import gzip
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitrail.data.dataset import Dataset
from vitrail.data.files.handles import Handles, Whole, decoding
from vitrail.data.grid import GridSource
from vitrail.data.sources import guess_kind
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import trusted
from vitrail.recipe import kinds

SHARED = Path(__file__).parents[3] / "shared" / "data"
RNG = np.random.default_rng(0)
VALUES = RNG.integers(1, 255, (9, 40, 52)).astype(np.uint8)


def opened(kind: str, path: object, **keys: Any) -> GridSource:
    return kinds.find("source", kind)(path=str(path), **keys).open()


def whole(source: GridSource, item: int = 0) -> np.ndarray:
    return source.read(item, tuple(slice(0, n) for n in source.items[item].shape))


def whole_labels(source: GridSource, item: int = 0) -> np.ndarray:
    return source.read_labels(item, tuple(slice(0, n) for n in source.items[item].shape))


def check_windows(source: GridSource, expected: np.ndarray, item: int = 0, count: int = 30) -> None:
    """Windows at random places, by four threads at once, equal those of the whole [C, *spatial]."""
    rng = np.random.default_rng(1)
    assert source.items[item].shape == expected.shape[1:]
    assert np.array_equal(whole(source, item), expected)
    windows = []
    for _ in range(count):
        starts = [int(rng.integers(n)) for n in expected.shape[1:]]
        windows.append(
            tuple(slice(a, int(rng.integers(a + 1, n + 1))) for a, n in zip(starts, expected.shape[1:], strict=True))
        )
    with ThreadPoolExecutor(4) as pool:
        for window, found in zip(windows, pool.map(lambda w: source.read(item, w), windows), strict=True):
            assert found.dtype == source.dtype
            assert np.array_equal(found, expected[(slice(None), *window)])


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


# All kinds -------------------------------------------------------------------------------------------------------

SUFFIX = {"nifti": ".nii.gz", "tiff": ".tif", "hdf5": ".h5", "numpy": ".npy", "netcdf": ".nc", "geotiff": ".tif"}


@pytest.mark.parametrize("kind", SUFFIX)
def test_nothing_to_read_is_told(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="holds no files"):
        opened(kind, tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        opened(kind, tmp_path / "nowhere")
    file = tmp_path / f"a{SUFFIX[kind]}"
    for content in (b"", b"not what its name says, but long enough to be looked at" * 20):
        file.write_bytes(content)
        with pytest.raises(BadData, match=rf"{file.name} .*cannot be read"):
            opened(kind, file)
    library = {"nifti": "nibabel", "hdf5": "h5py", "netcdf": "xarray", "geotiff": "rasterio"}.get(kind)
    if library is not None:
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UserError, match=rf"needs {library}, which is not installed; pip install "):
            opened(kind, file)


def test_errors_of_libraries_and_of_the_disk() -> None:
    def raising(error: Exception) -> None:
        with decoding("file.x"):
            raise error

    for lasting in (PermissionError(errno.EACCES, "Permission denied"), OSError("truncated"), ValueError("bad magic")):
        with pytest.raises(BadData, match=r"file\.x"):
            raising(lasting)
    with pytest.raises(OSError, match="Input/output") as caught:  # the reader tries it again
        raising(OSError(errno.EIO, "Input/output error"))
    assert not isinstance(caught.value, UserError)
    with pytest.raises(UserError, match=r"file\.x takes more memory than is free") as caught_memory:  # never skipped
        raising(MemoryError())
    assert not isinstance(caught_memory.value, BadData)


def test_handles_and_whole_items(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    handles = Handles(lambda n: made.append(n) or [n], per_thread=False)  # type: ignore[func-returns-value]
    assert [handles(n % 40) for n in range(80)][-1] == [39]
    assert len(made) == 80  # 32 stay, so the oldest of 40 are opened again
    assert handles(39) is handles(39)
    per_thread = Handles(lambda n: object(), per_thread=True)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(per_thread, 1).result() is not per_thread(1)

    cache, decoded = Whole(limit=250), []

    def decode(n: int) -> np.ndarray:
        decoded.append(n)
        if n == 9:
            raise BadData("broken")
        return np.full(100, n, np.uint8)

    with ThreadPoolExecutor(4) as pool:
        assert {int(a[0]) for a in pool.map(lambda _: cache(1, lambda: decode(1)), range(20))} == {1}
    assert decoded == [1]  # once, for all threads
    for n in (2, 3, 1):
        cache(n, lambda n=n: decode(n))
    assert decoded == [1, 2, 3, 1]  # there is room for two
    for _ in range(2):
        with pytest.raises(BadData, match="broken"):
            cache(9, lambda: decode(9))


def test_every_kind_is_guessed(tmp_path: Path) -> None:
    nibabel, tifffile, h5py = (pytest.importorskip(n) for n in ("nibabel", "tifffile", "h5py"))
    nibabel.save(nibabel.Nifti1Image(VALUES, np.eye(4)), tmp_path / "a.nii.gz")
    tifffile.imwrite(tmp_path / "a.tif", VALUES)
    np.save(tmp_path / "a.npy", VALUES)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = VALUES
    for name, kind in [("a.nii.gz", "nifti"), ("a.tif", "tiff"), ("a.npy", "numpy"), ("a.h5", "hdf5")]:
        assert guess_kind(str(tmp_path / name)) == kind


# NumPy and raw ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32", "bool"])
def test_npy(tmp_path: Path, dtype: str) -> None:
    values = (VALUES % 2 if dtype == "bool" else VALUES).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    np.save(tmp_path / "b.npy", np.asfortranarray(values))
    for name in ("a.npy", "b.npy"):
        source = opened("numpy", tmp_path / name)
        assert source.dtype == np.dtype(dtype).newbyteorder("=")
        check_windows(source, values[None])
    assert [item.name for item in opened("numpy", tmp_path).items] == ["a.npy", "b.npy"]


def test_npy_channels_and_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.stack([VALUES, VALUES // 2], -1))
    np.save(tmp_path / "l.npy", VALUES // 64)
    source = opened("numpy", tmp_path / "a.npy", axes="zyxc", labels=str(tmp_path / "l.npy"), voxel_size=[40, 4, 4])
    assert (source.variables, source.items[0].spacing) == (("channel0", "channel1"), (40.0, 4.0, 4.0))
    check_windows(source, np.stack([VALUES, VALUES // 2]))
    assert np.array_equal(whole_labels(source), VALUES // 64)
    np.save(tmp_path / "l.npy", VALUES[1:])
    with pytest.raises(BadData, match=r"l\.npy do not cover the image"):
        opened("numpy", tmp_path / "a.npy", axes="zyxc", labels=str(tmp_path / "l.npy"))
    with pytest.raises(UserError, match="labels = 'nowhere' does not exist"):
        opened("numpy", tmp_path / "a.npy", labels="nowhere")


def test_npy_never_unpickles_and_notices_cuts(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([[{}, {}]], dtype=object), allow_pickle=True)
    with pytest.raises(BadData, match=r"o\.npy cannot be read"):
        opened("numpy", tmp_path / "o.npy")
    np.save(tmp_path / "a.npy", VALUES)
    source = opened("numpy", tmp_path / "a.npy")
    cut(tmp_path / "a.npy", 0.5)
    with pytest.raises(BadData, match="has become shorter"):
        whole(source)
    with pytest.raises(BadData, match=r"a\.npy is cut short"):
        opened("numpy", tmp_path / "a.npy")


def test_npz_by_key(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, raw=VALUES, seg=VALUES // 64)
    source = opened("numpy", path, labels="seg")  # the other array is the image
    check_windows(source, VALUES[None])
    assert np.array_equal(whole_labels(source), VALUES // 64)
    check_windows(opened("numpy", f"{path}::seg"), VALUES[None] // 64)
    with pytest.raises(UserError, match="choose `key` from raw, seg"):
        opened("numpy", path)
    with pytest.raises(UserError, match="no array 'em'; choose `key` from raw, seg"):
        opened("numpy", path, key="em")


def test_raw_labels(tmp_path: Path) -> None:
    classes = (VALUES % 3).astype("<u2")
    np.stack([VALUES, VALUES]).tofile(tmp_path / "a.raw")
    classes.tofile(tmp_path / "labels.raw")
    keys: Any = {"shape": [2, *VALUES.shape], "dtype": "uint8", "labels": str(tmp_path / "labels.raw")}
    assert np.array_equal(whole_labels(opened("numpy", tmp_path / "a.raw", **keys, label_dtype="<u2")), classes)
    with pytest.raises(BadData, match=r"labels\.raw has 37440 bytes, but shape = .*, label_dtype = uint8"):
        opened("numpy", tmp_path / "a.raw", **keys)


def test_labels_that_share_no_type_and_axes_that_vanish(tmp_path: Path) -> None:
    for number, dtype in enumerate(("uint64", "int64")):
        for root, values in (("images", VALUES), ("labels", np.full(VALUES.shape, 2**60 + 1, dtype))):
            (tmp_path / root).mkdir(exist_ok=True)
            np.save(tmp_path / root / f"{number}.npy", values)
    with pytest.raises(BadData, match=r"0\.npy are uint64 but .*1\.npy int64, which no type of whole numbers"):
        opened("numpy", tmp_path / "images", labels=str(tmp_path / "labels"))
    np.save(tmp_path / "thin.npy", VALUES[:3])
    with pytest.raises(BadData, match=r"thin\.npy has 3 voxels along z, of which 4 become one"):
        opened("numpy", tmp_path / "thin.npy", voxel_size=[1, 1, 1], spacing=[4, 4, 4])


@pytest.mark.parametrize("order", ["C", "F"])
def test_raw(tmp_path: Path, order: str) -> None:
    path = tmp_path / "a.raw"
    values = VALUES.astype(">i2")
    path.write_bytes(b"header" + values.tobytes(order))
    keys = {"shape": list(VALUES.shape), "dtype": ">i2", "order": order}
    check_windows(opened("numpy", path, offset=6, **keys), values[None])
    with pytest.raises(BadData, match=f"has {6 + values.nbytes} bytes, but shape .* make {values.nbytes}"):
        opened("numpy", path, **keys)
    with pytest.raises(UserError, match="dtype = 'pixels'"):
        opened("numpy", path, shape=[1], dtype="pixels")
    with pytest.raises(UserError, match="go together"):
        opened("numpy", path, shape=[1])
    with pytest.raises(UserError, match="give `shape` and `dtype`"):
        opened("numpy", path)


# NIfTI -----------------------------------------------------------------------------------------------------------


def save_nifti(path: Path, values: np.ndarray, affine: Any = None, scale: tuple[float, float] | None = None) -> Path:
    """A file whose array, as nibabel sees it, is x, y, z: the transpose of what a source gives."""
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values.T, np.diag([0.5, 0.75, 3, 1]) if affine is None else affine)
    image.header.set_xyzt_units("mm")
    if scale is not None:
        image.header.set_slope_inter(*scale)
    nibabel.save(image, path)
    return path


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", ">f4"])
def test_nifti(tmp_path: Path, suffix: str, dtype: str) -> None:
    values = VALUES.astype(dtype)
    source = opened("nifti", save_nifti(tmp_path / f"a{suffix}", values))
    assert (source.axes, source.dtype) == (("z", "y", "x"), np.dtype(dtype).newbyteorder("="))
    assert (source.items[0].spacing, source.items[0].unit) == ((3.0, 0.75, 0.5), "millimeter")
    assert source.describe()["affine"][2] == [0, 0, 3, 0]
    check_windows(source, values[None])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_is_scaled(tmp_path: Path, suffix: str) -> None:
    import nibabel

    path = save_nifti(tmp_path / f"a{suffix}", VALUES.astype(np.int16), scale=(2, -1000))
    expected = nibabel.load(path).get_fdata().T.astype(np.float32)
    assert np.array_equal(expected, VALUES * 2.0 - 1000)
    source = opened("nifti", path)
    assert source.dtype == np.float32
    check_windows(source, expected[None])


def test_nifti_of_four_dimensions(tmp_path: Path) -> None:
    series = np.stack([VALUES, VALUES // 2])  # t, z, y, x
    path = save_nifti(tmp_path / "a.nii.gz", series)
    check_windows(opened("nifti", path, time=1), series[1:])
    channels = opened("nifti", path, axes="czyx")
    assert channels.variables == ("channel0", "channel1")
    check_windows(channels, series)


def test_nifti_folders_with_labels(tmp_path: Path) -> None:
    for n in (10, 2):
        save_nifti(tmp_path / "images" / f"ct{n}.nii.gz", VALUES[:n].astype(np.int16))
        save_nifti(tmp_path / "labels" / f"ct{n}.nii", (VALUES[:n] // 64).astype(np.float32))
    source = opened("nifti", tmp_path / "images", labels=str(tmp_path / "labels"))
    assert [item.name for item in source.items] == ["ct2.nii.gz", "ct10.nii.gz"]
    check_windows(source, VALUES[None, :2].astype(np.int16))
    assert source.label_dtype == np.int32  # floats that are whole numbers
    assert np.array_equal(whole_labels(source), VALUES[:2] // 64)
    (tmp_path / "labels" / "ct10.nii").unlink()
    with pytest.raises(UserError, match=r"holds no labels of .*ct10\.nii\.gz"):
        opened("nifti", tmp_path / "images", labels=str(tmp_path / "labels"))


def test_nifti_labels_by_their_affine(tmp_path: Path) -> None:
    image = save_nifti(tmp_path / "a.nii.gz", VALUES)
    moved = np.diag([0.5, 0.75, 3, 1])
    moved[:3, 3] = [2 * 0.5, 3 * 0.75, 1 * 3]
    box = save_nifti(tmp_path / "box.nii.gz", VALUES[1:5, 3:20, 2:30], moved)
    source = opened("nifti", image, labels=str(box))
    assert np.array_equal(whole(source)[0], VALUES[1:5, 3:20, 2:30])
    assert np.array_equal(whole_labels(source), VALUES[1:5, 3:20, 2:30])
    other = save_nifti(tmp_path / "other.nii.gz", VALUES, np.diag([-0.5, 0.75, 3, 1]))
    with pytest.raises(BadData, match="have another affine"):
        opened("nifti", image, labels=str(other))
    assert np.array_equal(whole_labels(opened("nifti", image, labels=str(other), check_affine=False)), VALUES)
    halves = save_nifti(tmp_path / "halves.nii.gz", VALUES / np.float32(2))
    with pytest.raises(BadData, match="which is no class; write whole numbers"):
        whole_labels(opened("nifti", image, labels=str(halves)))


def write_nnunet(root: Path, labels: Any = None, channels: int = 2) -> Path:
    described = {
        "channel_names": {"0": "CT", "1": "PET"},
        "labels": labels or {"background": 0, "liver": 1, "tumour": 2, "other": 3},
        "file_ending": ".nii.gz",
    }
    (root / "imagesTr").mkdir(parents=True)
    (root / "dataset.json").write_text(json.dumps(described))
    for case in ("case_1", "case_2"):
        for channel in range(channels):
            save_nifti(root / "imagesTr" / f"{case}_{channel:04d}.nii.gz", VALUES // (channel + 1))
        save_nifti(root / "labelsTr" / f"{case}.nii.gz", VALUES // 64)
    return root


def test_nnunet(tmp_path: Path) -> None:
    source = opened("nifti", write_nnunet(tmp_path / "Dataset001_X"))
    assert (source.variables, len(source.items)) == (("CT", "PET"), 2)
    assert source.label_names == {0: "background", 1: "liver", 2: "tumour", 3: "other"}
    check_windows(source, np.stack([VALUES, VALUES // 2]), item=1)
    assert np.array_equal(whole_labels(source, 1), VALUES // 64)
    with pytest.raises(UserError, match=r"has the channels \[0\] of case_1, but 2 are wanted"):
        opened("nifti", write_nnunet(tmp_path / "lost", channels=1))
    with pytest.raises(UserError, match="consecutive numbers from 0"):
        opened("nifti", write_nnunet(tmp_path / "gap", {"background": 0, "tumour": 2}))
    with pytest.raises(UserError, match="regions of several labels"):
        opened("nifti", write_nnunet(tmp_path / "regions", {"background": 0, "all": [1, 2]}))


def test_images_and_labels_side_by_side(tmp_path: Path) -> None:
    """imagesTr and labelsTr without channel numbers, with the Decathlon's dataset.json or without any."""
    save_nifti(tmp_path / "imagesTr" / "ct_1.nii.gz", VALUES)
    save_nifti(tmp_path / "labelsTr" / "ct_1.nii.gz", VALUES // 128)
    source = opened("nifti", tmp_path)
    assert source.variables == ("image",)
    assert np.array_equal(whole_labels(source), VALUES // 128)
    (tmp_path / "dataset.json").write_text(json.dumps({"modality": {"0": "CT"}, "labels": {"0": "none", "1": "lung"}}))
    source = opened("nifti", tmp_path)
    assert (source.variables, source.label_names) == (("CT",), {0: "none", 1: "lung"})
    (tmp_path / "labelsTr" / "ct_1.nii.gz").rename(tmp_path / "labelsTr" / "ct_2.nii.gz")
    assert len(opened("nifti", tmp_path).items) == 1  # no labels are asked for until an objective needs them
    with pytest.raises(UserError, match=r"needs the class of every voxel; .*holds no labels of ct_1; add them there"):
        dataset_of("nifti", tmp_path, labels="voxel")


def dataset_of(kind: str, path: Path, labels: Any = None, **keys: Any) -> Dataset:
    config = kinds.find("source", kind)(path=str(path), **keys)
    return Dataset([config], (4, 8, 8), where="data.train", labels=labels)


@pytest.mark.parametrize(
    ("image", "labels"),
    [
        ("imagesTr/image{}.nii", "labelsTr/label{}.nii"),  # UCF-VIT's Basic_CT
        ("imagesTr/a{}_0000.nii.gz", "labelsTr/a{}.nii.gz"),
        ("image{}.nii", "label{}.nii"),
        ("a{}_img.nii", "a{}_seg.nii"),
        ("volume-{}.nii", "segmentation-{}.nii"),
        ("CT_{}.nii.gz", "CT_{}_mask.nii.gz"),
        ("s{}.nii", "s{}-labels.nii"),
    ],
)
def test_images_and_labels_go_by_usual_names(tmp_path: Path, image: str, labels: str) -> None:
    for number in (2, 10):
        save_nifti(tmp_path / image.format(number), VALUES // number)
        save_nifti(tmp_path / labels.format(number), VALUES // 64 + number)
    source = opened("nifti", tmp_path)
    assert len(source.items) == 2
    for item, number in enumerate((2, 10)):
        assert np.array_equal(whole(source, item)[0], VALUES // number)
        assert np.array_equal(whole_labels(source, item), VALUES // 64 + number)
    if "0000" not in image:
        (note,) = dataset_of("nifti", tmp_path, labels="voxel").notes
        told = rf"data\.train\.0: labels go by name: .*{labels.format(2)} is taken for those of .*{image.format(2)}"
        assert re.match(told, note)
    assert len(opened("nifti", tmp_path / image.format(2)).items) == 1
    (tmp_path / labels.format(10)).unlink()
    source = dataset_of("nifti", tmp_path).sources[0]
    assert (len(source.items), source.label_dtype) == (2, None)
    with pytest.raises(UserError, match="1 of 2 items have labels"):
        dataset_of("nifti", tmp_path, labels="voxel")


@pytest.mark.parametrize("kind", ["nifti", "tiff"])
def test_what_is_just_called_like_labels_stops_no_one_who_needs_none(tmp_path: Path, kind: str) -> None:
    import tifffile

    suffix, save = (".nii", save_nifti) if kind == "nifti" else (".tif", tifffile.imwrite)
    save(tmp_path / f"a{suffix}", VALUES)
    save(tmp_path / f"a_mask{suffix}", np.stack([VALUES, VALUES], -1 if kind == "nifti" else 0))
    for path in (tmp_path / f"a{suffix}", tmp_path):
        source = dataset_of(kind, path).sources[0]
        assert (len(source.items), source.label_dtype) == (1, None)
        with pytest.raises(UserError, match=r"labels that go by name are not used: labels .*a_mask"):
            dataset_of(kind, path, labels="voxel")
    (tmp_path / f"a_mask{suffix}").write_bytes(b"no labels")
    assert len(dataset_of(kind, tmp_path / f"a{suffix}").sources[0].items) == 1
    (tmp_path / f"a{suffix}").write_bytes(b"no image")
    with pytest.raises(UserError, match=rf"a\{suffix}"):
        dataset_of(kind, tmp_path / f"a{suffix}")


@pytest.mark.parametrize("folders", [("", ""), ("imagesTr/", "labelsTr/")])
def test_labels_of_two_names_are_not_chosen_from(tmp_path: Path, folders: tuple[str, str]) -> None:
    save_nifti(tmp_path / f"{folders[0]}a.nii", VALUES)
    for word in ("seg", "mask"):
        save_nifti(tmp_path / f"{folders[1]}a_{word}.nii", VALUES // 64)
    path = tmp_path if folders[0] else tmp_path / "a.nii"
    assert dataset_of("nifti", path).sources[0].label_dtype is None
    with pytest.raises(UserError, match=r"labels of 'a' may be 'a_seg' or 'a_mask'; say which"):
        dataset_of("nifti", path, labels="voxel")


def test_files_named_like_labels_that_fit_no_image_are_images(tmp_path: Path) -> None:
    for name in ("a_img.nii", "a_seg.nii", "b_seg.nii"):
        save_nifti(tmp_path / name, VALUES)
    assert [item.name for item in opened("nifti", tmp_path).items] == ["a_img.nii", "a_seg.nii", "b_seg.nii"]
    save_nifti(tmp_path / "b_img.nii", VALUES)
    save_nifti(tmp_path / "b_img.nii.gz", VALUES)  # two images of one name
    assert len(opened("nifti", tmp_path).items) == 5


def test_stars_say_which_labels_are_whose(tmp_path: Path) -> None:
    for number in (1, 2):
        save_nifti(tmp_path / f"p{number}" / "t1.nii", VALUES // number)
        save_nifti(tmp_path / "drawn" / f"p{number}-t1.by-hand.nii", VALUES // 64)
        save_nifti(tmp_path / "ct" / f"x{number}.nii", VALUES)
        save_nifti(tmp_path / "ct_organs" / f"x{number}_organs.nii", VALUES // 32)
    assert guess_kind(f"{tmp_path}/p*/t1.nii") == "nifti"
    source = opened("nifti", tmp_path / "*" / "t1.nii", labels=f"{tmp_path}/drawn/*-t1.by-hand.nii")
    assert [item.name for item in source.items] == ["p1/t1.nii", "p2/t1.nii"]
    assert np.array_equal(whole(source, 1)[0], VALUES // 2)
    assert np.array_equal(whole_labels(source, 1), VALUES // 64)
    source = opened("nifti", tmp_path / "ct", labels=f"{tmp_path}/ct_organs/*_organs.nii")
    assert np.array_equal(whole_labels(source, 1), VALUES // 32)
    with pytest.raises(UserError, match=r"labels = .*/lost/x1\.nii for .*/ct/x1\.nii, which does not exist"):
        opened("nifti", tmp_path / "ct", labels=f"{tmp_path}/lost/*.nii")
    with pytest.raises(UserError, match=r"has 2 stars, but `path` stands for 1; write as many"):
        opened("nifti", tmp_path / "ct", labels=f"{tmp_path}/*/*.nii")
    with pytest.raises(
        UserError, match=r"holds no labels of .*x1\.nii; expected a file named x1, or say .* with stars"
    ):
        opened("nifti", tmp_path / "ct", labels=str(tmp_path / "ct_organs"))


def test_nifti_labels_of_one_moment_and_of_large_numbers(tmp_path: Path) -> None:
    image = save_nifti(tmp_path / "a.nii", np.zeros((3, 6, 5, 4), np.int16))  # t, z, y, x
    classes = RNG.integers(0, 3, (1, 6, 5, 4)).astype(np.uint8)
    labels = save_nifti(tmp_path / "l.nii", classes)
    source = opened("nifti", image, labels=str(labels), time=2)
    assert np.array_equal(whole_labels(source), classes[0])
    for value in (3e9, np.inf):
        save_nifti(labels, np.full((6, 5, 4), value))
        with pytest.raises(BadData, match=r"l\.nii hold .* which is no class; write whole numbers, up to 2147483647"):
            whole_labels(opened("nifti", image, labels=str(labels)))


def test_numbers_are_channels_only_where_something_says_so(tmp_path: Path) -> None:
    for number in range(3):
        save_nifti(tmp_path / "imagesTr" / f"scan_{number:04d}.nii.gz", VALUES // (number + 1))
    source = opened("nifti", tmp_path)
    assert (len(source.items), source.variables) == (3, ("image",))
    assert np.array_equal(whole(source, 2)[0], VALUES // 3)
    save_nifti(tmp_path / "labelsTr" / "scan.nii.gz", VALUES // 64)  # named as nnU-Net names them
    source = opened("nifti", tmp_path)
    assert (len(source.items), len(source.variables)) == (1, 3)


@pytest.mark.parametrize("colours", [1, 3])
def test_flat_images_of_nnunet_are_tiff(tmp_path: Path, colours: int) -> None:
    import tifffile

    described = {"channel_names": dict(zip("012", "abc"[:colours], strict=False)), "labels": {"none": 0, "cell": 1}}
    (tmp_path / "dataset.json").write_text(json.dumps(described | {"file_ending": ".tif"}))
    for folder in ("imagesTr", "imagesTs", "labelsTr"):
        (tmp_path / folder).mkdir()
    pixels = np.stack([VALUES[0], VALUES[1], VALUES[2]][:colours], -1)
    tifffile.imwrite(tmp_path / "imagesTr" / "c_0000.tif", pixels if colours == 3 else pixels[..., 0])
    tifffile.imwrite(tmp_path / "labelsTr" / "c.tif", VALUES[0] // 128)
    assert guess_kind(str(tmp_path)) == "tiff"
    source = opened("tiff", tmp_path)
    assert (source.variables, source.label_names) == (tuple("abc"[:colours]), {0: "none", 1: "cell"})
    assert np.array_equal(whole(source), VALUES[:colours])
    assert np.array_equal(whole_labels(source), VALUES[0] // 128)
    if colours == 3:
        tifffile.imwrite(tmp_path / "imagesTr" / "c_0000.tif", VALUES[0])
        with pytest.raises(UserError, match=r"c_0000\.tif has 1 of the 3 channels"):
            opened("tiff", tmp_path)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_cut_short(tmp_path: Path, suffix: str) -> None:
    path = save_nifti(tmp_path / f"a{suffix}", VALUES)
    source = opened("nifti", path)
    cut(path, 0.6)
    with pytest.raises(BadData, match=r"a\.nii.* (cannot be read|is cut short|has become shorter)"):
        whole(source)
    path.write_bytes(gzip.compress(b"x" * 1000) if suffix == ".nii.gz" else b"x" * 1000)
    with pytest.raises(BadData, match=r"a\.nii.*cannot be read"):
        opened("nifti", path)


# TIFF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zlib"},
        {"compression": "zlib", "tile": (16, 32), "predictor": True},
        {"compression": "zstd", "rowsperstrip": 7},
        {"tile": (16, 16), "bigtiff": True},
        {"byteorder": ">", "rowsperstrip": 11, "compression": "lzw"},
        {"imagej": True, "metadata": {"axes": "ZYX"}},
    ],
)
def test_tiff_stacks(tmp_path: Path, options: dict) -> None:
    import tifffile

    values = VALUES.astype(np.uint16) * 200
    tifffile.imwrite(tmp_path / "a.tif", values, **options)
    source = opened("tiff", tmp_path / "a.tif")
    assert (source.axes, source.dtype, source.items[0].unit) == (("z", "y", "x"), np.uint16, None)
    check_windows(source, values[None])


def test_tiff_written_by_pillow(tmp_path: Path) -> None:
    from PIL import Image

    pages = [Image.fromarray(page) for page in VALUES]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:], compression="tiff_deflate")
    check_windows(opened("tiff", tmp_path / "a.tif"), VALUES[None])


def test_tiff_colours(tmp_path: Path) -> None:
    import tifffile

    colour = RNG.integers(0, 255, (5, 33, 47, 3)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", colour, photometric="rgb", compression="zlib", tile=(16, 16))
    source = opened("tiff", tmp_path / "a.tif")
    assert source.variables == ("red", "green", "blue")
    check_windows(source, np.moveaxis(colour, -1, 0))
    clear = np.concatenate([colour[0], colour[0][..., :1]], -1)
    tifffile.imwrite(tmp_path / "c.tif", clear, photometric="rgb", extrasamples=["unassalpha"])
    assert opened("tiff", tmp_path / "c.tif").variables == ("red", "green", "blue", "alpha")
    planes = np.moveaxis(colour[0], -1, 0)
    tifffile.imwrite(
        tmp_path / "b.tif", planes, photometric="rgb", planarconfig="separate", compression="zlib", rowsperstrip=9
    )
    source = opened("tiff", tmp_path / "b.tif", variables=["blue", "green"])
    assert source.axes == ("y", "x")
    check_windows(source, planes[[2, 1]])


def test_ome_tiff(tmp_path: Path) -> None:
    import tifffile

    values = RNG.integers(0, 60000, (2, 5, 30, 40)).astype(np.uint16)
    metadata = {
        "axes": "CZYX",
        "PhysicalSizeX": 4,
        "PhysicalSizeXUnit": "nm",
        "PhysicalSizeY": 4,
        "PhysicalSizeYUnit": "nm",
        "PhysicalSizeZ": 30,
        "PhysicalSizeZUnit": "nm",
        "Channel": {"Name": ["dapi", "actin"]},
    }
    tifffile.imwrite(tmp_path / "a.ome.tif", values, metadata=metadata, compression="zlib", tile=(16, 16))
    source = opened("tiff", tmp_path / "a.ome.tif")
    assert source.variables == ("dapi", "actin")
    assert (source.items[0].spacing, source.items[0].unit) == ((30.0, 4.0, 4.0), "nanometer")
    check_windows(source, values)
    series = values.reshape(5, 2, 30, 40)
    tifffile.imwrite(tmp_path / "t.ome.tif", series, metadata={"axes": "TCYX", "PhysicalSizeX": 2, "PhysicalSizeY": 2})
    source = opened("tiff", tmp_path / "t.ome.tif", time=3)
    assert (source.axes, source.items[0].unit) == (("y", "x"), "micrometer")
    check_windows(source, series[3])


def test_ome_tiff_of_several_units_images_and_files(tmp_path: Path) -> None:
    import tifffile

    sizes = {"PhysicalSizeX": 0.1, "PhysicalSizeY": 0.1, "PhysicalSizeZ": 300, "PhysicalSizeZUnit": "nm"}
    tifffile.imwrite(tmp_path / "units.ome.tif", VALUES, metadata={"axes": "ZYX", **sizes})
    item = opened("tiff", tmp_path / "units.ome.tif").items[0]
    assert (item.spacing, item.unit) == (pytest.approx((0.3, 0.1, 0.1)), "micrometer")
    with tifffile.TiffWriter(tmp_path / "two.ome.tif") as tif:
        tif.write(VALUES, metadata={"axes": "ZYX"})
        tif.write(VALUES[:4, :20], metadata={"axes": "ZYX"})
    with pytest.raises(UserError, match=r"images of different shapes .* choose one with `series`"):
        opened("tiff", tmp_path / "two.ome.tif")
    assert np.array_equal(whole(opened("tiff", tmp_path / "two.ome.tif", series=1))[0], VALUES[:4, :20])
    folder = tmp_path / "files"
    folder.mkdir()
    planes = "".join(
        f'<TiffData IFD="0" FirstZ="{z}" PlaneCount="1"><UUID FileName="{name}.ome.tif">urn:uuid:{z}</UUID></TiffData>'
        for z, name in enumerate("ab")
    )
    for z, name in enumerate("ab"):
        text = (
            f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{z}"><Image ID="Image:0">'
            '<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="52" SizeY="40" SizeZ="2" SizeC="1" '
            f'SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>{planes}</Pixels></Image></OME>'
        )
        tifffile.imwrite(folder / f"{name}.ome.tif", VALUES[z], description=text, metadata=None)
    source = opened("tiff", folder)  # either file tells of the whole volume
    assert len(source.items) == 1
    assert np.array_equal(whole(source)[0], VALUES[:2])


@pytest.mark.parametrize("options", [{}, {"compression": "zlib"}])
def test_pages_written_one_by_one_are_a_stack(tmp_path: Path, options: dict) -> None:
    import tifffile

    path = tmp_path / "a.tif"
    for plane in VALUES:
        tifffile.imwrite(path, plane, append=True, **options)
    check_windows(opened("tiff", path), VALUES[None], count=5)
    assert np.array_equal(whole(opened("tiff", path, series=2))[0], VALUES[2])
    cut(path, 0.99)
    with pytest.raises(BadData, match="cut short"):
        opened("tiff", path)


def test_imagej_hyperstack(tmp_path: Path) -> None:
    import tifffile

    values = RNG.integers(0, 60000, (2, 5, 3, 30, 40)).astype(np.uint16)
    tifffile.imwrite(
        tmp_path / "a.tif",
        values,
        imagej=True,
        resolution=(4, 8),
        metadata={"spacing": 2.5, "unit": "um", "axes": "TZCYX"},
    )
    source = opened("tiff", tmp_path / "a.tif", time=1)
    assert (source.items[0].spacing, source.items[0].unit) == ((2.5, 0.125, 0.25), "micrometer")
    check_windows(source, np.moveaxis(values[1], 1, 0))


def test_tiff_pyramid(tmp_path: Path) -> None:
    import tifffile

    fine = RNG.random((6, 64, 97)).astype(np.float32)
    coarse = fine[:, ::2, :96:2]
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as tif:
        metadata = {"axes": "ZYX", "PhysicalSizeX": 4, "PhysicalSizeY": 4, "PhysicalSizeZ": 8}
        tif.write(fine, subifds=1, metadata=metadata, tile=(16, 16), compression="zlib")
        tif.write(coarse, subfiletype=1, tile=(16, 16), compression="zlib")
    source = opened("tiff", tmp_path / "a.ome.tif")
    assert [level["spacing"] for level in source.describe()["levels"]] == [[8.0, 4.0, 4.0], [8.0, 8.0, 8.0]]
    check_windows(source, fine[None])
    source = opened("tiff", tmp_path / "a.ome.tif", spacing=[12, 12, 12])
    assert (source.level, source.items[0].scale) == (1, (1.5, 1.5, 1.5))
    assert source.describe()["translation"] == [0.0, 2.0, 2.0]
    check_windows(source, coarse[None])


def test_tiff_folders(tmp_path: Path) -> None:
    import tifffile

    (tmp_path / "stacks").mkdir()
    for n in (10, 2):
        tifffile.imwrite(tmp_path / "stacks" / f"s{n}.tif", VALUES[:n])
    source = opened("tiff", tmp_path / "stacks")
    assert [(item.name, item.shape[0]) for item in source.items] == [("s2.tif", 2), ("s10.tif", 9)]
    check_windows(source, VALUES[None, :2])


def test_a_folder_of_slices(tmp_path: Path) -> None:
    import tifffile

    for name, values in (("em", VALUES), ("seg", VALUES // 64)):
        (tmp_path / name).mkdir()
        for n, plane in enumerate(values):
            tifffile.imwrite(tmp_path / name / f"slice{n + 5}.tif", plane, compression="zlib")  # 5 ... 13
    source = opened("tiff", tmp_path / "em", slices_are="z", labels=str(tmp_path / "seg"), voxel_size=[30, 4, 4])
    assert (source.axes, len(source.items), source.items[0].chunk[0]) == (("z", "y", "x"), 1, 1)
    check_windows(source, VALUES[None])
    assert np.array_equal(whole_labels(source), VALUES // 64)
    tifffile.imwrite(tmp_path / "em" / "slice7.tif", VALUES[0, 1:])
    with pytest.raises(BadData, match=r"slice7\.tif is uint8 of shape .* slices must be flat and all alike"):
        opened("tiff", tmp_path / "em", slices_are="z")


def test_tiff_labels_beside(tmp_path: Path) -> None:
    import tifffile

    tifffile.imwrite(tmp_path / "image.tif", VALUES)
    tifffile.imwrite(tmp_path / "label.tif", VALUES // 64)
    for path in (tmp_path, tmp_path / "image.tif"):
        source = opened("tiff", path)
        assert (len(source.items), source.describe()["labels"]) == (1, [str(tmp_path / "label.tif")])
        assert np.array_equal(whole_labels(source), VALUES // 64)
    tifffile.imwrite(tmp_path / "image2.tif", VALUES)
    source = opened("tiff", tmp_path)
    assert (len(source.items), source.label_dtype) == (2, None)  # one has labels, one has none
    tifffile.imwrite(tmp_path / "label.tif", VALUES[:, :-1])
    with pytest.raises(UserError, match=r"are not used: .* do not cover the image"):
        dataset_of("tiff", tmp_path, labels="voxel")


def test_tiff_sidecar_and_nnunet(tmp_path: Path) -> None:
    import tifffile

    (tmp_path / "imagesTr").mkdir()
    (tmp_path / "labelsTr").mkdir()
    (tmp_path / "dataset.json").write_text(
        json.dumps({"channel_names": {"0": "em"}, "labels": {"background": 0, "cell": 1}, "file_ending": ".tif"})
    )
    tifffile.imwrite(tmp_path / "imagesTr" / "a_0000.tif", VALUES)
    tifffile.imwrite(tmp_path / "labelsTr" / "a.tif", VALUES // 128)
    for folder in ("imagesTr", "labelsTr"):
        (tmp_path / folder / "a.json").write_text(json.dumps({"spacing": [7.6, 0.5, 0.5]}))
    source = opened("tiff", tmp_path)
    assert (source.variables, source.items[0].spacing, source.items[0].unit) == (("em",), (7.6, 0.5, 0.5), None)
    assert np.array_equal(whole_labels(source), VALUES // 128)
    with pytest.raises(UserError, match=r"file_ending = '\.tif', but this kind reads \.nii\.gz"):
        opened("nifti", tmp_path)


@pytest.mark.parametrize(
    "options", [{"compression": "zlib"}, {}, {"imagej": True}, {"bigtiff": True, "tile": (16, 16)}]
)
@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
def test_tiff_cut_short(tmp_path: Path, options: dict, share: float) -> None:
    """Readers would give fewer pages, with only a line in a log."""
    import tifffile

    tifffile.imwrite(tmp_path / "a.tif", VALUES, **options)
    cut(tmp_path / "a.tif", share)
    with pytest.raises(BadData, match=r"a\.tif .*(cut short|pages are lost|cannot be read)"):
        opened("tiff", tmp_path / "a.tif")


def test_tiff_that_lost_pages_or_data(tmp_path: Path) -> None:
    import tifffile

    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tif:  # nine pages that claim to be ten
        for plane in VALUES:
            tif.write(plane, contiguous=False, description='{"shape": [10, 40, 52]}', metadata=None, compression="zlib")
    with pytest.raises(BadData, match=r"its own header says 10 x 40 x 52|pages are lost"):
        opened("tiff", path)
    tifffile.imwrite(path, VALUES, compression="zlib", tile=(16, 16))
    source = opened("tiff", path)
    cut(path, 0.5)
    with pytest.raises(BadData, match=r"a\.tif, page \d+, segment \d+"):
        whole(source)
    tifffile.imwrite(path, VALUES, compression="zlib", tile=(16, 16))
    with tifffile.TiffFile(path) as tif:
        at, count = tif.pages[4].dataoffsets[2], tif.pages[4].databytecounts[2]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * count)
    source = opened("tiff", path)
    assert np.array_equal(source.read(0, (slice(0, 4), slice(0, 40), slice(0, 52)))[0], VALUES[:4])
    with pytest.raises(BadData, match="page 4, segment 2 cannot be read"):
        whole(source)


def test_tiff_tiles_never_written(tmp_path: Path) -> None:
    """GDAL leaves out tiles that are empty when it is asked to."""
    values = np.zeros((1, 64, 64), np.uint8)
    values[0, :16, 16:] = VALUES[0, :16, :48]
    path = write_scene(tmp_path / "a.tif", values, sparse_ok=True, compress="deflate")
    with pytest.raises(MissingData, match=r"page 0, segment 0: it was never written.*missing: fill"):
        whole(opened("tiff", path))
    source = opened("tiff", path, missing="fill")
    assert np.array_equal(whole(source), values)
    assert source.filled == 13


def test_tiff_with_images_of_different_shapes(tmp_path: Path) -> None:
    import tifffile

    with tifffile.TiffWriter(tmp_path / "a.tif") as tif:
        tif.write(VALUES[:5], metadata=None)
        tif.write(VALUES[0, :11], metadata=None)
    with pytest.raises(UserError, match=r"images of different shapes or types .* choose one with `series`"):
        opened("tiff", tmp_path / "a.tif")
    assert opened("tiff", tmp_path / "a.tif", series=1).items[0].shape == (11, 52)


@pytest.mark.skipif(not (SHARED / "isbi2012").is_dir(), reason="ISBI-2012 is not here")
def test_isbi_opens_by_path() -> None:
    import tifffile

    folder = SHARED / "isbi2012"
    image = tifffile.imread(folder / "image.tif")
    for path in (folder, folder / "image.tif"):
        assert guess_kind(str(path)) == "tiff"
        source = opened("tiff", path, label_map={255: 1})
        assert source.items[0].shape == (30, 512, 512)
    check_windows(source, image[None], count=4)
    assert np.array_equal(whole_labels(source), tifffile.imread(folder / "label.tif") == 255)


# HDF5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 16, 16), "compression": "gzip"}, {"chunks": True}])
def test_hdf5(tmp_path: Path, options: dict) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        raw = file.create_dataset("volumes/raw", data=VALUES, **options)
        raw.attrs["resolution"] = [40.0, 4.0, 4.0]
        seg = file.create_dataset("volumes/labels/ids", data=VALUES[2:6, 5:30, 4:40].astype(np.uint64), **options)
        seg.attrs["resolution"], seg.attrs["offset"] = [40.0, 4.0, 4.0], [80.0, 20.0, 16.0]
        file["names"] = np.arange(3)
    with pytest.raises(UserError, match="choose `key` from volumes/labels/ids, volumes/raw"):
        opened("hdf5", path)
    for source in (opened("hdf5", f"{path}::volumes/raw"), opened("hdf5", path, key="/volumes/raw")):
        assert (source.items[0].spacing, source.items[0].unit) == ((40.0, 4.0, 4.0), "nanometer")
    check_windows(source, VALUES[None])
    source = opened("hdf5", path, labels="volumes/labels/ids")  # the other array is the image
    check_windows(source, VALUES[None, 2:6, 5:30, 4:40])
    assert np.array_equal(whole_labels(source), VALUES[2:6, 5:30, 4:40])
    with pytest.raises(UserError, match=r"key = 'em' is no dataset of .* choose from volumes/labels/ids, volumes/raw"):
        opened("hdf5", path, key="em")
    with pytest.raises(UserError, match=r"labels = 'ids' does not exist.* one of its datasets"):
        opened("hdf5", path, key="volumes/raw", labels="ids")


def test_a_key_behind_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py, fsspec = pytest.importorskip("h5py"), pytest.importorskip("fsspec")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"], file["other"] = VALUES, VALUES[:1]
    fsspec.filesystem("memory").put(str(tmp_path / "a.h5"), "/keys/a.h5")
    for path in (f"{tmp_path}/a.h5::raw", f"file://{tmp_path}/a.h5::/raw", "memory://keys/a.h5::raw"):
        assert guess_kind(path) == "hdf5"
        assert np.array_equal(whole(opened("hdf5", path))[0], VALUES)


def test_hdf5_axes_and_folders(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    for n in (1, 2):
        with h5py.File(tmp_path / f"{n}.h5", "w") as file:
            raw = file.create_dataset("raw", data=np.stack([VALUES, VALUES // n], -1))
            raw.attrs["element_size_um"] = [0.04, 0.004, 0.004]
            for axis, name in enumerate("zyxc"):
                raw.dims[axis].label = name
        with h5py.File(tmp_path / f"{n}_seg.hdf5", "w") as file:
            file["seg"] = VALUES // 64
    (tmp_path / "seg").mkdir()
    for n in (1, 2):
        (tmp_path / f"{n}_seg.hdf5").rename(tmp_path / "seg" / f"{n}.hdf5")
    source = opened("hdf5", tmp_path, labels=str(tmp_path / "seg"), unit="nanometer")
    assert len(source.items) == 2
    assert source.items[0].spacing == pytest.approx((40, 4, 4))
    check_windows(source, np.stack([VALUES, VALUES // 2]), item=1)
    assert np.array_equal(whole_labels(source, 1), VALUES // 64)


def test_hdf5_chunks_never_written(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        part = file.create_dataset("part", VALUES.shape, "u1", chunks=(4, 20, 20))
        part[:4] = VALUES[:4]
        file.create_dataset("none", VALUES.shape, "u1")
    source = opened("hdf5", path, key="part")
    first = (slice(0, 4), slice(0, 40), slice(0, 52))
    assert np.array_equal(source.read(0, first)[0], VALUES[:4])
    with pytest.raises(MissingData, match=r"chunk \[1, 0, 0\] at voxel \[4, 0, 0\] was never written.*missing: fill"):
        whole(source)
    source = opened("hdf5", path, key="part", missing="fill")
    filled = whole(source)[0]
    assert source.filled == 2 * 2 * 3
    assert np.array_equal(filled, np.where(np.arange(9)[:, None, None] < 4, VALUES, 0))
    with pytest.raises(MissingData, match="none of its voxels was ever written"):
        opened("hdf5", path, key="none")


def test_hdf5_in_several_files(tmp_path: Path) -> None:
    import h5py

    for name, values in (("a", VALUES[:4]), ("b", VALUES[4:])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["raw"] = values
    layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
    layout[:4] = h5py.VirtualSource("a.h5", "raw", VALUES[:4].shape)
    layout[4:] = h5py.VirtualSource("b.h5", "raw", VALUES[4:].shape)
    whole_file, half = tmp_path / "all" / "v.h5", h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
    whole_file.parent.mkdir()
    half[:4] = h5py.VirtualSource("../a.h5", "raw", VALUES[:4].shape)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("raw", layout)
    with h5py.File(whole_file, "w") as file:
        file.create_virtual_dataset("raw", half)
    source = opened("hdf5", tmp_path / "v.h5")
    assert np.array_equal(whole(source)[0], VALUES)
    with pytest.raises(BadData, match=r"names the file '\.\./a\.h5', which does not lie in its own folder.*--trust"):
        opened("hdf5", whole_file)
    with trusted(), pytest.raises(MissingData, match=r"of its voxels are in no file.*missing: fill"):
        opened("hdf5", whole_file)
    (tmp_path / "b.h5").unlink()
    with pytest.raises(MissingData, match=r"b\.h5, which holds a part of it, is gone"):
        whole(source)
    with pytest.raises(MissingData, match=r"v\.h5::raw: the file .*b\.h5, which holds a part of it, is gone"):
        opened("hdf5", tmp_path / "v.h5")
    filled = opened("hdf5", tmp_path / "v.h5", missing="fill")
    assert np.array_equal(whole(filled)[0], np.where(np.arange(9)[:, None, None] < 4, VALUES, 0))
    assert filled.filled == 1
    with h5py.File(tmp_path / "e.h5", "w") as file:
        external = [(str(tmp_path / "e.raw"), 0, VALUES.nbytes)]
        file.create_dataset("raw", VALUES.shape, "u1", external=external)[:] = VALUES
    assert np.array_equal(whole(opened("hdf5", tmp_path / "e.h5"))[0], VALUES)
    cut(tmp_path / "e.raw", 0.5)
    with pytest.raises(MissingData, match=r"e\.raw, which holds a part of it, is cut short"):
        opened("hdf5", tmp_path / "e.h5")


def test_hdf5_parts_of_parts_that_are_gone(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = VALUES
    for name, part in (("b", "a"), ("c", "b")):
        layout = h5py.VirtualLayout(VALUES.shape, VALUES.dtype)
        layout[:] = h5py.VirtualSource(f"{part}.h5", "raw", VALUES.shape)
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_virtual_dataset("raw", layout)
    assert np.array_equal(whole(opened("hdf5", tmp_path / "c.h5"))[0], VALUES)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("raw")
    with pytest.raises(MissingData, match=r"c\.h5::raw: .*a\.h5::raw, which is a part of it, is gone"):
        opened("hdf5", tmp_path / "c.h5")
    (tmp_path / "a.h5").unlink()
    with pytest.raises(MissingData, match=r"c\.h5::raw: the file .*a\.h5, which holds a part of it, is gone"):
        opened("hdf5", tmp_path / "c.h5")
    assert not whole(opened("hdf5", tmp_path / "c.h5", missing="fill"))[0].any()


def test_hdf5_cut_short_or_damaged(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        raw = file.create_dataset("raw", data=VALUES, chunks=(4, 20, 20), compression="gzip", fletcher32=True)
        at = raw.id.get_chunk_info(3).byte_offset
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:at] + b"\0" * 40 + whole_file[at + 40 :])
    with pytest.raises(BadData, match=r"a\.h5::raw cannot be read"):
        whole(opened("hdf5", path))
    (tmp_path / "b.h5").write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(BadData, match=r"b\.h5 cannot be read"):
        opened("hdf5", tmp_path / "b.h5")


# netCDF ----------------------------------------------------------------------------------------------------------


def write_fields(path: Path, south_first: bool = False, **options: Any) -> dict[str, np.ndarray]:
    xarray = pytest.importorskip("xarray")
    latitude = np.linspace(90, -90, 19)
    fields = {
        "u": RNG.normal(size=(3, 2, 19, 36)).astype(np.float32),
        "t2m": RNG.normal(size=(3, 19, 36)).astype(np.float32),
        "orography": RNG.normal(size=(19, 36)).astype(np.float32),
    }
    dims = ("time", "level", "latitude", "longitude")
    dataset = xarray.Dataset(
        {
            "u": (dims, fields["u"], {"units": "m/s", "long_name": "wind"}),
            "t2m": (("time", *dims[2:]), fields["t2m"]),
            "orography": (dims[2:], fields["orography"]),
            "note": ((), 1.0),
        },
        {
            "time": np.array([0, 6, 12]),
            "level": [500, 850],
            "latitude": ("latitude", latitude[::-1] if south_first else latitude, {"units": "degrees_north"}),
            "longitude": ("longitude", np.arange(36) * 10.0, {"units": "degrees_east"}),
        },
    )
    if path.suffix == ".zarr":
        dataset.to_zarr(path)
    else:
        dataset.to_netcdf(path, **options)
    return fields


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_64BIT", "zarr"])
def test_fields_are_variables(tmp_path: Path, format: str) -> None:
    path = tmp_path / ("a.zarr" if format == "zarr" else "a.nc")
    fields = write_fields(path, **({} if format == "zarr" else {"format": format, "engine": "netcdf4"}))
    assert set(opened("netcdf", path).variables) == {"u@500", "u@850", "t2m", "orography"}
    source = opened("netcdf", path, variables=["u", "t2m", "orography"])
    assert (source.axes, source.dtype) == (("latitude", "longitude"), np.float32)
    assert [item.name for item in source.items] == ["time=0", "time=6", "time=12"]
    assert (source.items[0].spacing, source.items[0].unit) == ((10.0, 10.0), "degree")
    assert source.describe()["latitude"] == "north first"
    assert source.describe()["fields"]["u"] == {"long_name": "wind", "units": "m/s"}
    for item in (0, 2):
        expected = np.stack([*fields["u"][item], fields["t2m"][item], fields["orography"]])
        check_windows(source, expected, item)
    picked = opened("netcdf", path, variables=["t2m", "u"], start=0.34)
    assert picked.variables == ("t2m", "u@500", "u@850")
    check_windows(picked, np.stack([fields["t2m"][1], *fields["u"][1]]))
    check_windows(opened("netcdf", path, variables=["u@850"]), fields["u"][0, 1:])


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_of_xarrays_zarr(tmp_path: Path, version: int) -> None:
    xarray = pytest.importorskip("xarray")
    values = RNG.normal(size=(3, 20, 30)).astype(np.float32)
    dataset = xarray.Dataset({"t": (("time", "lat", "lon"), values)})
    dataset.to_zarr(tmp_path / "a.zarr", encoding={"t": {"chunks": (1, 10, 10)}}, zarr_format=version)
    (tmp_path / "a.zarr" / "t" / ("c/1/0/2" if version == 3 else "1.0.2")).unlink()
    source = opened("netcdf", tmp_path / "a.zarr")
    assert source.items[0].chunk == (10, 10)
    check_windows(source, values[:1])
    assert np.array_equal(source.read(1, (slice(0, 20), slice(0, 20)))[0], values[1, :, :20])
    with pytest.raises(MissingData, match=r"chunk \{1, 0, 2\} in .* is missing: .*missing: fill"):
        whole(source, 1)
    filled = opened("netcdf", tmp_path / "a.zarr", missing="fill", nodata="fill")
    assert np.array_equal(whole(filled, 1)[0, :, :20], values[1, :, :20])
    assert filled.filled == 1


def test_lost_and_broken_chunks_of_fields_are_seen(tmp_path: Path) -> None:
    """As the zarr source sees them: chunks inside shards, and compressed ones that are cut."""
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    names = ("time", "lat", "lon")
    array = group.create_array(
        "u", shape=(2, 8, 8), dtype="i2", chunks=(1, 4, 4), shards=(1, 8, 8), dimension_names=names,
        attributes={"scale_factor": 0.5, "add_offset": 10.0, "_FillValue": -1},
    )  # fmt: skip
    array[0] = np.arange(64).reshape(8, 8)
    array[1, :4] = 3
    source = opened("netcdf", tmp_path / "a.zarr")
    assert np.array_equal(whole(source)[0], 10 + np.arange(64).reshape(8, 8) / 2)
    with pytest.raises(MissingData, match=r"chunk \{1, 1, 0\} in .* is missing"):
        whole(source, 1)
    values = RNG.integers(0, 65535, (2, 64, 64)).astype("u2")
    xarray = pytest.importorskip("xarray")
    dataset = xarray.Dataset({"u": (names, values)})
    dataset.to_zarr(tmp_path / "b.zarr", zarr_format=2, encoding={"u": {"chunks": (1, 64, 64)}})
    cut(tmp_path / "b.zarr" / "u" / "1.0.0", 0.5)
    source = opened("netcdf", tmp_path / "b.zarr")
    assert np.array_equal(whole(source), values[:1])
    with pytest.raises(BadData, match=r"1\.0\.0 cannot be read"):
        whole(source, 1)


def test_levels_as_an_axis(tmp_path: Path) -> None:
    fields = write_fields(tmp_path / "a.nc")
    source = opened("netcdf", tmp_path / "a.nc", vertical="axis")
    assert (source.axes, source.variables) == (("level", "latitude", "longitude"), ("u",))
    check_windows(source, fields["u"][1][None], item=1)
    with pytest.raises(UserError, match="has an axis of levels; leave `vertical` out"):
        opened("netcdf", tmp_path / "a.nc", vertical="axis", variables=["t2m"])
    with pytest.raises(UserError, match="has no 'rain'; choose from u@500"):
        opened("netcdf", tmp_path / "a.nc", variables=["rain"])
    with pytest.raises(UserError, match="no labels"):
        opened("netcdf", tmp_path / "a.nc", labels="mask")


def test_latitude_order(tmp_path: Path) -> None:
    fields = write_fields(tmp_path / "a.nc", south_first=True)
    source = opened("netcdf", tmp_path / "a.nc", variables=["t2m"])
    assert source.describe()["latitude"] == "south first"
    check_windows(source, fields["t2m"][:1])
    turned = opened("netcdf", tmp_path / "a.nc", variables=["t2m"], latitude="north_first")
    check_windows(turned, fields["t2m"][:1, ::-1])


def test_packed_and_absent_values(tmp_path: Path) -> None:
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, size in (("y", 6), ("x", 8)):
            file.createDimension(name, size)
        field = file.createVariable("sst", "i2", ("y", "x"), fill_value=-999)
        field.scale_factor, field.add_offset = 0.5, 10.0
        values = np.arange(48, dtype=np.float64).reshape(6, 8)
        masked = np.ma.masked_array(values, values == 21)
        field[:] = masked
    source = opened("netcdf", tmp_path / "a.nc")
    assert np.array_equal(source.read(0, (slice(0, 2), slice(0, 8)))[0], values[:2])
    with pytest.raises(BadData, match=r"a\.nc::sst holds nan at y = 2, x = 5"):
        whole(source)
    filled = whole(opened("netcdf", tmp_path / "a.nc", nodata="fill", fill_value=-1))[0]
    assert np.array_equal(filled, np.where(values == 21, -1, values))


@pytest.mark.parametrize("format", ["NETCDF4", "NETCDF3_CLASSIC", "NETCDF3_64BIT", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("unlimited", [(), ("time",)])
def test_netcdf_cut_short(tmp_path: Path, format: str, unlimited: tuple) -> None:
    """Classic files would read as zeros beyond their end."""
    path = tmp_path / "a.nc"
    write_fields(path, format=format, engine="netcdf4", unlimited_dims=unlimited)
    assert opened("netcdf", path).read(2, (slice(0, 19), slice(0, 36))).shape == (4, 19, 36)
    data = path.read_bytes()
    for keep in (len(data) // 2, len(data) - 8):
        (tmp_path / "b.nc").write_bytes(data[:keep])
        with pytest.raises(BadData, match=r"b\.nc"):
            whole(opened("netcdf", tmp_path / "b.nc"), 2)


def test_netcdf_never_written(tmp_path: Path) -> None:
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(tmp_path / "a.nc", "w") as file:
        for name, size in (("y", 6), ("x", 8)):
            file.createDimension(name, size)
        file.createVariable("sst", "f4", ("y", "x"))[:3] = 1
    with pytest.raises(BadData, match=r"holds 9\.96\S+ at y = 3, x = 0"):
        whole(opened("netcdf", tmp_path / "a.nc"))
    marks = [("i2", "", "-32767"), ("i2", "packed", "nan"), ("u4", "", "4294967295"), ("i2", "unsigned", "32769")]
    for kind, way, found in marks:
        path = tmp_path / f"{kind}{way}.nc"
        with netcdf.Dataset(path, "w") as file:
            for name, size in (("y", 6), ("x", 8)):
                file.createDimension(name, size)
            field = file.createVariable("sst", kind, ("y", "x"))
            if way == "unsigned":
                field.setncattr("_Unsigned", "true")
            if way == "packed":
                field.scale_factor, field.add_offset = 0.5, 10.0
            field[:3] = 20
        source = opened("netcdf", path)
        assert (source.read(0, (slice(0, 3), slice(0, 8))) == 20).all()
        with pytest.raises(BadData, match=f"holds {found} at y = 3, x = 0"):
            whole(source)
        filled = opened("netcdf", path, nodata="fill", fill_value=7)
        assert (whole(filled)[0] == np.repeat([20, 7], 3)[:, None]).all()


@pytest.mark.skipif(not (SHARED / "era_interim").is_dir(), reason="ERA-Interim is not here")
def test_era_interim_opens_by_path() -> None:
    path = SHARED / "era_interim" / "eraint_uvz.nc"
    assert guess_kind(str(path)) == "netcdf"
    source = opened("netcdf", path)
    assert (len(source.items), source.items[0].shape, len(source.variables)) == (2, (241, 480), 9)
    import netCDF4

    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        assert np.allclose(whole(source, 1)[4], file["u"][1, 1], rtol=1e-6)


@pytest.mark.parametrize("version", [2, 3])
def test_xarrays_zarr_is_known_by_its_arrays(tmp_path: Path, version: Any) -> None:
    xarray = pytest.importorskip("xarray")
    values = RNG.normal(size=(4, 8, 8)).astype(np.float32)
    fields = xarray.Dataset({"u": (("time", "lat", "lon"), values)}, {"time": range(4)})
    fields.to_zarr(tmp_path / "a.zarr", zarr_format=version, consolidated=False)
    assert guess_kind(str(tmp_path / "a.zarr")) == "netcdf"


# GeoTIFF ---------------------------------------------------------------------------------------------------------


def write_scene(path: Path, values: np.ndarray, corner: tuple[float, float] = (5e5, 4e6), **options: Any) -> Path:
    rasterio = pytest.importorskip("rasterio")
    from rasterio.transform import from_origin

    path.parent.mkdir(parents=True, exist_ok=True)
    keys = {"crs": "EPSG:32633", "tiled": True, "blockxsize": 16, "blockysize": 16, "compress": "deflate", **options}
    count, height, width = values.shape
    with rasterio.open(
        path,
        "w",
        driver="GTiff",
        width=width,
        height=height,
        count=count,
        dtype=values.dtype,
        transform=from_origin(*corner, 10, 10),
        **keys,
    ) as raster:
        raster.write(values)
        raster.set_band_description(1, "nir")
    return path


BANDS = RNG.integers(1, 4000, (3, 50, 70)).astype(np.uint16)


def test_geotiff(tmp_path: Path) -> None:
    source = opened("geotiff", write_scene(tmp_path / "a.tif", BANDS))
    assert (source.axes, source.variables) == (("y", "x"), ("nir", "band2", "band3"))
    item, facts = source.items[0], source.describe()
    assert (item.spacing, item.unit, item.chunk) == ((10.0, 10.0), "meter", (16, 16))
    assert (facts["crs"], facts["transform"]) == ("EPSG:32633", [10.0, 0.0, 5e5, 0.0, -10.0, 4e6])
    check_windows(source, BANDS)
    check_windows(opened("geotiff", tmp_path / "a.tif", variables=["band3", "nir"]), BANDS[[2, 0]])


def test_geotiff_without_data(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    values = BANDS.copy()
    values[1, 30, 40] = 0
    path = write_scene(tmp_path / "a.tif", values, nodata=0)
    with pytest.raises(BadData, match=r"a\.tif holds 0 at c = 1, y = 30, x = 40, which marks no data"):
        whole(opened("geotiff", path))
    check_windows(opened("geotiff", path, region={"y": [0, 30]}), values[:, :30])
    check_windows(opened("geotiff", path, nodata="fill", fill_value=9), np.where(values == 0, 9, values))

    alpha = np.full((1, 50, 70), 255, np.uint8)
    alpha[0, 10:, 20:] = 0
    colours = np.concatenate([(BANDS % 255).astype(np.uint8), alpha])
    path = write_scene(tmp_path / "rgba.tif", colours, photometric="RGB", alpha="YES")
    with rasterio.open(path) as raster:
        assert raster.colorinterp[3].name == "alpha"
    source = opened("geotiff", path, nodata="fill")
    assert source.variables == ("nir", "green", "blue")  # alpha is no variable
    check_windows(source, np.where(alpha > 0, colours[:3], 0))


def test_geotiff_scales_and_types(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    path = write_scene(tmp_path / "a.tif", BANDS)
    with rasterio.open(path, "r+") as raster:
        raster.scales, raster.offsets = (0.5, 1.0, 2.0), (0.0, -3.0, 1.0)
    source = opened("geotiff", path)
    assert (source.dtype, source.describe()["scales"]) == (np.dtype(np.float32), [0.5, 1.0, 2.0])
    packed = BANDS * np.array([0.5, 1, 2])[:, None, None] + np.array([0, -3, 1])[:, None, None]
    check_windows(source, packed.astype(np.float32))
    check_windows(opened("geotiff", path, variables=["band3"]), packed[2:].astype(np.float32))
    keys = {"driver": "GTiff", "width": 8, "height": 8, "count": 1}
    with rasterio.open(tmp_path / "radar.tif", "w", dtype="complex_int16", **keys) as raster:
        raster.write(np.ones((1, 8, 8), np.complex64))
    with pytest.raises(BadData, match=r"radar\.tif has the type complex_int16; save"):
        opened("geotiff", tmp_path / "radar.tif")


def test_geotiff_blocks_never_written(tmp_path: Path) -> None:
    values = np.zeros((2, 64, 64), np.uint8)
    values[:, :16, 16:] = VALUES[:2, :16, :48]
    path = write_scene(tmp_path / "a.tif", values, sparse_ok=True, compress="deflate")
    source = opened("geotiff", path)
    assert np.array_equal(source.read(0, (slice(0, 16), slice(16, 64))), values[:, :16, 16:])
    with pytest.raises(MissingData, match=r"the block at y = 0, x = 0 of band 1 was never written.*missing: fill"):
        whole(source)
    filled = opened("geotiff", path, missing="fill")
    assert np.array_equal(whole(filled), values)
    assert filled.filled in (13, 26)  # by how the bands lie


def test_geotiff_overviews_are_levels(tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    path = write_scene(tmp_path / "a.tif", BANDS)
    with rasterio.open(path, "r+") as raster:
        raster.build_overviews([2, 4], rasterio.enums.Resampling.average)
    with rasterio.open(path, overview_level=0) as raster:
        half = raster.read()
    source = opened("geotiff", path, spacing=[25, 25])
    assert (source.level, source.items[0].scale) == (1, (1.25, 1.25))
    check_windows(source, half)


def test_geotiff_labels(tmp_path: Path) -> None:
    classes = (BANDS[:1] % 5).astype(np.uint8)
    for n in (1, 2):
        write_scene(tmp_path / "images" / f"{n}.tif", BANDS)
        write_scene(tmp_path / "classes" / f"{n}.tif", classes)
    source = opened("geotiff", tmp_path / "images", labels=str(tmp_path / "classes"))
    assert np.array_equal(whole_labels(source, 1), classes[0])
    image = tmp_path / "images" / "1.tif"
    inside = write_scene(tmp_path / "inside.tif", classes[:, 5:30, 7:60], (5e5 + 70, 4e6 - 50))
    source = opened("geotiff", image, labels=str(inside))
    assert np.array_equal(whole(source), BANDS[:, 5:30, 7:60])
    assert np.array_equal(whole_labels(source), classes[0, 5:30, 7:60])
    elsewhere = write_scene(tmp_path / "elsewhere.tif", classes, crs="EPSG:32634")
    with pytest.raises(BadData, match=r"are in EPSG:32634, the image .* in EPSG:32633"):
        opened("geotiff", image, labels=str(elsewhere))
    shifted = write_scene(tmp_path / "shifted.tif", classes, (5e5 + 3, 4e6))
    with pytest.raises(BadData, match="do not cover the image"):
        opened("geotiff", image, labels=str(shifted))


def test_geotiff_cut_short(tmp_path: Path) -> None:
    path = write_scene(tmp_path / "a.tif", BANDS)
    cut(path, 0.6)
    with pytest.raises(BadData, match=r"a\.tif.* cannot be read"):
        whole(opened("geotiff", path))


@pytest.mark.parametrize("kind", ["numpy", "tiff"])
def test_a_file_that_may_not_be_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tifffile

    np.save(tmp_path / "a.npy", VALUES)
    tifffile.imwrite(tmp_path / "a.tif", VALUES)
    plain = builtins.open

    def refuse(file: Any, *arguments: Any, **keys: Any) -> Any:
        if str(file).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return plain(file, *arguments, **keys)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr("io.open", refuse)
    with pytest.raises(BadData, match=r"may not be read .* check its permissions"):
        opened(kind, tmp_path / f"a{SUFFIX[kind]}")


def test_files_beyond_the_open_ones_and_in_place_of_others(tmp_path: Path) -> None:
    """More files than stay open; and a file that takes another's place is read anew by the next source."""
    import tifffile

    for n in range(40):
        tifffile.imwrite(tmp_path / f"{n}.tif", VALUES[0] // (n + 1), compression="zlib")
    source = opened("tiff", tmp_path)
    for n in (*range(40), 0, 39):
        assert np.array_equal(whole(source, n)[0], VALUES[0] // (n + 1))
    for kind, write in (
        ("numpy", np.save),
        ("tiff", tifffile.imwrite),
        ("nifti", save_nifti),
    ):
        path = tmp_path / f"new{'.nii' if kind == 'nifti' else SUFFIX[kind]}"
        for values in (VALUES, VALUES[::-1]):
            write(tmp_path / f"draft{path.suffix}", values)
            (tmp_path / f"draft{path.suffix}").rename(path)
            assert np.array_equal(whole(opened(kind, path))[0], values)


def test_remote_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    save_nifti(tmp_path / "a.nii.gz", VALUES)
    memory = fsspec.filesystem("memory")
    memory.pipe("/formats/a.nii.gz", (tmp_path / "a.nii.gz").read_bytes())
    memory.pipe("/formats/b.nii.gz", (tmp_path / "a.nii.gz").read_bytes())
    for path, count in (("memory://formats/a.nii.gz", 1), ("memory://formats", 2)):
        source = opened("nifti", path)
        assert len(source.items) == count
        assert np.array_equal(whole(source)[0], VALUES)
