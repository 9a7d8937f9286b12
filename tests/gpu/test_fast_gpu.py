"""Kernels of faster ways on a GPU, each against the torch code, and whole blocks with and without them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitrail.layers import fused, maps
from vitrail.layers.block import Block, BlockConfig, ModulatedBlock
from vitrail.layers.convolutions import ConvBlock
from vitrail.layers.fast import use_fast
from vitrail.layers.kernels import load_kernels

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to("cuda", BF16)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12))


def both(monkeypatch: pytest.MonkeyPatch, module: Any, call: Any) -> tuple[Any, Any]:
    """What the kernels give, and the torch code."""
    with_kernels = call()
    assert module._kernels(torch.empty(1, device="cuda")) is not None, "there are no kernels here"
    monkeypatch.setattr(module, "_kernels", lambda x: None)
    return with_kernels, call()


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", [(3, 50, 200), (64, 196, 4096), (2, 7, 24)])
def test_gelu(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], tanh: bool) -> None:
    grad, x = draw(*shape), 2 * draw(*shape, seed=1)
    found, expected = both(monkeypatch, fused, lambda: fused._gelu_back(grad, x, tanh))
    assert error(found[0], expected[0]) < 2e-3
    assert error(found[1], expected[1]) < 5e-3


@pytest.mark.parametrize("shape", [(2, 37, 3, 24), (64, 196, 16, 64), (4, 256, 16, 72)])
@pytest.mark.parametrize("turned", [False, True])
def test_packing(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], turned: bool) -> None:
    b, n, h, k = shape
    given = [draw(b, h, n, k, seed=i).transpose(1, 2) if turned else draw(*shape, seed=i) for i in range(3)]
    found, expected = both(monkeypatch, fused, lambda: fused._pack_back(*given))
    assert torch.equal(found[0], expected[0])
    assert error(found[1], expected[1]) < 5e-3


@pytest.mark.parametrize("shape", [(3, 13, 24), (8, 196, 768), (64, 196, 1024), (4, 256, 1152)])
def test_norms(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    grad, x, past, weight = draw(*shape), draw(*shape, seed=1) + 1, draw(*shape, seed=2), draw(shape[-1])
    found, expected = both(monkeypatch, fused, lambda: fused._norm_back(grad, x, past, weight, 1e-6))
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < 5e-3


@pytest.mark.parametrize("shape", [(3, 13, 24), (16, 256, 1152)])
def test_gates(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    batch, tokens, width = shape
    grad, x, branch = draw(*shape), draw(*shape, seed=1) + 1, draw(*shape, seed=2)
    past = draw(batch, tokens + 1, width)[:, 1:]
    gate, scale = draw(batch, width), draw(batch, width, seed=1)
    found, expected = both(
        monkeypatch,
        fused,
        lambda: (
            *fused._gated_norm_back(grad, x, past, branch, gate, scale, 1e-6),
            *fused._gate_back(past, branch, gate),
        ),
    )
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < 5e-3


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 33, 17, 40), (2, 19, 70)])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (32, 16), (16, 32), (64, 32), (64, 64)])
def test_convolutions(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], inputs: int, outputs: int) -> None:
    x, grad = draw(*shape, inputs), draw(*shape, outputs, seed=1)
    weight = draw(3 ** (len(shape) - 1), inputs, outputs)
    found, expected = both(monkeypatch, maps, lambda: (maps._convolve(x, weight), maps._weigh(x, grad)))
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < 5e-3


def gradients(call: Any, block: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = call(x)
    weights = draw(*out.shape, seed=5)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Block, ModulatedBlock, ConvBlock])
def test_blocks(kind: Any, compiled: bool) -> None:
    """As near to fp32 as the usual way is."""
    torch.manual_seed(0)
    if kind is ConvBlock:
        block, x, ways = ConvBlock(3, 32, 16, residual=True, affine=True), draw(2, 32, 16, 24, 16), ("maps", "conv")
    else:
        c = BlockConfig(width=256, heads=4, kv_heads=4, hidden=1024, mlp="gelu", norm="layer", eps=1e-6, bias=True,
                        qk_norm=False, layer_scale=None)  # fmt: skip
        block, x, ways = kind(c), draw(8, 65, 256), ("gelu", "bias", "norm")
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    block = block.cuda()
    exact = gradients(block, block, x.float())
    block = block.bfloat16()
    usual = gradients(block, block, x)
    with use_fast(*ways):
        torch._dynamo.reset()
        found = gradients(torch.compile(block) if compiled else block, block, x)
    torch._dynamo.reset()
    for a, b, c in zip(found, usual, exact, strict=True):
        assert error(a, c) < 1.3 * error(b, c) + 4e-3


def test_the_kernels_load() -> None:
    for name in ("rows", "maps"):
        assert load_kernels(f"vitrail.layers.kernels.{name}", torch.device("cuda"), "this") is not None
