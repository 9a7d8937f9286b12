"""Seconds of a step: by hand where that is easy, else how they change with the layout."""

import dataclasses
from typing import Any

import pytest

from vitrail.cost.cluster import Cluster, Device, Link
from vitrail.cost.memory import Moments
from vitrail.cost.recorder import Op
from vitrail.cost.step import Group, StepTime, _Rank, seconds_of, step_time
from vitrail.cost.work import Segment, Work
from vitrail.layers.flops import Flops
from vitrail.parallel import float8
from vitrail.parallel.mesh import layout_of
from vitrail.recipe.sections import Parallel, Precision, Prefetch

BF16, FP32, FLOAT8 = (Precision(compute=name) for name in ("bf16", "fp32", "float8"))

DEVICE = Device(
    name="made up",
    memory_gib=80,
    tflops={"bf16": 100.0, "fp32": 20.0, "float8": 200.0},
    bandwidth_gb_s=1000,
    gemm=((1e9, 0.5),),
    gemm_fp32=((1e9, 0.5),),
    attention={"forward": ((1024, 0.4),), "backward": ((1024, 0.2),)},
    convolution=((16, 0.1), (64, 0.3)),
    launch_us=10,
    reserve_gib=1,
)
CLUSTER = Cluster(
    name="made up",
    device=DEVICE,
    gpus_per_node=8,
    nodes=1024,
    inside=Link(5, 100),
    between=Link(10, 5),
    overlap=1.0,
    source="a test",
)
GEMM = Op("gemm", 5e11, 1e6, (4096, 4096, 14901))  # 10 ms in bf16
ATTENTION = Op("attention", 4e11, 1e6, (1, 8, 1024, 1024, 128))


def work(*, depth: int = 20, parameters: int = 10_000_000, kernels: int = 1, again: bool = False) -> Work:
    """Blocks of one product and one attention forward: 20 ms forward, 40 backward."""
    forward = (dataclasses.replace(GEMM, kernels=kernels), ATTENTION)
    backward = (GEMM, GEMM, dataclasses.replace(ATTENTION, flops=4e11))
    block = Segment("blocks", depth, parameters, forward, backward, forward if again else (), 0, 0)
    head = Segment("head", 1, 1_000_000, (), (), (), 0, 0, gathered=False)
    return Work((block, head), 0, (), 0, 32, Flops(), 1024)


def step(gpus: int = 1, *, of: Work | None = None, cluster: Cluster = CLUSTER, **keys: Any) -> StepTime:
    micro_batches, compute = keys.pop("micro_batches", 1), keys.pop("compute", "bf16")
    moments = keys.pop("moments", Moments())
    alone = {name: keys.pop(name) for name in ("solo", "replayed") if name in keys}
    parallel = Parallel(**keys)
    layout = layout_of(parallel, gpus)
    return step_time(
        of or work(),
        cluster,
        layout=layout,
        parallel=parallel,
        precision=Precision(compute=compute),
        micro_batches=micro_batches,
        moments=moments,
        **alone,
    )


def test_float8_is_as_fast_as_a_run_would_judge_it() -> None:
    """A large layer gains what rounding leaves of it; one that would lose stays in bf16, unless all are asked."""

    def seconds(op: Op, precision: Precision, *layer: int) -> float:
        return seconds_of((dataclasses.replace(op, layer=layer),), DEVICE, precision, "backward").total

    large, small = (8192, 4096, 14336), (65536, 768, 768)
    every = Precision(compute="float8", float8_layers="all")
    gain = float8.speedup(*large)
    assert 1.2 < gain < 1.6
    assert seconds(GEMM, FLOAT8, *large) == seconds(GEMM, every, *large) == pytest.approx(0.01 / gain)
    assert seconds(GEMM, BF16, *large) == seconds(GEMM, FLOAT8, *small) == pytest.approx(0.01)
    assert seconds(GEMM, every, *small) > 0.011
    assert seconds(GEMM, every) == seconds(GEMM, every, 65536, 768, 760) == pytest.approx(0.01)  # none, an odd width
    assert seconds(GEMM, every, 8191, 4096, 14336) < 0.009  # odd rows are padded
    assert seconds(ATTENTION, FLOAT8) == seconds(ATTENTION, BF16)


