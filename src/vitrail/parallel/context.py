"""Attention when the tokens of a sample lie on several ranks: Ulysses, rings, and their product.

- the context ranks are ring x ulysses, ulysses inner; each holds equally many queries and equally many keys
- Ulysses: an all-to-all trades tokens for heads, so that a rank has the tokens of its Ulysses group and a part of the
  heads; after attention another one trades back. Key-value heads are repeated where they are too few to share out
- ring: the keys and values of each rank travel around, and each rank attends to them as they pass, which merges by
  log-sum-exp in fp32. In the backward they travel again, and their gradients with them. What is kept for it is q, the
  rank's own keys and values, the output and the log-sum-exp: memory falls as 1 / ranks
- both are single operators: compilers trace over them, and a checkpointing policy can keep their outputs, which saves
  the travel in a recomputation
- the steps of the ring are a generator that hands out what is to travel; whoever drives it moves it: to the next rank,
  or, in tests and measurements, to the next entry of a list (benchmarks/simulated_context.py)

Shapes: B batch, L queries a rank, M keys a rank, H heads, G key-value heads, K head width.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vitrail.errors import UserError
from vitrail.layers.attention import attend, order_for
from vitrail.layers.kernels.attention import KeyMask, Packing, key_mask, run_part, run_part_backward
from vitrail.parallel.private import group_of

# ---------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class Ranks:
    """A group of ranks and this one's place in it."""

    name: str  # of the process group; "" for this rank alone
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        return cls(group.group_name, dist.get_world_size(group), dist.get_rank(group))


ALONE = Ranks("", 1, 0)


def choose_ulysses(heads: int, kv_heads: int, context: int, wanted: int | None = None) -> int:
    """Choose how many of the context ranks trade heads; the rest form rings.

    As many as divide the heads: an all-to-all moves less than a ring. Among these, as many as divide the key-value
    heads, too, where that is more than one: others would send repeated keys and values.
    """
    able = [size for size in range(1, context + 1) if context % size == 0 and heads % size == 0]
    if wanted is None:
        whole = [size for size in able if kv_heads % size == 0]
        return whole[-1] if whole[-1] > 1 else able[-1]
    if wanted in able:
        return wanted
    reason = f"does not divide parallel.context={context}" if context % wanted else f"does not divide the {heads} heads"
    raise UserError(
        f"parallel.ulysses: {wanted} {reason}; set it to one of {', '.join(map(str, able))}, or leave it out"
    )


def split_context(root: DeviceMesh, ulysses: int) -> tuple[Ranks, Ranks]:
    """Make the rings and the Ulysses groups of a mesh's context ranks; return this rank's ring and its Ulysses group.

    Makes process groups, so all ranks call it, with equal arguments.
    """
    group = root["context"].get_group()
    context = dist.get_world_size(group)
    assert context % ulysses == 0, (context, ulysses)
    if ulysses == context:
        return ALONE, (Ranks.of(group) if context > 1 else ALONE)
    if ulysses == 1:
        return Ranks.of(group), ALONE
    names = root.mesh_dim_names
    assert names is not None
    ring, traders = (
        dist.new_subgroups_by_enumeration(groups)[0]
        for groups in ranks_of_context(root.mesh, names.index("context"), ulysses)
    )
    return Ranks.of(ring), Ranks.of(traders)


