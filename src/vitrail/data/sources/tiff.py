"""TIFF stacks and pyramids: plain, OME-TIFF, ImageJ hyperstacks and big TIFFs; files, folders and folders of z slices.

- of several images in a file one is chosen by `series`; flat ones that are all alike are slices of one volume
- axes, voxel size and channel names come from OME or ImageJ metadata; of plain files, pages are z, a same-named .json
  may hold {"spacing": [z, y, x]} as nnU-Net wants it, and resolution counts only in centimetres (inches are for print)
- labels: another file or folder, or what `image.tif` finds by itself, such as `label.tif`
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from vitrail.data.files.handles import Mapped, decoding, library
from vitrail.data.files.paths import base_name, file_type, join, local_copy, read_json
from vitrail.data.formats.tiff import check_chain, check_complete, find_whole, list_pages, read_pages
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, plain_unit
from vitrail.data.sources.folders import Case, CaseLayout, find_cases, is_layout, list_items, stem
from vitrail.data.stored import Filling, unit_ratio
from vitrail.errors import BadData, UserError
from vitrail.recipe import config

SUFFIXES = (".tif", ".tiff", ".ome.tif", ".ome.tiff", ".btf", ".tf8", ".lsm", ".svs", ".ndpi")
LETTERS = {"X": "x", "Y": "y", "Z": "z", "C": "c", "S": "c", "T": "t"}


@config
class TiffConfig(GridConfig):
    """A file, a folder whose files are the items, or a folder whose files are the z slices of one volume."""

    kind: Literal["tiff"] = "tiff"
    slices_are: Literal["items", "z"] = "items"  # what the files of a folder are
    series: int | None = None  # which image of a file that holds several

    def open(self) -> GridSource:
        """Read the metadata; no voxel is read yet."""
        if self.slices_are == "z" and not is_layout(self.path):
            labels = None if self.labels is None else _unplaced(self._open_slices(self.labels))
            entries = [Entry(base_name(self.path), (self._open_slices(self.path),), labels)]
            return GridSource(self, entries, kind="tiff")
        return find_cases(self.path, self.labels, SUFFIXES, colours=True).made_by(self._open_cases)

    def _open_cases(self, layout: CaseLayout) -> GridSource:
        entries: list[Entry] = []
        for case in layout.cases:
            images = self._open_images(case, layout)
            if images[0].files and any(images[0].files == entry.images[0].files for entry in entries):
                continue  # another file of the same volume, each of which tells of all of them
            labels = None
            if case.labels is not None:
                labels = replace(_unplaced(self._open(case.labels)), names=layout.labels)
            entries.append(Entry(case.name, images, labels, facts=layout.facts))
        return GridSource(self, entries, kind="tiff", notes=layout.notes)

    def _open(self, path: str) -> Stored:
        return open_tiff(path, self.series, fill=self.missing == "fill")

    def _open_images(self, case: Case, layout: CaseLayout) -> tuple[Stored, ...]:
        """Open the files of a case, whose channels dataset.json may name."""
        images = [self._open(path) for path in case.images]
        wanted = 1 if layout.channels is None else len(layout.channels)
        if wanted > len(images) == 1 and images[0].num_channels == wanted:
            return (replace(images[0], channels=layout.channels),)
        if wanted > len(images):
            raise UserError(
                f"{case.images[0]} has {images[0].num_channels or 1} of the {wanted} channels that "
                f"{self.path}/dataset.json names; restore the files that are missing"
            )
        return layout.name_channels(images)

    def _open_slices(self, folder: str) -> Stored:
        """Open one volume of flat files of the same size."""
        slices = [self._open(path) for path in (each.path for each in list_items(folder, SUFFIXES))]
        first = slices[0]
        for stored in slices:
            if stored.shape != first.shape or stored.dtype != first.dtype or "z" in stored.axes:
                raise BadData(
                    f"{stored.name} is {stored.dtype} of shape {list(stored.shape)} ({', '.join(stored.axes)}), but "
                    f"{first.name} is {first.dtype} of {list(first.shape)}; slices must be flat and all alike"
                )
        return stack(folder, slices)


def stack(name: str, slices: Sequence[Stored]) -> Stored:
    """Make one volume of flat images that are alike."""
    first = slices[0]

    def read(window: Window) -> np.ndarray:
        parts = range(window[0].start, window[0].stop)
        return np.stack([slices[number].read(window[1:]) for number in parts])

    return replace(
        first,
        name=name,
        shape=(len(slices), *first.shape),
        axes=("z", *first.axes),
        chunk=(1, *first.chunk),
        read=read,
        levels=(),
        files=tuple(dict.fromkeys(file for stored in slices for file in stored.files)),
    )


def _unplaced(labels: Stored) -> Stored:
    """Return labels without a place: TIFF files tell none, so that they must have the shape of the image."""
    return replace(labels, origin={}, levels=tuple(replace(level, origin={}) for level in labels.levels))


def open_tiff(path: str, number: int | None, *, fill: bool) -> Stored:
    tifffile, filling = library("tifffile", "tiff"), Filling(allowed=fill)
    place = local_copy(path)
    with decoding(path):
        smallest = check_chain(path, place)  # before tifffile, which for some kinds of file reads all tags at once
    with decoding(path), tifffile.TiffFile(place) as tif:
        check_complete(path, place, tif, smallest)
        kind = tif.series[0].kind
        several = number is None and len(tif.series) > 1 and kind in ("generic", "uniform", "shaped", "ome")
        alike = len({(s.shape, s.axes, s.dtype) for s in tif.series}) == 1
        flat = several and alike and set(tif.series[0].axes) <= set("YXS") and kind != "ome"  # were written one by one
        if several and not flat:
            what = "several images" if alike else "images of different shapes or types"
            found = "; ".join(f"{i}: {list(s.shape)} {s.dtype}" for i, s in enumerate(tif.series))
            raise UserError(f"{path} holds {what} ({found}); choose one with `series`")
        if not 0 <= (number or 0) < len(tif.series):
            raise UserError(f"series = {number} does not exist in {path}; choose 0 to {len(tif.series) - 1}")
        series = tif.series[number or 0]
        axes = _axes(path, series)
        parts = tif.series if flat else series.levels
        levels = [
            _stored(path if flat or i == 0 else f"{path}, level {i}", part, axes, filling)
            for i, part in enumerate(parts)
        ]
        if any(0 in level.shape for level in levels):
            raise BadData(f"{path} is empty: its shape is {list(series.shape)}; restore or remove it")
        if flat:
            axes, levels = ("z", *axes), [stack(path, levels)]
        spacing, unit, channels = _metadata(path, tif, number or 0, axes)
    finest = dict(zip(axes, levels[0].shape, strict=True))
    placed = []
    for level in levels:
        # A level's size is its base's over the factor, rounded: the factor is the whole number nearest to their ratio.
        ratios = {n: finest[n] / size for n, size in zip(axes, level.shape, strict=True) if n in "zyx"}
        factors = {n: round(r) if abs(r - round(r)) < 0.02 * r else r for n, r in ratios.items()}
        sizes = {n: spacing.get(n, 1.0) * f for n, f in factors.items()}
        told = spacing or len(levels) > 1
        origin = {n: spacing.get(n, 1.0) * (f - 1) / 2 for n, f in factors.items()}
        files = level.files or (str(place),)
        sizes = sizes if told else {}
        placed.append(replace(level, spacing=sizes, unit=unit, origin=origin, channels=channels, files=files))
    return replace(placed[0], levels=tuple(placed[1:]))


def _stored(path: str, series: Any, axes: tuple[str, ...], filling: Filling) -> Stored:
    if (start := find_whole(series)) is not None:
        held = series.keyframe.parent  # its own file, or another of an OME-TIFF
        place, dtype = Path(held.filehandle.path), series.dtype.newbyteorder(held.byteorder)
        array = Mapped(path, place, dtype, start, series.shape)
        chunk = (1,) * len(axes)
        return Stored(
            path,
            series.shape,
            axes,
            series.dtype,
            chunk,
            lambda window: np.array(array()[window]),
            files=_others(series, {str(place)}),
        )
    pages = list_pages(path, series)
    frame = series.keyframe
    tall, wide = (frame.tilelength, frame.tilewidth) if frame.is_tiled else (frame.rowsperstrip, frame.imagewidth)
    sizes = {"y": min(tall, frame.imagelength), "x": min(wide, frame.imagewidth)}
    samples = frame.samplesperpixel if frame.planarconfig == 1 else 1
    chunk = tuple(sizes.get(name, samples if name == "c" and letter == "S" else 1)
                  for name, letter in zip(axes, series.axes, strict=True))  # fmt: skip

    def read(window: Window) -> np.ndarray:
        with decoding(path):
            return read_pages(path, series, pages, window, filling)

    return Stored(
        path,
        series.shape,
        axes,
        series.dtype,
        chunk,
        read,
        filling=filling,
        files=_others(series, {page.place for page in pages}),
    )


def _others(series: Any, places: set[str]) -> tuple[str, ...]:
    """List the files of a series, if it does not just lie in the file that was opened."""
    return () if places == {str(series.parent.filehandle.path)} else tuple(sorted(places))


def _axes(path: str, series: Any) -> tuple[str, ...]:
    """Name the axes by tifffile's letters; an unknown axis is z where there is none, as in a plain stack of pages."""
    names = [LETTERS.get(letter) for letter in series.axes]
    unknown = [i for i, name in enumerate(names) if name is None]
    if len(unknown) == 1 and "z" not in names:
        names[unknown[0]] = "z"
        unknown = []
    if unknown or len(set(names)) < len(names):
        # `axes` of the recipe can name them; until then each has a name of its own.
        return tuple(f"{letter.lower()}{i}" if letter not in "YX" else letter.lower()
                     for i, letter in enumerate(series.axes))  # fmt: skip
    return tuple(name for name in names if name is not None)


