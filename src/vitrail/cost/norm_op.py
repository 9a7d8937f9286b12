"""RMSNorm as the one kernel that GPUs have for it: the meta device takes it apart, and the parts keep more."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("vitrail_cost::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for a kernel in a trace, and computes nothing")


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("vitrail_cost::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for a kernel in a trace, and computes nothing")


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm_backward(grad, *ctx.saved_tensors)


rms_norm.register_autograd(_backward, setup_context=_keep)


def as_kernels(model: nn.Module, *, spared: Sequence[nn.Module] = ()) -> None:
    """Make every RMSNorm of a model one operation, but for those of blocks that are compiled."""
    compiled = {module for block in spared for module in block.modules()}
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.weight is not None and module not in compiled:
            module.forward = lambda x, norm=module: rms_norm(x, norm.weight)[0]  # type: ignore[misc, method-assign]
