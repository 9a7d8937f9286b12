"""Speed of every attention backend on one GPU, by shape; with masks, also what it computes and its memory.

    python benchmarks/attention.py [--seconds 150] [--only flash cudnn] [--out benchmarks/results]

1. each backend against the reference in fp32 on a small shape, forward and backward, masked and not
2. batches of unequal length: time and peak memory, and whether memory doubles when the tokens do
3. shapes of the models, short ones first; what does not fit into the given seconds is left out and said so

TFLOP/s count 4 * heads * width * queries * keys forward and twice that backward, over keys that are seen; MFU is of the
pair. Times are medians after a warm-up, in bf16, by CUDA events.
"""

import argparse
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vitrail.launch.machine import environment
from vitrail.layers.attention import attend, attend_reference, key_mask
from vitrail.layers.backends import Call, available_backends, choose, machine, refusal, use_backend
from vitrail.layers.kernels import attention as kernels

ROOT = Path(__file__).resolve().parent.parent
PEAK = {"H100": 989.4, "H200": 989.4, "GH200": 990.0, "A100": 312.0, "B200": 2250.0}  # dense bf16 TFLOP/s
SHAPES = [  # batch, heads, tokens, head width
    (64, 16, 1024, 64),
    (256, 16, 256, 72),
    (256, 16, 197, 64),
    (8, 16, 2048, 64),
    (8, 16, 4096, 64),
    (1, 24, 13107, 128),
    (1, 4, 65536, 128),
    (1, 8, 65536, 64),
    (1, 32, 65536, 16),
    (1, 48, 131072, 64),
    (1, 32, 131072, 96),
    (1, 24, 131072, 128),
]
MASKED = [(8, 16, 4096, 64), (64, 16, 1024, 64)]
SMALL = [(3, 200, 320, 6, 2, 64), (2, 40, 130, 2, 2, 16), (2, 77, 300, 4, 4, 105), (2, 1, 200, 4, 4, 64)]
COMPILED = (8, 16, 4096, 64)  # the one shape without a mask that flex is compiled for


def draw(batch: int, queries: int, keys: int, heads: int, groups: int, width: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width)]
    return [
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes
    ]


