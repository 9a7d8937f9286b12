"""Images as tokens, two ways behind one encoder: uniform patches, or the leaves of an adaptive tree.

Tokens know where they are and how large (in voxels, fp32), which of them are padding, and the way back to voxels.
With separate variables every variable has tokens of its own, and the sequence is variable by variable. Of a crop of
which just a slab was read, the tokens know all their places, but only the slab's values.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers import trees
from vitrail.layers.parts import WHOLE, Part, Slab, all_at_home, count_owners, cut
from vitrail.layers.patches import gather_tokens, grid_coordinates, grid_of, patchify, unpatchify
from vitrail.layers.scores import CannyScore, GradientScore, VarianceScore
from vitrail.layers.trees import Tree
from vitrail.recipe import config, kinds

if TYPE_CHECKING:
    from vitrail.draws import Draws


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

    def score(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.made.score(images, noise)


ScoreConfig = Annotated[CannyScore | GradientScore | VarianceScore | RegisteredScore, Field(discriminator="kind")]


@config
class UniformTokens:
    """Patches of one size on a grid."""

    kind: Literal["uniform"] = "uniform"

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


class Exchange(Protocol):
    """How rows of values come from the ranks that read them (parallel/exchange.py)."""

    def fetch(self, values: Tensor, index_by_part: list[Tensor]) -> Tensor:
        """The rows that this rank asks for; the rows of all ranks count one rank after the other."""


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
    slab: Slab | None = None  # of which alone there are values; None: of the whole images

    @property
    def number(self) -> int:
        """All tokens of a sample."""
        return self.coordinates.shape[1]

    def take(
        self, index: Tensor, part: Part = WHOLE, exchange: Exchange | None = None, *, at_home: bool = False
    ) -> Tensor:
        """Values [B, s, P*C] of a part of the tokens in a list [B, n]; every rank must be given the same list.

        Of a slab, rows that another rank has read come through the exchange. Where every rank has read what it needs,
        nothing is sent; a caller who knows that beforehand says `at_home`, and nothing is counted, which would wait for
        the device.
        """
        if self.slab is None:
            return gather_tokens(self.values, cut(index, part, groups=self.separate))
        if self.slab.part != part:
            raise ValueError(f"part {part} of a list was asked for, but of the images there is part {self.slab.part}")
        places, rows = self.number // self.separate, self.values.shape[1]
        each = rows // self.separate  # places of a slab, row-major: whole planes of the grid
        variable, place = index // places, index % places
        row = place // each * rows + variable * each + place % each
        if at_home:
            return gather_tokens(self.values, cut(row, part, groups=self.separate) - part.index * rows)
        wanted = [cut(row, Part(i, part.count), groups=self.separate) for i in range(part.count)]
        if exchange is not None:
            return exchange.fetch(self.values, wanted)
        if not all_at_home(count_owners(wanted, rows)):
            raise ValueError("values of tokens lie on other ranks; an exchange is needed to fetch them")
        return gather_tokens(self.values, wanted[part.index] - part.index * rows)

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

    def physical(self, spacing: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Centres and sizes [B, N, ndim] in the unit of the voxels' spacing."""
        scale = torch.tensor(spacing, dtype=torch.float32, device=self.coordinates.device)
        sizes = torch.tensor(self.patch, dtype=torch.float32, device=scale.device) if self.sizes is None else self.sizes
        return self.coordinates * scale, (sizes * scale).expand_as(self.coordinates)


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
    draws: "Draws | None" = None,
    slab: Slab | None = None,
) -> Tokens:
    """Tokens of images [B, C, *S].

    Trees grow on `scored` (the data as they were read, default the images themselves); `draws` vary them. Where the
    images are a slab of larger ones, there are coordinates of all tokens but only values of the slab's.
    """
    size, channels = tuple(images.shape[2:]), images.shape[1]
    if slab is not None:
        if slab.shape != size or not isinstance(c, UniformTokens):
            raise ValueError(f"images of {list(size)} are no slab {slab} of uniform tokens; read them whole")
        size = slab.size
    parts = channels if separate else 1
    if isinstance(c, UniformTokens):
        values = patchify(images.flatten(0, 1).unsqueeze(1) if separate else images, patch)  # B*V N P
        coordinates = grid_coordinates(size, patch, images.device).expand(len(images), -1, -1)
        if separate:
            values, coordinates = values.unflatten(0, (-1, parts)).flatten(1, 2), coordinates.repeat(1, parts, 1)
        return Tokens(values, coordinates, patch, size, separate=parts, slab=slab)

    c.check(size, patch)
    scored = images if scored is None else scored
    noise = draws.uniform("tree", c.score.num_draws) if draws is not None and c.score.num_draws else None
    if c.per_variable:
        scored = scored.flatten(0, 1).unsqueeze(1)
        noise = None if noise is None else noise.repeat_interleave(parts, dim=0)
    score = c.score.score(scored, noise)
    tree = trees.build_trees(score, length=c.length, patch=patch[0], min_leaf=c.min_leaf, fill=c.fill)
    if not separate:
        values = tree.serialise(images, resample=c.resample)
    else:
        each = images.flatten(0, 1).unsqueeze(1)
        values = for_each(tree, len(each)).serialise(each, resample=c.resample)  # B*V N P
        values = values.unflatten(0, (-1, parts)).flatten(1, 2)

    def in_sequence(x: Tensor) -> Tensor:
        """What belongs to each leaf, for every token of the sequence."""
        if c.per_variable:
            return x.unflatten(0, (-1, parts)).flatten(1, 2)
        return x.repeat(1, parts, *[1] * (x.ndim - 2))

    return Tokens(
        values,
        in_sequence(tree.coordinates),
        patch,
        size,
        sizes=in_sequence(tree.sizes),
        valid=in_sequence(tree.valid),
        tree=tree,
        separate=parts,
    )
