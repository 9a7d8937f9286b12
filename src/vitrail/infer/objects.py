"""Objects that a border separates, and how well two ways to cut the same voxels into objects agree.

- objects are what hangs together by faces where no border is; borders are thinned until nothing is left of them, since
  how wide somebody draws a membrane says nothing of which cell is which
- the Rand score compares pairs of voxels: are both in one object? Voxels that the truth calls border take no part
  (Arganda-Carreras et al. 2015, doi:10.3389/fnana.2015.00142, as the challenge ISBI-2012 was judged in the end)
- pairs are of different voxels, as in scikit-image's adapted_rand_error, whose numbers these are
"""

from typing import NamedTuple

import numpy as np


class Pairs(NamedTuple):
    """Ordered pairs of voxels in one object: of both ways to cut, of what was found, of the truth."""

    both: int = 0
    found: int = 0
    true: int = 0

    def plus(self, other: "Pairs") -> "Pairs":
        return Pairs(*(one + more for one, more in zip(self, other, strict=True)))

    def scores(self) -> dict[str, float]:
        """Return the F-score, and its two sides: 1 where no object is split, and 1 where no two are merged."""

        def ratio(part: int, whole: int) -> float:
            return part / whole if whole else float("nan")

        return {
            "rand_f_score": ratio(2 * self.both, self.found + self.true),
            "rand_split": ratio(self.both, self.true),
            "rand_merge": ratio(self.both, self.found),
        }


def count_pairs(true: np.ndarray, found: np.ndarray) -> Pairs:
    """Count pairs of voxels in one object; 0 of the truth is left out, and 0 of what was found is no object."""
    inside = true > 0
    true, found = true[inside].astype(np.int64), found[inside].astype(np.int64)
    if not true.size:
        return Pairs()
    joint = (true * (found.max() + 1) + found)[found > 0]
    return Pairs(*(_pairs(np.unique(of, return_counts=True)[1]) for of in (joint, found[found > 0], true)))


def _pairs(sizes: np.ndarray) -> int:
    return int((sizes.astype(np.int64) * (sizes - 1)).sum())


def find_objects(border: np.ndarray) -> np.ndarray:
    """Number what hangs together by faces where there is no border, from 1 on; borders are 0."""
    inside = ~border
    first = inside.copy()  # of a run along the last axis: runs are joined, which are far fewer than voxels
    first[..., 1:] &= border[..., :-1]
    runs = np.where(inside, np.cumsum(first).reshape(inside.shape), 0)
    number = int(runs.max(initial=0)) + 1
    met = [np.empty(0, np.int64)]
    for axis in range(inside.ndim - 1):
        here, there = _beside(inside.ndim, axis)
        touching = inside[here] & inside[there]
        met.append(np.unique(runs[here][touching] * number + runs[there][touching]))
    one, other = np.divmod(np.concatenate(met), number)
    lowest = np.arange(number)  # of the runs that each is known to hang together with, or one on the way there
    while len(one):
        ends = lowest[one], lowest[other]
        low = np.minimum(*ends)
        for end in ends:
            np.minimum.at(lowest, end, low)
        while (lowest != (shorter := lowest[lowest])).any():
            lowest = shorter
        apart = lowest[one] != lowest[other]
        one, other = one[apart], other[apart]
    numbers = np.cumsum(lowest == np.arange(number)) - 1  # 0 stays the border
    return np.asarray(numbers[lowest][runs])


def thin(objects: np.ndarray) -> np.ndarray:
    """Let objects grow over the border, a voxel at a time, until they meet; of two at once the lower number goes on."""
    if not objects.any():
        return objects
    nobody = np.iinfo(objects.dtype).max
    grown = np.pad(np.where(objects == 0, nobody, objects), 1, constant_values=nobody)
    flat, inner = grown.reshape(-1), (slice(1, -1),) * objects.ndim
    beside = [step * way // grown.itemsize for step in grown.strides for way in (-1, 1)]
    left = np.ravel_multi_index(tuple(places + 1 for places in np.nonzero(objects == 0)), grown.shape)
    while len(left):
        nearest = np.min([flat[left + step] for step in beside], axis=0)
        taken = nearest < nobody
        flat[left[taken]] = nearest[taken]
        left = left[~taken]
    return grown[inner]


def _beside(ndim: int, axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return where neighbours along an axis lie."""
    before = (slice(None),) * axis
    after = (slice(None),) * (ndim - axis - 1)
    return (*before, slice(None, -1), *after), (*before, slice(1, None), *after)
