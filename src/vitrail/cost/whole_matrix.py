"""What attention costs that makes the whole matrix of scores (`parallel.attention` math and reference).

Scores are written and read by each of its steps, and in the backward three such matrices live at once, in fp32: the
probabilities, their gradient and that of the scores; in the forward two. Fused kernels, which a trace assumes, have
none of them. Blocks that are not recomputed keep the probabilities. Recomputed ones make them again even where they
keep attention: that is its output, and its backward asks for more.
"""

import math
from dataclasses import replace

from vitrail.cost.trace import Op, Segment, Work

STEPS = {"forward": 4, "backward": 8}  # launches; each reads or writes the matrix once
LIVING, LIVING_FORWARD = 3 * 4, 2 * 4  # bytes for each score at the worst moment of the backward, of the forward


def is_whole(op: Op) -> bool:
    return op.kind == "attention" and op.kernels >= STEPS["forward"]


def scores_of(op: Op) -> int:
    return math.prod(op.shape[:4]) if op.kind == "attention" else 0


def whole_matrix(work: Work, *, item: int) -> Work:
    """The same work with such attention; `item`: bytes of a number."""
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
    """Where attention is kept, its first half: all up to the probabilities."""
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
