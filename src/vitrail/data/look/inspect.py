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
from vitrail.data.look.picture import by, has_labels, picture, spread
from vitrail.data.source import Item, Source, class_names, label_dtype, label_names, notes_of
from vitrail.data.sources.folders import is_named_like_labels
from vitrail.errors import UserError
from vitrail.recipe import kinds

__all__ = ["inspect", "look", "open_source", "picture", "read_settings"]

CROP = {2: 256, 3: 64}  # voxels of a suggested crop along an axis at most
MUCH_DECODING = 28.0  # voxels decoded for one of a crop, from which on reading is slow: 32 of chunks of 64 need 26
MOST_CLASSES, MANY_LABELS = 1000, 24
BATCH = {2: 64, 3: 16}
HELD_OUT = ("validation", "valid", "val", "test")  # parts of data that their makers have split
NOT_MEASURED = ("synthetic", "dummy", "latents")  # kinds whose voxels have no size in the world
SAMPLE = {1: 4096, 2: 256, 3: 64}  # voxels on each side of a sampled crop, by the number of axes
VOXELS, MOST_SAMPLES = 2**21, 128  # that a look reads; 8 crops at least
BINS = 64
PERCENTILES = (1, 50, 99)
AIR, BONE = -900, 300  # Hounsfield units
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


