"""The shapes of generated tissue: neurites, and what lies in them, as many balls along curves.

- neurites are curved tubes of varying calibre, grown one by one through the space that the others left
- mitochondria and vesicles follow the neurite that they are in; microtubules run along the widest
"""

from dataclasses import dataclass, fields

import numpy as np

STEP = 3.0  # voxels between two points of a growing neurite
TRACE = 1.5  # voxels between two balls of a finished one
CELL = 3  # voxels of the coarse grid that remembers how much room is left
MARGIN = 18  # tissue is grown this far beyond the volume, so that its edges look like its middle
NARROW = 7.0  # where less room is left no neurite starts: the glia takes it


@dataclass
class Balls:
    """Balls along one or more curves; all arrays have one row a ball."""

    centre: np.ndarray  # [N, 3]
    radius: np.ndarray
    owner: np.ndarray  # number of the neurite; 0 is the glia
    axis: np.ndarray  # [N, 3], unit vector along the curve
    along: np.ndarray  # arc length

    def __getitem__(self, rows: slice) -> "Balls":
        return Balls(*(getattr(self, column.name)[rows] for column in fields(self)))

    def moved(self, offset: np.ndarray, radius: np.ndarray) -> "Balls":
        """The same curve shifted sideways, with other radii."""
        return Balls(
            (self.centre + offset).astype(np.float32), radius.astype(np.float32), self.owner, self.axis, self.along
        )

    @classmethod
    def join(cls, parts: list["Balls"]) -> "Balls":
        none = cls(np.zeros((0, 3)), np.zeros(0), np.zeros(0, np.int32), np.zeros((0, 3)), np.zeros(0))
        columns = (np.concatenate([getattr(part, column.name) for part in [none, *parts]]) for column in fields(cls))
        return cls(*(column if column.dtype == np.int32 else column.astype(np.float32) for column in columns))


@dataclass
class Scene:
    """All that is in the tissue, in voxels of the volume."""

    neurites: Balls
    mitochondria: Balls
    vesicles: Balls
    tubules: Balls  # microtubules, fine dark lines
    synapses: Balls  # where membranes are thick and dark
    shade: np.ndarray  # brightness of the cytoplasm of each owner


Parts = dict[str, list[Balls]]


