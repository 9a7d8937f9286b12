"""What a run survives: kills, signals, ranks that die or stop, losses that are not finite, full disks, second jobs.

Kills and signals are sent to the command line as users start it. A run that was interrupted is compared with one that
was not, bit for bit: all parameters, averages and moments of the last checkpoint.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT, end, environment, events, losses, start, tiny_recipe, vitrail, write_recipe
from watching import (
    WATCHED,
    Phase,
    assert_same,
    call,
    finish,
    kill,
    last_line,
    launch,
    lines,
    ranks_of,
    saved,
    steps_saved,
    stop_rank,
    wait_until,
)

from vitrail.errors import RunFailed, UserError
from vitrail.training.run import train
from vitrail.training.runfolder import RunFolder
from vitrail.training.session import Session
from vitrail.weights.runs import read_manifest

STEPS, MANY = 60, 160
EVERY = 5
REQUEUE = 75


def make_recipe(volume: Path, path: Path, run_dir: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "run__steps": STEPS,
        "checkpoint__every": EVERY,
        "eval": {"every": 2 * EVERY, "samples": 32},
        "ema": {"decay": 0.9},
        "log__pictures": 10**6,
    }
    return write_recipe(path, tiny_recipe(volume, run_dir, **options | changes))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def whole(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs that nobody interrupts, by ranks and steps; made when first asked for."""
    home = tmp_path_factory.mktemp("whole")

    @cache
    def find(ranks: int, steps: int = STEPS) -> Path:
        run_dir = home / f"run-{ranks}-{steps}"
        run_to_end(ranks, make_recipe(volume, run_dir.with_suffix(".yaml"), run_dir, run__steps=steps))
        return run_dir

    return find


def run_to_end(ranks: int, recipe: Path) -> None:
    """Train without a fault; one rank alone needs no process of its own."""
    if ranks == 1:
        assert train(recipe, quiet=True).code == 0
        return
    code, output = finish(launch(ranks, recipe))
    assert code == 0, output[-3000:]


def wait_for(phase: str, process: subprocess.Popen[str], run_dir: Path, draw: random.Random) -> None:
    moment = Phase(process, run_dir)
    if phase == "start":
        moment.start_up(draw.uniform(0, 5))
    elif phase == "set-up":
        moment.set_up()
    elif phase == "training":
        moment.steps(draw.randrange(1, 10))
    elif phase == "validation":
        moment.validating(2 * EVERY)
    else:
        moment.writing()
        time.sleep(draw.uniform(0, 0.15))


# ---------------------------------------------------------------- kills


def check_kills(volume: Path, whole: Path, home: Path, steps: int, phases: list[str], seed: int) -> int:
    """Kill one run again and again; returns how often the writing of a checkpoint was cut."""
    run_dir, draw = home / "run", random.Random(seed)
    recipe = make_recipe(volume, home / "recipe.yaml", run_dir, run__steps=steps)
    cut = 0
    for number, phase in enumerate(phases):
        process = launch(1, recipe, f"checkpoint.background={'true' if number % 4 else 'false'}")
        try:
            wait_for(phase, process, run_dir, draw)
            kill(process)
        finally:
            end(process)
        folder = run_dir / "checkpoints"
        cut += folder.exists() and any(name.startswith(".partial-") for name in os.listdir(folder))
    run_to_end(1, recipe)
    assert_same(run_dir, whole)
    np.testing.assert_array_equal(losses(run_dir), losses(whole))
    assert not any(name.startswith(".") for name in os.listdir(run_dir / "checkpoints"))
    return cut


def test_killed_three_times(volume: Path, whole: Callable[..., Path], tmp_path: Path) -> None:
    check_kills(volume, whole(1), tmp_path, STEPS, ["training", "writing", "start"], seed=1)


@pytest.mark.slow
def test_killed_twenty_times(volume: Path, whole: Callable[..., Path], tmp_path: Path) -> None:
    phases = ["training", "writing", "start", "validation"] * 4 + ["writing"] * 4
    random.Random(0).shuffle(phases)
    assert len(phases) == 20
    cut = check_kills(volume, whole(1, MANY), tmp_path, MANY, phases, seed=2)
    assert cut >= 2, "hardly any kill fell into the writing of a checkpoint"