def suggest_crop(source: Source) -> tuple[int, ...]:
    """Suggest a crop that fits every item: about a cube in space, small images whole; 1 across slices."""
    shapes = [source.items[i].shape for i in spread(len(source.items), 200)]
    smallest = [min(sizes) for sizes in zip(*shapes, strict=True)]
    spacing, most = source.items[0].spacing, CROP.get(len(smallest), 64)
    fine = min(spacing)
    if len(source.items) < 5:  # a part of them is to be held out
        most = min(most, max(size * step for size, step in zip(smallest, spacing, strict=True)) / fine / 3)
    crop = []
    for axis, (size, step) in enumerate(zip(smallest, spacing, strict=True)):
        if axis == source.items[0].slices:
            crop.append(1)
            continue
        wanted = min(size, max(8, most * fine / step))
        unit = 16 if wanted >= 32 else 4
        crop.append(max(1, int(wanted // unit * unit) if wanted >= unit else int(wanted)))
    return tuple(crop)


def suggest_fit(source: Source, facts: dict[str, Any]) -> int | None:
    """Suggest the side that images of many sizes are resized to, that of a middling one; None for data of one size."""
    from vitrail.data.sources.image_folder import ImageSource

    if not isinstance(source, ImageSource) or not facts.get("smallest"):
        return None
    sides = sorted(min(source.items[i].shape) for i in spread(len(source.items), 200))
    side = min(CROP[2], sides[len(sides) // 2])
    return side if side < 32 else side // 16 * 16


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
    for name, numbers in facts["statistics"].items():
        told += _warn_of_values(name, numbers, source.dtype)
    if facts["constant_percent"]:
        told.append(
            f"{facts['constant_percent']:.0f} % of the crops hold one value alone; data.filter leaves empty ones out"
        )
    shares, named = facts.get("label_percent") or {}, facts.get("label_names") or {}
    unlabelled, gaps = background(facts), label_gaps(facts)
    if (len(shares) >= MANY_LABELS and not named) or any(MOST_CLASSES <= int(value) != unlabelled for value in shares):
        told.append("labels seem to number things rather than classes; objective segment needs classes from 0 on")
    elif named and (strange := [value for value in shares if value != "0" and value not in named]):
        told.append(f"label {strange[0]} has no name in the file; name all in objective.names, or ignore it")
    elif gaps:
        told.append(
            f"labels are {', '.join(shares)}, but classes count from 0 on: label_map: {_flow(gaps)} renumbers them"
        )
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


def background(facts: dict[str, Any]) -> int | None:
    """Return the value of labels that stands for none: the highest of its type, where that is no class."""
    dtype = np.dtype(facts.get("label_dtype") or "uint8")
    highest = int(np.iinfo(dtype).max) if dtype.kind in "iu" else None
    seen = facts.get("label_percent") or {}
    return highest if str(highest) in seen and (dtype.itemsize > 1 or "0" not in seen) else None


def label_gaps(facts: dict[str, Any]) -> dict[int, int]:
    """Number anew the values of unnamed labels that do not count from 0 on, such as 0 and 255; empty if they do.

    0, or else what stands for no label, or else what is seen most, is the background.
    """
    shares = {int(value): share for value, share in (facts.get("label_percent") or {}).items()}
    values, unlabelled = sorted(shares), background(facts)
    if facts.get("label_names") or len(values) >= MANY_LABELS or not values:
        return {}
    if values in (list(range(len(values))), list(range(1, len(values) + 1))):  # a rare 0 may not have been met
        return {}
    none = {0, unlabelled} & set(values) or {max(values, key=shares.__getitem__)}
    numbers = dict.fromkeys(none, 0) | {v: n for n, v in enumerate((v for v in values if v not in none), 1)}
    return {value: numbers[value] for value in values if value != numbers[value]}


def suggest_recipe(source: Source, config: Any, crop: tuple[int, ...], facts: dict[str, Any]) -> str:
    """Write the `data` section of a recipe, with a part held out where the source can be split."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    entry = {name: values[name] for name, default in _defaults(config).items() if values[name] != default}
    if _needs_kind(config):
        entry["kind"] = config.kind
    gaps = label_gaps(facts) if "label_map" in values and not values["label_map"] else {}
    if gaps:
        entry["label_map"] = gaps
    side = suggest_fit(source, facts)
    if side is not None:
        crop = (side, side)
    ours, theirs = _split(source, config, crop)
    shown = [size for axis, size in enumerate(crop) if axis != source.items[0].slices]
    size: Any = shown[0] if len(set(shown)) == 1 else shown
    lines = [f"model: {{ndim: {len(shown)}}}  # and its kind and size", "data:"]
    lines.append(f"  train: [{_flow(entry | ours)}]")
    if theirs:
        lines.append(f"  valid: [{_flow(entry | theirs)}]")
    else:
        lines.append("  # valid: [{path: ...}]  data that are never trained on")
    lines.append(f"  crop: {_flow(size)}")
    if side is not None:
        lines.append(f"  fit: {{resize: {side}}}")
    lines.append(f"  batch: {BATCH.get(len(shown), 16)}")
    if len(shown) == 3:
        lines.append("  augment: {orientations: true}")
    if has_labels(source):
        seen = [int(value) for value in facts.get("label_percent") or {}]
        number = 1 + max((gaps.get(value, value) for value in seen), default=0)
        names = ["background", *(f"class{i}" for i in range(1, min(number, MANY_LABELS)))]
        told = facts.get("label_names") or len(seen) >= MANY_LABELS
        lines.append("objective: {kind: segment}" if told else f"objective: {{kind: segment, names: {_flow(names)}}}")
    elif class_names(source):
        lines.append("objective: {kind: classify}")
    return "\n".join(lines)


def _defaults(config: Any) -> dict[str, Any]:
    """Return what each key is where it is left out; one that must be given has a default that equals nothing."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


def _needs_kind(config: Any) -> bool:
    """Tell whether the path alone would not find this kind."""
    from vitrail.data.sources import guess_kind

    try:
        return bool(guess_kind(config.path) != config.kind)
    except UserError:
        return True


def _split(source: Source, config: Any, crop: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what to add to the entries of data.train and data.valid; nothing where no part can be held out."""
    keys, number = _defaults(config), len(source.items)
    if any(getattr(config, key) != keys[key] for key in ("region", "split", "start", "end") if key in keys):
        return {}, {}  # a part has been chosen already
    if part := _held_out_part(config):
        return {}, {"part": part}
    classified = bool(class_names(source))
    if "split" in keys and number >= 20 and (classified or "end" not in keys):
        return {"split": [0, 0.8]}, {"split": [0.8, 1]}
    if "end" in keys and number >= 5:
        return {"end": 0.8}, {"start": 0.8}
    shape = [min(sizes) for sizes in zip(*(source.items[i].shape for i in spread(number, 50)), strict=True)]
    for axis in sorted(range(len(shape)), key=lambda i: -shape[i] / crop[i]):
        share = max(0.2, math.ceil(100 * crop[axis] / shape[axis]) / 100)
        name, at = source.axes[axis], round(1 - share, 2)
        border = round(at * shape[axis])  # the voxel, as regions count
        if "region" not in keys or min(border, shape[axis] - border) < crop[axis]:
            continue
        try:
            dataclasses.replace(config, region={name: [0, at]})
        except UserError:  # of a kind that has no regions
            break
        return {"region": {name: [0, at]}}, {"region": {name: [at, 1]}}
    return {}, {}


def _held_out_part(config: Any) -> str | None:
    """Find the part of a folder that is there to be held out, beside the one for training."""
    from vitrail.data.files.paths import file_type

    if getattr(config, "part", "") is not None or file_type(config.path) != "folder":
        return None
    for part in HELD_OUT:
        try:
            dataclasses.replace(config, part=part).open()
            return part
        except UserError:  # it has no such part
            continue
    return None


def _flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, dict):
        # Recipes take text as keys alone, also where it is that of a number.
        return "{" + ", ".join(f"{_flow(str(key))}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./@:-]*", value) and ": " not in value:
        return value if value.lower() not in ("null", "true", "false", "yes", "no", "on", "off") else json.dumps(value)
    return json.dumps(value)


def look(
    path: str, *, kind: str | None = None, settings: dict[str, Any] | None = None
) -> tuple[Source, dict[str, Any]]:
    """Open the source at a path; return it with all that inspect() finds, with its labels, and advice."""
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
