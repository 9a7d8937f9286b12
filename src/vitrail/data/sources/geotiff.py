"""GeoTIFF and whatever else GDAL opens: bands are variables, CRS and transform are kept, nodata and alpha are masks.

- windows are read by blocks; each thread has a file handle of its own, as GDAL wants it; overviews are levels
- voxel size from the transform, its unit from the CRS; y counts southwards, so that labels are placed by their corner
"""

import math
import warnings
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from vitrail.data.bad import BadData
from vitrail.data.files import local_copy
from vitrail.data.formats import Handles, decoding, library, list_items, pair_labels
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, plain_unit
from vitrail.recipe import config

Files = Handles[Any]
SUFFIXES = (".tif", ".tiff", ".gtiff", ".jp2", ".vrt", ".img")


@config
class GeotiffConfig(GridConfig):
    """A scene, or a folder of scenes; labels are another file, or a folder with files of the same names."""

    kind: Literal["geotiff"] = "geotiff"

    def open(self) -> GridSource:
        """Read the metadata; no pixel is read yet."""
        items, files = list_items(self.path, SUFFIXES), open_files()
        pairs = {} if self.labels is None else pair_labels(items, self.labels, SUFFIXES)
        entries = []
        for name, path in items:
            image, facts = open_raster(path, files)
            labels = None
            if name in pairs:
                labels, other = open_raster(pairs[name], files)
                if None not in (facts["crs"], other["crs"]) and facts["crs"] != other["crs"]:
                    raise BadData(
                        f"labels {labels.name} are in {other['crs']}, the image {path} in {facts['crs']}; "
                        "reproject them onto the image"
                    )
                labels = replace(labels, valid=None)
            entries.append(Entry(name, (image,), labels, facts=facts))
        return GridSource(self, entries, kind="geotiff")


def open_files() -> Files:
    """Files that stay open as long as a source, for each thread its own."""
    rasterio = library("rasterio", "geotiff")
    # Labels often come without a place of their own, and are then taken to lie on the image.
    warnings.filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)

    def open_raster(place: str, level: int | None) -> Any:
        return rasterio.open(place) if level is None else rasterio.open(place, overview_level=level)

    return Handles(open_raster, per_thread=True)


def open_raster(path: str, files: Files) -> tuple[Stored, dict[str, Any]]:
    """The bands, with the overviews as levels; and CRS, transform and tags."""
    place = str(local_copy(path))
    with decoding(path):
        raster = files(place, None)
        alpha = [i for i, colour in enumerate(raster.colorinterp, 1) if colour.name == "alpha"]
        bands = [i for i in raster.indexes if i not in alpha]
        if not bands:
            raise BadData(f"{path} holds no band but alpha; restore or remove the file")
        types = {raster.dtypes[i - 1] for i in bands}
        masked = any("all_valid" not in [flag.name for flag in raster.mask_flag_enums[i - 1]] for i in bands)
        names = [raster.descriptions[i - 1] or _colour(raster, i) or f"band{i}" for i in bands]
        block, transform, crs = raster.block_shapes[0], raster.transform, raster.crs
        factors = raster.overviews(bands[0])
        facts = {
            "driver": raster.driver,
            "crs": None if crs is None else crs.to_string(),
            "transform": list(transform)[:6],
            "nodata": None if raster.nodata is None or math.isnan(raster.nodata) else raster.nodata,
            "bounds": list(raster.bounds),
            "masked": masked,
        }
        unit = None
        if crs is not None:
            unit = "degree" if crs.is_geographic else plain_unit(crs.linear_units)
        shapes = [(raster.height, raster.width)]
        for number in range(len(factors)):
            overview = files(place, number)
            shapes.append((overview.height, overview.width))
    a, b, c, d, e, f = transform[:6]
    spacing = {} if transform.is_identity else {"y": math.hypot(b, e), "x": math.hypot(a, d)}
    upright = b == d == 0 and a > 0 > e
    levels = []
    for number, (shape, factor) in enumerate(zip(shapes, [1, *factors], strict=True)):
        level = None if number == 0 else number - 1
        sizes = {n: s * factor for n, s in spacing.items()} if spacing else dict.fromkeys("yx", float(factor))
        origin = {"y": -f - e * factor / 2, "x": c + a * factor / 2} if upright else {}
        name = path if level is None else f"{path}, overview {level}"
        read, valid = _reader(files, name, place, level, bands, np.result_type(*types)), None
        if masked:
            valid = _reader(files, name, place, level, bands, None)
        stored = Stored(
            name,
            (len(bands), *shape),
            ("c", "y", "x"),
            np.result_type(*types),
            (len(bands), min(block[0], shape[0]), min(block[1], shape[1])),
            read,
            sizes if spacing or factors else {},
            unit,
            origin,
            tuple(names),
            valid=valid,
        )
        levels.append(stored)
    return replace(levels[0], levels=tuple(levels[1:])), facts


def _reader(files: Files, name: str, place: str, level: int | None, bands: list[int], dtype: np.dtype | None) -> Any:
    """Reads windows of the bands, or of where they are valid if there is no type."""

    def read(window: Window) -> np.ndarray:
        channels, rows, columns = window
        wanted = bands[channels]
        part = ((rows.start, rows.stop), (columns.start, columns.stop))
        with decoding(name):
            raster = files(place, level)
            if max(rows.stop, 0) > raster.height or columns.stop > raster.width:
                raise BadData(f"{name} is {raster.height} x {raster.width} now, smaller than when it was opened")
            if dtype is None:
                return raster.read_masks(wanted, window=part) > 0
            return raster.read(wanted, window=part).astype(dtype, copy=False)

    return read


def _colour(raster: Any, band: int) -> str | None:
    name = raster.colorinterp[band - 1].name
    return name if name in ("red", "green", "blue") else None
