"""Whether sources fit the crop, the objective and each other's shapes; where not, a sentence says what to do."""

from collections.abc import Sequence
from typing import Any

from vitrail.data.source import ClassifiedSource, Item, LabelledSource, Source
from vitrail.errors import UserError
from vitrail.recipe.sections import Augment, Fit


def check_source(name: str, source: Source, c: Any, crop: tuple[int, ...], labels: str | None, fit: Fit | None) -> None:
    """Refuse a source with other axes than samples have, or without what the objective learns from."""
    first = next(iter(source.items), None)
    across = None if first is None else first.slices
    if len(source.axes) - (across is not None) != len(crop):
        slices = f", of which slices across {source.axes[across]} are used" if across is not None else ""
        raise UserError(
            f"{name}: {c.path} has {len(source.axes)} axes ({', '.join(source.axes)}){slices}, "
            f"but the model has {len(crop)}; set model.ndim to {len(source.axes) - (across is not None)} "
            "or choose other data"
        )
    if fit is not None and len(source.axes) != 2:
        raise UserError(f"data.fit: is for images, and {name} has {len(source.axes)} axes; leave it out")
    if fit is not None and fit.resize < max(crop):
        raise UserError(f"data.fit.resize: {fit.resize} is less than data.crop {by(crop)}; resize to as much or more")
    if labels == "item" and not (isinstance(source, ClassifiedSource) and source.class_names):
        raise UserError(
            f"{name}: the objective needs the class of every image, but {c.path} has none; "
            "put the images into one folder a class, such as cat/1.png and dog/1.png"
        )
    if labels == "voxel" and not isinstance(source, LabelledSource):
        said = f"{name}: the objective needs the class of every voxel"
        if hasattr(c, "labels"):
            raise UserError(f"{said}, but none are found for {c.path}; say where they are with `labels`")
        raise UserError(
            f"{said}, which data of kind {c.kind} cannot have; use one that can, such as ome_zarr, nifti or tiff"
        )
    if labels == "voxel" and not (isinstance(source, LabelledSource) and source.label_dtype is not None):
        found = source.describe().get("labels")
        have = f"it has {', '.join(found)}" if found else "it has none"
        raise UserError(
            f"{name}: the objective needs the class of every voxel; name the labels of {c.path} with "
            f"`labels: {found[0] if found else '...'}` ({have})"
        )


def check_augment(name: str, source: Source, augment: Augment) -> None:
    """Refuse changes that a source's samples cannot undergo."""
    if augment.resized_crop is not None and len(source.axes) != 2:
        raise UserError(
            f"data.augment.resized_crop: takes boxes of whole images, and {name} has {len(source.axes)} axes "
            f"({', '.join(source.axes)}); use `scale` and `rotate` for volumes"
        )
    missing = [colour for colour in ("red", "green", "blue") if colour not in source.variables]
    if augment.jitter is not None and missing:
        raise UserError(
            f"data.augment.jitter: changes the variables red, green and blue, but {name} has "
            f"{', '.join(source.variables)}; name them so with `variables`, or leave jitter out"
        )


def check_mixing(augment: Augment, batch: int, ranks: int) -> None:
    """Refuse mixup and cutmix where a rank would read a sample without its partner; micro-batches are cut later."""
    if (augment.mixup or augment.cutmix) and batch // ranks % 2:
        raise UserError(
            f"data.batch: mixup and cutmix mix samples two by two, but each of {ranks} data-parallel ranks reads "
            f"{batch // ranks} of {batch} a step; make it a multiple of {2 * ranks}"
        )


def check_size(name: str, axes: tuple[str, ...], item: Item, crop: tuple[int, ...]) -> None:
    """Refuse an item that no sample can be cut from, at the voxel size that is wanted."""
    sizes, scales = (without(values, item.slices) for values in (item.shape, item.scale))
    if all(size >= c * scale * 0.999 for size, c, scale in zip(sizes, crop, scales, strict=True)):
        return
    scaled = f" at {by([round(s, 3) for s in scales])} times its voxel size" if set(scales) != {1.0} else ""
    image = len(axes) == 2
    remedy = f"set data.fit: {{resize: {max(crop)}}}, which enlarges it, or use" if image else "use a larger region or"
    raise UserError(
        f"{name}: {item.name} is {by(item.shape)} {'pixels' if image else 'voxels'} ({', '.join(axes)}), smaller than "
        f"data.crop {by(crop)}{scaled}; {remedy} a smaller crop"
    )


def without(values: Sequence[Any], across: int | None) -> tuple[Any, ...]:
    """One value an axis of a sample, out of one an axis of its item."""
    return tuple(value for axis, value in enumerate(values) if axis != across)


def by(shape: Sequence[Any]) -> str:
    return " x ".join(map(str, shape))
