"""Random numbers as data: each is a pure function of (seed, purpose, counter).

Nothing in vitrail draws from a global generator. A mask, a drop-path factor or an orientation is asked for by the
purpose it serves and the counter of the sample it belongs to, so that every rank, every restart, every recomputation
and every world size sees the same number.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


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
