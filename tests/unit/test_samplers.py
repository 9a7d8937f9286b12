"""Samplers with models that are known exactly: Gaussian mixtures of small fields have closed forms."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from vitrail.diffusion import Denoised, Predict, Prediction, Process, SamplingConfig, Steps, Straight, guided, sample
from vitrail.diffusion.samplers import AUTO, Step

SAMPLERS = ("ancestral", "ddim", "euler", "heun")
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mixture:
    """Gaussians of fields [C, *S] with weights [K], means [K, d] and correlated covariances [K, d, d]."""

    def __init__(self, shape: tuple[int, ...], weights: Tensor, means: Tensor, covariances: Tensor):
        self.shape, self.weights, self.means, self.covariances = shape, weights, means, covariances
        self.variances, self.axes = torch.linalg.eigh(covariances)

    def parts(self, x: Tensor, signal: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each mode: its probability given x [B, K], and the means of data and noise given x and it [B, K, d]."""
        away = torch.einsum("bkd,kde->bke", x.flatten(1)[:, None] - signal * self.means, self.axes)
        variances = signal**2 * self.variances + spread**2
        logits = self.weights.log() - 0.5 * (away**2 / variances + variances.log()).sum(2)
        data, noise = (
            torch.einsum("bke,kde->bkd", away * factor / variances, self.axes)
            for factor in (signal * self.variances, spread)
        )
        return logits.softmax(1), self.means + data, noise

    def denoised(self, x: Tensor, signal: Tensor, spread: Tensor) -> Denoised:
        probability, *both = self.parts(x, signal, spread)
        return Denoised(*(torch.einsum("bk,bkd->bd", probability, each).view_as(x) for each in both))

    def model(self, process: Process, predict: Prediction) -> Predict:
        """The answer with the least squared error."""

        def answer(x: Tensor, times: Tensor) -> Tensor:
            assert times.shape == (len(x),)
            assert (times == times[0]).all()
            return process.target(*self.denoised(x, *process.levels(times[0])), times, predict)

        return answer

    def modes(self, data: Tensor) -> Tensor:
        """The mode that each sample belongs to, [B]."""
        return self.parts(data, torch.tensor(1.0), torch.tensor(1e-3))[0].argmax(1)

    def draw(self, number: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        modes = torch.multinomial(self.weights, number, replacement=True, generator=generator)
        z = randn(number, self.means.shape[1], seed=seed + 1) * self.variances[modes].sqrt()
        return (self.means[modes] + torch.einsum("be,bde->bd", z, self.axes[modes])).view(number, *self.shape)


def mixture(
    shape: tuple[int, ...], weights: tuple[float, ...] = (0.55, 0.3, 0.15), *, apart: float = 1.0, width: float = 0.35
) -> Mixture:
    size = math.prod(shape)
    means = apart * torch.linalg.qr(randn(size, len(weights), seed=3))[0].T * math.sqrt(size)
    covariances = []
    for mode in range(len(weights)):  # each with its own axes, long and short ones
        axes = torch.linalg.qr(randn(size, size, seed=10 + mode))[0]
        covariances.append(axes @ torch.diag(width**2 * torch.logspace(0.5, -1.5, size, dtype=torch.float64)) @ axes.T)
    return Mixture(shape, torch.tensor(weights, dtype=torch.float64), means, torch.stack(covariances))


def run(
    truth: Mixture,
    process: Process,
    predict: Prediction,
    settings: SamplingConfig,
    *,
    number: int = 0,
    noise: Tensor | None = None,
    **keys,
) -> Tensor:
    noise = randn(number, *truth.shape, seed=100) if noise is None else noise
    keys = {"fresh": lambda i: randn(*noise.shape, seed=1000 + i)} | keys
    return sample(process, predict, truth.model(process, predict), noise, settings, **keys)


def test_each_draw_of_a_step_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice:
        evaluations = 1

        def step(self, at: Step) -> Tensor:
            return at.x + at.fresh() + at.fresh()

    drawn: list[int] = []
    monkeypatch.setattr(SamplingConfig, "method", Twice())
    fresh = lambda i: drawn.append(i) or torch.zeros(1, 1, 1)  # noqa: E731
    model = lambda x, times: torch.zeros_like(x)  # noqa: E731
    sample(Straight(), "velocity", model, torch.zeros(1, 1, 1), SamplingConfig(steps=3), fresh=fresh)
    assert drawn == [0, 3, 1, 4]


FIELDS = {"1-D": (2, 3), "2-D": (1, 3, 2), "3-D": (2, 1, 2, 2)}
WAYS: dict[str, tuple[Process, Prediction]] = {
    "linear noise": (Steps(), "noise"),
    "cosine data": (Steps(steps=400, schedule="cosine"), "data"),
    "zero velocity": (Steps(zero_snr=True), "velocity"),
    "straight": (Straight(), "velocity"),
    "shifted data": (Straight(times="logit_normal", shift=2.0), "data"),
}
NUMBER_OF_STEPS = {"ancestral": 200, "ddim": 100, "euler": 100, "heun": 25}
every_way = pytest.mark.parametrize(("process", "predict"), WAYS.values(), ids=WAYS)


# --- distributions


@every_sampler
@pytest.mark.parametrize(
    ("way", "field"),
    [(way, field) for way in ("linear noise", "straight") for field in FIELDS]
    + [("cosine data", "1-D"), ("zero velocity", "2-D"), ("shifted data", "3-D")],
)
def test_moments_and_modes_are_recovered(sampler: str, way: str, field: str) -> None:
    """Within five standard errors of so many samples: of means, covariances, mode weights and covariances in a mode."""
    (process, predict), shape = WAYS[way], FIELDS[field]
    number, truth = 2000, mixture(shape)
    out = run(truth, process, predict, SamplingConfig(sampler=sampler, steps=NUMBER_OF_STEPS[sampler]), number=number)  # type: ignore[arg-type]
    assert out.shape == (number, *shape)
    x, modes = out.flatten(1), truth.modes(out)

    mean = truth.weights @ truth.means
    spread = truth.means - mean
    covariance = torch.einsum("k,kij->ij", truth.weights, truth.covariances + spread[:, :, None] * spread[:, None])
    check_moments(x, mean, covariance)
    weights = modes.bincount(minlength=3) / number
    assert ((weights - truth.weights).abs() < 5 * (truth.weights * (1 - truth.weights) / number).sqrt()).all()
    for mode in range(3):
        check_moments(x[modes == mode], truth.means[mode], truth.covariances[mode])


def check_moments(x: Tensor, mean: Tensor, covariance: Tensor) -> None:
    number, away = len(x), x - mean
    assert (away.mean(0).abs() < 5 * (covariance.diag() / number).sqrt()).all()
    products = away[:, :, None] * away[:, None]
    assert ((products.mean(0) - covariance).abs() < 5 * products.std(0) / math.sqrt(number)).all()


def test_the_test_sees_what_is_wrong() -> None:
    """Exact draws pass; ten steps of DDIM, whose variance is a tenth too small, do not."""
    truth = mixture((1, 3, 2))
    draws = truth.draw(2000, seed=7)
    for mode in range(3):
        check_moments(draws[truth.modes(draws) == mode].flatten(1), truth.means[mode], truth.covariances[mode])
    out = run(truth, Steps(), "noise", SamplingConfig(sampler="ddim", steps=10), number=2000)
    with pytest.raises(AssertionError):
        check_moments(out[truth.modes(out) == 0].flatten(1), truth.means[0], truth.covariances[0])


@every_sampler
def test_what_is_predicted_does_not_matter(sampler: str) -> None:
    truth, settings = mixture((1, 4)), SamplingConfig(sampler=sampler, steps=12)  # type: ignore[arg-type]
    for process in (Steps(), Straight()):
        kinds: list[Prediction] = ["velocity", "data"] + (["noise"] if isinstance(process, Steps) else [])  # type: ignore[assignment]
        first, *others = (run(truth, process, kind, settings, number=50) for kind in kinds)
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-7, atol=1e-7)


