"""A folder of samples: which are asked for, where each goes, what the folder says of itself, and the files in it.

- samples are counted from 0; the classes take turns, so that any number of samples has all of them
- they are made in fixed groups: what a sample is, to the last bit, depends on its group, never on ranks or resumption
- all of them lie below `samples/`, a folder for each class, which is a dataset by itself; all else lies beside it
- `settings.json` comes first and tells another call apart; `manifest.json` comes last, when all is there
- their type, axes, variables and voxel size are those of the run's data, known without these from its recipe and from
  `data.json`, what its source said of itself

Images are written as PNG, volumes as OME-Zarr, anything as TIFF or NPY:

- whole numbers are rounded and kept in the range of their type; floats stay floats, in 32 bits
- a file is there whole or not at all, so what is there need not be made again
- the same values give the same bytes: no file holds a time or a random name
- what is read back may be somebody else's: it names no other file, runs no program, and becomes no more than it has
"""

import io
import json
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitrail import disk
from vitrail.contents import Layout, check_layout
from vitrail.data.files.handles import decoding
from vitrail.data.formats.images import decode, read_header
from vitrail.data.formats.ngff import write_ome_zarr
from vitrail.data.formats.tiff import check_chain, check_frame
from vitrail.data.latents.store import wrong_fact
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.data.stored import by
from vitrail.disk import write_whole
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_plain, open_plain, parse_json, read_json, read_plain
from vitrail.recipe.kinds import nearest
from vitrail.report.metrics import find_inside
from vitrail.sums import check_version, sealed, sum_of, unsealed

VERSION = 2  # of manifests; 1 has no checksums
SETTINGS, MANIFEST = "settings.json", "manifest.json"
SAMPLES = "samples"  # the folder of all samples
LAYOUT = Layout("folder of samples", (SETTINGS, MANIFEST, "grid.png"), (SAMPLES, "condition", "truth"))
LARGEST = 256 << 20  # bytes of a manifest, about 200 for each sample
SUFFIXES = {"png": ".png", "tiff": ".tif", "ome-zarr": ".ome.zarr", "npy": ".npy"}
FORMATS = ("auto", *SUFFIXES)
DATA = "data.json"  # of a run: what its data said of themselves
OME_UNITS = {  # of lengths, as OME-XML writes them; sizes in any other are left out, since readers would guess
    "angstrom": "Å",
    "picometer": "pm",
    "nanometer": "nm",
    "micrometer": "µm",
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "kilometer": "km",
    "inch": "in",
}


