"""Tensor parallelism: attention and MLPs of blocks share their heads and hidden channels over the ranks of one axis.

- between them every rank has a part of the tokens (sequence parallelism): a module gathers the tokens of its group,
  computes with its own heads or channels, and gets back its tokens of the sum over ranks
- weights are DTensors: in-layers cut by rows (whole heads, since fused projections are head-major), the out-layer by
  columns; the out-layer's bias is whole and added once, after the sum
- layers that act on a sample, not on tokens (modulation), compute a part of their outputs and gather them
- everything else (norms, scales, out-biases) is whole on every rank; its gradients are sums over the tokens here, and
  the trainer adds them up over the axis
Which layers play which part is said by the modules themselves: `columns`, `row` and `gathered`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vitrail.layers.attention import CrossAttention, SelfAttention
from vitrail.layers.mlp import MLP, SwiGLU
from vitrail.parallel.collectives import gather, scatter_sum
from vitrail.parallel.mesh import local

SHARED = (SelfAttention, CrossAttention, MLP, SwiGLU)


def apply(blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the layers of blocks (on the meta device) over the tensor axis, and make their modules gather and scatter."""
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    for block in blocks:
        module: Any
        for module in block.modules():
            if isinstance(module, SHARED):
                for name in module.columns:
                    share(getattr(module, name), mesh, Shard(0))
                share(getattr(module, module.row), mesh, Shard(1))
                module.forward = shared(module, group)  # type: ignore[method-assign]
            for name in getattr(module, "gathered", ()):
                layer = share(getattr(module, name), mesh, Shard(0))
                layer.forward = gathered(layer.forward, group)


def share(layer: Any, mesh: DeviceMesh, placement: Shard) -> Any:
    """Cut a layer's weight, by rows also its bias; a layer cut by columns leaves its bias to its module."""
    rows = placement.dim == 0
    for name, parameter in list(layer.named_parameters()):
        if rows or name == "weight":
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, local(layer.weight), local(layer.bias) if rows and layer.bias is not None else None)

    layer.forward = forward
    return layer


def shared(module: Any, group: Any) -> Callable[..., Tensor]:
    """A module that computes with a share of its channels, on the tokens of the whole group."""
    inner, out, tokens = module.forward, getattr(module, module.row), module.token_inputs

    def forward(*arguments: Any, **options: Any) -> Tensor:
        gathered = [gather(argument, 1, group) for argument in arguments[:tokens]]
        x = scatter_sum(inner(*gathered, *arguments[tokens:], **options), 1, group)
        return x if out.bias is None else x + out.bias

    return forward


def gathered(inner: Callable[[Tensor], Tensor], group: Any) -> Callable[[Tensor], Tensor]:
    """A layer that computes a share of its outputs and gathers the rest."""
    return lambda x: gather(inner(x), -1, group)
