"""A folder of PNG, JPEG, TIFF and WebP images, flat or one folder a class (the layout of ImageNet); or one image.

- names are sorted as a person would (2 before 10); images may differ in size
- grey or red, green, blue; 8 or 16 bits or floats as the first image has them; pixels as stored, EXIF is not applied
- labels of pixels are images of the same names (any suffix) in another folder; imagesTr and labelsTr, as nnU-Net has
  them, are found by themselves
"""

import hashlib
from typing import Literal

from vitrail.data.files.paths import (
    base_name,
    file_type,
    is_url,
    join,
    list_files,
    list_folders,
    local_path,
    open_file,
    parent,
)
from vitrail.data.sources import IMAGE_SUFFIXES, is_image
from vitrail.data.sources.encoded import ImagesConfig, ImageSource, LabelledImageSource, open_images
from vitrail.data.sources.folders import find_cases, is_layout
from vitrail.errors import UserError
from vitrail.recipe import config

# Names of folders that hold images and labels of their pixels, rather than classes.
IMAGES = {"image", "images", "img", "imgs"}
MASKS = {"mask", "masks", "label", "labels", "annotation", "annotations", "groundtruth", "ground_truth", "gt"}


@config
class ImageFolderConfig(ImagesConfig):
    """Images of one folder."""

    kind: Literal["image_folder"] = "image_folder"
    classes: bool | None = None  # whether folders are classes; None: yes where the images lie one folder down
    labels: str | None = None  # a folder of images of labels with the same names

    def open(self) -> ImageSource:
        """List the images and look at the first; no other file is opened yet."""
        folder = self.path
        beside: list[str] | None = None
        values: dict[int, str] = {}
        if file_type(folder) == "file":
            names, classes = [base_name(folder)], list[str]()
            folder = parent(folder)
        elif is_layout(folder):
            names, beside, values = self._list_cases()
            classes = []
        else:
            names, classes = self._list_images()
        numbers = {name: number for number, name in enumerate(classes)}
        if self.labels is not None:
            beside = self._list_labels(self.labels, names)
        masks = beside or []
        opened = open_images(
            self,
            names,
            lambda number: open_file(join(folder, names[number])),
            labels=[numbers[name.partition("/")[0]] for name in names] if classes else None,
            class_names=classes,
            state=self._state(names),
            title=lambda name: join(folder, name),
            files=lambda: [self.path, *(join(folder, name) for name in names), *masks],
            open_labels=None if beside is None else lambda number: open_file(masks[number]),
            labels_name=self.labels or join(folder, "labelsTr"),
        )
        if isinstance(opened, LabelledImageSource):
            opened.label_names = values
        return opened

    def _list_cases(self) -> tuple[list[str], list[str] | None, dict[int, str]]:
        """List images, labels where each image has them, and names of their values, as nnU-Net lays them out."""
        layout = find_cases(self.path, self.labels, IMAGE_SUFFIXES, colours=True)
        for case in layout.cases:
            if len(case.images) > 1:
                raise UserError(
                    f"{self.path}/imagesTr has {len(case.images)} files of {case.name}, one a channel; this kind reads "
                    "one file an image, so save them as TIFF and say `kind: tiff`"
                )
        labels = [case.labels for case in layout.cases if case.labels is not None]
        names = [f"imagesTr/{base_name(case.images[0])}" for case in layout.cases]
        return names, labels if len(labels) == len(names) else None, layout.labels

    def _list_images(self) -> tuple[list[str], list[str]]:
        """List names below the folder in natural order, and the folders where these are classes."""
        path = self.path
        if file_type(path) != "folder":
            raise UserError(f"data path {path!r} is not a folder; give a folder of images")
        flat = [name for name in list_files(path) if is_image(name)]
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
            return flat, []
        images, masks = ([name for name in groups if name.lower() in words] for words in (IMAGES, MASKS))
        if self.classes is None and images and masks:
            raise UserError(
                f"{path} holds {images[0]}/ and {masks[0]}/, which look like images and labels, not like classes; "
                f"give path: {join(path, images[0])} and labels: {join(path, masks[0])}, or say classes: true"
            )
        return [name for names in groups.values() for name in names], [] if self.classes is False else list(groups)

    def _list_labels(self, folder: str, names: list[str]) -> list[str]:
        """List the image of labels of each image."""
        inside: dict[str, dict[str, str]] = {}
        found = []
        for name in names:
            group, _, last = name.rpartition("/")
            place = join(folder, group) if group else folder
            if group not in inside:
                inside[group] = {
                    n.rpartition(".")[0]: n for n in list_files(place) if is_image(n) or n.endswith(".npy")
                }
            label = inside[group].get(last.rpartition(".")[0])
            if label is None:
                raise UserError(
                    f"{folder} holds no labels for the image {name}; give every image one of the same name, or leave "
                    "`labels` out"
                )
            found.append(join(place, label))
        return found

    def _state(self, names: list[str]) -> str:
        """Return what changes when images come, go or are renamed; a read notices one that is written over."""
        times = []
        if not is_url(self.path):
            root = local_path(self.path)
            folders = sorted({name.rpartition("/")[0] for name in names}) if root.is_dir() else [""]
            times = [str(root.resolve()), *(str((root / folder).stat().st_mtime_ns) for folder in folders)]
        return hashlib.blake2b("\n".join([*times, *names]).encode("utf-8", "surrogateescape")).hexdigest()
