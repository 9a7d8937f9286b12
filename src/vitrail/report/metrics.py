"""Reading a run folder: its metrics line by line, its recipe, its environment and its pictures, however it ended.

A run may be killed at any instant, so the last line can be torn, and the next session may have appended right behind
the torn half. A resumed session repeats steps: what was logged beyond the step that it started from is void.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from vitrail.contents import check_contents, check_name
from vitrail.credentials import strip
from vitrail.errors import BadData, UserError
from vitrail.foreign import open_plain, parse_json, read_plain
from vitrail.report.figures import embed_image
from vitrail.report.units import number_of

Line = dict[str, Any]
_LONGEST = 4 * 2**20  # bytes of a line; what is longer was not written by a run
_DEEPEST = 64  # lists and mappings in each other; what is deeper was not written by a run
_MOST_HALVES = 16  # torn lines before a whole one that are tried
_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_LARGEST = 8 * 2**20  # bytes of one picture that goes into the page
_REPEATED = {"train", "eval", "classes", "picture", "checkpoint", "skip", "bad", "profile"}  # they belong to a step

_NAMES = {
    "mse": "mean squared error",
    "mse_over_variance": "error / variance",
    "memory_gib": "memory, GiB",
    "mean_dice": "mean Dice",
    "mean_iou": "mean IoU",
    "top5": "top-5 accuracy",
}


def open_run(run_dir: str | Path) -> Path:
    """Return the run folder as a path; refuse what is not one."""
    run = Path(run_dir)
    check_name(run, "run folder")
    if not run.exists():
        raise UserError(f"run folder {str(run)!r} does not exist; give the folder of a run, for example runs/<name>.")
    if not run.is_dir():
        raise UserError(f"{str(run)!r} is a file, not a run folder; give the folder of a run, for example runs/<name>.")
    if not any(os.path.lexists(run / name) for name in ("recipe.yaml", "metrics.jsonl")):
        raise UserError(
            f"{str(run)!r} is not a run folder, it holds neither recipe.yaml nor metrics.jsonl; "
            "give the folder that `vitrail train` made, for example runs/<name>, or that of a sweep by `vitrail bench`."
        )
    check_contents(run, reading=True)
    return run


def read_metrics(run_dir: str | Path) -> list[Line]:
    """Return every event that still counts, in order; for a step logged twice the later line stands."""
    return merge_lines(read_lines(run_dir)[0])


def read_lines(run_dir: str | Path, *, most: int | None = None) -> tuple[list[Line], int]:
    """Return all events ever written, in order, and the number of lines that could not be read.

    Of a log with more lines than `most`, about so many training lines are kept: those with the smallest and the largest
    loss of every stretch, and the first and the last of a session, so that no spike and no end is lost.
    """
    path = open_run(run_dir) / "metrics.jsonl"
    if not path.is_file():
        return [], 0
    torn = 0
    try:
        with open_plain(path) as file:
            stretch = 1
            if most is not None:
                stretch = math.ceil(2 * sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b"")) / most)
                file.seek(0)
            keep = _Thinned(stretch)
            for line, whole in parse_lines(iter(lambda: file.readline(_LONGEST), b"")):
                torn += not whole
                if line is not None:
                    keep.add(line)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its permissions.") from error
    return keep.lines(), torn


class _Thinned:
    """Lines in their order; of the training lines of a stretch only the extremes, where a stretch is longer than 2."""

    def __init__(self, stretch: int):
        self.stretch = stretch
        self.kept: dict[int, Line] = {}  # by their place in the log
        self.part: list[tuple[int, Line]] = []
        self.place, self.first = 0, True

    def add(self, line: Line) -> None:
        self.place += 1
        if line["event"] in ("start", "end"):
            self._close(*self.part[-1:])
        if line["event"] != "train" or self.first or self.stretch <= 2:
            self.kept[self.place] = line
        else:
            self.part.append((self.place, line))
            if len(self.part) == self.stretch:
                self._close()
        self.first = line["event"] == "start"

    def _close(self, *also: tuple[int, Line]) -> None:
        if self.part:
            # What is not finite counts as the largest.
            losses = [loss if math.isfinite(loss := number_of(line.get("loss"))) else math.inf for _, line in self.part]
            extremes = (self.part[losses.index(min(losses))], self.part[losses.index(max(losses))])
            self.kept.update((*extremes, *also))
            self.part = []

    def lines(self) -> list[Line]:
        self._close(*self.part[-1:])
        return [self.kept[place] for place in sorted(self.kept)]


def parse_lines(
    raws: Iterable[bytes], *, first: str = "event", named: str = "event"
) -> Iterator[tuple[Line | None, bool]]:
    """Yield the object of each line, and whether the line was whole.

    `first` is the key that objects begin with, `named` the one that none may lack.
    """
    for raw in raws:
        raw = raw.strip(b"\x00\r\n\t ")  # a power cut can leave zeros where the line was to be
        if raw:
            yield _parse_line(raw.decode("utf-8", errors="replace"), first, named)


def _parse_line(raw: str, first: str, named: str) -> tuple[Line | None, bool]:
    """Parse a line; behind a torn half a complete one may follow."""
    start = 0
    for _ in range(_MOST_HALVES):
        try:
            line = json.loads(raw[start:])
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and isinstance(line.get(named), str):
            deep = raw.count("[") + raw.count("{") > _DEEPEST and is_deep(line)
            return (None, False) if deep else (line, start == 0)
        start = raw.find(f'{{"{first}"', start + 1)
        if start < 0:
            break
    return None, False


def is_deep(value: Any) -> bool:
    """Tell whether a value is nested deeper than any that a run writes, too deep to be gone through by recursion."""
    level = [value]
    for _ in range(_DEEPEST):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for values in inside for one in values]
        if not level:
            return False
    return True


def merge_lines(lines: Iterable[Line]) -> list[Line]:
    """Drop what a later session repeated: lines beyond its starting step, and earlier lines of the same step."""
    kept: dict[tuple[Any, ...], Line] = {}
    for index, line in enumerate(lines):
        event = line["event"]
        if event == "start":
            first = number_of(line.get("step"))
            void = [k for k, old in kept.items() if k[0] in _REPEATED and number_of(old.get("step")) > first]
            for key in void:
                del kept[key]
        key = (event, index)
        if event in _REPEATED and math.isfinite(number_of(line.get("step"))):
            key = (event, line["step"], str(line.get("weights")), str(line.get("path")))
        kept.pop(key, None)  # so that the later line also comes later in the order
        kept[key] = line
    return list(kept.values())


def select(lines: Iterable[Line], event: str) -> list[Line]:
    return [line for line in lines if line["event"] == event]


def series(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of a field of the lines, in step order; what is missing or not finite is left out."""
    points = [(number_of(line.get("step")), number_of(line.get(name))) for line in lines]
    points = sorted(p for p in points if math.isfinite(p[0]) and math.isfinite(p[1]))
    return [p[0] for p in points], [p[1] for p in points]


