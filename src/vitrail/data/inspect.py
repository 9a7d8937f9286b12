"""Look at a source before training on it: what it says of itself, what a few crops hold, and what to write in a recipe.

- crops lie at fixed random places, so that a second look shows the same
- a crop that cannot be read is told, not raised, unless none can: a look is for finding such things
- places without data, which a training refuses, are NaN here: they are counted, and drawn in a colour of their own
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.advice import MANY_LABELS, entry_of, suggest_crop, suggest_recipe, warn
from vitrail.data.files import unpacking
from vitrail.data.picture import has_labels, picture, round_length, spread
from vitrail.data.protection import checksums_of
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.recipe import kinds

__all__ = ["inspect", "look", "open_source", "picture", "read_settings", "round_length"]

SAMPLE = {1: 4096, 2: 256, 3: 64}  # voxels on each side of a sampled crop, by the number of axes
VOXELS, MOST_SAMPLES = 2**21, 128  # that a look reads; 8 crops at least
BINS = 64
PERCENTILES = (1, 50, 99)
MOST_ITEMS = 2000  # whose class or shape is looked at


def look(
    path: str, *, kind: str | None = None, settings: dict[str, Any] | None = None
) -> tuple[Source, dict[str, Any]]:
    """The source at a path and all that inspect() finds, with labels where the file has some, and advice."""
    config, source = open_source(path, kind=kind, settings=settings)
    if getattr(config, "nodata", None) == "error":
        source = LetThrough(source, config)
    shape = source.items[0].shape
    voxels = math.prod(min(n, SAMPLE[min(len(shape), 3)]) for n in shape)
    facts = inspect(source, samples=min(MOST_SAMPLES, max(8, VOXELS // voxels)))
    crop = suggest_crop(source)
    facts["warnings"] = warn(source, facts, crop)
    facts["recipe"] = suggest_recipe(source, config, crop, facts)
    return source, facts


class LetThrough:
    """A source of grids whose places without data read as NaN, instead of being refused."""

    def __init__(self, source: Source, config: Any):
        self._source, self._config = source, config
        self._filled: list[Source] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        try:
            return self._source.read(item, region)
        except UserError as error:
            try:
                if not self._filled:
                    opened = (dataclasses.replace(self._config, nodata="fill", fill_value=value) for value in (0, 1))
                    self._filled = [config.open() for config in opened]
                zeros, ones = (source.read(item, region) for source in self._filled)
            except UserError:
                raise error from None
            # What is filled is what differs between two fillings: formats tell nothing more of it.
            return np.where(zeros == ones, zeros, np.nan)


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Keys of an entry, given as key=value in the words of YAML."""
    from vitrail.recipe import yaml

    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"--set {word!r}: expected key=value, such as level=1")
        settings[key] = yaml.parse(value, f"--set {word!r}")
    return settings


def open_source(path: str, *, kind: str | None, settings: dict[str, Any] | None) -> tuple[Any, Source]:
    """The config and the source of an entry `{path, kind, **settings}`; its first labels, where it names some."""
    from vitrail.data.sources import guess_kind

    given = dict(settings or {})
    cls: Any = kinds.find("source", kind or guess_kind(path), key="--kind")
    config = entry_of(cls, {"path": path, **given})
    with unpacking():
        source: Source = config.open()
    found = source.describe().get("labels")
    if "labels" not in given and not has_labels(source) and isinstance(found, list) and found:
        try:
            labelled = entry_of(cls, {"path": path, **given, "labels": found[0]})
            return labelled, labelled.open()
        except UserError:  # they do not fit the image: it can be looked at without them
            pass
    return config, source


def inspect(source: Source, *, samples: int = 8) -> dict[str, Any]:
    """What the source says of itself, and what a few crops at fixed random places hold."""
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
    report |= source.describe() | {"checksums": checksums_of(source)}
    if set(report["chunk"]) == {1}:
        report["chunk"] = []  # any window can be read alone
    seen = [source.items[index] for index in spread(len(source.items), MOST_ITEMS if len(source.items) > 1 else 1)]
    if len({other.shape for other in seen}) > 1:
        shapes = np.array([other.shape for other in seen])
        report |= {"smallest": shapes.min(0).tolist(), "largest": shapes.max(0).tolist()}
    names: Sequence[str] = getattr(source, "class_names", ())
    if names:
        counts = Counter(other.label for other in seen if other.label is not None)
        report["class_counts"] = {name: counts[number] for number, name in enumerate(names)}
        report["classes_looked_at"] = len(seen)

    crops, labels, problems = [], [], []
    for number in range(samples):
        index, window = _place(source, number)
        try:
            crops.append(source.read(index, window))
            if has_labels(source):
                labels.append(source.read_labels(index, window))  # type: ignore[attr-defined]
        except UserError as error:
            problems.append(error)
    if problems and not crops:
        raise problems[0]
    constant = [all(values.min() == values.max() for values in crop) for crop in crops]
    report["samples"] = samples
    report["constant_percent"] = 100 * sum(constant) / max(len(crops), 1)
    report["unreadable"] = [str(error) for error in problems]
    report["statistics"] = {
        name: _summarize(np.concatenate([crop[number].ravel() for crop in crops]))
        for number, name in enumerate(source.variables)
        if crops
    }
    if labels:
        report["label_percent"] = _label_shares(np.concatenate([values.ravel() for values in labels]))
        report["label_dtype"] = str(getattr(source, "label_dtype", None))
        report["label_names"] = {str(value): name for value, name in getattr(source, "label_names", {}).items()}
    return report


def _place(source: Source, number: int) -> tuple[int, tuple[slice, ...]]:
    """A crop; which one follows from its number alone."""
    rng = np.random.default_rng([number, 7])
    index = int(rng.integers(len(source.items)))
    shape = source.items[index].shape
    side = SAMPLE[min(len(shape), 3)]
    starts = [int(rng.integers(max(1, n - side + 1))) for n in shape]
    return index, tuple(slice(a, min(a + side, n)) for a, n in zip(starts, shape, strict=True))


def _label_shares(labels: np.ndarray) -> dict[str, float]:
    """Percent of the voxels with each label, by its number; the rarest are left out where there are many."""
    values, counts = np.unique(labels, return_counts=True)
    most = np.sort(np.argsort(-counts, kind="stable")[:MANY_LABELS])
    return {str(int(values[i])): 100 * float(counts[i]) / labels.size for i in most}


def _summarize(values: np.ndarray) -> dict[str, Any]:
    """Plain numbers of one variable; what is not finite is counted and left out."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    finite = finite.astype(np.float64)
    if not finite.size:
        nothing = dict.fromkeys(("min", "max", "mean", "std", *(f"p{p}" for p in PERCENTILES), "zeros_percent"))
        return {**nothing, "not_finite_percent": 100.0, "histogram": None}
    low, high = float(finite.min()), float(finite.max())
    counts, edges = np.histogram(finite, bins=BINS, range=(low, high if high > low else low + 1))
    return {
        "min": low,
        "max": high,
        "mean": float(finite.mean()),
        "std": float(finite.std()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(finite, PERCENTILES), strict=True)},
        "zeros_percent": 100 * float((finite == 0).mean()),
        "not_finite_percent": 100 * (1 - finite.size / values.size),
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
    }
