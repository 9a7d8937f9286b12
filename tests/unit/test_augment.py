"""Augmentation: the same sample for the same (seed, counter), positions right to a float64 reference, nothing lost."""

import importlib
import itertools
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.augment import Augmenter, Raw, orient, orientations
from vitrail.data.augment import affine as affine_module
from vitrail.data.augment import intensity as noise_module
from vitrail.data.augment.affine import mirror, resample, resample_labels
from vitrail.data.augment.geometry import Geometry, Move
from vitrail.data.augment.intensity import add_noise, blur, normal
from vitrail.data.batch import Batch, Statistics
from vitrail.data.source import Item
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.models import ViTConfig
from vitrail.objectives.classify import ClassifyConfig
from vitrail.recipe.sections import Augment

AXES = ("z", "y", "x")
ALL = {
    "rotate": 30, "scale": [0.8, 1.25], "shear": 5, "flip": True, "elastic": {"amplitude": 1.5, "grid": 2},
    "gamma": [0.7, 1.4], "contrast": [0.7, 1.4], "brightness": 0.3, "noise": 0.2, "blur": [0.3, 0.8],
    "sections": {"missing": 0.1, "shifted": 0.2, "blurred": 0.1},
}  # fmt: skip


def reference(values: np.ndarray, move: Move, size: tuple, crop: tuple, step: int, *, nearest: bool = False) -> Any:
    """Voxel by voxel in float64: [C, *room] to [C, *crop]."""
    n = len(crop)
    out = np.zeros((len(values), *crop))
    offsets = [(t + 0.5) / move.taps - 0.5 for t in range(move.taps)]
    for place in np.ndindex(*crop):
        for offset in itertools.product(*[offsets] * n):
            at = np.array(place, np.float64) + offset
            if move.nodes is not None:
                spot = [min(max(a / step, 0), m - 1) for a, m in zip(at, move.nodes.shape[1:], strict=True)]
                at = at + [_between(component, spot, component.shape) for component in move.nodes.astype(np.float64)]
            spot = move.matrix @ at + move.origin
            if nearest:
                spot = np.floor(spot + 0.5)
            for channel, plane in enumerate(values):
                out[(channel, *place)] += _between(plane, spot, size)
    return out / move.taps**n


def _between(plane: np.ndarray, spot: Any, size: tuple) -> float:
    low = [int(np.floor(s)) for s in spot]
    total = 0.0
    for corner in itertools.product((0, 1), repeat=len(low)):
        weight = np.prod([abs(1 - c - (s - a)) for c, s, a in zip(corner, spot, low, strict=True)])
        index = [a + c for a, c in zip(low, corner, strict=True)]
        inside = []
        for i, extent in zip(index, size, strict=True):
            while not 0 <= i < extent:
                i = 0 if extent == 1 else (-i if i < 0 else 2 * (extent - 1) - i)
            inside.append(i)
        total += weight * float(plane[tuple(inside)]) if weight else 0.0
    return total


