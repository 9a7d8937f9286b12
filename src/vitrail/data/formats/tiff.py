"""Windows of TIFF files: only the tiles or strips that a window touches are read, by any number of threads.

- the file is parsed once; after that voxels are read by offset, so that no state is shared
- arrays that lie in one piece without compression are mapped into memory
- a file that is cut short is refused when it is opened: its chain of pages, what its own header says of their number,
  and the end of its last page are checked, because libraries would just give fewer pages
- so are rings of pages, pages over each other, tags with more values than the file has bytes, and names of files in
  other folders; pages and tags are looked at before any library follows them
"""

import importlib.util
import itertools
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal
from xml.etree import ElementTree

import numpy as np

from vitrail.data.files.handles import Handles, decoding, file_mark
from vitrail.data.stored import Filling, Window, by
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_plain, check_room, is_trusting, named_file, open_plain
from vitrail.recipe.kinds import remedy

_files: Handles[BinaryIO] = Handles(lambda place, mark: open_plain(place), per_thread=False)
# Bytes of a value of each of TIFF's types.
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_SUBIFDS = 330
_SHARED = 100  # times the bytes of a file that the values of all tags may have, where pages share some
# Compressions whose decoders are told how large a piece is, and those whose pieces are whole images with a size of
# their own in a head that is read here first.
_BOUNDED = {1, 2, 3, 4, 5, 8, 32773, 32946, 34925, 34926, 50000, 50013, 65000, 65001, 65002}
_IMAGES = {6, 7, 33003, 33004, 33005, 33007, 34712, 34892, 34933}
_UNBOUNDED = _IMAGES | {22610, 34887, 34934, 50001, 50002, 52546}  # JPEG XR, LERC, WebP and JPEG XL


@dataclass(frozen=True)
class Page:
    place: str
    mark: Any  # tells the file from a later one in its place
    offsets: np.ndarray
    counts: np.ndarray
    frame: Any  # tifffile's page that knows how its segments are coded


def list_pages(name: str, series: Any) -> list[Page]:
    """List where the segments of each page lie."""
    _ = series.keyframe.decode  # which looks into the file of some, and must be made while that is open
    pages: list[Page] = []
    marks: dict[str, Any] = {}
    checked: set[int] = set()
    for number, page in enumerate(series.pages):
        if page is None:
            raise BadData(f"{name} lacks page {number} of {len(series.pages)}; restore the file it was in")
        if id(page.keyframe) not in checked:  # each file of several has one of its own
            check_frame(name, page.keyframe, _BOUNDED | _IMAGES, trust=is_trusting())
            checked.add(id(page.keyframe))
        place = str(page.parent.filehandle.path)
        offsets, counts = (np.asarray(n, np.int64) for n in (page.dataoffsets, page.databytecounts))
        if place not in marks:
            marks[place] = file_mark(place)
        pages.append(Page(place, marks[place], offsets, counts, page.keyframe))
    return pages


def check_frame(
    name: str, frame: Any, known: Collection[int] = frozenset(_BOUNDED), *, trust: bool | None = None
) -> None:
    """Refuse a page whose tiles or strips have no room, or may become larger than they are.

    `trust` is None where it is not known, as in threads that read.
    """
    if frame.is_tiled:
        size = frame.tilewidth * frame.tilelength * max(1, frame.tiledepth)
    else:
        size = frame.imagewidth * min(frame.rowsperstrip, frame.imagelength)
    check_room(f"a tile or strip of {name}", size * frame.samplesperpixel * frame.dtype.itemsize)
    if frame.compression not in known and not trust:
        how = getattr(frame.compression, "name", frame.compression)
        unbounded = frame.compression in _UNBOUNDED
        why = "whose pieces can say that they are of any size" if unbounded else "which vitrail does not know"
        otherwise = "" if trust is None else ", or give --trust if you know who made it"
        raise BadData(
            f"{name} is compressed by {how}, {why}; save it with another compression, such as zlib{otherwise}"
        )


