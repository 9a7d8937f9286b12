"""Which files a source reads: those of the arrays, regions and levels that it has chosen."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METADATA = (".zgroup", ".zattrs", ".zarray", ".zmetadata", "zarr.json", "attributes.json")
ARRAY = (".zarray", "zarr.json", "attributes.json")


def needed_files(config: Any, path: Path) -> set[Path]:
    """Files that the source of a config reads; `path` is its local one."""
    if path.is_file():
        return {path} | _beside(config, path)
    root = _hierarchy(path)
    if root is None:
        return set(_walk(path))
    source = config.open()
    files = set(_metadata(root, path))
    for number, entry in enumerate(getattr(source, "entries", ())):
        for stored in (*entry.images, entry.labels):
            if stored is not None:
                files |= set(_array_files(source, number, stored))
    return files if getattr(source, "entries", ()) else set(_walk(path))


def _beside(config: Any, path: Path) -> set[Path]:
    """Files that belong to a file: what tells of it under the same name, and arrays that were found beside it."""
    stem = path.name.partition(".")[0]
    files = {path.with_name(f"{stem}.json")}
    for entry in getattr(config.open(), "entries", ()):
        files |= {
            Path(stored.name.partition("::")[0]) for stored in (*entry.images, entry.labels) if stored is not None
        }
    return {file.absolute() for file in files if file.is_file()}


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


def _array_files(source: Any, item: int, stored: Any) -> Iterator[Path]:
    """Files of the chunks of an array that lie in the region; all of it where the layout is not known."""
    chunks = stored.chunk_reader
    if chunks is None:
        yield from _walk(Path(stored.name))
        return
    layout = chunks.layout
    window = _window(source, item, stored)
    grid = [a * b for a, b in zip(layout.grid, layout.shards.chunks, strict=True)] if layout.shards else layout.grid
    cells = (range(w.start // g, -(-w.stop // g)) for w, g in zip(window, grid, strict=True))
    for index in itertools.product(*cells):
        file = Path(chunks.array) / layout.name(index)
        if file.is_file():  # what is missing is missing in the copy, too
            yield file


def _window(source: Any, item: int, stored: Any) -> tuple[slice, ...]:
    """The part of an array that is read of an item, one slice an axis."""
    region = source._regions[item]
    if stored is source.entries[item].labels:  # they may cover a box of the image alone
        region = [slice(r.start - o, r.stop - o) for r, o in zip(region, source._label_offsets[item], strict=True)]
    space, moment = iter(region), source.config.time
    return tuple(
        slice(moment, moment + 1) if name == "t" else slice(0, size) if name == "c" else next(space)
        for name, size in zip(stored.axes, stored.shape, strict=True)
    )


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
