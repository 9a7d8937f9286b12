"""Validation: fixed samples and fixed masks, shared out over the ranks.

Classes of voxels whose tiles overlap are scored by what all of these say together, each voxel once (stitch.py).

Throughput, honestly: warm-up left out, data wait shown, FLOPs of what the model computes.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.order.mixture import Groups
from vitrail.data.order.sampler import Order, Sampler
from vitrail.data.order.tiles import Tiles
from vitrail.data.reading.loader import Loader
from vitrail.draws import Draws
from vitrail.errors import UserError, expect
from vitrail.layers.flops import Again, Flops, peak_tflops
from vitrail.objectives.objective import Objective, VoxelObjective
from vitrail.parallel.flow import Flow
from vitrail.training.intervals import Units, bootstrap
from vitrail.training.shown import Describer
from vitrail.training.stitch import Blend, Plan, Share, Stitch, Voxels, in_voxels, plan_tiles
from vitrail.training.tally import Tally

MANY = 512  # held-out samples that are all taken, with eval.samples: auto
FEW = 64  # crops that are taken at random places


def check_metrics(objective: Objective, found: Any) -> None:
    """Refuse metrics that are not those which an objective promises."""
    name = f"objective: {type(objective).__name__}.summarise()"
    if missing := [metric for metric in objective.metrics if metric not in expect(found, dict, name)]:
        raise UserError(f"{name} gives no {', '.join(missing)}, which its metrics promise; see docs/plugins.md")


def led_by(first: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the one in front that the best checkpoint is chosen by."""
    return {first: metrics[first], **metrics}


