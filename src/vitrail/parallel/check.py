"""Layouts that cannot work are refused before anything is allocated, each with a sentence that proposes one that does.

- a check raises Impossible: what is wrong, and changes that may help, the nearest first
- what is proposed has passed the same checks: all of them, or at least those up to the one that failed
- sizes are those of the model itself, built on the meta device with what the data will tell put in by guess
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vitrail.errors import UserError
from vitrail.layers.attention import CrossAttention, SelfAttention
from vitrail.layers.backends import NO_RINGS
from vitrail.layers.block import MLP, SwiGLU
from vitrail.layers.patches import per_axis
from vitrail.models.model import Model, encoder_of
from vitrail.parallel import chunk, float8, recompute
from vitrail.parallel.context import choose_ulysses
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.parallel.pipeline import num_parts, stages_per_rank
from vitrail.parallel.shard import OFFLOAD_ON_CPU, chains_of, cut
from vitrail.parallel.tensor import heads_of
from vitrail.recipe import Recipe, load_recipe
from vitrail.recipe.kinds import remedy
from vitrail.recipe.sections import Parallel, Recompute

T = TypeVar("T")


class Change(NamedTuple):
    """Overrides of a recipe, as on the command line, and how many ranks to start; None: as many as now."""

    overrides: tuple[str, ...] = ()
    ranks: int | None = None

    def __str__(self) -> str:
        start = [] if self.ranks is None else [f"start {self.ranks} rank{'s' * (self.ranks > 1)}"]
        return " and ".join([*(["set " + " ".join(self.overrides)] if self.overrides else []), *start])


class ImpossibleLayout(UserError):
    """A layout that was refused; `proposals` are accepted instead."""

    def __init__(self, sentence: str, proposals: Iterable[Change] = ()):
        self.proposals = tuple(proposals)
        advice = ", or ".join(map(str, self.proposals))
        super().__init__(f"{sentence}; {advice}" if advice else sentence)


class Impossible(Exception):
    """A problem that a check found: a sentence without advice, and changes to try."""

    def __init__(self, sentence: str, *changes: Change):
        super().__init__(sentence)
        self.sentence, self.changes = sentence, changes


@dataclass(frozen=True)
class Case:
    """A recipe on a number of ranks."""

    recipe: Recipe
    world: int
    layout: Layout
    near: "Case | None" = None  # a case whose model may be the same

    @property
    def parallel(self) -> Parallel:
        return self.recipe.parallel

    @property
    def batch(self) -> int:
        return self.recipe.data.global_batch(self.layout.data)

    @cached_property
    def model(self) -> Model | None:
        """On the meta device; None where it cannot be built, which others say better."""
        here, near = self.recipe, self.near
        if near is not None and near.recipe.model == here.model and near.recipe.data.crop == here.data.crop:
            return near.model
        return self.build()

    def build(self) -> Model | None:
        c = self.recipe.model
        names = {field.name for field in dataclasses.fields(c)}
        try:
            guess: dict[str, Any] = {"shape": per_axis(self.recipe.data.crop, c.ndim), "channels": 1, "classes": 2}
            unknown = {key: value for key, value in guess.items() if key in names and getattr(c, key) is None}
            with torch.device("meta"):
                return dataclasses.replace(c, **unknown).build()
        except (ValueError, RuntimeError):  # RuntimeError: numbers that PyTorch cannot count with
            return None

    def key(self, module: str, name: str) -> str:
        """Return the recipe's key for a size of a module: of its part of the model, or of the model itself."""
        c, part = self.recipe.model, module.partition(".")[0]
        parts = {field.name for field in dataclasses.fields(c)}
        return f"model.{part}.{name}" if part in parts and hasattr(getattr(c, part), name) else f"model.{name}"


def _once(find: Callable[[Model], T]) -> Callable[[Model], T]:
    """Find what does not change but once for a model, of which a planner asks for many layouts."""
    found: WeakKeyDictionary[Model, T] = WeakKeyDictionary()

    @wraps(find)
    def known(model: Model) -> T:
        if model not in found:
            found[model] = find(model)
        return found[model]

    return known


