"""The search for the largest batch, on trials that are made up, and the verdicts that it rests on."""

import json
import math
import signal
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from support import ROOT, tiny_recipe, write_recipe
from typer.testing import CliRunner

from vitrail.bench import cell, supervise
from vitrail.bench import tune as tune_module
from vitrail.bench.supervise import Supervisor, Trial, Verdict, child_environment, decide, judge_trial, oom_kills
from vitrail.bench.tune import Found, NothingFits, check_out, planned_size, search, sizes_of, tuned_tree, write_tuned
from vitrail.cli import plan as verbs
from vitrail.errors import UserError, is_out_of_memory
from vitrail.launch.world import World
from vitrail.recipe import load_recipe


def made_up(size: int, verdict: Verdict = "ok", share: float | None = None) -> Trial:
    return Trial(size, verdict, 0, "" if verdict == "ok" else "because", 1.0, 0.1, 1.0, 2.0, share, "CPU")


class Machine:
    """Has room for so many samples; keeps what was tried."""

    def __init__(self, room: int, *, told: bool = False, otherwise: Verdict = "out of memory"):
        self.room, self.told, self.otherwise, self.tried = room, told, otherwise, []

    def __call__(self, size: int) -> Trial:
        self.tried.append(size)
        if size > self.room:
            return made_up(size, self.otherwise)
        return made_up(size, share=0.1 + 0.85 * size / (self.room + 0.5) if self.told else None)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("guess", [None, 1, 100, 120, 100_000])
@pytest.mark.parametrize("room", [1, 2, 3, 113, 640])
def test_largest_is_found_and_proven(room: int, guess: int | None, told: bool) -> None:
    machine = Machine(room, told=told)
    found = search(machine, range(1, 1001), guess=lambda first: guess)
    assert found.size == room
    assert found.next is not None
    assert found.next.size == room + 1
    assert len(set(machine.tried)) == len(machine.tried) <= (13 if told else 21)
    assert "do not (out of memory on rank 0)" in found.proof


def test_multiples_and_bounds() -> None:
    machine = Machine(113)
    assert search(machine, range(8, 1001, 8)).size == 112
    assert 120 in machine.tried
    found = search(Machine(500), range(8, 65, 8))
    assert (found.size, found.next) == (64, None)
    assert "more were not asked for" in found.proof
    assert search(Machine(5), [1, 2, 4, 8]).size == 4


def test_few_trials_where_memory_tells() -> None:
    machine = Machine(300, told=True)
    search(machine, range(1, 65537), guess=lambda first: 290)
    assert len(machine.tried) <= 5


def test_nothing_fits_is_told() -> None:
    with pytest.raises(NothingFits, match=r"not even 1 sample a rank fit.*recompute=full"):
        search(Machine(0), range(1, 10))


def test_other_failures_bound_the_search_unless_they_come_first() -> None:
    assert search(Machine(5, otherwise="failed"), range(1, 100)).size == 5
    with pytest.raises(UserError, match="failed, not for want of memory") as error:
        search(Machine(0, otherwise="failed"), range(1, 100))
    assert not isinstance(error.value, NothingFits)


# ---------------------------------------------------------------- verdicts


def verdict_of(tmp_path: Path, code: int, result: dict[str, Any] | None, words: str = "") -> dict[str, Any]:
    place, log = tmp_path / "result.json", tmp_path / "log"
    place.unlink(missing_ok=True)
    log.write_text(words)
    if result is not None:
        place.write_text(json.dumps(result))
    return judge_trial(code, place, log, 0.05)


