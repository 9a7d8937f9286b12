"""The small parts of training: schedules, optimizer groups, moving average, meters, peaks and settings."""

import math
import re
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_recipe
from torch import nn

from vitrail.data.batch import Batch
from vitrail.data.order.mixture import Groups
from vitrail.diffusion import SamplingConfig
from vitrail.errors import UserError
from vitrail.layers.flops import PEAKS_BF16, Flops, peak_tflops
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.tokens import TokenAxes
from vitrail.models import DecoderConfig, EncoderConfig, MAEConfig, ViTConfig
from vitrail.models.mae import RandomMask
from vitrail.models.model import Model
from vitrail.objectives.classify import ClassifyConfig
from vitrail.objectives.denoise import DenoiseConfig
from vitrail.objectives.flow import FlowConfig
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.objectives.segment import SegmentConfig
from vitrail.parallel.mesh import Layout
from vitrail.parallel.split import Split
from vitrail.recipe import Duration, config, kinds, load_recipe, sections, steps_of
from vitrail.training import evaluate
from vitrail.training import evaluate as meters
from vitrail.training.evaluate import WARM_UP_STEPS, Meter
from vitrail.training.optimizers.adam import AdamConfig, AdamWConfig
from vitrail.training.optimizers.groups import FROZEN, find_layers, group_table
from vitrail.training.optimizers.lion import LionConfig
from vitrail.training.optimizers.muon import MuonConfig
from vitrail.training.optimizers.optimizer import (
    Group,
    GroupRule,
    Optimizer,
    make_groups,
    named_state,
    restore_state,
)
from vitrail.training.optimizers.optimizer import (
    step as take_step,
)
from vitrail.training.optimizers.sgd import SGDConfig
from vitrail.training.schedule import ConstantConfig, CosineConfig, LinearConfig, in_steps
from vitrail.training.trainer import EMA

# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-8),
        (1, 1.1009e-7),
        (500, 5.0055e-5),
        (999, 1e-4),
        (1000, 1e-4),
        (10500, 5.0005e-5),
        (20000, 1e-8),
        (25000, 1e-8),  # where a cosine that goes on would rise again, to 1.614e-5
    ],
)
def test_cosine_between_two_small_rates(step: int, rate: float) -> None:
    schedule = CosineConfig(start=1e-8, end=1e-8)
    assert schedule.rate(step, base=1e-4, warmup=1000, total=20000) == pytest.approx(rate, rel=1e-4)


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [(0, 0.000999), (999, 0.999001), (1000, 1.0), (50500, 0.5), (99999, 1.0101e-5), (100000, 0.0), (150000, 0.0)],
)
def test_linear_after_an_even_warm_up(step: int, multiplier: float) -> None:
    found = LinearConfig().rate(step, base=1.0, warmup=1000, total=100000)
    assert found == pytest.approx(multiplier, rel=1e-3, abs=1e-12)


