"""What data do not say of themselves is told at the first look, with the line to write."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.data.axes import likely_axes
from vitrail.data.look.inspect import look
from vitrail.data.source import notes_of
from vitrail.data.sources.arrays import NumpyConfig
from vitrail.errors import BadData, UserError, some
from vitrail.recipe import yaml


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape, "uint8")


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    found = capsys.readouterr()
    assert ended.value.code == 0, found.err
    return found.out


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((48, 64, 64, 3), "zyxc"),
        ((500, 28, 28, 1), "nyxc"),
        ((500, 64, 64, 3), "nyxc"),
        ((500, 3, 64, 64), "ncyx"),
        ((30, 64, 64, 64), "nzyx"),
        ((128, 128, 100, 2), "zyxc"),
        ((8, 2, 32, 32, 32), "nczyx"),
        ((8, 32, 32, 32, 2), "nzyxc"),
        ((64, 64, 3), "yxc"),
        ((3, 64, 64), "cyx"),
        ((1000, 28, 28), "nyx"),
        ((64, 64), None),
        ((64, 512, 512), None),
        ((2000, 512, 512), None),
        ((40, 128, 128), None),
        ((9, 32, 128, 128), None),
        ((3, 64, 64, 64), None),
        ((1, 2, 32, 32, 32), None),
    ],
)
def test_sizes_speak_for_axes(shape: tuple[int, ...], axes: str | None) -> None:
    assert likely_axes(shape) == axes


def test_axes_that_no_file_names_are_told_with_the_line_to_write(tmp_path: Path) -> None:
    """Images one behind another were read as one volume of so many channels, without a word."""
    np.save(tmp_path / "a.npy", noise(60, 16, 16, 3))
    (note,) = NumpyConfig(path=str(tmp_path / "a.npy")).open().notes
    assert "does not name its axes, and 60 x 16 x 16 x 3 is read as czyx" in note
    assert "60 items and 3 channels, write `axes: nyxc`, and if not, `axes: czyx`" in note
    for given in ("czyx", "nyxc"):
        assert NumpyConfig(path=str(tmp_path / "a.npy"), axes=given).open().notes == []
    _, facts = look(str(tmp_path / "a.npy"))
    assert (facts["items"], facts["variables"]) == (60, ["channel0", "channel1", "channel2"])
    entry = yaml.parse(facts["recipe"], "recipe")["data"]["train"][0]
    assert entry == {"path": str(tmp_path / "a.npy"), "axes": "nyxc", "end": 0.8}
    assert any("`axes: nyxc`" in told for told in facts["warnings"])


def test_a_deep_volume_is_not_taken_for_images(tmp_path: Path) -> None:
    for number, items in ((200, 1), (400, 400)):
        np.save(tmp_path / "a.npy", noise(number, 40, 40))
        _, facts = look(str(tmp_path / "a.npy"))
        assert facts["items"] == items
        assert any("write `axes: nyx`, and if not, `axes: zyx`" in told for told in facts["warnings"])


def test_axes_that_a_file_names_are_taken(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    from vitrail.data.sources.hdf5 import Hdf5Config

    for name, told in (("a.h5", None), ("b.h5", "czyx")):
        with h5py.File(tmp_path / name, "w") as file:
            file["raw"] = noise(32, 32, 24, 2)
            if told is not None:
                file["raw"].attrs["axes"] = told
    (note,) = Hdf5Config(path=str(tmp_path / "a.h5")).open().notes
    assert "`axes: zyxc`" in note
    assert "`xyzc` where x comes first" in note
    assert Hdf5Config(path=str(tmp_path / "b.h5")).open().notes == []


def test_each_slice_along_n_is_an_item(tmp_path: Path) -> None:
    values, labels = noise(12, 10, 9, 3), noise(12, 10, 9) % 2
    np.save(tmp_path / "a.npy", values)
    np.save(tmp_path / "l.npy", labels)
    keys: dict[str, Any] = {"path": str(tmp_path / "a.npy"), "axes": "nyxc", "labels": str(tmp_path / "l.npy")}
    source = NumpyConfig(**keys, start=0.5).open()
    assert (source.axes, len(source.items), source.items[0].name) == (("y", "x"), 6, "a.npy[06]")
    window = (slice(2, 7), slice(1, 9))
    assert np.array_equal(source.read(1, window), values[7, 2:7, 1:9].transpose(2, 0, 1))
    assert np.array_equal(source.read_labels(1, window), labels[7, 2:7, 1:9])
    np.save(tmp_path / "l.npy", labels[:11])
    with pytest.raises(BadData, match=r"has 12 items along n, but another .* have 11"):
        NumpyConfig(**keys).open()
    with pytest.raises(UserError, match="n and t cannot both be given"):
        NumpyConfig(path=keys["path"], axes="ntyx").open()
    with pytest.raises(UserError, match=r"has 4 axes of sizes .* n for items"):
        NumpyConfig(path=keys["path"], axes="nyx").open()


def test_chunked_arrays_have_items_along_n(tmp_path: Path) -> None:
    import zarr

    from vitrail.data.sources.zarr import ZarrConfig

    values = noise(10, 12, 12, 3)
    made = zarr.create_array(str(tmp_path / "a.zarr"), shape=values.shape, dtype="uint8", chunks=(4, 6, 12, 3))
    made[:] = values
    plain = ZarrConfig(path=str(tmp_path / "a.zarr")).open()
    assert any("`axes: " in note for note in notes_of(plain))
    source = ZarrConfig(path=str(tmp_path / "a.zarr"), axes="nyxc").open()
    assert len(source.items) == 10
    assert np.array_equal(source.read(9, (slice(3, 11), slice(0, 12))), values[9, 3:11].transpose(2, 0, 1))


def test_long_lists_are_printed_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A look at 500 channels printed 5,027 lines."""
    np.save(tmp_path / "a.npy", np.ones((500, 12, 24, 24), "uint8"))
    words = ("data", "inspect", tmp_path / "a.npy", "--set", "axes=czyx")
    shown = printed(capsys, *words)
    assert len(shown.splitlines()) < 150
    assert max(map(len, shown.splitlines())) < 400
    assert "(500 in all)" in shown
    assert "... and 492 more, which --json lists" in shown
    assert printed(capsys, *words, "--json").count("channel") >= 1000
    assert some("abc") == "a, b, c"
    assert some(range(30), 4) == "0, 1, ... (30 in all)"