def ranks_of_context(mesh: Tensor, dim: int, ulysses: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return all rings and all Ulysses groups of a mesh of ranks whose context is along a dimension."""
    grid = mesh.movedim(dim, -1).unflatten(-1, (-1, ulysses)).flatten(0, -3)  # others, ring, ulysses
    return grid.transpose(1, 2).flatten(0, 1).tolist(), grid.flatten(0, 1).tolist()


# ---------------------------------------------------------------- the keys


class ContextKeys(NamedTuple):
    """The keys of all ranks that are seen. context_keys() makes them once for a forward, and every block uses them."""

    pick: slice | Tensor | None  # of the keys that this rank's Ulysses group holds, those that are real
    lengths: tuple[int, ...]  # how many these are for each rank of the ring
    masks: tuple[KeyMask, ...] | None  # which of them may be seen, for each rank of the ring


def context_keys(
    keys: int,
    *,
    ring: Ranks,
    ulysses: Ranks,
    keep: Tensor | None = None,
    valid: Tensor | None = None,
    device: torch.device | str | None = None,
) -> ContextKeys:
    """Make the keys of attend_context(), where each rank has `keys` of them.

    `keep` [n] are the indices of those that are real, for all samples; `valid` [B, n] says which of these a sample may
    see. Both are equal on all ranks. `keep` best lies on the host, where its split waits for nothing; what it selects
    with goes to the device.
    """
    here = ulysses.size * keys
    if keep is None:
        lengths: tuple[int, ...] = (here,) * ring.size
        pick: slice | Tensor | None = None
        columns: list[slice | Tensor] = [slice(rank * here, (rank + 1) * here) for rank in range(ring.size)]
    else:
        if not keep.numel():
            raise ValueError("keep: it is empty; attention needs at least one key")
        low, high = int(keep.min()), int(keep.max())
        if low < 0 or high >= here * ring.size:
            raise ValueError(f"keep: {low if low < 0 else high} is none of the {here * ring.size} keys of all ranks")
        owner = keep // here
        places = [(owner == rank).nonzero().squeeze(1) for rank in range(ring.size)]
        lengths = tuple(map(len, places))
        pick = _as_slice(keep[places[ring.rank]] - ring.rank * here)
        pick = pick.to(device) if isinstance(pick, Tensor) else pick
        columns = [_as_slice(place) for place in places]
    if valid is None:
        return ContextKeys(pick, lengths, None)
    total = sum(lengths)
    if valid.ndim != 2 or valid.shape[1] != total:
        raise ValueError(
            f"valid: shape {tuple(valid.shape)} does not fit the {total} keys of all ranks; give [B, {total}]"
        )
    masks = [
        key_mask(valid[:, column.to(valid.device) if isinstance(column, Tensor) else column]) for column in columns
    ]
    return ContextKeys(pick, lengths, tuple(masks))


def _as_slice(index: Tensor) -> slice | Tensor:
    """Return a slice if the indices follow each other: it takes no copy."""
    start, number = int(index[0]) if len(index) else 0, len(index)
    straight = torch.arange(start, start + number, device=index.device)
    return slice(start, start + number) if torch.equal(index, straight) else index


def picked(x: Tensor, pick: slice | Tensor | None) -> Tensor:
    if pick is None:
        return x
    return x[:, pick] if isinstance(pick, slice) else x.index_select(1, pick)


# ---------------------------------------------------------------- attention


def attend_context(
    q: Tensor, k: Tensor, v: Tensor, *, ring: Ranks, ulysses: Ranks, keys: ContextKeys | None = None
) -> Tensor:
    """Attention of this rank's queries [B, L, H, K] over the keys and values [B, M, G, K] of all ranks.

    All of them, in order of ranks, are M times ring times ulysses; `keys` tell which are seen, by default all. A sample
    that sees none gives 0.
    """
    if keys is None:
        keys = context_keys(k.shape[1], ring=ring, ulysses=ulysses)
    if ulysses.size > 1:
        k, v = repeat_groups(q.shape[2], k, v, ulysses.size)
        if q.shape[1] == k.shape[1]:
            q, k, v = _to_heads(ulysses, q, k, v)
        else:
            (q,) = _to_heads(ulysses, q)
            k, v = _to_heads(ulysses, k, v)
    k, v = picked(k, keys.pick), picked(v, keys.pick)
    if ring.size > 1:
        out = _ring(q, k, v, _flat(keys.masks), list(keys.lengths), ring.name)[0]
    else:
        out = attend(q, k, v, mask=None if keys.masks is None else keys.masks[0])
    return _to_tokens(ulysses, out) if ulysses.size > 1 else out


# ---------------------------------------------------------------- Ulysses


def repeat_groups(heads: int, k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Key-value heads repeated just as often as it takes to give every rank those that its query heads need."""
    groups = k.shape[2]
    each = heads // groups
    repeat = next(n for n in range(1, each + 1) if each % n == 0 and groups * n % ranks == 0)
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)


