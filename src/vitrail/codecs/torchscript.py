"""An encoder and a decoder as TorchScript, such as NVIDIA's Cosmos tokenizers (CI8x8: 16 channels, 8 x 8 pixels).

- encoder.jit and decoder.jit in a folder or on the hub, or two files of any name
- TorchScript runs code that comes with the file, so it is opened with `--trust` alone, each time anew
- images are -1 to 1; of a tuple that the encoder gives, the first is taken
- channels and factor are found out by encoding an empty image, and so is the type that frozen modules compute in,
  which have no parameters that tell
"""

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitrail.codecs import Codec, Range, check_range, find_files, fingerprint_of, from_unit, range_of, to_unit
from vitrail.errors import UserError
from vitrail.recipe import config

PROBE = 64  # voxels along each side of the empty image
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@config
class TorchScriptConfig:
    kind: Literal["torchscript"] = "torchscript"
    path: str | None = None  # folder of both files
    hub: str | None = None  # or a repository of the hub, such as nvidia/Cosmos-Tokenizer-CI8x8
    revision: str | None = None  # of the repository
    encoder: str = "encoder.jit"  # in it; without path and hub, a file
    decoder: str = "decoder.jit"
    ndim: int = 2
    data_channels: int = 3
    range: tuple[float, float] | None = None  # values that become -1 and 1; null: 0 to 255, for bytes

    def __post_init__(self) -> None:
        if self.path is not None and self.hub is not None:
            raise ValueError("give one of path (a folder) and hub (a repository's name, such as owner/name)")
        if self.ndim not in (2, 3) or self.data_channels < 1:
            raise ValueError(f"ndim {self.ndim} must be 2 or 3, and data_channels {self.data_channels} at least 1")
        check_range(self.range)

    def open(
        self, device: torch.device, *, trust: bool = False, key: str = "codec", value_range: Range | None = None
    ) -> "TorchScript":
        origin = self.hub or self.path or self.encoder
        if not trust:
            raise UserError(
                f"{key}.kind: 'torchscript' runs code that comes with the files of {origin}; if you trust these, say "
                "so with --trust"
            )
        places = [self._find(name, key) for name in (self.encoder, self.decoder)]
        encoder, decoder = (load(place, device, key) for place in places)
        fingerprint = fingerprint_of(place.read_bytes() for place in places)
        return TorchScript(self, encoder, decoder, range_of(self.range, value_range), origin, fingerprint, device, key)

    def _find(self, name: str, key: str) -> Path:
        if self.path is not None or self.hub is not None:
            return find_files([name], path=self.path, hub=self.hub, revision=self.revision, key=key)[0]
        if not Path(name).is_file():
            raise UserError(f"{key}: {name!r} is no file; give {key}.path, {key}.hub, or the files themselves")
        return Path(name)


def load(place: Path, device: torch.device, key: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own wish to be rid of TorchScript
            return torch.jit.load(str(place), map_location=device).eval()
    except (RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{key}: {place} cannot be opened as TorchScript ({said}); restore it") from error


class TorchScript(Codec):
    kind = "torchscript"
    value_range: Range

    def __init__(
        self,
        c: TorchScriptConfig,
        encoder: Any,
        decoder: Any,
        value_range: Range,
        origin: str,
        fingerprint: str,
        device: torch.device,
        key: str,
    ):
        self.encoder, self.decoder, self.value_range = encoder, decoder, value_range
        self.origin, self.fingerprint = origin, fingerprint
        self.ndim, self.data_channels, self.factor = c.ndim, c.data_channels, ()
        probe = torch.zeros(1, c.data_channels, *[PROBE] * c.ndim, device=device)
        try:
            latents, again = self.try_types(probe)
        except Exception as error:  # of code that is not ours
            said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise UserError(
                f"{key}: {origin} does not encode and decode an image of {list(probe.shape[1:])} ({said}); check "
                "data_channels and ndim, and that encoder and decoder belong together"
            ) from error
        sizes = latents.shape[2:]
        if latents.ndim != c.ndim + 2 or again.shape != probe.shape or any(s < 1 or PROBE % s for s in sizes):
            raise UserError(
                f"{key}: {origin} encodes {list(probe.shape)} to {list(latents.shape)} and decodes that to "
                f"{list(again.shape)}; expected whole factors along {c.ndim} axes, and the same shape again"
            )
        self.channels, self.factor = latents.shape[1], tuple(PROBE // s for s in sizes)

    def try_types(self, probe: Tensor) -> tuple[Tensor, Tensor]:
        """Encode and decode in the first type that the modules take; the error of the first where they take none."""
        first: Exception | None = None
        for dtype in TYPES:
            self.dtypes = _type(self.encoder, dtype), _type(self.decoder, dtype)
            try:
                latents = self.encode(probe)
                return latents, self.decode(latents)
            except Exception as error:  # of code that is not ours
                first = first or error
        assert first is not None
        raise first

    @torch.no_grad()
    def encode(self, values: Tensor) -> Tensor:
        found = self.encoder(to_unit(values, self.value_range).to(self.dtypes[0]))
        return (found[0] if isinstance(found, tuple | list) else found).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        found = self.decoder(latents.to(self.dtypes[1]))
        return from_unit(found[0] if isinstance(found, tuple | list) else found, self.value_range)


def _type(module: Any, otherwise: torch.dtype) -> torch.dtype:
    """Return the type of the weights: Cosmos has bfloat16."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), otherwise)
