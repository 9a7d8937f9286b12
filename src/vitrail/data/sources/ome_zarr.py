"""OME-Zarr images and volumes (NGFF 0.4 and 0.5), read in windows with tensorstore.

- the level is named by number or found by voxel size; region and windows are in voxels of that level
- a channel axis becomes named variables; of a time axis one moment is read
- a chunk that is absent or broken is an error that names its file, never silent zeros, unless the recipe says otherwise
"""

import logging
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vitrail.data.ngff import TOLERANCE, Multiscale, choose_level, load_attributes, read_multiscale, safe_join
from vitrail.data.source import Item, normalize_window, resolve_region
from vitrail.errors import UserError
from vitrail.launch.world import find_world, share_of_cores
from vitrail.recipe import config

if TYPE_CHECKING:
    import tensorstore

CACHE_BYTES = 64 * 2**20  # of decoded chunks; the loader keeps the blocks that it will use again itself

READ_ERRORS = (ValueError, NotImplementedError, OSError)  # what tensorstore raises for wrong or unreadable data

log = logging.getLogger(__name__)


@config
class OmeZarrConfig:
    """An OME-Zarr image group, which may lie inside a bigger zarr hierarchy."""

    path: str  # of the image group
    kind: Literal["ome_zarr"] = "ome_zarr"
    variables: list[str] | None = None  # names of the channels to read, in this order; None reads all
    region: dict[str, list[int | float]] = field(default_factory=dict)  # axis: [lo, hi], fractions or voxels
    weight: float = 1.0  # times its size (crops in volumes, images in folders): its share of the samples
    level: int | None = None  # number of the resolution level, 0 is the finest; None is 0, or what spacing finds
    spacing: list[float] | None = None  # wanted voxel size in the file's unit: the coarsest level that is fine enough
    labels: str | None = None  # name of a group below labels/
    time: int = 0  # moment to read, where there is a time axis
    missing: Literal["error", "fill"] = "error"  # what an absent chunk means: a loss, or the array's fill value

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise UserError(
                f"weight = {self.weight} of {self.path} must be above 0; leave the entry out to give it no samples"
            )

    def open(self) -> "OmeZarrSource":
        """Read the metadata and open the arrays; no voxel is read yet."""
        return OmeZarrSource(self)


