"""The tokens of a sample as a model meets them: all of them here, or a part whose rest lies elsewhere.

A model works on the tokens that it is given. The few things that concern a sequence as a whole (which keys attention
sees, the rotation tables of the tokens it computes with, pooling) it asks of its `sequence`. By default that is this
class, for which everything is here; parallelize() puts in one that knows where the other parts are.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitrail.layers.kernels import KeyMask, key_mask


class TokenSequence:
    """All tokens are here."""

    parts: int = 1

    def table(self, rope: Tensor | None) -> Tensor | None:
        """Rotations [2, ..., N, 1, pairs] of the given tokens to those of the tokens that attention computes with."""
        return rope

    def keys(self, valid: Tensor | None, *, prefix: int, tokens: int) -> Any:
        """Which keys may be attended to, given which of the `tokens` are valid; the `prefix` before them always are."""
        return None if valid is None else mask_of(valid, prefix)

    def whole(self, x: Tensor, *, groups: int = 1, tokens: int | None = None) -> Tensor:
        """All tokens of [B, groups*n, ...], group by group; `tokens` of each group, which leaves out padding."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over all parts of what was summed over the tokens here."""
        return x


def mask_of(valid: Tensor, prefix: int) -> KeyMask:
    """The mask of [prefix; tokens], where those before the tokens may always be seen."""
    return key_mask(F.pad(valid, (prefix, 0), value=True))


WHOLE = TokenSequence()
