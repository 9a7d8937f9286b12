"""The speed of one device: products, attention, convolutions and what stands between them, timed one by one.

- a point is the median of some windows of calls in a row, on random numbers: zeros draw less power, and run faster
- FLOPs are counted as the planner counts them: 2 for a multiply-add, and 2.5 forwards for the backward of attention
- products are those of a linear layer in training (output, gradient of input, gradient of weight), on average; on a GPU
  they take turns with kernels that move memory, as in training: in a row, they draw so much power that the clock falls
- sizes rise until a call takes too long or memory is used up; a slow or small device has shorter curves
- short calls on a GPU are replayed as a CUDA graph: their launches by the host are measured by themselves (launches.py)
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from vitrail.cost.cluster import WALKS, Walk
from vitrail.errors import UserError
from vitrail.layers.attention import attend
from vitrail.parallel.replay import capture

Points = list[tuple[float, float]]  # x, and FLOP/s reached

# Rows (tokens), and columns and inner width of linear layers.
PRODUCTS = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 768, 768),
    (4096, 768, 768),
    (4096, 3072, 768),
    (16384, 3072, 1024),
    (49152, 4096, 1024),
    (65536, 4096, 4096),
    (262144, 5120, 4096),
)
SHORT, RECORDED = 0.005, 10  # seconds of a call that is recorded, and how many of them at once
MOMENT = 5e-5  # seconds of a call that does not change the clock, and would be lost in the move beside it
MOVED = 2**26  # bytes of a tensor; to read one and write another is more than caches hold
MIXED = 2  # times as long as what stands between them products take in compiled blocks
LEAST = 0.5  # of a time, what is left when another is taken from it; less is noise
TILE = 128  # tokens of the tiles that attention kernels of GPUs compute; curves are of whole tiles
TOKENS = (128, 256, 1024, 4096, 16384, 65536)
HEADS, HEAD_WIDTH = 16, 64
ROWS, WIDTH = (64, 512, 4096, 16384, 65536, 262144), 1024  # of what stands between products
MAPS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)  # that are normed at once
VOXELS = 2**25  # of all of them
# Channels in and out, and voxels along a side of a volume, as in a decoder; kernels are 3 x 3 x 3.
CONVOLUTIONS = ((4, 96), (16, 96), (32, 48), (64, 24), (128, 12), (256, 12))


@dataclass(frozen=True)
class Probe:
    """A device, and how long it is looked at."""

    device: torch.device
    windows: int
    window: float  # seconds
    longest: float  # seconds of one call, beyond which sizes stop rising

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def seconds(self, call: Callable[[], object], *, on_device: bool = True) -> float:
        """Time one call, after some that are not counted; `on_device`: without the host, where it would be slower."""
        call()
        once = min(self._time(call, 1) for _ in range(2))
        if once > self.longest:
            return once
        if once < SHORT and on_device and self.on_gpu and (many := self._recorded(call)) is not None:
            return self.seconds(many, on_device=False) / RECORDED
        times = max(1, min(1000, round(self.window / max(once, 1e-7))))
        return statistics.median(self._time(call, times) / times for _ in range(self.windows))

    def _recorded(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Record several calls in a row as one launch; None for what cannot be recorded."""

        def calls() -> None:
            for _ in range(RECORDED):
                call()

        try:
            return capture(calls, self.device)[0].replay
        except RuntimeError:
            return None

    def seconds_in_turn(self, call: Callable[[], object]) -> float:
        """Time a call that takes turns with kernels that move memory, half as long as itself."""
        alone = self.seconds(call)
        if not self.on_gpu or not MOMENT < alone < self.longest:
            return alone
        move, seconds = self._move
        times = max(1, round(alone / MIXED / seconds))

        def both() -> None:
            call()
            for _ in range(times):
                move()

        return max(self.seconds(both) - times * seconds, LEAST * alone)

    @cached_property
    def _move(self) -> tuple[Callable[[], object], float]:
        """Return what stands between products, a kernel that moves more than caches hold, and its seconds."""
        source = self.random(MOVED // 4, dtype=torch.float32)
        target = torch.empty_like(source)

        def move() -> None:
            torch.neg(source, out=target)

        return move, self.seconds(move)

    def _time(self, call: Callable[[], object], times: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(times):
            call()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int, dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype).requires_grad_(grad)

    @contextmanager
    def _while_it_fits(self, points: Points) -> Iterator[None]:
        """End a curve where memory is used up, unless it has not begun."""
        try:
            yield
        except torch.OutOfMemoryError:
            if not points:
                raise UserError(
                    f"{self.device}: its memory is too full to measure anything; end what uses it"
                ) from None
        if self.on_gpu:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ what is timed

    def products(self, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]] = PRODUCTS) -> Points:
        """Time products, by the FLOPs of one."""
        points: Points = []
        with self._while_it_fits(points):
            for rows, columns, inner in shapes:
                seconds, flops = self._product(rows, columns, inner, dtype), 2.0 * rows * columns * inner
                points.append((flops, flops / seconds))
                if seconds > self.longest:
                    break
        return points

    def _product(self, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
        x, w = self.random(rows, inner, dtype=dtype), self.random(columns, inner, dtype=dtype)
        y = self.random(rows, columns, dtype=dtype)
        # fp32 draws less power than a GPU may.
        seconds = self.seconds if dtype == torch.float32 else self.seconds_in_turn
        return statistics.fmean(map(seconds, (lambda: x @ w.T, lambda: y @ w, lambda: y.T @ x)))

    def attention(self, dtype: torch.dtype, tokens: Sequence[int] = TOKENS) -> dict[str, Points]:
        """Time attention forward and backward, by the number of keys."""
        points: dict[str, Points] = {"forward": [], "backward": []}
        with self._while_it_fits(points["forward"]):
            for number in tokens:
                batch = max(1, (32768 if self.on_gpu else 1024) // number)
                forward, backward = self._attention(batch, number, dtype)
                flops = 4.0 * batch * HEADS * number * number * HEAD_WIDTH
                points["forward"].append((float(number), flops / forward))
                points["backward"].append((float(number), 2.5 * flops / backward))
                if max(forward, backward) > self.longest:
                    break
        return points

    def _attention(self, batch: int, tokens: int, dtype: torch.dtype) -> tuple[float, float]:
        q, k, v = (self.random(batch, tokens, HEADS, HEAD_WIDTH, dtype=dtype, grad=True) for _ in range(3))
        gradient = torch.randn_like(attend(q, k, v))
        forward = self.seconds(lambda: attend(q, k, v))
        # Both at once: a backward cannot be recorded without its forward.
        both = self.seconds(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient))
        return forward, max(both - forward, LEAST * both)

    def convolutions(self, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = CONVOLUTIONS) -> Points:
        """Time convolutions by channels, on average over forward and both gradients, of maps laid out channels-last."""
        points: Points = []
        with self._while_it_fits(points):
            for channels, side in shapes:
                batch, side = (8, side) if self.on_gpu else (1, max(1, side // 4))
                seconds = self._convolution(batch, channels, side, dtype) / 3
                points.append((float(channels), 2.0 * batch * channels**2 * 27 * side**3 / seconds))
                if seconds > self.longest:
                    break
        return points

    def _convolution(self, batch: int, channels: int, side: int, dtype: torch.dtype) -> float:
        shapes = [(batch, channels, side, side, side)] * 2 + [(channels, channels, 3, 3, 3)]
        gradient, x, w = (self.random(*s, dtype=dtype).to(memory_format=torch.channels_last_3d) for s in shapes)
        x.requires_grad_(), w.requires_grad_()
        return self.seconds(lambda: torch.autograd.grad(F.conv3d(x, w, padding=1), (x, w), gradient))

    def bandwidth(self) -> float:
        """Return bytes/s of a kernel that reads and writes; copies of a GPU may go through an engine of their own."""
        size = 2**30 if self.on_gpu else 2**26
        source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: torch.neg(source, out=target))

    def elementwise(
        self, dtype: torch.dtype, rows: Sequence[int] = ROWS, maps: Sequence[int] = MAPS
    ) -> dict[Walk, Points]:
        """Time what stands between products, by how it goes through memory and by the bytes that a kernel moves."""
        points: dict[Walk, Points] = {walk: [] for walk in WALKS}
        with self._while_it_fits(points["dense"]):
            for number in rows:
                kinds = _between_products(*(self.random(number, WIDTH, dtype=dtype) for _ in range(2)))
                for walk, (tensors, kernels, calls) in kinds.items():
                    moved = float(tensors * number * WIDTH * dtype.itemsize)
                    points[walk].append((moved / kernels, moved / sum(map(self.seconds, calls))))
        with self._while_it_fits(points["maps"]):
            for number in maps:
                points["maps"].append((float(number), self._norm_of_maps(number, dtype)))
        return {walk: found for walk, found in points.items() if found}

    def _norm_of_maps(self, number: int, dtype: torch.dtype) -> float:
        """Return bytes/s forward and backward: as the planner counts, 2 and 3 tensors."""
        x = self.random(1, number, VOXELS // number if self.on_gpu else 64, dtype=dtype, grad=True)
        gradient = torch.randn_like(x)
        return 5.0 * x.nbytes / self.seconds(lambda: torch.autograd.grad(F.instance_norm(x), x, gradient))

    def kernel(self) -> float:
        """Return the device's seconds for a kernel that has next to nothing to do, one after the other."""
        x = self.random(64, dtype=torch.float32)
        return self.seconds(lambda: torch.sin(x, out=x))


def _between_products(
    x: torch.Tensor, gradient: torch.Tensor
) -> dict[Walk, tuple[int, int, list[Callable[[], object]]]]:
    """Return, of each kind, the tensors like x that it moves as the planner counts them, its kernels, and its calls."""
    shape, weight = [x.shape[-1]], torch.randn_like(x[0])
    _, mean, scale = torch.native_layer_norm(x, shape, weight, weight, 1e-6)
    backward = torch.ops.aten.native_layer_norm_backward
    both = torch.stack([x, gradient], dim=1)
    return {
        "dense": (8, 3, [lambda: x + gradient, lambda: F.gelu(x), lambda: torch.ops.aten.gelu_backward(gradient, x)]),
        "strided": (8, 3, [lambda: both[:, 0].clone(), lambda: torch.cat([x, gradient], dim=1), lambda: x * weight]),
        "norm": (2, 1, [lambda: torch.native_layer_norm(x, shape, weight, weight, 1e-6)]),
        "norm_backward": (3, 2, [lambda: backward(gradient, x, shape, mean, scale, weight, weight, [True] * 3)]),
        "sum": (1, 1, [lambda: gradient.sum(0)]),
    }


def rising(points: Points) -> Iterator[tuple[float, float]]:
    """Yield the points in the order of x, one for each."""
    yield from sorted(dict(points).items())
