"""Samplers, from noise to data by a model's answers: ancestral, DDIM, Euler, Heun and plugins', for every process.

- `ancestral` draws each step from the posterior of the process, for the data that the model sees (Ho et al. 2020), with
  as many steps as the process has or fewer; it wants hundreds. It alone uses variances that a model has learned
- `ddim` keeps the noise that the model sees and draws none (Song et al. 2021); for straight lines that is `euler`
- `euler` and `heun` solve dx / d(clock) = velocity; heun asks the model twice a step, but once in the last
- every sampler's last step ends on the data that the model sees: no noise is left over, and none is added
- random numbers come from outside: the same noise gives the same sample

To add one: a config with `kind`, `evaluations` and `step`, and a line in recipe/kinds.py; or a plugin, see
docs/diffusion.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import WithJsonSchema
from torch import Tensor

from vitrail.diffusion.process import Denoised, Prediction, Process
from vitrail.diffusion.variance import log_variance, step_variances
from vitrail.recipe import config, kinds

Predict = Callable[[Tensor, Tensor], Tensor]  # (x [B, C, *S], times [B]) -> the model's answer, as large as x
Conditional = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, times, labels [B]) -> the same

# Measured with a model that is known exactly, of fields with variance 1 and the spectrum of images (1 / f^2): the
# distance of the samples' distribution from that of the data (Wasserstein), for DDPM / for straight lines.
#   model asked   ancestral      ddim           euler          heun
#   10 times      0.225 / 0.226  0.173 / 0.177  0.080 / 0.177  0.122 / 0.105
#   20 times      0.126 / 0.126  0.090 / 0.092  0.037 / 0.092  0.032 / 0.026
#   50 times      0.054 / 0.055  0.037 / 0.038  0.014 / 0.038  0.005 / 0.004
#   100 times     0.028 / 0.028  0.019 / 0.019  0.007 / 0.019  0.001 / 0.001
# (heun once less). A mixture of six modes ranks ddim, euler and heun alike. So heun, and 25 steps of it: what is wrong
# then is less than what any trained model is wrong by.
AUTO = "heun"


@dataclass(frozen=True)
class Step:
    """One step of a sampler, from `time` to the less noisy `later`."""

    process: Process
    x: Tensor  # [B, C, *S] at `time`
    denoised: Denoised  # the data and the noise that the model sees in x
    time: Tensor
    later: Tensor
    look: Callable[[Tensor, Tensor], Denoised]  # the same for another x and time: asks the model once more
    fresh: Callable[[], Tensor]  # new noise, as large as x
    place: Tensor | None = None  # of the variance between its least and greatest, -1 to 1, by a model that learned it


class Sampler(Protocol):
    """A way from noise to data, and its settings; every step but the last one is its own."""

    kind: str
    evaluations: ClassVar[int]  # of the model in a step

    def step(self, at: Step) -> Tensor:
        """x at the time `at.later`."""


@config
class AncestralConfig:
    kind: Literal["ancestral"] = "ancestral"
    evaluations: ClassVar[int] = 1

    def step(self, at: Step) -> Tensor:
        return renewed(at.process, at.denoised, at.fresh(), at.time, at.later, at.place)


@config
class DDIMConfig:
    kind: Literal["ddim"] = "ddim"
    evaluations: ClassVar[int] = 1

    def step(self, at: Step) -> Tensor:
        return at.process.mix(*at.denoised, at.later)


@config
class EulerConfig:
    kind: Literal["euler"] = "euler"
    evaluations: ClassVar[int] = 1

    def step(self, at: Step) -> Tensor:
        stride = at.process.clock(at.later) - at.process.clock(at.time)
        return at.x + stride * at.process.velocity(*at.denoised, at.time)


@config
class HeunConfig:
    kind: Literal["heun"] = "heun"
    evaluations: ClassVar[int] = 2

    def step(self, at: Step) -> Tensor:
        stride = at.process.clock(at.later) - at.process.clock(at.time)
        velocity = at.process.velocity(*at.denoised, at.time)
        ahead = at.look(at.x + stride * velocity, at.later)
        velocity = (velocity + at.process.velocity(*ahead, at.later)) / 2
        return at.x + stride * velocity


def known() -> list[str]:
    """List the names that `sampler` may have."""
    return ["auto", *kinds.known("sampler")]


_BUILT_IN = {"enum": ["auto", *kinds.BUILT_IN["sampler"]]}
_OWN = {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}
Chosen = Annotated[str | dict[str, Any], WithJsonSchema({"anyOf": [_BUILT_IN, {"type": "string"}, _OWN]})]


@config
class SamplingConfig:
    sampler: Chosen = "auto"  # a name, or a mapping with kind and options; auto: heun
    steps: int = 25  # for heun, which asks the model 49 times; euler and ddim want 50 to 100, ancestral 250 and more
    guidance: float = 1.0  # 0: as if there were no class; 1: the class as it is; above: more of what makes the class
    interval: tuple[float, float] = (0.0, 1.0)  # share of the way from noise (0) to data (1) on which guidance acts
    clip: bool = True  # keep predicted data within the range of the data, where there is one

    def __post_init__(self) -> None:
        built_in = (
            "auto",
            *kinds.BUILT_IN["sampler"],
        )  # others are looked for among what is installed, which takes long
        if isinstance(self.sampler, str) and self.sampler not in built_in and self.sampler not in known():
            near = kinds.nearest(self.sampler, known())
            hint = f"; did you mean {near!r}?" if near else ""
            names = " or ".join(", ".join(known()).rsplit(", ", 1))
            raise ValueError(f"sampler {self.sampler!r} is unknown{hint}; use {names}, or one by --plugin MODULE")
        self.method  # noqa: B018 - refuses options that the sampler does not take
        if self.steps < 1:
            raise ValueError(f"steps {self.steps} must be at least 1; 25 is usual")
        if not 0 <= self.guidance < math.inf:
            raise ValueError(f"guidance {self.guidance:g} must be 0 or more: 0 ignores the class, 1 is plain, 4 strong")
        first, last = self.interval
        if not 0 <= first <= last <= 1:
            raise ValueError(f"interval {first:g}, {last:g} must be two rising numbers from 0 (noise) to 1 (data)")

    @property
    def method(self) -> Sampler:
        """The sampler that these settings name."""
        given = {"kind": AUTO if self.sampler == "auto" else self.sampler}
        made: Sampler = kinds.make("sampler", given if isinstance(self.sampler, str) else self.sampler, key="sampler")
        return made


def sample(
    process: Process,
    predict: Prediction,
    model: Predict,
    noise: Tensor,
    settings: SamplingConfig,
    *,
    fresh: Callable[[int], Tensor],
    limits: tuple[Tensor, Tensor] | None = None,
    learned: bool = False,
    tick: Callable[[], None] = lambda: None,
    seen: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Data [B, C, *S] from `noise`, in its type (float32 at least).

    A model that has `learned` variances answers with twice as many channels: what it predicts, then `Step.place`.

    - fresh(i): new noise for step i, 0 to steps - 2, where the sampler draws any; i + steps, ... if it draws more
    - limits: least and greatest values of the data, broadcast to x
    - tick(): called after each evaluation of the model; seen(i, data): with what the model takes for the data in step i
    """
    process.check(predict)
    sampler = settings.method
    grid = process.grid(settings.steps, predict)
    x = noise.to(torch.promote_types(noise.dtype, torch.float32))

    def ask(x: Tensor, time: Tensor) -> tuple[Denoised, Tensor | None]:
        told = time.to(x.device, x.dtype if time.is_floating_point() else time.dtype).expand(len(x))
        output = model(x, told)
        expected = (x.shape[0], x.shape[1] * (2 if learned else 1), *x.shape[2:])
        if output.shape != expected:
            raise ValueError(f"the model answers with shape {list(output.shape)} to samples of {list(x.shape)}")
        output, *place = output.split(x.shape[1], dim=1)
        tick()
        denoised = process.denoised(x, output.to(x.dtype), time, predict)
        if settings.clip and limits is not None:
            low, high = (limit.to(x) for limit in limits)
            denoised = process.from_data(x, denoised.data.clamp(low, high), time)
        return denoised, place[0].to(x.dtype) if place else None

    def look(x: Tensor, time: Tensor) -> Denoised:
        return ask(x, time)[0]

    with torch.no_grad():
        for number, (time, later) in enumerate(pairwise(grid)):
            denoised, place = ask(x, time)
            if seen is not None:
                seen(number, denoised.data)
            if number == len(grid) - 2:
                x = denoised.data
            else:
                numbers = count(number, settings.steps)  # of this step alone, however many it draws
                new_noise = lambda numbers=numbers, x=x: fresh(next(numbers)).to(x)  # noqa: E731
                x = sampler.step(Step(process, x, denoised, time, later, look, new_noise, place))
    return x


