"""Runs pipelines against the plain model: `pipeline_worker.py OUT.json`, for the cases of this many ranks."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import recomputed
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitrail.cli.words import end
from vitrail.errors import UserError
from vitrail.layers.init import Constant, Normal, init_rules, initialise
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.models.config import EncoderConfig
from vitrail.models.diffusion_vit import DiffusionDecoderConfig, DiffusionViTConfig
from vitrail.models.dit import DiTConfig
from vitrail.models.mae import DecoderConfig, MAEConfig, hide, split_tokens
from vitrail.models.model import make_inputs
from vitrail.models.sap import SAPConfig
from vitrail.models.unetr import UNETRConfig
from vitrail.models.vit import ViTConfig
from vitrail.parallel import shard
from vitrail.parallel.mesh import Mesh, layout_of
from vitrail.parallel.pipeline import Pipeline, cut, num_parts
from vitrail.recipe.sections import Parallel

SMALL: dict[str, Any] = {"width": 24, "depth": 4, "heads": 2, "patch": 4, "drop_path": 0.4}
ENCODER = EncoderConfig(**SMALL, positions="rope", cls_token=True, registers=1)
DECODER = {"width": 16, "depth": 2, "heads": 2, "drop_path": 0.3}
ADAPTIVE = AdaptiveTokens(length=13, score=GradientScore(), fill=False)

MODELS: dict[str, Any] = {
    "mae-self": MAEConfig(encoder=ENCODER, decoder=DecoderConfig(**DECODER), channels=1, shape=16),
    "mae-cross": MAEConfig(encoder=ENCODER, decoder=DecoderConfig(kind="cross", **DECODER), channels=1, shape=16),
    # Rotations that are learned are read by every block: no stage has them for itself.
    "mae-shared": MAEConfig(
        encoder=EncoderConfig(**SMALL, positions="rope", rope="superposed"),
        decoder=DecoderConfig(kind="cross", **DECODER),
        channels=1,
        shape=16,
    ),
    "vit": ViTConfig(**SMALL, channels=1, shape=16, classes=3, pool="cls", cls_token=True, positions="learned"),
    "vit-attention": ViTConfig(**SMALL, channels=1, shape=16, classes=3, pool="attention"),
    "unetr": UNETRConfig(encoder=EncoderConfig(**SMALL), features=2, channels=2, classes=3, shape=16),
    "sap": SAPConfig(
        encoder=EncoderConfig(**SMALL, tokens=ADAPTIVE, cls_token=True), features=4, channels=1, classes=3, shape=16
    ),
    "dit": DiTConfig(**SMALL, channels=1, classes=5, shape=16),
    "diffusion": DiffusionViTConfig(
        encoder=EncoderConfig(**SMALL), decoder=DiffusionDecoderConfig(**DECODER), channels=1, shape=16
    ),
}


@dataclass(frozen=True)
class Case:
    model: str
    parallel: dict[str, Any]
    micro: tuple[int, ...] = (2, 2, 2, 2)  # samples of each micro-batch
    counts: tuple[int, ...] | None = None
    steps: int = 1
    compute: torch.dtype = torch.float32
    recomputed: bool = False


@dataclass(frozen=True)
class Loss:
    sum: Tensor
    count: Tensor


CASES: dict[int, dict[str, Case]] = {
    2: {
        **{f"{name} 1F1B": Case(name, {}) for name in MODELS},
        "mae GPipe": Case("mae-self", {"schedule": "GPipe"}),
        "unetr GPipe": Case("unetr", {"schedule": "GPipe"}, (5,)),
        "mae interleaved": Case("mae-cross", {"schedule": "interleaved"}, steps=2),
        "shared interleaved": Case("mae-shared", {"schedule": "interleaved"}),
        "unetr interleaved": Case("unetr", {"schedule": "interleaved"}),
        "interleaved thrice": Case("mae-self", {"schedule": "interleaved", "stages": 3}),
        "interleaved, last smaller": Case("mae-self", {"schedule": "interleaved"}, (2, 2, 2, 2, 2, 1)),
        "uneven": Case("mae-self", {}, counts=(1, 9)),
        "cut among taps": Case("unetr", {}, counts=(3, 9)),
        "cut among joins": Case("unetr", {}, counts=(8, 4)),
        "cut after maps": Case("unetr", {}, counts=(7, 5)),
        "last smaller": Case("mae-cross", {}, (2, 2, 1), steps=3),
        "one": Case("dit", {}, (3,)),
        "batch of 1": Case("vit", {}, (1, 1)),
        "recomputed": Case("mae-self", {}, recomputed=True),
        "bf16": Case("mae-cross", {}, compute=torch.bfloat16),
        "bf16 unetr": Case("unetr", {"schedule": "interleaved"}, compute=torch.bfloat16),
    },
    4: {
        **{f"{name} 1F1B": Case(name, {}) for name in ("mae-self", "unetr", "sap", "dit")},
        "interleaved": Case("mae-cross", {"schedule": "interleaved"}, (1, 1, 1, 1) * 2),
        "GPipe": Case("unetr", {"schedule": "GPipe"}, (2, 2)),
        "shard 2": Case("mae-cross", {"pipeline": 2}, steps=2),
        "shard 2 unetr": Case("unetr", {"pipeline": 2, "schedule": "GPipe"}),
        "shard 2 interleaved": Case("mae-shared", {"pipeline": 2, "schedule": "interleaved", "wrap": 2}, steps=2),
        "shard 2 ahead": Case("mae-self", {"pipeline": 2, "prefetch": {"forward": 1, "backward": 2}}, steps=2),
        "grad-op 2": Case("mae-self", {"pipeline": 2, "strategy": "SHARD_GRAD_OP"}, (2, 2, 1), steps=2),
        "replicate 2, last smaller": Case("unetr", {"pipeline": 2, "strategy": "DDP"}, (2, 2, 1), steps=2),
        "replicate 2": Case("dit", {"pipeline": 2, "strategy": "DDP"}, steps=2),
        "replicate 2 interleaved": Case(
            "mae-shared", {"pipeline": 2, "strategy": "DDP", "schedule": "interleaved"}, steps=2
        ),
    },
}


def micro_batches(config: Any, case: Case, seed: int, rates: list[float]) -> list[tuple[dict[str, Any], Tensor]]:
    """Inputs, with masks and a drop-path table, and random targets."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for size in case.micro:
        images = torch.randn(size, config.channels, 16, 16, generator=draw)
        images[..., 8:] = 0  # where nothing is, trees do not split: some tokens are large, and some padding
        inputs, tokens = make_inputs(config, images)
        if isinstance(config, MAEConfig):
            noise = torch.rand(tokens.values.shape[:2], generator=draw)
            inputs = hide(inputs, *split_tokens(config, noise, tokens))
        if isinstance(config, DiTConfig):
            inputs["labels"] = torch.randint(5, (size,), generator=draw)
        if isinstance(config, DiTConfig | DiffusionViTConfig):
            inputs["times"] = torch.rand(size, generator=draw) * 900
        if any(rates):
            rate = torch.tensor(rates)[:, None]
            inputs["drop_path"] = (torch.rand(size, len(rates), 2, generator=draw) >= rate) / (1 - rate)
        found.append((inputs, torch.randn((), generator=draw)))
    return found


