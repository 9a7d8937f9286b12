"""A plugin for the tests: reconstruction whose loss or gradient is not finite for given samples."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.objectives.objective import Loss
from vitrail.objectives.reconstruct import Reconstruct, ReconstructConfig
from vitrail.recipe import config, kinds


@config
class BrokenConfig:
    kind: Literal["broken"] = "broken"
    bad: tuple[int, ...] = ()  # counters of the samples
    what: Literal["loss", "gradient"] = "loss"
    target: Literal["raw"] = "raw"
    on: Literal["hidden"] = "hidden"

    def build(self, model: Any, statistics: Statistics) -> "Broken":
        return Broken(self, ReconstructConfig(), model, statistics)


class Broken(Reconstruct):
    """What is bad is told by the targets: a step's may be prepared before an evaluation and judged after it."""

    def __init__(self, broken: BrokenConfig, *arguments: Any):
        super().__init__(*arguments)
        self.broken = broken

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Any]:
        inputs, targets = super().prepare(batch, draws, evaluating=evaluating)
        if not evaluating and not set(self.broken.bad).isdisjoint(batch.counters):
            targets = replace(targets, values=torch.full_like(targets.values, float("inf")))
        return inputs, targets

    def loss(self, output: Tensor, targets: Any) -> Loss:
        if not targets.values.isinf().any():
            return super().loss(output, targets)
        loss = super().loss(output, replace(targets, values=torch.zeros_like(targets.values)))
        if self.broken.what == "loss":
            return Loss(loss.sum * float("nan"), loss.count)
        return Loss(loss.sum + torch.sqrt(output * 0).sum(), loss.count)  # adds nothing, with a slope without end


kinds.register("objective", "broken", BrokenConfig)
