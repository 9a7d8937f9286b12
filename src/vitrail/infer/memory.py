"""Predictions of values in memory: what `model.predict(array)` of a loaded model gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.data.dataset import Dataset
from vitrail.data.source import Item
from vitrail.data.stored import by
from vitrail.errors import UserError
from vitrail.infer.engine import Engine, Wishes, in_bytes
from vitrail.infer.eyes import Eyes
from vitrail.infer.mutex import segment
from vitrail.infer.padded import padded
from vitrail.models.model import Model

NAME = "the array"


class Arrays:
    """Arrays in memory [C, *S] as a source."""

    class_names: tuple[str, ...] = ()

    def __init__(self, arrays: Sequence[np.ndarray], axes: Sequence[str], variables: Sequence[str], slices: str | None):
        self.arrays, self.axes, self.variables = list(arrays), tuple(axes), tuple(variables)
        self.dtype = arrays[0].dtype
        across = None if slices is None else self.axes.index(slices)
        self.items = [
            Item(
                name=NAME,
                shape=array.shape[1:],
                chunk=(1,) * (array.ndim - 1),
                origin=(0,) * (array.ndim - 1),
                spacing=(1.0,) * (array.ndim - 1),
                unit=None,
                slices=across,
            )
            for array in arrays
        ]

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        return self.arrays[item][(slice(None), *region)]

    def describe(self) -> dict[str, Any]:
        return {"kind": "array", "path": NAME}


@dataclass(frozen=True)
class Held:
    """An entry of data for what is in memory."""

    source: Any
    path: str = NAME
    weight: float = 1.0

    def open(self) -> Any:
        return self.source


def predict_values(
    eyes: Eyes,
    model: Model,
    values: Any,
    *,
    write: str | None = None,
    dtype: str | None = None,
    planes: str | None = None,
    flips: Sequence[int] | bool = (),
    compute: str | None = None,
    **wishes: Any,
) -> Any:
    """Predict from raw values [*S], [C, *S] or [N, C, *S]; NumPy gives NumPy, a tensor gives a tensor.

    `flips` are axes of a sample, or True for all; `compute` is fp32 or bf16; the wishes are overlap, blend, batch and
    memory, as `vitrail predict --help` explains them.
    """
    given = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    ndim = eyes.config.ndim + (planes is not None)
    arrays, one = split(given, ndim, len(eyes.variables))
    axes = ("z", "y", "x")[-ndim:] if ndim <= 3 else tuple(f"axis{n}" for n in range(ndim))
    for name in planes or "":
        if name not in axes:
            raise UserError(f"planes: {planes!r} names {name!r}, which is no axis of {', '.join(axes)}")
    if given.dtype.kind not in "biuf":
        raise UserError(f"{NAME} holds {given.dtype}; give whole numbers or floats")
    sources = [Arrays(arrays, axes, eyes.variables, slices) for slices in (planes or [None])]
    entries = [Held(s if eyes.recipe.data.fit is not None else padded(s, eyes.crop)[0]) for s in sources]
    form = eyes.form(write, dtype, arrays[0].dtype if arrays[0].dtype.kind != "b" else np.dtype(np.uint8))
    flips = tuple(range(eyes.config.ndim)) if flips is True else tuple(flips or ())
    dataset = Dataset(entries, eyes.crop, where="array", settings=eyes.settings())
    instances = form.write == "instances"  # which are made of affinities, of the voxels that are there
    asked = Wishes(flips=flips, **wishes)
    engine = Engine(eyes, in_bytes(form, eyes) if instances else form, dataset, asked, whole=True, name=NAME)
    cells = [engine.tiling.cut.cells(array.shape[1:]) for array in arrays]
    if 0 in cells[0]:
        raise UserError(f"{NAME} is smaller than a patch of the model {by(engine.tiling.cut.cell or ())}; give more")
    looking = eyes.on(model, next(model.parameters()).device, compute)
    training = model.training
    try:
        model.eval()
        found = [engine.finish(row) for row in engine.rows(looking, range(engine.tiling.rows), workers=1, prefetch=2)]
    finally:
        model.train(training)
    for place, shape in enumerate(cells):
        within: Any = (..., *(slice(0, n) for n in shape))  # what was padded is cut off
        found[place] = found[place][within]
        if instances:
            found[place] = segment(found[place], engine.offsets, asked.threshold, asked.smallest)
    if form.on == "item":
        found = [each.reshape(-1) for each in found]
    made = found[0] if one else np.stack(found)
    return torch.from_numpy(made) if isinstance(values, torch.Tensor) else made


def split(values: np.ndarray, ndim: int, channels: int) -> tuple[list[np.ndarray], bool]:
    """Return the items [C, *S] that are given, and whether there is but one, without an axis of items."""
    shape = list(values.shape)
    if values.ndim == ndim and channels == 1:
        return [values[None]], True
    if values.ndim == ndim + 1 and shape[0] == channels:
        return [values], True
    if values.ndim == ndim + 2 and shape[1] == channels and shape[0]:
        return list(values), False
    axes = ", ".join(("z", "y", "x")[-ndim:])
    forms = [*([f"[{axes}]"] if channels == 1 else []), f"[{channels}, {axes}]", f"[items, {channels}, {axes}]"]
    raise UserError(
        f"{NAME} has the shape {shape}, but the model takes {channels} "
        f"channel{'s' * (channels != 1)}: give {', '.join(forms[:-1])} or {forms[-1]}"
        + ("; channels come first" if shape and shape[-1] == channels and values.ndim > ndim else "")
    )
