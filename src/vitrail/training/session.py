"""One sitting of a run: the training loop and everything around it, from the recipe to the last line of the log.

The loop takes batches and gives each to the trainer, which knows one step. The session knows the folder, pictures,
validation, checkpoints, signals and the end.
"""

import dataclasses
import itertools
import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitrail import disk
from vitrail.contents import FORMAT, check_name
from vitrail.data.batch import Batch
from vitrail.data.dataset import check_mixing
from vitrail.data.files.stage import configs_to_open
from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import BadData, RunFailed, UserError
from vitrail.parallel.agree import on_chief, on_chief_for_long, share_json, together
from vitrail.parallel.mesh import layout_of
from vitrail.recipe import Recipe, plugins
from vitrail.recipe.durations import clock_of
from vitrail.recipe.load import Change
from vitrail.training.alike import compare_data, data_facts
from vitrail.training.bad import BadSamples, way_on
from vitrail.training.checkpoint import Checkpoints, check_space
from vitrail.training.continuing import (
    IMPATIENT,
    Patience,
    find_changes,
    newest_manifest,
    tell_changes,
    tell_lengths,
)
from vitrail.training.evaluate import Evaluator, Meter, check_metrics, led_by, of_all_ranks
from vitrail.training.failures import REQUEUE, SLOW_PHASE, StopRequest, Watchdog, is_lost_connection, within
from vitrail.training.journal import Journal, Progress
from vitrail.training.loggers import Background, Facts, open_loggers
from vitrail.training.memory import short_of_memory
from vitrail.training.pictures import Pictures
from vitrail.training.profiling import FOLDER, Profiling
from vitrail.training.runfolder import RunFolder, beside
from vitrail.training.setup import (
    Place,
    build_model,
    equip,
    make_evaluator,
    make_loader,
    make_sampler,
    normalised,
    open_parts,
)
from vitrail.training.trainer import Garbage, Progressed, Timed, Trainer
from vitrail.weights import Report, load_initial
from vitrail.weights.runs import list_checkpoints

SLOW_DISK = 100e6  # bytes a second, until a save has been timed

_sittings = itertools.count()  # trainings of this process that asked for a fresh folder


@dataclass(frozen=True)
class Outcome:
    code: int  # 0 done, 75 stopped and ready to be continued
    run_dir: Path
    step: int
    reason: str
    report: bool = True  # whether one was asked for

    @property
    def page(self) -> Path:
        """Return what to look at."""
        return self.run_dir / "report.html" if self.report else self.run_dir