def name_metric(name: str) -> str:
    """Return the name of a metric on the page."""
    if name.startswith("dice_"):
        return f"Dice of {name.removeprefix('dice_')}"
    if name.startswith("iou_"):
        return f"IoU of {name.removeprefix('iou_')}"
    return _NAMES.get(name, name)


def split_sessions(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the raw lines of each session; it begins with its start event, and `init` stands before it."""
    sessions: list[list[Line]] = []
    for line in lines:
        if line["event"] == "init":
            continue
        if line["event"] == "start" or not sessions:
            sessions.append([])
        sessions[-1].append(line)
    return sessions


def read_json(path: Path) -> tuple[Any, str | None]:
    """Return the content of a JSON file (None where there is no file), and a sentence when it cannot be read."""
    try:
        found = parse_json(strip(read_plain(path).decode("utf-8")))
        return (None, f"{path.name} cannot be read: it is nested too deep.") if is_deep(found) else (found, None)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {_first_line(error)}."


def read_recipe(run: Path) -> tuple[dict[str, Any], str, str | None]:
    """Return the stored recipe as a tree and as text, and a sentence when it cannot be read."""
    from vitrail.recipe import yaml

    try:
        text = strip(read_plain(run / "recipe.yaml").decode("utf-8"))  # runs of old kept passwords
    except FileNotFoundError:
        return {}, "", "recipe.yaml is missing, so the number of steps is not known."
    except (OSError, ValueError) as error:
        return {}, "", f"recipe.yaml cannot be read: {_first_line(error)}."
    try:
        tree = yaml.parse(text, "recipe.yaml")
    except UserError as error:
        return {}, text, f"recipe.yaml is not valid YAML: {_first_line(error)}."
    if not isinstance(tree, dict):
        return {}, text, "recipe.yaml holds no sections."
    return tree, text, None


def find_inside(run: Path, name: Any) -> Path | None:
    """Return the path of a name that a metadata file gives; None where it leads out of the run, also by a link."""
    if not isinstance(name, str) or not name or "\x00" in name:
        return None
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        return None
    path = run / inner
    try:
        return path if path.resolve().is_relative_to(run.resolve()) else None
    except (OSError, RuntimeError, ValueError):  # a ring of links, a name that the system refuses
        return None


def is_there(path: Path | None) -> bool:
    """Return whether a path exists; a name that the system refuses does not."""
    try:
        return path is not None and path.exists()
    except (OSError, ValueError):
        return False


def read_picture(run: Path, name: Any) -> tuple[str | None, str | None]:
    """Return a picture named in the metrics as a data URL, otherwise a sentence why it is not shown."""
    shown = repr(name)[:120]
    path = find_inside(run, name)
    if path is None:
        return None, f"The picture {shown} was left out: its path does not lead into the run folder."
    if not is_there(path):
        return None, f"The picture {shown} is missing."
    try:
        if path.stat().st_size > _LARGEST:
            return None, f"The picture {shown} was left out: it is larger than {_LARGEST // 2**20} MiB."
        content = read_plain(path, _LARGEST)
    except BadData:
        return None, f"The picture {shown} was left out: it is not a plain file."
    except OSError as error:
        return None, f"The picture {shown} cannot be read: {error.strerror}."
    for signature, kind in _SIGNATURES.items():
        if content.startswith(signature):
            return embed_image(content, kind), None
    return None, f"The picture {shown} was left out: it is neither PNG nor JPEG."


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
