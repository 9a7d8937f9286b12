"""Sources of many images: files of the formats' own libraries read back exactly, in windows, by several threads."""

import io
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
import webdataset
import zarr
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from support import ROOT

from vitrail.data.dataset import Dataset
from vitrail.data.latents.store import write_latents
from vitrail.data.look import inspect
from vitrail.data.source import ClassifiedSource, LabelledSource, Source, choose_channels
from vitrail.data.sources import guess_kind
from vitrail.data.sources import image_folder as image_source
from vitrail.data.sources.image_folder import ImageFolderConfig, ImageSource
from vitrail.data.sources.items import CLASSES, KINDS, Cifar10Config, DummyConfig, LatentsConfig, SyntheticConfig
from vitrail.data.sources.shards import ParquetConfig, WebdatasetConfig, expand
from vitrail.errors import BadData, UserError
from vitrail.recipe import kinds

SHARED = ROOT.parent / "shared" / "data"
WHOLE = (slice(None), slice(None))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def noise(*shape: int, dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    top = 255 if dtype == "uint8" else 60000
    return np.random.default_rng([seed, *shape]).integers(0, top, shape).astype(dtype)


def encode(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, format, **options)
    return held.getvalue()


def channels(pixels: np.ndarray) -> np.ndarray:
    return np.moveaxis(pixels, -1, 0)


def check_windows(source: Any, expected: Callable[[int], np.ndarray], labels: Any = None, threads: int = 4) -> None:
    """Random windows of random items, by some threads at once, are those of the arrays."""
    assert isinstance(source, Source)
    rng = np.random.default_rng(1)
    jobs = []
    for _ in range(24):
        item = int(rng.integers(len(source.items)))
        starts = [int(rng.integers(n)) for n in source.items[item].shape]
        sizes = zip(starts, source.items[item].shape, strict=True)
        jobs.append((item, tuple(slice(a, int(rng.integers(a + 1, n + 1))) for a, n in sizes)))
    with ThreadPoolExecutor(threads) as pool:
        for (item, window), got in zip(jobs, pool.map(lambda job: source.read(*job), jobs), strict=True):
            assert got.dtype == source.dtype
            assert np.array_equal(got, expected(item)[(slice(None), *window)])
        if labels is not None:
            assert isinstance(source, LabelledSource)
            for (item, window), got in zip(jobs, pool.map(lambda job: source.read_labels(*job), jobs), strict=True):
                assert got.dtype == source.label_dtype
                assert np.array_equal(got, labels(item)[window])


# Decoding --------------------------------------------------------------------------------------------------------


def read_one(folder: Path, name: str, data: bytes, **options: Any) -> tuple[ImageSource, np.ndarray]:
    (folder / name).write_bytes(data)
    source = ImageFolderConfig(path=str(folder / name), **options).open()
    return source, source.read(0, WHOLE)


def test_every_format_and_depth(tmp_path: Path) -> None:
    colour, grey = noise(6, 7, 3), noise(6, 7)
    deep, deep_grey = noise(6, 7, 3, dtype="uint16"), noise(6, 7, dtype="uint16")
    for name, options in {"a.png": {}, "a.tif": {}, "a.webp": {"lossless": True}}.items():
        format = {"png": "PNG", "tif": "TIFF", "webp": "WEBP"}[name[2:]]
        source, got = read_one(tmp_path, name, encode(colour, format, **options))
        assert (source.variables, source.dtype) == (("red", "green", "blue"), np.uint8)
        assert np.array_equal(got, channels(colour))
    jpeg = encode(colour, "JPEG", quality=95)
    assert np.array_equal(read_one(tmp_path, "a.jpg", jpeg)[1], channels(np.asarray(Image.open(io.BytesIO(jpeg)))))
    assert np.array_equal(read_one(tmp_path, "g.png", encode(grey))[1], grey[None])
    assert np.array_equal(read_one(tmp_path, "g16.png", encode(deep_grey))[1], deep_grey[None])

    # Colours of 16 bits, which Pillow would cut to 8.
    held = io.BytesIO()
    tifffile.imwrite(held, deep, photometric="rgb")
    imagecodecs = pytest.importorskip("imagecodecs")
    for name, data in {"d.tif": held.getvalue(), "d.png": imagecodecs.png_encode(deep)}.items():
        source, got = read_one(tmp_path, name, data)
        assert (source.variables, source.dtype) == (("red", "green", "blue"), np.uint16)
        assert np.array_equal(got, channels(deep))
        assert np.array_equal(read_one(tmp_path, name, data, variables=["green"])[1][0], deep[..., 1])
        light = read_one(tmp_path, name, data, variables=["light"])[1][0]
        assert np.array_equal(light, np.rint(deep @ np.array([0.299, 0.587, 0.114])))
    source, got = read_one(
        tmp_path, "l.png", imagecodecs.png_encode(np.ascontiguousarray(deep[..., :2]))
    )  # grey and alpha
    assert np.array_equal(got, np.stack([deep[..., 0]] * 3))


def test_alpha_palettes_and_print_colours(tmp_path: Path) -> None:
    four, colour = noise(6, 7, 4), noise(6, 7, 3)
    data = encode(four)
    assert np.array_equal(read_one(tmp_path, "a.png", data)[1], channels(four[..., :3]))  # left out unless asked for
    assert np.array_equal(read_one(tmp_path, "a.png", data, variables=["alpha", "red"])[1], channels(four[..., [3, 0]]))
    assert read_one(tmp_path, "b.png", encode(colour), variables=["alpha"])[1].min() == 255
    palette = Image.fromarray(colour).quantize(16)
    held = io.BytesIO()
    palette.save(held, "PNG")
    assert np.array_equal(read_one(tmp_path, "p.png", held.getvalue())[1], channels(np.asarray(palette.convert("RGB"))))
    cmyk = io.BytesIO()
    Image.fromarray(colour).convert("CMYK").save(cmyk, "TIFF")
    assert np.array_equal(read_one(tmp_path, "c.tif", cmyk.getvalue())[1], channels(colour))


def test_broken_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode(noise(40, 50))
    (tmp_path / "0.png").write_bytes(good)
    broken = {
        "1.png": (b"", "is an empty file, of 0 bytes"),
        "2.png": (good[:200], "cannot be read as an image"),
        "3.jpg": (encode(noise(40, 50), "JPEG")[:500], "cannot be read as an image"),
        "4.png": (good[:16] + bytes(4) + good[20:], r"cannot be read as an image|is empty"),  # 0 pixels wide
        "5.png": (good.replace(good[60:70], bytes(10)), "cannot be read as an image"),
        "6.webp": (encode(noise(40, 50, 3), "WEBP")[:40], "cannot be read as an image"),
        "7.tif": (encode(noise(40, 50), "TIFF")[:900], "cannot be read as an image"),
        "8.png": (b"<html>not found</html>", "is not a PNG, JPEG, TIFF or WebP image"),
    }
    for name, (data, _) in broken.items():
        (tmp_path / name).write_bytes(data)
    source = ImageFolderConfig(path=str(tmp_path), size=(40, 50)).open()
    assert source.read(0, WHOLE).shape == (1, 40, 50)
    for number, (name, (_, words)) in enumerate(broken.items()):
        with pytest.raises(BadData, match=words) as caught:
            source.read(number + 1, WHOLE)
        assert str(tmp_path / name) in str(caught.value)
    assert ImageFolderConfig(path=str(tmp_path), size=(40, 51)).open().items[0].shape == (40, 51)
    with pytest.raises(BadData, match="is 50 x 40 pixels, not the 51 x 40 that `size` says"):
        ImageFolderConfig(path=str(tmp_path), size=(40, 51)).open().read(0, WHOLE)
    with pytest.raises(UserError, match="size"):
        ImageFolderConfig(path=str(tmp_path), size=(0, 5))

    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("0.png"):
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BadData, match=r"0\.png may not be read"):
        source.read(0, WHOLE)


