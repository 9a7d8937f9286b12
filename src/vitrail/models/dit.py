"""Diffusion transformer: noisy patches, a time and a class in; noise, velocity or both noise and variance out.

- adaLN-Zero (Peebles & Xie): time and class modulate every block and the last layer; a fresh model answers exactly 0
- any number of dimensions; no class token, no pooling: the tokens that come in go out
- two makes: S, B, L and XL are facebookresearch/DiT (LayerNorm, GELU, sin-cos positions); 0.5B, 1B and 7B are
  TorchDiTan's (RMSNorm, SwiGLU, no biases in blocks, rope, a last layer without modulation). Keys given override both
- the condition flows through the blocks as one more token, which attention does not see
- channels that condition (a coarse field, a neighbouring image) come after those that are denoised, and do not go out
"""

from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from vitrail.layers.block import (
    BlockConfig,
    LabelEmbed,
    ModulatedBlock,
    TimeEmbed,
    check_times,
    join_condition,
    make_norm,
    modulate,
    modulated_norm,
    split_condition,
    zero_linear,
)
from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.patches import num_voxels
from vitrail.models.config import EncoderConfig, ModelConfig, Positions, fill_size
from vitrail.models.encoder import EncodedModel
from vitrail.models.model import Side, Stage
from vitrail.recipe import config, must

# What the sizes are made of, where the recipe does not say.
DIT: dict[str, Any] = {
    "mlp": "gelu",
    "norm": "layer",
    "eps": 1e-6,
    "bias": True,
    "positions": "sincos",
    "theta": 100.0,
    "final": "modulated",
    "label_dropout": 0.1,
}
DITAN: dict[str, Any] = {
    "mlp": "swiglu",
    "norm": "rms",
    "eps": 1e-5,
    "bias": False,
    "patch": 2,
    "positions": "rope",
    "theta": 10000.0,
    "final": "plain",
    "label_dropout": 0.05,
}

# "XL/2" is XL with 2-voxel patches
SIZES: dict[str, dict[str, Any]] = {
    "S": {"width": 384, "depth": 12, "heads": 6, **DIT},
    "B": {"width": 768, "depth": 12, "heads": 12, **DIT},
    "L": {"width": 1024, "depth": 24, "heads": 16, **DIT},
    "XL": {"width": 1152, "depth": 28, "heads": 16, **DIT},
    "0.5B": {"width": 1024, "depth": 24, "heads": 16, **DITAN},
    "1B": {"width": 1536, "depth": 32, "heads": 32, **DITAN},
    "7B": {"width": 2560, "depth": 60, "heads": 64, **DITAN},
}


class DenoiserConfig(ModelConfig):
    """Base of the configs of models that denoise, some of whose channels may only condition."""

    condition_channels: int
    time_scale: float

    def settle(self) -> None:
        super().settle()
        must("be above 0", time_scale=self.time_scale)
        must("be at least 0", condition_channels=self.condition_channels)

    @property
    def channels_in(self) -> int | None:
        """Channels of the images that go in: those to denoise, then those that condition."""
        return None if self.channels is None else self.channels + self.condition_channels

    @property
    def channels_out(self) -> int | None:
        return self.channels


@config
class DiTConfig(DenoiserConfig):
    output: ClassVar[str] = "denoised"
    origin: ClassVar[str] = "Peebles & Xie 2023 (S, B, L, XL); TorchDiTan (0.5B, 1B, 7B)"

    kind: Literal["dit"] = "dit"
    size: str | None = None  # "XL" or "XL/2"; the keys below override it
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch: int | tuple[int, ...] | None = None  # voxels: one number or one per axis
    kv_heads: int | None = None  # fewer than heads: grouped-query attention
    # These follow the size; without one they are facebookresearch/DiT's.
    mlp: Literal["gelu", "swiglu"] | None = None  # gelu is its tanh approximation here
    norm: Literal["layer", "rms"] | None = None
    affine: bool | None = None  # weights of the modulated norms' own; null: RMSNorm has them, LayerNorm none
    eps: float | None = None
    bias: bool | None = None  # in attention and MLP; embeddings and modulations always have one
    positions: Positions | None = None
    theta: float | None = None  # longest wavelength of rope over 2 pi, in patches
    final: Literal["modulated", "plain"] | None = None  # whether the condition modulates the last layer, too
    mlp_ratio: float | None = None  # hidden over width; default 4 for gelu, Llama's two thirds of it for swiglu
    hidden: int | None = None  # the hidden width itself
    qk_norm: bool = False
    init: Literal["xavier", "depth_scaled"] = "xavier"  # Xavier's; or torchtitan's, see layers/block.py
    drop_path: float = 0.0  # of the last block; earlier ones less
    ndim: int = 2
    channels: int | None = None  # that are denoised; default: as many as the data have variables
    condition_channels: int = 0  # that only condition: they come after the others; the objective knows how many
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop
    classes: int | None = None  # null: no conditioning on a class
    label_dropout: float | None = None  # labels hidden in training, for guidance without a classifier: 0.1 (ditan 0.05)
    learn_sigma: bool = False  # twice as many channels out: the noise, then where the variance of a step lies
    time_features: int = 256
    time_scale: float = 1.0  # of times, which are steps, or 1000 times those of flow; 0.001 gives SiT's, of 0 to 1

    def __post_init__(self) -> None:
        fill_size(self, SIZES, DIT)
        _ = self.encoder  # its own checks
        if self.classes is not None and self.classes < 1:
            raise ValueError(f"classes {self.classes} must be at least 1; leave it out to condition on no class")
        self.settle()
        assert self.label_dropout is not None
        if not 0 <= self.label_dropout <= 1:
            raise ValueError(f"label_dropout {self.label_dropout} must be from 0 to 1")
        if self.time_features < 2:
            raise ValueError(f"time_features {self.time_features} must be at least 2: a sine and a cosine")

    @property
    def encoder(self) -> EncoderConfig:
        """The part that all models share."""
        shared = ["width", "depth", "heads", "patch", "mlp_ratio", "hidden", "qk_norm", "drop_path", "kv_heads", "init"]
        shared += [key for key in DIT if key not in ("final", "label_dropout")]
        return EncoderConfig(**{key: getattr(self, key) for key in shared})

    @property
    def channels_out(self) -> int | None:
        return None if self.channels is None else self.channels * (2 if self.learn_sigma else 1)

    def build(self) -> "DiT":
        return DiT(self)


