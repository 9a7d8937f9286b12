"""Look at a source before training on it: its numbers, and a picture with a scale bar."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.source import Item, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLE = 64  # voxels on each side of a sampled crop
SHOWN = 1024  # voxels of an axis that a picture shows at most, from the middle
BINS = 64


def inspect(source: Source, *, samples: int = 8) -> dict[str, Any]:
    """What the source says of itself, and what a few crops at fixed random places hold."""
    crops = [_read_sample(source, number) for number in range(samples)]
    item = source.items[0]
    report: dict[str, Any] = {
        "items": len(source.items),
        "shape": list(item.shape),
        "axes": list(source.axes),
        "spacing": list(item.spacing),
        "unit": item.unit,
        "dtype": str(source.dtype),
        "variables": list(source.variables),
        "chunk": list(item.chunk),
        "levels": [],
    }
    report |= source.describe()
    constant = [all(values.min() == values.max() for values in crop) for crop in crops]
    report["samples"] = samples
    report["constant_percent"] = 100 * sum(constant) / samples if samples else 0.0
    report["statistics"] = {
        name: _summarize(np.concatenate([crop[number].ravel() for crop in crops]))
        for number, name in enumerate(source.variables)
        if samples
    }
    return report


def _read_sample(source: Source, number: int) -> np.ndarray:
    """One crop; which one follows from its number alone, so that a second look shows the same."""
    rng = np.random.default_rng([number, 7])
    index = int(rng.integers(len(source.items)))
    starts = [int(rng.integers(max(1, n - SAMPLE + 1))) for n in source.items[index].shape]
    window = (slice(a, min(a + SAMPLE, n)) for a, n in zip(starts, source.items[index].shape, strict=True))
    return source.read(index, tuple(window))


def _summarize(values: np.ndarray) -> dict[str, Any]:
    """Plain numbers of one variable; what is not finite is counted and left out."""
    finite = values[np.isfinite(values)].astype(np.float64) if values.dtype.kind == "f" else values.astype(np.float64)
    if not finite.size:
        return {"min": None, "max": None, "mean": None, "std": None, "not_finite_percent": 100.0, "histogram": None}
    low, high = float(finite.min()), float(finite.max())
    counts, edges = np.histogram(finite, bins=BINS, range=(low, high if high > low else low + 1))
    return {
        "min": low,
        "max": high,
        "mean": float(finite.mean()),
        "std": float(finite.std()),
        "not_finite_percent": 100 * (1 - finite.size / values.size),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }


def picture(source: Source, path: str | Path, *, images: int = 8) -> Path:
    """Save a PNG: the three middle planes of a volume, or the first few images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _planes(source) if len(source.axes) == 3 else _first_images(source, images)
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    tallest = max(pixels.shape[0] * across[0] / (pixels.shape[1] * across[1]) for _, pixels, across in panels)
    figure = Figure(figsize=(3.6 * columns, (3.6 * min(tallest, 2) + 0.6) * rows), layout="compressed", dpi=130)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    item = source.items[0]
    for axes, (title, pixels, spacing) in zip(grid.flat, panels, strict=False):
        low, high = np.nanpercentile(pixels, (0.5, 99.5)) if np.isfinite(pixels).any() else (0.0, 1.0)
        shades = np.clip((pixels - low) / max(high - low, 1e-12), 0, 1)
        axes.imshow(shades, cmap="gray", vmin=0, vmax=1, aspect=spacing[0] / spacing[1], interpolation="nearest")
        axes.set_title(title, fontsize=9, parse_math=False)
        _draw_scale_bar(axes, pixels.shape[1], spacing[1], item.unit)
    if len(source.axes) == 3:
        figure.suptitle(f"{item.name}: {_sizes(item)}", fontsize=10, parse_math=False)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, bbox_inches="tight", pad_inches=0.08)
    return target


Panel = tuple[str, np.ndarray, tuple[float, float]]  # title, pixels [y, x] or [y, x, 3], spacing (y, x)


def _planes(source: Source) -> list[Panel]:
    item = source.items[0]
    middle = [slice(max(0, (n - SHOWN) // 2), max(0, (n - SHOWN) // 2) + min(n, SHOWN)) for n in item.shape]
    panels = []
    for axis, name in enumerate(source.axes):
        at = item.shape[axis] // 2
        window = [slice(at, at + 1) if i == axis else part for i, part in enumerate(middle)]
        values = source.read(0, tuple(window)).squeeze(axis + 1)  # [C, a, b]
        rest = [i for i in range(3) if i != axis]
        title = f"{name} = {at}   ({source.axes[rest[0]]} down, {source.axes[rest[1]]} right)"
        panels.append((title, _pixels(source, values), (item.spacing[rest[0]], item.spacing[rest[1]])))
    return panels


def _first_images(source: Source, count: int) -> list[Panel]:
    """Images spread over the whole source."""
    total = len(source.items)
    panels = []
    for index in sorted({i * total // count for i in range(min(count, total))} if total > count else range(total)):
        item = source.items[index]
        window = (slice(max(0, (n - SHOWN) // 2), max(0, (n - SHOWN) // 2) + min(n, SHOWN)) for n in item.shape)
        values = source.read(index, tuple(window))
        title = item.name if len(item.name) <= 34 else f"...{item.name[-31:]}"
        panels.append((f"{title}\n{_sizes(item)}", _pixels(source, values), (item.spacing[0], item.spacing[1])))
    return panels


def _pixels(source: Source, values: np.ndarray) -> np.ndarray:
    """Colour where the variables are colours, else the first variable."""
    colours = ("red", "green", "blue")
    if set(colours) <= set(source.variables):
        return np.stack([values[source.variables.index(c)] for c in colours], axis=-1).astype(np.float32)
    return values[0].astype(np.float32)


def _draw_scale_bar(axes: "Axes", width: int, spacing: float, unit: str | None) -> None:
    """A bar of a round length, about a quarter of the picture, in white on black so that it shows on anything."""
    length = round_length(width * spacing / 4)
    end = length / spacing / width
    axes.plot([0.04, 0.04 + end], [0.05, 0.05], transform=axes.transAxes, color="black", lw=5, solid_capstyle="butt")
    axes.plot([0.042, 0.038 + end], [0.05, 0.05], transform=axes.transAxes, color="white", lw=3, solid_capstyle="butt")
    text = f"{length:g} pixels" if unit is None and spacing == 1 else f"{length:g} {_short(unit)}"
    style: dict[str, Any] = {"boxstyle": "round,pad=0.2", "facecolor": "black", "alpha": 0.6, "edgecolor": "none"}
    axes.text(0.05, 0.085, text, transform=axes.transAxes, color="white", fontsize=8, va="bottom", bbox=style)


def round_length(wanted: float) -> float:
    """The largest of 1, 2 or 5 times a power of ten that is not above what is wanted."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return max(step * power for step in (1, 2, 5) if step * power <= wanted * (1 + 1e-9))


def _short(unit: str | None) -> str:
    names = {
        "nanometer": "nm",
        "micrometer": "µm",
        "millimeter": "mm",
        "centimeter": "cm",
        "meter": "m",
        "angstrom": "Å",
    }
    return "(unit unknown)" if unit is None else names.get(unit, unit)


def _sizes(item: Item) -> str:
    def by(numbers: Sequence[float]) -> str:
        return " x ".join(f"{number:g}" for number in numbers)

    if len(item.shape) == 2:
        return f"{by(item.shape)} pixels"
    return f"{by(item.shape)} voxels of {by(item.spacing)} {_short(item.unit)}"
