"""Folders of slices of which a few are labelled: what is left out, what is proposed, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.data.generate import write_slices
from vitrail.data.look.inspect import look, open_source
from vitrail.data.source import notes_of
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.errors import UserError
from vitrail.infer.outputs import choose_format
from vitrail.training.new import Machine, new_recipe

CPU = Machine("cpu", "cpu", 8.0, 2)


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    return write_slices(tmp_path / "tissue", (30, 48, 64))


def test_images_without_labels_are_neither_read_nor_counted(slices: Path) -> None:
    config = ImageFolderConfig(path=str(slices / "images"), labels=str(slices / "labels"), unlabelled="leave_out")
    source = config.open()
    assert [item.name for item in source.items] == [f"slice-{z:03}.tif" for z in (3, 9, 15, 21, 27)]
    for number, item in enumerate(source.items):
        box = (slice(0, 48), slice(0, 64))
        for folder, found in (("images", source.read(number, box)[0]), ("labels", source.read_labels(number, box))):
            assert (found == np.asarray(Image.open(slices / folder / item.name))).all()
    assert notes_of(source) == [
        f"25 of 30 images have no labels in {slices}/labels and are left out, such as slice-000.tif"
    ]
    held_out = ImageFolderConfig(
        path=str(slices / "images"), labels=str(slices / "labels"), unlabelled="leave_out", start=0.8
    ).open()
    assert [item.name for item in held_out.items] == ["slice-027.tif"]
    assert len(ImageFolderConfig(path=str(slices / "images")).open().items) == 30


def test_stars_leave_out_what_has_no_labels(slices: Path) -> None:
    path, labels = f"{slices}/images/slice-*.tif", f"{slices}/labels/slice-*.tif"
    assert len(ImageFolderConfig(path=path, labels=labels, unlabelled="leave_out").open().items) == 5
    with pytest.raises(UserError, match="which does not exist"):
        ImageFolderConfig(path=path, labels=labels).open()


def test_folders_of_volumes_and_of_their_labels_are_found_by_all_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.cli import main
    from vitrail.training import new
    from vitrail.view.show import gather

    values = np.random.default_rng(0).integers(0, 255, (20, 30, 40)).astype(np.uint8)
    for folder, array in (("images", values), ("labels", (values > 99).astype(np.uint8))):
        (tmp_path / "all" / folder).mkdir(parents=True)
        for number in range(2):
            np.save(tmp_path / "all" / folder / f"{number}.npy", array)
    layers = gather([str(tmp_path / "all")])
    assert [(layer.kind, layer.levels[0].shape) for layer in layers] == [
        ("image", (20, 30, 40)),
        ("labels", (20, 30, 40)),
    ]
    made = {"text": "a: 1", "notes": [], "held_out": ""}
    monkeypatch.setattr(new, "new_recipe", lambda *_, **__: made)
    with pytest.raises(SystemExit) as ended:
        main(["new", str(tmp_path / "all"), "--task", "segment", "--out", str(tmp_path / "r.yaml"), "--json"])
    assert ended.value.code == 0
    assert (tmp_path / "r.yaml").is_file()


def test_a_folder_that_has_no_labels_at_all_is_left_out(tmp_path: Path) -> None:
    for place in ("images/a/0.png", "images/b/1.png", "drawn/a/0.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 1).save(tmp_path / place)
    keys = {"path": str(tmp_path / "images"), "labels": str(tmp_path / "drawn")}
    source = ImageFolderConfig(**keys, unlabelled="leave_out").open()
    assert [item.name for item in source.items] == ["a/0.png"]
    with pytest.raises(UserError, match=r"drawn"):
        ImageFolderConfig(**keys).open()


def test_classes_of_images_stay_with_them(tmp_path: Path) -> None:
    for group, number in (("a", 0), ("a", 1), ("b", 2)):
        for folder in ("images", "drawn"):
            if folder == "images" or number:
                (tmp_path / folder / group).mkdir(parents=True, exist_ok=True)
                Image.new("L", (8, 8), number).save(tmp_path / folder / group / f"{number}.png")
    source = ImageFolderConfig(
        path=str(tmp_path / "images"), labels=str(tmp_path / "drawn"), unlabelled="leave_out"
    ).open()
    assert [(item.name, item.label) for item in source.items] == [("a/1.png", 0), ("b/2.png", 1)]


def test_what_is_missing_is_an_error_unless_it_is_allowed(slices: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no labels for the image slice-000.tif; .* by unlabelled: leave_out"):
        ImageFolderConfig(path=str(slices / "images"), labels=str(slices / "labels")).open()
    (tmp_path / "none").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "none" / "other.png")
    with pytest.raises(UserError, match="give every image one of the same name, say"):
        ImageFolderConfig(path=str(slices / "images"), labels=str(tmp_path / "none"), unlabelled="leave_out").open()


def test_a_folder_of_images_and_labels_is_read_as_such(slices: Path) -> None:
    source, facts = look(str(slices))
    assert len(source.items) == 5
    assert "unlabelled: leave_out" in facts["recipe"]
    assert "start: 0.8" in facts["recipe"]
    assert any("holds images/ and labels/" in told for told in facts["warnings"])


def test_where_all_have_labels_nothing_is_left_out(slices: Path) -> None:
    for image in (slices / "images").iterdir():
        if not (slices / "labels" / image.name).exists():
            image.unlink()
    config, source = open_source(str(slices), kind=None, settings=None)
    assert config.unlabelled == "error"
    assert len(source.items) == 5


def test_folders_that_are_classes_stay_classes(tmp_path: Path) -> None:
    for name in ("images", "others"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "a.png")
    config, _ = open_source(str(tmp_path), kind=None, settings=None)
    assert config.labels is None


def test_a_recipe_for_them_has_a_labelled_held_out_part(slices: Path) -> None:
    made = new_recipe(str(slices), "segment", machine=CPU)
    assert made["held_out"] == "the last 1 of 5 items"
    assert made["text"].count("unlabelled: leave_out") == 2
    plain = new_recipe(str(slices), "pretrain", machine=CPU)
    assert "unlabelled" not in plain["text"]


def test_one_file_for_many_slices_says_how_they_are_one_volume() -> None:
    from types import SimpleNamespace

    form = SimpleNamespace(on="voxels", write="classes")
    with pytest.raises(UserError, match="--kind tiff --set slices_are=z"):
        choose_format(Path("a.ome.zarr"), "image_folder", form, 30)  # type: ignore[arg-type]