def grow_scene(size: tuple[int, ...], rng: np.random.Generator) -> Scene:
    """Neurites one by one where most room is left, each with its contents, until only gaps remain."""
    grid = tuple(-(-(n + 2 * MARGIN) // CELL) for n in size)
    room = np.full(grid, 40.0, np.float32)  # distance from a coarse voxel to the nearest surface
    bundles = rng.standard_normal((3, 3))  # neurites tend to run along one of three directions
    bundles /= np.linalg.norm(bundles, axis=1, keepdims=True)
    parts: Parts = {column.name: [] for column in fields(Scene) if column.name != "shade"}
    shades = [190.0]  # the glia is bright
    misses = 0
    while misses < 12:
        cells = np.stack([rng.integers(0, n, 1500) for n in grid], axis=1)
        free = room[tuple(cells.T)]
        best = int(free.argmax())
        if free[best] < NARROW:
            misses += 1
            continue
        radius = float(min(np.clip(rng.lognormal(2.6, 0.3), 7.5, 16.0), free[best]))
        path, radii = grow_path(room, (cells[best] + 0.5) * CELL - MARGIN, radius, bundles[rng.integers(3)], rng)
        curve = trace(path, radii, len(shades))
        mark_room(room, curve)
        if len(path) < 4:  # no more than a dent: the glia keeps it
            continue
        shades.append(float(rng.normal(164, 20)))
        parts["neurites"].append(curve[:: max(1, int(0.35 * radius / TRACE))])
        fill_neurite(curve, parts, rng)
    return Scene(**{name: Balls.join(balls) for name, balls in parts.items()}, shade=np.asarray(shades, np.float32))


def grow_path(
    room: np.ndarray, start: np.ndarray, radius: float, bundle: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Walk both ways from the start through free space, until the tissue ends or it gets too tight."""
    heading = bundle + 0.55 * rng.standard_normal(3)
    heading /= np.linalg.norm(heading)
    limit = np.asarray(room.shape) - 1
    halves = []
    for sign in (1.0, -1.0):
        here, ahead, walked = start, sign * heading, []
        for _ in range(int(rng.integers(40, 400))):
            turns = ahead + 0.22 * rng.standard_normal((10, 3))
            turns /= np.linalg.norm(turns, axis=1, keepdims=True)
            cells = ((here + 2 * STEP * turns + MARGIN) / CELL).astype(np.int64)
            outside = np.any((cells < 0) | (cells > limit), axis=1)
            free = room[tuple(np.clip(cells, 0, limit).T)]
            # Too tight is worst; loose packing and sharp turns cost a little.
            tight, loose = np.maximum(radius - free, 0) ** 2, np.minimum(np.abs(free - radius), 12)
            pick = int((tight + 0.15 * loose + 6 * (1 - turns @ ahead)).argmin())
            if outside[pick] or free[pick] < 0.45 * radius:
                break
            ahead = turns[pick]
            here = here + STEP * ahead
            walked.append((here, float(min(radius, max(free[pick] + 0.5, 4.0)))))
        halves.append(walked)
    points = [*reversed(halves[1]), (start, radius), *halves[0]]
    path = np.asarray([point for point, _ in points])
    radii = np.asarray([width for _, width in points])
    index, weight = spline_taps(np.arange(len(path)), 5)
    swelling = (weight * rng.normal(0, 0.25, len(path) // 5 + 4)[index]).sum(axis=0)
    return path, radii * np.clip(1 + swelling, 0.7, 1.3)


def trace(path: np.ndarray, radii: np.ndarray, number: int) -> Balls:
    """A smooth curve near the path, as closely set balls."""
    count = max(2, round((len(path) - 1) * STEP / TRACE))
    index, weight = spline_taps(np.linspace(0, len(path) - 1, count), 1)
    index = np.clip(index - 1, 0, len(path) - 1)
    centre = (weight[..., None] * path[index]).sum(axis=0)
    radius = (weight * radii[index]).sum(axis=0)
    axis = np.gradient(centre, axis=0)
    axis /= np.maximum(np.linalg.norm(axis, axis=1, keepdims=True), 1e-6)
    along = np.cumsum(np.linalg.norm(np.diff(centre, axis=0, prepend=centre[:1]), axis=1))
    floats = (column.astype(np.float32) for column in (centre, radius, axis, along))
    centre, radius, axis, along = floats
    return Balls(centre, radius, np.full(count, number, np.int32), axis, along)


def mark_room(room: np.ndarray, curve: Balls) -> None:
    """Lower the room around a new neurite."""
    for centre, radius in zip(curve.centre[::2], curve.radius[::2], strict=True):
        found = box((centre + MARGIN) / CELL - 0.5, (radius + 22) / CELL, (0, 0, 0), room.shape)
        if found is not None:
            window, squares, _ = found
            np.minimum(room[window], np.sqrt(squares) * CELL - radius, out=room[window])


def fill_neurite(curve: Balls, parts: Parts, rng: np.random.Generator) -> None:
    """Mitochondria and synapses where the neurite is wide enough, one after the other; microtubules in the widest."""
    count = len(curve.radius)
    side, other = frames(curve.axis, rng)
    here = int(rng.integers(5, 40))
    while here < count - 8:
        part = slice(here, min(here + int(rng.integers(12, 40)), count))
        angle, draw = rng.uniform(0, 2 * np.pi), rng.random()
        aside = np.cos(angle) * side[part] + np.sin(angle) * other[part]
        stretch = curve[part]
        if curve.radius[here] > 5 and draw < 0.5:
            radius = np.clip(stretch.radius * rng.uniform(0.5, 0.72), 2.8, 7.5)
            radius = np.minimum(radius, stretch.radius - 1.8)
            shift = np.maximum(stretch.radius - radius - 2.4, 0)[:, None] * rng.uniform(0, 1)
            parts["mitochondria"].append(stretch.moved(shift * aside, radius))
        elif curve.radius[here] > 5 and draw < 0.8:
            add_synapse(stretch, side[part], other[part], aside, parts, rng)
        here = part.stop + int(rng.integers(4, 50))
    width = float(np.median(curve.radius))
    for _ in range(int(width - 4) if width > 8.5 else 0):
        angle, share = rng.uniform(0, 2 * np.pi), np.sqrt(rng.uniform(0, 0.6))
        offset = share * (np.cos(angle) * side + np.sin(angle) * other) * (curve.radius[:, None] - 2)
        parts["tubules"].append(curve.moved(offset, np.ones(count)))


def add_synapse(
    stretch: Balls, side: np.ndarray, other: np.ndarray, aside: np.ndarray, parts: Parts, rng: np.random.Generator
) -> None:
    """A crowd of vesicles, no two overlapping, and a dark stretch of membrane beside it."""
    count = len(stretch.radius)
    placed = np.zeros((0, 3))
    rows: list[int] = []
    for _ in range(260):
        row = int(rng.integers(count))
        angle, share = rng.uniform(0, 2 * np.pi), np.sqrt(rng.random())
        lateral = np.cos(angle) * side[row] + np.sin(angle) * other[row]
        spot = stretch.centre[row] + share * max(float(stretch.radius[row]) - 3.3, 0) * lateral
        if not rows or np.square(placed - spot).sum(axis=1).min() > 5.2**2:
            placed = np.concatenate([placed, spot[None]])
            rows.append(row)
    crowd = Balls(*(getattr(stretch, column.name)[rows] for column in fields(Balls)))
    parts["vesicles"].append(crowd.moved(placed - crowd.centre, rng.normal(2.3, 0.15, len(rows))))
    middle = slice(count // 2, count // 2 + 1)
    parts["synapses"].append(
        stretch[middle].moved(aside[middle] * (stretch.radius[middle, None] + 0.5), np.full(1, 9.0))
    )


def frames(axis: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two unit vectors across the curve at each point, carried along it without twisting."""
    side = np.empty_like(axis)
    vector = rng.standard_normal(3)
    for i, direction in enumerate(axis):
        vector = vector - (vector @ direction) * direction
        vector = vector / max(float(np.linalg.norm(vector)), 1e-6)
        side[i] = vector
    return side, np.cross(axis, side)


Window = tuple[slice, slice, slice]


def box(
    centre: np.ndarray, half: float, low: tuple[int, ...], high: tuple[int, ...]
) -> tuple[Window, np.ndarray, list[np.ndarray]] | None:
    """Around a centre, in an array that covers [low, high): the window, squared distances, and offsets on each axis."""
    window, offsets = [], []
    for axis in range(3):
        start = max(int(np.ceil(centre[axis] - half)), low[axis])
        stop = min(int(np.floor(centre[axis] + half)) + 1, high[axis])
        if stop <= start:
            return None
        window.append(slice(start - low[axis], stop - low[axis]))
        line = np.arange(start, stop, dtype=np.float32) - centre[axis]
        offsets.append(line.reshape([-1 if a == axis else 1 for a in range(3)]))
    z, y, x = (offset * offset for offset in offsets)
    return (window[0], window[1], window[2]), z + (y + x), offsets


def spline_taps(positions: np.ndarray, period: float) -> tuple[np.ndarray, np.ndarray]:
    """Four lattice numbers and cubic B-spline weights for each position, [4, n] each."""
    place = np.asarray(positions, np.float64) / period
    base = np.floor(place).astype(np.int64)
    t = place - base
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    return base + np.arange(4)[:, None], weights.astype(np.float32)
