"""The verbs beside a training: `vitrail report`, `models`, `doctor`, `launch`, `convert` and `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitrail.cli.options import (
    COMPLETE,
    Account,
    CpusPerRank,
    Json,
    MachineName,
    Overrides,
    Partition,
    Plugins,
    TimeLimit,
    ToContinue,
    Trust,
    Verb,
    check_recipe,
    load_plugins,
)
from vitrail.cli.words import is_chief, note, print_found, print_rows, print_tree
from vitrail.credentials import strip
from vitrail.errors import UserError, printable


def add(app: typer.Typer) -> None:
    app.command(short_help="Write the page of a run, of several side by side, or of a bench.")(report)
    app.command(short_help="List the models and their sizes, or describe one.")(models)
    app.command(short_help="Try what training needs on this machine.")(doctor)
    app.command(cls=Remembering, short_help="Write the job script that trains a recipe, and submit it.")(launch)
    app.command(short_help="Write a recipe of another system's configuration.")(convert)
    app.command(short_help="Print the JSON Schema of recipes.")(schema)
    app.command(short_help="Print what completes commands in a shell.")(completion)


class Remembering(Verb):
    """A command that keeps its words as they were typed, for the script that it writes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


def report(
    run: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A run folder, or several; or that of a bench.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of several runs: write the page there; else beside the first run."),
    ] = None,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Write the page of a run, whatever state the run is in, of several runs side by side, or of a bench.

    \b
    vitrail report runs/demo-mae3d
    vitrail report runs/demo-mae3d --json
    vitrail report runs/scratch runs/finetuned    several side by side: their curves, scores and keys that differ
    vitrail report runs/seed-* --out seeds.html
    vitrail report runs/bench-demo-mae3d          what a sweep of `vitrail bench` has measured so far

    Its path is printed. The page is RUN/report.html: one file with curves, pictures, scores, speed and the recipe,
    which opens offline. That of several runs has their curves over each other, the recipe keys that differ, scores,
    pictures, speed and memory side by side; no file that vitrail did not write is replaced. That of a bench has plots
    of its cells, which are also in RUN/plots as PNG and SVG. With --json the facts are printed instead of the path,
    which is among them as "report".
    """
    load_plugins(plugin)
    from vitrail import report as pages

    if len(run) > 1:
        page = pages.write_comparison(run, out)
        print_found({"report": str(page), **(pages.compare_summary(run) if as_json else {})}, page, as_json)
        return
    if out is not None:
        raise UserError(
            f"--out {out}: the page of one run or bench lies in its folder; give several runs, or leave it out"
        )
    [one] = run
    write, facts_of = (
        (pages.write_bench_report, pages.bench_summary) if pages.is_bench(one) else (pages.write_report, pages.summary)
    )
    page = write(one)
    print_found({"report": str(page), **(facts_of(one) if as_json else {})}, page, as_json)


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
    vitrail models mae:2B                         the values of a size; `model.encoder.size: 2B` in a recipe
    vitrail models dit:XL/2 --json

    A multiply-add counts as 2 FLOPs. Nothing is downloaded, and no memory is taken for parameters.
    """
    from vitrail.models import catalog
    from vitrail.recipe.yaml import show

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
    print(f"\nkeys of `model` in a recipe, and their {f'values in {name}' if ':' in str(name) else 'defaults'}:")
    for key, default in found["keys"].items():
        print(f"  {key}: {default if isinstance(default, str) else show(default)}")


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine instead, for --cluster FILE of `vitrail plan`.")
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


def launch(
    context: typer.Context,
    launcher: Annotated[Literal["torchrun", "slurm", "mpi"], typer.Argument(help="What starts the processes.")],
    recipe: ToContinue,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Nodes of the job.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node", "--gpus", metavar="N", min=1, help="Processes a node, one a GPU; else the machine's."
        ),
    ] = None,
    cpus_per_rank: CpusPerRank = None,
    time: TimeLimit = None,
    account: Account = None,
    partition: Partition = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features that nodes must have.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; run.name if not given.")] = None,
    machine: MachineName = None,
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
    load_plugins(plugin)
    check_recipe(recipe, overrides)
    from vitrail.launch import jobs
    from vitrail.parallel.check import refuse

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
        machine=machine or jobs.GENERIC,
        container=container,
        container_kind=container_kind,
        signal_seconds=signal_seconds,
        requeue=requeue,
        max_restarts=max_restarts,
        python=python,
        env_setup=tuple(env_setup or ()),
    )
    script = jobs.write_script(job, refuse, written_by=context.obj or [launcher, recipe])
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
    else:
        told = facts["answer"] if submit else output or script.text.removesuffix("\n")
        print(told, end="\n" if told else "")
    raise typer.Exit(code)


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .yaml, .toml or .sh of the other system.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- WORDS", help="What its script was called with beside FILE.", show_default=False),
    ] = None,
    system: Annotated[
        Literal["ucf-vit", "torchtitan-mae", "torchditan", "vit-fsdp-study"] | None,
        typer.Option("--from", help="Whose file it is; found out by the file if not given."),
    ] = None,
    task: Annotated[
        Literal["classification", "mae", "unetr", "sap", "diffusion"] | None,
        typer.Option("--as", help="Of UCF-VIT: what the file trains; its folder says so if not given."),
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A script that calls the other system; its words come first.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe there.")] = None,
    as_json: Json = False,
) -> None:
    """Write a recipe of a configuration of UCF-VIT, torchtitan-mae, TorchDiTan or the ViT-FSDP study.

    \b
    vitrail convert UCF-VIT/configs/imagenet/mae/base_config.yaml -o mae.yaml
    vitrail convert base_config.yaml --as mae
    vitrail convert train_configs/demo.toml -- --training.mask_ratio=0.01
    vitrail convert scripts/sub_15B.sh

    The recipe, whose comments say where each key comes from, is printed or goes to the file of -o. A table tells of
    each key of the other system whether it is mapped, changed (why) or dropped (why), and which are not understood.
    """
    from dataclasses import asdict

    from vitrail.convert import convert as convert_file
    from vitrail.convert.engine import UNKNOWN
    from vitrail.disk import check_output, write_output

    if out is not None:
        check_output(out)
    found = convert_file(file, system=system, task=task, words=words or (), script=script)
    if out is not None:
        write_output(out, found.text.encode())
    if as_json:
        table = [asdict(row) for row in found.rows]
        facts = {"system": found.system, "task": found.task, "recipe": found.tree, "keys": table, "text": found.text}
        print_tree(facts, as_json)
    elif out is None:
        print(found.text, end="")
    for row in () if as_json else found.rows:
        (note if out is None else print)(printable(strip(row.line())))
    if unknown := found.count(UNKNOWN):
        note(f"{unknown} key{'s are' if unknown > 1 else ' is'} not understood; see the end of the recipe")


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


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell that is to complete commands.")],
) -> None:
    """Print a script by which a shell completes verbs, options and the keys of the recipe that stands before.

    \b
    vitrail completion bash > vitrail.bash        then `source vitrail.bash`, in ~/.bashrc for every time
    vitrail completion zsh
    vitrail completion fish

    Nothing is written.
    """
    from typer.completion import get_completion_script

    print(get_completion_script(prog_name="vitrail", complete_var=COMPLETE, shell=shell))
