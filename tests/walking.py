"""The way of one sample: which files of the library see it, from the path in a recipe to the loss of a step.

A file is on the way when one of its functions is given, or gives back, the sample in any of its forms: its source (from
metadata to a source of items), its place (an extent, a window), its values (numbers along two or more axes), the loss.
Comprehensions belong to the function that they stand in; what a dataclass does when it is made is no step.

Run as a program with a folder, it prints the files, with the functions of each.
"""

import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from support import tiny_recipe, write_volume

import vitrail
from vitrail.data.augment import Raw
from vitrail.data.batch import Batch, Statistics
from vitrail.data.chunks.decoded import ChunkReader
from vitrail.data.chunks.layout import Layout
from vitrail.data.formats.ngff import Multiscale
from vitrail.data.grid import GridSource
from vitrail.data.order.sampler import Extent, Sample
from vitrail.data.source import Item
from vitrail.data.stored import Entry, Stored
from vitrail.layers.tokens import Tokens
from vitrail.objectives.objective import Loss
from vitrail.recipe import load_recipe
from vitrail.training import setup
from vitrail.training.trainer import Trainer

SOURCE = Path(vitrail.__file__).parent
FORMS = (Multiscale, Stored, Entry, GridSource, Layout, ChunkReader, Item, Extent, Sample, Raw, Batch, Tokens, Loss)


def is_sample(value: Any, depth: int = 2) -> bool:
    if isinstance(value, FORMS):
        return True
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 1
    if isinstance(value, dict):
        return depth > 0 and any(is_sample(each, depth - 1) for each in value.values())
    if isinstance(value, tuple) and value and all(isinstance(each, slice) for each in value):
        return True
    return isinstance(value, list | tuple) and depth > 0 and any(is_sample(each, depth - 1) for each in value)


class Walk:
    """The files of the library whose functions see the sample, in any thread that is started meanwhile."""

    def __init__(self) -> None:
        self.seen: dict[str, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, given: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{SOURCE}/"):
            return
        if code.co_name.startswith("<") and code.co_name != "<lambda>":
            return
        if event == "return":
            values = [given]
        else:
            number = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            own = frame.f_locals
            values = [own.get(name) for name in code.co_varnames[:number] if code.co_name != "__post_init__"]
        if any(map(is_sample, values)):
            file = Path(code.co_filename).relative_to(SOURCE).as_posix()
            self.seen.setdefault(file, set()).add(code.co_qualname)

    def __enter__(self) -> "Walk":
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def walk(folder: Path) -> dict[str, list[str]]:
    """Take a plain step: one rank, no augmentation, no validation, statistics as a run that goes on knows them."""
    volume = write_volume(folder / "em.zarr")
    tree = tiny_recipe(volume, folder / "run", data__augment__orientations=False, data__train=[{"path": str(volume)}])
    del tree["data"]["valid"]
    for part in ("encoder", "decoder"):
        del tree["model"][part]["drop_path"]
    recipe = load_recipe(tree)
    place = setup.find_place(recipe)
    with Walk() as opening:
        data = setup.open_data(recipe, place, Statistics((128.0,), (40.0,)))
    recipe = setup.complete(recipe, data)
    objective = recipe.objective.build(recipe.model, data.statistics)
    parts = setup.build_model(recipe, place, data, objective)
    order = setup.make_sampler(recipe, data)
    trainer = Trainer(recipe, place, data, parts, objective, order.epoch)
    with Walk() as step:
        loader = setup.make_loader(recipe, place, data, order, objective, parts.flow, step=0, samples=0)
        batches = loader.batches(0, 1)
        loss, count = trainer.flow.forward_backward(trainer._prepared(next(batches)), 1, trainer.judge)
    batches.close()
    assert torch.isfinite(loss / count)
    torch.distributed.destroy_process_group()
    return {
        file: sorted(opening.seen.get(file, set()) | step.seen.get(file, set())) for file in {*opening.seen, *step.seen}
    }


if __name__ == "__main__":
    print(json.dumps(walk(Path(sys.argv[1]))))
