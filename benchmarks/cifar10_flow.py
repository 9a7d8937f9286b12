"""Class-conditional rectified flow on CIFAR-10, from the files to the numbers, within a time that is given.

    python benchmarks/cifar10_flow.py --data data/cifar10 [--minutes 9.5] [--size S/2] [--out benchmarks/results]

A classifier (configs/cifar10/classifier.yaml) and a DiT (configs/cifar10/dit.yaml) are trained, each for so many
minutes; how many steps that is follows from the speed of their first minute. Then samples are made at several guidances
and compared with the test images. A call that runs out of --minutes, wherever that is, exits with 75, and the same call
again goes on: all that is kept lies in --home. Results: cifar10_flow.json, cifar10_flow_loss.png, and a grid of samples
for each guidance.

--data holds train.parquet and test.parquet, or what `--pack FILE` has made of them for a machine without pyarrow.
--quick is a try of the whole on a CPU, with tiny models; without --data on images of noise.
"""

import argparse
import datetime
import io
import json
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.infer.quality import quality
from vitrail.launch.machine import environment
from vitrail.recipe.load import find_recipe

ROOT = Path(__file__).resolve().parent.parent
PACK = "cifar10.npz"
FIRST = 75.0  # seconds of the sitting that tells the speed
KEPT_BACK = 0.95  # of the time, for validation, pictures and checkpoints
AGAIN = 75
BEFORE = 40.0  # seconds that have to be left for samples to be begun, or to be measured
QUICK_CLASSIFIER = ["model.width=32", "model.depth=1", "model.heads=2", "data.batch=16", "eval.samples=32"]
QUICK_DIT = ["model.size=null", "model.width=32", "model.depth=1", "model.heads=2", "model.patch=4", "data.batch=16",
             "eval.samples=16", "objective.sampling.steps=2"]  # fmt: skip


# ---------------------------------------------------------------- data


def read_images(data: Path, part: str) -> tuple[list[bytes], np.ndarray]:
    """Encoded images and their classes."""
    if (data / PACK).is_file():
        with np.load(data / PACK, allow_pickle=False) as pack:
            ends, held, labels = pack[f"{part}_ends"], pack[f"{part}_bytes"], pack[f"{part}_labels"]
        return [held[start:end].tobytes() for start, end in zip([0, *ends[:-1]], ends, strict=True)], labels
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(data / f"{part}.parquet", columns=["image", "label"])
    images = [row["bytes"] for row in table.column("image").to_pylist()]
    return images, table.column("label").to_numpy()


def pack(data: Path, out: Path) -> None:
    """Both files as one that numpy reads."""
    arrays = {}
    for part in ("train", "test"):
        images, labels = read_images(data, part)
        arrays[f"{part}_ends"] = np.cumsum([len(image) for image in images])
        arrays[f"{part}_bytes"] = np.frombuffer(b"".join(images), np.uint8)
        arrays[f"{part}_labels"] = labels.astype(np.uint8)
    np.savez(out, **arrays)


def write_binary(data: Path | None, out: Path) -> Path:
    """The binary version of CIFAR-10, which needs no decoding."""
    from PIL import Image

    if (out / "test_batch.bin").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    for part, files in (("train", 5), ("test", 1)):
        if data is None:
            draw = np.random.default_rng(files)
            records = draw.integers(0, 256, (200 * files, 1 + 3 * 32 * 32), np.uint8)
            records[:, 0] = np.arange(len(records)) % 10
        else:
            images, labels = read_images(data, part)
            records = np.empty((len(images), 1 + 3 * 32 * 32), np.uint8)
            records[:, 0] = labels
            for record, image in zip(records, images, strict=True):
                with Image.open(io.BytesIO(image)) as opened:
                    record[1:] = np.moveaxis(np.asarray(opened.convert("RGB")), -1, 0).ravel()
        names = [f"data_batch_{number + 1}.bin" for number in range(files)] if part == "train" else ["test_batch.bin"]
        for name, some in zip(names, np.array_split(records, files), strict=True):
            some.tofile(out / name)
    return out


# ---------------------------------------------------------------- training


