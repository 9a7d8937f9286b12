"""Moving average of the weights: a second set of shards, updated in place, saved and restored like the first.

The weights of a step stay as they are until the next update, so that the average can wait until there is time for it:
`owe` says that it is behind, `settle` (or whoever asks for it) brings it up to date.
"""

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
        self._average: dict[str, Tensor] = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._owed: int | None = None  # optimizer steps, of which it knows all but the last

    @property
    def average(self) -> dict[str, Tensor]:
        self.settle()
        return self._average

    def owe(self, steps: int) -> None:
        """The weights are those after so many optimizer steps, and stay so until settle()."""
        self.settle()
        self._owed = steps

    @torch.no_grad()
    def settle(self) -> None:
        """Take the weights in; a young average forgets faster, so the start fades."""
        if self._owed is None:
            return
        decay = min(self.decay, (1 + self._owed) / (10 + self._owed))
        self._owed = None
        average = [local(t) for t in self._average.values()]
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
        average = self.average
        for name, parameter in self.model.named_parameters():
            mine, averaged = local(parameter.detach()), local(average[name])
            kept = mine.clone()
            mine.copy_(averaged)
            averaged.copy_(kept)
        self.flow.forget_gathered()