# --- convergence


def slopes(errors: list[float]) -> list[float]:
    return [math.log2(before / after) for before, after in pairwise(errors)]


@pytest.mark.parametrize(
    "process",
    [Steps(steps=20000), Steps(steps=20000, schedule="cosine", zero_snr=True), Straight(), Straight(shift=2.0)],
    ids=["linear", "cosine", "straight", "shifted"],
)
def test_heun_converges_faster_than_euler(process: Process) -> None:
    """From the same noise, twice as many steps halve Euler's error and quarter Heun's."""
    truth = mixture((1, 2, 2), (0.6, 0.4), apart=0.5, width=0.8)
    noise = randn(100, 1, 2, 2, seed=5)

    def solve(sampler: str, steps: int) -> Tensor:
        return run(truth, process, "velocity", SamplingConfig(sampler=sampler, steps=steps), noise=noise)  # type: ignore[arg-type]

    best = solve("heun", 800)
    errors = {
        sampler: [(solve(sampler, steps) - best).square().mean().sqrt().item() for steps in (16, 32, 64, 128)]
        for sampler in ("ddim", "euler", "heun")
    }
    for sampler, order in (("ddim", 1), ("euler", 1), ("heun", 2)):
        assert slopes(errors[sampler])[-2:] == pytest.approx([order] * 2, abs=0.25), (sampler, errors[sampler])
    assert errors["heun"][0] < errors["euler"][1]  # at the same number of evaluations, too


