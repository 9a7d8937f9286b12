"""Windows of TIFF files: only the tiles or strips that a window touches are read, by any number of threads.

- the file is parsed once; after that voxels are read by offset, so that no state is shared
- arrays that lie in one piece without compression are mapped into memory
- a file that is cut short is refused when it is opened: its chain of pages, what its own header says of their number,
  and the end of its last page are checked, because libraries would just give fewer pages
"""

import importlib.util
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.bad import BadData, MissingData
from vitrail.data.formats import Handles, decoding, file_mark
from vitrail.data.stored import Filling, Window, by
from vitrail.errors import UserError
from vitrail.recipe.kinds import remedy

_files: Handles[BinaryIO] = Handles(lambda place, mark: open(place, "rb"), per_thread=False)  # noqa: SIM115 (stays)


@dataclass(frozen=True)
class Page:
    place: str
    mark: Any  # tells the file from a later one in its place
    offsets: np.ndarray
    counts: np.ndarray
    frame: Any  # tifffile's page that knows how its segments are coded


def list_pages(name: str, series: Any) -> list[Page]:
    """Where the segments of each page lie."""
    pages: list[Page] = []
    marks: dict[str, Any] = {}
    for number, page in enumerate(series.pages):
        if page is None:
            raise BadData(f"{name} lacks page {number} of {len(series.pages)}; restore the file it was in")
        place = str(page.parent.filehandle.path)
        offsets, counts = (np.asarray(n, np.int64) for n in (page.dataoffsets, page.databytecounts))
        if place not in marks:
            marks[place] = file_mark(place)
        pages.append(Page(place, marks[place], offsets, counts, page.keyframe))
    return pages


def read_pages(name: str, series: Any, pages: list[Page], window: Window, *, fill: Filling | None) -> np.ndarray:
    """A window of a series whose pages follow each other along its leading axes."""
    leading = series.shape[: len(series.shape) - series.keyframe.ndim]
    out = np.empty([w.stop - w.start for w in window], series.dtype)
    inner = window[len(leading) :]
    for target in np.ndindex(*out.shape[: len(leading)]):
        index = tuple(w.start + i for w, i in zip(window, target, strict=False))
        number = int(np.ravel_multi_index(index, leading)) if leading else 0
        out[target] = _read_page(name, number, pages[number], inner, fill)
    return out


