"""Samples of a trained run, on any number of ranks: the same files, to the last bit on a CPU, as one rank makes.

- what is on disk is not made again: a call that was killed goes on where it was, and a larger number adds to it, in
  groups as large as before
- data are opened for conditions alone; what else is needed is stored with the run
- every refusal comes before the first sample, and before a folder is made
- a group is computed by the ranks of one place in the data-parallel axes, and written by the first of these. Forwards
  are collective, so all ranks run as many rounds; one that has no group left computes one that nobody writes
"""

import dataclasses
import itertools
import json
import math
import platform
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import vitrail
from vitrail.codecs import Codec, codec_for, decode_all
from vitrail.contents import Layout, check_layout
from vitrail.data.batch import Batch
from vitrail.data.normalize import Values
from vitrail.data.reading.loader import Loader
from vitrail.data.statistics import stored as stored_statistics
from vitrail.diffusion import SamplingConfig
from vitrail.diffusion.samplers import AUTO
from vitrail.disk import told
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.infer.folder import (
    DATA,
    Kind,
    Plan,
    as_stored,
    choose_classes,
    close_folder,
    decoded_kind,
    folder_names,
    kind_of,
    of_samples,
    open_folder,
    read_facts,
    read_settings,
    sweep,
    write_sample,
)
from vitrail.infer.pages import GRID, draw_samples, draw_scales
from vitrail.layers.patches import per_axis
from vitrail.objectives.generate import range_of
from vitrail.parallel.agree import on_chief, together
from vitrail.parallel.flow import Flow
from vitrail.parallel.mesh import layout_of
from vitrail.parallel.pipeline import cut, num_parts
from vitrail.recipe import Recipe
from vitrail.recipe.load import find_recipe, unsafe_changes
from vitrail.recipe.normalize import Logarithm
from vitrail.training.failures import Watchdog
from vitrail.training.journal import Progress
from vitrail.training.run import fitting, joined
from vitrail.training.setup import Place, build_model, make_evaluator, open_data
from vitrail.weights.runs import list_or_refuse, load_weights, stored_recipe, which_weights, with_checkpoint