@pytest.mark.parametrize("process", [Steps(steps=5000, zero_snr=True), Straight()], ids=["steps", "straight"])
def test_the_solution_of_a_gaussian_is_known(process: Process) -> None:
    """Noise is stretched along the covariance's axes and moved to the mean."""
    truth = mixture((1, 4), (1.0,))
    noise = randn(20, 1, 4, seed=5)
    out = run(truth, process, "velocity", SamplingConfig(sampler="heun", steps=400), noise=noise)
    stretched = noise.flatten(1) @ truth.axes[0] * truth.variances[0].sqrt() @ truth.axes[0].T
    torch.testing.assert_close(out.flatten(1), truth.means + stretched, rtol=2e-3, atol=2e-3)


def test_euler_keeps_data_of_variance_one_exactly() -> None:
    """The velocity of DDPM is 0 then, where DDIM loses variance with every step."""
    truth = Mixture((1, 2), torch.ones(1).double(), torch.zeros(1, 2).double(), torch.eye(2).double()[None])
    noise = randn(10, 1, 2)
    for sampler in ("euler", "heun"):
        settings = SamplingConfig(sampler=sampler, steps=10)  # type: ignore[arg-type]
        out = run(truth, Steps(), "velocity", settings, noise=noise)
        signal, _ = Steps().levels(Steps().grid(10)[-2])
        torch.testing.assert_close(out, noise * signal)  # but for the last step, which takes the model's word


def test_auto_is_the_best_for_about_fifty_evaluations() -> None:
    """For fields with the spectrum of images, by the exact law of what comes out: samplers are linear here."""
    frequency = torch.arange(32, dtype=torch.float64)
    variances = 1 / (1 + frequency**2)
    variances *= 32 / variances.sum()
    truth = Mixture((1, 32), torch.ones(1).double(), torch.zeros(1, 32).double(), torch.diag(variances)[None])
    for process in (Steps(), Steps(schedule="cosine"), Straight()):
        errors, asked = {}, {}
        for sampler in SAMPLERS:
            count: list[int] = []
            steps = 25 if sampler == "heun" else 50
            settings = SamplingConfig(sampler=sampler, steps=steps)  # type: ignore[arg-type]
            # Impulses in the noise of the start (row 0) and of each step (the others): their squares add up.
            start = torch.zeros(steps, 1, 32).double()
            start[0] = 1

            def impulse(i: int, start: Tensor = start) -> Tensor:
                return start.roll(i + 1, 0)

            out = run(
                truth, process, "velocity", settings, noise=start, fresh=impulse, tick=lambda c=count: c.append(1)
            )
            errors[sampler] = (out.square().sum(0).sqrt() - variances.sqrt()).square().mean().sqrt().item()
            asked[sampler] = len(count)
        assert max(asked.values()) <= 50
        assert min(errors, key=errors.__getitem__) == AUTO
        assert errors[AUTO] < 0.01 < errors["ddim"] < errors["ancestral"]
    settings = SamplingConfig(sampler=AUTO)
    assert torch.equal(
        run(truth, Straight(), "velocity", SamplingConfig(), number=3),
        run(truth, Straight(), "velocity", settings, number=3),
    )


