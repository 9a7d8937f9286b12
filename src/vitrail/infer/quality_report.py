"""What quality() has found, in words: a table for the terminal, and a page that opens offline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vitrail.disk import write_output
from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.report.files import embed_image
from vitrail.report.units import percent, plain

SHARES = ("accuracy", "precision", "recall")
SAMPLES_GRID = "grid.png"

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Quality of {{ found.samples }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #d9e0e6; font-weight: normal; }
th, small, figcaption { color: #52606d; }
img { max-width: 100%; }
</style>
<h1>Quality of {{ found.samples }}</h1>
<p>Compared with {{ found.real }}. A floor is the same number for real data against real data, or of real data: samples
as good as real ones reach it, and no more can be seen with so few.</p>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% if classes %}<table><tr><th>class</th><th>recognised</th></tr>
{% for name, share in classes %}<tr><td>{{ name }}</td><td>{{ share }}</td></tr>
{% endfor %}</table>{% endif %}
{% for note in found.notes %}<p><small>{{ note }}.</small></p>
{% endfor %}
{% if grid %}<figure><img src="{{ grid }}" alt="samples"><figcaption>Samples</figcaption></figure>{% endif %}
<p><small>Step {{ found.run.step }} of {{ found.run.run }}, {{ found.run.weights }} weights; seed {{ found.seed }}.
</small></p>
</html>
"""


def table(found: dict[str, Any]) -> list[dict[str, str]]:
    """A row a measure, its numbers in words."""
    return [
        {
            "measure": row["measure"],
            "samples": _show(row["measure"], row["value"], row.get("spread"), row.get("interval")),
            "floor": _show(row["measure"], row["floor"], row.get("floor_spread"), row.get("floor_interval")),
            "better": row["better"],
            "number": f"{row['samples']} to {row['real']}",
            "of": row["of"],
        }
        for row in found["measures"]
    ]


def _show(name: str, value: float | None, spread: float | None, interval: list[float] | None) -> str:
    """A number with how far it is sure."""
    if value is None:
        return "none"
    if interval is not None:
        return f"{percent(value)} ({percent(interval[0])} to {percent(interval[1])})"
    show = percent if name in SHARES else plain
    sure = spread is None or math.isnan(spread)
    return show(value) if sure else f"{show(value)} ± {show(spread)}"


def write_page(found: dict[str, Any], path: Path) -> Path:
    """The table, shares by class and the grid of the samples as one HTML file."""
    from jinja2 import Environment, StrictUndefined

    rows = table(found)
    grid = Path(found["samples"]) / SAMPLES_GRID
    classes = [(name, f"{c['right']} of {c['samples']}") for name, c in found["accuracy_by_class"].items()]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    text = template.render(
        found=found,
        heads=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        classes=classes,
        grid=embed_image(read_plain(grid), "image/png") if grid.is_file() else None,
    )
    try:
        return write_output(path, text.encode(), parents=True)
    except OSError as error:
        raise UserError(f"--page {path}: it cannot be written ({error.strerror}); choose another path") from error
