"""Branches of a block: each has a factor of its own for each sample (drop path), and a scale."""

import pytest
import torch

from vitrail.layers.block import MLP, Block, BlockConfig, SwiGLU

CONFIG = {"width": 24, "heads": 2, "kv_heads": 2, "hidden": 48, "mlp": "gelu", "norm": "layer", "eps": 1e-6}


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_branches_have_factors_of_their_own(residual: str) -> None:
    torch.manual_seed(0)
    block = Block(BlockConfig(**CONFIG, bias=True, qk_norm=False, layer_scale=None, residual=residual))
    torch.nn.init.normal_(block.norm2.weight)
    x = torch.randn(4, 5, 24)
    factors = torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    out = block(x, drop_path=factors)
    torch.testing.assert_close(out[0], block(x)[0])
    torch.testing.assert_close(out[3], x[3])
    attention = block.attn(x if residual == "post" else block.norm1(x))
    attention = block.norm1(attention) if residual == "post" else attention
    torch.testing.assert_close(out[2], x[2] + 2 * attention[2])
    mlp = block.norm2(block.mlp(x)) if residual == "post" else block.mlp(block.norm2(x))
    torch.testing.assert_close(out[1], x[1] + mlp[1])


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_branches_have_scales_of_their_own(residual: str) -> None:
    torch.manual_seed(0)
    block = Block(BlockConfig(**CONFIG, bias=True, qk_norm=False, layer_scale=0.5, residual=residual))
    x = torch.randn(4, 5, 24)
    with torch.no_grad():
        block.ls1.gamma.fill_(0.0)
        block.ls2.gamma.fill_(0.0)
        assert torch.equal(block(x), x)
        block.ls2.gamma.fill_(0.25)
        mlp = block.norm2(block.mlp(x)) if residual == "post" else block.mlp(block.norm2(x))
        torch.testing.assert_close(block(x), x + mlp / 4)


def test_mlps_are_the_published_ones() -> None:
    torch.manual_seed(0)
    mlp, x = SwiGLU(width=24, hidden=32, bias=True), torch.randn(2, 5, 24)
    gate = mlp.gate(x)
    torch.testing.assert_close(mlp(x), mlp.fc2(gate * torch.sigmoid(gate) * mlp.fc1(x)))
    plain = MLP(width=24, hidden=32, bias=True)
    hidden = plain.fc1(x)
    exact = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    torch.testing.assert_close(plain(x), plain.fc2(exact), rtol=1e-6, atol=1e-6)
