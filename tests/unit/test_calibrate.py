"""A machine is measured and described in a file that the planner can read."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from support import environment, run, torchrun

from vitrail.bench import calibrate as calibration
from vitrail.bench import probe as probing
from vitrail.bench.calibrate import calibrate, fit, launch_seconds, table
from vitrail.bench.probe import Probe
from vitrail.cost.cluster import WALKS, known_cluster, load_cluster
from vitrail.errors import UserError

CPU = torch.device("cpu")

RANKS = """
import json, os, sys
from pathlib import Path
import torch
from vitrail.bench import calibrate as c
from vitrail.cost.cluster import load_cluster
c.measure_device = lambda probe, known, tell: load_cluster("laptop").device
found = c.calibrate(Path(sys.argv[1]), quick=True)
Path(sys.argv[1]).with_name(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(c.table(found)))
"""


TICK = 2.0**-10  # seconds between two looks at the clock


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on when it is looked at, so that whatever is timed takes one tick."""
    looks = count()
    monkeypatch.setattr(probing.time, "perf_counter", lambda: next(looks) * TICK)


def quick_probe() -> Probe:
    return Probe(CPU, windows=1, window=TICK, longest=8 * TICK)


@pytest.mark.usefixtures("ticking")
def test_points_rise_and_are_rates() -> None:
    probe = Probe(CPU, windows=1, window=4 * TICK, longest=8 * TICK)  # four calls in a tick
    call = TICK / 4
    products = probe.products(torch.float32, [(64, 64, 64), (128, 64, 32)])
    assert products == [(flops, flops / call) for flops in (2.0 * 64**3, 2.0 * 128 * 64 * 32)]
    attention = probe.attention(torch.float32, [16, 64])
    flops = {16: 4.0 * 64 * 16 * 16**2 * 64, 64: 4.0 * 16 * 16 * 64**2 * 64}  # 1024 tokens in all, 16 heads of 64
    assert attention["forward"] == [(tokens, found / call) for tokens, found in flops.items()]
    # Both directions take as long as one here; at least half of that is the backward's.
    assert attention["backward"] == [(tokens, 2.5 * found / (call / 2)) for tokens, found in flops.items()]
    assert probe.convolutions(torch.float32, [(4, 32)]) == [(4.0, pytest.approx(2 * 4**2 * 27 * 8**3 / (call / 3)))]
    assert probe.bandwidth() == 2 * 2**26 / call
    between = probe.elementwise(torch.float32, [8, 64], [2, 4])
    assert set(between) == set(WALKS)
    assert between["dense"] == [(8 * rows * 1024 * 4 / 3, 8 * rows * 1024 * 4 / (3 * call)) for rows in (8, 64)]
    assert between["maps"] == [(number, 5 * number * 64 * 4 / call) for number in (2.0, 4.0)]
    assert probe.kernel() == call
    assert 0 < launch_seconds(probe, compiled=False) < call / 100  # of one of its kernels


@pytest.mark.usefixtures("ticking")
def test_sizes_stop_rising_where_calls_take_too_long() -> None:
    slow = Probe(CPU, windows=1, window=TICK, longest=TICK / 2)
    assert len(slow.products(torch.float32, [(64, 64, 64)] * 3)) == 1


def test_memory_that_is_used_up_ends_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(self: Probe, rows: int, *others: object) -> float:
        if rows > 64:
            raise torch.OutOfMemoryError
        return 0.01

    monkeypatch.setattr(Probe, "_product", product)
    assert len(quick_probe().products(torch.float32, [(64, 64, 64), (128, 64, 64), (64, 64, 64)])) == 1
    with pytest.raises(UserError, match="too full to measure"):
        quick_probe().products(torch.float32, [(128, 64, 64)])


def test_a_line_is_found_again() -> None:
    ranks, latency, rate = 4, 20e-6, 5e9
    sizes = [2.0**power for power in range(12, 25, 3)]
    points = [(size, (ranks - 1) * latency + size * (ranks - 1) / ranks / rate) for size in sizes]
    assert fit(points, ranks) == pytest.approx((20.0, 5.0), rel=1e-3)


@pytest.mark.usefixtures("ticking")
def test_the_file_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "make_probe", lambda device, quick: quick_probe())
    for name, most in (("products", 3), ("attention", 2), ("convolutions", 2)):
        whole = getattr(Probe, name)
        shapes = whole.__defaults__[0][:most]
        monkeypatch.setattr(Probe, name, lambda self, dtype, w=whole, s=shapes: w(self, dtype, s))
    out = tmp_path / "mine.yaml"
    told: list[str] = []
    found = calibrate(out, quick=True, tell=told.append)
    assert load_cluster(out) == found
    assert (found.name, found.device.name, found.nodes, found.gpus_per_node) == ("mine", "cpu", 1, 1)
    assert max(y for _, y in found.device.gemm) == 1.0
    assert "since one process has none" in found.source
    assert found.measured["torch"] == torch.__version__
    assert told[0] == "measuring cpu"
    rows = {row["what"]: row["found"] for row in table(found)}
    assert "TFLOP/s" in rows["attention, backward"]
    with pytest.raises(UserError, match="exists"):
        calibrate(out, quick=True)


def test_known_devices_lend_what_is_not_measured() -> None:
    known = known_cluster("NVIDIA H200")
    assert known is not None
    assert known.name == "h200"
    assert known_cluster("cpu") is None
    assert known_cluster("a device that nobody has") is None


@pytest.mark.slow
def test_links_of_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    code, output = run(*torchrun(2, script, tmp_path / "two.yaml"), env=environment(), timeout=600)
    assert code == 0, output
    cluster = load_cluster(tmp_path / "two.yaml")
    assert (cluster.gpus_per_node, cluster.nodes) == (2, 1)
    assert 0 < cluster.inside.latency_us < 1e5
    assert 1e-3 < cluster.inside.gb_s < 1e3
    assert "links are measured; links between nodes are assumed" in cluster.source
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0][-2] == ranks[1][-2]  # the links inside a node, as all of its ranks found them
