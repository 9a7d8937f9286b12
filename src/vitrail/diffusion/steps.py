"""Diffusion in steps (DDPM): whole times 0 .. T-1, from the least noise to the most; -1 stands for clean data.

- signal^2 + spread^2 = 1: data of variance 1 stay so. The clock is the angle whose cosine is the signal
- schedule "linear" (Ho et al. 2020) or "cosine" (Nichol & Dhariwal 2021), for any number of steps
- zero_snr stretches the schedule until nothing of the data is left at T-1, so that training knows where sampling starts
- min_snr limits the weight of the data's error at low noise; the same weight whatever is predicted
- a model that predicts the noise is not asked where less than LEAST_SIGNAL of the data is left
"""

import math
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.diffusion.process import Denoised, Prediction, Process
from vitrail.recipe import config

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
        """In float64."""
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
        """From the first step that is all but pure noise to -1, evenly spaced in `share`.

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
