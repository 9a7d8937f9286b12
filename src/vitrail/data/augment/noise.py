"""Gaussian noise of any size that is a pure function of its key: each voxel hashes its own place.

A volume has too many voxels to draw their noise on the host, and a device's own generator gives other numbers than the
next device's. So the 32 bits of a hash of (key, place) become one normal number, by Box and Muller's way.
"""

import math

import torch
from torch import Tensor

from vitrail.draws import hash32, sent

_PIECE = 2**22  # voxels at a time: what lies between stays small


def add_noise(values: Tensor, secrets: list[int], std: Tensor) -> None:
    """Add noise to samples [B, C, *S] float32, in place; of a secret a sample and a standard deviation [B, C]."""
    rows = values.view(values.shape[0] * values.shape[1], -1)
    # Each channel has a secret of its own; Python's numbers do not overflow.
    keys = [(secret + 0x632BE5AB * channel) % 2**63 for secret in secrets for channel in range(values.shape[1])]
    secret, spread = sent(keys, values.device)[:, None], sent(std.reshape(-1, 1), values.device)
    across = min(rows.shape[1], _PIECE)
    down = max(1, _PIECE // across)
    for first in range(0, rows.shape[1], across):
        place = torch.arange(first, min(first + across, rows.shape[1]), device=values.device)
        for row in range(0, len(rows), down):
            some = slice(row, row + down)
            rows[some, first : first + across] += spread[some] * normal(place, secret[some])


def normal(place: Tensor, secret: Tensor) -> Tensor:
    """One number of mean 0 and variance 1 for each place and secret."""
    bits = hash32(place, secret)
    radius = torch.sqrt(-2 * torch.log(((bits >> 16).float() + 0.5) / 65536))
    return radius * torch.cos(((bits & 0xFFFF).float() + 0.5) * (2 * math.pi / 65536))
