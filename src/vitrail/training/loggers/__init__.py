"""Where a run reports to: metrics.jsonl always, and the loggers that the recipe names, each in a thread of its own.

A logger that fails is switched off with a note, and the run goes on. To add one: a file here (`logger.py` says what is
asked of it) and a line in recipe/kinds.py; or a plugin, see docs/logging.md.
"""

import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.credentials import strip
from vitrail.errors import UserError
from vitrail.recipe import Recipe, kinds
from vitrail.training.loggers.jsonl import JsonlLogger
from vitrail.training.loggers.logger import Facts, Logger
from vitrail.training.loggers.tensorboard import TensorboardConfig
from vitrail.training.runfolder import RunFolder

__all__ = ["Background", "Facts", "Logger", "Loggers", "open_loggers"]

MOST = 10_000  # reports that wait for a logger
PATIENCE = {"done": 120.0}  # seconds that the end of a run waits for a logger; others may be about to be killed
SHORT = 30.0


def open_loggers(recipe: Recipe) -> list["Background"]:
    """The loggers of a recipe, not yet started; a UserError says what is not installed."""
    configs = recipe.log.to
    if configs == "auto":
        configs = [TensorboardConfig()] if importlib.util.find_spec("tensorboard") else []
    return [Background(config.kind, _open(config)) for config in configs]


def _open(config: Any) -> Logger:
    try:
        logger: Logger = config.open()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        raise UserError(
            f"log.to: {config.kind!r} needs {missing}, which is not installed; {kinds.remedy(missing)}"
        ) from error
    return logger


class Background:
    """A logger behind a thread: it is told all in order, and neither its errors nor its waiting are the run's."""

    def __init__(self, name: str, logger: Logger):
        self.name, self.logger = name, logger
        self.problem: str | None = None
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST)
        self._thread: threading.Thread | None = None

    def tell(self, method: str, *arguments: Any) -> None:
        if self.problem is None:
            try:
                self._calls.put_nowait((method, arguments))
            except queue.Full:
                self.problem = f"it is {MOST:,} reports behind"

    def begin(self) -> None:
        """Start with what has been told so far; a run that never takes a step leaves nothing behind."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"logger {self.name}", daemon=True)
            self._thread.start()

    def end(self, reason: str) -> None:
        if self._thread is not None:
            self.tell("end", reason)
            patience = PATIENCE.get(reason, SHORT)
            self._thread.join(patience)
            if self._thread.is_alive() and self.problem is None:
                self.problem = f"it did not end within {patience:.0f} s"

    def _work(self) -> None:
        method = ""
        while method != "end" and self.problem is None:
            method, arguments = self._calls.get()
            try:
                getattr(self.logger, method)(*arguments)
            except BaseException as error:  # of a library, which may even want to end the process
                words = " ".join(str(error).split())
                self.problem = strip(f"{type(error).__name__}: {words}" if words else type(error).__name__)[:300]


class Loggers:
    """All loggers of a run, told alike; none on other ranks than 0."""

    def __init__(self, folder: RunFolder | None, others: Sequence[Background], note: Callable[[str], None]):
        self.jsonl = None if folder is None else JsonlLogger(folder)
        self.others, self.note = list(others), note

    def start(self, facts: Facts) -> None:
        self._tell("start", facts)

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Report numbers of a step; what is no number, or tells how far the run is, is left out."""
        left = {k: v for k, v in values.items() if isinstance(v, int | float) and k not in ("step", "samples")}
        self._tell("scalars", prefix, left, step)
        for other in self.others:
            other.begin()

    def picture(self, name: str, path: Path, step: int, caption: str) -> None:
        self._tell("picture", name, path, step, caption)

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, at once and before anything else."""
        if self.jsonl is not None:
            self.jsonl.event(event, fields)
        self._tell("event", event, fields)

    def end(self, reason: str) -> None:
        for other in self.others:
            other.end(reason)
        self._drop_failed()

    def _tell(self, method: str, *arguments: Any) -> None:
        for other in self.others:
            other.tell(method, *arguments)
        self._drop_failed()

    def _drop_failed(self) -> None:
        for other in [other for other in self.others if other.problem is not None]:
            self.others.remove(other)
            self.note(f"log.to: {other.name} is switched off: {other.problem}; the run goes on, with metrics.jsonl")
