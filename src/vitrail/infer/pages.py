"""The page of pictures of a folder of samples: a row a class, a column a sample.

Of volumes the middle slices in three directions are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.disk import told
from vitrail.infer.folder import Kind, read_sample
from vitrail.report.figures import SOFT, Sheet, shorten
from vitrail.report.views import Panel, colour_labels, draw_page, find_range, label_key, paint, shade

GRID = "grid.png"
MOST_ROWS, MOST_COLUMNS = 20, 10
_DPI = 130
_SMALLEST = 64  # pixels of a picture's longer side
_LARGEST = 256


def draw_grid(
    path: Path,
    rows: Sequence[tuple[str, Sequence[np.ndarray]]],
    *,
    title: str,
    caption: str = "",
    heads: Sequence[str] = (),
    spacing: Sequence[float] = (),
    value_range: tuple[float, float] | None = None,
) -> Path:
    """Draw rows of (name, samples [C, *S]); three channels are colours, of any other number the first is shown."""
    cuts = [(name, [_cut(sample, spacing) for sample in samples]) for name, samples in rows]
    span = find_range([cut for _, row in cuts for sample in row for cut in sample], value_range)
    strips = []
    for name, row in cuts:
        cells = [_resize(_strip([paint(cut, span) for cut in sample])) for sample in row]
        strips.append((name, _strip(cells)))
    return _draw(strips, title, caption, heads).put(path)


def _cut(sample: np.ndarray, spacing: Sequence[float]) -> list[np.ndarray]:
    """Cut a sample to [C, H, W], C 1 or 3, or a volume to its middle slices; voxels are as long as in space."""
    sample = np.asarray(sample, np.float32)
    if len(sample) != 3:
        sample = sample[:1]
    spacing = tuple(spacing) or (1.0,) * (sample.ndim - 1)
    for axis, size in enumerate(spacing, start=1):
        length = max(1, round(sample.shape[axis] * min(size / min(spacing), 8.0)))
        places = (np.arange(length) + 0.5) * sample.shape[axis] / length
        sample = sample.take(places.astype(int), axis)
    if sample.ndim == 3:
        return [sample]
    z, y, x = (size // 2 for size in sample.shape[1:])
    return [sample[:, z], sample[:, :, y], sample[:, :, :, x]]


def _resize(picture: np.ndarray) -> np.ndarray:
    """Enlarge small pictures [H, W, 3] by a whole number, so that their pixels show; thin out large ones."""
    longest = max(picture.shape[:2])
    if longest < _SMALLEST:
        times = -(-_SMALLEST // longest)
        return picture.repeat(times, axis=0).repeat(times, axis=1)
    step = -(-longest // _LARGEST)
    return picture[::step, ::step]


def _strip(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Put pictures side by side, with white between them."""
    high, wide = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    gap = max(1, wide // 24)
    strip = np.ones((high, len(pictures) * (wide + gap) - gap, 3), np.float32)
    for place, picture in enumerate(pictures):
        left = place * (wide + gap)
        strip[: picture.shape[0], left : left + picture.shape[1]] = picture
    return strip


def _draw(strips: Sequence[tuple[str, np.ndarray]], title: str, caption: str, heads: Sequence[str]) -> Sheet:
    longest = max(len(name) for name, _ in strips)
    left, gap, top = 0.2 + 0.075 * min(longest, 24), 0.05, 0.45 + (0.2 if heads else 0.0)
    widest = max(strip.shape[1] for _, strip in strips)
    inch = max(90.0, widest / 9.0)  # pixels of a picture
    foot = 0.12 + 0.17 * len(caption.splitlines())
    high = top + sum(strip.shape[0] / inch + gap for _, strip in strips) + foot
    sheet = Sheet(max(left + widest / inch + 0.2, 5.0), high, dpi=_DPI)
    sheet.text(0.15, 0.2, title, size=10, weight="bold")
    for number, words in enumerate(heads):
        sheet.text(left + (number + 0.5) * (widest / inch) / len(heads), top - 0.12, words, ha="center")
    for name, strip in strips:
        across, tall = strip.shape[1] / inch, strip.shape[0] / inch
        sheet.image(strip, left, top, across, tall, smooth=True)
        sheet.text(left - 0.1, top + tall / 2, shorten(name, 24), ha="right")
        top += tall + gap
    sheet.text(0.15, high - 0.08, caption, size=7.5, va="bottom", color=SOFT)
    return sheet


def draw_samples(folder: Path, manifest: Mapping[str, Any], kind: Kind, beside: Mapping[str, Kind]) -> Path:
    """Draw a row a class; or a row a sample, between what it was made from and what was there in truth."""
    files = manifest["files"]
    most = MOST_COLUMNS if len(kind.axes) == 2 else 4

    def read(entry: Mapping[str, Any], name: str = "path") -> np.ndarray:
        return read_sample(folder / entry[name], beside.get(name, kind))

    heads: tuple[str, ...] = ()
    if beside:
        heads = ("condition", "sample", "truth")
        trios = [[read(entry, name) for name in ("condition", "path", "truth")] for entry in files[:8]]
        rows = [(str(e.get("class", e["counter"])), trio) for e, trio in zip(files[:8], trios, strict=True)]
    elif "class" in files[0]:
        classes = list(dict.fromkeys(entry["class"] for entry in files))[:MOST_ROWS]
        chosen = [(name, [entry for entry in files if entry["class"] == name][:most]) for name in classes]
        rows = [(name, list(map(read, entries))) for name, entries in chosen]
    else:
        shown = files[: most * 6]
        rows = [("", list(map(read, shown[i : i + most]))) for i in range(0, len(shown), most)]
    return draw_grid(
        folder / GRID,
        rows,
        title=_title(manifest),
        caption=_caption(manifest),
        heads=heads,
        spacing=kind.spacing if len(set(kind.spacing)) > 1 else (),
        value_range=kind.value_range,
    )


def draw_scales(folder: Path, manifests: Sequence[Mapping[str, Any]], kind: Kind) -> None:
    """Draw a row a guidance: the same samples by each of them, which lie in folders of their own."""
    most = MOST_COLUMNS if len(kind.axes) == 2 else 4
    rows = []
    for manifest in manifests:
        files = [Path(manifest["out"]) / entry["path"] for entry in manifest["files"][:most]]
        rows.append((f"guidance {manifest['settings']['guidance']:g}", [read_sample(path, kind) for path in files]))
    first = manifests[0]
    heads = tuple(shorten(str(entry.get("class", "")), 12) for entry in first["files"][:most])
    with told(folder):
        draw_grid(
            folder / GRID,
            rows,
            title=_title(first),
            caption=_caption(first, guided=False),
            heads=heads if any(heads) else (),
            spacing=kind.spacing if len(set(kind.spacing)) > 1 else (),
            value_range=kind.value_range,
        )


def draw_features(
    path: Path,
    samples: Sequence[tuple[str, np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
    *,
    names: Sequence[str],
    title: str,
) -> Path:
    """Draw a row a sample: its image [C, *S], colours of its features [*S, 3], and maps of labels [*S] over it.

    Of volumes the middle slice across the first axis is shown.
    """
    rows: list[list[Panel]] = []
    for words, image, colours, maps in samples:
        while colours.ndim > 3:
            image, colours = image[:, image.shape[1] // 2], colours[colours.shape[0] // 2]
            maps = {name: labels[labels.shape[0] // 2] for name, labels in maps.items()}
        high, wide = colours.shape[:2]
        picture = shade((image if len(image) == 3 else image[:1])[:, :high, :wide])
        row = [Panel(picture, words), Panel(colours, "its features, as colours")]
        row += [Panel(colour_labels(picture, labels[:high, :wide]), name) for name, labels in maps.items()]
        if rows and not maps and len(rows[-1]) < 4:  # two samples beside each other
            rows[-1] += row
        else:
            rows.append(row)
    caption = "colours: the first three principal components of the tokens, on the grid of patches"
    key = label_key(dict(enumerate(names))) if any(maps for *_, maps in samples) else ()
    return draw_page(path, rows, title=title, caption=caption, key=key, tile=1.6)


def _title(manifest: Mapping[str, Any]) -> str:
    weights = {"ema": "averaged", "raw": "raw"}[manifest["weights"]]
    return f"{manifest['run']}, step {manifest['step']}, {weights} weights"


def _caption(manifest: Mapping[str, Any], *, guided: bool = True) -> str:
    settings = manifest["settings"]
    words = [f"{settings['sampler']} sampler, {settings['steps']} steps, seed {manifest['seed']}"]
    if guided and settings["guidance"] != 1:
        words.append(f"guidance {settings['guidance']:g}")
        if tuple(settings["interval"]) != (0.0, 1.0):
            words.append("on {:g} to {:g} of the way".format(*settings["interval"]))
    return ", ".join(words)
