"""Images as tokens, two ways behind one encoder: uniform patches, or the leaves of an adaptive tree.

Tokens know where they are and how large (in voxels, fp32), which of them are padding, and the way back to voxels.
With separate variables every variable has tokens of its own, and the sequence is variable by variable.

Patches and positions in any number of dimensions. Positions come from the tokens' own coordinates, as sin-cos tables
and axial rotations: functions without buffers, so that there is nothing to forget after meta-device initialisation and
nothing for mixed precision to round. Their coordinates are in units of patches (the first patch at 0), fp32,
[..., N, ndim].

Shapes: B batch, C channels, S spatial sizes, N tokens, P voxels of a patch.

Where a batch is of slabs (Slab), the tokens know all their places, but only the slab's values. Inputs and targets are
of whole crops all the same: in the place of values they hold Rows, which say how those of any token are made.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers import trees
from vitrail.layers.init import constants
from vitrail.layers.patches import Slab, grid_of
from vitrail.layers.scores import CannyScore, GradientScore, Span, VarianceScore
from vitrail.layers.trees import Tree
from vitrail.recipe import config, kinds

if TYPE_CHECKING:
    from vitrail.draws import Draws


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """[B, C, *S] -> [B, N, P*C]: tokens row-major over the grid, voxels row-major in a token, channels last."""
    axes, grid, voxels, sizes = _axes_of(patch, tuple(x.shape[2:]))
    return rearrange(x, f"b c {axes} -> b ({grid}) ({voxels} c)", **sizes)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """[B, N, P*C] -> [B, C, *S]: the inverse of patchify."""
    axes, grid, voxels, sizes = _axes_of(patch, size)
    return rearrange(tokens, f"b ({grid}) ({voxels} c) -> b c {axes}", **sizes)


def _axes_of(patch: tuple[int, ...], size: tuple[int, ...]) -> tuple[str, str, str, dict[str, int]]:
    """Name the axes of images, the grid and a patch's voxels for rearrange(), and their sizes."""
    sizes = {f"g{i}": g for i, g in enumerate(grid_of(size, patch))} | {f"p{i}": p for i, p in enumerate(patch)}
    grid, voxels = ([f"{letter}{i}" for i in range(len(patch))] for letter in "gp")
    axes = " ".join(f"({g} {p})" for g, p in zip(grid, voxels, strict=True))
    return axes, " ".join(grid), " ".join(voxels), sizes


def grid_coordinates(size: tuple[int, ...], patch: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Centres of the uniform patches in voxels from the crop's origin, row-major [N, ndim], always fp32."""
    axes = [
        (torch.arange(g, dtype=torch.float32, device=device) + 0.5) * p
        for g, p in zip(grid_of(size, patch), patch, strict=True)
    ]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(patch))


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, N, D] (or of [N, D], the same for all samples) picked by index [B, n]."""
    if tokens.ndim == 2:
        return tokens[index]
    return tokens.gather(1, index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


@config
class RegisteredScore:
    """A score of the user's own: a config class registered in the slot "score", by --plugin or an entry point."""

    kind: Literal["registered"] = "registered"
    name: str
    options: dict[str, Any] = field(default_factory=dict)  # keys of that class

    @property
    def made(self) -> Any:
        cls = kinds.find("score", self.name, key="tokens.score.name")
        try:
            return cls(**self.options)
        except TypeError as error:
            raise UserError(f"tokens.score.options: {self.name!r} does not take {self.options} ({error})") from error

    @property
    def num_draws(self) -> int:
        return getattr(self.made, "num_draws", 0)

    def score(self, images: Tensor, noise: Tensor | None = None, span: Span | None = None) -> Tensor:
        return self.made.score(images, noise)  # as they were read


ScoreConfig = Annotated[CannyScore | GradientScore | VarianceScore | RegisteredScore, Field(discriminator="kind")]


@config
class UniformTokens:
    """Patches of one size on a grid."""

    kind: Literal["uniform"] = "uniform"
    told: ClassVar[Literal["place"]] = "place"  # what encoders are told of a token

    def count(self, size: tuple[int, ...], patch: tuple[int, ...]) -> int:
        return math.prod(grid_of(size, patch))


