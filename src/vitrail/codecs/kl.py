"""AutoencoderKL of diffusers (the one of Stable Diffusion and its kin), 2-D.

- config.json and diffusion_pytorch_model.safetensors, from a folder or the hub; pickles (.bin) are never read
- latents are the mean of the posterior, (mean - shift_factor) * scaling_factor as its config says; nothing is drawn
- computed in fp32, which these networks need
"""

import contextlib
import logging
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.codecs import (
    Codec,
    Range,
    check_origin,
    check_range,
    find_files,
    fingerprint_of,
    from_unit,
    range_of,
    to_unit,
)
from vitrail.errors import UserError
from vitrail.foreign import read_json
from vitrail.recipe import config
from vitrail.recipe.kinds import remedy

FILES = ("config.json", "diffusion_pytorch_model.safetensors")


@config
class KLConfig:
    kind: Literal["kl"] = "kl"
    path: str | None = None  # folder with config.json and diffusion_pytorch_model.safetensors
    hub: str | None = None  # or a repository of the hub, such as stabilityai/sd-vae-ft-mse
    subfolder: str | None = None  # in either of them, such as vae
    revision: str | None = None  # of the repository
    range: tuple[float, float] | None = None  # values that become -1 and 1; null: 0 to 255, for bytes

    def __post_init__(self) -> None:
        check_origin(self.path, self.hub)
        check_range(self.range)

    def open(self, device: torch.device, *, key: str = "codec", value_range: Range | None = None, **_: Any) -> "KL":
        names = [f"{self.subfolder}/{name}" if self.subfolder else name for name in FILES]
        facts, weights = find_files(names, path=self.path, hub=self.hub, revision=self.revision, key=key)
        try:
            settings = read_json(facts)
        except ValueError as error:
            raise UserError(f"{key}: {facts} is no JSON ({error}); restore it") from error
        found = settings.get("_class_name") if isinstance(settings, dict) else None
        if found != "AutoencoderKL":
            raise UserError(f"{key}: {facts} describes {found!r}, not an AutoencoderKL; give another folder")
        network = load(str(facts.parent), key).to(device).requires_grad_(False)
        origin = self.hub or str(self.path)
        return KL(network, range_of(self.range, value_range), origin, weights.read_bytes())


def load(folder: str, key: str) -> Any:
    """Load the network of a folder, whole: a weight that is missing is an error, never a random number."""
    try:
        with quiet():
            from diffusers import AutoencoderKL
    except ImportError as error:
        said = f"{key}.kind: 'kl' needs diffusers, which cannot be imported ({error}); {remedy('diffusers')}"
        raise UserError(said) from error
    try:
        with quiet():
            network, found = AutoencoderKL.from_pretrained(
                folder,
                use_safetensors=True,
                local_files_only=True,
                low_cpu_mem_usage=False,
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # whatever its configuration makes diffusers stumble over
        raise UserError(
            f"{key}: the AutoencoderKL in {folder} cannot be loaded ({error}); restore its files"
        ) from error
    wrong = [name for what in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in found.get(what) or ()]
    if wrong:
        raise UserError(
            f"{key}: weights and config.json of {folder} do not fit ({wrong[0]} and {len(wrong) - 1} others); "
            "restore its files"
        )
    return network.eval()


class KL(Codec):
    kind, ndim = "kl", 2
    value_range: Range

    def __init__(self, network: Any, value_range: Range, origin: str, weights: bytes):
        c = network.config
        self.network, self.value_range, self.origin = network, value_range, origin
        self.factor = (2 ** (len(c.block_out_channels) - 1),) * 2
        self.channels, self.data_channels = c.latent_channels, c.in_channels
        self.scale = float(c.scaling_factor or 1.0)
        self.shift = float(getattr(c, "shift_factor", None) or 0.0)
        # Both are in config.json alone, and decide what latents are as the weights do.
        self.fingerprint = fingerprint_of([weights, repr((self.scale, self.shift)).encode()])

    @torch.no_grad()
    def encode(self, values: Tensor) -> Tensor:
        images = to_unit(values, self.value_range)
        return (self.network.encode(images).latent_dist.mode() - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        images = self.network.decode(latents.float() / self.scale + self.shift).sample
        return from_unit(images, self.value_range)


@contextlib.contextmanager
def quiet() -> Any:
    """Silence what diffusers says about libraries that are not needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
