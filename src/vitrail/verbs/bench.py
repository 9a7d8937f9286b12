"""`vitrail bench`: how fast a recipe trains, and what changes when its keys do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitrail import disk
from vitrail.errors import RunFailed, UserError
from vitrail.verbs.words import (
    Json,
    Overrides,
    Plugins,
    is_chief,
    load_plugins,
    note,
    print_rows,
    print_tree,
    refuse_options,
)

STOPPED = 75  # exit code: what is done is kept, and the same call goes on


def add(app: typer.Typer) -> None:
    app.command("bench", short_help="Measure how fast a recipe trains, or a grid of its keys.")(bench)


def bench(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or a run folder.")],
    overrides: Overrides = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE", help="real, syn (one batch), io (loading alone), compute (one rank); repeatable."),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Values of a key of the recipe; repeatable, a grid.")
    ] = None,
    windows: Annotated[int, typer.Option(metavar="N", min=1, help="Windows, of which the median counts.")] = 5,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of a window; about a second's if not given.")
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Steps that do not count; until they are steady if not given."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes on this machine, or on each node; else 1.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results; runs/bench-NAME with --sweep.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Try cells that failed once more.")] = False,
    no_skip: Annotated[
        bool, typer.Option("--no-skip", help="Try larger batches, too, after one that ran out of memory.")
    ] = False,
    limit: Annotated[str | None, typer.Option(metavar="CLOCK", help="Longest that a cell may take; else 30m.")] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", min=0.1, help="Begin no cell later than this; the next call goes on.")
    ] = None,
    start_with: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="Start ranks with these words, such as srun; {nodes}, {ranks}, {world}."),
    ] = None,
    jobs: Annotated[
        Literal["slurm", "mpi", "torchrun"] | None, typer.Option(help="Write a job script for each cell instead.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Nodes of a cell, with --jobs or --start-with; else 1.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME_OR_FILE", help="Jobs: as for vitrail launch; else generic.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="CLOCK", help="Jobs: time limit of each.")] = None,
    account: Annotated[str | None, typer.Option(help="Jobs: account that pays.")] = None,
    partition: Annotated[str | None, typer.Option(help="Jobs: partition of the cluster.")] = None,
    cpus_per_rank: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Jobs: cores of a rank; else those of the machine.")
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Measure how fast a recipe trains: warm-up left out, the median of several windows with its spread.

    \b
    vitrail bench configs/demo/mae3d.yaml
    vitrail bench configs/demo/mae3d.yaml --mode real --mode syn --mode io
    vitrail bench RECIPE --ranks 4 --sweep parallel.strategy=FULL_SHARD,DDP --sweep data.batch=16/rank,32/rank
    vitrail bench RECIPE --sweep parallel.strategy,parallel.group=DDP:null,HYBRID_SHARD:2 --ranks 4
    vitrail bench RECIPE --sweep nodes=1,2,4 --ranks 8 --jobs slurm --time 20m --account lab
    vitrail bench RECIPE --sweep nodes=1,2,4 --ranks 8 --start-with "srun --nodes={nodes} --ntasks={world}"

    With --sweep every combination is a cell with processes of its own, and its result a line of DIR/results.jsonl (and
    results.csv); `vitrail report DIR` makes a page of them. The same call goes on where the last one was stopped.
    Running out of memory, failing and being skipped are results, too. Of one key the values stand between commas; keys
    that change together are named together, their values with colons between. mode, ranks and nodes may be swept, too.
    With --jobs, call it again when the jobs are done: that takes in their results. With --start-with one job does all.
    """
    from vitrail.bench import check_mode
    from vitrail.launch.world import find_world

    load_plugins(plugin)
    asked: dict[str, Any] = {"windows": windows, "steps": steps, "warm_up": warm_up}
    modes = list(dict.fromkeys(mode or ["real"]))
    for word in modes:
        check_mode(word)
    settings: dict[str, Any] = {
        "machine": machine,
        "time": time,
        "account": account,
        "partition": partition,
        "cpus_per_rank": cpus_per_rank,
    }
    given = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    if find_world().size > 1:
        given = {
            "--sweep": sweep,
            "--out": out,
            "--jobs": jobs,
            "--start-with": start_with,
            "a second --mode": modes[1:],
            "--ranks": ranks,
            "--nodes": nodes,
            "--limit": limit,
            "--minutes": minutes,
            "--again": again,
            "--no-skip": no_skip,
            **given,
        }
        for option, value in given.items():
            if value:
                raise UserError(
                    f"{option}: processes that a launcher has started measure one recipe in one mode; leave it out, or "
                    "call vitrail bench once, without a launcher, and let --ranks or --jobs start the processes"
                )
        _measure_here(recipe, overrides or [], mode=modes[0], as_json=as_json, **asked)
        return
    sweep = list(sweep or [])
    kept = bool(sweep or out or jobs)
    if len(modes) > 1:
        if any(axis.partition("=")[0].strip() == "mode" for axis in sweep):
            raise UserError("--mode: several are given, and --sweep mode is, too; leave one of them out")
        sweep.append(f"mode={','.join(modes)}")
    if jobs is None:
        refuse_options(given, "no jobs are written", "--jobs")
    else:
        from vitrail.launch.jobs import load_machine

        unused = {"--limit": limit, "--minutes": minutes}
        refuse_options(unused, "job scripts are written, whose limit is --time", "cells that run at once")
        settings["machine"] = machine or "generic"
        ranks = ranks or load_machine(settings["machine"]).ranks_per_node
    _run(
        recipe,
        overrides or [],
        {"sweep": sweep, "mode": modes[0], "ranks": ranks or 1, "nodes": nodes or 1, "out": out, "kept": kept},
        asked | {"plugins": tuple(plugin or ()), "again": again, "skip": not no_skip, "start_with": start_with},
        (limit, minutes),
        None if jobs is None else (jobs, settings),
        as_json,
    )


