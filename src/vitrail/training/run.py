"""A run from the outside: train(), evaluate() and load(), and the session around the training loop.

The session owns what the loop does not know: the folder, the log, pictures, checkpoints, signals and the end.
"""

import errno
import importlib.util
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitrail.data.batch import Statistics
from vitrail.errors import RunFailed, UserError
from vitrail.models.model import Model
from vitrail.recipe import Recipe, load_recipe, unsafe_changes
from vitrail.training.checkpoint import (
    BadCheckpoint,
    Checkpoints,
    check_space,
    checkpoint_name,
    list_checkpoints,
    load_tensors,
    read_manifest,
    stored_tensors,
    verify,
)
from vitrail.training.collective import on_chief, share_json
from vitrail.training.evaluate import Evaluator
from vitrail.training.guards import StopRequest, Watchdog
from vitrail.training.meters import Meter
from vitrail.training.optimizer import group_table
from vitrail.training.progress import Progress
from vitrail.training.runfolder import RunFolder, beside
from vitrail.training.safe_dcp import UnsafeCheckpoint
from vitrail.training.setup import (
    DataParts,
    Parts,
    Place,
    build_model,
    complete,
    find_place,
    make_loader,
    make_sampler,
    make_valid_loader,
    open_data,
)
from vitrail.training.trainer import Trainer, timed

REQUEUE = 75
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SLOW_PHASE = 1800.0  # seconds a start, a compilation or a save may take before it counts as a hang


@dataclass(frozen=True)
class Outcome:
    code: int  # 0 done, 75 stopped and ready to be continued
    run_dir: Path
    step: int
    reason: str


def train(recipe: Any, *, overrides: Sequence[str] = (), fresh: bool = False, quiet: bool = False) -> Outcome:
    """Train as a recipe says: a Recipe, a file, a mapping, or the folder of a run to continue."""
    recipe = find_recipe(recipe, overrides)
    with joined(recipe) as place, StopRequest() as stop:
        session = Session(recipe, place, stop, fresh=fresh, quiet=quiet)
        return session.run()


def find_recipe(given: Any, overrides: Sequence[str] = ()) -> Recipe:
    if isinstance(given, str | Path) and Path(given).is_dir():
        stored = Path(given) / "recipe.yaml"
        if not stored.is_file():
            raise UserError(f"{given}: this folder has no recipe.yaml; give a recipe file or the folder of a run")
        return load_recipe(stored, [f"run.dir={json.dumps(str(given))}", *overrides])
    if isinstance(given, Recipe):
        return load_recipe(given.to_tree(), overrides) if overrides else given
    return load_recipe(given, overrides)


