"""Sets of samples to compare: generated ones by their manifest, real ones by vitrail's sources.

Both come in a random order that follows from a seed, batch by batch: sets may be larger than memory. Each sample comes
once before any comes twice, whatever the weights of a recipe's entries: the halves of real data must share nothing.
"""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.data.dataset import Dataset
from vitrail.data.files.stage import configs_to_open
from vitrail.data.look.inspect import entry_of
from vitrail.data.look.picture import by
from vitrail.data.order.sampler import Sample
from vitrail.data.reading.loader import Loader
from vitrail.data.source import class_names
from vitrail.data.sources import guess_kind
from vitrail.data.sources.image_folder import ImageSource
from vitrail.data.stored import TOLERANCE, unit_ratio
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.infer.folder import MANIFEST, Kind, check_sample, read_manifest, read_sample, sample_path, stored_type
from vitrail.layers.patches import per_axis
from vitrail.recipe import kinds
from vitrail.recipe.load import find_recipe
from vitrail.training.evaluate import count_once

THREADS = 4


class Some(NamedTuple):
    """A few samples of a set."""

    values: Tensor  # [B, C, *S] in the data's units
    names: list[str | None]  # of their classes


def is_samples(folder: str | Path) -> bool:
    """Tell whether a folder is one that `vitrail sample` has written, rather than a run."""
    return (Path(folder) / MANIFEST).is_file() and not (Path(folder) / "recipe.yaml").exists()


class Generated:
    """The samples of a folder with a manifest."""

    def __init__(self, folder: str | Path, *, seed: int):
        self.folder = Path(folder)
        try:
            self.manifest = facts = read_manifest(self.folder)
            files = [(str(file["path"]), file.get("class")) for file in facts["files"]]
            self.kind = Kind.of(facts)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:  # of a dtype: the last
            raise UserError(
                f"{self.folder}: its {MANIFEST} cannot be read ({type(error).__name__}: {error}); give a folder that "
                "`vitrail sample` has written"
            ) from None
        if not files:
            raise UserError(f"{self.folder}: its {MANIFEST} names no samples; make some with `vitrail sample`")
        missing = [name for name, _ in files if not sample_path(self.folder, name).exists()]
        if missing:
            raise UserError(
                f"{self.folder}: {len(missing)} of {len(files)} samples are missing, {missing[0]} the first; make them "
                "again with `vitrail sample`"
            )
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(key(seed, "samples") % 2**62))
        self.files = [files[number] for number in order.tolist()]
        self.size, self.title = len(files), str(folder)
        first = self._read(0)
        self.channels, self.shape = len(first), first.shape[1:]
        self.labelled = all(name is not None for _, name in files)

    def _read(self, number: int) -> np.ndarray:
        path = sample_path(self.folder, self.files[number][0])
        check_sample(self.folder, self.files[number][0], self.manifest)
        try:
            return read_sample(path, self.kind)
        except Exception as error:  # whatever a library says of a file that is cut off or of another kind
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{path} cannot be read ({why}); remove it, and make it again with `vitrail sample`"
            ) from None

    def batches(self, number: int, batch: int) -> Iterator[Some]:
        """Yield the first `number` samples of the order."""
        with ThreadPoolExecutor(THREADS) as pool:
            for start in range(0, number, batch):
                places = range(start, min(start + batch, number))
                found = list(pool.map(self._read, places))
                for place, sample in zip(places, found, strict=True):
                    if sample.shape != (self.channels, *self.shape):
                        raise UserError(
                            f"{self.folder / self.files[place][0]} is not as large as the others; remove it"
                        )
                yield Some(torch.from_numpy(np.stack(found)), [self.files[place][1] for place in places])


class Real:
    """Samples of a dataset that is not augmented."""

    def __init__(self, dataset: Dataset, *, seed: int, title: str):
        self.dataset, self.title = dataset, title
        self.notes: list[str] = []
        self.sampler = dataset.sampler(seed=key(seed, "real"), lanes=1, reuse=1)
        reader = dataset.reader(self.sampler, lanes=1, cache_bytes=0)
        self.loader = Loader(
            self.sampler, reader, device=torch.device("cpu"), workers=THREADS, prefetch=1, policy=dataset.policy
        )
        self.sources = [dataset.sources[number] for number in dataset.groups[0]]
        self.size, self.variables = self.sampler.epoch, self.sources[0].variables
        self.channels: list[int] | None = None  # those that samples have; None: all
        # Otherwise samples are crops of larger items, of which there is no end. Of whole images a filter may leave some
        # out, and the others still come once.
        self.whole = all(e.shape == (e.window or dataset.crop) for e in self.sampler.extents)
        self.once = self.whole or count_once(self.sampler) is not None
        if not self.whole:
            self.notes.append("real samples are crops that may overlap, so the floor may be too low")
        self.labelled = all(class_names(source) for source in self.sources)
        self.lost = 0  # samples that could not be read

    def statistics(self, *, seed: int) -> Statistics:
        """Fit statistics of the variables that samples have."""
        mean, std = self.dataset.fit_statistics(seed=seed, sources=self.dataset.groups[0])
        chosen = range(len(mean)) if self.channels is None else self.channels
        return Statistics(tuple(mean[c] for c in chosen), tuple(std[c] for c in chosen))

    def batches(self, number: int, batch: int) -> Iterator[Some]:
        """Yield the first `number` samples of the order, less unreadable ones, where the recipe skips them."""
        for start in range(0, number, batch):
            values = self.loader.load(range(start, min(start + batch, number))).values
            samples = self.loader.samples
            if self.channels is not None:
                values = values[:, self.channels]
            # Another whole image in place of one may lie in the other half.
            kept = [place for place, sample in enumerate(samples) if not (self.once and sample.attempt)]
            self.lost += len(samples) - len(kept)
            if kept:
                yield Some(values[kept], [self._name(samples[place]) for place in kept])

    def _name(self, sample: Sample) -> str | None:
        source: Any = self.dataset.sources[sample.source]
        label = source.items[sample.item].label if self.labelled else None
        return None if label is None else source.class_names[label]


