"""What probes have found of a run's features: a table and a picture for its page."""

import re
from pathlib import Path
from typing import Any

from vitrail.report.metrics import find_inside, is_there, read_json, read_picture
from vitrail.report.units import MISSING, count, plain

FOLDER = "probe"
_SCORES = re.compile(r"step-\d{8,}\.json")
_MOST = 20  # steps that are shown, the newest


def list_probes(run: Path, warnings: list[str]) -> dict[str, Any] | None:
    """Return a row for each probe of each step, the newest first, and the newest picture; None where there is none."""
    folder = find_inside(run, FOLDER)
    if folder is None or not is_there(folder) or not folder.is_dir():
        return None
    names = sorted((path.name for path in folder.iterdir() if _SCORES.fullmatch(path.name)), reverse=True)
    rows, newest = [], None
    for name in names[:_MOST]:
        found, complaint = read_json(folder / name)
        if complaint or not isinstance(found, dict):
            warnings.append(complaint or f"{name} holds no scores of probes.")
            continue
        newest = newest or found
        rows += _rows(found)
    if newest is None:
        return None
    uri, complaint = read_picture(run, newest.get("picture"))
    if complaint:
        warnings.append(complaint)
    return {"rows": rows, "uri": uri, "step": count(newest.get("step"))}


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    counts = found.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    scores = found.get("scores")
    rows: list[tuple[str, ...]] = []
    for score in scores if isinstance(scores, list) else []:
        if not isinstance(score, dict):
            continue
        span = score.get("interval")
        between = (
            f"{plain(span[0], 3)} to {plain(span[1], 3)}" if isinstance(span, list) and len(span) == 2 else MISSING
        )
        rows.append(
            (
                count(found.get("step")),
                str(score.get("probe", MISSING)),
                str(score.get("metric", MISSING)),
                plain(score.get("value"), 3),
                between,
                count(counts.get("train")),
                count(counts.get("valid")),
            )
        )
    return rows
