"""Masked autoencoder: encode the visible tokens, predict the hidden ones.

- any number of dimensions; positions are the tokens' own coordinates, so the order of tokens means nothing
- only visible patches are ever embedded
- the decoder is "self" (visible and hidden tokens together, He et al.), "cross" (hidden tokens query visible ones,
  CrossMAE) or "linear" (one layer, no context: what UCF-VIT calls its linear decoder)
- decode_ratio < 1 predicts only a part of the hidden tokens in training
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.cost.flops import Flops, cross_block_flops, self_block_flops
from vitrail.layers.block import Block, BlockConfig, CrossBlock, make_norm
from vitrail.layers.init import Constant, Normal, initialise_here, mark
from vitrail.layers.masks import MaskConfig, RandomMask, num_visible
from vitrail.layers.patches import grid_of, num_voxels, per_axis
from vitrail.models.model import Model, Side, Stage, block_drop_path, spread_drop_path
from vitrail.models.vit import (
    Encoder,
    EncoderConfig,
    LearnedPositions,
    check_drop_path,
    check_heads,
    check_mlp,
    check_positions,
    hidden_width,
)
from vitrail.recipe import config


@config
class DecoderConfig:
    kind: Literal["self", "cross", "linear"] = "self"
    width: int = 512
    depth: int = 8
    heads: int = 16
    mlp_ratio: float | None = None  # as in the encoder
    hidden: int | None = None
    drop_path: float = 0.0
    decode_ratio: float = 1.0  # of the hidden tokens, predicted in training

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads)
        check_mlp(self.width, self.mlp_ratio, self.hidden)
        check_drop_path(self.drop_path)
        if not 0 < self.decode_ratio <= 1:
            raise ValueError(f"decode_ratio {self.decode_ratio} must be above 0 and at most 1")
        if self.depth < 1:
            raise ValueError(f"depth {self.depth} must be at least 1; for a decoder without blocks use kind: linear")


@config
class MAEConfig:
    kind: Literal["mae"] = "mae"
    encoder: EncoderConfig
    decoder: DecoderConfig = DecoderConfig()
    mask: MaskConfig = RandomMask()
    ndim: int = 2
    channels: int | None = None  # default: as many as the data have variables
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop

    def build(self) -> "MAE":
        return MAE(self)

    @property
    def patch(self) -> tuple[int, ...]:
        assert self.encoder.patch is not None
        return per_axis(self.encoder.patch, self.ndim)

    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis."""
        assert self.shape is not None
        return grid_of(per_axis(self.shape, self.ndim), self.patch)

    def token_counts(self, *, evaluating: bool = False) -> tuple[int, int]:
        """How many tokens are visible, and how many of the hidden ones are predicted."""
        tokens = math.prod(self.grid())
        visible = num_visible(tokens, self.mask.ratio)
        hidden = tokens - visible
        ratio = 1.0 if evaluating else self.decoder.decode_ratio
        return visible, max(1, round(hidden * ratio))

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        e, d = self.encoder, self.decoder
        assert e.width is not None
        assert e.heads is not None
        check_positions(e.positions, e.width, e.heads, self.ndim)
        if d.kind != "linear":
            check_positions(e.positions, d.width, d.heads, self.ndim)
        visible, _ = self.token_counts()
        tokens = math.prod(self.grid())
        if visible < 1 or visible == tokens:
            what = "no token visible" if visible < 1 else "no token hidden"
            raise ValueError(
                f"mask.ratio {self.mask.ratio} leaves {what} of {tokens}; "
                "use a smaller patch, a larger crop or another ratio"
            )


class MAE(Model):
    """forward(visible patches [B, n, P*C], coordinates=[B, n, ndim], queries=[B, m, ndim]) -> [B, m, P*C].

    `queries` are the coordinates of the hidden tokens to predict. With predict_visible the predictions of the
    visible tokens come first: [B, n + m, P*C].
    """

    def __init__(self, c: MAEConfig):
        super().__init__()
        assert c.channels is not None
        self.config = c
        shape = None if c.shape is None else per_axis(c.shape, c.ndim)
        self.features = num_voxels(c.patch) * c.channels
        self.encoder = Encoder(c.encoder, ndim=c.ndim, channels=c.channels, shape=shape)
        self.decoder = Decoder(c, self.encoder, self.features, shape)
        initialise_here(self)

    def derive(self, side: Side) -> Side:
        return self.decoder.derive(self.encoder.derive(side))

    def stages(self) -> list[Stage]:
        encoder = [Stage(f"encoder.{s.name}", s.run, s.needs) for s in self.encoder.stages()]
        decoder = [Stage(f"decoder.{s.name}", s.run, s.needs) for s in self.decoder.stages(self.encoder.depth)]
        return [*encoder, *decoder]

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks]

    def drop_path_rates(self) -> list[float]:
        encoder = spread_drop_path(self.config.encoder.drop_path, self.encoder.depth)
        return [*encoder, *spread_drop_path(self.config.decoder.drop_path, len(self.decoder.blocks))]

    def spared_from_decay(self) -> list[str]:
        return ["prefix_tokens", "pos_embed.table", "mask_token"]

    def flops(self, *, predict_visible: bool = False) -> Flops:
        """Forward of one training sample: the encoder is charged for visible tokens only."""
        visible, predicted = self.config.token_counts()
        return self.encoder.flops(visible, self.features) + self.decoder.flops(visible, predicted, predict_visible)


