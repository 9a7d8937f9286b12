"""Recomputation, pieces and float8 on a GPU: what is held, what is computed, and what compiled blocks do."""

from typing import Any

import pytest
import torch
from support import recomputed
from torch import Tensor, nn

from vitrail.layers.attention import key_mask
from vitrail.layers.backends import available_backends, use_backend
from vitrail.layers.block import Block, BlockConfig
from vitrail.models import ViT, ViTConfig
from vitrail.parallel import chunk, float8
from vitrail.recipe.sections import Recompute

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CHOICES: list[Any] = [
    "none",
    Recompute(keep=("attention", "qkv", "proj", "fc1")),
    Recompute(keep=("attention", "proj")),
    Recompute(keep=("attention",)),
    "full",
]


def make(depth: int = 4, **changes: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    standard: dict[str, Any] = {
        "width": 512, "heads": 8, "kv_heads": 8, "hidden": 2048, "mlp": "gelu", "norm": "layer", "eps": 1e-6,
        "bias": True, "qk_norm": False, "layer_scale": None,
    }  # fmt: skip
    return nn.ModuleList(Block(BlockConfig(**(standard | changes))) for _ in range(depth)).to(CUDA, torch.bfloat16)


def step(blocks: nn.ModuleList, x: Tensor, mask: Any = None) -> tuple[list[Tensor], int]:
    """Gradients, and the bytes that a forward leaves behind."""
    blocks.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for block in blocks:
        x = block(x, mask=mask)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    x.float().square().mean().backward()
    return [p.grad for p in blocks.parameters()], held  # type: ignore[misc]


def near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_less_is_held_the_more_is_recomputed(compiled: bool) -> None:
    x = torch.randn(4, 1024, 512, device=CUDA, dtype=torch.bfloat16)
    memory, gradients = [], []
    for choice in CHOICES:
        torch._dynamo.reset()
        blocks = make()
        recomputed(list(blocks), choice)
        if compiled:
            for block in blocks:
                block.compile(fullgraph=True)
        step(blocks, x)  # compiles
        found, held = step(blocks, x)
        gradients.append([g.clone() for g in found])
        memory.append(held)
    for found in gradients[1:]:
        near(found, gradients[0], 2e-2)
    assert memory == sorted(memory, reverse=True)
    tokens = 4 * 1024 * 512 * 2  # bytes of one tensor of tokens
    assert memory[-1] <= 5.5 * tokens  # full: an input a block, and the output
    assert memory[-2] <= memory[-1] + 4 * 1.2 * tokens  # attention: its output and log-sum-exp more


BACKENDS = ["cudnn", "flash", "efficient", "flex", "varlen", "flash4", "xformers"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_of_every_kernel_is_kept(name: str, compiled: bool) -> None:
    if (reason := available_backends("cuda")[name]) is not None:
        pytest.skip(reason)
    masked = name in ("flex", "varlen")
    x = torch.randn(2, 512, 512, device=CUDA, dtype=torch.bfloat16)
    with use_backend(name):
        mask = key_mask(torch.arange(512, device=CUDA) < torch.tensor([[300], [512]], device=CUDA)) if masked else None
        results = []
        for choice in ("none", Recompute(keep=("attention",)), "full"):
            torch._dynamo.reset()
            blocks = make(2)
            recomputed(list(blocks), choice)  # type: ignore[arg-type]
            if compiled:
                for block in blocks:
                    block.compile()
            step(blocks, x, mask)
            found, held = step(blocks, x, mask)
            results.append(([g.clone() for g in found], held))
    near(results[1][0], results[0][0], 2e-2)
    near(results[2][0], results[0][0], 2e-2)
    assert results[0][1] > results[1][1] >= results[2][1]
    if compiled or name != "flex":  # a kernel that is compiled by itself is not seen from outside
        assert results[1][1] > results[2][1]


def test_pieces_need_less_at_the_peak() -> None:
    x = torch.randn(1, 32768, 512, device=CUDA, dtype=torch.bfloat16)
    peaks = []
    for size in (None, 4096):
        torch._dynamo.reset()
        blocks = make(1, hidden=8192)
        if size is not None:
            chunk.in_pieces_of(blocks[0].mlp, size)  # type: ignore[arg-type]
        recomputed(list(blocks), "full")
        step(blocks, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(blocks, x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_gw"])
def test_float8_is_near_bf16(recipe: Any, compiled: bool) -> None:
    pytest.importorskip("torchao")
    if (reason := float8.refusal(CUDA)) is not None:
        pytest.skip(reason)
    results = []
    for eight in (False, True):
        torch._dynamo.reset()
        config = ViTConfig(width=512, depth=2, heads=8, patch=16, channels=3, classes=10)
        model = ViT(config).to(CUDA, torch.bfloat16)
        if eight:
            judged = float8.apply(model, device=CUDA, rows=788, recipe=recipe, force=True)
            assert len(judged.taken) == 8
        recomputed(model.blocks(), Recompute(keep=("attention", "fc1")))
        if compiled:
            for block in model.blocks():
                block.compile()
        images = torch.randn(4, 3, 224, 224, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
        inputs = model.inputs(images)
        model(**inputs).float().square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    near(results[1], results[0], 0.3)
