"""What frozen features of a run know: probes are trained on labels of some data, and scored on held-out ones.

- data are those of `data.train` and `data.valid` of the run or another recipe, or entries that are given; samples are
  tiles without overlap in an order of the seed, unaugmented, read and normalised as predictions are (eyes.py)
- classes are those of items or of voxels, as the objective of the recipe says, else as the data have them
- features are kept in RUN/probe, under a name that follows from the checkpoint, the data and what was asked for
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import vitrail
from vitrail import disk
from vitrail.contents import check_contents
from vitrail.data.batch import Labelling
from vitrail.data.dataset import Dataset, check_source
from vitrail.data.files.fingerprint import fingerprint
from vitrail.data.files.stage import configs_to_open
from vitrail.data.look.inspect import entry_of
from vitrail.data.reading.loader import Loader
from vitrail.data.reading.pool import Policy
from vitrail.data.source import class_names, label_dtype
from vitrail.data.sources import guess_kind
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.infer import tables
from vitrail.infer.collection import THREADS
from vitrail.infer.engine import Wishes, check_variables
from vitrail.infer.eyes import Eyes, Looking
from vitrail.infer.features import nearest_classes, nearest_shares, wilson
from vitrail.infer.predict import digest
from vitrail.infer.readouts import (
    attentive,
    count,
    dice,
    linear,
    mean_dice_interval,
    principal_colours,
    shares_of,
    to_voxels,
)
from vitrail.layers.patches import per_axis
from vitrail.models.model import encoder_of
from vitrail.objectives.objective import labels_wanted
from vitrail.objectives.segment import SegmentConfig
from vitrail.recipe import Recipe, kinds, yaml
from vitrail.recipe.load import find_recipe
from vitrail.recipe.sections import Tiles
from vitrail.training.journal import Progress
from vitrail.weights.runs import checkpoint_name, read_model, stored_recipe, which_weights, with_checkpoint

FOLDER = "probe"  # of a run
UNNAMED = 256  # classes of voxels that nothing names
BANK, ROWS = 20_000, 50_000  # patches that vote, and that a linear probe learns from
PICTURED = 4
Of = Literal["item", "voxel"]


class Part(NamedTuple):
    """Features of some samples, and their labels."""

    tokens: Tensor  # [n, T, D] of the first n samples
    pooled: Tensor  # [N, D]; of none where voxels have classes
    labels: Tensor  # [N], or [n, *S] int16 where -1 is not scored
    images: Tensor  # [few, C, *S] of the first ones, as read


class Data(NamedTuple):
    """Labelled data of one part, opened."""

    dataset: Dataset
    title: str

    @property
    def whole(self) -> bool:
        """Tell whether each item is one sample."""
        return all(e.shape == (e.window or self.dataset.crop) for e in self.dataset.windows())


def probe(
    run: str | Path,
    *,
    data: str | Path | None = None,
    train: Sequence[str] = (),
    valid: Sequence[str] = (),
    labels: str | None = None,
    checkpoint: str | int | None = None,
    weights: str | None = None,
    neighbours: int = 20,
    number: int | None = None,
    steps: int = 300,
    seed: int = 0,
    memory: float = 2.0,
    batch: int | None = None,
    compute: str | None = None,
    device: str | None = None,
    trust: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """Probe the features of a run's checkpoint; return scores, which are also written to RUN/probe.

    `train` and `valid` are entries in place of those of the recipe: paths, or YAML such as "{path: a, labels: b}".
    """
    for name, value in {"neighbours": neighbours, "number": number, "steps": steps, "batch": batch}.items():
        if value is not None and value < 1:
            raise UserError(f"{name}: {value} must be at least 1")
    if not memory > 0:
        raise UserError(f"memory: {memory} GiB must be above 0")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def make(at: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        check_contents(Path(run))
        eyes = Eyes(run, manifest, stored_recipe(manifest))
        eyes.check_encoder()
        recipe = find_recipe(data or run)
        parts = [
            _open(eyes, recipe, name, given, labels, str(data or run))
            for name, given in (("train", train), ("valid", valid))
        ]
        of: Any = labels_wanted(recipe.objective, recipe.model)
        labelling = _labelling(recipe, parts, "voxel" if labels else None if train or valid else of)
        asked: dict[str, Any] = {"number": number, "seed": seed, "memory": memory, "batch": batch}
        asked |= {"compute": compute or eyes.recipe.precision.compute, "device": place.type}
        asked |= {"weights": which_weights(weights, eyes.recipe), "crop": eyes.crop, "labelling": labelling}
        kept = _place_of_features(Path(run), manifest, eyes.recipe, parts, asked)
        found, notes = _read(kept), list[str]()
        cached = found is not None
        if found is None:
            looking = eyes.on(read_model(at, manifest, weights), place, compute)
            size = Wishes(batch=batch).batch_of(eyes.crop)
            room = int(memory * 2**30) // 2
            found = [_look(looking, part, labelling, size, number, room, seed, not quiet) for part in parts]
            if kept is None:
                notes.append("the data cannot be told from others, so their features are computed at each call")
            else:
                _write(kept, found)
        segment = recipe.objective if isinstance(recipe.objective, SegmentConfig) else SegmentConfig()
        options: dict[str, Any] = {"neighbours": neighbours, "steps": steps, "seed": seed, "device": place}
        probes = Probes(eyes, parts, found, labelling, segment=segment, **options)
        result = {
            "run": str(run),
            "step": manifest["step"],
            "weights": asked["weights"],
            "data": str(data or run),
            "of": labelling.of,
            "classes": list(probes.names),
            "counts": {"train": len(found[0].labels), "valid": len(found[1].labels)},
            "features": found[0].tokens.shape[-1],
            "neighbours": neighbours,
            "seed": seed,
            "scores": probes.scores(),
            "notes": notes + probes.notes,
        }
        files = _publish(Path(run), manifest["step"], result, probes)
        return result | {"cached": cached, **files}

    with trusted(trust):
        return with_checkpoint(run, checkpoint, make)


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each probe, for people."""

    def show(score: dict[str, Any]) -> dict[str, Any]:
        span = score["interval"]
        row = {"probe": score["probe"], score["metric"]: f"{score['value']:.3f}"}
        row["95 %"] = f"{span[0]:.3f} to {span[1]:.3f}" if span else "-"
        return row | {name: "-" if value is None else f"{value:.3f}" for name, value in score.get("each", {}).items()}

    return [show(score) for score in found["scores"]]


