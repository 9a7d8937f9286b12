"""Profiles of some steps of a training: a trace, where their time went, and snapshots of a GPU's memory.

- the steps are those of `log.profile.steps`, as metrics.jsonl counts them, both ends included. The one before them is
  looked at, too, and left out of the result: a profiler's start takes time
- profiled steps do what others do: passes are replayed, batches are prepared ahead. No number of the training changes
- they are slower, so that all of them are left out of the rates in the log, on every rank
- ranks that are looked at write their traces; rank 0 writes the table of all of them
- what fails here is told, and the run goes on
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from vitrail import disk
from vitrail.data.batch import Batch
from vitrail.errors import is_out_of_memory
from vitrail.objectives.objective import Loss
from vitrail.parallel.agree import gather_json
from vitrail.recipe.sections import Profile
from vitrail.report.facts import strict
from vitrail.report.units import percent
from vitrail.training.journal import Journal
from vitrail.training.private import dump_memory, record_memory
from vitrail.training.timeline import BETWEEN, PREFIX, break_down, read_trace
from vitrail.training.trainer import Progressed, Timed, Trainer

FOLDER = "profile"  # of a run, for all that is written here
MOST_EVENTS = 100_000  # of a GPU's memory, the latest: a snapshot of them has some tens of MB

Put = Callable[[str], None]


@contextmanager
def parted(trainer: Trainer, put: Put, ahead: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have `put` called at the beginning of each part of the trainer's steps; `ahead` comes before backwards."""

    def prepare(micro: Batch) -> tuple[dict[str, Any], Any]:
        put("forward")
        return type(trainer).prepare(trainer, micro)

    def judge(output: torch.Tensor, targets: Any) -> Loss:
        loss = type(trainer).judge(trainer, output, targets)
        ahead()
        put("backward")
        return loss

    gradients = trainer.flow.gradients

    def add_up() -> None:
        put("optimizer")
        type(gradients).add_up(gradients)

    if trainer.flow.pipeline is None:  # in a pipeline forward and backward of micro-batches take turns
        trainer.prepare = prepare  # type: ignore[method-assign]
        trainer.judge = judge  # type: ignore[method-assign]
    gradients.add_up = add_up  # type: ignore[method-assign]
    try:
        yield
    finally:
        del gradients.add_up
        if trainer.flow.pipeline is None:
            del trainer.prepare, trainer.judge


@contextmanager
def whole_steps(trainer: Trainer, put: Put) -> Iterator[None]:
    """Have `put` called at all parts of a step, from its beginning to its end, without changing how it goes."""

    def step(batch: Batch, **options: Any) -> Progressed:
        put("forward")
        told = type(trainer).step(trainer, batch, **options)
        put(BETWEEN)
        return told

    def prepare_ahead() -> None:
        put("other")
        type(trainer)._prepare_ahead(trainer)
        put("other")

    with parted(trainer, put):
        trainer.step = step  # type: ignore[method-assign]
        trainer._prepare_ahead = prepare_ahead  # type: ignore[method-assign]
        try:
            yield
        finally:
            del trainer.step, trainer._prepare_ahead


