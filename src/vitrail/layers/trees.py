"""Adaptive patches: quadtrees, octrees and their kin in any number of dimensions, for a whole batch at once.

- the root is one cube, its side the longest side of the image rounded up to a power of two; a split cuts a cube into
  2^ndim, and those that lie wholly outside the image do not exist. So an image of one power of two has
  (2^ndim - 1) n + 1 leaves after n splits (3n + 1, 7n + 1), any other at most so many
- best-first splitting (always the leaf with the largest sum of scores) takes exactly the first nodes of the whole
  pyramid, sorted by score: a child never exceeds its parent. One top-k finds them; nothing loops over leaves
- equal scores go coarse to fine, then row-major. A parent comes before its children in that order even when their
  scores are equal (as when all edges of a node lie in one child), so every beginning of it is a tree
- nodes of `min_leaf` voxels stay whole, and the splitting goes on with the others
- on a GPU with Triton, trees of cubes and their tokens come from a few kernels (kernels/nodes.py): the same numbers
- leaves are in depth-first order (row-major among siblings), so neighbours in the sequence are neighbours in space
- a leaf larger than a token is averaged, a smaller one repeated: `serialise` after `paint` is a projection, exact
  where the image is constant in every token voxel. Leaves that overhang the image average what lies inside

Shapes: B batch, C channels, S spatial sizes, L leaves, p token side, P = p^ndim voxels of a token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vitrail.layers.kernels import adaptive_kernels

Resample = Literal["mean", "linear"]

_NOWHERE = 2**62  # behind every leaf in depth-first order
_PLAIN = (torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float16)  # that kernels average as fp32


@dataclass(frozen=True, eq=False)
class Tree:
    """The leaves of a batch of trees. Corners and sides say everything: a stored tree is rebuilt from them."""

    corner: Tensor  # [B, L, ndim] int64: first voxel of each leaf; 0 for padding
    side: Tensor  # [B, L] int64: voxels along each side of the cube, a power of two; 0 for padding
    shape: tuple[int, ...]  # of the image
    patch: int  # token side p, a power of two

    def __post_init__(self) -> None:
        _check_power("patch", self.patch)
        if self.side.ndim != 2 or self.corner.shape != (*self.side.shape, self.ndim):
            raise ValueError(
                f"corner {list(self.corner.shape)} and side {list(self.side.shape)} must be [B, L, {self.ndim}] and "
                f"[B, L] for an image of {list(self.shape)}"
            )

    def __len__(self) -> int:
        """Images in the batch."""
        return self.side.shape[0]

    def __getitem__(self, samples: slice | Tensor) -> "Tree":
        """The trees of some samples of the batch."""
        return replace(self, corner=self.corner[samples], side=self.side[samples])

    def to(self, device: torch.device | str) -> "Tree":
        return replace(self, corner=self.corner.to(device), side=self.side.to(device))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def length(self) -> int:
        """Leaves of every tree, padding included."""
        return self.side.shape[1]

    @property
    def num_voxels(self) -> int:
        """Voxels of a token, P."""
        return self.patch**self.ndim

    @property
    def valid(self) -> Tensor:
        """False for padding, [B, L]."""
        return self.side > 0

    @property
    def coordinates(self) -> Tensor:
        """Centres of the leaves in voxels from the image's first corner, [B, L, ndim] fp32; 0 for padding.

        Those of the whole cubes: the centre of a leaf that overhangs the image may lie outside.
        """
        return self.corner.float() + 0.5 * self.side.unsqueeze(-1)

    @property
    def sizes(self) -> Tensor:
        """Voxels along each axis, [B, L, ndim] fp32; 0 for padding."""
        return self.side.float().unsqueeze(-1).expand(-1, -1, self.ndim)

    # ------------------------------------------------------------ image -> tokens

    def serialise(self, images: Tensor, *, resample: Resample = "mean") -> Tensor:
        """[B, C, *S] -> [B, L, P*C] fp32, voxels row-major and channels last as in `patchify`; padding is 0.

        "mean" averages leaves larger than a token and repeats smaller ones. "linear" interpolates between the voxel
        centres of the leaf (half-pixel centres, no antialiasing): smoother in small leaves, for inputs only.
        Token voxels outside the image repeat its last ones.
        """
        self._check_images(images)
        if resample == "linear":
            return self._interpolate(images)
        if resample != "mean":
            raise ValueError(f"resample {resample!r} is not known; choose mean or linear")
        count = self._num_levels()
        kernels = adaptive_kernels("nodes", images)
        if kernels is not None and self._is_plain(images, count):
            return kernels.tokens(images, self.corner, self.side, self.patch, count)
        return self._as_tokens(_pick(_mean_pyramid(images, count), self._places(count)))

    # ------------------------------------------------------------ tokens -> image

    def paint(self, tokens: Tensor) -> Tensor:
        """[B, L, P*C] -> [B, C, *S]: every voxel takes its token voxel, or the mean of those that share it."""
        if tokens.ndim != 3 or tokens.shape[:2] != self.side.shape or tokens.shape[2] % self.num_voxels:
            raise ValueError(
                f"tokens {list(tokens.shape)} do not fit the tree: expected [{len(self)}, {self.length}, "
                f"{self.num_voxels} * channels]"
            )
        painted: Tensor = _Paint.apply(tokens, self)
        return painted

    def to_grid(self, features: Tensor, patch: int) -> Tensor:
        """Leaf features [B, L, D] on the uniform grid of `patch`-voxel cells, [B, *grid, D].

        A leaf is repeated over the cells that it covers; leaves that share a cell are averaged by their volume inside
        the image: what painting the features and averaging each cell would give.
        """
        _check_power("patch", patch)
        if features.ndim != 3 or features.shape[:2] != self.side.shape:
            raise ValueError(
                f"features {list(features.shape)} do not fit the tree: expected [{len(self)}, {self.length}, width]"
            )
        base, device = _log2(patch), self.side.device
        levels = _levels(self.shape, base, max(base, _top(self.shape)), device)
        level, batch = _exponent(self.side), torch.arange(len(self), device=device).unsqueeze(1)

        # Leaves of at least a cell write their numbers at their own level of a pyramid, from where they trickle down.
        row = (level - base).clamp(min=0)
        place = torch.where(level >= base, levels.flat(row, self.corner >> (row + base).unsqueeze(-1)), levels.size)
        owner = _trickle_down(place, torch.arange(self.length, device=device).expand_as(place), levels, self.length)
        padded = functional.pad(features, (0, 0, 0, 1))  # cells without such a leaf take the zeros at the end
        # Advanced indexing and index_put, not gather and index_add: they sum in a fixed order on every device.
        large = padded[batch, owner]  # [B, cells, D]

        # Smaller leaves are added to their cell, each with its share of the cell's voxels; padding has none.
        cell = self.corner >> base
        inside = (levels.shape - self.corner).minimum(self.side.unsqueeze(-1)).prod(-1)
        room = (levels.shape - (cell << base)).clamp(max=patch).prod(-1)
        share = torch.where(level < base, inside / room, 0).to(features.dtype)
        place = torch.where(level < base, levels.flat(torch.zeros_like(level), cell), 0)
        small = torch.zeros_like(large).index_put((batch, place), features * share.unsqueeze(-1), accumulate=True)
        return (large + small).unflatten(1, levels.grids[0])

    # ------------------------------------------------------------ inside

    def _num_levels(self) -> int:
        """Levels of the image's mean pyramid that leaves may need: averages over 1, 2, 4, ... voxels a side."""
        most = _top(self.shape)
        if self.side.device.type == "cpu" and self.side.numel():  # elsewhere, looking would wait for the device
            most = int(self.side.max()).bit_length() - 1
        return 1 + max(0, most - _log2(self.patch))

    def _is_plain(self, images: Tensor, count: int) -> bool:
        """Whether the kernels can serialise them: no gradient wanted, and every cell of every level is whole."""
        wants_gradient = images.requires_grad and torch.is_grad_enabled()
        whole = all(size % 2 ** (count - 1) == 0 for size in self.shape)
        return whole and self.ndim <= 3 and not wants_gradient and images.dtype in _PLAIN

    def _places(self, count: int, *, drop: bool = False) -> Tensor:
        """Where in the flat mean pyramid of so many levels each token voxel lies, [B, L*P].

        Token voxels outside the image lie where its last ones do, or with `drop` at one place behind the pyramid, as
        does padding.
        """
        levels = _levels(self.shape, 0, count - 1, self.side.device)
        level = (_exponent(self.side) - _log2(self.patch)).clamp(min=0)  # [B, L]
        span = (self.side >> level).unsqueeze(-1)  # voxels of that level along the leaf: p, or fewer in small leaves
        step = torch.arange(self.patch, device=span.device) * span >> _log2(self.patch)  # [B, L, p]
        terms = []
        for axis in range(self.ndim):
            place = (self.corner[..., axis] >> level).unsqueeze(-1) + step
            last = levels.grid[level, axis].unsqueeze(-1) - 1
            term = place.minimum(last) * levels.stride[level, axis].unsqueeze(-1)
            terms.append(torch.where((place <= last) & (span > 0), term, levels.size) if drop else term)
        terms[0] = terms[0] + levels.offset[level].unsqueeze(-1)
        index = _outer(torch.add, terms).flatten(1)
        return index.clamp(max=levels.size) if drop else index

    def _owners(self) -> Tensor:
        """For each voxel of the image its place in the tokens' own mean pyramid, [B, V]; see `_Paint`."""
        count, device = self._num_levels(), self.side.device
        offset, numbers = 0, torch.zeros((), dtype=torch.int64, device=device)
        shrink = (_log2(self.patch) - _exponent(self.side)).clamp(min=0).unsqueeze(-1)  # [B, L, 1]: p = side * 2^shrink
        leaf = torch.arange(self.length, device=device).unsqueeze(-1)
        for level in range(_log2(self.patch) + 1):
            side = self.patch >> level
            step = torch.arange(self.patch, device=device) >> level
            inner = _outer(torch.add, [(step * side**axis)[None, None] for axis in reversed(range(self.ndim))])
            numbers = torch.where(shrink == level, offset + leaf * side**self.ndim + inner, numbers)
            offset += self.length * side**self.ndim
        levels = _levels(self.shape, 0, count - 1, device)
        return _trickle_down(self._places(count, drop=True), numbers.flatten(1), levels, offset)

    def _num_image_voxels(self) -> Tensor:
        """How many voxels of the image each token voxel stands for, [B, L, P]: 1/4 where four share one, 0 outside."""
        ratio = (self.side / self.patch).unsqueeze(-1)
        step = (torch.arange(self.patch, device=ratio.device) * ratio).floor()  # [B, L, p]
        counts = []
        for axis, size in enumerate(self.shape):
            left = (size - self.corner[..., axis].unsqueeze(-1) - step).clamp(min=0)
            counts.append(left.minimum(ratio.clamp(min=1)) * ratio.clamp(max=1))
        return _outer(torch.mul, counts)

    def _interpolate(self, images: Tensor) -> Tensor:
        """A weighted sum of the 2^ndim voxels around each sampling point, kept inside the leaf."""
        step = torch.arange(self.patch, device=self.side.device)
        point = ((step + 0.5) * (self.side / self.patch).unsqueeze(-1) - 0.5).clamp(min=0)  # [B, L, p]
        before = point.long()
        after = (before + 1).minimum(self.side.unsqueeze(-1) - 1).clamp(min=0)
        ends = ((before, 1 - (point - before)), (after, point - before))
        flat = images.flatten(2)
        total = torch.zeros((), dtype=torch.promote_types(images.dtype, torch.float32), device=images.device)
        for corner in product(ends, repeat=self.ndim):
            places, shares = [], []
            for axis, (place, share) in enumerate(corner):
                place = (self.corner[..., axis].unsqueeze(-1) + place).clamp(max=self.shape[axis] - 1)
                places.append(place * math.prod(self.shape[axis + 1 :]))
                shares.append(share.to(total.dtype))
            weight = _outer(torch.mul, shares).flatten(1).unsqueeze(1)
            total = total + weight * _pick(flat, _outer(torch.add, places).flatten(1))
        return self._as_tokens(total)

    def _as_tokens(self, voxels: Tensor) -> Tensor:
        """[B, C, L*P] -> [B, L, P*C], padding 0."""
        tokens = voxels.unflatten(2, (self.length, -1)).permute(0, 2, 3, 1).flatten(2)
        return tokens.masked_fill(~self.valid.unsqueeze(-1), 0)

    def _check_images(self, images: Tensor) -> None:
        if images.ndim != self.ndim + 2 or images.shape[0] != len(self) or images.shape[2:] != self.shape:
            raise ValueError(
                f"images {list(images.shape)} do not fit the tree: expected [{len(self)}, channels, "
                f"{', '.join(map(str, self.shape))}]"
            )


