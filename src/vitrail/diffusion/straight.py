"""Rectified flow: straight lines from noise (time 0) to data (time 1); signal = time, spread = 1 - time.

- the velocity is data - noise, the same on the whole line; the clock is the time itself
- training times are "uniform" or "logit_normal" (more of them in the middle), then shifted towards noise
- the same shift holds for the times that samplers visit: large images keep their shape visible for longer, so more of
  the work is at high noise (Esser et al. 2024)
"""

import math
from typing import Literal

import torch
from torch import Tensor

from vitrail.diffusion.process import Denoised, Prediction, Process
from vitrail.recipe import config


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
