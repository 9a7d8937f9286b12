"""Sources, one file a format. This file only tells which kind of source lies at a path, without opening it."""

import os
from itertools import islice
from pathlib import Path

from vitrail.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")
ZARR_FILES = ("zarr.json", ".zgroup", ".zattrs", ".zarray")

_LOOK_AT = 1000  # entries of a folder that are looked at before giving up: a listing can be very long


def guess_kind(path: str) -> str:
    """The kind of source at a path: by what is there, or by the name where nothing is there yet."""
    place = Path(path)
    if place.is_dir():
        if any((place / name).is_file() for name in ZARR_FILES):
            return "ome_zarr"
        if _holds_images(place) or any(_holds_images(Path(entry.path)) for entry in _entries(place) if entry.is_dir()):
            return "image_folder"
        raise UserError(
            f"data path {path!r} holds neither zarr metadata nor images ({', '.join(IMAGE_SUFFIXES)}); "
            "give an OME-Zarr group or a folder of images, or name the kind with `kind`"
        )
    if place.exists():
        raise UserError(f"data path {path!r} is a file; give an OME-Zarr group or a folder of images")
    if ".zarr" in (part.suffix.lower() for part in (place, *place.parents)):
        return "ome_zarr"
    raise UserError(f"data path {path!r} does not exist; check the spelling and the folder that it is relative to")


def is_image(name: str) -> bool:
    """Whether a file name is that of an image; hidden files are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _holds_images(folder: Path) -> bool:
    return any(is_image(entry.name) for entry in _entries(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, _LOOK_AT))
    except OSError as error:
        raise UserError(
            f"data path {str(folder)!r} cannot be read ({error.strerror}); check its permissions"
        ) from error