def test_an_array_is_looked_at_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of holes costs nothing to send: what its header says is checked, and left out by data.bad: skip."""
    with (tmp_path / "0.png").open("wb") as file:  # what it is, its content says
        np.save(file, noise(4, 5))
    told: dict[str, tuple[Any, Any, str]] = {
        "1.png": ((100_000, 100_000), "|u1", "100000 x 100000 pixels, more than max_pixels"),
        "2.png": ((100_000, 1000, 100), "|u1", "an image is y x x"),
        "3.png": ((10**10,), "|u1", "an image is y x x"),
        "4.png": ((40_000, 100_000), "<c16", "an image is y x x"),
        "5.png": ((0, 7), "|u1", "is empty"),
    }
    for name, (shape, dtype, _) in told.items():
        with (tmp_path / name).open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 16 * 10**10)
    source = ImageFolderConfig(path=str(tmp_path)).open()
    load, loaded = np.load, []
    monkeypatch.setattr(np, "load", lambda file, **more: loaded.append(file.name) or load(file, **more))
    for number, (_, _, words) in enumerate(told.values()):
        with pytest.raises(BadData, match=words):
            source.items[number + 1]
    assert len(source.leave_out_bad()) == len(told)
    assert [item.name for item in source.items] == ["0.png"]
    assert {Path(name).name for name in loaded} == {"0.png"}


def test_pages_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of very many may claim all tags of the file, and Pillow would read them all."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    load, loaded, counts = ImageFileDirectory_v2.load, [], []
    for number in (2, 9):
        pages = [Image.fromarray(noise(4, 5)) for _ in range(number)]
        (folder := tmp_path / str(number)).mkdir()
        pages[0].save(folder / "0.tif", save_all=True, append_images=pages[1:])
        with monkeypatch.context() as patch:
            patch.setattr(ImageFileDirectory_v2, "load", lambda self, file: loaded.append(1) or load(self, file))
            with pytest.raises(BadData, match=r"0\.tif holds several pages"):
                ImageFolderConfig(path=str(folder)).open()
        counts.append(len(loaded) - sum(counts))
    assert counts[0] == counts[1] > 0


# Image folders ---------------------------------------------------------------------------------------------------


def test_sizes_of_many_images_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "KEPT", 10)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.png").write_bytes(encode(noise(4 + number, 5, 3)))
    looked: list[str] = []
    lock = threading.Lock()
    look = image_source.look

    def count(file: Any, name: str, limit: int) -> Any:
        with lock:
            looked.append(name)
        return look(file, name, limit)

    monkeypatch.setattr(image_source, "look", count)
    shapes = [(4 + number, 5) for number in range(12)]

    def again(expected: int, **options: Any) -> None:
        looked.clear()
        source = ImageFolderConfig(path=str(folder), **options).open()
        assert source.items[3].shape in shapes
        assert [item.shape for item in source.items] == shapes[: len(source.items)]
        assert len(looked) == expected

    again(1 + 1 + 11)  # the first; one that is asked for alone; all others
    again(2)  # from the cache
    (folder / "new.png").write_bytes(encode(noise(16, 5, 3)))
    shapes.append((16, 5))
    again(14)  # the folder has changed
    (folder / "3.png").write_bytes(encode(noise(9, 9, 3)))  # written over, which no folder tells
    source = ImageFolderConfig(path=str(folder)).open()
    list(source.items)
    with pytest.raises(BadData, match="is 9 x 9 pixels, not the 5 x 7 that its header said before"):
        source.read(3, WHOLE)
    for held in (tmp_path / "cache" / "sizes").iterdir():
        held.write_bytes(b"broken")
    assert [item.shape for item in ImageFolderConfig(path=str(folder)).open().items][3] == (9, 9)
    monkeypatch.setenv("VITRAIL_CACHE", "/proc/nothing/here")  # no cache costs time, not the run
    assert [item.shape for item in ImageFolderConfig(path=str(folder)).open().items][3] == (9, 9)


def test_unreadable_images_are_told_of_or_left_out(tmp_path: Path) -> None:
    for number in range(6):
        name = tmp_path / ("cat" if number < 3 else "dog") / f"{number}.png"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(b"" if number in (0, 4) else encode(noise(4 + number, 5)))
    source = ImageFolderConfig(path=str(tmp_path)).open()
    with pytest.raises(BadData, match=r"cat/0\.png is an empty file"):
        list(source.items)
    said = source.leave_out_bad()
    assert [re.search(r"\w+/\d\.png", sentence).group() for sentence in said] == ["cat/0.png", "dog/4.png"]
    assert [(item.name, item.label, item.shape[0]) for item in source.items] == [
        ("cat/1.png", 0, 5), ("cat/2.png", 0, 6), ("dog/3.png", 1, 7), ("dog/5.png", 1, 9),
    ]  # fmt: skip
    assert np.array_equal(source.read(2, WHOLE)[0], noise(7, 5))
    for number in range(6):
        (tmp_path / ("cat" if number < 3 else "dog") / f"{number}.png").write_bytes(b"")
    with pytest.raises(BadData, match="is an empty file"):
        source.leave_out_bad()
    with pytest.raises(BadData, match="is an empty file"):
        ImageFolderConfig(path=str(tmp_path)).open()


def test_labels_of_pixels_beside_images(tmp_path: Path) -> None:
    images = {f"{group}/{number}": noise(6, 7, 3, seed=number) for group in "ab" for number in range(3)}
    masks = {name: noise(6, 7, seed=9) % 3 for name in images}
    for name in images:
        for root, data in (("images", encode(images[name], "TIFF")), ("masks", encode(masks[name]))):
            place = tmp_path / root / f"{name}.{'tif' if root == 'images' else 'png'}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    path, labels = str(tmp_path / "images"), str(tmp_path / "masks")
    source: Any = ImageFolderConfig(path=path, labels=labels).open()
    names = [item.name.removesuffix(".tif") for item in source.items]
    check_windows(source, lambda item: channels(images[names[item]]), lambda item: masks[names[item]])
    assert source.describe()["labels"] == [labels]
    assert not isinstance(ImageFolderConfig(path=path).open(), LabelledSource)
    (tmp_path / "masks/b/2.png").write_bytes(encode(noise(6, 8)))
    with pytest.raises(BadData, match=r"images/b/2\.tif: the labels are 8 x 6 .* image of 7 x 6"):
        source.read_labels(5, WHOLE)
    (tmp_path / "masks/b/2.png").write_bytes(encode(noise(6, 7, 3)))
    with pytest.raises(BadData, match="one whole number a pixel"):
        source.read_labels(5, WHOLE)
    (tmp_path / "masks/b/2.png").unlink()
    with pytest.raises(UserError, match=r"masks holds no labels for the image b/2\.tif"):
        ImageFolderConfig(path=path, labels=labels).open()


def test_masks_of_one_bit_and_of_0_and_255(tmp_path: Path) -> None:
    masks = [noise(6, 7, seed=n) > 99 for n in range(2)]
    for root in ("images", "masks"):
        (tmp_path / root).mkdir()
    for number, mask in enumerate(masks):
        (tmp_path / f"images/{number}.png").write_bytes(encode(noise(6, 7)))
        (tmp_path / f"masks/{number}.png").write_bytes(encode(mask if number == 0 else mask * np.uint8(255)))
    keys: Any = {"path": str(tmp_path / "images"), "labels": str(tmp_path / "masks")}
    source: Any = ImageFolderConfig(**keys, label_map={255: 1}).open()
    for number, mask in enumerate(masks):  # the first has 1 bit a pixel, the second 8
        found = source.read_labels(number, WHOLE)
        assert found.dtype == source.label_dtype == np.uint8
        assert np.array_equal(found, mask)
    with pytest.raises(UserError, match=r"label_map = \{255: 300\} .* no uint8"):
        ImageFolderConfig(**keys, label_map={255: 300}).open()
    held = [encode(mask * np.uint8(255)) for mask in masks]
    rows = write_parquet(tmp_path / "a.parquet", [noise(6, 7), noise(6, 7)], mask=held)
    table: Any = ParquetConfig(path=str(rows), labels="mask", label_map={255: 1}).open()
    assert np.array_equal(table.read_labels(1, WHOLE), masks[1])


def test_images_and_masks_are_no_classes(tmp_path: Path) -> None:
    for folder in ("imagesTr", "imagesTs", "labelsTr"):
        (tmp_path / "nnunet" / folder).mkdir(parents=True)
    for number in range(3):
        image, labels = f"c{number}_0000.png", f"c{number}.png"
        (tmp_path / "nnunet" / "imagesTr" / image).write_bytes(encode(noise(8, 9, 3, seed=number)))
        (tmp_path / "nnunet" / "imagesTs" / image).write_bytes(encode(noise(8, 9, 3)))
        (tmp_path / "nnunet" / "labelsTr" / labels).write_bytes(encode(noise(8, 9, seed=9 + number) // 128))
    described = {"channel_names": {"0": "R", "1": "G", "2": "B"}, "labels": {"none": 0, "cell": 1}}
    (tmp_path / "nnunet" / "dataset.json").write_text(json.dumps(described | {"file_ending": ".png"}))
    assert guess_kind(str(tmp_path / "nnunet")) == "image_folder"
    source = ImageFolderConfig(path=str(tmp_path / "nnunet")).open()
    assert (len(source.items), source.class_names, source.label_names) == (3, (), {0: "none", 1: "cell"})
    check_windows(source, lambda i: channels(noise(8, 9, 3, seed=i)), lambda i: noise(8, 9, seed=9 + i) // 128)
    (tmp_path / "nnunet" / "imagesTr" / "c0_0001.png").write_bytes(encode(noise(8, 9, 3)))
    with pytest.raises(UserError, match="has the channels"):
        ImageFolderConfig(path=str(tmp_path / "nnunet")).open()
    for folder in ("images", "Masks"):
        (tmp_path / "pairs" / folder).mkdir(parents=True)
        (tmp_path / "pairs" / folder / "a.png").write_bytes(encode(noise(8, 9)))
    with pytest.raises(UserError, match=r"images/ and Masks/, .* labels: .*pairs/Masks, or say classes: true"):
        ImageFolderConfig(path=str(tmp_path / "pairs")).open()
    assert ImageFolderConfig(path=str(tmp_path / "pairs"), classes=True).open().class_names == ("images", "Masks")


def put_images(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encode(noise(8, 9, seed=number)))
    return folder


def classes_of(path: object, **keys: Any) -> dict[str, str]:
    source = ImageFolderConfig(path=str(path), **keys).open()
    return {item.name: source.class_names[item.label] for item in source.items if item.label is not None}


def test_classes_by_a_pattern_of_names(tmp_path: Path) -> None:
    put_images(tmp_path / "flat", "cat.2.png", "dog.1.png", "cat.10.png")
    expected = {"cat.2.png": "cat", "cat.10.png": "cat", "dog.1.png": "dog"}
    assert classes_of(tmp_path / "flat", class_pattern=r"^(?P<class>[a-z]+)\.") == expected
    assert classes_of(f"{tmp_path}/flat/*.1*.png", class_pattern=r"(?P<class>cat|dog)") == {
        "cat.10.png": "cat",
        "dog.1.png": "dog",
    }
    put_images(tmp_path / "deep", "p1/raw/9_sick.png", "p2/raw/1_well.png")
    assert guess_kind(f"{tmp_path}/deep/*/raw/*.png") == "image_folder"
    assert classes_of(f"{tmp_path}/deep/*/raw/*.png", class_pattern=r"_(?P<class>\w+)\.png$") == {
        "p1/raw/9_sick.png": "sick",
        "p2/raw/1_well.png": "well",
    }
    assert list(classes_of(f"{tmp_path}/deep/**/*.png", classes=True).values()) == ["raw", "raw"]
    assert not classes_of(f"{tmp_path}/deep/**/*.png")
    for pattern, said in {
        "(cat": "is no regular expression",
        "(cat|dog)": r"has no group called class; mark what the class is, such as \(\?P<class>cat\|dog\)",
        r"(?P<class>cat)": r"finds no class in 1 of 3 names of images of .*flat, such as 'dog\.1\.png'",
    }.items():
        with pytest.raises(UserError, match=said):
            ImageFolderConfig(path=str(tmp_path / "flat"), class_pattern=pattern).open()
    with pytest.raises(UserError, match=r"class_pattern and class_table of .* both say what the classes are"):
        ImageFolderConfig(path="a", class_pattern="(?P<class>a)", class_table="b.csv")
    with pytest.raises(UserError, match=r"has none; put the images into one folder a class.* or say .* class_table"):
        Dataset([ImageFolderConfig(path=str(tmp_path / "flat"))], (8, 8), where="data.train", labels="item")


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("labels.csv", "image_id,breed,age\n2,10,7\n1,9,3\nelsewhere,11,1\n"),
        ("labels.tsv", '\ufefffile\tLabel\n./a/2.png\t"10"\n1.png\t9\n\n'),
        ("l.csv", "id;Class Name\nsome/where/a/2.png; 10\nsome/where/a/1.png;9\n"),
    ],
)
def test_classes_from_a_table(tmp_path: Path, table: str, text: str) -> None:
    put_images(tmp_path, "a/1.png", "a/2.png")
    (tmp_path / table).write_text(text, encoding="utf-8")
    for given in (table, str(tmp_path / table)):
        source = ImageFolderConfig(path=str(tmp_path), class_table=given).open()
        assert source.class_names == ("9", "10")
        assert [item.label for item in source.items] == [0, 1]
    assert str(tmp_path / table) in source.files()
    assert source.notes == []
    (note,) = ImageFolderConfig(path=str(tmp_path)).open().notes
    assert note.endswith(f"holds {table}, which is not read; `class_table: {table}` takes classes from it")


def test_tables_that_do_not_tell_are_refused(tmp_path: Path) -> None:
    put_images(tmp_path, "1.png", "2.png")
    keys: dict[str, Any] = {"path": str(tmp_path), "class_table": "t.csv"}
    for text, more, said in (
        ("image,class\n1,a\n", {}, r"tells no class of 1 of the 2 images of .*, such as '2\.png'; add their rows"),
        ("image,class\nx/1,a\ny/1,b\n2,a\n", {}, r"tells no single class of 1 of the 2 images of .*, such as '1\.png'"),
        ("image,class\n1,a\n1,b\n2,a", {}, r"t\.csv, line 3: '1' is 'b', but 'a' before; give each image one class"),
        ("image,class\n1,a\n2\n", {}, r"t\.csv, line 3: 1 values, but there are 2 columns"),
        ("image,kind\n1,a\n", {}, r"which column is that of the classes is not clear: .* columns image, kind; say it"),
        ("image,kind\n", {"class_columns": ("image", "sort")}, r"t\.csv has the columns image, kind, but no 'sort'"),
        ("image,label_1,label_2\n1,a,b\n2,a,b\n", {}, r"which column is that of the classes is not clear"),
        ("", {}, r"which column is that of the images is not clear: .* the columns none"),
        ("image,class\n" + "x" * 2**20, {}, "has a line of more than 1,048,576 characters"),
        (b"image,class\n\xff\xfe,a\n", {}, "is no table of text in UTF-8"),
    ):
        (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=said):
            ImageFolderConfig(**keys, **more).open()
    (tmp_path / "t.csv").write_text("image,kind\n2,a\n1,b\n")
    assert classes_of(**keys, class_columns=("image", "kind")) == {"1.png": "b", "2.png": "a"}
    with pytest.raises(UserError, match=r"class_table = 'u\.csv' is no file, neither by itself nor in "):
        ImageFolderConfig(path=str(tmp_path), class_table="u.csv").open()


def test_a_row_is_of_one_image(tmp_path: Path) -> None:
    put_images(tmp_path, "a/1.png", "b/1.png", "b/2.png")
    keys: dict[str, Any] = {"path": str(tmp_path), "class_table": "t.csv"}
    for rows in ("a/1.png,x\n2,y\n", "1.png,x\n2,y\n", "1,x\n2,y\n"):
        (tmp_path / "t.csv").write_text("image,class\n" + rows)
        with pytest.raises(UserError, match=r"tells no class of [12] of the 3 images of .*, such as '[ab]/1\.png'"):
            ImageFolderConfig(**keys).open()
    (tmp_path / "t.csv").write_text("image,class\na/1,x\n2,y\nb/1.png,y\n")
    assert classes_of(**keys) == {"a/1.png": "x", "b/1.png": "y", "b/2.png": "y"}


def test_folders_that_a_path_with_stars_leaves_out_are_no_classes(tmp_path: Path) -> None:
    put_images(tmp_path, "a/1.png", "b/1.png")
    assert classes_of(path=f"{tmp_path}/*/*.png", classes=True) == {"a/1.png": "a", "b/1.png": "b"}
    with pytest.raises(UserError, match=r"no folder of '1\.png' is below the first star.*such as images/\*/\*\.png"):
        ImageFolderConfig(path=f"{tmp_path}/a/*.png", classes=True).open()


def test_two_images_that_may_be_labels_of_one(tmp_path: Path) -> None:
    put_images(tmp_path, "x/1.png", "x/2.png", *(f"y/{word}_{n}.png" for word in ("seg", "mask") for n in (1, 2)))
    with pytest.raises(UserError, match=r"labels of '1' may be 'seg_1' or 'mask_1'; say which with stars"):
        ImageFolderConfig(path=str(tmp_path / "x"), labels=str(tmp_path / "y")).open()
    source = ImageFolderConfig(path=str(tmp_path / "x"), labels=f"{tmp_path}/y/mask_*.png").open()
    assert source.read_labels(0, (slice(None), slice(None))).shape == source.items[0].shape


def test_labels_of_images_go_by_usual_names_or_stars(tmp_path: Path) -> None:
    put_images(tmp_path, "x/a_img.png", "x/b_img.png", "y/a_seg.png", "y/b_seg.png", "z/1/a_img.tif", "z/1/b_img.tif")
    for path, labels in (
        (tmp_path / "x", tmp_path / "y"),
        (tmp_path / "x", tmp_path / "z" / "1" / "*.tif"),
        (f"{tmp_path}/x/*_img.png", f"{tmp_path}/y/*_seg.png"),
    ):
        source: Any = ImageFolderConfig(path=str(path), labels=str(labels)).open()
        for number, item in enumerate(source.items):
            assert item.name == f"{'ab'[number]}_img.png"
            expected = noise(8, 9, seed=number + (4 if str(labels).endswith("tif") else 2))
            assert np.array_equal(source.read_labels(number, WHOLE), expected)


def test_a_misspelt_colour_is_no_new_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode(noise(8, 9, 3)))
    assert ImageFolderConfig(path=str(tmp_path), variables=["r", "g", "b"]).open().variables == ("r", "g", "b")
    with pytest.raises(UserError, match="has no 'rde'; did you mean 'red'"):
        ImageFolderConfig(path=str(tmp_path), variables=["blue", "green", "rde"]).open()
    with pytest.raises(UserError, match="has no 'gren'; did you mean 'green'"):
        choose_channels(["blue", "gren", "red"], ("red", "green", "blue"), "a")


def test_images_by_url() -> None:
    import fsspec

    pixels = {name: noise(5, 6, seed=number) for number, name in enumerate(("cat/1.png", "cat/2.png", "dog/1.png"))}
    fsspec.filesystem("memory").pipe({f"/pictures/{name}": encode(data) for name, data in pixels.items()})
    assert guess_kind("memory://pictures") == "image_folder"
    source = ImageFolderConfig(path="memory://pictures").open()
    assert (source.class_names, [item.label for item in source.items]) == (("cat", "dog"), [0, 0, 1])
    # By one thread: all who open a file of fsspec's memory get the same object, with one place in it for all.
    check_windows(source, lambda item: list(pixels.values())[item][None], threads=1)


def test_colours_are_found_wherever_they_lie(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first images are grey: colours are kept all the same, and both halves of a split have them."""
    for number in range(40):
        Image.fromarray(noise(8, 8) if number % 8 != 7 else noise(8, 8, 3)).save(tmp_path / f"{number:02}.png")
    for split in ((0.0, 1.0), (0.0, 0.1), (0.1, 1.0)):
        source = ImageFolderConfig(path=str(tmp_path), split=split).open()
        assert source.variables == ("red", "green", "blue")
    assert source.mixed
    assert source.read(0, (slice(0, 8), slice(0, 8))).shape == (3, 8, 8)
    _, facts = inspect.look(str(tmp_path))
    assert any("some images are grey and others have colours" in told for told in facts["warnings"])
    grey = ImageFolderConfig(path=str(tmp_path), variables=["brightness"]).open()
    assert (grey.variables, list(grey.items)[7].shape) == (("brightness",), (8, 8))
    assert not caplog.records
    # One that was not among those looked at is told of when sizes are read.
    monkeypatch.setattr(ImageSource, "_find_colour", lambda source: None)
    source = ImageFolderConfig(path=str(tmp_path)).open()
    assert source.variables == ("grey",)
    assert len(list(source.items)) == 40
    assert "has colours, and is read as grey" in caplog.text


