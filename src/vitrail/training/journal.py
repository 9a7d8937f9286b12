"""What a person sees of a run: the progress line, metrics.jsonl, its loggers and the report. Silent but on rank 0."""

import math
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.report.units import plain
from vitrail.training.checkpoint import checkpoint_name
from vitrail.training.loggers import Loggers
from vitrail.training.progress import Progress
from vitrail.training.runfolder import RunFolder


class Journal:
    def __init__(self, folder: RunFolder | None, progress: Progress, loggers: Loggers, *, report: bool):
        self.folder, self.progress, self.loggers, self.report = folder, progress, loggers, report

    def note(self, text: str) -> None:
        self.progress.note(text)

    def log(self, event: str, **fields: Any) -> None:
        self.loggers.event(event, fields)

    def start(self, *, what: str, groups: list[dict[str, Any]], **fields: Any) -> None:
        """The first lines of a session: what is trained, and which parameters decay at which rate."""
        self.log("start", groups=groups, **fields)
        self.note(what)
        for row in groups:
            self.note(
                f"  {row['name']}: {row['tensors']} tensors, {row['parameters']:,} parameters, "
                f"lr {row['lr']:g}, weight decay {row['weight_decay']:g}"
            )

    def step(self, fields: dict[str, Any]) -> None:
        self.progress.update(fields["step"], fields)
        self.log("train", **fields)
        self.loggers.scalars("train", fields, fields["step"])

    def metrics(self, metrics: dict[str, float], *, step: int, weights: str, samples: int) -> None:
        text = ", ".join(f"{name} {plain(value)}" for name, value in metrics.items())
        self.note(f"step {step}, held out: {text}")
        self.log("eval", step=step, weights=weights, metrics=metrics, samples=samples)
        self.loggers.scalars("eval", metrics, step)

    def picture(self, name: str, path: Path, *, step: int, caption: str) -> None:
        """A picture that lies in the run folder; its name is that of all pictures of its kind."""
        self.log("picture", step=step, path=f"{path.parent.name}/{path.name}", caption=caption)
        self.loggers.picture(name, path, step, caption)

    def skip(self, *, step: int, loss: float, counters: list[int]) -> None:
        what = "loss" if not math.isfinite(loss) else "gradient"
        self.note(f"step {step}: the {what} is not finite; the step is skipped")
        self.log("skip", step=step, reason=f"{what} is not finite", counters=counters)

    def bad(self, news: list[list[str]], *, step: int, bad: tuple[int, int]) -> None:
        """Bad data that any rank has met: each item once, in the sentences of the ranks."""
        sentences = list(dict.fromkeys(sentence for rank in news for sentence in rank))
        for sentence in sentences:
            self.note(sentence)
        if bad[1] and not sentences:
            self.note(f"step {step}: {bad[1]} absent chunks were read as the fill value so far")
        self.log("bad", step=step, samples=bad[0], filled_chunks=bad[1], sentences=sentences)

    def saved(self, outcome: dict[str, Any], *, final: bool) -> None:
        """The end of a save: step, error, seconds, bytes."""
        if not outcome["error"]:
            path = f"checkpoints/{checkpoint_name(outcome['step'])}"
            self.log("checkpoint", path=path, **{k: outcome[k] for k in ("step", "seconds", "bytes")})
        elif not final:
            self.note(
                f"the checkpoint of step {outcome['step']} could not be written ({outcome['error']}); "
                "training goes on and tries again at the next one"
            )

    def end(self, *, step: int, reason: str, seconds: float, message: str) -> None:
        """The last line and the report."""
        if self.folder is None:
            return
        self.log("end", step=step, reason=reason, seconds=seconds, message=message)
        self.loggers.end(reason)
        if not self.folder.is_there():
            return
        if not self.report:
            if (self.folder.path / "report.html").exists():
                self.note(f"report.html is that of an earlier step; renew it with: vitrail report {self.folder.path}")
            return
        from vitrail.report.page import write_report

        try:
            write_report(self.folder.path)
        except Exception as error:  # the run is what counts, and above all why it failed
            self.note(str(error) if isinstance(error, UserError) else f"the report failed: {error!r}")
