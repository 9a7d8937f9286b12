"""Where each voxel of a crop comes from: rotation, scale, shear and flip as one matrix a sample.

- a voxel of the crop, counted from its middle, is bent, turned, sheared and scaled in physical space and lands at a
  position of the window, in voxels: thick sections stay thick
- the window holds every draw: the worst box of all of them, cut to the item; beyond it the sample is mirrored
- the crop lies anywhere in the window that its own draw leaves room for
- a draw that only flips keeps whole voxels, so that every intensity is kept
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.augment.orientations import orientations
from vitrail.draws import stream

MOST_TAPS = 8  # of an axis: images that shrink more than that lose detail anyway


class Move(NamedTuple):
    """How one sample is cut from its window."""

    matrix: np.ndarray  # [n, n] voxels of the window for one of the crop
    origin: np.ndarray  # [n] position of the crop's first voxel, in voxels of the window
    taps: int = 1  # positions along each axis that one voxel is the mean of
    nodes: np.ndarray | None = None  # [n, *nodes] of the bend, in voxels of the crop


class Geometry:
    """Draws the moves of samples; `moves` says whether anything but a residual scale moves voxels."""

    def __init__(self, settings: Any, crop: tuple[int, ...], axes: tuple[str, ...], seed: int):
        self.settings, self.crop, self.axes, self.seed = settings, crop, axes, seed
        self.amplitude = settings.elastic.amplitude if settings.elastic else 0.0
        self.flips = axes if settings.flip is True else tuple(settings.flip or ())
        c = settings
        # Voxels from one node of a bend to the next: so few that lines between nodes are as good as the curve.
        self.step = int(np.clip((min(crop) - 1) // c.elastic.grid // 4, 1, 8)) if c.elastic else 1
        self.moves = bool(self.flips or c.rotate or c.scale or c.shear or c.elastic or c.resized_crop)

    def window(self, shape: Sequence[int], spacing: Sequence[float], scale: Sequence[float]) -> tuple[int, ...]:
        """Voxels of an item for one sample, for the worst draw."""
        if self.settings.resized_crop is not None:
            return tuple(shape)
        step = np.asarray(spacing, np.float64) * np.asarray(scale)
        half = ((np.asarray(self.crop) - 1) / 2 + self.amplitude) * step / (self.settings.scale or (1.0,))[0]
        tilt = math.tan(math.radians(self.settings.shear))
        half = half + tilt * (half.sum() - np.cumsum(half))  # sheared along the axes after it
        half = self._turned(half) / np.asarray(spacing)
        return tuple(min(int(s), math.ceil(2 * h - 1e-6) + 1) for s, h in zip(shape, half, strict=True))

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

    def _stream(self, purpose: str, counter: int) -> np.random.Generator:
        return stream(self.seed, f"augment.{purpose}", counter)

    def _turned(self, half: np.ndarray) -> np.ndarray:
        """Half a box that holds a box of these halves, however it is turned."""
        axes = [self.axes.index(name) for name in self.settings.rotate_axes]
        angle = math.radians(min(90.0, self.settings.rotate * max(1, len(axes))))
        out = []
        for axis, own in enumerate(half):
            fixed = axes == [axis] and len(half) == 3
            others = [h for i, h in enumerate(half) if i != axis and (len(axes) != 1 or i not in axes)]
            across = 0.0 if fixed else math.hypot(*others)
            # The axis tilts by any angle up to the largest; longest along the diagonal, if it can tilt so far.
            tilt = min(angle, math.atan2(across, own))
            out.append(own * math.cos(tilt) + across * math.sin(tilt))
        return np.asarray(out)

    def _turn(self, counter: int) -> np.ndarray:
        """Flip, scale, shear, then rotate, in physical space."""
        c, n = self.settings, len(self.crop)
        signs = np.where(self._stream("flip", counter).random(n) < 0.5, -1.0, 1.0)
        matrix = np.diag([s if name in self.flips else 1.0 for s, name in zip(signs, self.axes, strict=True)])
        if c.scale:
            matrix = matrix / math.exp(self._stream("scale", counter).uniform(*np.log(c.scale)))
        if c.shear:
            angles = np.radians(self._stream("shear", counter).uniform(-c.shear, c.shear, (n, n)))
            matrix = (np.eye(n) + np.triu(np.tan(angles), 1)) @ matrix
        if c.rotate:
            matrix = self._rotation(counter) @ matrix
        return matrix

    def _rotation(self, counter: int) -> np.ndarray:
        numbers, limit = self._stream("rotate", counter), self.settings.rotate
        if len(self.crop) == 2:
            return _about(np.array([1.0, 0.0, 0.0]), numbers.uniform(-limit, limit))[1:, 1:]
        if self.settings.rotate_axes:
            matrix = np.eye(3)
            for name in self.settings.rotate_axes:
                axis = np.eye(3)[self.axes.index(name)]
                matrix = _about(axis, numbers.uniform(-limit, limit)) @ matrix
            return matrix
        if limit == 180:  # every rotation is as likely as any other: that of a random unit quaternion
            w, *axis = numbers.standard_normal(4)
            return _about(np.asarray(axis), math.degrees(2 * math.atan2(math.hypot(*axis), w)))
        return _about(numbers.standard_normal(3), numbers.uniform(-limit, limit))

    def _box(self, counter: int, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and size of a box of the window, of the wanted share and ratio of sides; whole where none fits."""
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
        """Position of the crop's middle: anywhere that leaves the draw inside the window."""
        crop = np.asarray(self.crop, np.float64)
        half = np.abs(matrix) @ ((crop - 1) / 2 + bend)
        spare = room - 1 - 2 * half
        # A draw that leaves the item anyway lies where an unturned crop would.
        spare = np.where(spare >= 0, spare, np.maximum(0, room - 1 - stretch * (crop - 1)))
        places = self._stream("place", counter).random(len(crop)) if self.moves else np.full(len(crop), 0.5)
        if not bend and np.array_equal(matrix, np.round(matrix)):  # whole voxels: a start among the spare + 1 there are
            return np.minimum(np.floor(places * (spare + 1)), spare) + half + np.minimum(0, (room - 1 - 2 * half) // 2)
        return (room - 1) / 2 + (places - 0.5) * spare

    def _nodes(self, counter: int) -> np.ndarray:
        """The bend at every few voxels of the crop: a cubic B-spline of random points, which never exceeds them."""
        grid, step = self.settings.elastic.grid, self.step
        shape = (len(self.crop), *[grid + 3] * len(self.crop))
        nodes = self._stream("elastic", counter).uniform(-self.amplitude, self.amplitude, shape).astype(np.float32)
        for size in self.crop:  # each turn takes the first spatial axis and puts it last
            nodes = np.tensordot(nodes, _spline(size, grid, step), axes=(1, 1))
        return nodes


def _spline(size: int, grid: int, step: int) -> np.ndarray:
    """Weights [nodes, grid + 3] of the points of a uniform cubic B-spline at every step-th voxel of an axis."""
    places = np.minimum(np.arange(0, size - 1 + step, step) * grid / max(1, size - 1), grid)
    cell = np.minimum(places.astype(np.int64), grid - 1)
    t = places - cell
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 1 + 3 * t + 3 * t**2 - 3 * t**3, t**3], axis=1) / 6
    out = np.zeros((len(places), grid + 3), np.float32)
    np.put_along_axis(out, cell[:, None] + np.arange(4), weights.astype(np.float32), axis=1)
    return out


def _about(axis: np.ndarray, degrees: float) -> np.ndarray:
    """Rotation about an axis (Rodrigues)."""
    a, b, c = axis / np.linalg.norm(axis)
    cross = np.array([[0, -c, b], [c, 0, -a], [-b, a, 0]])
    angle = math.radians(degrees)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
