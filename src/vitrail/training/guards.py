"""What watches over a run: signals that ask it to stop, and a clock that ends it when it hangs."""

import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SILENT = "has fallen silent (stopped, swapped out or lost)"
NO_STORE = "the process that holds the shared store does not answer"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


REQUEUE = 75  # exit code of a run that was stopped and can be continued


@contextmanager
def ready_to_stop() -> Iterator[None]:
    """While there is nothing to save yet (imports, connecting), a stop signal ends the process as a stopped run."""
    previous = {number: signal.signal(number, lambda *_: os._exit(REQUEUE)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopRequest:
    """Notes a stop signal; the loop asks at every step, and all ranks agree. A second SIGINT ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


class Watchdog:
    """Ends the process when no step has passed for max(`least` seconds, 10 median steps), and names the rank at fault.

    Two threads on every rank: one publishes its progress and listens to the next rank, the other judges. So a rank that
    has fallen silent (stopped, swapped out) is found by the one before it within `least` seconds, in every phase; and
    when all still talk but none moves, the rank that is furthest behind is the one that the rest wait for.
    """

    EXIT_CODE = 1
    MANY_STEPS = 10
    PATIENCE = 5.0  # seconds that the store may take to say who is to blame
    LEFT = b"left"  # what a rank says when it has ended in order

    def __init__(self, store: Any, rank: int, world: int, *, least: float = 60.0):
        self.store = store.clone() if world > 1 and hasattr(store, "clone") else store
        self.rank, self.world, self.least = rank, world, least
        self.step, self.phase = -1, "start"
        self._beat = time.monotonic()
        self._durations: deque[float] = deque(maxlen=50)
        self._allowance: float | None = None
        self._pause = min(1.0, least / 10)
        self._silence = 0.0  # seconds that the next rank has said nothing, while the store answered
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Watchdog":
        if self.world > 1:
            for task in (self._talk, self._watch):
                thread = threading.Thread(target=task, name=f"vitrail-watchdog{task.__name__}", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def beat(self, step: int, phase: str, *, allowance: float | None = None) -> None:
        """Progress was made. `allowance` is a longer limit for a phase that is known to be slow (compiling, say)."""
        now = time.monotonic()
        if step > self.step >= 0 and self.phase != "start":
            self._durations.append(now - self._beat)
        self._beat, self.step, self.phase, self._allowance = now, step, phase, allowance

    @property
    def limit(self) -> float:
        if self._allowance is not None:
            return max(self.least, self._allowance)
        usual = statistics.median(self._durations) if self._durations else 0.0
        return max(self.least, self.MANY_STEPS * usual)

    def _talk(self) -> None:
        """Publish this rank's progress and listen to the next rank; may block for as long as the store does."""
        mine, other = f"beat/{self.rank}", f"beat/{(self.rank + 1) % self.world}"
        heard: bytes | None = None
        changed = asked = time.monotonic()
        while not self._stop.wait(self._pause):
            try:
                self.store.set(mine, json.dumps([self.step, self.phase, time.time()]))
                told = self.store.get(other) if self.store.check([other]) else None
            except Exception:  # the store's host is gone: its own end is reported by whoever started it
                continue
            before, asked = asked, time.monotonic()
            # A long time between two questions is no silence of the other: the store or this process stood still.
            if told is None or told == self.LEFT or told != heard or asked - before > self._pause + 5:
                changed = asked
            heard, self._silence = told, asked - changed
        try:
            self.store.set(mine, self.LEFT)
        except Exception:
            return

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._pause):
            before, looked = looked, time.monotonic()
            if looked - before > self._pause + 5:  # this process itself was stopped and goes on
                self._beat = looked
            if looked - self._beat > self.limit:
                self._end(f"made no progress for {looked - self._beat:.0f} s", self._find_blame())
            if self._silence > self.least:
                other = (self.rank + 1) % self.world
                self._end(f"waited {self._silence:.0f} s for a sign of life", f"rank {other} {SILENT}")

    def _end(self, what: str, blame: str) -> None:
        where = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])[-3:])
        print(
            f"error: rank {self.rank} {what} in {self.phase} of step {self.step}; {blame}. It was here:\n{where}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self.EXIT_CODE)

    def _find_blame(self) -> str:
        """Ask the store, but not for ever."""
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(self._blame()), daemon=True)
        asking.start()
        asking.join(timeout=self.PATIENCE)
        return answers[0] if answers else NO_STORE

    def _blame(self) -> str:
        beats = {}
        for rank in range(self.world):
            try:
                if rank == self.rank or not self.store.check([f"beat/{rank}"]):
                    continue
                beats[rank] = json.loads(self.store.get(f"beat/{rank}"))
            except Exception:
                return NO_STORE
        silent = [r for r, (_, _, seen) in beats.items() if time.time() - seen > max(5.0, self.least / 4)]
        if silent:
            return f"rank {silent[0]} {SILENT}"
        behind = min(beats, key=lambda r: beats[r][0], default=self.rank)
        if behind != self.rank and beats[behind][0] < self.step:
            return f"rank {behind} is behind, in {beats[behind][1]} of step {beats[behind][0]}"
        return "all other ranks answer, so this rank or a collective between them hangs"
