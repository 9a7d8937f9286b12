"""Long runs that must not grow: a training of hours, a log of a million lines, a hundred thousand files.

    python benchmarks/soak.py train [--hours 2] [--steps 100000] [--work DIR]
    python benchmarks/soak.py report [--lines 1000000]
    python benchmarks/soak.py files [--number 100000]
    python benchmarks/soak.py page

`train` starts `vitrail train` on a tiny recipe that uses everything a run has (reading threads, validation, pictures,
checkpoints in the background, moving average, TensorBoard), and looks at it from outside every 15 s: memory, threads
and descriptors of the whole tree of processes. It ends when both the hours and the steps are done. The first tenth of
the steps is warm-up; of the rest, the medians of the first and the last fifth and a Theil-Sen line give the growth.
`report` makes a run's log of so many lines and writes its report. `files` makes a folder of so many images, indexes it,
and reads one after another. Each replaces its own part of results/soak.json; `page` writes soak.md from all of it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/soak.json"
MIB = 2**20
BYTES = ("rss", "anonymous")
WARM_UP = 0.1
KEPT = 160  # samples in the committed file
# Growth from the first fifth to the last that counts as none: allocators move by a few MiB with the load.
FREE_BYTES, FREE_SHARE = 8 * MIB, 0.02


# ---------------------------------------------------------------- a training


def tiny(volume: Path, run_dir: Path) -> dict[str, Any]:
    """Milliseconds a step, and everything around the steps often."""
    return {
        "run": {"name": "soak", "dir": str(run_dir), "seed": 3, "steps": 10**8, "device": "cpu"},
        "model": {
            "kind": "mae",
            "ndim": 3,
            "encoder": {"width": 16, "depth": 1, "heads": 2, "patch": 4, "positions": "rope"},
            "decoder": {"kind": "cross", "width": 12, "depth": 1, "heads": 2},
        },
        "data": {
            "train": [{"path": str(volume), "region": {"x": [0, 0.6]}}],
            "valid": [{"path": str(volume), "region": {"x": [0.6, 1]}}],
            "crop": 8,
            "batch": 2,
            "workers": 2,
            "cache_mib": 1,  # less than the volume, so that chunks are read all the time
            "augment": {"orientations": True},
        },
        "optimizer": {"kind": "adamw", "lr": 1e-4},
        "schedule": {"kind": "constant", "warmup": 100},
        "ema": {"decay": 0.999},
        "checkpoint": {"every": 2000},
        "eval": {"every": 1000, "samples": 8},
        "log": {"every": 50, "pictures": 5000},
    }


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def look(pid: int) -> dict[str, Any]:
    """What a tree of processes holds now: bytes by kind, threads, descriptors, seconds of CPU."""
    total = {"rss": 0, "anonymous": 0, "pss": 0, "uss": 0, "threads": 0, "descriptors": 0, "processes": 0, "cpu": 0.0}
    for each in family(pid):
        place = Path("/proc", str(each))
        try:
            sizes = {
                name: int(value.split()[0]) * 1024
                for name, _, value in (line.partition(":") for line in (place / "smaps_rollup").open())
                if value.strip().endswith("kB")
            }
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            descriptors = len(os.listdir(place / "fd"))
        except (OSError, IndexError):  # it has just ended
            continue
        total["rss"] += sizes["Rss"]
        total["anonymous"] += sizes["Anonymous"]  # without files: neighbours that map the same libraries do not show
        total["pss"] += sizes["Pss"]
        total["uss"] += sizes["Private_Clean"] + sizes["Private_Dirty"]
        total["threads"] += int(fields[17])
        total["cpu"] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        total["descriptors"] += descriptors
        total["processes"] += 1
    return total


def folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # a draft that has just got its name
                continue
    return total


def last_step(run_dir: Path) -> int:
    """The step in the last whole line of a log."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def train(hours: float, steps: int, work: Path, *, every: float) -> dict[str, Any]:
    """Train until both are done; the samples are also written to samples.jsonl as they come."""
    work.mkdir(parents=True, exist_ok=True)
    volume, run_dir = work / "volume.zarr", work / "run"
    if not volume.exists():
        _vitrail("data", "generate", volume, "--shape", "96,128,192", "--chunk", "16", "--levels", "1")
    recipe = work / "recipe.yaml"
    recipe.write_text(json.dumps(tiny(volume, run_dir)))
    samples: list[dict[str, Any]] = []
    output = work / "output.txt"
    with output.open("w") as told, (work / "samples.jsonl").open("w") as file:
        began = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-m", "vitrail", "train", str(recipe)],
            stdout=told,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                time.sleep(every)
                if child.poll() is not None:
                    raise SystemExit(f"the training ended with {child.returncode}: {output.read_text()[-3000:]}")
                sample = {"seconds": round(time.monotonic() - began, 1), "step": last_step(run_dir), **look(child.pid)}
                sample["folder"] = folder_bytes(run_dir)
                samples.append(sample)
                file.write(json.dumps(sample) + "\n")
                file.flush()
                if sample["seconds"] >= hours * 3600 and sample["step"] >= steps:
                    break
            child.send_signal(signal.SIGTERM)  # it saves and stops
            code = child.wait(timeout=600)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return {"samples": samples, "code": code, "recipe": json.loads(recipe.read_text())}


