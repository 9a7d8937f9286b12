"""Attention over the ranks of a context axis, all in one process: for tests, and for measurements on one device.

The same computation as that of vitrail.parallel.context, whose steps hand out what travels between ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.layers.attention import attend
from vitrail.parallel.context import (
    Ranks,
    Steps,
    context_keys,
    pack_heads,
    pack_tokens,
    picked,
    repeat_groups,
    ring_backward_steps,
    ring_steps,
    unpack_heads,
    unpack_tokens,
)


def simulate_context(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    ulysses: int = 1,
    keep: Tensor | None = None,
    valid: Tensor | None = None,
) -> list[Tensor]:
    """attend_context() of all ranks at once, each an entry of the lists: the same computation without the travel.

    For tests and measurements on one device. Gradients flow.
    """
    context = len(q)
    size = context // ulysses
    assert size * ulysses == context, (context, ulysses)
    places = [(Ranks("", size, rank // ulysses), Ranks("", ulysses, rank % ulysses)) for rank in range(context)]
    options: dict[str, Any] = {"keep": keep, "valid": valid, "device": k[0].device}
    keys = [context_keys(k[0].shape[1], ring=r, ulysses=u, **options) for r, u in places]
    if ulysses > 1:
        k, v = zip(*(repeat_groups(q[0].shape[2], *pair, ulysses) for pair in zip(k, v, strict=True)), strict=True)
        q, k, v = (_simulate_heads(t, ulysses) for t in (q, k, v))
    k, v = ([picked(t, c.pick) for t, c in zip(ts, keys, strict=True)] for ts in (k, v))
    if size == 1:
        pairs = zip(q, k, v, strict=True)
        out = [attend(*qkv, mask=None if keys[0].masks is None else keys[0].masks[0]) for qkv in pairs]
    else:
        out = [torch.empty(0)] * context
        for first in range(ulysses):  # rings are of every ulysses-th rank
            members = slice(first, None, ulysses)
            out[members] = _SimulatedRing.apply(keys[0].lengths, keys[0].masks, *q[members], *k[members], *v[members])
    return _simulate_tokens(out, ulysses) if ulysses > 1 else out


def _simulate_trade(packed: Sequence[Tensor], ulysses: int) -> list[Tensor]:
    groups = [packed[at : at + ulysses] for at in range(0, len(packed), ulysses)]
    return [torch.stack([sent[rank] for sent in group]) for group in groups for rank in range(ulysses)]


def _simulate_heads(tensors: Sequence[Tensor], ulysses: int) -> list[Tensor]:
    packed = [pack_heads([t], ulysses) for t in tensors]
    return [unpack_heads(t, packed[0][1])[0] for t in _simulate_trade([p[0] for p in packed], ulysses)]


def _simulate_tokens(tensors: Sequence[Tensor], ulysses: int) -> list[Tensor]:
    return [unpack_tokens(t) for t in _simulate_trade([pack_tokens(t, ulysses) for t in tensors], ulysses)]


class _SimulatedRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], masks: Any, *tensors: Tensor) -> Any:
        size = len(lengths)
        q, k, v = (tensors[at * size : (at + 1) * size] for at in range(3))
        held = [torch.stack(pair) for pair in zip(k, v, strict=True)]
        found = _in_step([ring_steps(q[rank], held[rank], rank, lengths, masks) for rank in range(size)])
        ctx.lengths, ctx.masks = lengths, masks
        ctx.save_for_backward(*q, *held, *(t for pair in found for t in pair))
        return tuple(out for out, _ in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        size = len(ctx.lengths)
        q, held, found = (ctx.saved_tensors[a * size : b * size] for a, b in ((0, 1), (1, 2), (2, 4)))
        steps = []
        for rank, grad in enumerate(grads):
            kept = (q[rank], held[rank], found[2 * rank], found[2 * rank + 1])
            steps.append(ring_backward_steps(grad.contiguous(), *kept, rank, ctx.lengths, ctx.masks))
        pairs = _in_step(steps)
        dk, dv = ([pair[1][at].to(q[0].dtype) for pair in pairs] for at in (0, 1))
        return None, None, *(pair[0] for pair in pairs), *dk, *dv


def _in_step(all_steps: list[Steps]) -> list[tuple[Tensor, Tensor]]:
    """Run the steps of all ranks of a ring, each as far as the others."""
    requests = [next(steps) for steps in all_steps]
    while True:
        found = []
        sent = [request[0] for request in requests]
        requests = []
        for rank, steps in enumerate(all_steps):
            try:
                requests.append(steps.send(lambda tensor=sent[rank - 1]: tensor))  # type: ignore[misc]
            except StopIteration as end:
                found.append(end.value)
        if found:
            return found