def test_constant() -> None:
    rates = [ConstantConfig().rate(step, base=0.1, warmup=4, total=10) for step in range(12)]
    assert rates[:4] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert rates[4:] == [0.1] * 8


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from([kinds.find("schedule", name) for name in kinds.BUILT_IN["schedule"]]),
    start=st.one_of(st.none(), st.floats(0, 1e-3)),
    end=st.floats(0, 1e-3),
    warmup=st.integers(0, 40),
    total=st.integers(1, 60),
)
def test_schedules_rise_to_the_base_and_then_only_fall(kind, start, end, warmup: int, total: int) -> None:
    schedule = kind(start=start, end=end)
    rates = [schedule.rate(step, base=1e-3, warmup=warmup, total=total) for step in range(total + warmup + 20)]
    assert all(0 <= rate <= 1e-3 * (1 + 1e-9) for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(a <= b + 1e-15 for a, b in pairwise(rising))
    assert all(a >= b - 1e-15 for a, b in pairwise(falling))
    assert falling[0] == pytest.approx(1e-3)
    last = schedule.rate(total + warmup, base=1e-3, warmup=warmup, total=total)
    assert last == pytest.approx(1e-3 if kind is ConstantConfig else end, abs=1e-15)


def test_durations_of_a_schedule_are_counted_in_steps() -> None:
    @config
    class OwnConfig(LinearConfig):
        at: tuple[Duration, ...] = ()
        rest: Duration | None = None
        hold: Duration | None = None
        share: float = 0.5

    own = OwnConfig(steps="2 epochs", warmup="10%", at=(3, "50%", "100%"), hold="16 samples")
    found = in_steps(own, partial(steps_of, total=200, batch=8))
    assert found == OwnConfig(steps="2 epochs", warmup=20, at=(3, 100, 200), hold=2)


def test_a_base_of_nothing_but_warm_up() -> None:
    rates = [LinearConfig().rate(step, base=1.0, warmup=10, total=10) for step in range(10)]
    assert rates == pytest.approx([(i + 1) / 11 for i in range(10)])


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rates_may_grow_with_the_batch(scaling: Any, factor: float) -> None:
    for kind in (AdamWConfig, SGDConfig):
        assert kind(lr=1e-3, lr_scaling=scaling).base_rate(1024) == pytest.approx(1e-3 * factor)
        assert kind(lr=1e-3, lr_scaling=scaling).base_rate(256) == pytest.approx(1e-3)


# ---------------------------------------------------------------- settings that cannot be meant

REFUSED = {
    "optimizer.lr=-1": "lr -1.0 must not be negative",
    "optimizer.weight_decay=-0.1": "weight_decay -0.1 must not be negative",
    "optimizer.clip=0": "clip 0.0 must be above 0; use null for no clipping",
    "optimizer.clip=-1": "clip -1.0 must be above 0",
    "optimizer.eps=-1": "eps -1.0 must not be negative",
    "optimizer.betas=[1.0, 0.9]": "betas [1.0, 0.9] must each be at least 0 and below 1",
    "optimizer.betas=[0.9]": "optimizer.betas.1: missing",
    "optimizer.betas=[0.9, 0.9, 0.9]": "at most 2 items",
    "optimizer={kind: sgd, momentum: 1}": "momentum 1.0 must be at least 0 and below 1",
    "optimizer.groups=[{match: a, lr: -1}]": "optimizer.groups.0: lr -1.0 must not be negative",
    "optimizer.groups=[{match: '('}]": "not a regular expression",
    "schedule.start=-1": "start -1.0 must not be negative",
    "schedule.end=-1": "end -1.0 must not be negative",
    "model.encoder.patch=0": "patch 0 must be at least 1",
    "model.encoder.patch=[4, 4, -4]": "must be at least 1 voxel along every axis",
    "model.encoder.patch=[]": "must be at least 1 voxel along every axis",
    "model.encoder.depth=0": "depth 0 must be at least 1",
    "model.encoder.hidden=0": "hidden 0 must be at least 1",
    "model.encoder.mlp_ratio=0": "mlp_ratio 0.0 must be above 0",
    "model.encoder.registers=-1": "registers -1 must be at least 0",
    "model.encoder.theta=0": "theta 0.0 must be above 0",
    "model.encoder.eps=-1": "eps -1.0 must not be negative",
    "model.encoder.drop_path=1": "drop_path 1.0 must be at least 0 and below 1",
    "model.decoder.hidden=-1": "hidden -1 must be at least 1",
    "model.decoder.mlp_ratio=-1": "mlp_ratio -1.0 must be above 0",
    "model.decoder.drop_path=-1": "drop_path -1.0 must be at least 0 and below 1",
    "model.decoder.depth=0": "depth 0 must be at least 1",
    "model.mask={kind: block, block: 0}": "block 0 must be at least 1 token",
    "model.mask.ratio=1": "ratio 1.0 must lie between 0 and 1",
}


@pytest.mark.parametrize("change", REFUSED)
def test_settings_that_cannot_be_meant_are_refused(change: str, tmp_path) -> None:
    recipe = tiny_recipe(tmp_path / "v.zarr", tmp_path / "run")
    load_recipe(recipe)  # fine without the change
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, [change])
    message = str(caught.value)
    assert message.startswith(re.match(r"\w+", change).group())
    assert REFUSED[change] in message
    assert "\n" not in message