def noise_volume(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def item(shape: tuple, spacing: tuple | None = None, **more: Any) -> Item:
    ones = (1.0,) * len(shape)
    return Item("item", shape, shape, (0,) * len(shape), spacing or ones, None, **more)


def geometry(crop: tuple, **keys: Any) -> Geometry:
    return Geometry(Augment(**keys), crop, AXES[-len(crop) :], seed=3)


CASES = [
    ((6, 5, 7), (2.0, 1.0, 1.0), 1.0, {"rotate": 180, "scale": [0.8, 1.3], "flip": True, "shear": 10}),
    ((6, 6, 6), (1.0, 1.0, 1.0), 1.5, {"rotate": 40, "elastic": {"amplitude": 1.5, "grid": 2}}),
    ((9, 8), (1.0, 0.5), 1.0, {"rotate": 180, "scale": [0.6, 1.4], "elastic": {"amplitude": 1, "grid": 2}}),
    ((8, 8), (1.0, 1.0), 1.0, {"resized_crop": {}, "flip": ["x"]}),
]


def draw(case: int, shape: int = 40) -> tuple[Geometry, tuple[int, ...], list[Move], np.ndarray]:
    crop, spacing, scale, keys = CASES[case]
    g = geometry(crop, **keys)
    size = g.window((shape,) * len(crop), spacing, (scale,) * len(crop))
    values = noise_volume(3, 2, *[s + 2 for s in size])  # more room than the sample fills
    return g, size, [g.draw(n, size, spacing, (scale,) * len(crop), 0) for n in range(3)], values


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("room", [40, 7])  # the worst window, and an item that is too small for it
def test_crops_are_sampled_as_a_float64_reference_does(case, room):
    g, size, moves, values = draw(case, room)
    found = resample(torch.from_numpy(values), moves, [size] * 3, g.crop, step=g.step).numpy()
    labels = resample_labels(torch.from_numpy(values[:, 0]), moves, [size] * 3, g.crop, step=g.step).numpy()
    for n in range(2):
        expected = reference(values[n], moves[n], size, g.crop, g.step)
        assert np.abs(found[n] - expected).max() < 0.25  # of 255: 1e-3
        if moves[n].taps == 1:
            near = reference(values[n, :1], moves[n], size, g.crop, g.step, nearest=True)[0]
            assert (labels[n] != near).mean() < 0.01  # but for positions that lie between two voxels


def test_tiles_side_by_side_make_the_whole(monkeypatch):
    g = geometry((13, 18, 15), rotate=180, elastic={"amplitude": 2})
    size = g.window((40,) * 3, (1.0,) * 3, (1.0,) * 3)
    values, moves = (
        torch.from_numpy(noise_volume(2, 1, *size)),
        [g.draw(n, size, (1.0,) * 3, (1.0,) * 3, 0) for n in (0, 1)],
    )
    whole = [resample(values, moves, [size] * 2, g.crop), resample_labels(values[:, 0], moves, [size] * 2, g.crop)]
    monkeypatch.setitem(affine_module.TILE, 3, (5, 7, 4))
    tiled = [resample(values, moves, [size] * 2, g.crop), resample_labels(values[:, 0], moves, [size] * 2, g.crop)]
    torch.testing.assert_close(tiled[0], whole[0], rtol=0, atol=1e-3)
    assert torch.equal(tiled[1], whole[1])


# ---------------------------------------------------------------- the kernel, run by numpy


class _Numbers(np.ndarray):
    """What Triton's tensors can do that numpy's arrays cannot."""

    def to(self, dtype: Any) -> Any:
        return _numbers(self.astype(dtype))


def _numbers(x: Any) -> Any:
    return np.asarray(x).view(_Numbers)


class _Pointer:
    def __init__(self, memory: np.ndarray, place: Any = 0):
        self.memory, self.place = memory, place

    def __add__(self, by: Any) -> "_Pointer":
        return _Pointer(self.memory, self.place + np.asarray(by))


class _Jit:
    def __init__(self, function: Any):
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            given = [_Pointer(a.numpy().reshape(-1)) if isinstance(a, torch.Tensor) else a for a in arguments]
            for program in itertools.product(*map(range, grid)):
                sys.modules["triton.language"].program = program  # type: ignore[attr-defined]
                self.function(*given, **constants)

        return launch


@pytest.fixture
def kernels(monkeypatch):
    """The module of the CUDA kernel, with a Triton that runs each of its lines in numpy."""

    def load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> Any:
        place = np.where(mask, pointer.place, 0)
        assert (place >= 0).all()
        assert (place < len(pointer.memory)).all()
        return _numbers(np.where(mask, pointer.memory[place], np.asarray(other, pointer.memory.dtype)))

    def store(pointer: _Pointer, value: Any, mask: Any) -> None:
        pointer.memory[pointer.place[mask]] = value[mask]

    language: Any = types.ModuleType("triton.language")
    for name in ("floor", "minimum", "maximum", "where", "abs", "float32", "int32", "int64"):
        setattr(language, name, getattr(np, name))
    language.floor = lambda x: _numbers(np.floor(np.asarray(x, np.float32)))
    language.program_id = lambda axis: _numbers(np.int32(language.program[axis]))
    language.arange = lambda a, b: _numbers(np.arange(a, b, dtype=np.int32))
    language.zeros = lambda shape, dtype: _numbers(np.zeros(shape, dtype))
    language.static_range, language.constexpr = range, int
    language.load, language.store = load, store
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.cdiv, triton.language = _Jit, lambda a, b: -(-a // b), language
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    name = "vitrail.data.augment.affine_kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_kernel_computes_what_the_cpu_does(case, kernels):
    g, size, moves, values = draw(case, 14)
    whole, sizes = torch.from_numpy(values), [size] * 3
    expected = resample(whole, moves, sizes, g.crop, step=g.step)
    found = kernels.launch(whole, moves, sizes, g.crop, step=g.step, nearest=False)
    assert (found - expected).abs().max() < 0.25
    if moves[0].taps == 1:
        labels = whole[:, :1].long() + 2**40
        expected = resample_labels(labels[:, 0], moves, sizes, g.crop, step=g.step)
        found = kernels.launch(labels, moves, sizes, g.crop, step=g.step, nearest=True)[:, 0]
        assert found.dtype == torch.int64
        assert (found != expected).float().mean() < 0.01


# ---------------------------------------------------------------- geometry


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 3), st.floats(0, 180), st.floats(0.5, 1.5), st.floats(0, 20), st.integers(0, 2**40),
    st.lists(st.floats(0.5, 3), min_size=3, max_size=3), st.lists(st.floats(1, 1.99), min_size=3, max_size=3),
    st.sampled_from([(), ("z",), ("z", "x")]), st.booleans(),
)  # fmt: skip
def test_the_window_holds_every_draw(ndim, rotate, zoom, shear, counter, spacing, scale, axes, bend):
    crop = (9, 12, 16)[:ndim]
    keys: dict[str, Any] = {"rotate": rotate, "scale": [zoom, 1.5 * zoom], "shear": shear, "flip": True}
    if ndim == 3 and rotate:
        keys["rotate_axes"] = axes
    if bend:
        keys["elastic"] = {"amplitude": 2.0}
    g = geometry(crop, **keys)
    size = g.window((10_000,) * ndim, spacing[:ndim], scale[:ndim])
    move = g.draw(counter, size, spacing[:ndim], scale[:ndim], 0)
    reach = 2.0 if bend else 0.0
    corners = np.array(list(itertools.product(*[(-reach, c - 1 + reach) for c in crop])))
    places = corners @ move.matrix.T + move.origin
    assert places.min() > -1e-3
    assert (places < np.array(size) - 1 + 1e-3).all()


