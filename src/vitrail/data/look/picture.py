"""A source as one picture: its samples with scale bars, labels in colour over them, and charts of its numbers.

- volumes: the middle planes across each axis; images: a few that are spread over the source
- three variables red, green and blue are one colour image; of others each has its own column or row
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.data.source import Item, Source, class_names, label_dtype, label_names
from vitrail.report.units import scale_bar, short

if TYPE_CHECKING:
    from vitrail.report.views import Panel


SHOWN = {2: 1024, 3: 512}  # voxels of an axis that are shown at most, from the middle
SMALL = 64  # pixels of an image, up to which more of them are shown, and no scale bars
MOST_VARIABLES = 4
COLOURS = ("red", "green", "blue")


def picture(source: Source, path: str | Path, *, images: int = 8, facts: dict[str, Any] | None = None) -> Path:
    """Save a PNG page; charts and words come from the `facts` of inspect(), where they are given."""
    from vitrail.report.figures import check_picture
    from vitrail.report.units import plain
    from vitrail.report.views import Chart, draw_page, label_key

    path = check_picture(path)
    facts = facts or source.describe()
    small = len(source.axes) == 2 and max(source.items[0].shape) <= SMALL
    rows = _volume_rows(source) if len(source.axes) == 3 else _image_rows(source, 2 * images if small else images)
    numbers = facts.get("statistics", {})
    shown = [source.variables[i] for i in spread(len(source.variables), MOST_VARIABLES)]
    charts = [
        Chart(
            f"{name}: mean {plain(s['mean'])}, std {plain(s['std'])}", s["histogram"]["counts"], s["histogram"]["edges"]
        )
        for name in shown
        if (s := numbers.get(name)) and s["histogram"]
    ]
    names, shares = {}, facts.get("label_percent", {})
    if shares:
        known = label_names(source)
        none = _no_label(label_dtype(source))
        names = {int(value): str(known.get(int(value), "none" if int(value) == none else value)) for value in shares}
        charts.append(Chart("share of voxels by label", [*shares.values()][:16], names=[*names.values()][:16]))
        names = {value: name for value, name in names.items() if value != none}
    elif facts.get("class_counts"):
        counts = dict(list(facts["class_counts"].items())[:16])
        words = f"classes of {facts['classes_looked_at']:,} items"
        charts.append(Chart(words, list(counts.values()), names=list(counts)))
    title = f"{facts.get('path') or source.items[0].name}  ({facts.get('kind', type(source).__name__)})"
    # Values that are shown over any others mean nothing as a colour key.
    key = label_key(names) if len(names) <= 13 else []
    tile = 1.3 if small and max(map(len, rows)) > 4 else 2.6
    return draw_page(path, rows, title=title, caption=caption(source, facts), charts=charts, key=key, tile=tile)


def caption(source: Source, facts: dict[str, Any]) -> str:
    item = source.items[0]
    whole = all(c >= s for c, s in zip(item.chunk, item.shape, strict=True))
    chunks = f"in chunks of {by(item.chunk)}" if max(item.chunk) > 1 else "any window is read alone"
    stored = "stored whole" if whole else chunks
    lines = [f"{sizes(item)} along {', '.join(source.axes)}; {source.dtype}; {stored}"]
    names = ", ".join(source.variables[:8]) + (", ..." if len(source.variables) > 8 else "")
    number, count = len(source.items), len(source.variables)
    lines.append(f"{number:,} item{'s' * (number > 1)}; {count} variable{'s' * (count > 1)}: {names}")
    levels = facts.get("levels") or []
    if len(levels) > 1:
        lines[1] += f"; {len(levels)} levels"
    return "\n".join(lines)


def _volume_rows(source: Source) -> "list[list[Panel]]":
    """One row a variable (or one for colours), one column an axis; then labels over the first."""
    from vitrail.report.views import Panel, colour_labels, shade

    item = source.items[0]
    middle, groups = _middle(item.shape), variable_groups(source.variables)
    rows: list[list[Panel]] = [[] for _ in groups]
    labelled: list[Panel] = []
    for axis, name in enumerate(source.axes):
        at = item.shape[axis] // 2
        window = tuple(slice(at, at + 1) if i == axis else part for i, part in enumerate(middle))
        values = source.read(0, window).squeeze(axis + 1)  # C a b
        high, wide = (i for i in range(3) if i != axis)
        aspect = item.spacing[high] / item.spacing[wide]
        bar = scale_bar(values.shape[-1], item.spacing[wide], item.unit)
        place = f"{name} = {at}  ({source.axes[high]} down, {source.axes[wide]} right)"
        for row, (group, index) in zip(rows, groups, strict=True):
            row.append(Panel(shade(values[index]), f"{group}{place}", aspect, bar))
        if has_labels(source):
            classes = _classes(source.read_labels(0, window).squeeze(axis))  # type: ignore[attr-defined]
            shown = colour_labels(rows[0][-1].picture, classes)
            labelled.append(Panel(shown, f"labels, {name} = {at}", aspect, bar))
    return [*rows, labelled] if labelled else rows


def _image_rows(source: Source, count: int) -> "list[list[Panel]]":
    """Images in rows of four; with several variables or labels one row an image."""
    from vitrail.report.views import Panel, colour_labels, shade

    groups = variable_groups(source.variables)
    several = len(groups) > 1 or has_labels(source)
    panels: list[Panel] = []
    for index in spread(len(source.items), min(count, 3) if several else count):
        item = source.items[index]
        window = _middle(item.shape)
        values = source.read(index, window)
        aspect = item.spacing[0] / item.spacing[1]
        plain = item.unit is None and max(item.shape) <= SMALL
        bar = None if plain else scale_bar(values.shape[-1], item.spacing[1], item.unit)
        names = class_names(source)
        known = names[item.label] if item.label is not None and names else ""
        words = name_of(item, 18) if plain else name_of(item, 34) + (f"  [{known}]" if known else "")
        for group, variables in groups:
            size = f"{group}{known or by(item.shape)}" if plain else f"{group}{by(item.shape)} pixels"
            panels.append(Panel(shade(values[variables]), f"{words}\n{size}", aspect, bar))
        if has_labels(source):
            classes = _classes(source.read_labels(index, window))  # type: ignore[attr-defined]
            panels.append(Panel(colour_labels(panels[-len(groups)].picture, classes), f"{words}\nlabels", aspect, bar))
    across = len(groups) + has_labels(source) if several else 8 if plain else 4
    return [panels[start : start + across] for start in range(0, len(panels), across)]


def _middle(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the window around the middle that is shown."""
    most = SHOWN[len(shape)]
    starts = [max(0, (n - most) // 2) for n in shape]
    return tuple(slice(start, start + min(n, most)) for start, n in zip(starts, shape, strict=True))


def variable_groups(variables: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return what is drawn side by side: colours as one picture, or a few of the variables, with their names."""
    if set(COLOURS) <= set(variables):
        return [("", [list(variables).index(name) for name in COLOURS])]
    several = len(variables) > 1
    return [(f"{variables[i]}, " if several else "", [i]) for i in spread(len(variables), MOST_VARIABLES)]


def has_labels(source: Source) -> bool:
    return label_dtype(source) is not None


def spread(total: int, count: int) -> list[int]:
    """Choose so many places spread over all, always the same: one from each stretch.

    At random within it, because equal steps would see but some of the classes where these take turns.
    """
    if total <= count:
        return list(range(total))
    starts = np.arange(count + 1) * total // count
    return [int(i) for i in np.random.default_rng(7).integers(starts[:-1], starts[1:])]


def _classes(labels: np.ndarray) -> np.ndarray:
    """Return labels as they are drawn: the highest number of a type of several bytes stands for none."""
    none = _no_label(labels.dtype)
    return labels if none is None else np.where(labels == none, 0, labels)


def _no_label(dtype: np.dtype | None) -> int | None:
    return None if dtype is None or dtype.kind not in "iu" or dtype.itemsize == 1 else int(np.iinfo(dtype).max)


def by(numbers: Sequence[float]) -> str:
    return " x ".join(f"{number:g}" for number in numbers)


def name_of(item: Item, most: int) -> str:
    return item.name if len(item.name) <= most else f"…{item.name[1 - most :]}"


def sizes(item: Item) -> str:
    cells = "pixels" if len(item.shape) == 2 else "voxels"
    if item.unit is None and set(item.spacing) == {1.0}:
        return f"{by(item.shape)} {cells}"
    return f"{by(item.shape)} {cells} of {by(item.spacing)} {short(item.unit)}"
