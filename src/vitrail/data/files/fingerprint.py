"""Marks that tell data from others without reading them: by the names, sizes and times of their files.

- links are followed, in no circle; where the files lie, and on which disk, does not count: a copy that keeps times is
  the same data
- what lies beside data and is none does not count: hidden files but those of Zarr and vitrail, thumbnails, a README
- of very many files the folders beyond so many count by their entries and the time when one came or went; beyond ten
  times as many a folder counts by that time alone, and is not looked into
- of a URL its size counts, and what the server says that changes with it; where it says nothing, nothing can be told

Here too: the files that a source reads, those of the arrays, regions and levels that it has chosen.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail.data.files.paths import is_url, local_path, remote_state
from vitrail.data.files.patterns import METADATA, find_volumes, fixed_part, has_stars, is_array
from vitrail.data.source import reads_of
from vitrail.data.stored import Stored, Window, chunks_in
from vitrail.disk import MARK
from vitrail.errors import UserError
from vitrail.foreign import is_trusting

MOST_FILES = 200_000  # whose age is part of a fingerprint, each by itself
IDLE = ("Thumbs.db", "desktop.ini", "__MACOSX", "lost+found")
MOST_LISTED = 10 * MOST_FILES  # files and folders, after which no other folder is listed


def data_state(
    config: Any, source: Any = None, tick: Callable[[], None] = lambda: None, leave_out: Sequence[Path] = ()
) -> dict[str, Any] | None:
    """Describe the data of one entry in JSON, {files, bytes, mark}; None where they cannot be told from others.

    `source` is that of the config, or of a copy, where it is open: it knows which files are read, such as labels that
    lie elsewhere. `tick` is called with each file. Folders to `leave_out` are those that are written to meanwhile.
    """
    path = getattr(config, "path", None)
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    if is_url(path.partition("::")[0]):
        state = remote_state(path)
        return None if state is None else {"files": 1, "bytes": state[0], "mark": _digest([state[1]])}
    places = _places(config, source)
    if not places:
        return None
    facts, number, size = hashlib.blake2b(digest_size=16), 0, 0
    without = {_identity(str(path)) for path in leave_out}
    for fact, length in itertools.chain.from_iterable(_ages(place, without) for place in places):
        tick()
        facts.update(f"\n{fact}".encode(errors="surrogateescape"))
        if length is not None:
            number, size = number + 1, size + length
    return {"files": number, "bytes": size, "mark": facts.hexdigest()}


def data_states(
    configs: Sequence[Any],
    sources: Sequence[Any] = (),
    tick: Callable[[], None] = lambda: None,
    leave_out: Sequence[Path] = (),
) -> list[dict[str, Any] | None]:
    """Describe the data of each entry of a list."""
    return [data_state(c, sources[number] if sources else None, tick, leave_out) for number, c in enumerate(configs)]


def changed(before: Any, now: Any) -> str | None:
    """Say what has become of an entry's data; None where nothing is known to have changed."""
    if not isinstance(before, dict) or not isinstance(now, dict) or before.get("mark") == now.get("mark"):
        return None
    then, new = ((state.get("files"), state.get("bytes")) for state in (before, now))
    if then == new:
        return f"the times or names of its {new[0]} files are others"
    return f"{then[0]} files with {then[1]} bytes became {new[0]} with {new[1]}"


def fingerprint(configs: Sequence[Any], settings: dict[str, Any], sources: Sequence[Any] = ()) -> str | None:
    """Return a digest of sources, settings and data; None where the data cannot be told from others."""
    facts = [json.dumps(settings, sort_keys=True, default=str)]
    for c, state in zip(configs, data_states(configs, sources), strict=True):
        if state is None or not is_dataclass(c) or isinstance(c, type):
            return None
        keys = json.dumps(asdict(c), sort_keys=True, default=str)  # in whatever order the class declares them
        facts.append(f"{type(c).__qualname__}{keys}{state['mark']}")
    return _digest(facts)


