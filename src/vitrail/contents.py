"""The contents of a folder of a run or a benchmark, which may be plain files and folders only.

Nothing here imports torch: reports and recipes ask, too. Such a folder may come from somebody else. A link in it would
have files elsewhere overwritten or removed, reading a pipe would wait for ever, and a file with a second name elsewhere
is also written to there.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import UserError
from vitrail.sums import check_version

FORMAT = 1  # of run folders, which environment.json tells; that of checkpoints is theirs
FILES = ("recipe.yaml", "metrics.jsonl", "environment.json", "data.json", "report.html", ".lock")
FOLDERS = (
    "checkpoints",
    "pictures",
    "tensorboard",
    "wandb",
    "mlflow",
    "flight-recorder",
    "samples",
    "profile",
    "probe",
)
# In folders of a run, what it writes there before its first step; a user's files may lie beside.
EARLY = {
    "pictures": r".+-0{8}\.png",
    "tensorboard": r"events\.out\.tfevents\..+",
    "flight-recorder": r"(nccl|gloo)_rank_\d+",
}
OWNER = "process "  # how a run's lock begins
LARGEST = 1 << 20  # bytes of environment.json
LONGEST = 255  # bytes of one name, on every usual file system


class Layout(NamedTuple):
    """Names in a folder of vitrail's own, and what it is called."""

    what: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    in_place: tuple[str, ...] = ()  # files that are written to as they are; others are replaced whole
    shallow: tuple[str, ...] = ()  # folders of which what lies deeper is not looked at
    links: str = r"(?!)"  # a pattern of paths that may be links


# Samples are looked at by what writes them, and may be very many. Every session of wandb has a new folder, and there a
# link to a log of its own, which it neither reads nor writes through.
RUN = Layout(
    "run folder",
    FILES,
    FOLDERS,
    ("metrics.jsonl", ".lock"),
    shallow=("samples",),
    links=r"wandb/[^/]+/logs/debug-core\.log",
)
BENCH = Layout(
    "bench folder",
    ("sweep.json", "results.jsonl", "results.csv", "report.html", ".lock"),
    ("cells", "logs", "jobs", "plots"),
    ("results.jsonl", ".lock"),
)


def check_name(path: Path, what: str) -> None:
    """Refuse what no file system takes for a path, before anything is asked of it."""
    text = str(path)
    try:
        longest = max(len(os.fsencode(part)) for part in path.parts or (".",))
    except UnicodeEncodeError:
        longest = 0
        text += "\0"
    if "\0" in text:
        raise UserError(f"{what}: {str(path)!r} has a character that no path can have; choose another name")
    if longest > LONGEST:
        shown = text if len(text) <= 40 else f"{text[:30]}...{text[-6:]}"
        raise UserError(f"{what}: {shown!r} has a name of {longest} bytes, at most {LONGEST} fit; choose a shorter one")


def check_contents(run: Path, *, reading: bool = False) -> None:
    """Refuse a run folder that holds what none may hold, or that a newer vitrail has written.

    Files with a second name are of no harm to what only reads.
    """
    check_layout(run, RUN._replace(in_place=()) if reading else RUN)
    told = _read_environment(run)
    if "format" in told:  # older ones do not tell
        check_version(told["format"], FORMAT, str(run))


def check_layout(top: Path, layout: Layout) -> None:
    """Refuse a folder that holds anything but plain files and folders, or one where the other is expected."""
    try:
        _check(top, top, layout)
    except OSError as error:
        raise UserError(f"{top} cannot be read: {error.strerror}; check its permissions.") from None
    for name in layout.folders:
        for folder, _, _ in os.walk(top / name):
            with contextlib.suppress(FileNotFoundError):  # a run that goes on removes checkpoints
                _check(top, Path(folder), layout)
            if name in layout.shallow:
                break


def is_begun(run: Path) -> bool:
    """Tell whether a run has written in a folder."""
    return "vitrail" in _read_environment(run) or _read_lock(run).startswith(OWNER)


def check_begun(run: Path) -> None:
    """Refuse a folder that is not that of a run and holds files of such names: a run would replace them."""
    if is_begun(run):
        return
    lock = _read_lock(run)
    for name in FILES:
        if os.path.lexists(run / name) and (name != ".lock" or lock):  # an empty one is nobody's loss
            raise UserError(
                f"run.dir: {str(run)!r} holds a {name} that no run of vitrail has written, and which a run would "
                "replace; choose another folder, or move it away"
            )


def find_early(run: Path) -> Iterator[Path]:
    """List the files that a run writes before its first step."""
    yield from (run / name for name in FILES)
    for name, written in EARLY.items():
        if (run / name).is_dir():
            yield from [path for path in (run / name).iterdir() if re.fullmatch(written, path.name)]


def begun_with(run: Path) -> list[str]:
    """Return the plugins that a run was begun with, by their names: words that nobody vouches for."""
    told = _read_environment(run).get("plugins")
    return [str(name)[:200] for name in told[:10]] if isinstance(told, list) else []


def _read_lock(run: Path) -> str:
    """Read how the lock of a run begins."""
    try:
        with open(run / ".lock", "rb") as file:
            return file.read(len(OWNER)).decode(errors="replace")
    except OSError:
        return ""


def _read_environment(run: Path) -> dict[str, Any]:
    try:
        with open(run / "environment.json", "rb") as file:
            told = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError):  # none, or one that a report complains about
        return {}
    return told if isinstance(told, dict) else {}


def _check(top: Path, folder: Path, layout: Layout) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            wrong = _find_wrong(entry, layout, known=folder == top)
            if wrong and not (entry.is_symlink() and re.fullmatch(layout.links, os.path.relpath(entry.path, top))):
                raise UserError(
                    f"{folder / entry.name} is {wrong}, and a {layout.what} holds plain files and folders only; "
                    "replace it by a copy of its own, or remove it"
                )


def _find_wrong(entry: "os.DirEntry[str]", layout: Layout, *, known: bool) -> str | None:
    if entry.is_symlink():
        return "a link, which may lead anywhere"
    is_file, is_folder = entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
    if not is_file and not is_folder:
        return "a pipe or a device"
    if known and is_folder and entry.name in layout.files:
        return "a folder, where a file is expected"
    if known and is_file and entry.name in layout.folders:
        return "a file, where a folder is expected"
    if known and entry.name in layout.in_place and entry.stat(follow_symlinks=False).st_nlink > 1:
        return "a file that has another name elsewhere (a hard link)"
    return None