def test_windows_of_slices_items_and_images():
    turning = Augmenter(Augment(rotate=180), (8, 8), seed=0)
    assert turning.window(item((30, 100, 100), slices=0)) == (1, 11, 11)
    assert turning.window(item((9, 100, 30), slices=1)) == (9, 1, 11)  # no more than there is
    still = Augmenter(Augment(), (8, 8, 8), seed=0)
    assert still.window(item((30, 40, 50))) == (8, 8, 8)
    assert not still.resamples
    assert still.window(item((30, 40, 50), scale=(1.0, 1.5, 1.5))) == (8, 12, 12)
    images = Augmenter(Augment(resized_crop={}), (8, 8), seed=0)
    assert images.window(item((375, 500))) == (375, 500)


def test_thick_sections_turn_in_physical_space(monkeypatch):
    """A rod of 5 sections of 4 nm along z, turned by 90 degrees, lies along y and is 20 voxels of 1 nm long."""
    monkeypatch.setattr(Geometry, "_rotation", lambda self, n: np.array([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]]))
    size, crop = (21, 121, 9), (21, 41, 9)
    volume = np.zeros((1, 1, *size), np.float32)
    volume[..., 8:13, 60, :] = 1
    move = geometry(crop, rotate=90, rotate_axes=["x"]).draw(0, size, (4.0, 1.0, 1.0), (1.0,) * 3, 0)
    move = move._replace(origin=np.array([10, 60, 4]) - move.matrix @ np.array([10, 20, 4]))  # about its middle
    found = resample(torch.from_numpy(volume), [move], [size], crop)[0, 0]
    assert found[10, :, 4].sum().item() == pytest.approx(20, abs=0.5)
    assert found[:, 20, 4].sum().item() == pytest.approx(1)


