"""One training step of a model on one rank, computed and kept: a run of its parts on the meta device.

- the model is the real one, prepared as parallelize() prepares it: pieces, recomputation, compilation; its inputs come
  from the objective's own prepare(), and its loss is run, too
- equal blocks are run once. Eager blocks keep what autograd keeps; compiled ones what the compiler's partitioner keeps
- parameters are in the compute type, as they are gathered; float8 is traced as bf16
- of several tensor ranks one is traced with its heads and channels, of several context ranks one with its tokens and
  the keys of all; exchanges between ranks are operations that give the right shapes. A pipeline is cut where its stages
  cost the same
- costs are straight lines in the number of samples, so that two traces serve all numbers but the smallest
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.cost import fusion
from vitrail.cost.private import is_compiled, storage_key
from vitrail.cost.recorder import Op, Run, TracedPlanes, TracedSequence, attend_with, record, stand_in
from vitrail.cost.work import Key, Segment, Work, between, key_of, stage_of
from vitrail.draws import Draws
from vitrail.errors import UserError, is_out_of_memory
from vitrail.layers.flops import Flops
from vitrail.layers.patches import Part, per_axis
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.model import encoder_of, known_variables
from vitrail.parallel import planes
from vitrail.parallel.replay import map_tensors
from vitrail.parallel.split import Split, Whole
from vitrail.recipe.sections import Chunk

Compute = Literal["bf16", "fp32", "float8"]
FEW, BASE = 1, (8, 64)  # numbers of samples that are traced themselves, and those that others follow from


@stand_in
def gather(x: Tensor, times: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * times, *x.shape[2:])


@stand_in
def scatter(x: Tensor, times: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // times, *x.shape[2:])


def _times(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.times = inputs[1]


gather.register_autograd(lambda ctx, grad: (scatter(grad.contiguous(), ctx.times), None), setup_context=_times)
scatter.register_autograd(lambda ctx, grad: (gather(grad.contiguous(), ctx.times), None), setup_context=_times)


def split_block(block: nn.Module, tensor: int) -> None:
    """Leave in a block what one of so many tensor ranks has; refuse numbers that do not divide."""
    for module in list(block.modules()):
        columns: tuple[str, ...] = getattr(module, "columns", ())
        for name in columns:
            _divide(module, name, tensor, outputs=True)
        if columns:
            _divide(module, str(module.row), tensor, outputs=False)
            module.forward = _exchanged(module.forward, int(module.token_inputs), tensor)  # type: ignore[arg-type]
        for name in getattr(module, "gathered", ()):
            _divide(module, name, tensor, outputs=True)
            layer = getattr(module, name)
            layer.forward = _repeated(layer.forward, tensor)


def _divide(module: nn.Module, name: str, tensor: int, *, outputs: bool) -> None:
    layer = getattr(module, name)
    groups = layer.out_features if outputs else layer.in_features
    head = getattr(module, "head_width", 1)
    heads = groups // head // (getattr(module, "per_group", 1) + 2 if name == "qkv" else 2 if name == "kv" else 1)
    if groups % tensor or heads % tensor:
        what = f"{heads} heads" if head > 1 else f"{groups} channels"
        raise ValueError(f"tensor {tensor} does not divide the {what} of a block; choose a divisor")
    sizes = (layer.in_features, groups // tensor) if outputs else (groups // tensor, layer.out_features)
    setattr(module, name, nn.Linear(*sizes, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype))


def _exchanged(forward: Callable[..., Tensor], inputs: int, tensor: int) -> Callable[..., Tensor]:
    def run(*arguments: Any, **keywords: Any) -> Tensor:
        tokens = [gather(x, tensor) for x in arguments[:inputs]]
        return scatter(forward(*tokens, *arguments[inputs:], **keywords), tensor)

    return run


def _repeated(forward: Callable[[Tensor], Tensor], tensor: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return torch.cat([forward(x)] * tensor, dim=-1)

    return run


class Raw(NamedTuple):
    """Bytes of a batch as it was read, and of these what are slabs, or could be for two ranks."""

    whole: int
    slabs: int


class Shapes(Draws):
    """Draws of which the shape alone matters."""

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        return torch.zeros(len(self.counters), *shape)

    def normal(
        self, purpose: str, *shape: int, device: torch.device | str | None = None, rows: range | None = None
    ) -> Tensor:
        return torch.empty(len(self.counters), *shape, device=device)


def build_objective(objective: Any, model: Any) -> Any:
    """Build the objective of a recipe, for data whose statistics do not matter."""
    from vitrail.data.batch import Statistics

    return objective.build(model, Statistics(*((value,) * _channels(objective, model) for value in (0.0, 1.0))))


def prepare(objective: Any, built: Any, model: Any, samples: int, parts: int) -> tuple[dict[str, Any], Any, Raw]:
    """Make inputs and targets of one rank by the objective's own prepare(); last the bytes of the batch itself."""
    from vitrail.data.batch import Batch
    from vitrail.objectives.objective import drop_path_table, labels_wanted

    adaptive = isinstance(getattr(encoder_of(model), "tokens", None), AdaptiveTokens)
    # Trees grow on values: they are made for one sample, on the host, and stand for all.
    number, device = (1, "cpu") if adaptive else (samples, "meta")
    size = per_axis(model.shape, model.ndim)
    of = labels_wanted(objective, model)
    wanted = of == "voxel" or (of == "item" and getattr(model, "classes", None))
    labels = torch.zeros(number, *(size if of == "voxel" else ()), dtype=torch.long, device=device) if wanted else None
    known = known_variables(model)
    batch = Batch(
        counters=list(range(number)),
        values=torch.zeros(number, _channels(objective, model), *size, device=device),
        labels=labels,
        variables=known.known if known is not None else tuple(getattr(objective, "variables", None) or ()),
    )
    draws = Shapes(0, batch.counters)
    inputs, targets = Split(model, Part(0, parts)).prepare(built, batch, draws)
    with torch.device("meta"):
        rates = model.build().drop_path_rates()
    table = drop_path_table(draws, rates)
    if table is not None:
        inputs["drop_path"] = table.to("meta")
    values, own = samples * batch.values[0].numel() * 4, 0 if labels is None else samples * labels[0].numel() * 8
    # As the loader does it: a rank reads its slab of the values, where the objective can do with one; labels are whole.
    slabs = 0 if Split(model, Part(0, max(2, parts))).slab(built, size) is None else values // parts
    if adaptive:
        inputs, targets = (_on_meta(one, samples) for one in (inputs, targets))
    return inputs, targets, Raw((slabs or values) + own, slabs)


