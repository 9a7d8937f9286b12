"""The loggers that a recipe names, each in a thread of its own; journal.py tells them what happens.

A logger that fails is switched off with a note, and the run goes on. To add one: a file here (`logger.py` says what is
asked of it) and a line in recipe/kinds.py; or a plugin, see docs/logging.md.
"""

import importlib.util
import queue
import threading
from typing import Any

from vitrail.credentials import strip
from vitrail.errors import UserError
from vitrail.recipe import Recipe, kinds
from vitrail.training.loggers.logger import Facts, Logger, LoggerConfig
from vitrail.training.loggers.tensorboard import TensorboardConfig

__all__ = ["Background", "Facts", "Logger", "open_loggers"]

MOST = 10_000  # reports that wait for a logger
PATIENCE = {"done": 120.0}  # seconds that the end of a run waits for a logger; others may be about to be killed
SHORT = 30.0


def open_loggers(recipe: Recipe) -> list["Background"]:
    """Make the loggers of a recipe, not yet started; a UserError says what is not installed."""
    configs = recipe.log.to
    if configs == "auto":
        configs = [TensorboardConfig()] if importlib.util.find_spec("tensorboard") else []
    return [Background(config.kind, _open(config)) for config in configs]


def _open(config: LoggerConfig) -> Logger:
    try:
        return config.open()
    except ModuleNotFoundError as error:
        missing = error.name or ""
        raise UserError(
            f"log.to: {config.kind!r} needs {missing}, which is not installed; {kinds.remedy(missing)}"
        ) from error


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
