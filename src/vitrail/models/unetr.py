"""UNETR: a vision transformer whose tokens, taken at four depths, a convolutional decoder turns into classes of voxels.

- Hatamizadeh et al. 2021, computed as MONAI does it, whose weights fit; any depth, any power-of-two patch, 1 to 3 axes
- taps after blocks (i + 1) * (depth // 4), counted from 0 (3, 6 and 9 of 12), and the last norm; the image itself
  is the finest skip
- four steps from the grid of tokens to voxels: 2 each for a patch of 16, others as layers.convolutions.upsampling says
- skips: false is four transposed convolutions and nothing else; decoder: linear is one layer and interpolation
- adaptive tokens and separate variables are brought to the grid first
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.convolutions import (
    ALL,
    ConvBlock,
    Join,
    Rise,
    channels_last,
    conv_flops,
    convolution,
    convolve,
    cropped,
    rise,
    scaled,
    step_up,
    upsampling,
)
from vitrail.layers.flops import Flops
from vitrail.layers.init import initialise_here
from vitrail.layers.patches import grid_of
from vitrail.layers.tokens import UniformTokens
from vitrail.models.config import EncoderConfig, ModelConfig
from vitrail.models.encoder import EncodedModel
from vitrail.models.model import Side, Stage
from vitrail.recipe import config, must

STEPS = 4
_INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


@config
class UNETRConfig(ModelConfig):
    output: ClassVar[str] = "pixels"
    origin: ClassVar[str] = "Hatamizadeh et al. 2021"
    wants_tree: ClassVar[bool] = True

    kind: Literal["unetr"] = "unetr"
    encoder: EncoderConfig
    decoder: Literal["conv", "linear"] = "conv"
    skips: bool = True  # of the conv decoder; this and the keys up to residual say nothing to the linear one
    features: int = 16  # channels at full resolution; twice as many at each of the three coarser ones
    norm: Literal["instance", "affine"] = "instance"  # affine: instance norm with a learned scale and shift
    residual: bool = True  # blocks of the decoder add their input
    ndim: int = 2
    channels: int | None = None  # default: as many as the data have variables
    classes: int | None = None  # with the background; default: as many as objective.names or the data name
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; default: data.crop

    def __post_init__(self) -> None:
        if self.ndim not in _INTERPOLATION:
            raise ValueError(f"ndim {self.ndim} must be 1, 2 or 3: there are no other convolutions")
        must("be at least 1", features=self.features, classes=self.classes)
        self.settle()
        if self.decoder == "linear":
            return
        assert self.encoder.depth is not None
        if self.skips and self.encoder.depth < STEPS:
            raise ValueError(
                f"encoder.depth {self.encoder.depth} has no room for three taps: use at least {STEPS}, or skips: false"
            )
        if any(p & (p - 1) for p in self.patch):
            raise ValueError(
                f"encoder.patch {list(self.patch)}: the conv decoder doubles sizes, so a patch must be a power of two "
                "along every axis; use such a patch, or decoder: linear"
            )

    def build(self) -> "UNETR":
        return UNETR(self)

    def in_slabs(self, parts: int) -> bool:
        """Tell whether so many ranks can have slabs of all maps."""
        uniform = isinstance(self.encoder.tokens, UniformTokens)
        return self.decoder == "conv" and uniform and self.extent is not None and self.grid()[0] >= parts

    @property
    def wants_image(self) -> bool:
        """Tell whether the model reads the image beside its tokens."""
        return self.decoder == "conv" and self.skips

    @property
    def patch(self) -> tuple[int, ...]:
        return self.encoder.patch_on(self.ndim)

    @property
    def size(self) -> tuple[int, ...]:
        assert self.extent is not None
        return self.extent

    def grid(self) -> tuple[int, ...]:
        """Cells of a patch along each axis."""
        return self.grid_for(self.size)

    def grid_for(self, size: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(self.encoder.tokens, UniformTokens):
            return grid_of(size, self.patch)
        return tuple(math.ceil(s / p) for s, p in zip(size, self.patch, strict=True))

    def taps(self) -> list[int]:
        """The blocks, counted from 0, whose output the decoder reads beside that of the last norm."""
        assert self.encoder.depth is not None
        return [(i + 1) * (self.encoder.depth // STEPS) for i in range(STEPS - 1)] if self.wants_image else []

    def widths(self, width: int) -> list[int]:
        """Channels before the first of the decoder's steps and after each."""
        return [width, *(self.features * 2**i for i in reversed(range(STEPS)))]

    def check(self) -> None:
        """Refuse what cannot be trained, once channels, classes and shape are known."""
        super().check()
        if not self.wants_image:
            return
        coarsest = [g * f for g, f in zip(self.grid(), upsampling(self.patch)[0], strict=True)]
        if math.prod(coarsest) < 2:
            raise ValueError(
                f"shape {list(self.size)} with encoder.patch {list(self.patch)} leaves a single voxel at the coarsest "
                "level, which instance norm turns to 0; use a larger crop, a smaller patch or skips: false"
            )


