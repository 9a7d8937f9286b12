"""The autoencoder: shapes, locality, its objective's sums, and a codec made of a run of it."""

import math

import numpy as np
import pytest
import torch
from support import merge

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.models.autoencoder import AutoencoderConfig
from vitrail.objectives.autoencode import AutoencodeConfig
from vitrail.objectives.ssim import ssim
from vitrail.recipe import load_recipe


def make(**options):
    return AutoencoderConfig(**({"channels": 2, "width": 8, "shape": 16} | options)).build()


@pytest.mark.parametrize(
    ("ndim", "factor", "grid"),
    [(1, 8, (2,)), (2, 2, (8, 8)), (2, 4, (4, 4)), (2, 8, (2, 2)), (3, 4, (4, 4, 4)), (3, (1, 4, 2), (16, 4, 8))],
)
def test_shapes_and_flops(ndim, factor, grid):
    model = make(ndim=ndim, factor=factor, latent=3, depth=2)
    images = torch.randn(2, 2, *[16] * ndim)
    latents = model.encode(images)
    assert latents.shape == (2, 3, *grid)
    assert model.decode(latents).shape == images.shape
    torch.testing.assert_close(model(**model.inputs(images)), model.decode(latents))

    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(**model.inputs(images[:1]))
    assert counter.get_total_flops() == pytest.approx(model.flops().forward, rel=0.02)


@pytest.mark.parametrize("ndim", [2, 3])
def test_it_computes_in_bfloat16(ndim):
    model = make(ndim=ndim).to(torch.bfloat16)
    images = torch.randn(1, 2, *[16] * ndim)
    output = model(**model.inputs(images))
    assert (output.dtype, output.shape, model.encode(images).dtype) == (torch.bfloat16, images.shape, torch.float32)
    output.float().square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_latents_are_bounded_and_noise_is_added_to_them():
    model = make(latent=2, limit=2.0)
    images = 1e3 * torch.randn(1, 2, 16, 16)
    assert model.encode(images).abs().max() <= 2.0
    noise = torch.full((1, 2, 4, 4), 0.5)
    torch.testing.assert_close(model(images, noise=noise), model.decode(model.encode(images) + noise))


def test_tiles_are_encoded_as_parts_of_the_whole():
    model = make(factor=2, width=4, shape=None)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    image = torch.randn(1, 2, 48, 48)
    whole, part = model.encode(image), model.encode(image[..., 8:40, 8:40])
    torch.testing.assert_close(part[..., 4:-4, 4:-4], whole[..., 8:-8, 8:-8])


