"""The encoder that all models share: tokens in, tokens out, in any number of dimensions.

- only the patches that are given are embedded; each comes with its own coordinates, adaptive ones with their size
- channels together, or as variables with tokenizers of their own that are aggregated
- positions: sin-cos, learned (starting as sin-cos), axial rotations (rope) or none
- LayerNorm or RMSNorm, before or after each branch; GELU or SwiGLU, grouped-query heads, QK-norm, LayerScale, drop path
- class token and registers before the patches
Parameter names are timm's where timm has them (patch_embed.proj, blocks.0.attn.qkv, ...).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitrail.layers.attention import WHOLE, TokenSequence
from vitrail.layers.block import Block, BlockConfig, ModulatedBlock, make_norm, scale_by_depth, swiglu_hidden
from vitrail.layers.flops import Flops
from vitrail.layers.init import Constant, Normal, Table, constants, mark
from vitrail.layers.patches import (
    grid_coordinates,
    grid_of,
    inflated_rope_table,
    num_voxels,
    pairs_per_axis,
    per_axis,
    rope_table,
    sincos,
)
from vitrail.layers.tokens import AdaptiveTokens, TokensConfig, UniformTokens
from vitrail.layers.variables import Ids, VariableEmbed, VariablesConfig
from vitrail.models.model import Model, Side, Stage, block_stages, encoder_of, spread_drop_path
from vitrail.recipe import config, must

Positions = Literal["sincos", "learned", "rope", "none"]

# The make of an encoder, where neither the recipe nor its size says another.
MAKE: dict[str, Any] = {"mlp": "gelu", "norm": "layer", "bias": True, "positions": "sincos", "theta": 100.0}
LLAMA: dict[str, Any] = {"mlp": "swiglu", "norm": "rms", "bias": False, "positions": "rope", "theta": 500_000.0}

# The keys that a named size stands for; "B/16" is B with 16-voxel patches. UCF-B is UCF-VIT's, 2B and 8B are
# torchtitan-mae's.
SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"width": 192, "depth": 12, "heads": 3},
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "H": {"width": 1280, "depth": 32, "heads": 16},
    "g": {"width": 1408, "depth": 40, "heads": 16, "hidden": 6144},
    "G": {"width": 1664, "depth": 48, "heads": 16, "hidden": 8192},
    "UCF-B": {"width": 768, "depth": 12, "heads": 12, "positions": "learned"},
    "2B": {"width": 3072, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 11264, "patch": 8, **LLAMA},
    "8B": {"width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "patch": 8, **LLAMA},
}

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


SIZED: Any = None  # the default of keys that follow the size, or else MAKE


@config
class EncoderConfig:
    sizes: ClassVar[dict[str, dict[str, Any]]] = SIZES
    make: ClassVar[dict[str, Any]] = MAKE

    size: str | None = None  # "B" or "B/16"; the keys below override it
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch: int | tuple[int, ...] | None = None  # voxels: one number or one per axis
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    mlp: Literal["gelu", "swiglu"] = SIZED
    mlp_ratio: float | None = None  # hidden over width; default 4 for gelu, Llama's two thirds of it for swiglu
    hidden: int | None = None  # the hidden width itself
    norm: Literal["layer", "rms"] = SIZED
    eps: float = 1e-6
    bias: bool = SIZED  # in the linear layers
    qk_norm: bool = False
    layer_scale: float | None = None  # its starting value
    drop_path: float = 0.0  # of the last block; earlier ones less
    init: Literal["xavier", "depth_scaled"] = "xavier"  # Xavier's; or torchtitan's, see layers/block.py
    positions: Positions = SIZED
    theta: float = SIZED  # longest wavelength of rope over 2 pi, in patches
    rope: Literal["axial", "superposed"] = "axial"  # superposed: as with one axis fewer, and learned turns on the first
    rope_scale: float = 1.0  # of coordinates; DINOv3's weights want 4 pi over the patches along an axis
    rope_origin: Literal["first", "centre"] = "first"  # where tokens before the patches stand: first patch, or centre
    cls_token: bool = False
    cls_position: bool = True  # with learned positions, the class token has one too
    registers: int = 0
    patch_norm: bool = False  # LayerNorm of the patch's voxels and of its token (dual patch norm)
    patch_bias: bool | None = None  # in the layer that embeds patches; null: as `bias`, and none with patch_norm
    input_norm: bool = False  # one more norm before the first block
    residual: Literal["pre", "post"] = "pre"  # blocks are x + f(norm(x)), or x + norm(f(x))
    tokens: TokensConfig = UniformTokens()
    variables: VariablesConfig | None = None  # channels known by name; null: all channels together

    def __post_init__(self) -> None:
        adaptive = self.tokens if isinstance(self.tokens, AdaptiveTokens) else None
        known = {"kv_heads": None, **({"hidden": None} if self.mlp_ratio is None else {}), **self.make}
        placed = adaptive is not None and adaptive.told != "number"
        if adaptive is not None and adaptive.told == "pixels":
            known["positions"] = "none"  # which the layer of their pixels takes the place of
        sizes = self.sizes
        if placed:  # learned positions of a size have no table for trees
            sizes = {name: {key: one for key, one in s.items() if one != "learned"} for name, s in sizes.items()}
        fill_size(self, sizes, known)
        check_blocks(self)
        must("be at least 1", depth=self.depth)
        assert self.patch is not None
        if min((self.patch,) if isinstance(self.patch, int) else self.patch, default=0) < 1:
            raise ValueError(f"patch {self.patch} must be at least 1 voxel along every axis")
        must("not be negative", eps=self.eps)
        must("be above 0", rope_scale=self.rope_scale)
        if self.rope == "superposed" and self.positions != "rope":
            raise ValueError(f"rope: superposed belongs to positions: rope, not {self.positions}")
        must("be at least 0", registers=self.registers)
        if placed and self.positions == "learned":
            raise ValueError(
                "positions: learned has no table for the places of adaptive tokens; use sincos or rope, or set "
                "tokens.told: number"
            )
        if adaptive is not None and adaptive.per_variable and not self.separate:
            raise ValueError(
                "tokens.per_variable: a tree for each variable gives tokens that hold one variable each; "
                "set variables.aggregate: none (and name the variables in variables.known)"
            )
        if self.patch_norm and self.variables is not None:
            raise ValueError("patch_norm is for channels that are embedded together; leave out patch_norm or variables")

    @property
    def separate(self) -> bool:
        """Tell whether each variable has tokens of its own."""
        return self.variables is not None and self.variables.aggregate == "none"

    @property
    def parts(self) -> int:
        """Count the variables that have tokens of their own: 1 where a token holds all channels."""
        return len(self.variables.known) if self.variables is not None and self.separate else 1

    def patch_on(self, ndim: int) -> tuple[int, ...]:
        """Voxels of a patch along each of so many axes."""
        assert self.patch is not None
        return per_axis(self.patch, ndim)

    def count_tokens(self, size: tuple[int, ...]) -> int:
        """Tokens of one sample of this size, with all known variables."""
        return self.tokens.count(size, self.patch_on(len(size))) * self.parts

    def grid(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the places on a grid that tokens of an image of this size are told, for a table of them."""
        if isinstance(self.tokens, AdaptiveTokens):
            return (self.tokens.length, *(1 for _ in size[1:]))
        return grid_of(size, self.patch_on(len(size)))

    def check_size(self, ndim: int, size: tuple[int, ...] | None) -> None:
        """Refuse widths and sizes that cannot work, once these are known."""
        if self.rope == "superposed" and ndim < 2:
            raise ValueError("rope: superposed needs at least two axes")
        self.check_positions(self.block(), ndim)
        patch = self.patch_on(ndim)
        if size is not None and isinstance(self.tokens, AdaptiveTokens):
            self.tokens.check(size, patch)
        elif size is not None:
            grid_of(size, patch)

    def check_positions(self, block: BlockConfig, ndim: int) -> None:
        """Refuse blocks in which an axis would get no channel at all: positions would vanish silently."""
        head_width, ndim = block.width // block.heads, ndim - (self.rope == "superposed")
        room = {"rope": head_width, "sincos": block.width, "learned": block.width}.get(self.positions)
        if room is not None and pairs_per_axis(room, ndim) < 1:
            what = "head width" if self.positions == "rope" else "width"
            raise ValueError(
                f"{what} {room} has no room for {self.positions} positions on {ndim} axes; use at least {2 * ndim}"
            )

    def block(self) -> BlockConfig:
        assert self.width is not None
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(BlockConfig)}
        given["kv_heads"] = self.kv_heads or self.heads
        given["hidden"] = hidden_width(self.width, self.mlp, self.mlp_ratio, self.hidden)
        return BlockConfig(**given)


