"""Reading a run folder: its metrics line by line, its recipe and its environment, however the run ended.

A run may be killed at any instant, so the last line can be torn, and the next session may have appended right behind
the torn half. A resumed session repeats steps: what was logged beyond the step that it started from is void.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.report.units import number_of

Line = dict[str, Any]
_REPEATED = {"train", "eval", "picture", "checkpoint", "skip"}  # events that belong to a step

_NAMES = {
    "mse": "mean squared error",
    "mse_over_variance": "error / variance",
    "memory_gib": "memory, GiB",
    "mean_dice": "mean Dice",
    "top5": "top-5 accuracy",
}


def open_run(run_dir: str | Path) -> Path:
    """The run folder as a path; refuses what is not one."""
    run = Path(run_dir)
    if not run.exists():
        raise UserError(f"run folder {str(run)!r} does not exist; give the folder of a run, for example runs/<name>.")
    if not run.is_dir():
        raise UserError(f"{str(run)!r} is a file, not a run folder; give the folder of a run, for example runs/<name>.")
    if not (run / "recipe.yaml").is_file() and not (run / "metrics.jsonl").is_file():
        raise UserError(
            f"{str(run)!r} is not a run folder, it holds neither recipe.yaml nor metrics.jsonl; "
            "give the folder that `vitrail train` made, for example runs/<name>, or that of a sweep by `vitrail bench`."
        )
    return run


def read_metrics(run_dir: str | Path) -> list[Line]:
    """Every event that still counts, in order; for a step logged twice the later line stands."""
    return merge_lines(read_lines(run_dir)[0])


def read_lines(run_dir: str | Path) -> tuple[list[Line], int]:
    """All events ever written, in order, and the number of lines that could not be read."""
    path = open_run(run_dir) / "metrics.jsonl"
    if not path.is_file():
        return [], 0
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its permissions.") from error
    lines: list[Line] = []
    torn = 0
    for raw in text.split("\n"):
        raw = raw.strip("\x00\r\t ")  # a power cut can leave zeros where the line was to be
        if not raw:
            continue
        line, whole = _parse(raw)
        torn += not whole
        if line is not None:
            lines.append(line)
    return lines, torn


def _parse(raw: str) -> tuple[Line | None, bool]:
    """The event of a line, and whether the line was whole; behind a torn half a complete event may follow."""
    start = 0
    while start >= 0:
        try:
            line = json.loads(raw[start:])
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and isinstance(line.get("event"), str):
            return line, start == 0
        start = raw.find('{"event"', start + 1)
    return None, False


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
    """The events of one name."""
    return [line for line in lines if line["event"] == event]


def series(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a field of the given lines, in step order; what is missing or not finite is left out."""
    points = [(number_of(line.get("step")), number_of(line.get(name))) for line in lines]
    points = sorted(p for p in points if math.isfinite(p[0]) and math.isfinite(p[1]))
    return [p[0] for p in points], [p[1] for p in points]


def name_metric(name: str) -> str:
    """What a metric is called on the page."""
    if name.startswith("dice_"):
        return f"Dice of {name.removeprefix('dice_')}"
    return _NAMES.get(name, name)


def split_sessions(lines: Sequence[Line]) -> list[list[Line]]:
    """The raw lines of each session; a session begins with its start event, and `init` stands before it."""
    sessions: list[list[Line]] = []
    for line in lines:
        if line["event"] == "init":
            continue
        if line["event"] == "start" or not sessions:
            sessions.append([])
        sessions[-1].append(line)
    return sessions


def read_json(path: Path) -> tuple[Any, str | None]:
    """The content of a JSON file (None where there is no file), and a sentence when it cannot be read."""
    try:
        return json.loads(path.read_text("utf-8")), None
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} cannot be read: {_first_line(error)}."


def read_recipe(run: Path) -> tuple[dict[str, Any], str, str | None]:
    """The stored recipe as a tree and as text, and a sentence when it cannot be read."""
    from vitrail.recipe import yaml

    try:
        text = (run / "recipe.yaml").read_text("utf-8")
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


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
