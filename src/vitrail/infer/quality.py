"""Quality of samples: distances to real data, whether a classifier recognises them, and a page of it all.

- every distance stands beside its floor: the same distance between two halves of real data, as many of each. Samples
  as good as real data reach it, and its size tells how much so few samples can tell
- samples are compared with the same halves, so that value and floor differ in nothing but the samples; both are means
  over several ways to halve the real data, with the spread over these
- the floor of accuracy is the classifier's accuracy on real data
- everything follows from the seed: which samples and which real data are taken, projections and subsets
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.disk import write_output
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.infer import features as distances
from vitrail.infer.collection import Generated, Real, is_samples, open_real
from vitrail.infer.features import Network, RunNetwork, find_inception
from vitrail.infer.pages import GRID
from vitrail.objectives.objective import normalise
from vitrail.objectives.ssim import ssim
from vitrail.recipe.kinds import nearest
from vitrail.report.figures import embed_image
from vitrail.report.units import percent, plain
from vitrail.training.journal import Progress

__all__ = ["is_samples", "quality"]

NEIGHBOURS = 3
SPLITS = 5  # ways to halve real data
PROJECTIONS = 512
TABLE = 2**26  # numbers in a table of projections, at most
LEAST = 2 * (NEIGHBOURS + 1)  # samples of each kind
SHARES = ("accuracy", "precision", "recall")

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Quality of {{ found.samples }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #d9e0e6; font-weight: normal; }
th, small, figcaption { color: #52606d; }
img { max-width: 100%; }
</style>
<h1>Quality of {{ found.samples }}</h1>
<p>Compared with {{ found.real }}. A floor is the same number for real data against real data, or of real data: samples
as good as real ones reach it, and no more can be seen with so few.</p>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% if classes %}<table><tr><th>class</th><th>recognised</th></tr>
{% for name, share in classes %}<tr><td>{{ name }}</td><td>{{ share }}</td></tr>
{% endfor %}</table>{% endif %}
{% for note in found.notes %}<p><small>{{ note }}.</small></p>
{% endfor %}
{% if grid %}<figure><img src="{{ grid }}" alt="samples"><figcaption>Samples</figcaption></figure>{% endif %}
<p><small>Step {{ found.run.step }} of {{ found.run.run }}, {{ found.run.weights }} weights; seed {{ found.seed }}.
</small></p>
</html>
"""

Measure = Callable[[Any, Any], list[float]]


@dataclass
class Looked:
    """The findings about a set of samples, in their order."""

    projections: list[Tensor] = field(default_factory=list)
    alike: list[Tensor] = field(default_factory=list)  # SSIM of each with its neighbour in the order, two by two
    features: list[list[Tensor]] = field(default_factory=list)  # of each network
    guesses: list[str] = field(default_factory=list)  # of the classifier
    names: list[str | None] = field(default_factory=list)  # of the true classes


def measure_distances(
    samples: Looked, real: Looked, networks: list[Network], half: int, seed: int
) -> list[dict[str, Any]]:
    """Measure samples and one half of real data against the other half, over several ways to halve them."""
    rows: list[dict[str, Any]] = []
    splits = []
    for number in range(SPLITS):
        generator = torch.Generator().manual_seed(key(seed, "split", number) % 2**62)
        splits.append(torch.randperm(2 * half, generator=generator).split(half))

    def add(names: dict[str, str], of: str, mine: Tensor, theirs: Tensor, prepare: Any, measure: Measure) -> None:
        samples, found = prepare(mine[:half]), []
        for halves in splits:
            base, rest = (prepare(theirs[chosen]) for chosen in halves)
            found.append([measure(samples, base), measure(rest, base)])
        table = torch.tensor(found, dtype=torch.float64)  # [splits, 2, measures]
        means, spreads = table.mean(dim=0).T.tolist(), table.std(dim=0).T.tolist()
        for (name, better), (value, floor), (spread, floor_spread) in zip(names.items(), means, spreads, strict=True):
            row = {"measure": name, "of": of, "value": value, "floor": floor, "better": better}
            row |= {"spread": spread, "floor_spread": floor_spread, "samples": half, "real": half}
            rows.append(row)

    for place, network in enumerate(networks):
        mine, theirs = torch.cat(samples.features[place]), torch.cat(real.features[place])
        of = f"{mine.shape[1]} features of {network.title}"
        names = {network.frechet: "lower", "kid": "lower", "precision": "higher", "recall": "higher"}
        add(names, of, mine, theirs, distances.Cloud, in_features)
        base, rest = (theirs[chosen] for chosen in splits[0])
        kid = next(row for row in reversed(rows) if row["measure"] == "kid")
        kid["subset_spread"] = distances.kid(mine[:half], base, seed=seed).spread
        kid["floor_subset_spread"] = distances.kid(rest, base, seed=seed).spread
    mine, theirs = torch.cat(samples.projections), torch.cat(real.projections)
    of = f"{mine.shape[1]} projections of the values"
    add({"sliced_wasserstein": "lower"}, of, mine, theirs, Tensor.double, in_values)
    if samples.alike and real.alike:
        mine, theirs = (torch.cat(looked.alike) for looked in (samples, real))
        if mine.isfinite().all() and theirs.isfinite().all():
            add({"ssim": "as the floor"}, "pairs of values", mine, theirs, Tensor.double, in_pairs)
    return rows


