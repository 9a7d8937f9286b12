"""Profiled steps of a training: files that open, tables that add up, and a training that does not change."""

import gzip
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import environment, events, losses, parameters, run, tiny_recipe, torchrun, write_recipe, write_volume

from vitrail.recipe import load_recipe
from vitrail.recipe.sections import Profile
from vitrail.report import summary, write_report
from vitrail.report.profiles import show_profile
from vitrail.training import profiling
from vitrail.training.profiling import Profiling
from vitrail.training.run import train


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volume(tmp_path_factory.mktemp("volume") / "em.zarr")


def recipe_of(volume: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    usual = {"run__steps": 10, "checkpoint__every": 100, "eval__every": 100, "log__profile": {"steps": [7, 9]}}
    return tiny_recipe(volume, run_dir, **usual | changes)


def table(run_dir: Path, steps: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / f"profile/steps-{steps}.json").read_text())
    return found


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").iterdir())


def check_rank(run_dir: Path, rank: dict[str, Any], steps: int) -> None:
    """The trace opens and has the marks of its steps, and the parts add up to a step."""
    with gzip.open(run_dir / rank["trace"]) as file:
        found = json.load(file)["traceEvents"]
    assert sum(event["name"] == "vitrail: between" for event in found) == steps == rank["steps"]
    parts = rank["parts"]
    assert set(parts) == {"data", "forward", "backward", "optimizer", "communication", "other"}
    assert sum(parts.values()) == pytest.approx(rank["step_seconds"])
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
    assert 0 < sum(row["share"] for row in rank["operations"]) <= 1.01
    assert not rank["problems"]


