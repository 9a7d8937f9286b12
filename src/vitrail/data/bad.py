"""What is wrong in the data themselves, found while they are read, and what a run does about it.

Sources raise `BadData` with a sentence that names the file, the key, the position, what is wrong and what to do.
`MissingData` is for chunks that are not there: some writers leave out empty ones on purpose, so those alone may be
filled, by their source. Errors of the file system that may pass are tried again before they become BadData.
"""

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vitrail.errors import BadData, FailedRead, UserError

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
    """What a loader does with bad data: `data.bad` and its neighbours in a recipe."""

    on_bad: Literal["error", "skip", "fill"] = "error"
    most: int = 100  # samples that one rank may skip
    retries: int = 3  # of reads that failed
    limit: float = 120.0  # seconds that one sample may take
    shared: bool = False  # whether other ranks read the same samples: all of them must skip the same ones

    @classmethod
    def of(cls, data: Any, *, hang_limit: float | None = None, shared: bool = False) -> "Policy":
        """What the section `data` of a recipe says; `hang_limit` is that of the run, where ranks wait for each other.

        By then the others would end the run because of this rank, without knowing of the file that it waits for.
        """
        limit = float(data.read_limit) if hang_limit is None else min(data.read_limit, BEFORE_HANG * hang_limit)
        return cls(data.bad, data.most_bad, data.retries, limit, shared)

    def skips(self, error: BadData) -> bool:
        return self.on_bad == "skip" and not (self.shared and isinstance(error, FailedRead))


@dataclass
class Tally:
    """What was wrong so far, as seen by one loader."""

    skipped: Counter[str] = field(default_factory=Counter)  # samples by the item that they would have come from
    news: list[str] = field(default_factory=list)  # sentences to show, one an item
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(self.skipped.values())

    def add(self, item: str, error: BadData, most: int) -> None:
        """Count a skipped sample; the one beyond the most is an error."""
        with self._lock:
            if self.total >= most:
                raise BadData(
                    f"{most} samples were skipped and there is another bad one: {error}; "
                    "mend the data, or raise data.most_bad if so many may be lost"
                ) from error
            if item not in self.skipped:
                self.news.append(f"bad data, another sample is taken instead: {error}")
            self.skipped[item] += 1

    def take_news(self) -> list[str]:
        with self._lock:
            news, self.news = self.news, []
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
