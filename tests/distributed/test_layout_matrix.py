"""Every layout computes the same: loss, every gradient, and the parameters after three steps.

Cases run in one launch for each world size. A case is compared with the run of one process on the same recipe.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import merge, run, tiny_recipe, torchrun

WORKER = Path(__file__).parent / "layout_worker.py"
STEPS = 3
OPTIMIZERS = {
    "sgd": {"kind": "sgd", "lr": 0.05},
    "adamw": {"kind": "adamw", "lr": 1e-3, "eps": 1e-5},
    "muon": {"kind": "muon", "lr": 1e-3, "eps": 1e-5},
}

# What is trained, as changes to the tiny recipe. Numbers of tokens do not divide by everything: some parts are padded.
ENCODER = {"width": 32, "depth": 4, "heads": 4, "patch": 4, "positions": "rope", "drop_path": 0.3}
ADAPTIVE = {"kind": "adaptive", "length": 43, "min_leaf": 2, "fill": False, "score": {"kind": "gradient"}}
SEGMENTED = {
    "objective": {"kind": "segment"},
    "data.train": [{"path": "VOLUME", "labels": "structures", "region": {"x": [0, 0.6]}}],
    "data.valid": [],
}
VIT = ENCODER | {"kind": "vit", "ndim": 2, "patch": 2}
CLASSIFIED = {
    "objective": {"kind": "classify"},
    "data.train": [{"path": "IMAGES", "kind": "image_folder"}],
    "data.valid": [],
    "data.crop": [8, 10],
    "data.augment": {"orientations": False},
}
COLOURS = ["blue", "red", "infrared", "green"]
COLOURED = {
    "model.ndim": 2,
    "data.train": [{"path": "COLOURS", "kind": "image_folder"}],
    "data.valid": [],
    "data.crop": [8, 10],
    "data.augment": {"orientations": False},
}
VIEW = ENCODER | {"patch": 2}
DIT = {"kind": "dit", "width": 32, "depth": 4, "heads": 4, "patch": 2, "drop_path": 0.3, "label_dropout": 0.5}
FEW = {"sampler": "euler", "steps": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mae": {},
    "mae-self": {
        "model.decoder": {"kind": "self", "width": 32, "depth": 2, "heads": 4, "hidden": 32},
        "model.encoder": ENCODER
        | {"registers": 1, "cls_token": True, "kv_heads": 2, "mlp": "swiglu", "hidden": 32, "qk_norm": True},
        "model.mask.ratio": 0.7,
        "objective": {"kind": "reconstruct", "on": "all"},
    },
    "mae-stratified": {
        "model.mask": {"kind": "stratified", "ratio": 0.75, "slabs": 4},
        "model.decoder.decode_ratio": 0.5,
    },
    "mae-adaptive": {"model.encoder": ENCODER | {"tokens": ADAPTIVE}},
    "mae-adaptive-self": {
        "model.encoder": ENCODER | {"tokens": ADAPTIVE, "cls_token": True, "positions": "sincos"},
        "model.decoder.kind": "self",
        "objective": {"kind": "reconstruct", "target": "patch"},
    },
    "mae-variables": {"model.encoder": VIEW | {"variables": {"known": COLOURS}}, **COLOURED},
    "mae-separate": {"model.encoder": VIEW | {"variables": {"known": COLOURS, "aggregate": "none"}}, **COLOURED},
    "mae-long": {"model.encoder": VIEW, "data.crop": 24, "data.batch": 1, "data.lanes": 1, "data.valid": []},
    "mae-frozen": {"optimizer.groups": [{"match": "^encoder", "freeze": True}, {"match": "^decoder.head", "lr": 0.5}]},
    "mae-turned": {"model.encoder": ENCODER | {"rope": "superposed", "layer_scale": 0.1, "norm": "rms", "bias": False}},
    "vit": {"model": VIT | {"cls_token": True, "pool": "mean", "head_dropout": 0.2}, **CLASSIFIED},
    "vit-pooled": {"model": VIT | {"registers": 2, "pool": "attention", "positions": "learned"}, **CLASSIFIED},
    "unetr": {"model": {"kind": "unetr", "ndim": 3, "encoder": ENCODER, "features": 4}, **SEGMENTED, "data.crop": 8},
    "unetr-slabs": {  # maps that up to four ranks share
        "model": {"kind": "unetr", "ndim": 3, "encoder": ENCODER, "features": 4, "norm": "affine"},
        **SEGMENTED,
        "data.crop": [20, 8, 8],  # 5 planes of patches, so that slabs are not equal
    },
    "unetr-plain": {"model": {"kind": "unetr", "ndim": 3, "encoder": ENCODER, "skips": False}, **SEGMENTED},
    "sap": {"model": {"kind": "sap", "ndim": 3, "encoder": ENCODER | {"tokens": ADAPTIVE}, "features": 4}, **SEGMENTED},
    "affinities": {
        "model": {"kind": "unetr", "ndim": 3, "encoder": ENCODER, "features": 4},
        **SEGMENTED,
        "objective": {"kind": "affinities", "descriptors": 2.0},
        "data.crop": 8,
    },
    "affinities-sap": {
        "model": {"kind": "sap", "ndim": 3, "encoder": ENCODER | {"tokens": ADAPTIVE}, "features": 4},
        **SEGMENTED,
        "objective": {"kind": "affinities"},
    },
    "diffusion": {
        "model": {
            "kind": "diffusion_vit",
            "ndim": 3,
            "encoder": ENCODER,
            "decoder": {"kind": "transformer", "width": 32, "depth": 2, "heads": 4},
        },
        "objective": {"kind": "denoise", "predict": "velocity", "min_snr": 5, "coarse": 2, "sampling": FEW},
    },
    "dit": {
        "model": DIT,
        **CLASSIFIED,
        "objective": {"kind": "flow", "classes": True, "times": "logit_normal", "sampling": FEW | {"guidance": 2}},
    },
    "dit-given": {  # 15 tokens, so that parts are padded
        "model": DIT,
        **COLOURED,
        "data.crop": [6, 10],
        "objective": {"kind": "flow", "condition": ["green"], "sampling": FEW},
    },
}

# World size, then the `parallel` section and what else changes.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "shard2": (2, {}, {}),
    "replicate2": (2, {"strategy": "DDP", "bucket_mib": 1}, {}),
    "tensor2": (2, {"tensor": 2}, {}),
    "ulysses2": (2, {"context": 2}, {}),
    "ring2": (2, {"context": 2, "ulysses": 1}, {}),
    "tensor2-accumulated": (2, {"tensor": 2}, {"data.micro_batch": 3}),
    "ring2-full": (2, {"context": 2, "ulysses": 1, "recompute": "full"}, {}),
    "tensor2-keep": (2, {"tensor": 2, "recompute": {"keep": ["attention", "fc1"]}}, {"data.micro_batch": 4}),
    "context2-every": (2, {"context": 2, "recompute": {"every": 2}}, {}),
    "shard2-budget": (2, {"recompute": {"budget": 0.5}}, {}),
    "tensor2-chunks": (2, {"tensor": 2, "chunk": {"mlp": 3, "head": 5}}, {}),
    "tensor2-compiled": (2, {"tensor": 2, "compile": True, "recompute": {"keep": ["attention"]}}, {}),
    "ring2-compiled": (2, {"context": 2, "ulysses": 1, "compile": True, "recompute": {"keep": ["qkv"]}}, {}),
    "pipeline2-compiled": (2, {"pipeline": 2, "compile": True, "recompute": "full"}, {"data.micro_batch": 4}),
    "pipeline2-gpipe": (2, {"pipeline": 2, "schedule": "GPipe"}, {"data.micro_batch": 4}),
    "pipeline2": (2, {"pipeline": 2, "recompute": "full"}, {"data.micro_batch": 3}),
    "pipeline2-interleaved": (2, {"pipeline": 2, "schedule": "interleaved"}, {"data.micro_batch": 2}),
    "shard4-wrap": (4, {"wrap": 2, "prefetch": {"forward": 1, "backward": 2}}, {}),
    "hybrid4": (4, {"strategy": "HYBRID_SHARD", "group": 2}, {"data.micro_batch": 1}),
    "grad-op4": (4, {"strategy": "SHARD_GRAD_OP", "prefetch": {"backward": 0}}, {}),
    "tensor4": (4, {"tensor": 4}, {}),
    "ulysses4": (4, {"context": 4}, {}),
    "ring4": (4, {"context": 4, "ulysses": 1}, {}),
    "ulysses2-ring2": (4, {"context": 4, "ulysses": 2}, {}),
    "shard2-tensor2": (4, {"tensor": 2, "shard": 2}, {}),
    "shard2-context2": (4, {"context": 2}, {"data.micro_batch": 2}),
    "tensor2-context2": (4, {"tensor": 2, "context": 2}, {}),
    "replicate2-tensor2": (4, {"strategy": "NO_SHARD", "tensor": 2}, {}),
    "pipeline4": (4, {"pipeline": 4}, {"data.micro_batch": 2}),
    "pipeline2-tensor2": (4, {"pipeline": 2, "tensor": 2}, {"data.micro_batch": 2}),
    "pipeline2-context2": (4, {"pipeline": 2, "context": 2, "schedule": "interleaved"}, {"data.micro_batch": 2}),
    "pipeline2-shard2": (4, {"pipeline": 2, "shard": 2}, {"data.micro_batch": 1}),
    "hybrid-stop8": (8, {"strategy": "HYBRID_SHARD", "group": 2, "tensor": 2}, {}),
    "shard2-context2-tensor2": (8, {"context": 2, "tensor": 2, "shard": 2}, {}),
    "replicate2-ring2-tensor2": (8, {"replicate": 2, "shard": 1, "context": 2, "ulysses": 1, "tensor": 2}, {}),
    "shard2-tensor4": (8, {"tensor": 4}, {}),
    "pipeline2-shard2-tensor2": (8, {"pipeline": 2, "shard": 2, "tensor": 2}, {"data.micro_batch": 2}),
    "pipeline2-context2-tensor2": (8, {"pipeline": 2, "context": 2, "tensor": 2}, {"data.micro_batch": 2}),
    "pipeline2-replicate2-ring2": (
        8,
        {"pipeline": 2, "strategy": "DDP", "context": 2, "ulysses": 1, "schedule": "GPipe"},
        {"data.micro_batch": 2},
    ),
}
SMALL = ("tensor2", "ulysses2", "pipeline2", "tensor2-context2")
CASES = [("mae", layout) for layout in LAYOUTS if layout not in ("ring2-compiled", "pipeline2-compiled")]
CASES += [(model, layout) for model in ("vit", "unetr", "sap", "affinities", "diffusion", "dit") for layout in SMALL]
CASES += [("affinities-sap", layout) for layout in ("ulysses2", "shard2")]
CASES += [(model, layout) for model in ("mae-adaptive", "mae-adaptive-self") for layout in ("ring2", "ulysses2-ring2")]
CASES += [("mae-self", layout) for layout in ("ring2", "pipeline2", "ulysses2-ring2", "shard2-context2-tensor2")]
CASES += [("mae-turned", "pipeline2-tensor2"), ("mae-stratified", "ulysses4"), ("vit-pooled", "tensor2-context2")]
CASES += [("mae-variables", "ulysses2"), ("mae-separate", "tensor2-context2"), ("unetr", "pipeline2-gpipe")]
CASES += [("mae-frozen", "pipeline2"), ("dit-given", "ring2"), ("dit-given", "tensor2-context2")]
CASES += [("unetr-slabs", layout) for layout in ("tensor2-context2", "ulysses4", "pipeline2-context2")]
CASES += [
    ("unetr-plain", "ulysses2"),
    ("dit", "pipeline2-context2"),
    ("dit", "shard2"),
    ("dit", "hybrid4"),
    ("diffusion", "shard2"),
]
LONG = {"ulysses2": 2, "ring2": 2, "ulysses4": 4, "ring4": 4, "ulysses2-ring2": 4, "tensor2": 2}  # ranks
CASES += [("mae-long", layout) for layout in LONG]
COMPILED = [("mae", layout) for layout in ("ring2-compiled", "pipeline2-compiled")]

# What the fast tests take: one model in every kind of layout of up to four ranks, the others in some, by SGD; a few by
# AdamW. The slow ones take all others by both, at least 24 of one model with those few.
LATER = {  # which differ from others in a detail
    *("tensor2-accumulated", "ring2-full", "shard2-budget", "tensor2-compiled", "pipeline2-gpipe", "shard4-wrap"),
    *("tensor4", "ulysses4", "ring4", "shard2-context2", "replicate2-tensor2", "pipeline4", "pipeline2-tensor2"),
    *("pipeline2-shard2",),
}
ADAMW = ("tensor2", "pipeline2", "tensor2-context2")
MUON = ("shard2", "tensor2", "pipeline2", "hybrid4", "shard2-tensor2")  # it gathers matrices in each in another way
ONCE = ("mae", "mae-long", "mae-turned", "mae-stratified", "mae-variables", "mae-separate", "mae-frozen", "dit-given")
FAST = [
    (model, layout, "sgd")
    for model, layout in CASES
    if LAYOUTS[layout][0] <= 4
    and (model != "mae" or layout not in LATER)
    and (model in ONCE or layout in ("pipeline2", "tensor2-context2", "ulysses2-ring2"))
]
FAST += [("unetr", "ulysses2", "sgd")]  # slabs of maps that are equal, and so are read apart
FAST += [("mae", layout, "adamw") for layout in ADAMW]
FAST += [("mae", layout, "muon") for layout in MUON]
ALREADY = {(model, layout) for model, layout, _ in FAST}
SLOW = [(*case, name) for case in (*CASES, *COMPILED) if case not in ALREADY for name in ("sgd", "adamw")]
SLOW += [("mae", layout, "muon") for layout in ("hybrid-stop8", "shard2-context2-tensor2", "pipeline2-shard2-tensor2")]


def recipe_of(model: str, volume: Path, home: Path, optimizer: str) -> dict[str, Any]:
    tree = tiny_recipe(volume, home, run__steps=STEPS)
    decoder = {"kind": "cross", "width": 32, "depth": 2, "heads": 4}
    tree = merge(tree, {"model.encoder": ENCODER, "model.decoder": decoder})
    tree = merge(tree, {"optimizer": OPTIMIZERS[optimizer], "schedule": {"kind": "cosine", "warmup": 0}})
    text = json.dumps(merge(tree, MODELS[model]))
    text = text.replace("VOLUME", str(volume)).replace("IMAGES", str(volume.parent / "images"))
    return json.loads(text.replace("COLOURS", str(volume.parent / "colours")))


def write_images(folder: Path) -> None:
    """Two classes of small pictures."""
    from PIL import Image

    for number in range(16):
        path = folder / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 128 + 127 * (number % 2), (8, 10), np.uint8)
        Image.fromarray(pixels).save(path)
        path = folder.parent / "colours" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.stack([pixels, pixels.T.reshape(8, 10), 255 - pixels], axis=-1)).save(path)


def put_together(folder: Path, reference: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The whole of what ranks have written in pieces; with a reference, of its shapes and without holes."""
    whole: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.npz")):
        for key, piece in np.load(file).items():
            if "|" not in key:
                if key in ("example", "metrics"):  # every rank gets the same
                    assert np.array_equal(whole.setdefault(key, piece), piece, equal_nan=True), (file, key)
                whole[key] = piece
                continue
            kind, name, offset = key.split("|")
            place = [int(o) for o in offset.split(",") if o]
            if reference is None:
                assert not any(place)
                whole[f"{kind}|{name}"] = piece
                continue
            shape = reference[f"{kind}|{name}"].shape
            table = whole.setdefault(f"{kind}|{name}", np.full(shape, np.nan, np.float32))
            table[tuple(slice(o, o + s) for o, s in zip(place, piece.shape, strict=True))] = piece
    return whole


