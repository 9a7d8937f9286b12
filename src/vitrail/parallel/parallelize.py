"""How a plain model becomes a parallel one. Models know nothing of this."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from vitrail.models.model import Model
from vitrail.parallel import chunk, float8, recompute, replay, shard, solo, tensor
from vitrail.parallel.flow import Flow
from vitrail.parallel.mesh import Layout, Mesh
from vitrail.parallel.parted import PartedSequence
from vitrail.parallel.pipeline import Pipeline
from vitrail.parallel.replay import WARM_FORWARD, Replay
from vitrail.recipe.sections import Parallel


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
    if solo.suits(parameters, layout, c, compute=compute, memory=memory):
        make = partial(Replay, model, device, always=c.replay is True)
        replays = (make(), make(warm=WARM_FORWARD, anew=True)) if replay.suits(c.replay, device) else None
        if c.replay is True and replays is None:
            notes.append("parallel.replay: a CPU has no CUDA graphs, so nothing is replayed")
        return flow(solo=solo.Solo(model, blocks, compute), replays=replays)
    if c.replay is True:
        notes.append("parallel.replay: passes are replayed where FSDP2 is left out, and here it is needed")
    roots = [(model, blocks)] if pipeline is None else pipeline.roots()
    shard.apply(roots, mesh, layout, c, compute=compute, reduce=reduce)
    return flow()


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
