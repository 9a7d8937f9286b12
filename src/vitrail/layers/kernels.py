"""How each attention backend is called, and the mask of keys in the form that each one wants.

- every kernel takes q [B, N, H, K] and k, v [B, M, G, K] and gives [B, N, H, K]; there is no dropout in attention
- a mask says which keys may be seen, the same for every query and head, so nothing of size N x M is ever made
  (but by math and reference, which make the scores themselves)
- masked keys and values must be finite: their weight is 0, and 0 times NaN is NaN
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.backends import MASKED, MASKED_ROCM, MULTIPLE, chosen, machine

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "ck": SDPBackend.FLASH_ATTENTION,  # use_backend has told PyTorch to take its flash kernel from there
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

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
    """Where the keys go when the seen ones of all samples are moved to the front, as varlen wants them."""

    order: Tensor  # [B * M] indices
    kept: Tensor  # [B * M] bool: the place holds a key that is seen
    ends: Tensor  # [B + 1] int32: where each sample begins, and the end


class KeyMask(NamedTuple):
    """Which keys may be seen. Made once for a forward by key_mask(), used by every block."""

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


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float, order: tuple[str, ...]) -> Tensor:
    """scaled_dot_product_attention with the kernels of `order`, tried in that order."""
    if order[0] == "efficient":  # it wants as many key heads as query heads
        k, v = share_heads(q, k, v)
    grouped = is_grouped(q, k)
    # Never expanded: on a CPU, PyTorch copies an expanded mask to the full N x M.
    keys = None if mask is None else mask.valid[:, None, None, :]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel([SDPA[name] for name in order if name in SDPA], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


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
    grouped = is_grouped(q, k)
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


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

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


def attend_flash4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return _flash4(q, k, v, scale)[0]


@torch.compiler.disable  # not traceable: compiled blocks have a break here
def attend_flash3(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(q, k, v, softmax_scale=scale)
    return out[0] if isinstance(out, tuple) else out  # older versions give the log-sum-exp too


@torch.compiler.disable
def attend_xformers(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from xformers.ops import memory_efficient_attention

    k, v = share_heads(q, k, v)  # its grouped heads have no backward
    return memory_efficient_attention(q, k, v, scale=scale)


# ---------------------------------------------------------------- plain


def attend_reference(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | KeyMask | None = None) -> Tensor:
    """What attention is, in plain steps: for tests."""
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


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether several query heads share one of keys and values.

    A branch, for a plain bool: compiled with dynamic shapes the comparison itself is a SymBool, which kernels refuse.
    """
    return True if q.shape[2] != k.shape[2] else False  # noqa: SIM210


def share_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head of their group, for kernels that have no groups."""
    repeat = q.shape[2] // k.shape[2]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)


PADDED = ("cudnn", "efficient", "varlen", "flash3", "flash4", "xformers", "flex")  # want widths of 8, 16, 24, ...


def run(order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None) -> Tensor:
    """Attention by the first backend of `order`; see backends.choose."""
    name, width = order[0], q.shape[-1]
    scale = 1 / math.sqrt(width)
    least = 16 if name == "flex" else MULTIPLE
    padding = max(-width % MULTIPLE, least - width) if name in PADDED and q.device.type != "cpu" else 0
    if padding:  # zeros change no score
        q, k, v = (F.pad(t, (0, padding)) for t in (q, k, v))
    if name in SDPA:
        out = attend_sdpa(q, k, v, mask, scale, order)
    elif name == "flex":
        out = attend_flex(q, k, v, mask, scale)
    elif name == "varlen":
        assert mask is not None  # refused otherwise
        out = attend_varlen(q, k, v, mask, scale)
    elif name == "flash4":
        out = attend_flash4(q, k, v, scale)
    elif name == "flash3":
        out = attend_flash3(q, k, v, scale)
    elif name == "xformers":
        out = attend_xformers(q, k, v, scale)
    else:
        return attend_reference(q, k, v, mask=mask)
    if padding:
        out = out[..., :width]
    return blank(out, mask)
