"""The folder of a benchmark, how a cell ended, and the order in which a sweep runs; nothing is measured here."""

import csv
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support import LONG, ROOT, eventually, is_gone

from vitrail.bench import cell as cells
from vitrail.bench import runner
from vitrail.bench import supervise as children
from vitrail.bench.sweep import Results, identity, read_results
from vitrail.errors import RunFailed, TooLarge, UserError, is_out_of_memory
from vitrail.report import bench_summary, write_bench_report
from vitrail.report.modes import explain

TOY = ROOT / "configs" / "ablate" / "dit_toy.yaml"
OK = {
    "status": "ok",
    "error": None,
    "step_seconds": {"median": 0.5, "low": 0.4, "high": 0.6},
    "samples_per_s": 16.0,
    "mfu": None,
    "memory": {"allocated_gib": 1.0},
}


# ---------------------------------------------------------------- the folder


def test_results_survive_a_torn_line(tmp_path):
    with Results(tmp_path) as results:
        results.add({"name": "a", "status": "failed", "keys": {"data.batch": "8/rank"}, "windows": [1, 2]})
    with open(tmp_path / "results.jsonl", "ab") as file:
        file.write(b'{"name": "b", "sta')
    assert [result["name"] for result in read_results(tmp_path)] == ["a"]
    with Results(tmp_path) as results:
        results.add({"name": "a", "status": "ok", "keys": {"data.batch": "8/rank"}, "split": {"data": 0.1}})
        assert results.newest[identity({"data.batch": "8/rank"}, None)]["status"] == "ok"
    assert [result["status"] for result in read_results(tmp_path)] == ["failed", "ok"]
    (row,) = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert row == {"name": "a", "status": "ok", "keys.data.batch": "8/rank", "split.data": "0.1"}


def test_lines_and_files_that_say_too_little_are_told_in_a_sentence(tmp_path, measured):
    told = []

    def run():
        return runner.plan_sweep(str(TOY), sweep=["data.batch=8"], mode="syn", out=tmp_path, tell=told.append).run()

    run()
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"name": "a", "status": "ok", "keys": null}\n[]\n\n')
    (tmp_path / "cells" / "x.json").write_text("[]")
    assert [found["name"] for found in run()] == ["batch=8"]
    assert told[1].endswith("results.jsonl: lines that cannot be read, and do not count: 2")
    for text in ("{}", "[]", '{"tree": {}, "sweep": [], "cells": []}'):
        (tmp_path / "sweep.json").write_text(text)
        with pytest.raises(UserError, match="does not say what was measured; remove it") as refused:
            run()
        assert len(str(refused.value)) < 100 + len(str(tmp_path))
    (tmp_path / "sweep.json").unlink()
    assert len(run()) == len(measured["names"]) == 1


def test_results_that_were_measured_otherwise_are_told(tmp_path, measured):
    told = []

    def run(*sweep, **options):
        options = runner.Options(**options)
        runner.plan_sweep(str(TOY), sweep=sweep, mode="syn", out=tmp_path, options=options, tell=told.append).run()
        return told[-1]

    measured["ends"] = {"as it is": OK | {"windows": [1.0, 1.0], "steps": 3, "warm_up": 1, "date": "2026-01-02T03:04"}}
    run(windows=2)
    same = "1 of 1 cells have a result already (of 2026-01-02, 2 windows of 3 steps)"
    assert run(windows=2) == run(windows=2, steps=3) == same
    for other in ({"windows": 5}, {"windows": 2, "steps": 4}, {"windows": 2, "warm_up": 2}):
        assert run(**other).startswith(f"{same}; other --windows")
    assert len(measured["names"]) == 1


def test_only_one_works_in_a_folder(tmp_path):
    with Results(tmp_path), pytest.raises(UserError, match="another benchmark is at work"):
        Results(tmp_path)
    Results(tmp_path).close()


def leave(folder):
    """A folder with one result, as a benchmark leaves it."""
    with Results(folder) as results:
        results.agree({"tree": {}, "sweep": {}, "cells": [], "identities": {}, "ranks": 1, "nodes": 1})
        results.add({"schema": 1, "name": "a", "status": "ok", "keys": {}, "samples_per_s": 1.0})
    return folder