class OmeZarrSource:
    """One image of one level."""

    def __init__(self, settings: OmeZarrConfig) -> None:
        self.config = settings
        self.image = read_multiscale(settings.path)
        self.level = self._pick_level()
        self._array = _Array(self.image, self.level, fill=settings.missing == "fill", time=settings.time)
        self.axes = tuple(self.image.axes[i].name for i in self.image.spatial)
        self.dtype = self._array.dtype
        self.variables, self._channels = self._pick_variables()
        self._region = resolve_region(self.axes, self._array.shape, settings.region)
        chunk = self._array.chunk
        self.items: Sequence[Item] = (
            Item(
                name=Path(settings.path).name or settings.path,
                shape=tuple(window.stop - window.start for window in self._region),
                chunk=chunk,
                origin=tuple(window.start % size for window, size in zip(self._region, chunk, strict=True)),
                spacing=self.image.spacing(self.level),
                unit=self.image.unit(),
            ),
        )
        self._labels = self._open_labels(settings.labels) if settings.labels is not None else None
        self.label_dtype = None if self._labels is None else self._labels.dtype
        self.label_names = {} if self._labels is None else name_labels(self._labels.image)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """[C, *spatial] of a window of the usable region."""
        return self._array.read(self._shift(item, region), self._channels)

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """The labels of a window, [*spatial]."""
        if self._labels is None:
            raise UserError(f"{self.config.path} was opened without labels; name a label group with `labels`")
        return self._labels.read(self._shift(item, region), None)[0]

    def describe(self) -> dict[str, Any]:
        item, level = self.items[0], self.image.levels[self.level]
        return {
            "kind": "ome_zarr",
            "path": self.config.path,
            "version": self.image.version,
            "axes": list(self.axes),
            "shape": list(item.shape),
            "region": {name: [w.start, w.stop] for name, w in zip(self.axes, self._region, strict=True)},
            "chunk": list(item.chunk),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": list(item.spacing),
            "unit": item.unit,
            "translation": [level.translation[i] for i in self.image.spatial],
            "level": self.level,
            "levels": [
                {"path": entry.path, "spacing": list(self.image.spacing(i))}
                for i, entry in enumerate(self.image.levels)
            ],
            "labels": list_labels(self.image.group),
            "items": 1,
        }

    def _shift(self, item: int, region: tuple[slice, ...]) -> tuple[slice, ...]:
        """A window of the usable region as a window of the array."""
        bounds = normalize_window(self.items[item].shape, region)
        return tuple(slice(w.start + lo, w.start + hi) for w, (lo, hi) in zip(self._region, bounds, strict=True))

    def _pick_level(self) -> int:
        wanted, level, count = self.config.spacing, self.config.level, len(self.image.levels)
        if wanted is not None:
            if level is not None:
                raise UserError(f"{self.config.path} is given both level and spacing; give one of them")
            level = choose_level(self.image, wanted)
            found = self.image.spacing(level)
            if any(abs(have - want) > TOLERANCE * want for have, want in zip(found, wanted, strict=True)):
                log.warning(
                    "%s has no level of spacing %s; level %d of %s is read as it is",
                    self.config.path,
                    wanted,
                    level,
                    found,
                )
        if level is not None and not 0 <= level < count:
            raise UserError(f"level = {level} does not exist in {self.config.path}; choose 0 to {count - 1}")
        return level or 0

    def _pick_variables(self) -> tuple[tuple[str, ...], list[int] | None]:
        """Names of the variables, and the channels that hold them where not all are read in order."""
        given, path = self.config.variables, self.config.path
        if given is not None and (not given or len(set(given)) < len(given)):
            raise UserError(f"variables = {given} of {path} must be different names, at least one; mend the list")
        count = self._array.num_channels
        if count is None:
            if given is not None and len(given) != 1:
                raise UserError(
                    f"variables = {given} names {len(given)} variables but {path} has no channel axis; give one name"
                )
            return tuple(given or ("image",)), None
        names = self.image.channels
        if names is None or len(names) != count or len(set(names)) < count:
            if given is None:
                return tuple(f"channel{i}" for i in range(count)), None
            if len(given) != count:
                raise UserError(
                    f"variables = {given} names {len(given)} variables but {path} has {count} unnamed channels; "
                    "name each"
                )
            return tuple(given), None
        if given is None or tuple(given) == names:
            return names, None
        unknown = [name for name in given if name not in names]
        if unknown and len(given) != count:
            raise UserError(
                f"variables = {given}: {path} has no {unknown[0]!r}; "
                f"choose from {', '.join(names)}, or rename all {count}"
            )
        if unknown:  # as many names as channels: the recipe renames them in their order
            return tuple(given), None
        return tuple(given), [names.index(name) for name in given]

    def _open_labels(self, name: str) -> "_Array":
        known = list_labels(self.image.group)
        if name not in known:
            have = f"choose from {', '.join(known)}" if known else "it has no labels"
            raise UserError(f"labels = {name!r} is not a label group of {self.config.path}; {have}")
        labels = read_multiscale(safe_join(self.image.group / "labels", name))
        axes = tuple(labels.axes[i].name for i in labels.spatial)
        if axes != self.axes:
            raise UserError(
                f"labels {name!r} of {self.config.path} have the axes {', '.join(axes)}, "
                f"the image {', '.join(self.axes)}; write them in the same order"
            )
        spacing = self.image.spacing(self.level)
        for number in range(len(labels.levels)):
            if np.allclose(labels.spacing(number), spacing, rtol=TOLERANCE, atol=0):
                array = _Array(labels, number, fill=self.config.missing == "fill", time=self.config.time)
                if array.shape != self._array.shape or not _same_place(self.image, self.level, labels, number):
                    raise UserError(
                        f"labels {name!r} of {self.config.path} do not cover the image: shape {array.shape} instead of "
                        f"{self._array.shape}, or another translation; resample them onto the image"
                    )
                if array.dtype.kind not in "biu" or (array.num_channels or 1) > 1:
                    raise UserError(
                        f"labels {name!r} of {self.config.path} have {array.num_channels or 1} channels of type "
                        f"{array.dtype}; they must be one whole number a voxel, the number of its class"
                    )
                return array
        raise UserError(
            f"labels {name!r} of {self.config.path} have no level of spacing {list(spacing)}; "
            "choose another level of the image"
        )


