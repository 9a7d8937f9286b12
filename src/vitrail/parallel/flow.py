"""Parallel models: how they are made of plain ones, and how micro-batches go through. Models know nothing of this.

Gradients after the backward: what sharding has not added up yet, and how many ranks hold each shard.

Sharding adds gradients over the ranks that it shards and replicates over. What is left are parameters that several
ranks hold whole while each has seen only some of the tokens (norms of blocks, on tensor ranks) or only some of the
stages (parameters that all stages of a pipeline read). Their gradients are added up once a step, in one flat tensor.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.layers.flops import Again
from vitrail.models.model import Model
from vitrail.parallel import chunk, float8, recompute, replay, shard, tensor
from vitrail.parallel.mesh import Layout, Mesh, local
from vitrail.parallel.pipeline import LossLike, Pipeline
from vitrail.parallel.private import copy_all, norms_of
from vitrail.parallel.replay import WARM_FORWARD, Replay
from vitrail.parallel.shard import Solo
from vitrail.parallel.split import Split
from vitrail.parallel.tensor import PartedSequence
from vitrail.recipe.sections import Parallel


class Gradients:
    def __init__(self, model: nn.Module, mesh: Mesh, layout: Layout, shared: Collection[str] = ()):
        """`shared` names the parameters that every rank of a pipeline has."""
        self.model, self.layout = model, layout
        self.shared = [name in shared for name, _ in model.named_parameters()]
        self.groups: dict[str, dist.ProcessGroup] = {axis: mesh[axis].get_group() for axis in ("tensor", "pipeline")}

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
        copy_all(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])

    @torch.no_grad()  # DTensors then give their shards at once
    def local(self) -> list[Tensor]:
        """Return this rank's shards of the gradients that there are."""
        return [local(p.grad) for p in self.parameters if p.grad is not None]

    def squares(self) -> Tensor:
        """Return this rank's share of the squared norm of the whole gradient: those of all ranks add up to it."""
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
        squares = torch.stack(norms_of(gradients)).double().square()
        if len(set(copies)) == 1:
            return squares.sum() / copies[0]
        return (squares / torch.tensor(copies, dtype=torch.float64).to(squares.device, non_blocking=True)).sum()


def over_tensor(parameter: Tensor) -> bool:
    """Say whether tensor ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return not {"tensor", "fsdp_tensor"}.isdisjoint(parameter.device_mesh.mesh_dim_names or ())


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
        self.split = Split()  # of the tokens of each sample
        if sequence is not None:
            self.split = Split(model.config, sequence.part, sequence.sequence_group)
        self.data_rank = mesh.data_rank
        self.gradients = Gradients(model, mesh, layout, () if pipeline is None else pipeline.shared)

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Tensor:
        """Return the output for this rank's part, without a backward."""
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
        """Add the gradients of the summed loss of `number` micro-batches; return this rank's sum and count."""
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
        """Run forward and backward of one micro-batch; return the sum and the count of its loss."""
        with nullcontext() if self.solo is None else self.solo.computing():
            found = loss(self.model(**inputs), targets)
            found.sum.backward()  # inside, since what is recomputed asks for parameters again
        return torch.stack([found.sum.detach().double(), found.count.double()])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in its evaluating mode inside; afterwards it knows of no weights but its own."""
        self.model.eval()
        try:
            yield
        except Exception:
            for root in self.roots if self.solo is None else ():
                shard.forget_failed(root)
            raise
        finally:
            self.model.train()
            self.forget_gathered()

    @property
    def leads_stage(self) -> bool:
        """Say whether this is the first of the ranks that have the same stages of a pipeline."""
        return all(self.mesh.rank(axis) == 0 for axis in ("replicate", "shard", "context", "tensor"))

    def merge(self, facts: dict[str, float]) -> dict[str, float]:
        """Put together what the ranks of a pipeline know of their stages, in the order of the stages."""
        if self.pipeline is None:
            return facts
        names = [stage.name for stage in self.model.stages()]
        table = torch.tensor([facts.get(name, 0.0) for name in names], dtype=torch.float64)
        table = table.to(self.mesh.root.device_type)
        dist.all_reduce(table, group=self.mesh["pipeline"].get_group())
        return dict(zip(names, table.tolist(), strict=True))

    def forget_gathered(self) -> None:
        """Free gathered parameters that are left behind: they would hide a change of shards."""
        if self.solo is None:
            shard.forget_gathered(self.roots)
        else:
            self.solo.forget()
            if self.replay_forward is not None:
                self.replay_forward.forget()  # it reads copies of parameters


def parallelize(
    model: Model,
    mesh: Mesh,
    layout: Layout,
    c: Parallel,
    *,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
    compiled: bool,
    float8_rows: Callable[[str], int] | None = None,
    float8_all: bool = False,
    counts: Sequence[int] = (),
) -> Flow:
    """Apply to a model on the meta device, in this order, because each step builds on the one before it:

    1. pipeline: what the stages of this rank do not use is left out; `counts` says where the model is cut
    2. tensor and context: layers of blocks are cut over tensor ranks, attention sees the keys of all context ranks
    3. chunk: MLPs and heads of voxels run over pieces of the sequence
    4. float8: products of linear layers of blocks, where the rows that a product has make them pay (`float8_rows`, by
       the layer's name), or of all of them (`float8_all`)
    5. recompute: a block's forward, or parts of it, are run again in the backward instead of keeping their results
    6. compile: block by block, so that one compilation serves all of them
    7. shard: groups of blocks, then what is left; fp32 masters, gathered in the compute type. One rank alone gathers
       nothing (solo), and may replay its passes

    Each step changes modules in place, never wraps them: parameters keep their names. What is recomputed is planned
    first, for all blocks of the model, so that ranks with some of them agree.
    """
    whole = model.blocks()
    plan = recompute.plan(whole, c.recompute, pieces=c.chunk.mlp is not None)
    entries = dict(zip(whole, plan.kept, strict=True))
    sequence = PartedSequence(mesh, layout, whole, c.ulysses) if layout.parts > 1 else None
    pipeline = Pipeline(model, c, mesh, list(counts), device) if layout.pipeline > 1 else None
    blocks = model.blocks()
    if sequence is not None:
        tensor.apply(blocks, mesh["tensor"])
        sequence.apply(model, blocks)
    chunk.apply(model, c.chunk)
    notes = []
    if float8_rows is not None:
        notes.append(str(float8.apply(model, device=device, rows=float8_rows, force=float8_all)))
    recompute.carry_out(blocks, [entries[block] for block in blocks])
    if c.recompute not in ("none", "full"):
        notes.append(f"parallel.recompute: {plan.text}")
    if compiled:
        for block in blocks:
            block.compile()
    flow = partial(Flow, model, mesh, layout, sequence, pipeline, again=plan.again, notes=notes)
    parameters, memory = sum(p.numel() for p in model.parameters()), memory_of(device)
    if shard.suits(parameters, layout, c, compute=compute, memory=memory):
        make = partial(Replay, model, device, always=c.replay is True)
        replays = (make(), make(warm=WARM_FORWARD, anew=True)) if replay.suits(c.replay, device) else None
        if c.replay is True and replays is None:
            notes.append("parallel.replay: a CPU has no CUDA graphs, so nothing is replayed")
        return flow(solo=Solo(model, blocks, compute), replays=replays)
    if c.replay is True:
        notes.append("parallel.replay: passes are replayed where FSDP2 is left out, and here it is needed")
    roots = [(model, blocks)] if pipeline is None else pipeline.roots()
    shard.apply(roots, mesh, layout, c, compute=compute, reduce=reduce)
    return flow()


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