def test_rotations_are_uniform_and_within_their_limit():
    g = geometry((5, 5, 5), rotate=180)
    turned = np.stack([g._rotation(n) for n in range(2000)])
    np.testing.assert_allclose(turned @ turned.transpose(0, 2, 1), np.broadcast_to(np.eye(3), turned.shape), atol=1e-12)
    assert np.linalg.det(turned).min() > 0.999
    assert np.abs(turned.mean(0)).max() < 0.05  # of uniform rotations every entry has mean 0 and variance 1/3
    assert np.abs(turned.var(0) - 1 / 3).max() < 0.03
    g = geometry((5, 5, 5), rotate=20)
    angles = [np.degrees(np.arccos((np.trace(g._rotation(n)) - 1) / 2)) for n in range(300)]
    assert 18 < max(angles) <= 20.001
    g = geometry((5, 5, 5), rotate=20, rotate_axes=["z"])
    assert all(g._rotation(n)[0, 0] == 1 for n in range(20))


def test_whole_voxels_keep_every_intensity():
    values = torch.from_numpy(noise_volume(8, 1, 6, 6, 6))
    flipping = Augmenter(Augment(flip=["y"]), (6, 6, 6), seed=1)
    found = flipping(Raw(list(range(8)), values)).values
    flipped = [torch.equal(f, v.flip(2).float()) for f, v in zip(found, values, strict=True)]
    kept = [torch.equal(f, v.float()) for f, v in zip(found, values, strict=True)]
    assert all(a or b for a, b in zip(flipped, kept, strict=True))
    assert 0 < sum(flipped) < 8
    codes = list(range(0, 48, 6))
    turned = Augmenter(Augment(flip=True, chance=0.0), (6, 6, 6), seed=1)(
        Raw(list(range(8)), values, orientations=codes)
    )
    assert torch.equal(turned.values, orient(values, codes).float())
    # In a larger window the crop lies at whole voxels, too, and not always in the middle.
    wide = torch.from_numpy(noise_volume(8, 1, 11, 6))
    crops = Augmenter(Augment(flip=True), (6, 6), seed=1)(Raw(list(range(8)), wide)).values
    starts = {
        start
        for crop, whole in zip(crops, wide, strict=True)
        for start in range(6)
        for flips in ([], [1], [2], [1, 2])
        if torch.equal(crop, whole[:, start : start + 6].float().flip(flips))
    }
    assert len(starts) >= 3


def test_orientations_alone_are_as_they_were():
    values = torch.from_numpy(noise_volume(4, 2, 4, 4, 4))
    labels = torch.from_numpy(noise_volume(4, 4, 4, 4, seed=1))
    codes = [0, 7, 20, 47]
    batch = Augmenter(Augment(orientations=True), (4, 4, 4), seed=0, labels="voxel")(
        Raw([0, 1, 2, 3], values, labels, orientations=codes, variables=("a", "b"))
    )
    assert batch.values.dtype == torch.uint8
    assert torch.equal(batch.values, orient(values, codes))
    assert torch.equal(batch.labels, orient(labels[:, None], codes)[:, 0])
    assert len(orientations((4, 4, 4))) == 48


def test_items_of_another_voxel_size_are_resampled_in_the_middle():
    ramp = torch.arange(12.0).expand(1, 1, 12, 12).clone()
    raw = Raw([5], ramp, sizes=[(12, 12)], scales=[(1.5, 1.5)], spacings=[(1.0, 1.0)])
    found = Augmenter(Augment(), (8, 8), seed=0)(raw).values
    torch.testing.assert_close(found[0, 0, 0], 5.5 + 1.5 * (torch.arange(8.0) - 3.5))


# ---------------------------------------------------------------- determinism


def sample_of(counters: list[int], device: str = "cpu", *, seed: int = 0, **keys: Any) -> Batch:
    """Samples whose windows are functions of their counters."""
    crop = (8, 8, 8)
    a = Augmenter(Augment(**keys), crop, seed=seed, statistics=Statistics((128.0,), (74.0,)), labels="voxel")
    size = a.window(item((64, 64, 64)))
    values = np.stack([noise_volume(1, *size, seed=c) for c in counters])
    raw = Raw(counters, torch.from_numpy(values).to(device), torch.from_numpy(values[:, 0] % 5).to(device))
    return a(raw)