@config
class AdaptiveTokens:
    """Leaves of a quadtree or octree that is finest where its score is; each is resampled to one patch."""

    kind: Literal["adaptive"] = "adaptive"
    length: int  # leaves of a sample ("fixed_length"): 3n + 1 in two dimensions, 7n + 1 in three
    score: ScoreConfig = CannyScore()
    min_leaf: int = 2  # voxels: smaller cells are never made
    fill: bool = True  # spend the whole length; false: cells without any score stay whole, and the rest is padding
    resample: Literal["mean", "linear"] = "mean"
    per_variable: bool = False  # a tree for each variable; needs variables.aggregate: none
    told: Literal["place", "number", "pixels"] = "place"  # what encoders are told of a token, see models/encoder.py

    def __post_init__(self) -> None:
        if self.min_leaf < 1 or self.min_leaf & (self.min_leaf - 1):
            raise ValueError(f"tokens.min_leaf {self.min_leaf} must be a power of two: 1, 2, 4, ...")

    def count(self, size: tuple[int, ...], patch: tuple[int, ...]) -> int:
        return self.length

    def check(self, size: tuple[int, ...], patch: tuple[int, ...]) -> None:
        """Refuse what no tree can be."""
        if len(set(patch)) > 1:
            raise ValueError(f"patch {list(patch)}: adaptive tokens are cubes; give one number")
        if patch[0] & (patch[0] - 1):
            raise ValueError(f"patch {patch[0]} must be a power of two for adaptive tokens")
        trees.check_length(self.length, len(size), name="tokens.length")
        most = math.prod(math.ceil(s / self.min_leaf) for s in size)
        if self.length > most:
            raise ValueError(
                f"tokens.length {self.length} is more than an image of {list(size)} can have: at most {most} leaves of "
                f"tokens.min_leaf {self.min_leaf}; use fewer, or smaller leaves"
            )


TokensConfig = Annotated[UniformTokens | AdaptiveTokens, Field(discriminator="kind")]


class TokenList(NamedTuple):
    """Inputs of a model that have a row [B, n, ...] for each token of one list."""

    rows: tuple[str, ...]  # the first is always given, as a tensor
    valid: str  # the input that says which of the tokens count [B, n]; where it is missing, all do


TOKENS = TokenList(("coordinates", "x", "sizes"), "valid")
QUERIES = TokenList(("queries", "query_sizes"), "query_valid")


