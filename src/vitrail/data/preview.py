"""What a model will see, as one picture: windows as they lie in their files, augmented, cut into tokens, masked.

Everything comes from the parts that a training uses: its sampler, loader and objective, with the draws of its seed.
Volumes show the middle plane of their first axis; of several variables that are no colours the first is shown.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.picture import by, name_of, scale_bar, variable_groups
from vitrail.data.source import Item, Source
from vitrail.draws import Draws

if TYPE_CHECKING:
    from vitrail.report.samples import Panel


class Boxes(NamedTuple):
    """Where the tokens of one sample lie, without padding and other variables' copies."""

    low: np.ndarray  # [N, ndim] first voxels
    high: np.ndarray  # one beyond the last
    numbers: np.ndarray  # [N] their places in the sequence
    held: np.ndarray | None = None  # [C, *crop] what their values say of the image, where that is known


def preview(
    path: str | Path,
    *,
    sources: Sequence[Source],
    loader: Any,
    objective: Any,
    seed: int,
    samples: int,
    batch: int,
    title: str,
) -> dict[str, Any]:
    """Draw samples of the first steps of a run, whose batches are so large, to a PNG; returns what they are."""
    from vitrail.report.files import check_picture
    from vitrail.report.panels import HIDDEN
    from vitrail.report.samples import draw_page, label_key

    path = check_picture(path)
    rows: list[list[Panel]] = []
    facts: list[dict[str, Any]] = []
    pair = 1 if batch % 2 else 2  # samples that are mixed with each other follow each other
    for step in range(-(-samples // pair)):
        # Another place of each batch: the same ones would show the same lanes, which stay on a block for a while.
        first = step * batch + step * pair % batch
        part: Batch = loader.load(range(first, first + pair), whole=True)
        draws = Draws(seed, part.counters)
        inputs, targets = objective.prepare(part, draws)
        visible = _visible(objective, targets, draws)
        for row in range(min(pair, samples - len(rows))):
            sample = loader.samples[row]  # which may stand for one that is bad
            source = sources[sample.source]
            item = source.items[sample.item]
            boxes = token_boxes(objective.model, inputs, targets, row)
            seen = None if visible is None or boxes is None else np.isin(boxes.numbers, visible[row].cpu().numpy())
            size = sample.window or tuple(part.values.shape[2:])
            facts.append(
                {
                    "counter": part.counters[row],
                    "item": item.name,
                    "start": list(sample.start),
                    "window": list(size),
                    "shape": list(part.values.shape[1:]),
                    "variables": list(part.variables),
                    "tokens": 0 if boxes is None else len(boxes.numbers),
                    "visible": None if seen is None else int(seen.sum()),
                    "label": _label(objective, part, row),
                }
            )
            raw = source.read(sample.item, tuple(slice(a, a + n) for a, n in zip(sample.start, size, strict=True)))
            if item.slices is not None:
                raw = raw.squeeze(item.slices + 1)
            rows.append(_panels(source, item, raw, part, row, boxes, seen, facts[-1]))
    one, hidden = facts[0], any(fact["visible"] is not None for fact in facts)
    words = f"samples of {by(one['shape'][1:])}; {', '.join(one['variables'][:6])}"
    words += ", ..." if len(one["variables"]) > 6 else ""
    if one["tokens"]:
        words += f"; {one['tokens']:,} tokens"
        words += f", of which the model is shown {one['visible']:,}" if hidden else ""
    key: list[tuple[str, tuple[float, ...]]] = [("hidden from the model", HIDDEN)] if hidden else []
    if part.labels is not None and part.labels.ndim > 1:
        key += label_key(dict(enumerate(objective.names)))
    drawn = draw_page(path, rows, title=title, caption=words, key=key, tile=2.4)
    return {"picture": str(drawn), "samples": facts}


def _panels(
    source: Source,
    item: Item,
    raw: np.ndarray,
    batch: Batch,
    row: int,
    boxes: Boxes | None,
    seen: np.ndarray | None,
    fact: dict[str, Any],
) -> "list[Panel]":
    from vitrail.report.panels import HIDDEN
    from vitrail.report.samples import Panel, colour_labels, shade

    variables = variable_groups(batch.variables or source.variables)[0][1]
    spacing = [s for axis, s in enumerate(item.spacing) if axis != item.slices]
    wanted = [s * f for axis, (s, f) in enumerate(zip(item.spacing, item.scale, strict=True)) if axis != item.slices]
    read, values = middle(raw[variables]), middle(batch.values[row].float().cpu().numpy()[variables])
    aspect = wanted[-2] / wanted[-1]
    label = f"  [{fact['label']}]" if fact["label"] else ""
    position = ", ".join(f"{axis} {start}" for axis, start in zip(source.axes, fact["start"], strict=True))
    panels = [
        Panel(
            shade(read),
            f"{name_of(item, 34)}{label}\n{by(fact['window'])} from {position}",
            spacing[-2] / spacing[-1],
            scale_bar(read.shape[-1], spacing[-1], item.unit),
        )
    ]
    picture = shade(values)
    # Turned about, a sample's axes may differ in scale from one to the next: the bar is that of whole voxels.
    panels.append(Panel(picture, f"\naugmented: {by(fact['shape'][1:])}", aspect))
    if batch.labels is not None and batch.labels.ndim > 1:
        classes = middle(batch.labels[row].cpu().numpy()[None])[0]
        panels.append(Panel(colour_labels(picture, classes), "\nlabels", aspect))
    if boxes is None:
        return panels
    plane = batch.values.shape[2] // 2 if batch.values.ndim == 5 else None
    cut = (
        np.ones(len(boxes.numbers), bool) if plane is None else (boxes.low[:, 0] <= plane) & (plane < boxes.high[:, 0])
    )
    low, high = boxes.low[cut][:, -2:], boxes.high[cut][:, -2:]  # y x
    held = picture if boxes.held is None else shade(middle(boxes.held[variables]))
    panels.append(Panel(held, "\ncut into tokens", aspect, lines=outlines(low, high)))
    if seen is not None:
        shown = held.copy()
        for (top, left), (bottom, right) in zip(low[~seen[cut]], high[~seen[cut]], strict=True):
            shown[top:bottom, left:right] = HIDDEN
        panels.append(Panel(shown, "\nshown to the model", aspect))
    return panels


def token_boxes(model: Any, inputs: dict[str, Any], targets: Any, row: int) -> Boxes | None:
    """The tokens of a sample, of the first variable where each has its own; None for a model without tokens."""
    tokens = getattr(targets, "tokens", None)
    coordinates = inputs.get("coordinates") if tokens is None else tokens.coordinates
    if coordinates is None:
        return None
    encoder = getattr(model, "encoder", model)
    sizes = inputs.get("sizes") if tokens is None else tokens.sizes
    valid = inputs.get("valid") if tokens is None else tokens.valid
    copies = len(inputs["variables"]) if getattr(encoder, "separate", False) else 1
    number = coordinates.shape[1] // (copies if tokens is None else tokens.separate)
    centre = coordinates[row, :number].float().cpu().numpy()
    patch = np.broadcast_to(np.asarray(encoder.patch, np.float32), centre.shape[1:])
    side = np.broadcast_to(patch, centre.shape) if sizes is None else sizes[row, :number].float().cpu().numpy()
    keep = np.ones(number, bool) if valid is None else valid[row, :number].cpu().numpy()
    low = np.rint(centre - side / 2).astype(int)[keep]
    held = None
    if tokens is not None and tokens.tree is not None:
        held = tokens.paint(tokens.values)[row].float().cpu().numpy()
    return Boxes(low, low + np.rint(side[keep]).astype(int), np.flatnonzero(keep), held)


def _visible(objective: Any, targets: Any, draws: Draws) -> Tensor | None:
    """Numbers of the tokens that a masked model is shown [B, n], as its objective draws them."""
    tokens = getattr(targets, "tokens", None)
    if tokens is None or not hasattr(objective, "split"):
        return None
    return objective.split(tokens, draws, True)[0]


def _label(objective: Any, batch: Batch, row: int) -> str | None:
    """The class of a sample, or the shares of several where samples are mixed."""
    if batch.labels is None or batch.labels.ndim > 1:
        return None
    if batch.soft is not None:
        shares = batch.soft[row].tolist()
        return " + ".join(f"{share:.0%} {objective.names[i]}" for i, share in enumerate(shares) if share > 0.005)
    return str(objective.names[int(batch.labels[row])])


def middle(values: np.ndarray) -> np.ndarray:
    """[C, H, W]: an image as it is, of a volume the middle plane."""
    return values if values.ndim == 3 else values[:, values.shape[1] // 2]


def outlines(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The upper and left line of each box [N, 2] (y, x); its neighbours draw the others."""
    top, left, bottom, right = low[:, 0], low[:, 1], high[:, 0], high[:, 1]
    across = np.stack([np.stack([left, top], 1), np.stack([right, top], 1)], 1)
    down = np.stack([np.stack([left, top], 1), np.stack([left, bottom], 1)], 1)
    return np.concatenate([across, down]).astype(float)  # 2N, from and to, (x, y)
