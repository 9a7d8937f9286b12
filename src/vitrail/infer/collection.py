"""Sets of samples to compare: generated ones by their manifest, real ones by vitrail's sources.

Both come in a random order that follows from a seed, each sample once before any comes twice, batch by batch: sets may
be larger than memory.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.advice import entry_of
from vitrail.data.dataset import Dataset
from vitrail.data.image_source import ImageSource
from vitrail.data.loader import Loader
from vitrail.data.sources import guess_kind
from vitrail.data.stage import as_opened
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.infer.kind import Kind
from vitrail.infer.write import read_sample
from vitrail.layers.patches import per_axis
from vitrail.recipe import kinds
from vitrail.recipe.find import find_recipe

THREADS = 4
MANIFEST = "manifest.json"


class Some(NamedTuple):
    values: Tensor  # [B, C, *S] in the data's units
    names: list[str | None]  # of their classes


def is_samples(folder: str | Path) -> bool:
    """Whether a folder is one that `vitrail sample` has written, rather than a run."""
    return (Path(folder) / MANIFEST).is_file() and not (Path(folder) / "recipe.yaml").exists()


class Generated:
    """The samples of a folder with a manifest."""

    def __init__(self, folder: str | Path, *, seed: int):
        self.folder = Path(folder)
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            facts = self.manifest
            files = [(str(file["path"]), file.get("class")) for file in facts["files"]]
            self.kind = Kind(
                dtype=np.dtype(facts["dtype"]),
                axes=tuple(facts["axes"]),
                variables=tuple(facts["variables"]),
                spacing=tuple(facts["spacing"]),
                unit=facts["unit"],
                format=facts["format"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.folder}: its {MANIFEST} cannot be read ({type(error).__name__}: {error}); give a folder that "
                "`vitrail sample` has written"
            ) from None
        if not files:
            raise UserError(f"{self.folder}: its {MANIFEST} names no samples; make some with `vitrail sample`")
        missing = [name for name, _ in files if not (self.folder / name).exists()]
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
        name, _ = self.files[number]
        try:
            return read_sample(self.folder / name, self.kind)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{self.folder / name} cannot be read ({error}); make it again") from None

    def batches(self, number: int, batch: int) -> Iterator[Some]:
        """The first `number` samples of the order."""
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
        self.sampler = dataset.sampler(seed=key(seed, "real"), lanes=1, reuse=1)
        reader = dataset.reader(self.sampler, lanes=1, cache_bytes=0)
        self.loader = Loader(self.sampler, reader, device=torch.device("cpu"), workers=THREADS, prefetch=1)
        self.size, self.variables = self.sampler.epoch, dataset.sources[self.sampler.extents[0].source].variables
        self.channels: list[int] | None = None  # those that samples have; None: all
        # Otherwise samples are crops of larger items, of which there is no end.
        self.whole = all(e.shape == (e.window or dataset.crop) for e in self.sampler.extents)
        self.labelled = all(getattr(source, "class_names", ()) for source in dataset.sources)

    def batches(self, number: int, batch: int) -> Iterator[Some]:
        for start in range(0, number, batch):
            counters = range(start, min(start + batch, number))
            values = self.loader.load(counters).values
            yield Some(values if self.channels is None else values[:, self.channels], [self._name(c) for c in counters])

    def _name(self, counter: int) -> str | None:
        sample = self.sampler(counter)
        source: Any = self.dataset.sources[sample.source]
        label = source.items[sample.item].label if self.labelled else None
        return None if label is None else source.class_names[label]


def open_real(real: str | Path | None, generated: Generated, *, seed: int, otherwise: str | Path | None = None) -> Real:
    """Real data like the samples: of a recipe or a run the held-out ones, or what lies at a path.

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
                f"real: {real} has samples of {_by(crop)}, and those of {generated.title} are {_by(shape)}; compare "
                "with data of the same size: --real PATH"
            )
        dataset = Dataset(as_opened(c, c.valid or c.train), crop, where=where, settings=c, mixed=True)
        found = Real(dataset, seed=seed, title=f"{where} of {real}")
    else:
        config = entry_of(kinds.find("source", guess_kind(real), key="--real"), {"path": real})
        dataset = Dataset([config], shape, where=real)
        found = Real(dataset, seed=seed, title=real)
        if not found.whole and isinstance(dataset.sources[0], ImageSource):
            raise UserError(
                f"real: the images of {real} are larger than samples of {_by(shape)}; give a recipe instead, which "
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
    return found


def find_run(generated: Generated) -> Path | None:
    """The run that samples come from: the one that they lie in, or the one of its name below runs."""
    name = str(generated.manifest.get("run"))
    for place in (generated.folder.resolve().parent.parent, Path("runs") / name):
        if (place / "recipe.yaml").is_file():
            return place
    return None


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