def _to_heads(ulysses: Ranks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, L, H, K] each to [B, L of all ranks, H / ranks, K], in one message."""
    packed, heads = pack_heads(tensors, ulysses.size)
    return unpack_heads(_trade(packed, ulysses.name), heads)


def _to_tokens(ulysses: Ranks, x: Tensor) -> Tensor:
    """[B, L of all ranks, H / ranks, K] to [B, L, H, K]."""
    return unpack_tokens(_trade(pack_tokens(x, ulysses.size), ulysses.name))


def pack_heads(tensors: Sequence[Tensor], ranks: int) -> tuple[Tensor, list[int]]:
    parts = [t.unflatten(2, (ranks, -1)) for t in tensors]  # B L ranks h K
    return torch.cat(parts, dim=3).movedim(2, 0).contiguous(), [part.shape[3] for part in parts]  # ranks B L h K


def unpack_heads(x: Tensor, heads: list[int]) -> tuple[Tensor, ...]:
    return x.movedim(0, 1).flatten(1, 2).split(heads, dim=2)


def pack_tokens(x: Tensor, ranks: int) -> Tensor:
    return x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()  # ranks B L h K


def unpack_tokens(x: Tensor) -> Tensor:
    return x.movedim(0, 2).flatten(2, 3)


@torch.library.custom_op("vitrail::trade", mutates_args=())
def _trade(x: Tensor, group: str) -> Tensor:
    """Entry r of [ranks, ...] goes to rank r."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group_of(group))
    return out


@_trade.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _trade_keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _trade_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _trade(grad, ctx.group), None  # equal parts: it is its own transpose


_trade.register_autograd(_trade_back, setup_context=_trade_keep)


# ---------------------------------------------------------------- rings: the steps

Arrival = Callable[[], Tensor]  # waits for what comes from the rank before
Travel = Callable[[Tensor, int], Arrival]  # sends to the next rank; the number is of the keys that will arrive
Steps = Generator[tuple[Tensor, int], Arrival, tuple[Tensor, Tensor]]


def ring_steps(q: Tensor, held: Tensor, rank: int, lengths: Sequence[int], masks: tuple[KeyMask, ...] | None) -> Steps:
    """Attend to the keys and values [2, B, n, G, K] of each rank in turn: output [B, L, H, K] and log-sum-exp."""
    size, order = len(lengths), _order(q, held, lengths, masks)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"))
    for step in range(size):
        source = (rank - step) % size
        arrival = (yield held, lengths[source - 1]) if step < size - 1 else None
        if lengths[source]:
            part = run_part(order, q, held[0], held[1], None if masks is None else masks[source])
            lse = merge(out, lse, *part)
        if arrival is not None:
            held = arrival()
    return out.to(q.dtype), lse


def ring_backward_steps(
    grad: Tensor,
    q: Tensor,
    held: Tensor,
    out: Tensor,
    lse: Tensor,
    rank: int,
    lengths: Sequence[int],
    masks: tuple[KeyMask, ...] | None,
) -> Steps:
    """Gradients of q, and of this rank's keys and values [2, B, n, G, K].

    A gradient goes with its keys: it arrives after the rank before has added its part, while this one computes its own.
    """
    size, order = len(lengths), _order(q, held, lengths, masks)
    dq = torch.zeros_like(q, dtype=lse.dtype, memory_format=torch.contiguous_format)
    grads_arrival: Arrival | None = None
    for step in range(size):
        source = (rank - step) % size
        keys_arrival = (yield held, lengths[source - 1]) if step < size - 1 else None
        own = None
        if lengths[source]:
            mask = None if masks is None else masks[source]
            own = run_part_backward(order, grad, q, held[0], held[1], out, lse, mask)
        grads = held.new_zeros(held.shape, dtype=lse.dtype) if grads_arrival is None else grads_arrival()
        if own is not None:
            dq += own[0]
            grads[0] += own[1]
            grads[1] += own[2]
        grads_arrival = yield grads, lengths[source - 1]  # the last one brings this rank's own
        if keys_arrival is not None:
            held = keys_arrival()
    assert grads_arrival is not None
    return dq.to(q.dtype), grads_arrival()


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Tensor:
    """Put attention over other keys, [B, L, H, K] with log-sum-exp [B, H, L], into `out`; the log-sum-exp of both."""
    total = torch.logaddexp(lse, part_lse)
    above = total.masked_fill(total == float("-inf"), 0)  # where neither has a key, both weights are 0

    def weight(of: Tensor) -> Tensor:
        return (of - above).exp().transpose(1, 2)[..., None]  # B L H 1

    out *= weight(lse)
    out += part * weight(part_lse)
    return total


