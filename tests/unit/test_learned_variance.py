"""Learned variances: the hybrid loss and the sampler against the published formulas, here in plain PyTorch."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from vitrail.data.batch import Batch, Statistics
from vitrail.diffusion import Prediction, SamplingConfig, Steps, guided, sample
from vitrail.diffusion.variance import log_variance, step_variances
from vitrail.draws import Draws
from vitrail.layers.tokens import patchify
from vitrail.models.dit import DiTConfig
from vitrail.objectives.denoise import DenoiseConfig
from vitrail.objectives.flow import FlowConfig

MODEL = DiTConfig(width=16, depth=1, heads=2, patch=2, channels=3, shape=(4, 6), learn_sigma=True)
STATISTICS = Statistics((127.5,) * 3, (127.5,) * 3)  # bytes from -1 to 1
TIMES = torch.tensor([0, 1, 500, 999, 0])


def tables(betas: Tensor) -> dict[str, Tensor]:
    """Nichol & Dhariwal's tables of a schedule, float64."""
    alpha_bar = torch.cumprod(1 - betas, 0)
    before = torch.cat([torch.ones(1).double(), alpha_bar[:-1]])
    variance = betas * (1 - before) / (1 - alpha_bar)
    return {
        "alpha_bar": alpha_bar,
        "low": torch.cat([variance[1:2], variance[1:]]).log(),
        "high": betas.log(),
        "of_data": betas * before.sqrt() / (1 - alpha_bar),
        "of_x": (1 - before) * (1 - betas).sqrt() / (1 - alpha_bar),
    }


