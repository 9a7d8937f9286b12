"""The sources of a recipe's `data` section, checked, and what is made of them: orders of samples, readers, statistics.

- sources must fit the crop, the objective and each other's shapes; where they do not, a sentence says what to do
- training draws samples from an order; what is encoded or predicted as a whole goes through every tile of each item
"""

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from vitrail.data import statistics
from vitrail.data.augment import Augmenter, orientations
from vitrail.data.batch import Labelling, Statistics
from vitrail.data.files.fingerprint import fingerprint
from vitrail.data.files.paths import unpacking
from vitrail.data.order.filter import NothingLeft, Occupancy, cell_of, check_filter, occupancy_of
from vitrail.data.order.mixture import Balanced, Groups, Shares, check_batch, group_entries, share, source_shares
from vitrail.data.order.sampler import Extent, Order, Sample, Sampler
from vitrail.data.order.tiles import Tiles
from vitrail.data.reading.pool import Policy
from vitrail.data.reading.reader import Reader
from vitrail.data.source import (
    ClassifiedSource,
    Item,
    LabelledSource,
    Source,
    class_names,
    label_names,
    notes_of,
    without,
)
from vitrail.data.stored import by
from vitrail.draws import key
from vitrail.errors import BadData, UserError
from vitrail.recipe.sections import Augment, Data, Fit
from vitrail.recipe.sections import Tiles as TilesSection


def check_source(name: str, source: Source, c: Any, crop: tuple[int, ...], labels: str | None, fit: Fit | None) -> None:
    """Refuse a source with other axes than samples have, or without what the objective learns from."""
    first = next(iter(source.items), None)
    across = None if first is None else first.slices
    if len(source.axes) - (across is not None) != len(crop):
        slices = f", of which slices across {source.axes[across]} are used" if across is not None else ""
        flat = across is None and len(source.axes) == len(crop) + 1 and hasattr(c, "slices")
        raise UserError(
            f"{name}: {c.path} has {len(source.axes)} axes ({', '.join(source.axes)}){slices}, "
            f"but the model has {len(crop)}; set model.ndim to {len(source.axes) - (across is not None)}, "
            + (f"cut it into slices with {name}.slices={source.axes[0]}, " if flat else "")
            + "or choose other data"
        )
    if fit is not None and len(source.axes) != 2:
        raise UserError(f"data.fit: is for images, and {name} has {len(source.axes)} axes; leave it out")
    if fit is not None:
        sides, least = (fit.resize, crop) if isinstance(fit.resize, tuple) else ((fit.resize,), (max(crop),))
        if any(side < size for side, size in zip(sides, least, strict=True)):
            raise UserError(
                f"data.fit.resize: {by(sides)} is less than data.crop {by(crop)}; resize to as much or more"
            )
    if labels == "item" and not (isinstance(source, ClassifiedSource) and source.class_names):
        raise UserError(
            f"{name}: the objective needs the class of every image, but {c.path} has none; "
            "put the images into one folder a class, such as cat/1.png and dog/1.png"
            + (", or say where classes are with class_pattern or class_table" if hasattr(c, "class_table") else "")
            + "".join(f"; {note}" for note in notes_of(source))
        )
    if labels == "voxel" and not isinstance(source, LabelledSource):
        said = f"{name}: the objective needs the class of every voxel"
        if hasattr(c, "labels"):
            raise UserError(f"{said}, but none are found for {c.path}; say where they are with `labels`")
        raise UserError(
            f"{said}, which data of kind {c.kind} cannot have; use one that can, such as ome_zarr, nifti or tiff"
        )
    if labels == "voxel" and not (isinstance(source, LabelledSource) and source.label_dtype is not None):
        if notes := notes_of(source):
            raise UserError(f"{name}: the objective needs the class of every voxel; {'; '.join(notes)}")
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


MOST_CLASSES = 10_000  # labels beyond it number things rather than kinds of things
SHOWN = 10  # sentences about items that are left out

log = logging.getLogger(__name__)


