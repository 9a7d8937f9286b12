"""The training loop against a few lines of plain PyTorch: gradients, clipping, updates, averages, what is measured."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from vitrail.training import setup
from vitrail.training.evaluate import Evaluator
from vitrail.training.session import Session
from vitrail.training.trainer import Trainer

STEPS, WARMUP, BATCH, LR, DECAY = 6, 2, 8, 0.05, 0.1
SPARED = ("prefix_tokens", "pos_embed.table")  # matrices that do not decay, beside all that is no matrix


def recipe(optimizer: dict[str, Any], **data: Any) -> dict[str, Any]:
    source = {"kind": "dummy", "path": "dummy", "shape": [16, 16], "channels": 2, "classes": 4}
    model = {"kind": "vit", "width": 16, "depth": 2, "heads": 2, "patch": 4, "positions": "learned", "drop_path": 0.3}
    return {
        "run": {"name": "plain", "steps": STEPS, "device": "cpu"},
        "model": model,
        "objective": {"kind": "classify"},
        "data": {
            "train": [source | {"items": 64}],
            "valid": [source | {"items": 12, "seed": 5}],
            "crop": 16,
            "batch": BATCH,
            **data,
        },
        "optimizer": {"lr": LR, "weight_decay": DECAY, **optimizer},
        "schedule": {"kind": "cosine", "warmup": WARMUP, "end": 0.01},
        "ema": {"decay": 0.3},
        "eval": {"every": 3, "samples": 12},
        "log": {"every": 1, "activations": "off", "tensorboard": False, "pictures": "off"},
        "checkpoint": {"every": "off"},
    }


class Seen:
    """A training, and all that went into its model."""

    def __init__(self, tree: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str):
        self.inputs: list[list[tuple[dict[str, Any], torch.Tensor]]] = [[] for _ in range(STEPS)]
        make, prepare = Trainer.__init__, Trainer.prepare

        def made(trainer: Trainer, *arguments: Any) -> None:
            make(trainer, *arguments)
            self.trainer = trainer
            self.first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

        def prepared(trainer: Trainer, micro: Any) -> Any:
            found = prepare(trainer, micro)
            self.inputs[micro.counters[0] // BATCH].append(found)
            return found

        monkeypatch.setattr(Trainer, "__init__", made)
        monkeypatch.setattr(Trainer, "prepare", prepared)
        vitrail.train(tree, overrides=[f"run.dir={folder}", *overrides], quiet=True)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = [line for line in lines if line["event"] == "train"]
        self.measured = {line["step"]: line["metrics"] for line in lines if line["event"] == "eval"}

    def model(self) -> nn.Module:
        model = self.trainer.recipe.model.build()
        model.load_state_dict(self.first)
        return model


def rate(step: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return 0.01 + (LR - 0.01) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def replay(seen: Seen, optimizer: Any, clip: float | None) -> tuple[nn.Module, dict[str, torch.Tensor], list[Any]]:
    """The same training by PyTorch's own optimizer and clipping; also its average, and loss and norm of each step."""
    model = seen.model()
    named = dict(model.named_parameters())
    decays = [p for name, p in named.items() if p.ndim > 1 and not name.endswith(SPARED)]
    spared = [p for name, p in named.items() if p.ndim < 2 or name.endswith(SPARED)]
    plain = optimizer([{"params": decays, "weight_decay": DECAY}, {"params": spared, "weight_decay": 0.0}])
    average, told = {name: p.detach().clone() for name, p in named.items()}, []
    for step, micros in enumerate(seen.inputs):
        losses = [F.cross_entropy(model(**inputs), labels, reduction="sum") for inputs, labels in micros]
        loss = sum(losses) / BATCH
        plain.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
        told.append((loss.item(), norm.item()))
        for group in plain.param_groups:
            group["lr"] = rate(step)
        plain.step()
        decay = min(0.3, (2 + step) / (11 + step))
        for name, parameter in named.items():
            average[name] = decay * average[name] + (1 - decay) * parameter.detach()
        if step + 1 in seen.measured:
            seen.measured[step + 1]["expected"] = held_out_loss(seen, average)
    return model, average, told


def held_out_loss(seen: Seen, weights: dict[str, torch.Tensor]) -> float:
    """Of every held-out item once, normalised as the training items are."""
    model = seen.model()
    model.load_state_dict(weights)
    train, valid = (data.sources[0] for data in (seen.trainer.data.train, seen.trainer.data.valid))
    values = train.read(0, (slice(None),) * 2)
    mean, std = (f(axis=(1, 2), keepdims=True) for f in (values.mean, values.std))
    other = valid.read(0, (slice(None),) * 2)
    assert not np.allclose(other, values)
    images = torch.from_numpy(np.broadcast_to((other - mean) / std, (12, *other.shape)).copy())
    with torch.no_grad():
        return float(F.cross_entropy(model(**model.inputs(images)), torch.arange(12) % 4))


