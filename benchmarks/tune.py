"""The largest batch of three models on this machine, found by `vitrail tune` and proven by the next size, which fails.

    python benchmarks/tune.py [--minutes 8] [--only vit] [--multiple 8] [--cluster h200]

Rows are kept in results/tune.json; a call goes on with the models that are left, and ends with 75 when its minutes are
over and some are. `--quick` takes a small model and a bound instead of a failure, to try the script on a CPU.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from planner import (
    SAME,
    STOPPED,
    Cell,
    cells,
    machine,
    mae,
    open_results,
    reconstruct,
    refuse_mixing,
    tiny_cells,
    write_json,
)

from vitrail.bench.tune import tune

ROOT = Path(__file__).resolve().parent.parent


def models(quick: bool) -> dict[str, Cell]:
    """Not compiled: a trial then takes a few seconds."""
    if quick:
        return {"vit": tiny_cells()[0]}
    encoder = {"size": "L/8", "positions": "rope", "depth": 12}
    named = {cell.name: cell for cell in cells()}
    return {
        "vit": named["vit L/16 x 64"],
        "mae3d": Cell("mae3d", mae(encoder, "cross", ndim=3), reconstruct("cross"), 128, 1, 8),
        "dit": named["dit XL/2 x 64"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no model is begun")
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument("--multiple", type=int, default=8)
    parser.add_argument("--most", type=int, default=None)
    parser.add_argument("--cluster", default=None, help="what the planner takes this device for; else its own name")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a small model on a CPU")
    given = parser.parse_args(arguments)
    path = given.out / ("tune_quick.json" if given.quick else "tune.json")
    stored = open_results(path, "rows")
    here = machine()
    refuse_mixing(stored["rows"], here, path)
    stored["machine"] = here
    began, left = time.monotonic(), 0
    for name, cell in models(given.quick).items():
        if (given.only and name not in given.only) or name in stored["rows"]:
            continue
        if time.monotonic() - began > 60 * given.minutes:
            left += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder) / "recipe.yaml"
            recipe.write_text(json.dumps(cell.tree()))  # JSON is YAML
            found = tune(
                str(recipe),
                multiple=given.multiple,
                most=given.most,
                cluster=given.cluster,
                out=Path(folder) / "tuned.yaml",
                tell=lambda line: print(line, flush=True),
            )
        stored["rows"][name] = found | {key: here[key] for key in SAME}
        del stored["rows"][name]["recipe"]
        write_json(path, stored)
        print(f"{name}: {found['proof']}", flush=True)
    return STOPPED if left else 0


if __name__ == "__main__":
    sys.exit(main())
