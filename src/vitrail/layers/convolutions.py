"""Convolutions of a decoder, in one, two or three dimensions: blocks, steps up, instance norm.

- a block is two 3-wide convolutions, each with instance norm and a leaky ReLU; a residual one adds its input before the
  last ReLU (through a 1-wide convolution where channels change)
- a step up is a transposed convolution whose kernel is its stride; a factor of 1 is a 1-wide convolution
- no bias but in the last layer: instance norm would take it away
- on a CPU everything is channels-last: the backward of a convolution with few channels is several times as fast
Shapes: B batch, C channels, S spatial sizes.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.layers.fast import is_fast
from vitrail.layers.init import Constant, mark
from vitrail.layers.maps import convolve_small, instance_norm, project, suits_small
from vitrail.layers.variables import Ids, pick

CONVOLUTIONS: dict[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_FUNCTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}

SLOPE = 0.01  # of the leaky ReLU below 0
EPS = 1e-5  # of instance norm


def convolution(ndim: int, inputs: int, outputs: int, *, width: int = 3, bias: bool = False) -> nn.Module:
    """Stride 1, an odd kernel, and the size kept by zeros around."""
    return CONVOLUTIONS[ndim](inputs, outputs, width, padding=width // 2, bias=bias)


def step_up(inputs: int, outputs: int, factor: tuple[int, ...]) -> nn.Module:
    """Every voxel becomes `factor` voxels along each axis."""
    return TRANSPOSED[len(factor)](inputs, outputs, factor, stride=factor, bias=False)


def convolve(layer: nn.Module, x: Tensor, ids: Ids | None = None) -> Tensor:
    """Apply a convolution; `ids` says which of its input channels x has (default: all)."""
    weight: Tensor = pick(layer.weight, ids, dim=1)  # type: ignore[arg-type]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    x = x.to(weight.dtype)
    if is_fast("maps", x.device.type):
        if weight[0, 0].numel() == 1:
            return project(channels_last(x), weight.flatten(1), bias)
        if bias is None and suits_small(x, weight):
            return convolve_small(channels_last(x), weight)
    if x.device.type == "cpu" and weight[0, 0].numel() == 1:  # several times as fast as PyTorch's for such kernels
        return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    return _FUNCTIONS[x.ndim - 2](channels_last(x), weight, bias, padding=layer.padding)


def rise(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a step up."""
    if not keeps_last(x):
        return layer(x)
    # Kernels that do not overlap are a linear layer, whose result is laid out channels-last.
    weight: Tensor = layer.weight.movedim(0, -1).movedim(0, -2)  # type: ignore[operator] # *factor, C out, C in
    ndim = x.ndim - 2
    y = F.linear(x.movedim(1, -1), weight.flatten(0, -2)).unflatten(-1, weight.shape[:-1])  # B *S *factor C
    axes = [axis for i in range(ndim) for axis in (1 + i, 1 + ndim + i)]
    size = scaled(tuple(x.shape[2:]), tuple(weight.shape[:ndim]))
    return y.permute(0, *axes, -1).reshape(x.shape[0], *size, -1).movedim(-1, 1)


def keeps_last(x: Tensor) -> bool:
    """Tell whether maps like this one have their channels last in memory."""
    return x.device.type == "cpu" or is_fast("maps", x.device.type)


def channels_last(x: Tensor) -> Tensor:
    """The layout of maps in memory where it pays; elsewhere they are left as they are."""
    if not keeps_last(x) or x.ndim - 2 not in _CHANNELS_LAST:
        return x
    return x.to(memory_format=_CHANNELS_LAST[x.ndim - 2])  # not contiguous(), which leaves one channel as it is


def upsampling(patch: tuple[int, ...], steps: int = 4) -> list[tuple[int, ...]]:
    """Factors of the steps from the grid of patches to voxels, powers of two whose product along an axis is its patch.

    A patch of 16 is 2, 2, 2, 2. Smaller patches have factors of 1 first (4 is 1, 1, 2, 2), so that the wide maps stay
    small; larger ones have the larger factors first (32 is 4, 2, 2, 2). Each axis has its own.
    """
    if any(p < 1 or p & (p - 1) for p in patch):
        raise ValueError(f"patch {list(patch)} must be a power of two along every axis")
    axes = []
    for p in patch:
        each, more = divmod(p.bit_length() - 1, steps)
        doublings = [each] * (steps - more)
        doublings = doublings + [1] * more if each == 0 else [each + 1] * more + doublings
        axes.append([2**d for d in doublings])
    return list(zip(*axes, strict=True))


