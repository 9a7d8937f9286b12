"""Zarr arrays and hierarchies (versions 2 and 3) without NGFF metadata, or with: one array, or a group of levels.

Volumes of OpenOrganelle are given as `<volume>.zarr/recon-1/em/fibsem-uint8` (all levels) or with `/s0` (one), their
labels as `recon-1/labels/groundtruth/crop1/mito`: the part of the volume that the labels cover is used.
"""

from typing import Literal

from vitrail.data.grid import GridConfig
from vitrail.data.hierarchy import HierarchySource, open_labels, open_volume
from vitrail.data.places import find_place
from vitrail.data.stored import Entry
from vitrail.recipe import config


@config
class ZarrConfig(GridConfig):
    """An array, or a group whose arrays are the levels of one volume."""

    kind: Literal["zarr"] = "zarr"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        place, fill = find_place(self.path), self.missing == "fill"
        unit = self.unit if self.voxel_size is not None else None
        image = open_volume(place, kind="zarr", fill=fill, unit=unit)
        labels = None if self.labels is None else open_labels(place, self.labels, kind="zarr", fill=fill, unit=unit)
        return HierarchySource(self, Entry(place.name or str(place), (image,), labels), kind="zarr")
