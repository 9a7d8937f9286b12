"""Predictions as files of one piece: NIfTI, TIFF, NumPy and PNG, out of memory or of a store of chunks.

A file is laid out first, and then filled box by box in any order, each of at most LARGEST_PIECE bytes and made of whole
chunks: a plane may be larger than the memory. What is packed as one stream (.nii.gz) is written in its order, and for
that chunks of large planes are decoded several times. A PNG is made in memory.
"""

import gzip
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, BinaryIO
from xml.sax.saxutils import escape

import numpy as np

from vitrail.data.stored import unit_ratio
from vitrail.infer.eyes import Form
from vitrail.infer.folder import ome_metadata
from vitrail.infer.places import Frame, Map

NIFTI_UNITS = {"meter": ("meter", 1.0), "millimeter": ("mm", 1.0), "micrometer": ("micron", 1.0)}
NIFTI_OTHERS = {"nanometer": 1e-3, "angstrom": 1e-4, "picometer": 1e-6}  # written in micrometers
LARGEST_NIFTI = 32767  # voxels along an axis, of the first version
LARGEST_PIECE = 2**28  # bytes that are taken from a store at once
STRIP = 2**20  # bytes of a strip of TIFF
GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)  # scale, tie points, transformation; keys, and their values
GDAL_METADATA = 42112
Tick = Callable[[], None]  # is called whenever work gets on


