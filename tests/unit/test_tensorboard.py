"""TensorBoard logs, where it is installed."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
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


def test_pictures_are_written_and_repeated_steps_count_once(volume: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tree = tiny_recipe(volume, run, run__steps=4, log__pictures=2, checkpoint__every=2, log__tensorboard=True)
    vitrail.train(tree, quiet=True)
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # as if it had not been written: steps 3 and 4 come again
    assert vitrail.train(run, overrides=["run.steps=6"], quiet=True).step == 6
    board = accumulators.EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    drawn = board.Images("pictures/reconstruct")
    assert [picture.step for picture in drawn] == [0, 2, 4, 6]
    places = (io.BytesIO(drawn[-1].encoded_image_string), run / "pictures" / "reconstruct-00000006.png")
    shown, kept = (np.asarray(Image.open(place).convert("RGB")) for place in places)
    assert np.array_equal(shown, kept)