def _digest(facts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _place(name: str) -> Path:
    """Return the file or folder of a name that may have a key behind it."""
    return local_path(name.partition("::")[0]).absolute()


def _places(config: Any, source: Any) -> list[Path]:
    """List what is read: what lies at the path, or the files that a source tells; and what does not lie there."""
    path = config.path.partition("::")[0]
    own = [_place(path)]
    if has_stars(path):
        with suppress(UserError):
            own = [_place(each.path) for each in find_volumes(path)]
    what = reads_of(source)
    told = {_place(str(name)) for name in what.files or ()}
    first = own if own[0].exists() else sorted(told)
    arrays = [(each.stored, each.is_labels) for each in what.arrays if each.window is not None]
    names = {name for stored, is_labels in arrays for name in stored.files or ([stored.name] if is_labels else [])}
    labels = {name for stored, is_labels in arrays if is_labels for name in (*stored.files, stored.name)}
    opened = what.settings if isinstance(getattr(what.settings, "path", None), str) else config
    found = told | _absolute(names) if opened.path == config.path else set()  # and not the files of a copy
    # `labels` may be a path, or a name inside the file, under which something else may lie in the working folder.
    named, inside = _absolute([getattr(opened, "labels", None)]), _place(fixed_part(opened.path))
    read = told | _absolute(labels)
    around = ({path, *path.parents} for path in read)
    if not read or (named and any(named & each and inside not in each for each in around)):
        found |= _absolute([getattr(config, "labels", None)])
    beside = sorted(path for path in found if path.exists() and not {*own, *first} & {path, *path.parents})
    return [*first, *beside] if first else []


def _absolute(names: Iterable[Any]) -> set[Path]:
    """Return the local paths among names."""
    return {_place(name) for name in names if isinstance(name, str) and name and "\0" not in name and not is_url(name)}


def _ages(place: Path, without: Set[tuple[int, int] | str]) -> Iterator[tuple[str, int | None]]:
    """List facts of each file with its bytes; beyond so many files, facts of folders."""
    if not place.is_dir():
        yield _age(place, "")
        return
    top, number, seen = str(place), 0, {_identity(str(place))}
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        inner = os.path.relpath(folder, top)
        if number > MOST_LISTED:
            yield _age(folder, inner)[0], None
            continue
        _, names, files = next(os.walk(folder), (folder, [], []))  # links to folders are folders
        names = sorted(n for n in names if not _is_idle(n) and _identity(os.path.join(folder, n)) not in without)
        files = [name for name in files if not _is_idle(name)]
        number += len(names) + len(files)
        if number > MOST_FILES:  # the time of a folder counts only here: whoever makes and removes a file changes it
            yield f"{_age(folder, inner)[0]} {len(names)} {len(files)}", None
        else:
            yield from (_age(os.path.join(folder, name), os.path.join(inner, name)) for name in sorted(files))
            yield from ((os.path.join(inner, name), None) for name in names)
        kept = []
        for name in names:  # a folder that links lead to twice counts once; its inode is compared, never kept
            if (which := _identity(os.path.join(folder, name))) not in seen:
                seen.add(which)
                kept.append(name)
        waiting += [os.path.join(folder, name) for name in reversed(kept)]


def _is_idle(name: str) -> bool:
    """Tell whether a file or folder is one that people and systems leave beside data; some hidden ones are data."""
    if name.startswith("."):
        return not name.startswith((".z", MARK))
    return name in IDLE or name.upper().startswith(("README", "LICENSE"))


def _identity(path: str) -> tuple[int, int] | str:
    try:
        found = os.stat(path)
    except OSError:
        return path
    return found.st_dev, found.st_ino


def _age(path: str | Path, name: str) -> tuple[str, int | None]:
    try:
        found = os.stat(path)
    except OSError:
        return name, None
    return f"{name} {found.st_size} {found.st_mtime_ns}", found.st_size


FACTS = (*METADATA, "dataset.json", "index.json")


def needed_files(config: Any, path: Path) -> tuple[set[Path], set[Path]]:
    """Find the files that the source of a config reads, and links out of the data that it does not; `path` is local.

    A source tells them (`reads_of`), or each of its arrays does; else it is what lies at the path.
    """
    what = reads_of(config.open())
    if what.files is not None:
        names = [local_path(name).absolute() for name in what.files]
        through = _Through(names)
        return {file for name in names for file in _walk(name, through)}, through.left_out
    files: set[Path] = set()
    read: set[Path] = set()  # files and folders
    named: set[Path] = set()  # what is read of items that the entry's share leaves out, too
    around: set[Path] = set()  # arrays of labels: they may lie elsewhere in the hierarchy, or in another
    known: set[int] = set()  # arrays that many items share, as moments do, are listed once
    for stored, is_labels, window in what.arrays:
        if is_url(stored.name.partition("::")[0]):
            continue
        whole = stored.files or stored.chunk_reader is None
        if window is None:
            named |= _files_of(stored) | {_place(level.name) for level in stored.levels}
            around |= {_place(stored.name)} if is_labels else set()
        if whole and (is_labels or window is not None) and id(stored) not in known:
            known.add(id(stored))
            read |= _files_of(stored)
        elif window is not None and not whole:
            files |= set(_chunk_files(stored, window()))
    named |= read
    through = _Through(files | named | around)
    files |= {file for name in read for file in _walk(name, through)}
    for array in around:
        files |= set(_metadata_around(array, through))
    several = has_stars(str(path)) or what.hierarchy
    for top in [Path(each.path) for each in find_volumes(str(path))] if several else [path]:
        root = _hierarchy(top)
        if root is None or not what.arrays:
            files |= {*_walk(top, through), *_told_beside(top)}
        else:
            files |= set(_metadata(root, top, through))
    return files, through.left_out


class _Through:
    """The files that a source says it reads, with the folders around them; and links that it does not follow."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.known: set[Path] = set()
        self.left_out: set[Path] = set()
        for path in paths:
            for each in (path, *path.parents):
                if each in self.known:
                    break
                self.known.add(each)

    def may_follow(self, link: Path, top: Path) -> bool:
        """Tell whether to copy what is behind a link: it may be anybody's, so not where it leads out unread."""
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
        """Return the JSON that may tell of what is read, see `_told_beside`."""
        names = ((str(each.parent), each.name) for each in self.known)
        return {f"{folder}/{name[:end]}.json" for folder, name in names for end, c in enumerate(name) if c in "._"}


def _told_beside(path: Path) -> Iterator[Path]:
    """List what may tell of a file: JSON under its name or the first part of it, as scan.json of scan_0000.tif."""
    if path.is_file():
        for file in path.parent.glob("*.json"):
            if path.name.startswith((f"{file.stem}.", f"{file.stem}_")):
                yield file


def _files_of(stored: Stored) -> set[Path]:
    """Return the files and folders that an array is read from."""
    return {local_path(name).absolute() for name in stored.files} or {_place(stored.name)}


def _hierarchy(path: Path) -> Path | None:
    """Return the topmost folder around a path of the same Zarr or N5 hierarchy; None where there is none."""
    root = None
    for folder in (path, *path.parents):
        if not any((folder / name).is_file() for name in METADATA):
            break
        root = folder
    return root


def _metadata(root: Path, path: Path, through: _Through) -> Iterator[Path]:
    """List files that describe groups and arrays: of the folders above a path, and of all below it."""
    above = [folder for folder in path.parents if folder == root or root in folder.parents]
    for folder in above:
        yield from (folder / name for name in METADATA if (folder / name).is_file())
    yield from _walk(path, through, facts=True)


def _metadata_around(array: Path, through: _Through) -> Iterator[Path]:
    """List the metadata of an array and the other levels of its pyramid."""
    root = _hierarchy(array)
    if root is not None:
        yield from _metadata(root, array if root == array else array.parent, through)


def _chunk_files(stored: Stored, window: Window | None) -> Iterator[Path]:
    """List the files of the chunks of an array that a window touches."""
    if window is None:
        return
    chunks = stored.chunk_reader
    layout = chunks.layout
    grid = [a * b for a, b in zip(layout.grid, layout.shards.chunks, strict=True)] if layout.shards else layout.grid
    for index in chunks_in(window, grid):
        file = Path(chunks.array).absolute() / layout.name(index)
        if file.is_file():  # what is missing is missing in the copy, too
            yield file


def _walk(path: Path, through: _Through, *, facts: bool = False) -> Iterator[Path]:
    """List all files below a folder, or the file itself; `facts`: those alone that describe groups and arrays.

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
            if is_array(str(folder)):
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
