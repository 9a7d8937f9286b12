"""Which layouts a recipe could have on so many GPUs.

- a shape is tensor x context x pipeline; the ranks that it leaves are spread by a strategy: replicated, fully sharded,
  or in groups. Impossible ones are left out by the rules that training itself has (parallel/check.py)
- sensible ones only: tensor ranks inside a node, at least 1024 tokens a context rank, powers of two
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from vitrail.cost.cluster import Cluster
from vitrail.cost.memory import Moments
from vitrail.cost.plan import Shares, num_parameters, time_for, without_device
from vitrail.cost.rough import Key
from vitrail.parallel.check import (
    CHECKS,
    Case,
    Impossible,
    check_batch,
    check_micro_batches,
    fill_pipeline,
    sequences_of,
)
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Parallel, Recompute

LEAST_TOKENS = 1024  # of a rank that shares a sample's tokens
MOST_CONTEXT = 64
MOST_PIPELINE = 16
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

    def rate(self, cluster: Cluster, gpus: int) -> float:
        """Samples a second, roughly."""
        return self.shares.batch / time_for(self.recipe, cluster, gpus, self.layout, self.shares, rough=True).seconds

    def _changed(self, update: dict[str, Any]) -> Candidate:
        recipe = self.recipe.model_copy(update=update)
        return replace(self, recipe=recipe, shares=Shares.of(recipe, self.layout))


def candidates(recipe: Recipe, cluster: Cluster, gpus: int) -> Iterator[Candidate]:
    """Possible layouts, each with what its state takes at least."""
    shown = repr((recipe.model, recipe.data.crop))
    alone = _case(Key(shown, lambda: Case(recipe, 1, Layout(1, 1, reshard=True))))  # its model serves all of them
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


@lru_cache(maxsize=4)
def _case(key: Key) -> Case:
    return key.make()


def _shapes(base: Case, cluster: Cluster, gpus: int) -> Iterator[dict[str, int]]:
    """Tensor, context and pipeline ranks."""
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
    """By the rules that do not depend on the batch, for the fewest ranks that have the shape; `text` tells the rest."""
    if parallel.strategy not in ("NO_SHARD", "DDP"):  # how it is sharded matters to none of them
        parallel = parallel.model_copy(update={"strategy": "FULL_SHARD", "group": None})

    def make() -> bool:
        world = parallel.tensor * parallel.context * parallel.pipeline
        recipe = base.recipe.model_copy(update={"parallel": parallel.model_copy(update={"offload": False})})
        case = Case(recipe, world, layout_of(parallel, world), base)
        return not any(_refuses(check, case) for check in CHECKS if check not in _OF_BATCHES)

    return _answer(Key(f"{text} {parallel!r}", make))


@lru_cache(maxsize=4096)
def _answer(key: Key) -> bool:
    return bool(key.make())


def _refuses(check: Callable[[Case], None], case: Case) -> bool:
    try:
        check(case)
    except Impossible:
        return True
    return False


def _shares(recipe: Recipe, gpus: int, layout: Layout) -> Shares | None:
    """How the batch is shared out in this layout; None where it cannot be."""
    if _refuses(check_batch, Case(recipe, gpus, layout)):
        return None
    shares = Shares.of(recipe, layout)
    return shares if micros(recipe, layout, shares) else None


def _state(parameters: int, moments: Moments, layout: Layout) -> float:
    """Bytes of a rank's parameters, gradients and moments, at least: in the update, or where all is gathered."""
    whole = parameters / (layout.tensor * layout.pipeline)
    number = whole / (layout.shard * layout.context)
    update = 4 * (2 + min(moments))
    gathered = 2 * whole if layout.shard > 1 and not layout.reshard else 0.0  # in bf16 at least, while it computes
    return max(update * number, (update - 4) * number + gathered)  # then there are no gradients yet


def micros(recipe: Recipe, layout: Layout, shares: Shares) -> list[int]:
    """Samples of a pass, the most first: the recipe's own or the whole share, and divisors of it below that.

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
    """The largest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}, reverse=True))


def changes_of(before: Recipe, after: Recipe) -> tuple[str, ...]:
    """Words for the command line that make one recipe's layout and batch of the other's."""
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
