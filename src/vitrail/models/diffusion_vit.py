"""Diffusion ViT: a plain encoder and decoder that denoise; the time is added to every token once (UCF-VIT's model).

- any number of dimensions; channels together, or as variables with tokenizers and output rows of their own
- the time's sines and cosines, interleaved and as wide as the encoder, go through two layers with a ReLU between
- the decoder is "transformer" (blocks of its own width) or "linear" (one layer)
- channels that condition (a coarse field, a neighbouring image) come after those that are denoised, and do not go out
- no dropout: the seed hides half of the time's hidden features at random in training, so that the model never knows
  the noise level well while it learns and sees other features when it samples; and random numbers are inputs here
"""

from typing import ClassVar, Literal

from torch import Tensor, nn

from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.modulation import TimeEmbed, check_times
from vitrail.layers.patches import per_axis
from vitrail.layers.tokens import UniformTokens
from vitrail.models.decoder import DecoderBlocks, TokenDecoder
from vitrail.models.dit import check_diffusion
from vitrail.models.encoder import SPARED, Encoder, EncoderConfig, settle_channels
from vitrail.models.model import Model, Side, Stage, spread_drop_path
from vitrail.recipe import config


@config
class DiffusionDecoderConfig(DecoderBlocks):
    kind: Literal["transformer", "linear"] = "transformer"


@config
class DiffusionViTConfig:
    output: ClassVar[str] = "denoised"
    origin: ClassVar[str] = "UCF-VIT's DiffusionVIT"

    kind: Literal["diffusion_vit"] = "diffusion_vit"
    encoder: EncoderConfig
    decoder: DiffusionDecoderConfig = DiffusionDecoderConfig()
    ndim: int = 2
    channels: int | None = None  # that are denoised; default: as many as the data have variables
    condition_channels: int = 0  # that only condition: they come after the others; the objective knows how many
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop
    time_steps: int = 1000  # times, scaled, are from 0 to it
    time_scale: float = 1.0  # times are multiplied by it; those of our objectives (steps, or 1000 times flow's) want 1

    def __post_init__(self) -> None:
        check_diffusion(self.time_scale, self.condition_channels)
        if self.time_steps < 1:
            raise ValueError(f"time_steps {self.time_steps} must be at least 1")
        if not isinstance(self.encoder.tokens, UniformTokens):
            raise ValueError("encoder.tokens: noise has no structure for an adaptive tree to follow; use kind: uniform")
        variables = self.encoder.variables
        if variables is not None and self.condition_channels:
            raise ValueError(
                "condition_channels are unnamed, but encoder.variables names every channel; use one of them"
            )
        settle_channels(self)

    @property
    def channels_in(self) -> int | None:
        """Channels of the images that go in: those to denoise, then those that condition."""
        return None if self.channels is None else self.channels + self.condition_channels

    @property
    def channels_out(self) -> int | None:
        return self.channels

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        self.encoder.check_size(self.ndim, None if self.shape is None else per_axis(self.shape, self.ndim))
        if self.decoder.kind != "linear":
            self.decoder.check(self.encoder, self.ndim)

    def build(self) -> "DiffusionViT":
        return DiffusionViT(self)


class DiffusionViT(Model):
    """forward(patches [B, N, P*C], coordinates=[B, N, ndim], times=[B]) -> [B, N, P*C]."""

    def __init__(self, c: DiffusionViTConfig):
        super().__init__()
        if c.channels_in is None or c.channels_out is None:
            raise ValueError("channels is not known; give it, or encoder.variables")
        c.check()
        self.config = c
        shape = None if c.shape is None else per_axis(c.shape, c.ndim)
        self.encoder = Encoder(c.encoder, ndim=c.ndim, channels=c.channels_in, shape=shape)
        width = self.encoder.width
        self.time_embed = TimeEmbed(width, width, scale=c.time_scale, order="interleaved", activation="relu")
        blocks = None if c.decoder.kind == "linear" else c.decoder
        self.decoder = TokenDecoder(blocks, self.encoder, c.channels_out, shape=shape)
        initialise_here(self)

    def derive(self, side: Side) -> Side:
        return self.decoder.derive(self.encoder.derive(side))

    def stages(self) -> list[Stage]:
        embed, *rest = self.encoder.stages()
        first = Stage(embed.name, self.embed, (*embed.needs, "times"), (*embed.uses, self.time_embed))
        decoder = self.decoder.stages(self.encoder.depth)
        return [*(s.within("encoder") for s in (first, *rest)), *(s.within("decoder") for s in decoder)]

    def embed(self, x: Tensor, side: Side) -> Tensor:
        x = self.encoder.embed(x, side)
        times = check_times(side.get("times"), x.shape[0], scale=self.config.time_scale, limit=self.config.time_steps)
        return x + self.time_embed(times).to(x.dtype).unsqueeze(1)

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks]

    def drop_path_rates(self) -> list[float]:
        return [*spread_drop_path(self.config.encoder.drop_path, self.encoder.depth), *self.decoder.rates]

    def spared_from_decay(self) -> list[str]:
        return list(SPARED)

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape; the time is embedded once a sample."""
        assert self.config.shape is not None
        tokens = self.config.encoder.count_tokens(per_axis(self.config.shape, self.config.ndim))
        return self.encoder.flops(tokens) + self.decoder.flops(tokens) + Flops(outside=self.time_embed.flops())