def test_roofline_by_hand() -> None:
    copy = Op("memory", 0, 1e9)
    spent = seconds_of((GEMM, ATTENTION, copy), DEVICE, BF16, "forward")
    assert spent == pytest.approx({"matrix products": 0.01, "attention": 0.01, "memory bandwidth": 0.001})
    assert seconds_of((GEMM,), DEVICE, FP32, "forward").total == pytest.approx(0.05)
    thin = Op("gemm", 1e6, 1e9)  # waits for its bytes
    assert seconds_of((thin,), DEVICE, BF16, "forward") == pytest.approx({"memory bandwidth": 0.001})
    slow = dataclasses.replace(DEVICE, kernel_us=5)
    tiny = Op("memory", 0, 1000, kernels=3)
    assert seconds_of((tiny, GEMM), slow, BF16, "forward").total == pytest.approx(0.01 + 15e-6)
    shares = {"dense": ((1e6, 0.1), (1e8, 0.5)), "maps": ((10, 0.1), (1000, 0.5))}
    lossy = dataclasses.replace(DEVICE, elementwise=shares)
    assert seconds_of((copy, thin), lossy, BF16, "forward").total == pytest.approx(0.002 + 0.001)
    several = Op("memory", 0, 1e7, kernels=10)  # 1e6 bytes each
    assert seconds_of((several,), lossy, BF16, "forward").total == pytest.approx(1e-4)
    assert seconds_of((dataclasses.replace(copy, walk="sum"),), lossy, BF16, "forward").total == pytest.approx(0.001)
    maps = Op("memory", 0, 1e9, shape=(100,), walk="maps")
    assert seconds_of((maps,), lossy, BF16, "forward").total == pytest.approx(0.001 / 0.3)
    tiled = dataclasses.replace(DEVICE, attention_tile=768)  # 1024 tokens are computed as 1536
    assert seconds_of((ATTENTION,), tiled, BF16, "forward").total == pytest.approx(0.01 * 1.5**2)
    narrow = dataclasses.replace(ATTENTION, shape=(1, 8, 1024, 1024, 16))  # padded to 64
    assert seconds_of((narrow,), DEVICE, BF16, "backward").total == pytest.approx(0.08)


def test_odd_widths_slow_products_of_16_bits() -> None:
    device = dataclasses.replace(DEVICE, gemm_odd=0.5)
    even, odd, rows = (dataclasses.replace(GEMM, layer=layer) for layer in ((8, 4, 6), (8, 4, 7), (7, 4, 6)))
    for op, precision, seconds in ((even, BF16, 0.01), (odd, BF16, 0.02), (rows, BF16, 0.01), (odd, FP32, 0.05)):
        assert seconds_of((op,), device, precision, "backward").total == pytest.approx(seconds)
    assert seconds_of((odd,), DEVICE, BF16, "backward").total == pytest.approx(0.01)


def test_a_convolution_by_hand() -> None:
    """The rate is that of its channels; a GPU turns its maps before and after."""
    op = Op("convolution", 1e12, 1e9, shape=(8, 128))  # 32 channels on average, halfway between 16 and 64
    ideal = 1e12 / (0.2 * 1e14)
    assert seconds_of((op,), dataclasses.replace(DEVICE, name="cpu"), BF16, "forward").total == pytest.approx(ideal)
    assert seconds_of((op,), DEVICE, BF16, "forward").total == pytest.approx(ideal + 2e9 / 1e12)
    slow = dataclasses.replace(DEVICE, elementwise={"strided": ((1.0, 0.5),)})
    assert seconds_of((op,), slow, BF16, "forward").total == pytest.approx(ideal + 4e9 / 1e12)


def test_one_gpu_is_its_computation() -> None:
    time = step()
    assert time.seconds == pytest.approx(20 * (0.02 + 0.04), rel=0.02)
    assert time.communication == time.exposed == time.bubble == 0
    assert time.optimizer == pytest.approx(201e6 * 40 / 1e12)  # itself, its gradient thrice, two moments
    assert step(moments=Moments(1, 1)).optimizer == pytest.approx(201e6 * 32 / 1e12)  # one moment
    away = step(offload=True).optimizer  # gradients are scaled where they are
    assert away == pytest.approx(201e6 * 28 / 2e10)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert step(of=work(again=True)).seconds == pytest.approx(time.seconds + 20 * 0.02, rel=0.01)
    assert step(micro_batches=4).seconds == pytest.approx(4 * time.seconds, rel=0.05)


def test_launches_are_a_floor() -> None:
    time = step(of=work(kernels=100_000))
    assert time.seconds == pytest.approx(time.host, rel=0.01)
    assert time.limited_by == "kernel launches"
    assert step().host < step().seconds


def test_launches_of_one_rank_alone() -> None:
    small = work(kernels=100_000)
    assert step(of=small, solo=True).host < step(of=small).host  # no hooks
    assert step(of=small, solo=True, replayed=True).host == 0
    assert step(of=small, solo=True, replayed=True).seconds == pytest.approx(step(solo=True).seconds, rel=0.01)
    fast = dataclasses.replace(CLUSTER, device=dataclasses.replace(DEVICE, launch_compiled_us=1))
    assert step(of=small, cluster=fast, compile=True).host == pytest.approx(step(of=small).host / 10, rel=0.01)
    assert step(of=small, cluster=fast).host == step(of=small, compile=True).host == step(of=small).host


def test_one_rank_alone_copies_nothing_in_full_precision() -> None:
    assert step(solo=True, compute="fp32").compute < step(compute="fp32").compute
    assert step(solo=True).compute > step(solo=True, of=work(parameters=0)).compute