class InstanceNorm(nn.Module):
    """Every channel of every sample to mean 0 and variance 1 over its voxels; `affine`: then scaled and shifted."""

    def __init__(self, channels: int, *, affine: bool):
        super().__init__()
        self.weight = mark(nn.Parameter(torch.empty(channels)), Constant(1.0)) if affine else None
        self.bias = nn.Parameter(torch.empty(channels)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        if is_fast("maps", x.device.type):
            return instance_norm(x, self.weight, self.bias, EPS)
        if x.device.type != "cpu" or x.is_contiguous() or torch.compiler.is_compiling():
            return F.instance_norm(x, weight=self.weight, bias=self.bias, eps=EPS)
        y = _Standardise.apply(x)
        if self.weight is None or self.bias is None:
            return y
        shape = (-1, *[1] * (x.ndim - 2))
        return torch.addcmul(self.bias.view(shape), y, self.weight.view(shape))


class _Standardise(torch.autograd.Function):
    """Instance norm of channels-last maps on a CPU.

    PyTorch's own gives up the layout, and broadcasting over rows of a few channels is slow. Here some voxels make one
    long row [B, R, K * C], over which the numbers of a channel are repeated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, repeat = _rows(x)
        y = rows - _repeated(_mean(rows, repeat), repeat)
        scale = (_mean(y * y, repeat) + EPS).rsqrt()
        y = y.mul_(_repeated(scale, repeat)).to(x.dtype)
        ctx.save_for_backward(y, scale)
        ctx.repeat = repeat
        return _unrows(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        repeat = ctx.repeat
        g, _ = _rows(gradient)
        along = _mean(g * y, repeat)  # the part of the gradient that would change the variance
        out = g - _repeated(_mean(g, repeat), repeat)
        out.addcmul_(y, _repeated(-along, repeat)).mul_(_repeated(scale, repeat))
        return _unrows(out.to(gradient.dtype), gradient)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """[B, C, *S] channels-last -> [B, R, K * C] in fp32 at least, and how many voxels K make a row."""
    voxels = math.prod(x.shape[2:])
    repeat = math.gcd(voxels, 64)
    rows = x.movedim(1, -1).reshape(x.shape[0], voxels // repeat, repeat * x.shape[1])
    return rows.to(torch.promote_types(x.dtype, torch.float32)), repeat


def _unrows(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)


def _mean(rows: Tensor, repeat: int) -> Tensor:
    return rows.mean(dim=1).unflatten(-1, (repeat, -1)).mean(dim=1)  # B C


def _repeated(numbers: Tensor, repeat: int) -> Tensor:
    return numbers.repeat(1, repeat).unsqueeze(1)  # B 1 K*C


class ConvBlock(nn.Module):
    """Two convolutions with norms; the maps keep their size."""

    def __init__(self, ndim: int, inputs: int, outputs: int, *, residual: bool, affine: bool, named: bool = False):
        """`named` inputs may come in part and in any order, so they are never added as they are."""
        super().__init__()
        self.conv1 = convolution(ndim, inputs, outputs)
        self.conv2 = convolution(ndim, outputs, outputs)
        self.norm1 = InstanceNorm(outputs, affine=affine)
        self.norm2 = InstanceNorm(outputs, affine=affine)
        self.residual = residual
        projected = residual and (named or inputs != outputs)
        self.conv3 = convolution(ndim, inputs, outputs, width=1) if projected else None
        self.norm3 = InstanceNorm(outputs, affine=affine) if projected else None

    def forward(self, x: Tensor, ids: Ids | None = None) -> Tensor:
        """[B, inputs, *S] -> [B, outputs, *S]; with ids, x has only these input channels."""
        y = F.leaky_relu(self.norm1(convolve(self.conv1, x, ids)), SLOPE)
        y = self.norm2(convolve(self.conv2, y))
        if self.residual:
            y = y + (x if self.conv3 is None or self.norm3 is None else self.norm3(convolve(self.conv3, x, ids)))
        return F.leaky_relu(y, SLOPE)


class Rise(nn.Module):
    """A map of tokens to a finer one: a step up that also narrows it, then steps up with a block each."""

    def __init__(self, inputs: int, outputs: int, factors: list[tuple[int, ...]], *, residual: bool, affine: bool):
        super().__init__()
        self.factors, ndim = factors, len(factors[0])
        self.ups = nn.ModuleList(step_up(outputs if i else inputs, outputs, f) for i, f in enumerate(factors))
        self.blocks = nn.ModuleList(
            ConvBlock(ndim, outputs, outputs, residual=residual, affine=affine) for _ in factors[1:]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = rise(self.ups[0], x)
        for up, block in zip(list(self.ups)[1:], self.blocks, strict=True):
            x = block(rise(up, x))
        return x

    def flops(self, size: tuple[int, ...]) -> float:
        """Forward from a map of this size."""
        total = 0.0
        for i, factor in enumerate(self.factors):
            total += conv_flops(self.ups[i], size)
            size = scaled(size, factor)
            total += conv_flops(self.blocks[i - 1], size) if i else 0.0
        return total


class Join(nn.Module):
    """A step up, joined with a map of that resolution from elsewhere."""

    def __init__(self, inputs: int, outputs: int, factor: tuple[int, ...], *, residual: bool, affine: bool):
        super().__init__()
        self.up = step_up(inputs, outputs, factor)
        self.block = ConvBlock(len(factor), 2 * outputs, outputs, residual=residual, affine=affine)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """The map that has risen may overhang the other at the far end; that is cut off."""
        x = cropped(rise(self.up, x), tuple(skip.shape[2:]))
        together = torch.cat([x, skip], dim=1) if torch.compiler.is_compiling() else _Concatenate.apply(x, skip)
        return self.block(together)

    def flops(self, size: tuple[int, ...], skip: tuple[int, ...]) -> float:
        """Forward from a map of this size, joined with one of the other."""
        return conv_flops(self.up, size) + conv_flops(self.block, skip)


class _Concatenate(torch.autograd.Function):
    """Two maps along the channels, with whole gradients: slices of one would slow down all that comes before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.split = x.shape[1]
        return torch.cat([x, y], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = gradient[:, : ctx.split], gradient[:, ctx.split :]
        if gradient.is_contiguous():
            return x.contiguous(), y.contiguous()
        return channels_last(x), channels_last(y)


def cropped(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """The first voxels of maps that cells on the border made larger than the image."""
    if tuple(x.shape[2:]) == size:
        return x
    return x[(slice(None), slice(None), *(slice(s) for s in size))]


def scaled(size: tuple[int, ...], factor: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(s * f for s, f in zip(size, factor, strict=True))


def conv_flops(module: nn.Module, size: tuple[int, ...]) -> float:
    """Forward of the convolutions in a module, whose input maps all have this size."""
    kinds = (*CONVOLUTIONS.values(), *TRANSPOSED.values())
    weights = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, kinds))
    return 2.0 * weights * math.prod(size)
