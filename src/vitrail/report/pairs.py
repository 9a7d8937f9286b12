"""Panel of originals, what came back of them, and the difference; one sample a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.report.files import write_picture
from vitrail.report.panels import _draw_grid, _viewable, encode, find_range, paint

MOST = 8  # rows


def pairs_panel(
    path: str | Path, pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, title: str = "", caption: str = ""
) -> Path:
    """Draw (original, reconstruction) pairs [C, *spatial] to a PNG; of volumes the middle slice.

    Three variables are colours, of any other number the first is shown. Differences are grey where there are none, and
    share the range of the originals.
    """
    if not pairs:
        raise ValueError("a panel needs at least one pair")
    cut = [[_viewable(each[:, each.shape[1] // 2] if each.ndim == 4 else each) for each in pair] for pair in pairs]
    low, high = find_range([original for original, _ in cut], None)
    cells = []
    for original, again in cut[:MOST]:
        difference = again - original + (low + high) / 2
        cells += [(paint(image, (low, high)), "") for image in (original, again, difference)]
    heads = ("original", "reconstruction", "difference")
    picture = _draw_grid(cells, columns=3, heads=heads, keys=(), title=title, caption=caption, aspect=1.0)
    return write_picture(path, encode(picture, grey=all(original.shape[0] == 1 for original, _ in cut)))