def test_shares_of_images(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(encode(noise(3, 3)))
    path = str(tmp_path)
    assert [i.name for i in ImageFolderConfig(path=path, start=0.5, end=0.7).open().items] == [
        f"{n}.png" for n in range(10, 14)
    ]
    for wrong in ({"start": 0.5, "end": 0.5}, {"weight": 0}, {"statistics": {"mean": [0]}}, {"split": (0.5, 2)}):
        with pytest.raises(UserError):
            ImageFolderConfig(path=path, **wrong)
    with pytest.raises(ValidationError):
        TypeAdapter(ImageFolderConfig).validate_python({"path": path, "colour": 1})


# Parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(
    path: Path, images: list[np.ndarray], *, plain: bool = False, groups: int = 4, **columns: Any
) -> Path:
    """As the hub writes them: {bytes, path}, and features in the metadata."""
    names = columns.pop("names", None)
    data = [encode(image) for image in images]
    held: Any = data if plain else [{"bytes": d, "path": f"{n}.png"} for n, d in enumerate(data)]
    kind = pa.binary() if plain else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(held, kind), **columns})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=groups)
    return path


@pytest.mark.parametrize("plain", [False, True])
def test_parquet_shards(tmp_path: Path, plain: bool) -> None:
    images = [noise(5 + n, 6, 3, seed=n) for n in range(22)]
    classes = [n % 3 for n in range(22)]
    for shard, rows in enumerate((slice(0, 10), slice(10, 22))):
        name = tmp_path / "repository" / "data" / f"train-{shard:05d}-of-00002.parquet"
        write_parquet(name, images[rows], plain=plain, label=classes[rows], names=["cat", "dog", "eel"])
    write_parquet(tmp_path / "repository" / "data" / "test-00000-of-00001.parquet", images[:2], label=[2, 0])
    path = str(tmp_path / "repository")
    assert guess_kind(path) == guess_kind(f"{path}/data") == "parquet"
    source: Any = ParquetConfig(path=path).open()
    assert isinstance(source, ClassifiedSource)
    assert source.class_names == ("cat", "dog", "eel")
    assert [item.label for item in source.items] == classes
    assert source.items[10].name == "train-00001-of-00002.parquet:0"
    check_windows(source, lambda item: channels(images[item]))
    assert len(ParquetConfig(path=path, part="test").open().items) == 2
    with pytest.raises(UserError, match="choose with `part` from test, train"):
        ParquetConfig(path=path, part="valid").open()
    (tmp_path / "repository" / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"holds 1 of the 2 files train-\*"):
        ParquetConfig(path=path).open()


