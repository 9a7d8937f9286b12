"""Pairs of files, image and labels, of sources of one file an item (`find_cases`).

- a file, the files of a folder, or those that a path with stars stands for
- labels are another file, or files of another folder or beside the images, which go by name: `pair_names` knows the
  usual patterns, such as image1 and label1. A path with stars names them by what those of the images' path stand for
- imagesTr and labelsTr, as nnU-Net and the Medical Segmentation Decathlon lay them out. nnU-Net: a file for each
  channel, CASE_0000.nii.gz, CASE_0001.nii.gz, and dataset.json names channels and labels. Decathlon (and plain pairs of
  folders): one file a case; dataset.json may name modalities and labels, or be absent
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from vitrail.data.files.paths import base_name, file_type, is_url, join, list_files, parent, read_json
from vitrail.data.files.patterns import Match, fill_stars, find_matches, has_stars
from vitrail.data.files.places import read_object
from vitrail.data.grid import GridSource
from vitrail.data.stored import Stored
from vitrail.errors import UserError


@dataclass(frozen=True)
class Case:
    """One item: its files, and that of its labels."""

    name: str
    images: tuple[str, ...]  # paths, one a channel
    labels: str | None


@dataclass(frozen=True)
class CaseLayout:
    """The items of a source, and what dataset.json tells of them."""

    cases: tuple[Case, ...]
    channels: tuple[str, ...] | None = None
    labels: dict[int, str] = field(default_factory=dict)  # names of the values
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on how labels were found, or why not
    beside: bool = False  # whether nothing but their names says that files beside the images are labels

    def made_by(self, make: Callable[["CaseLayout"], GridSource]) -> GridSource:
        """Return what is made of the items, without labels where those found beside turn out to be none."""
        try:
            return make(self)
        except UserError as error:
            if not self.beside:
                raise
            plain = tuple(replace(case, labels=None) for case in self.cases)
            note = f"labels that go by name are not used: {error}"
            return make(replace(self, cases=plain, notes=(note,), beside=False))

    def name_channels(self, images: Sequence[Stored]) -> tuple[Stored, ...]:
        """Return the images of a case with the names of their channels, where each is one."""
        if self.channels is None or len(self.channels) != len(images):
            return tuple(images)
        return tuple(replace(s, channels=(name,)) for s, name in zip(images, self.channels, strict=True))


# Words of names that labels have in the place of images' words, or besides the name of their image.
IMAGE_WORDS = ("images", "image", "imaging", "imgs", "img", "volumes", "volume", "vol", "scan", "raw", "ct", "im")
LABEL_WORDS = (
    "labels", "label", "segmentation", "seg", "masks", "mask", "gt", "groundtruth", "annotations", "annotation", "lab",
)  # fmt: skip


def find_cases(path: str, labels: str | None, suffixes: Sequence[str], *, colours: bool = False) -> CaseLayout:
    """Return the items of a folder with imagesTr, or else of a file or folder with its labels beside or elsewhere."""
    if is_layout(path):
        return read_layout(path, suffixes, labels=labels, colours=colours)
    if labels is not None:
        return CaseLayout(list_cases(path, labels, suffixes))
    return _find_beside(path, list_items(path, suffixes), suffixes)


def list_cases(path: str, labels: str | None, suffixes: Sequence[str]) -> tuple[Case, ...]:
    """Return the files of a format, the one at a path or those of a folder, each with that of its labels."""
    items = list_items(path, suffixes)
    pairs = {} if labels is None else pair_labels(items, labels, suffixes)
    return tuple(Case(each.name, (each.path,), pairs.get(each.name)) for each in items)


def stem(name: str, suffixes: Sequence[str]) -> str:
    """Return a file's name without the suffix of its format."""
    low = name.lower()
    return next((name[: -len(suffix)] for suffix in suffixes if low.endswith(suffix)), PurePosixPath(name).stem)


