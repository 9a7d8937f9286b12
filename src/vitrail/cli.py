"""The verbs of the command line: arguments in, one call, results out. Nothing heavy is imported before it is needed.

Results go to standard output, so that they can be piped; progress, notes and errors go to standard error.
Exit codes: 0 done, 1 failed after the first step, 2 wrong input or environment, 75 stopped and ready to be continued.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

import vitrail
from vitrail.credentials import clash, hide_in
from vitrail.errors import RunFailed, UserError, is_out_of_memory
from vitrail.verbs import bench, plan, streams, tune
from vitrail.verbs.words import (
    Json,
    Overrides,
    Plugins,
    Run,
    Trust,
    is_chief,
    load_plugins,
    note,
    print_rows,
    print_tree,
    read_pair,
    read_sizes,
    refuse_options,
    tell,
)

INTERRUPTED = 130  # by the keyboard, twice in a training


class Verbs(TyperGroup):
    """Turns what a verb raises into a sentence and an exit code; a traceback is left for bugs alone."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where a pipe that was closed can still be handled
            return result
        except (typer.Exit, typer.Abort):  # which are RuntimeErrors
            raise
        except UserError as error:
            tell(str(error))
            raise typer.Exit(1 if isinstance(error, RunFailed) else 2) from error
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] == "vitrail":
                raise
            from vitrail.recipe.kinds import remedy

            tell(f"{error.name} is not installed; {remedy(error.name)}")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except (MemoryError, RuntimeError) as error:  # what devices and libraries raise is a RuntimeError
            if not is_out_of_memory(error):
                raise
            tell_out_of_memory(error)
            raise typer.Exit(1) from error
        except BrokenPipeError as error:
            streams.send_nowhere(sys.stdout)
            raise typer.Exit(1) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            tell(f"{str(error.filename)[:40]!r}...: no disk takes a path that long; give a shorter one")
            raise typer.Exit(2) from error


def tell_out_of_memory(error: BaseException) -> None:
    from vitrail.launch.world import find_world
    from vitrail.training.failures import summary

    world = find_world()
    tell(
        f"{f'rank {world.rank}: ' if world.size > 1 else ''}memory ran out ({summary(error)[:300]}); make data.batch, "
        "data.micro_batch, data.crop or the model smaller, or see docs/memory.md for what saves memory"
    )


_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,  # plain help: three times as fast, and its examples can be copied
    "pretty_exceptions_enable": False,
    "add_completion": False,
}
app = typer.Typer(cls=Verbs, **_SETTINGS)
data = typer.Typer(**_SETTINGS)
app.add_typer(data, name="data", help="Make a volume to try things on, or look at your own.")


