"""Muon beside AdamW: the handwritten digits and the demo's masked autoencoder, several seeds each, on the CPU.

    python benchmarks/optimizers.py [--seeds 3] [--out benchmarks/results/optimizers.json]
    python benchmarks/optimizers.py --page         # writes the tables of optimizers.md

Each shipped recipe is trained as it stands; only `optimizer.kind`, `optimizer.lr` and `run.seed` differ. AdamW's rates
and weight decay are those of the recipe, which were chosen for AdamW; Muon has the same, and each is tried at half and
at twice that rate with the first seed, so that neither is judged at a rate that suits it badly. A run that is in the
results already is not made again. Seconds are kept in the
results, but not compared: other work on the machine makes them vary.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import vitrail
from vitrail.launch.machine import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/optimizers.json"
PAGE = ROOT / "benchmarks/optimizers.md"
MARK = "<!-- written by optimizers.py --page, from here to the end -->"
_DIGITS = {"train": "digits/train", "valid": "digits/valid", "betas": "", "score": "accuracy", "better": "more"}
_TISSUE = {
    "train": "em.zarr",
    "valid": "em.zarr",
    "betas": ", betas: [0.9, 0.95]",
    "score": "mse_over_variance",
    "better": "less",
}
RECIPES = {"digits/vit": _DIGITS, "demo/mae3d": _TISSUE}
RATE = 2e-3  # of both recipes
KINDS = ("adamw", "muon")
FACTORS = (1.0, 0.5, 2.0)  # of the recipe's rate; the others with the first seed alone


def cells(seeds: int) -> list[tuple[str, str, float, int]]:
    """List the runs: recipe, optimizer, factor of the rate, seed."""
    return [
        (recipe, kind, factor, seed)
        for recipe in RECIPES
        for factor in FACTORS
        for seed in range(seeds if factor == 1 else 1)
        for kind in KINDS
    ]


def train(recipe: str, kind: str, factor: float, seed: int, data: Path, run: Path) -> dict[str, Any]:
    """Train one run and return its score after every evaluation, and its seconds."""
    facts = RECIPES[recipe]
    places = [f"data.{part}.0.path={data / facts[part]}" for part in ("train", "valid")]
    outcome = vitrail.train(
        ROOT / f"configs/{recipe}.yaml",
        overrides=[
            *(f"run.dir={run}", f"run.seed={seed}", "log.pictures=null", "log.report=false", *places),
            f"optimizer={{kind: {kind}, lr: {RATE * factor}, weight_decay: 0.05, clip: 1.0{facts['betas']}}}",
        ],
        quiet=True,
    )
    if outcome.code:  # stopped: what there is of it is no result
        sys.exit(outcome.code)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {event["step"]: event["metrics"][facts["score"]] for event in events if event["event"] == "eval"}
    return {"scores": scores, "seconds": next(event for event in events if event["event"] == "end")["seconds"]}


def measure(seeds: int, out: Path) -> None:
    """Make the runs that the results lack, one after the other."""
    found = json.loads(out.read_text()) if out.exists() else {"runs": []}
    known = {(run["recipe"], run["kind"], run["factor"], run["seed"]) for run in found["runs"]}
    facts = environment()
    found["environment"] = {key: facts[key] for key in ("date", "commit", "python", "packages", "cpu")}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        for words in (["em.zarr"], ["digits", "--kind", "digits"]):
            words[0] = str(data / words[0])
            subprocess.run([sys.executable, "-m", "vitrail", "data", "generate", *words], check=True)
        for number, cell in enumerate(cells(seeds)):
            if cell not in known:
                recipe, kind, factor, seed = cell
                made = train(*cell, data, data / f"run-{number}")
                found["runs"].append({"recipe": recipe, "kind": kind, "factor": factor, "seed": seed} | made)
                draft = out.with_suffix(".partial")
                draft.write_text(json.dumps(found, indent=1) + "\n")
                draft.replace(out)
                print(*cell, made["scores"], flush=True)


def table(found: dict[str, Any]) -> str:
    """Write the page's tables: scores at every evaluation, median and range of the seeds."""
    lines = []
    for recipe, facts in RECIPES.items():
        runs = [run for run in found["runs"] if run["recipe"] == recipe]
        if not runs:
            continue
        steps = sorted({int(step) for run in runs for step in run["scores"]})
        lines += [
            f"\n`{recipe}`, `{facts['score']}` ({facts['better']} is better):\n",
            f"| optimizer | rate | seeds | {' | '.join(f'step {step}' for step in steps)} |",
            "|" + "---|" * (len(steps) + 3),
        ]
        for factor in sorted(FACTORS):
            for kind in KINDS:
                same = [run for run in runs if run["kind"] == kind and run["factor"] == factor]
                if same:
                    cells = [spread([run["scores"][str(step)] for run in same]) for step in steps]
                    lines.append(f"| {kind} | {RATE * factor:g} | {len(same)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    """Write a median and, of several values, their range."""
    middle = f"{statistics.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the tables into optimizers.md")
    options = parser.parse_args()
    if options.page:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(MARK) + len(MARK)] + "\n" + table(json.loads(options.out.read_text())))
    else:
        measure(options.seeds, options.out)
