"""What a trace finds, against PyTorch's own counter and against what the models say of themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import recomputed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.cost import trace as tracing
from vitrail.cost.cluster import load_cluster
from vitrail.cost.recorder import Op, Recorder
from vitrail.cost.step import rate
from vitrail.cost.trace import build_objective, prepare, trace
from vitrail.cost.work import Key, Work, divided, key_of
from vitrail.errors import UserError
from vitrail.layers.backends import use_backend
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models import (
    AutoencoderConfig,
    DecoderConfig,
    DiffusionDecoderConfig,
    DiffusionViTConfig,
    DiTConfig,
    EncoderConfig,
    MAEConfig,
    SAPConfig,
    StudyViTConfig,
    UNETRConfig,
    ViTConfig,
)
from vitrail.objectives.autoencode import AutoencodeConfig
from vitrail.objectives.classify import ClassifyConfig
from vitrail.objectives.denoise import DenoiseConfig
from vitrail.objectives.flow import FlowConfig
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.objectives.segment import SegmentConfig
from vitrail.parallel import recompute
from vitrail.recipe.sections import Chunk, Precision, Recompute

ENCODER = EncoderConfig(width=64, depth=4, heads=4, patch=4)
GROUPED = replace(ENCODER, positions="rope", mlp="swiglu", kv_heads=2, norm="rms", bias=False)
ADAPTIVE = replace(ENCODER, tokens=AdaptiveTokens(length=25))
NAMED = VariablesConfig(known=("a", "b", "c"))
VIT: dict[str, Any] = {"width": 64, "depth": 4, "heads": 4, "patch": 4, "channels": 3, "shape": 32, "classes": 10}
SMALL: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2}
PIXELS: dict[str, Any] = {"channels": 3, "classes": 3, "shape": 32}


def mae(kind: str, *, ratio: float = 1.0, encoder: EncoderConfig = ENCODER, **more: Any) -> tuple[Any, Any]:
    decoder = DecoderConfig(kind=kind, decode_ratio=ratio, **SMALL)  # type: ignore[arg-type]
    config = MAEConfig(encoder=encoder, decoder=decoder, **({"channels": 3, "shape": 32} | more))
    return config, ReconstructConfig(on="all" if kind == "linear" else "hidden")


VOLUME: dict[str, Any] = {"encoder": GROUPED, "ndim": 3, "channels": 1, "shape": 16}
CASES: dict[str, tuple[Any, Any]] = {
    "vit": (ViTConfig(**VIT), ClassifyConfig()),
    "vit, attention pool": (ViTConfig(**VIT, pool="attention", cls_token=True, layer_scale=0.1), ClassifyConfig()),
    "vit, adaptive": (ViTConfig(**VIT, tokens=AdaptiveTokens(length=25)), ClassifyConfig()),
    "vit, variables": (ViTConfig(**(VIT | {"channels": None}), variables=NAMED), ClassifyConfig()),
    "study vit": (StudyViTConfig(**VIT), ClassifyConfig()),
    "mae self": mae("self"),
    "mae self, half": mae("self", ratio=0.5),
    "mae cross": mae("cross"),
    "mae cross, quarter": mae("cross", ratio=0.25),
    "mae linear": mae("linear"),
    "mae 3-D self": mae("self", ratio=0.5, **VOLUME),
    "mae 3-D cross": mae("cross", **VOLUME),
    "mae 3-D linear": mae("linear", **VOLUME),
    "mae adaptive": mae("self", encoder=ADAPTIVE),
    "mae variables": mae("self", encoder=replace(ENCODER, variables=NAMED)),
    "mae variables apart": mae("cross", encoder=replace(ENCODER, variables=replace(NAMED, aggregate="none"))),
    "unetr": (UNETRConfig(encoder=ENCODER, **PIXELS), SegmentConfig()),
    "unetr 3-D": (UNETRConfig(encoder=GROUPED, ndim=3, channels=1, classes=3, shape=16), SegmentConfig()),
    "unetr linear": (UNETRConfig(encoder=ENCODER, decoder="linear", **PIXELS), SegmentConfig()),
    "unetr without skips": (UNETRConfig(encoder=ENCODER, skips=False, **PIXELS), SegmentConfig()),
    "unetr adaptive": (UNETRConfig(encoder=ADAPTIVE, **PIXELS), SegmentConfig()),
    "sap": (SAPConfig(encoder=ENCODER, **PIXELS), SegmentConfig()),
    "dit": (DiTConfig(width=64, depth=4, heads=4, patch=4, channels=4, shape=32, classes=10), DenoiseConfig()),
    "ditan": (DiTConfig(size="0.5B/2", width=64, depth=4, heads=4, channels=4, shape=16), FlowConfig()),
    "diffusion vit": (
        DiffusionViTConfig(encoder=ENCODER, decoder=DiffusionDecoderConfig(**SMALL), channels=3, shape=32),
        DenoiseConfig(),
    ),
    "autoencoder": (AutoencoderConfig(channels=3, shape=32), AutoencodeConfig()),
}
CHOICES: dict[str, Any] = {"none": "none", "full": "full", "every 2": Recompute(every=2), "keep": "keep"}


def choice_of(name: str, config: Any) -> Any:
    if CHOICES[name] != "keep":
        return CHOICES[name]
    with torch.device("meta"):
        roles = recompute.all_roles(config.build().blocks())
    # Not attention: as plain products, which are what PyTorch counts, its scores are never kept.
    return Recompute(keep=("qkv", "proj")) if "qkv" in roles else "full"


# ---------------------------------------------------------------- FLOPs


def traced(work: Work, kind: str = "all") -> float:
    """FLOPs of a sample."""
    names = ("forward", "backward", "again") if kind == "all" else (kind,)
    ops = [op for s in work.segments for name in names for op in getattr(s, name) for _ in range(s.count)]
    return sum(op.flops for op in ops) / work.samples


FAST = ("vit", "mae cross", "dit")  # of each kind the tests of the models have one, too


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_flops_of_every_model_and_mode_equal_what_pytorch_counts(name: str) -> None:
    """Forward and backward, with gradients of the inputs; what the trace says is computed again is taken off."""
    config, objective = CASES[name]
    built = build_objective(objective, config)
    inputs, targets, _ = prepare(objective, built, config, 2, 1)
    for key in ("valid", "query_valid"):
        inputs.pop(key, None)  # a mask would be counted by other operations
    for key in ("x", "image"):
        if key in inputs:
            inputs[key] = inputs[key].detach().requires_grad_()
    for choice in CHOICES:
        with torch.device("meta"):
            model = config.build()
        recomputed(model.blocks(), choice_of(choice, config))
        # Attention as plain products is counted, forward and (twice) backward.
        with use_backend("math"), FlopCounterMode(display=False) as counter:
            built.loss(model(**inputs), targets).sum.backward()
        work = trace(config, objective, samples=1, compute="bf16", recompute=choice_of(choice, config))
        flops = built.flops(model)
        assert counter.get_total_flops() / 2 - traced(work, "again") == pytest.approx(flops.training, rel=0.01), choice
        assert (choice != "none") == bool(traced(work, "again"))


@pytest.mark.parametrize("name", CASES)
def test_a_trace_has_the_flops_and_parameters_of_the_model(name: str) -> None:
    config, objective = CASES[name]
    work = trace(config, objective, samples=1, compute="bf16")
    flops = work.flops
    assert traced(work, "forward") == pytest.approx(flops.forward, rel=1e-6)
    most = 2 * (flops.linear + flops.outside) + 2.5 * flops.attention
    first = flops.outside + 0.005 * most  # gradients of the inputs are part of these, and nothing asks for them
    assert most - first <= traced(work, "backward") <= 1.001 * most
    with torch.device("meta"):
        parameters = sum(p.numel() for p in config.build().parameters())
    assert sum(s.parameters * s.count for s in work.segments) == parameters


# ---------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("vit", "none"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("dit", "full"), ("mae 3-D cross", "keep"))),
    ],
)
def test_compiled_work_is_the_same_but_fused(name: str, choice: str) -> None:
    config, objective = CASES[name]
    options: dict[str, Any] = {"samples": 8, "compute": "bf16", "recompute": choice_of(choice, config)}
    eager, compiled = (trace(config, objective, compiled=on, **options) for on in (False, True))
    assert traced(compiled) == pytest.approx(traced(eager), rel=1e-6)
    one, two = (next(s for s in work.segments if "blocks" in s.name) for work in (eager, compiled))
    assert len(two.forward) < len(one.forward)
    for way in ("forward", "backward"):  # sums over rows read again what eager kernels of a norm sum up in passing
        assert sum(op.bytes for op in getattr(two, way)) < 1.02 * sum(op.bytes for op in getattr(one, way))
    assert two.saved == pytest.approx(one.saved, rel=0.35)  # rotations in fp32 are saved by autograd alone
    assert two.saved <= one.saved * 1.01


def test_views_cost_nothing_however_many_an_operation_makes() -> None:
    """Queries, keys and values are three views that one split makes; attention alone reads them."""
    config, objective = CASES["vit"]
    eager, compiled = (
        next(s for s in trace(config, objective, samples=8, compute="bf16", compiled=on).segments if "blocks" in s.name)
        for on in (False, True)
    )
    for block in (eager, compiled):
        kinds = [op.kind for op in block.forward if op.bytes > 64]  # there is a number, too
        assert kinds[kinds.index("attention") - 1] == "gemm"


def seen(call: Callable[[], object]) -> list[Op]:
    with Recorder() as watcher:
        call()
    return watcher.phase.ops


def test_kernels_are_told_apart_by_how_they_go_through_memory() -> None:
    x, row = torch.empty(8, 16, device="meta"), torch.empty(16, device="meta")
    maps = torch.empty(2, 3, 8, 8, device="meta")
    cases = {
        "dense": lambda: x + x,
        "strided": lambda: x[:, ::2].clone(),
        "norm": lambda: F.layer_norm(x, [16]),
        "sum": lambda: x.sum(0),
        "maps": lambda: F.instance_norm(maps),
    }
    for walk, call in cases.items():
        assert [op.walk for op in seen(call)] == [walk]
    for call in (
        lambda: x * row,
        lambda: torch.cat([x, x]),
        lambda: x.t() + torch.empty(16, 8, device="meta"),
        lambda: x[:, ::2].mul_(2),
    ):
        assert [op.walk for op in seen(call)] == ["strided"]
    for call in (lambda: x.mean(-1), lambda: x[None] + x, lambda: x.t() * 2):
        assert [op.walk for op in seen(call)] == ["dense"]
    norm = torch.nn.LayerNorm(16, device="meta")
    y = norm(x)
    assert "norm_backward" in {op.walk for op in seen(lambda: y.sum().backward())}
    maps3 = torch.nn.ConvTranspose3d(8, 2, 2, device="meta")
    assert seen(lambda: maps3(torch.empty(1, 8, 4, 4, 4, device="meta")))[0].shape == (8, 2)


def test_bytes_are_those_that_move() -> None:
    x, table = torch.empty(8, 16, device="meta"), torch.empty(1000, 16, device="meta")
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    assert [op.bytes for op in seen(lambda: torch.zeros_like(x))] == [x.nbytes]
    assert [op.bytes for op in seen(lambda: x.zero_())] == [x.nbytes]
    assert [op.bytes for op in seen(lambda: x.copy_(torch.empty_like(x)))] == [2 * x.nbytes]
    assert [op.bytes for op in seen(lambda: F.embedding(ids, table))] == [2 * x.nbytes + ids.nbytes]


def test_divided_work_has_the_shapes_of_traced_work() -> None:
    def maps(work: Work) -> list[tuple[int, ...]]:
        return [op.shape for segment in work.segments for op in segment.forward if op.walk == "maps"]

    config, objective = CASES["unetr"]
    whole = trace(config, objective, samples=8, compute="bf16")
    for samples in (2, 64):
        one = divided(whole, samples=samples, tensor=1, context=1)
        assert maps(one) == maps(trace(config, objective, samples=samples, compute="bf16")) != []


@pytest.mark.parametrize("compiled", [False, True])
def test_products_of_linear_layers_of_blocks_know_their_layer(compiled: bool) -> None:
    """Those that float8 is for, one forward and two backward; not modulation, embeddings and heads."""
    config, objective = CASES["dit"]
    rows = 8 * 64  # samples, tokens

    def layers(work: Work, way: str) -> list[tuple[int, ...]]:
        return sorted(op.layer for segment in work.segments for op in getattr(segment, way) if op.layer)

    expected = [(rows, 64, 64), (rows, 64, 192), (rows, 64, 256), (rows, 64, 256)]  # four equal blocks are one segment
    work = trace(config, objective, samples=8, compute="bf16", compiled=compiled)
    assert layers(work, "forward") == expected
    assert layers(work, "backward") == sorted(2 * expected)
    both = trace(config, objective, samples=8, compute="bf16", compiled=compiled, tensor=2)
    assert layers(both, "forward") == [(rows, 32, 64), (rows, 64, 96), (rows, 64, 128), (rows, 64, 128)]
    rough = [
        (rows, min(sides), max(sides))
        for rows, *sides in layers(divided(work, samples=8, tensor=2, context=1), "forward")
    ]
    assert sorted(rough) == layers(both, "forward")
    tiny = divided(work, samples=1, tensor=1, context=1024)
    assert [layer[0] for layer in layers(tiny, "backward")] == [1] * 8


@pytest.mark.parametrize("context", [2, 4])
def test_ranks_that_share_tokens_fill_tiles_as_one_does(context: int) -> None:
    """They trade tokens for heads, so that each has all queries."""
    device = load_cluster("h200").device
    config, objective = CASES["dit"]
    whole = trace(config, objective, samples=8, compute="bf16")
    rates = [
        rate(
            next(op for s in work.segments for op in s.forward if op.kind == "attention"),
            device,
            Precision(compute="bf16"),
            "forward",
        )
        for work in (
            whole,
            divided(whole, samples=8, tensor=1, context=context),
            trace(config, objective, samples=8, compute="bf16", context=context),
        )
    ]
    assert rates[1] == rates[2] == rates[0]


@pytest.mark.slow
def test_masked_attention_is_compiled_with_its_backward() -> None:
    config, objective = CASES["vit, adaptive"]
    options: dict[str, Any] = {"samples": 8, "compute": "bf16"}
    for name in ("forward", "backward"):
        eager, compiled = (traced(trace(config, objective, compiled=on, **options), name) for on in (False, True))
        assert compiled == pytest.approx(eager, rel=1e-6)


# ---------------------------------------------------------------- what is kept


def test_what_a_block_keeps() -> None:
    """Input, both norms, qkv, attention, its projection's sum, hidden channels before and after GELU: 16 widths."""
    config = ViTConfig(size="S/16", channels=3, shape=224, classes=10)
    for compiled in (False, True):
        block = trace(config, ClassifyConfig(), samples=64, compute="bf16", compiled=compiled).segments[1]
        rows = 64 * 196
        statistics = rows * (4 * 4 + 6 * 4)  # mean and deviation of two norms, log-sum-exp of six heads; fp32
        assert block.count == 12
        assert block.saved == pytest.approx(16 * rows * 384 * 2 + statistics, rel=0.001)
        assert not block.recomputed
    for choice in ("full", Recompute(keep=("attention",))):
        assert trace(config, ClassifyConfig(), samples=1, compute="bf16", recompute=choice).segments[1].recomputed
    pieces = trace(config, ClassifyConfig(), samples=1, compute="bf16", chunk=Chunk(mlp=64)).segments[1]
    assert pieces.again
    assert not pieces.recomputed
    full = trace(config, ClassifyConfig(), samples=64, compute="bf16", recompute="full").segments[1]
    assert full.saved == 64 * 196 * 384 * 2
    assert full.peak > block.peak


