"""The sections of a recipe and their defaults; each is frozen and refuses keys that it does not have."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from vitrail.recipe.durations import Clock, Every, EveryOrOff, RunLength
from vitrail.recipe.rules import Rule

NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(NAME, value):
        raise ValueError
    return value


def _batch(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and (found := re.fullmatch(r"([1-9][0-9]{0,8})\s*/\s*rank", value.strip())):
        return f"{found.group(1)}/rank"
    raise ValueError


def _only_one(value: Any) -> int:
    if isinstance(value, bool) or value != 1 or not isinstance(value, int):
        raise ValueError
    return value


def _switch(value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError
    return value


Name = Annotated[
    str,
    Rule(
        _name,
        "letters, digits, . _ or -, at most 128 and not starting with . or -",
        lambda: {"type": "string", "pattern": f"^{NAME}$"},
    ),
]
Batch = Annotated[
    int | str,
    Rule(
        _batch,
        'a whole number above 0, or "N/rank"',
        lambda: {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[1-9][0-9]*/rank$"}]},
    ),
]
One = Annotated[int, Rule(_only_one, "1, the only value in this version", lambda: {"const": 1})]
Share = Annotated[float, Field(gt=0, lt=1)]
Sizes = PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
Switch = Annotated[
    Literal["auto", True, False], Rule(_switch, "auto, true or false", lambda: {"enum": ["auto", True, False]})
]


# The names of layers/backends.py, which this package must not import: it stays free of torch.
Attention = Literal[
    "auto",
    "cudnn",
    "flash",
    "efficient",
    "math",
    "ck",
    "flex",
    "varlen",
    "flash3",
    "flash4",
    "xformers",
    "reference",
]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    """The run itself: its name, its length and where it goes."""

    name: Name = Field(description="name of the run, and of its folder unless dir is given")
    dir: str | None = Field(default=None, min_length=1, description="run folder; runs/<name> if null")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of every random draw")
    steps: RunLength = Field(description="length of the run in steps, samples or epochs")
    time_limit: Clock | None = Field(default=None, description="stop, ready to continue, after this long")
    deterministic: bool = Field(default=False, description="use deterministic kernels only")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is one")
    stop_after_skips: PositiveInt = Field(default=10, description="fail after this many non-finite steps in a row")
    hang_limit: Clock = Field(default=60, description="end when no step passes for this long, or for 10 usual steps")


class Augment(Section):
    """Changes to a crop that leave its meaning as it is."""

    orientations: bool = Field(default=False, description="flip and turn crops at random")


class Statistics(Section):
    """Mean and standard deviation of each variable, given instead of measured."""

    mean: Annotated[tuple[float, ...], Field(min_length=1)]
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]


class Data(Section):
    """Where samples come from and how they are cut, batched and read."""

    train: Annotated[tuple[Any, ...], Field(min_length=1)] = Field(description="sources to train on")
    valid: tuple[Any, ...] = Field(default=(), description="sources to evaluate on")
    crop: Sizes = Field(description="size of a sample in voxels, one number or one per axis")
    batch: Batch = Field(description='samples of one step over all ranks, or "N/rank" for each data-parallel rank')
    micro_batch: PositiveInt | None = Field(
        default=None, description="samples per rank and pass; gradients are accumulated"
    )
    augment: Augment = Augment()
    normalize: Literal["fit", "none"] | Statistics = Field(
        default="fit", description="fit measures mean and std of the data"
    )
    reuse: PositiveInt | None = Field(
        default=None, description="crops cut from one super-block before the next is read; 4 for volumes, 1 for images"
    )
    lanes: PositiveInt | None = Field(default=None, description="super-blocks sampled from in turn")
    block: Sizes | None = Field(default=None, description="size of a super-block in voxels")
    workers: Annotated[int, Field(ge=0)] | None = Field(default=None, description="reading threads per rank")
    prefetch: PositiveInt = Field(default=2, description="batches read ahead")
    cache_mib: Annotated[int, Field(ge=0)] = Field(default=512, description="memory for read blocks, in MiB per rank")

    def global_batch(self, ranks: int) -> int:
        """Samples of one step over `ranks` data-parallel ranks."""
        return self.batch if isinstance(self.batch, int) else int(self.batch.partition("/")[0]) * ranks


class Init(Section):
    """Weights that a new run starts from."""

    path: str = Field(min_length=1, description="a run folder, a checkpoint, or a .safetensors, .pt or .bin file")
    adapter: Literal["auto", "vitrail", "timm", "mae", "hf", "dit", "monai"] = Field(
        default="auto", description="where the weights come from; auto finds out by their names"
    )
    only: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="parts of the model to load, such as encoder; all that fit if empty"
    )
    head: Switch = Field(default=True, description="load the classifier too; auto where the classes are as many")
    strict: bool = Field(default=True, description="refuse weights that would compute something else here")


class EMA(Section):
    """A running average of the weights, used for evaluation."""

    decay: Share = Field(default=0.999, description="weight of the past at each step")


class Parallel(Section):
    """How the model and its state are spread over ranks."""

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "DDP"] = "FULL_SHARD"
    group: PositiveInt | None = Field(
        default=None, description="ranks that share one copy of the model, with HYBRID_SHARD"
    )
    tensor: One = 1
    context: One = 1
    pipeline: One = 1
    recompute: Literal["none", "full"] = Field(default="none", description="full trades computation for memory")
    compile: Switch = Field(default="auto", description="compile the blocks; auto does so where it helps")
    attention: Attention = Field(default="auto", description="kernel of attention; auto picks by shape and hardware")


class Precision(Section):
    """Number formats."""

    compute: Literal["auto", "bf16", "fp32"] = Field(default="auto", description="auto is bf16 on a GPU, fp32 on a CPU")
    reduce: Literal["fp32", "bf16"] = Field(default="fp32", description="format of gradients between ranks")


class Checkpoint(Section):
    """When the state of a run is stored."""

    every: EveryOrOff = Field(default="10%", description="off saves only when the run is stopped")
    keep: PositiveInt = Field(default=2, description="newest checkpoints kept")
    best: str | None = Field(
        default=None, description="metric whose best checkpoint is kept too; null is the objective's own"
    )
    background: bool = Field(default=True, description="write while training goes on")


class Eval(Section):
    """When and on how much the run is evaluated."""

    every: Every = "10%"
    samples: PositiveInt = 64


class Log(Section):
    """What a run shows, and how often."""

    every: Every = 10
    pictures: Every = "25%"
    activations: EveryOrOff = Field(default="10%", description="size of the activations of each block; off for none")
    tensorboard: Switch = "auto"
    profile: Literal["off"] = "off"
