"""Many layouts of a recipe on so many GPUs, ranked.

- sizes of state rule out what cannot fit. The others are compared by work divided from one trace of the whole model;
  those that are shown are traced for themselves
- of each layout the largest micro-batch that fits is taken with the least recomputation that it needs, and smaller ones
  that need less of it. What nearly fits is looked at, too, as the comparison is rough
- a shape is tensor x context x pipeline; the ranks that it leaves are spread by a strategy: replicated, fully sharded,
  or in groups. Impossible ones are left out by the rules that training itself has (parallel/check.py)
- sensible ones only: tensor ranks inside a node, at least 1024 tokens a context rank, powers of two
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from vitrail.cost.cluster import Cluster, check_gpus, more_gpus
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
    num_parameters,
    time_for,
    without_device,
    works_of,
)
from vitrail.cost.work import cached
from vitrail.errors import UserError
from vitrail.models.model import Model
from vitrail.parallel.check import (
    CHECKS,
    Case,
    Impossible,
    check_batch,
    check_micro_batches,
    fill_pipeline,
    refuse,
    sequences_of,
)
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.parallel.recompute import all_roles
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Parallel, Recompute

LEAST_TOKENS = 1024  # of a rank that shares a sample's tokens
MOST_CONTEXT = 64
MOST_PIPELINE = 16
MOST_SAMPLES = 2**14  # of a rank, where any batch will do
MARGIN = 0.05  # of the room: so near to it, what is compared roughly may fit or not
PASSES = 2  # micro-batches looked at in a pipeline: smaller ones make its bubble smaller
SHOWN = 8  # layouts that are told where none fits
_CASES, _POSSIBLE, _MEMORY = cached(4), cached(4096), cached(4096)
_OF_BATCHES = (check_batch, check_micro_batches)
_SHAPE = ("tensor", "context", "pipeline")
_RESET = {"group": None, "replicate": None, "shard": None, "reshard": None, "ulysses": None}
_NO_PIPELINE = {"schedule": "1F1B", "stages": None, "split": "measured"}


@dataclass(frozen=True)
class Candidate:
    """A recipe with a layout of its own."""

    recipe: Recipe
    layout: Layout
    shares: Shares
    least: float = 0.0  # bytes that its state alone takes on a rank

    def with_passes(self, *, micro: int, choice: Any) -> Candidate:
        parallel = self.recipe.parallel.model_copy(update={"recompute": choice})
        size = self.recipe.data.micro_batch if micro == self.shares.micro else micro
        data = self.recipe.data.model_copy(update={"micro_batch": size})
        return self._changed({"parallel": parallel, "data": data})

    def with_batch(self, samples: int) -> Candidate:
        data = self.recipe.data.model_copy(update={"batch": f"{samples}/rank"})
        return self._changed({"data": data})

    def rate(self, cluster: Cluster) -> float:
        """Estimate samples a second, roughly."""
        return self.shares.batch / time_for(self.recipe, cluster, self.layout, self.shares, rough=True).seconds

    def _changed(self, update: dict[str, Any]) -> Candidate:
        recipe = self.recipe.model_copy(update=update)
        return replace(self, recipe=recipe, shares=Shares.of(recipe, self.layout))


def candidates(recipe: Recipe, cluster: Cluster, gpus: int) -> Iterator[Candidate]:
    """Find possible layouts, each with what its state takes at least."""
    shown = repr((recipe.model, recipe.data.crop))
    alone = _CASES(shown, lambda: Case(recipe, 1, Layout(1, 1, reshard=True)))  # its model serves all of them
    base = Case(without_device(recipe), gpus, Layout(1, gpus, reshard=True), alone)
    parameters = 0 if recipe.parallel.offload else num_parameters(recipe)
    text = f"{shown} {recipe.precision!r} {recipe.run.device}"
    for shape in _shapes(base, cluster, gpus):
        ranks = gpus // math.prod(shape.values())
        for strategy, group in _strategies(ranks, recipe.parallel):
            parallel = _with(recipe.parallel, shape, strategy, group)
            if not _is_possible(base, text, parallel):
                continue
            changed = recipe.model_copy(update={"parallel": parallel})
            layout = layout_of(parallel, gpus)
            if (shares := _shares(changed, gpus, layout)) is not None:
                yield Candidate(changed, layout, shares, _state(parameters, Moments.of(recipe.optimizer), layout))


def _shapes(base: Case, cluster: Cluster, gpus: int) -> Iterator[dict[str, int]]:
    tokens = max(sequences_of(base).values(), default=1)  # of the longest sequence of a sample
    blocks = len(base.model.blocks()) if base.model is not None else 1
    for tensor in _powers(min(cluster.gpus_per_node, gpus)):
        for context in _powers(min(MOST_CONTEXT, gpus, max(1, tokens // LEAST_TOKENS))):
            for pipeline in _powers(min(MOST_PIPELINE, gpus, blocks)):
                if gpus % (tensor * context * pipeline) == 0:
                    yield dict(zip(_SHAPE, (tensor, context, pipeline), strict=True))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _strategies(ranks: int, own: Parallel) -> Iterator[tuple[str, int | None]]:
    if ranks == 1:  # all the same
        strategy = own.strategy or "FULL_SHARD"
        yield strategy, 1 if strategy == "HYBRID_SHARD" else None
        return
    yield "NO_SHARD", None
    yield "FULL_SHARD", None
    yield "SHARD_GRAD_OP", None
    for group in _powers(ranks - 1)[1:]:
        if ranks % group == 0:
            yield "HYBRID_SHARD", group


def _with(parallel: Parallel, shape: dict[str, int], strategy: str, group: int | None) -> Parallel:
    update: dict[str, Any] = {**_RESET, **shape, "strategy": strategy, "group": group}
    if shape["pipeline"] != parallel.pipeline:
        update |= _NO_PIPELINE
    if strategy not in ("NO_SHARD", "DDP"):
        update["bucket_mib"] = None
    elif parallel.strategy == "DDP":
        update["strategy"] = "DDP"
    return parallel.model_copy(update=update)


def _is_possible(base: Case, text: str, parallel: Parallel) -> bool:
    """Judge by the rules that need no batch, for the fewest ranks that have the shape; `text` tells the rest."""
    if parallel.strategy not in ("NO_SHARD", "DDP"):  # how it is sharded matters to none of them
        parallel = parallel.model_copy(update={"strategy": "FULL_SHARD", "group": None})

    def make() -> bool:
        world = parallel.tensor * parallel.context * parallel.pipeline
        recipe = base.recipe.model_copy(update={"parallel": parallel.model_copy(update={"offload": False})})
        case = Case(recipe, world, layout_of(parallel, world), base)
        return not any(_refuses(check, case) for check in CHECKS if check not in _OF_BATCHES)

    return bool(_POSSIBLE(f"{text} {parallel!r}", make))


def _refuses(check: Callable[[Case], None], case: Case) -> bool:
    try:
        check(case)
    except Impossible:
        return True
    return False


def _shares(recipe: Recipe, gpus: int, layout: Layout) -> Shares | None:
    """Share out the batch in this layout; None where that cannot be."""
    if _refuses(check_batch, Case(recipe, gpus, layout)):
        return None
    shares = Shares.of(recipe, layout)
    return shares if micros(recipe, layout, shares) else None


def _state(parameters: int, moments: Moments, layout: Layout) -> float:
    """Return the least bytes of parameters, gradients and moments: in the update, or where all is gathered."""
    whole = parameters / (layout.tensor * layout.pipeline)
    number = whole / (layout.shard * layout.context)
    update = 4 * (2 + min(moments))
    gathered = 2 * whole if layout.shard > 1 and not layout.reshard else 0.0  # in bf16 at least, while it computes
    return max(update * number, (update - 4) * number + gathered)  # then there are no gradients yet


def micros(recipe: Recipe, layout: Layout, shares: Shares) -> list[int]:
    """List samples of a pass, the most first: the recipe's own or the whole share, and divisors of it below that.

    What would not fill a pipeline is left out. Each is at most 2/3 of the one before; the smallest is always there.
    """
    found: list[int] = []
    sizes = [shares.micro, *(size for size in _divisors(shares.rank) if size < shares.micro)]
    good = [s for s in sizes if fill_pipeline(recipe.parallel, layout.pipeline, math.ceil(shares.rank / s))]
    for size in good:
        if not found or 3 * size <= 2 * found[-1] or size == good[-1]:
            found.append(size)
    return found


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    """List divisors, the largest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}, reverse=True))