def write_images(folder: Path, number: int = 24) -> list[str]:
    folder.mkdir(parents=True)
    names = [f"scan_{n:02}" for n in range(number)]
    for n, name in enumerate(names):
        Image.fromarray(noise(12, 12) // (1 + n % 2)).save(folder / f"{name}.png")
    return names


@pytest.mark.parametrize("place", ["images/labels.csv", "labels.tsv"])
@pytest.mark.parametrize("columns", [("image", "label"), ("slide", "finding")])
def test_a_table_of_classes_is_noticed(place: str, columns: tuple[str, str], tmp_path: Path) -> None:
    names = write_images(tmp_path / "images")
    mark = "\t" if place.endswith("tsv") else ","
    rows = [mark.join(("who", *columns)), *(mark.join((f"p{n}", name, "ab"[n % 2])) for n, name in enumerate(names))]
    (tmp_path / place).write_text("\n".join(rows))
    source, facts = look(str(tmp_path / "images"))
    assert facts["class_counts"] == {"a": 12, "b": 12}
    assert any("tells the 2 classes of the images: `class_table: " in told for told in facts["warnings"])
    tree = yaml.parse(facts["recipe"], "recipe")
    entry = tree["data"]["train"][0]
    assert entry["class_table"] in ("labels.csv", str(tmp_path / "labels.tsv"))
    assert entry.get("class_columns") == (None if columns[0] == "image" else list(columns))
    assert tree["objective"] == {"kind": "classify"}
    assert source.class_names == ("a", "b")


def test_a_table_that_tells_no_classes_is_said(tmp_path: Path) -> None:
    names = write_images(tmp_path / "images")
    table = tmp_path / "images" / "t.csv"
    table.write_text("image,label\n" + "\n".join(f"{name},{n}" for n, name in enumerate(names)))
    _, facts = look(str(tmp_path / "images"))
    assert any("is not taken for classes: it tells 24 of 24 images" in told for told in facts["warnings"])
    table.write_text("image,label\nscan_00,a\nscan_01,b\n")
    _, facts = look(str(tmp_path / "images"))
    assert any("t.csv tells no classes" in told for told in facts["warnings"])
    assert "class_table" not in facts["recipe"]


def test_the_frequent_label_is_the_background(tmp_path: Path) -> None:
    """Of cells that are 255 and membranes that are 0, the membranes became the class that is not scored."""
    labels = np.full((24, 64, 64), 255, np.uint8)
    labels[:, ::4] = 0
    np.save(tmp_path / "a.npy", noise(24, 64, 64))
    np.save(tmp_path / "l.npy", labels)
    settings = {"labels": str(tmp_path / "l.npy")}
    _, facts = look(str(tmp_path / "a.npy"), settings=settings)
    entry = yaml.parse(facts["recipe"], "recipe")["data"]["train"][0]
    assert entry["label_map"] == {"0": 1, "255": 0}
    assert any("255, which 75 % of the voxels have, is the background" in told for told in facts["warnings"])
    np.save(tmp_path / "l.npy", np.where(labels, 0, 255).astype("uint8"))
    _, facts = look(str(tmp_path / "a.npy"), settings=settings)
    assert yaml.parse(facts["recipe"], "recipe")["data"]["train"][0]["label_map"] == {"255": 1}
    np.save(tmp_path / "l.npy", labels // 255)
    _, facts = look(str(tmp_path / "a.npy"), settings=settings)
    assert "label_map" not in yaml.parse(facts["recipe"], "recipe")["data"]["train"][0]
    assert any("label 1 has 75 % of the voxels" in told for told in facts["warnings"])
    np.save(tmp_path / "l.npy", np.where(labels, 65535, 0).astype("uint16"))
    _, facts = look(str(tmp_path / "a.npy"), settings=settings)
    assert yaml.parse(facts["recipe"], "recipe")["data"]["train"][0]["label_map"] == {"0": 1, "65535": 0}
