"""Maps whose channels are last in memory: 1-wide convolutions as products, instance norm, convolutions of few channels.

A map is [B, C, *S] to everyone, with the strides of [B, *S, C]. What is here is the way of `maps` and `conv`
(layers/fast.py); the usual ways are in layers/convolutions.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrail.layers.fast import is_fast
from vitrail.layers.kernels import load_kernels

FEW = (16, 32, 64)  # channels that the kernels of small convolutions are made for
ALIGNED = 8  # libraries want rows of products to be a multiple of 16 bytes
_CONVOLUTIONS: dict[int, Any] = {2: F.conv2d, 3: F.conv3d}


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1-wide convolution by a weight [C out, C in]."""
    outputs, inputs = weight.shape
    if inputs == 1:  # no product, but a multiplication that is done with what comes next
        y = x * weight.view(1, -1, *[1] * (x.ndim - 2))
        return y if bias is None else y + bias.view(-1, *[1] * (x.ndim - 2))
    more = -outputs % ALIGNED
    weight = F.pad(weight, (0, 0, 0, more))
    bias = None if bias is None else F.pad(bias, (0, more))
    return F.linear(x.movedim(1, -1), weight, bias)[..., :outputs].movedim(-1, 1)


# ---------------------------------------------------------------- instance norm


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dim=_spatial(x), correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, mean, scale, weight)
        y = (wide - mean) * scale
        if weight is not None and bias is not None:
            y = y * _along(weight, x) + _along(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, mean, scale, weight = ctx.saved_tensors
        g = gradient.to(mean.dtype)
        normed = (x.to(mean.dtype) - mean) * scale
        voxels = math.prod(x.shape[2:])
        level, along = g.sum(dim=_spatial(x), keepdim=True), (g * normed).sum(dim=_spatial(x), keepdim=True)
        of_weight = of_bias = None
        if weight is not None:
            of_weight, of_bias = (total.sum(dim=0).flatten().to(weight.dtype) for total in (along, level))
            factor = _along(weight, x).to(mean.dtype)
            g, level, along = g * factor, level * factor, along * factor
        return ((g - (level + normed * along) / voxels) * scale).to(x.dtype), of_weight, of_bias, None


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(-1, *[1] * (x.ndim - 2))


def instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Every channel of every sample to mean 0 and variance 1, whose layout stays as it is; computed in fp32."""
    return _Normed.apply(x, weight, bias, eps)


# ---------------------------------------------------------------- convolutions of few channels


def suits_small(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernels of small convolutions are on and made for this one."""
    outputs, inputs, *kernel = weight.shape
    return (
        is_fast("conv", x.device.type)
        and len(kernel) in _CONVOLUTIONS
        and set(kernel) == {3}
        and (inputs in FEW or inputs < FEW[0])
        and outputs in FEW
        and (x.device.type == "cpu" or x.dtype in (torch.bfloat16, torch.float16))
    )


def _kernels(x: Tensor) -> Any | None:
    few = x.numel() // x.shape[-1] < 2**31 - 2**16
    return load_kernels("vitrail.layers.kernels.maps", x.device, "convolution") if few else None


@torch.library.custom_op("vitrail::small_convolution", mutates_args=())
def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """[B, *S, C in] and [taps, C in, C out] -> [B, *S, C out]."""
    if (kernels := _kernels(x)) is not None:
        return kernels.convolve(x.contiguous(), weight)
    ndim = x.ndim - 2
    whole = weight.permute(2, 1, 0).unflatten(-1, (3,) * ndim)
    return _CONVOLUTIONS[ndim](x.movedim(-1, 1), whole, padding=1).movedim(1, -1).contiguous()


@_convolve.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-1]))


@torch.library.custom_op("vitrail::small_convolution_weight", mutates_args=())
def _weigh(x: Tensor, gradient: Tensor) -> Tensor:
    """Input [B, *S, C in] and gradient of the output -> that of the weight [taps, C in, C out], in fp32."""
    ndim = x.ndim - 2
    if (kernels := _kernels(x)) is not None:
        return kernels.weigh(x.contiguous(), gradient.contiguous(), 3**ndim)
    padded = F.pad(x.float(), (0, 0, *[1] * (2 * ndim)))
    g, found = gradient.float().flatten(0, -2), []
    for tap in range(3**ndim):
        begins = [tap // 3**place % 3 for place in reversed(range(ndim))]
        part = padded[:, *(slice(b, b + s) for b, s in zip(begins, x.shape[1:-1], strict=True))]
        found.append(part.flatten(0, -2).t() @ g)
    return torch.stack(found)


@_weigh.register_fake
def _(x: Tensor, gradient: Tensor) -> Tensor:
    return x.new_empty((3 ** (x.ndim - 2), x.shape[-1], gradient.shape[-1]), dtype=torch.float32)


class _Small(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x.movedim(1, -1).contiguous(), _taps(weight)).movedim(-1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        g = gradient.movedim(1, -1).contiguous()
        of_x = None
        if ctx.needs_input_grad[0]:
            back = weight.flip(_spatial(weight)).transpose(0, 1)
            of_x = _convolve(g, _taps(back)).movedim(-1, 1)
        of_weight = _weigh(x.movedim(1, -1).contiguous(), g).permute(2, 1, 0).reshape(weight.shape)
        return of_x, of_weight.to(weight.dtype)


def _taps(weight: Tensor) -> Tensor:
    """[C out, C in, 3, ...] -> [taps, C in, C out]."""
    return weight.flatten(2).permute(2, 1, 0).contiguous()


def convolve_small(x: Tensor, weight: Tensor) -> Tensor:
    """A 3-wide convolution without bias; the result has its channels last in memory."""
    if more := max(0, FEW[0] - x.shape[1]):
        space = [0, 0] * (x.ndim - 2)
        x = F.pad(x.movedim(1, -1), (0, more)).movedim(-1, 1)
        weight = F.pad(weight, (*space, 0, more))
    return _Small.apply(x, weight)
