"""Name the class of each voxel: Dice, cross-entropy and their kin.

- labels are volumes beside the images, or inside the same file; model.classes follows from their names. Formats that
  name no classes, such as plain NIfTI, need objective.names or model.classes
- the loss of a sample is 1 - soft Dice, a mean over its classes, plus cross-entropy, a mean over its voxels (MONAI's
  DiceCE); samples are added up, so every layout and accumulation gives the same gradient
- `dice_bce` and `focal` judge each class by itself, by the sigmoid of its logit: soft Dice plus binary cross-entropy,
  or binary cross-entropy that looks away from what is easy (MONAI's FocalLoss), means over voxels and classes
- voxels whose label is `ignore` take no part in loss or metrics; where that is the number of a class, it has no Dice
- metrics count voxels over all samples that are evaluated: of each class Dice = 2 both / (predicted + true) and
  IoU = both / (predicted or true), and their means
- class 0 is mostly what surrounds the others, and is in no mean; of two classes with names of their own both are
"""

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
from vitrail.objectives.counts import count_classes
from vitrail.objectives.objective import (
    Loss,
    VoxelObjective,
    by_slabs,
    check_labels,
    check_names,
    inputs_of,
)
from vitrail.recipe import config

APART = ("dice_bce", "focal")  # losses that judge each class by itself, by a sigmoid
UNNAMED = ("background", "class 0", "class0", "none", "nothing", "other", "rest", "unlabelled", "unlabeled", "0")


@config
class SegmentConfig:
    labels: ClassVar[str] = "voxel"

    kind: Literal["segment"] = "segment"
    loss: Literal["dice_ce", "dice", "ce", "dice_bce", "focal"] = "dice_ce"
    gamma: float = 2.0  # how far focal looks away from what is easy; at 0 it is binary cross-entropy
    squared: bool = True  # Dice's denominator adds squares of probabilities, not the probabilities
    smooth: tuple[float, float] = (0.0, 1e-6)  # added to Dice's numerator and denominator
    background: bool | None = None  # whether class 0 counts in mean_dice and mean_iou; null: if both of two have names
    ignore: int | None = None  # label of voxels that are not scored, 255 for example
    names: tuple[str, ...] | None = None  # of the classes, label 0 first; null: those of the data

    def __post_init__(self) -> None:
        if min(self.smooth) < 0 or self.smooth[1] == 0:
            raise ValueError(f"smooth {list(self.smooth)} must not be negative, and the second must be above 0")
        if not 0 <= self.gamma < float("inf"):
            raise ValueError(f"gamma {self.gamma} must be a number from 0 on, such as 2")
        check_names(self.names)

    def build(self, model: Any, statistics: Statistics) -> "Segment":
        if getattr(model, "output", None) not in ("pixels", "tokens") or not hasattr(model, "classes"):
            raise UserError(
                "objective.kind: 'segment' trains models that give each voxel a class, such as 'unetr', "
                f"not {model.kind!r}"
            )
        if not model.classes or model.classes < 2:
            raise UserError(
                f"model.classes: {model.classes}; objective 'segment' needs at least 2, background included"
            )
        if not any(self.counts(number) for number in range(model.classes)):
            raise UserError(
                f"objective.ignore: {self.ignore} leaves no class that mean_dice counts; ignore another label, "
                "or set objective.background: true"
            )
        return Segment(self, model, statistics)

    def counts(self, number: int) -> bool:
        """Say whether a class is part of mean_dice and mean_iou."""
        return number != self.ignore and (number > 0 or self.counts_first)

    @property
    def counts_first(self) -> bool:
        """Say whether class 0 counts: as the recipe says, or where it and one other have names, as [membrane, cell]."""
        if self.background is not None:
            return self.background
        return self.names is not None and len(self.names) == 2 and self.names[0].strip().lower() not in UNNAMED


@dataclass(frozen=True)
class Targets:
    labels: Tensor  # [B, *S] int64
    tokens: Tokens  # the way from a model's tokens to voxels


