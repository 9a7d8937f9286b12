"""The library from Python: models, train(), load() and evaluate(), as a script or a notebook meets them."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LONG, events, tiny_recipe, write_recipe

import vitrail
from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.tokens import grid_coordinates, patchify
from vitrail.models import MAE, DecoderConfig, EncoderConfig, MAEConfig, ViT, ViTConfig
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.training.run import Outcome


@pytest.fixture(scope="module")
def others() -> set[threading.Thread]:
    """Threads of earlier tests."""
    return set(threading.enumerate())


@pytest.fixture(scope="module")
def finished(others: set[threading.Thread], volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A short run with a moving average and checkpoints of steps 5 and 10."""
    tree = tiny_recipe(
        volume,
        tmp_path_factory.mktemp("api") / "run",
        run__steps=10,
        checkpoint__every=5,
        eval__every=5,
        eval__samples=6,
        log__pictures=10,
        log__report=True,
        optimizer__lr=1e-2,
        ema={"decay": 0.9},
    )
    return vitrail.train(tree, quiet=True)


# ---------------------------------------------------------------- importing


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    program = """
import sys
import vitrail
assert vitrail.__version__
from vitrail import load_recipe
import vitrail.recipe
print(sorted({"torch", "numpy", "matplotlib", "zarr", "tensorstore"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there() -> None:
    for name in vitrail.__all__:
        assert callable(getattr(vitrail, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        vitrail.nonsense  # noqa: B018


# ---------------------------------------------------------------- models alone


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_vit_from_python(ndim: int) -> None:
    model = ViTConfig(width=16, depth=1, heads=2, patch=4, ndim=ndim, channels=2, classes=5).build()
    assert isinstance(model, ViT)
    size, patch = (8,) * ndim, (4,) * ndim
    x = torch.randn(3, 2, *size)
    coordinates = grid_coordinates(size, patch).expand(3, -1, -1)
    out = model(patchify(x, patch), coordinates=coordinates)
    assert out.shape == (3, 5)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("decoder", ["self", "cross", "linear"])
def test_an_mae_from_python(ndim: int, decoder: Any) -> None:
    config = MAEConfig(
        encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4),
        decoder=DecoderConfig(kind=decoder, width=8, depth=1, heads=2),
        ndim=ndim,
        channels=1,
        shape=(16,) * ndim,
    )
    config.check()
    model = MAE(config)
    on: Any = "all" if decoder == "linear" else "hidden"
    objective = ReconstructConfig(on=on).build(config, Statistics((0.0,), (1.0,)))
    batch = Batch([0, 1], torch.randn(2, 1, *(16,) * ndim))
    inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
    loss = objective.loss(model(**inputs), targets)
    assert torch.isfinite(loss.sum)
    assert loss.count == targets.values.numel()


@pytest.mark.parametrize("kind", ["vit", "mae"])
def test_a_model_made_in_python_starts_like_a_run_of_seed_0(kind: str) -> None:
    """Class tokens, registers, scales, tables and mask tokens too: none is left as the memory happened to be."""
    encoder: dict[str, Any] = {
        "width": 16,
        "depth": 2,
        "heads": 2,
        "patch": 4,
        "positions": "learned",
        "cls_token": True,
        "registers": 3,
        "layer_scale": 0.1,
        "qk_norm": True,
    }
    config: Any = (
        ViTConfig(**encoder, channels=1, shape=8, classes=4)
        if kind == "vit"
        else MAEConfig(encoder=EncoderConfig(**encoder), channels=1, shape=8)
    )
    garbage = [torch.full((1 << 14,), float("nan")) for _ in range(20)]  # what the allocator may hand out again
    del garbage
    here = config.build()
    with torch.device("meta"):
        there = config.build()
    rules = init_rules(there)
    there.to_empty(device="cpu")
    initialise(there, rules, 0)
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b), name


# ---------------------------------------------------------------- train


def test_train_returns_an_outcome(finished: Outcome) -> None:
    assert isinstance(finished, Outcome)
    assert (finished.code, finished.step, finished.reason) == (0, 10, "done")
    for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "report.html", "checkpoints", "pictures"):
        assert (finished.run_dir / name).exists(), name
    assert [e["step"] for e in events(finished.run_dir, "train")] == list(range(1, 11))
    assert [e["step"] for e in events(finished.run_dir, "eval")] == [5, 10]


def test_training_leaves_nothing_running(finished: Outcome, others: set[threading.Thread]) -> None:
    assert not torch.distributed.is_initialized()
    ours = [t for t in threading.enumerate() if t not in others and t.name.startswith("vitrail")]
    for thread in ours:  # who is at a read ends after it, whenever that is
        thread.join(LONG)
    assert not [t.name for t in ours if t.is_alive()]


def test_a_finished_run_is_done_at_once(finished: Outcome) -> None:
    """The folder, the stored recipe and the mapping all name the same run, and nothing is trained again."""
    before = (finished.run_dir / "metrics.jsonl").read_text().count('"event": "train"')
    for given in (finished.run_dir, str(finished.run_dir), finished.run_dir / "recipe.yaml"):
        assert vitrail.train(given, quiet=True).step == 10
    after = (finished.run_dir / "metrics.jsonl").read_text().count('"event": "train"')
    assert after == before


def test_a_recipe_may_be_a_mapping_a_file_or_a_recipe(volume: Path, tmp_path: Path) -> None:
    short: dict[str, Any] = {"run__steps": 2, "eval__samples": 2}
    tree = tiny_recipe(volume, tmp_path / "mapping", **short)
    given = [
        tree,
        write_recipe(tmp_path / "recipe.yaml", tiny_recipe(volume, tmp_path / "file", **short)),
        vitrail.load_recipe(tiny_recipe(volume, tmp_path / "recipe", **short)),
    ]
    found = [events(vitrail.train(g, quiet=True).run_dir, "train") for g in given]
    assert [len(e) for e in found] == [2, 2, 2]
    assert not (tmp_path / "mapping" / "pictures").exists()  # which are off
    losses = [[e["loss"] for e in run] for run in found]
    assert losses[0] == losses[1] == losses[2]
    fresh = vitrail.train(tree, fresh=True, quiet=True, overrides=["run.steps=1"])
    assert fresh.run_dir == tmp_path / "mapping-2"
    assert fresh.step == 1


@pytest.mark.parametrize("optimizer", [{"kind": "adamw"}, {"kind": "sgd"}, {"kind": "sgd", "momentum": 0.0}])
def test_each_optimizer_trains_and_leaves_frozen_weights_alone(
    optimizer: dict[str, Any], volume: Path, tmp_path: Path
) -> None:
    tree = tiny_recipe(
        volume,
        tmp_path / "run",
        run__steps=2,
        checkpoint__every=1,
        eval__samples=2,
        optimizer=optimizer | {"lr": 0.1, "groups": [{"match": r"^encoder\.blocks\.0\.", "freeze": True}]},
    )
    run = vitrail.train(tree, quiet=True).run_dir
    first, second = (dict(vitrail.load(run, checkpoint=step).named_parameters()) for step in (1, 2))
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    frozen = {name for name in first if name.startswith("encoder.blocks.0.")}
    assert frozen
    assert not moved & frozen
    start = events(run, "start")[0]
    (row,) = [row for row in start["groups"] if row["name"] == "frozen"]
    assert row["parameters"] == start["frozen"] == sum(first[name].numel() for name in frozen)
    assert {name for name in first if name.endswith("weight") and "norm" not in name} - frozen <= moved


def test_train_refuses_with_a_sentence(volume: Path, tmp_path: Path) -> None:
    for given, words in [
        ({}, "run: missing"),
        (tmp_path / "nowhere.yaml", "nowhere.yaml"),
        (tmp_path, "no recipe.yaml"),
        (7, "expected a path or a mapping, got int"),
    ]:
        with pytest.raises(UserError, match=words):
            vitrail.train(given)
    with pytest.raises(UserError, match=r"optimizer\.lrr: unknown key; did you mean 'lr'"):
        vitrail.train(tiny_recipe(volume, tmp_path / "run"), overrides=["optimizer.lrr=1"])
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


# ---------------------------------------------------------------- load


def test_a_loaded_model_computes(finished: Outcome) -> None:
    model = vitrail.load(finished.run_dir)
    assert isinstance(model, MAE)
    assert not model.training
    assert model.config.channels == 1
    size, patch = (16, 16, 16), model.config.patch
    patches = patchify(torch.randn(2, 1, *size), patch)  # B N P
    coordinates = grid_coordinates(size, patch).expand(2, -1, -1)
    visible, hidden = slice(0, 16), slice(16, None)
    with torch.no_grad():
        side = {"coordinates": coordinates[:, visible], "queries": coordinates[:, hidden]}
        out = model(patches[:, visible], **side)
        again = model(patches[:, visible], **side)
    assert out.shape == (2, 48, 64)
    assert torch.isfinite(out).all()
    assert torch.equal(out, again)


def parameters(model: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def test_averaged_raw_and_earlier_weights_differ(finished: Outcome) -> None:
    run = finished.run_dir
    average, raw, early = (
        parameters(vitrail.load(run)),
        parameters(vitrail.load(run, weights="raw")),
        parameters(vitrail.load(run, weights="raw", checkpoint=5)),
    )
    np.testing.assert_array_equal(average, parameters(vitrail.load(run, weights="ema", checkpoint=10)))
    np.testing.assert_array_equal(early, parameters(vitrail.load(str(run), weights="raw", checkpoint="5")))
    assert not np.array_equal(average, raw)
    assert not np.array_equal(early, raw)
    # The average lies behind: nearer to the earlier weights than the latest ones are.
    assert np.linalg.norm(average - early) < np.linalg.norm(raw - early)


def test_load_refuses_with_a_sentence(finished: Outcome, tmp_path: Path) -> None:
    run = finished.run_dir
    for arguments, words in [
        ({"run": tmp_path / "nowhere"}, r"nowhere: no checkpoint here \(there are: none\)"),
        ({"run": run, "checkpoint": 7}, r"no checkpoint of step 7 here \(there are: 10, 5\)"),
        ({"run": run, "checkpoint": "newest"}, "checkpoint: 'newest' is not a step"),
        ({"run": run, "weights": "average"}, "weights: 'average' .*'ema' or 'raw'"),
    ]:
        with pytest.raises(UserError, match=words):
            vitrail.load(**arguments)


def test_a_damaged_checkpoint_is_passed_over_or_refused(finished: Outcome, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished.run_dir, run)
    newest = run / "checkpoints" / "step-00000010"
    victim = next(newest.glob("__0_*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    np.testing.assert_array_equal(
        parameters(vitrail.load(run)), parameters(vitrail.load(finished.run_dir, checkpoint=5))
    )
    with pytest.raises(UserError, match="does not match its checksum"):
        vitrail.load(run, checkpoint=10)


def test_a_run_without_an_average_has_only_raw_weights(volume: Path, tmp_path: Path) -> None:
    data = tmp_path / "em.zarr"
    shutil.copytree(volume, data)
    tree = tiny_recipe(data, tmp_path / "run", run__steps=1, eval__samples=2)
    run = vitrail.train(tree, quiet=True).run_dir
    shutil.rmtree(data)  # a model can be used where its data are not
    np.testing.assert_array_equal(parameters(vitrail.load(run)), parameters(vitrail.load(run, weights="raw")))
    with pytest.raises(UserError, match="no moving average; ask for 'raw'"):
        vitrail.load(run, weights="ema")
    with pytest.raises(UserError, match="no moving average"):
        vitrail.evaluate(run, weights="ema")


# ---------------------------------------------------------------- evaluate


def test_evaluating_again_gives_what_the_run_wrote(finished: Outcome) -> None:
    found = vitrail.evaluate(finished.run_dir)
    assert {k: found[k] for k in ("run", "step", "weights", "samples")} == {
        "run": str(finished.run_dir),
        "step": 10,
        "weights": "ema",
        "samples": 6,
    }
    written = {e["step"]: e for e in events(finished.run_dir, "eval")}
    assert found["metrics"] == pytest.approx(written[10]["metrics"], rel=1e-6)
    early = vitrail.evaluate(finished.run_dir, checkpoint=5)
    assert early["metrics"] == pytest.approx(written[5]["metrics"], rel=1e-6)
    assert json.dumps(found)


def test_other_weights_and_samples_give_other_numbers(finished: Outcome) -> None:
    average = vitrail.evaluate(finished.run_dir)["metrics"]
    raw = vitrail.evaluate(finished.run_dir, weights="raw")
    assert raw["weights"] == "raw"
    assert raw["metrics"]["mse"] != average["mse"]
    assert raw["metrics"]["variance"] == pytest.approx(average["variance"])  # the same samples and masks
    more = vitrail.evaluate(finished.run_dir, samples=9)
    assert more["samples"] == 9
    assert more["metrics"]["variance"] != average["variance"]


def test_the_batch_of_an_evaluation_changes_nothing(finished: Outcome) -> None:
    whole = vitrail.evaluate(finished.run_dir)["metrics"]
    single = vitrail.evaluate(finished.run_dir, overrides=["data.micro_batch=1"])["metrics"]
    assert single == pytest.approx(whole, rel=1e-5)


def test_evaluate_agrees_with_a_loop_of_ones_own(finished: Outcome, volume: Path) -> None:
    """The scores again from the public parts: load(), the objective and numpy."""
    from vitrail.data.dataset import Dataset
    from vitrail.draws import key

    model = vitrail.load(finished.run_dir)
    recipe = vitrail.load_recipe(finished.run_dir / "recipe.yaml")
    dataset = Dataset(recipe.data.valid, (16, 16, 16), where="data.valid")
    sampler = dataset.sampler(seed=key(3, "valid"), lanes=1, reuse=1)
    objective = recipe.objective.build(model.config, Statistics((0.0,), (1.0,)))
    statistics = json.loads(next((finished.run_dir / "checkpoints").glob("step-*10/manifest.json")).read_text())
    mean, std = (statistics["statistics"][k][0] for k in ("mean", "std"))
    truth, error = [], []
    for counter in range(6):
        sample = sampler(counter)
        window = tuple(slice(s, s + 16) for s in sample.start)
        crop = torch.from_numpy(dataset.sources[0].read(0, window).astype(np.float32))[None]
        inputs, targets = objective.prepare(Batch([counter], crop), Draws(3, [counter]), evaluating=True)
        inputs["x"] = (inputs["x"] - mean) / std
        with torch.no_grad():
            predicted = model(**inputs) * std + mean
        truth.append(targets.values.numpy().ravel().astype(np.float64))
        error.append((predicted - targets.values).numpy().ravel().astype(np.float64))
    found = vitrail.evaluate(finished.run_dir)["metrics"]
    mse, variance = np.square(np.concatenate(error)).mean(), np.concatenate(truth).var()
    assert found["mse"] == pytest.approx(mse, rel=1e-4)
    assert found["variance"] == pytest.approx(variance, rel=1e-6)
    assert found["mse_over_variance"] == pytest.approx(mse / variance, rel=1e-4)


def test_evaluate_refuses_with_a_sentence(finished: Outcome, tmp_path: Path) -> None:
    run = finished.run_dir
    for arguments, words in [
        ({"run": tmp_path}, "no checkpoint here"),
        ({"run": run, "checkpoint": 3}, "no checkpoint of step 3"),
        ({"run": run, "overrides": ["data.valid=[]"]}, "no data.valid to evaluate on"),
        ({"run": run, "weights": "best"}, "weights: 'best'"),
        ({"run": run, "samples": -1}, "samples: -1"),
    ]:
        with pytest.raises(UserError, match=words):
            vitrail.evaluate(**arguments)
    assert not torch.distributed.is_initialized()
