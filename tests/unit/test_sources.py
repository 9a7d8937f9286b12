"""Sources: exact windows from files written by zarr-python and Pillow, loud about what is missing or wrong."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from vitrail import disk
from vitrail.data.files.paths import natural_key
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.look.inspect import inspect
from vitrail.data.look.picture import picture
from vitrail.data.source import Source
from vitrail.data.sources import guess_kind
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.data.stored import normalize_window, resolve_region
from vitrail.errors import UserError
from vitrail.report.units import round_length

VERSIONS = ["0.4", "0.5"]
WHOLE = (slice(None),) * 3


def make_image(
    path: Path, version: str, array: np.ndarray, axes: str = "zyx", chunks=None, shards=None, **more: Any
) -> Path:
    """One level, written by zarr-python, for any axes."""
    kinds = {"t": "time", "c": "channel"}
    named = [
        {"name": a, "type": kinds[a]} if a in kinds else {"name": a, "type": "space", "unit": "nanometer"} for a in axes
    ]
    spacing = [1.0 if a in kinds else 4.0 for a in axes]
    transforms = [{"type": "scale", "scale": spacing}]
    entry = {"axes": named, "datasets": [{"path": "s0", "coordinateTransformations": transforms}]}
    old = version == "0.4"
    block = {"multiscales": [{"version": "0.4", **entry} if old else entry], **more}
    attributes = block if old else {"ome": {"version": version, **block}}
    group = zarr.create_group(str(path), zarr_format=2 if old else 3, attributes=attributes)
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}} if old else {"shards": shards}
    stored = group.create_array("s0", shape=array.shape, chunks=chunks or array.shape, dtype=array.dtype, **options)
    stored[...] = array
    return path


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 255, (20, 30, 41)).astype(np.uint8)


# Regions ---------------------------------------------------------------------------------------------------------


def test_fractions_and_voxels() -> None:
    axes, shape = ("z", "y", "x"), (10, 20, 33)
    assert resolve_region(axes, shape, None) == (slice(0, 10), slice(0, 20), slice(0, 33))
    left, right = resolve_region(axes, shape, {"x": [0, 0.8]}), resolve_region(axes, shape, {"x": [0.8, 1]})
    assert left[2] == slice(0, 26)
    assert right[2] == slice(26, 33)  # they meet without overlap
    assert resolve_region(axes, shape, {"z": [0, 1]})[0] == slice(0, 10)  # whole numbers up to 1 are fractions
    assert resolve_region(axes, shape, {"z": [2, 7], "y": [0, 0.5]})[:2] == (slice(2, 7), slice(0, 10))


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ({"w": [0, 1]}, "has the axes z, y, x"),
        ({"x": [0, 34]}, "ends beyond the axis"),
        ({"x": [0.0, 2.5]}, "fractions up to 1 or whole voxels"),
        ({"x": [0.5, 0.2]}, "0 <= lo < hi"),
        ({"x": [-1, 5]}, "0 <= lo < hi"),
        ({"x": [0.5]}, "two numbers"),
        ({"x": [float("nan"), 1]}, "two numbers"),
        ({"z": [0.51, 0.52]}, "holds no voxel"),
    ],
)
def test_wrong_regions_are_explained(region: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_region(("z", "y", "x"), (10, 20, 33), region)


@pytest.mark.parametrize("window", [(slice(0, 11),), (slice(-1, 3),), (slice(0, 4, 2),), (slice(3, 2),), ()])
def test_windows_must_lie_inside(window: tuple) -> None:
    with pytest.raises(ValueError, match="window"):
        normalize_window((10,), window)


# OME-Zarr --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_windows_are_exact_from_many_threads(tmp_path, values: np.ndarray, version: str) -> None:
    path = make_image(tmp_path / "a.zarr", version, values, chunks=(8, 8, 16))
    source = OmeZarrConfig(path=str(path), variables=["em"]).open()
    assert isinstance(source, Source)
    assert (source.axes, source.variables, source.dtype) == (("z", "y", "x"), ("em",), np.uint8)
    (item,) = source.items
    assert (item.shape, item.chunk, item.origin) == (values.shape, (8, 8, 16), (0, 0, 0))
    assert (item.spacing, item.unit, item.label) == ((4.0, 4.0, 4.0), "nanometer", None)
    rng = np.random.default_rng(1)
    windows = []
    for _ in range(40):
        starts = [int(rng.integers(n)) for n in values.shape]
        windows.append(
            tuple(slice(a, int(rng.integers(a + 1, n + 1))) for a, n in zip(starts, values.shape, strict=True))
        )
    with ThreadPoolExecutor(4) as pool:
        for window, block in zip(windows, pool.map(lambda w: source.read(0, w), windows), strict=True):
            assert np.array_equal(block, values[None][(slice(None), *window)])


@pytest.mark.parametrize("version", VERSIONS)
def test_region_moves_the_origin(tmp_path, values: np.ndarray, version: str) -> None:
    path = make_image(tmp_path / "a.zarr", version, values, chunks=(8, 8, 16))
    source = OmeZarrConfig(path=str(path), region={"x": [20, 41], "z": [0.5, 1]}).open()
    item = source.items[0]
    assert (item.shape, item.origin) == ((10, 30, 21), (2, 0, 4))
    assert np.array_equal(source.read(0, (slice(0, 3), slice(4, 9), slice(1, 21)))[0], values[10:13, 4:9, 21:41])
    with pytest.raises(ValueError, match="does not lie inside"):
        source.read(0, (slice(0, 11), slice(0, 1), slice(0, 1)))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_chunk_is_named(tmp_path, values: np.ndarray, version: str) -> None:
    path = make_image(tmp_path / "a.zarr", version, values, chunks=(8, 8, 16))
    lost = path / "s0" / ("1/2/0" if version == "0.4" else "c/1/2/0")
    lost.unlink()
    source = OmeZarrConfig(path=str(path)).open()
    assert source.read(0, (slice(0, 8), slice(None), slice(None))).shape == (1, 8, 30, 41)
    with pytest.raises(UserError, match=r"\{1, 2, 0\}") as caught:
        source.read(0, WHOLE)
    assert str(lost) in str(caught.value)
    assert "missing: fill" in str(caught.value)
    filled = OmeZarrConfig(path=str(path), missing="fill").open().read(0, WHOLE)[0]
    expected = values.copy()
    expected[8:16, 16:24, :16] = 0
    assert np.array_equal(filled, expected)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("keep", [0, 9])
def test_a_broken_chunk_is_an_error(tmp_path, values: np.ndarray, version: str, keep: int) -> None:
    path = make_image(tmp_path / "a.zarr", version, values, chunks=(8, 8, 16))
    chunk = path / "s0" / ("1/2/0" if version == "0.4" else "c/1/2/0")
    chunk.write_bytes(chunk.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot be read") as caught:
        OmeZarrConfig(path=str(path)).open().read(0, WHOLE)
    assert "tensorstore_spec" not in str(caught.value)


def test_shards_read_in_inner_chunks(tmp_path) -> None:
    values = np.random.default_rng(0).integers(1, 255, (16, 16, 16)).astype(np.uint16)
    path = make_image(tmp_path / "a.zarr", "0.5", values, chunks=(4, 4, 4), shards=(8, 8, 8))
    source = OmeZarrConfig(path=str(path)).open()
    assert source.items[0].chunk == (4, 4, 4)
    assert source.dtype == np.uint16
    assert np.array_equal(source.read(0, WHOLE)[0], values)
    (path / "s0" / "c" / "0" / "1" / "0").unlink()
    with pytest.raises(UserError, match="is missing"):
        OmeZarrConfig(path=str(path)).open().read(0, WHOLE)


@pytest.mark.parametrize("version", VERSIONS)
def test_channels_are_variables(tmp_path, version: str) -> None:
    values = np.random.default_rng(0).random((3, 6, 7, 8)).astype(np.float32)
    names = {"omero": {"channels": [{"label": "dapi"}, {"label": "actin"}, {"label": "er"}]}}
    named = str(make_image(tmp_path / "named.zarr", version, values, "czyx", (1, 4, 4, 4), **names))
    bare = str(make_image(tmp_path / "bare.zarr", version, values, "czyx", (3, 4, 4, 4)))
    window = (slice(1, 5), slice(2, 7), slice(0, 8))

    source = OmeZarrConfig(path=named).open()
    assert source.variables == ("dapi", "actin", "er")
    assert source.items[0].shape == (6, 7, 8)
    assert np.array_equal(source.read(0, window), values[:, 1:5, 2:7])
    picked = OmeZarrConfig(path=named, variables=["er", "dapi"]).open()
    assert np.array_equal(picked.read(0, window), values[[2, 0], 1:5, 2:7])
    assert OmeZarrConfig(path=named, variables=["a", "b", "c"]).open().variables == ("a", "b", "c")
    with pytest.raises(UserError, match="has no 'nuclei'; choose from dapi, actin, er"):
        OmeZarrConfig(path=named, variables=["nuclei"]).open()

    assert OmeZarrConfig(path=bare).open().variables == ("channel0", "channel1", "channel2")
    assert np.array_equal(
        OmeZarrConfig(path=bare, variables=["a", "b", "c"]).open().read(0, window), values[:, 1:5, 2:7]
    )
    with pytest.raises(UserError, match=r"names 2 variables but .* has 3 unnamed channels"):
        OmeZarrConfig(path=bare, variables=["a", "b"]).open()
    with pytest.raises(UserError, match="different names"):
        OmeZarrConfig(path=bare, variables=["a", "a", "b"]).open()


def test_one_variable_without_a_channel_axis(tmp_path, values: np.ndarray) -> None:
    path = str(make_image(tmp_path / "a.zarr", "0.5", values))
    assert OmeZarrConfig(path=path).open().variables == ("image",)
    with pytest.raises(UserError, match="no channel axis"):
        OmeZarrConfig(path=path, variables=["a", "b"]).open()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_moment_of_a_time_series(tmp_path, version: str) -> None:
    values = np.arange(2 * 3 * 4 * 5, dtype=np.int16).reshape(2, 3, 4, 5)
    path = str(make_image(tmp_path / "a.zarr", version, values, "tcyx"))
    source = OmeZarrConfig(path=path, time=1).open()
    assert source.axes == ("y", "x")
    assert np.array_equal(source.read(0, (slice(1, 3), slice(0, 5))), values[1][:, 1:3])
    names = {"omero": {"channels": [{"label": "a"}, {"label": "b"}, {"label": "c"}]}}
    named = make_image(tmp_path / "b.zarr", version, values, "tcyx", **names)
    picked = OmeZarrConfig(path=str(named), time=1, variables=["c", "a"]).open()
    assert np.array_equal(picked.read(0, (slice(1, 3), slice(0, 5))), values[1][[2, 0], 1:3])
    with pytest.raises(UserError, match="time = 2 does not exist"):
        OmeZarrConfig(path=path, time=2).open()


@pytest.mark.parametrize("version", VERSIONS)
def test_levels_labels_and_places(tmp_path, values: np.ndarray, version: str) -> None:
    labels = (values > 128).astype(np.uint8)
    path = str(write_ome_zarr(tmp_path / "a.zarr", Volume(values, labels), levels=3, version=version, chunk=8))
    source = OmeZarrConfig(path=path, labels="structures", region={"y": [5, 30]}).open()
    window = (slice(2, 9), slice(0, 6), slice(30, 41))
    assert np.array_equal(source.read(0, window)[0], values[2:9, 5:11, 30:41])
    assert np.array_equal(source.read_labels(0, window), labels[2:9, 5:11, 30:41])
    assert source.describe()["labels"] == ["structures"]

    coarse = OmeZarrConfig(path=path, level=1, labels="structures").open()
    assert coarse.items[0].shape == (10, 15, 21)
    assert coarse.items[0].spacing == (16.0, 16.0, 16.0)
    assert coarse.describe()["translation"] == [4.0, 4.0, 4.0]  # half a coarse voxel less half a fine one
    assert coarse.read(0, WHOLE)[0, 3, 4, 5] == np.rint(values[6:8, 8:10, 10:12].mean())
    assert coarse.read_labels(0, WHOLE).shape == (10, 15, 21)
    assert OmeZarrConfig(path=path, spacing=[16, 16, 16]).open().level == 1
    assert OmeZarrConfig(path=path, spacing=[31, 31, 31]).open().level == 1
    for options, words in [
        ({"level": 3}, "level = 3 does not exist .* choose 0 to 2"),
        ({"level": 0, "spacing": [8, 8, 8]}, "both level and spacing"),
        ({"spacing": [4, 4]}, "one positive number for each of the axes z, y, x"),
        ({"labels": "cells"}, "labels = 'cells' .* choose from structures"),
        ({"region": {"x": [0, 99]}}, "ends beyond"),
    ]:
        with pytest.raises(UserError, match=words):
            OmeZarrConfig(path=path, **options).open()
    with pytest.raises(UserError, match="without labels"):
        OmeZarrConfig(path=path).open().read_labels(0, WHOLE)


def test_an_image_inside_a_bigger_hierarchy(tmp_path, values: np.ndarray) -> None:
    zarr.create_group(str(tmp_path / "big.zarr"), zarr_format=2).create_group("recon-1").create_group("em")
    inner = make_image(tmp_path / "big.zarr" / "recon-1" / "em" / "fibsem-uint8", "0.4", values)
    assert np.array_equal(OmeZarrConfig(path=str(inner)).open().read(0, WHOLE)[0], values)
    with pytest.raises(UserError, match="fibsem-uint8"):
        OmeZarrConfig(path=str(tmp_path / "big.zarr")).open()


def test_other_axis_orders_are_kept(tmp_path) -> None:
    values = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(4, 5, 2, 3)
    names = {"omero": {"channels": [{"label": "a"}, {"label": "b"}]}}
    source = OmeZarrConfig(path=str(make_image(tmp_path / "a.zarr", "0.5", values, "yxct", **names)), time=2).open()
    assert (source.axes, source.items[0].shape) == (("y", "x"), (4, 5))
    assert np.array_equal(source.read(0, (slice(1, 3), slice(0, 4))), np.moveaxis(values[1:3, :4, :, 2], -1, 0))


def test_labels_must_lie_on_the_image(tmp_path, values: np.ndarray) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", Volume(values, values), spacing=(8e-9,) * 3, unit="meter", levels=1)
    (path / "s0" / disk.MARK).unlink()  # it tells of metadata that somebody has changed
    metadata = path / "labels" / "structures" / "zarr.json"
    original = metadata.read_text()
    assert OmeZarrConfig(path=str(path), labels="structures").open().read_labels(0, WHOLE).shape == values.shape
    for old, new, words in [("8e-09", "4e-09", "no level of spacing"), ("0.0", "8e-09", "do not cover the image")]:
        metadata.write_text(original.replace(old, new))
        with pytest.raises(UserError, match=words):
            OmeZarrConfig(path=str(path), labels="structures").open()


def test_a_lost_level_is_named(tmp_path, values: np.ndarray) -> None:
    path = make_image(tmp_path / "a.zarr", "0.5", values)
    (path / "s0" / "zarr.json").unlink()
    with pytest.raises(UserError, match=r"level 's0' .* is not a zarr array"):
        OmeZarrConfig(path=str(path)).open()


def test_recipes_are_checked() -> None:
    adapter = TypeAdapter(OmeZarrConfig)
    made = adapter.validate_python({"path": "a.zarr", "region": {"x": [0, 0.8], "y": [0, 64]}})
    assert made == OmeZarrConfig(path="a.zarr", region={"x": [0, 0.8], "y": [0, 64]})
    assert isinstance(made.region["y"][1], int)
    for wrong in ({"path": "a", "colour": 1}, {"path": "a", "kind": "tiff"}, {"path": "a", "weight": 0}, {}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


# Image folders ---------------------------------------------------------------------------------------------------


def save_images(folder: Path, images: dict[str, np.ndarray]) -> str:
    for name, pixels in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name)
    return str(folder)


def grey(height: int, width: int, dtype: str = "uint8") -> np.ndarray:
    return (np.arange(height * width).reshape(height, width) * 7 % 251).astype(dtype)


def test_flat_folder_in_natural_order(tmp_path) -> None:
    path = save_images(tmp_path, {f"im{i}.png": grey(6, 5 + i) for i in (10, 2, 1)})
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no image")
    source = ImageFolderConfig(path=path).open()
    assert isinstance(source, Source)
    assert [item.name for item in source.items] == ["im1.png", "im2.png", "im10.png"]
    assert [item.shape for item in source.items] == [(6, 6), (6, 7), (6, 15)]
    assert (source.axes, source.variables, source.dtype) == (("y", "x"), ("grey",), np.uint8)
    item = source.items[2]
    assert (item.chunk, item.origin, item.label, item.unit) == (item.shape, (0, 0), None, None)
    assert np.array_equal(source.read(2, (slice(1, 4), slice(3, 15)))[0], grey(6, 15)[1:4, 3:])
    assert source.describe()["items"] == 3


def test_natural_order() -> None:
    names = ["b1", "a10", "a2", "a02b", "10", "9", "A1", "a"]
    assert sorted(names, key=natural_key) == ["9", "10", "a", "A1", "a2", "a02b", "a10", "b1"]


def test_classes_are_folders(tmp_path) -> None:
    path = save_images(tmp_path, {"dog/1.png": grey(4, 4), "cat/2.png": grey(5, 4), "cat/1.png": grey(4, 6)})
    (tmp_path / "empty").mkdir()
    source = ImageFolderConfig(path=path).open()
    assert source.class_names == ("cat", "dog")
    assert [(item.name, item.label) for item in source.items] == [("cat/1.png", 0), ("cat/2.png", 0), ("dog/1.png", 1)]
    assert [item.label for item in ImageFolderConfig(path=path, classes=False).open().items] == [None, None, None]
    save_images(tmp_path, {"stray.png": grey(4, 4)})
    with pytest.raises(UserError, match="images and folders of images"):
        ImageFolderConfig(path=path).open()


def test_colour_and_grey_are_converted_on_purpose(tmp_path) -> None:
    colour = np.random.default_rng(0).integers(0, 255, (6, 7, 3)).astype(np.uint8)
    path = save_images(tmp_path, {"1.png": colour, "2.png": grey(5, 7), "3.tif": colour})
    whole = (slice(None), slice(None))
    source = ImageFolderConfig(path=path).open()
    assert source.variables == ("red", "green", "blue")
    assert np.array_equal(source.read(0, whole), np.moveaxis(colour, -1, 0))
    assert np.array_equal(source.read(1, whole), np.stack([grey(5, 7)] * 3))
    assert np.array_equal(source.read(2, whole), np.moveaxis(colour, -1, 0))
    picked = ImageFolderConfig(path=path, variables=["blue", "red"]).open()
    assert np.array_equal(picked.read(0, whole), np.moveaxis(colour[..., [2, 0]], -1, 0))
    brightness = ImageFolderConfig(path=path, variables=["light"]).open()
    assert np.array_equal(brightness.read(0, whole)[0], np.asarray(Image.fromarray(colour).convert("L")))
    assert ImageFolderConfig(path=path, variables=["b1", "b2", "b3"]).open().variables == ("b1", "b2", "b3")
    with pytest.raises(UserError, match=r"one name .grey. or three"):
        ImageFolderConfig(path=path, variables=["a", "b"]).open()


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_stay(tmp_path, suffix: str) -> None:
    deep = grey(6, 7).astype(np.uint16) * 257
    path = save_images(tmp_path, {f"1.{suffix}": deep, f"2.{suffix}": grey(6, 7)})
    source = ImageFolderConfig(path=path).open()
    assert source.dtype == np.uint16
    pixels = source.read(0, (slice(0, 6), slice(2, 7)))
    assert pixels.dtype == np.uint16
    assert np.array_equal(pixels[0], deep[:, 2:])
    with pytest.raises(UserError, match=r"2\.\w+ has uint8 pixels but the first image has uint16"):
        source.read(1, (slice(0, 6), slice(0, 7)))
    with pytest.raises(UserError, match="no colours"):
        ImageFolderConfig(path=path, variables=["red", "green", "blue"]).open().read(0, (slice(0, 6), slice(0, 7)))


def test_floats_stay(tmp_path) -> None:
    path = save_images(tmp_path, {"1.tif": grey(4, 5, "float32") / 3})
    source = ImageFolderConfig(path=path).open()
    assert source.dtype == np.float32
    assert np.array_equal(source.read(0, (slice(0, 4), slice(0, 5)))[0], grey(4, 5, "float32") / 3)


def test_large_images_by_their_own_limit(tmp_path, monkeypatch) -> None:
    """Pillow's limit of the whole process is neither obeyed nor changed."""
    path = save_images(tmp_path, {"1.png": grey(40, 50)})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert ImageFolderConfig(path=path).open().read(0, (slice(0, 40), slice(0, 50))).shape == (1, 40, 50)
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(UserError, match="50 x 40 pixels, more than max_pixels = 1999"):
        ImageFolderConfig(path=path, max_pixels=1999).open()