@every_sampler
@pytest.mark.parametrize("predict", ["noise", "velocity"])
@pytest.mark.parametrize("steps", [25, 100, 1000])
def test_answers_that_are_a_little_wrong_give_samples_that_are(sampler: str, predict: Prediction, steps: int) -> None:
    """A hundredth of each answer is missing; where hardly any data are left, that may be all of them."""
    truth, number = mixture((1, 3, 2)), min(steps, 200 if sampler == "ancestral" else 25)
    wanted = truth.draw(5000, seed=3).std().item()
    processes: list[Process] = [Steps(steps=steps), Steps(steps=steps, schedule="cosine")]
    processes += [] if predict == "noise" else [Steps(steps=steps, zero_snr=True), Straight(), Straight(shift=3.0)]
    for process in processes:
        model = truth.model(process, predict)
        out = sample(
            process,
            predict,
            lambda x, times, model=model: 0.99 * model(x, times),
            randn(300, *truth.shape, seed=1),
            SamplingConfig(sampler=sampler, steps=number),  # type: ignore[arg-type]
            fresh=lambda i: randn(300, *truth.shape, seed=1000 + i),
        )
        assert out.std().item() == pytest.approx(wanted, rel=0.1), process


# --- steps


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [12, 60])
def test_ancestral_with_all_steps_is_the_textbook_update(steps: int, schedule: str) -> None:
    process, truth = Steps(steps=steps, schedule=schedule), mixture((1, 2, 2))  # type: ignore[arg-type]
    x = start = randn(30, 1, 2, 2, seed=5)
    settings = SamplingConfig(sampler="ancestral", steps=steps)
    out = run(truth, process, "noise", settings, noise=start, fresh=lambda i: randn(*start.shape, seed=i))

    alpha_bar = process.alpha_bar()
    before = torch.cat([torch.ones(1).double(), alpha_bar[:-1]])
    alpha = alpha_bar / before
    model = truth.model(process, "noise")
    first = int(process.grid(1, "noise")[0])  # where something of the data is left
    assert first >= steps // 2
    for i, t in enumerate(range(first, -1, -1)):
        noise = model(x, torch.full((30,), t))
        mean = (x - (1 - alpha[t]) / (1 - alpha_bar[t]).sqrt() * noise) / alpha[t].sqrt()
        variance = (1 - alpha[t]) * (1 - before[t]) / (1 - alpha_bar[t])
        x = mean + variance.sqrt() * randn(*start.shape, seed=i) if t > 0 else mean
    torch.testing.assert_close(out, x, rtol=1e-7, atol=1e-7)


def test_ddim_of_straight_lines_is_euler() -> None:
    truth = mixture((1, 4))
    ddim, euler = (
        run(truth, Straight(), "velocity", SamplingConfig(sampler=name, steps=9), number=9)  # type: ignore[arg-type]
        for name in ("ddim", "euler")
    )
    torch.testing.assert_close(ddim, euler)


