"""What a recipe may say of data: entries, a part that is held out, crop, and which stored labels are which classes.

`vitrail data inspect` prints it as the `data` section of a recipe, and `vitrail new` builds a whole recipe on it.

- the held-out part shares no voxel with the training part: a slab of each volume, the last of sorted items, or items
  chosen by hashes of their names, of which each class keeps some for training
- of labels that do not count from 0 on, the most frequent value is the background, class 0
"""

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.look.picture import has_labels, spread
from vitrail.data.source import Source, class_names, keep_share
from vitrail.errors import UserError

CROP = {2: 256, 3: 64}  # voxels of a suggested crop along an axis at most
MANY_LABELS = 24
BATCH = {2: 64, 3: 16}
HELD_OUT = ("validation", "valid", "val", "test")  # parts of data that their makers have split
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)  # of items that train, until every class has some to hold out


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What the `data` section of a recipe may say."""

    entry: dict[str, Any]  # what data.train and data.valid share
    train: dict[str, Any]  # what is said of the former alone
    valid: dict[str, Any] | None  # and of the latter; None where no part can be held out
    held_out: str  # in words
    crop: tuple[int, ...]  # of a sample
    fit: int | None  # the side that images are resized to
    learns: str | None  # from "voxel" labels, or "item" classes
    names: tuple[str, ...] | None  # of classes of voxels, where the data do not tell any


def suggest_crop(source: Source, most: int | None = None) -> tuple[int, ...]:
    """Suggest a crop that fits every item: about a cube in space, small images whole; 1 across slices."""
    shapes = [source.items[i].shape for i in spread(len(source.items), 200)]
    smallest = [min(sizes) for sizes in zip(*shapes, strict=True)]
    spacing, limit = source.items[0].spacing, float(most or CROP.get(len(smallest), 64))
    fine = min(spacing)
    if len(source.items) < 5:  # a part of them is to be held out
        limit = min(limit, max(size * step for size, step in zip(smallest, spacing, strict=True)) / fine / 3)
    crop = []
    for axis, (size, step) in enumerate(zip(smallest, spacing, strict=True)):
        if axis == source.items[0].slices:
            crop.append(1)
            continue
        wanted = min(size, max(8, limit * fine / step))
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


def background(facts: dict[str, Any]) -> int | None:
    """Return the value of labels that stands for none: the highest of its type, where that is no class."""
    dtype = np.dtype(facts.get("label_dtype") or "uint8")
    highest = int(np.iinfo(dtype).max) if dtype.kind in "iu" else None
    seen = facts.get("label_percent") or {}
    return highest if str(highest) in seen and (dtype.itemsize > 1 or "0" not in seen) else None


def label_gaps(facts: dict[str, Any]) -> dict[int, int]:
    """Number anew the values of unnamed labels that do not count from 0 on, such as 0 and 255; empty if they do.

    What is seen most is the background, and so are 0 and what stands for no label where both are seen.
    """
    shares = {int(value): share for value, share in (facts.get("label_percent") or {}).items()}
    values, unlabelled = sorted(shares), background(facts)
    if facts.get("label_names") or len(values) >= MANY_LABELS or not values:
        return {}
    if values in (list(range(len(values))), list(range(1, len(values) + 1))):  # a rare 0 may not have been met
        return {}
    none = {0, unlabelled} & set(values) if unlabelled is not None and len(values) > 2 else set()
    none = none or {max(values, key=shares.__getitem__)}
    numbers = dict.fromkeys(none, 0) | {v: n for n, v in enumerate((v for v in values if v not in none), 1)}
    return {value: numbers[value] for value in values if value != numbers[value]}


def words_of_labels(facts: dict[str, Any]) -> list[str]:
    """Say which value of unnamed labels is taken for the background, where another is more frequent or none is 0."""
    shares, gaps = facts.get("label_percent") or {}, label_gaps(facts)
    if gaps:
        most = max(shares, key=shares.__getitem__)
        why = f"; {most}, which {shares[most]:.0f} % of the voxels have, is the background" if most != "0" else ""
        return [
            f"labels are {', '.join(shares)}, but classes count from 0 on: label_map: {flow(gaps)} renumbers them{why}"
        ]
    if list(shares) == ["0", "1"] and shares["0"] < shares["1"] and not facts.get("label_names"):
        return [
            f"label 1 has {shares['1']:.0f} % of the voxels, and class 0 is mostly not scored: name both classes in "
            "objective.names, such as [membrane, cell], to score both, or swap them with label_map: {0: 1, 1: 0}"
        ]
    return []


def propose(
    source: Source, config: Any, crop: tuple[int, ...], facts: dict[str, Any], *, fit: int | str | None = "suggest"
) -> Proposal:
    """Propose entries and sizes for a source and its config; the crop is 1 across slices, and images may be resized."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    entry = {name: values[name] for name, default in _defaults(config).items() if values[name] != default}
    if _needs_kind(config):
        entry["kind"] = config.kind
    gaps = label_gaps(facts) if "label_map" in values and not values["label_map"] else {}
    if gaps:
        entry["label_map"] = gaps
    side = suggest_fit(source, facts) if isinstance(fit, str) else fit
    if side is not None:
        crop = (side, side)
    train, valid, words = _split(source, config, crop)
    shown = tuple(size for axis, size in enumerate(crop) if axis != source.items[0].slices)
    names = None
    if has_labels(source):
        seen = [int(value) for value in facts.get("label_percent") or {}]
        number = 1 + max((gaps.get(value, value) for value in seen), default=0)
        if not facts.get("label_names") and len(seen) < MANY_LABELS:
            names = ("background", *(f"class{i}" for i in range(1, min(number, MANY_LABELS))))
    learns = "voxel" if has_labels(source) else "item" if class_names(source) else None
    return Proposal(entry, train, valid, words, shown, side, learns, names)


