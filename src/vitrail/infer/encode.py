"""Data to latents, once: every item or tile goes through a codec and into a store that the latents source reads.

- the data of a recipe with a `codec`, or those that an autoencoder was trained on, encoded by itself
- samples are data.crop large; items that are larger give several, tiles as data.tiles says
- rank r takes every so many of the shards that are missing; batches within a shard are the same at every world size
- the plan tells the state of the data's files: where these have changed, old latents are never taken for theirs
- a shard is whole or not there, so that a second call with the same settings goes on where the first was stopped
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.codecs import Codec, Range, open_codec
from vitrail.data.batch import Labelling
from vitrail.data.dataset import Dataset, InOrder, open_in_order
from vitrail.data.files.fingerprint import data_states
from vitrail.data.files.stage import configs_to_open
from vitrail.data.latents.shards import ShardedLatents
from vitrail.data.latents.store import Rows
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy
from vitrail.data.source import class_names as source_classes
from vitrail.errors import BadData, UserError
from vitrail.foreign import trusted
from vitrail.models.model import sizes_of
from vitrail.parallel.agree import on_chief, on_chief_for_long, together
from vitrail.recipe import Recipe
from vitrail.recipe.load import Given, find_recipe
from vitrail.recipe.sections import Parallel, Precision
from vitrail.training.journal import Progress
from vitrail.training.run import joined
from vitrail.training.setup import Place, check_data, reading_threads, use_cache
from vitrail.weights.runs import list_checkpoints

Split = Literal["train", "valid"]
Store = Literal["safetensors", "zarr"]
FOR_TRAINING = ("weight", "stage", "statistics", "max_pixels")  # keys of an entry that change nothing of what is read


def encode(
    recipe: Given,
    out: str | Path,
    *,
    split: Split | None = None,
    batch: int = 32,
    rows: int = 1024,
    store: Store = "safetensors",
    trust: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Encode data.train and data.valid (or one of them) into OUT/train and OUT/valid; return facts of each."""
    if batch < 1 or rows < 1:
        raise UserError(f"--batch {batch} and --rows {rows} must be at least 1")
    recipe = find_recipe(recipe, overrides)
    config = codec_of(recipe, overrides)
    splits: list[Split] = [split] if split else ["train", "valid"]
    if split == "valid" and not recipe.data.valid:
        raise UserError("--split valid: the recipe has no data.valid; give one, or leave --split out")
    splits = [name for name in splits if getattr(recipe.data, name)]
    # The layout of a training says nothing here: every rank encodes, whatever their number.
    data = recipe.data.model_copy(update={"batch": "1/rank", "micro_batch": None})
    plain = {"parallel": Parallel(), "precision": Precision(), "data": data}
    asked = {"out": str(out), "split": split, "batch": batch, "rows": rows, "store": store, "trust": trust}
    with trusted(trust), joined(recipe.model_copy(update=plain), **asked) as (place, watchdog):

        def beat() -> None:
            watchdog.beat(0, "encoding")

        beat()
        use_cache(recipe.data.cache_mib << 20)
        opened = {name: together(partial(open_split, recipe, name, beat), place.control) for name in splits}
        check_data([dataset for dataset, _ in opened.values()], place)
        first = next(iter(opened.values()))[0]
        codec = together(partial(open_for, config, first, place, trust), place.control)
        shown = place.world.chief and not quiet
        work = Work(recipe, codec, place, batch=batch, rows=rows, store=store, shown=shown, beat=beat)
        return {name: work.encode(name, *opened[name], Path(out) / name) for name in splits}


def codec_of(recipe: Recipe, overrides: Sequence[str] = ()) -> Any:
    """Return the recipe's codec, or its own run where that is an autoencoder's."""
    if recipe.codec is not None:
        return recipe.codec
    idle = next((word for word in overrides if word.startswith(("model", "objective"))), None)
    if recipe.model.kind != "autoencoder":
        raise UserError(
            "codec: the recipe names none to encode with; add one, such as codec: {kind: autoencoder, path: RUN}, "
            "or give the run of an autoencoder"
        )
    if not list_checkpoints(recipe.run_dir / "checkpoints"):
        raise UserError(f"{recipe.run_dir} holds no checkpoint of this autoencoder; train it first: vitrail train ...")
    if idle is not None:
        raise UserError(f"{idle}: the autoencoder encodes as it was trained, which this does not change; leave it out")
    from vitrail.codecs.own import AutoencoderCodecConfig

    return AutoencoderCodecConfig(path=str(recipe.run_dir))


