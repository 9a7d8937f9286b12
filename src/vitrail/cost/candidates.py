"""Which layouts a recipe could have on so many GPUs.

- a shape is tensor x context x pipeline; the ranks that it leaves are spread by a strategy: replicated, fully sharded,
  or in groups. Impossible ones are left out by the rules that training itself has (parallel/check.py)
- sensible ones only: tensor ranks inside a node, at least 1024 tokens a context rank, powers of two
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vitrail.cost.cluster import Cluster
from vitrail.cost.plan import Shares, num_parameters, time_for, without_device
from vitrail.parallel.check import CHECKS, Case, Impossible, _sequences, check_batch, check_micro_batches
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
        data = self.recipe.data.model_copy(update={"micro_batch": None if micro == self.shares.rank else micro})
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
    base = Case(without_device(recipe), gpus, Layout(1, gpus, reshard=True))
    parameters = 0 if recipe.parallel.offload else num_parameters(recipe)
    for shape in _shapes(base, cluster, gpus):
        ranks = gpus // math.prod(shape.values())
        if not _is_possible(base, _with(recipe.parallel, shape, "FULL_SHARD", None)):
            continue
        for strategy, group in _strategies(ranks, recipe.parallel):
            parallel = _with(recipe.parallel, shape, strategy, group)
            changed = recipe.model_copy(update={"parallel": parallel})
            layout = layout_of(parallel, gpus)
            if (shares := _shares(changed, gpus, layout)) is not None:
                yield Candidate(changed, layout, shares, _state(parameters, recipe.optimizer.kind, layout))


def _shapes(base: Case, cluster: Cluster, gpus: int) -> Iterator[dict[str, int]]:
    """Tensor, context and pipeline ranks."""
    tokens = max(_sequences(base).values(), default=1)  # of the longest sequence of a sample
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


_POSSIBLE: dict[str, bool] = {}  # answers, by what was asked: they do not depend on the number of GPUs


def _is_possible(base: Case, parallel: Parallel) -> bool:
    """By the rules that do not depend on the batch or the strategy, for the fewest ranks that the shape has."""
    text = repr((base.recipe.model, base.recipe.data.crop, parallel))
    if text not in _POSSIBLE:
        world = parallel.tensor * parallel.context * parallel.pipeline
        recipe = base.recipe.model_copy(update={"parallel": parallel.model_copy(update={"offload": False})})
        case = Case(recipe, world, layout_of(parallel, world), base)
        _POSSIBLE[text] = not any(_refuses(check, case) for check in CHECKS if check not in _OF_BATCHES)
    return _POSSIBLE[text]


def _refuses(check: Callable[[Case], None], case: Case) -> bool:
    try:
        check(case)
    except Impossible:
        return True
    return False


def _shares(recipe: Recipe, gpus: int, layout: Layout) -> Shares | None:
    """How the batch is shared out in this layout; None where it cannot be."""
    case, shares = Case(recipe, gpus, layout), Shares.of(recipe, layout)
    try:
        check_batch(case)
        if recipe.data.micro_batch is not None:
            check_micro_batches(case)
    except Impossible:
        return None
    return shares if micros(recipe, layout, shares) else None


def _state(parameters: int, optimizer: str, layout: Layout) -> float:
    """Bytes of a rank's parameters, gradients and moments, at least."""
    whole = parameters / (layout.tensor * layout.pipeline)
    each = 16 if optimizer == "adamw" else 8
    gathered = 2 * whole if layout.shard > 1 and not layout.reshard else 0.0  # in bf16 at least, while it computes
    return each * whole / (layout.shard * layout.context) + gathered


def micros(recipe: Recipe, layout: Layout, shares: Shares) -> list[int]:
    """Samples of a pass, the most first: the recipe's own, or halves of the share; a pipeline needs so many passes."""
    own, share = recipe.data.micro_batch, shares.rank
    sizes = [share // 2**power for power in range(share.bit_length()) if share % 2**power == 0]
    return [size for size in ([min(own, share)] if own else sizes) if math.ceil(share / size) >= layout.pipeline]


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
