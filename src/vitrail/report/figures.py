"""Figures: one style for all pictures, axes and legends of plots, sheets of images, and their files.

- a plot is one figure with axes (`make_figure`), saved as SVG: text stays text, in the reader's own sans-serif
- a sheet (`Sheet`) holds images and words at places in inches, so that images of any shape keep their proportions
- nothing global is touched: matplotlib's objects are used, not its state machine, and it is imported when drawing
"""

from __future__ import annotations

import base64
import io
import math
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitrail.disk import check_output, mark, write_whole
from vitrail.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

INK, FAINT, LINE = "#1f2933", "#616e7c", "#d9dfe6"
BLUE, ORANGE, GREEN, RED, PALE = "#1f6feb", "#d9730d", "#1a7f5a", "#c0362c", "#b9d2f8"
SOFT, EDGE = "#52606d", "#9aa5b1"  # captions and borders of sheets
FONT = 8.5
DPI = 150  # of a PNG
WORDS: dict[str, Any] = {"color": INK, "parse_math": False}  # names may hold a dollar sign
ROUND = [1, 2, 2.5, 5, 10]  # ticks at these times a power of ten
_FAMILY = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
_MOST_BYTES = 900_000  # of the PNG of a sheet
_LOCK = threading.Lock()  # matplotlib's settings are global while an SVG is written

Colour = tuple[float, ...]
Drawn = TypeVar("Drawn")


def shorten(text: str, most: int) -> str:
    """Cut the end off a long text."""
    return text if len(text) <= most else text[: most - 1] + "…"


def shorten_middle(text: str, most: int) -> str:
    """Cut the middle out of a long text, where the end tells names apart as the start does."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[most // 2 + 1 - most :]}"


def tick_label(value: float, _: Any = None) -> str:
    """Return a tick without idle zeros: 0.5, 250, 1.25k."""
    power = 0 if abs(value) < 1000 else min(int(math.log10(abs(value)) // 3), 4)
    return f"{value / 1000**power:.4g}{('', 'k', 'M', 'G', 'T')[power]}"


# ---------------------------------------------------------------- plots


def make_figure(
    title: str,
    size: tuple[float, float],
    *,
    widths: Sequence[float] = (1,),
    heights: Sequence[float] = (1,),
    share: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Make an empty plot with axes in a grid, row by row; `share` gives all of them the first one's x axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(heights), len(widths), width_ratios=list(widths), height_ratios=list(heights))
    for place in range(len(heights) * len(widths)):
        where = grid[place // len(widths), place % len(widths)]
        ax = figure.add_subplot(where, sharex=figure.axes[0] if share and place else None)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LINE)
        ax.grid(color=LINE, linewidth=0.6, alpha=0.7)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=LINE, labelcolor=FAINT, labelsize=FONT, length=3)
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(tick_label))
            axis.label.set(fontsize=FONT, color=FAINT)
    figure.suptitle(title, fontsize=10, weight="bold", x=0.012, ha="left", **WORDS)
    return figure, figure.axes


def scale_log(ax: Axes, values: Sequence[float]) -> None:
    """Make the y axis logarithmic, with ticks that can be read for such values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(tick_label))
    ax.yaxis.set_minor_formatter(NullFormatter())


def put_legend(ax: Axes, *, columns: int = 1, size: float = 8, place: Any = "upper right", length: float = 1.6) -> None:
    """Put a legend into the axes, if anything in them has a label."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        legend = ax.legend(handles, labels, frameon=True, fontsize=size, ncols=columns, loc=place, handlelength=length)
        legend.get_frame().set(facecolor="white", edgecolor="none", alpha=0.85)
        for text in legend.get_texts():
            text.set(**WORDS)


def put_legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend below the axes in as many columns as fit; many rows make the figure taller, not the axes lower."""
    if not handles:
        return
    short = [shorten_middle(label, 120) for label in labels]
    for columns in range(min(6, len(short)), 0, -1):
        legend = figure.legend(
            handles, short, loc="outside lower left", ncols=columns, fontsize=8, frameon=False, handlelength=2.2
        )
        for text in legend.get_texts():
            text.set(**WORDS)
        if columns == 1 or measure(legend, figure) < 0.97 * figure.bbox.width:
            break
        legend.remove()
    rows = math.ceil(len(short) / columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, rows - 2))


