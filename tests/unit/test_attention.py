"""Attention backends: each against the reference, masks, the choice between them, and what is refused."""

import subprocess
import sys
import types
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitrail.errors import UserError
from vitrail.layers import backends
from vitrail.layers.attention import CrossAttention, KeyMask, SelfAttention, attend, attend_reference, key_mask, run
from vitrail.layers.backends import NAMES, Call, available_backends, choose, refusal, use_backend
from vitrail.layers.block import Block, BlockConfig
from vitrail.layers.kernels import attention as kernels

ON_CPU = ["auto", "flash", "math", "reference"]
BF16, FP32 = torch.bfloat16, torch.float32


def draw(
    *, batch: int = 2, queries: int = 5, keys: int = 7, heads: int = 4, groups: int = 4, width: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, queries, heads, width), (batch, keys, groups, width), (batch, keys, groups, width)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(out: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((out * weight).sum(), tensors)


def some_keys(batch: int, keys: int) -> Tensor:
    valid = torch.rand(batch, keys, generator=torch.Generator().manual_seed(2)) > 0.4
    valid[:, keys // 2] = True
    return valid


# ---------------------------------------------------------------- every backend computes the same


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"batch": 1, "queries": 1, "keys": 1},
        {"groups": 1},
        {"groups": 2, "queries": 9},
        {"batch": 1, "width": 105},
        {"queries": 33, "keys": 130, "width": 16},
    ],
    ids=str,
)
def test_backends_equal_the_reference(name: str, masked: bool, shape: dict[str, int]) -> None:
    tensors = draw(**shape)
    valid = some_keys(tensors[1].shape[0], tensors[1].shape[1]) if masked else None
    expected = attend_reference(*tensors, mask=valid)
    right = gradients(expected, tensors)
    for mask in [valid] if valid is None else [valid, key_mask(valid)]:
        with use_backend(name):
            out = attend(*tensors, mask=mask)
        assert out.shape == tensors[0].shape
        assert torch.allclose(out, expected, atol=1e-5)
        for a, b in zip(gradients(out, tensors), right, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("keys", "groups"), [(300, 4), (128, 2), (5, 1)])
def test_flex_tables_on_the_cpu(keys: int, groups: int) -> None:
    """FlexAttention has no backward there, but its forward shows that the tables of blocks are right."""
    tensors = [t.detach() for t in draw(batch=3, queries=6, keys=keys, groups=groups, width=16)]
    valid = some_keys(3, keys)
    valid[0, keys // 2 :] = False  # whole blocks are masked
    valid[0, 0] = True
    valid[1] = True
    with use_backend("flex"):
        mask = key_mask(valid)
        assert mask.blocks is not None
        out = attend(*tensors, mask=mask)
    assert torch.allclose(out, attend_reference(*tensors, mask=valid), atol=1e-5)


def test_flex_blocks_are_listed() -> None:
    valid = torch.zeros(2, 5 * kernels.BLOCK - 28, dtype=torch.bool)
    valid[0, : 2 * kernels.BLOCK + 1] = True  # full, full, part, nothing, nothing
    valid[1] = True  # the last block reaches beyond the end: part
    blocks = kernels.key_blocks(valid)
    assert blocks.full_count.flatten().tolist() == [2, 4]
    assert blocks.part_count.flatten().tolist() == [1, 1]
    assert blocks.full[0, 0, 0, :2].tolist() == [0, 1]
    assert blocks.full[1, 0, 0, :4].tolist() == [0, 1, 2, 3]
    assert [blocks.part[0, 0, 0, 0].item(), blocks.part[1, 0, 0, 0].item()] == [2, 4]
    assert blocks.in_full[:, 0].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert blocks.in_part[:, 0].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]


def test_packed_keys_are_the_seen_ones_in_order() -> None:
    valid = torch.tensor([[False, True, True], [True, False, True]])
    packing = kernels.pack_keys(valid)
    assert packing.order[:4].tolist() == [1, 2, 3, 5]
    assert packing.kept.tolist() == [True] * 4 + [False] * 2
    assert packing.ends.tolist() == [0, 2, 4]


# ---------------------------------------------------------------- packages, with stand-ins for what is not installed


