"""Threads that read: each job has a clock, and no job that hangs holds up the one who waits or the end of the process.

An executor of the standard library joins its threads when the interpreter ends, so that one stuck read would keep a
finished process alive; these threads are daemons, and are left behind when they do not end by themselves.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from vitrail.data.bad import SlowRead

PATIENCE = 2.0  # seconds that threads get to end by themselves


class Stopped(Exception):
    """Nobody waits for this any more."""


class Job:
    """A call that a thread makes some time."""

    def __init__(self, call: Callable[[], Any], name: Callable[[], str]):
        self.call, self.name = call, name  # the name is for errors, and made when there is one
        self.future: Future[Any] = Future()
        self.began: float | None = None

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
        """What came of it; after `limit` seconds of running, an error with its name."""
        while True:
            ran = 0.0 if self.began is None else time.monotonic() - self.began
            if ran > limit and not self.future.done():
                raise SlowRead(
                    f"{self._title()}: the read has not ended after {ran:.0f} s; check the disk or the network behind "
                    "it, or raise data.read_limit if it is that slow"
                )
            try:
                # Until it has begun, jobs before it run, which the one who waits has waited for or will name.
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
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._open: set[Job] = set()
        self._lock = threading.Lock()
        self._closed = False
        names = [f"{name}-{number}" for number in range(threads)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any], name: Callable[[], str]) -> Job:
        return self.put(Job(call, name))

    def put(self, job: Job) -> Job:
        with self._lock:
            if self._closed:
                raise Stopped
            self._open.add(job)
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            with self._lock:
                self._open.discard(job)
            del job  # and with it what it has read, while this thread waits for the next

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