def _metadata(
    path: str, tif: Any, number: int, axes: tuple[str, ...]
) -> tuple[dict[str, float], str | None, tuple[str, ...] | None]:
    """Read voxel size, its unit and names of channels."""
    sidecar = _sidecar(path, axes)
    spacing: dict[str, float] = {}
    first = tif.pages[0]
    unit, channels = (
        None,
        ("red", "green", "blue", "alpha")[: first.samplesperpixel] if first.photometric == 2 else None,
    )
    if tif.is_ome and tif.ome_metadata:
        spacing, unit, channels = _ome(tif.ome_metadata, number, channels)
    elif tif.is_imagej and tif.imagej_metadata:
        told = tif.imagej_metadata
        unit = plain_unit(told.get("unit"))
        spacing = _resolution(first) if unit is not None else {}
        if isinstance(told.get("spacing"), int | float) and told["spacing"] > 0:
            spacing["z"] = float(told["spacing"])
    elif first.resolutionunit == 3:  # pixels a centimetre
        spacing, unit = _resolution(first), "centimeter"
    if sidecar:
        spacing, unit = sidecar, None
    return {n: s for n, s in spacing.items() if n in axes and s > 0}, unit if spacing else None, channels


def _resolution(page: Any) -> dict[str, float]:
    pixels = dict(zip("xy", page.get_resolution(1), strict=True))  # to a unit, as the tags say
    return {name: 1 / value for name, value in pixels.items() if value > 0}


