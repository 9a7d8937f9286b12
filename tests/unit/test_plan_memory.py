"""Memory by kind: against what was measured on an H200, and the arithmetic of shards."""

import importlib.util
import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ROOT

from vitrail.cost import memory as kinds
from vitrail.cost.fusion import as_kernels
from vitrail.cost.memory import Memory, Moments, _later
from vitrail.cost.recorder import Recorder, attend_with
from vitrail.cost.trace import trace, trace_model
from vitrail.cost.work import Work
from vitrail.models import ViTConfig
from vitrail.objectives.classify import ClassifyConfig
from vitrail.parallel.mesh import Layout
from vitrail.parallel.recompute import carry_out, plan
from vitrail.parallel.shard import Solo
from vitrail.recipe.sections import Parallel, Precision

GIB = 2**30
MEASURED = json.loads((ROOT / "benchmarks/results/memory.json").read_text())["rows"]
FAST = ("vit/none", "vit/keep attention", "vit/full")


def memory_of(work: Work, *, shard: int = 1, reshard: bool = True, compute: Any = "bf16", **keys: Any) -> Memory:
    """Memory of a rank; keys are of its layout, of the recipe's `parallel`, or of memory_of() itself."""
    axes = {name: keys.pop(name, 1) for name in ("tensor", "context", "pipeline")}
    parallel = Parallel(**{name: keys.pop(name) for name in ("wrap", "offload", "schedule") if name in keys})
    return kinds.memory_of(work, Layout(1, shard, reshard, **axes), parallel, Precision(compute=compute), **keys)


@lru_cache
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks/memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def inputs_of(work: Any) -> dict[str, Any]:
    """The benchmark's inputs, on the meta device."""
    if work.config.kind != "mae":
        return work.inputs(torch.device("meta"))
    visible, predicted = work.config.token_counts()
    features = work.config.channels * work.config.patch[0] ** work.config.ndim
    sizes = {"x": (visible, features), "coordinates": (visible, 3), "queries": (predicted, 3)}
    return {name: torch.empty(1, *size, device="meta") for name, size in sizes.items()}


def rows() -> list[Any]:
    known = [row["row"] for row in MEASURED if "memory_gib" in row and "float8" not in row["row"]]
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in known]


@pytest.mark.parametrize("name", rows())
def test_memory_is_what_was_measured(name: str) -> None:
    """World 1, bf16, compiled blocks, fused AdamW: every way to recompute; no number here was fitted to these."""
    script = benchmark()
    row = next(one for one in script.rows() if one.name == name)
    work = script.works(False)[row.model]
    traced = trace_model(
        work.config,
        inputs_of(work),
        script.loss_of,
        samples=work.batch,
        compiled=True,
        recompute=row.recompute,
        chunk=row.chunk,
    )
    measured = next(one["memory_gib"] for one in MEASURED if one["row"] == name)
    assert memory_of(traced).peak / GIB == pytest.approx(measured, rel=0.03)


# ---------------------------------------------------------------- shards


VIT = ViTConfig(size="S/16", channels=3, shape=224, classes=10)


@pytest.fixture(scope="module")
def work() -> Work:
    return trace(VIT, ClassifyConfig(), samples=16, compute="bf16", recompute="full")


def number(work: Work) -> int:
    return sum(segment.parameters * segment.count for segment in work.segments)


def test_states_are_in_shards(work: Work) -> None:
    for ranks in (1, 2, 8):
        memory = memory_of(work, shard=ranks, ema=True)
        assert memory.parameters == pytest.approx(4 * number(work) / ranks, rel=0.01)
        assert memory.optimizer == 2 * memory.parameters
        assert memory.average == memory.parameters
    assert memory_of(work, shard=2, context=4).parameters == memory_of(work, shard=8).parameters
    assert memory_of(work, moments=Moments(1, 1)).optimizer == memory_of(work).parameters
    copies = memory_of(work, shard=1, reshard=False)
    assert copies.parameters == pytest.approx(4 * number(work), rel=0.01)


