"""How good samples are: `vitrail eval SAMPLES`, on sets whose quality is known beforehand."""

import argparse
import dataclasses
import importlib.util
import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support import ROOT, environment, run, tiny_recipe

import vitrail
from vitrail.cli import main
from vitrail.data.generate import write_digits
from vitrail.errors import UserError
from vitrail.infer import features
from vitrail.infer.collection import Generated, Real, open_real
from vitrail.infer.features import RunNetwork, find_inception
from vitrail.infer.folder import Kind, write_sample
from vitrail.infer.quality import quality
from vitrail.models import ViT, ViTConfig

DIGIT = Kind(np.dtype("uint8"), ("y", "x"), ("grey",), (1.0, 1.0), None, "png")


def write_samples(out: Path, samples: list[tuple[np.ndarray, str | None]], kind: Kind, run: str = "somewhere") -> Path:
    """A folder as `vitrail sample` leaves it."""
    files = []
    for number, (sample, name) in enumerate(samples):
        path = f"{name or 'samples'}/{number:05d}{kind.suffix}"
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        write_sample(out / path, sample, kind)
        files.append({"path": path, "counter": number} | ({} if name is None else {"class": name}))
    manifest = {"run": run, "step": 1, "weights": "ema", "files": files, **kind.describe()}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, a classifier of them, and real digits that pass for samples."""
    home = tmp_path_factory.mktemp("quality")
    write_digits(home / "digits")
    tree = {
        "run": {"name": "names", "dir": str(home / "names"), "seed": 0, "steps": 60, "device": "cpu"},
        "model": {"kind": "vit", "width": 64, "depth": 1, "heads": 2, "patch": 8, "positions": "none"},
        "objective": {"kind": "classify"},
        "data": {
            "train": [{"path": str(home / "digits/train"), "kind": "image_folder"}],
            "valid": [{"path": str(home / "digits/valid"), "kind": "image_folder"}],
            "crop": 8,
            "batch": 64,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup": 5},
        "eval": {"every": 60, "samples": 64},
        "log": {"pictures": 60, "tensorboard": False},
        "checkpoint": {"every": 60},
    }
    vitrail.train(tree, quiet=True)
    write_samples(home / "good", digits(home / "digits/train", 20), DIGIT)
    return home


def digits(folder: Path, each: int) -> list[tuple[np.ndarray, str]]:
    return [
        (np.asarray(Image.open(file))[None], group.name)
        for group in sorted(folder.iterdir())
        for file in sorted(group.iterdir())[:each]
    ]


def measured(home: Path, samples: str, **options: Any) -> dict[str, dict[str, Any]]:
    found = quality(home / samples, real=home / "names", classifier=home / "names", **options)
    return {row["measure"]: row for row in found["measures"]}


def test_real_data_reach_the_floor_and_noise_does_not(home: Path) -> None:
    good = measured(home, "good")
    assert set(good) == {"accuracy", "frechet", "kid", "precision", "recall", "sliced_wasserstein"}
    assert good["accuracy"]["value"] > 0.9
    assert good["accuracy"]["interval"][0] < good["accuracy"]["value"] < good["accuracy"]["interval"][1]
    assert abs(good["accuracy"]["value"] - good["accuracy"]["floor"]) < 0.1
    assert (good["accuracy"]["samples"], good["accuracy"]["real"]) == (200, 360)
    for name in ("frechet", "sliced_wasserstein"):
        assert 0 < good[name]["value"] < 2.5 * good[name]["floor"]
        assert (good[name]["samples"], good[name]["real"]) == (180, 180)
        assert good[name]["floor_spread"] > 0
    assert good["precision"]["value"] > 0.6

    draw = np.random.default_rng(0)
    noise = [(draw.integers(0, 256, (1, 8, 8), np.uint8), str(number % 10)) for number in range(200)]
    write_samples(home / "noise", noise, DIGIT)
    bad = measured(home, "noise")
    assert bad["accuracy"]["value"] < 0.3
    assert bad["accuracy"]["floor"] == good["accuracy"]["floor"]
    for name in ("frechet", "kid", "sliced_wasserstein"):
        assert bad[name]["value"] > 5 * abs(bad[name]["floor"])
    assert bad["precision"]["value"] < 0.5 * bad["precision"]["floor"]


def test_the_seed_decides_and_the_batch_does_not(home: Path) -> None:
    first, again, other = (quality(home / "good", real=home / "names", number=60, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first["measures"] != other["measures"]
    small = quality(home / "good", real=home / "names", number=60, seed=0, batch=7)
    assert small["measures"][0]["value"] == pytest.approx(first["measures"][0]["value"], rel=1e-5)
    assert first["counts"] == {"samples": 60, "compared": 60, "real": 120}
    assert "--classifier" in first["notes"][0]


def test_samples_that_are_all_alike_are_told_by_their_similarity(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = [(draw.integers(0, 256, (1, 12, 16), np.uint8), None) for _ in range(33)]
    write_samples(tmp_path / "real", images, DIGIT)
    write_samples(tmp_path / "same", images[:1] * 17, DIGIT)
    write_samples(tmp_path / "good", images[:17], DIGIT)
    found = {}
    for name in ("same", "good"):
        for batch in (256, 3):
            rows = quality(tmp_path / name, real=tmp_path / "real" / "samples", batch=batch)["measures"]
            found[name, batch] = next(row for row in rows if row["measure"] == "ssim")
        assert found[name, 3] == found[name, 256]
    assert found["same", 3]["value"] == pytest.approx(1)
    assert abs(found["good", 3]["value"]) < 0.1
    assert abs(found["same", 3]["floor"]) < 0.1
    assert found["same", 3]["better"] == "as the floor"


def test_wrong_classes_are_not_recognised(home: Path) -> None:
    wrong = [(image, str((int(name) + 1) % 10)) for image, name in digits(home / "digits/train", 5)]
    write_samples(home / "wrong", wrong, DIGIT)
    found = quality(home / "wrong", real=home / "digits/valid", classifier=home / "names")
    assert found["measures"][0]["value"] < 0.2
    assert sum(c["samples"] for c in found["accuracy_by_class"].values()) == 50
    nameless = write_samples(home / "nameless", [(image, None) for image, _ in wrong], DIGIT)
    found = quality(nameless, real=home / "digits/valid", classifier=home / "names")
    assert found["measures"][0]["measure"] == "frechet"
    assert any("no classes" in note for note in found["notes"])


def test_without_accuracy_there_are_distances(home: Path, tmp_path: Path) -> None:
    strange = [(image, f"digit {name}") for image, name in digits(home / "digits/train", 5)]
    found = quality(write_samples(tmp_path / "s", strange, DIGIT), real=home / "names", classifier=home / "names")
    assert found["measures"][0]["measure"] == "frechet"
    assert any("does not know the class 'digit 0'" in note and "no accuracy" in note for note in found["notes"])


def test_a_vit_that_classifies_tokens_names_no_class_of_an_image(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ViT(ViTConfig(width=8, depth=1, heads=1, patch=4, shape=8, channels=1, classes=10, pool="tokens"))
    monkeypatch.setattr("vitrail.infer.features.load", lambda run, **options: model.eval())
    network = RunNetwork(home / "names")
    assert network.names == ()
    seen = network(torch.zeros(2, 1, 8, 8))
    assert seen.features.shape == (2, 8)
    assert seen.classes is None


# ---------------------------------------------------------------- real data


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """A recipe of two folders with 20 images each, whose colour tells which it is."""
    for start, part in ((0, "a"), (100, "b")):
        (tmp_path / part / "c").mkdir(parents=True)
        for number in range(20):
            Image.fromarray(np.full((8, 8), start + number, np.uint8)).save(tmp_path / part / f"c/{number:03d}.png")

    def write(weight: float = 1.0, *, valid: bool = True, **data: Any) -> Path:
        entries = [
            {"path": str(tmp_path / p), "kind": "image_folder", "weight": w} for p, w in (("a", weight), ("b", 1.0))
        ]
        tree = {
            "run": {"name": "r", "steps": 2},
            "model": {"kind": "vit", "width": 16, "depth": 1, "heads": 2, "patch": 8},
            "objective": {"kind": "classify"},
            "data": {"train": entries, "crop": 8, "batch": 4} | ({"valid": entries} if valid else {}) | data,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def colours(real: Real) -> list[int]:
    return [int(image.max()) for values, _ in real.batches(real.size, 7) for image in values]


def test_each_real_image_comes_once(home: Path, recipe: Callable[..., Path], tmp_path: Path) -> None:
    generated = Generated(home / "good", seed=0)
    every = [*range(20), *range(100, 120)]
    for options in ({}, {"weight": 3.0}, {"mix": "equal"}):
        real = open_real(recipe(**options), generated, seed=0)
        assert sorted(colours(real)) == every
        assert not real.notes
    found = quality(home / "good", real=recipe(weight=3.0, valid=False))
    assert found["counts"]["compared"] == 20
    assert any("trained on, so copies of them look perfect" in note for note in found["notes"])

    # What cannot be read is left out where the recipe says so: nothing else takes its place.
    (tmp_path / "a/c/003.png").write_bytes((tmp_path / "a/c/003.png").read_bytes()[:50])
    (tmp_path / "b/c/004.png").write_bytes((tmp_path / "b/c/004.png").read_bytes()[:50])
    with pytest.raises(UserError, match=r"00[34]\.png"):
        quality(home / "good", real=recipe())
    real = open_real(recipe(bad="skip"), generated, seed=0)
    assert sorted(colours(real)) == [colour for colour in every if colour not in (3, 104)]
    assert real.lost == 2
    found = quality(home / "good", real=recipe(bad="skip"))
    assert found["counts"] == {"samples": 200, "compared": 19, "real": 38}


def call(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def test_command_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", home / "good", "--real", home / "names", "--classifier", home / "names", "--number", 40]
    page = home / "page.html"
    assert call(*words, "--page", page) == 0
    shown = capsys.readouterr()
    assert "accuracy" in shown.out
    assert shown.out.startswith(f"compared with data.valid of {home / 'names'}\n")
    assert "40 to 40" in shown.out
    assert "note: FID" in shown.err
    text = page.read_text()
    assert "sliced_wasserstein" in text
    assert "recognised" in text
    assert call(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"samples": 40, "compared": 40, "real": 80}
    assert call("eval", home / "good", "--weights", "raw") == 2
    assert "folder of samples" in capsys.readouterr().err
    for word in (("--classifier", home / "names"), ("--seed", 0)):
        assert call("eval", home / "names", *word) == 2
        assert f"{word[0]}: {home / 'names'} has no manifest.json" in capsys.readouterr().err
    # Without --real their run is looked for, which is not here.
    assert call("eval", home / "good") == 2
    assert "--real" in capsys.readouterr().err


def test_neighbours_in_frozen_features(home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("eval", home / "names", "--knn", home / "names", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"train": 1437, "valid": 360}
    assert (found["neighbours"], found["features"], found["notes"]) == (20, 64, [])
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]
    assert found["accuracy"] > 0.85
    words = ["--knn", home / "names", "--number", 30, "--neighbours", 40, "--weights", "raw"]
    assert call("eval", home / "names", *words) == 0
    shown = capsys.readouterr().out
    assert "neighbours: 30" in shown
    assert call("eval", home / "names", "--neighbours", 3) == 2
    assert "--neighbours: there is no --knn RECIPE" in capsys.readouterr().err
    assert call("eval", home / "names", "--knn", home / "names", "--samples", 3) == 2
    assert "--samples: --knn measures features" in capsys.readouterr().err
    tree = yaml.safe_load((home / "names/recipe.yaml").read_text())
    tree["data"]["valid"] = []
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(tree))
    assert call("eval", home / "names", "--knn", tmp_path / "a.yaml") == 2
    assert "it has no data.valid" in capsys.readouterr().err


def test_refusals(home: Path, tmp_path: Path, volume: Path) -> None:
    def refused(match: str, folder: Path, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            quality(folder, **{"real": home / "names", "classifier": home / "names"} | options)

    good, image = home / "good", np.zeros((1, 8, 8), np.uint8)
    refused("201 samples were asked for.*holds 200", good, number=201)
    refused("too few", good, number=3)
    refused("batch: 0 must be at least 1", good, batch=0)
    refused("too few", write_samples(tmp_path / "few", [(image, "1")] * 5, DIGIT))
    large = write_samples(tmp_path / "large", [(np.zeros((1, 16, 16), np.uint8), "1")] * 9, DIGIT)
    refused("samples of 8 x 8.*are 16 x 16", large)
    write_samples(tmp_path / "real", [(np.zeros((1, 16, 16), np.uint8), "1")] * 20, DIGIT)
    refused("is 16x16, but .* trained on 8x8; nothing is resized", large, real=tmp_path / "real/1")
    refused("larger than samples of 8 x 8", good, real=tmp_path / "real/1")
    refused("does not exist", good, real=tmp_path / "nowhere")
    refused("no checkpoint", good, classifier=tmp_path)
    gone = write_samples(tmp_path / "gone", [(image, "1")] * 9, DIGIT)
    (gone / "1/00003.png").write_bytes(b"no image")
    refused("00003.png cannot be read", gone)
    arrays = dataclasses.replace(DIGIT, format="npy")
    cut = write_samples(tmp_path / "cut", [(image, "1")] * 9, arrays)
    (cut / "1/00003.npy").write_bytes(b"")
    refused("00003.npy cannot be read", cut)
    (gone / "1/00003.png").unlink()
    refused("1 of 9 samples are missing", gone)
    (gone / "manifest.json").write_text('{"files": []')
    refused("manifest.json cannot be read", gone)
    floats = Kind(np.dtype("float32"), ("y", "x"), ("grey",), (1.0, 1.0), None, "tiff")
    broken = [(np.full((1, 8, 8), np.nan, np.float32), "1")] * 9
    real = write_samples(tmp_path / "floats", [(np.zeros((1, 8, 8), np.float32), "1")] * 18, floats)
    refused("not finite", write_samples(tmp_path / "nan", broken, floats), real=real / "1")
    refused("are uint8, and those of .* are float32, so they are not on one scale", real)
    colour = Kind(np.dtype("uint8"), ("y", "x"), ("red", "green", "blue"), (1.0, 1.0), None, "png")
    colours = write_samples(tmp_path / "colour", [(np.zeros((3, 8, 8), np.uint8), "1")] * 9, colour)
    refused("variables grey, and samples have red", colours)


def test_volumes_in_the_features_of_an_autoencoder(home: Path, tmp_path: Path, volume: Path) -> None:
    import zarr

    vitrail.train(tiny_recipe(volume, tmp_path / "mae", run__steps=2, eval__every=2, checkpoint__every=2), quiet=True)
    whole = np.asarray(zarr.open_group(str(volume), mode="r")["s0"])
    kind = Kind(whole.dtype, ("z", "y", "x"), ("em",), (8.0, 8.0, 8.0), "nanometer", "ome-zarr")
    crops = [whole[z : z + 16, y : y + 16, x : x + 16] for z in (0, 16) for y in (0, 16) for x in (0, 16, 32)]
    folder = write_samples(tmp_path / "volumes", [(crop[None], None) for crop in crops], kind)
    found = quality(folder, real=volume, classifier=tmp_path / "mae")
    notes = " ".join(found["notes"])
    assert "crops that may overlap" in notes
    assert "names no classes, so there is no accuracy" in notes
    assert "a voxel of" not in notes
    finer = dataclasses.replace(kind, spacing=(0.004,) * 3, unit="micrometer")
    notes = quality(write_samples(tmp_path / "finer", [(crop[None], None) for crop in crops], finer), real=volume)[
        "notes"
    ]
    assert any(
        note.endswith("8 x 8 x 8 nanometer, and one of a sample 0.004 x 0.004 x 0.004 micrometer") for note in notes
    )
    # A chunk that is broken or not there is a loss, and no zeros.
    chunk = next(
        path
        for path in sorted((folder / "samples/00003.ome.zarr/s0").rglob("*"))
        if path.name.isdigit() and path.is_file()
    )
    chunk.write_bytes(b"xx")
    with pytest.raises(UserError, match=r"00003.ome.zarr cannot be read .*make it again"):
        quality(folder, real=volume)
    chunk.unlink()
    with pytest.raises(UserError, match=r"00003.ome.zarr cannot be read .*is missing"):
        quality(folder, real=volume)
    rows = {row["measure"]: row for row in found["measures"]}
    assert set(rows) == {"frechet", "kid", "precision", "recall", "sliced_wasserstein", "ssim"}
    assert rows["sliced_wasserstein"]["value"] < 2 * rows["sliced_wasserstein"]["floor"]
    assert rows["frechet"]["of"].startswith("24 features")
    assert any("8 bits" in note or "FID" in note for note in found["notes"])


def test_features_are_what_the_head_sees(home: Path) -> None:
    network, model = RunNetwork(home / "names"), vitrail.load(home / "names")
    images = torch.from_numpy(np.stack([image for image, _ in digits(home / "digits/valid", 3)]))
    features_, classes = network(images)
    normalised = (images - network.statistics.mean[0]) / network.statistics.std[0]
    logits = model(**model.inputs(normalised))
    assert features_.shape == (30, 64)
    assert torch.allclose(model.head(features_), logits, atol=1e-5)
    assert torch.equal(classes, logits.argmax(dim=1))
    assert network.names == tuple("0123456789")


# ---------------------------------------------------------------- Inception


class Stand(torch.nn.Module):
    """Stands in for Inception: features are the mean colours."""

    def __init__(self, name: str, features_list: list[str], feature_extractor_weights_path: Any) -> None:
        super().__init__()
        self.scale = float(torch.load(feature_extractor_weights_path, weights_only=False)["scale"])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        assert x.dtype == torch.uint8
        assert x.shape[1] == 3
        return (x.float().mean(dim=(2, 3)) * self.scale,)


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any], Path]:
    """A torch-fidelity that is installed, and a folder of weights."""
    package, module = types.ModuleType("torch_fidelity"), types.ModuleType("inception")
    module.FeatureExtractorInceptionV3 = Stand  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", module)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def put(weights: Any) -> Path:
        path = tmp_path / "checkpoints" / features.INCEPTION
        path.parent.mkdir(exist_ok=True)
        torch.save(weights, path)
        return path

    return put


def test_fid_where_its_weights_are(home: Path, fidelity: Callable[[Any], Path]) -> None:
    why_not = quality(home / "good", real=home / "names", number=40)["notes"]
    assert any("never downloaded" in note for note in why_not)
    fidelity({"scale": torch.tensor(2.0)})
    rows = quality(home / "good", real=home / "names", number=40)["measures"]
    assert [row["measure"] for row in rows] == ["fid", "kid", "precision", "recall", "sliced_wasserstein"]
    assert rows[0]["of"] == "3 features of Inception"
    # Images that a recipe makes smaller are floats.
    found, _ = find_inception([np.dtype("uint8")] * 2, torch.device("cpu"))
    assert found is not None
    assert found(torch.full((1, 1, 8, 8), 300.4)).features.tolist() == [[510.0] * 3]


def test_weights_that_run_code_are_refused(fidelity: Callable[[Any], Path], tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Bad:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    fidelity(Bad())
    found, why_not = find_inception([np.dtype("uint8")], torch.device("cpu"))
    assert found is None
    assert "cannot be used" in why_not
    assert not mark.exists()
    mixed = [np.dtype("uint8"), np.dtype("float32")]
    assert "8 bits, and these are float32" in find_inception(mixed, torch.device("cpu"))[1]


# ---------------------------------------------------------------- the benchmark

BENCHMARK = ROOT / "benchmarks/cifar10_flow.py"


@pytest.mark.slow
def test_the_benchmark_of_cifar10_runs_from_end_to_end(tmp_path: Path) -> None:
    words = [sys.executable, BENCHMARK, "--quick", "--home", tmp_path / "home", "--out", tmp_path]
    code, output = run(*words, env=environment())
    assert code == 0, output[-3000:]
    found = json.loads((tmp_path / "cifar10_flow.json").read_text())
    assert [row["guidance"] for row in found["rows"]] == [1.0, 1.5]
    assert found["rows"][0]["measures"][0]["measure"] == "accuracy"
    assert found["dit"]["steps"] == 4
    assert found["classifier"]["eval"]["step"] == 4
    assert (tmp_path / "cifar10_flow_loss.png").is_file()
    assert (tmp_path / "cifar10_flow_samples_1.5.png").is_file()


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("cifar10_flow", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_benchmark_stops_in_time_and_goes_on(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls, there = [0.0], list[int](), [0]

    def sample(run: Path, *, number: int, **asked: Any) -> dict[str, Any]:
        made, there[0] = max(0, number - there[0]), max(number, there[0])
        seconds = made / 10 + (50 if clock[1:] == [] else 0)  # the first ones compile
        clock[:] = [clock[0] + seconds, 1.0]
        calls.append(made)
        return {"made": made, "number": there[0], "seconds": seconds, "settings": {"sampler": "euler"}}

    monkeypatch.setattr(script.vitrail, "sample", sample)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    arguments = argparse.Namespace(home=tmp_path, data=None, minutes=5, quick=True)
    bench = script.Bench(arguments)
    with pytest.raises(script.OutOfTime):
        bench.sample(tmp_path, 5000, 500)
    assert clock[0] <= 300
    first = sum(calls)
    assert 500 < first < 5000
    clock[:], arguments.minutes = [0.0], 60  # another sitting
    assert script.Bench(arguments).sample(tmp_path, 5000, 500) == ("euler", pytest.approx(10.0))
    assert there == [5000]
    assert script.Bench(arguments).sample(tmp_path, 5000, 500) == ("euler", None)


def test_packed_images_are_those_of_the_parquet_files(script: Any, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (11, 32, 32, 3), np.uint8)
    held = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, format="PNG")
        held.append({"bytes": stream.getvalue(), "path": None})
    for part, number in (("train", 11), ("test", 7)):
        table = arrow.table({"image": held[:number], "label": list(range(number))})
        parquet.write_table(table, tmp_path / f"{part}.parquet")
    (tmp_path / "packed").mkdir()
    script.pack(tmp_path, tmp_path / "packed" / script.PACK)
    for name, folder in (("a", tmp_path), ("b", tmp_path / "packed")):
        script.write_binary(folder, tmp_path / name)
        records = np.fromfile(tmp_path / name / "test_batch.bin", np.uint8).reshape(7, 3073)
        assert records[:, 0].tolist() == list(range(7))
        assert np.array_equal(records[:, 1:].reshape(7, 3, 32, 32), np.moveaxis(pixels[:7], -1, 1))
        files = sorted((tmp_path / name).glob("data_batch_*.bin"))
        assert sum(file.stat().st_size for file in files) == 11 * 3073
