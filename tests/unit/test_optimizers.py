"""Updates of optimizers beside their formulas and PyTorch's own, and an optimizer of a user's own."""

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, events, tiny_recipe

import vitrail
from vitrail.cost.memory import Moments
from vitrail.models import ViTConfig
from vitrail.models.model import Model
from vitrail.recipe import kinds
from vitrail.training.optimizers.adam import AdamConfig, AdamWConfig
from vitrail.training.optimizers.lion import LionConfig
from vitrail.training.optimizers.muon import ITERATIONS, MOST, MuonConfig, orthogonal, together
from vitrail.training.optimizers.optimizer import GroupRule, Optimizer, make_groups, step
from vitrail.training.optimizers.sgd import SGDConfig

RATE = 1e-2


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    config = ViTConfig(ndim=2, channels=1, shape=8, patch=4, width=8, depth=2, heads=2, classes=3, positions="learned")
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def train(model: Model, settings: Any, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Steps by random gradients; returns these."""
    optimizer, seen = Optimizer(make_groups(model, settings)), []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        seen.append({name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()})
        for name, parameter in model.named_parameters():
            parameter.grad = seen[-1][name].clone()
        step(optimizer, RATE, torch.zeros(()))
    return seen


def replay(before: dict[str, torch.Tensor], seen: list[dict[str, torch.Tensor]], make: Any) -> dict[str, torch.Tensor]:
    """The same gradients by an optimizer of PyTorch."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    plain = make(list(parameters.values()))
    for gradients in seen:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        plain.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def copied(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_that_of_pytorch(model: Model, decay: float) -> None:
    before = copied(model)
    everything = GroupRule(match="", weight_decay=decay)
    settings = AdamConfig(groups=(everything,), betas=(0.8, 0.99), eps=1e-3)
    seen = train(model, settings)
    expected = replay(
        before, seen, lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.8, 0.99), eps=1e-3, weight_decay=decay)
    )
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_lion_by_its_formula(model: Model) -> None:
    before = copied(model)
    seen = train(model, LionConfig(weight_decay=0.3, groups=(GroupRule(match="", weight_decay=0.3),)))
    for name, parameter in model.named_parameters():
        value, average = before[name].double(), torch.zeros(parameter.shape, dtype=torch.float64)
        for gradients in seen:
            gradient = gradients[name].double()
            direction = (0.9 * average + 0.1 * gradient).sign()
            value = value * (1 - RATE * 0.3) - RATE * direction
            average = 0.99 * average + 0.01 * gradient
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- Muon


def test_muon_takes_the_matrices_of_blocks_and_adamw_all_others(model: Model) -> None:
    groups = make_groups(model, MuonConfig())
    by_update = {type(group.update).__name__: set[str]() for group in groups}
    for group in groups:
        by_update[type(group.update).__name__] |= set(group.names)
    inside = {name for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2}
    assert by_update["Muon"] == inside != set()
    assert by_update["Adam"] == {name for name, _ in model.named_parameters()} - inside
    assert {"head.weight", "encoder.pos_embed.table"} <= by_update["Adam"]
    assert {group.name for group in groups} == {"all, decay, Muon", "all, decay, Adam", "all, no decay, Adam"}


def test_muon_is_that_of_pytorch(model: Model) -> None:
    """PyTorch's iterates in bf16."""
    before = copied(model)
    seen = train(model, MuonConfig(weight_decay=0.1))
    inside = [name for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2]
    options = {"lr": RATE, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    small = [{name: gradients[name] for name in inside} for gradients in seen]
    expected = replay({n: before[n] for n in inside}, small, lambda p: torch.optim.Muon(p, **options))
    after = copied(model)
    for name in inside:
        moved, wanted = after[name] - before[name], expected[name] - before[name]
        assert float((moved - wanted).norm() / wanted.norm()) < 0.03, name


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 20)])
def test_orthogonal_matrices(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices)
    assert found.shape == matrices.shape
    assert ITERATIONS == 5
    for matrix, one in zip(matrices, found, strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        values = torch.diagonal(left.mT @ one @ right.mT)
        assert 0.65 < values.min() <= values.max() < 1.25
        torch.testing.assert_close(left @ torch.diag(values) @ right, one, rtol=1e-3, atol=1e-4)
    assert torch.equal(orthogonal(torch.zeros(1, *shape)), torch.zeros(1, *shape))


def test_an_update_of_muon_is_as_large_as_one_of_adamw(model: Model) -> None:
    before = copied(model)
    train(model, MuonConfig(weight_decay=0.0), steps=1)
    after = copied(model)
    sizes = [
        float((after[name] - before[name]).square().mean().sqrt()) / RATE
        for name in before
        if ".blocks." in name and before[name].ndim == 2
    ]
    assert all(0.1 < size < 0.3 for size in sizes), sizes


def test_equal_matrices_are_gathered_together() -> None:
    sources = [torch.empty(4, 4), torch.empty(4, 4), torch.empty(2, 4), torch.empty(4, 4)]
    assert list(together(sources)) == [[0, 1], [2], [3]]
    large = torch.empty(MOST // 2, 1, device="meta")
    assert list(together([large] * 5)) == [[0, 1], [2, 3], [4]]


# ---------------------------------------------------------------- what the planner and checkpoints read


@pytest.mark.parametrize(
    ("settings", "moments"),
    [
        (AdamWConfig(), (2, 2)),
        (AdamConfig(), (2, 2)),
        (SGDConfig(), (1, 1)),
        (SGDConfig(momentum=0.0), (0, 0)),
        (LionConfig(), (1, 1)),
        (MuonConfig(), (1, 2)),
    ],
)
def test_what_is_kept_is_what_is_planned(model: Model, settings: Any, moments: tuple[int, int]) -> None:
    assert tuple(Moments.of(settings)) == moments
    optimizer = Optimizer(make_groups(model, settings))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    step(optimizer, RATE)
    for group in optimizer.param_groups:
        for shard in group.params:
            state = {name: value for name, value in optimizer.state[shard].items() if name != "step"}
            assert set(state) == set(group.update.moments)
            assert all(value.shape == shard.shape for value in state.values())


# ---------------------------------------------------------------- one's own


def test_the_optimizer_of_the_docs_page_trains(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/plugins.md").read_text()
    section = page.partition("## Your own optimizer")[2]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    (tmp_path / "own_optimizer.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = dict(kinds._registered["optimizer"])
    try:
        tree = tiny_recipe(volume, tmp_path / "run", run__steps=6, optimizer={"kind": "signs", "lr": 0.001})
        importlib.import_module("own_optimizer")  # as --plugin does
        vitrail.train(tree, quiet=True)
    finally:
        kinds._registered["optimizer"] = kept
        sys.modules.pop("own_optimizer", None)
    losses = [event["loss"] for event in events(tmp_path / "run", "train")]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