def fill_size(c: Any, sizes: dict[str, dict[str, Any]], optional: Mapping[str, Any]) -> None:
    """Give a config the keys that its named size stands for, where it does not say them itself.

    A number after a stroke is the patch. `optional` keys have a value for configs without a size, too.
    """
    known, like = dict(optional), "XL/2" if "XL" in sizes else "B/16" if "B" in sizes else next(iter(sizes), "...")
    if c.size is not None:
        name, _, patch = c.size.partition("/")
        if name not in sizes or ("/" in c.size and not (patch.isdigit() and int(patch))):
            raise ValueError(f"size {c.size!r} is unknown; use one of {', '.join(sizes)}, as in 'size: {like}'")
        known |= sizes[name] | ({"patch": int(patch)} if patch else {})
    for key in ("width", "depth", "heads", "patch", *optional):
        if getattr(c, key) is None:
            if key not in known:
                raise ValueError(f"{key} is missing; give it, or a named size such as 'size: {like}'")
            object.__setattr__(c, key, known[key])


class ModelConfig:
    """Base of the configs of models with an encoder; each has the keys ndim, channels and shape."""

    ndim: int
    channels: int | None
    shape: int | tuple[int, ...] | None

    def settle(self) -> None:
        """Refuse axes and channels that make no sense; named variables say how many channels there are."""
        must("be at least 1", ndim=self.ndim)
        known = encoder_of(self).variables
        if known is not None and self.channels not in (None, len(known.known)):
            raise ValueError(
                f"channels {self.channels} contradicts the {len(known.known)} variables that are known; leave it out"
            )
        if known is not None:
            object.__setattr__(self, "channels", len(known.known))
        must("be at least 1", channels=self.channels)

    @property
    def channels_in(self) -> int | None:
        """Channels of the images that go in."""
        return self.channels

    @property
    def extent(self) -> tuple[int, ...] | None:
        """Voxels of the input along each axis; None where they are not known."""
        return None if self.shape is None else per_axis(self.shape, self.ndim)

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        encoder_of(self).check_size(self.ndim, self.extent)