def _measure_here(recipe: str, overrides: list[str], *, as_json: bool, **asked: Any) -> None:
    """On the ranks that a launcher has started."""
    from vitrail.bench.measure import measure
    from vitrail.errors import is_out_of_memory

    try:
        result = measure(recipe, overrides, name="as it is", **asked)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise RunFailed(f"out of memory: {' '.join(str(error).split())[:300]}") from error
        raise
    if is_chief():
        _show([result], as_json, None)


def _run(
    recipe: str,
    overrides: list[str],
    grid: dict[str, Any],
    asked: dict[str, Any],
    times: tuple[str | None, float | None],
    jobs: tuple[Any, dict[str, Any]] | None,
    as_json: bool,
) -> None:
    """Cells in processes of their own, or in jobs."""
    from vitrail.bench.runner import LIMIT, Options, Stopped, plan_sweep
    from vitrail.recipe import seconds_of

    limit, minutes = times
    try:
        most = LIMIT if limit is None else seconds_of(limit)
    except UserError as error:
        raise UserError(f"--limit: {error}") from None
    options = Options(**asked, limit=most, most_seconds=None if minutes is None else 60 * minutes)
    if jobs is None and options.start_with is None:
        for name, value in {"--nodes": grid["nodes"] > 1, "--sweep nodes": _sweeps(grid["sweep"], "nodes")}.items():
            if value:
                raise UserError(
                    f"{name}: other nodes are reached by jobs (--jobs slurm), or inside of one by "
                    '--start-with "srun --nodes={nodes} --ntasks={world}"'
                )
    if jobs is not None and options.start_with is not None:
        raise UserError("--start-with: job scripts say themselves how ranks are started; leave it or --jobs out")
    several = bool(grid["sweep"]) or jobs is not None
    with disk.scratch("vitrail-bench-") as nowhere:
        grid = grid | ({} if grid["kept"] else {"out": nowhere})
        planned = plan_sweep(recipe, overrides, options=options, tell=note, **grid)
        if jobs is not None:
            from vitrail.bench.jobs import write_jobs

            launcher, settings = jobs
            scripts = write_jobs(planned, launcher, **settings)
            done = len(planned.cells) - len(scripts) - len(planned.begun)
            every = done == len(planned.cells)
            note(
                f"{done} of {len(planned.cells)} cells have a result{planned.already}"
                + (f", all in {planned.folder}" if every else "")
            )
            for script in scripts:
                print(script)
            return
        try:
            results = planned.run()
        except Stopped as stop:
            where = f"finished cells are kept in {planned.folder}, and the same call goes on from there"
            note(f"{stop}; {where if planned.kept else 'nothing is kept'}")
            raise typer.Exit(STOPPED) from None
        if not results:
            raise RunFailed("no cell has a result: jobs have begun them; wait for these, or call with --again")
        if several or results[0]["status"] == "ok" or as_json:
            _show(results, as_json, planned.folder if planned.kept else None)
        if not several and results[0]["status"] != "ok":
            _fail(results[0], planned.folder / "logs")
        if several and all(result["status"] == "failed" for result in results):
            _fail_all(planned.folder / "logs", planned.kept)


def _fail(result: dict[str, Any], logs: Path) -> None:
    """The only measurement has failed: what it printed goes with it."""
    told = "out of memory" if result["status"] == "oom" else result["status"]
    if result.get("wrong_input"):
        raise UserError(result["error"])
    _show_logs(logs)
    raise RunFailed(f"{told}: {result['error']}")


def _fail_all(logs: Path, kept: bool) -> None:
    if not kept:
        _show_logs(logs)
    raise RunFailed("nothing was measured: every cell failed" + (f"; see {logs}" if kept else ""))


def _show_logs(logs: Path) -> None:
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]:
            note(line)


def _sweeps(axes: list[str], key: str) -> bool:
    return any(key in axis.partition("=")[0].split(",") for axis in axes)


def _show(results: list[dict[str, Any]], as_json: bool, folder: Path | None) -> None:
    from vitrail.bench.explain import explain
    from vitrail.bench.show import row, tree

    sentence = explain(results) if len({str(_others(result)) for result in results}) == 1 else ""
    if as_json:
        found = {"folder": None if folder is None else str(folder), "summary": sentence, "results": results}
        print_tree(found, as_json)
        return
    if len(results) == 1:
        print_tree(tree(results[0]), as_json)
    elif results:
        several = len({result["mode"] for result in results}) > 1
        print_rows([row(_with_mode(result) if several else result) for result in results], as_json)
    if sentence:
        print(f"\n{sentence}")
    if folder is not None:
        print(f"\n{folder}")


def _with_mode(result: dict[str, Any]) -> dict[str, Any]:
    """Named by its mode, too, which was not swept when it was measured."""
    told = f"mode={result['mode']}"
    return result if told in result["name"].split(",") else result | {"name": f"{result['name']} ({told})"}


def _others(result: dict[str, Any]) -> dict[str, Any]:
    """What is swept beside the mode."""
    return {key: value for key, value in result["keys"].items() if key != "mode"}
