"""Common parts of readers: libraries that may be absent, files that stay open, errors told with names.

- a file is opened when it is first read, and the ones used last stay open: a folder may hold more than a process may
- errors that may pass (a time-out, an I/O error) stay OSErrors, so that the reader tries again; others are BadData
"""

import contextlib
import importlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from vitrail.credentials import strip
from vitrail.data.files.paths import explained
from vitrail.errors import BadData, UserError
from vitrail.recipe.kinds import remedy

T = TypeVar("T")

OPEN_FILES = 32  # that stay open, for each thread or for all
WHOLE_BYTES = 2**30  # of items that are decoded whole and kept, over all sources


def library(module: str, kind: str) -> Any:
    """Import a library that only one kind of source needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise UserError(f"kind {kind!r} needs {missing}, which is not installed; {remedy(missing)}") from error


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """Tell whatever a library says of a broken file in one sentence with its name."""
    try:
        yield
    except (UserError, NameError):  # not of the file
        raise
    except MemoryError as error:
        raise UserError(f"{name} takes more memory than is free; free some, or save it in smaller pieces") from error
    except OSError as error:
        # Without a number of the system, or with one of its own, a library means what the file holds.
        if error.errno is None or error.errno < 0:
            raise _broken(name, error) from error
        with explained(name):
            raise
    except Exception as error:
        if isinstance(error, AssertionError) and _is_ours(error):
            raise
        raise _broken(name, error) from error


def _is_ours(error: Exception) -> bool:
    """Tell whether an error comes from this package's own lines: libraries assert what files hold, too."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__", "")).startswith("vitrail")


def _broken(name: str, error: Exception) -> BadData:
    words = strip(" ".join(str(error).split()).rstrip("."))
    return BadData(f"{name} cannot be read ({words or type(error).__name__}); restore or remove the file")


class Handles(Generic[T]):
    """The files used last, open. One each for every thread, for libraries whose files are not for many threads.

    What is dropped is closed by its last user: a file is never closed under a read.
    """

    def __init__(self, opener: Callable[..., T], *, per_thread: bool) -> None:
        self._opener, self._lock = opener, threading.Lock()
        self._store: Any = threading.local() if per_thread else type("Shared", (), {})()

    def __call__(self, *key: Any) -> T:
        with self._lock:  # opening is rare, and short
            known: OrderedDict[tuple, T] = self._store.__dict__.setdefault("known", OrderedDict())
            if key not in known:
                known[key] = self._opener(*key)
                if len(known) > OPEN_FILES:
                    known.popitem(last=False)
            known.move_to_end(key)
            return known[key]


def file_mark(place: str | Path) -> tuple[int, int]:
    """Return what tells a file from another one that has taken its place."""
    found = os.stat(place)
    return found.st_ino, found.st_mtime_ns


_maps: Handles[np.ndarray] = Handles(
    lambda place, mark, dtype, offset, shape, order: np.memmap(place, dtype, "r", offset, shape, order),
    per_thread=False,
)


class Mapped:
    """An array in one piece of a file, as a memory map, which must not be touched beyond the end of a shorter file."""

    def __init__(
        self, name: str, place: Path, dtype: np.dtype, offset: int, shape: Sequence[int], order: str = "C"
    ) -> None:
        self.name, self.place = name, place
        if offset < 0 or any(size < 0 for size in shape):
            raise BadData(
                f"{name} says that its shape is {list(shape)}, from byte {offset}; restore or remove the file"
            )
        self.end = offset + dtype.itemsize * math.prod(shape)
        with decoding(name):
            self._key = (place, file_mark(place), dtype, offset, tuple(shape), order)
            size = place.stat().st_size
        if size < self.end:
            raise BadData(f"{name} is cut short: {size} of {self.end} bytes; restore the file")

    def __call__(self) -> np.ndarray:
        with decoding(self.name):
            if self.place.stat().st_size < self.end:
                raise BadData(f"{self.name} has become shorter than {self.end} bytes since it was opened; restore it")
            return _maps(*self._key)


class Whole:
    """Arrays of formats without random access, decoded once and kept while there is room."""

    def __init__(self, limit: int = WHOLE_BYTES) -> None:
        self.limit, self._lock = limit, threading.Lock()
        self._known: OrderedDict[Any, Future[np.ndarray]] = OrderedDict()

    def __call__(self, key: Any, decode: Callable[[], np.ndarray]) -> np.ndarray:
        with self._lock:
            found = self._known.get(key)
            mine = found is None
            if found is None:
                found = self._known[key] = Future()
            self._known.move_to_end(key)
        if not mine:
            return found.result()  # another thread decodes it
        try:
            values = decode()
        except BaseException as error:
            with self._lock:
                self._known.pop(key, None)
            found.set_exception(error)
            raise
        found.set_result(values)
        with self._lock:
            done = [k for k, f in self._known.items() if f.done() and k != key]
            while done and self._bytes() > self.limit:
                del self._known[done.pop(0)]
        return values

    def _bytes(self) -> int:
        return sum(f.result().nbytes for f in self._known.values() if f.done() and f.exception() is None)


whole_items = Whole()


def default_axes(ndim: int) -> tuple[str, ...]:
    """Return axes of an array whose file does not name them."""
    return ("t", "c", "z", "y", "x")[-ndim:] if ndim != 4 else ("c", "z", "y", "x")
