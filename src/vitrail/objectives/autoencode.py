"""Give back what went in: what an autoencoder learns, so that its latents can be trained on.

- the loss is the squared (or absolute) error of normalised values, a mean over all voxels
- in training, noise of a standard deviation of `noise` is added to the latents
- mse is in the data's units squared; mse_over_variance compares normalised values with their own spread; psnr
  and ssim, a mean over samples, are of the peak that bytes have, or that `peak` gives
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.models.autoencoder import AutoencoderConfig, latent_shape, num_latents
from vitrail.objectives.objective import Loss, Objective, normalise
from vitrail.objectives.ssim import ssim
from vitrail.recipe import config


@config
class AutoencodeConfig:
    kind: Literal["autoencode"] = "autoencode"
    loss: Literal["mse", "l1"] = "mse"
    noise: float = 0.05  # standard deviation of what is added to the latents in training
    peak: float | None = None  # largest value less the smallest, for psnr and ssim; null: 255 for bytes

    def __post_init__(self) -> None:
        if not self.noise >= 0 or (self.peak is not None and not self.peak > 0):
            raise ValueError(f"noise {self.noise} must not be negative, and peak {self.peak} must be above 0")

    def build(self, model: Any, statistics: Statistics) -> "Autoencode":
        if not isinstance(model, AutoencoderConfig):
            raise UserError(f"objective.kind: 'autoencode' trains model.kind 'autoencoder', not {model.kind!r}")
        return Autoencode(self, model, statistics)


@dataclass(frozen=True)
class Targets:
    values: Tensor  # [B, C, *S], normalised
    mean: Tensor  # what takes them back to the data's units, [B or 1, C, 1, ...]
    std: Tensor
    peak: float | None


class Autoencode(Objective):
    metrics = ("loss", "mse", "mse_over_variance", "psnr", "ssim")
    best_metric = "mse_over_variance"
    larger_is_better = frozenset({"psnr", "ssim"})
    pictured = 4
    predicts = ("reconstructions",)

    def __init__(self, c: AutoencodeConfig, model: AutoencoderConfig, statistics: Statistics):
        self.config, self.model, self.statistics = c, model, statistics

    def tokens_per_sample(self) -> int:
        return num_latents(self.model)

    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        own = batch.statistics or self.statistics.tensors()
        images = normalise(batch.values, own)
        inputs: dict[str, Any] = {"x": images}
        if self.config.noise and not evaluating:
            shape = latent_shape(self.model, tuple(images.shape[2:]))
            inputs["noise"] = self.config.noise * draws.normal("latents", *shape, device=images.device)
        mean, std = (sent(t, images.device)[..., *[None] * self.model.ndim] for t in own)
        peak = self.config.peak or (255.0 if batch.values.dtype == torch.uint8 else None)
        return inputs, Targets(images, mean, std, peak)

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        error = output.float() - targets.values
        each = error.square() if self.config.loss == "mse" else error.abs()
        return Loss(each.sum(), torch.full((), float(each.numel()), device=each.device))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss, truth = self.loss(output, targets), targets.values.double()
        error = output.double() - truth
        voxels = loss.count.double()
        given, made = (each.double() * targets.std + targets.mean for each in (targets.values, output))
        unknown = torch.full((len(truth),), float("nan"), device=truth.device)
        alike = ssim(made, given, targets.peak) if targets.peak else unknown
        return {
            "ssim": alike.double().sum(),
            "samples": torch.full((), float(len(truth)), dtype=torch.float64, device=truth.device),
            "loss": loss.sum.double(),
            "voxels": voxels,
            "squared_error": error.square().sum(),
            "squared_error_in_units": (error * targets.std).square().sum(),
            "sum": truth.sum(),
            "squares": truth.square().sum(),
            "squared_peaks": voxels * (targets.peak or 0.0) ** 2,
        }

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        voxels, error = sums["voxels"], sums["squared_error_in_units"]
        variance = sums["squares"] / voxels - (sums["sum"] / voxels) ** 2
        peaks = sums["squared_peaks"]  # 0 where none is known
        return {
            "loss": sums["loss"] / voxels,
            "mse": error / voxels,
            "mse_over_variance": sums["squared_error"] / voxels / variance if variance > 0 else float("nan"),
            "psnr": 10 * math.log10(peaks / error) if peaks and error else float("nan"),
            "ssim": sums["ssim"] / sums["samples"],
        }

    def reconstruct(self, batch: Batch, output: Tensor, targets: Targets) -> tuple[Tensor, Tensor | None]:
        """Return the samples again [B, C, *S]; of all voxels alike."""
        return output.float() * targets.std + targets.mean, None

    def rows(self, batch: Batch, output: Tensor, targets: Targets) -> list[dict[str, Any]]:
        again = self.reconstruct(batch, output, targets)[0].cpu().numpy()
        return [{"pair": pair} for pair in zip(batch.values.float().cpu().numpy(), again, strict=True)]

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.blocks import about_rows
        from vitrail.report.panels import pairs_panel

        which = "held-out" if held_out else "training"
        factor = " x ".join(map(str, self.model.factors))
        caption = f"step {step}: {factor} voxels to {self.model.latent} numbers and back; {which} samples"
        pairs = [row["pair"] for row in rows]
        title = f"Reconstruction at step {step}"
        pairs_panel(path, pairs, abouts=about_rows(rows), title=title, caption=caption, slices=slices)
        return caption
