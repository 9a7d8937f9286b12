"""A first recipe for somebody's data: `vitrail new PATH --task TASK`.

- the data are looked at as `vitrail data inspect` does, and what it proposes is the `data` section
- volumes of few or thick sections are taken as 2-D slices; other volumes as cubes
- patch and crop follow from the data, the model's size and the batch from the machine, the number of steps from both:
  a first result in minutes, which says whether it is worth going on
- the recipe is checked as a training would before it is written, and nothing is overwritten
"""

import dataclasses
import math
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitrail.credentials import strip
from vitrail.data.grid import GridSource
from vitrail.data.look.inspect import look_at, open_source
from vitrail.data.look.picture import by, has_labels, spread
from vitrail.data.look.propose import Proposal, entries, flow, propose, suggest_crop
from vitrail.data.source import Source, class_names, notes_of
from vitrail.errors import UserError
from vitrail.foreign import memory_bytes
from vitrail.launch.machine import list_devices
from vitrail.launch.world import usable_cores

Task = Literal["segment", "classify", "pretrain", "generate"]
TITLES = {
    "segment": "Names the class of each voxel (UNETR)",
    "classify": "Names the class of each image (ViT)",
    "pretrain": "Learns what the data look like without labels (masked autoencoder)",
    "generate": "Draws samples like the data (diffusion transformer)",
}
FEW_SLICES = 32  # of a volume, below which they are taken one by one where they are much wider
THICK = 4.0  # times the size of a voxel across sections, from which on a cube of voxels is none
CROPS = {  # voxels along an axis at most: on a CPU, and on a GPU
    ("segment", 2): (128, 256), ("segment", 3): (32, 64), ("pretrain", 2): (64, 256), ("pretrain", 3): (32, 64),
    ("classify", 2): (64, 224), ("classify", 3): (32, 64), ("generate", 2): (32, 64), ("generate", 3): (16, 32),
}  # fmt: skip
TOKENS = {2: 256, 3: 512}  # of a sample at most
FEW_TOKENS = 64  # of an image that a CPU sees whole: many short steps teach more than few long ones
BATCHES = {  # samples of a step, on a CPU and on a GPU
    ("segment", 2): (8, 32), ("segment", 3): (4, 8), ("pretrain", 2): (16, 128), ("pretrain", 3): (16, 32),
    ("classify", 2): (64, 256), ("classify", 3): (8, 16), ("generate", 2): (64, 256), ("generate", 3): (16, 32),
}  # fmt: skip
RATES = {"pretrain": 2e-3, "segment": 3e-3, "classify": 2e-3, "generate": 2e-3}  # of small models; large ones less
CORE_FLOPS = 3e10  # a second that a training reaches on one CPU core
OVERHEAD = 0.05  # seconds of a step on a CPU that do not go with its size
SECONDS = {"cpu": 180, "cuda": 600}  # of a first result
STEPS = {"cpu": (100, 1000), "cuda": (500, 5000)}
COLUMN = 40  # at which comments begin
COMMENTED = re.compile(r'((?:[^"#]|"(?:[^"\\]|\\.)*")*?) # (.*)')  # a line of YAML; names in quotes may hold the sign
MOST_LABELS = 2**26  # voxels of labels that are all counted


@dataclass(frozen=True)
class Machine:
    """What a recipe is written for."""

    device: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    cores: int

    def words(self) -> str:
        return f"{self.cores} CPU cores" if self.device == "cpu" else f"one {self.name} ({self.memory_gib:.0f} GiB)"


