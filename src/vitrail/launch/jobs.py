"""Job scripts: what people submit to a cluster, written from a recipe and a description of the machine.

- a script is short, commented and complete, since people edit it; nothing of this package is needed to read it
- a machine is a YAML file (templates/machines): ranks and cores of a node, options of the scheduler, lines that set
  up the shell, and environment variables, each with its reason. People give the path of their own in its place
- the recipe and its layout are checked before a line is written: a queue is the wrong place to find a wrong key
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from vitrail.credentials import VARIABLE, are_known, strip
from vitrail.disk import check_plain, replacing
from vitrail.errors import UserError
from vitrail.launch.machine import describe_command
from vitrail.launch.world import SECRET

if TYPE_CHECKING:
    from vitrail.recipe import Recipe

Launcher = Literal["torchrun", "slurm", "mpi"]
Container = Literal["apptainer", "docker", "enroot"]

# Where containers and launchers meet: enroot by srun's own options, docker only with everything of a node inside.
CONTAINERS: dict[str, tuple[str, ...]] = {
    "slurm": ("apptainer", "enroot"),
    "torchrun": ("apptainer", "docker"),
    "mpi": ("apptainer",),
}
MAX_RESTARTS = {"slurm": 50, "torchrun": 3, "mpi": 0}
# What only some launchers know what to do with: those, and what to use with the others.
OWN_OPTIONS: dict[str, tuple[tuple[Launcher, ...], str]] = {
    "time": (("slurm",), "run.time_limit=1h in the recipe stops a training"),
    "account": (("slurm",), ""),
    "partition": (("slurm",), ""),
    "qos": (("slurm",), ""),
    "constraint": (("slurm",), ""),
    "signal_seconds": (("slurm",), ""),
    "requeue": (("slurm",), ""),
    "max_restarts": (("slurm", "torchrun"), "nothing there starts a training again"),
    "cpus_per_rank": (("slurm", "mpi"), "it divides the cores of a node by its ranks"),
}
GENERIC = "generic"  # the machine of who names none
SIGNAL_SECONDS = 300
LEAST_SIGNAL, MOST_SIGNAL = 10, 65535  # seconds; Slurm keeps them in 16 bits
_WORD = re.compile(r"[\w.,:@%+/=&|()\[\]*!~-]+")  # safe in a line of #SBATCH as it is; a shell needs quotes
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A kind of node, and what a job needs to know about it."""

    about: str = ""
    gpus: Literal["nvidia", "amd", "none"] = "nvidia"
    ranks_per_node: int = 1
    cpus_per_rank: int | None = None
    request_gpus: bool = True  # false where whole nodes are given, GPUs and all
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    gpu_setup: tuple[str, ...] = ()  # after these, unless the recipe is for the CPU
    environment: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The wishes of the command line; None leaves one to the machine or the scheduler."""

    launcher: Launcher
    recipe: str
    overrides: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    trust: bool = False  # of the code that comes with a codec
    words: tuple[str, ...] = ()  # module and arguments to run instead of a training of the recipe
    nodes: int = 1
    ranks_per_node: int | None = None
    cpus_per_rank: int | None = None
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    name: str | None = None
    machine: str = GENERIC
    container: str | None = None
    container_kind: Container | None = None
    signal_seconds: int | None = None
    requeue: bool | None = None
    max_restarts: int | None = None
    python: str | None = None
    env_setup: tuple[str, ...] = ()


class Variable(NamedTuple):
    """A variable that a script sets; one that is off stands there as a comment."""

    name: str
    value: str
    why: str
    off: bool = False


class Shares(Protocol):
    """A layout of ranks (parallel/mesh.py), as far as a script depends on it; str() names it."""

    @property
    def shard(self) -> int: ...
    @property
    def tensor(self) -> int: ...


@dataclass(frozen=True)
class Script:
    """A script, and the facts that it stands on."""

    text: str
    launcher: Launcher
    name: str
    nodes: int
    ranks_per_node: int
    layout: str

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


# ---------------------------------------------------------------- machines


def known_machines() -> list[str]:
    folder = resources.files("vitrail.launch").joinpath("templates", "machines")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_machine(name: str) -> Machine:
    """Read a machine of this package by its name, or a file of the user's own by its path."""
    from vitrail.recipe import yaml
    from vitrail.recipe.kinds import nearest

    if name in known_machines():
        text = resources.files("vitrail.launch").joinpath("templates", "machines", f"{name}.yaml").read_text("utf-8")
        return check_machine(yaml.parse(text, name), name)
    if not Path(name).is_file():
        near = nearest(name, known_machines())
        raise UserError(
            f"--machine {name!r}: there is no such machine or file{f'; did you mean {near!r}?' if near else ''} "
            f"(known: {', '.join(known_machines())}; or the path of a YAML file of your own)"
        )
    return check_machine(yaml.read(name), name)


