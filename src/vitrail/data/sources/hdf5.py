"""Datasets of HDF5 files, one file or a folder of files that are laid out alike.

- which dataset is `key`, or `path: file.h5::volumes/raw`; where a file holds one array alone, that is it
- voxel size from the attributes `element_size_um` (ilastik, PlantSeg), `resolution` with `offset` (CREMI, nanometres)
  and axes from the dimension labels or an `axes` attribute; h5py reads under one lock, so threads take turns
- a chunk that was never written reads as zeros in HDF5, and so do parts of a virtual dataset whose file is gone: here
  that is an error, unless `missing: fill`
- links and parts in other files are those of the file's own folder, unless `--trust` is given
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.files.handles import Handles, decoding, default_axes, library
from vitrail.data.files.paths import local_copy, split_key
from vitrail.data.formats.hdf5 import (
    MOST_WORDS,
    Found,
    check_chunks,
    check_dataset,
    check_known,
    check_parts,
    depth,
    external_files,
    follow,
    large_chunks,
    open_here,
    virtual_parts,
    walk,
)
from vitrail.data.grid import Entry, GridConfig, GridSource, Stored, Window, plain_unit, split_axes
from vitrail.data.sources.folders import list_cases
from vitrail.data.stored import Filling, chunks_in
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import parse_json
from vitrail.recipe import config

Files = Handles[Any]
SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".ims", ".ilp")
MOST_VALUES = 1000  # of an attribute that tells something here


@config
class Hdf5Config(GridConfig):
    """An array of a file, or of each file of a folder; labels are a key inside, or another path, `file::key` too."""

    kind: Literal["hdf5"] = "hdf5"
    key: str | None = None  # of the dataset inside the file

    def open(self) -> GridSource:
        """Read the metadata; no voxel is read yet."""
        path, key = split_key(self.path, self.key)
        files, fill = open_files(), self.missing == "fill"
        cases = list_cases(path, None, SUFFIXES)
        known = list_datasets(cases[0].images[0], files)
        inside = self.labels if self.labels is not None and self.labels.strip("/") in known else None
        label_key = inside
        if self.labels is not None and inside is None:
            outside, label_key = split_key(self.labels, None)
            try:
                cases = list_cases(path, outside, SUFFIXES)
            except UserError as error:
                raise UserError(f"{error}, or one of its datasets: {', '.join(known)}") from None
        entries = []
        for case in cases:
            (place,), labels = case.images, None
            if self.labels is not None:
                labels = open_dataset(case.labels or place, label_key, files, fill=fill)
            facts = {"datasets": list_datasets(place, files)}
            image = open_dataset(place, key, files, fill=fill, skip=inside)
            entries.append(Entry(case.name, (image,), labels, facts=facts))
        return GridSource(self, entries, kind="hdf5")


def open_files() -> Files:
    """Return files that stay open as long as a source; HDF5 lets nobody write to them meanwhile."""
    h5py = library("h5py", "hdf5")
    return Handles(lambda place: h5py.File(place, "r", locking="best-effort"), per_thread=False)


def list_datasets(path: str, files: Files) -> list[str]:
    """List the arrays of numbers with two axes or more."""
    h5py = library("h5py", "hdf5")
    with decoding(path):
        return [
            name
            for name, node in walk(files(local_copy(path).resolve()))
            if isinstance(node, h5py.Dataset)
            and node.dtype.kind in "biuf"
            # The shape of a virtual dataset may be asked of other files, so that it counts whatever that is.
            and (node.is_virtual or node.ndim >= 2)
        ]


def open_dataset(path: str, key: str | None, files: Files, *, fill: bool, skip: str | None = None) -> Stored:
    with decoding(path):
        place = local_copy(path).resolve()
        if key is None:
            known = [name for name in list_datasets(path, files) if skip is None or name != skip.strip("/")]
            if len(known) != 1:
                have = f"choose `key` from {', '.join(known)}" if known else "it holds no array of numbers"
                raise UserError(f"{path}: which dataset to read is not said; {have}")
            key = known[0]
        at = follow(files, place, key)
        node = None if at is None else open_here(files, at)
        if at is None or node is None:
            have = ", ".join(list_datasets(path, files)) or "none"
            raise UserError(f"key = {key!r} is no dataset of {path}; choose from {have}")
        name = f"{path}::{key}"
        check_parts(files, node, at.file)
        shape, dtype = tuple(node.shape), np.dtype(node.dtype)
        told = _axes(node)
        axes = told or default_axes(len(shape))
        spacing, unit, origin = _metadata(node, axes)
        outside, problem = _outside(files, node, at.file, place)
        if problem is not None and not fill:
            raise MissingData(f"{name}: {problem}; restore it, or set `missing: fill` if what it lacks is empty")
        chunk, lost = node.chunks or (1,) * len(shape), problem is not None or _missing(node)
        if lost and not fill and node.chunks is None:
            raise MissingData(
                f"{name}: none of its voxels was ever written; restore the file, or set `missing: fill` if it is empty"
            )
        check_dataset(name, node)
        check_known(name, node)
        large = large_chunks(node)
    found, filling = at, Filling(allowed=fill)

    def read(window: Window) -> np.ndarray:
        with decoding(name):
            dataset = open_here(files, found)
            if tuple(dataset.shape) != shape or dataset.dtype != dtype:
                raise BadData(f"{name} has changed since it was opened; start again with the new file")
            gone = [part.file for part in outside if part.touches(window) and not part.file.exists()]
            if gone and not fill:
                raise MissingData(f"{name}: the file {gone[0]}, which holds a part of it, is gone; restore it")
            for number in _missing_chunks(dataset, window) if lost or gone else ():
                corner = [n * size for n, size in zip(number, chunk, strict=True)]
                filling.add(
                    f"{name}: the chunk {list(number)} at voxel {corner} was never written; restore the file, leave it "
                    "out with `region`, or set `missing: fill` if its writer left out chunks of the fill value alone"
                )
            check_chunks(name, dataset, large, window)
            return dataset[window]

    files_of = tuple(dict.fromkeys([str(place), *(str(part.file) for part in outside)])) if outside else ()
    more: dict[str, Any] = {"filling": filling, "files": files_of, "guessed": told is None}
    return Stored(name, shape, axes, dtype, chunk, read, spacing, unit, origin, **more)


def _axes(node: Any) -> tuple[str, ...] | None:
    """Return the names of the axes, where the file tells them."""
    labels: tuple[str, ...] = ()
    if _attribute(node, "DIMENSION_LABELS") is not None:
        labels = tuple(dimension.label for dimension in node.dims)
    told = _attribute(node, "axes")
    told = _attribute(node, "axistags") if told is None else told
    if isinstance(told, np.ndarray):
        labels = tuple(n.decode() if isinstance(n, bytes) else str(n) for n in told.ravel())
    elif isinstance(told, str) and told.startswith("{"):  # vigra's axis tags, as ilastik writes them
        try:
            labels = tuple(str(axis["key"]) for axis in parse_json(told)["axes"])
        except (ValueError, KeyError, TypeError):
            labels = ()
    elif isinstance(told, str):
        labels = split_axes(told)
    labels = tuple(label.lower() if len(label) == 1 else label for label in labels)
    usable = len(labels) == node.ndim and all(labels) and len(set(labels)) == len(labels)
    return labels if usable else None


def _metadata(node: Any, axes: tuple[str, ...]) -> tuple[dict[str, float], str | None, dict[str, float]]:
    """Read voxel size, unit and origin, given for the axes of space in their order."""
    space = [name for name in axes if name not in ("c", "t")]
    for attribute, unit in (("element_size_um", "micrometer"), ("resolution", "nanometer")):
        told = _attribute(node, attribute)
        values = np.ravel(() if told is None else told)
        if len(values) == len(space) and values.dtype.kind in "iuf" and (values > 0).all():
            spacing = {n: float(v) for n, v in zip(space, values, strict=True)}
            if attribute == "element_size_um":
                return spacing, unit, {}
            offset = _attribute(node, "offset")
            offset = np.ravel(np.zeros(len(space)) if offset is None else offset)
            fits = len(offset) == len(space) and offset.dtype.kind in "iuf"
            told = _attribute(node, "unit")
            told = plain_unit(_attribute(node, "units") if told is None else told) or unit
            return spacing, told, {n: float(v) for n, v in zip(space, offset, strict=True)} if fits else {}
    return {}, None, {}


def _attribute(node: Any, name: str) -> Any:
    """Read a small attribute, or None; words may all be one that is as large as the file."""
    if name not in node.attrs:
        return None
    found = node.attrs.get_id(name)
    most = MOST_WORDS if found.dtype.hasobject else MOST_VALUES
    return None if depth(found.dtype) > 1 or math.prod(found.shape or ()) > most else node.attrs[name]


class _Part(NamedTuple):
    """Another file that a box of a dataset is read from."""

    file: Path
    start: tuple[int, ...]
    last: tuple[int, ...]

    def touches(self, window: Window) -> bool:
        return all(a < w.stop and w.start <= b for w, a, b in zip(window, self.start, self.last, strict=True))


def _outside(
    files: Files, node: Any, own: Path, place: Path, judged: set[tuple[Path, str]] | None = None
) -> tuple[list[_Part], str | None]:
    """List the other files that a dataset is read from, and what is wrong with them: HDF5 itself would give zeros.

    An external link may have led to its `own` file; each part is judged once.
    """
    whole = (0,) * node.ndim, tuple(n - 1 for n in node.shape)
    parts = [] if own == place else [_Part(own, *whole)]
    problems: list[str] = []
    for file, offset, size in external_files(node, own):
        parts.append(_Part(file, *whole))
        bounded = size < 2**63  # or to the end of the file, whatever that is
        if not parts[-1].file.exists():
            problems.append(f"the file {parts[-1].file}, which holds a part of it, is gone")
        elif bounded and parts[-1].file.stat().st_size < offset + size:
            problems.append(f"the file {parts[-1].file}, which holds a part of it, is cut short")
    judged = set() if judged is None else judged
    mapped = 0
    pattern = False
    for part, name, space in virtual_parts(node, own):
        if space is None:
            pattern = True
            parts.append(_Part(part or own, *whole))
            continue
        mapped += space.get_select_npoints()
        if part is not None:
            parts.append(_Part(part, *space.get_select_bounds()))
        if (part or own, name) not in judged:
            judged.add((part or own, name))
            problems += _judge(files, part or own, name, judged)
    if node.is_virtual and mapped < node.size and not pattern:
        problems.append(f"{node.size - mapped} of its voxels are in no file")
    return parts, problems[0] if problems else None


def _judge(files: Files, file: Path, name: str, judged: set[tuple[Path, str]]) -> list[str]:
    """Say what is wrong with a dataset that is a part of another, and with its own parts."""
    if not file.exists():
        return [f"the file {file}, which holds a part of it, is gone"]
    at: Found | None = follow(files, file.resolve(), name)
    node = None if at is None else open_here(files, at)
    if at is None or node is None:
        return [f"{file}::{name}, which is a part of it, is gone"]
    if _missing(node):
        return [f"{file}::{name}, which is a part of it, has chunks that were never written"]
    problem = _outside(files, node, at.file, at.file, judged)[1]
    return [] if problem is None else [problem]


def _missing(node: Any) -> bool:
    """Tell whether chunks, or the whole of it, were never written."""
    if node.is_virtual or node.external:
        return False
    if node.chunks is None:
        return node.id.get_storage_size() == 0
    wanted = np.prod([-(-size // chunk) for size, chunk in zip(node.shape, node.chunks, strict=True)], dtype=np.int64)
    return bool(node.id.get_num_chunks() < wanted)


def _missing_chunks(dataset: Any, window: Window) -> Iterator[tuple[int, ...]]:
    """List the chunks of a window that were never written."""
    if dataset.chunks is None:  # all of it
        yield (0,) * dataset.ndim
        return
    for number in chunks_in(window, dataset.chunks):
        corner = tuple(n * size for n, size in zip(number, dataset.chunks, strict=True))
        if dataset.id.get_chunk_info_by_coord(corner).byte_offset is None:
            yield number
