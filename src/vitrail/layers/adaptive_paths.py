"""Where to find faster ways: the Triton kernels of adaptive patching, for tensors that they can work on."""

import importlib
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def adaptive_kernels(*tensors: Tensor) -> Any | None:
    """The kernels' module, or None where the torch code must do: on the CPU, without Triton, while compiling."""
    first = tensors[0]
    if first.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    module = _load(first.device)
    return module if module is not None and module.fits(*tensors) else None


@lru_cache(maxsize=64)
def _load(device: torch.device) -> Any | None:
    try:
        module = importlib.import_module("vitrail.layers.adaptive_kernels")
        return module if module.probe(device) else None
    except ModuleNotFoundError:  # no Triton
        return None
    except Exception as error:  # no C compiler, an old card: nothing is lost but time
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        warnings.warn(f"adaptive patching goes without its GPU kernels, more slowly ({reason})", stacklevel=3)
        return None
