"""`Logger`: a place that a run reports to, beside its own folder. Rank 0 alone has any.

A kind of logger is a config class with `open()`, which returns a `Logger`. `open` is called before anything is written
and says what is missing; everything else is done in a thread of the logger's own, one call after the other, so that
neither an error nor a server that does not answer holds up the run.
"""

import importlib.util
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitrail import disk
from vitrail.errors import UserError
from vitrail.foreign import read_json
from vitrail.report.metrics import read_lines, split_sessions
from vitrail.report.units import number_of

KEPT = "vitrail.json"  # in a logger's folder: the id that a service knows the run by


@dataclass(frozen=True)
class Facts:
    """A run, as its loggers are told when they start."""

    name: str
    folder: Path  # of the run; a logger that writes files does so in a folder of its own there
    recipe: dict[str, Any]  # complete, without passwords and tokens
    step: int  # the last one done before this session; what was reported beyond it comes again


class Logger:
    """Every method may be left as it is: a logger takes what it has a use for."""

    def start(self, facts: Facts) -> None:
        """Get ready. Called once, after the first step and before everything else."""

    def scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        """Take numbers of a step; the prefix is `train` or `eval`."""

    def picture(self, name: str, path: Path, step: int, caption: str) -> None:
        """Take a PNG file that the run has drawn and keeps."""

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""

    def end(self, reason: str) -> None:
        """Finish: the session is over, `done`, `failed`, or why it was stopped."""


class LoggerConfig(Protocol):
    """The config of a kind of logger; any class made with @config that has these."""

    kind: str

    def open(self) -> Logger:
        """Return a logger that has written nothing yet; say what is not installed."""
        ...


def require(module: str, title: str, *, extra: str) -> None:
    """Refuse a logger whose package is not installed; it is not imported yet."""
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"log.to: {title} is not installed, which {extra!r} needs; "
            f'run: pip install "vitrail[{extra}]", or take {extra!r} out of log.to'
        )


def recall(folder: Path) -> str | None:
    """Return the id that an earlier session has left in a logger's folder."""
    try:
        found = read_json(folder / KEPT)["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found) else None


def remember(folder: Path, number: str) -> None:
    """Keep the id for the sessions to come."""
    disk.write_whole(folder / KEPT, f'{{"id": "{number}"}}\n', parents=True)


def new_id() -> str:
    return secrets.token_hex(4)


def told_before(run: Path) -> dict[str, float]:
    """Return the newest step of each event that earlier sessions have reported, to report none twice."""
    newest: dict[str, float] = {}
    for session in split_sessions(read_lines(run, most=10_000)[0])[:-1]:  # the last is this one
        for line in session:
            newest[line["event"]] = max(newest.get(line["event"], -1), number_of(line.get("step")))
    return newest
