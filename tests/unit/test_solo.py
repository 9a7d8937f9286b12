"""A model that one rank has to itself: what it computes with, and what reaches its masters."""

import copy
import json
from pathlib import Path

import pytest
import torch
from support import MODELS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vitrail
from vitrail.parallel.mesh import Layout
from vitrail.parallel.shard import COPIES, Solo, suits
from vitrail.recipe.sections import Parallel

ALONE = Layout(1, 1, reshard=True)


class Net(nn.Module):
    def __init__(self, recompute: bool = False):
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype)).relu()
        x = checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)
        return x * self.scale


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def make(recompute: bool = False) -> tuple[Net, Solo]:
    torch.manual_seed(0)
    net = Net(recompute)
    return net, Solo(net, [net.second, net.idle], torch.bfloat16)


@pytest.mark.parametrize("recompute", [False, True])
def test_same_as_a_model_in_the_compute_type(x: Tensor, recompute: bool) -> None:
    net, solo = make(recompute)
    plain = copy.deepcopy(net).bfloat16()
    plain(x).float().square().sum().backward()
    for _ in range(2):  # gradients add up, in fp32
        with solo.computing():
            output = net(x)
            assert output.dtype == torch.bfloat16
            output.float().square().sum().backward()
    for (name, master), (_, low) in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        assert master.dtype == torch.float32
        assert isinstance(master, nn.Parameter)
        if low.grad is None:
            assert master.grad is None
            assert name.startswith("idle")
        else:
            assert master.grad is not None
            assert master.grad.dtype == torch.float32
            assert torch.equal(master.grad, 2 * low.grad.float())


def test_frozen_parameters_ask_for_no_gradient(x: Tensor) -> None:
    net, solo = make()
    net.second.weight.requires_grad_(False)
    with solo.computing():
        assert not net.second.weight.requires_grad
        assert net.second.bias.requires_grad
        net(x).float().sum().backward()
    assert net.second.weight.grad is None
    assert net.second.bias.grad is not None


def test_without_gradients_copies_are_kept_until_they_are_forgotten(x: Tensor) -> None:
    net, solo = make()
    with torch.no_grad():
        with solo.computing():
            first, copied = net(x), net.first.weight
        net.first.weight.mul_(2)
        with solo.computing():
            assert net.first.weight is copied
            assert torch.equal(net(x), first)
        solo.forget()
        with solo.computing():
            assert not torch.equal(net(x), first)


def test_masters_come_back_after_an_error() -> None:
    net, solo = make()
    before = dict(net.named_parameters())
    with pytest.raises(RuntimeError, match="shapes"), solo.computing():
        net(torch.ones(2, 5))
    assert all(p is before[name] for name, p in net.named_parameters())


def test_in_fp32_there_are_no_copies(x: Tensor) -> None:
    net, _ = make()
    solo = Solo(net, [net.second], torch.float32)
    before = net.first.weight
    with solo.computing():
        assert net.first.weight is before
        net(x).sum().backward()
    assert before.grad is not None


def test_who_does_without_fsdp() -> None:
    def asked(layout: Layout = ALONE, parameters: int = 1000, memory: float | None = 1e9, **c: object) -> bool:
        return suits(parameters, layout, Parallel(**c), compute=torch.bfloat16, memory=memory)  # type: ignore[arg-type]

    assert asked()
    assert asked(memory=None)
    assert not asked(offload=True)
    assert not asked(Layout(1, 2, reshard=True))
    assert not asked(Layout(1, 1, reshard=True, pipeline=2))
    limit = int(COPIES * 1e9 / 2)
    assert asked(parameters=limit)
    assert not asked(parameters=limit + 1)
    assert suits(limit + 1, ALONE, Parallel(), compute=torch.float32, memory=1e9)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "train"]


@pytest.mark.parametrize("compute", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_training_with_fsdp_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: str) -> None:
    """The same numbers on one rank, and the same checkpoints: each goes on with what the other has saved."""
    model, objective = MODELS["mae, cross"]
    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 3, "classes": 4, "items": 64}
    tree = {
        "run": {"name": "alone", "steps": 6},
        "model": model,
        "objective": {"kind": objective},
        "data": {"train": [source], "crop": 16, "batch": 8, "micro_batch": 4},
        "precision": {"compute": compute},
        "parallel": {"recompute": {"every": 2}},
        "ema": {"decay": 0.9},
        "log": {"every": 1, "tensorboard": False, "pictures": 6},
        "checkpoint": {"every": 3, "keep": 2},
        "schedule": {"kind": "constant", "warmup": 1},  # the same, however many steps there are
    }

    def train(name: str, *, steps: int, fsdp: bool) -> list[tuple[int, float, float]]:
        monkeypatch.setattr("vitrail.parallel.shard.suits", lambda *a, **k: not fsdp)
        vitrail.train(tree, overrides=[f"run.dir={tmp_path / name}", f"run.steps={steps}"])
        return losses(tmp_path / name)

    with_it, without = train("with", steps=6, fsdp=True), train("without", steps=6, fsdp=False)
    assert with_it == without
    for name, first in (("from fsdp", True), ("to fsdp", False)):
        train(name, steps=3, fsdp=first)
        found = train(name, steps=6, fsdp=not first)
        assert found[-1][0] == 6
        assert found[-3:] == without[-3:]
