"""Sources, a file a format or a family of them. Here, only which kind of source lies at a path, without opening it.

Of a TIFF file the tags of the first page tell, read without any library.
"""

import re
import struct
from collections import Counter
from typing import Any

from vitrail.data.files.paths import (
    base_name,
    file_type,
    is_url,
    join,
    list_files,
    list_folders,
    read_bytes,
    read_json,
    split_key,
)
from vitrail.data.files.patterns import HIERARCHIES, find_matches, has_stars
from vitrail.errors import UserError
from vitrail.recipe import kinds


def read_tags(path: str) -> tuple[set[int], bytes, bool]:
    """Read tags and description of the first page, and whether it is the last; struct.error or ValueError if broken."""
    head = read_bytes(path, 0, 16)
    order = "<" if head[:1] == b"I" else ">"
    big = struct.unpack(order + "H", head[2:4])[0] == 43
    width, entry, number = (8, 20, "Q") if big else (4, 12, "I")
    (offset,) = struct.unpack(order + number, head[8:16] if big else head[4:8])
    size = 8 if big else 2
    (count,) = struct.unpack(order + ("Q" if big else "H"), read_bytes(path, offset, size))
    if count > 4096:
        raise ValueError("no list of tags")
    table = read_bytes(path, offset + size, count * entry + width)
    (following,) = struct.unpack(order + number, table[count * entry :])
    tags, description = set(), b""
    for start in range(0, count * entry, entry):
        tag, _ = struct.unpack(order + "HH", table[start : start + 4])
        tags.add(tag)
        if tag == 270:
            length, place = struct.unpack(order + 2 * number, table[start + 4 : start + 4 + 2 * width])
            description = read_bytes(path, place, min(length, 4096)) if length > width else b""
    return tags, description, following == 0


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp")
TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")

# What a file's name says; TIFF files are looked into.
SUFFIXES = {
    "nifti": (".nii", ".nii.gz"),
    "hdf5": (".h5", ".hdf5", ".hdf", ".he5"),
    "netcdf": (".nc", ".nc4", ".cdf", ".netcdf"),
    "numpy": (".npy", ".npz", ".raw"),
    "parquet": (".parquet",),
    "webdataset": (".tar",),
    "latents": (".safetensors",),
    "tiff": TIFF_SUFFIXES,
    "image_folder": IMAGE_SUFFIXES,
}
# What the first bytes of a file say where its name says nothing.
MAGIC = {
    b"\x89HDF": "hdf5",
    b"CDF": "netcdf",
    b"\x93NUMPY": "numpy",
    b"PAR1": "parquet",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
    b"\x89PNG": "image_folder",
    b"\xff\xd8\xff": "image_folder",
}
_GEO_TAGS = {33550, 34264, 34735, 42113}  # pixel scale, transformation, key directory; GDAL's mark of no data
_SHOWN = 5
_LOOK_AT = 20  # folders


def guess_kind(path: str) -> str:
    """Return the kind of source at a path or URL: by what is there, or by the name where nothing is there yet."""
    path, _ = split_key(path, None)  # a name inside a file: file.h5::raw
    if path.endswith(".tar") and ("{" in path or "*" in path):  # a pattern of shards
        return "webdataset"
    try:
        return _guess(path) if not has_stars(path) else _guess_first(path)
    except OSError as error:
        raise UserError(f"data path {path!r} cannot be reached ({error}); check the address and the network") from error


def _guess_first(path: str) -> str:
    """Tell the kind of what a path with stars stands for, by the first."""
    first = find_matches(path)[0].path
    if first.lower().endswith(TIFF_SUFFIXES):  # flat ones are images, as those of a folder are
        return _guess_tiff(first, single="image_folder")
    return _guess(first)


