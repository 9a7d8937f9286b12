"""The ViT-FSDP study of Frontier: flags of its main_training.py, out of the scripts that submit it."""

from __future__ import annotations

import re
from typing import Any

from vitrail.convert.engine import Given, Line, Made, NotHonoured, Table, code, drop, has, to, unless
from vitrail.errors import UserError

MOST_CALLS = 50  # of main_training.py in a script, each of which is looked at to its end
SIZES = {"base": "Base", "huge": "Huge", "giant": "1B", "enormous": "3B", "5B": "5B", "15B": "15B"}


def read_script(text: str) -> dict[str, Any]:
    """Return the flags that a script calls the study with, and what it asks Slurm for."""
    found: dict[str, Any] = {}
    for name, value in re.findall(
        r"^#SBATCH\s+(--?[A-Za-z][\w-]*)(?:[ =]+([^\s=]\S*))?[ \t]*(?:#.*)?$", text, re.MULTILINE
    ):
        found[f"#SBATCH {name}"] = value or True
    calls = calls_of(text)
    if not calls:
        raise UserError(
            "the script does not call main_training.py, whose flags say what is trained; give one that does"
        )
    called = [words for words in calls if words] or calls
    if any(words != called[0] for words in called):
        raise UserError(f"the script calls main_training.py {len(called)} times, not always alike; leave one of them")
    return found | read_flags(called[0])


def calls_of(text: str) -> list[list[str]]:
    """Return the words of each call of main_training.py, without quotes."""
    text = re.sub(r"^[^\S\n]*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ").replace('\\"', "")
    found: list[list[str]] = []
    for call in re.finditer(r"main_training\.py(?![^\s\"'])", text):
        if len(found) == MOST_CALLS:
            raise UserError(f"the script calls main_training.py more than {MOST_CALLS} times; leave one of them")
        before, after = text[: call.start()].rpartition("\n")[2], text[call.end() :]
        inside = [quote for quote in "\"'" if before.count(quote) % 2]  # the call ends with its string, or its line
        for end in inside or "\n":
            after = after.partition(end)[0]
        words = re.split(r"[;&|]|\s#|\s\d*[<>]", after, maxsplit=1)[0].replace('"', "").replace("'", "").split()
        found.append(words)
    return found


def read_flags(words: list[str]) -> dict[str, Any]:
    """Return flags and their values; one without a value is true."""
    found: dict[str, Any] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            found[last] = value if equals else True
        elif last and found[last] is True:
            found[last] = value = word
        else:
            found[word] = True  # stands alone: not understood
    return found


def strategy(value: Any, given: Given) -> Made:
    if value not in ("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        raise NotHonoured("NO_SHARD, FULL_SHARD, SHARD_GRAD_OP and HYBRID_SHARD are known")
    if given("--use_ddp"):
        return {}, "not looked at with --use_ddp, there too"
    return {"parallel.strategy": value}, ""


def group(value: Any, given: Given) -> Made:
    if given("--strategy") != "HYBRID_SHARD" or given("--use_ddp"):
        return {}, "only with HYBRID_SHARD, there too"
    if int(value) < 1:
        raise NotHonoured("the ranks of a node shared a copy; say how many: add -- --scaling_group_size 8")
    return {"parallel.group": int(value)}, ""


def ddp(value: Any, given: Given) -> Made:
    if not value:
        return {}, "a strategy of shards"
    return {"parallel.strategy": "DDP", "parallel.bucket_mib": 25}, ""


def number_format(value: Any, given: Given) -> Made:
    if given("--use_ddp"):
        return {"precision.compute": "fp32", "precision.reduce": "fp32"}, ""
    return {"precision.compute": "bf16", "precision.reduce": "bf16"}, ""


def image_size(value: Any, given: Given) -> Made:
    return {"data.crop": int(value), "model.shape": int(value), "data.train.0.shape": [int(value)] * 2}, ""


def job(option: str) -> Any:
    return drop(f"of the job: `vitrail launch slurm RECIPE {option}`")


TABLE = Table(
    "the ViT-FSDP study",
    (
        code("name", lambda v, g: ({"run.name": f"study-{SIZES[g('--model_size')].lower()}"}, "")),
        code("3 epochs of 30 steps", has("run.steps", 90)),
        code("seed", has("run.seed", 2023)),
        Line("--model", unless("vitsmart", "model.kind, study_vit", "only vitsmart is known"), "vitsmart"),
        code("model", has("model.kind", "study_vit")),
        Line("--model_size", to("model.size", **SIZES), "base"),
        code("channels", has("model.channels", 3)),
        code("loss", has("objective.kind", "classify")),
        code("made-up images", has("data.train.0.kind", "dummy")),
        code("channels of the images", has("data.train.0.channels", 3)),
        code("number of images", has("data.train.0.items", 1_282_168)),
        code("classes", has("data.train.0.classes", 1000)),
        Line("--image_size", image_size, 224),
        Line("--bs", lambda v, g: ({"data.batch": f"{int(v)}/rank"}, ""), 128),
        code("optimizer", has("optimizer.kind", "adamw")),
        code("rate", has("optimizer.lr", 5.0e-4)),
        code("betas", has("optimizer.betas", [0.9, 0.999])),
        code(
            "weight decay", has("optimizer.weight_decay", 0.002, "biases and norms are spared; there they decayed, too")
        ),
        code("no clipping of gradients", has("optimizer.clip", None)),
        code("the rate rises from a tenth in 50 steps", has("schedule.kind", "constant")),
        code("steps of the warm-up, the first at the tenth", has("schedule.warmup", 51)),
        code("rate of the first step", has("schedule.start", 5.0e-5)),
        Line("--strategy", strategy, "NO_SHARD"),
        Line("--scaling_group_size", group, 0),
        Line("--use_ddp", ddp, False),
        Line("--use_tp", drop("there it split nothing: groups of one rank; parallel.tensor splits")),
        code("format of numbers", number_format),
        code("every block computed again", has("parallel.recompute", "full")),
        code("not compiled", has("parallel.compile", False)),
        code("BACKWARD_PRE", has("parallel.prefetch.backward", 1)),
        code("limit_all_gathers", drop("always so")),
        code("no checkpoints", has("checkpoint.every", "off")),
        Line("#SBATCH -N", job("--nodes N")),
        Line("#SBATCH --ntasks-per-node", job("--gpus N")),
        Line("#SBATCH -t", job("--time CLOCK")),
        Line("#SBATCH -A", job("--account NAME")),
        Line("#SBATCH -q", job("--qos NAME")),
        Line("#SBATCH -p", job("--partition NAME")),
        Line("#SBATCH -J", job("--name NAME")),
        Line("#SBATCH -o", drop("the log lies in the run's folder")),
        Line("#SBATCH --exclusive", job("--machine frontier")),
    ),
    {
        "#SBATCH --nodes": "#SBATCH -N",
        "#SBATCH --time": "#SBATCH -t",
        "#SBATCH --account": "#SBATCH -A",
        "#SBATCH --partition": "#SBATCH -p",
        "#SBATCH --qos": "#SBATCH -q",
        "#SBATCH --job-name": "#SBATCH -J",
        "#SBATCH --output": "#SBATCH -o",
    },
)
