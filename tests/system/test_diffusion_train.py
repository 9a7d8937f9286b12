"""Diffusion through the command line: both kinds train, draw samples, resume exactly; recipes start or say why not."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import events, losses, merge, parameters, vitrail, write_recipe

import vitrail as library
from vitrail.data.latents.store import write_latents
from vitrail.errors import UserError
from vitrail.objectives.generate import Generate
from vitrail.recipe import load_recipe
from vitrail.training.journal import Journal

ROOT = Path(__file__).parents[2]
DIT = {"kind": "dit", "width": 24, "depth": 2, "heads": 2, "patch": 2, "classes": 2}
FEW = {"sampler": "euler", "steps": 2}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of small pictures."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    for number in range(12):
        path = folder / ("dark" if number % 2 else "bright") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 128, (8, 8, 3), np.uint8) + 127 * (number % 2 == 0)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return folder


def recipe(data: Path, run: Path, **changes: Any) -> dict[str, Any]:
    tree = {
        "run": {"name": "tiny", "dir": str(run), "seed": 3, "steps": 6, "device": "cpu"},
        "model": DIT,
        "objective": {"kind": "flow", "times": "logit_normal", "sampling": FEW | {"guidance": 2.0}},
        "data": {"train": [{"path": str(data), "kind": "image_folder"}], "crop": 8, "batch": 4},
        "optimizer": {"lr": 1e-3},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": 3},
        "eval": {"every": 3, "samples": 8},
        "log": {"every": 1, "pictures": 3, "tensorboard": False},
    }
    tree["data"]["valid"] = tree["data"]["train"]
    return merge(tree, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def flow(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command line."""
    home = tmp_path_factory.mktemp("flow")
    code, output = vitrail("train", write_recipe(home / "flow.json", recipe(images, home / "run")))
    assert code == 0, output[-3000:]
    assert "moving average" not in output
    return home / "run"


def test_flow_trains_and_draws(flow: Path) -> None:
    assert np.isfinite(losses(flow)).all()
    assert [event["path"] for event in events(flow, "picture")] == [
        f"pictures/flow-{step:08d}.png" for step in (0, 3, 6)
    ]
    assert all((flow / event["path"]).stat().st_size > 1000 for event in events(flow, "picture"))
    assert "guidance 2, beside held-out data" in events(flow, "picture")[0]["caption"]
    metrics = events(flow, "eval")[-1]["metrics"]
    assert set(metrics) == {"loss", "loss_q1", "loss_q2", "loss_q3", "loss_q4"}
    assert "data:image/png" in (flow / "report.html").read_text()
    stored = load_recipe(flow / "recipe.yaml")
    assert stored.objective.names == ("bright", "dark")
    assert stored.objective.variables == ("red", "green", "blue")
    assert library.evaluate(flow)["metrics"] == pytest.approx(metrics, rel=1e-6)