def refuse(recipe: Recipe, world: int) -> Layout:
    """Return the layout of a recipe on `world` ranks, or raise ImpossibleLayout (or layout_of's own error)."""
    case = Case(recipe, world, layout_of(recipe.parallel, world))
    place, problem = _first_problem(case)
    if problem is None:
        return case.layout
    # One change of the layout and one of the model are choice enough.
    proposals = [_best(case, place, problem.changes, of_model=kind) for kind in (False, True)]
    reach = max((length for length, _ in proposals), default=0)
    raise ImpossibleLayout(problem.sentence, [change for length, change in proposals if change and length == reach])


def _best(case: Case, place: int, changes: Iterable[Change], *, of_model: bool) -> tuple[int, Change | None]:
    """Return the first change that passes all checks, else one that passes the most, and more than `place`."""
    best: tuple[int, Change | None] = (place, None)
    for change in changes:
        if of_model == any(override.startswith("model.") for override in change.overrides):
            reached = _reach(case, change)
            if reached > best[0]:
                best = reached, change
            if reached == len(CHECKS):
                break
    return best


def _first_problem(case: Case) -> tuple[int, Impossible | None]:
    for place, check in enumerate(CHECKS):
        try:
            check(case)
        except Impossible as problem:
            return place, problem
    return len(CHECKS), None


def _reach(case: Case, change: Change) -> int:
    """Count the checks that the changed recipe passes; 0 where it is no recipe, or no layout, at all."""
    ranks = change.ranks or case.world
    try:
        recipe = load_recipe(case.recipe, change.overrides)
        return _first_problem(Case(recipe, ranks, layout_of(recipe.parallel, ranks), case))[0]
    except UserError:
        return 0


