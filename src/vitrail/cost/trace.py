"""What one training step of a model computes and keeps on one rank, from a run of its parts on the meta device.

- the model is the real one, prepared as parallelize() prepares it: pieces, recomputation, compilation; its inputs come
  from the objective's own prepare(), and its loss is run, too
- equal blocks are run once. Eager blocks keep what autograd keeps; compiled ones what the compiler's partitioner keeps
- parameters are in the compute type, as they are gathered; float8 is traced as bf16
- of several tensor ranks one is traced with its heads and channels, of several context ranks one with its tokens and
  the keys of all; a pipeline is cut where its stages cost the same
- costs are straight lines in the number of samples, so that two traces serve all numbers but the smallest
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.cost import fused, norm_op
from vitrail.cost import samples as inputs_of
from vitrail.cost.attention_op import TracedSequence, attend_with
from vitrail.cost.key import Key, key_of
from vitrail.cost.recorder import Op, Run, record
from vitrail.cost.split import split_block
from vitrail.cost.work import Segment, Work, between, stage_of
from vitrail.errors import UserError, is_out_of_memory
from vitrail.layers.flops import Flops
from vitrail.models.inputs import encoder_of
from vitrail.recipe.sections import Chunk

__all__ = ["Compute", "Op", "Segment", "Work", "trace", "trace_model"]

Compute = Literal["bf16", "fp32", "float8"]
FEW, BASE = 1, (8, 64)  # numbers of samples that are traced themselves, and those that others follow from


def trace(
    model: Any,
    objective: Any,
    *,
    samples: int,
    compute: Compute,
    recompute: Any = "none",
    compiled: bool = False,
    chunk: Chunk = Chunk(),  # noqa: B008
    tensor: int = 1,
    context: int = 1,
    pipeline_rank: tuple[int, int] = (0, 1),
) -> Work:
    """The work of one rank for a micro-batch of so many samples; `model` and `objective` are the recipe's configs.

    Settings that the model cannot have are ValueErrors.
    """
    if samples < 1:
        raise ValueError(f"samples {samples} must be at least 1")
    options = _Options(compute, recompute, compiled, chunk, tensor, context)
    work = _work_of(key_of(model), key_of(objective), samples, options)
    return work if pipeline_rank[1] == 1 else stage_of(work, *pipeline_rank)


@dataclass(frozen=True)
class _Options:
    compute: Compute
    recompute: Any
    compiled: bool
    chunk: Chunk
    tensor: int
    context: int

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
    built = inputs_of.build_objective(objective, model)
    parts = options.tensor * options.context
    if parts > 1 and not hasattr(encoder_of(model), "tokens"):
        raise ValueError(f"{model.kind} has no tokens that ranks could share; set tensor and context to 1")
    inputs, targets, raw = inputs_of.prepare(objective, built, model, samples, parts)

    def loss(output: Tensor) -> Tensor:
        if parts > 1 and built.needs_whole:
            output = built.join([output] * parts, targets)
        return built.loss(output, targets).sum

    return trace_model(
        model,
        inputs,
        loss,
        samples=samples,
        options=options,
        flops=built.flops,
        tokens=built.tokens_per_sample(),
        held=inputs_of.bytes_of(targets),
        raw=raw.whole,
        slabs=raw.slabs,
    )


def trace_model(
    config: Any,
    inputs: dict[str, Any],
    loss: Callable[[Tensor], Tensor],
    *,
    samples: int,
    options: _Options | None = None,
    flops: Callable[[Any], Flops] | None = None,
    tokens: int = 0,
    held: int = 0,
    raw: int = 0,
    slabs: int = 0,
    **settings: Any,
) -> Work:
    """The work of a model on these inputs, which are on the meta device; `held` and `raw` are bytes beside them."""
    defaults: dict[str, Any] = {"compute": "bf16", "recompute": "none", "compiled": False, "chunk": Chunk()}
    c = options or _Options(**(defaults | {"tensor": 1, "context": 1} | settings))
    with torch.device("meta"):
        model = config.build()
    count = model.flops() if flops is None else flops(model)
    kept = _prepare(model, c)
    side = model.derive({name: value for name, value in inputs.items() if name != "x"})
    held += inputs_of.bytes_of(inputs, {name: value for name, value in side.items() if name != "taps"})
    segments, output = _segments(model, inputs["x"], side, kept)
    last = record(loss, output.shape, output.dtype)
    return Work(
        segments=tuple(segments),
        inputs=held + raw,
        loss=(*last.forward, *last.backward),
        loss_peak=last.saved + max(last.peak, last.forward_peak),
        samples=samples,
        flops=count,
        tokens=tokens,
        raw=raw,
        slabs=slabs,
    )


def _prepare(model: Any, c: _Options) -> dict[nn.Module, Any]:
    """As parallelize() does it, for one rank; what each block keeps."""
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
    if c.tensor > 1:
        for block in blocks:
            split_block(block, c.tensor)
    norm_op.as_kernels(model, spared=blocks if c.compiled else ())
    chunk.apply(model, c.chunk)
    recompute.carry_out(blocks, plan.kept)
    if c.compiled:
        for block in blocks:
            fused.compile_block(block)
    return dict(zip(blocks, plan.kept, strict=True))


def of_layers(ops: tuple[Op, ...], widths: set[tuple[int, int]]) -> tuple[Op, ...]:
    """Products of linear layers of these widths (the smaller first) with the layer they belong to, by their sides."""

    def layer_of(op: Op) -> tuple[int, ...]:
        for pair in widths:
            left = Counter(op.shape) - Counter(pair)
            if left.total() == len(op.shape) - len(pair) == 1:
                return next(iter(left)), *pair
        return ()

    return tuple(replace(op, layer=layer_of(op)) if op.kind == "gemm" else op for op in ops)


class _Parameters:
    """How many each stage has that none before it had."""

    def __init__(self) -> None:
        self.counted: set[nn.Parameter] = set()

    def of(self, owners: Sequence[nn.Module | nn.Parameter]) -> int:
        found = {p for one in owners for p in ([one] if isinstance(one, nn.Parameter) else one.parameters())}
        found -= self.counted
        self.counted |= found
        return sum(p.numel() for p in found)


def _segments(model: Any, x: Tensor, side: dict[str, Any], kept: dict[nn.Module, Any]) -> tuple[list[Segment], Run]:
    """Stage by stage; equal blocks that follow each other are one segment. The last run has the shape of the output."""
    from vitrail.parallel.float8 import linears_of
    from vitrail.parallel.shard import make_of

    segments: list[Segment] = []
    known: dict[Any, tuple[Run, Segment]] = {}
    shape, dtype, leaf = tuple(x.shape), x.dtype, False
    run: Run | None = None
    parameters = _Parameters()
    compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in kept)
    with fused.compiling() if compiled else nullcontext():
        for stage in model.stages():
            used = [one for one in stage.uses if one is not None]
            blocks = [one for one in used if one in kept]
            key = (make_of(blocks[0]), kept[blocks[0]], shape, dtype) if len(used) == len(blocks) == 1 else None
            own = parameters.of(used)
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
    left = parameters.of([model])
    segments[0] = replace(segments[0], parameters=segments[0].parameters + left)
    return segments, run
