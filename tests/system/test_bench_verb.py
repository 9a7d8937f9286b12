"""`vitrail bench` as a person meets it: sentences for wrong input, one measurement, and the modes side by side."""

import json
import sys
from pathlib import Path

import pytest
from support import ROOT, run, torchrun, vitrail

from vitrail import cli

TOY = str(ROOT / "configs" / "ablate" / "dit_toy.yaml")
BAD = {"status": "failed", "error": "it ended with 1 and left no word"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sweep", "data.batc=1,2"], "--sweep data.batc=1: "),
        (["--sweep", "parallel.strategy=DDPP"], "did you mean 'DDP'"),
        (["--sweep", "parallel.tensor=4"], "does not divide the 1 ranks"),
        (["--ranks", "2", "data.batch=3"], "batch"),
        (["--mode", "rael"], "did you mean 'real'"),
        (["--sweep", "nodes=1,2"], "--jobs"),
        (["--nodes", "2"], "--jobs"),
        (["--time", "20m"], "--time: no jobs are written"),
        (["--jobs", "slurm", "--start-with", "srun"], "leave it or --jobs out"),
        (["--start-with", "nosuchcmd {world}"], "there is no program 'nosuchcmd'"),
        (["--start-with", "env A={foo}"], "{foo} is unknown (known: {nodes}, {ranks}, {world})"),
        (["--start-with", "env 'A"], "No closing quotation"),
        (["--start-with", " "], "no words are given"),
        (["--mode", "syn", "--mode", "io", "--sweep", "mode=io"], "leave one of them out"),
        (["--limit", "soon"], "--limit"),
        (["--warm-up", "0"], "--warm-up"),
        (["--jobs", "slurm", "--limit", "5m"], "--limit: job scripts are written"),
        (["--jobs", "slurm", "--minutes", "5"], "--minutes: job scripts are written"),
        (["--ranks", "2", "parallel.tensor=2", "--mode", "compute"], "part of a sample"),
        (["--jobs", "mpi", "--time", "20m"], "means nothing to mpi"),
        (["nothing.here=1"], "unknown key"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", TOY, *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("runs/*/results.jsonl"))


@pytest.mark.parametrize(
    "words",
    ["--nodes 2", "--limit 5m", "--minutes 5", "--again", "--no-skip", "--machine dgx", "--time 5m", "--account a",
     "--partition p", "--ranks 2"],
)  # fmt: skip
def test_what_a_launcher_has_started_refuses_what_it_could_not_heed(words, capsys, monkeypatch):
    found = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in found.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", TOY, *words.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert f"{words.split()[0]}: processes that a launcher has started" in error


def test_what_is_not_kept_is_not_promised(tmp_path, capsys, monkeypatch):
    from vitrail.bench import runner

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def stop(self):
        raise runner.Stopped("stopped by SIGINT")

    monkeypatch.setattr(runner.Sweep, "run", stop)
    for words, said in (([], "nothing is kept"), (["--out", "here"], "finished cells are kept in here")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", TOY, *words])
        error = capsys.readouterr().err
        assert ended.value.code == 75
        assert f"stopped by SIGINT; {said}" in error
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(runner, "run_cell", lambda order, ranks, *, log, **_: log.write_text("x\n") and dict(BAD))
    for words, named in (([], False), (["--out", "here"], True)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", TOY, *words])
        error = capsys.readouterr().err
        assert ended.value.code == 1
        assert "it ended with 1 and left no word" in error
        assert ("; see here/logs/" in error) == named
        assert "vitrail-bench-" not in error


def test_several_modes_keep_nothing_and_a_sweep_fails_if_every_cell_does(tmp_path, capsys, monkeypatch):
    from vitrail.bench import runner

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    ends, orders = {}, []

    def measure(order, ranks, *, log, **_):
        orders.append(order)
        log.write_text(f"of {order['name']}\n")
        return {"status": ends.get(order["name"], "failed"), "error": "no"}

    def bench(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", TOY, *words])
        return ended.value.code or 0, capsys.readouterr().err

    monkeypatch.setattr(runner, "run_cell", measure)
    for _ in range(2):
        code, error = bench("--mode", "real", "--mode", "syn")
        assert code == 1
        assert "of mode=syn" in error  # the log, which is not kept
        assert "every cell failed" in error
    assert len(orders) == 4
    assert not list(tmp_path.iterdir())
    code, error = bench("--sweep", "model.patch=2,4", "--out", "here")
    assert (code, "every cell failed; see here/logs" in error) == (1, True)
    ends["patch=4"] = "oom"
    assert bench("--sweep", "model.patch=2,4", "--out", "here", "--again")[0] == 0
    assert bench("--mode", "real", "--out", "both")[0] == 1
    del orders[:]
    with pytest.raises(SystemExit):
        cli.main(["bench", TOY, "--mode", "io", "--mode", "real", "--out", "both"])
    assert [order["mode"] for order in orders] == ["io"]
    table = capsys.readouterr().out
    assert "mode=io  " in table
    assert "as it is (mode=real)  " in table


def test_jobs_are_written_for_every_cell(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    words = ["--machine", "dgx", "--time", "20m", "--cpus-per-rank", "7"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", TOY, "--sweep", "nodes=1,2", "--jobs", "slurm", *words])
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    assert told.out.split() == [f"runs/bench-ablate-dit-toy/jobs/nodes={n}.sh" for n in (1, 2)]
    script = Path(told.out.split()[1]).read_text()
    for option in ("ntasks-per-node=8", "cpus-per-task=7", "job-name=nodes-2"):
        assert f"#SBATCH --{option}\n" in script


@pytest.mark.slow
def test_modes_side_by_side_and_under_a_launcher(tmp_path: Path) -> None:
    few = ("--windows", "2", "--steps", "2", "--warm-up", "1", "--json")
    modes = [word for mode in ("real", "syn", "io", "compute") for word in ("--mode", mode)]
    code, output = vitrail("bench", TOY, "--ranks", "2", *modes, *few, "--out", tmp_path / "bench")
    assert code == 0, output
    told = json.loads(output[output.index("{") :])
    assert [(found["mode"], found["status"]) for found in told["results"]] == [
        ("real", "ok"),
        ("syn", "ok"),
        ("io", "ok"),
        ("compute", "ok"),
    ]
    assert [found["gpus"] for found in told["results"]] == [2, 2, 2, 1]
    assert [found["batch_per_rank"] for found in told["results"]] == [8, 8, 8, 8]
    assert told["summary"]
    code, output = run(*torchrun(2, "-m", "vitrail", "bench", TOY, "parallel.strategy=DDP", *few), cwd=tmp_path)
    assert code == 0, output
    assert '"strategy": "DDP"' in output
    assert not (tmp_path / "runs").exists()
    words = f"{sys.executable} -m torch.distributed.run --no-python --standalone --nproc-per-node {{world}}"
    nodes = ("--nodes", "2", "--start-with", words, "--out", tmp_path / "two")
    code, output = vitrail("bench", TOY, "--mode", "syn", *nodes, *few)
    assert code == 0, output
    assert json.loads(output[output.index("{") :])["results"][0]["gpus"] == 2
    code, output = run(*torchrun(2, "-m", "vitrail", "bench", TOY, "--sweep", "data.batch=8"), cwd=tmp_path)
    assert code != 0
    assert "--sweep: processes that a launcher has started" in output
