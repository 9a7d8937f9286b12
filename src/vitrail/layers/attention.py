"""Attention: one attend() for every model and every backend.

- which kernel runs is chosen in layers/backends.py; models know nothing of it. PyTorch's own are called here, others in
  layers/kernels/attention.py
- a mask is of keys: which tokens of a sample may be seen, the same for every query and head
- there is no dropout in attention

Fused projections are stored head-major: the rows of `qkv` are (key-value group; queries of the group, key, value;
head width), so that any even split over ranks keeps heads whole. Head counts are inferred from the tensor.
Shapes: B batch, N and M tokens, D width, H heads, G key-value groups (G divides H), K head width.

The tokens of a sample as a model meets them: all of them here, or a part whose rest lies elsewhere.

A model works on the tokens that it is given. The few things that concern a sequence as a whole (which keys attention
sees, the rotation tables of the tokens it computes with, pooling) it asks of its `sequence`. By default that is this
class, for which everything is here; parallelize() puts in one that knows where the other parts are.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.backends import MULTIPLE, Call, choose, chosen, machine
from vitrail.layers.fused import apart, heads_after, suits
from vitrail.layers.kernels.attention import (
    OTHERS,
    KeyMask,
    attend_reference,
    blank,
    is_grouped,
    key_mask,
    share_heads,
)

__all__ = ["CrossAttention", "KeyMask", "QKNorm", "SelfAttention", "attend", "attend_reference", "key_mask"]


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "ck": SDPBackend.FLASH_ATTENTION,  # use_backend has told PyTorch to take its flash kernel from there
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PADDED = ("cudnn", "efficient", "varlen", "flash4", "xformers", "flex")  # want widths of 8, 16, 24, ...


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | KeyMask | None = None) -> Tensor:
    """Softmax attention of q [B, N, H, K] over k and v [B, M, G, K].

    The mask is true where a key may be seen, as a tensor [B, M] or, made once for many calls, as key_mask() of it.
    A sample without any such key gives 0. Masked keys and values must be finite; what they are changes nothing.
    """
    if isinstance(mask, Tensor):
        mask = key_mask(mask)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    order = order_for(q, groups=k.shape[2], keys=k.shape[1], masked=mask is not None, needs_grad=needs_grad)
    return run(order, q, k, v, mask)


def order_for(
    q: Tensor, *, groups: int, keys: int, masked: bool, needs_grad: bool, partial: bool = False
) -> tuple[str, ...]:
    """Return the backends that a call for q [B, N, H, K] is tried with, in their order; see backends.Call."""
    here, (batch, queries, heads, width) = machine(q.device.type), q.shape
    sizes = batch, heads, groups, queries, keys, width
    return choose(
        Call(here.device, here.capability, q.dtype, *sizes, masked, needs_grad, partial), here.backends, chosen()
    )


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
    elif name in OTHERS:  # those that take no mask are refused with one
        out = OTHERS[name](q, k, v, mask, scale)
    else:
        return attend_reference(q, k, v, mask=mask)
    if padding:
        out = out[..., :width]
    return out if mask is None else blank(out, mask)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask | None, scale: float, order: tuple[str, ...]) -> Tensor:
    """scaled_dot_product_attention with the kernels of `order`, tried in that order."""
    if order[0] == "efficient":  # it wants as many key heads as query heads
        k, v = share_heads(q, k, v)
    grouped = is_grouped(q.shape[2], k.shape[2])
    # Never expanded: on a CPU, PyTorch copies an expanded mask to the full N x M.
    keys = None if mask is None else mask.valid[:, None, None, :]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel([SDPA[name] for name in order if name in SDPA], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


class _Attention(nn.Module):
    """Base of both kinds: queries and keys are normalised and turned, heads mixed and projected.

    Both call `attend` in their own forward(): a kernel that cannot be compiled cuts the graph in every frame above it.
    """

    row: ClassVar[str] = "proj"  # the layer whose inputs are heads
    attend = staticmethod(attend)  # another one where keys lie on several ranks
    proj: nn.Linear
    norm_qk: "QKNorm | None"

    def turned(self, q: Tensor, k: Tensor, rope: Tensor | None, memory_rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise and turn queries [B, N, H, K] and keys [B, M, G, K]."""
        if self.norm_qk is not None:
            q, k = self.norm_qk(q, k)
        return rotate(q, rope), rotate(k, memory_rope)


