"""Passes that are recorded and replayed; here what is recorded is a function that is called again."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import MODELS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.layers.trees import _top
from vitrail.parallel import replay
from vitrail.parallel.flow import Flow
from vitrail.parallel.replay import MANY, MOST, ROOM, WARM, Replay, Unrecordable, put_together, take_apart
from vitrail.training import setup
from vitrail.training.setup import Parts

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
        self.share, self.waits = 0.0, 0

    def held(self) -> float:
        return self.share

    def _wait(self) -> None:
        self.waits += 1

    def _give_back(self) -> None:
        self.share = min(self.share, 0.3)

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
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(fake.graphs) == 1
    assert fake.graphs[0].replays == 6 * micro_batches - WARM


def test_each_set_of_shapes_has_a_recording_of_its_own(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model)
    for number in range(20):
        kind = number % 4
        case = given(number, rows=4 + kind % 3, weight=2.0 if kind == 3 else 1.0)
        expected = run(*case)
        assert torch.equal(fake(run, *case), expected)
    assert len(fake.graphs) == MOST
    assert len(fake.records) == 4


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
    with pytest.warns(UserWarning, match="replay: .*not permitted when stream is capturing.*run as usual"):
        assert torch.equal(failing(run, *given(1)), expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), both, strict=True))
    failing(run, *given(2))  # without another word
    hidden = Fake(model)
    with pytest.warns(UserWarning, match="its inputs hold a set"):
        hidden(lambda inputs, _: model(inputs["x"]).sum(), {"x": torch.ones(1, 3), "more": {1, 2}}, None)


def test_auto_records_only_where_there_is_room(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model, warm=0)
    fake(run, *given(0))
    fake.always, fake.share = False, ROOM + 0.01
    for _ in range(3):  # what was recorded is replayed all the same
        fake(run, *given(0))
    assert [graph.replays for graph in fake.graphs] == [4]
    never = Fake(model, warm=0)
    never.always, never.share = False, ROOM + 0.01
    for _ in range(3):
        never(run, *given(0))
    assert not never.graphs


def test_graphs_make_way_for_usual_passes_that_would_not_fit_beside_them(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model, warm=0)
    fake(run, *given(0))
    fake.share = 0.4
    fake.make_way()
    fake(run, *given(0))
    assert (len(fake.graphs), fake.waits) == (1, 0)
    fake.share = 0.6
    fake.make_way()
    fake.share = 0.6
    fake.make_way()  # nothing is left to wait for, or to give back
    assert (fake.waits, fake.share) == (1, 0.6)
    fake(run, *given(0))
    assert len(fake.graphs) == 2


def test_shapes_that_take_turns_are_recorded_only_if_there_is_room_for_each(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model, warm=0)
    fake.always = False
    fake(run, *given(0))
    fake.share = ROOM + 0.01
    fake(run, *given(0))  # its graph has the memory
    assert not fake.off
    with pytest.warns(UserWarning, match="several shapes"):
        fake(run, *given(0, rows=5))
    assert fake.off
    assert (fake.waits, fake.records) == (1, {})
    fake(run, *given(0))
    assert len(fake.graphs) == 1


def test_forwards_are_recorded_again_after_the_short_batch_of_a_validation(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model, warm=2, anew=True)
    fake.always = False
    for _ in range(3):
        fake.share = ROOM - 0.01
        for _ in range(4):
            fake(run, *given(0))
        fake(run, *given(0, rows=5))
        fake.forget()
    assert not fake.off
    assert [graph.replays for graph in fake.graphs] == [2, 2, 2]


def test_auto_leaves_out_what_is_not_ours() -> None:
    from vitrail.models.vit import ViTConfig
    from vitrail.objectives.classify import ClassifyConfig

    class Own(ViTConfig):
        pass

    config = MODELS["vit"][0] | {"channels": 3, "classes": 4}
    ours, own = (kind(**config) for kind in (ViTConfig, Own))
    assert replay.is_ours(ours, ClassifyConfig())
    assert not replay.is_ours(own, ClassifyConfig())


def test_shapes_that_never_come_back_are_given_up(model: nn.Module) -> None:
    run, fake = passes(model), Fake(model)
    for number in range(MANY):
        fake(run, *given(0, weight=float(number)))
    with pytest.warns(UserWarning, match="its inputs had 33 different shapes"):
        fake(run, *given(0, weight=float(MANY)))
    assert fake.off
    assert not fake.graphs


def test_a_pass_that_returns_no_tensor_runs_as_usual(model: nn.Module) -> None:
    class Both(Fake):
        def _captured(self, work: Callable[[], Any]) -> tuple[Any, Any]:
            return None, work()

    with pytest.warns(UserWarning, match="a pass returns a tuple"):
        found = Both(model, warm=0)(lambda inputs, _: (inputs["x"], 1), {"x": torch.ones(1, 3)}, None)  # type: ignore[arg-type]
    assert isinstance(found, tuple)


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
    assert not replay.suits(True, CPU)


# ---------------------------------------------------------------- what models do in a pass


class NoLooking(TorchFunctionMode):
    """Refuses what would make the host wait for a device, or copy to it."""

    LOOKS = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.nonzero, torch.masked_select, torch.unique)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in self.LOOKS or name in ("item", "tolist", "nonzero", "masked_select", "numpy", "__bool__", "__int__"):
            raise AssertionError(f"{name} in a pass")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for one in index:
                if isinstance(one, list) or (isinstance(one, Tensor) and one.dtype == torch.bool):
                    raise AssertionError(f"{name} by {type(one).__name__} in a pass")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_asks_nothing_of_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.bench.measure import measure

    config, objective = MODELS[name]
    seen: list[str] = []

    def watched(self: Flow, inputs: Any, targets: Any, loss: Any) -> Tensor:
        # What is in them can be put in the place of what was recorded.
        take_apart((inputs, targets), [], "cpu")
        seen.append(name)
        with NoLooking() if len(seen) > 1 else nullcontext():  # the first pass may make tables that are kept
            return plain(self, inputs, targets, loss)

    plain = Flow._pass
    monkeypatch.setattr(Flow, "_pass", watched)
    # Values that are on the host are checked there.
    monkeypatch.setattr("vitrail.layers.block._on_host", lambda t: False)
    monkeypatch.setattr("vitrail.layers.trees.Tree._num_levels", lambda self: 1 + max(0, _top(self.shape) - 2))
    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 3, "classes": 4, "items": 8}
    data = {"train": [source], "crop": 16, "batch": 2, "normalize": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    tree = {"run": {"name": "pass", "steps": 1}, "model": config, "objective": {"kind": objective}, "data": data}
    found = measure(tree | {"precision": {"compute": "bf16"}}, mode="syn", windows=1, steps=1, warm_up=1)
    assert found["status"] == "ok"
    assert len(seen) > 1


def test_a_training_with_replays_is_the_training_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With micro-batches, an average, validations in between and steps that watch activations."""
    import vitrail

    made: list[Fake] = []

    def with_replays(*arguments: Any, **options: Any) -> Parts:
        parts = plain(*arguments, **options)
        parts.flow.replay, parts.flow.replay_forward = Fake(parts.model), Fake(parts.model, warm=1)
        made.extend([parts.flow.replay, parts.flow.replay_forward])
        return parts

    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 3, "classes": 4, "items": 64}
    tree = {
        "run": {"name": "replays", "steps": 8},
        "model": MODELS["vit"][0],
        "objective": {"kind": "classify"},
        "data": {"train": [source], "valid": [source], "crop": 16, "batch": 8, "micro_batch": 4},
        "precision": {"compute": "bf16"},
        "ema": {"decay": 0.9},
        "eval": {"every": 2, "samples": 32},
        "log": {"every": 1, "activations": 4, "tensorboard": False, "pictures": 8},
        "checkpoint": {"every": 4},
    }
    plain, lines = setup.build_model, []
    for name in ("without", "with"):
        vitrail.train(tree, overrides=[f"run.dir={tmp_path / name}"])
        events = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        lines.append([(e["step"], e.get("loss"), e.get("metrics")) for e in events if e["event"] in ("train", "eval")])
        monkeypatch.setattr("vitrail.training.session.build_model", with_replays)
    assert lines[0] == lines[1]
    training, forward = made
    assert training.graphs
    assert training.graphs[0].replays > 4
    assert len(forward.graphs) > 1
