"""Memory of the chip as torch tensors: the chip's own for devices, the host's beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plugins.kunlun.quantised import is_scale, to_maxima
from plugins.kunlun.runtime import Runtime
from plugins.sdk.memory import MemoryStats
from plugins.sdk.torch_devices import ask_device, check_device
from plugins.sdk.torch_memory import TorchMemory


class KunlunMemory(TorchMemory):
    """Blocks of bytes on a device, as the vendor's torch has them."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def stats(self, device: int) -> MemoryStats:
        """Totals are the device's, what is allocated is this process's."""
        check_device(device, self._runtime.cuda.device_count())
        free, total = ask_device(device, self._runtime.cuda.mem_get_info)
        return MemoryStats(
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=self._allocated[device],
            pooled_bytes=self._pooled(device),
            peak_allocated_bytes=self._peak[device],
        )

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        """Contiguous; scales of int8 weights as the maxima that the kernels take."""
        if not isinstance(weight, Tensor):
            return weight
        return to_maxima(weight) if is_scale(operator, parameter) else weight.contiguous()

    def _place(self, device: int) -> torch.device:
        check_device(device, self._runtime.cuda.device_count())
        return self._runtime.torch_device(device)

    def _synchronize(self, device: int) -> None:
        self._runtime.synchronize(device)

    def _reserve_device(self, nbytes: int, device: int) -> Tensor:
        return self._runtime.zeros(nbytes, device)