def console() -> None:
    """The entry of the process."""
    streams.settle()
    try:
        main()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # Past the interpreter's own end: threads of readers and kernels that still run may abort the process there.
            streams.leave()
            os._exit(INTERRUPTED)
        raise
    finally:
        streams.leave()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb; raises SystemExit."""
    given = sys.argv[1:] if arguments is None else arguments
    if (why := clash(given)) is not None:
        tell(why)
        raise SystemExit(2)
    words = [hide_in(word) for word in given]
    if arguments is None:
        sys.argv[1:] = words
    app(args=words, prog_name="vitrail")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"vitrail {vitrail.__version__}")
        raise typer.Exit


@app.callback()
def vitrail_(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train vision transformers on scientific images and volumes.

    \b
    vitrail data generate data/em.zarr            make a volume to try things on
    vitrail train configs/demo/mae3d.yaml         train; prints the path of a report
    vitrail VERB --help                           what a verb does, with an example

    Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 failed after the first
    step, 2 wrong input or environment, 75 stopped by a signal or the time limit and ready to be continued.
    """


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder to continue.")],
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start beside an earlier run, never over it.")] = False,
    other_data: Annotated[
        bool, typer.Option("--other-data", help="Continue although the data are not those that the run began with.")
    ] = False,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Train as a recipe says, or continue a run.

    \b
    vitrail train configs/demo/mae3d.yaml
    vitrail train configs/demo/mae3d.yaml run.steps=100 optimizer.lr=1e-3 --fresh
    vitrail train runs/demo-mae3d                 continue, or lengthen with run.steps=2000
    torchrun --nproc-per-node 4 -m vitrail train configs/demo/mae3d.yaml
    srun --ntasks 4 vitrail train ...             or mpirun -n 4; vitrail launch writes job scripts for all three

    Output goes to run.dir, which is runs/<run.name> unless the recipe says otherwise: the recipe, metrics.jsonl,
    checkpoints, pictures and report.html, whose path is printed at the end (with log.report=false that of the folder).
    Where that folder holds checkpoints of the same recipe, the run goes on from the newest good one.
    """
    from vitrail.launch.world import end_for_good, tried_once
    from vitrail.training.guards import ready_to_stop

    with ready_to_stop(), tried_once():
        from vitrail.training.run import train as run_training

        load_plugins(plugin)
        options = {"fresh": fresh, "quiet": quiet, "trust": trust, "other_data": other_data}
        outcome = run_training(recipe, overrides=overrides or (), **options)
        if outcome.code:
            end_for_good(outcome.code)
    if is_chief():
        if outcome.code:
            note(f"stopped at step {outcome.step} ({outcome.reason}); continue with: vitrail train {outcome.run_dir}")
        with contextlib.suppress(BrokenPipeError):  # what counts is how the training ended
            print(outcome.page, flush=True)
    raise typer.Exit(outcome.code)


@app.command("eval", short_help="Score a checkpoint on held-out data, or samples against real data.")
def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_OR_SAMPLES", help="A run folder, or a folder of samples.", show_default=False)
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Step of the checkpoint; the newest good one if not given."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Held-out samples; eval.samples if not given.")
    ] = None,
    weights: Annotated[
        Literal["ema", "raw"] | None, typer.Option(help="Averaged or raw weights; averaged where there are any.")
    ] = None,
    classifier: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Samples: a run whose network looks at them.")
    ] = None,
    real: Annotated[
        str | None, typer.Option(metavar="PATH_OR_RECIPE", help="Samples: what to compare with; else their run's data.")
    ] = None,
    number: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples: how many of them; else all.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Samples: which are compared; else 0.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Samples: write a page, too.")] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Score a checkpoint of a run on its held-out data (data.valid), or samples against real data.

    \b
    vitrail eval runs/demo-mae3d
    vitrail eval runs/demo-mae3d --checkpoint 1300 --samples 256 --weights raw --json
    vitrail eval runs/digits-dit/samples/step-2000 --classifier runs/digits-vit
    vitrail eval SAMPLES --classifier runs/digits-vit --real data/digits/valid --number 200 --page quality.html

    The held-out samples and their masks are always the same, so scores can be compared. They are printed; nothing is
    written. Of a folder that `vitrail sample` has written: how far its samples are from real data (Fréchet distance,
    KID, precision and recall in the features of the classifier's network, sliced Wasserstein, FID where torch-fidelity
    and its weights are there) beside the same for real data, and how many of them the classifier recognises.
    """
    from vitrail.infer.quality import is_samples, quality
    from vitrail.training.run import evaluate as run_evaluation

    load_plugins(plugin)
    of_run = {"--checkpoint": checkpoint, "--samples": samples, "--weights": weights, "KEY=VALUE": overrides}
    of_samples = {"--classifier": classifier, "--real": real, "--number": number, "--seed": seed, "--page": page}
    if is_samples(run):
        refuse_options(of_run, f"{run} is a folder of samples", "runs")
        if not is_chief():
            return
        from vitrail.disk import check_output
        from vitrail.infer.quality_report import table, write_page

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
        print_tree(scores, as_json)