def renewed(
    process: Process, denoised: Denoised, fresh: Tensor, time: Tensor, later: Tensor, place: Tensor | None = None
) -> Tensor:
    """A draw of x at the less noisy time `later`, given x at `time` and its data: some of the noise is new."""
    less_signal, less_spread = process.levels(later)
    variance, greatest = step_variances(process, time, later)
    kept = (less_spread.square() - variance).clamp(min=0).sqrt()
    spread = variance.sqrt() if place is None else (log_variance(place, variance, greatest) / 2).exp()
    return less_signal * denoised.data + kept * denoised.noise + spread * fresh


def guided(
    conditional: Conditional, labels: Tensor, null_label: int, settings: SamplingConfig, process: Process
) -> Predict:
    """A model of samples with these labels, guided without a classifier: free + guidance * (conditional - free).

    Where guidance acts, the model is asked once with a doubled batch, the unlabelled half last; where it is 1 or 0,
    once with one half. Outside the interval it is 1.
    """
    free = torch.full_like(labels, null_label)
    first, last = settings.interval[0] - 1e-6, settings.interval[1] + 1e-6  # times are rounded
    everywhere = tuple(settings.interval) == (0.0, 1.0)  # then nothing need wait to know a time

    def answer(x: Tensor, times: Tensor) -> Tensor:
        acts = everywhere or first <= float(process.share(times[0])) <= last
        guidance = settings.guidance if acts else 1.0
        if guidance in (0.0, 1.0):
            return conditional(x, times, labels if guidance else free)
        both = conditional(torch.cat([x, x]), torch.cat([times, times]), torch.cat([labels, free]))
        with_label, without = both.to(x.dtype).chunk(2)
        answer, *place = with_label.split(x.shape[1], dim=1)  # a learned variance is that of the class
        without = without[:, : x.shape[1]]
        return torch.cat([without + guidance * (answer - without), *place], dim=1)

    return answer
