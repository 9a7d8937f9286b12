"""Patches, positions, attention, masks, blocks and initialisation."""

import math

import pytest
import torch

from vitrail.layers.attention import SelfAttention, attend, attend_reference, rotate
from vitrail.layers.block import swiglu_hidden
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.patches import grid_of, per_axis
from vitrail.layers.tokens import (
    gather_tokens,
    grid_coordinates,
    pairs_per_axis,
    patchify,
    rope_table,
    sincos,
    unpatchify,
)
from vitrail.models.mae import BlockMask, GridMask, RandomMask, TubeMask, make_mask, num_visible

# ---------------------------------------------------------------- patches


@pytest.mark.parametrize(("size", "patch"), [((8, 12), (4, 2)), ((4, 6, 8), (2, 3, 4)), ((6,), (3,))])
@pytest.mark.parametrize("channels", [1, 3, 20])
def test_patchify_round_trips(size: tuple[int, ...], patch: tuple[int, ...], channels: int) -> None:
    x = torch.arange(2 * channels * math.prod(size)).reshape(2, channels, *size)
    tokens = patchify(x, patch)
    assert tokens.shape == (2, math.prod(grid_of(size, patch)), math.prod(patch) * channels)
    assert torch.equal(unpatchify(tokens, patch, size), x)


def test_a_token_is_its_patch_channels_last() -> None:
    x = torch.randn(1, 3, 4, 6)
    token = patchify(x, (2, 3))[0, 3]  # second row, second column
    assert torch.equal(token.reshape(2, 3, 3), x[0, :, 2:4, 3:6].permute(1, 2, 0))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        grid_of((30, 32), (4, 4))
    with pytest.raises(ValueError, match="3 axes"):
        per_axis((1, 2), 3)


def test_coordinates_are_patch_centres_in_voxels() -> None:
    coordinates = grid_coordinates((4, 6), (2, 3))
    assert coordinates.tolist() == [[1.0, 1.5], [1.0, 4.5], [3.0, 1.5], [3.0, 4.5]]
    assert gather_tokens(coordinates, torch.tensor([[3, 0]])).tolist() == [[[3.0, 4.5], [1.0, 1.5]]]


# ---------------------------------------------------------------- positions


def test_sincos_in_one_dimension_is_the_usual_table() -> None:
    table = sincos(torch.arange(5.0)[:, None], 8)
    for position in range(5):
        for i in range(4):
            angle = position * 10000 ** (-i / 4)
            assert table[position, i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 4 + i] == pytest.approx(math.cos(angle), abs=1e-6)


def test_sincos_axes_order() -> None:
    """Two dimensions: x (the last axis) in the first half, as facebookresearch/mae; three: in the order of axes."""
    one = sincos(torch.tensor([[3.0]]), 8)[0]
    flat = sincos(torch.tensor([[5.0, 3.0]]), 16)[0]
    assert torch.equal(flat[:8], one)
    solid = sincos(torch.tensor([[3.0, 5.0, 7.0]]), 24)[0]
    assert torch.equal(solid[:8], one)


def test_left_over_channels_are_left_out() -> None:
    assert pairs_per_axis(32, 3) == 5
    assert torch.equal(sincos(torch.rand(4, 3), 32)[:, 30:], torch.zeros(4, 2))
    x = torch.randn(1, 4, 2, 32)
    turned = rotate(x, rope_table(torch.rand(1, 4, 3) * 50, 32, 100.0))
    assert torch.equal(turned[..., 30:], x[..., 30:])
    assert not torch.allclose(turned[..., :30], x[..., :30])


