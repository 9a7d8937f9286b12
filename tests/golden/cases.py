"""Every shipped recipe, made tiny, with what its first steps are: batches as digests, losses to the last bit.

Data are made here from numbers, so that they are the same bytes everywhere. Losses are the same bits only on the same
kind of processor with the same PyTorch: `machine()` names both.
"""

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support import ROOT, events, write_volume

STEPS = 5
GOLDEN = Path(__file__).parent / "golden.json"
RUN = Path(__file__).parent / "run"  # of an early version; what was saved once is opened for ever
# Where that run was made; processors of the same name differ in their instructions, and so in the last bit.
RUN_MACHINE = "x86_64, AMD EPYC, 25, 1, AVX2, torch 2.13.0+cpu, numpy 2.4.6"

# What makes a recipe tiny: of a model, and of where its data come from.
_WIDTHS = ["width=32", "depth=2", "heads=4"]
_PARQUET = ["data.train=[{path: images.parquet, size: [8, 8]}]", "data.crop=8", "data.batch=8"]
_DIGITS = ["data.train=[{path: images, kind: image_folder}]", "data.batch=8"]
_VOLUME = ["data.crop=16", "data.batch=2"]
_FEW = ["objective.sampling={sampler: euler, steps: 2}"]


def _dummy(shape: Sequence[int], channels: int) -> list[str]:
    entry = f"{{kind: dummy, path: dummy, shape: {list(shape)}, channels: {channels}, classes: 10, items: 100}}"
    crop = shape[0] if len(set(shape)) == 1 else list(shape)
    return [f"data.train=[{entry}]", f"data.crop={crop}", "data.batch=4", "model.classes=10"]


def _model(*words: str, inside: str = "model") -> list[str]:
    return [f"{inside}.{word}" for word in words]


_STUDY = [*_model(*_WIDTHS, "patch=4", "hidden=64", "shape=16"), *_dummy((16, 16), 3)]
_DIFFUSION = [
    *_model(*_WIDTHS, "patch=4", inside="model.encoder"),
    *_model(*_WIDTHS, inside="model.decoder"),
    "objective.sampling={sampler: ddim, steps: 2}",
]

_PHOTOS = [
    "data.train=[{path: photos, kind: image_folder}]",
    "data.fit={resize: [16, 16]}",
    "data.crop=16",
    "data.batch=4",
]
_ORGANS = [
    "data.train=[{path: organs, kind: nifti, label_map: {1: 0, 2: 1, 3: 2, 4: 3}}]",
    *_model(*_WIDTHS, "tokens.length=43", inside="model.encoder"),
    *_VOLUME,
]

_MAE = [
    *_model("width=48", "depth=2", "heads=6", "kv_heads=2", "hidden=64", "patch=4", inside="model.encoder"),
    *_model("width=32", "depth=1", "heads=4", "hidden=32", inside="model.decoder"),
    "data.train=[{path: data/em.zarr}]",
    *_VOLUME,
]

