"""Decoder of tokens: from the encoder's features back to voxels.

- a linear layer to a width of its own, positions again, blocks of the encoder's make, norm, and a linear layer
- without blocks, the last layer alone
- drop path is spread over its own blocks, from 0 to its own rate
A decoder that brings tokens of its own (mask tokens, say) overrides derive(), place(), run_block(), wanted().
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.layers.attention import WHOLE, TokenSequence
from vitrail.layers.block import Block, BlockConfig, CrossBlock, make_norm, scale_by_depth
from vitrail.layers.flops import Flops
from vitrail.layers.patches import num_voxels
from vitrail.layers.variables import VariableHead
from vitrail.models.encoder import (
    EncodedModel,
    Encoder,
    EncoderConfig,
    LearnedPositions,
    check_blocks,
    hidden_width,
    rope_turns,
)
from vitrail.models.model import Side, Stage, block_stages, spread_drop_path
from vitrail.recipe import config


@config
class DecoderBlocks:
    """Size of a decoder; the make of its blocks is the encoder's."""

    width: int = 512
    depth: int = 8
    heads: int = 16
    kv_heads: int | None = None  # fewer than heads: grouped-query attention; null: as many
    theta: float | None = None  # of rope; null: the encoder's
    mlp_ratio: float | None = None  # as in the encoder
    hidden: int | None = None
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_blocks(self)
        if self.depth < 1:
            raise ValueError(f"depth {self.depth} must be at least 1; for a decoder without blocks use kind: linear")

    def block(self, e: EncoderConfig) -> BlockConfig:
        hidden = hidden_width(self.width, e.mlp, self.mlp_ratio, self.hidden)
        groups = self.kv_heads or self.heads
        return replace(e.block(), width=self.width, heads=self.heads, kv_heads=groups, hidden=hidden)

    def check(self, e: EncoderConfig, ndim: int) -> None:
        e.check_positions(self.block(e), ndim)