def step_back(known: dict[str, Tensor], x: Tensor, t: Tensor, noise: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and logarithm of the variance that a model's noise and values mean."""
    at = {name: table[t].view(-1, 1, 1, 1) for name, table in known.items()}
    data = (x - (1 - at["alpha_bar"]).sqrt() * noise) / at["alpha_bar"].sqrt()
    share = (values + 1) / 2
    return at["of_data"] * data + at["of_x"] * x, share * at["high"] + (1 - share) * at["low"]


def published_loss(x0: Tensor, noise: Tensor, t: Tensor, output: Tensor, betas: Tensor) -> Tensor:
    """Mean squared error and bound [B] of improved-diffusion's LEARNED_RANGE; images of bytes from -1 to 1."""
    known = tables(betas)
    answer, values = output.chunk(2, dim=1)
    at = {name: table[t].view(-1, 1, 1, 1) for name, table in known.items()}
    x = at["alpha_bar"].sqrt() * x0 + (1 - at["alpha_bar"]).sqrt() * noise
    mean, logs = step_back(known, x, t, answer.detach(), values)
    true = at["of_data"] * x0 + at["of_x"] * x
    kl = 0.5 * (-1 + logs - at["low"] + (at["low"] - logs).exp() + (true - mean) ** 2 * (-logs).exp())

    def cdf(v: Tensor) -> Tensor:
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    above, below = (cdf((-0.5 * logs).exp() * (x0 - mean + side / 255)) for side in (1, -1))
    likely = torch.where(x0 > 0.999, (1 - below).clamp(min=1e-12), (above - below).clamp(min=1e-12))
    likely = torch.where(x0 < -0.999, above.clamp(min=1e-12), likely).log()
    bound = torch.where((t == 0).view(-1, 1, 1, 1), -likely, kl) / math.log(2)
    return (noise - answer).square().mean(dim=(1, 2, 3)) + bound.mean(dim=(1, 2, 3)) * len(betas) / 1000


@pytest.mark.parametrize("steps", [1000, 1200])
def test_the_loss_is_the_published_one(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "draw_times", lambda self, uniform: TIMES)
    objective = DenoiseConfig(steps=steps).build(MODEL, STATISTICS)
    objective.equip(value_range=(0.0, 255.0))
    values = torch.randint(0, 256, (5, 3, 4, 6), generator=torch.Generator().manual_seed(0))
    values[:, :, 0], values[:, :, 1] = 0, 255
    batch = Batch(list(range(5)), values.to(torch.uint8), None, ("r", "g", "b"))
    draws = Draws(1, batch.counters)
    _, targets = objective.prepare(batch, draws)
    noise = draws.normal("noise", 3, 4, 6).double()
    output = torch.randn(5, 6, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    output[:, :3] = noise + 0.05 * output[:, :3]  # as good as a trained model's
    ours, theirs = (output.clone().requires_grad_() for _ in range(2))

    loss = objective.loss(patchify(ours, (2, 2)).float(), targets)
    betas = torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * 1000 / steps
    expected = published_loss(values.double() / 127.5 - 1, noise, TIMES, theirs, betas).mean()
    assert (loss.sum / loss.count).item() == pytest.approx(expected.item(), rel=1e-4)
    (loss.sum / loss.count).backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-3, atol=2e-6)
    assert float(ours.grad[:, 3:].abs().min(dim=0).values.max()) > 0


def test_the_bound_is_the_same_whatever_is_predicted() -> None:
    """Answers that mean the same data have the same bound, and it adds nothing to the gradient of the mean."""
    batch = Batch(list(range(5)), torch.rand(5, 3, 4, 6) * 255, None, ("r", "g", "b"))
    draws, found = Draws(1, batch.counters), []
    kinds: tuple[Prediction, ...] = get_args(Prediction)
    for predict in kinds:
        objective, plain = (
            DenoiseConfig(predict=predict).build(replace(MODEL, learn_sigma=learn), STATISTICS)
            for learn in (True, False)
        )
        (_, targets), (_, known) = (each.prepare(batch, draws) for each in (objective, plain))
        process, times = objective.process, targets.bound.times
        data, noise = (patchify(t, (2, 2)) for t in (batch.values / 127.5 - 1, draws.normal("noise", 3, 4, 6)))
        seen = process.from_data(process.mix(data, noise, times), data + 0.1, times)
        answer = process.target(*seen, times, predict).requires_grad_()
        pair = (t.unflatten(2, (-1, 3)) for t in (answer, torch.full_like(answer, 0.3)))
        loss, simple = objective.loss(torch.stack([*pair], dim=3).flatten(2), targets), plain.loss(answer, known)
        found.append(((loss.sum - simple.sum) / loss.count).item())
        torch.testing.assert_close(*(torch.autograd.grad(each.sum, answer)[0] for each in (loss, simple)))
    assert found == pytest.approx([found[0]] * 3, rel=1e-3)


def test_fewer_steps_have_variances_of_their_own() -> None:
    process, taken = Steps(), [0, 100, 250, 700, 999]
    alpha_bar = process.alpha_bar()[taken]
    known = tables(1 - alpha_bar / torch.cat([torch.ones(1).double(), alpha_bar[:-1]]))
    for number in range(1, 5):
        variances = step_variances(process, torch.tensor(taken[number]), torch.tensor(taken[number - 1]))
        for place, name in ((-1.0, "low"), (1.0, "high")):
            found = log_variance(torch.tensor(place).double(), *variances)
            assert float(found) == pytest.approx(float(known[name][number]), rel=1e-9)


def test_ancestral_samples_draw_by_the_learned_variance() -> None:
    process = Steps(steps=30)
    mixed = torch.randn(6, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) / 3

    def model(x: Tensor, times: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, mixed, padding=1).tanh()

    draw = lambda seed: torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    x, settings = draw(99), SamplingConfig(sampler="ancestral", steps=30)
    made = sample(process, "noise", model, x, settings, fresh=draw, learned=True)
    known = tables(torch.linspace(1e-4, 0.02, 30, dtype=torch.float64) * 1000 / 30)
    first = int(process.grid(1, "noise")[0])
    for number, t in enumerate(range(first, -1, -1)):
        mean, logs = step_back(known, x, torch.tensor([t, t]), *model(x, x).chunk(2, dim=1))
        x = mean + (logs / 2).exp() * draw(number) if t else mean
    torch.testing.assert_close(made, x, rtol=1e-8, atol=1e-8)
    for other in ("ddim", "euler", "heun"):  # need no variance
        settings = SamplingConfig(sampler=other, steps=4)
        plain = sample(process, "noise", lambda x, t: model(x, t)[:, :3], draw(99), settings, fresh=draw)
        assert torch.equal(sample(process, "noise", model, draw(99), settings, fresh=draw, learned=True), plain)


def test_guidance_leaves_the_variance_of_the_class() -> None:
    def model(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([x, x], dim=1) + labels.view(-1, 1, 1, 1)

    x = torch.randn(2, 3, 4, 4)
    answer = guided(model, torch.tensor([1, 2]), 5, SamplingConfig(guidance=3.0), Steps())(x, torch.tensor([4, 4]))
    labels = torch.tensor([1.0, 2.0]).view(-1, 1, 1, 1)
    torch.testing.assert_close(answer[:, :3], x + 5 + 3 * (labels - 5))
    torch.testing.assert_close(answer[:, 3:], x + labels)


SHORT = DenoiseConfig(steps=20, sampling=SamplingConfig(sampler="ancestral", steps=5))


@pytest.mark.parametrize("config", [SHORT, FlowConfig()])
def test_it_trains_and_samples(config: DenoiseConfig | FlowConfig) -> None:
    """Flow has no variances, and leaves that half of the answer as it is."""
    torch.manual_seed(0)
    objective, model = config.build(MODEL, STATISTICS), MODEL.build()
    batch = Batch(list(range(16)), torch.rand(16, 3, 4, 6) * 255, None, ("r", "g", "b"))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    found = []
    for _ in range(30):
        inputs, targets = objective.prepare(batch, Draws(1, batch.counters))
        loss = objective.loss(model(**inputs), targets)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
        found.append(float(loss.sum / loss.count))
    assert found[-1] < 0.9 * found[0]
    moved = model.final.proj.bias.detach().view(-1, 2, 3).abs().amax(dim=(0, 2))
    assert moved[0] > 0
    assert (moved[1] > 0) == (config.kind == "denoise")
    made = objective.generate(lambda inputs: model(**inputs), counters=[0, 1], seed=0)
    assert made.shape == (2, 3, 4, 6)
    assert torch.isfinite(made).all()
    metrics = objective.measure(model(**inputs), objective.prepare(batch, Draws(1, batch.counters), evaluating=True)[1])
    assert all(torch.isfinite(value) for value in metrics.values())