def run_all(volume: Path, home: Path, cases: list[tuple[str, str, str]]) -> Path:
    """References in one process, the others in one launch a world size."""
    write_images(volume.parent / "images")
    wanted: dict[tuple[str, str], list[str]] = {}
    for model, layout, optimizer in cases:
        wanted.setdefault((model, layout), []).append(optimizer)
        references = wanted.setdefault((model, "1"), [])
        references += [optimizer] if optimizer not in references else []
    for world in (1, 2, 4, 8):
        trees = []
        for (model, layout), optimizers in wanted.items():
            ranks, parallel, changes = LAYOUTS.get(layout, (1, {}, {}))
            if ranks == world:
                chosen = {name: recipe_of(model, volume, home / "run", name) for name in optimizers}
                tree = merge(chosen[optimizers[0]], {"parallel": parallel, **changes})
                outs = {f"{home}/{model}-{name}-{layout}": chosen[name]["optimizer"] for name in optimizers}
                trees.append((tree, outs))
        listed = home / f"cases-{world}.json"
        listed.write_text(json.dumps(trees))
        code, output = run(*torchrun(world, WORKER, listed), timeout=3600)
        assert code == 0, output[-6000:]
    return home


@pytest.fixture(scope="module")
def results(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(volume, tmp_path_factory.mktemp("layouts"), FAST)


@pytest.fixture(scope="module")
def slow_results(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(volume, tmp_path_factory.mktemp("slow-layouts"), SLOW)


@pytest.mark.parametrize(("model", "layout", "optimizer"), FAST)
def test_every_layout_computes_the_same(results: Path, model: str, layout: str, optimizer: str) -> None:
    check(results, model, layout, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "optimizer"), SLOW)
def test_every_layout_computes_the_same_slowly(slow_results: Path, model: str, layout: str, optimizer: str) -> None:
    check(slow_results, model, layout, optimizer)


@pytest.mark.parametrize("layout", LONG)
def test_what_the_backward_keeps_falls_with_the_ranks_that_share_tokens(results: Path, layout: str) -> None:
    whole = put_together(results / "mae-long-sgd-1")
    part = put_together(results / f"mae-long-sgd-{layout}", whole)
    share, ranks = float(part["kept"]) / float(whole["kept"]), LONG[layout]
    # Tensor ranks also keep the tokens that they gathered for attention and MLP.
    assert 0.95 / ranks < share < (1.1 / ranks if layout != "tensor2" else 0.75)


def check(results: Path, model: str, layout: str, optimizer: str) -> None:
    expected = put_together(results / f"{model}-{optimizer}-1")
    found = put_together(results / f"{model}-{optimizer}-{layout}", expected)
    assert found.keys() == expected.keys()
    found["kept"] = expected["kept"]  # less, but that is another test
    norms = dict.fromkeys({key.partition("|")[0] for key in expected}, 0.0)  # of all tensors of a kind together
    for key, value in expected.items():
        norms[key.partition("|")[0]] += float(np.linalg.norm(value)) ** 2
    for key, value in expected.items():
        # Relative to the tensor; to a hundredth of the whole gradient for one that is all but 0, which is rounding.
        scale = max(float(np.linalg.norm(value)), 0.01 * norms[key.partition("|")[0]] ** 0.5)
        assert float(np.linalg.norm(found[key] - value)) < 1e-5 * scale, key