def test_verdicts(tmp_path: Path) -> None:
    good = {"status": "ok", "retries": 0, "reserved": 90, "allocated": 80, "memory": 100, "step_seconds": 0.1}
    assert verdict_of(tmp_path, 0, good)["verdict"] == "ok"
    assert verdict_of(tmp_path, 0, good | {"reserved": 96})["verdict"] == "head-room"
    assert verdict_of(tmp_path, 0, good | {"retries": 1})["verdict"] == "allocator retries"
    assert verdict_of(tmp_path, 0, {"status": "oom", "error": "full"})["verdict"] == "out of memory"
    assert verdict_of(tmp_path, 0, good | {"used": 96})["verdict"] == "head-room"  # by libraries, beside the allocator
    assert verdict_of(tmp_path, 0, good | {"used": 50})["verdict"] == "ok"
    assert verdict_of(tmp_path, -signal.SIGKILL, None)["verdict"] == "killed (signal 9)"
    starved = judge_trial(-signal.SIGKILL, tmp_path / "none", tmp_path / "log", 0.05, no_memory=True)
    assert starved["verdict"] == "out of memory"
    assert verdict_of(tmp_path, 0, {"status": "failed", "lost": True, "error": "closed"})["verdict"] == "lost"
    died = verdict_of(tmp_path, -signal.SIGSEGV, None, "first\nlast words\n")
    assert died == {"verdict": "failed", "why": "the process ended with signal 11: last words"}


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    own, events = tmp_path / "own", tmp_path / "job" / "memory.events"
    assert oom_kills(tmp_path, own) is None
    own.write_text("3:cpu:/\n0::/job\n")
    assert oom_kills(tmp_path, own) is None
    events.parent.mkdir()
    events.write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path, own) == 2
    control = tmp_path / "memory" / "memory.oom_control"
    control.parent.mkdir()
    control.write_text("under_oom 0\noom_kill 5\n")
    own.write_text("4:memory:/outside/name\n0::/\n")
    assert oom_kills(tmp_path, own) == 5


def test_all_ranks_decide_alike() -> None:
    lost = {"verdict": "lost", "why": "connection closed by peer"}
    full = {"verdict": "out of memory", "why": "full"}
    fine = {"verdict": "ok", "why": "", "reserved": 2**30, "allocated": 1, "memory": 2**31, "step_seconds": 0.1}
    fine |= {"device": "CPU"}
    found = decide([lost, {"verdict": "stopped", "why": ""}, full, fine], 8, 1.0)
    assert (found.verdict, found.rank, found.fits) == ("out of memory", 2, False)
    assert decide([fine, fine | {"reserved": 2**30 + 1}], 8, 1.0).share == pytest.approx(0.5)
    assert decide([lost, fine], 8, 1.0).verdict == "lost"
    assert decide([fine, fine | {"used": 2**30 + 2**29}], 8, 1.0).share == pytest.approx(0.75)


def test_out_of_memory_is_known() -> None:
    import torch

    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(UserError("out of memory is a word in this sentence"))
    wrapped = ValueError("while it compiled")
    wrapped.__cause__ = KeyError("a part")
    wrapped.__cause__.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)
    wrapped.__cause__.__context__ = wrapped  # a ring
    assert not is_out_of_memory(wrapped)


def test_a_trial_waits_while_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    readings = iter([1, 1, 5, 5, 5, 9, 9])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(readings), 10))
    cell.wait_for_memory(None, pause=0.001)
    assert list(readings) == [9, 9]


