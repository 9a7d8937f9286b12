"""Blocks as one tensor rank has them: heads and hidden channels divided, tokens gathered before and shared out after.

No ranks are needed: the exchanges are operations that give the right shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("vitrail_cost::gather", mutates_args=())
def gather(x: Tensor, times: int) -> Tensor:
    raise NotImplementedError("it stands for an exchange in a trace, and computes nothing")


@gather.register_fake
def _(x: Tensor, times: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * times, *x.shape[2:])


@torch.library.custom_op("vitrail_cost::scatter", mutates_args=())
def scatter(x: Tensor, times: int) -> Tensor:
    raise NotImplementedError("it stands for an exchange in a trace, and computes nothing")


@scatter.register_fake
def _(x: Tensor, times: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // times, *x.shape[2:])


def _times(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.times = inputs[1]


gather.register_autograd(lambda ctx, grad: (scatter(grad.contiguous(), ctx.times), None), setup_context=_times)
scatter.register_autograd(lambda ctx, grad: (gather(grad.contiguous(), ctx.times), None), setup_context=_times)


def split_block(block: nn.Module, tensor: int) -> None:
    """Leave in a block what one of so many tensor ranks has; refuses numbers that do not divide."""
    for module in list(block.modules()):
        columns: tuple[str, ...] = getattr(module, "columns", ())
        for name in columns:
            _divide(module, name, tensor, outputs=True)
        if columns:
            _divide(module, str(module.row), tensor, outputs=False)
            module.forward = _exchanged(module.forward, int(module.token_inputs), tensor)  # type: ignore[arg-type]
        for name in getattr(module, "gathered", ()):
            _divide(module, name, tensor, outputs=True)
            layer = getattr(module, name)
            layer.forward = _repeated(layer.forward, tensor)


def _divide(module: nn.Module, name: str, tensor: int, *, outputs: bool) -> None:
    layer = getattr(module, name)
    groups = layer.out_features if outputs else layer.in_features
    head = getattr(module, "head_width", 1)
    heads = groups // head // (getattr(module, "per_group", 1) + 2 if name == "qkv" else 2 if name == "kv" else 1)
    if groups % tensor or heads % tensor:
        what = f"{heads} heads" if head > 1 else f"{groups} channels"
        raise ValueError(f"tensor {tensor} does not divide the {what} of a block; choose a divisor")
    sizes = (layer.in_features, groups // tensor) if outputs else (groups // tensor, layer.out_features)
    setattr(module, name, nn.Linear(*sizes, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype))


def _exchanged(forward: Callable[..., Tensor], inputs: int, tensor: int) -> Callable[..., Tensor]:
    def run(*arguments: Any, **keywords: Any) -> Tensor:
        tokens = [gather(x, tensor) for x in arguments[:inputs]]
        return scatter(forward(*tokens, *arguments[inputs:], **keywords), tensor)

    return run


def _repeated(forward: Callable[[Tensor], Tensor], tensor: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        return torch.cat([forward(x)] * tensor, dim=-1)

    return run