def check_machine(tree: Any, name: str) -> Machine:
    """Return the machine in a tree, every key of it checked."""
    from vitrail.recipe.kinds import nearest

    known = [item.name for item in fields(Machine)]
    if not isinstance(tree, dict):
        raise UserError(f"--machine {name}: expected a mapping with some of the keys {', '.join(known)}")
    for key in tree:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(known)}"
            raise UserError(f"--machine {name}: {key!r} is not a key of a machine; {hint}")

    def expect(key: str, right: bool, what: str) -> None:
        if not right:
            raise UserError(f"--machine {name}: {key}: expected {what}, got {tree[key]!r}")

    for key, value in tree.items():
        if key == "about":
            expect(key, isinstance(value, str) and "\n" not in value, "a text on one line")
        elif key == "gpus":
            expect(key, value in ("nvidia", "amd", "none"), "nvidia, amd or none")
        elif key in ("ranks_per_node", "cpus_per_rank"):
            expect(key, type(value) is int and value > 0, "a whole number above 0")
        elif key == "request_gpus":
            expect(key, isinstance(value, bool), "true or false")
        elif key in ("sbatch", "srun", "setup", "gpu_setup"):
            lines = isinstance(value, list) and all(isinstance(v, str) and v and "\n" not in v for v in value)
            expect(key, lines, "a list of lines")
            if key in ("sbatch", "srun"):
                expect(key, all(_WORD.fullmatch(line) for line in value), "options such as --exclusive or --mem=0")
    environment = tree.get("environment", {})
    if not isinstance(environment, dict):
        raise UserError(f"--machine {name}: environment: expected a mapping from variables to value and why")
    for variable, entry in environment.items():
        right = (
            isinstance(entry, dict)
            and {"value", "why"} <= set(entry) <= {"value", "why", "gpus"}
            and all(isinstance(value, bool if key == "gpus" else str) for key, value in entry.items())
        )
        if not _VARIABLE.fullmatch(str(variable)) or not right:
            raise UserError(
                f"--machine {name}: environment.{variable}: expected {{value: text, why: text}}, and gpus: true for "
                'what GPUs alone need, under the name of a variable; numbers are texts here, so write "1"'
            )
        if set('"`\\\n') & set(entry["value"] + entry["why"]):
            raise UserError(
                f"--machine {name}: environment.{variable}: quotation marks, backticks, backslashes and new lines do "
                "not fit in; set the variable in `setup`"
            )
    lists = {key: tuple(tree[key]) for key in ("sbatch", "srun", "setup", "gpu_setup") if key in tree}
    return Machine(**{**tree, **lists})


# ---------------------------------------------------------------- scripts


