"""A step prepares the batch of the next one, if that is here, and nothing comes out differently."""

import json
import queue
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LONG, MODELS

import vitrail
from vitrail.data.reading.loader import Loader
from vitrail.errors import BadData, RunFailed
from vitrail.objectives.classify import Classify
from vitrail.recipe.load import find_recipe
from vitrail.training.diagnose import opened_as_is
from vitrail.training.session import Session
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
    assert list(Timed(iter([1, 2]))) == [(1, pytest.approx(0, abs=600)), (2, pytest.approx(0, abs=600))]


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


def test_an_error_in_preparing_ends_its_own_step_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepare = Trainer.prepare

    def failing(self: Trainer, micro: Any) -> Any:
        if 32 in micro.counters:
            raise ValueError("no such label")
        return prepare(self, micro)

    monkeypatch.setattr(Trainer, "prepare", failing)
    monkeypatch.setattr(Loader, "has_next", lambda self: True)
    with pytest.raises(ValueError, match="no such label"):
        vitrail.train(recipe(), overrides=[f"run.dir={tmp_path / 'run'}", "checkpoint.every=4"])
    events = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == [1, 2, 3, 4]
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_nothing_is_read_any_more_when_a_run_ends(end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alive: list[str] = []
    whole = getattr(Session, end)

    def looking(self: Session, *arguments: Any, **options: Any) -> Any:
        alive.extend(thread.name for thread in threading.enumerate() if thread.name.startswith("vitrail-feeder"))
        assert self.trainer._ahead is None
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Session, end, looking)
    monkeypatch.setattr("vitrail.data.reading.loader.PATIENCE", LONG)  # else a busy machine goes on without it
    if end == "fail":
        monkeypatch.setattr(Session, "tell", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(Session, "stop_wish", lambda self: "time limit" if self.trainer.done == 2 else None)
    with suppress(ZeroDivisionError):
        vitrail.train(recipe(workers=2), overrides=[f"run.dir={tmp_path}"])
    assert not alive


def test_a_loader_that_is_done_holds_no_batches() -> None:
    with opened_as_is(find_recipe(recipe(workers=1))) as (parts, _):
        loader = parts.loader()
        batches = loader.batches(0, 50)
        next(batches)
        while not loader.has_next():
            time.sleep(0.01)
        batches.close()
        assert not loader.has_next()
        assert loader._waiting is None


def test_micro_batches_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory for the inputs of one is what the planner counts."""
    prepare, alive, most = Trainer.prepare, weakref.WeakSet(), []

    def counted(self: Trainer, micro: Any) -> Any:
        inputs, targets = prepare(self, micro)
        most.append(len(alive))
        alive.update(value for value in inputs.values() if isinstance(value, torch.Tensor))
        return inputs, targets

    monkeypatch.setattr(Trainer, "prepare", counted)
    monkeypatch.setattr(Loader, "has_next", lambda self: False)
    vitrail.train(
        recipe(micro_batch=2, workers=0), overrides=[f"run.dir={tmp_path}", "run.steps=1", "log.activations=off"]
    )
    assert len(most) == 4
    assert max(most) == most[1] > 0  # the loop of passes has the one before


def test_without_memory_to_be_early_batches_are_prepared_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_first, tried = Trainer._prepare_first, []

    def full(self: Trainer, batch: Any, number: int) -> Any:
        tried.append(number - self.done)
        if number > self.done:
            raise torch.OutOfMemoryError("no room")
        return prepare_first(self, batch, number)

    monkeypatch.setattr(Trainer, "_prepare_first", full)
    monkeypatch.setattr(Loader, "has_next", lambda self: True)
    assert len(lines_of(recipe(), tmp_path)) == 8
    assert tried == [0, 1, 0, 0, 0, 0, 0]
