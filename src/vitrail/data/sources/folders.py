"""The files of a source of one file an item, each with that of its labels.

- a file, or the files of a folder; labels are another file, or the files of the same names in another folder
- imagesTr and labelsTr, as nnU-Net and the Medical Segmentation Decathlon lay them out. nnU-Net: a file for each
  channel, CASE_0000.nii.gz, CASE_0001.nii.gz, and dataset.json names channels and labels. Decathlon (and plain pairs of
  folders): one file a case; dataset.json may name modalities and labels, or be absent
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from vitrail.data.files.paths import base_name, file_type, join, list_files, read_json
from vitrail.data.stored import Stored
from vitrail.errors import UserError


@dataclass(frozen=True)
class Case:
    """One item: its files, and that of its labels."""

    name: str
    images: tuple[str, ...]  # paths, one a channel
    labels: str | None


@dataclass(frozen=True)
class Layout:
    """The items of a source, and what dataset.json tells of them."""

    cases: tuple[Case, ...]
    channels: tuple[str, ...] | None = None
    labels: dict[int, str] = field(default_factory=dict)  # names of the values
    facts: dict[str, Any] = field(default_factory=dict)

    def name_channels(self, images: Sequence[Stored]) -> tuple[Stored, ...]:
        """Return the images of a case with the names of their channels, where each is one."""
        if self.channels is None or len(self.channels) != len(images):
            return tuple(images)
        return tuple(replace(s, channels=(name,)) for s, name in zip(images, self.channels, strict=True))


def find_cases(path: str, labels: str | None, suffixes: Sequence[str], *, colours: bool = False) -> Layout:
    """Return the items of a folder with imagesTr, or else of a file or folder with its labels elsewhere."""
    if not is_layout(path):
        return Layout(list_cases(path, labels, suffixes))
    if labels is not None:
        raise UserError(f"labels = {labels!r}: those of {path} lie in labelsTr; leave `labels` out")
    return read_layout(path, suffixes, colours=colours)


def list_cases(path: str, labels: str | None, suffixes: Sequence[str]) -> tuple[Case, ...]:
    """Return the files of a format, the one at a path or those of a folder, each with that of its labels."""
    items = list_items(path, suffixes)
    pairs = {} if labels is None else pair_labels(items, labels, suffixes)
    return tuple(Case(name, (place,), pairs.get(name)) for name, place in items)


def stem(name: str, suffixes: Sequence[str]) -> str:
    """Return a file's name without the suffix of its format."""
    low = name.lower()
    return next((name[: -len(suffix)] for suffix in suffixes if low.endswith(suffix)), PurePosixPath(name).stem)


def list_items(path: str, suffixes: Sequence[str]) -> list[tuple[str, str]]:
    """List (name, path) of the files of a format: the one at a path, or those of a folder, sorted as a person would."""
    kind = file_type(path)
    if kind is None:
        raise UserError(f"data path {path!r} does not exist; check the spelling and the folder that it is relative to")
    if kind == "file":
        return [(base_name(path), path)]
    found = [(name, join(path, name)) for name in list_files(path) if name.lower().endswith(tuple(suffixes))]
    if not found:
        raise UserError(f"{path} holds no files {', '.join(suffixes)}; give a file or a folder of such files")
    return found


def pair_labels(items: Sequence[tuple[str, str]], labels: str, suffixes: Sequence[str]) -> dict[str, str]:
    """Return the path of each item's labels: one file for one item, or the files of the same names in a folder."""
    if file_type(labels) is None:
        raise UserError(f"labels = {labels!r} does not exist; give a file, or a folder with a file for each item")
    if file_type(labels) == "file":
        if len(items) > 1:
            raise UserError(
                f"labels = {labels!r} is one file for {len(items)} items; give a folder with a file for each"
            )
        return {items[0][0]: labels}
    by_stem = {stem(name, suffixes): path for name, path in list_items(labels, suffixes)}
    pairs = {}
    for name, path in items:
        found = by_stem.get(stem(name, suffixes))
        if found is None:
            raise UserError(
                f"labels = {labels!r} holds no labels of {path}; expected a file named {stem(name, suffixes)}"
            )
        pairs[name] = found
    return pairs


def is_layout(path: str) -> bool:
    """Tell whether a folder holds imagesTr."""
    return file_type(path) == "folder" and file_type(join(path, "imagesTr")) == "folder"


