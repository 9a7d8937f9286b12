"""What arrays of zarr and N5 hierarchies tell of themselves.

- an array's own metadata tell axes and places: `transform` (C order), `pixelResolution` and its kin (x, y, z in N5),
  names of dimensions as xarray and zarr 3 keep them. NGFF metadata are in formats/ngff.py
- whether a flipped bit would be noticed: checksums that are compared on reading are those of compressed streams (gzip,
  zlib, bz2, PNG, zip), of HDF5 (fletcher32), of zarr (crc32c) and of zstd frames, where the first chunk has one
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.chunks.decoded import ChunkReader
from vitrail.data.files.places import Place, find_folders, read_facts, read_object
from vitrail.data.formats.ngff import load_attributes
from vitrail.data.source import Source
from vitrail.data.stored import Stored, plain_unit
from vitrail.errors import UserError

KNOWN_AXES = {"time": "t", "channel": "c", "channels": "c"}


def attributes_of(place: Place) -> tuple[str, dict[str, Any]] | None:
    """Return ("group" or "array", attributes) of a node of zarr or N5, or None where there is none."""
    found = load_attributes(place)
    if found is not None or not (place / "attributes.json").is_file():
        return found
    try:
        document = read_object(place / "attributes.json")
    except OSError as error:
        raise UserError(
            f"{place / 'attributes.json'} is not valid JSON ({error}); restore or rewrite the file"
        ) from error
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
