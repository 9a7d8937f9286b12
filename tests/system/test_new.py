"""`vitrail new`: what it writes is a recipe that is valid, can be planned, and trains as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from support import events, write_volume

import vitrail
from vitrail.cli import main
from vitrail.cost.plan import plan
from vitrail.data.look.inspect import open_source
from vitrail.errors import UserError
from vitrail.recipe import load_recipe, yaml
from vitrail.training.new import Machine, new_recipe

CPU = Machine("cpu", "cpu", 16.0, 2)
H200 = Machine("cuda", "NVIDIA H200", 139.0, 16)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape, "uint8")


def stack(folder: Path) -> str:
    """Sections of cells (255) and their membranes (0), as ISBI-2012 has them."""
    labels = np.full((10, 64, 64), 255, np.uint8)
    labels[:, ::5] = 0
    tifffile.imwrite(folder / "image.tif", noise(10, 64, 64), photometric="minisblack")
    tifffile.imwrite(folder / "label.tif", labels, photometric="minisblack")
    return str(folder / "image.tif")


def by_class(folder: Path) -> str:
    for number in range(30):
        place = folder / "images" / "abc"[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(18 + number % 4, 24)).save(place / f"{number}.png")
    return str(folder / "images")


def by_table(folder: Path) -> str:
    (folder / "images").mkdir()
    rows = ["slide,finding"]
    for number in range(24):
        Image.fromarray(noise(16, 16)).save(folder / "images" / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]}")
    (folder / "images" / "labels.csv").write_text("\n".join(rows))
    return str(folder / "images")


def volume(folder: Path) -> str:
    return str(write_volume(folder / "em.zarr", size=48))


def array(folder: Path) -> str:
    """N x H x W x C."""
    np.save(folder / "a.npy", noise(60, 24, 24, 3))
    return str(folder / "a.npy")


Make = Callable[[Path], str]


@pytest.mark.parametrize(
    ("make", "task", "ndim", "held_out"),
    [
        (stack, "segment", 2, "the last 2 slices along z"),
        (stack, "pretrain", 2, "the last 2 slices along z"),
        (by_class, "classify", 2, "a fifth of the items, chosen by hashes of their names"),
        (by_class, "generate", 2, "a fifth of the items, chosen by hashes of their names"),
        (by_table, "classify", 2, "a fifth of the items, chosen by hashes of their names"),
        (by_table, "pretrain", 2, "a fifth of the items, chosen by hashes of their names"),
        (volume, "segment", 3, "the last 16 of 48 voxels along z"),
        (volume, "pretrain", 3, "the last 16 of 48 voxels along z"),
        (volume, "generate", 3, "the last 16 of 48 voxels along z"),
        (array, "pretrain", 2, "the last 12 of 60 items"),
        (array, "generate", 2, "the last 12 of 60 items"),
    ],
)
def test_what_is_written_trains_as_it_is(make: Make, task: Any, ndim: int, held_out: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    made = new_recipe(path, task, machine=CPU, out="a.yaml")
    file = tmp_path / "a.yaml"
    file.write_text(made["text"])
    assert f"# Held out, and never trained on: {made['held_out']}." in made["text"]
    assert made["held_out"] == held_out
    recipe = load_recipe(file)
    assert recipe.model.ndim == ndim
    (estimate,) = plan(recipe, cluster="laptop", gpus=1, as_is=True)
    assert estimate.fits
    train, valid = (recipe.data.train[0].open(), recipe.data.valid[0].open())
    if make in (by_class, by_table, array):
        assert not {item.name for item in train.items} & {item.name for item in valid.items}
        assert len(train.items) + len(valid.items) == len(open_source(path, kind=None, settings=None)[1].items)
    run = tmp_path / "run"
    overrides = [f"run.dir={run}", "run.steps=3", "log.pictures=off", "log.report=false", "eval.samples=4"]
    assert vitrail.train(file, overrides=overrides, quiet=True).step == 3
    (start,) = events(run, "start")
    headlines = [next(iter(line["metrics"])) for line in (*events(run, "eval"), vitrail.evaluate(run))]
    assert set(headlines) == {start["best_metric"]}


def test_the_membranes_of_a_stack_are_what_is_scored(tmp_path: Path) -> None:
    text = new_recipe(stack(tmp_path), "segment", machine=CPU)["text"]
    tree = yaml.parse(text, "recipe")
    assert tree["data"]["train"][0]["label_map"] == {"0": 1, "255": 0}
    assert "# Labels as they are stored: background is 255 (80 %); class1 is 0 (20 %)." in text
    assert f"vitrail predict runs/image-segment {tmp_path / 'image.tif'} --out image-segment-classes.ome.zarr" in text


def test_rare_labels_are_named_too(tmp_path: Path) -> None:
    labels = np.zeros((40, 96, 96), np.uint8)
    labels[:20], labels[39, 95, 95] = 1, 2
    np.save(tmp_path / "a.npy", noise(40, 96, 96))
    np.save(tmp_path / "l.npy", labels)
    settings = {"labels": str(tmp_path / "l.npy")}
    made = new_recipe(str(tmp_path / "a.npy"), "segment", settings=settings, machine=CPU)
    assert yaml.parse(made["text"], "recipe")["objective"]["names"] == ["background", "class1", "class2"]


def test_a_gpu_gets_a_larger_model_and_batch(tmp_path: Path) -> None:
    path = volume(tmp_path)
    small, large = (new_recipe(path, "pretrain", machine=machine) for machine in (CPU, H200))
    assert large["parameters"] > 5 * small["parameters"]
    assert large["batch"] > small["batch"]
    assert "one NVIDIA H200 (139 GiB)" in large["text"]


def test_few_images_of_a_class_are_in_both_parts(tmp_path: Path) -> None:
    for number in range(8):
        place = tmp_path / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(16, 16)).save(place / f"{number}.png")
    tree = yaml.parse(new_recipe(str(tmp_path / "train"), "classify", machine=CPU)["text"], "recipe")
    recipe = load_recipe(tree)
    train, valid = recipe.data.train[0].open(), recipe.data.valid[0].open()
    assert {item.label for item in train.items} == {0, 1}
    assert len(valid.items) >= 1
    (tmp_path / "train").rename(tmp_path / "valid")
    by_class(tmp_path)
    (tmp_path / "images").rename(tmp_path / "train")
    tree = yaml.parse(new_recipe(str(tmp_path / "train"), "classify", machine=CPU)["text"], "recipe")
    assert tree["data"]["train"] == [{"path": str(tmp_path / "train")}]
    assert tree["data"]["valid"] == [{"path": str(tmp_path / "valid")}]


def test_what_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    path = array(tmp_path)
    with pytest.raises(UserError, match=r"--task segment learns from the class of each voxel.*--set labels=PATH"):
        new_recipe(path, "segment", machine=CPU)
    with pytest.raises(UserError, match=r"--task classify learns from the class of each image"):
        new_recipe(path, "classify", machine=CPU)
    np.save(tmp_path / "v.npy", noise(40, 40, 40))
    for labels, words in ((np.zeros((40, 40, 40), np.uint8), "one value alone"), (noise(40, 40, 40), "number things")):
        np.save(tmp_path / "l.npy", labels)
        with pytest.raises(UserError, match=words):
            new_recipe(str(tmp_path / "v.npy"), "segment", settings={"labels": str(tmp_path / "l.npy")}, machine=CPU)


def test_the_verb_writes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    array(tmp_path)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["new", "a.npy", *words])
        said = capsys.readouterr()
        return int(str(ended.value.code)), said.out, said.err

    code, out, err = call("--task", "pretrain")
    assert (code, out) == (0, "recipe.yaml\n"), err
    assert "held out: the last 12 of 60 items" in err
    before = (tmp_path / "recipe.yaml").read_bytes()
    load_recipe(tmp_path / "recipe.yaml")
    code, _, err = call("--task", "pretrain")
    assert code == 2
    assert "exists already, and recipes are not overwritten" in err
    assert (tmp_path / "recipe.yaml").read_bytes() == before
    code, _, err = call("--task", "paint", "--out", "b.yaml")
    assert code == 2
    assert "segment" in err
    assert not (tmp_path / "b.yaml").exists()


def test_names_with_signs_of_yaml_and_shell_stay_whole(tmp_path: Path) -> None:
    """What followed a number sign was taken for a comment and moved away, and commands named half a path."""
    folder = tmp_path / "set # 1"
    folder.mkdir()
    path = by_class(folder)
    text = new_recipe(path, "classify", machine=CPU, out="my recipe.yaml")["text"]
    assert load_recipe(yaml.parse(text, "recipe")).data.train[0].path == path
    assert "vitrail train 'my recipe.yaml' " in text
    text = new_recipe(path, "classify", machine=CPU, out="two\nlines.yaml")["text"]
    assert all(line.startswith("#") for line in text.partition("\n\n")[0].splitlines())
