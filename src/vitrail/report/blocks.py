"""Blocks of pictures: for each sample a line that says what and where it is, and rows of views with their own scales.

- variables are drawn one by one, each with its name, unit and range; those that are colours together are one picture
- of volumes the kinds (target, prediction, ...) are rows and planes are columns; of many variables, as of images, the
  kinds are columns and the variables are rows
- voxels are as long as in space, and a bar tells how long where that is known
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitrail.report.figures import EDGE, SOFT, Colour, Sheet, shorten
from vitrail.report.units import plain, scale_bar
from vitrail.report.views import VIEW, Cut, hold_span, pad, wrap_keys

MOST_VARIABLES = 12
_MOST_LINES = 12  # of variables of samples
_MOST_BLOCKS = 4  # of variables of volumes
_FEW = 3  # variables of volumes that are shown in all planes
_STRETCH = 8.0  # pixels of a long voxel to one of a short one, at most
_HEAD, _SCALE, _GAP = 0.24, 0.72, 0.06  # inches


@dataclass(frozen=True)
class About:
    """What is known of a sample that is drawn."""

    name: str = ""  # of its item
    place: str = ""  # where in it
    spacing: tuple[float, ...] = ()  # physical size of a voxel; empty where it is not known
    unit: str | None = None
    variables: tuple[str, ...] = ()
    units: Mapping[str, str] | None = None  # of variables
    colours: tuple[int, ...] | None = (0, 1, 2)  # which channels are red, green and blue, if there are so many
    shown: tuple[str, ...] = ()  # variables to show; empty: all

    @property
    def title(self) -> str:
        return "   ".join(filter(None, (self.name, self.place)))

    def pick(self, names: Sequence[str]) -> About:
        """Return what is known of some of the variables alone."""
        return replace(self, variables=tuple(names), colours=colour_places(names) if self.variables else self.colours)

    def groups(self, channels: int) -> list[Group]:
        """Return what is drawn of so many channels: each variable by itself, colours as one."""
        names = self.variables if len(self.variables) == channels else [f"channel {n}" for n in range(channels)]
        chosen = [names.index(name) for name in self.shown if name in names] or list(range(channels))
        found: list[Group] = []
        colours = self.colours if self.colours and max(self.colours) < channels else None
        if colours and (channels == len(colours) or len(self.variables) == channels) and set(colours) <= set(chosen):
            found.append(Group("", list(colours), ""))
            chosen = [place for place in chosen if place not in colours]
        found += [Group(names[n] if channels > 1 else "", [n], (self.units or {}).get(names[n], "")) for n in chosen]
        return found[:MOST_VARIABLES]


@dataclass(frozen=True)
class Group:
    """Channels that are one picture: a variable, or colours."""

    name: str
    channels: list[int]
    unit: str

    def range(self, low: float, high: float) -> str:
        """Say a range of values."""
        unit = f" {self.unit}" if self.unit else ""
        return f"{plain(low, 3)} to {plain(high, 3)}{unit}"


@dataclass(frozen=True)
class Scale:
    """What the shades of a row mean."""

    words: str
    low: float
    high: float
    colours: str = "gray"


@dataclass(frozen=True)
class Bar:
    """A scale bar: its length, and where it begins, as shares of the picture that it lies in."""

    words: str
    length: float
    left: float = 0.0
    below: float = 0.0


@dataclass(frozen=True)
class Row:
    words: str
    views: Sequence[np.ndarray]  # [H, W, 3]
    scales: tuple[Scale, ...] = ()
    bar: Bar | None = None  # in the first view


@dataclass(frozen=True)
class Block:
    head: str
    rows: Sequence[Row]


def colour_places(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return which of the variables are red, green and blue."""
    wanted = ("red", "green", "blue")
    return tuple(list(names).index(name) for name in wanted) if set(wanted) <= set(names) else None


