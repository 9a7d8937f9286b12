"""ISBI-2012: how well are membranes found, and does pre-training without labels help? Several seeds, on one GPU.

    python benchmarks/isbi2012.py [--isbi data/isbi2012] [--runs runs/isbi2012] [--seconds 480] [--seeds 3]
    python benchmarks/isbi2012.py --page        # writes the tables of isbi2012.md; needs no GPU and no data

Each seed trains configs/isbi2012/pretrain.yaml, and then configs/isbi2012/finetune.yaml from its encoder and from
random numbers: with labels of the first 24 slices, and of the first three alone. Every training then predicts all 30
slices, by tiles that overlap by half and from four sides, and is scored on the last six, which none of them has seen,
by what `vitrail eval FILE --labels label.tif --border membrane --slices z` says. These are the functions of `vitrail
train`, `vitrail predict` and `vitrail eval`, one after the other in one process, since PyTorch takes seconds to start.

Runs and predictions go to --runs, results to --out: isbi2012.json, after each training, and isbi2012.png, a slice as
all see it. A call makes what is missing; after --seconds it begins no training, and ends with 75 if some are left: the
same call again goes on, also with a training that was cut off. For that both folders have to be kept, or at least
--runs, where the results are written as well.

`--cpu` is what the tutorial does, in minutes on two cores: a smaller network, labels of three slices, and of the
predictions the last six slices alone, from one side. Its results are a file of their own. `--keys` are more keys of
both recipes, to try the whole: run.steps=20 data.crop=64, say.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planner import SAME, STOPPED, clean, machine, open_results, refuse_mixing, write_json

import vitrail
from vitrail.infer.compare import compare
from vitrail.training.failures import summary

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks/isbi2012.md"
MARK = "<!-- written by isbi2012.py --page, from here to the end -->"
LABELLED, HELD_OUT = 24, [24, 30]  # slices, as both recipes have them
STARTS = {"scratch": "random numbers", "pretrained": "pre-training"}
MEASURES = {
    "dice_membrane": "Dice of membranes",
    "iou_membrane": "IoU of membranes",
    "rand_f_score": "Rand F-score",
    "rand_f_score_of_classes": "of likeliest classes",
}
SHOWN, SIDE = 27, 256  # the slice of the picture, and how much of its middle

_SMALL = (
    "model.encoder.width=96",
    "model.encoder.depth=4",
    "model.encoder.heads=4",
    "data.crop=128",
    "optimizer.lr=2e-3",
)


@dataclass(frozen=True)
class Size:
    """What is changed of both recipes, and how it is predicted."""

    labels: tuple[int, ...]  # slices that are labelled
    pretrain: tuple[str, ...] = ()  # keys
    finetune: tuple[str, ...] = ()
    overlap: float = 0.5
    flips: str | None = "all"
    whole: bool = True  # all slices are predicted, rather than those held out


FULL = Size((LABELLED, 3))
CPU = Size(
    (3,),
    pretrain=(*_SMALL, "data.batch=16", "run.steps=1000"),
    finetune=(*_SMALL, "model.features=8", "data.batch=4", "run.steps=300", "eval.every=100%"),
    overlap=0.25,
    flips=None,
    whole=False,
)


@dataclass(frozen=True)
class Cell:
    """A training: the pre-training of a seed, or a segmentation from some labelled slices."""

    seed: int
    start: str | None = None  # None: it is the pre-training
    labels: int = 0

    @property
    def name(self) -> str:
        return f"pretrain-{self.seed}" if self.start is None else f"{self.start}-{self.labels}-{self.seed}"


def cells(size: Size, seeds: int) -> list[Cell]:
    """Seed by seed, so that a call that is cut off leaves fewer seeds, and those that it has are whole."""
    found = []
    for seed in range(seeds):
        found.append(Cell(seed))
        found += [Cell(seed, start, labels) for labels in size.labels for start in STARTS]
    return found


# ---------------------------------------------------------------- training, predicting, scoring


class Stopped(Exception):
    """Somebody wants this to end."""


@dataclass(frozen=True)
class Home:
    """Where the data lie, and where runs go."""

    isbi: Path
    runs: Path
    size: Size
    keys: Sequence[str] = ()

    def run(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def prediction(self, cell: Cell) -> Path:
        return self.runs / f"{cell.name}.ome.tif"

    def entry(self, part: str, region: Sequence[float], *, labelled: bool) -> str:
        labels = "label_map: {255: 0, 0: 1}, " if labelled else ""
        where = json.dumps(str(self.isbi))
        return f"data.{part}=[{{path: {where}, slices: z, {labels}region: {{z: {list(region)}}}}}]"

    def overrides(self, cell: Cell) -> list[str]:
        """Return what is changed of the recipe: where it lies, its seed, and what the cell is about."""
        alone = cell.start is None
        labels = LABELLED if alone else cell.labels
        words = [f"run.dir={self.run(cell)}", f"run.seed={cell.seed}"]
        words += [self.entry("train", [0, labels], labelled=not alone)]
        words += [self.entry("valid", HELD_OUT, labelled=not alone)]
        if not alone:
            pretrained = {"scratch": "null", "pretrained": f"{{path: {json.dumps(str(self.run(Cell(cell.seed))))}}}"}
            words.append(f"init={pretrained[str(cell.start)]}")
        return [*words, *(self.size.pretrain if alone else self.size.finetune), *self.keys]


def attempt(cell: Cell, home: Home) -> dict[str, Any]:
    """Train a cell, have it predict, and score that; to fail is a result."""
    clean()
    began = time.monotonic()
    facts = {"seed": cell.seed, "start": cell.start, "labels": cell.labels, "date": today()}
    try:
        found = {"status": "ok"} | train(cell, home)
        if cell.start is not None:
            found |= predict(cell, home)
    except Stopped:
        raise
    except Exception as error:
        found = {"status": "failed", "error": summary(error)[:500]}
    finally:
        clean()
    return facts | found | {"seconds": round(time.monotonic() - began, 1)}


def train(cell: Cell, home: Home) -> dict[str, Any]:
    """Train, or go on with what was cut off, and return what the log says."""
    recipe = "pretrain" if cell.start is None else "finetune"
    path = ROOT / f"configs/isbi2012/{recipe}.yaml"
    if vitrail.train(path, overrides=home.overrides(cell), quiet=True).code != 0:
        raise Stopped
    return logged(home.run(cell))


def logged(run: Path) -> dict[str, Any]:
    """Return what a run's log says: of its last evaluation, and of the time of a step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    timed = [event["step_seconds"] for event in events if event["event"] == "train" and "step_seconds" in event]
    last = [event for event in events if event["event"] == "eval"][-1]
    start = next(event for event in events if event["event"] == "start")
    return {
        "evaluated": last["metrics"],
        "steps": last["step"],
        "step_seconds": statistics.median(timed) if timed else None,
        "parameters": start["parameters"],
    }


