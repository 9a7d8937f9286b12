"""Peak memory and step time of every way to recompute, and of float8, on one GPU.

    python benchmarks/memory.py [--only vit mae95/full ...] [--steps 5] [--out benchmarks/results]

Three models train on random data that lie on the GPU: ViT-L/16 at 224 (batch 256), the 3-D MAE of configs/mae3d/2b.yaml
at 95 % mask and at 1 % (259,522 visible tokens), and DiT-XL/2 on 32 x 32 x 4 latents (batch 256). Each goes through
parallelize() as in a run: fp32 masters in shards, bf16 compute, blocks compiled, fused AdamW. A step is forward,
backward, update. Medians over the steps after the warm-up; peak memory is what PyTorch allocated in these.

Rows are written one by one, and a later run replaces the rows that it measures again. `--only` takes names or
their beginnings. `--tiny` runs small models on a CPU, to try the script.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.layers.flops import peak_tflops
from vitrail.layers.init import init_rules, initialise, local_shard
from vitrail.layers.tokens import grid_coordinates
from vitrail.models import DecoderConfig, DiTConfig, EncoderConfig, MAEConfig, ViTConfig
from vitrail.models.model import encoder_of
from vitrail.objectives.objective import Loss
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.parallel import float8
from vitrail.parallel.flow import parallelize
from vitrail.parallel.mesh import Layout, Mesh, layout_of
from vitrail.recipe.sections import Chunk, Parallel, Recompute

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement: a model and how it is trained."""

    model: str
    mode: str
    recompute: Any = "none"
    chunk: Chunk = field(default_factory=Chunk)
    float8: str | None = None  # "auto" as a recipe's precision.compute has it; else a kind of scale, for every layer
    warmup: int = 3
    steps: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model}/{self.mode}"


def keep(*roles: str) -> Recompute:
    return Recompute(keep=roles)  # type: ignore[arg-type]


MODES: dict[str, Any] = {
    "none": "none",
    "every 2": Recompute(every=2),
    "keep attention, qkv, proj, fc1": keep("attention", "qkv", "proj", "fc1"),
    "keep attention, qkv, proj": keep("attention", "qkv", "proj"),
    "keep attention, proj": keep("attention", "proj"),
    "keep attention": keep("attention"),
    "budget 0.5": Recompute(budget=0.5),
    "budget 0.25": Recompute(budget=0.25),
    "full": "full",
}


def rows() -> list[Row]:
    table = [Row(model, mode, choice) for model in ("vit", "mae95", "dit") for mode, choice in MODES.items()]
    table += [
        Row(model, f"float8 {kind}", float8=kind)
        for model in ("vit", "mae95", "dit")
        for kind in ("auto", "tensorwise", "rowwise")
    ]
    table += [Row("mae95", "full, mlp in pieces", "full", Chunk(mlp=4096))]
    table += [
        Row("mae1", mode, choice, chunk, warmup=1, steps=2)
        for mode, choice, chunk in (
            ("full", "full", Chunk()),
            ("keep attention", keep("attention"), Chunk()),
            ("keep attention, mlp in pieces", keep("attention"), Chunk(mlp=65536, head=65536)),
        )
    ]
    return table


# ---------------------------------------------------------------- models and their data


@dataclass(frozen=True)
class Work:
    config: Any
    batch: int
    inputs: Callable[[torch.device], dict[str, Any]]
    tokens: Callable[[str], int]  # of a sample, by the name of the layer that sees them

    def rows(self, layer: str, layout: Layout, chunk: Chunk) -> int:
        """What a run judges float8 by."""
        return float8.rows_of(layer, samples=self.batch, tokens=self.tokens(layer), layout=layout, piece=chunk.mlp)


def image_work(config: Any, batch: int) -> Work:
    def inputs(device: torch.device) -> dict[str, Any]:
        # Through a model on the meta device: what it makes of images has no weights in it.
        with torch.device("meta"):
            model = config.build()
        channels = config.channels
        given = model.inputs(torch.randn(batch, channels, config.shape, config.shape, device=device))
        if config.kind == "dit":
            given["times"] = torch.arange(batch, device=device).float()
            given["labels"] = torch.arange(batch, device=device) % 10
        return given

    number = encoder_of(config).count_tokens((config.shape, config.shape))
    return Work(config, batch, inputs, lambda layer: number)


