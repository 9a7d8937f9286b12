"""The choice of attention's kernel: what is there, what can take a call, what is fastest, what the user asked for.

- a backend has a name; `use_backend` sets one for the whole process, "auto" (the default) picks by the call
- auto goes down an order that was measured, and takes the first backend that is installed and can take the call
- a backend asked for by name is used or refused with a sentence, never silently replaced
- nothing here touches tensors: a call is described by numbers, so that the choice can be tested without a GPU

| name | what it is |
|---|---|
| cudnn, flash, efficient, math | kernels of PyTorch's scaled_dot_product_attention; math makes the whole matrix |
| ck | on AMD: its flash kernel from Composable Kernel instead of AOTriton |
| flex | FlexAttention: compiled, skips blocks of masked keys |
| varlen | PyTorch's flash kernel over packed keys |
| flash4 | the FlashAttention-4 package |
| xformers | memory-efficient attention of xFormers (Composable Kernel on AMD) |
| reference | plain steps in PyTorch, for checking; makes the whole matrix |
"""

import importlib
import importlib.util
from collections.abc import Collection
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from vitrail.errors import UserError
from vitrail.layers.private import constant_when_compiled
from vitrail.recipe.kinds import nearest, remedy

NAMES = (
    "auto", "cudnn", "flash", "efficient", "math", "ck", "flex", "varlen", "flash4", "xformers", "reference",
)  # fmt: skip
HALF = (torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """One call of attention, by the numbers that the choice depends on."""

    device: str  # cpu, cuda (NVIDIA) or rocm (AMD)
    capability: tuple[int, int]  # of an NVIDIA GPU, (0, 0) elsewhere
    dtype: torch.dtype
    batch: int
    heads: int
    groups: int  # key-value heads; fewer than heads: grouped
    queries: int
    keys: int
    width: int  # of a head
    masked: bool
    needs_grad: bool
    partial: bool = False  # over some of the keys, to be merged with the others by their log-sum-exp: ring attention


class Machine(NamedTuple):
    """A device and the backends that are installed for it."""

    device: str
    capability: tuple[int, int]
    backends: tuple[str, ...]


# ---------------------------------------------------------------- what is fastest


class Row(NamedTuple):
    keys: int  # for calls with at least so many keys
    order: tuple[str, ...]


# Half precision without a mask on Hopper: one H200, PyTorch 2.11, cuDNN 9.19, flash-attn-4 4.0.0b36, 2026-11-15,
# forward and backward together (benchmarks/attention.md). FlashAttention-4 is 12 to 82 % faster than cuDNN at 4,096
# tokens and more (4 to 128 heads of width 16 to 128); cuDNN is up to 16 % faster at 2,048 and fewer, with one tie
# (1,024 tokens). Plain flash loses everywhere.
HOPPER = (
    Row(4096, ("flash4", "cudnn", "flash", "efficient", "math")),
    Row(0, ("cudnn", "flash4", "flash", "efficient", "math")),
)
# Not measured: PyTorch's own order, which has cuDNN first on Blackwell and flash first on older GPUs.
BLACKWELL = ("cudnn", "flash4", "flash", "efficient", "math")
OLDER = ("flash", "cudnn", "efficient", "math")
# Masked, on the same H200 (2026-11-15): varlen is 10 % faster than flex at 4,096 tokens and 42 % at 1,024, three times
# as fast as efficient, which computes all keys and adds the mask to every score. AMD is not measured.
MASKED = ("varlen", "flex", "efficient", "math")
MASKED_ROCM = ("flex", "efficient", "math")


def preferred(call: Call) -> tuple[str, ...]:
    """Backends in the order in which auto tries them."""
    if call.device == "cpu":
        return ("flash", "math")
    if call.dtype not in HALF:
        return ("efficient", "math")
    if call.device == "rocm":
        return MASKED_ROCM if call.masked else ("flash", "efficient", "math")
    if call.masked:
        return MASKED
    if call.capability[0] == 9:
        for row in HOPPER:
            if call.keys >= row.keys:
                return row.order
    return BLACKWELL if call.capability[0] >= 10 else OLDER


# ---------------------------------------------------------------- what can take a call

MULTIPLE = 8  # attend() pads heads to a multiple of this where a kernel wants it
_WIDEST = {"cudnn": 128, "flash": 256, "ck": 256, "flash4": 256, "varlen": 256}
# On Hopper, with 4.0.0b36, others fail to compile: 112, for one.
_FLASH4_WIDTHS = (16, 64, 72, 96, 128)
_HALF_ONLY = ("cudnn", "flash", "ck", "flash4", "varlen")
_NO_MASK = ("flash", "ck", "flash4", "xformers")
NO_RINGS = ("flex", "xformers")  # whose backward cannot be given the log-sum-exp over all keys


def _padded(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


def refusal(name: str, call: Call) -> str | None:
    """Why a backend cannot take a call, None if it can."""
    if call.partial and name in NO_RINGS:
        return "cannot attend to the keys part by part, as ring attention does"
    if name in ("math", "reference"):
        return None
    if call.device == "cpu":  # flash there takes every type, width and mask
        return "has no backward on the CPU" if name == "flex" and call.needs_grad else None
    if name in _HALF_ONLY and call.dtype not in HALF:
        return f"computes in bf16 and fp16, not in {_plain(call.dtype)}"
    if name in ("efficient", "xformers", "flex") and call.dtype not in (*HALF, torch.float32):
        return f"computes in bf16, fp16 and fp32, not in {_plain(call.dtype)}"
    if call.masked and name in _NO_MASK:
        return "takes no mask of keys"
    if not call.masked and name == "varlen":
        return "is for masked calls alone"
    widest = 128 if name == "flash4" and call.capability[0] >= 10 else _WIDEST.get(name)
    if widest is not None and call.width > widest:
        return f"takes heads up to {widest} wide, not {call.width}"
    if name == "flash4" and _padded(call.width) not in _FLASH4_WIDTHS:
        return f"is known to work with heads {', '.join(map(str, _FLASH4_WIDTHS))} wide, not {call.width}"
    if name == "cudnn":
        if call.masked and call.needs_grad:
            # Lengths of 64 modulo 128 give NaN: https://github.com/pytorch/pytorch/issues/196678
            return "has a wrong backward with a mask"
        largest = call.batch * call.heads * call.width * max(call.queries, call.keys)
        if largest >= 2**31:
            return f"takes fewer than 2^31 numbers in a tensor, not {largest}"
    return None


def choose(call: Call, available: Collection[str], wanted: str = "auto") -> tuple[str, ...]:
    """The backends for a call, best first; those after the first are for PyTorch to fall back to."""
    if wanted != "auto":
        reason = refusal(wanted, call)
        if wanted not in available:
            reason = missing(wanted, call.device, call.capability) or "is not available"
        if reason is not None:
            able = [name for name in NAMES if name in available and refusal(name, call) is None]
            raise UserError(
                f"attention: {wanted!r} {reason} (the call: {call.heads} heads of width {call.width}, {call.queries} "
                f"queries, {call.keys} keys{', masked' if call.masked else ''}, {_plain(call.dtype)}, {call.device}); "
                f"choose one of {', '.join(able)}"
            )
        return (wanted,)
    return tuple(name for name in preferred(call) if name in available and refusal(name, call) is None)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- what is there


def available_backends(device: str | torch.device) -> dict[str, str | None]:
    """Every backend by name: None if it can be used on this device of this machine, or why not and what to do."""
    kind, capability = _device(torch.device(device).type)
    return {name: missing(name, kind, capability) for name in NAMES}


@constant_when_compiled
def machine(device: str) -> Machine:
    """Return what this process has for a type of device ("cpu", "cuda"); a constant for compiled code."""
    kind, capability = _device(device)
    return Machine(kind, capability, tuple(name for name in NAMES if missing(name, kind, capability) is None))


def missing(name: str, device: str, capability: tuple[int, int]) -> str | None:
    """Why a backend is not available on a device, None if it is."""
    if name in ("auto", "math", "reference"):
        return None
    if device == "cpu":
        return None if name in ("flash", "flex") else "needs a GPU"
    if device not in ("cuda", "rocm"):
        return "needs an NVIDIA or AMD GPU"
    reason = _missing_on_amd(name) if device == "rocm" else _missing_on_nvidia(name, capability)
    if reason is not None:
        return reason
    module = _MODULES.get(name)
    if module is None:
        return None
    if not _installed(module):
        return f"needs {module}, which is not installed; {remedy(module)}"
    failure = _import_failure(module)
    if failure is not None:
        return f"needs {module}, which is installed but cannot be imported ({failure}); install it again"
    return None


_MODULES = {"flex": "triton", "xformers": "xformers.ops", "flash4": "flash_attn.cute"}


def _missing_on_nvidia(name: str, capability: tuple[int, int]) -> str | None:
    if name == "ck":
        return "is for AMD GPUs"
    least = {"cudnn": 8, "flash": 8, "varlen": 8, "flash4": 9}.get(name, 0)
    if capability[0] < least:
        return f"needs compute capability {least}.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


def _missing_on_amd(name: str) -> str | None:
    if name in ("cudnn", "flash4", "varlen"):
        return "is for NVIDIA GPUs; flash, ck and xformers are for AMD's"
    if name == "ck":
        built = getattr(torch.backends.cuda, "is_ck_sdpa_available", None)  # newer than PyTorch 2.11
        if built is not None and not built():
            return "needs a build of PyTorch with Composable Kernel; xformers has these kernels too"
    return None


def _device(device: str) -> tuple[str, tuple[int, int]]:
    if device != "cuda":
        return device, (0, 0)
    if torch.version.hip is not None:
        return "rocm", (0, 0)
    return device, torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@lru_cache
def _installed(module: str) -> bool:
    """Tell whether a module is there; of "a.b", b is looked for without importing a."""
    top, _, part = module.partition(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if found is None or not part:
        return found is not None
    places = [Path(folder) / part for folder in found.submodule_search_locations or ()]
    return any(place.exists() or place.with_suffix(".py").exists() for place in places)


@lru_cache
def _import_failure(module: str) -> str | None:
    """Why an installed module does not work here, None if it does: kernels are often built for another PyTorch."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None


# ---------------------------------------------------------------- what the user asked for

_chosen = "auto"


def chosen() -> str:
    """The backend of this process."""
    return _chosen


def use_backend(name: str, *, device: str | torch.device | None = None, key: str = "attention") -> ExitStack:
    """Set the backend of this process; in a with statement, until its end.

    With a device, a backend that is not available there is refused at once. `key` is what the error calls the setting.
    """
    global _chosen
    if name not in NAMES:
        near = nearest(name, list(NAMES))
        hint = f"did you mean {near!r}? " if near else ""
        raise UserError(f"{key}: {name!r} is not a known backend; {hint}(known: {', '.join(NAMES)})")
    if device is not None:
        found = available_backends(device)
        if found[name] is not None:
            usable = ", ".join(other for other, reason in found.items() if reason is None)
            raise UserError(f"{key}: {name!r} {found[name]} (available on {torch.device(device).type}: {usable})")
    put_back = ExitStack()
    put_back.callback(use_backend, _chosen)
    _chosen = name
    if torch.version.hip is not None:
        torch.backends.cuda.preferred_rocm_fa_library("ck" if name == "ck" else "default")
    return put_back
