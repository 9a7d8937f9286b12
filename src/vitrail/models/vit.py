"""Vision transformer: patches in, tokens or a pooled feature out, in any number of dimensions.

- only the patches that are given are embedded; each comes with its own coordinates
- positions: sin-cos, learned (starting as sin-cos), axial rotations (rope) or none
- LayerNorm or RMSNorm, GELU or SwiGLU, grouped-query heads, QK-norm, LayerScale, drop path
- class token, registers, mean pooling, or all tokens
Parameter names are timm's where timm has them (patch_embed.proj, blocks.0.attn.qkv, ...).
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.cost.flops import Flops, self_block_flops
from vitrail.layers.block import Block, BlockConfig, make_norm
from vitrail.layers.init import Normal, Table, initialise_here, mark
from vitrail.layers.mlp import swiglu_hidden
from vitrail.layers.patches import grid_coordinates, grid_of, num_voxels, per_axis
from vitrail.layers.positions import pairs_per_axis, rope_table, sincos
from vitrail.models.model import Model, Side, Stage, block_drop_path, spread_drop_path
from vitrail.recipe import config

Positions = Literal["sincos", "learned", "rope", "none"]

# name: width, depth, heads; "B/16" is B with 16-voxel patches
SIZES = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
    "g": (1408, 40, 16),
    "G": (1664, 48, 16),
}


@config
class EncoderConfig:
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
    cls_token: bool = False
    registers: int = 0

    def __post_init__(self) -> None:
        name, _, patch = (self.size or "").partition("/")
        if self.size is not None and (name not in SIZES or (patch and not patch.isdigit())):
            raise ValueError(f"size {self.size!r} is unknown; use one of {', '.join(SIZES)}, as in 'B' or 'B/16'")
        defaults = dict(zip(("width", "depth", "heads"), SIZES[name], strict=True)) if name else {}
        defaults |= {"patch": int(patch)} if patch else {}
        for key in ("width", "depth", "heads", "patch"):
            if getattr(self, key) is None:
                if key not in defaults:
                    raise ValueError(f"{key} is missing; give it, or a named size such as 'size: B/16'")
                object.__setattr__(self, key, defaults[key])
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
        if self.registers < 0:
            raise ValueError(f"registers {self.registers} must be at least 0")

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
        )


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


class PatchEmbed(nn.Module):
    def __init__(self, features: int, width: int, bias: bool):
        super().__init__()
        self.proj = nn.Linear(features, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.to(self.proj.weight.dtype))


class Encoder(nn.Module):
    """The encoder that all models share; a model runs its stages()."""

    def __init__(self, c: EncoderConfig, *, ndim: int, channels: int, shape: tuple[int, ...] | None = None):
        super().__init__()
        assert c.width is not None
        assert c.depth is not None
        assert c.heads is not None
        assert c.patch is not None
        self.config = c
        self.patch = per_axis(c.patch, ndim)
        self.width, self.depth, self.heads = c.width, c.depth, c.heads
        self.patch_embed = PatchEmbed(num_voxels(self.patch) * channels, c.width, c.bias)
        self.prefix = int(c.cls_token) + c.registers  # tokens that stand before the patches
        self.prefix_tokens = (
            mark(nn.Parameter(torch.empty(self.prefix, c.width)), Normal(0.02)) if self.prefix else None
        )
        self.pos_embed = LearnedPositions(c.width, self.patch, shape) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c.block()) for _ in range(c.depth))
        self.norm = make_norm(c.norm, c.width, c.eps)

    def rope(self, coordinates: Tensor, *, prefix: int, head_width: int) -> Tensor | None:
        """Rotation table for patches at these coordinates (voxels), after `prefix` tokens that are not turned."""
        if self.config.positions != "rope":
            return None
        patches = self.to_patches(coordinates)
        return rope_table(nn.functional.pad(patches, (0, 0, prefix, 0)), head_width, self.config.theta)

    def to_patches(self, coordinates: Tensor) -> Tensor:
        """Coordinates in voxels to units of patches, the first patch at 0."""
        return coordinates / torch.tensor(self.patch, dtype=torch.float32, device=coordinates.device) - 0.5

    def positions(self, coordinates: Tensor, width: int, learned: "LearnedPositions | None") -> Tensor | None:
        """What is added to tokens at these coordinates, None when nothing is."""
        if self.config.positions == "sincos":
            return sincos(self.to_patches(coordinates), width)
        if learned is not None:
            return learned(self.to_patches(coordinates))
        return None

    def derive(self, side: Side) -> Side:
        rope = self.rope(side["coordinates"], prefix=self.prefix, head_width=self.width // self.heads)
        return side | {"encoder_rope": rope}

    def embed(self, x: Tensor, side: Side) -> Tensor:
        x = self.patch_embed(x)  # B N D
        positions = self.positions(side["coordinates"], self.width, self.pos_embed)
        if positions is not None:
            x = x + positions.to(x.dtype)
        if self.prefix_tokens is not None:
            x = torch.cat([self.prefix_tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
        return x

    def stages(self, first_block: int = 0) -> list[Stage]:
        """Embedding, blocks and final norm; `first_block` is where its rows begin in the drop-path table."""

        def run_block(block: nn.Module, index: int) -> Stage:
            return Stage(
                f"blocks.{index}",
                lambda x, side: block(x, side["encoder_rope"], block_drop_path(side, first_block + index)),
                ("coordinates", "drop_path"),
            )

        return [
            Stage("embed", self.embed, ("coordinates",)),
            *[run_block(block, i) for i, block in enumerate(self.blocks)],
            Stage("norm", lambda x, side: self.norm(x)),
        ]

    def flops(self, tokens: int, features: int) -> Flops:
        """Forward of one sample with `tokens` embedded patches of `features` values each."""
        block = self.config.block()
        one = self_block_flops(
            tokens=tokens + self.prefix,
            width=block.width,
            kv_width=block.width // block.heads * block.kv_heads,
            hidden=block.hidden,
            gated=block.mlp == "swiglu",
        )
        return one * self.depth + Flops(outside=2.0 * tokens * features * self.width)


class LearnedPositions(nn.Module):
    """A trainable table over the grid, looked up by the tokens' own coordinates; it starts as the sin-cos table."""

    def __init__(self, width: int, patch: tuple[int, ...], shape: tuple[int, ...] | None):
        super().__init__()
        if shape is None:
            raise ValueError("learned positions need the size of the input: set model.shape")
        self.grid = grid_of(shape, patch)

        def start() -> Tensor:
            return sincos(grid_coordinates(self.grid, (1,) * len(patch)) - 0.5, width)

        self.table = mark(nn.Parameter(torch.empty(math.prod(self.grid), width)), Table(start))

    def forward(self, patches: Tensor) -> Tensor:
        index = torch.zeros(patches.shape[:-1], dtype=torch.long, device=patches.device)
        for axis, size in enumerate(self.grid):
            index = index * size + patches[..., axis].round().long()
        return self.table[index]


