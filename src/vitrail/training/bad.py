"""Bad samples that a run has skipped: told with the step of their batch, kept by checkpoints; and how a run goes on.

`data.most_bad` is for a run, not for a process: one that is stopped and continued again and again goes on counting.
Each rank has a count of its own; ranks may be others when a run goes on, so all begin with that of the rank that had
the most.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.data.reading.loader import Loader, count_bad
from vitrail.data.reading.pool import Skip
from vitrail.errors import BadData, TooMuchBad
from vitrail.parallel.agree import Group, gather_json
from vitrail.recipe.sections import Data
from vitrail.training.journal import Journal
from vitrail.weights.runs import list_checkpoints

MOST_NAMED = 100  # items that a checkpoint names; the others are counted together
OTHERS = "(others)"


class BadSamples:
    """The bad samples of a run, the same on every rank."""

    def __init__(self) -> None:
        self.items: Counter[str] = Counter()  # over all ranks and sessions: samples by their item
        self.loaders: list[Counter[str]] = []  # of each loader, on the rank that skipped the most before this session
        self._ranks: list[list[Counter[str]]] = []  # of each rank and loader in this session
        self._news: list[list[Skip]] = []  # of each loader on this rank, not yet told
        self._known: set[str] = set()  # items that this session has told of
        self._told = (0, False)  # samples skipped in this session, and whether chunks were filled, as last told

    def take_up(self, kept: Any) -> None:
        """Go on from what a checkpoint has kept; one of before that was kept has nothing."""
        if isinstance(kept, dict):
            self.items = _counter(kept.get("items"))
            loaders = kept.get("most")
            self.loaders = [_counter(each) for each in loaders] if isinstance(loaders, list) else []

    def begin(self, loaders: Sequence[Loader]) -> None:
        """Let loaders count on from where the run was."""
        for loader, before in zip(loaders, self.loaders, strict=False):
            loader.bad.before = before
        self._news = [[] for _ in loaders]

    def look(self, loaders: Sequence[Loader]) -> tuple[int, int]:
        """Count what this rank has met in this session up to the batch in hand: samples skipped, and chunks filled."""
        for news, loader in zip(self._news, loaders, strict=True):
            news += loader.bad.take_news()
        return count_bad(*loaders)

    def tell(self, found: tuple[int, int], journal: Journal, group: Group, *, step: int, share: float) -> None:
        """Tell what came since last time; `found` counts it over all ranks, `share` of them with their own samples."""
        if (found[0], found[1] > 0) == self._told:
            return
        self._told = (found[0], found[1] > 0)
        ranks = gather_json(self._news, group)
        self._news = [[] for _ in self._news]
        self._ranks = self._ranks or [[Counter() for _ in news] for news in ranks]
        items: Counter[str] = Counter()
        sentences = {}
        for counters, news in zip(self._ranks, ranks, strict=True):
            for counter, skips in zip(counters, news, strict=True):
                counter.update(item for item, _ in skips)
                items.update(item for item, _ in skips)
                sentences.update({item: sentence for item, sentence in skips if item not in self._known})
        self._known |= set(sentences)
        items = Counter({item: max(1, round(number * share)) for item, number in items.items()})
        self.items += items
        told = [f"bad data, another sample is taken instead: {sentence}" for sentence in sentences.values()]
        journal.bad(told, step=step, samples=self.items.total(), items=items, filled=found[1])

    def to_json(self) -> dict[str, Any] | None:
        """Return what a checkpoint is to keep; None where nothing was skipped."""
        if not self.items:
            return None
        worst: list[Counter[str]] = max(self._ranks, key=lambda each: sum(c.total() for c in each), default=[])
        number = max(len(worst), len(self.loaders))
        both = [[*each, *[Counter[str]()] * (number - len(each))] for each in (self.loaders, worst)]
        most = [before + now for before, now in zip(*both, strict=True)]
        return {"items": _short(self.items), "most": [_short(each) for each in most]}


def _short(counter: Counter[str]) -> dict[str, int]:
    """Return a count that is no longer than a manifest should be."""
    named = dict(counter.most_common(MOST_NAMED))
    rest = counter.total() - sum(named.values())
    return named | ({OTHERS: named.get(OTHERS, 0) + rest} if rest else {})


def _counter(value: Any) -> Counter[str]:
    """Read a count from a file that may hold anything."""
    pairs = value.items() if isinstance(value, dict) else ()
    return Counter({name: n for name, n in pairs if isinstance(n, int) and not isinstance(n, bool) and n > 0})


def way_on(error: BadData, run_dir: Path, data: Data) -> str:
    """Say how a run that ended on bad data goes on."""
    if isinstance(error, TooMuchBad):
        option = f" data.most_bad={max(1, 2 * data.most_bad)}"
    else:
        option = "" if data.bad == "skip" else " data.bad=skip"
    saved = list_checkpoints(run_dir / "checkpoints")
    where = f"step {int(saved[0].name[5:])}, which is saved" if saved else "the start, since nothing was saved"
    return (
        f"`vitrail train {shlex.quote(str(run_dir))}{option}` goes on from {where}; "
        "if you mend or remove bad data, add --other-data"
    )
