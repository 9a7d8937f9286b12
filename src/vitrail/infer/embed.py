"""Frozen features of a run's encoder in a file: a row for each item, crop or token, with where it lies.

- tiles, reading and normalisation are those of predictions (predict.py), and so are the features of tokens where tiles
  overlap: averages
- pooled features are those of whole crops, as the model pools them; an item's is the mean of its crops
- a row has `features`, the number of its `item`, its place in voxels of that item (the centre of what it is of; the
  first voxel is at 0) and that place as `position` in the item's unit
- rows are written as they are made, to safetensors or Zarr by the ending; what is kept does not grow with the data
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail import disk
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.infer.engine import Engine, Wishes
from vitrail.infer.eyes import Eyes
from vitrail.infer.places import Frame, frame_of
from vitrail.infer.predict import Opened, digest, whole
from vitrail.infer.tables import ENDINGS, Columns, writing
from vitrail.recipe.load import find_recipe
from vitrail.training.journal import Progress
from vitrail.training.run import joined
from vitrail.training.setup import reading_threads, use_cache
from vitrail.weights.runs import list_or_refuse, read_model, stored_recipe, with_checkpoint

Per = Literal["item", "crop", "token"]


def embed(
    run: str | Path,
    path: str | Path,
    *,
    out: str | Path,
    per: Per = "item",
    checkpoint: str | int | None = None,
    weights: str | None = None,
    overlap: float | None = None,
    planes: str | None = None,
    dtype: str | None = None,
    batch: int | None = None,
    memory: float = 2.0,
    compute: str | None = None,
    kind: str | None = None,
    settings: Sequence[str] = (),
    trust: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Write features of the data at a path to `out`, and return facts of the making.

    `memory` is in GiB; `settings` are keys of the input as of an entry of data, key=value. The rest is as
    `vitrail embed --help` explains it.
    """
    target = Path(out)
    list_or_refuse(run, checkpoint)
    recipe = find_recipe(run)
    if target.suffix not in ENDINGS:
        raise UserError(f"out: {target} tells no format; give a path that ends in {' or '.join(ENDINGS)}")
    if per not in ("item", "crop", "token"):
        raise UserError(f"per: {per!r} is not known; choose item, crop or token")
    if not memory > 0:
        raise UserError(f"memory: {memory} GiB must be above 0")
    disk.check_free(target)
    room = int(memory * 2**30)
    with trusted(trust), joined(whole(recipe), trust=trust, out=str(out)) as (place, watchdog):
        if place.world.size > 1:
            raise UserError(
                "embed: it is made by one process; start it without a launcher, or share the work of many ranks with "
                "vitrail predict --write embeddings"
            )
        use_cache(min(recipe.data.cache_mib << 20, room))

        def make(at: Path, manifest: dict[str, Any]) -> dict[str, Any]:
            eyes = Eyes(run, manifest, stored_recipe(manifest))
            eyes.check_encoder()
            seen = Opened(eyes, str(path), write="embeddings", dtype=dtype, planes=planes, kind=kind, settings=settings)
            if per != "token":
                seen.form = dataclasses.replace(seen.form, on="item")
            share = overlap if overlap is not None else 0.0
            wishes = Wishes(overlap=share, batch=batch, memory=room)
            rows = Rows(seen, wishes, per)
            looking = eyes.on(read_model(at, manifest, weights), place.device, compute)
            threads = {"workers": max(1, reading_threads(recipe, place)), "prefetch": recipe.data.prefetch}
            facts = {
                "run": recipe.run.name,
                "step": manifest["step"],
                "checkpoint": digest(manifest),
                "input": str(path),
                **rows.facts(),
            }

            def beat() -> None:
                watchdog.beat(manifest["step"], "embedding")

            with disk.told(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with (
                    Progress(rows.number, enabled=not quiet) as progress,
                    writing(target, rows.columns(), rows.number, facts) as write,
                ):
                    for block in rows.made(looking, beat, **threads):
                        write(block._asdict())
                        progress.update(progress.step + len(block.item))
            return {
                "out": str(target),
                "per": per,
                "rows": rows.number,
                "features": seen.form.values,
                "items": rows.engine.tiling.items,
                "step": manifest["step"],
                "notes": seen.notes,
            }

        return with_checkpoint(run, checkpoint, make)


class Block(NamedTuple):
    """Some rows."""

    features: np.ndarray  # [n, D]
    item: np.ndarray  # [n]
    voxel: np.ndarray  # [n, axes]
    position: np.ndarray  # [n, axes]


class Rows:
    """The rows of an input."""

    def __init__(self, seen: Opened, wishes: Wishes, per: Per):
        self.seen, self.per = seen, per
        self.engine = Engine(seen.eyes, seen.form, seen.dataset, wishes, name=seen.path)
        tiling = self.engine.tiling
        if per == "token":
            self.number = sum(math.prod(tiling.cells(item)) for item in range(tiling.items))
        else:
            self.number = tiling.tiles if per == "crop" else tiling.items
        self._frames: dict[int, Frame] = {}

    def columns(self) -> Columns:
        """Return type and shape of each column, in the order of a file: the widest numbers first."""
        axes, form = len(self.seen.source.axes), self.seen.form
        return {
            "position": (np.dtype(np.float64), (axes,)),
            "voxel": (np.dtype(np.float32), (axes,)),
            "item": (np.dtype(np.int32), ()),
            "features": (form.dtype, (form.values,)),
        }

    def facts(self) -> dict[str, Any]:
        """Return what readers need to know of the rows."""
        source, items = self.seen.source, self.seen.source.items
        return {
            "per": self.per,
            "rows": self.number,
            "items": [item.name for item in items],
            "axes": list(source.axes),
            "unit": items[0].unit,
            "spacing": list(items[0].spacing),
            "crop": list(self.engine.views[0][0].window),
            "cell": list(self.engine.tiling.cut.cell or ()),
        }

    def made(self, looking: Any, beat: Any, **threads: int) -> Iterator[Block]:
        """Yield all rows, a few at a time."""
        engine, tiling = self.engine, self.engine.tiling
        if self.per == "crop":
            for tile, values in engine.tiles(looking, tick=beat, **threads):
                window = self.engine.views[tile.view][tile.item].window
                centre = np.array([s + (w - 1) / 2 for s, w in zip(tile.start, window, strict=True)])
                yield self._block(tile.item, values.flatten().cpu().numpy()[None], centre[None])
            return
        for row in engine.rows(looking, range(tiling.rows), tick=beat, **threads):
            item, box = tiling.place(row.number)
            found = engine.finish(row)
            if self.per == "item":
                centre = (np.array(self.seen.source.items[item].shape) - 1) / 2
                yield self._block(item, found.reshape(1, -1), centre[None])
                continue
            cell = np.array(tiling.cut.cell)
            cells = np.stack(np.meshgrid(*[np.arange(b.start, b.stop) for b in box], indexing="ij"), axis=-1)
            centres = cells.reshape(-1, len(box)) * cell + (cell - 1) / 2
            yield self._block(item, np.ascontiguousarray(found.reshape(len(found), -1).T), centres)

    def _block(self, item: int, features: np.ndarray, voxel: np.ndarray) -> Block:
        if item not in self._frames:
            self._frames = {item: frame_of(self.seen.source, item, (), (1,) * voxel.shape[1])}  # items come in order
        frame = self._frames[item]
        position = voxel * np.array(frame.spacing) + np.array(frame.origin or (0.0,) * voxel.shape[1])
        return Block(
            features.astype(self.seen.form.dtype, copy=False),
            np.full(len(voxel), item, np.int32),
            voxel.astype(np.float32),
            position,
        )