RECIPES: dict[str, list[str]] = {
    "ablate/dit_toy": ["data.batch=4"],
    "cifar10/classifier": [*_model(*_WIDTHS), *_PARQUET],
    "cifar10/dit": [*_model(*_WIDTHS), *_PARQUET, *_FEW],
    "cifar10/dit_ditan": [*_model(*_WIDTHS), *_PARQUET, *_FEW],
    "cifar10/vit": [*_model(*_WIDTHS), *_PARQUET],
    "catsdogs/vit_b16": [*_model(*_WIDTHS, "patch=4", "classes=3"), *_PHOTOS],
    "ct/ddpm2d": [
        *_DIFFUSION,
        "data.train=[{path: ct, kind: nifti, slices: z}]",
        "data.crop=8",
        "data.batch=4",
    ],
    "ct/ddpm3d": [*_DIFFUSION, "data.train=[{path: ct, kind: nifti}]", "data.crop=8"],
    "ct/mae2d": [
        *_model(*_WIDTHS, "patch=2", "tokens.length=13", inside="model.encoder"),
        *_model("width=24", "depth=1", "heads=4", inside="model.decoder"),
        "data.train=[{path: ct, kind: nifti, slices: z}]",
        "data.crop=8",
        "data.batch=4",
    ],
    "ct/sap3d": _ORGANS,
    "ct/unetr3d": [*_ORGANS, "model.encoder.depth=4", "model.features=4"],
    "demo/mae3d": [*_model(*_WIDTHS, inside="model.encoder"), *_model("width=24", inside="model.decoder"), *_VOLUME],
    "demo/sap3d": [*_model(*_WIDTHS, "tokens.length=43", inside="model.encoder"), "model.features=4", *_VOLUME],
    "demo/finetune3d": [
        *_model("width=32", "heads=4", inside="model.encoder"),
        *("model.features=4", "init=null", "data.train.0.region={x: [0, 0.8]}"),
        *_VOLUME,
    ],
    "demo/affinities3d": [
        *_model("width=32", "heads=4", inside="model.encoder"),
        *("model.features=4", "data.train.0.labels=structures", "data.train.0.path=data/em.zarr"),
        *_VOLUME,
    ],
    "demo/unetr3d": [*_model("width=32", "heads=4", inside="model.encoder"), "model.features=4", *_VOLUME],
    "digits/autoencoder": ["model.width=8", *_DIGITS],
    "digits/dit": [*_model(*_WIDTHS, "classes=3"), *_DIGITS, *_FEW],
    "digits/dit_latents": [
        *_model(*_WIDTHS, "classes=3"),
        *_FEW,
        "data.train=[{path: latents/train, kind: latents}]",
        "data.batch=8",
        "codec.path=runs/digits-autoencoder",
    ],
    "digits/vit": [*_model(*_WIDTHS), *_DIGITS],
    "dummy/dit_0.5b": [*_model(*_WIDTHS), *_dummy((8, 8), 16), "parallel.compile=false"],
    "dummy/dit_7b": [*_model(*_WIDTHS), *_dummy((8, 8), 16), "parallel.compile=false"],
    "imagenet/ddpm_vit_b16": [
        *_DIFFUSION,
        "data.train=[{path: photos, kind: image_folder}]",
        "data.fit={resize: 16}",
        "data.crop=16",
        "data.batch=4",
    ],
    "imagenet/dit_l2_latents": [
        *_model(*_WIDTHS, "classes=3"),
        *_FEW,
        "codec=null",
        "data.train=[{path: latents/train, kind: latents}]",
        "data.crop=4",
        "data.batch=8",
    ],
    **{f"mae3d/{name}": _MAE for name in ("2b", "torchtitan_2b", "torchtitan_8b")},
    "imagenet/mae_b16_adaptive": [
        *_model(*_WIDTHS, "patch=4", "tokens.length=13", inside="model.encoder"),
        *_model("width=24", "depth=1", "heads=4", inside="model.decoder"),
        *_PHOTOS,
    ],
    "imagenet/vit_b16_adaptive": [*_model(*_WIDTHS, "patch=4", "tokens.length=13", "classes=3"), *_PHOTOS],
    "isbi2012/finetune": [
        *_model(*_WIDTHS, "patch=4", "depth=4", inside="model.encoder"),
        *("model.features=4", "init=null"),
        "data.train=[{path: isbi2012, slices: z, label_map: {255: 0, 0: 1}}]",
        *_VOLUME,
    ],
    "isbi2012/pretrain": [
        *_model(*_WIDTHS, "patch=4", inside="model.encoder"),
        *_model("width=24", inside="model.decoder"),
        "data.train=[{path: isbi2012, slices: z}]",
        *_VOLUME,
    ],
    "orbit/113b": [
        *_model("width=32", "depth=2", "heads=4", "hidden=64", "channels=5"),
        *_dummy((16, 32), 5),
        "parallel.tensor=1",
    ],
    **{f"vit_fsdp_study/{size}": _STUDY for size in ("15b", "1b", "3b", "5b", "base", "base14", "huge")},
}
ALWAYS = [
    "run.steps=5",
    "run.device=cpu",
    "log.every=1",
    "log.pictures=off",
    "log.activations=off",
    "log.tensorboard=false",
    "checkpoint.every=off",
    "data.workers=1",
    "data.valid=null",
]
OLD_RUN = [
    *[word for word in ALWAYS if word.split("=")[0] not in ("data.valid", "run.steps", "log.pictures")],
    "run.steps=10",
    "run.dir=runs/old",
    *_model("width=16", "depth=2", "heads=2", "patch=4", inside="model.encoder"),
    *_model("width=16", "heads=2", inside="model.decoder"),
    "data.train=[{path: data/em.zarr, region: {x: [0, 0.5]}}]",
    "data.valid=[{path: data/em.zarr, region: {x: [0.5, 1]}}]",
    "data.crop=8",
    "data.batch=4",
    "eval.every=5",
    "eval.samples=4",
    "checkpoint.every=5",
    "log.pictures=100%",
]
# Batches that are made with floats (resampled, mixed) have other bits on other processors.
RESAMPLED = {"cifar10/classifier"}
# Latents are what a model computed.
COMPUTED = {"digits/dit_latents", "imagenet/dit_l2_latents"}


