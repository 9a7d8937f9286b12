"""A job script for each cell of a sweep: the way to several nodes. Its result lies where a later call finds it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.bench.cell import forget
from vitrail.bench.results import Results
from vitrail.disk import write_whole
from vitrail.launch import jobs

if TYPE_CHECKING:
    from vitrail.bench.runner import Sweep
    from vitrail.bench.sweep import Cell


def write_jobs(sweep: Sweep, launcher: jobs.Launcher, **settings: Any) -> list[Path]:
    """Take in what earlier jobs have found, and write the scripts of the cells that are still missing.

    `settings` are those of a job (launch/jobs.py): machine, time, account and so on. All is checked before any is
    written.
    """
    folder = sweep.folder / "jobs"
    scripts = {cell: script_of(sweep, cell, launcher, settings) for cell in sweep.cells}
    written = []
    with Results(sweep.folder) as results:
        results.agree(sweep.asked)
        sweep.collect(results)
        for cell, script in scripts.items():
            if sweep.is_open(cell, results):
                order = sweep.order(cell, watched=False) | {"job": True}
                forget(Path(order["out"]))  # of a job that was ended
                sweep.begun.pop(cell.name, None)
                write_whole(order_path(sweep, cell), json.dumps(order), parents=True)
                path = folder / f"{cell.file}.sh"
                jobs.save(script, path, replace=True)  # one of an earlier call, with other options
                written.append(path)
    return written


def script_of(sweep: Sweep, cell: Cell, launcher: jobs.Launcher, settings: dict[str, Any]) -> jobs.Script:
    """The script that would train the recipe of a cell, but it measures."""
    alone = cell.mode == "compute"
    job = jobs.Job(
        launcher=launcher,
        recipe=str(sweep.recipe),
        overrides=tuple(sweep.order(cell, watched=False)["overrides"]),
        plugins=sweep.options.plugins,
        nodes=1 if alone else cell.nodes,
        ranks_per_node=1 if alone else cell.ranks,
        words=("vitrail.bench.cell", str(order_path(sweep, cell))),
        name=re.sub(r"[^\w.-]+", "-", cell.file).strip("-"),
        requeue=False if launcher == "slurm" else None,
        max_restarts=0 if launcher == "torchrun" else None,
        **settings,
    )
    return jobs.write_script(job, verb="bench", written_by=[job.recipe, *job.overrides])


def order_path(sweep: Sweep, cell: Cell) -> Path:
    """What the processes of a job read."""
    return (sweep.folder / "jobs" / f"{cell.file}.order").resolve()
