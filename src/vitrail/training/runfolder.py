"""The folder of a run: who owns it, what is in it, and what it says about the run so far."""

import contextlib
import fcntl
import json
import math
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.training.checkpoint import list_checkpoints


def beside(run_dir: Path) -> Path:
    """A folder that does not exist yet: the given one, or the same name with a number."""
    number, candidate = 2, run_dir
    while candidate.exists():
        candidate = run_dir.with_name(f"{run_dir.name}-{number}")
        number += 1
    return candidate


class RunFolder:
    """Opened by rank 0 alone; locked until the process ends, however it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.new = not path.exists()
        self.note: str | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for the life of the run
        except OSError as error:
            raise UserError(
                f"run.dir: {str(path)!r} cannot be written ({error.strerror}); choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise UserError(
                f"run.dir: {str(path)!r} is in use by {owner}; wait for it, or start beside it with --fresh"
            ) from None
        except OSError as error:  # some shared file systems have no locks
            self.note = f"{path} cannot be locked ({error.strerror}): see to it that no other job uses it"
        job = os.environ.get("SLURM_JOB_ID")
        owner = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else "")
        with contextlib.suppress(OSError):  # a full disk; what counts is the lock
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), owner.encode())
        self._metrics: int | None = None
        self._unwritten = b""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Replace a file whole."""
        target = self.path / name
        partial = target.with_name(f".{target.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to metrics.jsonl; while the disk is full, lines wait for the next call."""
        line = {"event": event, "time": time.time(), **fields}
        self._unwritten += json.dumps(finite(line), allow_nan=False).encode() + b"\n"
        with contextlib.suppress(OSError):
            if self._metrics is None:
                self._metrics = os.open(self.path / "metrics.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
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
        self._lock.close()

    def discard_if_new(self) -> None:
        """Take back a folder that this run made but never used."""
        if self.new and not list_checkpoints(self.checkpoints):
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
