"""Masked autoencoder: encode the visible tokens, predict the hidden ones.

- any number of dimensions; positions are the tokens' own coordinates, so the order of tokens means nothing
- uniform or adaptive tokens; padding is neither attended to nor predicted
- channels together, or as variables: a batch that carries some of them is predicted in just those
- only visible patches are ever embedded
- the decoder is "self" (visible and hidden tokens together, He et al.), "cross" (hidden tokens query visible ones,
  CrossMAE) or "linear" (one layer, no context: what UCF-VIT calls its linear decoder)
- decode_ratio < 1 predicts only a part of the hidden tokens in training

Every kind of mask gives each token a score from noise; the lowest scores stay visible. So the count of visible tokens
is exact for every kind, and a mask is a pure function of the noise passed in. A stratified mask also has the same count
in every slab of the grid, so that ranks which share the tokens of a sample by slabs find in their own slab whatever
they compute with.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from vitrail.layers.block import Block, CrossBlock
from vitrail.layers.flops import Flops
from vitrail.layers.init import Constant, Normal, initialise_here, mark
from vitrail.layers.patches import grid_of, per_axis
from vitrail.layers.tokens import AdaptiveTokens, Tokens, gather_tokens
from vitrail.layers.variables import VariableHead, pick
from vitrail.models.config import DecoderBlocks, EncoderConfig, ModelConfig
from vitrail.models.encoder import DecodedModel, Encoder, TokenDecoder
from vitrail.models.model import Side, make_inputs
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


@config
class DecoderConfig(DecoderBlocks):
    kind: Literal["self", "cross", "linear"] = "self"
    decode_ratio: float = 1.0  # of the hidden tokens, predicted in training

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decode_ratio <= 1:
            raise ValueError(f"decode_ratio {self.decode_ratio} must be above 0 and at most 1")


@config
class MAEConfig(ModelConfig):
    output: ClassVar[str] = "tokens"

    kind: Literal["mae"] = "mae"
    encoder: EncoderConfig
    decoder: DecoderConfig = DecoderConfig()
    mask: MaskConfig = RandomMask()
    ndim: int = 2
    channels: int | None = None  # default: as many as the data have variables
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop

    def __post_init__(self) -> None:
        self.settle()

    def build(self) -> "MAE":
        return MAE(self)

    @property
    def parts(self) -> int:
        """Count the variables that have tokens of their own: 1 where a token holds all channels."""
        return self.encoder.parts

    @property
    def patch(self) -> tuple[int, ...]:
        return self.encoder.patch_on(self.ndim)

    @property
    def size(self) -> tuple[int, ...]:
        assert self.shape is not None
        return per_axis(self.shape, self.ndim)

    def token_counts(self, *, evaluating: bool = False) -> tuple[int, int]:
        """Count the tokens of each variable that are visible, and those of the hidden ones that are predicted."""
        tokens = self.encoder.tokens.count(self.size, self.patch)
        return self.mask.counts(tokens, 1.0 if evaluating else self.decoder.decode_ratio)

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        super().check()
        e, d = self.encoder, self.decoder
        if d.kind != "linear":
            d.check(e, self.ndim)
        if isinstance(e.tokens, AdaptiveTokens) and self.mask.kind != "random":
            raise ValueError(f"mask.kind {self.mask.kind!r} needs tokens on a grid; with adaptive ones use random")
        if not isinstance(e.tokens, AdaptiveTokens):
            self.mask.check(grid_of(self.size, self.patch))
        tokens = e.tokens.count(self.size, self.patch)
        visible, _ = self.token_counts()
        if visible < 1 or visible == tokens:
            what = "no token visible" if visible < 1 else "no token hidden"
            raise ValueError(
                f"mask.ratio {self.mask.ratio} leaves {what} of {tokens}; "
                "use a smaller patch, a larger crop or another ratio"
            )


class MAE(DecodedModel):
    """forward(visible patches [B, n, P*C], coordinates=[B, n, ndim], queries=[B, m, ndim]) -> [B, m, P*C].

    `queries` are the coordinates of the hidden tokens to predict (`query_sizes` and `query_valid` belong to adaptive
    ones). With predict_visible the predictions of the visible tokens come first: [B, n + m, P*C].
    """

    spared = ("mask_token", "decoder.variable")

    def __init__(self, c: MAEConfig):
        super().__init__(c)
        self.decoder = Decoder(c, self.encoder)
        initialise_here(self)

    def inputs(self, images: Tensor, variables: Sequence[str] | None = None) -> dict[str, Any]:
        """Images with nothing hidden and every token asked for."""
        inputs = super().inputs(images, variables)
        tokens = torch.arange(inputs["x"].shape[1], device=images.device).expand(len(images), -1)
        return hide(inputs, tokens, tokens[:, :0]) | {"predict_visible": True}

    def reconstruct(
        self, images: Tensor, noise: Tensor, variables: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predict all tokens from the visible ones, in their order [B, N, P*C]; and tell which were hidden, [B, N].

        The mask follows the noise [B, N], numbers from 0 to 1.
        """
        inputs, tokens = make_inputs(self.config, images, variables=variables)
        visible, hidden = split_tokens(self.config, noise, tokens)
        output = self(**hide(inputs, visible, hidden), predict_visible=True)
        order = torch.cat([visible, hidden], dim=1)
        place = order.unsqueeze(-1).expand_as(output)
        return torch.empty_like(output).scatter(1, place, output), torch.ones_like(noise).scatter(1, visible, 0.0) > 0

    def flops(self, *, predict_visible: bool = False) -> Flops:
        """Forward of one training sample: the encoder is charged for visible tokens only."""
        visible, predicted = (count * self.config.parts for count in self.config.token_counts())
        return self.encoder.flops(visible) + self.decoder.flops(visible, predicted, predict_visible)