def loss(output: Tensor, target: Tensor) -> Loss:
    return Loss((output - target).square().sum() / 100, torch.tensor(output.numel()))


def build(config: Any) -> tuple[Any, Any]:
    """On the meta device, with rules of which none starts at 0: what is 0 has no gradient."""
    with torch.device("meta"):
        model = config.build()
    rules = {
        name: Normal(0.1) if isinstance(rule, Constant) and rule.value == 0 else rule
        for name, rule in init_rules(model).items()
    }
    return model, rules


def materialise(model: Any, rules: Any) -> Any:
    model.to_empty(device="cpu")
    initialise(model, rules, 0)
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def run(case: Case) -> dict[str, Any]:
    config, world = MODELS[case.model], dist.get_world_size()
    c = Parallel(**({"pipeline": world} | case.parallel))
    layout = layout_of(c, world)
    mesh = Mesh.make(layout, "cpu")
    plain, rules = build(config)
    options: dict[str, Any] = {"compute": case.compute, "reduce": torch.float32}
    if case.compute != torch.float32:
        shard.apply([(plain, plain.blocks())], mesh, layout, c, **options)
    materialise(plain, rules)
    model, _ = build(config)
    steps, blocks, rates, flops = len(model.stages()), len(model.blocks()), model.drop_path_rates(), model.flops()
    counts = list(case.counts or cut([1.0] * steps, num_parts(c, layout.pipeline)))
    pipeline = Pipeline(model, c, mesh, counts, torch.device("cpu"))
    if case.recomputed:
        recomputed(model.blocks(), "full")
    if layout.data > 1 or case.compute != torch.float32:
        shard.apply(pipeline.roots(), mesh, layout, c, **options)
    materialise(model, rules)
    names = {name for name, _ in model.named_parameters()}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, sorted(names))
    errors: dict[str, float] = {}
    for step in range(case.steps):
        batches = [micro_batches(config, case, 10 * step + rank, rates) for rank in range(layout.data)]
        expected = torch.zeros(2, dtype=torch.float64)
        for inputs, target in (one for batch in batches for one in batch):
            one = loss(plain(**inputs), target)
            one.sum.backward()
            expected += torch.stack([one.sum.detach().double(), one.count.double()])
        total = torch.stack(pipeline.forward_backward(batches[mesh.data_rank], loss))
        dist.all_reduce(total)
        errors[f"{step} loss"] = apart(total, expected)
        for name in pipeline.shared:
            gradient = model.get_parameter(name).grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=mesh["pipeline"].get_group())
        found = {name: full(p.grad) for name, p in model.named_parameters()}
        wanted = {name: full(p.grad) for name, p in plain.named_parameters()}
        errors |= {f"{step} {name}": apart(gradient, wanted[name]) for name, gradient in found.items()}
        least = min(float(gradient.abs().max()) for gradient in wanted.values())
        for either in (plain, model):
            with torch.no_grad():
                for p in either.parameters():  # an update, which gathered parameters must not hide
                    p.sub_(p.grad, alpha=1e-3)
                    p.grad = None
    inputs, _ = micro_batches(config, case, 77, rates)[0]
    errors["evaluation"] = apart(pipeline(**inputs).detach(), plain(**inputs).detach())
    blocks_here = model.blocks()
    return {
        "least": least,
        "error": max(errors.values()),
        "worst": max(errors, key=errors.__getitem__),
        "names": sorted({name for several in gathered for name in several}) == sorted(rules),
        "apart": sum(map(len, gathered)) // layout.data < len(rules) * layout.pipeline,
        "shared": list(pipeline.shared),
        "blocks": [len(blocks_here), blocks],
        "asks": model.drop_path_rates() == rates and model.flops() == flops,
    }


