"""TensorBoard logs, where it is installed."""

from pathlib import Path

import pytest
from support import tiny_recipe

import vitrail

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is an extra"
)


def test_scalars_are_written(volume: Path, tmp_path: Path) -> None:
    vitrail.train(tiny_recipe(volume, tmp_path / "run", run__steps=6, eval__every=3, log__tensorboard=True))
    board = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    tags = board.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_s", "eval/mse_over_variance"} <= set(tags)
    assert [point.step for point in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
