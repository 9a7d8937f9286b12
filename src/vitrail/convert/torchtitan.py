"""torchtitan-mae and TorchDiTan: TOML files over torchtitan's settings, with defaults in the code of both."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from vitrail.convert.engine import Given, Keys, Line, Made, NotHonoured, Table, code, drop, has, to, unless

# Of torchtitan's ModelArgs: width, blocks, heads, heads of keys, hidden width.
MAE_FLAVORS = {"2B": (3072, 16, 32, 8, 11264), "8B": (4096, 32, 32, 8, 14336)}
DIT_FLAVORS: dict[str, Keys] = {
    "DiT-L": {"size": "0.5B"},
    "DiT-0.5B": {"size": "0.5B"},
    "DiT-1B": {"size": "1B"},
    "DiT-7B": {"size": "7B"},
    "DiT-S": {"size": "0.5B", "width": 384, "depth": 12, "heads": 8},
    "debugmodel": {"size": "0.5B", "width": 256, "depth": 8, "heads": 16},
}


# ------------------------------------------------------------ what both have


def name(value: Any, given: Given) -> Made:
    return {"run.name": run_name(PurePosixPath(given.name).stem)}, ""


def run_name(text: str) -> str:
    """Return a name with the letters that names of runs may have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).lstrip("-.")[:100] or "converted"


def layout(value: Any, given: Given) -> Made:
    shard = int(given("training.data_parallel_shard_degree"))
    return {"parallel.replicate": int(given("training.data_parallel_replicate_degree")), "parallel.shard": shard}, ""


def recompute(value: Any, given: Given) -> Made:
    mode, option = given("activation_checkpoint.mode"), str(given("activation_checkpoint.selective_ac_option"))
    if mode in ("none", "full"):
        return {"parallel.recompute": mode}, ""
    if mode != "selective":
        raise NotHonoured("none, full and selective are known")
    if option != "op":
        return {"parallel.recompute.every": int(option)}, ""
    why = "about half of a block is kept: attention, its projection, a layer of the MLP; there every second product"
    return {"parallel.recompute.keep": ["attention", "proj", "fc1"]}, why


def option(value: Any, given: Given) -> Made:
    if given("activation_checkpoint.mode") != "selective":
        return {}, "only with mode 'selective', there too"
    return recompute(value, given)


def compute(value: Any, given: Given) -> Made:
    words = {"bfloat16": "bf16", "float32": "fp32"}
    if given("float8.enable_float8_linear"):
        return {"precision.compute": "float8"}, "float8.enable_float8_linear: its products, the rest in bf16"
    return to("precision.compute", **words)(value, given)


def float8(value: Any, given: Given) -> Made:
    if not value:
        return {}, "precision.compute says so"
    return {"precision.compute": "float8", "precision.float8_layers": "all"}, ""


def saving(value: Any, given: Given) -> Made:
    if not given("checkpoint.enable_checkpoint"):
        return {"checkpoint.every": "off"}, ""
    if str(given("checkpoint.interval_type")).startswith("second"):
        return {"checkpoint.every": f"{int(given('checkpoint.interval'))}s"}, ""
    return {"checkpoint.every": int(given("checkpoint.interval"))}, ""


def interval(value: Any, given: Given) -> Made:
    return saving(value, given) if given("checkpoint.enable_checkpoint") else ({}, "nothing is saved, there too")


def keep(value: Any, given: Given) -> Made:
    if not given("checkpoint.enable_checkpoint"):
        return {}, "nothing is saved, there too"
    if not value:
        return {"checkpoint.keep": "all"}, ""
    return {"checkpoint.keep": value}, ""


def pipeline(value: Any, given: Given) -> Made:
    words = {
        "1F1B": "1F1B",
        "GPipe": "GPipe",
        "Interleaved1F1B": "interleaved",
        "FlexibleInterleaved1F1B": "interleaved",
    }
    why = "interleaved as usual; its flexible form is not known here" if str(value).startswith("Flexible") else ""
    return to("parallel.schedule", why, **words)(value, given)


def loggers(value: Any, given: Given) -> Made:
    return {"log.to": [name for name in ("tensorboard", "wandb") if given(f"metrics.enable_{name}")]}, ""


def seed(value: Any, given: Given) -> Made:
    return ({"run.seed": 0}, "the original drew no seed") if value is None else ({"run.seed": value}, "")


_NO_PROFILE = "`log.profile.steps` names the few steps to look at"
_NO_SNAPSHOT = "`log.profile.memory` takes them after those steps and where memory runs out"
_NO_TEXT = "of torchtitan's language models; not used there either"
_BY_ITSELF = "done by itself"
_ALIKE = "one way, for all layouts"