def soft(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (torch.einsum("bnhk,bmhk->bhnm", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale).float()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("compiled", [False, True])
def test_flash4_is_one_op_with_a_backward(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        out = attend_reference(q, k, v)
        return out, soft(q, k, softmax_scale).logsumexp(-1) if return_lse else None

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float,
        deterministic: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dout.is_contiguous()
        weights = (soft(q, k, softmax_scale) - lse[..., None]).exp()
        repeat = q.shape[2] // k.shape[2]
        dv = torch.einsum("bhnm,bnhk->bmhk", weights, dout)
        dp = torch.einsum("bnhk,bmhk->bhnm", dout, v.repeat_interleave(repeat, 2))
        ds = weights * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * softmax_scale
        dq = torch.einsum("bhnm,bmhk->bnhk", ds, k.repeat_interleave(repeat, 2))
        dk = torch.einsum("bhnm,bnhk->bmhk", ds, q)
        return dq, *(t.unflatten(2, (-1, repeat)).sum(3) for t in (dk, dv))

    stand_in(monkeypatch, "flash_attn")
    stand_in(monkeypatch, "flash_attn.cute", flash_attn_func=forward)
    stand_in(monkeypatch, "flash_attn.cute.interface", _flash_attn_bwd=backward)
    torch._dynamo.reset()
    tensors = draw(groups=2)
    flash4 = partial(run, ("flash4",), mask=None)
    out = (torch.compile(flash4, backend="aot_eager", fullgraph=True) if compiled else flash4)(*tensors)
    expected = attend_reference(*tensors)
    assert torch.allclose(out, expected, atol=1e-5)
    for a, b in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_xformers_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    def xformers(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        assert q.shape[2] == k.shape[2]
        return attend_reference(q, k, v)

    stand_in(monkeypatch, "xformers")
    stand_in(monkeypatch, "xformers.ops", memory_efficient_attention=xformers)
    tensors = draw(groups=2)
    assert torch.allclose(run(("xformers",), *tensors, None), attend_reference(*tensors), atol=1e-6)


def test_varlen_packs_and_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def plain(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, max_q: int, max_k: int, *, scale: float
    ) -> Tensor:
        assert starts.dtype == ends.dtype == torch.int32
        assert ends.diff().max() <= max_k
        spans = zip(starts, starts[1:], ends, ends[1:], strict=False)
        return torch.cat([attend_reference(q[None, a:b], k[None, c:d], v[None, c:d])[0] for a, b, c, d in spans])

    monkeypatch.setattr(varlen, "varlen_attn", plain)
    tensors = draw(batch=3, groups=2)
    valid = some_keys(3, 7)
    valid[1] = False
    with use_backend("varlen"):
        mask = key_mask(valid)
    assert mask.packing is not None
    out, expected = run(("varlen",), *tensors, mask), attend_reference(*tensors, mask=valid)
    assert torch.allclose(out, expected, atol=1e-5)
    for a, b in zip(gradients(out, tensors), gradients(expected, tensors), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("garbage", [1e4, -1e15])
def test_masked_keys_change_nothing(name: str, garbage: float) -> None:
    q, k, v = draw(groups=2)
    valid = some_keys(2, 7)
    with use_backend(name):
        out = attend(q, k, v, mask=valid)
        before = gradients(out, [q, k, v])
        with torch.no_grad():
            k[~valid] = garbage
            v[~valid] = -garbage
        again = attend(q, k, v, mask=valid)
        after = gradients(again, [q, k, v])
    assert torch.equal(out, again)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(after[1][~valid], torch.zeros_like(after[1][~valid]))
    assert torch.equal(after[2][~valid], torch.zeros_like(after[2][~valid]))


@pytest.mark.parametrize("name", ON_CPU)
def test_a_sample_without_keys_gives_zero(name: str) -> None:
    tensors = draw()
    valid = some_keys(2, 7)
    valid[0] = False
    with use_backend(name):
        out = attend(*tensors, mask=valid)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    found = gradients(out, tensors)
    assert all(torch.equal(g[0], torch.zeros_like(g[0])) for g in found)
    alone = attend_reference(*(t[1:] for t in tensors), mask=valid[1:])
    assert torch.allclose(out[1:], alone, atol=1e-5)
    assert all(g.isfinite().all() for g in found)


def test_masks_equal_shorter_samples() -> None:
    q, k, v = draw(batch=1, keys=12)
    valid = torch.arange(12)[None] < 9
    assert torch.allclose(attend(q, k, v, mask=valid), attend(q, k[:, :9], v[:, :9]), atol=1e-6)


def test_layers_pass_the_mask_on() -> None:
    torch.manual_seed(0)
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    valid = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    layer = SelfAttention(width=16, heads=4, kv_heads=2, qk_norm=True, bias=True, eps=1e-6)
    out = layer(x, mask=key_mask(valid))
    assert torch.allclose(out[0, :4], layer(x[:1, :4])[0], atol=1e-6)
    assert torch.allclose(out[1], layer(x)[1], atol=1e-6)
    cross = CrossAttention(width=16, heads=4, qk_norm=False, bias=True, eps=1e-6)
    masked = cross(x, memory, mask=key_mask(valid[:, 1:]))
    assert torch.allclose(masked[:1], cross(x[:1], memory[:1, :3]), atol=1e-6)


MEMORY = """
import resource, torch
torch.set_num_threads(1)
from vitrail.layers.attention import attend, key_mask
tokens = {tokens}
q, k, v = (torch.randn(1, tokens, 1, 8, requires_grad=True) for _ in range(3))
mask = key_mask(torch.arange(tokens)[None] < tokens - 7)
attend(q[:, :64], k[:, :64], v[:, :64]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend(q, k, v, mask=mask).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_of_a_masked_call_is_linear() -> None:
    """8192 tokens: the matrix would be 256 MiB in fp32 and 64 MiB in bool, the tensors are 0.25 MiB each."""
    done = subprocess.run([sys.executable, "-c", MEMORY.format(tokens=8192)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32


# ---------------------------------------------------------------- compiled and recomputed blocks


def make_block() -> Block:
    torch._dynamo.reset()  # an error in a compiled block makes the compiler skip its code from then on
    torch.manual_seed(0)
    config = BlockConfig(
        width=16, heads=2, kv_heads=1, hidden=16, mlp="gelu", norm="layer", eps=1e-6, bias=True, qk_norm=False,
        layer_scale=None,
    )  # fmt: skip
    return Block(config)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_a_mask_passes_through_compiled_blocks(backend: str) -> None:
    """One graph, no break, and the choice of backend is guarded: a change of it is seen."""
    block = make_block()
    x = torch.randn(2, 6, 16, requires_grad=True)
    mask = key_mask(torch.tensor([[True] * 4 + [False] * 2, [False] * 6]))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with use_backend(backend):
        out = compiled(x, mask=mask)
        assert torch.allclose(out, block(x, mask=mask), atol=1e-6)
        (found,) = torch.autograd.grad(out.square().sum(), [x])
    (expected,) = torch.autograd.grad(block(x, mask=mask).square().sum(), [x])
    assert torch.allclose(found, expected, atol=1e-5)
    with use_backend("cudnn"), pytest.raises(UserError, match="'cudnn' needs a GPU"):
        torch.compile(block, backend="aot_eager")(x, mask=mask)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_passes_through_recomputed_blocks(compiled: bool) -> None:
    block = make_block()
    x = torch.randn(2, 6, 16, requires_grad=True)
    mask = key_mask(torch.tensor([[True] * 4 + [False] * 2, [True] * 6]))

    def forward(x: Tensor, mask: KeyMask) -> Tensor:
        return checkpoint(block, x, mask=mask, use_reentrant=False, preserve_rng_state=False)

    run = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
    out = run(x, mask)
    (found,) = torch.autograd.grad(out.square().sum(), [x])
    (expected,) = torch.autograd.grad(block(x, mask=mask).square().sum(), [x])
    assert torch.allclose(found, expected, atol=1e-5)


def test_flex_is_traced_with_its_block() -> None:
    block = make_block().requires_grad_(False)
    x = torch.randn(2, 200, 16)
    valid = torch.arange(200)[None] < torch.tensor([[120], [200]])
    with use_backend("flex"):
        out = torch.compile(block, backend="eager", fullgraph=True)(x, mask=key_mask(valid))
    assert torch.allclose(out, block(x, mask=key_mask(valid)), atol=1e-5)


def test_compiled_blocks_take_other_lengths() -> None:
    block = make_block()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (6, 9, 13):
        x, mask = torch.randn(2, tokens, 16), key_mask(torch.ones(2, tokens, dtype=torch.bool))
        assert torch.allclose(compiled(x, mask=mask), block(x, mask=mask), atol=1e-6)


@pytest.mark.slow
def test_a_mask_passes_through_inductor() -> None:
    block = make_block()
    x = torch.randn(2, 6, 16, requires_grad=True)
    mask = key_mask(torch.tensor([[True] * 4 + [False] * 2, [True] * 6]))
    out = torch.compile(block, fullgraph=True)(x, mask=mask)
    (found,) = torch.autograd.grad(out.square().sum(), [x])
    (expected,) = torch.autograd.grad(block(x, mask=mask).square().sum(), [x])
    assert torch.allclose(found, expected, atol=1e-5)


# ---------------------------------------------------------------- the choice

EVERY = frozenset(NAMES) - {"ck"}
PLAIN = EVERY - {"flash4", "xformers"}  # what PyTorch alone has


def hopper(**changes: object) -> Call:
    usual = Call(
        device="cuda", capability=(9, 0), dtype=BF16, batch=64, heads=16, groups=16, queries=1024, keys=1024, width=64,
        masked=False, needs_grad=True,
    )  # fmt: skip
    return usual._replace(**changes)


@pytest.mark.parametrize(
    ("call", "available", "expected"),
    [
        (hopper(), EVERY, "cudnn"),
        (hopper(batch=256, queries=197, keys=197), EVERY, "cudnn"),
        (hopper(batch=1, heads=24, queries=131072, keys=131072, width=128), EVERY, "flash4"),
        (hopper(batch=1, heads=24, queries=131072, keys=131072, width=128), PLAIN, "cudnn"),
        (hopper(batch=1, heads=32, queries=65536, keys=65536, width=16), EVERY, "flash4"),
        (hopper(width=160), PLAIN, "flash"),
        (hopper(width=160, groups=8), PLAIN, "flash"),
        (hopper(width=320), EVERY, "efficient"),
        (hopper(batch=1, heads=64, keys=2**18, width=128), PLAIN, "flash"),  # 2^31 numbers
        (hopper(masked=True), EVERY, "varlen"),
        (hopper(masked=True), EVERY - {"varlen"}, "flex"),
        (hopper(masked=True), EVERY - {"flex", "varlen"}, "efficient"),
        (hopper(masked=True, groups=4, width=105), PLAIN, "varlen"),
        (hopper(dtype=FP32), EVERY, "efficient"),
        (hopper(dtype=FP32, masked=True), EVERY, "efficient"),
        (hopper(dtype=torch.float64), EVERY, "math"),
        (hopper(capability=(10, 0)), EVERY, "cudnn"),
        (hopper(capability=(8, 0)), EVERY - {"flash4"}, "flash"),
        (hopper(capability=(7, 5)), {"auto", "efficient", "math", "flex", "reference"}, "efficient"),
        (hopper(device="rocm", capability=(0, 0)), {"flash", "ck", "efficient", "math", "flex"}, "flash"),
        (hopper(device="rocm", capability=(0, 0), masked=True), {"flash", "efficient", "math", "flex"}, "flex"),
        (hopper(device="cpu", capability=(0, 0), dtype=FP32), {"flash", "math", "reference", "flex"}, "flash"),
        (hopper(device="cpu", capability=(0, 0), masked=True, width=105), {"flash", "math", "flex"}, "flash"),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set | frozenset) else str(value),
)
def test_auto_chooses(call: Call, available: frozenset[str], expected: str) -> None:
    assert choose(call, available)[0] == expected


def test_auto_always_finds_one() -> None:
    for device, capability in [("cuda", (9, 0)), ("cuda", (8, 6)), ("cuda", (7, 0)), ("rocm", (0, 0)), ("cpu", (0, 0))]:
        for dtype in (BF16, torch.float16, FP32, torch.float64):
            for masked in (False, True):
                call = hopper(device=device, capability=capability, dtype=dtype, masked=masked, width=512)
                assert choose(call, {"math"}) == ("math",)


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("cudnn", hopper(dtype=FP32), "bf16 and fp16, not in float32"),
        ("cudnn", hopper(width=192), "up to 128 wide, not 192"),
        ("cudnn", hopper(masked=True), "wrong backward with a mask"),
        ("flash", hopper(masked=True), "takes no mask"),
        ("flash4", hopper(masked=True), "takes no mask"),
        ("flash4", hopper(capability=(10, 0), width=256), "up to 128 wide"),
        ("varlen", hopper(), "masked calls alone"),
        ("efficient", hopper(dtype=torch.float64), "not in float64"),
        ("flex", hopper(device="cpu", capability=(0, 0)), "no backward on the CPU"),
    ],
)
def test_a_backend_by_name_is_used_or_refused(name: str, call: Call, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        choose(call, EVERY, name)
    able = str(caught.value).rpartition("choose one of ")[2].split(", ")
    assert "auto" in able
    assert name not in able
    assert choose(call._replace(device="cuda", masked=name == "varlen", dtype=BF16, width=64), EVERY, name) == (name,)


def test_cudnn_may_be_masked_without_gradients() -> None:
    assert refusal("cudnn", hopper(masked=True, needs_grad=False)) is None


# ---------------------------------------------------------------- what is there, and what is not


def test_what_a_cpu_has() -> None:
    found = available_backends("cpu")
    assert list(found) == list(NAMES)
    assert [name for name, reason in found.items() if reason is None] == [
        "auto", "flash", "math", "flex", "reference",
    ]  # fmt: skip


def test_missing_packages_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_installed", lambda *_: False)
    assert "pip install" in (backends.missing("flash4", "cuda", (9, 0)) or "")
    assert "flash" in (backends.missing("flash4", "cuda", (9, 0)) or "")
    assert (backends.missing("xformers", "cuda", (9, 0)) or "").endswith("pip install xformers")
    assert "compute capability 9.0" in (backends.missing("flash4", "cuda", (8, 6)) or "")
    assert "compute capability 8.0" in (backends.missing("cudnn", "cuda", (7, 5)) or "")
    assert backends.missing("cudnn", "cuda", (9, 0)) is None
    assert "AMD" in (backends.missing("ck", "cuda", (9, 0)) or "")
    assert "flash, ck and xformers" in (backends.missing("cudnn", "rocm", (0, 0)) or "")
    assert backends.missing("flash", "rocm", (0, 0)) is None


def test_a_part_of_a_package_is_looked_for_without_importing_it() -> None:
    assert backends._installed("torch.nn")
    assert not backends._installed("torch.cute")
    assert not backends._installed("no_such_package.cute")


def test_a_package_that_does_not_import_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with a FlashAttention-4 whose own dependency was not on the path: auto must pass it over."""
    monkeypatch.setattr(backends, "_installed", lambda module: module == "flash_attn.cute")
    monkeypatch.setattr(backends, "_import_failure", lambda module: "No module named 'cutlass'")
    reason = backends.missing("flash4", "cuda", (9, 0))
    assert reason is not None
    assert "cannot be imported (No module named 'cutlass')" in reason


def test_wrong_and_missing_backends_are_refused() -> None:
    with pytest.raises(UserError, match=r"parallel.attention: 'flahs4' is not a known backend; did you mean 'flash4'"):
        use_backend("flahs4", key="parallel.attention")
    with pytest.raises(UserError, match=r"'flash4' needs a GPU \(available on cpu: auto, flash, math, flex, reference"):
        use_backend("flash4", device="cpu")
    assert backends.chosen() == "auto"
    with (
        use_backend("xformers"),
        pytest.raises(UserError, match=r"'xformers' needs a GPU .* choose one of auto, flash"),
    ):
        attend(*draw())


def test_the_choice_is_for_the_process_or_a_with_statement() -> None:
    try:
        use_backend("math")
        assert backends.chosen() == "math"
        with use_backend("reference"):
            assert backends.chosen() == "reference"
        assert backends.chosen() == "math"
    finally:
        use_backend("auto")
