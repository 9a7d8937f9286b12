"""Tell instances apart: of each voxel and some of its neighbours, whether both are of one object.

- labels are numbers of instances; which number an object has says nothing. Voxels of `background` are of none, and
  together with nobody, not even with each other
- an offset names a neighbour: [0, 0, -3] is the voxel 3 before along the last axis. The model gives a logit for each
  offset at each voxel, so model.classes is the number of offsets, and of what is learned beside
- the loss of a sample is binary cross-entropy, a mean over offsets; with `balance`, pairs that are together and pairs
  that are apart weigh alike in each offset of a sample, however rare one of them is
- pairs that leave the crop, and those of a voxel whose label is `ignore`, take no part in loss or metrics
- local shape descriptors (Sheridan et al. 2023), if asked for, are learned beside: of each voxel, where the middle of
  its instance lies within a Gaussian window about it, how the instance spreads there, and how much of the window it
  fills. They are outputs after those of the offsets, by their sigmoid, and prediction leaves them out
- targets are made of labels after augmentation, so that samples may be turned, flipped and resampled
- metrics count pairs: balanced_accuracy is the mean of the shares that are right of pairs together and of pairs apart,
  f1 is that of pairs apart, which are what boundaries are made of
"""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import TOKENS, TokenAxes, Tokens
from vitrail.models.model import encoder_of
from vitrail.objectives.objective import Loss, Objective, by_slabs, inputs_of
from vitrail.recipe import config, must

NEAR, FAR = 1, (3, 9)  # voxels, along each axis
RAREST = 0.05  # share of the pairs of an offset below which the rarer of both weighs no more
SHOWN = ("inside", "apart from a neighbour")


