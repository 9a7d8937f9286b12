"""From data to noise and back: what a time means, what a model is to answer, and how one answer becomes another.

- everywhere x = signal(time) * data + spread(time) * noise, with noise of variance 1 in every voxel
- a model answers with the noise, the data or the velocity, which is dx / d(clock) on a path where data and noise stay
  what they are. Each follows from x and any other, except where x holds nothing of what is asked for
- nothing here has parameters or draws random numbers; samples keep their type, float32 or better
- `times` are one a sample [B], or one number for all of them (no axes), which may stay on the host
"""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

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
        """What a model gets to know of the time: its features are made for 0 to about 1000."""

    @abstractmethod
    def weights(self, times: Tensor, predict: Prediction) -> Tensor:
        """Of each sample's squared error, float32 [B]."""

    @abstractmethod
    def grid(self, steps: int, predict: Prediction = "velocity") -> Tensor:
        """The times [steps + 1] that a sampler visits, on the host: from all noise to clean data.

        A model that predicts the noise says little of the data where they are all but gone: its grid may leave such
        times out, and be shorter where there are no others.
        """

    def share(self, times: Tensor) -> Tensor:
        """How much of the way from noise (0) to data (1) is behind: comparable between processes."""
        signal, spread = self.levels(times)
        return signal / (signal + spread)

    def mix(self, data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Noisy samples x [B, C, *S]."""
        signal, spread = self.levels_for(data, times)
        return signal * data + spread * noise

    def target(self, data: Tensor, noise: Tensor, times: Tensor, predict: Prediction) -> Tensor:
        """What a model is to answer; with the fields of `Denoised`, what one that sees them would answer."""
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
