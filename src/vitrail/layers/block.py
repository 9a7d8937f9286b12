"""Transformer blocks: residual branches, normed before (pre) or after (post), scaled by LayerScale and drop path.

Drop path is data: a table [B, 2] of factors for the two branches of a block, 0 or 1/(1-p), drawn outside.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.layers.attention import CrossAttention, KeyMask, SelfAttention
from vitrail.layers.init import Constant, mark
from vitrail.layers.mlp import MLP, SwiGLU
from vitrail.recipe import config


@config
class BlockConfig:
    """What one block is made of, every number resolved."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    mlp: Literal["gelu", "swiglu"]
    norm: Literal["layer", "rms"]
    eps: float
    bias: bool
    qk_norm: bool
    layer_scale: float | None
    residual: Literal["pre", "post"] = "pre"  # x + f(norm(x)), or x + norm(f(x))

    @property
    def scales(self) -> bool:
        """Whether something stands between a branch and the sum, whose backward reads what the branch gave."""
        return self.layer_scale is not None or self.residual == "post"


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else nn.RMSNorm(width, eps=eps)


class Scale(nn.Module):
    """LayerScale: a learned factor a channel, small at the start."""

    def __init__(self, width: int, value: float):
        super().__init__()
        self.gamma = mark(nn.Parameter(torch.empty(width)), Constant(value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Residual(nn.Module):
    """What both blocks share: the MLP branch, the norms, the scales and drop path."""

    def __init__(self, c: BlockConfig):
        super().__init__()
        self.post = c.residual == "post"
        self.norm1 = make_norm(c.norm, c.width, c.eps)
        self.norm2 = make_norm(c.norm, c.width, c.eps)
        self.mlp = (MLP if c.mlp == "gelu" else SwiGLU)(width=c.width, hidden=c.hidden, bias=c.bias)
        self.ls1 = nn.Identity() if c.layer_scale is None else Scale(c.width, c.layer_scale)
        self.ls2 = nn.Identity() if c.layer_scale is None else Scale(c.width, c.layer_scale)

    def before(self, x: Tensor) -> Tensor:
        """What goes into attention."""
        return x if self.post else self.norm1(x)

    def residual(self, x: Tensor, attention: Tensor, drop_path: Tensor | None) -> Tensor:
        """Both branches added to x, given what attention made of before(x)."""
        if self.post:
            x = x + _dropped(self.ls1(self.norm1(attention)), drop_path, 0)
            return x + _dropped(self.ls2(self.norm2(self.mlp(x))), drop_path, 1)
        x = x + _dropped(self.ls1(attention), drop_path, 0)
        return x + _dropped(self.ls2(self.mlp(self.norm2(x))), drop_path, 1)


def _dropped(branch: Tensor, drop_path: Tensor | None, column: int) -> Tensor:
    return branch if drop_path is None else branch * drop_path[:, column, None, None].to(branch.dtype)


class Block(_Residual):
    """Self-attention and MLP."""

    def __init__(self, c: BlockConfig):
        super().__init__(c)
        self.attn = SelfAttention(
            width=c.width, heads=c.heads, kv_heads=c.kv_heads, qk_norm=c.qk_norm, bias=c.bias, eps=c.eps
        )

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        drop_path: Tensor | None = None,
        mask: KeyMask | None = None,
    ) -> Tensor:
        return self.residual(x, self.attn(self.before(x), rope, mask), drop_path)


class CrossBlock(_Residual):
    """Queries attend to memory; memory passes unchanged.

    One tensor holds both, [memory; queries] along the tokens, so that one tensor flows from block to block.
    """

    def __init__(self, c: BlockConfig):
        super().__init__(c)
        self.attn = CrossAttention(width=c.width, heads=c.heads, qk_norm=c.qk_norm, bias=c.bias, eps=c.eps)

    def forward(
        self,
        x: Tensor,
        num_queries: int,
        rope: Tensor | None = None,
        memory_rope: Tensor | None = None,
        drop_path: Tensor | None = None,
        mask: KeyMask | None = None,
    ) -> Tensor:
        memory, queries = x[:, :-num_queries], x[:, -num_queries:]
        attention = self.attn(self.before(queries), memory, rope, memory_rope, mask)
        return torch.cat([memory, self.residual(queries, attention, drop_path)], dim=1)
