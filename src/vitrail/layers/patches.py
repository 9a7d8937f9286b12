"""Images and volumes as tokens: uniform patches in any number of dimensions.

Shapes: B batch, C channels, S spatial sizes, N tokens, P voxels of a patch.

Equal parts of a list of tokens, for ranks that share the tokens of a sample.

- part r of n tokens is the rows r*s to (r+1)*s - 1, with s = n / parts rounded up; where n does not divide, the last
  ones are copies of the last token, and are marked as invalid
- a list of several variables, one after the other, is cut within each of them
- a slab is the same cut of the voxels themselves: an equal part of a crop along its first axis

Positions from the tokens' own coordinates: sin-cos tables and axial rotations.

Both are functions without buffers: nothing to forget after meta-device initialisation, nothing for mixed precision
to round. Coordinates are in units of patches (the first patch at 0), fp32, [..., N, ndim].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


def per_axis(value: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """One number for all axes, or one for each."""
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim:
        raise ValueError(f"{list(values)} has {len(values)} numbers, but there are {ndim} axes")
    return values


def grid_of(size: tuple[int, ...], patch: tuple[int, ...]) -> tuple[int, ...]:
    """Count the patches along each axis; every size must be a multiple of its patch."""
    if any(s % p or s < p for s, p in zip(size, patch, strict=True)):
        raise ValueError(f"size {list(size)} is not a multiple of patch {list(patch)} along every axis")
    return tuple(s // p for s, p in zip(size, patch, strict=True))


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """[B, C, *S] -> [B, N, P*C]: tokens row-major over the grid, voxels row-major in a token, channels last."""
    axes, grid, voxels, sizes = _axes_of(patch, tuple(x.shape[2:]))
    return rearrange(x, f"b c {axes} -> b ({grid}) ({voxels} c)", **sizes)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """[B, N, P*C] -> [B, C, *S]: the inverse of patchify."""
    axes, grid, voxels, sizes = _axes_of(patch, size)
    return rearrange(tokens, f"b ({grid}) ({voxels} c) -> b c {axes}", **sizes)


def _axes_of(patch: tuple[int, ...], size: tuple[int, ...]) -> tuple[str, str, str, dict[str, int]]:
    """Name the axes of images, the grid and a patch's voxels for rearrange(), and their sizes."""
    sizes = {f"g{i}": g for i, g in enumerate(grid_of(size, patch))} | {f"p{i}": p for i, p in enumerate(patch)}
    grid, voxels = ([f"{letter}{i}" for i in range(len(patch))] for letter in "gp")
    axes = " ".join(f"({g} {p})" for g, p in zip(grid, voxels, strict=True))
    return axes, " ".join(grid), " ".join(voxels), sizes


