"""How far apart two sets of samples are, and how often a guess is right. Pure functions of tensors.

- Fréchet distance of Gaussians, squared as FID is: means and covariances of two sets of features
- KID: the unbiased squared MMD with a cubic kernel; it may come out below 0 where the sets are alike
- precision and recall (Kynkäänniemi et al. 2019): the share of one set that lies within reach of the other, where an
  item reaches as far as its k-th neighbour in its own set
- sliced Wasserstein-2: of one-dimensional projections onto random directions, which is exact for each of them
- the Wilson interval of a share, which holds for few samples and for shares of 0 and 1
Features are [N, D]. Whatever is a small difference of large sums is computed in float64.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 1000  # of a table of distances or kernels that are computed at once
KERNEL_POWER = 3


class Estimate(NamedTuple):
    value: float
    spread: float  # standard deviation over subsets


class Share(NamedTuple):
    value: float
    low: float
    high: float


class Cloud:
    """A set of features [N, D], with what is found once where it is compared with several others."""

    def __init__(self, features: Tensor):
        self.features = features.double()
        self._reach: dict[int, Tensor] = {}

    @cached_property
    def gaussian(self) -> "Gaussian":
        mean = self.features.mean(dim=0)
        centred = self.features - mean
        return Gaussian.of(mean, centred.T @ centred / (len(centred) - 1))

    @cached_property
    def alike(self) -> float:
        """The mean kernel of two different items."""
        number = len(self.features)
        return _kernel_sum(self.features, self.features, same=True) / (number * (number - 1))

    def reach(self, neighbours: int) -> Tensor:
        """Squared distance of each to its k-th neighbour."""
        if neighbours not in self._reach:
            self._reach[neighbours] = _reach(self.features, neighbours)
        return self._reach[neighbours]


def _clouds(first: Tensor | Cloud, second: Tensor | Cloud, *, least: int) -> tuple[Cloud, Cloud]:
    one, other = (each if isinstance(each, Cloud) else Cloud(each) for each in (first, second))
    _check(one.features, other.features, least=least)
    return one, other


# ---------------------------------------------------------------- Fréchet


class Gaussian(NamedTuple):
    mean: Tensor
    variance: Tensor  # of all directions together: the trace of the covariance
    root: Tensor  # of the covariance

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> "Gaussian":
        covariance = covariance.double()
        return cls(mean.double(), covariance.trace(), _root(covariance))


def frechet(first: Tensor | Cloud, second: Tensor | Cloud) -> float:
    """Between the Gaussians with the moments of two sets of features, [N, D] and [M, D]."""
    one, other = _clouds(first, second, least=2)
    return _apart(one.gaussian, other.gaussian)


def frechet_of_gaussians(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """|m - m'|^2 + tr(S) + tr(S') - 2 tr((S^1/2 S' S^1/2)^1/2).

    The last trace is the sum of the singular values of S^1/2 S'^1/2: nothing has to be divided or inverted, so that
    covariances of fewer samples than features will do.
    """
    return _apart(Gaussian.of(mean, covariance), Gaussian.of(other_mean, other_covariance))


def _apart(first: Gaussian, second: Gaussian) -> float:
    shared = torch.linalg.svdvals(first.root @ second.root).sum()
    apart = (first.mean - second.mean).square().sum() + first.variance + second.variance - 2 * shared
    return max(0.0, float(apart))


def _root(covariance: Tensor) -> Tensor:
    """The symmetric root of a covariance; directions without variance are 0 rather than what rounding left there."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    noise = values.max().clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    values = torch.where(values > noise, values, 0.0)
    return (vectors * values.sqrt()) @ vectors.T


# ---------------------------------------------------------------- KID


def kid(first: Tensor, second: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Estimate:
    """The squared MMD of all features, and its spread over random subsets of `size` (at most half) of each set."""
    _check(first, second, least=2)
    first, second = first.double(), second.double()
    value = squared_mmd(first, second)
    size = min(size, len(first) // 2, len(second) // 2)
    if size < 2:
        return Estimate(value, math.nan)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(subsets):
        rows = (torch.randperm(len(each), generator=generator)[:size].to(each.device) for each in (first, second))
        found.append(squared_mmd(*(each[chosen] for each, chosen in zip((first, second), rows, strict=True))))
    return Estimate(value, float(torch.tensor(found).std()))


def squared_mmd(first: Tensor | Cloud, second: Tensor | Cloud) -> float:
    """Unbiased: no item is compared with itself."""
    one, other = _clouds(first, second, least=2)
    pairs = len(one.features) * len(other.features)
    return one.alike + other.alike - 2 * _kernel_sum(one.features, other.features, same=False) / pairs


def _kernel_sum(first: Tensor, second: Tensor, *, same: bool) -> float:
    width, total = first.shape[1], 0.0
    for rows in first.split(ROWS):
        total += float((rows @ second.T / width + 1).pow(KERNEL_POWER).sum())
    if same:
        total -= float((first.square().sum(dim=1) / width + 1).pow(KERNEL_POWER).sum())
    return total


# ---------------------------------------------------------------- precision and recall


def precision_recall(samples: Tensor | Cloud, real: Tensor | Cloud, *, neighbours: int = 3) -> tuple[float, float]:
    """Share of the samples within reach of real data, and of real data within reach of the samples."""
    one, other = _clouds(samples, real, least=neighbours + 1)
    return (
        _covered(one.features, other.features, other.reach(neighbours)),
        _covered(other.features, one.features, one.reach(neighbours)),
    )


def _reach(features: Tensor, neighbours: int) -> Tensor:
    found = []
    for first, rows in zip(range(0, len(features), ROWS), features.split(ROWS), strict=True):
        table = _squared(rows, features)
        here = torch.arange(len(rows), device=table.device)
        table[here, first + here] = torch.inf  # itself
        found.append(table.kthvalue(neighbours, dim=1).values)
    return torch.cat(found)


def _covered(features: Tensor, centres: Tensor, reach: Tensor) -> float:
    inside = [(_squared(rows, centres) <= reach).any(dim=1) for rows in features.split(ROWS)]
    return float(torch.cat(inside).double().mean())


def _squared(rows: Tensor, others: Tensor) -> Tensor:
    squares = rows.square().sum(dim=1, keepdim=True) + others.square().sum(dim=1)
    return (squares - 2 * rows @ others.T).clamp(min=0)


# ---------------------------------------------------------------- sliced Wasserstein


def directions(voxels: int, number: int, *, seed: int) -> Tensor:
    """[voxels, number]: random directions of length 1, the same for the same seed everywhere."""
    drawn = torch.randn(number, voxels, generator=torch.Generator().manual_seed(seed))
    return (drawn / drawn.norm(dim=1, keepdim=True)).T.contiguous()


def sliced_wasserstein(first: Tensor, second: Tensor) -> float:
    """Of projections [N, P] and [M, P]: the root of the mean square over all P directions."""
    _check(first, second, least=1)
    n, m = len(first), len(second)
    first, second = (each.double().sort(dim=0).values for each in (first, second))
    # Quantile functions are steps; between two edges (in units of 1 / nm) both stay as they are.
    edges = torch.cat([torch.arange(n + 1) * m, torch.arange(m + 1) * n]).unique().to(first.device)
    start, length = edges[:-1], edges.diff().double()
    apart = (first[start // m] - second[start // n]).square()  # [edges, P]
    return float((length / (n * m)) @ apart.mean(dim=1)) ** 0.5


# ---------------------------------------------------------------- shares


def wilson(right: int, number: int, *, z: float = 1.96) -> Share:
    """A share and its interval, of 95 % unless z says otherwise."""
    if not 0 <= right <= number or number < 1:
        raise ValueError(f"{right} of {number} is no share; give a number of at least 1 and no more hits than that")
    share, rest = right / number, z**2 / number
    middle = (share + rest / 2) / (1 + rest)
    half = z / (1 + rest) * math.sqrt(share * (1 - share) / number + rest / (4 * number))
    return Share(share, max(0.0, middle - half), min(1.0, middle + half))


def _check(first: Tensor, second: Tensor, *, least: int) -> None:
    for features in (first, second):
        if features.ndim != 2 or features.shape[1] != first.shape[1]:
            raise ValueError(f"features {list(first.shape)} and {list(second.shape)} must be [N, D] with the same D")
        if len(features) < least:
            raise ValueError(f"{len(features)} samples are too few to compare; give at least {least} of each")
        if not features.isfinite().all():
            raise ValueError(
                "features hold values that are not finite, so no distance can be told; look at the samples"
            )
