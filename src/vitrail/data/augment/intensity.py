"""Gaussian noise of any size that is a pure function of its key: each voxel hashes its own place.

A volume has too many voxels to draw their noise on the host, and a device's own generator gives other numbers than the
next device's. So the 32 bits of a hash of (key, place) become one normal number, by Box and Muller's way.

Brighter, flatter, noisier, softer: changes of intensity, relative to the statistics of the data.

Each variable of each sample has numbers of its own; blur is the same for all variables of a sample.

What goes wrong with single sections of electron microscopy: lost, moved or out of focus.

They are made in the window as it was read, before it is turned: sections lie across the axis that they were cut along.
Labels of voxels move with the image, since people label what they see.

Colour jitter as one 3 x 3 matrix a sample: brightness, contrast, saturation, then hue.

All four are linear in red, green and blue: contrast pulls towards the mean grey of the sample, saturation towards the
grey of each pixel, and hue turns colours about the axis of greys. Bytes stay between 0 and 255.

Mixup and cutmix: two samples and their classes become one.

Partners are the samples with counters 2k and 2k + 1, at every world size, so that a mixed sample is a function of its
counter alone; a rank needs both of them in one batch. A partner with statistics of its own is brought to those of the
sample first, so that what is mixed is what the model sees of either.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.affine import mirror
from vitrail.draws import between, hash32, keys, sent, stream, uniforms
from vitrail.errors import UserError
from vitrail.recipe.sections import Artefacts, Augment, Jitter

_PIECE = 2**22  # voxels at a time: what lies between stays small


def add_noise(values: Tensor, secrets: list[int], std: Tensor) -> None:
    """Add noise to samples [B, C, *S] float32, in place; of a secret a sample and a standard deviation [B, C]."""
    rows = values.view(values.shape[0] * values.shape[1], -1)
    # Each channel has a secret of its own; Python's numbers do not overflow.
    keys = [(secret + 0x632BE5AB * channel) % 2**63 for secret in secrets for channel in range(values.shape[1])]
    secret, spread = sent(keys, values.device)[:, None], sent(std.reshape(-1, 1), values.device)
    across = min(rows.shape[1], _PIECE)
    down = max(1, _PIECE // across)
    for first in range(0, rows.shape[1], across):
        place = torch.arange(first, min(first + across, rows.shape[1]), device=values.device)
        for row in range(0, len(rows), down):
            some = slice(row, row + down)
            rows[some, first : first + across] += spread[some] * normal(place, secret[some])


def normal(place: Tensor, secret: Tensor) -> Tensor:
    """One number of mean 0 and variance 1 for each place and secret."""
    bits = hash32(place, secret)
    radius = torch.sqrt(-2 * torch.log(((bits >> 16).float() + 0.5) / 65536))
    return radius * torch.cos(((bits & 0xFFFF).float() + 0.5) * (2 * math.pi / 65536))


SPREAD = 3.0  # standard deviations on either side of the mean that gamma's range covers


def changes_intensity(settings: Augment) -> bool:
    return bool(settings.gamma or settings.contrast or settings.brightness or settings.noise or settings.blur)


def change_intensity(
    values: Tensor, counters: Sequence[int], settings: Augment, seed: int, mean: Tensor, std: Tensor
) -> Tensor:
    """[B, C, *S] float32, changed in place where that is possible; mean and std are [B, C]."""
    c, channels = settings, values.shape[1]
    ones = [1] * (values.ndim - 2)

    def draw(purpose: str, low: float, high: float) -> np.ndarray:  # [B, C]
        return between(uniforms(seed, f"augment.{purpose}", counters, channels), low, high)

    def shaped(table: np.ndarray | Tensor) -> Tensor:  # [B, C, 1...]
        return sent(torch.as_tensor(table, dtype=torch.float32), values.device).view(*table.shape, *ones)

    if c.blur:
        widths = between(uniforms(seed, "augment.blur", counters, 1)[:, 0], *c.blur).tolist()
        values = blur(values, widths, range(2, values.ndim))
    middle, spread = shaped(mean), shaped(std)
    if c.gamma:
        power = shaped(np.exp(draw("gamma", *np.log(c.gamma))))
        values.sub_(middle).div_(2 * SPREAD * spread).add_(0.5)  # 0 to 1 over the range
        negative = values < 0  # the curve goes on below 0 as its mirror image
        values.abs_().pow_(power)
        values = torch.where(negative, -values, values).sub_(0.5).mul_(2 * SPREAD * spread).add_(middle)
    if c.contrast:
        factor = shaped(np.exp(draw("contrast", *np.log(c.contrast))))
        values.sub_(middle).mul_(factor).add_(middle)
    if c.brightness:
        values.add_(shaped(draw("brightness", -c.brightness, c.brightness)) * spread)
    if c.noise:
        strength = torch.from_numpy(draw("noise", 0.0, c.noise)).float() * std
        add_noise(values, keys(seed, "augment.noise voxels", counters).tolist(), strength)
    return values


def blur(values: Tensor, widths: Sequence[float], dims: Sequence[int]) -> Tensor:
    """Gaussian blur [B, ...] along some dims, of a standard deviation a sample; mirrored at the borders."""
    reach = max(1, math.ceil(3 * max(widths)))
    steps = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (steps / np.asarray(widths)[:, None]) ** 2)
    weights *= np.abs(steps) <= np.ceil(3 * np.asarray(widths))[:, None]  # a sample's own reach, whatever the others'
    table = sent((weights / weights.sum(1, keepdims=True)).astype(np.float32), values.device)
    for dim in dims:
        size = values.shape[dim]
        index = sent(mirror(torch.arange(-reach, size + reach), size), values.device)
        wide = values.index_select(dim, index)
        values = torch.zeros_like(values)
        for step, weight in enumerate(table.T):  # [B]
            values.addcmul_(wide.narrow(dim, step, size), weight.view(-1, *[1] * (values.ndim - 1)))
    return values


def spoil(
    sample: Tensor,
    labels: Tensor | None,
    settings: Artefacts,
    axis: int,
    *,
    seed: int,
    counter: int,
    mean: Tensor,
    std: Tensor,
) -> None:
    """Spoil sections of one sample [C, *S] across an axis, in place; mean and std are [C], on the host."""
    numbers = stream(seed, "augment.sections", counter)
    sections, sides = sample.shape[axis + 1], sample.ndim - 2
    missing, shifted, blurred = numbers.random((3, sections)) < [
        [settings.missing],
        [settings.shifted],
        [settings.blurred],
    ]
    black, onwards = numbers.random((2, sections)) < 0.5
    shifts = numbers.integers(-settings.shift, settings.shift, (sections, sides), endpoint=True)
    widths = numbers.uniform(0.5 * settings.blur, settings.blur, sections)

    for place in np.flatnonzero(blurred):
        section = sample.select(axis + 1, int(place))
        soft = blur(section.float()[None], [float(widths[place])], range(2, 2 + sides))[0]
        section.copy_(soft if sample.is_floating_point() else soft.round())
    moved = np.where((shifted & onwards)[:, None], shifts, 0).cumsum(0) + np.where(
        (shifted & ~onwards)[:, None], shifts, 0
    )
    for first, last in _runs(moved):
        _move(sample.narrow(axis + 1, first, last - first), moved[first], axis + 1, first_dim=1)
        if labels is not None:
            _move(labels.narrow(axis, first, last - first), moved[first], axis, first_dim=0)
    for place in np.flatnonzero(missing):
        level = (0 * mean if sample.dtype == torch.uint8 else mean - SPREAD * std) if black[place] else mean
        level = level if sample.is_floating_point() else level.round()
        sample.select(axis + 1, int(place)).copy_(level.to(sample.dtype).view(-1, *[1] * sides))


def _runs(moved: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last + 1 of neighbouring sections that are moved alike."""
    edges = [0, *(np.flatnonzero((np.diff(moved, axis=0) != 0).any(1)) + 1), len(moved)]
    return ((int(a), int(b)) for a, b in itertools.pairwise(edges) if moved[a].any())


