"""Volumes in hierarchies of zarr (2 and 3) and N5, with or without OME-Zarr metadata (NGFF 0.4, 0.5 and what 0.6 adds).

- a path to an array of a pyramid (`volume.zarr/recon-1/em/fibsem-uint8/s0`) reads that level alone, at its place in the
  world; a path to the group above it offers all levels; a path further up is refused, with what lies below
- a path with stars stands for many volumes (`data/**/s0`), and so does a folder of hierarchies; each is an item
- the level is named by number or found by voxel size; region and windows are in voxels of that level
- a channel axis becomes named variables; of a time axis one moment is read
- labels may lie elsewhere in the hierarchy, and cover a small box of the volume: places are in world coordinates.
  Volumes of OpenOrganelle are given as `<volume>.zarr/recon-1/em/fibsem-uint8` (all levels) or with `/s0` (one), their
  labels as `recon-1/labels/groundtruth/crop1/mito`
- N5 counts axes from the fastest: its `dimensions`, `blockSize` and `pixelResolution` are x, y, z, which is z, y, x
  here. A `transform`, as OpenOrganelle writes it, is in C order already
- a chunk that is absent or broken is an error that names its file, never silent zeros, unless the recipe says otherwise
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from vitrail.data.chunks.decoded import ChunkReader, lost_array, open_array, shared, spans_of
from vitrail.data.chunks.nodes import attributes_of, list_arrays, shifted_origin, told_axes, told_place
from vitrail.data.files.patterns import fill_stars, find_volumes, has_stars
from vitrail.data.files.places import Place, Remote, find_place
from vitrail.data.formats.ngff import Multiscale, load_attributes, read_multiscale, safe_join
from vitrail.data.grid import GridConfig, GridSource
from vitrail.data.source import Reads, map_labels
from vitrail.data.stored import Entry, Stored, Window, by
from vitrail.errors import BadData, UserError
from vitrail.recipe import config

NOT_SPACE = {"channel": "c", "time": "t"}
_SHOWN = 12
MOST_LEVELS = 64  # of a volume


class HierarchySource(GridSource):
    """A source whose arrays are read chunk by chunk; crops can be copied straight to their place in a batch."""

    def __init__(self, settings: GridConfig, entries: Sequence[Entry], *, kind: str, notes: Sequence[str] = ()) -> None:
        super().__init__(settings, entries, kind=kind, notes=notes)
        picked = [channel for _, channel in self._picked]
        images = [entry.images[0] for entry in self.entries]
        labels = [entry.labels for entry in self.entries]
        self.keeps_chunks = all(stored.chunk_reader is not None for stored in images)
        self.reads_straight = self.keeps_chunks and all(stored.dtype == self.dtype for stored in images)
        self.reads_straight &= picked == list(range(picked[0], picked[0] + len(picked)))
        self.labels_straight = self.label_dtype is not None and all(
            stored is not None and stored.chunk_reader is not None and stored.dtype == self.label_dtype
            for stored in labels
        )

    def reads(self) -> Reads:
        return super().reads()._replace(hierarchy=True)

    def read_into(self, item: int, region: Window, out: np.ndarray, touched: Any = None) -> None:
        """Read as `read` does, into memory that is there: [C, *spatial], of a type that holds the values.

        What is not `touched`, a function of the chunks' places in the region, may stay as it was.
        """
        if not self.reads_straight or (self.dtype.kind == "f" and out.dtype != self.dtype):
            out[...] = self.read(item, region)
            return
        reader, target, window = self.locate(item, region, out)
        chosen = None
        if touched is not None and self.dtype.kind != "f":  # what was in memory may be no number
            chosen = self._chosen(item, reader, window, touched)
        shared.read_into(reader, target, window, chosen)
        try:
            self.finish(out)
        except BadData:
            out[...] = self.read(item, region)  # which tells where it is

    def _chosen(self, item: int, reader: ChunkReader, window: Window, touched: Any) -> np.ndarray | None:
        """Tell which chunks around a window are touched, along the axes of the array."""
        axes = self.entries[item].images[0].axes
        space = [axis for axis, name in enumerate(axes) if name not in NOT_SPACE.values()]
        spans = [spans_of(reader.grid[axis], window[axis]) for axis in space]
        found = touched(spans)
        return None if found is None else np.expand_dims(found, [a for a in range(len(axes)) if a not in space])

    def locate(
        self, item: int, region: Window, out: np.ndarray, *, labels: bool = False
    ) -> tuple[ChunkReader, np.ndarray, Window]:
        """Find the array of the image (or of the labels, for `out` [*spatial]), `out` with its axes, and the window.

        Voxels that were copied from there become those of `read` and `read_labels` by `finish` and `finish_labels`.
        """
        entry, window = self.entries[item], self._shift(item, region)
        if labels:
            stored, window, channels, out = entry.labels, self._on_labels(item, window), slice(0, 1), out[None]
            assert stored is not None
        else:
            stored, channels = entry.images[0], self._needed[0]
        rest = [name for name in stored.axes if name != "t"]
        target = np.moveaxis(out, 0, rest.index("c")) if "c" in rest else out[0]
        if "t" in stored.axes:
            target = np.expand_dims(target, stored.axes.index("t"))
        return stored.chunk_reader, target, self._full_window(entry, stored, window, channels)

    def finish(self, values: np.ndarray) -> None:
        """Fill voxels that hold no number, or refuse them, as `nodata` says."""
        if values.dtype.kind != "f":
            return
        bad = ~np.isfinite(values)
        if bad.any():
            if self.config.nodata != "fill":
                raise BadData("some value is NaN or infinite; `read` tells where")
            values[bad] = self.config.fill_value

    def finish_labels(self, labels: np.ndarray) -> None:
        """Change stored values to those of classes."""
        if self.config.label_map:
            labels[...] = map_labels(labels, self.config.label_map)

    def _check(self, stored: Stored) -> None:
        if 0 not in stored.shape:  # a level that is not there matters when it is chosen
            super()._check(stored)

    def _level(self, stored: Stored) -> int:
        number = super()._level(stored)
        chosen = (stored, *stored.levels)[number]
        if 0 in chosen.shape:
            chosen.read(())  # says what is wrong with it, where it is not there
            raise BadData(f"{chosen.name} is empty: its shape is {by(chosen.shape)}; restore or remove it")
        return number


def open_image(image: Multiscale, *, fill: bool, unit: str | None = None) -> Stored:
    """Open the levels of an NGFF image; those that are not there are refused when they are asked for.

    `unit` is that of the recipe's voxel size, which counts where the file has several.
    """
    axes = [NOT_SPACE.get(axis.kind, axis.name) for axis in image.axes]
    levels = []
    for number in range(len(image.levels)):
        place = image.array_path(number)
        known: dict[str, Any] = {
            "spacing": {axes[i]: image.levels[number].scale[i] for i in image.spatial},
            "origin": {axes[i]: image.levels[number].translation[i] for i in image.spatial},
            "unit": image.unit(unit),
            "channels": image.channels if "c" in axes else None,
        }
        node = attributes_of(place) if place.is_dir() else None
        if node is None or node[0] != "array":
            problem = UserError(
                f"level {place.name!r} of {image.group} is not a zarr array; restore it or choose another level"
            )
            levels.append(lost_array(place, axes, problem, **known))
        else:
            levels.append(open_array(place, axes, fill=fill, **known))
    return with_levels(levels)


def with_levels(levels: Sequence[Stored]) -> Stored:
    first, *others = levels
    if 0 in first.shape and all(0 in level.shape for level in others):
        first.read(())
    if 0 in first.shape:  # its type and axes stand for all
        whole = next(level for level in others if 0 not in level.shape)
        first = replace(first, dtype=whole.dtype)
    return replace(first, levels=tuple(others))


def open_volume(place: Place, *, kind: str, fill: bool, unit: str | None = None) -> Stored:
    """Open what lies at a path: an array, or the levels of a group."""
    if not place.exists():
        raise UserError(f"data path {str(place)!r} does not exist; check the spelling")
    node = attributes_of(place)
    if node is not None and node[0] == "array":
        return _open_alone(place, node[1], kind=kind, fill=fill, unit=unit)
    attributes = {} if node is None else node[1]
    block = attributes.get("ome") or attributes
    if kind == "zarr" and isinstance(block, dict) and block.get("multiscales"):
        return open_image(read_multiscale(place), fill=fill, unit=unit)
    levels = _find_levels(place, block)
    if levels:
        return with_levels([_open_alone(level, own, kind=kind, fill=fill, unit=unit) for level, own in levels])
    arrays = list_arrays(place)
    if len(arrays) == 1:
        return open_volume(arrays[0], kind=kind, fill=fill, unit=unit)
    if node is None and not arrays:
        wanted = "attributes.json" if kind == "n5" else "zarr.json, .zarray or .zgroup"
        raise UserError(f"{place} is not in a {kind} hierarchy: it has no {wanted}; give the path of an array or group")
    names = [str(array)[len(str(place)) + 1 :] for array in arrays]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    inside = f"it holds the arrays {', '.join(names[:_SHOWN])}{more}" if names else "no array lies below it"
    advice = f"give one of them, or the group above its levels, as path, such as {arrays[0]}" if arrays else "check it"
    raise UserError(f"{place} is a group, and no pyramid of one volume: {inside}; {advice}")


def _find_levels(group: Place, block: dict[str, Any]) -> list[tuple[Place, dict[str, Any]]]:
    """Find the arrays s0, s1, ... of a group, or those that it lists, with their attributes."""
    listed = block.get("multiscales")
    names: list[str] = []
    if isinstance(listed, list) and listed and isinstance(listed[0], dict):
        names = [e["path"] for e in listed[0].get("datasets") or [] if isinstance(e, dict) and "path" in e]
    if not all(isinstance(n, str) and re.fullmatch(r"[\w.-]+", n) and n not in (".", "..") for n in names):
        names = []
    if not names:
        found = [child.name for child in group.iterdir() if re.fullmatch(r"s\d+", child.name)]
        names = sorted(found, key=lambda name: int(name[1:]))
    if not names and isinstance(group, Remote):
        names = ["s0"]
        while (node := attributes_of(group / f"s{len(names)}")) is not None and node[0] == "array":
            if len(names) == MOST_LEVELS:
                raise BadData(f"{group} has more than {MOST_LEVELS} levels, which no volume can; give one of them")
            names.append(f"s{len(names)}")
    nodes = [(group / name, attributes_of(group / name)) for name in names]
    return [(place, node[1]) for place, node in nodes if node is not None and node[0] == "array"]


def _open_alone(place: Place, attributes: dict[str, Any], *, kind: str, fill: bool, unit: str | None = None) -> Stored:
    """Open one array, at the place that the pyramid around it or its own attributes tell."""
    around = attributes_of(place.parent)
    group = around[1] if around is not None and around[0] == "group" else {}
    block = group.get("ome") or group
    if kind == "zarr" and isinstance(block, dict) and block.get("multiscales"):
        image = read_multiscale(place.parent)
        names = [level.path for level in image.levels]
        if place.name in names:
            stored = open_image(image, fill=fill, unit=unit)
            return replace((stored, *stored.levels)[names.index(place.name)], levels=())
    shifts: Any = None
    if kind == "n5":  # the group tells the size of the finest voxels, its arrays or their list by how much they differ
        scales, number = group.get("scales"), re.fullmatch(r"s(\d+)", place.name)
        told: dict[str, Any] = {key: group[key] for key in ("pixelResolution", "resolution", "units") if key in group}
        if isinstance(scales, list) and number and int(number[1]) < len(scales):
            finest = attributes_of(place.parent / "s0") or ("", {})
            # A size of its own is that of its voxels, unless all levels repeat the size of the finest.
            if _sizes(attributes) in ({}, _sizes(finest[1])):
                told["downsamplingFactors"] = scales[int(number[1])]
            else:
                shifts = scales[int(number[1])]
        attributes = told | attributes
    axes = told_axes(place, attributes)
    stored = replace(open_array(place, axes, fill=fill), guessed=axes is None)
    placed = told_place(attributes, stored.axes, reversed_axes=kind == "n5")
    if shifts is not None and placed and not {"transform", "offset"} & set(attributes):
        placed["origin"] = shifted_origin(placed["spacing"], shifts)
    return replace(stored, **placed)


def _sizes(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: attributes[key] for key in ("transform", "pixelResolution", "resolution") if key in attributes}


def open_labels(place: Place, labels: str, *, kind: str, fill: bool, unit: str | None = None) -> Stored:
    """Open labels by a path: below the volume, from the top of its hierarchy, or anywhere."""
    tops = [up for up in (place, *place.parents) if up.name.lower().endswith((".zarr", ".n5"))]
    tried = [place.joinpath(*labels.split("/")), *(up.joinpath(*labels.split("/")) for up in tops), find_place(labels)]
    for candidate in tried:
        if candidate.exists() and (attributes_of(candidate) is not None):
            return open_volume(candidate, kind=kind, fill=fill, unit=unit)
    raise UserError(
        f"labels = {labels!r} are not found: neither {tried[0]} nor {tried[-1]} is an array or group; give a path "
        f"inside {tops[-1] if tops else place}, or a whole one"
    )


def _options(c: GridConfig) -> dict[str, Any]:
    """Return how arrays are opened: the unit is that of the voxel size that the recipe gives, if it gives one."""
    return {"fill": c.missing == "fill", "unit": c.unit if c.voxel_size is not None else None}


def _open(c: GridConfig, kind: str) -> HierarchySource:
    options = _options(c)

    def open_one(path: str, labels: str | None) -> Entry:
        place = find_place(path)
        image = open_volume(place, kind=kind, **options)
        drawn = None if labels is None else open_labels(place, labels, kind=kind, **options)
        return Entry(place.name or str(place), (image,), drawn)

    return _open_all(c, kind, open_one)


def _open_all(c: GridConfig, kind: str, open_one: Callable[[str, str | None], Entry]) -> HierarchySource:
    """Open the volume at a path, or all that it stands for; what lies in a folder of labels only if it names that."""
    found, notes = find_volumes(c.path), []
    if has_stars(c.path) and "labels" not in c.path.split("/"):
        kept = [each for each in found if each.is_folder and "labels" not in each.name.split("/")]
        if kept and len(kept) < len(found):
            lost = next(each.path for each in found if each not in kept)
            notes.append(f"{c.path}: {len(found) - len(kept)} labels and files are left out, such as {lost}")
        found = kept or found
    entries = []
    for each in found:
        starred = c.labels is not None and has_stars(c.labels)
        labels = fill_stars(c.labels or "", each.stars, where=f"labels = {c.labels!r}") if starred else c.labels
        entry = open_one(each.path, labels)
        entries.append(replace(entry, name=each.name) if each.name else entry)
    drawn = {str(entry.labels.name) for entry in entries if entry.labels is not None}
    if c.labels is not None and not has_stars(c.labels) and len(drawn) < len(entries):
        raise UserError(
            f"labels = {c.labels!r} are those of one volume, and {c.path} stands for {len(entries)}; name labels "
            "inside each volume, or write stars, which stand for what those of `path` do"
        )
    return HierarchySource(c, entries, kind=kind, notes=notes)


@config
class ZarrConfig(GridConfig):
    """An array, or a group whose arrays are the levels of one volume."""

    kind: Literal["zarr"] = "zarr"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        return _open(self, "zarr")


@config
class N5Config(GridConfig):
    """An array, or a group whose arrays s0, s1, ... are the levels of one volume."""

    kind: Literal["n5"] = "n5"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        return _open(self, "n5")


@config
class OmeZarrConfig(GridConfig):
    """An OME-Zarr image group, which may lie inside a bigger zarr hierarchy; `labels` names a group below labels/."""

    kind: Literal["ome_zarr"] = "ome_zarr"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        return _open_all(self, "ome_zarr", self._open_one)

    def _open_one(self, path: str, labels: str | None) -> Entry:
        image = read_multiscale(path)
        stored = open_image(image, **_options(self))
        drawn = None if labels is None else self._open_labels(image, labels)
        levels = [{"path": e.path, "spacing": list(image.spacing(i))} for i, e in enumerate(image.levels)]
        facts = {"version": image.version, "levels": levels, "labels": list_labels(image.group)}
        return Entry(image.group.name or str(image.group), (stored,), drawn, facts=facts)

    def _open_labels(self, image: Multiscale, name: str) -> Stored:
        known = list_labels(image.group)
        if name in known:
            labels = read_multiscale(safe_join(image.group / "labels", name))
            return replace(open_image(labels, **_options(self)), names=name_labels(labels))
        if "/" in name:  # elsewhere in the hierarchy
            return open_labels(image.group, name, kind="zarr", **_options(self))
        have = f"choose from {', '.join(known)}" if known else "it has no labels"
        raise UserError(f"labels = {name!r} is not a label group of {self.path}; {have}")


def list_labels(group: Place) -> list[str]:
    """List the names of the label groups of an image."""
    found = load_attributes(group / "labels") if (group / "labels").is_dir() else None
    if found is None:
        return []
    block = found[1].get("ome") or found[1]
    names = block.get("labels") if isinstance(block, dict) else None
    return [name for name in names or [] if isinstance(name, str)]


def name_labels(labels: Multiscale) -> dict[int, str]:
    """Return the names of the label values, from the properties of a label image."""
    block = labels.attributes.get("image-label")
    entries = block.get("properties") if isinstance(block, dict) else None
    named = [(e.get("label-value"), e.get("name")) for e in entries or [] if isinstance(e, dict)]
    return {value: name for value, name in named if isinstance(value, int) and isinstance(name, str) and name}