def write_script(
    job: Job,
    refuse: Callable[[Recipe, int], Shares],
    *,
    folder: Path | None = None,
    verb: str = "launch",
    written_by: Sequence[str] = (),
) -> Script:
    """Check the recipe against nodes and ranks, and write its script.

    `refuse` gives the layout of a recipe on so many ranks, or says why there is none (parallel/check.py); `verb` and
    `written_by` are the command line.
    """
    refuse_strangers(job)
    machine = load_machine(job.machine)
    recipe = read_recipe(job)
    ranks = job.ranks_per_node or machine.ranks_per_node
    cpus = job.cpus_per_rank or machine.cpus_per_rank
    for option, count in (("--nodes", job.nodes), ("--ranks-per-node", ranks), ("--cpus-per-rank", cpus or 1)):
        if count < 1:
            raise UserError(f"{option} {count}: expected a whole number above 0")
    try:
        layout = refuse(recipe, job.nodes * ranks)
    except UserError as error:
        raise UserError(f"--nodes {job.nodes} x --ranks-per-node {ranks}: {error}") from None
    seconds = check_times(job)
    name = recipe.run.name if job.name is None else check_name(job.name)
    kind = choose_container(job)
    gpus = "none" if recipe.run.device == "cpu" else machine.gpus
    environment = environment_of(job, machine, layout, gpus)
    python = shlex.quote(job.python or ("python" if job.container else sys.executable))
    plugins = [word for plugin in job.plugins for word in ("--plugin", plugin)]
    training = ["vitrail", "train", job.recipe, *job.overrides, *plugins, *(["--trust"] if job.trust else [])]
    arguments = shlex.join(map(strip, job.words or training))
    here = folder or Path.cwd()
    outside = paths_outside(recipe, job, here) if kind else []
    prefix = container_prefix(job, kind, gpus, environment, outside)
    srun = [f"--cpus-per-task={cpus}"] if cpus else []  # srun does not take it over from sbatch
    srun += map(shlex.quote, machine.srun if gpus != "none" else ())
    if kind == "enroot":
        mounts = ",".join(['"$PWD:$PWD"', *(shlex.quote(f"{path}:{path}") for path in outside)])
        srun += [f"--container-image={shlex.quote(job.container or '')}", f"--container-mounts={mounts}"]
        srun += ['--container-workdir="$PWD"']
    where = f"{job.nodes} node{'s' * (job.nodes > 1)}, {ranks} rank{'s' * (ranks > 1)} on each"
    text = render(
        f"{job.launcher}.sh",
        title=f"{name}: {where} ({machine.about or job.machine})",
        written_by=" ".join(describe_command(["vitrail", verb, *written_by]).split()),
        name=name,  # letters, digits, dots and dashes: the same in #SBATCH and in a shell
        nodes=job.nodes,
        ranks_per_node=ranks,
        cpus_per_rank=cpus,
        world=job.nodes * ranks,
        folder=shlex.quote(str(here)),
        ask_gpus=gpus != "none" and machine.request_gpus,
        sbatch=[*sbatch_options(job, seconds), *machine.sbatch],
        srun=srun,
        signal_seconds=job.signal_seconds or SIGNAL_SECONDS,
        requeue=job.requeue is not False,
        max_restarts=MAX_RESTARTS[job.launcher] if job.max_restarts is None else job.max_restarts,
        setup=[*machine.setup, *(machine.gpu_setup if gpus != "none" else ()), *job.env_setup],
        environment=environment,
        credentials=VARIABLE if are_known() else "",
        python=python,
        prefix=prefix,
        find_infiniband=kind == "docker" and gpus != "none",
        arguments=arguments,
        command=f"{prefix}{python} -m {arguments}",
    )
    return Script(text, job.launcher, name, job.nodes, ranks, str(layout))


def environment_of(job: Job, machine: Machine, layout: Shares, gpus: str) -> list[Variable]:
    """List the variables that a job sets."""
    found = [
        Variable(name, entry["value"], entry["why"])
        for name, entry in machine.environment.items()
        if gpus != "none" or not entry.get("gpus")
    ]
    if layout.tensor > 1 and gpus == "nvidia":
        why = "tensor ranks: kernels start in the order they were called, so that communication begins early; "
        why += "worth a try" if layout.shard > 1 else "right as long as nothing is sharded"
        # Gathering parameters ahead of the computation needs several queues.
        found.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, off=layout.shard > 1))
    if job.launcher == "torchrun":
        why = "seconds to save after a signal, before torchrun kills the ranks (PyTorch 2.11: always 30)"
        found.append(Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SIGNAL_SECONDS), why))
    if job.launcher != "torchrun" or job.nodes == 1:  # several nodes each run that script, and would draw several
        why = "ranks find each other under keys of a store that begin with this, drawn by lot for each start"
        found.append(Variable(SECRET, "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')", why))
    return found


def read_recipe(job: Job) -> Recipe:
    from vitrail.recipe.load import find_recipe
    from vitrail.recipe.plugins import load_plugin

    for plugin in job.plugins:
        load_plugin(plugin)
    return find_recipe(job.recipe, job.overrides)


def refuse_strangers(job: Job) -> None:
    """Refuse options of another launcher, which would be forgotten in silence."""
    for option, (launchers, instead) in OWN_OPTIONS.items():
        value = getattr(job, option)
        if value is not None and job.launcher not in launchers:
            spelled = "--no-requeue" if value is False else f"--{option.replace('_', '-')}"
            raise UserError(
                f"{spelled}: it means nothing to {job.launcher}{f' ({instead})' if instead else ''}; leave it out, or "
                f"use vitrail launch {' or '.join(launchers)}"
            )
    if job.requeue is False and job.max_restarts is not None:
        raise UserError("--max-restarts: with --no-requeue the job does not start again; leave one of them out")


