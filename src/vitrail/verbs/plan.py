"""`vitrail plan`: will it fit, how fast will it go, and which layout is best; without a GPU and without data."""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.disk import check_output
from vitrail.errors import UserError
from vitrail.verbs.words import Json, Overrides, Plugins, load_plugins

if TYPE_CHECKING:
    from vitrail.cost.cluster import Cluster
    from vitrail.cost.plan import Estimate
    from vitrail.recipe import Recipe


def add(app: typer.Typer) -> None:
    app.command(short_help="Tell what fits and how fast it goes, without a GPU.")(plan)


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
    from vitrail.cost.cluster import list_clusters, load_cluster
    from vitrail.cost.gpus import read_gpus

    if cluster is None:
        raise UserError(f"--cluster is missing; choose one of {', '.join(list_clusters())}, or the path of a file")
    place = load_cluster(cluster)
    if price is not None and not math.isfinite(price):
        raise UserError(f"--price {price}: expected what a GPU hour costs, such as 2.5")
    place = place if price is None else replace(place, price=price)
    numbers = read_gpus(gpus or str(place.gpus_per_node), place)
    if plot is not None:
        _check_plot(plot, numbers)

    from vitrail.cost.plan import settle  # imports torch: what is wrong above is told at once
    from vitrail.recipe.find import find_recipe

    load_plugins(plugins)
    # About what checkpointing under torch.compile must not hold: blocks are known, and a plan is to be read.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    ready = settle(find_recipe(recipe, overrides or ()), place)
    options = {"as_is": as_is, "any_batch": any_batch}
    answer = _curve if len(numbers) > 1 else _one
    answer(ready, place, numbers, as_json=as_json, top=top, plot=plot, **options)


def _check_plot(path: Path, numbers: list[int]) -> None:
    """Before anything is searched."""
    if len(numbers) == 1:
        raise UserError(f"--plot {path}: a curve needs a range of GPUs, such as --gpus 8..512")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: expected a file that ends with .png, .svg or .pdf")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}; make it first")
    check_output(path)


def _one(
    recipe: Recipe, cluster: Cluster, numbers: list[int], *, as_json: bool, top: int, plot: Path | None, **options: bool
) -> None:
    """Layouts for one number of GPUs."""
    from vitrail.cost import plan_page as page
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
    """The best layout for each number of GPUs."""
    from vitrail.cost import plan_page as page
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
