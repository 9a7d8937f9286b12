"""Numbers of a report: durations, sizes and what a run has cost."""

import numpy as np
import pytest

from vitrail.report import bench_effects
from vitrail.report.facts import _count_cost
from vitrail.report.units import clock, compact, duration, size


@pytest.mark.parametrize(
    ("seconds", "words", "short"),
    [
        (9.94, "9.9 s", "0:10"),
        (45, "45 s", "0:45"),
        (170, "2 min 50 s", "2:50"),
        (3900, "1 h 05 min", "1:05:00"),
        (7384, "2 h 03 min", "2:03:04"),
        (86400 * 3 + 4 * 3600 + 59 * 60, "3 d 4 h", "3d 04h"),
        (None, "–", "–"),
    ],
)
def test_durations(seconds: float | None, words: str, short: str) -> None:
    assert duration(seconds) == words
    if seconds is not None:
        assert clock(seconds) == short


@pytest.mark.parametrize(
    ("value", "words"),
    [(999, "999"), (999.6, "1.00k"), (12345, "12.3k"), (1.21e6, "1.21M"), (0.5, "0.50"), (-2e9, "-2.00G")],
)
def test_prefixes_are_of_a_thousand(value: float, words: str) -> None:
    assert compact(value) == words


def test_a_run_costs_the_time_of_all_its_devices() -> None:
    start = {"flops_per_sample": {"model": 2e12, "hardware": 3e12}, "tokens_per_sample": 10, "samples_per_epoch": 80}
    cost = _count_cost({"step": 4, "seconds": 1800.0, "world": 8}, [{"event": "train", "samples": 160}], start, {})
    assert cost["device_hours"] == 4.0
    assert (cost["samples"], cost["epochs"], cost["tokens"]) == (160, 2.0, 1600)
    assert (cost["model_tflop"], cost["hardware_tflop"]) == (320.0, 480.0)
    assert cost["samples_per_s_over_all"] == pytest.approx(160 / 1800)


@pytest.mark.parametrize(("number", "words"), [(1023, "1023 B"), (1536, "1.5 KiB"), (3.4 * 2**30, "3.4 GiB")])
def test_sizes_are_of_1024(number: float, words: str) -> None:
    assert size(number) == words


def test_intervals_hold_95_of_100_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_effects, "_draw", lambda pairs: np.linspace(-1, 1, 2001))
    low, high = bench_effects.interval([])
    assert low == pytest.approx(bench_effects.percent(-0.95))
    assert high == pytest.approx(bench_effects.percent(0.95))