class TokenDecoder(nn.Module):
    """[B, prefix + N, encoder's width] -> [B, N, P*channels]. `c` None: no blocks, the last layer alone."""

    needs: ClassVar[tuple[str, ...]] = ("coordinates", "sizes", "valid", "variables")
    sequence: TokenSequence = WHOLE

    def __init__(
        self,
        c: DecoderBlocks | None,
        encoder: Encoder,
        channels: int,
        *,
        shape: tuple[int, ...] | None = None,
        block: type[nn.Module] = Block,
    ):
        super().__init__()
        e = encoder.config
        if c is not None:
            c.check(e, len(encoder.patch))
        self.block_config = e.block() if c is None else c.block(e)
        self.width, self.heads, self.prefix = self.block_config.width, self.block_config.heads, encoder.prefix
        self.rates = [] if c is None else spread_drop_path(c.drop_path, c.depth)
        self.rope, self.add_places = encoder.rope, encoder.describe  # of the encoder's make, at this width
        learned = c is not None and e.positions == "learned"
        sized = None if c is None else encoder.size_embed
        self.embed = None if c is None else nn.Linear(encoder.width, self.width, bias=e.bias)
        self.pos_embed = LearnedPositions(self.width, e, shape) if learned else None
        self.size_embed = None if sized is None else type(sized)(sized.in_features, self.width)
        ndim = len(encoder.patch)
        self.rope_turns = None if c is None else rope_turns(e, ndim, self.width // self.heads)
        self.theta = None if c is None else c.theta
        self.blocks = nn.ModuleList(block(self.block_config) for _ in self.rates)
        if e.init == "depth_scaled":
            scale_by_depth(self.blocks)
        self.norm = None if c is None else make_norm(e.norm, self.width, e.eps)
        voxels = num_voxels(encoder.patch)
        self.head: nn.Linear
        if e.variables is None:
            self.head = nn.Linear(self.width, voxels * channels, bias=e.bias)
        else:
            self.head = VariableHead(self.width, voxels, len(e.variables.known), bias=e.bias, separate=e.separate)

    def derive(self, side: Side) -> Side:
        """Add the rotation table at this head width to what the encoder derived."""
        if not self.blocks:
            return side
        return side | {"decoder_rope": self.sequence.table(self.turn(side["coordinates"], self.prefix))}

    def turn(self, coordinates: Tensor, prefix: int) -> Tensor | None:
        """The encoder's rotations, at this decoder's head width."""
        head_width = self.width // self.heads
        return self.rope(coordinates, prefix=prefix, head_width=head_width, turns=self.rope_turns, theta=self.theta)

    def stages(self, first_block: int) -> list[Stage]:
        """`first_block` is where its rows begin in the drop-path table."""
        return [
            Stage("embed", self.place, self.needs, self.placing),
            *block_stages(self.blocks, self.run_block, self.needs, first_block),
            Stage("head", self.predict, self.needs, (self.norm, self.head)),
        ]

    @property
    def placing(self) -> tuple[nn.Module | nn.Parameter | None, ...]:
        """The parts that place() reads."""
        return (self.embed, self.pos_embed, self.size_embed)

    def place(self, x: Tensor, side: Side) -> Tensor:
        if self.embed is None:
            return x
        x = self.embed(x)
        patches = self.describe(x[:, self.prefix :], side)
        return torch.cat([x[:, : self.prefix], patches], dim=1) if self.prefix else patches

    def describe(self, x: Tensor, side: Side) -> Tensor:
        """Add to tokens what tells them apart, with the decoder's own tables."""
        return self.add_places(x, side, width=self.width, learned=self.pos_embed, sizes=self.size_embed)

    def run_block(self, block: nn.Module, x: Tensor, side: Side, drop_path: Tensor | None) -> Tensor:
        return block(x, side["decoder_rope"], drop_path, side.get("encoder_mask"))

    def wanted(self, side: Side) -> int:
        """Count the tokens, the last ones, that are predicted: all patches."""
        return side["coordinates"].shape[1]

    def predict(self, x: Tensor, side: Side) -> Tensor:
        """Only what is asked for goes through the last norm and layer."""
        x = x[:, -self.wanted(side) :]
        return self.to_voxels(x if self.norm is None else self.norm(x), side)

    def to_voxels(self, x: Tensor, side: Side) -> Tensor:
        return self.head(x, side.get("variables")) if isinstance(self.head, VariableHead) else self.head(x)

    @property
    def features(self) -> int:
        """Values that a token predicts, with all known variables; a token of one variable predicts that alone."""
        head = self.head
        return head.voxels if isinstance(head, VariableHead) and head.separate else head.out_features

    def flops(self, tokens: int, predicted: int = 0, predict_visible: bool = True) -> Flops:
        """Forward of one sample of so many tokens, of all known variables.

        `predicted` mask tokens come beside these, which themselves are predicted only with `predict_visible`.
        """
        wanted, memory = predicted + (tokens if predict_visible else 0), tokens + self.prefix
        outside = 2.0 * wanted * self.width * self.features
        if self.embed is None:
            return Flops(outside=outside)
        cross = isinstance(self.blocks[0], CrossBlock)  # it asks for visible tokens once more
        outside += 2.0 * memory * self.embed.in_features * self.width
        if self.size_embed is not None:
            sized = tokens + (wanted if cross else predicted)
            outside += 2.0 * sized * self.size_embed.in_features * self.width
        c = self.block_config
        one = c.flops(wanted, memory) if cross else c.flops(memory + predicted)
        return one * len(self.blocks) + Flops(outside=outside)


class DecodedModel(EncodedModel):
    """Base of the models that are an encoder and a decoder of tokens."""

    decoder: TokenDecoder

    def derive(self, side: Side) -> Side:
        return self.decoder.derive(self.encoder.derive(side))

    def stages(self) -> list[Stage]:
        decoder = self.decoder.stages(self.encoder.depth)
        return [*self.encoder_stages(), *(stage.within("decoder") for stage in decoder)]

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks]

    def drop_path_rates(self) -> list[float]:
        return [*super().drop_path_rates(), *self.decoder.rates]
