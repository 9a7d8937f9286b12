"""Collectives that gradients pass through. What each computes is a function of all ranks' inputs, and its backward is
the adjoint with respect to the SUM of the losses of all ranks; so a gradient never needs a factor.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

# Their names since PyTorch 2.13, and before.
_all_gather, _reduce_scatter, _all_gather_autograd, _reduce_scatter_autograd = (
    getattr(functional, f"{name}_single{kind}", None) or getattr(functional, f"{name}_tensor{kind}")
    for kind in ("", "_autograd")
    for name in ("all_gather", "reduce_scatter")
)


def gather(x: Tensor, dim: int, group: Any) -> Tensor:
    """Every rank's x, one after another along dim, on every rank; backward: sums, scattered."""
    if dist.get_world_size(group) == 1:
        return x
    dim %= x.ndim
    return _wait((_all_gather_autograd if x.requires_grad else _all_gather)(x.contiguous(), dim, group))


def scatter_sum(x: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's part along dim of the sum over ranks; backward: gathered."""
    if dist.get_world_size(group) == 1:
        return x
    dim %= x.ndim
    return _wait((_reduce_scatter_autograd if x.requires_grad else _reduce_scatter)(x.contiguous(), "sum", dim, group))


def total(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, on every rank; backward: the same."""
    return x if dist.get_world_size(group) == 1 else _Total.apply(x, group)


def _wait(x: Tensor) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _wait(functional.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _wait(functional.all_reduce(gradients[0].contiguous(), "sum", ctx.group)), None
