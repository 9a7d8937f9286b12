"""Trials, the search for the largest batch and calibration on a real device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.bench.calibrate import calibrate
from vitrail.bench.cell import take_steps
from vitrail.bench.tune import tune
from vitrail.cost.cluster import load_cluster
from vitrail.recipe import load_recipe

pytestmark = pytest.mark.gpu


def tree(batch: Any) -> dict[str, Any]:
    source = {"kind": "dummy", "path": "dummy", "shape": [256, 256], "channels": 3, "classes": 10, "items": 8192}
    return {
        "run": {"name": "tiny", "steps": 2},
        "model": {"kind": "vit", "width": 256, "depth": 2, "heads": 4, "patch": 4, "classes": 10},
        "objective": {"kind": "classify"},
        "data": {"train": [source], "crop": 256, "batch": batch, "normalize": "none"},
        "parallel": {"compile": False},
    }


def test_a_trial_tells_its_memory() -> None:
    torch.cuda.reset_accumulated_memory_stats()  # a trial has a process of its own: what other tests did is not its
    found = take_steps(load_recipe(tree("4/rank")))
    assert found["status"] == "ok"
    assert 0 < found["allocated"] <= found["reserved"] < found["memory"]
    assert found["allocated"] < found["used"] <= found["memory"]
    assert found["retries"] == 0


def test_the_largest_batch_is_found_and_proven(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(json.dumps(tree("1/rank")))
    found = tune(str(recipe), multiple=64, out=tmp_path / "tuned.yaml", tell=print)
    last = {trial["size"]: trial["verdict"] for trial in found["trials"]}
    assert last[found["micro_batch"]] == "ok"
    assert last[found["micro_batch"] + 64] in ("out of memory", "allocator retries", "head-room")
    assert load_recipe(tmp_path / "tuned.yaml").data.batch == f"{found['micro_batch']}/rank"


def test_the_device_is_measured(tmp_path: Path) -> None:
    found = calibrate(tmp_path / "here.yaml", quick=True, tell=print)
    assert load_cluster(tmp_path / "here.yaml") == found
    assert 0.3 < max(share for _, share in found.device.gemm) < 1.05
