"""How well two partitions of the same voxels agree: which instance of one lies in which of the other, and scores of it.

A table of overlaps is added up box by box, so that volumes may be larger than memory. Scores, all of one table:

- variation of information (Meila 2007) in bits: `vi_split` is how much the prediction tells beyond the truth (instances
  cut in pieces), `vi_merge` how much of the truth it does not tell (instances that ran together); 0 is best
- `adapted_rand_error` is 1 less the F-score of pairs of different voxels that are in one instance (Arganda-Carreras et
  al. 2015); a voxel of the prediction's background is alone; 0 is best
- `f1_50` and `f1_75`: of instances whose intersection with one of the other side is so much of their union
- voxels that are background in the truth are left out of the first two. For the first, background of the prediction
  is one more instance; the last looks at instances alone, with all their voxels
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vitrail.infer.objects import Pairs

SPARE = np.iinfo(np.int64).min + 1  # stands for an instance whose number is 0
LEAST = {"f1_50": 0.5, "f1_75": 0.75}  # intersection over union of instances that are taken for the same


class Table(NamedTuple):
    """Overlaps: so many voxels are of one instance of the truth and one of the prediction."""

    truth: np.ndarray  # [n]
    found: np.ndarray  # [n]
    voxels: np.ndarray  # [n]


@dataclass
class Overlaps:
    """A table in the making."""

    parts: list[Table] = field(default_factory=list)

    def add(self, truth: np.ndarray, found: np.ndarray, ignore: int | None = None, background: int | None = 0) -> None:
        """Count the voxels of two label arrays of one shape; those whose true label is `ignore` do not count.

        `background` is the true label of voxels of no instance; where it is another than 0, 0 is an instance.
        """
        truth, found = (np.asarray(each).ravel().astype(np.int64) for each in (truth, found))
        if truth.shape != found.shape:
            raise ValueError(f"{truth.size} voxels of the truth are compared with {found.size}")
        if ignore is not None:
            scored = truth != _signed(ignore)
            truth, found = truth[scored], found[scored]
        if background != 0:
            nobody = np.zeros(len(truth), bool) if background is None else truth == _signed(background)
            truth = np.where(nobody, 0, np.where(truth == 0, SPARE, truth))
        self.parts.append(_added(truth, found, np.ones(len(truth), np.int64)))
        if len(self.parts) > 16:
            self.parts = [self.table()]

    def table(self) -> Table:
        if not self.parts:
            return Table(*(np.zeros(0, np.int64) for _ in range(3)))
        return _added(*(np.concatenate(columns) for columns in zip(*self.parts, strict=True)))

    def scores(self) -> dict[str, float]:
        """Return the scores of all that was added."""
        table = self.table()
        return variation_of_information(table) | {"adapted_rand_error": adapted_rand_error(table)} | instance_f1(table)


def _signed(label: int) -> int:
    """Return a label as labels of 64 bits without a sign are read, in training as here."""
    return (label + 2**63) % 2**64 - 2**63


def _added(truth: np.ndarray, found: np.ndarray, count: np.ndarray) -> Table:
    """Return each pair of instances once."""
    if not len(truth):
        return Table(truth, found, count)
    order = np.lexsort((found, truth))
    truth, found = truth[order], found[order]
    begins = np.flatnonzero(np.concatenate([[True], (truth[1:] != truth[:-1]) | (found[1:] != found[:-1])]))
    return Table(truth[begins], found[begins], np.add.reduceat(count[order], begins))


def _scored(table: Table) -> Table:
    """Leave out what is background in the truth."""
    kept = table.truth != 0
    return Table(*(column[kept] for column in table))


def _sums(names: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the names that there are, voxels of each, and where each row's name is among them."""
    unique, places = np.unique(names, return_inverse=True)
    return unique, np.bincount(places, weights=count, minlength=len(unique)), places


def variation_of_information(table: Table) -> dict[str, float]:
    """Return what splits and what merges cost, in bits."""
    table = _scored(table)
    total = float(table.voxels.sum())
    if not total:
        return {"vi_split": float("nan"), "vi_merge": float("nan")}
    _, true, row = _sums(table.truth, table.voxels)
    _, said, column = _sums(table.found, table.voxels)
    share = table.voxels / total
    return {
        "vi_split": abs(float(-(share * np.log2(table.voxels / true[row])).sum())),
        "vi_merge": abs(float(-(share * np.log2(table.voxels / said[column])).sum())),
    }


def adapted_rand_error(table: Table) -> float:
    """Return 1 less the F-score of pairs of different voxels that are in one instance."""
    table = _scored(table)
    told = table.found != 0

    def number(voxels: np.ndarray) -> int:
        return int((voxels * (voxels - 1.0)).sum())

    said, true = (_sums(names, voxels)[1] for names, voxels in ((table.found[told], table.voxels[told]), table[::2]))
    pairs = Pairs(number(table.voxels[told]), number(said), number(true))
    return 1 - pairs.scores()["rand_f_score"]


def instance_f1(table: Table) -> dict[str, float]:
    """Return the F-score of instances at each least intersection over union."""
    truth, true, row = _sums(table.truth, table.voxels)
    found, said, column = _sums(table.found, table.voxels)
    both = (table.truth != 0) & (table.found != 0)
    share = np.where(both, table.voxels / (true[row] + said[column] - table.voxels), 0.0) if len(table.voxels) else both
    number = int((truth != 0).sum() + (found != 0).sum())
    scores = {}
    for name, least in LEAST.items():
        alike = share >= least
        # At just a half, two may be taken for one.
        pairs = min(len(np.unique(table.truth[alike])), len(np.unique(table.found[alike])))
        scores[name] = 2 * pairs / number if number else float("nan")
    return scores
