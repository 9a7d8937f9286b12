"""Kernels of training on their own: milliseconds, GB/s and TFLOP/s beside what the usual way takes.

    python benchmarks/kernels.py [--only gelu pack norm gate convolution] [--tiles] [--out benchmarks/results]

Shapes are those of ViT-L/16 (512 images), DiT-XL/2 (256) and UNETR (16 volumes of 96^3). The usual way is torch code
for the same pass, compiled; of a convolution it is cuDNN's, in both layouts, with and without its own search. Medians
of 20 runs after 5, by events on the device. `--tiles` tries how the kernels of convolutions are cut best. Needs a GPU.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planner import clean, machine, write_json
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
Work = Callable[[], Any]
CONVOLUTIONS = ((96, 16, 16), (96, 32, 16), (48, 32, 32), (48, 64, 32), (24, 64, 64))  # side, channels in and out
VOLUMES = 16


def seconds(work: Work, *, warm: int = 5, runs: int = 20) -> float:
    for _ in range(warm):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def case(name: str, ours: Work, usual: dict[str, Work], *, moved: float = 0.0, flops: float = 0.0) -> dict[str, Any]:
    """Time ours and the usual ways; `moved` are the fewest bytes, read and written."""
    found: dict[str, Any] = {"name": name}
    for way, work in {"ours": ours, **usual}.items():
        try:
            took = seconds(work)
            found[way] = {"ms": 1e3 * took, "gb_per_s": moved / took / 1e9, "tflops": flops / took / 1e12}
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(found), flush=True)
    return found


def row_cases(only: list[str]) -> Iterator[dict[str, Any]]:
    from vitrail.layers import gelu
    from vitrail.layers.kernels import rows

    tokens, width = 512 * 196, 1024
    if "gelu" in only:
        grad, x = draw(tokens, 4 * width), draw(tokens, 4 * width)
        for approximate in ("none", "tanh"):
            tanh = approximate == "tanh"

            def usual(grad: Tensor, x: Tensor, approximate: str = approximate) -> Any:
                found = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
                return found, found.float().sum(dim=0).to(x.dtype)

            def one(grad: Tensor, x: Tensor, tanh: bool = tanh) -> Any:
                found = (gelu.slope(x.float(), tanh) * grad.float()).to(x.dtype)
                return found, found.float().sum(dim=0).to(x.dtype)

            ways = {name: compiled(way, grad, x) for name, way in (("usual", usual), ("one exponential", one))}
            yield case(f"gelu {approximate}", partial(rows.gelu_back, grad, x, tanh), ways, moved=6 * x.numel())
            forward = {"usual": compiled(partial(F.gelu, approximate=approximate), x)}
            new = compiled(lambda x, tanh=tanh: gelu.value(x.float(), tanh).to(x.dtype), x)
            yield case(f"gelu {approximate}, forward, compiled", new, forward, moved=4 * x.numel())
            clean()
    if "pack" in only:
        q, k, v = (draw(512, 196, 16, 64) for _ in range(3))

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
            found = torch.stack([q, k, v], dim=3).flatten(2)
            return found, found.flatten(0, 1).float().sum(dim=0).to(q.dtype)

        ways = {"usual": compiled(packed, q, k, v)}
        yield case("pack", partial(rows.pack_back, q, k, v), ways, moved=12 * q.numel())
        clean()
    if "norm" in only:
        grad, x, past, weight = (*(draw(tokens, width) for _ in range(3)), draw(width))

        def normed(grad: Tensor, x: Tensor, past: Tensor, weight: Tensor) -> Any:
            variance, mean = torch.var_mean(x.float(), dim=-1, keepdim=True, correction=0)
            scale = (variance + 1e-6).rsqrt()
            mask = [True, True, True]
            found = torch.ops.aten.native_layer_norm_backward(grad, x, [width], mean, scale, weight, weight, mask)
            out = found[0] + past
            return out, found[1], found[2], out.float().sum(dim=0)

        ways = {"usual": compiled(normed, grad, x, past, weight)}
        yield case("norm", partial(rows.norm_back, grad, x, past, weight, 1e-6), ways, moved=8 * x.numel())
        clean()
    if "gate" in only:
        grad, x, past, branch = (draw(256, 256, 1152) for _ in range(4))
        gate, scale = draw(256, 1152), draw(256, 1152)
        ours = partial(rows.gate_back, past, branch, gate, (grad, x, scale, 1e-6))
        yield case("gate and norm", ours, {}, moved=12 * x.numel())
        yield case("gate", partial(rows.gate_back, past, branch, gate), {}, moved=6 * x.numel())
        clean()


def compiled(way: Callable[..., Any], *given: Tensor) -> Work:
    return partial(torch.compile(way, dynamic=False), *given)


def convolution_cases(tiles: bool) -> Iterator[dict[str, Any]]:
    from vitrail.layers.kernels import maps

    for side, inputs, outputs in CONVOLUTIONS:
        x, grad = draw(VOLUMES, side, side, side, inputs), draw(VOLUMES, side, side, side, outputs)
        taps, whole = draw(27, inputs, outputs), draw(outputs, inputs, 3, 3, 3)
        name = f"convolution {side}^3, {inputs} to {outputs}"
        counts: dict[str, Any] = {
            "moved": 2.0 * (x.numel() + grad.numel()),
            "flops": 54.0 * inputs * outputs * VOLUMES * side**3,
        }
        last = x.movedim(-1, 1), whole.to(memory_format=torch.channels_last_3d), grad.movedim(-1, 1)
        first = last[0].contiguous(), whole, last[2].contiguous()
        ways = {}
        for layout, given in (("channels last", last), ("channels first", first)):
            ways[layout] = given
        cuts: dict[str, Any] = {"": None}
        if tiles:
            cuts |= {
                f", {block} voxels, {warps} warps, {stages} ahead": maps.Tiles(block, warps, stages)
                for block in (64, 128, 256)
                for warps in (4, 8)
                for stages in (2, 4)
            }
        for words, cut in cuts.items():
            usual = {} if words else {f"cuDNN, {w}": partial(F.conv3d, g[0], g[1], padding=1) for w, g in ways.items()}
            yield case(f"{name}{words}", partial(maps.convolve, x, taps, cut), searched(usual), **counts)
            usual = {} if words else {f"cuDNN, {w}": partial(backward, *g, 1) for w, g in ways.items()}
            yield case(f"{name}, weight{words}", partial(maps.weigh, x, grad, 27, cut), searched(usual), **counts)
        usual = {f"cuDNN, {w}": partial(backward, *g, 0) for w, g in ways.items()}
        back = draw(27, outputs, inputs)
        yield case(f"{name}, input", partial(maps.convolve, grad, back), searched(usual), **counts)
        clean()


def backward(x: Tensor, weight: Tensor, grad: Tensor, which: int) -> Any:
    """One of the gradients of a 3-wide convolution: 0 of its input, 1 of its weight."""
    wanted = [which == 0, which == 1, False]
    ones, zeros = [1, 1, 1], [0, 0, 0]
    return torch.ops.aten.convolution_backward(grad, x, weight, None, ones, ones, ones, False, zeros, 1, wanted)


def searched(ways: dict[str, Work]) -> dict[str, Work]:
    """Each way as it is, and with cuDNN trying its kernels first."""

    def trying(work: Work) -> Work:
        def tried() -> Any:
            torch.backends.cudnn.benchmark = True
            try:
                return work()
            finally:
                torch.backends.cudnn.benchmark = False

        return tried

    return ways | {f"{name}, searched": trying(work) for name, work in ways.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["gelu", "pack", "norm", "gate", "convolution"]
    parser.add_argument("--only", nargs="*", choices=known, default=known)
    parser.add_argument("--tiles", action="store_true", help="try how kernels of convolutions are best cut")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "cases": []}
    for one in row_cases(given.only):
        found["cases"].append(one)
        write_json(given.out / "kernels.json", found)
    for one in convolution_cases(given.tiles) if "convolution" in given.only else ():
        found["cases"].append(one)
        write_json(given.out / "kernels.json", found)
    print(table(found))
    return 0


def table(found: dict[str, Any]) -> str:
    lines = ["| kernel | way | ms | GB/s | TFLOP/s |", "|---|---|---|---|---|"]
    for one in found["cases"]:
        for way, took in one.items():
            if way == "name":
                continue
            numbers = (("ms", 3), ("gb_per_s", 0), ("tflops", 0))
            words = [took.get("error", "")[:60], "", ""]
            if "ms" in took:
                words = [f"{took[key]:.{digits}f}" for key, digits in numbers]
            lines.append(f"| {one['name']} | {way} | {' | '.join(words)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