def test_a_sample_is_a_function_of_seed_and_counter():
    alone = [sample_of([c], **ALL) for c in (3, 4, 5, 1000)]
    together = sample_of([1000, 4, 5, 3, 77], **ALL)
    for batch, place in zip(alone, (3, 1, 2, 0), strict=True):
        assert torch.equal(batch.values[0], together.values[place])
        assert torch.equal(batch.labels[0], together.labels[place])
    other = sample_of([3], seed=1, **ALL)
    assert not torch.equal(other.values, alone[0].values)
    assert together.values.isfinite().all()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([1, 2, 4, 8]), st.randoms())
def test_any_split_of_a_batch_gives_the_same_samples(first, ranks, random):
    """Counters from an even one on, cut into ranks of whole pairs: what each rank sees is its part of the whole."""
    counters = [2 * first + n for n in range(16)]
    keys: dict[str, Any] = {"rotate": 30, "noise": 0.2, "mixup": 0.5, "cutmix": 0.5}

    def load(some: list[int]) -> Batch:
        a = Augmenter(Augment(**keys), (6, 6), seed=0, labels="item", num_classes=3)
        values = np.stack([noise_volume(1, 10, 10, seed=c) for c in some])
        return a(Raw(some, torch.from_numpy(values), torch.tensor([c % 3 for c in some])))

    whole, size = load(counters), 16 // ranks
    for rank in range(ranks):
        mine = counters[rank * size : (rank + 1) * size]
        random.shuffle(mine)
        part = load(mine)
        for place, counter in enumerate(mine):
            assert torch.equal(part.values[place], whole.values[counter - counters[0]])
            assert torch.equal(part.soft[place], whole.soft[counter - counters[0]])


@pytest.mark.parametrize("key", [k for k in ALL if k != "sections"])
def test_each_key_changes_samples_by_itself(key):
    one, two = sample_of([1, 2], **{key: ALL[key]}).values
    plain = sample_of([1, 2], brightness=1e-12).values
    if key in ("rotate", "scale", "shear", "elastic", "flip"):
        assert one.dtype == torch.float32
        assert not torch.equal(one, two)
    else:
        assert not torch.allclose(one, plain[0], atol=1e-2)
        assert not torch.allclose(two, plain[1], atol=1e-2)


# ---------------------------------------------------------------- intensities


def change(values: torch.Tensor, counters: list[int] | None = None, **keys: Any) -> torch.Tensor:
    a = Augmenter(Augment(**keys), tuple(values.shape[2:]), seed=0, statistics=Statistics((100.0,), (20.0,)))
    return a(Raw(counters or list(range(len(values))), values.clone())).values


def test_intensities_change_relative_to_the_statistics_of_the_data():
    values = 100 + 20 * torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    shifts = (change(values, brightness=0.5) - values).flatten(1)
    assert (shifts.amax(1) - shifts.amin(1)).max() < 1e-3
    assert 8 < shifts.abs().max() <= 10.001
    factors = ((change(values, contrast=[0.5, 2.0]) - 100) / (values - 100)).flatten(1).median(1).values
    assert 0.49 < factors.min() < 0.7
    assert 1.5 < factors.max() < 2.01
    bent = change(values, gamma=[0.5, 2.0])
    order = values.flatten(1).argsort(1)
    assert (bent.flatten(1).gather(1, order).diff(dim=1) >= -1e-3).all()  # still in the same order
    ends = torch.tensor([40.0, 160.0]).view(1, 1, 1, 2).expand(4, 1, 2, 2)
    torch.testing.assert_close(change(ends, gamma=[0.5, 2.0]), ends, rtol=0, atol=1e-2)
    own = (torch.full((64, 1), 1000.0), torch.full((64, 1), 2.0))  # an entry's own statistics count, if it has them
    a = Augmenter(Augment(brightness=0.5), (8, 8), seed=0, statistics=Statistics((100.0,), (20.0,)))
    shifted = a(Raw(list(range(64)), values.clone(), statistics=own))
    assert 0.8 < (shifted.values - values).abs().max() <= 1.001
    assert shifted.statistics is own


