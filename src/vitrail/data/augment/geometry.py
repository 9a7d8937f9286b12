"""The place that each voxel of a crop comes from: rotation, scale, shear and flip as one matrix a sample.

- a voxel of the crop, counted from its middle, is bent, turned, sheared and scaled in physical space and lands at a
  position of the window, in voxels: thick sections stay thick
- the window holds every draw: the worst box of all of them, cut to the item; beyond it the sample is mirrored
- the crop lies anywhere in the window that its own draw leaves room for, and touches a part of it: a turned cube is a
  fifth of the box that holds it however it is turned
- a draw that only flips keeps whole voxels, so that every intensity is kept
- the moves of a batch are computed together: small images come faster than Python could move them one by one
- values and labels are moved by it in affine.py
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, overload

import numpy as np
from torch import Tensor

from vitrail.draws import between, sent, stream, uniforms
from vitrail.layers.patches import Slab
from vitrail.recipe.sections import Augment

SMALL = 16 * 2**10  # bytes of a sample: below that a call costs more than another copy


@cache
def orientations(crop: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """List all (permutation, flipped axes) that keep the crop's shape, none first: 8 for a square, 48 for a cube."""
    axes = range(len(crop))
    permutations = [p for p in itertools.permutations(axes) if all(crop[i] == crop[j] for i, j in enumerate(p))]
    flips = [f for n in range(len(crop) + 1) for f in itertools.combinations(axes, n)]
    return [(p, f) for p in permutations for f in flips]


