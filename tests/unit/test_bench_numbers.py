"""The numbers of a result, from windows and facts that are given: what several ranks make of them."""

import types

import pytest
import torch

from vitrail.bench.measure import energy_of, notes_on, speed


def test_flops_are_those_of_one_device():
    """2 s for 8 samples of 3 TFLOP on 4 devices: 4 samples/s, 12 TFLOP/s together, 3 on each."""
    flops = types.SimpleNamespace(training=3e12, hardware=lambda recompute: 4e12)
    objective = types.SimpleNamespace(
        tokens_per_sample=lambda: 10, tokens_at=lambda layer: 5, flops=lambda model: flops
    )
    place = types.SimpleNamespace(world=types.SimpleNamespace(size=4), device=torch.device("cpu"))
    recipe = types.SimpleNamespace(model=types.SimpleNamespace(ndim=3))
    data = types.SimpleNamespace(batch=8)
    parts = types.SimpleNamespace(data=data, objective=objective, place=place, recipe=recipe)
    trainer = types.SimpleNamespace(model=None, flow=types.SimpleNamespace(again=None))
    found = speed(parts, trainer, [2.0, 1.0, 9.0])
    assert (found["samples_per_s"], found["images_per_s"], found["tokens_per_s"]) == (
        4,
        None,
        {"all": 40, "visible": 20},
    )
    assert found["step_seconds"] == {"median": 2.0, "low": 1.0, "high": 9.0}
    assert found["tflops"] == pytest.approx(3.0)


def test_energy_is_that_of_all_ranks_for_one_sample():
    assert energy_of([{"joules": 6.0}, {"joules": 2.0}], 4) == 2.0
    assert energy_of([{"joules": 6.0}, {"joules": None}], 4) is None


def test_what_makes_a_result_less_than_it_seems_is_noted():
    assert notes_on([1.0, 1.2], 0, [{"retries": 0}]) == []
    assert notes_on([1.5, 1.0], 0, [{"retries": 0}]) == ["a step took 1 s in one window and 1.5 s in another"]
    skipped, retried = notes_on([1.0], 2, [{"retries": 0}, {"retries": 1}])
    assert skipped.startswith("2 of the timed steps were not finite")
    assert retried.startswith("memory was so short")