@every_sampler
@every_way
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_model_sees_each_time_once_and_ends_on_its_data(
    sampler: str, process: Process, predict: Prediction, steps: int
) -> None:
    truth, told, drawn, answers = mixture((1, 4)), [], [], []
    model = truth.model(process, predict)

    def spy(x: Tensor, times: Tensor) -> Tensor:
        told.append(times[0].item())
        answers.append(process.denoised(x, model(x, times), times, predict).data)
        return model(x, times)

    def fresh(i: int) -> Tensor:
        drawn.append(i)
        return randn(3, 1, 4, seed=i)

    seen, ticks = [], []
    settings = SamplingConfig(sampler=sampler, steps=steps)  # type: ignore[arg-type]
    out = sample(
        process,
        predict,
        spy,
        randn(3, 1, 4, seed=9),
        settings,
        fresh=fresh,
        tick=lambda: ticks.append(1),
        seen=lambda i, data: seen.append((i, data)),
    )
    grid = process.grid(steps).tolist()
    later = [t for time in grid[1:-1] for t in (time, time)] if sampler == "heun" else grid[1:-1]
    assert told == pytest.approx([grid[0], *later])  # never at the clean end, where a model is not trained
    assert len(ticks) == len(told)
    assert drawn == (list(range(steps - 1)) if sampler == "ancestral" else [])  # no noise in the last step
    assert [i for i, _ in seen] == list(range(steps))
    torch.testing.assert_close(out, answers[-1])
    assert torch.equal(out, seen[-1][1])