def check_times(job: Job) -> int | None:
    """Return the seconds of --time."""
    from vitrail.recipe import seconds_of

    before = SIGNAL_SECONDS if job.signal_seconds is None else job.signal_seconds
    if not LEAST_SIGNAL <= before <= MOST_SIGNAL:
        raise UserError(f"--signal-seconds {before}: expected {LEAST_SIGNAL} to {MOST_SIGNAL}")
    if job.max_restarts is not None and job.max_restarts < 0:
        raise UserError(f"--max-restarts {job.max_restarts}: expected 0 or more")
    if job.time is None:
        return None
    days = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,2}:[0-5][0-9]:[0-5][0-9])", job.time.strip())
    try:
        seconds = int(days[1]) * 86400 + seconds_of(days[2]) if days else seconds_of(job.time)
    except UserError:
        raise UserError(
            f'--time {job.time!r}: expected a clock such as "02:00:00", "90m", "1d12h" or "1-12:00:00"'
            + explain_slurm_time(job.time.strip())
        ) from None
    if seconds <= before:
        raise UserError(
            f"--time {job.time}: the job would be told to stop {before} s before its end, which is before "
            f"its start; ask for more time, or set --signal-seconds below {max(seconds, LEAST_SIGNAL + 1)}"
        )
    return seconds


def explain_slurm_time(text: str) -> str:
    """Say what a time means to Slurm itself: a bare number or a pair reads differently elsewhere."""
    if re.fullmatch(r"[0-9]+", text):
        return f"; to Slurm {text} would be minutes, so write {text}m"
    if found := re.fullmatch(r"([0-9]+):([0-9]+)", text):
        return f"; to Slurm {text} would be minutes and seconds, so write {found[1]}m{found[2]}s"
    if found := re.fullmatch(r"([0-9]+)-([0-9]+)(?::([0-9]+))?", text):
        return f"; to Slurm {text} would be days and hours, so write {found[1]}d{found[2]}h{found[3] or 0}m"
    return ""


def sbatch_options(job: Job, seconds: int | None) -> list[str]:
    options = [
        f"--{key}={check_word(f'--{key}', value)}"
        for key in ("account", "partition", "qos", "constraint")
        if (value := getattr(job, key))
    ]
    if seconds is not None:
        days, rest = divmod(seconds, 86400)
        options.append(f"--time={days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}")
    return options


def check_word(option: str, value: str) -> str:
    """Refuse a word that would mean something else in a script than on the command line."""
    if not _WORD.fullmatch(value):
        raise UserError(f"{option} {value!r}: expected letters, digits and signs without spaces or quotation marks")
    return value


def check_name(name: str) -> str:
    """Refuse a name that cannot be part of the name of a file."""
    from vitrail.recipe.sections import NAME

    if not re.fullmatch(NAME, name):
        raise UserError(f"--name {name!r}: expected letters, digits, dots, dashes and underscores")
    return name


def paths_outside(recipe: Recipe, job: Job, folder: Path) -> list[Path]:
    """List what the recipe reads and writes outside of the folder, each in a folder that is there already."""
    given = Path(job.recipe)
    places = [given if given.is_dir() else given.parent, recipe.run_dir.parent]
    read = (*recipe.data.train, *recipe.data.valid, recipe.codec)
    places += [Path(path) for source in read if (path := _path_of(source))]
    # A codec may be two files; beside a path, or on the hub, these are names in there.
    places += [Path(name) for name in _files_of(recipe.codec)]
    found: list[Path] = []
    for place in sorted((folder / place).resolve() for place in places):
        while not place.exists():
            place = place.parent
        if not any(place.is_relative_to(seen) for seen in (folder.resolve(), *found)) and place != Path(place.anchor):
            found.append(place)
    return found


def _files_of(codec: Any) -> list[str]:
    inside = _path_of(codec) is not None or getattr(codec, "hub", None) is not None
    names = [] if inside else [getattr(codec, name, None) for name in ("encoder", "decoder")]
    return [name for name in names if isinstance(name, str) and Path(name).exists()]


def _path_of(source: Any) -> str | None:
    path = source.get("path") if isinstance(source, Mapping) else getattr(source, "path", None)
    return path if isinstance(path, str) and "://" not in path else None


def guess_container(image: str, launcher: Launcher) -> str:
    """Return what runs an image that is written like this."""
    if image.endswith((".sif", ".img")) or "://" in image:
        return "apptainer"
    if image.endswith(".sqsh"):
        return "enroot"
    return CONTAINERS[launcher][-1]