def lines(steps: int, warmup: int, shard: int, **more: Any) -> tuple[Line, ...]:
    """Return the lines of torchtitan's settings, with a fork's defaults."""
    return (
        code("name of the file", name),
        Line("job.description", drop("run.name is the file's name")),
        Line("job.dump_folder", drop("a run has a folder of its own: run.dir, or runs/NAME")),
        Line("job.use_for_integration_test", drop(_NO_TEXT)),
        Line("job.config_file", drop("the file that was converted")),
        Line("training.steps", to("run.steps"), steps),
        Line("training.seed", seed, None),
        Line("training.batch_size", lambda v, g: ({"data.batch": f"{int(v)}/rank"}, ""), 8),
        # optimizer and schedule
        Line("optimizer.name", to("optimizer.kind", AdamW="adamw", Adam="adam"), "AdamW"),
        Line("optimizer.lr", to("optimizer.lr"), 8e-4),
        Line("optimizer.fused", drop("the same numbers; the fastest way is taken")),
        code("betas", has("optimizer.betas", [0.9, 0.95])),
        code(
            "weight decay", has("optimizer.weight_decay", 0.1, "biases and norms are spared; there they decayed, too")
        ),
        Line("training.max_norm", to("optimizer.clip"), 1.0),
        Line("training.warmup_steps", to("schedule.warmup"), warmup),
        code("falls to 0 along a line", has("schedule.kind", "linear")),
        code("end of the rate", has("schedule.end", 0.0)),
        # ranks
        Line("training.data_parallel_replicate_degree", layout, 1),
        Line("training.data_parallel_shard_degree", layout, shard),
        Line("training.tensor_parallel_degree", to("parallel.tensor"), 1),
        Line("experimental.context_parallel_degree", to("parallel.context"), 1),
        Line("experimental.pipeline_parallel_degree", to("parallel.pipeline"), 1),
        Line("experimental.pipeline_parallel_schedule", pipeline),
        Line("experimental.pipeline_parallel_split_points", drop("parallel.split: cut by measured cost"), many=True),
        Line("experimental.pipeline_parallel_microbatches", drop("data.micro_batch says how many samples each has")),
        Line("experimental.enable_async_tensor_parallel", drop(_ALIKE)),
        Line("experimental.enable_compiled_autograd", drop(_ALIKE)),
        Line("training.enable_loss_parallel", drop(_ALIKE)),
        Line("training.enable_cpu_offload", to("parallel.offload")),
        Line("training.compile", to("parallel.compile"), False),
        Line("activation_checkpoint.mode", recompute, "selective"),
        Line("activation_checkpoint.selective_ac_option", option, "2"),
        # numbers
        Line("training.mixed_precision_param", compute, "bfloat16"),
        Line("training.mixed_precision_reduce", to("precision.reduce", float32="fp32", bfloat16="bf16"), "float32"),
        Line("float8.enable_float8_linear", float8),
        *(
            Line(f"float8.{key}", drop("one way of scaling, for each product"))
            for key in (
                "enable_fsdp_float8_all_gather",
                "precompute_float8_dynamic_scale_for_fsdp",
                "scaling_type_input",
                "scaling_type_weight",
                "scaling_type_grad_output",
            )
        ),
        # checkpoints
        Line("checkpoint.enable_checkpoint", saving, False),
        Line("checkpoint.interval", interval, 500),
        Line("checkpoint.interval_type", interval, "steps"),
        Line("checkpoint.keep_latest_k", keep, 0),
        Line("checkpoint.async_mode", lambda v, g: ({"checkpoint.background": v != "disabled"}, "")),
        Line("checkpoint.folder", drop("checkpoints lie in the run's folder")),
        Line("checkpoint.model_weights_only", drop("checkpoints are whole; `vitrail.load` takes the weights out")),
        Line("checkpoint.export_dtype", drop("checkpoints are whole; `vitrail.load` takes the weights out")),
        Line("checkpoint.create_seed_checkpoint", drop("every layout starts from the same weights")),
        # what is told
        Line("metrics.log_freq", to("log.every"), 10),
        Line("metrics.enable_tensorboard", loggers, False),
        Line("metrics.enable_wandb", loggers),
        Line("metrics.save_tb_folder", drop("in the run's folder")),
        Line("metrics.enable_color_printing", drop(_BY_ITSELF)),
        Line("metrics.rank_0_only", drop("numbers are of all ranks together")),
        *(
            Line(f"profiling.{key}", drop(_NO_PROFILE))
            for key in ("enable_profiling", "save_traces_folder", "profile_freq")
        ),
        Line("profiling.enable_memory_snapshot", drop(_NO_SNAPSHOT)),
        Line("profiling.save_memory_snapshot_folder", drop(_NO_SNAPSHOT)),
        Line("memory_estimation.enabled", drop("`vitrail plan` tells what takes memory")),
        Line("memory_estimation.disable_fake_mode", drop("`vitrail plan` tells what takes memory")),
        Line("comm.train_timeout_seconds", lambda v, g: ({"run.hang_limit": f"{int(v)}s"}, "")),
        Line("comm.init_timeout_seconds", drop("a start that hangs ends by itself")),
        Line("comm.trace_buf_size", drop("run.hang_limit says which ranks wait for which")),
        Line("training.gc_freq", drop(_BY_ITSELF)),
        Line("training.num_workers", drop("as many reading threads as there are cores for (data.workers)")),
        Line("training.seq_len", drop("tokens follow from data.crop and the patch")),
        Line("training.dataset", drop(_NO_TEXT)),
        Line("training.dataset_path", drop(_NO_TEXT)),
        Line("model.tokenizer_path", drop(_NO_TEXT)),
    )


