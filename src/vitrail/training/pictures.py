"""Pictures of held-out samples: every rank takes part in making them, and the first draws.

Nothing that fails here ends a run: each reason is told once, as a warning in metrics.jsonl, too, and training goes on.
Data that cannot be read are told so as well: training and evaluation stop at them where they meet them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vitrail.errors import UserError
from vitrail.parallel.agree import Group, gather_json
from vitrail.parallel.flow import Flow
from vitrail.report.blocks import about_rows
from vitrail.training.evaluate import Evaluator
from vitrail.training.journal import Journal
from vitrail.training.runfolder import RunFolder

T = TypeVar("T")


class Undrawn(Exception):
    """Why there is no picture, on all ranks."""


class Pictures:
    def __init__(self, evaluator: Evaluator, group: Group, *, kind: str, held_out: bool, slices: int):
        self.evaluator, self.group = evaluator, group
        self.kind, self.held_out, self.slices = kind, held_out, slices
        self.told: set[str] = set()  # reasons

    def draw(
        self,
        flow: Flow,
        folder: RunFolder | None,
        journal: Journal,
        step: int,
        beat: Callable[[], None],
        *,
        worst: bool = False,
    ) -> None:
        """Draw a picture into the run folder, which rank 0 has; and one of what did worst in the last measurement."""
        evaluator = self.evaluator
        wanted: list[tuple[str, list[int] | None, str]] = [(self.kind, None, "")]
        if worst and self.held_out and evaluator.worst:
            words = f"the worst {len(evaluator.worst)} of {evaluator.samples}; "
            wanted.append((f"{self.kind}-worst", evaluator.worst, words))
        made: dict[str, Any] = {"keep": folder is not None, "tick": beat, "attempt": self._attempt, "meet": self._meet}
        for name, shown, words in wanted:
            beat()
            try:
                rows = evaluator.example(flow, shown=shown, **made)
            except Undrawn as reason:
                self._tell(journal, step, str(reason))
                continue
            try:  # the others are training on already
                if folder is None or not folder.is_there():  # where it is gone, the next save says so
                    continue
                path = folder.path / "pictures" / f"{name}-{step:08d}.png"
                path.parent.mkdir(exist_ok=True)
                caption = evaluator.objective.draw(path, rows, step=step, held_out=self.held_out, slices=self.slices)
                samples = [about.title for about in about_rows(rows)]
                known = samples if all(samples) else []
                journal.picture(name, path, step=step, caption=words + caption, samples=known)
            except Exception as error:
                self._tell(journal, step, reason_of(error))

    def _attempt(self, action: Callable[[], T]) -> T:
        """Run on every rank; where it fails on one, give up on all, so that nobody waits."""
        found: list[T] = []
        reason = None
        try:
            found.append(action())
        except Undrawn:  # all have agreed on it, in _meet()
            raise
        except Exception as error:
            reason = reason_of(error)
        self._agree("done", reason)
        return found[0]

    def _meet(self) -> None:
        """Wait before a forward, which is collective, until all ranks have come there; give up where one has not."""
        self._agree("forward", None)

    def _agree(self, place: str, reason: str | None) -> None:
        told = gather_json([place, reason], self.group)
        for _, why in told:
            if why is not None:
                raise Undrawn(why)
        if len({where for where, _ in told}) > 1:
            raise Undrawn("the ranks did not compute the same")

    def _tell(self, journal: Journal, step: int, reason: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if reason not in self.told:
            self.told.add(reason)
            journal.warn(f"the picture of step {step} could not be drawn, nor others so: {reason}", step=step)


def reason_of(error: Exception) -> str:
    """Say in one line why something failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has no memory left for it"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error).strip().partition("\n")[0]
    return words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"
