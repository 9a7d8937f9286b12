"""What pictures say of the samples that they show: item, place, variables with their units, and which are colours."""

from collections.abc import Callable, Sequence

import numpy as np

from vitrail.data.batch import Batch
from vitrail.data.order.sampler import Sample
from vitrail.data.reading.loader import Loader
from vitrail.data.source import Source
from vitrail.errors import UserError
from vitrail.recipe.kinds import nearest
from vitrail.report.blocks import About, colour_places
from vitrail.report.units import plain, short

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_ANGLES = ("degree", "radian")  # places in them would be taken for coordinates


class Describer:
    """Says what is known of the samples of a loader; `shown` are the variables that pictures show, or none for all."""

    def __init__(self, loader: Loader, shown: Sequence[str] = ()):
        self.loader, self.shown = loader, tuple(shown)
        check_shown(shown, lambda: list(dict.fromkeys(n for s in loader.reader.sources for n in s.variables)))
        self._units: dict[int, dict[str, str]] = {}  # of variables, by source

    def describe(self, batch: Batch) -> list[About]:
        """Return what is known of the samples of the batch that was loaded last."""
        return [self._describe(sample, batch) for sample in self.loader.samples]

    def _describe(self, sample: Sample, batch: Batch) -> About:
        source = self.loader.reader.sources[sample.source]
        item = source.items[sample.item]
        names = batch.variables or tuple(source.variables)
        colours = colour_places(names)
        if colours is None and len(names) == 3 and source.dtype == np.uint8:
            colours = (0, 1, 2)
        if sample.source not in self._units:
            self._units[sample.source] = units_of(source)
        spacing = [size * scale for size, scale in zip(item.spacing, item.scale, strict=True)]
        fitted = self.loader.reader.fit is not None  # then samples have other voxels than their items
        return About(
            name=item.name,
            place=place_of(source, sample),
            spacing=() if fitted else tuple(size for axis, size in enumerate(spacing) if axis != item.slices),
            unit=item.unit,
            variables=names,
            units=self._units[sample.source],
            colours=colours,
            shown=self.shown,
        )


def place_of(source: Source, sample: Sample) -> str:
    """Say where in its item a sample begins, as lengths where the size of voxels is known; nothing of whole items."""
    item = source.items[sample.item]
    if tuple(sample.window) == tuple(item.shape):
        return ""
    parts = []
    for axis, start, size in zip(source.axes, sample.start, item.spacing, strict=True):
        known = item.unit is not None and item.unit not in _ANGLES
        parts.append(f"{axis} {plain(start * size, 5)} {short(item.unit)}" if known else f"{axis} {start}")
    return "from " + ", ".join(parts)


def units_of(source: Source) -> dict[str, str]:
    """Return the units of variables, of those that say one; levels of a field have that of the field."""
    fields = source.describe().get("fields") or {}
    units = {
        name: fields.get(name, fields.get(name.partition("@")[0], {})).get("units", "") for name in source.variables
    }
    return {name: write_unit(unit) for name, unit in units.items() if unit}


def write_unit(unit: str) -> str:
    """Write powers as such: m s**-1 becomes m s⁻¹."""
    first, *rest = unit.split("**")
    for part in rest:
        digits = len(part) - len(part.lstrip("-0123456789"))
        first += part[:digits].translate(_SUPERSCRIPTS) + part[digits:]
    return first


def check_shown(shown: Sequence[str], find: Callable[[], list[str]]) -> None:
    """Refuse variables that are not among those found."""
    known = find() if shown else []
    for name in shown:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"log.variables: {name!r} is not a variable of the data, which have {', '.join(known[:12])}"
                f"{', ...' if len(known) > 12 else ''}{f'; did you mean {near!r}?' if near else '; choose of these'}"
            )
