"""Write a volume as OME-Zarr: a pyramid of the image, its labels beside it, and metadata that other tools read.

- image levels are means of 2^3 voxels, label levels the most frequent value
- every chunk carries a checksum, that of its zstd frame, which all readers of zstd compare: 3 to 5 % of their time
- every level carries its scale and the half-voxel shift that averaging brings
- all is written to a hidden sibling and renamed at the end, so nothing half-made is ever found at the path
- a list of all files with their digests lies in s0/.vitrail, where readers of groups do not look: see disk.py
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitrail.disk import Tell, new_folder, told
from vitrail.errors import UserError

Shrink = Callable[[np.ndarray], np.ndarray]


class Labelled(Protocol):
    """What `write_ome_zarr` needs: an image, and optionally labels of the same shape with their names."""

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
        image_block = _describe_pyramid(name, spacing, unit, levels, version)
        image_block["omero"] = {"channels": [_channel(name, volume.image.dtype)]}
        if version == "0.4":  # from 0.5 on the block's own version counts
            image_block["omero"]["version"] = version
        _write_pyramid(draft, volume.image, image_block, levels, version, chunk, _average)
        if volume.labels is not None:
            label_block = _describe_pyramid(labels_name, spacing, unit, levels, version)
            properties = [{"label-value": i, "name": text} for i, text in enumerate(volume.label_names)]
            label_block["image-label"] = {"properties": properties, "source": {"image": "../../"}}
            if version == "0.4":
                label_block["image-label"]["version"] = version
            _create_group(draft / "labels", {"labels": [labels_name]}, version)
            _write_pyramid(draft / "labels" / labels_name, volume.labels, label_block, levels, version, chunk, _vote)
    return target


def _channel(name: str, dtype: np.dtype) -> dict[str, Any]:
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (0.0, 1.0)
    window = {"min": low, "max": high, "start": low, "end": high}
    return {"label": name, "color": "FFFFFF", "window": window, "active": True}


def _describe_pyramid(
    name: str, spacing: Sequence[float], unit: str | None, levels: int, version: str
) -> dict[str, Any]:
    """The multiscales block; a coarse voxel's centre lies half a coarse voxel less half a fine one from the origin."""
    datasets = []
    for level in range(levels):
        scale = [float(s) * 2**level for s in spacing]
        shift = [float(s) * (2**level - 1) / 2 for s in spacing]
        transforms = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}]
        datasets.append({"path": f"s{level}", "coordinateTransformations": transforms})
    axes = [{"name": axis, "type": "space"} | ({"unit": unit} if unit else {}) for axis in "zyx"]
    entry: dict[str, Any] = {"name": name, "axes": axes, "datasets": datasets}
    if version == "0.4":
        entry["version"] = version
    return {"multiscales": [entry]}


def _create_group(path: Path, block: dict[str, Any], version: str) -> Any:
    import zarr

    attributes = block if version == "0.4" else {"ome": {"version": version, **block}}
    return zarr.create_group(str(path), zarr_format=2 if version == "0.4" else 3, attributes=attributes)


def _write_pyramid(
    path: Path, array: np.ndarray, block: dict[str, Any], levels: int, version: str, chunk: int, shrink: Shrink
) -> None:
    import numcodecs
    import zarr.codecs

    group = _create_group(path, block, version)
    options: dict[str, Any]
    if version == "0.4":
        codec = numcodecs.Zstd(level=3, checksum=True)
        options = {"compressors": codec, "chunk_key_encoding": {"name": "v2", "separator": "/"}}
    else:
        options = {"compressors": zarr.codecs.ZstdCodec(level=3, checksum=True), "dimension_names": ("z", "y", "x")}
    for level in range(levels):
        stored = group.create_array(
            f"s{level}",
            shape=array.shape,
            chunks=tuple(min(chunk, n) for n in array.shape),
            dtype=array.dtype,
            config={"write_empty_chunks": True},  # an absent chunk must always mean a loss
            **options,
        )
        if version == "0.4":
            _hide_checksum(path / f"s{level}" / ".zarray")
        for lo in range(0, array.shape[0], chunk):
            stored[lo : lo + chunk] = array[lo : lo + chunk]
        if level + 1 < levels:
            # Slabs of an even number of planes bound the memory of the sums.
            slabs = [shrink(_blocks(array[lo : lo + 32])) for lo in range(0, array.shape[0], 32)]
            array = np.concatenate(slabs)


def _hide_checksum(metadata: Path) -> None:
    """Leave out of zarr 2 metadata what tensorstore and older numcodecs refuse; each frame tells of its checksum."""
    document = json.loads(metadata.read_bytes())
    document["compressor"] = {"id": "zstd", "level": document["compressor"]["level"]}
    metadata.write_text(json.dumps(document, indent=1))


def _blocks(array: np.ndarray) -> np.ndarray:
    """[z, y, x] as [8, z/2, y/2, x/2]: the voxels of each 2^3 block; odd sizes repeat their last plane."""
    array = np.pad(array, [(0, n % 2) for n in array.shape], mode="edge")
    return np.stack([array[z::2, y::2, x::2] for z in (0, 1) for y in (0, 1) for x in (0, 1)])


def _average(blocks: np.ndarray) -> np.ndarray:
    mean = blocks.mean(axis=0, dtype=np.float32 if blocks.dtype.itemsize < 4 else np.float64)
    return (np.rint(mean) if blocks.dtype.kind in "iu" else mean).astype(blocks.dtype)


def _vote(blocks: np.ndarray) -> np.ndarray:
    """The most frequent label; of equals, the smallest."""
    winner = np.zeros(blocks.shape[1:], blocks.dtype)
    most = np.zeros(blocks.shape[1:], np.uint8)
    for value in np.unique(blocks):
        votes = (blocks == value).sum(axis=0, dtype=np.uint8)
        winner[votes > most] = value
        np.maximum(most, votes, out=most)
    return winner