def _other_sizes(case: Case, axis: str) -> list[Change]:
    """Return changes to other sizes of an axis, the nearest first: for the same ranks, then for as many as it takes."""
    now = getattr(case.layout, axis)
    sizes = [n for n in range(1, case.world + 1) if n != now and 0 in (case.world % n, now % n)]
    nearest = sorted(sizes, key=lambda n: (abs(n - now), n))
    keys = [(f"parallel.{axis}={n}",) for n in nearest]
    ranks = [case.world // now * n for n in nearest]
    return [*map(Change, keys), *map(Change, keys, ranks)]


def _near_multiples(number: int, factor: int) -> list[int]:
    """Return multiples of a factor, the nearest to a number first."""
    below = number // factor
    return sorted((n * factor for n in range(max(1, below - 4), below + 6)), key=lambda n: abs(n - number))


# ---------------------------------------------------------------- the checks, in order


def check_batch(case: Case) -> None:
    ranks = case.layout.data
    if case.batch % ranks:
        raise Impossible(
            f"data.batch: {case.batch} samples cannot be shared evenly by {ranks} data-parallel ranks ({case.layout})",
            *(Change((f"data.batch={n}",)) for n in _near_multiples(case.batch, ranks)),
        )


def check_tensor(case: Case) -> None:
    """Refuse tensor ranks that would not have whole heads, whole groups of them, and equally many hidden channels."""
    ranks = case.layout.tensor
    if ranks == 1 or case.model is None:
        return
    order = ("heads", "kv_heads", "hidden")
    for module, name, size in sorted(_widths(case.model), key=lambda width: order.index(width[1])):
        if size % ranks:
            key = case.key(module, name)
            raise Impossible(
                f"{key}: {size} cannot be shared evenly by parallel.tensor={ranks} ranks",
                *_other_sizes(case, "tensor"),
                *(Change((f"{key}={n}",)) for n in _near_multiples(size, ranks)),
            )


@_once
def _widths(model: Model) -> list[tuple[str, str, int]]:
    """Return what tensor ranks share: (module, key, size); of equal blocks the first one's."""
    of_blocks = {module for block in model.blocks() for module in block.modules()}
    seen, found = set(), []
    for module, part in model.named_modules():
        if part not in of_blocks:
            continue
        sizes: dict[str, int] = {}
        if isinstance(part, SelfAttention | CrossAttention):
            heads, groups = heads_of(part)
            sizes = {"heads": heads, **({"kv_heads": groups} if groups < heads else {})}
        elif isinstance(part, MLP | SwiGLU):
            sizes = {"hidden": part.fc1.out_features}
        for name, size in sizes.items():
            where = (module.partition(".")[0], name, size)
            if where not in seen:
                seen.add(where)
                found.append((module, name, size))
    return found


def check_context(case: Case) -> None:
    """Refuse numbers of heads that the ranks which trade them do not divide; rings take any number."""
    context, wanted = case.layout.context, case.parallel.ulysses
    if case.model is None:
        return
    rings = any(choose_ulysses(*_local_heads(case, part), context) < context for part in _attentions(case.model))
    if context > 1 and case.parallel.attention in NO_RINGS and (rings if wanted is None else wanted < context):
        raise Impossible(
            f"parallel.attention: {case.parallel.attention!r} cannot attend to keys part by part, as rings do",
            Change(("parallel.attention=auto",)),
            *(Change((f"parallel.ulysses={context}",)) for _ in range(not rings)),
        )
    if wanted is None:
        return
    others = [n for n in range(1, context + 1) if n != wanted and context % n == 0]
    nearest = sorted(others, key=lambda n: (abs(n - wanted), n))
    changes = [*(Change((f"parallel.ulysses={n}",)) for n in nearest), Change(("parallel.ulysses=null",))]
    if context % wanted:
        raise Impossible(f"parallel.ulysses: {wanted} does not divide parallel.context={context}", *changes)
    for part in _attentions(case.model):
        heads, groups = _local_heads(case, part)
        try:
            choose_ulysses(heads, groups, context, wanted)
        except UserError:
            shown = f"{heads} head{'s' * (heads > 1)}{' of each tensor rank' * (case.layout.tensor > 1)}"
            raise Impossible(f"parallel.ulysses: {wanted} ranks cannot share the {shown} evenly", *changes) from None


@_once
def _attentions(model: Model) -> list[SelfAttention | CrossAttention]:
    modules = (module for block in model.blocks() for module in block.modules())
    return [module for module in modules if isinstance(module, SelfAttention | CrossAttention)]


def _local_heads(case: Case, attention: SelfAttention | CrossAttention) -> tuple[int, int]:
    """Heads and key-value heads of a tensor rank."""
    heads, groups = heads_of(attention)
    return heads // case.layout.tensor, groups // case.layout.tensor


@_once
def _chains(model: Model) -> list[list[nn.Module]]:
    return chains_of(model.blocks())


def check_tokens(case: Case) -> None:
    """Refuse context and tensor ranks that would have no token of a sequence."""
    parts = case.layout.parts
    if parts == 1:
        return
    if case.model is not None and not _attentions(case.model):
        raise Impossible(
            f"parallel: context x tensor = {parts} ranks share the tokens of a sample, but the blocks of model.kind "
            f"{case.recipe.model.kind!r} hold no attention of vitrail's (layers.attention) that could see them all",
            Change(("parallel.context=1", "parallel.tensor=1")),
        )
    for what, number in sequences_of(case).items():
        if number < parts:
            axes = [axis for axis in ("context", "tensor") if getattr(case.layout, axis) > 1]
            shown = " x ".join(f"parallel.{axis}={getattr(case.layout, axis)}" for axis in axes)
            both = (Change(("parallel.context=1", "parallel.tensor=1")),) if len(axes) > 1 else ()
            raise Impossible(
                f"{shown}: {parts} ranks cannot share the {number} {what} of a sample",
                *(change for axis in axes for change in _other_sizes(case, axis)),
                *both,
            )


def sequences_of(case: Case) -> dict[str, int]:
    """Count the tokens of each sequence of a sample; separate variables have sequences of their own."""
    if case.model is None:
        return {}
    c = case.model.config
    if hasattr(c, "token_counts"):
        visible, hidden = c.token_counts()
        return {"visible tokens": visible, "predicted tokens": hidden}
    encoder = encoder_of(c)
    if not (hasattr(encoder, "tokens") and hasattr(encoder, "patch")):
        return {}
    return {"tokens": encoder.tokens.count(per_axis(c.shape, c.ndim), per_axis(encoder.patch, c.ndim))}


def check_pipeline(case: Case) -> None:
    """Refuse a pipeline with more stages than the model has steps, or with stages that do not fit its schedule."""
    c, ranks = case.parallel, case.layout.pipeline
    if c.pipeline == 1:
        keys = {"stages": c.stages is not None, "split": c.split != "measured", "schedule": c.schedule != "1F1B"}
        for key in (key for key, given in keys.items() if given):
            raise Impossible(
                f"parallel.{key}: {getattr(c, key)} is for pipelines, and parallel.pipeline is 1",
                Change((f"parallel.{key}=null",)),
                *(Change((f"parallel.pipeline={n}",)) for n in range(2, case.world + 1)),
            )
    if ranks == 1:
        return
    if c.schedule == "interleaved" and c.stages == 1:
        raise Impossible(
            "parallel.stages: with schedule interleaved a rank has 2 stages or more, not 1",
            Change(("parallel.stages=2",)),
            Change(("parallel.schedule=1F1B",)),
        )
    each = stages_per_rank(c)
    if c.schedule != "interleaved" and each > 1:
        raise Impossible(
            f"parallel.stages: with schedule {c.schedule} a rank has 1 stage, not {each}",
            Change(("parallel.schedule=interleaved",)),
            Change(("parallel.stages=1",)),
        )
    if case.model is None:
        return
    steps, stages = len(case.model.stages()), num_parts(c, ranks)
    if stages > steps:
        raise Impossible(
            f"parallel.pipeline: {ranks} ranks with {each} stage{'s' * (each > 1)} each are more than the "
            f"{steps} steps of the model",
            *_other_sizes(case, "pipeline"),
            Change(("parallel.schedule=1F1B", "parallel.stages=1")),
        )
    if c.split != "measured" and (len(c.split) != stages or sum(c.split) != steps):
        even = [steps * (stage + 1) // stages - steps * stage // stages for stage in range(stages)]
        raise Impossible(
            f"parallel.split: {list(c.split)} must be {stages} numbers, one for each stage, that add up to the {steps} "
            f"steps of the model",
            Change((f"parallel.split=[{','.join(map(str, even))}]",)),
        )


def fill_pipeline(parallel: Parallel, ranks: int, number: int) -> bool:
    """Say whether a number of micro-batches is enough for a pipeline."""
    return ranks == 1 or (number >= num_parts(parallel, ranks) and number % _rounds(parallel, ranks) == 0)


def _rounds(parallel: Parallel, ranks: int) -> int:
    return ranks if parallel.schedule == "interleaved" else 1


def check_micro_batches(case: Case) -> None:
    """Refuse fewer micro-batches than pipeline stages; an interleaved schedule needs whole rounds of them."""
    c, ranks = case.parallel, case.layout.pipeline
    if ranks == 1:
        return
    share, stages, data = case.batch // case.layout.data, num_parts(c, ranks), case.recipe.data
    number = math.ceil(share / (data.micro_batch or share))
    if fill_pipeline(c, ranks, number):
        return
    multiple = _rounds(c, ranks)
    needed = math.ceil(stages / multiple) * multiple
    more = f"{needed}/rank" if isinstance(data.batch, str) else needed * case.layout.data
    wanted = f"at least {stages}" + (f", a multiple of {ranks}" if multiple > 1 else "")
    raise Impossible(
        f"data.micro_batch: {share} sample{'s' * (share > 1)} of a data-parallel rank make {number} "
        f"micro-batch{'es' * (number > 1)} "
        f"of {data.micro_batch or share}, but {stages} pipeline stages ({c.schedule}) need {wanted}",
        *(
            Change((f"data.micro_batch={n}",))
            for n in range(share, 0, -1)
            if share % n == 0 and fill_pipeline(c, ranks, share // n)
        ),
        Change((f"data.batch={more}", "data.micro_batch=1")),
        *_other_sizes(case, "pipeline"),
    )


def check_sharding(case: Case) -> None:
    """Refuse settings of groups, buckets, prefetching and the host's memory that could not do anything."""
    c, recipe = case.parallel, case.recipe
    sizes = (c.shard, c.replicate, c.reshard)
    explicit = any(size is not None for size in sizes)
    replicated = case.layout.shard == 1 if explicit else c.strategy in ("DDP", "NO_SHARD")
    if c.bucket_mib is not None and not replicated:
        named = c.strategy or ("a sharded layout" if explicit else "FULL_SHARD")
        raise Impossible(
            f"parallel.bucket_mib: {c.bucket_mib}, but {named} has no buckets (parallel.wrap groups its blocks)",
            Change(("parallel.bucket_mib=null",)),
        )
    if c.bucket_mib is not None and c.wrap > 1:
        raise Impossible(
            f"parallel.wrap: {c.wrap}, but parallel.bucket_mib={c.bucket_mib} says how many blocks go together, too",
            Change(("parallel.wrap=1",)),
        )
    if c.offload and recipe.optimizer.update("matrix").needs == "matrices":
        raise Impossible(
            f"parallel.offload: optimizer.kind={recipe.optimizer.kind} needs whole matrices, whose shards would be "
            "gathered from host to host",
            Change(("parallel.offload=false",)),
        )
    on_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
    if c.offload and not on_gpu:
        raise Impossible(f"parallel.offload: {OFFLOAD_ON_CPU}", Change(("parallel.offload=false",)))
    if case.model is None:
        return
    chains = _chains(case.model)
    longest = max(map(len, chains), default=0)
    if c.wrap > max(1, longest):
        raise Impossible(
            f"parallel.wrap: {c.wrap}, but the model has no more than {longest} equal blocks in a row",
            Change((f"parallel.wrap={longest}",)),
        )
    reduce = torch.float32 if recipe.precision.reduce == "fp32" else torch.bfloat16
    groups = max((len(cut(chain, c, reduce)) for chain in chains), default=0)
    for key in ("forward", "backward"):
        depth, most = getattr(c.prefetch, key), max(1, groups)
        if depth > most:
            raise Impossible(
                f"parallel.prefetch.{key}: {depth} groups ahead are more than the model's {groups} in a row",
                Change((f"parallel.prefetch.{key}={most}",)),
            )


def check_memory(case: Case) -> None:
    """Refuse choices of recomputation, pieces and float8 that could not do anything."""
    c, recipe = case.parallel, case.recipe
    if recipe.precision.compute == "float8" and (reason := _no_float8(recipe)) is not None:
        raise Impossible(
            f"precision.compute: float8 cannot be used, since {reason}", Change(("precision.compute=bf16",))
        )
    if case.model is None:
        return
    blocks = case.model.blocks()
    if isinstance(c.recompute, Recompute):
        if c.recompute.keep == ():
            raise Impossible(
                "parallel.recompute.keep: nothing is kept, which is recompute: full",
                Change(("parallel.recompute=full",)),
            )
        if c.recompute.every is not None and c.recompute.every > len(blocks):
            raise Impossible(
                f"parallel.recompute.every: {c.recompute.every} is more than the model's {len(blocks)} blocks",
                Change((f"parallel.recompute.every={len(blocks)}",)),
            )
        chunked = {"gate", "fc1", "fc2"} & set(c.recompute.keep or ())
        if c.chunk.mlp is not None and chunked:
            role = min(chunked)
            raise Impossible(
                f"parallel.recompute.keep: {role!r} cannot be kept with parallel.chunk.mlp={c.chunk.mlp}: "
                "pieces of an MLP are always recomputed",
                Change(("parallel.chunk.mlp=null",)),
            )
        try:
            recompute.plan(blocks, c.recompute, pieces=c.chunk.mlp is not None)
        except recompute.Unfit as error:
            raise Impossible(error.sentence, Change((error.instead,))) from None
    if c.chunk.head is not None and not chunk.has_head(case.model):
        raise Impossible(f"parallel.chunk.head: {chunk.no_head(case.model)}", Change(("parallel.chunk.head=null",)))


def _no_float8(recipe: Recipe) -> str | None:
    """Say why the device of a run, or what is installed, has no float8."""
    on_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
    reason = float8.refusal(torch.device("cuda" if on_gpu else "cpu"))
    if reason is None and find_spec("torchao") is None:
        reason = f"torchao is not installed ({remedy('torchao')})"
    return reason


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_batch,
    check_tensor,
    check_context,
    check_tokens,
    check_pipeline,
    check_micro_batches,
    check_sharding,
    check_memory,
)