@config
class ViTConfig(EncoderConfig):
    kind: Literal["vit"] = "vit"
    ndim: int = 2
    channels: int = 3
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; only learned positions need it
    pool: Literal["cls", "mean", "tokens"] = "mean"
    classes: int = 0  # 0: features, no head

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool == "cls" and not self.cls_token:
            raise ValueError("pool: cls needs cls_token: true")

    def build(self) -> "ViT":
        return ViT(self)


class ViT(Model):
    """forward(patches [B, N, P*C], coordinates=[B, N, ndim]) -> features [B, D], logits [B, classes] or tokens."""

    def __init__(self, c: ViTConfig):
        super().__init__()
        self.config = c
        shape = None if c.shape is None else per_axis(c.shape, c.ndim)
        self.encoder = Encoder(c, ndim=c.ndim, channels=c.channels, shape=shape)
        self.head = nn.Linear(self.encoder.width, c.classes, bias=True) if c.classes else nn.Identity()
        initialise_here(self)

    def derive(self, side: Side) -> Side:
        return self.encoder.derive(side)

    def stages(self) -> list[Stage]:
        return [*self.encoder.stages(), Stage("head", self.pool_and_classify)]

    def pool_and_classify(self, x: Tensor, side: Side) -> Tensor:
        if self.config.pool == "cls":
            x = x[:, 0]
        else:
            x = x[:, self.encoder.prefix :]
            x = x.mean(dim=1) if self.config.pool == "mean" else x
        return self.head(x)

    def blocks(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def drop_path_rates(self) -> list[float]:
        return spread_drop_path(self.config.drop_path, self.encoder.depth)

    def spared_from_decay(self) -> list[str]:
        return ["prefix_tokens", "pos_embed.table"]

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape, all of its patches given."""
        assert self.config.shape is not None
        tokens = math.prod(grid_of(per_axis(self.config.shape, self.config.ndim), self.encoder.patch))
        head = 2.0 * self.encoder.width * self.config.classes * (tokens if self.config.pool == "tokens" else 1)
        return self.encoder.flops(tokens, self.encoder.patch_embed.proj.in_features) + Flops(outside=head)
