"""Passes on a GPU: recorded and replayed they give what they give otherwise, for every kind of model."""

import gc
import warnings
from typing import Any

import pytest
import torch
from support import MODELS

from vitrail.bench.measure import measure
from vitrail.parallel.replay import Replay

pytestmark = pytest.mark.gpu
plain = Replay.__init__


def losses(tree: dict[str, Any], choice: Any) -> list[float]:
    """Of the last step after 3, 5 and 9."""
    found = []
    for steps in (3, 5, 9):
        changed = tree | {"parallel": {"replay": choice, "compile": False}}
        found.append(measure(changed, mode="syn", windows=1, steps=steps, warm_up=1)["loss"])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_replayed_passes_are_the_usual_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, objective = MODELS[name]
    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 3, "classes": 4, "items": 8}
    data = {"train": [source], "crop": 16, "batch": 8, "micro_batch": 4}
    data |= {"normalize": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    tree = {"run": {"name": "pass", "steps": 1}, "model": config, "objective": {"kind": objective}, "data": data}
    made: list[Replay] = []
    monkeypatch.setattr(Replay, "__init__", lambda self, *a, **k: (plain(self, *a, **k), made.append(self))[0])
    usual = losses(tree, False)
    assert not made
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="parallel.replay")
        assert losses(tree, True) == pytest.approx(usual, rel=1e-6)
    assert any(record.graph is not None for replay in made for record in replay.records.values())


def test_a_failed_recording_leaves_nothing_behind() -> None:
    device = torch.device("cuda", 0)
    model = torch.nn.Linear(3, 2, device=device)
    stream = torch.cuda.current_stream()

    def run(inputs: Any, _: Any) -> torch.Tensor:
        loss = model(inputs["x"]).square().sum()
        loss.backward()
        return loss.detach() * float(loss.item() > -1)  # waits for the device

    replay = Replay(model, device, always=True, warm=1)
    x = torch.ones(4, 3, device=device)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        found = [replay(run, {"x": x}, None).item() for _ in range(4)]
    assert len(set(found)) == 1
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device=device)  # the generator draws as before


def test_graphs_that_make_way_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    model = torch.nn.Linear(64, 64, device=device)

    def run(inputs: Any, _: Any) -> torch.Tensor:
        wide = model(inputs["x"]).repeat(1, 64).square()  # half a GiB
        loss = wide.sum()
        loss.backward()
        return loss.detach()

    def passed() -> torch.Tensor:
        found = replay(run, {"x": x}, None)
        model.zero_grad(set_to_none=True)
        return found

    def reserved() -> int:
        return torch.cuda.memory_reserved(device) - others

    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved(device)  # what earlier tests left
    replay, x = Replay(model, device, always=True, warm=1), torch.ones(2**15, 64, device=device)
    usual = [passed() for _ in range(3)][-1].item()
    held = reserved()
    monkeypatch.setattr(Replay, "held", lambda self: 0.6)
    replay.make_way()
    assert reserved() < held / 2
    assert [passed().item() for _ in range(4)] == [usual] * 4
    assert reserved() < 1.5 * held
    assert any(record.graph is not None for record in replay.records.values())
