"""Ulysses and rings against full attention on one device, with all their ranks in one process.

    python benchmarks/context.py [--device cuda] [--out benchmarks/results]

1. largest error of output and gradients against the reference in fp32, as a part of the largest value, beside that of
   full attention by the same kernel
2. time of the local work of one rank, forward and backward: all ranks one after the other, divided by their number;
   what travels between real ranks is not in it. Efficiency is full attention's time over that of all ranks together

Times are medians after a warm-up.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from simulated_context import simulate_context
from torch import Tensor

from vitrail.launch.machine import environment
from vitrail.layers.attention import attend, attend_reference
from vitrail.layers.backends import available_backends, use_backend

ROOT = Path(__file__).resolve().parent.parent
RANKS = (2, 4, 8)
SHAPES = {  # batch, tokens, heads, width: for the error and for the time
    "cuda": ((1, 4096, 16, 64), [(1, 65536, 16, 64), (1, 131072, 24, 128)]),
    "cpu": ((1, 256, 8, 32), [(1, 1024, 8, 32)]),
}
KERNELS = {"cuda": ("cudnn", "flash", "efficient", "flash4"), "cpu": ("flash",)}
HEAD = "| tokens, heads, width | kernel | layout | forward ms | backward ms | efficiency |\n|---|---|---|---|---|---|"


def layouts() -> list[tuple[str, int, int]]:
    """Name, ranks, and how many of them trade heads."""
    found = [("full", 1, 1)]
    for ranks in RANKS:
        found += [(f"ring {ranks}", ranks, 1), (f"Ulysses {ranks}", ranks, ranks)]
    return [*found, ("ring 2 x Ulysses 4", 8, 4)]


def draw(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def forward(tensors: list[Tensor], ranks: int, ulysses: int) -> list[Tensor]:
    if ranks == 1:
        return [attend(*tensors)]
    return simulate_context(*(t.chunk(ranks, dim=1) for t in tensors), ulysses=ulysses)


def errors(shape: tuple[int, int, int, int], device: str, ranks: int, ulysses: int) -> list[float]:
    tensors = draw(shape, device, torch.bfloat16)
    exact = [t.detach().float().requires_grad_() for t in tensors]
    expected = attend_reference(*exact)
    out = torch.cat(forward(tensors, ranks, ulysses), dim=1)
    weight = torch.randn(expected.shape, generator=torch.Generator(device).manual_seed(1), device=device)
    found = torch.autograd.grad((out.float() * weight).sum(), tensors)
    right = torch.autograd.grad((expected * weight).sum(), exact)
    pairs = [(out, expected), *zip(found, right, strict=True)]
    return [((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs]


def seconds_of(work: Callable[[], object], device: str, budget: float) -> float:
    work()  # warms up
    times: list[float] = []
    while not times or (sum(times) < budget and len(times) < 20):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(
    shape: tuple[int, int, int, int], device: str, ranks: int, ulysses: int, budget: float
) -> tuple[float, float]:
    """Seconds of all ranks together, forward and with the backward."""
    tensors = draw(shape, device, torch.bfloat16)
    grads = list(torch.randn_like(tensors[0]).chunk(ranks, dim=1))

    def both() -> None:
        torch.autograd.grad(forward(tensors, ranks, ulysses), tensors, grads)

    ahead = seconds_of(lambda: forward(tensors, ranks, ulysses), device, budget)
    return ahead, seconds_of(both, device, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a time is measured for")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    device, name = arguments.device, "context" if arguments.device == "cuda" else "context_cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    result: dict = {
        "benchmark": "context",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": hardware,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "environment": environment(),
        "errors": [],
        "rows": [],
    }

    def say(line: str) -> None:
        print(line, flush=True)
        # After each line, so that a run that is cut off keeps what it has measured.
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")

    found = available_backends(device)
    kernels = [kernel for kernel in KERNELS[device] if found[kernel] is None]
    exact, shapes = SHAPES[device]
    say(f"{hardware}, PyTorch {torch.__version__}, {result['date']}, bf16\n")
    say(f"Largest error against fp32, {exact[1]} tokens, {exact[2]} heads of {exact[3]}:\n")
    say("| kernel | layout | output | dq | dk | dv |\n|---|---|---|---|---|---|")
    for kernel in kernels:
        with use_backend(kernel):
            for layout, ranks, ulysses in layouts():
                worst = errors(exact, device, ranks, ulysses)
                result["errors"].append({"kernel": kernel, "layout": layout, "shape": exact, "error": worst})
                say(f"| {kernel} | {layout} | {' | '.join(f'{value:.1e}' for value in worst)} |")
    say("\nLocal work of one rank:\n\n" + HEAD)
    for shape in shapes:
        for kernel in kernels:
            if kernel == "efficient" and shape[1] > 70_000:  # a minute for nothing
                continue
            full = 0.0
            with use_backend(kernel):
                for layout, ranks, ulysses in layouts():
                    ahead, both = measure(shape, device, ranks, ulysses, arguments.budget)
                    full = full or both
                    row = {
                        "kernel": kernel,
                        "layout": layout,
                        "shape": shape,
                        "ranks": ranks,
                        "forward_ms": ahead / ranks * 1e3,
                        "backward_ms": (both - ahead) / ranks * 1e3,
                        "efficiency": full / both,
                    }
                    result["rows"].append(row)
                    say(
                        f"| {', '.join(map(str, shape[1:]))} | {kernel} | {layout} | {row['forward_ms']:.2f} | "
                        f"{row['backward_ms']:.2f} | {row['efficiency']:.1%} |"
                    )


if __name__ == "__main__":
    main()