class _Array:
    """One array of a pyramid, opened once; reads come from any thread."""

    def __init__(self, image: Multiscale, level: int, *, fill: bool, time: int) -> None:
        self.image, self.fill, self.path = image, fill, image.array_path(level)
        self.channel_axis, time_axis = image.find("channel"), image.find("time")
        self._store = store = self._open_store()
        if store.rank != len(image.axes):
            raise UserError(
                f"{self.path} has {store.rank} dimensions but its metadata names {len(image.axes)} axes; "
                "mend the metadata"
            )
        if time_axis is not None and not 0 <= time < store.shape[time_axis]:
            raise UserError(f"time = {time} does not exist in {image.group}; choose 0 to {store.shape[time_axis] - 1}")
        self._fixed = {} if time_axis is None else {time_axis: time}
        chunk = store.chunk_layout.read_chunk.shape or store.shape
        self.shape = tuple(int(store.shape[i]) for i in image.spatial)
        self.chunk = tuple(int(chunk[i] or store.shape[i]) for i in image.spatial)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        if self.dtype.kind not in "biuf":
            raise UserError(
                f"{self.path} has the type {self.dtype}; only whole numbers, floats and booleans can be read"
            )
        self.num_channels = None if self.channel_axis is None else int(store.shape[self.channel_axis])

    def read(self, region: tuple[slice, ...], channels: list[int] | None) -> np.ndarray:
        """[C, *spatial]"""
        window: list[Any] = [slice(None)] * len(self.image.axes)
        for axis, part in zip(self.image.spatial, region, strict=True):
            window[axis] = part
        for axis, index in self._fixed.items():
            window[axis] = index
        if self.channel_axis is not None and channels is not None:
            window[self.channel_axis] = channels
        try:
            values = np.asarray(self._store.oindex[tuple(window)].read().result())
        except READ_ERRORS as error:
            raise UserError(self._explain(str(error))) from error
        if self.channel_axis is None:
            return values[None]
        # A time axis before the channels is gone by now.
        place = self.channel_axis - sum(axis < self.channel_axis for axis in self._fixed)
        return np.ascontiguousarray(np.moveaxis(values, place, 0))

    def _open_store(self) -> "tensorstore.TensorStore":
        import tensorstore

        found = load_attributes(self.path) if self.path.is_dir() else None
        if found is None or found[0] != "array":
            raise UserError(
                f"level {self.path.name!r} of {self.image.group} is not a zarr array; "
                "restore it or choose another level"
            )
        threads = share_of_cores(find_world())
        spec = {
            "driver": "zarr3" if (self.path / "zarr.json").is_file() else "zarr",
            "kvstore": {"driver": "file", "path": f"{self.path.resolve()}/"},
            "fill_missing_data_reads": self.fill,
            "recheck_cached_data": "open",
            "context": {
                "cache_pool": {"total_bytes_limit": CACHE_BYTES},
                # This process's share of the host, not all of it for every rank.
                "data_copy_concurrency": {"limit": threads},
                "file_io_concurrency": {"limit": max(4, threads)},
            },
        }
        try:
            return tensorstore.open(spec, open=True, read=True).result()
        except READ_ERRORS as error:
            raise UserError(
                f"{self.path} cannot be opened as zarr ({_first_line(error)}); restore or rewrite it"
            ) from error

    def _explain(self, problem: str) -> str:
        if "is missing" in problem and "NOT_FOUND" in problem:
            lost = problem.partition("NOT_FOUND: ")[2]
            return (
                f"{lost}: restore the file, leave it out with `region`, "
                "or set `missing: fill` if the writer left out chunks that hold only the fill value"
            )
        return f"{self.path} cannot be read ({_first_line(problem)}); restore the file or leave it out with `region`"


def list_labels(group: Path) -> list[str]:
    """Names of the label groups of an image."""
    found = load_attributes(group / "labels") if (group / "labels").is_dir() else None
    if found is None:
        return []
    block = found[1].get("ome") or found[1]
    names = block.get("labels") if isinstance(block, dict) else None
    return [name for name in names or [] if isinstance(name, str)]


def name_labels(labels: Multiscale) -> dict[int, str]:
    """Names of the label values, from the properties of a label image."""
    block = labels.attributes.get("image-label")
    entries = block.get("properties") if isinstance(block, dict) else None
    named = [(e.get("label-value"), e.get("name")) for e in entries or [] if isinstance(e, dict)]
    return {value: name for value, name in named if isinstance(value, int) and isinstance(name, str) and name}


def _same_place(image: Multiscale, level: int, other: Multiscale, number: int) -> bool:
    here = [image.levels[level].translation[i] for i in image.spatial]
    there = [other.levels[number].translation[i] for i in other.spatial]
    spacing = image.spacing(level)
    return all(abs(a - b) <= TOLERANCE * s for a, b, s in zip(here, there, spacing, strict=True))


def _first_line(problem: object) -> str:
    return str(problem).partition(" [tensorstore_spec=")[0].splitlines()[0]