def list_items(path: str, suffixes: Sequence[str]) -> list[Match]:
    """List the files of a format: the one at a path, or those of a folder or of stars, sorted as a person would."""
    if has_stars(path):
        found = [each for each in find_matches(path) if not each.is_folder]
        if not found:
            raise UserError(f"{path} stands for folders alone; write the names of files, such as {path}/*{suffixes[0]}")
        return found
    kind = file_type(path)
    if kind is None:
        raise UserError(f"data path {path!r} does not exist; check the spelling and the folder that it is relative to")
    if kind == "file":
        return [Match(base_name(path), path, (stem(base_name(path), suffixes),))]
    names = [name for name in list_files(path) if name.lower().endswith(tuple(suffixes))]
    if not names:
        raise UserError(f"{path} holds no files {', '.join(suffixes)}; give a file or a folder of such files")
    return [Match(name, join(path, name), (stem(name, suffixes),)) for name in names]


def pair_labels(items: Sequence[Match], labels: str, suffixes: Sequence[str]) -> dict[str, str]:
    """Return the path of each item's labels: one file for one item, or files that go by name in a folder."""
    if has_stars(labels):
        return {each.name: named_labels(labels, each.stars, each.path) for each in items}
    if file_type(labels) is None:
        raise UserError(
            f"labels = {labels!r} does not exist; give a file, a folder with a file for each item, or a path with stars"
        )
    if file_type(labels) == "file":
        if len(items) > 1:
            raise UserError(
                f"labels = {labels!r} is one file for {len(items)} items; give a folder with a file for each"
            )
        return {items[0].name: labels}
    by_stem = {stem(each.name, suffixes): each.path for each in list_items(labels, suffixes)}
    stems = {each.name: stem(each.name, suffixes) for each in items}
    pairs = pair_names(list(stems.values()), list(by_stem))
    for each in items:
        if stems[each.name] not in pairs:
            raise UserError(
                f"labels = {labels!r} holds no labels of {each.path}; expected a file named {stems[each.name]}, or say "
                "what they are called with stars in both paths: path: images/*_ct.nii, labels: labels/*_organs.nii"
            )
    return {name: by_stem[pairs[stems[name]]] for name in stems}


def named_labels(labels: str, stars: Sequence[str], image: str) -> str:
    """Return the labels of an image, by a path with stars and what those of the image's path stand for."""
    found = fill_stars(labels, stars, where=f"labels = {labels!r}")
    if file_type(found) is None:
        raise UserError(
            f"labels = {labels!r} is {found} for {image}, which does not exist; its stars stand for what those of "
            "`path` do, or for the name of a file without its suffix"
        )
    return found


