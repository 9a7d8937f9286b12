"""Which batches a recipe can have on so many ranks.

- a size is what a rank computes in one pass (data.micro_batch)
- "N/rank" batches grow with it; a global batch stays as it is, in as many passes as it takes, so sizes divide it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitrail.errors import UserError
from vitrail.parallel.check import refuse
from vitrail.parallel.mesh import Layout
from vitrail.recipe import Recipe, load_recipe

MOST = 65536  # samples a rank that are tried at most, unless --most says otherwise


@dataclass(frozen=True)
class Sizes:
    """Which sizes a recipe can have, and what each of them means for it."""

    per_rank: bool  # the batch grows with the size
    share: int  # samples of a data-parallel rank, where they are fixed
    passes: int  # of a step, where the batch grows
    layout: Layout
    candidates: Sequence[int]

    def changes(self, size: int) -> list[str]:
        """Overrides for a size."""
        batch = [f"data.batch={size * self.passes}/rank"] if self.per_rank else []
        return [*batch, f"data.micro_batch={size}"]

    def rows(self, size: int) -> int:
        """Samples of a rank that a step of a trial computes: two passes tell what all of them need."""
        if self.per_rank:
            return size * self.passes
        return self.share if self.layout.pipeline > 1 else min(self.share, 2 * size)

    def batch(self, size: int) -> int:
        """Samples of a step over all ranks."""
        return (size * self.passes if self.per_rank else self.share) * self.layout.data


def sizes_of(recipe: Recipe, world: int, *, multiple: int = 1, most: int | None = None) -> Sizes:
    """Multiples of a number up to the most; for a global batch those that divide a rank's share of it."""
    for name, value in (("--multiple", multiple), ("--most", most)):
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} must be 1 or more")
    layout, data = refuse(recipe, world), recipe.data
    share = data.global_batch(layout.data) // layout.data
    if isinstance(data.batch, str):
        passes = -(-share // (data.micro_batch or share)) if layout.pipeline > 1 else 1  # a pipeline needs several
        found = Sizes(True, share, passes, layout, range(multiple, (most or MOST) + 1, multiple))
        what = f"--most {most or MOST}"
    else:
        numbers = [n for n in range(multiple, min(most or MOST, share) + 1, multiple) if share % n == 0]
        found = Sizes(False, share, 1, layout, numbers)
        if layout.pipeline > 1:
            found = replace(found, candidates=[n for n in numbers if _possible(recipe, found.changes(n), world)])
        what = f"the {share} samples that data.batch={data.batch} gives a rank"
    if not found.candidates:
        raise UserError(
            f"--multiple: no multiple of {multiple} is possible with {what}; give a smaller --multiple"
            + ("" if found.per_rank else ', or data.batch as "N/rank"')
        )
    return found


def _possible(recipe: Recipe, changes: Sequence[str], world: int) -> bool:
    try:
        refuse(load_recipe(recipe, changes), world)
    except UserError:
        return False
    return True
