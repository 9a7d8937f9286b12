"""The sampling of affine.py as one CUDA kernel: reads the data's own type, computes positions on the fly, writes once.

Each program computes a small box of one channel of one sample, and the threads of a warp a smaller box in it, so that
neighbouring voxels, however the crop is turned, come from the same lines of the cache. A box that lies inside its
sample, which its corners tell, is read without mirroring. Images are volumes of one plane.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.augment.geometry import Move, Moves

BOX = {2: (1, 32, 32), 3: (8, 8, 8)}  # voxels of a program
WARP = {2: (1, 4, 8), 3: (2, 2, 8)}  # of the 32 threads that run together: whole sectors of 32 bytes are written
WARPS = 4


def fits(values: Tensor, crop: tuple[int, ...]) -> bool:
    """Tell whether places in one channel fit in 32 bits."""
    return max(math.prod(values.shape[2:]), math.prod(crop)) < 2**31


def probe(device: torch.device) -> bool:
    """Build and run the smallest kernel: raises where it cannot be built."""
    still = Move(np.eye(2), np.zeros(2))  # an image as it is
    launch(torch.zeros(1, 1, 2, 2, device=device), [still], [(2, 2)], (2, 2), step=1, nearest=False)
    return True


def launch(
    values: Tensor,
    moves: Sequence[Move],
    sizes: Sequence[Sequence[int]],
    crop: tuple[int, ...],
    *,
    step: int,
    nearest: bool,
) -> Tensor:
    """[B, C, *room] to [B, C, *crop], float32 or, with `nearest`, in the type of the values."""
    values = values.contiguous()
    samples, channels, *room = values.shape
    ndim = len(crop)
    device = values.device
    out = torch.empty(samples, channels, *crop, device=device, dtype=values.dtype if nearest else torch.float32)
    # One table, as every copy to the device costs as much as the kernel of a small crop.
    moves = Moves.of(moves)
    table = torch.from_numpy(_table(moves, sizes))
    nodes = _nodes(moves, ndim)
    bend = nodes is not None
    box, warp, pad = BOX[ndim], WARP[ndim], [1] * (3 - ndim)
    deep, high, wide = (*pad, *crop)
    boxes = [triton.cdiv(size, edge) for size, edge in zip((deep, high, wide), box, strict=True)]
    with torch.cuda.device_of(values):
        table = table.to(device, non_blocking=True)
        nodes = nodes.to(device, non_blocking=True) if nodes is not None else table
        _resample[(boxes[0] * boxes[1] * boxes[2], channels, samples)](
            values, out, table, nodes,
            channels, *pad, *room, deep, high, wide, *(nodes.shape[2:] if bend else (1, 1, 1)), 1.0 / step,
            NDIM=ndim, CORNERS=2**ndim, BEND=bend, NEAREST=nearest,
            DEEP=box[0], HIGH=box[1], WIDE=box[2], WARP_Z=warp[0], WARP_Y=warp[1], WARP_X=warp[2], num_warps=WARPS,
        )  # fmt: skip
    return out


def _table(moves: Moves, sizes: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, 16] matrix and origin of each move, the size of its sample and its taps; images have a first axis of one.

    Sizes and taps are whole numbers far below 2^24, which float32 holds.
    """
    n = moves.origin.shape[1]
    rows = np.zeros((len(moves), 4, 4), np.float32)
    rows[:, 3 - n : 3, 3 - n : 3], rows[:, 3 - n : 3, 3] = moves.matrix, moves.origin
    rows[:, 3, : 3 - n], rows[:, 3, 3 - n : 3], rows[:, 3, 3] = 1, sizes, moves.taps
    return rows.reshape(len(rows), 16)


def _nodes(moves: Moves, ndim: int) -> Tensor | None:
    """Bends [B, 3, *nodes], 0 where there is none; None where no sample has one."""
    if moves.nodes is None:
        return None
    shape = next(own.shape for own in moves.nodes if own is not None)
    nodes = np.zeros((len(moves), 3, *[1] * (3 - ndim), *shape[1:]), np.float32)
    for row, own in zip(nodes, moves.nodes, strict=True):
        if own is not None:
            row[3 - ndim :] = own.reshape(ndim, *row.shape[1:])
    return torch.from_numpy(nodes)


@triton.jit
def _mirror(index, size):
    period = tl.maximum(2 * (size - 1), 1)
    index = tl.where(index < 0, -index, index) % period
    return tl.minimum(tl.minimum(index, period - index), size - 1)


