"""What one device reaches: products, attention, convolutions and copies, timed one by one.

- a point is the median of some windows of calls in a row, on random numbers: zeros draw less power, and run faster
- FLOPs are counted as the planner counts them: 2 for a multiply-add, and 2.5 forwards for the backward of attention
- products are those of a linear layer in training (output, gradient of input, gradient of weight), on average
- sizes rise until a call takes too long or memory is used up; a slow or small device has shorter curves
- short calls on a GPU are replayed as a CUDA graph: their launches by the host are measured by themselves (launches.py)
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
TOKENS = (64, 256, 1024, 4096, 16384, 65536)
HEADS, HEAD_WIDTH = 16, 64
ROWS, WIDTH = (64, 512, 4096, 16384, 65536, 262144), 768  # of what stands between products
# Batch, channels in and out, voxels along a side of a volume; kernels are 3 x 3 x 3.
CONVOLUTIONS = ((1, 16, 16, 8), (1, 32, 32, 16), (2, 64, 64, 16), (2, 32, 32, 64), (4, 64, 64, 64), (4, 128, 128, 96))


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
        """Of one call, after some that are not counted; `on_device`: without the host, where it would be the slower."""
        call()
        once = min(self._time(call, 1) for _ in range(2))
        if once > self.longest:
            return once
        if once < SHORT and on_device and self.on_gpu and (many := self._recorded(call)) is not None:
            return self.seconds(many, on_device=False) / RECORDED
        times = max(1, min(1000, round(self.window / max(once, 1e-7))))
        return statistics.median(self._time(call, times) / times for _ in range(self.windows))

    def _recorded(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Several calls in a row as one launch; None for what cannot be recorded."""

        def calls() -> None:
            for _ in range(RECORDED):
                call()

        try:
            return capture(calls, self.device)[0].replay
        except RuntimeError:
            return None

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
        """Memory that is used up ends a curve, unless it has not begun."""
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
        """By the FLOPs of one product."""
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
        return statistics.fmean(self.seconds(call) for call in (lambda: x @ w.T, lambda: y @ w, lambda: y.T @ x))

    def attention(self, dtype: torch.dtype, tokens: Sequence[int] = TOKENS) -> dict[str, Points]:
        """Forward and backward, by the number of keys."""
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
        out = attend(q, k, v)
        gradient = torch.randn_like(out)
        forward = self.seconds(lambda: attend(q, k, v))
        return forward, self.seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))

    def convolutions(self, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int, int]] = CONVOLUTIONS) -> Points:
        """By the FLOPs of one, on average over forward and both gradients."""
        points: Points = []
        with self._while_it_fits(points):
            for batch, given, made, side in shapes:
                seconds = self._convolution(batch, given, made, side, dtype) / 3
                flops = 2.0 * batch * given * made * 27 * side**3
                points.append((flops, flops / seconds))
                if seconds > self.longest:
                    break
        return points

    def _convolution(self, batch: int, given: int, made: int, side: int, dtype: torch.dtype) -> float:
        x = self.random(batch, given, side, side, side, dtype=dtype, grad=True)
        w = self.random(made, given, 3, 3, 3, dtype=dtype, grad=True)
        gradient = self.random(batch, made, side, side, side, dtype=dtype)
        return self.seconds(lambda: torch.autograd.grad(F.conv3d(x, w, padding=1), (x, w), gradient))

    def bandwidth(self) -> float:
        """Bytes a second of a copy, read and written."""
        size = 2**30 if self.on_gpu else 2**26
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    def elementwise(self, dtype: torch.dtype, rows: Sequence[int] = ROWS) -> Points:
        """By the bytes that one kernel moves: what stands between the products of a block, on average."""
        points: Points = []
        with self._while_it_fits(points):
            for number in rows:
                x, gradient = (self.random(number, WIDTH, dtype=dtype) for _ in range(2))
                norm = [WIDTH], self.random(WIDTH, dtype=dtype), self.random(WIDTH, dtype=dtype)
                seconds = sum(self.seconds(call) for call in _between_products(x, gradient, *norm))
                moved = 13.0 * x.nbytes  # as the planner counts: an addition 3, forwards 2, backwards 3 tensors
                points.append((moved / 6, moved / seconds))
        return points

    def kernel(self) -> float:
        """Seconds of the device for a kernel that has next to nothing to do, one after the other."""
        x = self.random(64, dtype=torch.float32)
        return self.seconds(lambda: torch.sin(x, out=x))


def _between_products(
    x: torch.Tensor, gradient: torch.Tensor, shape: list[int], weight: torch.Tensor, bias: torch.Tensor
) -> list[Callable[[], object]]:
    """Six kernels: a residual, a norm and an activation, the latter two also backward."""
    _, mean, scale = torch.native_layer_norm(x, shape, weight, bias, 1e-6)
    backward = torch.ops.aten.native_layer_norm_backward
    return [
        lambda: x + gradient,
        lambda: F.gelu(x),
        lambda: torch.ops.aten.gelu_backward(gradient, x),
        lambda: torch.native_layer_norm(x, shape, weight, bias, 1e-6),
        lambda: backward(gradient, x, shape, mean, scale, weight, bias, [True] * 3),
    ]


def rising(points: Points) -> Iterator[tuple[float, float]]:
    """In the order of x, one point for each."""
    yield from sorted(dict(points).items())