def _channels(objective: Any, model: Any) -> int:
    """Count the channels of the data: those that condition come from there, too."""
    if getattr(objective, "variables", None):
        return len(objective.variables)
    return model.channels


def _on_meta(value: Any, samples: int) -> Any:
    """Stretch what was made for one sample to many."""

    def made(t: Tensor) -> Tensor:
        shape = (samples, *t.shape[1:]) if t.ndim and t.shape[0] == 1 else tuple(t.shape)
        return torch.empty(shape, dtype=t.dtype, device="meta")

    return map_tensors(made, value)


def bytes_of(*values: Any) -> int:
    """Count the bytes of all tensors together, each storage once."""
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        found[storage_key(t)] = t.untyped_storage().nbytes()
        return t

    map_tensors(note, values)
    return sum(found.values())


def trace(
    model: Any,
    objective: Any,
    *,
    samples: int,
    pipeline_rank: tuple[int, int] = (0, 1),
    **settings: Any,
) -> Work:
    """Trace one rank with a micro-batch of so many samples; `model` and `objective` are the recipe's configs.

    `settings` are those of _Options; such as the model cannot have are ValueErrors.
    """
    if samples < 1:
        raise ValueError(f"samples {samples} must be at least 1")
    work = _work_of(key_of(model), key_of(objective), samples, _Options(**settings))
    return work if pipeline_rank[1] == 1 else stage_of(work, *pipeline_rank)


@dataclass(frozen=True)
class _Options:
    compute: Compute = "bf16"
    recompute: Any = "none"
    compiled: bool = False
    chunk: Chunk = Chunk()  # noqa: RUF009
    tensor: int = 1
    context: int = 1

    def __hash__(self) -> int:
        return hash(repr(self))


@lru_cache(maxsize=4096)
def _work_of(model: Key, objective: Key, samples: int, options: _Options) -> Work:
    if samples <= FEW or samples in BASE:
        return _traced(model, objective, samples, options)
    low, high = (_work_of(model, objective, base, options) for base in BASE)
    share = (samples - BASE[0]) / (BASE[1] - BASE[0])
    found = between(low, high, share)
    return _traced(model, objective, samples, options) if found is None else replace(found, samples=samples)


def _traced(model: Key, objective: Key, samples: int, options: _Options) -> Work:
    try:
        return _trace(model.make(), objective.make(), samples, options)
    except RuntimeError as error:  # what PyTorch raises where values or kernels are missing
        if is_out_of_memory(error):
            raise UserError(
                "data.crop: samples are too large to plan for in the memory here; make it smaller"
            ) from error
        kinds = f"model {model.make().kind!r} with objective {objective.make().kind!r}"
        raise UserError(
            f"{kinds} cannot be traced without data: {type(error).__name__}: {error}; what they do in prepare(), "
            "forward() and loss() must work on PyTorch's meta device, which has shapes and no values"
        ) from error


