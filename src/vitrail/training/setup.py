"""The parts of a run, made from its recipe: device, data, completed recipe, parallel model.

Everything here happens before the first step and before the run folder is made, so a mistake leaves nothing behind.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vitrail.data import statistics
from vitrail.data.augment import Augmenter
from vitrail.data.batch import Labelling, Statistics
from vitrail.data.chunks import decoded as chunks
from vitrail.data.dataset import Dataset
from vitrail.data.files.stage import configs_to_open
from vitrail.data.normalize import Values
from vitrail.data.order.mixture import one_variable_each
from vitrail.data.order.sampler import Order
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy
from vitrail.draws import Draws, key
from vitrail.errors import TooLarge, UserError, expect
from vitrail.foreign import memory_bytes
from vitrail.launch.world import World, connect, find_world, share_of_cores
from vitrail.layers.backends import use_backend
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.patches import per_axis
from vitrail.models.model import Model, encoder_of, filled, known_variables, sizes_of
from vitrail.objectives.generate import range_of
from vitrail.objectives.objective import Objective, check_prepare, labels_wanted
from vitrail.parallel.agree import Group, on_chief, on_chief_for_long, together
from vitrail.parallel.check import refuse
from vitrail.parallel.float8 import rows_of
from vitrail.parallel.flow import Flow, parallelize
from vitrail.parallel.mesh import Layout, Mesh, layout_of
from vitrail.parallel.pipeline import cut, measure_costs, num_parts
from vitrail.parallel.replay import is_ours
from vitrail.parallel.split import Alone
from vitrail.recipe import Recipe
from vitrail.recipe import problems as sizes
from vitrail.recipe.normalize import Logarithm
from vitrail.training import alike
from vitrail.training.evaluate import Evaluator
from vitrail.training.failures import Watchdog, record_collectives

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIRST_TIMEOUT = timedelta(minutes=40)  # of PyTorch's own collectives: longer than any phase that the watchdog allows


@dataclass(frozen=True)
class Place:
    """The device of this process, and its way to talk to the others."""

    world: World
    device: torch.device
    threads: int
    store: dist.Store  # of this attempt
    root_store: dist.Store  # of the job, which outlives restarts
    control: Group  # gloo group for agreements on the main thread
    saving: Group  # gloo group for the thread that writes checkpoints


def find_place(recipe: Recipe, **call: Any) -> Place:
    """Meet the other ranks, which must be about to do the same; `call` is what was asked for beside the recipe."""
    world = find_world()
    if impossible := absurd_here(recipe, world):
        raise TooLarge(impossible)
    refuse(recipe, world.size)
    cuda = torch.cuda.is_available()
    if recipe.run.device == "cuda" and not cuda:
        raise UserError("run.device: 'cuda' was asked for but PyTorch sees no such device; use 'cpu' or 'auto'")
    use_cuda = cuda and recipe.run.device != "cpu"
    device = torch.device("cuda", world.device_index(torch.cuda.device_count())) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if recipe.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != recipe.run.deterministic:  # the call imports the compiler
        torch.use_deterministic_algorithms(recipe.run.deterministic)
    record_collectives()
    store, root_store = connect(world, device.type, timeout=FIRST_TIMEOUT)
    asked = os.environ.get("OMP_NUM_THREADS", "") if world.launcher != "torchrun" else ""  # it sets 1 unasked
    threads = int(asked) if asked.isdigit() and int(asked) > 0 else share_of_cores(world)
    torch.set_num_threads(threads)
    groups = [dist.new_group(backend="gloo", timeout=FIRST_TIMEOUT) for _ in range(2)]
    place = Place(world, device, threads, store, root_store, *groups)
    if world.size > 1:
        alike.compare(alike.start_facts(recipe, device.type, call), place.control, alike.START)
    return place


def absurd_here(recipe: Recipe, world: World) -> str | None:
    """Say why a recipe cannot be run on this machine, as far as arithmetic tells before anything is opened or made."""
    layout, host = layout_of(recipe.parallel, world.size), memory_bytes()
    share = recipe.data.global_batch(layout.data) // layout.data
    device = memory_of_rank(recipe, world, host)
    return sizes.beyond(recipe, share=share, parts=layout.parts, ranks=world.size, host=host, device=device)


def memory_of_rank(recipe: Recipe, world: World, host: int) -> int:
    """Return the bytes for the parameters of a rank: of its device, or its share of the host."""
    on_gpu = recipe.run.device != "cpu" and torch.cuda.is_available() and not recipe.parallel.offload
    if not on_gpu:
        return host // world.local_size
    return torch.cuda.get_device_properties(world.device_index(torch.cuda.device_count())).total_memory


@dataclass(frozen=True)
class DataParts:
    train: Dataset
    valid: Dataset | None
    statistics: Statistics
    batch: int  # samples of a step, over all ranks
    train_entries: list[Statistics] | None = None  # of each entry, where they differ
    valid_entries: list[Statistics] | None = None
    facts: dict[str, Any] | None = None  # by which a run that goes on knows its data again


def open_data(
    recipe: Recipe, place: Place, known: Statistics | None, *, beat: Callable[[], None] = lambda: None
) -> DataParts:
    """Open every source on every rank; statistics come from the checkpoint, the recipe or the data.

    `beat` is called by every rank, again and again while this takes long.
    """
    crop, c = sizes_of(recipe, "crop"), recipe.data
    labels = labels_wanted(recipe.objective, recipe.model)
    by_name = known_variables(recipe.model) is not None
    statistics.check(c)
    use_cache(c.cache_mib << 20)
    beat()

    def open_all(tick: Callable[[], None]) -> tuple[Dataset, Dataset | None]:
        options: dict[str, Any] = {"labels": labels, "settings": c, "tick": tick}
        train = Dataset(configs_to_open(c, c.train, tick=tick), crop, where="data.train", mixed=by_name, **options)
        valid = None
        if c.valid:
            valid = Dataset(configs_to_open(c, c.valid, tick=tick), crop, where="data.valid", mixed=by_name, **options)
        if valid is None or valid.variables == train.variables:
            return train, valid
        if len(train.groups) == 1 or not set(valid.variables) <= set(train.variables):
            raise UserError(
                f"data.valid has variables {list(valid.variables)}, data.train {list(train.variables)}; "
                "choose the same `variables`"
            )
        return train, valid

    if c.filter is not None:  # the first process makes the maps, and the others find them
        on_chief_for_long(lambda tick: bool(open_all(tick)), place.control, beat)
    train, valid = together(lambda: open_all(beat), place.control)
    check_data([train] if valid is None else [train, valid], place)
    batch = c.global_batch(layout_of(recipe.parallel, place.world.size).data)

    places = statistics.places_of(train, c.train)

    def measure(tick: Callable[[], None]) -> list[Any]:
        seed, names = recipe.run.seed, train.variables
        base = known or statistics.shared(train, seed=seed, tick=tick)
        options: dict[str, Any] = {"names": names, "seed": seed, "tick": tick}
        mine = statistics.of_entries(train, base, places=places, known=statistics.known_of(known), **options)
        theirs = None
        if valid is not None:
            same = statistics.known_of(statistics.with_entries(base, mine, places))
            own = statistics.places_of(valid, c.valid)
            theirs = statistics.of_entries(valid, base, places=own, known=same, **options)
        return [base, mine, theirs]

    base, *each = on_chief_for_long(measure, place.control, beat)
    mine, theirs = (None if part is None else [_statistics(one) for one in part] for part in each)
    return DataParts(train, valid, statistics.with_entries(_statistics(base), mine, places), batch, mine, theirs)


def open_parts(
    recipe: Recipe, place: Place, known: Statistics | None = None, watchdog: Watchdog | None = None
) -> tuple[Recipe, DataParts, Objective]:
    """Open the data, complete the recipe by them, and build its objective."""
    beat = (lambda *_: None) if watchdog is None else watchdog.beat
    if recipe.data.one_variable:
        recipe = together(lambda: with_one_variable(recipe), place.control)
    data = open_data(recipe, place, known, beat=partial(beat, 0, "opening the data"))
    beat(0, "start")
    recipe = complete(recipe, data)
    objective = recipe.objective.build(recipe.model, data.statistics)
    return recipe, data, expect(objective, Objective, f"objective: {type(recipe.objective).__name__}.build()")


def with_one_variable(recipe: Recipe) -> Recipe:
    """Return the recipe with an entry for each variable of its data."""
    if known_variables(recipe.model) is None:
        raise UserError(
            "data.one_variable: batches of one variable after another need a model that knows variables by name; give "
            "model.encoder.variables={known: [...]} (model.variables for a model that is an encoder), or leave it out"
        )
    entries = {name: one_variable_each(getattr(recipe.data, name)) for name in ("train", "valid")}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=entries)})


def check_data(datasets: list[Dataset], place: Place) -> None:
    """Refuse ranks that see other data: they would disagree on what each sample is."""
    if place.world.size > 1:
        alike.compare(alike.facts_of_ranks(datasets, datasets[0].policy), place.control, alike.DATA)


def use_cache(size: int) -> None:
    """Keep at most so many bytes of decoded chunks, in all sources of this process."""
    chunks.shared.limit = size
    if chunks.shared.bytes > size:
        chunks.shared.clear()


def policy_of(recipe: Recipe, place: Place, layout: Layout) -> Policy:
    """Return what loaders of this run do with bad data."""
    ranks = place.world.size
    hang_limit = recipe.run.hang_limit if ranks > 1 else None
    return Policy.of(recipe.data, hang_limit=hang_limit, shared=layout.data < ranks)


def _statistics(parts: list[list[float]]) -> Statistics:
    """Read statistics that another rank has sent."""
    return Statistics(*(tuple(part) for part in parts))


def complete(recipe: Recipe, data: DataParts) -> Recipe:
    """Fill in what the model and the objective take from the data, and check that they fit."""
    model, objective, crop = recipe.model, recipe.objective, sizes_of(recipe, "crop")
    if hasattr(objective, "fit"):
        objective, model = objective.fit(model, data.train.variables, recipe.data)
    given = getattr(objective, "condition", None)  # variables that only condition are none of the model's own
    number = getattr(model, "condition_channels", 0) if given is None else len(given)
    channels = count_channels(model, data.train.variables, given=number)
    if model.shape is not None and per_axis(model.shape, model.ndim) != crop:
        raise UserError(f"model.shape: {model.shape} differs from data.crop {list(crop)}; leave it out")
    update: dict[str, Any] = {"channels": channels, "shape": crop}
    if data.train.labels is not None and hasattr(objective, "names"):
        names = find_classes(recipe, data)
        update["classes"] = len(names)
        objective = dataclasses.replace(objective, names=names)
    return recipe.model_copy(update={"model": filled(model, update), "objective": objective})


def equip(objective: Objective, recipe: Recipe, place: Place, data: DataParts, *, trust: bool) -> None:
    """Tell an objective what its samples and pictures may need: the range of the data, and the way to pixels."""
    decode = None
    if recipe.codec is not None:
        from vitrail.codecs import decoder_for

        if not objective.decodes:
            raise UserError(
                f"codec: {recipe.codec.kind!r} turns samples into pixels, but objective {recipe.objective.kind!r} "
                "makes none; leave it out (codec=null), and encode data with `vitrail data encode`"
            )
        if recipe.log.pictures != "off":  # for which alone it is
            parts = [data.train] if data.valid is None else [data.train, data.valid]
            first, *others = [source.describe() for part in parts for source in part.sources]
            decode = together(lambda: decoder_for(recipe, first, place.device, trust, *others), place.control)
    value_range = range_of(np.result_type(*[source.dtype for source in data.train.sources]))
    if any(isinstance(kind, Logarithm) for kind in values_of(recipe, data, data.train).kinds):
        value_range = None  # what the objective sees is no value of the data's type
    objective.equip(value_range=value_range, decode=decode)


def count_channels(model: Any, variables: tuple[str, ...], *, given: int = 0) -> int:
    """Count channels of the model: variables of the data but for so many given, or all that it knows by name."""
    known = known_variables(model)
    if known is not None:
        try:
            known.ids(variables)
        except ValueError as error:
            key = "model.variables" if encoder_of(model) is model else "model.encoder.variables"
            raise UserError(f"{key}: {error}") from None
        return len(known.known)
    number = len(variables) - given
    if number < 1 or model.channels not in (None, number):
        raise UserError(
            f"model.channels: {model.channels}, but the data have {len(variables)} variables; "
            f"set it to {max(number, 1)} or leave it out"
        )
    return number


def find_classes(recipe: Recipe, data: DataParts) -> tuple[str, ...]:
    """Return the names of the classes, label 0 first: those of the recipe, else those that the data tell."""
    objective, model, train = recipe.objective, recipe.model, data.train
    if not hasattr(model, "classes"):
        raise UserError(f"objective.kind: {objective.kind!r} needs a model with classes, not {model.kind!r}")
    given, ignore, wanted = objective.names, getattr(objective, "ignore", None), model.classes or None
    told = () if given and train.labels == "voxel" else train.class_names(ignore)
    if given is None and not told and wanted is None:
        raise UserError(
            f"data.train: the labels of {recipe.data.train[0].path} do not name their classes; "
            "set objective.names, such as [background, membrane], or model.classes"
        )
    names = tuple(given or told or (f"class {number}" for number in range(wanted or 0)))
    if wanted not in (None, len(names)):
        where = "objective.names has" if given else "the data have"
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(
            f"model.classes: {wanted}, but {where} {len(names)} classes ({shown}); "
            f"set it to {len(names)} or leave it out"
        )
    for dataset in (train, data.valid):
        if dataset is None or (given and dataset.labels == "voxel"):
            continue
        found = dataset.class_names(ignore)
        strange = [name for name in found if name not in names]
        if dataset.labels == "item" and strange:
            raise UserError(
                f"{dataset.where}: class {strange[0]!r} is not among the classes {list(names)}; "
                "name all classes in objective.names, or leave its images out"
            )
        if dataset.labels == "voxel" and given is None and told and found[: len(names)] != names[: len(found)]:
            raise UserError(
                f"{dataset.where}: its labels mean {list(found)}, those of data.train {list(names)}; "
                "give them the same meaning, or name the classes in objective.names"
            )
    return names


def values_of(recipe: Recipe, data: DataParts, dataset: Dataset) -> Values:
    """Return what changes a dataset's values before augmentation, and what adaptive trees must know of them."""
    score = getattr(getattr(encoder_of(recipe.model), "tokens", None), "score", None)
    dtypes = [source.dtype for source in dataset.sources]
    known = Values(recipe.data.normalize, data.train.variables, data.statistics, dtypes)
    known.scored = getattr(score, "scale", None) == "data"
    if known.scored and None in [kind.ends for kind in known.kinds] and not known.are_bytes.all():
        raise UserError(
            "model.encoder.tokens.score.scale: data.normalize is none, so nothing is known of what is dark and bright; "
            "give two values of the data, such as scale: [0, 1], or let data.normalize measure them"
        )
    return known


