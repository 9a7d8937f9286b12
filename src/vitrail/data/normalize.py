"""What is known of the values of samples: beside the statistics they are normalised with, what looks black and white.

Scores of adaptive trees see grey levels. Bytes are taken as they are, also where augmentation has made floats of them;
of other data the ends of what normalisation maps to a fixed range are black and white, or else 3 standard deviations
to both sides of the mean. A level is never finer than the last bit of a float, whose rounding is no edge.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.draws import sent

SPREADS = 3.0  # standard deviations from the mean to black and to white
FINEST = 256 * 2.0**-23  # of a span, relative to its values


def ends_of(normalize: Any) -> tuple[float, float] | None:
    """Return the normalised values that are black and white; None where nothing is known."""
    if normalize == "none":
        return None
    return (-SPREADS, SPREADS) if normalize == "fit" or normalize.percentiles is None else (-1.0, 1.0)


class Values:
    """The values of a list of sources; `shared` are the statistics of the variables `names`."""

    def __init__(self, normalize: Any, names: Sequence[str], shared: Statistics, dtypes: Sequence[Any]):
        self.ends, self.names, self.shared = ends_of(normalize), list(names), shared.tensors()
        self.are_bytes = torch.tensor([dtype == "uint8" for dtype in dtypes])

    def span(
        self, sources: Sequence[int], variables: Sequence[str], own: tuple[Tensor, Tensor] | None, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return values [B, C] that are black and white; None where nothing is known of those of some sample.

        `own` are mean and std [B, C], on the device, where sources have statistics of their own.
        """
        are_bytes = self.are_bytes[list(sources)][:, None]  # [B, 1]
        if self.ends is None and not are_bytes.all():
            return None
        low, high = self.ends or (0.0, 255.0)
        at = [self.names.index(name) for name in variables]
        mean, std = own or (sent(t[at].expand(len(sources), -1), device) for t in self.shared)
        black, white = mean + low * std, mean + high * std
        least = torch.maximum(black.abs(), white.abs()) * FINEST
        wider = (least - (white - black)).clamp(min=0) / 2
        are_bytes = sent(are_bytes, device)
        return (black - wider).where(~are_bytes, 0.0), (white + wider).where(~are_bytes, 255.0)