# ---------------------------------------------------------------- other numbers of ranks


def test_one_run_on_one_two_four_and_one_ranks(volume: Path, tmp_path: Path) -> None:
    """The same samples in the same order, and the same loss up to rounding."""
    changes = {"schedule": {"kind": "constant", "warmup": 2}}  # so that the length does not matter
    run_to_end(1, make_recipe(volume, tmp_path / "whole.yaml", tmp_path / "whole", run__steps=24, **changes))
    for ranks, steps in ((1, 6), (2, 12), (4, 18), (1, 24)):
        recipe = make_recipe(volume, tmp_path / "recipe.yaml", tmp_path / "run", run__steps=steps, **changes)
        run_to_end(ranks, recipe)
        start_line = last_line(tmp_path / "run", "start")
        assert (start_line["world"], start_line["step"]) == (ranks, max(0, steps - 6))
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(found) == len(expected) == 24
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    one, other = saved(tmp_path / "run"), saved(tmp_path / "whole")
    assert one.keys() == other.keys()
    counts = [[e["samples"] for e in events(tmp_path / name, "train")] for name in ("run", "whole")]
    assert counts[0] == counts[1] == list(range(8, 25 * 8, 8))


# ---------------------------------------------------------------- a rank that dies


def check_restarts(volume: Path, whole: Path, home: Path, phases: list[str], seed: int) -> None:
    """One of two ranks is killed again and again, and torchrun starts the job anew each time."""
    home.mkdir(exist_ok=True)
    run_dir, draw = home / "run", random.Random(seed)
    recipe = make_recipe(volume, home / "recipe.yaml", run_dir, run__steps=MANY)
    process = launch(2, recipe, launcher=("--max-restarts=3",))
    dead: set[int] = set()

    def fresh_ranks() -> dict[int, int] | None:
        ranks = ranks_of(process)
        return ranks if len(ranks) == 2 and not dead & set(ranks.values()) else None

    try:
        for phase in phases:
            ranks = wait_until(fresh_ranks, process)
            wait_for(phase, process, run_dir, draw)
            dead |= set(ranks.values())
            os.kill(ranks[draw.randrange(2)], signal.SIGKILL)
        code, output = finish(process)
    finally:
        end(process)
    assert code == 0, output[-5000:]
    assert_same(run_dir, whole)


@pytest.mark.slow
def test_dead_ranks_are_replaced_twenty_times(volume: Path, whole: Callable[..., Path], tmp_path: Path) -> None:
    draw = random.Random(3)
    jobs = [
        [draw.choice(["start", "training", "training", "writing"]) for _ in range(number)] for number in [3] * 6 + [2]
    ]
    assert sum(map(len, jobs)) == 20
    reference = whole(2, MANY)
    with ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(check_restarts, volume, reference, tmp_path / f"job-{number}", phases, number)
            for number, phases in enumerate(jobs)
        ]
        for task in tasks:
            task.result()


# ---------------------------------------------------------------- signals


def check_signals(
    volume: Path, whole: Path, home: Path, ranks: int, stops: list[tuple[str, signal.Signals, int]]
) -> None:
    """Stop one run again and again with a signal to one of its ranks, and continue it to the end.

    It is long, since steps go on while the moment of a signal is looked for.
    """
    run_dir, draw = home / "run", random.Random(0)
    recipe = make_recipe(volume, home / "recipe.yaml", run_dir, run__steps=MANY)
    step = 0
    for phase, number, rank in stops:
        process = launch(ranks, recipe)
        try:
            wait_for(phase, process, run_dir, draw)
            os.kill(process.pid if ranks == 1 else ranks_of(process)[rank], number)
            code, output = finish(process)
        finally:
            end(process)
        if ranks == 1:
            assert code == REQUEUE, output[-3000:]
            assert f"continue with: vitrail train {run_dir}" in output
        else:  # torchrun says in its own way that its workers did not end with 0
            assert code != 0
            assert f"exitcode  : {REQUEUE}" in output, output[-3000:]
        stop = last_line(run_dir, "end")
        assert stop["reason"] == "signal"
        assert stop["step"] == steps_saved(run_dir)[0]
        assert step < stop["step"] < MANY
        step = stop["step"]
    run_to_end(ranks, run_dir)
    assert [line["step"] for line in lines(run_dir) if line["event"] == "train"] == list(range(1, MANY + 1))
    assert_same(run_dir, whole)