def test_wrong_settings():
    for options, words in (
        ({"factor": 3}, "factor 3 must be 2, 4 or 8"),
        ({"factor": 1}, "factor 1 must be"),
        ({"ndim": 4}, "ndim 4 must be"),
        ({"latent": 0}, "latent 0"),
        ({"shape": 18}, "no multiple of factor"),
        ({"channels": None}, "channels is not known"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    with pytest.raises(ValueError, match="no multiple of factor"):
        make(shape=None).inputs(torch.zeros(1, 2, 18, 18))
    with pytest.raises(ValueError, match="'nois' is no input of Autoencoder; did you mean 'noise'"):
        make()(torch.zeros(1, 2, 16, 16), nois=None)
    from vitrail.models import ViTConfig

    with pytest.raises(UserError, match=r"'autoencode' trains model\.kind 'autoencoder', not 'vit'"):
        AutoencodeConfig().build(ViTConfig(size="S/16"), Statistics((0.0,), (1.0,)))
    with pytest.raises(ValueError, match="noise"):
        AutoencodeConfig(noise=-1.0)


def test_layouts_that_share_a_sample_are_refused():
    from vitrail.parallel.check import ImpossibleLayout, refuse

    tree = {
        "run": {"name": "a", "steps": 1},
        "model": {"kind": "autoencoder"},
        "objective": {"kind": "autoencode"},
        "data": {"train": [{"kind": "dummy", "path": "dummy"}], "crop": 16, "batch": 4},
    }
    assert refuse(load_recipe(tree), 2).data == 2
    for axis in ("context", "tensor"):
        with pytest.raises(ImpossibleLayout, match="'autoencoder' hold no attention"):
            refuse(load_recipe(merge(tree, {f"parallel.{axis}": 2})), 2)


def test_the_objective(tmp_path):
    c = AutoencoderConfig(channels=2, width=8, shape=16, factor=4, latent=3)
    statistics = Statistics((10.0, 20.0), (2.0, 4.0))
    objective = AutoencodeConfig(noise=0.5).build(c, statistics)
    values = torch.randint(0, 256, (3, 2, 16, 16), dtype=torch.uint8)
    batch, draws = Batch([4, 5, 6], values), Draws(0, [4, 5, 6])
    inputs, targets = objective.prepare(batch, draws)
    assert inputs["noise"].shape == (3, 3, 4, 4)
    assert 0.4 < float(inputs["noise"].std()) < 0.6
    assert torch.equal(objective.prepare(batch, draws)[0]["noise"], inputs["noise"])
    torch.testing.assert_close(inputs["x"][:, 1], (values[:, 1] - 20.0) / 4)
    inputs, targets = objective.prepare(batch, draws, evaluating=True)
    assert set(inputs) == {"x"}

    output = inputs["x"] + 0.5
    loss = objective.loss(output, targets)
    assert float(loss.sum / loss.count) == pytest.approx(0.25)
    found = objective.summarise({name: float(v) for name, v in objective.measure(output, targets).items()})
    assert set(found) == set(objective.metrics)
    mse = (1.0**2 + 2.0**2) / 2  # half a standard deviation of either variable
    assert found["mse"] == pytest.approx(mse, rel=1e-5)
    assert found["psnr"] == pytest.approx(10 * math.log10(255**2 / mse), rel=1e-5)
    assert 0.9 < found["ssim"] < 1
    measured = {name: float(v) for name, v in objective.measure(inputs["x"], targets).items()}
    assert objective.summarise(measured)["ssim"] == pytest.approx(1, abs=1e-9)
    assert found["mse_over_variance"] == pytest.approx(0.25 / float(inputs["x"].double().var(correction=0)), rel=1e-4)
    absolute = AutoencodeConfig(loss="l1").build(c, statistics).loss(output, targets)
    assert float(absolute.sum / absolute.count) == pytest.approx(0.5)

    # Values without a known peak have no PSNR.
    other = Batch([4], values[:1].float())
    targets = objective.prepare(other, Draws(0, [4]))[1]
    sums = objective.measure(output[:1], targets)
    found = objective.summarise({name: float(v) for name, v in sums.items()})
    assert math.isnan(found["psnr"])
    assert math.isnan(found["ssim"])
    caption = objective.draw(tmp_path / "a.png", objective.rows(other, output[:1], targets), step=7, held_out=True)
    assert caption == "step 7: 4 x 4 voxels to 3 numbers and back; held-out samples"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    own = Batch([4], values[:1], statistics=(torch.full((1, 2), 1.0), torch.full((1, 2), 3.0)))
    torch.testing.assert_close(objective.prepare(own, Draws(0, [4]))[0]["x"], (values[:1] - 1.0) / 3)


@pytest.mark.parametrize(("shape", "expected"), [((16, 20), 0.8997910082501682), ((12, 14, 13), 0.8902075120760212)])
def test_similarity_is_that_of_scikit_image(shape, expected):
    """Expected: structural_similarity of scikit-image 0.26, with Gaussian weights and no sample covariance."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    x = numbers * 7919 % 256.0
    pairs = torch.from_numpy(np.stack([x, numbers * 104729 % 256 * 0.3 + 0.7 * x]))[:, None, None]
    assert float(ssim(*pairs, 255.0)) == pytest.approx(expected, abs=1e-12)
    both = [torch.cat([each, pairs[0]], dim=0) for each in pairs]  # samples apart, channels alike
    assert ssim(*both, 255.0).tolist() == pytest.approx([expected, 1], abs=1e-12)
    both = [torch.cat([each, pairs[0]], dim=1) for each in pairs]
    assert float(ssim(*both, 255.0)) == pytest.approx((expected + 1) / 2, abs=1e-12)
    assert math.isnan(ssim(*pairs[..., :10], 255.0))
    with pytest.raises(ValueError, match="data_range 0"):
        ssim(*pairs, 0.0)


def test_pictures_of_volumes(tmp_path):
    from PIL import Image

    from vitrail.report.panels import pairs_panel

    volume = np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype(np.float32)
    with Image.open(pairs_panel(tmp_path / "a.png", [(volume, volume), (volume, -volume)], title="t")) as image:
        assert image.width > 300
    with pytest.raises(ValueError, match="at least one row"):
        pairs_panel(tmp_path / "b.png", [])


def test_it_learns():
    model = make(channels=1, factor=2, latent=2)
    torch.manual_seed(0)
    waves = torch.arange(16.0) * torch.rand(16, 1) * 2
    images = torch.sin(waves[:, None, :, None] + 3 * torch.rand(16, 1, 1, 1) + waves[:, None, None, :])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        loss = (model(**model.inputs(images)) - images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1 * float(images.var())
