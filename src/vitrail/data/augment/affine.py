"""Cut crops out of windows along any matrix, in one pass: linear for intensities, nearest for labels.

- the voxel o of the crop lies at origin + matrix (o + bend(o)) of the window, in voxels; beyond the window the sample
  is mirrored about its outermost voxels
- a CUDA kernel reads the data's own type and computes positions on the fly (affine_kernels.py); everywhere else tiles
  of the crop are sampled one by one, so that memory stays bounded, with the same result
"""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.geometry import Move
from vitrail.layers.kernels import load_kernels

# Voxels of a tile: below 2^15, from where on PyTorch starts threads for every operation, which is slow where cores are
# shared. Tiles have threads of their own, and what is read for one stays in the cache.
TILE = {2: (128, 255), 3: (32, 32, 31)}


def resample(
    values: Tensor, moves: Sequence[Move], sizes: Sequence[Sequence[int]], crop: tuple[int, ...], *, step: int = 1
) -> Tensor:
    """[B, C, *room] to float32 [B, C, *crop]; of each sample the first `size` voxels of the room are read."""
    if (kernels := _kernels(values, crop)) is not None:
        return kernels.launch(values, moves, sizes, crop, step=step, nearest=False)
    out = torch.empty(*values.shape[:2], *crop, device=values.device)

    def fill(total: Tensor, sample: Tensor, move: Move, size: Sequence[int], tile: tuple[slice, ...]) -> None:
        total.zero_()
        for shift in _taps(move.taps, len(crop)):
            _linear(sample, _positions(move, tile, step, shift), size, total)
        total /= move.taps ** len(crop)

    _by_tiles(fill, values, out, moves, sizes, crop)
    return out


def resample_labels(
    labels: Tensor, moves: Sequence[Move], sizes: Sequence[Sequence[int]], crop: tuple[int, ...], *, step: int = 1
) -> Tensor:
    """[B, *room] to [B, *crop]: of each voxel the nearest label."""
    if (kernels := _kernels(labels[:, None], crop)) is not None:
        return kernels.launch(labels[:, None], moves, sizes, crop, step=step, nearest=True)[:, 0]
    out = labels.new_empty(len(labels), *crop)

    def fill(found: Tensor, sample: Tensor, move: Move, size: Sequence[int], tile: tuple[slice, ...]) -> None:
        places = _positions(move, tile, step, (0.0,) * len(crop))
        near = [torch.floor(place + 0.5).long() for place in places]
        near = [i if _is_inside(i, voxels) else mirror(i, voxels) for i, voxels in zip(near, size, strict=True)]
        found.copy_(sample[tuple(index.to(labels.device) for index in near)])

    _by_tiles(fill, labels, out, moves, sizes, crop)
    return out


def _by_tiles(
    fill: Callable[[Tensor, Tensor, Move, Sequence[int], tuple[slice, ...]], None],
    values: Tensor,
    out: Tensor,
    moves: Sequence[Move],
    sizes: Sequence[Sequence[int]],
    crop: tuple[int, ...],
) -> None:
    """Fill every tile of every crop; crops that only lie in other ways are copied."""
    jobs = []
    for sample, target, move, size in zip(values, out, moves, sizes, strict=True):
        if (whole := _cut(sample, move, size, crop)) is not None:
            target.copy_(whole)
        else:
            jobs += [(target[(..., *tile)], sample, move, size, tile) for tile in _tiles(crop)]
    if len(jobs) <= 1 or out.is_cuda:  # threads of a pool have a stream of their own, which waits for nobody
        for job in jobs:
            fill(*job)
    else:
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="vitrail-augment") as pool:
            list(pool.map(lambda job: fill(*job), jobs))


def mirror(index: Tensor, size: int) -> Tensor:
    """Whole positions brought back into 0..size-1 by mirroring about the outermost voxels, as often as needed."""
    period = max(1, 2 * (size - 1))
    index = index.abs() % period
    return torch.minimum(index, period - index).clamp(max=size - 1)


def _kernels(values: Tensor, crop: tuple[int, ...]) -> Any | None:
    """The module of the CUDA kernel, where it can be used."""
    kernels = load_kernels("vitrail.data.augment.affine_kernels", values.device, "augmentation")
    return kernels if kernels is not None and kernels.fits(values, crop) else None


def _tiles(crop: tuple[int, ...]) -> list[tuple[slice, ...]]:
    parts = [
        [slice(start, min(start + edge, size)) for start in range(0, size, edge)]
        for size, edge in zip(crop, TILE[len(crop)], strict=True)
    ]
    return list(itertools.product(*parts))