def _vitrail(*words: Any) -> None:
    subprocess.run([sys.executable, "-m", "vitrail", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------- a long log


def long_log(run: Path, lines: int) -> None:
    """A run folder whose log has so many lines: sessions that were cut and repeat steps, and all that a run logs."""
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(json.dumps(tiny(Path("volume.zarr"), run)))
    draw = np.random.default_rng(0)
    sessions, written, step, moment = 20, 0, 0, 1.7e9
    with (run / "metrics.jsonl").open("w") as file:

        def write(event: str, **fields: Any) -> None:
            nonlocal written, moment
            moment += 0.01
            file.write(json.dumps({"event": event, "time": moment, **fields}) + "\n")
            written += 1

        for session in range(sessions):
            write("start", step=step, steps=10**8, resumed=session > 0, world=1, device="CPU", parameters=7308,
                  tokens_per_sample=8, samples_per_epoch=1344, best_metric="mse_over_variance", notes=[],
                  flops_per_sample={"model": 136896.0, "hardware": 137312.0})  # fmt: skip
            while written < lines * (session + 1) // sessions - 1:
                step += 1
                loss = 1 / (1 + step / 1e5) + 0.1 * float(draw.random())
                write("train", step=step, samples=2 * step, loss=loss, lr=1e-4, grad_norm=3 * loss, skipped=0,
                      memory_gib=0.4, step_seconds=0.01 * (1 + loss), samples_per_s=200 / (1 + loss), tokens_per_s=1e3,
                      tflops=1.7e-5, mfu=None, hfu=None, data_wait=3e-5)  # fmt: skip
                if step % 50 == 0:
                    metrics = {"loss": loss, "mse": 900 * loss, "variance": 928.0, "mse_over_variance": 0.97 * loss}
                    write("eval", step=step, weights="ema", metrics=metrics, samples=8)
                if step % 100 == 0:
                    path = f"checkpoints/step-{step:08d}"
                    write("checkpoint", step=step, path=path, seconds=0.1, bytes=200_000)
                if step % 1000 == 0:
                    write("picture", step=step, path=f"pictures/reconstruct-{step:08d}.png", caption=f"step {step}")
                    write("skip", step=step, reason="loss is not finite", counters=[step, step + 1])
            if session % 2:
                write("end", step=step, reason="signal", seconds=500.0, message="")
            else:
                file.write('{"event": "train", "time": 17')  # a kill tore the line
                step -= 500


def report(lines: int, work: Path) -> dict[str, Any]:
    """Time, largest memory and size of the page of a long log; of an empty one beside it, what Python itself takes."""
    found: dict[str, Any] = {}
    for name, number in (("short", 1000), ("long", lines)):
        run = work / name
        long_log(run, number)
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "vitrail", "report", str(run)], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        found[name] = {
            "lines": sum(1 for _ in (run / "metrics.jsonl").open("rb")),
            "log_bytes": (run / "metrics.jsonl").stat().st_size,
            "code": child.returncode,
            "seconds": round(time.monotonic() - began, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "peak_bytes": usage.ru_maxrss * 1024,
            "page_bytes": (run / "report.html").stat().st_size if child.returncode == 0 else None,
        }
    return found


# ---------------------------------------------------------------- many files


def files(number: int, work: Path) -> dict[str, Any]:
    """Index a folder of images, once anew and once from the cache, and read each; looked at 100 times meanwhile."""
    from PIL import Image

    from vitrail.data.sources.image_folder import ImageFolderConfig

    os.environ["VITRAIL_CACHE"] = str(work / "cache")
    draw, different = np.random.default_rng(0), min(number, 1000)
    for index in range(number):  # so many names; of the contents only some are different, which nobody reading can see
        path = work / "images" / f"class-{index % 10}" / f"{index:07d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if index < different:
            Image.fromarray(draw.integers(0, 256, (16, 16 + index % 5, 3), dtype=np.uint8)).save(path)
        else:
            copied = index % different
            os.link(path.parent.parent / f"class-{copied % 10}" / f"{copied:07d}.png", path)
    times: dict[str, float] = {}
    config = ImageFolderConfig(path=str(work / "images"))
    samples: list[dict[str, Any]] = []
    for what in ("index", "index again", "read"):
        began, spent = time.monotonic(), time.process_time()
        if what != "read":
            source = config.open()
            total = sum(item.shape[1] for item in source.items)  # of all at once, as a training asks
        else:
            for index in range(len(source.items)):
                source.read(index, (slice(None), slice(None)))
                if index % (number // 100) == 0:
                    samples.append({"seconds": round(time.monotonic() - began, 2), "step": index, **look(os.getpid())})
        times[what] = round(time.monotonic() - began, 2)
        times[f"{what}, cpu"] = round(time.process_time() - spent, 2)
    assert total == sum(16 + index % different % 5 for index in range(number))
    return {"files": len(source.items), "seconds": times, **judge(samples), "samples": samples}


# ---------------------------------------------------------------- growth


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median of the slopes of all pairs of points."""
    i, j = np.triu_indices(len(x), 1)
    apart = x[j] != x[i]
    return float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))


def growth(samples: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Medians of the first and the last fifth of the steps after warm-up, and how far the line rises over them.

    By steps, not by time: on a machine that others use, a training may stand still for a while.
    """
    steps = np.array([s["step"] for s in samples], dtype=float)
    values = np.array([s[key] for s in samples], dtype=float)
    warm = steps >= WARM_UP * steps[-1]
    steps, values = steps[warm], values[warm]
    fifth = (steps[-1] - steps[0]) / 5
    return {
        "first": float(np.median(values[steps <= steps[0] + fifth])),
        "last": float(np.median(values[steps >= steps[-1] - fifth])),
        "line": theil_sen(steps, values) * float(steps[-1] - steps[0]),
        "most": float(values.max()),
    }


def judge(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth by what was looked at, and what grew more than it may."""
    found = {key: growth(samples, key) for key in (*BYTES, "threads", "descriptors")}
    grew = []
    for key, each in found.items():
        more = max(each["last"] - each["first"], each["line"])
        if more > (max(FREE_BYTES, FREE_SHARE * each["first"]) if key in BYTES else 0):
            grew.append(key)
    return {"growth": found, "grew": grew}


def thin(samples: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index in np.unique(np.linspace(0, len(samples) - 1, KEPT).astype(int)):
        yield samples[index]


def store(part: str, found: dict[str, Any], out: Path) -> None:
    """Replace one part of the results."""
    from vitrail.launch.machine import environment

    results = json.loads(out.read_text()) if out.exists() else {}
    machine = {key: value for key, value in environment().items() if key not in ("host", "command")}
    results[part] = {"environment": machine, **found}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


# ---------------------------------------------------------------- the page


def write_page(results: Path) -> None:
    """soak.md and its picture, from the numbers."""
    found = json.loads(results.read_text())
    plot(found["train"]["samples"], results.with_suffix(".png"))
    (results.parent.parent / "soak.md").write_text(PAGE.format(**_words(found)))


PAGE = """# Long runs

What must not grow: memory, threads and descriptors of a training of hours; memory and page of a report on a million
lines; memory and descriptors while a hundred thousand files are read.

    python benchmarks/soak.py train
    python benchmarks/soak.py report
    python benchmarks/soak.py files
    python benchmarks/soak.py page

{machine}

## A training

{trained}, looked at from outside every 15 s. A tiny masked autoencoder on chunks of an OME-Zarr,
with two reading threads and less cache than data, validation every 1,000 steps, checkpoints every 2,000 (in the
background, old ones removed), pictures every 5,000, a log line every 50, a moving average and TensorBoard. Of its
steps the first tenth is warm-up; of the rest, medians of the first and the last fifth, and how far a Theil-Sen line
rises over them. Other work had the cores for much of the time, in the end almost all of it.

| | first fifth | last fifth | line | most |
|---|---|---|---|---|
{training}

{judged}

![memory, threads and descriptors](results/soak.png)

## A log of a million lines

`vitrail report` in a process of its own: seconds of CPU, most memory (with Python and its libraries), size of the page.
Of a log with more than 50,000 lines, the lines with the smallest and the largest loss of every stretch are taken, and
the first and last of each session; tables show the newest 200 rows.

| lines | log | CPU s | memory | page |
|---|---|---|---|---|
{reports}

## A hundred thousand files

{number:,} PNG files in a folder for each of ten classes: indexed (sizes from their headers), indexed again (from the
cache), and read one after another in one process.

| | CPU s | s |
|---|---|---|
{timed}

| while reading | first fifth | last fifth | line | most |
|---|---|---|---|---|
{reading}

Raw numbers: [results/soak.json](results/soak.json).
"""


def _words(found: dict[str, Any]) -> dict[str, Any]:
    train, reports, files = found["train"], found["report"], found["files"]
    machine, last = train["environment"], train["samples"][-1]
    return {
        "machine": f"{machine['cpu']['model']}, {machine['cpu']['cores']} cores shared with other work, PyTorch "
        f"{machine['packages']['torch']}, Python {machine['python']}, {machine['date'][:10]}.",
        "trained": f"{last['step']:,} steps in {last['seconds'] / 3600:.2f} hours",
        "training": _growth_rows(train["growth"]),
        "judged": "Nothing grew by more than 8 MiB or 2 %." if not train["grew"] else f"Grew: {train['grew']}.",
        "reports": "\n".join(
            f"| {r['lines']:,} | {r['log_bytes'] / MIB:.1f} MiB | {r['cpu_seconds']:.1f} | "
            f"{r['peak_bytes'] / MIB:.0f} MiB | {r['page_bytes'] / MIB:.2f} MiB |"
            for r in (reports["short"], reports["long"])
        ),
        "number": files["files"],
        "timed": "\n".join(
            f"| {name} | {files['seconds'][f'{name}, cpu']} | {files['seconds'][name]} |"
            for name in ("index", "index again", "read")
        ),
        "reading": _growth_rows(files["growth"]),
    }


def _growth_rows(growth: dict[str, dict[str, float]]) -> str:
    def show(key: str, value: float) -> str:
        return f"{value / MIB:.1f} MiB" if key in BYTES else f"{value:.0f}"

    names = {"rss": "memory (RSS)", "anonymous": "memory without mapped files"}
    return "\n".join(
        f"| {names.get(key, key)} | " + " | ".join(show(key, each[k]) for k in ("first", "last", "line", "most")) + " |"
        for key, each in growth.items()
    )


def plot(samples: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    hours = [s["seconds"] / 3600 for s in samples]
    figure, axes = plt.subplots(1, 3, figsize=(10, 2.8), layout="constrained")
    axes[0].plot(hours, [s["rss"] / MIB for s in samples], label="RSS")
    axes[0].plot(hours, [s["anonymous"] / MIB for s in samples], label="without mapped files")
    axes[0].set(title="memory, MiB", ylim=(0, None))
    axes[1].plot(hours, [s["threads"] for s in samples], label="threads")
    axes[1].plot(hours, [s["descriptors"] for s in samples], label="descriptors")
    axes[1].set(title="threads and descriptors", ylim=(0, None))
    axes[2].plot(hours, [s["step"] / 1000 for s in samples])
    axes[2].set(title="thousand steps", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("hours")
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers go")
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("train")
    part.add_argument("--hours", type=float, default=2.0)
    part.add_argument("--steps", type=int, default=100_000)
    part.add_argument("--every", type=float, default=15.0, help="seconds between two looks")
    part.add_argument("--work", type=Path, help="an empty folder, which is kept; a temporary one if not given")
    part = parts.add_parser("report")
    part.add_argument("--lines", type=int, default=10**6)
    part.add_argument("--work", type=Path)
    part = parts.add_parser("files")
    part.add_argument("--number", type=int, default=10**5)
    part.add_argument("--work", type=Path)
    parts.add_parser("page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = getattr(arguments, "work", None) or Path(folder)
        if arguments.part == "train":
            found = train(arguments.hours, arguments.steps, work, every=arguments.every)
            found = {
                **judge(found["samples"]),
                **found,
                "looks": len(found["samples"]),
                "samples": list(thin(found["samples"])),
            }
            print(json.dumps({key: found[key] for key in ("growth", "grew", "code")}, indent=1))
        elif arguments.part == "report":
            found = report(arguments.lines, work)
            print(json.dumps(found, indent=1))
        elif arguments.part == "files":
            found = files(arguments.number, work)
            print(json.dumps({key: found[key] for key in ("files", "seconds", "growth", "grew")}, indent=1))
        else:
            write_page(arguments.out)
        if arguments.part != "page":
            store(arguments.part, found, arguments.out)


if __name__ == "__main__":
    main()