def normalised(recipe: Recipe, data: DataParts) -> str:
    """Say in words how values are normalised."""
    words, own = values_of(recipe, data, data.train).describe(), data.train_entries
    if recipe.data.statistics == "volume" and own is not None:
        number = sum(len(statistics.rows_of(entry)) for entry in own)
        return f"each of {number:,} volumes by itself, on average {words}"
    return words if own is None or recipe.data.statistics == "shared" else f"each entry by itself, on average {words}"


def labelling_of(recipe: Recipe, dataset: Dataset) -> Labelling | None:
    """Return what the labels of a recipe's data mean; None where its objective needs none."""
    if dataset.labels is None:
        return None
    names = getattr(recipe.objective, "names", ())  # none of instances
    return Labelling(dataset.labels, names, getattr(recipe.objective, "ignore", None))


def make_augmenter(recipe: Recipe, data: DataParts) -> Augmenter:
    """Make what changes training samples; for sampling alone an uncompleted recipe does, too."""
    labelling = labelling_of(recipe, data.train)
    return Augmenter(
        recipe.data.augment,
        data.train.crop,
        seed=recipe.run.seed,
        statistics=data.statistics,
        labels=data.train.labels,
        num_classes=len(labelling.names) if labelling and labelling.names else None,
        ignore=labelling.ignore if labelling else None,
        axes=data.train.sample_axes,
    )


