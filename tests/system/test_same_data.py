"""A run that is continued on other data than it began with: refused with what differs, unless they are the same."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import reseal
from PIL import Image
from support import tiny_recipe, write_volume
from watching import call, last_line

from vitrail.data.dataset import Dataset
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.errors import UserError
from vitrail.training.alike import compare_data, data_facts
from vitrail.training.run import train
from vitrail.weights.runs import list_checkpoints, read_manifest

SMALL = {"run__steps": 4, "checkpoint__every": 2, "log__pictures": 10**6, "log__activations": "off", "eval__every": 100}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run on them; the recipe names the data by a path that moves along."""
    home = tmp_path_factory.mktemp("begun")
    write_volume(home / "em.zarr")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        train(tiny_recipe(Path("em.zarr"), Path("run"), **SMALL), quiet=True)
    return home


@pytest.fixture
def home(begun: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of it elsewhere, which keeps times."""
    monkeypatch.chdir(shutil.copytree(begun, tmp_path / "copy", symlinks=True))
    return tmp_path / "copy"


def lengthen(home: Path, steps: int = 6, **options: Any) -> list[str]:
    """Continue the run; what its first lines note."""
    assert train(home / "run", overrides=[f"run.steps={steps}"], quiet=True, **options).step == steps
    return last_line(home / "run", "start")["notes"]


def test_data_that_were_moved_are_the_same(home: Path) -> None:
    assert not [note for note in lengthen(home) if "data" in note]


def test_a_copy_with_other_times_is_noted_and_taken(home: Path) -> None:
    shutil.move("em.zarr", "old")
    shutil.copytree("old", "em.zarr", copy_function=shutil.copyfile)
    notes = lengthen(home)
    assert any("the times or names of its" in note and "taken for the same data" in note for note in notes), notes


def test_a_staged_copy_is_the_same(home: Path, tmp_path: Path) -> None:
    stage = json.dumps({"dir": str(tmp_path / "stage")})
    assert train(home / "run", overrides=["run.steps=6", f"data.stage={stage}"], quiet=True).step == 6
    assert not [note for note in last_line(home / "run", "start")["notes"] if "data" in note]


def test_other_values_are_refused_until_they_are_accepted(home: Path, capfd) -> None:
    shutil.rmtree("em.zarr")
    write_volume(home / "em.zarr", seed=1)
    before = sorted(list_checkpoints(home / "run" / "checkpoints"))
    assert call("train", home / "run", "run.steps=6") == 2
    told = capfd.readouterr().err
    assert "was begun with other data (data.train.0: values differ at" in told
    assert "--other-data" in told
    assert sorted(list_checkpoints(home / "run" / "checkpoints")) == before
    assert any("continued on other data: data.train.0" in note for note in lengthen(home, other_data=True))
    assert not [note for note in lengthen(home, 8) if "other data" in note]  # which are this run's from then on


def test_another_shape_is_refused(home: Path) -> None:
    shutil.rmtree("em.zarr")
    write_volume(home / "em.zarr", size=40)
    with pytest.raises(
        UserError, match=r"data\.train\.0: shape \[48, 48, 29\] became \[40, 40, 24\]; data\.valid\.0: "
    ):
        train(home / "run", overrides=["run.steps=6"], quiet=True)


def test_files_that_came_or_changed_their_size_are_refused(home: Path) -> None:
    (home / "em.zarr" / "more").write_text("x")
    with pytest.raises(UserError, match=r"data\.train\.0: \d+ files with \d+ bytes became \d+ with \d+"):
        train(home / "run", overrides=["run.steps=6"], quiet=True)


def test_a_run_of_an_older_vitrail_goes_on_with_a_note(home: Path) -> None:
    for folder in list_checkpoints(home / "run" / "checkpoints"):
        reseal(folder, format=1, data={})
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["format"] == 1
    (home / "em.zarr" / "more").write_text("x")
    assert any("did not write down what its data were" in note for note in lengthen(home))
    newest = list_checkpoints(home / "run" / "checkpoints")[0]
    assert read_manifest(newest)["data"]["train"][0]["items"] == 1


def test_the_data_may_hold_the_run_itself(tmp_path: Path, monkeypatch) -> None:
    """Its checkpoints would make other data of them at every step."""
    write_volume(tmp_path / "em.zarr")
    train(tiny_recipe(tmp_path / "em.zarr", tmp_path / "em.zarr" / "run", **SMALL), quiet=True)
    assert not [note for note in lengthen(tmp_path / "em.zarr") if "data" in note]


# ---------------------------------------------------------------- folders of images


def write_images(folder: Path, number: int, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    for n in range(number):
        path = folder / ("cat", "dog")[n % 2] / f"{n:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (12, 12), np.uint8)).save(path)


def facts_of(folder: Path, before: Any = None) -> dict[str, Any]:
    config = ImageFolderConfig(path=str(folder))
    dataset = Dataset([config], (8, 8), where="data.train", labels="item")
    return data_facts(
        {"train": dataset, "valid": None}, {"train": [config], "valid": ()}, before, folder.parent / "run"
    )


def test_images_that_changed_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_images(folder, 6)
    before = json.loads(json.dumps(facts_of(folder)))
    assert compare_data(before, facts_of(folder, before)) == ([], [])

    write_images(folder, 7)
    assert compare_data(before, facts_of(folder, before))[0] == ["data.train.0: items 6 became 7"]
    (folder / "cat" / "006.png").unlink()

    write_images(folder, 6, seed=1)  # all are others, of the same size, or nearly so
    others, _ = compare_data(before, facts_of(folder, before))
    assert others[0].startswith("data.train.0: values differ at 16 of 16 places")

    write_images(folder, 6)
    (folder / "cat" / "000.png").rename(folder / "dog" / "000.png")
    assert compare_data(before, facts_of(folder, before))[0] == ["data.train.0: the classes of its items are others"]


def test_untouched_files_are_not_read_again(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "images"
    write_images(folder, 4)
    before = facts_of(folder)
    monkeypatch.setattr("vitrail.training.alike._look", lambda *_: pytest.fail("was read again"))
    assert facts_of(folder, before) == before


def test_facts_of_any_form_do_no_harm(tmp_path: Path) -> None:
    """A checkpoint may come from anywhere."""
    folder = tmp_path / "images"
    write_images(folder, 2)
    now = facts_of(folder)
    for odd in (None, [], {}, {"train": 3}, {"train": [None]}, {"train": [[]]}, {"train": [{"files": 3, "values": 7}]}):
        assert facts_of(folder, odd) == now
        compare_data(odd, now)
    others, _ = compare_data({"train": [{"items": "many"}]}, now)
    assert others == ["data.train.0: items many became 2"]


def test_a_place_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    write_images(folder, 4)
    config = ImageFolderConfig(path=str(folder))
    dataset = Dataset([config], (8, 8), where="data.train")
    os.truncate(folder / "cat" / "000.png", 40)
    found = data_facts({"train": dataset}, {"train": [config]}, None, tmp_path / "run")["train"][0]
    assert None in found["values"]
    assert any(value is not None for value in found["values"])
