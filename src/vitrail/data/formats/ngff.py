"""NGFF (OME-Zarr): its metadata (axes, levels, and where each voxel lies in the world), and writing a volume so.

Reading:

- reads 0.4 (zarr v2), 0.5 (zarr v3) and what 0.6 adds around them; level names are whatever the file says
- the transform of a level comes first, then the one of the whole pyramid; a missing unit stays unknown (None)
- a path in the metadata never leads out of its group

Writing a pyramid of an image, its labels beside it, and metadata that other tools read:

- image levels are means of 2^3 voxels, label levels the most frequent value
- every chunk carries a checksum, that of its zstd frame, which all readers of zstd compare: 3 to 5 % of their time
- every level carries its scale and the half-voxel shift that averaging brings
- all is written to a hidden sibling and renamed at the end, so nothing half-made is ever found at the path
- a list of all files with their digests lies in s0/.vitrail, where readers of groups do not look: see disk.py
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from vitrail import disk, foreign
from vitrail.data.files.places import Place, find_folders, find_place, read_object
from vitrail.disk import Tell, new_folder, told
from vitrail.errors import UserError
from vitrail.foreign import check_plain

METADATA = ("zarr.json", ".zgroup", ".zattrs", ".zarray")


@dataclass(frozen=True)
class Axis:
    name: str
    kind: str  # space, time or channel
    unit: str | None


@dataclass(frozen=True)
class Level:
    """One resolution: where its array is, and world = scale * index + translation on every axis."""

    path: str  # relative to the group
    scale: tuple[float, ...]
    translation: tuple[float, ...]


@dataclass(frozen=True)
class Multiscale:
    group: Place
    version: str
    axes: tuple[Axis, ...]
    levels: tuple[Level, ...]  # finest first
    channels: tuple[str, ...] | None  # names from the omero block, where there is one
    attributes: dict[str, Any]  # the whole block, for what else a reader may want

    @property
    def spatial(self) -> tuple[int, ...]:
        """Return numbers of the spatial axes."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.kind == "space")

    def find(self, kind: str) -> int | None:
        """Return number of the axis of this kind (time or channel), or None."""
        return next((i for i, axis in enumerate(self.axes) if axis.kind == kind), None)

    def spacing(self, level: int) -> tuple[float, ...]:
        return tuple(self.levels[level].scale[i] for i in self.spatial)

    def unit(self, given: str | None = None) -> str | None:
        """Return the unit that the spatial axes share; where they have several, the one that is given."""
        units = {self.axes[i].unit for i in self.spatial}
        if len(units) > 1:
            named = ", ".join(f"{self.axes[i].name}: {self.axes[i].unit}" for i in self.spatial)
            if given is not None:
                return given
            raise UserError(
                f"the spatial axes of {self.group} have different units ({named}); write the same unit for all, or "
                "give voxel_size and unit"
            )
        return units.pop()

    def array_path(self, level: int) -> Place:
        return safe_join(self.group, self.levels[level].path)


def load_attributes(node: Place) -> tuple[str, dict[str, Any]] | None:
    """Read ("group" or "array", attributes) of a zarr node of either format; None where there are no metadata."""
    try:
        if _is_there(node / "zarr.json"):
            document = read_object(node / "zarr.json")
            attributes = document.get("attributes") or {}
            if not isinstance(attributes, dict):
                raise UserError(f"{node / 'zarr.json'} has attributes that are no JSON object; rewrite the file")
            return str(document.get("node_type", "group")), attributes
        for name, kind in ((".zgroup", "group"), (".zarray", "array")):
            if _is_there(node / name):
                beside = node / ".zattrs"
                return kind, read_object(beside) if _is_there(beside) else {}
        if _is_there(node / ".zattrs"):  # some writers leave .zgroup out
            return "group", read_object(node / ".zattrs")
    except OSError as error:
        raise UserError(
            f"the zarr metadata of {node} cannot be read ({error.strerror}); check its permissions"
        ) from error
    return None


def _is_there(file: Place) -> bool:
    """Tell whether a file of metadata is there; what is no plain file is refused rather than passed over."""
    if isinstance(file, Path):
        check_plain(file)
    return file.is_file()


