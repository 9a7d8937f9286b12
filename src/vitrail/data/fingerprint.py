"""What tells data from others without reading them: the names, sizes and times of their files.

- links are followed, in no circle; where the files lie, and on which disk, does not count: a copy that keeps times is
  the same data
- what lies beside data and is none does not count: hidden files but those of Zarr and vitrail, thumbnails, a README
- of very many files the folders beyond so many count by their entries and the time when one came or went; beyond ten
  times as many a folder counts by that time alone, and is not looked into
- of a URL its size counts, and what the server says that changes with it; where it says nothing, nothing can be told
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from vitrail.data.files import is_url, local_path, remote_state
from vitrail.disk import MARK

MOST_FILES = 200_000  # whose age is part of a fingerprint, each by itself
IDLE = ("Thumbs.db", "desktop.ini", "__MACOSX", "lost+found")
MOST_LISTED = 10 * MOST_FILES  # files and folders, after which no other folder is listed


def data_state(
    config: Any, source: Any = None, tick: Callable[[], None] = lambda: None, leave_out: Sequence[Path] = ()
) -> dict[str, Any] | None:
    """Of one entry, in JSON: {files, bytes, mark}; None where its data cannot be told from others.

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
    """Of each entry of a list."""
    return [data_state(c, sources[number] if sources else None, tick, leave_out) for number, c in enumerate(configs)]


def changed(before: Any, now: Any) -> str | None:
    """What has become of an entry's data, in words; None where nothing is known to have changed."""
    if not isinstance(before, dict) or not isinstance(now, dict) or before.get("mark") == now.get("mark"):
        return None
    then, new = ((state.get("files"), state.get("bytes")) for state in (before, now))
    if then == new:
        return f"the times or names of its {new[0]} files are others"
    return f"{then[0]} files with {then[1]} bytes became {new[0]} with {new[1]}"


def fingerprint(configs: Sequence[Any], settings: dict[str, Any], sources: Sequence[Any] = ()) -> str | None:
    """Names sources and settings, and changes with the data; None where those cannot be told from others."""
    facts = [json.dumps(settings, sort_keys=True, default=str)]
    for c, state in zip(configs, data_states(configs, sources), strict=True):
        if state is None or not is_dataclass(c) or isinstance(c, type):
            return None
        facts.append(f"{type(c).__qualname__}{asdict(c)}{state['mark']}")
    return _digest(facts)


def _digest(facts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _local(path: str) -> Path:
    return local_path(os.path.expanduser(path.partition("::")[0]))


def _places(config: Any, source: Any) -> list[Path]:
    """What is read: what lies at the path, or the files that a source tells; and what does not lie there."""
    own = _local(config.path).absolute()
    declared = getattr(source, "files", None)
    told = {_local(str(name)).absolute() for name in declared()} if callable(declared) else set()
    first = [own] if own.exists() else sorted(told)
    names: set[str] = set()
    labels: set[str] = set()
    for entry in getattr(source, "entries", ()):
        for stored in (*getattr(entry, "images", ()), getattr(entry, "labels", None)):
            if stored is not None:
                names |= {*stored.files} or ({stored.name} if stored is entry.labels else set())
                labels |= {*stored.files, stored.name} if stored is entry.labels else set()
    opened: Any = getattr(source, "config", None)
    opened = opened if isinstance(getattr(opened, "path", None), str) else config
    found = told | _absolute(names) if opened.path == config.path else set()  # and not the files of a copy
    # `labels` may be a path, or a name inside the file, under which something else may lie in the working folder.
    named, inside = _absolute([getattr(opened, "labels", None)]), _local(opened.path).absolute()
    read = told | _absolute(labels)
    around = ({path, *path.parents} for path in read)
    if not read or (named and any(named & each and inside not in each for each in around)):
        found |= _absolute([getattr(config, "labels", None)])
    beside = sorted(path for path in found if path.exists() and not {own, *first} & {path, *path.parents})
    return [*first, *beside] if first else []


def _absolute(names: Iterable[Any]) -> set[Path]:
    """The local paths among names."""
    kept = (name for name in names if isinstance(name, str) and name and "\0" not in name and not is_url(name))
    return {_local(name).absolute() for name in kept}


def _ages(place: Path, without: Set[tuple[int, int] | str]) -> Iterator[tuple[str, int | None]]:
    """Facts of each file with its bytes; beyond so many, folders by their number of entries and their time, or that."""
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
    """Whether a file or folder is one that people and systems leave beside data; some hidden ones are data."""
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
