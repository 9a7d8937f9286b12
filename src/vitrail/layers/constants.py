"""Numbers that a model knows, on the device that it computes on: copied there once, and kept.

A copy from the host makes it wait for the device, and cannot be recorded (parallel/replay.py).
"""

from functools import lru_cache

import torch
from torch import Tensor


def constants(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Numbers in fp32."""
    return _kept(tuple(map(float, values)), torch.float32, like.device)


def indices(places: tuple[int, ...], like: Tensor) -> Tensor:
    return _kept(places, torch.int64, like.device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)