def test_children_meet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    env = child_environment("node", 123, "token")
    assert (env["RANK"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("1", "node", "123")
    assert env["VITRAIL_SECRET"] == "token"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env


# ---------------------------------------------------------------- sizes and recipes


def recipe_of(tmp_path: Path, **changes: Any) -> Any:
    return load_recipe(tiny_recipe(tmp_path / "em.zarr", tmp_path / "run", **changes))


def test_sizes_of_a_batch_per_rank(tmp_path: Path) -> None:
    sizes = sizes_of(recipe_of(tmp_path, data__batch="4/rank"), 2, multiple=4, most=19)
    assert list(sizes.candidates) == [4, 8, 12, 16]
    assert sizes.changes(8) == ["data.batch=8/rank", "data.micro_batch=8"]
    assert (sizes.rows(8), sizes.batch(8)) == (8, 16)


def test_a_global_batch_stays(tmp_path: Path) -> None:
    sizes = sizes_of(recipe_of(tmp_path, data__batch=48), 2, multiple=2)
    assert list(sizes.candidates) == [2, 4, 6, 8, 12, 24]
    assert sizes.changes(8) == ["data.micro_batch=8"]
    assert (sizes.rows(8), sizes.rows(24), sizes.batch(8)) == (16, 24, 48)
    with pytest.raises(UserError, match="no multiple of 7 is possible with the 24 samples"):
        sizes_of(recipe_of(tmp_path, data__batch=48), 2, multiple=7)


def test_a_pipeline_keeps_its_passes(tmp_path: Path) -> None:
    pipeline = {"parallel": {"pipeline": 2}, "data__micro_batch": 2}
    sizes = sizes_of(recipe_of(tmp_path, data__batch="8/rank", **pipeline), 2, most=4)
    assert sizes.changes(3) == ["data.batch=12/rank", "data.micro_batch=3"]
    assert list(sizes_of(recipe_of(tmp_path, data__batch=8, **pipeline), 2).candidates) == [1, 2, 4]


def test_the_planner_is_asked() -> None:
    recipe = load_recipe(ROOT / "configs/dummy/dit_0.5b.yaml", ["parallel.compile=false"])
    sizes = sizes_of(recipe, 1)
    options: dict[str, Any] = {"head_room": 0.05}
    assert planned_size(recipe, sizes, None, device="Nobody's", **options) is None
    planned = planned_size(recipe, sizes, "h200", device=None, **options)
    assert planned is not None
    assert 1 < planned < 4096
    less = planned_size(recipe, sizes, "h200", device=None, head_room=0.5)
    assert less is not None
    assert less < planned


def test_the_recipe_extends_what_was_given(tmp_path: Path) -> None:
    given = write_recipe(tmp_path / "tiny.yaml", tiny_recipe(tmp_path / "em.zarr", tmp_path / "run"))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    out = folder / "tuned.yaml"
    changes = ["optimizer.lr=1e-4", "data.batch=6/rank", "data.micro_batch=6"]
    tree = tuned_tree(str(given), changes, out)
    assert tree == {
        "extends": "../tiny.yaml",
        "optimizer": {"lr": 1e-4},
        "data": {"batch": "6/rank", "micro_batch": 6},
    }
    found = Found(made_up(6, share=0.5), made_up(7, "head-room"), ())
    write_tuned(out, tree, found, ranks=2)
    assert load_recipe(out) == load_recipe(given, changes)
    assert "# Found by `vitrail tune` on 2 x CPU: 6 samples a rank and pass fit, 7 do not (head-room" in out.read_text()
    with pytest.raises(UserError, match="exists"):
        check_out(out)
    with pytest.raises(UserError, match="cannot write"):
        check_out(tmp_path / "none" / "x.yaml")
    # A run folder begins another run, beside the old one.
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").write_text(load_recipe(given).to_yaml())
    whole = tuned_tree(str(tmp_path / "old"), changes, out)
    assert (whole["run"]["name"], whole["run"]["dir"], whole["data"]["micro_batch"]) == ("tiny-tuned", None, 6)
    # A change inside a list cannot be said by a child: then the whole recipe is written.
    assert "extends" not in tuned_tree(str(given), ["data.train.0.path=other.zarr"], out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--head-room", "1.5"], "--head-room: 1.5 must be a share"),
        (["--trial-limit", "0"], "--trial-limit: 0.0 must be above 0"),
        (["--layouts"], "give --cluster"),
        (["--cluster", "nowhere"], "nowhere"),
        (["parallel.tensor=3"], "parallel: tensor 3 does not divide the 1 ranks"),
        (["--multiple", "5"], "no multiple of 5"),
        (["data.bach=4"], "data.bach"),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, options: list[str], words: str) -> None:
    given = write_recipe(tmp_path / "tiny.yaml", tiny_recipe(tmp_path / "em.zarr", tmp_path / "run"))
    app = typer.Typer()
    app.callback()(lambda: None)
    verbs.add(app)
    result = CliRunner().invoke(app, ["tune", str(given), *options])
    assert isinstance(result.exception, UserError)
    assert words in str(result.exception)


# ---------------------------------------------------------------- ranks that agree, with children that are made up

CHILD = """#!{python}
import json, os, signal, sys, time
order = json.load(open(sys.argv[3]))
fate = order["recipe"]["fates"][int(order["plugins"][0])]
if fate == "waits":  # in a collective, for a rank that is gone
    time.sleep(3600)
if fate == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "dies":
    print("last words")
    sys.exit(3)
found = {{"status": "ok", "retries": 0, "reserved": 50, "allocated": 40, "memory": 100, "step_seconds": 0.1}}
found["device"] = "CPU"
open(order["out"], "w").write(json.dumps(found if fate == "ok" else {{"status": fate, "error": "a sentence"}}))
"""


def test_a_port_that_is_taken_is_no_lost_rank(tmp_path: Path) -> None:
    """Another port is tried, then; the connection that failed is what the sentence comes from."""
    why = f"MASTER_PORT: port 1 {supervise.PORT_TAKEN}"
    found = {"status": "failed", "error": why, "lost": True, "wrong_input": True}
    (tmp_path / "result.json").write_text(json.dumps(found))
    judged = judge_trial(1, tmp_path / "result.json", tmp_path / "log", 0.05)
    assert judged == {"verdict": "failed", "why": why}


class Clock:
    """Seconds that pass ten thousand times as fast from the moment on that something has happened."""

    def __init__(self, happened: Callable[[], bool]):
        self.happened, self.since = happened, math.inf

    def __call__(self) -> float:
        now = time.monotonic()
        if math.isinf(self.since) and self.happened():
            self.since = now
        return now + 1e4 * max(now - self.since, 0.0)


@pytest.mark.parametrize(
    ("fates", "verdict", "rank"),
    [
        (["ok", "ok", "ok"], "ok", 0),
        (["waits", "oom", "waits"], "out of memory", 1),
        (["lost", "waits", "killed"], "killed (signal 9)", 2),
        (["waits", "dies", "ok"], "failed", 1),
        (["waits", "waits", "waits"], "too slow", 0),
    ],
)
def test_no_rank_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fates: list[str], verdict: str, rank: int
) -> None:
    from torch.distributed import HashStore

    child = tmp_path / "child"
    child.write_text(CHILD.format(python=sys.executable))
    child.chmod(0o755)
    monkeypatch.setattr(supervise.sys, "executable", str(child))
    store = HashStore()
    limit = 1.5 if verdict == "too slow" else 1e6
    if verdict != "too slow":
        # Time to leave a child begins to pass when all ranks that have something to tell have told it.
        clock = Clock(lambda: store.add("trial/1/judged", 0) >= 3 - fates.count("waits"))
        monkeypatch.setattr(supervise, "time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
        monkeypatch.setattr(supervise, "GRACE", 1e3)

    def take_part(number: int) -> Trial:
        world = World(rank=number, size=3, local_rank=number, local_size=3)
        return Supervisor(world, store, limit=limit, plugins=[str(number)]).try_recipe({"fates": fates}, 8)

    with ThreadPoolExecutor(3) as pool:
        found = [replace(trial, seconds=0.0) for trial in pool.map(take_part, range(3))]
    assert found[0] == found[1] == found[2]
    assert found[0].verdict == verdict
    assert verdict == "too slow" or found[0].rank == rank


class MadeUpSupervisor:
    """Has room for 8 samples, 4 without sharding, none with full recomputation; fails where some blocks recompute."""

    def __init__(self, world: World, store: Any, head_room: float, *others: Any):
        self.head_room = head_room

    def try_recipe(self, tree: dict[str, Any], size: int, *, rows: int, steps: int = 3) -> Trial:
        if isinstance(tree["parallel"]["recompute"], dict):
            return made_up(size, "failed", 0.1)
        room = 4 if tree["parallel"]["strategy"] == "NO_SHARD" else 0 if tree["parallel"]["recompute"] == "full" else 8
        seconds = 0.01 * rows if room == 4 else 0.02 * rows
        seconds += 0.0 if isinstance(tree["data"]["batch"], str) else 1.0  # the optimizer's
        return replace(made_up(size, "ok" if size <= room else "out of memory", 0.1), step_seconds=seconds)


def test_the_fastest_layout_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"data__batch": "1/rank"}
    given = write_recipe(tmp_path / "tiny.yaml", tiny_recipe(tmp_path / "em.zarr", tmp_path / "run", **changes))
    out, told = tmp_path / "tuned.yaml", []
    layouts = [("parallel.strategy=FULL_SHARD",), ("parallel.strategy=NO_SHARD",), ("parallel.recompute=full",)]
    layouts.insert(0, ("parallel.recompute={every: 2}",))
    layouts.insert(0, ("parallel.tensor=7",))
    monkeypatch.setattr(tune_module, "Supervisor", MadeUpSupervisor)
    monkeypatch.setattr(tune_module, "planned_layouts", lambda recipe, world, cluster: layouts)
    found = tune_module.tune(str(given), layouts=True, cluster="laptop", out=out, tell=told.append)
    assert (found["micro_batch"], found["samples_per_s"]) == (4, pytest.approx(100.0))
    assert load_recipe(out).parallel.strategy == "NO_SHARD"
    assert load_recipe(out).data.batch == "4/rank"
    assert any("parallel.recompute=full: data.batch: not even 1 sample" in line for line in told)
    assert all(words.startswith(layouts[i][0]) for i, words in zip((0, 1, 4), found["refused"], strict=True))
    tried = [(trial["layout"], trial["verdict"]) for trial in found["trials"]]
    assert {("parallel.recompute={every: 2}", "failed"), ("parallel.recompute=full", "out of memory")} < set(tried)
    assert ("parallel.strategy=FULL_SHARD", "ok") in tried
    monkeypatch.setattr(tune_module, "planned_layouts", lambda recipe, world, cluster: layouts[4:] * 2)
    with pytest.raises(NothingFits, match="no layout works"):
        tune_module.tune(str(given), layouts=True, cluster="laptop", out=tmp_path / "other.yaml")


def test_the_speed_of_a_global_batch_is_of_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path / "em.zarr", tmp_path / "run", data__batch=80)
    given = write_recipe(tmp_path / "tiny.yaml", recipe)
    monkeypatch.setattr(tune_module, "Supervisor", MadeUpSupervisor)
    found = tune_module.tune(str(given), out=tmp_path / "tuned.yaml")
    assert (found["batch"], found["micro_batch"]) == (80, 8)
    assert found["samples_per_s"] == pytest.approx(80 / (1.0 + 0.02 * 80))
    assert found["trials"][-1]["step_seconds"] == pytest.approx(2.6)
    assert found["refused"] == []