# ------------------------------------------------------------ torchtitan-mae


def mae_flavor(value: Any, given: Given) -> Made:
    if value not in MAE_FLAVORS:
        raise NotHonoured(f"{', '.join(MAE_FLAVORS)} are known")
    made = dict(zip(("width", "depth", "heads", "kv_heads", "hidden"), MAE_FLAVORS[value], strict=True))
    encoder = made | {"mlp": "swiglu", "norm": "rms", "eps": 1e-6, "bias": False}
    decoder = {"kind": "self", "width": 512, "depth": 4, "heads": 32, "hidden": 1536}
    keys: Keys = {"model.kind": "mae", "model.ndim": 3}
    keys |= {f"model.encoder.{key}": item for key, item in encoder.items()}
    return keys | {f"model.decoder.{key}": item for key, item in decoder.items()}, ""


def volumes(value: Any, given: Given) -> Made:
    if "training.data_dir" not in given:
        raise NotHonoured("no folder of volumes is given: add -- --training.data_dir=FOLDER")
    folder, inner = str(given("training.data_dir")).rstrip("/"), str(given("training.subdir_name")).strip("/")
    path = f"{folder}/*/*.zarr/{inner}/{given('training.resolution')}"
    return {"data.train.0.kind": "zarr", "data.train.0.path": path, "data.train.0.draw": "items"}, ""


MAE = Table(
    "torchtitan-mae",
    (
        *lines(steps=100_000, warmup=1000, shard=-1),
        Line(
            "model.name", unless("llama3", "model.kind, mae", "only llama3, under which the autoencoder goes, is known")
        ),
        Line("model.flavor", mae_flavor, "2B"),
        Line("training.patch_size", to("model.encoder.patch"), 8),
        Line("training.img_size", to("data.crop"), 512),
        Line("training.mask_ratio", to("model.mask.ratio"), 0.95),
        code("one channel", has("model.channels", 1)),
        code("mask", has("model.mask.kind", "random")),
        code(
            "rotary positions",
            has(
                "model.encoder.positions",
                "rope",
                "along three axes; there by the number of a patch in the file's order, and by that of a visible one",
            ),
        ),
        code("depth_init", has("model.encoder.init", "depth_scaled")),
        code("loss", has("objective.kind", "reconstruct")),
        code("loss of hidden patches", has("objective.on", "hidden")),
        code("raw intensities", has("objective.target", "raw")),
        Line("training.data_dir", volumes),
        Line("training.subdir_name", volumes, "recon-1/em/fibsem-uint8"),
        Line("training.resolution", volumes, "s0"),
        code("bytes over 255", has("data.normalize", {"mean": [0.0], "std": [255.0]})),
        code("parameters stay gathered between forward and backward", has("parallel.reshard", False)),
        code("FlashAttention-3", drop("parallel.attention: the fastest kernel that is there")),
        code("sample.jpg at step 10", has("log.pictures", 10)),
    ),
    {f"model.{key}": f"training.{key}" for key in ("patch_size", "img_size", "mask_ratio")}
    | {"model.size": "model.flavor"},
)


# ------------------------------------------------------------ TorchDiTan


def dit_flavor(value: Any, given: Given) -> Made:
    if value not in DIT_FLAVORS:
        raise NotHonoured(f"{', '.join(DIT_FLAVORS)} are known")
    made = DIT_FLAVORS[value] | {"size": f"{DIT_FLAVORS[value]['size']}/{int(given('model.patch_size'))}"}
    why = "DiT-L, which its authors call 0.5B; the name itself is in their scripts alone" if value == "DiT-0.5B" else ""
    return {"model.kind": "dit"} | {f"model.{key}": item for key, item in made.items()}, why


def input_channels(value: Any, given: Given) -> Made:
    return ({"model.channels": value}, "") if "model.input_channels" in given else None


def size_of(given: Given) -> list[int]:
    return [int(side) for side in given("dataset.image_size")]