@every_sampler
def test_samples_do_not_depend_on_their_batch(sampler: str) -> None:
    truth, noise = mixture((1, 2, 2)), randn(6, 1, 2, 2, seed=5)
    settings = SamplingConfig(sampler=sampler, steps=6)  # type: ignore[arg-type]

    def some(rows: slice) -> Tensor:
        return run(
            truth, Steps(), "velocity", settings, noise=noise[rows], fresh=lambda i: randn(6, 1, 2, 2, seed=i)[rows]
        )

    whole = some(slice(6))
    torch.testing.assert_close(torch.cat([some(slice(2)), some(slice(2, 6))]), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(whole, some(slice(6)))


@every_sampler
def test_types_of_numbers(sampler: str) -> None:
    for process in (Steps(zero_snr=True), Straight()):
        told = []

        def model(x: Tensor, times: Tensor, told: list = told) -> Tensor:
            told.append(times.dtype)
            return (0.1 * x).bfloat16()  # as under autocast

        for dtype, wanted in (
            (torch.float64, torch.float64),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
        ):
            noise = randn(2, 1, 3).to(dtype)
            settings = SamplingConfig(sampler=sampler, steps=3)  # type: ignore[arg-type]
            out = sample(process, "velocity", model, noise, settings, fresh=lambda i: randn(2, 1, 3))
            assert out.dtype == wanted
            assert out.isfinite().all()
            assert told[-1] == (torch.int64 if isinstance(process, Steps) else wanted)
            assert not out.requires_grad


# --- limits


@every_sampler
@every_way
def test_predicted_data_stay_within_limits(sampler: str, process: Process, predict: Prediction) -> None:
    low, high = torch.tensor([-0.5, -0.1])[:, None], torch.tensor([0.5, 0.1])[:, None]
    truth, seen = mixture((2, 3)), []
    settings = SamplingConfig(sampler=sampler, steps=8)  # type: ignore[arg-type]
    keys = {"limits": (low, high), "seen": lambda i, data: seen.append(data)}
    out = run(truth, process, predict, settings, number=20, **keys)
    for data in (*seen, out):
        assert data.isfinite().all()
        assert (data >= low).all()
        assert (data <= high).all()
    assert (out[:, 0] == 0.5).any()
    free = run(truth, process, predict, SamplingConfig(sampler=sampler, steps=8, clip=False), number=20, **keys)  # type: ignore[arg-type]
    torch.testing.assert_close(free, run(truth, process, predict, settings, number=20), rtol=0, atol=0)
    wide = run(truth, process, predict, settings, number=20, limits=(torch.tensor(-99.0), torch.tensor(99.0)))
    torch.testing.assert_close(wide, free, rtol=1e-6, atol=1e-6)  # limits that nothing reaches change nothing


# --- guidance


def labelled(truth: Mixture, process: Process, calls: list) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A model of samples whose label is their mode; the label after the last is none at all."""

    def conditional(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        assert len(x) == len(times) == len(labels)
        calls.append((len(x), float(process.share(times[0]))))
        probability, data, noise = truth.parts(x, *process.levels(times[0]))
        known = torch.nn.functional.one_hot(labels, len(truth.weights) + 1)[:, :-1].double()
        probability = torch.where(labels[:, None] < len(truth.weights), known, probability)
        both = (torch.einsum("bk,bkd->bd", probability, each).view_as(x) for each in (data, noise))
        return process.target(*both, times, "velocity")

    return conditional


def generate(process: Process, calls: list, labels: Tensor, **keys) -> Tensor:
    truth, settings = mixture((1, 4)), SamplingConfig(**({"steps": 10} | keys))
    model = guided(labelled(truth, process, calls), labels, 3, settings, process)
    noise = randn(len(labels), 1, 4, seed=5)
    return sample(process, "velocity", model, noise, settings, fresh=lambda i: randn(*noise.shape, seed=i))


LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
both_processes = pytest.mark.parametrize("process", [Steps(), Straight()], ids=["steps", "straight"])


@both_processes
@every_sampler
def test_guidance_of_one_is_conditional_and_of_zero_unconditional(process: Process, sampler: str) -> None:
    truth, settings, noise = mixture((1, 4)), SamplingConfig(sampler=sampler, steps=10), randn(6, 1, 4, seed=5)  # type: ignore[arg-type]
    for guidance, labels in ((1.0, LABELS), (0.0, torch.full_like(LABELS, 3))):
        calls: list = []
        conditional = labelled(truth, process, [])
        plain = sample(
            process,
            "velocity",
            lambda x, t, labels=labels, model=conditional: model(x, t, labels),
            noise,
            settings,
            fresh=lambda i: randn(*noise.shape, seed=i),
        )
        assert torch.equal(generate(process, calls, LABELS, sampler=sampler, guidance=guidance), plain)
        assert {size for size, _ in calls} == {6}  # the model is asked about nothing else
    assert torch.equal(truth.modes(generate(process, [], LABELS, sampler=sampler, steps=50)), LABELS)


@both_processes
def test_guidance_extrapolates_with_one_doubled_batch(process: Process) -> None:
    calls: list = []
    conditional = labelled(mixture((1, 4)), process, calls)
    x, times = randn(6, 1, 4), process.grid(10)[4].expand(6)
    with_label, without = conditional(x, times, LABELS), conditional(x, times, torch.full_like(LABELS, 3))
    calls.clear()
    for guidance in (0.5, 3.0):
        model = guided(conditional, LABELS, 3, SamplingConfig(guidance=guidance), process)
        torch.testing.assert_close(model(x, times), without + guidance * (with_label - without))
    assert [size for size, _ in calls] == [12, 12]
    assert generate(process, [], LABELS, guidance=4.0).isfinite().all()


@both_processes
@pytest.mark.parametrize("interval", [(0.2, 0.7), (0.0, 0.3), (0.5, 1.0), (0.0, 1.0)])
def test_guidance_acts_in_its_interval_only(process: Process, interval: tuple[float, float]) -> None:
    calls: list = []
    out = generate(process, calls, LABELS, guidance=3.0, interval=interval, sampler="euler")
    first, last = interval
    assert [size for size, _ in calls] == [12 if first - 1e-6 <= share <= last + 1e-6 else 6 for _, share in calls]
    assert len({size for size, _ in calls}) == (1 if interval == (0.0, 1.0) else 2)
    assert not torch.equal(out, generate(process, [], LABELS, sampler="euler"))
    outside: list = []  # between two times: nothing happens
    same = generate(process, outside, LABELS, guidance=3.0, interval=(0.54, 0.56), sampler="euler")
    assert torch.equal(same, generate(process, [], LABELS, sampler="euler"))
    assert {size for size, _ in outside} == {6}


def test_guidance_everywhere_asks_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host would wait for it."""
    monkeypatch.setattr(Straight, "share", lambda *_: pytest.fail("asked for the time"))
    model = guided(lambda x, times, labels: x, LABELS, 3, SamplingConfig(guidance=3.0), Straight())
    assert model(randn(6, 1, 4), torch.zeros(6)).shape == (6, 1, 4)


def test_an_interval_includes_its_ends_in_float32() -> None:
    calls: list = []
    truth = mixture((1, 4))
    settings = SamplingConfig(steps=10, guidance=2.0, interval=(0.3, 0.8), sampler="euler")
    model = guided(labelled(truth, Straight(), calls), LABELS, 3, settings, Straight())
    sample(Straight(), "velocity", model, torch.randn(6, 1, 4), settings, fresh=lambda i: torch.zeros(()))
    assert [size for size, _ in calls] == [6] * 3 + [12] * 6 + [6]


# --- refusals


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"sampler": "dpm"}, "sampler 'dpm' is unknown; use auto, ancestral, ddim, euler or heun"),
        ({"steps": 0}, "steps 0 must be at least 1"),
        ({"guidance": -1.0}, "guidance -1 must be 0 or more"),
        ({"guidance": math.nan}, "guidance nan must be 0 or more"),
        ({"interval": (0.8, 0.2)}, "interval 0.8, 0.2 must be two rising numbers"),
        ({"interval": (0.0, 1.5)}, "interval 0, 1.5 must be two rising numbers"),
    ],
)
def test_settings_refuse(keys: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplingConfig(**keys)


def test_settings_come_from_a_recipe() -> None:
    read = TypeAdapter(SamplingConfig).validate_python
    assert read({"steps": 9, "interval": [0.1, 0.9]}) == SamplingConfig(steps=9, interval=(0.1, 0.9))
    with pytest.raises(ValidationError, match="eta"):
        read({"eta": 1})


def test_sampling_refuses() -> None:
    noise, settings = randn(2, 1, 3), SamplingConfig(steps=10)

    def go(process: Process, predict: str, model: Predict = lambda x, t: x) -> Tensor:
        return sample(process, predict, model, noise, settings, fresh=lambda i: noise)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="steps 10 must be from 1 to 9"):
        go(Steps(steps=9), "velocity")
    with pytest.raises(ValueError, match="predict 'noise' works neither with zero_snr"):
        go(Steps(zero_snr=True), "noise")
    with pytest.raises(ValueError, match="predict 'noise' works neither"):
        go(Straight(), "noise")
    with pytest.raises(ValueError, match="predict 'score' is unknown"):
        go(Steps(), "score")
    with pytest.raises(ValueError, match=r"answers with shape \[2, 2, 3\] to samples of \[2, 1, 3\]"):
        go(Steps(), "velocity", lambda x, t: torch.cat([x, x], 1))


@pytest.mark.gpu
@every_sampler
def test_a_gpu_gives_the_same(sampler: str) -> None:
    for process in (Steps(), Straight()):
        settings, noise = SamplingConfig(sampler=sampler, steps=10, guidance=2.0), torch.randn(6, 1, 4)  # type: ignore[arg-type]

        def on(device: str, process: Process = process, settings: SamplingConfig = settings, noise=noise) -> Tensor:
            labels = LABELS.to(device)
            model = guided(
                lambda x, t, y: torch.tanh(x + y.view(-1, 1, 1) + process.told(t).view(-1, 1, 1) / 1000),
                labels,
                3,
                settings,
                process,
            )
            limits = (torch.tensor(-1.0), torch.tensor(1.0))
            start = noise.to(device)
            return sample(process, "velocity", model, start, settings, fresh=lambda i: start, limits=limits).cpu()

        torch.testing.assert_close(on("cuda"), on("cpu"), rtol=1e-4, atol=1e-4)
