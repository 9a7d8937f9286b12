"""Diffusion ViT: a plain encoder and decoder that denoise; the time is added to every token once (UCF-VIT's model).

- any number of dimensions; channels together, or as variables with tokenizers and output rows of their own
- the time's sines and cosines, interleaved and as wide as the encoder, go through two layers with a ReLU between
- the decoder is "transformer" (blocks of its own width) or "linear" (one layer)
- channels that condition (a coarse field, a neighbouring image) come after those that are denoised, and do not go out
- no dropout: the seed hides half of the time's hidden features at random in training, so that the model never knows
  the noise level well while it learns and sees other features when it samples; and random numbers are inputs here
"""

from typing import ClassVar, Literal

from torch import Tensor

from vitrail.layers.block import TimeEmbed, check_times
from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.tokens import UniformTokens
from vitrail.models.config import DecoderBlocks, EncoderConfig
from vitrail.models.dit import DenoiserConfig
from vitrail.models.encoder import DecodedModel, TokenDecoder
from vitrail.models.model import Side, Stage
from vitrail.recipe import config, must


@config
class DiffusionDecoderConfig(DecoderBlocks):
    kind: Literal["transformer", "linear"] = "transformer"


@config
class DiffusionViTConfig(DenoiserConfig):
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
    time_scale: float = 1.0  # of times, which are steps, or 1000 times those of flow; 0.001 gives SiT's, of 0 to 1

    def __post_init__(self) -> None:
        must("be at least 1", time_steps=self.time_steps)
        if not isinstance(self.encoder.tokens, UniformTokens):
            raise ValueError("encoder.tokens: noise has no structure for an adaptive tree to follow; use kind: uniform")
        variables = self.encoder.variables
        if variables is not None and self.condition_channels:
            raise ValueError(
                "condition_channels are unnamed, but encoder.variables names every channel; use one of them"
            )
        self.settle()

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        super().check()
        if self.decoder.kind != "linear":
            self.decoder.check(self.encoder, self.ndim)

    def build(self) -> "DiffusionViT":
        return DiffusionViT(self)


class DiffusionViT(DecodedModel):
    """forward(patches [B, N, P*C], coordinates=[B, N, ndim], times=[B]) -> [B, N, P*C]."""

    def __init__(self, c: DiffusionViTConfig):
        super().__init__(c)
        assert c.channels_out is not None
        width = self.encoder.width
        self.time_embed = TimeEmbed(width, width, scale=c.time_scale, order="interleaved", activation="relu")
        blocks = None if c.decoder.kind == "linear" else c.decoder
        self.decoder = TokenDecoder(blocks, self.encoder, c.channels_out, shape=c.extent)
        initialise_here(self)

    def encoder_stages(self) -> list[Stage]:
        embed, *rest = super().encoder_stages()
        return [embed.more(self.begin, ("times",), self.time_embed), *rest]

    def begin(self, x: Tensor, side: Side) -> Tensor:
        x = self.encoder.embed(x, side)
        times = check_times(side.get("times"), x.shape[0], scale=self.config.time_scale, limit=self.config.time_steps)
        return x + self.time_embed(times).to(x.dtype).unsqueeze(1)

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape; the time is embedded once a sample."""
        tokens = self.count_tokens()
        return self.encoder.flops(tokens) + self.decoder.flops(tokens) + Flops(outside=self.time_embed.flops())
