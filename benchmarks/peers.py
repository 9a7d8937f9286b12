"""Our models beside other libraries' on one device, in one run: rates, spread, MFU and memory of training steps.

    python benchmarks/peers.py [--rows vit_l dit ...] [--seconds 560] [--out benchmarks/results]
    python benchmarks/peers.py --variants all --rows vit_l       our rows again, each time with one thing changed
    python benchmarks/peers.py --profile vit_l                   where the time of our step goes, kernel by kernel
    python benchmarks/peers.py --page                            writes peers.md from the results; needs no GPU
    python benchmarks/peers.py --tiny --out DIR                  small models on a CPU, to try it

Ours is the step that `vitrail train` takes, measured by `vitrail.bench` on one batch that lies on the device. Those
of the peers are in peers_models.py: compiled (or not, where the row says so), bf16 autocast over fp32 weights, fused
AdamW. Each side has batches to choose from, and shows its best. First every side of every row is measured with its
first batch, ours and the peers' in turns, then all with the second one, and so on: a call that is cut short has the
whole table.

Results are kept in results/peers.json; a call goes on where the last one stopped, tries again what has failed, and ends
with 75 if something is left after its seconds. A side that fails, or a package that is not installed, is a line of the
table and ends nothing. Rows that are marked "named" run only when --rows names them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from peers_models import Missing, Peer, huggingface_mae, monai_unetr, plain_dit, timm_vit
from peers_variants import VARIANTS, Variant, kernel_table, profile_of
from planner import Cell, clean, machine, mae, open_results, refuse_mixing, write_json

from vitrail.errors import is_out_of_memory
from vitrail.layers.flops import peak_tflops

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 75
GIB = 2**30
SAME = ("device", "torch")
OURS = "vitrail"
WINDOWS, WINDOW_SECONDS = 5, 1.0


@dataclass(frozen=True)
class Side:
    """One of those that are compared in a row."""

    name: str
    batches: tuple[int, ...]
    peer: Peer | None = None  # None: ours
    tree: Callable[[int], dict[str, Any]] | None = None  # our recipe for a batch


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    unit: str
    target: str
    sides: tuple[Side, ...]
    named: bool = False  # measured only where it is asked for: it takes long

    @property
    def ours(self) -> Side:
        return self.sides[0]


def recipe(cell: Cell, **more: Any) -> Callable[[int], dict[str, Any]]:
    """Return the recipe of a model for a batch, compiled where vitrail does so by itself."""

    def tree(batch: int) -> dict[str, Any]:
        found = replace(cell, batch=batch).tree() | more
        found["parallel"]["compile"] = "auto"
        return found

    return tree


def rows(tiny: bool) -> list[Row]:
    """The rows of the table; ours is the first side of each."""

    def row(
        name: str, title: str, unit: str, target: str, cell: Cell, batches: Sequence[int], *peers: Side, **more: Any
    ) -> Row:
        ours = Side(OURS, (cell.batch,) if tiny else tuple(batches), tree=recipe(cell, **more))
        return Row(name, title, unit, target, (ours, *(cut(peer) for peer in peers)))

    def cut(side: Side) -> Side:
        return replace(side, batches=(2,)) if tiny else side

    def peer(name: str, batches: Sequence[int], make: Any, *, compiled: bool = True) -> Side:
        return Side(name, tuple(batches), Peer(make, compiled and not tiny))

    side, small = (32 if tiny else 224), {"width": 32, "depth": 2, "heads": 2}

    def vit(size: str) -> Cell:
        model = {"kind": "vit", "classes": 1000, **({"patch": 16, **small} if tiny else {"size": size})}
        return Cell("", model, "classify", side, 3, 2, classes=1000)

    encoder = {"patch": 16, **small} if tiny else {"size": "L/16"}
    masked = mae(encoder, "self")
    if tiny:
        masked["decoder"] = {"kind": "self", "width": 16, "depth": 1, "heads": 1}
    autoencoder = Cell("", masked, {"kind": "reconstruct", "on": "hidden"}, side, 3, 2)
    transformer = {"patch": 2, **small} if tiny else {"size": "XL/2"}
    classes = 10 if tiny else 1000
    dit = Cell("", {"kind": "dit", "classes": classes, **transformer}, "flow", 8 if tiny else 32, 4, 2, classes=classes)
    voxels, parts = (32, 4) if tiny else (96, 14)
    tapped = {"patch": 16, **small, "depth": 4} if tiny else {"size": "B/16"}
    unetr = Cell("", {"kind": "unetr", "ndim": 3, "encoder": tapped}, "segment", voxels, 1, 2, classes=parts)
    return [
        row("vit_l", "ViT-L/16 at 224", "images/s", "1450", vit("L/16"), (512, 256, 128),
            peer("timm, compiled", (256, 512, 128), timm_vit("vit_large_patch16_224"))),
        row("vit_b", "ViT-B/16 at 224", "images/s", "4400", vit("B/16"), (1024, 512, 256),
            peer("timm, compiled", (512, 1024, 256), timm_vit("vit_base_patch16_224"))),
        row("mae_l", "MAE ViT-L/16, 75 % hidden", "images/s", "3700", autoencoder, (512, 1024, 256),
            peer("Hugging Face ViTMAE, compiled", (512, 1024, 256), huggingface_mae)),
        row("dit", "DiT-XL/2, 32x32x4, moving average", "images/s", "730", dit, (256, 128, 384),
            peer("plain DiT, compiled", (256, 128, 384), plain_dit), ema={"decay": 0.9999}),
        row("unetr", "UNETR 96^3, 14 classes", "volumes/s", "275", unetr, (16, 32, 8),
            peer("MONAI, compiled", (16, 32, 8), monai_unetr),
            peer("MONAI, eager", (16, 32, 8), monai_unetr, compiled=False)),
        *adaptive_rows(tiny),
        *volume_rows(tiny),
    ]  # fmt: skip


def adaptive_rows(tiny: bool) -> list[Row]:
    """Trees beside uniform patches of the size of their smallest leaf; both are ours."""
    crop, patch, length = (64, 4, 64) if tiny else (4096, 16, 4096)
    size: dict[str, Any] = {"width": 32, "depth": 4, "heads": 2, "patch": patch} if tiny else {"size": f"B/{patch}"}

    def side(name: str, tokens: dict[str, Any] | None, batches: tuple[int, ...]) -> Side:
        encoder = size | ({} if tokens is None else {"tokens": tokens})
        cell = Cell("", {"kind": "sap", "encoder": encoder}, "segment", crop, 1, 1, classes=4)
        return Side(name, (1,) if tiny else batches, tree=recipe(cell))

    tree = {"kind": "adaptive", "length": length, "score": {"kind": "gradient"}}
    sides = (side(f"{OURS}, {length} leaves", tree, (4, 8)), side(f"{OURS}, uniform patches", None, (1,)))
    return [Row("adaptive", "ViT-B segmentation at 4096^2", "images/s", "6.9 times", sides, named=True)]


def volume_rows(tiny: bool) -> list[Row]:
    """The 2-billion-parameter 3-D autoencoder on a batch that lies on the device; mae3d_2b.py reads a real Zarr."""
    if tiny:
        return []
    import yaml

    told: dict[str, Any] = yaml.safe_load((ROOT / "configs/mae3d/2b.yaml").read_text())
    objective = {"kind": "reconstruct", "target": "raw", "on": "hidden"}

    def row(name: str, title: str, target: str, **changes: Any) -> Row:
        model = json.loads(json.dumps(told["model"]))
        model["decoder"] |= changes.get("decoder", {})
        model["mask"]["ratio"] = changes.get("ratio", 0.95)
        cell = Cell("", model, objective, 512, 1, 1, recompute=changes.get("recompute", "none"))
        return Row(name, title, "volumes/s", target, (Side(OURS, (1,), tree=recipe(cell)),), named=True)

    alone = {"kind": "self"}
    return [
        row("mae3d_quarter", "2B 3-D MAE, a quarter decoded", "2.22 (0.45 s)"),
        row("mae3d_all", "2B 3-D MAE, all decoded", "1.61 (0.62 s)", decoder={"decode_ratio": 1.0}),
        row("mae3d_self", "2B 3-D MAE, self-attention decoder", "0.233 (4.3 s)", decoder=alone),
        row("mae3d_full", "2B 3-D MAE, 1 % hidden", "0.0105 (95 s)", ratio=0.01, recompute={"keep": ["attention"]}),
    ]


# ---------------------------------------------------------------- measuring


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured, or why nothing was."""
    clean()
    began = time.monotonic()
    try:
        found = {"status": "ok"} | work()
    except Missing as error:
        found = {"status": "missing", "error": str(error)}
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        found = {"status": "oom" if is_out_of_memory(error) else "failed", "error": words[:500]}
    finally:
        clean()
    found["seconds"] = round(time.monotonic() - began, 1)
    return found | {"date": datetime.now(UTC).isoformat(timespec="seconds")}


