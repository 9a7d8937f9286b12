"""Bytes that a training step needs on one rank, by kind."""

from dataclasses import dataclass
from typing import Any

from vitrail.cost.trace import Work


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; each kind at the moment when the sum is largest."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0
    gathered: int = 0
    activations: int = 0
    temporary: int = 0
    communication: int = 0
    inputs: int = 0

    @property
    def peak(self) -> int:
        """Allocated at the worst moment."""
        kinds = (self.parameters, self.gradients, self.optimizer, self.average, self.gathered)
        return sum(kinds) + self.activations + self.temporary + self.communication + self.inputs

    def reserved(self, device: Any) -> float:
        """What the allocator holds, gaps included, and what libraries take beside it."""
        return self.peak * device.fragmentation + device.reserve_gib * 2**30


def memory_of(
    work: Work,
    *,
    replicate: int = 1,
    shard: int = 1,
    reshard: bool = True,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    prefetch: int = 1,
    wrap: Any = 1,
    compute: str = "bf16",
    reduce: str = "fp32",
    optimizer: str = "adamw",
    ema: bool = False,
    offload: Any = False,
    micro_batches: int = 1,
    schedule: str = "1f1b",
) -> Memory:
    raise NotImplementedError
