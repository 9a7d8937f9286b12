"""Arrays of zarr and N5 hierarchies as stored arrays: decoded chunk by chunk, or by tensorstore where need be.

- an array's own metadata tell axes and places: `transform` (C order), `pixelResolution` and its kin (x, y, z in N5),
  names of dimensions as xarray and zarr 3 keep them. NGFF metadata are in formats/ngff.py
- whether a flipped bit would be noticed: checksums that are compared on reading are those of compressed streams (gzip,
  zlib, bz2, PNG, zip), of HDF5 (fletcher32), of zarr (crc32c) and of zstd frames, where the first chunk has one
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.chunks.decoded import REMEDY, ChunkReader, largest_file, open_chunks, parts, shared
from vitrail.data.chunks.layout import read_names
from vitrail.data.files.places import Place, Remote, as_folder, find_folders, is_longer, read_facts
from vitrail.data.formats.ngff import load_attributes
from vitrail.data.source import Source
from vitrail.data.stored import Stored, Window, plain_unit
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import check_plain, check_room
from vitrail.launch.world import find_world, share_of_cores

USUAL_AXES = {2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
KNOWN_AXES = {"time": "t", "channel": "c", "channels": "c"}
READ_ERRORS = (ValueError, NotImplementedError, OSError)  # what tensorstore raises for wrong or unreadable data


def open_array(place: Place, axes: Sequence[str] | None = None, *, fill: bool, **known: Any) -> Stored:
    """Open an array, with what is `known` of it already (spacing, unit, origin, channels, names)."""
    reader = open_chunks(place, fill=fill)
    if reader is not None:
        shape, chunk, dtype = reader.shape, reader.grid, reader.dtype

        def read(window: Window) -> np.ndarray:
            return shared.read(reader, window)
    else:
        store = _open_store(place, fill)
        shape, dtype = tuple(int(n) for n in store.shape), np.dtype(store.dtype.numpy_dtype)
        sizes = store.chunk_layout.read_chunk.shape or shape
        chunk = tuple(int(n or whole) for n, whole in zip(sizes, shape, strict=True))
        check = _chunk_checker(place, store, shape, dtype)

        def read(window: Window) -> np.ndarray:
            check(window)
            try:
                return np.asarray(store[window].read().result())
            except READ_ERRORS as error:
                raise _explain(place, str(error)) from error

    names = tuple(axes or USUAL_AXES.get(len(shape)) or [f"axis{i}" for i in range(len(shape))])
    if len(names) != len(shape):
        raise UserError(
            f"{place} has {len(shape)} dimensions but its metadata names {len(names)} axes; mend the metadata"
        )
    # Chunks are often larger than a small array.
    chunk = tuple(min(c, n) for c, n in zip(chunk, shape, strict=True))
    return Stored(str(place), shape, names, dtype, chunk, read, chunk_reader=reader, **known)


def lost_array(place: Place, axes: Sequence[str], problem: UserError, **known: Any) -> Stored:
    """Return a stand-in for a level that is not there: copies of pyramids are often partial, and others may be read."""

    def read(window: Window) -> np.ndarray:
        raise problem

    empty = (0,) * len(axes)
    return Stored(str(place), empty, tuple(axes), np.dtype(np.uint8), empty, read, **known)


def _open_store(place: Place, fill: bool) -> Any:
    import tensorstore

    if isinstance(place, Remote) and not place.uses_tensorstore:
        raise UserError(
            f"{place} has a codec that can be read from local folders, http(s), s3 and gs alone; copy it to one of them"
        )
    driver = "zarr3" if (place / "zarr.json").is_file() else "zarr" if (place / ".zarray").is_file() else "n5"
    if isinstance(place, Path):
        check_plain(place / "attributes.json")
    threads = share_of_cores(find_world())
    local = {"driver": "file", "path": f"{place.resolve()}/"}
    spec = {
        "driver": driver,
        "kvstore": as_folder(str(place)) if isinstance(place, Remote) else local,
        "fill_missing_data_reads": fill,
        "recheck_cached_data": "open",
        "context": {
            "cache_pool": {"total_bytes_limit": 64 * 2**20},
            # This process's share of the host, not all of it for every rank.
            "data_copy_concurrency": {"limit": threads},
            "file_io_concurrency": {"limit": max(4, threads)},
        },
    }
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
        return store.T if driver == "n5" else store  # in C order
    except READ_ERRORS as error:
        raise UserError(
            f"{place} cannot be opened as {driver.rstrip('3')} ({_first_line(error)}); restore or rewrite it"
        ) from error


def _chunk_checker(place: Place, store: Any, shape: Sequence[int], dtype: np.dtype) -> Callable[[Window], None]:
    """Return a call that refuses files that tensorstore would wait for, or that are too large for memory."""
    sizes = store.chunk_layout.write_chunk.shape or shape
    grid = tuple(int(n or whole) for n, whole in zip(sizes, shape, strict=True))
    size = math.prod(grid) * dtype.itemsize
    check_room(f"a chunk of {place}", size)
    name = read_names(place)
    asked: set[str] = set()  # of a server, once each

    def check(window: Window) -> None:
        if name is None or len(window) < len(grid):  # of an empty array nothing is read
            return
        for part in parts(grid, window):
            file = name(part.chunk)
            if isinstance(place, Path):
                check_file(f"{place}/{file}", size)
            elif file not in asked and is_longer(place.joinpath(*file.split("/")), largest_file(size)):
                raise BadData(f"{place}/{file} has more bytes than a chunk can need; {REMEDY}")
            asked.add(file)

    return check


def check_file(file: str, size: int) -> bool:
    """Return whether the file of a chunk of so many bytes is there; refuse one that is no plain file, or too large."""
    check_plain(file)
    if not os.path.exists(file):
        return False
    if os.path.getsize(file) > largest_file(size):
        raise BadData(f"{file} has {os.path.getsize(file):,} bytes, more than a chunk can need; {REMEDY}")
    return True


def _explain(place: Place, problem: str) -> BadData:
    if "is missing" in problem and "NOT_FOUND" in problem:
        lost = problem.partition("NOT_FOUND: ")[2].partition(" [")[0]
        return MissingData(
            f"{lost}: restore the file, leave it out with `region`, "
            "or set `missing: fill` if the writer left out chunks that hold only the fill value"
        )
    return BadData(f"{place} cannot be read ({_first_line(problem)}); {REMEDY}")


def _first_line(problem: object) -> str:
    return str(problem).partition(" [tensorstore_spec=")[0].splitlines()[0]


# ------------------------------------------------------------ what an array's own metadata tell


def attributes_of(place: Place) -> tuple[str, dict[str, Any]] | None:
    """Return ("group" or "array", attributes) of a node of zarr or N5, or None where there is none."""
    found = load_attributes(place)
    if found is not None or not (place / "attributes.json").is_file():
        return found
    try:
        document = read_facts(place / "attributes.json")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{place / 'attributes.json'} is not valid JSON ({error}); restore or rewrite the file"
        ) from error
    if not isinstance(document, dict):
        raise UserError(f"{place / 'attributes.json'} must hold a JSON object; restore or rewrite the file")
    return ("array" if "dimensions" in document else "group"), document


def told_axes(place: Place, attributes: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the axes in C order, where the metadata tell them."""
    transform = attributes.get("transform")
    names: Any = transform.get("axes") if isinstance(transform, dict) else None
    names = names or attributes.get("_ARRAY_DIMENSIONS")
    if names is None and isinstance(attributes.get("axes"), list) and "dimensions" in attributes:
        names = attributes["axes"][::-1]  # of N5: x first
    if names is None and (place / "zarr.json").is_file():
        names = read_facts(place / "zarr.json").get("dimension_names")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        return None
    return tuple(KNOWN_AXES.get(str(name).lower(), str(name)) for name in names)