def _read_page(name: str, number: int, page: Page, window: Window, fill: Filling | None) -> np.ndarray:
    """A window of the axes of one page, out of the segments that it touches."""
    frame = page.frame
    planes, depth, height, width, samples = frame.shaped
    axes = frame.axes
    rows = window[axes.index("Y")]
    columns = window[axes.index("X")]
    tall, wide = (frame.tilelength, frame.tilewidth) if frame.is_tiled else (frame.rowsperstrip, width)
    deep = max(1, frame.tiledepth) if frame.is_tiled else 1
    tall = min(tall, height) if not frame.is_tiled else tall
    across, down, along = math.ceil(width / wide), math.ceil(height / tall), math.ceil(depth / deep)
    out = np.empty((planes, depth, rows.stop - rows.start, columns.stop - columns.start, samples), frame.dtype)
    for plane in range(planes):
        for d in range(along):
            for row in range(rows.start // tall, math.ceil(rows.stop / tall)):
                for column in range(columns.start // wide, math.ceil(columns.stop / wide)):
                    segment = ((plane * along + d) * down + row) * across + column
                    values, at = _read_segment(name, number, page, segment, fill)
                    _place(out, values, at, rows.start, columns.start)
    shape = [rows.stop - rows.start if a == "Y" else columns.stop - columns.start if a == "X" else n
             for a, n in zip(axes, frame.shape, strict=True)]  # fmt: skip
    rest = tuple(slice(None) if a in "YX" else w for a, w in zip(axes, window, strict=True))
    return out.reshape(shape)[rest]


def _read_segment(name: str, number: int, page: Page, segment: int, fill: Filling | None) -> tuple[np.ndarray, Any]:
    offset, count = int(page.offsets[segment]), int(page.counts[segment])
    where = f"{name}, page {number}, segment {segment}"
    frame = page.frame
    if count == 0 and fill is None:
        raise MissingData(
            f"{where}: it was never written; restore the file, or set `missing: fill` if its writer left out what is "
            "empty"
        )
    with decoding(where):
        data = _read_bytes(_files(page.place, page.mark), offset, count) if count else None
        if data is not None and len(data) < count:
            raise BadData(f"{where} is cut short: {len(data)} of {count} bytes; restore the file")
        more = {} if frame.jpegtables is None else {"jpegtables": frame.jpegtables}
        try:
            values, at, shape = frame.decode(data, segment, **more)
        except ValueError as error:
            if "imagecodecs" in str(error) and importlib.util.find_spec("imagecodecs") is None:
                raise UserError(f"{name} is compressed by {frame.compression.name}; {remedy('imagecodecs')}") from error
            raise
    if values is not None:
        return values, at
    if fill is not None:
        fill.add(1)
    return np.full(shape, frame.nodata, frame.dtype), at


def _read_bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    """So many bytes, or fewer where the file ends; the system may hand them over in pieces."""
    pieces: list[bytes] = []
    while count > 0 and (piece := os.pread(file.fileno(), count, offset)):
        pieces.append(piece)
        offset, count = offset + len(piece), count - len(piece)
    return b"".join(pieces)


def _place(out: np.ndarray, values: np.ndarray, at: Any, top: int, left: int) -> None:
    """Copy what a segment [D, H, W, S] and the window have in common."""
    plane, depth, row, column, _ = at
    first, last = max(row, top), min(row + values.shape[1], top + out.shape[2])
    start, stop = max(column, left), min(column + values.shape[2], left + out.shape[3])
    deep = min(values.shape[0], out.shape[1] - depth)
    out[plane, depth : depth + deep, first - top : last - top, start - left : stop - left] = values[
        :deep, first - row : last - row, start - column : stop - column
    ]


def check_complete(name: str, place: Path, tif: Any) -> None:
    """Refuse a file with fewer pages than it says, or whose last page has lost its end."""
    size = place.stat().st_size
    if not tif.is_ndpi:  # which packs offsets of 64 bits in its own way
        _check_chain(name, place, size)
    series = tif.series[0]
    told = tif.shaped_metadata[0].get("shape") if tif.shaped_metadata else None
    if told is not None and math.prod(told) != math.prod(series.shape):
        raise BadData(
            f"{name} holds {by(series.shape)} voxels but its own header says {by(told)}: pages are lost; restore it"
        )
    images = (tif.imagej_metadata or {}).get("images", 1) if tif.is_imagej else 1
    if images > 1 and series.dataoffset is None and len(series.pages) < images:
        raise BadData(f"{name} holds {len(series.pages)} pages but its ImageJ header says {images}; restore the file")
    plain = series.kind in ("generic", "uniform", "shaped")  # any of them may be the last
    end = max(_find_end(tif, each) for each in (tif.series if plain else [series]))
    if end > size:
        raise BadData(f"{name} is cut short: its data end at byte {end}, the file at {size}; restore the file")


def _find_end(tif: Any, series: Any) -> int:
    """The byte after the data of a series in its own file: an OME-TIFF may have pages in other files too."""
    if series.dataoffset is not None:
        return int(series.dataoffset + series.nbytes)
    own = str(tif.filehandle.path)
    last = [page for page in series.pages if page is not None and str(page.parent.filehandle.path) == own][-1:]
    return max((o + c for page in last for o, c in zip(page.dataoffsets, page.databytecounts, strict=True)), default=0)


def _check_chain(name: str, place: Path, size: int) -> None:
    """Follow the offsets from page to page to their end."""
    with place.open("rb") as file:

        def number(at: int, form: str) -> int:
            length = struct.calcsize(form)
            data = os.pread(file.fileno(), length, at)
            if len(data) < length:
                raise BadData(
                    f"{name} is cut short: page {pages} should lie at byte {at}, but the file ends at {size}; "
                    "restore it"
                )
            return int(struct.unpack(form, data)[0])

        pages = 0
        order = "<" if os.pread(file.fileno(), 2, 0) == b"II" else ">"
        big = number(2, order + "H") == 43
        count, entry, offset = (order + "Q", 20, order + "Q") if big else (order + "H", 12, order + "I")
        place_of_next = 8 if big else 4
        while at := number(place_of_next, offset):
            place_of_next = at + struct.calcsize(count) + entry * number(at, count)
            pages += 1
            if pages > 2**24:
                raise BadData(f"{name} has a chain of pages without an end; restore the file")
