"""Standard output and error that may go away at any time: a closed pipe or terminal ends no training.

- what goes to standard error is lost from then on, and nothing else happens
- a result that nobody reads any more ends a verb quietly; a training ends with its own code
- a crash in compiled code tells where it was
- descriptors that are closed at the start are filled, so that no file of a run gets the number of standard error
"""

import faulthandler
import os
import sys
from typing import Any


class Lasting:
    """A stream whose other end may be gone."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except OSError:
            send_nowhere(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            send_nowhere(self._stream)


def settle() -> None:
    """At the start of the process."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is taken, which is this one
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    sys.stderr = Lasting(sys.stderr)
    faulthandler.enable(2)


def leave() -> None:
    """At its end: Python flushes once more, and would complain and end with another code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            send_nowhere(stream)


def send_nowhere(stream: Any) -> None:
    """Have what is left in a stream, and all that comes, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
