"""The end of a run before its time: stop signals, hangs, and ranks that fail, each told once and by name.

- The first rank that fails writes its cause into the store that all ranks share, and so does a rank that finds its
  neighbour dead. The first cause stands; survivors repeat it in one line a host, and do not guess.
- A watchdog on every rank ends it when it hangs, and finds the rank at fault.
- torchrun repeats a sentence that it finds in TORCHELASTIC_ERROR_FILE, in the place of a hint at its documentation.
- PyTorch's flight recorder keeps the latest collectives of each rank, over NCCL and gloo; it is written on a hang.

Nothing here imports torch before it is needed: the command line reports its errors through this file too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from vitrail import disk
from vitrail.credentials import strip
from vitrail.errors import RunFailed, UserError
from vitrail.launch.world import find_world

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

# Words of a backend where another rank has ended; anything else that it says is this rank's own trouble.
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
    """Ranks tell each other the first cause of their end here, in a few keys of the store of this attempt."""

    def __init__(self, store: Store, rank: int):
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
        """Tell whether this rank is the first of its host that repeats the cause."""
        try:
            return self.store.add(f"told/{socket.gethostname()}", 1) == 1
        except Exception:
            return True

    def introduce(self) -> None:
        """Say which process this rank is, so that its neighbour can see whether it is alive."""
        self.store.set(f"process/{self.rank}", json.dumps([name_machine(), os.getpid(), socket.gethostname()]))

    def find_dead(self, rank: int) -> str | None:
        """Describe the end of another rank, if it ran on this machine and is dead; None otherwise."""
        if rank not in self._processes:
            if not self.store.check([f"process/{rank}"]):
                return None
            self._processes[rank] = json.loads(self.store.get(f"process/{rank}"))
        machine, number, host = self._processes[rank]
        if not machine or machine != name_machine() or is_alive(number):
            return None
        return (
            f"(process {number} on {host}) died without a word: it was killed, ran out of memory or crashed. "
            "The launcher names the signal (-9: killed, -11: crashed); whether it was for want of memory, the kernel "
            f"says: dmesg -T | grep -i 'killed process', on {host}"
        )


@functools.cache
def name_machine() -> str:
    """Return a name that two processes share if they see each other's numbers; empty where that cannot be known."""
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
    """Tell whether gloo, NCCL or the store raised an error because another rank has ended."""
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    text = str(error).lower()
    if isinstance(error, dist.DistBackendError):  # no memory, a GPU used twice: these are nobody else's
        return any(words in text for words in LOST + LOST_OVER_NCCL)
    return isinstance(error, dist.DistError) or any(words in text for words in LOST)


def holds_store(rank: int) -> bool:
    """Tell whether the store ends with this rank: the first holds it, unless torchrun does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the answer to a question that may never return; None after so many seconds, or if it fails."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(timeout=seconds)
    return answers[0] if answers else None


def summary(error: BaseException) -> str:
    """Put an error into one line."""
    text = strip(" ".join(str(error).split()))
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}".rstrip(": ")


_said: set[str] = set()  # errors that this rank has shown, or need not show because another has


def say(message: str, *, aloud: bool = True) -> None:
    """Show an error now, since a launcher may end this process before it gets to its last line."""
    _said.add(message)
    if aloud:
        print(f"error: {message}", file=sys.stderr, flush=True)


def was_said(message: str) -> bool:
    """Tell, once, whether an error that reaches the command line has been shown."""
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
    """Write what the flight recorder holds, for PyTorch's `torchfrtrace`; returns whether there was anything."""
    from vitrail.training.private import recorded_collectives

    written = False
    for backend, dump in recorded_collectives().items():
        held = within(10.0, dump)
        if held:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                disk.write_whole(folder / f"{backend}_rank_{rank}", held, durable=False)
                written = True
    return written


SILENT = "has fallen silent (stopped, swapped out or lost)"
NO_STORE = "the process that holds the shared store does not answer"
STORE_GONE = "is gone, and with it the store that all ranks share: it was killed, ran out of memory or crashed"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
FLIGHTS = "flight-recorder"  # folder of a run with the latest collectives of its ranks

