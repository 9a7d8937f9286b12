"""`vitrail plan`, `tune` and `bench`: will it fit, how large may a batch be, how fast does it go, which layout is best.

`plan` needs neither a GPU nor data; `tune` tries; `bench` measures how fast a recipe trains, and what changes when its
keys do.
"""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitrail import disk
from vitrail.cli.options import (
    Account,
    CpusPerRank,
    Given,
    Json,
    MachineName,
    Overrides,
    Partition,
    Plugins,
    TimeLimit,
    Trust,
    check_recipe,
    load_plugins,
)
from vitrail.cli.words import is_chief, note, print_found, print_rows, print_tree, refuse_options
from vitrail.errors import RunFailed, UserError

if TYPE_CHECKING:
    from vitrail.bench.runner import Sweep
    from vitrail.cost.cluster import Cluster
    from vitrail.cost.plan import Estimate
    from vitrail.recipe import Recipe

STOPPED = 75  # exit code: what is done is kept, and the same call goes on


def add(app: typer.Typer) -> None:
    app.command(short_help="Tell what fits and how fast it goes, without a GPU.")(plan)
    app.command(short_help="Measure how fast a recipe trains, or a grid of its keys.")(bench)
    app.command(short_help="Find the largest batch that fits, by trying.")(tune)


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe or a run folder.", show_default=False)],
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known cluster, or the path of its file.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N", help="How many, or a range: 8..512. One node if left out.")
    ] = None,
    as_is: Annotated[bool, typer.Option("--as-is", help="Only the layout that the recipe names.")] = False,
    any_batch: Annotated[bool, typer.Option("--any-batch", help="Choose the samples of a rank, too.")] = False,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Layouts to show.")] = 10,
    price: Annotated[
        float | None, typer.Option(min=0, metavar="X", help="Of a GPU hour, instead of the cluster's.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the scaling curve of a range.")] = None,
    plugins: Plugins = None,
    as_json: Json = False,
) -> None:
    """Tell what fits and how fast it goes, without a GPU.

    \b
    vitrail plan configs/vit_fsdp_study/1b.yaml --cluster frontier --gpus 64
    vitrail plan configs/vit_fsdp_study/1b.yaml --cluster frontier --gpus 8..1024 --as-is
    vitrail plan configs/mae3d/2b.yaml model.channels=1 --cluster h200 --json
    vitrail plan configs/dummy/dit_7b.yaml --cluster here.yaml      a file of `vitrail doctor --calibrate`

    Layouts of the recipe on so many GPUs, the fastest that fits first: memory of a rank, seconds of a step, and what
    limits it. With a range the best of each number is shown: weak scaling where the batch is given per rank, strong
    where it is that of all. Data need not be there; what they would tell is asked for by key.
    """
    from vitrail.cost.cluster import list_clusters, load_cluster, read_gpus

    if cluster is None:
        raise UserError(f"--cluster is missing; choose one of {', '.join(list_clusters())}, or the path of a file")
    place = load_cluster(cluster)
    if price is not None and not math.isfinite(price):
        raise UserError(f"--price {price}: expected what a GPU hour costs, such as 2.5")
    place = place if price is None else replace(place, price=price)
    numbers = read_gpus(gpus or str(place.gpus_per_node), place)
    if plot is not None:
        _check_plot(plot, numbers)

    load_plugins(plugins)
    check_recipe(recipe, overrides)
    from vitrail.cost.plan import settle  # imports torch: what is wrong above is told at once
    from vitrail.recipe.load import find_recipe

    # About what checkpointing under torch.compile must not hold: blocks are known, and a plan is to be read.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    ready = settle(find_recipe(recipe, overrides or ()), place)
    options = {"as_is": as_is, "any_batch": any_batch}
    answer = _curve if len(numbers) > 1 else _one
    answer(ready, place, numbers, as_json=as_json, top=top, plot=plot, **options)