class Evaluator:
    """Measures a model on samples 0..n-1 of the validation data, always the same ones.

    Where each item is one labelled crop, all of them are the most: more would count some twice. `note` says so where
    it happens, and where tiles are put together but are not all. `samples` is a number, or "auto": all items or tiles
    up to MANY, and FEW where crops have no end.
    """

    def __init__(
        self,
        objective: Objective,
        loader: Loader,
        *,
        seed: int,
        samples: int | Literal["auto"],
        batch: int,
        blend: Blend = "gaussian",
        shown: Sequence[str] = (),
        sure: bool = False,  # whether sums of single samples are kept, for intervals()
    ):
        self.objective, self.loader, self.seed = objective, loader, seed
        self.batch, self.blend, self.sure = batch, blend, sure
        self._table: tuple[list[str], Tensor] | None = None  # of the latest metrics()
        wanted, once = samples, count_once(loader.sampler)
        self.samples: int = (FEW if once is None else min(once, MANY)) if samples == "auto" else samples
        self.describer = Describer(loader, shown)
        self.note: str | None = None
        self.shown: list[int] | None = None  # counters of what a picture shows, once it is known
        self.tables: dict[str, Any] | None = None  # of the classes, by the last measurement
        self.worst: list[int] = []  # counters of the samples that did worst in it, the worst first
        # Without labels, repeats of an item differ in what is hidden.
        labelled = getattr(getattr(objective, "config", None), "labels", None)
        most = once if labelled else None
        if most is not None and wanted == "auto" and self.samples < most:
            told = f"eval.samples: auto takes {self.samples} of {most} held-out samples"
            self.note = f"{told}; eval.samples: {most} takes all"
        if most is not None and self.samples > most:
            self.samples = most
            what = "tiles" if isinstance(loader.sampler, Tiles) else "items, each one crop"
            self.note = f"eval.samples: {samples}, but there are {most} held-out {what}: all are measured"
        self._plans: dict[int, Plan | None] = {}  # of tiles that are put together, by number of ranks
        if most is not None and self.samples < most and self._plan(1) is not None:
            self.note = (
                f"eval.samples: {self.samples} of {most} held-out tiles are measured, and scores are those of the "
                f"voxels in them; for whole images set eval.samples: {most}"
            )

    @torch.no_grad()
    def metrics(self, flow: Flow, *, tick: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Measure: the same numbers on every rank. Each runs as many batches as any other: forwards are collective.

        Ranks that share samples measure parts of them, or all measure the same: metrics are ratios of sums.
        """
        ranks, plan = flow.layout.data, self._plan(flow.layout.data)
        stitch = None if plan is None else Stitch(plan, flow.data_rank, self.blend)
        shares = [Share(list(range(rank, self.samples, ranks)), []) for rank in range(ranks)]
        shared = [
            (self.batches(own), self.batches(others)) for own, others in (shares if plan is None else plan.shares)
        ]
        own, others = shared[flow.data_rank]
        batches, rounds = [*own, *others], max(len(mine) + len(more) for mine, more in shared)
        sums: dict[str, torch.Tensor] = {}
        units = Units(self.samples) if self.sure and flow.split.alone and flow.pipeline is None else None
        tally, axes = Tally(self.objective), self.objective.axes
        copies = dist.get_world_size() // ranks  # ranks that share samples, which count the same
        if axes.output and axes.targets:  # or parts of it
            copies //= flow.layout.parts
        with flow.evaluating():
            for number in range(rounds):
                counted = number < len(own)
                batch = self.loader.load(batches[number] if number < len(batches) else [0])
                draws = Draws(self.seed, batch.counters)
                inputs, targets = flow.split.prepare(self.objective, batch, draws, evaluating=True)
                output = flow(**inputs)
                measured = flow.split.judge(self.objective.measure, output, targets)
                expect(measured, dict, f"objective: {type(self.objective).__name__}.measure()")
                counts = flow.split.judge(self.objective.count, output, targets)
                tally.rate(flow.split.judge(self.objective.each, output, targets), batch.counters, taken=counted)
                once: dict[str, torch.Tensor] = {}
                each = self._apart(batch, output) if units is not None and counted else []
                if stitch is not None:
                    assert isinstance(self.objective, VoxelObjective)
                    logits = flow.split.judge(self.objective.logits, output, targets).float().cpu()
                    found = list(self._complete(stitch, batch if number < len(batches) else None, logits))
                    if units is not None:
                        for counter, some in found:
                            units.add(counter, self._score(some))
                    nothing = Voxels(logits.new_empty(logits.shape[1], 0), torch.empty(0, dtype=torch.int64))
                    parts = zip(nothing, *(some for _, some in found), strict=True)
                    whole = Voxels(*(torch.cat(part, dim=-1) for part in parts))
                    once = self._score(whole)
                    counts = self.objective.tally(whole.logits.unsqueeze(0), whole.labels.unsqueeze(0))
                    measured |= {name: value.to(output.device) for name, value in once.items()}
                if units is not None and counted:
                    units.whole &= len(each) == len(batch)
                    for counter, alone in zip(batch.counters, each, strict=False):
                        units.add(counter, {name: value for name, value in alone.items() if name not in once})
                for name, value in measured.items():
                    take = counted or name in once  # of the run's own tiles alone, or of all
                    sums[name] = sums.get(name, torch.zeros_like(value)) + (value if take else 0)
                tally.add(counts, taken=counted or stitch is not None, copies=copies)
                tick()
        table = torch.stack([sums[name] for name in sorted(sums)])
        dist.all_reduce(table)
        if units is not None:
            rows = units.table(sorted(sums), table)
            dist.all_reduce(rows)
            self._table = sorted(sums), rows.cpu()
        self.tables, worst = tally.add_up(flow, table)
        self.worst = [c for c in worst if self._group(c) == self._group(worst[0])]  # others have other variables
        return self.objective.summarise(dict(zip(sorted(sums), table.tolist(), strict=True)))

    def intervals(self) -> dict[str, Any] | None:
        """Return how sure the latest metrics() are: an interval of each; None where samples cannot be told apart."""
        if self._table is None:
            return None
        names, rows = self._table
        if not bool((rows[:, 0] > 0).all()):  # none is left out, or nothing is known
            return None
        found = [self.loader.sampler(counter) for counter in range(self.samples)]
        items = [(sample.source, sample.item) for sample in found]
        return bootstrap(rows[:, 1:].numpy(), items, names, self.objective.summarise, seed=self.seed)

    def _apart(self, batch: Batch, output: Tensor) -> list[dict[str, Tensor]]:
        """Measure each sample of a batch by itself; nothing where the output has no row for each."""
        if len(output) != len(batch):
            return []
        found = []
        for row, counter in enumerate(batch.counters):
            one = batch.narrow(row, row + 1)
            _, targets = self.objective.prepare(one, Draws(self.seed, [counter]), evaluating=True)
            found.append(self.objective.measure(output[row : row + 1], targets))
        return found

    def _score(self, voxels: Voxels) -> dict[str, Tensor]:
        assert isinstance(self.objective, VoxelObjective)
        return self.objective.score(voxels.logits.unsqueeze(0), voxels.labels.unsqueeze(0))

    def _plan(self, ranks: int) -> Plan | None:
        """Return how tiles are put together, where voxels are scored and tiles overlap."""
        if ranks not in self._plans:
            # Of images that are fitted a part is left out, and none overlap.
            voxels = isinstance(self.objective, VoxelObjective) and self.loader.reader.fit is None
            self._plans = {ranks: plan_tiles(self.loader.sampler, self.samples, ranks) if voxels else None}
        return self._plans[ranks]

    def _complete(self, stitch: Stitch, batch: Batch | None, logits: Tensor) -> Iterator[tuple[int, Voxels]]:
        """Yield the voxels that are complete with each tile of a batch, which are those of its item."""
        if batch is None:
            return
        assert batch.labels is not None
        labels = batch.labels.long().cpu()
        for row, counter in enumerate(batch.counters):
            tile, read = self.loader.sampler(counter), self.loader.samples[row]
            # Another sample stands for one that cannot be read.
            nothing = (None, None)
            given = nothing if read.attempt else in_voxels(self.loader, tile, logits[row], labels[row])
            if found := list(stitch.add(tile, *given)):
                yield counter, Voxels(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))

    @torch.no_grad()
    def example(
        self,
        flow: Flow,
        *,
        keep: bool = True,
        tick: Callable[[], None] = lambda: None,
        shown: Sequence[int] | None = None,
        attempt: Callable[[Callable[[], Any]], Any] = lambda action: action(),
        meet: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Return what a picture shows of `shown` samples, on the host: made by every rank, and kept by those that ask.

        As many samples as a micro-batch has are read, run and given up before the next. `attempt` calls what one rank
        might fail at, and `meet` comes before each forward, which is collective: none goes there without the others.
        """
        rows: list[Any] = []

        def run(inputs: dict[str, Any]) -> torch.Tensor:
            meet()
            return flow.split.run(self.objective.axes, flow, inputs)

        def make(batch: Batch, first: int) -> None:
            output, targets = self.objective.example(
                batch,
                Draws(self.seed, batch.counters),
                run,
                first=first,
                size=self.batch,
                tick=tick,
            )
            if keep:
                made = self.objective.rows(batch, output, targets)
                rows.extend(
                    {"about": about} | row for about, row in zip(self.describer.describe(batch), made, strict=True)
                )

        with flow.evaluating():
            shown = attempt(self._choose) if shown is None else shown
            for first in range(0, len(shown), self.batch):
                some = shown[first : first + self.batch]
                batch = attempt(partial(self.loader.load, some, whole=True))
                attempt(partial(make, batch, first))
        return rows

    def _choose(self) -> list[int]:
        """Return the counters of what a picture shows."""
        if self.shown is None:
            alike = [c for c in range(self.samples) if self._group(c) == self._group(0)]
            self.shown = self.objective.choose(alike, self._label)
        return self.shown

    def _label(self, counter: int) -> int | None:
        """Return the class of the item that a sample is of."""
        labelling = self.loader.reader.labelling
        if labelling is None or labelling.of != "item":
            return None
        return self.loader.reader.item_label(self.loader.sampler(counter))

    def batches(self, counters: Iterable[int]) -> list[list[int]]:
        """Samples that are measured together: of one set of variables each."""
        groups: dict[int, list[int]] = {}
        for counter in counters:
            groups.setdefault(self._group(counter), []).append(counter)
        return [mine[i : i + self.batch] for mine in groups.values() for i in range(0, len(mine), self.batch)]

    def _group(self, counter: int) -> int:
        sampler = self.loader.sampler
        return int(sampler.places(counter)[0]) if isinstance(sampler, Groups) else 0


def count_once(sampler: Order) -> int | None:
    """Samples of the first pass, where that is every tile once, or every item once and each is one crop; else None."""
    if isinstance(sampler, Tiles):
        return sampler.epoch
    if not isinstance(sampler, Sampler):
        return None
    whole = all(extent.shape == (extent.window or sampler.crop) for extent in sampler.extents)
    shares = np.diff(sampler.cumulative, prepend=0.0)
    alike = np.allclose(shares, shares[0])  # with other weights some come more often than others, as was asked for
    return sampler.epoch if whole and alike and sampler.reuse == 1 else None


WARM_UP_STEPS = 5  # after a start or resume: compilation, caches, autotuning, a recording (parallel/replay.py)


@dataclass
class Meter:
    batch: int  # samples of a step, over all ranks
    tokens: int  # tokens of a sample, hidden ones included
    flops: Flops  # forward, one sample
    world: int
    recompute: bool | Again
    device: torch.device
    steps_seen: int = 0
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def add(self, seconds: float, wait: float, *, slowed: bool = False) -> None:
        """Note the seconds of a step; those of one that was `slowed` by being looked at do not count."""
        self.steps_seen += 1
        if self.steps_seen > WARM_UP_STEPS and not slowed:
            self.seconds.append(seconds)
            self.waits.append(wait)

    def read(self) -> dict[str, float | None]:
        """Return the numbers since the last reading; nothing but memory while warming up."""
        out: dict[str, float | None] = {"memory_gib": memory_gib(self.device)}
        if self.device.type == "cuda":
            out["reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / 2**30
            out["alloc_retries"] = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        if self.seconds:
            mean = sum(self.seconds) / len(self.seconds)
            rate = self.batch / mean
            tflops = rate * self.flops.training / self.world / 1e12
            hardware = rate * self.flops.hardware(recompute=self.recompute) / self.world / 1e12
            peak = peak_tflops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
            out |= {
                "step_seconds": statistics.median(self.seconds),
                "slowest_step_seconds": max(self.seconds),
                "samples_per_s": rate,
                "tokens_per_s": rate * self.tokens,
                "tflops": tflops,
                "mfu": tflops / peak if peak else None,
                "hfu": hardware / peak if peak else None,
                "data_wait": sum(self.waits) / sum(self.seconds),
            }
        self.seconds, self.waits = [], []
        return out


MOST = ("reserved_gib", "alloc_retries", "slowest_step_seconds")  # of the rank with the most


def of_all_ranks(read: dict[str, float | None], group: dist.ProcessGroup | None) -> dict[str, float | None]:
    """Return what a meter has read, with the most of any rank where that tells more."""
    names = [name for name in MOST if name in read]
    table = torch.tensor([read[name] for name in names], dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return read | dict(zip(names, table.tolist(), strict=True))


def memory_gib(device: torch.device) -> float:
    """Largest memory so far: of the device, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    from vitrail.data.look.preview import peak_rss

    return peak_rss()