class UNETR(EncodedModel):
    """Called (`Model.forward` runs `stages()`) with patches [B, N, P*C], coordinates [B, N, ndim] and image [B, C, *S];
    gives logits [B, classes, *S].

    Without skips, and with the linear decoder, there is no image, and S is the configured shape (or the tree's).
    """

    config: UNETRConfig
    needed = ("channels", "classes")

    def __init__(self, c: UNETRConfig):
        super().__init__(c)
        kind = LinearDecoder if c.decoder == "linear" else SkipDecoder if c.skips else PlainDecoder
        self.decoder: LinearDecoder | SkipDecoder | PlainDecoder = kind(c, self.encoder.width)
        self.planes = ALL
        initialise_here(self)

    def derive(self, side: Side) -> Side:
        """`taps` gathers what the decoder will read; a pipeline sends it along."""
        return {"taps": []} | self.encoder.derive(side)

    def stages(self) -> list[Stage]:
        kept = {f"blocks.{index}" for index in self.config.taps()}

        def tapped(run: Callable[[Tensor, Side], Tensor]) -> Callable[[Tensor, Side], Tensor]:
            def run_and_keep(x: Tensor, side: Side) -> Tensor:
                x = run(x, side)
                side["taps"].append(x)
                return x

            return run_and_keep

        encoder = [
            (stage.more(tapped(stage.run), ("taps",)) if stage.name in kept else stage).within("encoder")
            for stage in self.encoder.stages()
        ]
        return [*encoder, *(stage.within("decoder") for stage in self.decoder.stages(self.to_maps))]

    def to_maps(self, x: Tensor, side: Side) -> Tensor:
        """Tokens [B, N, D], with those before the patches, to maps [B, D, *grid]; variables are averaged."""
        c, tree = self.config, side.get("tree")
        number = len(side.get("variables") or c.encoder.variables.known) if c.encoder.separate else 1  # type: ignore[union-attr]
        places = c.encoder.tokens.count(size_of(c, side), self.encoder.patch)
        x = x[:, self.encoder.prefix :]
        first, *rest = c.grid_for(size_of(c, side))
        wanted = given = self.planes.rows(first)
        if self.planes.parts == 1 or first % self.planes.parts:  # else the tokens here are those of the wanted planes
            x, given = self.sequence.whole(x, groups=number, tokens=places), range(first)
        if c.encoder.separate:
            x = x.unflatten(1, (number, -1))  # B V N D
            if tree is not None and len(tree.corner) != len(x):  # a tree for each variable
                maps = tree.to_grid(x.flatten(0, 1), self.encoder.patch[0]).unflatten(0, (-1, number))
                return channels_last(maps.mean(dim=1).movedim(-1, 1))
            x = x.mean(dim=1)
        if tree is not None:
            return channels_last(tree.to_grid(x, self.encoder.patch[0]).movedim(-1, 1))
        grid = (len(given), *rest)
        if math.prod(grid) != x.shape[1]:
            raise ValueError(
                f"{x.shape[1]} tokens do not fill the grid {list(grid)} of patches; give all tokens of the image"
            )
        maps = x.unflatten(1, grid)
        if wanted != given:
            maps = maps[:, wanted.start : wanted.stop]
        return channels_last(maps.movedim(-1, 1))

    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks()]

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape."""
        tokens = self.count_tokens()
        return self.encoder.flops(tokens) + self.decoder.flops(tokens)


def size_of(c: UNETRConfig, side: Side) -> tuple[int, ...]:
    """Voxels of the output: as told, or those of the image or the tree, or the configured ones."""
    if side.get("size") is not None:
        return side["size"]
    if side.get("image") is not None:
        return tuple(side["image"].shape[2:])
    if side.get("tree") is not None:
        return tuple(side["tree"].shape)
    if c.shape is None:
        raise ValueError("shape is not known; set model.shape, the size of the input in voxels")
    return c.size


ToMaps = Callable[[Tensor, Side], Tensor]


class SkipDecoder(nn.Module):
    """Four joins, from the last tokens up, with the taps (deepest first) and the image."""

    def __init__(self, c: UNETRConfig, width: int):
        super().__init__()
        assert c.channels is not None
        assert c.classes is not None
        self.config = c
        make: dict[str, Any] = {"residual": c.residual, "affine": c.norm == "affine"}
        self.factors = factors = upsampling(c.patch, STEPS)
        widths = c.widths(width)
        self.image = ConvBlock(c.ndim, c.channels, c.features, named=c.encoder.variables is not None, **make)
        # One for each tap, earliest tap first: it rises to where it is joined.
        self.skips = nn.ModuleList(
            Rise(width, widths[steps], factors[:steps], **make) for steps in reversed(range(1, STEPS))
        )
        self.ups = nn.ModuleList(
            Join(inputs, outputs, factor, **make)
            for inputs, outputs, factor in zip(widths[:-1], widths[1:], factors, strict=True)
        )
        self.out = convolution(c.ndim, c.features, c.classes, width=1, bias=True)

    def stages(self, to_maps: ToMaps) -> list[Stage]:
        def join_tap(index: int) -> Stage:
            def run(x: Tensor, side: Side) -> Tensor:
                tap = STEPS - 2 - index  # the latest tap first
                return self.ups[index](x, self.skips[tap](to_maps(side["taps"][tap], side)))

            uses = (self.ups[index], self.skips[STEPS - 2 - index])
            return Stage(f"up{index + 1}", run, ("taps", "size", "image", "tree", "variables"), uses)

        return [
            Stage("bottleneck", to_maps, ("size", "image", "tree", "variables")),
            *[join_tap(i) for i in range(STEPS - 1)],
            Stage(f"up{STEPS}", self.join_image, ("image", "variables"), (self.ups[-1], self.image)),
            Stage("out", lambda x, side: convolve(self.out, x), uses=(self.out,)),
        ]

    def join_image(self, x: Tensor, side: Side) -> Tensor:
        image = side.get("image")
        if image is None:
            raise ValueError("the image is missing: a UNETR with skips takes image=[B, C, *S] beside its tokens")
        return self.ups[-1](x, self.image(channels_last(image), side.get("variables")))

    def blocks(self) -> list[nn.Module]:
        return [self.image, *self.skips, *self.ups]

    def flops(self, tokens: int) -> Flops:
        c, size = self.config, self.config.grid()
        total = conv_flops(self.image, c.size) + sum(skip.flops(size) for skip in self.skips)  # type: ignore[operator]
        for step, up in enumerate(self.ups):
            finer = c.size if step == STEPS - 1 else scaled(size, self.factors[step])
            total += up.flops(size, finer)  # type: ignore[operator]
            size = finer
        return Flops(linear=total, outside=conv_flops(self.out, c.size))


class PlainDecoder(nn.Module):
    """Four transposed convolutions, from the last tokens alone: one linear map in all, as in UCF-VIT."""

    def __init__(self, c: UNETRConfig, width: int):
        super().__init__()
        assert c.classes is not None
        self.config = c
        self.factors, widths = upsampling(c.patch, STEPS), c.widths(width)
        self.ups = nn.ModuleList(
            step_up(inputs, outputs, factor)
            for inputs, outputs, factor in zip(widths[:-1], widths[1:], self.factors, strict=True)
        )
        self.out = convolution(c.ndim, c.features, c.classes, width=1, bias=True)

    def stages(self, to_maps: ToMaps) -> list[Stage]:
        def run_up(index: int) -> Stage:
            return Stage(f"up{index + 1}", lambda x, side: rise(self.ups[index], x), uses=(self.ups[index],))

        return [
            Stage("bottleneck", to_maps, ("size", "image", "tree", "variables")),
            *[run_up(i) for i in range(STEPS)],
            Stage(
                "out",
                lambda x, side: cropped(convolve(self.out, x), size_of(self.config, side)),
                ("size", "image", "tree"),
                (self.out,),
            ),
        ]

    def blocks(self) -> list[nn.Module]:
        return []

    def flops(self, tokens: int) -> Flops:
        size, total = self.config.grid(), 0.0
        for up, factor in zip(self.ups, self.factors, strict=True):
            total += conv_flops(up, size)
            size = scaled(size, factor)
        return Flops(outside=total + conv_flops(self.out, size))


class LinearDecoder(nn.Module):
    """Classes of every token by one layer, interpolated to voxels."""

    def __init__(self, c: UNETRConfig, width: int):
        super().__init__()
        assert c.classes is not None
        self.config = c
        self.head = nn.Linear(width, c.classes)

    def stages(self, to_maps: ToMaps) -> list[Stage]:
        def run(x: Tensor, side: Side) -> Tensor:
            maps = to_maps(self.head(x), side)  # B classes *grid
            size = scaled(tuple(maps.shape[2:]), self.config.patch)
            mode = _INTERPOLATION[self.config.ndim]
            return cropped(F.interpolate(maps, size=size, mode=mode), size_of(self.config, side))

        return [Stage("head", run, ("size", "image", "tree", "variables"), (self.head,))]

    def blocks(self) -> list[nn.Module]:
        return []

    def flops(self, tokens: int) -> Flops:
        prefix = int(self.config.encoder.cls_token) + self.config.encoder.registers
        return Flops(outside=2.0 * (tokens + prefix) * self.head.in_features * self.head.out_features)
