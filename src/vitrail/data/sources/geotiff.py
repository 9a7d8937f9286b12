"""GeoTIFF and other scenes by GDAL: bands are variables, CRS and transform are kept, nodata and alpha are masks.

- only drivers whose files hold their own pixels: others (VRT, WMS, ...) read what a file names, on disks and in
  networks; with `--trust` GDAL may use all that it has
- a block that was never written would read as zeros: unless nodata stands for it, `missing` decides; so would what is
  cut off a scene of ENVI, which is refused
- windows are read by blocks; each thread has a file handle of its own, as GDAL wants it; overviews are levels
- scale and offset of bands are applied, as float32
- voxel size from the transform, its unit from the CRS; y counts southwards, so that labels are placed by their corner
"""

import contextlib
import gzip
import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.files.handles import Handles, decoding, library
from vitrail.data.files.paths import local_copy
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, plain_unit
from vitrail.data.sources.folders import list_cases
from vitrail.data.stored import Filling, chunks_in
from vitrail.errors import BadData
from vitrail.foreign import BEST_PACKED, check_plain, check_room, is_trusting, named_file, open_plain
from vitrail.recipe import config

Files = Handles[Any]
SUFFIXES = (".tif", ".tiff", ".gtiff", ".jp2", ".vrt", ".img")
# First bytes of files, and the driver that opens them; without --trust no other is asked.
DRIVERS = {
    b"II*\0": "GTiff",
    b"MM\0*": "GTiff",
    b"II+\0": "GTiff",
    b"MM\0+": "GTiff",
    b"\0\0\0\x0cjP": "JP2OpenJPEG",
    b"\xff\x4f\xff\x51": "JP2OpenJPEG",
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
}
# What GDAL looks for beside a file, by the name of that file and by the name without its suffix.
# The first of them it opens by any driver, and what lies beside those, too. It opens .aux, which others write as well,
# where that is of HFA.
OPENED = (".ovr", ".msk")
BESIDE = (*OPENED, ".aux", ".aux.xml")
INSTEAD = (".aux", ".aux.xml", ".tfw", ".tifw", ".wld", ".hdr", ".tab", ".rpb", ".imd", ".rrd", ".sta", ".prj")


@config
class GeotiffConfig(GridConfig):
    """A scene, or a folder of scenes; labels are another file, or a folder with files of the same names."""

    kind: Literal["geotiff"] = "geotiff"

    def open(self) -> GridSource:
        """Read the metadata; no pixel is read yet."""
        files, fill = open_files(), self.missing == "fill"
        entries = []
        for case in list_cases(self.path, self.labels, SUFFIXES):
            image, facts = open_raster(case.images[0], files, fill=fill)
            labels = None
            if case.labels is not None:
                labels, other = open_raster(case.labels, files, fill=fill)
                if None not in (facts["crs"], other["crs"]) and facts["crs"] != other["crs"]:
                    raise BadData(
                        f"labels {labels.name} are in {other['crs']}, the image {image.name} in {facts['crs']}; "
                        "reproject them onto the image"
                    )
                labels = replace(labels, valid=None)
            entries.append(Entry(case.name, (image,), labels, facts=facts))
        return GridSource(self, entries, kind="geotiff")


def open_files() -> Files:
    """Return files that stay open as long as a source, for each thread its own."""
    rasterio = library("rasterio", "geotiff")
    # Labels often come without a place of their own, and are then taken to lie on the image.
    warnings.filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)

    trust = is_trusting()  # now: threads open files later

    def open_raster(place: str, level: int | None) -> Any:
        driver = None if trust else _driver(Path(place))
        with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="TRUE"):  # else names in any mixture of cases are looked for
            return rasterio.open(place, driver=driver, **({} if level is None else {"overview_level": level}))

    return Handles(open_raster, per_thread=True)


def _driver(place: Path) -> str:
    """Return the driver for a file that holds its own pixels."""
    with open_plain(place) as file:
        start = file.read(8)
    driver = next((name for magic, name in DRIVERS.items() if start.startswith(magic)), None)
    if driver is None and not start.lstrip().startswith(b"<"):
        headers = (place.with_suffix(".hdr"), place.with_name(f"{place.name}.hdr"))
        driver = next(("ENVI" for header in headers if header.is_file()), None)
    if driver is None:
        raise BadData(
            f"{place} cannot be read: it is no GeoTIFF, JPEG 2000, PNG, JPEG or ENVI file; restore it, or give --trust "
            "if it is of another kind that GDAL reads, which may read other files, and you know who made it"
        )
    return driver


