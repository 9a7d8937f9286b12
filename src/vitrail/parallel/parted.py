"""A sequence whose parts lie on the ranks of the context and tensor axes.

- part r of R is that of context rank r // tensor and tensor rank r % tensor; all parts are equally long
- attention computes with the tokens of a context rank (the parts of its tensor group) and sees the keys of all
- tokens before the patches (class token, registers) are on every part, equal; as keys only the first part's count
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.attention import CrossAttention, SelfAttention
from vitrail.layers.parts import Part
from vitrail.layers.sequence import TokenSequence
from vitrail.parallel.collectives import gather, total
from vitrail.parallel.context import ContextKeys, Ranks, attend_context, choose_ulysses, context_keys, split_context
from vitrail.parallel.mesh import Layout, Mesh

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
        for block in blocks:
            for module in block.modules():
                if _is_attention(module):
                    module.attend = self.attention(self.trading(module))

    def trading(self, attention: Any) -> int:
        """How many context ranks trade heads in an attention."""
        heads = attention.proj.in_features // attention.head_width // self.layout.tensor
        kv_heads = heads // getattr(attention, "per_group", 1)
        return choose_ulysses(heads, kv_heads, self.layout.context, self.wanted)

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