def _check_plot(path: Path, numbers: list[int]) -> None:
    """Refuse what cannot be drawn, before anything is searched."""
    if len(numbers) == 1:
        raise UserError(f"--plot {path}: a curve needs a range of GPUs, such as --gpus 8..512")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: expected a file that ends with .png, .svg or .pdf")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}; make it first")
    disk.check_output(path)


def _one(
    recipe: Recipe, cluster: Cluster, numbers: list[int], *, as_json: bool, top: int, plot: Path | None, **options: bool
) -> None:
    """Print the layouts for one number of GPUs."""
    from vitrail.cost import page
    from vitrail.cost.search import layouts as layouts_of
    from vitrail.cost.search import nearest

    gpus = numbers[0]
    layouts = layouts_of(recipe, cluster, gpus, top=top, **options)
    near = None if layouts[0].fits else nearest(recipe, cluster, gpus)
    note = "" if layouts[0].fits else page.advice(near, cluster, gpus)
    if as_json:
        _print_json(recipe, cluster, layouts, nearest=near and near.as_json(), note=note)
        return
    lines = [*page.heading(recipe.run.name, cluster, numbers, _parameters(recipe)), "", *page.table(layouts)]
    if len(layouts) == top and not options["as_is"]:
        lines.append(f"there may be more: --top {2 * top}")
    lines += ["", *(["the first:"] if len(layouts) > 1 else []), *page.parts(layouts[0], cluster)]
    if layouts[0].changes and layouts[0].fits:
        lines.append(f"to train so: {shlex.join(layouts[0].changes)}")
    print("\n".join([*lines, *filter(None, [note])]))


def _curve(
    recipe: Recipe, cluster: Cluster, numbers: list[int], *, as_json: bool, top: int, plot: Path | None, **options: bool
) -> None:
    """Print the best layout for each number of GPUs."""
    from vitrail.cost import page
    from vitrail.cost.search import layouts as layouts_of

    layouts, left_out = [], []
    for gpus in numbers:
        try:
            layouts.append(layouts_of(recipe, cluster, gpus, top=1, **options)[0])
        except UserError as error:
            left_out.append((gpus, error))
    if not layouts:
        raise left_out[0][1]
    scaling = "weak" if isinstance(recipe.data.batch, str) else "strong"
    notes = [f"{gpus} GPUs are left out: {error}" for gpus, error in left_out]
    if plot is not None:
        page.draw(layouts, plot, f"{recipe.run.name} on {cluster.name}, {scaling} scaling")
    if as_json:
        shares = page.efficiencies(layouts)
        _print_json(recipe, cluster, layouts, scaling=scaling, efficiency=shares, note="\n".join(notes))
        return
    lines = [*page.heading(recipe.run.name, cluster, numbers, _parameters(recipe)), "", *page.curve(layouts, scaling)]
    print("\n".join([*lines, *notes, *([f"drawn in {plot}"] if plot else [])]))


def _print_json(recipe: Recipe, cluster: Cluster, layouts: list[Estimate], **more: Any) -> None:
    import json

    head = {
        "recipe": recipe.run.name,
        "cluster": cluster.name,
        "source": cluster.source,
        "parameters": _parameters(recipe),
        "currency": cluster.currency if cluster.price is not None else None,
    }
    print(json.dumps({**head, "layouts": [one.as_json() for one in layouts], **more}, indent=2, allow_nan=False))


def _parameters(recipe: Recipe) -> int:
    from vitrail.cost.plan import num_parameters

    return num_parameters(recipe)


