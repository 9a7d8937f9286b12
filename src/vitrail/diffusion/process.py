"""Processes from data to noise and back: what a time means, what a model answers, how one answer becomes another.

- everywhere x = signal(time) * data + spread(time) * noise, with noise of variance 1 in every voxel
- a model answers with the noise, the data or the velocity, which is dx / d(clock) on a path where data and noise stay
  what they are. Each follows from x and any other, except where x holds nothing of what is asked for
- nothing here has parameters or draws random numbers; samples keep their type, float32 or better
- `times` are one a sample [B], or one number for all of them (no axes), which may stay on the host

Diffusion in steps (DDPM): whole times 0 .. T-1, from the least noise to the most; -1 stands for clean data.

- signal^2 + spread^2 = 1: data of variance 1 stay so. The clock is the angle whose cosine is the signal
- schedule "linear" (Ho et al. 2020) or "cosine" (Nichol & Dhariwal 2021), for any number of steps
- zero_snr stretches the schedule until nothing of the data is left at T-1, so that training knows where sampling starts
- min_snr limits the weight of the data's error at low noise; the same weight whatever is predicted
- a model that predicts the noise is not asked where less than LEAST_SIGNAL of the data is left

Rectified flow: straight lines from noise (time 0) to data (time 1); signal = time, spread = 1 - time.

- the velocity is data - noise, the same on the whole line; the clock is the time itself
- training times are "uniform" or "logit_normal" (more of them in the middle), then shifted towards noise
- the same shift holds for the times that samplers visit: large images keep their shape visible for longer, so more of
  the work is at high noise (Esser et al. 2024)
"""

import math
from abc import ABC, abstractmethod
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail.recipe import config

Prediction = Literal["noise", "data", "velocity"]


class Denoised(NamedTuple):
    data: Tensor  # [B, C, *S]
    noise: Tensor  # [B, C, *S]


