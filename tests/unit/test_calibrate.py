"""A machine is measured and described in a file that the planner can read."""

import json
from pathlib import Path

import pytest
import torch
from support import environment, run, torchrun

from vitrail.bench import calibrate as calibration
from vitrail.bench.calibrate import calibrate, known_cluster, table
from vitrail.bench.launches import launch_seconds
from vitrail.bench.links import fit
from vitrail.bench.probe import Probe
from vitrail.cost.cluster import WALKS, load_cluster
from vitrail.errors import UserError

CPU = torch.device("cpu")

RANKS = """
import json, os, sys
from pathlib import Path
import torch
from vitrail.bench import calibrate as c
c.measure_device = lambda probe, known, tell: c.load_cluster("laptop").device
found = c.calibrate(Path(sys.argv[1]), quick=True)
Path(sys.argv[1]).with_name(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(c.table(found)))
"""


def quick_probe() -> Probe:
    return Probe(CPU, windows=1, window=0.002, longest=0.05)


def test_points_rise_and_are_rates() -> None:
    probe = quick_probe()
    products = probe.products(torch.float32, [(64, 64, 64), (128, 128, 128)])
    assert [x for x, _ in products] == [2.0 * 64**3, 2.0 * 128**3]
    attention = probe.attention(torch.float32, [16, 64])
    assert [x for x, _ in attention["backward"]] == [16.0, 64.0]
    convolutions = probe.convolutions(torch.float32, [(4, 32)])
    for points in (products, *attention.values(), convolutions):
        assert all(1e6 < rate < 1e14 for _, rate in points)
    assert 1e8 < probe.bandwidth() < 1e12
    assert [channels for channels, _ in convolutions] == [4.0]
    between = probe.elementwise(torch.float32, [8, 64], [2, 4])
    assert set(between) == set(WALKS)
    assert [x for x, _ in between["dense"]] == [8 * rows * 1024 * 4 / 3 for rows in (8, 64)]
    assert [x for x, _ in between["maps"]] == [2.0, 4.0]
    assert all(1e6 < rate < 1e12 for points in between.values() for _, rate in points)
    assert 1e-8 < probe.kernel() < 1e-3
    assert 1e-7 < launch_seconds(probe, compiled=False) < 1e-2


def test_sizes_stop_rising_where_calls_take_too_long() -> None:
    slow = Probe(CPU, windows=1, window=0.001, longest=0.0)
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
    code, output = run(*torchrun(2, script, tmp_path / "two.yaml"), env=environment(), timeout=100)
    assert code == 0, output
    cluster = load_cluster(tmp_path / "two.yaml")
    assert (cluster.gpus_per_node, cluster.nodes) == (2, 1)
    assert 0 < cluster.inside.latency_us < 1e5
    assert 1e-3 < cluster.inside.gb_s < 1e3
    assert "links are measured; links between nodes are assumed" in cluster.source
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0][-2] == ranks[1][-2]  # the links inside a node, as all of its ranks found them
