"""Many layouts of a recipe on so many GPUs, ranked.

- sizes of state rule out what cannot fit. The others are compared by work divided from one trace of the whole model
  (rough.py); those that are shown are traced for themselves
- of each layout the largest micro-batch that fits is taken with the least recomputation that it needs, and smaller ones
  that need less of it. What nearly fits is looked at, too, as the comparison is rough
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from vitrail.cost.candidates import Candidate, candidates, changes_of, micros
from vitrail.cost.cluster import Cluster
from vitrail.cost.gpus import check_gpus, more_gpus
from vitrail.cost.key import Key
from vitrail.cost.memory import Memory, Moments
from vitrail.cost.plan import (
    GIB,
    HEADROOM,
    Estimate,
    Shares,
    estimate,
    is_solo,
    memory_for,
    model_of,
    without_device,
    works_of,
)
from vitrail.errors import UserError
from vitrail.models.model import Model
from vitrail.parallel.check import refuse
from vitrail.parallel.mesh import Layout
from vitrail.parallel.recompute import all_roles
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Recompute

MOST_SAMPLES = 2**14  # of a rank, where any batch will do
MARGIN = 0.05  # of the room: so near to it, what is compared roughly may fit or not
PASSES = 2  # micro-batches looked at in a pipeline: smaller ones make its bubble smaller
SHOWN = 8  # layouts that are told where none fits


def layouts(
    recipe: Recipe, cluster: Cluster, gpus: int, *, as_is: bool = False, any_batch: bool = False, top: int = 10
) -> list[Estimate]:
    """Of a settled recipe: its own with `as_is`, else the best."""
    if not as_is:
        return search(recipe, cluster, gpus, any_batch=any_batch, top=top)
    if any_batch:
        raise UserError("--any-batch: --as-is keeps the recipe's own batch; leave one of them out")
    check_gpus(cluster, gpus)
    refuse(without_device(recipe), gpus)
    return [estimate(recipe, cluster, gpus)]


def search(recipe: Recipe, cluster: Cluster, gpus: int, *, any_batch: bool = False, top: int = 10) -> list[Estimate]:
    """The fastest layouts of a settled recipe that fit, in order; where none does, those that need least memory."""
    check_gpus(cluster, gpus)
    if any_batch and not isinstance(recipe.data.batch, str):
        raise UserError(
            f"--any-batch: data.batch is {recipe.data.batch} for all ranks together; give it per rank, "
            f"such as data.batch={max(1, recipe.data.batch // gpus)}/rank, or leave out --any-batch"
        )
    some = list(candidates(recipe, cluster, gpus))
    if not some:
        refuse(without_device(recipe), gpus)  # says why, where even the recipe's own layout cannot work
        raise UserError(
            f"--gpus {gpus}: no layout of this recipe can use them all; use fewer, or a larger data.batch "
            f"({recipe.data.batch} now)"
        )

    def exact(one: Candidate) -> Estimate:
        return estimate(one.recipe, cluster, gpus, changes=changes_of(recipe, one.recipe))

    pick = _any_that_fit if any_batch else _that_fit
    found = [one for start in some if start.least <= _room(cluster) for one in pick(start, cluster)]
    good: list[Estimate] = []
    for one in sorted(found, key=lambda one: -one.rate(cluster, gpus)):
        if len(good) == top:
            break
        good += [made for made in [exact(one)] if made.fits]
    if good:
        return sorted(good, key=lambda one: -one.samples_per_second)
    smallest = sorted(some, key=lambda one: one.least)[: min(top, SHOWN)]
    return sorted((exact(_smallest(one)) for one in smallest), key=lambda one: one.memory_gib)


def nearest(recipe: Recipe, cluster: Cluster, gpus: int) -> Estimate | None:
    """What fits and changes least: this layout with less at once, another on as many GPUs, the best on more of them."""
    try:
        layout = refuse(without_device(recipe), gpus)
        own = [Candidate(recipe, layout, Shares.of(recipe, layout))]
    except UserError:  # it names none that so many could have
        own = []
    for found in (one for start in own for one in _that_fit(start, cluster)):
        made = estimate(found.recipe, cluster, gpus, changes=changes_of(recipe, found.recipe))
        if made.fits:
            return made
    for number in more_gpus(cluster, gpus):
        try:
            best = search(recipe, cluster, number, top=1)[0]
        except UserError:  # so many cannot be used
            continue
        if best.fits:
            return best
    return None


def _room(cluster: Cluster) -> float:
    return HEADROOM * cluster.device.memory_gib * GIB


def _that_fit(start: Candidate, cluster: Cluster) -> Iterator[Candidate]:
    """With the largest micro-batch that fits, and with smaller ones: in a pipeline, or if these recompute less."""
    choices = _choices(start.recipe)
    most, sizes = len(choices), 0
    for micro in micros(start.recipe, start.layout, start.shares):
        every = start.layout.pipeline > 1 and sizes < PASSES
        found, surely = _least_again(start, cluster, micro, choices if every else choices[:most])
        yield from found
        if surely:
            sizes += 1
            most = choices.index(found[-1].recipe.parallel.recompute)
        if most == 0 and not (start.layout.pipeline > 1 and sizes < PASSES):
            return


def _any_that_fit(start: Candidate, cluster: Cluster) -> Iterator[Candidate]:
    """With every batch of a rank that fits: a power of two that fills the pipeline."""
    samples = start.layout.pipeline
    while samples <= MOST_SAMPLES:
        grown = start.with_batch(samples)
        samples *= 2
        sizes = micros(grown.recipe, grown.layout, grown.shares)
        if not sizes:
            continue
        found, _ = _least_again(grown, cluster, sizes[0], _choices(grown.recipe))
        if not found:
            return
        yield from found


def _least_again(
    start: Candidate, cluster: Cluster, micro: int, choices: Sequence[Any]
) -> tuple[list[Candidate], bool]:
    """With the first of some ways to recompute that makes it fit, and with those that may; whether one surely does."""
    found = []
    for choice in choices:
        candidate = start.with_passes(micro=micro, choice=choice)
        if _at_least(candidate) > (1 + MARGIN) * _room(cluster):  # quicker than all of its memory
            continue
        memory = _rough_memory(candidate, cluster)
        share = memory.reserved(cluster.device) / _room(cluster)
        if share <= 1 + MARGIN:
            found.append(candidate)
        if share <= 1 - MARGIN:
            return found, True
    return found, False


def _rough_memory(candidate: Candidate, cluster: Cluster) -> Memory:
    """The same for any number of copies above one: a range of GPUs asks but once."""
    recipe, shares = candidate.recipe, candidate.shares
    layout = candidate.layout._replace(replicate=min(2, candidate.layout.replicate))
    unlike = {"strategy": None, "group": None, "replicate": None, "shard": None}  # the layout tells
    rest = (Moments.of(recipe.optimizer), recipe.ema, recipe.data.prefetch, layout, shares.micro, shares.passes)
    parallel = recipe.parallel.model_copy(update=unlike)
    alone = is_solo(recipe, layout, cluster)
    text = repr((recipe.model, recipe.objective, recipe.precision, parallel, alone, *rest))
    return _memory(Key(text, lambda: memory_for(recipe, cluster, layout, shares, rough=True)))


@lru_cache(maxsize=4096)
def _memory(key: Key) -> Memory:
    return key.make()


def _at_least(candidate: Candidate) -> float:
    """Bytes of a rank when all activations are kept: with masters and moments, gradients only if there are some yet."""
    c, layout = candidate.recipe, candidate.layout
    first = works_of(c, layout, candidate.shares.micro, rough=True)[0]
    kept = sum(segment.saved * segment.count for segment in first.segments)
    owned = sum(segment.parameters * segment.count for segment in first.segments)
    each = 4 * (1 + min(Moments.of(c.optimizer)) + (candidate.shares.passes > 1))
    ranks = layout.shard * layout.context * layout.tensor  # of the last only what is outside blocks
    return kept + (0 if c.parallel.offload else each * owned / ranks)


def _smallest(start: Candidate) -> Candidate:
    micro = micros(start.recipe, start.layout, start.shares)[-1]
    return start.with_passes(micro=micro, choice=_choices(start.recipe)[-1])


def _choices(recipe: Recipe) -> list[Any]:
    """Ways to recompute, the least first: none, all but attention, all, and the recipe's own among them."""
    known = ["none", *([Recompute(keep=("attention",))] if _attends(model_of(recipe.model)) else []), "full"]
    own = recipe.parallel.recompute
    if own in known:
        return known
    return sorted([*known, own], key=lambda choice: -_kept(recipe, choice))


def _kept(recipe: Recipe, choice: Any) -> int:
    """Bytes that a sample keeps for the backward."""
    parallel = recipe.parallel.model_copy(update={"recompute": choice})
    (work,) = works_of(recipe.model_copy(update={"parallel": parallel}), Layout(1, 1, reshard=False), 1, rough=True)
    return sum(segment.saved * segment.count for segment in work.segments)


@lru_cache(maxsize=8)
def _attends(model: Model) -> bool:
    return "attention" in all_roles(model.blocks())