def test_parquet_columns(tmp_path: Path) -> None:
    images, masks = [noise(4, 5, seed=n) for n in range(5)], [noise(4, 5, seed=-n + 9) % 4 for n in range(5)]
    more = {"species": ["owl", None, "ant", "owl", "bee"], "mask": [encode(mask) for mask in masks]}
    path = str(write_parquet(tmp_path / "a.parquet", images, label=[0, 1, -1, None, 3], **more))
    source: Any = ParquetConfig(path=path).open()
    assert source.class_names == ("0", "1", "2", "3")
    assert [item.label for item in source.items] == [0, 1, None, None, 3]
    named = ParquetConfig(path=path, label="species").open()
    assert (named.class_names, named.items[1].label, named.items[3].label) == (("ant", "bee", "owl"), None, 2)
    masked: Any = ParquetConfig(path=path, labels="mask").open()
    check_windows(masked, lambda item: images[item][None], lambda item: masks[item])
    for options, words in [
        ({"image": "photo"}, "no column .* choose from image, label, species, mask"),
        ({"image": "label"}, "not the bytes of images"),
        ({"label": "image"}, "classes are whole numbers or names"),
        ({"labels": "label"}, "not the bytes of images"),
    ]:
        with pytest.raises(UserError, match=words):
            ParquetConfig(path=path, **options).open()
    table = pa.table({"first": [b"a"], "second": [b"b"]})
    pq.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(UserError, match=r"several columns .* first \(binary\), second \(binary\)"):
        ParquetConfig(path=str(tmp_path / "two.parquet")).open()