def wrong_inputs() -> dict[str, str]:
    """Errors come out as they were raised; the last one leaves the other ranks waiting."""
    found: dict[str, str] = {}
    c, last = Parallel(pipeline=2), dist.get_rank() == 1
    mesh = Mesh.make(layout_of(c, 2), "cpu")
    model, rules = build(MODELS["unetr"])
    try:
        Pipeline(model, c, mesh, [5, 8], torch.device("cpu"))
    except ValueError as error:
        found["counts"] = str(error)
    model, rules = build(MODELS["dit"])
    pipeline = Pipeline(model, c, mesh, [3, 3], torch.device("cpu"))
    materialise(model, rules)
    batch = micro_batches(MODELS["dit"], Case("dit", {}), 0, model.drop_path_rates())
    try:
        pipeline.forward_backward([(inputs | {"colour": 1}, target) for inputs, target in batch], loss)
    except ValueError as error:
        found["unknown"] = str(error)
    pipeline.forward_backward(batch, loss)
    (schedule,) = pipeline._schedules.values()
    infos = (schedule._stage.grad_recv_info, schedule._stage.args_recv_info)
    buffers = [info.buffer for table in infos for row in table.values() for info in row]
    found["kept"] = str(len(buffers) * sum(buffer.numel() for buffer in buffers))

    def failing(output: Tensor, target: Tensor) -> Loss:
        raise UserError("labels: 7 is not the number of a class")

    try:
        pipeline.forward_backward(batch, failing)
    except UserError as error:
        found["inside"] = str(error)
    except RuntimeError as error:
        found["lost"] = type(error).__name__
    found["last"] = str(last)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world, results = dist.get_world_size(), {}
    for name, case in CASES[world].items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        mine = run(case)
        several: list[Any] = [None] * world
        dist.all_gather_object(several, mine)
        results[name] = several
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.barrier()
    if world == 2 and len(sys.argv) == 2:
        Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(wrong_inputs()))
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end(0)
