"""Parts of a block whose gradient is one pass over the tokens, which also sums the gradient of a bias.

The gradient of a bias is the sum of a gradient over all tokens, so whoever makes that one can add it up on the way. To
that end a layer is applied with its bias cut off from gradients (`apart`), and what follows it takes the bias as well:

- `gelu_after`: GELU of fc1's output
- `heads_after`: queries, keys and values of qkv's output; their gradients are put together
- `add_norm`: a branch added to the residual stream, and the layer norm of that
- `add_gated`, `add_gated_norm`: the same with the gates, scales and shifts that a condition has for each sample

The torch code is the reference and what runs on a CPU; on a GPU the kernels are those of layers/kernels/rows.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.layers import gelu
from vitrail.layers.fast import is_fast
from vitrail.layers.kernels import load_kernels


def suits(name: str, *layers: nn.Module) -> bool:
    """Tell whether a way is on and these layers are linear as PyTorch made them: neither cut nor in float8."""
    return (
        isinstance(layers[0].weight, Tensor)
        and is_fast(name, layers[0].weight.device.type)
        and torch.is_grad_enabled()
        and all(
            isinstance(layer, nn.Linear)
            and "forward" not in vars(layer)
            and isinstance(layer.bias, Tensor)
            and type(layer.weight) in (Tensor, nn.Parameter)
            for layer in layers
        )
    )


def apart(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer, whose bias then gets its gradient elsewhere."""
    return F.linear(x, layer.weight, layer.bias.detach())


def _kernels(x: Tensor) -> Any | None:
    return load_kernels("vitrail.layers.kernels.rows", x.device, "training")


def _sum(x: Tensor) -> Tensor:
    """The sum over all but the last dimension, in fp32 and rounded then."""
    return x.flatten(0, -2).float().sum(dim=0).to(x.dtype)


# ---------------------------------------------------------------- GELU


