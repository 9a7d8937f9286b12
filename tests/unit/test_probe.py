"""Probes of runs, from labelled data to scores, a file of features and a picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from predicting import UNETR, train_run, train_segmentation, write_em
from support import tiny_recipe

import vitrail
from vitrail.errors import UserError
from vitrail.infer import probe as probing
from vitrail.infer.neighbours import knn
from vitrail.infer.probe import table

VIT: dict[str, Any] = {"kind": "vit", "ndim": 2, "width": 16, "depth": 2, "heads": 2, "patch": 4}


def write_images(folder: Path, number: int, *, seed: int, names: tuple[str, ...] = ("down", "left", "up")) -> Path:
    """Images of 8 x 8 whose class is the side that is bright."""
    rng = np.random.default_rng(seed)
    sides = {"up": (slice(4), slice(None)), "down": (slice(4, 8), slice(None)), "left": (slice(None), slice(4))}
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(number):
            pixels = rng.integers(0, 60, (8, 8))
            pixels[sides[name]] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("probe")
    parts = [write_images(place / part, number, seed=seed) for seed, (part, number) in enumerate((("a", 12), ("b", 8)))]
    changes: dict[str, Any] = {
        "run__steps": 40,
        "checkpoint__every": 20,
        "eval__every": 40,
        "data__crop": 8,
        "optimizer__lr": 3e-3,
    }
    entries = [[{"path": str(part), "kind": "image_folder"}] for part in parts]
    changes |= {"data__train": entries[0], "data__valid": entries[1], "data__augment": {}, "log__report": True}
    changes |= {"model": VIT, "objective": {"kind": "classify"}}
    vitrail.train(tiny_recipe(place, place / "vit", **changes), quiet=True)
    write_em(place / "em.zarr")
    train_run(place, place / "em.zarr", "mae")
    return place


def scores(found: dict[str, Any]) -> dict[str, float]:
    return {score["probe"]: score["value"] for score in found["scores"]}


def test_classes_of_items(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place / "vit"
    found = vitrail.probe(run, steps=60, neighbours=5)
    assert not found["cached"]
    assert (found["of"], found["classes"]) == ("item", ["down", "left", "up"])
    assert found["counts"] == {"train": 36, "valid": 24}
    told = scores(found)
    assert list(told) == ["commonest class", "kNN", "linear", "attentive"]
    assert told["commonest class"] == pytest.approx(1 / 3)
    assert min(told["kNN"], told["linear"], told["attentive"]) > 0.9
    assert all(low <= score["value"] <= high for score in found["scores"] for low, high in [score["interval"]])
    assert told["kNN"] == knn(run, run, neighbours=5)["accuracy"]
    assert [list(row) for row in table(found)] == [["probe", "accuracy", "95 %"]] * 4
    with monkeypatch.context() as patch:
        patch.setattr(probing, "_look", None)  # nothing is computed again
        again = vitrail.probe(run, steps=60, neighbours=5)
        assert again["cached"]
        assert again["scores"] == found["scores"]
    kept = json.loads((run / "probe" / "step-00000040.json").read_text())
    assert kept["scores"] == found["scores"]
    with Image.open(run / kept["picture"]) as picture:
        assert picture.size[0] > 300
    page = (run / "report.html").read_text()
    assert "Probes of frozen features" in page
    assert page.count("commonest class") == 1


def test_features_are_those_of_the_checkpoint_and_the_data(place: Path, tmp_path: Path) -> None:
    run, options = place / "vit", {"steps": 2}
    write_images(tmp_path / "a", 3, seed=5)
    write_images(tmp_path / "b", 3, seed=6, names=("down", "up"))
    given: dict[str, Any] = {"train": [str(tmp_path / "a")], "valid": [f"{{path: {tmp_path / 'a'}}}"]}
    assert not vitrail.probe(run, **given, **options)["cached"]
    assert vitrail.probe(run, **given, **options)["cached"]
    assert not vitrail.probe(run, **given, **options, checkpoint=20)["cached"]
    assert not vitrail.probe(run, **given, **options, seed=1)["cached"]
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(tmp_path / "a" / "up" / "more.png")
    changed = vitrail.probe(run, **given, **options)
    assert not changed["cached"]
    assert changed["counts"] == {"train": 10, "valid": 10}
    # A file that is cut short is made anew.
    for path in (run / "probe").glob("features-*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    assert vitrail.probe(run, **given, **options)["scores"] == changed["scores"]
    lone = vitrail.probe(run, train=[f"{tmp_path}/b"], valid=given["valid"], **options)
    assert lone["notes"] == ["'left' is in --valid alone, so no probe can tell it"]
    few = vitrail.probe(run, **given, **options, number=6)
    assert few["counts"] == {"train": 6, "valid": 6}


def test_classes_of_voxels(place: Path) -> None:
    found = vitrail.probe(place / "mae", labels="structures", steps=5)
    assert found["of"] == "voxel"
    assert found["classes"][0] == "background"
    assert [score["probe"] for score in found["scores"]] == ["kNN", "linear", "attentive"]
    linear = found["scores"][1]
    assert [name[5:] for name in linear["each"]] == found["classes"][1:]
    known = [value for value in linear["each"].values() if value is not None]
    assert linear["value"] == pytest.approx(np.mean(known))
    low, high = linear["interval"]
    assert low <= high
    assert list(table(found)[0])[:3] == ["probe", "mean Dice", "95 %"]
    assert (place / "mae" / "probe" / "step-00000002.png").is_file()
    again = vitrail.probe(place / "mae", labels="structures", steps=5)
    assert again["cached"]
    assert again["scores"] == found["scores"]


def test_voxels_of_what_the_run_was_trained_on(tmp_path: Path) -> None:
    """Features that hold the voxels themselves name them almost perfectly; ignored voxels are not scored."""
    values = np.zeros((32, 16, 16), np.uint8)
    rng = np.random.default_rng(0)
    labels = np.repeat(np.repeat(np.repeat(rng.integers(0, 2, (8, 4, 4)), 4, 0), 4, 1), 4, 2).astype(np.uint8)
    values = (labels * 180 + rng.integers(0, 20, labels.shape)).astype(np.uint8)
    labels[:, :, :2] = 255
    np.save(tmp_path / "v.npy", values)
    np.save(tmp_path / "l.npy", labels)
    entry = [{"path": str(tmp_path / "v.npy"), "labels": str(tmp_path / "l.npy")}]
    changes: dict[str, Any] = {"objective": {"kind": "segment", "names": ["out", "in"], "ignore": 255}}
    model = UNETR | {"encoder": UNETR["encoder"] | {"depth": 4}}
    run = train_segmentation(tmp_path, tmp_path, data__train=entry, data__valid=entry, model=model, **changes)
    found = vitrail.probe(run, steps=100)
    assert found["classes"] == ["out", "in"]
    assert [name[5:] for name in found["scores"][0]["each"]] == ["out", "in"]  # both have names: both count
    assert scores(found)["linear"] > 0.8
    assert scores(found)["kNN"] > 0.8


def test_refusals_are_sentences(place: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "one", 3, seed=0, names=("up",))
    one = str(tmp_path / "one")
    model = {"kind": "autoencoder", "ndim": 3, "width": 8, "factor": 2, "latent": 2, "depth": 1}
    coder = train_run(tmp_path, place / "em.zarr", "coder", model=model, objective={"kind": "autoencode"})
    vit = place / "vit"
    for run, options, words in [
        (
            coder,
            {},
            "model 'autoencoder' with objective 'autoencode' has no encoder of features; give the run of a vit",
        ),
        (place / "mae", {}, r"em\.zarr: probes need classes, .* and there are none; name labels with --labels NAME"),
        (vit, {"labels": "masks"}, "masks/down does not exist; check the spelling"),
        (vit, {"train": [one], "valid": [one]}, "--train: its labels have the class 'up' alone, so there is nothing"),
        (vit, {"train": ["{path: 3}"]}, "--train '{path: 3}': expected a path, or an entry such as"),
        (vit, {"neighbours": 0}, "neighbours: 0 must be at least 1"),
        (vit, {"memory": 1e-9}, "memory: the features of one sample do not fit; give more with --memory"),
        (place / "nothing", {}, "no checkpoint"),
    ]:
        with pytest.raises(UserError, match=words):
            vitrail.probe(run, **options)
    with pytest.raises(UserError, match="'autoencoder' with objective 'autoencode' has no encoder of features"):
        vitrail.embed(coder, place / "em.zarr", out=tmp_path / "f.zarr")
