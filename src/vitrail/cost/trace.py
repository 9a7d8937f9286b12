"""What one training step of a model computes and keeps on one rank."""

from dataclasses import dataclass
from typing import Any, Literal

from vitrail.cost.flops import Flops
from vitrail.recipe.sections import Chunk

Compute = Literal["bf16", "fp32", "float8"]


@dataclass(frozen=True)
class Op:
    """One operation, or a fused group of them."""

    kind: Literal["gemm", "attention", "convolution", "memory"]  # memory: bound by bandwidth
    flops: float
    bytes: float  # read and written
    shape: tuple[int, ...] = ()  # gemm (m, n, k); attention (batch, heads, queries, keys, head width)
    kernels: int = 1  # launches


@dataclass(frozen=True)
class Segment:
    """A repeated block, or what lies outside blocks."""

    name: str
    count: int  # equal ones in a row
    parameters: int  # of one, on this rank after tensor parallelism, before sharding
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    again: tuple[Op, ...]  # what recomputation repeats
    saved: int  # bytes that one keeps for its backward
    peak: int  # bytes that one needs for a moment besides
    gathered: bool = True  # its parameters are gathered as one group by FSDP


@dataclass(frozen=True)
class Work:
    """What one rank computes for one micro-batch."""

    segments: tuple[Segment, ...]
    inputs: int  # bytes of a micro-batch on the device
    loss: tuple[Op, ...]
    loss_peak: int
    samples: int  # of a micro-batch
    flops: Flops  # of one sample
    tokens: int  # all of a sample


def trace(
    model: Any,
    objective: Any,
    *,
    samples: int,
    compute: Compute,
    recompute: Any = "none",
    compiled: bool = False,
    chunk: Chunk = Chunk(),  # noqa: B008
    tensor: int = 1,
    context: int = 1,
    pipeline_rank: tuple[int, int] = (0, 1),
    average: bool = False,
) -> Work:
    raise NotImplementedError