def predict(cell: Cell, home: Home) -> dict[str, Any]:
    """Predict the slices, unless an earlier call has, and score those that were held out."""
    out, region = home.prediction(cell), f"region={{z: {HELD_OUT}}}"
    if not out.exists():
        vitrail.predict(
            home.run(cell),
            home.isbi,
            out=out,
            write="probabilities",
            overlap=home.size.overlap,
            flips=home.size.flips,
            settings=[] if home.size.whole else [region],
        )
    labels, settings = str(home.isbi / "label.tif"), ["label_map={255: 0, 0: 1}", region]
    found = compare(str(out), labels, settings=settings, border="membrane", slices="z")
    return {"metrics": found["metrics"], "rand_f_scores": found["rand_f_scores"]}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def measure(given: argparse.Namespace, size: Size, name: str) -> int:
    """Make what the results lack, one after the other."""
    began = time.monotonic()
    missing = [str(path) for path in (given.isbi / "image.tif", given.isbi / "label.tif") if not path.exists()]
    if missing:
        raise SystemExit(f"{missing[0]} is not there: --isbi names the folder of image.tif and label.tif")
    given.runs.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    home = Home(given.isbi.resolve(), given.runs.resolve(), size, given.keys)
    places = [given.out / f"{name}.json", given.runs / f"{name}.json"]
    path = next((path for path in places if path.exists()), places[0])
    stored, here = open_results(path, "cells"), machine()
    done, settings = stored["cells"], json.loads(json.dumps(vars(size) | {"keys": given.keys}))
    refuse_mixing(done, here, path)
    if stored.setdefault("settings", settings) != settings:
        raise SystemExit(f"{path}: its trainings had other settings; give other --out and --runs, or remove it")
    stored["machine"] = here
    left, failed = 0, 0
    for cell in cells(size, given.seeds):
        if done.get(cell.name, {}).get("status") == "ok":
            continue
        if time.monotonic() - began > given.seconds:
            left += 1
            continue
        try:
            found = attempt(cell, home)
        except Stopped:
            return STOPPED
        done[cell.name] = found | {key: here[key] for key in SAME}
        for place in places:
            write_json(place, stored)  # after each cell: a call may be cut off
        failed += found["status"] == "failed"
        print(f"{cell.name}: {told(found)}; {time.monotonic() - began:.0f} s so far", flush=True)
    for place in places:
        write_json(place, stored)
    print("\n".join(tables(stored)))
    if left:
        print(f"{left} trainings are left: run this again", file=sys.stderr)
        return STOPPED
    if not failed:
        draw(given.out / f"{name}.png", home)
    return 1 if failed else 0


