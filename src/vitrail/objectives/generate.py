"""Learn to make samples like the data: what `denoise` (DDPM) and `flow` (rectified flow) share.

- noise, time and dropped labels of a sample are functions of (run.seed, its counter), the same under every layout;
  noise belongs to voxels, so that of a slab of a crop just its own is made
- classes condition a model that knows some (model.classes, or `classes: true` to take them from the data); a share of
  the labels is hidden in training (model.label_dropout), which is what guidance needs
- `condition` names variables that are given, not made; with `coarse: N` the image itself, averaged over blocks of N
  voxels, is given (super-resolution, downscaling). Both come as channels after those that are denoised
- the loss is the squared error of what is predicted, a mean over voxels, in fp32; validation measures it without
  weights at times spread evenly over the whole way, so that runs can be compared, and of each quarter of the way
- with model.learn_sigma the second half of a model's channels learns the variance of DDPM's steps, by the variational
  bound, which is added to the loss (Nichol & Dhariwal 2021). Flow has none: it leaves that half alone, as SiT does
- samples are in the units of the data: of an entry with statistics of its own, where a sample is made from its data
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.diffusion import Prediction, Process, SamplingConfig, Steps, guided, sample
from vitrail.diffusion.variance import Bins, bits
from vitrail.draws import Draws, sent
from vitrail.errors import UserError
from vitrail.layers.block import check_class_ids, drop_labels
from vitrail.layers.patches import Slab, per_axis
from vitrail.layers.tokens import TOKENS, TokenAxes, Tokens, tokenize
from vitrail.models.model import encoder_of, make_inputs
from vitrail.objectives.objective import Loss, Objective, by_slabs, check_labels, check_names, normalise
from vitrail.recipe import config

if TYPE_CHECKING:
    from vitrail.report.blocks import About

QUARTERS = 4  # of the way from noise to data, the noisiest first
ROWS = 10  # classes in a picture


@dataclass(frozen=True)
class Targets:
    values: Tensor  # [B, n, P*C] what the model is to answer; with a bound [B, n, P*2C], the data after it
    weights: Tensor  # [B] of the squared errors
    quarter: Tensor | None  # [B] of the way from noise to data, where validation measures
    valid: Tensor | None  # [B, n] false for padding
    bound: "Bound | None" = None  # where the model learns variances


@dataclass(frozen=True)
class Bound:
    """Facts of the samples that the variational bound needs."""

    times: Tensor  # [B]
    factor: Tensor  # [B] of what is predicted: the data's error for an error of 1
    bins: Bins  # each [B or 1, 1, C]


class Shown(NamedTuple):
    """Labels and conditions that a picture shows beside the samples."""

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
        # Blocks of a coarse image are averaged.
        self.axes = TokenAxes(output=(TOKENS,), targets=("values", "valid"), planes=c.coarse or 1)
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
        self.halved = bool(getattr(model, "learn_sigma", False))  # the second half of the channels is of variances
        self.learned = self.halved and isinstance(process, Steps)
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

    def fields(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return what is made and what is given, normalised."""
        return self.split(normalise(batch.values, batch.statistics or self.statistics))

    def split(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is made [B, C, *S] and what is given [B, K, *S] or None, of images of all variables."""
        given: list[Tensor] = []
        c = self.config
        if c.condition:
            at = [c.variables.index(name) for name in c.condition]
            images, given = images[:, self.made_at], [images[:, at]]
        if c.coarse:
            given.insert(0, coarsen(images, c.coarse))
        return images, torch.cat(given, dim=1) if given else None

    @by_slabs
    def prepare(self, batch: Batch, draws: Draws, *, evaluating: bool = False) -> tuple[dict[str, Any], Targets]:
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
        inputs, like = self.inputs(noisy, given, told, labels, names=batch.variables, slab=batch.slab)
        wanted, bound = self.process.target(data, noise, times, self.predict), None
        if self.learned:
            factor = self.process.data_error(times, self.predict).float()
            bound = Bound(times, factor, self.bins(batch.statistics, device))
            wanted = torch.cat([wanted, data], dim=1)
        encoder = encoder_of(self.model)
        tokens = tokenize(wanted, encoder.tokens, like.patch, separate=like.separate > 1, slab=batch.slab)
        quarter = None if quarter is None else sent(quarter, device)
        return inputs, Targets(tokens.take(), weights, quarter, inputs.get("valid"), bound)

    def inputs(
        self,
        x: Tensor,
        given: Tensor | None,
        told: Tensor,
        labels: Tensor | None,
        *,
        names: Sequence[str] = (),
        slab: Slab | None = None,
    ) -> tuple[dict[str, Any], Tokens]:
        """Make the inputs of the model for noisy samples, and their tokens."""
        images = x if given is None else torch.cat([x, given], dim=1)
        names = () if given is not None else names  # models that know variables by name take no condition
        inputs, tokens = make_inputs(self.model, images, variables=names or None, slab=slab)
        inputs["times"] = told
        return inputs if labels is None else inputs | {"labels": labels}, tokens

    def squares(self, output: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Squared errors of each sample [B], added up, and of how many values they are."""
        answer, wanted = self.halves(output)[0], targets.values
        if targets.bound is not None:
            wanted = self.halves(wanted)[0]
        squared = (answer.float() - wanted).square().sum(dim=2)  # B n
        number = torch.full_like(squared, float(answer.shape[2]))
        if targets.valid is not None:
            squared, number = squared.where(targets.valid, 0.0), number.where(targets.valid, 0.0)
        return squared.sum(dim=1), number.sum(dim=1)

    def loss(self, output: Tensor, targets: Targets) -> Loss:
        squares, numbers = self.squares(output, targets)
        total = (squares * targets.weights).sum()
        if (bound := targets.bound) is not None:
            answer, place = (half.float() for half in self.halves(output))
            wanted, data = self.halves(targets.values)
            error = bound.factor.view(-1, 1, 1) * (answer.detach() - wanted)
            bins = Bins(*(t.repeat(1, 1, data.shape[2] // t.shape[2]) for t in bound.bins))
            each = bits(self.process, bound.times, error, place, data, bins).sum(dim=2)
            if targets.valid is not None:
                each = each.where(targets.valid, 0.0)
            total = total + each.sum() * (self.config.longest / 1000)  # a thousandth of the sum over all steps
        return Loss(total, numbers.sum())

    def halves(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both halves [B, n, P*C] of the channels of tokens; where there is one alone, it and nothing."""
        if not self.halved:
            return values, values[:, :, :0]
        both = values.unflatten(2, (-1, 2, self.channels))  # B n P 2 C
        return both[..., 0, :].flatten(2), both[..., 1, :].flatten(2)

    def bins(self, statistics: tuple[Tensor, Tensor] | None, device: torch.device) -> Bins:
        """Return the whole numbers that data are, normalised; of others, those of bytes over -1 to 1, without ends."""
        tables = statistics or self.statistics.tensors()
        mean, std = (sent(t, device)[..., self.made_at].reshape(-1, 1, self.channels) for t in tables)
        if self.value_range is None:
            return Bins(*(torch.full_like(std, value) for value in (1 / 255, -torch.inf, torch.inf)))
        low, high = self.value_range
        return Bins(0.5 / std, (low - mean) / std, (high - mean) / std)

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
        run: Callable[[dict[str, Any]], Tensor],
        *,
        counters: Sequence[int],
        seed: int,
        labels: Tensor | None = None,
        condition: Tensor | None = None,
        statistics: tuple[Tensor, Tensor] | None = None,
        settings: SamplingConfig | None = None,
        device: torch.device | str = "cpu",
        tick: Callable[[], None] = lambda: None,
        seen: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Samples [B, C, *S] in the data's units, float32; each is a function of the seed and its counter.

        `run` gives the model's output for inputs. Labels [B] are numbers of classes (the number of all of them stands
        for none); without labels none has a class. The condition is as fields() gives it, and `statistics` are what it
        was normalised with, as own_statistics() gives them.
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
            inputs, tokens = self.inputs(x, given, self.process.told(times), labels, names=self.made)
            made = tokens.paint(run(inputs)).float()
            return made if self.learned else made[:, : self.channels]

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
            learned=self.learned,
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
        """Return samples' own statistics, [B, V] of all variables; of one that the batch lacks, the shared ones."""
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
        """Choose equally many samples of each class, class by class; of many classes, some that are spread over all."""
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
        run: Callable[[dict[str, Any]], Tensor],
        *,
        first: int = 0,
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
        for start in range(0, len(batch), size):
            part_of_batch = slice(start, min(start + size, len(batch)))
            made.append(
                self.generate(
                    run,
                    counters=range(first + part_of_batch.start, first + part_of_batch.stop),
                    seed=draws.seed,
                    labels=None if labels is None else labels[part_of_batch],
                    condition=None if given is None else given[part_of_batch],
                    statistics=None if own is None else (own[0][part_of_batch], own[1][part_of_batch]),
                    device=batch.values.device,
                    tick=tick,
                )
            )
        whole = torch.cat(made)
        if self.made and batch.variables:
            whole = whole[:, [self.made.index(name) for name in batch.variables if name in self.made]]
        return whole, Shown(labels, self.split(batch.values.float())[1])

    def rows(self, batch: Batch, output: Tensor, targets: Shown) -> list[dict[str, Any]]:
        real = batch.values[:, self.made_at] if self.config.condition else batch.values
        made, truth = (self.pixels(values) for values in (output, real))
        given: Any = [None] * len(made)
        if targets.given is not None:
            coarse = bool(self.config.coarse)
            given = self.pixels(targets.given[:, : real.shape[1]]) if coarse else targets.given.float().cpu().numpy()
        labels = [None] * len(made) if targets.labels is None else targets.labels.tolist()
        names = [None if label is None else self.names[label] for label in labels]
        return [
            {"made": one, "real": other, "given": condition, "name": name}
            for one, other, condition, name in zip(made, truth, given, names, strict=True)
        ]

    def draw(self, path: Path, rows: list[dict[str, Any]], *, step: int, held_out: bool, slices: int = 1) -> str:
        from vitrail.report.blocks import about_rows
        from vitrail.report.panels import sample_grid

        s = self.config.sampling
        which = "held-out" if held_out else "training"
        guided_by = f", guidance {s.guidance:g}" if s.guidance != 1 else ""
        caption = f"step {step}: samples of {s.steps} steps{guided_by}, beside {which} data"
        sample_grid(
            path,
            [row["made"] for row in rows],
            [row["real"] for row in rows],
            given=None if rows[0]["given"] is None else [row["given"] for row in rows],
            alike=bool(self.config.coarse),
            names=None if rows[0]["name"] is None else [row["name"] for row in rows],
            abouts=list(map(self.about, about_rows(rows))),
            slices=slices,
            title=f"Samples at step {step}",
            caption=caption,
            value_range=self.shown_range(),
        )
        return caption

    def about(self, about: "About") -> "About":
        """Return what is known of what a row shows: of decoded latents not where voxels are, of others what is made."""
        if self.decode is not None:
            return type(about)(name=about.name)
        return about.pick([n for n in about.variables if n in self.made]) if self.config.condition else about

    def shown_range(self) -> tuple[float, float] | None:
        """Return the range of bytes; other types seldom fill theirs, and pictures show where their values lie."""
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
    """Return each sample's quarter [B]: every four samples have all four, beginning with one that is drawn.

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


LONGEST = 1000  # what a model's time input reaches, by diffusion/process.py


@config
class GenerateConfig:
    """Keys that both kinds have."""

    kind: str
    classes: bool | None = None  # whether the labels of items condition the model; null: if model.classes is given
    names: tuple[str, ...] | None = None  # of the classes, label 0 first; null: those of the data
    variables: tuple[str, ...] | None = None  # of the data, in their order; null: as the data tell
    condition: tuple[str, ...] = ()  # those of them that are given, not made
    coarse: int | None = None  # give the image itself, averaged over blocks of so many voxels
    sampling: SamplingConfig = SamplingConfig()  # of the pictures of a run, and the default of `vitrail sample`

    def __post_init__(self) -> None:
        check_names(self.names)
        if self.coarse is not None and self.coarse < 2:
            raise ValueError(f"coarse {self.coarse} must be at least 2 voxels; leave it out to give no coarse image")
        if len(set(self.condition)) < len(self.condition):
            raise ValueError(f"condition {list(self.condition)} names a variable twice; name each once")

    @property
    def longest(self) -> int:
        """Return the largest number that a model's time input may be."""
        return LONGEST

    def labels_with(self, model: Any) -> Literal["item"] | None:
        known = getattr(model, "classes", None)
        return "item" if (known is not None if self.classes is None else self.classes) else None

    def check_model(self, model: Any) -> None:
        """Refuse a model that cannot learn this."""
        if getattr(model, "output", None) != "denoised":
            raise UserError(
                f"objective.kind: {self.kind!r} trains models that take noisy images and a time, such as 'dit' and "
                f"'diffusion_vit', not {model.kind!r}"
            )
        if model.ndim not in (2, 3):
            raise UserError(
                f"model.ndim: {model.ndim}, but objective {self.kind!r} makes images and volumes; set it to 2 or 3"
            )
        if self.classes and not hasattr(model, "classes"):
            raise UserError(
                f"objective.classes: model {model.kind!r} takes no classes; leave it out, or use model 'dit'"
            )
        if self.classes is False and getattr(model, "classes", None) is not None:
            raise UserError(f"objective.classes: false, but model.classes is {model.classes}; leave one of them out")

    def check_statistics(self, data: Any) -> None:
        """Refuse entries of the data that are normalised in ways of their own, where samples belong to none of them."""
        own = [number for number, entry in enumerate(data.train) if getattr(entry, "statistics", None) is not None]
        if self.condition or self.coarse or (data.statistics != "each" and not own):
            return
        key = "data.statistics: each" if data.statistics == "each" else f"data.train.{own[0]}.statistics"
        raise UserError(
            f"{key} gives entries means and stds of their own, but objective {self.kind!r} makes samples that belong "
            "to no entry, and would not know their units; use data.statistics: shared"
            f"{' and leave those of the entry out' if own else ''}"
        )

    def fit(self, model: Any, variables: tuple[str, ...], data: Any) -> tuple[Any, Any]:
        """Return this config and the model's, completed by each other and by the data and their variables."""
        self.check_model(model)
        self.check_statistics(data)
        if data.augment.mixup or data.augment.cutmix:
            raise UserError(
                "data.augment: mixup and cutmix make images of two classes, and a model that makes images would learn "
                "to make such; set them to 0"
            )
        if self.names and self.labels_with(model) is None:
            raise UserError(
                f"objective.names: {list(self.names)} are given, but classes do not condition the model; set "
                "objective.classes: true, or leave them out"
            )
        if self.variables not in (None, variables):
            raise UserError(
                f"objective.variables: {list(self.variables or ())}, but the data have {list(variables)}; leave it out"
            )
        unknown = [name for name in self.condition if name not in variables]
        if unknown:
            raise UserError(
                f"objective.condition: {unknown[0]!r} is not a variable of the data, which have "
                f"{', '.join(variables)}; name some of these"
            )
        made = len(variables) - len(self.condition)
        if made < 1:
            raise UserError("objective.condition: all variables of the data are given, and none is left to be made")
        given = len(self.condition) + (made if self.coarse else 0)
        if model.condition_channels not in (0, given):
            raise UserError(
                f"model.condition_channels: {model.condition_channels}, but objective.condition and objective.coarse "
                f"give {given}; leave it out"
            )
        changes: dict[str, Any] = {"condition_channels": given}
        if hasattr(model, "time_steps") and model.time_steps < self.longest * model.time_scale:
            changes["time_steps"] = round(self.longest * model.time_scale)
        try:
            return replace(self, variables=variables), replace(model, **changes)
        except ValueError as error:
            raise UserError(f"objective.condition and model: {error}") from None