def make_sampler(recipe: Recipe, data: DataParts) -> Order:
    """Make the order of training samples: the same at every world size."""
    block = None if recipe.data.block is None else sizes_of(recipe, "block")
    lanes = recipe.data.lanes or (recipe.data.batch if isinstance(recipe.data.batch, int) else 64)
    return data.train.sampler(
        seed=recipe.run.seed,
        lanes=lanes,
        reuse=recipe.data.reuse,
        block=block,
        turn=recipe.data.augment.orientations,
        augmenter=make_augmenter(recipe, data),
        batch=recipe.data.batch,
    )


def make_loader(
    recipe: Recipe,
    place: Place,
    data: DataParts,
    sampler: Order,
    objective: Objective,
    flow: Flow | Alone,
    *,
    step: int,
    samples: int,
) -> Loader:
    """Make the reader of this rank's slice of each global batch, from a step before which so many samples were used.

    Ranks that share samples name them by the same counters; each reads what it needs of them.
    """
    share = data.batch // flow.layout.data

    def counters(now: int) -> range:
        first = samples + (now - step) * data.batch + flow.data_rank * share
        return range(first, first + share)

    stride = math.gcd(data.batch, sampler.lanes)  # a rank's slices begin at every so many lanes
    lanes = sampler.lanes // stride * min(share, stride)
    labelling = labelling_of(recipe, data.train)
    cache_bytes = recipe.data.cache_mib << 20
    reader = data.train.reader(sampler, lanes=lanes, cache_bytes=cache_bytes, labelling=labelling, augmented=True)
    return Loader(
        sampler,
        reader,
        counters,
        device=place.device,
        workers=reading_threads(recipe, place),
        prefetch=recipe.data.prefetch,
        slab=flow.split.slab(objective, reader.crop),
        augmenter=make_augmenter(recipe, data),
        statistics=data.train_entries,
        values=values_of(recipe, data, data.train),
        policy=policy_of(recipe, place, flow.layout),
    )