def is_image(name: str) -> bool:
    """Tell whether a file name is that of an image; hidden files are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _guess(path: str) -> str:
    parts = [part.lower() for part in re.split(r"[/\\]", path)]
    zarr, n5 = any(p.endswith(".zarr") for p in parts), any(p.endswith(".n5") for p in parts)
    if is_url(path) and (zarr or n5):  # servers seldom list folders
        return (_guess_zarr(path) or "ome_zarr") if zarr else "n5"
    found = file_type(path)
    named = _by_name(path)
    if found == "folder":
        return _guess_folder(path, n5)
    if found == "file":
        return _guess_file(path, named)
    if zarr or n5:
        return "ome_zarr" if zarr else "n5"
    if named is not None:
        return named
    raise UserError(f"data path {path!r} does not exist; check the spelling and the folder that it is relative to")


def _by_name(path: str) -> str | None:
    name = base_name(path).lower()
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _guess_file(path: str, named: str | None) -> str:
    if named is not None and named != "tiff":
        return named
    start = read_bytes(path, 0, 512)
    kind = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), named)
    if kind is None and start[257:262] == b"ustar":
        kind = "webdataset"
    elif kind is None and start[344:348] in (b"n+1\0", b"n+2\0"):
        kind = "nifti"
    elif kind is None and re.fullmatch(r"(data_batch_\d|test_batch)(\.bin)?", base_name(path)):
        kind = "cifar10"
    if start.startswith(b"PK"):
        raise UserError(f"data path {path!r} is an archive; read what lies inside with zip://FOLDER::{path}")
    if kind is None:
        empty = "an empty file" if not start else "a file of a kind that neither its name nor its first bytes tell"
        raise UserError(f"data path {path!r} is {empty}; {_advice()}")
    return _guess_tiff(path) if kind == "tiff" else kind


def _guess_folder(path: str, n5: bool) -> str:
    files, folders = list_files(path), list_folders(path)
    kind = _guess_zarr(path)
    if kind is not None:
        return kind
    if n5 or ("attributes.json" in files and "n5" in _load(join(path, "attributes.json"))):
        return "n5"
    if "index.json" in files and "shards" in _load(join(path, "index.json")):
        return "latents"
    batches = re.compile(r"(data_batch_\d|test_batch)(\.bin)?|batches\.meta(\.txt)?|cifar-10-batches-(bin|py)")
    if any(batches.fullmatch(name) for name in (*files, *folders)):
        return "cifar10"
    if "imagesTr" in folders:  # nnU-Net, and the decathlon of medical segmentation before it
        below = join(path, "imagesTr")
        kind = _guess_folder(below, n5)
        flat = kind == "image_folder" and any(name.lower().endswith(TIFF_SUFFIXES) for name in list_files(below))
        return "tiff" if flat else kind
    counts = Counter(kind for name in files if (kind := _by_name(name)) is not None)
    if counts["tiff"]:
        first = next(name for name in files if name.lower().endswith(TIFF_SUFFIXES))
        kind = _guess_tiff(join(path, first), single="image_folder")
        counts[kind] += counts.pop("tiff")
    if not counts:
        if "data" in folders and any(name.endswith(".parquet") for name in list_files(join(path, "data"))):
            return "parquet"  # a repository of the hub
        inside = [names for folder in folders[:_LOOK_AT] if (names := list_files(join(path, folder)))]
        if 2 * sum(any(map(is_image, names)) for names in inside) > len(inside):
            return "image_folder"  # whose folders are classes
        if stores := [folder for folder in folders if folder.lower().endswith(HIERARCHIES)]:
            return _guess(join(path, stores[0]))
    if len(counts) == 1:
        return next(iter(counts))
    if counts:
        mixed = " and ".join(f"{number} of {kind}" for kind, number in counts.most_common())
        raise UserError(f"data path {path!r} holds files of several kinds ({mixed}); say which with `kind`")
    held = [f"{name}/" for name in folders] + files
    more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
    shown = f"holds {', '.join(held[:_SHOWN])}{more}, but no data that is known" if held else "is an empty folder"
    inner = f"give one of its folders, such as {join(path, folders[0])}; or " if folders else ""
    raise UserError(f"data path {path!r} {shown}; {inner}{_advice()}")


def _advice() -> str:
    names = ", ".join(kinds.known("source"))
    return f"give a path to data of one of these kinds, and name it with `kind` if it is not guessed: {names}"


def _guess_zarr(path: str) -> str | None:
    """Tell the kind by what zarr metadata say, if there are any."""
    tree = {name: _load(join(path, name)) for name in ("zarr.json", ".zattrs")}
    attributes: dict[str, Any] = {}
    for found in (tree["zarr.json"].get("attributes"), tree[".zattrs"]):
        attributes |= _tree(found)
    if "vitrail_latents" in attributes:
        return "latents"
    if {"ome", "multiscales", "plate", "bioformats2raw.layout"} & set(attributes):
        return "ome_zarr"
    if _is_xarray(path, tree["zarr.json"]):
        return "netcdf"
    if any(tree.values()) or any(file_type(join(path, name)) == "file" for name in (".zgroup", ".zarray", ".zattrs")):
        return "zarr"
    return None


def _is_xarray(path: str, metadata: dict[str, Any]) -> bool:
    """Tell whether a Zarr store is a dataset of xarray: it holds an array with the name of its own only axis."""
    arrays = _tree(_tree(metadata.get("consolidated_metadata")).get("metadata"))
    axes = {name: _tree(found).get("dimension_names") for name, found in arrays.items()}
    for name, found in _tree(_load(join(path, ".zmetadata")).get("metadata")).items():
        if name.endswith("/.zattrs"):
            axes[name.removesuffix("/.zattrs")] = _tree(found).get("_ARRAY_DIMENSIONS")
    group = metadata.get("node_type") == "group" or file_type(join(path, ".zgroup")) == "file"
    if not axes and group:  # nothing is gathered at the top: the arrays themselves tell
        for name in _folders(path)[:_LOOK_AT]:
            tree = _load(join(path, name, "zarr.json")) or _load(join(path, name, ".zattrs"))
            axes[name] = tree.get("dimension_names", tree.get("_ARRAY_DIMENSIONS"))
    return any(found == [name] for name, found in axes.items())


def _folders(path: str) -> list[str]:
    """List the folders inside; none where nothing is, or where a server does not list."""
    try:
        return list_folders(path)
    except (OSError, UserError):
        return []


def _load(path: str) -> dict[str, Any]:
    """Read a JSON file; nothing where there is none, or where it is broken: its source will say so."""
    try:
        found = read_json(path)
    except (OSError, ValueError):  # UserError is a ValueError
        return {}
    return _tree(found)


def _tree(found: Any) -> dict[str, Any]:
    """Return what was found where keys and values belong; nothing where it is something else."""
    return found if isinstance(found, dict) else {}


def _guess_tiff(path: str, single: str = "tiff") -> str:
    """Tell whether a TIFF file is a map, a stack or pyramid, or just one image (then `single`)."""
    try:
        tags, description, last = read_tags(path)
    except (struct.error, ValueError, OverflowError):
        return "tiff"  # which will say what is wrong with it
    if tags & _GEO_TAGS:
        return "geotiff"
    stack = not last or 330 in tags or b"<OME" in description or re.search(rb"ImageJ.*images=", description, re.DOTALL)
    return "tiff" if stack else single