def mae_work(config: MAEConfig) -> Work:
    """Patches at random places: the volume itself is not needed."""
    visible, predicted = config.token_counts()

    def inputs(device: torch.device) -> dict[str, Any]:
        places = grid_coordinates(config.size, config.patch)
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))
        features = config.channels * config.patch[0] ** config.ndim  # type: ignore[operator]
        return {
            "x": torch.randn(1, visible, features, device=device),
            "coordinates": places[order[:visible]].unsqueeze(0).to(device),
            "queries": places[order[visible : visible + predicted]].unsqueeze(0).to(device),
        }

    return Work(config, 1, inputs, ReconstructConfig().build(config, Statistics((0.0,), (1.0,))).tokens_at)


def works(tiny: bool) -> dict[str, Work]:
    if tiny:
        encoder = EncoderConfig(width=32, depth=2, heads=2, patch=4, mlp="swiglu", bias=False, positions="rope")
        mae = MAEConfig(encoder=encoder, decoder=DecoderConfig(kind="cross", width=16, depth=1, heads=1), ndim=3)
        mae = replace(mae, channels=1, shape=16)
        vit: Any = ViTConfig(width=32, depth=2, heads=2, patch=4, channels=3, shape=16, classes=10)
        dit: Any = DiTConfig(width=32, depth=2, heads=2, patch=4, channels=4, shape=16, classes=10)
        batch, ratios = 2, (0.75, 0.25)
    else:
        mae = model_of(ROOT / "configs/mae3d/2b.yaml")
        vit = ViTConfig(size="L/16", channels=3, shape=224, classes=1000)
        dit = DiTConfig(size="XL/2", channels=4, shape=32, classes=1000, learn_sigma=True)
        batch, ratios = 256, (0.95, 0.01)
    all_hidden = replace(mae.decoder, decode_ratio=1.0)
    return {
        "vit": image_work(vit, batch),
        "dit": image_work(dit, batch),
        "mae95": mae_work(replace(mae, mask=replace(mae.mask, ratio=ratios[0]))),
        "mae1": mae_work(replace(mae, mask=replace(mae.mask, ratio=ratios[1]), decoder=all_hidden)),
    }


def model_of(path: Path) -> MAEConfig:
    """The model of a recipe, whose data may not exist."""
    from vitrail.recipe import load_recipe

    recipe = load_recipe(path)
    return replace(recipe.model, channels=1, shape=recipe.data.crop)


# ---------------------------------------------------------------- measuring


