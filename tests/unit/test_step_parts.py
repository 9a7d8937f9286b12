"""Parts of a training step, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitrail.data.batch import Batch
from vitrail.training.trainer import Trainer


@pytest.mark.parametrize(
    ("micro", "expected"),
    [
        (3, [[0, 1, 2], [3, 4, 5], [6]]),
        (7, [[0, 1, 2, 3, 4, 5, 6]]),
        (None, [[0, 1, 2, 3, 4, 5, 6]]),
        (6, [[0, 1, 2, 3, 4, 5], [6]]),
    ],
)
def test_every_sample_of_a_batch_is_in_one_micro_batch(micro: int | None, expected: list[list[int]]) -> None:
    batch = Batch(list(range(7)), torch.arange(7.0).view(7, 1, 1, 1))
    trainer: Any = SimpleNamespace(recipe=SimpleNamespace(data=SimpleNamespace(micro_batch=micro)), done=0, _ahead=None)
    trainer._seed = lambda *_: None
    trainer.prepare = lambda part: ({}, part)
    for name in ("_micro_batches", "_prepare_first"):
        setattr(trainer, name, getattr(Trainer, name).__get__(trainer))
    found = [part for _, part in Trainer._prepared(trainer, batch)]
    assert [part.counters for part in found] == expected
    assert [part.values.flatten().tolist() for part in found] == expected