def _check_beside(place: Path, files: Files) -> None:
    """Refuse what GDAL would wait for, or would open by a driver that reads what a file names."""
    beside = [Path(f"{place}{name}") for suffix in BESIDE for name in (suffix, suffix.upper())]
    beside += [place.with_suffix(name) for suffix in INSTEAD for name in (suffix, suffix.upper())]
    for file in beside:
        check_plain(file)
    for file in beside:
        kind = file.suffix.lower()
        if not file.exists() or is_trusting():
            continue
        if kind == ".aux" and _is_hfa(file):
            raise BadData(
                f"{file} holds statistics of ERDAS or ArcGIS, which may name other files; move it away, or give "
                "--trust if you know who made it"
            )
        if kind not in OPENED:
            continue
        if (driver := _driver(file)) != "GTiff":
            raise BadData(f"{file} is of {driver}, which lies beside no scene; remove it, or give --trust")
        _check_beside(file, files)
        raster = files(str(file), None)
        _check_named(str(file), file, raster)
        _check_block(str(file), raster)


def _is_hfa(file: Path) -> bool:
    with open_plain(file) as opened:
        return opened.read(15).upper() == b"EHFA_HEADER_TAG"  # in any mixture of cases, as GDAL does


def _check_named(path: str, place: Path, raster: Any) -> None:
    """Refuse overviews in other places: GDAL opens them by any driver, whatever opened the file itself."""
    if not is_trusting() and (elsewhere := _overview_file(raster)) is not None:
        raise BadData(
            f"{path} keeps its overviews in {elsewhere!r}; build them anew, or give --trust if you know who made it"
        )
    for file in raster.files:
        if not (Path(file).is_absolute() and named_file(place, file).exists()) and not is_trusting():
            # A name that GDAL alone understands, such as that of a page of another file.
            raise BadData(f"{path} reads {file!r}, which is no file; save it anew, or give --trust")


def _overview_file(raster: Any) -> str | None:
    """Return where a file says that its overviews lie: GDAL knows the word in any mixture of cases."""
    told: str | None = raster.get_tag_item("OVERVIEW_FILE", "OVERVIEWS")
    for name, value in raster.tags(ns="OVERVIEWS").items():
        if name.upper() == "OVERVIEW_FILE" or value.startswith("/vsi") or "://" in value:
            told = told or value
    return told or None


def _check_whole(path: str, place: Path, raster: Any) -> None:
    """Refuse a scene of ENVI that is cut short: GDAL gives zeros for what is not there."""
    if raster.driver != "ENVI":
        return
    told = raster.tags(ns="ENVI")
    offset, packed = (re.match(r"\d+", told.get(key, "")) for key in ("header_offset", "file_compression"))
    pixels = raster.height * raster.width * sum(np.dtype(kind).itemsize for kind in raster.dtypes)
    wanted = int(offset[0] if offset else 0) + pixels
    found = size = place.stat().st_size
    if packed and int(packed[0]) and wanted <= BEST_PACKED * size:  # by gzip, which does not tell how much it holds
        found = 0
        with open_plain(place) as file, gzip.GzipFile(fileobj=file) as unpacked, contextlib.suppress(EOFError):
            while found < wanted and (piece := unpacked.read(min(1 << 20, wanted - found))):
                found += len(piece)
    if found < wanted:
        raise BadData(
            f"{path} is cut short: its header tells of {wanted:,} bytes, and there are {found:,}; restore the file"
        )


def _check_block(name: str, raster: Any) -> None:
    """Refuse blocks that do not fit into memory; bands side by side in a pixel are decoded together."""
    size = sum(np.dtype(kind).itemsize for kind in raster.dtypes)
    check_room(f"a block of {name}", size * max(math.prod(block) for block in raster.block_shapes))


