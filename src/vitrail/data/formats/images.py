"""Decoding of encoded images: PNG, JPEG, TIFF and WebP by Pillow, NumPy's npy besides.

- grey, or red, green, blue and alpha; 8 or 16 bits or floats as stored; alpha is left out unless it is asked for
- EXIF is not applied; palettes and CMYK become colours; files of several pages are refused
- whatever is wrong inside a file is BadData that names it

Headers of NumPy's files: nothing is unpickled, and nothing allocated before what they say is checked.
"""

import contextlib
import importlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from vitrail.data.files.handles import decoding
from vitrail.data.formats.tiff import check_frame
from vitrail.data.source import refuse_mixed_names
from vitrail.data.stored import by
from vitrail.errors import BadData, UserError
from vitrail.recipe.kinds import remedy

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

MOST_HEADER = 2**16  # bytes


class Header(NamedTuple):
    """Facts from the header of an .npy file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: str  # C, or F where the first axis runs fastest
    offset: int  # of the first value, in bytes

    @property
    def end(self) -> int:
        """Return the byte after the last value."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


def read_header(file: BinaryIO | Any, name: str) -> Header:
    """Read the header of an .npy file that is open at its beginning."""
    with decoding(name):
        start = file.read(12)
        wide = len(start) > 6 and start[6] > 1  # a version with a longer length
        length = int.from_bytes(start[8:12] if wide else start[8:10], "little")
        if length > MOST_HEADER:
            raise BadData(f"{name} cannot be read: its header would have {length:,} bytes; restore or remove the file")
        text = io.BytesIO(start + file.read(length))
        version = np.lib.format.read_magic(text)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(text)
        if dtype.hasobject:
            raise BadData(f"{name} cannot be read: it holds Python objects, which can run code; save it as numbers")
        if any(size < 0 for size in shape):
            raise BadData(f"{name} says that its shape is {list(shape)}; restore or remove the file")
        return Header(tuple(shape), dtype, "F" if fortran else "C", text.tell())


COLOURS = ("red", "green", "blue", "alpha")
MAX_PIXELS = 2**28  # a packed image of some KB can say that it has many more
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
NPY = b"\x93NUMPY"
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# First bytes of files, and the name that Pillow gives their reader.
MAGIC = {b"\x89PNG": "Png", b"\xff\xd8\xff": "Jpeg", **dict.fromkeys(TIFF, "Tiff")}


class Look(NamedTuple):
    """Facts from the header of an image."""

    shape: tuple[int, int]  # y, x
    dtype: np.dtype
    grey: bool


def look(file: BinaryIO, name: str, max_pixels: int = MAX_PIXELS) -> Look:
    """Read the header of an image."""
    with _opened(file, name, max_pixels) as image:
        if isinstance(image, np.ndarray):
            return Look(image.shape[:2], image.dtype, image.ndim == 2)
        return Look((image.height, image.width), _dtype(image), image.mode in GREY_TYPES)


