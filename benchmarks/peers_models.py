"""Other libraries' models, each with the training step that its users write: the peers of benchmarks/peers.py.

- bf16 autocast over fp32 weights, fused AdamW, gradients set to none; nothing asks for a number in between, so the host
  may run ahead of the device
- timm, Hugging Face and MONAI build their own models. A diffusion transformer is written here, plainly, as
  facebookresearch/DiT builds it (adaLN-Zero, GELU by tanh, sin-cos positions, a table of labels), and learns the
  velocity of a flow, as ours does beside it; its moving average is one kernel, not a loop over parameters
- inputs and targets are random and lie on the device
"""

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]  # trains for one step and returns the loss, still on the device


class Missing(Exception):
    """A package that is not installed, or does not import."""


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # packages that do not fit each other fail in many ways
        raise Missing(f"{name}: {' '.join(str(error).split())[:200]}") from None


@dataclass(frozen=True)
class Peer:
    """How a peer's step is made, for a batch on a device; `compiled`: by torch.compile, as a whole."""

    make: Callable[[int, torch.device, bool, bool], Step]  # batch, device, compiled, tiny
    compiled: bool = True


def stepper(
    model: nn.Module, loss: Callable[[], Tensor], device: torch.device, after: Callable[[], None] = lambda: None
) -> Step:
    """Make a step of forward, backward and AdamW; `after` follows the update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after()
        return found.detach()

    return step


def ready(model: nn.Module, device: torch.device, compiled: bool) -> tuple[nn.Module, Any]:
    """Return the model on the device, and what is called instead of it."""
    model = model.to(device).train()
    return model, torch.compile(model) if compiled else model


# ---------------------------------------------------------------- timm


def timm_vit(name: str) -> Callable[[int, torch.device, bool, bool], Step]:
    def make(batch: int, device: torch.device, compiled: bool, tiny: bool) -> Step:
        timm = imported("timm")
        options = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2} if tiny else {}
        model, call = ready(timm.create_model(name, num_classes=1000, **options), device, compiled)
        side = 32 if tiny else 224
        images = torch.randn(batch, 3, side, side, device=device)
        labels = torch.randint(1000, (batch,), device=device)
        return stepper(model, lambda: F.cross_entropy(call(images).float(), labels), device)

    return make


# ---------------------------------------------------------------- Hugging Face


def huggingface_mae(batch: int, device: torch.device, compiled: bool, tiny: bool) -> Step:
    transformers = imported("transformers")
    size: dict[str, Any] = {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "decoder_hidden_size": 512, "decoder_num_hidden_layers": 8, "decoder_num_attention_heads": 16,
        "decoder_intermediate_size": 2048,
    }  # fmt: skip
    if tiny:
        size = {
            "image_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 64, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 1, "decoder_intermediate_size": 32,
        }  # fmt: skip
    c = transformers.ViTMAEConfig(norm_pix_loss=True, mask_ratio=0.75, **size)
    model, call = ready(transformers.ViTMAEForPreTraining(c), device, compiled)
    images = torch.randn(batch, 3, c.image_size, c.image_size, device=device)
    return stepper(model, lambda: call(images).loss, device)


# ---------------------------------------------------------------- MONAI


def monai_unetr(batch: int, device: torch.device, compiled: bool, tiny: bool) -> Step:
    nets, losses = imported("monai.networks.nets"), imported("monai.losses")
    side, classes = (32, 4) if tiny else (96, 14)
    size = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 2, "feature_size": 4} if tiny else {}
    made = nets.UNETR(in_channels=1, out_channels=classes, img_size=(side,) * 3, **size)
    model, call = ready(made, device, compiled)
    judge = losses.DiceCELoss(to_onehot_y=True, softmax=True, squared_pred=True)
    volumes = torch.randn(batch, 1, side, side, side, device=device)
    labels = torch.randint(classes, (batch, 1, side, side, side), device=device)
    return stepper(model, lambda: judge(call(volumes), labels), device)


# ---------------------------------------------------------------- a diffusion transformer


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # B H N K
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.proj(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(y), approximate="tanh"))


class PlainDiT(nn.Module):
    def __init__(self, *, width: int, depth: int, heads: int, side: int, channels: int, classes: int, patch: int = 2):
        super().__init__()
        self.patch, self.classes, self.side = patch, classes, side
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation, self.out = nn.Linear(width, 2 * width), nn.Linear(width, patch * patch * channels)
        self.register_buffer("places", sincos_table(side // patch, width), persistent=False)
        for layer in (self.modulation, self.out, *(block.modulation for block in self.blocks)):
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        labels = torch.where(torch.rand_like(times) < 0.1, self.classes, labels)
        steps = torch.exp(-math.log(10000.0) * torch.arange(128, device=x.device) / 128)
        angles = 1000 * times[:, None] * steps
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.labels(labels)
        y = self.embed(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            y = block(y, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        y = self.out(self.norm(y) * (1 + scale) + shift)  # B N P*P*C
        cells = self.side // self.patch
        y = y.unflatten(1, (cells, cells)).unflatten(-1, (self.patch, self.patch, -1))
        return y.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def sincos_table(cells: int, width: int) -> Tensor:
    """Positions of a square grid, [N, D]: half of the waves along either axis."""
    waves = 1 / 10000 ** (torch.arange(width // 4) / (width / 4))
    along = torch.arange(cells)[:, None] * waves  # cells, D / 4
    half = torch.cat([along.sin(), along.cos()], dim=-1)
    rows, columns = half[:, None].expand(-1, cells, -1), half[None].expand(cells, -1, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)


def plain_dit(batch: int, device: torch.device, compiled: bool, tiny: bool) -> Step:
    size = {"width": 32, "depth": 2, "heads": 2} if tiny else {"width": 1152, "depth": 28, "heads": 16}
    side, classes = (8, 10) if tiny else (32, 1000)
    model, call = ready(PlainDiT(side=side, channels=4, classes=classes, **size), device, compiled)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    images = torch.randn(batch, 4, side, side, device=device)
    labels = torch.randint(classes, (batch,), device=device)

    def loss() -> Tensor:
        noise, times = torch.randn_like(images), torch.rand(batch, device=device)
        along = times[:, None, None, None]
        return F.mse_loss(call((1 - along) * images + along * noise, times, labels).float(), noise - images)

    return stepper(model, loss, device, after=lambda: follow(average, model.parameters()))


@torch.no_grad()
def follow(average: list[Tensor], parameters: Iterable[Tensor], share: float = 1e-4) -> None:
    torch._foreach_lerp_(average, list(parameters), share)
