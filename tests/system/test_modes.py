"""Ways to compute the same training: bf16, deterministic, compiled, on a GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import losses, parameters, tiny_recipe

import vitrail


def trained(volume: Path, folder: Path, **changes: Any) -> Path:
    options = {"run__steps": 8, "checkpoint__every": 8, "eval__every": 8, "log__pictures": 8} | changes
    return vitrail.train(tiny_recipe(volume, folder, **options), quiet=True).run_dir


def test_bf16_is_near_fp32_and_keeps_fp32_masters(volume: Path, tmp_path: Path) -> None:
    exact = trained(volume, tmp_path / "fp32")
    rough = trained(volume, tmp_path / "bf16", precision={"compute": "bf16"})
    assert not np.array_equal(losses(rough), losses(exact))
    np.testing.assert_allclose(losses(rough), losses(exact), rtol=0.02)
    assert all(value.dtype == np.float32 for value in parameters(rough).values())


def test_deterministic_runs_repeat(volume: Path, tmp_path: Path) -> None:
    one, two = (trained(volume, tmp_path / name, run__deterministic=True) for name in "ab")
    assert np.array_equal(losses(one), losses(two))
    assert all(np.array_equal(v, parameters(two)[k]) for k, v in parameters(one).items())


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(volume: Path, tmp_path: Path) -> None:
    plain = trained(volume, tmp_path / "plain")
    compiled = trained(volume, tmp_path / "compiled", parallel={"compile": True, "recompute": "full"})
    np.testing.assert_allclose(losses(compiled), losses(plain), rtol=1e-5)


@pytest.mark.gpu
def test_a_gpu_computes_the_same(volume: Path, tmp_path: Path) -> None:
    """In fp32; and in its own mode (bf16, compiled) nearly so."""
    plain = trained(volume, tmp_path / "cpu")
    same = trained(
        volume, tmp_path / "fp32", run__device="cuda", precision={"compute": "fp32"}, parallel={"compile": False}
    )
    np.testing.assert_allclose(losses(same), losses(plain), rtol=2e-3)
    fast = trained(volume, tmp_path / "bf16", run__device="cuda")
    np.testing.assert_allclose(losses(fast), losses(plain), rtol=0.03)