def test_bad_files_are_named(tmp_path) -> None:
    path = save_images(tmp_path, {"1.png": grey(40, 50), "2.png": grey(40, 50), "3.png": grey(40, 50)})
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:120])
    (tmp_path / "3.png").write_bytes(b"not an image at all")
    pages = [Image.fromarray(grey(4, 4)) for _ in range(3)]
    pages[0].save(tmp_path / "4.tif", save_all=True, append_images=pages[1:])
    source = ImageFolderConfig(path=path).open()
    assert source.items[1].shape == (40, 50)
    with pytest.raises(UserError, match=r"2\.png cannot be read"):
        source.read(1, (slice(0, 40), slice(0, 50)))
    with pytest.raises(UserError, match=r"3\.png is not a PNG"):
        _ = source.items[2]
    with pytest.raises(UserError, match=r"4\.tif holds several pages"):
        _ = source.items[3]


def test_folders_without_images_are_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="holds no images"):
        ImageFolderConfig(path=str(tmp_path)).open()
    with pytest.raises(UserError, match="is not a folder"):
        ImageFolderConfig(path=str(tmp_path / "nowhere")).open()
    with pytest.raises(UserError, match="region"):
        ImageFolderConfig(path=str(tmp_path), region={"x": [0, 0.5]})
    save_images(tmp_path, {"1.png": grey(4, 4)})
    with pytest.raises(UserError, match="no classes"):
        ImageFolderConfig(path=str(tmp_path), classes=True).open()