def _trace(model: Any, objective: Any, samples: int, options: _Options) -> Work:
    built = build_objective(objective, model)
    parts = options.tensor * options.context
    if parts > 1 and not hasattr(encoder_of(model), "tokens"):
        raise ValueError(f"{model.kind} has no tokens that ranks could share; set tensor and context to 1")
    inputs, targets, raw = prepare(objective, built, model, samples, parts)

    def loss(output: Tensor) -> Tensor:
        if isinstance(targets, Whole):
            return built.loss(targets.lists.join([output] * parts), targets.targets).sum
        return built.loss(output, targets).sum

    work = trace_model(model, inputs, loss, samples=samples, flops=built.flops, **vars(options))
    whole = work.inputs + bytes_of(targets) + raw.whole
    return replace(work, inputs=whole, raw=raw.whole, slabs=raw.slabs, tokens=built.tokens_per_sample())


def trace_model(
    config: Any,
    inputs: dict[str, Any],
    loss: Callable[[Tensor], Tensor],
    *,
    samples: int,
    flops: Callable[[Any], Flops] | None = None,
    **settings: Any,
) -> Work:
    """Trace a model alone on these inputs, which are on the meta device; `settings` are those of _Options."""
    c = _Options(**settings)
    with torch.device("meta"):
        model = config.build()
    count = model.flops() if flops is None else flops(model)
    kept = _prepare(model, c)
    side = model.derive({name: value for name, value in inputs.items() if name != "x"})
    held = bytes_of(inputs, {name: value for name, value in side.items() if name != "taps"})
    segments, output = _segments(model, inputs["x"], side, kept)
    last = record(loss, output.shape, output.dtype)
    return Work(
        segments=tuple(segments),
        inputs=held,
        loss=(*last.forward, *last.backward),
        loss_peak=last.saved + max(last.peak, last.forward_peak),
        samples=samples,
        flops=count,
        tokens=0,
    )


def _prepare(model: Any, c: _Options) -> dict[nn.Module, Any]:
    """Prepare a model as parallelize() does it, for one rank; returns what each block keeps."""
    from vitrail.parallel import chunk, recompute

    blocks = model.blocks()
    plan = recompute.plan(blocks, c.recompute, pieces=c.chunk.mlp is not None)
    model.to(torch.float32 if c.compute == "fp32" else torch.bfloat16)
    sequence = TracedSequence(context=c.context, tensor=c.tensor)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = attend_with(c.context, plain=c.compute == "fp32")
        if hasattr(module, "sequence"):
            module.sequence = sequence
    if planes.in_slabs(model.config, sequence.parts):
        planes.put(model, TracedPlanes(sequence.parts))
    if c.tensor > 1:
        for block in blocks:
            split_block(block, c.tensor)
    fusion.as_kernels(model, spared=blocks if c.compiled else ())
    chunk.apply(model, c.chunk)
    recompute.carry_out(blocks, plan.kept)
    if c.compiled:
        for block in blocks:
            fusion.compile_block(block)
    return dict(zip(blocks, plan.kept, strict=True))


def of_layers(ops: tuple[Op, ...], widths: set[tuple[int, int]]) -> tuple[Op, ...]:
    """Mark products of linear layers of these widths (the smaller first), found by their sides, with their layer."""

    def layer_of(op: Op) -> tuple[int, ...]:
        for pair in widths:
            left = Counter(op.shape) - Counter(pair)
            if left.total() == len(op.shape) - len(pair) == 1:
                return next(iter(left)), *pair
        return ()

    return tuple(replace(op, layer=layer_of(op)) if op.kind == "gemm" else op for op in ops)