class Process(ABC):
    @abstractmethod
    def levels(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Signal and spread of each time."""

    @abstractmethod
    def clock(self, times: Tensor) -> Tensor:
        """The variable by which the velocity is the derivative of x."""

    @abstractmethod
    def velocity(self, data: Tensor, noise: Tensor, times: Tensor) -> Tensor: ...

    @abstractmethod
    def from_velocity(self, x: Tensor, velocity: Tensor, times: Tensor) -> Denoised: ...

    @abstractmethod
    def draw_times(self, uniform: Tensor) -> Tensor:
        """Times [B] of the training distribution, from numbers [B] that are uniform in [0, 1)."""

    @abstractmethod
    def told(self, times: Tensor) -> Tensor:
        """Return the time as a model is told it: its features are made for 0 to about 1000."""

    @abstractmethod
    def weights(self, times: Tensor, predict: Prediction) -> Tensor:
        """Return the weight of each sample's squared error, float32 [B]."""

    @abstractmethod
    def grid(self, steps: int, predict: Prediction = "velocity") -> Tensor:
        """The times [steps + 1] that a sampler visits, on the host: from all noise to clean data.

        A model that predicts the noise says little of the data where they are all but gone: its grid may leave such
        times out, and be shorter where there are no others.
        """

    def share(self, times: Tensor) -> Tensor:
        """Return the share of the way from noise (0) to data (1) that is behind: comparable between processes."""
        signal, spread = self.levels(times)
        return signal / (signal + spread)

    def mix(self, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Noisy samples x [B, C, *S]."""
        signal, spread = self.levels_for(data, times)
        return signal * data + spread * noise

    def target(self, data: Tensor, noise: Tensor, times: Tensor, predict: Prediction) -> Tensor:
        """Return what a model is to answer; with the fields of `Denoised`, what one that sees them would answer."""
        if predict == "velocity":
            return self.velocity(data, noise, times)
        return data if predict == "data" else noise

    def denoised(self, x: Tensor, output: Tensor, times: Tensor, predict: Prediction) -> Denoised:
        """Data and noise by a model's answer: the inverse of `target`."""
        if predict == "velocity":
            return self.from_velocity(x, output, times)
        if predict == "data":
            return self.from_data(x, output, times)
        signal, spread = self.levels_for(x, times)
        return Denoised((x - spread * output) / signal, output)

    def from_data(self, x: Tensor, data: Tensor, times: Tensor) -> Denoised:
        signal, spread = self.levels_for(x, times)
        return Denoised(data, (x - signal * data) / spread)

    def data_error(self, times: Tensor, predict: Prediction) -> Tensor:
        """Return the error of the data, these less those that an answer means, for an answer that is 1 too large."""
        signal, spread = self.levels(times)
        return {"noise": spread / signal, "data": -torch.ones_like(spread), "velocity": spread}[predict]

    def check(self, predict: Prediction) -> None:
        """Refuse to predict what says nothing of the data at the noisy end, where every sampler starts."""
        if predict not in get_args(Prediction):
            raise ValueError(f"predict {predict!r} is unknown; use one of {', '.join(get_args(Prediction))}")
        signal, _ = self.levels(self.grid(1)[0])
        if predict == "noise" and signal == 0:
            raise ValueError(
                "predict 'noise' works neither with zero_snr nor with a straight process: they start where all is "
                "noise, and to know it says nothing of the data; use predict 'velocity' or 'data'"
            )

    def levels_for(self, x: Tensor, times: Tensor) -> list[Tensor]:
        """Levels [B, 1, ...] in the type of x, float32 at least; one number for all fits any device as it is."""
        kind, axes = torch.promote_types(x.dtype, torch.float32), [1] * (x.ndim - 1)
        return [v if v.ndim == 0 else v.to(x.device, kind).reshape(-1, *axes) for v in self.levels(times)]


# An error of the predicted noise becomes one of the data that is 1 / signal times as large. The cosine schedule ends
# with a signal of 5e-5: answers that are wrong by a hundredth then give samples with more than twice the spread. Of a
# thousand steps, those left out are noise to rounding.
LEAST_SIGNAL = 0.005


@config
class Steps(Process):
    steps: int = 1000
    schedule: Literal["linear", "cosine"] = "linear"
    zero_snr: bool = False  # Lin et al. 2024
    min_snr: float | None = None  # greatest weight of the data's squared error (Hang et al. 2023); null: plain weights

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps {self.steps} must be at least 2: data turn into noise step by step; 1000 is usual")
        if self.schedule not in ("linear", "cosine"):
            raise ValueError(f"schedule {self.schedule!r} is unknown; use 'linear' or 'cosine'")
        if self.min_snr is not None and not 0 < self.min_snr < math.inf:
            raise ValueError(f"min_snr {self.min_snr:g} must be above 0 (5 is usual); leave it out for plain weights")
        if self.min_snr is not None and self.zero_snr:
            raise ValueError(
                f"min_snr {self.min_snr:g} and zero_snr do not go together: steps weigh as much as they show of the "
                "data, which is nothing at the last one, where sampling starts; leave one of them out"
            )

    def alpha_bar(self) -> Tensor:
        """signal^2 of each step [T], float64."""
        if self.schedule == "linear":
            # 1e-4 to 0.02 at 1000 steps; other numbers of steps end at about the same noise.
            betas = torch.linspace(1e-4, 0.02, self.steps, dtype=torch.float64) * (1000 / self.steps)
        else:
            places = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
            curve = torch.cos((places + 0.008) / 1.008 * math.pi / 2).square()
            betas = 1 - curve[1:] / curve[:-1]
        alpha_bar = (1 - betas.clamp(max=0.999)).cumprod(0)
        if self.zero_snr:
            signal = alpha_bar.sqrt()
            alpha_bar = ((signal - signal[-1]) * (signal[0] / (signal[0] - signal[-1]))).square()
        return alpha_bar

    def levels(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the levels in float64."""
        signal, spread = _tables(self, times.device)
        places = times.long() + 1  # the first is clean data
        return signal[places], spread[places]

    def clock(self, times: Tensor) -> Tensor:
        signal, spread = self.levels(times)
        return torch.atan2(spread, signal)

    def velocity(self, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        signal, spread = self.levels_for(data, times)
        return signal * noise - spread * data

    def from_velocity(self, x: Tensor, velocity: Tensor, times: Tensor) -> Denoised:
        signal, spread = self.levels_for(x, times)
        return Denoised(signal * x - spread * velocity, spread * x + signal * velocity)

    def draw_times(self, uniform: Tensor) -> Tensor:
        return (uniform * self.steps).long().clamp(max=self.steps - 1)  # float32 may round up to T

    def told(self, times: Tensor) -> Tensor:
        return times.float()

    def weights(self, times: Tensor, predict: Prediction) -> Tensor:
        if self.min_snr is None:
            return torch.ones_like(times, dtype=torch.float32)
        signal, spread = self.levels(times)
        snr = (signal / spread).square()
        # The noise's squared error is snr times that of the data, the velocity's snr + 1 times.
        limit = torch.full_like(snr, self.min_snr)
        match predict:
            case "data":
                weights = torch.minimum(snr, limit)
            case "velocity":
                weights = torch.minimum(snr, limit) / (snr + 1)
            case "noise":
                weights = (limit / snr).clamp(max=1)
        return weights.float()

    def grid(self, steps: int, predict: Prediction = "velocity") -> Tensor:
        """Return times from the first step that is all but pure noise to -1, evenly spaced in `share`.

        So all schedules go through the same noise levels as `Straight` does. Evenly spaced times leave gaps of a
        schedule's own: for images, 25 steps of Heun are then wrong by five times as much with "linear", by twice as
        much with "cosine".
        """
        if not 1 <= steps <= self.steps:
            raise ValueError(f"steps {steps} must be from 1 to {self.steps}, the steps that the process has")
        first = self.steps - 1
        if predict == "noise":
            signal, _ = self.levels(torch.arange(self.steps))
            first = max(0, int((signal >= LEAST_SIGNAL).sum()) - 1)
        steps = min(steps, first + 1)
        shares = self.share(torch.arange(first, -2, -1)).numpy()  # rising to 1
        wanted = np.linspace(shares[0], 1, steps + 1)
        places = torch.from_numpy(np.interp(wanted, shares, np.arange(first + 1, -1, -1))).round().long()
        # No time twice: each is below the one before, and leaves places for those that follow.
        number = torch.arange(steps + 1)
        return (places + number).clamp(min=steps).cummin(0).values - number - 1


@cache
def _tables(process: Steps, device: torch.device) -> tuple[Tensor, Tensor]:
    """Signal and spread [T + 1], kept on each device: to copy them in every step would make the host wait."""
    alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), process.alpha_bar()])
    return alpha_bar.sqrt().to(device), (1 - alpha_bar).sqrt().to(device)


@config
class Straight(Process):
    times: Literal["uniform", "logit_normal"] = "uniform"
    mean: float = 0.0  # of the logit of times: above 0 nearer to data
    std: float = 1.0
    shift: float = 1.0  # above 1 nearer to noise

    def __post_init__(self) -> None:
        if self.times not in ("uniform", "logit_normal"):
            raise ValueError(f"times {self.times!r} is unknown; use 'uniform' or 'logit_normal'")
        if not math.isfinite(self.mean):
            raise ValueError(f"mean {self.mean:g} must be a finite number; 0 is usual")
        if not 0 < self.std < math.inf:
            raise ValueError(f"std {self.std:g} must be above 0; it is that of the logit of times, 1 is usual")
        if not 0 < self.shift < math.inf:
            raise ValueError(f"shift {self.shift:g} must be above 0; 1 shifts nothing, 3 is usual for large images")

    def levels(self, times: Tensor) -> tuple[Tensor, Tensor]:
        return times, 1 - times

    def clock(self, times: Tensor) -> Tensor:
        return times

    def velocity(self, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        return data - noise

    def from_velocity(self, x: Tensor, velocity: Tensor, times: Tensor) -> Denoised:
        signal, spread = self.levels_for(x, times)
        return Denoised(x + spread * velocity, x - signal * velocity)

    def draw_times(self, uniform: Tensor) -> Tensor:
        if self.times == "logit_normal":
            uniform = torch.sigmoid(self.mean + self.std * torch.special.ndtri(uniform))
        return self.shifted(uniform)

    def shifted(self, times: Tensor) -> Tensor:
        """The spread u becomes shift * u / (1 + (shift - 1) * u): from 0 to 1 as before."""
        return times / (times + self.shift * (1 - times))

    def told(self, times: Tensor) -> Tensor:
        return 1000 * times.float()

    def weights(self, times: Tensor, predict: Prediction) -> Tensor:
        return torch.ones_like(times, dtype=torch.float32)

    def grid(self, steps: int, predict: Prediction = "velocity") -> Tensor:
        if steps < 1:
            raise ValueError(f"steps {steps} must be at least 1; 25 is usual")
        return self.shifted(torch.arange(steps + 1, dtype=torch.float64) / steps)
