"""A pass over micro-batches, validation between trainings, and gradients of collectives, without ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import MAEConfig
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.parallel import mesh as collectives
from vitrail.parallel import private
from vitrail.parallel.flow import Flow


def test_sum_and_count_are_those_of_all_micro_batches() -> None:
    parts = {"a": [3.0, 2.0], "b": [5.0, 4.0], "c": [7.0, 1.0]}
    flow: Any = SimpleNamespace(pipeline=None, solo=None, replay=None, roots=[], layout=SimpleNamespace(reshard=True))
    flow.model = SimpleNamespace(watching=None)
    flow._pass = lambda inputs, targets, loss: torch.tensor(parts[targets])
    found = Flow.forward_backward(flow, [({}, name) for name in parts], 3, lambda output, targets: output)
    assert [float(x) for x in found] == [15.0, 7.0]


def test_a_validation_leaves_the_model_as_it_is_trained() -> None:
    model, forgotten = torch.nn.Dropout(0.5), []
    flow: Any = SimpleNamespace(model=model, solo=None, roots=[], forget_gathered=lambda: forgotten.append(True))
    with Flow.evaluating(flow):
        assert not model.training
    assert model.training
    with pytest.raises(KeyError), Flow.evaluating(flow):
        raise KeyError
    assert model.training
    assert len(forgotten) == 2


def test_gradients_of_collectives_are_those_of_the_summed_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold the same: what one gets is what both give."""
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(private, "_all_gather", lambda x, dim, group: torch.cat([x, x], dim))
    monkeypatch.setattr(private, "_reduce_scatter", lambda x, how, dim, group: 2 * x.chunk(2, dim)[0])
    monkeypatch.setattr(private.functional, "all_reduce", lambda x, how, group: 2 * x)
    x, weights = torch.randn(3, 4, requires_grad=True), torch.randn(3, 8)
    whole = collectives.gather(x, -1, None)
    assert torch.equal(whole, torch.cat([x, x], -1))
    (whole * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weights[:, :4])
    x, weights = torch.randn(3, 4, requires_grad=True), torch.randn(3, 2)
    part = collectives.scatter_sum(x, 1, None)
    assert torch.equal(part, 2 * x[:, :2])
    (part * weights).sum().backward()
    torch.testing.assert_close(x.grad, torch.cat([weights, weights], 1))
    x, weights = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    summed = collectives.total(x, None)
    assert torch.equal(summed, 2 * x)
    (summed * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * weights)


def test_errors_of_one_variable_are_told_in_its_units() -> None:
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4)
    model = MAEConfig(ndim=2, encoder=encoder, channels=1, shape=16)
    objective = ReconstructConfig().build(model, Statistics((50.0,), (3.0,)))
    batch = Batch([0, 1], 50 + 3 * torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    _, targets = objective.prepare(batch, Draws(0, batch.counters), evaluating=True)
    sums = objective.measure(targets.values + 2, targets)
    found = objective.summarise({name: float(value) for name, value in sums.items()})
    assert found["loss"] == pytest.approx(4, rel=1e-5)
    assert found["mse"] == pytest.approx(4 * 9, rel=1e-5)