def _order(q: Tensor, held: Tensor, lengths: Sequence[int], masks: tuple[KeyMask, ...] | None) -> tuple[str, ...]:
    # Forward and backward are not asked apart (needs_grad), so that they choose alike.
    groups, keys = held.shape[3], max(lengths)
    order = order_for(q, groups=groups, keys=keys, masked=masks is not None, needs_grad=True, partial=True)
    # As in PyTorch, which does not count cuDNN's backward among the deterministic ones.
    others = order[1:] if order[0] == "cudnn" and torch.are_deterministic_algorithms_enabled() else ()
    return others or order


# ---------------------------------------------------------------- rings: the travel


@torch.library.custom_op("vitrail::ring", mutates_args=())
def _ring(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], lengths: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    ranks = Ranks.of(group_of(group))
    steps = ring_steps(q, torch.stack([k, v]), ranks.rank, lengths, _masks(masks, ranks.size))
    return drive(steps, pass_on(group))


@_ring.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], lengths: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)


@torch.library.custom_op("vitrail::ring_backward", mutates_args=())
def _ring_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Sequence[Tensor],
    lengths: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ranks = Ranks.of(group_of(group))
    held, allowed = torch.stack([k, v]), _masks(masks, ranks.size)
    steps = ring_backward_steps(grad.contiguous(), q, held, out, lse, ranks.rank, lengths, allowed)
    dq, grads = drive(steps, pass_on(group))
    return dq, grads[0].to(k.dtype, copy=True), grads[1].to(v.dtype, copy=True)  # outputs may not share memory


@_ring_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: Sequence[Tensor],
    lengths: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _ring_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, masks, ctx.lengths, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output, *masks)
    ctx.set_materialize_grads(False)


def _ring_back(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *masks = ctx.saved_tensors
    return *_ring_backward(grad, q, k, v, out, lse, masks, ctx.lengths, ctx.group), [None] * len(masks), None, None


_ring.register_autograd(_ring_back, setup_context=_ring_keep)


def drive(steps: Steps, travel: Travel) -> tuple[Tensor, Tensor]:
    """Run the steps of one rank."""
    try:
        request = next(steps)
        while True:
            request = steps.send(travel(*request))
    except StopIteration as end:
        return end.value


def pass_on(name: str) -> Travel:
    """Travel from each rank of a group to the next; begins at once and goes on while the rank computes."""
    group = group_of(name)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))

    def travel(sent: Tensor, length: int) -> Arrival:
        arriving = sent.new_empty((*sent.shape[:2], length, *sent.shape[3:]))
        moves = [(dist.isend, sent, after), (dist.irecv, arriving, before)]
        moves = [move for move in moves if move[1].numel()]  # nothing is not sent; both sides know
        operations = [dist.P2POp(operation, tensor, peer, group) for operation, tensor, peer in moves]
        works = dist.batch_isend_irecv(operations) if operations else []

        def arrival() -> Tensor:
            for work in works:
                work.wait()
            operations.clear()  # what was sent is held until here
            return arriving

        return arrival

    return travel


def _flat(masks: tuple[KeyMask, ...] | None) -> list[Tensor]:
    """Masks as tensors, for an operator; with their packing, which all have or none."""
    return [t for mask in masks or () for t in (mask.valid, mask.filled, *(mask.packing or ()))]


def _masks(flat: Sequence[Tensor], size: int) -> tuple[KeyMask, ...] | None:
    if not flat:
        return None
    each = len(flat) // size
    rows = [flat[at : at + each] for at in range(0, len(flat), each)]
    return tuple(KeyMask(row[0], row[1], packing=Packing(*row[2:]) if row[2:] else None) for row in rows)
