"""One rank of several fails: the others end soon, the job's output names the rank and the first cause, once."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT, end, environment, events, is_gone, losses, run, tiny_recipe, torchrun, write_recipe
from watching import (
    WATCHED,
    Phase,
    finish,
    last_line,
    launch,
    lines,
    ranks_of,
    steps_saved,
    stop_rank,
    wait_until,
)

from vitrail.training.run import train

RANKS = 4
PLUGIN = ("--plugin", "raising_objective")


def make_recipe(volume: Path, home: Path, name: str, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "run__steps": 12,
        "checkpoint": {"every": 4, "background": False},
        "eval__every": 10**6,
        "log": {"every": 1, "pictures": 10**6, "activations": "off", "tensorboard": False},
    }
    return write_recipe(home / f"{name}.yaml", tiny_recipe(volume, home / name, **options | changes))


def raising(volume: Path, home: Path, name: str, *, rank: int, step: int, ranks: int, **changes: Any) -> Path:
    """A recipe whose training raises on a rank in a step: each rank has its slice of the step's batch of 8."""
    bad = 8 * (step - 1) + 8 // ranks * rank
    return make_recipe(volume, home, name, objective={"kind": "raising", "bad": bad}, **changes)


def with_plugin() -> dict[str, str]:
    env = {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"}
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "system")
    env["VITRAIL_TRACEBACK"] = "1"  # else an error in a plugin is a sentence; what others look like is tried here
    return env


def said(output: str, words: str) -> list[str]:
    return [line for line in output.splitlines() if words in line]


def kill_one(process: subprocess.Popen[str], run_dir: Path, rank: int) -> int:
    """Kill a rank in the midst of training, and wait until all others have ended; its process."""
    Phase(process, run_dir).steps(6)
    ranks = ranks_of(process)
    assert len(ranks) == RANKS
    os.kill(ranks[rank], signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, ranks.values())), process)
    return ranks[rank]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_rank_is_named_and_torchrun_goes_on(volume: Path, tmp_path: Path, rank: int) -> None:
    changes = {"data__batch": 32, "run__steps": 32}
    process = launch(RANKS, make_recipe(volume, tmp_path, "run", **changes), *WATCHED, launcher=("--max-restarts=1",))
    try:
        number = kill_one(process, tmp_path / "run", rank)
        code, output = finish(process)
    finally:
        end(process)
    assert code == 0, output[-5000:]
    told = said(output, f"ended because rank {rank} (process {number} on ")
    assert len(told) == 1, output[-5000:]
    assert "died without a word: it was killed, ran out of memory or crashed" in told[0]
    assert "Connection closed" not in output
    starts = [line["step"] for line in lines(tmp_path / "run") if line["event"] == "start"]
    assert starts[0] == 0
    assert 4 <= starts[1] < 32
    assert starts[1] % 4 == len(starts[2:]) == 0
    assert steps_saved(tmp_path / "run")[0] == 32
    train(make_recipe(volume, tmp_path, "whole", **changes), quiet=True)  # on one rank, so sums round differently
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-5)


def test_a_rank_that_raises_is_named_once(volume: Path, tmp_path: Path) -> None:
    # A neighbour of rank 0, which then sees it at once: torchrun gives all others half a minute, on a busy machine too.
    recipe = raising(volume, tmp_path, "run", rank=1, step=6, ranks=RANKS)
    process = launch(RANKS, recipe, *PLUGIN, *WATCHED, env=with_plugin())
    try:
        code, output = finish(process)
    finally:
        end(process)
    assert code == 1
    why = "rank 1 failed in training of step 5: ArithmeticError: sample 42 cannot be"
    told = said(output, "error: rank ")
    assert len(told) == 1, output[-5000:]
    assert told[0].endswith(f" ended because {why}")
    assert len(said(output, "raise ArithmeticError")) == 1  # one traceback, and a note under it that names the rank
    assert f"[rank1]: {why}" in output.splitlines()  # PyTorch's way with tracebacks
    assert why in output.partition("Root Cause (first observed failure)")[2]  # of torchrun's report, the very end
    assert "To enable traceback see" not in output
    assert "Connection closed" not in output
    stop = last_line(tmp_path / "run", "end")
    assert stop["reason"] == "failed"
    assert stop["message"].endswith(why)
    assert steps_saved(tmp_path / "run") == [4]


def test_a_hang_leaves_the_latest_collectives(volume: Path, tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path, "run", run__steps=10**6, schedule__warmup=10)
    process = launch(2, recipe, *WATCHED)
    try:
        Phase(process, tmp_path / "run").steps(3)
        stop_rank(process, tmp_path / "run", 1)
        code, output = finish(process)
    finally:
        end(process)
    assert code != 0
    folder = tmp_path / "run" / "flight-recorder"
    told = said(output, "rank 1 has fallen silent")
    assert told, output[-3000:]
    assert f"(its latest collectives are in {folder})" in told[0]
    assert b"gloo:all_reduce" in (folder / "gloo_rank_0").read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_picture_that_one_rank_cannot_make_ends_no_run(volume: Path, tmp_path: Path, rank: int) -> None:
    options: dict[str, Any] = {"run__steps": 4, "checkpoint": {"every": "off"}, "log__pictures": 2}
    recipe = make_recipe(volume, tmp_path, "run", objective={"kind": "raising", "picture": rank}, **options)
    code, output = run(*torchrun(2, "-m", "vitrail", "train", recipe, *PLUGIN), env=with_plugin())
    assert code == 0, output[-4000:]
    assert output.count("the picture of step 0 could not be drawn, nor others so: ArithmeticError") == 1
    assert [event["step"] for event in events(tmp_path / "run", "warning")] == [0]
    assert len(losses(tmp_path / "run")) == 4