def is_free(settings: SamplingConfig) -> bool:
    """Tell whether classes have no say anywhere on the way."""
    return not settings.guidance and tuple(settings.interval) == (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The wishes of a call; None leaves it to the recipe."""

    number: int = 64
    classes: str | Sequence[str | int] | None = None  # names or numbers, or "all", which take turns
    steps: int | None = None
    sampler: str | None = None
    guidance: float | Sequence[float] | None = None  # several: the same samples by each of them, side by side
    interval: Sequence[float] | None = None
    seed: int | None = None
    batch: int | None = None  # samples computed at once
    weights: str | None = None
    format: str = "auto"
    latents: bool = False  # keep them as they are, undecoded

    def settings(self, recipe: SamplingConfig) -> SamplingConfig:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("steps", "sampler", "guidance", "interval")}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("sampler", recipe.sampler) == "auto":  # what that stands for may change; what is stored may not
            given["sampler"] = AUTO
        if "interval" in given:
            if len(given["interval"]) != 2:
                raise UserError(f"interval: {list(given['interval'])} must be two numbers, such as 0.2,0.8")
            given["interval"] = tuple(map(float, given["interval"]))
        try:
            return dataclasses.replace(recipe, **given)
        except ValueError as error:
            raise UserError(str(error)) from None

    def refuse_idle(self, settings: SamplingConfig, *, codec: bool) -> None:
        """Refuse what would change nothing; `codec` tells whether the run has one."""
        if self.latents and not codec:
            raise UserError("latents: this run has no codec, so samples are written as they are; leave it out")
        if self.classes is not None and is_free(settings):
            raise UserError("classes: with guidance 0 samples have no class; leave one of the two out")
        if self.interval is not None and settings.guidance == 1:
            raise UserError("interval: guidance is 1, so there is nothing to guide; give a guidance, or leave it out")

    def each(self) -> dict[str, "Wishes"]:
        """Return the wishes by the folder inside that of the call: one for each of several guidances."""
        if self.guidance is None or isinstance(self.guidance, int | float):
            return {"": self}
        scales = list(self.guidance)
        if isinstance(self.guidance, str) or len(scales) < 2 or len({f"{one:g}" for one in scales}) < len(scales):
            raise UserError(f"guidance: {scales} must be one number, or several different ones, such as 1,2,4")
        plain = dataclasses.replace(self, interval=None)  # for a guidance of 1, which acts nowhere
        return {f"{SCALE}{one:g}": dataclasses.replace(plain if one == 1 else self, guidance=one) for one in scales}

    def folder(self, step: int) -> str:
        """Return a name that tells calls apart; number may grow in the same folder."""
        words = [f"step-{step:08d}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "number" or value == field.default:
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
            elif isinstance(value, float):
                value = f"{value:g}"
            words.append(field.name if value is True else f"{field.name}-{value}")
        return re.sub(r"[^\w.,=-]+", "_", "-".join(words))[:150]


SCALE = "guidance-"  # folders of several guidances begin with it
CONDITION, TRUTH = "condition", "truth"  # folders beside the samples of a run that makes them from something


@dataclass(frozen=True)
class Beside:
    """Held-out samples that new ones are made from: sample i from held-out sample i."""

    loader: Loader
    condition: Kind
    truth: Kind


class Made(NamedTuple):
    """A group of samples."""

    counters: range
    values: Tensor  # [B, C, *S] in the data's units
    batch: Batch | None  # what they were made from


@dataclass(frozen=True)
class Work:
    """Groups of samples in the making, shared out over the ranks."""

    objective: Any
    flow: Flow
    place: Place
    plan: Plan
    kind: Kind
    settings: SamplingConfig
    seed: int
    out: Path
    decode: Callable[[Tensor], Tensor] | None
    beside: Beside | None
    values: Values  # which takes back what normalisation did to the data before the model saw them

    def run(self, todo: Sequence[int], progress: Progress, beat: Callable[[], None]) -> None:
        """Make these groups."""
        ranks, here = self.flow.layout.data, self.flow.data_rank
        writes = all(self.flow.mesh.rank(axis) == 0 for axis in ("pipeline", "context", "tensor"))
        asked = self.settings.steps * self.settings.method.evaluations  # about
        for first in range(0, len(todo), ranks):
            share = min(ranks, len(todo) - first) * self.plan.batch
            counted = first + here < len(todo)
            seen = itertools.count(1)

            def tick(begun: int = first * self.plan.batch, share: int = share, seen: Any = seen) -> None:
                beat()
                progress.update(min(begun + share - 1, begun + share * next(seen) // asked))

            beat()  # reading what samples are made from may take long
            made = self.make(todo[first + here if counted else 0], tick)
            together(partial(self.write, made) if counted and writes else lambda: None, self.place.control)
            progress.update(first * self.plan.batch + share)
        self.flow.forget_gathered()

    def make(self, group: int, tick: Callable[[], None]) -> Made:
        """Make the samples of a group, with what they were made from."""
        counters, device = self.plan.counters(group), self.place.device
        batch = None if self.beside is None else self.beside.loader.load(list(counters), whole=True)
        if self.plan.classes:
            labels: Tensor | None = torch.tensor([self.plan.label(counter) for counter in counters], device=device)
        else:
            labels = None if batch is None else batch.labels
        values = self.objective.generate(
            lambda inputs: self.flow.split.run(self.objective.axes, self.flow, inputs),
            counters=counters,
            seed=self.seed,
            labels=labels if self.objective.classes else None,
            condition=None if batch is None else self.objective.fields(batch)[1],
            statistics=None if batch is None else self.objective.own_statistics(batch),
            settings=self.settings,
            device=device,
            tick=tick,
        )
        return Made(counters, values, batch)

    def write(self, made: Made) -> None:
        """Write every sample of a group that was asked for, each in a file of its own."""
        values, batch = self.decoded(made.values), made.batch
        kept = [counter for counter in made.counters if counter < self.plan.number]
        try:
            self.write_all(kept, None, values, self.kind)
            if batch is not None and self.beside is not None:
                truth, condition = self.objective.split(batch.values.float())
                self.write_all(kept, TRUTH, self.decoded(truth), self.beside.truth)
                names = self.beside.condition.variables
                given = self.values.restore(condition, [name.removeprefix("coarse ") for name in names])
                self.write_all(kept, CONDITION, given, self.beside.condition)
        except OSError as error:
            raise UserError(
                f"{self.out} cannot be written ({error.strerror or error}); free some space and call again, or choose "
                "another folder with --out"
            ) from None

    @torch.no_grad()
    def decoded(self, values: Tensor) -> Tensor:
        values = self.values.restore(values, self.objective.made)
        return values if self.decode is None else self.decode(values)

    def write_all(self, counters: Sequence[int], folder: str | None, values: Tensor, kind: Kind) -> None:
        if values.shape[1] != len(kind.variables):
            raise UserError(
                f"samples have {values.shape[1]} channels, not the {len(kind.variables)} of {kind.variables}"
            )
        for counter, value in zip(counters, values.float().cpu().numpy(), strict=False):
            path = self.out / self.plan.file(counter, folder, kind.suffix)
            if not path.exists():
                write_sample(path, as_stored(value, kind.dtype), kind)


def labels_of(loader: Loader, plan: Plan) -> list[int]:
    """List classes of the held-out samples; where good ones stand in for bad ones, reading alone tells which."""
    if loader.policy.on_bad != "skip":
        return [loader.reader.item_label(loader.sampler(counter)) for counter in range(plan.number)]
    found: list[int] = []
    for group in range(plan.groups):
        labels = loader.load(list(plan.counters(group)), whole=True).labels
        found += [] if labels is None else np.asarray(labels.cpu()).tolist()
    return found[: plan.number]


MOST_VOXELS, MOST_SAMPLES = 2**22, 16  # of a group, where no size was asked for


def sample_run(
    run: str | Path,
    *,
    checkpoint: str | int | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    overrides: Sequence[str] = (),
    quiet: bool = True,
    **wishes: Any,
) -> dict[str, Any]:
    """Write samples of a run's checkpoint to a folder; its manifest, with what is to be said about the making.

    The wishes are number, classes, steps, sampler, guidance, interval, seed, batch, weights, format and latents, as
    `vitrail sample --help` explains them. Of several guidances the manifest of each is in a list, `scales`.
    """
    began, wish = time.monotonic(), Wishes(**wishes)
    wishes_of = wish.each()
    for name in ("number", "batch"):
        value = getattr(wish, name)
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} must be at least 1")
    list_or_refuse(run, checkpoint)
    call = {"checkpoint": checkpoint, "out": out and str(out), "trust": trust, **dataclasses.asdict(wish)}
    recipe = fitting(generating(find_recipe(run, overrides), run), overrides)
    with trusted(trust), joined(recipe, **call) as (place, watchdog):

        def make(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
            changed = stored_recipe(manifest, overrides)
            recipe = fitting(generating(changed, run), overrides)
            folder = Path(out) if out is not None else Path(run) / "samples" / wish.folder(manifest["step"])
            changes = unsafe_changes(stored_recipe(manifest).to_tree(), changed.to_tree())
            by_key = {key: new for key, _, new in changes}
            if wishes_of.keys() != {""}:
                on_chief(lambda: check_scales(folder), place.control)

            def begin(folder: Path, asked: Wishes) -> Job:
                if asked.batch is None:
                    before = on_chief(lambda: read_settings(folder), place.control) or {}
                    asked = dataclasses.replace(asked, batch=before.get("batch"))
                return Job(Path(run), recipe, manifest, asked, place, trust, by_key)

            jobs = {folder / name: begin(folder / name, asked) for name, asked in wishes_of.items()}
            made = [finish(path, inside, job) for inside, job in jobs.items()]
            if len(made) == 1:
                return made[0]
            kind = next(iter(jobs.values())).kind
            on_chief(lambda: draw_scales(folder, made, kind), place.control)
            notes = list(dict.fromkeys(line for each in made for line in each["notes"]))
            number = sum(each["made"] for each in made)
            return {"out": str(folder), "made": number, "notes": notes, "number": made[0]["number"], "scales": made}

        def finish(path: Path, folder: Path, job: Job) -> dict[str, Any]:
            todo = job.open(folder)
            number = job.plan.number
            made = sum(counter < number for group in todo for counter in job.plan.counters(group))
            files = job.make(path, folder, todo, watchdog, quiet=quiet)
            versions = {"vitrail": vitrail.__version__, "torch": torch.__version__, "python": platform.python_version()}
            whole = job.asked | {"number": number, "run_dir": str(Path(run).resolve()), "names": list(job.names)}
            whole |= {"versions": versions, "files": files}
            on_chief(lambda: job.close(folder, whole), place.control)
            return whole | {"out": str(folder), "made": made, "notes": job.notes}

        whole = with_checkpoint(run, checkpoint, make, place.control)
    return whole | {"seconds": time.monotonic() - began}


def check_scales(folder: Path) -> None:
    """Refuse a folder for several guidances that holds anything else."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in names if name != GRID and not name.startswith(SCALE)]
    if others:
        raise UserError(f"{folder} holds {min(others)!r}, which is of no guidance; choose another folder with --out")
    if names:  # what lies deeper is looked at where samples are added to it
        scales = tuple(name for name in names if name != GRID)
        check_layout(folder, Layout("folder of samples", (GRID,), scales, shallow=scales))


class Job:
    """One call for samples of a run; all that can be refused is, when it is made."""

    def __init__(
        self,
        run: Path,
        recipe: Recipe,
        manifest: dict[str, Any],
        wish: Wishes,
        place: Place,
        trust: bool,
        changes: Mapping[str, Any],
    ) -> None:
        self.recipe, self.manifest, self.wish, self.place = evenly_cut(recipe, place), manifest, wish, place
        model, objective = recipe.model, recipe.objective
        self.weights = which_weights(wish.weights, recipe)
        self.settings = wish.settings(objective.sampling)
        wish.refuse_idle(self.settings, codec=recipe.codec is not None)
        known = on_chief(lambda: read_facts(run), place.control)
        facts = of_samples(known, recipe.data.train[0])
        self.objective = objective.build(model, stored_statistics(manifest["statistics"]))
        self.objective.check_sampling(self.settings)
        self.objective.value_range = range_of(np.dtype(facts["dtype"])) if "dtype" in facts else None
        variables = objective.variables or [f"channel {c}" for c in range(model.channels)]
        self.values = Values(recipe.data.normalize, variables, self.objective.statistics)
        if any(isinstance(kind, Logarithm) for kind in self.values.kinds):
            self.objective.value_range = None
        self.codec: Codec | None = None
        if recipe.codec is not None and not wish.latents:
            if not known:
                raise UserError(f"{run / DATA} is missing, and without it latents cannot be decoded; restore it")
            self.codec = together(lambda: codec_for(recipe, facts, place.device, trust), place.control)
        self.decode = None if self.codec is None else partial(decode_all, self.codec)
        self.facts, self.made = facts, [name for name in variables if name not in objective.condition]
        self.kind = self.kind_of()
        self.conditional = bool(model.condition_channels)
        self.names = tuple(self.objective.names) if self.objective.classes else ()
        classes = choose_classes(wish.classes, self.names)
        if self.conditional and wish.classes is None:
            classes = ()  # each sample has the class of what it is made from
        self.classless = is_free(self.settings)
        size = wish.batch or min(default_batch(recipe), wish.number)
        folders = () if self.conditional or self.classless else folder_names(self.names)
        self.plan = Plan(wish.number, size, classes, folders, self.kind.suffix)
        self.seed = recipe.run.seed if wish.seed is None else wish.seed
        self.changes = self.of_samples_alone(changes)
        self.notes: list[str] = []
        if not known:
            self.notes.append(
                f"{run / DATA} is missing, which tells the type, the range and the voxel size of the data, so samples "
                f"are written as {self.kind.dtype}; restore it"
            )
        if recipe.ema is None:
            self.notes.append(
                "this run has no moving average of its weights, whose samples are better: train with ema: {}"
            )

    def kind_of(self) -> Kind:
        facts, made, ndim, wanted = self.facts, self.made, self.recipe.model.ndim, self.wish.format
        if self.decode is None:
            return kind_of(facts, ndim, made, wanted)
        shape = per_axis(self.recipe.model.shape, ndim)
        with torch.no_grad():  # what comes out tells how many channels there are
            channels = self.decode(torch.zeros(1, len(made), *shape, device=self.place.device)).shape[1]
        return decoded_kind(facts, ndim, channels, wanted)

    def of_samples_alone(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes of the run's recipe that decide what samples hold; a codec is known by its own facts."""
        sections = ("objective", "precision", *(("data",) if self.conditional else ()))
        return {key: new for key, new in changes.items() if key.startswith(sections)}

    def codec_facts(self) -> dict[str, Any] | None:
        """Return what tells a codec from others, wherever it lies: its fingerprint, else its settings."""
        if self.codec is None:
            return None
        facts = {key: value for key, value in self.codec.facts().items() if key != "origin"}
        return facts if self.codec.fingerprint else facts | {"settings": self.recipe.to_tree()["codec"]}

    @property
    def asked(self) -> dict[str, Any]:
        """Return all that decides what the files hold."""
        sums = sorted((name, entry["crc32"]) for name, entry in self.manifest["files"].items())
        return {
            "run": self.recipe.run.name,
            "step": self.manifest["step"],
            "checkpoint": f"{zlib.crc32(json.dumps(sums).encode()):08x}",
            "weights": self.weights,
            "seed": self.seed,
            "batch": self.plan.batch,
            "classes": [self.names[label] for label in self.plan.classes],
            "settings": dataclasses.asdict(self.settings),
            "changes": self.changes,
            "codec": self.codec_facts(),
            **self.kind.describe(),
        }

    @property
    def beside(self) -> dict[str, Kind]:
        """Return the kinds of what is written beside the samples."""
        if not self.conditional:
            return {}
        objective = self.recipe.objective
        given = [*(f"coarse {name}" for name in self.made if objective.coarse), *objective.condition]
        return {CONDITION: kind_of(self.facts, self.recipe.model.ndim, given, "auto"), TRUTH: self.kind}

    def open(self, folder: Path) -> list[int]:
        """List groups that are not there yet, of as many samples as were asked for or are there."""

        def begin() -> dict[str, Any]:
            number = open_folder(folder, self.asked, self.plan)
            sweep(folder)
            plan = dataclasses.replace(self.plan, number=number)
            suffixes = {name: kind.suffix for name, kind in self.beside.items()}
            return {"number": number, "todo": plan.missing(folder, suffixes)}

        found = on_chief(begin, self.place.control)
        if found["number"] > self.plan.number:
            self.notes.append(f"{folder} holds {found['number']} samples already, which are kept")
            self.plan = dataclasses.replace(self.plan, number=found["number"])
        return found["todo"]

    def make(
        self, checkpoint: Path, folder: Path, todo: Sequence[int], watchdog: Watchdog, *, quiet: bool
    ) -> list[dict[str, Any]]:
        """Make what is missing, and list all files."""
        recipe, step, place = self.recipe, self.manifest["step"], self.place
        data: Any = None
        if self.conditional:
            beat = partial(watchdog.beat, step, "opening the data")
            data = open_data(recipe, place, stored_statistics(self.manifest["statistics"]), beat=beat)
        watchdog.beat(step, "start")
        labels: list[int] | None = None
        if todo or self.conditional:
            flow = build_model(recipe, place, data, self.objective).flow
            load_weights(flow.model, checkpoint, self.manifest, self.weights, place.saving)
            flow.model.eval()
            beside = None
            if self.conditional:
                loader = make_evaluator(recipe, place, data, self.objective, flow).loader
                beside = Beside(loader, self.beside[CONDITION], self.beside[TRUTH])
            work = Work(
                self.objective,
                flow,
                place,
                self.plan,
                self.kind,
                self.settings,
                self.seed,
                folder,
                self.decode,
                beside,
                self.values,
            )
            total = len(todo) * self.plan.batch
            with Progress(total, enabled=place.world.chief and not quiet) as progress:
                work.run(todo, progress, lambda: watchdog.beat(step, "sampling"))
            if beside is not None and self.names and not self.plan.classes:
                labels = on_chief(lambda: labels_of(beside.loader, self.plan), place.control)
        return [self.describe(counter, labels) for counter in range(self.plan.number)]

    def describe(self, counter: int, labels: list[int] | None) -> dict[str, Any]:
        label = self.plan.label(counter) if labels is None else labels[counter]
        entry: dict[str, Any] = {"path": self.plan.file(counter), "counter": counter}
        if label is not None and not self.classless:
            entry |= {"label": label, "class": self.names[label]}
        return entry | {name: self.plan.file(counter, name, kind.suffix) for name, kind in self.beside.items()}

    def close(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the page of pictures, and last of all the manifest."""
        missing = [entry["path"] for entry in manifest["files"] if not (folder / entry["path"]).exists()]
        if missing:
            raise UserError(f"{folder}: {missing[0]} has gone since it was written; call again to make it anew")
        with told(folder):
            draw_samples(folder, manifest, self.kind, self.beside)
            close_folder(folder, manifest)


def generating(recipe: Recipe, run: str | Path) -> Recipe:
    if not hasattr(recipe.objective, "sampling"):
        raise UserError(
            f"{run}: its objective is {recipe.objective.kind!r}, which makes no samples; give a run that was trained "
            "with objective kind 'flow' or 'denoise'"
        )
    return recipe


def default_batch(recipe: Recipe) -> int:
    """Return a number that depends on the samples alone, so that all machines make the same groups."""
    return max(1, min(MOST_SAMPLES, MOST_VOXELS // math.prod(per_axis(recipe.model.shape, recipe.model.ndim))))


def evenly_cut(recipe: Recipe, place: Place) -> Recipe:
    """Return a pipeline cut by the number of steps: there need be no data to measure their cost with."""
    layout, parallel = layout_of(recipe.parallel, place.world.size), recipe.parallel
    if layout.pipeline == 1 or parallel.split != "measured":
        return recipe
    with torch.device("meta"):
        number = len(recipe.model.build().stages())
    split = tuple(cut([1.0] * number, num_parts(parallel, layout.pipeline)))
    return recipe.model_copy(update={"parallel": parallel.model_copy(update={"split": split})})
