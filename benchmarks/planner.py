"""The planner against measurement: memory and step time of many configurations on one GPU.

    python benchmarks/planner.py [--minutes 8] [--only vit dit ...] [--cluster h200]
    python benchmarks/planner.py --predict --cluster h200.yaml       predict again what was measured; needs no GPU

Each configuration trains for some steps on made-up data through `vitrail.bench`, as `vitrail bench --mode syn` does.
What is measured is kept in results/planner.json; a call goes on where the last one stopped, and ends with 75 when its
minutes are over and something is left. Predictions are made anew each time, from the recipe and the cluster file alone;
the table goes to planner.md. Nothing that is measured here is used for the cluster file. A table is of one machine and
one PyTorch: what was measured elsewhere is refused.

Cells named "fit" are there to see whether "fits" is right near the limit: one fits, one does not.
`--quick` measures small models on a CPU, to try the script.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitrail.cost.cluster import Cluster, load_cluster
from vitrail.disk import write_whole
from vitrail.errors import UserError, is_out_of_memory
from vitrail.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 75
GIB = 2**30
SAME = ("device", "torch")  # what the results of one table have in common


@dataclass(frozen=True)
class Cell:
    """A model, its data and how it is trained."""

    name: str
    model: dict[str, Any]
    objective: str | dict[str, Any]
    crop: int
    channels: int
    batch: int
    recompute: Any = "none"
    compile: bool = False
    classes: int = 10
    parallel: dict[str, Any] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """The recipe."""
        ndim = self.model.get("ndim", 2)
        source = {
            "kind": "dummy",
            "path": "dummy",
            "shape": [self.crop] * ndim,
            "channels": self.channels,
            "classes": self.classes,
            "items": 4096,
        }
        return {
            "run": {"name": "planner", "steps": 1000},
            "model": self.model,
            "objective": {"kind": self.objective} if isinstance(self.objective, str) else self.objective,
            "data": {
                "train": [source],
                "crop": self.crop,
                "batch": f"{self.batch}/rank",
                "normalize": {"mean": [0.0] * self.channels, "std": [1.0] * self.channels},
                "reuse": 1,
            },
            "parallel": {"recompute": self.recompute, "compile": self.compile, **self.parallel},
            "log": {"tensorboard": False},
        }


def keep(*roles: str) -> dict[str, Any]:
    return {"keep": list(roles)}


def mae(size: dict[str, Any], kind: str, *, ndim: int = 2, ratio: float = 0.75) -> dict[str, Any]:
    decoder: dict[str, Any] = {"kind": kind}
    if kind != "linear":
        decoder |= {"width": 512, "depth": 8 if kind == "self" else 4, "heads": 16}
    return {
        "kind": "mae",
        "ndim": ndim,
        "encoder": size,
        "mask": {"kind": "random", "ratio": ratio},
        "decoder": decoder,
    }


def reconstruct(decoder: str) -> dict[str, Any]:
    """Hidden tokens alone; a linear decoder learns from the visible ones."""
    return {"kind": "reconstruct", "on": "all" if decoder == "linear" else "hidden"}


def cells() -> list[Cell]:
    def vit(size: str, batch: int, name: str = "vit", **options: Any) -> Cell:
        depth = {"depth": 12} if size == "H/14" else {}  # fewer blocks start sooner, and the planner must not care
        kind = {"kind": "vit", "size": size, "classes": 1000, **depth}
        return Cell(_name(name, size, batch, options), kind, "classify", 224, 3, batch, classes=1000, **options)

    def mae2(size: str, kind: str, batch: int, **options: Any) -> Cell:
        name = _name(f"mae {kind}", size, batch, options)
        return Cell(name, mae({"size": size}, kind), reconstruct(kind), 224, 3, batch, **options)

    def mae3(size: str, kind: str, crop: int, batch: int, **options: Any) -> Cell:
        encoder = {"size": size, "positions": "rope", **({"depth": 12} if size == "L/8" else {})}
        name = _name(f"mae3d {kind}", f"{size} {crop}^3", batch, options)
        return Cell(name, mae(encoder, kind, ndim=3), reconstruct(kind), crop, 1, batch, **options)

    def unetr(ndim: int, crop: int, batch: int, **options: Any) -> Cell:
        kind = {"kind": "unetr", "ndim": ndim, "encoder": {"size": "B/16"}}
        name = _name("unetr", f"B/16 {crop}^{ndim}", batch, options)
        return Cell(name, kind, "segment", crop, 1 if ndim == 3 else 3, batch, classes=4, **options)

    def dit(size: str, batch: int, **options: Any) -> Cell:
        depth = {"depth": 16} if size == "XL/2" else {}
        kind = {"kind": "dit", "size": size, "classes": 1000, **depth}
        return Cell(_name("dit", size, batch, options), kind, "flow", 32, 4, batch, classes=1000, **options)

    def adaptive(ndim: int, patch: int, length: int, crop: int, batch: int, **options: Any) -> Cell:
        tokens = {"kind": "adaptive", "length": length, "score": {"kind": "gradient"}}
        kind = {"kind": "sap", "ndim": ndim, "encoder": {"size": "B", "patch": patch, "tokens": tokens}}
        name = _name("adaptive", f"B/{patch} {length} of {crop}^{ndim}", batch, options)
        return Cell(name, kind, "segment", crop, 1, batch, classes=4, **options)

    return [
        vit("B/16", 128),
        vit("B/16", 256, compile=True),
        vit("L/16", 64),
        vit("L/16", 128, recompute="full"),
        vit("L/16", 128, recompute=keep("attention", "proj")),
        vit("H/14", 64),
        vit("H/14", 96, recompute={"every": 2}),
        mae2("B/16", "self", 256),
        mae2("L/16", "self", 128, compile=True),
        mae2("L/16", "self", 128, recompute="full"),
        mae2("L/16", "cross", 128),
        mae2("B/16", "linear", 512),
        mae3("B/8", "self", 96, 32),
        mae3("B/8", "cross", 96, 64, compile=True),
        mae3("L/8", "cross", 128, 16, recompute=keep("attention")),
        mae3("B/8", "linear", 96, 64, recompute="full"),
        mae3("L/8", "self", 128, 8),
        unetr(3, 96, 8),
        unetr(3, 96, 16, recompute="full"),
        unetr(2, 256, 96),
        dit("S/2", 256),
        dit("L/2", 64, compile=True),
        dit("L/2", 128, recompute=keep("attention")),
        dit("XL/2", 64, recompute="full", compile=True),
        dit("XL/2", 64),
        adaptive(2, 16, 256, 512, 64),
        adaptive(3, 4, 512, 64, 32),
        adaptive(2, 16, 256, 512, 128, recompute="full"),
        vit("L/16", 768, "fit vit", compile=True),
        vit("L/16", 1024, "fit vit", compile=True),
    ]


def _name(model: str, size: str, batch: int, options: dict[str, Any]) -> str:
    choice = options.get("recompute", "none")
    if isinstance(choice, dict):
        (key, value), *_ = choice.items()
        choice = f"{key} {', '.join(value) if isinstance(value, list) else value}"
    words = [] if choice == "none" else [f"recompute {choice}"]
    return ", ".join([f"{model} {size} x {batch}", *words, *(["compiled"] if options.get("compile") else [])])


def tiny_cells() -> list[Cell]:
    small: dict[str, Any] = {"width": 32, "depth": 2, "heads": 2, "patch": 4}
    tokens = {"kind": "adaptive", "length": 64, "score": {"kind": "gradient"}}
    cross = {"kind": "cross", "width": 16, "depth": 1, "heads": 1}
    mae3d = {"kind": "mae", "ndim": 3, "encoder": small, "decoder": cross}
    sap = {"kind": "sap", "encoder": {**small, "tokens": tokens}}
    return [
        Cell("vit", {"kind": "vit", "classes": 10, **small}, "classify", 16, 3, 8),
        Cell("vit, full", {"kind": "vit", "classes": 10, **small}, "classify", 16, 3, 8, recompute="full"),
        Cell("mae3d", mae3d, "reconstruct", 16, 1, 4),
        Cell("dit", {"kind": "dit", "classes": 10, **small}, "flow", 16, 4, 8),
        Cell("adaptive", sap, "segment", 32, 1, 4, classes=4),
    ]


# ---------------------------------------------------------------- measuring


def measure_cell(cell: Cell, steps: int) -> dict[str, Any]:
    """What `vitrail bench` finds; to run out of memory is a result."""
    from vitrail.bench.measure import measure

    clean()
    began = time.monotonic()
    try:
        found = measure(cell.tree(), mode="syn", windows=3, steps=steps, warm_up=4)
    except Exception as error:
        status = "oom" if is_out_of_memory(error) else "failed"
        return {"status": status, "error": " ".join(str(error).split())[:500]}
    finally:
        clean()
    return {
        "status": "ok",
        "step_seconds": found["step_seconds"],
        "allocated_gib": found["memory"]["allocated_gib"],
        "reserved_gib": found["memory"]["reserved_gib"],
        "retries": found["retries"],
        "mfu": found["mfu"],
        "parameters": found["parameters"],
        "date": found["date"],
        "seconds": round(time.monotonic() - began, 1),
    }


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def machine() -> dict[str, Any]:
    from vitrail.launch.machine import environment

    found = environment()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else found["cpu"]["model"]
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
    return {"device": name, "memory_gib": memory, "torch": torch.__version__, "python": found["python"]}


def refuse_mixing(kept: Mapping[str, Mapping[str, Any]], here: Mapping[str, Any], path: Path) -> None:
    """Every result that stays must be of this device and this PyTorch."""
    for name, one in kept.items():
        if any(one[key] != here[key] for key in SAME):
            words = ["{device} with PyTorch {torch}".format(**machine) for machine in (one, here)]
            raise SystemExit(
                f"{path}: {name!r} was measured on {words[0]}, and this is {words[1]}; give another --out, or remove it"
            )


def open_results(path: Path, rows: str) -> dict[str, Any]:
    """What is stored; results that do not tell their machine are of the one that the file names."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {rows: {}}
    for one in stored[rows].values():
        for key in SAME:
            one.setdefault(key, stored["machine"][key])
    return stored


