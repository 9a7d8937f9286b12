"""Copies of what a run reads, on a fast disk of each node: made once, kept, and opened instead of the originals.

- a copy lies below the folder under the full path of its original, so that names say where things come from
- of a stored array the files of the region and level that are read are copied, with the metadata around them; of other
  data the files that the source or its arrays tell of (masks, headers, parts and shards too), or all files of the
  folder; URLs, and entries with `stage: false`, are read where they are
- a file is copied under another name and renamed when it is whole; one that this user made, with the size and time of
  its original, is kept, so that a copy which was interrupted goes on
- the copies are this user's own, and nobody else may read them, whoever may read the originals; where others may write
  to the folder, they lie in one below it, `vitrail-` and the number of the user; each has a record in the lock's file,
  see cache.py, and one without is made anew
- a link that leads out of the data is followed only where their source says that it reads there; others are left out,
  or refused where the source does not say what it reads
- processes of a node take turns by a lock that ends with them: the first copies, the others find everything there
- nothing is deleted but unfinished copies of its own
"""

import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import stat
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from vitrail import disk
from vitrail.data.files.cache import is_as_recorded, is_own, record_of
from vitrail.data.files.fingerprint import needed_files
from vitrail.data.files.paths import is_url, local_path
from vitrail.data.files.patterns import fixed_part
from vitrail.data.reading.pool import Pool
from vitrail.errors import UserError
from vitrail.foreign import open_plain

LOCK = ".vitrail-stage.lock"
THREADS = 8
PIECE = 8 * 2**20  # bytes that are copied at once
STALLED = 300.0  # seconds without a byte, after which copying counts as stuck
SAME_TIME = 1_000_000  # nanoseconds that a file system may round a time by
EVERY = 5.0  # seconds between two lines of progress
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Copy:
    """A file, and where its copy goes."""

    original: Path
    target: Path
    size: int
    time: int  # of the last change, in nanoseconds

    def is_done(self, record: Any) -> bool:
        """Tell whether the copy that there is a record of is there, and of the original as it is now."""
        try:
            found = os.lstat(self.target)
        except (FileNotFoundError, NotADirectoryError):
            return False
        same = found.st_size == self.size and abs(found.st_mtime_ns - self.time) < SAME_TIME
        return same and is_as_recorded(self.target, record)


