"""What the chip refuses, as errors: dtypes, contiguity, lengths on both sides, heads and blocks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (16, 64, 128)


class XpuError(RuntimeError):
    """What the vendor's runtime raises: a kernel refused its arguments."""


def require(condition: bool, message: str) -> None:
    """Raise XpuError with `message` unless `condition` holds."""
    if not condition:
        raise XpuError(message)


def check_float(operator: str, **tensors: Tensor) -> torch.dtype:
    """The one dtype of all `tensors`, which are contiguous float32, float16 or bfloat16."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    for name, tensor in tensors.items():
        fp8 = "float8" in str(tensor.dtype)
        require(not fp8, f"{operator}: {name} is {tensor.dtype}; the chip has no fp8")
        require(tensor.dtype != torch.float64, f"{operator}: {name} is torch.float64; fp64 is off")
        require(tensor.dtype in FLOATS, f"{operator}: {name} is {tensor.dtype}; it takes fp32, fp16 and bf16")
        require(tensor.is_contiguous(), f"{operator}: {name} is not contiguous")
    require(len(dtypes) == 1, f"{operator}: dtypes differ: {sorted(map(str, dtypes))}")
    return dtypes.pop()


def check_int32(operator: str, **tensors: Tensor) -> None:
    """All `tensors` are contiguous int32."""
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.int32, f"{operator}: {name} is {tensor.dtype}; it takes int32")
        require(tensor.is_contiguous(), f"{operator}: {name} is not contiguous")


def check_float32(operator: str, **tensors: Tensor) -> None:
    """All `tensors` are contiguous float32."""
    for name, tensor in tensors.items():
        require(tensor.dtype == torch.float32, f"{operator}: {name} is {tensor.dtype}; it takes fp32")
        require(tensor.is_contiguous(), f"{operator}: {name} is not contiguous")


def check_shape(operator: str, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """All `tensors` have this shape."""
    for name, tensor in tensors.items():
        require(
            tuple(tensor.shape) == shape, f"{operator}: {name} is {list(tensor.shape)}; it is {list(shape)}"
        )


def check_both_sides(operator: str, name: str, host: Tensor | None, device: Tensor | None) -> Tensor:
    """Lengths come twice, int32, in memory of the host and of the device: returns them."""
    if host is None or device is None:
        raise XpuError(f"{operator}: {name} is wanted on the host and on the device")
    check_int32(operator, **{f"{name}_cpu": host, f"{name}_xpu": device})
    require(
        host.data_ptr() != device.data_ptr(),
        f"{operator}: {name}_xpu lies in the host's memory, as {name}_cpu does",
    )
    require(torch.equal(host, device), f"{operator}: {name} differs between host and device")
    return host


def check_lod(operator: str, name: str, host: Tensor | None, device: Tensor | None) -> list[int]:
    """Cumulative lengths, from 0, on both sides: returns them."""
    lod: list[int] = check_both_sides(operator, name, host, device).tolist()
    rises = all(first <= second for first, second in pairwise(lod))
    require(len(lod) >= 2 and lod[0] == 0 and rises, f"{operator}: {name} {lod} is not cumulative from 0")
    return lod


def check_cache(operator: str, key_cache: Tensor, value_cache: Tensor) -> None:
    """Two caches [blocks, kv heads, block, head size] of one form."""
    check_float(operator, key_cache=key_cache, value_cache=value_cache)
    require(
        key_cache.dim() == 4 and key_cache.shape == value_cache.shape,
        f"{operator}: caches are {list(key_cache.shape)} and {list(value_cache.shape)}; "
        "they are [blocks, kv heads, block, head size]",
    )
    check_head_dim(operator, key_cache.shape[3])
    block = key_cache.shape[2]
    require(block in BLOCK_SIZES, f"{operator}: block size is {block}; it takes {BLOCK_SIZES}")


def check_head_dim(operator: str, head_dim: int) -> None:
    """One of the sizes that kernels exist for."""
    require(head_dim in HEAD_DIMS, f"{operator}: head_dim is {head_dim}; it takes {HEAD_DIMS}")


def check_heads(operator: str, heads: int, kv_heads: int) -> None:
    """Query heads share key/value heads evenly."""
    require(
        kv_heads > 0 and heads % kv_heads == 0, f"{operator}: {heads} heads do not share {kv_heads} kv heads"
    )