def in_features(samples: distances.Cloud, real: distances.Cloud) -> list[float]:
    """Return the Fréchet distance, KID, precision and recall."""
    near = distances.precision_recall(samples, real, neighbours=NEIGHBOURS)
    return [distances.frechet(samples, real), distances.squared_mmd(samples, real), *near]


def in_values(samples: Tensor, real: Tensor) -> list[float]:
    return [distances.sliced_wasserstein(samples, real)]


def in_pairs(samples: Tensor, real: Tensor) -> list[float]:
    return [float(samples.mean())]


def measure_accuracy(
    mine: Looked, theirs: Looked, network: Network, notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Count how often the classifier names the class that was asked for, over all and by class."""
    known = [(guess, name) for guess, name in zip(theirs.guesses, theirs.names, strict=True) if name in network.names]
    floor = _share_right(known) if known else None
    if floor is None:
        notes.append("real data have no classes that the classifier knows, so accuracy has nothing to be compared with")
    pairs = list(zip(mine.guesses, mine.names, strict=True))
    found = _share_right(pairs)
    row = {
        "measure": "accuracy",
        "of": network.title,
        "value": found.value,
        "floor": None if floor is None else floor.value,
        "better": "higher",
        "samples": len(pairs),
        "real": len(known),
        "interval": [found.low, found.high],
        "floor_interval": None if floor is None else [floor.low, floor.high],
    }
    counts: dict[str, Any] = {}
    for name in network.names:
        guesses = [guess for guess, wanted in pairs if wanted == name]
        if guesses:
            counts[name] = {"right": sum(guess == name for guess in guesses), "samples": len(guesses)}
    return row, counts


def _share_right(pairs: Sequence[tuple[str, str | None]]) -> distances.Share:
    return distances.wilson(sum(guess == name for guess, name in pairs), len(pairs))


def quality(
    samples: str | Path,
    *,
    real: str | Path | None = None,
    classifier: str | Path | None = None,
    number: int | None = None,
    seed: int = 0,
    batch: int = 256,
    device: str | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Measure a folder of samples against real data: a path or a recipe.

    Without `real` they are those that the samples' run has held out, or the classifier's where that run is not here.
    """
    if batch < 1:
        raise UserError(f"batch: {batch} must be at least 1: so many samples are looked at together")
    if number is not None and number < LEAST:
        raise UserError(f"number: {number} samples are too few to be compared; ask for {LEAST} or more")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generated = Generated(samples, seed=seed)
    if (number or 0) > generated.size:
        raise UserError(f"number: {number} samples were asked for, but {samples} holds {generated.size}; ask for fewer")
    against = open_real(real, generated, seed=seed, otherwise=classifier)
    networks, notes = _networks(classifier, generated, against, place)
    number = number or generated.size
    half = min(number, against.size // 2) if against.once else number
    _check_enough(half, number, generated, against)

    voxels = generated.channels * torch.Size(generated.shape).numel()
    along = distances.directions(
        voxels, max(1, min(PROJECTIONS, TABLE // voxels)), seed=key(seed, "directions") % 2**62
    )
    look = partial(_look, networks, along.to(place), against.statistics(seed=seed))
    with Progress(number + 2 * half, enabled=not quiet) as progress:
        mine = look(generated, number, batch, progress.update)
        theirs = look(against, 2 * half, batch, lambda done: progress.update(number + done))
    if against.lost:
        half = len(theirs.names) // 2
        _check_enough(half, number, generated, against)
        notes.append(f"{against.lost} real samples cannot be read, and were left out")
    if half < number:
        notes.append(
            f"there are {against.size} real samples, so distances are those of {half} samples to {half} of them"
        )

    rows = measure_distances(mine, theirs, networks, half, seed)
    by_class: dict[str, Any] = {}
    if classifier is not None:
        why_not = _why_no_accuracy(networks[0], generated)
        if why_not:
            notes.append(f"{why_not}, so there is no accuracy")
        else:
            row, by_class = measure_accuracy(mine, theirs, networks[0], notes)
            rows.insert(0, row)
    return {
        "samples": str(samples),
        "real": against.title,
        "classifier": None if classifier is None else str(classifier),
        "run": {name: generated.manifest.get(name) for name in ("run", "step", "weights")},
        "seed": seed,
        "counts": {"samples": number, "compared": half, "real": 2 * half},
        "measures": rows,
        "accuracy_by_class": by_class,
        "notes": [*against.notes, *notes],
    }


def _check_enough(half: int, number: int, generated: Generated, against: Real) -> None:
    if half < LEAST:
        few = f"{generated.size} samples" if number < LEAST else f"{against.size} real ones in {against.title}"
        lost = f", of which {against.lost} cannot be read," if against.lost else ""
        raise UserError(
            f"{few}{lost} are too few to be compared; at least {LEAST} samples and twice as many real ones are needed"
        )


def _why_no_accuracy(network: Network, generated: Generated) -> str | None:
    if not network.names:
        return f"{network.title} names no classes"
    if not generated.labelled:
        return "samples have no classes"
    strange = sorted({name for _, name in generated.files if name not in network.names})
    if not strange:
        return None
    near = nearest(strange[0], list(network.names))
    hint = f" (did you mean {near!r}?)" if near else f" ({', '.join(network.names[:10])})"
    return f"{network.title} does not know the class {strange[0]!r}{hint}"


def _networks(
    classifier: str | Path | None, generated: Generated, against: Real, place: torch.device
) -> tuple[list[Network], list[str]]:
    networks: list[Network] = []
    notes = []
    what = f"a sample of {generated.title}"
    if classifier is None:
        notes.append(
            "no features and no accuracy: they need a network that was trained on real data (--classifier RUN)"
        )
    else:
        network = RunNetwork(classifier, device=place)
        network.check(tuple(generated.shape), generated.channels, what)
        networks.append(network)
    types = [generated.kind.dtype, *(source.dtype for source in against.sources)]
    inception, why_not = find_inception(types, place)
    if inception is not None:
        try:
            inception.check(tuple(generated.shape), generated.channels, what)
            networks.append(inception)
        except UserError as error:
            why_not = str(error)
    return networks, [*notes, why_not] if why_not else notes


@torch.no_grad()
def _look(
    networks: list[Network],
    along: Tensor,
    statistics: Statistics,
    found: Generated | Real,
    number: int,
    batch: int,
    tick: Callable[[int], None],
) -> Looked:
    """Look at a set of samples, batch by batch: nothing but projections and features is kept."""
    looked, alone = Looked(features=[[] for _ in networks]), torch.empty(0)
    for values, names in found.batches(number, batch):
        if not values.isfinite().all():
            raise UserError(f"{found.title} holds values that are not finite; mend or remove them")
        values = values.to(along.device)
        # Two by two in their order, whatever the batch: of bytes, whose range is known.
        waiting = values if not len(alone) else torch.cat([alone, values])
        pairs = waiting[: len(waiting) // 2 * 2]
        alone = waiting[len(pairs) :]
        if values.dtype == torch.uint8 and len(pairs):
            looked.alike.append(ssim(pairs[::2], pairs[1::2], 255.0).repeat_interleave(2))
        looked.projections.append(normalise(values, statistics).flatten(1) @ along)
        for network, features in zip(networks, looked.features, strict=True):
            seen = network(values)
            features.append(seen.features)
            if seen.classes is not None:
                looked.guesses += [network.names[guess] for guess in seen.classes.tolist()]
        looked.names += names
        tick(len(looked.names))
    return looked


def table(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row a measure, its numbers in words."""
    return [
        {
            "measure": row["measure"],
            "samples": _show(row["measure"], row["value"], row.get("spread"), row.get("interval")),
            "floor": _show(row["measure"], row["floor"], row.get("floor_spread"), row.get("floor_interval")),
            "better": row["better"],
            "number": f"{row['samples']} to {row['real']}",
            "of": row["of"],
        }
        for row in found["measures"]
    ]


def _show(name: str, value: float | None, spread: float | None, interval: list[float] | None) -> str:
    """Show a number with how far it is sure."""
    if value is None:
        return "none"
    if interval is not None:
        return f"{percent(value)} ({percent(interval[0])} to {percent(interval[1])})"
    show = percent if name in SHARES else plain
    sure = spread is None or math.isnan(spread)
    return show(value) if sure else f"{show(value)} ± {show(spread)}"


def write_page(found: dict[str, Any], path: Path) -> Path:
    """Write the table, shares by class and the grid of the samples as one HTML file."""
    from jinja2 import Environment, StrictUndefined

    rows = table(found)
    grid = Path(found["samples"]) / GRID
    classes = [(name, f"{c['right']} of {c['samples']}") for name, c in found["accuracy_by_class"].items()]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    text = template.render(
        found=found,
        heads=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        classes=classes,
        grid=embed_image(read_plain(grid), "image/png") if grid.is_file() else None,
    )
    try:
        return write_output(path, text.encode(), parents=True)
    except OSError as error:
        raise UserError(f"--page {path}: it cannot be written ({error.strerror}); choose another path") from error
