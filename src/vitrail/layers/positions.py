"""Positions from the tokens' own coordinates: sin-cos tables and axial rotations.

Both are functions without buffers: nothing to forget after meta-device initialisation, nothing for mixed precision
to round. Coordinates are in units of patches (the first patch at 0), fp32, [..., N, ndim].
"""

import torch
from torch import Tensor


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