def test_rotation_keeps_norms_and_zero_is_identity() -> None:
    x = torch.randn(2, 7, 3, 48)
    table = rope_table(torch.rand(2, 7, 3) * 64, 48, 100.0)
    assert torch.allclose(rotate(x, table).norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert torch.allclose(rotate(x, rope_table(torch.zeros(2, 7, 3), 48, 100.0)), x, atol=1e-7)


def test_logits_depend_only_on_relative_position() -> None:
    q, k = torch.randn(2, 1, 6, 2, 24, dtype=torch.float64)
    coordinates = torch.rand(1, 6, 3) * 10

    def logits(shift: float) -> torch.Tensor:
        table = rope_table(coordinates + shift, 24, 100.0)
        return torch.einsum("bnhk,bmhk->bhnm", rotate(q, table), rotate(k, table))

    assert torch.allclose(logits(0.0), logits(37.0), atol=1e-4)
    assert not torch.allclose(logits(0.0), torch.einsum("bnhk,bmhk->bhnm", q, k), atol=1e-2)


@pytest.mark.parametrize("axis", range(3))
def test_each_axis_turns_only_its_slice(axis: int) -> None:
    x = torch.randn(1, 1, 1, 24)
    coordinates = torch.zeros(1, 1, 3)
    coordinates[..., axis] = 5.0
    changed = (rotate(x, rope_table(coordinates, 24, 100.0)) - x).abs().flatten() > 1e-6
    expected = torch.zeros(24, dtype=torch.bool)
    expected[axis * 8 : axis * 8 + 8] = True
    assert torch.equal(changed, expected)


def test_angles_do_not_know_the_compute_type() -> None:
    """12345 in bf16 is 12352: coordinates must never be rounded."""
    coordinates = torch.tensor([[[12345.0, 1.0, 2.0]]])
    table = rope_table(coordinates, 24, 100.0)
    x = torch.randn(1, 1, 2, 24)
    exact = rotate(x.bfloat16().float(), table)
    assert table.dtype == torch.float32
    assert torch.equal(rotate(x.bfloat16(), table), exact.bfloat16())


@pytest.mark.parametrize("width", [2, 7, 13, 64])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_those_of_pairs(width: int, table_dtype: torch.dtype) -> None:
    """Whatever the width of a head, and where queries lie among keys and values."""
    qkv = torch.randn(2, 5, 3, 4, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    table = rope_table(torch.rand(2, 5, 1, generator=torch.Generator().manual_seed(1)) * 9, width, 100.0).to(
        table_dtype
    )
    x, (cos, sin) = qkv[:, :, 1], table.float()
    turned = 2 * cos.shape[-1]
    even, odd = x[..., 0:turned:2], x[..., 1:turned:2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    expected, found = torch.cat([pairs, x[..., turned:]], dim=-1), rotate(x, table)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    one, two = (torch.autograd.grad(y, qkv, weights)[0] for y in (found, expected))
    torch.testing.assert_close(one, two)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_equals_the_reference(groups: int, masked: bool) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, groups, 8), torch.randn(2, 7, groups, 8)
    tensors = [t.requires_grad_() for t in (q, k, v)]
    mask = torch.rand(2, 7) > 0.3 if masked else None
    if mask is not None:
        mask[:, 0] = True
    out, expected = attend(q, k, v, mask=mask), attend_reference(q, k, v, mask=mask)
    assert torch.allclose(out, expected, atol=1e-6)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), tensors), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_qkv_rows_are_head_major() -> None:
    """Half of the rows is half of the heads, whole: what tensor parallelism will rely on."""
    torch.manual_seed(0)
    layer = SelfAttention(width=16, heads=4, kv_heads=2, qk_norm=False, bias=False, eps=1e-6)
    x = torch.randn(1, 5, 16)
    heads: list[torch.Tensor] = []
    layer.proj = torch.nn.Identity()
    whole = layer(x)
    rows = layer.qkv.weight.shape[0] // 2
    for half in (slice(0, rows), slice(rows, None)):
        part = SelfAttention(width=16, heads=4, kv_heads=2, qk_norm=False, bias=False, eps=1e-6)
        part.qkv.weight = torch.nn.Parameter(layer.qkv.weight[half])
        part.proj = torch.nn.Identity()
        heads.append(part(x))
    assert torch.allclose(torch.cat(heads, dim=-1), whole, atol=1e-6)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", [RandomMask, BlockMask, TubeMask, GridMask])
@pytest.mark.parametrize("grid", [(8, 8), (4, 6, 4)])
@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9])
def test_every_mask_hides_the_exact_count(kind: type, grid: tuple[int, ...], ratio: float) -> None:
    tokens = math.prod(grid)
    mask = make_mask(kind(ratio=ratio), torch.rand(3, tokens), grid)
    assert mask.visible.shape == (3, num_visible(tokens, ratio))
    for visible, hidden in zip(mask.visible, mask.hidden, strict=True):
        assert torch.equal(torch.cat([visible, hidden]).sort().values, torch.arange(tokens))
        assert torch.equal(visible, visible.sort().values)


def test_masks_have_their_shapes() -> None:
    noise = torch.rand(1, 64, generator=torch.Generator().manual_seed(1))

    def hidden(config: object, grid: tuple[int, ...]) -> torch.Tensor:
        flags = torch.zeros(64, dtype=torch.bool)
        flags[make_mask(config, noise, grid).hidden[0]] = True  # type: ignore[arg-type]
        return flags.reshape(grid)

    blocks = hidden(BlockMask(ratio=0.75, block=2), (8, 8)).reshape(4, 2, 4, 2).float().mean(dim=(1, 3))
    assert set(blocks.flatten().tolist()) == {0.0, 1.0}
    tube = hidden(TubeMask(ratio=0.75), (4, 4, 4))
    assert torch.equal(tube, tube[:1].expand(4, 4, 4))
    lattice = hidden(GridMask(ratio=0.75), (8, 8))
    assert (~lattice).reshape(4, 2, 4, 2).sum(dim=(1, 3)).eq(1).all()


def test_num_visible_golden_values() -> None:
    assert num_visible(262144, 0.95) == 13107
    assert num_visible(262144, 0.01) == 259522
    assert num_visible(256, 0.75) == 64
    assert num_visible(196, 0.75) == 49
    assert num_visible(100, 0.9) == 10  # 100 * (1 - 0.9) is 9.999999999999998


def test_swiglu_hidden_golden_values() -> None:
    assert swiglu_hidden(3072, multiplier=1.3, multiple_of=1024) == 11264
    assert swiglu_hidden(4096, multiplier=1.3, multiple_of=1024) == 14336
    assert [swiglu_hidden(width) for width in (512, 384, 1024, 1536, 2560)] == [1536, 1024, 2816, 4096, 6912]


# ---------------------------------------------------------------- initialisation


def test_initialisation_depends_on_name_and_seed_alone() -> None:
    def made(seed: int, first: str) -> torch.nn.Module:
        layers = {first: torch.nn.Linear(300, 400), "other": torch.nn.LayerNorm(4)}
        model = torch.nn.ModuleDict(layers)
        initialise(model, init_rules(model), seed)
        return model

    a, b = made(0, "layer"), made(0, "layer")
    assert torch.equal(a["layer"].weight, b["layer"].weight)
    assert not torch.equal(a["layer"].weight, made(1, "layer")["layer"].weight)
    assert not torch.equal(a["layer"].weight, made(0, "name")["name"].weight)
    assert a["layer"].weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.01)
    assert a["layer"].bias.eq(0).all()
    assert a["other"].weight.eq(1).all()
