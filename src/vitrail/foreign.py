"""Files that others made: opened only where they are plain files, and believed only within bounds.

- a FIFO, a device, a socket or a folder in place of a file is refused, never waited for; links to plain files are
  followed, because people link large data into place
- what a file says of its own sizes is compared with its bytes and with this machine's memory before anything is
  allocated
- what a file says of other files counts in its own folder alone, unless `--trust` is given; no recipe can say so

How much memory there is on the host, for this process and for one piece of data.
"""

import contextlib
import errno
import json
import os
import resource
import stat
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from vitrail.errors import BadData

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container or a job


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container or job where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(int(limit) for limit in map(_read, LIMITS) if limit.isdigit())])


@cache
def room() -> int:
    """Return the bytes that one piece of data may take: half of the memory that this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(memory_bytes(), limit if limit > 0 else 2**63) // 2


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


METADATA = 16 << 20  # bytes; no list of facts is larger
BEST_PACKED = 1032  # bytes that can come of one of gzip, zip or PNG: deflate does no better
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@contextlib.contextmanager
def trusted(trust: bool = True) -> Iterator[None]:
    """Let data opened in here read what they name anywhere, if `trust` is set: for those who said `--trust`."""
    token = _trusting.set(trust or _trusting.get())
    try:
        yield
    finally:
        _trusting.reset(token)


def is_trusting() -> bool:
    return _trusting.get()


# ------------------------------------------------------------ plain files


def check_plain(path: str | Path) -> None:
    """Refuse what is there but no plain file; whoever opens it next would wait, or read without an end."""
    with contextlib.suppress(FileNotFoundError):
        _refuse(path, os.stat(path).st_mode)


def open_plain(path: str | Path) -> BinaryIO:
    """Open a plain file for reading bytes."""
    return open(path, "rb", opener=_open)


def open_descriptor(path: str | Path) -> int:
    """Open a plain file for reading; return its descriptor."""
    return _open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_plain(path: str | Path, most: int = METADATA) -> bytes:
    """Read a plain file that may not be larger than `most`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise BadData(f"{path} has {size:,} bytes, more than the {most:,} that such a file can need; restore it")
        return file.read(most + 1)


def _open(path: str | Path, flags: int) -> int:
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # else the open of a FIFO waits for its writer
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            _refuse(path, os.stat(path).st_mode)
        raise
    try:
        _refuse(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _refuse(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise BadData(f"{path} is {kind}, not a plain file; restore it, or leave it out")


# ------------------------------------------------------------ what files say


def parse_json(content: bytes | str) -> Any:
    """Read the value of a JSON text; ValueError for whatever is wrong with it, keys that are given twice too."""
    try:
        return json.loads(content, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def read_json(path: str | Path) -> Any:
    """Read the value in a small plain file of JSON; ValueError for what is wrong with its text."""
    return parse_json(read_plain(path))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # programs differ in which of them counts
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def check_room(name: str, size: int) -> None:
    """Refuse a piece that must lie in memory at once and says that it is larger than half of it."""
    if size > room():
        raise BadData(
            f"{name} says that it takes {size / 2**30:,.3g} GiB at once, more than half of this machine's memory "
            f"({room() / 2**30:,.3g} GiB); restore it, save it in smaller pieces, or leave it out"
        )


def named_file(file: str | Path, name: str) -> Path:
    """Return the file that another one names, in that one's folder or below it; elsewhere with `--trust` alone."""
    folder, given = Path(os.path.abspath(file)).parent, PurePosixPath(name)
    place = folder / given
    if not is_trusting() and (".." in given.parts or not place.is_relative_to(folder) or "://" in name):
        raise BadData(
            f"{file} names the file {name!r}, which does not lie in its own folder; copy it there, or give --trust if "
            "you know who made the file"
        )
    check_plain(place)
    return place