def write_json(path: Path, tree: Any) -> None:
    write_whole(path, (json.dumps(tree, indent=1) + "\n").encode())


# ---------------------------------------------------------------- comparing


def predict(recipe: Any, cluster: Cluster, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plan, but for batches that a loader would hold on the device before their turn: nothing is loaded here."""
    from vitrail.cost.plan import Shares, plan, settle, works_of
    from vitrail.parallel.mesh import layout_of

    try:
        recipe = settle(load_recipe(recipe, overrides), cluster)
        found = plan(recipe, cluster=cluster, gpus=1, as_is=True)[0]
    except UserError as error:
        return {"error": str(error)}
    layout = layout_of(recipe.parallel, 1)
    shares = Shares.of(recipe, layout)
    waiting = works_of(recipe, layout, shares.micro)[0].raw * shares.passes * (recipe.data.prefetch + 1) / GIB
    names = ("step_seconds", "fits", "limited_by", "mfu", "memory", "time")
    return {name: getattr(found, name) for name in names} | {
        "memory_gib": found.memory_gib - waiting,
        "reserved_gib": found.reserved_gib - waiting * cluster.device.fragmentation,
        "waiting_gib": waiting,
    }


def compare(measured: dict[str, Any], predicted: dict[str, Any], memory_gib: float) -> dict[str, Any]:
    """Errors as shares of what was measured; whether `fits` was right."""
    if measured["status"] == "failed" or "error" in predicted:
        return {}
    fits = measured["status"] == "ok" and not measured["retries"] and measured["reserved_gib"] <= 0.95 * memory_gib
    found: dict[str, Any] = {"fits": fits, "fits_right": fits == predicted["fits"]}
    if measured["status"] == "ok":
        found["memory_error"] = predicted["memory_gib"] / measured["allocated_gib"] - 1
        found["reserved_error"] = predicted["reserved_gib"] / measured["reserved_gib"] - 1
        found["time_error"] = predicted["step_seconds"] / measured["step_seconds"]["median"] - 1
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst of the errors, whatever their sign."""
    found: dict[str, Any] = {"cells": len(rows)}
    for name in ("memory_error", "reserved_error", "time_error"):
        errors = [abs(row["compared"][name]) for row in rows if name in row["compared"]]
        if errors:
            found[name] = {"mean": statistics.fmean(errors), "worst": max(errors), "cells": len(errors)}
    found["fits_wrong"] = [row["cell"] for row in rows if row["compared"].get("fits_right") is False]
    return found


def page(result: dict[str, Any]) -> str:
    """The table, in Markdown."""
    told = result["summary"]
    days = sorted({row["measured"]["date"][:10] for row in result["rows"] if "date" in row["measured"]})
    lines = [
        "# The planner against measurement",
        "",
        f"{result['machine']['device']}, PyTorch {result['machine']['torch']}, {' and '.join(days)}; predictions with "
        f"cluster `{result['cluster']}`. Written by `python benchmarks/planner.py`.",
        "",
        "Memory is the peak that PyTorch allocated. Errors are of the prediction, as a share of the measurement. The "
        "batch is one that lies on the GPU already, so what `vitrail plan` counts for batches that wait is left out.",
        "",
        "The cluster file comes from `vitrail doctor --calibrate`, which measures products (in turn with kernels that "
        "move memory), attention, convolutions and kernels between them, and none of these models. What the planner "
        "tells apart (kernels by how they go through memory, attention by tiles, convolutions by channels) and that "
        "mixture were chosen after earlier sittings had shown where it missed; nothing was fitted to the table.",
        "",
        "| | mean | worst | cells |",
        "|---|---|---|---|",
    ]
    for name, words in (("memory_error", "memory"), ("reserved_error", "reserved memory"), ("time_error", "step time")):
        if name in told:
            one = told[name]
            lines.append(f"| {words} | {one['mean']:.1%} | {one['worst']:.1%} | {one['cells']} |")
    wrong = ", ".join(told["fits_wrong"]) or "none"
    lines += ["", f"Cells whose `fits` (at 95 % of memory) was wrong: {wrong}.", ""]
    lines += [
        "| configuration | GiB measured | planned | error | reserved | planned | fits | planned | s/step measured | "
        "planned | error | limited by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, result["rows"])]) + "\n"


def _line(row: dict[str, Any]) -> str:
    measured, predicted, compared = row["measured"], row["predicted"], row["compared"]
    if "error" in predicted:
        return f"| {row['cell']} | {measured['status']} | no plan: {predicted['error']} " + "| " * 9 + "|"
    words = {True: "yes", False: "no", None: "-"}
    fits = [words[compared.get("fits")], words[predicted["fits"]]]
    planned = (f"{predicted['memory_gib']:.2f}", f"{predicted['reserved_gib']:.2f}", f"{predicted['step_seconds']:.4f}")
    if measured["status"] != "ok":
        found = ["out of memory" if measured["status"] == "oom" else "failed", planned[0], "-", "-", planned[1], *fits]
        return "| " + " | ".join([row["cell"], *found, "-", planned[2], "-", predicted["limited_by"]]) + " |"
    values = [
        f"{measured['allocated_gib']:.2f}", planned[0], f"{compared['memory_error']:+.1%}",
        f"{measured['reserved_gib']:.2f}", planned[1], *fits,
        f"{measured['step_seconds']['median']:.4f}", planned[2], f"{compared['time_error']:+.1%}",
    ]  # fmt: skip
    return "| " + " | ".join([row["cell"], *values, predicted["limited_by"]]) + " |"


# ---------------------------------------------------------------- the whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no cell is begun")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names of cells")
    parser.add_argument("--again", action="store_true", help="measure again what has been measured")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--cluster", default=None, help="a name or a file; h200, or laptop with --quick")
    parser.add_argument("--steps", type=int, default=4, help="of a window; there are three")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--page", type=Path, default=None, help="benchmarks/planner.md, or in --out with --quick")
    parser.add_argument("--quick", action="store_true", help="small models on a CPU")
    parser.add_argument("--list", action="store_true", help="names of all cells")
    given = parser.parse_args(arguments)
    known = tiny_cells() if given.quick else cells()
    chosen = [cell for cell in known if not given.only or cell.name.startswith(tuple(given.only))]
    if given.list or not chosen:
        print("\n".join(cell.name for cell in known))
        return 0 if given.list else 2
    name = "planner_quick" if given.quick else "planner"
    path = given.out / f"{name}.json"
    page_path = given.page or (given.out / f"{name}.md" if given.quick else ROOT / "benchmarks/planner.md")
    stored = open_results(path, "measured")
    done: dict[str, Any] = stored["measured"]
    left = 0
    if given.predict:
        refuse_mixing(done, stored.get("machine", {}), path)
    else:
        here = machine()
        anew = {cell.name for cell in chosen} if given.again else set()
        refuse_mixing({name: one for name, one in done.items() if name not in anew}, here, path)
        stored["machine"] = here
        began = time.monotonic()
        for cell in chosen:
            if done.get(cell.name, {}).get("status") in ("ok", "oom") and not given.again:
                continue
            if time.monotonic() - began > 60 * given.minutes:
                left += 1
                continue
            done[cell.name] = measure_cell(cell, given.steps) | {key: here[key] for key in SAME}
            print(f"{cell.name}: {json.dumps(done[cell.name])}", flush=True)
            write_json(path, stored)  # after each cell: a call may be cut off
    cluster = load_cluster(given.cluster or ("laptop" if given.quick else "h200"))
    memory = stored.get("machine", {}).get("memory_gib") or cluster.device.memory_gib
    rows = []
    for cell in known:
        if cell.name in done:
            predicted = predict(cell.tree(), cluster)
            compared = compare(done[cell.name], predicted, memory)
            rows.append({"cell": cell.name, "measured": done[cell.name], "predicted": predicted, "compared": compared})
    result = stored | {"cluster": cluster.name, "summary": summary(rows), "rows": rows}
    write_json(path, result)
    write_whole(page_path, page(result).encode())
    print(json.dumps(result["summary"], indent=1))
    if left:
        print(f"{left} cells are left: run this again", file=sys.stderr)
    return STOPPED if left else 0


if __name__ == "__main__":
    sys.exit(main())
