"""Faster ways to compute the same numbers, each under a name: all are off until they are asked for.

| name | what it changes |
|---|---|
| gelu | GELU and its gradient share one exponential (layers/gelu.py) |
| bias | gradients of GELU and of queries, keys and values add up those of the biases before them (layers/fused.py) |
| norm | so does the gradient of a layer norm, which adds what goes past it, too |
| maps | convolutional decoders keep channels last on a GPU too; 1-wide convolutions and steps up are products |
| conv | 3-wide convolutions of few channels by kernels of ours; with `maps` |

They agree with the usual way to the rounding of the type that is computed in. `use_fast` says which are on in this
process; what is compiled while one is on keeps it.
"""

from contextlib import ExitStack

from vitrail.layers.private import constant_when_compiled

NAMES = ("gelu", "bias", "norm", "maps", "conv")
_on: frozenset[str] = frozenset()


def use_fast(*names: str) -> ExitStack:
    """Turn on these ways, and no others; in a with statement, until its end."""
    global _on
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such way; there are {', '.join(NAMES)}")
    put_back = ExitStack()
    put_back.callback(use_fast, *_on)
    _on = frozenset(names)
    return put_back


@constant_when_compiled
def is_fast(name: str) -> bool:
    """Tell whether a way is on; a constant for compiled code."""
    return name in _on
