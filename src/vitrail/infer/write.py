"""Samples as files: images as PNG, volumes as OME-Zarr, anything as TIFF or NPY.

- whole numbers are rounded and kept in the range of their type; floats stay floats, in 32 bits
- a file is there whole or not at all, so what is there need not be made again
- the same values give the same bytes: no file holds a time or a random name
- what is read back may be somebody else's: it names no other file, runs no program, and becomes no more than it has
"""

import io
import math
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail.data.formats import decoding
from vitrail.data.images import decode
from vitrail.data.ngff_write import write_ome_zarr
from vitrail.data.npy import read_header
from vitrail.data.sources.ome_zarr import OmeZarrConfig
from vitrail.data.stored import by
from vitrail.data.tiff_file import check_chain, check_frame
from vitrail.disk import write_whole
from vitrail.errors import BadData, UserError
from vitrail.foreign import open_plain
from vitrail.infer.kind import Kind

OME_UNITS = {  # of lengths, as OME-XML writes them; sizes in any other are left out, since readers would guess
    "angstrom": "Å",
    "picometer": "pm",
    "nanometer": "nm",
    "micrometer": "µm",
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "inch": "in",
}


def as_stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float values in the type of files: rounded and clipped where that holds whole numbers."""
    if not np.isfinite(values).all():
        raise UserError(
            "a sample is not finite, so the model or these settings are not sound; try an earlier checkpoint, less "
            "guidance or more steps"
        )
    if dtype.kind not in "iu":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    # In 64 bits, which hold the limits of 32-bit types exactly.
    return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(dtype)


def write_sample(path: Path, sample: np.ndarray, kind: Kind) -> Path:
    """Write [C, *axes] in the type and the format of its kind."""
    if kind.format == "ome-zarr":
        return write_ome_zarr(
            path,
            _Volume(sample[0]),
            spacing=kind.spacing,
            unit=kind.unit,
            levels=1,
            name=kind.variables[0],
        )
    encode = {"png": _png, "tiff": _tiff, "npy": _npy}[kind.format]
    return write_whole(path, encode(sample, kind, path.name), parents=True)


def read_sample(path: Path, kind: Kind) -> np.ndarray:
    """What `write_sample` has written, [C, *axes]; of somebody else's folder, too, so that nothing is believed."""
    channels = len(kind.variables)
    with decoding(str(path)):
        if kind.format == "ome-zarr":  # by the source, to which a chunk that is not there is a loss
            return OmeZarrConfig(path=str(path)).open().read(0, (slice(None),) * len(kind.axes))
        with open_plain(path) as file:
            if kind.format == "png":
                return decode(file, str(path), kind.dtype, [0, 1, 2] if channels == 3 else None)
            found = _read_npy(file, path, kind) if kind.format == "npy" else _read_tiff(file, path, kind)
        return found.reshape(channels, *found.shape[-len(kind.axes) :])


@dataclass(frozen=True)
class _Volume:
    """As the writer of OME-Zarr wants it."""

    image: np.ndarray
    labels: np.ndarray | None = None
    label_names: tuple[str, ...] = ()


def _is_colour(channels: int, kind: Kind) -> bool:
    return channels == 3 and len(kind.axes) == 2


def _png(sample: np.ndarray, kind: Kind, name: str) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    pixels = np.ascontiguousarray(np.moveaxis(sample, 0, -1) if len(sample) == 3 else sample[0])
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def _npy(sample: np.ndarray, kind: Kind, name: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, sample[0] if len(sample) == 1 else sample, allow_pickle=False)
    return stream.getvalue()


def _read_npy(file: BinaryIO, path: Path, kind: Kind) -> np.ndarray:
    header, size = read_header(file, str(path)), os.fstat(file.fileno()).st_size
    if header.dtype != kind.dtype or header.end != size:
        raise BadData(
            f"{path} says that it is {by(header.shape)} of {header.dtype}, {header.end:,} bytes, and it has {size:,}, "
            f"of {kind.dtype}; make it again with `vitrail sample`"
        )
    file.seek(0)
    return np.load(file, allow_pickle=False)


def _read_tiff(file: BinaryIO, path: Path, kind: Kind) -> np.ndarray:
    """[C, *axes] out of the pages, one after the other: the description may name other files, and is not asked."""
    import tifffile

    check_chain(str(path), path)
    left, pages = os.fstat(file.fileno()).st_size, []
    with tifffile.TiffFile(file) as tif:
        page: Any
        for page in tif.pages:
            check_frame(str(path), page)
            shape = (page.imagelength, page.imagewidth, page.samplesperpixel)
            left -= math.prod(shape) * page.dtype.itemsize
            if left < 0 or not page.is_contiguous:
                raise BadData(f"{path} does not hold its pixels as they are; make it again with `vitrail sample`")
            pages.append(page.asarray().reshape(shape))
    found = np.stack(pages)  # [N, y, x, S]
    if _is_colour(len(kind.variables), kind):
        return np.moveaxis(found, -1, 1)[0]
    return found.reshape(len(kind.variables), *(-1,) * (len(kind.axes) - 2), *found.shape[1:3])


def _letters(kind: Kind) -> str:
    """Axes as readers of TIFF know them, whatever the data call them."""
    return "ZYX"[-len(kind.axes) :]


def _tiff(sample: np.ndarray, kind: Kind, name: str) -> bytes:
    """OME-TIFF: voxel sizes, names of channels, and every type."""
    import tifffile

    letters, unit = _letters(kind), OME_UNITS.get(kind.unit or "")
    # A file's random number would make equal samples differ.
    metadata: dict[str, Any] = {"UUID": str(uuid.uuid5(uuid.NAMESPACE_URL, name))}
    if unit is not None:
        for letter, size in zip(letters, kind.spacing, strict=True):
            metadata |= {f"PhysicalSize{letter}": size, f"PhysicalSize{letter}Unit": unit}
    colour = _is_colour(len(sample), kind)
    if len(sample) == 1:
        pixels, axes = sample[0], letters
    elif colour:
        pixels, axes = np.moveaxis(sample, 0, -1), letters + "S"
    else:
        pixels, axes = sample, "C" + letters
        metadata["Channel"] = {"Name": list(kind.variables)}
    stream = io.BytesIO()
    tifffile.imwrite(
        stream,
        np.ascontiguousarray(pixels),
        ome=True,
        photometric="rgb" if colour else "minisblack",
        metadata={"axes": axes, **metadata},
    )
    return stream.getvalue()
