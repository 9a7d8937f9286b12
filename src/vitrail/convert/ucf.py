"""UCF-VIT: a YAML file for each run, of the layout that its README documents, or of its main branch's newer one."""

from __future__ import annotations

from typing import Any

from vitrail.convert.engine import Given, Keys, Line, Made, Make, NotHonoured, Table, code, drop, has, to, unless

TASKS = {  # folder of the configs, type of the newer layout: the model and the objective here
    "classification": ("vit", "classify"),
    "mae": ("mae", "reconstruct"),
    "unetr": ("unetr", "segment"),
    "sap": ("sap", "segment"),
    "diffusion": ("diffusion_vit", "denoise"),
}
TYPES = {"VIT": "classification", "MAE": "mae", "UNETR": "unetr", "SAP": "sap", "DiffusionVIT": "diffusion"}
SOURCES = {"imagenet": "image_folder", "catsdogs": "image_folder", "basic_ct": "nifti", "xct": "numpy"}
RESIZED = ("imagenet", "catsdogs")  # datasets whose images become as large as a tile
NET = "model.net.init_args."
MOST_CLASSES = 1000  # of voxels, of which each has a line in the recipe


# ------------------------------------------------------------ what the lines ask


def sides(given: Given) -> list[int]:
    """Return the size of a tile along each axis of the stored data."""
    size = given(NET + "tile_size")
    divided = given("tiling.div", 1) if given("tiling.do_tiling") else 1
    return [int(side) // int(divided) for side in size]


def is_adaptive(given: Given) -> bool:
    return bool(given(NET + "adaptive_patching", False))


def is_sliced(given: Given) -> bool:
    """Whether samples are slices of volumes."""
    return len(sides(given)) == 3 and bool(given(NET + "twoD", True))


def is_nifti(given: Given) -> bool:
    """Whether volumes are NIfTI files, whose axes x, y, z are read here as z, y, x; other arrays as they are stored."""
    return SOURCES.get(given("data.dataset")) == "nifti"


def is_sharded(given: Given) -> bool:
    """Whether the script is one for its fsdp mode: these alone shard, split tensors and compute in bfloat16."""
    more = [int(given(f"parallelism.{name}", 1)) for name in ("fsdp_size", "tensor_par_size")]
    return max(more) > 1 or given("trainer.data_type") == "bfloat16"


def entries(given: Given) -> dict[str, str]:
    """Return the number in `data.train` of each dataset."""
    return {name: str(number) for number, name in enumerate(given("data.dict_root_dirs"))}


def at(task: str) -> str:
    """Return where the encoder's keys are in the model of a task."""
    return "model." if task == "classification" else "model.encoder."


def encoder(name: str, why: str = "") -> Make:
    return lambda value, given: ({at(given.task) + name: value}, why)


def only(*tasks: str, make: Make) -> Make:
    """Return a rule for models that have this part."""

    def rule(value: Any, given: Given) -> Made:
        if given.task not in tasks:
            return {}, f"{given.task} has no such part, there and here"
        return make(value, given)

    return rule


def where(*tasks: str, make: Make) -> Make:
    """Return a rule for what is in the code of these models alone."""
    return lambda value, given: make(value, given) if given.task in tasks else None


def each(name: str, value_of: Any = lambda value: value, why: str = "") -> Make:
    """Return a rule for a mapping from datasets to values: a key of each entry of data.train."""

    def make(value: Any, given: Given) -> Made:
        place = entries(given)
        return {f"data.train.{place[data]}.{name}": value_of(item) for data, item in value.items()}, why

    return make


# ------------------------------------------------------------ model


def model(value: Any, given: Given) -> Made:
    kind, objective = TASKS[given.task]
    keys: Keys = {"model.kind": kind, "model.ndim": 2 if is_sliced(given) else len(sides(given))}
    keys["objective.kind"] = objective
    if given.task == "classification":
        keys |= {"model.cls_token": True, "model.pool": "cls"}
    return keys, ""


def crop(value: Any, given: Given) -> Made:
    size = sides(given)
    if len(size) == 3:
        size = size[:2] if is_sliced(given) else size
        size = size[::-1] if is_nifti(given) else size
    return {"data.crop": size[0] if len(set(size)) == 1 else size}, ""


def two_d(value: Any, given: Given) -> Made:
    if len(sides(given)) == 2 and not value:
        raise NotHonoured("tiles of two sides are of two dimensions")
    if not is_sliced(given):
        return {}, "the sizes of the tile tell"
    across = "z" if is_nifti(given) else "x"  # the last axis as it is stored
    return {f"data.train.{i}.slices": across for i in entries(given).values()}, ""


def patch(value: Any, given: Given) -> Made:
    if is_adaptive(given) and "ap.interp_size" in given:
        return {}, "ap.interp_size is the size of a token's patch with adaptive patching"
    return {at(given.task) + "patch": value}, ""


def interp_size(value: Any, given: Given) -> Made:
    return ({at(given.task) + "patch": value}, "") if is_adaptive(given) else ({}, "only with do_ap: True, there too")


def positions(value: Any, given: Given) -> Made:
    place = at(given.task)
    if not is_adaptive(given):
        why = "of adaptive tokens alone; other positions are learned tables that start as sines and cosines, here too"
        return {place + "positions": "learned"}, why if value else ""
    more: Keys = {place + "patch_norm": True, place + "patch_bias": True}  # which weights of all channels need
    theirs = more if given("trainer.use_pretrained_mae_model") and not given(NET + "use_varemb") else {}
    if value and theirs:
        return {place + "positions": "none", place + "tokens.told": "pixels", **theirs}, ""
    if value:
        return {place + "positions": "sincos"}, "of place and size in patches; there it was tokens.told: pixels"
    return {place + "positions": "learned", place + "tokens.told": "number", **theirs}, ""


def adaptive(value: Any, given: Given) -> Made:
    if not value:
        return {}, "uniform patches are the default"
    if given.task == "diffusion":
        raise NotHonoured("noise has no structure that a tree could follow; patches are uniform")
    name = at(given.task) + "tokens."
    keys = {name + "kind": "adaptive", name + "score.kind": "canny", name + "score.random": True}
    why = (
        "the tree of the original, put right: channels of a token stay together, padding is masked, leaves go on when "
        "the best one cannot be split"
    )
    return keys, why


def with_trees(name: str) -> Make:
    def make(value: Any, given: Given) -> Made:
        if not is_adaptive(given) or given.task == "diffusion":
            return {}, "only with adaptive patching, there too"
        return {at(given.task) + "tokens." + name: value}, ""

    return make


def separate_channels(value: Any, given: Given) -> Made:
    if value and is_adaptive(given) and not given(NET + "use_varemb"):
        raise NotHonoured("a tree for each channel needs tokens of single variables: use_varemb with single_channel")
    return with_trees("per_variable")(value, given) if value else ({}, "one tree for all channels is the default")


def variables(value: Any, given: Given) -> Made:
    if not value:
        return {}, "all channels of a patch are one token: the default"
    name = at(given.task) + "variables."
    known = given(NET + "default_vars")
    known = known or list(dict.fromkeys(name for names in given("data.dict_in_variables").values() for name in names))
    keys = {name + "known": known, name + "aggregate": "none" if given("data.single_channel") else "query"}
    why = "each variable has a tokenizer of its own, as the README says; in the original's fsdp mode all shared one"
    return keys, why


def default_vars(value: Any, given: Given) -> Made:
    if not given(NET + "use_varemb"):
        return {}, "only with use_varemb, there too; data.train names the channels"
    return {at(given.task) + "variables.known": value}, ""


def single_channel(value: Any, given: Given) -> Made:
    if not value:
        return {}, "a sample has all of its channels: the default"
    if all(len(names) == 1 for names in given("data.dict_in_variables", {"": [""]}).values()):
        return {}, "the data have one channel"
    tokens = {at(given.task) + "variables.aggregate": "none"} if given(NET + "use_varemb") else {}
    return {"data.one_variable": True, **tokens}, ""


def drop_rate(value: Any, given: Given) -> Made:
    if given.task == "classification":
        return {"model.head_dropout": value}, ""
    return unless(0, "there is nothing to drop out", "dropout is of the classifier's head alone")(value, given)


def linear_decoder(value: Any, given: Given) -> Made:
    if given.task == "unetr":
        return {"model.decoder": "linear" if value else "conv"}, ""
    other = {"mae": "self", "diffusion": "transformer"}[given.task]
    return {"model.decoder.kind": "linear" if value else other}, ""


def decoder(name: str) -> Make:
    def make(value: Any, given: Given) -> Made:
        if given.task == "unetr":
            return {}, "of the masked autoencoder whose weights may be taken; convolutions decode, there too"
        if given(NET + "linear_decoder"):
            return {}, "a linear decoder has none, there too"
        return {f"model.decoder.{name}": value}, ""

    return only("mae", "diffusion", "unetr", make=make)


def loss(value: Any, given: Given) -> Made:
    if given.task != "mae":
        return unless("MSE", "the squared error of the noise is the objective's own", "only MSE is known")(value, given)
    if value not in ("MSE", "maskMSE"):
        raise NotHonoured("only MSE and maskMSE are known; objective.on is hidden or all")
    if value == "maskMSE" and is_adaptive(given):
        why = "hidden tokens alone, as it says; the original scored all of them with adaptive patching, padding too"
        return {"objective.on": "hidden"}, why
    return {"objective.on": "all" if value == "MSE" else "hidden"}, ""


def segmentation(value: Any, given: Given) -> Made:
    if given.task == "sap":
        return {"objective.loss": "dice_bce"}, ""
    return {"objective.loss": "dice_ce", "objective.squared": True, "objective.smooth": [0.0, 1.0e-6]}, ""


# ------------------------------------------------------------ data


def roots(value: Any, given: Given) -> Made:
    kind = SOURCES.get(given("data.dataset"))
    keys: Keys = {}
    for name, number in entries(given).items():
        keys[f"data.train.{number}.path"] = value[name]
        if kind:
            keys[f"data.train.{number}.kind"] = kind
    return keys, ""


def dataset(value: Any, given: Given) -> Made:
    if value not in SOURCES:
        return {}, "the kind of a source is told by its path; add `kind` to data.train where it is not"
    return {f"data.train.{number}.kind": SOURCES[value] for number in entries(given).values()}, ""


def labels(value: Any, given: Given) -> Made:
    if given.task not in ("unetr", "sap"):
        return None
    if given("data.dataset") != "basic_ct":
        return {}, "classes as they are stored; data.train.label_map says otherwise, as code for these data may have"
    classes = int(given("data.num_classes"))
    if classes > MOST_CLASSES:
        raise NotHonoured(f"more than {MOST_CLASSES} classes of voxels; give data.train.label_map yourself")
    keys: Keys = {}
    for number in entries(given).values():
        keys[f"data.train.{number}.label_map"] = {str(stored): stored - 1 for stored in range(1, classes + 1)}
    return keys, "labels are stored from 1 in Basic_CT, and the original took 1 from each"


def classes(value: Any, given: Given) -> Made:
    if given("data.dataset") != "catsdogs" or given.task != "classification":
        return None
    return {f"data.train.{number}.class_pattern": r"(?P<class>cat|dog)\." for number in entries(given).values()}, ""


def in_variables(value: Any, given: Given) -> Made:
    if not all(isinstance(names, list) for names in value.values()):
        raise NotHonoured("expected a list of names for each dataset")
    used = given("data.num_channels_used", {})
    place = entries(given)
    names = {data: list(names)[: int(used.get(data, len(names)))] for data, names in value.items()}
    return {f"data.train.{place[data]}.variables": list(kept) for data, kept in names.items()}, ""


def channels_used(value: Any, given: Given) -> Made:
    if "data.dict_in_variables" in given:
        return in_variables(given("data.dict_in_variables"), given)
    return {}, "as many as the data have"


def channels(value: Any, given: Given) -> Made:
    """The number of channels, so that the recipe can be planned where the data are not."""
    made = (in_variables(given("data.dict_in_variables"), given) or ({}, ""))[0]
    counts = {1 if given("data.single_channel") else len(names) for names in made.values()}
    return None if given(NET + "use_varemb") or len(counts) != 1 else ({"model.channels": counts.pop()}, "")


def tiled(name: str, why: str) -> Make:
    def make(value: Any, given: Given) -> Made:
        if given("data.dataset") in RESIZED:
            return {}, f"images are resized to the tile, so {why}"
        return {f"data.tiles.{name}": value}, ""

    return make


def resized(value: Any, given: Given) -> Made:
    sizes = {int(side) for size in value.values() for side in size}
    if len(sizes) > 1:
        raise NotHonoured("one size for both sides and all entries is known; write data.fit.resize: [y, x]")
    if given("data.dataset") not in RESIZED:
        return {}, "data of this kind are not resized, there too"
    return {"data.fit.resize": [sizes.pop()] * 2}, ""


def unstated_fit(value: Any, given: Given) -> Made:
    if "dataset_options.imagenet_resize" in given or given("data.dataset") != "catsdogs":
        return None
    return {"data.fit.resize": sides(given)}, ""


def normalized(value: Any, given: Given) -> Made:
    if given("data.dataset") == "imagenet":
        return {"data.normalize": "none"}, ""
    if given("data.dataset") == "basic_ct":
        return {"data.normalize": {"kind": "minmax", "to": [0.0, 1.0]}, "data.statistics": "volume"}, ""
    there = "pixels stayed at 0 to 255" if given("data.dataset") == "catsdogs" else "each dataset has code of its own"
    return {"data.normalize": "fit"}, f"the data's mean and std become 0 and 1; there {there}"


def split(value: Any, given: Given) -> Made:
    """The shares that the newer layout keeps for validation and for a test, at the end of the files."""
    valid, test = (float(given(f"data.{name}_split_ratio", 0)) for name in ("val", "test"))
    asked = (
        (roots, "data.dict_root_dirs"),
        (two_d, NET + "twoD"),
        (in_variables, "data.dict_in_variables"),
        (labels, ""),
    )
    alike: Keys = {}
    for make, name in asked:
        alike |= (make(given(name, {}), given) or ({}, ""))[0]
    keys: Keys = {key.replace("data.train.", "data.valid."): item for key, item in alike.items()} if valid else {}
    for data, number in entries(given).items():
        start, end = (float(given(f"data.dict_{side}_idx", {}).get(data, side == "end")) for side in ("start", "end"))
        kept = end - (end - start) * (valid + test)
        keys[f"data.train.{number}.end"] = round(kept, 6)
        if valid:
            last = kept + (end - start) * valid
            keys |= {f"data.valid.{number}.start": round(kept, 6), f"data.valid.{number}.end": round(last, 6)}
    return keys, ""


def end_index(value: Any, given: Given) -> Made:
    return split(value, given) if "data.val_split_ratio" in given else each("end")(value, given)


def balance(value: Any, given: Given) -> Made:
    if len(entries(given)) == 1:
        return {}, "there is one dataset, and every rank reads of all of it"
    if not value:
        return {}, "load_balancing.dataset_group_list says how"
    ranks = int(given("parallelism.fsdp_size", 1)) * int(given("parallelism.simple_ddp_size", 1))
    return {"data.balance.ranks": ranks}, "shared out by the samples that there are, not by those of a first file"


def groups(value: Any, given: Given) -> Made:
    numbers = [int(word) for word in str(value).split(":")]
    if len(entries(given)) == 1 or given("load_balancing.auto_load_balancing"):
        return {}, "one dataset, or shared out by itself, there too; every rank reads of all files"
    if len(numbers) != len(entries(given)):
        raise NotHonoured("there should be a number of ranks for each dataset")
    return {"data.balance.ranks": sum(numbers), "data.balance.groups": numbers}, ""


def batches(value: Any, given: Given) -> Made:
    if len(entries(given)) == 1 or given("load_balancing.auto_load_balancing"):
        return {}, "counted by itself"
    return {"data.balance.batches": [value[name] for name in entries(given)]}, ""


# ------------------------------------------------------------ training


def epochs(value: Any, given: Given) -> Made:
    if "model.max_steps" in given:
        why = (
            "a run ends once, here with model.max_steps, where the rate is lowest; in the original it rose again up to "
            f"epoch {value}. run.steps='{value} epochs' trains for as long"
        )
        return {}, why
    return {"run.steps": f"{value} epochs"}, ""


def betas(value: Any, given: Given) -> Made:
    return {"optimizer.betas": [given("model.beta_1"), given("model.beta_2")]}, ""


def layout(value: Any, given: Given) -> Made:
    shard, copies = (int(given(f"parallelism.{name}", 1)) for name in ("fsdp_size", "simple_ddp_size"))
    if shard > 1 and copies > 1:
        return {"parallel.strategy": "HYBRID_SHARD", "parallel.group": shard}, ""
    return {"parallel.strategy": "FULL_SHARD" if shard > 1 else "NO_SHARD" if is_sharded(given) else "DDP"}, ""


def copies(value: Any, given: Given) -> Made:
    return {}, f"as many ranks as the launcher starts: {value} copies there. Start as many for the same batch"


def recompute(value: Any, given: Given) -> Made:
    return ({"parallel.recompute": "full"}, "") if is_sharded(given) else None


def reduce(value: Any, given: Given) -> Made:
    return {"precision.reduce": "bf16" if given("trainer.data_type") == "bfloat16" else "fp32"}, ""


def unsaid(value: Any, given: Given) -> Made:
    """What the original ends with an error without, where the recipe has a default that says something else."""
    asked = ["model.lr", "model.weight_decay"]
    asked += ["model.warmup_steps"] * ("scheduler.warmup_epochs" not in given)
    asked += ["model.loss_fn", NET + "mask_ratio"] * (given.task == "mae")
    if missing := [key for key in asked if key not in given]:
        raise NotHonoured(f"{', '.join(missing)}: the recipe's own default, as the file does not say")
    return None


def pretrained(value: Any, given: Given) -> Made:
    if not value:
        return {}, "weights start at random: the default"
    folder = str(given("trainer.mae_checkpoint_path", given("trainer.checkpoint_path", ".")))
    path = f"{folder.rstrip('/')}/{given('trainer.mae_checkpoint_filename')}.ckpt"
    return {"init.path": path, "init.only": ["encoder"], "init.strict": False}, ""


_START = "`vitrail train` with the same recipe goes on where the run stopped"
_FOLDER = "a run has a folder of its own: run.dir, or runs/NAME"
_TYPES = unless("AdamW", "optimizer.kind, adamw by itself", "only AdamW is known")

LINES = (
    code("name", lambda value, given: ({"run.name": f"{given('data.dataset', 'ucf')}-{given.task}"}, "")),
    Line("model.type", drop("model.kind and objective.kind")),
    code("model and script", model),
    # the encoder
    Line(NET + "default_vars", default_vars, many=True),
    Line(NET + "tile_size", crop, many=True),
    Line("tiling.do_tiling", lambda value, given: crop(value, given) if value else ({}, "the whole image is a sample")),
    Line("tiling.div", drop("in data.crop")),
    Line(NET + "twoD", two_d, True),
    Line(NET + "patch_size", patch),
    Line("ap.interp_size", interp_size),
    Line(NET + "embed_dim", encoder("width")),
    Line(NET + "depth", encoder("depth")),
    Line(NET + "num_heads", encoder("heads")),
    Line(NET + "mlp_ratio", encoder("mlp_ratio"), 4),
    Line(NET + "drop_path", encoder("drop_path"), 0.0),
    Line(NET + "drop_rate", drop_rate),
    Line(NET + "use_varemb", variables),
    Line(NET + "adaptive_patching", adaptive),
    Line(NET + "fixed_length", with_trees("length")),
    Line(NET + "separate_channels", separate_channels),
    Line(NET + "use_adaptive_pos_emb", positions, True),
    # what comes after it
    Line(NET + "linear_decoder", only("mae", "unetr", "diffusion", make=linear_decoder), False),
    Line(NET + "decoder_embed_dim", decoder("width")),
    Line(NET + "decoder_depth", decoder("depth")),
    Line(NET + "decoder_num_heads", decoder("heads")),
    Line(NET + "mlp_ratio_decoder", decoder("mlp_ratio")),
    Line(NET + "mask_ratio", only("mae", make=to("model.mask.ratio"))),
    Line(NET + "feature_size", only("unetr", make=to("model.features"))),
    Line(NET + "skip_connection", only("unetr", make=to("model.skips"))),
    Line(NET + "num_time_steps", only("diffusion", make=to("objective.steps"))),
    Line("data.num_classes", only("classification", "unetr", "sap", make=to("model.classes"))),
    Line("model.loss_fn", loss),
    code("loss of segmentation", where("unetr", "sap", make=segmentation)),
    code("random mask", where("mae", make=has("model.mask.kind", "random"))),
    code("noise is predicted", where("diffusion", make=has("objective.predict", "noise"))),
    code("noise of 1e-4 to 0.02", where("diffusion", make=has("objective.schedule", "linear"))),
    code(
        "dropout of half in the embedding of the time",
        where("diffusion", make=drop("without dropout, as in DDPM and DiT")),
    ),
    # data
    Line("data.dict_root_dirs", roots, many=True),
    Line("data.dataset", dataset),
    Line("data.dict_start_idx", each("start"), many=True),
    Line("data.dict_end_idx", end_index, many=True),
    Line("data.val_split_ratio", split),
    Line("data.test_split_ratio", split),
    Line(
        "data.dict_buffer_sizes",
        drop("tiles of an epoch are shuffled all together; there is no buffer to fill"),
        many=True,
    ),
    Line("data.num_channels_available", drop("the data tell"), many=True),
    Line("data.num_channels_used", channels_used, many=True),
    Line("data.dict_in_variables", in_variables, many=True),
    code("number of channels", channels),
    Line("data.single_channel", single_channel),
    code("labels of voxels", labels),
    code("cat or dog, by the name of the file", classes),
    Line("data.tile_overlap", tiled("overlap", "each is one tile")),
    Line("data.use_all_data", tiled("edges", "nothing is left over")),
    Line("dataset_options.imagenet_resize", resized, many=True),
    code("size of cats and dogs", unstated_fit),
    code("normalisation", normalized),
    Line("data.batch_size", lambda value, given: ({"data.batch": f"{value}/rank"}, "")),
    Line("data.num_workers", drop("as many reading threads as there are cores for (data.workers)")),
    Line("data.pin_memory", drop("always, on a GPU")),
    Line("dataloader.type", drop("there is one loader")),
    Line("load_balancing.auto_load_balancing", balance),
    Line("load_balancing.dataset_group_list", groups),
    Line("load_balancing.batches_per_rank_epoch", batches, many=True),
    # optimizer and schedule
    Line("trainer.max_epochs", epochs),
    Line("model.max_steps", to("run.steps")),
    Line("optimizer.type", _TYPES),
    Line("model.lr", to("optimizer.lr")),
    Line("model.beta_1", betas),
    Line("model.beta_2", betas),
    Line("model.weight_decay", to("optimizer.weight_decay")),
    code("weight decay of biases and norms", drop("they are spared; optimizer.groups can say otherwise")),
    code("no clipping of gradients", has("optimizer.clip", None)),
    code("cosine after a warm-up", has("schedule.kind", "cosine")),
    Line(
        "scheduler.type",
        unless("linear-warmup-cosine-annealing", "schedule.kind", "only linear-warmup-cosine-annealing is known"),
    ),
    Line("model.warmup_steps", to("schedule.warmup")),
    Line("scheduler.warmup_epochs", lambda value, given: ({"schedule.warmup": f"{value} epochs"}, "")),
    Line("model.warmup_start_lr", to("schedule.start")),
    Line("model.eta_min", to("schedule.end")),
    # ranks and numbers
    Line("parallelism.fsdp_size", layout, 1),
    Line("parallelism.simple_ddp_size", copies),
    Line("parallelism.tensor_par_size", to("parallel.tensor")),
    Line("parallelism.seq_par_size", to("parallel.context")),
    Line("parallelism.cpu_offloading", to("parallel.offload")),
    Line("trainer.data_type", to("precision.compute", float32="fp32", bfloat16="bf16")),
    code("format in which gradients are added", reduce),
    code("every block computed again, in its fsdp mode", recompute),
    Line("trainer.gpu_type", drop("found out by itself")),
    Line("trainer.use_grad_scaler", drop("bf16 and fp32 need no scaling of the loss")),
    Line("grad_scaler.init_scale", drop("no scaling of the loss")),
    Line("grad_scaler.min_scale", drop("no scaling of the loss")),
    Line("grad_scaler.growth_interval", drop("no scaling of the loss")),
    # checkpoints
    Line("trainer.save_frequency", lambda value, given: ({"checkpoint.every": f"{value} epochs"}, ""), 1),
    code("two checkpoints, even and odd", has("checkpoint.keep", 2)),
    Line("trainer.checkpoint_path", drop(_FOLDER)),
    Line("trainer.checkpoint_filename", drop(_FOLDER)),
    Line("trainer.checkpoint_filename_for_loading", drop(_START)),
    Line("trainer.resume_from_checkpoint", drop(_START)),
    Line("trainer.use_pretrained_mae_model", pretrained),
    Line("trainer.mae_checkpoint_path", drop("init.path, where use_pretrained_mae_model says so")),
    Line("trainer.mae_checkpoint_filename", drop("init.path, where use_pretrained_mae_model says so")),
    code("seed", has("run.seed", 0, "the original drew no seed")),
    code("missing in the file", unsaid),
)


def _aliases() -> dict[str, str]:
    """The newer layout's names of the same keys."""
    net = "embed_dim depth num_heads mlp_ratio drop_path drop_rate linear_decoder decoder_embed_dim decoder_depth "
    net += "decoder_num_heads mask_ratio feature_size skip_connection num_time_steps"
    found = {f"model.{name}": NET + name for name in net.split()}
    found |= {f"optimizer.{name}": f"model.{name}" for name in ("lr", "beta_1", "beta_2", "weight_decay")}
    found |= {
        f"scheduler.{name}": f"model.{name}" for name in ("warmup_steps", "max_steps", "warmup_start_lr", "eta_min")
    }
    found |= {f"ap.{name}": NET + name for name in ("fixed_length", "separate_channels", "use_adaptive_pos_emb")}
    found |= {f"tiling.{name}": f"data.{name}" for name in ("tile_overlap", "use_all_data")}
    loader = "dict_start_idx dict_end_idx dict_buffer_sizes batch_size num_workers pin_memory val_split_ratio "
    found |= {f"dataloader.{name}": f"data.{name}" for name in (loader + "test_split_ratio single_channel").split()}
    return found | {
        "ap.do_ap": NET + "adaptive_patching",
        "data.img_size": NET + "tile_size",
        "data.num_channels": "data.num_channels_used",
        "data.patch_size": NET + "patch_size",
        "data.twoD": NET + "twoD",
        "dataset_options.resize": "dataset_options.imagenet_resize",
        "grad_scaler.use_grad_scaler": "trainer.use_grad_scaler",
        "model.decoder_mlp_ratio": NET + "mlp_ratio_decoder",
        "model.num_classes": "data.num_classes",
        "model.use_channel_aggregation": NET + "use_varemb",
        "trainer.use_pretrained_model": "trainer.use_pretrained_mae_model",
        "trainer.pretrained_checkpoint_filename": "trainer.mae_checkpoint_filename",
        "model.use_grad_scaler": "trainer.use_grad_scaler",
    }


TABLE = Table("UCF-VIT", LINES, _aliases())
