"""OME-Zarr images and volumes (NGFF 0.4, 0.5 and what 0.6 adds), read in windows.

- the level is named by number or found by voxel size; region and windows are in voxels of that level
- a channel axis becomes named variables; of a time axis one moment is read
- a chunk that is absent or broken is an error that names its file, never silent zeros, unless the recipe says otherwise
"""

from dataclasses import replace
from typing import Literal

from vitrail.data.grid import GridConfig
from vitrail.data.hierarchy import HierarchySource, open_image, open_labels
from vitrail.data.ngff import Multiscale, load_attributes, read_multiscale, safe_join
from vitrail.data.places import Place
from vitrail.data.stored import Entry, Stored
from vitrail.errors import UserError
from vitrail.recipe import config


@config
class OmeZarrConfig(GridConfig):
    """An OME-Zarr image group, which may lie inside a bigger zarr hierarchy; `labels` names a group below labels/."""

    kind: Literal["ome_zarr"] = "ome_zarr"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        image = read_multiscale(self.path)
        stored = open_image(image, fill=self.missing == "fill", unit=self._unit())
        labels = None if self.labels is None else self._open_labels(image, self.labels)
        levels = [{"path": e.path, "spacing": list(image.spacing(i))} for i, e in enumerate(image.levels)]
        facts = {"version": image.version, "levels": levels, "labels": list_labels(image.group)}
        entry = Entry(image.group.name or str(image.group), (stored,), labels, facts=facts)
        return HierarchySource(self, entry, kind="ome_zarr")

    def _unit(self) -> str | None:
        """The unit of the voxel size that the recipe gives, whatever those of the file are."""
        return self.unit if self.voxel_size is not None else None

    def _open_labels(self, image: Multiscale, name: str) -> Stored:
        known, fill = list_labels(image.group), self.missing == "fill"
        if name in known:
            labels = read_multiscale(safe_join(image.group / "labels", name))
            return replace(open_image(labels, fill=fill, unit=self._unit()), names=name_labels(labels))
        if "/" in name:  # elsewhere in the hierarchy
            return open_labels(image.group, name, kind="zarr", fill=fill, unit=self._unit())
        have = f"choose from {', '.join(known)}" if known else "it has no labels"
        raise UserError(f"labels = {name!r} is not a label group of {self.path}; {have}")


def list_labels(group: Place) -> list[str]:
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