def read_pages(name: str, series: Any, pages: list[Page], window: Window, filling: Filling) -> np.ndarray:
    """Read a window of a series whose pages follow each other along its leading axes."""
    leading = series.shape[: len(series.shape) - series.keyframe.ndim]
    out = np.empty([w.stop - w.start for w in window], series.dtype)
    inner = window[len(leading) :]
    for target in np.ndindex(*out.shape[: len(leading)]):
        index = tuple(w.start + i for w, i in zip(window, target, strict=False))
        number = int(np.ravel_multi_index(index, leading)) if leading else 0
        out[target] = _read_page(name, number, pages[number], inner, filling)
    return out


def _read_page(name: str, number: int, page: Page, window: Window, filling: Filling) -> np.ndarray:
    """Read a window of the axes of one page, out of the segments that it touches."""
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
                    values, at = _read_segment(name, number, page, segment, filling)
                    _place(out, values, at, rows.start, columns.start)
    shape = [rows.stop - rows.start if a == "Y" else columns.stop - columns.start if a == "X" else n
             for a, n in zip(axes, frame.shape, strict=True)]  # fmt: skip
    rest = tuple(slice(None) if a in "YX" else w for a, w in zip(axes, window, strict=True))
    return out.reshape(shape)[rest]


def _read_segment(name: str, number: int, page: Page, segment: int, filling: Filling) -> tuple[np.ndarray, Any]:
    offset, count = int(page.offsets[segment]), int(page.counts[segment])
    where = f"{name}, page {number}, segment {segment}"
    frame = page.frame
    if count == 0:
        filling.add(
            f"{where}: it was never written; restore the file, or set `missing: fill` if its writer left out what is "
            "empty"
        )
    with decoding(where):
        file = _files(page.place, page.mark)
        left = max(0, os.fstat(file.fileno()).st_size - offset)
        if offset < 0 or count < 0 or left < count:
            raise BadData(f"{where} is cut short: {left} of {count} bytes; restore the file")
        data = _read_bytes(file, offset, count) if count else None
        _check_image(where, data, frame)
        more = {} if frame.jpegtables is None else {"jpegtables": frame.jpegtables}
        try:
            values, at, shape = frame.decode(data, segment, **more)
        except ValueError as error:
            if "imagecodecs" in str(error) and importlib.util.find_spec("imagecodecs") is None:
                raise UserError(f"{name} is compressed by {frame.compression.name}; {remedy('imagecodecs')}") from error
            raise
    return np.full(shape, frame.nodata, frame.dtype) if values is None else values, at


def _check_image(where: str, data: bytes | None, frame: Any) -> None:
    """Refuse an image inside that says it is larger than its tile or strip: memory is taken for what it says."""
    if data is None or frame.compression not in _IMAGES:
        return
    tall, wide = (frame.tilelength, frame.tilewidth) if frame.is_tiled else (frame.rowsperstrip, frame.imagewidth)
    *told, samples = _image_size(data)
    most = max(tall * wide, frame.imagelength * frame.imagewidth)
    if not 0 < math.prod(told) <= most or samples > max(4, frame.samplesperpixel):
        raise BadData(
            f"{where} cannot be read: it says that it is {by((*told, samples))} values, not {by((tall, wide))} pixels; "
            "restore it"
        )


def _image_size(data: bytes) -> tuple[int, int, int]:
    """Read height, width and samples in the head of a JPEG, JPEG 2000 or PNG; zeros where it tells none."""
    if data.startswith(b"\x89PNG") and len(data) > 24:
        wide, tall = struct.unpack_from(">II", data, 16)
        return tall, wide, 1
    at = 0
    if data[4:8] == b"jP  ":  # in boxes, of which one holds what is decoded
        while data[at + 4 : at + 8] != b"jp2c":
            if (length := int.from_bytes(data[at : at + 4], "big")) < 8:  # the end, or a size written otherwise
                return 0, 0, 0
            at += length
        at += 8
    if data[at : at + 4] == b"\xff\x4f\xff\x51" and len(data) > at + 42:
        wide, tall, samples = struct.unpack_from(">II24xH", data, at + 8)
        return tall, wide, samples
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        mark = data[at + 1]
        if 0xC0 <= mark <= 0xCF and mark not in (0xC4, 0xC8, 0xCC):
            tall, wide, samples = struct.unpack_from(">HHB", data, at + 5)
            return tall, wide, samples
        at += 1 if mark == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")  # bytes of 255 may lie between
    return 0, 0, 0


def _read_bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    """Read `count` bytes, or fewer where the file ends; the system may hand them over in pieces."""
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