class SelfAttention(_Attention):
    """Fused, head-major projections; grouped-query heads and normalised queries and keys as options."""

    token_inputs: ClassVar[int] = 1  # so many of the first arguments are tokens
    columns: ClassVar[tuple[str, ...]] = ("qkv",)  # layers whose outputs, heads, can be shared out

    def __init__(self, *, width: int, heads: int, kv_heads: int, qk_norm: bool, bias: bool, eps: float):
        super().__init__()
        self.head_width = width // heads
        self.per_group = heads // kv_heads
        self.qkv = nn.Linear(width, kv_heads * (self.per_group + 2) * self.head_width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm_qk = QKNorm(self.head_width, eps) if qk_norm else None

    def forward(
        self, x: Tensor, rope: Tensor | None = None, mask: KeyMask | None = None, *, without: bool = False
    ) -> Tensor:
        """`without`: the last bias is added, but whoever calls gives it its gradient."""
        if self.per_group == 1 and suits("bias", self.qkv):
            q, k, v = heads_after(self.qkv, x, self.head_width)
        else:
            groups = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.head_width))  # B N G (H/G + 2) K
            # Split at once, not sliced one by one: gradients are then put together in one kernel, not padded and added.
            q, k, v = groups.split([self.per_group, 1, 1], dim=-2)
            q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)  # B N H K, and twice B N G K
        q, k = self.turned(q, k, rope, rope)
        heads = self.attend(q, k, v, mask=mask).flatten(2)
        return apart(self.proj, heads) if without else self.proj(heads)


class CrossAttention(_Attention):
    """Queries from one set of tokens, keys and values from another; `kv` rows are (group; key, value; head width).

    `kv_heads` None: as many as there are heads.
    """

    token_inputs: ClassVar[int] = 2
    columns: ClassVar[tuple[str, ...]] = ("q", "kv")

    def __init__(self, *, width: int, heads: int, qk_norm: bool, bias: bool, eps: float, kv_heads: int | None = None):
        super().__init__()
        self.head_width = width // heads
        self.per_group = heads // (kv_heads or heads)
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width // self.per_group, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm_qk = QKNorm(self.head_width, eps) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        rope: Tensor | None = None,
        memory_rope: Tensor | None = None,
        mask: KeyMask | None = None,
    ) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_width))  # B N H K
        k, v = self.kv(memory).unflatten(-1, (-1, 2, self.head_width)).unbind(-2)  # B M G K
        q, k = self.turned(q, k, rope, memory_rope)
        return self.proj(self.attend(q, k, v, mask=mask).flatten(2))


def rotate(x: Tensor, table: Tensor | None) -> Tensor:
    """Turn adjacent channel pairs of x [B, N, H, K]; computed in fp32, returned in x's dtype."""
    if table is None:
        return x
    cos, sin = table.float().unbind(0)
    turned = 2 * cos.shape[-1]
    pairs = x[..., :turned].float().contiguous().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # one kernel, but not of complex numbers
        even, odd = pairs.unbind(-1)
        out = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:  # the same as a product of complex numbers, in far fewer kernels
        out = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    out = out.flatten(-2).to(x.dtype)
    return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], dim=-1)


class QKNorm(nn.Module):
    """LayerNorm of queries and keys over the head width: keeps attention logits bounded."""

    def __init__(self, head_width: int, eps: float):
        super().__init__()
        self.q = nn.LayerNorm(head_width, eps=eps)
        self.k = nn.LayerNorm(head_width, eps=eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)


class TokenSequence:
    """The sequence of a rank that has all tokens."""

    parts: int = 1

    def table(self, rope: Tensor | None) -> Tensor | None:
        """Rotations [2, ..., N, 1, pairs] of the given tokens to those of the tokens that attention computes with."""
        return rope

    def keys(self, valid: Tensor | None, *, prefix: int, tokens: int) -> Any:
        """Return which keys may be seen, given which of the `tokens` are valid; the `prefix` before them always are."""
        return None if valid is None else mask_of(valid, prefix)

    def whole(self, x: Tensor, *, groups: int = 1, tokens: int | None = None) -> Tensor:
        """Return all tokens of [B, groups*n, ...], group by group; `tokens` of each group, which leaves out padding."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over all parts of what was summed over the tokens here."""
        return x


def mask_of(valid: Tensor, prefix: int) -> KeyMask:
    """The mask of [prefix; tokens], where those before the tokens may always be seen."""
    return key_mask(F.pad(valid, (prefix, 0), value=True))


WHOLE = TokenSequence()
