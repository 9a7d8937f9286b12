"""Where a pipeline is cut, what its steps cost, and what travels. What it computes is in tests/distributed."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from vitrail.errors import UserError
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.config import EncoderConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, hide, split_tokens
from vitrail.models.model import make_inputs
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import ViTConfig
from vitrail.parallel import pipeline
from vitrail.parallel.flow import parallelize
from vitrail.parallel.mesh import Mesh, layout_of
from vitrail.parallel.pipeline import (
    Elsewhere,
    Pipeline,
    Spec,
    cut,
    from_header,
    measure_costs,
    num_parts,
    pack,
    shared_parameters,
    signature,
    to_header,
)
from vitrail.recipe.sections import Parallel, Recompute

SMALL: dict[str, Any] = {"width": 24, "depth": 4, "heads": 2, "patch": 4}
MAE = MAEConfig(
    encoder=EncoderConfig(**SMALL, positions="rope", rope="superposed", registers=1),
    decoder=DecoderConfig(kind="cross", width=16, depth=2, heads=2),
    channels=1,
    shape=16,
)
MODELS: dict[str, Any] = {
    "mae": MAE,
    "vit": ViTConfig(**SMALL, channels=1, shape=16, classes=3, positions="learned", cls_token=True),
    "unetr": UNETRConfig(encoder=EncoderConfig(**SMALL), features=2, channels=1, classes=3, shape=16),
    "sap": SAPConfig(
        encoder=EncoderConfig(**SMALL, tokens=AdaptiveTokens(length=13, score=GradientScore())),
        channels=1,
        classes=3,
        shape=16,
    ),
    "dit": DiTConfig(**SMALL, channels=1, classes=3, shape=16),
}
CPU = torch.device("cpu")


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return config.build()


def inputs_of(config: Any) -> dict[str, Any]:
    inputs, tokens = make_inputs(config, torch.randn(2, 1, 16, 16))
    if isinstance(config, MAEConfig):
        inputs = hide(inputs, *split_tokens(config, torch.rand(tokens.values.shape[:2]), tokens))
    if isinstance(config, DiTConfig):
        inputs["times"] = torch.tensor([1.0, 2.0])
    return inputs


# ---------------------------------------------------------------- the cut


def every_cut(number: int, parts: int) -> list[tuple[int, ...]]:
    choices = itertools.combinations(range(1, number), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *ends, number))) for ends in choices]


def sums(costs: list[float], counts: Any) -> list[float]:
    ends = [0, *itertools.accumulate(counts)]
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(6))
def test_no_cut_has_a_cheaper_dearest_part(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    costs = (torch.rand(9, generator=draw) ** 3).tolist()
    for parts in range(1, 10):
        found = cut(costs, parts)
        assert len(found) == parts
        assert min(found) >= 1
        assert sum(found) == 9
        best = min((max(sums(costs, c)), sum(s * s for s in sums(costs, c))) for c in every_cut(9, parts))
        assert max(sums(costs, found)) == pytest.approx(best[0])
        assert sum(s * s for s in sums(costs, found)) == pytest.approx(best[1])


def test_equal_steps_are_shared_evenly() -> None:
    assert cut([1.0] * 8, 4) == [2, 2, 2, 2]
    assert sorted(cut([1.0] * 10, 4)) == [2, 2, 3, 3]
    assert cut([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1, 5]
    assert cut([0.0, 0.0, 0.0], 2) in ([1, 2], [2, 1])  # also where nothing was measured


def test_a_long_model_is_cut_at_once() -> None:
    assert sum(cut([0.1, *[1.0] * 190, 0.1], 32)) == 192


@pytest.mark.parametrize("parts", [0, 4])
def test_parts_without_a_step_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 steps cannot be cut into {parts} parts; use 1 to 3"):
        cut([1.0, 1.0, 1.0], parts)


def test_a_rank_has_one_part_or_several_when_they_are_interleaved() -> None:
    assert num_parts(Parallel(pipeline=4), 4) == 4
    assert num_parts(Parallel(pipeline=4, schedule="GPipe"), 4) == 4
    assert num_parts(Parallel(pipeline=4, schedule="interleaved"), 4) == 8
    assert num_parts(Parallel(pipeline=4, schedule="interleaved", stages=3), 4) == 12
    assert num_parts(Parallel(schedule="interleaved"), 1) == 1


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("name", MODELS)
def test_every_step_is_measured_and_the_model_stays_on_meta(name: str) -> None:
    model = on_meta(MODELS[name])
    before = dict(model.named_parameters())
    costs = measure_costs(model, lambda: inputs_of(MODELS[name]), CPU, repeats=1)
    assert len(costs) == len(model.stages())
    assert min(costs) > 0
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)


def test_costs_are_those_of_the_type_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    real = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.add(weight.dtype)
        return real(x, weight, *rest)

    monkeypatch.setattr(nn.functional, "linear", linear)
    measure_costs(on_meta(MODELS["vit"]), lambda: inputs_of(MODELS["vit"]), CPU, compute=torch.bfloat16, repeats=1)
    assert seen == {torch.bfloat16}


def test_equal_steps_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    real = pipeline._measure

    def measure(model: Any, stage: Any, *rest: Any, **options: Any) -> Any:
        measured.append(stage.name)
        return real(model, stage, *rest, **options)

    monkeypatch.setattr(pipeline, "_measure", measure)
    costs = measure_costs(on_meta(MAE), lambda: inputs_of(MAE), CPU, repeats=1)
    assert measured == [
        *("encoder.embed", "encoder.blocks.0", "encoder.norm"),
        *("decoder.embed", "decoder.blocks.0", "decoder.head"),
    ]
    assert len(set(costs[1:5])) == 1  # the four blocks of the encoder


def test_measuring_draws_nothing_from_the_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    inputs = inputs_of(MAE)
    torch.manual_seed(0)
    measure_costs(on_meta(MAE), lambda: inputs, CPU, repeats=1)
    assert torch.equal(torch.rand(1), expected)


def test_a_step_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(pipeline, "_measure", measure)
    with pytest.raises(UserError, match=r"parallel.split: .* encoder.embed does not fit .* smaller data.micro_batch"):
        measure_costs(on_meta(MAE), lambda: inputs_of(MAE), CPU)


def test_inputs_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    told = pytest.raises(UserError, match=r"parallel.split: .* inputs are made of does not fit .* data.micro_batch")
    with told:
        measure_costs(on_meta(MAE), full, CPU)
    model = on_meta(MAE)
    monkeypatch.setattr(model, "derive", full)
    with told:
        measure_costs(model, lambda: inputs_of(MAE), CPU)


@pytest.mark.parametrize("name", MODELS)
def test_steps_say_which_weights_they_use(name: str) -> None:
    """What no step names is read by derive(): rotations that are learned, and nothing else."""
    model = on_meta(MODELS[name])
    shared = [key for key, _ in shared_parameters(model, model.stages())]
    assert shared == (["encoder.rope_turns", "decoder.rope_turns"] if name == "mae" else [])


# ---------------------------------------------------------------- what travels


def test_headers_tell_shapes_types_and_order() -> None:
    specs = [
        Spec((2, 3, 4), torch.float32),
        Spec((), torch.bfloat16),
        Spec((1, 2, 3, 4), torch.float16, channels_last=True),
        Spec((0, 5), torch.float64),
    ]
    assert from_header(to_header(specs, CPU)) == specs
    assert from_header(to_header([], CPU)) == []
    assert to_header(specs, CPU).shape == to_header([], CPU).shape


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_maps_for_convolutions_travel_packed_and_are_put_in_order_again(shape: tuple[int, ...]) -> None:
    order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape).to(memory_format=order)
    spec = Spec.of(x)
    assert spec.channels_last
    sent = pack(x)
    assert sent.is_contiguous()
    assert torch.equal(spec.unpack(sent), x)
    assert spec.unpack(sent).stride() == x.stride()
    assert not Spec.of(torch.randn(shape)).channels_last


def test_packed_tensors_have_the_strides_of_empty_ones() -> None:
    """A slice of a batch of one counts as contiguous whatever its stride is, but the receiver's differs."""
    x = torch.randn(1, 8, 4)[:, :5]
    assert x.is_contiguous()
    assert x.stride() != torch.empty(1, 5, 4).stride()
    assert pack(x).stride() == torch.empty(1, 5, 4).stride()
    assert torch.equal(pack(x), x)


