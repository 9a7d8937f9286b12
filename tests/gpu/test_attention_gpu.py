"""Attention backends on a GPU, each against the reference in fp32."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitrail.layers.attention import attend, attend_reference, key_mask
from vitrail.layers.backends import Call, available_backends, machine, refusal, use_backend
from vitrail.layers.block import Block, BlockConfig
from vitrail.layers.kernels import attention as kernels

pytestmark = pytest.mark.gpu

SHAPES = [  # batch, queries, keys, heads, groups, width; 320 keys are 64 modulo 128
    (2, 200, 320, 4, 4, 64),
    (2, 320, 320, 6, 2, 64),
    (1, 129, 1000, 2, 2, 128),
    (3, 77, 300, 2, 1, 105),
    (2, 40, 130, 2, 2, 16),
    (2, 1, 200, 4, 4, 32),
]
NAMES = (
    [name for name, reason in available_backends("cuda").items() if reason is None] if torch.cuda.is_available() else []
)


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    batch, queries, keys, heads, groups, width = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width)]
    return [torch.randn(size, generator=generator).to("cuda", dtype).requires_grad_() for size in sizes]


def some_keys(batch: int, keys: int) -> Tensor:
    valid = torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) > 0.3
    valid[0] = torch.arange(keys) < keys // 2  # whole blocks are masked
    if batch > 1:
        valid[1] = False  # nothing to see
    return valid.cuda()


def check(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.isfinite().all()
    assert (found.float() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_backends_equal_the_reference(name: str, shape: tuple[int, ...], masked: bool, dtype: torch.dtype) -> None:
    batch, queries, keys, heads, groups, width = shape
    here = machine("cuda")
    call = Call(here.device, here.capability, dtype, batch, heads, groups, queries, keys, width, masked, True)
    if refusal(name, call):
        pytest.skip(refusal(name, call) or "")
    tensors = draw(shape, dtype)
    exact = [t.detach().float().requires_grad_() for t in tensors]
    mask = some_keys(batch, keys) if masked else None
    with use_backend(name):
        out = attend(*tensors, mask=None if mask is None else key_mask(mask))
    expected = attend_reference(*exact, mask=mask)
    weight = torch.randn_like(expected)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3  # fp32 may go through TF32
    check(out, expected, tolerance)
    found = torch.autograd.grad((out.float() * weight).sum(), tensors)
    for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
        check(a, b, 2 * tolerance)
    if mask is not None:
        assert not found[1][~mask].any()
        assert not found[2][~mask].any()


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["flex", "varlen", "auto"])
def test_masks_pass_through_compiled_blocks(name: str, recomputed: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = BlockConfig(
        width=128, heads=2, kv_heads=2, hidden=128, mlp="gelu", norm="layer", eps=1e-6, bias=True, qk_norm=False,
        layer_scale=None,
    )  # fmt: skip
    block = Block(config).cuda().bfloat16()
    x = torch.randn(2, 300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    valid = torch.arange(300, device="cuda") < torch.tensor([[170], [300]], device="cuda")

    def forward(x: Tensor, mask: kernels.KeyMask) -> Tensor:
        if recomputed:
            return checkpoint(block, x, mask=mask, use_reentrant=False, preserve_rng_state=False)
        return block(x, mask=mask)

    with use_backend(name):
        out = torch.compile(forward, fullgraph=True)(x, key_mask(valid))
        (found,) = torch.autograd.grad(out.float().square().sum(), [x])
    with use_backend("reference"):
        expected = block(x, mask=key_mask(valid))
        (right,) = torch.autograd.grad(expected.float().square().sum(), [x])
    check(out, expected.float(), 2e-2)
    check(found, right.float(), 4e-2)


@pytest.mark.parametrize("name", ["flex", "varlen", "efficient"])
def test_memory_of_a_masked_call_is_linear(name: str) -> None:
    def peak(tokens: int) -> int:
        q, k, v = draw((1, tokens, tokens, 2, 2, 64), torch.bfloat16)
        mask = key_mask(torch.arange(tokens, device="cuda")[None] < tokens - 100)
        attend(q, k, v, mask=mask).sum().backward()  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(q, k, v, mask=mask).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    with use_backend(name):
        assert peak(16384) < 2.5 * peak(8192)
        assert peak(16384) < 200 * 2**20  # the matrix of one head in bf16 would be 512 MiB