@pytest.fixture(scope="module")
def pair(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run in micro-batches, with a profile and without."""
    home = tmp_path_factory.mktemp("pair")
    same: dict[str, Any] = {"data__micro_batch": 3, "eval__every": 8, "log__report": True}
    train(recipe_of(volume, home / "with", **same), quiet=True)
    train(recipe_of(volume, home / "without", **same | {"log__profile": "off"}), quiet=True)
    return home / "with", home / "without"


def test_a_profile_is_a_trace_and_a_table_that_adds_up(pair: tuple[Path, Path]) -> None:
    found = table(pair[0], "7-9")
    assert found["steps"] == [7, 9]
    (rank,) = found["ranks"]
    check_rank(pair[0], rank, 3)
    assert rank["rank"] == 0
    assert names(pair[0]) == ["steps-7-9-rank-0.trace.json.gz", "steps-7-9.json"]
    with gzip.open(pair[0] / rank["trace"]) as file:
        marks = [e["name"] for e in json.load(file)["traceEvents"] if e["name"].startswith("vitrail: ")]
    assert marks.count("vitrail: backward") == 3 * 3  # 8 samples by three


def test_profiling_changes_no_number(pair: tuple[Path, Path]) -> None:
    looked, usual = pair
    np.testing.assert_array_equal(losses(looked), losses(usual))
    theirs = parameters(usual)
    for name, value in parameters(looked).items():
        np.testing.assert_array_equal(value, theirs[name])
    (a,), (b,) = ([e["metrics"] for e in events(run_dir, "eval") if e["step"] == 8] for run_dir in pair)
    assert a == b
    assert not (usual / "profile").exists()


def test_profiled_steps_and_the_one_before_are_left_out_of_the_rates(pair: tuple[Path, Path]) -> None:
    timed = [[e["step"] for e in events(run_dir, "train") if "samples_per_s" in e] for run_dir in pair]
    assert timed == [[10], [6, 7, 8, 9, 10]]


def test_the_report_shows_where_a_step_went(pair: tuple[Path, Path]) -> None:
    page = (pair[0] / "report.html").read_text()
    assert "Where a step goes" in page
    assert "Steps 7 to 9, rank 0" in page
    assert "profile/steps-7-9-rank-0.trace.json.gz opens in" in page
    assert "Where a step goes" not in (pair[1] / "report.html").read_text()
    assert summary(pair[0])["profiles"] == [{"step": 9, "steps": [7, 9], "path": "profile/steps-7-9.json"}]


def test_a_run_that_goes_on_among_the_steps_profiles_the_rest(volume: Path, tmp_path: Path) -> None:
    for steps in (5, 9):
        train(recipe_of(volume, tmp_path / "run", run__steps=steps, log__profile={"steps": [4, 7]}), quiet=True)
    check_rank(tmp_path / "run", table(tmp_path / "run", "4-5")["ranks"][0], 2)
    check_rank(tmp_path / "run", table(tmp_path / "run", "6-7")["ranks"][0], 2)
    train(recipe_of(volume, tmp_path / "run", run__steps=11, log__profile={"steps": [4, 7]}), quiet=True)
    assert len(names(tmp_path / "run")) == 4


def test_two_ranks_that_share_the_model_are_profiled_both(volume: Path, tmp_path: Path) -> None:
    tree = recipe_of(volume, tmp_path / "run", run__steps=6, log__profile={"steps": [4, 5], "ranks": "all"})
    command = torchrun(2, "-m", "vitrail", "train", write_recipe(tmp_path / "recipe.yaml", tree))
    code, output = run(*command, env=environment())
    assert code == 0, output[-3000:]
    found = table(tmp_path / "run", "4-5")["ranks"]
    assert [rank["rank"] for rank in found] == [0, 1]
    for rank in found:
        check_rank(tmp_path / "run", rank, 2)
        assert rank["collectives"] > 0
    write_report(tmp_path / "run")
    assert "rank 0 and rank 1" in (tmp_path / "run/report.html").read_text()


# ---------------------------------------------------------------- what fails, and what is not there


def test_a_profiler_that_fails_ends_no_run(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr(profiling, "Tracer", refuse)
    assert train(recipe_of(volume, tmp_path / "begin")).code == 0
    assert "log.profile: rank 0: no profiler could be started: no such library" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(profiling, "keep", refuse)
    assert train(recipe_of(volume, tmp_path / "end")).code == 0
    assert "log.profile: rank 0: the steps could not be profiled: no such library" in capsys.readouterr().err
    assert not (tmp_path / "end/profile").exists()
    monkeypatch.undo()
    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    assert train(recipe_of(volume, tmp_path / "amid")).code == 0
    assert "log.profile: rank 0: the steps could not be profiled: no such library" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(profiling, "whole_steps", refuse)
    assert train(recipe_of(volume, tmp_path / "marks")).code == 0
    assert "log.profile: rank 0: no profiler could be started: no such library" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(recipe_of(volume, tmp_path / "after")).code == 0  # no profiler was left behind
    assert len(names(tmp_path / "after")) == 2


def test_what_cannot_be_had_is_said(volume: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"steps": [20, 21], "ranks": [0, 3], "memory": True}
    train(recipe_of(volume, tmp_path / "run", run__steps=1, log__profile=asked))
    told = capsys.readouterr().err
    assert "of a CPU's memory there are no snapshots" in told
    assert "there are 1 ranks, from 0, and no [3]" in told
    assert "the run ends at step 1, before [20, 21]" in told


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"steps": [15, 10]}, "a first and a last step"),
        ({"steps": [1, 101]}, "at most 100"),
        ({"ranks": [0]}, "give steps"),
        ({"steps": [1, 2], "ranks": []}, "ranks"),
        ({"steps": [0, 2]}, "steps"),
        ("on", "profile"),
    ],
)
def test_what_makes_no_sense_is_refused(volume: Path, tmp_path: Path, asked: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        load_recipe(recipe_of(volume, tmp_path / "run", log__profile=asked))


# ---------------------------------------------------------------- a GPU's memory, with a stand-in for the GPU


class Journal:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Profiling, list[Any]]:
    """A profiling of a GPU's memory alone, after three steps, and what was asked of PyTorch."""
    calls: list[Any] = []

    def dump(path: str) -> None:
        calls.append("dump")
        Path(path).write_bytes(pickle.dumps({"segments": []}))

    monkeypatch.setattr(profiling, "record_memory", calls.append)
    monkeypatch.setattr(profiling, "dump_memory", dump)
    place = SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(rank=0, size=1, chief=True))
    trainer: Any = SimpleNamespace(place=place, done=3, total=9)
    journal: Any = Journal()
    return Profiling(Profile(memory=True), trainer, tmp_path, journal, lambda *_: None), calls


