"""Where the time of steps went, read from traces that were written by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vitrail.training.timeline import break_down, covered, is_collective, left, merged, read_trace, shared

Event = dict[str, Any]


def event(name: str, begin: float, end: float, kind: str = "cpu_op", tid: int = 1, **more: Any) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": tid, "args": more}


def mark(part: str, begin: float, end: float) -> Event:
    return event(f"vitrail: {part}", begin, end, "user_annotation")


def kernel(name: str, launched: float, begin: float, end: float, number: int) -> list[Event]:
    launch = event("cudaLaunchKernel", launched, launched + 1, "cuda_runtime", correlation=number)
    return [launch, event(name, begin, end, "kernel", tid=7, correlation=number)]


def test_sums_of_spans() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4
    assert covered([]) == 0
    some, others = merged([(0, 4), (6, 9)]), merged([(1, 2), (3, 7)])
    assert shared(some, others) == [(1, 2), (3, 4), (6, 7)]
    assert left(some, others) == [(0, 1), (2, 3), (7, 9)]
    assert left(some, []) == some
    assert shared([], others) == []
    assert is_collective("ncclDevKernel_AllGather_RING_LL(x)", True)
    assert not is_collective("nccl:all_gather", True)  # the same again, as its caller sees it
    assert is_collective("gloo:all_reduce", False)


def test_parts_of_a_cpu_step_last_until_the_next_and_add_up_to_it() -> None:
    events = [
        mark("data", 0, 99),
        mark("forward", 100, 300),
        event("aten::linear", 110, 290),
        event("aten::mm", 120, 280),
        mark("backward", 300, 600),
        event("aten::mm", 310, 381),
        event("## Call CompiledFxGraph f1 ##", 381, 400),
        # On a thread of its own; 100 of it while nothing else is at work.
        event("gloo:all_reduce", 390, 500, "user_annotation", tid=9),
        mark("optimizer", 600, 700),
        mark("other", 700, 750),
        mark("between", 750, 900),
        event("aten::evaluated", 760, 890),
        event("gloo:all_reduce", 760, 890, "user_annotation", tid=9),
        mark("data", 900, 920),
        mark("forward", 920, 1000),
        mark("between", 1000, 1010),
    ]
    found = break_down(events)
    assert found["steps"] == 2
    micro = {part: round(2e6 * seconds, 6) for part, seconds in found["parts"].items()}
    expected = {"data": 120, "forward": 280, "backward": 200, "optimizer": 100, "other": 50, "communication": 100}
    assert micro == expected
    assert found["step_seconds"] == pytest.approx(850e-6 / 2)
    assert found["collectives"] == pytest.approx(110e-6 / 2)
    assert found["idle"] is None
    mm, linear, compiled = found["operations"]
    assert (mm["name"], mm["calls"], linear["name"], linear["calls"]) == ("aten::mm", 1.0, "aten::linear", 0.5)
    assert mm["seconds"] == pytest.approx(231e-6 / 2)
    assert linear["seconds"] == pytest.approx(20e-6 / 2)  # without the product inside it
    assert compiled["seconds"] == pytest.approx(19e-6 / 2)
    assert mm["share"] == pytest.approx(231 / 850)


def gpu_step() -> list[Event]:
    """A host that is ahead of its GPU, which works from 20 to 190 and then waits; a collective beside the backward."""
    return [
        mark("data", 0, 10),
        mark("forward", 10, 40),
        *kernel("gemm", 12, 20, 100, 1),
        mark("backward", 40, 60),
        *kernel("gemm", 45, 100, 150, 2),
        *kernel("ncclDevKernel_ReduceScatter", 46, 140, 170, 3),
        mark("optimizer", 60, 80),
        *kernel("multi_tensor_apply", 65, 170, 190, 4),
        mark("other", 80, 210),
        mark("between", 210, 220),
        event("vitrail: forward", 20, 100, "gpu_user_annotation", tid=7),
        *kernel("evaluated", 212, 213, 219, 5),
    ]


def test_parts_of_a_gpu_step_are_when_it_did_them() -> None:
    found = break_down(gpu_step())
    micro = {part: round(1e6 * seconds, 6) for part, seconds in found["parts"].items()}
    # The backward begins on the device at 100, when what was launched before has ended; a collective has its last 20.
    expected = {"data": 10, "forward": 90, "backward": 50, "optimizer": 20, "other": 20, "communication": 20}
    assert micro == expected
    assert found["step_seconds"] == pytest.approx(210e-6)
    assert found["collectives"] == pytest.approx(30e-6)
    assert found["idle"] == pytest.approx(40e-6)
    names = [row["name"] for row in found["operations"]]
    assert names == ["gemm", "ncclDevKernel_ReduceScatter", "multi_tensor_apply"]
    assert found["operations"][0]["calls"] == 2


def test_a_replayed_pass_is_one_part_with_all_its_kernels() -> None:
    launch = event("cudaGraphLaunch", 12, 14, "cuda_runtime", correlation=1)
    works = [event(name, begin, begin + 30, "kernel", correlation=1) for name, begin in (("gemm", 20), ("norm", 60))]
    marks = [mark("data", 0, 10), mark("forward", 10, 40), mark("optimizer", 40, 95), mark("between", 95, 99)]
    found = break_down([*marks, launch, *works], whole=True)
    assert found["parts"]["forward"] is None
    assert found["parts"]["backward"] is None
    assert found["parts"]["passes"] == pytest.approx(80e-6)
    told = sum(seconds for seconds in found["parts"].values() if seconds is not None)
    assert told == pytest.approx(found["step_seconds"])
    assert [row["name"] for row in found["operations"]] == ["gemm", "norm"]


def test_a_trace_without_a_whole_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        break_down([mark("data", 0, 1), mark("forward", 1, 2)])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_traces_are_read_packed_or_not(tmp_path: Path, name: str) -> None:
    content = json.dumps({"traceEvents": gpu_step()}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read_trace(tmp_path / name) == gpu_step()