def told_place(attributes: dict[str, Any], axes: Sequence[str], *, reversed_axes: bool) -> dict[str, Any]:
    """Return spacing, unit and origin as an array's own attributes tell them; nothing where they do not.

    Sizes beside an N5 array are in the order of its dimensions, x first; a `transform` is in C order everywhere.
    """
    space = [name for name in axes if name not in ("c", "t")]
    transform: Any = attributes.get("transform")
    shift: Any
    if isinstance(transform, dict) and _numbers(transform.get("scale"), axes, space):
        units = transform.get("units")
        unit = units[-1] if isinstance(units, list) and units else units
        shift = transform.get("translate")
        return _placed(axes, space, transform["scale"], unit, shift if _numbers(shift, axes, space) else None)
    size: Any = attributes.get("pixelResolution", attributes.get("resolution", attributes.get("voxel_size")))
    unit = attributes.get("units", attributes.get("unit"))
    if isinstance(size, dict):
        size, unit = size.get("dimensions"), size.get("unit", unit)
    unit = unit[0] if isinstance(unit, list) and unit else unit
    if not _numbers(size, axes, space):
        return {}
    shift = attributes.get("offset")
    factors: Any = attributes.get("downsamplingFactors")
    shift = shift if _numbers(shift, axes, space) else None
    if _numbers(factors, axes, space) and len(factors) == len(size):
        # The centre of a coarse voxel lies half of it less half a fine one from the centre of the first fine one.
        base = shift if shift is not None and len(shift) == len(size) else [0.0] * len(size)
        shift = [b + s * (f - 1) / 2 for b, s, f in zip(base, size, factors, strict=True)]
        size = [s * f for s, f in zip(size, factors, strict=True)]
    if reversed_axes:
        size, shift = size[::-1], None if shift is None else shift[::-1]
    return _placed(axes, space, size, unit, shift)


