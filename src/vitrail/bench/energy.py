"""Joules that a GPU has used, where it counts them: the driver's own counter, asked without any other library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class Energy:
    """Joules of one device since the start; None where it does not tell."""

    def __init__(self, device: torch.device):
        self._library: Any
        self._handle: Any
        self._library, self._handle = _open(device) if device.type == "cuda" else (None, None)
        self._began = self._read()

    def restart(self) -> None:
        self._began = self._read()

    def joules(self) -> float | None:
        now = self._read()
        return None if now is None or self._began is None else now - self._began

    def _read(self) -> float | None:
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