def told(found: dict[str, Any]) -> str:
    if found["status"] != "ok":
        return f"{found['status']}: {found['error']}"
    if found["start"] is None:
        return f"error {found['evaluated']['mse_over_variance']:.3f} of the variance"
    return ", ".join(f"{words} {found['metrics'][name]:.3f}" for name, words in MEASURES.items())


# ---------------------------------------------------------------- tables, page and picture


def scores(stored: dict[str, Any], start: str, labels: int, measure: str) -> dict[int, float]:
    """Return a measure of each seed."""
    ok = [cell for cell in stored["cells"].values() if cell["status"] == "ok"]
    return {cell["seed"]: cell["metrics"][measure] for cell in ok if (cell["start"], cell["labels"]) == (start, labels)}


def tables(stored: dict[str, Any]) -> list[str]:
    head = f"| labelled slices | start | seeds | {' | '.join(MEASURES.values())} |"
    lines = [head, "|" + "---|" * (3 + len(MEASURES))]
    said = []
    for labels in stored["settings"]["labels"]:
        for start, words in STARTS.items():
            each = [list(scores(stored, start, labels, measure).values()) for measure in MEASURES]
            if not each[0]:
                continue
            shown = (f"{statistics.fmean(one):.3f} ({min(one):.3f} to {max(one):.3f})" for one in each)
            lines.append(f"| {labels} | {words} | {len(each[0])} | {' | '.join(shown)} |")
        for measure, words in list(MEASURES.items())[::2]:
            with_, without = (scores(stored, start, labels, measure) for start in ("pretrained", "scratch"))
            gains = [with_[seed] - without[seed] for seed in sorted(with_.keys() & without.keys())]
            if gains:
                better = sum(gain > 0 for gain in gains)
                said.append(
                    f"- {labels} labelled slices, {words}: with pre-training {statistics.fmean(gains):+.3f} "
                    f"({', '.join(f'{gain:+.3f}' for gain in gains)}), better in {better} of {len(gains)} seeds"
                )
    failed = [f"- {name}: {told(cell)}" for name, cell in stored["cells"].items() if cell["status"] != "ok"]
    return [*lines, "", *said, *failed]


def page(stored: dict[str, Any] | None) -> str:
    """Write what stands on the page below its mark."""
    if stored is None or not stored["cells"]:
        return "\nNumbers of a GPU are still missing.\n"
    here, ok = stored["machine"], [cell for cell in stored["cells"].values() if cell["status"] == "ok"]
    days = " and ".join(sorted({cell["date"] for cell in stored["cells"].values()}))
    first = [cell for cell in ok if cell["start"] is None]
    second = [cell for cell in ok if cell["start"] is not None]
    lines = ["", f"{here['device']}, PyTorch {here['torch']}, Python {here['python']}, {days}.", ""]
    for words, some in (("Pre-training", first), ("Segmentation", second)):
        steps = [cell["step_seconds"] for cell in some if cell["step_seconds"]]
        if steps:
            seconds = statistics.median(cell["seconds"] for cell in some)
            lines.append(
                f"- {words}: {some[0]['steps']:,} steps of {1e3 * statistics.median(steps):.1f} ms, "
                f"{some[0]['parameters'] / 1e6:.1f} M parameters, {seconds:.0f} s "
                f"{'in all' if some is first else 'with prediction and scores'}"
            )
    errors = [cell["evaluated"]["mse_over_variance"] for cell in first]
    if errors:
        lines.append(f"- Hidden pixels of held-out slices: error of {statistics.fmean(errors):.2f} of their variance")
    lines += ["", *tables(stored), "", f"![Slice {SHOWN}: what was missed and what is too much](results/isbi2012.png)"]
    return "\n".join(lines) + "\n"


