"""One step of a training, and the state that it changes; the loop is `Session.loop` (session.py).

A step: this rank's slice of the batch, in micro-batches; sums of losses backward; one small all-reduce of loss, count,
gradient norm and stop wishes; then every rank takes the same decision (step, skip, stop) from the same numbers.
All that a step launches is launched before a rank waits for these, and so is what the next one begins with: a device
that is faster than Python then does not idle.
Gradients are sums over all ranks (parallel/), so dividing by the count of all ranks is all the scaling there is.

Moving average of the weights: a second set of shards, updated in place, saved and restored like the first.

The weights of a step stay as they are until the next update, so that the average can wait until there is time for it:
`owe` says that it is behind, `settle` (or whoever asks for it) brings it up to date.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.draws import Draws, key, sent
from vitrail.errors import UserError, expect
from vitrail.objectives.objective import Loss, Objective, drop_path_table
from vitrail.parallel.agree import gather_json, together
from vitrail.parallel.flow import Flow
from vitrail.parallel.mesh import local
from vitrail.recipe import Recipe, steps_of
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.lengths import lay_out
from vitrail.training.optimizers.groups import group_table
from vitrail.training.optimizers.optimizer import (
    Optimizer,
    make_groups,
    named_state,
    restore_state,
    step,
)
from vitrail.training.private import foreach_lerp_, foreach_mul_
from vitrail.training.setup import DataParts, Parts, Place
from vitrail.weights.runs import BadCheckpoint, check_tensors, read_tensors, stored_tensors


class EMA:
    def __init__(self, flow: Flow, decay: float):
        self.decay = decay
        self.flow, self.model = flow, flow.model
        self._average: dict[str, Tensor] = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._owed: int | None = None  # optimizer steps, of which it knows all but the last

    @property
    def average(self) -> dict[str, Tensor]:
        self.settle()
        return self._average

    def owe(self, steps: int) -> None:
        """Note that the weights are those after `steps` optimizer steps, and stay so until settle()."""
        self.settle()
        self._owed = steps

    @torch.no_grad()
    def settle(self) -> None:
        """Take the weights in; a young average forgets faster, so the start fades."""
        if self._owed is None:
            return
        decay = min(self.decay, (1 + self._owed) / (10 + self._owed))
        self._owed = None
        average = [local(t) for t in self._average.values()]
        foreach_lerp_(average, [local(p.detach()) for p in self.model.parameters()], 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model compute with the averaged weights inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        average = self.average
        for name, parameter in self.model.named_parameters():
            mine, averaged = local(parameter.detach()), local(average[name])
            kept = mine.clone()
            mine.copy_(averaged)
            averaged.copy_(kept)
        self.flow.forget_gathered()


STOP_REASONS = ("signal", "time limit")


@dataclass
class Progressed:
    """The numbers that a step found out, the same on every rank."""

    loss: float
    grad_norm: float
    finite: bool
    stop: str | None
    activation_rms: dict[str, float] | None
    bad: tuple[int, int] = (0, 0)  # samples skipped and chunks filled so far, over all ranks
    save: bool = False  # whether a checkpoint is due by the clock


class Trainer:
    """The state of a run and how one step changes it; knows nothing of folders, logs or pictures."""

    def __init__(self, recipe: Recipe, place: Place, data: DataParts, parts: Parts, objective: Objective, epoch: int):
        self.recipe, self.place, self.data, self.parts, self.objective = recipe, place, data, parts, objective
        self.model, self.flow = parts.model, parts.flow
        self.lengths = lay_out(recipe, batch=data.batch, epoch=epoch)
        self.total, self.base_rate = self.lengths.total, self.lengths.base_rate
        self.epoch = epoch
        self.optimizer = Optimizer(make_groups(self.model, recipe.optimizer, parts.names))
        self.ema = EMA(self.flow, recipe.ema.decay) if recipe.ema else None
        self.drop_path_rates = parts.drop_path_rates
        self.done = 0  # steps, skipped ones too: the data they used is used up
        self.samples = 0  # the counter of the sample to come
        self.optimizer_steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        on_gpu = place.device.type == "cuda"
        own = [torch.cuda.default_generators[torch.cuda.current_device()]] if on_gpu else []
        self._generators = [torch.default_generator, *own]
        self._coming: Callable[[], Batch | None] = lambda: None
        self._ahead: tuple[Batch, tuple[dict[str, Any], Any]] | None = None  # a batch, prepared before its step

    def steps(self, duration: int | str) -> int:
        return steps_of(duration, total=self.total, batch=self.data.batch, epoch=self.epoch)

    @property
    def rate(self) -> float:
        """Learning rate of the step to come."""
        return self.lengths.rate(self.done)

    @property
    def sample_share(self) -> float:
        """Share of the ranks that have samples of their own: those that share samples count the same bad ones."""
        return self.flow.layout.data / self.place.world.size

    # ------------------------------------------------------------ one step

    def step(
        self,
        batch: Batch,
        *,
        stop_wish: str | None,
        watch: bool,
        save_wish: bool = False,
        bad: tuple[int, int] = (0, 0),
    ) -> Progressed:
        """Forward, backward and update; or a skip, if anything is not finite anywhere.

        `stop_wish` is this rank's reason to stop after the step, one of STOP_REASONS; any rank's wish stops all.
        `save_wish` says that a checkpoint is due by this rank's clock; all hear of it.
        `bad` is what this rank has found of bad data so far.
        """
        self.model.watching = {} if watch else None
        loss_sum, count = self._forward_backward(batch)
        rms, self.model.watching = self.model.watching, None

        gradients = self.flow.gradients
        gradients.add_up()
        if self.ema is not None:
            self.ema.settle()  # before weights change
        wishes = [float(reason == stop_wish) for reason in STOP_REASONS]
        numbers = torch.stack([t.to(self.place.device) for t in (loss_sum, count, gradients.squares())])
        more = torch.tensor([*bad, *wishes, float(save_wish)], dtype=torch.float64)
        table = torch.cat([numbers, sent(more, numbers.device)])
        dist.all_reduce(table)
        factor, skip = self._decide(table)
        if shards := gradients.local():
            # Where gradients are: on the host with offload, and there PyTorch's own copy of `skip` might come late.
            factor, skip = (number.to(shards[0].device) for number in (factor, skip))
            foreach_mul_(shards, factor.float())
        step(self.optimizer, self.rate, skip)
        self.model.zero_grad(set_to_none=True)
        told = torch.cat([table, skip.to(table)[None]])
        self._prepare_ahead()
        loss_sum_all, count_all, squares_all, skipped, filled, *wished, save, refused = told.tolist()

        norm = math.sqrt(squares_all) / count_all if count_all else math.nan
        finite = not refused
        self.optimizer_steps += finite
        if finite and self.ema is not None:
            self.ema.owe(self.optimizer_steps)
        self.done += 1
        self.samples += self.data.batch
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        sizes = None if rms is None else self.flow.merge({name: float(value) for name, value in rms.items()})
        stop = next((reason for reason, votes in zip(STOP_REASONS, wished, strict=True) if votes), None)
        all_bad = (round(skipped * self.sample_share), round(filled * self.sample_share))
        loss = loss_sum_all / count_all if count_all else math.nan
        return Progressed(loss, norm, finite, stop, sizes, all_bad, bool(save))

    def _decide(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what gradients are to be multiplied by, and whether there is to be no update (1.0, else 0.0).

        With nothing to score (no hidden token in any sample, say) there is no step to take.
        """
        loss_sum, count, squares = table[:3].unbind()
        scale = 1 / count  # infinite without anything to score, and then the norm is not finite
        norm = squares.sqrt() * scale
        clip = self.recipe.optimizer.clip
        factor = scale if clip is None else scale * (clip / (norm + 1e-6)).clamp(max=1.0)
        finite = loss_sum.isfinite() & norm.isfinite() & scale.isfinite()
        return factor, finite.logical_not().float()

    def _forward_backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.flow.forward_backward(self._prepared(batch), len(self._micro_batches(batch)), self.judge)

    def _prepared(self, batch: Batch) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield the inputs and targets of micro-batches, none of which is kept here."""
        ahead, self._ahead = self._ahead, None
        first = [ahead[1] if ahead is not None and ahead[0] is batch else self._prepare_first(batch, self.done)]
        del ahead
        self._seed("step", self.done)
        yield first.pop()
        for micro in self._micro_batches(batch)[1:]:
            yield self.prepare(micro)

    @contextmanager
    def expecting(self, coming: Callable[[], Batch | None]) -> Iterator[None]:
        """Steps inside may prepare what `coming` gives: the next batch, if it is here already."""
        before, self._coming, self._ahead = self._coming, coming, None
        try:
            yield
        finally:
            self._coming, self._ahead = before, None

    def _prepare_ahead(self) -> None:
        """Prepare what the next step begins with, if its batch is here and no other rank takes part in that."""
        if self.flow.split.alone and self.flow.pipeline is None and (batch := self._coming()) is not None:
            try:
                self._ahead = batch, self._prepare_first(batch, self.done + 1)
            except Exception as error:  # belongs to the next step, which tries it again
                if isinstance(error, torch.OutOfMemoryError):
                    self._coming = lambda: None  # there is no room to be early
        self._seed("between", self.done)  # what comes until then, as a validation, is the same either way

    def _prepare_first(self, batch: Batch, number: int) -> tuple[dict[str, Any], Any]:
        """Prepare the first micro-batch of a step, the same at whatever time."""
        self._seed("prepare", number)
        return self.prepare(self._micro_batches(batch)[0])

    def _seed(self, purpose: str, number: int) -> None:
        """Seed PyTorch's generator, which only a user's own model draws from; it then resumes exactly, too."""
        seed = key(self.recipe.run.seed, purpose, number, self.flow.data_rank)
        for generator in self._generators:  # torch.manual_seed() looks for all kinds of devices first
            generator.manual_seed(seed)

    def _micro_batches(self, batch: Batch) -> list[Batch]:
        """Return what goes through the model at once, views of the batch; the batch itself where that is all of it."""
        number, size = len(batch.counters), self.recipe.data.micro_batch
        if size is None or size >= number:
            return [batch]
        return [batch.narrow(start, min(start + size, number)) for start in range(0, number, size)]

    def prepare(self, micro: Batch) -> tuple[dict[str, Any], Any]:
        """Return inputs of the model and targets for judge(), this rank's part of them."""
        draws = Draws(self.recipe.run.seed, micro.counters)
        split = self.flow.split
        if split.alone:
            inputs, targets = self.objective.prepare(micro, draws)
        else:
            inputs, targets = split.prepare(self.objective, micro, draws)
        drop_path = drop_path_table(draws, self.drop_path_rates)
        if drop_path is not None:
            inputs["drop_path"] = sent(drop_path, self.place.device)
        return inputs, targets

    def judge(self, output: torch.Tensor, targets: Any) -> Loss:
        """Return the objective's loss of a micro-batch, of this rank's part by way of `split.judge`."""
        split, loss_of = self.flow.split, self.objective.loss
        loss = loss_of(output, targets) if split.alone else split.judge(loss_of, output, targets)
        if not isinstance(loss, Loss):
            expect(loss, Loss, f"objective: {type(self.objective).__name__}.loss()")
        return loss

    def group_table(self) -> list[dict[str, Any]]:
        """One row a parameter group, over all ranks."""
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        rows = group_table(self.optimizer, self.base_rate, frozen)
        if self.flow.pipeline is None:
            return rows
        merged: dict[str, dict[str, Any]] = {}
        for share in gather_json(rows if self.flow.leads_stage else [], self.place.control):
            for row in share:
                known = merged.setdefault(row["name"], row | {"parameters": 0, "tensors": 0})
                merged[row["name"]] = known | {key: known[key] + row[key] for key in ("parameters", "tensors")}
        return [row for row in merged.values() if row["tensors"]]

    def all_counters(self, batch: Batch) -> list[int]:
        """Counters of the samples of a step, from all ranks; some ranks have the same ones."""
        shares = gather_json(batch.counters, self.place.control)
        return sorted({counter for share in shares for counter in share})

    def refuse_more_skips(self) -> None:
        """End the run after too many skipped steps in a row."""
        limit = self.recipe.run.stop_after_skips
        if self.skipped_in_a_row >= limit:
            raise UserError(
                f"loss or gradient was not finite in {limit} steps in a row, up to step {self.done}; "
                "look at these samples (metrics.jsonl, event 'skip'), lower optimizer.lr or use precision.compute=fp32"
            )

    def refuse_skipped_end(self) -> None:
        """Refuse to end a run whose last steps were skipped: what it ends with may be of no use."""
        if self.skipped_in_a_row:
            number = "step was" if self.skipped_in_a_row == 1 else f"{self.skipped_in_a_row} steps were"
            raise UserError(
                f"the last {number} skipped, up to the end at step {self.done}, since loss or gradient was not finite, "
                "and nothing was saved after them; look at these samples (metrics.jsonl, event 'skip'), go past them "
                f"with run.steps={self.done + 1} or more, lower optimizer.lr or use precision.compute=fp32"
            )

    # ------------------------------------------------------------ state

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds as tensors."""
        state: dict[str, torch.Tensor] = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        state |= {f"optimizer.{n}": t for n, t in named_state(self.optimizer).items()}
        if self.ema is not None:
            state |= {f"ema.{n}": t for n, t in self.ema.average.items()}
        return state

    def state_bytes(self) -> int:
        """About what a checkpoint will need, before there is any optimizer state."""
        moments = max(len(group.update.moments) for group in self.optimizer.param_groups)
        copies = 1 + moments + (self.ema is not None)
        return copies * self.parts.parameters * torch.float32.itemsize

    def numbers(self) -> dict[str, Any]:
        """Everything else, for the manifest; there is no generator state, since every draw is a function of these."""
        return {
            "samples": self.samples,
            "optimizer_steps": self.optimizer_steps,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "seed": self.recipe.run.seed,
            "rates": {g.name: g.lr for g in self.optimizer.param_groups},
            "threads": self.place.threads,
            "world": self.place.world.size,
            "layout": self.flow.layout._asdict(),
            "statistics": self.data.statistics._asdict(),
            "data": self.data.facts,
            "recipe": self.recipe.to_tree(),
        }

    def restore(self, folder: Any, manifest: dict[str, Any]) -> None:
        """Continue from a verified checkpoint, whatever layout it was saved in."""
        # Agreed on first: stages of a pipeline differ, and a rank that stays away from the loading would be waited for.
        together(lambda: self._make_ready(folder, manifest), self.place.control)
        read_tensors(folder, manifest, self.tensors(), self.place.saving)
        self.done, self.samples = manifest["step"], manifest["samples"]
        self.optimizer_steps = manifest["optimizer_steps"]
        self.skipped, self.skipped_in_a_row = manifest["skipped"], manifest["skipped_in_a_row"]

    def _make_ready(self, folder: Any, manifest: dict[str, Any]) -> None:
        """Make the state that a checkpoint has, or refuse one that is not of this training."""
        if manifest["statistics"] != {name: list(value) for name, value in self.data.statistics._asdict().items()}:
            raise BadCheckpoint("its data were normalised in another way than those of the newest checkpoint")
        try:
            stored = stored_tensors(folder, manifest)
        except OSError as error:
            raise BadCheckpoint(f"its tensors cannot be found ({error})") from None
        moments: dict[str, list[str]] = {}
        for name in stored:
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                parameter, _, moment = rest.rpartition(".")
                moments.setdefault(parameter, []).append(moment)
        restore_state(self.optimizer, moments, manifest["optimizer_steps"])
        check_tensors(stored, self.tensors())

    def save(self, checkpoints: Checkpoints, more: dict[str, Any], metric: float | None) -> None:
        """Save the state of this training, with more that the manifest is to hold."""
        checkpoints.save(self.done, self.tensors(), self.numbers() | more, metric)


COLLECT_EVERY = 50  # steps


class Garbage:
    """Inside, Python's garbage is collected between steps, by all ranks at the same ones: `between(step)` does so.

    Python collects whenever it has made so many objects: in the middle of a step, on another rank each time, and all
    wait for that one. What is there at the start of the loop is not looked at again, so that a collection takes a
    moment.
    """

    def __enter__(self) -> "Garbage":
        self.enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def between(self, step: int) -> None:
        """Collect, if it is time to."""
        if step % COLLECT_EVERY == 0:
            gc.collect()

    def __exit__(self, *error: Any) -> None:
        gc.unfreeze()
        if self.enabled:
            gc.enable()


class Timed:
    """Batches with the seconds that were spent waiting for each; the next one can be had before, if it is here."""

    def __init__(self, batches: Iterator[Batch], is_here: Callable[[], bool] = lambda: False):
        self.batches, self.is_here = batches, is_here
        self._next: Batch | None = None

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> tuple[Batch, float]:
        began = time.perf_counter()
        batch = next(self.batches) if self._next is None else self._next
        self._next = None
        return batch, time.perf_counter() - began

    def coming(self) -> Batch | None:
        """Return the next batch if it is here; nobody waits for it."""
        if self._next is None and self.is_here():
            self._next = next(self.batches, None)
        return self._next
