"""Calls of attention backends beside PyTorch's own (layers/attention.py), and the mask in the form that each one wants.

- every kernel takes q [B, N, H, K] and k, v [B, M, G, K] and gives [B, N, H, K]; there is no dropout in attention
- a mask says which keys may be seen, the same for every query and head, so nothing of size N x M is ever made
  (but by math and reference, which make the scores themselves)
- masked keys and values must be finite: their weight is 0, and 0 times NaN is NaN
- run_part() computes with some of the keys, giving also the log-sum-exp by which parts are merged, and
  run_part_backward() the gradients of a part, given the output and the log-sum-exp over all keys
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.layers import private
from vitrail.layers.backends import MASKED, MASKED_ROCM, MULTIPLE, chosen, machine

# ---------------------------------------------------------------- masks

BLOCK = 128  # keys; flex skips a block that is masked as a whole
ALL_QUERIES = 1 << 30  # one block of queries: a mask of keys is the same for all of them, so its tables stay small


class KeyBlocks(NamedTuple):
    """Blocks of keys that are seen in part and in full, as flex wants them; J is their number."""

    part_count: Tensor  # [B, 1, 1] int32
    part: Tensor  # [B, 1, 1, J] int32: indices, those that count first
    full_count: Tensor
    full: Tensor
    in_part: Tensor  # [B, 1, J] int32: 1 where the block is seen in part; the same tables read from the keys' side
    in_full: Tensor
    first: Tensor  # [B, 1, J, 1] int32 zeros: the only block of queries


class Packing(NamedTuple):
    """The places of keys when the seen ones of all samples are moved to the front, as varlen wants them."""

    order: Tensor  # [B * M] indices
    kept: Tensor  # [B * M] bool: the place holds a key that is seen
    ends: Tensor  # [B + 1] int32: where each sample begins, and the end


class KeyMask(NamedTuple):
    """A mask of the keys that may be seen. Made once for a forward by key_mask(), used by every block."""

    valid: Tensor  # [B, M] bool; all true for a sample without any, so that no softmax is over nothing
    filled: Tensor  # [B] bool: false for a sample without any; its output is 0
    blocks: KeyBlocks | None = None
    packing: Packing | None = None


def key_mask(valid: Tensor) -> KeyMask:
    """The mask of valid [B, M] (true: the key may be seen), with the tables that the backend in use will need."""
    filled = valid.any(dim=1)
    valid = valid | ~filled[:, None]
    backend = chosen()
    if backend == "auto" and valid.device.type == "cuda":
        here = machine(valid.device.type)
        order = MASKED if here.device == "cuda" else MASKED_ROCM
        backend = next(name for name in order if name in here.backends)
    return KeyMask(
        valid,
        filled,
        blocks=key_blocks(valid) if backend == "flex" else None,
        packing=pack_keys(valid) if backend == "varlen" else None,
    )


def key_blocks(valid: Tensor) -> KeyBlocks:
    padded = F.pad(valid, (0, -valid.shape[1] % BLOCK))  # what lies beyond the end is masked
    seen = padded.unflatten(1, (-1, BLOCK)).sum(dim=2)  # [B, J]
    in_full, in_part = seen == BLOCK, (seen > 0) & (seen < BLOCK)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        return chosen.sum(dim=1).int()[:, None, None], order.int()[:, None, None]

    part_count, part = listed(in_part)
    full_count, full = listed(in_full)
    first = torch.zeros_like(in_full, dtype=torch.int32)[:, None, :, None]
    return KeyBlocks(part_count, part, full_count, full, in_part.int()[:, None], in_full.int()[:, None], first)


def pack_keys(valid: Tensor) -> Packing:
    flat = valid.flatten()
    order = flat.to(torch.uint8).argsort(descending=True, stable=True)  # samples stay in order
    return Packing(order, flat[order], F.pad(valid.sum(dim=1).cumsum(0), (1, 0)).int())


# ---------------------------------------------------------------- PyTorch's own


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    blocks = None
    if mask is not None:
        valid = mask.valid
        tables = key_blocks(valid) if mask.blocks is None else mask.blocks

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return valid[b, key]

        blocks = BlockMask(
            seq_lengths=(q.shape[1], k.shape[1]),
            kv_num_blocks=tables.part_count,
            kv_indices=tables.part,
            full_kv_num_blocks=tables.full_count,
            full_kv_indices=tables.full,
            q_num_blocks=tables.in_part,
            q_indices=tables.first,
            full_q_num_blocks=tables.in_full,
            full_q_indices=tables.first,
            BLOCK_SIZE=(ALL_QUERIES, BLOCK),
            mask_mod=seen,
        )
    grouped = is_grouped(q.shape[2], k.shape[2])
    # Uncompiled it would make the whole matrix; inside a compiled block it is compiled with the block.
    eager = q.device.type == "cpu" or torch.compiler.is_compiling()
    attention = flex_attention if eager else _compiled_flex()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=grouped).transpose(1, 2)


_flex = None


def _compiled_flex() -> Any:
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention)
    return _flex


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert mask is not None  # refused otherwise
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    packing = pack_keys(mask.valid) if mask.packing is None else mask.packing
    k, v = share_heads(q, k, v)  # PyTorch 2.11 has no groups here

    def packed(t: Tensor) -> Tensor:
        # The kernel leaves the gradients behind the end unset: where() makes them 0.
        return torch.where(packing.kept[:, None, None], t.flatten(0, 1)[packing.order], 0)

    starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=q.device)
    out = varlen_attn(q.flatten(0, 1), packed(k), packed(v), starts, packing.ends, queries, keys, scale=scale)
    assert isinstance(out, Tensor)  # a pair only on request
    return out.unflatten(0, (batch, queries))


# ---------------------------------------------------------------- packages


@torch.library.custom_op("vitrail::flash4", mutates_args=())
def _flash4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One op for compilers and checkpointing policies: output [B, N, H, K] and log-sum-exp [B, H, N]."""
    from flash_attn.cute import flash_attn_func

    with torch.no_grad():
        out, lse = flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True)
    return out, lse


