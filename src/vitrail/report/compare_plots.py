"""Curves of several runs over each other: a line for each run, in its colour, over steps, samples or time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vitrail.report.bench_plots import COLOURS, name_bars
from vitrail.report.figures import FAINT, make_figure, put_legend, shorten_middle
from vitrail.report.metrics import Line, name_metric, select, series
from vitrail.report.plots import make_axes, scale_losses, smooth, thin
from vitrail.report.units import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RUNS = 2 * len(COLOURS)  # each colour once as a whole line and once dashed
_MOST_METRICS = 8  # with a curve each
_MOST_LETTERS = 48  # of a name in a legend
_LONG = 20  # logged losses from which on a curve is smoothed
_OF_CLASSES = ("dice_", "iou_")  # metrics of single classes, which are in the table alone
_TIMES = ((1.0, "seconds", 300.0), (60.0, "minutes", 3 * 3600.0), (3600.0, "hours", float("inf")))

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Track:
    """What curves show of a run."""

    name: str
    place: int  # among the runs
    lines: Sequence[Line]  # that count, each with its `samples_seen` and `elapsed`

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dashed(self) -> bool:
        return self.place >= len(COLOURS)

    def train(self, name: str) -> Points:
        """Return the points of a field of the training lines."""
        return series(select(self.lines, "train"), name)

    def held_out(self, name: str) -> Points:
        """Return the points of a metric: of averaged weights where these were scored."""
        evals = [line for line in select(self.lines, "eval") if isinstance(line.get("metrics"), dict)]
        averaged = [line for line in evals if line.get("weights") == "ema"]
        return series([{**line["metrics"], "step": line.get("step")} for line in averaged or evals], name)

    def tokens_of_sample(self) -> int | None:
        """Return how many tokens a sample has, where the run has logged both speeds."""
        for line in select(self.lines, "train"):
            tokens, samples = number_of(line.get("tokens_per_s")), number_of(line.get("samples_per_s"))
            if tokens > 0 and samples > 0:
                return round(tokens / samples)
        return None

    def over(self, field: str, unit: float) -> Track:
        """Return the same with another field in the place of the step."""
        lines = [line | {"step": number_of(line.get(field)) / unit} for line in self.lines]
        return Track(self.name, self.place, lines)


@dataclass(frozen=True)
class Curve:
    """A curve of the page: its name, and the points that a run has for it."""

    name: str
    label: str
    points: Callable[[Track], Points]
    dots: bool = False  # at each point, as of evaluations
    zero: bool = False  # begins at 0
    log: bool = False  # where values span a factor of ten
    scale: float = 1.0
    least: float = -math.inf  # below which nobody asks for it


def seen(raw: Sequence[Line], batch: int | None) -> list[Line]:
    """Return the lines of a log, each with the samples that training had seen and the seconds that the run had gone.

    Time between sessions does not count. An evaluation has seen as many samples as the training line of its step.
    """
    found: list[Line] = []
    before, first, last = 0.0, float("nan"), 0.0
    samples = {number_of(line.get("step")): number_of(line.get("samples")) for line in select(raw, "train")}
    for line in raw:
        time = number_of(line.get("time"))
        if line["event"] == "start":
            before, first = before + last, time
            last = 0.0
        last = max(last, time - first) if time >= first else last
        step = number_of(line.get("step"))
        many = samples.get(step, 0.0 if step == 0 else step * number_of(batch))
        found.append(line | {"elapsed": before + last, "samples_seen": many})
    return found


def axes_of(tracks: Sequence[Track]) -> list[tuple[str, list[Track]]]:
    """Return the axes that curves can be drawn over, and the runs over each: steps, samples, and time in a fit unit."""
    longest = max((number_of(line.get("elapsed")) for track in tracks for line in track.lines[-1:]), default=0.0)
    unit, word, _ = next(found for found in _TIMES if not longest > found[2])
    return [
        ("step", list(tracks)),
        ("samples", [track.over("samples_seen", 1.0) for track in tracks]),
        (word, [track.over("elapsed", unit) for track in tracks]),
    ]


def list_curves(tracks: Sequence[Track], chosen: str | None) -> Iterator[Curve]:
    """Yield the curves of the page in reading order; `chosen` is the metric that the runs are compared by."""
    names = dict.fromkeys(
        str(name)
        for track in tracks
        for line in select(track.lines, "eval")
        for name in (line["metrics"] if isinstance(line.get("metrics"), dict) else ())
    )
    rest = [name for name in names if name not in (chosen, "loss") and not name.startswith(_OF_CLASSES)]
    first = [name for name in dict.fromkeys((chosen, "loss")) if name in names]
    yield Curve("Training loss", "loss, smoothed", _smoothed, log=True)
    for name in (first + rest)[:_MOST_METRICS]:
        points = partial(Track.held_out, name=name)
        yield Curve(f"Held-out: {name_metric(name)}", name_metric(name), points, dots=True, log=name == "loss")
    tokens = {track.tokens_of_sample() for track in tracks}
    for title, label, field, options in _FIELDS:
        if field == "tokens_per_s" and len(tokens) < 2:
            continue
        yield Curve(title, label, partial(Track.train, name=field), **options)


_FIELDS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Learning rate", "learning rate", "lr", {}),
    ("Gradient norm", "gradient norm", "grad_norm", {"log": True}),
    ("Samples a second", "samples/s", "samples_per_s", {"zero": True}),
    ("Tokens a second", "tokens/s", "tokens_per_s", {"zero": True}),
    ("Data wait", "% of the step", "data_wait", {"zero": True, "scale": 100.0, "least": 1.0}),
    ("Memory, most so far", "GiB", "memory_gib", {"zero": True}),
    ("Reserved GPU memory, most so far", "GiB", "reserved_gib", {"zero": True}),
    ("Model FLOPs utilisation", "% of the peak", "mfu", {"zero": True, "scale": 100.0}),
)


def _smoothed(track: Track) -> Points:
    places, losses = track.train("loss")
    return places, smooth(losses) if len(losses) >= _LONG else losses


def draw_curve(curve: Curve, tracks: Sequence[Track], over: str) -> Figure | None:
    """Draw the lines of all runs that have any; runs that have none are missing from the legend."""
    found = [(track, *curve.points(track)) for track in tracks]
    found = [one for one in found if one[1]]
    values = [curve.scale * value for _, _, mine in found for value in mine]
    if not values or max(values) < curve.least:
        return None
    if curve.dots and all(len(places) == 1 for _, places, _ in found):  # the table of scores says the same
        return None
    figure, ax = make_axes(curve.name, [], over=over)
    for track, places, values in found:
        few = len(places) == 1
        style: Any = {"color": track.colour, "linestyle": "--" if track.dashed else "-", "linewidth": 1.5}
        style |= {"marker": "o", "markersize": 3.5} if few or (curve.dots and len(places) < 60) else {}
        ax.plot(*thin(places, [curve.scale * value for value in values]), label=_entry(track), **style)
    if curve.log:
        scale_losses(ax, values)
    if curve.zero:
        ax.set_ylim(0, 1.15 * max(values) or 1.0)
    ax.set_ylabel(curve.label, parse_math=False)
    put_legend(ax, place="best", size=7 if len(found) < 6 else 6, columns=1 if len(found) < 6 else 2)
    return figure


def _entry(track: Track) -> str:
    """Return the words of a run in a legend; a line whose name begins with an underscore would get none."""
    return shorten_middle(f" {track.name}" if track.name.startswith("_") else track.name, _MOST_LETTERS)


def draw_scores(names: Sequence[str], values: Sequence[dict[str, Any]], label: str) -> Figure | None:
    """Draw a score of each run as a dot, and its interval as a line."""
    known = [place for place, value in enumerate(values) if value["value"] is not None]
    if not any(values[place]["low"] is not None for place in known):
        return None
    figure, (ax,) = make_figure(f"Held-out: {label}, and intervals of 95 %", (4.6, max(0.95 + 0.26 * len(known), 1.6)))
    for row, place in enumerate(known):
        colour, value = COLOURS[place % len(COLOURS)], values[place]
        if value["low"] is not None:
            ax.plot([value["low"], value["high"]], [row, row], "|-", color=colour, linewidth=1.8, markersize=7)
        filled = "full" if place < len(COLOURS) else "none"
        ax.plot(value["value"], row, "o", color=colour, markersize=6, fillstyle=filled)
    name_bars(ax, [names[place] for place in known], most=34)
    ax.set_xlabel(label, parse_math=False, color=FAINT)
    ax.margins(x=0.06)
    return figure
