"""From tokens to features and back, as all models share it, in any number of dimensions.

The encoder:
- only the patches that are given are embedded; each comes with its own coordinates, adaptive ones with their size
- channels together, or as variables with tokenizers of their own that are aggregated
- positions: sin-cos, learned (starting as sin-cos), axial rotations (rope) or none
- LayerNorm or RMSNorm, before or after each branch; GELU or SwiGLU, grouped-query heads, QK-norm, LayerScale, drop path
- class token and registers before the patches
Parameter names are timm's where timm has them (patch_embed.proj, blocks.0.attn.qkv, ...).

The decoder:
- a linear layer to a width of its own, positions again, blocks of the encoder's make, norm, and a linear layer
- without blocks, the last layer alone
- drop path is spread over its own blocks, from 0 to its own rate
A decoder that brings tokens of its own (mask tokens, say) overrides derive(), place(), run_block(), wanted().

What can be set of both is in models/config.py.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.layers.attention import WHOLE, TokenSequence
from vitrail.layers.block import Block, BlockConfig, CrossBlock, ModulatedBlock, make_norm, scale_by_depth
from vitrail.layers.flops import Flops
from vitrail.layers.init import Constant, Normal, Table, constants, mark
from vitrail.layers.patches import num_voxels
from vitrail.layers.tokens import (
    AdaptiveTokens,
    grid_coordinates,
    inflated_rope_table,
    pairs_per_axis,
    rope_table,
    sincos,
)
from vitrail.layers.variables import Ids, VariableEmbed, VariableHead
from vitrail.models.config import DecoderBlocks, EncoderConfig
from vitrail.models.model import Model, Side, Stage, block_stages, encoder_of, spread_drop_path

# Parameters of the encoder that are tables and tokens, not weight matrices; and the tokenizers of variables: decay
# would shrink those that no batch carries, which have no gradient to hold against it.
SPARED = [
    "prefix_tokens",
    "pos_embed.table",
    "pos_embed.cls",
    "patch_embed.weight",
    "patch_embed.variable",
    "patch_embed.bias",
    "aggregate.query",
]


def rope_turns(c: EncoderConfig, ndim: int, head_width: int) -> nn.Parameter | None:
    """Learned rotations along the first axis, from 0 on: the model starts as one that knows the other axes alone."""
    if c.rope != "superposed":
        return None
    pairs = pairs_per_axis(head_width, ndim - 1) * (ndim - 1)
    return mark(nn.Parameter(torch.empty(pairs)), Constant(0.0))


class PatchEmbed(nn.Module):
    """One linear layer for all channels of a patch."""

    def __init__(self, features: int, width: int, *, bias: bool, normed: bool, eps: float):
        super().__init__()
        self.norm_in = nn.LayerNorm(features, eps=eps) if normed else None
        self.proj = nn.Linear(features, width, bias=bias)
        self.norm_out = nn.LayerNorm(width, eps=eps) if normed else None

    def forward(self, x: Tensor, ids: Ids | None = None) -> Tensor:
        x = x.to(self.proj.weight.dtype)
        x = self.proj(x if self.norm_in is None else self.norm_in(x))
        return x if self.norm_out is None else self.norm_out(x)

    def flops(self, positions: int) -> float:
        return 2.0 * positions * self.proj.in_features * self.proj.out_features


class PixelPlaces(nn.Linear):
    """Positions of adaptive tokens out of their size and place in voxels [B, N, 1 + ndim], by a layer and a GELU.

    As UCF-VIT has them, and for its weights: numbers so far from 0 are slow to learn from.
    """

    def __init__(self, numbers: int, width: int):
        super().__init__(numbers, width)
        self.weight = mark(nn.Parameter(self.weight.detach()), Normal(0.02))

    def forward(self, x: Tensor) -> Tensor:
        # In fp32 at least: bf16 has but 8 bits, with which leaves beside each other beyond 256 voxels have one place.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return nn.functional.gelu(nn.functional.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)))


class Encoder(nn.Module):
    """The encoder that all models share; a model runs its stages()."""

    sequence: TokenSequence = WHOLE

    def __init__(
        self,
        c: EncoderConfig,
        *,
        ndim: int,
        channels: int,
        shape: tuple[int, ...] | None = None,
        block: Callable[[BlockConfig], nn.Module] = Block,
        norm: bool = True,
        embed_bias: bool | None = None,
    ):
        """`block` makes the repeated blocks; `embed_bias` None: as in the other linear layers."""
        super().__init__()
        assert c.depth is not None
        self.config = c
        self.patch, made = c.patch_on(ndim), c.block()
        width, heads = made.width, made.heads
        self.width, self.depth, self.heads = width, c.depth, heads
        c.check_size(ndim, shape)
        voxels = num_voxels(self.patch)
        bias = c.bias if embed_bias is None else embed_bias
        bias = (bias and not c.patch_norm) if c.patch_bias is None else c.patch_bias
        self.patch_embed: PatchEmbed | VariableEmbed
        if c.variables is None:
            self.patch_embed = PatchEmbed(voxels * channels, width, bias=bias, normed=c.patch_norm, eps=c.eps)
        else:
            self.patch_embed = VariableEmbed(c.variables, voxels=voxels, width=width, heads=heads, bias=bias)
        # How large an adaptive token is, in powers of two of a patch.
        self.size_embed: nn.Linear | None = None
        if isinstance(c.tokens, AdaptiveTokens) and c.tokens.told != "number":
            self.size_embed = PixelPlaces(1 + ndim, width) if c.tokens.told == "pixels" else nn.Linear(ndim, width)
        self.prefix = int(c.cls_token) + c.registers  # tokens that stand before the patches
        self.prefix_tokens = mark(nn.Parameter(torch.empty(self.prefix, width)), Normal(0.02)) if self.prefix else None
        learned, has_cls = c.positions == "learned", c.cls_token and c.cls_position
        self.pos_embed = LearnedPositions(width, c, shape, cls=has_cls) if learned else None
        self.rope_turns = rope_turns(c, ndim, width // heads)
        if c.rope_origin == "centre" and shape is None:
            raise ValueError("rope_origin: centre needs the size of the input: set model.shape")
        # In patches from the first; coordinates stay as they are, since patches see only distances among themselves.
        self.origin = [0.0] * ndim
        if c.rope_origin == "centre" and shape is not None:
            self.origin = [(s / p - 1) / 2 for s, p in zip(shape, self.patch, strict=True)]
        self.input_norm = make_norm(c.norm, width, c.eps) if c.input_norm else None
        self.blocks = nn.ModuleList(block(made) for _ in range(c.depth))
        if c.init == "depth_scaled":
            scale_by_depth(self.blocks)
        self.norm = make_norm(c.norm, width, c.eps) if norm else None

    def rope(
        self, coordinates: Tensor, *, prefix: int, head_width: int, turns: Tensor | None, theta: float | None = None
    ) -> Tensor | None:
        """Rotation table for patches at these coordinates (voxels), after `prefix` tokens that are not turned.

        `turns` are the learned ones of superposed rotations, None for axial ones; `theta` None is the encoder's.
        """
        if self.config.positions != "rope":
            return None
        patches = self.to_patches(coordinates)
        if any(self.origin):
            patches = patches - constants(tuple(self.origin), patches.device)
        patches = nn.functional.pad(patches * self.config.rope_scale, (0, 0, prefix, 0))
        theta = self.config.theta if theta is None else theta
        if turns is None:
            return rope_table(patches, head_width, theta)
        return inflated_rope_table(patches, head_width, theta, turns)

    def to_patches(self, coordinates: Tensor) -> Tensor:
        """Coordinates in voxels to units of patches, the first patch at 0."""
        return coordinates / constants(self.patch, coordinates.device) - 0.5

    def positions(self, coordinates: Tensor, width: int, learned: "LearnedPositions | None") -> Tensor | None:
        """Return what is added to tokens at these coordinates, None when nothing is."""
        if self.config.positions == "sincos":
            return sincos(self.to_patches(coordinates), width)
        if learned is not None:
            return learned(self.to_patches(coordinates))
        return None

    def derive(self, side: Side) -> Side:
        """Add what attention needs: rotations, and which tokens may be attended to."""
        coordinates, valid = side["coordinates"], side.get("valid")
        rope = self.rope(coordinates, prefix=self.prefix, head_width=self.width // self.heads, turns=self.rope_turns)
        mask = self.sequence.keys(valid, prefix=self.prefix, tokens=coordinates.shape[1])
        return side | {"encoder_rope": self.sequence.table(rope), "encoder_mask": mask}

    def describe(self, x: Tensor, side: Side, *, width: int, learned: "LearnedPositions | None", sizes: Any) -> Tensor:
        """Tokens with what tells them apart: their position and, where they differ, their size."""
        positions = self.positions(side["coordinates"], width, learned)
        if positions is not None:
            x = x + positions.to(x.dtype)
        if isinstance(sizes, PixelPlaces):
            x = x + sizes(torch.cat([side["sizes"][..., -1:], side["coordinates"]], dim=-1)).to(x.dtype)
        elif sizes is not None:
            x = x + sizes(self.log_sizes(side["sizes"], side.get("valid")).to(x.dtype))
        return x

    def log_sizes(self, sizes: Tensor, valid: Tensor | None) -> Tensor:
        """Sizes in powers of two of a patch; 0 for padding."""
        return (sizes.clamp(min=1) / constants(self.patch, sizes.device)).log2() * (
            1.0 if valid is None else valid.unsqueeze(-1)
        )

    def embed(self, x: Tensor, side: Side) -> Tensor:
        x = self.patch_embed(x, side.get("variables"))  # B N D
        x = self.describe(x, side, width=self.width, learned=self.pos_embed, sizes=self.size_embed)
        if self.prefix_tokens is not None:
            prefix: Tensor = self.prefix_tokens
            if self.pos_embed is not None and self.pos_embed.cls is not None:
                prefix = prefix + nn.functional.pad(self.pos_embed.cls, (0, 0, 0, self.prefix - 1))
            x = torch.cat([prefix.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        return x if self.input_norm is None else self.input_norm(x)

    def stages(self) -> list[Stage]:
        """Embedding, blocks and final norm."""

        def run(block: nn.Module, x: Tensor, side: Side, drop_path: Tensor | None) -> Tensor:
            return block(x, side["encoder_rope"], drop_path, side["encoder_mask"])

        stages = [
            Stage("embed", self.embed, ("coordinates", "sizes", "valid", "variables"), self.embedding),
            *block_stages(self.blocks, run, ("coordinates", "valid")),
        ]
        if (norm := self.norm) is not None:
            stages.append(Stage("norm", lambda x, side: norm(x), uses=(norm,)))
        return stages

    @property
    def embedding(self) -> tuple[nn.Module | nn.Parameter | None, ...]:
        """The parts that embed() reads."""
        return (self.patch_embed, self.size_embed, self.prefix_tokens, self.pos_embed, self.input_norm)

    def flops(self, tokens: int) -> Flops:
        """Forward of one sample with so many embedded tokens, of all known variables."""
        one = self.config.block().flops(tokens + self.prefix, last_read=isinstance(self.blocks[0], ModulatedBlock))
        outside = self.patch_embed.flops(tokens // self.config.parts)
        if self.size_embed is not None:
            outside += 2.0 * tokens * self.size_embed.in_features * self.width
        return one * self.depth + Flops(outside=outside)


class EncodedModel(Model):
    """Base of the models that begin with the encoder."""

    needed: ClassVar[tuple[str, ...]] = ("channels",)  # keys of the config that must be known by now
    spared: ClassVar[tuple[str, ...]] = ()  # beside the encoder's own, see spared_from_decay()

    def __init__(self, c: Any, **options: Any):
        """`options` are the encoder's."""
        super().__init__()
        for key in self.needed:
            if getattr(c, key) is None:
                more = " (3 for colour images)" if key == "channels" else ", or data that tell"
                more += ", or name the variables" if hasattr(encoder_of(c), "variables") and key == "channels" else ""
                raise ValueError(f"{key} is not known; give it{more}")
        if c.shape is not None:
            c.check()
        self.config = c
        self.encoder = Encoder(encoder_of(c), ndim=c.ndim, channels=c.channels_in, shape=c.extent, **options)

    def encoder_stages(self) -> list[Stage]:
        return [stage.within("encoder") for stage in self.encoder.stages()]

    def derive(self, side: Side) -> Side:
        return self.encoder.derive(side)

    def blocks(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def drop_path_rates(self) -> list[float]:
        return spread_drop_path(self.encoder.config.drop_path, self.encoder.depth)

    def spared_from_decay(self) -> list[str]:
        return [*SPARED, *self.spared]

    def count_tokens(self) -> int:
        """Tokens of one sample of the configured shape, with all known variables."""
        if self.config.extent is None:
            raise ValueError("shape is not known; set model.shape to count FLOPs")
        return self.encoder.config.count_tokens(self.config.extent)


class LearnedPositions(nn.Module):
    """A trainable table over the grid, looked up by the tokens' own coordinates; it starts as the sin-cos table."""

    def __init__(self, width: int, c: EncoderConfig, shape: tuple[int, ...] | None, *, cls: bool = False):
        super().__init__()
        if shape is None:
            raise ValueError("learned positions need the size of the input: set model.shape")
        self.grid = c.grid(shape)

        def start() -> Tensor:
            return sincos(grid_coordinates(self.grid, (1,) * len(self.grid)) - 0.5, width)

        self.table = mark(nn.Parameter(torch.empty(math.prod(self.grid), width)), Table(start))
        self.cls = mark(nn.Parameter(torch.empty(1, width)), Constant(0.0)) if cls else None

    def forward(self, patches: Tensor) -> Tensor:
        index = torch.zeros(patches.shape[:-1], dtype=torch.long, device=patches.device)
        for axis, size in enumerate(self.grid):
            index = index * size + patches[..., axis].round().long()
        return self.table[index]


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
