"""Looking at a training from the outside: when it does what, who its processes are, and what it has saved."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import LONG, environment, is_gone, start, torchrun

from vitrail import cli
from vitrail.weights.runs import list_checkpoints, load_tensors, read_manifest, verify
from vitrail.weights.safe_dcp import TensorReader


def call(*words: str | Path) -> int:
    """Run the command line in this process; its exit code."""
    try:
        cli.main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


# ---------------------------------------------------------------- what is saved


def steps_saved(run_dir: Path) -> list[int]:
    return [int(p.name[5:]) for p in list_checkpoints(run_dir / "checkpoints")]


def saved(run_dir: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, the newest if no step is given: parameters, averages and moments."""
    folder = run_dir / "checkpoints" / f"step-{steps_saved(run_dir)[0] if step is None else step:08d}"
    manifest = read_manifest(folder)
    verify(folder, manifest)
    entries: Any = TensorReader(folder, set(manifest["files"])).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load_tensors(folder, manifest, state)
    return state


def assert_same(found: Path, expected: Path) -> None:
    """Two runs ended with the same bits: raw and averaged parameters and the optimizer's state."""
    assert steps_saved(found)[0] == steps_saved(expected)[0]
    one, other = saved(found), saved(expected)
    assert {name.partition(".")[0] for name in one} == {"model", "optimizer", "ema"}
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} tensors differ: {different[:5]}"


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of the log, repeated steps too; a torn one is left out."""
    path = run_dir / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_line(run_dir: Path, event: str) -> dict[str, Any]:
    return [line for line in lines(run_dir) if line["event"] == event][-1]


# ---------------------------------------------------------------- what is going on


def launch(ranks: int, *words: str | Path, launcher: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
    """Start a training: alone, or under torchrun."""
    if ranks == 1:
        return start(sys.executable, "-m", "vitrail", "train", *words, **options)
    # Without the thread count: torchrun sets it, and this is how users start it.
    options.setdefault("env", {k: v for k, v in environment().items() if k != "OMP_NUM_THREADS"})
    return start(*torchrun(ranks, "-m", "vitrail", "train", *words, launcher=launcher), **options)


def finish(process: subprocess.Popen[str], timeout: float = LONG) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str], *, timeout: float = LONG) -> Any:
    """Look often, so that short phases are met; fails when the process ends first."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if process.poll() is not None:
            raise AssertionError(
                f"ended with {process.returncode} before it was met: {process.communicate()[0][-3000:]}"
            )
        if time.monotonic() > deadline:
            raise AssertionError("was not met in time")
        time.sleep(0.001)
    return found


WATCHED = ("--plugin", "watched_plugin")
SILENT = 7.0  # seconds that a rank says nothing before the others are told to look


def stop_rank(process: subprocess.Popen[str], run_dir: Path, rank: int) -> dict[int, int]:
    """Stop one of two ranks and wait until the other has ended because of it; the processes of both.

    The training has `--plugin watched_plugin`: it takes a rank for hung once it is told to, and not because a busy
    machine lets it wait.
    """
    ranks = ranks_of(process)
    os.kill(ranks[rank], signal.SIGSTOP)
    time.sleep(SILENT)  # on a busy machine it is silent for longer
    (run_dir / "hang").touch()
    wait_until(lambda: is_gone(ranks[1 - rank]), process)
    os.kill(ranks[rank], signal.SIGKILL)  # torchrun would wait half a minute before it does so
    return ranks


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process numbers of the ranks that a torchrun has started."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(entry) for v in variables if v.startswith(b"RANK=")}
        except (OSError, IndexError):
            continue
    return found


class Phase:
    """Waits for a moment of a training that has just been started."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path):
        self.process, self.run_dir = process, run_dir
        self.log = run_dir / "metrics.jsonl"
        self.begin = self.log.stat().st_size if self.log.exists() else 0

    def new_text(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self.begin)
            return file.read().decode(errors="replace")

    def steps(self, number: int) -> None:
        """So many steps are done."""
        wait_until(lambda: self.new_text().count('"event": "train"') >= number, self.process)

    def start_up(self, seconds: float) -> None:
        """So long after the start, but before the first step."""
        end = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= end or '"event": "train"' in self.new_text(), self.process)

    def set_up(self) -> None:
        """The folder is taken: the run has found its place and listens to signals."""
        lock = self.run_dir / ".lock"
        before = lock.stat().st_mtime_ns if lock.exists() else None
        wait_until(lambda: lock.exists() and lock.stat().st_mtime_ns != before, self.process)

    def writing(self) -> None:
        """A checkpoint is being written, or an old one removed."""
        folder = self.run_dir / "checkpoints"
        left = set(os.listdir(folder)) if folder.exists() else set()

        def seen() -> bool:
            names = set(os.listdir(folder)) if folder.exists() else set()
            return any(name.startswith(".partial-") and name not in left for name in names)

        self.steps(1)  # what an earlier kill has left is there until the first save
        wait_until(seen, self.process)

    def validating(self, every: int) -> None:
        """A step has been logged after which validation is due."""

        def seen() -> bool:
            steps = [json.loads(line)["step"] for line in self.new_text().splitlines(keepends=True) if whole_step(line)]
            return any(step % every == 0 for step in steps)

        wait_until(seen, self.process)


def whole_step(line: str) -> bool:
    return line.startswith('{"event": "train"') and line.endswith("}\n")


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a training that runs alone; it must not have ended before."""
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output[-3000:]
