"""Where an image deserves small patches: scores [B, *S] for `build_trees`, finite and never negative.

- canny: 1 at edges, 0 elsewhere, in two and three dimensions; gradient and variance: real numbers in any
- 2-D edges are those of OpenCV's Canny, bit for bit: by OpenCV itself on the CPU where it is installed, else by the
  torch code below. 3-D edges are of the volume, never of its slices: Sobel gradients along all three axes,
  suppression along the nearest of 13 directions, hysteresis over 26 neighbours
- on a GPU with Triton, edges and gradients come from a few kernels (kernels/edges.py): the same numbers
- scores see grey levels of 0 ... 255, in which Canny's thresholds are. Bytes are taken as they are. Of other data each
  variable has two values, a `span`, that are black and white; what is not finite is black. By `scale` these are
  "data": those that the normalisation of the data gives, so that noise in a flat crop is no edge; two numbers: the same
  for all; "crop": the smallest and largest of each crop, all variables together, as also where nothing is known
- nothing is drawn here: random settings come from uniform numbers passed in

Shapes: B batch, C channels, S spatial sizes.
"""

import importlib
import math
from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vitrail.layers.kernels import adaptive_kernels
from vitrail.recipe import config

Scale = Literal["data", "crop"] | tuple[float, float]
Span = tuple[Tensor, Tensor]  # [B, C] values that are black and white, of each sample and variable

SMOOTHING = (0, 1, 3, 5)  # of random settings: no image at all but noise, no blur, a blur over 3 or 5 voxels
_TAN = 13573  # tan(22.5 degrees) in units of 2^-15, OpenCV's
_MOST_CHANNELS = 512  # that OpenCV takes
_SLAB = 2**20  # voxels that the CPU works on at once: what it touches again is still in its cache


class _Scaled:
    """The common part of the kinds below."""

    scale: Scale
    num_draws: ClassVar[int] = 0  # uniform numbers a sample

    def __post_init__(self) -> None:
        if not isinstance(self.scale, str) and not -math.inf < self.scale[0] < self.scale[1] < math.inf:
            raise ValueError(f"scale {list(self.scale)} must be data, crop, or two values that rise: black and white")


@config
class CannyScore(_Scaled):
    """1 at the edges that Canny's detector finds, 0 elsewhere; multi-channel voxels take their steepest channel.

    `random` varies the settings from sample to sample, an augmentation: three uniform numbers choose the blur among
    0, 1, 3 and 5, the lower threshold among 50 ... 99 (the upper is 50 higher), and the noise that, a quarter of the
    time (blur 0), replaces the edges, so that the tree is a random one. Without noise passed in (when evaluating),
    the settings below hold.
    """

    kind: Literal["canny"] = "canny"
    smooth: Literal[1, 3, 5] = 3  # voxels across the binomial blur before the gradients; 1 is none
    low: float = 50.0  # an edge goes on above it ...
    high: float = 100.0  # ... if it rises above this somewhere
    random: bool = False
    scale: Scale = "data"  # what is black and white of data that are no bytes: data, crop, or two values

    num_draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.smooth not in (1, 3, 5):
            raise ValueError(f"smooth {self.smooth} must be 1 (no blur), 3 or 5 voxels")
        if not 0 <= self.low <= self.high < 1000:
            raise ValueError(
                f"low {self.low} and high {self.high} must satisfy 0 <= low <= high < 1000 (grey levels of Sobel "
                f"gradients: a step of 25 has 100)"
            )

    def score(self, images: Tensor, noise: Tensor | None = None, span: Span | None = None) -> Tensor:
        """Images [B, C, *S] and, for `random`, uniforms [B, 3] (on the CPU, where they are looked at) -> [B, *S]."""
        ndim = _check_images(images)
        if ndim not in (2, 3):
            raise ValueError(f"canny knows images of 2 and 3 dimensions, not {ndim}; choose gradient or variance")
        settings = self._settings(images.shape[0], noise)
        out = torch.empty(images.shape[0], *images.shape[2:], dtype=torch.float32, device=images.device)
        as_bytes = _to_bytes(images, _span_of(self.scale, span, images))
        for smooth, low, high in dict.fromkeys(setting[:3] for setting in settings):
            same = [i for i, setting in enumerate(settings) if setting[:3] == (smooth, low, high)]
            if smooth == 0:
                for i in same:
                    out[i] = hash_noise(settings[i][3], tuple(images.shape[2:]), images.device)
            elif len(same) == len(settings):  # nothing to copy
                out = _edges(as_bytes, smooth, low, high).float()
            else:
                out[same] = _edges(as_bytes[same], smooth, low, high).float()
        return out

    def _settings(self, batch: int, noise: Tensor | None) -> list[tuple[int, float, float, int]]:
        """Blur, thresholds and the seed of noise for each sample."""
        if not self.random or noise is None:
            return [(self.smooth, self.low, self.high, 0)] * batch
        if noise.shape != (batch, self.num_draws):
            raise ValueError(f"noise {list(noise.shape)} must be [{batch}, {self.num_draws}] uniform numbers")
        rows = []
        for blur, threshold, seed in noise.tolist():
            low = float(50 + min(int(50 * threshold), 49))
            smooth = SMOOTHING[min(int(4 * blur), 3)]
            # Noise needs no thresholds, so all samples of noise are one group.
            rows.append((smooth, low, low + 50, int(seed * 2**31)) if smooth else (0, 0.0, 0.0, int(seed * 2**31)))
        return rows


