"""What was taken for what: counts of classes, added over batches and ranks, and what they say of each class."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

MOST_PAIRS = 32  # classes whose confusion with each other is counted; of more, each by itself


def count_classes(predicted: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """Return sums of what was taken for what [true, predicted]; of many classes those of true, predicted and right."""
    counts: dict[str, Tensor] = {}
    if classes <= MOST_PAIRS:
        counts["pairs"] = (labels * classes + predicted).bincount(minlength=classes**2).view(classes, classes)
    else:
        right = labels[labels == predicted]
        for name, values in (("true", labels), ("predicted", predicted), ("right", right)):
            counts[name] = values.bincount(minlength=classes)
    return {name: value.double() for name, value in counts.items()}


def tables_of(counts: dict[str, Any], names: Sequence[str], of: str) -> dict[str, Any]:
    """Return how often each class was true, predicted and right, and the pairs where they were counted."""
    if pairs := counts.get("pairs"):
        counts = counts | {"true": [sum(row) for row in pairs], "predicted": [sum(c) for c in zip(*pairs, strict=True)]}
        counts["right"] = [row[number] for number, row in enumerate(pairs)]
        counts["pairs"] = [[round(number) for number in row] for row in pairs]
    whole = {name: [round(number) for number in counts[name]] for name in ("true", "predicted", "right")}
    return {"names": list(names), "of": of, **counts, **whole}