# Guessing and looking --------------------------------------------------------------------------------------------


def test_kinds_are_guessed(tmp_path, values: np.ndarray) -> None:
    odd = make_image(tmp_path / "no_suffix", "0.5", values)
    assert guess_kind(str(odd)) == "ome_zarr"
    assert guess_kind(str(tmp_path / "later.zarr")) == "ome_zarr"
    assert guess_kind(str(tmp_path / "later.zarr" / "recon-1" / "em")) == "ome_zarr"
    assert guess_kind(save_images(tmp_path / "flat", {"1.PNG": grey(4, 4)})) == "image_folder"
    assert guess_kind(save_images(tmp_path / "classes", {"cat/1.jpg": grey(4, 4)})) == "image_folder"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"")
    for name, words in [
        ("empty", "is an empty folder"),
        ("nowhere", "does not exist"),
        ("file.bin", "is an empty file"),
    ]:
        with pytest.raises(UserError, match=words):
            guess_kind(str(tmp_path / name))


def test_guessing_and_configs_import_nothing_heavy() -> None:
    code = (
        "import sys; from vitrail.data.sources import guess_kind; import vitrail.data.sources.zarr, "
        "vitrail.data.sources.image_folder, vitrail.data.look.inspect, vitrail.data.generate; "
        "print([m for m in ('torch', 'zarr', 'tensorstore', 'matplotlib', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_inspect_counts_what_is_there(tmp_path, values: np.ndarray) -> None:
    source = OmeZarrConfig(path=str(make_image(tmp_path / "a.zarr", "0.5", values, chunks=(8, 8, 8)))).open()
    report = inspect(source, samples=3)
    assert (report["shape"], report["axes"], report["chunk"]) == ([20, 30, 41], ["z", "y", "x"], [8, 8, 8])
    assert (report["unit"], report["levels"]) == ("nanometer", [{"path": "s0", "spacing": [4.0, 4.0, 4.0]}])
    numbers = report["statistics"]["image"]
    assert (numbers["min"], numbers["max"]) == (values.min(), values.max())
    assert numbers["mean"] == pytest.approx(values.mean())  # every sample is the whole small volume
    assert numbers["std"] == pytest.approx(values.std())
    assert sum(numbers["histogram"]["counts"]) == 3 * values.size
    assert report["constant_percent"] == 0
    flat = OmeZarrConfig(path=str(make_image(tmp_path / "b.zarr", "0.5", np.full((9, 9, 9), 5, np.uint8)))).open()
    assert inspect(flat, samples=2)["constant_percent"] == 100


def test_pictures_are_drawn(tmp_path, values: np.ndarray) -> None:
    volume = OmeZarrConfig(path=str(make_image(tmp_path / "a.zarr", "0.4", values))).open()
    folder = ImageFolderConfig(
        path=save_images(tmp_path / "$images", {f"{i}_$.png": grey(9, 9) for i in range(11)})
    ).open()
    for name, source in (("volume", volume), ("folder", folder)):
        with Image.open(picture(source, tmp_path / "out" / f"{name}.png")) as drawn:
            assert min(drawn.size) > 200


@pytest.mark.parametrize(("wanted", "length"), [(260, 200), (0.7, 0.5), (1.0, 1.0), (99, 50), (1000, 1000)])
def test_scale_bars_are_round(wanted: float, length: float) -> None:
    assert round_length(wanted) == pytest.approx(length)


def test_images_are_split_by_their_names(tmp_path: Path) -> None:
    """Two shares hold every image once, and an added image moves none of the others."""
    for number in range(40):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")

    def names(low: float, high: float) -> set[str]:
        return {Path(i.name).name for i in ImageFolderConfig(path=str(tmp_path), split=(low, high)).open().items}

    train, valid = names(0, 0.7), names(0.7, 1)
    assert not train & valid
    assert len(train | valid) == 40
    assert 18 <= len(train) <= 36
    Image.new("L", (8, 8)).save(tmp_path / "new.png")
    assert names(0, 0.7) - {"new.png"} == train
    with pytest.raises(UserError, match="two rising numbers"):
        ImageFolderConfig(path=str(tmp_path), split=(0.8, 0.2))
    with pytest.raises(UserError, match="holds none of its 41 items"):
        ImageFolderConfig(path=str(tmp_path), split=(0.0, 0.0001)).open()
