"""Brighter, flatter, noisier, softer: changes of intensity, relative to the statistics of the data.

Each variable of each sample has numbers of its own; blur is the same for all variables of a sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.affine import mirror
from vitrail.data.augment.noise import add_noise
from vitrail.draws import between, keys, sent, uniforms

SPREAD = 3.0  # standard deviations on either side of the mean that gamma's range covers


def changes_intensity(settings: Any) -> bool:
    return bool(settings.gamma or settings.contrast or settings.brightness or settings.noise or settings.blur)


def change_intensity(
    values: Tensor, counters: Sequence[int], settings: Any, seed: int, mean: Tensor, std: Tensor
) -> Tensor:
    """[B, C, *S] float32, changed in place where that is possible; mean and std are [B, C]."""
    c, channels = settings, values.shape[1]
    ones = [1] * (values.ndim - 2)

    def draw(purpose: str, low: float, high: float) -> np.ndarray:  # [B, C]
        return between(uniforms(seed, f"augment.{purpose}", counters, channels), low, high)

    def shaped(table: np.ndarray | Tensor) -> Tensor:  # [B, C, 1...]
        return sent(torch.as_tensor(table, dtype=torch.float32), values.device).view(*table.shape, *ones)

    if c.blur:
        widths = between(uniforms(seed, "augment.blur", counters, 1)[:, 0], *c.blur).tolist()
        values = blur(values, widths, range(2, values.ndim))
    middle, spread = shaped(mean), shaped(std)
    if c.gamma:
        power = shaped(np.exp(draw("gamma", *np.log(c.gamma))))
        values.sub_(middle).div_(2 * SPREAD * spread).add_(0.5)  # 0 to 1 over the range
        negative = values < 0  # the curve goes on below 0 as its mirror image
        values.abs_().pow_(power)
        values = torch.where(negative, -values, values).sub_(0.5).mul_(2 * SPREAD * spread).add_(middle)
    if c.contrast:
        factor = shaped(np.exp(draw("contrast", *np.log(c.contrast))))
        values.sub_(middle).mul_(factor).add_(middle)
    if c.brightness:
        values.add_(shaped(draw("brightness", -c.brightness, c.brightness)) * spread)
    if c.noise:
        strength = torch.from_numpy(draw("noise", 0.0, c.noise)).float() * std
        add_noise(values, keys(seed, "augment.noise voxels", counters).tolist(), strength)
    return values


def blur(values: Tensor, widths: Sequence[float], dims: Sequence[int]) -> Tensor:
    """Gaussian blur [B, ...] along some dims, of a standard deviation a sample; mirrored at the borders."""
    reach = max(1, math.ceil(3 * max(widths)))
    steps = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (steps / np.asarray(widths)[:, None]) ** 2)
    weights *= np.abs(steps) <= np.ceil(3 * np.asarray(widths))[:, None]  # a sample's own reach, whatever the others'
    table = sent((weights / weights.sum(1, keepdims=True)).astype(np.float32), values.device)
    for dim in dims:
        size = values.shape[dim]
        index = sent(mirror(torch.arange(-reach, size + reach), size), values.device)
        wide = values.index_select(dim, index)
        values = torch.zeros_like(values)
        for step, weight in enumerate(table.T):  # [B]
            values.addcmul_(wide.narrow(dim, step, size), weight.view(-1, *[1] * (values.ndim - 1)))
    return values