@torch.library.custom_op("vitrail::gelu_back", mutates_args=())
def _gelu_back(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    if (kernels := _kernels(x)) is not None:
        return kernels.gelu_back(gradient, x, tanh)
    found = gradient.float() * gelu.slope(x.float(), tanh)
    return found.to(x.dtype), _sum(found).to(x.dtype)


@_gelu_back.register_fake
def _(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


class _GeluAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return gelu.value(x.float(), tanh).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        return *_gelu_back(gradient, x, ctx.tanh), None


def gelu_after(layer: nn.Linear, x: Tensor, *, tanh: bool) -> Tensor:
    """GELU of the layer's output."""
    return _GeluAfter.apply(apart(layer, x), layer.bias, tanh)


# ---------------------------------------------------------------- queries, keys and values


@torch.library.custom_op("vitrail::pack_back", mutates_args=())
def _pack_back(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if (kernels := _kernels(q)) is not None:
        return kernels.pack_back(q, k, v)
    packed = torch.stack([q, k, v], dim=3).flatten(2)  # B N H 3 K
    return packed, _sum(packed)


@_pack_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    columns = 3 * q.shape[2] * q.shape[3]
    return q.new_empty((*q.shape[:2], columns)), q.new_empty((columns,))


class _HeadsAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, bias: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = packed.unflatten(-1, (-1, 3, width)).unbind(-2)  # B N H K each
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_pack_back(q, k, v), None


def heads_after(layer: nn.Linear, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, N, H, K] of a layer whose rows are (head; query, key, value; head width)."""
    return _HeadsAfter.apply(apart(layer, x), layer.bias, width)


# ---------------------------------------------------------------- layer norm


@torch.library.custom_op("vitrail::norm_back", mutates_args=())
def _norm_back(
    gradient: Tensor, x: Tensor, past: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if (kernels := _kernels(x)) is not None:
        return kernels.norm_back(gradient, x, past, weight, eps)
    wide, change = x.float(), gradient.float()
    variance, mean = torch.var_mean(wide, dim=-1, keepdim=True, correction=0)
    scale = (variance + eps).rsqrt()
    normed = (wide - mean) * scale
    weighted = change * weight.float()
    along = (weighted * normed).mean(dim=-1, keepdim=True)
    found = (weighted - normed * along - weighted.mean(dim=-1, keepdim=True)) * scale + past.float()
    sums = [_sum(each).to(weight.dtype) for each in (change * normed, change, found)]
    return found.to(x.dtype), sums[0], sums[1], sums[2]


@_norm_back.register_fake
def _(gradient: Tensor, x: Tensor, past: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c = (weight.new_empty(weight.shape) for _ in range(3))
    return x.new_empty(x.shape), a, b, c


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x + branch
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x, F.layer_norm(x, weight.shape, weight, shift, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        found, of_weight, of_shift, of_bias = _norm_back(gradient, x, past, weight, ctx.eps)
        return found, found, of_bias, of_weight, of_shift, None


def add_norm(norm: nn.LayerNorm, x: Tensor, branch: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + branch, and the layer norm of that; `branch` ends with a layer applied `apart` from `bias`."""
    return _AddNorm.apply(x, branch, bias, norm.weight, norm.bias, norm.eps)


class _PastNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return x.view_as(x), F.layer_norm(x, weight.shape, weight, shift, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        found, of_weight, of_shift, _ = _norm_back(gradient, x, past, weight, ctx.eps)
        return found, of_weight, of_shift, None


def past_norm(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, and its layer norm."""
    return _PastNorm.apply(x, norm.weight, norm.bias, norm.eps)


# ---------------------------------------------------------------- with a condition


def _per_sample(x: Tensor) -> Tensor:
    """[B, C] beside tokens [B, N, C]."""
    return x.float().unsqueeze(1)


@torch.library.custom_op("vitrail::gate_back", mutates_args=())
def _gate_back(past: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if (kernels := _kernels(branch)) is not None:
        _, of_branch, sums = kernels.gate_back(past, branch, gate)
    else:
        wide = past.float()
        of_branch = (wide * _per_sample(gate)).to(branch.dtype)
        sums = [wide.sum(dim=1), (wide * branch.float()).sum(dim=1)]
    return of_branch, sums[1].to(gate.dtype), (sums[0] * gate.float()).sum(dim=0).to(gate.dtype)


@_gate_back.register_fake
def _(past: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return branch.new_empty(branch.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape[-1:])


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(branch, gate)
        return x + gate.unsqueeze(1) * branch

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        branch, gate = ctx.saved_tensors
        of_branch, of_gate, of_bias = _gate_back(past, branch, gate)
        return past, of_branch, of_bias, of_gate


def add_gated(x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """x + gate * branch; `branch` ends with a layer that was applied `apart` from `bias`."""
    return _AddGated.apply(x, branch, bias, gate)


@torch.library.custom_op("vitrail::gated_norm_back", mutates_args=())
def _gated_norm_back(
    gradient: Tensor, x: Tensor, past: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if (kernels := _kernels(x)) is not None:
        out, of_branch, sums = kernels.gate_back(past, branch, gate, (gradient, x, scale, eps))
    else:
        wide, change = x.float(), gradient.float()
        variance, mean = torch.var_mean(wide, dim=-1, keepdim=True, correction=0)
        steep = (variance + eps).rsqrt()
        normed = (wide - mean) * steep
        weighted = change * (1 + _per_sample(scale))
        along = (weighted * normed).mean(dim=-1, keepdim=True)
        found = (weighted - normed * along - weighted.mean(dim=-1, keepdim=True)) * steep + past.float()
        out, of_branch = found.to(x.dtype), (found * _per_sample(gate)).to(branch.dtype)
        sums = [each.sum(dim=1) for each in (found, found * branch.float(), change, change * normed)]
    of_bias = (sums[0] * gate.float()).sum(dim=0)
    # Copies, where nothing is rounded: what an operator gives back must not share memory.
    return out, of_branch, *(each.to(gate.dtype, copy=True) for each in (sums[1], sums[3], sums[2], of_bias))


@_gated_norm_back.register_fake
def _(
    gradient: Tensor, x: Tensor, past: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, c = (gate.new_empty(gate.shape) for _ in range(3))
    return x.new_empty(x.shape), branch.new_empty(branch.shape), a, b, c, gate.new_empty(gate.shape[-1:])


class _AddGatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x + gate.unsqueeze(1) * branch
        ctx.save_for_backward(x, branch, gate, scale)
        ctx.eps = eps
        normed = F.layer_norm(x, x.shape[-1:], None, None, eps)
        return x, normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, branch, gate, scale = ctx.saved_tensors
        of_x, of_branch, of_gate, of_scale, of_shift, of_bias = _gated_norm_back(
            gradient, x, past, branch, gate, scale, ctx.eps
        )
        return of_x, of_branch, of_bias, of_gate, of_scale, of_shift, None


def add_gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return x + gate * branch, and the layer norm of that, scaled and shifted; `branch` and `bias` as in add_gated."""
    return _AddGatedNorm.apply(x, branch, bias, gate, scale, shift, eps)


def is_bare_norm(*norms: nn.Module) -> bool:
    return all(type(norm) is nn.LayerNorm and norm.weight is None for norm in norms)


def is_plain_norm(*norms: nn.Module) -> bool:
    return all(
        type(norm) is nn.LayerNorm and isinstance(norm.weight, Tensor) and isinstance(norm.bias, Tensor)
        for norm in norms
    )