def test_parquet_classes_in_a_dictionary(tmp_path: Path) -> None:
    labels = pa.array(["owl", "ant", None, "owl"]).dictionary_encode()  # as categories of pandas are written
    path = str(write_parquet(tmp_path / "a.parquet", [noise(4, 5)] * 4, label=labels))
    source: Any = ParquetConfig(path=path).open()
    assert source.class_names == ("ant", "owl")
    assert [item.label for item in source.items] == [1, 0, None, 1]


def test_bad_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [noise(30, 30, seed=n) for n in range(8)], groups=2)
    data = path.read_bytes()
    for kept, words in ((0, "is an empty file"), (len(data) // 2, "cannot be read"), (3, "cannot be read")):
        (tmp_path / "cut.parquet").write_bytes(data[:kept])
        with pytest.raises(BadData, match=rf"cut\.parquet {words}"):
            ParquetConfig(path=str(tmp_path / "cut.parquet")).open()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes(300) + data[middle + 300 :])
    source = ParquetConfig(path=str(path), size=(30, 30)).open()
    with pytest.raises(BadData, match=r"a\.parquet"):
        _ = [source.read(item, WHOLE) for item in range(8)]
    write_parquet(path, [noise(4, 4)], groups=2)
    table = pa.table({"image": pa.array([encode(noise(4, 4)), None], pa.binary())})
    pq.write_table(table, path)
    with pytest.raises(BadData, match=r"a\.parquet, row 1: column 'image' holds no bytes"):
        _ = ParquetConfig(path=str(path)).open().items[1]
    pq.write_table(table.slice(0, 0), path)
    with pytest.raises(UserError, match="has no rows"):
        ParquetConfig(path=str(path)).open()


@pytest.mark.skipif(not (SHARED / "cifar10" / "test.parquet").exists(), reason="CIFAR-10 is not here")
def test_cifar10_as_parquet_opens_by_path() -> None:
    path = str(SHARED / "cifar10" / "test.parquet")
    config: Any = kinds.find("source", guess_kind(path))
    source = config(path=path).open()
    assert (len(source.items), source.items[0].shape, len(source.class_names)) == (10_000, (32, 32), 10)
    with ThreadPoolExecutor(4) as pool:
        shapes = set(pool.map(lambda item: source.read(item, WHOLE).shape, range(0, 10_000, 97)))
    assert shapes == {(3, 32, 32)}
    assert guess_kind(str(SHARED / "isbi2012")) == guess_kind(str(SHARED / "isbi2012" / "image.tif")) == "tiff"
    assert guess_kind(str(SHARED / "era_interim" / "eraint_uvz.nc")) == "netcdf"


# WebDataset ------------------------------------------------------------------------------------------------------


def write_shard(path: Path, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"part/{path.stem}_{number:03d}", **sample})
    return path


def test_webdataset_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [noise(5 + n, 6, 3, seed=n) for n in range(9)]
    masks = [noise(5 + n, 6, seed=n + 99) % 3 for n in range(9)]
    samples = [
        {
            "png": Image.fromarray(image),
            "cls": n % 2,
            "json": {"animal": "cow" if n % 3 else "ape"},
            "seg.png": encode(mask),
        }
        for n, (image, mask) in enumerate(zip(images, masks, strict=True))
    ]
    write_shard(tmp_path / "set" / "train-000.tar", samples[:4])
    write_shard(tmp_path / "set" / "train-001.tar", samples[4:])
    path = str(tmp_path / "set")
    assert guess_kind(path) == guess_kind(f"{path}/train-000.tar") == guess_kind(path + "/train-{000..001}.tar")
    for place in (path, path + "/train-{000..001}.tar"):
        source: Any = WebdatasetConfig(path=place).open()
        check_windows(source, lambda item: channels(images[item]), lambda item: masks[item])
    assert [item.label for item in source.items] == [n % 2 for n in range(9)]
    assert source.items[4].name == "part/train-001_000"
    animals = WebdatasetConfig(path=path, label="json:animal").open()
    assert (animals.class_names, [item.label for item in animals.items][:2]) == (("ape", "cow"), [0, 1])
    named = WebdatasetConfig(path=path, classes=["even", "odd"]).open()
    assert named.class_names == ("even", "odd")
    with pytest.raises(UserError, match="has the class 1; mend it, or `classes`"):
        WebdatasetConfig(path=path, classes=["even"]).open()
    with pytest.raises(BadData, match="has no 'colour' in its json"):
        WebdatasetConfig(path=path, label="json:colour").open()
    with pytest.raises(BadData, match=r"part/train-000_000 has no member 'jpg', only cls, json, png, seg"):
        WebdatasetConfig(path=path, image="jpg").open()
    with pytest.raises(BadData, match=r"train-002\.tar does not exist"):
        WebdatasetConfig(path=path + "/train-{000..002}.tar").open()
    monkeypatch.setattr("tarfile.open", None)  # the headers are not read again
    assert len(WebdatasetConfig(path=path).open().items) == 9