def test_noise_is_normal_and_a_function_of_its_key(monkeypatch):
    def keyed(places: torch.Tensor, secret: int) -> torch.Tensor:
        return normal(places, torch.tensor(secret))

    noise = keyed(torch.arange(2**18), 12345).double()
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs((noise**4).mean() - 3) < 0.06
    assert abs((noise[1:] * noise[:-1]).mean()) < 0.01
    assert abs((noise * keyed(torch.arange(2**18), 12346).double()).mean()) < 0.01
    assert torch.equal(keyed(torch.arange(1000, 1010), 5), keyed(torch.arange(2000), 5)[1000:1010])
    monkeypatch.setattr(noise_module, "_PIECE", 100)  # however it is cut into pieces
    pieces = torch.zeros(3, 2, 7, 30)
    add_noise(pieces, [2**63 - 1, 5, 9], torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0]]))
    monkeypatch.undo()
    whole = torch.zeros(1, 2, 7, 30)
    add_noise(whole, [9], torch.tensor([[3.0, 1.0]]))
    assert torch.equal(whole[0], pieces[2])
    assert pieces[1, 0].abs().max() == 0
    spread = (change(torch.full((16, 1, 32, 32), 100.0), noise=0.5) - 100).flatten(1).std(1)
    assert 0 < spread.min() < 4
    assert 6 < spread.max() < 10.5


def test_blur_is_a_gaussian_that_keeps_the_sum():
    point = torch.zeros(2, 1, 31, 31)
    point[..., 15, 15] = 1
    found = blur(point, [1.0, 2.0], (2, 3))
    for soft, sigma in zip(found[:, 0], (1.0, 2.0), strict=True):
        steps = torch.arange(31.0) - 15
        assert soft.sum() == pytest.approx(1, abs=1e-5)
        assert (soft.sum(0) * steps**2).sum().sqrt() == pytest.approx(sigma, rel=0.03)
    assert torch.equal(blur(point[:1], [1.0], (2, 3))[0], found[0])
    flat = torch.full((1, 1, 4, 3), 7.0)
    torch.testing.assert_close(blur(flat, [3.0], (2, 3)), flat)  # borders are mirrored, however wide the blur


