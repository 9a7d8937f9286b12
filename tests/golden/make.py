"""Write what this machine computes into golden.json, beside what others do: python tests/golden/make.py

Only where the code is known to be right: from a commit whose tests pass, before a change that must not change a bit.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from golden import cases


def main() -> None:
    golden = json.loads(cases.GOLDEN.read_text()) if cases.GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["VITRAIL_CACHE"] = str(Path(home, "cache"))
        golden[cases.machine()] = cases.train_all(Path(home), print)
        if not cases.RUN.exists():
            make_run(Path(home))
    machines = []
    for machine, recipes in golden.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in recipes.items())
        machines.append(f" {json.dumps(machine)}: {{\n{lines}\n }}")
    cases.GOLDEN.write_text("{\n" + ",\n".join(machines) + "\n}\n")


def make_run(home: Path) -> None:
    """A run that was stopped in the middle: of its two checkpoints the first is kept, the log tells what came after."""
    import vitrail

    with contextlib.chdir(home):
        vitrail.train(cases.ROOT / "configs/demo/mae3d.yaml", overrides=cases.OLD_RUN, quiet=True)
        shutil.rmtree("runs/old/checkpoints/step-00000010")
    shutil.copytree(home / "runs/old", cases.RUN, ignore=shutil.ignore_patterns("report.html", ".lock"))


if __name__ == "__main__":
    main()
