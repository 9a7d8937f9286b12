"""DiT of Hugging Face's diffusers: its weights here give its outputs, told the waves of the time that DiT has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from references import empty, scramble

from vitrail.layers.tokens import unpatchify
from vitrail.models.dit import DiTConfig
from vitrail.weights import load_weights


@pytest.mark.slow  # the import alone takes seconds
@torch.no_grad()
def test_dit(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed", exc_type=ImportError)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "patch_size": 2}
    theirs = diffusers.DiTTransformer2DModel(
        **sizes, in_channels=4, out_channels=8, sample_size=8, num_embeds_ada_norm=5, norm_eps=1e-6
    )
    scramble(theirs, std=0.1)
    embedders = [block.norm1.emb for block in theirs.transformer_blocks]
    for emb in embedders:
        emb.load_state_dict(embedders[0].state_dict())  # as in the published weights
        emb.time_proj.downscale_freq_shift = 0
    theirs.save_pretrained(tmp_path)
    ours = empty(DiTConfig(width=32, depth=2, heads=2, patch=2, channels=4, shape=8, classes=5, learn_sigma=True))
    report = load_weights(ours, tmp_path)
    assert report.adapter == "diffusers"
    assert not report["skipped"]
    images, times = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3, 700])
    labels = torch.tensor([0, 5])
    expected = theirs(images, timestep=times, class_labels=labels).sample
    found = unpatchify(ours(**ours.inputs(images), times=times.float(), labels=labels), (2, 2), (8, 8))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
