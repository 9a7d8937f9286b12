"""The comparison with other libraries runs from end to end, on small models, whatever of them is installed."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT

NAMES = ("planner", "peers_models", "peers_variants", "peers")


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    for name in NAMES:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # they import each other, and dataclasses look there
        spec.loader.exec_module(module)
    yield module
    for name in NAMES:
        del sys.modules[name]


def test_a_row_is_measured_and_shown_whatever_fails(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tiny", "--windows", "2", "--steps", "1", "--out", str(tmp_path)]
    assert peers.main([*words, "--rows", "dit", "--seconds", "0"]) == 75
    assert peers.main([*words, "--rows", "dit"]) == 0
    path = tmp_path / "peers_tiny.json"
    stored = json.loads(path.read_text())
    first = {name: one["date"] for name, one in stored["measured"].items()}
    assert set(first) == {"dit/vitrail/2", "dit/plain DiT, compiled/2"}
    assert {one["status"] for one in stored["measured"].values()} == {"ok"}
    # Another sitting: what is known stays, a package that is missing is told, and a failure ends nothing.
    monkeypatch.setitem(sys.modules, "timm", None)

    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(peers, "measure_ours", fail)
    capsys.readouterr()
    assert peers.main([*words, "--rows", "dit", "vit_b"]) == 0
    told = capsys.readouterr().out
    stored = json.loads(path.read_text())["measured"]
    assert {name: stored[name]["date"] for name in first} == first
    assert stored["vit_b/timm, compiled/2"]["status"] == "missing"
    assert "| timm, compiled | - | not installed |" in told
    assert "RuntimeError: no such kernel" in told
    assert peers.main([*words, "--page"]) == 0
    assert "| DiT-XL/2, 32x32x4, moving average | vitrail | 2 |" in (tmp_path / "peers_tiny.md").read_text()


def test_a_profile_and_a_variant_of_ours(peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--windows", "1", "--steps", "1", "--out", str(tmp_path)]
    assert peers.main([*words, "--profile", "vit_b"]) == 0
    assert "| products | " in capsys.readouterr().out
    assert peers.main([*words, "--rows", "vit_b", "--variants", "gelu"]) == 0
    assert "| ViT-B/16 at 224 | gelu | 2 | " in capsys.readouterr().out


def test_every_variant_and_recipe_is_valid(peers: Any) -> None:
    from vitrail.recipe import load_recipe

    sides = [(side, row) for tiny in (True, False) for row in peers.rows(tiny) for side in row.sides if side.tree]
    assert {row.name for _, row in sides} >= {"vit_l", "vit_b", "mae_l", "dit", "unetr", "adaptive", "mae3d_quarter"}
    for side, _ in sides:
        load_recipe(side.tree(side.batches[0]))
    for variant in peers.VARIANTS.values():
        load_recipe(sides[0][0].tree(2), [*variant.overrides])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_bias_TNT", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("triton_poi_fused_gelu_gelu_backward_view_4", "GELU"),
        ("triton_red_fused_native_layer_norm_backward_sum_6", "norms"),
        ("triton_red_fused_sum_7", "bias gradients"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "layout conversions"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x32x32", "convolutions"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("triton_poi_fused_add_mul_3", "others"),
    ],
)
def test_kernels_have_kinds(peers: Any, kernel: str, kind: str) -> None:
    assert sys.modules["peers_variants"].kind_of(kernel) == kind


def test_the_plain_transformer_learns(peers: Any) -> None:
    torch.manual_seed(0)
    step = sys.modules["peers_models"].plain_dit(4, torch.device("cpu"), False, True)
    losses = [float(step()) for _ in range(3)]
    assert all(0 < loss < 10 for loss in losses)