@dataclass(frozen=True)
class Plan:
    """The samples that are asked for, in groups, and the places of their files."""

    number: int
    batch: int  # samples of a group
    classes: tuple[int, ...]  # that take turns; none: samples have no class, or that of the data that they follow
    folders: tuple[str, ...]  # of all classes
    suffix: str

    @property
    def groups(self) -> int:
        return -(-self.number // self.batch)

    def counters(self, group: int) -> range:
        """Return those of a whole group: the last one goes beyond the number asked for, and that is not kept."""
        return range(group * self.batch, (group + 1) * self.batch)

    def label(self, counter: int) -> int | None:
        return self.classes[counter % len(self.classes)] if self.classes else None

    def file(self, counter: int, folder: str | None = None, suffix: str | None = None) -> str:
        """Return where a sample goes, below the folder of all; or what lies in another `folder` beside it."""
        label, suffix = self.label(counter), suffix or self.suffix
        if folder is not None or label is None or not self.folders:
            return f"{folder or SAMPLES}/{counter:05d}{suffix}"
        return f"{SAMPLES}/{self.folders[label]}/{counter // len(self.classes):05d}{suffix}"

    def missing(self, out: Path, beside: Mapping[str, str]) -> list[int]:
        """List groups that lack a file; `beside` are folders that have one for each sample, too: name, suffix."""

        def lacks(counter: int) -> bool:
            files = [self.file(counter), *(self.file(counter, *other) for other in beside.items())]
            return any(not (out / file).exists() for file in files)

        kept = (range(c.start, min(c.stop, self.number)) for c in map(self.counters, range(self.groups)))
        return [group for group, counters in enumerate(kept) if any(map(lacks, counters))]


def choose_classes(given: str | Sequence[str | int] | None, names: Sequence[str]) -> tuple[int, ...]:
    """Return numbers of classes by their names or numbers; all of them where none are given."""
    words = [str(w).strip() for w in (given.split(",") if isinstance(given, str) else given or ())]
    if not words or words == ["all"]:
        return tuple(range(len(names)))
    if not names:
        raise UserError(f"classes: {', '.join(words)}, but the model of this run knows no classes; leave them out")
    found = []
    for word in words:
        if word in names:
            found.append(list(names).index(word))
        elif word.isdecimal() and int(word) < len(names):
            found.append(int(word))
        else:
            near = nearest(word, list(names))
            hint = f"did you mean {near!r}?" if near else f"there are {_shown(names)}"
            raise UserError(
                f"classes: {word!r} is not a class of this run; {hint} (or numbers from 0 to {len(names) - 1})"
            )
    twice = next((number for number in found if found.count(number) > 1), None)
    if twice is not None:
        raise UserError(f"classes: {names[twice]!r} is given twice; name each class once")
    return tuple(found)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def folder_names(names: Sequence[str]) -> tuple[str, ...]:
    """Name a folder for each class, without what a file system or a reader of folders would take otherwise."""
    found: list[str] = []
    taken: set[str] = set()  # by systems that tell no capitals from small letters
    for number, name in enumerate(names):
        plain = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip().lstrip(".")[:100] or f"class {number}"
        tried = (plain, *(f"{plain} {other}" for other in range(number, number + len(names) + 1)))
        found.append(next(name for name in tried if name.casefold() not in taken))
        taken.add(found[-1].casefold())
    return tuple(found)


def read_settings(out: Path) -> dict[str, Any] | None:
    """Read what the samples of a folder were asked for with; None where there are none yet."""
    try:
        if not out.exists() or all(map(disk.is_draft, out.iterdir())):
            return None
        stored = read_json(out / SETTINGS)
        stored["number"], stored["batch"] = int(stored["number"]), int(stored["batch"])
        return stored
    except FileNotFoundError:
        raise UserError(f"{out} holds other files than samples; choose another folder with --out") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{out} holds a {SETTINGS} that is not of samples; choose another folder with --out") from None
    except OSError as error:
        raise UserError(f"{out} cannot be read ({error.strerror}); choose another folder with --out") from None


def open_folder(out: Path, settings: dict[str, Any], plan: Plan) -> int:
    """Make the folder, or go on in one that was begun with the same settings; the number that it is to hold.

    That is the one asked for, or as many as are there already.
    """
    stored, number = read_settings(out), plan.number
    if stored is not None:
        check_layout(out, LAYOUT)
        _check_samples(out)
        before = stored.pop("number")
        settings = json.loads(_text(settings))
        keys = sorted(key for key in {*stored, *settings} if stored.get(key) != settings.get(key))
        changes = [f"{key}: {stored.get(key)!r} became {settings.get(key)!r}" for key in keys]
        if changes:
            raise UserError(
                f"{out} holds samples that were asked for otherwise ({'; '.join(changes[:6])}); "
                "choose another folder with --out, or remove it"
            )
        there = (counter for counter in reversed(range(number, before)) if (out / plan.file(counter)).exists())
        number = max(number, next(there, 0) + 1)
        if number == before and all((out / plan.file(counter)).exists() for counter in range(number)):
            return number  # else the manifest would tell of files that are made anew
    try:
        out.mkdir(parents=True, exist_ok=True)
        disk.remove(out / MANIFEST, inside=out)
        write_whole(out / SETTINGS, _text(settings | {"number": number}))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); choose another folder with --out") from None
    return number


def sweep(out: Path) -> None:
    """Take away drafts that a kill has left behind, not those of a call that is writing now."""
    for folder in (out, *out.glob("*/"), *out.glob(f"{SAMPLES}/*/")):
        disk.sweep(folder)


def close_folder(out: Path, manifest: dict[str, Any]) -> None:
    """Write what the folder holds, with a checksum of each file and one of its own."""
    names = [entry[key] for entry in manifest["files"] for key in ("path", "condition", "truth") if key in entry]
    manifest = {"version": VERSION, **manifest, "sums": {name: sum_of(out / name) for name in names}}
    write_whole(out / MANIFEST, _text(sealed(manifest)))


