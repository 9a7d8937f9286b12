"""The encoder that all models share: tokens in, tokens out, in any number of dimensions.

- only the patches that are given are embedded; each comes with its own coordinates, adaptive ones with their size
- channels together, or as variables with tokenizers of their own that are aggregated
- positions: sin-cos, learned (starting as sin-cos), axial rotations (rope) or none
- LayerNorm or RMSNorm, before or after each branch; GELU or SwiGLU, grouped-query heads, QK-norm, LayerScale, drop path
- class token and registers before the patches
Parameter names are timm's where timm has them (patch_embed.proj, blocks.0.attn.qkv, ...).
"""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitrail.layers.block import Block, BlockConfig, make_norm
from vitrail.layers.constants import constants
from vitrail.layers.flops import Flops, self_block_flops
from vitrail.layers.init import Constant, Normal, Table, mark
from vitrail.layers.mlp import swiglu_hidden
from vitrail.layers.modulation import ModulatedBlock
from vitrail.layers.patches import grid_coordinates, grid_of, num_voxels, per_axis
from vitrail.layers.positions import inflated_rope_table, pairs_per_axis, rope_table, sincos
from vitrail.layers.sequence import WHOLE, TokenSequence
from vitrail.layers.tokens import AdaptiveTokens, TokensConfig, UniformTokens
from vitrail.layers.variables import Ids, VariableEmbed, VariablesConfig
from vitrail.models.model import Side, Stage, block_drop_path
from vitrail.recipe import config

Positions = Literal["sincos", "learned", "rope", "none"]

