"""The cache folder, and copies that vitrail keeps: what is used of them is this user's own and as it was written.

- what was found out before is kept with its version and a digest; what is damaged, somebody else's, a link, a pipe or a
  folder is done without and written anew: a cache costs time, never the run
- of a copy a record is kept: its size, times and inode, which tell that nobody has touched it, and its CRC-32, which is
  compared where they do not
- other users can make files of the same name, size and time, but not with this user as the owner
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vitrail.disk import appending, replacing, sweep
from vitrail.errors import UserError
from vitrail.sums import check_version, sum_of_file

T = TypeVar("T")

VERSION = 1
LARGEST = 2**30  # bytes of a file that is read as a whole
HEAD = b"vitrail-cache"
WRONG = (OSError, ValueError, EOFError, TypeError, KeyError, AttributeError, IndexError)  # of content that is not ours

log = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """Return a folder of the cache, made if need be: $VITRAIL_CACHE/NAME, else ~/.cache/vitrail/NAME."""
    given = os.environ.get("VITRAIL_CACHE")
    folder = (Path(given) if given else Path.home() / ".cache" / "vitrail") / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set VITRAIL_CACHE to a folder of yours"
        ) from error
    return folder


def keep(name: str, key: str, make: Callable[[], bytes], check: Callable[[bytes], T], *, wait: bool = True) -> T:
    """Return the bytes kept in a folder of the cache under a key, or those made now and kept, as `check` reads them.

    Where several processes share a cache, one makes them and the others `wait`. No cache costs time, not the run.
    """
    mark = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    with contextlib.ExitStack() as stack:
        try:
            place = cache_folder(name) / mark
            if wait:
                lock = stack.enter_context(appending(place.with_suffix(".lock")))
                with contextlib.suppress(OSError):  # not every file system has locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
        except (UserError, OSError):
            return check(make())
        with contextlib.suppress(OSError):
            sweep(place.parent)  # also by a call that finds what it needs: it may be the only one that ever comes
        try:
            return check(_open(read_own(place), place))
        except UserError as error:
            log.warning("%s; it is done without", error)
            return check(make())
        except WRONG:
            pass
        made = make()
        with contextlib.suppress(OSError, UserError), replacing(place, durable=False) as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the mask: nobody else may know it, or change it
            file.write(HEAD + f" {VERSION} {_digest(made)}\n".encode() + made)
        return check(made)


def _open(content: bytes, place: Path) -> bytes:
    """Return what was kept, without its head; ValueError where it is not as it was written, UserError if newer."""
    head, _, rest = content.partition(b"\n")
    word, version, digest = head.split(b" ")
    if word != HEAD:
        raise ValueError("nothing that was kept here")
    if digest.decode() != _digest(rest):
        raise ValueError("damaged")
    check_version(int(version), VERSION, str(place))
    return rest


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# ---------------------------------------------------------------- files of this user's own


def is_own(found: os.stat_result) -> bool:
    """Tell whether something is this user's, and nobody else may write it."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_own(path: Path) -> bytes:
    """Read a plain file of this user's own; OSError where it is anything else, and no pipe keeps it waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or not is_own(found) or found.st_size > LARGEST:
            raise PermissionError(f"{path} is not a plain file that only this user may write")
        return file.read()


def record_of(path: Path, total: int) -> dict[str, int]:
    """Return what tells a copy whose CRC-32 is known from what others may put in its place."""
    return {**_facts(os.lstat(path)), "crc32": total}


def is_as_recorded(path: Path, record: Any) -> bool:
    """Tell whether a copy is the one that was made; its bytes are compared only where it may have been touched."""
    try:
        found = os.lstat(path)
        if not isinstance(record, dict) or not stat.S_ISREG(found.st_mode) or not is_own(found):
            return False
        if all(record.get(name) == value for name, value in _facts(found).items()):
            return True
        return record.get("size") == found.st_size and record.get("crc32") == sum_of_file(path)
    except OSError:
        return False


def _facts(found: os.stat_result) -> dict[str, int]:
    """Return facts of a file; of these, no user can set the time of their last change."""
    return {
        "size": found.st_size,
        "time": found.st_mtime_ns,
        "changed": found.st_ctime_ns,
        "inode": found.st_ino,
    }