def read_layout(path: str, suffixes: Sequence[str], *, colours: bool = False) -> Layout:
    """Read the training cases of a folder; with `colours`, one file may hold all channels of a case."""
    described = _describe(path)
    names = described.get("channel_names")  # nnU-Net's word; the Decathlon says modality
    modality = described.get("modality")
    if names is not None and not isinstance(names, dict):
        raise UserError(f"{path}/dataset.json: channel_names = {names!r} must map numbers to names; mend it")
    ending = described.get("file_ending")
    if ending is not None and ending not in suffixes:
        raise UserError(
            f"{path}: dataset.json says file_ending = {ending!r}, but this kind reads {', '.join(suffixes)}; "
            "choose another kind or convert the files"
        )
    endings = (ending,) if ending is not None else tuple(suffixes)
    files = [name for name in list_files(join(path, "imagesTr")) if name.lower().endswith(endings)]
    if not files:
        raise UserError(f"{path}/imagesTr holds no files {', '.join(endings)}; put the training images there")
    grouped: dict[str, list[str]] = {}
    labels = {}
    if file_type(join(path, "labelsTr")) == "folder":
        labels = {stem(n, endings): join(path, "labelsTr", n) for n in list_files(join(path, "labelsTr"))}
    stems = [stem(name, endings) for name in files]
    numbered = all(re.fullmatch(r".+_\d{4}", case) for case in stems)
    if names is None:  # the numbers may count volumes: they are channels only where the labels are named without them
        numbered = numbered and bool(labels) and all(case[:-5] in labels for case in stems)
    if names is not None and not numbered:
        raise UserError(
            f"{path}/imagesTr holds a file that does not end in a channel's number, such as CASE_0000{endings[0]}; "
            "rename it as nnU-Net wants"
        )
    for name in files:
        case = stem(name, endings)
        grouped.setdefault(case[:-5] if numbered else case, []).append(name)
    count = len(names) if names is not None else None
    cases = []
    for case, parts in grouped.items():
        numbers = [int(stem(part, endings)[-4:]) for part in parts] if numbered else [0]
        if numbers != list(range(count or len(numbers))) and not (colours and numbers == [0]):
            raise UserError(
                f"{path}/imagesTr has the channels {numbers} of {case}, but {count or len(numbers)} are wanted from 0; "
                "restore the files that are missing"
            )
        if labels and case not in labels:
            raise UserError(f"{path}/labelsTr holds no labels of {case}; add {case}{endings[0]} or remove the image")
        cases.append(Case(case, tuple(join(path, "imagesTr", part) for part in parts), labels.get(case)))
    channels = _in_order(names if names is not None else modality)
    told = ("name", "description", "licence", "license")
    facts = {"layout": "imagesTr", **{key: described[key] for key in told if key in described}}
    return Layout(tuple(cases), channels, _label_names(path, described.get("labels")), facts)


def _describe(path: str) -> dict[str, Any]:
    place = join(path, "dataset.json")
    if file_type(place) is None:
        return {}
    try:
        found = read_json(place)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place} is not valid JSON ({error}); restore or rewrite the file") from error
    if not isinstance(found, dict):
        raise UserError(f"{place} must hold a JSON object; restore or rewrite the file")
    return found


def _in_order(names: Any) -> tuple[str, ...] | None:
    """Read {"0": "CT", "1": "PET"} as ("CT", "PET")."""
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        return None
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _label_names(path: str, labels: Any) -> dict[int, str]:
    """Read the names of label values; nnU-Net writes name: value, the Decathlon value: name."""
    if not isinstance(labels, dict):
        return {}
    if any(isinstance(value, list) for value in labels.values()):
        raise UserError(
            f"{path}/dataset.json describes regions of several labels ({labels}), which overlap; "
            "give each value one name, and merge regions afterwards"
        )
    by_value = all(str(key).isdecimal() for key in labels)
    try:
        named = {int(k): str(v) for k, v in labels.items()} if by_value else {int(v): k for k, v in labels.items()}
    except (ArithmeticError, TypeError, ValueError):
        named = {}
    if sorted(named) != list(range(len(labels))):
        raise UserError(
            f"{path}/dataset.json: labels = {labels} must be consecutive numbers from 0, the background; renumber them"
        )
    return named
