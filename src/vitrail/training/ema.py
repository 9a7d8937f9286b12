"""Moving average of the weights: a second set of shards, updated in place, saved and restored like the first."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vitrail.parallel.flow import Flow
from vitrail.parallel.mesh import local


class EMA:
    def __init__(self, flow: Flow, decay: float):
        self.decay = decay
        self.flow, self.model = flow, flow.model
        self.average: dict[str, Tensor] = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """After the given number of optimizer steps; a young average forgets faster, so the start fades."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        average = [local(t) for t in self.average.values()]
        torch._foreach_lerp_(average, [local(p.detach()) for p in self.model.parameters()], 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model computes with the averaged weights inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self.model.named_parameters():
            mine, averaged = local(parameter.detach()), local(self.average[name])
            kept = mine.clone()
            mine.copy_(averaged)
            averaged.copy_(kept)
        self.flow.forget_gathered()
