"""Memory of GPUs as torch tensors, pinned memory on the host beside it, int8 weights padded for products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshkit.telemetry.logging import get_logger
from plugins.cuda.quantised import INT8_WEIGHTS, pad_int8_weight
from plugins.cuda.runtime import Runtime
from plugins.sdk.memory import MemoryStats
from plugins.sdk.torch_devices import check_device
from plugins.sdk.torch_memory import TorchMemory

log = get_logger(__name__)

_PINNED_FROM = 64 << 10
"""Bytes. Pinning takes longer than smaller copies gain; what is larger than the pool keeps (64 MiB) would be
pinned anew each time, and pinned pages are lost to the rest of the host.
"""


class CudaMemory(TorchMemory):
    """Blocks of bytes on a device, by torch's allocator."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self._pins = runtime.pins

    def stats(self, device: int) -> MemoryStats:
        """Totals are the device's; what is allocated is this process's, by this manager. What torch's own
        allocator keeps for reuse counts as pooled.
        """
        check_device(device, self._runtime.device_count)
        memory = self._runtime.read_memory(device)
        cuda = self._runtime.cuda
        kept = int(cuda.memory_reserved(device)) - int(cuda.memory_allocated(device))
        return MemoryStats(
            total_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes,
            allocated_bytes=self._allocated[device],
            pooled_bytes=self._pooled(device) + kept,
            peak_allocated_bytes=self._peak[device],
        )

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        """Matrices of int8 products padded to sizes that the tensor cores take; all else contiguous."""
        if not isinstance(weight, Tensor):
            return weight
        if (operator, parameter) in INT8_WEIGHTS:
            return pad_int8_weight(weight)
        return weight.contiguous()

    def _place(self, device: int) -> torch.device:
        check_device(device, self._runtime.device_count)
        return self._runtime.place(device)

    def _synchronize(self, device: int) -> None:
        self._runtime.synchronize(device)

    def _reserve_device(self, nbytes: int, device: int) -> Tensor:
        try:
            return super()._reserve_device(nbytes, device)
        except torch.OutOfMemoryError:
            # What torch keeps for reuse may be all that is missing; the caller tries once more.
            self._runtime.cuda.empty_cache()
            raise

    def _reserve_host(self, nbytes: int) -> Tensor:
        """Pinned where it pays: the device copies by itself then."""
        if self._pins and _PINNED_FROM <= nbytes <= self._POOLED_AT_MOST:
            try:
                return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                log.warning("host memory cannot be pinned: copies to devices are slower", error=str(error))
        return super()._reserve_host(nbytes)
