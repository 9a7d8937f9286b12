"""Generated tissue that looks like volume electron microscopy, so that everything can be tried without data.

- a voxel belongs to the neurite whose surface is nearest (distance - radius); glia fills the gaps
- membranes lie where two owners are equally near; mitochondria have a dark rim and cristae, vesicles are rings
- every voxel is a function of (shape, seed) alone: it is drawn in slabs whose thickness changes nothing
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitrail.data.ngff_write import write_ome_zarr
from vitrail.data.tissue import Balls, Scene, box, grow_scene, spline_taps
from vitrail.errors import UserError

__all__ = ["LABEL_NAMES", "Volume", "generate_em", "write_ome_zarr"]

LABEL_NAMES = ("background", "membrane", "mitochondria", "vesicles")

GLIA = 4.5  # a voxel further than this from every neurite's surface belongs to the glia
REACH = GLIA + 6.0  # distance from a surface beyond which a neurite has no say
MEMBRANE = 1.5  # half the thickness of two apposed membranes
SLAB = 6_000_000  # voxels drawn at once, about 40 bytes each

Frame = tuple[tuple[int, int, int], tuple[int, int, int]]  # the box of voxels that is being drawn: first, last + 1


@dataclass(frozen=True)
class Volume:
    """An image, its labels (uint8, same shape) and the names of the label values."""

    image: np.ndarray
    labels: np.ndarray
    label_names: tuple[str, ...] = LABEL_NAMES


def generate_em(
    shape: int | tuple[int, int, int] = (128, 128, 192), seed: int = 0, *, noise: float = 0.11, slab: int | None = None
) -> Volume:
    """Tissue of the given shape (z, y, x); `noise` is the share of white noise in the image's variance."""
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
    step = slab or max(8, SLAB // (size[1] * size[2]))
    for lo in range(0, size[0], step):
        hi = min(lo + step, size[0])
        image[lo:hi], labels[lo:hi] = render(scene, fields, size, lo, hi)
    add_noise(image, noise, seed)
    return Volume(image, labels)


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
) -> tuple[np.ndarray, np.ndarray]:
    """Image and labels of the planes lo to hi; one more plane on each side is drawn for the slope of the distances."""
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
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), labels


def ramp(distance: np.ndarray, soft: float) -> np.ndarray:
    """0 below, 1 above, a smooth step from -soft to soft."""
    t = np.clip(distance / (2 * soft) + 0.5, 0, 1)
    return t * t * (3 - 2 * t)


def partition(balls: Balls, frame: Frame, wobble: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The owner of each voxel, and its distance to the boundary with the nearest other owner."""
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
    """Steepness, by the steeper of the two one-sided differences: right beside a crease as well."""
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
    """Distance to the nearest mitochondrion's surface inside its own neurite, and the arc length along it."""
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
    """Numbers of the balls that reach the planes of the frame."""
    z, far = balls.centre[:, 0], balls.radius + reach
    return np.flatnonzero((z + far >= frame[0][0]) & (z - far <= frame[1][0]))


class SmoothField:
    """Smooth noise of unit variance: a random lattice seen through cubic B-splines."""

    def __init__(self, size: tuple[int, ...], period: float, rng: np.random.Generator) -> None:
        self.taps = [spline_taps(np.arange(n), period) for n in size]
        lattice = rng.standard_normal([int(n / period) + 4 for n in size], dtype=np.float32)
        self.lattice = lattice / np.float32((151 / 315) ** 1.5)  # the mean of the squared weights, on three axes

    def __call__(self, lo: int, hi: int) -> np.ndarray:
        """Values on the planes lo to hi."""
        values = self.lattice
        for axis, (index, weight) in enumerate(self.taps):
            planes = slice(lo, hi) if axis == 0 else slice(None)
            shape = [-1 if a == axis else 1 for a in range(3)]
            taps = zip(index[:, planes], weight[:, planes], strict=True)
            parts = [np.take(values, i, axis=axis) * w.reshape(shape) for i, w in taps]
            values = (parts[0] + parts[1]) + (parts[2] + parts[3])
        return values
