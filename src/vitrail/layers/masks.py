"""Masks of tokens. Every kind gives each token a score from noise; the lowest scores stay visible.

So the count of visible tokens is exact for every kind, and a mask is a pure function of the noise passed in. A
stratified mask also has the same count in every slab of the grid, so that ranks which share the tokens of a sample by
slabs find in their own slab whatever they compute with.
"""

import math
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from vitrail.recipe import config, must


class Mask(NamedTuple):
    visible: Tensor  # [B, n] indices, rising
    hidden: Tensor  # [B, N - n] indices, rising


def num_visible(tokens: int, ratio: float) -> int:
    """Tokens that stay when a ratio is hidden, rounded down (the tiny term undoes rounding in 1 - ratio)."""
    return int(tokens * (1 - ratio) + 1e-6)


@config
class _MaskConfig:
    ratio: float = 0.75  # of the tokens, hidden

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(f"ratio {self.ratio} must lie between 0 and 1")

    @property
    def strata(self) -> int:
        """Equal shares of the tokens, in their order, that are masked by themselves."""
        return 1

    def counts(self, tokens: int, decode_ratio: float = 1.0) -> tuple[int, int]:
        """Count the tokens that are visible, and those of the hidden ones that are predicted."""
        each = tokens // self.strata
        visible = num_visible(each, self.ratio)
        return self.strata * visible, self.strata * max(1, round((each - visible) * decode_ratio))

    def check(self, grid: tuple[int, ...]) -> None:
        """Refuse a grid that this kind cannot mask."""


@config
class RandomMask(_MaskConfig):
    """Each token by itself."""

    kind: Literal["random"] = "random"

    def score(self, noise: Tensor, grid: tuple[int, ...]) -> Tensor:
        return noise


@config
class BlockMask(_MaskConfig):
    """Whole blocks of neighbouring tokens."""

    kind: Literal["block"] = "block"
    block: int = 2  # tokens along each axis

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"block {self.block} must be at least 1 token")

    def score(self, noise: Tensor, grid: tuple[int, ...]) -> Tensor:
        corner = [torch.arange(g, device=noise.device) // self.block * self.block for g in grid]
        return noise.unflatten(1, grid)[(slice(None), *torch.meshgrid(*corner, indexing="ij"))].flatten(1)


@config
class TubeMask(_MaskConfig):
    """The same places along the whole first axis (time, or depth)."""

    kind: Literal["tube"] = "tube"

    def score(self, noise: Tensor, grid: tuple[int, ...]) -> Tensor:
        return noise.unflatten(1, grid)[:, :1].expand(-1, *grid).flatten(1)


@config
class GridMask(_MaskConfig):
    """Visible tokens on a regular lattice, shifted at random for each sample."""

    kind: Literal["grid"] = "grid"

    def score(self, noise: Tensor, grid: tuple[int, ...]) -> Tensor:
        stride = max(2, round((1 - self.ratio) ** (-1 / len(grid))))
        out = torch.zeros_like(noise).unflatten(1, grid)
        for axis, size in enumerate(grid):
            shift = (noise[:, axis] * stride).long()  # the first numbers of a sample also choose its shift
            off = (torch.arange(size, device=noise.device) + shift[:, None]) % stride != 0  # [B, size]
            out = out + off.view(-1, *[size if a == axis else 1 for a in range(len(grid))])
        return out.flatten(1)


@config
class StratifiedMask(_MaskConfig):
    """Each token by itself, with the same count in every slab of the grid along its first axis."""

    kind: Literal["stratified"] = "stratified"
    slabs: int  # a constant of the recipe: a context size that divides it moves no patches between ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        must("be at least 1", slabs=self.slabs)

    @property
    def strata(self) -> int:
        return self.slabs

    def check(self, grid: tuple[int, ...]) -> None:
        if grid[0] % self.slabs:
            fitting = [n for n in range(1, grid[0] + 1) if grid[0] % n == 0]
            raise ValueError(
                f"model.mask.slabs: {self.slabs} does not divide the {grid[0]} patches along the first axis; "
                f"use one of {', '.join(map(str, fitting))}, or another patch or crop"
            )
        each = math.prod(grid) // self.slabs
        if self.slabs > 1 and num_visible(each, self.ratio) in (0, each):
            what = "visible" if each - num_visible(each, self.ratio) else "hidden"
            raise ValueError(
                f"model.mask.slabs: {self.slabs} slabs of {each} tokens have none {what} at model.mask.ratio "
                f"{self.ratio}; use fewer slabs, a smaller patch or another ratio"
            )

    def score(self, noise: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The rank of each token in its slab."""
        return noise.unflatten(1, (self.slabs, -1)).argsort(dim=2, stable=True).argsort(dim=2).flatten(1)


AnyMask = RandomMask | BlockMask | TubeMask | GridMask | StratifiedMask
MaskConfig = Annotated[AnyMask, Field(discriminator="kind")]


def make_mask(c: AnyMask, noise: Tensor, grid: tuple[int, ...], valid: Tensor | None = None) -> Mask:
    """Sort the tokens by score, equal scores by the noise itself, and cut at the exact count; noise [B, N].

    Of a sample with padding (valid is false there) the same share of its valid tokens is hidden; padding fills both
    sides up.
    """
    c.check(grid)
    keep, _ = c.counts(math.prod(grid))
    score = c.score(noise, grid)
    order = noise.argsort(dim=1, stable=True)
    order = order.gather(1, score.gather(1, order).argsort(dim=1, stable=True))
    if valid is not None:
        # Valid tokens to see, then padding, then valid tokens to hide: the cut falls into the padding.
        real = valid.gather(1, order)
        rank, number = real.cumsum(dim=1), real.sum(dim=1, keepdim=True)
        seen = rank <= (number * (1 - c.ratio) + 1e-6).long().clamp(min=1)
        group = torch.where(real, torch.where(seen, 0, 2), 1)
        order = order.gather(1, group.argsort(dim=1, stable=True))
    return Mask(order[:, :keep].sort(dim=1).values, order[:, keep:].sort(dim=1).values)
