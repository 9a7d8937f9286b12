"""Attention over ranks, with all ranks in one process, and the kernels for a part of the keys."""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.layers.attention import attend_reference, key_mask
from vitrail.layers.backends import Call, choose, preferred, refusal, use_backend
from vitrail.layers.kernels import attention as kernels
from vitrail.layers.kernels.attention import KeyMask, run_part, run_part_backward
from vitrail.parallel.context import (
    ALONE,
    Ranks,
    attend_context,
    choose_ulysses,
    context_keys,
    merge,
    ranks_of_context,
    repeat_groups,
)

SPEC = importlib.util.spec_from_file_location(
    "simulated_context", Path(__file__).parents[2] / "benchmarks/simulated_context.py"
)
assert SPEC is not None
assert SPEC.loader is not None
SIMULATED = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SIMULATED)
simulate_context = SIMULATED.simulate_context


def draw(queries: int, keys: int, *, heads: int = 4, groups: int = 2, batch: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, queries, heads, 6), (batch, keys, groups, 6), (batch, keys, groups, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def some_keys(keys: int) -> Tensor:
    valid = torch.rand(3, keys, generator=torch.Generator().manual_seed(1)) > 0.4
    valid[1] = False
    valid[2] = torch.arange(keys) < 2
    return valid


# ---------------------------------------------------------------- a part of the keys


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["flash", "math", "reference"])
def test_parts_merge_to_the_whole(name: str, masked: bool) -> None:
    q, k, v = draw(5, 11)
    valid = some_keys(11) if masked else None
    cuts = [slice(0, 4), slice(4, 11)]
    masks = [None if valid is None else key_mask(valid[:, cut]) for cut in cuts]
    expected = attend_reference(q, k, v, mask=valid)
    grad = torch.randn_like(expected)
    right = torch.autograd.grad(expected, [q, k, v], grad)
    with torch.no_grad():
        out, lse = run_part((name,), q, k[:, cuts[0]], v[:, cuts[0]], masks[0])
        out = out.clone()
        lse = merge(out, lse, *run_part((name,), q, k[:, cuts[1]], v[:, cuts[1]], masks[1]))
        torch.testing.assert_close(out, expected)
        found = [
            run_part_backward((name,), grad, q, k[:, cut], v[:, cut], out, lse, mask)
            for cut, mask in zip(cuts, masks, strict=True)
        ]
    torch.testing.assert_close(found[0][0] + found[1][0], right[0])
    for at in (1, 2):
        torch.testing.assert_close(torch.cat([found[0][at], found[1][at]], dim=1), right[at])
    if masked:
        assert not lse[1].isfinite().any()
        assert lse[0].isfinite().all()


def test_log_sum_exp() -> None:
    q, k, v = (t.detach() for t in draw(5, 11, groups=4))
    expected = (torch.einsum("bnhk,bmhk->bhnm", q, k) / 6**0.5).logsumexp(-1)
    for name in ("flash", "math"):
        torch.testing.assert_close(run_part((name,), q, k, v, None)[1], expected)


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient", "varlen"])
def test_gpu_kernels_are_called_as_they_are_declared(name: str) -> None:
    """Without a GPU: arguments fit the operators, and shapes come out right."""
    q = torch.empty(2, 40, 4, 20, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 50, 2, 20, dtype=torch.bfloat16, device="meta")
    masks: list[KeyMask | None] = [None] if name != "varlen" else []
    if name in ("efficient", "varlen"):
        valid = torch.ones(2, 50, dtype=torch.bool, device="meta")
        masks.append(KeyMask(valid, valid.any(dim=1), packing=kernels.pack_keys(valid)))
    for mask in masks:
        out, lse = run_part((name,), q, k, k, mask)
        assert out.shape == q.shape
        assert lse.shape == (2, 4, 40)
        assert lse.dtype == torch.float32
        dq, dk, dv = run_part_backward((name,), out, q, k, k, out, lse, mask)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_a_single_key_is_not_given_to_cudnn() -> None:
    q, k, v = (t.detach() for t in draw(5, 1))
    one = kernels._part_kernel("cudnn", q, k)
    assert one == kernels._part_kernel("math", q, k)
    torch.testing.assert_close(one[0](q, k, v, None, 0.5)[0], attend_reference(q, k, v))


