"""What a page needs to draw a plot again by itself: the points of its lines, taken from the figure."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from vitrail.report.figures import BLUE, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DIGITS = 6  # of a value


@cache
def script() -> str:
    """Return the script that draws charts."""
    return resources.files("vitrail.report").joinpath("chart.js").read_text("utf-8")


@cache
def script_hash() -> str:
    """Return what the page's policy knows the script by: no other one runs in it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()}"


def chart_of(figure: Figure) -> dict[str, Any] | None:
    """Return the lines of a figure as JSON values; None where there are none to draw, as of a heat map."""
    panels = [panel for axes in figure.axes if (panel := _panel(axes))["lines"]]
    if not panels or any(axes.collections and not axes.lines for axes in figure.axes):
        return None
    return {"title": figure.get_suptitle(), "over": figure.axes[-1].get_xlabel(), "panels": panels}


def _panel(axes: Axes) -> dict[str, Any]:
    import numpy as np
    from matplotlib.colors import to_hex

    lines = []
    for line in axes.get_lines():
        if line.get_transform() != axes.transData:  # marks of sessions and the like
            continue
        drawn: list[list[float]] = np.asarray(line.get_xydata(), float).tolist()
        points = [pair for pair in drawn if all(map(math.isfinite, pair))]
        # Rings around a point that another line has, and entries of the legend alone.
        if not points or line.get_fillstyle() == "none":
            continue
        colour, label = to_hex(line.get_color()), str(line.get_label())
        lines.append(
            {
                "name": "" if label.startswith("_") else label,
                "colour": BLUE if colour == PALE else colour,
                "pale": colour == PALE,
                "joined": line.get_linestyle() not in ("None", "none", " ", ""),
                "dashed": line.get_linestyle() == "--",
                "dots": line.get_marker() not in ("None", "none", None, " ", ""),
                "x": [x for x, _ in points],
                "y": [float(f"{y:.{_DIGITS}g}") for _, y in points],
            }
        )
    low = axes.get_ylim()[0]
    return {"label": axes.get_ylabel(), "log": axes.get_yscale() == "log", "zero": bool(low == 0), "lines": lines}