def test_a_whole_step_that_does_not_work_is_told(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, data__batch=80)
    sizes, tried = sizes_of(recipe, 1), []

    class Bad:
        def __init__(self, verdict: Verdict):
            self.verdict = verdict

        def try_recipe(self, tree: dict[str, Any], size: int, **options: Any) -> Trial:
            return made_up(size, self.verdict)

    found = Found(made_up(8), None, ())
    assert tune_module.whole_step(recipe, sizes, Bad("too slow"), found, tried.append) is None
    with pytest.raises(UserError, match=r"a step of all 10 passes did not work.*out of memory.*--most"):
        tune_module.whole_step(recipe, sizes, Bad("out of memory"), found, tried.append)
    assert [trial.verdict for trial in tried] == ["too slow", "out of memory"]


def test_one_rank_asks_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, asked = recipe_of(tmp_path, data__batch="1/rank"), []

    def follow(action: Any, group: Any) -> int:
        asked.append(action)
        return 6  # what the first rank has found

    monkeypatch.setattr(tune_module, "on_chief", follow)
    supervisor, tried = MadeUpSupervisor(World(), None, 0.05), []
    found = tune_module.largest(recipe, sizes_of(recipe, 1), supervisor, None, print, tried.append)
    assert (found.size, len(asked), tried[1].size) == (8, 1, 6)


def test_layouts_are_the_planners() -> None:
    recipe = load_recipe(ROOT / "configs/dummy/dit_0.5b.yaml", ["parallel.compile=false"])
    found = tune_module.planned_layouts(recipe, 4, "dgx_h100")
    assert 1 < len(found) == len(set(found)) <= tune_module.LAYOUTS
    for changes in found:
        sizes_of(load_recipe(recipe, changes), 4)
