"""Samples as files: images as PNG, volumes as OME-Zarr, anything as TIFF or NPY.

- whole numbers are rounded and kept in the range of their type; floats stay floats, in 32 bits
- a file is there whole or not at all, so what is there need not be made again
- the same values give the same bytes: no file holds a time or a random name
"""

import io
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.ngff_write import write_ome_zarr
from vitrail.disk import write_whole
from vitrail.errors import UserError
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
    """What `write_sample` has written, [C, *axes]."""
    if kind.format == "ome-zarr":
        import zarr

        return np.asarray(zarr.open_group(str(path), mode="r")["s0"])[None]
    if kind.format == "npy":
        found = np.load(path, allow_pickle=False)
    elif kind.format == "tiff":
        found = _read_tiff(path, kind)
    else:
        from PIL import Image

        with Image.open(path) as image:
            found = np.asarray(image)
    channels = len(kind.variables)
    if kind.format == "png" and channels == 3:
        found = np.moveaxis(found, -1, 0)
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


def _read_tiff(path: Path, kind: Kind) -> np.ndarray:
    """[C, *axes], with axes of length 1, which are left out where nobody asks for them."""
    import tifffile

    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        names, found = series.get_axes(squeeze=False), series.asarray(squeeze=False)
    channel = "S" if _is_colour(len(kind.variables), kind) else "C"
    wanted = [names.index(letter) for letter in (channel, *_letters(kind))]
    others = [axis for axis in range(found.ndim) if axis not in wanted]
    return np.squeeze(found.transpose(*others, *wanted), tuple(range(len(others))))


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
