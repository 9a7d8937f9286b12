"""From what was seen of samples and of real data to numbers: distances with their floors, and accuracy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitrail.draws import key
from vitrail.infer import distances
from vitrail.infer.features import Network

NEIGHBOURS = 3
SPLITS = 5  # ways to halve real data

Measure = Callable[[Any, Any], list[float]]


@dataclass
class Looked:
    """What was seen of a set of samples, in their order."""

    projections: list[Tensor] = field(default_factory=list)
    features: list[list[Tensor]] = field(default_factory=list)  # of each network
    guesses: list[str] = field(default_factory=list)  # of the classifier
    names: list[str | None] = field(default_factory=list)  # of the true classes


def measure_distances(
    samples: Looked, real: Looked, networks: list[Network], half: int, seed: int
) -> list[dict[str, Any]]:
    """Every distance of samples and of one half of real data to the other half, over several ways to halve them."""
    rows: list[dict[str, Any]] = []
    splits = []
    for number in range(SPLITS):
        generator = torch.Generator().manual_seed(key(seed, "split", number) % 2**62)
        splits.append(torch.randperm(2 * half, generator=generator).split(half))

    def add(
        measures: dict[str, str],
        of: str,
        mine: Tensor,
        theirs: Tensor,
        prepare: Callable[[Tensor], Any],
        measure: Measure,
    ) -> None:
        samples, found = prepare(mine[:half]), []
        for halves in splits:
            base, rest = (prepare(theirs[chosen]) for chosen in halves)
            found.append([measure(samples, base), measure(rest, base)])
        table = torch.tensor(found, dtype=torch.float64)  # [splits, 2, measures]
        (values, floors), (spreads, floor_spreads) = table.mean(dim=0).tolist(), table.std(dim=0).tolist()
        for place, (name, better) in enumerate(measures.items()):
            row = {"measure": name, "of": of, "value": values[place], "floor": floors[place], "better": better}
            row |= {"spread": spreads[place], "floor_spread": floor_spreads[place], "samples": half, "real": half}
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
    return rows


def in_features(samples: distances.Cloud, real: distances.Cloud) -> list[float]:
    """Fréchet distance, KID, precision and recall."""
    near = distances.precision_recall(samples, real, neighbours=NEIGHBOURS)
    return [distances.frechet(samples, real), distances.squared_mmd(samples, real), *near]


def in_values(samples: Tensor, real: Tensor) -> list[float]:
    return [distances.sliced_wasserstein(samples, real)]


def measure_accuracy(
    mine: Looked, theirs: Looked, network: Network, notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """How often the classifier names the class that was asked for, over all and by class."""
    known = [(guess, name) for guess, name in zip(theirs.guesses, theirs.names, strict=True) if name in network.names]
    floor = None
    if known:
        floor = distances.wilson(sum(guess == name for guess, name in known), len(known))
    else:
        notes.append("real data have no classes that the classifier knows, so accuracy has nothing to be compared with")
    pairs = list(zip(mine.guesses, mine.names, strict=True))
    found = distances.wilson(sum(guess == name for guess, name in pairs), len(pairs))
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
