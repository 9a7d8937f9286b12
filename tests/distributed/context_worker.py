"""Attention over ranks against full attention: `context_worker.py RESULTS.json`, largest errors by case."""

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vitrail.cli.words import end
from vitrail.layers.attention import attend_reference
from vitrail.layers.backends import use_backend
from vitrail.parallel import context
from vitrail.parallel.context import Ranks, attend_context, context_keys, split_context

Attention = Callable[..., Tensor]
KEPT = torch.ops.vitrail.ring.default


def plain(function: Attention, *tensors: Tensor) -> Tensor:
    return function(*tensors)


def recomputed(function: Attention, *tensors: Tensor) -> Tensor:
    return checkpoint(lambda *t: function(*t).tanh(), *tensors, use_reentrant=False, preserve_rng_state=False)


def kept(function: Attention, *tensors: Tensor) -> Tensor:
    """Recomputed, but for what the ring gives."""

    def policy(_: object, operator: object, *arguments: object, **options: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator == KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(lambda *t: function(*t).tanh(), *tensors, use_reentrant=False, context_fn=contexts)


def compiled(function: Attention, *tensors: Tensor) -> Tensor:
    return torch.compile(lambda *t: function(*t).tanh(), backend="aot_eager", fullgraph=True)(*tensors)


MODES = {"plain": plain, "recomputed": recomputed, "kept": kept, "compiled": compiled}
CHANGED = ("recomputed", "kept", "compiled")  # these take the tanh of the output, which needs it in the backward


def draw(case: dict, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(case["queries"], case["heads"]), (case["keys"], case["groups"]), (case["keys"], case["groups"])]
    shapes = [(3, ranks * n, heads, 6) for n, heads in sizes]
    dtype = getattr(torch, case["dtype"])
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(case: dict, ring: Ranks, ulysses: Ranks) -> dict[str, float]:
    ranks, rank = ring.size * ulysses.size, ring.rank * ulysses.size + ulysses.rank
    whole = draw(case, ranks)
    exact = [t.double().requires_grad_() for t in whole]
    here = [t.chunk(ranks, dim=1)[rank].clone().requires_grad_() for t in whole]
    count, keep, valid = ranks * case["keys"], None, None
    if case["keep"] == "prefix":  # the first token of every rank is a copy, the last of all is padding
        keep = torch.tensor([i for i in range(count - 1) if i == 0 or i % case["keys"]])
    elif case["keep"] == "few":  # the last rank has none
        keep = torch.arange(count - case["keys"])
    elif case["keep"] == "mixed":
        keep = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: count // 2]
    seen = count if keep is None else len(keep)
    if case["valid"]:
        valid = torch.rand(3, seen, generator=torch.Generator().manual_seed(2)) > 0.5
        valid[1] = False
        valid[2] = torch.arange(seen) < 2
    keys = None
    if keep is not None or valid is not None:
        keys = context_keys(case["keys"], ring=ring, ulysses=ulysses, keep=keep, valid=valid)
    attention = partial(attend_context, ring=ring, ulysses=ulysses, keys=keys)

    calls = saved = 0
    around = context.ring_steps

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return around(*arguments)  # type: ignore[arg-type]

    def kept_for_the_backward(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    context.ring_steps = counted  # type: ignore[assignment]
    hooks = torch.autograd.graph.saved_tensors_hooks(kept_for_the_backward, lambda tensor: tensor)
    with use_backend(case["backend"]), hooks if case["mode"] == "plain" else contextlib.nullcontext():
        out = MODES[case["mode"]](attention, *here)
    with use_backend(case["backend"]):
        weight = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        mine = weight.chunk(ranks, dim=1)[rank].to(out.dtype)
        grads = torch.autograd.grad((out * mine).sum(), here)
    context.ring_steps = around
    k, v = (t if keep is None else t[:, keep] for t in exact[1:])
    expected = attend_reference(exact[0], k, v, mask=valid)
    expected = expected.tanh() if case["mode"] in CHANGED else expected
    right = [t.chunk(ranks, dim=1)[rank] for t in torch.autograd.grad((expected * weight).sum(), exact)]
    pairs = [(out, expected.chunk(ranks, dim=1)[rank]), *zip(grads, right, strict=True)]
    errors = [((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]
    blank = 0.0
    if case["valid"]:
        blank = max(t[1].abs().max().item() for t in (out, *grads))
    counts = {"blank": blank, "calls": float(calls), "saved": float(saved)}
    found = dict(zip(("out", "q", "k", "v"), errors, strict=True)) | counts
    worst = torch.tensor(list(found.values()), dtype=torch.float64).nan_to_num(nan=float("inf"))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return dict(zip(found, worst.tolist(), strict=True))


def main() -> None:
    dist.init_process_group("gloo")
    path = Path(sys.argv[1])
    torch._dynamo.config.recompile_limit = 64
    results, places = {}, {}
    for name, case in json.loads(path.read_text()).items():
        layout = case["ranks"], case["ulysses"]
        if layout not in places:
            sizes = (1, case["ranks"], dist.get_world_size() // case["ranks"])
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "context", "tensor"))
            places[layout] = split_context(mesh, case["ulysses"])
        results[name] = check(case, *places[layout])
    if dist.get_rank() == 0:
        path.with_suffix(".found.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end(0)