def check_complete(name: str, place: Path, tif: Any, smallest: int) -> None:
    """Refuse a file with fewer pages than it says, whose last page has lost its end, or that leads elsewhere.

    `smallest` is what `check_chain` found, before tifffile read anything.
    """
    place = place.resolve()  # as tifffile does, for which names count in the folder that links lead to
    size = place.stat().st_size
    known = {place}
    for file in _named_files(place, tif):
        if file.exists() and not file.samefile(place):
            smallest = min(smallest, check_chain(str(file), file))
        known.add(file.resolve())
    check_room(f"the list of planes of {name}", 8 * _count_planes(place, tif, smallest))
    if not tif.series:
        raise BadData(f"{name} holds no image; restore or remove the file")
    several = [series for series in tif.series if series.kind in ("ome", "mmstack", "ndtiff")]  # those that have others
    for other in {page.parent.filehandle.path for series in several for page in series.pages if page is not None}:
        if Path(other) not in known:
            raise BadData(f"{name} has pages in {other}, which was not known to be a part of it; restore the file")
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


def find_whole(series: Any) -> int | None:
    """Return where a series lies in one piece, if it does: in the file of its keyframe."""
    return None if series.is_multifile else series.dataoffset


def _find_end(tif: Any, series: Any) -> int:
    """Return the byte after the data of a series in its own file: an OME-TIFF may have pages in other files too."""
    if (start := find_whole(series)) is not None and series.keyframe.parent is tif:
        return int(start + series.nbytes)
    own = str(tif.filehandle.path)
    last = [page for page in series.pages if page is not None and str(page.parent.filehandle.path) == own][-1:]
    return max((o + c for page in last for o, c in zip(page.dataoffsets, page.databytecounts, strict=True)), default=0)


def _named_files(place: Path, tif: Any) -> list[Path]:
    """List the files that tifffile opens beside this one, all of them in its folder."""
    names: list[str] = []
    if tif.is_ome and tif.ome_metadata:
        found = ElementTree.fromstring(tif.ome_metadata).iter()  # tifffile asks for the end of a tag alone
        names += [name for uuid in found if uuid.tag.endswith("UUID") and (name := uuid.get("FileName"))]
    if tif.is_ndtiff:
        names += [row[1] for row in _ndtiff_rows(place)]
    if "_MMStack" in place.name:
        names += [file.name for file in place.parent.glob("*_MMStack*.tif")]
    return [named_file(place, name) for name in dict.fromkeys(names)]


def _ndtiff_rows(place: Path) -> list[Any]:
    from tifffile.tifffile import read_ndtiff_index

    index = place.with_name("NDTiff.index")
    check_plain(index)
    return list(read_ndtiff_index(index)) if index.exists() else []


def _count_planes(place: Path, tif: Any, smallest: int) -> int:
    """Count the planes for which tifffile makes lists, before it looks whether they are there."""
    told = 0
    for element in ElementTree.fromstring(tif.ome_metadata).iter() if tif.is_ome and tif.ome_metadata else ():
        if element.tag.endswith("Pixels"):
            sizes = [abs(int(element.get(f"Size{axis}", 1))) for axis in element.get("DimensionOrder", "")]
            counts = [int(data.get(key, 0)) for data in element for key in ("NumPlanes", "PlaneCount")]
            told += max([0, *counts]) + math.prod(sizes[2:]) + math.prod(sizes) // smallest
        elif element.tag[:-1].endswith("Along") and "Start" in element.attrib:
            start, end, step = (float(element.get(key, 1)) for key in ("Start", "End", "Step"))
            told += int(abs((end - start) / step))
    if tif.is_mmstack:
        found = tif.micromanager_metadata
        last = dict(zip(("Channels", "Slices", "Frames", "Positions"), found["IndexMap"][:, :4].max(0), strict=True))
        told += math.prod(max(int(found["Summary"].get(key, 1)), int(most) + 1) for key, most in last.items())
    if tif.is_ndtiff and (rows := [row[0] for row in _ndtiff_rows(place)]):
        for axis in rows[0]:
            values = [row[axis] for row in rows]
            numbers = range(len(set(map(str, values)))) if isinstance(values[0], str) else [int(v) for v in values]
            told = max(1, told) * (max(numbers) - min(numbers) + 1)
    return told


