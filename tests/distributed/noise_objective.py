"""A plugin for the tests: predict the noise that was added to each token, for models that take times and classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.parts import WHOLE, Part, Slab, cut
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import Exchange
from vitrail.models.inputs import encoder_of
from vitrail.objectives.objective import Loss, Objective, make_part, slab_of
from vitrail.recipe import config, kinds


@config
class NoiseConfig:
    kind: Literal["noise"] = "noise"

    def build(self, model: Any, statistics: Statistics) -> "Noise":
        return Noise(model, statistics)


@dataclass(frozen=True)
class Targets:
    noise: Tensor  # [B, n, P*C] of this part's tokens
    valid: Tensor | None


class Noise(Objective):
    metrics = ("loss",)
    best_metric = "loss"

    def __init__(self, model: Any, statistics: Statistics):
        self.model, self.statistics = model, statistics

    def tokens_per_sample(self) -> int:
        return encoder_of(self.model).count_tokens(per_axis(self.model.shape, self.model.ndim))

    def slab(self, crop: tuple[int, ...], part: Part) -> Slab | None:
        return slab_of(self.model, crop, part)

    def prepare(
        self,
        batch: Batch,
        draws: Draws,
        *,
        evaluating: bool = False,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
    ) -> tuple[dict[str, Any], Targets]:
        inputs, tokens = make_part(self.model, batch, self.statistics, part, None if evaluating else draws)
        whole = draws.uniform("noise", tokens.number, inputs["x"].shape[-1]) - 0.5
        noise = cut(whole, part, groups=tokens.separate).to(inputs["x"].device)
        inputs["x"] = inputs["x"] + noise
        inputs["times"] = draws.uniform("times", 1)[:, 0] * 100
        if getattr(self.model, "classes", None):
            inputs["labels"] = (draws.uniform("labels", 1)[:, 0] * (self.model.classes + 1)).long()
        return inputs, Targets(noise, inputs.get("valid"))

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        error = (output.float() - targets.noise).square()
        if targets.valid is not None:
            error = error * targets.valid.unsqueeze(-1)
        number = error.numel() if targets.valid is None else targets.valid.sum() * error.shape[-1]
        return Loss(error.sum(), torch.as_tensor(float(number)))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss = self.loss(output, targets)
        return {"sum": loss.sum.double(), "count": loss.count.double()}

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        return {"loss": sums["sum"] / sums["count"]}

    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Any, *, step: int, held_out: bool) -> str:
        raise NotImplementedError


kinds.register("objective", "noise", NoiseConfig)
