"""Many encoded images as one source: what image folders, parquet files and WebDataset shards share.

A format tells the names of its images, their classes, and how to open one; each image is an item. Images may differ in
size. Sizes come from the headers; those of many images are read once, by threads, and kept in the cache folder.

A folder of PNG, JPEG, TIFF and WebP images, flat or one folder a class (the layout of ImageNet); or one image.

- names are sorted as a person would (2 before 10); images may differ in size
- grey or red, green, blue; 8 or 16 bits or floats as the first image has them; pixels as stored, EXIF is not applied
- classes may also come of a pattern of names, or of a table (classes.py)
- labels of pixels are images of the same names (any suffix) in another folder; imagesTr and labelsTr, as nnU-Net has
  them, are found by themselves
"""

import contextlib
import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import Any, BinaryIO, Literal

import numpy as np

from vitrail.data.files.cache import cache_folder, keep
from vitrail.data.files.paths import (
    base_name,
    file_type,
    is_url,
    join,
    list_files,
    list_folders,
    local_path,
    natural_key,
    open_file,
    parent,
)
from vitrail.data.files.patterns import find_matches, fixed_part, has_stars
from vitrail.data.formats.images import MAX_PIXELS, Look, decode, decode_labels, look, pick_variables
from vitrail.data.source import Item, ItemsConfig, ItemSource, LazySequence, check_label_map, map_labels, whole_item
from vitrail.data.sources import IMAGE_SUFFIXES, is_image
from vitrail.data.sources.classes import TABLES, classes_by_pattern, classes_by_table
from vitrail.data.sources.folders import CaseLayout, find_cases, is_layout, named_labels, pair_names
from vitrail.data.stored import normalize_window
from vitrail.errors import BadData, UserError
from vitrail.recipe import config

KEPT = 2000  # images from which on their sizes are kept in the cache
THREADS = 16  # that read headers: they mostly wait
FIRST = 10  # images of which one must be readable
MANY = 64  # whose headers tell whether there are colours

log = logging.getLogger(__name__)


@config
class ImagesConfig(ItemsConfig):
    """Keys that all sources of encoded images have; variables are of red, green, blue, alpha, or names of your own."""

    region: dict[str, list[int | float]] = field(default_factory=dict)  # not for images: they differ in size
    size: tuple[int, int] | None = None  # y, x of every image, where all are alike: then none is opened at the start
    max_pixels: int = MAX_PIXELS  # a larger image is refused rather than read into memory
    label_map: dict[int, int] = field(default_factory=dict)  # value in images of labels: class; others stay

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.region:
            raise UserError(
                f"region = {self.region} cannot be used with the images of {self.path}; use split: [0, 0.8]"
            )
        if self.size is not None and min(self.size) < 1:
            raise UserError(f"size = {list(self.size)} of {self.path} must be two positive numbers, y and x; mend it")


