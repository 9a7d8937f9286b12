"""A trained model as a program of raw values: torch.export and ONNX, with a dynamic number of samples.

- in: values as they are read, float32 [B, C, *S] of the size that the model saw; they are changed, clipped and
  normalised inside
- out: logits of a segmentation or a classifier, else the encoder's last tokens on the grid of patches
"""

import copy
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitrail.data.batch import Statistics
from vitrail.errors import UserError
from vitrail.layers.attention import CrossAttention, SelfAttention
from vitrail.models.model import Model, encoder_of, known_variables, make_inputs
from vitrail.recipe.kinds import remedy
from vitrail.recipe.normalize import Logarithm, kind_of

KNOWN = ("vit", "study_vit", "mae", "unetr", "sap")


class Program(nn.Module):
    """forward(values [B, C, *S], as they are read) -> logits, or features [B, D, *grid]."""

    mean: Tensor
    std: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self, model: Model, objective: str, kinds: list[Any], mean: Tensor, std: Tensor, names: Sequence[str] = ()
    ):
        """`names` are the variables that the channels are, for a model that knows some by name."""
        super().__init__()
        self.model, self.objective, self.names = model, objective, tuple(names)
        wide = (1, -1, *[1] * model.config.ndim)
        infinite = (float("-inf"), float("inf"))
        ends = torch.tensor([kind.ends if kind.clips else infinite for kind in kinds]).view(-1, 2)
        scales = torch.tensor([kind.scale if isinstance(kind, Logarithm) else 0.0 for kind in kinds])
        self.has_logs, self.clips = bool(scales.any()), bool(ends.isfinite().any())
        low, high = ends.unbind(1)
        for name, numbers in (("mean", mean), ("std", std), ("scale", scales), ("low", low), ("high", high)):
            self.register_buffer(name, numbers.float().view(wide).clone())

    @property
    def gives(self) -> str:
        """Name the output."""
        return "logits" if self.objective in ("segment", "classify") else "features"

    def forward(self, values: Tensor) -> Tensor:
        images = values.float()
        if self.has_logs:
            is_log = self.scale > 0
            changed = torch.log1p(images.abs() / torch.where(is_log, self.scale, 1.0)) * images.sign()
            images = torch.where(is_log, changed, images)
        images = (images - self.mean) / self.std
        if self.clips:
            images = torch.minimum(torch.maximum(images, self.low), self.high)
        config = self.model.config
        inputs, tokens = make_inputs(config, images, variables=self.names or None)
        if self.gives == "features":
            return self._features(inputs, tokens)
        output = self.model(**inputs)
        return tokens.paint(output, merge=True) if config.output == "tokens" and self.objective == "segment" else output

    def _features(self, inputs: dict[str, Any], tokens: Any) -> Tensor:
        encoder: Any = self.model.encoder
        x = inputs.pop("x")
        side = encoder.derive(inputs)
        for stage in encoder.stages():
            x = stage.run(x, side)
        x = x[:, encoder.prefix :]
        grid = tuple(n // p for n, p in zip(tokens.size, tokens.patch, strict=True))
        return x.unflatten(1, (tokens.separate, *grid)).mean(dim=1).movedim(-1, 1)


def make(
    model: Model, recipe: Any, names: Sequence[str], statistics: Statistics, objective: str | None = None
) -> Program:
    """Return the program of a model; refused where it needs more than an image, or chooses its tokens by the image.

    `objective` is that of the recipe, or another word for the encoder's features.
    """
    config, encoder = model.config, encoder_of(model.config)
    if config.kind not in KNOWN:
        raise UserError(
            f"model.kind: {config.kind} takes more than an image, which a program of images cannot give it; programs "
            f"are made of {', '.join(KNOWN)}"
        )
    if encoder.tokens.kind != "uniform":
        key = "model.tokens" if encoder is config else "model.encoder.tokens"
        raise UserError(f"{key}: trees of {encoder.tokens.kind} tokens grow by each image, which no fixed program does")
    kinds = [kind_of(recipe.data.normalize, name) for name in names]
    known = names if known_variables(config) is not None else ()
    return Program(model.eval(), objective or recipe.objective.kind, kinds, *statistics.tensors(), known).eval()


def example(program: Program, batch: int, seed: int = 0) -> Tensor:
    """Draw values as the data have them."""
    config: Any = program.model.config
    shape = (batch, program.mean.shape[1], *config.extent)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn * program.std + program.mean


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Any = None) -> Tensor:
    """Softmax attention by the operator that every program knows.

    That of layers.attention chooses kernels by sizes, which a trace would take for constants.
    """
    assert mask is None
    shared = q.shape[2] // k.shape[2]
    k, v = (t if shared == 1 else t.repeat_interleave(shared, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B H N K
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def traceable(program: Program) -> Program:
    """Return a copy that can be traced."""
    made = copy.deepcopy(program)
    for module in made.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.attend = attend
    return made


@torch.no_grad()
def as_exported(program: Program) -> torch.export.ExportedProgram:
    """Trace a program, of any number of samples."""
    values = example(program, 2)
    program(values)  # tables of constants are kept from the first call on: they must hold numbers, not traces
    return torch.export.export(traceable(program), (values,), dynamic_shapes={"values": {0: torch.export.Dim.DYNAMIC}})


def as_onnx(program: Program) -> bytes:
    """Return a program as ONNX, whose input and output are called `values` and `output`."""
    require_onnx()
    values = example(program, 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(values)
        made = torch.onnx.export(
            traceable(program),
            (values,),
            dynamo=True,
            verbose=False,
            input_names=["values"],
            output_names=["output"],
            dynamic_shapes={"values": {0: torch.export.Dim("batch")}},
        )
    assert made is not None
    return made.model_proto.SerializeToString()


def require_onnx() -> None:
    """Refuse, with what to install, where a package for ONNX is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed; {remedy(name)}")
