"""Fields of netCDF files (classic and 4) and of xarray's Zarr stores: each field is a variable, each moment an item.

- the last two axes of a field are its grid; an axis of levels makes variables such as u@500, or the third axis of the
  grid (`vertical: axis`); every other axis (time, month, member) counts items
- values are read as stored and decoded after that: CF packing (scale_factor, add_offset) is undone, and what equals
  _FillValue, or the library's own mark of what was never written, is no data
- chunks of Zarr stores are read as the zarr source reads them, so that lost and broken ones are seen
- latitude stays as it is stored; `latitude: north_first` turns it where it begins in the south
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.credentials import reveal
from vitrail.data.chunks.decoded import check_file, parts
from vitrail.data.files.handles import Handles, decoding, file_mark, library
from vitrail.data.files.paths import base_name, file_type, is_url, join, local_copy
from vitrail.data.files.patterns import Match, find_matches, has_stars
from vitrail.data.formats.hdf5 import Words, check_chunks, check_dataset, check_whole, large_chunks, walk
from vitrail.data.formats.xarray import check_store, expected_size, open_checkers, open_known
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, plain_unit
from vitrail.data.sources.folders import list_items
from vitrail.data.stored import Filling, chunks_in
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_room, open_plain
from vitrail.recipe import config

SUFFIXES = (".nc", ".nc4", ".cdf", ".netcdf")
LEVELS = {
    "level", "lev", "levels", "plev", "pressure", "pressure_level", "isobaricinhpa", "hybrid", "height", "altitude",
    "depth", "z", "lev_p", "bottom_top", "model_level",
}  # fmt: skip
UNWRITTEN = 9.969209968386869e36
PACKING = {"scale_factor", "add_offset", "missing_value"}  # attributes that make floats of whole numbers
DECODED = {*PACKING, "_FillValue", "_Unsigned", "dtype"}
Place = tuple[int | slice, ...]  # one for each axis of a field; a number drops its axis
BYTES_A_NAME = 128
LATITUDES = {"latitude", "lat", "nav_lat", "rlat"}


@config
class NetcdfConfig(GridConfig):
    """A file, a folder of files of the same fields, or an xarray Zarr store."""

    kind: Literal["netcdf"] = "netcdf"
    vertical: Literal["variables", "axis"] = "variables"  # what an axis of levels becomes
    latitude: Literal["as_stored", "north_first"] = "as_stored"

    def open(self) -> GridSource:
        """Read the metadata; no field is read yet."""
        if self.labels is not None:
            raise UserError(
                f"labels = {self.labels!r} of {self.path}: netCDF fields have no labels; leave `labels` out"
            )
        if has_stars(self.path):
            places = find_matches(self.path)
        elif _is_store(self.path):
            places = [Match(base_name(self.path), self.path, ())]
        else:
            places = list_items(self.path, SUFFIXES)
        wanted: list[str] | None = None
        entries: list[Entry] = []
        for place in places:
            images, items, facts = self._fields(place.path)
            if wanted is None:
                wanted = self._expand(images)
            prefix = f"{place.name}/" if len(places) > 1 else ""
            entries += [Entry(f"{prefix}{name}", images, moment=n, facts=facts) for n, name in enumerate(items)]
        return GridSource(replace(self, variables=wanted), entries, kind="netcdf")

    def _expand(self, images: Sequence[Stored]) -> list[str] | None:
        """Return the variables asked for; a field with levels stands for all of them."""
        if self.variables is None:
            return None
        fields = {s.name.rpartition("::")[2]: s.channels or () for s in images}
        return [name for given in self.variables for name in fields.get(given, (given,))]

    def _fields(self, path: str) -> tuple[tuple[Stored, ...], list[str], dict[str, Any]]:
        raw = _open(path)
        with decoding(path):
            dataset = _decode(raw)
            fields = {
                str(n): v
                for n, v in dataset.data_vars.items()
                if v.ndim >= 2 and v.dtype.kind in "biuf" and 0 not in v.shape
            }
            if self.variables is not None:
                asked = {name.partition("@")[0] for name in self.variables}
                fields = {n: v for n, v in fields.items() if n in asked} or fields
            if not fields:
                raise UserError(f"{path} holds no field with two axes or more; choose another file")
            first = max(fields.values(), key=lambda v: v.ndim)
            grid = first.dims[-2:]
            other = [n for n, v in fields.items() if v.dims[-2:] != grid]
            if other and self.variables is not None:
                raise UserError(
                    f"{path}: {other[0]} lies on {fields[other[0]].dims[-2:]}, other variables on {grid}; "
                    "give entries of their own to fields of different grids"
                )
            fields = {n: v for n, v in fields.items() if n not in other}
            if self.vertical == "axis":
                leveled = {n: v for n, v in fields.items() if _level_axis(v) is not None}
                if not leveled:
                    raise UserError(f"vertical = axis: no field of {path} has an axis of levels; leave `vertical` out")
                fields = leveled
            counted = _item_axes(first)
            for name, field in fields.items():
                if _item_axes(field) not in (counted, ()):
                    raise UserError(
                        f"{path}: {name} has the axes {field.dims}, which count other items than {counted}; choose "
                        "other `variables`"
                    )
            images = tuple(
                self._stored(f"{path}::{name}", raw.variables[name], field, counted) for name, field in fields.items()
            )
            return images, _names(path, first, counted), _facts(dataset, fields, grid, other)

    def _stored(self, name: str, raw: Any, field: Any, counted: tuple[str, ...]) -> Stored:
        """Describe a field as [items, levels, *grid]; items of several axes are counted in their order."""
        level = _level_axis(field)
        grid = field.dims[-2:]
        path, _, short = name.rpartition("::")
        axes: tuple[str, ...] = grid
        channels: tuple[str, ...] = (short,)
        if level is not None and self.vertical == "axis":
            axes = (level, *grid)
        elif level is not None:
            axes = ("c", *grid)
            channels = tuple(f"{short}@{_show(value)}" for value in _coordinate(field, level))
        sizes = {**dict(zip(field.dims, field.shape, strict=True)), "c": len(channels)}
        own = _item_axes(field)  # none for fields that do not change, such as orography
        lengths = [sizes[n] for n in own]
        total = int(np.prod(lengths, dtype=np.int64))
        turned = self.latitude == "north_first" and {
            n for n in grid if n.lower() in LATITUDES and _south_first(field, n)
        }
        fetch, filling, nodata = _reader(name, raw, field, fill=self.missing == "fill")

        def read(window: Window) -> np.ndarray:
            parts = dict(zip(axes, window[1:] if own else window, strict=True))
            where: dict[str, Any] = {level or n if n == "c" else n: part for n, part in parts.items()}
            for n in turned or ():
                where[n] = slice(sizes[n] - where[n].stop, sizes[n] - where[n].start)
            moments = range(window[0].start, window[0].stop) if own else range(1)
            out = []
            with decoding(name):
                for moment in moments:
                    index = np.unravel_index(moment, lengths) if own else ()
                    place = {**dict(zip(own, map(int, index), strict=True)), **where}
                    values = fetch(tuple(place[n] for n in field.dims))
                    out.append(np.flip(values, tuple(axes.index(n) for n in turned)) if turned else values)
            return np.stack(out) if own else out[0]

        spacing, unit = _spacing(field, grid)
        shape = tuple(sizes[n] for n in axes)
        told = field.encoding.get("preferred_chunks") or {}
        chunk = tuple(1 if n in ("c", level) else min(told.get(n, sizes[n]), sizes[n]) for n in axes)
        return Stored(
            name,
            (total, *shape) if own else shape,
            ("t", *axes) if own else axes,
            np.dtype(field.dtype),
            (1, *chunk) if own else chunk,
            read,
            spacing,
            unit,
            channels=channels,
            filling=filling,
            nodata=nodata,
            files=tuple(join(path, str(n)) for n in (short, *field.coords)) if _is_store(path) else (),
        )


def _reader(name: str, raw: Any, field: Any, *, fill: bool) -> tuple[Callable[[Place], np.ndarray], Any, Any]:
    """Reads parts of a field, with what counts the chunks it lacks, and the value of what was never written."""
    xarray = library("xarray", "netcdf")
    # Of a field with two marks of no data, at every read.
    warnings.filterwarnings("ignore", category=xarray.SerializationWarning)
    path, _, short = name.rpartition("::")
    attributes, nodata = dict(raw.attrs), None
    if raw.dtype.kind in "iu" and attributes.get("_FillValue", 0) != attributes.get("_FillValue", 0):
        del attributes["_FillValue"]  # no whole number is NaN
    if "_FillValue" not in attributes:
        # The library's own mark of what was never written, which files need not name; bytes have none.
        nodata = UNWRITTEN if raw.dtype.kind == "f" else None
        if not _is_store(path) and raw.dtype.itemsize > 1:
            nodata = library("netCDF4", "netcdf").default_fillvals[np.dtype(raw.dtype).str[1:]]
        if nodata is not None and PACKING & set(attributes):  # it marks what is stored, not what that stands for
            attributes["_FillValue"], nodata = np.dtype(raw.dtype).type(nodata), None
        elif nodata is not None and raw.dtype.kind == "i" and field.dtype.kind == "u":  # decoded without sign
            nodata = np.array(nodata, raw.dtype).astype(field.dtype).item()
    array = open_known(path, short, fill=fill) if _is_store(path) else None
    looks = open_checkers(path, short) if _is_store(path) and array is None else []
    chunks = _Chunks.of(name, fill=fill) if array is None else None
    check = None if _is_store(path) else _chunk_checker(name, Path(raw.encoding["source"]))

    def read(place: Place) -> np.ndarray:
        window = _window(place)
        if array is not None:
            values = array.read(window)[tuple(0 if isinstance(p, int) else slice(None) for p in place)]
        else:
            if chunks is not None:
                chunks.check(place)
            if check is not None:
                check(window)
            for look in looks:
                for part in parts(look.grid, window):
                    look.decode(part.chunk)
            values = raw[place].to_numpy()
        if DECODED & set(attributes):
            dims = [n for n, p in zip(raw.dims, place, strict=True) if not isinstance(p, int)]
            variable = xarray.Variable(dims, values, attributes)
            values = xarray.conventions.decode_cf_variable(short, variable, decode_times=False).to_numpy()
        return values.astype(field.dtype, copy=False)

    return read, chunks if array is None else array.chunk_reader, nodata


def _window(place: Place) -> Window:
    return tuple(slice(p, p + 1) if isinstance(p, int) else p for p in place)


def _chunk_checker(name: str, place: Path) -> Callable[[Sequence[slice]], None] | None:
    """Return a check of packed chunks of netCDF 4, before its library reads them; None where none is needed."""
    with open_plain(place) as file:
        if expected_size(file) is not None:  # of classic netCDF, which packs nothing
            return None
    field, mark = name.rpartition("::")[2], file_mark(place)

    def find(file: Any) -> Any:
        return file[field if field in file else f"_nc4_non_coord_{field}"]

    def check(window: Sequence[slice]) -> None:
        with _hdf5_lock():
            check_chunks(name, find(_files(place, mark)), large, window)

    with _hdf5_lock(), _open_hdf5(place) as file:
        check_dataset(name, find(file))
        large = large_chunks(find(file))
    return check if large else None


def _open_hdf5(place: Path, mark: object = None) -> Any:
    """Open a file with h5py; its mark tells `Handles` of another file at the same place."""
    return library("h5py", "netcdf").File(place, "r", locking="best-effort")


def _hdf5_lock() -> Any:
    """Return the lock of netCDF's reads: h5py, which has its own, may be built on the same library."""
    return library("xarray.backends.locks", "netcdf").HDF5_LOCK