@config
class GradientScore(_Scaled):
    """Length of the gradient by central differences (borders repeated), of the channel where it is longest."""

    kind: Literal["gradient"] = "gradient"
    scale: Scale = "data"  # as of canny; crop leaves values as they are

    def score(self, images: Tensor, noise: Tensor | None = None, span: Span | None = None) -> Tensor:
        """Images [B, C, *S] -> [B, *S]; noise is not used."""
        ndim = _check_images(images)
        images = _in_levels(images, _span_of(self.scale, span, images))
        kernels = adaptive_kernels("edges", images)
        if kernels is not None and ndim <= 3:
            return kernels.gradient(images)
        out = torch.empty(images.shape[0], *images.shape[2:], dtype=torch.float32, device=images.device)
        for samples, rows, slab in _slabs(images, 1, "repeat"):
            slab = _finite(slab)
            total: Tensor | None = None
            for axis in range(ndim):
                inner = [slice(None), slice(None), *(slice(1, -1) if a != axis else slice(None) for a in range(ndim))]
                step = _difference(slab[tuple(inner)], 2 + axis)
                total = step.square_() if total is None else total.addcmul_(step, step)
            assert total is not None
            out[samples, rows] = total.amax(1).sqrt_().mul_(0.5)
        return out


@config
class VarianceScore(_Scaled):
    """Variance among the 3^ndim voxels around each (borders repeated), summed over channels."""

    kind: Literal["variance"] = "variance"
    scale: Scale = "data"  # as of canny; crop leaves values as they are

    def score(self, images: Tensor, noise: Tensor | None = None, span: Span | None = None) -> Tensor:
        """Images [B, C, *S] -> [B, *S]; noise is not used."""
        ndim = _check_images(images)
        images = _in_levels(images, _span_of(self.scale, span, images))
        out = torch.empty(images.shape[0], *images.shape[2:], dtype=torch.float32, device=images.device)
        # Differences to the mean of the image, so that little is lost where squares are subtracted.
        middle = _finite(images).mean(dim=tuple(range(2, images.ndim)), keepdim=True)
        for samples, rows, slab in _slabs(images, 1, "repeat"):
            mean = _finite(slab) - middle[samples]
            square = mean.square()
            for axis in range(2, 2 + ndim):
                mean, square = (_neighbours(x, axis) for x in (mean, square))
            count = 3**ndim
            variance = square.div_(count).sub_(mean.div_(count).square_())
            out[samples, rows] = variance.clamp_(min=0).sum(1)
        return out


