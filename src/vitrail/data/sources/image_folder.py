"""A folder of PNG, JPEG and TIFF images, flat or one folder a class (the layout of ImageNet).

- names are sorted as a person would (2 before 10); images may differ in size, and sizes come from headers alone
- grey or red, green, blue; 8 or 16 bits or floats as the first image has them; pixels as stored, EXIF is not applied
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from vitrail.data.source import Item, normalize_window
from vitrail.data.sources import IMAGE_SUFFIXES, is_image
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.recipe import config

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

COLOURS = ("red", "green", "blue")
# Pillow's modes of one grey channel, and what a pixel is; every other mode is read as colour.
GREY_TYPES = {
    "1": "uint8",
    "L": "uint8",
    "LA": "uint8",
    "I;16": "uint16",
    "I;16B": "uint16",
    "I": "int32",
    "F": "float32",
}


@config
class ImageFolderConfig:
    """Images of one folder."""

    path: str
    kind: Literal["image_folder"] = "image_folder"
    variables: list[str] | None = None  # some of red, green, blue; or one name (grey) or three (colour) of your own
    region: dict[str, list[int | float]] = field(default_factory=dict)  # not for folders: images differ in size
    split: tuple[float, float] = (0.0, 1.0)  # which share of the images: [0, 0.8] to train, [0.8, 1] to validate
    weight: float = 1.0  # times its size (images here, crops in volumes): its share of the samples
    classes: bool | None = None  # whether folders are classes; None: yes where the images lie one folder down
    max_pixels: int = 2**30  # a larger image is refused rather than read into memory

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise UserError(
                f"weight = {self.weight} of {self.path} must be above 0; leave the entry out to give it no samples"
            )
        if self.region:
            raise UserError(
                f"region = {self.region} cannot be used with the image folder {self.path}; use split: [0, 0.8]"
            )
        if not 0 <= self.split[0] < self.split[1] <= 1:
            raise UserError(
                f"split = {list(self.split)} of {self.path} must be two rising numbers from 0 to 1, such as [0, 0.8]"
            )

    def open(self) -> "ImageFolderSource":
        """List the images and look at the first; no other file is opened yet."""
        return ImageFolderSource(self)


class ImageFolderSource:
    """The images of a folder, each an item."""

    axes = ("y", "x")

    def __init__(self, settings: ImageFolderConfig) -> None:
        self.config = settings
        self.root = Path(settings.path)
        self.files, self.labels, self.class_names = self._list_files()
        self._keep_split()
        with self._open(self.files[0]) as image:
            grey_type = GREY_TYPES.get(image.mode)
        self.variables, self._picked = self._pick_variables(grey_type is not None)
        self.dtype = np.dtype(grey_type if grey_type is not None and self._picked is None else "uint8")
        self.items: Sequence[Item] = _Items(self)

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """[C, y, x] of a window; the whole image is decoded for it."""
        path = self.files[item]
        (top, bottom), (left, right) = normalize_window(self.items[item].shape, region)
        with self._open(path) as image:
            grey_type = GREY_TYPES.get(image.mode)
            if self._picked is None:
                if (grey_type or "uint8") != self.dtype:
                    raise UserError(
                        f"{path} has {grey_type or 'uint8'} pixels but the first image has {self.dtype}; "
                        "convert one of them"
                    )
                pixels = np.asarray(
                    image if grey_type and image.mode in ("L", "I", "F") else _to_grey(image, self.dtype)
                )
                return np.array(pixels[None, top:bottom, left:right], self.dtype)  # [1, y, x]
            if grey_type not in (None, "uint8"):
                raise UserError(
                    f"{path} has {grey_type} pixels, which have no colours; "
                    "choose one grey variable or convert it to 8 bits"
                )
            pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))  # [y, x, 3]
        window = pixels[top:bottom, left:right, self._picked]
        return np.ascontiguousarray(np.moveaxis(window, -1, 0))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "image_folder",
            "path": self.config.path,
            "axes": list(self.axes),
            "shape": list(self.items[0].shape),
            "dtype": str(self.dtype),
            "variables": list(self.variables),
            "spacing": [1.0, 1.0],
            "unit": None,
            "items": len(self.files),
            "classes": list(self.class_names),
        }

    def _list_files(self) -> tuple[list[Path], list[int] | None, tuple[str, ...]]:
        """Files in natural order, the class of each where folders are classes, and the names of the classes."""
        root, path = self.root, self.config.path
        if not root.is_dir():
            raise UserError(f"data path {path!r} is not a folder; give a folder of images")
        flat = [entry for entry in _sorted(root) if is_image(entry.name)]
        folders = {
            entry.name: [file for file in _sorted(entry) if is_image(file.name)]
            for entry in _sorted(root)
            if entry.is_dir()
        }
        folders = {name: files for name, files in folders.items() if files}
        if flat and folders:
            raise UserError(
                f"{path} holds images and folders of images ({next(iter(folders))}, ...); "
                "keep them in one of the two ways"
            )
        if not flat and not folders:
            raise UserError(
                f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}), nor do its folders; give a folder of images"
            )
        if self.config.classes and not folders:
            raise UserError(
                f"{path} holds images but no folders, so there are no classes; make a folder for each or drop `classes`"
            )
        if flat:
            return flat, None, ()
        files = [file for group in folders.values() for file in group]
        if self.config.classes is False:
            return files, None, ()
        labels = [number for number, group in enumerate(folders.values()) for _ in group]
        return files, labels, tuple(folders)

    def _keep_split(self) -> None:
        """Keep the images whose hashed name falls into the split: adding images moves none of the others."""
        low, high = self.config.split
        kept = [
            number
            for number, file in enumerate(self.files)
            if low <= key(0, "split", file.relative_to(self.root).as_posix()) / 2**63 < high
        ]
        if not kept:
            raise UserError(
                f"split = {[low, high]} of {self.config.path} holds none of its {len(self.files)} images; widen it"
            )
        self.files = [self.files[number] for number in kept]
        self.labels = None if self.labels is None else [self.labels[number] for number in kept]

    def _pick_variables(self, grey: bool) -> tuple[tuple[str, ...], list[int] | None]:
        """Names, and which of red, green and blue they are; None for grey."""
        given = self.config.variables
        if given is None:
            return (("grey",), None) if grey else (COLOURS, [0, 1, 2])
        if given and len(set(given)) == len(given):
            if set(given) <= set(COLOURS):
                return tuple(given), [COLOURS.index(name) for name in given]
            if len(given) == 1:
                return tuple(given), None
            if len(given) == 3:
                return tuple(given), [0, 1, 2]
        raise UserError(
            f"variables = {given} cannot be read from {self.config.path}; "
            "give one name (grey) or three (red, green, blue)"
        )

    @contextlib.contextmanager
    def _open(self, path: Path) -> "Iterator[ImageFile]":
        """The image, header read; whatever goes wrong inside is told with the file's name."""
        try:
            with path.open("rb") as file, _recognize(file.read(16), path)(_rewound(file), str(path)) as image:
                if image.width * image.height > self.config.max_pixels:
                    raise UserError(
                        f"{path} has {image.width} x {image.height} pixels, "
                        f"more than max_pixels = {self.config.max_pixels}; "
                        "cut it into smaller images or raise max_pixels"
                    )
                pages = getattr(image, "n_frames", 1)
                if pages > 1:
                    raise UserError(f"{path} holds {pages} pages; save each page as a file of its own")
                yield image
        except UserError:
            raise
        except (OSError, SyntaxError, ValueError, IndexError, TypeError) as error:  # what Pillow raises on broken files
            raise UserError(f"{path} cannot be read as an image ({error}); restore or remove the file") from error


