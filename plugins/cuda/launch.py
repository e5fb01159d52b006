"""Where a Triton kernel is launched, and in blocks of which size."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_LEAST_BLOCK = 16
"""Matrix products on tensor cores have at least 16 rows and columns."""


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever its tensors lie; within this it is the tensor's. A
    tensor of the host changes nothing.
    """
    device_of: Any = torch.cuda.device_of
    selected: AbstractContextManager[object] = device_of(tensor)
    return selected


def block_of(size: int) -> int:
    """The least power of 2 that holds `size`: what Triton's ranges are made of."""
    return max(_LEAST_BLOCK, 1 << (size - 1).bit_length())