@contextmanager
def joined(recipe: Recipe) -> Iterator[Place]:
    """Take part in the process group for the time of the block."""
    place = find_place(recipe)
    try:
        yield place
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Session:
    def __init__(self, recipe: Recipe, place: Place, stop: StopRequest, *, fresh: bool, quiet: bool):
        self.began = time.monotonic()
        self.place, self.stop, self.quiet = place, stop, quiet
        chief = place.world.chief
        check_tensorboard(recipe)
        self.run_dir = Path(on_chief(lambda: str(beside(recipe.run_dir) if fresh else recipe.run_dir), place.control))
        # Rank 0 looks and everybody hears, so that no rank sees a folder that another has changed meanwhile.
        known, note = on_chief(lambda: find_statistics(self.run_dir), place.control)
        self.notes: list[str] = [note] if note else []
        self.data = open_data(recipe, place, None if known is None else Statistics(*map(tuple, known)))
        self.recipe = recipe = complete(recipe, len(self.data.train.variables))
        self.objective = recipe.objective.build(recipe.model, self.data.statistics)
        self.sampler = make_sampler(recipe, self.data)
        self.parts: Parts = build_model(recipe, place)
        self.trainer = Trainer(recipe, place, self.data, self.parts, self.objective, self.sampler.epoch)
        on_chief(lambda: check_space(self.run_dir, self.trainer.state_bytes()), place.control)
        self.checkpoints = Checkpoints(
            self.run_dir / "checkpoints",
            keep=recipe.checkpoint.keep,
            background=recipe.checkpoint.background,
            group=place.saving,
            cpu_mesh=self.parts.cpu_mesh,
        )
        self.metric_name = recipe.checkpoint.best or self.objective.best_metric
        self.evaluator = Evaluator(
            self.objective,
            make_valid_loader(recipe, place, self.data),
            seed=recipe.run.seed,
            samples=recipe.eval.samples,
            batch=recipe.data.micro_batch or max(1, self.data.batch // place.world.size),
        )
        self.folder: RunFolder | None = None  # rank 0 has one, from here on

        def open_folder() -> None:
            self.folder = RunFolder(self.run_dir)
            try:
                refuse_changes(self.run_dir, recipe)
            except UserError:
                self.folder.discard_if_new()
                raise
            if self.folder.note:
                self.notes.append(self.folder.note)

        on_chief(open_folder, place.control)
        self.board = open_tensorboard(recipe, self.run_dir) if chief else None
        self.last_metrics: tuple[int, dict[str, float]] | None = None
        self.save_seconds = 0.0
        self.save_error: str | None = None

    # ------------------------------------------------------------ the whole

    def run(self) -> Outcome:
        try:
            return self.run_locked()
        finally:
            if self.folder is not None:
                self.folder.close()

    def run_locked(self) -> Outcome:
        trainer, place, recipe = self.trainer, self.place, self.recipe
        resumed = self.resume()
        least = float(recipe.run.hang_limit)
        with ExitStack() as stack:
            self.watchdog = stack.enter_context(Watchdog(place.store, place.world.rank, place.world.size, least=least))
            self.watchdog.beat(trainer.done, "start", allowance=SLOW_PHASE)
            self.progress = stack.enter_context(
                Progress(trainer.total, trainer.done, enabled=place.world.chief and not self.quiet)
            )
            first = trainer.done
            try:
                self.start_log(resumed)
                reason = self.loop()
                self.finish(reason)
            except BaseException as error:
                raise self.fail(error, begun=trainer.done > first) from error
        code = 0 if reason == "done" else REQUEUE
        return Outcome(code, self.run_dir, trainer.done, reason)

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
        best = share_json(self.checkpoints.best, self.place.control)
        self.checkpoints.best = None if best is None else (best[0], best[1])
        if manifest["threads"] != self.place.threads:
            self.notes.append(
                f"this run had {manifest['threads']} threads a process and now has {self.place.threads}: "
                "sums may round differently"
            )
        return True

    def loop(self) -> str:
        trainer, recipe = self.trainer, self.recipe
        every = {
            "log": trainer.steps(recipe.log.every),
            "eval": trainer.steps(recipe.eval.every),
            "picture": trainer.steps(recipe.log.pictures),
        }
        saving = recipe.checkpoint.every != "off"
        if saving:
            every["save"] = trainer.steps(recipe.checkpoint.every)
        watch_every = 0 if recipe.log.activations == "off" else trainer.steps(recipe.log.activations)
        loader = make_loader(recipe, self.place, self.data, self.sampler, step=trainer.done, samples=trainer.samples)
        meter = Meter(
            batch=self.data.batch,
            tokens=self.objective.tokens_per_sample(),
            flops=trainer.model.flops(),
            world=self.place.world.size,
            recompute=self.parts.recompute,
            device=self.place.device,
        )
        if trainer.done == 0:
            self.look(trainer, picture=True, measure=False)

        def due(what: str) -> bool:
            return trainer.done % every[what] == 0 or trainer.done == trainer.total

        rms: dict[str, float] | None = None
        for batch, wait in timed(loader.batches(trainer.done, trainer.total)):
            began = time.perf_counter()
            rate, watch = trainer.rate, bool(watch_every) and trainer.done % watch_every == 0
            first_steps = meter.steps_seen < 2
            self.watchdog.beat(trainer.done, "training", allowance=SLOW_PHASE if first_steps else None)
            told = trainer.step(batch, stop_wish=self.stop_wish(meter), watch=watch)
            meter.add(time.perf_counter() - began + wait, wait)
            rms = told.activation_rms or rms
            if not told.finite:
                self.report_skip(batch, told.loss, told.grad_norm)
            if due("log") or told.stop:
                self.log_step(told.loss, told.grad_norm, rate, meter, rms)
                rms = None
            self.progress.update(trainer.done, {"loss": told.loss, "lr": rate})
            if due("eval") or due("picture"):
                self.look(trainer, picture=due("picture"), measure=due("eval"))
            self.note_saved(self.checkpoints.finished())
            if saving and (told.stop or due("save") or self.is_new_best()):
                self.save()
            if told.stop and trainer.done < trainer.total:
                return told.stop
        return "done"

    def stop_wish(self, meter: Meter) -> str | None:
        if self.stop.signal is not None:
            return "signal"
        limit = self.recipe.run.time_limit
        if limit is not None and self.place.world.chief:
            step = meter.seconds[-1] if meter.seconds else 0.0
            if time.monotonic() - self.began + 2 * step + 2 * self.save_seconds >= limit:
                return "time limit"
        return None

    # ------------------------------------------------------------ what a person sees

    def start_log(self, resumed: bool) -> None:
        trainer = self.trainer
        parameters = sum(p.numel() for p in trainer.model.parameters())
        table = group_table(trainer.optimizer, trainer.base_rate)
        for note in self.notes:
            self.progress.note(note)
        on_chief(self.describe, self.place.control)
        if self.folder is None:
            return
        flops = trainer.model.flops()
        self.folder.log(
            "start",
            step=trainer.done,
            steps=trainer.total,
            resumed=resumed,
            world=self.place.world.size,
            parameters=parameters,
            tokens_per_sample=self.objective.tokens_per_sample(),
            samples_per_epoch=self.sampler.epoch,
            threads=self.place.threads,
            device=device_name(self.place.device),
            groups=table,
            flops_per_sample={
                "model": flops.training,
                "hardware": flops.hardware(recompute=self.parts.recompute),
            },
            notes=self.notes,
        )
        what = f"continuing at step {trainer.done}" if resumed else "starting"
        self.progress.note(
            f"{what}: {parameters:,} parameters, batch {self.data.batch}, {trainer.total} steps "
            f"({trainer.total * self.data.batch / self.sampler.epoch:.1f} epochs) on {self.place.world.size} x "
            f"{device_name(self.place.device)}, in {self.run_dir}"
        )
        for row in table:
            self.progress.note(
                f"  {row['name']}: {row['tensors']} tensors, {row['parameters']:,} parameters, "
                f"lr {row['lr']:g}, weight decay {row['weight_decay']:g}"
            )

    def describe(self) -> None:
        """Write down what is being run, on rank 0."""
        from vitrail.launch.machine import environment

        assert self.folder is not None
        try:
            self.folder.write("recipe.yaml", self.recipe.to_yaml())
            self.folder.write("environment.json", json.dumps(environment(), indent=1))
            self.folder.write("data.json", json.dumps(self.data.train.sources[0].describe()))
        except OSError as error:
            raise UserError(
                f"run.dir: {str(self.run_dir)!r} cannot be written ({error.strerror}); "
                "free some space or choose another folder"
            ) from None

    def log_step(self, loss: float, norm: float, rate: float, meter: Meter, rms: dict[str, float] | None) -> None:
        trainer = self.trainer
        fields: dict[str, Any] = {
            "step": trainer.done,
            "samples": trainer.samples,
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "skipped": trainer.skipped,
            **meter.read(),
        }
        if rms:
            fields["activation_rms"] = rms
        self.progress.update(trainer.done, fields)
        if self.folder is not None:
            self.folder.log("train", **fields)
        if self.board is not None:
            for name, value in fields.items():
                if isinstance(value, int | float) and name not in ("step", "samples"):
                    self.board.add_scalar(f"train/{name}", value, trainer.done)

    def report_skip(self, batch: Any, loss: float, norm: float) -> None:
        trainer = self.trainer
        what = "loss" if not math.isfinite(loss) else "gradient"
        self.progress.note(f"step {trainer.done}: the {what} is not finite; the step is skipped")
        if self.folder is not None:
            self.folder.log("skip", step=trainer.done, reason=f"{what} is not finite", counters=batch.counters)
        counters = trainer.explain_skip(batch)
        if self.folder is not None and len(counters) > len(batch.counters):
            self.folder.log("skip", step=trainer.done, reason=f"{what} is not finite", counters=counters)

    def look(self, trainer: Trainer, *, picture: bool, measure: bool) -> None:
        """Measure on the validation data and draw, with the averaged weights where there are any."""
        measure = measure and self.data.valid is not None
        self.watchdog.beat(trainer.done, "validation", allowance=SLOW_PHASE)
        with trainer.ema.swapped() if trainer.ema else ExitStack():
            if measure:
                metrics = self.evaluator.metrics(
                    trainer.model, tick=lambda: self.watchdog.beat(trainer.done, "validation", allowance=SLOW_PHASE)
                )
                self.last_metrics = (trainer.done, metrics)
                self.log_metrics(metrics)
            if picture:
                name = f"pictures/{self.recipe.objective.kind}-{trainer.done:08d}.png"
                try:
                    (self.run_dir / "pictures").mkdir(exist_ok=True)
                    caption = self.evaluator.picture(trainer.model, self.run_dir / name, step=trainer.done)
                    if self.folder is not None:
                        self.folder.log("picture", step=trainer.done, path=name, caption=caption)
                except OSError as error:
                    if error.errno not in NO_SPACE:  # those come from writing, when all ranks are done with computing
                        raise
                    self.progress.note(f"the picture of step {trainer.done} could not be written: {error.strerror}")

    def log_metrics(self, metrics: dict[str, float]) -> None:
        step = self.trainer.done
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.progress.note(f"step {step}, held out: {text}")
        if self.folder is not None:
            weights = "ema" if self.trainer.ema else "raw"
            self.folder.log("eval", step=step, weights=weights, metrics=metrics, samples=self.recipe.eval.samples)
        if self.board is not None:
            for name, value in metrics.items():
                self.board.add_scalar(f"eval/{name}", value, step)

    # ------------------------------------------------------------ what is kept

    def is_new_best(self) -> bool:
        if self.last_metrics is None or self.last_metrics[0] != self.trainer.done:
            return False
        value = self.last_metrics[1].get(self.metric_name)
        best = self.checkpoints.best
        return value is not None and math.isfinite(value) and (best is None or value < best[0])

    def save(self) -> None:
        trainer = self.trainer
        self.watchdog.beat(trainer.done, "saving", allowance=SLOW_PHASE)
        self.note_saved(self.checkpoints.wait())
        metrics = self.last_metrics[1] if self.last_metrics and self.last_metrics[0] == trainer.done else None
        value = (metrics or {}).get(self.metric_name)
        trainer.save(self.checkpoints, metrics, value if value is not None and math.isfinite(value) else None)

    def note_saved(self, outcome: dict[str, Any] | None, *, final: bool = False) -> None:
        if outcome is None:
            return
        self.save_seconds = outcome["seconds"]
        self.save_error = outcome["error"]
        if outcome["error"]:
            if not final:
                self.progress.note(
                    f"the checkpoint of step {outcome['step']} could not be written ({outcome['error']}); "
                    "training goes on and tries again at the next one"
                )
        elif self.folder is not None:
            path = f"checkpoints/{checkpoint_name(outcome['step'])}"
            self.folder.log("checkpoint", path=path, **{k: outcome[k] for k in ("step", "seconds", "bytes")})

    # ------------------------------------------------------------ the end

    def finish(self, reason: str) -> None:
        self.watchdog.beat(self.trainer.done, "saving", allowance=SLOW_PHASE)
        self.save_error = None
        self.note_saved(self.checkpoints.wait(), final=True)
        if self.save_error:
            raise RunFailed(
                f"the last checkpoint (step {self.trainer.done}) could not be written to {self.checkpoints.folder}: "
                f"{self.save_error}; free some space and continue from the one before it"
            )
        self.end_log(reason, "")

    def fail(self, error: BaseException, *, begun: bool) -> BaseException:
        """Leave a record of a run that had begun and nothing of one that had not; returns what to raise."""
        rank, size = self.place.world.rank, self.place.world.size
        lost = size > 1 and isinstance(error, RuntimeError) and is_lost_connection(error)
        if lost:
            error = RunFailed(f"rank {rank} lost touch with another rank; the first error of any rank says why")
        elif isinstance(error, UserError) and size > 1:
            error = type(error)(f"rank {rank}: {error}")
        if not lost and not isinstance(error, KeyboardInterrupt):
            self.watchdog.beat(self.trainer.done, "saving", allowance=SLOW_PHASE)
            self.note_saved(self.checkpoints.wait())  # the save under way is still a good one
        if self.folder is not None and not begun and isinstance(error, UserError):
            self.folder.discard_if_new()
        else:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.end_log("failed", message)
        return RunFailed(str(error)) if begun and isinstance(error, UserError) else error

    def end_log(self, reason: str, message: str) -> None:
        if self.board is not None:
            self.board.close()
        if self.folder is None:
            return
        from vitrail.report.page import write_report

        seconds = time.monotonic() - self.began
        self.folder.log("end", step=self.trainer.done, reason=reason, seconds=seconds, message=message)
        try:
            write_report(self.run_dir)
        except UserError as error:  # the run is what counts
            self.progress.note(str(error))


# ---------------------------------------------------------------- small questions


def find_statistics(run_dir: Path) -> tuple[list[list[float]] | None, str | None]:
    """Mean and std that a run to be continued was normalised with."""
    for folder in list_checkpoints(run_dir / "checkpoints"):
        try:
            found = read_manifest(folder)["statistics"]
            return [[float(value) for value in found[name]] for name in ("mean", "std")], None
        except (BadCheckpoint, KeyError, TypeError, ValueError):
            continue
    return None, None


def refuse_changes(run_dir: Path, recipe: Recipe) -> None:
    """A run goes on with the recipe that it began with; only what does not change its result may differ."""
    for folder in list_checkpoints(run_dir / "checkpoints"):
        try:
            stored = read_manifest(folder)["recipe"]
        except (BadCheckpoint, KeyError):
            continue
        changes = unsafe_changes(stored, recipe.to_tree())
        if changes:
            shown = "; ".join(f"{key}: {old!r} became {new!r}" for key, old, new in changes[:10])
            raise UserError(
                f"{run_dir} was begun with another recipe ({shown}); go back to it, "
                "or start beside it with --fresh or another run.name"
            )
        return


def is_lost_connection(error: RuntimeError) -> bool:
    """What gloo and NCCL say on the ranks that survive another."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        words in text for words in ("connection closed by peer", "connection reset", "connect failure", "gloo")
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def check_tensorboard(recipe: Recipe) -> None:
    if recipe.log.tensorboard is True and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "log.tensorboard: true, but TensorBoard is not installed; "
            "run: pip install 'vitrail[tensorboard]', or set it to auto"
        )


def open_tensorboard(recipe: Recipe, run_dir: Path) -> Any:
    if recipe.log.tensorboard is False or importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"))


# ---------------------------------------------------------------- after a run


def find_checkpoint(run: str | Path, checkpoint: str | int | None) -> tuple[Path, dict[str, Any]]:
    """A verified checkpoint of a run: the one of a step, or the newest good one."""
    folder = Path(run) / "checkpoints"
    found = list_checkpoints(folder)
    if checkpoint is not None:
        if not str(checkpoint).isdecimal():
            raise UserError(f"checkpoint: {checkpoint!r} is not a step; give a number such as 200")
        found = [p for p in found if int(p.name[5:]) == int(checkpoint)]
    if not found:
        wanted = "checkpoint" if checkpoint is None else f"checkpoint of step {checkpoint}"
        have = ", ".join(str(int(p.name[5:])) for p in list_checkpoints(folder)) or "none"
        raise UserError(f"{run}: no {wanted} here (there are: {have}); give the folder of a run that has saved one")
    problems = []
    for path in found:
        try:
            manifest = read_manifest(path)
            verify(path, manifest)
            stored_tensors(path, manifest)
            return path, manifest
        except (BadCheckpoint, UnsafeCheckpoint, OSError) as error:
            problems.append(f"{path.name}: {error}")
    raise UserError(f"{run}: no usable checkpoint ({'; '.join(problems)})")


def which_weights(weights: str | None, recipe: Recipe) -> str:
    if weights not in (None, "ema", "raw"):
        raise UserError(f"weights: {weights!r} is unknown; ask for 'ema' or 'raw'")
    if weights == "ema" and recipe.ema is None:
        raise UserError("weights: this run has no moving average; ask for 'raw'")
    return weights or ("ema" if recipe.ema else "raw")


def load(run: str | Path, *, checkpoint: str | int | None = None, weights: str | None = None) -> Model:
    """The trained model of a run, on the CPU and ready to be called; averaged weights where the run has them."""
    path, manifest = find_checkpoint(run, checkpoint)
    recipe = load_recipe(manifest["recipe"])
    with torch.device("meta"):
        model = recipe.model.build()
    model.to_empty(device="cpu")
    load_weights(model, path, manifest, which_weights(weights, recipe), None)
    return model.eval()


def load_weights(model: Model, path: Path, manifest: dict[str, Any], weights: str, group: Any) -> None:
    prefix = "ema" if weights == "ema" else "model"
    try:
        load_tensors(path, manifest, {f"{prefix}.{n}": p.detach() for n, p in model.named_parameters()}, group)
    except (BadCheckpoint, UnsafeCheckpoint) as error:
        raise UserError(f"checkpoint {path} was not loaded: {error}; try another one of this run") from None


def evaluate(
    run: str | Path,
    *,
    checkpoint: str | int | None = None,
    samples: int | None = None,
    weights: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Metrics of a run's checkpoint on its validation data."""
    path, manifest = find_checkpoint(run, checkpoint)
    recipe = load_recipe(manifest["recipe"], overrides)
    weights = which_weights(weights, recipe)
    if samples is not None and samples < 1:
        raise UserError(f"samples: {samples} must be at least 1")
    if not recipe.data.valid:
        raise UserError(f"{run}: its recipe has no data.valid to evaluate on; give one: data.valid=[{{path: ...}}]")
    with joined(recipe) as place:
        data: DataParts = open_data(
            recipe, place, Statistics(**{k: tuple(v) for k, v in manifest["statistics"].items()})
        )
        recipe = complete(recipe, len(data.train.variables))
        model = build_model(recipe, place).model
        load_weights(model, path, manifest, weights, place.saving)
        objective = recipe.objective.build(recipe.model, data.statistics)
        number = samples or recipe.eval.samples
        evaluator = Evaluator(
            objective,
            make_valid_loader(recipe, place, data),
            seed=recipe.run.seed,
            samples=number,
            batch=recipe.data.micro_batch or max(1, data.batch // place.world.size),
        )
        metrics = evaluator.metrics(model)
    return {"run": str(run), "step": manifest["step"], "weights": weights, "samples": number, "metrics": metrics}
