"""`vitrail train`, `eval` and `sample`: make a model, score it, and have it make samples."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitrail.cli.options import (
    Json,
    Kept,
    Overrides,
    Plugins,
    Quiet,
    Run,
    Step,
    ToContinue,
    Trust,
    check_recipe,
    check_run,
    load_plugins,
)
from vitrail.cli.words import (
    is_chief,
    note,
    print_found,
    print_rows,
    print_tree,
    read_numbers,
    read_pair,
    refuse_options,
)


def add(app: typer.Typer) -> None:
    app.command()(train)
    app.command("eval", short_help="Score a checkpoint on held-out data, or samples against real data.")(evaluate)
    app.command(short_help="Write samples of a trained diffusion model.")(sample)


def train(
    recipe: ToContinue,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start beside an earlier run, never over it.")] = False,
    other_data: Annotated[
        bool, typer.Option("--other-data", help="Continue although the data are not those that the run began with.")
    ] = False,
    change: Annotated[
        bool, typer.Option("--change", help="Continue with changes that alter what the run learns from here on.")
    ] = False,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Train as a recipe says, or continue a run.

    \b
    vitrail train configs/demo/mae3d.yaml
    vitrail train configs/demo/mae3d.yaml run.steps=100 optimizer.lr=1e-3 --fresh
    vitrail train runs/demo-mae3d                 continue, or lengthen with run.steps=2000
    vitrail train runs/demo-mae3d optimizer.lr=1e-4 --change
    torchrun --nproc-per-node 4 -m vitrail train configs/demo/mae3d.yaml
    srun --ntasks 4 vitrail train ...             or mpirun -n 4; vitrail launch writes job scripts for all three

    Output goes to run.dir, which is runs/<run.name> unless the recipe says otherwise: the recipe, metrics.jsonl,
    checkpoints, pictures and report.html, whose path is printed at the end (with log.report=false that of the folder).
    Where that folder holds checkpoints of the same recipe, the run goes on from the newest good one.
    """
    from vitrail.launch.world import end_for_good, tried_once
    from vitrail.training.failures import ready_to_stop

    with ready_to_stop(), tried_once():
        load_plugins(plugin)
        check_recipe(recipe, overrides)
        from vitrail.training.run import train as run_training

        options = {"fresh": fresh, "quiet": quiet, "trust": trust, "other_data": other_data, "change": change}
        outcome = run_training(recipe, overrides=overrides or (), **options)
        if outcome.code:
            end_for_good(outcome.code)
    if is_chief():
        if outcome.code:
            note(f"stopped at step {outcome.step} ({outcome.reason}); continue with: vitrail train {outcome.run_dir}")
        with contextlib.suppress(BrokenPipeError):  # what counts is how the training ended
            print(outcome.page, flush=True)
    raise typer.Exit(outcome.code)


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FILES", help="A run folder, a folder of samples, or what was predicted.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Step = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Held-out samples; eval.samples if not given.")
    ] = None,
    weights: Kept = None,
    classifier: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Samples: a run whose network looks at them.")
    ] = None,
    real: Annotated[
        str | None, typer.Option(metavar="PATH_OR_RECIPE", help="Samples: what to compare with; else their run's data.")
    ] = None,
    knn: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Features: labelled data whose classes neighbours tell.")
    ] = None,
    neighbours: Annotated[int | None, typer.Option(metavar="K", min=1, help="Features: that vote; else 20.")] = None,
    number: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples, or items of each part with --knn; else all.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Which of these are taken; else 0.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Samples: write a page, too.")] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="PATH", help="Files: what was predicted is scored against these labels.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Files: a key of the labels' entry.")
    ] = None,
    border: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Files: that separates objects, for their Rand F-score.")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(metavar="AXIS", help="Files: objects are those of each slice across it.")
    ] = None,
    names: Annotated[
        str | None, typer.Option(metavar="A,B", help="Files: of the classes, 0 first; else those of the channels.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint on its held-out data (data.valid), its features, samples, or a prediction against labels.

    \b
    vitrail eval runs/demo-mae3d
    vitrail eval runs/demo-mae3d --checkpoint 1300 --samples 256 --weights raw --json
    vitrail eval runs/digits-dit/samples/step-2000 --classifier runs/digits-vit
    vitrail eval runs/digits-vit --knn configs/digits/vit.yaml --neighbours 10
    vitrail eval SAMPLES --classifier runs/digits-vit --real data/digits/valid --number 200 --page quality.html
    vitrail eval classes.tif --labels label.tif --set 'label_map={255: 1}' --border 0 --slices z

    The held-out samples and their masks are always the same, so scores can be compared. They are printed; nothing is
    written. Of a folder that `vitrail sample` has written: how far its samples are from real data (Fréchet distance,
    KID, precision and recall in the features of the classifier's network, sliced Wasserstein, FID where torch-fidelity
    and its weights are there) beside the same for real data, and how many of them the classifier recognises. With
    --knn: how often the nearest training items of a recipe, by the run's frozen features, tell a held-out item's class.
    With --labels: what `vitrail predict` or another program wrote, and with --border also how well its objects agree.
    """
    load_plugins(plugin)
    of_files = {"--set": settings, "--border": border, "--slices": slices, "--names": names}
    if labels is not None:
        of_others: dict[str, Any] = {"--checkpoint": checkpoint, "--samples": samples, "--weights": weights}
        of_others |= {"--knn": knn, "--neighbours": neighbours, "--classifier": classifier, "--real": real}
        of_others |= {"--page": page, "--number": number, "--seed": seed, "KEY=VALUE": overrides}
        refuse_options(of_others, "--labels scores what lies in a file", "runs and samples")
        if is_chief():
            from vitrail.infer.compare import compare

            classes = [name.strip() for name in names.split(",")] if names else []
            found = compare(str(run), labels, settings=settings or (), border=border, slices=slices, names=classes)
            print_tree(found, as_json)
        return
    refuse_options(of_files, "there is no --labels PATH", "what was predicted, in a file")
    check_run(run, overrides)
    if knn is not None:
        check_recipe(knn)
    from vitrail.infer.quality import is_samples, quality
    from vitrail.training.run import evaluate as run_evaluation

    of_run = {"--checkpoint": checkpoint, "--samples": samples, "--weights": weights, "KEY=VALUE": overrides}
    of_samples: dict[str, Any] = {"--classifier": classifier, "--real": real, "--page": page}
    if knn is not None:
        refuse_options({"--samples": samples, "KEY=VALUE": overrides}, "--knn measures features", "held-out scores")
        refuse_options(of_samples, "--knn measures features", "folders that `vitrail sample` has written")
        if is_chief():
            from vitrail.infer.neighbours import knn as measure_knn

            options: dict[str, Any] = {
                "number": number,
                "checkpoint": checkpoint,
                "weights": weights,
                "seed": seed or 0,
            }
            print_tree(measure_knn(run, knn, neighbours=neighbours or 20, quiet=as_json, **options), as_json)
        return
    refuse_options({"--neighbours": neighbours}, "there is no --knn RECIPE", "features")
    of_samples |= {"--number": number, "--seed": seed}
    if is_samples(run):
        refuse_options(of_run, f"{run} is a folder of samples", "runs")
        if not is_chief():
            return
        from vitrail.disk import check_output
        from vitrail.infer.quality import table, write_page

        if page is not None:
            check_output(page)  # before the work
        found = quality(run, real=real, classifier=classifier, number=number, seed=seed or 0, quiet=as_json)
        if page is not None:
            write_page(found, page)
        if as_json:
            print_tree(found, as_json)
            return
        print(f"compared with {found['real']}\n")
        print_rows(table(found), as_json)
        for line in found["notes"]:
            note(f"note: {line}")
        return
    refuse_options(of_samples, f"{run} has no manifest.json of samples", "folders that `vitrail sample` has written")
    scores = run_evaluation(run, checkpoint=checkpoint, samples=samples, weights=weights, overrides=overrides or ())
    if is_chief():
        print_tree(scores if as_json else with_intervals(scores), as_json)


def with_intervals(scores: dict[str, Any]) -> dict[str, Any]:
    """Return scores to be read: the interval of each metric beside it, and what these are over."""
    sure = scores.get("intervals")
    if sure is None:
        return scores
    from vitrail.report.units import plain

    shown: dict[str, Any] = {name: value for name, value in scores.items() if name != "intervals"}
    shown["metrics"] = {
        name: f"{plain(value, 6)} ({' to '.join(plain(end, 4) for end in sure['metrics'][name])})"
        if name in sure["metrics"]
        else value
        for name, value in scores["metrics"].items()
    }
    return shown | {"intervals": f"of {100 * sure['level']:.0f} %, over {sure['over']} (bootstrap)"}


def sample(
    run: Run,
    overrides: Overrides = None,
    classes: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names or numbers of classes, which take turns; or all.")
    ] = None,
    number: Annotated[int, typer.Option(metavar="N", min=1, help="Samples in all.")] = 64,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps from noise to data; else the recipe's.")] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, ancestral, ddim, euler or heun; else the recipe's.")
    ] = None,
    guidance: Annotated[
        str | None,
        typer.Option(metavar="G", help="1: as trained, above: more like its class, 0: of any; or several: 1,2,4."),
    ] = None,
    interval: Annotated[
        str | None, typer.Option(metavar="A,B", help="Guide on this part of the way from noise (0) to data (1).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Another seed gives other samples; else run.seed.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples computed at once; as before in DIR, or up to 16.")
    ] = None,
    weights: Kept = None,
    checkpoint: Step = None,
    format: Annotated[
        Literal["auto", "png", "tiff", "ome-zarr", "npy"], typer.Option(help="Of the files; auto suits the data.")
    ] = "auto",
    latents: Annotated[bool, typer.Option("--latents", help="Write latents as they are, undecoded.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where they go; else a folder in RUN/samples.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write samples of a run that was trained with objective `flow` or `denoise`: images or volumes, like its data.

    \b
    vitrail sample runs/digits-dit
    vitrail sample runs/digits-dit --classes 3,7 --number 100 --guidance 2 --out threes-and-sevens
    vitrail sample runs/digits-dit --number 10 --guidance 1,2,4   the same samples by each, and grid.png, a row each
    vitrail sample runs/digits-dit --sampler heun --steps 20 --seed 1 --checkpoint 1000 --json
    torchrun --nproc-per-node 4 -m vitrail sample runs/digits-dit --number 10000 --batch 250

    The folder, whose path is printed, has samples/ with a folder of files for each class, which is a dataset that can
    be trained on, grid.png and manifest.json. The same call makes the same samples on any number of ranks; after a kill
    it makes those that are missing, and with a larger --number those that are new. Models that make one thing from
    another take held-out data, written beside.
    """
    load_plugins(plugin)
    check_run(run, overrides)
    from vitrail.infer.sample import sample_run

    made = sample_run(
        run,
        checkpoint=checkpoint,
        out=out,
        trust=trust,
        overrides=overrides or (),
        quiet=quiet,
        number=number,
        classes=classes,
        steps=steps,
        sampler=sampler,
        guidance=None if guidance is None else read_numbers(guidance, "--guidance"),
        interval=None if interval is None else read_pair(interval, "--interval"),
        seed=seed,
        batch=batch,
        weights=weights,
        format=format,
        latents=latents,
    )
    if not is_chief():
        return
    for line in made["notes"]:
        note(f"note: {line}")
    print_found(made, made.get("out"), as_json)