@cache
def _codes(crop: tuple[int, ...]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
    return {each: code for code, each in enumerate(orientations(crop))}


def flip_first(crop: tuple[int, ...], codes: Sequence[int], flips: np.ndarray) -> list[int]:
    """The codes of turns of samples of which those axes are flipped before that a table [B, n] names."""
    turns, numbers = orientations(crop), _codes(crop)
    found = []
    for code, flipped in zip(codes, flips.tolist(), strict=True):
        permutation, own = turns[code]
        both = tuple(axis for axis, along in enumerate(permutation) if (axis in own) != flipped[along])
        found.append(numbers[permutation, both])
    return found


def window(code: int, slab: Slab) -> tuple[slice, ...]:
    """The region of the crop as it lies in the file that is a slab of it once it is turned by the code."""
    permutation, flips = orientations(slab.size)[code]
    start, stop = slab.rows.start, slab.rows.stop
    if 0 in flips:
        start, stop = slab.size[0] - stop, slab.size[0] - start
    along = permutation[0]  # the axis of the file that becomes the first one
    return tuple(slice(start, stop) if axis == along else slice(0, size) for axis, size in enumerate(slab.size))


def orient(values: Tensor, codes: list[int], slab: Slab | None = None) -> Tensor:
    """Turn each sample of [B, C, *S] by its code: only transposes and flips, so every intensity is kept.

    Of slabs the values are flat [B, C, voxels]: each lies in its file along an axis of its own.
    """
    if slab is not None and not any(codes):
        return values.unflatten(2, slab.shape)
    if not any(codes):
        return values
    size = tuple(values.shape[2:]) if slab is None else slab.size
    turned = values.new_empty(*values.shape[:2], *(size if slab is None else slab.shape))
    if values[0].nbytes > SMALL:
        for row, code in enumerate(codes):
            turned[row : row + 1] = _turn(values[row : row + 1], code, size, slab)
        return turned
    rows: dict[int, list[int]] = {}
    for row, code in enumerate(codes):
        rows.setdefault(code, []).append(row)
    order = sent([row for own in rows.values() for row in own], values.device)
    places = order.split([len(own) for own in rows.values()])
    for code, index in zip(rows, places, strict=True):  # all that turn alike at once
        turned.index_copy_(0, index, _turn(values.index_select(0, index), code, size, slab))
    return turned


def _turn(values: Tensor, code: int, size: tuple[int, ...], slab: Slab | None) -> Tensor:
    """Samples [B, C, ...] that turn alike."""
    permutation, flips = orientations(size)[code]
    if slab is not None:
        values = values.unflatten(2, [w.stop - w.start for w in window(code, slab)])
    values = values.permute(0, 1, *[axis + 2 for axis in permutation])
    return values.flip([axis + 2 for axis in flips]) if flips else values


MOST_TAPS = 8  # of an axis: images that shrink more than that lose detail anyway
BOXES = 10  # that are tried before the whole image is taken
MUCH = 2  # times as large as the crop: windows of which it pays to read a part
LATTICE = 33  # points along each axis of a crop, at most, that tell what it touches
FINENESS = 4  # of them along a box that may be touched

Spans = Sequence[np.ndarray]  # of each axis of a window [N, 2]: first and last voxel of what lies side by side


class Move(NamedTuple):
    """The way in which one sample is cut from its window."""

    matrix: np.ndarray  # [n, n] voxels of the window for one of the crop
    origin: np.ndarray  # [n] position of the crop's first voxel, in voxels of the window
    taps: int = 1  # positions along each axis that one voxel is the mean of
    nodes: np.ndarray | None = None  # [n, *nodes] of the bend, in voxels of the crop


def touched_by(move: Move, size: Sequence[int], crop: Sequence[int], amplitude: float, spans: Spans) -> np.ndarray:
    """Find which of the boxes that lie side by side along each axis of a window the crop may touch, [N, N, ...].

    It stands for its points at every few voxels, each with how far around it those lie that are nearer to it than to
    others; boxes are some times as large.
    """
    largest = min(int((span[:, 1] - span[:, 0]).max()) + 1 for span in spans)
    apart = [max(1, largest // FINENESS, -(-(c - 1) // (LATTICE - 1))) for c in crop]
    along = [np.unique(np.minimum(np.arange(0, c - 1 + a, a), c - 1)) for c, a in zip(crop, apart, strict=True)]
    points = np.stack(np.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, len(crop))
    bend = 0.0 if move.nodes is None else amplitude
    around = np.abs(move.matrix) @ (np.asarray(apart) / 2 + bend + (0.5 if move.taps > 1 else 0.0))
    period = np.maximum(1, 2 * (np.asarray(size) - 1))
    at = np.abs(points @ move.matrix.T + move.origin) % period
    at = np.minimum(at, period - at)  # mirroring brings points no further apart
    ranges = []  # of boxes, along each axis
    for span, middle, reach in zip(spans, at.T, around, strict=True):
        first, last = np.floor(middle - reach) - 1, np.ceil(middle + reach) + 1  # with neighbours
        low = np.searchsorted(span[:, 1], first)  # the first that does not end before
        high = np.searchsorted(span[:, 0], last, side="right") - 1
        ranges.append((np.minimum(low, len(span) - 1), np.maximum(high, 0)))
    found = np.zeros([len(span) for span in spans], bool)
    most = [int((high - low).max()) + 1 for low, high in ranges]
    for step in np.ndindex(*most):
        found[tuple(np.minimum(low + s, high) for s, (low, high) in zip(step, ranges, strict=True))] = True
    return found


class Moves(Sequence[Move]):
    """The moves of a batch, as tables."""

    def __init__(
        self, matrix: np.ndarray, origin: np.ndarray, taps: np.ndarray, nodes: Sequence[np.ndarray | None] | None = None
    ):
        self.matrix, self.origin, self.taps = matrix, origin, taps  # [B, n, n], [B, n], [B]
        self.nodes = nodes  # of each sample, where some are bent

    @classmethod
    def of(cls, moves: Sequence[Move]) -> "Moves":
        """Any moves as tables."""
        if isinstance(moves, cls):
            return moves
        matrix, origin = (np.stack(part) for part in ([m.matrix for m in moves], [m.origin for m in moves]))
        nodes = [move.nodes for move in moves]
        taps = np.array([move.taps for move in moves])
        return cls(matrix, origin, taps, nodes if any(node is not None for node in nodes) else None)

    def __len__(self) -> int:
        return len(self.taps)

    @overload
    def __getitem__(self, index: int) -> Move: ...
    @overload
    def __getitem__(self, index: slice) -> "Moves": ...
    def __getitem__(self, index: int | slice) -> "Move | Moves":
        nodes = None if self.nodes is None else self.nodes[index]
        if isinstance(index, slice):
            return Moves(self.matrix[index], self.origin[index], self.taps[index], nodes)  # type: ignore[arg-type]
        return Move(self.matrix[index], self.origin[index], int(self.taps[index]), nodes)  # type: ignore[arg-type]


class Geometry:
    """Draws the moves of samples; `moves` says whether anything but a residual scale moves voxels."""

    def __init__(self, settings: Augment, crop: tuple[int, ...], axes: tuple[str, ...], seed: int):
        self.settings, self.crop, self.axes, self.seed = settings, crop, axes, seed
        self.amplitude = settings.elastic.amplitude if settings.elastic else 0.0
        self.flips = axes if settings.flip is True else tuple(settings.flip or ())
        c = settings
        # Voxels from one node of a bend to the next: so few that lines between nodes are as good as the curve.
        self.step = int(np.clip((min(crop) - 1) // c.elastic.grid // 4, 1, 8)) if c.elastic else 1
        resamples = bool(c.rotate or c.scale or c.shear or c.elastic or c.resized_crop)
        self.moves = resamples or bool(self.flips)
        self.only_flips = not resamples  # whole voxels, where a window is the crop

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
        return self.draw_many([counter], [size], [spacing], [scale], [code])[0]

    def draw_many(
        self,
        counters: Sequence[int],
        sizes: Sequence[Sequence[int]],
        spacings: Sequence[Sequence[float]],
        scales: Sequence[Sequence[float]],
        codes: Sequence[int],
    ) -> Moves:
        """The moves of samples; each is a function of its own counter, window and orientation alone."""
        c, n, crop = self.settings, len(self.crop), np.asarray(self.crop, np.float64)
        # [B, n]
        room, step, scale = (np.asarray(each, np.float64).reshape(-1, n) for each in (sizes, spacings, scales))
        random = self.draw_chance(counters)  # [B]
        turn = np.tile(np.eye(n), (len(counters), 1, 1))
        if random.any():
            turn[random] = self._turns([counters[row] for row in np.flatnonzero(random).tolist()])
        boxes = None if c.resized_crop is None else self._boxes(counters, room)
        stretch = scale if boxes is None else boxes[1] / crop
        oriented = _turns_of(self.crop)[np.asarray(codes, np.int64)]
        matrix = turn * step[:, None] / step[:, :, None] * stretch[:, None] @ oriented
        nodes = None
        if c.elastic and random.any():
            nodes = [self._nodes(counter) if bent else None for counter, bent in zip(counters, random, strict=True)]

        if boxes is not None:
            centre = boxes[0] + boxes[1] / 2 - 0.5
            taps = np.clip(np.ceil(stretch.max(axis=1) - 0.01), 1, MOST_TAPS).astype(np.int64)
        else:
            centre = self._centres(counters, room, matrix, stretch, bent=random if c.elastic else None)
            taps = np.ones(len(counters), np.int64)
        return Moves(matrix, centre - matrix @ ((crop - 1) / 2), taps, nodes)

    def touched(
        self,
        counter: int,
        size: Sequence[int],
        spacing: Sequence[float],
        scale: Sequence[float],
        code: int,
        spans: Spans,
    ) -> np.ndarray | None:
        """Find the boxes of its window that a sample is made of; None where that is most of it."""
        if not self.settings.rotate or math.prod(size) < MUCH * math.prod(self.crop):
            return None
        move = self.draw(counter, size, spacing, scale, code)
        return touched_by(move, size, self.crop, self.amplitude, spans)

    def draw_chance(self, counters: Sequence[int]) -> np.ndarray:
        """Draw which samples are moved at random, [B]."""
        chance = self.settings.chance if self.moves else 0.0
        if 0 < chance < 1:
            return self._uniforms("chance", counters, 1)[:, 0] < chance
        return np.full(len(counters), chance > 0)

    def draw_flips(self, counters: Sequence[int]) -> np.ndarray:
        """Draw which axes of moved samples are flipped, [B, n]."""
        axes = np.array([name in self.flips for name in self.axes])
        if not axes.any():
            return np.zeros((len(counters), len(axes)), bool)
        return (self._uniforms("flip", counters, len(axes)) < 0.5) & axes

    def _stream(self, purpose: str, counter: int) -> np.random.Generator:
        return stream(self.seed, f"augment.{purpose}", counter)

    def _uniforms(self, purpose: str, counters: Sequence[int], number: int) -> np.ndarray:
        """The first numbers of the streams of counters, [B, number]."""
        return uniforms(self.seed, f"augment.{purpose}", counters, number)

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

    def _turns(self, counters: Sequence[int]) -> np.ndarray:
        """Flip, scale, shear, then rotate, in physical space: [B, n, n]."""
        c, n = self.settings, len(self.crop)
        matrix = np.eye(n) * np.where(self.draw_flips(counters), -1.0, 1.0)[:, None]
        if c.scale:
            drawn = between(self._uniforms("scale", counters, 1)[:, 0], *np.log(c.scale)).tolist()
            matrix = matrix / np.array([math.exp(each) for each in drawn])[:, None, None]
        if c.shear:
            drawn = between(self._uniforms("shear", counters, n * n), -c.shear, c.shear).reshape(-1, n, n)
            matrix = (np.eye(n) + np.triu(np.tan(np.radians(drawn)), 1)) @ matrix
        if c.rotate:
            matrix = self._rotations(counters) @ matrix
        return matrix

    def _rotations(self, counters: Sequence[int]) -> np.ndarray:
        if len(self.crop) == 3:
            return np.stack([self._rotation(counter) for counter in counters])
        drawn = between(self._uniforms("rotate", counters, 1)[:, 0], -self.settings.rotate, self.settings.rotate)
        angles = [math.radians(each) for each in drawn.tolist()]
        # 1 - (1 - cos), as a rotation about an axis of space has it.
        return np.array([[[1 - (1 - math.cos(a)), -math.sin(a)], [math.sin(a), 1 - (1 - math.cos(a))]] for a in angles])

    def _rotation(self, counter: int) -> np.ndarray:
        """Draw the rotation of a volume."""
        numbers, limit = self._stream("rotate", counter), self.settings.rotate
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

    def _boxes(self, counters: Sequence[int], room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts and sizes [B, n] of boxes of the windows, of the wanted share and sides; whole where none fits."""
        c, n = self.settings.resized_crop, len(self.crop)
        assert c is not None
        sides = np.asarray(self.crop) * (room / self.crop).min(axis=1, keepdims=True)
        starts = (room - sides) / 2
        left = np.arange(len(counters))  # those without a box that fits
        numbers = self._uniforms("resized_crop", counters, 2 * n)  # of a first box, which mostly fits
        for attempt in range(BOXES):
            if not len(left):
                break
            if attempt == 1:
                some = [counters[row] for row in left.tolist()]
                numbers = np.zeros((len(counters), (BOXES + 1) * n))
                numbers[left] = self._uniforms("resized_crop", some, (BOXES + 1) * n)
            drawn, inside = numbers[left, attempt * n :], room[left]
            shares = between(drawn[:, 0], *c.scale) * inside.prod(axis=1)
            ratios = between(drawn[:, :n], math.log(c.ratio[0]), math.log(c.ratio[1]))
            ratios[:, 0] = 0.0
            lengths = np.array([share ** (1 / n) for share in shares.tolist()])
            tried = lengths[:, None] * np.exp(ratios - ratios.mean(axis=1, keepdims=True))
            fits = (tried <= inside).all(axis=1)
            sides[left[fits]] = tried[fits]
            starts[left[fits]] = (drawn[:, n : 2 * n] * (inside - tried))[fits]
            left = left[~fits]
        return starts, sides

    def _centres(
        self,
        counters: Sequence[int],
        room: np.ndarray,
        matrix: np.ndarray,
        stretch: np.ndarray,
        bent: np.ndarray | None,
    ) -> np.ndarray:
        """Positions of the crops' middles [B, n]: anywhere that leaves the draw inside the window."""
        crop = np.asarray(self.crop, np.float64)
        half = np.abs(matrix) @ ((crop - 1) / 2)
        whole = (matrix == np.round(matrix)).all(axis=(1, 2))
        if bent is not None and self.amplitude:
            half = np.where(bent[:, None], np.abs(matrix) @ ((crop - 1) / 2 + self.amplitude), half)
            whole &= ~bent
        spare = room - 1 - 2 * half
        # A draw that leaves the item anyway lies where an unturned crop would.
        spare = np.where(spare >= 0, spare, np.maximum(0, room - 1 - stretch * (crop - 1)))
        # Where nothing is spare, any number gives the same place.
        places = (
            self._uniforms("place", counters, len(crop)) if self.moves and spare.any() else np.full_like(spare, 0.5)
        )
        # Whole voxels: a start among the spare + 1 there are.
        start = np.minimum(np.floor(places * (spare + 1)), spare) + half + np.minimum(0, (room - 1 - 2 * half) // 2)
        return np.where(whole[:, None], start, (room - 1) / 2 + (places - 0.5) * spare)

    def _nodes(self, counter: int) -> np.ndarray:
        """The bend at every few voxels of the crop: a cubic B-spline of random points, which never exceeds them."""
        assert self.settings.elastic is not None
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


@cache
def _turns_of(crop: tuple[int, ...]) -> np.ndarray:
    """The matrices of all orientations, [codes, n, n]."""
    codes = orientations(crop)
    matrices = np.zeros((len(codes), len(crop), len(crop)))
    for matrix, (permutation, flips) in zip(matrices, codes, strict=True):
        for axis, along in enumerate(permutation):
            matrix[along, axis] = -1.0 if axis in flips else 1.0
    return matrices
