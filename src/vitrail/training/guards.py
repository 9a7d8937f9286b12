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
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


class Watchdog:
    """Ends the process when no step has passed for max(`least` seconds, 10 median steps), and names the rank at fault.

    A thread on every rank publishes its progress and watches the others'. The rank that is furthest behind, or
    that has fallen silent, is the one that the rest wait for.
    """

    EXIT_CODE = 1
    MANY_STEPS = 10

    def __init__(self, store: Any, rank: int, world: int, *, least: float = 60.0):
        self.store = store.clone() if world > 1 and hasattr(store, "clone") else store
        self.rank, self.world, self.least = rank, world, least
        self.step, self.phase = -1, "start"
        self._beat = time.monotonic()
        self._durations: deque[float] = deque(maxlen=50)
        self._allowance: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self.world > 1:
            self._thread = threading.Thread(target=self._watch, name="vitrail-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

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

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.least / 10)):
            waited = time.monotonic() - self._beat
            try:
                self.store.set(f"beat/{self.rank}", json.dumps([self.step, self.phase, time.time()]))
            except Exception:  # the store's host is gone: its own end is reported by whoever started it
                if waited <= self.limit:
                    continue
            if waited > self.limit:
                self._end(waited)

    def _end(self, waited: float) -> None:
        where = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])[-3:])
        print(
            f"error: rank {self.rank} made no progress for {waited:.0f} s in {self.phase} of step {self.step}; "
            f"{self._blame()}. It was here:\n{where}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(self.EXIT_CODE)

    def _blame(self) -> str:
        beats = {}
        for rank in range(self.world):
            try:
                if rank == self.rank or not self.store.check([f"beat/{rank}"]):
                    continue
                beats[rank] = json.loads(self.store.get(f"beat/{rank}"))
            except Exception:
                return "the process that holds the shared store does not answer"
        silent = [r for r, (_, _, seen) in beats.items() if time.time() - seen > max(5.0, self.least / 4)]
        if silent:
            return f"rank {silent[0]} has fallen silent (stopped, swapped out or lost)"
        behind = min(beats, key=lambda r: beats[r][0], default=self.rank)
        if behind != self.rank and beats[behind][0] < self.step:
            return f"rank {behind} is behind, in {beats[behind][1]} of step {beats[behind][0]}"
        return "all other ranks answer, so this rank or a collective between them hangs"
