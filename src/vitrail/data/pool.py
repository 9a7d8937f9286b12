"""Threads that read: each job has a clock, and no job that hangs holds up the one who waits or the end of the process.

An executor of the standard library joins its threads when the interpreter ends, so that one stuck read would keep a
finished process alive; these threads are daemons, and are left behind when they do not end by themselves.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from vitrail.data.bad import SlowRead
from vitrail.errors import UserError

PATIENCE = 2.0  # seconds that threads get to end by themselves


class Stopped(Exception):
    """Nobody waits for this any more."""


class Job:
    """A call that a thread makes some time."""

    def __init__(self, call: Callable[[], Any], name: Callable[[], str]):
        self.call, self.name = call, name  # the name is for errors, and made when there is one
        self.future: Future[Any] = Future()
        self.began: float | None = None
        self.pool: Pool | None = None  # whose threads are to make the call

    def run(self) -> None:
        if self.future.done():  # abandoned
            return
        self.began = time.monotonic()
        try:
            self._tell(self.future.set_result, self._work())
        except BaseException as error:
            self._tell(self.future.set_exception, error)

    def _work(self) -> Any:
        return self.call()

    def _title(self) -> str:
        return self.name()

    def abandon(self) -> None:
        self._tell(self.future.set_exception, Stopped())

    def _tell(self, say: Callable[[Any], None], what: Any) -> None:
        try:
            say(what)
        except InvalidStateError:
            return  # abandoned before

    def result(self, limit: float) -> Any:
        """What came of it; after `limit` seconds of running, an error with its name.

        Until it has begun, others run in its place: then one of these is named.
        """
        while True:
            now = time.monotonic()
            for job in [self] if self.began is not None or self.pool is None else self.pool.running():
                ran = 0.0 if job.began is None else now - job.began
                if ran > limit and not self.future.done() and not job.future.done():
                    raise SlowRead(
                        f"{job._title()}: the read has not ended after {ran:.0f} s; check the disk or the network "
                        "behind it, or raise data.read_limit if it is that slow"
                    )
            ran = 0.0 if self.began is None else now - self.began
            try:
                return self.future.result(timeout=max(0.01, min(1.0, limit - ran)))
            except TimeoutError:
                if self.future.done():  # it is the job's own
                    raise


class Several(Job):
    """Short calls that a thread makes one after another, each with the whole clock; the result is a list."""

    def __init__(self, calls: Sequence[Callable[[], Any]], names: Sequence[Callable[[], str]]):
        super().__init__(calls[0], names[0])
        self._calls, self._names, self._at = calls, names, 0

    def _work(self) -> list[Any]:
        found = []
        for place, call in enumerate(self._calls):
            self._at, self.began = place, time.monotonic()
            found.append(call())
        return found

    def _title(self) -> str:
        return self._names[self._at]()


class Pool:
    """A few threads that take jobs in the order in which they came."""

    def __init__(self, threads: int, name: str = "vitrail-reader"):
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: look whether one is urgent, or the end
        self._urgent: deque[Job] = deque()
        self._open: set[Job] = set()
        self._lock = threading.Lock()
        self._closed = False
        names = [f"{name}-{number}" for number in range(threads)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # the system, or a limit of the user, allows no more
                self._threads = self._threads[:number]
                self.close()
                raise UserError(
                    f"data.workers: only {number} of {threads} threads could be started; set fewer"
                ) from None

    def submit(self, call: Callable[[], Any], name: Callable[[], str]) -> Job:
        return self.put(Job(call, name))

    def put(self, job: Job, *, urgent: bool = False) -> Job:
        """An urgent job comes before all that have not begun."""
        job.pool = self
        with self._lock:
            if self._closed:
                raise Stopped
            self._open.add(job)
            if urgent:
                self._urgent.append(job)
        self._jobs.put(None if urgent else job)
        return job

    def running(self) -> list[Job]:
        """Those that have begun and not ended."""
        with self._lock:
            return [job for job in self._open if job.began is not None]

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                urgent = self._urgent.popleft() if self._urgent else None
            for one in (urgent, job):
                if one is not None:
                    one.run()
                    with self._lock:
                        self._open.discard(one)
            if job is None and self._closed:
                return
            del job, urgent, one  # and with them what they have read, while this thread waits for the next

    def close(self) -> None:
        """Whoever waits for a job is set free; threads end after the job that they are at."""
        with self._lock:
            self._closed = True
            jobs = list(self._open)
        for job in jobs:
            job.abandon()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def timed(call: Callable[[], Any], name: Callable[[], str], limit: float) -> Any:
    """What a call returns, or an error with its name when it takes longer than it may."""
    pool = Pool(1)
    try:
        return pool.submit(call, name).result(limit)
    finally:
        pool.close()