def open_raster(path: str, files: Files, *, fill: bool) -> tuple[Stored, dict[str, Any]]:
    """Open the bands, with the overviews as levels; return them with CRS, transform and tags."""
    here = local_copy(path).absolute()
    if ".." in here.parts:  # which names of files beside it must not have
        here = here.parent.resolve() / here.name
    place = str(here)
    with decoding(path):
        _check_beside(here, files)
        raster = files(place, None)
        _check_named(path, here, raster)
        _check_whole(path, here, raster)
        alpha = [i for i, colour in enumerate(raster.colorinterp, 1) if colour.name == "alpha"]
        bands = [i for i in raster.indexes if i not in alpha]
        if not bands:
            raise BadData(f"{path} holds no band but alpha; restore or remove the file")
        types = {raster.dtypes[i - 1] for i in bands}
        if odd := sorted(kind for kind in types if kind.startswith("complex")):
            raise BadData(f"{path} has the type {odd[0]}; save its parts or magnitude as bands of floats")
        stored_dtype = np.result_type(*types)
        scaling = np.array([[raster.scales[i - 1], raster.offsets[i - 1]] for i in bands])  # [C, 2]
        scaled = bool((scaling != [1.0, 0.0]).any())
        dtype = np.result_type(stored_dtype, np.float32) if scaled else stored_dtype
        masked = any("all_valid" not in [flag.name for flag in raster.mask_flag_enums[i - 1]] for i in bands)
        colours = [c.name if c.name in ("red", "green", "blue") else None for c in raster.colorinterp]
        names = [raster.descriptions[i - 1] or colours[i - 1] or f"band{i}" for i in bands]
        block, transform, crs = raster.block_shapes[0], raster.transform, raster.crs
        _check_block(path, raster)
        factors, beside = raster.overviews(bands[0]), tuple(raster.files)  # masks, headers and others
        # GDAL gives the mark of no data for blocks that were never written, or else zeros.
        sparse = raster.driver == "GTiff" and raster.nodata is None
        facts = {
            "driver": raster.driver,
            "crs": None if crs is None else crs.to_string(),
            "transform": list(transform)[:6],
            "nodata": None if raster.nodata is None or math.isnan(raster.nodata) else raster.nodata,
            "bounds": list(raster.bounds),
            "masked": masked,
            **({"scales": scaling[:, 0].tolist(), "offsets": scaling[:, 1].tolist()} if scaled else {}),
        }
        unit = None
        if crs is not None:
            unit = "degree" if crs.is_geographic else plain_unit(crs.linear_units)
        shapes = [(raster.height, raster.width)]
        for number in range(len(factors)):
            overview = files(place, number)
            _check_block(f"{path}, overview {number}", overview)
            shapes.append((overview.height, overview.width))
    a, b, c, d, e, f = transform[:6]
    spacing = {} if transform.is_identity else {"y": math.hypot(b, e), "x": math.hypot(a, d)}
    upright = b == d == 0 and a > 0 > e
    levels = []
    filling = Filling(allowed=fill)
    for number, (shape, factor) in enumerate(zip(shapes, [1, *factors], strict=True)):
        level = None if number == 0 else number - 1
        sizes = {n: s * factor for n, s in spacing.items()} if spacing else dict.fromkeys("yx", float(factor))
        origin = {"y": -f - e * factor / 2, "x": c + a * factor / 2} if upright else {}
        name = path if level is None else f"{path}, overview {level}"
        stored_level = _Level(files, name, place, level, bands, stored_dtype)

        def read(window: Window, level: _Level = stored_level) -> np.ndarray:
            if sparse:
                level.check_written(window, filling)
            values = level.read(window)
            if scaled:  # the numbers stand for values: times the band's scale, plus its offset
                scale, offset = scaling[window[0], :, None, None].swapaxes(0, 1)  # [C, 1, 1] each
                values = (values * scale + offset).astype(dtype)
            return values

        stored = Stored(
            name,
            (len(bands), *shape),
            ("c", "y", "x"),
            dtype,
            (len(bands), min(block[0], shape[0]), min(block[1], shape[1])),
            read,
            sizes if spacing or factors else {},
            unit,
            origin,
            tuple(names),
            valid=stored_level.is_valid if masked else None,
            filling=filling,
            files=beside,
        )
        levels.append(stored)
    return replace(levels[0], levels=tuple(levels[1:])), facts


@dataclass(frozen=True)
class _Level:
    """One resolution of a scene, of which windows are read."""

    files: Files
    name: str
    place: str
    number: int | None  # of the overview
    bands: list[int]
    dtype: np.dtype  # as stored

    def read(self, window: Window) -> np.ndarray:
        return self._read(window, lambda raster, **part: raster.read(**part).astype(self.dtype, copy=False))

    def is_valid(self, window: Window) -> np.ndarray:
        return self._read(window, lambda raster, **part: raster.read_masks(**part) > 0)

    def _read(self, window: Window, read: Callable[..., np.ndarray]) -> np.ndarray:
        channels, rows, columns = window
        with decoding(self.name):
            raster = self.files(self.place, self.number)
            if max(rows.stop, 0) > raster.height or columns.stop > raster.width:
                raise BadData(f"{self.name} is {raster.height} x {raster.width} now, smaller than when it was opened")
            part = ((rows.start, rows.stop), (columns.start, columns.stop))
            return read(raster, indexes=self.bands[channels], window=part)

    def check_written(self, window: Window, filling: Filling) -> None:
        """Refuse or count blocks that were never written."""
        channels, rows, columns = window
        raster = self.files(self.place, self.number)
        tall, wide = raster.block_shapes[0]
        # Bands side by side in a pixel lie in one block.
        together = raster.interleaving is not None and raster.interleaving.name == "pixel"
        wanted = self.bands[channels][:1] if together else self.bands[channels]
        for band, (row, column) in itertools.product(wanted, chunks_in((rows, columns), (tall, wide))):
            with decoding(self.name):
                lost = raster.get_tag_item(f"BLOCK_OFFSET_{column}_{row}", "TIFF", bidx=band) is None
            if lost:
                filling.add(
                    f"{self.name}: the block at y = {row * tall}, x = {column * wide} of band {band} was never "
                    "written; restore the file, or set `missing: fill` if its writer left out what is empty"
                )
