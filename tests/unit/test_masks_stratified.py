"""Stratified masks: the same count in every slab, random within it, refused where slabs do not fit."""

import math
from typing import Any

import pytest
import torch

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.patches import Part, cut
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, RandomMask, StratifiedMask, make_mask, num_visible
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.parallel import split as splitting
from vitrail.parallel.split import Split


@pytest.mark.parametrize("grid", [(8, 6), (8, 3, 5)])
@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8])
@pytest.mark.parametrize("slabs", [1, 2, 8])
def test_every_slab_has_the_same_count(grid: tuple[int, ...], ratio: float, slabs: int) -> None:
    tokens = math.prod(grid)
    config = StratifiedMask(ratio=ratio, slabs=slabs)
    mask = make_mask(config, torch.rand(3, tokens, generator=torch.Generator().manual_seed(0)), grid)
    visible, hidden = config.counts(tokens)
    each = num_visible(tokens // slabs, ratio)
    assert visible == slabs * each
    assert hidden == tokens - visible
    for index, count in ((mask.visible, each), (mask.hidden, tokens // slabs - each)):
        assert torch.equal(index, index.sort(dim=1).values)  # slab by slab
        assert index.shape == (3, slabs * count)
        slab = index // (tokens // slabs)
        assert torch.equal(slab, torch.arange(slabs).repeat_interleave(count).expand(3, -1))
    assert torch.equal(
        torch.cat(mask, dim=1).sort(dim=1).values, torch.arange(tokens).expand(3, -1)
    )  # all, and each once


def test_within_a_slab_the_lowest_noise_stays() -> None:
    noise = torch.rand(2, 48)
    mask = make_mask(StratifiedMask(ratio=0.75, slabs=4), noise, (4, 3, 4))
    for slab in range(4):
        alone = make_mask(RandomMask(ratio=0.75), noise[:, slab * 12 : slab * 12 + 12], (1, 3, 4))
        assert torch.equal(mask.visible[:, slab * 3 : slab * 3 + 3], alone.visible + slab * 12)
    one, random = (make_mask(c, noise, (4, 3, 4)) for c in (StratifiedMask(slabs=1), RandomMask()))
    assert torch.equal(one.visible, random.visible)


def test_slabs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.mask.slabs: 4 does not divide the 6 patches.*use one of 1, 2, 3, 6"):
        make_mask(StratifiedMask(slabs=4), torch.rand(1, 48), (6, 8))
    with pytest.raises(ValueError, match=r"model.mask.slabs: 6 slabs of 3 tokens have none visible .*fewer slabs"):
        StratifiedMask(slabs=6, ratio=0.75).check((6, 3))
    with pytest.raises(ValueError, match="have none hidden"):
        StratifiedMask(slabs=6, ratio=1e-7).check((6, 3))
    with pytest.raises(ValueError, match="slabs 0 must be at least 1"):
        StratifiedMask(slabs=0)


@pytest.mark.parametrize("decode_ratio", [1.0, 0.4])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_sees_and_predicts_tokens_of_its_own_slab(parts: int, decode_ratio: float) -> None:
    config = MAEConfig(
        encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4),
        decoder=DecoderConfig(kind="self", width=16, depth=1, heads=2, decode_ratio=decode_ratio),
        mask=StratifiedMask(ratio=0.7, slabs=4),
        channels=1,
        shape=32,
    )
    objective = ReconstructConfig(on="all").build(config, Statistics((0.0,), (1.0,)))
    batch = Batch([0, 1], torch.rand(2, 1, 32, 32))
    _, targets = objective.prepare(batch, Draws(0, batch.counters))
    visible, hidden = targets.index.split([targets.num_visible, targets.index.shape[1] - targets.num_visible], dim=1)
    assert visible.shape[1] == 4 * 4  # of 16 in each slab
    assert hidden.shape[1] == 4 * round(12 * decode_ratio)
    for index in range(parts):
        for tokens in (visible, hidden):
            assert (cut(tokens, Part(index, parts)) // (64 // parts) == index).all()


@pytest.mark.parametrize("slabs", [2, 4])
def test_what_is_known_to_be_at_home_is_not_counted(slabs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting would make the host wait for the device."""
    config = MAEConfig(
        encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4),
        decoder=DecoderConfig(kind="self", width=16, depth=1, heads=2),
        mask=StratifiedMask(slabs=slabs),
        channels=1,
        shape=16,
    )
    objective = ReconstructConfig().build(config, Statistics((0.0,), (1.0,)))
    images, draws = torch.randn(2, 1, 16, 16), Draws(0, [3, 4])
    whole, _ = objective.prepare(Batch([3, 4], images), draws)

    def counted(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(splitting, "count_owners", counted)
    split = Split(config, Part(1, 2))
    slab = split.slab(objective, (16, 16))
    assert slab is not None
    batch = Batch([3, 4], images[:, :, 8:], slab=slab)
    inputs, _ = split.prepare(objective, batch, draws)
    assert torch.equal(inputs["x"], cut(whole["x"], Part(1, 2)))
