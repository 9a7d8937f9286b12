"""A run of vitrail's own autoencoder (model.kind: autoencoder) as a codec, normalised as in its training."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.codecs import Codec, fingerprint_of
from vitrail.data.batch import Statistics
from vitrail.data.normalize import Values
from vitrail.errors import UserError
from vitrail.recipe import config
from vitrail.recipe.normalize import ByVariable
from vitrail.weights.runs import find_checkpoint, load, stored_recipe


@config
class AutoencoderCodecConfig:
    kind: Literal["autoencoder"] = "autoencoder"
    path: str  # the run's folder
    checkpoint: int | None = None  # its step; null: the newest good one
    weights: Literal["ema", "raw"] | None = None  # null: averaged where there are any

    def open(self, device: torch.device, *, key: str = "codec", **options: Any) -> "AutoencoderCodec":
        if not Path(self.path).is_dir():
            raise UserError(f"{key}.path: {self.path!r} is no folder; give the run of a trained autoencoder")
        _, manifest = find_checkpoint(self.path, self.checkpoint)
        recipe = stored_recipe(manifest)
        kind, normalize = recipe.model.kind, recipe.data.normalize
        if kind != "autoencoder":
            raise UserError(f"{key}.path: {self.path} is a run of model.kind {kind!r}, not of an 'autoencoder'")
        model = load(self.path, checkpoint=manifest["step"], weights=self.weights).to(device).requires_grad_(False)
        statistics = manifest["statistics"]
        if statistics.get("entries"):
            raise UserError(
                f"{key}.path: {self.path} was trained with statistics of each entry, and a codec has but one mean and "
                "std; train it with data.statistics: shared"
            )
        if isinstance(normalize, ByVariable):
            raise UserError(
                f"{key}.path: {self.path} was trained with a normalisation of each variable by its name, and a codec "
                "does not know names; train it with one kind of data.normalize for all"
            )
        return AutoencoderCodec(model, statistics, f"{self.path} at step {manifest['step']}", device, normalize)


class AutoencoderCodec(Codec):
    kind = "autoencoder"

    def __init__(
        self, model: Any, statistics: dict[str, Any], origin: str, device: torch.device, normalize: Any = "fit"
    ):
        c = model.config
        self.model, self.origin = model, origin
        self.ndim, self.factor, self.channels, self.data_channels = c.ndim, c.factors, c.latent, c.channels
        tables = [torch.tensor(statistics[name], dtype=torch.float32) for name in ("mean", "std")]
        self.mean, self.std = (table.to(device)[:, *[None] * c.ndim] for table in tables)
        names = [f"channel {number}" for number in range(c.channels)]
        self.values = Values(normalize, names, Statistics(statistics["mean"], statistics["std"]))
        self.fingerprint = fingerprint_of([*model.parameters(), *tables])

    @torch.no_grad()
    def encode(self, values: Tensor) -> Tensor:
        return self.model.encode((self.values.change(values).float() - self.mean) / self.std).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return self.values.restore(self.model.decode(latents.float()).float() * self.std + self.mean)