# ---------------------------------------------------------------- Canny


def _edges(images: Tensor, smooth: int, low: float, high: float) -> Tensor:
    """Bytes [B, C, *S] -> 0 or 1 [B, *S], of any type."""
    kernels = adaptive_kernels("edges", images)
    if kernels is not None:
        return kernels.canny(images, smooth, low, high)
    if images.ndim == 4 and images.device.type == "cpu" and images.shape[1] <= _MOST_CHANNELS:
        library = _opencv()
        if library is not None:
            return _opencv_edges(library, images, smooth, low, high)
    return canny_edges(blur(images, smooth), low, high)


def _opencv() -> Any | None:
    """OpenCV where it is installed; without it the same edges take longer."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None


def _opencv_edges(library: Any, images: Tensor, smooth: int, low: float, high: float) -> Tensor:
    edges = []
    for image in images:
        pixels = image.permute(1, 2, 0).contiguous().numpy()
        pixels = library.GaussianBlur(pixels, (smooth, smooth), 0) if smooth > 1 else pixels
        edges.append(torch.from_numpy(library.Canny(pixels, low, high)))
    found = torch.stack(edges) if len(edges) > 1 else edges[0].unsqueeze(0)
    return found.bitwise_and_(1)  # OpenCV writes 255


def blur(images: Tensor, size: int) -> Tensor:
    """The binomial blur over 1, 3 or 5 voxels along each axis of bytes [B, C, *S], borders mirrored; rounded once.

    The numbers of OpenCV's GaussianBlur without a sigma.
    """
    turns, ndim = size // 2, images.ndim - 2
    if turns == 0:
        return images
    out = torch.empty_like(images)
    shift = 2 * turns * ndim
    wide = torch.int16 if 8 + shift < 16 else torch.int32
    for samples, rows, slab in _slabs(images, turns, "mirror"):
        slab = slab.to(wide)
        for axis in range(2, 2 + ndim):
            for _ in range(turns):  # 1 4 6 4 1 is 1 2 1 twice
                slab = _smooth(slab, axis)
        out[samples, :, rows] = slab.add_(1 << shift - 1).bitwise_right_shift_(shift)
    return out


def canny_edges(images: Tensor, low: float, high: float) -> Tensor:
    """Edges of bytes [B, C, *S] in 2-D or 3-D without blurring, bool [B, *S]; 2-D as cv2.Canny(image, low, high).

    Gradients are Sobel's, their length the sum of absolute values. In 3-D they are divided by 4, so that a flat edge
    across an axis has the length that it has in 2-D.
    """
    ndim = images.ndim - 2
    scale = 4 ** (ndim - 2)
    limits = scale * math.floor(low), scale * math.floor(high)
    # One voxel of zeros around every image: neighbours are plain offsets, and images of a batch do not touch.
    padded = (images.shape[0], *(size + 2 for size in images.shape[2:]))
    inner = (slice(1, -1),) * ndim
    length = torch.zeros(padded, dtype=torch.int16, device=images.device)
    direction = torch.empty(images.shape[0], *images.shape[2:], dtype=torch.int8, device=images.device)
    for samples, rows, slab in _slabs(images, 1, "repeat"):
        gradients, steepness = _sobel(slab.short())
        length[samples, rows.start + 1 : rows.stop + 1, *inner[1:]] = steepness
        direction[samples, rows] = _direction(gradients)
    state = torch.zeros(padded, dtype=torch.uint8, device=images.device)
    for samples, rows, around in _parts(length, 1):
        found = _thin(around, direction[samples, rows], *limits)
        state[samples, rows.start + 1 : rows.stop + 1, *inner[1:]] = found
    if limits[0] < limits[1]:
        for _, _, around in _parts(state, 1):
            _grow(around)
        _follow(state)
    return state[(slice(None), *inner)] == 2


def _sobel(slab: Tensor) -> tuple[list[Tensor], Tensor]:
    """Gradients along each axis of int16 [B, C, *S], borders included, and the sums of their absolute values."""
    ndim = slab.ndim - 2
    gradients: list[Tensor] = []
    for axis in range(2, 2 + ndim):  # differences along one axis, 1 2 1 along the others
        gradients = [*(_smooth(gradient, axis) for gradient in gradients), _difference(slab, axis)]
        slab = _smooth(slab, axis) if axis < 1 + ndim else slab
    steepness = gradients[0].abs()
    for gradient in gradients[1:]:
        steepness += gradient.abs()
    if slab.shape[1] == 1:
        return [gradient.squeeze(1) for gradient in gradients], steepness.squeeze(1)
    steepest, channel = steepness.max(dim=1, keepdim=True)  # the first of equal channels
    return [gradient.gather(1, channel).squeeze(1) for gradient in gradients], steepest.squeeze(1)


def _direction(gradients: list[Tensor]) -> Tensor:
    """The nearest direction towards neighbours: its components -1, 0, 1 as digits of base 3, without the sign.

    An axis takes part when its share is at least tan(22.5 degrees) of the largest: 4 directions in 2-D, 13 in 3-D.
    """
    # In 2-D OpenCV's own number; in 3-D 2/5, with which 16 bits are enough.
    part, whole = (1 << 15, _TAN) if len(gradients) == 2 else (5, 2)
    sizes = [gradient.abs() for gradient in gradients]
    if len(gradients) == 2:
        sizes = [size.int() for size in sizes]
    limit = sizes[0]
    for size in sizes[1:]:
        limit = torch.maximum(limit, size)
    limit = limit * whole
    code = torch.zeros_like(gradients[0])
    for gradient, size in zip(gradients, sizes, strict=True):
        code.mul_(3).add_(gradient.sign().mul_(size.mul_(part) >= limit))
    return code.abs_()


def _thin(around: Tensor, direction: Tensor, low: int, high: int) -> Tensor:
    """Voxels that are longest along their direction: 1 above low, 2 above high, as bytes; `around` has a halo of 1.

    Of two equal neighbours the first wins. OpenCV drops both on diagonals, so in 2-D that is done here, too.
    """
    ndim = direction.ndim - 1
    here, less = _shifted(around, (0,) * ndim), around - 1
    bound = torch.zeros_like(here)
    for step in product((-1, 0, 1), repeat=ndim):
        code = sum(digit * 3 ** (ndim - 1 - axis) for axis, digit in enumerate(step))
        if code > 0:  # else it is the opposite of another
            equal_wins = ndim == 3 or step.count(0) == 1
            after = _shifted(less if equal_wins else around, step)
            rival = torch.maximum(_shifted(around, tuple(-digit for digit in step)), after)
            bound += rival.mul_(direction == code)
    longest = here > bound.clamp_(min=low)
    return longest.byte() + (longest & (here > high))


def _shifted(around: Tensor, step: tuple[int, ...]) -> Tensor:
    """Return what lies a step of -1, 0 or 1 along each axis further, for [B, *S] with a halo of 1."""
    return around[(slice(None), *(slice(1 + n, size - 1 + n) for n, size in zip(step, around.shape[1:], strict=True)))]


def _grow(around: Tensor) -> None:
    """Raise every 1 next to a 2 to 2, in place: most are, and densely this is quick. `around` has a halo of 1."""
    near = around == 2
    for axis in range(1, near.ndim):
        n = near.shape[axis] - 2
        near = (near.narrow(axis, 0, n) | near.narrow(axis, 2, n)).logical_or_(near.narrow(axis, 1, n))
    here = _shifted(around, (0,) * (around.ndim - 1))
    here += near & (here == 1)


def _follow(state: Tensor) -> None:
    """Raise every 1 that is joined to a 2 through neighbours to 2, in place; [B, *S] with a border of zeros.

    Components by contraction: every edge of the graph hangs its lower end on the higher, all pointers are followed to
    their end, and edges inside one component are dropped, until none is left: a handful of rounds, however long a
    chain is. All that is strong is one node, higher than every other.
    """
    flat, strides = state.view(-1), state.stride()[1:]
    place = (flat == 1).nonzero().squeeze(1)
    nodes = place.shape[0]
    own = torch.arange(nodes, device=place.device)
    number = torch.empty(flat.shape, dtype=torch.int32, device=place.device)  # looked up at the weak places alone
    number[place] = own.int()
    parent = torch.arange(nodes + 1, device=place.device)
    lower, higher = [], []
    touching = torch.zeros(nodes, dtype=torch.bool, device=place.device)
    for step in product((-1, 0, 1), repeat=len(strides)):
        offset = sum(n * stride for n, stride in zip(step, strides, strict=True))
        other = flat[place + offset]
        touching |= other == 2
        if offset > 0:  # half of the neighbours: the others see this one
            joined = (other == 1).nonzero().squeeze(1)
            lower.append(joined)
            higher.append(number[place[joined] + offset].long())
    parent[:-1].masked_fill_(touching, nodes)
    # Numbers rise along the places, so the neighbour ahead has the higher one.
    low, high = _roots(parent, torch.cat(lower), torch.cat(higher))
    jumps = (nodes + 1).bit_length()  # a pointer doubles its reach with every jump
    while low.shape[0]:
        parent.scatter_reduce_(0, low, high, "amax")
        for _ in range(jumps):
            further = parent[parent]
            if parent.device.type == "cpu" and torch.equal(further, parent):  # elsewhere, looking would wait
                break
            parent = further
        low, high = _roots(parent, low, high)
    flat[place] = 1 + (parent[:-1] == nodes).byte()


def _roots(parent: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Edges between components: the lower and the higher root of each."""
    low, high = parent[low], parent[high]
    apart = (low != high).nonzero().squeeze(1)
    low, high = low[apart], high[apart]
    return torch.minimum(low, high), torch.maximum(low, high)