class _Paint(torch.autograd.Function):
    """One gather per voxel of the image; the gradient is the same walk backwards, through the mean pyramid.

    So it sums in a fixed order, where the gradient of a gather would add up thousands of voxels by atomics.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, tree: Tree) -> Tensor:
        ctx.tree, ctx.dtype = tree, tokens.dtype
        level = tokens.unflatten(2, (tree.num_voxels, -1)).movedim(3, 1)  # [B, C, L, P]
        level = level.unflatten(3, (tree.patch,) * tree.ndim)
        parts = [level.flatten(2)]
        while level.shape[-1] > 1:  # the token's own mean pyramid, for leaves smaller than it
            for axis in range(3, level.ndim):
                level = _halve(level, axis, 0.5)
            parts.append(level.flatten(2))
        parts.append(level.new_zeros(*level.shape[:2], 1))  # what no leaf covers
        return _pick(torch.cat(parts, dim=2), tree._owners()).unflatten(2, tree.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        tree: Tree = ctx.tree
        means = tree.serialise(gradients[0]).unflatten(2, (tree.num_voxels, -1))  # [B, L, P, C]
        return (means * tree._num_image_voxels().unsqueeze(-1)).flatten(2).to(ctx.dtype), None


# ---------------------------------------------------------------- building


def build_trees(score: Tensor, *, length: int, patch: int, min_leaf: int = 2, fill: bool = True) -> Tree:
    """Trees of at most `length` leaves for scores [B, *S]: split where most of the score is.

    Nodes of `min_leaf` voxels are never split. `fill` spends all of `length` even where nothing is scored; without it
    nodes of score 0 stay whole. What is left of the sequence is padding. Scores are finite and not negative: others
    are refused on the CPU; on other devices, where looking would wait for them, they count as 0.
    """
    batch, ndim, shape, device = score.shape[0], score.ndim - 1, tuple(score.shape[1:]), score.device
    if ndim < 1 or 0 in score.shape:
        raise ValueError(f"score {list(score.shape)} must be [B, *S] with at least one image, one axis and one voxel")
    check_length(length, ndim)
    _check_power("patch", patch)
    _check_power("min_leaf", min_leaf)
    score = score.float()
    finest, top = _log2(min_leaf) + 1, _top(shape)
    cubic = all(size == 2**top for size in shape)
    # In a cube each split gains 2^ndim - 1 leaves.
    fits = cubic and ndim <= 3 and finest <= min(top, 2) and length > 1
    kernels = adaptive_kernels("nodes", score) if fits else None
    if kernels is not None:
        keys = kernels.node_keys(score, finest, top)
        least, index = keys.topk(min((length - 1) // (2**ndim - 1), keys.shape[1]), dim=1)  # [B, K], best first
        corner, side = kernels.leaves(keys, index, least[:, -1], finest, top, ndim, length, fill)
        return Tree(corner, side, shape, patch)
    score = _check_score(score)
    if finest > top or length == 1:  # the root cannot be split, or need not be
        side = functional.pad(torch.full((batch, 1), 2**top, device=device), (0, length - 1))
        return Tree(side.new_zeros(batch, length, ndim), side, shape, patch)

    # The nodes that may be split, coarse to fine and row-major, each with its sum of scores.
    nodes = _levels(shape, finest, top, device, coarse_first=True)
    sums = _sum_pyramid(score, nodes.grids, 2**finest)  # [B, M]
    # Floats that are not negative sort as their bits do; the node's place behind them settles equal scores.
    keys = (sums.view(torch.int32).long() << 32) | (2**31 - 1 - torch.arange(nodes.size, device=device))
    # In a cube each split gains 2^ndim - 1 leaves; else one or more, or none at the last node of each level.
    most = (length - 1) // (2**ndim - 1) if cubic else length - 1 + len(nodes.grids)
    index = keys.topk(min(most, nodes.size), dim=1).indices  # [B, K], best first

    row = torch.bucketize(index, nodes.offset, right=True) - 1  # level of each node, 0 the coarsest
    place = (index - nodes.offset[row]).unsqueeze(-1) // nodes.stride[row] % nodes.grid[row]  # [B, K, ndim]
    child = 2 * place.unsqueeze(2) + _children(ndim, device)  # [B, K, 2^ndim, ndim], in units of their side
    side = (2 ** (top - 1) >> row).unsqueeze(-1).expand(child.shape[:-1])
    corner = child * side.unsqueeze(-1)
    exists = (corner < nodes.shape).all(-1)

    chosen = torch.ones_like(index, dtype=torch.bool)
    if not cubic:  # as many of the first as the length has room for
        chosen = (exists.sum(-1) - 1).cumsum(1) <= length - 1
    if not fill:
        chosen = chosen & (sums.gather(1, index) > 0)
    split = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, index, chosen)
    below = (row + 1).clamp(max=len(nodes.grids) - 1).unsqueeze(-1)
    goes_on = split.gather(1, nodes.flat(below, child).clamp(max=nodes.size - 1).flatten(1)).view_as(exists)
    leaf = chosen.unsqueeze(-1) & exists & ~(goes_on & (row + 1 < len(nodes.grids)).unsqueeze(-1))

    # Disjoint cubes sort depth-first by the interleaved bits of their corners. The last slot is the unsplit root.
    code = torch.where(leaf, _interleave(corner >> finest - 1, top - finest + 1), _NOWHERE).flatten(1)
    code = torch.cat([code, split[:, :1] * _NOWHERE], dim=1)
    side = functional.pad(side.flatten(1), (0, 1), value=2**top)
    corner = functional.pad(corner.flatten(1, 2), (0, 0, 0, 1))
    code, order = code.sort(dim=1)
    code, order = code[:, :length], order[:, :length]
    side = side.gather(1, order).masked_fill(code == _NOWHERE, 0)
    corner = corner.gather(1, order.unsqueeze(-1).expand(-1, -1, ndim)).masked_fill((code == _NOWHERE)[..., None], 0)
    missing = length - side.shape[1]  # the image has fewer nodes than that
    return Tree(functional.pad(corner, (0, 0, 0, missing)), functional.pad(side, (0, missing)), shape, patch)


def is_full(shape: tuple[int, ...], *, length: int, min_leaf: int, fill: bool) -> bool:
    """Tell whether every tree of an image of this shape has `length` leaves, whatever its scores: none is padding."""
    ndim, top = len(shape), _top(tuple(shape))
    may_split = sum(2 ** (ndim * (top - side)) for side in range(_log2(min_leaf) + 1, top + 1))
    return fill and all(size == 2**top for size in shape) and (length - 1) // (2**ndim - 1) <= may_split


def check_length(length: int, ndim: int, *, name: str = "length") -> None:
    """Refuse a number of leaves that no full tree has; `name` is the key that the user wrote."""
    gain = 2**ndim - 1
    if length < 1 or (length - 1) % gain:
        lower = max(0, length - 1) // gain * gain + 1
        raise ValueError(
            f"{name} {length} must be {gain}n+1 in {ndim}-D (for example {lower} or {lower + gain}): every split "
            f"turns one leaf into {gain + 1}"
        )


def _check_score(score: Tensor) -> Tensor:
    if score.device.type != "cpu":
        return score.nan_to_num(0, 0, 0).relu_()
    lowest, highest = (float(value) for value in score.aminmax())
    if not (lowest >= 0 and math.isfinite(highest)):
        raise ValueError(
            f"scores must be finite and not negative, but lie between {lowest} and {highest}; mend the image or "
            f"replace its missing voxels"
        )
    return score


def _check_power(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} {value} must be a power of two, such as {1 << max(0, value - 1).bit_length()}")


def _sum_pyramid(score: Tensor, grids: Sequence[tuple[int, ...]], side: int) -> Tensor:
    """Sums of score [B, *S] over the cells of each level, flat; `side` is that of the last and finest grid.

    Rounding cannot make a sum of numbers that are not negative smaller than one of them, so no child exceeds its
    parent, whatever the order of the additions.
    """
    parts: list[Tensor] = []
    for _ in grids:
        for axis in range(1, score.ndim):
            missing = -score.shape[axis] % side
            if missing:
                score = functional.pad(score, (0, 0) * (score.ndim - 1 - axis) + (0, missing))
            score = score.unflatten(axis, (-1, side)).sum(axis + 1)
        parts.append(score.flatten(1))
        side = 2
    return torch.cat(parts[::-1], dim=1)


# ---------------------------------------------------------------- pyramids


class _Levels(NamedTuple):
    """A pyramid of grids laid out flat, one level after the other, each row-major; tables are on the device."""

    grids: tuple[tuple[int, ...], ...]
    size: int  # cells of all levels
    offset: Tensor  # [levels] first cell of each level
    grid: Tensor  # [levels, ndim]
    stride: Tensor  # [levels, ndim] from a cell to its neighbour along each axis
    shape: Tensor  # [ndim] of the image

    def flat(self, row: Tensor, place: Tensor) -> Tensor:
        """Places [..., ndim] on the grids of levels `row` [...] as flat places."""
        return self.offset[row] + (place * self.stride[row]).sum(-1)


@lru_cache(maxsize=256)  # small tables: to copy them to a GPU again for every batch would wait for it
def _levels(shape: tuple[int, ...], first: int, last: int, device: torch.device, coarse_first: bool = False) -> _Levels:
    """Cells of 2^first ... 2^last voxels a side that touch the image."""
    exponents = range(last, first - 1, -1) if coarse_first else range(first, last + 1)
    grids = tuple(tuple(-(-size // 2**exponent) for size in shape) for exponent in exponents)
    cells = [math.prod(grid) for grid in grids]
    strides = [[math.prod(grid[axis + 1 :]) for axis in range(len(grid))] for grid in grids]
    offsets = [sum(cells[:row]) for row in range(len(cells))]
    tables = (torch.tensor(values, device=device) for values in (offsets, grids, strides, shape))
    return _Levels(grids, sum(cells), *tables)


@lru_cache(maxsize=64)
def _children(ndim: int, device: torch.device) -> Tensor:
    """Row-major offsets of the children of a node, [2^ndim, ndim]."""
    return torch.tensor(list(product((0, 1), repeat=ndim)), device=device)


@lru_cache(maxsize=64)
def _spread_bits(bits: int, ndim: int, device: torch.device) -> Tensor:
    """Every number of so many bits with its bits ndim apart."""
    numbers = torch.arange(2**bits)
    spread = sum(((numbers >> bit & 1) << bit * ndim for bit in range(bits)), torch.zeros_like(numbers))
    return spread.to(device)


def _interleave(place: Tensor, bits: int) -> Tensor:
    """Places [..., ndim] as one number [...] with their bits in turn, the first axis first."""
    ndim = place.shape[-1]
    table = _spread_bits(bits, ndim, place.device)
    code = torch.zeros_like(place[..., 0])
    for axis in range(ndim):
        code = code | table[place[..., axis]] << ndim - 1 - axis
    return code


def _mean_pyramid(images: Tensor, count: int) -> Tensor:
    """[B, C, *S] and its averages over 2, 4, ... voxels a side, flat [B, C, size]."""
    shape = tuple(images.shape[2:])
    levels = _levels(shape, 0, count - 1, torch.device("cpu"))
    # Levels are written into one tensor: to join them afterwards would copy the image once more.
    flat = torch.empty(
        *images.shape[:2], levels.size, dtype=torch.promote_types(images.dtype, torch.float32), device=images.device
    )
    flat[..., : math.prod(shape)] = images.flatten(2)
    level, end = flat[..., : math.prod(shape)].unflatten(2, shape), math.prod(shape)
    for exponent, grid in enumerate(levels.grids[1:]):
        for axis, size in enumerate(shape):
            level = _halve(level, 2 + axis, _weight_of_last(size, exponent))
        start, end = end, end + math.prod(grid)
        flat[..., start:end] = level.flatten(2)
    return flat


def _weight_of_last(size: int, exponent: int) -> float:
    """Weight of the second of the last two cells of 2^exponent voxels along an axis, by their voxels inside."""
    side = 2**exponent
    inside = size - (-(-size // side) - 1) * side
    return inside / (side + inside)


def _halve(x: Tensor, axis: int, last: float) -> Tensor:
    """Average pairs along an axis; `last` is the weight of the last pair's second cell, and one left over is kept.

    In pairs, because they give equal numbers back exactly, which a sum of four or eight does not.
    """
    pairs = x.shape[axis] // 2
    first, second = x.narrow(axis, 0, 2 * pairs).unflatten(axis, (pairs, 2)).unbind(axis + 1)
    if x.shape[axis] % 2:
        return torch.cat([torch.lerp(first, second, 0.5), x.narrow(axis, 2 * pairs, 1)], dim=axis)
    if last == 0.5:
        return torch.lerp(first, second, 0.5)
    means = [
        torch.lerp(first.narrow(axis, start, count), second.narrow(axis, start, count), weight)
        for start, count, weight in ((0, pairs - 1, 0.5), (pairs - 1, 1, last))
    ]
    return torch.cat(means, dim=axis)


def _trickle_down(place: Tensor, numbers: Tensor, levels: _Levels, empty: int) -> Tensor:
    """Write numbers [B, n] at places [B, n] of a pyramid and give each cell of the finest level the number above it.

    The place behind the pyramid is thrown away; a cell with nothing on or above it gets `empty`.
    """
    # Half of int64's memory; the numbers of a batch's tokens are counted per image, so they fit.
    flat = torch.full((place.shape[0], levels.size + 1), empty, dtype=torch.int32, device=place.device)
    flat.scatter_(1, place, numbers.int())
    parts = flat[:, :-1].split([math.prod(grid) for grid in levels.grids], dim=1)
    above = parts[-1].unflatten(1, levels.grids[-1])
    for part, grid in zip(parts[-2::-1], levels.grids[-2::-1], strict=True):
        here = part.unflatten(1, grid)
        above = torch.where(here == empty, _double(above)[(slice(None), *map(slice, grid))], here)
    return above.flatten(1).long()


def _double(x: Tensor) -> Tensor:
    """Repeat every cell of [B, *grid] twice along each axis, in one copy."""
    grid = x.shape[1:]
    split = x.view(x.shape[0], *(n for size in grid for n in (size, 1)))
    return split.expand(-1, *(n for size in grid for n in (size, 2))).reshape(x.shape[0], *(2 * size for size in grid))


# ---------------------------------------------------------------- small parts


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """values [B, C, n] at index [B, m] -> [B, C, m]."""
    return values.gather(2, index.unsqueeze(1).expand(-1, values.shape[1], -1))


def _outer(join: Callable[[Tensor, Tensor], Tensor], terms: Sequence[Tensor]) -> Tensor:
    """Terms [B, L, p] of each axis, joined over every combination of places, row-major [B, L, P]."""
    return reduce(lambda left, right: join(left.unsqueeze(-1), right.unsqueeze(2)).flatten(2), terms)


def _exponent(side: Tensor) -> Tensor:
    """log2 of powers of two, exactly; -1 for the 0 of padding."""
    return torch.frexp(side.float()).exponent.long() - 1


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _top(shape: tuple[int, ...]) -> int:
    """log2 of the root's side."""
    return (max(shape) - 1).bit_length()
