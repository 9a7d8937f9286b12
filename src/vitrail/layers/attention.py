"""Attention: one attend() for every model, PyTorch's scaled_dot_product_attention underneath.

Fused projections are stored head-major: the rows of `qkv` are (key-value group; queries of the group, key, value;
head width), so that any even split over ranks keeps heads whole. Head counts are inferred from the tensor.
Shapes: B batch, N and M tokens, D width, H heads, G key-value groups (G divides H), K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.layers.positions import rotate

# Measured on Hopper: cuDNN beats the other backends at every shape of interest (forward and backward together).
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLASH_FIRST = _CUDNN_FIRST[1:]


def preferred_backends(q: Tensor) -> list[SDPBackend] | None:
    """Backends to try in order, by hardware, type and shape; None leaves the choice to PyTorch."""
    if q.device.type != "cuda":
        return None
    half = q.dtype in (torch.bfloat16, torch.float16)
    if torch.version.hip is None and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128:
        return _CUDNN_FIRST
    return _FLASH_FIRST


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of q [B, N, H, K] over k and v [B, M, G, K]; mask [B, M] is true where a key may be seen."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, N, K]
    grouped = q.shape[1] != k.shape[1]
    keys = None if mask is None else mask[:, None, None, :]  # broadcast: never an N x M matrix
    backends = preferred_backends(q)
    if backends is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, enable_gqa=grouped)
    else:
        with sdpa_kernel(backends, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys, enable_gqa=grouped)
    return out.transpose(1, 2)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """What attend() computes, in plain steps: for tests."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
    logits = torch.einsum("bnhk,bmhk->bhnm", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :], float("-inf"))
    return torch.einsum("bhnm,bmhk->bnhk", logits.softmax(dim=-1), v)


class SelfAttention(nn.Module):
    """Fused, head-major projections; grouped-query heads and normalised queries and keys as options."""

    def __init__(self, *, width: int, heads: int, kv_heads: int, qk_norm: bool, bias: bool, eps: float):
        super().__init__()
        self.head_width = width // heads
        self.per_group = heads // kv_heads
        self.qkv = nn.Linear(width, kv_heads * (self.per_group + 2) * self.head_width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm_qk = QKNorm(self.head_width, eps) if qk_norm else None

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        groups = self.qkv(x).unflatten(-1, (-1, self.per_group + 2, self.head_width))  # B N G (H/G + 2) K
        q = groups[..., : self.per_group, :].flatten(2, 3)  # B N H K
        k, v = groups[..., -2, :], groups[..., -1, :]  # B N G K
        if self.norm_qk is not None:
            q, k = self.norm_qk(q, k)
        out = attend(rotate(q, rope), rotate(k, rope), v)
        return self.proj(out.flatten(2))


class CrossAttention(nn.Module):
    """Queries from one set of tokens, keys and values from another; `kv` rows are (group; key, value; head width)."""

    def __init__(self, *, width: int, heads: int, qk_norm: bool, bias: bool, eps: float):
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.norm_qk = QKNorm(self.head_width, eps) if qk_norm else None

    def forward(
        self, x: Tensor, memory: Tensor, rope: Tensor | None = None, memory_rope: Tensor | None = None
    ) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_width))  # B N H K
        k, v = self.kv(memory).unflatten(-1, (-1, 2, self.head_width)).unbind(-2)  # B M H K
        if self.norm_qk is not None:
            q, k = self.norm_qk(q, k)
        out = attend(rotate(q, rope), rotate(k, memory_rope), v)
        return self.proj(out.flatten(2))


class QKNorm(nn.Module):
    """LayerNorm of queries and keys over the head width: keeps attention logits bounded."""

    def __init__(self, head_width: int, eps: float):
        super().__init__()
        self.q = nn.LayerNorm(head_width, eps=eps)
        self.k = nn.LayerNorm(head_width, eps=eps)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)
