"""How micro-batches go through a parallel model: forward and backward, whatever the layout."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitrail.layers.flops import Again
from vitrail.layers.parts import WHOLE, Part
from vitrail.models.model import Model
from vitrail.parallel import shard
from vitrail.parallel.collectives import gather
from vitrail.parallel.exchange import Exchange
from vitrail.parallel.gradients import Gradients
from vitrail.parallel.mesh import Layout, Mesh
from vitrail.parallel.parted import PartedSequence
from vitrail.parallel.pipeline import LossLike, Pipeline
from vitrail.parallel.replay import Replay
from vitrail.parallel.solo import Solo


class Flow:
    """A model that has been parallelised, and the ranks that it shares its work with."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        layout: Layout,
        sequence: PartedSequence | None,
        pipeline: Pipeline | None,
        *,
        solo: Solo | None = None,
        replays: tuple[Replay, Replay] | None = None,
        again: Again,
        notes: Sequence[str] = (),
    ):
        self.model, self.mesh, self.layout, self.sequence, self.pipeline = model, mesh, layout, sequence, pipeline
        self.solo = solo  # of a model that one rank has to itself, which may replay passes with and without gradients
        self.replay: Replay | None = replays[0] if replays else None
        self.replay_forward: Replay | None = replays[1] if replays else None
        self.again, self.notes = again, list(notes)  # what is recomputed, and what was decided on the way
        self.roots: list[nn.Module] = [model]
        self.part: Part = WHOLE if sequence is None else sequence.part  # of the tokens of each sample
        self.exchange = None if sequence is None else Exchange(sequence.sequence_group)
        self.data_rank = mesh.data_rank
        self.gradients = Gradients(model, mesh, layout, () if pipeline is None else pipeline.shared)

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Tensor:
        """The output for this rank's part, without a backward."""
        if self.pipeline is not None:
            return self.pipeline(**inputs)
        if self.replay_forward is None:
            return self._forward(inputs)
        return self.replay_forward(lambda inputs, _: self._forward(inputs), inputs, None)

    def _forward(self, inputs: dict[str, Any]) -> Tensor:
        with nullcontext() if self.solo is None else self.solo.computing():
            return self.model(**inputs)

    def forward_backward(
        self, prepared: Iterable[tuple[dict[str, Any], Any]], number: int, loss: Callable[[Tensor, Any], LossLike]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the summed loss of so many micro-batches; returns this rank's sum and count."""
        if self.pipeline is not None:
            return self.pipeline.forward_backward(list(prepared), loss)
        if self.solo is not None and self.solo.keeps:
            self.forget_gathered()  # of a validation that has ended early
        if self.replay is not None and self.model.watching is not None:
            self.replay.make_way()
        totals = None
        for place, (inputs, targets) in enumerate(prepared):
            if self.solo is None:
                shard.last_micro_batch(self.roots, place == number - 1, reshard=self.layout.reshard)
            if self.replay is None or self.model.watching is not None:
                both = self._pass(inputs, targets, loss)
            else:
                both = self.replay(partial(self._pass, loss=loss), inputs, targets)
            totals = both if totals is None else totals + both
        assert totals is not None
        return totals[0], totals[1]

    def _pass(self, inputs: dict[str, Any], targets: Any, loss: Callable[[Tensor, Any], LossLike]) -> Tensor:
        """Forward and backward of one micro-batch: the sum and the count of its loss."""
        with nullcontext() if self.solo is None else self.solo.computing():
            found = loss(self.model(**inputs), targets)
            found.sum.backward()  # inside, since what is recomputed asks for parameters again
        return torch.stack([found.sum.detach().double(), found.count.double()])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model does what it does when it is not trained, and afterwards knows of no weights but its own."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            self.forget_gathered()

    @property
    def leads_stage(self) -> bool:
        """Whether this is the first of the ranks that have the same stages of a pipeline."""
        return all(self.mesh.rank(axis) == 0 for axis in ("replicate", "shard", "context", "tensor"))

    def merge(self, facts: dict[str, float]) -> dict[str, float]:
        """What the ranks of a pipeline know of their stages, together, in the order of the stages."""
        if self.pipeline is None:
            return facts
        names = [stage.name for stage in self.model.stages()]
        table = torch.tensor([facts.get(name, 0.0) for name in names], dtype=torch.float64)
        table = table.to(self.mesh.root.device_type)
        dist.all_reduce(table, group=self.mesh["pipeline"].get_group())
        return dict(zip(names, table.tolist(), strict=True))

    def outputs(self, output: Tensor) -> list[Tensor]:
        """The outputs of all parts."""
        if self.sequence is None:
            return [output]
        return list(gather(output.unsqueeze(0), 0, self.sequence.sequence_group).unbind(0))

    def forget_gathered(self) -> None:
        """Free gathered parameters that are left behind: they would hide a change of shards."""
        if self.solo is None:
            shard.forget_gathered(self.roots)
        else:
            self.solo.forget()
            if self.replay_forward is not None:
                self.replay_forward.forget()  # it reads copies of parameters
