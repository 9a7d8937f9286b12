"""docs/reliability.md lists faults by name; each must have a test that exists. Numbers on pages are the code's."""

import ast
import inspect
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vitrail.bench import measure
from vitrail.bench.cell import take_steps
from vitrail.cost import plan as planner
from vitrail.cost import search
from vitrail.data import statistics
from vitrail.data.files import handles
from vitrail.data.latents import store
from vitrail.data.reading import pool
from vitrail.infer import features, neighbours, quality, sample
from vitrail.launch import jobs, world
from vitrail.recipe import problems
from vitrail.recipe.sections import Data, Log, Prefetch
from vitrail.training import evaluate, failures, loggers, setup, trainer
from vitrail.training.failures import Watchdog

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
LEAST = 120
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^`]*)\])?`")


def rows() -> list[list[str]]:
    """Cells of the rows of all tables of faults, without their heads."""
    text = re.sub("<!-- kills -->.*<!-- /kills -->", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)  # counts
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if not line.startswith("|---")]
    return [row for row in cells if row != ["fault", "what happens", "test"]]


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_test_that_exists() -> None:
    for row in rows():
        assert len(row) == 3, row
        named = TEST.findall(row[2])
        assert named, f"no test: {row}"
        for file, name, case in named:
            assert (ROOT / file).is_file(), f"{file} is missing: {row}"
            assert name in names_in(file), f"{file} has no {name}: {row}"
            assert not case or case in (ROOT / file).read_text(encoding="utf-8"), f"{name} has no case {case!r}: {row}"


def test_no_fault_is_listed_twice() -> None:
    faults = [row[0] for row in rows()]
    assert sorted(set(faults)) == sorted(faults)


# Seconds that a test waits for something before it gives up, and durations that it compares.
LIMIT = re.compile(r"(?:timeout=|\.join\(|\.wait\(|(?:monotonic|perf_counter)\(\) \+ |within\()(\d+)(?![\d.])")
JUDGED = re.compile(r"assert .*(?:monotonic|perf_counter|process_time|time\.time)\(\) - .*<")


def test_no_test_is_judged_by_the_clock() -> None:
    """A busy machine is ten times slower, now and then: limits are for what hangs, and nothing has to be fast."""
    for path in (ROOT / "tests").rglob("*.py"):
        # How long daemons and browsers may take to end, before they are killed.
        if path.name in ("slurm.py", "browsing.py") or "gpu" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        short = [found.group() for found in LIMIT.finditer(text) if 0 < int(found.group(1)) < 600]
        assert not short, f"{path}: {short[0]}; give it 600 s or more"
        assert not (found := JUDGED.search(text)), f"{path}: {found.group()}; count something instead"


def default(section: Any, key: str) -> Any:
    return section.model_fields[key].default


def argument(call: Callable[..., Any], name: str) -> Any:
    return inspect.signature(call).parameters[name].default