def open_real(real: str | Path | None, generated: Generated, *, seed: int, otherwise: str | Path | None = None) -> Real:
    """Open real data like the samples: of a recipe or a run the held-out ones, or what lies at a path.

    Where nothing is said they are those of the samples' own run, or `otherwise` where that is not here.
    """
    shape = tuple(generated.shape)
    if real is None:
        real = find_run(generated) or otherwise
        if real is None:
            name = generated.manifest.get("run")
            raise UserError(
                f"real: the run {name!r} of these samples is not here; say what to compare with: --real PATH"
            )
    real = str(real)
    if real.endswith((".yaml", ".yml")) or (Path(real) / "recipe.yaml").is_file():
        recipe = find_recipe(real)
        c, where = recipe.data, "data.valid" if recipe.data.valid else "data.train"
        crop = per_axis(c.crop, recipe.model.ndim)
        if crop != shape:
            raise UserError(
                f"real: {real} has samples of {by(crop)}, and those of {generated.title} are {by(shape)}; compare "
                "with data of the same size: --real PATH"
            )
        entries = [dataclasses.replace(entry, weight=1.0) for entry in configs_to_open(c, c.valid or c.train)]
        settings = c.model_copy(update={"mix": "size"})
        found = Real(
            Dataset(entries, crop, where=where, settings=settings, mixed=True), seed=seed, title=f"{where} of {real}"
        )
        if not c.valid:
            found.notes.append(
                f"{real} has no data.valid: these are the data that it was trained on, so copies of them look perfect"
            )
    else:
        config = entry_of(kinds.find("source", guess_kind(real), key="--real"), {"path": real})
        dataset = Dataset([config], shape, where=real)
        found = Real(dataset, seed=seed, title=real)
        if not found.whole and isinstance(dataset.sources[0], ImageSource):
            raise UserError(
                f"real: the images of {real} are larger than samples of {by(shape)}; give a recipe instead, which "
                "says how they are made smaller (data.crop and data.fit)"
            )
    wanted, names = generated.kind.variables, found.variables
    if set(wanted) <= set(names):
        found.channels = None if wanted == names else [names.index(name) for name in wanted]
    elif len(names) != generated.channels:
        raise UserError(
            f"real: {found.title} has the variables {', '.join(names)}, and samples have {', '.join(wanted)}; compare "
            "with data that have the same"
        )
    types = sorted({str(stored_type(source.dtype)) for source in found.sources})
    if types != [str(generated.kind.dtype)]:
        raise UserError(
            f"real: the values of {found.title} are {', '.join(types)}, and those of {generated.title} are "
            f"{generated.kind.dtype}, so they are not on one scale; compare with data of the same type: --real PATH"
        )
    _compare_voxels(found, generated)
    return found


def _compare_voxels(found: Real, generated: Generated) -> None:
    """Note where voxels are of another size, as far as both say how large they are."""
    extent, kind = found.sampler.extents[0], generated.kind
    item = found.dataset.sources[extent.source].items[extent.item]
    sizes = [size * scale for size, scale in zip(item.spacing, item.scale, strict=True)]
    if item.slices is not None:
        del sizes[item.slices]
    ratio = unit_ratio(item.unit, kind.unit)
    if ratio is None or len(sizes) != len(kind.spacing):
        return
    if any(abs(size * ratio - own) > TOLERANCE * own for size, own in zip(sizes, kind.spacing, strict=True)):
        shown = [f"{by(voxel)} {unit or ''}".strip() for voxel, unit in ((sizes, item.unit), (kind.spacing, kind.unit))]
        found.notes.append(f"a voxel of {found.title} is {shown[0]}, and one of a sample {shown[1]}")


def find_run(generated: Generated) -> Path | None:
    """Find the run of samples: where it was, the one that they lie in, or the one of its name below runs."""
    name, told = str(generated.manifest.get("run")), generated.manifest.get("run_dir")
    places = (*([Path(told)] if isinstance(told, str) else []), generated.folder.resolve().parent.parent)
    for place in (*places, Path("runs") / name):
        if (place / "recipe.yaml").is_file():
            return place
    return None