def test_webdataset_arrays_and_patterns(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(n).random((4, 5)).astype(np.float32) for n in range(3)]
    path = str(write_shard(tmp_path / "a.tar", [{"npy": array} for array in arrays]))
    source = WebdatasetConfig(path=path).open()
    assert source.dtype == np.float32
    check_windows(source, lambda item: arrays[item][None])
    bad = write_shard(tmp_path / "b.tar", [{"npy": np.zeros((2, 3, 4, 5))}])
    with pytest.raises(BadData, match="holds 2 x 3 x 4 x 5 of float64"):
        WebdatasetConfig(path=str(bad)).open()
    assert expand("a-{008..010}.tar") == ["a-008.tar", "a-009.tar", "a-010.tar"]
    assert expand("{a,b}.tar") == ["a.tar", "b.tar"]
    with pytest.raises(UserError, match=r"must have one \{first..last\}"):
        expand("{0..1}-{0..1}.tar")


def test_a_tar_that_is_cut_is_named(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "a.tar", [{"png": Image.fromarray(noise(20, 20)), "cls": 0} for _ in range(5)])
    data = whole.read_bytes()
    cuts = {0, 100, 512, 700, 1024, 2048, *range(512, len(data) // 2, 1536)}  # in and between headers, and in members
    for cut in sorted(cuts):
        (tmp_path / "cut.tar").write_bytes(data[:cut])
        with pytest.raises(BadData, match=r"cut\.tar is cut short"):
            WebdatasetConfig(path=str(tmp_path / "cut.tar")).open()
    source = WebdatasetConfig(path=str(whole)).open()
    whole.write_bytes(data[:1000])  # after it was opened
    with pytest.raises(BadData, match=r"a\.tar is cut short: sample part/a_004"):
        source.read(4, WHOLE)
    import gzip

    (tmp_path / "z.tar").write_bytes(gzip.compress(data))
    with pytest.raises(UserError, match="compressed as a whole"):
        WebdatasetConfig(path=str(tmp_path / "z.tar")).open()


# CIFAR-10 --------------------------------------------------------------------------------------------------------


def test_cifar10_binary(tmp_path: Path) -> None:
    pixels, labels = noise(35, 3, 32, 32), (np.arange(35) % 10).astype(np.uint8)
    records = np.concatenate([labels[:, None], pixels.reshape(35, -1)], axis=1)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(2):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(records[number * 15 : number * 15 + 15].tobytes())
    (folder / "test_batch.bin").write_bytes(records[30:].tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    assert (
        guess_kind(str(folder)) == guess_kind(str(tmp_path)) == guess_kind(str(folder / "test_batch.bin")) == "cifar10"
    )
    source = Cifar10Config(path=str(folder)).open()
    assert isinstance(source, ClassifiedSource)
    assert [item.label for item in source.items] == labels[:30].tolist()
    assert (source.class_names, source.items[16].name) == (CLASSES, "data_batch_2.bin:1")
    check_windows(source, lambda item: pixels[item])
    picked = Cifar10Config(path=str(tmp_path), part="test", variables=["blue", "red"]).open()
    check_windows(picked, lambda item: pixels[30 + item][[2, 0]])
    half = {p: {i.name for i in Cifar10Config(path=str(folder), split=p).open().items} for p in ((0, 0.5), (0.5, 1))}
    assert not set.intersection(*half.values())
    assert len(set.union(*half.values())) == 30

    (folder / "data_batch_1.bin").write_bytes(records[:15].tobytes()[:-1])
    with pytest.raises(BadData, match=r"data_batch_1\.bin has 46,094 bytes, .* cut short"):
        Cifar10Config(path=str(folder)).open()
    (folder / "data_batch_1.bin").unlink()
    with pytest.raises(UserError, match=r"lacks data_batch_1\.bin"):
        Cifar10Config(path=str(folder)).open()
    records[33, 0] = 10
    (folder / "test_batch.bin").write_bytes(records[30:].tobytes())
    with pytest.raises(BadData, match=r"test_batch\.bin:3 has the class 10"):
        Cifar10Config(path=str(folder), part="test").open()


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    assert guess_kind(str(tmp_path)) == guess_kind(str(tmp_path / "data_batch_1")) == "cifar10"
    for path in (tmp_path, tmp_path / "data_batch_1"):
        with pytest.raises(UserError, match=r"a pickle, .* never read here; fetch the binary version"):
            Cifar10Config(path=str(path)).open()


# Latents ---------------------------------------------------------------------------------------------------------


def batches(latents: np.ndarray, labels: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    for first in range(0, len(latents), 7):
        yield latents[first : first + 7], None if labels is None else labels[first : first + 7]


@pytest.mark.parametrize("store", ["safetensors", "zarr"])
@pytest.mark.parametrize("shape", [(4, 6, 5), (2, 3, 4, 5)])
def test_latents(tmp_path: Path, store: Any, shape: tuple[int, ...]) -> None:
    latents = np.random.default_rng(0).normal(3, 2, (30, *shape)).astype(np.float32)
    latents[7] = 0  # written too, though nothing but the fill value
    labels = np.arange(30) // 10
    facts = write_latents(tmp_path / "a", batches(latents, labels), classes=["x", "y", "z"], rows=12, store=store)
    exact = latents.astype(np.float64)
    axes = tuple(a for a in range(exact.ndim) if a != 1)
    assert np.allclose(facts["mean"], exact.mean(axes), rtol=1e-12)
    assert np.allclose(facts["std"], exact.std(axes), rtol=1e-12)
    path = str(tmp_path / "a")
    assert guess_kind(path) == "latents"
    source = LatentsConfig(path=path).open()
    assert (source.axes, source.class_names) == (("z", "y", "x")[-len(shape) + 1 :], ("x", "y", "z"))
    assert [item.label for item in source.items] == labels.tolist()
    assert source.statistics == {"mean": facts["mean"], "std": facts["std"]}
    check_windows(source, lambda item: latents[item])
    picked = LatentsConfig(path=path, variables=["latent1"]).open()
    assert picked.statistics == {"mean": facts["mean"][1:2], "std": facts["std"][1:2]}
    check_windows(picked, lambda item: latents[item][1:2])
    with pytest.raises(UserError, match="exists and is not overwritten"):
        write_latents(tmp_path / "a", [])
    with pytest.raises(UserError, match="no latents"):
        write_latents(tmp_path / "b", [], store=store)
    assert not list(tmp_path.glob(".*"))  # nothing half done is left


def test_latents_of_zarr_by_url(tmp_path: Path) -> None:
    import fsspec

    latents = np.random.default_rng(0).normal(size=(5, 2, 3, 4)).astype(np.float32)
    write_latents(tmp_path / "a.zarr", batches(latents, np.arange(5)), store="zarr")
    fsspec.filesystem("memory").put(str(tmp_path / "a.zarr"), "/stored/a.zarr", recursive=True)
    assert guess_kind("memory://stored/a.zarr") == "latents"
    source = LatentsConfig(path="memory://stored/a.zarr").open()
    assert np.array_equal([source.read(item, WHOLE) for item in range(5)], latents)
    assert [item.label for item in source.items] == list(range(5))


def test_bad_latents(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    latents = np.random.default_rng(0).normal(size=(10, 2, 4, 4)).astype(np.float16)
    path = tmp_path / "a"
    write_latents(path, [(latents, None)], rows=4)
    source = LatentsConfig(path=str(path)).open()
    assert (source.dtype, source.class_names, source.items[0].label) == (np.float16, (), None)
    shard = path / "latents-00001.safetensors"
    data = shard.read_bytes()
    for kept in (0, 5, 60, len(data) - 1):
        shard.write_bytes(data[:kept])
        with pytest.raises(BadData, match=r"latents-00001\.safetensors is cut short"):
            LatentsConfig(path=str(path)).open()
    with pytest.raises(BadData, match="is cut short: row 3"):
        source.read(7, WHOLE)
    shard.unlink()
    with pytest.raises(BadData, match=r"latents-00001\.safetensors does not exist"):
        LatentsConfig(path=str(path)).open()
    index = json.loads((path / "index.json").read_text())
    for shards, words in [([{"file": "../x", "rows": 1}], "does not lie in its folder"), ([], "lists no shards")]:
        (path / "index.json").write_text(json.dumps(index | {"shards": shards}))
        with pytest.raises(UserError, match=words):
            LatentsConfig(path=str(path)).open()
    (path / "index.json").write_text("{")
    with pytest.raises(BadData, match=r"index\.json cannot be read"):
        LatentsConfig(path=str(path)).open()
    with pytest.raises(UserError, match="NaN or infinite"):
        write_latents(tmp_path / "b", [(np.full((1, 2, 3, 3), np.nan, np.float32), None)])

    import torch

    half = torch.randn(3, 2, 4, 4).bfloat16()
    save_file({"latents": half, "labels": torch.tensor([2, 0, -1])}, tmp_path / "one.safetensors")
    assert guess_kind(str(tmp_path / "one.safetensors")) == "latents"
    single = LatentsConfig(path=str(tmp_path / "one.safetensors")).open()
    assert single.dtype == np.float32
    assert [item.label for item in single.items] == [2, 0, None]
    check_windows(single, lambda item: half[item].float().numpy())
    for kind in (torch.int16, torch.uint8, torch.int8, torch.int32):
        save_file({"latents": half, "labels": torch.tensor([2, 0, 1], dtype=kind)}, tmp_path / "labels.safetensors")
        labelled = LatentsConfig(path=str(tmp_path / "labels.safetensors")).open()
        assert [item.label for item in labelled.items] == [2, 0, 1]
    save_file({"latents": half, "labels": torch.tensor([True, False, True])}, tmp_path / "labels.safetensors")
    with pytest.raises(BadData, match=r"its labels are BOOL; expected whole numbers"):
        LatentsConfig(path=str(tmp_path / "labels.safetensors")).open()
    write_latents(tmp_path / "d", [(latents[:3], None), (latents[3:], None)], rows=4, store="zarr")
    assert len(list((tmp_path / "d" / "latents" / "c").iterdir())) == -(-len(latents) // 4)  # files of several rows
    check_windows(LatentsConfig(path=str(tmp_path / "d")).open(), latents.__getitem__)
    write_latents(tmp_path / "c", [(latents, None)], rows=1, store="zarr")
    (tmp_path / "c" / "latents" / "c" / "5" / "0" / "0" / "0").unlink()
    lost = LatentsConfig(path=str(tmp_path / "c")).open()
    assert np.array_equal(lost.read(4, WHOLE), latents[4])
    with pytest.raises(BadData, match="row 5 cannot be read"):
        lost.read(5, WHOLE)


@pytest.mark.parametrize("store", ["single", "safetensors", "zarr"])
def test_latents_of_bytes_have_a_scale(tmp_path: Path, store: Any) -> None:
    """As TorchDiTan stores those of Cosmos-Tokenizer-CI8x8: a byte x stands for x * 16 / 255."""
    from safetensors.numpy import save_file

    from vitrail.recipe import load_recipe

    stored = np.random.default_rng(0).integers(0, 256, (5, 16, 4, 4), dtype=np.uint8)
    path = str(tmp_path / "imagenet_ci8x8.safetensors")
    if store == "single":
        save_file({"latents": stored, "labels": np.arange(5, dtype=np.int16)}, path)
    else:
        write_latents(path, [(stored, np.arange(5))], store=store)
    with pytest.raises(UserError, match=r"whole numbers \((U8|uint8)\).*give `scale`, such as 16/255"):
        LatentsConfig(path=path).open()
    entries = [{"kind": "latents", "path": path, "scale": scale} for scale in ("16/255", 16 / 255)]
    rest = {"run": {"name": "a", "steps": 1}, "model": {"kind": "dit", "size": "S/2"}}
    recipe = load_recipe(rest | {"data": {"train": entries, "crop": 4, "batch": 1}})
    for entry in recipe.data.train:
        source = entry.open()
        assert source.dtype == np.float32
        wanted = stored.astype(np.float64) * 16 / 255
        assert np.allclose([source.read(item, WHOLE) for item in range(5)], wanted, rtol=1e-6)
        assert [item.label for item in source.items] == list(range(5))
        if store != "single":
            assert np.allclose(source.statistics["mean"], wanted.mean((0, 2, 3)))
            assert np.allclose(source.statistics["std"], wanted.std((0, 2, 3)))
    moved = LatentsConfig(path=path, scale=2.0, shift=-8.0).open()
    assert np.allclose(moved.read(0, WHOLE), stored[0] * 2.0 - 8)
    write_latents(tmp_path / "floats", [(stored.astype(np.float32), np.arange(5))], store="safetensors")
    moved = LatentsConfig(path=str(tmp_path / "floats"), shift=100.0).open()
    assert np.allclose(moved.read(0, WHOLE), stored[0] + 100.0)
    for wrong in ("16/0", "16/", 0, "a/b", "1/2/3", True):
        with pytest.raises(
            UserError, match=r'scale.*expected a number above 0, or two with a stroke, such as "16/255"'
        ):
            load_recipe(rest | {"data": {"train": [entries[0] | {"scale": wrong}], "crop": 4, "batch": 1}})


# Made-up data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 50), (20, 30, 40)])
def test_synthetic_shapes(shape: tuple[int, ...]) -> None:
    source = SyntheticConfig(shape=shape, channels=2, items=40).open()
    assert isinstance(source, ClassifiedSource)
    whole = tuple(slice(0, n) for n in shape)
    check_windows(source, lambda item: source.read(item, whole), lambda item: source.read_labels(item, whole))
    assert {item.label for item in source.items} == {0, 1, 2, 3}
    for item in range(12):  # the class of an item is that of its voxels, which stand out
        labels, values = source.read_labels(item, whole), source.read(item, whole).astype(float)
        assert set(np.unique(labels)) == {0, source.items[item].label + 1}
        assert (values[:, labels > 0].mean(axis=1) > values[:, labels == 0].mean(axis=1)).all()
    again = SyntheticConfig(shape=shape, channels=2, items=40).open()
    other = SyntheticConfig(shape=shape, channels=2, items=40, seed=1).open()
    assert np.array_equal(again.read(5, whole), source.read(5, whole))
    assert not np.array_equal(other.read(5, whole), source.read(5, whole))
    mixed = SyntheticConfig(shape=shape, objects=30, mixed=True, items=1, classes=3).open()
    assert set(np.unique(mixed.read_labels(0, whole))) == {0, 1, 2, 3}
    assert (mixed.class_names, mixed.items[0].label) == ((), None)
    assert mixed.label_names == {0: "background", **{n + 1: name for n, name in enumerate(KINDS[:3])}}
    for wrong in ({"shape": (4,)}, {"classes": 9}, {"noise": -1}, {"items": 0}):
        with pytest.raises(UserError):
            SyntheticConfig(**wrong)


def test_dummy_values_are_made_once() -> None:
    source = DummyConfig(shape=(64, 64), channels=16, items=1_000_000, classes=1000).open()
    assert (len(source.items), len(source.items[7].shape), source.items[1_234].label) == (1_000_000, 2, 234)
    first, second = (source.read(item, (slice(0, 32), slice(8, 40))) for item in (0, 999_999))
    assert first.shape == (16, 32, 32)
    assert np.shares_memory(first, second)
    check_windows(source, lambda item: source.read(0, WHOLE), lambda item: source.read_labels(0, WHOLE))
    for dtype in ("uint8", "uint16", "float16"):
        assert DummyConfig(shape=(8, 8, 8), dtype=dtype).open().read(0, (slice(0, 2),) * 3).dtype == dtype
    for wrong in ({"shape": (4096, 4096, 4096)}, {"shape": (0, 4)}, {"channels": 0}):
        with pytest.raises(UserError):
            DummyConfig(**wrong)


# Guessing --------------------------------------------------------------------------------------------------------


def test_kinds_of_files_and_folders(tmp_path: Path) -> None:
    def make(name: str, data: bytes = b"") -> str:
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return str(place)

    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((5, 8, 8), np.uint8))
    tifffile.imwrite(tmp_path / "big.tif", np.zeros((5, 8, 8), np.uint8), bigtiff=True)
    tifffile.imwrite(tmp_path / "flat.tif", np.zeros((8, 8), np.uint8))
    tifffile.imwrite(
        tmp_path / "map.tif", np.zeros((8, 8), np.uint8), extratags=[(33550, "d", 3, (1.0, 1.0, 0.0), True)]
    )
    for name in ("stack", "big", "flat", "map"):
        folder = tmp_path / f"{name}s"
        folder.mkdir()
        (folder / "1.tif").write_bytes((tmp_path / f"{name}.tif").read_bytes())
    tar = io.BytesIO()
    with webdataset.TarWriter(tar) as writer:
        writer.write({"__key__": "a", "cls": 1})
    expected = {
        make("a.nii.gz"): "nifti",
        make("b.h5") + "::raw": "hdf5",
        make("no_suffix_h", b"\x89HDF\r\n\x1a\n"): "hdf5",
        make("c.nc"): "netcdf",
        make("no_suffix_c", b"CDF\x01"): "netcdf",
        make("d.npy"): "numpy",
        make("no_suffix_t", tar.getvalue()): "webdataset",
        make("no_suffix_n", bytes(344) + b"n+1\0"): "nifti",
        make("e.jpg"): "image_folder",
        str(tmp_path / "stack.tif"): "tiff",
        str(tmp_path / "flat.tif"): "tiff",
        str(tmp_path / "map.tif"): "geotiff",
        str(tmp_path / "stacks"): "tiff",
        str(tmp_path / "bigs"): "tiff",
        str(tmp_path / "flats"): "image_folder",
        str(tmp_path / "maps"): "geotiff",
        make("broken/1.tif", b"II*\0\xff\xff"): "tiff",
        str(Path(make("scans/1.nii")).parent): "nifti",
        str(Path(make("nnunet/imagesTr/a_0000.nii.gz")).parent.parent): "nifti",
        str(Path(make("old.n5/attributes.json", b'{"n5": "2.0.0"}')).parent): "n5",
        str(Path(make("named/attributes.json", b'{"n5": "2.0.0"}')).parent): "n5",
        str(tmp_path / "later.parquet"): "parquet",
        str(tmp_path / "later.n5" / "s0"): "n5",
    }
    zarr.create_array(str(tmp_path / "plain.zarr"), shape=(4, 4), dtype="u1", zarr_format=2)
    zarr.create_group(str(tmp_path / "tree"), zarr_format=3).create_array("a", shape=(4, 4), dtype="u1")
    ome = {"ome": {"version": "0.5", "multiscales": []}}
    zarr.create_group(str(tmp_path / "ome"), zarr_format=3, attributes=ome)
    expected |= {
        str(tmp_path / "plain.zarr"): "zarr",
        str(tmp_path / "tree"): "zarr",
        str(tmp_path / "ome"): "ome_zarr",
    }
    assert {path: guess_kind(path) for path in expected} == expected
    assert set(expected.values()) <= set(kinds.known("source"))


def test_what_cannot_be_guessed_says_what_is_there(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("pictures/1.png", encode(noise(4, 4)))
    inside = f"zip://pictures::{tmp_path / 'x.zip'}"
    assert guess_kind(inside) == "image_folder"
    assert np.array_equal(ImageFolderConfig(path=inside).open().read(0, WHOLE)[0], noise(4, 4))
    for name in ("mixed/a.npy", "mixed/b.png", "deep/train/cat/1.png", "deep/valid/cat/1.png", "odd/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name, words in [
        ("mixed", r"several kinds \(1 of numpy and 1 of image_folder\); say which with `kind`"),
        ("deep", r"holds train/, valid/, but no data that is known; give one of its folders, such as \S+deep/train;"),
        ("odd", r"holds notes\.txt, but no data .* one of these kinds.*: cifar10, dummy, "),
        ("odd/notes.txt", "a file of a kind that neither its name nor its first bytes tell"),
        ("none", "does not exist"),
        ("x.zip", r"is an archive; read what lies inside with zip://FOLDER::\S+x\.zip"),
    ]:
        with pytest.raises(UserError, match=words):
            guess_kind(str(tmp_path / name))
    with pytest.raises(UserError, match="not a known kind of URL"):
        guess_kind("htpp://host/folder")
    with pytest.raises(UserError, match="cannot be reached"):
        guess_kind("http://127.0.0.1:9/folder")


# Together --------------------------------------------------------------------------------------------------------


def test_batches_of_several_kinds(tmp_path: Path) -> None:
    """Sources of five kinds in one mixture: every sample is a crop of its image, with the class of that image."""
    import torch

    from vitrail.data.batch import Labelling
    from vitrail.data.dataset import Dataset
    from vitrail.data.reading.loader import Loader

    # Every pixel of an image has its class as its value, whatever the kind.
    def image(label: int, size: int) -> np.ndarray:
        return np.full((size, size, 3), label, np.uint8)

    for label in range(3):
        (tmp_path / "folder" / str(label)).mkdir(parents=True)
        (tmp_path / "folder" / str(label) / "a.png").write_bytes(encode(image(label, 20 + label)))
    samples = [{"png": Image.fromarray(image(n % 3, 16)), "cls": n % 3} for n in range(4)]
    records = [bytes([n % 3]) + image(n % 3, 32).tobytes() for n in range(6)]
    (tmp_path / "test_batch.bin").write_bytes(b"".join(records))
    (tmp_path / "batches.meta.txt").write_text("\n".join(map(str, range(10))))
    latents = np.stack([channels(image(n % 3, 18)) for n in range(5)]).astype(np.float32)
    write_latents(tmp_path / "latents", [(latents, np.arange(5) % 3)])
    names = {"variables": ["red", "green", "blue"]}
    configs = [
        ImageFolderConfig(path=str(tmp_path / "folder")),
        ParquetConfig(
            path=str(write_parquet(tmp_path / "a.parquet", [image(n % 3, 17) for n in range(4)], label=[0, 1, 2, 0]))
        ),
        WebdatasetConfig(path=str(write_shard(tmp_path / "a.tar", samples))),
        Cifar10Config(path=str(tmp_path / "test_batch.bin")),
        LatentsConfig(path=str(tmp_path / "latents"), **names),
    ]
    dataset = Dataset(configs, (16, 16), where="data.train", labels="item")
    classes = dataset.class_names()
    assert classes[:3] == ("0", "1", "2")
    sampler = dataset.sampler(seed=0, lanes=4, reuse=1)
    reader = dataset.reader(sampler, lanes=4, cache_bytes=1 << 20, labelling=Labelling("item", classes))
    counters = range(4 * sampler.epoch // 4 * 4)
    seen = set()
    loader = Loader(
        sampler,
        reader,
        lambda step: counters[step * 4 : step * 4 + 4],
        device=torch.device("cpu"),
        workers=4,
        prefetch=2,
    )
    for step, batch in enumerate(loader.batches(0, len(counters) // 4)):
        assert batch.labels is not None
        for row, (values, label) in enumerate(zip(batch.values, batch.labels, strict=True)):
            assert (values == label).all()
            seen.add(sampler(counters[step * 4 + row]).source)
    assert seen == set(range(5))
