"""Transformer blocks: residual branches, normed before (pre) or after (post), scaled by LayerScale and drop path.

Drop path is data: a table [B, 2] of factors for the two branches of a block, 0 or 1/(1-p), drawn outside.

The two MLPs of vision transformers: GELU, and SwiGLU with gate and value as two layers (a split keeps pairs).

Conditioning on a time and a class: features of a time, label tables with a null class, adaLN-Zero blocks.

The condition travels as one extra token in front of the others, [condition; tokens], so that one tensor flows from
block to block. Every modulation and the last layer start at zero: a fresh block changes nothing.
Shapes: B batch, N tokens, D width.
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.layers.attention import CrossAttention, KeyMask, SelfAttention
from vitrail.layers.fast import is_fast
from vitrail.layers.flops import Flops
from vitrail.layers.fused import (
    add_gated,
    add_gated_norm,
    add_norm,
    apart,
    gelu_after,
    is_bare_norm,
    is_plain_norm,
    past_norm,
    suits,
)
from vitrail.layers.gelu import gelu
from vitrail.layers.init import Constant, Normal, mark
from vitrail.recipe import config


def swiglu_hidden(width: int, *, multiplier: float = 1.0, multiple_of: int = 256) -> int:
    """Llama's rule: two thirds of four widths, times a multiplier, rounded up."""
    hidden = int(multiplier * int(2 * (4 * width) / 3))
    return multiple_of * math.ceil(hidden / multiple_of)


class MLP(nn.Module):
    """`approximate` is GELU's: "none" for the exact one, "tanh" for the approximation that DiT was trained with."""

    token_inputs: ClassVar[int] = 1  # so many of the first arguments are tokens
    columns: ClassVar[tuple[str, ...]] = ("fc1",)  # layers whose outputs, hidden channels, can be shared out
    row: ClassVar[str] = "fc2"  # the layer whose inputs are these

    def __init__(self, *, width: int, hidden: int, bias: bool, approximate: Literal["none", "tanh"] = "none"):
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor, *, without: bool = False) -> Tensor:
        """`without`: the last bias is added, but whoever calls gives it its gradient."""
        tanh = self.approximate == "tanh"
        if suits("bias", self.fc1):
            x = gelu_after(self.fc1, x, tanh=tanh)
        else:
            x = self.fc1(x)
            x = gelu(x, tanh=tanh) if is_fast("gelu", x.device.type) else F.gelu(x, approximate=self.approximate)
        return apart(self.fc2, x) if without else self.fc2(x)


class SwiGLU(nn.Module):
    token_inputs: ClassVar[int] = 1
    columns: ClassVar[tuple[str, ...]] = ("gate", "fc1")
    row: ClassVar[str] = "fc2"

    def __init__(self, *, width: int, hidden: int, bias: bool):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.gate(x)) * self.fc1(x))