CASES: dict[str, tuple[dict[str, Any], int | None, float | None, Any]] = {  # options, micro-batch, clip, the same
    "sgd": (
        {"kind": "sgd", "momentum": 0.7, "clip": 2.0},
        3,
        2.0,
        lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.7),
    ),
    "adamw": (
        {"kind": "adamw", "betas": [0.8, 0.9], "eps": 1e-3, "clip": None},
        4,
        None,
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3),
    ),
    "defaults of sgd": ({"kind": "sgd"}, None, 1.0, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9)),
    "defaults of adamw": ({}, None, 1.0, lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_that_of_plain_pytorch(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, micro, clip, optimizer = CASES[case]
    seen = Seen(recipe(options, micro_batch=micro), tmp_path, monkeypatch)
    model, average, told = replay(seen, optimizer, clip)
    assert [len(micros) for micros in seen.inputs] == [math.ceil(BATCH / (micro or BATCH))] * STEPS
    for line, (loss, norm), step in zip(seen.steps, told, range(STEPS), strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-3)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-2)
        assert line["lr"] == pytest.approx(rate(step))
        assert (line["step"], line["samples"]) == (step + 1, BATCH * (step + 1))
    kept = torch.cat([inputs["drop_path"] for micros in seen.inputs for inputs, _ in micros])  # [samples, blocks, 2]
    assert kept[:, 0].unique().tolist() == [1.0]
    assert kept[:, 1].unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    norms = [norm for _, norm in told]
    assert clip is None or clip < max(norms), norms
    assert case != "sgd" or min(norms) < clip, norms  # and some that are not clipped
    for found, expected in (
        (dict(seen.trainer.model.named_parameters()), dict(model.named_parameters())),
        (seen.trainer.ema.average, average),
    ):
        for name, value in expected.items():
            if "qkv.bias" in name and not options:
                continue  # keys' biases have no gradient but for rounding, which Adam makes large
            torch.testing.assert_close(
                found[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
    assert seen.measured.keys() == {3, 6}
    for metrics in seen.measured.values():  # by the averaged weights, on what is held out
        assert metrics["loss"] == pytest.approx(metrics["expected"], rel=1e-3)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a checkpoint holds, bit for bit, and all that is counted."""
    tree = recipe({"kind": kind}, micro_batch=3) | {"checkpoint": {"every": 10**6, "keep": 9}}
    whole = Seen(tree, tmp_path / "whole", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "stop_wish", lambda self: "time limit" if self.trainer.done == 2 else None)
        half = Seen(tree, tmp_path / "run", patch)
    assert half.trainer.done == 3
    rest = Seen(tree, tmp_path / "run", monkeypatch)
    assert [line["step"] for line in rest.steps] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in rest.steps] == [line["loss"] for line in whole.steps]
    assert [line["lr"] for line in rest.steps] == [line["lr"] for line in whole.steps]
    found, expected = rest.trainer, whole.trainer
    counts = ("done", "samples", "optimizer_steps", "skipped", "skipped_in_a_row")
    assert [getattr(found, name) for name in counts] == [getattr(expected, name) for name in counts] == [6, 48, 6, 0, 0]
    found, expected = found.tensors(), expected.tensors()
    assert {name.partition(".")[0] for name in expected} == {"model", "optimizer", "ema"}
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_numbers_of_pytorchs_own_generator_depend_on_purpose_step_and_rank() -> None:
    """Of the ranks that have other samples: those that share samples draw alike."""
    generator, found = torch.Generator(), {}
    for purpose, number, rank in (("step", 3, 0), ("step", 3, 1), ("step", 4, 0), ("prepare", 3, 0)):
        trainer: Any = SimpleNamespace(
            recipe=SimpleNamespace(run=SimpleNamespace(seed=7)),
            flow=SimpleNamespace(data_rank=rank),
            _generators=[generator],
        )
        Trainer._seed(trainer, purpose, number)
        digest = hashlib.blake2b(f"7:{purpose}:{number}:{rank}".encode(), digest_size=8).digest()
        assert generator.initial_seed() == int.from_bytes(digest, "little") >> 1
        found[purpose, number, rank] = torch.rand(1, generator=generator).item()
    assert len(set(found.values())) == 4


# All but the best go, and the one before an end without a score; or none but the best come, and the end.
@pytest.mark.parametrize(("every", "keep", "left"), [(1, 1, [2, 4, 5]), (10**6, 9, [2, 5])])
def test_a_score_that_is_no_number_is_never_the_best(
    every: int, keep: int, left: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([math.nan, 0.5, math.inf, 0.25, math.nan])
    monkeypatch.setattr(Evaluator, "metrics", lambda *_, **__: {"loss": 1.0, "accuracy": next(scores)})
    tree = recipe({}) | {"checkpoint": {"every": every, "keep": keep}}
    vitrail.train(tree, overrides=[f"run.dir={tmp_path}", "run.steps=5", "eval.every=1", "ema=null"], quiet=True)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in left]


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_types_of_a_recipe_reach_the_model(reduce: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its masters stay in fp32."""
    asked: dict[str, Any] = {}
    parallelize = setup.parallelize

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.update(options)
        return parallelize(*arguments, **options)

    monkeypatch.setattr(setup, "parallelize", watched)
    overrides = ["run.steps=1", f"precision={{compute: bf16, reduce: {reduce}}}"]
    seen = Seen(recipe({}), tmp_path, monkeypatch, *overrides)
    assert {tensor.dtype for tensor in seen.trainer.tensors().values()} == {torch.float32}
    assert asked["compute"] == torch.bfloat16
    assert asked["reduce"] == {"fp32": torch.float32, "bf16": torch.bfloat16}[reduce]
