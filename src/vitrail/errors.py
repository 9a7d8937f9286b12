"""The errors a person can mend, each one sentence that says what to do."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vitrail.credentials import strip

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return a text without what terminals obey: names and words in files of strangers may hold it."""
    return _CONTROL.sub("", text)


def some(names: Iterable[object], most: int = 16) -> str:
    """Write names on one line, of very many the first and how many there are."""
    words = [str(name) for name in names]
    return ", ".join(words) if len(words) <= most else f"{', '.join(words[: most // 2])}, ... ({len(words):,} in all)"


class UserError(ValueError):
    """Wrong input or environment: shown as one sentence, without a traceback.

    The command line exits with 2 when it comes before the first step, and with 1 for a RunFailed afterwards.
    Sentences end in logs, reports, metrics and terminals: no URL in them keeps its password, no name its commands.
    """

    def __init__(self, *words: object):
        super().__init__(*(printable(strip(word)) if isinstance(word, str) else word for word in words))


class BadData(UserError):
    """A file that cannot be read as what it claims to be, or that holds what no sample may hold."""


class TooMuchBad(BadData):
    """One bad sample more than `data.most_bad` lets a run skip."""


class MissingData(BadData):
    """A chunk that its store does not have."""


class FailedRead(BadData):
    """A file that the system does not hand over: elsewhere, or at another time, it may."""


class RunFailed(UserError):
    """A run that had begun could not go on."""


class TooLarge(UserError):
    """More than the memory here, as arithmetic tells before anything is tried."""


def expect(value: Any, kind: type, what: str) -> Any:
    """Return a value of the kind that was asked for; `what` says where another one comes from."""
    if not isinstance(value, kind):
        wanted = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UserError(f"{what} returned a {type(value).__name__}, expected a {wanted}; see docs/plugins.md")
    return value


# What allocators say; PyTorch's own error class for CUDA is known by its type.
NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "status_alloc_failed",  # of cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or its cause, means that memory ran out or would, on a device or on the host."""
    import torch

    def means_it(error: BaseException) -> bool:
        if isinstance(error, MemoryError | torch.OutOfMemoryError | TooLarge):
            return True
        return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in NO_MEMORY)

    return any(map(means_it, chain_of(error)))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it came from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
