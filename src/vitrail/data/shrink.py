"""Making what was read smaller, on the host: power-of-two pooling, and images of many sizes fitted to one.

Pooling leaves a factor below two for the device to resample, so that less is sent there and nothing is aliased.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data.source import Item

ENOUGH = 1.5


def pool_factors(item: Item) -> tuple[int, ...]:
    """Powers of two by which an item's axes are pooled; 1 along the axis across which it is sliced."""
    if all(scale < 2 for scale in item.scale):
        return (1,) * len(item.shape)
    return tuple(
        1 if scale < 2 or axis == item.slices else 2 ** math.floor(math.log2(scale))
        for axis, scale in enumerate(item.scale)
    )


def whole_image_factors(window: Sequence[int], crop: Sequence[int]) -> tuple[int, ...]:
    """Powers of two by which a whole image is pooled of which boxes are resized to the crop on the device.

    The shorter side stays above ENOUGH crops: as much as is left of most photographs, and all have room in a batch.
    """
    ratio = min(window) / (ENOUGH * max(crop))
    return (2 ** max(0, math.floor(math.log2(ratio))),) * len(window)


def pool(values: np.ndarray, factors: Sequence[int], *, labels: bool = False) -> np.ndarray:
    """Means of whole boxes of [C, *S], rounded where the type is whole; of labels the first voxel of each box."""
    if all(factor == 1 for factor in factors):
        return values
    # A window thinner than a box is one box.
    factors = [min(factor, size) for factor, size in zip(factors, values.shape[1:], strict=True)]
    whole = values[(slice(None), *(slice(0, n // f * f) for n, f in zip(values.shape[1:], factors, strict=True)))]
    if labels:
        return whole[(slice(None), *(slice(None, None, f) for f in factors))]
    boxes = whole.reshape(len(whole), *(n for s, f in zip(whole.shape[1:], factors, strict=True) for n in (s // f, f)))
    mean = boxes.mean(axis=tuple(range(2, boxes.ndim, 2)), dtype=np.float64 if values.itemsize > 2 else np.float32)
    return (mean if values.dtype.kind == "f" else np.rint(mean)).astype(values.dtype)


def fit_image(values: np.ndarray, side: int, crop: tuple[int, ...], *, labels: bool = False) -> np.ndarray:
    """Resize [C, H, W] so that its shorter side is `side`, without aliasing, and cut the crop out of its centre."""
    height, width = values.shape[1:]
    scale = side / min(height, width)
    size = [max(side, round(n * scale)) for n in (height, width)]
    if (height, width) != tuple(size):
        whole = torch.from_numpy(np.ascontiguousarray(values))[None]
        if labels:
            resized = F.interpolate(whole.double(), size=size, mode="nearest-exact")
        elif values.dtype == np.uint8:
            resized = F.interpolate(whole, size=size, mode="bilinear", antialias=True)
        else:
            resized = F.interpolate(whole.double(), size=size, mode="bilinear", antialias=True)
        if not labels and values.dtype.kind != "f":
            resized = resized.round() if resized.is_floating_point() else resized
        values = resized[0].numpy().astype(values.dtype, copy=False)
    top, left = ((n - c) // 2 for n, c in zip(size, crop, strict=True))
    return values[:, top : top + crop[0], left : left + crop[1]]
