"""The page of pictures of a folder of samples, from its files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.infer.grid import MOST_COLUMNS, MOST_ROWS, draw_grid
from vitrail.infer.kind import Kind
from vitrail.infer.write import read_sample

GRID = "grid.png"


def draw_samples(folder: Path, manifest: Mapping[str, Any], kind: Kind, beside: Mapping[str, Kind]) -> Path:
    """A row a class; or a row a sample, between what it was made from and what was there in truth."""
    files = manifest["files"]
    most = MOST_COLUMNS if len(kind.axes) == 2 else 4

    def read(name: str, kind: Kind) -> np.ndarray:
        return read_sample(folder / name, kind)

    heads: tuple[str, ...] = ()
    if beside:
        heads = ("condition", "sample", "truth")
        rows = [
            (
                str(entry.get("class", entry["counter"])),
                [
                    read(entry["condition"], beside["condition"]),
                    read(entry["path"], kind),
                    read(entry["truth"], kind),
                ],
            )
            for entry in files[:8]
        ]
    elif "class" in files[0]:
        classes = list(dict.fromkeys(entry["class"] for entry in files))[:MOST_ROWS]
        chosen = [(name, [entry for entry in files if entry["class"] == name][:most]) for name in classes]
        rows = [(name, [read(entry["path"], kind) for entry in entries]) for name, entries in chosen]
    else:
        shown = files[: most * 6]
        rows = [("", [read(e["path"], kind) for e in shown[i : i + most]]) for i in range(0, len(shown), most)]
    settings = manifest["settings"]
    words = [f"{settings['sampler']} sampler, {settings['steps']} steps, seed {manifest['seed']}"]
    if settings["guidance"] != 1:
        words.append(f"guidance {settings['guidance']:g}")
        if tuple(settings["interval"]) != (0.0, 1.0):
            words.append("on {:g} to {:g} of the way".format(*settings["interval"]))
    weights = {"ema": "averaged", "raw": "raw"}[manifest["weights"]]
    return draw_grid(
        folder / GRID,
        rows,
        title=f"{manifest['run']}, step {manifest['step']}, {weights} weights",
        caption=", ".join(words),
        heads=heads,
        spacing=kind.spacing if len(set(kind.spacing)) > 1 else (),
        value_range=kind.value_range,
    )
