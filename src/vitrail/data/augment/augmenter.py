"""Augmentation in its order, from the windows that were read to the batch that an objective sees.

Sections are spoilt in the window; then the crop is cut from it in one pass (orientation, flip, rotation, scale, shear,
bend and what is left of a wanted voxel size in one matrix); then blur, gamma, contrast, brightness, noise and colour;
then samples are mixed. Where nothing but orientations is asked for, values keep their type and every intensity; where
flips come to it and windows are crops, nothing is resampled either.

What a loader hands to augmentation: windows as they were read, already on the device.

Augmentations of plugins (`data.augment.more`) get the crops after colours have changed and before samples are mixed.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.data.augment.affine import resample, resample_labels
from vitrail.data.augment.geometry import Geometry, Moves, flip_first, orient
from vitrail.data.augment.intensity import change_intensity, changes_intensity, jitter, mix, spoil
from vitrail.data.batch import Batch, Statistics
from vitrail.data.source import Item, without
from vitrail.draws import sent, uniforms
from vitrail.errors import UserError
from vitrail.layers.patches import Slab
from vitrail.recipe.sections import Augment


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
        each = ("counters", "values", "sizes", "scales", "spacings", "orientations", "sources")
        return replace(
            self,
            **{name: getattr(self, name)[part] for name in each},
            labels=None if self.labels is None else self.labels[part],
            statistics=None if self.statistics is None else (self.statistics[0][part], self.statistics[1][part]),
        )


@dataclass
class Crops:
    """Samples of a batch for an augmentation of a plugin; on a CPU they come one by one."""

    values: Tensor  # [B, C, *S] float32; may be changed in place
    labels: Tensor | None  # [B] the class of each item, or [B, *S] of each voxel
    mean: Tensor  # [B, C] of the data, in their units, on the device
    std: Tensor
    variables: tuple[str, ...]
    axes: tuple[str, ...]  # names of S
    counters: list[int]
    seed: int
    purpose: str

    def uniforms(self, number: int) -> Tensor:
        """Return so many random numbers in [0, 1) for each sample, [B, number]; they follow from its counter alone."""
        drawn = uniforms(self.seed, self.purpose, self.counters, number)
        return sent(torch.from_numpy(drawn).float(), self.values.device)


class Augmentation(Protocol):
    """A change of samples that a plugin adds, and its settings."""

    kind: str

    def apply(self, crops: Crops) -> Tensor:
        """Return the changed values; labels of voxels are changed in place."""


class Augmenter:
    """Windows in, batches out; what happens to a sample is a function of (seed, counter) alone."""

    def __init__(
        self,
        settings: Augment,  # the recipe's section data.augment
        crop: tuple[int, ...],
        *,
        seed: int,
        statistics: Statistics | None = None,
        labels: Literal["item", "voxel"] | None = None,
        num_classes: int | None = None,
        ignore: int | None = None,
        axes: tuple[str, ...] = (),  # names of the crop's axes; z, y, x if empty
    ):
        self.settings, self.crop, self.seed, self.statistics = settings, tuple(crop), seed, statistics
        self.labels, self.num_classes, self.ignore = labels, num_classes, ignore
        self.axes = axes or ("z", "y", "x")[-len(crop) :]
        self._check()
        self.geometry = Geometry(settings, self.crop, self.axes, seed)
        c = settings
        changes = bool(changes_intensity(c) or c.sections or c.jitter or c.more)
        self._only_flips = self.geometry.only_flips and not changes  # but for samples that are mixed
        # Whether samples are needed whole, whatever their window: for anything but turns by whole voxels.
        self.resamples = bool(self.geometry.moves or changes or c.mixup or c.cutmix)

    def window(self, item: Item) -> tuple[int, ...]:
        """Voxels of an item that one sample is cut from, for the worst draw; 1 across slices."""
        of_sample = (without(values, item.slices) for values in (item.shape, item.spacing, item.scale))
        found = self.geometry.window(*of_sample)
        return found if item.slices is None else (*found[: item.slices], 1, *found[item.slices :])

    def touched(self, *sample: Any) -> np.ndarray | None:
        """Find the boxes of its window that a sample is made of, by Geometry.touched(); None for all."""
        # Sections are spoilt by their neighbours.
        return None if self.settings.sections is not None else self.geometry.touched(*sample)

    def __call__(self, raw: Raw) -> Batch:
        codes = raw.orientations or [0] * len(raw.counters)
        differs = self._differs(raw)
        if not self.resamples and not differs:
            values, labels = orient(raw.values, codes, raw.slab), self._orient_labels(raw, codes)
            return Batch(raw.counters, values, labels, raw.variables, raw.slab, raw.statistics)
        assert raw.slab is None, "samples that are resampled are read whole"
        if self._only_flips and not differs:
            values, labels = self._flip(raw, codes)
        elif raw.values.device.type != "cpu" or len(raw.counters) == 1:
            values, labels = self._change(raw, self._draw(raw, codes))
        else:  # one by one: vectorised loops of the CPU round by the place of a number in its tensor
            moves = self._draw(raw, codes)
            parts = [self._change(raw.narrow(i, i + 1), moves[i : i + 1]) for i in range(len(raw.counters))]
            values = torch.cat([part[0] for part in parts])
            labels = raw.labels if self.labels != "voxel" else torch.cat([part[1] for part in parts])  # type: ignore[misc]
        soft = None
        if self.settings.mixup or self.settings.cutmix:
            assert labels is not None
            assert self.num_classes is not None
            values, soft = mix(values, labels, raw.counters, self.settings, self.seed, self.num_classes, raw.statistics)
        return Batch(raw.counters, values, labels, raw.variables, None, raw.statistics, soft)

    def _flip(self, raw: Raw, codes: list[int]) -> tuple[Tensor, Tensor | None]:
        """Do as _change() where crops are only flipped and turned, without sampling them."""
        flips = self.geometry.draw_flips(raw.counters) & self.geometry.draw_chance(raw.counters)[:, None]  # [B, n]
        codes = flip_first(self.crop, codes, flips)
        return orient(raw.values, codes).float(), self._orient_labels(raw, codes)

    def _orient_labels(self, raw: Raw, codes: list[int]) -> Tensor | None:
        if raw.labels is None or self.labels != "voxel":
            return raw.labels
        return orient(raw.labels[:, None], codes)[:, 0]

    def _draw(self, raw: Raw, codes: list[int]) -> Moves:
        n, number = len(self.crop), len(raw.counters)
        scales, spacings = raw.scales or [(1.0,) * n] * number, raw.spacings or [(1.0,) * n] * number
        return self.geometry.draw_many(raw.counters, self._sizes(raw), spacings, scales, codes)

    def _sizes(self, raw: Raw) -> list[tuple[int, ...]]:
        return raw.sizes or [tuple(raw.values.shape[2:])] * len(raw.counters)

    def _change(self, raw: Raw, moves: Moves) -> tuple[Tensor, Tensor | None]:
        """Everything but mixing; values become float32."""
        c, sizes = self.settings, self._sizes(raw)
        voxels = raw.labels if self.labels == "voxel" else None
        if c.sections is not None or changes_intensity(c) or c.more:
            mean, std = self._statistics(raw)
        if c.sections is not None:
            axis = 0 if c.sections.axis is None else self.axes.index(c.sections.axis)
            for i, (counter, size) in enumerate(zip(raw.counters, sizes, strict=True)):
                inside = tuple(slice(0, s) for s in size)
                sample = raw.values[i][(slice(None), *inside)]
                own = None if voxels is None else voxels[i][inside]
                spoil(sample, own, c.sections, axis, seed=self.seed, counter=counter, mean=mean[i], std=std[i])
        step = self.geometry.step
        values = resample(raw.values, moves, sizes, self.crop, step=step)
        labels = raw.labels if voxels is None else resample_labels(voxels, moves, sizes, self.crop, step=step)
        if changes_intensity(c):
            values = change_intensity(values, raw.counters, c, self.seed, mean, std)
        if c.jitter is not None:
            highest = 255.0 if raw.values.dtype == torch.uint8 else None
            values = jitter(values, raw.counters, c.jitter, self.seed, raw.variables, highest=highest)
        for number, own in enumerate(c.more):
            on_device = sent(mean, values.device), sent(std, values.device)
            purpose = f"augment.more.{number}.{own.kind}"
            crops = Crops(values, labels, *on_device, raw.variables, self.axes, raw.counters, self.seed, purpose)
            values = own.apply(crops)
        return values, labels

    def _differs(self, raw: Raw) -> bool:
        """Tell whether windows are no crops: items at another voxel size than wanted, or of which more was read."""
        room = self.crop if raw.slab is not None else tuple(raw.values.shape[2:])
        sizes = {room, *map(tuple, raw.sizes)} if raw.slab is None else {room}
        return sizes != {self.crop} or any(factor != 1 for scale in {*map(tuple, raw.scales)} for factor in scale)

    def _statistics(self, raw: Raw) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [B, C] that changes are relative to, on the host."""
        number, channels = raw.values.shape[:2]
        if raw.statistics is not None:
            return raw.statistics[0].float().cpu(), raw.statistics[1].float().cpu()
        if self.statistics is None:
            return torch.zeros(number, channels), torch.ones(number, channels)
        mean, std = self.statistics.tensors()
        return mean.float().expand(number, channels), std.float().expand(number, channels)

    def _check(self) -> None:
        """Refuse what the data or the objective cannot have."""
        c = self.settings
        named = {
            "flip": c.flip if isinstance(c.flip, tuple) else (),
            "rotate_axes": c.rotate_axes,
            "sections.axis": (c.sections.axis,) if c.sections is not None and c.sections.axis else (),
        }
        for where, names in named.items():
            strange = [name for name in names if name not in self.axes]
            if strange:
                raise UserError(
                    f"data.augment.{where}: {strange[0]!r} is not an axis of the samples; use {', '.join(self.axes)}"
                )
        if c.sections is not None and c.sections.axis is None and len(self.crop) != 3:
            raise UserError(
                "data.augment.sections: spoils planes of volumes, of which images are one; leave it out, or say which "
                f"lines of the images are meant with axis: {' or '.join(self.axes)}"
            )
        if c.rotate_axes and len(self.crop) != 3:
            raise UserError("data.augment.rotate_axes: images turn in their plane alone; leave rotate_axes out")
        if (c.mixup or c.cutmix) and self.labels != "item":
            raise UserError(
                "data.augment: mixup and cutmix mix the classes of items, which this objective does not learn; "
                "set them to 0, or train objective 'classify'"
            )