def grid_coordinates(size: tuple[int, ...], patch: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Centres of the uniform patches in voxels from the crop's origin, row-major [N, ndim], always fp32."""
    axes = [
        (torch.arange(g, dtype=torch.float32, device=device) + 0.5) * p
        for g, p in zip(grid_of(size, patch), patch, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(patch))


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, N, D] (or of [N, D], the same for all samples) picked by index [B, n]."""
    if tokens.ndim == 2:
        return tokens[index]
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def num_voxels(patch: tuple[int, ...]) -> int:
    return math.prod(patch)


@dataclass(frozen=True)
class Part:
    """One of several equal parts, by its place among them."""

    index: int
    count: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Slab:
    """A part of a crop along its first axis, as it lies after the crop was turned."""

    part: Part
    size: tuple[int, ...]  # of the whole crop, in voxels

    @property
    def rows(self) -> range:
        """Voxels along the first axis of the turned crop."""
        step = self.size[0] // self.part.count
        return range(self.part.index * step, (self.part.index + 1) * step)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.size[1:])


def part_size(number: int, count: int) -> int:
    """Rows of each part of so many."""
    return -(-number // count)


def cut(x: Tensor, part: Part, *, groups: int = 1) -> Tensor:
    """The part's rows of [B, groups*n, ...] within each group: [B, groups*s, ...], the last row repeated as needed."""
    number = x.shape[1] // groups
    size = part_size(number, part.count)
    if part.count == 1 or not number:
        return x
    start = part.index * size
    grouped = x.unflatten(1, (groups, number))
    if start + size <= number:
        return grouped[:, :, start : start + size].flatten(1, 2)
    rows = torch.arange(start, start + size, device=x.device).clamp(max=number - 1)
    return grouped.index_select(2, rows).flatten(1, 2)


def real_rows(number: int, part: Part, *, groups: int = 1, device: torch.device | None = None) -> Tensor | None:
    """Mark rows of cut() that are no copies [groups*s], for `number` rows of all groups; None where no part has any."""
    number //= groups
    if number % part.count == 0:
        return None
    size = part_size(number, part.count)
    return (part.index * size + torch.arange(size, device=device) < number).repeat(groups)


def mark_copies(valid: Tensor | None, real: Tensor | None, batch: int) -> Tensor | None:
    """Tell which rows of a part count [B, groups*s]: those that were valid and are no copies; None where all do."""
    if real is None:
        return valid
    return real.expand(batch, -1) if valid is None else valid & real


def join(parts: Sequence[Tensor], number: int, *, groups: int = 1) -> Tensor:
    """Return all `number` rows [B, groups*n, ...] of parts [B, groups*s, ...] in their order: the inverse of cut()."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.unflatten(1, (groups, part.shape[1] // groups)) for part in parts], dim=2)
    return whole[:, :, : number // groups].flatten(1, 2)


def pairs_per_axis(width: int, ndim: int) -> int:
    """Channel pairs that each axis gets; what is left over at the end stays untouched."""
    return width // (2 * ndim)


def sincos(coordinates: Tensor, width: int) -> Tensor:
    """The table of Vaswani et al., one slice of channels an axis, [..., N, width] in fp32; left-over channels are 0.

    In two dimensions the last axis (x) comes first, as in facebookresearch/mae, so that their weights fit; in three
    the order is that of the axes.
    """
    ndim = coordinates.shape[-1]
    pairs = pairs_per_axis(width, ndim)
    omega = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64, device=coordinates.device) / max(pairs, 1))
    if ndim == 2:
        coordinates = coordinates.flip(-1)
    angles = coordinates.double().unsqueeze(-1) * omega  # [..., N, ndim, pairs]
    table = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)
    return torch.nn.functional.pad(table, (0, width - table.shape[-1])).float()


def rope_table(coordinates: Tensor, head_width: int, theta: float) -> Tensor:
    """Cosines and sines of axial rotations [2, ..., N, 1, pairs] in fp32; axis i turns only the i-th slice of pairs."""
    pairs = pairs_per_axis(head_width, coordinates.shape[-1])
    frequencies = theta ** (-torch.arange(pairs, dtype=torch.float32, device=coordinates.device) / max(pairs, 1))
    angles = (coordinates.float().unsqueeze(-1) * frequencies).flatten(-2).unsqueeze(-2)
    return torch.stack([angles.cos(), angles.sin()])


def inflated_rope_table(coordinates: Tensor, head_width: int, theta: float, turns: Tensor) -> Tensor:
    """rope_table() of all axes but the first, and on top of it turns along the first, [2, ..., N, 1, pairs] in fp32.

    `turns` [pairs] are radians per patch, learned from 0 on: a model whose weights come from one axis fewer starts as
    exactly that model, since channels keep the axis that they had there.
    """
    cos, sin = rope_table(coordinates[..., 1:], head_width, theta)
    angles = (coordinates[..., :1].float() * turns.float()).unsqueeze(-2)
    return torch.stack([cos * angles.cos() - sin * angles.sin(), sin * angles.cos() + cos * angles.sin()])


def rotate(x: Tensor, table: Tensor | None) -> Tensor:
    """Turn adjacent channel pairs of x [B, N, H, K]; computed in fp32, returned in x's dtype."""
    if table is None:
        return x
    cos, sin = table.float().unbind(0)
    turned = 2 * cos.shape[-1]
    pairs = x[..., :turned].float().contiguous().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # one kernel, but not of complex numbers
        even, odd = pairs.unbind(-1)
        out = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:  # the same as a product of complex numbers, in far fewer kernels
        out = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    out = out.flatten(-2).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)