def test_signals_to_one_process(volume: Path, whole: Callable[..., Path], tmp_path: Path) -> None:
    stops = [("set-up", signal.SIGTERM, 0), ("validation", signal.SIGINT, 0), ("writing", signal.SIGUSR1, 0)]
    stops.append(("training", signal.SIGHUP, 0))
    check_signals(volume, whole(1, MANY), tmp_path, 1, stops)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first"), [(1, 0), (1, 1), (2, 0)])
def test_all_signals_in_all_phases(
    volume: Path, whole: Callable[..., Path], tmp_path: Path, ranks: int, first: int
) -> None:
    """To one process all in all; to one of two ranks half of them, each signal in two phases and two in each."""
    stops = [
        (phase, number, turn // 2 if ranks > 1 else 0)
        for place, phase in enumerate(("set-up", "training", "validation", "writing"))
        for turn, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))
        if (place + turn) % 2 == first
    ]
    check_signals(volume, whole(ranks, MANY), tmp_path, ranks, stops)


def test_a_second_interrupt_ends_at_once(volume: Path, tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path / "recipe.yaml", tmp_path / "run", run__steps=10**6, data__batch=1024)
    process = launch(1, recipe)
    try:
        Phase(process, tmp_path / "run").steps(1)
        while process.poll() is None:  # two that arrive during one operation count as one
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.03)
        code, output = finish(process)
    finally:
        end(process)
    assert code in (130, -signal.SIGINT), output[-3000:]  # the latter if a third one comes at the very end
    assert [line for line in lines(tmp_path / "run") if line["event"] == "end" and line["reason"] == "signal"] == []


# ---------------------------------------------------------------- a rank that stops


def check_stopped(volume: Path, home: Path, phase: str, rank: int) -> None:
    recipe = make_recipe(volume, home / "recipe.yaml", home / "run", run__steps=10**6, schedule__warmup=10)
    process = launch(2, recipe, *WATCHED)
    try:
        wait_for(phase, process, home / "run", random.Random(0))
        stop_rank(process, home / "run", rank)
        code, output = finish(process)
    finally:
        for number in ranks_of(process).values():
            os.kill(number, signal.SIGKILL)
        end(process)
    assert code != 0
    assert f"error: rank {1 - rank} " in output
    assert f"rank {rank} has fallen silent" in output, output[-3000:]


def test_a_stopped_rank_is_named(volume: Path, tmp_path: Path) -> None:
    check_stopped(volume, tmp_path, "training", 1)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["validation", "writing"])
def test_a_stopped_first_rank_is_named(volume: Path, tmp_path: Path, phase: str) -> None:
    check_stopped(volume, tmp_path, phase, 0)


# ---------------------------------------------------------------- losses that are not finite


@pytest.fixture(scope="module")
def broken() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "distributed"))
    import broken_objective  # noqa: F401 - registers the kind


