"""What a look at data finds beside what the path alone says: a table of classes, and axes that sizes speak for.

- a CSV or TSV in the folder of images, or beside it, gives their classes where it has a row for each
- a folder of a folder of images and one of their labels is read as these
- arrays whose file names no axes are looked at as their sizes suggest, and the recipe that is proposed says so
"""

import dataclasses
from typing import Any

from vitrail.data.axes import likely_axes, note_of_axes
from vitrail.data.files.paths import base_name, file_type, is_url, join, list_files, list_folders, parent
from vitrail.data.files.patterns import has_stars
from vitrail.data.source import Source, class_names
from vitrail.data.sources import guess_kind, is_image
from vitrail.data.sources.classes import TABLES, guess_columns
from vitrail.data.sources.image_folder import IMAGES, MASKS, ImageFolderConfig
from vitrail.errors import UserError

PARTS = {"train", "training", "valid", "validation", "val", "test", "testing", "images", "image", "imgs", "img", "data"}
MOST_TABLES = 8  # that are tried
SURELY = 10  # times as many as pixels on a side: then slices are images, and no volume


def pair_of_folders(path: str) -> tuple[str, str] | None:
    """Return the folder of images and that of labels in a folder that holds just these; None where it does not."""
    if is_url(path) or has_stars(path) or file_type(path) != "folder":
        return None
    folders = list_folders(path)
    images, masks = ([name for name in folders if name.lower() in words] for words in (IMAGES, MASKS))
    if len(images) != 1 or len(masks) != 1 or any(is_image(name) for name in list_files(path)):
        return None
    return join(path, images[0]), join(path, masks[0])


def with_folders(path: str, kind: str | None, given: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the path of the images, where a folder holds these and their labels in two folders, and what that says."""
    pair = None if {"labels", "classes"} & set(given) else pair_of_folders(path)
    if pair is None:
        return path, given, []
    note = f"{path} holds {base_name(pair[0])}/ and {base_name(pair[1])}/: images, and labels of their voxels by name"
    more: dict[str, Any] = {"labels": pair[1]}
    if (kind or guess_kind(pair[0])) == "image_folder" and "unlabelled" not in given:
        stems = [{name.rpartition(".")[0] for name in list_files(folder)} for folder in pair]
        if not stems[0] <= stems[1]:  # another pattern of names may pair them all: the source tells
            try:
                ImageFolderConfig(path=pair[0], labels=pair[1]).open()
            except UserError:
                more["unlabelled"] = "leave_out"
    return pair[0], {**given, **more}, [note]


def with_table(config: Any, source: Source) -> tuple[Any, Source]:
    """Return an image folder with the classes that a table tells, and a note on it; as it is where there is none."""
    keys = ("class_table", "class_pattern", "classes", "labels")
    if config.kind != "image_folder" or any(getattr(config, key) is not None for key in keys):
        return config, source
    if has_stars(config.path) or is_url(config.path) or file_type(config.path) != "folder":
        return config, source
    if not {name.lower() for name in class_names(source)} <= PARTS:  # folders that tell classes
        return config, source
    said = []
    for table, name, inside in _tables(config.path):
        made: Any = dataclasses.replace(config, class_table=name)
        try:
            try:
                opened: Source = made.open()
            except UserError:
                columns = guess_columns(table, source.names)  # type: ignore[attr-defined]
                if columns is None:
                    raise
                made = dataclasses.replace(made, class_columns=columns)
                opened = made.open()
        except (OSError, UserError) as error:
            if inside:
                said.append(f"{table} tells no classes: {error}")
            continue
        classes, images = len(class_names(opened)), len(opened.items)
        if classes < 2 or 2 * classes > images:
            said.append(f"{table} is not taken for classes: it tells {classes} of {images} images")
            continue
        columns = made.class_columns
        which = "" if columns is None else f", column {columns[1]} of the images in column {columns[0]},"
        add_notes(opened, [f"{table}{which} tells the {classes} classes of the images: `class_table: {name}`"])
        return made, opened
    add_notes(source, said)
    return config, source


def _tables(folder: str) -> list[tuple[str, str, bool]]:
    """List tables: their paths, how a recipe names them, and whether they lie in the folder and not beside it."""

    def lying(place: str) -> list[str]:
        try:
            return [name for name in list_files(place) if name.lower().endswith(TABLES)]
        except (OSError, UserError):
            return []

    above = parent(folder)
    inside = [(join(folder, name), name, True) for name in lying(folder)]
    places = [join(above, name).removeprefix("./") for name in lying(above) if above != folder]
    return [*inside[:MOST_TABLES], *((place, place, False) for place in places[:MOST_TABLES])]


def with_axes(config: Any, source: Source) -> tuple[Any, Source]:
    """Return a source with the axes that its sizes speak for, where its file names none, and a note on both."""
    entries = getattr(source, "entries", None)
    if not entries or getattr(config, "axes", "") is not None:
        return config, source
    first = entries[0].images[0]
    likely = likely_axes(first.shape) if first.guessed else None
    if likely is None or (likely == "nyx" and first.shape[0] < SURELY * max(first.shape[1:])):
        return config, source  # which may be a deep volume
    made = dataclasses.replace(config, axes=likely)
    try:
        opened: Source = made.open()
    except UserError:
        return config, source
    add_notes(opened, [f"{note}; here it is looked at as {likely}" for note in note_of_axes(first)])
    return made, opened


def add_notes(source: Any, notes: list[str]) -> None:
    """Put notes before those of a source."""
    if notes:
        source.notes = [*notes, *getattr(source, "notes", ())]
