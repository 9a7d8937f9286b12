"""Triton kernels of adaptive patching: what scores.py and trees.py do in many small steps, here in a few launches.

- the torch code is the reference: every number is the same, bit for bit, and it works where these kernels do not (no
  Triton, another device, sizes that a function below says it does not take)
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

_MOST = 2**31 - 2**16  # places are counted in 32 bits
_TILE = 1024
_TAIL = 4096  # cells of a level from which one program makes all coarser ones


def fits(*tensors: Tensor) -> bool:
    """Whether places in all of them fit in 32 bits."""
    return all(tensor.numel() < _MOST for tensor in tensors)


def probe(device: torch.device) -> bool:
    """Build and run the smallest kernel: False where it gives the wrong answer; raises where it cannot be built."""
    state = torch.full((1, 1, 1), 2, dtype=torch.uint8, device=device)
    out = torch.zeros(1, device=device)
    with torch.cuda.device_of(state):
        _finish[(1,)](state, state, out, 1, False, BLOCK=16)
    return bool(out[0] == 1)


# ---------------------------------------------------------------- scores


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
        grid, tile = _tiles(batch * channels, sizes)
        halves = torch.empty(2, *images.shape, dtype=torch.int16, device=images.device)
        if reach:
            half, blurred = halves[0].view(torch.uint16), torch.empty_like(images)
            _blur[grid](images, half, batch * channels, *sizes, reach if ndim == 3 else 0, reach, 0, 0, **tile)
            _blur[grid](half, blurred, batch * channels, *sizes, 0, 0, reach, 2 * reach * ndim, **tile)
            images = blurred
        _across[grid](images, halves[0], halves[1], batch * channels, *sizes, **tile)
        grid, tile = _tiles(batch, sizes)
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
            grid, tile = _tiles(batch, sizes, 128)
            _join[grid](state, parent, batch, *sizes, ndim, **tile, num_warps=1)
        _finish[(triton.cdiv(out.numel(), _TILE),)](state, parent, out, out.numel(), follow, BLOCK=_TILE)
    return out


def gradient(images: Tensor) -> Tensor:
    """[B, C, *S] in 1-D to 3-D -> [B, *S] fp32: `GradientScore`."""
    batch, channels, *shape = images.shape
    sizes = (1,) * (3 - len(shape)) + tuple(shape)
    images = (images if images.dtype == torch.uint8 else images.float()).contiguous()
    out = torch.empty(batch, *shape, dtype=torch.float32, device=images.device)
    grid, tile = _tiles(batch, sizes)
    with torch.cuda.device_of(images):
        _gradient[grid](images, out, batch, channels, *sizes, len(shape), **tile)
    return out


def _tiles(planes: int, sizes: tuple[int, ...], most: int = _TILE) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of programs over all rows and columns, and the tile of each."""
    columns = min(128, most, triton.next_power_of_2(sizes[-1]))
    rows = most // columns
    grid = (triton.cdiv(planes * math.prod(sizes[:-1]), rows), triton.cdiv(sizes[-1], columns))
    return grid, {"ROWS": rows, "COLUMNS": columns}