def _ome(text: str, number: int, channels: Any) -> tuple[dict[str, float], str | None, Any]:
    images = ElementTree.fromstring(text).findall("{*}Image")
    pixels = images[min(number, len(images) - 1)].find("{*}Pixels") if images else None
    if pixels is None:
        return {}, None, channels
    sizes = {n: pixels.get(f"PhysicalSize{n.upper()}") for n in "xyz"}
    units = {n: plain_unit(pixels.get(f"PhysicalSize{n.upper()}Unit", "µm")) for n, size in sizes.items() if size}
    unit = next(iter(units.values()), None)
    ratios = {n: unit_ratio(other, unit) for n, other in units.items()}
    names = tuple(c.get("Name") or "" for c in pixels.findall("{*}Channel"))
    told = None not in ratios.values()
    spacing = {n: float(sizes[n] or 0) * (ratio or 0) for n, ratio in ratios.items()} if told else {}
    return spacing, unit if told else None, names if names and all(names) else channels


def _sidecar(path: str, axes: tuple[str, ...]) -> dict[str, float]:
    """Read the spacing of z, y, x from a .json beside the file, for one channel's file that of its case."""
    name = base_name(path)
    folder, case = path[: len(path) - len(name)], stem(name, SUFFIXES)
    for candidate in (case, re.sub(r"_\d{4}$", "", case)):
        place = join(folder, f"{candidate}.json") if folder else f"{candidate}.json"
        if path.endswith(name) and file_type(place) == "file":
            try:
                told = read_json(place).get("spacing")
                space = [n for n in axes if n in "zyx"]
                return {n: float(s) for n, s in zip(space, told, strict=True)}
            except (ValueError, TypeError, AttributeError):
                return {}
    return {}