class Session:
    def __init__(
        self,
        recipe: Recipe,
        place: Place,
        stop: StopRequest,
        watchdog: Watchdog,
        *,
        fresh: bool,
        quiet: bool,
        trust: bool = False,  # let a codec run code that comes with its files
        other_data: bool = False,  # go on although the data are not those that the run began with
        change: bool = False,  # go on with changes to the recipe that may be made on purpose
    ):
        self.began = time.monotonic()
        self.other_data, self.change = other_data, change
        self.place, self.stop, self.watchdog, self.quiet = place, stop, watchdog, quiet
        watchdog.beat(0, "start")
        self.opened: list[Background] = []  # rank 0's loggers
        on_chief(lambda: self.opened.extend(open_loggers(recipe)), place.control)
        self.run_dir = Path(on_chief(lambda: str(choose_folder(recipe, place, fresh)), place.control))
        # Rank 0 looks and everybody hears, so that no rank sees a folder that another has changed meanwhile.
        known = on_chief(lambda: (newest_manifest(self.run_dir) or {}).get("statistics"), place.control)
        if recipe.data.stage is not None:  # before the data are opened, since it may take long
            together(lambda: self.stage(recipe), place.control)
        statistics = None if known is None else stored_statistics(known)
        self.recipe, self.data, self.objective = open_parts(recipe, place, statistics, watchdog)
        recipe = self.recipe
        check_mixing(recipe.data.augment, self.data.batch, layout_of(recipe.parallel, place.world.size).data)
        self.data = dataclasses.replace(self.data, facts=self.know_data())
        watchdog.beat(0, "start")
        equip(self.objective, recipe, place, self.data, trust=trust)
        self.metric_name = recipe.checkpoint.best or self.objective.best_metric
        if self.metric_name not in self.objective.metrics:
            raise UserError(
                f"checkpoint.best: {self.metric_name!r} is not measured by objective {recipe.objective.kind!r}; "
                f"use one of {', '.join(self.objective.metrics)}"
            )
        if recipe.run.patience is not None and self.data.valid is None:
            raise UserError("run.patience: there is no score to wait for without held-out data; give data.valid")
        larger = self.metric_name in self.objective.larger_is_better
        self.patience = Patience(recipe.run.patience, larger)
        self.changes: list[Change] = []  # of the recipe, that this sitting brings
        self.sampler = make_sampler(recipe, self.data)
        self.parts = build_model(recipe, place, self.data, self.objective)
        self.initial: Report | None = None  # what a new run starts from, other than random numbers
        if recipe.init and not on_chief(lambda: bool(list_checkpoints(self.run_dir / "checkpoints")), place.control):
            names = getattr(recipe.objective, "names", None)
            with torch.device("meta"):
                whole = recipe.model.build()
            asked = recipe.objective
            self.initial = together(
                lambda: load_initial(self.parts.model, recipe.init, names, whole, objective=asked), place.control
            )
        self.trainer = Trainer(recipe, place, self.data, self.parts, self.objective, self.sampler.epoch)
        on_chief(lambda: check_space(self.run_dir, self.trainer.state_bytes()), place.control)
        self.checkpoints = Checkpoints(
            self.run_dir / "checkpoints",
            keep=sys.maxsize if recipe.checkpoint.keep == "all" else recipe.checkpoint.keep,
            background=recipe.checkpoint.background,
            group=place.saving,
            cpu_mesh=self.parts.cpu_mesh,
            larger_is_better=larger,
        )
        watchdog.saving = self.checkpoints.is_saving
        self.evaluator: Evaluator = make_evaluator(recipe, place, self.data, self.objective, self.parts.flow)
        look = {"kind": recipe.objective.kind, "held_out": self.data.valid is not None, "slices": recipe.log.slices}
        self.pictures = Pictures(self.evaluator, place.control, **look)
        self.bad = BadSamples()
        self.notes: list[str] = [self.evaluator.note] if self.data.valid is not None and self.evaluator.note else []
        for part in (self.data.train, self.data.valid):
            self.notes += [] if part is None else part.notes
        self.notes += self.parts.flow.notes
        if self.objective.wants_average and recipe.ema is None:
            self.notes.append(
                "this run keeps no moving average of its weights, with which samples are much better; set "
                "ema: {decay: 0.999}, or 0.9999 for a long run"
            )
        self.folder: RunFolder | None = None  # rank 0 has one, from here on
        on_chief(self.open_folder, place.control)
        self.last_metrics: tuple[int, dict[str, float]] | None = None
        self.save_seconds = self.trainer.state_bytes() / SLOW_DISK
        self.save_error: str | None = None
        self.rounds: deque[float] = deque(maxlen=50)  # seconds of the latest steps with all that came between

    def stage(self, recipe: Recipe) -> None:
        for configs in (recipe.data.train, recipe.data.valid):
            configs_to_open(recipe.data, configs, tick=partial(self.watchdog.beat, 0, "staging"))

    def know_data(self) -> dict[str, Any]:
        datasets = {"train": self.data.train, "valid": self.data.valid}
        configs = {"train": self.recipe.data.train, "valid": self.recipe.data.valid}

        self.watchdog.beat(0, "opening the data")

        def find(tick: Callable[[], None]) -> dict[str, Any]:
            before = (newest_manifest(self.run_dir) or {}).get("data")
            return data_facts(datasets, configs, before, self.run_dir, tick)

        return on_chief_for_long(find, self.place.control, partial(self.watchdog.beat, 0, "opening the data"))

    def refuse_other_data(self) -> None:
        """Refuse other data than the run began with, unless they were asked for."""
        manifest = newest_manifest(self.run_dir)
        if manifest is None:
            return
        if manifest.get("data") is None:
            self.notes.append(
                "this run was begun by an older vitrail, which did not write down what its data were: whether they are "
                "still the same is not known"
            )
            return
        assert self.data.facts is not None
        others, notes = compare_data(manifest["data"], self.data.facts)
        self.notes += notes
        if others and not self.other_data:
            raise UserError(
                f"{self.run_dir} was begun with other data ({'; '.join(others[:5])}); bring those back, start beside "
                "it with --fresh, or continue it on the new ones with --other-data, as after bad data were mended or "
                "removed"
            )
        self.notes += [f"continued on other data: {other}" for other in others]

    def open_folder(self) -> None:
        self.folder = RunFolder(self.run_dir)
        self.checkpoints.check = self.folder.check
        try:
            self.changes = find_changes(self.run_dir, self.recipe, change=self.change)
            self.refuse_other_data()
        except UserError:
            self.folder.discard_if_new()
            raise
        if self.folder.note:
            self.notes.append(self.folder.note)

    # ------------------------------------------------------------ the whole

    def run(self) -> Outcome:
        try:
            return self.run_locked()
        finally:
            if self.folder is not None:
                self.folder.close()

    def run_locked(self) -> Outcome:
        trainer, chief = self.trainer, self.place.world.chief
        resumed = self.resume()
        first = trainer.done
        self.watchdog.keep_traces(self.run_dir)
        with Progress(trainer.total, first, enabled=chief and not self.quiet) as progress:
            facts = Facts(self.recipe.run.name, self.run_dir, self.recipe.to_tree(), first)
            self.journal = Journal(self.folder, progress, self.opened, facts, report=self.recipe.log.report)
            try:
                self.introduce(resumed)
                reason = self.loop()
                self.finish(reason)
            except BaseException as error:
                raise self.fail(error, begun=trainer.done > first) from error
        report = self.recipe.log.report
        ended = reason in ("done", IMPATIENT)
        return Outcome(0 if ended else REQUEUE, self.run_dir, trainer.done, reason, report)

    def resume(self) -> bool:
        manifest = self.checkpoints.load_newest(self.trainer.restore, self.notes.append)
        if manifest is None:
            if on_chief(lambda: bool(list_checkpoints(self.checkpoints.folder)), self.place.control):
                raise UserError(
                    f"no checkpoint in {self.checkpoints.folder} is usable: {'; '.join(self.notes)}; "
                    "mend or remove them, or start beside this run with --fresh"
                )
            return False
        on_chief(lambda: self.checkpoints.set_aside_newer(manifest["step"]), self.place.control)
        if self.place.world.chief:
            self.checkpoints.remember_best(self.metric_name)
        self.bad.take_up(manifest.get("bad"))
        best = share_json(self.checkpoints.best, self.place.control)
        self.checkpoints.best = None if best is None else (best[0], best[1])
        self.patience.restore(manifest.get("patience"), self.checkpoints.best)
        self.notes += tell_lengths(manifest, self.trainer, self.run_dir, self.patience, self.metric_name)
        if manifest["threads"] != self.place.threads:
            self.notes.append(
                f"this run had {manifest['threads']} threads a process and now has {self.place.threads}: "
                "sums may round differently"
            )
        return True

    def loop(self) -> str:
        trainer, recipe = self.trainer, self.recipe
        if self.patience.over and trainer.done < trainer.total:
            return IMPATIENT
        every = {
            "log": trainer.steps(recipe.log.every),
            "eval": trainer.steps(recipe.eval.every),
        }
        if recipe.log.pictures != "off":
            every["picture"] = trainer.steps(recipe.log.pictures)
        saves, clock = recipe.checkpoint.every != "off", clock_of(recipe.checkpoint.every)
        if saves:
            every["save"] = trainer.total if clock else trainer.steps(recipe.checkpoint.every)
        watch_every = 0 if recipe.log.activations == "off" else trainer.steps(recipe.log.activations)
        loader = make_loader(
            recipe,
            self.place,
            self.data,
            self.sampler,
            self.objective,
            trainer.flow,
            step=trainer.done,
            samples=trainer.samples,
        )
        loaders = (loader, self.evaluator.loader)
        self.bad.begin(loaders)
        meter = Meter(
            batch=self.data.batch,
            tokens=self.objective.tokens_per_sample(),
            flops=self.objective.flops(trainer.model),
            world=self.place.world.size,
            recompute=trainer.flow.again,
            device=self.place.device,
        )

        def due(what: str) -> bool:
            return what in every and (trainer.done % every[what] == 0 or trainer.done == trainer.total)

        if trainer.done == 0 and "picture" in every:
            self.look(picture=True, measure=False)
        rms: dict[str, float] | None = None
        owed = False  # a save that was due in a step that was skipped
        saved = time.monotonic()
        loaded = loader.batches(trainer.done, trainer.total)
        batches = Timed(loaded, loader.has_next)
        # The trainer sees the batch to come, if it is here; nothing is read afterwards.
        profiling = Profiling(recipe.log.profile, trainer, self.run_dir, self.journal, self.watchdog.beat)
        with closing(loaded), trainer.expecting(batches.coming), profiling, Garbage() as garbage:
            for batch, wait in profiling.steps(batches):
                began = time.perf_counter()
                rate, watch = trainer.rate, bool(watch_every) and trainer.done % watch_every == 0
                compiling = meter.steps_seen < 2
                self.watchdog.beat(trainer.done, "training", allowance=SLOW_PHASE if compiling else None)
                overdue = clock is not None and self.place.world.chief and time.monotonic() - saved >= clock
                wishes: Any = {"stop_wish": self.stop_wish(), "save_wish": overdue}
                told = trainer.step(batch, **wishes, watch=watch, bad=self.bad.look(loaders))
                meter.add(time.perf_counter() - began + wait, wait, slowed=profiling.slows(trainer.done))
                garbage.between(trainer.done)
                rms = told.activation_rms or rms
                if not told.finite:
                    self.skip(batch, told)
                self.journal.progress.update(trainer.done, {"loss": told.loss, "lr": rate})
                share = trainer.sample_share
                self.bad.tell(told.bad, self.journal, self.place.control, step=trainer.done, share=share)
                if due("log") or told.stop:
                    self.tell(told, rate, meter, rms)
                    rms = None
                if due("eval") or due("picture"):
                    self.look(picture=due("picture"), measure=due("eval"))
                    self.journal.renew_page(trainer.done)
                self.note_saved(self.checkpoints.finished())
                owed = owed or due("save") or told.save or (saves and self.is_new_best())
                # While steps are skipped nothing is saved, nor is the run stopped: its state may be of no use, and
                # would push out a good one. It goes on to a step that is not skipped, or fails after some.
                enough = self.patience.over and told.finite
                if told.finite and (told.stop or owed or enough):
                    self.save()
                    owed, saved = False, time.monotonic()
                if enough and trainer.done < trainer.total:
                    return IMPATIENT
                if told.finite and told.stop and trainer.done < trainer.total:
                    return told.stop
                self.rounds.append(time.perf_counter() - began + wait)
        return "done"

    def stop_wish(self) -> str | None:
        """Return this rank's reason to stop after the coming step."""
        if self.stop.signal is not None:
            return "signal"
        limit = self.recipe.run.time_limit
        if limit is not None and self.place.world.chief:
            coming = 2 * max(self.rounds, default=0.0) + 2 * self.save_seconds
            if time.monotonic() - self.began + coming >= limit:
                return "time limit"
        return None

    # ------------------------------------------------------------ what is told

    def introduce(self, resumed: bool) -> None:
        trainer, world = self.trainer, self.place.world.size
        for note in self.notes:
            self.journal.note(note)
        if self.initial is not None:
            self.journal.note(str(self.initial))
            self.journal.log("init", step=trainer.done, **self.initial.to_json())
        tell_changes(self.journal, self.changes, trainer.done)
        self.journal.note(f"data are normalised: {normalised(self.recipe, self.data)}")
        on_chief(self.describe, self.place.control)
        parameters = self.parts.parameters
        flops = self.objective.flops(trainer.model)
        device = torch.cuda.get_device_name(self.place.device) if self.place.device.type == "cuda" else "CPU"
        epochs = trainer.total * self.data.batch / self.sampler.epoch
        self.journal.start(
            what=f"{f'continuing at step {trainer.done}' if resumed else 'starting'}: {parameters:,} parameters, "
            f"batch {self.data.batch}, {trainer.total} steps ({epochs:.1f} epochs) on {world} x {device}, "
            f"in {self.run_dir}",
            groups=trainer.group_table(),
            step=trainer.done,
            steps=trainer.total,
            resumed=resumed,
            world=world,
            launcher=self.place.world.note,
            layout=str(trainer.flow.layout),
            parameters=parameters,
            tokens_per_sample=self.objective.tokens_per_sample(),
            samples_per_epoch=self.sampler.epoch,
            threads=self.place.threads,
            device=device,
            flops_per_sample={
                "model": flops.training,
                "hardware": flops.hardware(recompute=trainer.flow.again),
            },
            best_metric=self.metric_name,
            larger_is_better=self.metric_name in self.objective.larger_is_better,
            notes=self.notes,
        )

    def describe(self) -> None:
        """Write down what is being run, on rank 0."""
        from vitrail.launch.machine import environment

        assert self.folder is not None
        for place in (self.run_dir, self.run_dir / "pictures", self.run_dir / FOLDER):
            disk.sweep(place)
        try:
            self.folder.write("recipe.yaml", self.recipe.to_yaml())
            facts = {"format": FORMAT, "plugins": plugins.loaded(), **environment()}
            self.folder.write("environment.json", json.dumps(facts, indent=1))
            self.folder.write("data.json", json.dumps(self.data.train.sources[0].describe()))
        except OSError as error:
            raise UserError(
                f"run.dir: {str(self.run_dir)!r} cannot be written ({error.strerror}); "
                "free some space or choose another folder"
            ) from None

    def tell(self, told: Progressed, rate: float, meter: Meter, rms: dict[str, float] | None) -> None:
        trainer = self.trainer
        fields: dict[str, Any] = {
            "step": trainer.done,
            "samples": trainer.samples,
            "loss": told.loss,
            "lr": rate,
            "grad_norm": told.grad_norm,
            "skipped": trainer.skipped,
            **of_all_ranks(meter.read(), self.place.control),
            **({"bad_samples": number} if (number := self.bad.items.total()) else {}),
            **({"filled_chunks": told.bad[1]} if told.bad[1] else {}),
        }
        self.journal.step(fields | ({"activation_rms": rms} if rms else {}))

    def skip(self, batch: Batch, told: Progressed) -> None:
        self.journal.skip(step=self.trainer.done, loss=told.loss, counters=self.trainer.all_counters(batch))
        self.trainer.refuse_more_skips()

    # ------------------------------------------------------------ validation and pictures

    def look(self, *, picture: bool, measure: bool) -> None:
        """Measure on the validation data and draw, with the averaged weights where there are any."""
        trainer = self.trainer
        began, longest = time.monotonic(), 0.0
        self.watchdog.beat(trainer.done, "validation")

        def tick() -> None:
            nonlocal began, longest
            longest, began = max(longest, time.monotonic() - began), time.monotonic()
            self.watchdog.beat(trainer.done, "validation", allowance=Watchdog.MANY_STEPS * longest)

        with trainer.ema.swapped() if trainer.ema else ExitStack():
            if measure and self.data.valid is not None:
                metrics = self.evaluator.metrics(trainer.flow, tick=tick)
                check_metrics(self.objective, metrics)
                metrics = led_by(self.metric_name, metrics)
                self.last_metrics = (trainer.done, metrics)
                self.patience.see(metrics[self.metric_name], trainer.done)
                weights = "ema" if trainer.ema else "raw"
                self.journal.metrics(metrics, self.evaluator, step=trainer.done, weights=weights)
            if picture:
                beat = partial(self.watchdog.beat, trainer.done, "drawing")
                self.pictures.draw(trainer.flow, self.folder, self.journal, trainer.done, beat, worst=measure)

    # ------------------------------------------------------------ what is kept

    def is_new_best(self) -> bool:
        if self.last_metrics is None or self.last_metrics[0] != self.trainer.done:
            return False
        return self.checkpoints.is_better(self.last_metrics[1][self.metric_name])

    def save(self) -> None:
        trainer = self.trainer
        self.watchdog.beat(trainer.done, "saving")
        self.note_saved(self.checkpoints.wait())
        self.check_folder()
        metrics = self.last_metrics[1] if self.last_metrics and self.last_metrics[0] == trainer.done else None
        more = {"metrics": metrics, "bad": self.bad.to_json(), "patience": self.patience.to_json()}
        trainer.save(self.checkpoints, more, (metrics or {}).get(self.metric_name))

    def check_folder(self) -> None:
        """End on all ranks where the run folder is no longer at its place."""

        def look() -> None:
            if self.folder is not None:
                with suppress(OSError):  # a disk that does not answer now: the save looks again, and may fail
                    self.folder.check()

        on_chief(look, self.place.control)

    def note_saved(
        self,
        outcome: dict[str, Any] | None,
        *,
        then: str | None = "training goes on and tries again at the next one",
    ) -> None:
        if outcome is not None:
            self.save_seconds, self.save_error = outcome["seconds"], outcome["error"]
            self.journal.saved(outcome, then=then)

    # ------------------------------------------------------------ the end

    def finish(self, reason: str) -> None:
        self.watchdog.beat(self.trainer.done, "saving")
        self.save_error = None
        self.note_saved(self.checkpoints.wait(), then=None)
        if self.save_error:
            raise RunFailed(
                f"the last checkpoint (step {self.trainer.done}) could not be written to {self.checkpoints.folder}: "
                f"{self.save_error}; free some space and continue from the one before it"
            )
        self.check_folder()
        if reason in ("done", IMPATIENT):
            self.trainer.refuse_skipped_end()
            if self.last_metrics is None or math.isfinite(self.last_metrics[1][self.metric_name]):
                on_chief(self.checkpoints.tidy, self.place.control)
        message = self.patience.describe(self.metric_name) if reason == IMPATIENT else ""
        if message:
            self.journal.note(f"ended at step {self.trainer.done}: {message}")
        self.end(reason, message)

    def fail(self, error: BaseException, *, begun: bool) -> BaseException:
        """Leave a record of a run that had ever begun and nothing of a new one that had not; returns what to raise."""
        rank, size = self.place.world.rank, self.place.world.size
        error = plugins.told(short_of_memory(error, self.recipe, self.watchdog))
        if isinstance(error, BadData) and (begun or list_checkpoints(self.checkpoints.folder)):
            error = type(error)(f"{error}; {way_on(error, self.run_dir, self.recipe.data)}")
        if isinstance(error, UserError) and size > 1:
            error = type(error)(f"rank {rank}: {error}")
        # A save under way may still become a good one; without another rank it ends soon, one way or the other.
        patience = Watchdog.GRACE if size > 1 and is_lost_connection(error) else SLOW_PHASE
        wait = not isinstance(error, KeyboardInterrupt)
        error, story = self.watchdog.explain(error)  # first of all: the others are waiting, and their clocks run
        if wait:
            self.note_saved(within(patience, self.checkpoints.wait), then="the run ends without it")
        if self.folder is not None and self.folder.new and not begun and isinstance(error, UserError):
            self.folder.discard_if_new()
        else:
            self.end("failed", story)
        return RunFailed(str(error)) if begun and isinstance(error, UserError) else error

    def end(self, reason: str, message: str) -> None:
        seconds = time.monotonic() - self.began
        self.journal.end(step=self.trainer.done, reason=reason, seconds=seconds, message=message)


# ---------------------------------------------------------------- what the folder says, asked by rank 0


def choose_folder(recipe: Recipe, place: Place, fresh: bool) -> Path:
    """Return the run's folder, or a new one beside it; a restart of the same job finds the first choice."""
    check_name(recipe.run_dir, "run.dir")
    if not fresh:
        return recipe.run_dir
    name = f"fresh/{next(_sittings)}"
    if not place.root_store.check([name]):
        place.root_store.set(name, str(beside(recipe.run_dir)))
    return Path(place.root_store.get(name).decode())