# What a recipe gets that does not say otherwise; a change of these is another training of everybody's recipes.
DEFAULTS: dict[Any, dict[str, Any]] = {
    AdamWConfig: {
        "lr": 1e-3,
        "weight_decay": 0.05,
        "clip": 1.0,
        "lr_scaling": "none",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
    },
    SGDConfig: {"lr": 1e-3, "weight_decay": 0.05, "clip": 1.0, "lr_scaling": "none", "momentum": 0.9},
    CosineConfig: {"warmup": 0, "start": None, "end": 0.0},
    LinearConfig: {"warmup": 0, "start": None, "end": 0.0},
    ConstantConfig: {"warmup": 0, "start": None, "end": 0.0},
    RandomMask: {"ratio": 0.75},
    ReconstructConfig: {"target": "raw", "on": "hidden"},
    ClassifyConfig: {"smoothing": 0.0},
    SegmentConfig: {"loss": "dice_ce", "squared": True, "smooth": (0.0, 1e-6), "background": None, "ignore": None},
    FlowConfig: {"times": "uniform", "mean": 0.0, "std": 1.0, "shift": 1.0, "condition": (), "coarse": None},
    DenoiseConfig: {"predict": "noise", "steps": 1000, "schedule": "linear", "zero_snr": False, "min_snr": None},
    SamplingConfig: {"sampler": "auto", "steps": 25, "guidance": 1.0, "interval": (0.0, 1.0), "clip": True},
    sections.EMA: {"decay": 0.999},
    sections.Precision: {"compute": "auto", "reduce": "fp32", "float8_layers": "auto"},
    sections.Eval: {"every": "10%", "samples": "auto"},
    sections.Checkpoint: {"every": "10%", "keep": 2, "best": None, "background": True},
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults(kind: Any) -> None:
    made = kind()
    assert {key: getattr(made, key) for key in DEFAULTS[kind]} == DEFAULTS[kind]


# ---------------------------------------------------------------- parameter groups


def build(config: Any) -> Model:
    with torch.device("meta"):
        model = config.build()
    rules = init_rules(model)
    model.to_empty(device="cpu")
    initialise(model, rules, 0)
    return model


@pytest.fixture
def model() -> Model:
    """A model with every sort of parameter."""
    return build(
        MAEConfig(
            encoder=EncoderConfig(
                width=16,
                depth=2,
                heads=2,
                patch=4,
                positions="learned",
                cls_token=True,
                registers=2,
                layer_scale=1e-5,
                qk_norm=True,
            ),
            decoder=DecoderConfig(kind="cross", width=8, depth=1, heads=2),
            ndim=2,
            channels=1,
            shape=16,
        )
    )


def names_of(groups: list[Group], **wanted: Any) -> set[str]:
    return {n for g in groups if all(getattr(g, k) == v for k, v in wanted.items()) for n in g.names}


def test_only_weight_matrices_decay(model: Model) -> None:
    groups = make_groups(model, AdamWConfig(weight_decay=0.05))
    decayed, spared = names_of(groups, weight_decay=0.05), names_of(groups, weight_decay=0.0)
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    assert decayed | spared == shapes.keys()
    assert not decayed & spared
    assert all(name.endswith(".weight") and shapes[name] == 2 for name in decayed)
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert decayed == linear
    for part in ("prefix_tokens", "pos_embed.table", "mask_token", "norm", "gamma", "bias"):
        assert any(part in name for name in spared), part
        assert not any(part in name for name in decayed), part


def test_the_class_token_and_positions_of_a_vit_do_not_decay() -> None:
    vit = build(
        ViTConfig(
            width=8, depth=1, heads=2, patch=4, positions="learned", shape=8, cls_token=True, channels=1, classes=3
        )
    )
    spared = names_of(make_groups(vit, AdamWConfig()), weight_decay=0.0)
    assert {"encoder.prefix_tokens", "encoder.pos_embed.table", "head.bias"} <= spared
    assert "head.weight" not in spared


def test_the_table_counts_what_is_there(model: Model) -> None:
    settings_ = AdamWConfig(lr=1e-3, weight_decay=0.05, groups=(GroupRule(match="decoder", lr=0.1),))
    optimizer = Optimizer(make_groups(model, settings_))
    table = group_table(optimizer, 2e-3)
    assert sum(row["parameters"] for row in table) == sum(p.numel() for p in model.parameters())
    assert sum(row["tensors"] for row in table) == len(list(model.parameters()))
    assert len({row["name"] for row in table}) == len(table) == 4
    for row in table:
        mine = "decoder" in row["name"]
        assert row["lr"] == pytest.approx(2e-4 if mine else 2e-3)
        assert row["weight_decay"] == (0.0 if "no decay" in row["name"] else 0.05)


def test_the_first_rule_that_matches_decides(model: Model) -> None:
    rules = (
        GroupRule(match=r"blocks\.0\.", lr=0.5, weight_decay=0.2),
        GroupRule(match=r"^encoder\.", lr=0.1),
    )
    groups = make_groups(model, SGDConfig(weight_decay=0.05, groups=rules))
    optimizer = Optimizer(groups)
    take_step(optimizer, 1e-2)
    for group in optimizer.param_groups:
        for name in group.names:
            if "blocks.0." in name:  # the decoder's too
                assert (group.lr, group.weight_decay) == (pytest.approx(5e-3), 0.2), name
            elif name.startswith("encoder."):
                assert group.lr == pytest.approx(1e-3), name
            else:
                assert group.lr == pytest.approx(1e-2), name
    by_parameter = {id(p): n for g in optimizer.param_groups for n, p in zip(g.names, g.sources, strict=True)}
    assert by_parameter == {id(p): n for n, p in model.named_parameters()}


def test_frozen_parameters_are_left_out_and_need_no_gradient(model: Model) -> None:
    groups = make_groups(model, AdamWConfig(groups=(GroupRule(match="^encoder", freeze=True),)))
    assert all(name.startswith("decoder") for g in groups for name in g.names)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.startswith("decoder")


def test_the_table_counts_what_is_frozen(model: Model) -> None:
    optimizer = Optimizer(make_groups(model, AdamWConfig(groups=(GroupRule(match="^encoder", freeze=True),))))
    mine = list(model.encoder.parameters())
    *others, row = group_table(optimizer, 1e-3, mine)
    assert (row["name"], row["tensors"], row["lr"]) == (FROZEN, len(mine), 0.0)
    assert row["parameters"] == sum(p.numel() for p in mine)
    assert sum(r["parameters"] for r in [*others, row]) == sum(p.numel() for p in model.parameters())


def test_rates_fall_with_the_depth(model: Model) -> None:
    rules = (GroupRule(match=r"^encoder\.blocks\.1\.mlp", lr=3.0),)
    groups = make_groups(model, AdamWConfig(layer_decay=0.5, groups=rules))
    rates = {name: group.lr_multiplier for group in groups for name in group.names}
    assert set(rates) == {name for name, _ in model.named_parameters()}
    depth = model.encoder.depth
    for name, rate in rates.items():
        if name.startswith("encoder.blocks."):
            number = int(name.split(".")[2])
            wanted = 0.5 ** (depth - number) * (3.0 if number == 1 and ".mlp" in name else 1.0)
        elif name.startswith("encoder.") and "encoder.norm" not in name:
            wanted = 0.5 ** (depth + 1)
        else:  # the last norm and the decoder
            wanted = 1.0
        assert rate == pytest.approx(wanted), name
    assert [g.lr_multiplier for g in groups] == sorted(g.lr_multiplier for g in groups)
    assert len({g.name for g in groups}) == len(groups)
    # A rank of a pipeline that has but the first block gives it the same rate.
    names, model.encoder.blocks = list(rates), model.encoder.blocks[:1]
    for group in make_groups(model, AdamWConfig(layer_decay=0.5), names):
        for name in group.names:
            assert group.lr_multiplier == pytest.approx(rates[name]), name


def test_a_decay_of_layers_that_cannot_be_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match=r"layer_decay 0\.0 must be above 0 and at most 1, such as 0\.75"):
        AdamWConfig(layer_decay=0.0)
    with pytest.raises(UserError, match=r"optimizer\.layer_decay: this model has no encoder with blocks"):
        find_layers(["encoder.first.weight"])


