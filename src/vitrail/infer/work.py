"""The samples of one call, group by group, shared out over the ranks.

A group is computed by the ranks of one place in the data-parallel axes, and written by the first of these. Forwards are
collective, so all ranks run as many rounds; one that has no group left computes one that nobody writes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.loader import Loader
from vitrail.diffusion import SamplingConfig
from vitrail.errors import UserError
from vitrail.infer.kind import Kind
from vitrail.infer.plan import Plan
from vitrail.infer.write import as_stored, write_sample
from vitrail.parallel.flow import Flow
from vitrail.training.collective import together
from vitrail.training.progress import Progress
from vitrail.training.setup import Place

CONDITION, TRUTH = "condition", "truth"  # folders beside the samples of a run that makes them from something


@dataclass(frozen=True)
class Beside:
    """Held-out samples that new ones are made from: sample i from held-out sample i."""

    loader: Loader
    condition: Kind
    truth: Kind


class Made(NamedTuple):
    """A group of samples."""

    counters: range
    values: Tensor  # [B, C, *S] in the data's units
    batch: Batch | None  # what they were made from


@dataclass(frozen=True)
class Work:
    objective: Any
    flow: Flow
    place: Place
    plan: Plan
    kind: Kind
    settings: SamplingConfig
    seed: int
    out: Path
    decode: Callable[[Tensor], Tensor] | None
    beside: Beside | None

    def run(self, todo: Sequence[int], progress: Progress, beat: Callable[[], None]) -> None:
        """Make these groups."""
        ranks, here = self.flow.layout.data, self.flow.data_rank
        writes = all(self.flow.mesh.rank(axis) == 0 for axis in ("pipeline", "context", "tensor"))
        asked = self.settings.steps * (2 if self.settings.sampler == "heun" else 1)  # evaluations, about
        for first in range(0, len(todo), ranks):
            share = min(ranks, len(todo) - first) * self.plan.batch
            counted = first + here < len(todo)
            seen = itertools.count(1)

            def tick(begun: int = first * self.plan.batch, share: int = share, seen: Any = seen) -> None:
                beat()
                progress.update(min(begun + share - 1, begun + share * next(seen) // asked))

            beat()  # reading what samples are made from may take long
            made = self.make(todo[first + here if counted else 0], tick)
            together(partial(self.write, made) if counted and writes else lambda: None, self.place.control)
            progress.update(first * self.plan.batch + share)
        self.flow.forget_gathered()

    def make(self, group: int, tick: Callable[[], None]) -> Made:
        """Samples of a group, with what they were made from."""
        counters, device = self.plan.counters(group), self.place.device
        batch = None if self.beside is None else self.beside.loader.load(list(counters), whole=True)
        if self.plan.classes:
            labels: Tensor | None = torch.tensor([self.plan.label(counter) for counter in counters], device=device)
        else:
            labels = None if batch is None else batch.labels
        values = self.objective.generate(
            lambda inputs: self.flow.outputs(self.flow(**inputs)),
            counters=counters,
            seed=self.seed,
            labels=labels if self.objective.classes else None,
            condition=None if batch is None else self.objective.fields(batch)[1],
            statistics=None if batch is None else self.objective.own_statistics(batch),
            settings=self.settings,
            device=device,
            part=self.flow.part,
            tick=tick,
        )
        return Made(counters, values, batch)

    def write(self, made: Made) -> None:
        """Every sample of a group that was asked for, each in a file of its own."""
        values, batch = self.decoded(made.values), made.batch
        kept = [counter for counter in made.counters if counter < self.plan.number]
        try:
            self.write_all(kept, None, values, self.kind)
            if batch is not None and self.beside is not None:
                truth, condition = self.objective.split(batch.values.float())
                self.write_all(kept, TRUTH, self.decoded(truth), self.beside.truth)
                self.write_all(kept, CONDITION, condition, self.beside.condition)
        except OSError as error:
            raise UserError(
                f"{self.out} cannot be written ({error.strerror or error}); free some space and call again, or choose "
                "another folder with --out"
            ) from None

    @torch.no_grad()
    def decoded(self, values: Tensor) -> Tensor:
        return values if self.decode is None else self.decode(values)

    def write_all(self, counters: Sequence[int], folder: str | None, values: Tensor, kind: Kind) -> None:
        if values.shape[1] != len(kind.variables):
            raise UserError(
                f"samples have {values.shape[1]} channels, not the {len(kind.variables)} of {kind.variables}"
            )
        for counter, value in zip(counters, values.float().cpu().numpy(), strict=False):
            path = self.out / self.plan.file(counter, folder, kind.suffix)
            if not path.exists():
                write_sample(path, as_stored(value, kind.dtype), kind)


def labels_of(loader: Loader, plan: Plan) -> list[int]:
    """Classes of the held-out samples; where good ones stand in for bad ones, reading alone tells which."""
    if loader.policy.on_bad != "skip":
        return [loader.reader.item_label(loader.sampler(counter)) for counter in range(plan.number)]
    found: list[int] = []
    for group in range(plan.groups):
        labels = loader.load(list(plan.counters(group)), whole=True).labels
        found += [] if labels is None else np.asarray(labels.cpu()).tolist()
    return found[: plan.number]