def changes_of(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Return words for the command line that make one recipe's layout and batch of the other's."""
    words = []
    for section in ("parallel", "data"):
        old, new = getattr(before, section), getattr(after, section)
        if section == "parallel" and {old.strategy, old.replicate, old.shard, old.reshard} == {None}:
            old = old.model_copy(update={"strategy": "FULL_SHARD"})  # what it means
        for name in ("strategy", *_RESET, *_SHAPE, *_NO_PIPELINE, "bucket_mib", "recompute", "batch", "micro_batch"):
            if hasattr(new, name) and getattr(old, name) != getattr(new, name):
                words.append(f"{section}.{name}={_word(getattr(new, name))}")
    return tuple(words)


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Recompute):
        (name, inner), *_ = value.model_dump(exclude_none=True).items()
        return f"{{{name}: {list(inner) if isinstance(inner, tuple) else inner}}}".replace("'", "")
    return str(value)


def layouts(
    recipe: Recipe, cluster: Cluster, gpus: int, *, as_is: bool = False, any_batch: bool = False, top: int = 10
) -> list[Estimate]:
    """List layouts of a settled recipe: its own with `as_is`, else the best."""
    if not as_is:
        return search(recipe, cluster, gpus, any_batch=any_batch, top=top)
    if any_batch:
        raise UserError("--any-batch: --as-is keeps the recipe's own batch; leave one of them out")
    check_gpus(cluster, gpus)
    refuse(without_device(recipe), gpus)
    return [estimate(recipe, cluster, gpus)]


def search(recipe: Recipe, cluster: Cluster, gpus: int, *, any_batch: bool = False, top: int = 10) -> list[Estimate]:
    """List the fastest layouts of a settled recipe that fit; where none does, those that need least memory."""
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
    for one in sorted(found, key=lambda one: -one.rate(cluster)):
        if len(good) == top:
            break
        good += [made for made in [exact(one)] if made.fits]
    if good:
        return sorted(good, key=lambda one: -one.samples_per_second)
    smallest = sorted(some, key=lambda one: one.least)[: min(top, SHOWN)]
    return sorted((exact(_smallest(one)) for one in smallest), key=lambda one: one.memory_gib)


def nearest(recipe: Recipe, cluster: Cluster, gpus: int) -> Estimate | None:
    """Find what fits and changes least: this layout with less at once, another on as many GPUs, the best on more."""
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
    """Take the largest micro-batch that fits, and smaller ones: in a pipeline, or if these recompute less."""
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
    """Take every batch of a rank that fits: a power of two that fills the pipeline."""
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
    """Take the first way to recompute that makes it fit, and those that may; tell whether one surely does."""
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
    """Return memory that is the same for any number of copies above one: a range of GPUs asks but once."""
    recipe, shares = candidate.recipe, candidate.shares
    layout = candidate.layout._replace(replicate=min(2, candidate.layout.replicate))
    unlike = {"strategy": None, "group": None, "replicate": None, "shard": None}  # the layout tells
    rest = (Moments.of(recipe.optimizer), recipe.ema, recipe.data.prefetch, layout, shares.micro, shares.passes)
    parallel = recipe.parallel.model_copy(update=unlike)
    alone = is_solo(recipe, layout, cluster)
    text = repr((recipe.model, recipe.objective, recipe.precision, parallel, alone, *rest))
    return _MEMORY(text, lambda: memory_for(recipe, cluster, layout, shares, rough=True))


def _at_least(candidate: Candidate) -> float:
    """Return bytes of a rank when all activations are kept: masters and moments, gradients if there are some yet."""
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
    """List ways to recompute, the least first: none, all but attention, all, and the recipe's own among them."""
    known = ["none", *([Recompute(keep=("attention",))] if _attends(model_of(recipe.model)) else []), "full"]
    own = recipe.parallel.recompute
    if own in known:
        return known
    return sorted([*known, own], key=lambda choice: -_kept(recipe, choice))


def _kept(recipe: Recipe, choice: Any) -> int:
    """Return bytes that a sample keeps for the backward."""
    parallel = recipe.parallel.model_copy(update={"recompute": choice})
    (work,) = works_of(recipe.model_copy(update={"parallel": parallel}), Layout(1, 1, reshard=False), 1, rough=True)
    return sum(segment.saved * segment.count for segment in work.segments)


@lru_cache(maxsize=8)
def _attends(model: Model) -> bool:
    return "attention" in all_roles(model.blocks())
