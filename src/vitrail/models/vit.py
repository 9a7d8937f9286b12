"""Vision transformer: the encoder, pooled and classified.

- pooled by class token, mean, attention (one learned query), or not at all ("tokens")
- classes: 0 gives the pooled feature itself

The vision transformer of the Frontier sharding study: the encoder with that study's choices.

- dual patch norm, one more norm before the first block, learned positions on patches only
- blocks x + LN(f(x)), QK-norm, SwiGLU with 2.6875 hidden channels for each (5B: 15360 in all)
- the class token is classified; images of 224 x 224
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vitrail.layers.attention import CrossAttention, mask_of
from vitrail.layers.block import BlockConfig
from vitrail.layers.flops import Flops
from vitrail.layers.init import Normal, initialise_here, mark
from vitrail.models.config import EncoderConfig, ModelConfig, Positions
from vitrail.models.encoder import EncodedModel
from vitrail.models.model import Side, Stage
from vitrail.recipe import config, must


@config
class ViTConfig(EncoderConfig, ModelConfig):
    output: ClassVar[str] = "classes"
    origin: ClassVar[str] = "Dosovitskiy et al. 2020; Touvron et al. 2021 (Ti, S); Zhai et al. 2022 (g, G)"

    kind: Literal["vit"] = "vit"
    ndim: int = 2
    channels: int | None = None  # default: as many as the data have variables
    shape: int | tuple[int, ...] | None = None  # size of the input in voxels; only learned positions need it
    pool: Literal["cls", "mean", "attention", "tokens"] = "mean"
    classes: int | None = 0  # 0: features, no head; null: as many as the data have
    head_dropout: float = 0.0  # of pooled features, in training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool == "cls" and not self.cls_token:
            raise ValueError("pool: cls needs cls_token: true")
        must("be at least 0", classes=self.classes)
        must("be at least 0 and below 1", head_dropout=self.head_dropout)
        self.settle()

    def build(self) -> "ViT":
        return ViT(self)


class ViT(EncodedModel):
    """forward(patches [B, N, P*C], coordinates=[B, N, ndim]) -> features [B, D], logits [B, classes] or tokens."""

    spared = ("query",)

    def __init__(self, c: ViTConfig):
        super().__init__(c)
        self.pool = AttentionPool(c.block()) if c.pool == "attention" else None
        self.head = nn.Linear(self.encoder.width, c.classes, bias=True) if c.classes else nn.Identity()
        initialise_here(self)

    def stages(self) -> list[Stage]:
        return [
            *self.encoder.stages(),
            Stage("head", self.pool_and_classify, ("valid", "variables", "head_dropout"), (self.pool, self.head)),
        ]

    def pool_and_classify(self, x: Tensor, side: Side) -> Tensor:
        x = self.pool_tokens(x, side)
        if side.get("head_dropout") is not None:
            kept = side["head_dropout"].to(x.dtype)  # [B, D]: 0, or 1 / (1 - rate)
            x = x * (kept.unsqueeze(1) if x.ndim == 3 else kept)
        return self.head(x)

    def pool_tokens(self, x: Tensor, side: Side) -> Tensor:
        """[B, prefix + N, D] -> [B, D], or the tokens [B, N, D] as they are."""
        prefix, valid = self.encoder.prefix, side.get("valid")
        if self.config.pool == "cls":
            x = x[:, 0]
        elif self.config.pool == "mean":
            x = self.mean(x[:, prefix:], valid)
        else:
            groups = len(side.get("variables") or self.config.variables.known) if self.config.separate else 1
            before, tokens = x[:, :prefix], self.sequence.whole(x[:, prefix:], groups=groups)
            valid = None if valid is None else self.sequence.whole(valid, groups=groups)
            mask = None if valid is None else mask_of(valid, prefix)
            x = tokens if self.pool is None else self.pool(torch.cat([before, tokens], dim=1), mask)
        return x

    def mean(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """[B, N, D] -> [B, D], padding left out."""
        if valid is None:
            return self.sequence.total(x.mean(dim=1)) / self.sequence.parts
        # In fp32: bf16 cannot count beyond 256.
        number = self.sequence.total(valid.sum(dim=1, keepdim=True).float())
        total = self.sequence.total(torch.where(valid.unsqueeze(-1), x, 0).float().sum(dim=1))
        return (total / number.clamp(min=1)).to(x.dtype)

    def flops(self) -> Flops:
        """Forward of one sample of the configured shape, all of its patches given."""
        tokens, width = self.count_tokens(), self.encoder.width
        head = 2.0 * width * (self.config.classes or 0) * (tokens if self.config.pool == "tokens" else 1)
        if self.pool is not None:
            head += self.pool.flops(tokens + self.encoder.prefix)
        return self.encoder.flops(tokens) + Flops(outside=head)


class AttentionPool(nn.Module):
    """One learned query over all tokens."""

    def __init__(self, c: BlockConfig):
        super().__init__()
        self.query = mark(nn.Parameter(torch.empty(1, c.width)), Normal(0.02))
        self.attn = CrossAttention(width=c.width, heads=c.heads, qk_norm=c.qk_norm, bias=c.bias, eps=c.eps)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        query = self.query.to(x.dtype).expand(x.shape[0], -1, -1)
        return self.attn(query, x, mask=mask).squeeze(1)

    def flops(self, tokens: int) -> float:
        width = self.query.shape[-1]
        return 4.0 * width * width * (1 + tokens) + 4.0 * width * tokens


@config
class StudyViTConfig(ViTConfig):
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "Base": {"width": 768, "depth": 12, "heads": 12, "patch": 16},
        "Huge": {"width": 1280, "depth": 32, "heads": 16, "patch": 14},
        "1B": {"width": 1536, "depth": 32, "heads": 16, "patch": 14},
        "3B": {"width": 2816, "depth": 32, "heads": 32, "patch": 14},
        "5B": {"width": 1792, "depth": 56, "heads": 16, "patch": 14, "hidden": 15360},
        "15B": {"width": 5040, "depth": 48, "heads": 48, "patch": 14},
    }
    gated_ratio: ClassVar[float] = 2.6875
    origin: ClassVar[str] = "Tsaris et al. 2024 (arXiv 2404.11706), as its benchmark builds it"

    kind: Literal["study_vit"] = "study_vit"  # type: ignore[assignment]
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    qk_norm: bool = True
    patch_norm: bool = True
    input_norm: bool = True
    residual: Literal["pre", "post"] = "post"
    positions: Positions = "learned"
    cls_token: bool = True
    cls_position: bool = False
    pool: Literal["cls", "mean", "attention", "tokens"] = "cls"
    classes: int | None = 1000
    shape: int | tuple[int, ...] | None = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is None and self.mlp_ratio is None:
            assert self.width is not None
            object.__setattr__(self, "hidden", int(self.width * self.gated_ratio))
