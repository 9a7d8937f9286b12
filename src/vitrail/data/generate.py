"""Generated tissue that looks like volume electron microscopy, so that everything can be tried without data.

- a voxel belongs to the neurite whose surface is nearest (distance - radius); glia fills the gaps
- neurites are curved tubes of varying calibre, balls along curves, grown one by one through the space that the others
  left; mitochondria and vesicles follow the neurite that they are in, microtubules run along the widest
- membranes lie where two owners are equally near; mitochondria have a dark rim and cristae, vesicles are rings
- every voxel is a function of (shape, seed) alone: it is drawn in slabs whose thickness changes nothing

Handwritten digits come as an image folder: 1,797 images of 8 x 8 pixels of scikit-learn, every fifth held out. Both
parts hold digits of the same writers, so the held-out accuracy says how well a model learns these hands, not how well
it reads others.

A folder of slices is the same tissue as a microscope leaves it: a file a slice, and labels of a few of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from vitrail.data.formats.ngff import write_ome_zarr
from vitrail.disk import check_free, new_folder, told
from vitrail.errors import UserError
from vitrail.recipe.kinds import remedy

__all__ = ["LABEL_NAMES", "Volume", "generate_em", "write_ome_zarr"]

STEP = 3.0  # voxels between two points of a growing neurite
TRACE = 1.5  # voxels between two balls of a finished one
CELL = 3  # voxels of the coarse grid that remembers how much room is left
MARGIN = 18  # tissue is grown this far beyond the volume, so that its edges look like its middle
NARROW = 7.0  # where less room is left no neurite starts: the glia takes it
LABEL_NAMES = ("background", "membrane", "mitochondria", "vesicles")
GLIA = 4.5  # a voxel further than this from every neurite's surface belongs to the glia
REACH = GLIA + 6.0  # distance from a surface beyond which a neurite has no say
MEMBRANE = 1.5  # half the thickness of two apposed membranes
SLAB = 6_000_000  # voxels drawn at once, about 40 bytes each
Frame = tuple[tuple[int, int, int], tuple[int, int, int]]  # the box of voxels that is being drawn: first, last + 1
HELD_OUT = 5  # every so many digits
LABELLED = 6  # every so many slices of a folder

Window = tuple[slice, slice, slice]


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
        """Return the same curve shifted sideways, with other radii."""
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
    """The contents of the tissue, in voxels of the volume."""

    neurites: Balls
    mitochondria: Balls
    vesicles: Balls
    tubules: Balls  # microtubules, fine dark lines
    synapses: Balls  # where membranes are thick and dark
    shade: np.ndarray  # brightness of the cytoplasm of each owner


Parts = dict[str, list[Balls]]


def grow_scene(size: tuple[int, ...], rng: np.random.Generator) -> Scene:
    """Grow neurites one by one where most room is left, each with its contents, until only gaps remain."""
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
    """Return a smooth curve near the path, as closely set balls."""
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
    """Add mitochondria and synapses where the neurite is wide enough; microtubules in the widest."""
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
    """Add a crowd of vesicles, no two overlapping, and a dark stretch of membrane beside it."""
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
    """Return two unit vectors across the curve at each point, carried along it without twisting."""
    side = np.empty_like(axis)
    vector = rng.standard_normal(3)
    for i, direction in enumerate(axis):
        vector = vector - (vector @ direction) * direction
        vector = vector / max(float(np.linalg.norm(vector)), 1e-6)
        side[i] = vector
    return side, np.cross(axis, side)


def box(
    centre: np.ndarray, half: float, low: tuple[int, ...], high: tuple[int, ...]
) -> tuple[Window, np.ndarray, list[np.ndarray]] | None:
    """Return the window around a centre, in an array of [low, high), squared distances, and offsets on each axis."""
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
    """Return four lattice numbers and cubic B-spline weights for each position, [4, n] each."""
    place = np.asarray(positions, np.float64) / period
    base = np.floor(place).astype(np.int64)
    t = place - base
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    return base + np.arange(4)[:, None], weights.astype(np.float32)


@dataclass(frozen=True)
class Volume:
    """An image, its labels (uint8, same shape) and the names of the label values."""

    image: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...] = LABEL_NAMES
    cells: np.ndarray | None = None  # number of the neurite of each voxel; 0 in membranes and in the glia


def generate_em(
    shape: int | tuple[int, int, int] = (128, 128, 192),
    seed: int = 0,
    *,
    noise: float = 0.11,
    slab: int | None = None,
    cells: bool = False,
) -> Volume:
    """Make tissue of the given shape (z, y, x); `noise` is the share of white noise in the image's variance.

    With `cells`, which cell each voxel is of is kept, too.
    """
    size = (shape,) * 3 if isinstance(shape, int) else tuple(shape)
    if len(size) != 3 or min(size) < 8:
        raise UserError(
            f"shape = {list(size)} must be three sizes of at least 8 voxels, such as [128, 128, 192]; mend it"
        )
    if not 0 <= noise < 1:
        raise UserError(f"noise = {noise} must be a share of the variance, at least 0 and below 1; 0.11 is usual")
    if seed < 0:
        raise UserError(f"seed = {seed} must not be negative; choose 0 or above")
    scene = grow_scene(size, np.random.default_rng([seed, 1]))
    rng = np.random.default_rng([seed, 2])
    fields = {name: SmoothField(size, period, rng) for name, period in (("light", 90), ("texture", 4), ("wobble", 10))}
    image, labels = np.empty(size, np.uint8), np.empty(size, np.uint8)
    kept = np.empty(size, np.uint16 if len(scene.shade) <= 2**16 else np.uint32) if cells else None
    step = slab or max(8, SLAB // (size[1] * size[2]))
    for lo in range(0, size[0], step):
        hi = min(lo + step, size[0])
        image[lo:hi], labels[lo:hi], owner = render(scene, fields, size, lo, hi)
        if kept is not None:
            kept[lo:hi] = np.where(labels[lo:hi] == 1, 0, owner)
    add_noise(image, noise, seed)
    return Volume(image, labels, cells=kept)


def add_noise(image: np.ndarray, share: float, seed: int) -> None:
    """Add white noise in place, plane by plane; sums of whole numbers keep its strength free of rounding."""
    total = sum(int(plane.sum(dtype=np.int64)) for plane in image)
    squares = sum(int(np.square(plane, dtype=np.int64).sum()) for plane in image)
    variance = squares / image.size - (total / image.size) ** 2
    sigma = np.float32((variance * share / (1 - share)) ** 0.5)
    for z, plane in enumerate(image if share > 0 else ()):
        grain = np.random.default_rng([seed, 3, z]).standard_normal(plane.shape, dtype=np.float32)
        plane[...] = np.clip(np.rint(plane + sigma * grain), 0, 255)


def render(
    scene: Scene, fields: dict[str, "SmoothField"], size: tuple[int, ...], lo: int, hi: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the planes lo to hi, their labels and whose they are.

    One more on each side is drawn for the slope of the distances.
    """
    first, last = max(lo - 1, 0), min(hi + 1, size[0])
    wobble = fields["wobble"](first, last)
    owner, membrane = partition(scene.neurites, ((first, 0, 0), (last, size[1], size[2])), wobble)
    inner = slice(lo - first, hi - first)
    owner, membrane, wobble = owner[inner], membrane[inner], wobble[inner]

    frame = ((lo, 0, 0), (hi, size[1], size[2]))
    thick = paint(scene.synapses, frame, lambda d, r: np.exp(-0.5 * (d / (0.45 * r)) ** 2), np.maximum, 0.0, 9.0)
    tubule = paint(scene.tubules, frame, lambda d, r: np.exp(-0.5 * (d / (0.9 * r)) ** 2), np.maximum, 0.0, 2.0)
    vesicle = paint(scene.vesicles, frame, np.subtract, np.minimum, 9.0, 2.0)
    mito, along = paint_mitochondria(scene.mitochondria, owner, frame)

    texture = fields["texture"](lo, hi)
    image = scene.shade[owner] + 5 * texture - 26 * tubule
    image += ramp(0.4 - vesicle, 0.8) * (172 - image)
    image += ramp(0.9 - np.abs(vesicle + 0.3), 0.8) * (92 - image)
    cristae = np.clip(1.6 * np.cos((2 * np.pi / 5.2) * (along + 1.3 * wobble)), -0.6, 1) * ramp(-1.8 - mito, 1.0)
    image += ramp(-mito, 0.8) * (122 - 26 * cristae + 2.5 * texture - image)
    image += ramp(1.0 - np.abs(mito + 0.6), 0.8) * (72 - image)
    half = MEMBRANE + 0.9 * thick
    image += ramp(half - membrane, 1.2) * (74 - 30 * thick - image)
    image += 7 * fields["light"](lo, hi)

    labels = np.zeros(owner.shape, np.uint8)
    labels[vesicle < 0.4] = 3
    labels[mito < 0] = 2
    labels[membrane < half] = 1
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), labels, owner