def configs_to_open(
    data: Any,  # the recipe's section
    configs: Sequence[Any],
    *,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    tick: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return sources as they are to be opened: staged, and with `missing: fill` under `data.bad: fill`."""
    if data.bad == "fill":
        configs = [dataclasses.replace(c, missing="fill") if hasattr(c, "missing") else c for c in configs]
    if data.stage is None:
        return list(configs)
    folder = Path(os.path.expandvars(os.path.expanduser(data.stage.dir)))
    if "$" in str(folder):
        raise UserError(
            f"data.stage.dir: {data.stage.dir!r} names a variable that is not set here; set it, or give a path"
        )
    return stage(configs, folder, round(data.stage.limit_gib * GIB), tell=tell, tick=tick)


def stage(
    configs: Sequence[Any],
    folder: Path,
    limit: int,
    *,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Copy what these sources read to the folder, at most `limit` bytes; return the sources of the copies."""
    folder, given = _own_folder(folder.absolute()), folder.absolute()
    staged, copies, links = [], {}, set[Path]()
    for config in configs:
        if not _can_stage(config):
            staged.append(config)
            continue
        path, colons, key = config.path.partition("::")
        whole = local_path(path).absolute()
        around = local_path(fixed_part(path)).absolute()
        if any(each == around or around in each.parents for each in (folder, given)):
            raise UserError(f"data.stage.dir: {str(given)!r} lies inside the data of {path}; give a folder elsewhere")
        try:
            files, left_out = needed_files(config, whole)
        except UserError:
            if around.exists():
                raise
            files = set()
        if not files:  # nothing is there: opening it explains what is wrong
            staged.append(config)
            continue
        links |= left_out
        for file in files:
            found = _look(file)
            target = _below(folder, file)
            copies[target] = Copy(file, target, found.st_size, found.st_mtime_ns)
        changes = {"path": f"{_below(folder, whole)}{colons}{key}"}
        beside, colons, key = (getattr(config, "labels", None) or "").partition("::")
        if beside and not is_url(beside) and local_path(fixed_part(beside)).exists():
            labelled = _below(folder, local_path(fixed_part(beside)).absolute())
            if any(labelled == target or labelled in target.parents for target in copies):
                changes["labels"] = f"{_below(folder, local_path(beside).absolute())}{colons}{key}"
        staged.append(dataclasses.replace(config, **changes))
    if copies:
        _check_free(copies, folder)
        with _turn(folder, tell, tick) as records:
            _check_folders(copies, folder)
            if _copy_all(list(copies.values()), folder, limit, records, tell, tick) and links:
                tell(
                    f"staging: links out of the data to what is not read are left out, {len(links)} of them, such as "
                    f"{min(links)}"
                )
    return staged


def _own_folder(folder: Path) -> Path:
    """Return where copies go: the folder, or one below it for this user alone where others may write there too."""
    try:
        found = os.stat(folder)
    except OSError:  # it is made, or refused, later
        return folder
    if is_own(found):
        return folder
    return folder / f"vitrail-{os.geteuid()}"


def _check_free(copies: Mapping[Path, "Copy"], folder: Path) -> None:
    """Refuse a folder that was never used so, where files lie that copies would replace: a backup, or the data."""
    if not os.path.lexists(folder / LOCK):
        for target in filter(os.path.lexists, copies):
            raise UserError(
                f"data.stage.dir: {str(target)!r} lies there already, and vitrail has not put it there; "
                "give a folder for copies alone"
            )


def _check_folders(copies: Mapping[Path, "Copy"], folder: Path) -> None:
    """Refuse links on the way to a copy, and folders that others may change: they would decide what is read."""
    below = {each for target in copies for each in target.parents if folder in (each, *each.parents)}
    for each in sorted(below):
        try:
            found = os.stat(each) if each == folder else os.lstat(each)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(found.st_mode) or not is_own(found):
            raise UserError(
                f"data.stage.dir: {str(each)!r} is not a folder that you alone may write; remove it, or give another"
            )


class _Records:
    """The records of copies, a line each, in the file that is the lock; the last line of a copy counts.

    Threads that copy also count here the bytes that they have moved.
    """

    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self._file, self._folder, self._lock, self.moved = file, folder, threading.Lock(), 0
        self._found: dict[str, Any] = {}
        file.seek(0)
        line = b"\n"
        for line in file:
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill has cut, or that was damaged
                one = json.loads(line)
                self._found[one["name"]] = one
        if not line.endswith(b"\n"):
            file.write(b"\n")  # so that the next line is one of its own

    def of(self, copy: "Copy") -> Any:
        return self._found.get(str(copy.target.relative_to(self._folder)))

    def add(self, copy: "Copy", total: int) -> None:
        name = {"name": str(copy.target.relative_to(self._folder))}
        with self._lock:
            self._file.write(json.dumps(name | record_of(copy.target, total)).encode() + b"\n")
            self._file.flush()

    def count(self, moved: int) -> None:
        with self._lock:
            self.moved += moved


def _can_stage(config: Any) -> bool:
    path = getattr(config, "path", None)
    wanted = getattr(config, "stage", True) and dataclasses.is_dataclass(config)
    return bool(wanted) and isinstance(path, str) and not is_url(path.partition("::")[0])


def _below(folder: Path, path: Path) -> Path:
    return folder.joinpath(*Path(os.path.normpath(path)).parts[1:])  # `..` must not lead out of the folder


def _look(file: Path) -> os.stat_result:
    try:
        return os.stat(file)
    except OSError as error:
        raise UserError(
            f"data.stage: {file} cannot be copied ({error.strerror}); restore it, or set `stage: false` for its entry"
        ) from None


@contextmanager
def _turn(folder: Path, tell: Callable[[str], None], tick: Callable[[], None]) -> Iterator[_Records]:
    """Let one process of a node copy at a time; a process that dies has had its turn."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # whatever the mask: nobody else may read or write copies
        handle = disk.appending(folder / LOCK)
        os.fchmod(handle.fileno(), 0o600)
    except OSError as error:
        raise UserError(
            f"data.stage.dir: {str(folder)!r} cannot be written ({error.strerror}); give a folder on a disk of the node"
        ) from None
    try:
        told, began = -math.inf, time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited - told > 6 * EVERY:
                    told = waited
                    tell(f"staging: another process copies to {folder}; waiting for it ({waited:.0f} s)")
                tick()
                time.sleep(0.1)
        yield _Records(handle, folder)
    finally:
        handle.close()


def _copy_all(
    copies: list[Copy],
    folder: Path,
    limit: int,
    records: _Records,
    tell: Callable[[str], None],
    tick: Callable[[], None],
) -> bool:
    """Make the copies that are not there; return whether there were any."""
    todo = []
    for copy in copies:
        tick()  # one that was touched is read as a whole
        if not copy.is_done(records.of(copy)):
            todo.append(copy)
    if not todo:
        return False
    needed, others = sum(copy.size for copy in copies), _tidy(folder, {copy.target for copy in copies})
    if needed + others > limit:
        there = f", and {_gib(others)} of others are there already" if others else ""
        raise UserError(
            f"data.stage: {_gib(needed)} in {len(copies)} files are to be copied to {folder}{there}, more than "
            f"data.stage.limit_gib {limit / GIB:.3g}; raise it, remove what is not needed there, read less with "
            "`region`, or set `stage: false` for an entry"
        )
    left = sum(copy.size for copy in todo)
    free = shutil.disk_usage(folder).free
    if left > free:
        raise UserError(
            f"data.stage.dir: {_gib(left)} are to be copied to {folder}, but just {_gib(free)} are free there; "
            "free some space or choose another disk"
        )
    tell(f"staging: copying {_gib(left)} in {len(todo)} files to {folder}")
    began = told = changed = time.monotonic()
    seen = records.moved
    pool = Pool(THREADS)
    try:
        jobs = deque(pool.submit(partial(_copy, copy, records), lambda: "") for copy in todo)
        while jobs:
            if wait([jobs[0].future], timeout=0.5).done:
                jobs.popleft().future.result()  # its error is raised here
            now = time.monotonic()
            if records.moved != seen:
                seen, changed = records.moved, now
                tick()
            if now - changed > STALLED:
                raise UserError(
                    f"data.stage: nothing was copied for {STALLED:.0f} s, with {_gib(seen)} of {_gib(left)} done; "
                    f"check the disk of {folder} and the one behind {todo[-len(jobs)].original}"
                )
            if now - told > EVERY:
                told = now
                tell(f"staging: {_gib(seen)} of {_gib(left)} copied")
    finally:
        pool.close()
    tell(f"staging: {_gib(left)} copied in {time.monotonic() - began:.0f} s")
    return True


def _copy(copy: Copy, records: _Records) -> None:
    try:
        _make_folders(copy.target.parent)
        with disk.replacing(copy.target, durable=False) as part:
            os.fchmod(part.fileno(), 0o600)  # before there is anything to read
            total = _copy_bytes(copy.original, part, records)
            part.flush()
            if part.tell() != copy.size:
                raise UserError(f"data.stage: {copy.original} changes while it is copied; wait until it is complete")
            os.utime(part.fileno(), ns=(copy.time, copy.time))
        records.add(copy, total)
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise UserError(
            f"data.stage: {copy.original} cannot be copied to {copy.target} ({why}); mend that, "
            "or set `stage: false` for its entry"
        ) from None


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _copy_bytes(original: Path, out: BinaryIO, records: _Records) -> int:
    """Copy a file; return its CRC-32."""
    total = 0
    with open_plain(original) as source:
        while piece := source.read(PIECE):
            out.write(piece)
            total = zlib.crc32(piece, total)
            records.count(len(piece))
    return total


def _tidy(folder: Path, needed: set[Path]) -> int:
    """Remove unfinished copies of a killed process; return the bytes of all else that is there but not needed now."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if disk.meant_by(path) in needed:  # nobody else copies now
                disk.remove(path, inside=folder)
            elif path not in needed and name != LOCK:
                total += path.lstat().st_size
    return total


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"