def decode(
    file: BinaryIO, name: str, dtype: np.dtype, picked: Sequence[int] | None, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """Read the pixels [C, y, x]: grey, or those of red, green, blue and alpha that are picked."""
    with _opened(file, name, max_pixels) as image:
        if isinstance(image, np.ndarray):
            return _from_array(image, name, dtype, picked)
        found = _dtype(image)
        if picked is not None and image.mode in GREY_TYPES and found != np.uint8:
            raise BadData(
                f"{name} has {found} pixels, which have no colours; choose one grey variable or convert it to 8 bits"
            )
        if found != dtype:
            raise BadData(f"{name} has {found} pixels but the first image has {dtype}; convert one of them")
        if picked is None:
            return np.array(_grey(image, name), dtype)[None]  # [1, y, x]
        if found == np.uint16:
            pixels = _deep(image, name)  # [y, x, 3 or 4]
        else:
            mode = "RGBA" if 3 in picked else "RGB"
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
        if max(picked) >= pixels.shape[2]:
            raise BadData(f"{name} has no alpha; leave `alpha` out of `variables`")
        return np.ascontiguousarray(np.moveaxis(pixels[..., list(picked)], -1, 0))


def decode_labels(file: BinaryIO, name: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read the numbers of the classes [y, x] in a grey image, or a palette's places."""
    with _opened(file, name, max_pixels) as image:
        pixels = image if isinstance(image, np.ndarray) else np.asarray(image)
        if pixels.ndim != 2 or pixels.dtype.kind not in "biu":
            kind = pixels.dtype if isinstance(image, np.ndarray) else f"mode {image.mode}"
            raise BadData(
                f"{name} holds labels as {' x '.join(map(str, pixels.shape))} of {kind}; they must be one whole number "
                "a pixel, in a grey image or with a palette"
            )
        return np.array(pixels)


def pick_variables(given: list[str] | None, grey: bool, path: str) -> tuple[tuple[str, ...], list[int] | None]:
    """Return names of the variables, and which of red, green, blue and alpha they are; None for grey."""
    if given is None:
        return (("grey",), None) if grey else (COLOURS[:3], [0, 1, 2])
    if given and len(set(given)) == len(given):
        if set(given) <= set(COLOURS):
            return tuple(given), [COLOURS.index(name) for name in given]
        refuse_mixed_names(given, COLOURS, path)
        if len(given) == 1:
            return tuple(given), None
        if len(given) == 3:
            return tuple(given), [0, 1, 2]
    raise UserError(f"variables = {given} cannot be read from {path}; give one name (grey) or three (red, green, blue)")


@contextlib.contextmanager
def _opened(file: BinaryIO, name: str, max_pixels: int) -> "Iterator[ImageFile | np.ndarray]":
    """Open an image, header read; whatever goes wrong inside is told with its name, but errors of the disk stay."""
    try:
        start = file.read(16)
        file.seek(0)
        if start.startswith(NPY):
            yield _load_array(file, name, max_pixels)
            return
        with _recognize(start, name)(file, name) as image:
            _check_size(image.height, image.width, name, max_pixels)
            if getattr(image, "is_animated", False):  # to count them, Pillow would read the tags of all
                raise BadData(f"{name} holds several pages; save each page as a file of its own")
            yield image
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds for broken files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if isinstance(error, MemoryError):
            raise UserError(f"{name} takes more memory than is free; lower max_pixels to have it refused") from error
        raise BadData(f"{name} cannot be read as an image ({error}); restore or remove the file") from error


def _check_size(height: int, width: int, name: str, max_pixels: int) -> None:
    if height < 1 or width < 1:
        raise BadData(f"{name} is empty: {width} x {height} pixels; restore or remove the file")
    if width * height > max_pixels:
        raise BadData(
            f"{name} has {width} x {height} pixels, more than max_pixels = {max_pixels}; "
            "cut it into smaller images or raise max_pixels"
        )


def _recognize(start: bytes, name: str) -> "type[ImageFile]":
    """Return Pillow's reader for the first bytes of a file.

    Readers are called directly: `Image.open` refuses large images by a limit of the whole process, and scientific
    images are large; `max_pixels` stands in for it here.
    """
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
    kind = "WebP" if start[:4] == b"RIFF" and start[8:12] == b"WEBP" else kind
    if kind is not None:
        found: type[ImageFile] = getattr(importlib.import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")
        return found
    if not start:
        raise BadData(f"{name} is an empty file, of 0 bytes; restore or remove it")
    raise BadData(f"{name} is not a PNG, JPEG, TIFF or WebP image, whatever its name says; convert or remove it")


def _is_deep(image: "ImageFile") -> bool:
    """Tell whether Pillow would cut colours of 16 bits down to 8."""
    if image.mode in GREY_TYPES or not image.tile:
        return False
    bits = getattr(image, "tag_v2", {}).get(258, 8)  # of a TIFF; colours in planes of their own have no such word
    return ";16" in str(image.tile[0][3]) or np.max(bits) == 16


def _dtype(image: "ImageFile") -> np.dtype:
    return np.dtype("uint16" if _is_deep(image) else GREY_TYPES.get(image.mode, "uint8"))


def _grey(image: "ImageFile", name: str) -> Any:
    """Return colour as its brightness; 16 bits stay 16 bits."""
    if _is_deep(image):
        return np.rint(_deep(image, name)[..., :3] @ np.array([0.299, 0.587, 0.114]))
    return np.asarray(
        image if GREY_TYPES.get(image.mode, "uint8") != "uint8" or image.mode == "L" else image.convert("L")
    )


def _deep(image: "ImageFile", name: str) -> np.ndarray:
    """Read colours of 16 bits [y, x, C]."""
    image.fp.seek(0)  # type: ignore[union-attr]
    try:
        if image.format == "TIFF":
            import tifffile

            with tifffile.TiffFile(image.fp) as tif:  # type: ignore[arg-type]
                page = tif.pages[0]  # and no series, which may lie in other files
                check_frame(name, page)
                planes, depth, *size, samples = page.shaped
                turn = image.tag_v2.get(274, 1)  # type: ignore[attr-defined]
                stored = [image.width, image.height] if turn in (5, 6, 7, 8) else [image.height, image.width]
                if size != stored or planes * depth * samples > len(COLOURS):
                    raise BadData(f"{name} is {by(page.shape)}, which is no image of {image.size}; restore the file")
                pixels = page.asarray()
            pixels = np.moveaxis(pixels, 0, -1) if list(pixels.shape[:2]) != stored else pixels
            return _turned(pixels, turn)
        import imagecodecs

        pixels = imagecodecs.png_decode(image.fp.read())  # type: ignore[union-attr]
        return pixels[..., [0, 0, 0, 1]] if pixels.shape[-1] == 2 else pixels  # grey and alpha
    except ModuleNotFoundError as error:
        missing = error.name or "imagecodecs"
        raise UserError(
            f"{name} has colours of 16 bits, for which {missing} is needed, which is not installed; {remedy(missing)}"
        ) from error


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turn pixels [y, x, C] as TIFF's orientation means them; Pillow does so itself where it decodes."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


def _load_array(file: BinaryIO, name: str, max_pixels: int) -> np.ndarray:
    found = read_header(file, name)
    end = file.seek(0, 2)
    if end < found.end:
        raise BadData(f"{name} is cut short: {end} of {found.end} bytes; restore the file")
    shape = found.shape  # [y, x] or [y, x, C]
    if found.dtype.kind not in "biuf" or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] > 4):
        raise BadData(
            f"{name} holds {' x '.join(map(str, shape))} of {found.dtype}; an image is y x x or y x x x C with up to 4 "
            "channels of numbers"
        )
    _check_size(shape[0], shape[1], name, max_pixels)
    file.seek(0)
    pixels = np.load(file, allow_pickle=False)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels


def _from_array(pixels: np.ndarray, name: str, dtype: np.dtype, picked: Sequence[int] | None) -> np.ndarray:
    if pixels.dtype != dtype:
        raise BadData(f"{name} has {pixels.dtype} pixels but the first image has {dtype}; convert one of them")
    channels = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)  # [C, y, x]
    wanted = [0] if picked is None else list(picked)
    if (picked is None and len(channels) > 1) or max(wanted) >= len(channels):
        raise BadData(f"{name} has {len(channels)} channels, other than the first image; convert one of them")
    return np.ascontiguousarray(channels[wanted])
