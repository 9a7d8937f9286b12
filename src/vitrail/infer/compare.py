"""What was predicted, in a file of any kind, beside labels in another: Dice, IoU, and the Rand score of objects.

- what counts is what lies in the files, so predictions of other programs are scored alike
- items are read whole, one at a time; `region` takes a part of them
- borders are where the probability of their class is above a threshold. The Rand score is the best over thresholds, as
  the challenge ISBI-2012 has it, and stands beside the one without any choice, that of the likeliest classes
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.data.look.inspect import open_source, read_settings
from vitrail.data.look.picture import by
from vitrail.data.source import Source, check_label_map, fits, map_labels
from vitrail.errors import UserError, some
from vitrail.infer.objects import Pairs, count_pairs, find_objects, thin

THRESHOLDS = tuple(number / 10 for number in range(1, 10))
MOST_CLASSES = 256


def compare(
    prediction: str,
    labels: str,
    *,
    settings: Sequence[str] = (),
    border: str | None = None,
    slices: str | None = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Score classes or probabilities of voxels in a file against labels in another.

    `settings` are keys of the labels as of an entry of data, key=value: `label_map` and `region`, which also cuts what
    was predicted where that is of the whole. `border` is the class that separates objects, a name or a number, and
    `slices` an axis across which objects are those of each slice by itself. `names` are those of the classes.
    """
    given = read_settings(settings)
    mapping, region = given.pop("label_map", {}), given.pop("region", None)
    found, true = _opened(prediction), _opened(labels, given)
    if region is not None:
        whole = [item.shape for item in found.items] == [item.shape for item in true.items]
        found = _opened(prediction, {"region": region}) if whole else found
        true = _opened(labels, given | {"region": region})
    _check_alike(prediction, found, labels, true)
    shares = len(found.variables) > 1
    if not shares and found.dtype.kind not in "uib":
        raise UserError(
            f"{prediction}: classes are whole numbers, not {found.dtype}, and probabilities have a channel for each "
            "class; write them with `vitrail predict --write classes` or `--write probabilities`"
        )
    if shares and len(names) > len(found.variables):
        raise UserError(f"--names {some(names)}: {prediction} has channels for {len(found.variables)} classes alone")
    names = list(names) or (list(found.variables) if shares else [])
    across, mapping = _axis(slices, true.axes), _mapping(mapping)
    check_label_map(mapping, true.dtype, labels)
    which = None if border is None else _class(border, names)
    table: np.ndarray = np.zeros((0, 0), np.int64)
    pairs: dict[float | None, Pairs] = {}
    for number, item in enumerate(found.items):
        window = tuple(slice(0, size) for size in item.shape)
        read, truth = found.read(number, window), map_labels(true.read(number, window)[0], mapping)
        guess = read.argmax(axis=0) if shares else read[0]
        table = _add(table, _confusion(guess, truth, labels, len(read) if shares else 0))
        if which is None:
            continue
        for part in range(item.shape[across] if across is not None else 1):
            cut: tuple[Any, ...] = () if across is None else (*[slice(None)] * across, part)
            objects = find_objects(truth[cut] == which)
            borders: dict[float | None, np.ndarray] = {None: guess[cut] == which}
            if shares:
                likely = read[which][cut] / (np.iinfo(read.dtype).max if read.dtype.kind == "u" else 1)
                borders |= {threshold: likely > threshold for threshold in THRESHOLDS}
            for threshold, there in borders.items():
                counted = count_pairs(objects, thin(find_objects(there)))
                pairs[threshold] = pairs.get(threshold, Pairs()).plus(counted)
    if which is not None and which >= max(len(names), len(table), 2):
        raise _no_class(str(border), names or [str(number) for number in range(len(table))])
    metrics = _of_classes(table, names) | (_of_objects(pairs) if which is not None else {})
    of = {"prediction": prediction, "labels": labels, "items": len(found.items), "voxels": int(table.sum())}
    each = {str(threshold): pair.scores()["rand_f_score"] for threshold, pair in pairs.items() if threshold is not None}
    return of | {"metrics": metrics} | ({"rand_f_scores": each} if each else {})


def _opened(path: str, settings: dict[str, Any] | None = None) -> Source:
    return open_source(path, kind=None, settings=settings)[1]


