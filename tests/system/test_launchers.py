"""The same training by torchrun, by Slurm with a stop and a second start, by mpirun, and on two hosts.

The launchers are real: Slurm's daemons on this host, Open MPI, and network namespaces that stand for hosts. Where one
is not installed or not allowed, its tests are skipped with the reason.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slurm import Slurm, Unavailable, free_ports, started
from support import (
    LONG,
    ROOT,
    end,
    environment,
    losses,
    parameters,
    run,
    start,
    tiny_recipe,
    torchrun,
    vitrail,
    write_recipe,
)
from watching import Phase, finish, last_line, lines, steps_saved

STEPS = 80
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
HOSTS = ("vitrail-a", "vitrail-b")


def make_recipe(volume: Path, home: Path, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "run__steps": STEPS,
        "optimizer__eps": 1e-5,  # where gradients are nothing but rounding, AdamW would magnify it
        "checkpoint": {"every": 50, "background": False},
        "eval__every": 10**6,
        "log": {"every": 1, "pictures": 10**6, "activations": "off", "tensorboard": False, "report": True},
    }
    home.mkdir(exist_ok=True)
    return write_recipe(home / "recipe.yaml", tiny_recipe(volume, home / "run", **options | changes))


def raising(volume: Path, home: Path) -> Path:
    """A training whose rank 1 of 2 raises in step 6."""
    return make_recipe(volume, home, objective={"kind": "raising", "bad": 44})


def plugin_path(env: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([env["PYTHONPATH"], str(ROOT / "tests" / "system")])
    # Without the latter an error in a plugin is a sentence; what others look like is tried here.
    return env | {"PYTHONPATH": path, "VITRAIL_TRACEBACK": "1"}


def assert_same_training(found: Path, expected: Path) -> None:
    """Other launchers may give a process other cores, and sums then round differently."""
    assert steps_saved(found)[0] == steps_saved(expected)[0] == STEPS
    np.testing.assert_allclose(losses(found), losses(expected), rtol=1e-6)
    one, other = parameters(found), parameters(expected)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def by_torchrun(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are compared with."""
    home = tmp_path_factory.mktemp("torchrun")
    code, output = run(*torchrun(2, "-m", "vitrail", "train", make_recipe(volume, home)))
    assert code == 0, output[-3000:]
    assert last_line(home / "run", "start")["world"] == 2
    return home / "run"


# ---------------------------------------------------------------- Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(started(tmp_path_factory.mktemp("slurm")))
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield cluster


def submit(slurm: Slurm, home: Path, recipe: Path, *words: str) -> str:
    """The number of the job."""
    code, output = vitrail(
        "launch", "slurm", recipe, "--ranks-per-node", "2", "--time", "10m", "--signal-seconds", "60", *words,
        "--submit",
        env=plugin_path(slurm.environment),
        cwd=home,
    )  # fmt: skip
    assert code == 0, output
    return output.partition("Submitted batch job ")[2].split()[0]


def output_of(home: Path) -> str:
    return "".join(path.read_text() for path in home.glob("slurm-*.out"))


def wait_for_steps(slurm: Slurm, job: str, home: Path, number: int) -> None:
    deadline = time.monotonic() + LONG
    while sum(line["event"] == "train" for line in lines(home / "run")) < number:
        assert slurm.show(job, "JobState") in ("PENDING", "RUNNING", "CONFIGURING"), output_of(home)
        assert time.monotonic() < deadline, output_of(home)
        time.sleep(0.02)


def test_slurm_stops_queues_again_and_goes_on(volume: Path, by_torchrun: Path, slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, make_recipe(volume, tmp_path))
    wait_for_steps(slurm, job, tmp_path, 5)
    slurm.call("scancel", "--signal=USR1", job)  # what Slurm itself does so long before the time limit
    slurm.wait(job, "PENDING")
    stop = last_line(tmp_path / "run", "end")
    assert (stop["reason"], stop["step"]) == ("signal", steps_saved(tmp_path / "run")[0])
    assert 5 <= stop["step"] < STEPS
    slurm.hurry(job)
    slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    told = output_of(tmp_path)
    assert slurm.show(job, "JobState") == "COMPLETED", told + slurm.logs()
    assert slurm.show(job, "Restarts") == "1"
    starts = [(line["step"], line["world"]) for line in lines(tmp_path / "run") if line["event"] == "start"]
    assert starts == [(0, 2), (stop["step"], 2)]
    assert told.count("report.html") == 2, told  # the first rank alone prints
    assert_same_training(tmp_path / "run", by_torchrun)


def test_slurm_names_the_rank_that_failed_and_does_not_try_again(volume: Path, slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, raising(volume, tmp_path), "--plugin", "raising_objective")
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "FAILED"
    assert slurm.show(job, "ExitCode") == "1:0"
    assert slurm.show(job, "Restarts") == "0"
    check_named(output_of(tmp_path))


