"""What a model is trained for: how a batch becomes inputs and targets, and how far outputs are from targets.

An objective holds no parameters. `prepare` is computed from the batch and its draws alone, alike on every rank that
shares the batch; `loss` returns a sum and a count, and the trainer divides by the count of all ranks and micro-batches.

Ranks that share a batch each take a part of its tokens (layers/parts.py): `prepare` gives the inputs and targets of
that part. A model whose output is whole on every rank (classes, voxels) has whole targets; where the loss needs all
tokens, `needs_whole` says so, and the caller joins the outputs of all parts with `join`.

An objective that learns from labels says so in its config: `labels: ClassVar` is "item" (the class of each item) or
"voxel" (of each voxel). Then the batch carries them, `names` (the classes, label 0 first; filled in from the data where
it is None) and, for voxels, `ignore` (a value that is not scored) are fields of that config, and model.classes follows.
Where that depends on the model, the config has `labels_with(model)` instead.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.flops import Flops
from vitrail.layers.parts import WHOLE, Part, Slab, cut, mark_copies, real_rows
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import Exchange, Tokens, UniformTokens, tokenize
from vitrail.models.inputs import encoder_of, make_inputs, variable_ids
from vitrail.models.model import Model


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    count: Tensor


class Objective(ABC):
    metrics: tuple[str, ...]  # what summarise() gives
    best_metric: ClassVar[str]  # the one that the best checkpoint is chosen by, unless the recipe names another
    larger_is_better: frozenset[str] = frozenset()  # those of the metrics that should grow; the others should shrink
    pictured: int = 3  # samples in a picture
    needs_whole: bool = False  # loss() and measure() need the output for all tokens, not just a part's
    wants_average: ClassVar[bool] = False  # results of raw weights are much worse than those of their average (ema)
    decodes: ClassVar[bool] = False  # it makes latents, which the recipe's codec turns into pixels

    @abstractmethod
    def prepare(
        self,
        batch: Batch,
        draws: Draws,
        *,
        evaluating: bool = False,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
    ) -> tuple[dict[str, Any], Any]:
        """Keyword inputs of the model (`x` and side inputs) and whatever loss() needs to judge its output.

        `part` says which of the tokens these are for. What a batch of slabs lacks comes through the `exchange`; a
        batch of whole samples needs none.
        """

    def join(self, outputs: Sequence[Tensor], targets: Any) -> Tensor:
        """The output for whole samples of the outputs of all parts; `targets` are those of the whole samples."""
        return outputs[0]

    def slab(self, crop: tuple[int, ...], part: Part) -> Slab | None:
        """All that prepare() needs of a crop for a part of its tokens; None: the whole crop."""
        return None

    @abstractmethod
    def loss(self, output: Tensor, targets: Any) -> Loss: ...

    @abstractmethod
    def measure(self, output: Tensor, targets: Any) -> dict[str, Tensor]:
        """Sums over a validation batch, to be added over batches and ranks (float64)."""

    @abstractmethod
    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the added sums."""

    def equip(  # noqa: B027 - most need nothing of it
        self, *, value_range: tuple[float, float] | None = None, decode: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """What the data and the codec of a run tell: the range of whole numbers, and the way from latents to pixels."""

    def choose(self, counters: Sequence[int], label_of: Callable[[int], int | None]) -> list[int]:
        """Which of the held-out samples a picture shows; `label_of` tells the class of an item, where it has one."""
        return list(counters[: self.pictured])

    def example(
        self,
        batch: Batch,
        draws: Draws,
        run: Callable[[dict[str, Any]], list[Tensor]],
        *,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
        size: int = 1,
        tick: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Any]:
        """What draw() is given for whole samples; every rank computes it, and gets the same.

        `run` gives the outputs of all parts for the inputs of this one; `size` is how many samples surely fit at once,
        and `tick` is called when it has run.
        """
        inputs, targets = self.prepare(batch, draws, evaluating=True, part=part, exchange=exchange)
        outputs = run(inputs)
        tick()
        if part.count == 1:
            return outputs[0], targets
        _, targets = self.prepare(batch, draws, evaluating=True)
        return self.join(outputs, targets), targets

    @abstractmethod
    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Any, *, step: int, held_out: bool) -> str:
        """Write a picture of what the model does, and return its caption."""

    def flops(self, model: Model) -> Flops:
        """Forward of one training sample under this objective."""
        return model.flops()

    @abstractmethod
    def tokens_per_sample(self) -> int:
        """All tokens of a sample, hidden ones too: what tokens/s counts."""

    def tokens_at(self, layer: str) -> int:
        """Of a training sample, those that a linear layer of a block computes with, by the layer's name."""
        return self.tokens_per_sample()


def labels_of(objective: Any, model: Any) -> Literal["item", "voxel"] | None:
    """What an objective learns the classes of, by its config and that of its model."""
    if hasattr(objective, "labels_with"):
        return objective.labels_with(model)
    return getattr(objective, "labels", None)


