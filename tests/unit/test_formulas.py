"""Other projects' counts give the numbers that they published, and ours give what these are worth."""

from dataclasses import replace

import pytest

from vitrail.cost.work import FORMULAS, training_flops
from vitrail.models import DecoderConfig, DiTConfig, EncoderConfig, MAEConfig, StudyViTConfig, ViTConfig
from vitrail.models.mae import RandomMask

TOKENS = 64**3  # of a volume of 512^3 voxels in patches of 8^3
GH200 = 990.0e12


def volume_mae(ratio: float) -> MAEConfig:
    """The 2-billion-parameter masked autoencoder of torchtitan-mae: its decoder sees all tokens."""
    encoder = EncoderConfig(
        width=3072, depth=16, heads=32, kv_heads=8, patch=8, mlp="swiglu", hidden=11264, norm="rms", bias=False,
        positions="rope",
    )  # fmt: skip
    decoder = DecoderConfig(kind="self", width=512, depth=4, heads=32, hidden=1536)
    return MAEConfig(encoder=encoder, decoder=decoder, mask=RandomMask(ratio=ratio), ndim=3, channels=1, shape=512)


@pytest.mark.parametrize(
    ("ratio", "tokens_per_s", "published", "honest"),
    [(0.01, 2040, 0.341, 0.351), (0.95, 12100, 0.245, 0.092)],
)
def test_what_was_published_for_volumes_and_what_it_is(
    ratio: float, tokens_per_s: float, published: float, honest: float
) -> None:
    config = volume_mae(ratio)
    rate = tokens_per_s / TOKENS  # samples a second and GPU
    assert training_flops("torchtitan-mae", config) * rate / GH200 == pytest.approx(published, abs=5e-4)
    assert training_flops("model", config) * rate / GH200 == pytest.approx(honest, abs=5e-4)


def test_most_of_the_work_at_95_percent_is_the_decoder() -> None:
    import torch

    with torch.device("meta"):
        model = volume_mae(0.95).build()
    visible, _ = model.config.token_counts()
    encoder, everything = model.encoder.flops(visible).training, model.flops().training
    assert encoder / 1e12 == pytest.approx(262, abs=1)
    assert 1 - encoder / everything == pytest.approx(0.87, abs=0.01)


def test_the_frontier_study_counted_operations() -> None:
    """Its log says 4.5341 TFLOP for a step of Base with 32 images."""
    assert 32 * training_flops("olcf", StudyViTConfig(size="Base", channels=3)) == pytest.approx(4.5341e12, rel=1e-5)


def test_modulations_run_once_a_sample() -> None:
    config = DiTConfig(size="0.5B/2", channels=16, shape=64, classes=1000)
    assert training_flops("torchditan", config) / 1e12 == pytest.approx(3.15, abs=0.01)
    assert training_flops("model", config) / 1e12 == pytest.approx(2.20, abs=0.01)


def test_all_tokens_charges_hidden_ones() -> None:
    config = volume_mae(0.95)
    assert training_flops("all-tokens", config) > 20 * training_flops("model", config)
    assert training_flops("all-tokens", replace(config, mask=RandomMask(ratio=0.01))) == pytest.approx(
        training_flops("model", replace(config, mask=RandomMask(ratio=0.01))), rel=0.02
    )
    vit = ViTConfig(width=32, depth=1, heads=2, patch=4, channels=1, shape=8)
    assert training_flops("all-tokens", vit) == training_flops("model", vit)


def test_errors_say_what_to_do() -> None:
    vit = ViTConfig(width=32, depth=1, heads=2, patch=4, channels=1, shape=8)
    with pytest.raises(ValueError, match="did you mean 'torchditan'"):
        training_flops("torchdit", vit)
    for name in ("torchtitan-mae", "torchditan"):
        with pytest.raises(ValueError, match="use 'model'"):
            training_flops(name, vit)
    with pytest.raises(ValueError, match="shape is not known"):
        training_flops("model", replace(vit, shape=None))
    assert next(iter(FORMULAS)) == "model"
