"""Stand-in for XCCL under torch.distributed's name for it, `nccl`: gloo with XCCL's dtypes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from plugins.kunlun_emulator.limits import require

DTYPES = (
    torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16,
)  # fmt: skip


def new_process_group(
    *, backend: str, store: Any, rank: int, world_size: int, name: str, timeout: timedelta
) -> XcclGroup:
    """A group of all ranks that meet at `store`.

    Raises:
        RuntimeError: the ranks cannot connect. XpuError: a backend of another name (`xccl` is Intel's).
    """
    require(backend == "nccl", f"process group backend {backend!r}: this chip's is nccl")
    own = distributed.PrefixStore(f"xccl/{name}", store)  # type: ignore[attr-defined]
    return XcclGroup(distributed.ProcessGroupGloo(own, rank, world_size, timeout))


class XcclGroup:
    """The calls of torch's ProcessGroup that the plugin makes. No gather; int8 is not a type."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """The sum, in place."""
        _check(*tensors)
        return self._gloo.allreduce(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        """One list of each rank's input."""
        _check(*inputs, *outputs[0])
        return self._gloo.allgather(outputs, inputs)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """The root's tensor, in place."""
        _check(tensor)
        return self._gloo.broadcast(tensor, root)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        require(tensor.dtype in DTYPES, f"XCCL: {tensor.dtype} is none of its types; int8 travels as uint8")
        require(tensor.is_contiguous(), "XCCL: tensors have to be contiguous")
