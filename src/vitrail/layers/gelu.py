"""GELU with one exponential for value and slope.

The exact one, x times the normal distribution up to x, needs an error function, which takes a GPU longer than reading
and writing the numbers; its slope needs an exponential beside it. Here both come from exp(-x^2/2): the distribution's
tail is that times a polynomial (Abramowitz and Stegun, 7.1.26), to 1e-7. The approximation by tanh is a sigmoid.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of z = |x| / sqrt(2), and halved: 1 - erf(z) is twice the tail beyond |x|.
STEEPNESS = 0.3275911 / 2**0.5
TAIL = tuple(number / 2 for number in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
BELL = 0.3989422804014327  # 1 / sqrt(2 pi)
TWICE = 1.5957691216057308  # 2 sqrt(2 / pi)
CUBE = 0.044715


def distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normal distribution up to x, and exp(-x^2/2)."""
    bell = torch.exp(-0.5 * x * x)
    t = 1 / (1 + STEEPNESS * x.abs())
    tail = TAIL[0] * t + TAIL[1]
    for number in TAIL[2:]:
        tail = tail * t + number
    tail = tail * t * bell
    return torch.where(x >= 0, 1 - tail, tail), bell


def value(x: Tensor, tanh: bool) -> Tensor:
    """GELU of fp32 numbers."""
    return x * (torch.sigmoid(TWICE * x * (1 + CUBE * x * x)) if tanh else distribution(x)[0])


def slope(x: Tensor, tanh: bool) -> Tensor:
    """The slope of GELU at fp32 numbers."""
    if tanh:
        share = torch.sigmoid(TWICE * x * (1 + CUBE * x * x))
        return share + x * share * (1 - share) * (TWICE + 3 * TWICE * CUBE * x * x)
    below, bell = distribution(x)
    return below + x * bell * BELL


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return value(x.float(), tanh).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (gradient.float() * slope(x.float(), ctx.tanh)).to(x.dtype), None


def gelu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """GELU, computed in fp32; what is wider is left to PyTorch."""
    if x.dtype == torch.float64:
        return F.gelu(x, approximate="tanh" if tanh else "none")
    return _Gelu.apply(x, tanh)
