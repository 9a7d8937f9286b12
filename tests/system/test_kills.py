"""SIGKILL at random instants, by benchmarks/kills.py: a sample of what it does in full."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, environment, run, tiny_recipe

import vitrail
from vitrail import disk
from vitrail.bench.sweep import Results
from vitrail.data.files.cache import keep
from vitrail.report import write_report

SAMPLE = (  # each verb, and layouts that save in different ways; benchmarks/kills.py without --only has 16 of them
    *("train/1 rank", "train/FSDP", "train/pipeline", "data encode/1 rank", "sample/1 rank"),
    *("data generate/--force", "report/1 rank", "bench/1 rank", "staging/1 rank"),
)


@pytest.mark.slow
def test_kills_of_every_verb_leave_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "kills.jsonl"
    words = ["--kills", "10", "--most", "1", "--seed", "18", "--out", str(out), "--only", *SAMPLE]
    env = environment(TMPDIR=str(tmp_path))
    code, output = run(sys.executable, ROOT / "benchmarks/kills.py", *words, env=env, timeout=3600)
    assert code == 0, output[-5000:]
    tries = [json.loads(line) for line in out.read_text().splitlines()][1:]  # the first tells of the machine
    assert sum(len(each["kills"]) for each in tries) >= 10
    assert len({(each["verb"], each["layout"]) for each in tries}) == len(SAMPLE)


def test_drafts_that_kills_have_left_are_swept(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next call that works in the folder, when they are old; a young one may be of a call that is at work."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    run_dir, bench = tmp_path / "run", tmp_path / "bench"

    def check(call: Callable[[], Any], *folders: Path) -> None:
        left = [disk.draft_of(folder / "some.txt") for folder in folders]
        young = [disk.draft_of(folder / "some.txt") for folder in folders]
        for draft in (*left, *young):
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text("half")
        for draft in left:
            os.utime(draft, (0, 0))
        call()
        assert not [draft for draft in left if draft.exists()]
        assert all(draft.exists() for draft in young)

    recipe = tiny_recipe(volume, run_dir, run__steps=1, data__batch=1, eval__samples=1)
    check(lambda: vitrail.train(recipe, quiet=True), run_dir, run_dir / "pictures")
    check(lambda: write_report(run_dir), run_dir)
    Results(bench).close()
    check(lambda: Results(bench).close(), bench, bench / "cells", bench / "logs")
    check(lambda: keep("sizes", "key", lambda: b"made", bytes), tmp_path / "cache/sizes")
    check(
        lambda: keep("sizes", "key", lambda: 1 / 0, bytes), tmp_path / "cache/sizes"
    )  # it is there: nothing is written