def open_split(recipe: Recipe, name: Split, tick: Callable[[], None]) -> tuple[Dataset, InOrder]:
    configs = configs_to_open(recipe.data, getattr(recipe.data, name), tick=tick)
    for number, c in enumerate(configs):
        if getattr(c, "kind", None) == "latents":
            raise UserError(
                f"data.{name}.{number}: {c.path} holds latents already; name the data to be encoded, such as "
                f"'data.{name}=[{{path: ...}}]', and their data.crop"
            )
    return open_in_order(configs, sizes_of(recipe, "crop"), recipe.data, where=f"data.{name}")


def open_for(config: Any, dataset: Dataset, place: Place, trust: bool) -> Codec:
    """Open the codec, which must fit the data."""
    dtype = np.result_type(*[source.dtype for source in dataset.sources])
    told: Range | None = (0.0, 255.0) if dtype == np.uint8 else None
    codec = open_codec(config, device=place.device, trust=trust, value_range=told)
    if codec.value_range is not None and told is None and getattr(config, "range", None) is None:
        raise UserError(
            f"codec.range: the codec takes values of -1 to 1, and the data are {dtype}, which does not tell what these "
            "stand for; set it to the lowest and the highest value, such as codec.range=[0,65535]"
        )
    return codec


@dataclass(frozen=True)
class Work:
    """The encoding of one list of data after the other."""

    recipe: Recipe
    codec: Codec
    place: Place
    batch: int
    rows: int
    store: Store
    shown: bool  # whether this rank shows progress
    beat: Callable[[], None]  # tells the watchdog that all is well

    def encode(self, name: Split, dataset: Dataset, order: InOrder, target: Path) -> dict[str, Any]:
        """Encode on all ranks together; each round, every rank writes a shard, so that none waits for long."""
        group, total, rows = self.place.control, order.epoch, self.rows
        self.codec.check((len(dataset.variables), *dataset.crop))
        entries = getattr(self.recipe.data, name)

        def states(tick: Callable[[], None]) -> list[dict[str, Any] | None]:
            return data_states(entries, dataset.sources, tick, leave_out=[target, target.parent])

        state = on_chief_for_long(states, group, self.beat)
        plan: dict[str, Any] = {
            "codec": self.codec.facts(),
            "data": data_facts(self.recipe, name, dataset) | {"state": state},
            "encoding": {"samples": total, "rows": rows, "batch": self.batch},
        }
        latents = ShardedLatents(target, plan, store=self.store)
        if on_chief(latents.begin, group):
            return summary(target, on_chief(latents.facts, group))
        shards = [range(first, min(first + rows, total)) for first in range(0, total, rows)]

        def find_missing(tick: Callable[[], None]) -> list[int]:
            found = []
            for number in range(len(shards)):
                tick()
                found += [] if latents.has(number) else [number]
            return found

        missing = on_chief_for_long(find_missing, group, self.beat)
        classes, policy = class_names(dataset), Policy.of(self.recipe.data)
        loader, lost = self.loader(dataset, order, classes, policy), Lost(policy)
        rank, ranks = self.place.world.rank, self.place.world.size
        done = total - sum(len(shards[number]) for number in missing)
        with Progress(total, done, enabled=self.shown) as progress:
            for first in range(0, len(missing), ranks):
                now = missing[first : first + ranks]
                before = done

                def tick(rows_done: int, before: int = before, ranks: int = len(now)) -> None:
                    self.beat()
                    progress.update(before + rows_done * ranks)

                if rank < len(now):
                    counters = shards[now[rank]]
                    groups = [counters[i : i + self.batch] for i in range(0, len(counters), self.batch)]
                    rows_of = encoded(loader, self.codec, groups, lost, tick)
                    together(partial(latents.write, now[rank], rows_of), group)
                else:
                    together(lambda: None, group)
                done += sum(len(shards[number]) for number in now)
                progress.update(done)
        self.beat()
        variables = dataset.variables if self.codec.kind == "identity" else None
        least = total - policy.most if policy.on_bad == "skip" else total

        def finish(tick: Callable[[], None]) -> dict[str, Any]:
            latents.check_states(states(tick))  # what changed on the way is in some shards and not in others
            return latents.finish(len(shards), classes=classes, variables=variables, least=least, tick=tick)

        return summary(target, on_chief_for_long(finish, group, self.beat))

    def loader(self, dataset: Dataset, order: InOrder, classes: tuple[str, ...], policy: Policy) -> Loader:
        labelling = Labelling("item", classes) if classes else None
        # Nothing stands in for what cannot be read: it is left out.
        strict = replace(policy, on_bad="error") if policy.on_bad == "skip" else policy
        return Loader(
            order,
            dataset.reader(order, lanes=1, cache_bytes=0, labelling=labelling),
            device=self.place.device,
            workers=reading_threads(self.recipe, self.place),
            prefetch=self.recipe.data.prefetch,
            policy=strict,
        )


