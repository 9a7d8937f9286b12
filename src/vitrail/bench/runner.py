"""Runs of sweeps: cells one after the other, each in processes of its own (supervise.py); what is done stays done.

- the result of a cell is on the disk before the next one begins
- a call that is repeated goes on where the last one was stopped; cells that failed are tried again with `again`
- a cell that a job has begun and not told of is left to it, but for `again`
- after a batch that ran out of memory larger ones with the same other keys are skipped
- a stop (a signal that stops a training, or the time given) ends the cell that runs, whose result is then missing
- a result tells the facts of its recipe whether or not the measurement came to an end"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vitrail import disk
from vitrail.bench import sweep as sweeps
from vitrail.bench.supervise import best, forget, read_notes, read_result, read_started, run_cell
from vitrail.bench.sweep import Cell, Results, is_result, known_cells
from vitrail.errors import UserError
from vitrail.launch.world import usable_cores
from vitrail.parallel.mesh import AXES, layout_of
from vitrail.recipe import Recipe
from vitrail.recipe.load import Given, find_recipe
from vitrail.report.bench_cells import WORDS
from vitrail.report.facts import strict
from vitrail.report.units import count, duration, percent, plain
from vitrail.training.failures import listen, put_back

SCHEMA = 1


def describe(recipe: Recipe, *, gpus: int, nodes: int, on_gpu: bool) -> dict[str, Any]:
    """Return the facts of a recipe on so many ranks; what `auto` stands for is written out."""
    parallel, layout = recipe.parallel, layout_of(recipe.parallel, gpus)
    batch = recipe.data.global_batch(layout.data)
    compute = recipe.precision.compute
    explicit = any(getattr(parallel, key) is not None for key in ("replicate", "shard", "reshard"))
    return {
        "recipe": recipe.run.name,
        "model": recipe.model.kind,
        "size": named_size(recipe.to_tree()["model"]),
        "gpus": gpus,
        "nodes": nodes,
        "strategy": None if explicit else parallel.strategy or "FULL_SHARD",
        "group": parallel.group,
        "layout": {axis: getattr(layout, axis) for axis in AXES},
        "precision": ("bf16" if on_gpu else "fp32") if compute == "auto" else compute,
        "recompute": name_recompute(parallel.recompute),
        "compile": on_gpu if parallel.compile == "auto" else parallel.compile,
        "batch": batch,
        "batch_per_rank": batch // layout.data,
    }


def named_size(model: dict[str, Any]) -> str | None:
    """Return the name of a model's size, or of its encoder's, such as B/16."""
    encoder = model.get("encoder")
    return model.get("size") or (encoder.get("size") if isinstance(encoder, dict) else None)


def name_recompute(value: Any) -> str:
    """Return none, full, every=2, keep=qkv+fc1 or budget=0.5."""
    if isinstance(value, str):
        return value
    key, chosen = next((key, chosen) for key, chosen in value.model_dump().items() if chosen is not None)
    return f"{key}={'+'.join(chosen) if isinstance(chosen, tuple) else chosen}"


def alone(recipe: Recipe, ranks: int) -> list[str]:
    """Return overrides that give one process the work of one of so many ranks, with nobody to talk to."""
    layout = layout_of(recipe.parallel, ranks)
    if layout.parts * layout.pipeline > 1:
        raise UserError(
            f"mode compute: a rank of {layout} computes a part of a sample, which one rank alone cannot; leave the "
            "mode out, or set parallel.tensor=1 parallel.context=1 parallel.pipeline=1"
        )
    batch = recipe.data.global_batch(layout.data) // layout.data
    cleared = [f"parallel.{key}=null" for key in ("group", "replicate", "shard", "reshard")]
    return ["parallel.strategy=NO_SHARD", *cleared, f"data.batch={batch}"]


LIMIT = 1800.0  # seconds that a cell may take
PLACE = re.compile(r"(?<!\$)\{([A-Za-z_][\w.-]*)\}")  # {world} in the words that start ranks; ${HOME} is the shell's


class Stopped(Exception):
    """A wish to stop; what is done is kept."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The way in which cells are measured."""

    windows: int = 5
    steps: int | None = None
    warm_up: int | None = None
    plugins: tuple[str, ...] = ()
    limit: float = LIMIT  # seconds of a cell
    skip: bool = True
    again: bool = False  # try those that failed once more
    most_seconds: float | None = None  # of the whole call: no cell begins later
    start_with: str | None = None  # the words before a cell's own, which start its ranks, instead of torchrun