@dataclass(frozen=True)
class Chosen:
    """All that the text of a recipe is made of."""

    task: Task
    name: str  # of the run
    out: str  # where the recipe goes
    found: Proposal
    patch: tuple[int, ...]
    batch: int
    steps: int
    source: Source
    facts: dict[str, Any]
    machine: Machine

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(size // p for size, p in zip(self.found.crop, self.patch, strict=True))


def find_machine() -> Machine:
    """Return the first GPU here, or else the CPU."""
    devices = list_devices()
    if devices:
        return Machine("cuda", devices[0]["name"], devices[0]["memory_gib"], usable_cores())
    return Machine("cpu", "cpu", memory_bytes() / 2**30, usable_cores())


def check_target(out: str | Path) -> None:
    """Refuse a path at which anything lies."""
    if os.path.lexists(out):
        raise UserError(f"--out {out}: exists already, and recipes are not overwritten; choose another path with --out")


def new_recipe(
    path: str,
    task: Task,
    *,
    kind: str | None = None,
    settings: dict[str, Any] | None = None,
    machine: Machine | None = None,
    out: str | Path = "recipe.yaml",
) -> dict[str, Any]:
    """Return the text of a recipe that trains on the data at a path, and what was chosen for it."""
    from vitrail.cost.plan import complete, num_parameters
    from vitrail.recipe import load_recipe, yaml

    machine = machine or find_machine()
    config, source = open_source(path, kind=kind, settings=settings)
    check_task(path, task, source)
    config, source = as_slices(config, source, task)
    _, facts = look_at(config, source)
    if task == "segment":
        count_labels(source, facts)
    ndim = len(source.axes) - (source.items[0].slices is not None)
    if (task, ndim) not in CROPS:
        raise UserError(f"{path} has {ndim} axes; recipes are written for images and volumes")
    on_gpu = machine.device == "cuda"
    tokens = FEW_TOKENS if not on_gpu and ndim == 2 and task in ("classify", "generate") else TOKENS[ndim]
    found, patch = choose_sizes(config, source, facts, task, CROPS[task, ndim][on_gpu], tokens)
    found = for_task(found, source, facts, task)
    batch = choose_batch(found, source, BATCHES[task, ndim][on_gpu])
    low, high = STEPS[machine.device]
    chosen = Chosen(task, name_of(path, task), str(out), found, patch, batch, low, source, facts, machine)
    recipe = complete(load_recipe(yaml.parse(recipe_text(chosen), "recipe")))
    if on_gpu:
        batch, step = fit_gpu(recipe, batch, machine)
    else:
        step = OVERHEAD + 3 * _flops(recipe.model) * batch / (CORE_FLOPS * machine.cores)
    steps = max(low, min(high, round(SECONDS[machine.device] / step / 50) * 50)) if step else high
    text = recipe_text(dataclasses.replace(chosen, batch=batch, steps=steps))
    load_recipe(yaml.parse(text, "recipe"))
    return {
        "task": task,
        "machine": machine.words(),
        "held_out": found.held_out,
        "crop": list(found.crop),
        "patch": list(patch),
        "batch": batch,
        "steps": steps,
        "parameters": num_parameters(recipe),
        "notes": [strip(note) for note in notes_of(source)],
        "text": text,
    }


def check_task(path: str, task: Task, source: Source) -> None:
    """Refuse a task that the data have no labels for."""
    said = "".join(f"; {note}" for note in notes_of(source))
    if task == "segment" and not has_labels(source):
        raise UserError(
            f"--task segment learns from the class of each voxel, and none is found for {path}; name its labels with "
            f"--set labels=PATH, or choose --task pretrain{said}"
        )
    if task == "classify" and len(class_names(source)) < 2:
        raise UserError(
            f"--task classify learns from the class of each image, and {path} tells {len(class_names(source))}; put "
            f"images into a folder for each class, or a table into it (--set class_table=labels.csv){said}"
        )


def as_slices(config: Any, source: Source, task: Task) -> tuple[Any, Source]:
    """Return volumes of few or thick sections as slices, across their first axis."""
    keys = {field.name for field in dataclasses.fields(config)}
    if "slices" not in keys or config.slices is not None or len(source.axes) != 3:
        return config, source
    shape = [min(sizes) for sizes in zip(*(source.items[i].shape for i in spread(len(source.items), 50)), strict=True)]
    spacing = source.items[0].spacing
    flat = shape[0] < FEW_SLICES and min(shape[1:]) >= 4 * shape[0]
    if not flat and spacing[0] < THICK * min(spacing[1:]):
        return config, source
    made = dataclasses.replace(config, slices=source.axes[0])
    return made, made.open()


def count_labels(source: Source, facts: dict[str, Any]) -> None:
    """Count all labels of small data, so that none is missed; refuse those that number things."""
    total = sum(math.prod(item.shape) for item in (source.items[i] for i in range(min(len(source.items), 10_000))))
    if total <= MOST_LABELS and len(source.items) <= 10_000:
        counts: Counter[int] = Counter()
        for number, item in enumerate(source.items):
            labels = source.read_labels(number, tuple(slice(0, n) for n in item.shape))  # type: ignore[attr-defined]
            values, numbers = np.unique(labels, return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
            if len(counts) > 256:
                break
        whole = sum(counts.values())
        facts["label_percent"] = {str(value): 100 * counts[value] / whole for value in sorted(counts)}
    shares = facts.get("label_percent") or {}
    if len(shares) < 2:
        raise UserError(
            f"{facts.get('path')}: its labels hold one value alone ({', '.join(shares)}), which nothing can be "
            "learned from; give labels with two classes or more"
        )


def choose_sizes(
    config: Any, source: Source, facts: dict[str, Any], task: Task, most: int, tokens: int
) -> tuple[Proposal, tuple[int, ...]]:
    """Choose crop and patch, and propose the data section for them; images that are classified are seen whole."""
    crop, fit = suggest_crop(source, most), None
    shapes = {source.items[i].shape for i in spread(len(source.items), 200)}
    smallest = [min(sizes) for sizes in zip(*shapes, strict=True)]
    flat = len(smallest) == 2 and not isinstance(source, GridSource)
    if flat and (task in ("classify", "generate") or min(smallest) < 16):
        sides = sorted(min(shape) for shape in shapes)
        side = min(most, sides[len(sides) // 2])
        side = side // 16 * 16 if side >= 32 else side // 4 * 4 if side >= 8 else side
        whole = smallest if len(shapes) == 1 and max(smallest) <= most else None
        if whole is not None and _cut(tuple(whole), tokens)[0] == tuple(whole):
            crop = tuple(whole)
        else:
            crop, fit = (side, side), side
    across = source.items[0].slices
    sample = tuple(size for axis, size in enumerate(crop) if axis != across)
    sample, patch = _cut(sample, tokens)
    if fit is not None:
        fit = sample[0]
    full = sample if across is None else (*sample[:across], 1, *sample[across:])
    found = propose(source, config, full, facts, fit=fit)
    return found, patch


def _cut(crop: tuple[int, ...], tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the crop, shortened to whole patches, and the smallest patch of so many tokens at most."""
    patch = crop
    for power in range(1, 6):
        patch = tuple(min(2**power, 2 ** int(math.log2(size))) for size in crop)
        if math.prod(size // p for size, p in zip(crop, patch, strict=True)) <= tokens:
            break
    return tuple(size // p * p for size, p in zip(crop, patch, strict=True)), patch


def for_task(found: Proposal, source: Source, facts: dict[str, Any], task: Task) -> Proposal:
    """Return the proposal without the labels that a task has no use for, and with a value for what is no number."""
    entry = dict(found.entry)
    if task != "segment":
        entry = {key: value for key, value in entry.items() if key not in ("labels", "label_map", "unlabelled")}
    if task == "segment" and found.names is None and not facts.get("label_names"):
        raise UserError(
            f"{facts.get('path')}: its labels have {len(facts.get('label_percent') or {})} values or more, and seem to "
            "number things rather than classes; give labels that count classes from 0 on"
        )
    statistics = list(facts["statistics"].values())
    if "nodata" in {field.name for field in dataclasses.fields(source.config)} and any(  # type: ignore[attr-defined]
        numbers["not_finite_percent"] for numbers in statistics
    ):
        means = [numbers["mean"] for numbers in statistics if numbers["mean"] is not None]
        entry |= {"nodata": "fill", "fill_value": round(sum(means) / max(1, len(means)), 4)}
    return dataclasses.replace(found, entry=entry)


def choose_batch(found: Proposal, source: Source, most: int) -> int:
    """Return a batch, smaller where there are few images: a step is to be a small part of them."""
    item = source.items[0]
    whole = (math.prod(item.shape) < 2 * math.prod(found.crop) and item.slices is None) or found.fit is not None
    if not whole:
        return most
    return max(2, min(most, 2 ** int(math.log2(max(2, len(source.items) // 4)))))


def fit_gpu(recipe: Any, batch: int, machine: Machine) -> tuple[int, float]:
    """Return the batch that fits the GPU, halved until the planner says so, and seconds of a step; 0 if unknown."""
    from vitrail.cost.cluster import known_cluster
    from vitrail.cost.plan import plan

    cluster = known_cluster(machine.name)
    while cluster is not None:
        tried = recipe.model_copy(update={"data": recipe.data.model_copy(update={"batch": batch})})
        estimates = plan(tried, cluster=cluster, gpus=1, as_is=True)
        if batch <= 2 or (estimates and estimates[0].fits):
            return batch, estimates[0].step_seconds if estimates else 0.0
        batch //= 2
    if machine.memory_gib < 20:
        batch = max(2, batch // 4)
    return batch, 0.0


def _flops(model: Any) -> float:
    import torch

    with torch.device("meta"):
        return float(model.build().flops().forward)


def name_of(path: str, task: str) -> str:
    """Return the name of a run on the data at a path."""
    base = re.split(r"[/\\]", strip(path).partition("::")[0].rstrip("/\\"))[-1]
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", base.partition(".")[0]).strip("-_")
    return f"{stem[:80] or 'data'}-{task}"


def recipe_text(c: Chosen) -> str:
    """Write the recipe, with comments."""
    lines = [*heading(c), "", f'run: {{name: {c.name}, seed: 0, steps: {c.steps}}} # or "20 epochs"', ""]
    lines += [*model_lines(c), *objective_lines(c), "", *data_lines(c), "", *training_lines(c)]
    return "\n".join(map(aligned, lines)) + "\n"


def aligned(line: str) -> str:
    """Return a line with its comment, if it has one, at the column at which most comments begin."""
    found = None if line.startswith("#") else COMMENTED.fullmatch(line)
    return line if found is None else f"{found[1]:<{COLUMN}} # {found[2]}"


def one_or_each(sizes: tuple[int, ...]) -> str:
    """Write one number for all axes where they are the same, else one for each."""
    return flow(sizes[0] if len(set(sizes)) == 1 else sizes)


def heading(c: Chosen) -> list[str]:
    """Write what the recipe is, how to use it, and which part is held out."""
    items, cut = c.source.items, c.source.items[0].slices
    data = f"{len(items):,} items of {by(items[0].shape)}" if len(items) > 1 else f"an item of {by(items[0].shape)}"
    data += ", and other sizes" if c.facts.get("smallest") else ""
    data = data if cut is None else f"slices across {c.source.axes[cut]} of {data}"
    held = f"Held out, and never trained on: {c.found.held_out}."
    if c.found.valid is None:
        held = f"Held out is {c.found.held_out}; name data to score on as data.valid."
    out = shlex.quote(c.out)
    calls = {
        f"vitrail data preview {out} --out seen.png": "what the model will see",
        f"vitrail train {out}": "prints the path of a report",
    }
    if c.task == "generate":
        calls[f"vitrail sample runs/{c.name}"] = "draws samples"
    else:
        calls[f"vitrail eval runs/{c.name}"] = "scores it on the held-out part"
    if c.task in ("segment", "classify") and set(c.found.entry) <= {"path", "slices", "labels", "label_map"}:
        ending = ".csv" if c.task == "classify" else "" if len(items) > 1 else ".ome.zarr"
        made = f"{c.name}-classes{ending}"
        calls[f"vitrail predict runs/{c.name} {shlex.quote(c.found.entry['path'])} --out {made}"] = "for all of it"
    width = max(map(len, calls))
    lines = [
        f"# {TITLES[c.task]}: {data}.",
        "#",
        *(f"#   {call:<{width}}   {words}" for call, words in calls.items()),
        "#",
        f"# {held}",
        f"# Sizes are for a first result on {c.machine.words()}; then raise run.steps, and the model's size.",
        "# Every key: docs/recipe.md; editors complete recipes with the output of `vitrail schema`.",
    ]
    return [" ".join(line.splitlines()) for line in lines]  # a name may hold the end of a line, and ends no comment


def model_lines(c: Chosen) -> list[str]:
    """Write the model: a small one on a CPU, and one of a named size on a GPU."""
    small, patch = c.machine.device == "cpu", f"patch: {one_or_each(c.patch)}"
    ndim = f"  ndim: {len(c.patch)}"
    theta = ", theta: 10" if max(c.grid) <= 16 else ""  # the longest wavelength of positions, for short grids
    if c.task in ("pretrain", "segment"):
        width = {"pretrain": 128, "segment": 64}[c.task]
        size = f"width: {width}, depth: 4, heads: 4" if small else "size: S"
        encoder = f"  encoder: {{{size}, {patch}, positions: rope{theta}}}"
        if c.task == "segment":
            features = f"  features: {8 if small else 16} # channels at full resolution"
            return ["model:", "  kind: unetr", ndim, encoder, features]
        decoder = "width: 96, depth: 1, heads: 4" if small else "width: 192, depth: 2, heads: 3"
        mask = "  mask: {kind: random, ratio: 0.75} # the share of the patches that is hidden"
        return ["model:", "  kind: mae", ndim, encoder, mask, f"  decoder: {{kind: cross, {decoder}}}"]
    sizes = ["  width: 96", "  depth: 4", "  heads: 4"] if small else ["  size: S"]
    kind = "vit" if c.task == "classify" else "dit"
    lines = ["model:", f"  kind: {kind}", ndim, *sizes, f"  {patch}"]
    if c.task == "classify":
        return [*lines, "  positions: learned"]
    classes = len(class_names(c.source))
    return lines if classes < 2 else [*lines, f"  classes: {classes}", "  label_dropout: 0.1 # for guidance"]


def data_lines(c: Chosen) -> list[str]:
    """Write the data section."""
    found, item = c.found, c.source.items[0]
    whole = found.fit is not None or (item.slices is None and found.crop == item.shape)
    seen = "the whole image" if whole else "of each sample"
    lines = [
        "data:",
        *entries(found),
        f"  crop: {one_or_each(found.crop)} # {seen}: {by(c.grid)} patches, {math.prod(c.grid)} tokens",
    ]
    if found.fit is not None:
        lines.append(f"  fit: {{resize: {found.fit}}} # brings the shorter side of images to this")
    lines += [
        f"  batch: {c.batch} # samples of a step, over all devices",
        "  normalize: fit # mean 0 and variance 1 of each variable, measured on the training part",
    ]
    # Neither maps nor photographs can be turned at will.
    turns = set(c.source.axes) <= set("xyz") and "red" not in c.source.variables
    if turns and (len(found.crop) == 3 or c.task in ("segment", "pretrain")):
        lines.append("  augment: {orientations: true} # all flips and turns; leave it out where up means something")
    return lines


def training_lines(c: Chosen) -> list[str]:
    """Write how it is trained, evaluated and logged."""
    rate = RATES[c.task] / (1 if c.machine.device == "cpu" else 5)
    decay = 1 - 1 / max(10, min(1000, c.steps // 6))
    return [
        f"optimizer: {{kind: adamw, lr: {rate:g}, weight_decay: 0.05, clip: 1.0}}",
        "schedule: {kind: cosine, warmup: 5%}",
        f"ema: {{decay: {decay:.3g}}} # averaged weights are evaluated",
        "",
        "checkpoint: {every: 25%, keep: 1} # the newest, and the best by its score",
        f"eval: {{every: 25%, samples: {64 if c.task in ('segment', 'pretrain') else 256}}}",
        "log: {every: 10, pictures: 25%}",
    ]


def objective_lines(c: Chosen) -> list[str]:
    """Write the objective; of a segmentation with names of the classes, and what is not scored."""
    if c.task == "pretrain":
        return ["objective: {kind: reconstruct, target: raw, on: hidden}"]
    if c.task == "classify":
        return ["objective: {kind: classify, smoothing: 0.1} # the classes are those of the data"]
    if c.task == "generate":
        guided = ", guidance: 1.5" if len(class_names(c.source)) > 1 else ""
        return ["objective:", "  kind: flow", "  times: logit_normal", f"  sampling: {{steps: 25{guided}}}"]
    names, shares = c.found.names, c.facts.get("label_percent") or {}
    if names is None:
        named = c.facts.get("label_names") or {}
        strange = [value for value in shares if value not in ("0", *named)]
        ignore = f", ignore: {strange[0]}" if strange and "label_map" not in c.found.entry else ""
        return [f"objective: {{kind: segment{ignore}}} # the data name their classes"]
    stored: dict[int, list[str]] = {}
    mapping = c.found.entry.get("label_map") or {}
    for value, share in shares.items():
        stored.setdefault(int(mapping.get(int(value), value)), []).append(f"{value} ({share:.0f} %)")
    told = "; ".join(f"{name} is {' and '.join(stored[n])}" for n, name in enumerate(names) if n in stored)
    lines = [f"objective: {{kind: segment, names: {flow(names)}}}", f"# Labels as they are stored: {told}."]
    if len(names) == 2:
        lines.append("# Class 0 is not scored; name both, such as [cell, membrane], and both are.")
    return lines
