"""Keys and habits of the loop: saves by the clock, all kept, a schedule of its own length, garbage between steps."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import events, tiny_recipe

import vitrail
from vitrail.errors import UserError
from vitrail.recipe import load_recipe
from vitrail.training import evaluate, session, trainer
from vitrail.training.trainer import Trainer


def test_saves_by_the_clock_are_all_kept_and_garbage_waits_for_the_end_of_steps(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 10 s, a save after 30 s: at steps 4 and 8, and at the end."""
    done, collected = [0], [0]
    step = Trainer.step

    def watched(self: Any, batch: Any, **options: Any) -> Any:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        told = step(self, batch, **options)
        done[0] = self.done
        return told

    def collect() -> None:
        collected.append(done[0])

    clock = SimpleNamespace(monotonic=lambda: 10.0 * done[0], perf_counter=session.time.perf_counter)
    monkeypatch.setattr(Trainer, "step", watched)
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(trainer, "COLLECT_EVERY", 4)
    monkeypatch.setattr(trainer.gc, "collect", collect)
    changes = {"run__steps": 10, "checkpoint__every": "30s", "checkpoint__keep": "all", "eval__every": 10}
    tree = tiny_recipe(volume, tmp_path / "run", **changes, eval__samples=1, data__batch=2)
    tree["schedule"] = {"kind": "linear", "steps": 5, "warmup": "20%"}
    assert vitrail.train(tree, quiet=True).code == 0
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000008",
        "step-00000010",
    ]
    assert collected[1:] == [0, 4, 8]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0

    # The schedule ends at its own last step, and its warm-up is a share of it.
    rates = [event["lr"] for event in events(tmp_path / "run", "train")]
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0, 0, 0, 0, 0])
    assert all("slowest_step_seconds" in event for event in events(tmp_path / "run", "train")[5:])


def test_a_schedule_may_be_longer_than_the_run(volume: Path, tmp_path: Path) -> None:
    changes = {"run__steps": 2, "checkpoint__every": "off", "eval__every": 2, "eval__samples": 1, "data__batch": 2}
    tree = tiny_recipe(volume, tmp_path / "run", **changes)
    tree["schedule"] = {"kind": "linear", "steps": "8 samples"}
    vitrail.train(tree, quiet=True)
    assert [event["lr"] for event in events(tmp_path / "run", "train")] == pytest.approx([1e-3, 0.75e-3])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("30min", "1800s"),
        ("30m", "1800s"),
        ("00:30:00", "1800s"),
        ("1h", "3600s"),
        (200, 200),
        ("10%", "10%"),
        ("off", "off"),
    ],
)
def test_how_often_is_a_duration_or_a_clock(given: Any, kept: Any, volume: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny_recipe(volume, tmp_path, checkpoint__every=given))
    assert recipe.checkpoint.every == kept
    assert load_recipe(recipe.to_tree()).checkpoint.every == kept


def test_what_is_neither_is_refused(volume: Path, tmp_path: Path) -> None:
    for wrong in ("0m", "30 minutes", 0, "often"):
        with pytest.raises(UserError, match=r'checkpoint.every: .*expected off, a duration .* or a clock such as "02'):
            load_recipe(tiny_recipe(volume, tmp_path, checkpoint__every=wrong))
    with pytest.raises(UserError, match=r"checkpoint\.keep"):
        load_recipe(tiny_recipe(volume, tmp_path, checkpoint__keep="some"))


def test_the_log_tells_of_the_rank_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.tensor([5.0, 0.0, 9.0], dtype=torch.float64)
    reduce = SimpleNamespace(
        all_reduce=lambda table, op, group: table.copy_(torch.maximum(table, other[: len(table)])),
        ReduceOp=SimpleNamespace(MAX="max"),
    )
    monkeypatch.setattr(evaluate, "dist", reduce)
    read = {
        "memory_gib": 1.0,
        "reserved_gib": 4.0,
        "alloc_retries": 2,
        "slowest_step_seconds": 3.0,
        "step_seconds": 1.0,
    }
    assert evaluate.of_all_ranks(read, None) == read | {"reserved_gib": 5.0, "slowest_step_seconds": 9.0}
    assert evaluate.of_all_ranks({"memory_gib": 1.0}, None) == {"memory_gib": 1.0}
