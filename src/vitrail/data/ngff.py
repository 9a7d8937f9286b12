"""NGFF (OME-Zarr) metadata: axes, levels, and where each voxel lies in the world.

- reads 0.4 (zarr v2), 0.5 (zarr v3) and what 0.6 adds around them; level names are whatever the file says
- the transform of a level comes first, then the one of the whole pyramid; a missing unit stays unknown (None)
- a path in the metadata never leads out of its group
"""

import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vitrail import disk, foreign
from vitrail.data.places import Place, find_folders, find_place, read_facts
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
        """Numbers of the spatial axes."""
        return tuple(i for i, axis in enumerate(self.axes) if axis.kind == "space")

    def find(self, kind: str) -> int | None:
        """Number of the axis of this kind (time or channel), or None."""
        return next((i for i, axis in enumerate(self.axes) if axis.kind == kind), None)

    def spacing(self, level: int) -> tuple[float, ...]:
        return tuple(self.levels[level].scale[i] for i in self.spatial)

    def unit(self, given: str | None = None) -> str | None:
        """The unit that the spatial axes share; where they have several, the one that is given."""
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
    """("group" or "array", attributes) of a zarr node of either format, or None where there is no zarr metadata."""
    try:
        if _is_there(node / "zarr.json"):
            document = _load_json(node / "zarr.json")
            attributes = document.get("attributes") or {}
            if not isinstance(attributes, dict):
                raise UserError(f"{node / 'zarr.json'} has attributes that are no JSON object; rewrite the file")
            return str(document.get("node_type", "group")), attributes
        for name, kind in ((".zgroup", "group"), (".zarray", "array")):
            if _is_there(node / name):
                beside = node / ".zattrs"
                return kind, _load_json(beside) if _is_there(beside) else {}
        if _is_there(node / ".zattrs"):  # some writers leave .zgroup out
            return "group", _load_json(node / ".zattrs")
    except OSError as error:
        raise UserError(
            f"the zarr metadata of {node} cannot be read ({error.strerror}); check its permissions"
        ) from error
    return None


def _is_there(file: Place) -> bool:
    """Whether a file of metadata is there; what is there but no plain file is not passed over as if it were not."""
    if isinstance(file, Path):
        check_plain(file)
    return file.is_file()


def _load_json(path: Place) -> dict[str, Any]:
    try:
        document = read_facts(path)
    except UserError:
        raise
    except ValueError as error:  # broken JSON, or bytes that are not text
        raise UserError(f"{path} is not valid JSON ({error}); restore or rewrite the file") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} must hold a JSON object; restore or rewrite the file")
    return document


def read_multiscale(path: str | Place) -> Multiscale:
    """The first pyramid of the image or label group at `path`."""
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
    """Why there is no image here, and where one is."""
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
    """OME-Zarr images below a group of a bigger hierarchy, without looking into arrays."""

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
    """The axes of the coordinate system that the levels are mapped to (NGFF 0.6)."""
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
    """Sequences (NGFF 0.6) laid out flat."""
    flat: list[dict[str, Any]] = []
    for transform in transforms:
        flat += _flatten(transform["transformations"]) if transform["type"] == "sequence" else [transform]
    return flat


def _compose(
    group: Place, name: str, steps: list[dict[str, Any]], num_axes: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """One scale and one translation out of several, applied in their order."""
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
    """The place of a path named in the metadata of a group; refuses what leads out of the group."""
    pure = PurePosixPath(path) if isinstance(path, str) else PurePosixPath()
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in str(path) or "\0" in str(path):
        raise UserError(f"{group} names the path {path!r}, which does not lie inside it; use a plain name such as 's0'")
    place = group.joinpath(*pure.parts)
    inside: Any = place.resolve()
    if not inside.is_relative_to(group.resolve()):
        raise UserError(f"{group} names the path {path!r}, a link that leads out of it; copy the data into the group")
    return place