# ---------------------------------------------------------------- data


def _open(eyes: Eyes, recipe: Recipe, part: str, given: Sequence[str], labels: str | None, told: str) -> Data:
    """Open the entries of one part."""
    where = f"data.{part}"
    entries = [_entry(text, f"--{part}") for text in given] or list(getattr(recipe.data, part))
    if not entries:
        raise UserError(f"{told}: it has no {where}, which probes need; give entries with --{part}")
    if labels is not None:
        lacking = next((entry for entry in entries if not hasattr(entry, "labels")), None)
        if lacking is not None:
            raise UserError(f"labels: {labels!r} is for classes of voxels, and data of kind {lacking.kind} have none")
        entries = [dataclasses.replace(entry, labels=labels) for entry in entries]
    entries = [dataclasses.replace(entry, weight=1.0) for entry in configs_to_open(recipe.data, entries)]
    wanted = [check_variables(eyes, entry.open().variables, str(entry.path)) for entry in entries]
    entries = [
        entry if names is None else dataclasses.replace(entry, variables=names)
        for entry, names in zip(entries, wanted, strict=True)
    ]
    settings = eyes.settings().model_copy(update={"tiles": Tiles()})
    dataset = Dataset(entries, eyes.crop, where=where, settings=settings)
    return Data(dataset, f"{where} of {told}" if not given else f"--{part}")


def _entry(text: str, option: str) -> Any:
    tree = yaml.parse(text, option) if text.lstrip().startswith("{") else {"path": text}
    if not isinstance(tree, dict) or not isinstance(tree.get("path"), str):
        raise UserError(f"{option} {text!r}: expected a path, or an entry such as '{{path: a.zarr, labels: b}}'")
    kind = tree.pop("kind", None) or guess_kind(tree["path"])
    return entry_of(kinds.find("source", kind, key=f"{option} kind"), tree)


