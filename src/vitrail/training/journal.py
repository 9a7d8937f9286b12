"""The one record of a run: its events go to the progress line, metrics.jsonl, the loggers and the report.

Silent but on rank 0. metrics.jsonl is always written, one JSON object a line: reports are made from it.

The progress of a run: one live line on a terminal, plain lines at most every few seconds elsewhere.

    with Progress(total=1300) as progress:
        progress.update(10, {"loss": 0.71, "lr": 2e-3, "samples_per_s": 120.0, "mfu": None, "tflops": 0.31})
        progress.note("saved checkpoints/step-000200")

- it writes to standard error, so that standard output stays free for results
- fields stay until they are given anew; a field that is None or missing is not shown
- on a narrow terminal the least needed fields go first, the bar shrinks, and the line never wraps
- a stream that goes away (a closed terminal) ends the display, never the training
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from vitrail.errors import UserError, printable
from vitrail.report.units import clock, compact, number_of, percent, plain
from vitrail.training.loggers import Background, Facts
from vitrail.training.optimizers.groups import FROZEN
from vitrail.training.runfolder import RunFolder
from vitrail.weights.runs import checkpoint_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from vitrail.training.evaluate import Evaluator


_PLAIN_EVERY = 5.0  # seconds between plain lines
_LIVE_EVERY = 0.1  # seconds between drawings of the live line
_PAGE_SHARE = 50  # times as long as a page takes, between two of a run that goes on
_RATE_WINDOW = 32  # updates over which the time left is worked out
_BAR = (8, 28)  # narrowest and widest bar, in characters


class Progress:
    """Shows how far a run is; a context manager. `enabled=False` (every rank but 0) shows nothing."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.start, self.step = max(int(total), 0), int(start), int(start)
        self._enabled = enabled
        self._stream = stream
        self._clock = clock
        self._fields: dict[str, Any] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._warm = False
        self._drawn_at = -math.inf
        self._drawn_step: int | None = None
        self._console: Console | None = None
        self._live: Live | None = None
        self._taken: tuple[TextIO, TextIO] | None = None  # standard output and error, while the display leads them

    def __enter__(self) -> Progress:
        self._marks.append((self._clock(), self.step))
        if self._enabled:
            self._stream = self._stream or sys.stderr
            if _is_terminal(self._stream):
                self._guard(self._open_live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._guard(self._close_live)
        elif self._drawn_step is not None and self._drawn_step != self.step:
            self._guard(lambda: self._print(self._plain_line()))

    def update(self, step: int, fields: Mapping[str, Any] | None = None) -> None:
        """Show that the run has finished `step` steps; `fields` are the newest numbers."""
        if not self._enabled:
            return
        now = self._clock()
        if step < self.step:  # the run went back, for example to a checkpoint: old marks would give a negative rate
            self._marks.clear()
        if not self._marks or step > self._marks[-1][1]:
            self._marks.append((now, step))
            if len(self._marks) == 3 and not self._warm:  # the first stretch holds compilation and the first reads
                self._marks.popleft()
                self._warm = True
        self.step = step
        self._fields.update(fields or {})
        last = self.total > 0 and step >= self.total
        if self._live is not None:
            if now - self._drawn_at >= _LIVE_EVERY or last:
                self._mark_drawn(now)
                self._guard(self._refresh)
        elif self._drawn_step is None or now - self._drawn_at >= _PLAIN_EVERY or (last and self._drawn_step != step):
            self._mark_drawn(now)
            self._guard(lambda: self._print(self._plain_line()))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._enabled:
            return
        words = printable(text)
        if self._console is not None and self._live is not None:
            console = self._console
            self._guard(lambda: console.print(words, markup=False, highlight=False, emoji=False, soft_wrap=True))
        else:
            self._guard(lambda: self._print(words))

    def seconds_left(self) -> float | None:
        """Return the time to the end at the pace of the last updates; None while it is not known."""
        if len(self._marks) < 2 or self.total <= 0:
            return None
        (begun, first), (now, last) = self._marks[0], self._marks[-1]
        if last <= first or now <= begun:
            return None
        return max(self.total - self.step, 0) * (now - begun) / (last - first)

    def _parts(self) -> list[tuple[int, str, str]]:
        """List the parts of the line in reading order: rank of giving up (the largest first), text, style."""
        fields = self._fields

        def known(name: str) -> bool:
            return math.isfinite(number_of(fields.get(name)))

        parts: list[tuple[int, str, str]] = []
        if fields.get("loss") is not None:
            loss = number_of(fields["loss"])
            parts.append((1, f"loss {_steady(loss)}", "bold" if math.isfinite(loss) else "bold red"))
        if known("lr"):
            parts.append((7, f"lr {plain(fields['lr'], 3)}", ""))
        if known("samples_per_s"):
            parts.append((3, f"{compact(fields['samples_per_s'])} samples/s", ""))
        if known("tokens_per_s"):
            parts.append((6, f"{compact(fields['tokens_per_s'])} tokens/s", ""))
        if known("mfu"):
            parts.append((4, f"MFU {percent(fields['mfu'])}", ""))
        elif known("tflops"):
            parts.append((4, f"{compact(fields['tflops'])} TFLOP/s", ""))
        if known("memory_gib"):
            parts.append((8, f"{plain(fields['memory_gib'], 3)} GiB", ""))
        if known("data_wait"):
            slow = number_of(fields["data_wait"]) >= 0.2
            parts.append((5, f"data wait {number_of(fields['data_wait']) * 100:.0f}%", "yellow" if slow else ""))
        left = self.seconds_left()
        if left is not None:
            parts.append((2, f"{clock(left)} left", "cyan"))
        return parts

    def _counter(self) -> str:
        return f"{self.step}/{self.total}" if self.total else f"step {self.step}"

    def _plain_line(self) -> str:
        counter = f"step {self._counter()}" if self.total else self._counter()
        return "  ".join([counter, *(text for _, text, _ in self._parts())])

    def render(self, width: int, *, ascii_only: bool = False) -> Text:
        """Draw the live line for a terminal of so many columns."""
        from rich.text import Text

        parts = self._parts()
        counter = self._counter()

        def length() -> int:
            return len(counter) + sum(2 + len(text) for _, text, _ in parts)

        # From 60 columns on the bar has its place before the last fields have theirs.
        budget = width - _BAR[0] - 1 if width >= 60 and self.total > 0 else width
        while parts and length() > budget:
            parts.remove(max(parts))
        line = Text(no_wrap=True, overflow="crop", end="")
        room = min(width - length() - 1, _BAR[1])
        if room >= _BAR[0] and self.total > 0:
            filled = min(max(round(room * self.step / self.total), 0), room)
            line.append(("#" if ascii_only else "━") * filled, "green")
            line.append(("-" if ascii_only else "━") * (room - filled), "bright_black")
            line.append(" ")
        line.append(counter)
        for _, text, style in parts:
            line.append("  ")
            line.append(text, style)
        line.truncate(max(width, 1))
        return line

    def _open_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # A piped standard output must stay in its pipe: only what goes to the terminal is led above the line.
        redirect = _is_terminal(sys.stdout)
        self._console = Console(file=self._stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=redirect, vertical_overflow="crop")
        self._taken = (sys.stdout, sys.stderr)
        self._live.start()

    def _close_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            # One column is left free: a full line makes some terminals wrap.
            live.update(self._render_now(), refresh=True)
            live.stop()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render_now(), refresh=True)

    def _render_now(self) -> Text:
        assert self._console is not None
        ascii_only = not self._console.encoding.lower().startswith("utf")
        return self.render(self._console.width - 1, ascii_only=ascii_only)

    def _print(self, line: str) -> None:
        assert self._stream is not None
        self._stream.write(line + "\n")
        self._stream.flush()

    def _mark_drawn(self, now: float) -> None:
        self._drawn_at, self._drawn_step = now, self.step

    def _guard(self, action: Callable[[], None]) -> None:
        """Do something with the stream; when the stream is gone, show nothing more."""
        if not self._enabled:
            return
        try:
            action()
        except (OSError, ValueError):  # ValueError: the file object was closed
            self._enabled, live, self._live = False, self._live, None
            if live is not None:
                with contextlib.suppress(OSError, ValueError):
                    live.stop()
            if self._taken is not None:
                sys.stdout, sys.stderr = self._taken