def choose_container(job: Job) -> str | None:
    """Return which program runs the container, if one is asked for."""
    if job.container is None:
        if job.container_kind is not None:
            raise UserError(f"--container-kind {job.container_kind}: name the image, too, with --container IMAGE")
        return None
    fitting = CONTAINERS[job.launcher]
    kind = job.container_kind or guess_container(job.container, job.launcher)
    if kind not in get_args(Container):
        raise UserError(f"--container-kind {kind!r}: expected one of {', '.join(get_args(Container))}")
    looks_right = job.container.endswith((".sif", ".img")) or "://" in job.container or Path(job.container).exists()
    if kind == "apptainer" and job.container_kind is None and not looks_right:
        raise UserError(
            f"--container {job.container}: {job.launcher} starts images of apptainer, and this is neither a file such "
            f"as vitrail.sif nor an address such as docker://{job.container}"
        )
    if kind not in fitting:
        given = f"--container-kind {kind}: it" if job.container_kind else f"--container {job.container}: {kind}"
        raise UserError(
            f"{given} cannot be started by {job.launcher} here; use {' or '.join(fitting)}, or "
            f"vitrail launch {next(name for name, kinds in CONTAINERS.items() if kind in kinds)}"
        )
    return kind


def container_prefix(
    job: Job, kind: str | None, gpus: str, environment: Sequence[Variable], outside: Sequence[Path]
) -> str:
    """Return the words before the command: they run it in a container that sees the same folder and paths."""
    if kind is None or kind == "enroot":  # srun's own options start that one
        return ""
    image = shlex.quote(job.container or "")
    if kind == "apptainer":
        flag = {"nvidia": "--nv ", "amd": "--rocm ", "none": ""}[gpus]
        binds = "".join(f"--bind {shlex.quote(str(path))} " for path in outside)
        return f'apptainer exec {flag}--bind "$PWD" {binds}{image} '
    devices = {
        "nvidia": "--gpus all ",
        # The group that owns the devices here: its name may be another one, or none, in the image.
        "amd": '--device /dev/kfd --device /dev/dri --group-add "$(stat -c %g /dev/kfd)" '
        "--security-opt seccomp=unconfined ",
        "none": "",
    }[gpus]
    if gpus != "none":
        devices += '"${infiniband[@]}" '  # an array of the script
    names = [item.name for item in environment if not item.off] + [VARIABLE] * are_known()
    variables = "".join(f"--env {name} " for name in names)
    # The host's network and memory: ranks talk through both.
    shared = "--network host --ipc host --ulimit memlock=-1 "
    here = '--volume "$PWD:$PWD" --workdir "$PWD" --user "$(id -u):$(id -g)" '
    here += "".join(f"--volume {shlex.quote(f'{path}:{path}')} " for path in outside)
    return f"docker run --rm --init {devices}{shared}{here}{variables}{image} "


def render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = resources.files("vitrail.launch").joinpath("templates")
    environment = Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


# ---------------------------------------------------------------- onto the machine


def save(script: Script, path: Path, *, replace: bool = False) -> None:
    """Write the script, but never over one that a person may have edited, unless it lies in a folder of vitrail's."""
    try:
        check_plain(path)
        if not replace and path.exists() and path.read_text(encoding="utf-8", errors="replace") != script.text:
            raise UserError(f"--output {path}: it exists already and is different; remove it, or choose another path")
        with replacing(path) as file:
            file.write(script.text.encode("utf-8"))
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | 0o111)
    except OSError as error:
        raise UserError(f"--output {path}: it cannot be written ({error.strerror}); choose another path") from None


def submit(script: Script, path: Path | None, *, to_stderr: bool = False) -> tuple[int, str]:
    """Hand the script to the scheduler, or run it here; return the exit code, and what the scheduler said.

    `to_stderr` sends there what a script that runs here prints, where standard output is for something else.
    """
    program = "sbatch" if script.launcher == "slurm" else "bash"
    if shutil.which(program) is None:
        raise UserError(
            f"--submit: {program} is not on the PATH; write the script with --output and submit it where it is"
        )
    if program == "bash":
        words = ["bash", str(path)] if path else ["bash", "-c", script.text]
        return subprocess.run(words, stdout=sys.stderr if to_stderr else None).returncode, ""
    done = subprocess.run(
        ["sbatch", str(path)] if path else ["sbatch"],
        input=None if path else script.text,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        said = " / ".join(dict.fromkeys(filter(None, lines))) or f"it ended with {done.returncode}"
        if re.search(r"contact|connect|resolve|timed out|munge|configuration", said, re.IGNORECASE):
            raise UserError(
                f"--submit: sbatch could not reach Slurm: {said}; see whether it answers (sinfo), then submit again"
            )
        raise UserError(f"--submit: sbatch refused the job: {said}; mend the options, or edit the script")
    return 0, done.stdout.strip()
