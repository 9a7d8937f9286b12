"""The folder of a run: who owns it, what is in it, and what it says about the run so far."""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.contents import FOLDERS, OWNER, check_begun, check_contents, find_early
from vitrail.errors import UserError
from vitrail.report.facts import strict
from vitrail.weights.runs import list_checkpoints

LOCK = ".lock"


def beside(run_dir: Path) -> Path:
    """Name a folder that does not exist yet: the given one, or the same name with a number."""
    number, candidate = 2, run_dir
    while os.path.lexists(candidate):
        candidate = run_dir.with_name(f"{run_dir.name}-{number}")
        number += 1
    return candidate


class RunFolder:
    """Opened by rank 0 alone; locked until the process ends, however it ends.

    Two locks: that of the folder itself follows it wherever it is moved, and no file that is removed takes it along;
    that of `.lock` holds between hosts, which some shared file systems know for files alone.
    """

    def __init__(self, path: Path):
        self.path = path
        self.note: str | None = None
        self._metrics: int | None = None
        self._unwritten = b""
        self._handles: list[int] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.new = _make(path)
            self._folder = self._keep(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            check_contents(path)
            check_begun(path)
            self._lock(self._folder)
            self._file = self._take_file()
        except OSError as error:
            self.close()
            raise UserError(
                f"run.dir: {str(path)!r} cannot be written ({error.strerror}); choose another folder"
            ) from None
        except UserError:
            self.close()
            raise

    def _keep(self, handle: int) -> int:
        self._handles.append(handle)
        return handle

    def _take_file(self) -> int:
        """Lock `.lock` and write into it who has done so, for those who come later."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = self._keep(os.open(LOCK, flags, 0o666, dir_fd=self._folder))
        self._lock(handle)
        job = os.environ.get("SLURM_JOB_ID")
        owner = f"{OWNER}{os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        with contextlib.suppress(OSError):  # a full disk; what counts is the lock
            os.ftruncate(handle, 0)
            os.pwrite(handle, owner.encode(), 0)
        return handle

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run.dir: {str(self.path)!r} is in use by {self._read_owner()}; "
                "wait for it, or start beside it with --fresh"
            ) from None
        except OSError as error:  # some shared file systems have no locks
            self.note = f"{self.path} cannot be locked ({error.strerror}): see to it that no other job uses it"

    def _read_owner(self) -> str:
        try:
            handle = self._keep(os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder))
            return os.read(handle, 200).decode(errors="replace").strip() or "another process"
        except OSError:
            return "another process"

    def is_there(self) -> bool:
        """Tell whether the path still leads to the folder that was opened, as far as the disk tells."""
        try:
            return self._leads_here()
        except OSError:
            return False

    def _leads_here(self) -> bool:
        """Tell whether the path leads to the folder that was opened; an OSError where the disk does not tell."""
        try:
            return _is_same(os.stat(self.path), self._folder, self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def check(self) -> None:
        """Refuse to go on where the path leads to another folder or to none: what is there now is not this run's.

        An OSError is no refusal: a disk that does not answer now may do so at the next save.
        """
        if not self._leads_here():
            raise UserError(f"run.dir: {str(self.path)!r} is no longer the folder of this run: {self._find_fate()}")
        try:
            found = os.stat(LOCK, dir_fd=self._folder, follow_symlinks=False)
            same = _is_same(found, self._file, self.path / LOCK)
        except FileNotFoundError:
            same = False
        if not same:  # removed, and perhaps made anew: whoever has done so may hold it
            self._file = self._take_file()

    def _find_fate(self) -> str:
        try:
            place = os.readlink(f"/proc/self/fd/{self._folder}")
        except OSError:
            place = ""
        if not place or place.endswith(" (deleted)"):
            return "it was deleted with all checkpoints in it; nothing more is written"
        return (
            f"it was moved to {place!r}, with all checkpoints in it; nothing more is written; "
            f"move it back, or continue it there with: vitrail train {place}"
        )

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Replace a file whole."""
        disk.write_whole(self.path / name, text)

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to metrics.jsonl; while the disk is full, lines wait for the next call."""
        line = {"event": event, "time": time.time(), **fields}
        self._unwritten += json.dumps(strict(line), allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            if self._metrics is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._metrics = os.open("metrics.jsonl", flags, 0o666, dir_fd=self._folder)
                size = os.fstat(self._metrics).st_size
                if size and os.pread(self._metrics, 1, size - 1) != b"\n":
                    # A kill cut the last line: end it, so that the next one stands alone.
                    self._unwritten = b"\n" + self._unwritten
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._metrics, self._unwritten) :]

    def close(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None
        while self._handles:  # the lock goes with the last
            os.close(self._handles.pop())

    def discard_if_new(self) -> None:
        """Take back a folder that this run made but never used, unless somebody has put other things into it."""
        with contextlib.suppress(OSError):
            if self.new and self.is_there() and not list_checkpoints(self.checkpoints):
                for file in find_early(self.path):
                    with contextlib.suppress(OSError, UserError):
                        disk.remove(file, inside=self.path)
                for folder in (*(self.path / name for name in FOLDERS), self.path):
                    disk.remove_empty(folder)
        self.close()


def _make(path: Path) -> bool:
    """Make a folder; returns whether it was made here, not by somebody who was quicker."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _is_same(found: os.stat_result, handle: int, path: Path) -> bool:
    """Tell whether a path leads to what was opened; some shared disks change the numbers of files."""
    opened = os.fstat(handle)
    if os.path.samestat(found, opened):
        return True
    try:
        return found.st_dev == opened.st_dev and os.readlink(f"/proc/self/fd/{handle}") == os.path.realpath(path)
    except OSError:
        return False
