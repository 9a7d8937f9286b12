"""Ranks shared out over entries: the rule of UCF-VIT with its golden values, and an order that loses nothing."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.cli import main
from vitrail.data.order.mixture import Balanced, Groups, Shares, share, share_ranks
from vitrail.data.order.proof import TIMES, compare, deal, prove, prove_crops, prove_tiles, rows
from vitrail.data.order.sampler import Extent, Sampler, choose
from vitrail.data.order.tiles import Tiles
from vitrail.errors import UserError
from vitrail.recipe import load_recipe

# ---------------------------------------------------------------- the rule

GOLDEN = [  # tiles of each entry, ranks, and what the study's own program gives
    ([100, 100], 4, [2, 2]),
    ([5, 5, 5], 4, [2, 1, 1]),
    ([7, 3], 5, [3, 2]),  # 3.5 and 1.5 are rounded to even, one too many
    ([1, 1, 1, 1], 6, [1, 1, 2, 2]),  # 1.5 each: 2 each is too many, and the first ones give way
    ([25, 25, 25, 25], 10, [3, 3, 2, 2]),
    ([640, 160, 160, 40], 16, [10, 2, 3, 1]),
    ([1000, 100, 10], 8, [7, 1, 0]),
    ([90, 5, 5], 10, [9, 1, 0]),
    ([3, 3, 3], 2, [1, 1, 0]),  # nobody has more than one: the last gives way
    ([10, 10, 10, 70], 5, [1, 0, 0, 4]),
    ([1000, 1], 4, [4, 0]),
]


@pytest.mark.parametrize(("tiles", "ranks", "expected"), GOLDEN)
def test_golden_ranks(tiles: list[int], ranks: int, expected: list[int]) -> None:
    assert share_ranks(tiles, ranks) == expected


@given(
    tiles=st.lists(st.integers(1, 10**6) | st.sampled_from([1, 2, 10, 100]), min_size=1, max_size=8),
    ranks=st.integers(1, 64),
)
def test_ranks_follow_the_rule(tiles: list[int], ranks: int) -> None:
    """Told again, step by step."""
    ideal = [count / sum(tiles) * ranks for count in tiles]
    expected = [int(np.rint(value)) for value in ideal]
    for _ in range(100):
        if sum(expected) == ranks:
            break
        over = np.array(expected) - np.array(ideal)
        if sum(expected) < ranks:
            expected[int(over.argmin())] += 1
        elif any(n > 1 and o >= 0 for n, o in zip(expected, over, strict=True)):
            expected[int(np.where((np.array(expected) > 1) & (over >= 0), over, -np.inf).argmax())] -= 1
        else:
            expected[int(np.flatnonzero(over >= 0)[-1])] -= 1
    assert share_ranks(tiles, ranks) == expected
    assert sum(expected) == ranks


def test_batches_and_repeats() -> None:
    """Seven images over three ranks are two each; two images of four tiles in batches of three are two batches."""
    found = share([7, 3], [4, 4], 4, 3)
    assert found == Shares((3, 1), (2, 4), (2, 1))
    assert found.steps == 4
    assert found.text == "3:1"


def test_groups_and_batches_by_hand() -> None:
    assert share([10, 10], [4, 4], 4, 2, groups=[1, 3]).ranks == (1, 3)
    assert share([10, 10], [4, 4], 4, 2, groups=[1, 3], batches=[5, 2]) == Shares((1, 3), (5, 2), (1, 3))
    assert share([1, 10], [4, 4], 4, 2, groups=[2, 2], batches=[1, 2]).ranks == (2, 2)  # ranks may share an image then


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"entry 1 of data\.train is too small for a rank of its own among 4"):
        share([1000, 1], [1, 1], 4, 1)
    with pytest.raises(UserError, match=r"entry 0 of data\.train has 1 items for 2 ranks; use fewer ranks"):
        share([1, 10], [100, 10], 4, 1)
    with pytest.raises(UserError, match=r"a rank's part of entry 0 .* is less than a batch of 64"):
        share([4, 4], [4, 4], 2, 64)
    with pytest.raises(UserError, match=r"data\.balance\.groups: 3 numbers for 2 entries"):
        share([4, 4], [4, 4], 3, 1, groups=[1, 1, 1])


# ---------------------------------------------------------------- training by it


def entry(source: int, items: int, shape=(12, 12)) -> Tiles:
    extents = [Extent(source, item, shape, (4, 4), (0, 0), 1.0) for item in range(items)]
    return Tiles(extents, (4, 4), seed=source, lanes=4)


@settings(max_examples=15, deadline=None)
@given(
    items=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    each=st.integers(1, 3),
)
def test_ranks_of_an_entry_go_through_it_together(items: list[int], ranks: list[int], each: int) -> None:
    ranks = ranks[: len(items)]
    shares = Shares(tuple(ranks), (3,) * len(items), (1,) * len(items))
    batch = sum(ranks) * each
    order = Balanced([entry(number, n) for number, n in enumerate(items)], shares, batch=batch)
    step = [order(counter).source for counter in range(batch)]
    assert step == [number for number, r in enumerate(ranks) for _ in range(r * each)]
    for number, own in enumerate(order.orders):
        mine = [s for s in map(order, range(20 * batch)) if s.source == number]
        for begin in range(0, len(mine) - own.epoch + 1, own.epoch):  # pass after pass, each tile once
            places = {(s.item, s.start) for s in mine[begin : begin + own.epoch]}
            assert len(places) == own.epoch
    assert order.epoch == 3 * batch
    assert prove(order, batch, 1)["lost"] == prove(order, batch, sum(ranks))["doubled"] == 0


def test_ranks_must_divide_the_batch() -> None:
    with pytest.raises(UserError, match=r"data\.balance\.ranks: 3 do not divide data\.batch 8; choose a multiple"):
        Balanced([entry(0, 1)], Shares((3,), (1,), (1,)), batch=8)


# ---------------------------------------------------------------- the proof


def test_a_proof_finds_what_is_lost_and_doubled() -> None:
    class Wrong(Tiles):
        def __call__(self, counter: int, attempt: int = 0):
            return super().__call__(counter if counter != 3 else 4, attempt)

    wrong = Wrong([Extent(0, 0, (12, 12), (4, 4), (0, 0), 1.0)], (4, 4), seed=0, lanes=2)
    assert prove_tiles(wrong) == (1, 1)
    assert prove(wrong, 4, 2)["lost"] == prove(wrong, 4, 2)["doubled"] == 1
    right = {"lost": 0, "doubled": 0, "of": "tiles", "how": "enumerated", "used": [{"once": 18}]}
    assert prove(entry(0, 2), 4, 2) == right


def test_smaller_sets_are_used_again_and_told_of_exactly() -> None:
    shares = share([7, 3], [9, 9], 4, 3, totals=[63, 27])
    order = Balanced([entry(0, 7), entry(1, 3)], shares, batch=12)
    assert choose(order, range(5, 60)) == [order(counter) for counter in range(5, 60)]
    seen = Counter((s.source, s.item, s.start) for s in map(order, range(order.epoch)))
    found = prove(order, 12, 4)
    for number in range(2):
        times = Counter(count for name, count in seen.items() if name[0] == number)
        never = [63, 27][number] - times.total()
        expected = {TIMES.get(k, f"{k} times"): n for k, n in sorted({0: never, **times}.items()) if n}
        assert found["used"][number] == expected
    turns = Groups([entry(0, 7), entry(1, 1)], [63.0, 9.0], batch=8)
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert prove(turns, 8, 4)["lost"] == prove(turns, 8, 4)["doubled"] == 0


def test_a_proof_finds_parts_that_go_wrong() -> None:
    class Wrong(Balanced):
        def places(self, counters):
            entries, own = super().places(counters)
            return entries, own // 2  # every sample twice, every other one never

    order = Wrong([entry(0, 4), entry(1, 2)], Shares((1, 1), (6, 6), (1, 1)), batch=4)
    found = prove(order, 4, 2)
    assert found["lost"] >= 6
    assert found["doubled"] >= 6


def test_visits_of_blocks_are_what_is_proved_of_random_crops() -> None:
    class Wrong(Sampler):
        def choose(self, counters):  # what loaders ask
            return super().choose([0] * len(counters))

    extents = [Extent(n, 0, (13, 17), (4, 4), (1, 2), 1.0 + n) for n in range(2)]
    for lanes in (1, 3, 8):
        right = Sampler(extents, (4, 4), seed=0, lanes=lanes, reuse=2)
        assert prove_crops(right) == (0, 0)
        assert prove(right, 4, 2)["of"] == "visits of blocks"
    wrong = prove(Wrong(extents, (4, 4), seed=0, lanes=3), 4, 2)
    assert min(wrong["lost"], wrong["doubled"]) > 10


def test_huge_epochs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Tiles([Extent(0, 0, (1600, 1600), (64, 64), (0, 0), 1.0)], (4, 4), seed=0, lanes=7)
    assert huge.epoch == 160_000
    counted = {"lost": 0, "doubled": 0, "of": "tiles", "how": "counted", "used": [{"once": 160_000}]}
    assert prove(huge, 8, 4) == counted
    huge.counts = huge.counts.copy()
    huge.counts[0] += 1
    huge._passes = {}
    assert prove(huge, 8, 4)["lost"] == 1


@given(epoch=st.integers(1, 200), share_=st.integers(1, 5), ranks=st.integers(1, 6))
def test_counters_are_dealt_once(epoch: int, share_: int, ranks: int) -> None:
    assert sorted(deal(epoch, share_ * ranks, ranks).tolist()) == list(range(epoch))


@pytest.fixture
def recipe(tmp_path):
    for name, number in (("a", 3), ("b", 1)):
        (tmp_path / name).mkdir()
        for i in range(number):
            np.save(tmp_path / name / f"{i}.npy", np.zeros((16, 16), np.uint8))
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"""
run: {{name: t, steps: 2}}
model: {{kind: vit, ndim: 2, width: 16, depth: 1, heads: 1, patch: 4}}
objective: {{kind: classify}}
data: {{train: [{{path: {tmp_path / "a"}}}, {{path: {tmp_path / "b"}}}], crop: 8, batch: 4, tiles: {{}}}}
"""
    )
    make = lambda *overrides: load_recipe(file, overrides)  # noqa: E731
    make.file = file
    return make


def test_both_ways_side_by_side(recipe) -> None:
    found = compare(recipe(), 4)
    assert found["by_rank"]["groups"] == "3:1"
    assert found["by_rank"]["batches_per_rank"] == [4, 4]
    proved = {"lost": 0, "doubled": 0, "of": "tiles", "how": "enumerated", "used": [{"once": 12}, {"once": 4}]}
    assert found["by_rank"].items() >= proved.items()
    assert found["by_counter"] == {"samples": [12, 4], "epoch": 16, **proved}
    assert [row["ranks"] for row in rows(found)] == [3, 1]
    assert [row["used_by_rank"] for row in rows(found)] == ["once: 12", "once: 4"]
    assert "too small for a rank" in compare(recipe(), 1)["by_rank"]["error"]
    assert compare(recipe("data.balance={ranks: 4, groups: [2, 2], batches: [4, 4]}"), 4)["by_rank"]["groups"] == "2:2"
    with pytest.raises(UserError, match=r"--ranks 3: they do not divide data\.batch 4"):
        compare(recipe(), 3)


def test_ranks_are_those_of_the_recipe_unless_given(recipe) -> None:
    own = recipe("data.balance={ranks: 4, groups: [2, 2], batches: [4, 4]}")
    assert compare(own)["ranks"] == 4
    assert "note" not in compare(own)["by_rank"]
    other = compare(own, 2)["by_rank"]
    assert other["note"].startswith("data.balance gives groups or batches for 4 ranks, which say nothing about 2")
    assert "too small for a rank" in other["error"]  # by the rule, not by the groups


def test_balance_counts_the_samples_that_there_are(recipe, tmp_path) -> None:
    for i in range(2):  # one item of another size, and one with little in it
        np.save(tmp_path / "b" / f"{i}.npy", np.full((16, 16), 9, np.uint8))
    np.save(tmp_path / "b" / "2.npy", np.full((32, 32), 9, np.uint8))
    found = compare(recipe("data.batch=8"), 4)
    assert found["by_counter"]["samples"] == [12, 24]
    assert found["by_rank"]["groups"] == "1:3"
    assert found["by_rank"]["batches_per_rank"] == [6, 4]
    for i in range(3):
        image = np.zeros((16, 16), np.uint8)
        image[:8, :8] = 9
        np.save(tmp_path / "a" / f"{i}.npy", image)
    found = compare(
        recipe("data.batch=8", "data.filter={by: image, share: 0.5}", "data.balance={ranks: 4, groups: [1, 3]}")
    )
    assert found["by_counter"]["samples"] == [3, 24]
    assert found["by_rank"]["batches_per_rank"] == [1, 4]
    assert found["by_rank"]["used"] == [{"twice": 1, "3 times": 2}, {"once": 24}]


def test_the_verb_shows_both(recipe, capsys) -> None:
    def run(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["data", "balance", str(recipe.file), "--ranks", "4", *options])
        assert not ended.value.code
        return capsys.readouterr().out

    assert json.loads(run("--json")) == compare(recipe(), 4)
    shown = run()
    assert "groups: 3:1" in shown
    assert shown.count("lost: 0") == shown.count("doubled: 0") == 2


def test_random_crops_are_compared_too(recipe) -> None:
    found = compare(recipe("data.tiles=null"), 2)["by_counter"]
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert sum(found["samples"]) == found["epoch"]


def test_crops_and_tiles_of_an_entry_are_its_own_order() -> None:
    crops = Sampler([Extent(0, 0, (12, 12), (4, 4), (0, 0), 1.0)], (4, 4), seed=0, lanes=2)
    order = Balanced([crops, entry(1, 1)], Shares((1, 1), (2, 2), (1, 1)), batch=4)
    assert Counter(order(c).source for c in range(8)) == {0: 4, 1: 4}
    assert [order(c) for c in (0, 1, 4, 5)] == [crops(c) for c in range(4)]
