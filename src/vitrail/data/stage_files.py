"""Which files a source reads: those of the arrays, regions and levels that it has chosen."""

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.data.files import is_url, local_path
from vitrail.data.stored import Stored, Window
from vitrail.errors import UserError
from vitrail.foreign import is_trusting, read_json

METADATA = (".zgroup", ".zattrs", ".zarray", ".zmetadata", "zarr.json", "attributes.json")
ARRAY = (".zarray", "zarr.json", "attributes.json")
FACTS = (*METADATA, "dataset.json", "index.json")


def needed_files(config: Any, path: Path) -> tuple[set[Path], set[Path]]:
    """Files that the source of a config reads, and links out of the data that it does not; `path` is its local one.

    A source tells them by its own `files()`, or each of its arrays does; else it is what lies at the path.
    """
    source = config.open()
    if callable(declared := getattr(source, "files", None)):
        names = [_absolute(name) for name in declared()]
        through = _Through(names)
        return {file for name in names for file in _walk(name, through)}, through.left_out
    root, windows = _hierarchy(path), getattr(source, "stored_window", None)
    files: set[Path] = set()
    read: set[Path] = set()  # files and folders
    around: set[Path] = set()  # arrays of labels: they may lie elsewhere in the hierarchy, or in another
    known: set[int] = set()  # arrays that many items share, as moments do, are listed once
    for number, entry in enumerate(getattr(source, "entries", ())):
        for stored in (*entry.images, entry.labels):
            if stored is None or id(stored) in known or is_url(stored.name.partition("::")[0]):
                continue
            if stored.files or stored.chunk_reader is None:
                known.add(id(stored))
                read |= {_absolute(name) for name in stored.files or (stored.name.partition("::")[0],)}
            elif windows is not None:
                files |= set(_chunk_files(stored, windows(number, stored)))
    named = set(read)
    # Of the items that the entry's share leaves out, too: the copy's shares are counted by what is there.
    for stored, is_labels in getattr(source, "listed", ()):
        if is_url(stored.name.partition("::")[0]):
            continue
        told = {_absolute(name) for name in stored.files or (stored.name.partition("::")[0],)}
        named |= told | {_absolute(level.name.partition("::")[0]) for level in stored.levels}
        if is_labels:
            around.add(_absolute(stored.name))
            if stored.files or stored.chunk_reader is None:
                read |= told
    through = _Through(files | named | around)
    files |= {file for name in read for file in _walk(name, through)}
    for array in around:
        files |= set(_metadata_around(array, through))
    if root is None or windows is None:
        files |= {*_walk(path, through), *_told_beside(path)}
    else:
        files |= set(_metadata(root, path, through))
    return files, through.left_out


class _Through:
    """What a source says that it reads, with the folders around it; and links out of the data that it does not read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.known: set[Path] = set()
        self.left_out: set[Path] = set()
        for path in paths:
            for each in (path, *path.parents):
                if each in self.known:
                    break
                self.known.add(each)

    def may_follow(self, link: Path, top: Path) -> bool:
        """Whether to copy what is behind a link: it may be anybody's, so not where it leads out and is not read."""
        if link in self.known or link.name in FACTS or is_trusting():
            return True
        if link.suffix == ".json" and str(link) in self._beside:
            return True
        target = Path(os.path.realpath(link))
        if target.is_relative_to(os.path.realpath(top)):
            return True
        if top not in self._folders:
            raise UserError(
                f"data.stage: {link} is a link to {target}, which lies outside of the data, and their source does not "
                "say what it reads; remove it, set `stage: false` for the entry, or give --trust if you know who made "
                "it"
            )
        self.left_out.add(link)
        return False

    @cached_property
    def _folders(self) -> set[Path]:
        return {each.parent for each in self.known}

    @cached_property
    def _beside(self) -> set[str]:
        """JSON that may tell of what is read, see `_told_beside`."""
        names = ((str(each.parent), each.name) for each in self.known)
        return {f"{folder}/{name[:end]}.json" for folder, name in names for end, c in enumerate(name) if c in "._"}


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


def _metadata(root: Path, path: Path, through: _Through) -> Iterator[Path]:
    """Files that describe groups and arrays: of the folders above a path, and of all below it."""
    above = [folder for folder in path.parents if folder == root or root in folder.parents]
    for folder in above:
        yield from (folder / name for name in METADATA if (folder / name).is_file())
    yield from _walk(path, through, facts=True)


def _metadata_around(array: Path, through: _Through) -> Iterator[Path]:
    """Metadata of an array and the other levels of its pyramid."""
    root = _hierarchy(array)
    if root is not None:
        yield from _metadata(root, array if root == array else array.parent, through)


def _is_array(folder: Path) -> bool:
    if (folder / ".zarray").is_file():
        return True
    for name, mark in (("zarr.json", "shape"), ("attributes.json", "dimensions")):
        try:
            if mark in read_json(folder / name):
                return True
        except (OSError, ValueError, TypeError):
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


def _walk(path: Path, through: _Through, *, facts: bool = False) -> Iterator[Path]:
    """All files below a folder, or the file itself; `facts`: those alone that describe groups and arrays.

    Links are followed, each folder once; those that lead out of the path only where the source reads there.
    """
    if path.is_file():
        yield path
        return
    seen: set[str] = set()
    todo = [path] if path.is_dir() else []
    while todo:
        folder = todo.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        if facts:
            yield from (folder / name for name in METADATA if (folder / name).is_file())
            # Below an array there are only chunks; what else a chunk's folder may hold is none of ours.
            if _is_array(folder):
                continue
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            place, is_link = Path(entry.path), entry.is_symlink()
            is_folder = place.is_dir() if is_link else entry.is_dir()
            if facts and not is_folder:
                continue
            if is_link and not through.may_follow(place, path):
                continue
            if is_folder:
                todo.append(place)
            else:
                yield place