def measure(artist: Any, figure: Figure) -> float:
    """Return the width that something takes in a figure, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with any_letters():
        return artist.get_window_extent(FigureCanvasAgg(figure).get_renderer()).width


@contextmanager
def any_letters() -> Iterator[None]:
    """Draw without warnings: a name may hold letters that the measuring font lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_svg(figure: Figure) -> str:
    """Return the figure as SVG text, the same bytes for the same numbers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas = FigureCanvasSVG(figure)
    stream = io.StringIO()
    blank: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "vitrail"}
    with _LOCK, matplotlib.rc_context(settings), any_letters():
        canvas.print_svg(stream, metadata=blank)
    svg = re.sub(r"font-family: [^;\"]*", lambda _: f"font-family: {_FAMILY}", stream.getvalue())
    return re.sub(r"font: ([\d.a-z ]*px) [^;\"]*", lambda found: f"font: {found[1]} {_FAMILY}", svg)


def save_png(figure: Figure) -> bytes:
    """Return the figure as PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DPI)
    stream = io.BytesIO()
    with any_letters():
        FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return stream.getvalue()


def embed_image(content: bytes, kind: str = "image/svg+xml") -> str:
    """Return an image as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def try_to_draw(name: str, draw: Callable[[], Drawn | None], notes: list[str]) -> Drawn | None:
    """Draw; what cannot be drawn is noted, and must not cost the reader the page."""
    try:
        return draw()
    except Exception as error:  # whatever the drawing library raises
        notes.append(f"The {name} could not be drawn: {error}.")
        return None


# ---------------------------------------------------------------- sheets


class Sheet:
    """A picture of images and words at places in inches, counted from its upper left corner."""

    def __init__(self, wide: float, high: float, *, dpi: float = DPI):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.wide, self.high = wide, high
        self.figure = Figure(figsize=(wide, high), dpi=dpi, facecolor="white")
        self._canvas = FigureCanvasAgg(self.figure)
        self._ground: Axes | None = None  # under all of it

    def axes(self, left: float, top: float, wide: float, high: float) -> Axes:
        """Add axes at a place."""
        box = (left / self.wide, 1 - (top + high) / self.high, wide / self.wide, high / self.high)
        return self.figure.add_axes(box)

    def image(
        self,
        picture: np.ndarray,
        left: float,
        top: float,
        wide: float,
        high: float,
        *,
        smooth: bool = False,
        **more: Any,
    ) -> Axes:
        """Add an image [H, W, 3] of colours from 0 to 1; its pixels show unless it is `smooth`."""
        ax = self.axes(left, top, wide, high)
        _show(ax, picture, smooth=smooth, **more)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        return ax

    def tile(
        self,
        picture: np.ndarray,
        left: float,
        top: float,
        wide: float,
        high: float,
        *,
        smooth: bool = False,
        frame: Colour | None = None,
        line: float = 1.6,
    ) -> None:
        """Add an image that needs no axes of its own: they take most of the time, where there are a hundred."""
        from matplotlib.patches import Rectangle

        if self._ground is None:
            self._ground = self.axes(0, 0, self.wide, self.high)
            self._ground.set_axis_off()
        _show(self._ground, picture, smooth=smooth, extent=(left, left + wide, top + high, top))
        self._ground.set(xlim=(0, self.wide), ylim=(self.high, 0))
        if frame is not None:
            self._ground.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=frame, linewidth=line))

    def bar(self, left: float, bottom: float, length: float, words: str, room: float) -> None:
        """Draw a scale bar over a tile, above its lower left corner: white on black, so that it shows on anything.

        Its words become smaller where the tile has no `room`, in inches, for them.
        """
        from matplotlib.patches import Rectangle

        assert self._ground is not None
        start, y = left + 0.06, bottom - 0.1
        for edge, colour in ((0.012, "black"), (0.0, "white")):
            place = (start - edge, y - edge)
            self._ground.add_patch(Rectangle(place, length + 2 * edge, 0.028 + 2 * edge, color=colour, linewidth=0))
        box = {"boxstyle": "round,pad=0.15", "facecolor": "black", "alpha": 0.6, "edgecolor": "none"}
        share = (room - 0.14) / (0.056 * len(words))  # of the width that the words have
        self.text(start + 0.02, y - 0.09, words, size=6.5 * min(1.0, max(0.5, share)), color="white", bbox=box)

    def text(self, x: float, y: float, words: str, *, size: float = 8, va: str = "center", **style: Any) -> None:
        """Write at a place."""
        self.figure.text(x / self.wide, 1 - y / self.high, words, fontsize=size, va=va, **(WORDS | style))

    def frame(self, title: str, caption: str, *, left: float = 0.15, most: int = 10**6) -> None:
        """Write the title into the upper left corner and the caption into the lower left one."""
        if title:
            self.text(left, 0.2, shorten(title, most), size=11, weight="bold")
        if caption:
            self.text(left, self.high - 0.08, caption, va="bottom", color=SOFT)

    def key(self, keys: Sequence[tuple[str, Colour]], x: float, y: float) -> None:
        """Write what colours mean, from left to right."""
        for words, colour in keys:
            self.text(x, y, "■", size=9, color=colour)
            self.text(x + 0.15, y, words)
            x += key_width(words)

    def draw(self) -> Image:
        """Return the picture in memory."""
        import numpy as np
        from PIL import Image

        with any_letters():
            self._canvas.draw()
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())[..., :3])

    def put(self, path: str | Path, *, grey: bool = False) -> Path:
        """Write the picture as PNG and return its path; `grey` says that it has few colours."""
        return write_picture(path, encode(self.draw(), grey=grey))


def _show(ax: Axes, picture: np.ndarray, *, smooth: bool, **more: Any) -> None:
    """Put an image into axes, in whole bytes: matplotlib would cut fractions off, and flat colours miss their key."""
    import numpy as np

    pixels = np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8)
    ax.imshow(pixels, aspect="auto", interpolation="antialiased" if smooth else "nearest", **more)


def key_width(words: str) -> float:
    """Return the inches that an entry of a key takes."""
    return 0.38 + 0.068 * len(words)


def encode(image: Image, *, grey: bool) -> bytes:
    """Return the picture as PNG below the size limit: grey ones first with a palette, all then with fewer pixels."""
    from PIL import Image as Pillow

    scale, content = 1.0, b""
    while scale > 0.2:
        wide, high = round(image.width * scale), round(image.height * scale)
        small = image if scale == 1.0 else image.resize((wide, high), Pillow.Resampling.LANCZOS)
        candidates = [small]
        if grey or scale < 0.5:  # colour pictures suffer more from a palette than from fewer pixels
            candidates.append(small.quantize(256, dither=Pillow.Dither.NONE))
        for candidate in candidates:
            stream = io.BytesIO()
            candidate.save(stream, format="PNG", dpi=(DPI * scale, DPI * scale))
            content = stream.getvalue()
            if len(content) < _MOST_BYTES:
                return content
        # The size goes with the pixels, so the next guess is near; always by a good step, so that it ends.
        scale *= min(0.85, 0.97 * math.sqrt(_MOST_BYTES / len(content)))
    return content


def check_picture(path: str | Path) -> Path:
    """Refuse a path where no PNG can be written, before the work; return it."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file in it, such as {path / 'picture.png'}")
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: pictures are written as PNG; use a name that ends so, such as {path.stem}.png")
    folder = path.parent.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):  # rights alone do not tell of full disks and systems without files
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({folder}: {error.strerror}); choose another place") from None
    check_output(path)
    return path


def write_picture(path: str | Path, picture: bytes) -> Path:
    """Write a PNG with vitrail's mark, so that a later call may replace it."""
    return write_whole(path, mark(picture), durable=False, parents=True)
