"""A picture of a prediction: the middle of the first item, as it was read and as it was written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.source import Source
from vitrail.data.sources import guess_kind
from vitrail.errors import UserError
from vitrail.infer.eyes import Form
from vitrail.recipe import kinds
from vitrail.report.figures import check_picture

MOST = {2: 512, 3: 128}  # voxels along an axis, by the number of axes
SLICES = 4  # of volumes
MOST_COLOURS = 250


def check(path: str | Path, form: Form) -> None:
    """Refuse what cannot be drawn, before the work."""
    if form.on != "voxels":
        raise UserError(f"picture: {form.write} are not drawn here; ask for classes, probabilities or reconstructions")
    if form.write == "affinities":
        raise UserError("picture: affinities are not drawn here; ask for instances")
    check_picture(path)


def draw(path: str | Path, written: Path, source: Source, form: Form, classes: Sequence[str], title: str) -> Path:
    """Draw what was read of the first item, and what was written of it."""
    from vitrail.report.blocks import About, colour_places
    from vitrail.report.panels import pairs_panel, segmentation_panel
    from vitrail.training.shown import units_of

    kind, item = guess_kind(str(written)), source.items[0]
    keys = {"axes": "czyx"} if kind == "nifti" and form.channels is not None else {}  # channels, and no moments
    made = kinds.find("source", kind)(path=str(written), **keys).open()
    most = MOST.get(len(item.shape), 64)
    box = tuple(slice((n - min(n, most)) // 2, (n + min(n, most)) // 2) for n in item.shape)
    image, found = source.read(0, box), made.read(0, box)
    caption = f"the middle of {item.name}: voxels {', '.join(f'{b.start} to {b.stop - 1}' for b in box)}"
    names = tuple(source.variables)
    colours = (0, 1, 2) if len(names) == 3 and source.dtype == np.uint8 else colour_places(names)
    about = About(item.name, "", item.spacing, item.unit, names, units_of(source), colours)
    if form.write == "reconstructions":
        pair = (image.astype(np.float32), found.astype(np.float32))
        return pairs_panel(path, [pair], abouts=[about], title=title, caption=caption, slices=SLICES)
    labels = found.argmax(axis=0) if form.write == "probabilities" else found[0]
    caption += "; the likeliest class of each" if form.write == "probabilities" else ""
    if form.write == "instances":  # which share colours, as none has a name
        labels, classes = np.where(labels > 0, (labels.astype(np.int64) - 1) % MOST_COLOURS + 1, 0), [""] * MOST_COLOURS
    row: dict[str, Any] = {"image": image, "prediction": labels.astype(np.int64), "about": about}
    return segmentation_panel(path, [row], names=classes, title=title, caption=caption, slices=SLICES)