def _check_alike(prediction: str, found: Source, labels: str, true: Source) -> None:
    """Refuse files whose voxels are not the same."""
    if len(true.variables) > 1 or true.dtype.kind not in "uib":
        told = f"{len(true.variables)} channels of {true.dtype}"
        raise UserError(f"{labels}: labels are one channel of whole numbers, not {told}; name the file that holds them")
    shapes = [[by(item.shape) for item in source.items] for source in (found, true)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{prediction} has {some(shapes[0])} voxels, but {labels} has {some(shapes[1])}; cut the labels to what "
            "was predicted, as in --set 'region={z: [24, 30]}'"
        )
    stems = [[os.path.splitext(item.name)[0] for item in source.items] for source in (found, true)]
    if len(found.items) > 1 and {*stems[0]} & {*stems[1]} and stems[0] != stems[1]:
        one, other = next(pair for pair in zip(*stems, strict=True) if pair[0] != pair[1])
        raise UserError(
            f"{prediction} and {labels} have items of the same names, but {one} would be compared with {other}; give "
            "folders of the same items"
        )


def _axis(name: str | None, axes: Sequence[str]) -> int | None:
    if name is not None and name not in axes:
        raise UserError(f"--slices {name}: the labels have the axes {', '.join(axes)}; choose one of them")
    return None if name is None else list(axes).index(name)


def _mapping(given: Any) -> dict[int, int]:
    try:
        return {int(value): int(number) for value, number in dict(given).items()}
    except (TypeError, ValueError):
        raise UserError(f"--set label_map: expected stored values and classes, as {{255: 1}}, not {given!r}") from None


def _class(border: str, names: Sequence[str]) -> int:
    """Return the number of a class, by its name or number."""
    if border in names:
        return names.index(border)
    # Without names any item may have the highest class.
    if border.isdecimal() and int(border) < (max(len(names), 2) if names else MOST_CLASSES):
        return int(border)
    raise _no_class(border, names)


def _no_class(border: str, names: Sequence[str]) -> UserError:
    known = f"one of the classes {some(names)}, or its number" if names else "the number of a class,"
    return UserError(f"--border {border}: expected {known} from 0")


def _confusion(guess: np.ndarray, truth: np.ndarray, labels: str, least: int) -> np.ndarray:
    """Count voxels [true, predicted]."""
    low, high = min(int(guess.min()), int(truth.min())), max(int(guess.max()), int(truth.max()))
    if low < 0 or high >= (least or MOST_CLASSES) or not fits(high, np.dtype(np.int64)):
        raise UserError(
            f"{labels}: {low if low < 0 else high} is not the number of a class, of which there are "
            f"{least or f'up to {MOST_CLASSES}'}, from 0; renumber labels with --set 'label_map={{255: 1}}'"
        )
    classes = max(least, high + 1)
    joint = truth.astype(np.int64) * classes + guess.astype(np.int64)
    return np.bincount(joint.ravel(), minlength=classes**2).reshape(classes, classes)


def _add(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    size = max(len(one), len(other))
    return sum((np.pad(table, (0, size - len(table))) for table in (one, other)), np.zeros((size, size), np.int64))


def _of_classes(table: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    both, true, guessed = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    known = {number: names[number] if number < len(names) else f"class {number}" for number in range(len(table))}
    there = [number for number in known if true[number] + guessed[number]]  # in the labels or in the prediction
    dices = {f"dice_{known[n]}": float(2 * both[n] / (true[n] + guessed[n])) for n in there}
    ious = {f"iou_{known[n]}": float(both[n] / (true[n] + guessed[n] - both[n])) for n in there}
    return {"accuracy": float(both.sum() / table.sum())} | dices | ious


def _of_objects(pairs: dict[float | None, Pairs]) -> dict[str, float]:
    """Return the scores at the best threshold, and the one that the likeliest classes have."""
    plain = pairs[None].scores()
    best, threshold = plain, None
    for at, pair in pairs.items():
        scores = pair.scores()
        if at is not None and (threshold is None or scores["rand_f_score"] > best["rand_f_score"]):
            best, threshold = scores, at
    found = best | {"adapted_rand_error": 1 - best["rand_f_score"]}
    if threshold is not None:
        found |= {"rand_threshold": threshold, "rand_f_score_of_classes": plain["rand_f_score"]}
    return found
