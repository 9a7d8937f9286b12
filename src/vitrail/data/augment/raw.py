"""What a loader hands to augmentation: windows as they were read, already on the device."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from vitrail.layers.parts import Slab


@dataclass
class Raw:
    """Samples as they lie in their files; each fills the first voxels of the room, the rest means nothing."""

    counters: list[int]
    values: Tensor  # [B, C, *room] in the type of the data; of slabs flat, [B, C, voxels]
    labels: Tensor | None = None  # [B] the class of each item, or [B, *room] of each voxel
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # voxels of each sample's window; all if empty
    scales: list[tuple[float, ...]] = field(default_factory=list)  # wanted spacing / spacing read; 1 if empty
    spacings: list[tuple[float, ...]] = field(default_factory=list)  # physical size of a voxel read; 1 if empty
    orientations: list[int] = field(default_factory=list)  # codes of orientations(crop); none if empty
    sources: list[int] = field(default_factory=list)
    variables: tuple[str, ...] = ()
    slab: Slab | None = None  # of each crop, where ranks share samples
    statistics: tuple[Tensor, Tensor] | None = None  # [B, C] mean and std, where entries have their own

    def narrow(self, start: int, stop: int) -> "Raw":
        """Some of the samples."""
        part = slice(start, stop)
        return replace(
            self,
            counters=self.counters[part],
            values=self.values[part],
            labels=None if self.labels is None else self.labels[part],
            sizes=self.sizes[part],
            scales=self.scales[part],
            spacings=self.spacings[part],
            orientations=self.orientations[part],
            sources=self.sources[part],
            statistics=None if self.statistics is None else (self.statistics[0][part], self.statistics[1][part]),
        )