def broken_recipe(volume: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    options = {"run__stop_after_skips": 3, "ema": {"decay": 0.9}, "log__pictures": 10**6}
    options |= {"checkpoint": {"every": 2, "keep": 20}, "eval__every": 10**6}
    return tiny_recipe(volume, run_dir, **options | changes)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_bad_step_is_skipped_and_noted(volume: Path, tmp_path: Path, what: str) -> None:
    objective = {"kind": "broken", "bad": [17, 26], "what": what}  # in steps 3 and 4
    outcome = train(broken_recipe(volume, tmp_path / "run", objective=objective), quiet=True)
    assert (outcome.code, outcome.step) == (0, 20)
    skips = events(tmp_path / "run", "skip")
    assert [(e["step"], e["counters"]) for e in skips] == [(3, list(range(16, 24))), (4, list(range(24, 32)))]
    assert all(what in e["reason"] for e in skips)
    assert [e["skipped"] for e in events(tmp_path / "run", "train")] == [0, 0, 1, *[2] * 17]
    # A save that falls due in a skipped step waits for the next that is not.
    assert steps_saved(tmp_path / "run") == [20, 18, 16, 14, 12, 10, 8, 6, 5, 2]
    for step, counts in ((5, (2, 0, 3, 40)), (20, (2, 0, 18, 160))):
        manifest = read_manifest(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        names = ("skipped", "skipped_in_a_row", "optimizer_steps", "samples")
        assert tuple(manifest[name] for name in names) == counts
    before, after = (saved(tmp_path / "run", step) for step in (2, 20))
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


@pytest.mark.usefixtures("broken")
def test_many_bad_steps_in_a_row_end_the_run(volume: Path, tmp_path: Path) -> None:
    tree = broken_recipe(volume, tmp_path / "run", objective={"kind": "broken", "bad": list(range(40, 100))})
    with pytest.raises(RunFailed, match=r"not finite in 3 steps in a row, up to step 8; .* optimizer\.lr"):
        train(tree, quiet=True)
    stop = last_line(tmp_path / "run", "end")
    assert (stop["reason"], stop["step"]) == ("failed", 8)
    assert "3 steps in a row" in stop["message"]
    assert [e["step"] for e in events(tmp_path / "run", "skip")] == [6, 7, 8]
    assert steps_saved(tmp_path / "run") == [4, 2]
    assert all(torch.isfinite(tensor).all() for tensor in saved(tmp_path / "run").values())


@pytest.mark.usefixtures("broken")
def test_a_run_that_diverges_keeps_its_good_checkpoints(volume: Path, tmp_path: Path, capfd) -> None:
    """From step 9 on all steps are skipped: nothing is saved or removed, and the run has failed."""
    objective = {"kind": "broken", "bad": list(range(64, 400))}
    changes = {"checkpoint": {"every": 2, "keep": 1}, "eval": {"every": 2, "samples": 8}}
    tree = broken_recipe(volume, tmp_path / "run", objective=objective, run__stop_after_skips=100, **changes)
    for _ in range(2):  # continued, it is not done either
        assert call("train", write_recipe(tmp_path / "recipe.yaml", tree)) == 1
        told = capfd.readouterr().err
        assert "error: the last 12 steps were skipped, up to the end at step 20" in told
        assert "run.steps=21" in told
        assert last_line(tmp_path / "run", "end")["reason"] == "failed"
        assert steps_saved(tmp_path / "run")[0] == 8
        assert all(torch.isfinite(tensor).all() for tensor in saved(tmp_path / "run").values())
    assert len(steps_saved(tmp_path / "run")) > 1  # nothing has shown yet that the newest is good


@pytest.mark.usefixtures("broken")
def test_a_stop_waits_for_a_step_that_is_not_skipped(volume: Path, tmp_path: Path, monkeypatch) -> None:
    stop_wish = Session.stop_wish
    monkeypatch.setattr(Session, "stop_wish", lambda self: "signal" if self.trainer.done >= 4 else stop_wish(self))
    objective = {"kind": "broken", "bad": [33, 42]}  # in steps 5 and 6
    outcome = train(broken_recipe(volume, tmp_path / "run", objective=objective), quiet=True)
    assert (outcome.code, outcome.reason, outcome.step) == (REQUEUE, "signal", 7)
    assert steps_saved(tmp_path / "run") == [7, 4, 2]


@pytest.mark.parametrize("rate", [1e30, 1e42])
def test_a_rate_that_is_far_too_high_ends_with_one(volume: Path, tmp_path: Path, capfd, rate: float) -> None:
    """The larger one makes weights infinite in a step whose loss is finite: such a state is never saved."""
    tree = broken_recipe(volume, tmp_path / "run", optimizer={"kind": "adamw", "lr": rate, "clip": None})
    tree["checkpoint"]["every"] = 1
    assert call("train", write_recipe(tmp_path / "recipe.yaml", tree)) == 1
    assert "error: loss or gradient was not finite in 3 steps in a row" in capfd.readouterr().err
    for step in steps_saved(tmp_path / "run"):
        assert all(torch.isfinite(tensor).all() for tensor in saved(tmp_path / "run", step).values())


def test_two_ranks_skip_alike(volume: Path, tmp_path: Path) -> None:
    """A bad sample is on one rank: both skip, and go on; after too many in a row both end."""
    objective = {"kind": "broken", "bad": [12, 40, 55, 63]}  # in steps 2, 6, 7, 8; only one of them on rank 0
    recipe = write_recipe(tmp_path / "recipe.yaml", broken_recipe(volume, tmp_path / "run", objective=objective))
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "distributed")
    code, output = finish(launch(2, recipe, "--plugin", "broken_objective", env=env))
    assert code == 1
    told = [line for line in output.splitlines() if line.startswith("error: rank ")]
    assert len(told) == 1, output[-3000:]
    assert ": loss or gradient was not finite in 3 steps in a row" in told[0]
    skips = events(tmp_path / "run", "skip")
    assert {e["step"]: e["counters"] for e in skips if e["step"] < 8} == {
        step: list(range(8 * step - 8, 8 * step)) for step in (2, 6, 7)
    }
    assert {e["step"]: e["skipped"] for e in events(tmp_path / "run", "train")} == {
        1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 3,
    }  # fmt: skip
    assert last_line(tmp_path / "run", "end")["step"] == 8
    assert steps_saved(tmp_path / "run") == [4, 3]
    assert all(torch.isfinite(tensor).all() for tensor in saved(tmp_path / "run").values())


# ---------------------------------------------------------------- the run folder


def small(volume: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    options = {"log__pictures": 10**6, "log__activations": "off", "ema": {"decay": 0.9}}
    return tiny_recipe(volume, run_dir, **options | changes)


def test_a_second_job_is_refused(volume: Path, tmp_path: Path, capfd) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", small(volume, tmp_path / "run"))
    first = RunFolder(tmp_path / "run")
    assert call("train", recipe) == 2
    assert f"in use by process {os.getpid()}" in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path / "run")) == [".lock"]
    first.close()
    assert call("train", recipe) == 0


