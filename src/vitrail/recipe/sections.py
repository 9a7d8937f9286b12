"""The sections of a recipe and their defaults; each is frozen and refuses keys that it does not have."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from vitrail.recipe import normalize as ways
from vitrail.recipe.durations import Clock, Every, EveryOrOff, Rule, RunLength, SaveEvery

MOST_PROFILED = 100  # steps: a trace holds everything that was done in them
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


def _ranks(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
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
Ranks = Annotated[
    int,
    Rule(
        _ranks,
        "a number of ranks above 0, or -1 for all that the other axes leave",
        lambda: {"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}]},
    ),
]
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
    "flash4",
    "xformers",
    "reference",
]


# What a block computes, by name: results that may be kept for the backward or computed again (layers/block.py).
Role = Literal["qkv", "attention", "proj", "gate", "fc1", "fc2"]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Section):
    """The run itself: its name, its length and where it goes."""

    name: Name = Field(description="name of the run, and of its folder unless dir is given")
    dir: str | None = Field(default=None, min_length=1, description="run folder; runs/<name> if null")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of every random draw")
    steps: RunLength = Field(description="length of the run in steps, samples or epochs")
    patience: PositiveInt | None = Field(
        default=None, description="stop early: after so many evaluations whose score was not the best so far"
    )
    time_limit: Clock | None = Field(default=None, description="stop, ready to continue, after this long")
    deterministic: bool = Field(default=False, description="use deterministic kernels only")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is one")
    stop_after_skips: PositiveInt = Field(default=10, description="fail after this many non-finite steps in a row")
    hang_limit: Clock = Field(default=60, description="end when no step passes for this long, or for 10 usual steps")


def _range(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        raise ValueError
    if not 0 < value[0] <= value[1] < float("inf"):
        raise ValueError
    return float(value[0]), float(value[1])


Range = Annotated[
    tuple[float, float],
    Rule(
        _range,
        "two numbers above 0, the smaller first, such as [0.8, 1.25]",
        lambda: {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        list,
    ),
]
Chance = Annotated[float, Field(ge=0, le=1)]
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AxisName = Annotated[str, Field(min_length=1)]


class Elastic(Section):
    """Smooth bends of a crop."""

    amplitude: Annotated[float, Field(gt=0, le=1000)] = Field(description="most that a voxel moves, in voxels")
    grid: PositiveInt = Field(default=4, description="free bends along each axis; more are finer")


class Artefacts(Section):
    """What goes wrong with single sections of electron microscopy, each with a probability a section."""

    missing: Chance = Field(default=0.0, description="black, or as bright as the mean of the data")
    shifted: Chance = Field(default=0.0, description="moved sideways: that one, or all from there on")
    blurred: Chance = Field(default=0.0, description="out of focus")
    axis: AxisName | None = Field(default=None, description="across which sections were cut; the first if null")
    shift: PositiveInt = Field(default=4, description="most voxels that a section is moved by")
    blur: Annotated[float, Field(gt=0, le=20)] = Field(default=2.0, description="most blur, as a standard deviation")


class ResizedCrop(Section):
    """A box of the whole image, drawn anew each time and resized to the crop."""

    scale: Range = Field(default=(0.08, 1.0), description="share of the image's area or volume")
    ratio: Range = Field(default=(0.75, 1.3333), description="of the sides of the box")

    @model_validator(mode="after")
    def _inside(self) -> ResizedCrop:
        if self.scale[1] > 1:
            raise ValueError(f"scale: {list(self.scale)} is more than the whole image; end at 1 or before")
        return self


class Jitter(Section):
    """Changes of colour, each by a random amount up to the one given."""

    brightness: Strength = 0.0
    contrast: Strength = 0.0
    saturation: Strength = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = Field(default=0.0, description="0.5 is any hue")


class Augment(Section):
    """Changes to a crop that leave its meaning as it is."""

    orientations: bool = Field(default=False, description="flip and turn crops at random")
    flip: bool | tuple[AxisName, ...] = Field(default=False, description="mirror along every axis, or those named")
    rotate: Annotated[float, Field(ge=0, le=180)] = Field(default=0.0, description="degrees; 180 is any rotation")
    rotate_axes: tuple[AxisName, ...] = Field(default=(), description="axes to turn about; any direction if empty")
    scale: Range | None = Field(default=None, description="things appear so many times as large")
    shear: Annotated[float, Field(ge=0, le=60)] = Field(default=0.0, description="degrees")
    elastic: Elastic | None = Field(default=None, description="smooth bends")
    chance: Chance = Field(default=1.0, description="share of the samples that flip to elastic apply to")
    resized_crop: ResizedCrop | None = Field(default=None, description="boxes of whole images instead of crops")
    gamma: Range | None = Field(default=None, description="exponents of intensity")
    contrast: Range | None = Field(default=None, description="factors of the distance from the mean")
    brightness: Strength = Field(default=0.0, description="most that is added, in standard deviations of the data")
    noise: Strength = Field(default=0.0, description="most Gaussian noise, in standard deviations of the data")
    blur: Range | None = Field(default=None, description="standard deviations of Gaussian blur, in voxels")
    sections: Artefacts | None = Field(default=None, description="missing, shifted and blurred sections")
    jitter: Jitter | None = Field(default=None, description="changes of colour")
    mixup: Strength = Field(default=0.0, description="alpha of mixing two samples and their classes; 0 for none")
    cutmix: Strength = Field(default=0.0, description="alpha of pasting a box of one sample into another; 0 for none")
    more: tuple[Any, ...] = Field(
        default=(), description="augmentations of plugins, in order: their names, or mappings with kind and options"
    )

    @model_validator(mode="after")
    def _fits(self) -> Augment:
        if self.blur is not None and self.blur[1] > 20:
            raise ValueError(f"blur: {list(self.blur)} is wider than 20 voxels; blur less")
        if self.resized_crop is not None and self.scale is not None:
            raise ValueError("resized_crop and scale both choose the size; give one of them")
        if self.rotate_axes and not self.rotate:
            raise ValueError("rotate_axes turn nothing without rotate; say by how many degrees")
        return self


Overlap = Annotated[float, Field(ge=0, lt=1)]


class Tiles(Section):
    """Every part of the data once an epoch, instead of crops at random places."""

    overlap: Overlap | Annotated[tuple[Overlap, ...], Field(min_length=1)] = Field(
        default=0.0, description="share of a tile that the next one covers too, one number or one per axis"
    )
    edges: bool = Field(default=True, description="move the last tile back to the border, else leave the rest out")


class Fit(Section):
    """Images of many sizes, brought to one by a rule that draws nothing."""

    resize: PositiveInt | tuple[PositiveInt, PositiveInt] = Field(
        description="pixels of the shorter side; or y and x, to which images are squashed or stretched"
    )
    crop: Literal["centre"] = Field(default="centre", description="which part of it is taken")


class Filter(Section):
    """Leaves out samples with too little in them."""

    by: Annotated[str, Field(min_length=1)] = Field(description="labels, or the name of a variable")
    above: float = Field(default=0.0, description="a voxel counts where it is larger than this")
    share: Annotated[float, Field(gt=0, le=1)] = Field(default=0.05, description="least share of voxels that count")


class Balance(Section):
    """Data-parallel ranks that each read from one entry of data.train alone."""

    ranks: PositiveInt = Field(description="ranks to share out; any number may compute them")
    groups: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = Field(
        default=None, description="ranks of each entry; by the number of their samples if null"
    )
    batches: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = Field(
        default=None, description="batches of each entry's ranks in an epoch; as many as they have if null"
    )

    @model_validator(mode="after")
    def _adds_up(self) -> Balance:
        if self.groups is not None and sum(self.groups) != self.ranks:
            raise ValueError(f"groups: {list(self.groups)} are {sum(self.groups)} ranks, not {self.ranks}")
        return self


class Stage(Section):
    """A fast disk of each node that the needed files are copied to before the run."""

    dir: Annotated[str, Field(min_length=1)] = Field(description="a folder on that disk; $VARIABLES are filled in")
    limit_gib: Annotated[float, Field(gt=0)] = Field(default=100, description="most that is kept there, in GiB")


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
    tiles: Tiles | None = Field(default=None, description="every part of the data once an epoch, not random crops")
    fit: Fit | None = Field(default=None, description="bring images of many sizes to one")
    filter: Filter | None = Field(default=None, description="leave out samples with too little in them")
    mix: Literal["size", "equal", "weights"] = Field(
        default="size", description="share of each entry: by its size times its weight, the same, or its weight alone"
    )
    balance: Balance | None = Field(default=None, description="give each entry ranks of its own")
    normalize: Annotated[Literal["fit", "none"] | ways.Kind, BeforeValidator(ways.spelt)] = Field(
        default="fit", description="fit measures mean and std of the data"
    )
    statistics: Literal["shared", "each", "volume"] = Field(
        default="shared", description="normalise all entries alike, or each entry or volume by its own statistics"
    )
    one_variable: bool = Field(
        default=False, description="batches have one variable each; those of an entry take turns step by step"
    )
    reuse: PositiveInt | None = Field(
        default=None, description="crops cut from one super-block before the next is read; 4 for volumes, 1 for images"
    )
    lanes: PositiveInt | None = Field(default=None, description="super-blocks sampled from in turn")
    block: Sizes | None = Field(default=None, description="size of a super-block in voxels")
    workers: Annotated[int, Field(ge=0, le=4096)] | None = Field(default=None, description="reading threads per rank")
    prefetch: PositiveInt = Field(default=2, description="batches read ahead")
    cache_mib: Annotated[int, Field(ge=0)] = Field(
        default=512, description="memory for read blocks, or for the batches of a visit to them, in MiB per rank"
    )
    bad: Literal["error", "skip", "fill"] = Field(
        default="error", description="what data that cannot be used do: end the run, give way to others, or be filled"
    )
    most_bad: Annotated[int, Field(ge=0)] = Field(
        default=100, description="samples a rank may skip in a run, with bad: skip"
    )
    retries: Annotated[int, Field(ge=0)] = Field(default=3, description="times a read that failed is tried again")
    read_limit: Clock = Field(default=120, description="end the run when reading a sample takes longer")
    stage: Stage | None = Field(default=None, description="copy what is read to a disk of the node first")

    def global_batch(self, ranks: int) -> int:
        """Count the samples of one step over `ranks` data-parallel ranks."""
        return self.batch if isinstance(self.batch, int) else int(self.batch.partition("/")[0]) * ranks


class Init(Section):
    """Weights that a new run starts from."""

    path: str = Field(min_length=1, description="a run folder, a checkpoint, or a .safetensors, .pt or .bin file")
    adapter: Literal[
        "auto",
        "vitrail",
        "timm",
        "mae",
        "hf",
        "dit",
        "sit",
        "diffusers",
        "monai",
        "ucf",
        "torchditan",
        "torchtitan-mae",
    ] = Field(default="auto", description="where the weights come from; auto finds out by their names")
    only: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="parts of the model to load, such as encoder; all that fit if empty"
    )
    head: Switch = Field(default=True, description="load the classifier too; auto where the classes are as many")
    strict: bool = Field(default=True, description="refuse weights that would compute something else here")


class EMA(Section):
    """A running average of the weights, used for evaluation."""

    decay: Share = Field(default=0.999, description="weight of the past at each step")


class Recompute(Section):
    """Which activations are computed again in the backward instead of kept; one of the keys decides."""

    every: PositiveInt | None = Field(default=None, description="every n-th block in full")
    keep: tuple[Role, ...] | None = Field(
        default=None, description="every block but for the outputs of these roles, which are kept"
    )
    budget: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="of the memory that no recomputation needs; roles are chosen to stay below it"
    )

    @model_validator(mode="after")
    def _one_key(self) -> Recompute:
        given = [name for name in ("every", "keep", "budget") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of every, keep and budget, not {' and '.join(given) or 'none of them'}")
        return self


class Prefetch(Section):
    """How many groups of parameters are gathered ahead of the one that computes."""

    forward: Annotated[int, Field(ge=0)] = Field(default=0, description="0 leaves it to the order of the calls")
    backward: Annotated[int, Field(ge=0)] = Field(default=1, description="0 gathers each group when it is needed")


class Chunk(Section):
    """Parts of the model that see a sequence piece by piece, so that very long ones need less memory."""

    mlp: PositiveInt | None = Field(default=None, description="tokens of a piece in the MLPs; null for all at once")
    head: PositiveInt | None = Field(default=None, description="tokens of a piece in the heads that predict voxels")


class Parallel(Section):
    """How the model, its state and its sequences are spread over ranks."""

    strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "DDP"] | None = Field(
        default=None, description="a name for replicate, shard and reshard; FULL_SHARD unless these are given"
    )
    group: PositiveInt | None = Field(
        default=None, description="ranks that share one copy of the model, with HYBRID_SHARD"
    )
    replicate: Ranks | None = Field(default=None, description="copies of the model, instead of a strategy")
    shard: Ranks | None = Field(default=None, description="ranks that share a copy, instead of a strategy")
    reshard: bool | None = Field(
        default=None, description="free gathered parameters after the forward, instead of a strategy"
    )
    tensor: Ranks = Field(default=1, description="ranks that share the heads and hidden channels of each block")
    context: Ranks = Field(default=1, description="ranks that share the tokens of each sample")
    pipeline: Ranks = Field(default=1, description="ranks that share the depth of the model")
    ulysses: PositiveInt | None = Field(
        default=None, description="context ranks that trade heads, the rest form rings; as many as heads allow if null"
    )
    schedule: Literal["1F1B", "GPipe", "interleaved"] = Field(default="1F1B", description="order of a pipeline's work")
    stages: PositiveInt | None = Field(
        default=None, description="pipeline stages a rank; 2 with interleaved, else 1, if null"
    )
    split: Literal["measured"] | tuple[PositiveInt, ...] = Field(
        default="measured", description="where the pipeline is cut: by measured cost, or so many steps a stage"
    )
    wrap: PositiveInt = Field(default=1, description="blocks whose parameters are gathered and reduced together")
    bucket_mib: PositiveInt | None = Field(
        default=None, description="least gradients that replicas exchange at once, with DDP and NO_SHARD"
    )
    prefetch: Prefetch = Prefetch()
    offload: bool = Field(default=False, description="keep parameters, gradients and optimizer state on the host")
    recompute: Literal["none", "full"] | Recompute = Field(
        default="none", description="trades computation for memory; full, or a choice"
    )
    chunk: Chunk = Chunk()
    compile: Switch = Field(default="auto", description="compile the blocks; auto does so where it helps")
    attention: Attention = Field(default="auto", description="kernel of attention; auto picks by shape and hardware")
    replay: Switch = Field(
        default="auto", description="launch the kernels of a step as one CUDA graph; auto where one GPU has room for it"
    )


class Precision(Section):
    """Number formats."""

    compute: Literal["auto", "bf16", "fp32", "float8"] = Field(
        default="auto", description="auto is bf16 on a GPU, fp32 on a CPU; float8 is bf16 with float8 products"
    )
    reduce: Literal["fp32", "bf16"] = Field(default="fp32", description="format of gradients between ranks")
    float8_layers: Literal["auto", "all"] = Field(
        default="auto", description="layers that compute float8 is for; auto: those that would be faster"
    )


class Checkpoint(Section):
    """When the state of a run is stored."""

    every: SaveEvery = Field(
        default="10%", description='a duration, or a clock such as "30m"; off saves only when the run is stopped'
    )
    keep: PositiveInt | Literal["all"] = Field(default=2, description="newest checkpoints kept, or all")
    best: str | None = Field(
        default=None,
        description="metric whose best checkpoint is kept too (an evaluation that is the best so far saves one); "
        "null is the objective's own",
    )
    background: bool = Field(default=True, description="write while training goes on")


class Eval(Section):
    """When and on how much the run is evaluated."""

    every: Every = "10%"
    samples: PositiveInt | Literal["auto"] = Field(
        default="auto", description="held-out samples; auto: every item or tile once up to 512, 64 of random crops"
    )
    tiles: Tiles | None = Field(
        default=None, description="tiles that cover held-out data, instead of data.tiles or crops at random places"
    )
    blend: Literal["gaussian", "constant"] = Field(
        default="gaussian", description="what voxels of overlapping tiles count: most in a tile's middle, or the same"
    )


class Profile(Section):
    """Steps whose time is taken apart, and snapshots of a GPU's memory."""

    steps: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="the first and the last step to look at, as `metrics.jsonl` counts them"
    )
    ranks: Literal["all"] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = Field(
        default=(0,), description="ranks that are looked at, or all"
    )
    memory: bool = Field(
        default=False, description="snapshots of a GPU's memory: after these steps, and where it runs out"
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Profile:
        if self.steps is None and not self.memory:
            raise ValueError("give steps, such as [10, 15], or memory: true")
        first, last = self.steps or (1, 1)
        if last < first or last - first >= MOST_PROFILED:
            raise ValueError(f"steps: expected a first and a last step, at most {MOST_PROFILED}, not {[first, last]}")
        return self


class Log(Section):
    """What a run shows, and how often."""

    every: Every = 10
    pictures: EveryOrOff = Field(default="25%", description="held-out samples, drawn; off for none")
    slices: PositiveInt = Field(default=8, description="of each volume in a picture, beside its three middle planes")
    variables: tuple[str, ...] | None = Field(default=None, description="which ones pictures show, in this order")
    activations: EveryOrOff = Field(default="10%", description="size of the activations of each block; off for none")
    to: Any = Field(
        default="auto",
        description="loggers beside metrics.jsonl: their names, or mappings with kind and options; "
        "auto is TensorBoard where it is installed",
    )
    report: bool = Field(default=True, description="a page at evaluations and at the end, as of `vitrail report`")
    profile: Literal["off"] | Profile = Field(
        default="off", description="a trace of some steps and where their time went; or off"
    )