class Decoder(nn.Module):
    """Mask tokens at the hidden coordinates, a few blocks, and a linear layer to voxels."""

    def __init__(self, c: MAEConfig, encoder: Encoder, features: int, shape: tuple[int, ...] | None):
        super().__init__()
        self.config = d = c.decoder
        self.linear = d.kind == "linear"
        width = encoder.width if self.linear else d.width
        self.width, self.prefix = width, encoder.prefix
        self.rope, self.positions = encoder.rope, encoder.positions
        self.mask_token = mark(nn.Parameter(torch.empty(1, 1, width)), Constant(0.0) if self.linear else Normal(0.02))
        self.embed = None if self.linear else nn.Linear(encoder.width, width, bias=c.encoder.bias)
        learned = c.encoder.positions == "learned" and not self.linear
        self.pos_embed = LearnedPositions(width, c.patch, shape) if learned else None
        block_type = CrossBlock if d.kind == "cross" else Block
        self.block_config = _block_config(c)
        self.blocks = nn.ModuleList(block_type(self.block_config) for _ in range(0 if self.linear else d.depth))
        self.norm = None if self.linear else make_norm(c.encoder.norm, width, c.encoder.eps)
        self.head = nn.Linear(width, features, bias=c.encoder.bias)

    def derive(self, side: Side) -> Side:
        """Rotation tables of memory (prefix and visible tokens) and of queries, where they are at hand."""
        if self.linear or "queries" not in side:
            return side
        head_width = self.width // self.config.heads
        queries = self.asked(side)
        memory_rope = self.rope(side["coordinates"], prefix=self.prefix, head_width=head_width)
        query_rope = self.rope(queries, prefix=0, head_width=head_width)
        if self.config.kind == "self" and memory_rope is not None and query_rope is not None:
            query_rope = torch.cat([memory_rope, query_rope], dim=-3)
        return side | {"memory_rope": memory_rope, "query_rope": query_rope, "num_queries": queries.shape[1]}

    def asked(self, side: Side) -> Tensor:
        """Coordinates that mask tokens are put at: a cross decoder asks for visible tokens like for hidden ones."""
        if self.config.kind == "cross" and side.get("predict_visible"):
            return torch.cat([side["coordinates"], side["queries"]], dim=1)
        return side["queries"]

    def stages(self, first_block: int) -> list[Stage]:
        def run_block(block: nn.Module, index: int) -> Stage:
            def run(x: Tensor, side: Side) -> Tensor:
                drop_path = block_drop_path(side, first_block + index)
                if self.config.kind == "cross":
                    return block(x, side["num_queries"], side["query_rope"], side["memory_rope"], drop_path)
                return block(x, side["query_rope"], drop_path)

            return Stage(f"blocks.{index}", run, ("coordinates", "queries", "predict_visible", "drop_path"))

        return [
            Stage("embed", self.place, ("coordinates", "queries", "predict_visible")),
            *[run_block(block, i) for i, block in enumerate(self.blocks)],
            Stage("head", self.predict, ("coordinates", "queries", "predict_visible")),
        ]

    def place(self, x: Tensor, side: Side) -> Tensor:
        """[memory; mask tokens at the coordinates asked for], with the decoder's own positions."""
        if self.embed is not None:
            x = self.embed(x)
        queries = self.asked(side)
        masks = self.mask_token.to(x.dtype).expand(x.shape[0], queries.shape[1], -1)
        if not self.linear:
            masks = self.add_positions(masks, queries)
            patches = self.add_positions(x[:, self.prefix :], side["coordinates"])
            x = torch.cat([x[:, : self.prefix], patches], dim=1) if self.prefix else patches
        return torch.cat([x, masks], dim=1)

    def add_positions(self, x: Tensor, coordinates: Tensor) -> Tensor:
        positions = self.positions(coordinates, self.width, self.pos_embed)
        return x if positions is None else x + positions.to(x.dtype)

    def predict(self, x: Tensor, side: Side) -> Tensor:
        """Only what is asked for goes through the last norm and layer."""
        wanted = side["queries"].shape[1] + (side["coordinates"].shape[1] if side.get("predict_visible") else 0)
        x = x[:, -wanted:]
        return self.head(x if self.norm is None else self.norm(x))

    def flops(self, visible: int, predicted: int, predict_visible: bool) -> Flops:
        c, width, memory = self.block_config, self.width, visible + self.prefix
        wanted = predicted + (visible if predict_visible else 0)
        head = Flops(outside=2.0 * wanted * width * self.head.out_features)
        if self.linear:
            return head
        embed = Flops(outside=2.0 * memory * self.embed.in_features * width)  # type: ignore[union-attr]
        gated = c.mlp == "swiglu"
        if self.config.kind == "cross":
            one = cross_block_flops(queries=wanted, memory=memory, width=width, hidden=c.hidden, gated=gated)
        else:
            tokens = memory + predicted
            one = self_block_flops(tokens=tokens, width=width, kv_width=width, hidden=c.hidden, gated=gated)
        return embed + one * len(self.blocks) + head


def _block_config(c: MAEConfig) -> BlockConfig:
    """The decoder's blocks are of the encoder's make, with their own width, heads and MLP."""
    e, d = c.encoder, c.decoder
    return BlockConfig(
        width=d.width,
        heads=d.heads,
        kv_heads=d.heads,
        hidden=hidden_width(d.width, e.mlp, d.mlp_ratio, d.hidden),
        mlp=e.mlp,
        norm=e.norm,
        eps=e.eps,
        bias=e.bias,
        qk_norm=e.qk_norm,
        layer_scale=e.layer_scale,
    )