# Seconds without a sign of life before a phase counts as a hang, where it may take longer than steps do.
SLOW_PHASE = 1800.0
OPENING = 6 * 3600.0  # large folders are scanned, locks are waited for
PHASES = {
    **dict.fromkeys(("start", "staging", "validation", "drawing", "sampling", "saving"), SLOW_PHASE),
    **dict.fromkeys(("measuring", "profiling", "predicting", "embedding"), SLOW_PHASE),
    **dict.fromkeys(("opening the data", "encoding"), OPENING),
}

REQUEUE = 75  # exit code of a run that was stopped and can be continued


def listen(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Have stop signals handled; returns what handled them before. A run under nohup goes on when its terminal ends."""
    wanted = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}


def put_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def ready_to_stop() -> Iterator[None]:
    """Let a stop signal end the process as a stopped run, while there is nothing to save yet (imports, connecting)."""

    def leave(number: int, _frame: FrameType | None) -> None:
        # A launcher ends the other ranks with SIGTERM when one has failed: that must not look like a wish to go on.
        os._exit(128 + number if number == signal.SIGTERM and _has_others() else REQUEUE)

    previous = listen(leave)
    try:
        yield
    finally:
        put_back(previous)


def _has_others() -> bool:
    try:
        return find_world().size > 1
    except UserError:
        return True


class StopRequest:
    """Notes a stop signal; the loop asks at every step, and all ranks agree. A second SIGINT ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._previous = listen(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        put_back(self._previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


class Watchdog:
    """Ends the process when no step has passed for max(`least` seconds, 10 median steps), and names the rank at fault.

    Two threads on every rank: one publishes its progress and listens to the next rank, the other judges. So a rank that
    has fallen silent (stopped, swapped out) is found by the one before it within `least` seconds, in every phase, and
    one that has died on the same host at once; and when all still talk but none moves, the rank that is furthest
    behind is the one that the rest wait for. Whatever ends a rank, `explain` finds the first cause for it.
    """

    EXIT_CODE = 1
    MANY_STEPS = 10
    PATIENCE = 5.0  # seconds that the store may take to say who is to blame
    SILENCE = 4.0  # seconds without a sign of life, once a connection was lost
    GRACE = 10.0  # seconds to end by itself, once another rank has failed
    SAVING = SLOW_PHASE  # the same, while a save is under way that the failed rank takes part in
    FAREWELL = 10.0  # seconds that ranks which have ended in order wait for the first one's last words
    LEFT = b"left"  # what a rank says when it has ended in order

    def __init__(self, store: Store, rank: int, world: int, *, least: float = 60.0):
        self.store: Store = store.clone() if world > 1 and hasattr(store, "clone") else store
        self.rank, self.world, self.least = rank, world, least
        self.next = (rank + 1) % world
        self.board = Board(self.store, rank)
        self.step, self.phase = -1, "start"
        self.folder: Path | None = None  # of the run, once it has begun
        self.saving: Callable[[], bool] = lambda: False  # whether a checkpoint is being written
        self._beat = time.monotonic()
        self._durations: deque[float] = deque(maxlen=50)
        self._allowance: float | None = None
        self._pause = min(1.0, least / 10)
        self._silence = 0.0  # seconds that the next rank has said nothing, while the store answered
        self._cause: Cause | None = None  # the first failure, as soon as this rank knows of it
        self._explained = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Watchdog:
        if self.world > 1:
            for task in (self._talk, self._watch):
                thread = threading.Thread(target=task, name=f"vitrail-watchdog{task.__name__}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            told = self.explain(error)[0] if error is not None else None
            if told is not error and told is not None:
                raise told from error
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(timeout=5)
            if error is not None and self.world > 1 and holds_store(self.rank):
                atexit.register(self._wait_for_others)  # they want to read why; its own words come first

    def keep_traces(self, run_dir: Path) -> None:
        """Keep what a hang leaves behind in the folder of the run, which exists from now on."""
        self.folder = run_dir
        if self.world > 1:
            keep_collectives(run_dir / FLIGHTS)

    def beat(self, step: int, phase: str, *, allowance: float | None = None) -> None:
        """Note that progress was made; `allowance` is another limit than the usual one of a phase."""
        now = time.monotonic()
        if step > self.step >= 0 and self.phase != "start":
            self._durations.append(now - self._beat)
        self._beat, self.step, self.phase = now, step, phase
        self._allowance = PHASES.get(phase) if allowance is None else allowance

    @property
    def limit(self) -> float:
        if self._allowance is not None:
            return max(self.least, self._allowance)
        usual = statistics.median(self._durations) if self._durations else 0.0
        return max(self.least, self.MANY_STEPS * usual)

    # ------------------------------------------------------------ the end of a rank

    def explain(self, error: BaseException) -> tuple[BaseException, str]:
        """Return what to raise instead of an error, and its story; what another rank has said is not shown again."""
        if self._explained or self.world == 1:
            return error, summary(error)
        self._explained = True
        if is_lost_connection(error):
            return self._follow(error)
        text = summary(error).removeprefix(f"rank {self.rank}: ")
        why = f"failed in {self.phase} of step {self.step}: {text}"
        told = within(self.PATIENCE, lambda: self.board.tell(self.rank, why))
        tell_launcher(f"rank {self.rank} {why}")
        story = summary(error)
        first = told.why.partition(": ")[2] if told is not None and told.teller != self.rank else ""
        same = bool(first) and (first in text or text in first)
        if not isinstance(error, UserError):
            if same and isinstance(error, Exception):  # one traceback is enough
                error = RunFailed(f"rank {self.rank} {why}")
                say(str(error), aloud=False)
            else:
                error.add_note(f"rank {self.rank} {why}")
        elif not str(error).startswith("rank "):  # likely the same on all; if not, the survivors say whose it was
            if self.rank != 0:
                say(str(error), aloud=False)
        elif same:
            say(str(error), aloud=False)
        return error, story

    def _follow(self, error: BaseException) -> tuple[BaseException, str]:
        """Find out which rank has ended and why, where this one ends because of it."""
        cause = self._find_cause()
        if cause is None:
            why = f"lost touch with another rank, which has not said why: {summary(error)}"
            story, heard = f"rank {self.rank} {why}", True
            told = within(self.PATIENCE, lambda: self.board.tell(self.rank, why))
            cause = told if told is not None and told.teller != self.rank else None
        if cause is not None:
            story = f"rank {self.rank} ended because {cause}"
            heard = bool(within(self.PATIENCE, self.board.is_mouth))
        tell_launcher(story)
        say(story, aloud=heard)
        return RunFailed(story), story

    def _find_cause(self) -> Cause | None:
        """Return the first failure, when others have had the time to tell or to be found silent."""
        silence = max(self.SILENCE, 4 * self._pause)
        deadline = time.monotonic() + silence + self.PATIENCE
        while self._cause is None and time.monotonic() < deadline:
            if within(self.PATIENCE, self._look) is None:
                return Cause(0, STORE_GONE, self.rank) if self.rank and holds_store(0) else None
            if self._silence > silence:
                self._cause = self.board.tell(self.next, SILENT)
            time.sleep(0.05)
        return self._cause

    def _look(self) -> bool:
        """Read the first cause, or find that the next rank is one."""
        self._cause = self._cause or self.board.read()
        if self._cause is None:
            remains = self.board.find_dead(self.next)
            if remains is not None and not self._has_left(self.next):
                self._cause = self.board.tell(self.next, remains)
        return True

    def _has_left(self, rank: int) -> bool:
        name = f"beat/{rank}"
        return self.store.check([name]) and self.store.get(name) == self.LEFT

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + self.PATIENCE
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and not all(map(self._has_left, range(1, self.world))):
                time.sleep(0.1)

    def part(self) -> None:
        """Wait, after an orderly end, until rank 0 has said its last words; the last that a process does.

        A launcher ends all ranks as soon as one has ended with another code than 0, and 75 is one.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process is about to end, with a code of its own
        deadline = time.monotonic() + self.FAREWELL
        with contextlib.suppress(Exception):  # a store that is gone has gone with rank 0
            if self.rank == 0:
                self.store.set("over", "1")
            while not self.store.check(["over"]) and time.monotonic() < deadline:
                time.sleep(0.05)

    # ------------------------------------------------------------ the two threads

    def _talk(self) -> None:
        """Publish this rank's progress and listen to the next rank; may block for as long as the store does."""
        mine, other = f"beat/{self.rank}", f"beat/{self.next}"
        heard: bytes | None = None
        changed = asked = time.monotonic()
        introduced = met = False
        while not self._stop.wait(self._pause):
            try:
                if not introduced:
                    self.board.introduce()
                    introduced = True
                self.store.set(mine, json.dumps([self.step, self.phase, time.time()]))
                met = met or self.store.check([other])
                told = self.store.get(other) if met else None
                self._look()
            except Exception:  # the store's host is gone: its own end is reported by whoever started it
                continue
            before, asked = asked, time.monotonic()
            # A long time between two questions is no silence of the other: the store or this process stood still.
            if told is None or told == self.LEFT or told != heard or asked - before > self._pause + 5:
                changed = asked
            heard, self._silence = told, asked - changed
        try:
            self.store.set(mine, self.LEFT.decode())
        except Exception:
            return

    def _watch(self) -> None:
        looked = time.monotonic()
        known: float | None = None
        while not self._stop.wait(self._pause):
            before, looked = looked, time.monotonic()
            if looked - before > self._pause + 5:  # this process itself was stopped and goes on
                self._beat = looked
            if self._explained:  # it is about to end
                continue
            if self._cause is not None:
                known = looked if known is None else known
                # A rank that has told of its own failure lives, and waits for the same save.
                helped = self._cause.teller == self._cause.rank and self.saving()
                if looked - known > (self.SAVING if helped else self.GRACE):
                    self._end("could not go on", self._cause)
            elif looked - self._beat > self.limit:
                self._end(f"made no progress for {looked - self._beat:.0f} s", self._find_blame())
            elif self._silence > self.least:
                silent = Cause(self.next, SILENT, self.rank)
                self._end(f"waited {self._silence:.0f} s for a sign of life", silent)

    def _end(self, what: str, blame: Cause | str) -> None:
        """Leave a record and end the process, whatever the other threads do."""
        faulthandler.dump_traceback_later(60, exit=True)  # even if one of them never gives the interpreter back
        story = f"rank {self.rank} {what} in {self.phase} of step {self.step}; {blame}"
        first = self._cause is None or self._cause.rank == self.rank  # the one to blame says where it was, too
        if self._cause is None:
            mine = blame if isinstance(blame, Cause) else Cause(self.rank, f"{what}; {blame}", self.rank)
            cause = within(self.PATIENCE, lambda: self.board.tell(mine.rank, mine.why))
            first = cause is None or self.rank in (cause.teller, cause.rank)
        if self.folder is not None and dump_collectives(self.folder / FLIGHTS, self.rank):
            story += f" (its latest collectives are in {self.folder / FLIGHTS})"
        tell_launcher(story)
        if first:
            where = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])[-3:])
            print(f"error: {story}. It was here:\n{where}", file=sys.stderr, flush=True)
        elif within(self.PATIENCE, self.board.is_mouth) is not False:
            print(f"error: {story}", file=sys.stderr, flush=True)
        os._exit(self.EXIT_CODE)

    def _find_blame(self) -> Cause | str:
        """Ask the store who is to blame, but not for ever; returns a sentence where nobody can be named."""
        return within(self.PATIENCE, self._blame) or NO_STORE

    def _blame(self) -> Cause | str:
        beats = {}
        for rank in range(self.world):
            try:
                if rank == self.rank or not self.store.check([f"beat/{rank}"]):
                    continue
                told = self.store.get(f"beat/{rank}")
                if told != self.LEFT:
                    beats[rank] = json.loads(told)
            except Exception:
                return NO_STORE
        silent = [r for r, (_, _, seen) in beats.items() if time.time() - seen > max(5.0, self.least / 4)]
        if silent:
            return Cause(silent[0], SILENT, self.rank)
        behind = min(beats, key=lambda r: beats[r][0], default=self.rank)
        if behind != self.rank and beats[behind][0] < self.step:
            return Cause(behind, f"is behind, in {beats[behind][1]} of step {beats[behind][0]}", self.rank)
        return "all other ranks answer, so this rank or a collective between them hangs"
