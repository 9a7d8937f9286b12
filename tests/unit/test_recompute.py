"""What is computed again in the backward, by role; gradients equal bit for bit those of keeping everything."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import recomputed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from vitrail.errors import UserError
from vitrail.layers.attention import key_mask
from vitrail.layers.backends import use_backend
from vitrail.layers.block import Block, BlockConfig, CrossBlock, ModulatedBlock
from vitrail.layers.convolutions import ConvBlock
from vitrail.layers.flops import Again
from vitrail.parallel import chunk, recompute
from vitrail.recipe.sections import Recompute

WIDTH, HIDDEN, TOKENS, BATCH = 32, 80, 24, 2
ATTENTION = "attention"


def config(**changes: Any) -> BlockConfig:
    standard: dict[str, Any] = {
        "width": WIDTH, "heads": 4, "kv_heads": 2, "hidden": HIDDEN, "mlp": "gelu", "norm": "layer", "eps": 1e-6,
        "bias": True, "qk_norm": False, "layer_scale": None,
    }  # fmt: skip
    return BlockConfig(**(standard | changes))


def make(kind: type[nn.Module], **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    block = kind(config(**changes))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


class Products(TorchDispatchMode):
    """Counts products by the layer whose weight they read, and attention kernels."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.counts: Counter[str] = Counter()
        names = {"attn.q": "qkv", "attn.kv": "qkv", "attn.qkv": "qkv"}
        self.weights = {
            layer.weight.data_ptr(): names.get(name, name.split(".")[-1])
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear)
        }

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = str(operation)
        if name.startswith(("aten.mm", "aten.addmm")):
            weight = arguments[-1]
            # A forward reads the transpose of a weight; a backward the weight itself, or no weight at all.
            transposed = weight.stride(0) == 1 and weight.ndim == 2 and weight.shape[0] != 1
            if weight.data_ptr() in self.weights and transposed:
                self.counts[self.weights[weight.data_ptr()]] += 1
        elif "attention" in name and "backward" not in name:
            self.counts[ATTENTION] += 1
        return operation(*arguments, **(keywords or {}))


def inputs_of(block: nn.Module, masked: bool = False) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator).requires_grad_()
    drop_path = torch.tensor([[0.0, 1.25], [1.25, 1.25]]) if masked else None
    keys = TOKENS - 10 if isinstance(block, CrossBlock) else TOKENS - isinstance(block, ModulatedBlock)
    mask = key_mask(torch.arange(keys) < torch.tensor([[keys - 3], [keys]])) if masked else None
    return (x, 10, None, None, drop_path, mask) if isinstance(block, CrossBlock) else (x, None, drop_path, mask)


def gradients(
    block: nn.Module, arguments: tuple[Any, ...], watched: bool = True
) -> tuple[Tensor, list[Tensor], Counter[str]]:
    """Output, gradients, and what the backward computed again."""
    out = block(*arguments)
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum()
    products = Products(block)
    with products if watched else nullcontext():
        loss.backward()
    return out, [t.grad for t in (arguments[0], *block.parameters())], products.counts


KINDS = {
    "block": (Block, {}),
    "no bias": (Block, {"bias": False}),
    "swiglu": (Block, {"mlp": "swiglu", "bias": False, "norm": "rms"}),
    "qk norm": (Block, {"qk_norm": True, "kv_heads": 4}),
    "layer scale": (Block, {"layer_scale": 0.1}),
    "post": (Block, {"residual": "post"}),
    "cross": (CrossBlock, {"kv_heads": 4}),
    "modulated": (ModulatedBlock, {}),
    "modulated swiglu": (ModulatedBlock, {"mlp": "swiglu", "bias": False, "norm": "rms"}),
}
CHOICES: list[Any] = [
    "full",
    Recompute(keep=("attention",)),
    Recompute(keep=("qkv", "attention")),
    Recompute(keep=("proj", "fc1")),
    Recompute(keep=("qkv", "attention", "proj", "fc1", "fc2")),
]


def expected_again(block: nn.Module, kept: frozenset[str], drop_path: bool = False) -> Counter[str]:
    cross, modulated = isinstance(block, CrossBlock), isinstance(block, ModulatedBlock)
    all_roles = Counter({"qkv": 2 if cross else 1, ATTENTION: 1, "proj": 1, "fc1": 1})
    if hasattr(block.mlp, "gate"):
        all_roles["gate"] = 1
    if modulated:
        all_roles["modulation"] = 1
    if modulated or block.post or not isinstance(block.ls2, nn.Identity) or drop_path:
        all_roles["fc2"] = 1  # what is scaled or normed after it needs it; drop path only its factor, which comes later
    return Counter({role: number for role, number in all_roles.items() if role not in kept})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_roles_decide_what_runs_again(kind: str, masked: bool) -> None:
    cls, changes = KINDS[kind]
    plain = make(cls, **changes)
    out, expected, none = gradients(plain, inputs_of(plain, masked))
    assert not none
    for choice in CHOICES:
        block = make(cls, **changes)
        made = recomputed([block], choice)
        found_out, found, again = gradients(block, inputs_of(block, masked))
        assert torch.equal(out, found_out)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        assert made.kept[0] is not None
        assert again == expected_again(block, made.kept[0], drop_path=masked), choice