def test_backends_without_a_log_sum_exp_are_refused() -> None:
    call = Call("cuda", (9, 0), torch.bfloat16, 1, 4, 4, 8192, 8192, 64, False, True, partial=True)
    for name in ("flex", "xformers"):
        assert "ring attention" in (refusal(name, call) or "")
        with pytest.raises(UserError, match=f"attention: '{name}' cannot .* ring attention.* choose one of cudnn"):
            choose(call, (name, "cudnn", "math"), name)
    assert choose(call, preferred(call))[0] == "flash4"
    assert choose(call._replace(masked=True), ("varlen", "flex", "efficient", "math"))[0] == "varlen"
    assert choose(call._replace(masked=True), ("flex", "efficient", "math"))[0] == "efficient"
    assert choose(call._replace(dtype=torch.float32), ("flash", "efficient", "math"))[0] == "efficient"
    q, k, v = draw(4, 4)
    with use_backend("flex"), pytest.raises(UserError, match="ring attention"):
        simulate_context(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1))


# ---------------------------------------------------------------- all ranks in one process


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "ulysses"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4), (8, 4)])
def test_simulated_ranks_equal_full_attention(ranks: int, ulysses: int, groups: int, kept: bool, masked: bool) -> None:
    q, k, v = draw(ranks * 3, ranks * 4, groups=groups)
    keep = torch.tensor([i for i in range(ranks * 4 - 1) if i == 0 or i % 4]) if kept else None
    valid = some_keys(ranks * 4 if keep is None else len(keep)) if masked else None
    parts = [t.chunk(ranks, dim=1) for t in (q, k, v)]
    out = torch.cat(simulate_context(*parts, ulysses=ulysses, keep=keep, valid=valid), dim=1)
    expected = attend_reference(q, *(t if keep is None else t[:, keep] for t in (k, v)), mask=valid)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found, right = (torch.autograd.grad(o, [q, k, v], grad) for o in (out, expected))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


def test_large_scores_merge_without_overflow() -> None:
    q, k, v = (t.detach().float() * 60 for t in draw(8, 8, groups=4))
    out = torch.cat(simulate_context(q.chunk(4, 1), k.chunk(4, 1), v.chunk(4, 1)), dim=1)
    torch.testing.assert_close(out, attend_reference(q, k, v))


def test_rings_add_up_in_fp32() -> None:
    """Of bf16 inputs each part is rounded once, and their sum once more: not after every part."""
    ranks, generator = 16, torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, ranks * 4, 2, 16, generator=generator).bfloat16() for _ in range(4))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    keys = list(zip(k.detach().chunk(ranks, 1), v.detach().chunk(ranks, 1), strict=True))
    with use_backend("math"):
        out = torch.cat(simulate_context(*(t.chunk(ranks, 1) for t in (q, k, v))), dim=1)
        found = torch.autograd.grad(out, [q, k, v], grad)
    with torch.no_grad():
        parts = [run_part(("math",), q, *pair, None) for pair in keys]
        lses = torch.stack([lse for _, lse in parts]).double()  # parts B H L
        weights = lses.softmax(0).transpose(2, 3)[..., None]
        expected = sum(part.double() * weight for (part, _), weight in zip(parts, weights, strict=True))
        assert (out == expected.bfloat16()).float().mean() > 0.98
        lse = lses.logsumexp(0).float()
        own = [run_part_backward(("math",), grad, q, *pair, out, lse, None) for pair in keys]
        dq = sum(one[0].double() for one in own).bfloat16()
        assert (found[0] == dq).float().mean() > 0.98
        queries = [slice(rank * 4, rank * 4 + 4) for rank in range(ranks)]
        for at, pair in enumerate(keys):
            mine = [
                run_part_backward(("math",), grad[:, rows], q[:, rows], *pair, out[:, rows], lse[:, :, rows], None)
                for rows in queries
            ]
            for which in (1, 2):
                whole = sum(one[which].double() for one in mine).bfloat16()
                assert (found[which][:, queries[at]] == whole).float().mean() > 0.9


def test_one_rank_alone_is_plain_attention() -> None:
    q, k, v = draw(5, 7)
    valid = some_keys(7)
    alone: Any = {"ring": ALONE, "ulysses": ALONE}
    out = attend_context(q, k, v, **alone, keys=context_keys(7, **alone, valid=valid))
    torch.testing.assert_close(out, attend_reference(q, k, v, mask=valid))
    keep = torch.tensor([4, 0, 2])
    out = attend_context(q, k, v, **alone, keys=context_keys(7, **alone, keep=keep, valid=valid[:, keep]))
    torch.testing.assert_close(out, attend_reference(q, k[:, keep], v[:, keep], mask=valid[:, keep]))


