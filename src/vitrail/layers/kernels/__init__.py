"""Faster ways than the torch code: Triton kernels, loaded when they are first used."""

import importlib
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_MOST = 2**31 - 2**16  # the kernels of this folder count places in 32 bits


def adaptive_kernels(name: str, *tensors: Tensor) -> Any | None:
    """Return the kernels of adaptive patching by that name, where they can work on these tensors, and not compiled."""
    if torch.compiler.is_compiling():
        return None
    kernels = load_kernels(f"vitrail.layers.kernels.{name}", tensors[0].device, "adaptive patching")
    return kernels if all(tensor.numel() < _MOST for tensor in tensors) else None


def load_kernels(module: str, device: torch.device, what: str) -> Any | None:
    """Return a module of kernels; None where the torch code must do: on the CPU, or without Triton.

    Its probe(device) builds and runs the smallest one. `what` goes without kernels, says the warning. Whether PyTorch
    compiles is not asked here: that is true of all threads while one compiles, also of those that augment meanwhile.
    """
    return _load(module, device, what) if device.type == "cuda" else None


@lru_cache(maxsize=64)
def _load(module: str, device: torch.device, what: str) -> Any | None:
    try:
        kernels = importlib.import_module(module)
        return kernels if kernels.probe(device) else None
    except ModuleNotFoundError:  # no Triton
        return None
    except Exception as error:  # no C compiler, an old card: nothing is lost but time
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        warnings.warn(f"{what} goes without its GPU kernels, more slowly ({reason})", stacklevel=4)
        return None
