"""Gradients after the backward: what sharding has not added up yet, and how many ranks hold each shard.

Sharding adds gradients over the ranks that it shards and replicates over. What is left are parameters that several
ranks hold whole while each has seen only some of the tokens (norms of blocks, on tensor ranks) or only some of the
stages (parameters that all stages of a pipeline read). Their gradients are added up once a step, in one flat tensor.
"""

from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.parallel.mesh import Layout, Mesh, local


class Gradients:
    def __init__(self, model: nn.Module, mesh: Mesh, layout: Layout, shared: Collection[str] = ()):
        """`shared` names the parameters that every rank of a pipeline has."""
        self.model, self.layout = model, layout
        self.shared = [name in shared for name, _ in model.named_parameters()]
        self.groups: dict[str, Any] = {axis: mesh[axis].get_group() for axis in ("tensor", "pipeline")}

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Asked for after the model has been materialised, which may put others in their places."""
        return list(self.model.parameters())

    def add_up(self) -> None:
        """Complete the gradients of parameters that several ranks hold whole."""
        self._add("tensor", [p for p in self.parameters if not over_tensor(p)])
        self._add("pipeline", [p for p, shared in zip(self.parameters, self.shared, strict=True) if shared])

    def _add(self, axis: str, parameters: list[nn.Parameter]) -> None:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if dist.get_world_size(self.groups[axis]) == 1 or not gradients:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.groups[axis])
        pieces = flat.split([g.numel() for g in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])

    @torch.no_grad()  # DTensors then give their shards at once
    def local(self) -> list[Tensor]:
        """This rank's shards of the gradients that there are."""
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    def squares(self) -> Tensor:
        """This rank's contribution to the squared norm of the whole gradient, such that all ranks' add up to it."""
        copies = [
            self.layout.replicate
            * (1 if over_tensor(p) else self.layout.tensor)
            * (self.layout.pipeline if shared else 1)
            for p, shared in zip(self.parameters, self.shared, strict=True)
            if p.grad is not None
        ]
        gradients = self.local()
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        if len(set(copies)) == 1:
            return squares.sum() / copies[0]
        return (squares / torch.tensor(copies, dtype=torch.float64).to(squares.device, non_blocking=True)).sum()


def over_tensor(parameter: Tensor) -> bool:
    """Whether tensor ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return not {"tensor", "fsdp_tensor"}.isdisjoint(parameter.device_mesh.mesh_dim_names or ())