@dataclass(frozen=True)
class TokenAxes:
    """The inputs and targets of an objective that have a row for each token.

    Targets with rows are fields of a dataclass. It has a field `valid` too, [B, m] or None: rows that count. A field
    `lengths` holds how many rows each list of the output has.
    """

    inputs: tuple[TokenList, ...] = (TOKENS,)
    output: tuple[TokenList, ...] = ()  # lists that the output has rows of, one after another; none: it has no tokens
    targets: tuple[str, ...] = ()  # fields with the rows of the output; none: the loss needs the whole output
    planes: int = 1  # voxels along the first axis that prepare() must see together, beside those of a patch


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch; with separate variables, N is variables x places."""

    values: Tensor  # [B, N, P*C] voxels row-major, channels last; [B, V*N, P] with separate variables; or a slab's
    coordinates: Tensor  # [B, N, ndim] centres in voxels from the crop's origin, fp32
    patch: tuple[int, ...]
    size: tuple[int, ...]  # of the images
    sizes: Tensor | None = None  # [B, N, ndim] voxels, fp32; None: each as large as a patch
    valid: Tensor | None = None  # [B, N] false for padding; None: all are valid
    tree: Tree | None = None  # of adaptive tokens; [B*V] trees where each variable has its own
    separate: int = 1  # variables that have tokens of their own
    slab: Slab | None = None  # of which alone there are values; None: of the whole images, and nobody shares them

    @property
    def number(self) -> int:
        """Count all tokens of a sample."""
        return self.coordinates.shape[1]

    def take(
        self, *lists: Tensor, then: Callable[[Tensor, Tensor], Tensor] = lambda values, _: values, strata: int = 1
    ) -> Any:
        """Return the values [B, n, P*C] of the tokens in lists [B, n], one list after another; of all without a list.

        `then(values, index)` changes them, token by token. Of slabs there are Rows in their place. `strata` says that
        each list has the same number of tokens of so many equal parts of the crop, one part after another.
        """
        if self.slab is not None:
            return Rows(self, lists, then, strata)
        if not lists:
            return self.values
        index = lists[0] if len(lists) == 1 else torch.cat(lists, dim=1)
        return then(gather_tokens(self.values, index), index)

    def paint(self, values: Tensor, *, merge: bool = False) -> Tensor:
        """Token values [B, N, P*K] back in their place: [B, K, *S].

        Separate variables give [B, V*K, *S], or with `merge` their mean.
        """
        values = values.unflatten(1, (self.separate, -1)).flatten(0, 1)  # B*V N P*K
        if self.tree is None:
            images = unpatchify(values, self.patch, self.size)
        else:
            images = for_each(self.tree, values.shape[0]).paint(values)
        images = images.unflatten(0, (-1, self.separate))  # B V K *S
        return images.mean(dim=1) if merge else images.flatten(1, 2)

    def told(self, what: Literal["place", "number", "pixels"]) -> Tensor:
        """Coordinates [B, N, ndim] for an encoder: of their places, or as in a row along the first axis, in order."""
        if what != "number":
            return self.coordinates
        patch = constants(self.patch, self.coordinates.device)
        row = torch.arange(self.number // self.separate, device=patch.device).repeat(self.separate)
        places = torch.nn.functional.pad(row[:, None], (0, len(self.patch) - 1))
        return ((places + 0.5) * patch).expand_as(self.coordinates)

    def physical(self, spacing: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Centres and sizes [B, N, ndim] in the unit of the voxels' spacing."""
        scale = torch.tensor(spacing, dtype=torch.float32, device=self.coordinates.device)
        sizes = torch.tensor(self.patch, dtype=torch.float32, device=scale.device) if self.sizes is None else self.sizes
        return self.coordinates * scale, (sizes * scale).expand_as(self.coordinates)


@dataclass(frozen=True)
class Rows:
    """Values of tokens that are yet to be made, each where it is wanted (parallel/split.py)."""

    tokens: Tokens
    lists: tuple[Tensor, ...]  # which tokens [B, n], one list after another; none: all in their order
    then: Callable[[Tensor, Tensor], Tensor]  # what is made of their values and indices
    strata: int = 1


def for_each(tree: Tree, number: int) -> Tree:
    """A tree for each of so many images: variables that share one follow each other."""
    times = number // len(tree)
    return tree if times == 1 else tree[torch.arange(len(tree), device=tree.side.device).repeat_interleave(times)]