def pair_names(images: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
    """Return the labels of images that have some, all names without suffix: by the usual pattern that fits most.

    Patterns that fit as many, by which an image has other labels, are refused; its own name comes before them.
    """
    best = {name: name for name in set(images) & set(labels)}
    known = {name.lower(): name for name in labels}
    other: dict[str, str] = {}  # by another pattern that fits as many
    by_word = False
    for number, make in enumerate(_patterns(images, labels)):
        if len(best) == len(images) and not by_word:
            return best
        found = {image: known[made] for image in images if (made := make(image.lower())) in known}
        if len(set(found.values())) < len(found):
            continue
        if len(found) > len(best):
            best, other, by_word = found, {}, number >= OWN_NAMES
        elif by_word and len(found) == len(best):
            other = other or {name: found[name] for name in found if best.get(name, found[name]) != found[name]}
    for image, second in other.items():
        raise UserError(
            f"labels of {image!r} may be {best[image]!r} or {second!r}; say which with stars in `path` and `labels`, "
            "such as path: images/*.nii, labels: labels/*_seg.nii"
        )
    return best


OWN_NAMES = 2  # patterns, the first, by which labels are called as their image


def _patterns(images: Sequence[str], labels: Sequence[str]) -> Iterator[Callable[[str], str]]:
    """Make functions that turn the name of an image into what its labels may be called."""
    yield lambda name: name
    yield lambda name: re.sub(r"_0000$", "", name)  # nnU-Net's number of the first channel
    every = [" ".join(names).lower() for names in (images, labels)]
    new_words = [word for word in LABEL_WORDS if word in every[1]]
    for old in (word for word in IMAGE_WORDS if word in every[0]):
        for new in new_words:
            yield partial(re.sub, rf"(?<![a-z]){old}(?![a-z])", new)
        yield partial(re.sub, rf"(?<=[^a-z])[._-]?{old}$", "")
    for new in new_words:
        for mark in "_-.":
            yield f"{{}}{mark}{new}".format
            yield f"{new}{mark}{{}}".format


def is_named_like_labels(name: str) -> bool:
    """Tell whether one of the words in a name is one that labels have."""
    return not set(LABEL_WORDS).isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _find_beside(path: str, items: Sequence[Match], suffixes: Sequence[str]) -> CaseLayout:
    """Find the labels among the files of a folder, or beside a file; where names do not tell, all are images."""
    beside = list(items)
    if len(items) == 1 and items[0].path == path and not is_url(path):
        folder = parent(path) if "/" in path else ""
        beside += [Match(name, join(folder, name), ()) for name in list_files(folder) if name != items[0].name]
    beside = [each for each in beside if each.name.lower().endswith(tuple(suffixes))]
    by_stem = {stem(each.name, suffixes): each for each in beside}
    named = [name for name in by_stem if is_named_like_labels(name)]
    plain = {stem(each.name, suffixes): each for each in items if not is_named_like_labels(stem(each.name, suffixes))}
    try:
        pairs = pair_names(list(plain), named)
    except UserError as error:
        return CaseLayout(tuple(Case(each.name, (each.path,), None) for each in items), notes=(str(error),))
    if not pairs or (len(items) > 1 and (len(pairs) < len(named) or len(by_stem) < len(items))):
        return CaseLayout(tuple(Case(each.name, (each.path,), None) for each in items))
    cases = [
        Case(each.name, (each.path,), by_stem[pairs[name]].path if name in pairs else None)
        for name, each in plain.items()
    ]
    return CaseLayout(tuple(cases), notes=(_told(cases),), beside=True)


def _told(cases: Sequence[Case]) -> str:
    """Say how labels were found."""
    first = next(case for case in cases if case.labels is not None)
    number = sum(case.labels is not None for case in cases)
    return (
        f"labels go by name: {first.labels} is taken for those of {first.images[0]}, and so on for {number} of "
        f"{len(cases)} items; `labels` names others"
    )


def is_layout(path: str) -> bool:
    """Tell whether a folder holds imagesTr."""
    return file_type(path) == "folder" and file_type(join(path, "imagesTr")) == "folder"


def read_layout(path: str, suffixes: Sequence[str], *, labels: str | None = None, colours: bool = False) -> CaseLayout:
    """Read the training cases of a folder; with `colours`, one file may hold all channels of a case.

    Labels are those of labelsTr, where some may lack, or of what `labels` names, where none may.
    """
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
    known = {}
    if labels is None and file_type(join(path, "labelsTr")) == "folder":
        known = {stem(n, endings): join(path, "labelsTr", n) for n in list_files(join(path, "labelsTr"))}
    stems = [stem(name, endings) for name in files]
    numbered = all(re.fullmatch(r".+_\d{4}", case) for case in stems)
    if names is None:  # the numbers may count volumes: they are channels only where the labels are named without them
        numbered = numbered and bool(known) and all(case[:-5] in known for case in stems)
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
        cases.append(Case(case, tuple(join(path, "imagesTr", part) for part in parts), None))
    notes = []
    if labels is not None:
        pairs = pair_labels([Match(case.name, case.images[0], (case.name,)) for case in cases], labels, endings)
    else:
        try:
            pairs = {case: known[name] for case, name in pair_names(list(grouped), list(known)).items()}
        except UserError as error:
            pairs, known = {}, {}
            notes.append(f"{path}/labelsTr: {error}")
    cases = [replace(case, labels=pairs.get(case.name)) for case in cases]
    if labels is None and any(case != stem(base_name(place), endings) for case, place in pairs.items()):
        notes.append(_told(cases))
    if known and (lost := [case for case in grouped if case not in pairs]):
        notes.append(f"{path}/labelsTr holds no labels of {lost[0]}; add them there, or remove the image")
    channels = _in_order(names if names is not None else modality)
    told = ("name", "description", "licence", "license")
    facts = {"layout": "imagesTr", **{key: described[key] for key in told if key in described}}
    return CaseLayout(tuple(cases), channels, _label_names(path, described.get("labels")), facts, tuple(notes))


def _describe(path: str) -> dict[str, Any]:
    place = join(path, "dataset.json")
    return {} if file_type(place) is None else read_object(place, read_json)


def _in_order(names: Any) -> tuple[str, ...] | None:
    """Read {"0": "CT", "1": "PET"} as ("CT", "PET")."""
    if not isinstance(names, dict) or not all(re.fullmatch(r"\d{1,9}", str(key)) for key in names):
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