class _Items(Sequence[Item]):
    """Items whose sizes are read from the headers when first asked for."""

    def __init__(self, source: ImageFolderSource) -> None:
        self._source = source
        self._known: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._source.files)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        item = self._known.get(number)
        if item is None:
            source, path = self._source, self._source.files[number]
            with source._open(path) as image:
                shape = (image.height, image.width)
            label = None if source.labels is None else source.labels[number]
            name = path.relative_to(source.root).as_posix()
            item = self._known[number] = Item(name, shape, shape, (0, 0), (1.0, 1.0), None, label)
        return item


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Sort key that puts image2 before image10."""
    parts = re.split(r"(\d+)", name.lower())
    # The name itself comes last, so that a2 and a02 always keep the same order.
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts], name


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(
            (entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda e: natural_key(e.name)
        )
    except OSError as error:
        raise UserError(f"{folder} cannot be listed ({error.strerror}); check its permissions") from error


def _recognize(start: bytes, path: Path) -> "type[ImageFile]":
    """Pillow's reader for the first bytes of a file.

    Readers are called directly: `Image.open` refuses large images by a limit of the whole process, and scientific
    images are large; `max_pixels` stands in for it here.
    """
    if start.startswith(b"\x89PNG"):
        from PIL.PngImagePlugin import PngImageFile

        return PngImageFile
    if start.startswith(b"\xff\xd8\xff"):
        from PIL.JpegImagePlugin import JpegImageFile

        return JpegImageFile
    if start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        from PIL.TiffImagePlugin import TiffImageFile

        return TiffImageFile
    raise UserError(f"{path} is not a PNG, JPEG or TIFF image, whatever its name says; convert or remove it")


def _rewound(file: Any) -> Any:
    file.seek(0)
    return file


def _to_grey(image: "ImageFile", dtype: np.dtype) -> Any:
    """Colour as its brightness; 16 bits stay 16 bits."""
    return np.asarray(image).astype(dtype) if dtype == np.uint16 else image.convert("L")
