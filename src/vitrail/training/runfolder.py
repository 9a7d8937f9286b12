"""The folder of a run: who owns it, what is in it, and what it says about the run so far."""

import fcntl
import json
import os
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
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for the life of the run
        except OSError as error:
            raise UserError(
                f"run.dir: {str(path)!r} cannot be written ({error.strerror}); choose another folder"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            raise UserError(
                f"run.dir: {str(path)!r} is in use by {owner}; wait for it, or start beside it with --fresh"
            ) from None
        self._lock.seek(0)
        self._lock.truncate()
        job = os.environ.get("SLURM_JOB_ID")
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job}" if job else ""))
        self._lock.flush()
        self._metrics: Any = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Replace a file whole."""
        target = self.path / name
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(target)

    def log(self, event: str, **fields: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self._metrics is None:
            path = self.path / "metrics.jsonl"
            torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
            self._metrics = path.open("a", encoding="utf-8", buffering=1)
            if torn:  # a kill cut the last line: end it, so that the next one stands alone
                self._metrics.write("\n")
        self._metrics.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()

    def discard_if_new(self) -> None:
        """Take back a folder that this run made but never used."""
        self.close()
        if self.new and not list_checkpoints(self.checkpoints):
            import shutil

            shutil.rmtree(self.path, ignore_errors=True)
