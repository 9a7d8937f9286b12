"""Folders with imagesTr and labelsTr, as nnU-Net and the Medical Segmentation Decathlon lay them out.

- nnU-Net: a file for each channel, CASE_0000.nii.gz, CASE_0001.nii.gz, and dataset.json names channels and labels
- Decathlon (and plain pairs of folders): one file a case; dataset.json may name modalities and labels, or be absent
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.data.files import file_type, join, list_files, read_json
from vitrail.data.formats import stem
from vitrail.errors import UserError


@dataclass(frozen=True)
class Case:
    name: str
    images: tuple[str, ...]  # paths, one a channel
    labels: str | None


@dataclass(frozen=True)
class Layout:
    cases: tuple[Case, ...]
    channels: tuple[str, ...] | None
    labels: dict[int, str]  # names of the values
    facts: dict[str, Any]


def is_layout(path: str) -> bool:
    """Whether a folder holds imagesTr."""
    return file_type(path) == "folder" and file_type(join(path, "imagesTr")) == "folder"


def read_layout(path: str, suffixes: Sequence[str], *, colours: bool = False) -> Layout:
    """The training cases of a folder; with `colours`, one file may hold all channels of a case."""
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
    facts: dict[str, Any] = {
        key: described[key] for key in ("name", "description", "licence", "license") if key in described
    }
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
    """{"0": "CT", "1": "PET"} as ("CT", "PET")."""
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        return None
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _label_names(path: str, labels: Any) -> dict[int, str]:
    """Names of label values; nnU-Net writes name: value, the Decathlon value: name."""
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