def check_chain(name: str, place: Path) -> int:
    """Follow the offsets from page to page to their end, and to the pages below each: the smallest, in pixels.

    Directories of tags lie beside each other and not over each other, so that all of them have no more bytes than the
    file; values may be shared by some pages.
    """
    with open_plain(place) as file:
        size = os.fstat(file.fileno()).st_size

        def number(at: int, form: str) -> int:
            length = struct.calcsize(form)
            data = os.pread(file.fileno(), length, at)
            if len(data) < length:
                raise BadData(
                    f"{name} is cut short: page {pages} should lie at byte {at}, but the file ends at {size}; "
                    "restore it"
                )
            return int(struct.unpack(form, data)[0])

        def check() -> None:
            if taken > size or told > _SHARED * size:
                raise BadData(
                    f"{name} has pages that lie over each other: the tags of the first {pages + 1} have "
                    f"{max(taken, told):,} bytes, the file has {size:,}; restore it"
                )

        pages, taken, told = 0, 0, 0  # bytes of directories, and of values
        start = os.pread(file.fileno(), 2, 0)
        if start not in (b"II", b"MM", b"EP"):
            return 1  # no TIFF, which tifffile says
        order = ">" if start == b"MM" else "<"
        big = (version := number(2, order + "H")) == 43
        # As tifffile tells it: a classic TIFF, but for its offsets of 64 bits, of which those of values end elsewhere.
        ndpi = order == "<" and version == 42 and place.resolve().suffix.lower() == ".ndpi"
        count, offset = (order + "Q", order + "Q") if big else (order + "H", order + ("Q" if ndpi else "I"))
        wide = order + ("u8" if big else "u4")
        entry = np.dtype([("tag", order + "u2"), ("type", order + "u2"), ("count", wide), ("value", wide)])
        chains = [8 if big else 4]  # places of the offsets that begin them
        seen: set[int] = set()
        pixels: list[int] = []
        while chains:
            place_of_next, is_first = chains.pop(), not seen
            while at := number(place_of_next, offset):
                if at in seen:
                    raise BadData(
                        f"{name} has a chain of pages without an end: page {pages} is one before it; restore it"
                    )
                seen.add(at)
                first, tags = at + struct.calcsize(count), number(at, count)
                place_of_next = first + entry.itemsize * tags
                if place_of_next > size:
                    number(place_of_next, offset)  # says so
                taken += place_of_next + struct.calcsize(offset) - at
                check()
                table = np.frombuffer(os.pread(file.fileno(), entry.itemsize * tags, first), entry)
                below, length = _subchains(name, table, first, size)
                taken, told = taken + sum(each.step * len(each) for each in below if len(each) > 1), told + length
                check()
                chains += [] if ndpi else itertools.chain.from_iterable(below)
                pages += 1
                pixels += [_count_pixels(table, order)] if is_first else []
        return 1 if ndpi else max(1, min(pixels, default=1))


def _count_pixels(table: np.ndarray, order: str) -> int:
    """Compute width times height of a page from its tags."""
    form: Literal["little", "big"] = "little" if order == "<" else "big"
    sides = {256: [0], 257: [0]}
    for tag, kind, _, value in table.tolist():
        if tag in sides:
            data = value.to_bytes(table.dtype["value"].itemsize, form)[: _SIZES.get(kind, 1)]
            sides[tag].append(int.from_bytes(data, form))
    return math.prod(min(found[1:], default=0) for found in sides.values())


def _subchains(name: str, table: np.ndarray, first: int, size: int) -> tuple[list[range], int]:
    """Find where offsets of the pages below a page lie, and the bytes of its tags; refuse impossible sizes."""
    below, told = [], 0
    width = table.dtype["value"].itemsize
    for number, (tag, kind, count, value) in enumerate(table.tolist()):
        length = count * _SIZES.get(kind, 1)
        told += length
        if length > size:
            raise BadData(
                f"{name} says that tag {tag} has {count:,} values, but the file has {size:,} bytes; restore it"
            )
        if tag == _SUBIFDS:
            step = _SIZES.get(kind, 1)
            start = value if length > width else first + number * table.itemsize + 4 + width
            if step == width:  # others are rare, and tifffile reads them
                below.append(range(start, start + length, step))
    return below, told
