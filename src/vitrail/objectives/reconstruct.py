"""Predict the voxels of hidden tokens: the objective of masked autoencoders.

- target "raw" (intensities, normalised with the statistics of the data) or "patch" (each token to mean 0, variance 1)
- on "hidden" tokens or on "all"
- validation decodes every hidden token and compares the squared error with the variance of the same voxels, in the
  intensities of the data ("raw") or within patches ("patch"): predicting the mean, or each patch's own, scores 1
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.cost.flops import Flops
from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.masks import make_mask
from vitrail.layers.patches import gather_tokens, grid_coordinates, patchify, per_axis, unpatchify
from vitrail.models.mae import MAE, MAEConfig
from vitrail.models.model import Model
from vitrail.objectives.objective import Loss, Objective
from vitrail.recipe import config


@config
class ReconstructConfig:
    kind: Literal["reconstruct"] = "reconstruct"
    target: Literal["raw", "patch"] = "raw"
    on: Literal["hidden", "all"] = "hidden"

    def build(self, model: Any, statistics: Statistics) -> "Reconstruct":
        if not isinstance(model, MAEConfig):
            raise UserError(f"objective.kind: 'reconstruct' trains model.kind 'mae', not {model.kind!r}")
        return Reconstruct(self, model, statistics)


@dataclass(frozen=True)
class Targets:
    values: Tensor  # [B, m, P*C] in the units the model predicts
    mean: Tensor  # what takes a prediction back to intensities: prediction * std + mean
    std: Tensor
    index: Tensor  # [B, m] which tokens these are
    num_visible: int  # so many of the first ones are visible tokens


class Reconstruct(Objective):
    metrics = ("loss", "mse", "variance", "mse_over_variance")
    best_metric = "mse_over_variance"

    def __init__(self, c: ReconstructConfig, model: MAEConfig, statistics: Statistics):
        assert model.shape is not None
        self.config, self.model, self.statistics = c, model, statistics
        self.size = per_axis(model.shape, model.ndim)

    def tokens_per_sample(self) -> int:
        return sum(self.model.token_counts(evaluating=True))

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        device = batch.values.device
        grid = self.model.grid()
        patches = patchify(batch.values, self.model.patch)  # [B, N, P*C], still in the data's own type
        tokens = patches.shape[1]
        mask = make_mask(self.model.mask, draws.uniform("mask", tokens).to(device), grid)
        hidden = mask.hidden
        _, predicted = self.model.token_counts(evaluating=evaluating)
        if predicted < hidden.shape[1]:
            noise = draws.uniform("decode", hidden.shape[1]).to(device)
            hidden = hidden.gather(1, noise.argsort(dim=1, stable=True)[:, :predicted].sort(dim=1).values)
        every_token = self.config.on == "all"
        index = torch.cat([mask.visible, hidden], dim=1) if every_token else hidden

        coordinates = grid_coordinates(self.size, self.model.patch, device)
        mean, std = (t.to(device).repeat(patches.shape[-1] // len(t)) for t in self.statistics.tensors())
        inputs: dict[str, Any] = {
            "x": (gather_tokens(patches, mask.visible).float() - mean) / std,
            "coordinates": gather_tokens(coordinates, mask.visible),
            "queries": gather_tokens(coordinates, hidden),
        }
        if every_token:
            inputs["predict_visible"] = True
        values = (gather_tokens(patches, index).float() - mean) / std
        if self.config.target == "patch":
            centre = values.mean(dim=-1, keepdim=True)
            spread = (values.var(dim=-1, keepdim=True) + 1e-6).sqrt()
            values = (values - centre) / spread
            mean, std = mean + centre * std, spread * std
        return inputs, Targets(values, mean, std, index, mask.visible.shape[1] if every_token else 0)

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        squared = (output.float() - targets.values).square()
        return Loss(squared.sum(), torch.tensor(float(squared.numel()), device=squared.device))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss = self.loss(output, targets)
        skip = targets.num_visible
        truth, error = targets.values, output.float() - targets.values
        if self.config.target == "raw":  # a patch's own mean and spread are not the model's merit
            truth, error = truth * targets.std + targets.mean, error * targets.std
        truth, error = truth[:, skip:].double(), error[:, skip:].double()
        return {
            "loss_sum": loss.sum.double(),
            "loss_count": loss.count.double(),
            "squared_error": error.square().sum(),
            "sum": truth.sum(),
            "squares": truth.square().sum(),
            "voxels": torch.tensor(float(truth.numel()), dtype=torch.float64, device=truth.device),
        }

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        voxels = sums["voxels"]
        variance = sums["squares"] / voxels - (sums["sum"] / voxels) ** 2
        mse = sums["squared_error"] / voxels
        return {
            "loss": sums["loss_sum"] / sums["loss_count"],
            "mse": mse,
            "variance": variance,
            "mse_over_variance": mse / variance if variance > 0 else float("nan"),
        }

    def flops(self, model: Model) -> Flops:
        assert isinstance(model, MAE)
        return model.flops(predict_visible=self.config.on == "all")

    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Targets, *, step: int, held_out: bool) -> str:
        from vitrail.report.panels import reconstruction_panel

        skip = targets.num_visible
        index = targets.index[:, skip:, None].expand(-1, -1, output.shape[-1])
        mean, std = (t[:, skip:] if t.ndim == 3 else t for t in (targets.mean, targets.std))
        truth = patchify(batch.values, self.model.patch).float()
        pasted = truth.scatter(1, index, output.float()[:, skip:] * std + mean)
        hidden = torch.zeros_like(truth, dtype=torch.bool).scatter(1, index, torch.ones_like(index, dtype=torch.bool))
        images = (unpatchify(t, self.model.patch, self.size).cpu().numpy() for t in (truth, pasted, hidden))
        rows = [
            {"target": target, "prediction": prediction, "hidden": hid}
            for target, prediction, hid in zip(*images, strict=True)
        ]
        which = "held-out" if held_out else "training"
        caption = f"step {step}: {self.model.mask.ratio:.0%} of the tokens hidden; {which} samples"
        if self.config.target == "patch":
            caption += "; predictions drawn with the true mean and spread of each patch"
        reconstruction_panel(path, rows, title=f"Reconstruction at step {step}", caption=caption)
        return caption