@dataclass
class Sweep:
    """A recipe, what is swept, and where the results go."""

    recipe: Any
    overrides: Sequence[str]
    cells: list[Cell]
    folder: Path
    options: Options
    asked: dict[str, Any]  # for sweep.json
    recipes: dict[str, Recipe]
    tell: Callable[[str], None] = field(default=lambda line: None)
    kept: bool = True  # whether the folder stays, so that its files may be named
    begun: dict[str, str] = field(default_factory=dict)  # by name: which job has begun a cell, and no more is known
    already: str = ""  # when and how the results were measured that this call found

    def run(self) -> list[dict[str, Any]]:
        """Measure what is missing, and return the newest result of each cell."""
        began, times = time.monotonic(), []
        with Results(self.folder) as results, stoppable():
            results.agree(self.asked)
            self.collect(results)
            todo = [cell for cell in self.cells if self.is_open(cell, results)]
            if len(todo) < len(self.cells):
                done = len(self.cells) - len(todo)
                self.tell(f"{done} of {len(self.cells)} cells have a result already{self.already}")
            for number, cell in enumerate(todo, 1):
                limit = self.options.most_seconds
                if limit is not None and time.monotonic() - began >= limit:
                    raise Stopped(f"the time is up, and {len(todo) - number + 1} cells are missing")
                ahead = f"[{number}/{len(todo)}] {cell.name}"
                earlier = sweeps.too_large(cell, results.newest.values()) if self.options.skip else None
                if earlier is not None:
                    error = f"{earlier} ran out of memory, and this batch is larger"
                    result = self.finish(cell, {"status": "skipped", "error": error}, 0.0)
                    if results.newest.get(cell.identity, {}).get("status") != "skipped":
                        results.add(result)
                    self.tell(f"{ahead}: skipped, {error}")
                    continue
                start = time.monotonic()
                result = self.finish(cell, self.measure(cell), time.monotonic() - start)
                times.append(time.monotonic() - start)
                results.add(result)
                left = statistics.fmean(times) * (len(todo) - number)
                log = self.log(cell)
                words = summarise(result) + (f"; see {log}" if self.kept and log.exists() else "")
                self.tell(f"{ahead}: {words}" + (f"; about {duration(left)} left" if left else ""))
            newest = results.newest
            return [newest[cell.identity] for cell in self.cells if cell.identity in newest]

    def is_open(self, cell: Cell, results: Results) -> bool:
        status = results.newest.get(cell.identity, {}).get("status")
        wants_again = status == "failed" or cell.name in self.begun
        return status not in ("ok", "oom") and (not wants_again or self.options.again)

    def log(self, cell: Cell) -> Path:
        return self.folder / "logs" / f"{cell.file}.log"

    def measure(self, cell: Cell) -> dict[str, Any]:
        _, ranks = cell.started
        # Alone it has as many cores as one of the ranks would have.
        threads = None if cell.started == (cell.nodes, cell.ranks) else max(1, usable_cores() // cell.ranks)
        starter = self.starter(cell)
        order = self.order(cell, watched=starter is None)
        return run_cell(order, ranks, log=self.log(cell), limit=self.options.limit, threads=threads, starter=starter)

    def starter(self, cell: Cell) -> list[str] | None:
        """Return the words that start the ranks of a cell, if they are given."""
        if self.options.start_with is None:
            return None
        nodes, ranks = cell.started
        return fill(self.options.start_with, {"nodes": nodes, "ranks": ranks, "world": nodes * ranks})

    def order(self, cell: Cell, *, watched: bool) -> dict[str, Any]:
        """Return what the processes of a cell are told."""
        more: list[str] = []
        if cell.mode == "compute":
            more = alone(self.recipes[cell.name], cell.ranks * cell.nodes)
        options = self.options
        return {
            "recipe": self.recipe,
            "overrides": [*self.overrides, *cell.overrides, *more],
            "plugins": list(options.plugins),
            "mode": cell.mode,
            "windows": options.windows,
            "steps": options.steps,
            "warm_up": options.warm_up,
            "name": cell.name,
            "keys": cell.keys,
            "out": str((self.folder / "cells" / f"{cell.file}.json").resolve()),
            "watched": watched,
        }

    def finish(self, cell: Cell, result: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return a result with all that is known of its cell, whatever became of it."""
        known = {"schema": SCHEMA, "name": cell.name, "keys": cell.keys, "mode": cell.mode}
        if result["status"] != "ok":
            import torch

            recipe = find_recipe(self.recipe, self.order(cell, watched=False)["overrides"])
            nodes, ranks = cell.started
            on_gpu = recipe.run.device != "cpu" and torch.cuda.is_available()
            known |= describe(recipe, gpus=nodes * ranks, nodes=nodes, on_gpu=on_gpu)
            known |= {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        return strict(known | result | {"name": cell.name, "keys": cell.keys, "seconds": seconds})

    def collect(self, results: Results) -> None:
        """Take in what jobs have left in cells/, of this grid or of an earlier one."""
        folder = self.folder / "cells"
        for path in sorted(folder.glob("*.json")):
            result = read_result(path)
            if result is not None and is_result(result):
                results.add(result)
                forget(path)
                if result["status"] == "ok":  # of a call that was killed before it could take it in
                    disk.remove(self.folder / "logs" / f"{path.stem}.log", inside=self.folder)
        for cell in self.cells:
            out = folder / f"{cell.file}.json"
            if (note := best(read_notes(out))) is not None:
                results.add(self.finish(cell, note, 0.0))
                forget(out)
            elif (began := read_started(out)) is not None:
                self.begun[cell.name] = began
                if not self.options.again:
                    self.tell(
                        f"{cell.name}: {began} and left no result: it is still at work, or the scheduler has ended "
                        "it; --again begins anew"
                    )
        if results.unread:
            self.tell(f"{self.folder / 'results.jsonl'}: lines that cannot be read, and do not count: {results.unread}")
        newest = results.newest
        kept = [newest[c.identity] for c in self.cells if c.identity in newest and not self.is_open(c, results)]
        self.already = tell_kept(kept, self.options)


def plan_sweep(
    recipe: Given,
    overrides: Sequence[str] = (),
    *,
    sweep: Sequence[str] = (),
    mode: str = "real",
    ranks: int = 1,
    nodes: int = 1,
    out: str | Path | None = None,
    options: Options | None = None,
    kept: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Check all that was asked for; nothing is written yet."""
    options = options or Options()
    base = find_recipe(recipe, overrides)
    if isinstance(recipe, str | Path):
        recipe = str(recipe)
    else:  # a tree or a Recipe, which goes into a file for the processes of a cell
        recipe, overrides = base.to_tree(), ()
    folder = Path(out) if out is not None else Path("runs", f"bench-{base.run.name}")
    cells = sweeps.read_cells(sweep, mode=mode, ranks=ranks, nodes=nodes, known=known_cells(folder))
    recipes = sweeps.check_cells(recipe, overrides, cells)
    for cell in cells:
        if cell.mode == "compute":
            alone(recipes[cell.name], cell.ranks * cell.nodes)
    values: dict[str, list[Any]] = {}
    for cell in cells:
        for key, value in cell.keys.items():
            if value not in (known := values.setdefault(key, [])):
                known.append(value)
    asked = {
        "schema": SCHEMA,
        "recipe": recipe if isinstance(recipe, str) else base.run.name,
        "overrides": list(overrides),
        "sweep": values,
        "mode": mode,
        "ranks": ranks,
        "nodes": nodes,
        "windows": options.windows,
        "steps": options.steps,
        "cells": [cell.name for cell in cells],
        "identities": {cell.name: cell.identity for cell in cells},
        "tree": base.to_tree(),
    }
    planned = Sweep(recipe, overrides, cells, folder, options, asked, recipes, tell, kept)
    for cell in cells:
        planned.starter(cell)
    return planned


def fill(text: str, numbers: dict[str, int]) -> list[str]:
    """Return the words of --start-with with these numbers in them; refuse them if they cannot be started."""

    def number(found: re.Match[str]) -> str:
        if found[1] not in numbers:
            known = ", ".join(f"{{{name}}}" for name in numbers)
            raise UserError(f"--start-with: {found[0]} is unknown (known: {known})")
        return str(numbers[found[1]])

    try:
        words = shlex.split(PLACE.sub(number, text))
    except UserError:
        raise
    except ValueError as error:  # a quotation that does not end
        raise UserError(f"--start-with: {error}; close it") from None
    if not words:
        raise UserError("--start-with: no words are given; expected some such as 'srun --ntasks={world}'")
    if shutil.which(words[0]) is None:
        raise UserError(f"--start-with: there is no program {words[0]!r} here; correct it, or load what provides it")
    return words


def tell_kept(results: Sequence[dict[str, Any]], options: Options) -> str:
    """Say when and how results were measured, and that other options do not change them."""
    told = [result for result in results if result["status"] == "ok" and {"windows", "steps", "date"} <= set(result)]
    if not told:
        return ""
    dates = span(str(result["date"])[:10] for result in told)
    windows, steps = (span(numbers) for numbers in zip(*(_counts(result) for result in told), strict=True))
    words = f" (of {dates}, {windows} windows of {steps} steps)"
    if any(_differs(result, options) for result in told):
        words += "; other --windows, --steps or --warm-up do not change it: give another --out to measure anew"
    return words


def span(values: Iterable[Any]) -> str:
    """Name the least and the largest."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _counts(result: dict[str, Any]) -> tuple[int, int]:
    return len(result["windows"]), result["steps"]


def _differs(result: dict[str, Any], options: Options) -> bool:
    """Return whether a result was measured otherwise; a number that is not given may be any."""
    pairs = ((options.steps, result["steps"]), (options.warm_up, result.get("warm_up")))
    return len(result["windows"]) != options.windows or any(mine not in (None, theirs) for mine, theirs in pairs)


def summarise(result: dict[str, Any]) -> str:
    """Say a result in a few words."""
    took = f" ({duration(result['seconds'])})"
    if result["status"] != "ok":
        return f"{WORDS[result['status']]}: {' '.join(str(result['error']).split())[:200]}{took}"
    step = result["step_seconds"]
    words = [f"{plain(step['median'], 3)} s a step", f"{plain(result['samples_per_s'], 3)} samples/s"]
    words += [f"MFU {100 * result['mfu']:.1f} %"] if result.get("mfu") else []
    return ", ".join([*words, f"{result['memory']['allocated_gib']:.3g} GiB"]) + took


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped on signals that ask for a stop, for the time of the block."""

    def leave(number: int, _frame: Any) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    main = threading.current_thread() is threading.main_thread()  # only there may handlers be set
    previous = listen(leave) if main else {}
    try:
        yield
    finally:
        put_back(previous)


def tree(result: dict[str, Any]) -> dict[str, Any]:
    """Return what a person wants to know of one result; --json has it all."""
    if result["status"] != "ok":
        return {"status": result["status"], "error": result["error"]}
    step, tokens, memory = result["step_seconds"], result["tokens_per_s"], result["memory"]
    shown: dict[str, Any] = {
        "mode": result["mode"],
        "model": f"{result['model']}, {count(result['parameters'])} parameters, {result['precision']}, recompute "
        f"{result['recompute']}, {'compiled' if result['compile'] else 'not compiled'}",
        "ranks": f"{result['gpus']} ({result['strategy'] or 'own layout'}), batch {result['batch']}",
        "step": f"{plain(step['median'], 4)} s ({plain(step['low'], 4)} to {plain(step['high'], 4)} in "
        f"{len(result['windows'])} windows of {result['steps']} steps, after {result['warm_up']} that do not count)",
        "samples/s": plain(result["samples_per_s"], 4),
        "images/s": result["images_per_s"] and plain(result["images_per_s"], 4),
        "tokens/s": f"{plain(tokens['visible'], 4)} visible, {plain(tokens['all'], 4)} in all",
        "parts": ", ".join(f"{part} {plain(s, 3)} s" for part, s in result["split"].items() if s is not None),
        "TFLOP/s": result["tflops"] and plain(result["tflops"], 4),
        "MFU": result["mfu"] and f"{percent(result['mfu'])} (hardware: {percent(result['hfu'])})",
        "memory": f"{memory['allocated_gib']:.4g} GiB allocated, {memory['reserved_gib']:.4g} GiB reserved",
        "energy": result["energy_j"] and f"{plain(result['energy_j'], 3)} J a sample",
        "notes": "; ".join(result["notes"]) or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def row(result: dict[str, Any]) -> dict[str, str]:
    ok = result["status"] == "ok"
    step = result.get("step_seconds", {})
    return {
        "cell": result["name"],
        "status": result["status"],
        "step s": plain(step["median"], 4) if ok else "",
        "spread": f"{plain(step['low'], 3)}..{plain(step['high'], 3)}" if ok else "",
        "samples/s": plain(result["samples_per_s"], 4) if ok else "",
        "MFU": percent(result["mfu"]) if ok and result["mfu"] else "",
        "GiB": f"{result['memory']['allocated_gib']:.3g}" if ok else "",
        "why": "" if ok else " ".join(str(result["error"]).split())[:80],
    }
