"""Numbers that a model knows, on the device that it computes on, without a copy from the host.

Such a copy makes the host wait for the device, and cannot be recorded (parallel/replay.py).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """A few numbers in fp32, made where they are needed."""
    return torch.stack([torch.full((), value, dtype=torch.float32, device=like.device) for value in values])


def indices(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """Many whole numbers: copied once, and kept."""
    if like.device.type == "meta":
        return torch.empty(len(numbers), dtype=torch.int64, device="meta")
    return _kept(numbers, like.device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)