class Segment(VoxelObjective):
    best_metric = "mean_dice"

    def __init__(self, c: SegmentConfig, model: Any, statistics: Statistics):
        self.config, self.model, self.statistics = c, model, statistics
        self.names = c.names or tuple(f"class {number}" for number in range(model.classes))
        scored = [name for number, name in enumerate(self.names) if number != c.ignore]
        each = [f"{measure}_{name}" for measure in ("dice", "iou") for name in scored]
        self.metrics = ("loss", "accuracy", "mean_dice", "mean_iou", *each)
        self.larger_is_better = frozenset(self.metrics) - {"loss"}
        self.axes = TokenAxes(output=(TOKENS,) if model.output == "tokens" else ())  # painted before they are scored

    def tokens_per_sample(self) -> int:
        return encoder_of(self.model).count_tokens(per_axis(self.model.shape, self.model.ndim))

    @by_slabs
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
        inputs, tokens = inputs_of(self.model, batch, self.statistics, None if evaluating else draws)
        labels = check_labels(batch.labels, self.model.classes, ignore=self.config.ignore)
        return inputs, Targets(labels, tokens)

    def logits(self, output: Tensor, targets: Targets) -> Tensor:
        return (targets.tokens.paint(output, merge=True) if self.model.output == "tokens" else output).float()

    def likelihood(self, logits: Tensor) -> Tensor:
        """Return probabilities [B, classes, *S] of logits: each class by itself where the loss judges it so."""
        return logits.sigmoid() if self.config.loss in APART else logits.softmax(dim=1)

    def each(self, output: Tensor, targets: Targets) -> Tensor:
        return segmentation_loss(self.logits(output, targets), targets.labels, self.config)

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        each = self.each(output, targets)
        return Loss(each.sum(), torch.full((), float(len(each)), device=each.device))

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        loss = self.loss(output, targets)
        sums = {"loss": loss.sum.double(), "samples": loss.count.double()}
        return sums | self.score(self.logits(output, targets), targets.labels)

    def score(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        table = confusion(logits.argmax(dim=1), labels, self.model.classes, self.config.ignore)
        sums = {"voxels": table.sum()}
        for number in range(self.model.classes):
            sums[f"both_{number}"] = table[number, number]
            sums[f"either_{number}"] = table[number].sum() + table[:, number].sum()  # true voxels and predicted ones
        return {name: value.double() for name, value in sums.items()}

    def count(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        return self.tally(self.logits(output, targets), targets.labels)

    def tally(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = logits.argmax(dim=1)
        if self.config.ignore is not None:
            scored = labels != self.config.ignore
            predicted, labels = predicted[scored], labels[scored]
        return count_classes(predicted.flatten(), labels.flatten(), self.model.classes)

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        def ratio(part: float, whole: float) -> float:
            return part / whole if whole else float("nan")

        numbers = [number for number in range(self.model.classes) if number != self.config.ignore]
        # A class that neither the labels nor the model know of here has neither Dice nor IoU, and is in no mean.
        dices = {i: ratio(2 * sums[f"both_{i}"], sums[f"either_{i}"]) for i in numbers}
        ious = {i: ratio(sums[f"both_{i}"], sums[f"either_{i}"] - sums[f"both_{i}"]) for i in numbers}
        counted = [i for i, dice in dices.items() if dice == dice and self.config.counts(i)]
        return {
            "loss": sums["loss"] / sums["samples"],
            "accuracy": ratio(sum(sums[f"both_{i}"] for i in numbers), sums["voxels"]),
            "mean_dice": ratio(sum(dices[i] for i in counted), len(counted)),
            "mean_iou": ratio(sum(ious[i] for i in counted), len(counted)),
            **{f"dice_{self.names[i]}": dice for i, dice in dices.items()},
            **{f"iou_{self.names[i]}": iou for i, iou in ious.items()},
        }

    def rows(self, batch: Batch, output: Tensor, targets: Targets) -> list[dict[str, Any]]:
        predicted = self.logits(output, targets).argmax(dim=1)
        arrays = (t.cpu().numpy() for t in (batch.values, targets.labels, predicted))
        rows: list[dict[str, Any]] = [
            {"image": image, "truth": truth, "prediction": guess} for image, truth, guess in zip(*arrays, strict=True)
        ]
        rows[0]["sums"] = {name: float(value) for name, value in self.measure(output, targets).items()}
        return rows

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.panels import segmentation_panel

        measured = [row["sums"] for row in rows if "sums" in row]
        metrics = self.summarise({name: sum(sums[name] for sums in measured) for name in measured[0]})
        counted = [name for number, name in enumerate(self.names) if self.config.counts(number)]
        dices = [f"{name} {metrics[f'dice_{name}']:.2f}" for name in counted if metrics[f"dice_{name}"] >= 0]
        which = "held-out" if held_out else "training"
        shown = ", ".join(dices[:6]) + (", ..." if len(dices) > 6 else "")
        caption = f"step {step}: {which} samples; Dice of these: {shown or 'none'}"
        title = f"Segmentation at step {step}"
        options: Any = {"ignore": self.config.ignore, "slices": slices}
        segmentation_panel(path, rows, names=self.names, title=title, caption=caption, **options)
        return caption


def segmentation_loss(logits: Tensor, labels: Tensor, c: SegmentConfig) -> Tensor:
    """Return the loss of each sample [B], for logits [B, C, *S] and labels [B, *S]."""
    kind, smooth = c.loss, c.smooth
    scored = torch.ones_like(labels, dtype=torch.bool) if c.ignore is None else labels != c.ignore  # [B, *S]
    labels = labels.where(scored, 0)
    voxels = scored.flatten(1).sum(dim=1).clamp(min=1)
    apart = kind in APART
    logs = functional.logsigmoid(logits) if apart else logits.log_softmax(dim=1)
    if kind != "ce":
        true = torch.zeros_like(logs).scatter_(1, labels.unsqueeze(1), scored.unsqueeze(1).to(logs.dtype))
    each = torch.zeros(len(logits), device=logits.device)
    if kind in ("dice", "dice_ce", "dice_bce"):
        share = logs.exp() * scored.unsqueeze(1)
        both = (share * true).flatten(2).sum(dim=2)  # B C
        predicted = (share.square() if c.squared else share).flatten(2).sum(dim=2)
        dice = (2 * both + smooth[0]) / (predicted + true.flatten(2).sum(dim=2) + smooth[1])
        # A sample without any scored voxel has nothing to learn from, but still counts as one.
        each = each + (1 - dice).mean(dim=1) * scored.flatten(1).any(dim=1)
    if apart:
        wrong = functional.binary_cross_entropy_with_logits(logits, true, reduction="none").mul(scored.unsqueeze(1))
        if kind == "focal":  # by how unlikely what is true still is
            wrong = wrong * (c.gamma * functional.logsigmoid(logits * (1 - 2 * true))).exp()
        each = each + wrong.mean(dim=1).flatten(1).sum(dim=1) / voxels
    if kind in ("ce", "dice_ce"):
        surprise = -logs.gather(1, labels.unsqueeze(1)).squeeze(1) * scored  # [B, *S]
        each = each + surprise.flatten(1).sum(dim=1) / voxels
    return each


def confusion(predicted: Tensor, labels: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Counts [true, predicted] of the scored voxels."""
    joint = labels * classes + predicted
    if ignore is not None:
        joint = joint.where(labels != ignore, classes * classes)
    return joint.flatten().bincount(minlength=classes * classes + 1)[:-1].view(classes, classes)