# What a named size stands for; "B/16" is B with 16-voxel patches.
SIZES: dict[str, dict[str, Any]] = {
    "Ti": {"width": 192, "depth": 12, "heads": 3},
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "H": {"width": 1280, "depth": 32, "heads": 16},
    "g": {"width": 1408, "depth": 40, "heads": 16, "hidden": 6144},
    "G": {"width": 1664, "depth": 48, "heads": 16, "hidden": 8192},
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


@config
class EncoderConfig:
    sizes: ClassVar[dict[str, dict[str, Any]]] = SIZES

    size: str | None = None  # "B" or "B/16"; the keys below override it
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch: int | tuple[int, ...] | None = None  # voxels: one number or one per axis
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_ratio: float | None = None  # hidden over width; default 4 for gelu, Llama's two thirds of it for swiglu
    hidden: int | None = None  # the hidden width itself
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-6
    bias: bool = True  # in the linear layers
    qk_norm: bool = False
    layer_scale: float | None = None  # its starting value
    drop_path: float = 0.0  # of the last block; earlier ones less
    positions: Positions = "sincos"
    theta: float = 100.0  # longest wavelength of rope over 2 pi, in patches
    rope: Literal["axial", "superposed"] = "axial"  # superposed: as with one axis fewer, and learned turns on the first
    rope_scale: float = 1.0  # of coordinates; DINOv3's weights want 4 pi over the patches along an axis
    rope_origin: Literal["first", "centre"] = "first"  # where tokens before the patches stand: first patch, or centre
    cls_token: bool = False
    cls_position: bool = True  # with learned positions, the class token has one too
    registers: int = 0
    patch_norm: bool = False  # LayerNorm of the patch's voxels and of its token (dual patch norm)
    input_norm: bool = False  # one more norm before the first block
    residual: Literal["pre", "post"] = "pre"  # blocks are x + f(norm(x)), or x + norm(f(x))
    tokens: TokensConfig = UniformTokens()
    variables: VariablesConfig | None = None  # channels known by name; null: all channels together

    def __post_init__(self) -> None:
        defaults = size_keys(self.size, self.sizes)
        for key in ("width", "depth", "heads", "patch", "hidden"):
            if getattr(self, key) is None and not (key == "hidden" and self.mlp_ratio is not None):
                if key not in defaults and key != "hidden":
                    raise ValueError(f"{key} is missing; give it, or a named size such as 'size: B/16'")
                object.__setattr__(self, key, defaults.get(key))
        check_heads(self.width, self.heads, self.kv_heads)
        check_mlp(self.width, self.mlp_ratio, self.hidden)
        check_drop_path(self.drop_path)
        assert self.depth is not None
        assert self.patch is not None
        if self.depth < 1:
            raise ValueError(f"depth {self.depth} must be at least 1")
        if min((self.patch,) if isinstance(self.patch, int) else self.patch, default=0) < 1:
            raise ValueError(f"patch {self.patch} must be at least 1 voxel along every axis")
        if self.eps < 0:
            raise ValueError(f"eps {self.eps} must not be negative")
        if self.theta <= 0:
            raise ValueError(f"theta {self.theta} must be above 0")
        if not self.rope_scale > 0:
            raise ValueError(f"rope_scale {self.rope_scale} must be above 0")
        if self.rope == "superposed" and self.positions != "rope":
            raise ValueError(f"rope: superposed belongs to positions: rope, not {self.positions}")
        if self.registers < 0:
            raise ValueError(f"registers {self.registers} must be at least 0")
        adaptive = self.tokens if isinstance(self.tokens, AdaptiveTokens) else None
        if adaptive is not None and self.positions == "learned":
            raise ValueError("positions: learned has no table for adaptive tokens; use sincos or rope")
        if adaptive is not None and adaptive.per_variable and not self.separate:
            raise ValueError(
                "tokens.per_variable: a tree for each variable gives tokens that hold one variable each; "
                "set variables.aggregate: none (and name the variables in variables.known)"
            )
        if self.patch_norm and self.variables is not None:
            raise ValueError("patch_norm is for channels that are embedded together; leave out patch_norm or variables")

    @property
    def separate(self) -> bool:
        """Whether each variable has tokens of its own."""
        return self.variables is not None and self.variables.aggregate == "none"

    def count_tokens(self, size: tuple[int, ...]) -> int:
        """Tokens of one sample of this size, with all known variables."""
        assert self.patch is not None
        places = self.tokens.count(size, per_axis(self.patch, len(size)))
        return places * len(self.variables.known) if self.variables is not None and self.separate else places

    def check_size(self, ndim: int, size: tuple[int, ...] | None) -> None:
        """Refuse widths and sizes that cannot work, once these are known."""
        assert self.width is not None
        assert self.heads is not None
        assert self.patch is not None
        if self.rope == "superposed" and ndim < 2:
            raise ValueError("rope: superposed needs at least two axes")
        check_positions(self.positions, self.width, self.heads, ndim - (self.rope == "superposed"))
        patch = per_axis(self.patch, ndim)
        if size is not None and isinstance(self.tokens, AdaptiveTokens):
            self.tokens.check(size, patch)
        elif size is not None:
            grid_of(size, patch)

    def block(self) -> BlockConfig:
        assert self.width is not None
        assert self.heads is not None
        return BlockConfig(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            hidden=hidden_width(self.width, self.mlp, self.mlp_ratio, self.hidden),
            mlp=self.mlp,
            norm=self.norm,
            eps=self.eps,
            bias=self.bias,
            qk_norm=self.qk_norm,
            layer_scale=self.layer_scale,
            residual=self.residual,
        )


def size_keys(size: str | None, sizes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys that a named size stands for; a number after a stroke is the patch."""
    if size is None:
        return {}
    name, _, patch = size.partition("/")
    if name not in sizes or ("/" in size and not (patch.isdigit() and int(patch))):
        raise ValueError(
            f"size {size!r} is unknown; use one of {', '.join(sizes)}, as in 'size: {next(iter(sizes))}/16'"
        )
    return sizes[name] | ({"patch": int(patch)} if patch else {})


def settle_channels(c: Any) -> None:
    """For the configs of models: axes and channels that make sense; named variables say how many there are."""
    if c.ndim < 1:
        raise ValueError(f"ndim {c.ndim} must be at least 1")
    known = getattr(c, "encoder", c).variables
    if known is not None and c.channels not in (None, len(known.known)):
        raise ValueError(
            f"channels {c.channels} contradicts the {len(known.known)} variables that are known; leave it out"
        )
    if known is not None:
        object.__setattr__(c, "channels", len(known.known))
    if c.channels is not None and c.channels < 1:
        raise ValueError(f"channels {c.channels} must be at least 1")


def hidden_width(width: int, mlp: str, ratio: float | None, hidden: int | None) -> int:
    if hidden is not None:
        return hidden
    if ratio is not None:
        return int(width * ratio)
    return 4 * width if mlp == "gelu" else swiglu_hidden(width)


def check_positions(positions: str, width: int, heads: int, ndim: int) -> None:
    """Refuse widths in which an axis would get no channel at all: positions would vanish silently."""
    room = {"rope": width // heads, "sincos": width, "learned": width}.get(positions)
    if room is not None and pairs_per_axis(room, ndim) < 1:
        what = "head width" if positions == "rope" else "width"
        raise ValueError(f"{what} {room} has no room for {positions} positions on {ndim} axes; use at least {2 * ndim}")


def check_heads(width: Any, heads: Any, kv_heads: Any = None) -> None:
    if min(width, heads) < 1 or width % heads:
        raise ValueError(f"width {width} must be a multiple of heads {heads}")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"heads {heads} must be a multiple of kv_heads {kv_heads}")


def check_mlp(width: Any, ratio: float | None, hidden: int | None) -> None:
    if hidden is not None and hidden < 1:
        raise ValueError(f"hidden {hidden} must be at least 1")
    if ratio is not None and int(width * ratio) < 1:
        raise ValueError(f"mlp_ratio {ratio} must be above 0, and give a width of {width} at least one hidden channel")


def check_drop_path(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"drop_path {rate} must be at least 0 and below 1")


def rope_turns(c: EncoderConfig, ndim: int, head_width: int) -> nn.Parameter | None:
    """Learned rotations along the first axis, from 0 on: the model starts as one that knows the other axes alone."""
    if c.rope != "superposed":
        return None
    pairs = pairs_per_axis(head_width, ndim - 1) * (ndim - 1)
    return mark(nn.Parameter(torch.empty(pairs)), Constant(0.0))


class PatchEmbed(nn.Module):
    """All channels of a patch through one linear layer."""

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
        block: type[nn.Module] = Block,
        norm: bool = True,
        embed_bias: bool | None = None,
    ):
        """`block` is the class of the repeated blocks; `embed_bias` None: as in the other linear layers."""
        super().__init__()
        assert c.width is not None
        assert c.depth is not None
        assert c.heads is not None
        assert c.patch is not None
        self.config = c
        self.patch = per_axis(c.patch, ndim)
        self.width, self.depth, self.heads = c.width, c.depth, c.heads
        c.check_size(ndim, shape)
        voxels = num_voxels(self.patch)
        bias = c.bias if embed_bias is None else embed_bias
        self.patch_embed: PatchEmbed | VariableEmbed
        if c.variables is None:
            normed = c.patch_norm
            self.patch_embed = PatchEmbed(
                voxels * channels, c.width, bias=bias and not normed, normed=normed, eps=c.eps
            )
        else:
            self.patch_embed = VariableEmbed(c.variables, voxels=voxels, width=c.width, heads=c.heads, bias=bias)
        # How large an adaptive token is, in powers of two of a patch.
        self.size_embed = nn.Linear(ndim, c.width) if isinstance(c.tokens, AdaptiveTokens) else None
        self.prefix = int(c.cls_token) + c.registers  # tokens that stand before the patches
        self.prefix_tokens = (
            mark(nn.Parameter(torch.empty(self.prefix, c.width)), Normal(0.02)) if self.prefix else None
        )
        learned, has_cls = c.positions == "learned", c.cls_token and c.cls_position
        self.pos_embed = LearnedPositions(c.width, self.patch, shape, cls=has_cls) if learned else None
        self.rope_turns = rope_turns(c, ndim, c.width // c.heads)
        if c.rope_origin == "centre" and shape is None:
            raise ValueError("rope_origin: centre needs the size of the input: set model.shape")
        # In patches from the first; coordinates stay as they are, since patches see only distances among themselves.
        self.origin = [0.0] * ndim
        if c.rope_origin == "centre" and shape is not None:
            self.origin = [(s / p - 1) / 2 for s, p in zip(shape, self.patch, strict=True)]
        self.input_norm = make_norm(c.norm, c.width, c.eps) if c.input_norm else None
        self.blocks = nn.ModuleList(block(c.block()) for _ in range(c.depth))
        self.norm = make_norm(c.norm, c.width, c.eps) if norm else None

    def rope(self, coordinates: Tensor, *, prefix: int, head_width: int, turns: Tensor | None) -> Tensor | None:
        """Rotation table for patches at these coordinates (voxels), after `prefix` tokens that are not turned.

        `turns` are the learned ones of superposed rotations, None for axial ones.
        """
        if self.config.positions != "rope":
            return None
        patches = self.to_patches(coordinates)
        if any(self.origin):
            patches = patches - constants(tuple(self.origin), patches)
        patches = nn.functional.pad(patches * self.config.rope_scale, (0, 0, prefix, 0))
        if turns is None:
            return rope_table(patches, head_width, self.config.theta)
        return inflated_rope_table(patches, head_width, self.config.theta, turns)

    def to_patches(self, coordinates: Tensor) -> Tensor:
        """Coordinates in voxels to units of patches, the first patch at 0."""
        return coordinates / constants(self.patch, coordinates) - 0.5

    def positions(self, coordinates: Tensor, width: int, learned: "LearnedPositions | None") -> Tensor | None:
        """What is added to tokens at these coordinates, None when nothing is."""
        if self.config.positions == "sincos":
            return sincos(self.to_patches(coordinates), width)
        if learned is not None:
            return learned(self.to_patches(coordinates))
        return None

    def derive(self, side: Side) -> Side:
        """What attention needs: rotations, and which tokens may be attended to."""
        coordinates, valid = side["coordinates"], side.get("valid")
        rope = self.rope(coordinates, prefix=self.prefix, head_width=self.width // self.heads, turns=self.rope_turns)
        mask = self.sequence.keys(valid, prefix=self.prefix, tokens=coordinates.shape[1])
        return side | {"encoder_rope": self.sequence.table(rope), "encoder_mask": mask}

    def describe(self, x: Tensor, side: Side, *, width: int, learned: "LearnedPositions | None", sizes: Any) -> Tensor:
        """Tokens with what tells them apart: their position and, where they differ, their size."""
        positions = self.positions(side["coordinates"], width, learned)
        if positions is not None:
            x = x + positions.to(x.dtype)
        if sizes is not None:
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

    def stages(self, first_block: int = 0) -> list[Stage]:
        """Embedding, blocks and final norm; `first_block` is where its rows begin in the drop-path table."""

        def run_block(block: nn.Module, index: int) -> Stage:
            return Stage(
                f"blocks.{index}",
                lambda x, side: block(
                    x, side["encoder_rope"], block_drop_path(side, first_block + index), side["encoder_mask"]
                ),
                ("coordinates", "valid", "drop_path"),
                (block,),
            )

        stages = [
            Stage("embed", self.embed, ("coordinates", "sizes", "valid", "variables"), self.embedding),
            *[run_block(block, i) for i, block in enumerate(self.blocks)],
        ]
        if (norm := self.norm) is not None:
            stages.append(Stage("norm", lambda x, side: norm(x), uses=(norm,)))
        return stages

    @property
    def embedding(self) -> tuple[nn.Module | nn.Parameter | None, ...]:
        """What embed() reads."""
        return (self.patch_embed, self.size_embed, self.prefix_tokens, self.pos_embed, self.input_norm)

    def flops(self, tokens: int) -> Flops:
        """Forward of one sample with so many embedded tokens, of all known variables."""
        block = self.config.block()
        one = self_block_flops(
            tokens=tokens + self.prefix,
            width=block.width,
            kv_width=block.width // block.heads * block.kv_heads,
            hidden=block.hidden,
            gated=block.mlp == "swiglu",
            last_read=block.scales or isinstance(self.blocks[0], ModulatedBlock),
        )
        positions = tokens
        if self.config.variables is not None and self.config.separate:
            positions = tokens // len(self.config.variables.known)
        outside = self.patch_embed.flops(positions)
        if self.size_embed is not None:
            outside += 2.0 * tokens * self.size_embed.in_features * self.width
        return one * self.depth + Flops(outside=outside)


class LearnedPositions(nn.Module):
    """A trainable table over the grid, looked up by the tokens' own coordinates; it starts as the sin-cos table."""

    def __init__(self, width: int, patch: tuple[int, ...], shape: tuple[int, ...] | None, *, cls: bool = False):
        super().__init__()
        if shape is None:
            raise ValueError("learned positions need the size of the input: set model.shape")
        self.grid = grid_of(shape, patch)

        def start() -> Tensor:
            return sincos(grid_coordinates(self.grid, (1,) * len(patch)) - 0.5, width)

        self.table = mark(nn.Parameter(torch.empty(math.prod(self.grid), width)), Table(start))
        self.cls = mark(nn.Parameter(torch.empty(1, width)), Constant(0.0)) if cls else None

    def forward(self, patches: Tensor) -> Tensor:
        index = torch.zeros(patches.shape[:-1], dtype=torch.long, device=patches.device)
        for axis, size in enumerate(self.grid):
            index = index * size + patches[..., axis].round().long()
        return self.table[index]