def ramp(distance: np.ndarray, soft: float) -> np.ndarray:
    """Return 0 below, 1 above, a smooth step from -soft to soft."""
    t = np.clip(distance / (2 * soft) + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def partition(balls: Balls, frame: Frame, wobble: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the owner of each voxel, and its distance to the boundary with the nearest other owner."""
    owner = np.zeros(wobble.shape, np.int32)
    near = np.full(wobble.shape, GLIA, np.float32)
    second = np.full(wobble.shape, REACH, np.float32)
    for i in within(balls, frame, REACH):
        found = box(balls.centre[i], balls.radius[i] + REACH, *frame)
        if found is None:
            continue
        window, squares, _ = found
        number = int(balls.owner[i])
        # The same bump pushes some neurites out and pulls others in, so that membranes undulate.
        distance = np.sqrt(squares) - balls.radius[i] - np.float32(0.6 * (number % 5) - 1.2) * wobble[window]
        a, b, who = near[window], second[window], owner[window]
        closer = distance < a
        # `second` is the nearest of all owners but the first, whichever order the balls come in.
        np.minimum(b, np.where(closer, a, distance), out=b, where=who != number)
        np.minimum(a, distance, out=a)
        who[closer] = number
    gap = second - near
    gap /= np.maximum(slope(gap), 0.45)
    return owner, np.where(owner == 0, 2.2 * gap, gap)  # glia is thin: its side of a membrane is drawn finer


def slope(values: np.ndarray) -> np.ndarray:
    """Return the steeper of the two one-sided differences: right beside a crease as well."""
    total = np.zeros_like(values)
    for axis in range(values.ndim):
        step = np.square(np.diff(values, axis=axis))
        head, tail = [slice(None)] * values.ndim, [slice(None)] * values.ndim
        head[axis], tail[axis] = slice(None, -1), slice(1, None)
        steepest = np.zeros_like(values)
        steepest[tuple(head)] = step
        np.maximum(steepest[tuple(tail)], step, out=steepest[tuple(tail)])
        total += steepest
    return np.sqrt(total)


def paint(
    balls: Balls, frame: Frame, profile: Callable[..., np.ndarray], combine: np.ufunc, empty: float, reach: float
) -> np.ndarray:
    """Combine a profile of (distance to the centre, radius) over all balls."""
    canvas = np.full([b - a for a, b in zip(*frame, strict=True)], empty, np.float32)
    for i in within(balls, frame, reach):
        found = box(balls.centre[i], balls.radius[i] + reach, *frame)
        if found is not None:
            part = canvas[found[0]]
            combine(part, profile(np.sqrt(found[1]), balls.radius[i]), out=part)
    return canvas


def paint_mitochondria(balls: Balls, owner: np.ndarray, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance to the nearest mitochondrion inside its own neurite, and the arc length along it."""
    inside = np.full(owner.shape, 9.0, np.float32)
    along = np.zeros(owner.shape, np.float32)
    for i in within(balls, frame, 3.0):
        found = box(balls.centre[i], balls.radius[i] + 3.0, *frame)
        if found is None:
            continue
        window, squares, offsets = found
        distance = np.sqrt(squares) - balls.radius[i]
        closer = (distance < inside[window]) & (owner[window] == balls.owner[i])
        z, y, x = (offset * part for offset, part in zip(offsets, balls.axis[i], strict=True))
        inside[window][closer] = distance[closer]
        along[window][closer] = (balls.along[i] + (z + y + x))[closer]
    return inside, along


def within(balls: Balls, frame: Frame, reach: float) -> np.ndarray:
    """Return numbers of the balls that reach the planes of the frame."""
    z, far = balls.centre[:, 0], balls.radius + reach
    return np.flatnonzero((z + far >= frame[0][0]) & (z - far <= frame[1][0]))


class SmoothField:
    """Smooth noise of unit variance: a random lattice seen through cubic B-splines."""

    def __init__(self, size: tuple[int, ...], period: float, rng: np.random.Generator) -> None:
        self.taps = [spline_taps(np.arange(n), period) for n in size]
        lattice = rng.standard_normal([int(n / period) + 4 for n in size], dtype=np.float32)
        self.lattice = lattice / np.float32((151 / 315) ** 1.5)  # the mean of the squared weights, on three axes

    def __call__(self, lo: int, hi: int) -> np.ndarray:
        values = self.lattice
        for axis, (index, weight) in enumerate(self.taps):
            planes = slice(lo, hi) if axis == 0 else slice(None)
            shape = [-1 if a == axis else 1 for a in range(3)]
            taps = zip(index[:, planes], weight[:, planes], strict=True)
            parts = [np.take(values, i, axis=axis) * w.reshape(shape) for i, w in taps]
            values = (parts[0] + parts[1]) + (parts[2] + parts[3])
        return values


def write_digits(path: str | Path) -> Path:
    """Write train/ and valid/, in each a folder of PNG images for each digit; all appears at once, when complete."""
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError(f"the digits come with scikit-learn, which is not installed; {remedy('sklearn')}") from error

    target = Path(path)
    check_free(target)
    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    with told(target), new_folder(target) as draft:
        for number, (image, digit) in enumerate(zip(grey, digits.target.tolist(), strict=True)):
            folder = draft / ("valid" if number % HELD_OUT == 0 else "train") / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    return target


def write_slices(path: str | Path, shape: tuple[int, int, int], seed: int = 0) -> Path:
    """Write images/ with a TIFF file for each slice across z, and labels/ with those of every sixth; all at once."""
    from tifffile import imwrite

    target = Path(path)
    check_free(target)
    volume = generate_em(shape, seed)
    digits = max(3, len(str(shape[0] - 1)))
    with told(target), new_folder(target) as draft:
        for folder in ("images", "labels"):
            (draft / folder).mkdir()
        for z, (image, labels) in enumerate(zip(volume.image, volume.labels, strict=True)):
            name = f"slice-{z:0{digits}}.tif"
            imwrite(draft / "images" / name, image, metadata=None)
            if z % LABELLED == LABELLED // 2:
                imwrite(draft / "labels" / name, labels, metadata=None)
    return target
