"""Which files a source reads: those of the arrays, regions and levels that it has chosen."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitrail.data.files import is_url, local_path
from vitrail.data.stored import Stored, Window

METADATA = (".zgroup", ".zattrs", ".zarray", ".zmetadata", "zarr.json", "attributes.json")
ARRAY = (".zarray", "zarr.json", "attributes.json")


def needed_files(config: Any, path: Path) -> set[Path]:
    """Files that the source of a config reads; `path` is its local one.

    A source tells them by its own `files()`, or each of its arrays does; else it is what lies at the path.
    """
    source = config.open()
    if callable(declared := getattr(source, "files", None)):
        return {file for name in declared() for file in _walk(_absolute(name))}
    root, windows = _hierarchy(path), getattr(source, "stored_window", None)
    files: set[Path] = set()
    if root is None or windows is None:
        files |= {*_walk(path), *_told_beside(path)}
    else:
        files |= set(_metadata(root, path))
    known: set[int] = set()  # arrays that many items share, as moments do, are listed once
    for number, entry in enumerate(getattr(source, "entries", ())):
        for stored in (*entry.images, entry.labels):
            if stored is None or id(stored) in known or is_url(stored.name.partition("::")[0]):
                continue
            if stored.files or stored.chunk_reader is None:
                known.add(id(stored))
                names = stored.files or (stored.name.partition("::")[0],)
                files |= {file for name in names for file in _walk(_absolute(name))}
            elif windows is not None:
                files |= set(_chunk_files(stored, windows(number, stored)))
            if stored is entry.labels:  # they may lie elsewhere in the hierarchy, or in another
                files |= set(_metadata_around(_absolute(stored.name)))
    return files


def _told_beside(path: Path) -> Iterator[Path]:
    """What may tell of a file: JSON under its name, or the first part of it, as of scan.json for scan_0000.tif."""
    if path.is_file():
        for file in path.parent.glob("*.json"):
            if path.name.startswith((f"{file.stem}.", f"{file.stem}_")):
                yield file


def _absolute(name: str) -> Path:
    return local_path(name).absolute()


def _hierarchy(path: Path) -> Path | None:
    """The topmost folder around a path that is still of the same Zarr or N5 hierarchy; None where there is none."""
    root = None
    for folder in (path, *path.parents):
        if not any((folder / name).is_file() for name in METADATA):
            break
        root = folder
    return root


def _metadata(root: Path, path: Path) -> Iterator[Path]:
    """Files that describe groups and arrays: of the folders above a path, and of all below it."""
    above = [folder for folder in path.parents if folder == root or root in folder.parents]
    for folder in above:
        yield from (folder / name for name in METADATA if (folder / name).is_file())
    yield from _metadata_below(path)


def _metadata_around(array: Path) -> Iterator[Path]:
    """Metadata of an array and the other levels of its pyramid."""
    root = _hierarchy(array)
    if root is not None:
        yield from _metadata(root, array if root == array else array.parent)


def _metadata_below(folder: Path) -> Iterator[Path]:
    found = [folder / name for name in METADATA if (folder / name).is_file()]
    yield from found
    # Below an array there are only chunks; what else a chunk's folder may hold is none of ours.
    if _is_array(folder):
        return
    with os.scandir(folder) as entries:
        below = [Path(entry.path) for entry in entries if entry.is_dir()]
    for each in below:
        yield from _metadata_below(each)


def _is_array(folder: Path) -> bool:
    if (folder / ".zarray").is_file():
        return True
    for name, mark in (("zarr.json", "shape"), ("attributes.json", "dimensions")):
        try:
            if mark in json.loads((folder / name).read_text(encoding="utf-8")):
                return True
        except (OSError, ValueError):
            continue
    return False


def _chunk_files(stored: Stored, window: Window | None) -> Iterator[Path]:
    """Files of the chunks of an array that a window touches."""
    if window is None:
        return
    chunks = stored.chunk_reader
    layout = chunks.layout
    grid = [a * b for a, b in zip(layout.grid, layout.shards.chunks, strict=True)] if layout.shards else layout.grid
    cells = (range(w.start // g, -(-w.stop // g)) for w, g in zip(window, grid, strict=True))
    for index in itertools.product(*cells):
        file = Path(chunks.array).absolute() / layout.name(index)
        if file.is_file():  # what is missing is missing in the copy, too
            yield file


def _walk(path: Path) -> Iterator[Path]:
    """All files below a folder, or the file itself; links are followed, but in no circle."""
    if path.is_file():
        yield path
    seen = {os.path.realpath(path)}
    for place, folders, names in os.walk(path, followlinks=True):
        real = {folder: os.path.realpath(os.path.join(place, folder)) for folder in sorted(folders)}
        folders[:] = [folder for folder, where in real.items() if where not in seen]
        seen |= set(real.values())
        yield from (Path(place) / name for name in sorted(names))
