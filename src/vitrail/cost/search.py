"""Many layouts of a recipe on so many GPUs, ranked.

- sizes of state rule out what cannot fit. The others are compared by work divided from one trace of the whole model
  (rough.py); those that are shown are traced for themselves
- of each layout the largest micro-batch that fits is taken with the least recomputation that it needs, and smaller ones
  that need less of it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from vitrail.cost.candidates import Candidate, candidates, changes_of, micros
from vitrail.cost.cluster import Cluster
from vitrail.cost.plan import (
    GIB,
    HEADROOM,
    Estimate,
    Shares,
    check_gpus,
    estimate,
    fits,
    memory_for,
    model_of,
    without_device,
    works_of,
)
from vitrail.errors import UserError
from vitrail.models.model import Model
from vitrail.parallel.check import refuse
from vitrail.parallel.mesh import layout_of
from vitrail.parallel.recompute import all_roles
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Recompute

MOST_SAMPLES = 2**14  # of a rank, where any batch will do
PASSES = 2  # micro-batches looked at in a pipeline: smaller ones make its bubble smaller
SHOWN = 8  # layouts that are told where none fits


def search(recipe: Recipe, cluster: Cluster, gpus: int, *, any_batch: bool = False, top: int = 10) -> list[Estimate]:
    """The fastest layouts of a settled recipe that fit, in order; where none does, those that need least memory."""
    check_gpus(cluster, gpus)
    some = list(candidates(recipe, cluster, gpus))
    if not some:
        refuse(without_device(recipe), gpus)  # says why, where even the recipe's own layout cannot work
        raise UserError(
            f"--gpus {gpus}: no layout of this recipe can use them all; use fewer, or a larger data.batch "
            f"({recipe.data.batch} now)"
        )

    def exact(one: Candidate) -> Estimate:
        return estimate(one.recipe, cluster, gpus, changes=changes_of(recipe, one.recipe))

    pick = _any_that_fit if any_batch and isinstance(recipe.data.batch, str) else _that_fit
    room = HEADROOM * cluster.device.memory_gib * GIB
    found = [one for start in some if start.least <= room for one in pick(start, cluster)]
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
    layout = layout_of(recipe.parallel, gpus)
    own = Candidate(recipe, layout, Shares.of(recipe, layout))
    for found in _that_fit(own, cluster):
        made = estimate(found.recipe, cluster, gpus, changes=changes_of(recipe, found.recipe))
        if made.fits:
            return made
    while gpus <= cluster.gpus:
        try:
            best = search(recipe, cluster, gpus, top=1)[0]
        except UserError:  # so many cannot be used
            return None
        if best.fits:
            return best
        gpus = 2 * gpus if 2 * gpus <= cluster.gpus or gpus == cluster.gpus else cluster.gpus
    return None


def _that_fit(start: Candidate, cluster: Cluster) -> Iterator[Candidate]:
    """With the largest micro-batch that fits, and with smaller ones: in a pipeline, or if these recompute less."""
    choices = _choices(start.recipe)
    found: list[Candidate] = []
    for micro in micros(start.recipe, start.layout, start.shares):
        most = len(choices) if not found else choices.index(found[-1].recipe.parallel.recompute)
        if start.layout.pipeline > 1 and len(found) < PASSES:
            most = len(choices)
        if most == 0:
            return
        one = _least_again(start, cluster, micro, choices[:most])
        if one is not None:
            found.append(one)
            yield one


def _any_that_fit(start: Candidate, cluster: Cluster) -> Iterator[Candidate]:
    """With every batch of a rank that fits: a power of two, or as many as a pipeline's stages need."""
    samples = start.layout.pipeline
    while samples <= MOST_SAMPLES:
        grown = start.with_batch(samples)
        micro = micros(grown.recipe, grown.layout, grown.shares)[0]
        found = _least_again(grown, cluster, micro, _choices(grown.recipe))
        if found is None:
            return
        yield found
        samples *= 2


def _least_again(start: Candidate, cluster: Cluster, micro: int, choices: Sequence[Any]) -> Candidate | None:
    """With the first of some ways to recompute that makes it fit."""
    for choice in choices:
        candidate = start.with_passes(micro=micro, choice=choice)
        first = works_of(candidate.recipe, candidate.layout, candidate.shares.micro, rough=True)[0]
        kept = sum(segment.saved * segment.count for segment in first.segments)
        if start.least + kept > HEADROOM * cluster.device.memory_gib * GIB:  # quicker than all of its memory
            continue
        if fits(memory_for(candidate.recipe, candidate.layout, candidate.shares, rough=True), cluster):
            return candidate
    return None


def _smallest(start: Candidate) -> Candidate:
    micro = micros(start.recipe, start.layout, start.shares)[-1]
    return start.with_passes(micro=micro, choice=_choices(start.recipe)[-1])


def _choices(recipe: Recipe) -> list[Any]:
    """Ways to recompute, the least first: none, all but attention, all; or the recipe's own and all."""
    own = recipe.parallel.recompute
    if own == "full":
        return ["full"]
    if own != "none":
        return [own, "full"]
    return ["none", *([Recompute(keep=("attention",))] if _attends(model_of(recipe.model)) else []), "full"]


@lru_cache(maxsize=8)
def _attends(model: Model) -> bool:
    return "attention" in all_roles(model.blocks())