def test_inputs_of_equal_shapes_have_one_signature() -> None:
    one = {"x": torch.zeros(2, 3), "coordinates": torch.zeros(2, 3, 2), "variables": (0, 1), "valid": None}
    assert signature(one) == signature({**dict(reversed(one.items())), "x": torch.ones(2, 3)})
    others = (
        {"x": torch.zeros(1, 3)},
        {"x": torch.zeros(2, 3).half()},
        {"variables": (0, 2)},
        {"predict_visible": True},
    )
    assert all(signature(one | other) != signature(one) for other in others)


# ---------------------------------------------------------------- what a rank keeps


@pytest.fixture
def three_ranks() -> Iterator[Mesh]:
    """The second of three ranks that never talk."""
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield Mesh.make(layout_of(Parallel(pipeline=3), 3), "cpu")
    dist.destroy_process_group()


def test_a_rank_keeps_what_its_steps_use(three_ranks: Mesh) -> None:
    model = on_meta(MAE)
    whole, flops = dict(model.named_parameters()), model.flops()
    pipe = Pipeline(model, Parallel(pipeline=3), three_ranks, [3, 5, 2], CPU)
    kept = dict(model.named_parameters())
    assert pipe.shared == ("encoder.rope_turns", "decoder.rope_turns")
    prefixes = ("encoder.blocks.2.", "encoder.blocks.3.", "encoder.norm.", "decoder.embed.", "decoder.mask_token")
    wanted = [name for name in whole if name.startswith((*prefixes, "decoder.blocks.0.")) or name in pipe.shared]
    assert list(kept) == wanted
    assert all(kept[name] is whole[name] for name in kept)
    assert len(model.stages()) == 10
    blocks = [*list(model.encoder.blocks)[2:], model.decoder.blocks[0]]
    assert model.blocks() == blocks
    assert pipe.roots() == [(model, blocks)]
    assert model.flops() == flops
    assert model.drop_path_rates() == [0.0] * 6
    assert isinstance(model.encoder.patch_embed, Elsewhere)


