"""Threads that read, the policy of bad data, and memory that is used again.

- sources raise `BadData` with a sentence that names the file, the key, the position, what is wrong and what to do;
  `MissingData` is for chunks that are not there: some writers leave out empty ones on purpose, so those alone may be
  filled, by their source. Errors of the file system that may pass are tried again before they become BadData
- each job has a clock, and no job that hangs holds up the one who waits or the end of the process: an executor of the
  standard library joins its threads when the interpreter ends, so that one stuck read would keep a finished process
  alive; these threads are daemons, and are left behind when they do not end by themselves
- fresh memory costs a page fault for every few KiB of it, so that batches get memory again once nobody holds it. It
  begins at a whole line of the processor's cache: short rows of it do not lie in one line more than they need
"""

import errno
import math
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from vitrail.errors import BadData, FailedRead, TooMuchBad, UserError
from vitrail.report.units import describe_most

T = TypeVar("T")

# Asking again gives the same answer.
FINAL = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
BEFORE_HANG = 0.8  # of the time after which a run counts as hanging
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds before a read is tried again; each wait is three times the one before


class ShortRead(OSError):
    """Fewer bytes or voxels than were asked for, without another error."""


class SlowRead(UserError):
    """A read that took longer than it may. Never skipped: whoever reads is still at it."""


@dataclass(frozen=True)
class Policy:
    """The policy of a loader for bad data: `data.bad` and its neighbours in a recipe."""

    on_bad: Literal["error", "skip", "fill"] = "error"
    most: int = 100  # samples that one rank may skip in a whole run
    retries: int = 3  # of reads that failed
    limit: float = 120.0  # seconds that one sample may take
    shared: bool = False  # whether other ranks read the same samples: all of them must skip the same ones

    @classmethod
    def of(cls, data: Any, *, hang_limit: float | None = None, shared: bool = False) -> "Policy":
        """Read the section `data` of a recipe; `hang_limit` is that of the run, where ranks wait for each other.

        By then the others would end the run because of this rank, without knowing of the file that it waits for.
        """
        limit = float(data.read_limit) if hang_limit is None else min(data.read_limit, BEFORE_HANG * hang_limit)
        return cls(data.bad, data.most_bad, data.retries, limit, shared)

    def skips(self, error: BadData) -> bool:
        return self.on_bad == "skip" and not (self.shared and isinstance(error, FailedRead))

    def or_none(self, call: Callable[[], T], told: set[str], warn: Callable[[BadData], None]) -> T | None:
        """Return what a read gives; None where its data are bad and may be left out, which is told once."""
        try:
            return call()
        except BadData as error:
            if not self.skips(error):
                raise
            if str(error) not in told:
                told.add(str(error))
                warn(error)
        return None


Skip = tuple[str, str]  # the item that a sample would have come from, and what is wrong with it


@dataclass
class Tally:
    """A count of the bad samples that one loader has skipped, by the item that each would have come from.

    Threads that read ahead meet bad samples some steps before their batch: these count at once towards the most, so
    that no more are read, and are told of with the batch.
    """

    before: Counter[str] = field(default_factory=Counter)  # in the run that goes on
    skipped: Counter[str] = field(default_factory=Counter)  # for batches that were handed out
    _met: Counter[str] = field(default_factory=Counter)
    _news: list[Skip] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return self.skipped.total()

    def meet(self, item: str, error: BadData, most: int) -> None:
        """Count a bad sample that was read; the one beyond the most is an error."""
        with self._lock:
            met = self.before + self._met
            if met.total() >= most:
                raise TooMuchBad(
                    f"{met.total()} samples were skipped{describe_most(met)}, as many as data.most_bad lets a run "
                    f"skip, and there is another bad one: {error}"
                ) from error
            self._met[item] += 1

    def take(self, skips: Sequence[Skip]) -> None:
        """Count what was skipped for a batch that is handed out."""
        with self._lock:
            self.skipped.update(item for item, _ in skips)
            self._news += skips

    def take_news(self) -> list[Skip]:
        """Return what has been skipped since this was asked for last."""
        with self._lock:
            news, self._news = self._news, []
        return news


def read_again(
    read: Callable[[], T], what: Callable[[], str], *, retries: int, wait: Callable[[float], None] = time.sleep
) -> T:
    """Try a read until it succeeds; an error of the file system that stays becomes one sentence about `what`."""
    pause = FIRST_WAIT
    for left in range(retries, -1, -1):
        try:
            return read()
        except (OSError, EOFError) as error:
            final = getattr(error, "errno", None) in FINAL
            if left and not final:
                wait(pause)
                pause = min(3 * pause, LONGEST_WAIT)
                continue
            raise FailedRead(f"{what()} cannot be read{_why(error, retries)}") from error
    raise AssertionError("a read ends with a result or an error")


def _why(error: OSError | EOFError, retries: int) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    file = f" ({name})" if name else ""
    if number in (errno.EACCES, errno.EPERM):
        return f"{file}: {said}; make it readable for this user, or leave it out"
    if number in FINAL:
        return f"{file}: {said}; was it moved or removed while it was in use?"
    tries = f" after {retries + 1} tries" if retries else ""
    return f"{tries}{file}: {said}; check the file and the disk or the network behind it, or raise data.retries"


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
        """Wait for what comes of it; after `limit` seconds of running, raise an error with its name.

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
        """Put a job last, or an urgent one before all that have not begun."""
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
        """List the jobs that have begun and not ended."""
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
        """Set free whoever waits for a job; threads end after the job that they are at."""
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
    """Return what a call gives, or raise an error with its name when it takes longer than it may."""
    pool = Pool(1)
    try:
        return pool.submit(call, name).result(limit)
    finally:
        pool.close()


LINE = 64  # bytes


def aligned(memory: np.ndarray, size: int) -> np.ndarray:
    """Return so many of some bytes, from a whole line on; there must be LINE more of them."""
    first = -memory.ctypes.data % LINE
    return memory[first : first + size]


class Buffers:
    """Arrays that are handed out, and handed out again when nothing but this list refers to their memory.

    Views of an array do refer to it, and so do tensors made of it: whoever still has a batch, keeps it as it is.
    """

    def __init__(self) -> None:
        self._known: list[np.ndarray] = []  # bytes, longest known first
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: np.dtype, *, limit: int) -> np.ndarray:
        """Return an array with whatever was in it before; beyond `limit` bytes in all, memory is not remembered."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            known = self._known
            free = [number for number in range(len(known)) if _holders(known, number) == _NONE]
            fitting = next((number for number in free if _room(known[number]) == size), None)
            if fitting is not None:
                return aligned(known[fitting], size).view(dtype).reshape(shape)
            total = size + sum(_room(array) for array in known)
            gone = 0
            for number in free:  # of other sizes
                if total > limit:
                    total -= _room(known.pop(number - gone))
                    gone += 1
            memory = np.empty(size + LINE, np.uint8)
            if total <= limit:
                known.append(memory)
            return aligned(memory, size).view(dtype).reshape(shape)


def _room(memory: np.ndarray) -> int:
    return memory.nbytes - LINE


def _holders(arrays: list[np.ndarray], number: int) -> int:
    return sys.getrefcount(arrays[number])


_NONE = _holders([np.empty(0)], 0)  # what is counted where nobody else holds an array