class OutOfTime(Exception):
    """The rest is for the next call."""


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a, self.home = arguments, arguments.home
        self.home.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.data = write_binary(arguments.data, self.home / "data")

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def remember(self, **facts: Any) -> dict[str, Any]:
        """What earlier calls and this one found out."""
        path = self.home / "state.json"
        known = (json.loads(path.read_text()) if path.is_file() else {}) | facts
        path.write_text(json.dumps(known, indent=1))
        return known

    def train(self, name: str, minutes: float, overrides: list[str]) -> Path:
        """Train for so many minutes in all, in as many calls as that takes."""
        run = self.home / name
        known = self.remember()
        if known.get(f"{name}_done"):
            return run
        overrides = [
            f"run.dir={run}",
            f'data.train=[{{path: "{self.data}", kind: cifar10}}]',
            f'data.valid=[{{path: "{self.data}", kind: cifar10, part: test}}]',
            "log.tensorboard=false",
            *overrides,
        ]
        recipe, steps = ROOT / f"configs/cifar10/{name}.yaml", known.get(f"{name}_steps")
        if self.a.quick:
            steps = 4
            overrides += ["log.every=1", "run.device=cpu", "schedule.warmup=1"]
        if steps is None:
            began = time.monotonic()
            self.sit(recipe, [*overrides, f"run.time_limit={round(min(FIRST, self.left()))}s"])
            lines = [e for e in events(run) if e["event"] == "train" and "step_seconds" in e]
            if not lines:
                raise OutOfTime
            pace = statistics.median(e["step_seconds"] for e in lines[len(lines) // 2 :])
            rest = 60 * minutes - (time.monotonic() - began)
            steps = lines[-1]["step"] + max(1, int(KEPT_BACK * rest / pace))
            self.remember(**{f"{name}_steps": steps})
        left = self.left()
        if left < 30 and not self.a.quick:
            raise OutOfTime
        if not self.sit(recipe, [*overrides, f"run.steps={steps}", f"run.time_limit={round(left - 10)}s"]):
            raise OutOfTime
        self.remember(**{f"{name}_done": True})
        return run

    def sit(self, recipe: Path, overrides: list[str]) -> bool:
        """One sitting; whether it came to the end."""
        done = vitrail.train(recipe, overrides=overrides).code == 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return done

    # ------------------------------------------------------------ samples

    def sample(self, dit: Path, number: int, batch: int, **asked: Any) -> tuple[str, float | None]:
        """Make so many samples, as far as the time reaches; the sampler, and samples a second.

        The speed is that of this call after its first batch, which compiles.
        """
        target, fast, seconds, warm = min(batch, number), 0, 0.0, False
        while True:
            self.check_time()
            made = vitrail.sample(dit, number=target, batch=batch, quiet=False, **asked)
            if warm:
                fast, seconds = fast + made["made"], seconds + made["seconds"]
            warm = warm or made["made"] > 0
            if made["number"] >= number:
                return made["settings"]["sampler"], fast / seconds if fast else None
            fits = batch  # as many whole batches as the time holds at the speed of the last ones
            if made["made"]:
                fits = int((self.left() - BEFORE) * made["made"] / made["seconds"]) // batch * batch
            target = min(number, made["number"] + max(batch, fits))

    def check_time(self) -> None:
        if self.left() < BEFORE:
            raise OutOfTime

    def judge(self, dit: Path, classifier: Path, guidance: float) -> dict[str, Any]:
        """Make samples at a guidance, and measure them, unless an earlier call has."""
        out = self.home / f"samples-{guidance:g}"
        number, batch = (40, 20) if self.a.quick else (self.a.samples, 500)
        steps = 2 if self.a.quick else self.a.steps
        done, speed = f"judged_{guidance:g}_{steps}_{number}", f"samples_per_s_{guidance:g}_{steps}"
        known = self.remember()
        if done in known:
            return known[done]
        sampler, fast = self.sample(dit, number, batch, steps=steps, guidance=guidance, out=out)
        if fast is not None:
            known = self.remember(**{speed: fast})
        self.check_time()
        found = quality(out, real=classifier, classifier=classifier, batch=500)
        row = {
            "guidance": guidance,
            "steps": steps,
            "sampler": sampler,
            "samples": number,
            "samples_per_s": known.get(speed),
            "measures": found["measures"],
            "accuracy_by_class": found["accuracy_by_class"],
            "notes": found["notes"],
        }
        return self.remember(**{done: row})[done]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summarise(run: Path) -> dict[str, Any]:
    """How a training went, by its own log."""
    lines = events(run)
    train = [e for e in lines if e["event"] == "train"]
    speeds = [e for e in train if e.get("samples_per_s")]
    return {
        "parameters": next(e["parameters"] for e in lines if e["event"] == "start"),
        "steps": train[-1]["step"],
        "samples": train[-1]["samples"],
        "loss": train[-1]["loss"],
        "samples_per_s": statistics.median(e["samples_per_s"] for e in speeds) if speeds else None,
        "mfu": statistics.median(e["mfu"] for e in speeds) if speeds and speeds[0]["mfu"] else None,
        "data_wait": statistics.median(e["data_wait"] for e in speeds) if speeds else None,
        "seconds": _seconds(lines),
        "eval": next(({"step": e["step"], **e["metrics"]} for e in reversed(lines) if e["event"] == "eval"), None),
    }


def _seconds(lines: list[dict[str, Any]]) -> float:
    """From the first line to the last of each sitting."""
    total, first = 0.0, 0.0
    for before, line in zip([None, *lines], lines, strict=False):
        if line["event"] == "start" or before is None:
            total, first = total + (before["time"] - first if before else 0.0), line["time"]
    return total + lines[-1]["time"] - first


def draw_loss(run: Path, path: Path) -> None:
    from matplotlib.figure import Figure

    train = [e for e in events(run) if e["event"] == "train"]
    evals = [e for e in events(run) if e["event"] == "eval"]
    figure = Figure(figsize=(6, 3.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [e["samples"] / 1e6 for e in train], [e["loss"] for e in train], color="#1f6feb", linewidth=1, label="train"
    )
    batch = train[-1]["samples"] / train[-1]["step"]
    at = [e["step"] * batch / 1e6 for e in evals]
    axes.plot(at, [e["metrics"]["loss"] for e in evals], "o", color="#d9730d", markersize=4, label="test images")
    axes.set(xlabel="million samples", ylabel="squared error of the velocity", title="DiT, rectified flow, CIFAR-10")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def show(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| guidance | accuracy | real | frechet | floor | precision | recall | samples/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        m = {measure["measure"]: measure for measure in row["measures"]}
        speed = row["samples_per_s"] or float("nan")
        lines.append(
            f"| {row['guidance']:g} | {m['accuracy']['value']:.3f} | {m['accuracy']['floor']:.3f} "
            f"| {m['frechet']['value']:.3f} | {m['frechet']['floor']:.3f} | {m['precision']['value']:.3f} "
            f"| {m['recall']['value']:.3f} | {speed:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of train.parquet and test.parquet, or of a pack")
    parser.add_argument("--pack", type=Path, help="write the images of --data into this file, and do nothing else")
    parser.add_argument("--home", type=Path, default=Path("runs/cifar10-flow"), help="where everything is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this call")
    parser.add_argument("--train-minutes", type=float, default=8.0, help="of training the DiT, over all calls")
    parser.add_argument("--classifier-minutes", type=float, default=4.0, help="of training the classifier")
    parser.add_argument("--size", default="S/2", help="of the DiT: S/2 or B/2")
    parser.add_argument("--set", nargs="*", default=[], help="further changes to the recipe of the DiT")
    parser.add_argument("--samples", type=int, default=5000, help="at each guidance")
    parser.add_argument("--steps", type=int, default=25, help="of the sampler")
    parser.add_argument("--guidance", type=float, nargs="*", default=[1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--quick", action="store_true", help="tiny, on a CPU")
    a = parser.parse_args()
    if a.pack is not None:
        pack(a.data, a.pack)
        return
    if a.data is None and not a.quick:
        parser.error("--data is missing: the folder of CIFAR-10's parquet files")
    bench = Bench(a)
    try:
        classifier = bench.train("classifier", a.classifier_minutes, QUICK_CLASSIFIER if a.quick else [])
        size = QUICK_DIT if a.quick else [f"model.size={a.size}", *a.set]
        dit = bench.train("dit", a.train_minutes, size)
        report(bench, dit, classifier)
    except OutOfTime:
        print("out of time; the same call goes on from here", file=sys.stderr)
        sys.exit(AGAIN)


def report(bench: Bench, dit: Path, classifier: Path) -> None:
    """Judge samples at each guidance, and write down what was found."""
    a = bench.a
    a.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "cifar10_flow",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "environment": environment(),
        "size": find_recipe(dit).model.size,
        "dit": summarise(dit),
        "classifier": summarise(classifier),
        "rows": rows,
    }
    draw_loss(dit, a.out / "cifar10_flow_loss.png")
    for guidance in a.guidance[: 2 if a.quick else None]:
        rows.append(bench.judge(dit, classifier, guidance))
        # After each, so that a call that is cut off keeps what it has measured.
        (a.out / "cifar10_flow.json").write_text(json.dumps(result, indent=1) + "\n")
        shutil.copy(bench.home / f"samples-{guidance:g}/grid.png", a.out / f"cifar10_flow_samples_{guidance:g}.png")
        print(show(rows), flush=True)


if __name__ == "__main__":
    main()