@pytest.mark.parametrize("backend", ["math", "reference"])
@pytest.mark.parametrize("heads", [4, 1])  # of width 8; and of 32, more than there are tokens
def test_plain_attention_keeps_its_output_not_its_scores(
    backend: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one kernel there is a matrix of scores, which is made again."""
    plain, block = (make(Block, heads=heads, kv_heads=heads) for _ in range(2))
    kept: list[tuple[int, ...]] = []
    decide = recompute._policy

    def noted(roles: frozenset[str], context: Any, operation: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = decide(roles, context, operation, *arguments, **keywords)
        if answer == CheckpointPolicy.MUST_SAVE:
            kept.append((arguments[0].shape[-2], arguments[1].shape[-1]))
        return answer

    monkeypatch.setattr(recompute, "_policy", noted)
    recomputed([block], Recompute(keep=("attention",)))
    with use_backend(backend):
        _, expected, _ = gradients(plain, inputs_of(plain))
        _, found, _ = gradients(block, inputs_of(block))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert set(kept) == {(TOKENS, WIDTH // heads)}  # queries by head width; the scores are queries by keys


def test_names_stay_and_evaluation_keeps_nothing() -> None:
    plain, block = make(Block), make(Block)
    recomputed([block], Recompute(keep=("attention", "fc1")))
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in block.named_parameters()]
    assert list(plain.state_dict()) == list(block.state_dict())
    with torch.no_grad():
        arguments = inputs_of(block)
        assert torch.equal(plain(*arguments), block(*arguments))


def test_every_takes_the_first_of_each_group() -> None:
    blocks = [make(Block) for _ in range(5)]
    made = recomputed(blocks, Recompute(every=2))
    assert [kept is not None for kept in made.kept] == [True, False, True, False, True]
    assert made.text == "3 of 5 blocks are recomputed in full"
    again = [bool(gradients(block, inputs_of(block))[2]) for block in blocks]
    assert again == [True, False, True, False, True]
    assert made.again == Again(share=0.6)
    assert recomputed(blocks, "none").again == Again(share=0.0)


def test_blocks_without_roles_are_recomputed_in_full() -> None:
    torch.manual_seed(0)
    conv = ConvBlock(2, 3, 4, residual=True, affine=False)
    for parameter in conv.parameters():
        nn.init.normal_(parameter)
    calls = []
    conv.conv1.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    weights = list(conv.parameters())
    expected = torch.autograd.grad(conv(x).square().sum(), weights)
    blocks = [make(Block), conv]
    made = recompute.plan(blocks, Recompute(keep=("fc1",)))
    assert made.kept == (frozenset({"fc1"}), frozenset())
    assert made.again == Again(kept=frozenset({"fc1"}))
    recomputed(blocks, Recompute(keep=("fc1",)))
    found = torch.autograd.grad(conv(x).square().sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_unknown_roles_are_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="keep: 'gate' is no role of this model's blocks; they have attention, fc1"):
        recomputed([make(Block)], Recompute(keep=("gate",)))
    with pytest.raises(UserError, match=r"'attention' is no role .* they have none"):
        recompute.plan([ConvBlock(2, 3, 4, residual=True, affine=False)], Recompute(keep=("attention",)))
    with pytest.raises(UserError, match="'fc1' is no role"):
        recompute.plan([make(Block)], Recompute(keep=("fc1",)), pieces=True)


def test_a_chunked_mlp_has_no_roles() -> None:
    plain, block = make(Block), make(Block)
    chunk.in_pieces_of(block.mlp, 7)
    assert recompute.roles_of(block).keys() == {"attention", "qkv", "proj"}
    recomputed([block], Recompute(keep=("attention",)))
    _, expected, _ = gradients(plain, inputs_of(plain))
    _, found, again = gradients(block, inputs_of(block))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert again[ATTENTION] == 0


# ---------------------------------------------------------------- a budget


def test_a_budget_picks_roles_by_what_they_save() -> None:
    blocks = [make(Block, hidden=4 * WIDTH, kv_heads=4)]
    sizes = recompute.sizes_of(blocks[0])
    assert sizes is not None
    assert recompute.plan(blocks, Recompute(budget=1.0)).kept == (None,)
    last: frozenset[str] = frozenset()
    for budget in (0.07, 0.2, 0.3, 0.5, 0.8):
        made = recompute.plan(blocks, Recompute(budget=budget))
        kept = made.kept[0]
        assert kept is not None
        assert kept >= last  # more memory, more kept
        used = sizes.entry + sum(sizes.roles[role] for role in kept)
        assert used <= budget * sizes.all
        assert f"{used / sizes.all:.2f}" in made.text
        last = kept
    assert recompute.plan(blocks, Recompute(budget=0.2)).kept[0] == {"attention", "proj"}
    assert last == {"attention", "proj", "qkv", "fc1"}  # fc2 is never needed again here
    assert "budget 0.8: each Block keeps attention, qkv, proj, fc1" in made.text


def test_the_estimate_is_near_what_autograd_holds() -> None:
    """fp32: half as many numbers for the log-sum-exp, which is small."""
    for kind, changes in KINDS.values():
        block = make(kind, **{"hidden": 4 * WIDTH, **changes})
        arguments = inputs_of(block)
        held: dict[int, int] = {}

        def note(t: Tensor, held: dict[int, int] = held) -> Tensor:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = block(*arguments)  # holds what is counted until it is
        for parameter in block.parameters():
            held.pop(parameter.untyped_storage().data_ptr(), None)
        tokens = BATCH * (10 if kind is CrossBlock else TOKENS)
        sizes = recompute.sizes_of(block)
        assert sizes is not None
        assert sizes.all == pytest.approx(sum(held.values()) / tokens, rel=0.35), kind
        del out


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"budget: 0.01 is less than the 0\.\d+ that remains .* set parallel.recompute.budget=0\.\d+"
    ):
        recomputed([make(Block)], Recompute(budget=0.01))


# ---------------------------------------------------------------- counting


def test_hardware_flops_follow_the_roles() -> None:
    flops = config().flops(TOKENS) * 3
    assert sum(flops.roles.values()) == flops.linear
    base = flops.hardware(recompute=False)
    assert flops.hardware(recompute=True) - base == flops.linear - flops.roles["fc2"] + flops.attention
    assert flops.hardware(recompute=Again(share=0.5)) - base == (flops.linear - flops.last + flops.attention) / 2
    kept = Again(kept=frozenset({"attention", "qkv", "fc2"}))
    assert flops.hardware(recompute=kept) - base == flops.roles["proj"] + flops.roles["fc1"]
    read = config(width=8, heads=1, kv_heads=1, hidden=8, mlp="swiglu").flops(4, last_read=True)
    assert read.hardware(recompute=True) - read.hardware(recompute=False) == read.linear + read.attention
    assert (read + read).roles["gate"] == 2 * read.roles["gate"]


def test_flops_equal_what_pytorch_counts_for_every_choice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops = config().flops(TOKENS) * BATCH
    for choice in ["none", *CHOICES[:1], *CHOICES[3:4]]:
        block = make(Block)
        made = recomputed([block], choice)
        with use_backend("math"), FlopCounterMode(display=False) as counter:
            gradients(block, inputs_of(block), watched=False)
        # Plain attention has a backward of twice its forward, and makes its output again unless told otherwise.
        expected = flops.hardware(recompute=made.again) - 0.5 * flops.attention
        assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6), choice


# ---------------------------------------------------------------- compiled


@pytest.fixture
def partitions() -> Iterator[tuple[Callable[..., Any], list[Counter[str]]]]:
    """A compiler that counts the products in each backward graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    counted: list[Counter[str]] = []

    def count(graph: Any, _: Any) -> Any:
        # Attention could draw random numbers, for all that the compiler knows: run again it is an argument.
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = [" ".join(str(part) for part in (node.target, *node.args)) for node in nodes]
        forward = ("aten.mm", "aten.addmm")
        counted.append(
            Counter(
                products=sum(name.startswith(forward) for name in names),
                attention=sum("flash_attention_for_cpu.default" in name for name in names),
            )
        )
        return graph

    torch._dynamo.reset()
    yield (
        aot_autograd(
            fw_compiler=lambda graph, _: graph, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
        ),
        counted,
    )
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "kind", ["block", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("swiglu", "cross", "modulated"))]
)
def test_compiled_blocks_obey_the_roles(kind: str, partitions: Any) -> None:
    compiler, counted = partitions
    cls, changes = KINDS[kind]
    plain = make(cls, **changes)
    _, expected, _ = gradients(plain, inputs_of(plain, masked=True))
    for choice in CHOICES if kind != "block" else (CHOICES[0], CHOICES[1], CHOICES[3]):
        block = make(cls, **changes)
        made = recomputed([block], choice)
        block.compile(backend=compiler, fullgraph=True)
        _, found, _ = gradients(block, inputs_of(block, masked=True), watched=False)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert made.kept[0] is not None
        again = expected_again(block, made.kept[0])
        backward = 2 * sum(isinstance(layer, nn.Linear) for layer in block.modules())
        assert counted[-1]["attention"] == again.pop(ATTENTION, 0), choice
        assert counted[-1]["products"] == backward + sum(again.values()), choice


@pytest.mark.slow
def test_inductor_gives_the_same_gradients() -> None:
    torch._dynamo.reset()
    plain = make(Block)
    _, expected, _ = gradients(plain, inputs_of(plain))
    for choice in ("full", Recompute(keep=("attention",))):
        block = make(Block)
        recomputed([block], choice)  # type: ignore[arg-type]
        block.compile()
        _, found, _ = gradients(block, inputs_of(block), watched=False)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("keys", [{}, {"every": 2, "budget": 0.5}, {"keep": ("qkv",), "every": 1}])
def test_one_key_decides_what_is_recomputed(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of every, keep and budget"):
        Recompute(**keys)