def check_named(output: str) -> None:
    """One traceback with a note that names its rank, and one line of the survivor."""
    why = "rank 1 failed in training of step 5: ArithmeticError: sample 44 cannot be"
    assert f"[rank1]: {why}" in output.splitlines(), output  # PyTorch's way with tracebacks
    assert output.count("Traceback (most recent call last)") == 1, output
    told = [line for line in output.splitlines() if line.startswith("error: ")]
    assert told == [f"error: rank 0 ended because {why}"], output
    assert "Connection closed" not in output


# ---------------------------------------------------------------- MPI


needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: apt-get install openmpi-bin)"
)


@needs_mpirun
def test_mpirun_trains_the_same(volume: Path, by_torchrun: Path, tmp_path: Path) -> None:
    code, output = run(*MPIRUN, sys.executable, "-m", "vitrail", "train", make_recipe(volume, tmp_path))
    assert code == 0, output[-3000:]
    assert output.count("report.html") == 1
    assert last_line(tmp_path / "run", "start")["world"] == 2
    assert_same_training(tmp_path / "run", by_torchrun)


@pytest.mark.slow
@needs_mpirun
def test_mpirun_names_the_rank_that_failed(volume: Path, tmp_path: Path) -> None:
    words = (sys.executable, "-m", "vitrail", "train", raising(volume, tmp_path), "--plugin", "raising_objective")
    code, output = run(*MPIRUN, *words, env=plugin_path(environment()))
    assert code == 1
    check_named(output)


@needs_mpirun
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mpirun_with_a_killed_rank(volume: Path, tmp_path: Path, rank: int) -> None:
    """Rank 0 holds the store that the ranks tell each other with; it goes with it."""
    process = start(*MPIRUN, sys.executable, "-m", "vitrail", "train", make_recipe(volume, tmp_path, run__steps=10**6))
    try:
        Phase(process, tmp_path / "run").steps(5)
        os.kill(ranks_of(process)[rank], signal.SIGKILL)
        code, output = finish(process, timeout=LONG)
    finally:
        end(process)
    assert code != 0
    told = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, output
    assert told[0].startswith(f"error: rank {1 - rank} ended because rank {rank} ")
    assert "it was killed, ran out of memory or crashed" in told[0]
    assert "Traceback" not in output


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process numbers of the ranks under an mpirun."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            for variable in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                if parent == process.pid and variable.startswith(b"OMPI_COMM_WORLD_RANK="):
                    found[int(variable.partition(b"=")[2])] = int(entry)
    return found


# ---------------------------------------------------------------- two hosts


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with names, addresses and a cable between them."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("ip or unshare is not installed (Debian: apt-get install iproute2 util-linux)")
    names = [f"{name}-{os.getpid()}" for name in HOSTS]
    folders = [Path("/etc/netns", name) for name in names]
    cables = [f"vt{os.getpid() % 10**6}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"network namespaces cannot be made here: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        try:
            for name, folder in zip(names, folders, strict=True):
                ip("netns", "add", name)
                folder.mkdir(parents=True)
                known = "".join(f"10.213.7.{number} {known}\n" for number, known in enumerate(names, 1))
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")  # seen there as /etc/hosts
                (folder / "resolv.conf").write_text("")  # no name server is reached from there, so none is asked
            ip(
                "link",
                "add",
                cables[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                cables[1],
                "netns",
                names[1],
            )
            for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
                ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (Unavailable, OSError) as reason:
            pytest.skip(str(reason))
        yield names[0], names[1]
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def use_core(core: int) -> None:
    os.sched_setaffinity(0, {core})


def test_two_hosts_train_together(volume: Path, by_torchrun: Path, hosts: tuple[str, str], tmp_path: Path) -> None:
    recipe = make_recipe(volume, tmp_path)
    port = free_ports(1)[0]
    words = (
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hosts[0]}:{port}", "--rdzv-id=two-hosts", "-m", "vitrail", "train", str(recipe),
    )  # fmt: skip
    env = environment(OMP_NUM_THREADS="1")
    processes = []
    try:
        for name, core in zip(hosts, itertools.cycle(sorted(os.sched_getaffinity(0)))):
            inside = ("sh", "-c", 'hostname "$0" && exec "$@"', name, *words)
            namespace = ("ip", "netns", "exec", name, "unshare", "--uts")
            processes.append(start(*namespace, *inside, env=env, preexec_fn=functools.partial(use_core, core)))
        outputs = [finish(process, timeout=LONG) for process in processes]
    finally:
        for process in processes:
            end(process)
    assert [code for code, _ in outputs] == [0, 0], "\n".join(output[-3000:] for _, output in outputs)
    assert last_line(tmp_path / "run", "start")["world"] == 2
    assert_same_training(tmp_path / "run", by_torchrun)
