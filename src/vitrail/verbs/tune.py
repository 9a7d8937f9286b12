"""`vitrail tune`: the largest batch that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitrail.verbs.words import Json, Overrides, Plugins, Trust, is_chief, load_plugins, note, print_tree


def add(app: typer.Typer) -> None:
    app.command(short_help="Find the largest batch that fits, by trying.")(tune)


def tune(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder.")],
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
    from vitrail.bench.tune import tune as run_tune
    from vitrail.launch.world import tried_once

    with tried_once():
        load_plugins(plugin)
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
    if not is_chief():
        return
    if as_json:
        print_tree(found, as_json)
        return
    note(found["proof"])
    print(found["recipe"])