@config
class BlockConfig:
    """The make of one block, every number resolved."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    mlp: Literal["gelu", "swiglu"]
    norm: Literal["layer", "rms"]
    eps: float
    bias: bool
    qk_norm: bool
    layer_scale: float | None
    residual: Literal["pre", "post"] = "pre"  # x + f(norm(x)), or x + norm(f(x))

    @property
    def scales(self) -> bool:
        """Tell whether something stands between a branch and the sum, whose backward reads what the branch gave."""
        return self.layer_scale is not None or self.residual == "post"

    def make_attention(self) -> SelfAttention:
        return SelfAttention(
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk_norm=self.qk_norm,
            bias=self.bias,
            eps=self.eps,
        )

    def make_mlp(self, *, approximate: Literal["none", "tanh"] = "none") -> nn.Module:
        if self.mlp == "gelu":
            return MLP(width=self.width, hidden=self.hidden, bias=self.bias, approximate=approximate)
        return SwiGLU(width=self.width, hidden=self.hidden, bias=self.bias)

    def flops(self, tokens: int, memory: int | None = None, *, last_read: bool = False) -> Flops:
        """Forward of one block with so many tokens, which attend to each other or to `memory` tokens.

        `last_read`: the block scales its branches before it adds them, so its backward reads what fc2 gave.
        """
        width, keys = self.width, tokens if memory is None else memory
        layers = (*(("gate",) if self.mlp == "swiglu" else ()), "fc1", "fc2")
        roles = {
            "qkv": 2.0 * width * (tokens * width + 2 * keys * (width // self.heads * self.kv_heads)),
            "proj": 2.0 * tokens * width * width,
            **dict.fromkeys(layers, 2.0 * tokens * width * self.hidden),
        }
        last = 0.0 if last_read or self.scales else roles["fc2"]
        return Flops(linear=sum(roles.values()), attention=4.0 * width * tokens * keys, roles=roles, last=last)


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    return nn.LayerNorm(width, eps=eps) if kind == "layer" else nn.RMSNorm(width, eps=eps)


class Scale(nn.Module):
    """LayerScale: a learned factor a channel, small at the start."""

    def __init__(self, width: int, value: float):
        super().__init__()
        self.gamma = mark(nn.Parameter(torch.empty(width)), Constant(value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Residual(nn.Module):
    """Base of both blocks: the MLP branch, the norms, the scales and drop path."""

    def __init__(self, c: BlockConfig):
        super().__init__()
        self.post = c.residual == "post"
        self.norm1 = make_norm(c.norm, c.width, c.eps)
        self.norm2 = make_norm(c.norm, c.width, c.eps)
        self.mlp = c.make_mlp()
        self.ls1 = nn.Identity() if c.layer_scale is None else Scale(c.width, c.layer_scale)
        self.ls2 = nn.Identity() if c.layer_scale is None else Scale(c.width, c.layer_scale)

    def is_plain(self) -> bool:
        """Tell whether branches are added as they are, after layer norms before them."""
        scaled = not (isinstance(self.ls1, nn.Identity) and isinstance(self.ls2, nn.Identity))
        return not self.post and not scaled and is_plain_norm(self.norm1, self.norm2)

    def before(self, x: Tensor) -> Tensor:
        """Return the input of attention."""
        return x if self.post else self.norm1(x)

    def residual(self, x: Tensor, attention: Tensor, drop_path: Tensor | None) -> Tensor:
        """Both branches added to x, given what attention made of before(x)."""
        if self.post:
            x = x + _dropped(self.ls1(self.norm1(attention)), drop_path, 0)
            return x + _dropped(self.ls2(self.norm2(self.mlp(x))), drop_path, 1)
        x = x + _dropped(self.ls1(attention), drop_path, 0)
        return x + _dropped(self.ls2(self.mlp(self.norm2(x))), drop_path, 1)


def _dropped(branch: Tensor, drop_path: Tensor | None, column: int) -> Tensor:
    return branch if drop_path is None else branch * drop_path[:, column, None, None].to(branch.dtype)


class Block(_Residual):
    """Self-attention and MLP."""

    def __init__(self, c: BlockConfig):
        super().__init__(c)
        self.attn = c.make_attention()

    def forward(
        self, x: Tensor, rope: Tensor | None = None, drop_path: Tensor | None = None, mask: KeyMask | None = None
    ) -> Tensor:
        if suits("norm", self.attn.proj) and drop_path is None and self.is_plain():
            norms: Any = (self.norm1, self.norm2)
            x, normed = past_norm(norms[0], x)
            branch = self.attn(normed, rope, mask, without=True)
            x, normed = add_norm(norms[1], x, branch, self.attn.proj.bias)
            return x + self.mlp(normed)
        return self.residual(x, self.attn(self.before(x), rope, mask), drop_path)


class CrossBlock(_Residual):
    """Queries attend to memory; memory passes unchanged.

    One tensor holds both, [memory; queries] along the tokens, so that one tensor flows from block to block.
    """

    def __init__(self, c: BlockConfig):
        super().__init__(c)
        self.attn = CrossAttention(
            width=c.width, heads=c.heads, kv_heads=c.kv_heads, qk_norm=c.qk_norm, bias=c.bias, eps=c.eps
        )

    def forward(
        self,
        x: Tensor,
        num_queries: int,
        rope: Tensor | None = None,
        memory_rope: Tensor | None = None,
        drop_path: Tensor | None = None,
        mask: KeyMask | None = None,
    ) -> Tensor:
        memory, queries = x[:, :-num_queries], x[:, -num_queries:]
        attention = self.attn(self.before(queries), memory, rope, memory_rope, mask)
        return torch.cat([memory, self.residual(queries, attention, drop_path)], dim=1)


def scale_by_depth(blocks: Iterable[nn.Module]) -> None:
    """Give the linear layers of blocks the start that torchtitan gives them: normal, of standard deviation 0.02.

    Layers that write to the residual stream, and SwiGLU's value, start with 0.02 / sqrt(2 n) in the n-th block, so that
    the stream does not grow with depth. (torchtitan cuts the distribution at +-2, so far out that nothing is cut.)
    """
    for number, block in enumerate(blocks, start=1):
        for module in block.modules():
            if not isinstance(module, SelfAttention | CrossAttention | MLP | SwiGLU):
                continue
            for name in (*module.columns, module.row):
                scaled = name == module.row or (isinstance(module, SwiGLU) and name == "fc1")
                mark(getattr(module, name).weight, Normal(0.02 / math.sqrt(2 * number) if scaled else 0.02))


TimeOrder = Literal["cos_sin", "interleaved"]


def timestep_features(t: Tensor, width: int, max_period: float = 10000.0, order: TimeOrder = "cos_sin") -> Tensor:
    """Waves of a time [...], integer or not, as fp32 [..., width]; an odd width ends with a 0.

    Wavelengths go from 2 pi to 2 pi max_period. "cos_sin" is all cosines, then all sines (facebookresearch/DiT);
    "interleaved" is sine, cosine, sine, ... (Vaswani et al.).
    """
    half = width // 2
    # In fp32, as the weights of others have seen it: fp64 would differ by 1e-4 at time 1000.
    steps = torch.arange(half, dtype=torch.float32, device=t.device)
    angles = t.float().unsqueeze(-1) * torch.exp(-math.log(max_period) * steps / max(half, 1))
    if order == "cos_sin":
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
    else:
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
    return F.pad(waves, (0, width - 2 * half))


class TimeEmbed(nn.Module):
    """Times [B] -> [B, D]: features, linear, SiLU or ReLU, linear; `scale` multiplies the times first."""

    def __init__(
        self,
        features: int,
        width: int,
        *,
        scale: float = 1.0,
        order: TimeOrder = "cos_sin",
        activation: Literal["silu", "relu"] = "silu",
    ):
        super().__init__()
        self.scale, self.order = scale, order
        self.activation = F.silu if activation == "silu" else F.relu
        self.fc1 = nn.Linear(features, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, times: Tensor) -> Tensor:
        waves = timestep_features(times.float() * self.scale, self.fc1.in_features, order=self.order)
        return self.fc2(self.activation(self.fc1(waves.to(self.fc1.weight.dtype))))

    def flops(self) -> float:
        return 2.0 * self.fc2.in_features * (self.fc1.in_features + self.fc2.out_features)


def check_times(times: Tensor | None, batch: int, *, scale: float = 1.0, limit: float | None = None) -> Tensor:
    """Refuse times that are missing, not one a sample, or (on the host) beyond 0 to `limit` once scaled."""
    if not isinstance(times, Tensor):
        what = "missing" if times is None else f"{times!r}"
        raise ValueError(f"times are {what}: give the model `times`, a tensor with one number a sample")
    if times.shape != (batch,):
        raise ValueError(f"times have shape {list(times.shape)}, but there are {batch} samples; give shape [{batch}]")
    if limit is not None and _on_host(times):  # elsewhere the host would have to wait for the device
        wrong = times[(times < 0) | (times * scale > limit)]
        if len(wrong):
            raise ValueError(f"time {wrong[0].item():g} is out of range: times are 0 to {limit / scale:g}")
    return times


def _on_host(t: Tensor) -> bool:
    """Tell whether values may be looked at: the host would wait for a device, and compiled code cannot branch."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def drop_labels(labels: Tensor, noise: Tensor, rate: float, null: int) -> Tensor:
    """The null label where a sample's noise (uniform in [0, 1), drawn outside) is below the rate."""
    return torch.where(noise.to(labels.device) < rate, null, labels)


