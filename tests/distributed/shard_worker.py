"""Sharded steps of a small model beside the same steps on one rank: `shard_worker.py`, started by torchrun.

Every case prints nothing when it agrees; the first that does not ends the launch.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.cli.words import end
from vitrail.parallel import shard
from vitrail.parallel.mesh import Layout, Mesh, layout_of
from vitrail.recipe.sections import Parallel

WIDTH, MICRO_BATCHES = 8, 2


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Skip(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Branched(nn.Module):
    """A chain of equal blocks, then skips that run in another order than they are listed in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.chain = nn.ModuleList(Block() for _ in range(5))
        self.skips = nn.ModuleList(Skip(inner) for inner in (4, 6, 10))
        self.head = nn.Linear(WIDTH, 2)

    def blocks(self) -> list[nn.Module]:
        return [*self.chain, *self.skips]

    def forward(self, x: Tensor) -> Tensor:
        x, taps = self.embed(x), []
        for block in self.chain:
            x = block(x)
            taps.append(x)
        for place in (2, 0, 1):
            x = x + self.skips[place](taps[place])
        return self.head(x)


def same_model() -> Branched:
    torch.manual_seed(0)
    return Branched()


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(3, 3, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return output.square().sum()


def steps_alone(world: int, number: int) -> list[dict[str, Tensor]]:
    """Gradients of each step on one rank, with all ranks' data."""
    model, found = same_model(), []
    for step in range(number):
        for rank in range(world):
            for micro in range(MICRO_BATCHES):
                loss_of(model(data(step, micro, rank))).backward()
        found.append(update(model))
    return found


def update(model: nn.Module) -> dict[str, Tensor]:
    """One step of gradient descent on local shards; the whole gradients."""
    whole = {}
    for name, p in model.named_parameters():
        grad: Any = p.grad
        assert grad is not None, name
        whole[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        with torch.no_grad():
            local = (p.to_local(), grad.to_local()) if isinstance(p, DTensor) else (p, grad)
            local[0].sub_(local[1], alpha=1e-3)
        p.grad = None
    return whole


CASES: dict[str, dict[str, Any]] = {
    "full": {"strategy": "FULL_SHARD"},
    "grad-op": {"strategy": "SHARD_GRAD_OP"},
    "hybrid": {"strategy": "HYBRID_SHARD", "group": 2},
    "ddp": {"strategy": "DDP"},
    "bucket": {"strategy": "NO_SHARD", "bucket_mib": 1},
    "wrap": {"strategy": "FULL_SHARD", "wrap": 2},
    "wrap all": {"strategy": "HYBRID_SHARD", "group": 2, "wrap": 9, "prefetch": {"forward": 2, "backward": 3}},
    "no prefetch": {"strategy": "FULL_SHARD", "prefetch": {"forward": 0, "backward": 0}},
    "deep": {"strategy": "FULL_SHARD", "prefetch": {"forward": 2, "backward": 2}},
    "deeper than there are": {"strategy": "FULL_SHARD", "prefetch": {"forward": 9, "backward": 9}},
    "context": {"shard": 2, "context": 2},
    "tensor": {"replicate": 2, "tensor": 2, "wrap": 2},
    "wrapped and deep": {"strategy": "SHARD_GRAD_OP", "wrap": 2, "prefetch": {"forward": 1, "backward": 2}},
}


events: list[str] = []  # "gather NAME" and "reduce NAME" of groups of parameters, and "run NAME" of blocks


def watch() -> None:
    """Note every collective of FSDP2."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as inside

    def noted(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(parameters: Any, *arguments: Any, **options: Any) -> Any:
            events.append(f"{word} {parameters[0]._param_fqn.rpartition('.')[0]}")
            return function(parameters, *arguments, **options)

        return call

    inside.foreach_all_gather = noted("gather", inside.foreach_all_gather)
    inside.foreach_reduce = noted("reduce", inside.foreach_reduce)


@cache
def mesh_of(layout: Layout) -> Mesh:
    return Mesh.make(layout, "cpu")


def sharded(choice: dict[str, Any], **types: torch.dtype) -> tuple[Branched, Mesh, Layout]:
    c = Parallel(**choice)
    layout = layout_of(c, dist.get_world_size())
    mesh, model = mesh_of(layout), same_model()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: events.append(f"run {name}"))
    names = [name for name, _ in model.named_parameters()]
    types = {"compute": torch.float32, "reduce": torch.float32} | types
    shard.apply([(model, model.blocks())], mesh, layout, c, **types)
    assert [name for name, _ in model.named_parameters()] == names
    return model, mesh, layout


def check_case(name: str, choice: dict[str, Any], expected: list[dict[str, Tensor]]) -> None:
    model, mesh, layout = sharded(choice)
    rank = dist.get_rank()
    in_blocks = [p for block in model.blocks() for p in block.parameters()]
    for step, whole in enumerate(expected):
        events.clear()
        for micro in range(MICRO_BATCHES):
            shard.last_micro_batch([model], micro == MICRO_BATCHES - 1, reshard=layout.reshard)
            loss_of(model(data(step, micro, rank))).backward()
        gathers = [event for event in events if event.startswith("gather")]
        assert len(gathers) == GATHERS.get(name, len(gathers)), f"{name}: {len(gathers)} gathers, {gathers}"
        if layout.tensor > 1:  # the trainer's part
            for p in in_blocks:
                dist.all_reduce(p.grad.to_local(), group=mesh["tensor"].get_group())  # type: ignore[union-attr]
        found = update(model)
        for key, value in whole.items():
            text = f"{name}, step {step}, {key}: "
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, t=text: t + m)
        with torch.no_grad():  # an evaluation between steps leaves nothing behind
            model(data(step, 0, rank))
            shard.forget_gathered([model])


# Gathers in a step of two micro-batches: the root's group once each, others in forward and backward; without
# resharding all of them once a step.
GATHERS = {
    "full": (8 * 2 + 1) * 2,
    "grad-op": 9,
    "wrap": (6 * 2 + 1) * 2,
    "ddp": 0,
    "bucket": 0,
    "no prefetch": (8 * 2 + 1) * 2,
    "deep": (8 * 2 + 1) * 2,
}


def check_order() -> None:
    """When groups are gathered, at each depth of prefetching."""

    def order(**prefetch: int) -> dict[str, int]:
        model, *_ = sharded({"prefetch": prefetch})
        loss = loss_of(model(data(0, 0, 0)))  # the first pass only learns who is the root
        loss.backward()
        events.clear()
        loss_of(model(data(0, 0, 0))).backward()
        assert [e for e in events if e.startswith("run chain") and e.count(".") == 1] == [
            f"run chain.{i}" for i in range(5)
        ]
        place = {event: index for index, event in enumerate(events)}  # of a gather, the later one: the backward's
        first = {f"first {event}": events.index(event) for event in events}
        return place | first

    at = order(forward=0, backward=0)
    assert at["first run chain.0.fc"] < at["first gather chain.1.norm"]  # not before its turn
    assert at["reduce chain.3.norm"] < at["gather chain.2.norm"]
    at = order(forward=0, backward=1)
    assert at["gather chain.2.norm"] < at["reduce chain.3.norm"] < at["gather chain.1.norm"]
    at = order(forward=1, backward=2)
    assert at["first gather chain.1.norm"] < at["first run chain.0.norm"] < at["first gather chain.2.norm"]
    assert at["gather chain.1.norm"] < at["reduce chain.3.norm"] < at["gather chain.0.norm"]
    at = order(forward=2, backward=3)
    assert at["first gather chain.1.norm"] < at["first run embed"]  # by the root
    assert at["first gather chain.2.norm"] < at["first run chain.0.norm"] < at["first gather chain.3.norm"]
    assert at["gather chain.0.norm"] < at["reduce chain.3.norm"]


def check_forgetting() -> None:
    """What was gathered, or asked for, without being used is not there after a change of the weights."""
    model, *_ = sharded({})
    model.chain[4].set_modules_to_forward_prefetch([model.chain[0]])  # which has run, and will not run again
    with torch.no_grad():
        before = model(data(0, 0, 0))
        shard.forget_gathered([model])
        for p in model.parameters():
            p.to_local().mul_(0.5)
        after = model(data(0, 0, 0))
        alone = same_model()
        torch.testing.assert_close(before, alone(data(0, 0, 0)))
        for p in alone.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(after, alone(data(0, 0, 0)))


def check_types() -> None:
    model, *_ = sharded({}, compute=torch.bfloat16, reduce=torch.bfloat16)
    seen = []
    model.chain[0].fc.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    model.chain[0].register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
    loss_of(model(data(0, 0, 0).bfloat16())).backward()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]


def check_reduction() -> None:
    """Gradients 256, 1, 1 and 1: bf16 has no 259, nor any odd number beyond 256."""
    for reduce, exact in ((torch.float32, True), (torch.bfloat16, False)):
        model, c = nn.Sequential(nn.Linear(1, 1, bias=False)), Parallel()
        layout = layout_of(c, dist.get_world_size())
        types = {"compute": torch.bfloat16, "reduce": reduce}
        shard.apply([(model, list(model))], mesh_of(layout), layout, c, **types)
        x = torch.full((1, 1), 1.0 if dist.get_rank() else 256.0, dtype=torch.bfloat16)
        model(x).sum().backward()
        found = model[0].weight.grad.full_tensor().item()  # type: ignore[union-attr,operator]
        assert (found == 255 + dist.get_world_size()) == exact, (reduce, found)


def check_stages() -> None:
    """One model, of which two parts run one after another, as the stages of a pipeline do."""
    c = Parallel(strategy="HYBRID_SHARD", group=2, wrap=2, prefetch={"forward": 1, "backward": 2})
    layout = layout_of(c, dist.get_world_size())
    model, alone = same_model(), same_model()
    parts = [list(model.chain[:2]), [*model.chain[2:], *model.skips]]
    options = {"compute": torch.float32, "reduce": torch.float32}
    shard.apply([(model, blocks) for blocks in parts], mesh_of(layout), layout, c, **options)
    for micro in range(MICRO_BATCHES):
        shard.last_micro_batch([model], micro == MICRO_BATCHES - 1, reshard=layout.reshard)
        loss_of(model(data(0, micro, dist.get_rank()))).backward()
        for rank in range(dist.get_world_size()):
            loss_of(alone(data(0, micro, rank))).backward()
    expected = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad)  # type: ignore[union-attr]


if __name__ == "__main__":
    # Of flattened axes of a mesh, which PyTorch will want to be kept by hand.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")
    dist.init_process_group("gloo")
    watch()
    for name, choice in CASES.items():
        check_case(name, choice, steps_alone(dist.get_world_size(), 2))
    check_order()
    check_forgetting()
    check_types()
    check_reduction()
    check_stages()
    dist.destroy_process_group()
    end(0)
