"""The whole way on generated tissue: a volume, a pre-training, a segmentation that starts from it, a prediction.

    make demo                                                  (or: python configs/demo/demo.py)
    python configs/demo/demo.py run.steps=20                   (keys of both recipes; shorter, say)

Every step is a command, which is shown before it runs. Earlier runs are never touched: new ones begin beside them.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

VOLUME = "data/em.zarr"
HELD_OUT = "region={x: [0.8, 1]}"  # as data.valid of both recipes


def vitrail(*words: str) -> str:
    """Run a command, and return the last line that it prints: a path, mostly."""
    print(f"\n$ vitrail {shlex.join(words)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "vitrail", *words], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    if process.returncode:
        sys.exit(process.returncode)
    return output.strip().rpartition("\n")[2]


def scores(run: Path) -> dict[str, float]:
    """Return what a run's last evaluation measured."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["metrics"] for line in lines if line["event"] == "eval"][-1]


def main(keys: list[str]) -> None:
    # Ctrl-C reaches the command as well, which saves what it has done before it ends.
    signal.signal(signal.SIGINT, lambda *_: None)
    began = time.monotonic()
    if not Path(VOLUME).exists():
        vitrail("data", "generate", VOLUME)
    first = Path(vitrail("train", "configs/demo/mae3d.yaml", *keys, "--fresh")).parent
    second = Path(vitrail("train", "configs/demo/finetune3d.yaml", f"init.path={first}", *keys, "--fresh")).parent
    classes, picture = second / "held-out.ome.zarr", second / "held-out.png"
    predict = ("predict", str(second), VOLUME, "--set", HELD_OUT, "--out", str(classes), "--picture", str(picture))
    vitrail(*predict)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    error, found = scores(first)["mse_over_variance"], scores(second)
    dice = {name: f"{found[f'dice_{name}']:.2f}" for name in ("membrane", "mitochondria", "vesicles")}
    own = sys.prefix != sys.base_prefix  # a virtual environment, whose commands are not found by their names yet
    activated = f", after `. {os.path.relpath(sys.prefix)}/bin/activate`" if own else ""
    print(f"""
Made in {minutes} min {seconds} s, all judged on a slab of tissue that no training saw:

  {picture}
      look at this first: the slab, and what was found in it
  {classes}
      the same as a volume: a class for each voxel, with voxel size and place, for napari, Fiji or neuroglancer
  {second}/report.html
      the segmentation, learned from a fifth of the volume with labels: Dice {dice["membrane"]} of membranes,
      {dice["mitochondria"]} of mitochondria, {dice["vesicles"]} of vesicles (1 is perfect); pictures beside the truth
  {first}/report.html
      the pre-training without labels that it started from: hidden voxels are told with an error of {error:.2f} of their
      variance (1: one grey everywhere; 0: perfect, which noise rules out)

What to try next{activated}:

  vitrail train configs/demo/finetune3d.yaml init=null --fresh
      the same without the pre-training: how much worse is it?
  vitrail predict {second} {VOLUME} --out em-classes.ome.zarr
      the whole volume
  vitrail data inspect my/volume.tif
      your own data; README.md and docs/tutorials/segment.md go on from there""")


if __name__ == "__main__":
    main(sys.argv[1:])