def suggest_recipe(source: Source, config: Any, crop: tuple[int, ...], facts: dict[str, Any]) -> str:
    """Write the `data` section of a recipe, with a part held out where the source can be split."""
    found = propose(source, config, crop, facts)
    size: Any = found.crop[0] if len(set(found.crop)) == 1 else found.crop
    lines = [f"model: {{ndim: {len(found.crop)}}}  # and its kind and size", "data:"]
    lines += entries(found)
    lines.append(f"  crop: {flow(size)}")
    if found.fit is not None:
        lines.append(f"  fit: {{resize: {found.fit}}}")
    lines.append(f"  batch: {BATCH.get(len(found.crop), 16)}")
    if len(found.crop) == 3:
        lines.append("  augment: {orientations: true}")
    if found.learns == "voxel":
        names = "" if found.names is None else f", names: {flow(found.names)}"
        lines.append(f"objective: {{kind: segment{names}}}")
    elif found.learns == "item":
        lines.append("objective: {kind: classify}")
    return "\n".join(lines)


def entries(found: Proposal) -> list[str]:
    """Write data.train and data.valid."""
    lines = [f"  train: [{flow(found.entry | found.train)}]"]
    if found.valid is None:
        return [*lines, "  # valid: [{path: ...}]  data that are never trained on"]
    return [*lines, f"  valid: [{flow(found.entry | found.valid)}]"]


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


Split = tuple[dict[str, Any], dict[str, Any] | None, str]


def _split(source: Source, config: Any, crop: tuple[int, ...]) -> Split:
    """Return what to add to the entries of data.train and data.valid, and say it; no part can be held out: None."""
    keys, number = _defaults(config), len(source.items)
    if any(getattr(config, key) != keys[key] for key in ("region", "split", "start", "end") if key in keys):
        return {}, None, "nothing: a part has been chosen already"
    if part := _held_out_part(config):
        return {}, {"part": part}, f"the part that is called {part}"
    if beside := _held_out_beside(source, config):
        return {}, {"path": beside}, f"what lies in {beside}"
    classified = bool(class_names(source))
    if "split" in keys and classified and number < 20:
        return _split_few(source, config)
    if "split" in keys and number >= 20 and (classified or "end" not in keys):
        return {"split": [0, 0.8]}, {"split": [0.8, 1]}, "a fifth of the items, chosen by hashes of their names"
    if "end" in keys and number >= 5:
        return {"end": 0.8}, {"start": 0.8}, f"the last {number - round(0.8 * number)} of {number} items"
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
        slices = source.items[0].slices == axis
        words = f"the last {shape[axis] - border} {'slices' if slices else f'of {shape[axis]} voxels'} along {name}"
        return {"region": {name: [0, at]}}, {"region": {name: [at, 1]}}, words
    if "end" in keys and number > 1:
        at = round(1 - 1 / number, 2)
        return {"end": at}, {"start": at}, f"the last of {number} items"
    return {}, None, "nothing: the data are too few to hold a part out"


def _split_few(source: Source, config: Any) -> Split:
    """Hold out as few items as there must be for some of every class, or for any at all."""
    tried = []
    for share in SHARES:
        parts = []
        for low, high in ((0.0, share), (share, 1.0)):
            try:
                some = keep_share(dataclasses.replace(config, split=(low, high)), _names(source))
            except UserError:  # no item is left
                break
            parts.append({source.items[int(number)].label for number in some})
        if len(parts) == 2 and len(parts[0]) == len(class_names(source)):
            tried.append((-len(parts[1]), -share))
    if not tried:
        return {}, None, "nothing: the data are too few to hold a part out"
    share = -min(tried)[1]
    words = f"about {round(100 * (1 - share))} % of the items, chosen by hashes of their names"
    return {"split": [0, share]}, {"split": [share, 1]}, words


def _names(source: Source) -> Sequence[str]:
    """Return the names that shares go by."""
    found: Sequence[str] = getattr(source, "names", None) or [item.name for item in source.items]
    return found


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


def _held_out_beside(source: Source, config: Any) -> str | None:
    """Find the folder to hold out beside one that is called train."""
    from vitrail.data.files.paths import base_name, file_type, is_url, join, parent

    if base_name(config.path).lower() not in ("train", "training") or is_url(config.path):
        return None
    if file_type(config.path) != "folder" or any(getattr(config, key, None) for key in ("labels", "class_table")):
        return None
    for name in HELD_OUT:
        path = join(parent(config.path), name).removeprefix("./")
        try:
            other = dataclasses.replace(config, path=path).open()
        except (OSError, UserError):
            continue
        if other.variables == source.variables and set(class_names(other)) <= set(class_names(source)):
            return path
    return None


def flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, dict):
        # Recipes take text as keys alone, also where it is that of a number.
        return "{" + ", ".join(f"{flow(str(key))}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./@:-]*", value) and ": " not in value:
        return value if value.lower() not in ("null", "true", "false", "yes", "no", "on", "off") else json.dumps(value)
    return json.dumps(value)