def test_flow_resumes_exactly_with_its_average(flow: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(flow, again)
    shutil.rmtree(sorted((again / "checkpoints").glob("step-*"))[-1])
    assert (
        library.train(merge(load_recipe(flow / "recipe.yaml").to_tree(), {"run.dir": str(again)}), quiet=True).step == 6
    )
    for weights in ("raw", "ema"):
        expected, found = parameters(flow, weights), parameters(again, weights)
        assert all(np.array_equal(found[name], value) for name, value in expected.items())
    raw, average = parameters(flow, "raw"), parameters(flow, "ema")
    assert any(not np.array_equal(raw[name], average[name]) for name in raw)
    for step in (3, 6):  # the same noise in the same order gives the same picture
        name = f"pictures/flow-{step:08d}.png"
        assert (flow / name).read_bytes() == (again / name).read_bytes()


def test_denoise_trains_on_volumes_with_a_coarse_one_given(volume: Path, tmp_path: Path) -> None:
    model = {
        "kind": "diffusion_vit",
        "ndim": 3,
        "encoder": {"width": 24, "depth": 1, "heads": 2, "patch": 4},
        "decoder": {"kind": "linear"},
    }
    objective = {"kind": "denoise", "coarse": 4, "steps": 1500, "min_snr": 5, "predict": "velocity", "sampling": FEW}
    tree = recipe(volume, tmp_path / "run", model=model, objective=objective, ema=None, run__steps=2)
    tree["data"] = {"train": [{"path": str(volume)}], "crop": 16, "batch": 4}
    code, output = vitrail("train", write_recipe(tmp_path / "denoise.json", tree))
    assert code == 0, output[-3000:]
    assert "keeps no moving average of its weights" in output
    stored = load_recipe(tmp_path / "run" / "recipe.yaml").model
    assert (stored.channels, stored.condition_channels, stored.time_steps) == (1, 1, 1500)
    assert (tmp_path / "run" / "pictures" / "denoise-00000002.png").stat().st_size > 1000


def test_data_without_classes_and_with_a_given_variable_train(images: Path, tmp_path: Path) -> None:
    objective = {"kind": "flow", "condition": ["blue"], "sampling": FEW}
    tree = recipe(images, tmp_path / "run", model__classes=None, objective=objective, run__steps=1)
    assert library.train(tree, quiet=True).step == 1
    stored = load_recipe(tmp_path / "run" / "recipe.yaml").model
    assert (stored.channels, stored.condition_channels, stored.classes) == (2, 1, None)


def test_samples_have_the_units_of_the_entry_that_they_are_made_from(tmp_path: Path) -> None:
    """Dark and bright ones, each normalised by itself: a model that has learned nothing gives their mean at least."""
    from PIL import Image

    for name, mean in (("dark", 40), ("bright", 200)):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.random.default_rng(number).normal(mean, 10, (8, 8)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name / f"{number}.png")
    objective = {"kind": "flow", "coarse": 4, "sampling": FEW}
    tree = recipe(tmp_path, tmp_path / "run", model__classes=None, objective=objective, run__steps=1)
    tree["data"]["train"] = [{"path": str(tmp_path / name), "kind": "image_folder"} for name in ("dark", "bright")]
    tree = merge(tree, {"data.valid": tree["data"]["train"], "data.statistics": "each"})
    library.train(tree, quiet=True)
    made = library.sample(tmp_path / "run", number=6, out=tmp_path / "out")
    means = np.array(
        [
            [np.asarray(Image.open(tmp_path / "out" / entry[what])).mean() for what in ("path", "truth", "condition")]
            for entry in made["files"]
        ]
    )
    assert {round(mean, -1) for mean in means[:, 1]} == {40.0, 200.0}
    assert np.abs(means - means[:, 1:2]).max() < 20


def test_what_a_picture_shows_is_chosen_once_and_one_that_cannot_be_drawn_ends_nothing(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    choose = Generate.choose

    def count(self: Generate, *told: Any) -> list[int]:
        asked.append(1)
        return choose(self, *told)

    def fail(*_: Any, **__: Any) -> str:
        raise torch.OutOfMemoryError("no memory")

    notes: list[str] = []
    monkeypatch.setattr(Journal, "note", lambda _, text: notes.append(text))
    monkeypatch.setattr(Generate, "choose", count)
    monkeypatch.setattr(Generate, "draw", fail)
    tree = recipe(images, tmp_path / "run", run__steps=2, log__pictures=1)
    assert library.train(tree, quiet=True).step == 2
    assert len(asked) == 1
    assert sum("could not be drawn, nor others so: the device has no memory left" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__label_dropout": 0.0}, "objective.sampling.guidance: 2 compares with a model that is told no class"),
        ({"model__classes": 3}, r"model.classes: 3, but the data have 2 classes"),
        ({"objective__condition": ["infrared"]}, "'infrared' is not a variable of the data, which have red, green"),
        ({"data__augment": {"mixup": 0.5}}, "mixup and cutmix make images of two classes"),
        ({"model": {"kind": "vit", "width": 24, "depth": 1, "heads": 2, "patch": 2}}, "trains models that take noisy"),
        ({"objective__sampling": {"steps": 0}}, "objective.sampling: steps 0 must be at least 1"),
        ({"objective": {"kind": "denoise", "steps": 5}}, "sampling.steps 25 must be at most steps 5"),
        ({"data__statistics": "each"}, "data.statistics: each gives entries .* use data.statistics: shared"),
        (
            {
                "model": {"kind": "vit", "width": 24, "depth": 1, "heads": 2, "patch": 2},
                "objective": {"kind": "classify"},
                "codec": {"kind": "autoencoder", "path": "/nowhere"},
            },
            "codec: 'autoencoder' turns samples into pixels, but objective 'classify' makes none; leave it out",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    images: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        library.train(recipe(images, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_classes_need_labels(volume: Path, tmp_path: Path) -> None:
    tree = recipe(volume, tmp_path / "run", model__ndim=3)
    tree["data"] = {"train": [{"path": str(volume)}], "crop": 8, "batch": 4}
    with pytest.raises(UserError, match=r"the objective needs the class of every image, but .* has none"):
        library.train(tree, quiet=True)


# ---------------------------------------------------------------- recipes of others' experiments


def tiny_data(folder: Path) -> None:
    """What the recipes ask for, as small as can be."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in ("cat", "dog"):
            place = folder / "data" / "imagenet" / split / name
            place.mkdir(parents=True)
            Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(place / "1.png")
        classes = [f"n{number:08d}" for number in range(1000)]
        rows = (rng.normal(size=(4, 16, 32, 32)).astype(np.float32), np.arange(4))
        write_latents(folder / "data" / "imagenet-latents" / split, [rows], classes=classes)


VIT = ["model.encoder.width=24", "model.encoder.depth=1", "model.encoder.heads=2", "model.decoder={kind: linear}"]
SMALL = ["model.width=24", "model.depth=1", "model.heads=2"]
RECIPES = {
    "imagenet/ddpm_vit_b16": (VIT, "data/imagenet/train"),
    "ct/ddpm3d": (VIT, "data/ct/train"),
    "imagenet/dit_l2_latents": (SMALL, "data/imagenet-latents/train"),
    "cifar10/dit_ditan": (SMALL, "data/cifar10/train.parquet"),
    "dummy/dit_0.5b": (SMALL, None),
    "dummy/dit_7b": (SMALL, None),
}
QUICK = [
    "run.steps=1",
    "run.device=cpu",
    "objective.sampling={steps: 1}",
    "parallel={}",
    "precision={}",
    "eval.samples=2",
    "log.tensorboard=false",
]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_start_or_say_what_is_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    changes, data = RECIPES[name]
    monkeypatch.chdir(tmp_path)
    overrides = [*changes, *QUICK, "data.batch=2", "parallel.compile=false", "parallel.recompute=none"]
    if data is not None:
        with pytest.raises(UserError, match=f"{data}.*(does not exist|not a folder|no such file)"):
            library.train(ROOT / "configs" / f"{name}.yaml", overrides=overrides, quiet=True)
    tiny_data(tmp_path)
    if name == "ct/ddpm3d":
        nibabel = pytest.importorskip("nibabel")
        for split in ("train", "valid"):
            (tmp_path / "data" / "ct" / split).mkdir(parents=True)
            values = np.random.default_rng(0).normal(size=(64, 66, 64)).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "data" / "ct" / split / "a.nii")
        overrides += ["model.encoder.patch=16"]
    if name == "cifar10/dit_ditan":
        write_parquet(tmp_path / "data" / "cifar10")
    if name == "imagenet/dit_l2_latents":
        with pytest.raises(UserError, match=r"codec.*--trust"):
            library.train(ROOT / "configs" / f"{name}.yaml", overrides=overrides, quiet=True)
        overrides += ["codec=null"]
    if name.startswith("dummy"):
        overrides += ["model.patch=8"]
    assert library.train(ROOT / "configs" / f"{name}.yaml", overrides=overrides, quiet=True).step == 1


def write_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import io

    from PIL import Image
    from pyarrow import parquet

    folder.mkdir(parents=True)
    rows = []
    for number in range(20):
        stream = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)).save(stream, "png")
        rows.append({"bytes": stream.getvalue(), "path": f"{number}.png"})
    table = pyarrow.table({"image": rows, "label": [number % 10 for number in range(20)]})
    for name in ("train", "test"):
        parquet.write_table(table, folder / f"{name}.parquet")