def unequal(batch: int, tokens: int) -> Tensor:
    """Samples of an eighth of the tokens to all of them, padded at the end."""
    lengths = torch.randint(tokens // 8, tokens + 1, (batch, 1), generator=torch.Generator().manual_seed(0))
    return (torch.arange(tokens) < lengths).cuda()


def describe(batch: int, queries: int, keys: int, heads: int, groups: int, width: int, masked: bool) -> Call:
    here = machine("cuda")
    return Call(here.device, here.capability, torch.bfloat16, batch, heads, groups, queries, keys, width, masked, True)


def fresh() -> None:
    """Forget compiled kernels: each shape is compiled for itself, as in a training run."""
    torch._dynamo.reset()
    kernels._flex = None
    gc.collect()
    torch.cuda.empty_cache()


def error(name: str, shape: tuple[int, ...], masked: bool) -> float:
    """Largest difference to the reference, of output and gradients, as a part of the largest value."""
    tensors = draw(*shape)
    exact = [t.detach().float().requires_grad_() for t in tensors]
    mask = None
    if masked:
        mask = torch.rand(shape[0], shape[2], device="cuda") > 0.3
        mask[0], mask[1] = torch.arange(shape[2], device="cuda") < shape[2] // 2, False
    with use_backend(name):
        out = attend(*tensors, mask=None if mask is None else key_mask(mask))
    expected = attend_reference(*exact, mask=mask)
    weight = torch.randn_like(expected)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad((out.float() * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), exact),
        strict=True,
    )
    worst = [((a.float() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]
    return float("nan") if any(w != w for w in worst) else max(worst)


def seconds_of(work: Callable[[], object], budget: float = 0.25) -> float:
    """Median of the repeats that fill the budget."""
    times: list[float] = []
    while sum(times) < budget and len(times) < 50:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(name: str, shape: tuple[int, int, int, int], valid: Tensor | None) -> dict:
    batch, heads, tokens, width = shape
    tensors = draw(batch, tokens, tokens, heads, heads, width)
    grad = torch.randn_like(tensors[0])
    call = describe(batch, tokens, tokens, heads, heads, width, valid is not None)
    with use_backend(name):
        mask = None if valid is None else key_mask(valid)

        def forward() -> Tensor:
            return attend(*tensors, mask=mask)

        def both() -> None:
            torch.autograd.grad(forward(), tensors, grad)

        begun = time.perf_counter()
        both()  # compiles and warms up
        torch.cuda.synchronize()
        warm = time.perf_counter() - begun
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        total = seconds_of(both)
        memory = torch.cuda.max_memory_allocated() - before
        ahead = seconds_of(forward)
        chosen = choose(call, machine("cuda").backends, name)[0]
    seen = batch * tokens if valid is None else int(valid.sum())
    flops = 4 * heads * width * tokens * seen / 1e12
    return {
        "backend": name,
        "chosen": chosen,
        "shape": list(shape),
        "masked": valid is not None,
        "forward_ms": ahead * 1e3,
        "backward_ms": (total - ahead) * 1e3,
        "forward_tflops": flops / ahead,
        "backward_tflops": 2 * flops / (total - ahead),
        "pair_tflops": 3 * flops / total,
        "memory_mib": memory / 2**20,
        "warm_up_s": warm,
    }


def show(row: dict, peak: float | None) -> str:
    mfu = "-" if peak is None else f"{row['pair_tflops'] / peak:.1%}"
    name = row["backend"] if row["backend"] == row["chosen"] else f"{row['backend']} ({row['chosen']})"
    return (
        f"| {', '.join(map(str, row['shape']))}{' masked' if row['masked'] else ''} | {name} | "
        f"{row['forward_ms']:.3f} | {row['backward_ms']:.3f} | {row['forward_tflops']:.0f} / "
        f"{row['backward_tflops']:.0f} | {mfu} | {row['memory_mib']:.0f} | {row['warm_up_s']:.1f} |"
    )


HEAD = (
    "| batch, heads, tokens, width | backend | forward ms | backward ms | forward / backward TFLOP/s | MFU | "
    "peak MiB | first call s |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", nargs="*", help="backends to measure; all that are there if not given")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    device = torch.cuda.get_device_name()
    peak = next((value for part, value in PEAK.items() if part in device.split()), None)
    found = available_backends("cuda")
    names = [n for n, reason in found.items() if reason is None and n != "reference"]
    names = [n for n in names if not arguments.only or n in arguments.only]
    result: dict = {
        "benchmark": "attention",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "environment": environment(),
        "backends": found,
        "checks": [],
        "rows": [],
        "memory": [],
        "left_out": [],
    }
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        # After each line, so that a run that is cut off keeps what it has measured.
        (arguments.out / "attention.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.out / "attention.md").write_text("\n".join(lines) + "\n")

    def late() -> bool:
        return time.perf_counter() - begun > arguments.seconds

    say(f"{device}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {result['date']}\n")
    for name, reason in found.items():
        say(f"- {name}: {'available' if reason is None else reason}")

    say("\n| backend | queries, keys, heads, groups, width | masked | largest error | |\n|---|---|---|---|---|")
    for name in names:
        for masked in (False, True):
            for shape in SMALL[:1] if name == "auto" or (name == "flex" and not masked) else SMALL:
                if late() or (name != "auto" and refusal(name, describe(*shape, masked=masked))):
                    continue
                fresh()
                try:
                    worst, why = error(name, shape, masked), ""
                except Exception as problem:
                    worst, why = float("nan"), words(problem)
                verdict = "PASS" if worst < 4e-2 else f"FAIL {why}"
                result["checks"].append({"backend": name, "shape": shape, "masked": masked, "error": worst})
                say(f"| {name} | {', '.join(map(str, shape[1:]))} | {masked} | {worst:.1e} | {verdict} |")

    def table(shapes: list[tuple[int, int, int, int]], masked: bool) -> None:
        say("\n" + HEAD)
        for shape in shapes:
            batch, heads, tokens, width = shape
            for name in names:
                if name == "auto" or refusal(name, describe(batch, tokens, tokens, heads, heads, width, masked)):
                    continue
                if skip(name, shape, masked) or late():
                    result["left_out"].append({"backend": name, "shape": shape, "masked": masked})
                    continue
                fresh()
                try:
                    row = measure(name, shape, unequal(batch, tokens) if masked else None)
                except Exception as problem:
                    say(f"| {shape} | {name} | FAIL {words(problem)} |")
                    continue
                result["rows"].append(row)
                say(show(row, peak))

    table(MASKED, True)
    say("\n| masked, 16 heads of 64 | MiB at 8192 tokens | MiB at 16384 tokens | |\n|---|---|---|---|")
    for name in ("flex", "varlen", "efficient"):
        if name not in names or late():
            continue
        sizes = []
        try:
            for tokens in (8192, 16384):
                fresh()
                sizes.append(measure(name, (1, 16, tokens, 64), unequal(1, tokens))["memory_mib"])
        except Exception as problem:
            say(f"| {name} | FAIL {words(problem)} |")
            continue
        result["memory"].append({"backend": name, "tokens": [8192, 16384], "memory_mib": sizes})
        say(f"| {name} | {sizes[0]:.0f} | {sizes[1]:.0f} | {'PASS' if sizes[1] < 2.5 * sizes[0] else 'FAIL'} |")

    table(SHAPES, False)
    left = ", ".join(f"{entry['backend']} {tuple(entry['shape'])}" for entry in result["left_out"])
    say(f"\n{time.perf_counter() - begun:.0f} s. Left out: {left or 'nothing'}")


def words(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:160]}"


def skip(name: str, shape: tuple[int, int, int, int], masked: bool) -> bool:
    """What is known to be hopeless: whole matrices of many tokens, and compiling flex for each shape without a mask."""
    batch, heads, tokens, _ = shape
    if name == "math":
        return batch * heads * tokens * tokens > 2**31
    if name in ("efficient", "xformers"):
        return tokens > 70_000
    return name == "flex" and not masked and shape != COMPILED


if __name__ == "__main__":
    main()