@dataclass(frozen=True)
class Filling:
    """The values [*S] or [C, *S] of a file, and how they are taken out of what holds them."""

    values: Any  # in memory, or a store of chunks
    form: Form
    frame: Frame
    chunk: int | None  # cells on each side of a chunk; None: in memory
    tick: Tick

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.values.shape)

    @property
    def channels(self) -> int | None:
        return None if self.form.channels is None else len(self.form.channels)

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.form.dtype.itemsize

    def pieces(self, *, in_order: bool = False) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield boxes of all axes and their values, in any order or in that of the bytes of a file."""
        space = self.shape[-len(self.frame.axes) :]
        # Chunks of features hold all of their channels, and are decoded once where the order of the file allows it.
        deep = 1 if in_order or self.channels is None or self.form.write != "embeddings" else self.channels
        sides = self._planes(space) if in_order else self._chunks(space, deep)
        for channel in (
            [()] if self.channels is None else [(slice(n, n + deep),) for n in range(0, self.channels, deep)]
        ):
            for start in product(*(range(0, n, side) for n, side in zip(space, sides, strict=True))):
                box = tuple(slice(s, min(s + side, n)) for s, side, n in zip(start, sides, space, strict=True))
                yield (*channel, *box), np.ascontiguousarray(self.values[(*channel, *box)])
                self.tick()

    def _chunks(self, space: Sequence[int], deep: int) -> list[int]:
        """Return the sides of a box of whole chunks of some channels: one along the first axis, else what fits."""
        if self.chunk is None:
            return list(space)
        sides = [min(self.chunk, n) for n in space]
        for axis in range(len(space) - 1, 0, -1):
            room = LARGEST_PIECE // (math.prod(sides) * deep * self.form.dtype.itemsize)
            sides[axis] = min(space[axis], self.chunk * max(1, room))
            if sides[axis] < space[axis]:
                break
        return sides

    def _planes(self, space: Sequence[int]) -> list[int]:
        """Return the sides of what lies together in a file: planes, or rows of one where it is too large."""
        sides, room = [1] * len(space), max(1, LARGEST_PIECE // self.form.dtype.itemsize)
        for axis in range(len(space) - 1, -1, -1):
            sides[axis] = max(1, min(space[axis], room))
            room //= space[axis]
            if sides[axis] < space[axis]:
                break
        if self.chunk is not None:
            sides[0] = min(sides[0], self.chunk)
        return sides

    def put_into(self, file: BinaryIO, offset: int, dtype: np.dtype | None = None) -> None:
        """Write all values to their places in a file, of which the first is at an offset."""
        for box, part in self.pieces():
            part = part.astype(dtype or self.form.dtype, copy=False)
            lengths, axis = self.shape, len(self.shape)
            while axis and part.shape[axis - 1] == lengths[axis - 1]:  # axes of which all is there lie together
                axis -= 1
            outer = max(0, axis - 1)
            for at in np.ndindex(part.shape[:outer]):
                first = [b.start + i for b, i in zip(box, at, strict=False)] + [b.start for b in box[outer:]]
                file.seek(offset + int(np.ravel_multi_index(first, lengths)) * part.itemsize)
                file.write(part[at].data if part[at].size else b"")


def write_file(file: BinaryIO, format: str, suffix: str, name: str, filling: Filling) -> None:
    """Write one file of a format; `name` is that of the file."""
    if format == "nifti":
        write_nifti(file, filling, packed=suffix.endswith(".gz"))
    elif format == "tiff":
        write_tiff(file, filling, name, ome=filling.frame.map is None or suffix == ".ome.tif")
    elif format == "npy":
        header = {"descr": np.lib.format.dtype_to_descr(filling.form.dtype), "fortran_order": False}
        np.lib.format.write_array_header_2_0(file, header | {"shape": filling.shape})
        filling.put_into(file, file.tell())
    else:
        from PIL import Image

        values = filling.values
        Image.fromarray(np.ascontiguousarray(values[...])).save(file, format="PNG")


def write_nifti(file: BinaryIO, filling: Filling, *, packed: bool) -> None:
    import nibabel

    form, frame = filling.form, filling.frame
    shape = frame.shape[::-1] + (1,) * (3 - len(frame.shape))
    sizes = (*shape, *([filling.channels] if filling.channels is not None else []))
    header = nibabel.Nifti1Header() if max(sizes) <= LARGEST_NIFTI else nibabel.Nifti2Header()
    header.set_data_dtype(form.dtype)
    header.set_data_shape(sizes)
    unit, factor = NIFTI_UNITS.get(frame.unit or "", ("micron", NIFTI_OTHERS.get(frame.unit or "", 1.0)))
    if frame.unit not in (*NIFTI_UNITS, *NIFTI_OTHERS):
        unit = "unknown"
    axes = list(frame.axes[::-1])  # of the file, which need not be those of the world in their order
    if not set(axes) <= {"x", "y", "z"}:
        axes = ["x", "y", "z"][: len(axes)]
    axes += [name for name in "xyz" if name not in axes]
    order = ["xyz".index(name) for name in axes]
    affine = frame.affine
    if affine is not None:
        unit = _unit_of(affine, frame)
    if affine is None:
        affine = np.eye(4)
        origin = frame.origin or (0.0,) * len(frame.axes)
        for at, size, start in zip(order, frame.spacing[::-1], origin[::-1], strict=False):
            affine[at, at], affine[at, 3] = size * factor, start * factor
    affine = affine[:, [*order, 3]]
    header.set_sform(affine, code=1)
    header.set_qform(affine, code=1)
    header.set_xyzt_units(unit)
    start = 352 if header["sizeof_hdr"] == 348 else 544
    header["vox_offset"] = start
    head, dtype = bytes(header.binaryblock).ljust(start, b"\0"), header.get_data_dtype()
    if not packed:
        file.write(head)
        filling.put_into(file, start, dtype)
        return
    with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=3, mtime=0) as packer:
        packer.write(head)
        for _, part in filling.pieces(in_order=True):
            packer.write(part.astype(dtype, copy=False).tobytes())


def write_tiff(file: BinaryIO, filling: Filling, name: str, *, ome: bool) -> None:
    """Write OME-TIFF, or a GeoTIFF of bands with the place on a map."""
    import tifffile

    form, frame = filling.form, filling.frame
    options: dict[str, Any] = {}
    if not ome:
        assert frame.map is not None
        options |= {"metadata": None, "extratags": geo_tags(frame.map)}
        if filling.channels is not None:
            options["planarconfig"] = "separate" if filling.channels > 1 else None
            options["extratags"].append(_named_bands(form.channels or ()))
    else:
        letters, metadata = ome_metadata(frame.spacing, frame.unit, name)
        if form.channels is not None:
            letters = f"C{letters}"
            metadata["Channel"] = {"Name": list(form.channels)}
        options |= {"ome": True, "metadata": {"axes": letters, **metadata}}
    row = frame.shape[-1] * form.dtype.itemsize
    placed = tifffile.imwrite(
        file,
        shape=filling.shape,
        dtype=form.dtype,
        bigtiff=filling.size > 2**31,
        photometric="minisblack",
        rowsperstrip=max(1, min(frame.shape[-2], STRIP // row)),
        returnoffset=True,
        **options,
    )
    assert placed is not None  # values that are not packed lie together
    filling.put_into(file, placed[0])


def geo_tags(chart: Map) -> list[tuple[Any, ...]]:
    """Return the tags of a place on a map, as GDAL writes them."""
    import rasterio
    import tifffile
    from rasterio.io import MemoryFile

    with MemoryFile() as memory:
        options: dict[str, Any] = {"driver": "GTiff", "width": 1, "height": 1, "count": 1, "dtype": "uint8"}
        with memory.open(**options, crs=chart.crs, transform=rasterio.Affine(*chart.transform)):
            pass
        with tifffile.TiffFile(io.BytesIO(memory.read())) as tif:
            tags = [tag for tag in tif.pages.first.tags if tag.code in GEO_TAGS]
            return [(tag.code, int(tag.dtype), tag.count, tag.value, True) for tag in tags]


def _named_bands(names: Sequence[str]) -> tuple[Any, ...]:
    """Return the tag in which GDAL keeps the names of bands."""
    items = (
        f'<Item name="DESCRIPTION" sample="{number}" role="description">{escape(name)}</Item>'
        for number, name in enumerate(names)
    )
    text = f"<GDALMetadata>{''.join(items)}</GDALMetadata>".encode("ascii", "xmlcharrefreplace").decode()
    return GDAL_METADATA, "s", 0, text, True


def _unit_of(affine: np.ndarray, frame: Frame) -> str:
    """Return the unit of an affine: that in which the voxels' size is what the frame says in its own."""
    sizes = [float(np.linalg.norm(affine[:3, "xyz".index(name)])) for name in frame.axes]
    for unit, (written, _) in NIFTI_UNITS.items():
        ratio = unit_ratio(unit, frame.unit)
        if ratio is not None and np.allclose(np.array(sizes) * ratio, frame.spacing, rtol=1e-4, atol=0):
            return written
    return "unknown"
