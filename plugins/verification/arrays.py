"""Host tensors from numpy and back, in the dtypes that chips compute in (numpy has no bfloat16)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.sdk.tensors import HostTensor

FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")


def encode(values: NDArray[Any], dtype: str) -> HostTensor:
    """`values` as a tensor of a float dtype; bfloat16 is cut, not rounded, so equal inputs stay equal."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        return HostTensor(dtype, values.shape, (bits >> 16).astype(np.uint16).tobytes())
    return HostTensor(dtype, values.shape, np.ascontiguousarray(values, dtype=dtype).tobytes())


def decode(value: HostTensor) -> NDArray[np.float64]:
    """The elements of a tensor of a float dtype, exactly."""
    if value.dtype == "bfloat16":
        bits = np.frombuffer(value.data, dtype=np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64).reshape(value.shape)
    return np.frombuffer(value.data, dtype=value.dtype).astype(np.float64).reshape(value.shape)
