"""Supervision of child processes: one way to start them, watch over them, and say why they ended.

- a child is `python -m vitrail.bench.cell ORDER` (cell.py); it computes, while this process never touches the device
- how it ended is told by the files that it left first, then by its exit code, and never guessed from a text on the
  screen: out of memory is what an allocator said, or signal 9 where the system tells that memory had run out
- a cell (`run_cell`) is all ranks of a measurement, started by torchrun or by the words of a user
- a trial (`Supervisor`) has a child on each rank that a launcher has started, which meet at a port of their own; a rank
  whose child runs out of memory, dies or takes too long says so in the store, and the others then end theirs. Every
  rank reads the verdicts of all, so that all come to the same decision, and nobody waits in a collective
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail import disk
from vitrail.errors import RunFailed, UserError
from vitrail.foreign import read_json
from vitrail.launch.world import SECRET, World

LOOK = 0.05  # seconds between two looks at a child that may be stopped
END_GRACE = 10.0  # seconds in which a child may end by itself when it is asked to
GRACE = 2.0  # seconds in which a trial's child may end by itself, after the trial has failed elsewhere
PATIENCE = 60.0  # seconds to wait for other ranks' verdicts, beyond the limit of a trial
PORT_TAKEN = "is in use by another program"
STARVED = "a process was ended by signal 9, and the memory of the machine had run out"
KILLED = "ended by signal 9: by the system for want of memory, or by someone"
NO_WORDS = "it ended with {code} and left no word"
ALMOST_ALL = 0.8  # of the memory: a process that is killed above it most likely was for that
# What torchrun sets for its ranks; a user's own variables may begin alike.
LAUNCHER = frozenset(
    f"{prefix}{name}" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


# ---------------------------------------------------------------- memory


ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return how often the kernel has ended a process of this control group for memory; None where nothing tells."""
    for place in _places(root, own):
        try:
            lines = [line.split() for line in place.read_text().splitlines()]
        except OSError:
            continue
        for words in lines:
            if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
                return int(words[1])
    return None


def _places(root: Path, own: Path) -> list[Path]:
    """Return the files of version 2 and 1; in a container the group lies at the root, whatever its name outside."""
    found = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        kinds, _, group = rest.partition(":")
        inside = group.strip("/")
        if not kinds:
            found += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in kinds.split(","):
            found += [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return found


@dataclass(frozen=True)
class Watch:
    """The system's counts of memory before children are started; asked again when they have ended."""

    kills: int  # 0 where nothing counts them
    peak: int  # bytes of the largest child so far

    @classmethod
    def begin(cls) -> Watch:
        return cls(oom_kills() or 0, largest_child())

    def killed(self) -> bool:
        """Return whether the system ended something for want of memory since."""
        return (oom_kills() or 0) > self.kills

    def crowded(self, processes: int) -> bool:
        """Return whether such children needed nearly all of the memory since."""
        from vitrail.foreign import memory_bytes

        peak = largest_child()  # of all children ever: that of the latest ones only where it has risen
        return peak > self.peak and peak * processes > ALMOST_ALL * memory_bytes()


def largest_child() -> int:
    """Return the bytes of the largest process that this one has started and that has ended."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * scale


# ---------------------------------------------------------------- one child


@dataclass(frozen=True)
class Ended:
    """The end of a child."""

    code: int
    cut: Literal["", "late", "stopped"]  # why it was ended from here, if it was
    starved: bool  # whether the machine ran out of memory meanwhile, or is likely to have
    killed: bool  # whether the system ended something for want of memory meanwhile


def run_child(
    order: dict[str, Any],
    path: Path,
    *,
    log: Path,
    env: dict[str, str],
    limit: float,
    start: Sequence[str] = (),
    ranks: int = 1,
    stop: Callable[[], bool] | None = None,
) -> Ended:
    """Write the order, start what follows it, and wait for its end: at most so many seconds, and until `stop` says so.

    The words of `start` stand before Python's own: they start the ranks, also elsewhere. Nothing that was started is
    left: torchrun's ranks are groups of their own, but they see their standard input close, which it does when this
    process ends, however it ends.
    """
    disk.write_whole(path, json.dumps(order).encode(), durable=False)
    disk.write_whole(log, b"", durable=False)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    words = [*start, sys.executable, "-m", *([] if start else launcher), "vitrail.bench.cell", str(path)]
    watch, deadline = Watch.begin(), time.monotonic() + limit
    cut: Literal["", "late", "stopped"] = ""
    with disk.appending(log) as out:
        try:
            child = subprocess.Popen(
                words, env=env, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            if not start:
                raise
            raise UserError(f"--start-with: {words[0]!r} cannot be started ({error.strerror}); correct it") from None
        try:
            while not cut and child.poll() is None:
                if stop is not None and stop():
                    cut = "stopped"
                elif time.monotonic() >= deadline:
                    cut = "late"
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=limit if stop is None else LOOK)
        finally:
            _end(child, cut=bool(cut))
    killed = watch.killed()
    return Ended(child.returncode, cut, killed or watch.crowded(ranks), killed)


def _end(child: subprocess.Popen[bytes], *, cut: bool) -> None:
    """End a child and all of its group, by force if it does not go or was cut short."""
    if child.stdin is not None:
        child.stdin.close()
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=END_GRACE)
            if not cut:
                return


def alone_environment() -> dict[str, str]:
    """Return this environment without what a launcher says of its ranks."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith("TORCHELASTIC_")
    }