def about_rows(rows: Sequence[Mapping[str, Any]]) -> list[About]:
    """Return what rows of an objective say of themselves; nothing is known where they do not."""
    return [row.get("about") or About(variables=tuple(row.get("variables", ()))) for row in rows]


def keep(groups: Sequence[Group], cuts: Sequence[Cut], most: int) -> int:
    """Return how many samples are shown, where each has a line for each variable, and of volumes a block of lines."""
    if len(groups) == 1:
        return most
    return max(1, min(most, (_MOST_LINES if len(cuts) == 1 else _MOST_BLOCKS) // len(groups)))


def choose_cuts(cuts: Sequence[Cut], groups: Sequence[Group]) -> list[Cut]:
    """Return what is shown of a volume: of many variables the middle plane across the first axis alone."""
    return list(cuts[:1]) if len(groups) > _FEW else list(cuts)


def take(values: np.ndarray, at: Any, spacing: Sequence[float]) -> np.ndarray:
    """Cut a view [C, H, W] out of values [C, *S], whose pixels are as long as voxels are in space."""
    view = values[at]
    if not spacing:
        return view
    kept = _of_plane(spacing, at)
    for axis, size in zip((-2, -1), kept, strict=True):
        length = round(view.shape[axis] * min(size / min(kept), _STRETCH))
        if length != view.shape[axis]:
            places = (np.arange(length) + 0.5) * view.shape[axis] / length
            view = view.take(places.astype(int), axis)
    return view


def _of_plane(spacing: Sequence[float], at: Any) -> Sequence[float]:
    """Return the sizes of voxels along the axes that a cut leaves."""
    return spacing if at is ... else [s for s, part in zip(spacing, at[1:], strict=True) if isinstance(part, slice)]


def lay_out(
    painted: Callable[[int, Group, int, Cut], np.ndarray],
    abouts: Sequence[About],
    groups: Sequence[Group],
    kinds: Sequence[str],
    cuts: Sequence[Cut],
    scales: Sequence[Mapping[int, Scale]] = (),
) -> dict[str, Any]:
    """Return the blocks of a sheet; `painted` gives the view of a sample, a group, a kind and a cut.

    `scales` are those of each group, by the kind that they are drawn beside.
    """
    scales = scales or [{}] * len(groups)
    blocks: list[Block] = []
    for number, about in enumerate(abouts):
        rows: list[Row] = []
        if len(cuts) == 1:
            for group, own in zip(groups, scales, strict=True):
                views = [painted(number, group, kind, cuts[0]) for kind in range(len(kinds))]
                bar = None if rows else _bar(views[0], about, cuts[0])
                rows.append(Row(group.name, views, tuple(own.values()), bar))
            blocks.append(Block(about.title + (f"   {cuts[0][0]}" if cuts[0][0] else ""), rows))
            continue
        for group, own in zip(groups, scales, strict=True):
            rows = []
            for kind, name in enumerate(kinds):
                views = [painted(number, group, kind, cut) for cut in cuts]
                padded = pad(views)
                bar = None if rows else _bar(views[0], about, cuts[0], (len(padded[0]), padded[0].shape[1]))
                rows.append(Row(name, padded, (own[kind],) if kind in own else (), bar))
            blocks.append(Block("   ".join(filter(None, (about.title, group.name))), rows))
    flat = len(cuts) == 1
    return {"blocks": blocks, "heads": kinds if flat else [name for name, _ in cuts], "tile": 1.9 if flat else VIEW}


def _bar(view: np.ndarray, about: About, cut: Cut, shape: tuple[int, int] | None = None) -> Bar | None:
    """Return the scale bar of a view in a picture of such a shape; none where voxels have no known size."""
    if not about.spacing or (about.unit is None and set(about.spacing) == {1.0}):
        return None
    length, words = scale_bar(view.shape[1], min(_of_plane(about.spacing, cut[1])), about.unit)
    high, wide = shape or view.shape[:2]
    left, below = (wide - view.shape[1]) // 2 / wide, (high - view.shape[0]) // 2 / high
    return Bar(words.replace("(unit unknown)", "(no unit)"), length * view.shape[1] / wide, left, below)


# ---------------------------------------------------------------- sheets


def draw_blocks(
    blocks: Sequence[Block],
    heads: Sequence[str],
    title: str,
    caption: str,
    *,
    keys: Sequence[tuple[str, Colour]] = (),
    tile: float = 1.9,
) -> Sheet:
    """Draw blocks one below the other, with heads over the columns and a key of colours at the foot."""
    columns = max(len(row.views) for block in blocks for row in block.rows)
    scaled = max(len(row.scales) for block in blocks for row in block.rows)
    left = 0.15 + 0.3 * any(row.words for block in blocks for row in block.rows)
    grid = columns * (tile + _GAP)
    wide = max(left + grid + scaled * _SCALE + 0.15, 4.6)
    lines = wrap_keys(keys, wide - left - 0.15)
    top = (0.34 if title else 0.08) + (0.24 if heads else 0.0)
    foot = 0.1 + 0.22 * len(lines) + 0.2 * len(caption.splitlines()) + 0.04
    tall = [[tile * hold_span(*row.views[0].shape[:2]) for row in block.rows] for block in blocks]
    high = sum(sum(rows) + _GAP * len(rows) + (_HEAD if b.head else 0.08) for b, rows in zip(blocks, tall, strict=True))
    sheet = Sheet(wide, top + high + foot)
    for column, head in enumerate(heads):
        sheet.text(left + column * (tile + _GAP) + tile / 2, top - 0.1, head, size=9, ha="center")
    for block, heights in zip(blocks, tall, strict=True):
        if block.head:
            sheet.text(left, top + 0.14, shorten(block.head, int((wide - left) / 0.066)), size=8, weight="bold")
        top += _HEAD if block.head else 0.08
        for row, height in zip(block.rows, heights, strict=True):
            _draw_row(sheet, row, left, top, tile, height, grid)
            top += height + _GAP
    for number, line in enumerate(lines):
        sheet.key(line, left, top + 0.14 + 0.22 * number)
    sheet.frame(title, caption, left=left, most=110)
    return sheet


def _draw_row(sheet: Sheet, row: Row, left: float, top: float, tile: float, height: float, grid: float) -> None:
    for column, view in enumerate(row.views):
        sheet.tile(view, left + column * (tile + _GAP), top, tile, height, smooth=view.shape[1] > 256)
    if row.words:
        words = shorten(row.words, max(int(height / 0.068), 3))
        sheet.text(left - 0.07, top + height / 2, words, ha="right", rotation=90)
    if row.bar is not None:
        bar, room = row.bar, (1 - 2 * row.bar.left) * tile
        sheet.bar(left + bar.left * tile, top + (1 - bar.below) * height, bar.length * tile, bar.words, room)
    for number, scale in enumerate(row.scales):
        _draw_scale(sheet, scale, left + grid + number * _SCALE + 0.04, top, height)


def _draw_scale(sheet: Sheet, scale: Scale, left: float, top: float, height: float) -> None:
    """Draw shades from the largest value down to the least."""
    from matplotlib import colormaps

    shades = colormaps[scale.colours](np.linspace(1, 0, 64))[:, None, :3]
    sheet.tile(shades, left, top, 0.09, height, frame=(0.8, 0.83, 0.86), line=0.5)
    style: Any = {"size": 7, "color": SOFT}
    sheet.text(left + 0.14, top + 0.06, plain(scale.high, 3), **style)
    sheet.text(left + 0.14, top + height - 0.06, plain(scale.low, 3), **style)
    if height > 0.45:
        room = int((height - 0.35) / 0.055) if height < 0.7 else 12
        words = shorten(scale.words, max(room, 4)) if height < 0.7 else scale.words
        sheet.text(left + 0.14, top + height / 2, shorten(words, 12), size=6.5, color=EDGE)
