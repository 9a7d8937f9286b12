"""Collectives that gradients pass through. What each computes is a function of all ranks' inputs, and its backward is
the adjoint with respect to the SUM of the losses of all ranks; so a gradient never needs a factor.

The functions of PyTorch that these are made of can be traced by its compiler. Their own gradients are not relied on:
in 2.13 waiting for a gathered tensor whose first size is 1 loses them, silently.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# Their names since PyTorch 2.13, and before.
_all_gather, _reduce_scatter = (
    getattr(functional, f"{name}_single", None) or getattr(functional, f"{name}_tensor")
    for name in ("all_gather", "reduce_scatter")
)


def gather(x: Tensor, dim: int, group: Any) -> Tensor:
    """Every rank's x, one after another along dim, on every rank; backward: sums, scattered."""
    return x if dist.get_world_size(group) == 1 else _Gather.apply(x, dim % x.ndim, group)


def scatter_sum(x: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's part along dim of the sum over ranks; backward: gathered."""
    return x if dist.get_world_size(group) == 1 else _ScatterSum.apply(x, dim % x.ndim, group)


def total(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, on every rank; backward: the same."""
    return x if dist.get_world_size(group) == 1 else _Total.apply(x, group)


def _gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    return _arrived(_all_gather(x.contiguous(), dim, group))


def _scattered(x: Tensor, dim: int, group: Any) -> Tensor:
    return _arrived(_reduce_scatter(x.contiguous(), "sum", dim, group))


def _summed(x: Tensor, group: Any) -> Tensor:
    return _arrived(functional.all_reduce(x.contiguous(), "sum", group))


def _arrived(x: Tensor) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradients[0], ctx.dim, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.dim, ctx.group), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None