class Dataset:
    """The sources of one list (`data.train` or `data.valid`), checked against each other and the crop.

    `labels` says what an objective needs the classes of: each "item", each "voxel", or nothing. `settings` is the data
    section of a recipe, which says how samples are cut; without it they are random crops. `mixed` entries may have
    different variables: batches are then of one set of them. `tick` is called while long work gets on.
    """

    def __init__(
        self,
        configs: Sequence[Any],
        crop: tuple[int, ...],
        *,
        where: str,
        labels: Literal["item", "voxel"] | None = None,
        settings: Data | None = None,
        mixed: bool = False,
        tick: Callable[[], None] = lambda: None,
    ):
        self.configs, self.crop, self.where, self.labels, self.tick = list(configs), crop, where, labels, tick
        self.settings = settings if settings is not None else Data.model_construct(augment=Augment())
        self.policy = Policy.of(self.settings)  # of reads before the first step
        self.sources: list[Source] = []
        for c in configs:
            with unpacking():
                self.sources.append(c.open())
        if self.settings.bad == "skip":
            self._leave_out_bad()
        self._unchanged = Augmenter(Augment(), crop, seed=0)
        self.volumes: dict[int, list[Statistics]] = {}  # measured, of each source
        self.groups = group_entries([source.variables for source in self.sources])  # that batches are made of
        self.variables = tuple(dict.fromkeys(name for source in self.sources for name in source.variables))
        self.axes = self.sources[0].axes
        extents = []
        any_size = self.settings.fit is not None or (self._takes_whole and where == "data.train")
        for number, (source, c) in enumerate(zip(self.sources, configs, strict=True)):
            if source.variables != self.sources[0].variables and not mixed:
                raise UserError(
                    f"{where}.{number}: variables {list(source.variables)} do not match "
                    f"{list(self.sources[0].variables)} of {where}.0; choose the same `variables` for every entry"
                    + ("" if where != "data.train" else ", or a model that knows them by name (`variables`)")
                )
            check_source(f"{where}.{number}", source, c, crop, labels, self.settings.fit)
            if where == "data.train":
                check_augment(f"{where}.{number}", source, self.settings.augment)
            for index, item in enumerate(source.items):
                if not any_size:
                    check_size(f"{where}.{number}", source.axes, item, crop)
                extents.append(Extent(number, index, item.shape, item.chunk, item.origin, c.weight, slices=item.slices))
        if not extents:
            raise UserError(
                f"{where}: there is nothing in {', '.join(str(c.path) for c in configs)}; choose other data"
            )
        self.extents = extents
        self.occupancy: list[Occupancy] | None = None if self.settings.filter is None else self._look_for_filled()

    def _leave_out_bad(self) -> None:
        """Drop items that cannot even be opened, of sources that look at each before the run."""
        told: list[str] = []
        for source in self.sources:
            told += getattr(source, "leave_out_bad", list)()
            self.tick()
        for sentence in told[:SHOWN]:
            log.warning("bad data, left out of %s: %s", self.where, sentence)
        if len(told) > self.policy.most:
            raise BadData(
                f"{self.where}: {len(told)} items cannot be used, the first: {told[0]}; mend the data, or raise "
                f"data.most_bad {self.policy.most} if so many may be lost"
            )
        if len(told) > SHOWN:
            log.warning("bad data, left out of %s: %d items in all", self.where, len(told))

    @property
    def notes(self) -> list[str]:
        """Return what the sources have to say of how they took the data."""
        return [f"{self.where}.{n}: {note}" for n, source in enumerate(self.sources) for note in notes_of(source)]

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Return the names of a sample's axes."""
        return without(self.axes, self._item(self.extents[0]).slices)

    def _item(self, extent: Extent) -> Item:
        return self.sources[extent.source].items[extent.item]

    @property
    def _takes_whole(self) -> bool:
        """Return whether augmentation chooses boxes of whole images in training."""
        return self.settings.augment.resized_crop is not None

    def _look_for_filled(self) -> list[Occupancy]:
        """Find where each item has what the filter asks for."""
        f = self.settings.filter
        assert f is not None
        found = []
        for number, (source, c) in enumerate(zip(self.sources, self.configs, strict=True)):
            check_filter(source, f.by, f"{self.where}.{number}")
            mark = fingerprint([c], {"filter": f.model_dump(), "crop": self.crop}, [source])
            for e in self.extents:
                if e.source == number:
                    filled = occupancy_of(
                        source,
                        e.item,
                        cell_of(self._window(e, None)),
                        by=f.by,
                        above=f.above,
                        share=f.share,
                        mark=mark,
                        policy=self.policy,
                        tick=self.tick,
                    )
                    found.append(filled)
        return found

    def _check_filled(self, sources: Sequence[int], order: Sampler | Tiles | None) -> None:
        """Refuse entries without a sample that has enough in it."""
        f, some = self.settings.filter, set[int]()
        if f is None:
            return
        if order is not None:
            size = order.tiles_of if isinstance(order, Tiles) else order.weight_of
            some = {e.source for number, e in enumerate(order.extents) if size(number) > 0}
        empty = [number for number in sources if number not in some]
        if empty:
            raise UserError(
                f"data.filter: nowhere in {self.where}.{empty[0]} ({self.configs[empty[0]].path}) is {f.by} above "
                f"{f.above:g} in {f.share:.3g} of a sample; lower `share` or `above`, or leave this entry out"
                + (
                    ""
                    if self.settings.bad != "skip"
                    else " (places that could not be read count as empty: see the log)"
                )
            )

    def _window(self, extent: Extent, augmenter: Augmenter | None) -> tuple[int, ...]:
        """Return how many voxels of an item one sample is cut from, at most all of it."""
        item = self._item(extent)
        if self.settings.fit is not None and (augmenter is None or not self._takes_whole):
            return item.shape
        window = (augmenter or self._unchanged).window(item)
        return tuple(min(w, size) for w, size in zip(window, item.shape, strict=True))

    def _with_windows(self, extents: Sequence[Extent], augmenter: Augmenter | None) -> list[Extent]:
        """Add its window to each extent, found once for items that are alike: a folder may hold a million of them."""
        known: dict[Any, tuple[int, ...]] = {}
        found = []
        for extent in extents:
            item = self._item(extent)
            alike = (item.shape, item.spacing, item.scale, item.slices)
            if alike not in known:
                known[alike] = self._window(extent, augmenter)
            found.append(extent._replace(window=known[alike]))
        return found

    def windows(self) -> list[Extent]:
        """Return the extents with the voxels that one sample is cut from, as nothing changes it."""
        return self._with_windows(self.extents, None)

    def tiled(self, tiles: TilesSection) -> "Dataset":
        """Return the same data in tiles; weights, mixing and balance, which are for training, do not count."""
        other = copy.copy(self)
        other.settings = self.settings.model_copy(update={"tiles": tiles, "mix": "size", "balance": None})
        plain = ({"weight": 1.0} | ({"draw": "voxels"} if hasattr(c, "draw") else {}) for c in self.configs)
        other.configs = [dataclasses.replace(c, **keys) for c, keys in zip(self.configs, plain, strict=True)]
        return other

    def sampler(
        self,
        *,
        seed: int,
        lanes: int,
        reuse: int | None,
        block: Any = None,
        turn: bool = False,
        augmenter: Augmenter | None = None,
        batch: int | str | None = None,
    ) -> Order:
        """Build the order of samples.

        A `batch` is that of training: entries take turns by it, or ranks are shared out. Without it, and where entries
        have different variables, samples are those of the first set of them.
        """
        settings, weights = self.settings, [c.weight for c in self.configs]
        drawn = {getattr(c, "draw", "voxels") for c in self.configs}
        if settings.tiles is not None and (settings.mix != "size" or set(weights) != {1.0} or drawn != {"voxels"}):
            raise UserError(
                "data.tiles: every tile comes once an epoch, so entries and items have no other shares; leave out "
                "data.mix and the entries' weight and draw, or use data.balance"
            )
        codes = self.orientation_codes() if turn else (0,)
        options = {"lanes": lanes, "reuse": reuse, "block": block, "orientations": codes, "augmenter": augmenter}
        if batch is not None and settings.balance is not None and self.where == "data.train":
            return self._balanced(seed, check_balance(batch, self), options)
        shares = source_shares(settings.mix, weights)
        if len(self.groups) == 1 or batch is None:
            return self._order(self.groups[0], seed=seed, shares=shares, **options)
        orders = [
            self._order(group, seed=key(seed, "group", number), shares=shares, **options)
            for number, group in enumerate(self.groups)
        ]
        if shares is None:
            each = [float(o.cumulative[-1]) if isinstance(o, Sampler) else float(o.epoch) for o in orders]
        else:
            each = [sum(shares[number] for number in group) for group in self.groups]
        return Groups(orders, each, batch=check_batch(batch))

    def _order(
        self,
        sources: Sequence[int],
        *,
        reuse: int | None = 1,
        augmenter: Augmenter | None = None,
        shares: Sequence[float] | None = None,
        **options: Any,
    ) -> Sampler | Tiles:
        """Build the order of samples of some sources, crops at random places or tiles; `options` are those of both."""
        wanted = set(sources)
        chosen = [i for i, e in enumerate(self.extents) if e.source in wanted]
        extents = self._with_windows([self.extents[i] for i in chosen], augmenter)
        if self.settings.tiles is not None and augmenter is not None and not self._takes_whole:
            self._check_tiles(extents)
        options["occupancy"] = None if self.occupancy is None else [self.occupancy[i] for i in chosen]
        tiles = self.settings.tiles
        order: Sampler | Tiles
        try:
            if tiles is None:
                even = {n for n in wanted if getattr(self.configs[n], "draw", "voxels") == "items"}
                order = Sampler(extents, self.crop, reuse=reuse, shares=shares, even=even, **options)
            else:
                order = Tiles(extents, self.crop, overlap=tiles.overlap, edges=tiles.edges, **options)
        except NothingLeft:
            self._check_filled(sources, None)
            raise
        self._check_filled(sources, order)
        return order

    def _check_tiles(self, extents: Sequence[Extent]) -> None:
        """Refuse tiles that augmentation would cut from larger windows, which leaves gaps."""
        for e in extents:
            plain = self._window(e, None)
            if e.window != plain:
                raise UserError(
                    f"data.tiles: every part of the data comes once an epoch, but data.augment cuts a sample of "
                    f"{list(plain)} voxels anywhere from {list(e.window)}, which leaves gaps; leave out data.tiles, or "
                    "rotate, shear, elastic and scale below 1 (orientations, flip and intensities go with tiles)"
                )

    def _balanced(self, seed: int, batch: int, options: dict[str, Any]) -> Balanced:
        empty = sorted(set(range(len(self.sources))) - {e.source for e in self.extents})
        if empty:
            raise UserError(
                f"data.balance: there is nothing in {self.where}.{empty[0]} ({self.configs[empty[0]].path}) to give "
                "ranks to; leave this entry out"
            )
        orders = [
            self._order([number], seed=key(seed, "entry", number), **options) for number in range(len(self.sources))
        ]
        return Balanced(orders, self.balance(batch, orders), batch=batch)

    def balance(self, batch: int, orders: Sequence[Sampler | Tiles]) -> Shares:
        """Share out ranks and batches to entries, by the rule of data.balance; a batch is that of all ranks."""
        b = self.settings.balance
        assert b is not None
        if batch % b.ranks:
            raise UserError(f"data.balance.ranks: {b.ranks} do not divide data.batch {batch}; choose a multiple")
        images = [len(order.extents) for order in orders]
        totals = [self.count(order) for order in orders]
        return share(images, (), b.ranks, batch // b.ranks, groups=b.groups, batches=b.batches, totals=totals)

    def count(self, order: Sampler | Tiles) -> int:
        """Count the samples of one entry: its tiles, or the crops' worth of places that random crops come from."""
        if isinstance(order, Tiles):
            return order.epoch
        return max(1, round(float(order.cumulative[-1]) / order.extents[0].weight))

    def orientation_codes(self) -> list[int]:
        """List turns that keep the crop's shape and the voxels' size: thick sections are never laid on their side."""
        spacings = {
            without([s * r for s, r in zip(item.spacing, item.scale, strict=True)], item.slices)
            for source in self.sources
            for item in source.items
        }

        def keeps(axes: tuple[int, ...]) -> bool:
            return all(math.isclose(s[i], s[j], rel_tol=0.01) for s in spacings for i, j in enumerate(axes))

        return [code for code, (axes, _) in enumerate(orientations(self.crop)) if keeps(axes)]

    def reader(
        self,
        sampler: Order,
        *,
        lanes: int,
        cache_bytes: int,
        labelling: Labelling | None = None,
        augmented: bool = False,
    ) -> Reader:
        """Build a reader; it keeps whole blocks that are used again, where those of all lanes that a rank sees fit."""
        c = self.settings
        reader = Reader(
            self.sources,
            self.crop,
            whole_blocks=False,
            cache_bytes=cache_bytes,
            labelling=labelling,
            retries=c.retries,
            fit=None if c.fit is None or (augmented and self._takes_whole) else c.fit.resize,
        )
        largest = sampler.largest_block * max(reader.voxel_bytes(s) for s in self.sources)
        reader.whole_blocks = sampler.reuse > 1 and lanes * largest <= cache_bytes
        return reader

    def class_names(self, ignore: int | None = None) -> tuple[str, ...]:
        """Return the names of the classes as the sources tell them, label 0 first; nothing where they tell none.

        Classes of items are those of all sources, in the order of their first appearance. Values of voxels are named
        without gaps, but for 0 and `ignore`; sources that name a value differently are refused.
        """
        if self.labels == "item":
            return tuple(dict.fromkeys(name for s in self.sources for name in class_names(s)))
        named: dict[int, str] = {}
        for number, source in enumerate(self.sources):
            for value, name in label_names(source).items():
                if named.setdefault(value, name) != name:
                    raise UserError(
                        f"{self.where}.{number}: label {value} is {name!r} here but {named[value]!r} in another entry; "
                        "give the same meaning to the labels of every entry"
                    )
        values = [value for value in named if value != ignore]
        if not values:
            return ()
        if min(values) < 0 or max(values) >= MOST_CLASSES:
            raise UserError(
                f"{self.where}: labels from {min(values)} to {max(values)} are named, which are no numbers of classes; "
                "renumber them from 0, or name the classes in objective.names"
            )
        missing = [value for value in range(1, max(values)) if value not in named and value != ignore]
        if missing:  # often a value for voxels that nobody has looked at, which would bring hundreds of classes along
            after = min(value for value in values if value > missing[0])
            last = max(value for value in missing if value < after)
            gap = f"{missing[0]} is" if last == missing[0] else f"{missing[0]} to {last} are"
            raise UserError(
                f"{self.where}: label {after} is named, {gap} not: set objective.ignore: {after} or objective.names"
            )
        return tuple(named.get(value, f"class {value}") for value in range(max(values) + 1))

    def fit_statistics(
        self,
        *,
        seed: int,
        samples: int = statistics.SAMPLES,
        sources: Sequence[int] | None = None,
        kinds: Sequence[Any] | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> Statistics:
        """Measure each variable over crops drawn like training samples of some sources (with the same variables)."""
        sources = range(len(self.sources)) if sources is None else sources
        shares = source_shares(self.settings.mix, [c.weight for c in self.configs])
        order = self._order(sources, seed=key(seed, "statistics"), lanes=1, shares=shares)
        reader = self.reader(order, lanes=1, cache_bytes=0)
        return statistics.measure(order, reader, samples=samples, kinds=kinds, policy=self.policy, tick=tick)


def check_balance(batch: int | str, dataset: Dataset) -> int:
    """Return the batch that ranks are shared out of; refuse one that is no number, and groups of variables."""
    if not isinstance(batch, int):
        raise UserError(
            f"data.batch: {batch!r} is another number of samples in every world; with data.balance give the samples of "
            "a step over all ranks as one number"
        )
    if len(dataset.groups) > 1:
        raise UserError(
            "data.balance: entries with different variables cannot share a batch; leave it out, and they take turns"
        )
    return batch


def open_in_order(
    configs: Sequence[Any], crop: tuple[int, ...], data: Data, *, where: str
) -> tuple[Dataset, "InOrder"]:
    """Open a list of sources, and the order of their tiles: those of the recipe, or tiles that do not overlap.

    Augmentation, weights, mixing and balance, which are for training, do not count.
    """
    settings = data.model_copy(update={"augment": Augment()})
    dataset = Dataset(configs, crop, where=where, settings=settings).tiled(data.tiles or TilesSection())
    order = dataset.sampler(seed=0, lanes=1, reuse=1)
    assert isinstance(order, Tiles)
    return dataset, InOrder(order)


class InOrder:
    """An Order of samples whose counter goes through the tiles of each item, item by item."""

    lanes = reuse = 1

    def __init__(self, tiles: Tiles):
        self.tiles, self.extents, self.crop = tiles, tiles.extents, tiles.crop
        self.ends = np.cumsum([tiles.tiles_of(number) for number in range(len(self.extents))])
        self.epoch = int(self.ends[-1])
        self.largest_block = 0  # no block is read as a whole
        self.kept = [None if kept is None else np.flatnonzero(kept) for kept in tiles.kept]

    def __call__(self, counter: int, attempt: int = 0) -> Sample:
        which = int(np.searchsorted(self.ends, counter, side="right"))
        place = counter - (int(self.ends[which - 1]) if which else 0)
        extent, starts, kept = self.extents[which], self.tiles.starts[which], self.kept[which]
        if kept is not None:
            place = int(kept[place])
        window = extent.window or self.crop
        at = np.unravel_index(place, [len(s) for s in starts])
        start = tuple(int(s[i]) for s, i in zip(starts, at, strict=True))
        block = tuple(slice(s, s + w) for s, w in zip(start, window, strict=True))
        return Sample(extent.source, extent.item, block, start, 0, window, attempt)
