"""The sampling of affine.py as one CUDA kernel: reads the data's own type, computes positions on the fly, writes once.

Each program computes a small box of one channel of one sample, so that neighbouring voxels, however the crop is
turned, come from the same lines of the cache. Images are volumes of one plane.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.data.augment.geometry import Move

BOX = {2: (1, 32, 32), 3: (4, 8, 32)}  # voxels of a program: whole lines of 128 bytes are written


def fits(values: Tensor, crop: tuple[int, ...]) -> bool:
    """Whether places in one channel fit in 32 bits."""
    return max(math.prod(values.shape[2:]), math.prod(crop)) < 2**31


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
    table = torch.from_numpy(np.stack([_row(move) for move in moves])).to(device, non_blocking=True)
    pad = [1] * (3 - ndim)
    whole = torch.tensor([[*pad, *size, move.taps] for size, move in zip(sizes, moves, strict=True)], dtype=torch.int32)
    nodes = _nodes(moves, ndim).to(device, non_blocking=True)
    box = BOX[ndim]
    deep, high, wide = (*pad, *crop)
    boxes = [triton.cdiv(size, edge) for size, edge in zip((deep, high, wide), box, strict=True)]
    with torch.cuda.device_of(values):
        _resample[(boxes[0] * boxes[1] * boxes[2], channels, samples)](
            values, out, table, whole.to(device, non_blocking=True), nodes,
            channels, *pad, *room, deep, high, wide, *nodes.shape[2:], 1.0 / step,
            NDIM=ndim, CORNERS=2**ndim, BEND=len(nodes) > 0, NEAREST=nearest, DEEP=box[0], HIGH=box[1], WIDE=box[2],
        )  # fmt: skip
    return out


def _row(move: Move) -> np.ndarray:
    """Matrix and origin of a move as 12 numbers; of an image the first axis stays where it is."""
    row = np.zeros((3, 4), np.float32)
    n = len(move.origin)
    row[3 - n :, 3 - n : 3] = move.matrix
    row[3 - n :, 3] = move.origin
    return row.ravel()


def _nodes(moves: Sequence[Move], ndim: int) -> Tensor:
    """Bends [B, 3, *nodes], 0 where there is none; empty where no sample has one."""
    shape = next((move.nodes.shape for move in moves if move.nodes is not None), None)
    if shape is None:
        return torch.zeros(0, 3, 1, 1, 1)
    nodes = np.zeros((len(moves), 3, *[1] * (3 - ndim), *shape[1:]), np.float32)
    for row, move in zip(nodes, moves, strict=True):
        if move.nodes is not None:
            row[3 - ndim :] = move.nodes.reshape(ndim, *row.shape[1:])
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
def _resample(
    values, out, table, sizes, nodes,
    channels, rz, ry, rx, cz, cy, cx, mz, my, mx, inverse,
    NDIM: tl.constexpr, CORNERS: tl.constexpr, BEND: tl.constexpr, NEAREST: tl.constexpr,
    DEEP: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    box = tl.program_id(0)
    channel = tl.program_id(1)
    sample = tl.program_id(2)
    across = (cx + WIDE - 1) // WIDE
    down = (cy + HIGH - 1) // HIGH
    voxel = tl.arange(0, DEEP * HIGH * WIDE)
    x = box % across * WIDE + voxel % WIDE
    y = box // across % down * HIGH + voxel // WIDE % HIGH
    z = box // (across * down) * DEEP + voxel // (WIDE * HIGH)
    valid = (x < cx) & (y < cy) & (z < cz)

    row = table + sample * 12
    size = sizes + sample * 4
    sz = tl.load(size)
    sy = tl.load(size + 1)
    sx = tl.load(size + 2)
    taps = tl.load(size + 3)
    m00, m01, m02, first_z = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    m10, m11, m12, first_y = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    m20, m21, m22, first_x = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)
    plane = (sample * channels + channel).to(tl.int64)
    source = values + plane * rz * ry * rx
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
        pz = first_z + m00 * oz + m01 * oy + m02 * ox
        py = first_y + m10 * oz + m11 * oy + m12 * ox
        px = first_x + m20 * oz + m21 * oy + m22 * ox
        if NEAREST:
            iz = _mirror(tl.floor(pz + 0.5).to(tl.int32), sz)
            iy = _mirror(tl.floor(py + 0.5).to(tl.int32), sy)
            ix = _mirror(tl.floor(px + 0.5).to(tl.int32), sx)
            found = tl.load(source + (iz * ry + iy) * rx + ix, mask=valid, other=0)
            place = plane * cz * cy * cx + (z * cy + y) * cx + x
            tl.store(out + place, found, mask=valid)
        else:
            fz = tl.floor(pz)
            fy = tl.floor(py)
            fx = tl.floor(px)
            wz = pz - fz
            wy = py - fy
            wx = px - fx
            for corner in tl.static_range(CORNERS):
                dz = corner // 4
                dy = corner // 2 % 2
                dx = corner % 2
                iz = _mirror(fz.to(tl.int32) + dz, sz)
                iy = _mirror(fy.to(tl.int32) + dy, sy)
                ix = _mirror(fx.to(tl.int32) + dx, sx)
                found = tl.load(source + (iz * ry + iy) * rx + ix, mask=valid, other=0).to(tl.float32)
                weight = (wz * dz + (1 - wz) * (1 - dz)) * (wy * dy + (1 - wy) * (1 - dy))
                total += weight * (wx * dx + (1 - wx) * (1 - dx)) * found
    if not NEAREST:
        place = plane * cz * cy * cx + (z * cy + y) * cx + x
        tl.store(out + place, total / count, mask=valid)
