"""Attention with rotary positions: it sees distances between tokens, and nothing of where they lie; and its norms."""

import torch

from vitrail.layers.attention import CrossAttention, QKNorm, SelfAttention
from vitrail.layers.tokens import rope_table

SIZES = {"width": 48, "heads": 2, "qk_norm": False, "bias": False, "eps": 1e-6}
PLACES = torch.rand(2, 9, 3, generator=torch.Generator().manual_seed(0)) * 8
TOKENS = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(1))


def table(shift: float = 0.0, factor: float = 1.0) -> torch.Tensor:
    return rope_table(PLACES * factor + shift, 24, 100.0)


def test_self_attention_depends_on_distances_alone() -> None:
    torch.manual_seed(0)
    layer = SelfAttention(kv_heads=1, **SIZES)
    here, there, wider = (layer(TOKENS, rope) for rope in (table(), table(shift=5.0), table(factor=2.0)))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert (here - wider).abs().max() > 1e-3


def test_cross_attention_depends_on_distances_alone() -> None:
    torch.manual_seed(0)
    layer = CrossAttention(**SIZES)
    here, there = (layer(TOKENS, TOKENS.flip(1), table(s), table(s).flip(-3)) for s in (0.0, 5.0))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    for ropes in ((table(), table(5.0)), (table(5.0), table())):
        assert (layer(TOKENS, TOKENS, *ropes) - layer(TOKENS, TOKENS, table(), table())).abs().max() > 1e-3


def test_queries_and_keys_are_both_normalised() -> None:
    q, k = QKNorm(24, 1e-6)(TOKENS.unflatten(-1, (2, 24)) * 50 + 3, TOKENS.unflatten(-1, (2, 24)) * 0.1 - 7)
    for normed in (q, k):
        torch.testing.assert_close(normed.mean(-1), torch.zeros(2, 9, 2), rtol=0, atol=1e-5)
        torch.testing.assert_close(normed.var(-1, correction=0), torch.ones(2, 9, 2), rtol=0, atol=1e-3)


def test_frequencies_fall_from_one_to_near_one_over_theta() -> None:
    cos, sin = rope_table(torch.tensor([[2.0]]), 8, 16.0)
    angles = torch.tensor([[[2.0, 1.0, 0.5, 0.25]]])  # 16 ** -(0, 1/4, 2/4, 3/4)
    torch.testing.assert_close(torch.atan2(sin, cos), angles, rtol=0, atol=1e-6)
