"""The configs that models share: the make of an encoder and its named sizes, and the size of a decoder.

Parameter-free: what is built from them is in encoder.py.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from vitrail.layers.block import BlockConfig, swiglu_hidden
from vitrail.layers.patches import grid_of, per_axis
from vitrail.layers.tokens import AdaptiveTokens, TokensConfig, UniformTokens, pairs_per_axis
from vitrail.layers.variables import VariablesConfig
from vitrail.models.model import encoder_of
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
