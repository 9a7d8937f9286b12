"""The largest size that works, in few trials: each size is tried at most once, and the end is proven at both sides.

Memory grows about evenly with the size, so two sizes that work tell where the limit is; where that is wrong, steps that
double and then halve find it all the same.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitrail.bench.supervise import TOO_LARGE, Trial
from vitrail.errors import UserError

TRUSTED = 8  # trials in which the line through memory is followed; then the gap is halved
FARTHEST = 4  # times the largest size that has worked


class NothingFits(UserError):
    """Not even the smallest size works."""


@dataclass(frozen=True)
class Found:
    """The largest size that works and the next, which does not; None: there is none, or it was not asked for."""

    best: Trial
    next: Trial | None
    trials: tuple[Trial, ...]

    @property
    def size(self) -> int:
        return self.best.size

    @property
    def proof(self) -> str:
        """Why it is the largest, in one sentence."""
        works = f"{self.size} {'samples' if self.size > 1 else 'sample'} a rank and pass fit"
        if self.next is None:
            return f"{works}, and more were not asked for"
        return f"{works}, {self.next.size} do not ({self.next.verdict} on rank {self.next.rank})"


def search(
    attempt: Callable[[int], Trial],
    sizes: Sequence[int],
    *,
    guess: Callable[[Trial], int | None] = lambda trial: None,
    limit: float = 0.95,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """The largest of the rising `sizes` that fits; `limit` is the share of memory that may be in use.

    The smallest comes first: it tells whether anything works, and `guess` what the planner says of that device. What
    fails for another reason than memory bounds the search, too, unless it is the smallest.
    """
    trials: dict[int, Trial] = {}
    low, high = -1, len(sizes)  # the largest place that works and the smallest that does not, as far as known
    place, planned = 0, None
    while low + 1 < high:
        trial = attempt(sizes[place])
        trials[place] = trial
        tell(trial)
        low, high = (place, high) if trial.fits else (low, place)
        if len(trials) == 1 and trial.fits and (size := guess(trial)) is not None:
            planned = _place(sizes, size)
        line = _meet(trials, limit) if len(trials) <= TRUSTED else None
        if line is not None and (high == len(sizes) or line < sizes[high]):  # else it has been proven wrong
            place = min(max(_place(sizes, line), low + 1), high - 1)
        elif planned is not None and low < planned < high:
            place = planned
        elif high == len(sizes):
            place = min(high - 1, 2 * low + 1)
        else:
            place = (low + high) // 2
    if low < 0:
        raise _refusal(trials[0])
    return Found(trials[low], trials.get(high), tuple(trials.values()))


def _place(sizes: Sequence[int], size: float) -> int:
    """Of the largest size that is not above."""
    return max(0, bisect.bisect_right(sizes, size) - 1)


def _meet(trials: dict[int, Trial], limit: float) -> float | None:
    """The size at which the line through the two largest that work meets the limit of memory."""
    known = sorted((t.size, t.share) for t in trials.values() if t.fits and t.share is not None)
    if len(known) < 2:
        return None
    (a, low), (b, high) = known[-2:]
    slope = (high - low) / (b - a)
    return min(FARTHEST * b, b + (limit - high) / slope) if slope > 0 else FARTHEST * b


def _refusal(first: Trial) -> UserError:
    samples = f"{first.size} {'samples' if first.size > 1 else 'sample'} a rank"
    if first.verdict not in TOO_LARGE:
        sure = "" if first.verdict == "killed (signal 9)" else ", not for want of memory"
        return UserError(
            f"a trial with {samples} did not work on rank {first.rank} ({first.verdict}{sure}): {first.why}"
        )
    return NothingFits(
        f"data.batch: not even {samples} fit ({first.verdict} on rank {first.rank}: {first.why}); set "
        "parallel.recompute=full, shard over more ranks, or use a smaller model or data.crop"
    )