@_flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.custom_op("vitrail::flash4_backward", mutates_args=())
def _flash4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Not public, but what PyTorch's own adapter calls too. (That adapter wants two results of the package's forward,
    # which gives five since 4.0.0b36.)
    from flash_attn.cute.interface import _flash_attn_bwd

    with torch.no_grad():
        grads = _flash_attn_bwd(q, k, v, out, grad.contiguous(), lse, softmax_scale=scale, deterministic=deterministic)
    dq, dk, dv = (t.contiguous() for t in grads[:3])
    return dq, dk, dv


@_flash4_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_flash4_backward(grad, *ctx.saved_tensors, ctx.scale, torch.are_deterministic_algorithms_enabled()), None


_flash4.register_autograd(_backward, setup_context=_keep)


def attend_flash4(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    return _flash4(q, k, v, scale)[0]


@private.not_compiled  # not traceable: compiled blocks have a break here
def attend_xformers(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    from xformers.ops import memory_efficient_attention

    k, v = share_heads(q, k, v)  # its grouped heads have no backward
    return memory_efficient_attention(q, k, v, scale=scale)


# ---------------------------------------------------------------- plain


def attend_reference(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | KeyMask | None = None) -> Tensor:
    """Compute attention in plain steps: for tests."""
    if isinstance(mask, Tensor):
        mask = key_mask(mask)
    k, v = share_heads(q, k, v)
    logits = torch.einsum("bnhk,bmhk->bhnm", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask.valid[:, None, None, :], float("-inf"))
    return blank(torch.einsum("bhnm,bmhk->bnhk", logits.softmax(dim=-1), v), mask)


def blank(out: Tensor, mask: KeyMask | None) -> Tensor:
    """0 for samples that have no key to see."""
    return out if mask is None else torch.where(mask.filled[:, None, None, None], out, 0)


def is_grouped(heads: int, groups: int) -> bool:
    """Tell whether several query heads share one of keys and values.

    A branch, for a plain bool: compiled with dynamic shapes the comparison itself is a SymBool, which kernels refuse.
    """
    return True if heads != groups else False  # noqa: SIM210


def share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head of their group, for kernels that have no groups."""
    repeat = q.shape[2] // k.shape[2]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor, KeyMask | None, float], Tensor]] = {
    "flex": attend_flex,
    "varlen": attend_varlen,
    "flash4": attend_flash4,
    "xformers": attend_xformers,
}
# ---------------------------------------------------------------- some of the keys


def run_part(order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None) -> tuple[Tensor, Tensor]:
    """Attention to some of the keys by the first backend of `order`: [B, N, H, K] and log-sum-exp [B, H, N].

    A sample that sees none of them gives 0 and minus infinity. The log-sum-exp has fp32 or more, and so may the output.
    """
    name, width = order[0], q.shape[-1]
    scale = 1 / math.sqrt(width)
    q, k, v = _widened(name, q, k, v)
    out, lse = _part_kernel(name, q, k)[0](q, k, v, mask, scale)
    out = out[..., :width]
    if mask is not None:
        out = blank(out, mask)
        lse = lse.masked_fill(~mask.filled[:, None, None], float("-inf"))
    return out, lse


def run_part_backward(
    order: tuple[str, ...],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: KeyMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what some of the keys add to the gradient of q, and the gradients of these keys and values.

    `out` and `lse` are those over all keys: the weights exp(score - lse) are then the right ones in each part.
    """
    name, width, groups = order[0], q.shape[-1], k.shape[2]
    scale = 1 / math.sqrt(width)
    grad, q, k, v, out = _widened(name, grad, q, k, v, out)
    dq, dk, dv = _part_kernel(name, q, k)[1](grad, q, k, v, out, lse, mask, scale)
    if dk.shape[2] != groups:  # heads that the kernel wanted repeated
        dk, dv = (t.unflatten(2, (groups, -1)).sum(dim=3, dtype=lse.dtype) for t in (dk, dv))
    dq, dk, dv = (blank(t[..., :width], mask) for t in (dq, dk, dv))
    return dq, dk, dv


def _widened(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads as wide as the kernel wants them; zeros change no score."""
    plain = name in ("math", "reference") or tensors[0].device.type == "cpu"
    padding = 0 if plain else -tensors[0].shape[-1] % MULTIPLE
    return tuple(F.pad(t, (0, padding)) for t in tensors) if padding else tensors


def _part_kernel(name: str, q: Tensor, k: Tensor) -> tuple[Any, Any]:
    # cuDNN takes no single query or key (https://github.com/pytorch/pytorch/issues/138529): a line of scores is small.
    line = name == "cudnn" and (q.shape[1] == 1 or k.shape[1] == 1)
    if line or name in ("math", "reference"):
        return _part_plain, _part_plain_backward
    if q.device.type == "cpu":
        return _part_cpu, _part_cpu_backward
    return {
        "cudnn": (_part_cudnn, _part_cudnn_backward),
        "flash": (_part_flash, _part_flash_backward),
        "ck": (_part_flash, _part_flash_backward),
        "efficient": (_part_efficient, _part_efficient_backward),
        "varlen": (_part_varlen, _part_varlen_backward),
        "flash4": (_part_flash4, _part_flash4_backward),
    }[name]


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)  # B N H K <-> B H N K


def _bias(mask: KeyMask | None, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, 1, M], to be added to scores. Rows start at multiples of 16 elements, as the efficient kernel wants."""
    if mask is None:
        return None
    keys = mask.valid.shape[1]
    bias = torch.zeros(mask.valid.shape[0], -(-keys // 16) * 16, dtype=dtype, device=mask.valid.device)[:, :keys]
    return bias.masked_fill_(~mask.valid, float("-inf"))[:, None, None]


def _part_plain(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    k, v = share_heads(q, k, v)
    scores = _scores(q, k, mask, scale)
    lse = scores.logsumexp(dim=-1)
    return torch.einsum("bhnm,bmhk->bnhk", (scores - lse[..., None]).exp(), v.to(scores.dtype)), lse


def _part_plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = share_heads(q, k, v)
    weights = (_scores(q, k, mask, scale) - lse[..., None]).exp()  # B H N M
    grad, q, k, v, out = (t.to(weights.dtype) for t in (grad, q, k, v, out))
    dv = torch.einsum("bhnm,bnhk->bmhk", weights, grad)
    mean = (grad * out).sum(dim=-1).transpose(1, 2)  # B H N
    slope = weights * (torch.einsum("bnhk,bmhk->bhnm", grad, v) - mean[..., None]) * scale
    return torch.einsum("bhnm,bmhk->bnhk", slope, k), torch.einsum("bhnm,bnhk->bmhk", slope, q), dv


def _scores(q: Tensor, k: Tensor, mask: KeyMask | None, scale: float) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bnhk,bmhk->bhnm", q.to(wide), k.to(wide)) * scale
    return scores if mask is None else scores.masked_fill(~mask.valid[:, None, None], float("-inf"))


def _part_cpu(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q, *share_heads(q, k, v))
    out, lse = private.cpu_flash(q, k, v, 0.0, False, attn_mask=_bias(mask, q.dtype), scale=scale)
    return out.transpose(1, 2), lse


def _part_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, ...]:
    grad, q, k, v, out = _heads_first(grad, q, *share_heads(q, k, v), out)
    grads = private.cpu_flash_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=_bias(mask, q.dtype), scale=scale)
    return _heads_first(*grads)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The state of random numbers that kernels want in their backward, though they draw none."""
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    return zero, zero


def _no_dropout_flash(q: Tensor) -> tuple[Tensor, Tensor]:
    if torch.version.hip is not None:
        return _no_dropout(q)
    zeros = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)
    return zeros, zeros[:0]


def _part_flash(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    assert mask is None  # refused otherwise
    q, k, v = _heads_first(q, k, v)
    out, lse = private.flash(q, k, v, 0.0, False, False, scale=scale)[:2]
    return out.transpose(1, 2), lse


def _part_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, ...]:
    queries, keys, state = q.shape[1], k.shape[1], _no_dropout_flash(q)
    grad, q, k, v, out = _heads_first(grad, q, k, v, out)
    given = grad, q, k, v, out, lse.contiguous(), None, None, queries, keys
    return _heads_first(*private.flash_backward(*given, 0.0, False, *state, scale=scale))


def _part_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    assert mask is None  # refused otherwise: there is a backward
    q, k, v = _heads_first(q, k, v)
    out, lse = private.cudnn(q, k, v, None, True, 0.0, False, False, scale=scale)[:2]
    return out.transpose(1, 2), lse.view(q.shape[:3])  # it has a last dimension of 1


def _part_cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, ...]:
    queries, keys, state = q.shape[1], k.shape[1], _no_dropout(q)
    grad, q, k, v, out = _heads_first(grad, q, k, v, out)
    lse = lse.contiguous()[..., None]
    given = grad, q, k, v, out, lse, *state, None, None, None, queries, keys
    return _heads_first(*private.cudnn_backward(*given, 0.0, False, scale=scale))


def _part_efficient(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q, *share_heads(q, k, v))
    bias = _bias(mask, q.dtype)
    bias = None if bias is None else bias.expand(*q.shape[:3], -1)
    out, lse = private.efficient(q, k, v, bias, True, 0.0, False, scale=scale)[:2]
    return out.transpose(1, 2), lse[:, :, : q.shape[2]]  # it comes padded


LSE_MULTIPLE = 32  # rows of the log-sum-exp in the efficient kernel on NVIDIA; those beyond the end are infinite


def _part_efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, ...]:
    state = _no_dropout(q)
    # In half precision the kernel takes the output's rows to follow each other as [B, N, H, K], whatever its strides.
    grad, q, k, v, out = _heads_first(grad, q, *share_heads(q, k, v), out.contiguous())
    bias = _bias(mask, q.dtype)
    bias = None if bias is None else bias.expand(*q.shape[:3], -1)
    if torch.version.hip is None:
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=float("inf"))
    given = grad, q, k, v, bias, out, lse.contiguous(), *state
    grads = private.efficient_backward(*given, 0.0, [True, True, True, False], False, scale=scale)
    return _heads_first(*grads[:3])


def _part_varlen(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    assert mask is not None  # refused otherwise
    batch, queries = q.shape[:2]
    arguments, _ = _packed(q, k, v, mask)
    out, lse = private.packed_flash(*arguments, 0.0, False, False, scale=scale)[:2]
    return out.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1)  # lse is [H, B*N]


def _part_varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert mask is not None
    (flat, *keys_values, starts, ends, queries, keys), packing = _packed(q, k, v, mask)
    lse = lse.transpose(0, 1).flatten(1).contiguous()
    given = (grad.flatten(0, 1).contiguous(), flat, *keys_values, out.flatten(0, 1).contiguous(), lse)
    state = _no_dropout_flash(q)
    dq, *packed = private.packed_flash_backward(*given, starts, ends, queries, keys, 0.0, False, *state, scale=scale)

    def unpacked(t: Tensor) -> Tensor:
        # The kernel leaves what lies behind the end unset.
        rows = torch.where(packing.kept[:, None, None], t, 0)
        return torch.empty_like(rows).index_copy_(0, packing.order, rows).unflatten(0, (q.shape[0], -1))

    dk, dv = (unpacked(t) for t in packed)
    return dq.unflatten(0, q.shape[:2]), dk, dv


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask) -> tuple[tuple[Any, ...], Packing]:
    """Queries, packed keys and values, where samples begin in each, and the most of each in a sample."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    packing = pack_keys(mask.valid) if mask.packing is None else mask.packing
    k, v = (t.flatten(0, 1)[packing.order] for t in share_heads(q, k, v))
    starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=q.device)
    return (q.flatten(0, 1).contiguous(), k, v, starts, packing.ends, queries, keys), packing


def _part_flash4(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float) -> tuple[Tensor, Tensor]:
    assert mask is None  # refused otherwise
    return _flash4(q, k, v, scale)


def _part_flash4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KeyMask | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _flash4_backward(grad, q, k, v, out, lse.contiguous(), scale, deterministic)
