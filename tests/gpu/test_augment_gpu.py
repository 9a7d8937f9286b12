"""Augmentation on a GPU: the kernel against float64, and every key against the CPU."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT

from vitrail.data.augment import Augmenter, Raw
from vitrail.data.augment import affine as affine_module
from vitrail.data.augment.affine import resample, resample_labels
from vitrail.data.augment.geometry import Geometry
from vitrail.data.batch import Statistics
from vitrail.data.source import Item
from vitrail.recipe.sections import Augment

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
KEYS: dict[str, Any] = {
    "rotate": 180, "scale": [0.8, 1.25], "shear": 5, "flip": True, "elastic": {"amplitude": 3, "grid": 3},
    "gamma": [0.7, 1.4], "contrast": [0.7, 1.4], "brightness": 0.3, "noise": 0.2, "blur": [0.3, 1.5],
    "sections": {"missing": 0.1, "shifted": 0.2, "blurred": 0.1},
}  # fmt: skip


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_augment", ROOT / "benchmarks/augment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_is_used() -> None:
    pytest.importorskip("triton")
    assert affine_module._kernels(torch.zeros(1, 1, 4, 4, device=CUDA), (4, 4)) is not None


@pytest.mark.parametrize("crop", [(256, 256, 256), (40, 96, 72), (512, 384)])
@pytest.mark.parametrize("bent", [False, True])
def test_errors_are_below_a_255th(crop: tuple[int, ...], bent: bool) -> None:
    keys = {"rotate": 180, "scale": [0.9, 1.1], "flip": True} | ({"elastic": {"amplitude": 4}} if bent else {})
    assert benchmark().errors(CUDA, crop, keys) <= 1 / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.float32])
@pytest.mark.parametrize("ndim", [2, 3])
def test_any_type_and_labels_as_on_the_cpu(dtype: torch.dtype, ndim: int) -> None:
    crop = (24, 30, 35)[:ndim]
    geometry = Geometry(Augment(rotate=180, scale=[0.7, 1.4]), crop, ("z", "y", "x")[-ndim:], seed=0)
    ones = (1.0,) * ndim
    size = geometry.window((45,) * ndim, ones, ones)
    values = torch.randint(0, 200, (3, 2, *[s + 3 for s in size])).to(dtype)
    moves = [geometry.draw(n, size, ones, ones, 0) for n in range(3)]
    here = resample(values, moves, [size] * 3, crop)
    there = resample(values.to(CUDA), moves, [size] * 3, crop)
    assert (here - there.cpu()).abs().max() < 0.2
    labels = values[:, 0].long() + 2**40
    same = (
        resample_labels(labels, moves, [size] * 3, crop)
        == resample_labels(labels.to(CUDA), moves, [size] * 3, crop).cpu()
    )
    assert same.float().mean() > 0.999


@pytest.mark.parametrize("key", list(KEYS))
def test_each_key_does_on_the_gpu_what_it_does_on_the_cpu(key: str) -> None:
    crop = (24, 24, 24)
    augmenter = Augmenter(
        Augment(**{key: KEYS[key]}), crop, seed=1, statistics=Statistics((128.0,), (70.0,)), labels="voxel"
    )
    size = augmenter.window(Item("item", (60, 60, 60), (60, 60, 60), (0, 0, 0), (1.0, 1.0, 1.0), None))
    rng = np.random.default_rng(0)
    values, counters = torch.from_numpy(rng.integers(0, 256, (3, 1, *size), dtype=np.uint8)), [5, 6, 900]
    here = augmenter(Raw(counters, values.clone(), values[:, 0] % 4))
    there = augmenter(Raw(counters, values.to(CUDA), (values[:, 0] % 4).to(CUDA)))
    alone = augmenter(Raw(counters[2:], values[2:].to(CUDA), (values[2:, 0] % 4).to(CUDA)))
    assert there.values.dtype == torch.float32
    assert (here.values - there.values.cpu()).abs().max() < 0.5
    assert torch.equal(alone.values[0], there.values[2])
    assert (here.labels == there.labels.cpu()).float().mean() > 0.999  # type: ignore[union-attr]


def test_images_as_on_the_cpu() -> None:
    keys = {
        "resized_crop": {},
        "flip": ["x"],
        "jitter": {"brightness": 0.4, "contrast": 0.4, "hue": 0.2},
        "cutmix": 1.0,
    }
    augmenter = Augmenter(Augment(**keys), (32, 32), seed=1, labels="item", num_classes=5)
    values, labels = torch.randint(0, 256, (8, 3, 70, 90), dtype=torch.uint8), torch.arange(8) % 5
    raw: dict[str, Any] = {"sizes": [(70 - n, 90 - n) for n in range(8)], "variables": ("red", "green", "blue")}
    here = augmenter(Raw(list(range(8)), values, labels, **raw))
    there = augmenter(Raw(list(range(8)), values.to(CUDA), labels.to(CUDA), **raw))
    assert (here.values - there.values.cpu()).abs().max() < 0.5
    torch.testing.assert_close(here.soft, there.soft.cpu())  # type: ignore[union-attr]
