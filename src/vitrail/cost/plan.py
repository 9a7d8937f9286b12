"""A training step of a recipe on a cluster, without any GPU: memory, time, rates and what limits them.

- the recipe is completed and settled for the cluster's device: number format and compiling. Channels, shape and classes
  come from the recipe itself, else from what the first entry of data.train says of itself, which opens files but reads
  no voxels. Where neither knows, the error names the key to give: a plan needs no data
- an estimate is of one layout: what the model computes and keeps (trace), bytes by kind (memory), seconds (step)
- of a pipeline the first, a middle and the last rank are looked at; the fullest gives the memory, the slowest the time
- a search looks at hundreds of layouts. One trace a way to recompute serves them all, divided among the ranks; what is
  shown in the end is traced for itself
- it fits if what the allocator reserves, and what libraries take beside it, is at most 95 % of the device's memory
- MFU is of the device's dense bf16 peak whatever is computed in, as in the meters of a run
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vitrail.cost.cluster import Cluster, check_gpus, load_cluster
from vitrail.cost.memory import Memory, Moments, memory_of
from vitrail.cost.step import StepTime, step_time
from vitrail.cost.trace import Compute, trace, whole_matrix
from vitrail.cost.work import Key, Work, cached, divided, places, stage_of
from vitrail.errors import UserError
from vitrail.models.model import Model, filled, known_variables, sizes_of
from vitrail.objectives.objective import labels_wanted
from vitrail.parallel import recompute
from vitrail.parallel import shard as solo
from vitrail.parallel.mesh import Layout, layout_of
from vitrail.parallel.replay import HALF, ROOM, is_ours
from vitrail.recipe import Recipe, load_recipe
from vitrail.recipe.durations import parse_duration

HEADROOM = 0.95  # of the device's memory that a plan may reserve
GIB = 2**30
SAMPLES = 8  # of the trace that others are divided from
_MODELS, _WHOLE = cached(8), cached(16)


def complete(recipe: Recipe) -> Recipe:
    """Return the recipe with the model and the objective as training would complete them."""
    model, objective, crop = recipe.model, recipe.objective, sizes_of(recipe, "crop")
    entry = _Entry(recipe.data.train[0])
    condition = tuple(getattr(objective, "condition", ()))
    known = known_variables(model)
    if known is not None:
        channels = len(known.known)
    else:
        channels = model.channels or _needed("model.channels", entry.channels(), entry) - len(condition)
    if hasattr(objective, "fit"):  # of the variables their number alone matters here
        names = (*condition, *(f"variable{number}" for number in range(channels)))
        if hasattr(objective, "variables"):
            objective = dataclasses.replace(objective, variables=None)
        objective, model = objective.fit(model, names, recipe.data)
    update: dict[str, Any] = {"channels": channels, "shape": crop}
    labels = labels_wanted(objective, model)
    if labels is not None and hasattr(model, "classes") and hasattr(objective, "names"):
        names = objective.names or ()
        classes = model.classes or len(names) or _needed("model.classes", entry.classes(labels), entry)
        update["classes"] = classes
        objective = dataclasses.replace(objective, names=names or tuple(f"class {n}" for n in range(classes)))
    return recipe.model_copy(update={"model": filled(model, update), "objective": objective})


def _needed(key: str, found: int | None, entry: _Entry) -> int:
    if found:
        return found
    reason = f"cannot be asked ({entry.trouble.partition(';')[0]})" if entry.trouble else "does not either"
    raise UserError(f"{key}: the recipe does not tell it and data.train.0 {reason}; give it, such as {key}=3")


class _Entry:
    """An entry of data.train, opened only when it is asked for more than its config knows."""

    def __init__(self, config: Any) -> None:
        self.config, self.trouble, self._source = config, "", None
        self.path = getattr(config, "path", config.kind)

    def channels(self) -> int | None:
        c = self.config
        variables = getattr(c, "variables", None)
        if variables or (c.kind == "dummy"):
            return len(variables) if variables else c.channels
        return len(self.source.variables) if self.source is not None else None

    def classes(self, labels: str) -> int | None:
        if self.config.kind == "dummy":
            return self.config.classes
        if self.source is None:
            return None
        if labels == "item":
            return len(getattr(self.source, "class_names", ())) or None
        return max(getattr(self.source, "label_names", {}), default=-1) + 1 or None

    @property
    def source(self) -> Any:
        if self._source is None and not self.trouble:
            try:
                self._source = self.config.open()
            except (UserError, OSError) as error:
                self.trouble = str(error).rstrip(".")
        return self._source


@dataclass(frozen=True)
class Estimate:
    """One layout of a recipe on so many GPUs of a cluster; seconds are of one step, GiB of the fullest rank."""

    strategy: str
    group: int | None  # ranks that share one copy of the model, with HYBRID_SHARD
    tensor: int
    context: int
    pipeline: int
    gpus: int
    recompute: str
    batch: int  # samples of a step, over all ranks
    batch_per_rank: int  # of a data-parallel rank
    micro_batch: int
    fits: bool
    tight: bool  # it does not, but would without the allocator's gaps
    memory_gib: float  # peak allocated
    reserved_gib: float  # with gaps, and with what libraries take
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    mfu: float
    hfu: float
    limited_by: str
    cost_per_million_samples: float | None  # in the cluster's currency
    run_hours: float | None  # of run.steps, where that can be counted without data
    run_cost: float | None
    memory: dict[str, float]  # GiB by kind, when they are the most
    moment: str  # when that is
    time: dict[str, float]  # seconds by what is done
    limits: dict[str, float]  # the same seconds by what they are spent on
    checked: dict[str, Any] | None  # how far plans like this one were off, where the cluster's file knows any
    changes: tuple[str, ...] = ()  # to the recipe, as on the command line

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"changes": list(self.changes)}


def plan(
    recipe: Recipe | str | Path,
    *,
    cluster: Cluster | str | Path,
    gpus: int,
    overrides: tuple[str, ...] = (),
    as_is: bool = False,
    top: int = 10,
    any_batch: bool = False,
) -> list[Estimate]:
    """List layouts of a recipe on so many GPUs, the best first; with `as_is` only its own.

    Where none fits they are the ones that need least memory; nearest() tells what would fit.
    """
    from vitrail.cost.search import layouts

    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    ready = settle(load_recipe(recipe, overrides), place)
    check_gpus(place, gpus)
    return layouts(ready, place, gpus, as_is=as_is, any_batch=any_batch, top=top)


def settle(recipe: Recipe, cluster: Cluster) -> Recipe:
    """Complete the recipe, with what `auto` means on the cluster's device."""
    on_gpu = cluster.device.name != "cpu"
    compute, compiled = recipe.precision.compute, recipe.parallel.compile
    if compute == "auto":
        compute = "bf16" if on_gpu else "fp32"
    if compute == "float8" and "float8" not in cluster.device.tflops:
        raise UserError(
            f"precision.compute: float8, but {cluster.device.name} of cluster {cluster.name} has none; "
            "set precision.compute=bf16"
        )
    precision = recipe.precision.model_copy(update={"compute": compute})
    parallel = recipe.parallel.model_copy(update={"compile": on_gpu if compiled == "auto" else compiled})
    return complete(recipe).model_copy(update={"precision": precision, "parallel": parallel})


