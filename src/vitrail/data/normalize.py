"""Values of samples between reading and augmentation, not normalised yet, and what looks black and white among them.

The kind of a variable (recipe/normalize.py) may change its values by a function, and clip them to the ends of a range;
all that comes after, statistics included, is of the changed values. Values that nothing changes keep their type.

Scores of adaptive trees see grey levels. Bytes are taken as they are, also where augmentation has made floats of them;
of other data the ends of a range are black and white, or else 3 standard deviations to both sides of the mean. A level
is never finer than the last bit of a float, whose rounding is no edge.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.batch import Statistics
from vitrail.draws import sent
from vitrail.recipe.normalize import AsRead, Given, Logarithm, MinMax, Percentiles, Standard, Window, kind_of

FINEST = 256 * 2.0**-23  # of a span, relative to its values

Tables = tuple[Tensor, Tensor]  # mean and std [B, C] of samples, on the device


class Values:
    """The values of a list of sources; `shared` are the statistics of the variables `names`."""

    def __init__(self, normalize: Any, names: Sequence[str], shared: Statistics, dtypes: Sequence[Any] = ()):
        self.names, self.shared = list(names), shared.tensors()
        self.kinds = [kind_of(normalize, name) for name in names]
        self.changing = [isinstance(kind, Logarithm) or kind.clips for kind in self.kinds]
        self.are_bytes = torch.tensor([dtype == "uint8" for dtype in dtypes])
        self.scored = False  # whether spans are asked for

    def at(self, variables: Sequence[str]) -> list[int]:
        """Return where the channels of a batch stand; unnamed ones stand in order."""
        return [self.names.index(name) for name in variables] or list(range(len(self.names)))

    def tables(self, at: list[int], number: int, own: Tables | None, device: torch.device) -> Tables:
        if own is not None:
            return own
        mean, std = (sent(t[at].expand(number, -1), device) for t in self.shared)
        return mean, std

    def change(self, values: Tensor, variables: Sequence[str] = (), own: Tables | None = None) -> Tensor:
        """Return values [B, C, ...] as they are augmented; float32 where any variable is changed.

        `own` are mean and std [B, C] where sources have statistics of their own.
        """
        at = self.at(variables)
        if not any(self.changing[i] for i in at):
            return values
        mean, std = self.tables(at, len(values), own, values.device)
        values = values.to(torch.float32, copy=True)
        for channel, kind in enumerate(self.kinds[i] for i in at):
            changed = kind.change(values[:, channel])
            if kind.clips:
                low, high = (
                    (mean[:, channel] + end * std[:, channel]).view(-1, *[1] * (changed.ndim - 1)) for end in kind.ends
                )
                changed = torch.minimum(torch.maximum(changed, low), high)
            values[:, channel] = changed
        return values

    def restore(self, values: Tensor, variables: Sequence[str] = ()) -> Tensor:
        """Take back what functions do to values [B, C, ...]: what is clipped stays so."""
        kinds = [self.kinds[i] for i in self.at(variables)]
        if not any(isinstance(kind, Logarithm) for kind in kinds):
            return values
        return torch.stack([kind.restore(values[:, channel]) for channel, kind in enumerate(kinds)], dim=1)

    def span(
        self, sources: Sequence[int], variables: Sequence[str], own: Tables | None, device: torch.device
    ) -> Tables | None:
        """Return values [B, C] that are black and white; None where nothing is known of those of some sample."""
        at = self.at(variables)
        plain = torch.tensor([not self.changing[i] for i in at])
        are_bytes = self.are_bytes[list(sources)][:, None] & plain  # [B, C]
        ends = [self.kinds[i].ends for i in at]
        if not all(are_bytes[:, channel].all() or end is not None for channel, end in enumerate(ends)):
            return None
        low, high = sent(torch.tensor([end or (0.0, 255.0) for end in ends]).T.contiguous(), device)
        mean, std = self.tables(at, len(sources), own, device)
        black, white = mean + low * std, mean + high * std
        least = torch.maximum(black.abs(), white.abs()) * FINEST
        wider = (least - (white - black)).clamp(min=0) / 2
        are_bytes = sent(are_bytes, device)
        return (black - wider).where(~are_bytes, 0.0), (white + wider).where(~are_bytes, 255.0)

    def describe(self) -> str:
        """Say in words how variables are normalised, by the statistics of all."""
        told = [
            f"{name}: {describe(kind, mean, std)}"
            for name, kind, mean, std in zip(self.names, self.kinds, *(t.tolist() for t in self.shared), strict=True)
        ]
        return "; ".join(told[:6]) + (f"; and {len(told) - 6} more" if len(told) > 6 else "")


def describe(kind: Any, mean: float, std: float) -> str:
    """Say in words how a variable is normalised."""
    if isinstance(kind, AsRead):
        return "as it is read"
    if isinstance(kind, Standard | Given | Logarithm):
        first = f"log(1 + x / {kind.scale:g}), then " if isinstance(kind, Logarithm) else ""
        return f"{first}mean {mean:.4g} and std {std:.4g} become 0 and 1"
    assert isinstance(kind, Percentiles | MinMax | Window)
    low, high = (mean + end * std for end in kind.to)
    what = f"percentiles {kind.percentiles[0]:g} and {kind.percentiles[1]:g}, " if isinstance(kind, Percentiles) else ""
    clipped = ", the rest is clipped" if kind.clips else ""
    return f"{what}{low:.4g} and {high:.4g} become {kind.to[0]:g} and {kind.to[1]:g}{clipped}"
