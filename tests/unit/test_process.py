"""Processes of diffusion: golden levels, moments, conversions, times, weights and grids."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from vitrail.diffusion import Prediction, Process, Steps, Straight

KINDS: tuple[Prediction, ...] = get_args(Prediction)
PROCESSES: dict[str, Process] = {
    "linear": Steps(),
    "cosine": Steps(schedule="cosine"),
    "zero": Steps(zero_snr=True),
    "short": Steps(steps=7, schedule="cosine", zero_snr=True),
    "straight": Straight(),
    "shifted": Straight(times="logit_normal", shift=3.0),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- levels


def test_golden_alpha_bar() -> None:
    golden = {
        0: 0.9999,
        1: 0.99978,
        15: 0.996017,
        50: 0.969951,
        100: 0.895142,
        250: 0.521423,
        499: 0.0785872,
        750: 0.00330016,
        999: 4.03583e-5,
    }
    alpha_bar = Steps().alpha_bar()
    assert alpha_bar.shape == (1000,)
    assert alpha_bar.dtype == torch.float64
    for step, value in golden.items():
        assert alpha_bar[step].item() == pytest.approx(value, rel=2e-6)


def test_cosine_follows_its_curve_until_betas_are_limited() -> None:
    alpha_bar = Steps(schedule="cosine").alpha_bar()
    curve = torch.cos((torch.arange(1001) / 1000 + 0.008) / 1.008 * math.pi / 2).square()
    torch.testing.assert_close(alpha_bar[:990].float(), (curve / curve[0])[1:991], rtol=1e-4, atol=1e-7)
    betas = 1 - alpha_bar[1:] / alpha_bar[:-1]
    assert betas.max().item() == pytest.approx(0.999)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [2, 3, 10, 50, 1000, 4000])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_any_number_of_steps_goes_from_data_to_noise(steps: int, schedule: str, zero_snr: bool) -> None:
    process = Steps(steps=steps, schedule=schedule, zero_snr=zero_snr)  # type: ignore[arg-type]
    signal, spread = process.levels(torch.arange(-1, steps))
    torch.testing.assert_close(signal**2 + spread**2, torch.ones_like(signal))
    assert (signal.diff() < 0).all()
    assert (signal[0], spread[0]) == (1, 0)  # clean data
    assert signal[1] > 0.9 or steps < 10
    assert signal[-1] < 0.05
    assert (signal[-1] == 0) == zero_snr
    plain, _ = Steps(steps=steps, schedule=schedule).levels(torch.tensor(0))  # type: ignore[arg-type]
    torch.testing.assert_close(signal[1], plain)  # zero_snr keeps the first step


def test_linear_reaches_the_same_noise_with_any_number_of_steps() -> None:
    for steps in (100, 250, 4000):
        share = Steps(steps=steps).alpha_bar()[steps // 2 - 1] / Steps().alpha_bar()[499]
        assert share.item() == pytest.approx(1, abs=0.06)


def test_levels_keep_shape_and_device() -> None:
    for process, times in ((Steps(), torch.tensor([[3, 999], [0, -1]])), (Straight(), torch.rand(2, 2))):
        for level in process.levels(times):
            assert level.shape == times.shape
            assert level.device == times.device


# --- noising


@every_process
@pytest.mark.parametrize("shape", [(2, 5), (1, 3, 4), (2, 2, 3, 2)])
def test_noising_has_the_moments_of_its_levels(process: Process, shape: tuple[int, ...]) -> None:
    number = 20000
    data, noise = randn(1, *shape, seed=1), randn(number, *shape, seed=2)
    times = process.grid(7)[3].expand(number)
    signal, spread = (float(v[0]) for v in process.levels(times))
    x = process.mix(data.expand(number, *shape), noise, times)
    # Means of n numbers are off by spread / sqrt(n), variances by sqrt(2 / n) of themselves: five times that at most.
    assert (x.mean(0) - signal * data[0]).abs().max() < 5 * spread / math.sqrt(number)
    assert (x.var(0) / spread**2 - 1).abs().max() < 5 * math.sqrt(2 / number)
    torch.testing.assert_close(process.mix(data, noise[:1], process.grid(7)[-1]), data)  # the clean end


def test_each_sample_has_its_own_time() -> None:
    for process, times in ((Steps(), torch.tensor([0, 400, 999])), (Straight(), torch.tensor([0.0, 0.4, 1.0]))):
        data, noise = randn(3, 1, 2, 2), randn(3, 1, 2, 2, seed=1)
        for kind in KINDS:
            x, target = process.mix(data, noise, times), process.target(data, noise, times, kind)
            for i, time in enumerate(times):
                one = data[i : i + 1], noise[i : i + 1]
                torch.testing.assert_close(x[i : i + 1], process.mix(*one, time), atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(target[i : i + 1], process.target(*one, time, kind), atol=1e-6, rtol=1e-6)


def test_half_precision_is_computed_in_float32() -> None:
    for process, times in ((Steps(), torch.tensor([5, 700])), (Straight(), torch.tensor([0.1, 0.7]))):
        data, noise = randn(2, 1, 3), randn(2, 1, 3, seed=1)
        assert process.mix(data, noise, times).dtype == torch.float64
        assert process.mix(data.float(), noise.float(), times).dtype == torch.float32
        x = process.mix(data.bfloat16(), noise.bfloat16(), times)
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, process.mix(data.bfloat16().float(), noise.bfloat16().float(), times))


# --- predictions


@given(name=st.sampled_from(sorted(PROCESSES)), place=st.floats(0.001, 0.999), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_predictions_convert_into_each_other(name: str, place: float, seed: int) -> None:
    process = PROCESSES[name]
    times = process.draw_times(torch.tensor([place, 1 - place, place / 2], dtype=torch.float64))
    data, noise = randn(3, 2, 2, 2, seed=seed), randn(3, 2, 2, 2, seed=seed + 100)
    x = process.mix(data, noise, times)
    blind = (process.levels(times)[0] == 0).any()  # where all is noise it does not tell the data
    kinds = [kind for kind in KINDS if kind != "noise" or not blind]
    for given_kind in kinds:
        output = process.target(data, noise, times, given_kind)
        denoised = process.denoised(x, output, times, given_kind)
        torch.testing.assert_close(denoised.data, data, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(denoised.noise, noise, rtol=1e-6, atol=1e-6)
        for wanted in KINDS:  # and from there into any other, and back
            converted = process.target(*denoised, times, wanted)
            torch.testing.assert_close(converted, process.target(data, noise, times, wanted), rtol=1e-6, atol=1e-6)
            if wanted in kinds:
                again = process.target(*process.denoised(x, converted, times, wanted), times, given_kind)
                torch.testing.assert_close(again, output, rtol=1e-6, atol=1e-6)


@given(name=st.sampled_from(sorted(PROCESSES)), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_answers_that_are_wrong_convert_alike(name: str, seed: int) -> None:
    """Any answer at all: the data and noise that it stands for mix to x again."""
    process = PROCESSES[name]
    times = process.grid(5)[1:-1]
    x, output = randn(len(times), 1, 4, seed=seed), randn(len(times), 1, 4, seed=seed + 100)
    for kind in KINDS:
        denoised = process.denoised(x, output, times, kind)
        torch.testing.assert_close(process.mix(*denoised, times), x, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(process.target(*denoised, times, kind), output, rtol=1e-9, atol=1e-9)


def test_velocity_is_the_derivative_of_x_by_the_clock() -> None:
    data, noise = randn(1, 1, 4), randn(1, 1, 4, seed=1)
    for process, times in ((Steps(steps=100000), [40000, 40001, 40002]), (Straight(), [0.4, 0.40001, 0.40002])):
        before, here, after = (torch.tensor(t) if isinstance(t, int) else torch.tensor(t).double() for t in times)
        slope = process.mix(data, noise, after) - process.mix(data, noise, before)
        slope /= process.clock(after) - process.clock(before)
        torch.testing.assert_close(slope, process.velocity(data, noise, here), rtol=1e-4, atol=1e-5)
    zero = Steps(zero_snr=True)
    ends = [float(zero.clock(torch.tensor(t))) for t in (-1, 999)]
    assert ends == pytest.approx([0, math.pi / 2])
    torch.testing.assert_close(zero.velocity(data, noise, torch.tensor(999)), -data)


def test_velocity_of_straight_lines_is_data_minus_noise() -> None:
    data, noise = randn(2, 1, 3), randn(2, 1, 3, seed=1)
    assert torch.equal(Straight().target(data, noise, torch.tensor([0.0, 1.0]), "velocity"), data - noise)


# --- times


def test_steps_are_drawn_alike_often() -> None:
    process = Steps(steps=8)
    times = process.draw_times((torch.arange(800) + 0.5) / 800)
    assert times.bincount().tolist() == [100] * 8
    most = torch.tensor([0.0, 1 - 2**-24])
    for steps in (2, 1000, 1001, 4000):
        assert Steps(steps=steps).draw_times(most).tolist() == [0, steps - 1]
    assert process.told(times).dtype == torch.float32
    assert process.told(torch.tensor([0, 7])).tolist() == [0, 7]


@pytest.mark.parametrize("shift", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.8, 0.5), (0.4, 1.7)])
def test_logit_normal_and_shifted_times(mean: float, std: float, shift: float) -> None:
    """By the closed form of the distribution: as much of it lies below each time as there are uniform numbers below."""
    uniform = (torch.arange(4001, dtype=torch.float64) + 0.5) / 4001

    def unshift(times: torch.Tensor) -> torch.Tensor:
        shifted_noise = 1 - times  # = shift * u / (1 + (shift - 1) * u), solved for the noise level u
        return 1 - shifted_noise / (shift - (shift - 1) * shifted_noise)

    plain = unshift(Straight(shift=shift).draw_times(uniform))
    torch.testing.assert_close(plain, uniform)
    times = unshift(Straight(times="logit_normal", mean=mean, std=std, shift=shift).draw_times(uniform))
    below = 0.5 * (1 + torch.erf((times.logit() - mean) / std / math.sqrt(2)))
    torch.testing.assert_close(below, uniform)
    torch.testing.assert_close(times.logit().mean().item(), mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(times.logit().std().item(), std, atol=1e-2, rtol=0)


def test_shift_is_towards_noise_and_keeps_the_ends() -> None:
    uniform = torch.linspace(0, 1, 11)
    shifted = Straight(shift=3.0).draw_times(uniform)
    assert (shifted[1:-1] < uniform[1:-1]).all()
    assert shifted[[0, -1]].tolist() == [0, 1]
    assert 1 - shifted[5].item() == pytest.approx(3 * 0.5 / (1 + 2 * 0.5))
    ends = Straight(times="logit_normal").draw_times(torch.tensor([0.0, 1 - 2**-24]))
    assert ends.isfinite().all()
    assert Straight().told(torch.tensor([0.25])).tolist() == [250]


# --- weights


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_min_snr_weighs_the_data_alike_whatever_is_predicted(gamma: float, schedule: str) -> None:
    process = Steps(min_snr=gamma, schedule=schedule)  # type: ignore[arg-type]
    times = torch.tensor([0, 10, 100, 300, 600, 900, 998, 999])
    signal, spread = process.levels(times)
    snr = (signal / spread) ** 2
    data, noise = randn(8, 1, 5), randn(8, 1, 5, seed=1)
    x = process.mix(data, noise, times)
    for kind in KINDS:
        target = process.target(data, noise, times, kind)
        output = target + 1e-3 * randn(8, 1, 5, seed=2)
        error = (process.denoised(x, output, times, kind).data - data).square().sum((1, 2))
        weighed = process.weights(times, kind) * (output - target).square().sum((1, 2))
        torch.testing.assert_close(weighed, snr.clamp(max=gamma) * error, rtol=1e-5, atol=1e-12)
        assert process.weights(times, kind).isfinite().all()
        assert process.weights(times, kind).dtype == torch.float32
    assert process.weights(torch.tensor([0]), "noise").item() == pytest.approx(gamma / snr[0].item(), rel=1e-5)
    assert process.weights(torch.tensor([900]), "noise").item() == 1


def test_plain_weights_are_one() -> None:
    for process, times in ((Steps(), torch.tensor([0, 999])), (Straight(shift=2.0), torch.tensor([0.0, 0.9]))):
        for kind in KINDS:
            assert torch.equal(process.weights(times, kind), torch.ones(2))


# --- grids


@given(
    steps=st.integers(2, 1200),
    part=st.floats(0, 1),
    schedule=st.sampled_from(["linear", "cosine"]),
    zero_snr=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_grid_of_steps_goes_from_the_noisiest_to_clean_data(
    steps: int, part: float, schedule: str, zero_snr: bool
) -> None:
    process = Steps(steps=steps, schedule=schedule, zero_snr=zero_snr)  # type: ignore[arg-type]
    number = max(1, round(part * steps))
    grid = process.grid(number)
    assert grid.shape == (number + 1,)
    assert grid[0] == steps - 1
    assert grid[-1] == -1
    assert (grid.diff() < 0).all()
    assert process.grid(steps).tolist() == list(range(steps - 1, -2, -1))
    assert process.grid(1).tolist() == [steps - 1, -1]
    if not zero_snr:  # who predicts the noise begins where something of the data is left
        grid = process.grid(number, "noise")
        signal, _ = process.levels(torch.arange(steps))
        assert grid[0] == max(0, int((signal >= 0.005).sum()) - 1)
        assert len(grid) == min(number, int(grid[0]) + 1) + 1
        assert grid[-1] == -1
        assert (grid.diff() < 0).all()


@every_process
def test_grids_are_even_in_the_share_of_the_way(process: Process) -> None:
    if process in (Steps(), Steps(schedule="cosine"), Steps(zero_snr=True), Straight()):
        shares = process.share(process.grid(20))
        assert shares.diff().numpy() == pytest.approx(0.05, abs=0.01)
    shares = process.share(process.grid(5))
    assert shares[0] < 0.01
    assert shares[-1] == 1
    assert (shares.diff() > 0).all()


def test_a_straight_grid_is_shifted_as_training_is() -> None:
    torch.testing.assert_close(Straight().grid(4), torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64))
    grid = Straight(shift=3.0).grid(4)
    torch.testing.assert_close(grid, Straight(shift=3.0).draw_times(torch.linspace(0, 1, 5, dtype=torch.float64)))
    assert grid[[0, -1]].tolist() == [0, 1]
    assert Straight().grid(5000).shape == (5001,)


# --- refusals


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Steps(steps=1), "steps 1 must be at least 2"),
        (lambda: Steps(schedule="sigmoid"), "schedule 'sigmoid' is unknown"),  # type: ignore[arg-type]
        (lambda: Steps(min_snr=0.0), "min_snr 0 must be above 0"),
        (lambda: Steps(min_snr=math.nan), "min_snr nan must be above 0"),
        (lambda: Steps(min_snr=5.0, zero_snr=True), "min_snr 5 and zero_snr do not go together"),
        (lambda: Straight(times="normal"), "times 'normal' is unknown"),  # type: ignore[arg-type]
        (lambda: Straight(std=0.0), "std 0 must be above 0"),
        (lambda: Straight(mean=math.inf), "mean inf must be a finite number"),
        (lambda: Straight(shift=-1.0), "shift -1 must be above 0"),
        (lambda: Steps(steps=10).grid(11), "steps 11 must be from 1 to 10"),
        (lambda: Steps().grid(0), "steps 0 must be from 1 to 1000"),
        (lambda: Straight().grid(0), "steps 0 must be at least 1"),
        (lambda: Steps(zero_snr=True).check("noise"), "predict 'noise' works neither with zero_snr"),
        (lambda: Straight().check("noise"), "predict 'noise' works neither with zero_snr"),
        (lambda: Steps().check("score"), "predict 'score' is unknown; use one of noise, data, velocity"),  # type: ignore[arg-type]
    ],
)
def test_refusals(build, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build()


def test_a_recipe_may_hold_a_process() -> None:
    assert TypeAdapter(Steps).validate_python({"steps": 50, "min_snr": 5}) == Steps(steps=50, min_snr=5.0)
    with pytest.raises(ValidationError, match="beta"):
        TypeAdapter(Steps).validate_python({"beta": 1})
    for kind in KINDS:
        Steps().check(kind)
        if kind != "noise":
            Steps(zero_snr=True).check(kind)
            Straight().check(kind)