class DiT(EncodedModel):
    """forward(patches [B, N, P*C], coordinates=[B, N, ndim], times=[B], labels=[B]) -> [B, N, P*C], or P*2C.

    Without labels, or with the null label (the number of classes), a sample is of no class.
    """

    spared = ("label_embed.table",)

    def __init__(self, c: DiTConfig):
        block_of = partial(ModulatedBlock, affine=c.affine)
        super().__init__(c, block=block_of, norm=False, embed_bias=True)  # `bias` is of the blocks alone
        assert c.channels_out is not None
        width, voxels, block = self.encoder.width, num_voxels(self.encoder.patch), c.encoder.block()
        self.time_embed = TimeEmbed(c.time_features, width, scale=c.time_scale)
        self.label_embed = None if c.classes is None else LabelEmbed(c.classes, width)
        self.final = Final(block, voxels * c.channels_out, modulated=c.final == "modulated", affine=c.affine)
        initialise_here(self)

    def stages(self) -> list[Stage]:
        embed, *blocks = self.encoder_stages()
        return [
            embed.more(self.begin, ("times", "labels"), self.time_embed, self.label_embed),
            *blocks,
            Stage("final", lambda x, side: self.final(x), uses=(self.final,)),
        ]

    def begin(self, x: Tensor, side: Side) -> Tensor:
        """[condition; tokens]."""
        x = self.encoder.embed(x, side)
        return join_condition(self.condition(side, x.shape[0]).to(x.dtype), x)

    def condition(self, side: Side, batch: int) -> Tensor:
        """Return the condition that modulates the blocks, [B, D]."""
        condition = self.time_embed(check_times(side.get("times"), batch))
        labels = side.get("labels")
        if self.label_embed is not None:
            return condition + self.label_embed(labels, batch)
        if labels is not None:
            raise ValueError("labels were given, but the model knows no classes; set model.classes or leave them out")
        return condition

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape; conditions are computed once a sample, not once a token."""
        tokens = self.count_tokens()
        modulations = Flops(linear=2.0 * 6 * self.encoder.width**2) * self.encoder.depth
        outside = Flops(outside=self.time_embed.flops() + self.final.flops(tokens))
        return self.encoder.flops(tokens) + modulations + outside


class Final(nn.Module):
    """[condition; tokens] -> voxels: norm, modulated or plain, and a linear layer that starts at 0."""

    def __init__(self, c: BlockConfig, features: int, *, modulated: bool, affine: bool | None = None):
        super().__init__()
        norm = partial(modulated_norm, affine=affine) if modulated else make_norm
        self.norm = norm(c.norm, c.width, c.eps)
        self.modulation = zero_linear(c.width, 2 * c.width) if modulated else None
        self.proj = zero_linear(c.width, features)

    def forward(self, x: Tensor) -> Tensor:
        condition, x = split_condition(x)
        x = self.norm(x)
        if self.modulation is not None:
            shift, scale = self.modulation(nn.functional.silu(condition)).chunk(2, dim=-1)
            x = modulate(x, shift, scale)
        return self.proj(x)

    def flops(self, tokens: int) -> float:
        width = self.proj.in_features
        return 2.0 * width * (tokens * self.proj.out_features + (0 if self.modulation is None else 2 * width))
