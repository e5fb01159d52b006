"""Host memory as torch tensors, and weights packed for oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plugins.sdk.torch_memory import TorchHostMemory


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [out, in] in oneDNN's blocked layout."""

    packed: Tensor
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the values; blocks may pad a little beyond."""
        return self.shape[0] * self.shape[1] * self.packed.element_size()


class CpuMemory(TorchHostMemory):
    """The host's memory: buffers of devices and of the host are the same kind."""

    def relayout_weight(self, weight: Any, *, operator: str, parameter: str = "weight") -> Any:
        """Matrices of `linear` in oneDNN's blocks; everything else as it is."""
        if operator != "linear" or not isinstance(weight, Tensor) or not can_pack(weight.dtype):
            return weight
        # The layout depends on the batch; None lets oneDNN choose one that serves all.
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        return PackedWeight(packed, (weight.shape[0], weight.shape[1]))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype here."""
    if not onednn_is_available():
        return False
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_is_available() -> bool:
    """Whether this torch has oneDNN and its packed product."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
