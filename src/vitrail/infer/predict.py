"""Predictions of a trained run for data of any size, on any number of ranks: the same numbers as one rank writes.

- the network lies whole on every rank, and each rank has rows of its own: nothing is exchanged but that all goes well
- a rank's threads read tiles ahead, its device computes, and another thread writes what is complete
- what is computed together depends on the data and the wishes alone (tiling.py), so that neither ranks, nor a kill
  between, change a bit of what is written
"""

import dataclasses
import json
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import vitrail
from vitrail import disk
from vitrail.data.dataset import Dataset
from vitrail.data.files.fingerprint import data_states
from vitrail.data.grid import without_labels
from vitrail.data.look.inspect import entry_of, read_settings
from vitrail.data.source import Source
from vitrail.data.sources import guess_kind
from vitrail.data.stored import TOLERANCE, by, unit_ratio
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.infer import shown
from vitrail.infer.blend import Row
from vitrail.infer.engine import Engine, Wishes, check_variables, in_bytes, taken_for
from vitrail.infer.eyes import Eyes, Form
from vitrail.infer.folder import stored_type
from vitrail.infer.instances import Instances, compare, open_truth
from vitrail.infer.outputs import Result, Stage, choose_format, run_stage
from vitrail.infer.padded import padded
from vitrail.infer.places import Frame, frame_of, untold
from vitrail.parallel.agree import on_chief, on_chief_for_long, together, together_for_long
from vitrail.recipe import Recipe, kinds
from vitrail.recipe.load import find_recipe
from vitrail.recipe.sections import Parallel, Precision
from vitrail.training.failures import Watchdog
from vitrail.training.journal import Progress
from vitrail.training.run import joined
from vitrail.training.setup import Place, reading_threads, use_cache
from vitrail.training.stitch import Blend
from vitrail.weights.runs import list_or_refuse, read_model, stored_recipe, with_checkpoint

MOST_NOTED = 3  # of what formats do not tell of items
INHERITED = ("axes", "level", "time", "missing", "nodata", "fill_value")  # keys of data.train for data alike