def shifted_origin(spacing: dict[str, float], factors: Any) -> dict[str, float]:
    """Return where the first voxel of a coarse level lies, of sizes factors (x first) times those of the finest."""
    names = list(spacing)
    if not _numbers(factors, names, names) or min(factors) <= 0:
        return dict.fromkeys(names, 0.0)
    return {n: spacing[n] * (1 - 1 / f) / 2 for n, f in zip(names, factors[::-1], strict=True)}


def _numbers(values: Any, axes: Sequence[str], space: Sequence[str]) -> bool:
    return (
        isinstance(values, list)
        and len(values) in (len(axes), len(space))
        and all(isinstance(v, int | float) and not isinstance(v, bool) and np.isfinite(v) for v in values)
    )


def _placed(
    axes: Sequence[str], space: Sequence[str], size: list[float], unit: Any, shift: list[float] | None
) -> dict[str, Any]:
    def named(values: list[float]) -> dict[str, float]:
        every = dict(zip(axes if len(values) == len(axes) else space, values, strict=True))
        return {name: float(every[name]) for name in space}

    if min(size) <= 0:
        return {}
    return {
        "spacing": named(size),
        "unit": plain_unit(unit),
        "origin": named(shift) if shift is not None else dict.fromkeys(space, 0.0),
    }


def list_arrays(group: Place, most: int = 50) -> list[Place]:
    """List the arrays of a hierarchy, without looking into them."""

    def judge(place: Place) -> bool | None:
        node = attributes_of(place)
        return True if node is not None and node[0] == "array" else None

    return find_folders(group, judge, depth=6, most=most)


CHECKED = ("crc32c", "fletcher32", "crc32", "adler32", "gzip", "zlib", "bz2", "bzip2")  # codecs of zarr and N5
FILES = {".png": "png", ".npz": "zip", ".gz": "gzip"}
NONE = "none: a flipped bit in these files would go unnoticed"


def checksums_of(source: Source) -> str:
    """Name the checksum of a source's values in a word, or say in a sentence that they have none."""
    try:
        return _find(source) or NONE
    except Exception:  # whatever a library says: nothing is known, and reading tells what is wrong
        return NONE


def _find(source: Source) -> str | None:
    rows = getattr(source, "shards", None)
    if rows:  # of latents
        return rows[0].checksum
    entries = getattr(source, "entries", ())
    arrays = [stored for entry in entries[:1] for stored in (*entry.images, entry.labels) if stored is not None]
    if not arrays:
        return FILES.get(Path(source.items[0].name).suffix.lower())
    found = [_of_array(stored) for stored in arrays]
    return None if None in found else ", ".join(dict.fromkeys(str(each) for each in found))


def _of_array(stored: Stored) -> str | None:
    if stored.chunk_reader is not None:
        return of_chunks(stored.chunk_reader)
    path, _, key = stored.name.partition("::")
    suffix = Path(path).suffix.lower()
    if suffix in (".tif", ".tiff"):
        import tifffile

        with tifffile.TiffFile(path) as file:
            return "deflate" if file.pages[0].compression in (8, 32946) else None
    if suffix in (".h5", ".hdf5", ".hdf", ".nc") and key:
        import h5py

        with h5py.File(path, "r", locking="best-effort") as opened:
            dataset = opened[key]
            return "fletcher32" if dataset.fletcher32 else "gzip" if dataset.compression == "gzip" else None
    return FILES.get(suffix)


def of_chunks(reader: ChunkReader) -> str | None:
    """Return the checksum that the chunks of an array carry, or None."""
    names = reader.layout.codecs
    if (checked := next((name for name in names if name in CHECKED), None)) is not None:
        return checked
    if names[-1:] != ("zstd",):
        return None
    data = reader.read_stored((0,) * len(reader.grid))
    start = data.find(b"\x28\xb5\x2f\xfd", 0, 64)  # of its frame, behind the header of a block in N5
    return "zstd" if start >= 0 and data[start + 4] & 4 else None
