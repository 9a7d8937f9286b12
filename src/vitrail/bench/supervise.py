"""Trials on every rank at once: each launched rank watches over a child that computes, and never touches the device.

- all ranks start a child for the same trial, which meet at a port of their own
- a rank whose child runs out of memory, dies or takes too long says so in the store; the others then end theirs
- every rank reads the verdicts of all, so that all come to the same decision, and nobody waits in a collective
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from vitrail import disk
from vitrail.bench.kills import oom_kills
from vitrail.errors import RunFailed
from vitrail.launch.world import SECRET, World

Verdict = Literal[
    "ok", "out of memory", "allocator retries", "head-room",
    "killed (signal 9)", "too slow", "failed", "lost", "stopped",
]  # fmt: skip

# Which verdict stands for all ranks: a rank that was left by another, or stopped for another, only follows.
ORDER: tuple[Verdict, ...] = (
    "out of memory", "allocator retries", "head-room",
    "killed (signal 9)", "failed", "too slow", "lost", "stopped", "ok",
)  # fmt: skip
TOO_LARGE: tuple[Verdict, ...] = ("out of memory", "allocator retries", "head-room")
LOOK = 0.05  # seconds between two looks at the child
GRACE = 2.0  # seconds in which a child may end by itself, after the trial has failed elsewhere
PATIENCE = 60.0  # seconds to wait for other ranks' verdicts, beyond the limit of a trial
PORT_TAKEN = "is in use by another program"


@dataclass(frozen=True)
class Trial:
    """What all ranks found out about one size, the same on every rank."""

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
        """Some steps of a recipe on all ranks."""
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
        self.store.set(f"{name}/verdict/{self.world.rank}", json.dumps(found))
        self.store.add(f"{name}/judged", 1)
        return decide(self._wait_for_all(name), size, time.monotonic() - began)

    def _watch(self, order: dict[str, Any], folder: Path, name: str, env: dict[str, str]) -> dict[str, Any]:
        """Start a child and wait until it has ended, here or because of another rank; what became of it."""
        disk.write_whole(folder / "order.json", json.dumps(order), durable=False)
        result, log = folder / "result.json", folder / "log"
        words = [sys.executable, "-m", "vitrail.bench.trial", str(folder / "order.json"), str(result)]
        deadline, leave_at = time.monotonic() + self.limit, None
        kills = oom_kills()
        with disk.appending(log) as out:
            child = subprocess.Popen(
                words, env=env, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while child.poll() is None:
                    now = time.monotonic()
                    if leave_at is None and self.store.add(f"{name}/bad", 0):
                        leave_at = now + GRACE
                    if leave_at is not None and now > leave_at:
                        return {"verdict": "stopped", "why": "ended, since another rank had failed"}
                    if now > deadline:
                        found = {"verdict": "too slow", "why": f"{order['steps']} steps took over {self.limit:.0f} s"}
                        self.store.add(f"{name}/bad", 1)
                        return found
                    time.sleep(LOOK)
            finally:
                end_group(child)
        no_memory = kills is not None and (oom_kills() or 0) > kills
        found = judge(child.returncode, result, log, self.head_room, no_memory=no_memory)
        if found["verdict"] != "ok":
            self.store.add(f"{name}/bad", 1)
        return found

    def _wait_for_all(self, name: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + self.limit + PATIENCE
        while self.store.add(f"{name}/judged", 0) < self.world.size:
            if time.monotonic() > deadline:
                raise RunFailed("tune: not every rank told how its trial went; look for a rank whose process has ended")
            time.sleep(LOOK)
        return [json.loads(self.store.get(f"{name}/verdict/{rank}")) for rank in range(self.world.size)]


def judge(code: int, result: Path, log: Path, head_room: float, *, no_memory: bool = False) -> dict[str, Any]:
    """The verdict on a child that has ended; `no_memory`: the kernel has meanwhile killed something for memory."""
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
        verdict = "out of memory" if status == "oom" else status
        return {"verdict": verdict, "why": found.get("error", "")}
    if found["retries"]:
        why = f"the allocator had to free its cache {found['retries']} times to find memory"
        return found | {"verdict": "allocator retries", "why": why}
    if share_of(found) > 1 - head_room:
        why = f"{share_of(found):.1%} of the memory was in use, which leaves less than {head_room:.0%}"
        return found | {"verdict": "head-room", "why": why}
    return found | {"verdict": "ok", "why": ""}


def share_of(found: dict[str, Any]) -> float:
    """Of the memory: what the allocator had reserved at most, or all that was in use at the end where that is more."""
    return max(found["reserved"], found.get("used", 0)) / found["memory"]


def decide(verdicts: Sequence[dict[str, Any]], size: int, seconds: float) -> Trial:
    """One decision of the verdicts of all ranks: the first of the worst."""
    rank = min(range(len(verdicts)), key=lambda number: ORDER.index(verdicts[number]["verdict"]))
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


def free_place(world: World) -> tuple[str, int]:
    """Where the children can meet: a port of this host that nobody uses now."""
    with socket.socket() as listening:
        listening.bind(("", 0))
        port = listening.getsockname()[1]
    return ("localhost" if world.local_size == world.size else socket.gethostname()), port


def child_environment(host: str, port: int, secret: str) -> dict[str, str]:
    """This rank's environment with another meeting place, and nothing of torchrun's own store and restarts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    launched = any(name in kept for name in ("RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return kept | ({"MASTER_ADDR": host, "MASTER_PORT": str(port), SECRET: secret} if launched else {})


def end_group(child: "subprocess.Popen[bytes]") -> None:
    """End a child and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        child.stdin.close()
