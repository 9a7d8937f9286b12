"""Predict the voxels of hidden tokens: the objective of masked autoencoders.

- target "raw" (intensities, normalised with the statistics of the data) or "patch" (each token to mean 0, variance 1)
- on "hidden" tokens or on "all"; padding of adaptive tokens is not scored
- validation decodes every hidden token and compares the squared error with the variance of the same voxels, in the
  intensities of the data ("raw") or within patches ("patch"): predicting the mean, or each patch's own, scores 1
- several variables count alike: each is compared with its own variance, as normalised, whatever its units
"""

from collections.abc import Sequence
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
from vitrail.layers.parts import WHOLE, Part, Slab, cut, join, mark_copies, part_size, real_rows
from vitrail.layers.patches import num_voxels
from vitrail.layers.tokens import Exchange, Tokens, tokenize
from vitrail.models.inputs import variable_ids
from vitrail.models.mae import MAE, MAEConfig, hide, split_tokens
from vitrail.models.model import Model
from vitrail.objectives.objective import Loss, Objective, slab_of
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
    mean: Tensor  # what takes a prediction back to intensities: prediction * std + mean
    std: Tensor
    index: Tensor  # [B, m] which tokens these are
    num_visible: int  # so many of the first ones are visible tokens
    tokens: Tokens | None  # all of the sample, in the data's own units; None where these are targets of a part
    variables: Tensor  # which variable is scored: of each feature [P*C], or of each token [B, m]
    valid: Tensor | None = None  # [B, m] false for padding


