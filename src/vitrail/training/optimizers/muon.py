"""Muon (Jordan et al. 2024): momentum made orthogonal for the weight matrices of blocks, AdamW for all others.

- embeddings, norms, biases, tables and heads are AdamW's; a fused projection of queries, keys and values is one matrix
- a direction depends on the whole matrix: shards of the momentum are gathered, and each rank keeps its part of the
  result. Momentum itself stays in shards
- an update is about as large as one of AdamW, so that rates and decay of AdamW fit (Liu et al. 2025)
"""

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitrail.layers.init import local_shard
from vitrail.parallel.mesh import spread_like
from vitrail.recipe import config, must
from vitrail.training.optimizers.adam import Adam
from vitrail.training.optimizers.optimizer import (
    OptimizerConfig,
    Role,
    Shards,
    Update,
    kept,
)
from vitrail.training.private import foreach_lerp, foreach_lerp_, foreach_mul_

ITERATIONS = 5
POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # of Newton and Schulz's iteration, steep at zero; ends between 0.7 and 1.2
SMALLEST = 1e-7  # norm of a matrix that is divided by it
AS_ADAMW = 0.2  # root mean square of an update of AdamW, in rates
MOST = 2**26  # numbers of the matrices that are gathered and made orthogonal at once


class Muon(Update):
    moments = ("momentum_buffer",)
    needs = "matrices"

    def __init__(self, momentum: float):
        self.momentum = momentum

    def apply(self, shards: Shards, *, rate: float, decay: float, skip: Tensor | None) -> None:
        buffers = shards.moments["momentum_buffer"]
        gradients, stay = kept(shards.gradients, buffers, skip)
        foreach_lerp_(buffers, gradients, 1 - self.momentum)
        ahead = list(foreach_lerp(gradients, buffers, self.momentum))  # Nesterov's
        foreach_mul_(shards.parameters, 1 - rate * decay * stay)
        for places in together(shards.sources):
            wholes = torch.stack([whole(ahead[place], shards.sources[place]) for place in places])
            directions = orthogonal(wholes)
            for place, direction in zip(places, directions, strict=True):
                size = rate * AS_ADAMW * math.sqrt(max(direction.shape)) * stay
                shards.parameters[place].sub_(part_of(direction, shards.sources[place]) * size)


def together(sources: list[Tensor]) -> Iterator[list[int]]:
    """Yield places of equal matrices in a row, no more at once than memory should hold."""
    for shape, places in groupby(range(len(sources)), key=lambda place: tuple(sources[place].shape)):
        equal = list(places)
        number = max(1, MOST // math.prod(shape))
        yield from (equal[start : start + number] for start in range(0, len(equal), number))


def whole(shard: Tensor, source: Tensor) -> Tensor:
    """Gather the matrix of which every rank has a shard."""
    spread = spread_like(source, shard)
    return spread.full_tensor() if isinstance(spread, DTensor) else spread


def part_of(matrix: Tensor, source: Tensor) -> Tensor:
    """Cut this rank's shard out of a matrix that it has whole."""
    local, start = local_shard(source)
    return matrix[tuple(slice(first, first + size) for first, size in zip(start, local.shape, strict=True))]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices [M, rows, columns] with the same singular vectors and singular values near one.

    In bf16 on a GPU, where that is many times as fast; the polynomial's values spread more than such rounding.
    """
    found = matrices.bfloat16() if matrices.is_cuda else matrices
    turned = found.shape[1] > found.shape[2]
    found = found.mT if turned else found
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    first, third, fifth = POLYNOMIAL
    for _ in range(ITERATIONS):
        squares = found @ found.mT
        found = torch.baddbmm(
            found, torch.baddbmm(squares, squares, squares, beta=third, alpha=fifth), found, beta=first
        )
    return (found.mT if turned else found).to(matrices.dtype)


@config
class MuonConfig(OptimizerConfig):
    kind: Literal["muon"] = "muon"
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW

    def __post_init__(self) -> None:
        super().__post_init__()
        must("not be negative", eps=self.eps)
        must("be at least 0 and below 1", betas=self.betas, momentum=self.momentum)

    def update(self, role: Role) -> Update:
        if role == "matrix":
            return Muon(self.momentum)
        return Adam(self.betas, self.eps, decoupled=True)
