"""Random numbers as data: each is a pure function of (seed, purpose, counter).

Nothing in vitrail draws from a global generator. A mask, a drop-path factor or an orientation is asked for by the
purpose it serves and the counter of the sample it belongs to, so that every rank, every restart, every recomputation
and every world size sees the same number.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE = 2**20  # normal numbers made at a time: what lies between stays small
_MASK = 0xFFFFFFFF


def key(seed: int, purpose: str, *counters: int | str) -> int:
    """Hash to 63 bits: a seed for any generator."""
    text = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """An endless sequence of its own for each name: Philox takes the whole key, PyTorch's CPU generator 32 bits."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *counters)))


class Draws:
    """The random numbers of the samples with the given counters."""

    def __init__(self, seed: int, counters: Sequence[int]):
        self.seed = seed
        self.counters = list(counters)

    def uniform(self, purpose: str, *shape: int) -> "Tensor":
        """Numbers in [0, 1), one table a sample [B, *shape]: drawn on the CPU, so that every device gets the same."""
        import torch

        out = np.empty((len(self.counters), *shape), np.float32)
        for row, counter in zip(out, self.counters, strict=True):
            stream(self.seed, purpose, counter).random(out=row, dtype=np.float32)
        return torch.from_numpy(out)

    def normal(
        self, purpose: str, *shape: int, device: "torch.device | str | None" = None, rows: range | None = None
    ) -> "Tensor":
        """Numbers of mean 0 and variance 1 [B, *shape], float32; with `rows`, those of the second axis alone.

        An image has too many to draw them on the host, so each hashes its own place, on the device asked for: two
        hashes of 32 bits, by Box and Muller's way. In float64 until the end, so that rounding does not depend on how
        many are made at once.
        """
        import torch

        rows = range(shape[1]) if rows is None and len(shape) > 1 else rows
        row = math.prod(shape[2:])
        if rows is None:
            size, whole, places = shape, 0, torch.arange(math.prod(shape), device=device)
        else:
            size, whole = (shape[0], len(rows), *shape[2:]), math.prod(shape[1:])
            places = torch.arange(rows.start * row, rows.stop * row, device=device)
        starts = whole * torch.arange(size[0] if whole else 1, device=device)
        places = (starts[:, None] + places).flatten()  # in the whole, whatever part of it is made
        keys = [[key(self.seed, f"{purpose}/{name}", c) for c in self.counters] for name in ("radius", "angle")]
        secrets = [torch.tensor(each, dtype=torch.int64).to(device)[:, None] for each in keys]
        out = torch.empty(len(self.counters), len(places), device=device)
        across = max(1, min(len(places), _PIECE))
        down = max(1, _PIECE // across)
        for first in range(0, len(places), across):
            some = slice(first, first + across)
            for start in range(0, len(out), down):
                part = slice(start, start + down)
                bits, more = (hash32(places[some], secret[part]) for secret in secrets)
                radius = torch.sqrt(-2 * torch.log((bits.double() + 0.5) / 2**32))
                out[part, some] = (radius * torch.cos(more.double() * (2 * math.pi / 2**32))).float()
        return out.view(len(self.counters), *size)


def hash32(place: "Tensor", secret: "Tensor") -> "Tensor":
    """32 well-mixed bits of each place (int64) and secret; products wrap, and only their low bits count."""
    bits = (place + ((place >> 32) * 0x9E3779B1) + (secret & _MASK)) & _MASK
    high = (secret >> 31) & _MASK
    for _ in range(2):
        bits = (((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK) ^ high
        bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)
