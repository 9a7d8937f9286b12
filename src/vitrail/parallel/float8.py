"""Products in float8 (torchao) for the linear layers of blocks: precision.compute float8.

- inputs, weights and gradients are rounded to 8 bits for the product alone, each row or tensor with a scale of its own,
  found anew each time; what is stored, added up and sent stays as it is in bf16
- "rowwise" scales each row (the gradient of weights too), "rowwise_gw" leaves the gradient of weights in bf16, which is
  the most accurate, "tensorwise" has one scale a tensor, which is the fastest
- layers change in place, so names, initialisation and sharding do; a layer cut over tensor ranks computes its slice
- rounding reads and writes every number once more. A layer pays for that when it is large: each is judged by its shape
  and the rows that one product has, and one that would be slower stays in bf16
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitrail.errors import UserError
from vitrail.layers.block import MLP, SwiGLU
from vitrail.layers.patches import part_size
from vitrail.models.model import Model
from vitrail.parallel.mesh import Layout, local
from vitrail.recipe.kinds import remedy

Recipe = Literal["tensorwise", "rowwise", "rowwise_gw"]
_NAMES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw": "rowwise_with_gw_hp"}
MLP_LAYERS = {*MLP.columns, MLP.row, *SwiGLU.columns, SwiGLU.row}
MULTIPLE = 16  # of both widths of a layer, which the hardware asks for


# ---------------------------------------------------------------- will it pay


@dataclass(frozen=True)
class Speeds:
    """Speeds that a GPU reaches, not its peak: TFLOP/s of products, and TB/s of the passes that round."""

    bf16: float
    float8: dict[str, float]
    memory: float


# An H200. bf16 is measured (shapes of ViT-L to a 2B model). The others are assumed: float8 reaches 1.6 times that of
# its twofold peak, 1.4 times with a scale a row, and memory 80 % of its 4.8 TB/s. Whole steps of ViT-L, DiT-XL and a 2B
# MAE, measured with all layers in float8, agree with what follows from them (benchmarks/memory.md); those of a 0.5B DiT
# with 65,536 tokens are 1.10 times as fast where 0.94 follows (benchmarks/dit_grid.md). It errs on the side of bf16.
HOPPER = Speeds(bf16=720.0, float8={"tensorwise": 1150.0, "rowwise": 1000.0, "rowwise_gw": 1000.0}, memory=3.8)
PAYS = 1.03  # less is within the noise of a step


def speedup(rows: int, inputs: int, outputs: int, recipe: Recipe = "tensorwise", speeds: Speeds = HOPPER) -> float:
    """Return how much faster forward and backward of one layer are in float8 than in bf16, by a model of time.

    Time is that of three products, and of the passes that round: two reads of bf16 (for the scale, for the value) and a
    write of float8, once for each operand of each product in float8.
    """
    product = 2.0 * rows * inputs * outputs
    x, w, g = rows * inputs, inputs * outputs, rows * outputs  # numbers of the input, the weight, the gradient
    rounded = [x, w, g, w] + ([] if recipe == "rowwise_gw" else [g, x])
    fast = 3 if recipe != "rowwise_gw" else 2
    seconds_bf16 = 3 * product / (speeds.bf16 * 1e12)
    seconds = fast * product / (speeds.float8[recipe] * 1e12) + (3 - fast) * product / (speeds.bf16 * 1e12)
    return seconds_bf16 / (seconds + 5.0 * sum(rounded) / (speeds.memory * 1e12))


def break_even(inputs: int, outputs: int, recipe: Recipe = "tensorwise", speeds: Speeds = HOPPER) -> int | None:
    """Return the least rows (tokens of a batch on one device) with which a layer is faster in float8; None: never."""
    if speedup(1 << 40, inputs, outputs, recipe, speeds) < PAYS:
        return None
    low, high = 1, 1 << 40
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if speedup(middle, inputs, outputs, recipe, speeds) >= PAYS else (middle + 1, high)
    return low


def rows_of(layer: str, *, samples: int, tokens: int, layout: Layout, piece: int | None = None) -> int:
    """Count the rows of one product of a layer: the tokens of a context rank, or those of a piece of an MLP."""
    part = part_size(tokens, layout.parts)
    if piece is not None and layer.rpartition(".")[2] in MLP_LAYERS:
        part = min(part, piece)
    return samples * part * layout.tensor  # a module gathers the tokens of its tensor group


class Layer(NamedTuple):
    name: str
    layer: nn.Linear
    inputs: int  # of this rank's slice
    outputs: int


class Judgement(NamedTuple):
    """The worth of float8 for a model."""

    taken: tuple[str, ...]  # names of the layers that pay, or that were forced
    left: dict[str, str]  # why the others stay in bf16, by name
    gain: float  # of the time of all linear layers of blocks

    def __str__(self) -> str:
        """One line for the log."""
        total = len(self.taken) + len(self.left)
        if not self.taken:
            why = next(iter(self.left.values()), "there are none")
            return (
                f"float8 will not pay: none of {total} linear layers is fit for it or would be faster ({why}); use bf16"
            )
        rest = f"; {len(self.left)} stay in bf16 ({next(iter(self.left.values()))})" if self.left else ""
        gain = f"about {self.gain:.2f} times as fast (by an H200's speeds)"
        return f"float8 in {len(self.taken)} of {total} linear layers, {gain}{rest}"


def linears(model: Model) -> Iterator[Layer]:
    """Yield the linear layers that blocks apply to tokens."""
    names = {module: name for name, module in model.named_modules()}
    for block in model.blocks():
        for layer in linears_of(block):
            outputs, inputs = local(layer.weight).shape
            yield Layer(names[layer], layer, inputs, outputs)


def linears_of(block: nn.Module) -> Iterator[nn.Linear]:
    for module in block.modules():
        for name in (*getattr(module, "columns", ()), *filter(None, [getattr(module, "row", None)])):
            yield getattr(module, name)


def check(
    model: Model,
    rows: int | Callable[[str], int],
    recipe: Recipe = "tensorwise",
    speeds: Speeds = HOPPER,
    *,
    force: bool = False,
) -> Judgement:
    """Judge which layers would be faster in float8 with these rows (tokens of a product), or rows by a layer's name.

    `force` takes every layer whose shape allows it.
    """
    taken, left, seconds, saved = [], {}, 0.0, 0.0
    for name, _, inputs, outputs in linears(model):
        number = rows(name) if callable(rows) else rows
        gain = speedup(number, inputs, outputs, recipe, speeds)
        seconds += number * inputs * outputs
        if inputs % MULTIPLE or outputs % MULTIPLE:
            left[name] = f"{inputs} x {outputs} are not multiples of {MULTIPLE}"
        elif gain < PAYS and not force:
            least = break_even(inputs, outputs, recipe, speeds)
            when = "at no number of tokens" if least is None else f"from {least:,} tokens on, and there are {number:,}"
            left[name] = f"{inputs} x {outputs} pays {when}"
        else:
            taken.append(name)
            saved += number * inputs * outputs * (1 - 1 / gain)
    return Judgement(tuple(taken), left, seconds / (seconds - saved) if seconds else 1.0)


def refusal(device: torch.device) -> str | None:
    """Say why a device has no products in float8; None if it has."""
    if device.type != "cuda":
        return f"a {device.type.upper()} has no float8 products"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return None if name.startswith(("gfx94", "gfx95")) else f"{name} has no float8 products, an MI300 has"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"compute capability {major}.{minor} has no float8 products, 8.9 has"


# ---------------------------------------------------------------- how it is done


def apply(
    model: Model,
    *,
    device: torch.device,
    rows: int | Callable[[str], int],
    recipe: Recipe = "tensorwise",
    force: bool = False,
    emulate: bool = False,
) -> Judgement:
    """Make the linear layers of blocks that pay compute in float8, in place.

    `force` as in `check`. `emulate` rounds, but multiplies in the type of the inputs: on any device, slowly, for tests.
    """
    if not emulate and (reason := refusal(device)) is not None:
        raise UserError(f"precision.compute: float8 cannot be used, since {reason}; use bf16")
    multiply = _multiplier(recipe, emulate)
    judged = check(model, rows, recipe, force=force)
    taken = set(judged.taken)
    for name, layer, _, _ in linears(model):
        if name in taken:
            layer.forward = _forward(layer, multiply)  # type: ignore[method-assign]
    return judged


def _multiplier(recipe: Recipe, emulate: bool) -> Any:
    """torchao's product of an input and a transposed weight, with its settings."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    except ImportError as error:
        raise UserError(f"precision.compute: float8 needs torchao ({error}); {remedy('torchao')}") from None
    from dataclasses import replace

    config = replace(Float8LinearConfig.from_recipe_name(_NAMES[recipe]), emulate=emulate)
    with torch.device("meta"):
        example: Any = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)), config=config)[0]

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), example.linear_mm_config, config)

    return multiply


def _forward(layer: nn.Linear, multiply: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        weight: Tensor = layer.weight
        bias: Tensor | None = layer.bias
        # A layer cut over tensor ranks: cut by rows its bias is, too; cut by columns its bias is its module's to add.
        if isinstance(weight, DTensor):
            weight = weight.to_local()
            bias = bias.to_local() if isinstance(bias, DTensor) else None
        # Gradients of weights sum over rows, of which the hardware wants a multiple of 16: rows of 0 add nothing.
        rows = math.prod(x.shape[:-1])
        flat = x.reshape(rows, x.shape[-1])
        padding = -rows % MULTIPLE
        if padding:
            flat = nn.functional.pad(flat, (0, 0, 0, padding))
        y = multiply(flat, weight)[:rows].unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias.to(y.dtype)

    return forward