def read_multiscale(path: str | Place) -> Multiscale:
    """Read the first pyramid of the image or label group at `path`."""
    group = find_place(path)
    if not group.exists():
        raise UserError(f"data path {str(path)!r} does not exist; check the spelling")
    found = load_attributes(group)
    if found is None:
        raise UserError(
            f"{group} is not a zarr group: it has neither zarr.json nor .zgroup; give the path of an OME-Zarr image"
        )
    if isinstance(group, Path):
        check_written(group)
    kind, attributes = found
    block = attributes.get("ome") or attributes
    if not isinstance(block, dict) or not block.get("multiscales"):
        raise UserError(_explain_no_image(group, kind))
    try:
        return _parse(group, block)
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the multiscales metadata of {group} is not valid NGFF ({problem}); rewrite it as version 0.4 or 0.5"
        ) from error


def check_written(group: Path) -> None:
    """Refuse metadata that are others than vitrail wrote, where it wrote the volume: no reader could tell otherwise."""
    for root, inner in ((group, ""), (group.parent.parent, f"{group.parent.name}/{group.name}/")):

        def wanted(name: str, inner: str = inner) -> bool:
            level, _, file = name.removeprefix(inner).rpartition("/")
            return name.startswith(inner) and "/" not in level and file in METADATA

        wrong = disk.first_changed(root / "s0" / disk.MARK, root, METADATA, wanted, most=foreign.METADATA)
        if wrong is not None:
            raise UserError(
                f"{root / wrong} has changed since vitrail wrote it: it was damaged or edited; restore it, or remove "
                f"{root / 's0' / disk.MARK} if the change is meant"
            )


def _explain_no_image(group: Place, kind: str) -> str:
    """Say why there is no image here, and where one is."""
    if kind == "array":
        parent = load_attributes(group.parent)
        if parent and (parent[1].get("ome") or parent[1]).get("multiscales"):
            return f"{group} is one level of an image; give {group.parent} as path and choose the level with `level`"
        return f"{group} is a bare zarr array without NGFF metadata; say `kind: zarr`, or give an OME-Zarr image group"
    inside = find_images(group)
    if inside:
        return f"{group} holds images but is none itself; give one of them as path, such as {inside[0]}"
    return f"{group} has no `multiscales` metadata, so it is no OME-Zarr image; give an image group (NGFF 0.4 or 0.5)"


def find_images(group: Place) -> list[Place]:
    """Find OME-Zarr images below a group of a bigger hierarchy, without looking into arrays."""

    def judge(place: Place) -> bool | None:
        found = load_attributes(place)
        if found is None or found[0] == "array":
            return False
        return True if (found[1].get("ome") or found[1]).get("multiscales") else None

    return find_folders(group, judge, depth=4, most=200)


def _parse(group: Place, block: dict[str, Any]) -> Multiscale:
    entry = block["multiscales"][0]
    version = str(block.get("version") or entry.get("version") or "unknown")
    systems = entry.get("coordinateSystems")
    axes = tuple(
        _parse_axis(axis) for axis in (_intrinsic_axes(entry, systems) if systems else entry.get("axes") or ())
    )
    spatial = [axis for axis in axes if axis.kind == "space"]
    if not 2 <= len(axes) <= 5 or not 2 <= len(spatial) <= 3 or len({axis.name for axis in axes}) < len(axes):
        names = ", ".join(axis.name for axis in axes) or "none"
        raise UserError(
            f"{group} must have 2 to 5 axes of different names, 2 or 3 of them spatial, but has {names}; "
            "rewrite it as NGFF 0.4 or 0.5"
        )
    if len(axes) - len(spatial) != len({axis.kind for axis in axes} - {"space"}):
        raise UserError(f"{group} has two axes of the same kind that is not space; rewrite it as NGFF 0.4 or 0.5")
    # 0.6 names the system that each transform leads to, and those of the whole pyramid lead on to another one.
    shared = [] if systems else entry.get("coordinateTransformations") or []
    levels = []
    for dataset in entry["datasets"]:
        safe_join(group, dataset["path"])  # refuse it now rather than at the first read
        steps = [*_flatten(dataset.get("coordinateTransformations") or []), *_flatten(shared)]
        scale, translation = _compose(group, dataset["path"], steps, len(axes))
        levels.append(Level(dataset["path"], scale, translation))
    if not levels:
        raise UserError(f"{group} lists no levels under multiscales.datasets; rewrite it as NGFF 0.4 or 0.5")
    omero = block.get("omero") or {}
    labels = [channel.get("label") for channel in omero.get("channels") or []]
    channels = tuple(labels) if labels and all(isinstance(label, str) and label for label in labels) else None
    return Multiscale(group, version, axes, tuple(levels), channels, block)


