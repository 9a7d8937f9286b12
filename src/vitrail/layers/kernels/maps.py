"""Triton kernels of 3-wide convolutions of few channels, on maps whose channels are last in memory.

Libraries' kernels are made for many channels: with 16 or 32 most of their tiles are empty. Here a program makes some
voxels in a row with all their channels, a small product for each of the 9 or 27 neighbours. What it reads again and
again (each voxel is 27 times a neighbour) comes from the caches. The torch code in layers/maps.py is the reference.
Maps are [B, *S, C], contiguous, in two or three dimensions, of fewer than 2^31 voxels; weights [taps, C in, C out].
Sums are in fp32.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Tiles", "convolve", "probe", "weigh"]

_SHARES = 256  # of all voxels: each program sums the gradient of a weight over one


def probe(device: torch.device) -> bool:
    """Build and run the smallest kernel: False where it gives the wrong answer; raises where it cannot be built."""
    ones = torch.ones(1, 2, 2, 16, device=device, dtype=torch.bfloat16)
    found = convolve(ones, torch.ones(9, 16, 16, device=device, dtype=torch.bfloat16))
    return bool((found == 64).all())


class Tiles(NamedTuple):
    """How a kernel is cut: voxels of a program's step, its warps, and steps that are loaded ahead."""

    block: int
    warps: int = 4
    stages: int = 3


def tiles_for(inputs: int, outputs: int) -> Tiles:
    return Tiles(128 if max(inputs, outputs) <= 32 else 64)


def sizes_of(x: Tensor) -> tuple[int, int, int, int]:
    """Return voxels of all samples, and planes, rows and columns of one; an image has one plane."""
    shape = x.shape[1:-1]
    planes = shape[0] if len(shape) == 3 else 1
    return math.prod(x.shape[:-1]), planes, shape[-2], shape[-1]


def convolve(x: Tensor, weight: Tensor, cut: Tiles | None = None) -> Tensor:
    """The convolution [B, *S, C in] -> [B, *S, C out], with zeros around."""
    taps, inputs, outputs = weight.shape
    voxels, *_ = sizes = sizes_of(x)
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    block, warps, stages = cut or tiles_for(inputs, outputs)
    with torch.cuda.device_of(x):
        _convolve[(triton.cdiv(voxels, block),)](
            x, weight.contiguous(), out, *sizes, taps, inputs, outputs, BM=block, num_warps=warps, num_stages=stages
        )  # fmt: skip
    return out


def weigh(x: Tensor, grad: Tensor, taps: int, cut: Tiles | None = None) -> Tensor:
    """Gradient of the weight [taps, C in, C out], in fp32, from the input and the gradient of the output."""
    inputs, outputs = x.shape[-1], grad.shape[-1]
    voxels, *space = sizes_of(x)
    block, warps, stages = cut or tiles_for(inputs, outputs)
    each = triton.cdiv(triton.cdiv(voxels, _SHARES), block) * block
    number = triton.cdiv(voxels, each)
    sums = torch.empty(number, taps, inputs, outputs, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _weigh[(taps // 3, number)](
            x, grad, sums, voxels, each, *space, taps, inputs, outputs, BM=block, num_warps=warps, num_stages=stages
        )  # fmt: skip
    return sums.sum(dim=0)


@triton.jit
def _convolve(
    x, weight, out, voxels, PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    voxel = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = voxel < voxels
    column = voxel % COLUMNS
    row = voxel // COLUMNS % ROWS
    plane = voxel // (COLUMNS * ROWS) % PLANES
    channel = tl.arange(0, INPUTS)
    result = tl.arange(0, OUTPUTS)
    total = tl.zeros([BM, OUTPUTS], tl.float32)
    for tap in range(TAPS):
        dx = tap % 3 - 1
        dy = tap // 3 % 3 - 1
        dz = tap // 9 - (TAPS // 27)
        there = inside & (column + dx >= 0) & (column + dx < COLUMNS) & (row + dy >= 0) & (row + dy < ROWS)
        there = there & (plane + dz >= 0) & (plane + dz < PLANES)
        place = (voxel + ((dz * ROWS + dy) * COLUMNS + dx)).to(tl.int64)
        values = tl.load(x + place[:, None] * INPUTS + channel[None, :], mask=there[:, None], other=0)
        factors = tl.load(weight + tap * INPUTS * OUTPUTS + channel[:, None] * OUTPUTS + result[None, :])
        total = tl.dot(values, factors, total)
    place = voxel.to(tl.int64)[:, None] * OUTPUTS + result[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _weigh(
    x, grad, sums, voxels, each, PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)  # three taps in a row
    share = tl.program_id(1)
    dy = group % 3 - 1
    dz = group // 3 - (TAPS // 27)
    channel = tl.arange(0, INPUTS)
    result = tl.arange(0, OUTPUTS)
    before = tl.zeros([INPUTS, OUTPUTS], tl.float32)
    here = tl.zeros([INPUTS, OUTPUTS], tl.float32)
    after = tl.zeros([INPUTS, OUTPUTS], tl.float32)
    for start in range(0, each, BM):
        voxel = share * each + start + tl.arange(0, BM)
        inside = voxel < voxels
        column = voxel % COLUMNS
        row = voxel // COLUMNS % ROWS
        plane = voxel // (COLUMNS * ROWS) % PLANES
        there = inside & (row + dy >= 0) & (row + dy < ROWS) & (plane + dz >= 0) & (plane + dz < PLANES)
        place = voxel.to(tl.int64)
        change = tl.load(grad + place[:, None] * OUTPUTS + result[None, :], mask=inside[:, None], other=0)
        source = x + (place + (dz * ROWS + dy) * COLUMNS)[:, None] * INPUTS + channel[None, :]
        values = tl.load(source - INPUTS, mask=(there & (column > 0))[:, None], other=0)
        before = tl.dot(tl.trans(values), change, before)
        values = tl.load(source, mask=there[:, None], other=0)
        here = tl.dot(tl.trans(values), change, here)
        values = tl.load(source + INPUTS, mask=(there & (column + 1 < COLUMNS))[:, None], other=0)
        after = tl.dot(tl.trans(values), change, after)
    target = sums + ((share * TAPS + 3 * group) * INPUTS + channel[:, None]) * OUTPUTS + result[None, :]
    tl.store(target, before)
    tl.store(target + INPUTS * OUTPUTS, here)
    tl.store(target + 2 * INPUTS * OUTPUTS, after)
