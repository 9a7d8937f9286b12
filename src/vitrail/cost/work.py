"""One training step as numbers: what a rank computes and keeps, in segments of operations.

Work between two traces, work of one rank of a pipeline, and keys for caches follow from these numbers. Last come counts
of training FLOPs as other projects make them, by name, to compare with what they published:

| name | what it counts for a sample |
|---|---|
| model | what the model computes, 3 x forward: our own count, which MFU uses |
| torchtitan-mae | 6 N + 12 L D v for every token, hidden ones too; N parameters, L and D of the encoder, v visible |
| torchditan | 6 N + 12 L D n for every token; N all parameters, those that run once a sample too |
| olcf | what a counter of operations sees while every block is computed again, attention's scores in the backward too |
| all-tokens | 3 x forward, as if the encoder saw hidden tokens, too |

docs/numbers.md tells how far they are from each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from vitrail.cost.recorder import Op
from vitrail.layers.flops import Flops
from vitrail.layers.patches import per_axis
from vitrail.models.model import encoder_of
from vitrail.recipe.kinds import nearest


@dataclass(frozen=True)
class Segment:
    """A repeated block, or what lies outside blocks."""

    name: str
    count: int  # equal ones in a row
    parameters: int  # of one, on this rank after tensor parallelism, before sharding
    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    again: tuple[Op, ...]  # what recomputation repeats
    saved: int  # bytes that one keeps for its backward
    peak: int  # bytes that one needs for a moment besides, in its backward
    gathered: bool = True  # its parameters are gathered and freed block by block; else they are the root's
    forward_peak: int = 0  # the same in its forward
    recomputed: bool = False  # as a whole, but for what it keeps; MLPs in pieces are, too, without this

    @property
    def flops(self) -> float:
        return sum(op.flops for ops in (self.forward, self.backward, self.again) for op in ops)


@dataclass(frozen=True)
class Work:
    """The work of one rank for one micro-batch."""

    segments: tuple[Segment, ...]
    inputs: int  # bytes of a micro-batch on the device
    loss: tuple[Op, ...]
    loss_peak: int
    samples: int  # of a micro-batch
    flops: Flops  # of one sample
    tokens: int  # all of a sample
    raw: int = 0  # of the inputs, the batch as it was read: others may lie on the device, too
    slabs: int = 0  # of that, what ranks that share a sample read a slab of each, where it can be cut evenly


# Of a segment and of a work: what grows with the samples.
OPS, SIZES = ("forward", "backward", "again"), ("saved", "peak", "forward_peak")
TOTALS = ("inputs", "raw", "slabs", "loss_peak")


def between(low: Work, high: Work, share: float) -> Work | None:
    """Return what lies on the line through two traces; None where they are not alike."""

    def line(a: Any, b: Any) -> Any:
        """Return what lies between two numbers, two operations, or tuples of these."""
        if isinstance(a, tuple):
            return tuple(line(one, two) for one, two in zip(a, b, strict=True))
        if isinstance(a, Op):
            return mixed(a, b, ("flops", "bytes", "shape", "layer"))
        found = max(0.0, a + share * (b - a))
        return round(found) if isinstance(a, int) else found

    def mixed(a: Any, b: Any, names: Sequence[str]) -> Any:
        return replace(a, **{name: line(getattr(a, name), getattr(b, name)) for name in names})

    if _kinds(low) != _kinds(high) or [s.count for s in low.segments] != [s.count for s in high.segments]:
        return None
    pairs = zip(low.segments, high.segments, strict=True)
    segments = tuple(mixed(a, b, (*OPS, *SIZES)) for a, b in pairs)
    return replace(mixed(low, high, ("loss", *TOTALS)), segments=segments)


def _kinds(work: Work) -> list[list[tuple[object, ...]]]:
    every = [getattr(segment, name) for segment in work.segments for name in OPS]
    return [[(op.kind, op.walk, op.kernels, op.layer[1:]) for op in ops] for ops in (*every, work.loss)]


def divided(work: Work, *, samples: int, tensor: int, context: int) -> Work:
    """Return the work of one rank for other samples, where `tensor` x `context` ranks share all of it evenly.

    That is good enough to compare layouts, and quick.
    """
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

    def part(one: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return these fields as one rank has them."""
        found = {name: getattr(one, name) for name in names}
        return {
            name: tuple(map(op, value)) if isinstance(value, tuple) else round(value * factor)
            for name, value in found.items()
        }

    segments = (
        replace(one, parameters=one.parameters // (tensor if one.gathered else 1), **part(one, (*OPS, *SIZES)))
        for one in work.segments
    )
    raw = round((work.raw - work.slabs) * samples / work.samples + work.slabs * factor)
    return replace(
        work,
        segments=tuple(segments),
        inputs=round((work.inputs - work.raw) * factor) + raw,
        raw=raw,
        samples=samples,
        **part(work, ("slabs", "loss", "loss_peak")),
    )


def places(pipeline: int) -> list[int]:
    """Return those ranks of a pipeline that may differ."""
    return sorted({0, (pipeline - 1) // 2, pipeline - 1})


def stage_of(work: Work, rank: int, number: int) -> Work:
    """Return what one of so many pipeline ranks has, where all have about as many FLOPs."""
    every = [replace(segment, count=1) for segment in work.segments for _ in range(segment.count)]
    if not 0 <= rank < number <= len(every):
        raise ValueError(f"pipeline {number}: the model has {len(every)} steps to share out; use at most so many ranks")
    total = sum(segment.flops for segment in every)
    mine: list[Segment] = []
    done = 0.0
    for index, segment in enumerate(every):
        # By the middle of each step, but no rank is left without one.
        place = min(number - 1, int(number * (done + segment.flops / 2) / total)) if total else 0
        place = min(max(place, index - (len(every) - number)), index)
        done += segment.flops
        if place != rank:
            continue
        if mine and replace(mine[-1], count=1) == segment:
            mine[-1] = replace(mine[-1], count=mine[-1].count + 1)
        else:
            mine.append(segment)
    last = rank == number - 1
    return replace(work, segments=tuple(mine), loss=work.loss if last else (), loss_peak=work.loss_peak if last else 0)


class Key:
    """A text to remember a result by, and what makes it: configs may hold what has no hash, and caches need one."""

    def __init__(self, text: str, make: Callable[[], Any]) -> None:
        self.text, self.make = text, make

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.text == other.text


def cached(size: int) -> Callable[[str, Callable[[], Any]], Any]:
    """Return a function that makes what a text stands for, and remembers so many of these."""
    known = lru_cache(maxsize=size)(lambda key: key.make())
    return lambda text, make: known(Key(text, make))


def key_of(config: Any) -> Key:
    return Key(repr(config), lambda: config)


def training_flops(name: str, config: Any) -> float:
    """Count FLOPs of one training sample by a named formula; `config` is the model's, with its channels and shape."""
    if name not in FORMULAS:
        near = nearest(name, list(FORMULAS))
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"formula {name!r} is unknown; {hint}(known: {', '.join(FORMULAS)})")
    if config.shape is None:
        raise ValueError("shape is not known; set it to count FLOPs")
    with torch.device("meta"):
        model = config.build()
    return FORMULAS[name](model)


def _torchtitan_mae(model: Any) -> float:
    c = _need(model, "mae", "torchtitan-mae")
    tokens = c.encoder.tokens.count(c.size, c.patch) * c.parts
    visible = int((1 - c.mask.ratio) * tokens)
    return tokens * (6.0 * _parameters(model) + 12.0 * model.encoder.depth * model.encoder.width * visible)


def _torchditan(model: Any) -> float:
    c = _need(model, "dit", "torchditan")
    tokens = encoder_of(c).count_tokens(per_axis(c.shape, c.ndim))
    return tokens * (6.0 * _parameters(model) + 12.0 * model.encoder.depth * model.encoder.width * tokens)


def _all_tokens(model: Any) -> float:
    c = model.config
    if c.kind != "mae":
        return model.flops().training
    tokens = c.encoder.tokens.count(c.size, c.patch) * c.parts
    visible, predicted = (number * c.parts for number in c.token_counts())
    return (model.encoder.flops(tokens) + model.decoder.flops(visible, predicted, False)).training


def _need(model: Any, kind: str, name: str) -> Any:
    if model.config.kind != kind:
        raise ValueError(f"formula {name!r} is for models of kind {kind}, not {model.config.kind}; use 'model'")
    return model.config


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


FORMULAS: dict[str, Callable[[Any], float]] = {
    "model": lambda model: model.flops().training,
    "torchtitan-mae": _torchtitan_mae,
    "torchditan": _torchditan,
    "olcf": lambda model: model.flops().hardware(recompute=True),
    "all-tokens": _all_tokens,
}