def test_sharding_hides_until_it_cannot() -> None:
    one, node = step(), step(8, strategy="FULL_SHARD")
    assert node.communication > 0
    assert node.exposed < 0.1 * node.communication
    assert node.seconds < 1.02 * one.seconds
    large = step(8192, strategy="FULL_SHARD")  # the ring's latency: 20 blocks x 3 x 8191 hops
    assert large.seconds > 2 * one.seconds
    assert large.limited_by == "network between nodes"
    hybrid = step(8192, strategy="HYBRID_SHARD", group=8)
    assert hybrid.seconds < 0.6 * large.seconds
    assert step(8192, strategy="DDP").seconds < large.seconds


def test_overlap_is_paid_for() -> None:
    half = dataclasses.replace(CLUSTER, overlap=0.5)
    free, paid = step(8, strategy="FULL_SHARD"), step(8, strategy="FULL_SHARD", cluster=half)
    hidden = free.communication - free.exposed
    assert paid.seconds == pytest.approx(free.seconds + 0.5 * hidden, rel=1e-3)


def test_reductions_may_cost_more_than_copies() -> None:
    slow = dataclasses.replace(CLUSTER, overlap_reduce=0.5)
    for strategy, share in (("DDP", 1.0), ("FULL_SHARD", 1 / 2)):  # gathered twice in bf16, reduced once in fp32
        free, paid = step(8, strategy=strategy), step(8, strategy=strategy, cluster=slow)
        hidden = free.communication - free.exposed
        assert paid.seconds == pytest.approx(free.seconds + 0.5 * share * hidden, rel=1e-3), strategy


def test_prefetch_and_what_is_not_freed() -> None:
    model = work(parameters=100_000_000)
    keys = {"of": model, "strategy": "FULL_SHARD"}
    late = step(64, prefetch=Prefetch(backward=0), **keys)
    early = step(64, **keys)
    assert late.seconds > early.seconds
    assert late.communication == pytest.approx(early.communication)
    kept = step(64, of=model, strategy="SHARD_GRAD_OP")
    assert kept.communication == pytest.approx(early.communication * 3 / 4, rel=0.01)  # 2 + 4 bytes, not 2 + 2 + 4
    many = step(64, of=model, strategy="SHARD_GRAD_OP", micro_batches=4)
    assert many.communication < 4 * kept.communication  # gathered once
    each = step(64, micro_batches=4, **keys)
    assert each.communication == pytest.approx(4 * early.communication)  # freed, and gathered by each anew


def test_replicas_exchange_once_a_step() -> None:
    once, four = (step(64, strategy="DDP", micro_batches=m) for m in (1, 4))
    assert four.communication == pytest.approx(once.communication)
    small = dataclasses.replace(CLUSTER, between=Link(1000, 5))
    each = step(512, strategy="DDP", cluster=small)
    buckets = step(512, strategy="DDP", bucket_mib=400, cluster=small)
    assert buckets.communication < each.communication  # fewer, larger messages


def test_tensor_parallelism_waits_inside_blocks() -> None:
    near, far = step(8, tensor=8), step(64, tensor=64)
    assert near.exposed > 0
    assert far.exposed > near.exposed
    assert near.exposed == pytest.approx(step(8, of=work(again=True), tensor=8).exposed * 2 / 3, rel=0.05)


def test_context_parallelism_trades_heads_or_passes_keys() -> None:
    traded, ring = step(8, context=8), step(8, context=8, ulysses=1)
    assert traded.exposed > 0
    assert ring.communication != traded.communication


def test_rings_wait_for_what_attention_cannot_hide() -> None:
    """However much of what is hidden is free."""
    parallel = Parallel(context=8, ulysses=1)

    def waits(gb_s: float, way: str) -> float:
        cluster = dataclasses.replace(CLUSTER, between=Link(0, gb_s), overlap=1.0)
        rank = _Rank(work(), cluster, layout_of(parallel, 8), parallel, BF16, solo=False, replayed=False)
        return rank._exchange(ATTENTION, Group(ranks=8, inside=1), 2, way)

    passing = 2 * 8 * 128 * 128 * 2 / 1e8  # keys and values of a rank's tokens in bf16; attention: 10 ms in 8 rounds
    assert waits(0.1, "forward") == pytest.approx(7 * (passing - 0.01 / 8))
    assert waits(0.1, "backward") == pytest.approx(7 * (3 * passing - 0.02 / 8))  # gradients in fp32 go along
    assert waits(10, "forward") == waits(10, "backward") == 0.0


def test_heads_that_cannot_be_traded_by_all_make_rings() -> None:
    twelve = dataclasses.replace(ATTENTION, shape=(1, 12, 1024, 1024, 128))
    block = Segment("blocks", 20, 1000, (twelve,), (twelve,), (), 0, 0)
    model = dataclasses.replace(work(), segments=(block,))
    asked, left = (step(8, of=model, context=8, ulysses=ranks).seconds for ranks in (4, None))
    assert left == asked


def test_pipelines_have_a_bubble() -> None:
    few, many = (step(4, pipeline=4, micro_batches=m) for m in (4, 32))
    assert few.bubble / few.seconds > 0.4
    assert many.bubble / many.seconds < 0.1
    assert step(4, pipeline=4, micro_batches=4, schedule="interleaved").bubble < few.bubble