class Tracer:
    """A profiler of this process and its marks, from the moment it is made; `spare` steps are left out first."""

    def __init__(self, trainer: Trainer, *, spare: bool, steps: int):
        from torch.profiler import ProfilerActivity, profile, schedule

        self.trainer = trainer
        on_gpu = trainer.place.device.type == "cuda"
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would write lines into the progress of the run
        if on_gpu and trainer.flow.replay is not None:
            # https://github.com/pytorch/pytorch/issues/75504: graphs, and a profiler that is started again
            os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
            os.environ.setdefault("TEARDOWN_CUPTI", "0")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1) if spare else None
        self.profiler = profile(activities=activities, schedule=plan)
        self.range: AbstractContextManager[Any] | None = None
        self.error: Exception | None = None  # that ended the marks, amid a step of the training
        self.marking = whole_steps(trainer, self.put)
        try:
            self.profiler.start()
            self.marking.__enter__()
        except Exception:
            with suppress(Exception):
                self.profiler.stop()
            raise

    def put(self, part: str | None) -> None:
        """Begin a part of a step; None ends the last one. An error is kept for the end: the step goes on."""
        if self.error is not None:
            return
        try:
            if self.range is not None:
                self.range.__exit__(None, None, None)
            self.range = None
            if part is not None:
                self.range = torch.profiler.record_function(f"{PREFIX}{part}")
                self.range.__enter__()
        except Exception as error:
            self.range, self.error = None, error

    def go_on(self) -> None:
        """Let the next step begin."""
        self.put(None)
        self.profiler.step()
        self.put("data")

    def stop(self) -> None:
        self.put(None)
        with suppress(Exception):
            self.marking.__exit__(None, None, None)
        self.profiler.stop()

    def finish(self, target: Path) -> dict[str, Any]:
        """Write the trace and return where the time went."""
        self.stop()
        if self.error is not None:
            raise self.error
        replay = self.trainer.flow.replay
        replayed = replay is not None and any(record.graph is not None for record in replay.records.values())
        with disk.scratch("vitrail-profile-") as folder:
            trace = Path(folder) / "trace.json"
            self.profiler.export_chrome_trace(str(trace))
            keep(trace, target, packed=True)
            found = break_down(read_trace(trace), whole=replayed or self.trainer.flow.pipeline is not None)
        if replayed:
            found["note"] = (
                "passes were replayed as CUDA graphs, in which forward and backward are one; parallel.replay=false "
                "shows them apart"
            )
        return found


def keep(file: Path, target: Path, *, packed: bool = False) -> None:
    """Copy a finished file into a run's folder."""
    with open(file, "rb") as source, disk.replacing(target, parents=True) as sink:
        if packed:
            with gzip.GzipFile("", "wb", 6, fileobj=sink, mtime=0) as packer:
                shutil.copyfileobj(source, packer)
        else:
            shutil.copyfileobj(source, sink)