def _intrinsic_axes(entry: dict[str, Any], systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the axes of the coordinate system that the levels are mapped to (NGFF 0.6)."""
    target = entry["datasets"][0]["coordinateTransformations"][0].get("output")
    name = target.get("name") if isinstance(target, dict) else target
    return next((system["axes"] for system in systems if system["name"] == name), systems[0]["axes"])


def _parse_axis(axis: dict[str, Any]) -> Axis:
    if not isinstance(axis, dict):
        raise ValueError(f"axis {axis!r} is a bare name, as before version 0.4")
    name = axis["name"]
    kind = axis.get("type") or {"t": "time", "c": "channel"}.get(name, "space" if name in "zyx" else "channel")
    return Axis(name, kind if kind in ("space", "time") else "channel", axis.get("unit") or None)


def _flatten(transforms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lay out sequences (NGFF 0.6) flat."""
    flat: list[dict[str, Any]] = []
    for transform in transforms:
        flat += _flatten(transform["transformations"]) if transform["type"] == "sequence" else [transform]
    return flat


def _compose(
    group: Place, name: str, steps: list[dict[str, Any]], num_axes: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compose several scales and translations, applied in their order, to one of each."""
    scale, translation, scaled = [1.0] * num_axes, [0.0] * num_axes, False
    for step in steps:
        kind = step["type"]
        if kind == "identity":
            continue
        if kind not in ("scale", "translation"):
            raise UserError(
                f"level {name!r} of {group} is placed by a transform of type {kind!r}; "
                "only scale and translation can be read, so resample the data first"
            )
        values = step.get(kind)
        if not isinstance(values, list) or len(values) != num_axes or not all(_is_number(value) for value in values):
            raise UserError(
                f"the {kind} of level {name!r} of {group} must be {num_axes} numbers, one per axis, "
                f"but is {values!r}; mend the metadata"
            )
        if kind == "scale":
            scaled = True
            if min(values) <= 0:
                raise UserError(f"the scale of level {name!r} of {group} must be positive, but is {values!r}; mend it")
            scale = [a * b for a, b in zip(scale, values, strict=True)]
            translation = [a * b for a, b in zip(translation, values, strict=True)]
        else:
            translation = [a + b for a, b in zip(translation, values, strict=True)]
    if not scaled and not any(step["type"] == "identity" for step in steps):
        raise UserError(
            f"level {name!r} of {group} has no scale, so its voxel size is unknown; write NGFF 0.4 or 0.5 metadata"
        )
    return tuple(scale), tuple(translation)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def safe_join(group: Place, path: object) -> Place:
    """Return the place of a path named in the metadata of a group; refuse what leads out of the group."""
    pure = PurePosixPath(path) if isinstance(path, str) else PurePosixPath()
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in str(path) or "\0" in str(path):
        raise UserError(f"{group} names the path {path!r}, which does not lie inside it; use a plain name such as 's0'")
    place = group.joinpath(*pure.parts)
    inside: Any = place.resolve()
    if not inside.is_relative_to(group.resolve()):
        raise UserError(f"{group} names the path {path!r}, a link that leads out of it; copy the data into the group")
    return place


Shrink = Callable[[np.ndarray], np.ndarray]


class Labelled(Protocol):
    """An image, and optionally labels of the same shape with their names, for `write_ome_zarr`."""

    @property
    def image(self) -> np.ndarray: ...
    @property
    def labels(self) -> np.ndarray | None: ...
    @property
    def label_names(self) -> tuple[str, ...]: ...


def write_ome_zarr(
    path: str | Path,
    volume: Labelled,
    *,
    spacing: Sequence[float] = (8.0, 8.0, 8.0),
    unit: str | None = "nanometer",
    levels: int = 3,
    version: str = "0.5",
    chunk: int = 64,
    name: str = "image",
    labels_name: str = "structures",
    force: bool = False,
    tell: Tell = lambda line: None,
) -> Path:
    """Write an image (z, y, x) and its labels as one OME-Zarr pyramid; it appears at `path` only when complete.

    With `force`, a volume that vitrail wrote there, and that nobody has changed since, is replaced.
    """
    target = Path(path)
    if version not in ("0.4", "0.5"):
        raise UserError(f"version = {version!r} cannot be written; choose '0.5' (zarr v3) or '0.4' (zarr v2)")
    if levels < 1 or chunk < 1 or len(spacing) != 3 or min(spacing) <= 0 or volume.image.ndim != 3:
        raise UserError(
            f"shape {volume.image.shape} cannot be written with spacing {list(spacing)}, {levels} levels and "
            f"chunks of {chunk}; give a 3-D image, three positive spacings, and positive levels and chunk"
        )
    with told(target), new_folder(target, force=force, seal="s0", tell=tell) as draft:
        image_block = describe_pyramid(name, spacing, unit, levels, version)
        image_block["omero"] = {"channels": [describe_channel(name, volume.image.dtype)]}
        if version == "0.4":  # from 0.5 on the block's own version counts
            image_block["omero"]["version"] = version
        _write_pyramid(draft, volume.image, image_block, levels, version, chunk, _average)
        named = {labels_name: volume.labels, "cells": getattr(volume, "cells", None)}
        given = {name: labels for name, labels in named.items() if labels is not None}
        if given:
            create_group(draft / "labels", {"labels": list(given)}, version)
        for name, labels in given.items():
            label_block = describe_pyramid(name, spacing, unit, levels, version)
            label_block["image-label"] = {"source": {"image": "../../"}}
            if name == labels_name:
                properties = [{"label-value": i, "name": text} for i, text in enumerate(volume.label_names)]
                label_block["image-label"]["properties"] = properties
            if version == "0.4":
                label_block["image-label"]["version"] = version
            _write_pyramid(draft / "labels" / name, labels, label_block, levels, version, chunk, _vote)
    return target


def describe_channel(name: str, dtype: np.dtype) -> dict[str, Any]:
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0.0, 1.0)
    window = {"min": low, "max": high, "start": low, "end": high}
    return {"label": name, "color": "FFFFFF", "window": window, "active": True}


def describe_pyramid(
    name: str,
    spacing: Sequence[float],
    unit: str | None,
    levels: int,
    version: str = "0.5",
    *,
    axes: Sequence[str] = ("z", "y", "x"),
    origin: Sequence[float] | None = None,
    factors: Sequence[Sequence[int]] | None = None,
    channels: bool = False,
) -> dict[str, Any]:
    """Describe a pyramid; a coarse voxel's centre lies half a coarse voxel less half a fine one from the origin.

    `origin` is the place of the first voxel's centre; `factors` are voxels of the finest level to one of each level.
    """
    datasets = []
    for level in range(levels):
        many = [2**level] * len(spacing) if factors is None else factors[level]
        scale = [float(s) * n for s, n in zip(spacing, many, strict=True)]
        first = [0.0] * len(spacing) if origin is None else origin
        shift = [float(o) + float(s) * (n - 1) / 2 for o, s, n in zip(first, spacing, many, strict=True)]
        if channels:
            scale, shift = [1.0, *scale], [0.0, *shift]
        transforms = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}]
        datasets.append({"path": f"s{level}", "coordinateTransformations": transforms})
    told = [{"name": axis, "type": "space"} | ({"unit": unit} if unit else {}) for axis in axes]
    told = [{"name": "c", "type": "channel"}, *told] if channels else told
    entry: dict[str, Any] = {"name": name, "axes": told, "datasets": datasets}
    if version == "0.4":
        entry["version"] = version
    return {"multiscales": [entry]}


def create_group(path: Path, block: dict[str, Any], version: str = "0.5", **beside: Any) -> Any:
    """Make a group with NGFF metadata, and what else stands `beside` them."""
    import zarr

    attributes = block if version == "0.4" else {"ome": {"version": version, **block}, **beside}
    return zarr.create_group(str(path), zarr_format=2 if version == "0.4" else 3, attributes=attributes)


def _write_pyramid(
    path: Path, array: np.ndarray, block: dict[str, Any], levels: int, version: str, chunk: int, shrink: Shrink
) -> None:
    group = create_group(path, block, version)
    for level in range(levels):
        chunks = tuple(min(chunk, n) for n in array.shape)
        stored = create_level(group, f"s{level}", array.shape, chunks, array.dtype, version=version)
        if version == "0.4":
            _hide_checksum(path / f"s{level}" / ".zarray")
        for lo in range(0, array.shape[0], chunk):
            stored[lo : lo + chunk] = array[lo : lo + chunk]
        if level + 1 < levels:
            # Slabs of an even number of planes bound the memory of the sums.
            slabs = [shrink(_blocks(array[lo : lo + 32])) for lo in range(0, array.shape[0], 32)]
            array = np.concatenate(slabs)


def create_level(
    group: Any,
    name: str,
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: np.dtype,
    *,
    axes: Sequence[str] = ("z", "y", "x"),
    version: str = "0.5",
) -> Any:
    """Make the array of a level, each of whose chunks carries a checksum."""
    import numcodecs
    import zarr.codecs

    options: dict[str, Any]
    if version == "0.4":
        codec = numcodecs.Zstd(level=3, checksum=True)
        options = {"compressors": codec, "chunk_key_encoding": {"name": "v2", "separator": "/"}}
    else:
        options = {"compressors": zarr.codecs.ZstdCodec(level=3, checksum=True), "dimension_names": tuple(axes)}
    return group.create_array(
        name,
        shape=tuple(shape),
        chunks=tuple(chunks),
        dtype=dtype,
        config={"write_empty_chunks": True},  # an absent chunk must always mean a loss
        **options,
    )


def write_chunks(folder: Path, chunks: Sequence[int], box: Sequence[slice], values: np.ndarray, threads: int) -> None:
    """Write whole chunks of a level that `create_level` has made in version 0.5, several at once.

    They are the bytes that zarr writes, at a third of the cost; the box begins and ends where chunks do, or the level.
    """
    from numcodecs import Zstd

    codec = Zstd(level=3, checksum=True)
    values = values.astype(values.dtype.newbyteorder("<"), copy=False)

    def write(number: tuple[int, ...]) -> None:
        inside = tuple(slice(n * side, (n + 1) * side) for n, side in zip(number, chunks, strict=True))
        part = values[inside]
        if part.shape != tuple(chunks):  # those at the end of an axis go on with the fill value
            whole = np.zeros(chunks, part.dtype)
            whole[tuple(slice(0, n) for n in part.shape)] = part
            part = whole
        names = (str(b.start // side + n) for b, side, n in zip(box, chunks, number, strict=True))
        disk.write_whole(
            folder.joinpath("c", *names), codec.encode(np.ascontiguousarray(part)), durable=False, parents=True
        )

    every = list(itertools.product(*(range(-(-n // side)) for n, side in zip(values.shape, chunks, strict=True))))
    if threads == 1 or len(every) == 1:
        for number in every:
            write(number)
        return
    with ThreadPoolExecutor(min(threads, len(every)), thread_name_prefix="vitrail-chunk") as pool:
        for _ in pool.map(write, every):
            pass


def _hide_checksum(metadata: Path) -> None:
    """Leave out of zarr 2 metadata what tensorstore and older numcodecs refuse; each frame tells of its checksum."""
    document = json.loads(metadata.read_bytes())
    document["compressor"] = {"id": "zstd", "level": document["compressor"]["level"]}
    metadata.write_text(json.dumps(document, indent=1))


def coarser(values: np.ndarray, *, labels: bool, factors: Sequence[int] | None = None) -> np.ndarray:
    """Return values at half the resolution: means, or the most frequent of labels; a factor of 1 leaves an axis."""
    return (_vote if labels else _average)(_blocks(values, factors))


def _blocks(array: np.ndarray, factors: Sequence[int] | None = None) -> np.ndarray:
    """Sort [z, y, x] into [8, z/2, y/2, x/2], the voxels of each 2^3 block; odd sizes repeat their last plane."""
    factors = [2] * array.ndim if factors is None else factors
    array = np.pad(array, [(0, -n % f) for n, f in zip(array.shape, factors, strict=True)], mode="edge")
    starts = itertools.product(*map(range, factors))
    return np.stack([array[tuple(slice(s, None, f) for s, f in zip(at, factors, strict=True))] for at in starts])


def _average(blocks: np.ndarray) -> np.ndarray:
    mean = blocks.mean(axis=0, dtype=np.float32 if blocks.dtype.itemsize < 4 else np.float64)
    return (np.rint(mean) if blocks.dtype.kind in "iu" else mean).astype(blocks.dtype)


def _vote(blocks: np.ndarray) -> np.ndarray:
    """Choose the most frequent label; of equals, the smallest."""
    values = _values_in(blocks)
    winner = np.full(blocks.shape[1:], values[0])
    most = _count(blocks, values[0])
    for value in values[1:]:
        votes = _count(blocks, value)
        np.copyto(winner, value, where=votes > most)
        np.maximum(most, votes, out=most)
    return winner


def _values_in(labels: np.ndarray) -> np.ndarray:
    """Return the different labels, rising. A table of all that a small type has is much faster than sorting."""
    if labels.dtype not in (np.uint8, np.uint16):
        return np.unique(labels)
    there = np.zeros(np.iinfo(labels.dtype).max + 1, bool)
    there[labels] = True
    return np.flatnonzero(there).astype(labels.dtype)


def _count(blocks: np.ndarray, value: Any) -> np.ndarray:
    """Count in how many of the blocks each voxel has a label."""
    return np.add.reduce((blocks == value).view(np.uint8), axis=0, dtype=np.uint8)
