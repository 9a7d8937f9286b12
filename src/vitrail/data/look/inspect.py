"""A look at a source before training on it: what it says of itself, what a few crops hold, and advice for a recipe.

- crops lie at fixed random places, so that a second look shows the same
- a crop that cannot be read is told, not raised, unless none can: a look is for finding such things
- places without data, which a training refuses, are NaN here: they are counted, and drawn in a colour of their own
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.chunks.nodes import checksums_of
from vitrail.data.files.paths import unpacking
from vitrail.data.look.found import add_notes, with_axes, with_folders, with_table
from vitrail.data.look.picture import by, has_labels, picture, spread
from vitrail.data.look.propose import (
    CROP,
    MANY_LABELS,
    background,
    suggest_crop,
    suggest_fit,
    suggest_recipe,
    words_of_labels,
)
from vitrail.data.source import Item, Source, class_names, label_dtype, label_names, notes_of
from vitrail.data.sources.folders import is_named_like_labels
from vitrail.errors import UserError
from vitrail.recipe import kinds

__all__ = ["inspect", "look", "open_source", "picture", "read_settings"]

MUCH_DECODING = 28.0  # voxels decoded for one of a crop, from which on reading is slow: 32 of chunks of 64 need 26
MOST_CLASSES = 1000
NOT_MEASURED = ("synthetic", "dummy", "latents")  # kinds whose voxels have no size in the world
SAMPLE = {1: 4096, 2: 256, 3: 64}  # voxels on each side of a sampled crop, by the number of axes
VOXELS, MOST_SAMPLES = 2**21, 128  # that a look reads; 8 crops at least
BINS = 64
PERCENTILES = (1, 50, 99)
AIR, BONE = -900, 300  # Hounsfield units
MOST_NOTED = 5  # variables whose values are noted
MOST_ITEMS = 2000  # whose class or shape is looked at


def entry_of(cls: Any, entry: dict[str, Any]) -> Any:
    """Make the config of a source, each key checked as in a recipe."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_json(json.dumps(entry), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        key = str(fault["loc"][0]) if fault["loc"] else "path"
        known = [field.name for field in dataclasses.fields(cls)]
        if key not in known:
            near = kinds.nearest(key, known)
            hint = f"did you mean {near!r}? " if near else ""
            raise UserError(
                f"--set {key}: {cls.__name__[:-6]} has no such key; {hint}it has {', '.join(known)}"
            ) from None
        reason = (fault.get("ctx") or {}).get("error")
        message = str(reason) if reason else f"{fault['msg'][0].lower()}{fault['msg'][1:]}, not {entry.get(key)!r}"
        raise UserError(f"--set {key}: {message}") from None


def decoded_per_voxel(item: Item, crop: Sequence[int]) -> float:
    """Count voxels of whole chunks that a crop touches, for each of its own: the mean over places."""
    factor = 1.0
    for size, chunk, c in zip(item.shape, item.chunk, crop, strict=True):
        chunks = min((c - 1) / chunk + 1, math.ceil(size / chunk))
        factor *= min(chunks * chunk, max(size, c)) / c
    return factor


