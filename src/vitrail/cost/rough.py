"""What a rank computes, divided from one trace of the whole model: good enough to compare layouts, and quick.

A search looks at hundreds of layouts. One trace a way to recompute serves them all: samples scale it, ranks of tensor
and context divide it evenly. What is shown in the end is traced for itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from vitrail.cost.key import Key
from vitrail.cost.trace import Op, Work
from vitrail.cost.work import places, stage_of
from vitrail.parallel.mesh import Layout

__all__ = ["SAMPLES", "Key", "divided", "works"]

SAMPLES = 8  # of the trace


def divided(work: Work, *, samples: int, tensor: int, context: int) -> Work:
    """The work of one rank for other samples, where `tensor` x `context` ranks share all of it evenly."""
    factor = samples / work.samples / (tensor * context)

    def op(one: Op) -> Op:
        shape, layer = one.shape, one.layer
        if one.kind == "gemm" and shape:
            shape = (round(shape[0] * samples / work.samples / context), max(1, shape[1] // tensor), *shape[2:])
            if layer:
                rows, smaller, larger = layer  # tensor ranks mostly cut the larger
                layer = (max(1, round(rows * samples / work.samples / context)), smaller, max(1, larger // tensor))
        elif one.kind == "attention" and len(shape) == 5:
            batch, heads, queries, keys, width = shape
            batch = max(1, round(batch * samples / work.samples))
            shape = (batch, max(1, heads // tensor), max(1, queries // context), keys, width)
        elif one.walk == "maps":
            shape = (max(1, round(shape[0] * samples / work.samples)),)
        return replace(
            one, flops=one.flops * factor, bytes=one.bytes * factor, shape=shape, layer=layer, spread=context
        )

    def ops(many: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(map(op, many))

    segments = [
        replace(
            segment,
            parameters=segment.parameters // tensor if segment.gathered else segment.parameters,
            forward=ops(segment.forward),
            backward=ops(segment.backward),
            again=ops(segment.again),
            saved=round(segment.saved * factor),
            peak=round(segment.peak * factor),
            forward_peak=round(segment.forward_peak * factor),
        )
        for segment in work.segments
    ]
    raw = round((work.raw - work.slabs) * samples / work.samples + work.slabs * factor)
    return replace(
        work,
        segments=tuple(segments),
        inputs=round((work.inputs - work.raw) * factor) + raw,
        raw=raw,
        slabs=round(work.slabs * factor),
        loss=ops(work.loss),
        loss_peak=round(work.loss_peak * factor),
        samples=samples,
    )


@lru_cache(maxsize=16)
def _whole(key: Key) -> Work:
    return key.make()


@lru_cache(maxsize=1024)
def _share(key: Key, micro: int, tensor: int, context: int) -> Work:
    return divided(_whole(key), samples=micro, tensor=tensor, context=context)


@lru_cache(maxsize=4096)
def _works(key: Key, micro: int, tensor: int, context: int, pipeline: int) -> tuple[Work, ...]:
    work = _share(key, micro, tensor, context)
    return (work,) if pipeline == 1 else tuple(stage_of(work, rank, pipeline) for rank in places(pipeline))


def works(key: Key, layout: Layout, micro: int) -> tuple[Work, ...]:
    """Of the ranks of a pipeline that may differ."""
    return _works(key, micro, layout.tensor, layout.context, layout.pipeline)
