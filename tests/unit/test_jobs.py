"""Job scripts: what they must say for every launcher and machine, and what is refused before one is written."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, tiny_recipe, vitrail, write_recipe, write_volume
from typer.testing import CliRunner

from vitrail.cli import app
from vitrail.errors import UserError
from vitrail.launch import jobs
from vitrail.launch.jobs import Job, check_machine, known_machines, load_machine, save, submit
from vitrail.parallel.check import refuse

DEMO = str(ROOT / "configs/demo/mae3d.yaml")
write_script = functools.partial(jobs.write_script, refuse=refuse)
SOURCES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src")  # of the containers


def script(launcher: Any = "slurm", recipe: str = DEMO, **options: Any) -> str:
    text = write_script(Job(launcher=launcher, recipe=recipe, **options)).text
    check_shell(text)
    return text


def check_shell(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", "-"], input=text, text=True, check=True)


# ---------------------------------------------------------------- every template


@pytest.mark.parametrize("launcher", ["slurm", "torchrun", "mpi"])
@pytest.mark.parametrize("machine", known_machines())
def test_every_launcher_has_a_script_for_every_machine(launcher: str, machine: str) -> None:
    ranks = load_machine(machine).ranks_per_node
    for nodes in (1, 2):
        words = {"overrides": ("run.steps=5",), "plugins": ("json",), "trust": True}
        text = script(launcher, machine=machine, nodes=nodes, **words)
        command = f"vitrail train {DEMO} run.steps=5 --plugin json --trust"
        assert text.startswith("#!/bin/bash\n")
        assert command in text
        assert f"cd {Path.cwd()}" in text
        for variable, entry in load_machine(machine).environment.items():
            assert f'# {entry["why"]}\nexport {variable}="${{{variable}:-{entry["value"]}}}"' in text
        if launcher == "slurm":
            assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node={ranks}\n" in text
        elif launcher == "torchrun":
            assert f"--nproc-per-node={ranks}" in text
            assert ("--standalone" in text) == (nodes == 1)
            assert ("--rdzv-backend=c10d" in text) == ('--rdzv-endpoint="$HEAD:' in text) == (nodes == 2)
        else:
            assert f"options=(-n {nodes * ranks})" in text
            assert f'--map-by "ppr:{ranks}:node' in text


def test_ranks_are_told_a_secret_that_nobody_guesses() -> None:
    for launcher, nodes in (("slurm", 1), ("slurm", 2), ("torchrun", 1), ("mpi", 2)):
        line = next(line for line in script(launcher, nodes=nodes).splitlines() if "export VITRAIL_SECRET=" in line)
        env = {name: value for name, value in os.environ.items() if name != "VITRAIL_SECRET"}
        ask = ["bash", "-c", f"{line}; printf %s $VITRAIL_SECRET"]
        drawn = {subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)}
        assert len(drawn) == 2
        assert all(re.fullmatch("[0-9a-f]{32}", secret) for secret in drawn)
        kept = subprocess.run(ask, env=env | {"VITRAIL_SECRET": "mine"}, capture_output=True, text=True, check=True)
        assert kept.stdout == "mine"
    assert "VITRAIL_SECRET" not in script("torchrun", nodes=2)  # each node would draw another
    assert " VITRAIL_SECRET " in next(line for line in script("mpi", nodes=2).splitlines() if "forward=(" in line)
    assert "--env VITRAIL_SECRET " in script("torchrun", container="image:1", container_kind="docker")


def test_what_a_slurm_job_says() -> None:
    text = script(
        nodes=2,
        ranks_per_node=4,
        cpus_per_rank=6,
        time="1d12h",
        account="lab",
        partition="gpu",
        qos="high",
        constraint="a100&nvlink",
        name="night",
        signal_seconds=120,
        env_setup=("module load cuda", "source /opt/venv/bin/activate"),
    )
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=night",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=6",
        "--gpus-per-node=4",
        "--account=lab",
        "--partition=gpu",
        "--qos=high",
        "--constraint=a100&nvlink",
        "--time=1-12:00:00",
        "--output=slurm-%x-%j.out",
        "--signal=USR1@120",
        "--requeue",
        "--open-mode=append",
    ]
    first_command = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert all(
        not line.startswith("#SBATCH") for line in text.splitlines()[first_command:]
    )  # Slurm stops reading there
    assert "module load cuda\nsource /opt/venv/bin/activate\n" in text
    assert f"srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task=6 \\\n  {sys.executable} -m vitrail train" in text
    assert "--cpus-per-rank" not in text
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text
    once = script(requeue=False)
    assert "scontrol" not in once
    assert "#SBATCH --no-requeue" in once
    assert "No cores were asked for" in once
    assert "--signal=USR1@300" in once


def test_a_recipe_for_the_cpu_asks_for_no_gpus() -> None:
    text = script(machine="dgx", overrides=("run.device=cpu",))
    assert "gpus" not in text
    assert "NCCL" not in text
    assert "rocm" not in script(machine="frontier", overrides=("run.device=cpu",))
    assert f"  {sys.executable} -m vitrail train" in text


def test_frontier_gives_each_task_the_gpu_that_is_nearest() -> None:
    text = script(machine="frontier", nodes=2)
    assert "srun --kill-on-bad-exit=0 --wait=120 --cpus-per-task=7 --gpus-per-task=1 --gpu-bind=closest" in text
    assert "--gpus-per-node" not in text
    assert "MIOPEN_USER_DB_PATH" in text


@pytest.mark.parametrize(
    ("launcher", "image", "kind", "words"),
    [
        ("slurm", "vitrail.sif", None, 'apptainer exec --nv --bind "$PWD" vitrail.sif python -m vitrail train'),
        ("slurm", "vitrail:1", None, '--container-image=vitrail:1 --container-mounts="$PWD:$PWD"'),
        (
            "torchrun",
            "vitrail:1",
            None,
            'docker run --rm --init --gpus all "${infiniband[@]}" --network host --ipc host',
        ),
        (
            "torchrun",
            "vitrail:1",
            "docker",
            "--env TORCH_ELASTIC_SHUTDOWN_TIMEOUT --env VITRAIL_SECRET vitrail:1 python -m torch.distributed.run",
        ),
        (
            "torchrun",
            "vitrail",
            "apptainer",
            'apptainer exec --nv --bind "$PWD" vitrail python -m torch.distributed.run',
        ),
        (
            "mpi",
            "an image.sif",
            None,
            'mpirun "${options[@]}" apptainer exec --nv --bind "$PWD" \'an image.sif\' python',
        ),
        ("slurm", "docker://vitrail:1", None, 'apptainer exec --nv --bind "$PWD" docker://vitrail:1 python'),
        ("slurm", "v.sqsh", None, "--container-image=v.sqsh "),
    ],
)
def test_containers(launcher: str, image: str, kind: Any, words: str) -> None:
    assert words in script(launcher, container=image, container_kind=kind)


def test_containers_for_amd() -> None:
    assert "apptainer exec --rocm " in script(machine="frontier", container="v.sif")
    text = script("torchrun", machine="frontier", container="v:1")
    assert '--device /dev/kfd --device /dev/dri --group-add "$(stat -c %g /dev/kfd)"' in text
    assert "--device /dev/infiniband --cap-add IPC_LOCK" in text
    assert "infiniband" not in script("torchrun", container="v:1", overrides=("run.device=cpu",))


def test_containers_see_what_the_recipe_names(tmp_path: Path) -> None:
    write_volume(tmp_path / "my data.zarr")
    recipe = tiny_recipe(tmp_path / "my data.zarr", tmp_path / "runs" / "one")
    path = write_recipe(tmp_path / "recipe.yaml", recipe)
    assert f' --bind "$PWD" --bind {tmp_path} ' in script(recipe=str(path), container="v.sif")
    (tmp_path / "codecs").mkdir()
    for name in ("encoder.jit", "decoder.jit"):
        (tmp_path / "codecs" / name).touch()
    pair = {name: str(tmp_path / "codecs" / f"{name}.jit") for name in ("encoder", "decoder")}
    folder = tmp_path / "here"
    folder.mkdir()
    named = recipe | {"run": recipe["run"] | {"dir": "run"}, "codec": {"kind": "torchscript", **pair}}
    job = Job(launcher="slurm", recipe=str(write_recipe(folder / "codec.yaml", named)), container="v.sif")
    for file in pair.values():
        assert f"--bind {file} " in write_script(job, folder=folder).text
    inside = write_recipe(folder / "recipe.yaml", recipe | {"run": recipe["run"] | {"dir": "run"}})
    job = Job(launcher="torchrun", recipe=str(inside), container="v:1")
    assert f" --volume '{tmp_path}/my data.zarr:{tmp_path}/my data.zarr' --env" in write_script(job, folder=folder).text
    job = Job(launcher="slurm", recipe=str(inside), container="v:1")
    expected = f"--container-mounts=\"$PWD:$PWD\",'{tmp_path}/my data.zarr:{tmp_path}/my data.zarr' "
    assert expected in write_script(job, folder=folder).text


def test_tensor_ranks_order_their_kernels_unless_parameters_are_gathered() -> None:
    line = 'export CUDA_DEVICE_MAX_CONNECTIONS="'
    plain = script(ranks_per_node=4, overrides=("parallel.tensor=2", "parallel.strategy=DDP"))
    assert f"\n{line}" in plain
    assert f"\n# {line}" in script(ranks_per_node=4, overrides=("parallel.tensor=2",))
    assert "CUDA_DEVICE_MAX" not in script(ranks_per_node=4)


def test_words_stay_words_in_the_shell(tmp_path: Path) -> None:
    """A script with odd words does what the words say, not what the shell makes of them."""
    recipe = tmp_path / "it's $(touch here).yaml"
    recipe.write_text(Path(DEMO).read_text())
    odd = ("run.dir=a b; touch there\ntouch everywhere",)
    written = write_script(Job(launcher="torchrun", recipe=str(recipe), overrides=odd), folder=tmp_path, written_by=odd)
    check_shell(written.text)
    program = tmp_path / "print"
    program.write_text('#!/bin/bash\nprintf "%s|" "$@"\n')
    program.chmod(0o755)
    text = written.text.replace(sys.executable, str(program))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"--module|vitrail|train|{recipe}|{odd[0]}|")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([recipe.name, "print"])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "no/such.yaml"}, "there is no such file"),
        ({"overrides": ("run.stepz=3",)}, r"run\.stepz.*did you mean.*steps"),
        ({"nodes": 3, "overrides": ("parallel.tensor=2",)}, r"--nodes 3 x --ranks-per-node 1: parallel: tensor 2"),
        ({"nodes": 0}, "--nodes 0: expected a whole number above 0"),
        ({"machine": "fronteir"}, "did you mean 'frontier'"),
        ({"time": "soon"}, "--time 'soon': expected a clock"),
        ({"time": "90"}, "to Slurm 90 would be minutes, so write 90m"),
        ({"time": "90:30"}, "so write 90m30s"),
        ({"time": "2-0"}, "to Slurm 2-0 would be days and hours, so write 2d0h0m"),
        ({"ranks_per_node": 3, "overrides": ("parallel.tensor=3",)}, r"--ranks-per-node 3: .*heads"),
        ({"ranks_per_node": 64, "overrides": ("parallel.pipeline=64",)}, r"--ranks-per-node 64: .*pipeline"),
        ({"nodes": 7, "ranks_per_node": 3}, r"--nodes 7 x --ranks-per-node 3: .*batch"),
        ({"launcher": "torchrun", "time": "1h"}, r"--time: it means nothing to torchrun \(run\.time_limit=1h"),
        ({"launcher": "torchrun", "account": "x"}, "--account: .*leave it out, or use vitrail launch slurm"),
        ({"launcher": "torchrun", "signal_seconds": 300}, "--signal-seconds: it means nothing to torchrun"),
        ({"launcher": "torchrun", "cpus_per_rank": 3}, "--cpus-per-rank: .* divides the cores"),
        ({"launcher": "mpi", "requeue": True}, "--requeue: it means nothing to mpi"),
        ({"launcher": "mpi", "requeue": False}, "--no-requeue: it means nothing to mpi"),
        ({"launcher": "mpi", "max_restarts": 5}, "--max-restarts: .*use vitrail launch slurm or torchrun"),
        ({"requeue": False, "max_restarts": 5}, "--max-restarts: with --no-requeue"),
        ({"name": "a/b%x"}, "--name 'a/b%x': expected letters, digits"),
        ({"name": "a&b", "launcher": "torchrun"}, "--name 'a&b'"),
        ({"launcher": "torchrun", "container": "v.sqsh"}, "--container v.sqsh: enroot cannot be started by torchrun"),
        ({"launcher": "mpi", "container": "v:cuda"}, "neither a file such as vitrail.sif nor .* docker://v:cuda"),
        ({"recipe": str(ROOT / "docs")}, "this folder has no recipe.yaml; give a recipe file or the folder of a run"),
        ({"time": "4m"}, r"--time 4m: .* ask for more time, or set --signal-seconds below 240"),
        ({"signal_seconds": 0}, "--signal-seconds 0: expected 10 to 65535"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"account": "a b"}, "--account 'a b': expected letters"),
        ({"partition": "x\n#SBATCH --uid=0"}, "--partition"),
        ({"name": "$(reboot)"}, "--name"),
        ({"container_kind": "docker"}, "name the image, too"),
        ({"container": "a:1", "container_kind": "docker"}, "use apptainer or enroot, or vitrail launch torchrun"),
        ({"plugins": ("no_such_module_of_mine",)}, "--plugin no_such_module_of_mine: cannot be imported"),
    ],
)
def test_mistakes_are_found_before_the_queue(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        script(**options)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([], "expected a mapping"),
        ({"rank_per_node": 3}, "'rank_per_node' is not a key of a machine; did you mean 'ranks_per_node'"),
        ({"ranks_per_node": 0}, "ranks_per_node: expected a whole number above 0, got 0"),
        ({"gpus": "tpu"}, "gpus: expected nvidia, amd or none"),
        ({"about": "a\nb"}, "about: expected a text on one line"),
        ({"setup": "module load"}, "setup: expected a list of lines"),
        ({"sbatch": ["--mem 0"]}, "sbatch: expected options such as"),
        ({"environment": {"A": 1}}, r"environment\.A: expected \{value: text, why: text\}"),
        ({"environment": {"A": {"value": "1", "why": "x", "gpus": "yes"}}}, r"gpus: true for what GPUs alone need"),
        ({"environment": {"A B": {"value": "1", "why": "x"}}}, r"environment\.A B"),
        ({"environment": {"A": {"value": '"; reboot; "', "why": "x"}}}, r"environment\.A: quotation marks"),
    ],
)
def test_a_wrong_machine_is_refused(tree: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_machine(tree, "mine.yaml")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "ranks_per_node: 2\nsbatch: [--reservation=ours]\nsrun: ['--constraint=a&b']\ngpu_setup: [module load fast]\n"
        'environment: {LAB: {value: "$HOME/x", why: ours}, FAST: {value: "1", why: quick, gpus: true}}\n'
    )
    text = script(machine=str(path))
    assert "#SBATCH --reservation=ours\n" in text
    assert '# ours\nexport LAB="${LAB:-$HOME/x}"' in text
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert " '--constraint=a&b' " in text
    assert "module load fast\n" in text
    assert "export FAST=" in text
    slow = script(machine=str(path), overrides=("run.device=cpu",))
    assert "export LAB=" in slow
    assert "fast" not in slow.lower().replace(str(path).lower(), "")


# ---------------------------------------------------------------- the verb


def test_the_verb_prints_writes_and_never_overwrites(tmp_path: Path) -> None:
    run = CliRunner().invoke
    arguments = ["launch", "slurm", DEMO, "run.steps=7", "--gpus", "2", "--time", "2h"]
    printed = run(app, arguments)
    assert printed.exit_code == 0
    assert "run.steps=7" in printed.output
    check_shell(printed.output)
    path = tmp_path / "job.sh"
    assert run(app, [*arguments, "--output", str(path)]).output.strip() == str(path)
    assert path.stat().st_mode & 0o100
    assert run(app, [*arguments, "--output", str(path)]).exit_code == 0  # the same again
    path.write_text(path.read_text() + "# mine\n")
    refused = run(app, [*arguments, "--output", str(path)])
    assert refused.exit_code == 2
    assert "exists already and is different" in refused.stderr
    assert "# Written by: vitrail launch slurm " in printed.output
    assert "run.steps=7 --gpus 2 --time 2h\n" in printed.output
    facts = json.loads(run(app, [*arguments, "--json"]).output)
    assert facts["world"] == 2
    assert facts["layout"] == "shard 2"
    assert facts["submit"] == ["sbatch", "FILE"]
    assert facts["script"].startswith("#!/bin/bash")
    wrong = run(app, ["launch", "slurm", DEMO, "--gpus", "3", "parallel.tensor=2"])
    assert wrong.exit_code == 2
    assert "parallel" in wrong.stderr


def test_a_run_folder_can_be_launched(tmp_path: Path) -> None:
    write_recipe(tmp_path / "recipe.yaml", tiny_recipe(tmp_path / "v.zarr", tmp_path))
    assert f"vitrail train {tmp_path}" in script(recipe=str(tmp_path))


def fake_program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_a_slurm_job_is_submitted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    written = write_script(Job(launcher="slurm", recipe=DEMO))
    fake_program(tmp_path, "sbatch", f'cat "${{1:-/dev/stdin}}" > {tmp_path}/seen; echo "Submitted batch job 12"')
    assert submit(written, None) == (0, "Submitted batch job 12")
    assert (tmp_path / "seen").read_text() == written.text
    save(written, tmp_path / "job.sh")
    assert submit(written, tmp_path / "job.sh")[0] == 0
    fake_program(tmp_path, "sbatch", 'echo "sbatch: error: Invalid account" >&2; exit 1')
    with pytest.raises(UserError, match="sbatch refused the job: Invalid account; mend the options"):
        submit(written, None)
    away = "Batch job submission failed: Unable to contact slurm controller (connect failure)"
    fake_program(tmp_path, "sbatch", f'for i in 1 2; do echo "sbatch: error: {away}"; done >&2; exit 1')
    with pytest.raises(
        UserError, match=r"could not reach Slurm: Batch job .* failure.; see whether it answers"
    ) as found:
        submit(written, None)
    assert str(found.value).count("Unable") == 1
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="sbatch is not on the PATH"):
        submit(written, None)


@pytest.mark.parametrize(
    ("code", "restarts", "expected", "requeued"),
    [(0, 0, 0, False), (75, 0, 0, True), (75, 3, 75, False), (1, 0, 1, False), (2, 0, 2, False), (137, 1, 137, False)],
)
def test_only_a_stopped_training_is_queued_again(
    tmp_path: Path, code: int, restarts: int, expected: int, requeued: bool
) -> None:
    fake_program(tmp_path, "srun", f"exit {code}")
    fake_program(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/asked')
    text = write_script(Job(launcher="slurm", recipe=DEMO, max_restarts=3)).text
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
    assert done.returncode == expected
    assert (tmp_path / "asked").exists() == requeued
    assert ("job 9 is queued again" in done.stdout) == requeued
    assert ("not queued again: this was start 3 after the first" in done.stdout) == (code == 75 and not requeued)
    if requeued:
        assert (tmp_path / "asked").read_text() == "requeue 9\n"
        fake_program(tmp_path, "scontrol", "exit 1")
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)
        assert done.returncode == 75
        assert "Slurm did not queue it again" in done.stdout


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.4", "HYDRA build details: Version: 4.2"])
def test_both_kinds_of_mpirun_get_their_own_options(tmp_path: Path, version: str) -> None:
    fake_program(tmp_path, "mpirun", f'[ "$1" = --version ] && echo "{version}" || printf "%s|" "$@"')
    setup = ("export LAB=1", "export NCCL_DEBUG=INFO")
    job = Job(launcher="mpi", recipe=DEMO, nodes=2, ranks_per_node=4, cpus_per_rank=3, env_setup=setup)
    text = write_script(job).text
    check_shell(text)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTS": "hosts.txt", "MASTER_PORT": "7", "OTHER": "1"}
    told = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=True).stdout
    if "Open" in version:
        assert told.startswith("-n|8|--map-by|ppr:4:node:PE=3|--hostfile|hosts.txt|-x|PATH|-x|PYTORCH_ALLOC_CONF|")
        assert "-x|MASTER_PORT|" in told
        assert "-x|LAB|" in told
        assert told.count("NCCL_DEBUG") == 1
        assert not any(name in told for name in ("MASTER_ADDR", "OTHER"))
    else:
        assert told.startswith("-n|8|-ppn|4|-genvall|-f|hosts.txt|")
    assert told.endswith(f"-m|vitrail|train|{DEMO}|")


def test_launch_on_the_command_line_needs_no_torch_for_help() -> None:
    code, output = vitrail("launch", "--help")
    assert code == 0
    assert "vitrail launch slurm RECIPE" in output


# ---------------------------------------------------------------- containers


@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.rocm", "vitrail-cuda.def", "vitrail-rocm.def"])
def test_containers_install_what_the_repository_has(name: str) -> None:
    text = (ROOT / "containers" / name).read_text()
    copied = [line.split() for line in text.splitlines() if line.strip().startswith(("COPY ", *SOURCES))]
    sources = {word for line in copied for word in line if word in SOURCES}
    assert sources == set(SOURCES)
    assert all((ROOT / source).exists() for source in SOURCES)
    assert "-c constraints.txt" in text
    assert "g++ libibverbs1 ibverbs-providers librdmacm1" in text  # NCCL and RCCL load them for InfiniBand
