"""The page of a run: `report.html`, one file that opens offline, with everything in it."""

from __future__ import annotations

import shlex
import time
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.contents import is_begun
from vitrail.disk import sweep, write_output, write_own
from vitrail.errors import UserError
from vitrail.report import plots, sections
from vitrail.report.defaults import list_changes
from vitrail.report.facts import MOST_LINES, describe_time, summarize, warn_of_torn
from vitrail.report.files import embed_image
from vitrail.report.metrics import merge_lines, open_run, read_json, read_lines, read_recipe
from vitrail.report.units import count

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(run_dir: str | Path, *, now: float | None = None) -> Path:
    """Write `report.html` into a run folder, whatever state the run is in, and return its path."""
    run = open_run(run_dir)
    html = render_report(run, now=time.time() if now is None else now)
    path = run / "report.html"
    sweep(run)
    try:
        # A page of somebody else's folder is replaced only if it is vitrail's.
        write = write_own if is_begun(run) else write_output
        return write(path, html.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; make the run folder writable.") from error


def render_report(run: Path, *, now: float) -> str:
    """The page as text."""
    return _load_template().render(_gather(run, now))


@lru_cache(maxsize=1)
def _load_template() -> Template:
    """The page's template, compiled once: a run writes its page many times."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(resources.files("vitrail.report").joinpath("page.html").read_text("utf-8"))


def _gather(run: Path, now: float) -> dict[str, Any]:
    """Everything that the template shows."""
    raw, torn = read_lines(run, most=MOST_LINES)
    recipe, recipe_text, complaint = read_recipe(run)
    data, data_complaint = read_json(run / "data.json")
    environment, environment_complaint = read_json(run / "environment.json")
    warnings = [c for c in (complaint, data_complaint, environment_complaint) if c] + warn_of_torn(torn)
    facts = summarize(run, raw, recipe, warnings, now)
    lines = merge_lines(raw)
    heads, evals = sections.list_evals(lines)
    notes = list(facts["warnings"])
    pictures = sections.list_pictures(run, facts, notes)
    return {
        "facts": facts,
        "written": describe_time(now),
        "eval_step": count((facts["eval"] or {}).get("step")),
        "tiles": sections.list_tiles(facts),
        "warnings": notes,
        "curves": _draw_curves(lines, notes),
        "pictures": pictures,
        "eval_heads": heads,
        "evals": evals,
        "speed": sections.list_speed(facts),
        "cost": sections.list_cost(facts),
        "groups": sections.list_groups(lines),
        "data": sections.list_data(data),
        "skips": sections.list_skips(facts),
        "initial": sections.list_initial(facts),
        "sessions": sections.list_sessions(facts),
        "checkpoints": sections.list_checkpoints(run, facts),
        "recipe": recipe_text,
        "changes": list_changes(run) if recipe else None,
        "environment": sections.list_environment(environment),
        "commands": _list_commands(run, facts["status"]),
    }


def _draw_curves(lines: list[dict[str, Any]], notes: list[str]) -> list[dict[str, str]]:
    """Every curve that has points; one that cannot be drawn must not cost the reader the page."""
    curves = []
    for name, draw in plots.CURVES.items():
        try:
            svg = draw(lines)
        except Exception as error:  # whatever the drawing library raises
            notes.append(f"The curve {name!r} could not be drawn: {error}.")
            continue
        if svg:
            curves.append({"name": name, "uri": embed_image(svg.encode(), "image/svg+xml")})
    return curves


def _list_commands(run: Path, status: str) -> list[tuple[str, str]]:
    """What to run next."""
    folder = shlex.quote(str(run))
    evaluate = (f"vitrail eval {folder}", "scores the newest checkpoint on the held-out data")
    resume = (f"vitrail train {folder}", "continues from the newest checkpoint while steps are left")
    again = (f"vitrail report {folder}", "writes this page anew")
    return {"running": [again, evaluate], "done": [evaluate, resume]}.get(status, [resume, evaluate, again])
