"""Faster ways to compute the same numbers, each under a name: off until it is asked for, or has shown that it pays.

| name | what it changes |
|---|---|
| gelu | GELU and its gradient share one exponential (layers/gelu.py) |
| bias | gradients of GELU and of queries, keys and values add up those of the biases before them (layers/fused.py) |
| norm | so does the gradient of a layer norm, which adds what goes past it, too |
| maps | convolutional decoders keep channels last on a GPU too; 1-wide convolutions and steps up are products |
| conv | 3-wide convolutions of few channels by kernels of ours; with `maps` |

They agree with the usual way to the rounding of the type that is computed in. On a GPU those of `ON_GPU` are on by
themselves, elsewhere none is; `use_fast` says otherwise for this process. What is compiled while one is on keeps it.
"""

from contextlib import ExitStack

from vitrail.layers.private import constant_when_compiled

NAMES = ("gelu", "bias", "norm", "maps", "conv")
ON_GPU: frozenset[str] = frozenset()  # those that a measurement has shown to pay; there is none yet
_asked: frozenset[str] | None = None


def use_fast(*names: str) -> ExitStack:
    """Turn on these ways, and no others; in a with statement, until its end."""
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such way; there are {', '.join(NAMES)}")
    put_back, before = ExitStack(), _asked
    put_back.callback(_ask, before)
    _ask(frozenset(names))
    return put_back


def _ask(names: frozenset[str] | None) -> None:
    global _asked
    _asked = names


@constant_when_compiled
def is_fast(name: str, device: str) -> bool:
    """Tell whether a way is on for a type of device ("cpu", "cuda"); a constant for compiled code."""
    if _asked is not None:
        return name in _asked
    return device == "cuda" and name in ON_GPU