def measure(row: Row, work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    cuda = device.type == "cuda"
    parallel = Parallel(recompute=row.recompute, chunk=row.chunk)
    layout = layout_of(parallel, 1)
    with torch.device("meta"):
        model = work.config.build()
    rules = init_rules(model)
    torch.manual_seed(0)  # the same data in every row: losses can be compared
    inputs = work.inputs(device)
    tokens = work.batch * inputs["coordinates"].shape[1]
    notes: list[str] = []
    rows = partial(work.rows, layout=layout, chunk=row.chunk)
    as_users_get_it = row.float8 == "auto" and cuda
    if row.float8 is not None and not as_users_get_it:
        forced = row.float8 != "auto"
        kind: Any = row.float8 if forced else "tensorwise"
        judged = float8.apply(model, device=device, rows=rows, recipe=kind, force=forced, emulate=not cuda)
        notes += [f"float8 in {len(judged.taken)} layers", str(float8.check(model, rows, kind))]
    flow = parallelize(
        model, Mesh.make(layout, device.type), layout, parallel, device=device, reduce=torch.float32,
        compute=torch.bfloat16 if cuda else torch.float32, compiled=cuda, float8_rows=rows if as_users_get_it else None,
    )  # fmt: skip
    if row.chunk != Chunk():
        notes.append("HFU leaves out what pieces compute again")
    notes += flow.notes
    model.to_empty(device=device)
    initialise(model, rules, 0)
    open_gates(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    seconds: list[float] = []
    losses: list[float] = []
    for number in range(row.warmup + steps):
        if cuda:
            torch.cuda.synchronize()
            if number == row.warmup:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss, _ = flow.forward_backward([(inputs, None)], 1, judge)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
        print(f"{row.name}: step {number + 1} {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", flush=True)
    counted = seconds[row.warmup :]
    middle = statistics.median(counted)
    flops = model.flops() * work.batch
    result: dict[str, Any] = {
        "step_seconds": middle,
        "step_seconds_range": [min(counted), max(counted)],
        "steps_measured": len(counted),
        "samples_per_s": work.batch / middle,
        "batch": work.batch,
        "tokens": tokens,
        "tflops": flops.training / middle / 1e12,
        "hardware_tflops": flops.hardware(recompute=flow.again) / middle / 1e12,
        "losses": [round(loss, 4) for loss in losses],
        "notes": notes,
    }
    if cuda:
        peak = peak_tflops(torch.cuda.get_device_name())
        result |= {
            "memory_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "mfu": result["tflops"] / peak if peak else None,
            "hfu": result["hardware_tflops"] / peak if peak else None,
        }
    return result


@torch.no_grad()
def open_gates(model: torch.nn.Module) -> None:
    """No matrix of zeros, such as DiT begins with: products with zeros draw less power, and then clocks are higher."""
    for parameter in model.parameters():
        local, _ = local_shard(parameter)
        if local.ndim > 1 and not local.any():
            local.normal_(std=0.02)


def judge(output: Tensor, _: Any) -> Loss:
    return Loss(loss_of(output), torch.ones((), device=output.device))


def loss_of(output: Tensor) -> Tensor:
    """Any loss will do: what is measured is the model. In pieces, since fp32 copies of all voxels would be the peak."""
    parts = [part.float().square().sum() for part in output.split(16384, dim=1)]
    return torch.stack(parts).sum() / output.numel()


def try_row(row: Row, work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """A row, whatever happens: to run out of memory is a result."""
    about = {"row": row.name, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    try:
        return about | measure(row, work, device, row.steps or steps)
    except torch.OutOfMemoryError:
        return about | {"error": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        return about | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def clean(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names of rows")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--list", action="store_true", help="names of all rows")
    given = parser.parse_args(arguments)
    chosen = choose(given.only)
    if given.list or not chosen:
        print("\n".join(row.name for row in (chosen or rows())))
        return
    device = torch.device("cpu" if given.tiny else "cuda")
    # Long sequences ask for large pieces of memory that differ in size: without this, gaps between them add up.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("memory_tiny.json" if given.tiny else "memory.json")
    done: dict[str, Any] = {row["row"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    dist.init_process_group("gloo" if given.tiny else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    known = works(given.tiny)
    try:
        for row in chosen:
            if given.tiny and row.chunk.mlp is not None:
                row = replace(row, chunk=Chunk(mlp=4, head=4))
            clean(device)
            done[row.name] = try_row(row, known[row.model], device, given.steps)
            order = [name for name in (one.name for one in rows()) if name in done]
            result = head(device) | {"rows": [done[name] for name in order]}
            path.write_text(json.dumps(result, indent=1) + "\n")  # after each row: a run may be cut off
            print(table(result["rows"]), flush=True)
    finally:
        dist.destroy_process_group()


def choose(only: Sequence[str]) -> list[Row]:
    """Rows in the order asked for: a whole name is that row alone, else it is the beginning of names."""
    table = rows()
    names = {row.name for row in table}
    found = [
        row
        for begin in only or [""]
        for row in table
        if (row.name == begin or (begin not in names and row.name.startswith(begin)))
    ]
    return list(dict.fromkeys(found))


def head(device: torch.device) -> dict[str, Any]:
    return {
        "benchmark": "memory",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "python": platform.python_version(),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| row | peak GiB | s/step (range) | samples/s | MFU | HFU |", "|---|---|---|---|---|---|"]
    for row in found:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['error']} | | | | |")
            continue
        low, high = row["step_seconds_range"]
        shares = [f"{row[name]:.1%}" if row.get(name) else "-" for name in ("mfu", "hfu")]
        memory = f"{row['memory_gib']:.1f}" if "memory_gib" in row else "-"
        lines.append(
            f"| {row['row']} | {memory} | {row['step_seconds']:.3f} ({low:.3f}-{high:.3f}) | "
            f"{row['samples_per_s']:.2f} | {' | '.join(shares)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
