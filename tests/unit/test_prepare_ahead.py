"""A step prepares the batch of the next one, if that is here, and nothing comes out differently."""

import json
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MODELS

import vitrail
from vitrail.data.bad import BadData
from vitrail.data.loader import Loader
from vitrail.errors import RunFailed
from vitrail.objectives.classify import Classify
from vitrail.training.trainer import Timed, Trainer


def recipe(**data: Any) -> dict[str, Any]:
    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 3, "classes": 4, "items": 64}
    return {
        "run": {"name": "ahead", "steps": 6},
        "model": MODELS["vit"][0],
        "objective": {"kind": "classify"},
        "data": {"train": [source], "valid": [source], "crop": 16, "batch": 8} | data,
        "ema": {"decay": 0.9},
        "eval": {"every": 3, "samples": 16},
        "log": {"every": 1, "activations": 4, "tensorboard": False, "pictures": 6},
        "checkpoint": {"every": 3},
    }


def lines_of(tree: dict[str, Any], folder: Path) -> list[Any]:
    vitrail.train(tree, overrides=[f"run.dir={folder}"])
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(e["step"], e.get("loss"), e.get("metrics")) for e in events if e["event"] in ("train", "eval")]


@pytest.mark.parametrize("micro", [None, 4])
def test_a_training_is_the_same_whenever_batches_come(
    micro: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even where an objective and a model draw numbers of PyTorch's own."""
    prepare, found, ahead = Classify.prepare, [], []

    def noisy(self: Any, *arguments: Any, **options: Any) -> Any:
        inputs, targets = prepare(self, *arguments, **options)
        name, values = next((n, v) for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
        return inputs | {name: values + 0.1 * torch.rand_like(values)}, targets

    prepare_ahead = Trainer._prepare_ahead

    def counted(self: Trainer) -> None:
        prepare_ahead(self)
        ahead.append(self._ahead is not None)

    monkeypatch.setattr(Classify, "prepare", noisy)
    monkeypatch.setattr(Trainer, "_prepare_ahead", counted)
    for always in (False, True):
        # `is_here` says yes in any case: then the next batch is waited for.
        monkeypatch.setattr(Loader, "has_next", lambda self, always=always: always)
        found.append(lines_of(recipe(micro_batch=micro), tmp_path / str(always)))
    assert found[0] == found[1]
    assert ahead == [False] * 6 + [True] * 5 + [False]


def test_a_batch_that_is_not_here_is_not_waited_for() -> None:
    batches: queue.Queue[Any] = queue.Queue()
    timed = Timed(iter(batches.get_nowait, None), lambda: not batches.empty())
    assert timed.coming() is None
    batches.put([])  # a rank may have none of a batch's samples
    batches.put("second")
    assert timed.coming() == []
    assert timed.coming() == []
    assert next(timed)[0] == []
    assert next(timed)[0] == "second"
    batches.put(None)
    assert timed.coming() is None
    assert list(Timed(iter([1, 2]))) == [(1, pytest.approx(0, abs=1)), (2, pytest.approx(0, abs=1))]


def test_a_bad_batch_ends_its_own_step_and_not_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish = Loader._finish

    def failing(self: Loader, pending: Any) -> Any:
        if 32 in pending.counters:  # the fifth batch
            raise BadData("a file is cut short")
        return finish(self, pending)

    monkeypatch.setattr(Loader, "_finish", failing)
    with pytest.raises(RunFailed, match="cut short"):
        vitrail.train(recipe(prefetch=4), overrides=[f"run.dir={tmp_path / 'run'}", "checkpoint.every=1"])
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == [1, 2, 3, 4]