def check_class_ids(labels: Tensor, classes: int) -> None:
    """Refuse labels that are not 0 .. classes; it waits for the device, so call it where labels are on the host."""
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}; give whole numbers from 0 to {classes - 1}")
    wrong = labels[(labels < 0) | (labels > classes)]
    if len(wrong):
        raise ValueError(
            f"label {int(wrong[0])} is out of range: model.classes is {classes}, so labels are 0 to {classes - 1} "
            f"({classes} stands for no class)"
        )


class LabelEmbed(nn.Module):
    """Labels [B] -> [B, D]; the last row of the table, `null`, stands for no class."""

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.null = classes
        self.table = mark(nn.Parameter(torch.empty(classes + 1, width)), Normal(0.02))

    def forward(self, labels: Tensor | None, batch: int) -> Tensor:
        """Without labels, every one of the `batch` samples is of no class."""
        if labels is None:
            return self.table[self.null].expand(batch, -1)
        if labels.shape != (batch,):
            raise ValueError(f"labels have shape {list(labels.shape)}, but there are {batch} samples")
        if _on_host(labels):  # elsewhere the host would have to wait for the device
            check_class_ids(labels, self.null)
        return F.embedding(labels.long(), self.table)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale [B, D] on tokens [B, N, D]; at zero they change nothing."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def join_condition(condition: Tensor, x: Tensor) -> Tensor:
    """[B, D] in front of [B, N, D] -> [B, 1 + N, D]."""
    return torch.cat([condition.unsqueeze(1), x], dim=1)


