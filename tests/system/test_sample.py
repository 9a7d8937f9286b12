"""`vitrail sample` on tiny runs: the same files whoever makes them, whatever happens meanwhile, and clear refusals."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from support import LONG, end, merge, run, start, torchrun, write_volume

import vitrail
from vitrail import cli
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.infer.collection import Generated, find_run
from vitrail.infer.folder import Kind, read_sample
from vitrail.weights.runs import find_checkpoint, load_weights, stored_recipe

NAMES = ("bar", "cross", "disc")


def recipe(run_dir: Path, data: Path, **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run": {"name": run_dir.name, "dir": str(run_dir), "seed": 3, "steps": 6, "device": "cpu"},
        "model": {"kind": "dit", "ndim": 2, "width": 32, "depth": 2, "heads": 2, "patch": 2, "label_dropout": 0.2},
        "objective": {"kind": "flow", "classes": True, "sampling": {"steps": 3}},
        "data": {"train": [{"path": str(data)}], "crop": 8, "batch": 8},
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "ema": {"decay": 0.5},
        "checkpoint": {"every": 3},
        "log": {"pictures": 1000, "tensorboard": False},
    }
    return merge(tree, {key.replace("__", "."): value for key, value in changes.items()})


def write_images(folder: Path, *, colour: bool) -> Path:
    """Fields of three classes as float TIFF, or in colour as PNG."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:8, :8]
    shapes = (abs(y - 4) < 2, (abs(y - 4) < 1) | (abs(x - 4) < 1), (y - 4) ** 2 + (x - 4) ** 2 < 8)
    for name, shape in zip(NAMES, shapes, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            field = shape * 2.0 + rng.normal(0, 0.1, (8, 8))
            if colour:
                pixels = np.clip(60 + 60 * np.stack([field, field[::-1], field.T], axis=-1), 0, 255)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
            else:
                tifffile.imwrite(folder / name / f"{number}.tif", field.astype(np.float32))
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other on busy cores would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Three runs: fields (labelled, floats), volumes (without classes or average) and colours (conditional)."""
    place = tmp_path_factory.mktemp("sample")
    vitrail.train(recipe(place / "fields", write_images(place / "tiff", colour=False)), quiet=True)
    volume = write_volume(place / "em.zarr", size=16)
    tree = recipe(
        place / "volumes",
        volume,
        model={"kind": "dit", "ndim": 3, "width": 16, "depth": 1, "heads": 2, "patch": 4},
        objective={"kind": "denoise", "steps": 20, "sampling": {"steps": 2}},
        run__steps=2,
    )
    del tree["ema"]
    vitrail.train(tree, quiet=True)
    colours = write_images(place / "png", colour=True)
    vitrail.train(recipe(place / "colours", colours, objective__condition=["red"], run__steps=2), quiet=True)
    return place


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def samples(folder: Path) -> np.ndarray:
    """All samples of a folder, in the order of their counters."""
    manifest = json.loads((folder / "manifest.json").read_text())
    keys = ("axes", "variables", "spacing", "unit", "format")
    kind = Kind(dtype=np.dtype(manifest["dtype"]), **{key: manifest[key] for key in keys})
    return np.stack([read_sample(folder / entry["path"], kind) for entry in manifest["files"]])


# ---------------------------------------------------------------- the same samples


MANY = """
import sys
import vitrail
from vitrail import cli
place, out = sys.argv[1:]
vitrail.sample(f"{place}/colours", number=5, batch=2, out=f"{out}-made-from")
few = ["--number", "10", "--batch", "2", "--guidance", "2", "--quiet", "--out", out]
sys.argv[1:] = ["sample", f"{place}/fields", *few]
cli.console()
"""


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_files_from_any_number_of_ranks(place, tmp_path, ranks):
    (tmp_path / "many.py").write_text(MANY)
    code, output = run(*torchrun(ranks, tmp_path / "many.py", place, tmp_path / "many"))
    assert code == 0, output
    assert output.splitlines()[-1] == str(tmp_path / "many")  # said once
    made = vitrail.sample(place / "fields", number=10, batch=2, guidance=2.0, out=tmp_path / "one")
    one = files(tmp_path / "one")
    assert made["made"] == 10
    assert [name for name in one if "/" not in name] == ["grid.png", "manifest.json", "settings.json"]
    assert [n for n in one if n.startswith("samples/bar/")] == [f"samples/bar/{n:05d}.tif" for n in range(4)]
    assert files(tmp_path / "many") == one
    vitrail.sample(place / "colours", number=5, batch=2, out=tmp_path / "made-from")
    assert files(tmp_path / "many-made-from") == files(tmp_path / "made-from")


def test_batches_change_rounding_alone(place, tmp_path):
    found = []
    for batch in (1, 3, 8):
        vitrail.sample(place / "fields", number=7, batch=batch, guidance=1.5, out=tmp_path / str(batch))
        found.append(samples(tmp_path / str(batch)))
    assert found[0].std() > 0.1
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=2e-5)


def test_samples_are_what_the_objective_makes_of_their_labels_and_counters(place, tmp_path):
    """Averaged weights, classes in turn, and the settings of the call."""
    made = vitrail.sample(place / "fields", number=4, classes=["disc", "bar"], steps=4, guidance=3.0, seed=7,
                          interval=(0.0, 0.6), sampler="heun", out=tmp_path / "out")  # fmt: skip
    assert [(e["path"], e["label"], e["class"]) for e in made["files"][:2]] == [
        ("samples/disc/00000.tif", 2, "disc"),
        ("samples/bar/00000.tif", 0, "bar"),
    ]
    manifest = find_checkpoint(place / "fields", None)[1]
    stored = stored_recipe(manifest)
    objective = stored.objective.build(stored.model, stored_statistics(manifest["statistics"]))
    model = vitrail.load(place / "fields", weights="ema")
    settings = type(stored.objective.sampling)(sampler="heun", steps=4, guidance=3.0, interval=(0.0, 0.6))

    def generate(labels: list[int], seed: int = 7) -> np.ndarray:
        with torch.no_grad():
            return objective.generate(
                lambda inputs: model(**inputs),
                counters=range(4),
                seed=seed,
                labels=torch.tensor(labels),
                settings=settings,
            ).numpy()

    found = samples(tmp_path / "out")
    np.testing.assert_allclose(found, generate([2, 0, 2, 0]), atol=2e-5)
    assert abs(found - generate([0, 2, 0, 2])).max() > 1e-3  # six steps teach little, but far more than rounding
    assert abs(found - generate([2, 0, 2, 0], seed=8)).max() > 1
    raw = vitrail.sample(place / "fields", number=4, classes=["disc", "bar"], steps=4, guidance=3.0, seed=7,
                         interval=(0.0, 0.6), sampler="heun", weights="raw", out=tmp_path / "raw")  # fmt: skip
    assert (made["weights"], raw["weights"]) == ("ema", "raw")
    assert abs(samples(tmp_path / "raw") - found).max() > 1e-3


def test_without_guidance_samples_have_no_class(place, tmp_path):
    made = vitrail.sample(place / "fields", number=2, guidance=0.0, out=tmp_path / "out")
    assert made["files"] == [{"path": f"samples/{n:05d}.tif", "counter": n} for n in range(2)]


# ---------------------------------------------------------------- what goes on


def test_a_killed_call_goes_on_and_a_larger_number_adds(place, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = [place / "fields", "--number", "16", "--batch", "1", "--steps", "6", "--out", out, "--quiet"]
    process = start(sys.executable, "-m", "vitrail", "sample", *words)
    try:
        deadline = time.monotonic() + LONG
        while len(list(out.glob("samples/*/*.tif"))) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        end(process)
    before = {p: p.stat().st_mtime_ns for p in out.glob("samples/*/*.tif")}
    assert 3 <= len(before) < 16
    assert not (out / "manifest.json").exists()
    for draft in out.glob("samples/*/.*.part"):  # the kill may have come within a write
        draft.unlink()
    left = next(iter(before)).parent / ".00009.tif.0123456789abcdef.part"
    left.touch()
    os.utime(left, (0, 0))
    options: dict[str, Any] = {"batch": 1, "steps": 6}
    again = vitrail.sample(place / "fields", number=16, out=out, **options)
    assert again["made"] == 16 - len(before)
    assert before == {p: p.stat().st_mtime_ns for p in before}
    more = vitrail.sample(place / "fields", number=18, out=out, **options)
    assert more["made"] == 2
    assert vitrail.sample(place / "fields", number=18, out=out, **options)["made"] == 0
    vitrail.sample(place / "fields", number=18, out=whole, **options)
    assert files(out) == files(whole)


def test_the_number_may_grow_and_shrink_without_a_word_of_batches(place, tmp_path):
    out, made = tmp_path / "out", {}
    for number, held, new in ((4, 4, 4), (20, 20, 16), (10, 20, 0)):
        made = vitrail.sample(place / "fields", number=number, out=out)
        assert (made["number"], made["made"], made["batch"], len(made["files"])) == (held, new, 4, held)
    assert made["notes"] == [f"{out} holds 20 samples already, which are kept"]
    assert find_run(Generated(out, seed=0)) == place / "fields"
    for path in (out / "samples").glob("*/0000[1-9].tif"):  # of a call that was stopped, nothing beyond what is there
        path.unlink()
    (out / "manifest.json").unlink()
    again = vitrail.sample(place / "fields", number=10, out=out)
    assert (again["number"], again["made"]) == (10, 10)  # every group lacked some
    vitrail.sample(place / "fields", number=10, batch=4, out=tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_a_manifest_does_not_outlive_a_sample_that_is_made_anew(place, tmp_path, monkeypatch):
    """On a GPU it may be of other bits than the one that the manifest tells of."""
    out = tmp_path / "out"
    vitrail.sample(place / "fields", number=4, out=out)
    min(out.glob("samples/*/*.tif")).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.infer.sample.close_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            vitrail.sample(place / "fields", number=4, out=out)
    assert not (out / "manifest.json").exists()
    assert vitrail.sample(place / "fields", number=4, out=out)["made"] == 0


# ---------------------------------------------------------------- volumes, conditions


def test_volumes_without_their_data(place, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.infer.sample.open_data", None)  # nothing of it is needed
    hidden = (place / "em.zarr").rename(place / "away.zarr")
    try:
        made = vitrail.sample(place / "volumes", number=3, batch=2)
        stack = vitrail.sample(place / "volumes", number=3, batch=2, format="tiff", sampler="ancestral")
    finally:
        hidden.rename(place / "em.zarr")
    out = place / "volumes" / "samples" / "step-00000002-batch-2"
    assert (made["out"], made["weights"], made["dtype"]) == (str(out), "raw", "uint8")
    assert "no moving average" in made["notes"][0]
    assert Path(stack["out"]).name == "step-00000002-sampler-ancestral-batch-2-format-tiff"
    source = OmeZarrConfig(path=str(out / "samples" / "00002.ome.zarr")).open()
    real = OmeZarrConfig(path=str(place / "em.zarr")).open()
    item = source.items[0]
    assert (item.shape, item.spacing, item.unit) == ((8, 8, 8), real.items[0].spacing, real.items[0].unit)
    np.testing.assert_array_equal(source.read(0, (slice(0, 8),) * 3), samples(out)[2])
    assert tifffile.imread(Path(stack["out"]) / "samples" / "00000.tif").shape == (8, 8, 8)
    with Image.open(out / "grid.png") as picture:
        assert min(picture.size) > 50


def test_a_conditional_run_writes_what_it_was_given_and_the_truth(place, tmp_path):
    made = vitrail.sample(place / "colours", number=5, batch=2, out=tmp_path / "out")
    assert made["variables"] == ["green", "blue"]
    truths = {p.parent.name: [] for p in (place / "png").glob("*/*.png")}
    for path in (place / "png").glob("*/*.png"):
        with Image.open(path) as image:
            truths[path.parent.name].append(np.moveaxis(np.asarray(image), -1, 0))
    for entry in made["files"]:
        assert entry["path"] == f"samples/{entry['counter']:05d}.tif"
        with Image.open(tmp_path / "out" / entry["condition"]) as image:
            given = np.asarray(image)
        truth = tifffile.imread(tmp_path / "out" / entry["truth"])
        assert any(
            np.array_equal(given, real[0]) and np.array_equal(truth, real[1:]) for real in truths[entry["class"]]
        )
    shutil.rmtree(tmp_path / "out" / "samples")
    assert vitrail.sample(place / "colours", number=5, batch=2, out=tmp_path / "out")["files"] == made["files"]


def test_several_guidances_lie_side_by_side(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out = tmp_path / "out"
    words = ["sample", str(place / "fields"), "--number", "3", "--steps", "2", "--out", str(out)]
    for _ in range(2):  # a second call finds all of it
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, "--guidance", "1,2.5", "--json"])
        assert not ended.value.code
        found = json.loads(capsys.readouterr().out)
    assert (found["made"], found["number"], found["out"]) == (0, 3, str(out))
    assert [each["settings"]["guidance"] for each in found["scales"]] == [1.0, 2.5]
    assert sorted(path.name for path in out.iterdir()) == ["grid.png", "guidance-1", "guidance-2.5"]
    alone = vitrail.sample(place / "fields", number=3, steps=2, guidance=2.5, out=tmp_path / "alone")
    assert files(out / "guidance-2.5").keys() == files(Path(alone["out"])).keys()
    assert np.array_equal(samples(out / "guidance-2.5"), samples(tmp_path / "alone"))
    assert not np.array_equal(samples(out / "guidance-2.5"), samples(out / "guidance-1"))
    with pytest.raises(UserError, match=r"alone holds '.*', which is of no guidance; choose another folder"):
        vitrail.sample(place / "fields", number=3, guidance=[1.0, 3.0], out=tmp_path / "alone")
    for wrong in ([2.0], [1.0, 1.0]):
        with pytest.raises(UserError, match=r"must be one number, or several different ones"):
            vitrail.sample(place / "fields", guidance=wrong, out=tmp_path / "none")
    with pytest.raises(UserError, match="guidance -1 must be 0 or more"):
        vitrail.sample(place / "fields", guidance=[2.0, -1.0], out=tmp_path / "none")
    assert not (tmp_path / "none").exists()


# ---------------------------------------------------------------- words and refusals


def test_the_command_line(place, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(place)
    for more, show in ((["--json"], True), ([], False)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["sample", "volumes", "--number", "2", "--steps", "1", "--out", str(tmp_path / "out"), *more])
        shown = capsys.readouterr()
        assert not ended.value.code, shown.err
        assert "note: this run has no moving average" in shown.err
        assert json.loads(shown.out)["number"] == 2 if show else shown.out == f"{tmp_path / 'out'}\n"


@pytest.mark.parametrize(
    ("name", "wishes", "words"),
    [
        ("fields", {"number": 0}, "number: 0 must be at least 1"),
        ("fields", {"batch": 0}, "batch: 0 must be at least 1"),
        ("fields", {"classes": "disk"}, "classes: 'disk' is not a class of this run; did you mean 'disc'"),
        ("fields", {"sampler": "eular"}, "sampler 'eular' is unknown; did you mean 'euler'"),
        ("fields", {"steps": 0}, "steps 0 must be at least 1"),
        ("fields", {"guidance": -1.0}, "guidance -1 must be 0 or more"),
        ("fields", {"interval": (0.8, 0.2)}, "interval 0.8, 0.2 must be two"),
        ("fields", {"interval": (0.8,)}, "interval: .0.8. must be two numbers"),
        ("fields", {"weights": "best"}, "weights: 'best' is unknown"),
        ("fields", {"checkpoint": 5}, "no checkpoint of step 5 here .there are: 6, 3."),
        ("fields", {"format": "png"}, "format: PNG holds images of uint8"),
        ("fields", {"latents": True}, "latents: this run has no codec"),
        ("fields", {"guidance": 0.0, "classes": "bar"}, "classes: with guidance 0 samples have no class"),
        ("fields", {"interval": (0.2, 0.8)}, "interval: guidance is 1, so there is nothing to guide"),
        ("fields", {"overrides": ["model.depth=1"]}, "model.depth: 2 became 1; what a checkpoint holds cannot be"),
        ("volumes", {"classes": "all,0"}, "knows no classes"),
        ("volumes", {"guidance": 2.0}, "guidance: 2 needs a model that knows classes"),
        ("volumes", {"steps": 21}, "steps 21 .*must be from 1 to 20"),
        ("volumes", {"weights": "ema"}, "no moving average"),
        ("volumes", {"format": "png"}, "format: PNG holds images"),
        ("nowhere", {}, "no checkpoint here"),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_leaves_nothing(place, tmp_path, name, wishes, words):
    with pytest.raises(UserError, match=words):
        vitrail.sample(place / name, out=tmp_path / "out", **wishes)
    assert not (tmp_path / "out").exists()


def test_other_settings_and_other_objectives_are_refused(place, tmp_path, monkeypatch):
    vitrail.sample(place / "fields", number=2, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"seed: 3 became 4.*choose another folder with --out"):
        vitrail.sample(place / "fields", number=2, seed=4, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"steps.*choose another folder"):
        vitrail.sample(place / "fields", number=2, steps=2, out=tmp_path / "out")
    with pytest.raises(UserError, match=r"changes: {} became {'objective.shift': 2.0}.*choose another folder"):
        vitrail.sample(place / "fields", number=2, out=tmp_path / "out", overrides=["objective.shift=2"])
    with pytest.raises(UserError, match=r"model.heads: 2 became 4; what a checkpoint holds cannot be changed"):
        vitrail.evaluate(place / "fields", overrides=["model.heads=4"])
    path, manifest = find_checkpoint(place / "fields", None)
    small = dataclasses.replace(stored_recipe(manifest).model, depth=1).build()
    with pytest.raises(UserError, match=r"it has a tensor 'ema.encoder.blocks.1.* that the model lacks"):
        load_weights(small, path, manifest, "ema", None)
    shutil.copytree(place / "fields" / "checkpoints", tmp_path / "bare" / "checkpoints")
    shutil.copy(place / "fields" / "recipe.yaml", tmp_path / "bare")
    told = vitrail.sample(tmp_path / "bare", number=2, out=tmp_path / "told")["notes"]
    assert "data.json is missing, which tells the type" in told[0]
    undropped = recipe(place / "undropped", place / "tiff", model__label_dropout=0.0, run__steps=1)
    vitrail.train(undropped, quiet=True)
    with pytest.raises(UserError, match=r"guidance: 2 .*model.label_dropout above 0"):
        vitrail.sample(place / "undropped", guidance=2.0, out=tmp_path / "other")
    classifier = recipe(
        place / "vit",
        place / "tiff",
        run__steps=1,
        model={"kind": "vit", "ndim": 2, "width": 16, "depth": 1, "heads": 2, "patch": 4},
        objective={"kind": "classify"},
    )
    vitrail.train(classifier, quiet=True)
    with pytest.raises(UserError, match=r"its objective is 'classify', which makes no samples"):
        vitrail.sample(place / "vit", out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