def test_memory_that_runs_out_leaves_a_snapshot(on_gpu: tuple[Profiling, list[Any]], tmp_path: Path) -> None:
    watched, calls = on_gpu
    assert list(watched.steps(iter([1, 2]))) == [1, 2]  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError), watched:
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert calls == [profiling.MOST_EVENTS, "dump", None]
    assert names(tmp_path) == ["out-of-memory-step-4-rank-0.memory.pickle"]
    assert pickle.loads((tmp_path / "profile" / names(tmp_path)[0]).read_bytes()) == {"segments": []}
    assert "pytorch.org/memory_viz" in watched.journal.notes[0]  # type: ignore[attr-defined]


def test_no_other_end_leaves_one(on_gpu: tuple[Profiling, list[Any]], tmp_path: Path) -> None:
    watched, calls = on_gpu
    with pytest.raises(ValueError, match="else"), watched:
        raise ValueError("something else")
    assert calls == [profiling.MOST_EVENTS, None]
    assert not (tmp_path / "profile").exists()


def test_profiled_steps_end_with_a_snapshot(
    on_gpu: tuple[Profiling, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, calls = on_gpu
    monkeypatch.setattr(profiling, "gather_json", lambda value, group: [value])
    monkeypatch.setattr(watched.trainer.place, "control", None, raising=False)
    watched.span, watched.under_way = (2, 3), True
    watched.tracer = SimpleNamespace(finish=lambda path: {"step_seconds": 1.0, "parts": {"forward": 1.0}})  # type: ignore[assignment]
    watched.journal.log = lambda *_, **__: None  # type: ignore[method-assign]
    with watched:
        pass
    assert calls == [profiling.MOST_EVENTS, "dump", None]
    assert table(tmp_path, "2-3")["ranks"][0]["memory"] == "profile/steps-2-3-rank-0.memory.pickle"


def test_a_gpu_is_traced_with_its_kernels_and_graphs_that_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Profiler:
        def __init__(self, **options: Any):
            asked.update(options)

        def start(self) -> None:
            asked["teardown"] = profiling.os.environ["TEARDOWN_CUPTI"]

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    flow = SimpleNamespace(replay=object(), pipeline=None, gradients=SimpleNamespace())
    trainer: Any = SimpleNamespace(place=SimpleNamespace(device=torch.device("cuda")), flow=flow)
    profiling.Tracer(trainer, spare=True, steps=2)
    assert asked["activities"] == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    assert asked["teardown"] == "0"


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("rubbish", [None, [], {"ranks": 3}, {"ranks": [None, {"parts": 2}]}, {"ranks": []}])
def test_a_table_that_is_none_is_not_shown(rubbish: Any) -> None:
    assert show_profile(rubbish) is None


def test_any_numbers_make_rows() -> None:
    odd = {
        "parts": {"forward": "x", "data": 0.001},
        "step_seconds": 0,
        "operations": [3, {"name": "k" * 200}],
        "idle": 1,
    }
    found = show_profile({"steps": ["a", None], "ranks": [odd] * 9})
    assert found is not None
    assert found.of == "kernels"
    assert len({len(row) for row in found.parts} | {len(found.heads)}) == 1
    assert len(found.operations[0][3][0]) < 100
    assert "5 more ranks" in found.notes[-1]


def test_a_profile_outside_the_run_is_not_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("run: {name: x}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "profile", "step": 3, "path": "../x.json"}) + "\n")
    write_report(tmp_path)
    assert "its path does not lead into the run folder" in (tmp_path / "report.html").read_text()
