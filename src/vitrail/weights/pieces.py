"""How a parameter is made from tensors of a file: pure functions of tensors, which also run on the meta device.

So a load is planned, and refused, from shapes alone before any number is copied.
Shapes: D width, C channels, H heads, K head width, N tokens; kernels are [D, C, *patch] as convolutions store them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.layers.patches import grid_coordinates
from vitrail.layers.positions import sincos
from vitrail.weights.report import Action


@dataclass(frozen=True)
class Made:
    """A parameter's value and how it came about."""

    value: Tensor
    action: Action = "copied"
    note: str = ""


@dataclass(frozen=True)
class Piece:
    """`make` takes the tensors of `sources`, in order."""

    sources: tuple[str, ...]
    make: Callable[..., Made] = Made


# ---------------------------------------------------------------- attention


def head_major(q: Tensor, k: Tensor, v: Tensor, *, head_width: int, halves: bool = False) -> Made:
    """Rows of q, k and v, each (head; head width), to (head; q, k, v; head width).

    `halves`: rotations that pair channel i with i + K/2 become rotations of neighbours, (2i, 2i + 1), as here.
    """
    if q.shape[0] % head_width or q.shape != k.shape:
        raise ValueError(
            f"queries have {q.shape[0]} rows and keys {k.shape[0]}, the model's heads are {head_width} wide"
        )
    if halves:
        order = torch.arange(head_width, device=q.device).view(2, -1).T.flatten()
        q, k = (t.unflatten(0, (-1, head_width))[:, order].flatten(0, 1) for t in (q, k))
    rows = [t.unflatten(0, (-1, head_width)) for t in (q, k, v)]
    return Made(torch.stack(rows, dim=1).flatten(0, 2), "permuted", "rows to (head; q, k, v)")


def fused_head_major(qkv: Tensor, *, head_width: int, halves: bool = False, masked_keys: bool = False) -> Made:
    """The same from one tensor of rows (q, k, v; head; head width)."""
    if qkv.shape[0] % 3:
        raise ValueError(f"fused queries, keys and values have {qkv.shape[0]} rows, not a multiple of 3")
    q, k, v = qkv.chunk(3)
    return head_major(q, torch.zeros_like(k) if masked_keys else k, v, head_width=head_width, halves=halves)


# ---------------------------------------------------------------- patches


def patch_kernel(kernel: Tensor, *, patch: tuple[int, ...], channels: int) -> Made:
    """A convolution's kernel [D, C, *patch] as the linear layer [D, P*C]; fewer axes and other channels are inflated.

    New leading axes repeat the kernel and divide by their size; other channels share the sum over the old ones
    evenly. So an input that is constant along the new axis, or the same in all channels, gives the same tokens.
    """
    old, notes = tuple(kernel.shape[2:]), []
    new_axes = len(patch) - len(old)
    if new_axes < 0 or old != patch[new_axes:]:
        raise ValueError(f"patches of the file are {_times(old)} voxels, the model's {_times(patch)}")
    if new_axes:
        depth = patch[:new_axes]
        kernel = kernel.reshape(*kernel.shape[:2], *(1,) * new_axes, *old).expand(-1, -1, *patch) / math.prod(depth)
        notes.append(f"kernel {_times(old)} repeated over depth {_times(depth)}")
    if kernel.shape[1] != channels:
        notes.append(f"{kernel.shape[1]} channels shared by {channels}")
        kernel = kernel.sum(dim=1, keepdim=True).expand(-1, channels, *patch) / channels
    value = kernel.movedim(1, -1).flatten(1)
    return Made(value, "inflated" if notes else "copied", ", ".join(notes))


def variable_kernel(kernel: Tensor, *, patch: tuple[int, ...], variables: int) -> Made:
    """A kernel for each variable [V, P, D]: each is treated as a grey image."""
    one = patch_kernel(kernel, patch=patch, channels=1)
    value = one.value.T.expand(variables, -1, -1)
    return Made(value, "inflated", f"{one.note + ', ' if one.note else ''}the same for {variables} variables")


def as_kernel(weight: Tensor, *, patch: tuple[int, ...]) -> Tensor:
    """The linear layer [D, P*C] as a convolution's kernel [D, C, *patch]."""
    return weight.unflatten(1, (*patch, -1)).movedim(-1, 1)


