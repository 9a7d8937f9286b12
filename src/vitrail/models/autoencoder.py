"""A small convolutional autoencoder: images or volumes to latents of 1/2, 1/4 or 1/8 of the size, and back.

- residual blocks (norm over channels, 3-wide convolution, SiLU, 3-wide convolution), `depth` of them at each
  resolution; steps down and up are convolutions whose kernel is their stride; channels double with each step down
- everything is local, so that tiles are encoded alike wherever they were cut
- latents are bounded softly (limit * tanh(x / limit)), and noise may be added to them in training: their scale stays
  near 1, and the decoder learns to bear latents that are not exact
Shapes: B batch, C channels, S spatial sizes.
"""

import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.convolutions import (
    CONVOLUTIONS,
    channels_last,
    conv_flops,
    convolution,
    convolve,
    rise,
    step_up,
    upsampling,
)
from vitrail.layers.flops import Flops
from vitrail.layers.init import Constant, initialise_here, mark
from vitrail.layers.patches import per_axis
from vitrail.models.model import Model, Side, Stage
from vitrail.recipe import config

FACTORS = (1, 2, 4, 8)
EPS = 1e-6


@config
class AutoencoderConfig:
    output: ClassVar[str] = "reconstruction"
    origin: ClassVar[str] = "vitrail's own"

    kind: Literal["autoencoder"] = "autoencoder"
    ndim: int = 2
    factor: int | tuple[int, ...] = 4  # voxels to one of the latents, along every axis or one number an axis
    latent: int = 4  # channels of the latents
    width: int = 32  # channels at full resolution; twice as many at each coarser one
    depth: int = 1  # residual blocks at each resolution, in each half
    limit: float = 4.0  # that latents stay within
    channels: int | None = None  # default: as many as the data have variables
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop

    def __post_init__(self) -> None:
        if self.ndim not in CONVOLUTIONS:
            raise ValueError(f"ndim {self.ndim} must be 1, 2 or 3: there are no other convolutions")
        if any(f not in FACTORS for f in self.factors) or max(self.factors) < 2:
            raise ValueError(f"factor {self.factor} must be 2, 4 or 8, or one of these (or 1) for each axis")
        if min(self.latent, self.width, self.depth) < 1 or not self.limit > 0:
            raise ValueError(
                f"latent {self.latent}, width {self.width} and depth {self.depth} must be at least 1, and limit "
                f"{self.limit} above 0"
            )

    @property
    def factors(self) -> tuple[int, ...]:
        return per_axis(self.factor, self.ndim)

    @property
    def size(self) -> tuple[int, ...]:
        assert self.shape is not None
        return per_axis(self.shape, self.ndim)

    def grid(self, size: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Voxels of the latents along each axis, for images of this size (default: the configured one)."""
        size = self.size if size is None else size
        if len(size) != self.ndim or any(s % f for s, f in zip(size, self.factors, strict=True)):
            raise ValueError(f"{list(size)} voxels are no multiple of factor {list(self.factors)}; use another size")
        return tuple(s // f for s, f in zip(size, self.factors, strict=True))

    def steps(self) -> list[tuple[int, ...]]:
        """Factors of the steps up, the coarsest first."""
        return upsampling(self.factors, max(self.factors).bit_length() - 1)

    def check(self) -> None:
        """Refuse what cannot be trained, once channels and shape are known."""
        self.grid()

    def build(self) -> "Autoencoder":
        return Autoencoder(self)


class Autoencoder(Model):
    """forward(images [B, C, *S]) -> reconstructions [B, C, *S]; encode() and decode() are its halves."""

    config: AutoencoderConfig

    def __init__(self, c: AutoencoderConfig):
        super().__init__()
        if c.channels is None:
            raise ValueError("channels is not known; give it, or data that tell")
        if c.shape is not None:
            c.check()
        self.config = c
        self.encoder = Half(c, c.channels, c.latent, down=True)
        self.decoder = Half(c, c.latent, c.channels, down=False)
        initialise_here(self)

    def stages(self) -> list[Stage]:
        return [
            *(stage.within("encoder") for stage in self.encoder.stages()),
            Stage("latents", self.bound, ("noise",)),
            *(stage.within("decoder") for stage in self.decoder.stages()),
        ]

    def bound(self, x: Tensor, side: Side) -> Tensor:
        """Latents within the limit, with noise [B, latent, *S / factor] where it is given."""
        x = x.float()
        x = self.config.limit * torch.tanh(x / self.config.limit)
        return x if side.get("noise") is None else x + side["noise"]

    def encode(self, images: Tensor) -> Tensor:
        """Normalised images [B, C, *S] to latents [B, latent, *S / factor], float32."""
        self.config.grid(tuple(images.shape[2:]))  # refuses sizes that do not fit
        for stage in self.encoder.stages():
            images = stage.run(images, {})
        return self.bound(images, {})

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to normalised images [B, C, *S]."""
        for stage in self.decoder.stages():
            latents = stage.run(latents, {})
        return latents

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks]

    def inputs(self, images: Tensor, variables: Any = None) -> dict[str, Any]:
        """Return the inputs of forward(): the normalised images themselves."""
        self.config.grid(tuple(images.shape[2:]))  # refuses sizes that do not fit
        return {"x": images}

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape."""
        return self.encoder.flops(self.config.size) + self.decoder.flops(self.config.grid())

    def _refuse_unknown(self, side: Side, known: set[str]) -> None:
        super()._refuse_unknown({"coordinates": None, **side}, known | {"coordinates"})  # there are no tokens


class Half(nn.Module):
    """The encoder (steps down) or the decoder (steps up)."""

    def __init__(self, c: AutoencoderConfig, inputs: int, outputs: int, *, down: bool):
        super().__init__()
        steps = c.steps()[::-1] if down else c.steps()
        widths = [c.width * 2**level for level in range(len(steps) + 1)]
        widths = widths if down else widths[::-1]
        self.down, self.depth, self.factors = down, c.depth, steps
        self.embed = convolution(c.ndim, inputs, widths[0], bias=True)
        self.blocks = nn.ModuleList(Residual(c.ndim, width) for width in widths for _ in range(c.depth))
        make = step_down if down else step_up
        self.steps = nn.ModuleList(
            make(before, after, factor) for before, after, factor in zip(widths[:-1], widths[1:], steps, strict=True)
        )
        self.norm = ChannelNorm(widths[-1])
        self.out = convolution(c.ndim, widths[-1], outputs, width=1 if down else 3, bias=True)

    def stages(self) -> list[Stage]:
        found = [Stage("embed", lambda x, side: convolve(self.embed, channels_last(x)), uses=(self.embed,))]
        for index, block in enumerate(self.blocks):
            level, within = divmod(index, self.depth)
            if level and not within:
                found.append(self._step(level - 1))
            found.append(Stage(f"blocks.{index}", partial(_apply, block), uses=(block,)))
        last = Stage("out", lambda x, side: convolve(self.out, self.norm(x)), uses=(self.norm, self.out))
        return [*found, last]

    def _step(self, index: int) -> Stage:
        layer: Any = self.steps[index]

        def run(x: Tensor, side: Side) -> Tensor:
            return layer(channels_last(x.to(layer.weight.dtype))) if self.down else rise(layer, x)

        return Stage(f"steps.{index}", run, uses=(layer,))

    def flops(self, size: tuple[int, ...]) -> Flops:
        """Forward from maps of this size."""
        inside, outside = 0.0, conv_flops(self.embed, size)
        for index, block in enumerate(self.blocks):
            level, within = divmod(index, self.depth)
            if level and not within:
                factor = self.factors[level - 1]
                after = tuple(s // f if self.down else s * f for s, f in zip(size, factor, strict=True))
                # A kernel that is its stride is applied once for each voxel of the coarser map.
                outside += conv_flops(self.steps[level - 1], after if self.down else size)
                size = after
            inside += conv_flops(block, size)
        return Flops(linear=inside, outside=outside + conv_flops(self.out, size))


def step_down(inputs: int, outputs: int, factor: tuple[int, ...]) -> nn.Module:
    """`factor` voxels along each axis become one."""
    make: Any = CONVOLUTIONS[len(factor)]
    return make(inputs, outputs, factor, stride=factor, bias=False)


def _apply(block: nn.Module, x: Tensor, side: Side) -> Tensor:
    return block(x)


class ChannelNorm(nn.Module):
    """The channels of every voxel to a root mean square of 1, then scaled: what is far away does not count."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = mark(nn.Parameter(torch.empty(channels)), Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.movedim(1, -1), (x.shape[1],), self.weight.to(x.dtype), EPS).movedim(-1, 1)


class Residual(nn.Module):
    """Adds two convolutions of the normed maps to them; at the start it adds nothing."""

    def __init__(self, ndim: int, channels: int):
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.conv1 = convolution(ndim, channels, channels, bias=True)
        self.conv2 = convolution(ndim, channels, channels, bias=True)
        weight: nn.Parameter = self.conv2.weight  # type: ignore[assignment]
        mark(weight, Constant(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + convolve(self.conv2, F.silu(convolve(self.conv1, self.norm(x))))


def latent_shape(c: AutoencoderConfig, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return [C, *S] of the latents of an image of this size."""
    return (c.latent, *c.grid(size))


def num_latents(c: AutoencoderConfig) -> int:
    return math.prod(c.grid())