class Profiling(AbstractContextManager["Profiling"]):
    """The profiled steps of a session; a context around its loop, which tells of its steps."""

    def __init__(
        self, asked: Profile | str, trainer: Trainer, run_dir: Path, journal: Journal, beat: Callable[..., None]
    ):
        self.asked = asked if isinstance(asked, Profile) else None
        self.trainer, self.run_dir, self.journal, self.beat = trainer, run_dir, journal, beat
        world = trainer.place.world
        ranks: Any = () if self.asked is None else self.asked.ranks
        self.looks = ranks == "all" or world.rank in ranks
        self.absent = [rank for rank in ranks if rank >= world.size] if ranks != "all" else []
        span = self.asked.steps if self.asked is not None else None
        self.span = None if span is None or span[1] <= trainer.done else (max(span[0], trainer.done + 1), span[1])
        self.started = 0 if self.span is None else max(self.span[0] - 1, trainer.done + 1)  # a step, maybe to warm up
        self.tracer: Tracer | None = None
        self.under_way = False  # on every rank, whether it looks or not
        self.problems: list[str] = []
        on_gpu = trainer.place.device.type == "cuda"
        self.snapshots = self.asked is not None and self.asked.memory and on_gpu and self.looks

    # ------------------------------------------------------------ around the loop

    def __enter__(self) -> "Profiling":
        note = self.journal.note
        if self.asked is not None and self.asked.memory and self.trainer.place.device.type != "cuda":
            note("log.profile.memory: of a CPU's memory there are no snapshots; `vitrail plan` tells what takes it")
        if self.absent:
            note(f"log.profile.ranks: there are {self.trainer.place.world.size} ranks, from 0, and no {self.absent}")
        if self.span is not None and self.span[0] > self.trainer.total:
            note(f"log.profile.steps: the run ends at step {self.trainer.total}, before {list(self.span)}")
        if self.snapshots:
            self._try("the memory's history cannot be recorded", lambda: record_memory(MOST_EVENTS))
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, GeneratorExit):
            if self.under_way:
                self._finish()
        else:
            if self.tracer is not None:
                with suppress(Exception):
                    self.tracer.stop()
            if self.snapshots and is_out_of_memory(error):
                self._snap(f"out-of-memory-step-{self.trainer.done + 1}")
        if self.snapshots:
            with suppress(Exception):
                record_memory(None)

    def slows(self, step: int) -> bool:
        """Say whether a step is looked at, on any rank."""
        return self.span is not None and self.started <= step <= self.span[1]

    def steps(self, batches: Timed) -> Iterator[tuple[Batch, float]]:
        """Yield the batches of the session's steps, and look at those that are to be profiled."""
        if self.span is None:
            yield from batches
            return
        while True:
            self._turn(self.trainer.done + 1, self.span)
            if (found := next(batches, None)) is None:
                return
            if self.tracer is not None:
                self.tracer.put("other")
            yield found

    def _turn(self, coming: int, span: tuple[int, int]) -> None:
        """Do what is due before a step."""
        if self.under_way and coming > span[1]:
            self._finish()
        elif self.under_way and self.tracer is not None:
            self._try("the profiler failed", self.tracer.go_on)
        elif coming == self.started:
            self.under_way = True
            if self.looks:
                self._try("no profiler could be started", partial(self._begin, span))

    def _begin(self, span: tuple[int, int]) -> None:
        self.tracer = Tracer(self.trainer, spare=self.started < span[0], steps=span[1] - span[0] + 1)
        self.tracer.put("data")

    def _try(self, what: str, action: Callable[[], Any]) -> Any:
        """Do something that a training can do without; what fails is told with the table."""
        try:
            return action()
        except Exception as error:
            self.problems.append(f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}")
            return None

    # ------------------------------------------------------------ what is kept

    def _finish(self) -> None:
        """Write down what was found; called by all ranks after the same step."""
        assert self.span is not None
        self.under_way = False
        place, (first, last) = self.trainer.place, (self.span[0], min(self.span[1], self.trainer.done))
        self.beat(self.trainer.done, "profiling")
        stem, tracer, self.tracer = f"steps-{first}-{last}", self.tracer, None
        mine: dict[str, Any] = {"rank": place.world.rank}
        if tracer is not None and last >= first:
            name = f"{stem}-rank-{place.world.rank}.trace.json.gz"
            found = self._try("the steps could not be profiled", lambda: tracer.finish(self.run_dir / FOLDER / name))
            mine |= found | {"trace": f"{FOLDER}/{name}"} if found else {}
            mine |= {"memory": self._snap(stem)} if self.snapshots else {}
        elif tracer is not None:
            self._try("the profiler failed", tracer.stop)
        told, self.problems = self.problems, []
        ranks = gather_json(mine | {"problems": told}, place.control)
        self._tell(stem, [first, last], [rank for rank in ranks if rank["problems"] or "trace" in rank])

    def _snap(self, stem: str) -> str | None:
        """Write what this rank's GPU holds; its path in the run."""
        name = f"{stem}-rank-{self.trainer.place.world.rank}.memory.pickle"

        def write() -> str:
            with disk.scratch("vitrail-profile-") as folder:
                dump_memory(str(Path(folder) / name))
                keep(Path(folder) / name, self.run_dir / FOLDER / name)
            self.journal.note(
                f"the GPU's memory is written down in {FOLDER}/{name}; https://pytorch.org/memory_viz shows it"
            )
            return f"{FOLDER}/{name}"

        found: str | None = self._try("the GPU's memory could not be written down", write)
        return found

    def _tell(self, stem: str, steps: list[int], ranks: list[dict[str, Any]]) -> None:
        """Write the table of all ranks, and say where it is."""
        for rank in ranks:
            for problem in rank["problems"]:
                self.journal.note(f"log.profile: rank {rank['rank']}: {problem}")
        found = [rank for rank in ranks if "trace" in rank]
        if not found or not self.trainer.place.world.chief:
            return
        path = f"{FOLDER}/{stem}.json"
        content = json.dumps(strict({"steps": steps, "ranks": found}), indent=1)
        if self._try("the table could not be written", lambda: disk.write_whole(self.run_dir / path, content)):
            self.journal.log("profile", step=self.trainer.done, steps=steps, path=path)
            self.journal.note(f"steps {steps[0]} to {steps[1]}, profiled: {sentence(found[0])}; see {path}")
        for problem in self.problems:
            self.journal.note(f"log.profile: {problem}")


def sentence(rank: dict[str, Any]) -> str:
    """Say where a step of a rank went."""
    total = rank["step_seconds"]
    shares = {name: seconds / total for name, seconds in rank["parts"].items() if seconds}
    words = ", ".join(f"{name} {percent(share)}" for name, share in sorted(shares.items(), key=lambda row: -row[1]))
    return f"{1000 * total:.3g} ms each ({words})"