def test_any_number_of_samples_lies_on_a_line() -> None:
    for name in ("vit", "mae cross", "ditan"):
        config, objective = CASES[name]
        options = tracing._Options("bf16", "none", False, Chunk(), 1, 1)
        found = trace(config, objective, samples=24, compute="bf16")
        direct = tracing._traced(key_of(config), key_of(objective), 24, options)
        assert found.samples == direct.samples == 24
        assert found.inputs == pytest.approx(direct.inputs, rel=0.001)
        assert found.loss_peak == pytest.approx(direct.loss_peak, rel=0.01, abs=4096)
        for one, two in zip(found.segments, direct.segments, strict=True):
            assert one.saved == pytest.approx(two.saved, rel=0.01, abs=8192)
            assert one.peak == pytest.approx(two.peak, rel=0.05, abs=1_000_000)
            assert [op.shape for op in one.forward] == [op.shape for op in two.forward]
            assert [op.flops for op in one.backward] == pytest.approx([op.flops for op in two.backward])


def test_pieces_hold_less() -> None:
    config, objective = CASES["mae 3-D cross"]
    options: dict[str, Any] = {"samples": 8, "compute": "bf16", "recompute": "full"}
    whole, pieces = (trace(config, objective, chunk=chunk, **options) for chunk in (Chunk(), Chunk(mlp=4)))
    assert max(s.peak for s in pieces.segments) < max(s.peak for s in whole.segments)