@triton.jit
def _tile(planes, depth, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
    plane, z, y, x, inside = _tile(planes, depth, height, width, ROWS, COLUMNS)
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
    plane, z, y, x, inside = _tile(planes, depth, height, width, ROWS, COLUMNS)
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
    sample, z, y, x, inside = _tile(batch, depth, height, width, ROWS, COLUMNS)
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
    sample, z, y, x, inside = _tile(batch, depth, height, width, ROWS, COLUMNS)
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
def _hang(
    state,
    parent,
    batch,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The parent of a weak voxel is 0 if it touches a strong one, else the voxel itself."""
    sample, z, y, x, inside = _tile(batch, depth, height, width, ROWS, COLUMNS)
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
def _join(
    state,
    parent,
    batch,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Unite every weak voxel with the weak ones before it."""
    sample, z, y, x, inside = _tile(batch, depth, height, width, ROWS, COLUMNS)
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
    source,
    out,
    batch,
    channels,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sample, z, y, x, inside = _tile(batch, depth, height, width, ROWS, COLUMNS)
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


# ---------------------------------------------------------------- trees of cubes whose side is a power of two


def node_keys(score: Tensor, finest: int, top: int) -> Tensor:
    """Scores [B, *S] -> the keys of all nodes of 2^finest ... 2^top voxels a side, coarse to fine, [B, M] int64.

    Sums as `_sum_pyramid`'s, for cells of 2 or 4 voxels a side; what is not finite or negative counts as 0.
    """
    batch, ndim = score.shape[0], score.ndim - 1
    depth = top - finest  # level k has (2^k)^ndim nodes
    size = _before(depth + 1, ndim)
    sums = torch.empty(batch, size, dtype=torch.float32, device=score.device)
    keys = torch.empty(batch, size, dtype=torch.int64, device=score.device)
    score = score.contiguous()
    with torch.cuda.device_of(score):
        grid = (triton.cdiv(1 << depth * ndim, 256), batch)
        _cells[grid](score, sums, keys, score[0].numel(), size, _before(depth, ndim), depth, ndim, 2**finest, BLOCK=256)
        while depth and 1 << (depth - 1) * ndim > _TAIL:
            depth -= 1
            grid = (triton.cdiv(1 << depth * ndim, 256), batch)
            _coarser[grid](sums, keys, size, depth, 1, ndim, BLOCK=256)
        if depth:
            _coarser[(1, batch)](sums, keys, size, depth - 1, depth, ndim, BLOCK=1024, num_warps=8)
    return keys


def leaves(
    keys: Tensor, index: Tensor, least: Tensor, finest: int, top: int, ndim: int, length: int, fill: bool
) -> tuple[Tensor, Tensor]:
    """The chosen nodes [B, K] and the least key among them [B] -> corners [B, L, ndim] and sides [B, L], depth-first.

    A leaf is one number, its corner's bits interleaved and its level behind them: one sort, nothing to carry along.
    """
    batch, count = index.shape
    slots = (count << ndim) + 1  # the last is for a root that is not split
    codes = torch.empty(batch, slots, dtype=torch.int64, device=keys.device)
    corner = torch.empty(batch, length, ndim, dtype=torch.int64, device=keys.device)
    side = torch.empty(batch, length, dtype=torch.int64, device=keys.device)
    with torch.cuda.device_of(keys):
        grid = (triton.cdiv(slots, 256), batch)
        sizes = keys.shape[1], count, slots, finest, top
        _children[grid](keys, index, least.contiguous(), codes, *sizes, fill, ndim, top - finest, BLOCK=256)
        codes = codes.sort(dim=1).values
        grid = (triton.cdiv(length, 256), batch)
        _decode[grid](codes, corner, side, slots, length, finest, ndim, top - finest + 1, BLOCK=256)
    return corner, side


def _before(level: int, ndim: int) -> int:
    """Nodes of all coarser levels."""
    return ((1 << level * ndim) - 1) // ((1 << ndim) - 1)


@triton.jit
def _key(total, place):
    """Floats that are not negative sort as their bits do; of equals the lower place has the higher key."""
    return (total.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - place).to(tl.int64)


@triton.jit(do_not_specialize=["offset", "log"])
def _cells(score, sums, keys, volume, size, offset, log, NDIM: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over SIDE voxels along each axis, in the order in which torch.sum adds them."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    inside = cell < (1 << (log * NDIM))
    width = SIDE << log
    place = (cell & ((1 << log) - 1)) * SIDE
    if NDIM > 1:
        place += (cell >> log & ((1 << log) - 1)) * SIDE * width
    if NDIM > 2:
        place += (cell >> 2 * log) * SIDE * width * width
    image = score + sample * volume
    even = tl.zeros([BLOCK], tl.float32)
    odd = tl.zeros([BLOCK], tl.float32)
    for dx in tl.static_range(SIDE):
        column = tl.zeros([BLOCK], tl.float32)
        for dy in tl.static_range(SIDE if NDIM > 1 else 1):
            pole = tl.zeros([BLOCK], tl.float32)
            for dz in tl.static_range(SIDE if NDIM > 2 else 1):
                value = tl.load(image + place + dz * width * width + dy * width + dx, mask=inside, other=0)
                pole += tl.where((value > 0) & (value < float("inf")), value, 0.0)
            column += pole
        if dx % 2 == 0:
            even += column
        else:
            odd += column
    total = even + odd
    place = offset + cell
    tl.store(sums + sample * size + place, total, mask=inside)
    tl.store(keys + sample * size + place, _key(total, place), mask=inside)


@triton.jit(do_not_specialize=["log", "levels"])
def _coarser(sums, keys, size, log, levels, NDIM: tl.constexpr, BLOCK: tl.constexpr):
    """Level `log` from the next finer one, and so many levels in all: more than one by a single program."""
    sample = tl.program_id(1).to(tl.int64)
    sums += sample * size
    keys += sample * size
    for _ in range(levels):
        count = 1 << (log * NDIM)
        offset = (count - 1) // ((1 << NDIM) - 1)
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            cell = start + tl.arange(0, BLOCK)
            inside = cell < count
            x = 2 * (cell & ((1 << log) - 1))
            finer = log + 1
            place = x
            if NDIM > 1:
                place += 2 * (cell >> log & ((1 << log) - 1)) << finer
            if NDIM > 2:
                place += 2 * (cell >> 2 * log) << 2 * finer
            total = tl.zeros([BLOCK], tl.float32)
            for dx in tl.static_range(2):
                column = tl.zeros([BLOCK], tl.float32)
                for dy in tl.static_range(2 if NDIM > 1 else 1):
                    pole = tl.zeros([BLOCK], tl.float32)
                    for dz in tl.static_range(2 if NDIM > 2 else 1):
                        step = (dz << 2 * finer) + (dy << finer) + dx
                        pole += tl.load(sums + offset + count + place + step, mask=inside, other=0)
                    column += pole
                total += column
            tl.store(sums + offset + cell, total, mask=inside)
            tl.store(keys + offset + cell, _key(total, offset + cell), mask=inside)
        tl.debug_barrier()
        log -= 1


@triton.jit(do_not_specialize=["finest", "top"])
def _children(
    keys,
    index,
    least,
    codes,
    size,
    count,
    slots,
    finest,
    top,
    FILL: tl.constexpr,
    NDIM: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The code of each child of each chosen node that is a leaf, else one behind all leaves."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    keys += sample * size
    bound = tl.load(least + sample)
    inside = slot < slots - 1
    node = tl.load(index + sample * count + (slot >> NDIM), mask=inside, other=0).to(tl.int32)
    level = tl.zeros([BLOCK], tl.int32)
    for k in tl.static_range(1, DEPTH + 1):
        level += (node >= ((1 << (k * NDIM)) - 1) // ((1 << NDIM) - 1)).to(tl.int32)
    before = _nodes_before(level, NDIM)
    place = node - before
    chosen = inside
    if not FILL:
        chosen = chosen & ((tl.load(keys + node, mask=inside, other=0) >> 32) > 0)
    # Places of the child on its own grid, twice as fine; the first axis is the highest bit of the slot.
    child = level + 1
    finer = tl.zeros([BLOCK], tl.int32)
    code = tl.zeros([BLOCK], tl.int64)
    for back in tl.static_range(NDIM):  # axes from the last to the first
        along = 2 * (place >> back * level & ((1 << level) - 1)) + (slot >> back & 1)
        finer += along << back * child
        unit = along.to(tl.int64) << (top - child - finest + 1).to(tl.int64)
        for bit in tl.static_range(DEPTH + 1):
            code |= (unit >> bit & 1) << (bit * NDIM + back)
    deeper = chosen & (child <= DEPTH)
    own = tl.load(keys + before + (1 << level * NDIM) + finer, mask=deeper, other=0)
    split = deeper & (own >= bound)
    if not FILL:
        split = split & ((own >> 32) > 0)
    code = (code << 6) | (top - child).to(tl.int64)
    code = tl.where(chosen & (split == 0), code, 1 << 62)
    # The root has the highest key of all.
    root = tl.load(keys)
    if FILL:
        whole = tl.full([BLOCK], 1 << 62, tl.int64)
    else:
        whole = tl.where((root >> 32) > 0, 1 << 62, tl.zeros([BLOCK], tl.int64) + top)
    code = tl.where(inside, code, whole)
    tl.store(codes + sample * slots + slot, code, mask=slot < slots)


@triton.jit
def _nodes_before(level, NDIM: tl.constexpr):
    return ((1 << level * NDIM) - 1) // ((1 << NDIM) - 1)


@triton.jit(do_not_specialize=["finest"])
def _decode(codes, corner, side, slots, length, finest, NDIM: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Codes in order -> corners and sides, 0 behind the last leaf."""
    leaf = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(1).to(tl.int64)
    code = tl.load(codes + sample * slots + leaf, mask=(leaf < slots) & (leaf < length), other=1 << 62)
    valid = code < (1 << 62)
    one = tl.full([BLOCK], 1, tl.int64)
    tl.store(side + sample * length + leaf, tl.where(valid, one << (code & 63), 0), mask=leaf < length)
    code = code >> 6
    for axis in tl.static_range(NDIM):
        along = tl.zeros([BLOCK], tl.int64)
        for bit in tl.static_range(BITS):
            along |= (code >> (bit * NDIM + NDIM - 1 - axis) & 1) << bit
        along = tl.where(valid, along << (finest - 1), 0)
        tl.store(corner + (sample * length + leaf) * NDIM + axis, along, mask=leaf < length)


# ---------------------------------------------------------------- tokens


def tokens(images: Tensor, corner: Tensor, side: Tensor, patch: int, count: int) -> Tensor:
    """Images [B, C, *S] in 1-D to 3-D -> [B, L, P*C] fp32: the means of `Tree.serialise` from so many levels.

    Every size is a multiple of 2^(count - 1), so that all cells of the pyramid are whole.
    """
    batch, channels, *shape = images.shape
    ndim = len(shape)
    sizes = (1,) * (3 - ndim) + tuple(shape)
    images = (images.view(torch.uint8) if images.dtype == torch.bool else images).contiguous()
    planes, volume = batch * channels, math.prod(shape)
    ends = [sum(volume >> j * ndim for j in range(1, level + 1)) for level in range(count)]  # level 0 is the image
    means = torch.empty(planes, max(1, ends[-1]), dtype=torch.float32, device=images.device)
    out = torch.empty(batch, side.shape[1], patch**ndim * channels, dtype=torch.float32, device=images.device)
    with torch.cuda.device_of(images):
        for level in range(1, count):
            source, stride, start = (images, volume, 0) if level == 1 else (means, means.shape[1], ends[level - 2])
            grid_sizes = tuple(size >> level if axis >= 3 - ndim else 1 for axis, size in enumerate(sizes))
            grid, tile = _tiles(planes, grid_sizes)
            places = stride, means.shape[1], start, ends[level - 1]
            _halve[grid](source, means, *places, planes, *grid_sizes, ndim, **tile)
        block = min(1024, triton.next_power_of_2(out.shape[2]))
        grid = (batch * side.shape[1], triton.cdiv(out.shape[2], block))
        _gather[grid](
            images, means, corner.contiguous(), side.contiguous(), out, side.shape[1], channels, volume, means.shape[1],
            *sizes, ndim, patch.bit_length() - 1, count, BLOCK=block,
        )  # fmt: skip
    return out


@triton.jit
def _halve(
    source,
    means,
    source_stride,
    stride,
    source_start,
    start,
    planes,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Averages of pairs along the first axis, of those along the next, and so on."""
    plane, z, y, x, inside = _tile(planes, depth, height, width, ROWS, COLUMNS)
    source += source_start
    mean = tl.zeros([ROWS, COLUMNS], tl.float32)
    for dx in tl.static_range(2):
        column = tl.zeros([ROWS, COLUMNS], tl.float32)
        for dy in tl.static_range(2 if NDIM > 1 else 1):
            pole = tl.zeros([ROWS, COLUMNS], tl.float32)
            for dz in tl.static_range(2 if NDIM > 2 else 1):
                row = 2 * x + dx + plane * source_stride
                if NDIM > 1:
                    row += (2 * y + dy) * (2 * width)
                if NDIM > 2:
                    row += (2 * z + dz) * (2 * height * 2 * width)
                value = tl.load(source + row, mask=inside, other=0).to(tl.float32)
                pole = value if dz == 0 else value - (value - pole) * 0.5
            column = pole if dy == 0 else pole - (pole - column) * 0.5
        mean = column if dx == 0 else column - (column - mean) * 0.5
    place = plane * stride + start + (z * height + y) * width + x
    tl.store(means + place, mean, mask=inside)


@triton.jit
def _gather(
    images,
    means,
    corner,
    side,
    out,
    length,
    channels,
    volume,
    stride,
    depth,
    height,
    width,
    NDIM: tl.constexpr,
    LOG: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The voxels of one token from the level of its leaf; see `Tree._places`."""
    leaf = tl.program_id(0)
    sample = leaf // length
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = channels << (LOG * NDIM)
    inside = item < total
    voxel = item // channels
    plane = sample * channels + item % channels
    size = tl.load(side + leaf).to(tl.int32)
    level = size * 0
    start = size * 0
    for k in tl.static_range(1, COUNT):
        start += tl.where(level > 0, volume >> ((k - 1) * NDIM), 0) * (size >= (1 << (LOG + k))).to(tl.int32)
        level += (size >= (1 << (LOG + k))).to(tl.int32)
    span = size >> level
    place = item * 0
    for axis in tl.static_range(NDIM):
        extent = (width if axis == NDIM - 1 else (height if axis == NDIM - 2 else depth)) >> level
        first = tl.load(corner + leaf.to(tl.int64) * NDIM + axis).to(tl.int32) >> level
        step = (voxel >> (NDIM - 1 - axis) * LOG & ((1 << LOG) - 1)) * span >> LOG
        place = place * extent + tl.minimum(first + step, extent - 1)
    if level == 0:
        value = tl.load(images + plane * volume + place, mask=inside & (size > 0), other=0).to(tl.float32)
    else:
        value = tl.load(means + plane * stride + start + place, mask=inside, other=0)
    tl.store(out + leaf.to(tl.int64) * total + item, value, mask=inside)