def spoilt(**keys: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.from_numpy(noise_volume(1, 1, 40, 12, 12)).clamp(min=1)
    labels = torch.from_numpy(noise_volume(1, 40, 12, 12, seed=2))
    a = Augmenter(
        Augment(sections=keys), (40, 12, 12), seed=0, statistics=Statistics((100.0,), (20.0,)), labels="voxel"
    )
    batch = a(Raw([0], values.clone(), labels.clone()))
    return values[0, 0].float(), batch.values[0, 0], batch.labels[0] == labels[0]


def test_sections_are_lost_moved_and_blurred():
    before, after, same = spoilt(missing=0.3)
    lost = [z for z in range(40) if not torch.equal(before[z], after[z])]
    assert 4 <= len(lost) <= 22
    assert {float(after[z].unique()) for z in lost} == {0.0, 100.0}
    assert same.all()
    before, after, same = spoilt(shifted=0.1, shift=2)
    moved = [z for z in range(40) if not torch.equal(before[z], after[z])]
    assert moved
    for z in moved:
        back = [
            torch.equal(after[z, 2 + b : 10 + b, 2 + c : 10 + c], before[z, 2:10, 2:10])
            for b in range(-2, 3)
            for c in range(-2, 3)
        ]
        assert any(back) or moved.index(z) > 0  # shifts from there on add up
        assert not same[z].all()  # labels move along
    assert len(moved) < 40
    before, after, _ = spoilt(blurred=0.3, blur=2.0)
    soft = [z for z in range(40) if not torch.equal(before[z], after[z])]
    assert 4 <= len(soft) <= 22
    assert all(after[z].std() < 0.8 * before[z].std() for z in soft)
    assert torch.equal(after, after.round())  # whole numbers stay whole


# ---------------------------------------------------------------- images


def test_resized_crops_have_the_wanted_share_and_ratio_and_do_not_alias():
    g = geometry((16, 16), resized_crop={"scale": [0.1, 0.5], "ratio": [0.5, 2.0]})
    for counter in range(50):
        move = g.draw(counter, (60, 90), (1.0, 1.0), (1.0, 1.0), 0)
        high, wide = 16 * move.matrix[0, 0], 16 * move.matrix[1, 1]
        assert 0.1 * 5400 <= high * wide <= 0.5 * 5400
        assert 0.499 <= wide / high <= 2.001
        edges = move.origin + 0.5 - np.array([high, wide]) / 32  # of the box
        assert (edges > -1e-6).all()
        assert (np.add(edges, [high, wide]) < np.array([60, 90]) + 1e-6).all()
    stripes = (torch.arange(64) % 2 * 255).to(torch.uint8).expand(1, 1, 64, 64)
    small = Augmenter(Augment(resized_crop={"scale": [1, 1], "ratio": [1, 1]}), (16, 16), seed=0)(Raw([0], stripes))
    assert (small.values - 127.5).abs().max() < 1  # a single tap would have found stripes


def test_colours_change_but_greys_keep_their_hue():
    names = ("red", "green", "blue")
    images = torch.from_numpy(noise_volume(8, 3, 4, 4))

    def coloured(values: torch.Tensor, variables: tuple[str, ...] = names, **keys: float) -> torch.Tensor:
        return Augmenter(Augment(jitter=keys), (4, 4), seed=0)(
            Raw(list(range(len(values))), values.clone(), variables=variables)
        ).values

    grey = torch.from_numpy(noise_volume(8, 1, 4, 4)).expand(-1, 3, -1, -1)
    torch.testing.assert_close(coloured(grey, hue=0.5, saturation=0.5), grey.float(), rtol=0, atol=0.1)
    found = coloured(images, hue=0.5)
    assert (found - images).abs().max() > 20
    assert found.min() >= 0
    assert found.max() <= 255
    bright = coloured(images // 4, brightness=0.5)
    ratio = (bright / (images // 4)).nan_to_num(1.0, 1.0, 1.0).flatten(1).median(1).values
    assert 0.5 <= ratio.min() < 0.9
    assert 1.1 < ratio.max() <= 1.5
    # Variables are found by name, others stay.
    mixed = torch.cat([images[:, 2:], images[:, :1], images[:, :1], images[:, 1:2]], dim=1)
    again = coloured(mixed, ("blue", "depth", "red", "green"), hue=0.5)
    torch.testing.assert_close(again[:, [2, 3, 0]], found)
    assert torch.equal(again[:, 1], images[:, 0].float())
    with pytest.raises(UserError, match="jitter: changes the variables red, green and blue, but the data have em"):
        coloured(images[:, :1], ("em",), hue=0.1)


def mixed_batch(counters: list[int], **keys: float) -> Batch:
    values = torch.tensor([float(c) for c in counters]).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()
    labels = torch.tensor([c % 4 for c in counters])
    return Augmenter(Augment(**keys), (8, 8), seed=0, labels="item", num_classes=4)(Raw(counters, values, labels))


def test_two_samples_and_their_classes_are_mixed():
    batch = mixed_batch([10, 11, 12, 13], mixup=0.8)
    assert batch.soft is not None
    torch.testing.assert_close(batch.soft.sum(1), torch.ones(4))
    for place, counter in enumerate([10, 11, 12, 13]):
        share = batch.soft[place, counter % 4]
        expected = share * counter + (1 - share) * (counter ^ 1)
        torch.testing.assert_close(batch.values[place], torch.full((1, 8, 8), float(expected)))
    again = mixed_batch([13, 12], mixup=0.8)  # whatever else is in the batch, and in any order
    assert torch.equal(again.values.flip(0), batch.values[2:])
    assert torch.equal(again.soft.flip(0), batch.soft[2:])
    pasted = mixed_batch(list(range(20)), cutmix=1.0)
    for counter in range(20):
        own = (pasted.values[counter] == counter).float().mean()
        torch.testing.assert_close(pasted.soft[counter, counter % 4], own)
        assert set(pasted.values[counter].unique().tolist()) <= {float(counter), float(counter ^ 1)}
    both = mixed_batch(list(range(40)), mixup=1.0, cutmix=1.0)
    whole = [set(v.unique().tolist()) <= {float(c), float(c ^ 1)} for c, v in enumerate(both.values)]
    assert 4 < sum(whole) < 36


@pytest.mark.parametrize("keys", [{"mixup": 1.0}, {"cutmix": 1.0}])
def test_partners_with_statistics_of_their_own_are_mixed_as_the_model_sees_them(keys):
    mean, std = torch.tensor([[128.0], [30000.0]]), torch.tensor([[50.0], [9000.0]])
    plain = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    make = Augmenter(Augment(**keys), (8, 8), seed=0, labels="item", num_classes=2)
    classes = torch.tensor([0, 1])
    expected = make(Raw(counters=[0, 1], values=plain, labels=classes))
    values = plain * std[..., None, None] + mean[..., None, None]
    found = make(Raw(counters=[0, 1], values=values, labels=classes, statistics=(mean, std)))
    seen = (found.values - mean[..., None, None]) / std[..., None, None]
    torch.testing.assert_close(seen, expected.values, atol=1e-4, rtol=1e-4)


def test_mixed_classes_are_learned_by_their_shares():
    model = ViTConfig(size="Ti/16", ndim=2, shape=16, channels=1, classes=4)
    objective = ClassifyConfig(smoothing=0.1).build(model, Statistics((0.0,), (1.0,)))
    batch = mixed_batch([0, 1, 2, 3], mixup=1.0)
    batch.values = batch.values.repeat(1, 1, 2, 2)
    _, targets = objective.prepare(batch, Draws(0, batch.counters))
    output = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    loss = objective.loss(output, targets)
    expected = -((0.9 * batch.soft + 0.1 / 4) * output.log_softmax(1)).sum()
    torch.testing.assert_close(loss.sum, expected)
    assert loss.count == 4
    _, hard = objective.prepare(batch, Draws(0, batch.counters), evaluating=True)
    assert torch.equal(hard, batch.labels)
    pure = objective.loss(output, torch.nn.functional.one_hot(hard, 4).float())
    torch.testing.assert_close(pure.sum, objective.loss(output, hard).sum)


def test_what_cannot_be_mixed_or_turned_is_refused():
    with pytest.raises(UserError, match="a rank reads an odd number"):
        mixed_batch([10, 11, 12], mixup=1.0)
    with pytest.raises(UserError, match="a rank reads an odd number"):
        mixed_batch([11, 12], cutmix=1.0)
    with pytest.raises(UserError, match="mixup and cutmix mix the classes of items"):
        Augmenter(Augment(mixup=1.0), (8, 8), seed=0, labels="voxel")
    with pytest.raises(UserError, match=r"data\.augment\.flip: 'w' is not an axis of the samples; use y, x"):
        Augmenter(Augment(flip=["w"]), (8, 8), seed=0)
    with pytest.raises(UserError, match=r"rotate_axes: images turn in their plane"):
        Augmenter(Augment(rotate=20, rotate_axes=["x"]), (8, 8), seed=0)
    with pytest.raises(UserError, match=r"sections: spoils planes of volumes.* axis: y or x"):
        Augmenter(Augment(sections={"missing": 0.1}), (8, 8), seed=0)
    Augmenter(Augment(sections={"missing": 0.1, "axis": "y"}), (8, 8), seed=0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"scale": [2, 1]}, "expected two numbers above 0, the smaller first"),
        ({"gamma": 2}, "expected two numbers above 0, the smaller first"),
        ({"blur": [1, 30]}, "wider than 20 voxels"),
        ({"rotate_axes": ["z"]}, "rotate_axes turn nothing without rotate"),
        ({"resized_crop": {"scale": [0.5, 2]}}, "more than the whole image"),
        ({"resized_crop": {}, "scale": [0.5, 2]}, "both choose the size"),
        ({"rotate": 200}, "less than or equal to 180"),
    ],
)
def test_settings_are_checked(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        Augment(**keys)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=20), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_mirrored_positions_are_those_of_numpy(places, size):
    wide = np.pad(np.arange(size), 60, mode="reflect") if size > 1 else np.zeros(121, int)
    assert mirror(torch.tensor(places), size).tolist() == [wide[60 + p] for p in places]


def test_no_kernel_is_looked_for_on_the_cpu():
    assert affine_module._kernels(torch.zeros(1, 1, 2, 2), (2, 2)) is None
