"""Rings and Ulysses on a GPU, with all ranks in one process, against the reference in fp32."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vitrail.layers.attention import attend, attend_reference, key_mask
from vitrail.layers.backends import Call, available_backends, machine, refusal, use_backend
from vitrail.layers.kernels.attention import run_part, run_part_backward

pytestmark = pytest.mark.gpu

LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2), (8, 2)]  # ranks, of which so many trade heads
SHAPES = [  # batch, queries and keys a rank, heads, groups, width
    (2, 96, 96, 4, 4, 64),
    (2, 77, 50, 4, 2, 64),
    (1, 130, 64, 4, 4, 128),
    (2, 40, 33, 2, 1, 20),
    (2, 33, 2, 2, 2, 64),  # the last rank is left with a single key
]
NAMES = (
    [name for name, reason in available_backends("cuda").items() if reason is None] if torch.cuda.is_available() else []
)

SPEC = importlib.util.spec_from_file_location(
    "simulated_context", Path(__file__).parents[2] / "benchmarks/simulated_context.py"
)
assert SPEC is not None
assert SPEC.loader is not None
SIMULATED = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SIMULATED)
simulate_context = SIMULATED.simulate_context


def draw(shape: tuple[int, ...], ranks: int, dtype: torch.dtype) -> list[Tensor]:
    batch, queries, keys, heads, groups, width = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(ranks * queries, heads), (ranks * keys, groups), (ranks * keys, groups)]
    drawn = [torch.randn((batch, n, h, width), generator=generator) for n, h in sizes]
    return [t.to("cuda", dtype).requires_grad_() for t in drawn]


def some_keys(batch: int, keys: int) -> Tensor:
    valid = torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) > 0.3
    valid[0] = torch.arange(keys) < keys // 3  # ranks that have none
    if batch > 1:
        valid[1] = False  # nothing to see
    return valid.cuda()


def refuse(name: str, shape: tuple[int, ...], dtype: torch.dtype, masked: bool, partial: bool) -> None:
    batch, queries, keys, heads, groups, width = shape
    here = machine("cuda")
    call = Call(here.device, here.capability, dtype, batch, heads, groups, queries, keys, width, masked, True, partial)
    if refusal(name, call):
        pytest.skip(refusal(name, call) or "")


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    assert all(a.isfinite().all() for a, _ in pairs)
    some = [(a, b) for a, b in pairs if a.numel()]  # where every key is hidden, no log-sum-exp is left
    return max(((a.float() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in some)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_keys(name: str, shape: tuple[int, ...], masked: bool, dtype: torch.dtype) -> None:
    """The log-sum-exp, and the gradients with that over all keys, of every kernel."""
    if name == "auto":
        pytest.skip("is one of the others")
    refuse(name, shape, dtype, masked, True)
    q, k, v = (t.detach() for t in draw(shape, 1, dtype))
    exact = [t.float() for t in (q, k, v)]
    mask = None
    if masked:
        with use_backend(name):
            mask = key_mask(some_keys(shape[0], shape[2]))
    found = run_part((name,), q, k, v, mask)
    right = run_part(("reference",), *exact, mask)
    seen = slice(None) if mask is None else mask.filled
    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3  # fp32 may go through TF32
    assert worst([(found[0], right[0]), (found[1][seen], right[1][seen])]) <= tolerance
    assert (found[1] == float("-inf")).equal(right[1] == float("-inf"))
    grad, all_lse = torch.randn_like(q), right[1] + 0.7  # as if there were other keys
    gradients = run_part_backward((name,), grad, q, k, v, right[0].to(dtype), all_lse, mask)
    expected = run_part_backward(("reference",), grad.float(), *exact, right[0], all_lse, mask)
    assert worst(list(zip(gradients, expected, strict=True))) <= 2 * tolerance


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["auto", "cudnn", "flash", "efficient", "varlen", "flash4"])
def test_simulated_ranks(name: str, shape: tuple[int, ...], layout: tuple[int, int], masked: bool) -> None:
    """No worse than full attention by the same kernel."""
    if name not in NAMES:
        pytest.skip(available_backends("cuda")[name] or "")
    ranks, ulysses = layout
    batch, queries, keys, heads, groups, width = shape
    whole = (batch, ranks * queries, ranks * keys, heads, groups, width)
    refuse(name, whole, torch.bfloat16, masked, ranks > ulysses)
    tensors = draw(shape, ranks, torch.bfloat16)
    exact = [t.detach().float().requires_grad_() for t in tensors]
    keep = torch.tensor([i for i in range(ranks * keys - 1) if i == 0 or i % keys])
    valid = some_keys(batch, len(keep)) if masked else None
    kept = [t[:, keep.cuda()] for t in exact[1:]]
    expected = attend_reference(exact[0], *kept, mask=valid)
    weight = torch.randn_like(expected)
    right = torch.autograd.grad((expected * weight).sum(), exact)
    with use_backend(name):
        parts = [t.chunk(ranks, dim=1) for t in tensors]
        out = torch.cat(simulate_context(*parts, ulysses=ulysses, keep=keep, valid=valid), dim=1)
        found = torch.autograd.grad((out.float() * weight).sum(), tensors)
        full = attend(tensors[0], *(t[:, keep.cuda()] for t in tensors[1:]), mask=valid)
        plain = torch.autograd.grad((full.float() * weight).sum(), tensors)
    assert worst([(out, expected)]) <= 1.5 * worst([(full, expected)]) + 2e-3
    for a, b, c in zip(found, plain, right, strict=True):
        assert worst([(a, c)]) <= 1.5 * worst([(b, c)]) + 4e-3
    if valid is not None and batch > 1:
        assert not any(t[1].any() for t in (out, *found))


def test_memory_does_not_grow_with_the_ring() -> None:
    """The same tokens in more parts need no more memory."""

    def peak(ranks: int) -> int:
        tensors = draw((1, 16384 // ranks, 16384 // ranks, 4, 4, 64), ranks, torch.bfloat16)
        parts = [t.chunk(ranks, dim=1) for t in tensors]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cat(simulate_context(*parts), dim=1).float().sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(2)
    assert peak(8) < 1.2 * peak(2)
    assert peak(8) < 400 * 2**20  # the scores of one head in bf16 would be 512 MiB
