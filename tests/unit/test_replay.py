"""Passes that are recorded and replayed; here what is recorded is a function that is called again."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.parallel import replay
from vitrail.parallel.replay import MOST, WARM, Replay, Unrecordable, put_together, take_apart

CPU = torch.device("cpu")


class Recorded:
    """Writes results where a CUDA graph would: into the tensors of the recording."""

    def __init__(self, model: nn.Module, work: Callable[[], Tensor]):
        self.model, self.work, self.replays = model, work, 0
        self.result = work()
        self.gradients = {p: p.grad for p in model.parameters()}

    def replay(self) -> None:
        self.replays += 1
        kept = {p: p.grad for p in self.model.parameters()}
        for p in kept:
            p.grad = None
        self.result.copy_(self.work())
        for p, gradient in self.gradients.items():
            if gradient is not None:
                gradient.copy_(p.grad)  # type: ignore[arg-type]
            p.grad = kept[p]


class Fake(Replay):
    def __init__(self, model: nn.Module, **options: Any):
        super().__init__(model, CPU, always=True, **options)
        self.graphs: list[Recorded] = []

    def _captured(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        self.graphs.append(Recorded(self.model, work))
        return self.graphs[-1], self.graphs[-1].result


@dataclass(frozen=True)
class Targets:
    values: Tensor
    weight: float

    @cached_property
    def double(self) -> Tensor:
        return 2 * self.values


class Pair(NamedTuple):
    one: Tensor
    other: Tensor | None


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def passes(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    def run(inputs: Any, targets: Targets) -> Tensor:
        loss = targets.weight * (model(inputs["x"]) - 2 * targets.values).square().sum()
        loss.backward()
        return loss.detach()

    return run


def given(seed: int, rows: int = 4, weight: float = 1.0) -> tuple[dict[str, Tensor], Targets]:
    draw = torch.Generator().manual_seed(seed)
    targets = Targets(torch.randn(rows, 2, generator=draw), weight)
    return {"x": torch.randn(rows, 3, generator=draw)}, targets


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_replays_give_what_usual_passes_give(model: nn.Module, micro_batches: int) -> None:
    run, fake = passes(model), Fake(model)
    for step in range(6):
        expected, found = [], []
        for way, into in ((run, expected), (lambda *a: fake(run, *a), found)):
            model.zero_grad(set_to_none=True)
            into += [way(*given(10 * step + number)) for number in range(micro_batches)]
            into += gradients(model)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0 if micro_batches == 1 else 1e-5)
    assert len(fake.graphs) == 1
    assert fake.graphs[0].replays == 6 * micro_batches - WARM


def test_each_set_of_shapes_has_a_recording_of_its_own(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model)
    for number in range(20):
        kind = number % 4
        case = given(number, rows=4 + kind % 3, weight=2.0 if kind == 3 else 1.0)
        expected = run(*case)
        assert torch.equal(fake(run, *case), expected)
    assert len(fake.graphs) == MOST == len(fake.records)


def test_a_result_is_not_overwritten_by_the_next_one(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model, warm=0)
    first = fake(run, *given(1))
    kept = first.clone()
    fake(run, *given(2))
    assert torch.equal(first, kept)


def test_forget_records_anew(model: nn.Module) -> None:
    fake = Fake(model, warm=1)
    with torch.no_grad():
        for _ in range(3):
            fake(lambda inputs, _: model(inputs["x"]), {"x": torch.ones(1, 3)}, None)
        assert len(fake.graphs) == 1
        fake.forget()
        for _ in range(3):
            fake(lambda inputs, _: model(inputs["x"]), {"x": torch.ones(1, 3)}, None)
    assert len(fake.graphs) == 2


def test_what_cannot_be_recorded_runs_as_usual_and_says_why(model: nn.Module) -> None:
    class Failing(Fake):
        def _captured(self, work: Callable[[], Tensor]) -> tuple[Any, Tensor]:
            work()
            raise RuntimeError("operation not permitted when stream is capturing")

    run, failing = passes(model), Failing(model, warm=0)
    run(*given(0))
    before = gradients(model)
    expected = run(*given(1))
    both = gradients(model)
    for p, gradient in zip(model.parameters(), before, strict=True):
        p.grad = gradient
    with pytest.warns(UserWarning, match="replay: .*not permitted when stream is capturing.*trains without"):
        assert torch.equal(failing(run, *given(1)), expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), both, strict=True))
    failing(run, *given(2))  # without another word
    hidden = Fake(model)
    with pytest.warns(UserWarning, match="its inputs hold a set"):
        hidden(lambda inputs, _: model(inputs["x"]).sum(), {"x": torch.ones(1, 3), "more": {1, 2}}, None)


def test_auto_records_only_where_there_is_room(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(model, warm=0)
    fake.always = False
    monkeypatch.setattr(Fake, "has_room", lambda self: False)
    fake(passes(model), *given(0))
    assert fake.off
    assert not fake.graphs


def test_trees_come_apart_and_together() -> None:
    tree = {"a": Pair(torch.ones(2), None), "b": [1, "two", torch.zeros(3, dtype=torch.int64)], "c": given(0)[1]}
    assert tree["c"].double.shape == (4, 2)  # kept in the instance, where another one must not find it
    leaves: list[Tensor] = []
    shapes = take_apart(tree, leaves, "cpu")
    assert [leaf.shape for leaf in leaves] == [(2,), (3,), (4, 2)]
    assert shapes == take_apart(tree | {"a": Pair(torch.zeros(2), None)}, [], "cpu")
    hash(shapes)
    for other in ({"a": Pair(torch.ones(3), None)}, {"b": [2, "two", torch.zeros(3, dtype=torch.int64)]}):
        assert shapes != take_apart(tree | other, [], "cpu")
    new = put_together(tree, iter([leaf + 1 for leaf in leaves]))
    assert isinstance(new["a"], Pair)
    assert new["a"].one.tolist() == [2, 2]
    assert new["a"].other is None
    assert new["b"][:2] == [1, "two"]
    assert torch.equal(new["c"].double, 2 * (tree["c"].values + 1))
    with pytest.raises(Unrecordable, match="on the cpu"):
        take_apart(torch.ones(1), [], "cuda")


def test_when_passes_are_recorded() -> None:
    gpu = torch.device("cuda", 0)
    assert replay.suits("auto", gpu) == (torch.version.hip is None)
    assert replay.suits(True, gpu)
    assert not replay.suits(False, gpu)
    assert not replay.suits("auto", CPU)
    with pytest.raises(UserError, match=r"parallel.replay: a CPU has no CUDA graphs; set parallel.replay=auto"):
        replay.suits(True, CPU)