def micro_batch(recipe: Recipe, data: DataParts, layout: Layout) -> int:
    """Return the samples of one pass of a rank."""
    return recipe.data.micro_batch or max(1, data.batch // layout.data)


def reading_threads(recipe: Recipe, place: Place) -> int:
    return min(8, max(1, place.threads)) if recipe.data.workers is None else recipe.data.workers


def make_evaluator(
    recipe: Recipe, place: Place, data: DataParts, objective: Objective, flow: Flow, *, samples: int | None = None
) -> Evaluator:
    """Make the evaluator on fixed samples of data.valid, or (for pictures alone) of data.train where there is none."""
    dataset, number = data.valid or data.train, samples or recipe.eval.samples
    if number != "auto" and number * sizes.LEAST > memory_bytes():
        raise UserError(f"eval.samples: {number} samples cannot even be listed in the memory here; ask for fewer")
    if recipe.eval.tiles is not None and dataset is data.valid:
        dataset = dataset.tiled(recipe.eval.tiles)
    # Entries with different variables take turns sample by sample, so that which ones are measured depends on nothing.
    turns = 1 if data.valid is not None and len(dataset.groups) > 1 else None
    sampler = dataset.sampler(seed=key(recipe.run.seed, "valid"), lanes=1, reuse=1, batch=turns)
    reader = dataset.reader(sampler, lanes=1, cache_bytes=0, labelling=labelling_of(recipe, dataset))
    workers = reading_threads(recipe, place)
    return Evaluator(
        objective,
        Loader(
            sampler,
            reader,
            device=place.device,
            workers=workers,
            prefetch=1,
            slab=flow.split.slab(objective, reader.crop),
            statistics=data.train_entries if data.valid is None else data.valid_entries,
            values=values_of(recipe, data, dataset),
            policy=policy_of(recipe, place, flow.layout),
        ),
        seed=recipe.run.seed,
        samples=number,
        batch=micro_batch(recipe, data, flow.layout),
        blend=recipe.eval.blend,
        shown=recipe.log.variables or (),
        sure=data.valid is not None,
    )


@dataclass(frozen=True)
class Parts:
    """A model spread over ranks, and facts of the whole of it that a rank with some of its stages does not see."""

    flow: Flow
    cpu_mesh: Mesh
    parameters: int
    names: list[str]  # of the parameters
    drop_path_rates: list[float]

    @property
    def model(self) -> Model:
        return self.flow.model


def build_model(recipe: Recipe, place: Place, data: DataParts, objective: Objective) -> Parts:
    """Build the model on the meta device, then parallelise, fill and initialise it: a rank holds only its shards."""
    check_prepare(objective)
    c, on_gpu = recipe.parallel, place.device.type == "cuda"
    layout = layout_of(c, place.world.size)
    use_backend(c.attention, device=place.device, key="parallel.attention")
    mesh = Mesh.make(layout, place.device.type)
    cpu_mesh = Mesh.make(layout, "cpu") if on_gpu else mesh
    try:
        with torch.device("meta"):
            model = expect(recipe.model.build(), Model, f"model: {type(recipe.model).__name__}.build()")
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError("model: it has more parameters than can be counted; make it smaller") from error
    if c.replay == "auto" and not is_ours(recipe.model, recipe.objective):
        c = c.model_copy(update={"replay": False})
    rules, parameters = init_rules(model), sum(p.numel() for p in model.parameters())
    if many := sizes.too_many(parameters, place.world.size, memory_of_rank(recipe, place.world, memory_bytes())):
        raise TooLarge(f"model: it has {many}")
    rates, names = model.drop_path_rates(), [name for name, _ in model.named_parameters()]
    compute = recipe.precision.compute
    if compute == "auto":
        compute = "bf16" if on_gpu else "fp32"
    dtype = torch.float32 if compute == "fp32" else torch.bfloat16

    def rows(layer: str) -> int:
        samples, tokens = micro_batch(recipe, data, layout), objective.tokens_at(layer)
        return rows_of(layer, samples=samples, tokens=tokens, layout=layout, piece=c.chunk.mlp)

    flow = parallelize(
        model,
        mesh,
        layout,
        c,
        device=place.device,
        compute=dtype,
        reduce=DTYPES[recipe.precision.reduce],
        compiled=on_gpu if c.compile == "auto" else c.compile,
        float8_rows=rows if compute == "float8" else None,
        float8_all=recipe.precision.float8_layers == "all",
        counts=cut_pipeline(recipe, place, data, objective, model, layout, dtype) if layout.pipeline > 1 else (),
    )
    model.to_empty(device="cpu" if c.offload else place.device)
    initialise(model, rules, recipe.run.seed)
    return Parts(flow, cpu_mesh, parameters, names, rates)


def cut_pipeline(
    recipe: Recipe,
    place: Place,
    data: DataParts,
    objective: Objective,
    model: Model,
    layout: Layout,
    compute: torch.dtype,
) -> list[int]:
    """Count the model's stages in each stage of the pipeline: as the recipe says, or by what they cost here."""
    c = recipe.parallel
    if c.split != "measured":
        return list(c.split)

    def prepare() -> dict[str, Any]:
        sampler = data.train.sampler(seed=recipe.run.seed, lanes=1, reuse=1)
        reader = data.train.reader(sampler, lanes=1, cache_bytes=0, labelling=labelling_of(recipe, data.train))
        size = micro_batch(recipe, data, layout)
        loader = Loader(
            sampler,
            reader,
            device=place.device,
            workers=0,
            prefetch=1,
            statistics=data.train_entries,
            values=values_of(recipe, data, data.train),
            policy=policy_of(recipe, place, layout),
        )
        batch = loader.load(range(size))
        return objective.prepare(batch, Draws(recipe.run.seed, batch.counters))[0]

    def measure() -> list[float]:
        return measure_costs(model, prepare, place.device, compute=compute)

    return cut(on_chief(measure, place.control), num_parts(c, layout.pipeline))