def _labelling(recipe: Recipe, parts: Sequence[Data], of: Of | None) -> Labelling:
    """Find what classes the data have, of items or voxels, and check that both parts have them."""
    objective = recipe.objective
    sources = [source for part in parts for source in part.dataset.sources]
    if of is None:
        if all(label_dtype(source) is not None for source in sources):
            of = "voxel"
        elif all(class_names(source) for source in sources):
            of = "item"
        else:
            first = next(source for source in sources if label_dtype(source) is None and not class_names(source))
            has = first.describe().get("labels")
            hint = f" (such as --labels {has[0]})" if has else ""
            raise UserError(
                f"{first.describe().get('path', 'the data')}: probes need classes, of items (one folder each) or of "
                f"voxels, and there are none; name labels with --labels NAME{hint}, or give labelled data with "
                "--data RECIPE, or --train and --valid"
            )
    for part in parts:
        part.dataset.labels = of
        for number, (source, c) in enumerate(zip(part.dataset.sources, part.dataset.configs, strict=True)):
            check_source(f"{part.dataset.where}.{number}", source, c, part.dataset.crop, of, part.dataset.settings.fit)
    ignore = getattr(objective, "ignore", None) if of == "voxel" else None
    if of == "item":
        return Labelling(of, tuple(dict.fromkeys(name for part in parts for name in part.dataset.class_names())))
    names = (getattr(objective, "names", None) or ()) if labels_wanted(objective, recipe.model) == of else ()
    names = tuple(names or parts[0].dataset.class_names(ignore))
    return Labelling(of, names or tuple(f"class {number}" for number in range(UNNAMED)), ignore)


# ---------------------------------------------------------------- features


