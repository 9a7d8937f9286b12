"""N5 arrays and groups of levels.

N5 counts axes from the fastest: its `dimensions`, `blockSize` and `pixelResolution` are x, y, z, which is z, y, x here.
A `transform`, as OpenOrganelle writes it, is in C order already.
"""

from typing import Literal

from vitrail.data.grid import GridConfig
from vitrail.data.hierarchy import HierarchySource, open_labels, open_volume
from vitrail.data.places import find_place
from vitrail.data.stored import Entry
from vitrail.recipe import config


@config
class N5Config(GridConfig):
    """An array, or a group whose arrays s0, s1, ... are the levels of one volume."""

    kind: Literal["n5"] = "n5"

    def open(self) -> HierarchySource:
        """Read the metadata; no voxel is read yet."""
        place, fill = find_place(self.path), self.missing == "fill"
        unit = self.unit if self.voxel_size is not None else None
        image = open_volume(place, kind="n5", fill=fill, unit=unit)
        labels = None if self.labels is None else open_labels(place, self.labels, kind="n5", fill=fill, unit=unit)
        return HierarchySource(self, Entry(place.name or str(place), (image,), labels), kind="n5")