def _segments(model: Any, x: Tensor, side: dict[str, Any], kept: dict[nn.Module, Any]) -> tuple[list[Segment], Run]:
    """Run stage by stage; equal blocks that follow each other are one segment. The last run has the output's shape."""
    from vitrail.parallel.float8 import linears_of
    from vitrail.parallel.shard import make_of

    segments: list[Segment] = []
    known: dict[Any, tuple[Run, Segment]] = {}
    shape, dtype, leaf = tuple(x.shape), x.dtype, False
    run: Run | None = None
    counted: set[nn.Parameter] = set()  # each once, in the first stage that has it

    def count(owners: Sequence[nn.Module | nn.Parameter]) -> int:
        found = {p for one in owners for p in ([one] if isinstance(one, nn.Parameter) else one.parameters())} - counted
        counted.update(found)
        return sum(p.numel() for p in found)

    compiled = any(map(is_compiled, kept))
    with fusion.compiling() if compiled else nullcontext():
        for stage in model.stages():
            used = [one for one in stage.uses if one is not None]
            blocks = [one for one in used if one in kept]
            key = (make_of(blocks[0]), kept[blocks[0]], shape, dtype) if len(used) == len(blocks) == 1 else None
            own = count(used)
            if key is not None and key in known:
                run, segment = known[key]
                if segments[-1].name == segment.name:
                    segments[-1] = replace(segments[-1], count=segments[-1].count + 1)
                else:
                    segments.append(segment)
            else:

                def forward(y: Tensor, stage: Any = stage) -> Tensor:
                    taken = side | {"taps": list(side["taps"])} if "taps" in side else side
                    return stage.run(y, taken)

                if compiled and blocks:  # outside the watch: to compile runs the block, too
                    forward(torch.empty(shape, dtype=dtype, device="meta", requires_grad=leaf))
                run = record(forward, shape, dtype, leaf=leaf)
                model.zero_grad(set_to_none=True)
                weights = [layer.weight for block in blocks for layer in linears_of(block)]
                widths = {(min(weight.shape), max(weight.shape)) for weight in weights}
                segment = Segment(
                    name=stage.name,
                    count=1,
                    parameters=own,
                    forward=of_layers(run.forward, widths),
                    backward=of_layers(run.backward, widths),
                    again=of_layers(run.again, widths),
                    saved=run.saved,
                    peak=run.peak,
                    gathered=bool(blocks),
                    forward_peak=run.forward_peak,
                    recomputed=bool(blocks) and kept[blocks[0]] is not None,
                )
                segments.append(segment)
                if key is not None:
                    known[key] = (run, segment)
            shape, dtype, leaf = run.shape, run.dtype, True
            if "taps" in stage.needs and "taps" in side and key is not None:
                side["taps"].append(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True))
    assert run is not None
    segments[0] = replace(segments[0], parameters=segments[0].parameters + count([model]))
    return segments, run


STEPS = {"forward": 4, "backward": 8}  # launches; each reads or writes the matrix once
LIVING, LIVING_FORWARD = 3 * 4, 2 * 4  # bytes for each score at the worst moment of the backward, of the forward


def is_whole(op: Op) -> bool:
    return op.kind == "attention" and op.kernels >= STEPS["forward"]


def scores_of(op: Op) -> int:
    return math.prod(op.shape[:4]) if op.kind == "attention" else 0


def whole_matrix(work: Work, *, item: int) -> Work:
    """Return the same work with attention that makes the whole matrix of scores (`parallel.attention` math, reference).

    Scores are written and read by each of its steps, and in the backward three such matrices live at once, in fp32: the
    probabilities, their gradient and that of the scores; in the forward two. Fused kernels, which a trace assumes, have
    none of them. Blocks that are not recomputed keep the probabilities. Recomputed ones make them again even where they
    keep attention: that is its output, and its backward asks for more. `item`: bytes of a number.
    """
    return replace(work, segments=tuple(_segment(segment, item) for segment in work.segments))


def _segment(segment: Segment, item: int) -> Segment:
    scores = max(map(scores_of, segment.forward), default=0)
    return replace(
        segment,
        forward=tuple(_op(op, item, "forward") for op in segment.forward),
        backward=tuple(_op(op, item, "backward") for op in segment.backward),
        again=_again(segment, item),
        saved=segment.saved + (0 if segment.recomputed else item * scores),  # the probabilities
        peak=segment.peak + LIVING * scores,
        forward_peak=segment.forward_peak + LIVING_FORWARD * scores,
    )


def _again(segment: Segment, item: int) -> tuple[Op, ...]:
    """Add the first half of attention, up to the probabilities, where its output is kept."""
    again = tuple(_op(op, item, "forward") for op in segment.again)
    if not segment.recomputed or any(op.kind == "attention" for op in again):
        return again
    whole = [_op(op, item, "forward") for op in segment.forward if op.kind == "attention"]
    return again + tuple(replace(op, flops=op.flops / 2, bytes=op.bytes / 2, kernels=op.kernels // 2) for op in whole)


def _op(op: Op, item: int, way: str) -> Op:
    if op.kind != "attention" or is_whole(op):
        return op
    steps = STEPS[way]
    return replace(op, bytes=op.bytes + steps * item * scores_of(op), kernels=steps)
