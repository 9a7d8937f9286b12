"""The variance of a step from one time back to a less noisy one, and how a model learns it (Nichol & Dhariwal 2021).

- the least variance is that of the posterior, which knows the data; the greatest is what the step forward added
- a model that learns says, voxel by voxel, where between their logarithms the variance lies: `place`, from -1 to 1
- it learns that from the variational bound, in bits a value, which leaves the mean of the step alone
- the bound of the first step counts how likely the data are among whole numbers that lie `2 * half` apart
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.diffusion.process import Process


class Bins(NamedTuple):
    """Whole numbers as a model sees them: half the distance between two, and the least and greatest of them."""

    half: Tensor
    low: Tensor
    high: Tensor


def step_variances(process: Process, time: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest variance of x at `later`, given x at `time`."""
    (signal, spread), (less_signal, less_spread) = process.levels(time), process.levels(later)
    # From `later` to `time` the process shrinks x by signal / less_signal and adds noise of this variance ...
    added = (spread.square() - (signal / less_signal * less_spread).square()).clamp(min=0)
    # ... so that x at `later`, given x at `time` and the data, is as uncertain as this.
    return added * (less_spread / spread).square(), added


def log_variance(place: Tensor, least: Tensor, greatest: Tensor) -> Tensor:
    """Return the logarithm of a variance by its place between two others."""
    low, high = (variance.log().to(place.dtype) for variance in (least, greatest))
    return low + (place + 1) / 2 * (high - low)


def bits(process: Process, times: Tensor, error: Tensor, place: Tensor, data: Tensor, bins: Bins) -> Tensor:
    """Return the term [B, n, F] of the bound of a step back from whole times [B], in bits a value.

    `error` is the data less what the model takes for them, `place` its answer; bins broadcast to both.
    """
    least, greatest = step_variances(process, times, times - 1)
    # The posterior of the first step is certain; it gets the variance of the second.
    second, _ = step_variances(process, torch.ones_like(times), torch.zeros_like(times))
    at_first = times == 0
    (_, spread), (less_signal, _) = process.levels(times), process.levels(times - 1)
    share = greatest * less_signal / spread.square()  # of the data in the mean of the step
    known = (torch.where(at_first, second, least), greatest, share, at_first)
    least, greatest, share, at_first = (t.view(-1, 1, 1) for t in known)
    logs = log_variance(place, least, greatest)
    gap = least.log().float() - logs
    apart = (share.float() * error).square() * (-logs).exp()
    divergence = (torch.expm1(gap) - gap + apart) / 2
    return torch.where(at_first, surprise(error, logs, data, bins), divergence) / math.log(2)


def surprise(error: Tensor, logs: Tensor, data: Tensor, bins: Bins) -> Tensor:
    """Return -log of the share of a normal distribution that falls on the whole number that the data are."""
    scale = (-logs / 2).exp()
    upper, lower = (_normal_cdf((error + side) * scale) for side in (bins.half, -bins.half))
    share = torch.where(data < bins.low + bins.half, upper, upper - lower)
    share = torch.where(data > bins.high - bins.half, 1 - lower, share)
    return -share.clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """Return nearly the share below x: what published models were trained with."""
    return (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