def test_a_rule_that_matches_nothing_is_refused(model: Model) -> None:
    with pytest.raises(UserError, match=r"optimizer.groups: 'block\\\\\.7' matches no parameter.*encoder"):
        make_groups(model, AdamWConfig(groups=(GroupRule(match=r"block\.7"),)))
    shadowed = (GroupRule(match="encoder"), GroupRule(match="encoder.blocks"))
    with pytest.raises(UserError, match=r"'encoder\.blocks' matches no parameter that an earlier rule leaves"):
        make_groups(model, AdamWConfig(groups=shadowed))


def test_freezing_everything_is_refused(model: Model) -> None:
    with pytest.raises(UserError, match="every parameter is frozen; leave some to train"):
        make_groups(model, AdamWConfig(groups=(GroupRule(match="", freeze=True),)))


EVERY = [AdamWConfig(), AdamConfig(weight_decay=0.1), SGDConfig(), SGDConfig(momentum=0.0), LionConfig(), MuonConfig()]


@pytest.mark.parametrize("settings_", EVERY)
def test_the_state_of_an_optimizer_by_name_comes_back(model: Model, settings_: Any) -> None:
    """Two steps, then one more by the original and by a copy that was restored from names."""
    other = build(model.config)
    other.load_state_dict(model.state_dict())
    one, two = (Optimizer(make_groups(m, settings_)) for m in (model, other))

    def step(model: Model, optimizer: Any, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        take_step(optimizer, 1e-2)

    for number in range(2):
        step(model, one, number)
    saved = {name: tensor.clone() for name, tensor in named_state(one).items()}
    other.load_state_dict(model.state_dict())
    moments: dict[str, list[str]] = {}
    for name in saved:
        parameter, _, moment = name.rpartition(".")
        moments.setdefault(parameter, []).append(moment)
    for name, tensor in restore_state(two, moments, 2).items():
        tensor.copy_(saved[name])
    assert named_state(two).keys() == saved.keys()
    step(model, one, 2)
    step(other, two, 2)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_other_moments_are_refused(model: Model) -> None:
    settings_ = AdamWConfig()
    optimizer = Optimizer(make_groups(model, settings_))
    first, right = "encoder.norm.weight", ["exp_avg", "exp_avg_sq"]
    assert first in {name for group in optimizer.param_groups for name in group.names}
    assert set(restore_state(optimizer, {first: right}, 2)) == {f"{first}.{moment}" for moment in right}
    for wrong in (right[:-1], [*right, "other"], [f"m{i}" for i in range(10**5)]):
        with pytest.raises(ValueError, match=f"{first!r} has the moments .* in it, this optimizer has") as refused:
            restore_state(optimizer, {first: wrong}, 2)
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("settings_", EVERY)
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_step_that_is_skipped_never_was(settings_: Any, skipped: int) -> None:
    """Neither a first one, before there is any state, nor a later one: momentum and step counts go on as without it."""
    models = [
        build(ViTConfig(ndim=2, channels=1, shape=8, patch=4, width=8, depth=1, heads=1, classes=2)) for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())
    one, two = (Optimizer(make_groups(m, settings_)) for m in models)
    for number in range(3):
        for model in models:
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        if number == skipped:
            for parameter in models[0].parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
            take_step(one, 1e-2, torch.ones(()))
        else:
            take_step(one, 1e-2, torch.zeros(()))
            take_step(two, 1e-2)
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), name
    states = [named_state(optimizer) for optimizer in (one, two)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert {float(state["step"]) for state in one.state.values() if "step" in state} <= {2.0}


# ---------------------------------------------------------------- moving average


def test_the_average_is_a_plain_recursion() -> None:
    module = nn.Linear(3, 2)
    ema = EMA(FlowOf(module), decay=0.9)
    plain = {n: p.detach().clone().double() for n, p in module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 40):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        ema.owe(step)
        ema.settle()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, parameter in module.named_parameters():
            plain[name] = decay * plain[name] + (1 - decay) * parameter.detach().double()
    for name, average in ema.average.items():
        torch.testing.assert_close(average.double(), plain[name], rtol=1e-5, atol=1e-6)


def test_a_young_average_forgets_its_start() -> None:
    """From 0 to 1: after 10 steps 0.999 alone would be at 0.01."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    ema = EMA(FlowOf(module), decay=0.999)
    nn.init.ones_(module.weight)
    for step in range(1, 11):
        ema.owe(step)
        ema.settle()
    assert ema.average["weight"].item() > 0.95
    for _ in range(3):  # an old one forgets slowly
        before = ema.average["weight"].item()
        nn.init.zeros_(module.weight)
        ema.owe(10**6)
        assert ema.average["weight"].item() == pytest.approx(0.999 * before, rel=1e-5)


def test_swapping_is_exact_and_comes_back() -> None:
    module = nn.Linear(4, 4)
    ema = EMA(FlowOf(module), decay=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.2345678).add_(1e-7)
    ema.owe(100)
    raw = {n: p.detach().clone() for n, p in module.named_parameters()}
    average = {n: t.clone() for n, t in ema.average.items()}
    addresses = [p.data_ptr() for p in module.parameters()]
    x = torch.randn(2, 4)

    def fail_inside() -> None:
        with ema.swapped():
            assert all(torch.equal(p, average[n]) for n, p in module.named_parameters())
            expected = nn.functional.linear(x, average["weight"], average["bias"])
            assert torch.equal(module(x), expected)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert all(torch.equal(p, raw[n]) for n, p in module.named_parameters())
    assert all(torch.equal(t, average[n]) for n, t in ema.average.items())
    assert addresses == [p.data_ptr() for p in module.parameters()]


def test_an_average_that_is_behind_is_brought_up_to_date_once() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    ema = EMA(FlowOf(module), decay=0.5)
    nn.init.ones_(module.weight)
    ema.owe(1000)
    with ema.swapped():  # whoever asks for it, has it whole
        assert module.weight.item() == 0.5
    ema.settle()
    assert ema.average["weight"].item() == 0.5
    ema.owe(1001)
    ema.owe(1002)
    assert ema.average["weight"].item() == 0.875


def test_the_average_is_no_view_of_the_weights() -> None:
    module = nn.Linear(2, 2)
    ema = EMA(FlowOf(module), decay=0.9)
    before = ema.average["weight"].clone()
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(ema.average["weight"], before)
    assert not any(t.requires_grad for t in ema.average.values())


# ---------------------------------------------------------------- validation


class FlowOf(SimpleNamespace):
    """A plain module as a flow of one rank."""

    def __init__(self, model: nn.Module, **facts: Any):
        nothing: Any = {"forget_gathered": lambda: None, "evaluating": nullcontext}
        super().__init__(model=model, split=Split(), **nothing, **facts)

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class CountingObjective:
    """Measures which samples it was given: their number, and a power of two for each."""

    axes = TokenAxes()

    def __init__(self) -> None:
        self.calls = 0

    def prepare(self, batch: Batch, draws: Any, *, evaluating: bool) -> tuple[dict[str, Any], Any]:
        assert evaluating
        assert draws.counters == batch.counters
        return {"x": torch.tensor(batch.counters, dtype=torch.float64)}, None

    def measure(self, output: torch.Tensor, targets: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"which": (2.0**output).sum(), "number": torch.tensor(float(len(output)), dtype=torch.float64)}

    def summarise(self, sums: dict[str, float]) -> dict[str, float]:
        return sums

    def count(self, output: torch.Tensor, targets: Any) -> dict[str, torch.Tensor]:
        return {}

    def each(self, output: torch.Tensor, targets: Any) -> None:
        return None


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 5, 8])
def test_each_validation_sample_counts_once_at_every_world_size(
    world: int, batch: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks one after another; forwards are collective, so each rank must run as many as any other."""
    tables, calls = [], set()

    def load(counters: Any) -> Batch:
        numbers = list(counters)
        return Batch(numbers, torch.zeros(len(numbers), 1))

    loader = SimpleNamespace(load=load, sampler=None)
    calls_of = {"all_reduce": lambda t: tables.append(t.clone()), "get_world_size": lambda: world}
    monkeypatch.setattr(evaluate, "dist", SimpleNamespace(**calls_of))
    for rank in range(world):
        objective, ticks = CountingObjective(), []
        evaluator = evaluate.Evaluator(objective, loader, seed=0, samples=samples, batch=batch)  # type: ignore[arg-type]
        model = nn.Identity()
        model.forward = lambda x: x  # type: ignore[method-assign]
        flow = FlowOf(model, data_rank=rank, layout=Layout(world, 1, reshard=False))
        evaluator.metrics(flow, tick=lambda ticks=ticks: ticks.append(1))  # type: ignore[arg-type]
        assert model.training
        assert len(ticks) == objective.calls
        calls.add(objective.calls)
    number, which = torch.stack(tables).sum(dim=0).tolist()
    assert (number, which) == (samples, 2.0**samples - 1)
    assert len(calls) == 1


def test_samples_with_different_variables_are_measured_apart() -> None:
    class Turns(Groups):
        def __init__(self) -> None:
            pass

        def places(self, counters: Any) -> tuple[Any, Any]:
            return counters % 3 // 2, counters

    loader = SimpleNamespace(sampler=Turns())
    evaluator = evaluate.Evaluator(CountingObjective(), loader, seed=0, samples=9, batch=4)  # type: ignore[arg-type]
    assert evaluator.batches(range(9)) == [[0, 1, 3, 4], [6, 7], [2, 5, 8]]


# ---------------------------------------------------------------- meters


def make_meter(**changes: Any) -> Meter:
    settings_: dict[str, Any] = {
        "batch": 8,
        "tokens": 64,
        "flops": Flops(linear=4e9, attention=1e9, outside=1e9),
        "world": 2,
        "recompute": False,
        "device": torch.device("cpu"),
    }
    return Meter(**(settings_ | changes))


def test_warm_up_is_left_out() -> None:
    meter = make_meter()
    for _ in range(WARM_UP_STEPS):
        meter.add(100.0, 50.0)
        assert meter.read().keys() == {"memory_gib"}
    for _ in range(4):
        meter.add(0.5, 0.125)
    found = meter.read()
    assert found["step_seconds"] == 0.5
    assert found["samples_per_s"] == 16.0
    assert found["tokens_per_s"] == 1024.0
    assert found["data_wait"] == 0.25
    # 16 samples/s of 3 x 6 GFLOP, on two devices.
    assert found["tflops"] == pytest.approx(16 * 18e9 / 2 / 1e12)
    assert found["mfu"] is None
    assert found["hfu"] is None


def test_a_reading_is_of_its_own_window() -> None:
    meter = make_meter()
    for seconds in [9.0] * WARM_UP_STEPS + [1.0, 1.0]:
        meter.add(seconds, 0.0)
    assert meter.read()["samples_per_s"] == 8.0
    for seconds in (1.0, 1.0, 4.0):
        meter.add(seconds, 2.0 if seconds == 4.0 else 0.0)
    found = meter.read()
    assert found["step_seconds"] == 1.0  # the median; the rate counts every second
    assert found["samples_per_s"] == 4.0
    assert found["data_wait"] == pytest.approx(1 / 3)
    assert meter.read().keys() == {"memory_gib"}  # nothing since


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989.4), ("NVIDIA GeForce RTX 9999", None)])
def test_utilisation_needs_a_known_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        get_device_name=lambda device: name,
        max_memory_allocated=lambda device: 3 * 2**30,
        max_memory_reserved=lambda device: 4 * 2**30,
        memory_stats=lambda device: {"num_alloc_retries": 2},
    )
    monkeypatch.setattr(meters.torch, "cuda", fake)
    readings = {}
    for recompute in (False, True):
        meter = make_meter(device=torch.device("cuda", 0), world=1, recompute=recompute)
        for _ in range(WARM_UP_STEPS + 1):
            meter.add(1e-3, 0.0)
        readings[recompute] = meter.read()
    found = readings[False]
    assert found["memory_gib"] == 3.0
    assert (found["reserved_gib"], found["alloc_retries"]) == (4.0, 2)
    tflops = 8e3 * 18e9 / 1e12
    assert found["tflops"] == pytest.approx(tflops)
    if peak is None:
        assert found["mfu"] is None
        assert found["hfu"] is None
        return
    assert found["mfu"] == pytest.approx(tflops / peak)
    # The flash backward does 2.5 times its forward; recomputation is the hardware's work, not the model's.
    assert found["hfu"] == pytest.approx(8e3 * (3 * 5e9 + 3.5e9) / 1e12 / peak)
    assert readings[True]["mfu"] == found["mfu"]
    assert readings[True]["hfu"] == pytest.approx(8e3 * (3 * 5e9 + 3.5e9 + 5e9) / 1e12 / peak)