_files: Handles[Any] = Handles(_open_hdf5, per_thread=False)


class _Chunks(Filling):
    """The chunks of a local Zarr store; of one that is not there its library reads the fill value, without a word."""

    def __init__(self, name: str, array: Any, *, fill: bool) -> None:
        super().__init__(allowed=fill)
        self.name = name
        self.sizes, self.key = array.shards or array.chunks, array.metadata.encode_chunk_key
        self.bytes = math.prod(self.sizes) * array.dtype.itemsize

    @classmethod
    def of(cls, name: str, *, fill: bool) -> "_Chunks | None":
        path, _, field = name.rpartition("::")
        if is_url(path) or not _is_store(path):
            return None
        import zarr

        return cls(name, zarr.open_array(join(path, field), mode="r"), fill=fill)

    def check(self, place: Place) -> None:
        for number in chunks_in(_window(place), self.sizes):
            file = join(self.name.replace("::", "/"), self.key(number))
            if not check_file(file, self.bytes):
                self.add(
                    f"{self.name}: the chunk {list(number)} is missing ({file}); restore the file, or set "
                    "`missing: fill` if the writer left out chunks that hold only the fill value"
                )


def _open(path: str) -> Any:
    """Open the dataset as it is stored, nothing decoded."""
    xarray = library("xarray", "netcdf")
    store = _is_store(path)
    if not store:
        library("netCDF4", "netcdf")
    with decoding(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that do not conform: values are right all the same
        if store:
            check_store(path)
            return xarray.open_zarr(reveal(path) if is_url(path) else path, chunks=None, decode_cf=False)
        place = local_copy(path).absolute()
        with open_plain(place) as file:
            needed = expected_size(file)
        if needed is None:
            _check_hdf5(place)
        if needed is not None and place.stat().st_size < needed:
            raise BadData(f"{path} is cut short: {place.stat().st_size} of {needed} bytes; restore the file")
        return xarray.open_dataset(place, engine="netcdf4", cache=False, decode_cf=False)


def _check_hdf5(place: Path) -> None:
    """Refuse links and values in other files, which the library would follow by itself, and coordinates like bombs."""
    h5py = library("h5py", "netcdf")
    with _hdf5_lock(), _open_hdf5(place) as file:
        check_whole(file, place)
        words = Words(place)
        words.check_attributes(str(place), file)
        for name, node in walk(file):
            if isinstance(node, h5py.Group | h5py.Dataset):
                words.check_attributes(f"{place}::{name}", node)
            # Coordinates have one axis, or are words of letters; they are read as a whole when the file is opened.
            # Fields are looked at when they are chosen.
            if "/" in name or not isinstance(node, h5py.Dataset) or (node.ndim > 1 and node.dtype.kind in "biuf"):
                continue
            check_dataset(f"{place}::{name}", node)
            check_room(f"{place}::{name}", node.size * node.dtype.itemsize)
            check_chunks(f"{place}::{name}", node, large_chunks(node))
            if node.ndim <= 1 and node.shape is not None:
                words.check_dataset(f"{place}::{name}", node)


def _decode(raw: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return library("xarray", "netcdf").decode_cf(raw, decode_times=False)


def _is_store(path: str) -> bool:
    """Tell whether a path is a Zarr store, by its name or by what is there."""
    if path.rstrip("/").lower().endswith(".zarr"):
        return True
    return not is_url(path) and any(
        file_type(f"{path}/{name}") == "file" for name in (".zgroup", ".zmetadata", "zarr.json")
    )


def _level_axis(field: Any) -> str | None:
    return next((str(n) for n in field.dims[:-2] if str(n).lower() in LEVELS), None)


def _item_axes(field: Any) -> tuple[str, ...]:
    return tuple(str(n) for n in field.dims[:-2] if n != _level_axis(field))


def _coordinate(field: Any, name: str) -> np.ndarray:
    # Not of several axes, which nobody has looked at.
    return field[name].to_numpy() if name in field.indexes else np.arange(field.sizes[name])


def _names(path: str, field: Any, counted: tuple[str, ...]) -> list[str]:
    total = math.prod(field.sizes[n] for n in counted)
    check_room(f"{path}: the list of its {total:,} items", BYTES_A_NAME * total)
    values = [[f"{n}={_show(v)}" for v in _coordinate(field, n)] for n in counted]
    longest = sum(max(map(len, words), default=0) for words in values)
    check_room(f"{path}: the list of its {total:,} items", (BYTES_A_NAME + longest) * total)
    return [",".join(parts) or "fields" for parts in itertools.product(*values)]


def _show(value: Any) -> str:
    return f"{value:g}" if np.issubdtype(type(value), np.floating) else str(value)


def _south_first(field: Any, name: str) -> bool:
    values = _coordinate(field, name)
    return bool(len(values) > 1 and values[0] < values[-1])


def _spacing(field: Any, grid: Sequence[str]) -> tuple[dict[str, float], str | None]:
    """Return the steps of the coordinates, where they are even and in one unit."""
    spacing: dict[str, float] = {}
    units = set()
    for name in grid:
        values = _coordinate(field, name) if name in field.indexes else np.zeros(0)
        numbers = values.astype(np.float64) if values.ndim == 1 and values.dtype.kind in "iuf" else np.zeros(0)
        steps = np.abs(np.diff(numbers))
        if not len(steps) or not np.allclose(steps, steps[0], rtol=1e-2, atol=0) or steps[0] == 0:
            return {}, None
        spacing[name] = float(np.mean(steps))
        told = str(field[name].attrs.get("units", ""))
        units.add("degree" if told.startswith("degree") else plain_unit(told))
    return spacing, units.pop() if len(units) == 1 else None


def _facts(dataset: Any, fields: dict[str, Any], grid: Sequence[str], left_out: Sequence[str]) -> dict[str, Any]:
    first = next(iter(fields.values()))
    latitude = next((n for n in grid if n.lower() in LATITUDES), None)
    facts: dict[str, Any] = {
        "fields": {
            name: {key: str(f.attrs[key]) for key in ("long_name", "units") if key in f.attrs}
            for name, f in fields.items()
        },
        "dims": {str(n): int(size) for n, size in dataset.sizes.items()},
    }
    if latitude is not None and latitude in first.indexes:
        facts["latitude"] = "south first" if _south_first(first, latitude) else "north first"
    if left_out:
        facts["left_out"] = list(left_out)
    return facts
