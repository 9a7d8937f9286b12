"""NIfTI volumes (.nii, .nii.gz): CT and MR with labels, single files, folders, imagesTr/labelsTr and nnU-Net's layout.

- the file's x, y, z become the axes z, y, x; sizes and unit come from the header, and the affine is kept in the facts
- scl_slope and scl_inter are applied (float32); where they change nothing, whole numbers stay
- .nii is read by memory map; .nii.gz has no random access, so it is decoded whole and kept while there is room
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.data.bad import BadData
from vitrail.data.files import local_copy
from vitrail.data.formats import Mapped, decoding, file_mark, library, list_items, pair_labels, whole_items
from vitrail.data.grid import TOLERANCE, Entry, GridConfig, GridSource, Stored, Window, plain_unit
from vitrail.data.nnunet import Case, is_layout, read_layout
from vitrail.errors import UserError
from vitrail.recipe import config

SUFFIXES = (".nii.gz", ".nii")


@config
class NiftiConfig(GridConfig):
    """A file, a folder of files, or a folder with imagesTr; labels are a file or a folder, labelsTr by itself."""

    kind: Literal["nifti"] = "nifti"
    check_affine: bool = True  # refuse labels whose affine places them elsewhere than the image

    def open(self) -> GridSource:
        """Read the headers; no voxel is read yet."""
        channels: tuple[str, ...] | None = None
        names: dict[int, str] = {}
        more: dict[str, Any] = {}
        if is_layout(self.path):
            layout = read_layout(self.path, SUFFIXES)
            cases, channels, names = layout.cases, layout.channels, layout.labels
            more = {"layout": "imagesTr", **layout.facts}
            if self.labels is not None:
                raise UserError(f"labels = {self.labels!r}: those of {self.path} lie in labelsTr; leave `labels` out")
        else:
            items = list_items(self.path, SUFFIXES)
            pairs = {} if self.labels is None else pair_labels(items, self.labels, SUFFIXES)
            cases = tuple(Case(name, (path,), pairs.get(name)) for name, path in items)
        entries = [self._entry(case, channels, names, more) for case in cases]
        return GridSource(self, entries, kind="nifti")

    def _entry(
        self, case: Case, channels: tuple[str, ...] | None, names: dict[int, str], more: dict[str, Any]
    ) -> Entry:
        opened = [open_nifti(path, channels if len(case.images) == 1 else None) for path in case.images]
        images = [stored for stored, _ in opened]
        if channels is not None and len(channels) == len(images):
            images = [replace(s, channels=(name,)) for s, name in zip(images, channels, strict=True)]
        affine = opened[0][1]
        labels = None
        if case.labels is not None:
            found, placed = open_nifti(case.labels, None)
            labels = replace(_whole_numbers(found), names=names)
            labels = replace(labels, spacing=images[0].spacing, origin=self._place(labels, affine, placed))
        return Entry(case.name, tuple(images), labels, facts={"affine": affine.tolist(), **more})

    def _place(self, labels: Stored, image: np.ndarray, placed: np.ndarray) -> dict[str, float]:
        """Where the first voxel of the labels lies on the image's grid, by both affines."""
        if not self.check_affine:
            return dict.fromkeys("zyx", 0.0)
        move = np.linalg.inv(image) @ placed  # voxels of the labels to voxels of the image
        if not np.allclose(move[:3, :3], np.eye(3), atol=TOLERANCE):
            raise BadData(
                f"labels {labels.name} have another affine than the image, {placed.tolist()} instead of "
                f"{image.tolist()}; resample them, or set check_affine: false where only the header is wrong"
            )
        sizes = np.linalg.norm(image[:3, :3], axis=0)
        return {name: float(move[i, 3] * sizes[i]) for i, name in enumerate("xyz")}


def _load(place: Path) -> Any:
    return library("nibabel", "nifti").load(place)


def open_nifti(path: str, channels: tuple[str, ...] | None) -> tuple[Stored, np.ndarray]:
    """The array, and its affine."""
    library("nibabel", "nifti")
    place = local_copy(path)
    with decoding(path):
        image = _load(place)
        header, proxy = image.header, image.dataobj
        if not hasattr(header, "get_xyzt_units"):
            raise BadData(f"{path} is no NIfTI file but {type(image).__name__}; convert it")
        slope, inter = (1.0 if proxy.slope is None else float(proxy.slope)), float(proxy.inter or 0.0)
        sizes, raw = tuple(int(n) for n in proxy.shape), np.dtype(proxy.dtype)
        zooms, unit = header.get_zooms(), plain_unit(header.get_xyzt_units()[0])
        affine = np.asarray(image.affine, np.float64)
        files = tuple({str(part.filename): None for part in image.file_map.values()})  # of .hdr and .img, two
        mark, packed = (path, file_mark(place)), place.suffix != ".nii"
        mapped = None if packed else Mapped(path, place, raw, int(proxy.offset), sizes, "F")
    if not 2 <= len(sizes) <= 5:
        raise BadData(f"{path} has {len(sizes)} dimensions; 2 to 5 can be read")
    named = len(sizes) == 4 and channels is not None and sizes[3] == len(channels)
    axes = ("x", "y", "z", "c" if named else "t", "c")[: len(sizes)]
    scaled = slope != 1.0 or inter != 0.0
    dtype = np.dtype(np.float32) if scaled else raw.newbyteorder("=")

    def decode() -> np.ndarray:
        with decoding(path):
            values = np.asarray(_load(place).dataobj.get_unscaled())
            return np.ascontiguousarray(values.T)

    def read(window: Window) -> np.ndarray:
        values = (whole_items(mark, decode) if mapped is None else mapped().T)[window]
        return (values * np.float32(slope) + np.float32(inter)).astype(dtype) if scaled else values.astype(dtype)

    shape = sizes[::-1]
    chunk = shape if packed else (1,) * len(shape)
    spacing = {name: float(zoom) for name, zoom in zip("xyz", zooms, strict=False) if zoom > 0}
    origin = dict.fromkeys("xyz"[: len(shape)], 0.0)
    return Stored(path, shape, axes[::-1], dtype, chunk, read, spacing, unit, origin, channels, files=files), affine


def _whole_numbers(labels: Stored) -> Stored:
    """Labels that are stored as floats, as many tools do, if each of them is a whole number."""
    if labels.dtype.kind != "f":
        return labels

    def read(window: Window) -> np.ndarray:
        values = labels.read(window)
        whole = np.rint(values)
        wrong = (whole != values) | (np.abs(values) > np.iinfo(np.int32).max)
        if wrong.any():
            first = np.unravel_index(int(wrong.argmax()), values.shape)
            place = [int(i) + w.start for i, w in zip(first, window, strict=True)]
            raise BadData(
                f"labels {labels.name} hold {values[first]} at {place} ({', '.join(labels.axes)}), which is no class; "
                "write whole numbers, up to 2147483647"
            )
        return whole.astype(np.int32)

    return replace(labels, dtype=np.dtype(np.int32), read=read)