def without_device(recipe: Recipe) -> Recipe:
    """Return the recipe without what would be refused for the device of the machine that plans."""
    return recipe.model_copy(
        update={
            "parallel": recipe.parallel.model_copy(update={"offload": False}),
            "precision": recipe.precision.model_copy(update={"compute": "bf16"}),
        }
    )


def compute_of(recipe: Recipe) -> Compute:
    """Return the number format of a settled recipe."""
    assert recipe.precision.compute != "auto"
    return recipe.precision.compute


def model_of(config: Any) -> Model:
    """Build a model on the meta device."""
    return _built(config)[0]


def num_parameters(recipe: Recipe) -> int:
    """Count parameters once: a search asks thousands of times, and a large model has thousands of them."""
    return _built(recipe.model)[1]


def _built(config: Any) -> tuple[Model, int]:
    def make() -> tuple[Model, int]:
        with torch.device("meta"):
            model = config.build()
        return model, sum(parameter.numel() for parameter in model.parameters())

    return _MODELS(repr(config), make)


@dataclass(frozen=True)
class Shares:
    """The samples of a step, as they are shared out."""

    batch: int  # over all ranks
    rank: int  # of a data-parallel rank
    micro: int  # of one pass
    passes: int

    @property
    def rest(self) -> int:
        """Return the samples of the last pass where it is a short one, else 0."""
        return self.rank % self.micro

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout) -> Shares:
        batch = recipe.data.global_batch(layout.data)
        share = max(1, batch // layout.data)
        micro = min(recipe.data.micro_batch or share, share)
        return cls(batch, share, micro, math.ceil(share / micro))


def works_of(recipe: Recipe, layout: Layout, micro: int, *, rough: bool = False) -> Sequence[Work]:
    """Return the work of those ranks of a pipeline that may differ; `rough` is for comparing many layouts."""
    if rough:
        c = recipe.parallel
        text = repr((recipe.model, recipe.objective, recipe.precision, c.recompute, c.chunk, c.attention))
        whole = Layout(1, 1, reshard=False)
        key = Key(f"{text} {c.compile}", lambda: _work(recipe, whole, SAMPLES, 0))
        return _divided(key, micro, layout.tensor, layout.context, layout.pipeline)
    return [_work(recipe, layout, micro, rank) for rank in places(layout.pipeline)]


@lru_cache(maxsize=4096)
def _divided(key: Key, micro: int, tensor: int, context: int, pipeline: int) -> tuple[Work, ...]:
    if pipeline == 1:
        return (divided(_WHOLE(key.text, key.make), samples=micro, tensor=tensor, context=context),)
    (work,) = _divided(key, micro, tensor, context, 1)
    return tuple(stage_of(work, rank, pipeline) for rank in places(pipeline))


def _work(recipe: Recipe, layout: Layout, micro: int, rank: int) -> Work:
    c = recipe.parallel
    work = trace(
        recipe.model,
        recipe.objective,
        samples=micro,
        compute=compute_of(recipe),
        recompute=c.recompute,
        compiled=bool(c.compile),
        chunk=c.chunk,
        tensor=layout.tensor,
        context=layout.context,
        pipeline_rank=(rank, layout.pipeline),
    )
    if c.attention in ("math", "reference"):
        return whole_matrix(work, item=4 if compute_of(recipe) == "fp32" else 2)
    return work


def is_solo(recipe: Recipe, layout: Layout, cluster: Cluster) -> bool:
    """Tell whether one rank has all of the model, and FSDP2 is left out."""
    return solo.suits(
        num_parameters(recipe),
        layout,
        recipe.parallel,
        compute=torch.float32 if compute_of(recipe) == "fp32" else torch.bfloat16,
        memory=None if cluster.device.name == "cpu" else cluster.device.memory_gib * GIB,
    )


def memory_for(recipe: Recipe, cluster: Cluster, layout: Layout, shares: Shares, *, rough: bool = False) -> Memory:
    """Return the memory of the fullest rank."""
    alone = is_solo(recipe, layout, cluster)
    found = (
        memory_of(
            work,
            layout,
            recipe.parallel,
            recipe.precision,
            micro_batches=shares.passes,
            moments=Moments.of(recipe.optimizer),
            ema=recipe.ema is not None,
            read_ahead=recipe.data.prefetch + 1,  # that wait, and the one that is being made
            rank=rank,
            solo=alone,
        )
        for rank, work in zip(places(layout.pipeline), works_of(recipe, layout, shares.micro, rough=rough), strict=True)
    )
    return max(found, key=lambda memory: memory.peak)


def is_replayed(recipe: Recipe, layout: Layout, cluster: Cluster, memory: Memory, shares: Shares) -> bool:
    """Tell whether passes that need so much memory are recorded."""
    c, on_gpu = recipe.parallel.replay, cluster.device.name != "cpu"
    most = HALF if shares.rest else ROOM  # micro-batches of two sizes take turns
    room = memory.reserved(cluster.device) <= most * cluster.device.memory_gib * GIB
    auto = c == "auto" and room and is_ours(recipe.model, recipe.objective)
    return on_gpu and is_solo(recipe, layout, cluster) and (c is True or auto)


def fits(memory: Memory, cluster: Cluster) -> bool:
    return memory.reserved(cluster.device) <= HEADROOM * cluster.device.memory_gib * GIB


def like(cluster: Cluster, strategy: str, parameters: int, gpus: int) -> dict[str, Any] | None:
    """Say how far plans were off that are like one: of half to twice its parameters and GPUs, and of its strategy.

    Of one GPU any strategy counts, and elsewhere any where none was of this one. None: nothing like it was measured.
    """

    def near(one: float, other: float) -> bool:
        return 0.5 <= one / other <= 2

    rows = [
        (row, number, error)
        for row in cluster.checked
        for number, error in zip(row.gpus, row.errors, strict=True)
        if near(row.parameters, parameters) and near(number, gpus) and (number == 1) == (gpus == 1)
    ]
    rows = [one for one in rows if one[0].strategy == strategy and gpus > 1] or rows
    if not rows:
        return None
    of, numbers, errors = zip(*rows, strict=True)
    return {
        "rows": len(rows),
        "strategies": sorted({row.strategy for row in of}),
        "parameters": [min(row.parameters for row in of), max(row.parameters for row in of)],
        "gpus": [min(numbers), max(numbers)],
        "mean": sum(map(abs, errors)) / len(errors),
        "least": min(errors),
        "most": max(errors),
    }


def time_for(
    recipe: Recipe,
    cluster: Cluster,
    layout: Layout,
    shares: Shares,
    *,
    rough: bool = False,
    replayed: bool = False,
) -> StepTime:
    """Return the time of the slowest rank."""
    alone = is_solo(recipe, layout, cluster)

    def times(micro: int, passes: int) -> list[StepTime]:
        return [
            step_time(
                work,
                cluster,
                layout=layout,
                parallel=recipe.parallel,
                precision=recipe.precision,
                micro_batches=passes,
                moments=Moments.of(recipe.optimizer),
                solo=alone,
                replayed=replayed,
            )
            for work in works_of(recipe, layout, micro, rough=rough)
        ]

    if not shares.rest:
        return max(times(shares.micro, shares.passes), key=lambda time: time.seconds)
    # All passes but one, and what a short one adds to as many.
    full, more, less = (
        times(micro, passes)
        for micro, passes in (
            (shares.micro, shares.passes - 1),
            (shares.rest, shares.passes),
            (shares.rest, shares.passes - 1),
        )
    )
    return max(map(_with_added, full, more, less), key=lambda time: time.seconds)


def _with_added(time: StepTime, more: StepTime, less: StepTime) -> StepTime:
    """Return a step's time with what another has more than a third."""
    parts = Counter(time.parts)
    parts.update(more.parts)
    parts.subtract(less.parts)
    numbers = {
        name: value + getattr(more, name) - getattr(less, name)
        for name, value in vars(time).items()
        if isinstance(value, int | float)
    }
    kept = {name: seconds for name, seconds in parts.items() if seconds > 0}
    return dataclasses.replace(time, **numbers, parts=kept, limited_by=max(kept, key=lambda name: kept[name]))


def is_tight(memory: Memory, cluster: Cluster) -> bool:
    """Tell whether what is allocated and what libraries take have room, though not with the allocator's gaps."""
    gapless = dataclasses.replace(cluster.device, fragmentation=1.0)
    return not fits(memory, cluster) and memory.reserved(gapless) <= cluster.device.memory_gib * GIB


def estimate(recipe: Recipe, cluster: Cluster, gpus: int, *, changes: tuple[str, ...] = ()) -> Estimate:
    """Estimate a settled recipe with the layout that it names."""
    layout = layout_of(recipe.parallel, gpus)
    shares = Shares.of(recipe, layout)
    memory = memory_for(recipe, cluster, layout, shares)
    replayed = is_replayed(recipe, layout, cluster, memory, shares)
    if replayed:
        work = works_of(recipe, layout, shares.micro)[0]
        memory = dataclasses.replace(memory, recorded=work.inputs - work.raw)
    time = time_for(recipe, cluster, layout, shares, replayed=replayed)
    rate = shares.batch / time.seconds
    c, peak = recipe.parallel, gpus * cluster.device.peak("bf16")
    work = works_of(recipe, layout, shares.micro)[0]
    again = recompute.plan(model_of(recipe.model).blocks(), c.recompute, pieces=c.chunk.mlp is not None).again
    enough = fits(memory, cluster)
    hours = run_hours(recipe, shares.batch, time.seconds)
    price = None if cluster.price is None else cluster.price * gpus
    return Estimate(
        strategy=strategy_of(recipe, layout),
        group=layout.shard if strategy_of(recipe, layout) == "HYBRID_SHARD" else None,
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        gpus=gpus,
        recompute=recompute_words(recipe.parallel.recompute),
        batch=shares.batch,
        batch_per_rank=shares.rank,
        micro_batch=shares.micro,
        fits=enough,
        tight=is_tight(memory, cluster),
        memory_gib=memory.peak / GIB,
        reserved_gib=memory.reserved(cluster.device) / GIB,
        step_seconds=time.seconds,
        samples_per_second=rate,
        tokens_per_second=rate * work.tokens,
        mfu=rate * work.flops.training / peak,
        hfu=rate * work.flops.hardware(recompute=again) / peak,
        limited_by=time.limited_by if enough else "memory",
        cost_per_million_samples=None if price is None else price / 3600 * 1e6 / rate,
        run_hours=hours,
        run_cost=None if price is None or hours is None else price * hours,
        memory={name: size / GIB for name, size in vars(memory).items() if isinstance(size, int | float)},
        moment=memory.moment,
        time={name: value for name, value in vars(time).items() if isinstance(value, int | float)},
        limits=dict(time.parts),
        checked=like(cluster, strategy_of(recipe, layout), num_parameters(recipe), gpus),
        changes=changes,
    )


def strategy_of(recipe: Recipe, layout: Layout) -> str:
    """Return the recipe's own name for its layout, else the one that its sizes amount to."""
    c = recipe.parallel
    if c.strategy is not None:
        return c.strategy
    if layout.shard == 1 and c.shard is not None:
        return "NO_SHARD"
    if layout.replicate > 1:
        return "HYBRID_SHARD"
    return "FULL_SHARD" if layout.reshard else "SHARD_GRAD_OP"


def recompute_words(choice: Any) -> str:
    if isinstance(choice, str):
        return choice
    (name, value), *_ = choice.model_dump(exclude_none=True).items()
    return f"{name} {', '.join(value) if isinstance(value, list | tuple) else value}"


def run_hours(recipe: Recipe, batch: int, seconds: float) -> float | None:
    """Return the hours of run.steps; None where they are epochs, whose length only the data know."""
    number, unit = parse_duration(recipe.run.steps)
    if unit == "epochs":
        return None
    steps = float(number) if unit == "steps" else math.ceil(number / batch)
    return steps * seconds / 3600