def _taps(number: int, ndim: int) -> list[tuple[float, ...]]:
    """Return the places of a voxel's taps, from its middle."""
    return list(itertools.product(*[[(tap + 0.5) / number - 0.5 for tap in range(number)]] * ndim))


def _positions(move: Move, tile: tuple[slice, ...], step: int, shift: tuple[float, ...]) -> list[Tensor]:
    """Positions in the window of the voxels of a tile, one tensor an axis of the window."""
    voxels = [torch.arange(s.start, s.stop, dtype=torch.float32) + d for s, d in zip(tile, shift, strict=True)]
    spread = [v.reshape([-1 if i == axis else 1 for i in range(len(tile))]) for axis, v in enumerate(voxels)]
    if move.nodes is not None:
        bends = torch.from_numpy(np.ascontiguousarray(move.nodes))
        for v in voxels:
            bends = torch.tensordot(bends, _lines(v, step, bends.shape[1]), dims=([1], [1]))
        spread = [v + bend for v, bend in zip(spread, bends, strict=True)]
    rows = move.matrix.astype(np.float32).tolist()
    shape = [s.stop - s.start for s in tile]
    places = []
    for row, first in zip(rows, move.origin.astype(np.float32).tolist(), strict=True):
        place = torch.full([1] * len(tile), first)
        for weight, v in zip(row, spread, strict=True):
            place = place + weight * v
        places.append(place.expand(shape))
    return places


def _lines(voxels: Tensor, step: int, nodes: int) -> Tensor:
    """Weights [voxels, nodes] of straight lines between nodes that lie every so many voxels."""
    distance = (voxels.clamp(0, step * (nodes - 1))[:, None] / step - torch.arange(nodes)).abs()
    return (1 - distance).clamp(min=0)


def _linear(sample: Tensor, places: list[Tensor], size: Sequence[int], out: Tensor) -> None:
    """Add values of a sample [C, *room] at positions to out [C, *tile]: means of the 4 or 8 voxels around each."""
    strides = [math.prod(sample.shape[axis + 2 :]) for axis in range(len(places))]
    lows = [torch.floor(place) for place in places]
    weights = [(place - low).to(out.device) for place, low in zip(places, lows, strict=True)]
    corners = list(itertools.product((0, 1), repeat=len(places)))
    if all(_is_inside(low, voxels - 1) for low, voxels in zip(lows, size, strict=True)):
        # One index of the first voxel serves all corners: the others lie at fixed distances.
        first = sum(low.to(torch.int64) * stride for low, stride in zip(lows, strides, strict=True))
        assert isinstance(first, Tensor)
        first = first.to(out.device)
        ahead = [sum(c * stride for c, stride in zip(corner, strides, strict=True)) for corner in corners]
        index = [(first, distance) for distance in ahead]
    else:
        sides = [
            [(mirror(low.to(torch.int64) + side, voxels) * stride).to(out.device) for side in (0, 1)]
            for low, voxels, stride in zip(lows, size, strides, strict=True)
        ]
        index = [(sum(pair[c] for pair, c in zip(sides, corner, strict=True)), 0) for corner in corners]  # type: ignore[misc]
    for channel, target in zip(sample, out, strict=True):
        flat = channel.reshape(-1)
        found = [flat[distance:].take(where).float() for where, distance in index]
        for weight in reversed(weights):  # neighbours along the last axis come in pairs
            found = [a.lerp_(b, weight) for a, b in zip(found[::2], found[1::2], strict=True)]
        target += found[0]


def _is_inside(places: Tensor, size: int) -> bool:
    lowest, highest = torch.aminmax(places)
    return bool(lowest >= 0) and bool(highest < size)


def _cut(sample: Tensor, move: Move, size: Sequence[int], crop: tuple[int, ...]) -> Tensor | None:
    """The crop as a view of a sample [..., *room], where the move only turns and flips whole voxels; else None."""
    matrix, n = move.matrix, len(crop)
    last = move.origin + matrix @ (np.asarray(crop) - 1)
    low, high = np.minimum(move.origin, last), np.maximum(move.origin, last)
    plain = move.nodes is None and move.taps == 1 and (np.sort(np.abs(matrix)) == [0] * (n - 1) + [1]).all()
    if not plain or (move.origin % 1).any() or (low < 0).any() or (high >= size).any():
        return None
    lead = sample.ndim - n
    for axis in range(n):
        sample = sample.narrow(lead + axis, int(low[axis]), int(high[axis] - low[axis]) + 1)
    along = np.abs(matrix).argmax(0)  # the axis of the window that each axis of the crop runs along
    sample = sample.permute(*range(lead), *[lead + int(axis) for axis in along])
    return sample.flip([lead + axis for axis in range(n) if matrix[along[axis], axis] < 0])