def hidden_width(width: int, mlp: str, ratio: float | None, hidden: int | None) -> int:
    if hidden is not None:
        return hidden
    if ratio is not None:
        return int(width * ratio)
    return 4 * width if mlp == "gelu" else swiglu_hidden(width)


def check_blocks(c: Any) -> None:
    """Refuse numbers of a stack of blocks that make no sense."""
    width, heads, kv_heads, ratio = c.width, c.heads, c.kv_heads, c.mlp_ratio
    if min(width, heads) < 1 or width % heads:
        raise ValueError(f"width {width} must be a multiple of heads {heads}")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"heads {heads} must be a multiple of kv_heads {kv_heads}")
    must("be at least 1", hidden=c.hidden)
    if ratio is not None and int(width * ratio) < 1:
        raise ValueError(f"mlp_ratio {ratio} must be above 0, and give a width of {width} at least one hidden channel")
    must("be above 0", theta=c.theta)
    must("be at least 0 and below 1", drop_path=c.drop_path)


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
            patches = patches - constants(tuple(self.origin), patches)
        patches = nn.functional.pad(patches * self.config.rope_scale, (0, 0, prefix, 0))
        theta = self.config.theta if theta is None else theta
        if turns is None:
            return rope_table(patches, head_width, theta)
        return inflated_rope_table(patches, head_width, theta, turns)

    def to_patches(self, coordinates: Tensor) -> Tensor:
        """Coordinates in voxels to units of patches, the first patch at 0."""
        return coordinates / constants(self.patch, coordinates) - 0.5

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
        return (sizes.clamp(min=1) / constants(self.patch, sizes)).log2() * (
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
