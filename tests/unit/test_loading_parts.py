"""Which samples a rank reads, and which are measured."""

from types import SimpleNamespace
from typing import Any

import pytest

from vitrail.draws import key
from vitrail.parallel.split import Split
from vitrail.training import setup


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recipe, data and an objective that do nothing but tell what they are asked for."""
    for name in ("labelling_of", "reading_threads", "make_augmenter", "policy_of", "values_of"):
        monkeypatch.setattr(setup, name, lambda *_: None)
    monkeypatch.setattr(setup, "Loader", lambda sampler, reader, counters=None, **_: counters)
    monkeypatch.setattr(setup, "Evaluator", lambda *_, **options: options)
    seeds: dict[str, int] = {}

    def dataset(name: str) -> Any:
        def sampler(*, seed: int, **_: Any) -> Any:
            seeds[name] = seed
            return SimpleNamespace(lanes=4)

        return SimpleNamespace(sampler=sampler, reader=lambda *_, **__: SimpleNamespace(crop=(8, 8)), groups=[0])

    settings = SimpleNamespace(cache_mib=0, prefetch=1, block=None, lanes=4, batch=12, reuse=1, micro_batch=None)
    settings.augment = SimpleNamespace(orientations=False)
    recipe = SimpleNamespace(
        run=SimpleNamespace(seed=7),
        data=settings,
        eval=SimpleNamespace(samples=8, tiles=None, blend=None),
        log=SimpleNamespace(variables=None),
    )
    data = SimpleNamespace(batch=12, train=dataset("train"), valid=dataset("valid"))
    data.train_entries = data.valid_entries = None
    return SimpleNamespace(recipe=recipe, data=data, objective=SimpleNamespace(slab=lambda *_: None), seeds=seeds)


def flow_of(rank: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(data=3), data_rank=rank, split=Split())


def test_ranks_read_slices_of_the_batch_that_follow_one_another(parts: Any) -> None:
    order, place = SimpleNamespace(lanes=4), SimpleNamespace(device="cpu")
    chosen = (parts.recipe, place, parts.data, order, parts.objective)
    loaders: list[Any] = [setup.make_loader(*chosen, flow_of(rank), step=4, samples=100) for rank in range(3)]
    assert [list(counters(4)) for counters in loaders] == [[*range(100, 104)], [*range(104, 108)], [*range(108, 112)]]
    assert [counter for counters in loaders for counter in counters(6)] == list(range(124, 136))


def test_held_out_samples_are_drawn_with_a_seed_of_their_own(parts: Any) -> None:
    setup.make_sampler(parts.recipe, parts.data)
    setup.make_evaluator(parts.recipe, SimpleNamespace(device="cpu"), parts.data, parts.objective, flow_of(0))
    assert parts.seeds["train"] == 7
    assert parts.seeds["valid"] == key(7, "valid") != 7