# What pages say in numbers, and where the code has them: page, its words with a group for each number, the values.
FACTS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("numbers.md", r"The first (\d+) steps after a start are not counted", (evaluate.WARM_UP_STEPS,)),
    ("numbers.md", r"between steps, every (\d+) steps", (trainer.COLLECT_EVERY,)),
    ("resume.md", r"after `run.hang_limit` or (\d+) usual steps", (Watchdog.MANY_STEPS,)),
    (
        "resume.md",
        r"or (\d+) usual steps; (\d+) minutes while starting, compiling, saving or predicting, "
        r"(\d+) hours while data are opened",
        (Watchdog.MANY_STEPS, failures.SLOW_PHASE / 60, failures.OPENING / 3600),
    ),
    ("resume.md", r"by its silence \| (\d+) s if a connection broke", (Watchdog.SILENCE,)),
    ("resume.md", r"its own clock \| (\d+) s, or when the save", (Watchdog.GRACE,)),
    ("resume.md", r"(\d+) minutes, so the clocks above", (setup.FIRST_TIMEOUT.total_seconds() / 60,)),
    ("resume.md", r"never comes is reported after (\d+) minutes", (world.MEETING.total_seconds() / 60,)),
    ("launch.md", r"after (\d+) minutes each rank says which address", (world.MEETING.total_seconds() / 60,)),
    ("launch.md", r"`--signal=USR1@(\d+)`: all tasks get SIGUSR1 (\d+) s", (jobs.SIGNAL_SECONDS,) * 2),
    ("logging.md", r"falls ([\d,]+) reports\s+behind", (loggers.MOST,)),
    ("logging.md", r"it has (\d+) s to finish, (\d+) s after a failure", (loggers.PATIENCE["done"], loggers.SHORT)),
    ("bench.md", r"at least (\d+) steps, and all whose batches", (measure.LEAST_WARM,)),
    (
        "bench.md",
        r"within (\d+) %, at most (\d+)\. `--warm-up",
        (round(100 * (measure.STEADY - 1)), measure.MOST_WARM),
    ),
    ("tune.md", r"A trial is (\d+) steps of the real trainer", (argument(take_steps, "steps"),)),
    ("formats.md", r"decoded whole and up to (\d+) GiB of them are kept", (handles.WHOLE_BYTES / 2**30,)),
    ("bad-data.md", r"the read has not ended after (\d+) s", (default(Data, "read_limit"),)),
    ("bad-data.md", r"`data.retries` times, after ([\d.]+) s, ([\d.]+) s", (pool.FIRST_WAIT, 3 * pool.FIRST_WAIT)),
    ("bad-data.md", r"limit is at most ([\d.]+) of `run.hang_limit`", (pool.BEFORE_HANG,)),
    ("bad-data.md", r"cannot be read after (\d+) tries", (default(Data, "retries") + 1,)),
    ("parallel.md", r"`prefetch: \{backward: (\d)\}`, the default", (default(Prefetch, "backward"),)),
    ("parallel.md", r"`prefetch: \{forward: (\d)\}`, the default", (default(Prefetch, "forward"),)),
    ("latents.md", r"a chunk a row and up to ([\d,]+) rows a file", (argument(store.write_latents, "rows"),)),
    ("diffusion.md", r"vitrail sample runs/digits-dit +# (\d+) samples", (sample.Wishes.number,)),
    ("logging.md", r"`log.slices` slices \((\d+)\)", (default(Log, "slices"),)),
    ("diffusion.md", r"The default, (\d+), is small", (sample.MOST_SAMPLES,)),
    ("data.md", r"above (\d+) million voxels", (round(statistics.WHOLE / 1e6),)),
    (
        "evaluation.md",
        r"nearest \((\d+)\) vote, each with a weight of exp\(c / ([\d.]+)\)",
        (argument(neighbours.knn, "neighbours"), argument(features.nearest_classes, "temperature")),
    ),
    ("evaluation.md", r"subsets of up to ([\d,]+)", (argument(features.kid, "size"),)),
    ("evaluation.md", r"along (\d+) random directions", (quality.PROJECTIONS,)),
    (
        "recipe.md",
        r"above 10\^(\d+) \(.*more than 10\^(\d+)\s+voxels, more than (\d+) blocks or 10\^(\d+) p",
        (math.log10(problems.LARGEST), math.log10(problems.VOXELS), problems.DEPTH, math.log10(problems.PARAMETERS)),
    ),
    ("plan.md", r"has to stay below (\d+) % of its memory", (100 * planner.HEADROOM,)),
    (
        "plan.md",
        r"pipelines of up to (\d+)\s+ranks, and context ranks with ([\d,]+) tokens",
        (search.MOST_PIPELINE, search.LEAST_TOKENS),
    ),
    ("launch.md", r"`--max-restarts` \((\d+)\) bounds", (jobs.MAX_RESTARTS["slurm"],)),
    ("launch.md", r"`--max-restarts` times \((\d+)\)", (jobs.MAX_RESTARTS["torchrun"],)),
)


@pytest.mark.parametrize(("page", "words", "values"), FACTS, ids=[f"{page}-{n}" for n, (page, *_) in enumerate(FACTS)])
def test_numbers_on_pages_are_those_of_the_code(page: str, words: str, values: tuple[float, ...]) -> None:
    found = re.search(words, (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert found, f"{page} does not say: {words}"
    assert tuple(float(number.replace(",", "")) for number in found.groups()) == pytest.approx(values)