def tune(
    recipe: Given,
    overrides: Overrides = None,
    multiple: Annotated[int, typer.Option(metavar="M", min=1, help="Try multiples of this many samples.")] = 1,
    most: Annotated[int | None, typer.Option(metavar="N", min=1, help="Try at most so many samples a rank.")] = None,
    head_room: Annotated[float, typer.Option(metavar="SHARE", help="Of a device's memory that stays free.")] = 0.05,
    layouts: Annotated[bool, typer.Option("--layouts", help="Try the layouts that the planner ranks first.")] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME_OR_FILE", help="What the planner takes the devices for.")
    ] = None,
    trial_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Longest trial, start included.")] = 900.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The recipe that is written; else RECIPE-tuned.yaml here.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Find the largest batch of a rank that fits, and write a recipe with it.

    \b
    vitrail tune configs/dummy/dit_0.5b.yaml
    vitrail tune configs/dummy/dit_0.5b.yaml --multiple 8 --head-room 0.1 --out largest.yaml
    torchrun --nproc-per-node 4 -m vitrail tune configs/dummy/dit_0.5b.yaml parallel.recompute=full --json
    srun --ntasks 4 vitrail tune ...              or mpirun -n 4: on the ranks that will train

    Each size is tried once, by 3 steps of the real trainer in processes of their own. To run out of memory on any rank,
    to make the allocator free its cache, or to leave too little head-room is a failure of that size on all ranks. A
    batch that is given per rank grows; a global one stays as it is, in fewer and larger passes (data.micro_batch).
    """
    from vitrail.launch.world import tried_once

    with tried_once():
        load_plugins(plugin)
        check_recipe(recipe, overrides)
        from vitrail.bench.tune import tune as run_tune

        found = run_tune(
            recipe,
            overrides=overrides or (),
            out=out,
            multiple=multiple,
            most=most,
            head_room=head_room,
            limit=trial_limit,
            cluster=cluster,
            layouts=layouts,
            plugins=plugin or (),
            trust=trust,
            tell=note if is_chief() else lambda line: None,
        )
    if is_chief():
        if not as_json:
            note(found["proof"])
        print_found(found, found["recipe"], as_json)


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
    machine: MachineName = None,
    time: TimeLimit = None,
    account: Account = None,
    partition: Partition = None,
    cpus_per_rank: CpusPerRank = None,
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
    load_plugins(plugin)
    if not sweep:  # whose values may be what the recipe lacks
        check_recipe(recipe, overrides)
    from vitrail.bench import check_mode
    from vitrail.launch.world import find_world

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
    of_jobs = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    limits = {"--limit": limit, "--minutes": minutes}
    if find_world().size > 1:
        started: dict[str, Any] = {"--sweep": sweep, "--out": out, "--jobs": jobs, "--start-with": start_with}
        started |= {"a second --mode": modes[1:], "--ranks": ranks, "--nodes": nodes, **limits, **of_jobs}
        for option, value in (started | {"--again": again, "--no-skip": no_skip}).items():
            if value:
                raise UserError(
                    f"{option}: processes that a launcher has started measure one recipe in one mode; leave it out, or "
                    "call vitrail bench once, without a launcher, and let --ranks or --jobs start the processes"
                )
        _measure_here(recipe, overrides or [], mode=modes[0], as_json=as_json, **asked)
        return
    axes = list(sweep or [])
    if len(modes) > 1:
        if any(axis.partition("=")[0].strip() == "mode" for axis in axes):
            raise UserError("--mode: several are given, and --sweep mode is, too; leave one of them out")
        axes.append(f"mode={','.join(modes)}")
    if jobs is None:
        refuse_options(of_jobs, "no jobs are written", "--jobs")
    else:
        from vitrail.launch.jobs import GENERIC, load_machine

        refuse_options(limits, "job scripts are written, whose limit is --time", "cells that run at once")
        settings["machine"] = machine or GENERIC
        ranks = ranks or load_machine(settings["machine"]).ranks_per_node

    from vitrail.bench.runner import LIMIT, Options, plan_sweep
    from vitrail.recipe import seconds_of

    try:
        most = LIMIT if limit is None else seconds_of(limit)
    except UserError as error:
        raise UserError(f"--limit: {error}") from None
    asked |= {"plugins": tuple(plugin or ()), "again": again, "skip": not no_skip, "start_with": start_with}
    options = Options(**asked, limit=most, most_seconds=None if minutes is None else 60 * minutes)
    if jobs is None and start_with is None:
        swept = any("nodes" in axis.partition("=")[0].split(",") for axis in axes)
        for option, value in {"--nodes": (nodes or 1) > 1, "--sweep nodes": swept}.items():
            if value:
                raise UserError(
                    f"{option}: other nodes are reached by jobs (--jobs slurm), or inside of one by "
                    '--start-with "srun --nodes={nodes} --ntasks={world}"'
                )
    if jobs is not None and start_with is not None:
        raise UserError("--start-with: job scripts say themselves how ranks are started; leave it or --jobs out")
    kept = bool(sweep or out or jobs)
    grid: dict[str, Any] = {"sweep": axes, "mode": modes[0], "ranks": ranks or 1, "nodes": nodes or 1, "kept": kept}
    with disk.scratch("vitrail-bench-") as nowhere:
        grid["out"] = out if kept else nowhere
        planned = plan_sweep(recipe, overrides or [], options=options, tell=note, **grid)
        if jobs is None:
            _run(planned, alone=not axes, as_json=as_json)
        else:
            _write_jobs(planned, jobs, settings)


def _measure_here(recipe: str, overrides: list[str], *, as_json: bool, **asked: Any) -> None:
    """Measure on the ranks that a launcher has started."""
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


def _write_jobs(planned: Sweep, launcher: Any, settings: dict[str, Any]) -> None:
    from vitrail.bench.sweep import write_jobs

    scripts = write_jobs(planned, launcher, **settings)
    done, cells = len(planned.cells) - len(scripts) - len(planned.begun), len(planned.cells)
    every = f", all in {planned.folder}" if done == cells else ""
    note(f"{done} of {cells} cells have a result{planned.already}{every}")
    for script in scripts:
        print(script)


def _run(planned: Sweep, *, alone: bool, as_json: bool) -> None:
    """Measure cells in processes of their own."""
    from vitrail.bench.runner import Stopped

    try:
        results = planned.run()
    except Stopped as stop:
        where = f"finished cells are kept in {planned.folder}, and the same call goes on from there"
        note(f"{stop}; {where if planned.kept else 'nothing is kept'}")
        raise typer.Exit(STOPPED) from None
    if not results:
        raise RunFailed("no cell has a result: jobs have begun them; wait for these, or call with --again")
    first, logs = results[0], planned.folder / "logs"
    failed = alone and first["status"] != "ok"
    if as_json or not failed:
        _show(results, as_json, planned.folder if planned.kept else None)
    if failed:
        if first.get("wrong_input"):
            raise UserError(first["error"])
        _show_logs(logs)
        raise RunFailed(f"{'out of memory' if first['status'] == 'oom' else first['status']}: {first['error']}")
    if not alone and all(result["status"] == "failed" for result in results):
        if not planned.kept:
            _show_logs(logs)
        raise RunFailed("nothing was measured: every cell failed" + (f"; see {logs}" if planned.kept else ""))


def _show_logs(logs: Path) -> None:
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]:
            note(line)


def _show(results: list[dict[str, Any]], as_json: bool, folder: Path | None) -> None:
    from vitrail.bench.runner import row, tree
    from vitrail.report.modes import explain

    beside_mode = {str({key: value for key, value in one["keys"].items() if key != "mode"}) for one in results}
    sentence = explain(results) if len(beside_mode) == 1 else ""
    if as_json:
        found = {"folder": None if folder is None else str(folder), "summary": sentence, "results": results}
        print_tree(found, as_json)
        return
    if len(results) == 1:
        print_tree(tree(results[0]), as_json)
    elif results:
        several = len({result["mode"] for result in results}) > 1
        print_rows([row(_with_mode(result) if several else result) for result in results], as_json)
    for line in filter(None, (sentence, folder)):
        print(f"\n{line}")


def _with_mode(result: dict[str, Any]) -> dict[str, Any]:
    """Name a result by its mode, too, which was not swept when it was measured."""
    told = f"mode={result['mode']}"
    return result if told in result["name"].split(",") else result | {"name": f"{result['name']} ({told})"}