def voxel_rows(rows: Tensor, *, old: tuple[int, ...], new: tuple[int, ...]) -> Made:
    """Rows (voxels of a patch; channels) of an output layer; new leading axes repeat them."""
    if old == new:
        return Made(rows)
    new_axes = len(new) - len(old)
    if new_axes < 0 or new[new_axes:] != old or rows.shape[0] % math.prod(old):
        raise ValueError(f"patches of the file are {_times(old)} voxels, the model's {_times(new)}")
    depth = math.prod(new[:new_axes])
    return Made(rows.repeat(depth, *(1,) * (rows.ndim - 1)), "inflated", f"rows repeated over depth {depth}")


# ---------------------------------------------------------------- positions


def square_grid(tokens: int, ndim: int, known: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
    """The grid that a table of so many rows is of: equal sides, or else the known one where it fits."""
    side = round(tokens ** (1 / ndim))
    if side**ndim == tokens:
        return (side,) * ndim
    return known if known is not None and math.prod(known) == tokens else None


def position_table(table: Tensor, *, old: tuple[int, ...], new: tuple[int, ...], skip: int = 0) -> Made:
    """Rows of a table [(1,) skip + N, D] over the old grid, interpolated to the new one and repeated over new axes."""
    rows = table.reshape(-1, table.shape[-1])[skip:]
    new_axes = len(new) - len(old)
    if new_axes < 0:
        raise ValueError(f"positions over {len(old)} axes cannot serve a model of {len(new)}")
    notes = []
    if old != new[new_axes:]:
        rows = resize(rows.float(), old, new[new_axes:])
        notes.append(f"grid {_times(old)} to {_times(new[new_axes:])}")
    if new_axes:
        depth = math.prod(new[:new_axes])
        rows = rows.repeat(depth, 1)
        notes.append(f"repeated over depth {depth}")
    action: Action = "inflated" if new_axes else "resized" if notes else "copied"
    return Made(rows, action, ", ".join(notes))


def resize(rows: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    """[N, D] over one grid to another: cubic in two dimensions, linear otherwise; smoothed where it shrinks."""
    if len(old) > 3:
        raise ValueError(f"positions over {len(old)} axes cannot be resized; keep the grid {_times(old)}")
    image = rows.T.reshape(1, -1, *old)
    if len(old) == 2:
        image = F.interpolate(image, new, mode="bicubic", antialias=True, align_corners=False)
    else:
        image = F.interpolate(image, new, mode="linear" if len(old) == 1 else "trilinear", align_corners=False)
    return image.flatten(2)[0].T


def sincos_rows(grid: tuple[int, ...], width: int) -> Tensor:
    return sincos(grid_coordinates(grid, (1,) * len(grid)) - 0.5, width)


def first_rows(*tensors: Tensor, counts: tuple[int, ...], added: int = 0) -> Made:
    """Tokens that stand before the patches, one under another; the last tensor is a table whose first rows are added.

    A class token whose file adds a position to it starts as their sum.
    """
    tokens = [t.reshape(-1, t.shape[-1])[:n] for t, n in zip(tensors, counts, strict=False)]
    value = torch.cat(tokens)
    if not added:
        return Made(value)
    table = tensors[len(counts)]
    rows = table.reshape(-1, table.shape[-1])[:added]
    return Made(value + F.pad(rows, (0, 0, 0, len(value) - added)), note="with its row of the position table")


def class_row(table: Tensor, *, there: bool) -> Made:
    """The class token's own position: the first row of a table that has one, or nothing."""
    row = table.reshape(-1, table.shape[-1])[:1]
    return Made(row) if there else Made(torch.zeros_like(row), note="0: the file's class token has no position")


def part(tensor: Tensor, *, index: int, of: int) -> Made:
    """One of several layers that a file keeps in one tensor."""
    return Made(tensor.chunk(of)[index], note=f"part {index + 1} of {of}")


def zeros(*shape: int) -> Callable[..., Made]:
    """A bias that the file's layer does not have."""

    def make(weight: Tensor) -> Made:
        return Made(torch.zeros(shape, device=weight.device), note="0: the file's layer has no bias")

    return make


def _times(sizes: tuple[Any, ...]) -> str:
    return " x ".join(map(str, sizes))