def _move(part: Tensor, shift: np.ndarray, axis: int, *, first_dim: int) -> None:
    """Shift a stack of sections sideways in place, mirrored at the borders."""
    source = part
    for dim, by in zip([d for d in range(first_dim, part.ndim) if d != axis], shift.tolist(), strict=True):
        size = part.shape[dim]
        source = source.index_select(dim, mirror(torch.arange(size) - by, size).to(part.device))
    part.copy_(source)


GREY = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look
# Luminance and two differences of colour (YIQ), between which hue is an angle.
_YIQ = np.array([GREY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


def jitter(
    values: Tensor,
    counters: Sequence[int],
    settings: Jitter,
    seed: int,
    variables: Sequence[str],
    *,
    highest: float | None,
) -> Tensor:
    """[B, C, *S] float32, of which the variables red, green and blue change; up to `highest`, if there is one."""
    missing = [name for name in ("red", "green", "blue") if name not in variables]
    if missing:
        raise UserError(
            f"data.augment.jitter: changes the variables red, green and blue, but the data have "
            f"{', '.join(variables) or 'no names'}; name them so with `variables`, or leave jitter out"
        )
    places = sent([variables.index(name) for name in ("red", "green", "blue")], values.device)
    colours = values.index_select(1, places)  # [B, 3, *S]
    flat = colours.flatten(2)
    drawn = _draw_jitter(settings, seed, counters)
    brightness, contrast, matrix = (sent(part.astype(np.float32), values.device) for part in drawn)
    flat = flat * brightness.view(-1, 1, 1)
    grey = sent(GREY.astype(np.float32), values.device) @ flat.mean(2, keepdim=True)  # [B, 1]
    flat = torch.lerp(grey[:, None].expand(-1, 3, 1), flat, contrast.view(-1, 1, 1))
    flat = (matrix[..., None] * flat[:, None]).sum(2)  # three products a value: no matrix unit, which would round
    if highest is not None:
        flat = flat.clamp(0, highest)
    return values.index_copy(1, places, flat.view_as(colours))


def _draw_jitter(settings: Jitter, seed: int, counters: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors of brightness and of contrast [B], and the matrices of saturation and hue [B, 3, 3]."""
    numbers = between(uniforms(seed, "augment.jitter", counters, 4), -1, 1)
    limits = np.array([settings.brightness, settings.contrast, settings.saturation])
    brightness, contrast, saturation = np.maximum(0.0, 1 + limits * numbers[:, :3]).T
    angles = (2 * math.pi * settings.hue * numbers[:, 3]).tolist()
    turn = np.tile(np.eye(3), (len(counters), 1, 1))
    turn[:, 1:, 1:] = [[[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]] for a in angles]
    pulled = saturation[:, None, None]
    pull = pulled * np.eye(3) + (1 - pulled) * np.outer(np.ones(3), GREY)
    return brightness.copy(), contrast.copy(), np.linalg.inv(_YIQ) @ turn @ _YIQ @ pull


def mix(
    values: Tensor,
    labels: Tensor,
    counters: Sequence[int],
    settings: Augment,
    seed: int,
    num_classes: int,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """[B, C, *S] float32 and classes [B] -> mixed samples, and how much of each class they are [B, classes].

    `statistics` are mean and std [B, C] of each sample, where they differ.
    """
    places = {counter: place for place, counter in enumerate(counters)}
    if any(counter ^ 1 not in places for counter in counters):
        raise UserError(
            "data.augment: mixup and cutmix mix samples two by two, but a rank reads an odd number of them at once; "
            "make data.batch an even number for each rank"
        )
    partners = sent([places[counter ^ 1] for counter in counters], values.device)
    shape = tuple(values.shape[2:])
    boxes: dict[int, tuple[slice, ...]] = {}
    blend, own = [], []  # share of the sample itself in its voxels, where it is blended; and in its class
    drawn = {pair: _draw_partner(settings, seed, pair, shape) for pair in {counter // 2 for counter in counters}}
    for place, counter in enumerate(counters):
        share, box = drawn[counter // 2]
        blend.append(share if box is None else 1.0)
        own.append(share)
        if box is not None:
            boxes[place] = box
    other = values.index_select(0, partners)
    if statistics is not None:
        own_tables = (sent(s, values.device).to(values.dtype) for s in statistics)
        mean, std = (s.view(*s.shape, *[1] * len(shape)) for s in own_tables)  # [B, C, 1, ...]
        ratio = std / std.index_select(0, partners)
        other = (other - mean.index_select(0, partners)) * ratio + mean
    factor = sent(blend, values.device).view(-1, *[1] * (values.ndim - 1))
    mixed = values * factor + other * (1 - factor)
    for place, box in boxes.items():
        mixed[place][(slice(None), *box)] = other[place][(slice(None), *box)]
    weights = sent(own, values.device)[:, None]
    classes = torch.nn.functional.one_hot(labels.long(), num_classes).float()
    return mixed, weights * classes + (1 - weights) * classes.index_select(0, partners)


def _draw_partner(
    settings: Augment, seed: int, pair: int, shape: tuple[int, ...]
) -> tuple[float, tuple[slice, ...] | None]:
    """Draw how much of itself a sample keeps, and the box that comes from its partner, if it is one."""
    numbers = stream(seed, "augment.mix", pair)
    cut = settings.cutmix and (not settings.mixup or numbers.random() < 0.5)
    alpha = settings.cutmix if cut else settings.mixup
    share = float(numbers.beta(alpha, alpha))
    if not cut:
        return share, None
    box = _box(numbers, shape, 1 - share)
    return 1 - float(np.prod([(b.stop - b.start) / n for b, n in zip(box, shape, strict=True)])), box


def _box(numbers: np.random.Generator, shape: tuple[int, ...], share: float) -> tuple[slice, ...]:
    """A box of a share of the crop about a random middle; what lies outside is cut off."""
    sides = share ** (1 / len(shape))
    box = []
    for size in shape:
        middle, half = numbers.integers(size), round(sides * size) / 2
        box.append(slice(max(0, round(middle - half)), min(size, round(middle + half))))
    return tuple(box)