def read_manifest(out: Path) -> dict[str, Any]:
    """Read what a folder of samples holds; ValueError where that is damaged. Version 1 has no checksums."""
    found = parse_json(read_plain(out / MANIFEST, LARGEST))
    check_version(found.get("version", 1), VERSION, str(out / MANIFEST))
    manifest = unsealed(found) if "seal" in found else found
    if manifest is None:
        raise ValueError("it does not match its own checksum")
    if not isinstance(manifest.get("sums", {}), dict):
        raise ValueError("its checksums belong to no files")
    return manifest


def sample_path(out: Path, name: Any) -> Path:
    """Return where a sample of a manifest lies; refuse what lies elsewhere, or can keep a reader waiting."""
    path = find_inside(out, name)
    if path is None:
        raise UserError(
            f"{out / MANIFEST} names {str(name)[:100]!r}, which does not lie in this folder; make them again with "
            "`vitrail sample`"
        )
    if not path.is_dir():
        check_plain(path)
    return path


def check_sample(out: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a sample that is not as it was made."""
    wanted = manifest.get("sums", {}).get(name)
    if wanted is not None and sum_of(sample_path(out, name)) != wanted:
        raise UserError(
            f"{out / name} does not match its checksum in {MANIFEST}: it was damaged or changed; remove it, and make "
            "it again with `vitrail sample`"
        )


def _check_samples(out: Path) -> None:
    """Check a folder that was complete once: what is damaged is not taken for good by a second call."""
    if not (out / MANIFEST).is_file():
        return
    try:
        manifest = read_manifest(out)
        for name in manifest.get("sums", {}):
            if sample_path(out, name).exists():
                check_sample(out, name, manifest)
    except UserError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{out / MANIFEST} cannot be read ({error}); choose another folder with --out, or remove this one"
        ) from None


def _text(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=1) + "\n").encode()


@dataclass(frozen=True)
class Kind:
    """The form of a sample [C, *axes], a channel for each variable."""

    dtype: np.dtype
    axes: tuple[str, ...]
    variables: tuple[str, ...]
    spacing: tuple[float, ...]
    unit: str | None
    format: str  # how they are written

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Kind":
        """Return the kind that a manifest describes."""
        lists = {name: tuple(facts[name]) for name in ("axes", "variables", "spacing")}
        return cls(dtype=np.dtype(facts["dtype"]), unit=facts["unit"], format=facts["format"], **lists)

    @property
    def suffix(self) -> str:
        return SUFFIXES[self.format]

    @property
    def value_range(self) -> tuple[float, float] | None:
        """Return the range of a type of few values; that of others is where their values lie."""
        if self.dtype not in (np.uint8, np.int8):
            return None
        limits = np.iinfo(self.dtype)
        return float(limits.min), float(limits.max)

    def describe(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "dtype": str(self.dtype),
            "axes": list(self.axes),
            "variables": list(self.variables),
            "spacing": list(self.spacing),
            "unit": self.unit,
        }


def read_facts(run: Path) -> dict[str, Any]:
    """Read what the training data of a run said of themselves; nothing, where that was not kept."""
    try:
        facts = read_json(run / DATA)
    except (OSError, ValueError):
        return {}
    if not isinstance(facts, dict):
        return {}
    if (key := wrong_fact(facts)) is not None:
        raise UserError(
            f"{run / DATA}: `{key}` is nothing that data tell of themselves; restore the file, or remove it"
        )
    return facts


def of_samples(facts: Mapping[str, Any], entry: Any) -> dict[str, Any]:
    """Turn facts of a source into those of its samples: an entry may ask for slices, or for another spacing."""
    axes, spacing = list(facts.get("axes") or ()), list(facts.get("spacing") or ())
    wanted, across = getattr(entry, "spacing", None), getattr(entry, "slices", None)
    if wanted and len(wanted) == len(axes):
        spacing = list(wanted)
    if across in axes and len(spacing) == len(axes):
        del spacing[axes.index(across)]
        axes.remove(across)
    return {**facts, "axes": axes, "spacing": spacing}


def kind_of(facts: Mapping[str, Any], ndim: int, variables: Sequence[str], wanted: str) -> Kind:
    """Return the kind of samples with the data's own variables."""
    dtype, known = stored_type(facts.get("dtype", "float32")), len(facts.get("axes", ())) == ndim
    axes = tuple(facts["axes"]) if known else ("z", "y", "x")[-ndim:]
    spacing = tuple(facts.get("spacing") or ()) if known else ()
    unit = facts.get("unit") if spacing else None
    format = choose_format(wanted, dtype, axes, len(variables))
    return Kind(dtype, axes, tuple(variables), spacing or (1.0,) * ndim, unit, format)


def decoded_kind(facts: Mapping[str, Any], ndim: int, channels: int, wanted: str) -> Kind:
    """Return the kind of decoded samples: as the data were before they became latents, where that was kept."""
    encoded = facts.get("codec") or {}
    told = encoded.get("data") or {}
    whole = {(0.0, 255.0): "uint8", (0.0, 65535.0): "uint16"}
    dtype = told.get("dtype") or whole.get(tuple(encoded.get("range") or ()), "float32")
    names = told.get("variables") or ()
    if len(names) != channels:
        names = ("red", "green", "blue") if channels == 3 else tuple(f"channel {c}" for c in range(channels))
    return kind_of({**told, "dtype": dtype}, ndim, names, wanted)


def stored_type(dtype: np.dtype | str) -> np.dtype:
    """Return the type of samples of such data: 32 bits at most, which is more than a model computes with."""
    dtype = np.dtype(dtype)
    if dtype.kind not in "iu":
        return np.dtype(np.float32)
    return np.dtype(f"{dtype.kind}{min(dtype.itemsize, 4)}")


def choose_format(wanted: str, dtype: np.dtype, axes: Sequence[str], channels: int) -> str:
    """Return the format that was asked for, or the usual one of such samples; refuse one that cannot hold them."""
    if wanted not in FORMATS:
        raise UserError(f"format: {wanted!r} is not known; choose one of {', '.join(FORMATS)}")
    flat, volume = len(axes) == 2, len(axes) == 3
    pixels = (dtype == np.uint8 and channels in (1, 3)) or (dtype == np.uint16 and channels == 1)
    if wanted == "auto":
        return "png" if flat and pixels else "ome-zarr" if volume and channels == 1 else "tiff"
    what = f"samples of {dtype} with {channels} channel{'s' * (channels > 1)} and axes {', '.join(axes)}"
    if wanted == "png" and not (flat and pixels):
        raise UserError(
            f"format: PNG holds images of uint8 with 1 or 3 channels or of uint16 with 1, not {what}; "
            "choose tiff or npy, or leave it out"
        )
    if wanted == "ome-zarr" and not (volume and channels == 1):
        raise UserError(
            f"format: OME-Zarr is written of volumes with 1 channel, not of {what}; choose tiff or npy, or leave it out"
        )
    return wanted


def as_stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Turn float values into the type of files: rounded and clipped where that holds whole numbers."""
    if not np.isfinite(values).all():
        raise UserError(
            "a sample is not finite, so the model or these settings are not sound; try an earlier checkpoint, less "
            "guidance or more steps"
        )
    if dtype.kind not in "iu":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    # In 64 bits, which hold the limits of 32-bit types exactly.
    return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(dtype)


def write_sample(path: Path, sample: np.ndarray, kind: Kind) -> Path:
    """Write [C, *axes] in the type and the format of its kind."""
    if kind.format == "ome-zarr":
        volume = _Volume(sample[0])
        return write_ome_zarr(path, volume, spacing=kind.spacing, unit=kind.unit, levels=1, name=kind.variables[0])
    if kind.format == "tiff":
        content = _tiff(sample, kind, path.name)
    else:
        content = _png(sample) if kind.format == "png" else _npy(sample)
    return write_whole(path, content, parents=True)


def read_sample(path: Path, kind: Kind) -> np.ndarray:
    """Read [C, *axes] as `write_sample` wrote it; of somebody else's folder, too, so that nothing is believed."""
    channels = len(kind.variables)
    with decoding(str(path)):
        if kind.format == "ome-zarr":  # by the source, to which a chunk that is not there is a loss
            return OmeZarrConfig(path=str(path)).open().read(0, (slice(None),) * len(kind.axes))
        with open_plain(path) as file:
            if kind.format == "png":
                return decode(file, str(path), kind.dtype, [0, 1, 2] if channels == 3 else None)
            found = _read_npy(file, path, kind) if kind.format == "npy" else _read_tiff(file, path, kind)
        return found.reshape(channels, *found.shape[-len(kind.axes) :])


@dataclass(frozen=True)
class _Volume:
    """A sample as the writer of OME-Zarr wants it."""

    image: np.ndarray
    labels: np.ndarray | None = None
    label_names: tuple[str, ...] = ()


def _is_colour(channels: int, kind: Kind) -> bool:
    return channels == 3 and len(kind.axes) == 2


def _png(sample: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    pixels = np.ascontiguousarray(np.moveaxis(sample, 0, -1) if len(sample) == 3 else sample[0])
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def _npy(sample: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, sample[0] if len(sample) == 1 else sample, allow_pickle=False)
    return stream.getvalue()


def _read_npy(file: BinaryIO, path: Path, kind: Kind) -> np.ndarray:
    header, size = read_header(file, str(path)), os.fstat(file.fileno()).st_size
    if header.dtype != kind.dtype or header.end != size:
        raise BadData(
            f"{path} says that it is {by(header.shape)} of {header.dtype}, {header.end:,} bytes, and it has {size:,}, "
            f"of {kind.dtype}; make it again with `vitrail sample`"
        )
    file.seek(0)
    return np.load(file, allow_pickle=False)


def _read_tiff(file: BinaryIO, path: Path, kind: Kind) -> np.ndarray:
    """Read [C, *axes] page by page: the description may name other files, and is not asked."""
    import tifffile

    check_chain(str(path), path)
    left, pages = os.fstat(file.fileno()).st_size, []
    with tifffile.TiffFile(file) as tif:
        page: Any
        for page in tif.pages:
            check_frame(str(path), page)
            shape = (page.imagelength, page.imagewidth, page.samplesperpixel)
            left -= math.prod(shape) * page.dtype.itemsize
            if left < 0 or not page.is_contiguous:
                raise BadData(f"{path} does not hold its pixels as they are; make it again with `vitrail sample`")
            pages.append(page.asarray().reshape(shape))
    found = np.stack(pages)  # [N, y, x, S]
    if _is_colour(len(kind.variables), kind):
        return np.moveaxis(found, -1, 1)[0]
    return found.reshape(len(kind.variables), *(-1,) * (len(kind.axes) - 2), *found.shape[1:3])


def ome_metadata(spacing: Sequence[float], unit: str | None, name: str) -> tuple[str, dict[str, Any]]:
    """Return axes as readers of TIFF know them, whatever the data call them, and metadata with voxel sizes."""
    letters, known = "ZYX"[-len(spacing) :], OME_UNITS.get(unit or "")
    # A file's random number would make equal samples differ.
    metadata: dict[str, Any] = {"UUID": str(uuid.uuid5(uuid.NAMESPACE_URL, name))}
    if known is not None:
        for letter, size in zip(letters, spacing, strict=True):
            metadata |= {f"PhysicalSize{letter}": size, f"PhysicalSize{letter}Unit": known}
    return letters, metadata


def _tiff(sample: np.ndarray, kind: Kind, name: str) -> bytes:
    """Encode as OME-TIFF, which holds voxel sizes, names of channels, and every type."""
    import tifffile

    letters, metadata = ome_metadata(kind.spacing, kind.unit, name)
    colour = _is_colour(len(sample), kind)
    if len(sample) == 1:
        pixels, axes = sample[0], letters
    elif colour:
        pixels, axes = np.moveaxis(sample, 0, -1), letters + "S"
    else:
        pixels, axes = sample, "C" + letters
        metadata["Channel"] = {"Name": list(kind.variables)}
    stream = io.BytesIO()
    tifffile.imwrite(
        stream,
        np.ascontiguousarray(pixels),
        ome=True,
        photometric="rgb" if colour else "minisblack",
        metadata={"axes": axes, **metadata},
    )
    return stream.getvalue()