# ---------------------------------------------------------------- one rank of many


@pytest.mark.parametrize("name", ["vit", "mae 3-D cross", "ditan", "sap", "unetr adaptive"])
def test_ranks_share_the_work(name: str) -> None:
    config, objective = CASES[name]
    one = trace(config, objective, samples=1, compute="bf16")
    for options in ({"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}):
        part = trace(config, objective, samples=1, compute="bf16", **options)  # type: ignore[arg-type]
        ranks = options.get("tensor", 1) * options.get("context", 1)
        pairs = [(a, b) for a, b in zip(one.segments, part.segments, strict=True) if ".blocks" in f".{a.name}"]
        shared = [sum(op.flops for op in s.forward) * s.count for s in (a for a, _ in pairs)]
        mine = [sum(op.flops for op in s.forward) * s.count for s in (b for _, b in pairs)]
        assert sum(mine) == pytest.approx(sum(shared) / ranks, rel=0.15)  # tokens may not divide evenly
        big, small = pairs[0]
        assert (small.parameters == big.parameters) == (options.get("tensor", 1) == 1)
        assert small.saved < 0.75 * big.saved


def test_a_pipeline_is_cut_where_stages_cost_the_same() -> None:
    config, objective = CASES["vit"]
    whole = trace(config, objective, samples=1, compute="bf16")
    stages = [trace(config, objective, samples=1, compute="bf16", pipeline_rank=(rank, 2)) for rank in range(2)]
    assert sum(map(traced, stages)) == pytest.approx(traced(whole))
    assert traced(stages[0]) == pytest.approx(traced(stages[1]), rel=0.1)
    assert [bool(stage.loss) for stage in stages] == [False, True]
    assert sum(s.parameters * s.count for stage in stages for s in stage.segments) == sum(
        s.parameters * s.count for s in whole.segments
    )


def test_a_large_model_is_traced_block_by_block() -> None:
    config = ViTConfig(width=12288, depth=56, heads=64, patch=16, channels=48, shape=(128, 256), classes=10)
    work = trace(config, ClassifyConfig(), samples=4, compute="bf16", tensor=8)
    assert [segment.count for segment in work.segments] == [1, 56, 1, 1]
    assert 8 * 56 * work.segments[1].parameters == pytest.approx(101.5e9, rel=0.01)


LOADED = [("mae 3-D cross", True), ("ditan", True), ("unetr", True), ("unetr adaptive", False)]


@pytest.mark.parametrize(("name", "cut"), LOADED)
def test_ranks_that_share_a_sample_hold_what_the_loader_gives_them(name: str, cut: bool) -> None:
    """A slab of the values where the objective can do with one, else the whole; a divided trace says the same."""
    config, objective = CASES[name]
    one, part = (trace(config, objective, samples=8, compute="bf16", context=ranks) for ranks in (1, 2))
    assert bool(one.slabs) == cut
    assert part.raw == one.raw - one.slabs / 2
    rough = divided(one, samples=8, tensor=1, context=2)
    assert (rough.raw, rough.slabs) == (part.raw, part.slabs)
    assert rough.inputs == pytest.approx(part.inputs, rel=0.5)
    assert divided(one, samples=4, tensor=1, context=1).raw == one.raw / 2


def test_ranks_share_the_maps_of_a_decoder_of_convolutions() -> None:
    """Nearly all that is kept are maps; 6 planes of patches are 2 or 1 for each of four ranks."""
    encoder = replace(ENCODER, patch=8)
    config = UNETRConfig(encoder=encoder, ndim=2, channels=3, classes=3, shape=(48, 96), features=16)

    def kept(**ranks: int) -> float:
        work = trace(config, SegmentConfig(), samples=1, compute="fp32", **ranks)
        return sum(one.count * one.saved for one in work.segments)

    whole = kept()
    assert kept(context=2) < 0.6 * whole
    assert kept(context=4) < 0.45 * whole


def test_what_others_call_planes_is_left_alone() -> None:
    class Own(nn.Module):
        planes = 3

    config, _ = CASES["unetr"]
    with torch.device("meta"):
        model = config.build()
    model.own = Own()
    tracing._prepare(model, tracing._Options(context=2))
    assert model.own.planes == 3
    assert model.planes.parts == 2


# ---------------------------------------------------------------- inputs, and what is refused


def test_inputs_are_those_of_the_objective() -> None:
    config, objective = CASES["mae 3-D cross"]
    built = build_objective(objective, config)
    inputs, targets, raw = prepare(objective, built, config, 3, 1)
    visible, predicted = config.token_counts()
    assert tuple(inputs["x"].shape) == (3, visible, 64)
    assert inputs["x"].device.type == "meta"
    assert tuple(targets.values.shape) == (3, predicted, 64)
    assert raw.whole >= raw.slabs == 3 * 16**3 * 4
    assert prepare(objective, built, config, 3, 2)[2].slabs == raw.slabs // 2


def test_errors_say_what_to_do() -> None:
    config, objective = CASES["vit"]
    with pytest.raises(ValueError, match="samples 0 must be at least 1"):
        trace(config, objective, samples=0, compute="bf16")
    with pytest.raises(ValueError, match="tensor 3 does not divide the"):
        trace(config, objective, samples=1, compute="bf16", tensor=3)
    with pytest.raises(ValueError, match="at most so many ranks"):
        trace(config, objective, samples=1, compute="bf16", pipeline_rank=(0, 99))
    with pytest.raises(ValueError, match="no tokens that ranks could share"):
        trace(*CASES["autoencoder"], samples=1, compute="bf16", context=2)


def test_what_needs_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.objectives.classify import Classify

    def loss(self: Any, output: torch.Tensor, targets: Any) -> Any:
        return output.sum().item()

    monkeypatch.setattr(Classify, "loss", loss)
    config = replace(CASES["vit"][0], classes=11)  # not traced before
    with pytest.raises(UserError, match=r"model 'vit' with objective 'classify' cannot be traced .* meta device"):
        trace(config, ClassifyConfig(), samples=1, compute="bf16")


def test_our_own_mistakes_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("a mistake")

    monkeypatch.setattr(tracing, "_segments", broken)
    config = replace(CASES["vit"][0], classes=12)  # not traced before
    with pytest.raises(TypeError, match="a mistake"):
        trace(config, ClassifyConfig(), samples=1, compute="bf16")


def test_keys_are_equal_by_their_text() -> None:
    assert Key("a", int) == Key("a", str) != Key("b", int)
    assert len({key_of(CASES["vit"][0]), key_of(CASES["vit"][0])}) == 1