def test_a_second_job_is_refused_while_the_first_runs(volume: Path, tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path / "recipe.yaml", tmp_path / "run", run__steps=10**6, schedule__warmup=10)
    process = launch(1, recipe)
    try:
        Phase(process, tmp_path / "run").steps(1)
        with pytest.raises(UserError, match=f"in use by process {process.pid} on"):
            train(recipe, quiet=True)
        kill(process)
    finally:
        end(process)
    assert train(recipe, overrides=["run.time_limit=1s"], quiet=True).code == REQUEUE  # a kill gives the lock back


def test_the_time_limit_stops_with_a_checkpoint_and_the_run_goes_on(volume: Path, tmp_path: Path) -> None:
    tree = small(volume, tmp_path / "run", run__steps=10**6, run__time_limit="2s", checkpoint__every=10**6)
    for _ in range(2):
        outcome = train(tree, quiet=True)
        assert (outcome.code, outcome.reason) == (REQUEUE, "time limit")
        assert steps_saved(tmp_path / "run")[0] == outcome.step > 0
        assert last_line(tmp_path / "run", "end")["reason"] == "time limit"
    total = outcome.step + 3
    outcome = train(tmp_path / "run", overrides=[f"run.steps={total}", "run.time_limit=null"], quiet=True)
    assert (outcome.code, outcome.step) == (0, total)
    starts = [line["step"] for line in lines(tmp_path / "run") if line["event"] == "start"]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert call("train", tmp_path / "run") == 0  # nothing is left to do


def test_a_changed_recipe_is_refused_and_shown(volume: Path, tmp_path: Path, capfd) -> None:
    train(small(volume, tmp_path / "run"), quiet=True)
    changed = small(volume, tmp_path / "run", optimizer__lr=5e-4, data__batch=4, run__seed=4)
    assert call("train", write_recipe(tmp_path / "changed.yaml", changed)) == 2
    told = capfd.readouterr().err
    for words in ("optimizer.lr: 0.001 became 0.0005", "data.batch: 8 became 4", "run.seed: 3 became 4", "--fresh"):
        assert words in told
    safe = small(volume, tmp_path / "run", run__steps=22, checkpoint__keep=5, log__every=5, data__micro_batch=4)
    assert train(safe, quiet=True).step == 22
    fresh = train(changed, fresh=True, quiet=True)
    assert (fresh.run_dir, fresh.step) == (tmp_path / "run-2", 20)
    assert last_line(tmp_path / "run-2", "start")["step"] == 0
    assert steps_saved(tmp_path / "run")[0] == 22


