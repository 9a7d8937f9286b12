"""Attention: one attend() for every model and every backend.

- which kernel runs is chosen in layers/backends.py and called in layers/kernels.py; models know nothing of it
- a mask is of keys: which tokens of a sample may be seen, the same for every query and head
- there is no dropout in attention

Fused projections are stored head-major: the rows of `qkv` are (key-value group; queries of the group, key, value;
head width), so that any even split over ranks keeps heads whole. Head counts are inferred from the tensor.
Shapes: B batch, N and M tokens, D width, H heads, G key-value groups (G divides H), K head width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.layers.backends import Call, choose, chosen, machine
from vitrail.layers.kernels import KeyMask, attend_reference, key_mask, run
from vitrail.layers.positions import rotate

__all__ = ["CrossAttention", "KeyMask", "QKNorm", "SelfAttention", "attend", "attend_reference", "key_mask"]


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | KeyMask | None = None) -> Tensor:
    """Softmax attention of q [B, N, H, K] over k and v [B, M, G, K].

    The mask is true where a key may be seen, as a tensor [B, M] or, made once for many calls, as key_mask() of it.
    A sample without any such key gives 0. Masked keys and values must be finite; what they are changes nothing.
    """
    if isinstance(mask, Tensor):
        mask = key_mask(mask)
    here = machine(q.device.type)
    call = Call(
        device=here.device,
        capability=here.capability,
        dtype=q.dtype,
        batch=q.shape[0],
        heads=q.shape[2],
        groups=k.shape[2],
        queries=q.shape[1],
        keys=k.shape[1],
        width=q.shape[3],
        masked=mask is not None,
        needs_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
    )
    return run(choose(call, here.backends, chosen()), q, k, v, mask)


class SelfAttention(nn.Module):
    """Fused, head-major projections; grouped-query heads and normalised queries and keys as options."""

    token_inputs: ClassVar[int] = 1  # so many of the first arguments are tokens
    columns: ClassVar[tuple[str, ...]] = ("qkv",)  # layers whose outputs, heads, can be shared out
    row: ClassVar[str] = "proj"  # the layer whose inputs are these
    attend = staticmethod(attend)  # another one where keys lie on several ranks

    def __init__(self, *, width: int, heads: int, kv_heads: int, qk_norm: bool, bias: bool, eps: float):
        super().__init__()
        self.head_width = width // heads
        self.per_group = heads // kv_heads
        self.qkv = nn.Linear(width, kv_heads * (self.per_group + 2) * self.head_width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm_qk = QKNorm(self.head_width, eps) if qk_norm else None

    def forward(self, x: Tensor, rope: Tensor | None = None, mask: KeyMask | None = None) -> Tensor:
        groups = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.head_width))  # B N G (H/G + 2) K
        # Split at once, not sliced one by one: gradients are then put together in one kernel, not padded and added.
        q, k, v = groups.split([self.per_group, 1, 1], dim=-2)
        q, k, v = q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)  # B N H K, and twice B N G K
        if self.norm_qk is not None:
            q, k = self.norm_qk(q, k)
        out = self.attend(rotate(q, rope), rotate(k, rope), v, mask=mask)
        return self.proj(out.flatten(2))


class CrossAttention(nn.Module):
    """Queries from one set of tokens, keys and values from another; `kv` rows are (group; key, value; head width)."""

    token_inputs: ClassVar[int] = 2
    columns: ClassVar[tuple[str, ...]] = ("q", "kv")
    row: ClassVar[str] = "proj"
    attend = staticmethod(attend)

    def __init__(self, *, width: int, heads: int, qk_norm: bool, bias: bool, eps: float):
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
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
        k, v = self.kv(memory).unflatten(-1, (-1, 2, self.head_width)).unbind(-2)  # B M H K
        if self.norm_qk is not None:
            q, k = self.norm_qk(q, k)
        out = self.attend(rotate(q, rope), rotate(k, memory_rope), v, mask=mask)
        return self.proj(out.flatten(2))


class QKNorm(nn.Module):
    """LayerNorm of queries and keys over the head width: keeps attention logits bounded."""

    def __init__(self, head_width: int, eps: float):
        super().__init__()
        self.q = nn.LayerNorm(head_width, eps=eps)
        self.k = nn.LayerNorm(head_width, eps=eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)