def _look(
    looking: Looking,
    part: Data,
    labelling: Labelling,
    size: int,
    number: int | None,
    room: int,
    seed: int,
    shown: bool,
) -> Part:
    """Compute the features of a part, of as many samples as there is room for."""
    eyes, dataset = looking.eyes, part.dataset
    c = eyes.config
    order = dataset.sampler(seed=key(seed, "probe", dataset.where), lanes=1, reuse=1)
    encoder = encoder_of(c)
    grid = tuple(n // side for n, side in zip(eyes.crop, per_axis(encoder.patch, c.ndim), strict=True))
    tokens = 4 * encoder.width * int(np.prod(grid))
    total = min(order.epoch, number or order.epoch)
    if labelling.of == "item":
        total = min(total, room // 2 // (4 * encoder.width))
        most = min(total, room // 2 // tokens)
    else:
        total = most = min(total, room // (tokens + 2 * int(np.prod(eyes.crop))))
    if most < 1:
        raise UserError("memory: the features of one sample do not fit; give more with --memory")
    loader = Loader(
        order,
        dataset.reader(order, lanes=1, cache_bytes=0, labelling=labelling),
        lambda step: range(step * size, min((step + 1) * size, total)),
        device=looking.device,
        workers=THREADS,
        prefetch=2,
        statistics=eyes.statistics_of(dataset),
        values=eyes.values_of(dataset.sources),
        policy=Policy(retries=dataset.settings.retries, limit=float(dataset.settings.read_limit)),
    )
    kept: dict[str, list[Tensor]] = {name: [] for name in Part._fields}
    with closing(loader.batches(0, -(-total // size))) as batches, Progress(total, enabled=shown) as progress:
        done = 0
        for batch in batches:
            assert batch.labels is not None
            if done < PICTURED:
                kept["images"].append(batch.values[: PICTURED - done].float().cpu())
            cells, pooled = looking.encode(batch)
            if done < most:
                kept["tokens"].append(cells[: most - done].flatten(2).transpose(1, 2).cpu())
            if labelling.of == "item":
                kept["pooled"].append(pooled.cpu())
                kept["labels"].append(batch.labels.long().cpu())
            else:
                truth = batch.labels.long().cpu()
                if labelling.ignore is not None:
                    truth = truth.where(truth != labelling.ignore, -1)
                kept["labels"].append(truth.to(torch.int16))
            done += len(batch)
            progress.update(done)
    return Part(**{name: torch.cat(some) if some else torch.empty(0) for name, some in kept.items()})


def _place_of_features(
    run: Path, manifest: dict[str, Any], recipe: Recipe, parts: Sequence[Data], asked: dict[str, Any]
) -> Path | None:
    """Return where features are kept; None where the data cannot be told from others."""
    facts = [digest(manifest), manifest["step"], vitrail.__version__, recipe.to_yaml()]
    for part in parts:
        found = fingerprint(part.dataset.configs, asked, part.dataset.sources)
        if found is None:
            return None
        facts.append(found)
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    return run / FOLDER / f"features-{name}.safetensors"


def _read(path: Path | None) -> list[Part] | None:
    if path is None or not path.is_file():
        return None
    try:
        columns, _ = tables.read_columns(path)
        return [
            Part(*(torch.from_numpy(columns[f"{part}.{name}"]) for name in Part._fields)) for part in ("train", "valid")
        ]
    except UserError:
        raise
    except Exception:  # it is cut short, or another file: made anew
        return None


def _write(path: Path, found: Sequence[Part]) -> None:
    columns = {
        f"{part}.{name}": values.contiguous().numpy()
        for part, some in zip(("train", "valid"), found, strict=True)
        for name, values in some._asdict().items()
    }
    with disk.told(path):
        path.parent.mkdir(exist_ok=True)
        tables.write_columns(path, columns, {})


# ---------------------------------------------------------------- probes


class Probes:
    """The probes of one run and one set of labels."""

    def __init__(
        self,
        eyes: Eyes,
        data: Sequence[Data],
        found: Sequence[Part],
        labelling: Labelling,
        *,
        segment: SegmentConfig,
        neighbours: int,
        steps: int,
        seed: int,
        device: torch.device,
    ):
        self.eyes, self.of, self.seed = eyes, labelling.of, seed
        self.neighbours, self.steps = neighbours, steps
        self.train, self.valid = (Part(*(values.to(device) for values in part)) for part in found)
        self.notes: list[str] = []
        highest = max(int(part.labels.max()) for part in found)
        self.names = labelling.names[: highest + 1] if len(labelling.names) == UNNAMED else labelling.names
        present = self.train.labels[self.train.labels >= 0].unique().tolist()
        if len(present) < 2:
            only = f"the class {self.names[present[0]]!r} alone" if present else "no class at all"
            raise UserError(f"{data[0].title}: its labels have {only}, so there is nothing to tell apart")
        for number in sorted({*self.valid.labels[self.valid.labels >= 0].unique().tolist()} - {*present}):
            self.notes.append(f"{self.names[number]!r} is in {data[1].title} alone, so no probe can tell it")
        encoder = encoder_of(eyes.config)
        self.heads = encoder.heads
        self.patch = per_axis(encoder.patch, eyes.config.ndim)
        self.grid = tuple(n // side for n, side in zip(eyes.crop, self.patch, strict=True))
        if self.of == "voxel" and len(self.grid) > 3:
            raise UserError("probes of voxels are for two and three axes; probe classes of items")
        named = dataclasses.replace(segment, names=self.names)
        self.counted = [number for number in range(len(self.names)) if named.counts(number)]  # in the mean Dice
        self.predicted: Tensor | None = None  # classes of voxels, by the linear probe
        for part, some in zip(data, (self.train, self.valid), strict=True):
            if self.of == "item" and not part.whole:
                self.notes.append(f"items of {part.title} are larger than crops, which are what is scored")
            if self.of == "item" and len(some.tokens) < len(some.labels):
                self.notes.append(
                    f"tokens of {len(some.tokens)} of {len(some.labels)} samples of {part.title} are kept for the "
                    "attentive probe; --memory holds more"
                )

    def scores(self) -> list[dict[str, Any]]:
        return self._of_items() if self.of == "item" else self._of_voxels()

    def _of_items(self) -> list[dict[str, Any]]:
        train, valid, number = self.train, self.valid, len(self.names)
        shares = torch.nn.functional.one_hot(train.labels, number).float()
        samples = torch.arange(len(shares), device=shares.device)
        told = {
            "commonest class": train.labels.mode().values.expand(len(valid.labels)),
            "kNN": nearest_classes(train.pooled, train.labels, valid.pooled, neighbours=self.neighbours),
            "linear": linear(train.pooled, shares, samples, valid.pooled, seed=self.seed).argmax(dim=1),
        }
        options: dict[str, Any] = {"heads": self.heads, "steps": self.steps, "seed": self.seed}
        told["attentive"] = attentive(train.tokens, shares[: len(train.tokens)], valid.tokens, **options).argmax(dim=1)
        scores = []
        for name, guess in told.items():
            share = wilson(int((guess == valid.labels[: len(guess)]).sum()), len(guess))
            scores.append(
                {"probe": name, "metric": "accuracy", "value": share.value, "interval": [share.low, share.high]}
            )
        return scores

    def _of_voxels(self) -> list[dict[str, Any]]:
        train, valid, number = self.train, self.valid, len(self.names)
        shares = shares_of(train.labels, self.patch, number)  # [n, T, K]
        known = shares.flatten(0, 1).sum(dim=1) > 0
        tokens, of_tokens = train.tokens.flatten(0, 1)[known], shares.flatten(0, 1)[known]
        crops = torch.arange(len(shares), device=shares.device).repeat_interleave(shares.shape[1])[known]
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self.seed)).to(tokens.device)
        bank, some = order[:BANK], order[:ROWS]
        queries, many = valid.tokens.flatten(0, 1), (len(valid.tokens), -1)
        self.told: dict[str, Tensor] = {}
        voted = nearest_shares(tokens[bank], of_tokens[bank], queries, neighbours=self.neighbours)
        self.told["kNN"] = voted.unflatten(0, many)
        logits = linear(tokens[some], of_tokens[some], crops[some], queries, seed=self.seed)
        self.told["linear"] = logits.unflatten(0, many)
        options: dict[str, Any] = {"heads": self.heads, "steps": self.steps, "seed": self.seed}
        self.told["attentive"] = attentive(train.tokens, shares, valid.tokens, **options)
        truth = valid.labels[(slice(None), *(slice(n * side) for n, side in zip(self.grid, self.patch, strict=True)))]
        scores = []
        for name, values in self.told.items():
            predicted = to_voxels(values, self.grid, self.patch)
            if name == "linear":
                self.predicted = predicted
            both, either = (table[:, self.counted] for table in count(predicted, truth, number))
            each = dice(both.sum(dim=0), either.sum(dim=0))
            names = [f"Dice {self.names[k]}" for k in self.counted]
            scores.append(
                {
                    "probe": name,
                    "metric": "mean Dice",
                    "value": float(each.nanmean()),
                    "interval": mean_dice_interval(both, either, seed=self.seed),
                    "each": {n: None if v != v else v for n, v in zip(names, each.tolist(), strict=True)},
                }
            )
        if len(truth) < 2:
            self.notes.append("one held-out crop gives no interval")
        return scores

    # ------------------------------------------------------------ what is shown

    def colours(self) -> np.ndarray:
        """Return colours [few, *grid, 3] of the first held-out samples: the first components of their features."""
        tokens = self.valid.tokens
        some = tokens.flatten(0, 1)[:: max(1, tokens.shape[0] * tokens.shape[1] // ROWS)]
        found = principal_colours(some, tokens[: len(self.valid.images)])
        return found.unflatten(1, self.grid).cpu().numpy()

    def pictured(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """Yield of each sample that is shown its name, its image [C, *S], its colours [*S, 3], and labels [*S]."""
        few = len(self.valid.images)
        for row, (image, colours) in enumerate(zip(self.valid.images.cpu().numpy(), self.colours(), strict=True)):
            for axis, side in enumerate(self.patch):
                colours = colours.repeat(side, axis=axis)
            maps: dict[str, np.ndarray] = {}
            words = f"held-out sample {row + 1} of {few}"
            if self.of == "voxel":
                maps["labels"] = self.valid.labels[row].cpu().numpy()
                if self.predicted is not None:
                    maps["linear probe"] = self.predicted[row].cpu().numpy()
            else:
                words = self.names[int(self.valid.labels[row])]
            yield words, image, colours, maps


def _publish(run: Path, step: int, result: dict[str, Any], probes: Probes) -> dict[str, Any]:
    """Write scores and the picture into the run folder, and its page anew where it has one."""
    from vitrail.infer.pages import draw_features
    from vitrail.report import write_report

    folder, name = run / FOLDER, checkpoint_name(step)
    scores, picture = folder / f"{name}.json", folder / f"{name}.png"
    with disk.told(folder):
        folder.mkdir(exist_ok=True)
        result = result | {"picture": f"{FOLDER}/{picture.name}"}
        disk.write_whole(scores, json.dumps(result, indent=1) + "\n")
        draw_features(
            picture, list(probes.pictured()), names=probes.names, title=f"Features of {run.name}, step {step}"
        )
    if (run / "report.html").is_file():
        write_report(run)
    return {"file": str(scores), "picture": str(picture)}
