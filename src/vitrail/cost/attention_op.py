"""Attention as one operation without an implementation, for tracing: what its kernels take, give and keep.

Every fused kernel keeps queries, keys, values, output and the log-sum-exp of each query. Heads are padded as run()
pads them, and masked keys are packed as varlen wants them, so that the copies are there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.layers.backends import MULTIPLE
from vitrail.layers.kernels import KeyMask, pack_keys, share_heads
from vitrail.layers.sequence import TokenSequence


@torch.library.custom_op("vitrail_cost::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Keys are `context` times those given: other ranks have the rest."""
    raise NotImplementedError("it stands for a kernel in a trace, and computes nothing")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, context: int) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(batch, heads, queries, dtype=torch.float32)


@torch.library.custom_op("vitrail_cost::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, context: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("it stands for a kernel in a trace, and computes nothing")


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, context: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.context = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *attention_backward(grad, *ctx.saved_tensors, ctx.context), None


attention.register_autograd(_backward, setup_context=_keep)


def attend_with(context: int, plain: bool = False) -> Any:
    """An attend() for modules that are traced; `plain`: the kernel has no groups of heads."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: KeyMask | None = None) -> Tensor:
        width = q.shape[-1]
        if width % MULTIPLE:
            q, k, v = (F.pad(t, (0, -width % MULTIPLE)) for t in (q, k, v))
        zero = q.new_zeros(())  # where() with a plain number has no backward on the meta device
        if mask is not None or plain:
            k, v = share_heads(q, k, v)
        if mask is not None:
            packing = pack_keys(mask.valid) if mask.packing is None else mask.packing
            kept = packing.kept[:, None, None]
            k, v = (torch.where(kept, t.flatten(0, 1)[packing.order], zero).unflatten(0, t.shape[:2]) for t in (k, v))
        out = attention(q, k, v, context)[0]
        out = out[..., :width] if width % MULTIPLE else out
        return out if mask is None else torch.where(mask.filled[:, None, None, None], out, zero)

    return attend


class TracedSequence(TokenSequence):
    """The tokens of one part, for a model whose other parts are elsewhere; shapes are all that matters."""

    def __init__(self, *, context: int, tensor: int):
        self.parts, self.tensor = context * tensor, tensor

    def table(self, rope: Tensor | None) -> Tensor | None:
        return rope if rope is None or self.tensor == 1 else torch.cat([rope] * self.tensor, dim=-3)

    def keys(self, valid: Tensor | None, *, prefix: int, tokens: int) -> Any:
        if valid is None:
            return None
        valid = F.pad(valid, (prefix, 0), value=True).repeat(1, self.tensor)
        return KeyMask(valid, valid.any(dim=1), packing=pack_keys(valid))

    def whole(self, x: Tensor, *, groups: int = 1, tokens: int | None = None) -> Tensor:
        if self.parts == 1:
            return x
        each = x.unflatten(1, (groups, -1))
        each = torch.cat([each] * self.parts, dim=2)
        return (each if tokens is None else each[:, :, :tokens]).flatten(1, 2)
