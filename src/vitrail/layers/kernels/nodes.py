"""Triton kernels of trees: what trees.py does in many small steps, here in a few launches.

The torch code is the reference, as in edges.py. Trees are of cubes whose side is a power of two.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.layers.kernels.edges import own_tile, probe, tiles

__all__ = ["leaves", "node_keys", "probe", "tokens"]

_TAIL = 4096  # cells of a level from which one program makes all coarser ones


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
            grid, tile = tiles(planes, grid_sizes)
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
    plane, z, y, x, inside = own_tile(planes, depth, height, width, ROWS, COLUMNS)
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