@app.command(short_help="Write samples of a trained diffusion model.")
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
        float | None, typer.Option(metavar="G", help="1: as trained, above: more like its class, 0: of any class.")
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
    weights: Annotated[
        Literal["ema", "raw"] | None, typer.Option(help="Averaged or raw weights; averaged where there are any.")
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Step of the checkpoint; the newest good one if not given."),
    ] = None,
    format: Annotated[
        Literal["auto", "png", "tiff", "ome-zarr", "npy"], typer.Option(help="Of the files; auto suits the data.")
    ] = "auto",
    latents: Annotated[bool, typer.Option("--latents", help="Write latents as they are, undecoded.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where they go; else a folder in RUN/samples.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Write samples of a run that was trained with objective `flow` or `denoise`: images or volumes, like its data.

    \b
    vitrail sample runs/digits-dit
    vitrail sample runs/digits-dit --classes 3,7 --number 100 --guidance 2 --out threes-and-sevens
    vitrail sample runs/digits-dit --sampler heun --steps 20 --seed 1 --checkpoint 1000 --json
    torchrun --nproc-per-node 4 -m vitrail sample runs/digits-dit --number 10000 --batch 250

    The folder, whose path is printed, has samples/ with a folder of files for each class, which is a dataset that can
    be trained on, grid.png and manifest.json. The same call makes the same samples on any number of ranks; after a kill
    it makes those that are missing, and with a larger --number those that are new. Models that make one thing from
    another take held-out data, written beside.
    """
    from vitrail.infer.sample import sample_run

    load_plugins(plugin)
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
        guidance=guidance,
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
    if as_json:
        print_tree(made, as_json)
    else:
        print(made["out"])


@app.command(short_help="Write the page of a run or of a bench.")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or that of a bench.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON too.")] = False,
) -> None:
    """Write the page of a run, whatever state the run is in, or of a bench, and print its path.

    \b
    vitrail report runs/demo-mae3d
    vitrail report runs/demo-mae3d --json
    vitrail report runs/bench-demo-mae3d          what `vitrail bench --sweep` has measured so far

    The page is RUN/report.html: one file with curves, pictures, scores, speed and the recipe, which opens offline. That
    of a bench has plots of its cells, which are also in RUN/plots as PNG and SVG. With --json the facts are printed
    instead of the path, which is among them as "report".
    """
    from vitrail.report import bench_summary, is_bench, summary, write_bench_report, write_report

    page = write_bench_report(run) if is_bench(run) else write_report(run)
    if as_json:
        print_tree({"report": str(page), **(bench_summary(run) if is_bench(run) else summary(run))}, as_json)
    else:
        print(page)


@data.command(short_help="Generate data to try things on.")
def generate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the data go, for example data/em.zarr.")],
    kind: Annotated[
        Literal["em", "digits"], typer.Option(help="A volume of tissue, or the handwritten digits of scikit-learn.")
    ] = "em",
    shape: Annotated[str, typer.Option(metavar="Z,Y,X", help="Voxels along each axis.")] = "128,128,192",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another seed grows other tissue.")] = 0,
    levels: Annotated[
        int, typer.Option(metavar="N", min=1, help="Resolution levels, each half the size of the one before.")
    ] = 3,
    ome_version: Annotated[Literal["0.4", "0.5"], typer.Option(help="Version of OME-Zarr.")] = "0.5",
    chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Voxels along each side of a chunk.")] = 64,
    force: Annotated[bool, typer.Option("--force", help="Replace a volume at OUT that vitrail wrote.")] = False,
    as_json: Json = False,
) -> None:
    """Generate tissue that looks like volume electron microscopy, with labels, as OME-Zarr.

    \b
    vitrail data generate data/em.zarr
    vitrail data generate data/big.zarr --shape 256,512,512 --seed 1 --ome-version 0.4
    vitrail data generate data/digits --kind digits

    The volume is written to OUT (8 nm voxels; membranes, mitochondria and vesicles under labels/structures), and its
    path is printed. The same shape and seed give the same voxels. Digits are an image folder, train/ and valid/ with a
    folder for each class; the other options are of volumes.
    """
    if kind == "digits":
        from vitrail.data.generate_digits import write_digits

        if force:
            raise UserError("--force replaces volumes only; leave it out, and choose a path where nothing lies")
        written = write_digits(out)
        if as_json:
            print_tree({"path": str(written), "kind": kind}, as_json)
        else:
            print(written)
        return
    from vitrail.disk import check_free, told

    with told(out):
        check_free(out, force=force, tell=note)  # before the work
    sizes = read_sizes(shape)
    from vitrail.memory import memory_bytes

    if math.prod(sizes) > memory_bytes():  # of image and labels, a byte each; more while they are made
        raise UserError(f"--shape {shape}: a volume so large does not fit into the memory here; make it smaller")
    from vitrail.data.generate import generate_em, write_ome_zarr

    volume = generate_em(sizes, seed)
    write_ome_zarr(out, volume, levels=levels, version=ome_version, chunk=chunk, name="em", force=force, tell=note)
    made = {
        "path": str(out),
        "shape": list(sizes),
        "seed": seed,
        "levels": levels,
        "version": ome_version,
        "chunk": chunk,
    }
    if as_json:
        print_tree(made, as_json)
    else:
        print(out)


@data.command(short_help="Look at data before training on it.")
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file, folder or URL of data.")],
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Kind of source; guessed if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of the entry; repeatable.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="OUT.png", help="Also draw samples with a scale bar, labels and histograms.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Look at data before training on it: what it is, statistics of a few crops, what to beware of, what to write.

    \b
    vitrail data inspect data/em.zarr
    vitrail data inspect data/em.zarr --picture em.png --json
    vitrail data inspect scan.raw --kind numpy --set shape=[64,512,512] --set dtype=uint16

    The facts are printed, and last the `data` section of a recipe; the picture, if asked for, goes to OUT.png.
    """
    from vitrail.data.inspect import look, read_settings
    from vitrail.data.inspect import picture as draw
    from vitrail.report.files import check_picture

    load_plugins(plugin)
    if picture is not None:
        check_picture(picture)
    source, facts = look(path, kind=kind, settings=read_settings(settings or ()))
    if picture is not None:
        facts["picture"] = str(draw(source, picture, facts=facts))
    if as_json:
        print_tree(facts, as_json)
        return
    warnings, recipe = facts.pop("warnings"), facts.pop("recipe")
    print_tree({name: value for name, value in facts.items() if value not in ([], {}, None)}, as_json)
    notes = [f"note: {warning}" for warning in warnings]
    print("\n".join(["", *notes, *[""] * bool(notes), "in a recipe:", recipe]))


@data.command(short_help="Draw what the model of a recipe will see.")
def preview(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder.")],
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Samples, one a row.")] = 4,
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where the picture goes.")] = Path("preview.png"),
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Draw what the model will see: windows of the files, augmented, cut into tokens, and masked, a row a sample.

    \b
    vitrail data preview configs/demo/mae3d.yaml
    vitrail data preview configs/demo/mae3d.yaml data.augment.orientations=false --samples 8 --out seen.png

    These are samples of the first steps of a training with that recipe, with the draws of its seed. The path of the
    picture is printed; of volumes it shows the middle planes. Nothing else is written.
    """
    from vitrail.training.diagnose import preview as draw

    load_plugins(plugin)
    facts = draw(recipe, out, samples=samples, overrides=overrides or ())
    if as_json:
        print_tree(facts, as_json)
    else:
        print(facts["picture"])


@data.command("bench", short_help="Measure how fast data load, and whether training waits for them.")
def bench_data(
    what: Annotated[str, typer.Argument(metavar="RECIPE_OR_PATH", help="A recipe, a run folder, or data.")],
    overrides: Overrides = None,
    mode: Annotated[
        Literal["real", "syn", "io"] | None, typer.Option(help="Which to measure; all if not given.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds of each measurement.")] = 5.0,
    workers: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="Reading threads; repeatable, to compare.")
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Measure training on real data (real), on one batch again and again (syn), and loading alone (io).

    \b
    vitrail data bench configs/demo/mae3d.yaml
    vitrail data bench configs/demo/mae3d.yaml data.reuse=8 --mode io --workers 1 --workers 2
    vitrail data bench data/em.zarr --seconds 10   loading alone

    Shown are samples and bytes a second, voxels decoded for each that is used, where the threads' time goes, and the
    most memory; and in one sentence what limits the training. Warm-up is left out. Nothing is written.
    """
    from vitrail.training.diagnose import bench as measure

    load_plugins(plugin)
    modes = [mode] if mode else ()
    found = measure(what, modes=modes, seconds=seconds, workers=workers or (), overrides=overrides or ())
    if not is_chief():
        return
    if as_json:
        print_tree(found, as_json)
        return
    for result in found["results"]:
        name = f"{result.pop('mode')} (workers {result.pop('workers')})"
        print_tree({name: result}, as_json)
    print(f"\n{found['summary']}")


@data.command(short_help="Encode data to latents, to train on these.")
def encode(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe with a codec, or the run of an autoencoder.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the latents go: DIR/train and DIR/valid.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "valid"] | None, typer.Option(help="Only these data; both if not given.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples encoded at once.")] = 32,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of a shard, which is written whole.")] = 1024,
    store: Annotated[Literal["safetensors", "zarr"], typer.Option(help="Format of the latents.")] = "safetensors",
    trust: Trust = False,
    plugin: Plugins = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: Json = False,
) -> None:
    """Encode the data of a recipe with its codec, so that a model can be trained on the latents.

    \b
    vitrail data encode runs/digits-autoencoder --out data/digits-latents
    vitrail data encode RECIPE --out data/latents --batch 64 --split train
    vitrail data encode RECIPE 'codec={kind: torchscript, hub: nvidia/Cosmos-Tokenizer-CI8x8}' --out DIR --trust
    torchrun --nproc-per-node 4 -m vitrail data encode RECIPE --out data/latents

    Every item comes once, in order and unaugmented; of items that are larger than data.crop, every tile. The folders
    hold the latents, the classes, exact statistics and what encoded them. Ranks share the work; after a kill, the same
    call goes on. The facts are printed.
    """
    from vitrail.infer.encode import encode as run_encoding

    load_plugins(plugin)
    made = run_encoding(
        recipe,
        out,
        split=split,
        batch=batch,
        rows=rows,
        store=store,
        trust=trust,
        overrides=overrides or (),
        quiet=quiet,
    )
    if is_chief():
        print_tree(made, as_json)


@data.command(short_help="Show how data are shared out over ranks.")
def balance(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder.")],
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Data-parallel ranks; those of data.balance, or 1.", show_default=False),
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show how the training data of a recipe are shared out over ranks, and that no sample is lost or doubled.

    \b
    vitrail data balance configs/demo/mae3d.yaml --ranks 4
    vitrail data balance configs/demo/mae3d.yaml data.tiles={} --ranks 4 --json

    Two ways are compared: ranks that read one entry each (`data.balance`), and mixing by the global counter, which is
    what training does otherwise. An epoch is gone through for all ranks. Nothing is written.
    """
    from vitrail.data.balance_report import compare, rows
    from vitrail.training.run import find_recipe

    load_plugins(plugin)
    found = compare(find_recipe(recipe, overrides or ()), ranks)
    if as_json:
        print_tree(found, as_json)
        return
    print_rows(rows(found), as_json)
    print()
    print_tree({name: found[name] for name in ("by_rank", "by_counter")}, as_json)


@app.command(short_help="List the models and their sizes, or describe one.")
def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A model such as vit, or one size: vit:B/16.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List every model and named size: parameters, FLOPs of one sample's forward, and where it comes from.

    \b
    vitrail models
    vitrail models unetr                          what it is, its sizes, and the keys of its config
    vitrail models dit:XL/2 --json

    A multiply-add counts as 2 FLOPs. Nothing is downloaded, and no memory is taken for parameters.
    """
    from vitrail.models import catalog

    if name is None:
        rows = [catalog.measure(entry) for entry in catalog.entries()]
        print_rows(rows, as_json)
        return
    found = catalog.describe(name)
    if as_json:
        print_rows([row | {"about": found["about"], "keys": found["keys"]} for row in found["sizes"]], as_json)
        return
    print(f"{found['model']}: {found['about']}\n")
    print_rows(found["sizes"], as_json)
    print("\nkeys of `model` in a recipe, and their defaults:")
    for key, default in found["keys"].items():
        print(f"  {key}: {default}")


@app.command(short_help="Try what training needs on this machine.")
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine instead, for `vitrail plan --cluster FILE`.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --calibrate: the cluster file; else cluster.yaml here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --calibrate: fewer measurements.")] = False,
    as_json: Json = False,
) -> None:
    """Try what training needs on this machine: versions, devices, attention, process groups, disk, zarr.

    \b
    vitrail doctor
    vitrail doctor --json > doctor.json           to send along with a question
    vitrail doctor --calibrate --out here.yaml    how fast products, attention, copies and collectives are here
    torchrun --nproc-per-node 8 -m vitrail doctor --calibrate

    Each check says ok, warn or fail, and what to do. Exits with 2 if one fails. Nothing is left behind but the cluster
    file of --calibrate.
    """
    if calibrate:
        from vitrail.bench.calibrate import calibrate as measure
        from vitrail.bench.calibrate import table

        out = out or Path("cluster.yaml")
        cluster = measure(out, quick, note if is_chief() else lambda line: None)
        if is_chief():
            print_rows(table(cluster), as_json)
            note(f"written to {out}")
        return
    if out is not None or quick:
        given = "--quick" if out is None else "--out"
        raise UserError(f"{given}: checks write and measure nothing; add --calibrate, or leave {given} out")
    from vitrail.launch import machine

    checks = machine.doctor()
    if as_json:
        print_tree({"environment": machine.environment(), "checks": checks}, as_json)
    else:
        width = max(len(check["name"]) for check in checks)
        for check in checks:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[check["status"]]
            status = typer.style(f"{check['status']:4}", fg=colour)
            typer.echo(f"{status}  {check['name']:{width}}  {check['detail']}")
            if check["remedy"]:
                typer.echo(f"{'':{width + 8}}-> {check['remedy']}")
    raise typer.Exit(2 if any(check["status"] == "fail" for check in checks) else 0)


class Remembering(TyperCommand):
    """Keeps its words as they were typed, for the script that it writes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


@app.command(cls=Remembering, short_help="Write the job script that trains a recipe, and submit it.")
def launch(
    context: typer.Context,
    launcher: Annotated[Literal["torchrun", "slurm", "mpi"], typer.Argument(help="What starts the processes.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="A recipe file, or a run folder to continue.")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Nodes of the job.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node", "--gpus", metavar="N", min=1, help="Processes a node, one a GPU; else the machine's."
        ),
    ] = None,
    cpus_per_rank: Annotated[int | None, typer.Option(metavar="N", min=1, help="Cores of a process.")] = None,
    time: Annotated[str | None, typer.Option(metavar="CLOCK", help="Time limit: 02:00:00, 90m or 1d12h.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that nodes must have.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; run.name if not given.")] = None,
    machine: Annotated[
        str, typer.Option(metavar="NAME_OR_FILE", help="generic, dgx, frontier, gh200, or a YAML file of your own.")
    ] = "generic",
    container: Annotated[str | None, typer.Option(metavar="IMAGE", help="Train inside this container.")] = None,
    container_kind: Annotated[
        Literal["apptainer", "docker", "enroot"] | None, typer.Option(help="What runs it; guessed if not given.")
    ] = None,
    signal_seconds: Annotated[
        int | None, typer.Option(metavar="N", help="Slurm: save and stop so long before the time limit; 300.")
    ] = None,
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Slurm: queue a training that was stopped again, which is usual."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Starts after the first: of what failed (torchrun, 3) or stopped (Slurm, 50)."),
    ] = None,
    trust: Trust = False,
    plugin: Plugins = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Python there; else this one, or `python` in a container."),
    ] = None,
    env_setup: Annotated[
        list[str] | None, typer.Option(metavar="LINE", help="A line of shell before the start; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the script there.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it with sbatch, or run it with bash.")] = False,
    as_json: Json = False,
) -> None:
    """Write the job script that trains a recipe, to read, edit and submit; --submit does that, too.

    \b
    vitrail launch slurm RECIPE --nodes 2 --gpus 8 --time 12h --account lab > job.sh
    vitrail launch slurm RECIPE --machine frontier --nodes 16 --time 2h --account abc123 --submit
    vitrail launch torchrun RECIPE parallel.strategy=DDP --gpus 4 --submit
    vitrail launch mpi RECIPE --nodes 2 --gpus 4 --env-setup "module load openmpi" --output job.sh

    The recipe is checked against the number of processes first. A Slurm job saves before its time limit, is queued
    again and goes on from there, until the training is done or fails.
    """
    from vitrail.launch import jobs

    job = jobs.Job(
        launcher=launcher,
        recipe=recipe,
        overrides=tuple(overrides or ()),
        plugins=tuple(plugin or ()),
        trust=trust,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_rank=cpus_per_rank,
        time=time,
        account=account,
        partition=partition,
        qos=qos,
        constraint=constraint,
        name=name,
        machine=machine,
        container=container,
        container_kind=container_kind,
        signal_seconds=signal_seconds,
        requeue=requeue,
        max_restarts=max_restarts,
        python=python,
        env_setup=tuple(env_setup or ()),
    )
    script = jobs.write_script(job, written_by=context.obj or [launcher, recipe])
    if output is not None:
        jobs.save(script, output)
    facts: dict[str, Any] = {
        "launcher": launcher,
        "name": script.name,
        "nodes": script.nodes,
        "ranks_per_node": script.ranks_per_node,
        "world": script.world,
        "layout": script.layout,
        "submit": ["sbatch" if launcher == "slurm" else "bash", str(output or "FILE")],
        "output": str(output) if output else None,
        "script": script.text,
    }
    code = 0
    if submit:
        note(f"{script.name}: {script.world} rank{'s' * (script.world > 1)} ({script.layout})")
        code, facts["answer"] = jobs.submit(script, output, to_stderr=as_json)
    if as_json:
        print_tree(facts, as_json)
    elif submit:
        print(facts["answer"], end="\n" if facts["answer"] else "")
    else:
        print(output or script.text, end="\n" if output else "")
    raise typer.Exit(code)


@app.command(short_help="Print the JSON Schema of recipes.")
def schema(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")] = None,
) -> None:
    """Print the JSON Schema of recipes, with which editors check and complete them.

    \b
    vitrail schema --out vitrail.schema.json

    Then begin a recipe with this line, which most editors with a YAML language server understand:

    \b
    # yaml-language-server: $schema=vitrail.schema.json
    """
    import json

    from vitrail.disk import write_output
    from vitrail.recipe import json_schema

    text = json.dumps(json_schema(), indent=2)
    if out is None:
        print(text)
        return
    try:
        write_output(out, f"{text}\n".encode())
    except OSError as error:
        raise UserError(f"--out {out}: it cannot be written ({error.strerror}); choose another path") from error
    print(out)


for verb in (plan, bench, tune):
    verb.add(app)
