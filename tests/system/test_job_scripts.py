"""Scripts of `vitrail launch torchrun` and `vitrail launch mpi`, run: how they stop, and that they stay stopped."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import LONG, end, environment, run, start, tiny_recipe, write_recipe
from watching import Phase, finish, last_line, lines, steps_saved

LAUNCH = (sys.executable, "-m", "vitrail", "launch")
MPI_HERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: apt-get install openmpi-bin)"
)


def make_recipe(volume: Path, home: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "run__steps": 10**6,
        "checkpoint": {"every": 10**6, "background": False},
        "eval__every": 10**6,
        "log": {"every": 1, "pictures": 10**6, "activations": "off", "tensorboard": False},
    }
    return write_recipe(home / "recipe.yaml", tiny_recipe(volume, home / "run", **options | changes))


def script(launcher: str, recipe: Path, home: Path, *words: str) -> Path:
    path = home / "job.sh"
    code, output = run(*LAUNCH, launcher, recipe, "--ranks-per-node", "2", "--output", path, *words, cwd=home)
    assert code == 0, output
    return path


def stopped_by(number: int, process: subprocess.Popen[str], run_dir: Path) -> tuple[int, str]:
    """Signal what was started, once it trains; its exit code and output."""
    try:
        Phase(process, run_dir).steps(3)
        os.kill(process.pid, number)
        code, output = finish(process, timeout=LONG)
    finally:
        end(process)
    stop = last_line(run_dir, "end")
    assert stop["reason"] == "signal", output
    assert steps_saved(run_dir)[0] == stop["step"]
    assert sum(line["event"] == "start" for line in lines(run_dir)) == 1
    return code, output


@pytest.mark.slow
def test_a_signal_to_torchrun_saves(volume: Path, tmp_path: Path) -> None:
    """USR1, too, which Slurm sends; torchrun alone would die of it and leave its ranks behind."""
    path = script("torchrun", make_recipe(volume, tmp_path), tmp_path)
    code, _ = stopped_by(signal.SIGUSR1, start("bash", path), tmp_path / "run")
    assert code == 1  # torchrun does not pass codes on


@pytest.mark.slow
def test_torchrun_does_not_repeat_what_was_stopped_or_refused(volume: Path, tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path, run__time_limit="3s")
    path = script("torchrun", recipe, tmp_path, "--max-restarts", "1")
    code, output = run("bash", path)
    assert code == 1
    assert [line["event"] for line in lines(tmp_path / "run")].count("start") == 1, output
    assert last_line(tmp_path / "run", "end")["reason"] == "time limit"
    assert output.count("continue with: vitrail train") == 1
    recipe.write_text(recipe.read_text().replace('"steps"', '"stepz"'))
    code, output = run("bash", path)
    assert code == 1
    assert output.count("error: run.stepz") == 1, output


@needs_mpirun
@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGINT))],
)
def test_a_signal_to_the_script_of_mpi_saves(volume: Path, tmp_path: Path, number: int) -> None:
    path = script("mpi", make_recipe(volume, tmp_path), tmp_path)
    code, output = stopped_by(number, start("bash", path, env=environment(**MPI_HERE)), tmp_path / "run")
    assert code == 75, output


@pytest.mark.slow
@needs_mpirun
def test_the_script_of_mpi_ends_as_the_training_does(volume: Path, tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path, run__steps=3)
    words = ("mpi", recipe, "--ranks-per-node", "2", "--submit")
    code, output = run(*LAUNCH, *words, env=environment(**MPI_HERE), cwd=tmp_path)
    assert code == 0, output
    assert "tiny: 2 ranks (shard 2)" in output
    assert last_line(tmp_path / "run", "start")["world"] == 2