@config
class AffinitiesConfig:
    labels: ClassVar[str] = "voxel"

    kind: Literal["affinities"] = "affinities"
    offsets: tuple[tuple[int, ...], ...] | None = None  # null: 1 voxel back along each axis, then 3 and 9
    background: int | None = 0  # label of voxels that are of no instance; null: there are none
    ignore: int | None = None  # label of voxels that are not scored, since nobody has looked at them
    balance: bool = True  # pairs together and pairs apart weigh alike
    descriptors: float | None = None  # deviation, in voxels, of the window of shape descriptors; null: none are learned
    descriptors_weight: float = 1.0  # of their squared error in the loss

    def __post_init__(self) -> None:
        must("be above 0", descriptors=self.descriptors, descriptors_weight=self.descriptors_weight)
        given = self.offsets
        if given is None:
            return
        if not given or len(set(given)) < len(given) or len({len(offset) for offset in given}) > 1:
            raise ValueError(
                f"offsets {[list(offset) for offset in given]} must be different, with one number for each axis each"
            )
        if not all(any(offset) for offset in given):
            raise ValueError("offsets: a voxel is no neighbour of its own; leave out the one of zeros")
        if any(tuple(-n for n in offset) in given for offset in given):
            raise ValueError("offsets: one of them is another turned around, which names the same pairs; leave it out")

    def fit(self, model: Any, variables: tuple[str, ...], data: Any) -> tuple[Any, Any]:
        """Return this config with offsets that suit the samples, and the model's with an output for each."""
        check_model(model)
        crop = per_axis(data.crop, model.ndim)
        offsets = usual_offsets(crop) if self.offsets is None else self.offsets
        if len(offsets[0]) != model.ndim:
            raise UserError(
                f"objective.offsets: {list(offsets[0])} has {len(offsets[0])} numbers, but the model has {model.ndim} "
                "axes; give one for each"
            )
        for offset in offsets:
            if any(abs(n) >= size for n, size in zip(offset, crop, strict=True)):
                raise UserError(
                    f"objective.offsets: {list(offset)} leads out of every crop of {' x '.join(map(str, crop))} "
                    "voxels; leave it out, or make data.crop larger"
                )
        fitted = dataclasses.replace(self, offsets=offsets)
        outputs = fitted.outputs(model.ndim)
        if model.classes not in (None, outputs):
            raise UserError(
                f"model.classes: {model.classes}, but there are {outputs} offsets and descriptors, each with an output "
                "of its own; leave it out"
            )
        return fitted, dataclasses.replace(model, classes=outputs)

    def outputs(self, ndim: int) -> int:
        """Count what the model gives of each voxel."""
        return len(self.offsets or ()) + (0 if self.descriptors is None else 1 + ndim + ndim * (ndim + 1) // 2)

    def build(self, model: Any, statistics: Statistics) -> "Affinities":
        check_model(model)
        if self.offsets is None or model.classes != self.outputs(model.ndim):
            raise UserError("objective.offsets: they are not fitted to the model; give one for each of model.classes")
        return Affinities(self, model, statistics)


def check_model(model: Any) -> None:
    """Refuse a model that gives nothing for each voxel."""
    if getattr(model, "output", None) not in ("pixels", "tokens") or not hasattr(model, "classes"):
        raise UserError(
            "objective.kind: 'affinities' trains models that give each voxel something, such as 'unetr', "
            f"not {model.kind!r}"
        )


def usual_offsets(crop: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the nearest neighbour along each axis, then further ones, as far as they lie in half of a crop."""

    def along(distance: int) -> list[tuple[int, ...]]:
        lengths = range(len(crop))
        return [
            tuple(-distance if other == axis else 0 for other in lengths)
            for axis in lengths
            if crop[axis] > 1 and (distance == NEAR or 2 * distance <= crop[axis])
        ]

    return tuple(offset for distance in (NEAR, *FAR) for offset in along(distance))


@dataclass(frozen=True)
class Targets:
    together: Tensor  # [B, offsets, *S] whether a voxel and its neighbour are of one instance
    scored: Tensor  # [B, offsets, *S] whether the pair counts
    tokens: Tokens  # the way from a model's tokens to voxels
    shapes: Tensor | None = None  # [B, descriptors, *S], from 0 to 1
    inside: Tensor | None = None  # [B, *S] voxels of instances, which have such


class Affinities(Objective):
    metrics = ("loss", "balanced_accuracy", "f1")
    best_metric = "f1"
    larger_is_better = frozenset({"balanced_accuracy", "f1"})
    predicts = ("affinities", "instances")

    def __init__(self, c: AffinitiesConfig, model: Any, statistics: Statistics):
        assert c.offsets is not None
        self.config, self.model, self.statistics, self.offsets = c, model, statistics, c.offsets
        self.names = tuple(name_of(offset) for offset in c.offsets)  # of what the model gives
        self.axes = TokenAxes(output=(TOKENS,) if model.output == "tokens" else ())  # painted before they are scored

    def tokens_per_sample(self) -> int:
        return encoder_of(self.model).count_tokens(per_axis(self.model.shape, self.model.ndim))

    @by_slabs
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        inputs, tokens = inputs_of(self.model, batch, self.statistics, None if evaluating else draws)
        if batch.labels is None:
            raise ValueError("the batch has no labels; give it labels, or read them with a loader that knows of them")
        # In 64 bits background and ignore are no other labels, as -1 would be 255 in eight.
        c, labels = self.config, batch.labels.long()
        targets = Targets(*pairs(labels, self.offsets, c.background, c.ignore), tokens)
        if c.descriptors is None:
            return inputs, targets
        shapes, inside = describe(labels, c.descriptors, c.background, c.ignore)
        return inputs, dataclasses.replace(targets, shapes=shapes, inside=inside)

    def logits(self, output: Tensor, targets: Targets) -> Tensor:
        """Return [B, offsets, *S] of what the model gives."""
        return self._painted(output, targets)[:, : len(self.offsets)]

    def _painted(self, output: Tensor, targets: Targets) -> Tensor:
        return (targets.tokens.paint(output, merge=True) if self.model.output == "tokens" else output).float()

    def likelihood(self, logits: Tensor) -> Tensor:
        """Return affinities, from 0 (apart) to 1 (together), of logits."""
        return logits.sigmoid()

    def each(self, output: Tensor, targets: Targets) -> Tensor:
        painted, scored = self._painted(output, targets), targets.scored
        logits = painted[:, : len(self.offsets)]
        truth = targets.together.to(logits.dtype)
        wrong = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        number = scored.flatten(2).sum(dim=2)  # B offsets
        if self.config.balance:
            share = targets.together.flatten(2).sum(dim=2) / number.clamp(min=1)
            share = share.clamp(RAREST, 1 - RAREST)[(..., *[None] * (logits.ndim - 2))]
            wrong = wrong / torch.where(targets.together, 2 * share, 2 - 2 * share)
        total = wrong.mul(scored).flatten(2).sum(dim=2)
        # A sample without any pair has nothing to learn from, but still counts as one.
        each = (total / number.clamp(min=1)).mean(dim=1)
        if targets.shapes is None or targets.inside is None:
            return each
        error = (painted[:, len(self.offsets) :].sigmoid() - targets.shapes).square().mean(dim=1) * targets.inside
        inside = targets.inside.flatten(1).sum(dim=1).clamp(min=1)
        return each + self.config.descriptors_weight * error.flatten(1).sum(dim=1) / inside

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        each = self.each(output, targets)
        return Loss(each.sum(), torch.full((), float(len(each)), device=each.device))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss, said = self.loss(output, targets), self.logits(output, targets) > 0
        true, scored = targets.together, targets.scored
        sums = {
            "loss": loss.sum,
            "samples": loss.count,
            "together": (true & scored).sum(),
            "together_right": (true & said & scored).sum(),
            "apart": (~true & scored).sum(),
            "apart_right": (~true & ~said & scored).sum(),
        }
        return {name: value.double() for name, value in sums.items()}

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        def ratio(part: float, whole: float) -> float:
            return part / whole if whole else float("nan")

        shares = [ratio(sums[f"{kind}_right"], sums[kind]) for kind in ("together", "apart") if sums[kind]]
        called_apart = sums["apart_right"] + sums["together"] - sums["together_right"]
        return {
            "loss": sums["loss"] / sums["samples"],
            "balanced_accuracy": ratio(sum(shares), len(shares)),
            "f1": ratio(2 * sums["apart_right"], sums["apart"] + called_apart),
        }

    def rows(self, batch: Batch, output: Tensor, targets: Targets) -> list[dict[str, Any]]:
        near = [n for n, offset in enumerate(self.offsets) if sum(map(abs, offset)) == 1] or [0]
        scored = targets.scored[:, near]
        truth, found = (
            (~each[:, near] & scored).any(dim=1) for each in (targets.together, self._said(output, targets))
        )
        arrays = (t.cpu().numpy() for t in (batch.values, truth.long(), found.long()))
        rows: list[dict[str, Any]] = [
            {"image": image, "truth": true, "prediction": guess} for image, true, guess in zip(*arrays, strict=True)
        ]
        rows[0]["sums"] = {name: float(value) for name, value in self.measure(output, targets).items()}
        return rows

    def _said(self, output: Tensor, targets: Targets) -> Tensor:
        return self.logits(output, targets) > 0

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.panels import segmentation_panel

        measured = [row["sums"] for row in rows if "sums" in row]
        found = self.summarise({name: sum(sums[name] for sums in measured) for name in measured[0]})
        which = "held-out" if held_out else "training"
        caption = f"step {step}: {which} samples; F1 of pairs apart {found['f1']:.2f}"
        title = f"Boundaries of instances at step {step}"
        segmentation_panel(path, rows, names=SHOWN, title=title, caption=caption, slices=slices)
        return caption


def name_of(offset: tuple[int, ...]) -> str:
    """Name a neighbour: x-1 is the voxel before along x."""
    axes = ("z", "y", "x")[-len(offset) :] if len(offset) <= 3 else tuple(f"axis{n}" for n in range(len(offset)))
    return " ".join(f"{axis}{n:+d}" for axis, n in zip(axes, offset, strict=True) if n)


def pairs(
    labels: Tensor, offsets: tuple[tuple[int, ...], ...], background: int | None, ignore: int | None
) -> tuple[Tensor, Tensor]:
    """Return of each voxel and neighbour whether both are of one instance, and whether the pair counts.

    Labels are [B, *S], both results [B, offsets, *S].
    """
    together = torch.zeros(len(labels), len(offsets), *labels.shape[1:], dtype=torch.bool, device=labels.device)
    scored = torch.zeros_like(together)
    known = None if ignore is None else labels != ignore
    instance = None if background is None else labels != background
    for number, offset in enumerate(offsets):
        here = (slice(None), *(slice(max(0, -n), min(0, -n) or None) for n in offset))
        there = (slice(None), *(slice(max(0, n), min(0, n) or None) for n in offset))
        alike = labels[here] == labels[there]
        together[:, number][here] = alike if instance is None else alike & instance[here]
        scored[:, number][here] = True if known is None else known[here] & known[there]
    return together & scored, scored


def describe(labels: Tensor, sigma: float, background: int | None, ignore: int | None) -> tuple[Tensor, Tensor]:
    """Return local shape descriptors [B, descriptors, *S] of labels [B, *S], from 0 to 1, and which voxels have them.

    They are, with all lengths in deviations of the window: the middle of the voxel's instance less its own place along
    each axis, the variance along each axis, correlations of each two, and the share of the window that is of the
    instance. What lies beyond the crop is not seen.
    """
    ndim, device = labels.ndim - 1, labels.device
    inside = torch.ones_like(labels, dtype=torch.bool)
    for label in (background, ignore):
        inside = inside if label is None else inside & (labels != label)
    number = 1 + ndim + ndim * (ndim + 1) // 2
    found = torch.zeros(len(labels), number, *labels.shape[1:], device=device)
    if device.type == "meta":  # of which the shapes alone are asked for
        return found, inside
    axes = [(torch.arange(n, device=device) - (n - 1) / 2) / sigma for n in labels.shape[1:]]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"))  # ndim *S
    both = list(itertools.combinations_with_replacement(range(ndim), 2))
    powers = torch.stack([torch.ones_like(place[0]), *place, *(place[i] * place[j] for i, j in both)])
    for sample, own, out in zip(labels, inside, found, strict=True):
        for label in sample[own].unique():
            mask = sample == label
            share, *sums = _blurred(powers * mask, sigma)
            share = share.clamp(min=1e-6)
            means = [each / share for each in sums[:ndim]]
            spread = {
                pair: each / share - means[pair[0]] * means[pair[1]]
                for pair, each in zip(both, sums[ndim:], strict=True)
            }
            widths = [spread[axis, axis].clamp(min=1e-6).sqrt() for axis in range(ndim)]
            told = [
                *((mean - place[axis]) / 2 + 0.5 for axis, mean in enumerate(means)),
                *(width.square() for width in widths),
                *(spread[i, j] / (widths[i] * widths[j]) / 2 + 0.5 for i, j in both if i != j),
                share,
            ]
            out += torch.stack(told).clamp(0, 1) * mask
    return found, inside


def _blurred(values: Tensor, sigma: float) -> Tensor:
    """Return sums over a Gaussian window about each voxel of [K, *S]; beyond the border is nothing."""
    reach = max(1, round(3 * sigma))
    at = torch.arange(-reach, reach + 1, dtype=values.dtype, device=values.device) / sigma
    kernel = torch.exp(-at.square() / 2)
    kernel = kernel / kernel.sum()
    # Variances are small differences of large sums: GPUs convolve in less than 32 bits, unless they are told otherwise,
    # but do not multiply matrices so.
    for axis in range(1, values.ndim):
        place = torch.arange(values.shape[axis], device=values.device)
        away = place[:, None] - place + reach
        band = torch.where((away >= 0) & (away <= 2 * reach), kernel[away.clamp(0, 2 * reach)], 0)
        values = (values.movedim(axis, -1) @ band).movedim(-1, axis)
    return values
