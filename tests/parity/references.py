"""What other projects compute, in plain PyTorch and under their parameter names: for parity tests.

facebookresearch/mae and facebookresearch/DiT, written anew and as small as their names allow. `block` and `patch_embed`
may be timm's own classes where timm imports.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def scramble(model: nn.Module, seed: int = 0, std: float = 0.05) -> nn.Module:
    """Random numbers in every parameter, biases and norms too: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def empty(config: Any) -> Any:
    """A model whose every number must come from the weights: it starts as NaN."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    return model.eval()


def sincos_2d(width: int, side: int, *, cls: bool) -> Tensor:
    """The table of MAE and DiT, by its definition: x in the first half of the channels, y in the second."""
    rows = []
    for y in range(side):
        for x in range(side):
            row = []
            for place in (x, y):
                angles = [place / 10000 ** (i / (width // 4)) for i in range(width // 4)]
                row += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(row)
    table = torch.tensor(rows)
    return torch.cat([torch.zeros(1, width), table])[None] if cls else table[None]


class PatchEmbed(nn.Module):
    def __init__(self, size: int, patch: int, channels: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, approximate: str = "none"):
        super().__init__()
        self.fc1, self.fc2, self.approximate = nn.Linear(width, hidden), nn.Linear(hidden, width), approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(width, heads), MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MAE(nn.Module):
    """forward(images, noise) -> predictions of all patches, and which were hidden."""

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        decoder: tuple[int, int, int],
        channels: int = 3,
        block: Callable[[int, int], nn.Module] = Block,
        patch_embed: Callable[[int, int, int, int], nn.Module] = PatchEmbed,
    ):
        super().__init__()
        decoder_width, decoder_depth, decoder_heads = decoder
        side = size // patch
        self.patch_embed = patch_embed(size, patch, channels, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(sincos_2d(width, side, cls=True), requires_grad=False)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_width))
        self.decoder_pos_embed = nn.Parameter(sincos_2d(decoder_width, side, cls=True), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(block(decoder_width, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_width, patch * patch * channels)

    def encode(self, images: Tensor, keep: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed[:, 1:]
        x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images: Tensor, noise: Tensor, ratio: float = 0.75) -> tuple[Tensor, Tensor]:
        order = noise.argsort(dim=1)
        kept = int(noise.shape[1] * (1 - ratio))
        x = self.decoder_embed(self.encode(images, order[:, :kept]))
        masks = self.mask_token.expand(len(x), noise.shape[1] - kept, -1)
        patches = torch.cat([x[:, 1:], masks], dim=1)
        back = order.argsort(dim=1)
        patches = patches.gather(1, back[..., None].expand(-1, -1, x.shape[-1]))
        x = torch.cat([x[:, :1], patches], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:], order


class TimeEmbedder(nn.Module):
    def __init__(self, width: int, features: int = 256):
        super().__init__()
        self.features = features
        self.mlp = nn.Sequential(nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        half = self.features // 2
        angles = times[:, None].float() * torch.exp(-math.log(10000) * torch.arange(half) / half)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class LabelEmbedder(nn.Module):
    def __init__(self, classes: int, width: int):
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, width)


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int, attention: Callable[[int, int], nn.Module]):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = attention(width, heads), MLP(width, 4 * width, "tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class FinalLayer(nn.Module):
    def __init__(self, width: int, features: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class DiT(nn.Module):
    """forward(latents, times, labels) -> [B, 2C, H, W]: noise and its variance."""

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        channels: int = 4,
        attention: Callable[[int, int], nn.Module] = Attention,
        patch_embed: Callable[[int, int, int, int], nn.Module] = PatchEmbed,
    ):
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.x_embedder = patch_embed(size, patch, channels, width)
        self.t_embedder = TimeEmbedder(width)
        self.y_embedder = LabelEmbedder(classes, width)
        self.pos_embed = nn.Parameter(sincos_2d(width, self.side, cls=False), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(width, heads, attention) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch * patch * 2 * channels)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.x_embedder(x) + self.pos_embed
        condition = self.t_embedder(times) + self.y_embedder.embedding_table(labels)
        for block in self.blocks:
            x = block(x, condition)
        x = self.final_layer(x, condition).unflatten(1, (self.side, self.side))  # B h w (p q c)
        x = x.unflatten(-1, (self.patch, self.patch, -1)).permute(0, 5, 1, 3, 2, 4)
        return x.flatten(4, 5).flatten(2, 3)
