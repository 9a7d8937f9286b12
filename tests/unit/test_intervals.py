"""How sure scores are: intervals over held-out items, and evaluation of all of them where they are few."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import events, tiny_recipe, write_volume

from vitrail.cli.train import with_intervals
from vitrail.report import write_report
from vitrail.training import evaluate
from vitrail.training.intervals import DRAWS, bootstrap
from vitrail.training.run import evaluate as run_evaluation
from vitrail.training.run import train

NAMES = ["count", "right"]


def accuracy(sums: dict[str, float]) -> dict[str, float]:
    return {"accuracy": sums["right"] / sums["count"] if sums["count"] else float("nan")}


def test_an_interval_is_that_of_the_binomial() -> None:
    """Of 400 items of which 3 in 4 are right: 0.75 +- 1.96 sqrt(0.75 0.25 / 400)."""
    table = np.stack([np.ones(400), np.arange(400) % 4 > 0], axis=1)
    found = bootstrap(table, range(400), NAMES, accuracy, seed=0)
    assert found is not None
    assert found["over"] == "400 items"
    half = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert found["metrics"]["accuracy"] == pytest.approx([0.75 - half, 0.75 + half], abs=0.008)
    assert found == bootstrap(table, range(400), NAMES, accuracy, seed=0)  # the same seed gives the same
    assert found != bootstrap(table, range(400), NAMES, accuracy, seed=1)


def test_items_are_drawn_whole() -> None:
    """Samples of an item that are all alike tell no more than one of them."""
    right = np.repeat(np.arange(20) % 2, 50)
    table = np.stack([np.ones(1000), right], axis=1)
    by_item = bootstrap(table, np.repeat(np.arange(20), 50).tolist(), NAMES, accuracy, seed=0)
    by_sample = bootstrap(table, [0] * 1000, NAMES, accuracy, seed=0)
    assert by_item is not None
    assert by_sample is not None
    widths = [np.ptp(found["metrics"]["accuracy"]) for found in (by_item, by_sample)]
    assert widths[0] == pytest.approx(widths[1] * 50**0.5, rel=0.15)
    assert by_sample["over"] == "1000 samples of 1 item, which are alike: it may be too narrow"


def test_there_is_no_interval_of_next_to_nothing() -> None:
    table = np.ones((4, 2))
    assert bootstrap(table, range(4), NAMES, accuracy, seed=0) is None
    assert bootstrap(np.full((9, 2), np.nan), range(9), NAMES, accuracy, seed=0) is None
    rare = np.zeros((9, 2))
    rare[0] = 1  # a class that is in one item of nine is in two draws of three
    found = bootstrap(rare, range(9), NAMES, accuracy, seed=0)
    assert found is not None
    assert found["metrics"]["accuracy"] == [1.0, 1.0]
    assert DRAWS >= 1000


@pytest.mark.parametrize(("once", "samples"), [(7, 7), (512, 512), (5000, 512), (None, 64)])
def test_all_held_out_samples_are_taken_where_they_are_few(
    once: int | None, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "count_once", lambda sampler: once)
    objective: Any = SimpleNamespace(config=SimpleNamespace(labels="item"))
    loader: Any = SimpleNamespace(sampler=None)
    made = evaluate.Evaluator(objective, loader, seed=0, samples="auto", batch=4)
    assert made.samples == samples
    told = "eval.samples: auto takes 512 of 5000 held-out samples; eval.samples: 5000 takes all"
    assert made.note == (told if once == 5000 else None)


def test_scores_have_intervals_in_eval_history_and_report(tmp_path: Path) -> None:
    volume = write_volume(tmp_path / "em.zarr")
    run = tmp_path / "run"
    train(tiny_recipe(volume, run, run__steps=2, eval={"every": 2, "samples": 12}), quiet=True)
    (line,) = events(run, "eval")
    low, high = line["intervals"]["metrics"]["mse_over_variance"]
    assert low < line["metrics"]["mse_over_variance"] < high
    assert line["intervals"]["over"] == "12 samples of 1 item, which are alike: it may be too narrow"
    found = run_evaluation(run)
    assert found["intervals"]["metrics"]["mse_over_variance"] == pytest.approx([low, high], rel=1e-6)
    shown = with_intervals(found)
    assert " to " in shown["metrics"]["mse_over_variance"]
    assert shown["intervals"].startswith("of 95 %, over 12 samples")
    assert with_intervals({"metrics": {"mse": 1.0}}) == {"metrics": {"mse": 1.0}}
    page = write_report(run).read_text(encoding="utf-8")
    assert "(95 %: " in page
    assert "In parentheses: intervals of 95 %" in page


def test_items_of_a_folder_are_all_scored_and_drawn(tmp_path: Path) -> None:
    images = {"kind": "synthetic", "shape": [16, 16], "items": 40}
    tree = tiny_recipe(tmp_path, tmp_path / "run", run__steps=1, checkpoint__every=1, eval={"every": 1})
    tree["data"] |= {"crop": 16, "batch": 4, "train": [images], "valid": [images], "augment": {}}
    model = {"kind": "vit", "width": 16, "depth": 1, "heads": 2, "patch": 4}
    train(tree | {"model": model, "objective": {"kind": "classify"}}, quiet=True)
    (line,) = events(tmp_path / "run", "eval")
    assert line["samples"] == 40
    assert line["metrics"]["accuracy"] * 40 == pytest.approx(round(line["metrics"]["accuracy"] * 40))  # of all 40
    assert line["intervals"]["over"] == "40 items"
    assert json.dumps(line["intervals"], allow_nan=False)


def test_sums_of_single_samples_are_those_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where tiles overlap, whose voxels are put together first."""
    volume, small = write_volume(tmp_path / "em.zarr"), write_volume(tmp_path / "small.zarr", size=32)
    seen: list[Any] = []
    made = evaluate.Evaluator.metrics

    def metrics(self: Any, flow: Any, **options: Any) -> dict[str, float]:
        found = made(self, flow, **options)
        names, rows = self._table
        summed = self.objective.summarise(dict(zip(names, rows[:, 1:].sum(dim=0).tolist(), strict=True)))
        seen.append((found, summed))
        return found

    monkeypatch.setattr(evaluate.Evaluator, "metrics", metrics)
    source = {"path": str(small), "labels": "structures"}
    segment = tiny_recipe(volume, tmp_path / "tiles", run__steps=1, eval={"every": 1, "tiles": {"overlap": 0.5}})
    segment["data"] |= {"train": [source], "valid": [source]}
    train(tiny_recipe(volume, tmp_path / "mae", run__steps=1), quiet=True)
    train(segment | {"model": UNETR, "objective": {"kind": "segment"}}, quiet=True)
    assert len(seen) == 2
    for found, summed in seen:
        assert summed == pytest.approx(found, rel=1e-5, nan_ok=True)


UNETR = {
    "kind": "unetr",
    "ndim": 3,
    "features": 4,
    "encoder": {"width": 24, "depth": 4, "heads": 2, "patch": 4, "positions": "rope"},
}
