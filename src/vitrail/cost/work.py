"""What one training step computes and keeps, as numbers: segments of operations, and what follows from two traces."""

from dataclasses import dataclass, replace

from vitrail.cost.recorder import Op
from vitrail.layers.flops import Flops


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
    """What one rank computes for one micro-batch."""

    segments: tuple[Segment, ...]
    inputs: int  # bytes of a micro-batch on the device
    loss: tuple[Op, ...]
    loss_peak: int
    samples: int  # of a micro-batch
    flops: Flops  # of one sample
    tokens: int  # all of a sample
    raw: int = 0  # of the inputs, the batch as it was read: others may lie on the device, too
    slabs: int = 0  # of that, what ranks that share a sample read a slab of each, where it can be cut evenly


# ---------------------------------------------------------------- between two traces


def between(low: Work, high: Work, share: float) -> Work | None:
    """What lies on the line through two traces; None where they are not alike."""

    def line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    def sides(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(round(line(i, j)) for i, j in zip(a, b, strict=True))

    def ops(a: tuple[Op, ...], b: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(
            replace(
                one,
                flops=line(one.flops, two.flops),
                bytes=line(one.bytes, two.bytes),
                shape=sides(one.shape, two.shape),
                layer=sides(one.layer, two.layer),
            )
            for one, two in zip(a, b, strict=True)
        )

    lists = [
        [_kinds(ops_) for segment in work.segments for ops_ in (segment.forward, segment.backward, segment.again)]
        + [_kinds(work.loss)]
        for work in (low, high)
    ]
    if lists[0] != lists[1] or [s.count for s in low.segments] != [s.count for s in high.segments]:
        return None
    segments = [
        replace(
            a,
            forward=ops(a.forward, b.forward),
            backward=ops(a.backward, b.backward),
            again=ops(a.again, b.again),
            saved=round(line(a.saved, b.saved)),
            peak=round(line(a.peak, b.peak)),
            forward_peak=round(line(a.forward_peak, b.forward_peak)),
        )
        for a, b in zip(low.segments, high.segments, strict=True)
    ]
    return replace(
        low,
        segments=tuple(segments),
        inputs=round(line(low.inputs, high.inputs)),
        raw=round(line(low.raw, high.raw)),
        slabs=round(line(low.slabs, high.slabs)),
        loss=ops(low.loss, high.loss),
        loss_peak=round(line(low.loss_peak, high.loss_peak)),
    )


def _kinds(ops: tuple[Op, ...]) -> list[tuple[object, ...]]:
    return [(op.kind, op.walk, op.kernels, op.layer[1:]) for op in ops]


# ---------------------------------------------------------------- pipelines


def places(pipeline: int) -> list[int]:
    """Of the ranks of a pipeline those that may differ."""
    return sorted({0, (pipeline - 1) // 2, pipeline - 1})


def stage_of(work: Work, rank: int, number: int) -> Work:
    """What one of so many pipeline ranks has, where all have about as many FLOPs."""
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
