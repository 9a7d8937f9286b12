"""A complete ablation at toy size through the real command: interrupted, resumed and reported."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support import LONG, ROOT, end, eventually, start, vitrail

TOY = str(ROOT / "configs" / "ablate" / "dit_toy.yaml")
FEW = ("--mode", "syn", "--windows", "2", "--steps", "2", "--warm-up", "1")


def results(folder: Path) -> list[dict]:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interrupt(folder: Path, after: int, sign: int, *words: str) -> int:
    """Start a sweep, and send it a signal while the cell after so many results runs; its exit code."""
    process = start(sys.executable, "-m", "vitrail", "bench", TOY, *words, "--out", folder)
    try:
        limit = time.monotonic() + LONG
        while time.monotonic() < limit and process.poll() is None:
            if len(results(folder)) >= after and list((folder / "cells").glob("*.order")):
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stdout.read()
        process.send_signal(sign)
        return process.wait(timeout=LONG)
    finally:
        end(process)


def cells_at_work(folder: Path) -> list[str]:
    """Processes that measure a cell of this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [words] if "vitrail.bench.cell" in words and str(folder) in words else []
    return found


def test_an_ablation_is_killed_resumed_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    grid = ("--sweep", "model.patch=4,2", *FEW)
    assert interrupt(folder, 1, signal.SIGKILL, *grid) == -signal.SIGKILL
    first = results(folder)
    assert [found["name"] for found in first] == ["patch=4"]
    assert eventually(lambda: not cells_at_work(folder))  # nobody goes on for a sweep that is gone
    code, output = vitrail("bench", TOY, *grid, "--out", folder, "--json")
    assert code == 0, output
    told = json.loads(output[output.index("{") :])
    assert [(found["name"], found["status"]) for found in told["results"]] == [("patch=4", "ok"), ("patch=2", "ok")]
    assert told["results"][0] == first[0]  # what was measured is not measured again
    assert [found["tokens_all"] for found in told["results"]] == [4, 16]
    code, output = vitrail("report", folder)
    assert code == 0, output
    page = (folder / "report.html").read_text()
    assert "patch=2" in page
    assert "patch=4" in page


@pytest.mark.slow
def test_a_grid_with_every_end_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """Two ranks; one width is more than may be allocated, so larger batches are skipped; no rank is left behind."""
    folder = tmp_path / "bench"
    grid = ("--ranks", "2", "--sweep", "model.width=64,20480", "--sweep", "data.batch=4/rank,8/rank", *FEW)
    assert interrupt(folder, 1, signal.SIGINT, *grid) == 75
    assert eventually(lambda: not cells_at_work(folder))
    done = len(results(folder))
    assert 1 <= done < 4
    limited = ("bash", "-c", 'ulimit -v 12000000; exec "$@"', "bash")
    process = start(*limited, sys.executable, "-m", "vitrail", "bench", TOY, *grid, "--out", folder)
    try:
        output, _ = process.communicate(timeout=LONG)
    finally:
        end(process)
    assert process.returncode == 0, output
    found = {result["name"]: result for result in results(folder)}
    assert [result["status"] for result in found.values()] == ["ok", "ok", "oom", "skipped"], output
    assert [result["name"] for result in found.values()] == [
        "width=64,batch=4/rank",
        "width=64,batch=8/rank",
        "width=20480,batch=4/rank",
        "width=20480,batch=8/rank",
    ]
    ok, oom = found["width=64,batch=8/rank"], found["width=20480,batch=4/rank"]
    assert ok["gpus"] == len(ok["memory"]["per_rank"]) == 2
    assert ok["split"]["communication"] > 0
    assert re.search("allocate|of memory here", oom["error"])  # by the allocator, or by arithmetic
    assert (oom["batch"], oom["batch_per_rank"]) == (8, 4)
    assert os.path.exists(folder / "results.csv")
