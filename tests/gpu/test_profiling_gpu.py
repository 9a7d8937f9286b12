"""Profiles on a GPU: its kernels, passes that are replayed, and its memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import losses, tiny_recipe, write_volume

from vitrail.training.run import train
from vitrail.training.trainer import Trainer

pytestmark = pytest.mark.gpu


def trained(home: Path, name: str, **changes: Any) -> Path:
    volume = home / "em.zarr"
    if not volume.exists():
        write_volume(volume)
    usual = {"run__steps": 14, "run__device": "cuda", "checkpoint__every": 100, "eval__every": 100}
    train(tiny_recipe(volume, home / name, **usual | changes), quiet=True)
    return home / name


@pytest.mark.parametrize("replay", [True, False])
def test_a_profile_has_kernels_and_parts_that_add_up(tmp_path: Path, replay: bool) -> None:
    asked = {"steps": [10, 12], "memory": True}
    looked = trained(tmp_path, "with", log__profile=asked, parallel__replay=replay)
    usual = trained(tmp_path, "without", parallel__replay=replay)
    np.testing.assert_array_equal(losses(looked), losses(usual))
    (rank,) = json.loads((looked / "profile/steps-10-12.json").read_text())["ranks"]
    parts = {part: seconds for part, seconds in rank["parts"].items() if seconds is not None}
    assert sum(parts.values()) == pytest.approx(rank["step_seconds"])
    assert ("passes" in parts) == replay
    assert 0 <= rank["idle"] < rank["step_seconds"]
    products = ("gemm", "gemv", "cutlass", "nvjet", "matmul")  # what libraries call kernels of matrix products
    assert any(word in row["name"].lower() for row in rank["operations"] for word in products)
    assert (looked / rank["memory"]).stat().st_size > 1000


def test_memory_that_runs_out_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_for_too_much(trainer: Trainer, *_: Any, **__: Any) -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(Trainer, "step", ask_for_too_much)
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, "full", log__profile={"memory": True})
    (snapshot,) = (tmp_path / "full/profile").glob("out-of-memory-step-1-*.memory.pickle")
    assert snapshot.stat().st_size > 1000