def predict(
    run: str | Path,
    path: str | Path,
    *,
    out: str | Path,
    write: str | None = None,
    checkpoint: str | int | None = None,
    weights: str | None = None,
    overlap: float | None = None,
    blend: Blend = "gaussian",
    flips: str | None = None,
    planes: str | None = None,
    dtype: str | None = None,
    batch: int | None = None,
    memory: float = 2.0,
    chunk: int | None = None,
    threshold: float = 0.5,
    smallest: int = 1,
    truth: str | None = None,
    compute: str | None = None,
    kind: str | None = None,
    settings: Sequence[str] = (),
    picture: str | Path | None = None,
    trust: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Write what a run's checkpoint says of the data at a path to `out`, and return facts of the making.

    `flips` and `planes` are names of axes, such as "x,y" (or "all" flips); `memory` is in GiB; `settings` are keys of
    the input as of an entry of data, key=value. The rest is as `vitrail predict --help` explains it.
    """
    began, target = time.monotonic(), Path(out)
    list_or_refuse(run, checkpoint)
    recipe = find_recipe(run)
    if not 0 < memory < float("inf"):
        raise UserError(f"memory: {memory} GiB must be a number above 0")
    room = int(memory * 2**30)
    asked: dict[str, Any] = {"path": str(path), "out": str(out), "write": write}
    asked |= {"checkpoint": checkpoint, "weights": weights}
    asked |= {"overlap": overlap, "blend": blend, "flips": flips, "planes": planes, "dtype": dtype, "batch": batch}
    asked |= {"threshold": threshold, "smallest": smallest, "truth": truth}
    asked |= {"memory": memory, "chunk": chunk, "compute": compute, "kind": kind, "settings": list(settings)}
    with trusted(trust), joined(whole(recipe), trust=trust, **asked) as (place, watchdog):
        use_cache(min(recipe.data.cache_mib << 20, room))

        def make(at: Path, manifest: dict[str, Any]) -> dict[str, Any]:
            eyes = Eyes(run, manifest, stored_recipe(manifest))
            opened = partial(
                Opened, eyes, str(path), write=write, dtype=dtype, planes=planes, kind=kind, settings=settings, pad=True
            )
            seen = together(opened, place.control)
            wishes = together(
                lambda: Wishes(
                    overlap=(0.0 if seen.form.on == "item" else 0.5) if overlap is None else overlap,
                    blend=blend,
                    flips=seen.flipped(flips),
                    batch=batch,
                    memory=room,
                    chunk=chunk,
                    threshold=threshold,
                    smallest=smallest,
                ),
                place.control,
            )
            work = together(lambda: Work(seen, wishes, target, place, compute), place.control)
            if truth is not None:
                together(lambda: work.check_truth(truth), place.control)
            if picture is not None:
                on_chief(lambda: shown.check(picture, seen.form), place.control)
            model = read_model(at, manifest, weights)
            facts = {"run": recipe.run.name, "step": manifest["step"], "checkpoint": digest(manifest)}

            def beat() -> None:
                watchdog.beat(manifest["step"], "comparing")

            made = work.run(model, facts | {"weights": weights}, watchdog, quiet=quiet)
            if truth is not None:
                made |= {"scores": on_chief_for_long(partial(work.compare, truth), place.control, beat)}
            return made | ({} if picture is None else work.show(Path(picture), made))

        found = with_checkpoint(run, checkpoint, make, place.control)
    return found | {"seconds": time.monotonic() - began}


def whole(recipe: Recipe) -> Recipe:
    """Return the recipe without the layout of its training: here every rank has all of the network."""
    data = recipe.data.model_copy(update={"batch": "1/rank", "micro_batch": None})
    return recipe.model_copy(update={"parallel": Parallel(), "precision": Precision(), "data": data})


def digest(manifest: dict[str, Any]) -> str:
    """Return a sum over the files of a checkpoint."""
    sums = sorted((name, entry["crc32"]) for name, entry in manifest["files"].items())
    return f"{zlib.crc32(json.dumps(sums).encode()):08x}"


class Opened:
    """What is to be predicted, opened as the run's training data were."""

    def __init__(
        self,
        eyes: Eyes,
        path: str,
        *,
        write: str | None,
        dtype: str | None,
        planes: str | None,
        kind: str | None,
        settings: Sequence[str],
        pad: bool = False,
    ):
        """`pad`: items that are smaller than a crop go on beyond their ends."""
        self.eyes, self.path, self.notes = eyes, path, list[str]()
        eyes.form(write, dtype, np.dtype(np.float32))  # refused before anything is opened
        self.kind = kind or guess_kind(path)
        cls: Any = kinds.find("source", self.kind, key="--kind")
        with without_labels():
            self.config, source = self._open(cls, path, read_settings(settings))
            across = self._planes(source, planes)
            self.configs = [dataclasses.replace(self.config, slices=axis) for axis in across] or [self.config]
            sources = [config.open() for config in self.configs] if across else [source]
        self.form: Form = eyes.form(write, dtype, stored_type(source.dtype), source.variables)
        self.plain = sources[0]  # of items as they are
        if pad and eyes.recipe.data.fit is None:
            wide = [padded(source, eyes.crop) for source in sources]
            sources = [source for source, _ in wide]
            self.notes += dict.fromkeys(note for _, notes in wide for note in notes)
        self.dataset = Dataset(
            [_Ready(c, s) for c, s in zip(self.configs, sources, strict=True)],
            eyes.crop,
            where="input",
            settings=eyes.settings(),
        )
        self._compare_voxels()

    @property
    def source(self) -> Source:
        return self.dataset.sources[0]

    def _open(self, cls: Any, path: str, given: dict[str, Any]) -> tuple[Any, Source]:
        """Open the path with the keys that are given, and those of the training data that say how it is read."""
        entry = self.eyes.recipe.data.train[0]
        fields = {field.name for field in dataclasses.fields(cls)}
        keys: dict[str, Any] = {}
        if getattr(entry, "kind", None) == self.kind:
            keys = {name: getattr(entry, name) for name in INHERITED if name in fields and hasattr(entry, name)}
        if (spacing := getattr(entry, "spacing", None)) and "spacing" in fields:
            keys |= {"spacing": list(spacing), "unit": getattr(entry, "unit", None) or self.eyes.facts.get("unit")}
            keys["level"] = None
        plain = {field.name: field.default for field in dataclasses.fields(cls)}
        keys = {name: value for name, value in keys.items() if value != plain.get(name)}
        keys |= given
        config = entry_of(cls, {"path": path, **keys})
        source = config.open()
        wanted = check_variables(self.eyes, source.variables, path)
        if wanted is not None:
            if taken := taken_for(source.variables, wanted):
                self.notes.append(f"{path}: {taken}; choose others with --set 'variables=[...]'")
            config = entry_of(cls, {"path": path, **keys, "variables": wanted})
            source = config.open()
        return config, source

    def _planes(self, source: Source, planes: str | None) -> list[str]:
        """Return the axes across which a volume is seen in slices."""
        ndim, axes = self.eyes.config.ndim, source.axes
        if len(axes) == ndim or source.items[0].slices is not None:
            if planes is not None:
                raise UserError(f"planes: {self.path} is seen as it is, by a model of {ndim} axes; leave it out")
            return []
        if len(axes) != ndim + 1:
            raise UserError(
                f"{self.path} has {len(axes)} axes ({', '.join(axes)}), but {self.eyes.run} was trained on {ndim}; "
                "give data with as many"
            )
        if not hasattr(self.config, "slices"):
            raise UserError(f"{self.path} has {len(axes)} axes, and data of kind {self.kind} are not cut into slices")
        if planes is None:
            trained = getattr(self.eyes.recipe.data.train[0], "slices", None)
            return [trained if trained in axes else axes[0]]
        return _axes(planes, axes, "planes")

    def flipped(self, flips: str | None) -> tuple[int, ...]:
        """Return the numbers of a sample's axes along which it is seen flipped, too."""
        axes = [str(n) for n in range(self.eyes.config.ndim)]
        if len(self.configs) == 1:
            axes = list(self.dataset.sample_axes)
        if flips is None:
            return ()
        names = axes if flips == "all" else _axes(flips, axes, "flips")
        return tuple(sorted(axes.index(name) for name in names))

    def _compare_voxels(self) -> None:
        """Note where voxels are of another size than those of the training data, as far as both tell."""
        facts, item = self.eyes.facts, self.source.items[0]
        trained, axes = facts.get("spacing"), facts.get("axes")
        entry = self.eyes.recipe.data.train[0]
        if getattr(entry, "spacing", None) or not trained or list(axes or ()) != list(self.source.axes):
            return
        ratio = unit_ratio(item.unit, facts.get("unit"))
        if ratio is None:
            return
        if any(abs(mine * ratio - own) > 5 * TOLERANCE * own for mine, own in zip(item.spacing, trained, strict=True)):
            mine, own = (" x ".join(f"{size:g}" for size in sizes) for sizes in (item.spacing, trained))
            self.notes.append(
                f"a voxel of {self.path} is {mine} {item.unit or ''}, and the run was trained on {own} "
                f"{facts.get('unit') or ''}; give --set spacing=[...] to resample it".replace("  ", " ")
            )


@dataclasses.dataclass(frozen=True)
class _Ready:
    """An entry whose source is open."""

    config: Any
    source: Source

    @property
    def path(self) -> str:
        return str(self.config.path)

    @property
    def weight(self) -> float:
        return 1.0

    def open(self) -> Source:
        return self.source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _axes(words: str, axes: Sequence[str], option: str) -> list[str]:
    """Return axes by their names: "z,y" or, where these are letters, "zy"."""
    given = [word.strip() for word in words.split(",")] if "," in words or words in axes else list(words)
    for name in given:
        if name not in axes or given.count(name) > 1:
            raise UserError(f"{option}: {words!r} names {name!r}; give axes among {', '.join(axes)}, each once")
    return given


class Work:
    """A prediction on the ranks that are here."""

    def __init__(self, seen: Opened, wishes: Wishes, out: Path, place: Place, compute: str | None):
        self.seen, self.wishes, self.place, self.compute = seen, wishes, place, compute
        items = len(seen.source.items)
        format = choose_format(out, seen.kind, seen.form, items)
        largest = max(int(np.prod(item.shape)) for item in seen.source.items)
        kept = format[0] != "ome-zarr" and items > 1 and largest * 8 * (seen.form.values + 1) <= wishes.memory
        instances = seen.form.write == "instances"  # which are made when all affinities are there
        form = in_bytes(seen.form, seen.eyes) if instances else seen.form
        self.engine = Engine(seen.eyes, form, seen.dataset, wishes, whole=kept and not instances, name=seen.path)
        cell = self.engine.tiling.cut.cell or (1,) * len(seen.source.axes)
        cells = [self.engine.tiling.cut.cells(item.shape) for item in seen.plain.items]
        if empty := [item.name for item, shape in zip(seen.plain.items, cells, strict=True) if 0 in shape]:
            raise UserError(f"{empty[0]} is smaller than a patch of the model {by(cell)}; give larger data")
        frames: list[Frame] = [frame_of(seen.plain, item, cells[item], cell) for item in range(items)]
        classes = seen.eyes.names
        options: dict[str, Any] = {"chunk": self.engine.chunk, "classes": classes}
        if instances:
            options |= {"affinities": form, "offsets": self.engine.offsets, "wishes": wishes}
            options["rows"] = self.engine.tiling.rows
        self.result = (Instances if instances else Result)(out, seen.form, frames, format, **options)
        self.result.alone = place.world.size == 1
        threads = max(1, reading_threads(seen.eyes.recipe, place))
        self.result.threads = self.result.at_once(threads, wishes.memory)
        lost = dict.fromkeys(note for frame in frames for note in untold(frame, format[1]))
        seen.notes += [f"{seen.path}: {note}" for note in list(lost)[:MOST_NOTED]]

    def facts(self, tick: Callable[[], None]) -> dict[str, Any]:
        """Return all that decides what is written, but for the network."""
        seen, engine = self.seen, self.engine
        entries = [json.loads(json.dumps(dataclasses.asdict(config), default=str)) for config in seen.configs]
        return {
            "input": entries,
            "state": data_states(seen.configs, seen.dataset.sources, tick),
            "write": seen.form.write,
            "dtype": str(seen.form.dtype),
            "wishes": dataclasses.asdict(self.wishes) | {"batch": engine.size},
            "chunk": engine.chunk,
            "device": self.place.device.type,
            "compute": self.compute or seen.eyes.recipe.precision.compute,
            "version": vitrail.__version__,
        }

    def run(self, model: Any, facts: dict[str, Any], watchdog: Watchdog, *, quiet: bool) -> dict[str, Any]:
        """Make the rows that are missing, and give the whole its name."""
        place, result, step = self.place, self.result, facts["step"]
        rank, ranks, tiling = place.world.rank, place.world.size, self.engine.tiling

        def beat() -> None:
            watchdog.beat(step, "predicting")

        beat()
        try:

            def begin(tick: Callable[[], None]) -> dict[str, Any]:
                return result.begin(facts | self.facts(tick), tick)

            began = on_chief_for_long(begin, place.control, beat)
            result.open_log(began["attempt"], rank)
            todo = sorted({*range(tiling.rows)} - {*began["done"]})
            mine = todo[len(todo) * rank // ranks : len(todo) * (rank + 1) // ranks]
            with Progress(tiling.rows, tiling.rows - len(todo), enabled=place.world.chief and not quiet) as progress:
                self._make(model, mine, -(-len(todo) // ranks), beat, progress)
            for calls in result.stages():

                def some(tick: Callable[[], None], calls: list[Stage] = calls) -> None:
                    with disk.told(result.out):
                        run_stage(calls[rank::ranks], result.threads, tick)

                together_for_long(some, place.control, beat)
            on_chief_for_long(result.publish, place.control, beat)
        finally:
            result.close()
        return {
            "out": str(result.out),
            "write": self.seen.form.write,
            "items": tiling.items,
            "step": step,
            "rows": tiling.rows,
            "made": len(todo),
            "notes": self.seen.notes,
        }

    def check_truth(self, labels: str) -> None:
        open_truth(self.seen.config, labels, self.seen.form, self.seen.plain)

    def compare(self, labels: str, tick: Callable[[], None]) -> dict[str, float]:
        """Return scores of the instances that were written beside labels of the input, on rank 0."""
        seen, result = self.seen, self.result
        truth = open_truth(seen.config, labels, seen.form, seen.plain)
        places = [result.out / name if result.many else result.out for name in result.names]
        objective: Any = seen.eyes.recipe.objective
        ignore, background = getattr(objective, "ignore", None), getattr(objective, "background", 0)
        return compare(truth, places, ignore, background, tick)

    def show(self, picture: Path, made: dict[str, Any]) -> dict[str, Any]:
        """Draw a picture of what was written, on rank 0; a picture that cannot be drawn is a note."""

        def draw() -> dict[str, Any]:
            seen, result = self.seen, self.result
            written = result.out / result.names[0] if result.many else result.out
            title = f"{seen.form.write.capitalize()} of {Path(seen.path).name}"
            try:
                with without_labels():
                    shown.draw(picture, written, seen.plain, seen.form, seen.eyes.names, title)
            except Exception as error:  # what was written is there
                return {"notes": [*made["notes"], f"{picture} could not be drawn: {error}"]}
            return {"picture": str(picture)}

        return on_chief(draw, self.place.control)

    def _make(self, model: Any, mine: Sequence[int], rounds: int, beat: Callable[[], None], progress: Progress) -> None:
        """Make the rows of this rank, one in each round of all ranks, and write each while the next is made."""
        eyes, place, before = self.seen.eyes, self.place, progress.step
        looking, recipe = eyes.on(model, place.device, self.compute), eyes.recipe
        threads = {"workers": max(1, reading_threads(recipe, place)), "prefetch": recipe.data.prefetch}
        getting_on = [beat]  # what is called after each batch
        rows = self.engine.rows(looking, mine, tick=lambda: getting_on[0](), **threads)
        try:
            with Writer(self._write) as writer:
                for done in range(rounds):

                    def one(tick: Callable[[], None], number: int = done) -> None:
                        getting_on[0] = tick
                        if number < len(mine):
                            writer.put(next(rows))

                    together_for_long(one, place.control, beat)
                    progress.update(min(progress.total, before + (done + 1) * place.world.size))
                together(writer.finish, place.control)
        finally:
            rows.close()

    def _write(self, row: Row) -> None:
        item, box = self.engine.tiling.place(row.number)
        try:
            shape, values = self.result.frames[item].shape, self.engine.finish(row)
            box = tuple(slice(min(b.start, n), min(b.stop, n)) for b, n in zip(box, shape, strict=True))
            within: Any = (..., *(slice(0, b.stop - b.start) for b in box))  # what was padded is cut off
            self.result.write(row.number, item, box, values[within])
        except OSError as error:
            raise UserError(
                f"{self.result.out} cannot be written ({error.strerror or error}); free some space and call again, "
                "or choose another path"
            ) from None


class Writer:
    """A thread that writes rows while the next ones are computed."""

    def __init__(self, write: Callable[[Row], None]):
        self.write = write
        self.waiting: queue.Queue[Row | None] = queue.Queue(maxsize=1)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="vitrail-writer", daemon=True)

    def __enter__(self) -> "Writer":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.waiting.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (row := self.waiting.get()) is not None:
            if self.error is None:
                try:
                    self.write(row)
                except BaseException as error:
                    self.error = error
            self.waiting.task_done()

    def put(self, row: Row) -> None:
        """Hand a row over; what went wrong with one before is raised here."""
        if self.error is not None:
            raise self.error
        self.waiting.put(row)

    def finish(self) -> None:
        """Wait until all is written."""
        self.waiting.join()
        if self.error is not None:
            raise self.error