def test_what_is_not_freed_after_the_forward_stays(work: Work) -> None:
    full, kept = (memory_of(work, shard=8, reshard=reshard) for reshard in (True, False))
    assert full.gathered < 0.4 * 2 * number(work)
    assert kept.gathered == pytest.approx(2 * number(work), rel=0.1)
    assert kept.peak > full.peak
    assert memory_of(work, shard=8, wrap=4).gathered > full.gathered


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("samples", [2, 64])
def test_one_rank_alone_needs_what_it_does_on_the_meta_device(compute: Any, recompute: Any, samples: int) -> None:
    """The model is run as the trainer runs it, and its bytes are followed; few samples let gradients be the most."""
    inputs = VIT.build().inputs(torch.empty(samples, 3, 224, 224, device="meta"))
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum()

    with torch.device("meta"):
        model = VIT.build()
    for module in model.modules():  # kernels that keep what those of a GPU keep
        if hasattr(module, "attend"):
            module.attend = attend_with(1, plain=compute == "fp32")
    as_kernels(model, spared=())
    carry_out(model.blocks(), plan(model.blocks(), recompute).kept)
    solo = Solo(model, model.blocks(), dtype)
    with Recorder() as recorder:
        phase = recorder.begin(backward=False)
        with solo.computing():
            loss(model(**inputs)).backward()
    traced = trace_model(VIT, inputs, loss, samples=samples, compute=compute, recompute=recompute)
    planned = memory_of(traced, compute=compute, solo=True, moments=Moments(1, 1))
    states = planned.parameters + planned.optimizer + planned.inputs
    followed = max(phase.peak, recorder.live)
    assert planned.moment != "update"
    # In full precision the first layer keeps the very tokens that are counted as inputs.
    twice = inputs["x"].nbytes if compute == "fp32" else 0
    assert planned.peak - states - twice == pytest.approx(followed, rel=0.05)


def test_one_rank_alone_keeps_its_copies(work: Work) -> None:
    alone, sharded = memory_of(work, solo=True), memory_of(work)
    assert alone.gathered == pytest.approx(2 * number(work), rel=0.01)
    assert alone.gathered > sharded.gathered
    assert alone.communication == 0
    again = memory_of(work, solo=True, micro_batches=4)
    assert again.gradients == pytest.approx(4 * number(work), rel=0.01)
    assert memory_of(work, solo=True, compute="fp32").gathered == 0


def test_full_precision_takes_twice_the_room() -> None:
    half, whole = (trace(VIT, ClassifyConfig(), samples=16, compute=compute) for compute in ("bf16", "fp32"))  # type: ignore[arg-type]
    one, two = memory_of(half, shard=8), memory_of(whole, shard=8, compute="fp32")
    assert two.activations == pytest.approx(2 * one.activations, rel=0.1)
    assert two.gathered == 2 * one.gathered


def test_gradients_stay_between_micro_batches(work: Work) -> None:
    one, many = (memory_of(work, shard=8, micro_batches=number) for number in (1, 4))
    assert many.gradients == pytest.approx(4 * number(work) / 8, rel=0.02)
    assert many.peak >= one.peak


def test_a_pipeline_holds_several_micro_batches(work: Work) -> None:
    stage = trace(VIT, ClassifyConfig(), samples=16, compute="bf16", pipeline_rank=(0, 4))
    one = memory_of(stage, micro_batches=1, pipeline=4)
    many = memory_of(stage, micro_batches=8, pipeline=4)
    everything = memory_of(stage, micro_batches=8, pipeline=4, schedule="GPipe")
    assert many.activations == pytest.approx(4 * one.activations, rel=0.1)
    assert everything.activations > 1.8 * many.activations
    assert memory_of(stage, micro_batches=8, pipeline=4, rank=3).activations == one.activations
    assert stage.segments[-1].count < 12


def test_offloaded_states_are_not_on_the_device(work: Work) -> None:
    memory = memory_of(work, offload=True)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.gathered > 0


def test_the_peak_is_the_sum_and_has_a_moment(work: Work) -> None:
    memory = memory_of(work, shard=2)
    numbers = [value for name, value in vars(memory).items() if name != "moment"]
    assert memory.peak == sum(numbers)
    assert memory.moment
    assert all(value >= 0 for value in numbers)
    device = SimpleNamespace(fragmentation=1.1, reserve_gib=1.0)
    assert Memory(parameters=10 * GIB).reserved(device) == pytest.approx(12 * GIB)


def test_equal_blocks_have_names_of_their_own() -> None:
    assert [_later("encoder.blocks.2", places) for places in (0, 3)] == ["encoder.blocks.2", "encoder.blocks.5"]
    assert _later("final", 1) == "final"