class Reconstruct(Objective):
    metrics = ("loss", "mse", "variance", "mse_over_variance")
    best_metric = "mse_over_variance"

    def __init__(self, c: ReconstructConfig, model: MAEConfig, statistics: Statistics):
        assert model.shape is not None
        self.config, self.model, self.statistics = c, model, statistics
        known = model.encoder.variables
        self.num_variables = len(known.known) if known is not None else model.channels or len(statistics.mean)

    def tokens_per_sample(self) -> int:
        return sum(self.model.token_counts(evaluating=True)) * self.model.parts

    def tokens_at(self, layer: str) -> int:
        """The encoder sees visible tokens, of which cross-attention makes keys and values; the decoder sees its own."""
        c = self.model
        visible, predicted = (number * c.parts for number in c.token_counts())
        if layer.startswith("encoder.") or layer.endswith(".kv"):
            return visible
        if c.decoder.kind == "cross":
            return predicted + (visible if self.config.on == "all" else 0)
        return visible + predicted

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
        encoder = self.model.encoder
        ids = variable_ids(self.model, batch.variables, batch.values.shape[1])
        tokens = tokenize(
            batch.values,  # still in the data's own type: only what is used is normalised
            encoder.tokens,
            self.model.patch,
            separate=encoder.separate,
            draws=None if evaluating else draws,
            slab=batch.slab,
        )
        everything = self.split(tokens, draws, evaluating)
        visible, hidden = (cut(index, part, groups=tokens.separate) for index in everything)
        whole = {"coordinates": tokens.coordinates, "sizes": tokens.sizes, "valid": tokens.valid, "variables": ids}
        inputs = hide({name: t for name, t in whole.items() if t is not None}, visible, hidden)
        for name, index in zip(("valid", "query_valid"), everything, strict=True):
            real = real_rows(index.shape[1], part, groups=tokens.separate, device=index.device)
            valid = mark_copies(inputs.get(name), real, len(index))
            if valid is not None:
                inputs[name] = valid

        # Each list is fetched once, and in the same order on every rank. Strata that no part shares are all at home.
        at_home = self.model.mask.kind == "stratified" and self.model.mask.strata % part.count == 0
        seen, asked = (
            self.normalised(tokens.take(index, part, exchange, at_home=at_home), mine, tokens, batch.statistics)
            for index, mine in zip(everything, (visible, hidden), strict=True)
        )
        inputs["x"] = seen[0]
        every_token = self.config.on == "all"
        valid = inputs.get("query_valid")
        if every_token:
            inputs["predict_visible"] = True
            both = [(inputs.get("valid"), visible), (valid, hidden)]
            if any(v is not None for v, _ in both):
                valid = torch.cat([torch.ones_like(i, dtype=torch.bool) if v is None else v for v, i in both], dim=1)
        values, centre, spread = (
            torch.cat(pair, dim=1) if every_token and pair[0].ndim == 3 else pair[1]
            for pair in zip(seen, asked, strict=True)
        )
        if self.config.target == "patch":
            own_mean = values.mean(dim=-1, keepdim=True)
            own_std = (values.var(dim=-1, keepdim=True) + 1e-6).sqrt()
            values = (values - own_mean) / own_std
            centre, spread = centre + own_mean * spread, own_std * spread
        index = torch.cat([visible, hidden], dim=1) if every_token else hidden
        num_visible = visible.shape[1] if every_token else 0
        kept = tokens if part.count == 1 else None
        own = sent(ids or list(range(batch.values.shape[1])), index.device)
        scored = (
            own[index // (tokens.number // tokens.separate)]
            if encoder.separate
            else own.tile(num_voxels(self.model.patch))
        )
        return inputs, Targets(values, centre, spread, index, num_visible, kept, scored, valid)

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

    def normalised(
        self, values: Tensor, index: Tensor, tokens: Tokens, own: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values [B, n, P*C] to mean 0 and variance 1; with what takes them back.

        That is a mean and a std for each feature [P*C]; for separate variables one a token, [B, n, 1]; for samples with
        statistics of their `own` [B, C] one for each feature of each token.
        """
        mean, std = (sent(t, values.device) for t in own or self.statistics.tensors())
        if self.model.encoder.separate:
            variable = index // (tokens.number // tokens.separate)
            mean, std = ((t[variable] if own is None else t.gather(1, variable)).unsqueeze(-1) for t in (mean, std))
        else:
            mean, std = (t.tile(num_voxels(self.model.patch)) for t in (mean, std))
            if own is not None:
                mean, std = (t.unsqueeze(1).expand(values.shape) for t in (mean, std))
        return (values.float() - mean) / std, mean, std

    def join(self, outputs: Sequence[Tensor], targets: Targets) -> Tensor:
        """Visible tokens of all parts, where they are predicted, then the hidden ones."""
        assert targets.tokens is not None
        groups, seen = targets.tokens.separate, targets.num_visible
        each = groups * part_size(seen // groups, len(outputs))
        hidden = targets.index.shape[1] - seen
        first, last = ([o[:, :each] for o in outputs], [o[:, each:] for o in outputs])
        return torch.cat([join(first, seen, groups=groups), join(last, hidden, groups=groups)], dim=1)

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
            truth, error = truth * targets.std + targets.mean, error * targets.std
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

    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Targets, *, step: int, held_out: bool) -> str:
        from vitrail.report.panels import reconstruction_panel

        skip, tokens = targets.num_visible, targets.tokens
        assert tokens is not None
        index = targets.index[:, skip:, None].expand(-1, -1, output.shape[-1])
        mean, std = (t[:, skip:] if t.ndim == 3 else t for t in (targets.mean, targets.std))
        truth = tokens.values.float()
        pasted = truth.scatter(1, index, output.float()[:, skip:] * std + mean)
        hidden = torch.zeros_like(truth).scatter(1, index, 1.0)
        prediction, covered = (tokens.paint(t).cpu().numpy() for t in (pasted, hidden))
        rows = [
            {"target": target, "prediction": painted, "hidden": hid > 0.5}
            for target, painted, hid in zip(batch.values.float().cpu().numpy(), prediction, covered, strict=True)
        ]
        which = "held-out" if held_out else "training"
        caption = f"step {step}: {self.model.mask.ratio:.0%} of the tokens hidden; {which} samples"
        if self.config.target == "patch":
            caption += "; predictions drawn with the true mean and spread of each patch"
        reconstruction_panel(path, rows, title=f"Reconstruction at step {step}", caption=caption)
        return caption
