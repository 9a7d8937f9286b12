"""Paths with stars, which stand for many files or folders: `folder/*.nii.gz`, `data/**/s0`.

- `*` stands for any part of a name, `**` for any folders on the way, or none; hidden names are left out
- below an array of Zarr or N5 there are chunks alone, and nothing is looked for
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vitrail.data.files.paths import file_type, is_url, join, list_files, list_folders, local_path, read_json
from vitrail.errors import UserError

MOST_FOLDERS = 10_000  # that are looked into
MOST_DEPTH = 64  # of folders below the first star
METADATA = (".zgroup", ".zattrs", ".zarray", ".zmetadata", "zarr.json", "attributes.json")  # of Zarr and N5
HIERARCHIES = (".zarr", ".n5")
STAR = re.compile(r"\*+")


class Match(NamedTuple):
    """A file or folder that a path stands for."""

    name: str  # below the last folder without a star
    path: str
    stars: tuple[str, ...]  # what each star stands for; of a path without stars, the name without its suffix
    is_folder: bool = False


def has_stars(path: str) -> bool:
    """Tell whether a path stands for many."""
    return "*" in path


def split_stars(path: str) -> tuple[str, list[str]]:
    """Split a path into the folder above the first star, and the names from there on."""
    first, chained, rest = path.partition("::") if is_url(path) else (path, "", "")
    names = first.split("/")
    number = next(n for n, name in enumerate(names) if "*" in name)
    head = "/".join(names[:number])
    head = f"{head}/" if head.endswith(":/") or (not head and number) else head
    return head + chained + rest, names[number:]


def find_matches(path: str) -> list[Match]:
    """List what a path with stars stands for, sorted as a person would; UserError where that is nothing."""
    head, names = split_stars(path)
    if len(names) > MOST_DEPTH:
        raise UserError(f"data path {path!r} has more than {MOST_DEPTH} names from its first star on; name a folder")
    looked_at: set[tuple[str, int]] = set()

    def look(folder: str, below: Sequence[str], left: Sequence[str], stars: tuple[str, ...]) -> Iterator[Match]:
        wanted, *rest = left
        if wanted == "**":
            yield from through(folder, below, rest or ["*"], stars, ())
            return
        for name, is_folder in _named(folder, wanted, only_folders=bool(rest)):
            place, inner = join(folder, name), (*below, name)
            found = (*stars, *(match_stars(wanted, name) or ()))
            if rest:
                yield from look(place, inner, rest, found)
            else:
                yield Match("/".join(inner), place, found, is_folder)

    def through(
        folder: str, below: Sequence[str], left: Sequence[str], stars: tuple[str, ...], passed: tuple[str, ...]
    ) -> Iterator[Match]:
        real = folder if is_url(folder) else str(local_path(folder).resolve())
        if (real, len(left)) in looked_at:  # links may lead there again
            return
        looked_at.add((real, len(left)))
        if len(passed) > MOST_DEPTH:
            raise UserError(
                f"data path {path!r}: folders are looked for more than {MOST_DEPTH} deep; name more of them"
            )
        if len(looked_at) > MOST_FOLDERS:
            raise UserError(
                f"data path {path!r}: more than {MOST_FOLDERS:,} folders are looked into; name more of them than `**`"
            )
        yield from look(folder, below, left, (*stars, "/".join(passed)))
        if is_array(folder):
            return
        for name in list_folders(folder):
            yield from through(join(folder, name), (*below, name), left, stars, (*passed, name))

    found = {}
    if file_type(head or ".") == "folder":
        found = {match.path: match for match in look(head, (), names, ())}
    if not found:
        raise UserError(
            f"data path {path!r} stands for no file or folder; check the spelling and the folder that it is relative to"
        )
    return list(found.values())


def find_volumes(path: str) -> list[Match]:
    """List what a path stands for, where a folder may hold hierarchies of Zarr and N5; itself, if it is just a path."""
    if has_stars(path):
        return find_matches(path)
    itself = is_url(path) or file_type(path) != "folder" or path.rstrip("/").lower().endswith(HIERARCHIES)
    if itself or any(file_type(join(path, name)) == "file" for name in METADATA):
        return [Match("", path, ())]
    inner = [name for name in list_folders(path) if name.lower().endswith(HIERARCHIES)]
    found = [Match(name, join(path, name), (name.rpartition(".")[0],), True) for name in inner]
    return found or [Match("", path, ())]


def fixed_part(path: str) -> str:
    """Return the folder above the first star of a path, or a path without stars as it is."""
    return split_stars(path)[0] or "." if has_stars(path) else path


def _named(folder: str, wanted: str, *, only_folders: bool) -> list[tuple[str, bool]]:
    """List the names in a folder that one with stars stands for, and whether they are folders."""
    if "*" not in wanted:
        kind = file_type(join(folder, wanted))
        return [(wanted, kind == "folder")] if kind == "folder" or (kind and not only_folders) else []
    found = [(name, True) for name in list_folders(folder)]
    if not only_folders:
        found += [(name, False) for name in list_files(folder)]
    return [each for each in found if match_stars(wanted, each[0]) is not None]


def match_stars(wanted: str, name: str) -> tuple[str, ...] | None:
    """Return what each star of a name with stars stands for in another name, or None where it does not stand for it.

    The first takes all that it can, then the second: as a regular expression has it, which many stars keep for ever.
    """
    first, *middle = STAR.split(wanted)
    if not middle:
        return () if name == wanted else None
    last = middle.pop()
    start, end = len(first), len(name) - len(last)
    if start > end or not name.startswith(first) or not name.endswith(last):
        return None
    found = []
    for part in reversed(middle):
        place = name.rfind(part, start, end)
        if place < 0:
            return None
        found.append(name[place + len(part) : end])
        end = place
    return (name[start:end], *reversed(found))


def fill_stars(pattern: str, stars: Sequence[str], *, where: str) -> str:
    """Put what the stars of a path stand for in the place of those of another path."""
    parts = STAR.split(pattern)
    if len(parts) - 1 > len(stars):
        raise UserError(f"{where} has {len(parts) - 1} stars, but `path` stands for {len(stars)}; write as many")
    filled = parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=False))
    return re.sub(r"(?<![:/])/{2,}", "/", filled)  # where ** stood for no folder


def is_array(folder: str) -> bool:
    """Tell whether a folder is an array of Zarr or N5, which holds chunks."""
    if file_type(join(folder, ".zarray")) == "file":
        return True
    for name, mark in (("zarr.json", "shape"), ("attributes.json", "dimensions")):
        place = join(folder, name)
        try:
            if file_type(place) == "file" and mark in read_json(place):
                return True
        except (OSError, ValueError, TypeError):  # UserError is a ValueError
            continue
    return False
