"""Predict the voxels of hidden tokens: the objective of masked autoencoders.

- target "raw" (intensities, normalised with the statistics of the data) or "patch" (each token to mean 0, variance 1)
- on "hidden" tokens or on "all"; padding of adaptive tokens is not scored
- validation decodes every hidden token and compares the squared error with the variance of the same voxels, in the
  intensities of the data ("raw") or within patches ("patch"): predicting the mean, or each patch's own, scores 1
- several variables count alike: each is compared with its own variance, as normalised, whatever its units
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.layers.patches import num_voxels
from vitrail.layers.tokens import QUERIES, TOKENS, TokenAxes, Tokens, tokenize
from vitrail.models.mae import MAE, MAEConfig, hide, split_tokens
from vitrail.models.model import Model, variable_ids
from vitrail.objectives.objective import Loss, Objective, by_slabs
from vitrail.recipe import config


@config
class ReconstructConfig:
    kind: Literal["reconstruct"] = "reconstruct"
    target: Literal["raw", "patch"] = "raw"
    on: Literal["hidden", "all"] = "hidden"

    def build(self, model: Any, statistics: Statistics) -> "Reconstruct":
        if not isinstance(model, MAEConfig):
            raise UserError(f"objective.kind: 'reconstruct' trains model.kind 'mae', not {model.kind!r}")
        if model.decoder.kind == "linear" and self.on == "hidden":
            raise UserError(
                "objective.on: 'hidden' teaches nothing with model.decoder.kind 'linear': its mask tokens see no "
                "visible token. Set objective.on=all, or another decoder"
            )
        if self.target == "patch" and num_voxels(model.patch) * ((model.channels or 1) if model.parts == 1 else 1) < 2:
            raise UserError(
                "objective.target: 'patch' needs patches of more than one value; use 'raw' or a larger patch"
            )
        return Reconstruct(self, model, statistics)


@dataclass(frozen=True)
class Targets:
    values: Tensor  # [B, m, P*C] in the units the model predicts
    index: Tensor  # [B, m] which tokens these are
    lengths: tuple[int, ...]  # visible ones, where these are predicted, and hidden ones
    tokens: Tokens | None  # all of the sample, in the data's own units; None of samples that are shared
    variables: Tensor  # which variable is scored: of each feature [P*C], or of each token [B, m]
    valid: Tensor | None  # [B, m] false for padding
    statistics: tuple[Tensor, Tensor]  # means and stds of the variables [C], or of each sample's own [B, C]

    @property
    def num_visible(self) -> int:
        """Count the visible tokens, which come first."""
        return sum(self.lengths[:-1])


class Reconstruct(Objective):
    metrics = ("loss", "mse", "variance", "mse_over_variance")
    best_metric = "mse_over_variance"
    predicts = ("reconstructions",)

    def __init__(self, c: ReconstructConfig, model: MAEConfig, statistics: Statistics):
        assert model.shape is not None
        self.config, self.model, self.statistics = c, model, statistics
        self.axes = TokenAxes(
            inputs=(TOKENS, QUERIES),
            output=(TOKENS, QUERIES) if c.on == "all" else (QUERIES,),
            targets=("values", "index", "variables", "valid"),
        )
        known = model.encoder.variables
        self.num_variables = len(known.known) if known is not None else model.channels or len(statistics.mean)

    def tokens_per_sample(self) -> int:
        return sum(self.model.token_counts(evaluating=True)) * self.model.parts

    def tokens_at(self, layer: str) -> int:
        """Count by layer: the encoder, and keys of cross-attention, see visible tokens; the decoder its own."""
        c = self.model
        visible, predicted = (number * c.parts for number in c.token_counts())
        if layer.startswith("encoder.") or layer.endswith(".kv"):
            return visible
        if c.decoder.kind == "cross":
            return predicted + (visible if self.config.on == "all" else 0)
        return visible + predicted

    @by_slabs
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        encoder, mask = self.model.encoder, self.model.mask
        ids = variable_ids(self.model, batch.variables, batch.values.shape[1])
        tokens = tokenize(
            batch.values,  # still in the data's own type: only what is used is normalised
            encoder.tokens,
            self.model.patch,
            separate=encoder.separate,
            span=batch.span,
            draws=None if evaluating else draws,
            slab=batch.slab,
        )
        visible, hidden = self.split(tokens, draws, evaluating)
        coordinates = tokens.told(encoder.tokens.told)
        whole = {"coordinates": coordinates, "sizes": tokens.sizes, "valid": tokens.valid, "variables": ids}
        inputs = hide({name: t for name, t in whole.items() if t is not None}, visible, hidden)
        mean, std = batch.statistics or self.statistics.tensors()
        own = sent(mean, coordinates.device), sent(std, coordinates.device)
        places = tokens.number // tokens.separate

        def normalised(values: Tensor, index: Tensor) -> Tensor:
            mean, std = self.units(index, places, own)
            return (values.float() - mean) / std

        def wanted(values: Tensor, index: Tensor) -> Tensor:
            values = normalised(values, index)
            if self.config.target == "raw":
                return values
            own_mean, own_std = of_patches(values)
            return (values - own_mean) / own_std

        inputs["x"] = tokens.take(visible, then=normalised, strata=mask.strata)
        lists, valid = [hidden], inputs.get("query_valid")
        every_token = self.config.on == "all"
        if every_token:
            inputs["predict_visible"] = True
            lists = [visible, hidden]
            valid = None if valid is None else torch.cat([inputs["valid"], valid], dim=1)
        index = torch.cat(lists, dim=1)
        known = sent(ids or list(range(batch.values.shape[1])), index.device)
        return inputs, Targets(
            values=tokens.take(*lists, then=wanted, strata=mask.strata),
            index=index,
            lengths=tuple(part.shape[1] for part in lists),
            tokens=tokens if batch.slab is None else None,
            variables=known[index // places] if encoder.separate else known.tile(num_voxels(self.model.patch)),
            valid=valid,
            statistics=own,
        )

    def split(self, tokens: Tokens, draws: Draws, evaluating: bool) -> tuple[Tensor, Tensor]:
        """Indices of the tokens that are seen and of those that are predicted, [B, n] and [B, m]."""
        device, parts, mask = tokens.values.device, tokens.separate, self.model.mask
        noise = sent(draws.uniform("mask", tokens.number), device)
        visible, hidden = split_tokens(self.model, noise, tokens)
        ratio = 1.0 if evaluating else self.model.decoder.decode_ratio
        _, predicted = mask.counts(tokens.number // parts, ratio)
        if predicted < hidden.shape[1] // parts:
            noise = sent(draws.uniform("decode", hidden.shape[1]), device)
            if tokens.valid is not None:
                noise = torch.where(tokens.valid.gather(1, hidden), noise, 2.0)  # padding last
            shares = parts * mask.strata  # as many are predicted of each
            chosen = noise.unflatten(1, (shares, -1)).argsort(dim=2, stable=True)[..., : predicted // mask.strata]
            hidden = hidden.unflatten(1, (shares, -1)).gather(2, chosen.sort(dim=2).values).flatten(1, 2)
        return visible, hidden

    def units(self, index: Tensor, places: int, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean and std that tokens [B, n] are normalised with, by the statistics of their variables.

        That is one for each feature [P*C]; for separate variables one a token, [B, n, 1]; for samples with statistics
        of their own [B, C] one for each feature of each sample, [B, 1, P*C].
        """
        if self.model.encoder.separate:
            variable = index // places
            mean, std = ((t[variable] if t.ndim == 1 else t.gather(1, variable)).unsqueeze(-1) for t in own)
        else:
            mean, std = (t.tile(num_voxels(self.model.patch)) for t in own)
            if mean.ndim > 1:
                mean, std = mean.unsqueeze(1), std.unsqueeze(1)
        return mean, std

    def scales(self, tokens: Tokens, index: Tensor, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return what takes predictions of tokens [B, n] back to intensities: prediction * std + mean."""
        mean, std = self.units(index, tokens.number // tokens.separate, own)
        if self.config.target == "raw":
            return mean, std
        own_mean, own_std = of_patches((tokens.take(index).float() - mean) / std)
        return mean + own_mean * std, own_std * std

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        squared = (output.float() - targets.values).square()
        if targets.valid is None:
            return Loss(squared.sum(), torch.full((), float(squared.numel()), device=squared.device))
        squared = torch.where(targets.valid.unsqueeze(-1), squared, 0.0)
        return Loss(squared.sum(), targets.valid.sum() * float(squared.shape[-1]))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss = self.loss(output, targets)
        skip, known = targets.num_visible, self.num_variables
        truth, error = targets.values, output.float() - targets.values
        # In intensities, unless variables in units of their own are put together; a patch's own mean and spread are
        # not the model's merit.
        if self.config.target == "raw" and known == 1:
            mean, std = (t.view(-1, 1, 1) for t in targets.statistics)
            truth, error = truth * std + mean, error * std
        truth, error = truth[:, skip:].double(), error[:, skip:].double()
        counted = torch.ones_like(truth)
        if targets.valid is not None:
            valid = targets.valid[:, skip:, None].double()
            truth, error, counted = truth * valid, error * valid, counted * valid
        by_token = targets.variables.ndim == 2
        variables = targets.variables[:, skip:] if by_token else targets.variables
        which = F.one_hot(variables.flatten(), known).double()  # [B*m, V] or [P*C, V]
        sums = {"loss_sum": loss.sum.double(), "loss_count": loss.count.double()}
        measured = {"squared_error": error.square(), "sum": truth, "squares": truth.square(), "voxels": counted}
        for name, values in measured.items():
            each = (values.sum(dim=2).flatten() if by_token else values.sum(dim=(0, 1))) @ which
            sums |= {f"{name}.{number}": value for number, value in enumerate(each)}
        return sums

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        errors, variances = [], []
        for number in range(self.num_variables):
            if voxels := sums[f"voxels.{number}"]:  # nothing may be hidden, in images without any edge
                errors.append(sums[f"squared_error.{number}"] / voxels)
                variances.append(sums[f"squares.{number}"] / voxels - (sums[f"sum.{number}"] / voxels) ** 2)
        mse, variance = (sum(each) / len(each) if each else float("nan") for each in (errors, variances))
        return {
            "loss": sums["loss_sum"] / (sums["loss_count"] or float("nan")),
            "mse": mse,
            "variance": variance,
            "mse_over_variance": mse / variance if variance > 0 else float("nan"),
        }

    def flops(self, model: Model) -> Flops:
        assert isinstance(model, MAE)
        return model.flops(predict_visible=self.config.on == "all")

    def reconstruct(self, batch: Batch, output: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return samples whose hidden voxels are as predicted, and where these are: both [B, C, *S]."""
        skip, tokens = targets.num_visible, targets.tokens
        assert tokens is not None
        hidden = targets.index[:, skip:]
        mean, std = self.scales(tokens, hidden, targets.statistics)
        index = hidden[..., None].expand(-1, -1, output.shape[-1])
        truth = tokens.values.float()
        pasted = truth.scatter(1, index, output.float()[:, skip:] * std + mean)
        painted = torch.zeros_like(truth).scatter(1, index, 1.0)
        return tokens.paint(pasted), tokens.paint(painted)

    def rows(self, batch: Batch, output: Tensor, targets: Targets) -> list[dict[str, Any]]:
        prediction, covered = (t.cpu().numpy() for t in self.reconstruct(batch, output, targets))
        names = batch.variables or tuple(f"variable {number}" for number in range(batch.values.shape[1]))
        return [
            {"target": target, "prediction": guess, "hidden": hid > 0.5, "variables": names}
            for target, guess, hid in zip(batch.values.float().cpu().numpy(), prediction, covered, strict=True)
        ]

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.panels import reconstruction_panel

        which = "held-out" if held_out else "training"
        caption = f"step {step}: {self.model.mask.ratio:.0%} of the tokens hidden; {which} samples"
        if self.config.target == "patch":
            caption += "; predictions drawn with the true mean and spread of each patch"
        reconstruction_panel(path, rows, title=f"Reconstruction at step {step}", caption=caption, slices=slices)
        return caption


def of_patches(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and spread of each token [B, n, 1]."""
    return values.mean(dim=-1, keepdim=True), (values.var(dim=-1, keepdim=True) + 1e-6).sqrt()