def machine() -> str:
    """The kind of machine on which losses are the same bits."""
    import torch

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.replace("\t", "").split(":", 1) for line in text.splitlines() if ":" in line)
    names = [facts.get(key, "").strip() for key in ("model name", "cpu family", "model")]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([platform.machine(), *names, capability, f"torch {torch.__version__}", f"numpy {np.__version__}"])


def write_data(home: Path) -> None:
    """Small data of each kind that a shipped recipe reads."""
    import nibabel
    import pyarrow
    import pyarrow.parquet
    import tifffile
    from PIL import Image

    draw = np.random.default_rng(0)
    write_volume(home / "data/em.zarr", size=32)
    rows = []
    for number in range(24):
        path = home / "images" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 100 + 70 * (number % 3), (8, 8), np.uint8)).save(path)
        colours = home / "colours.png"
        Image.fromarray(draw.integers(0, 100 + 70 * (number % 3), (8, 8, 3), np.uint8)).save(colours)
        rows.append({"img": {"bytes": colours.read_bytes(), "path": None}, "label": number % 10})
        path = home / "photos" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (18 + number % 5, 20, 3), np.uint8)).save(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), home / "images.parquet")
    (home / "ct").mkdir()
    for number in range(3):
        values = draw.integers(-1000, 2000, (12, 11, 10), np.int16)
        nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 1.0, 1.0, 1.0])), home / "ct" / f"scan{number}.nii")
    for number in range(2):
        for name, least, most in (("image", -1000, 2000), ("label", 1, 5)):
            folder = home / "organs" / f"{name}sTr"
            folder.mkdir(parents=True, exist_ok=True)
            values = draw.integers(least, most, (18, 17, 16), np.int16)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{name}{number}.nii")

    (home / "isbi2012").mkdir()
    for name, values in (
        ("image", draw.integers(0, 255, (4, 24, 24), np.uint8)),
        ("label", 255 * draw.integers(0, 2, (4, 24, 24), np.uint8)),
    ):
        tifffile.imwrite(home / "isbi2012" / f"{name}.tif", values, photometric="minisblack")


def digest(batch: Any) -> str:
    """Of all that a batch holds: counters, values and labels with their types and shapes."""
    found = hashlib.blake2b(json.dumps([int(counter) for counter in batch.counters]).encode(), digest_size=16)
    for tensor in (batch.values, batch.labels, batch.soft):
        if tensor is not None:
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def watched_batches() -> Iterator[list[str]]:
    """Digests of the batches that trainings in this block take."""
    from vitrail.training.trainer import Trainer

    found: list[str] = []
    step = Trainer.step

    def watched(self: Trainer, batch: Any, **options: Any) -> Any:
        found.append(digest(batch))
        return step(self, batch, **options)

    Trainer.step = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Trainer.step = step  # type: ignore[method-assign]


def train(name: str, home: Path) -> dict[str, Any]:
    """Digests of the batches and losses of the first steps of a recipe, in a folder with the data."""
    import vitrail

    folder = home / "runs" / name.replace("/", "-")
    overrides = [*ALWAYS, *RECIPES[name], f"run.dir={folder}"]
    if name == "digits/autoencoder":  # it makes the latents
        overrides.append("checkpoint.every=5")
    with contextlib.chdir(home), watched_batches() as batches:
        vitrail.train(ROOT / "configs" / f"{name}.yaml", overrides=overrides, quiet=True)
        if name == "digits/autoencoder":
            from vitrail.infer.encode import encode

            encode(folder, home / "latents", quiet=True)
    told = sorted(events(folder, "train"), key=lambda event: event["step"])
    return {"batches": batches, "losses": [float(event["loss"]).hex() for event in told]}


def train_all(home: Path, tell: Callable[[str], None] = lambda line: None) -> dict[str, dict[str, Any]]:
    write_data(home)
    found = {}
    for name in RECIPES:
        found[name] = train(name, home)
        tell(f"{name}: {float.fromhex(found[name]['losses'][-1]):.4f}")
    return found
