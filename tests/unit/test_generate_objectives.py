"""Objectives that learn to make samples: what the model sees, what it is to answer, and how samples come about."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.diffusion import SamplingConfig, Steps
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.block import timestep_features
from vitrail.layers.patches import Part, Slab
from vitrail.layers.tokens import patchify, unpatchify
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionViTConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.vit import ViTConfig
from vitrail.objectives.denoise import DenoiseConfig
from vitrail.objectives.flow import FlowConfig
from vitrail.objectives.generate import Generate, coarsen, quarters, range_of
from vitrail.parallel.split import Split
from vitrail.recipe.sections import Augment
from vitrail.report.panels import sample_grid

ENCODER = EncoderConfig(width=16, depth=1, heads=2, patch=2)
DIT = DiTConfig(width=16, depth=1, heads=2, patch=2, channels=2, shape=(4, 6), classes=3, label_dropout=0.25)
VIT3D = DiffusionViTConfig(encoder=ENCODER, ndim=3, channels=2, shape=(6, 4, 4))
STATISTICS = Statistics((10.0, -1.0), (2.0, 0.5))
CASES = [
    (FlowConfig(), DIT),
    (FlowConfig(times="logit_normal", shift=3.0), replace(DIT, ndim=3, shape=(6, 4, 4))),
    (DenoiseConfig(), VIT3D),
    (DenoiseConfig(predict="velocity", schedule="cosine", min_snr=5.0), DIT),
    (DenoiseConfig(predict="data", zero_snr=True, steps=50), replace(DIT, classes=None)),
]


def batch_of(model: Any, number: int = 5, **changes: Any) -> Batch:
    shape = (number, 2, *model.shape)
    values = torch.from_numpy(np.random.default_rng(0).normal(10, 3, shape).astype(np.float32))
    labels = torch.arange(number) % 3 if getattr(model, "classes", None) else None
    return replace(Batch(list(range(7, 7 + number)), values, labels, ("a", "b")), **changes)


def normalised(batch: Batch) -> Tensor:
    mean, std = (t.view(1, 2, *[1] * (batch.values.ndim - 2)) for t in STATISTICS.tensors())
    return (batch.values - mean) / std


# ---------------------------------------------------------------- noise


def test_noise_depends_on_seed_purpose_and_counter_alone() -> None:
    whole = Draws(3, range(6)).normal("noise", 2, 8, 5)
    assert torch.equal(Draws(3, [4]).normal("noise", 2, 8, 5)[0], whole[4])
    assert torch.equal(Draws(3, [5, 1]).normal("noise", 2, 8, 5, rows=range(2, 7)), whole[[5, 1], :, 2:7])
    large = Draws(3, [4]).normal("noise", 3, 700, 600)  # more than is made at a time
    assert torch.equal(Draws(3, [4]).normal("noise", 3, 700, 600, rows=range(650, 700)), large[:, :, 650:])
    for other in (Draws(4, range(6)).normal("noise", 2, 8, 5), Draws(3, range(6)).normal("more", 2, 8, 5)):
        assert abs(float((other * whole).mean())) < 0.15
    assert Draws(3, range(6)).normal("noise", 7).shape == (6, 7)


def test_noise_is_normal() -> None:
    noise = Draws(0, range(4)).normal("noise", 3, 512, 512).flatten()
    number = len(noise)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = {1: 1.0, 2: 2.0, 3: 15.0, 4: 96.0, 6: 10170.0}[power]  # variance of that power
        assert abs(float(noise.double().pow(power).mean()) - moment) < 4 * (spread / number) ** 0.5
    assert 4.5 < float(noise.abs().max()) < 6.8
    for shift in (1, 512, 512 * 512):  # neighbours in a row, in a column, in a channel
        assert abs(float((noise[shift:] * noise[:-shift]).mean())) < 4 / number**0.5


def test_each_step_of_a_sampler_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def watched(
        process: Any, predict: Any, model: Any, noise: Tensor, settings: Any, *, fresh: Any, **_: Any
    ) -> Tensor:
        drawn.extend([noise, *map(fresh, range(3))])
        return noise

    monkeypatch.setattr("vitrail.objectives.generate.sample", watched)
    objective = DenoiseConfig().build(VIT3D, STATISTICS)
    objective.generate(lambda inputs: torch.empty(0), counters=range(40), seed=5)
    assert all(noise.shape == (40, 2, *VIT3D.shape) for noise in drawn)
    table = torch.corrcoef(torch.stack([noise.flatten() for noise in drawn]))
    assert (table - torch.eye(4)).abs().max() < 5 / drawn[0].numel() ** 0.5  # of the beginning, too


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_model_sees_noisy_data_and_answers_as_the_process_says(number: int) -> None:
    config, model = CASES[number]
    objective, batch = config.build(model, STATISTICS), batch_of(model)
    draws = Draws(1, batch.counters)
    inputs, targets = objective.prepare(batch, draws)
    data, patch = normalised(batch), (2,) * model.ndim
    noise = draws.normal("noise", *data.shape[1:])
    times = objective.process.draw_times(draws.uniform("times", 1)[:, 0])
    assert torch.equal(inputs["times"], objective.process.told(times))
    assert torch.equal(inputs["x"], patchify(objective.process.mix(data, noise, times), patch))
    wanted = objective.process.target(data, noise, times, objective.predict)
    assert torch.equal(targets.values, patchify(wanted, patch))
    assert inputs["x"].dtype == targets.values.dtype == torch.float32
    assert float(objective.loss(targets.values.bfloat16().float(), targets).sum) < 1
    output = model.build()(**inputs).detach()
    loss = objective.loss(output, targets)
    squares = (output.double() - targets.values).square().sum(dim=(1, 2))
    assert float(loss.sum) == pytest.approx(
        float((squares * objective.process.weights(times, objective.predict)).sum()), rel=1e-5
    )
    assert float(loss.count) == targets.values.numel()
    assert loss.sum.dtype == torch.float32
    again, _ = objective.prepare(batch.narrow(2, 4), Draws(1, batch.counters[2:4]))
    assert all(torch.equal(again[name], inputs[name][2:4]) for name in ("x", "times"))


@pytest.mark.parametrize("slabs", [True, False])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_parts_are_cut_from_the_whole(number: int, slabs: bool) -> None:
    config, model = [*CASES, (DenoiseConfig(), replace(DIT, learn_sigma=True, ndim=3, shape=(6, 4, 4)))][number]
    objective, batch = config.build(model, STATISTICS), batch_of(model)
    count = 3 if slabs else 5  # 12 tokens: five parts of 3 rows, with copies in the last
    inputs, targets = objective.prepare(batch, Draws(1, batch.counters))
    whole = objective.loss(torch.zeros_like(targets.values), targets)
    found, sums = [], torch.zeros(2)
    for index in range(count):
        split, mine = Split(model, Part(index, count)), batch
        if slabs:
            slab = split.slab(objective, model.shape)
            assert slab == Slab(split.part, model.shape)
            mine = replace(batch, values=batch.values[:, :, slab.rows.start : slab.rows.stop], slab=slab)
        some, answers = split.prepare(objective, mine, Draws(1, batch.counters))
        assert torch.equal(some["times"], inputs["times"])
        loss = objective.loss(torch.zeros_like(answers.values), answers)
        sums += torch.stack([loss.sum, loss.count])
        found.append(some["x"])
    assert torch.equal(torch.cat(found, dim=1)[:, :12], inputs["x"])
    assert torch.allclose(sums, torch.stack([whole.sum, whole.count]), rtol=1e-5)


def test_labels_are_hidden_in_training_alone() -> None:
    objective = FlowConfig().build(DIT, STATISTICS)
    batch = replace(batch_of(DIT, 1000), values=torch.zeros(1000, 2, 4, 6))
    labels = objective.prepare(batch, Draws(1, batch.counters))[0]["labels"]
    hidden = labels == 3
    assert 0.2 < float(hidden.float().mean()) < 0.3
    assert torch.equal(labels[~hidden], batch.labels[~hidden])
    assert torch.equal(objective.prepare(batch, Draws(1, batch.counters), evaluating=True)[0]["labels"], batch.labels)
    wrong = replace(batch, labels=torch.full((1000,), 3))
    with pytest.raises(UserError, match=r"labels: 3 is not the number .* there are 3, from 0; .* set model.classes$"):
        objective.prepare(wrong, Draws(1, batch.counters))


def test_validation_measures_evenly_and_without_weights() -> None:
    for config in (FlowConfig(times="logit_normal", shift=9.0), DenoiseConfig(min_snr=1.0, steps=40, sampling=FEW)):
        objective, batch = config.build(DIT, STATISTICS), batch_of(DIT, 400)
        inputs, targets = objective.prepare(batch, Draws(1, batch.counters), evaluating=True)
        way = inputs["times"] / (1000 if isinstance(config, FlowConfig) else 40)
        way = way if isinstance(config, FlowConfig) else 1 - way
        assert all(
            float(((way - 0.025) * 4 // 1).eq(q).float().mean()) == pytest.approx(0.25, abs=0.05) for q in range(4)
        )
        output = torch.randn_like(targets.values)
        metrics = objective.summarise({n: float(v) for n, v in objective.measure(output, targets).items()})
        each = (output - targets.values).square().mean(dim=(1, 2))
        losses = [float(each[targets.quarter == q].mean()) for q in range(4)]
        assert [metrics[f"loss_q{q + 1}"] for q in range(4)] == pytest.approx(losses, rel=1e-5)
        assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        noisy = way[targets.quarter == 0]
        assert list(metrics) == list(objective.metrics)
        assert float(noisy.max()) <= 0.25 + 1 / 40


def test_every_four_samples_have_all_quarters_and_every_second_sample_too() -> None:
    """Entries that take turns would else be measured each in quarters of its own."""
    found = quarters(Draws(1, range(400)))
    assert (found.view(100, 4).sort(dim=1).values == torch.arange(4)).all()
    for every in (found[::2], found[::4]):
        assert (every.bincount(minlength=4) > 0.15 * len(every)).all()
    assert torch.equal(quarters(Draws(1, [17, 2])), found[[17, 2]])


def test_a_quarter_that_nothing_fell_into_leaves_a_loss() -> None:
    objective, batch = FlowConfig().build(DIT, STATISTICS), batch_of(DIT, 3)
    _, targets = objective.prepare(batch, Draws(1, batch.counters), evaluating=True)
    sums = objective.measure(torch.zeros_like(targets.values), targets)
    metrics = objective.summarise({name: float(value) for name, value in sums.items()})
    known = [metrics[f"loss_q{q}"] for q in range(1, 5) if np.isfinite(metrics[f"loss_q{q}"])]
    assert len(known) == len(set(targets.quarter.tolist())) < 4
    assert metrics["loss"] == pytest.approx(np.mean(known))


def test_validation_has_noise_of_its_own() -> None:
    objective, batch = FlowConfig().build(DIT, STATISTICS), batch_of(DIT)
    seen, held_out = (objective.prepare(batch, Draws(1, batch.counters), evaluating=e)[1].values for e in (False, True))
    seen, held_out = (patchify(normalised(batch), (2, 2)) - velocity for velocity in (seen, held_out))
    assert abs(float((seen * held_out).mean())) < 0.2 < float(seen.square().mean())


FEW = SamplingConfig(sampler="ddim", steps=10)


def test_statistics_of_entries_come_first() -> None:
    objective, batch = FlowConfig().build(DIT, STATISTICS), batch_of(DIT)
    own = (torch.full((5, 2), 3.0), torch.arange(1.0, 11).view(5, 2))
    data, _ = objective.fields(replace(batch, statistics=own))
    assert torch.allclose(data[4, 1], (batch.values[4, 1] - 3) / 10)


# ---------------------------------------------------------------- conditions


def fitted(config: Any, model: Any, **augment: Any) -> tuple[Any, Any]:
    data = SimpleNamespace(augment=Augment(**augment), statistics="shared", train=[])
    return config.fit(model, ("a", "b"), data)


def test_variables_and_coarse_images_condition() -> None:
    plain = replace(DIT, channels=None)
    config, model = fitted(FlowConfig(condition=("a",), coarse=2), plain)
    assert (model.condition_channels, config.variables) == (2, ("a", "b"))
    objective = config.build(replace(model, channels=1), STATISTICS)
    batch = batch_of(DIT)
    data, given = objective.fields(batch)
    expected = normalised(batch)
    assert torch.equal(data, expected[:, 1:])
    assert given is not None
    assert torch.equal(given[:, 1:], expected[:, :1])
    blocks = expected[:, 1].unflatten(1, (2, 2)).unflatten(3, (3, 2))
    assert torch.allclose(given[:, 0].unflatten(1, (2, 2)).unflatten(3, (3, 2)), blocks.mean((2, 4), keepdim=True))
    inputs, targets = objective.prepare(batch, Draws(1, batch.counters))
    assert inputs["x"].shape[-1] == 4 * 3
    assert targets.values.shape[-1] == 4
    assert torch.equal(unpatchify(inputs["x"], (2, 2), (4, 6))[:, 1:], given)  # unspoilt
    assert Split(DIT, Part(0, 2)).slab(objective, (4, 6)) is not None
    fine = replace(DIT, patch=1)
    assert Split(fine, Part(0, 4)).slab(FlowConfig(coarse=2).build(fine, STATISTICS), (4, 6)) is None
    assert coarsen(torch.ones(1, 2, 4, 4, 4), 4).shape == (1, 2, 4, 4, 4)


def test_the_model_follows_the_objective() -> None:
    _, model = fitted(DenoiseConfig(steps=4000), replace(VIT3D, channels=None))
    assert model.time_steps == 4000
    assert fitted(DenoiseConfig(steps=100), VIT3D)[1].time_steps == 1000
    assert FlowConfig().labels_with(DIT) == FlowConfig(classes=True).labels_with(replace(DIT, classes=None)) == "item"
    assert FlowConfig().labels_with(replace(DIT, classes=None)) is FlowConfig().labels_with(VIT3D) is None


def test_statistics_of_entries_need_samples_that_belong_to_one() -> None:
    each = SimpleNamespace(augment=Augment(), statistics="each", train=[])
    own = SimpleNamespace(augment=Augment(), statistics="shared", train=[SimpleNamespace(statistics={"mean": [1.0]})])
    for data, words in ((each, "data.statistics: each gives"), (own, r"data.train.0.statistics gives .* of the entry")):
        with pytest.raises(UserError, match=words + ".*"):
            FlowConfig().fit(DIT, ("a", "b"), data)
        assert FlowConfig(coarse=2).fit(DIT, ("a", "b"), data)[1].condition_channels == 2


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "model", "augment", "words"),
    [
        (FlowConfig(condition=("c",)), DIT, {}, "objective.condition: 'c' is not a variable of the data, which have a"),
        (FlowConfig(condition=("a", "b")), DIT, {}, "none is left to be made"),
        (FlowConfig(), replace(DIT, condition_channels=1), {}, "model.condition_channels: 1, but"),
        (FlowConfig(), DIT, {"mixup": 0.2}, "mixup and cutmix make images of two classes"),
        (FlowConfig(classes=True), VIT3D, {}, "objective.classes: model 'diffusion_vit' takes no classes"),
        (FlowConfig(classes=False), DIT, {}, "objective.classes: false, but model.classes is 3"),
        (FlowConfig(), ViTConfig(size="S/16"), {}, "trains models that take noisy images and a time.*not 'vit'"),
        (FlowConfig(names=("x", "y")), VIT3D, {}, "are given, but classes do not condition the model"),
        (FlowConfig(), replace(DIT, time_scale=1.5), {}, "model.time_scale: 1.5, but objective 'flow' tells"),
        (FlowConfig(), replace(DIT, ndim=1, shape=(8,)), {}, "model.ndim: 1, but objective 'flow' makes images and"),
        (FlowConfig(variables=("a",)), DIT, {}, r"objective.variables: \['a'\], but the data have"),
        (
            FlowConfig(condition=("a",)),
            DiffusionViTConfig(encoder=replace(ENCODER, variables=VariablesConfig(known=("a", "b")))),
            {},
            "condition_channels are unnamed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(config: Any, model: Any, augment: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        fitted(config, model, **augment)


GUIDED = SamplingConfig(guidance=2.0)


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (
            FlowConfig(sampling=GUIDED),
            replace(DIT, classes=None),
            "sampling.guidance: 2 needs a model that knows class",
        ),
        (FlowConfig(sampling=GUIDED), replace(DIT, label_dropout=0.0), "never learned; train with model.label_dropout"),
        (FlowConfig(condition=("a",)), DIT, "objective.variables: name all variables of the data"),
        (FlowConfig(coarse=4), DIT, r"objective.coarse: 4 does not divide data.crop \[4, 6\]"),
        (FlowConfig(), replace(DIT, time_scale=1000.0), "model.time_scale: 1000, but objective 'flow' tells"),
    ],
)
def test_what_cannot_be_built_is_refused(config: Any, model: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        config.build(model, STATISTICS)


def test_keys_are_checked() -> None:
    for make, words in (
        (lambda: DenoiseConfig(zero_snr=True), "predict 'noise' .*zero_snr"),
        (lambda: DenoiseConfig(zero_snr=True, min_snr=5.0, predict="velocity"), "min_snr 5 and zero_snr do not go"),
        (lambda: DenoiseConfig(steps=20, sampling=SamplingConfig(steps=30)), "sampling.steps 30 must be at most"),
        (lambda: FlowConfig(shift=0.0), "shift 0 must be above 0"),
        (lambda: FlowConfig(coarse=1), "coarse 1 must be at least 2"),
        (lambda: FlowConfig(condition=("a", "a")), "names a variable twice"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


# ---------------------------------------------------------------- sampling


class Oracle:
    """Answers as a model that knows the data of every class; keeps what it was asked."""

    def __init__(self, objective: Generate):
        self.objective, self.asked = objective, []
        shape = (4, 2, *objective.size)
        self.data = torch.from_numpy(np.random.default_rng(1).normal(0, 1, shape).astype(np.float32))  # 3: no class

    def __call__(self, inputs: dict[str, Any]) -> Tensor:
        o, patch = self.objective, (2,) * self.objective.model.ndim
        self.asked.append(inputs)
        labels = inputs.get("labels", torch.zeros(len(inputs["x"]), dtype=torch.int64))
        times = inputs["times"].double() / 1000 if o.predict == "velocity" else inputs["times"].long()
        x = unpatchify(inputs["x"], patch, o.size)[:, :2]
        data = self.data[labels]
        noise = o.process.denoised(x, data, times, "data").noise
        return patchify(o.process.target(data, noise, times, o.predict), patch)


def test_a_model_may_know_times_of_0_to_1() -> None:
    """As SiT does: `time_scale: 0.001` undoes the thousand, in training and in sampling."""
    config = replace(DIT, time_scale=0.001)
    objective, batch, model = FlowConfig().build(config, STATISTICS), batch_of(DIT), config.build()
    seen: list[Tensor] = []
    model.time_embed.fc1.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    draws = Draws(1, batch.counters)
    model(**objective.prepare(batch, draws)[0])
    torch.testing.assert_close(seen[0], timestep_features(draws.uniform("times", 1)[:, 0], 256), rtol=0, atol=1e-6)
    few = SamplingConfig(sampler="euler", steps=4)
    objective.generate(lambda inputs: model(**inputs), counters=[0], seed=0, settings=few)
    times = torch.tensor([0.0, 0.25, 0.5, 0.75])
    torch.testing.assert_close(torch.cat(seen[1:]), timestep_features(times, 256), rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [0, 2])
def test_samples_are_what_the_model_knows(number: int) -> None:
    config, model = CASES[number]
    objective = replace(config, sampling=FEW).build(model, STATISTICS)
    oracle = Oracle(objective)
    labels = torch.tensor([2, 0, 1]) if objective.classes else None
    ticks: list[int] = []
    made = objective.generate(oracle, counters=range(3), seed=0, labels=labels, tick=lambda: ticks.append(1))
    wanted = oracle.data[labels if labels is not None else torch.zeros(3, dtype=torch.int64)]
    mean, std = (t.view(1, 2, *[1] * model.ndim) for t in STATISTICS.tensors())
    assert torch.allclose(made, wanted * std + mean, atol=1e-3)
    assert made.dtype == torch.float32
    assert len(ticks) == len(oracle.asked) == 10
    first = unpatchify(oracle.asked[0]["x"], (2,) * model.ndim, objective.size)
    alone = Oracle(objective)
    objective.generate(alone, counters=[2], seed=0, labels=None if labels is None else labels[2:])
    assert torch.equal(alone.asked[0]["x"][0], oracle.asked[0]["x"][2])
    assert torch.equal(first, Draws(0, range(3)).normal("sample", 2, *objective.size))


def test_guidance_asks_with_and_without_the_class() -> None:
    objective = FlowConfig().build(DIT, STATISTICS)
    oracle = Oracle(objective)
    labels = torch.tensor([1, 2])
    made = objective.generate(
        oracle, counters=[0, 1], seed=0, labels=labels, settings=SamplingConfig(steps=1, guidance=3.0)
    )
    assert torch.equal(oracle.asked[0]["labels"], torch.tensor([1, 2, 3, 3]))
    data = oracle.data[3] + 3 * (oracle.data[labels] - oracle.data[3])
    mean, std = (t.view(1, 2, 1, 1) for t in STATISTICS.tensors())
    assert torch.allclose(made, data * std + mean, atol=1e-3)
    free = Oracle(objective)
    objective.generate(free, counters=[0], seed=0, settings=FEW)
    assert int(free.asked[0]["labels"]) == 3  # without labels there is no class
    objective.value_range = (0.0, 255.0)
    limited = objective.generate(oracle, counters=[0, 1], seed=0, labels=labels, settings=SamplingConfig(steps=3))
    assert float(limited.min()) >= -1e-5
    assert range_of(np.dtype("uint8")) == (0.0, 255.0)
    assert range_of(np.dtype("float32")) is None


def test_samples_have_the_units_of_the_entry_that_they_are_made_from() -> None:
    """Of two entries, dark and bright ones; and limits are those of the type, whatever the entry."""
    model = replace(DIT, condition_channels=2, classes=None)
    objective = FlowConfig(coarse=2, variables=("a", "b"), sampling=FEW).build(model, STATISTICS)
    values = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (2, 2, 4, 6)).astype(np.float32))
    mean, std = torch.tensor([[20.0, 30.0], [200.0, 210.0]]), torch.tensor([[5.0, 4.0], [10.0, 20.0]])
    values = (values * std[..., None, None] + mean[..., None, None]).clamp(0, 255)
    batch = Batch([0, 1], values, None, ("a", "b"), statistics=(mean, std))

    def knows(data: Tensor) -> Any:
        def answer(inputs: dict[str, Any]) -> Tensor:
            x, time = unpatchify(inputs["x"], (2, 2), (4, 6))[:, :2], inputs["times"][0] / 1000
            return patchify((data - x) / (1 - time), (2, 2))

        return answer

    data, given = objective.fields(batch)
    objective.equip(value_range=(0.0, 255.0))
    made, shown = objective.example(batch, Draws(0, [0, 1]), knows(data), size=2)
    assert torch.allclose(made, values, atol=1e-2)
    assert shown.given is not None
    assert torch.allclose(shown.given, coarsen(values, 2))  # in the units of the data
    wild, _ = objective.example(batch, Draws(0, [0, 1]), knows(99 * data), size=2)
    assert float(wild.min()) == pytest.approx(0, abs=1e-3)
    assert float(wild.max()) == pytest.approx(255, abs=1e-2)
    plain = objective.generate(knows(data), counters=[0, 1], seed=0, condition=given, settings=FEW)
    assert not torch.allclose(plain, values, atol=1)  # by the shared statistics


def test_the_example_has_the_variables_of_its_batch() -> None:
    """Entries may have some of all variables, each with its own statistics."""
    encoder = replace(ENCODER, variables=VariablesConfig(known=("a", "b")))
    model = DiffusionViTConfig(encoder=encoder, ndim=2, channels=2, shape=(4, 6))
    objective = FlowConfig(variables=("a", "b"), sampling=FEW).build(model, STATISTICS)
    some = torch.full((3, 1, 4, 6), 5.0)
    batch = Batch([0, 1, 2], some, None, ("b",), statistics=(torch.full((3, 1), 50.0), torch.full((3, 1), 2.0)))
    made, _ = objective.example(batch, Draws(0, batch.counters), Oracle(objective), size=2)
    assert made.shape == some.shape
    assert torch.allclose(made, Oracle(objective).data[:1, 1:] * 2 + 50, atol=1e-2)


def test_what_cannot_be_sampled_is_refused() -> None:
    objective = FlowConfig().build(DIT, STATISTICS)
    options: dict[str, Any] = {"counters": [0], "seed": 0}
    with pytest.raises(UserError, match=r"labels: label 7 is out of range: model\.classes is 3"):
        objective.generate(Oracle(objective), labels=torch.tensor([7]), **options)
    with pytest.raises(UserError, match="condition: this model makes samples without one"):
        objective.generate(Oracle(objective), condition=torch.zeros(1, 1, 4, 6), **options)
    conditional = FlowConfig(coarse=2).build(replace(DIT, condition_channels=2), STATISTICS)
    with pytest.raises(UserError, match="condition: this model needs to be given"):
        conditional.generate(Oracle(conditional), **options)
    blind = FlowConfig().build(replace(DIT, classes=None), STATISTICS)
    with pytest.raises(UserError, match="labels: this model knows no classes"):
        blind.generate(Oracle(blind), labels=torch.tensor([0]), **options)
    steps = DenoiseConfig(steps=20, sampling=FEW).build(DIT, STATISTICS)
    with pytest.raises(UserError, match=r"steps 30 .*from 1 to 20"):
        steps.generate(Oracle(steps), settings=SamplingConfig(steps=30), **options)
    assert isinstance(steps.process, Steps)


# ---------------------------------------------------------------- pictures


def test_a_picture_shows_as_many_of_each_class() -> None:
    objective = FlowConfig().build(DIT, STATISTICS)
    chosen = objective.choose(range(100), lambda counter: counter % 3)
    assert [counter % 3 for counter in chosen] == sorted(counter % 3 for counter in chosen)
    assert len(chosen) == 30
    assert chosen[:3] == [0, 3, 6]
    many = FlowConfig().build(replace(DIT, classes=1000), STATISTICS)
    assert [c % 1000 for c in many.choose(range(4000), lambda c: c % 1000)][::3] == list(range(0, 1000, 100))
    assert FlowConfig().build(replace(DIT, classes=None), STATISTICS).choose(range(100), lambda c: None) == list(
        range(16)
    )


def test_pictures_of_samples_beside_data(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for number, (shape, options) in enumerate(
        [
            ((6, 3, 8, 8), {"names": ["cat"] * 2 + ["a very long name of a class, indeed"] * 4}),
            ((5, 16, 4, 12), {"value_range": (0.0, 1.0)}),
            ((3, 1, 6, 8, 8), {"given": rng.normal(size=(3, 2, 6, 8, 8))}),
        ]
    ):
        path = tmp_path / f"{number}.png"
        assert (
            sample_grid(path, rng.random(shape), rng.random(shape), title="Samples", caption="words", **options) == path
        )
        assert Image.open(path).size[0] > 300


def shades(path: Path) -> int:
    """How many greys a picture has, but for those that only letters have."""
    from PIL import Image

    return int((np.bincount(np.asarray(Image.open(path).convert("L")).ravel(), minlength=256) > 300).sum())


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_pictures_use_the_greys_that_there_are(tmp_path: Path, dtype: str) -> None:
    """Whole numbers of 16 bits seldom fill their type; bytes do, and keep their meaning."""
    model = replace(DIT, classes=None, channels=1, shape=(64, 64))
    objective = FlowConfig().build(model, Statistics((0.0,), (1.0,)))
    low, high = {"uint8": (0, 255), "int16": (-1000, 1000), "float32": (0.0, 1e-3)}[dtype]
    values = torch.linspace(low, high, 4 * 64 * 64).view(4, 1, 64, 64)
    batch = Batch(list(range(4)), values)
    objective.equip(value_range=range_of(np.dtype(dtype)))
    shown = objective.example(batch, Draws(0, range(4)), lambda inputs: torch.zeros_like(inputs["x"]))[1]
    objective.draw(tmp_path / "picture.png", objective.rows(batch, values, shown), step=0, held_out=True)
    assert shades(tmp_path / "picture.png") > 128
    rows = objective.rows(replace(batch, values=values / 4), values / 4, shown)
    objective.draw(tmp_path / "dark.png", rows, step=0, held_out=True)
    assert (shades(tmp_path / "dark.png") < 100) == (dtype == "uint8")


def test_a_coarse_image_has_the_colours_of_its_truth(tmp_path: Path) -> None:
    from PIL import Image

    made = np.full((2, 3, 8, 8), 100.0)
    made[1, 0] = 200
    pictures = []
    for alike in (True, False):
        path = sample_grid(tmp_path / "a.png", made, made, given=0.5 * made + 50, alike=alike, value_range=(0, 255))
        pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
        pictures.append({tuple(colour) for colour in pixels.tolist()})
    assert (150, 100, 100) in pictures[0]
    assert (150, 100, 100) not in pictures[1]


@pytest.mark.parametrize("config", [FlowConfig(coarse=2, sampling=FEW), FlowConfig(sampling=replace(GUIDED, steps=3))])
def test_the_example_is_sampled_in_small_batches(config: Any, tmp_path: Path) -> None:
    model = replace(DIT, condition_channels=2 if config.coarse else 0)
    objective, batch = config.build(model, STATISTICS), batch_of(model)
    oracle = Oracle(objective)
    made, shown = objective.example(batch, Draws(0, batch.counters), oracle, size=2)
    assert made.shape == batch.values.shape
    assert max(len(asked["x"]) for asked in oracle.asked) == 2
    again, _ = objective.example(batch, Draws(0, batch.counters), Oracle(objective), size=100)
    assert torch.allclose(made, again, atol=1e-4)
    objective.decode = lambda values: values.repeat(1, 1, 2, 2)
    caption = objective.draw(tmp_path / "picture.png", objective.rows(batch, made, shown), step=7, held_out=True)
    assert caption.startswith("step 7: samples of")
    assert (tmp_path / "picture.png").stat().st_size > 1000