def warn(source: Source, facts: dict[str, Any], crop: tuple[int, ...]) -> list[str]:
    """Say what may go wrong or slowly, each with what to do."""
    item, told = source.items[0], notes_of(source)
    if facts["unreadable"]:
        told.append(f"{len(facts['unreadable'])} of {facts['samples']} crops cannot be read: {facts['unreadable'][0]}")
    measured = facts.get("kind") not in NOT_MEASURED and (len(item.shape) == 3 or set(item.spacing) != {1.0})
    if item.unit is None and measured:
        told.append("the file gives no unit of the voxel size, and none is assumed; set `unit` where the kind has it")
    ratio = max(item.spacing) / min(item.spacing)
    if ratio > 1.3:
        thick = source.axes[item.spacing.index(max(item.spacing))]
        told.append(
            f"voxels are {ratio:.3g} times as long along {thick} as along the finest axis: crops need fewer of them "
            "there, and augment.orientations turns only axes of equal size"
        )
    decoded = decoded_per_voxel(item, crop)
    whole = all(c >= s for c, s in zip(item.chunk, item.shape, strict=True))
    mib = math.prod(item.shape) * source.dtype.itemsize * len(source.variables) / 2**20
    if decoded > MUCH_DECODING:
        how = f"the whole item ({mib:.3g} MiB)" if whole else f"chunks of {by(item.chunk)}"
        told.append(
            f"a crop of {by(crop)} decodes {decoded:.0f} times its voxels, because {how} can only be read at once; "
            "raise data.reuse, or store the data in chunks of about the crop's size"
        )
    if any(str(name).endswith((".gz", ".bz2", ".xz", ".zip")) for name in (facts.get("path"), item.name)):
        told.append(
            "a compressed file has no random access: each item is decoded whole; uncompressed files read faster"
        )
    sizes = facts.get("smallest")
    if sizes and suggest_fit(source, facts):
        told.append(f"images are of {by(sizes)} to {by(facts['largest'])} pixels: data.fit brings them to one size")
    elif sizes and any(c > CROP.get(len(sizes), 64) // 4 > s for c, s in zip(facts["largest"], sizes, strict=True)):
        told.append(f"items differ in size, and the smallest has only {by(sizes)}: crops must fit into it")
    if getattr(source, "mixed", False) and set(source.variables) & {"red", "green", "blue"}:
        told.append(
            f"some images are grey and others have colours; all are read as {', '.join(source.variables)}: "
            "`variables: [brightness]` reads all as grey"
        )
    if labels := _labels_among(source):
        told.append(
            f"{labels} is read as an image, and is named like labels; where it holds those of another, name that one "
            "alone as the path, and this one as `labels`"
        )
    latitude = facts.get("latitude")
    if isinstance(latitude, str) and "south" in latitude.lower():
        told.append(f"latitude is stored {latitude}, and shown so; `latitude: north_first` turns it")
    of_values = [_warn_of_values(name, numbers, source.dtype) for name, numbers in facts["statistics"].items()]
    some = [words for words in of_values if words]
    told += [word for words in some[:MOST_NOTED] for word in words]
    if len(some) > MOST_NOTED:
        told.append(f"the same or the like of {len(some) - MOST_NOTED} more variables")
    if facts["constant_percent"]:
        told.append(
            f"{facts['constant_percent']:.0f} % of the crops hold one value alone; data.filter leaves empty ones out"
        )
    shares, named = facts.get("label_percent") or {}, facts.get("label_names") or {}
    unlabelled = background(facts)
    if (len(shares) >= MANY_LABELS and not named) or any(MOST_CLASSES <= int(value) != unlabelled for value in shares):
        told.append("labels seem to number things rather than classes; objective segment needs classes from 0 on")
    elif named and (strange := [value for value in shares if value != "0" and value not in named]):
        told.append(f"label {strange[0]} has no name in the file; name all in objective.names, or ignore it")
    else:
        told += words_of_labels(facts)
    counts = facts.get("class_counts") or {}
    looked = facts.get("classes_looked_at", sum(counts.values()))  # too few of them say nothing of rare classes
    if counts and looked >= 20 * len(counts) and min(counts.values()) * 10 < max(counts.values()):
        rare = min(counts, key=counts.__getitem__)
        told.append(f"classes are unequal: {rare} has {counts[rare]} items, the largest {max(counts.values())}")
    return told


def _labels_among(source: Source) -> str | None:
    """An item whose file is named like labels, where not all are; None where there is none."""
    if class_names(source) or has_labels(source):
        return None
    files = [re.split(r"[/\\]", source.items[i].name)[-1] for i in spread(len(source.items), 200)]
    named = [file for file in files if is_named_like_labels(file)]
    return named[0] if named and len(named) < len(files) else None


def _warn_of_values(name: str, s: dict[str, Any], dtype: np.dtype) -> list[str]:
    told = []
    if s["not_finite_percent"]:
        told.append(
            f"{name}: {s['not_finite_percent']:.2g} % of the values are NaN or infinite, or marked as no data, which "
            "ends a training; leave the places out with `region`, or set `nodata: fill` and `fill_value`"
        )
    if s["std"] and s["max"] - s["mean"] > 25 * s["std"]:
        told.append(
            f"{name}: the largest value {s['max']:.4g} lies far out (99 % are below {s['p99']:.4g}); "
            "data.normalize: {percentiles: [1, 99]} takes no notice of such"
        )
    if s["min"] is not None and s["min"] < AIR and s["max"] > BONE and dtype.kind == "i":
        told.append(
            f"{name}: whole numbers from {s['min']:.4g} to {s['max']:.4g} may be Hounsfield units of a CT, of which "
            "data.normalize: {kind: window, window: [-1000, 400]} shows soft parts and lungs"
        )
    return told


def look(
    path: str, *, kind: str | None = None, settings: dict[str, Any] | None = None
) -> tuple[Source, dict[str, Any]]:
    """Open the source at a path; return it with all that inspect() finds, with its labels, and advice."""
    config, source = open_source(path, kind=kind, settings=settings)
    source, facts = look_at(config, source)
    crop = suggest_crop(source)
    facts["warnings"] = warn(source, facts, crop)
    facts["recipe"] = suggest_recipe(source, config, crop, facts)
    return source, facts


def look_at(config: Any, source: Source) -> tuple[Source, dict[str, Any]]:
    """Return a source that lets places without data through, and all that inspect() finds."""
    if getattr(config, "nodata", None) == "error":
        source = LetThrough(source, config)
    shape = source.items[0].shape
    voxels = math.prod(min(n, SAMPLE[min(len(shape), 3)]) for n in shape)
    return source, inspect(source, samples=min(MOST_SAMPLES, max(8, VOXELS // voxels)))


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
    """Read keys of an entry, given as key=value in the words of YAML."""
    from vitrail.recipe import yaml

    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"--set {word!r}: expected key=value, such as level=1")
        settings[key] = yaml.parse(value, f"--set {word!r}")
    return settings


def open_source(path: str, *, kind: str | None, settings: dict[str, Any] | None) -> tuple[Any, Source]:
    """Open an entry `{path, kind, **settings}`, with its first labels, where it names some; returns its config, too."""
    from vitrail.data.sources import guess_kind

    path, given, said = with_folders(path, kind, dict(settings or {}))
    cls: Any = kinds.find("source", kind or guess_kind(path), key="--kind")
    config = entry_of(cls, {"path": path, **given})
    with unpacking():
        source: Source = config.open()
    add_notes(source, said)
    config, source = with_axes(*with_table(config, source))
    found = source.describe().get("labels")
    if "labels" not in given and not has_labels(source) and isinstance(found, list) and found:
        try:
            labelled = dataclasses.replace(config, labels=found[0])
            return labelled, labelled.open()
        except UserError:  # they do not fit the image: it can be looked at without them
            pass
    return config, source


def inspect(source: Source, *, samples: int = 8) -> dict[str, Any]:
    """Return what the source says of itself, and what a few crops at fixed random places hold."""
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
    names = class_names(source)
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
        report["label_dtype"] = str(label_dtype(source))
        report["label_names"] = {str(value): name for value, name in label_names(source).items()}
    return report


def _place(source: Source, number: int) -> tuple[int, tuple[slice, ...]]:
    """Place a crop; which one follows from its number alone."""
    rng = np.random.default_rng([number, 7])
    index = int(rng.integers(len(source.items)))
    shape = source.items[index].shape
    side = SAMPLE[min(len(shape), 3)]
    starts = [int(rng.integers(max(1, n - side + 1))) for n in shape]
    return index, tuple(slice(a, min(a + side, n)) for a, n in zip(starts, shape, strict=True))


def _label_shares(labels: np.ndarray) -> dict[str, float]:
    """Return percent of the voxels with each label, by its number; the rarest are left out where there are many."""
    values, counts = np.unique(labels, return_counts=True)
    most = np.sort(np.argsort(-counts, kind="stable")[:MANY_LABELS])
    return {str(int(values[i])): 100 * float(counts[i]) / labels.size for i in most}


def _summarize(values: np.ndarray) -> dict[str, Any]:
    """Sum up one variable in plain numbers; what is not finite is counted and left out."""
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
