"""Why a job of several ranks ends: told once, by name, with what may help to find the cause.

- The first rank that fails writes its cause into the store that all ranks share, and so does a rank that finds its
  neighbour dead. The first cause stands; survivors repeat it in one line a host, and do not guess.
- torchrun repeats a sentence that it finds in TORCHELASTIC_ERROR_FILE, in the place of a hint at its documentation.
- PyTorch's flight recorder keeps the latest collectives of each rank, over NCCL and gloo; it is written on a hang.

Nothing here imports torch before it is needed: the command line reports its errors through this file too.
"""

import contextlib
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.credentials import strip
from vitrail.errors import UserError

# What the end of another rank looks like from here; anything else that a backend says is this rank's own trouble.
LOST = (
    "connection closed by",
    "connection refused",
    "connection reset",
    "connect failure",
    "broken pipe",
    "pair closure",
    "timed out waiting",
)
LOST_OVER_NCCL = ("ncclremoteerror", "remote process exited", "timed out", "timeout", "aborted")
LONGEST = 400  # characters of a cause


@dataclass(frozen=True)
class Cause:
    """The first failure of a job."""

    rank: int  # of the one that failed
    why: str
    teller: int  # the rank that says so

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


class Board:
    """Where ranks tell each other the first cause of their end: a few keys of the store of this attempt."""

    def __init__(self, store: Any, rank: int):
        self.store, self.rank = store, rank
        self._processes: dict[int, Any] = {}  # what other ranks have said of theirs, which does not change

    def tell(self, rank: int, why: str) -> Cause:
        """Name a cause; returns the first that was named. Without a store that answers it is this one."""
        mine = Cause(rank, why[:LONGEST], self.rank)
        try:
            return Cause(**json.loads(self.store.compare_set("failed", "", json.dumps(asdict(mine)))))
        except Exception:
            return mine

    def read(self) -> Cause | None:
        return Cause(**json.loads(self.store.get("failed"))) if self.store.check(["failed"]) else None

    def is_mouth(self) -> bool:
        """Whether this rank is the first of its host that repeats the cause."""
        try:
            return self.store.add(f"told/{socket.gethostname()}", 1) == 1
        except Exception:
            return True

    def introduce(self) -> None:
        """Say which process this rank is, so that its neighbour can see whether it is alive."""
        self.store.set(f"process/{self.rank}", json.dumps([name_machine(), os.getpid(), socket.gethostname()]))

    def find_dead(self, rank: int) -> str | None:
        """What is left of another rank, if it runs on this machine and is no more."""
        if rank not in self._processes:
            if not self.store.check([f"process/{rank}"]):
                return None
            self._processes[rank] = json.loads(self.store.get(f"process/{rank}"))
        machine, number, host = self._processes[rank]
        if not machine or machine != name_machine() or is_alive(number):
            return None
        return (
            f"(process {number} on {host}) died without a word: it was killed, ran out of memory or crashed; "
            "see its last lines and the messages of the kernel there"
        )


@functools.cache
def name_machine() -> str:
    """The same for two processes that see each other's numbers; empty where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_alive(number: int) -> bool:
    try:
        return Path("/proc", str(number), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def is_lost_connection(error: BaseException) -> bool:
    """What gloo, NCCL and the store say on the ranks that survive another."""
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    text = str(error).lower()
    if isinstance(error, dist.DistBackendError):  # no memory, a GPU used twice: these are nobody else's
        return any(words in text for words in LOST + LOST_OVER_NCCL)
    return isinstance(error, dist.DistError) or any(words in text for words in LOST)


def holds_store(rank: int) -> bool:
    """Whether the store ends with this rank: the first holds it, unless torchrun does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The answer to a question that may never return; None after so many seconds, or if it fails."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(timeout=seconds)
    return answers[0] if answers else None


def summary(error: BaseException) -> str:
    """An error in one line."""
    text = strip(" ".join(str(error).split()))
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


_said: set[str] = set()  # errors that this rank has shown, or need not show because another has


def say(message: str, *, aloud: bool = True) -> None:
    """Show an error now, since a launcher may end this process before it gets to its last line."""
    _said.add(message)
    if aloud:
        print(f"error: {message}", file=sys.stderr, flush=True)


def was_said(message: str) -> bool:
    """Whether an error that reaches the command line has been shown; asked once."""
    known = message in _said
    _said.discard(message)
    return known


def tell_launcher(message: str) -> None:
    """Leave a sentence where torchrun looks for one; the first stands."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and message and not os.path.exists(path):
        told = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            disk.write_whole(path, json.dumps(told), durable=False)


# ---------------------------------------------------------------- the flight recorder


def record_collectives() -> None:
    """Have PyTorch keep the latest collectives of this process; to be called before its process group starts."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its name before PyTorch 2.8
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


_chosen: set[str] = set()  # places of dumps that were set here, not by the user: the next run has another


def keep_collectives(folder: Path) -> None:
    """Have NCCL's own watchdog write into the folder, too, if it ends the process before ours does."""
    import torch

    name = "TORCH_FR_DUMP_TEMP_FILE"
    taken = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in os.environ or os.environ.get(name) not in (None, *_chosen)
    if torch.cuda.is_available() and not taken:
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            os.environ[name] = f"{folder}/nccl_rank_"
            _chosen.add(os.environ[name])


def dump_collectives(folder: Path, rank: int) -> bool:
    """Write what the flight recorder holds, in the format of PyTorch's `torchfrtrace`; whether there was anything."""
    import torch.distributed as dist

    if not dist.is_available():
        return False
    from torch._C import _distributed_c10d as internals

    written = False
    for prefix, name in (("nccl", "_dump_nccl_trace"), ("gloo", "_dump_fr_trace")):
        # Neither is public, and a build has only those of its backends.
        dump: Callable[[], bytes] | None = getattr(internals, name, None)
        held = within(10.0, dump) if dump is not None else None
        if held:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                disk.write_whole(folder / f"{prefix}_rank_{rank}", held, durable=False)
                written = True
    return written