def check_prepare(objective: Objective) -> None:
    """Refuse an objective whose prepare() does not take what the trainer gives it."""
    taken = inspect.signature(objective.prepare).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return
    missing = [name for name in ("evaluating", "part", "exchange") if name not in taken]
    if missing:
        raise UserError(
            f"objective: {type(objective).__name__}.prepare() takes no {' and no '.join(missing)}; write it as "
            "prepare(self, batch, draws, *, evaluating=False, part=WHOLE, exchange=None), as CONTRIBUTING.md shows"
        )


def slab_of(model: Any, crop: tuple[int, ...], part: Part) -> Slab | None:
    """The slab of a crop that holds a part of its tokens, for models that see nothing but tokens on a grid."""
    encoder = encoder_of(model)
    if part.count == 1 or getattr(model, "wants_image", False) or not isinstance(encoder.tokens, UniformTokens):
        return None
    planes = crop[0] // per_axis(encoder.patch, model.ndim)[0]
    return None if planes % part.count else Slab(part, crop)


def make_part(
    model: Any, batch: Batch, statistics: Statistics, part: Part, draws: Draws | None
) -> tuple[dict[str, Any], Tokens]:
    """Inputs of a model for a part of all tokens, in their order, and the tokens of the whole samples."""
    images = normalise(batch.values, batch.statistics or statistics)
    return part_of(
        model, images, part, variables=batch.variables or None, slab=batch.slab, scored=batch.values, draws=draws
    )


def part_of(
    model: Any,
    images: Tensor,
    part: Part,
    *,
    variables: Sequence[str] | None = None,
    slab: Slab | None = None,
    scored: Tensor | None = None,
    draws: Draws | None = None,
) -> tuple[dict[str, Any], Tokens]:
    """make_part() of images [B, C, *S] that are normalised already."""
    if slab is None:
        inputs, tokens = make_inputs(model, images, variables=variables, scored=scored, draws=draws)
        inputs["x"] = cut(tokens.values, part, groups=tokens.separate)
    else:
        # Parts of a list of all tokens are slabs: what was read is what is needed.
        encoder = encoder_of(model)
        assert slab.part == part
        ids = variable_ids(model, variables, images.shape[1])
        separate = ids is not None and encoder.variables.aggregate == "none"
        patch = per_axis(encoder.patch, model.ndim)
        tokens = tokenize(images, encoder.tokens, patch, separate=separate, slab=slab)
        inputs = {"x": tokens.values, "coordinates": tokens.coordinates}
        if ids is not None:
            inputs["variables"] = ids
        if getattr(model, "output", None) == "pixels":
            inputs["size"] = tokens.size
    for name in ("coordinates", "sizes", "valid"):
        if inputs.get(name) is not None:
            inputs[name] = cut(inputs[name], part, groups=tokens.separate)
    real = real_rows(tokens.number, part, groups=tokens.separate, device=images.device)
    valid = mark_copies(inputs.get("valid"), real, len(images))
    return inputs if valid is None else inputs | {"valid": valid}, tokens


def drop_path_table(draws: Draws, rates: list[float]) -> Tensor | None:
    """Factors [B, depth, 2] of the residual branches: 0 where a branch is dropped, else 1 / (1 - rate)."""
    if not any(rates):
        return None
    rate = torch.tensor(rates)[:, None]
    return (draws.uniform("drop_path", len(rates), 2) >= rate) / (1 - rate)


def normalise(values: Tensor, statistics: Statistics | tuple[Tensor, Tensor]) -> Tensor:
    """[B, C, *S] as read to mean 0 and variance 1 of each variable, float32; by statistics of all, or [B, C]."""
    tables = statistics.tensors() if isinstance(statistics, Statistics) else statistics
    mean, std = (sent(t, values.device)[..., *[None] * (values.ndim - 2)] for t in tables)
    return (values.float() - mean) / std


def check_names(names: tuple[str, ...] | None) -> None:
    """Refuse class names that cannot be told apart."""
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ValueError(f"names {list(names)} must be at least two different names, one for each class")


def check_labels(labels: Tensor | None, num_classes: int, *, ignore: int | None = None) -> Tensor:
    """The labels of a batch as int64, checked where that waits for no device; loaders check all that they read."""
    if labels is None:
        raise ValueError("the batch has no labels; give it labels, or read them with a loader that knows of them")
    labels = labels.long()
    if labels.device.type == "cpu":
        wrong = (labels < 0) | (labels >= num_classes)
        if ignore is not None:
            wrong &= labels != ignore
        if wrong.any():
            others = "model.classes or objective.ignore" if labels.ndim > 1 else "model.classes"
            raise UserError(
                f"labels: {int(labels[wrong][0])} is not the number of a class; there are {num_classes}, from 0; "
                f"mend the labels, or set {others}"
            )
    return labels
