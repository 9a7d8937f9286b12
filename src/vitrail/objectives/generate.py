"""Learn to make samples like the data: what `denoise` (DDPM) and `flow` (rectified flow) share.

- noise, time and dropped labels of a sample are functions of (run.seed, its counter), the same under every layout;
  noise belongs to voxels, so that ranks with parts of a sample make just theirs
- classes condition a model that knows some (model.classes, or `classes: true` to take them from the data); a share of
  the labels is hidden in training (model.label_dropout), which is what guidance needs
- `condition` names variables that are given, not made; with `coarse: N` the image itself, averaged over blocks of N
  voxels, is given (super-resolution, downscaling). Both come as channels after those that are denoised
- the loss is the squared error of what is predicted, a mean over voxels, in fp32; validation measures it without
  weights at times spread evenly over the whole way, so that runs can be compared, and of each quarter of the way
- samples are in the units of the data: of an entry with statistics of its own, where a sample is made from its data
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.diffusion import Prediction, Process, SamplingConfig, guided, sample
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.modulation import check_class_ids, drop_labels
from vitrail.layers.parts import WHOLE, Part, Slab, cut, join
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import Exchange, Tokens, tokenize
from vitrail.models.inputs import encoder_of
from vitrail.objectives.objective import Loss, Objective, check_labels, normalise, part_of, slab_of

QUARTERS = 4  # of the way from noise to data, the noisiest first
ROWS = 10  # classes in a picture


@dataclass(frozen=True)
class Targets:
    values: Tensor  # [B, n, P*C] what the model is to answer for this part's tokens
    weights: Tensor  # [B] of the squared errors
    quarter: Tensor | None  # [B] of the way from noise to data, where validation measures
    valid: Tensor | None  # [B, n] false for copies


class Shown(NamedTuple):
    """What a picture shows beside the samples."""

    labels: Tensor | None  # [B]
    given: Tensor | None  # [B, K, *S] the condition, in the data's units


class Generate(Objective):
    metrics = ("loss", *(f"loss_q{quarter + 1}" for quarter in range(QUARTERS)))
    best_metric = "loss"
    wants_average = True
    decodes = True

    process: Process
    predict: Prediction

    def __init__(self, c: Any, model: Any, statistics: Statistics, process: Process, predict: Prediction):
        c.check_model(model)
        self.config, self.model, self.statistics = c, model, statistics
        self.process, self.predict = process, predict
        self.classes: int | None = getattr(model, "classes", None)
        self.names = c.names or tuple(f"class {number}" for number in range(self.classes or 0))
        self.size = per_axis(model.shape, model.ndim)
        self.pictured = 32 if model.ndim == 2 else 8
        known = tuple(c.variables or ())
        if c.condition and not known:
            raise UserError("objective.variables: name all variables of the data, where `condition` names some of them")
        self.made = tuple(name for name in known if name not in c.condition)  # variables; empty where not known
        self.made_at = [known.index(name) for name in self.made] or list(range(len(statistics.mean)))
        self.channels = len(self.made) or model.channels  # that are made
        self.decode: Callable[[Tensor], Tensor] | None = None  # latents to pixels, both in their data's units
        self.value_range: tuple[float, float] | None = None  # of the data, where their type has one
        try:
            process.check(predict)
        except ValueError as error:
            raise UserError(f"objective: {error}") from None
        self.check_sampling(c.sampling, where="objective.sampling.")
        if c.coarse and any(size % c.coarse for size in self.size):
            raise UserError(
                f"objective.coarse: {c.coarse} does not divide data.crop {list(self.size)}; choose a divisor, or "
                "another crop"
            )

    def equip(
        self, *, value_range: tuple[float, float] | None = None, decode: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.value_range, self.decode = value_range, decode

    @abstractmethod
    def even_times(self, way: Tensor) -> Tensor:
        """Times at shares [0, 1) of the way from noise to data, without the training's own preferences."""

    def check_sampling(self, settings: SamplingConfig, *, where: str = "") -> None:
        """Refuse settings that this model cannot be sampled with."""
        if settings.guidance != 1:
            if self.classes is None:
                raise UserError(
                    f"{where}guidance: {settings.guidance:g} needs a model that knows classes; set it to 1, or train "
                    "with objective.classes: true"
                )
            if not self.model.label_dropout:
                raise UserError(
                    f"{where}guidance: {settings.guidance:g} compares with a model that is told no class, which this "
                    "one never learned; train with model.label_dropout above 0 (0.1 is usual), or set guidance to 1"
                )
        try:
            self.process.grid(settings.steps, self.predict)
        except ValueError as error:
            raise UserError(f"{where}{error}") from None

    # ------------------------------------------------------------ training

    def tokens_per_sample(self) -> int:
        return encoder_of(self.model).count_tokens(self.size)

    def slab(self, crop: tuple[int, ...], part: Part) -> Slab | None:
        slab = slab_of(self.model, crop, part)
        # Blocks of a coarse image must lie within slabs.
        return None if slab is None or len(slab.rows) % (self.config.coarse or 1) else slab

    def fields(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What is made and what is given, normalised."""
        return self.split(normalise(batch.values, batch.statistics or self.statistics))

    def split(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is made [B, C, *S] and what is given [B, K, *S] or None, of all variables or of a slab; fractions."""
        given: list[Tensor] = []
        c = self.config
        if c.condition:
            at = [c.variables.index(name) for name in c.condition]
            images, given = images[:, self.made_at], [images[:, at]]
        if c.coarse:
            given.insert(0, coarsen(images, c.coarse))
        return images, torch.cat(given, dim=1) if given else None

    def prepare(
        self,
        batch: Batch,
        draws: Draws,
        *,
        evaluating: bool = False,
        part: Part = WHOLE,
        exchange: Exchange | None = None,
    ) -> tuple[dict[str, Any], Targets]:
        data, given = self.fields(batch)
        device = data.device

        # Held-out samples have the counters of training samples, but share no noise with them.
        use = "valid/" if evaluating else ""
        uniform, quarter = draws.uniform(f"{use}times", 1)[:, 0], quarters(draws) if evaluating else None
        times = self.process.draw_times(uniform) if quarter is None else self.even_times((quarter + uniform) / QUARTERS)
        weights = sent(self.process.weights(times, self.predict).float(), device)
        size = tuple(data.shape[2:]) if batch.slab is None else batch.slab.size
        rows = None if batch.slab is None else batch.slab.rows
        noise = draws.normal(f"{use}noise", data.shape[1], *size, device=device, rows=rows)
        told, times = sent(self.process.told(times), device), sent(times, device)
        labels = None
        if self.classes is not None:
            labels = check_labels(batch.labels, self.classes)
            if not evaluating:
                hidden = sent(draws.uniform("label_dropout", 1)[:, 0], device)
                labels = drop_labels(labels, hidden, self.model.label_dropout, self.classes)
        noisy = self.process.mix(data, noise, times)
        inputs, tokens = self.inputs(noisy, given, told, labels, part, names=batch.variables, slab=batch.slab)
        wanted = self.process.target(data, noise, times, self.predict)
        values = self.in_tokens(wanted, tokens, part)
        quarter = None if quarter is None else sent(quarter, device)
        return inputs, Targets(values, weights, quarter, inputs.get("valid"))

    def inputs(
        self,
        x: Tensor,
        given: Tensor | None,
        told: Tensor,
        labels: Tensor | None,
        part: Part,
        *,
        names: Sequence[str] = (),
        slab: Slab | None = None,
    ) -> tuple[dict[str, Any], Tokens]:
        """Inputs of the model for a part of noisy samples, and the tokens of the whole."""
        images = x if given is None else torch.cat([x, given], dim=1)
        names = () if given is not None else names  # models that know variables by name take no condition
        inputs, tokens = part_of(self.model, images, part, variables=names or None, slab=slab)
        inputs["times"] = told
        return inputs if labels is None else inputs | {"labels": labels}, tokens

    def in_tokens(self, images: Tensor, like: Tokens, part: Part) -> Tensor:
        """Values [B, n, P*C] of a part of the tokens, in the order in which the model gives them."""
        encoder = encoder_of(self.model)
        tokens = tokenize(images, encoder.tokens, like.patch, separate=like.separate > 1, slab=like.slab)
        return tokens.values if like.slab is not None else cut(tokens.values, part, groups=like.separate)

    def squares(self, output: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Squared errors of each sample [B], added up, and of how many values they are."""
        squared = (output.float() - targets.values).square().sum(dim=2)  # B n
        number = torch.full_like(squared, float(output.shape[2]))
        if targets.valid is not None:
            squared, number = squared.where(targets.valid, 0.0), number.where(targets.valid, 0.0)
        return squared.sum(dim=1), number.sum(dim=1)

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        squares, numbers = self.squares(output, targets)
        return Loss((squares * targets.weights).sum(), numbers.sum())

    def measure(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        assert targets.quarter is not None
        both = [t.double() for t in self.squares(output, targets)]
        sums = {}
        for quarter in range(QUARTERS):
            here = targets.quarter == quarter
            sums[f"squares_{quarter}"], sums[f"values_{quarter}"] = (t.where(here, 0.0).sum() for t in both)
        return sums

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        both = [(sums[f"squares_{quarter}"], sums[f"values_{quarter}"]) for quarter in range(QUARTERS)]
        each = [squares / values if values else float("nan") for squares, values in both]
        known = [loss for loss, (_, values) in zip(each, both, strict=True) if values]
        # Quarters weigh alike, whatever number of samples fell into each.
        mean = sum(known) / len(known) if known else float("nan")
        return {"loss": mean} | {f"loss_q{number}": loss for number, loss in enumerate(each, start=1)}

    # ------------------------------------------------------------ sampling

    def generate(
        self,
        run: Callable[[dict[str, Any]], list[Tensor]],
        *,
        counters: Sequence[int],
        seed: int,
        labels: Tensor | None = None,
        condition: Tensor | None = None,
        statistics: tuple[Tensor, Tensor] | None = None,
        settings: SamplingConfig | None = None,
        device: torch.device | str = "cpu",
        part: Part = WHOLE,
        tick: Callable[[], None] = lambda: None,
        seen: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Samples [B, C, *S] in the data's units, float32; each is a function of the seed and its counter.

        `run` gives the outputs of all parts for the inputs of this one. Labels [B] are numbers of classes (the number
        of all of them stands for none); without labels none has a class. The condition is as fields() gives it, and
        `statistics` are what it was normalised with, as own_statistics() gives them.
        """
        settings = settings or self.config.sampling
        self.check_sampling(settings)
        draws, shape = Draws(seed, counters), (self.channels, *self.size)
        if self.classes is None and labels is not None:
            raise UserError("labels: this model knows no classes; leave them out")
        if labels is not None:
            try:
                check_class_ids(labels.cpu(), self.classes or 0)
            except ValueError as error:
                raise UserError(f"labels: {error}") from None
        if (condition is None) != (self.model.condition_channels == 0):
            raise UserError(
                "condition: this model makes samples without one; leave it out"
                if condition is not None
                else "condition: this model needs to be given what its samples are made from"
            )

        def answer(x: Tensor, times: Tensor, labels: Tensor | None) -> Tensor:
            given = None if condition is None else condition.to(x).repeat(len(x) // len(condition), *[1] * (x.ndim - 1))
            inputs, tokens = self.inputs(x, given, self.process.told(times), labels, part, names=self.made)
            return tokens.paint(join(run(inputs), tokens.number, groups=tokens.separate)).float()

        if self.classes is None:
            model = lambda x, times: answer(x, times, None)  # noqa: E731
        else:
            null = torch.full((len(draws.counters),), self.classes, dtype=torch.int64, device=device)
            labels = null if labels is None else labels.to(device)
            model = guided(answer, labels, self.classes, settings, self.process)
        mean, std = (t.to(device) for t in self.tables(statistics))
        limits = None
        if self.value_range is not None:
            low, high = self.value_range
            limits = (low - mean) / std, (high - mean) / std
        made = sample(
            self.process,
            self.predict,
            model,
            draws.normal("sample", *shape, device=device),
            settings,
            fresh=lambda step: draws.normal(f"sample/{step}", *shape, device=device),
            limits=limits,
            tick=tick,
            seen=None if seen is None else lambda step, data: seen(step, data * std + mean),
        )
        return made * std + mean

    def tables(self, statistics: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
        """Mean and std of what is made: of each sample [B, C, 1, ...], or the shared ones [1, C, 1, ...]."""
        axes = [1] * self.model.ndim
        return [
            t[..., self.made_at].view(-1, len(self.made_at), *axes) for t in statistics or self.statistics.tensors()
        ]

    def own_statistics(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Those of a batch where it has its own, [B, V] of all variables; of one that it lacks, the shared ones."""
        known = tuple(self.config.variables or ())
        if batch.statistics is None or not known or not batch.variables or batch.variables == known:
            return batch.statistics
        at = [known.index(name) for name in batch.variables]
        mean, std = (
            shared.to(own).expand(len(own), -1).index_copy(1, torch.tensor(at, device=own.device), own)
            for shared, own in zip(self.statistics.tensors(), batch.statistics, strict=True)
        )
        return mean, std

    # ------------------------------------------------------------ pictures

    def choose(self, counters: Sequence[int], label_of: Callable[[int], int | None]) -> list[int]:
        """As many of each class, of some that are spread over all where there are many, class by class."""
        counters = counters[:4096]
        if self.classes is None or self.model.condition_channels:
            return list(counters[: self.pictured // 2])
        by_class: dict[int, list[int]] = {}
        for counter in counters:
            by_class.setdefault(label_of(counter) or 0, []).append(counter)
        number = min(len(by_class), ROWS, self.pictured)
        chosen = [sorted(by_class)[i * len(by_class) // number] for i in range(number)]
        return [counter for label in chosen for counter in by_class[label][: max(1, self.pictured // number)]]

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
    ) -> tuple[Tensor, Shown]:
        """Samples of the classes, or from the conditions, of the real ones; from the same noise at every step.

        They have the variables of the batch, of all that are made.
        """
        (_, given), own = self.fields(batch), self.own_statistics(batch)
        labels = None if self.classes is None else check_labels(batch.labels, self.classes)
        doubled = self.config.sampling.guidance not in (0.0, 1.0)
        size = max(1, size // 2 if doubled else size)
        made = []
        for first in range(0, len(batch), size):
            part_of_batch = slice(first, min(first + size, len(batch)))
            made.append(
                self.generate(
                    run,
                    counters=range(part_of_batch.start, part_of_batch.stop),
                    seed=draws.seed,
                    labels=None if labels is None else labels[part_of_batch],
                    condition=None if given is None else given[part_of_batch],
                    statistics=None if own is None else (own[0][part_of_batch], own[1][part_of_batch]),
                    device=batch.values.device,
                    part=part,
                    tick=tick,
                )
            )
        whole = torch.cat(made)
        if self.made and batch.variables:
            whole = whole[:, [self.made.index(name) for name in batch.variables if name in self.made]]
        return whole, Shown(labels, self.split(batch.values.float())[1])

    def draw(self, path: Path, batch: Batch, output: Tensor, targets: Shown, *, step: int, held_out: bool) -> str:
        from vitrail.report.sample_grid import sample_grid

        real = batch.values[:, self.made_at] if self.config.condition else batch.values
        made, truth = (self.pixels(values) for values in (output, real))
        given, alike = None, bool(self.config.coarse)
        if targets.given is not None:
            given = self.pixels(targets.given[:, : real.shape[1]]) if alike else targets.given.float().cpu().numpy()
        labels = None if targets.labels is None else targets.labels.tolist()
        s = self.config.sampling
        which = "held-out" if held_out else "training"
        guided_by = f", guidance {s.guidance:g}" if s.guidance != 1 else ""
        caption = f"step {step}: samples of {s.steps} steps{guided_by}, beside {which} data"
        sample_grid(
            path,
            made,
            truth,
            given=given,
            alike=alike,
            names=None if labels is None else [self.names[label] for label in labels],
            title=f"Samples at step {step}",
            caption=caption,
            value_range=self.shown_range(),
        )
        return caption

    def shown_range(self) -> tuple[float, float] | None:
        """That of bytes. Data of a type of more values seldom fill it: pictures show where their values lie."""
        if self.decode is not None or self.value_range is None:
            return None
        low, high = self.value_range
        return self.value_range if high - low <= 255 else None

    @torch.no_grad()
    def pixels(self, values: Tensor) -> np.ndarray:
        """Samples [B, C, *S] as a picture shows them: latents are decoded, a few at a time."""
        decode = self.decode or (lambda some: some)
        return torch.cat([decode(some).float().cpu() for some in values.float().split(4)]).numpy()


def quarters(draws: Draws) -> Tensor:
    """Of each sample [B]: all four in every four samples, beginning with one that is drawn.

    Entries that take turns, and tiles in their order, would else always meet the same ones.
    """
    turned = Draws(draws.seed, [counter // QUARTERS for counter in draws.counters]).uniform("valid/quarter", 1)[:, 0]
    return (torch.tensor(draws.counters) + (turned * QUARTERS).long()) % QUARTERS


def coarsen(images: Tensor, block: int) -> Tensor:
    """Images [B, C, *S] averaged over blocks of so many voxels along every axis, as large as before."""
    ndim = images.ndim - 2
    pool = {1: torch.nn.functional.avg_pool1d, 2: torch.nn.functional.avg_pool2d, 3: torch.nn.functional.avg_pool3d}
    small = pool[ndim](images, block)
    for dim in range(2, images.ndim):
        small = small.repeat_interleave(block, dim=dim)
    return small


def range_of(dtype: np.dtype) -> tuple[float, float] | None:
    """Least and greatest value of a type of whole numbers; None for fractions, which have no limits."""
    return None if dtype.kind not in "ui" else (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))