def split_condition(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1 + N, D] -> condition [B, D] and tokens [B, N, D]."""
    return x[:, 0], x[:, 1:]


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts as the constant 0."""
    layer = nn.Linear(inputs, outputs)
    assert isinstance(layer.weight, nn.Parameter)
    mark(layer.weight, Constant(0.0))
    return layer


def modulated_norm(kind: str, width: int, eps: float, affine: bool | None = None) -> nn.Module:
    """Make a norm with or without weights of its own, which modulation has already.

    None: LayerNorm has none, as in DiT; RMSNorm has.
    """
    affine = kind == "rms" if affine is None else affine
    return (nn.LayerNorm if kind == "layer" else nn.RMSNorm)(width, eps=eps, elementwise_affine=affine)


class ModulatedBlock(nn.Module):
    """adaLN-Zero: shift, scale and gate of attention, then of the MLP, are a linear function of the condition.

    It runs once a sample, not once a token. The condition passes unchanged; GELU is the tanh approximation.
    """

    gathered: ClassVar[tuple[str, ...]] = ("modulation",)  # layers whose outputs can be computed apart and gathered

    def __init__(self, c: BlockConfig, *, affine: bool | None = None):
        super().__init__()
        assert c.layer_scale is None, "gates take the place of LayerScale"
        self.norm1 = modulated_norm(c.norm, c.width, c.eps, affine)
        self.attn = c.make_attention()
        self.norm2 = modulated_norm(c.norm, c.width, c.eps, affine)
        self.mlp = c.make_mlp(approximate="tanh")
        self.modulation = zero_linear(c.width, 6 * c.width)

    def is_plain(self) -> bool:
        """Tell whether gradients of what is gated can add up those of biases."""
        mlp = self.mlp
        if not isinstance(mlp, MLP) or "forward" in vars(mlp):
            return False
        return suits("norm", self.attn.proj, mlp.fc2) and is_bare_norm(self.norm2)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, drop_path: Tensor | None = None, mask: KeyMask | None = None
    ) -> Tensor:
        """[condition; tokens] in and out; rope and mask are of the tokens alone."""
        condition, x = split_condition(x)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).chunk(6, dim=-1)  # B D each
        if drop_path is not None:  # factors of a branch, so of its gate
            factors = drop_path.to(x.dtype)
            gate1, gate2 = gate1 * factors[:, :1], gate2 * factors[:, 1:]
        if self.is_plain():
            branch = self.attn(modulate(self.norm1(x), shift1, scale1), rope, mask, without=True)
            norm: Any = self.norm2
            mlp: Any = self.mlp
            x, y = add_gated_norm(x, branch, self.attn.proj.bias, gate1, scale2, shift2, norm.eps)
            x = add_gated(x, mlp(y, without=True), mlp.fc2.bias, gate2)
            return join_condition(condition, x)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1), rope, mask)
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return join_condition(condition, x)
