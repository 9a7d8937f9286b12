"""Moves of a batch are those that each sample would have by itself, bit for bit."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.data.augment import Augmenter, Raw, orient, orientations, window
from vitrail.data.augment import intensity as colour
from vitrail.data.augment.affine import resample
from vitrail.data.augment.geometry import MOST_TAPS, Geometry, Move, Moves, _about, flip_first
from vitrail.draws import stream
from vitrail.layers import kernels
from vitrail.layers.patches import Part, Slab
from vitrail.recipe.sections import Augment

AXES = ("z", "y", "x")


class OneByOne(Geometry):
    """The moves sample by sample, each from generators of its own, in the words of the first version."""

    def draw(
        self, counter: int, size: Sequence[int], spacing: Sequence[float], scale: Sequence[float], code: int
    ) -> Move:
        c, n, crop = self.settings, len(self.crop), np.asarray(self.crop, np.float64)
        room, step = np.asarray(size, np.float64), np.asarray(spacing, np.float64)
        random = self.moves and self._stream("chance", counter).random() < c.chance
        turn = self._turn(counter) if random else np.eye(n)
        permutation, flips = orientations(self.crop)[code]
        oriented = np.zeros((n, n))
        for axis, along in enumerate(permutation):
            oriented[along, axis] = -1.0 if axis in flips else 1.0
        box = None if c.resized_crop is None else self._box(counter, room)
        stretch = np.asarray(scale, np.float64) if box is None else box[1] / crop
        matrix = turn * step / step[:, None] * stretch @ oriented
        nodes = self._nodes(counter) if random and c.elastic else None
        if box is not None:
            centre = box[0] + box[1] / 2 - 0.5
        else:
            centre = self._centre(counter, room, matrix, stretch, bend=0.0 if nodes is None else self.amplitude)
        taps = 1 if box is None else int(np.clip(math.ceil(stretch.max() - 0.01), 1, MOST_TAPS))
        return Move(matrix, centre - matrix @ ((crop - 1) / 2), taps, nodes)

    def _turn(self, counter: int) -> np.ndarray:
        c, n = self.settings, len(self.crop)
        signs = np.where(self._stream("flip", counter).random(n) < 0.5, -1.0, 1.0)
        matrix = np.diag([s if name in self.flips else 1.0 for s, name in zip(signs, self.axes, strict=True)])
        if c.scale:
            matrix = matrix / math.exp(self._stream("scale", counter).uniform(*np.log(c.scale)))
        if c.shear:
            angles = np.radians(self._stream("shear", counter).uniform(-c.shear, c.shear, (n, n)))
            matrix = (np.eye(n) + np.triu(np.tan(angles), 1)) @ matrix
        if c.rotate and n == 2:
            angle = self._stream("rotate", counter).uniform(-c.rotate, c.rotate)
            matrix = _about(np.array([1.0, 0.0, 0.0]), angle)[1:, 1:] @ matrix
        elif c.rotate:
            matrix = self._rotation(counter) @ matrix
        return matrix

    def _box(self, counter: int, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        c, numbers = self.settings.resized_crop, self._stream("resized_crop", counter)
        for _ in range(10):
            share = numbers.uniform(*c.scale) * room.prod()
            ratios = np.concatenate([[0.0], numbers.uniform(math.log(c.ratio[0]), math.log(c.ratio[1]), len(room) - 1)])
            sides = share ** (1 / len(room)) * np.exp(ratios - ratios.mean())
            if (sides <= room).all():
                return numbers.random(len(room)) * (room - sides), sides
        sides = np.asarray(self.crop) * (room / self.crop).min()
        return (room - sides) / 2, sides

    def _centre(
        self, counter: int, room: np.ndarray, matrix: np.ndarray, stretch: np.ndarray, *, bend: float
    ) -> np.ndarray:
        crop = np.asarray(self.crop, np.float64)
        half = np.abs(matrix) @ ((crop - 1) / 2 + bend)
        spare = room - 1 - 2 * half
        spare = np.where(spare >= 0, spare, np.maximum(0, room - 1 - stretch * (crop - 1)))
        places = self._stream("place", counter).random(len(crop)) if self.moves else np.full(len(crop), 0.5)
        if not bend and np.array_equal(matrix, np.round(matrix)):
            return np.minimum(np.floor(places * (spare + 1)), spare) + half + np.minimum(0, (room - 1 - 2 * half) // 2)
        return (room - 1) / 2 + (places - 0.5) * spare


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((32, 32), {"flip": ["x"]}),
    ((32, 32), {"flip": True, "chance": 0.5}),
    ((32, 32), {"flip": ["x"], "resized_crop": {"scale": [0.08, 1.0]}}),
    ((32, 32), {"resized_crop": {"scale": [0.7, 1.0], "ratio": [0.2, 5.0]}}),  # of which many do not fit
    ((9, 8), {"rotate": 180, "scale": [0.6, 1.4], "shear": 10, "flip": True}),
    ((9, 8), {"rotate": 20, "elastic": {"amplitude": 1, "grid": 2}, "chance": 0.6}),
    ((9, 8), {}),
    ((6, 5, 7), {"scale": [0.8, 1.3], "flip": True, "shear": 10}),
    ((6, 6, 6), {"rotate": 180, "flip": ["z"], "chance": 0.7}),
    ((6, 6, 6), {"rotate": 40, "elastic": {"amplitude": 1.5, "grid": 2}}),
    ((6, 6, 6), {"resized_crop": {}, "flip": ["x"]}),
]


@pytest.mark.parametrize(("crop", "keys"), CASES)
@pytest.mark.parametrize("count", [3, 64])
def test_moves_are_those_of_each_sample(crop: tuple[int, ...], keys: dict[str, Any], count: int) -> None:
    n, rng = len(crop), np.random.default_rng(0)
    axes, numbers = AXES[-n:], rng.integers(0, 2**40, count)
    both = [kind(Augment(**keys), crop, axes, 3) for kind in (Geometry, OneByOne)]
    sizes = [tuple(c + int(e) for c, e in zip(crop, extra, strict=True)) for extra in rng.integers(-3, 12, (count, n))]
    sizes[: count // 2] = [crop] * (count // 2)
    spacings = [(1.0,) * n if i % 2 else (0.7, 1.0, 2.5)[-n:] for i in range(count)]
    scales = [(1.0,) * n if i % 3 else (1.3, 1.9, 1.0)[-n:] for i in range(count)]
    codes = rng.integers(0, len(orientations(crop)), count).tolist()
    given = (numbers.tolist(), sizes, spacings, scales, codes)
    found = both[0].draw_many(*given)
    assert len(found) == count
    for move, one in zip(found, zip(*given, strict=True), strict=True):
        expected, alone = both[1].draw(*one), both[0].draw(*one)
        for other in (expected, alone):
            np.testing.assert_array_equal(move.matrix, other.matrix)
            np.testing.assert_array_equal(move.origin, other.origin)
            assert move.taps == other.taps
            assert (move.nodes is None) == (other.nodes is None)
            if other.nodes is not None:
                np.testing.assert_array_equal(move.nodes, other.nodes)


def test_colours_are_those_of_each_sample() -> None:
    c = Augment(jitter={"brightness": 0.4, "contrast": 1.5, "saturation": 0.4, "hue": 0.1}).jitter

    def alone(counter: int) -> tuple[float, float, np.ndarray]:
        numbers = stream(2, "augment.jitter", counter).uniform(-1, 1, 4)
        limits = (c.brightness, c.contrast, c.saturation)
        brightness, contrast, saturation = (max(0.0, 1 + most * n) for most, n in zip(limits, numbers[:3], strict=True))
        angle = 2 * math.pi * c.hue * numbers[3]
        turn = np.eye(3)
        turn[1:, 1:] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        pull = saturation * np.eye(3) + (1 - saturation) * np.outer(np.ones(3), colour.GREY)
        return brightness, contrast, np.linalg.inv(colour._YIQ) @ turn @ colour._YIQ @ pull

    for found, counter in zip(zip(*colour._draw_jitter(c, 2, range(50)), strict=True), range(50), strict=True):
        for one, other in zip(found, alone(counter), strict=True):
            np.testing.assert_array_equal(one, other)


def test_moves_can_be_cut() -> None:
    found = Geometry(Augment(rotate=9, elastic={"amplitude": 1, "grid": 2}), (8, 8), ("y", "x"), 0).draw_many(
        range(5), [(12, 12)] * 5, [(1.0, 1.0)] * 5, [(1.0, 1.0)] * 5, [0] * 5
    )
    some = found[1:3]
    assert isinstance(some, Moves)
    np.testing.assert_array_equal(some[0].matrix, found[1].matrix)
    assert len(some) == 2
    assert len(list(found)) == 5
    assert Moves.of(found) is found
    again = Moves.of(list(found))
    for name in ("matrix", "origin", "taps", "nodes"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    assert Moves.of([Move(np.eye(2), np.zeros(2))]).nodes is None


@pytest.mark.parametrize("keys", [{"flip": ["x"]}, {"flip": True, "chance": 0.5}, {"flip": ["z"]}])
@pytest.mark.parametrize("crop", [(8, 8), (4, 6, 6)])
@pytest.mark.parametrize("labels", ["voxel", "item"])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_flips_of_whole_windows_are_those_of_their_moves(
    crop: tuple[int, ...], keys: dict[str, Any], labels: str, kind: type
) -> None:
    n, count, rng = len(crop), 20, np.random.default_rng(0)
    keys = keys | {"flip": [AXES[-n]]} if keys["flip"] == ["z"] else keys
    values = torch.from_numpy(rng.integers(0, 255, (count, 2, *crop)).astype(kind))
    voxels = torch.from_numpy(rng.integers(0, 5, (count, *crop), dtype=np.uint8))
    codes = rng.integers(0, len(orientations(crop)), count).tolist()
    augmenter = Augmenter(Augment(**keys), crop, seed=3, labels=labels, axes=AXES[-n:])  # type: ignore[arg-type]
    raw = Raw(list(range(count)), values, voxels if labels == "voxel" else torch.arange(count), orientations=codes)
    found = augmenter(raw)
    ones, sizes = [(1.0,) * n] * count, [crop] * count
    geometry = OneByOne(Augment(**keys), crop, AXES[-n:], 3)
    moves = [geometry.draw(*one) for one in zip(range(count), sizes, ones, ones, codes, strict=True)]
    assert found.values.dtype == torch.float32
    assert torch.equal(found.values, resample(values, moves, sizes, crop))
    wanted = resample(voxels[:, None], moves, sizes, crop)[:, 0].to(torch.uint8) if labels == "voxel" else raw.labels
    assert found.labels is not None
    assert torch.equal(found.labels, wanted)
    assert not torch.equal(found.values, orient(values, codes).float())  # some were flipped


@pytest.mark.parametrize("crop", [(6, 6), (5, 5, 5), (4, 6, 6)])
def test_flips_before_a_turn_are_another_turn(crop: tuple[int, ...]) -> None:
    n, turns = len(crop), len(orientations(crop))
    chosen = [(code, flips) for code in range(turns) for flips in itertools.product((False, True), repeat=n)]
    codes, flips = [code for code, _ in chosen], np.array([flips for _, flips in chosen])
    values = torch.arange(math.prod(crop)).view(1, 1, *crop)
    flipped = torch.cat([values.flip([axis + 2 for axis in range(n) if row[axis]]) for row in flips])
    found = orient(values.expand(len(codes), *values.shape[1:]), flip_first(crop, codes, flips))
    assert torch.equal(found, orient(flipped, codes))


@pytest.mark.parametrize("crop", [(8, 8), (4, 6, 6)])
def test_large_samples_turn_as_small_ones(crop: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    codes = list(range(len(orientations(crop))))
    values = torch.from_numpy(np.random.default_rng(0).random((len(codes), 2, *crop), np.float32))
    small = orient(values, codes)
    slab = Slab(Part(1, 2), crop)
    files = [values[[row]][(..., *window(code, slab))].flatten(2) for row, code in enumerate(codes)]
    parts = orient(torch.cat(files), codes, slab)
    monkeypatch.setitem(orient.__globals__, "SMALL", 0)
    large = orient(values, codes)
    assert large.is_contiguous()
    assert torch.equal(small, large)
    assert torch.equal(parts, orient(torch.cat(files), codes, slab))
    assert torch.equal(parts, large[:, :, crop[0] // 2 :])


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_mixing_alone_leaves_samples_as_they_are(kind: type) -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (4, 2, 6, 6)).astype(kind))
    augmenter = Augmenter(Augment(mixup=0.3), (6, 6), seed=3, labels="item", num_classes=4, axes=("y", "x"))
    before, found = values.clone(), augmenter(Raw([4, 5, 6, 7], values, torch.arange(4)))
    assert torch.equal(values, before)
    assert found.soft is not None
    for row in range(4):
        own = found.soft[row, row]
        torch.testing.assert_close(found.values[row], own * values[row] + (1 - own) * values[row ^ 1])


def test_one_thread_augments_while_another_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says of all threads that it compiles; a sample must not depend on what else goes on."""
    found = object()
    monkeypatch.setattr(kernels, "_load", lambda *_: found)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert kernels.load_kernels("vitrail.data.augment.affine_kernels", torch.device("cuda"), "augmentation") is found
    assert kernels.adaptive_kernels("nodes", torch.zeros(1, device="meta")) is None