def images(value: Any, given: Given) -> Made:
    crop = size_of(given)
    root, channels = given("dataset.root_dir"), int(given("model.input_channels"))
    entry: Keys = {"path": root}
    more: Keys = {"data.normalize": {"mean": [127.5] * 3, "std": [127.5] * 3}}
    why = ""
    if value == "imagenet_dummy":
        entry = {"kind": "dummy", "shape": crop, "channels": channels, "items": 1_000_000}
        entry["classes"], more = int(given("dataset.num_classes")), {}
        why = "random numbers, where there were zeros: as fast, and nothing is 0 by chance"
    elif value == "cifar10":
        entry["kind"] = "cifar10"
    elif value == "imagenet" and str(root).endswith(".safetensors"):
        entry |= {"kind": "latents", "scale": "16/255"}
        more, why = {}, "every latent; the original's loader gave three over and over"
    elif value == "imagenet":
        entry["kind"], more["data.fit.resize"] = "image_folder", min(crop)
    else:
        raise NotHonoured("imagenet, imagenet_dummy and cifar10 are known")
    return {f"data.train.0.{key}": item for key, item in entry.items()} | more, why


def loaded(value: Any, given: Given) -> Made:
    if int(value) == -1:
        return {}, "training.batch_size"
    return {
        "data.batch": f"{int(value)}/rank"
    }, "what was loaded; training.batch_size was counted in images a second alone"


def batch(value: Any, given: Given) -> Made:
    own = int(given("dataset.batch_size", -1))
    if own != -1:
        return {}, f"counted in images a second, while dataset.batch_size, {own}, was loaded"
    if int(value) < 1:
        raise NotHonoured("the scripts give it: add -- --training.batch_size=N")
    return {"data.batch": f"{int(value)}/rank"}, ""


def pictures(value: Any, given: Given) -> Made:
    if given("metrics.enable_sampling", True) is False:
        return {"log.pictures": "off"}, ""
    return {"log.pictures": int(given("metrics.sample_freq"))}, ""


def whole_bf16(value: Any, given: Given) -> Made:
    if int(given("training.data_parallel_shard_degree")) > 1:
        return None
    return {}, "weights, gradients and Adam's means were bf16 without shards; here they are fp32 in every layout"


def experiment(value: Any, given: Given) -> Made:
    made = run_name(str(value))
    return {"run.name": made}, "" if made == value else "letters that a name of a folder may have"


def dit_name(value: Any, given: Given) -> Made:
    return None if "metrics.experiment_name" in given else name(value, given)


_SHARED = tuple(line for line in lines(steps=10_000, warmup=200, shard=2) if line.old != "training.batch_size")
DITAN = Table(
    "TorchDiTan",
    (
        *(line for line in _SHARED if line.old != "(name of the file)"),
        code("name of the file", dit_name),
        Line("metrics.experiment_name", experiment),
        Line("training.batch_size", batch, 8),
        Line("model.name", unless("llama3_diffusion", "model.kind, dit", "only llama3_diffusion is known")),
        Line("model.flavor", dit_flavor, "DiT-L"),
        Line("model.patch_size", drop("in model.size"), 2),
        Line("model.norm_type", to("model.norm", rmsnorm="rms", fused_rmsnorm="rms", layernorm="layer"), "rmsnorm"),
        Line("model.input_channels", input_channels, 3),
        code("labels hidden from 5 %", has("model.label_dropout", 0.05)),
        code("depth_init", has("model.init", "depth_scaled")),
        code("rectified flow", has("objective.kind", "flow")),
        code("times", has("objective.times", "uniform")),
        code("times told as 0 to 1", has("model.time_scale", 0.001)),
        code("sampler", has("objective.sampling.sampler", "euler")),
        code("steps of the sampler", has("objective.sampling.steps", 32)),
        code("guidance", has("objective.sampling.guidance", 3.0)),
        Line("dataset.dataset_name", images, "imagenet_dummy"),
        Line("dataset.root_dir", drop("data.train.0.path, where data are read"), "./data"),
        Line("dataset.image_size", lambda v, g: ({"data.crop": size_of(g)}, ""), [32, 32], many=True),
        Line("dataset.num_classes", to("model.classes"), 1000),
        Line("dataset.batch_size", loaded),
        Line("dataset.num_workers", drop("as many reading threads as there are cores for (data.workers)")),
        Line("metrics.sample_freq", pictures, 100),
        Line("metrics.enable_sampling", pictures),
        Line("metrics.sample_batch_size", drop("as many as fit on a picture")),
        Line("autotune.batch_size_multiple", drop("`vitrail tune` looks for the batch; it finds the multiple")),
        code("bf16 without shards", whole_bf16),
    ),
)