# ---------------------------------------------------------------- small parts


def hash_noise(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniform numbers [*S] in [0, 1), the same on every device: a hash of the seed and the voxel's place."""
    x = torch.arange(math.prod(shape), dtype=torch.int32, device=device).add_(_wrap(seed * 0x9E3779B1))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)
        x *= _wrap(factor)
    x ^= (x >> 16) & 0xFFFF
    return ((x >> 8) & 0xFFFFFF).float().mul_(2.0**-24).view(shape)


def _wrap(number: int) -> int:
    """As a signed number of 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


def _check_images(images: Tensor) -> int:
    """The number of spatial axes."""
    if images.ndim < 3 or 0 in images.shape:
        raise ValueError(f"images {list(images.shape)} must be [B, C, *S] with at least one voxel")
    return images.ndim - 2


def _finite(x: Tensor) -> Tensor:
    """As fp32, with 0 for what is not finite."""
    return x.float().nan_to_num(0, 0, 0) if x.is_floating_point() else x.float()


def _span_of(scale: Scale, span: Span | None, images: Tensor) -> Span | None:
    """What is black and white [B, C]; None for bytes, and where each crop tells by itself."""
    if images.dtype == torch.uint8 or scale == "crop":
        return None
    if isinstance(scale, str):
        return span
    low, high = (torch.full(images.shape[:2], value, device=images.device) for value in scale)
    return low, high


def _in_levels(images: Tensor, span: Span | None) -> Tensor:
    """Grey levels fp32, also below 0 and above 255; images as they are where there is no span."""
    if span is None:
        return images
    low, high = (t.to(images.device).float()[..., *[None] * (images.ndim - 2)] for t in span)
    return (images.float() - low) * (255 / (high - low))


def _to_bytes(images: Tensor, span: Span | None) -> Tensor:
    """Grey levels 0 ... 255: see the top of the file."""
    if images.dtype == torch.uint8:
        return images
    if span is not None:
        grey = _in_levels(images, span)
        return grey.where(grey.isfinite(), 0).round_().clamp_(0, 255).byte()
    values = images.float()
    dims = tuple(range(1, images.ndim))
    finite = values.isfinite()
    lowest = values.where(finite, math.inf).amin(dims, keepdim=True)
    highest = values.where(finite, -math.inf).amax(dims, keepdim=True)
    spread = highest - lowest
    grey = (values - lowest) * torch.where(spread > 0, 255 / spread, 0)
    return grey.where(finite & (spread > 0), 0).round_().clamp_(0, 255).byte()


def _slabs(images: Tensor, halo: int, border: Literal["repeat", "mirror"]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Parts of [B, C, *S] with `halo` more voxels on every side: which samples, which rows, and the part.

    The CPU gets one image in slabs along its first axis, other devices everything at once.
    """
    height = images.shape[2]
    for samples, rows in _ranges(images.shape[0], height, math.prod(images.shape[3:]), images.device):
        before, after = min(halo, rows.start), min(halo, height - rows.stop)
        # Rows beyond the image are made of its own first or last, wherever the slab ends.
        part = images[samples, :, rows.start - before : rows.stop + after]
        part = _extend(part, 2, halo - before, halo - after, border)
        for axis in range(3, images.ndim):
            part = _extend(part, axis, halo, halo, border)
        yield samples, rows, part