def free_place(world: World) -> tuple[str, int]:
    """Return where the children can meet: a port of this host that nobody uses now."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        port = listening.getsockname()[1]
    return ("localhost" if world.local_size == world.size else socket.gethostname()), port


def child_environment(host: str, port: int, secret: str) -> dict[str, str]:
    """Return this rank's environment with another meeting place, without torchrun's own store and restarts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    launched = any(name in kept for name in ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return kept | ({"MASTER_ADDR": host, "MASTER_PORT": str(port), SECRET: secret} if launched else {})


# ---------------------------------------------------------------- a cell


def run_cell(
    order: dict[str, Any],
    ranks: int,
    *,
    log: Path,
    limit: float,
    threads: int | None = None,
    starter: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run the processes of a cell, for at most so many seconds, and return how it ended.

    Several ranks are started by torchrun, or by the words of a `starter` such as srun, which then decides how many.
    """
    out = Path(order["out"])
    forget(out)
    env = alone_environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    ended = run_child(order, order_beside(out), log=log, env=env, limit=limit, start=starter or (), ranks=ranks)
    if ended.cut:
        found = {"status": "failed", "error": f"it took longer than the limit of {limit:.0f} s, and was ended"}
        result = read_result(out) or found
    else:
        # What other words than torchrun's start may run elsewhere, where nothing of this is known.
        result = judge_cell(ended.code, out, log, starved=starter is None and ended.starved)
    forget(out)
    if result["status"] == "ok":
        disk.remove(log, inside=log.parent)
    return result


def judge_cell(code: int, out: Path, log: Path, *, starved: bool = False) -> dict[str, Any]:
    """Return how a cell ended whose process ended with this code; `starved`: memory had run out on the machine."""
    if (result := read_result(out)) is not None:
        if code:
            result["notes"] = [*result.get("notes", []), f"its processes ended with {code} after it was measured"]
        return result
    note = best(read_notes(out))
    if note is not None and note["status"] == "oom":
        return note
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    killed = code == -signal.SIGKILL or code == 128 + signal.SIGKILL or first_failure(text) == -signal.SIGKILL
    if killed and starved:
        return {"status": "oom", "error": STARVED}
    if note is not None and not (killed and note.get("lost")):
        return note
    if killed:
        return {"status": "failed", "error": KILLED}
    if code < 0:
        return {"status": "failed", "error": f"ended by signal {-code} ({signal.Signals(-code).name})"}
    said = re.findall(r"^error: (.+)$", text, re.MULTILINE)
    return {"status": "failed", "error": said[-1] if said else NO_WORDS.format(code=code)}


def first_failure(text: str) -> int | None:
    """Return the exit code of the rank that failed first, as torchrun tells it."""
    found = re.search(r"Root Cause.*?exitcode\s*:\s*(-?[0-9]+)", text, re.DOTALL)
    return int(found[1]) if found else None


def note_path(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.stem}.rank{rank}.note")


def started_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.started")


def best(notes: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the note that tells most: of memory, else of a rank's own failure, else that another rank has gone."""
    return min(notes, key=lambda note: (note["status"] != "oom", bool(note.get("lost"))), default=None)


def read_started(out: Path) -> str | None:
    """Return who began a cell, and when, if a job did and has not told how it went."""
    told = read_result(started_path(out))
    return None if told is None else f"{told.get('who')} began it at {told.get('date')}"


def read_result(out: Path) -> dict[str, Any] | None:
    try:
        found = read_json(out)
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_notes(out: Path) -> list[dict[str, Any]]:
    """Return what ranks that failed have left, the first rank's first."""
    found = []
    for path in sorted(out.parent.glob("*.note")):
        if path.name.startswith(f"{out.stem}.rank"):
            found.append(read_result(path) or {})
    return [note for note in found if "status" in note]


def order_beside(out: Path) -> Path:
    """Return the place of the order that the processes of a cell read."""
    return out.with_suffix(".order")


def forget(out: Path) -> None:
    """Remove what an attempt has left."""
    notes = [path for path in out.parent.glob("*.note") if path.name.startswith(f"{out.stem}.rank")]
    for path in (out, order_beside(out), started_path(out), *notes):
        disk.remove(path, inside=out.parent)


# ---------------------------------------------------------------- a trial


# In the order in which one stands for all ranks: a rank that was left by another, or stopped for another, only follows.
Verdict = Literal[
    "out of memory", "allocator retries", "head-room",
    "killed (signal 9)", "failed", "too slow", "lost", "stopped", "ok",
]  # fmt: skip
TOO_LARGE: tuple[Verdict, ...] = ("out of memory", "allocator retries", "head-room")


@dataclass(frozen=True)
class Trial:
    """The finding of all ranks about one size, the same on every rank."""

    size: int  # samples of a pass of a rank
    verdict: Verdict
    rank: int  # the one that decided
    why: str
    seconds: float  # of the trial, start included
    step_seconds: float | None = None
    allocated_gib: float | None = None  # of the rank that had the most
    reserved_gib: float | None = None
    share: float | None = None  # of its memory that was in use on the fullest rank
    device: str | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == "ok"


@dataclass
class Supervisor:
    """This rank's part in trials; `store` is shared with the supervisors of all ranks."""

    world: World
    store: Any
    head_room: float = 0.05
    limit: float = 900.0  # seconds of a trial
    plugins: Sequence[str] = ()
    trust: bool = False  # let a codec run code that comes with its files
    numbers: int = field(default=0, init=False)

    def try_recipe(self, tree: dict[str, Any], size: int, *, rows: int | None = None, steps: int = 3) -> Trial:
        """Take some steps of a recipe on all ranks."""
        order = {"recipe": tree, "rows": rows, "steps": steps, "plugins": list(self.plugins), "trust": self.trust}
        trial = self._once(order, size)
        while trial.verdict == "failed" and PORT_TAKEN in trial.why and self.numbers < 100:
            trial = self._once(order, size)
        return trial

    def _once(self, order: dict[str, Any], size: int) -> Trial:
        began, self.numbers = time.monotonic(), self.numbers + 1
        name = f"trial/{self.numbers}"
        if self.world.rank == 0:
            self.store.set(f"{name}/place", json.dumps((*free_place(self.world), secrets.token_hex(16))))
        self.store.set_timeout(timedelta(seconds=PATIENCE))
        place = json.loads(self.store.get(f"{name}/place"))
        with disk.scratch("vitrail-trial-") as folder:
            found = self._watch(order, Path(folder), name, child_environment(*place))
        if found["verdict"] not in ("ok", "stopped"):
            self.store.add(f"{name}/bad", 1)
        self.store.set(f"{name}/verdict/{self.world.rank}", json.dumps(found))
        self.store.add(f"{name}/judged", 1)
        return decide(self._wait_for_all(name), size, time.monotonic() - began)

    def _watch(self, order: dict[str, Any], folder: Path, name: str, env: dict[str, str]) -> dict[str, Any]:
        """Run a child until it has ended, here or because of another rank, and return the verdict on it."""
        result, log, leave_at = folder / "result.json", folder / "log", 0.0

        def stop() -> bool:
            nonlocal leave_at
            if not leave_at and self.store.add(f"{name}/bad", 0):
                leave_at = time.monotonic() + GRACE
            return bool(leave_at) and time.monotonic() > leave_at

        order = order | {"out": str(result), "watched": True}
        ended = run_child(order, folder / "order.json", log=log, env=env, limit=self.limit, stop=stop)
        if ended.cut == "stopped":
            return {"verdict": "stopped", "why": "ended, since another rank had failed"}
        if ended.cut == "late":
            return {"verdict": "too slow", "why": f"{order['steps']} steps took over {self.limit:.0f} s"}
        return judge_trial(ended.code, result, log, self.head_room, no_memory=ended.killed)

    def _wait_for_all(self, name: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.limit + PATIENCE
        while self.store.add(f"{name}/judged", 0) < self.world.size:
            if time.monotonic() > deadline:
                raise RunFailed("tune: not every rank told how its trial went; look for a rank whose process has ended")
            time.sleep(LOOK)
        return [json.loads(self.store.get(f"{name}/verdict/{rank}")) for rank in range(self.world.size)]


def judge_trial(code: int, result: Path, log: Path, head_room: float, *, no_memory: bool = False) -> dict[str, Any]:
    """Return the verdict on a child that has ended; `no_memory`: the machine ran out of memory meanwhile."""
    if not result.is_file():
        if code == -signal.SIGKILL and no_memory:
            return {"verdict": "out of memory", "why": "killed by the kernel, since the host's memory was used up"}
        if code == -signal.SIGKILL:
            why = "somebody ended the process; the kernel does so too when the host's memory is used up"
            return {"verdict": "killed (signal 9)", "why": why}
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        return {"verdict": "failed", "why": f"the process ended with {end}: {lines[-1][:500] if lines else 'no word'}"}
    found = json.loads(result.read_text())
    status = found.pop("status")
    if status != "ok":
        lost = found.get("lost") and not found.get("wrong_input")  # a port that is taken loses connections, too
        verdict = "out of memory" if status == "oom" else "lost" if lost else status
        return {"verdict": verdict, "why": found.get("error", "")}
    if found["retries"]:
        why = f"the allocator had to free its cache {found['retries']} times to find memory"
        return found | {"verdict": "allocator retries", "why": why}
    if share_of(found) > 1 - head_room:
        why = f"{share_of(found):.1%} of the memory was in use, which leaves less than {head_room:.0%}"
        return found | {"verdict": "head-room", "why": why}
    return found | {"verdict": "ok", "why": ""}


def share_of(found: dict[str, Any]) -> float:
    """Return the share of memory that the allocator had reserved at most, or that was in use at the end if more."""
    return max(found["reserved"], found.get("used", 0)) / found["memory"]


def decide(verdicts: Sequence[dict[str, Any]], size: int, seconds: float) -> Trial:
    """Make one decision of the verdicts of all ranks: the first of the worst."""
    rank = min(range(len(verdicts)), key=lambda number: get_args(Verdict).index(verdicts[number]["verdict"]))
    worst = verdicts[rank]
    measured = [found for found in verdicts if "reserved" in found]

    def most(name: str, scale: float = 1.0) -> float | None:
        return max(found[name] for found in measured) / scale if measured else None

    return Trial(
        size=size,
        verdict=worst["verdict"],
        rank=rank,
        why=worst["why"],
        seconds=seconds,
        step_seconds=most("step_seconds"),
        allocated_gib=most("allocated", 2**30),
        reserved_gib=most("reserved", 2**30),
        share=max(map(share_of, measured)) if measured else None,
        device=measured[0]["device"] if measured else None,
    )
