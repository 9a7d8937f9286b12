"""How good samples are: distances to real data, and whether a classifier recognises them.

- every distance stands beside its floor: the same distance between two halves of real data, as many of each. Samples
  as good as real data reach it, and its size tells how much so few samples can tell
- samples are compared with the same halves, so that value and floor differ in nothing but the samples; both are means
  over several ways to halve the real data, with the spread over these
- the floor of accuracy is the classifier's accuracy on real data
- everything follows from the seed: which samples and which real data are taken, projections and subsets
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.draws import key
from vitrail.errors import UserError
from vitrail.infer import distances
from vitrail.infer.collection import Generated, Real, is_samples, open_real
from vitrail.infer.features import Network, RunNetwork, find_inception
from vitrail.infer.measures import NEIGHBOURS, Looked, measure_accuracy, measure_distances
from vitrail.objectives.objective import normalise
from vitrail.recipe.kinds import nearest
from vitrail.training.progress import Progress

__all__ = ["is_samples", "quality"]

PROJECTIONS = 512
TABLE = 2**26  # numbers in a table of projections, at most
LEAST = 2 * (NEIGHBOURS + 1)  # samples of each kind


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
    look = Looker(networks, along.to(place), against.statistics(seed=seed))
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


class Looker:
    """Looks at sets of samples, batch by batch: nothing but projections and features is kept."""

    def __init__(self, networks: list[Network], along: Tensor, statistics: Statistics):
        self.networks, self.along, self.statistics = networks, along, statistics

    @torch.no_grad()
    def __call__(self, found: Generated | Real, number: int, batch: int, tick: Callable[[int], None]) -> Looked:
        looked = Looked(features=[[] for _ in self.networks])
        for values, names in found.batches(number, batch):
            if not values.isfinite().all():
                raise UserError(f"{found.title} holds values that are not finite; mend or remove them")
            values = values.to(self.along.device)
            looked.projections.append(normalise(values, self.statistics).flatten(1) @ self.along)
            for network, features in zip(self.networks, looked.features, strict=True):
                seen = network(values)
                features.append(seen.features)
                if seen.classes is not None:
                    looked.guesses += [network.names[guess] for guess in seen.classes.tolist()]
            looked.names += names
            tick(len(looked.names))
        return looked
