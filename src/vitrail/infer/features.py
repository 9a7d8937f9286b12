"""What a trained network sees in images: pooled features, and the class that it names.

- a run of vitrail: of a `vit` the tokens as it pools them, before its head; of a `mae` the mean of its encoder's tokens
- values are normalised by that run's own statistics; sizes and channels must fit, nothing is resized
- Inception, as FID has it, where torch-fidelity is installed and its weights lie in PyTorch's folder of weights:
  nothing is ever downloaded
Networks compute in float32, on one device.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitrail.data.batch import Statistics
from vitrail.data.entries import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.models.mae import MAE
from vitrail.models.model import Model
from vitrail.models.vit import ViT
from vitrail.objectives.objective import normalise
from vitrail.recipe.kinds import remedy

INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # as torch-fidelity and torchmetrics name it


class Seen(NamedTuple):
    features: Tensor  # [B, D] float32
    classes: Tensor | None  # [B], the likeliest; None where the network names none


class Network(Protocol):
    title: str
    frechet: str  # what the Fréchet distance of its features is called
    names: tuple[str, ...]  # of the classes that it tells apart; empty where it does not

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        """Refuse samples [channels, *shape] that it cannot look at."""

    def __call__(self, values: Tensor) -> Seen:
        """Look at values [B, C, *S] in the data's units."""
        ...


class RunNetwork:
    """The network of a run, its averaged weights where it has them."""

    frechet = "frechet"

    def __init__(self, run: str | Path, *, device: torch.device | None = None):
        from vitrail.training.run import find_checkpoint, load, stored_recipe

        path, manifest = find_checkpoint(run, None)
        recipe = stored_recipe(manifest)
        self.run, self.device = run, device or torch.device("cpu")
        model = load(run, checkpoint=int(path.name[5:]))
        if not isinstance(model, ViT | MAE):
            raise UserError(
                f"{run}: features are those of a trained vit or mae, not of {recipe.model.kind!r}; give such a run, "
                "such as one of configs/digits/vit.yaml"
            )
        self.statistics: Statistics = stored_statistics(manifest["statistics"])
        if len(self.statistics.mean) != model.config.channels:
            raise UserError(f"{run}: its entries have variables of their own, so samples cannot be told apart by it")
        self.model: Model = model.to(self.device)
        self.head: nn.Module | None = None
        if isinstance(model, ViT) and model.config.classes:
            head, model.head = model.head, nn.Identity()
            if model.config.pool != "tokens":  # those have a class each, and an image none
                self.head = head
        self.names: tuple[str, ...] = tuple(getattr(recipe.objective, "names", None) or ()) if self.head else ()
        if self.head is not None and not self.names:
            self.names = tuple(f"class {number}" for number in range(model.config.classes))
        self.title = f"{recipe.model.kind} of {run}, step {manifest['step']}"

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        c = self.model.config
        expected = None if c.shape is None else per_axis(c.shape, c.ndim)
        if (expected is not None and shape != expected) or len(shape) != c.ndim:
            wanted = "x".join(map(str, expected or ["?"] * c.ndim))
            raise UserError(
                f"{what} is {'x'.join(map(str, shape))}, but {self.run} was trained on {wanted}; nothing is resized, "
                "since that changes what is compared: train it on data.crop of that size, or leave it out"
            )
        if channels != c.channels:
            raise UserError(
                f"{what} has {channels} channels, but {self.run} was trained on {c.channels}; give a run that was "
                "trained on the same variables"
            )

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Seen:
        values = values.to(self.device)
        images = normalise(values, self.statistics)
        if isinstance(self.model, MAE):
            return Seen(encode(self.model, images), None)
        features = self.model(**self.model.inputs(images)).float()
        if features.ndim == 3:  # not pooled
            features = features.mean(dim=1)
        return Seen(features, None if self.head is None else self.head(features).argmax(dim=1))


def encode(model: MAE, images: Tensor) -> Tensor:
    """The mean of the encoder's last tokens [B, D], all of them visible."""
    inputs = Model.inputs(model, images)
    x, encoder = inputs.pop("x"), model.encoder
    side = encoder.derive(inputs)
    for stage in encoder.stages():
        x = stage.run(x, side)
    tokens, valid = x[:, encoder.prefix :], side.get("valid")
    if valid is None:
        return tokens.mean(dim=1)
    return torch.where(valid.unsqueeze(-1), tokens, 0).sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp(min=1)


class Inception:
    """The network of FID, as torch-fidelity has it, with weights that are already here."""

    title, frechet = "Inception", "fid"
    names: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.to(device).eval(), device

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        if len(shape) != 2 or channels not in (1, 3):
            raise UserError(f"{what} is no grey or colour image, which Inception looks at")

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Seen:
        if values.shape[1] == 1:
            values = values.expand(-1, 3, -1, -1)
        if values.dtype != torch.uint8:  # images of 8 bits that a recipe makes smaller; samples are rounded, too
            values = values.round().clamp(0, 255).to(torch.uint8)
        return Seen(self.model(values.to(self.device))[0].float(), None)


def find_inception(dtypes: Iterable[Any], device: torch.device) -> tuple[Inception | None, str]:
    """Inception for samples and real data of some types, or None and why not."""
    others = sorted({str(dtype) for dtype in dtypes} - {"uint8"})
    if others:
        return None, f"FID is of images of 8 bits, and these are {', '.join(others)}"
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ModuleNotFoundError as error:
        return None, f"FID needs {error.name}, which is not installed; {remedy(error.name or 'torch_fidelity')}"
    except Exception as error:  # torchvision, which it imports, may not fit this PyTorch
        return None, f"FID needs torch-fidelity, which cannot be imported here ({' '.join(str(error).split())})"
    weights = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION
    if not weights.is_file():
        return (
            None,
            f"FID needs the weights of Inception, which are never downloaded; put {INCEPTION} into {weights.parent}",
        )
    try:
        # It would unpickle the file, which may run code; so it gets a copy that was read as tensors and nothing else.
        copy = io.BytesIO()
        torch.save(torch.load(weights, map_location="cpu", weights_only=True), copy)
        copy.seek(0)
        model = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=copy)
    except Exception as error:
        return None, f"FID: {weights} cannot be used ({' '.join(str(error).split())}); restore the file"
    return Inception(model, device), ""