@triton.jit
def _bend(nodes, z, y, x, mz, my, mx, inverse, valid):
    """One component of a bend at a position of the crop: straight lines between its nodes."""
    pz = tl.minimum(tl.maximum(z * inverse, 0.0), mz - 1.0)
    py = tl.minimum(tl.maximum(y * inverse, 0.0), my - 1.0)
    px = tl.minimum(tl.maximum(x * inverse, 0.0), mx - 1.0)
    iz = tl.floor(pz).to(tl.int32)
    iy = tl.floor(py).to(tl.int32)
    ix = tl.floor(px).to(tl.int32)
    total = z * 0.0
    for corner in tl.static_range(8):
        dz = corner // 4
        dy = corner // 2 % 2
        dx = corner % 2
        weight = 1.0 - tl.abs(pz - (iz + dz))
        weight = weight * (1.0 - tl.abs(py - (iy + dy)))
        weight = weight * (1.0 - tl.abs(px - (ix + dx)))
        place = (tl.minimum(iz + dz, mz - 1) * my + tl.minimum(iy + dy, my - 1)) * mx + tl.minimum(ix + dx, mx - 1)
        total += weight * tl.load(nodes + place, mask=valid, other=0.0)
    return total


@triton.jit
def _mean_inside(source, iz, iy, ix, wz, wy, wx, ry, rx, valid, CORNERS: tl.constexpr):
    """Mean of the voxels around each position, where all of these exist."""
    nearest = source + (iz * ry + iy) * rx + ix
    total = wx * 0.0
    for corner in tl.static_range(CORNERS):
        found = tl.load(nearest + (corner // 4 * ry + corner // 2 % 2) * rx + corner % 2, mask=valid, other=0)
        total += _weight(wz, wy, wx, corner // 4, corner // 2 % 2, corner % 2) * found.to(tl.float32)
    return total


@triton.jit
def _mean_mirrored(source, iz, iy, ix, wz, wy, wx, ry, rx, sz, sy, sx, valid, CORNERS: tl.constexpr):
    """Mean of the voxels around each position; beyond the sample those count that lie as far inside it."""
    total = wx * 0.0
    for corner in tl.static_range(CORNERS):
        z = _mirror(iz + corner // 4, sz)
        y = _mirror(iy + corner // 2 % 2, sy)
        x = _mirror(ix + corner % 2, sx)
        found = tl.load(source + (z * ry + y) * rx + x, mask=valid, other=0)
        total += _weight(wz, wy, wx, corner // 4, corner // 2 % 2, corner % 2) * found.to(tl.float32)
    return total


@triton.jit
def _weight(wz, wy, wx, dz: tl.constexpr, dy: tl.constexpr, dx: tl.constexpr):
    """Weight of one of the voxels around a position, by how far that lies beyond the first of them."""
    return (wz * dz + (1 - wz) * (1 - dz)) * (wy * dy + (1 - wy) * (1 - dy)) * (wx * dx + (1 - wx) * (1 - dx))


@triton.jit
def _reach(first, by_z, by_y, by_x, z, y, x, DEEP: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Least and greatest position along an axis of a sample, over a box of the crop and the taps of its voxels."""
    least = first + by_z * (z - 0.5) + by_y * (y - 0.5) + by_x * (x - 0.5)
    greatest = least + tl.maximum(by_z * DEEP, 0.0) + tl.maximum(by_y * HIGH, 0.0) + tl.maximum(by_x * WIDE, 0.0)
    least += tl.minimum(by_z * DEEP, 0.0) + tl.minimum(by_y * HIGH, 0.0) + tl.minimum(by_x * WIDE, 0.0)
    return least, greatest


@triton.jit
def _resample(
    values, out, table, nodes,
    channels, rz, ry, rx, cz, cy, cx, mz, my, mx, inverse,
    NDIM: tl.constexpr, CORNERS: tl.constexpr, BEND: tl.constexpr, NEAREST: tl.constexpr,
    DEEP: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    WARP_Z: tl.constexpr, WARP_Y: tl.constexpr, WARP_X: tl.constexpr,
):  # fmt: skip
    box = tl.program_id(0)
    channel = tl.program_id(1)
    sample = tl.program_id(2)
    across = (cx + WIDE - 1) // WIDE
    down = (cy + HIGH - 1) // HIGH
    first_x = box % across * WIDE
    first_y = box // across % down * HIGH
    first_z = box // (across * down) * DEEP
    # Places in the box: warp by warp, and in a warp a small box of its own.
    lane = tl.arange(0, DEEP * HIGH * WIDE) % 32
    warp = tl.arange(0, DEEP * HIGH * WIDE) // 32
    x = first_x + warp % (WIDE // WARP_X) * WARP_X + lane % WARP_X
    y = first_y + warp // (WIDE // WARP_X) % (HIGH // WARP_Y) * WARP_Y + lane // WARP_X % WARP_Y
    z = first_z + warp // (WIDE // WARP_X * (HIGH // WARP_Y)) * WARP_Z + lane // (WARP_X * WARP_Y)
    valid = (x < cx) & (y < cy) & (z < cz)

    row = table + sample * 16
    m00, m01, m02, begin_z = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    m10, m11, m12, begin_y = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    m20, m21, m22, begin_x = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)
    sz = tl.load(row + 12).to(tl.int32)
    sy = tl.load(row + 13).to(tl.int32)
    sx = tl.load(row + 14).to(tl.int32)
    taps = tl.load(row + 15).to(tl.int32)
    plane = (sample * channels + channel).to(tl.int64)
    source = values + plane * rz * ry * rx

    least_z, greatest_z = _reach(begin_z, m00, m01, m02, first_z, first_y, first_x, DEEP, HIGH, WIDE)
    least_y, greatest_y = _reach(begin_y, m10, m11, m12, first_z, first_y, first_x, DEEP, HIGH, WIDE)
    least_x, greatest_x = _reach(begin_x, m20, m21, m22, first_z, first_y, first_x, DEEP, HIGH, WIDE)
    # A voxel more on either side, for rounding and for the neighbours that a mean is taken with.
    inside = (least_y >= 1) & (least_x >= 1) & (greatest_y < sy - 2) & (greatest_x < sx - 2)
    if NDIM == 3:
        inside = inside & (least_z >= 1) & (greatest_z < sz - 2)
    if BEND:
        inside = inside & (box < 0)  # how far a bend reaches is not known here

    count = taps * taps
    if NDIM == 3:
        count = count * taps
    total = tl.zeros([DEEP * HIGH * WIDE], tl.float32)
    for tap in range(0, count):
        # Taps are spread evenly over the voxel; a single one lies in its middle.
        ox = x + ((tap % taps + 0.5) / taps - 0.5)
        oy = y + ((tap // taps % taps + 0.5) / taps - 0.5)
        oz = z + 0.0
        if NDIM == 3:
            oz = z + ((tap // (taps * taps) + 0.5) / taps - 0.5)
        if BEND:
            own = nodes + sample * 3 * mz * my * mx
            bz = _bend(own, oz, oy, ox, mz, my, mx, inverse, valid)
            by = _bend(own + mz * my * mx, oz, oy, ox, mz, my, mx, inverse, valid)
            bx = _bend(own + 2 * mz * my * mx, oz, oy, ox, mz, my, mx, inverse, valid)
            oz += bz
            oy += by
            ox += bx
        pz = begin_z + m00 * oz + m01 * oy + m02 * ox
        py = begin_y + m10 * oz + m11 * oy + m12 * ox
        px = begin_x + m20 * oz + m21 * oy + m22 * ox
        if NEAREST:
            iz = _mirror(tl.floor(pz + 0.5).to(tl.int32), sz)
            iy = _mirror(tl.floor(py + 0.5).to(tl.int32), sy)
            ix = _mirror(tl.floor(px + 0.5).to(tl.int32), sx)
            found = tl.load(source + (iz * ry + iy) * rx + ix, mask=valid, other=0)
            place = plane * cz * cy * cx + (z * cy + y) * cx + x
            tl.store(out + place, found, mask=valid)
        else:
            iz = tl.floor(pz).to(tl.int32)
            iy = tl.floor(py).to(tl.int32)
            ix = tl.floor(px).to(tl.int32)
            wz = pz - iz
            wy = py - iy
            wx = px - ix
            if inside:
                total += _mean_inside(source, iz, iy, ix, wz, wy, wx, ry, rx, valid, CORNERS)
            else:
                total += _mean_mirrored(source, iz, iy, ix, wz, wy, wx, ry, rx, sz, sy, sx, valid, CORNERS)
    if not NEAREST:
        place = plane * cz * cy * cx + (z * cy + y) * cx + x
        tl.store(out + place, total / count, mask=valid)
