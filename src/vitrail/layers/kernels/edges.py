"""Triton kernels of scores: what scores.py does in many small steps, here in a few launches.

- the torch code is the reference: every number is the same, bit for bit, and it works where these kernels do not (no
  Triton, another device, too many voxels)
- nothing waits for the device, nothing is looked at on the host
- hysteresis is a union-find: weak voxels hang themselves on neighbours of lower number by atomic minima, and number 0
  stands for all that is strong. Which link is made first is left to chance, what hangs together is not

Images are [planes, depth, height, width] to every kernel, with a depth of 1 in 2-D; tiles are rows by columns.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


def probe(device: torch.device) -> bool:
    """Build and run the smallest kernel: False where it gives the wrong answer; raises where it cannot be built."""
    state = torch.full((1, 1, 1), 2, dtype=torch.uint8, device=device)
    out = torch.zeros(1, device=device)
    with torch.cuda.device_of(state):
        _finish[(1,)](state, state, out, 1, False, BLOCK=16)
    return bool(out[0] == 1)


def canny(images: Tensor, smooth: int, low: float, high: float) -> Tensor:
    """Bytes [B, C, *S] in 2-D or 3-D -> 1 at edges, 0 elsewhere, fp32 [B, *S]: `canny_edges` of the `blur`."""
    batch, channels, *shape = images.shape
    ndim = len(shape)
    sizes = (1, *shape) if ndim == 2 else tuple(shape)
    images = images.contiguous()
    scale = 4 ** (ndim - 2)
    lowest, highest = scale * math.floor(low), scale * math.floor(high)
    out = torch.empty(batch, *shape, dtype=torch.float32, device=images.device)
    with torch.cuda.device_of(images):
        reach = smooth // 2
        grid, tile = tiles(batch * channels, sizes)
        halves = torch.empty(2, *images.shape, dtype=torch.int16, device=images.device)
        if reach:
            half, blurred = halves[0].view(torch.uint16), torch.empty_like(images)
            _blur[grid](images, half, batch * channels, *sizes, reach if ndim == 3 else 0, reach, 0, 0, **tile)
            _blur[grid](half, blurred, batch * channels, *sizes, 0, 0, reach, 2 * reach * ndim, **tile)
            images = blurred
        _across[grid](images, halves[0], halves[1], batch * channels, *sizes, **tile)
        grid, tile = tiles(batch, sizes)
        length = torch.empty(out.shape, dtype=torch.int16, device=images.device)
        direction = torch.empty(out.shape, dtype=torch.int8, device=images.device)
        _sobel[grid](halves[0], halves[1], length, direction, batch, channels, *sizes, ndim, **tile)
        state = torch.empty(out.shape, dtype=torch.uint8, device=images.device)
        _thin[grid](length, direction, state, batch, *sizes, lowest, highest, ndim, **tile)
        follow = lowest < highest
        parent = torch.empty(out.numel() + 1 if follow else 1, dtype=torch.int32, device=images.device)  # of the weak
        if follow:
            _hang[grid](state, parent, batch, *sizes, ndim, **tile)
            # One warp a program: none waits for the others' longer ways to a root.
            grid, tile = tiles(batch, sizes, 128)
            _join[grid](state, parent, batch, *sizes, ndim, **tile, num_warps=1)
        _finish[(triton.cdiv(out.numel(), _TILE),)](state, parent, out, out.numel(), follow, BLOCK=_TILE)
    return out


def gradient(images: Tensor) -> Tensor:
    """[B, C, *S] in 1-D to 3-D -> [B, *S] fp32: `GradientScore`."""
    batch, channels, *shape = images.shape
    sizes = (1,) * (3 - len(shape)) + tuple(shape)
    images = (images if images.dtype == torch.uint8 else images.float()).contiguous()
    out = torch.empty(batch, *shape, dtype=torch.float32, device=images.device)
    grid, tile = tiles(batch, sizes)
    with torch.cuda.device_of(images):
        _gradient[grid](images, out, batch, channels, *sizes, len(shape), **tile)
    return out


def tiles(planes: int, sizes: tuple[int, ...], most: int = _TILE) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of programs over all rows and columns, and the tile of each."""
    columns = min(128, most, triton.next_power_of_2(sizes[-1]))
    rows = most // columns
    grid = (triton.cdiv(planes * math.prod(sizes[:-1]), rows), triton.cdiv(sizes[-1], columns))
    return grid, {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def own_tile(planes, depth, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < planes * depth * height) & (x < width)
    return row // (depth * height), row // height % depth, row % height, x, inside


@triton.jit
def _mirror(place, size):
    """Mirrored about the first and the last voxel, for places at most two beyond."""
    place = tl.abs(size - 1 - tl.abs(size - 1 - tl.abs(place)))
    return tl.minimum(place, size - 1)


@triton.jit
def _clamp(place, size):
    return tl.minimum(tl.maximum(place, 0), size - 1)


@triton.jit
def _weight(step: tl.constexpr, REACH: tl.constexpr):
    """1; 1 2 1; 1 4 6 4 1."""
    return 1 if REACH == 0 else (2 - step * step if REACH == 1 else 6 - (9 - step * step) * step * step // 4)


@triton.jit
def _blur(
    source,
    target,
    planes,
    depth,
    height,
    width,
    Z: tl.constexpr,
    Y: tl.constexpr,
    X: tl.constexpr,
    SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Binomial weights over Z, Y, X voxels to both sides; rounded where SHIFT is not 0."""
    plane, z, y, x, inside = own_tile(planes, depth, height, width, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for dz in tl.static_range(-Z, Z + 1):
        for dy in tl.static_range(-Y, Y + 1):
            row = (plane * depth + _mirror(z + dz, depth)) * height + _mirror(y + dy, height)
            for dx in tl.static_range(-X, X + 1):
                column = x if X == 0 else _mirror(x + dx, width)  # as it is, so that loads stay wide
                value = tl.load(source + row * width + column, mask=inside, other=0)
                total += value.to(tl.int32) * _weight(dz, Z) * _weight(dy, Y) * _weight(dx, X)
    if SHIFT > 0:
        total = (total + (1 << (SHIFT - 1))) >> SHIFT
    row = (plane * depth + z) * height + y
    tl.store(target + row * width + x, total.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _across(source, smooth, steep, planes, depth, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """1 2 1 and -1 0 1 along the last axis, the border repeated."""
    plane, z, y, x, inside = own_tile(planes, depth, height, width, ROWS, COLUMNS)
    row = ((plane * depth + z) * height + y) * width
    before = tl.load(source + row + tl.maximum(x - 1, 0), mask=inside, other=0).to(tl.int16)
    here = tl.load(source + row + x, mask=inside, other=0).to(tl.int16)
    after = tl.load(source + row + tl.minimum(x + 1, width - 1), mask=inside, other=0).to(tl.int16)
    tl.store(smooth + row + x, before + here + here + after, mask=inside)
    tl.store(steep + row + x, after - before, mask=inside)


@triton.jit
def _sobel(
    smooth,
    steep,
    length,
    direction,
    batch,
    channels,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The length of the gradient and its nearest direction, of the channel where it is longest; see `_direction`.

    Only rows are shifted here (`_across` has seen to the columns), so loads are wide.
    """
    sample, z, y, x, inside = own_tile(batch, depth, height, width, ROWS, COLUMNS)
    steepest = tl.full([ROWS, COLUMNS], -1, tl.int32)
    best_z = tl.zeros([ROWS, COLUMNS], tl.int32)
    best_y = tl.zeros([ROWS, COLUMNS], tl.int32)
    best_x = tl.zeros([ROWS, COLUMNS], tl.int32)
    for channel in range(channels):
        gz = tl.zeros([ROWS, COLUMNS], tl.int32)
        gy = tl.zeros([ROWS, COLUMNS], tl.int32)
        gx = tl.zeros([ROWS, COLUMNS], tl.int32)
        for dz in tl.static_range(2 - NDIM, NDIM - 1):
            for dy in tl.static_range(-1, 2):
                plane = (sample * channels + channel) * depth + _clamp(z + dz, depth)
                row = (plane * height + _clamp(y + dy, height)) * width
                across = tl.load(steep + row + x, mask=inside, other=0).to(tl.int32)
                gx += across * ((2 - dz * dz if NDIM == 3 else 1) * (2 - dy * dy))
                if dz * dz + dy * dy > 0:
                    value = tl.load(smooth + row + x, mask=inside, other=0).to(tl.int32)
                    gz += value * (dz * (2 - dy * dy))
                    gy += value * ((2 - dz * dz if NDIM == 3 else 1) * dy)
        steepness = tl.abs(gz) + tl.abs(gy) + tl.abs(gx)
        better = steepness > steepest
        steepest = tl.where(better, steepness, steepest)
        best_z = tl.where(better, gz, best_z)
        best_y = tl.where(better, gy, best_y)
        best_x = tl.where(better, gx, best_x)
    part: tl.constexpr = 32768 if NDIM == 2 else 5
    whole: tl.constexpr = 13573 if NDIM == 2 else 2
    limit = tl.maximum(tl.maximum(tl.abs(best_z), tl.abs(best_y)), tl.abs(best_x)) * whole
    code = tl.abs(9 * _digit(best_z, part, limit) + 3 * _digit(best_y, part, limit) + _digit(best_x, part, limit))
    place = ((sample * depth + z) * height + y) * width + x
    tl.store(length + place, steepest.to(tl.int16), mask=inside)
    tl.store(direction + place, code.to(tl.int8), mask=inside)


@triton.jit
def _digit(gradient, part, limit):
    sign = (gradient > 0).to(tl.int32) - (gradient < 0).to(tl.int32)
    return tl.where(tl.abs(gradient) * part >= limit, sign, 0)


@triton.jit
def _thin(
    length,
    direction,
    state,
    batch,
    depth,
    height,
    width,
    low,
    high,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Voxels that are longest along their direction: 1 above low, 2 above high."""
    sample, z, y, x, inside = own_tile(batch, depth, height, width, ROWS, COLUMNS)
    place = ((sample * depth + z) * height + y) * width + x
    here = tl.load(length + place, mask=inside, other=0).to(tl.int32)
    longest = inside & (here > low)
    code = tl.load(direction + place, mask=longest, other=0).to(tl.int32)
    dx = (code + 1) % 3 - 1
    code = (code - dx) // 3
    dy = (code + 1) % 3 - 1
    dz = (code - dy) // 3
    step = (dz * height + dy) * width + dx
    ahead = longest & _within(z + dz, y + dy, x + dx, depth, height, width)
    behind = longest & _within(z - dz, y - dy, x - dx, depth, height, width)
    after = tl.load(length + place + step, mask=ahead, other=0).to(tl.int32)
    before = tl.load(length + place - step, mask=behind, other=0).to(tl.int32)
    if NDIM == 3:  # of two equal neighbours the first wins, but not on diagonals in 2-D
        after -= 1
    else:
        after -= ((dy == 0) | (dx == 0)).to(tl.int32)
    longest = longest & (here > tl.maximum(before, after))
    found = tl.where(longest, 1 + (here > high).to(tl.int32), 0)
    tl.store(state + place, found.to(tl.uint8), mask=inside)


@triton.jit
def _within(z, y, x, depth, height, width):
    return (z >= 0) & (z < depth) & (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit
def _hang(state, parent, batch, depth, height, width, NDIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The parent of a weak voxel is 0 if it touches a strong one, else the voxel itself."""
    sample, z, y, x, inside = own_tile(batch, depth, height, width, ROWS, COLUMNS)
    place = ((sample * depth + z) * height + y) * width + x
    weak = inside & (tl.load(state + place, mask=inside, other=0) == 1)
    if tl.max(weak.to(tl.int32)) > 0:
        touching = tl.zeros([ROWS, COLUMNS], tl.int32)
        for dz in tl.static_range(2 - NDIM, NDIM - 1):
            for dy in tl.static_range(-1, 2):
                for dx in tl.static_range(-1, 2):
                    if dz * dz + dy * dy + dx * dx > 0:
                        there = weak & _within(z + dz, y + dy, x + dx, depth, height, width)
                        step = (dz * height + dy) * width + dx
                        touching |= (tl.load(state + place + step, mask=there, other=0) == 2).to(tl.int32)
        tl.store(parent + place + 1, tl.where(touching > 0, 0, place + 1), mask=weak)


@triton.jit
def _join(state, parent, batch, depth, height, width, NDIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Unite every weak voxel with the weak ones before it."""
    sample, z, y, x, inside = own_tile(batch, depth, height, width, ROWS, COLUMNS)
    place = ((sample * depth + z) * height + y) * width + x
    weak = inside & (tl.load(state + place, mask=inside, other=0) == 1)
    if tl.max(weak.to(tl.int32)) > 0:
        own = tl.load(parent + place + 1, mask=weak, other=0)
        for n in range(9 if NDIM == 2 else 0, 13):  # of the 27 around it, the ones before
            dz = n // 9 - 1
            dy = n // 3 % 3 - 1
            dx = n % 3 - 1
            step = (dz * height + dy) * width + dx
            there = weak & _within(z + dz, y + dy, x + dx, depth, height, width)
            joined = there & (tl.load(state + place + step, mask=there, other=0) == 1)
            other = tl.load(parent + place + 1 + step, mask=joined, other=0)
            joined = joined & (own != other)  # most hang on what is strong by now
            if tl.max(joined.to(tl.int32)) > 0:
                _unite(parent, place + 1, place + 1 + step, joined)


@triton.jit
def _unite(parent, one, other, active):
    one = _find(parent, one, active)
    other = _find(parent, other, active)
    active = active & (one != other)
    while tl.max(active.to(tl.int32)) > 0:
        high = tl.maximum(one, other)
        low = tl.minimum(one, other)
        above = tl.atomic_min(parent + high, low, mask=active)
        # Where another link was there first, what it led to is joined in its turn.
        one = tl.where(above == high, low, above)
        other = low
        active = active & (one != other)


@triton.jit
def _find(parent, node, active):
    """The root of each node; the links on the way are shortened. Number 0 has no entry."""
    above = tl.load(parent + node, mask=active & (node > 0), other=0, cache_modifier=".cg")
    moving = active & (above != node)
    while tl.max(moving.to(tl.int32)) > 0:
        further = tl.load(parent + above, mask=moving & (above > 0), other=0, cache_modifier=".cg")
        tl.store(parent + node, further, mask=moving & (further != above))
        node = tl.where(moving, above, node)
        above = tl.where(moving, further, above)
        moving = moving & (above != node)
    return node


@triton.jit
def _finish(state, parent, out, count, FOLLOW: tl.constexpr, BLOCK: tl.constexpr):
    """1 where strong, or hanging on what is strong."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(state + place, mask=place < count, other=0)
    edge = here == 2
    if FOLLOW:
        root = _find(parent, place + 1, here == 1)
        edge = edge | ((here == 1) & (root == 0))
    tl.store(out + place, edge.to(tl.float32), mask=place < count)


@triton.jit
def _gradient(
    source, out, batch, channels, depth, height, width, NDIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    sample, z, y, x, inside = own_tile(batch, depth, height, width, ROWS, COLUMNS)
    longest = tl.zeros([ROWS, COLUMNS], tl.float32)
    for channel in range(channels):
        plane = sample * channels + channel
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for axis in tl.static_range(3 - NDIM, 3):
            after = _step(source, plane, z, y, x, depth, height, width, inside, axis, 1)
            before = _step(source, plane, z, y, x, depth, height, width, inside, axis, -1)
            total = tl.fma(after - before, after - before, total)
        longest = tl.maximum(longest, total)
    place = ((sample * depth + z) * height + y) * width + x
    tl.store(out + place, tl.sqrt_rn(longest) * 0.5, mask=inside)


@triton.jit
def _step(source, plane, z, y, x, depth, height, width, inside, AXIS: tl.constexpr, STEP: tl.constexpr):
    """What lies a step along an axis further, the last voxel repeated; 0 for what is not finite."""
    if AXIS == 0:
        z = _clamp(z + STEP, depth)
    elif AXIS == 1:
        y = _clamp(y + STEP, height)
    else:
        x = _clamp(x + STEP, width)
    place = ((plane * depth + z) * height + y) * width + x
    value = tl.load(source + place, mask=inside, other=0).to(tl.float32)
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)
