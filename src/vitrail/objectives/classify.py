"""Name the class of each image or volume: cross-entropy over classes.

- labels are the classes of items: of a folder of images, the folders; model.classes follows from them
- samples that were mixed (mixup, cutmix) are as much of each class as they have of it
- label smoothing in training; the loss of validation is without it, so that runs can be compared
- metrics: loss, accuracy and, for more than five classes, top5 (the true class is among the five likeliest)
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.models.model import encoder_of
from vitrail.objectives.counts import count_classes
from vitrail.objectives.objective import (
    Loss,
    Objective,
    by_slabs,
    check_labels,
    check_names,
    inputs_of,
)
from vitrail.recipe import config, must


@config
class ClassifyConfig:
    labels: ClassVar[str] = "item"

    kind: Literal["classify"] = "classify"
    smoothing: float = 0.0  # share of the target that is spread evenly over all classes
    names: tuple[str, ...] | None = None  # of the classes, label 0 first; null: those of the data

    def __post_init__(self) -> None:
        must("be at least 0 and below 1", smoothing=self.smoothing)
        check_names(self.names)

    def build(self, model: Any, statistics: Statistics) -> "Classify":
        if getattr(model, "output", None) != "classes":
            raise UserError(
                f"objective.kind: 'classify' trains models that name classes, such as 'vit', not {model.kind!r}"
            )
        if getattr(model, "pool", None) == "tokens":
            raise UserError("model.pool: 'tokens' gives no class of the whole; use mean, cls or attention")
        if not model.classes:
            raise UserError("model.classes: objective 'classify' needs the number of classes; give it")
        return Classify(self, model, statistics)


class Classify(Objective):
    best_metric = "accuracy"
    larger_is_better = frozenset({"accuracy", "top5"})
    pictured = 24
    predicts = ("classes",)

    def __init__(self, c: ClassifyConfig, model: Any, statistics: Statistics):
        self.config, self.model, self.statistics = c, model, statistics
        self.names = c.names or tuple(f"class {number}" for number in range(model.classes))
        self.metrics = ("loss", "accuracy", *(("top5",) if model.classes > 5 else ()))

    def tokens_per_sample(self) -> int:
        return encoder_of(self.model).count_tokens(per_axis(self.model.shape, self.model.ndim))

    @by_slabs
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Tensor]:
        inputs, _ = inputs_of(self.model, batch, self.statistics, None if evaluating else draws)
        rate = getattr(self.model, "head_dropout", 0.0)
        if rate and not evaluating:
            kept = draws.uniform("head_dropout", encoder_of(self.model).width) >= rate
            inputs["head_dropout"] = sent(kept / (1 - rate), batch.values.device)  # [B, D]
        labels = check_labels(batch.labels, self.model.classes)
        return inputs, labels if batch.soft is None or evaluating else batch.soft  # [B], or [B, classes] of mixed ones

    def loss(self, output: Tensor, targets: Tensor) -> Loss:
        smoothing = self.config.smoothing
        total = functional.cross_entropy(output.float(), targets, reduction="sum", label_smoothing=smoothing)
        return Loss(total, torch.full((), float(len(targets)), device=output.device))

    def measure(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        output = output.double()
        sums = {
            "loss": functional.cross_entropy(output, targets, reduction="sum"),
            "accuracy": (output.argmax(dim=1) == targets).sum(),
            "count": torch.full((), float(len(targets)), device=output.device),
        }
        if "top5" in self.metrics:
            sums["top5"] = (output.topk(5, dim=1).indices == targets[:, None]).sum()
        return {name: value.double() for name, value in sums.items()}

    def count(self, output: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return count_classes(output.argmax(dim=1), targets, self.model.classes)

    def each(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.float(), targets, reduction="none")

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: sums[name] / sums["count"] for name in self.metrics}

    def rows(self, batch: Batch, output: Tensor, targets: Tensor) -> list[dict[str, Any]]:
        likelihood, best = output.float().softmax(dim=1).max(dim=1)
        return [
            {
                "image": image,
                "truth": self.names[truth],
                "prediction": self.names[guess],
                "likelihood": share,
                "right": truth == guess,
            }
            for image, truth, guess, share in zip(
                batch.values.cpu().numpy(), targets.tolist(), best.tolist(), likelihood.tolist(), strict=True
            )
        ]

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.panels import classification_panel

        which = "held-out" if held_out else "training"
        right = sum(row["right"] for row in rows)
        caption = f"step {step}: {right} of these {len(rows)} {which} samples right"
        classification_panel(path, rows, title=f"Classes at step {step}", caption=caption)
        return caption