def tokenize(
    images: Tensor,
    c: UniformTokens | AdaptiveTokens,
    patch: tuple[int, ...],
    *,
    separate: bool = False,
    scored: Tensor | None = None,
    span: Span | None = None,
    draws: "Draws | None" = None,
    slab: Slab | None = None,
) -> Tokens:
    """Tokens of images [B, C, *S].

    Trees grow on `scored` (the data before they are normalised, default the images themselves), of which the values
    in `span` are black and white; `draws` vary them. Where the images are a slab of larger ones (or of as large ones,
    that are shared), there are coordinates of all tokens.
    """
    size, channels = tuple(images.shape[2:]), images.shape[1]
    if slab is not None:
        if slab.shape != size or (slab.part.count > 1 and not isinstance(c, UniformTokens)):
            raise ValueError(f"images of {list(size)} are no slab {slab} of uniform tokens; read them whole")
        size = slab.size
    parts = channels if separate else 1
    if isinstance(c, UniformTokens):
        values = patchify(images.flatten(0, 1).unsqueeze(1) if separate else images, patch)  # B*V N P
        coordinates = grid_coordinates(size, patch, images.device).expand(images.shape[0], -1, -1)
        if separate:
            values, coordinates = values.unflatten(0, (-1, parts)).flatten(1, 2), coordinates.repeat(1, parts, 1)
        return Tokens(values, coordinates, patch, size, separate=parts, slab=slab)

    c.check(size, patch)
    scored = images if scored is None else scored
    noise = draws.uniform("tree", c.score.num_draws) if draws is not None and c.score.num_draws else None
    if c.per_variable:
        scored = scored.flatten(0, 1).unsqueeze(1)
        span = None if span is None else (span[0].reshape(-1, 1), span[1].reshape(-1, 1))
        noise = None if noise is None else noise.repeat_interleave(parts, dim=0)
    score = c.score.score(scored, noise, span)
    # Attention without a mask is faster, so what is known to have no padding says none.
    full = trees.is_full(size, length=c.length, min_leaf=c.min_leaf, fill=c.fill)
    tree = trees.build_trees(score, length=c.length, patch=patch[0], min_leaf=c.min_leaf, fill=c.fill)
    if not separate:
        values = tree.serialise(images, resample=c.resample)
    else:
        each = images.flatten(0, 1).unsqueeze(1)
        values = for_each(tree, len(each)).serialise(each, resample=c.resample)  # B*V N P
        values = values.unflatten(0, (-1, parts)).flatten(1, 2)

    def in_sequence(x: Tensor) -> Tensor:
        """Repeat what belongs to each leaf for every token of the sequence."""
        if c.per_variable:
            return x.unflatten(0, (-1, parts)).flatten(1, 2)
        return x.repeat(1, parts, *[1] * (x.ndim - 2))

    return Tokens(
        values,
        in_sequence(tree.coordinates),
        patch,
        size,
        sizes=in_sequence(tree.sizes),
        valid=None if full else in_sequence(tree.valid),
        tree=tree,
        separate=parts,
        slab=slab,
    )


def pairs_per_axis(width: int, ndim: int) -> int:
    """Channel pairs that each axis gets; what is left over at the end stays untouched."""
    return width // (2 * ndim)


def sincos(coordinates: Tensor, width: int) -> Tensor:
    """The table of Vaswani et al., one slice of channels an axis, [..., N, width] in fp32; left-over channels are 0.

    In two dimensions the last axis (x) comes first, as in facebookresearch/mae, so that their weights fit; in three
    the order is that of the axes.
    """
    ndim = coordinates.shape[-1]
    pairs = pairs_per_axis(width, ndim)
    omega = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64, device=coordinates.device) / max(pairs, 1))
    if ndim == 2:
        coordinates = coordinates.flip(-1)
    angles = coordinates.double().unsqueeze(-1) * omega  # [..., N, ndim, pairs]
    table = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)
    return torch.nn.functional.pad(table, (0, width - table.shape[-1])).float()


def rope_table(coordinates: Tensor, head_width: int, theta: float) -> Tensor:
    """Cosines and sines of axial rotations [2, ..., N, 1, pairs] in fp32; axis i turns only the i-th slice of pairs."""
    pairs = pairs_per_axis(head_width, coordinates.shape[-1])
    frequencies = theta ** (-torch.arange(pairs, dtype=torch.float32, device=coordinates.device) / max(pairs, 1))
    angles = (coordinates.float().unsqueeze(-1) * frequencies).flatten(-2).unsqueeze(-2)
    return torch.stack([angles.cos(), angles.sin()])


def inflated_rope_table(coordinates: Tensor, head_width: int, theta: float, turns: Tensor) -> Tensor:
    """rope_table() of all axes but the first, and on top of it turns along the first, [2, ..., N, 1, pairs] in fp32.

    `turns` [pairs] are radians per patch, learned from 0 on: a model whose weights come from one axis fewer starts as
    exactly that model, since channels keep the axis that they had there.
    """
    cos, sin = rope_table(coordinates[..., 1:], head_width, theta)
    angles = (coordinates[..., :1].float() * turns.float()).unsqueeze(-2)
    return torch.stack([cos * angles.cos() - sin * angles.sin(), sin * angles.cos() + cos * angles.sin()])