def test_modules_without_weights_stay_on_all_ranks(three_ranks: Mesh) -> None:
    """A ViT without classes has nothing for a head, but calls it."""
    model = on_meta(ViTConfig(**SMALL, channels=1, shape=16, classes=0))
    Pipeline(model, Parallel(pipeline=3), three_ranks, [2, 2, len(model.stages()) - 4], CPU)
    assert isinstance(model.head, nn.Identity)
    assert isinstance(model.encoder.blocks[0], Elsewhere)


def test_recomputation_is_planned_for_the_whole_model(three_ranks: Mesh) -> None:
    """Blocks 0, 2 and 4 of 6; this rank has 2, 3 and 4."""
    model = on_meta(MAE)
    c = Parallel(pipeline=3, recompute=Recompute(every=2))
    options: dict[str, Any] = {"compute": torch.float32, "reduce": torch.float32, "compiled": False}
    flow = parallelize(model, three_ranks, layout_of(c, 3), c, device=CPU, counts=[3, 5, 2], **options)
    assert ["forward" in vars(block) for block in model.blocks()] == [True, False, True]
    assert flow.again.share == 0.5
    assert flow.notes == ["parallel.recompute: 3 of 6 blocks are recomputed in full"]


def test_schedules_are_quiet_while_they_run_and_no_longer() -> None:
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    with pipeline._quiet_schedules():
        assert logger.level == logging.CRITICAL
    assert logger.level == level


def test_a_rank_without_weights_is_refused(three_ranks: Mesh) -> None:
    sentence = r"parallel.split: \[6, 1, 5\] gives rank 1 of the pipeline decoder.bottleneck, which has no weights"
    with pytest.raises(UserError, match=sentence):
        Pipeline(on_meta(MODELS["unetr"]), Parallel(pipeline=3), three_ranks, [6, 1, 5], CPU)


@pytest.mark.parametrize("counts", [[5, 5], [4, 4, 3], [0, 5, 5]])
def test_counts_that_are_no_cut_are_refused(three_ranks: Mesh, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="does not cut 10 steps into 3 parts"):
        Pipeline(on_meta(MAE), Parallel(pipeline=3), three_ranks, counts, CPU)
