"""Joules that a GPU has used, where it counts them: the driver's own counter, asked without any other library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class Energy:
    """The counter of one device; None where it does not tell."""

    def __init__(self, device: torch.device):
        self._library: Any
        self._handle: Any
        self._library, self._handle = _open(device) if device.type == "cuda" else (None, None)

    def joules(self) -> float | None:
        """What it has used since some moment in the past, always the same one."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1000 if code == 0 else None


def _open(device: torch.device) -> tuple[Any, Any]:
    """NVIDIA's management library and its handle of a device, found by the one name that both sides know."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(handle)) == 0:
            return library, handle
    except (OSError, AttributeError):  # AMD, or no such library or function
        pass
    return None, None
