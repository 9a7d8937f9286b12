"""Instances of affinities: by the mutex watershed (Wolf et al. 2018), block by block, and put together once.

- an affinity above `threshold` attracts, one below repels; pairs are taken in the order of how far from it they are.
  Voxels that nothing attracts are background, 0
- a block is looked at with a margin as wide as the longest offset, and what it makes of its own voxels are fragments. A
  fragment's number holds that of its block, so that no two blocks share one
- of each two fragments that are neighbours by some offset, the affinities of all their pairs are added up. Fragments of
  different blocks attract or repel by their mean, and those of one block, which was decided with all that is known of
  their voxels, only repel; the mutex watershed of these few numbers says which fragments are one instance
- all sums are of whole numbers, and all orders are those of numbers: results depend on the blocks, and on nothing else
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vitrail.errors import UserError
from vitrail.recipe.kinds import remedy

Box = tuple[slice, ...]
Offsets = Sequence[tuple[int, ...]]

FULL = 255  # an affinity of 1, in bytes
BYTES = 80  # of memory that the watershed takes for each affinity
MOST = 2**25  # affinities of a block: while the library works, which takes seconds, no thread of the process gets on
LEAST = 1e-9  # of a repulsion that comes last
BLOCK = np.uint64(32)  # bits of a fragment's number that are its own; those above are of its block
NUMBERS = np.dtype(np.uint32)  # of instances


class Pairs(NamedTuple):
    """Fragments that are neighbours by some offset, and the affinities of the pairs of voxels between them."""

    first: np.ndarray  # [n] numbers of fragments, the smaller of both
    second: np.ndarray  # [n]
    total: np.ndarray  # [n] sum of bytes
    number: np.ndarray  # [n] of them


@dataclass(frozen=True)
class Blocks:
    """The blocks of an item, in rows; each is made of whole chunks."""

    shape: tuple[int, ...]
    side: tuple[int, ...]
    reach: tuple[int, ...]  # the longest offset along each axis

    @classmethod
    def of(cls, shape: Sequence[int], chunk: Sequence[int], offsets: Offsets, memory: int) -> "Blocks":
        """Choose blocks so large that the watershed of one fits into so many bytes, and MOST, but at least a chunk."""
        reach = tuple(max(abs(n) for n in each) for each in zip(*offsets, strict=True))

        def fits(side: Sequence[int]) -> bool:
            voxels = float(np.prod([n + 2 * r for n, r in zip(side, reach, strict=True)]))
            return voxels * len(offsets) <= min(MOST, memory // BYTES)

        side = [min(c, n) for c, n in zip(chunk, shape, strict=True)]
        growing = True
        while growing:
            growing = False
            for axis in sorted(range(len(side)), key=lambda axis: (side[axis], -axis)):  # the shortest first
                grown = [*side]
                grown[axis] = min(side[axis] + chunk[axis], shape[axis])
                if grown != side and fits(grown):
                    side, growing = grown, True
                    break
        return cls(tuple(shape), tuple(side), reach)

    def boxes(self) -> list[Box]:
        starts = itertools.product(*(range(0, n, s) for n, s in zip(self.shape, self.side, strict=True)))
        return [
            tuple(slice(at, min(at + s, n)) for at, s, n in zip(start, self.side, self.shape, strict=True))
            for start in starts
        ]

    def around(self, box: Box) -> tuple[Box, Box]:
        """Return a box with its margin, as far as there are voxels, and where in it the box lies."""
        wide = tuple(
            slice(max(0, b.start - r), min(n, b.stop + r)) for b, r, n in zip(box, self.reach, self.shape, strict=True)
        )
        return wide, tuple(slice(b.start - w.start, b.stop - w.start) for b, w in zip(box, wide, strict=True))


def library() -> Any:
    """Import what solves the mutex watershed."""
    try:
        import mwatershed
    except ModuleNotFoundError:
        raise UserError(f"instances need mwatershed, which is not installed; {remedy('mwatershed')}") from None
    return mwatershed


def weights_of(affinities: np.ndarray, threshold: float) -> np.ndarray:
    """Return by how much bytes [C, *S] attract, or repel where it is less than 0."""
    return affinities.astype(np.float64) / FULL - threshold


def watershed(affinities: np.ndarray, offsets: Offsets, threshold: float) -> np.ndarray:
    """Return instances [*S] of affinities in bytes [C, *S], uint64; 0 where nothing attracts."""
    return np.asarray(library().agglom(weights_of(affinities, threshold), [list(offset) for offset in offsets]))


def fragments(affinities: np.ndarray, inside: Box, offsets: Offsets, threshold: float, number: int) -> np.ndarray:
    """Return the fragments [*box] of a block by its number, of the affinities [C, *wide] of it and its margin."""
    found = watershed(affinities, offsets, threshold)[inside]
    names, places = np.unique(found, return_inverse=True)
    own = np.arange(len(names), dtype=np.uint64) + np.uint64(0 if len(names) and names[0] == 0 else 1)
    own = np.where(names == 0, np.uint64(0), own + (np.uint64(number) << BLOCK))
    return own[places.reshape(found.shape)]


def neighbours(affinities: np.ndarray, found: np.ndarray, inside: Box, offsets: Offsets) -> Pairs:
    """Return the pairs of a block, each of which is that of its first voxel.

    `affinities` [C, *box] are of the block, `found` [*wide] the fragments of it and its margin.
    """
    parts = []
    for values, offset in zip(affinities, offsets, strict=True):
        here, there = [], []
        for b, n, size in zip(inside, offset, found.shape, strict=True):
            low, high = max(b.start, -n), min(b.stop, size - n)
            here.append(slice(low, max(low, high)))
            there.append(slice(low + n, max(low, high) + n))
        one, other = found[tuple(here)], found[tuple(there)]
        apart = (one != other) & (one > 0) & (other > 0)
        if not apart.any():
            continue
        own = tuple(slice(h.start - b.start, h.stop - b.start) for h, b in zip(here, inside, strict=True))
        one, other, total = one[apart], other[apart], values[own][apart].astype(np.int64)
        parts.append(added(Pairs(np.minimum(one, other), np.maximum(one, other), total, np.ones(len(one), np.int64))))
    return together(parts)


def added(pairs: Pairs) -> Pairs:
    """Return each pair once, in the order of numbers."""
    order = np.lexsort((pairs.second, pairs.first))
    first, second = pairs.first[order], pairs.second[order]
    begins = np.flatnonzero(np.concatenate([[True], (first[1:] != first[:-1]) | (second[1:] != second[:-1])]))
    total, count = (np.add.reduceat(each[order], begins) for each in (pairs.total, pairs.number))
    return Pairs(first[begins], second[begins], total, count)


def together(parts: Sequence[Pairs]) -> Pairs:
    """Add pairs of several places up."""
    parts = [part for part in parts if len(part.first)]
    if not parts:
        return Pairs(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    return added(Pairs(*(np.concatenate(columns) for columns in zip(*parts, strict=True))))


def merged(names: np.ndarray, sizes: np.ndarray, pairs: Pairs, threshold: float, smallest: int) -> np.ndarray:
    """Return the instance of each fragment [n]: from 1 in the order of first fragments, 0 of those that are too small.

    `names` are the numbers of all fragments, rising, and `sizes` their voxels.
    """
    weight = pairs.total / (FULL * np.maximum(pairs.number, 1)) - threshold
    same_block = (pairs.first >> BLOCK) == (pairs.second >> BLOCK)
    weight = np.where(same_block, np.minimum(weight, -LEAST), weight)
    order = np.argsort(-np.abs(weight), kind="stable")
    one, other = (np.searchsorted(names, each)[order] for each in (pairs.first, pairs.second))
    edges = list(zip((weight[order] > 0).tolist(), (one + 1).tolist(), (other + 1).tolist(), strict=True))
    group = np.arange(len(names))
    if edges:
        found = np.array(library().cluster(edges), np.int64)
        group[found[:, 0] - 1] = found[:, 1] - 1
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    kept = np.bincount(group, weights=sizes, minlength=len(first)) >= smallest
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    number = np.zeros(len(first), np.int64)
    number[np.argsort(first)] = np.cumsum(kept[np.argsort(first)])
    number[~kept] = 0
    if len(number) and number.max() > np.iinfo(NUMBERS).max:
        raise UserError(f"{number.max():,} instances are more than {NUMBERS} counts; raise --smallest")
    return number[group].astype(NUMBERS)


def renumbered(found: np.ndarray, names: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return instances [*S] of fragments [*S]; 0 stays 0."""
    if not len(names):
        return np.zeros(found.shape, NUMBERS)
    places = np.minimum(np.searchsorted(names, found), len(names) - 1)
    return np.where(found == 0, NUMBERS.type(0), numbers[places])


def segment(affinities: np.ndarray, offsets: Offsets, threshold: float, smallest: int) -> np.ndarray:
    """Return the instances [*S] of affinities in bytes [C, *S], as one block."""
    everything = tuple(slice(0, n) for n in affinities.shape[1:])
    found = fragments(affinities, everything, offsets, threshold, 0)
    names, sizes = np.unique(found[found > 0], return_counts=True)
    return renumbered(found, names, merged(names, sizes, together([]), threshold, smallest))