def test_the_last_and_the_best_are_kept(volume: Path, tmp_path: Path) -> None:
    tree = small(volume, tmp_path / "run", checkpoint={"every": 2, "keep": 2}, eval={"every": 4, "samples": 8})
    train(tree, quiet=True)
    scores = {e["step"]: e["metrics"]["mse_over_variance"] for e in events(tmp_path / "run", "eval")}
    best = min(scores, key=lambda step: (scores[step], step))
    assert set(steps_saved(tmp_path / "run")) == {20, 18, best}
    # A metric by name, and the best of before the stop counts after it.
    other = small(volume, tmp_path / "other", checkpoint={"every": 2, "keep": 1, "best": "loss"}, eval__every=4)
    train(other, quiet=True)
    scores = {e["step"]: e["metrics"]["loss"] for e in events(tmp_path / "other", "eval")}
    train(tmp_path / "other", overrides=["run.steps=26"], quiet=True)
    scores |= {e["step"]: e["metrics"]["loss"] for e in events(tmp_path / "other", "eval")}
    best = min(scores, key=lambda step: (scores[step], step))
    assert set(steps_saved(tmp_path / "other")) == {26, best}


# ---------------------------------------------------------------- disks


def test_too_little_room_is_told_before_the_start(volume: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert call("train", write_recipe(tmp_path / "recipe.yaml", small(volume, tmp_path / "run"))) == 2
    assert "0.00 MiB free, but a checkpoint needs about" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_save_that_fails_leaves_the_others_and_training_goes_on(volume: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: tensors do not fit, the log does."""
    schedule = {"kind": "constant", "warmup": 0}
    changes = {"schedule": schedule, "checkpoint": {"every": 5, "keep": 2}, "eval__every": 10**6}
    train(small(volume, tmp_path / "whole", run__steps=20, **changes), quiet=True)
    train(small(volume, tmp_path / "run", run__steps=10, **changes), quiet=True)
    limit = 200_000
    code, output = vitrail(
        "train",
        tmp_path / "run",
        "run.steps=20",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert code == 1, output
    assert "the checkpoint of step 15 could not be written" in output
    assert "File too large" in output
    assert "training goes on" in output
    assert "error: the last checkpoint (step 20) could not be written" in output
    assert "Traceback" not in output
    assert steps_saved(tmp_path / "run") == [10, 5]
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial-*"))
    assert last_line(tmp_path / "run", "end")["reason"] == "failed"
    assert last_line(tmp_path / "run", "train")["step"] == 20
    train(tmp_path / "run", overrides=["run.steps=20"], quiet=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_ends_with_a_sentence(volume: Path, tmp_path: Path) -> None:
    """A disk of 16 megabytes, all but one of them taken: everything that is written may fail, the log too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    make_disk = f"mount -t tmpfs -o size=16m tmpfs {disk}"
    if shutil.which("unshare") is None or subprocess.run([*mount, make_disk], capture_output=True).returncode:
        pytest.skip("this system does not let users mount a small disk")
    tree = small(volume, disk / "run", run__steps=40, checkpoint={"every": 10, "keep": 1}, log__pictures=1)
    recipe = write_recipe(tmp_path / "recipe.yaml", tree)
    train_it = f"{sys.executable} -m vitrail train {recipe}"
    script = f"{make_disk} && head -c 15000000 /dev/zero > {disk}/other && {train_it}; echo code $?; "
    script += f"ls {disk}/run/checkpoints; rm {disk}/other; {train_it}; echo code $?; ls {disk}/run/checkpoints"
    code, output = finish(start(*mount, script))
    assert code == 0, output
    first, _, second = output.partition("code 1\n")
    assert second, output
    assert "No space left on device" in first
    assert "MiB free, but a checkpoint needs" in first
    assert "Traceback" not in output
    assert second.rstrip().endswith("code 0\nbest.json\nstep-00000040"), output