def test_memory_of_this_process_is_plausible() -> None:
    assert 0.05 < meters.memory_gib(torch.device("cpu")) < 1024


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 990.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("nvidia a100-pcie-40gb", 312.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A1000 6GB Laptop GPU", None),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("Tesla V100-SXM2-16GB", None),
        ("CPU", None),
        ("", None),
    ],
)
def test_peaks(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_variants_stand_before_their_family() -> None:
    """Of two names where one holds the other the longer comes first, or its peak would never be found."""
    names = list(PEAKS_BF16)
    for earlier, name in enumerate(names):
        assert not any(name.lower() in later.lower() for later in names[earlier + 1 :]), name
        assert peak_tflops(f"Maker {name} 80GB") == PEAKS_BF16[name]
    assert all(math.isfinite(peak) and peak > 0 for peak in PEAKS_BF16.values())


def test_a_run_begun_before_a_key_existed_goes_on(tmp_path: Path) -> None:
    """Keys that came later are at their defaults in it."""
    from vitrail.recipe import load_recipe, yaml
    from vitrail.training.continuing import find_changes

    tree = {
        "run": {"name": "old", "steps": 4},
        "model": {"kind": "mae", "encoder": {"width": 24, "depth": 1, "heads": 2, "patch": 4}},
        "data": {"train": [{"path": "x.zarr", "kind": "ome_zarr"}], "crop": 16, "batch": 2},
    }
    recipe = load_recipe(tree)
    stored = recipe.to_tree()
    for key in ("tokens", "rope", "rope_scale", "variables", "residual"):
        del stored["model"]["encoder"][key]
    (tmp_path / "recipe.yaml").write_text(yaml.dump(stored))
    find_changes(tmp_path, recipe)
    stored["model"]["encoder"]["width"] = 48
    (tmp_path / "recipe.yaml").write_text(yaml.dump(stored))
    with pytest.raises(UserError, match="width: 48 became 24"):
        find_changes(tmp_path, recipe)


def test_a_run_from_before_scores_had_a_scale_keeps_its_trees(tmp_path: Path) -> None:
    """Its stored recipe lacks the key, whose default is not what the run did."""
    from vitrail.recipe import yaml
    from vitrail.recipe.load import find_recipe
    from vitrail.training.continuing import find_changes
    from vitrail.weights.runs import stored_recipe

    encoder = {"width": 24, "depth": 1, "heads": 2, "patch": 4, "tokens": {"kind": "adaptive", "length": 64}}
    data = {"train": [{"path": "x.zarr", "kind": "ome_zarr"}], "crop": 16, "batch": 2}
    model = {"kind": "mae", "ndim": 3, "encoder": encoder}
    recipe = load_recipe({"run": {"name": "old", "steps": 4, "dir": str(tmp_path)}, "model": model, "data": data})
    tree = recipe.to_tree()
    assert tree["model"]["encoder"]["tokens"]["score"].pop("scale") == "data"
    tree["parallel"]["attention"] = "flash3"
    (tmp_path / "recipe.yaml").write_text(yaml.dump(tree))
    found = find_recipe(tmp_path)
    for one in (found, stored_recipe({"recipe": tree})):
        assert one.model.encoder.tokens.score.scale == "crop"
        assert one.parallel.attention == "auto"
    find_changes(tmp_path, found)
    with pytest.raises(UserError, match=r"tokens.score.scale: 'crop' became 'data'"):
        find_changes(tmp_path, recipe)


def test_a_run_begun_before_two_names_scored_both_goes_on(tmp_path: Path) -> None:
    """It stored that class 0 does not count; a recipe that leaves this open is refused only where it means another."""
    from vitrail.recipe import yaml
    from vitrail.training.continuing import find_changes

    tree = {
        "run": {"name": "old", "steps": 4},
        "model": {"kind": "unetr", "encoder": {"width": 24, "depth": 4, "heads": 2, "patch": 4}, "classes": 2},
        "data": {"train": [{"path": "x.zarr", "kind": "ome_zarr"}], "crop": 16, "batch": 2},
    }
    for names, goes_on in ((["background", "cell"], True), (["membrane", "cell"], False)):
        recipe = load_recipe(tree | {"objective": {"kind": "segment", "names": names}})
        stored = recipe.to_tree()
        assert stored["objective"]["background"] is None
        stored["objective"]["background"] = False
        (tmp_path / "recipe.yaml").write_text(yaml.dump(stored))
        find_changes(tmp_path, load_recipe(stored))
        if goes_on:
            find_changes(tmp_path, recipe)
        else:
            with pytest.raises(UserError, match=r"objective.background: False became True"):
                find_changes(tmp_path, recipe)
