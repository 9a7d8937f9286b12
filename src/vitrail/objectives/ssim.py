"""Structural similarity of images and volumes (Wang et al. 2004), by the formulas of scikit-image.

- a Gaussian of 1.5 voxels along each axis, cut off at 5 (`gaussian_weights=True, use_sample_covariance=False`)
- voxels whose window sticks out of the image do not count; channels count alike
"""

import torch
from torch import Tensor
from torch.nn import functional

SIGMA, REACH = 1.5, 5  # voxels
K1, K2 = 0.01, 0.03


def ssim(first: Tensor, second: Tensor, data_range: float) -> Tensor:
    """Return the similarity of each pair [B], of images or volumes [B, C, *S] whose values span `data_range`.

    It is no number where images are smaller than a window.
    """
    if first.shape != second.shape or not data_range > 0:
        raise ValueError(
            f"{list(first.shape)} and {list(second.shape)} with data_range {data_range}: give pairs of one shape, and "
            "the largest value that there can be less the smallest"
        )
    if min(first.shape[2:]) < 2 * REACH + 1:
        return torch.full((len(first),), float("nan"), dtype=torch.float64, device=first.device)
    x, y = first.double(), second.double()  # variances are small differences of large numbers
    mean_x, mean_y = _blur(x), _blur(y)
    spread_x, spread_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    shared = _blur(x * y) - mean_x * mean_y
    a, b = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    above = (2 * mean_x * mean_y + a) * (2 * shared + b)
    below = (mean_x**2 + mean_y**2 + a) * (spread_x + spread_y + b)
    return (above / below).flatten(1).mean(dim=1)


def _blur(values: Tensor) -> Tensor:
    """Return weighted means of all windows inside [B, C, *S]: each axis is shorter by 2 * REACH."""
    places = torch.arange(-REACH, REACH + 1, dtype=values.dtype, device=values.device)
    weights = torch.exp(-(places**2) / (2 * SIGMA**2))
    kernel = (weights / weights.sum()).view(1, 1, -1)
    for axis in range(2, values.ndim):
        along = values.movedim(axis, -1)
        done = functional.conv1d(along.reshape(-1, 1, along.shape[-1]), kernel)
        values = done.view(*along.shape[:-1], -1).movedim(-1, axis)
    return values
