"""Images and volumes as tokens: uniform patches in any number of dimensions.

Shapes: B batch, C channels, S spatial sizes, N tokens, P voxels of a patch.
"""

import math

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
    """How many patches fit along each axis; every size must be a multiple of its patch."""
    if any(s % p or s < p for s, p in zip(size, patch, strict=True)):
        raise ValueError(f"size {list(size)} is not a multiple of patch {list(patch)} along every axis")
    return tuple(s // p for s, p in zip(size, patch, strict=True))


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """[B, C, *S] -> [B, N, P*C]: tokens row-major over the grid, voxels row-major in a token, channels last."""
    ndim = len(patch)
    grid_of(tuple(x.shape[2:]), patch)
    axes = " ".join(f"(g{i} p{i})" for i in range(ndim))
    grid, voxels = (" ".join(f"{letter}{i}" for i in range(ndim)) for letter in "gp")
    sizes = {f"p{i}": p for i, p in enumerate(patch)}
    return rearrange(x, f"b c {axes} -> b ({grid}) ({voxels} c)", **sizes)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """[B, N, P*C] -> [B, C, *S]: the inverse of patchify."""
    ndim = len(patch)
    axes = " ".join(f"(g{i} p{i})" for i in range(ndim))
    grid, voxels = (" ".join(f"{letter}{i}" for i in range(ndim)) for letter in "gp")
    sizes = {f"p{i}": p for i, p in enumerate(patch)}
    sizes |= {f"g{i}": g for i, g in enumerate(grid_of(size, patch))}
    return rearrange(tokens, f"b ({grid}) ({voxels} c) -> b c {axes}", **sizes)


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