def draw(path: Path, home: Home) -> None:
    """Draw the middle of a held-out slice: image, truth, and what was found from either start with the first seed."""
    import matplotlib

    matplotlib.use("agg")
    import tifffile
    from matplotlib import pyplot

    image, labels = (tifffile.imread(home.isbi / f"{name}.tif") for name in ("image", "label"))
    part = tuple(slice((n - min(n, SIDE)) // 2, (n + min(n, SIDE)) // 2) for n in image.shape[1:])
    truth = labels[SHOWN][part] == 0
    rows, columns = len(home.size.labels), 2 + len(STARTS)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 3.3 * rows + 0.3), squeeze=False, layout="constrained"
    )
    for row, labelled in enumerate(home.size.labels):
        pictures = {"image": image[SHOWN][part], "membranes by hand": ~truth}
        for start, words in STARTS.items():
            cell = Cell(0, start, labelled)
            found = likeliest(home, cell)[part] == 1
            pictures[f"from {words}, {labelled} labelled slices"] = errors_of(truth, found)
        for axis, (title, picture) in zip(axes[row], pictures.items(), strict=True):
            axis.imshow(picture, cmap="gray", interpolation="nearest")
            axis.set_title(title, fontsize=9)
            axis.axis("off")
    figure.supxlabel("black: membranes that were found; red: missed; blue: too much", fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def likeliest(home: Home, cell: Cell) -> np.ndarray:
    """Return the likeliest classes of the slice that is shown."""
    from vitrail.data.look.inspect import open_source

    source = open_source(str(home.prediction(cell)), kind=None, settings=None)[1]
    at = SHOWN if home.size.whole else SHOWN - HELD_OUT[0]
    height, width = source.items[0].shape[1:]
    read = source.read(0, (slice(at, at + 1), slice(0, height), slice(0, width)))
    return np.asarray(read[:, 0].argmax(axis=0))


def errors_of(truth: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Colour what was found, missed, and too much."""
    colours = np.full((*truth.shape, 3), 255, np.uint8)
    for where, colour in (
        (truth & found, (0, 0, 0)),
        (truth & ~found, (220, 30, 30)),
        (found & ~truth, (90, 140, 255)),
    ):
        colours[where] = colour
    return colours


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isbi", type=Path, default=Path("data/isbi2012"), help="folder of image.tif and label.tif")
    parser.add_argument("--runs", type=Path, default=None, help="folder of runs and predictions")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of results and picture")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no training is begun")
    parser.add_argument("--cpu", action="store_true", help="what the tutorial does, on a CPU")
    parser.add_argument("--keys", nargs="*", default=[], metavar="KEY=VALUE", help="more keys of both recipes")
    parser.add_argument("--page", action="store_true", help="write the tables into isbi2012.md; trains nothing")
    given = parser.parse_args(arguments)
    if given.page and given.cpu:
        parser.error("the page tells of the whole, on a GPU; --cpu prints its tables")
    size, name = (CPU, "isbi2012_cpu") if given.cpu else (FULL, "isbi2012")
    given.runs = given.runs or Path("runs") / name.replace("_", "-")
    if given.page:
        path = given.out / f"{name}.json"
        text = PAGE.read_text(encoding="utf-8")
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        PAGE.write_text(text[: text.index(MARK) + len(MARK)] + "\n" + page(stored), encoding="utf-8")
        return 0
    if not given.cpu and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here, and this would take hours; --cpu is a smaller one")
    return measure(given, size, name)


if __name__ == "__main__":
    sys.exit(main())
