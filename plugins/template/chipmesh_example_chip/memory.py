"""Memory: the SDK's bookkeeping and pool over the host's memory, as torch tensors.

REPLACE: for memory of your own derive from plugins.sdk.memory.PooledMemory and bring, besides the methods
below, `stats` (your driver's figures) and `_bytes_of` (or `copy`, where the host cannot see your memory).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plugins.sdk.host import HostMemory
from plugins.sdk.host_limits import read_memory_limit
from plugins.sdk.tensors import HostTensor


class ExampleMemory(HostMemory):
    """The host's memory. `relayout_weight` is inherited: weights stay as they are."""

    # REPLACE: override relayout_weight where your matrix product wants another layout; see plugins/cpu.

    def upload(self, value: HostTensor, device: int) -> Any:
        """A torch tensor on the device.

        REPLACE: move it to `torch.device("yours", device)`.
        """
        return _as_torch(super().upload(value, device), value.dtype)

    def download(self, tensor: Any) -> HostTensor:
        """The elements on the host; stays as it is, for `cpu()` waits for your chip."""
        held: Tensor = tensor.detach().cpu().contiguous()
        # numpy has no bfloat16: it travels as its bits.
        bits = held.view(torch.uint16) if held.dtype == torch.bfloat16 else held
        # numpy may make a row of one out of a scalar.
        return replace(super().download(bits.numpy()), shape=tuple(held.shape))

    def _reserve(self, nbytes: int, device: int | None) -> Any:
        """REPLACE: your malloc where `device` is a number; None stays host memory. It has to be zeroed."""
        self._check_device(device or 0)
        free = read_memory_limit().free_bytes
        # The host would promise more than it has and end the process later.
        if nbytes > free:
            raise MemoryError(f"{free} bytes are free")
        return np.zeros(nbytes, dtype=np.uint8)

    def _view(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """REPLACE: a tensor over your memory; no copy, or operators and `copy` would see different bytes."""
        return _as_torch(super()._view(memory, shape, dtype), dtype)


def _as_torch(array: Any, dtype: str) -> Tensor:
    """The same memory as a torch tensor; bfloat16 comes as its bits."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
