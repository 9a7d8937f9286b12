"""timm's ViTs: their weights here give their outputs. On the CPU; needs a PyTorch beside which torchvision imports."""

from typing import Any

import pytest
import torch
from references import empty, scramble

from vitrail.models.vit import ViTConfig
from vitrail.weights import load_weights

timm = pytest.importorskip(
    "timm",
    reason="timm needs torchvision, whose wheels do not import beside a CPU-only PyTorch",
    exc_type=ImportError,
)

SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
OURS: dict[str, Any] = {
    "width": 32,
    "depth": 2,
    "heads": 4,
    "patch": 8,
    "channels": 3,
    "shape": 32,
    "positions": "learned",
    "cls_token": True,
    "pool": "cls",
    "classes": 5,
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "qk_norm": ({"qk_norm": True}, {"qk_norm": True}),
    "layer_scale": ({"init_values": 1e-5}, {"layer_scale": 1.0}),
    "no_qkv_bias": ({"qkv_bias": False}, {}),
    "registers": ({"reg_tokens": 3, "no_embed_class": True}, {"registers": 3}),
    "registers_with_positions": ({"reg_tokens": 3}, {"registers": 3}),
    "pre_norm": ({"pre_norm": True}, {"input_norm": True}),
    "mean_of_tokens": (
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"cls_token": False, "pool": "mean"},
    ),
}


def compare(theirs: torch.nn.Module, config: ViTConfig, size: int) -> None:
    scramble(theirs, std=0.02)
    ours = empty(config)
    report = load_weights(ours, theirs.state_dict())
    assert report.adapter == "timm"
    assert not report["skipped"]
    assert not report["unused"]
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(**ours.inputs(images)), theirs(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_small(case: str) -> None:
    from timm.models.vision_transformer import VisionTransformer

    theirs, ours = CASES[case]
    compare(VisionTransformer(**SMALL, num_classes=5, **theirs), ViTConfig(**OURS | ours), 32)


def test_swiglu() -> None:
    from timm.layers import SwiGLUPacked
    from timm.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(**SMALL, num_classes=5, mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU)
    compare(theirs, ViTConfig(**OURS, mlp="swiglu", hidden=64), 32)


def test_vit_base_patch16_224() -> None:
    theirs = timm.create_model("vit_base_patch16_224", pretrained=False)
    c = ViTConfig(size="B/16", channels=3, shape=224, positions="learned", cls_token=True, pool="cls", classes=1000)
    compare(theirs, c, 224)


def test_resized_positions_are_those_of_timm() -> None:
    from timm.layers import resample_abs_pos_embed

    from vitrail.weights.pieces import position_table

    table = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(1))
    for new in ((6, 6), (2, 3), (8, 4)):
        expected = resample_abs_pos_embed(table, list(new), num_prefix_tokens=1)[0, 1:]
        torch.testing.assert_close(position_table(table, old=(4, 4), new=new, skip=1).value, expected)