def measure_ours(tree: dict[str, Any], variant: Variant, given: argparse.Namespace) -> dict[str, Any]:
    from vitrail.bench.measure import measure

    counts = {"windows": given.windows, "steps": given.steps, "warm_up": 2 if given.tiny else None}
    if given.short:
        counts |= {"windows": 1, "steps": 1, "warm_up": 1}
    with variant.applied():
        found = measure(tree, [*variant.overrides], mode="syn", **counts)
    return {
        "rate": found["samples_per_s"],
        "step_seconds": found["step_seconds"],
        "windows": found["windows"],
        "tflops": found["tflops"],
        "flops_each": 1e12 * found["tflops"] / found["samples_per_s"],
        "mfu": found.get("mfu"),
        "hfu": found.get("hfu"),
        "gib": found["memory"]["allocated_gib"],
        "reserved_gib": found["memory"]["reserved_gib"],
        "split": found["split"],
        "loss": found["loss"],
        "notes": found["notes"],
        "parameters": found["parameters"],
    }


def measure_peer(peer: Peer, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """As ours: warm-up until steps are steady, then windows; the host waits for the device at their ends alone."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    step = peer.make(batch, device, peer.compiled, given.tiny)

    def take(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        for _ in range(number):
            loss = step()
        told = float(loss)  # waits
        return (time.perf_counter() - began) / number, told

    take(1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    latest: list[float] = []
    for _ in range(2 if given.tiny else 20):
        latest.append(take(1)[0])
        if len(latest) >= 3 and max(latest[-3:]) <= 1.1 * min(latest[-3:]):
            break
    number = given.steps or min(50, max(2, round(WINDOW_SECONDS / max(latest[-1], 1e-6))))
    pairs = [take(number) for _ in range(given.windows)]
    windows = [seconds for seconds, _ in pairs]
    middle = statistics.median(windows)
    return {
        "rate": batch / middle,
        "step_seconds": {"median": middle, "low": min(windows), "high": max(windows)},
        "windows": windows,
        "gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if on_gpu else None,
        "loss": pairs[-1][1],
    }


Job = tuple[str, Row, Side, int, Variant]


def jobs(chosen: Sequence[Row], most: int | None) -> Iterator[Job]:
    """Yield what is to be measured, by name: the first batch of all sides of all rows, then the second one."""
    for place in range(max(len(side.batches) for row in chosen for side in row.sides)):
        for row in chosen:
            for side in row.sides:
                if place < len(side.batches) and (most is None or place < most):
                    batch = side.batches[place]
                    yield f"{row.name}/{side.name}/{batch}", row, side, batch, VARIANTS["as it is"]


def variant_jobs(chosen: Sequence[Row], names: Sequence[str], done: dict[str, Any]) -> Iterator[Job]:
    """Yield our side of the rows with each variant, at the batch that was best, between two runs without any."""
    for row in chosen:
        batch = best(done, row, row.ours)[0] or row.ours.batches[0]
        for name in ("as it is", *names, "as it is, again"):
            variant = VARIANTS[name] if name in VARIANTS else VARIANTS["as it is"]
            if not variant.rows or row.name in variant.rows:
                number = variant.batch or batch
                yield f"{row.name}/variant: {name}/{number}", row, row.ours, number, variant


def best(done: dict[str, Any], row: Row, side: Side) -> tuple[int | None, dict[str, Any] | None]:
    """Return the batch with the highest rate of a side, and what was found; without one, any result."""
    found = {batch: done.get(f"{row.name}/{side.name}/{batch}") for batch in side.batches}
    well = {batch: one for batch, one in found.items() if one is not None and one["status"] == "ok"}
    if well:
        batch = max(well, key=lambda each: well[each]["rate"])
        return batch, well[batch]
    return None, next((one for one in found.values() if one is not None), None)


def measure_all(todo: list[Job], path: Path, stored: dict[str, Any], given: argparse.Namespace) -> int:
    """Measure what is not known yet; return how much is left."""
    done, here, began, left = stored["measured"], machine(), time.monotonic(), 0
    anew = {name for name, *_ in todo} if given.again else set()
    refuse_mixing({name: one for name, one in done.items() if name not in anew}, here, path)
    stored["machine"] = here | versions()
    for name, _, side, batch, variant in todo:
        if not given.again and done.get(name, {}).get("status") in ("ok", "oom", "missing"):
            continue
        if time.monotonic() - began > given.seconds:
            left += 1
            continue
        if side.peer is not None:
            peer = side.peer
            found = guarded(lambda peer=peer, batch=batch: measure_peer(peer, batch, given))  # type: ignore[misc]
        else:
            assert side.tree is not None
            tree = side.tree(batch)
            found = guarded(lambda tree=tree, variant=variant: measure_ours(tree, variant, given))  # type: ignore[misc]
        done[name] = found | {key: here[key] for key in SAME}
        print(f"{name}: {told(found)}", flush=True)
        write_json(path, stored)  # after each: a call may be cut off
    return left


def told(found: dict[str, Any]) -> str:
    if found["status"] != "ok":
        return f"{found['status']}: {found.get('error', '')} ({found['seconds']} s)"
    times = found["step_seconds"]
    spread = 1e3 * times["low"], 1e3 * times["high"]
    mfu = "" if found.get("mfu") is None else f", MFU {found['mfu']:.1%}"
    gib = "" if found["gib"] is None else f", {found['gib']:.1f} GiB"
    return (
        f"{found['rate']:.2f} a second, {1e3 * times['median']:.2f} ms ({spread[0]:.2f}-{spread[1]:.2f}){mfu}{gib}, "
        f"loss {found['loss']:.4g} ({found['seconds']} s)"
    )


def versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda}
    for name in ("triton", "timm", "transformers", "monai"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


# ---------------------------------------------------------------- the page


def page(stored: dict[str, Any], known: Sequence[Row]) -> str:
    """The tables, in Markdown."""
    done, here = stored["measured"], stored["machine"]
    names = ("cuda", "cudnn", "triton", "timm", "transformers", "monai")
    packages = ", ".join(f"{name} {here[name]}" for name in names if here.get(name))
    days = sorted({one["date"][:10] for one in done.values()})
    lines = [
        "# Beside other libraries", "",
        f"{here['device']}, PyTorch {here['torch']}, {packages}; {' and '.join(days)}. Written by "
        "`python benchmarks/peers.py --page`.", "",
        "Training steps on data that lies on the device: forward, backward, AdamW and, for DiT, the moving average. "
        "bf16 with fp32 weights; each side with the batch that suits it best. Medians over windows of about a second, "
        "after warm-up; in brackets the range of the windows, or of their middle half. MFU counts the FLOPs of our "
        "model for both sides (timm's ViT has a class token more, which is not counted). Our step clips gradients and "
        "looks at the loss after each step, the peers' do not.", "",
        "| model | side | batch | rate | ms a step | MFU | peak GiB | ours / peer | target |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in known:
        found = [(side, *best(done, row, side)) for side in row.sides]
        if not any(one for _, _, one in found):
            continue
        ours = found[0][2]
        each = None if ours is None else ours.get("flops_each")
        for place, (side, batch, one) in enumerate(found):
            title, target, first = ("", "", ours) if place else (row.title, row.target, None)
            lines.append(f"| {title} | {side.name} | {_line(row, batch, one, first, each)} {target} |")
    told = [line for row in known for line in _variant_lines(row, done)]
    if told:
        lines += [
            "", "## Ours, with one thing changed", "",
            "What each is: `benchmarks/peers_variants.py`. Faster or slower is against the mean of the runs as it is, "
            "before and after.", "",
            "| model | variant | batch | rate | ms a step | MFU | peak GiB | against as it is |",
            "|---|---|---|---|---|---|---|---|", *told,
        ]  # fmt: skip
    for name, one in stored.get("profiles", {}).items():
        lines += ["", f"## Where the step of {name} goes", "", *kernel_table(one)]
    return "\n".join(lines) + "\n"


def _line(
    row: Row, batch: int | None, one: dict[str, Any] | None, ours: dict[str, Any] | None, each: float | None
) -> str:
    if one is None:
        return "- | not measured | | | | |"
    if one["status"] != "ok":
        words = {"missing": "not installed", "oom": "out of memory"}.get(one["status"], one["error"][:80])
        return f"- | {words.replace('|', '/')} | | | | |"
    times = one["step_seconds"]
    low, middle, high = (1e3 * times[key] for key in ("low", "median", "high"))
    peak = peak_tflops(one["device"])
    mfu = "" if each is None or peak is None else f"{one['rate'] * each / 1e12 / peak:.1%}"
    gib = "" if one["gib"] is None else f"{one['gib']:.1f}"
    ratio = f"{ours['rate'] / one['rate']:.2f}" if ours is not None and ours["status"] == "ok" else ""
    return f"{batch} | {one['rate']:,.4g} {row.unit} | {middle:.2f} ({low:.2f}-{high:.2f}) | {mfu} | {gib} | {ratio} |"


def _variant_lines(row: Row, done: dict[str, Any]) -> list[str]:
    prefix = f"{row.name}/variant: "
    found = {name.removeprefix(prefix): one for name, one in done.items() if name.startswith(prefix)}
    plain = [one["rate"] for name, one in found.items() if name.startswith("as it is") and one["status"] == "ok"]
    lines = []
    for name, one in found.items():
        variant, _, batch = name.rpartition("/")
        ratio = ""
        if plain and one["status"] == "ok":
            ratio = f"{one['rate'] / statistics.fmean(plain):.3f}"
        words = _line(row, int(batch), one, None, one.get("flops_each")).removesuffix("|").rstrip().removesuffix("|")
        lines.append(f"| {row.title} | {variant} | {words}| {ratio} |")
    return lines


# ---------------------------------------------------------------- the whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=None, help="names of rows; all but those that take long")
    parser.add_argument("--seconds", type=float, default=560.0, help="after which nothing is begun")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--steps", type=int, default=None, help="of a window; as many as take a second")
    parser.add_argument("--short", action="store_true", help="ours: one step after one of warm-up, for very long ones")
    parser.add_argument("--most", type=int, default=None, help="so many batches of each side")
    parser.add_argument("--variants", nargs="*", default=None, help="names, or all: ours with one thing changed")
    parser.add_argument("--profile", default=None, metavar="ROW", help="where our step goes, kernel by kernel")
    parser.add_argument("--with", dest="under", default="as it is", help="the variant that --profile looks at")
    parser.add_argument("--again", action="store_true", help="measure again what has been measured")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--tiny", action="store_true", help="small models, uncompiled, to try it on a CPU")
    parser.add_argument("--list", action="store_true", help="names of rows and variants")
    given = parser.parse_args(arguments)
    known = rows(given.tiny)
    if given.list:
        print("\n".join([*(f"{row.name}: {row.title}" for row in known), *(f"variant {name}" for name in VARIANTS)]))
        return 0
    names = [row.name for row in known]
    for wrong in {*(given.rows or ()), *filter(None, [given.profile])} - set(names):
        parser.error(f"{wrong!r} is no row; they are {', '.join(names)}")
    chosen = [row for row in known if (not row.named if given.rows is None else row.name in given.rows)]
    wanted = [] if given.variants is None else list(VARIANTS)[1:] if given.variants == ["all"] else given.variants
    for wrong in {*wanted, given.under} - set(VARIANTS):
        parser.error(f"{wrong!r} is no variant; they are {', '.join(VARIANTS)}")
    stem = "peers_tiny" if given.tiny else "peers"
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{stem}.json"
    if given.page:
        target = given.out / f"{stem}.md" if given.tiny else ROOT / "benchmarks/peers.md"
        target.write_text(page(json.loads(path.read_text()), known))
        return 0
    stored = open_results(path, "measured")
    left = 0
    if given.profile is not None:
        row = next(row for row in known if row.name == given.profile)
        assert row.ours.tree is not None
        batch = best(stored["measured"], row, row.ours)[0] or row.ours.batches[0]
        clean()
        with VARIANTS[given.under].applied():
            found = profile_of(row.ours.tree(batch), [*VARIANTS[given.under].overrides])
        label = row.name if given.under == "as it is" else f"{row.name}, {given.under}"
        stored.setdefault("profiles", {})[f"{label}, batch {batch}"] = found
        stored.setdefault("machine", machine() | versions())
        write_json(path, stored)
        print("\n".join(kernel_table(found, most=40)))
        return 0
    if given.variants is None:
        todo = list(jobs(chosen, given.most))
    else:
        todo = list(variant_jobs(chosen, wanted, stored["measured"]))
    left = measure_all(todo, path, stored, given)
    print(page(stored, known))
    if left:
        print(f"{left} are left: run this again", file=sys.stderr)
    return STOPPED if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