class Lost:
    """A count of what this rank left out, where data.bad: skip lets it: a rank beyond what all may need not go on.

    What all ranks left out, in this call and before, is counted at the end.
    """

    def __init__(self, policy: Policy):
        self.policy, self.number = policy, 0

    def add(self, error: BadData) -> None:
        self.number += 1
        if self.policy.on_bad != "skip" or self.number > self.policy.most:
            raise error


def encoded(
    loader: Loader, codec: Codec, groups: Sequence[range], lost: Lost, tick: Callable[[int], None]
) -> Iterator[Rows]:
    """Yield latents and classes of each group of samples; unreadable ones are left out, or are an error."""
    loader.counters, at, seen = groups.__getitem__, 0, 0
    while at < len(groups):
        try:
            for batch in loader.batches(at, len(groups)):
                yield _numpy(codec, batch.values, batch.labels)
                seen, at = seen + len(groups[at]), at + 1
                tick(seen)
        except BadData:
            if lost.policy.on_bad != "skip":
                raise
            for counter in groups[at]:  # one by one: the others of this group are good
                try:
                    batch = loader.load([counter])
                except BadData as bad:
                    lost.add(bad)
                    continue
                yield _numpy(codec, batch.values, batch.labels)
            at += 1


def _numpy(codec: Codec, values: Any, labels: Any) -> Rows:
    latents = codec.encode(values).float().cpu().numpy()
    return np.ascontiguousarray(latents), None if labels is None else labels.cpu().numpy()


def class_names(dataset: Dataset) -> tuple[str, ...]:
    """The classes of the items, where all sources know them."""
    each = [source_classes(source) for source in dataset.sources]
    return tuple(dict.fromkeys(name for names in each for name in names)) if all(each) else ()


def data_facts(recipe: Recipe, name: Split, dataset: Dataset) -> dict[str, Any]:
    """Describe the data: enough to tell them from others, and to give decoded samples their names and voxel size."""
    first, c = dataset.sources[0], recipe.data
    item = first.items[0]
    spacing = [s * scale for s, scale in zip(item.spacing, item.scale, strict=True)]
    settings = c.model_dump(mode="json", include={"tiles", "fit", "filter"})
    return {
        "entries": [_entry(entry) for entry in recipe.to_tree()["data"][name]],
        "crop": list(dataset.crop),
        **settings,
        "axes": list(dataset.sample_axes),
        "variables": list(dataset.variables),
        "dtype": str(np.result_type(*[source.dtype for source in dataset.sources])),
        "spacing": [s for axis, s in enumerate(spacing) if axis != item.slices],
        "unit": item.unit,
        "items": sum(len(source.items) for source in dataset.sources),
    }


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what of an entry decides which values are read, however it is spelled, wherever the call is made."""
    kept = {key: value for key, value in entry.items() if key not in FOR_TRAINING}
    place, *inside = str(kept.get("path", "")).partition("::")  # a name inside a file: file.h5::raw
    if place and "://" not in place and Path(place).exists():
        kept["path"] = "".join((str(Path(place).resolve()), *inside))
    return kept


def summary(target: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what the command line shows."""
    left_out = facts["encoding"]["samples"] - facts["rows"]
    return {
        "path": str(target),
        "rows": facts["rows"],
        "shape": facts["shape"],
        "classes": len(facts["classes"]),
        "mean": facts["mean"],
        "std": facts["std"],
        **({"left_out": left_out} if left_out else {}),
    }