class ImageSource(ItemSource):
    """Images that share axes, variables and type, each an item; `open_image` gives the file of one by its number."""

    axes = ("y", "x")

    def __init__(
        self,
        settings: Any,  # ImagesConfig of a kind
        names: Sequence[str],
        open_image: Callable[[int], BinaryIO],
        *,
        labels: Sequence[int] | np.ndarray | None = None,
        class_names: Sequence[str] = (),
        state: str = "",
        title: Callable[[str], str] | None = None,
        files: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        super().__init__(settings, names, labels)
        self.class_names, self.state = tuple(class_names), state  # which changes when images do
        self._title = title or (lambda name: f"{settings.path}: {name}")
        self._open_image, self._files = open_image, files or (lambda: [settings.path])
        self._is_grey: set[bool] = set()  # of the images that were looked at
        self.notes: list[str] = []
        first = self._look_first()
        if settings.variables is None and first.grey and len(names) > 1:
            first = self._find_colour() or first
        self.variables, self._picked = pick_variables(settings.variables, first.grey, settings.path)
        alone = self._picked is None or not first.grey
        self.dtype = first.dtype.newbyteorder("=") if alone else np.dtype("uint8")
        self.items = _Items(self)

    @property
    def mixed(self) -> bool:
        """Tell whether some of the images that were looked at are grey and others have colours."""
        return len(self._is_grey) > 1

    def read(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read a window, [C, y, x]; the whole image is decoded for it."""
        shape = self.items[item].shape
        (top, bottom), (left, right) = normalize_window(shape, region)
        with self.open(item) as file:
            pixels = decode(file, self.name(item), self.dtype, self._picked, self.config.max_pixels)
        self._check_shape(item, pixels.shape[1:], shape)
        return np.ascontiguousarray(pixels[:, top:bottom, left:right])

    def files(self) -> tuple[str, ...]:
        """List files and folders that are read, for staging; all of them, as shares count the items that are there."""
        return tuple(self._files())

    def name(self, item: int) -> str:
        """Return what errors show of an image."""
        return self._title(self.names[self.kept[item]])

    def look(self, item: int) -> Look:
        """Read the header of an image."""
        with self.open(item) as file:
            found = look(file, self.name(item), self.config.max_pixels)
        if not found.grey and self._is_grey == {True} and self.config.variables is None:
            log.warning(
                "%s has colours, and is read as grey like the others; set `variables: [red, green, blue]` to keep them",
                self.name(item),
            )
        self._is_grey.add(found.grey)
        return found

    def leave_out_bad(self) -> list[str]:
        """Drop the images whose headers cannot be read, and say why, one sentence an image: for `data.bad: skip`."""
        items = _Items(self)
        bad = items.read_all()
        if len(bad) == len(self.kept):
            raise bad[0]
        self.kept = np.delete(self.kept, list(bad))
        self.items = _Items(self, np.delete(items.sizes, list(bad), axis=0))
        return [str(error) for error in bad.values()]

    def _look_first(self) -> Look:
        """Read the header of the first readable image: going through all images tells of the others."""
        for item in range(min(len(self.kept), FIRST)):
            with contextlib.suppress(BadData):
                return self.look(item)
        return self.look(0)

    def _find_colour(self) -> Look | None:
        """Find the header of an image in colour among many that are looked at; None where all are grey.

        Of all images, not of this entry's share: entries with other shares are to have the same variables.
        """
        numbers = np.arange(min(len(self.names), MANY))
        if self.config.kind != "parquet":  # which reads a group of rows for each
            numbers = np.arange(len(numbers)) * len(self.names) // len(numbers)
            numbers = np.unique([*numbers, *np.random.default_rng(7).integers(len(self.names), size=len(numbers))])

        def look_at(number: int) -> Look | None:
            with contextlib.suppress(BadData, OSError), self._open_image(number) as file:
                return look(file, self._title(self.names[number]), self.config.max_pixels)
            return None

        with ThreadPoolExecutor(THREADS) as pool:
            found = [seen for seen in pool.map(look_at, numbers.tolist()) if seen is not None]
        self._is_grey |= {seen.grey for seen in found}
        return next((seen for seen in found if not seen.grey), None)

    def open(self, item: int) -> BinaryIO:
        return self._open_image(int(self.kept[item]))

    def _check_shape(self, item: int, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            given = "`size` says" if self.config.size else "its header said before"
            raise BadData(
                f"{self.name(item)} is {found[1]} x {found[0]} pixels, not the {expected[1]} x {expected[0]} that "
                f"{given}; mend `size`, restore the file, or remove {cache_folder('sizes')}"
            )


class LabelledImageSource(ImageSource):
    """Images with another image of labels to each."""

    def __init__(self, *args: Any, open_labels: Callable[[int], BinaryIO], labels_name: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self._open_labels, self._labels_name = open_labels, labels_name
        self.label_names: dict[int, str] = {}
        self.label_dtype: np.dtype = self._load_labels(0).dtype
        check_label_map(self.config.label_map, self.label_dtype, self.config.path)

    def read_labels(self, item: int, region: tuple[slice, ...]) -> np.ndarray:
        """Read the labels of a window, [y, x]."""
        shape = self.items[item].shape
        (top, bottom), (left, right) = normalize_window(shape, region)
        labels = self._load_labels(item)
        if labels.shape != shape or not np.can_cast(labels.dtype, self.label_dtype):
            raise BadData(
                f"{self.name(item)}: the labels are {labels.shape[1]} x {labels.shape[0]} of {labels.dtype}, which do "
                f"not fit the image of {shape[1]} x {shape[0]} and the first labels of {self.label_dtype}; mend them"
            )
        window = np.ascontiguousarray(labels[top:bottom, left:right], self.label_dtype)
        return map_labels(window, self.config.label_map)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"labels": [self._labels_name]}

    def _load_labels(self, item: int) -> np.ndarray:
        with self._open_labels(int(self.kept[item])) as file:
            labels = decode_labels(file, f"{self.name(item)} (labels)", self.config.max_pixels)
        # Masks of 1 bit and of 8 may lie side by side: programs write whatever is enough.
        return labels.view(np.uint8) if labels.dtype == bool else labels


def open_images(
    settings: Any,
    names: Sequence[str],
    open_image: Callable[[int], BinaryIO],
    *,
    open_labels: Callable[[int], BinaryIO] | None,
    labels_name: str | None,
    **more: Any,
) -> ImageSource:
    """Open images as a source, with labels of their pixels where there is a way to open those."""
    if open_labels is None:
        return ImageSource(settings, names, open_image, **more)
    return LabelledImageSource(
        settings, names, open_image, open_labels=open_labels, labels_name=str(labels_name), **more
    )


class _Items(LazySequence):
    """Items whose sizes are read from the headers when first asked for, or all at once when all are gone through."""

    def __init__(self, source: ImageSource, sizes: np.ndarray | None = None) -> None:
        super().__init__(len(source.kept), self._make_item)
        self._source = source
        self.sizes = np.zeros((len(source.kept), 2), np.int32) if sizes is None else sizes  # 0: unknown, -1: unreadable
        if source.config.size:
            self.sizes[:] = source.config.size

    def _make_item(self, number: int) -> Item:
        if self.sizes[number, 0] < 1:
            self.sizes[number] = self._source.look(number).shape
        source, (height, width) = self._source, self.sizes[number].tolist()
        return whole_item(source.names[source.kept[number]], (height, width), source.label(number))

    def __iter__(self) -> Iterator[Item]:
        for error in self.read_all().values():
            raise error
        return super().__iter__()

    def read_all(self) -> dict[int, BadData]:
        """Read all sizes, from the cache if they are there, else from the headers; return what is wrong with some."""
        unknown, source = np.flatnonzero(self.sizes[:, 0] < 1), self._source
        if len(unknown) >= KEPT:
            kept = hashlib.blake2b(source.kept.tobytes()).hexdigest()
            facts = [source.config.path, source.state, str(source.config.max_pixels), kept]
            self.sizes[:] = keep("sizes", "\n".join(facts), lambda: self._measure(unknown), self._check)
        elif len(unknown):
            self._measure(unknown)
        self.forget()
        bad = {}
        for number in np.flatnonzero(self.sizes[:, 0] < 1).tolist():  # looked at again: it may have been mended
            try:
                self.sizes[number] = source.look(number).shape
            except BadData as error:
                bad[number] = error
        return bad

    def _measure(self, unknown: np.ndarray) -> bytes:
        log.info("reading the sizes of %d images of %s", len(unknown), self._source.config.path)

        def measure(numbers: np.ndarray) -> None:
            for number in numbers.tolist():
                try:
                    self.sizes[number] = self._source.look(number).shape
                except BadData:
                    self.sizes[number] = -1

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(measure, np.array_split(unknown, max(1, len(unknown) // 256))):
                pass
        held = io.BytesIO()
        np.save(held, self.sizes)
        return held.getvalue()

    def _check(self, held: bytes) -> np.ndarray:
        sizes = np.load(io.BytesIO(held), allow_pickle=False)
        if sizes.shape != self.sizes.shape or 0 in sizes:
            raise ValueError("sizes of something else")
        return sizes


# Names of folders that hold images and labels of their pixels, rather than classes.
IMAGES = {"image", "images", "img", "imgs"}
MASKS = {"mask", "masks", "label", "labels", "annotation", "annotations", "groundtruth", "ground_truth", "gt"}


@config
class ImageFolderConfig(ImagesConfig):
    """Images of one folder, or those that a path with stars stands for."""

    kind: Literal["image_folder"] = "image_folder"
    classes: bool | None = None  # whether folders are classes; None: yes where the images lie one folder down
    class_pattern: str | None = None  # or a regular expression that finds them in names: '(?P<class>[a-z]+)_'
    class_table: str | None = None  # or a CSV or TSV file with a row for each image, in the folder or elsewhere
    class_columns: tuple[str, str] | None = None  # of the table: that of the images, and that of their classes
    labels: str | None = None  # a folder of images of labels, which go by name, or a path with stars
    unlabelled: Literal["error", "leave_out"] = "error"  # what images without labels are, where `labels` names some

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in ("classes", "class_pattern", "class_table") if getattr(self, key)]
        if len(given) > 1:
            raise UserError(f"{given[0]} and {given[1]} of {self.path} both say what the classes are; give one of them")
        if self.class_columns is not None and self.class_table is None:
            raise UserError(f"class_columns of {self.path} are those of a table; name it with class_table")

    def open(self) -> ImageSource:
        """List the images and look at the first; no other file is opened yet."""
        folder = self.path
        beside: list[str] | None = None
        values: dict[int, str] = {}
        notes: list[str] = []
        found: list[str] | None = None  # class of each image
        stars: list[tuple[str, ...]] | None = None
        if has_stars(folder):
            matches = [each for each in find_matches(folder) if not each.is_folder and is_image(each.name)]
            if not matches:
                raise UserError(f"{folder} stands for no images ({', '.join(IMAGE_SUFFIXES)}); give other names")
            folder, names, stars = fixed_part(folder), [m.name for m in matches], [m.stars for m in matches]
            by_folder = bool(self.classes)
        elif file_type(folder) == "file":
            names, by_folder = [base_name(folder)], False
            folder = parent(folder)
        elif is_layout(folder):
            layout = find_cases(folder, self.labels, IMAGE_SUFFIXES, colours=True)
            names, beside = self._list_cases(layout)
            values, notes, by_folder = layout.labels, [*layout.notes], False
        else:
            names, by_folder, tables = self._list_images()
            if tables and self.class_table is None:
                notes.append(
                    f"{folder} holds {tables[0]}, which is not read; `class_table: {tables[0]}` takes classes from it"
                )
        table = self._find_table(folder)
        if table is not None:
            found = classes_by_table(table, self.class_columns, names, self.path)
        elif self.class_pattern is not None:
            found = classes_by_pattern(self.class_pattern, names, self.path)
        elif by_folder:
            found = [name.rpartition("/")[0].rpartition("/")[2] for name in names]
            if lost := [name for name, each in zip(names, found, strict=True) if not each]:
                raise UserError(
                    f"classes = true of {self.path}: no folder of {lost[0]!r} is below the first star, so it has no "
                    "class; put a star for the folders into the path, such as images/*/*.png"
                )
        classes = sorted(set(found or ()), key=natural_key)
        numbers = {name: number for number, name in enumerate(classes)}
        if self.labels is not None and beside is None:
            beside, bare = self._list_labels(self.labels, names, stars)
            if bare:
                notes.append(
                    f"{len(bare)} of {len(names)} images have no labels in {self.labels} and are left out, such as "
                    f"{names[bare[0]]}"
                )
                kept = sorted({*range(len(names))} - {*bare})
                names = [names[n] for n in kept]
                found = [found[n] for n in kept] if found else found
        masks = beside or []
        opened = open_images(
            self,
            names,
            lambda number: open_file(join(folder, names[number])),
            labels=[numbers[name] for name in found] if found else None,
            class_names=classes,
            state=self._state(names),
            title=lambda name: join(folder, name),
            files=lambda: [
                *([] if has_stars(self.path) else [self.path]),
                *(join(folder, name) for name in names),
                *masks,
                *([] if table is None else [table]),
            ],
            open_labels=None if beside is None else lambda number: open_file(masks[number]),
            labels_name=self.labels or join(folder, "labelsTr"),
        )
        if isinstance(opened, LabelledImageSource):
            opened.label_names = values
        opened.notes = notes
        return opened

    def _find_table(self, folder: str) -> str | None:
        """Return the path of the table of classes, which may be relative to the folder."""
        if self.class_table is None:
            return None
        places = [join(folder, self.class_table), self.class_table]
        place = next((place for place in places if file_type(place) == "file"), None)
        if place is None:
            raise UserError(
                f"class_table = {self.class_table!r} is no file, neither by itself nor in {folder}; check the spelling"
            )
        return place

    def _list_cases(self, layout: CaseLayout) -> tuple[list[str], list[str] | None]:
        """List the images of a folder with imagesTr, and labels where each image has them."""
        for case in layout.cases:
            if len(case.images) > 1:
                raise UserError(
                    f"{self.path}/imagesTr has {len(case.images)} files of {case.name}, one a channel; this kind reads "
                    "one file an image, so save them as TIFF and say `kind: tiff`"
                )
        labels = [case.labels for case in layout.cases if case.labels is not None]
        names = [f"imagesTr/{base_name(case.images[0])}" for case in layout.cases]
        return names, labels if len(labels) == len(names) else None

    def _list_images(self) -> tuple[list[str], bool, list[str]]:
        """List names below the folder in natural order, tell whether folders are classes, and list tables."""
        path = self.path
        if file_type(path) != "folder":
            raise UserError(f"data path {path!r} is not a folder; give a folder of images")
        files = list_files(path)
        flat = [name for name in files if is_image(name)]
        tables = [name for name in files if name.lower().endswith(TABLES)]
        groups = {
            folder: [f"{folder}/{name}" for name in list_files(join(path, folder)) if is_image(name)]
            for folder in list_folders(path)
        }
        groups = {folder: names for folder, names in groups.items() if names}
        if flat and groups:
            raise UserError(
                f"{path} holds images and folders of images ({next(iter(groups))}, ...); "
                "keep them in one of the two ways"
            )
        if not flat and not groups:
            raise UserError(
                f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}), nor do its folders; give a folder of images"
            )
        if self.classes and not groups:
            raise UserError(
                f"{path} holds images but no folders, so there are no classes; make a folder for each or drop `classes`"
            )
        if flat:
            return flat, False, tables
        images, masks = ([name for name in groups if name.lower() in words] for words in (IMAGES, MASKS))
        if self.classes is None and images and masks:
            raise UserError(
                f"{path} holds {images[0]}/ and {masks[0]}/, which look like images and labels, not like classes; "
                f"give path: {join(path, images[0])} and labels: {join(path, masks[0])}, or say classes: true"
            )
        by_folder = self.classes is not False and self.class_pattern is None and self.class_table is None
        return [name for names in groups.values() for name in names], by_folder, tables

    def _list_labels(
        self, labels: str, names: list[str], stars: list[tuple[str, ...]] | None
    ) -> tuple[list[str], list[int]]:
        """List the image of labels of each image that has one, and the numbers of those that have none."""
        found: list[str | None]
        if has_stars(labels):
            found = [
                self._named_labels(labels, each, name)
                for name, each in zip(names, stars or [(name.rpartition(".")[0],) for name in names], strict=True)
            ]
        else:
            found = self._labels_by_name(labels, names)
        lost = [number for number, place in enumerate(found) if place is None]
        if lost and (self.unlabelled == "error" or len(lost) == len(names)):
            some = "" if len(lost) == len(names) else ", leave those without out by unlabelled: leave_out"
            raise UserError(
                f"{labels} holds no labels for the image {names[lost[0]]}; give every image one of the same name{some}"
                ", say what they are called with stars (labels: masks/*_drawn.png), or leave `labels` out"
            )
        return [place for place in found if place is not None], lost

    def _named_labels(self, labels: str, stars: tuple[str, ...], name: str) -> str | None:
        """Return the labels of an image by a path with stars; None where none are there and that is allowed."""
        try:
            return named_labels(labels, stars, name)
        except UserError:
            if self.unlabelled == "error":
                raise
            return None

    def _labels_by_name(self, labels: str, names: list[str]) -> list[str | None]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name.rpartition("/")[0], []).append(name)
        found: dict[str, str] = {}
        for group, members in groups.items():
            place = join(labels, group) if group else labels
            if group and self.unlabelled == "leave_out" and file_type(place) is None:
                continue  # none of this folder has labels
            inside = {n.rpartition(".")[0]: n for n in list_files(place) if is_image(n) or n.endswith(".npy")}
            stems = {name: base_name(name).rpartition(".")[0] for name in members}
            pairs = pair_names(list(stems.values()), list(inside))
            found |= {name: join(place, inside[pairs[stems[name]]]) for name in members if stems[name] in pairs}
        return [found.get(name) for name in names]

    def _state(self, names: list[str]) -> str:
        """Return what changes when images come, go or are renamed; a read notices one that is written over."""
        times = []
        if not is_url(self.path):
            root = local_path(fixed_part(self.path))
            folders = sorted({name.rpartition("/")[0] for name in names}) if root.is_dir() else [""]
            times = [str(root.resolve()), *(str((root / folder).stat().st_mtime_ns) for folder in folders)]
        return hashlib.blake2b("\n".join([*times, *names]).encode("utf-8", "surrogateescape")).hexdigest()