@pytest.mark.parametrize("use", [Results, write_bench_report, bench_summary])
def test_links_and_pipes_in_a_folder_are_refused(tmp_path, use):
    """Others hand such folders over; what is written and removed there must not lie elsewhere."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.json").write_text("a thesis")
    made = {}
    for name in ("cells", "logs", "jobs", "plots"):
        made[name] = lambda place: place.symlink_to(mine)
        made[f"{name}/x.json"] = lambda place: place.symlink_to(mine / "thesis.json")
    for name in ("sweep.json", "results.jsonl", "results.csv", "report.html", ".lock"):
        made[name] = lambda place: place.symlink_to(mine / "thesis.json")
        made[f"{name} "] = os.mkfifo
        if name in ("results.jsonl", ".lock"):
            made[f"{name}  "] = lambda place: place.hardlink_to(mine / "thesis.json")
    for number, (name, make) in enumerate(made.items()):
        place = leave(tmp_path / str(number)) / name.strip()
        if place.is_dir():
            place.rmdir()
        place.unlink(missing_ok=True)
        place.parent.mkdir(exist_ok=True)
        make(place)
        with pytest.raises(UserError, match=r"plain file|other things than a benchmark|a link, which|not JSON"):
            use(tmp_path / str(number))
    assert os.listdir(mine) == ["thesis.json"]
    assert (mine / "thesis.json").read_text() == "a thesis"


def test_a_folder_as_it_was_left_is_opened(tmp_path):
    leave(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "notes.txt").write_text("of a person")
    write_bench_report(tmp_path)
    with Results(tmp_path) as results:
        assert [result["name"] for result in results.results] == ["a"]
    assert [cell["name"] for cell in bench_summary(tmp_path)["cells"]] == ["a"]


def test_a_line_of_torn_results_is_read_in_no_time(tmp_path):
    """Each half was tried with all that follows."""
    leave(tmp_path)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"schema": [' * 10**6)
    assert [cell["name"] for cell in bench_summary(tmp_path)["cells"]] == ["a"]


def plan(tmp_path, *sweep, overrides=(), **options):
    return runner.plan_sweep(
        str(TOY), overrides, sweep=sweep, mode="syn", out=tmp_path, options=runner.Options(**options)
    )


def test_another_grid_adds_cells_and_another_recipe_is_refused(tmp_path):
    for sweep, overrides in ((("data.batch=8/rank",), ()), (("data.batch=16/rank", "model.patch=2,4"), ())):
        with Results(tmp_path) as results:
            results.agree(plan(tmp_path, *sweep, overrides=overrides).asked)
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert told["sweep"] == {"data.batch": ["8/rank", "16/rank"], "model.patch": [2, 4]}
    assert told["cells"] == ["batch=8/rank", "batch=16/rank,patch=2", "batch=16/rank,patch=4"]
    with Results(tmp_path) as results, pytest.raises(UserError, match=r"run.seed: 0 became 1.*another folder"):
        results.agree(plan(tmp_path, overrides=["run.seed=1"]).asked)
    with Results(tmp_path) as results:
        results.agree(runner.plan_sweep(str(TOY), mode="io", out=tmp_path).asked)  # a mode belongs to a cell


def test_keys_that_end_alike_are_not_taken_for_each_other(tmp_path, measured):
    recipe = tmp_path / "mae.yaml"
    recipe.write_text(
        "run: {name: toy, steps: 5, device: cpu}\n"
        "model: {kind: mae, ndim: 3, encoder: {width: 24, depth: 2, heads: 2, patch: 4}, "
        "mask: {kind: random, ratio: 0.75}, decoder: {kind: self, width: 16, depth: 1, heads: 2}}\n"
        "data: {train: [{kind: dummy, shape: [16, 16, 16], channels: 1}], crop: 16, batch: 4}\n"
    )

    def run(*sweep):
        found = runner.plan_sweep(str(recipe), sweep=sweep, mode="syn", out=tmp_path / "bench").run()
        return [(result["name"], result["keys"]) for result in found]

    assert run("model.encoder.depth=1,2") == [(f"depth={n}", {"model.encoder.depth": n}) for n in (1, 2)]
    for _ in range(2):
        assert run("model.decoder.depth=1,3") == [
            (f"model.decoder.depth={n}", {"model.decoder.depth": n}) for n in (1, 3)
        ]
    assert len(measured["names"]) == 4
    assert len({result["name"] for result in read_results(tmp_path / "bench")}) == 4
    both = ("data.batch=2,4", "model.encoder.depth=1")
    assert run(*both) == [
        (f"batch={n},model.encoder.depth=1", {"data.batch": n, "model.encoder.depth": 1}) for n in (2, 4)
    ]
    assert run(*reversed(both)) == run(*both)  # the same cells in another order keep their names
    assert len(measured["names"]) == 6


# ---------------------------------------------------------------- how a cell ended


def test_running_out_of_memory_is_told_from_other_failures():
    def chained(first: Exception) -> Exception:
        try:
            raise RunFailed("rank 1 failed") from first
        except RunFailed as error:
            return error

    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        TooLarge("model: width 100000 makes more parameters than fit"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
        chained(torch.OutOfMemoryError("CUDA out of memory")),
    ):
        assert is_out_of_memory(error), error
    for error in (
        RuntimeError("shape mismatch"),
        RunFailed("rank 1 is gone: it was killed, ran out of memory or crashed"),
        UserError("data.batch: too large"),
    ):
        assert not is_out_of_memory(error), error


def test_what_arithmetic_refuses_has_run_out_of_memory(tmp_path, monkeypatch):
    """So that larger batches are skipped, and a sweep does not end as if it had been asked wrongly."""
    monkeypatch.delenv("RANK", raising=False)
    order = dict.fromkeys(("mode", "windows", "steps", "warm_up", "name", "keys"))
    order |= {"recipe": str(TOY), "overrides": [], "plugins": [], "watched": False, "out": str(tmp_path / "a.json")}
    (tmp_path / "a.order").write_text(json.dumps(order))

    def refused(*_, **__):
        raise TooLarge("model: width 100000 makes more parameters than fit")

    monkeypatch.setattr("vitrail.bench.measure.measure", refused)
    assert cells.main([str(tmp_path / "a.order")]) == 2
    note = json.loads((tmp_path / "a.rank0.note").read_text())
    assert (note["status"], note["wrong_input"]) == ("oom", False)


def test_the_end_of_a_cell_is_judged_by_files_then_by_its_code(tmp_path):
    out, log = tmp_path / "a.json", tmp_path / "a.log"

    def judge(code, text="", starved=False, **notes):
        log.write_text(text)
        for rank, note in notes.items():
            (tmp_path / f"a.{rank}.note").write_text(
                json.dumps(dict(zip(("status", "error", "lost"), note, strict=False)))
            )
        found = children.judge_cell(code, out, log, starved=starved)
        children.forget(out)
        return found["status"], found["error"]

    assert judge(-9) == judge(137) == ("failed", children.KILLED)
    assert judge(-9, starved=True) == ("oom", children.STARVED)
    torchrun = "Root Cause (first observed failure):\n  rank : 1\n  exitcode  : -9 (pid: 7)\n"
    ended = ("failed", "rank 0 is the last one", True)
    assert judge(1, torchrun, rank0=ended) == ("failed", children.KILLED)
    assert judge(1, torchrun, rank0=ended, starved=True) == ("oom", children.STARVED)
    assert judge(1, rank0=ended, starved=True) == ended[:2]  # somebody else's memory
    assert judge(1, rank0=ended, rank1=("oom", "CUDA out of memory")) == ("oom", "CUDA out of memory")
    assert judge(1, rank0=ended, rank1=("failed", "ValueError: x", False)) == ("failed", "ValueError: x")
    assert judge(-9, rank0=("failed", "it ended because x", False)) == ("failed", "it ended because x")
    assert judge(-11)[0] == "failed"
    assert "SIGSEGV" in judge(-11)[1]
    assert judge(2, "noise\nerror: data.batch: 3 is wrong\n") == ("failed", "data.batch: 3 is wrong")
    assert "left no word" in judge(1)[1]
    (tmp_path / "ab.rank0.note").write_text('{"status": "oom", "error": "of another cell"}')
    assert judge(1)[0] == "failed"
    out.write_text(json.dumps(OK))
    assert children.judge_cell(1, out, log)["notes"] == ["its processes ended with 1 after it was measured"]


def test_a_rank_that_lost_another_says_so():
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:2")
    error = RunFailed("rank 0 ended because rank 1 died")
    error.__cause__ = lost
    assert cells.is_lost(error)
    assert not cells.is_lost(RunFailed("rank 1 ended because of itself"))


def test_the_system_tells_whether_memory_ran_out(monkeypatch):
    monkeypatch.setattr(children, "oom_kills", lambda: 2)
    monkeypatch.setattr("vitrail.foreign.memory_bytes", lambda: 100)
    monkeypatch.setattr(children, "largest_child", lambda: 45)
    assert children.Watch(kills=1, peak=90).killed()
    assert children.Watch(kills=2, peak=10).crowded(2)
    assert not children.Watch(kills=2, peak=10).crowded(1)
    assert not children.Watch(kills=2, peak=45).crowded(2)  # that was an earlier cell


def test_children_keep_what_the_user_has_set(monkeypatch):
    for name in (
        "LOCAL_SCRATCH",
        "MASTER_KEY",
        "RANKING",
        "RANK",
        "LOCAL_WORLD_SIZE",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.setenv(name, "1")
    found = children.alone_environment()
    assert {"LOCAL_SCRATCH", "MASTER_KEY", "RANKING", "PATH"} <= set(found)
    assert not {"RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"} & set(found)


def child(monkeypatch, tmp_path: Path, script: str) -> Path:
    """A program in the place of Python."""
    path = tmp_path / "child"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def test_a_cell_that_hangs_is_ended_and_one_that_is_killed_ran_out_only_if_the_system_says_so(monkeypatch, tmp_path):
    order = {"out": str(tmp_path / "a.json")}
    child(monkeypatch, tmp_path, "sleep 3600 & echo $! > begun; mv begun pid; wait")
    monkeypatch.chdir(tmp_path)
    wait = subprocess.Popen.wait

    def wait_for_it(self, timeout=None):
        while timeout == 0.25 and not (tmp_path / "pid").exists():
            time.sleep(0.01)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_it)
    found = children.run_cell(order, 1, log=tmp_path / "a.log", limit=0.25)
    assert found == {"status": "failed", "error": "it took longer than the limit of 0 s, and was ended"}
    sleeper = int((tmp_path / "pid").read_text())
    assert eventually(lambda: is_gone(sleeper))
    child(monkeypatch, tmp_path, "kill -9 $$")
    assert children.run_cell(order, 1, log=tmp_path / "a.log", limit=LONG)["error"] == children.KILLED
    counts = iter((4, 5))
    monkeypatch.setattr(children, "oom_kills", lambda: next(counts))
    assert children.run_cell(order, 1, log=tmp_path / "a.log", limit=LONG)["status"] == "oom"
    monkeypatch.setattr(children, "oom_kills", lambda: 5)
    child(monkeypatch, tmp_path, f"echo '{json.dumps(OK)}' > a.json")
    assert children.run_cell(order, 1, log=tmp_path / "a.log", limit=LONG) == OK
    assert not (tmp_path / "a.json").exists()


def test_ranks_may_be_started_by_other_words(monkeypatch, tmp_path):
    program = child(
        monkeypatch, tmp_path, f"echo \"$A $@\" > words; echo '{json.dumps(OK)}' > bench/cells/nodes=2.json"
    )
    monkeypatch.chdir(tmp_path)
    options = runner.Options(start_with="env A={world} nice -n 1")
    sweep = runner.plan_sweep(str(TOY), sweep=["nodes=2"], mode="syn", ranks=2, out="bench", options=options)
    (found,) = sweep.run()
    assert found["status"] == "ok"
    assert (tmp_path / "words").read_text().split()[:3] == ["4", "-m", "vitrail.bench.cell"]  # no torchrun before it
    assert program.exists()
    program.write_bytes(b"\0")
    with pytest.raises(UserError, match=r"--start-with: './child' cannot be started"):
        children.run_cell({"out": "a.json"}, 1, log=tmp_path / "a.log", limit=1, starter=["./child"])


# ---------------------------------------------------------------- the order of a sweep


@pytest.fixture
def measured(monkeypatch):
    """Cells are not measured, but end as a test says: by name, or with OK."""
    state = {"ends": {}, "names": []}

    def measure(self, cell):
        state["names"].append(cell.name)
        end = state["ends"].get(cell.name, OK)
        if callable(end):
            end()
        return dict(end)

    monkeypatch.setattr(runner.Sweep, "measure", measure)
    return state


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path, measured):
    grid = ("data.batch=8/rank,16/rank,32/rank", "model.patch=2,4")

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    measured["ends"] = {
        "batch=8/rank,patch=4": {"status": "failed", "error": "no"},
        "batch=16/rank,patch=2": {"status": "oom", "error": "no memory"},
        "batch=16/rank,patch=4": stop,
    }
    with pytest.raises(runner.Stopped, match="SIGTERM"):
        plan(tmp_path, *grid).run()
    assert [r["status"] for r in read_results(tmp_path)] == ["ok", "failed", "oom"]
    measured["ends"], measured["names"] = {}, []
    found = plan(tmp_path, *grid).run()
    assert measured["names"] == ["batch=16/rank,patch=4", "batch=32/rank,patch=4"]
    assert [r["status"] for r in found] == ["ok", "failed", "oom", "ok", "skipped", "ok"]
    skipped = found[4]
    assert skipped["error"] == "batch=16/rank,patch=2 ran out of memory, and this batch is larger"
    assert skipped["batch_per_rank"] == 32
    assert skipped["strategy"] == "FULL_SHARD"
    assert skipped["schema"] == 1
    measured["names"] = []
    assert len(plan(tmp_path, *grid).run()) == 6
    assert measured["names"] == []
    plan(tmp_path, *grid, again=True, skip=False).run()
    assert measured["names"] == ["batch=8/rank,patch=4", "batch=32/rank,patch=2"]
    with pytest.raises(runner.Stopped, match="the time is up, and 1 cells are missing"):
        plan(tmp_path, "data.batch=64/rank", most_seconds=0.0).run()


def test_what_jobs_leave_is_taken_in_and_missing_cells_get_scripts(tmp_path, measured):
    from vitrail.bench.sweep import write_jobs

    sweep = runner.plan_sweep(
        str(TOY), sweep=["nodes=1,2,4"], mode="syn", ranks=2, out=tmp_path, options=runner.Options(steps=3)
    )
    scripts = write_jobs(sweep, "slurm", machine="generic", time="20m")
    assert [path.name for path in scripts] == ["nodes=1.sh", "nodes=2.sh", "nodes=4.sh"]
    text = scripts[2].read_text()
    assert "#SBATCH --nodes=4" in text
    assert f"-m vitrail.bench.cell {tmp_path}/jobs/nodes=4.order" in text
    assert "vitrail train" not in text
    order = json.loads((tmp_path / "jobs" / "nodes=4.order").read_text())
    assert order["keys"] == {"nodes": 4}
    assert not order["watched"]
    Path(order["out"]).write_text(json.dumps(OK | {"name": "nodes=4", "keys": {"nodes": 4}, "mode": "syn"}))
    note = tmp_path / "cells" / "nodes=2.rank3.note"
    (tmp_path / "cells" / "nodes=2.rank0.note").write_text('{"status": "failed", "error": "x", "lost": false}')
    note.write_text('{"status": "oom", "error": "CUDA out of memory"}')
    assert [path.name for path in write_jobs(sweep, "slurm", machine="generic", time="20m")] == ["nodes=1.sh"]
    found = {result["name"]: result for result in read_results(tmp_path)}
    assert {name: result["status"] for name, result in found.items()} == {"nodes=2": "oom", "nodes=4": "ok"}
    assert found["nodes=2"]["gpus"] == 4
    assert not note.exists()
    for launcher in ("torchrun", "mpi"):
        (script,) = write_jobs(sweep, launcher, machine="generic")
        assert "vitrail.bench.cell" in script.read_text()


def test_a_kill_after_the_result_leaves_nothing_behind(tmp_path, measured):
    """What measured the cell was done, and the call ended before it had taken the result in."""
    told = OK | {"name": "nodes=1", "keys": {"nodes": 1}, "mode": "syn"}
    for name, content in (
        ("cells/nodes=1.json", json.dumps(told)),
        ("cells/nodes=1.order", "{}"),
        ("logs/nodes=1.log", "x"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    sweep = runner.plan_sweep(str(TOY), sweep=["nodes=1"], mode="syn", out=tmp_path, options=runner.Options(steps=3))
    assert [result["status"] for result in sweep.run()] == ["ok"]
    assert not [*(tmp_path / "cells").iterdir(), *(tmp_path / "logs").iterdir()]


def test_a_cell_that_a_job_began_is_left_to_it(tmp_path, measured, monkeypatch):
    from vitrail.bench.sweep import write_jobs

    told = []

    def write(**options):
        sweep = runner.plan_sweep(
            str(TOY), sweep=["nodes=1,2"], mode="syn", out=tmp_path, options=runner.Options(**options), tell=told.append
        )
        return [path.stem for path in write_jobs(sweep, "slurm", machine="generic", time="20m")], sweep

    assert write()[0] == ["nodes=1", "nodes=2"]
    path = tmp_path / "jobs" / "nodes=2.order"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("RANK", raising=False)

    def ended(*_, **__):
        raise KeyboardInterrupt  # as good as being killed: no note is left

    monkeypatch.setattr("vitrail.bench.measure.measure", ended)
    with pytest.raises(KeyboardInterrupt):
        cells.main([str(path)])
    started = tmp_path / "cells" / "nodes=2.started"
    assert json.loads(started.read_text())["who"] == "job 77"
    written, sweep = write()
    assert (written, list(sweep.begun)) == (["nodes=1"], ["nodes=2"])
    assert told[-1].startswith("nodes=2: job 77 began it at")
    assert "--again" in told[-1]
    written, sweep = write(again=True)
    assert (written, list(sweep.begun)) == (["nodes=1", "nodes=2"], [])
    assert not started.exists()


# ---------------------------------------------------------------- the sentence


def result(mode, seconds, *, data=0.0, gpus=1):
    return {
        "status": "ok",
        "mode": mode,
        "gpus": gpus,
        "windows": [seconds * 0.99, seconds * 1.01],
        "step_seconds": {"median": seconds},
        "samples_per_s": 32 / seconds,
        "split": {"data": data, "forward": seconds / 4, "backward": seconds / 2, "communication": None},
    }


def test_the_difference_between_modes_is_one_sentence():
    real, syn, io = result("real", 1.0, data=0.58), result("syn", 0.42), result("io", 0.9)
    said = explain([real, syn, io])
    assert said.startswith("58 % of the step waits for data; a step takes 1 s with real data and 0.42 s with one batch")
    assert "raise data.workers" in said
    assert explain([real]) == "58 % of the step waits for data"
    said = explain([result("syn", 1.0, gpus=4), result("compute", 0.75)])
    assert said.startswith("25 % of a step is communication and waiting for other ranks")
    assert "this may be chance" in explain([result("real", 1.0), result("syn", 1.0)])
    assert explain([result("syn", 1.0)]) == "backward takes 67 % of a step"
    assert explain([result("real", 0.5), result("syn", 1.0)]).startswith("no verdict")
    assert explain([{"status": "oom", "mode": "real"}]) == ""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_what_stops_a_training_stops_a_sweep(sign: signal.Signals) -> None:
    before = signal.signal(sign, lambda *_: None)  # whatever the one has chosen who runs the tests
    try:
        with pytest.raises(runner.Stopped, match=f"stopped by {sign.name}"), runner.stoppable():
            signal.raise_signal(sign)
        signal.raise_signal(sign)  # the handler of before is back
    finally:
        signal.signal(sign, before)
