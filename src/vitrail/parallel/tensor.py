"""Tensor parallelism: attention and MLPs of blocks share their heads and hidden channels over the ranks of one axis.

- between them every rank has a part of the tokens (sequence parallelism): a module gathers the tokens of its group,
  computes with its own heads or channels, and gets back its tokens of the sum over ranks
- weights are DTensors: in-layers cut by rows (whole heads, since fused projections are head-major), the out-layer by
  columns; the out-layer's bias is whole and added once, after the sum
- layers that act on a sample, not on tokens (modulation), compute a part of their outputs and gather them
- everything else (norms, scales, out-biases) is whole on every rank; its gradients are sums over the tokens here, and
  the trainer adds them up over the axis
Which layers play which part is said by the modules themselves: `columns`, `row` and `gathered`.

A sequence whose parts lie on the ranks of the context and tensor axes.

- part r of R is that of context rank r // tensor and tensor rank r % tensor; all parts are equally long
- attention computes with the tokens of a context rank (the parts of its tensor group) and sees the keys of all
- tokens before the patches (class token, registers) are on every part, equal; as keys only the first part's count
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from vitrail.layers.attention import CrossAttention, SelfAttention, TokenSequence
from vitrail.layers.block import MLP, SwiGLU
from vitrail.layers.patches import Part
from vitrail.parallel import planes
from vitrail.parallel.agree import Group
from vitrail.parallel.context import ContextKeys, Ranks, attend_context, choose_ulysses, context_keys, split_context
from vitrail.parallel.mesh import Layout, Mesh, gather, local, scatter_sum, total

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


def shared(module: Any, group: Group) -> Callable[..., Tensor]:
    """Return a forward that computes with a share of the channels, on the tokens of the whole group."""
    inner, out, tokens = module.forward, getattr(module, module.row), module.token_inputs

    def forward(*arguments: Any, **options: Any) -> Tensor:
        gathered = [gather(argument, 1, group) for argument in arguments[:tokens]]
        x = scatter_sum(inner(*gathered, *arguments[tokens:], **options), 1, group)
        return x if out.bias is None else x + out.bias

    return forward


def gathered(inner: Callable[[Tensor], Tensor], group: Group) -> Callable[[Tensor], Tensor]:
    """Return a forward that computes a share of the outputs and gathers the rest."""
    return lambda x: gather(inner(x), -1, group)


def heads_of(attention: Any) -> tuple[int, int]:
    """Return the heads of an attention over all tensor ranks, and the key-value heads that they share."""
    heads: int = attention.proj.in_features // attention.head_width
    return heads, heads // int(attention.per_group)


Keys = dict[int, ContextKeys]  # by how many ranks trade heads


class PartedSequence(TokenSequence):
    def __init__(self, mesh: Mesh, layout: Layout, blocks: Iterable[nn.Module], wanted: int | None):
        """`blocks` are those of the whole model, since process groups are made here; `wanted` ranks trade heads."""
        self.layout, self.parts = layout, layout.parts
        self.part = Part(mesh.rank("sequence"), layout.parts)
        self.tensor_group = mesh["tensor"].get_group()
        self.sequence_group = mesh["sequence"].get_group()
        self.wanted, self.device = wanted, torch.device(mesh.root.device_type)
        sizes = {self.trading(module) for block in blocks for module in block.modules() if _is_attention(module)}
        self.ranks: dict[int, tuple[Ranks, Ranks]] = {size: split_context(mesh.root, size) for size in sorted(sizes)}

    def apply(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Let a model ask this for its sequences, and the attention of its blocks see the keys of all ranks."""
        module: Any
        for module in model.modules():
            if isinstance(getattr(module, "sequence", None), TokenSequence):
                module.sequence = self
        planes.share(model, self.sequence_group)
        for block in blocks:
            for module in block.modules():
                if _is_attention(module):
                    module.attend = self.attention(self.trading(module))

    def trading(self, attention: Any) -> int:
        """Choose how many context ranks trade heads in an attention."""
        heads, kv_heads = heads_of(attention)
        ranks = self.layout.tensor
        return choose_ulysses(heads // ranks, kv_heads // ranks, self.layout.context, self.wanted)

    def attention(self, trading: int) -> Callable[..., Tensor]:
        ring, ulysses = self.ranks[trading]

        def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Keys | None = None) -> Tensor:
            keys = None if mask is None else mask[trading]
            return attend_context(q, k, v, ring=ring, ulysses=ulysses, keys=keys)

        return attend

    def table(self, rope: Tensor | None) -> Tensor | None:
        return None if rope is None else gather(rope, -3, self.tensor_group)

    def keys(self, valid: Tensor | None, *, prefix: int, tokens: int) -> Keys | None:
        if valid is None and not prefix:
            return None
        real = torch.ones(self.parts, prefix + tokens, dtype=torch.bool)
        real[1:, :prefix] = False
        seen: Tensor | None = None
        if valid is not None:
            seen = gather(F.pad(valid, (prefix, 0), value=True).to(torch.uint8), 1, self.sequence_group).bool()
            common = seen[0].cpu().unflatten(0, (self.parts, -1)) & real
            # Padding that every sample has can be left out, which needs no mask.
            if common.any() and (seen == seen[:1]).all():
                real, seen = common, None
        keep = None if real.all() else real.flatten().nonzero().squeeze(-1)
        if seen is not None and keep is not None:
            seen = seen[:, keep.to(seen.device)]
        number = self.layout.tensor * (prefix + tokens)
        return {
            size: context_keys(number, ring=ring, ulysses=ulysses, keep=keep, valid=seen, device=self.device)
            for size, (ring, ulysses) in self.ranks.items()
        }

    def whole(self, x: Tensor, *, groups: int = 1, tokens: int | None = None) -> Tensor:
        kind = x.dtype
        x = x.to(torch.uint8) if kind == torch.bool else x
        x = gather(x.unflatten(1, (groups, -1)), 2, self.sequence_group)[:, :, :tokens]  # B V N ...
        return x.flatten(1, 2).to(kind)

    def total(self, x: Tensor) -> Tensor:
        return total(x, self.sequence_group)


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, SelfAttention | CrossAttention)
