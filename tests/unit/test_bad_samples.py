"""What a run has skipped as bad data: counted over ranks and sessions, whatever a checkpoint says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitrail.data.reading.pool import Tally
from vitrail.errors import BadData, MissingData, TooMuchBad
from vitrail.recipe.sections import Data
from vitrail.training import bad as module
from vitrail.training.bad import MOST_NAMED, BadSamples, way_on


class Ranks:
    """Ranks of a run, one after another, each with a loader of training and one of held-out data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, kept: Any = None):
        self.ranks = [BadSamples() for _ in range(number)]
        self.loaders: list[list[Any]] = []
        self.lines: list[dict[str, Any]] = []
        for rank in self.ranks:
            readers = [SimpleNamespace(sources=[]) for _ in range(2)]
            self.loaders.append([SimpleNamespace(bad=Tally(), reader=reader) for reader in readers])
            rank.take_up(kept)
            rank.begin(self.loaders[-1])
        monkeypatch.setattr(module, "gather_json", lambda value, group: self.news)

    def step(self, *skips: list[str], held_out: list[str] | None = None, share: float = 1.0) -> None:
        """Skip items for the batch of a step: a list a rank."""
        for loaders, names in zip(self.loaders, skips, strict=True):
            loaders[0].bad.take([(name, f"{name} is cut short") for name in names])
        self.loaders[0][1].bad.take([(name, f"{name} is gone") for name in held_out or []])
        counts = [rank.look(loaders) for rank, loaders in zip(self.ranks, self.loaders, strict=True)]
        found = (round(share * sum(count[0] for count in counts)), 0)
        self.news = [rank._news for rank in self.ranks]  # which ranks replace when they have told them
        for rank in self.ranks:
            lines: list[dict[str, Any]] = []

            def write(told: list[str], lines: list[dict[str, Any]] = lines, **fields: Any) -> None:
                lines.append({"told": told, **fields})

            journal: Any = SimpleNamespace(bad=write)
            rank.tell(found, journal, None, step=1, share=share)
        self.lines += lines


def test_ranks_count_together_and_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ranks(monkeypatch, 2)
    run.step([], [])
    assert run.lines == []
    assert run.ranks[0].to_json() is None
    run.step(["a", "b"], ["a"], held_out=["v"])
    run.step(["a"], [])
    assert [(line["items"], line["samples"]) for line in run.lines] == [({"a": 2, "b": 1, "v": 1}, 4), ({"a": 1}, 5)]
    assert [len(line["told"]) for line in run.lines] == [3, 0]  # each item once
    assert "another sample is taken instead: a is cut short" in run.lines[0]["told"][0]
    kept = {"items": {"a": 3, "b": 1, "v": 1}, "most": [{"a": 2, "b": 1}, {"v": 1}]}  # of the first rank, the worst
    assert [rank.to_json() for rank in run.ranks] == [kept, kept]

    again = Ranks(monkeypatch, 3, kept)
    assert all(loaders[0].bad.before == {"a": 2, "b": 1} for loaders in again.loaders)
    with pytest.raises(TooMuchBad, match=r"^3 samples were skipped \(a 2 times, b once\)"):
        again.loaders[2][0].bad.meet("c", BadData("c is gone"), 3)
    assert again.ranks[1].to_json() == kept
    again.step([], ["c"], [])
    assert again.lines[0]["samples"] == 6
    found = again.ranks[0].to_json()
    assert found == {"items": {"a": 3, "b": 1, "v": 1, "c": 1}, "most": [{"a": 2, "b": 1, "c": 1}, {"v": 1}]}


def test_ranks_that_share_samples_count_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ranks(monkeypatch, 2)
    run.step(["a", "a"], ["a", "a"], share=0.5)
    assert run.lines[0]["items"] == {"a": 2}


@pytest.mark.parametrize("kept", [None, 3, [], {"items": 1, "most": "x"}, {"items": {"a": True, "b": -1, "c": "2"}}])
def test_a_checkpoint_may_say_anything(kept: Any) -> None:
    bad = BadSamples()
    bad.take_up(kept)
    bad.begin([])
    assert bad.to_json() is None


def test_a_checkpoint_names_no_endless_list(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ranks(monkeypatch, 1)
    run.step([str(number) for number in range(3 * MOST_NAMED)])
    kept = run.ranks[0].to_json()
    assert kept is not None
    assert len(kept["items"]) == MOST_NAMED + 1
    again = Ranks(monkeypatch, 1, kept)
    assert again.ranks[0].items.total() == again.loaders[0][0].bad.before.total() == 3 * MOST_NAMED


def test_the_way_on(tmp_path: Path) -> None:
    skips, stops = (Data.model_construct(bad=bad, most_bad=20) for bad in ("skip", "error"))
    assert "data.most_bad=40` goes on from the start, since nothing was saved; " in way_on(
        TooMuchBad("a"), tmp_path / "run", skips
    )
    (tmp_path / "a b/checkpoints/step-00000300").mkdir(parents=True)
    found = way_on(MissingData("a"), tmp_path / "a b", stops)
    assert found == (
        f"`vitrail train '{tmp_path}/a b' data.bad=skip` goes on from step 300, which is saved; "
        "if you mend or remove bad data, add --other-data"
    )
    assert f"'{tmp_path}/a b'` goes on" in way_on(BadData("of one node alone"), tmp_path / "a b", skips)