def _parts(padded: Tensor, halo: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """The same slabs of what has its halo already, [B, *S]."""
    height, width = padded.shape[1] - 2 * halo, math.prod(size - 2 * halo for size in padded.shape[2:])
    for samples, rows in _ranges(padded.shape[0], height, width, padded.device):
        yield samples, rows, padded[samples, rows.start : rows.stop + 2 * halo]


def _ranges(batch: int, height: int, width: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    if device.type != "cpu":
        yield slice(0, batch), slice(0, height)
        return
    step = max(1, _SLAB // width)
    for sample, start in product(range(batch), range(0, height, step)):
        yield slice(sample, sample + 1), slice(start, min(start + step, height))


def _extend(x: Tensor, axis: int, before: int, after: int, border: Literal["repeat", "mirror"]) -> Tensor:
    """More voxels at both ends of an axis: the last repeated, or mirrored about it (as far as there are any)."""
    size = x.shape[axis]
    ends = []
    for count, first, sign in ((before, 0, 1), (after, size - 1, -1)):
        reach = [k if border == "mirror" and size > 1 else 0 for k in range(1, count + 1)]
        ends.append([x.narrow(axis, first + sign * _fold(k, size), 1) for k in reach])
    if not ends[0] and not ends[1]:
        return x
    return torch.cat([*ends[0][::-1], x, *ends[1]], dim=axis)


def _fold(step: int, size: int) -> int:
    """A step of a mirrored walk along `size` voxels, back and forth where it is longer."""
    period = max(1, 2 * (size - 1))
    step %= period
    return min(step, period - step)


def _smooth(x: Tensor, axis: int) -> Tensor:
    """1 2 1 along an axis; two voxels shorter."""
    n = x.shape[axis] - 2
    return torch.add(x.narrow(axis, 0, n), x.narrow(axis, 2, n)).add_(x.narrow(axis, 1, n), alpha=2)


def _neighbours(x: Tensor, axis: int) -> Tensor:
    """1 1 1 along an axis; two voxels shorter."""
    n = x.shape[axis] - 2
    return torch.add(x.narrow(axis, 0, n), x.narrow(axis, 2, n)).add_(x.narrow(axis, 1, n))


def _difference(x: Tensor, axis: int) -> Tensor:
    """-1 0 1 along an axis; two voxels shorter."""
    n = x.shape[axis] - 2
    return x.narrow(axis, 2, n) - x.narrow(axis, 0, n)
