"""Faster ways give the numbers of the usual one, gradients included; none is on unless it is asked for."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers import gelu
from vitrail.layers.block import Block, BlockConfig, ModulatedBlock
from vitrail.layers.convolutions import ConvBlock, Join, convolution, convolve
from vitrail.layers.fast import NAMES, ON_GPU, is_fast, use_fast
from vitrail.layers.fused import suits
from vitrail.layers.maps import suits_small


def make(kind: type[nn.Module], **changes: Any) -> nn.Module:
    told: dict[str, Any] = {
        "width": 24, "heads": 3, "kv_heads": 3, "hidden": 40, "mlp": "gelu", "norm": "layer", "eps": 1e-6,
        "bias": True, "qk_norm": False, "layer_scale": None,
    }  # fmt: skip
    torch.manual_seed(0)
    block = kind(BlockConfig(**(told | changes)))  # type: ignore[call-arg]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    out = block(x)
    names = [name for name, _ in block.named_parameters()]
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    found = torch.autograd.grad((out * weights).sum(), [x, *block.parameters()], allow_unused=True)
    assert all(g is not None for g in found), [n for n, g in zip(names, found[1:], strict=True) if g is None]
    return [out.detach(), *found]  # type: ignore[list-item]


def test_none_is_on_by_itself_on_a_cpu_and_all_are_put_back() -> None:
    def on(device: str) -> list[str]:
        return [name for name in NAMES if is_fast(name, device)]

    assert on("cpu") == on("meta") == []
    assert set(on("cuda")) == ON_GPU
    with use_fast("gelu", "maps"):
        assert on("cpu") == on("cuda") == ["gelu", "maps"]
        with use_fast():
            assert on("cpu") == on("cuda") == []
        assert on("cuda") == ["gelu", "maps"]
    assert on("cpu") == []
    assert set(on("cuda")) == ON_GPU
    with pytest.raises(ValueError, match="quick: no such way; there are gelu, bias"):
        use_fast("quick")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_exact_to_fp32(approximate: Literal["none", "tanh"]) -> None:
    x = torch.linspace(-12, 12, 10_001).requires_grad_()
    wide = x.detach().double().requires_grad_()
    told = F.gelu(wide, approximate=approximate)
    told.sum().backward()
    found = gelu.gelu(x, tanh=approximate == "tanh")
    found.sum().backward()
    assert wide.grad is not None
    assert x.grad is not None
    assert (found - told).abs().max() < 1e-6  # of numbers up to 12
    assert (x.grad - wide.grad).abs().max() < (3e-6 if approximate == "tanh" else 7e-7)
    near = x.detach().abs() < 3
    assert ((found - told) / told.abs().clamp(min=1e-3)).abs()[near].max() < 1e-4


@pytest.mark.parametrize("ways", [("gelu",), ("gelu", "bias"), ("norm",), ("gelu", "bias", "norm")])
@pytest.mark.parametrize("kind", [Block, ModulatedBlock])
def test_a_block_is_the_same(kind: type[nn.Module], ways: tuple[str, ...]) -> None:
    block, x = make(kind), torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    expected = gradients(block, x)
    with use_fast(*ways):
        found = gradients(block, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"bias": False}, {"norm": "rms"}, {"layer_scale": 0.5}, {"residual": "post"},
                {"mlp": "swiglu"}, {"qk_norm": True}],
)  # fmt: skip
def test_blocks_of_other_makes_are_the_same_too(changes: dict[str, Any]) -> None:
    block, x = make(Block, **changes), torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    expected = gradients(block, x)
    with use_fast("gelu", "bias", "norm"):
        found = gradients(block, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_in_bf16_a_block_is_as_near_to_fp32_as_the_usual_one() -> None:
    block, x = make(Block), torch.randn(4, 9, 24, generator=torch.Generator().manual_seed(1))
    exact = gradients(block, x)
    small = make(Block).bfloat16()
    usual = gradients(small, x.bfloat16())
    with use_fast("gelu", "bias", "norm"):
        found = gradients(small, x.bfloat16())

    def error(a: Tensor, b: Tensor) -> float:
        return float((a.float() - b).norm() / b.norm())

    for a, b, c in zip(found, usual, exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert error(a, c) < 1.3 * error(b, c) + 2e-3


@pytest.mark.parametrize("kind", [Block, ModulatedBlock])
def test_compiled_blocks_are_whole_and_the_same(kind: type[nn.Module]) -> None:
    block, x = make(kind), torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    expected = gradients(block, x)
    with use_fast("gelu", "bias", "norm"):
        torch._dynamo.reset()
        found = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), x)  # type: ignore[arg-type]
    torch._dynamo.reset()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_layers_that_were_changed_are_left_alone() -> None:
    layer = nn.Linear(4, 4)
    with use_fast("bias"):
        assert suits("bias", layer)
        assert not suits("norm", layer)
        assert not suits("bias", nn.Linear(4, 4, bias=False))
        with torch.no_grad():
            assert not suits("bias", layer)
        layer.forward = lambda x: x  # type: ignore[method-assign]
        assert not suits("bias", layer)
    assert not suits("bias", nn.Linear(4, 4))


def marked(module: nn.Module) -> nn.Module:
    """The module with weights that are neither 0 nor alike."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("ways", [("maps",), ("maps", "conv")])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("ndim", "inputs", "outputs"), [(3, 16, 16), (3, 32, 16), (2, 16, 32), (3, 1, 16), (2, 3, 32), (2, 3, 5)]
)
def test_blocks_of_convolutions_are_the_same(
    ndim: int, inputs: int, outputs: int, affine: bool, ways: tuple[str, ...]
) -> None:
    block = marked(ConvBlock(ndim, inputs, outputs, residual=True, affine=affine))
    x = torch.randn(2, inputs, *(3, 4, 5)[:ndim], generator=torch.Generator().manual_seed(1))
    expected = gradients(block, x)
    with use_fast(*ways):
        found = gradients(block, x)
        assert suits_small(x, block.conv1.weight) == ("conv" in ways and outputs >= 16)  # type: ignore[arg-type, union-attr]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ways", [("maps",), ("maps", "conv")])
def test_joins_and_the_last_layer_are_the_same(ways: tuple[str, ...]) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = Join(8, 16, (2, 2, 2), residual=True, affine=False)
            self.out = convolution(3, 16, 5, width=1, bias=True)

        def forward(self, x: Tensor) -> Tensor:
            skip = torch.linspace(-1, 1, 2 * 16 * 4**3).view(2, 16, 4, 4, 4)
            return convolve(self.out, self.join(x, skip))

    decoder, x = marked(Decoder()), torch.randn(2, 8, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    expected = gradients(decoder, x)
    with use_fast(*ways):
        call: Any = decoder
        if "conv" in ways:  # compiled as a whole, too
            torch._dynamo.reset()
            call = torch.compile(decoder, backend="aot_eager", fullgraph=True)
        found = gradients(call, x)
    torch._dynamo.reset()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