# ---------------------------------------------------------------- choices and keys


@pytest.mark.parametrize(
    ("heads", "kv_heads", "context", "expected"),
    [
        (16, 16, 8, 8),
        (12, 12, 8, 4),
        (3, 3, 2, 1),
        (6, 6, 4, 2),
        (16, 2, 8, 2),  # more would send keys repeated
        (8, 1, 8, 8),  # but this is better than a ring of 8
        (4, 4, 1, 1),
    ],
)
def test_choice_of_ulysses(heads: int, kv_heads: int, context: int, expected: int) -> None:
    assert choose_ulysses(heads, kv_heads, context, None) == expected


def test_ulysses_that_cannot_be() -> None:
    assert choose_ulysses(16, 2, 8, 8) == 8
    assert choose_ulysses(16, 16, 8, 1) == 1
    with pytest.raises(UserError, match=r"ulysses: 3 does not divide parallel.context=8; set it to one of 1, 2, 4, 8"):
        choose_ulysses(24, 24, 8, 3)
    with pytest.raises(UserError, match=r"ulysses: 4 does not divide the 6 heads; set it to one of 1, 2,"):
        choose_ulysses(6, 6, 8, 4)


def test_groups_of_ranks() -> None:
    mesh = torch.arange(16).view(1, 2, 1, 4, 2)  # replicate 2, context 4, tensor 2
    rings, traders = ranks_of_context(mesh, 3, 2)
    assert traders == [[0, 2], [4, 6], [1, 3], [5, 7], [8, 10], [12, 14], [9, 11], [13, 15]]
    assert rings == [[0, 4], [2, 6], [1, 5], [3, 7], [8, 12], [10, 14], [9, 13], [11, 15]]


def test_repeated_groups_are_those_that_the_query_heads_use() -> None:
    for groups, ranks in itertools.product((1, 2, 3, 4, 6, 12), (1, 2, 3, 4, 6, 12)):
        k = torch.arange(groups).view(1, 1, groups, 1)
        repeated, _ = repeat_groups(12, k, k, ranks)
        assert repeated.shape[2] % ranks == 0
        assert repeated.shape[2] == groups if groups % ranks == 0 else True
        each = repeated.repeat_interleave(12 // repeated.shape[2], dim=2)  # what kernels do with them
        assert each.flatten().tolist() == [head // (12 // groups) for head in range(12)]


def test_keys_of_each_rank_of_the_ring() -> None:
    ring, ulysses = Ranks("", 2, 1), Ranks("", 2, 0)
    found = context_keys(3, ring=ring, ulysses=ulysses)
    assert (found.pick, found.lengths, found.masks) == (None, (6, 6), None)
    found = context_keys(3, ring=ring, ulysses=ulysses, keep=torch.arange(8))
    assert (found.pick, found.lengths) == (slice(0, 2), (6, 2))
    valid = torch.arange(5) < torch.tensor([[4], [0]])
    found = context_keys(3, ring=ring, ulysses=ulysses, keep=torch.tensor([7, 1, 11, 2, 6]), valid=valid)
    assert isinstance(found.pick, Tensor)
    assert found.pick.tolist() == [1, 5, 0]
    assert found.lengths == (2, 3)
    assert found.masks is not None
    assert found.masks[1].valid.tolist() == [[True, True, False], [True] * 3]  # nothing to see is marked apart
    assert found.masks[1].filled.tolist() == [True, False]


def test_keys_that_cannot_be() -> None:
    options = {"ring": Ranks("", 2, 0), "ulysses": ALONE}
    with pytest.raises(ValueError, match="keep: it is empty"):
        context_keys(3, keep=torch.tensor([], dtype=torch.int64), **options)
    with pytest.raises(ValueError, match="keep: 6 is none of the 6 keys"):
        context_keys(3, keep=torch.tensor([0, 6]), **options)
    with pytest.raises(ValueError, match=r"valid: shape \(2, 3\) does not fit the 6 keys of all ranks; give \[B, 6\]"):
        context_keys(3, valid=torch.ones(2, 3, dtype=torch.bool), **options)