def _steady(value: float) -> str:
    """Format a loss with a constant number of characters, so that the line does not jump."""
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 else f"{value:.2e}"


def _is_terminal(stream: Any) -> bool:
    """Tell whether control characters may go to this stream."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (AttributeError, ValueError):
        return False


class Journal:
    """The events of a run, told to all who listen. A logger that fails is switched off with a note."""

    def __init__(
        self, folder: RunFolder | None, progress: Progress, loggers: Sequence[Background], facts: Facts, *, report: bool
    ):
        self.folder, self.progress, self.loggers, self.report = folder, progress, list(loggers), report
        self._told: set[str] = set()  # why there is no page
        self._page = (-math.inf, 0.0)  # when the last one was written, and how long that took
        self._tell("start", facts)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def warn(self, text: str, *, step: int) -> None:
        """Tell what went wrong beside the training, which goes on."""
        self.note(text)
        self.log("warning", step=step, text=f"{text[:1].upper()}{text[1:]}.")

    def log(self, event: str, **fields: Any) -> None:
        """Add a line to metrics.jsonl, at once and before anything else."""
        if self.folder is not None:
            self.folder.log(event, **fields)
        self._tell("event", event, fields)

    def scalars(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Report numbers of a step; what is no number, or tells how far the run is, is left out."""
        left = {k: v for k, v in values.items() if isinstance(v, int | float) and k not in ("step", "samples")}
        self._tell("scalars", prefix, left, step)
        for logger in self.loggers:
            logger.begin()

    def _tell(self, method: str, *arguments: Any) -> None:
        for logger in self.loggers:
            logger.tell(method, *arguments)
        self._drop_failed()

    def _drop_failed(self) -> None:
        for logger in [logger for logger in self.loggers if logger.problem is not None]:
            self.loggers.remove(logger)
            self.note(f"log.to: {logger.name} is switched off: {logger.problem}; the run goes on, with metrics.jsonl")

    def start(self, *, what: str, groups: list[dict[str, Any]], **fields: Any) -> None:
        """Write the first lines of a session: what is trained, and which parameters decay at which rate."""
        frozen = sum(row["parameters"] for row in groups if row["name"] == FROZEN)
        self.log("start", groups=groups, frozen=frozen, **fields)
        self.note(what + (f"; {frozen:,} parameters are frozen" if frozen else ""))
        for row in groups:
            self.note(
                f"  {row['name']}: {row['tensors']} tensors, {row['parameters']:,} parameters, "
                f"lr {row['lr']:g}, weight decay {row['weight_decay']:g}"
            )

    def step(self, fields: dict[str, Any]) -> None:
        self.progress.update(fields["step"], fields)
        self.log("train", **fields)
        self.scalars("train", fields, fields["step"])

    def metrics(self, metrics: dict[str, float], evaluator: Evaluator, *, step: int, weights: str) -> None:
        """Report what an evaluator has just measured, and how sure it is."""
        text = ", ".join(f"{name} {plain(value)}" for name, value in metrics.items())
        self.note(f"step {step}, held out: {text}")
        sure = None if self.folder is None else evaluator.intervals()
        more = {} if sure is None else {"intervals": sure}
        self.log("eval", step=step, weights=weights, metrics=metrics, samples=evaluator.samples, **more)
        if evaluator.tables is not None:
            self.log("classes", step=step, weights=weights, **evaluator.tables)
        self.scalars("eval", metrics, step)

    def picture(self, name: str, path: Path, *, step: int, caption: str, samples: Sequence[str] = ()) -> None:
        """Report a picture that lies in the run folder, and which samples it shows.

        Its name is that of all pictures of its kind.
        """
        more = {"samples": list(samples)} if samples else {}
        self.log("picture", step=step, path=f"{path.parent.name}/{path.name}", caption=caption, **more)
        self._tell("picture", name, path, step, caption)

    def skip(self, *, step: int, loss: float, counters: list[int]) -> None:
        what = "loss" if not math.isfinite(loss) else "gradient"
        self.note(f"step {step}: the {what} is not finite; the step is skipped")
        self.log("skip", step=step, reason=f"{what} is not finite", counters=counters)

    def bad(self, sentences: list[str], *, step: int, samples: int, items: dict[str, int], filled: int) -> None:
        """Report bad data of the batch of a step: its items, sentences on those that are new, and counts of the run."""
        for sentence in sentences:
            self.note(sentence)
        if filled and not items:
            self.note(f"step {step}: {filled} absent chunks were read as the fill value so far")
        self.log("bad", step=step, samples=samples, items=items, filled_chunks=filled, sentences=sentences)

    def saved(self, outcome: dict[str, Any], *, then: str | None) -> None:
        """Report the end of a save (step, error, seconds, bytes); of one that failed, also what then follows."""
        if not outcome["error"]:
            path = f"checkpoints/{checkpoint_name(outcome['step'])}"
            self.log("checkpoint", path=path, **{k: outcome[k] for k in ("step", "seconds", "bytes")})
        elif then is not None:
            self.note(f"the checkpoint of step {outcome['step']} could not be written ({outcome['error']}); {then}")

    def end(self, *, step: int, reason: str, seconds: float, message: str) -> None:
        """Write the last line and the report."""
        if self.folder is None:
            return
        self.log("end", step=step, reason=reason, seconds=seconds, message=message)
        for logger in self.loggers:
            logger.end(reason)
        self._drop_failed()
        if not self.folder.is_there():
            return
        if not self.report:
            if (self.folder.path / "report.html").exists():
                self.note(f"report.html is that of an earlier step; renew it with: vitrail report {self.folder.path}")
            return
        self.write_page(step)

    def renew_page(self, step: int) -> None:
        """Write the report of a run that goes on, unless that would take more than a small share of its time."""
        if self.folder is None or not self.report or not self.folder.is_there() or step >= self.progress.total:
            return  # the end writes its own
        began = time.monotonic()
        if began - self._page[0] >= _PAGE_SHARE * self._page[1]:
            self.write_page(step)
            self._page = (time.monotonic(), time.monotonic() - began)

    def write_page(self, step: int) -> None:
        """Write the report; one that fails is told once, and ends nothing."""
        if self.folder is None:
            return
        try:
            from vitrail.report.page import write_report

            write_report(self.folder.path)
        except Exception as error:  # the run is what counts, and above all why it failed
            words = str(error) if isinstance(error, UserError) else f"the report failed: {error!r}"
            if words not in self._told:
                self._told.add(words)
                self.warn(words, step=step)