def hide(inputs: dict[str, Any], visible: Tensor, hidden: Tensor) -> dict[str, Any]:
    """Keep the inputs of the visible tokens; of the hidden ones only the places that are asked for."""

    def take(table: Tensor, index: Tensor) -> Tensor:
        return gather_tokens(table, index) if table.ndim == 3 else table.gather(1, index)

    asked = {
        query: take(inputs[name], hidden)
        for name, query in (("coordinates", "queries"), ("sizes", "query_sizes"), ("valid", "query_valid"))
        if inputs.get(name) is not None
    }
    return {name: take(t, visible) if isinstance(t, Tensor) else t for name, t in inputs.items()} | asked


def split_tokens(c: MAEConfig, noise: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Indices of the tokens to see and to hide, [B, n] and [B, N - n].

    Each variable that has tokens of its own is masked by itself, so that all keep as many.
    """
    expected = (len(tokens.coordinates), tokens.number)
    if tuple(noise.shape) != expected:
        raise ValueError(f"noise {list(noise.shape)} must have one number for each token, {list(expected)}")
    parts, number = tokens.separate, tokens.number // tokens.separate
    grid = (number,) if tokens.tree is not None else grid_of(tokens.size, tokens.patch)
    valid = None if tokens.valid is None else tokens.valid.reshape(-1, number)
    mask = make_mask(c.mask, noise.reshape(-1, number), grid, valid)
    first = torch.arange(parts, device=noise.device)[:, None] * number  # where each variable's tokens begin
    visible, hidden = ((index.unflatten(0, (-1, parts)) + first).flatten(1, 2) for index in mask)
    return visible, hidden


class Decoder(TokenDecoder):
    """Mask tokens at the hidden coordinates beside the visible tokens; only what is asked for is predicted."""

    needs = (*TokenDecoder.needs, "queries", "query_sizes", "query_valid", "predict_visible")

    def __init__(self, c: MAEConfig, encoder: Encoder):
        assert c.channels is not None
        cross, linear = c.decoder.kind == "cross", c.decoder.kind == "linear"
        block = CrossBlock if cross else Block
        super().__init__(None if linear else c.decoder, encoder, c.channels, shape=c.extent, block=block)
        self.cross = cross
        self.mask_token = mark(nn.Parameter(torch.empty(1, 1, self.width)), Constant(0.0) if linear else Normal(0.02))
        # A mask token must say which variable it stands for, where each has its own.
        separate = c.encoder.separate
        self.variable = mark(nn.Parameter(torch.empty(c.channels, self.width)), Normal(0.02)) if separate else None

    def derive(self, side: Side) -> Side:
        """Rotations and masks of memory (prefix and visible tokens) and of queries, where these are at hand."""
        if "queries" not in side or not self.blocks:
            return side
        asked, coordinates, valid = self.asked(side), side["coordinates"], side.get("valid")
        memory_rope, query_rope = self.turn(coordinates, self.prefix), self.turn(asked["coordinates"], 0)
        tokens = coordinates.shape[1]
        if not self.cross:  # one sequence of both
            if memory_rope is not None and query_rope is not None:
                query_rope = torch.cat([memory_rope, query_rope], dim=-3)
            parts = [(valid, coordinates), (side.get("query_valid"), asked["coordinates"])]
            if any(part is not None for part, _ in parts):
                valid = torch.cat([c.new_ones(c.shape[:2], dtype=torch.bool) if v is None else v for v, c in parts], 1)
            tokens += asked["coordinates"].shape[1]
        mask = self.sequence.keys(valid, prefix=self.prefix, tokens=tokens)
        ropes = {"memory_rope": self.sequence.table(memory_rope), "query_rope": self.sequence.table(query_rope)}
        return side | ropes | {"decoder_mask": mask}

    def asked(self, side: Side) -> Side:
        """Return the places of mask tokens: a cross decoder asks for visible tokens like for hidden ones."""
        names = {"coordinates": "queries", "sizes": "query_sizes"}
        if side.get("query_sizes") is not None:  # adaptive tokens, whose padding has no size
            names["valid"] = "query_valid"
        asked = {name: side[query] for name, query in names.items() if side.get(query) is not None}
        if self.cross and side.get("predict_visible"):
            asked = {name: torch.cat([side[name], query], dim=1) for name, query in asked.items()}
        return asked

    def num_queries(self, side: Side) -> int:
        """Mask tokens; a cross decoder has some for visible tokens, too."""
        return self.wanted(side) if self.cross else side["queries"].shape[1]

    @property
    def placing(self) -> tuple[nn.Module | nn.Parameter | None, ...]:
        return (*super().placing, self.mask_token, self.variable)

    def run_block(self, block: nn.Module, x: Tensor, side: Side, drop_path: Tensor | None) -> Tensor:
        mask = side["decoder_mask"]
        if self.cross:
            return block(x, self.num_queries(side), side["query_rope"], side["memory_rope"], drop_path, mask)
        return block(x, side["query_rope"], drop_path, mask)

    def place(self, x: Tensor, side: Side) -> Tensor:
        """[memory; mask tokens at the coordinates asked for], with the decoder's own positions."""
        masks = self.mask_token.to(x.dtype).expand(x.shape[0], self.num_queries(side), -1)
        if self.variable is not None:
            masks = torch.cat([self.name(part, side) for part in self.split(masks, side)], dim=1)
        if self.blocks:
            masks = self.describe(masks, self.asked(side))
        return torch.cat([super().place(x, side), masks], dim=1)

    def split(self, x: Tensor, side: Side) -> list[Tensor]:
        """Tokens asked for: the visible ones among them, and the hidden ones; each is variable by variable."""
        hidden = side["queries"].shape[1]
        return [part for part in x.split([x.shape[1] - hidden, hidden], dim=1) if part.shape[1]]

    def name(self, x: Tensor, side: Side) -> Tensor:
        """Tokens [B, V*n, D] with the embedding of their variable."""
        assert self.variable is not None
        names = pick(self.variable, side.get("variables")).to(x.dtype)
        return (x.unflatten(1, (len(names), -1)) + names[:, None]).flatten(1, 2)

    def wanted(self, side: Side) -> int:
        return side["queries"].shape[1] + (side["coordinates"].shape[1] if side.get("predict_visible") else 0)

    def to_voxels(self, x: Tensor, side: Side) -> Tensor:
        """Visible and hidden tokens apart, where each part is variable by variable."""
        parts = self.split(x, side) if isinstance(self.head, VariableHead) and self.head.separate else [x]
        return torch.cat([super(Decoder, self).to_voxels(part, side) for part in parts], dim=1)
