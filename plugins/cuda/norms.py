"""Root-mean-square norms: by torch, or by this plugin's Triton kernels, which read each row once."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from plugins.cuda.launch import block_of, on_device_of

_MOST_COLUMNS = 16384
"""A program holds a whole row in registers: 32 float32 for each of 512 threads."""
_COLUMNS_OF_WARP = 512
_MOST_WARPS = 16


class Norms(Protocol):
    """Shapes and meaning as the operators of the same names on OperatorSet."""

    name: ClassVar[str]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [t, k], weight [k] -> [t, k]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum)."""
        ...


class TorchNorms:
    """torch's own."""

    name: ClassVar[str] = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One kernel, where this torch has it fused."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """A sum, then the norm."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total


class TritonNorms:
    """One launch for each. Rows of more than 16384 columns go to torch.

    kernels: plugins.cuda.triton_kernels, or what stands in for it.
    """

    name: ClassVar[str] = "triton"

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._torch = TorchNorms()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """One program for each row."""
        width = x.shape[-1]
        if width > _MOST_COLUMNS:
            return self._torch.rms_norm(x, weight, eps)
        rows = _by_rows(x)
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with on_device_of(x):
            self._kernels.rms_norm_row[(rows.shape[0],)](
                rows, weight.contiguous(), output, eps, width, rows.stride(0), **_launch(width)
            )
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """One program for each row."""
        width = x.shape[-1]
        if width > _MOST_COLUMNS:
            return self._torch.add_rms_norm(x, residual, weight, eps)
        left, right = _by_rows(x), _by_rows(residual)
        output, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        with on_device_of(x):
            self._kernels.add_rms_norm_row[(left.shape[0],)](
                left,
                right,
                weight.contiguous(),
                output,
                total,
                eps,
                width,
                left.stride(0),
                right.stride(0),
                **_launch(width),
            )
        return output, total


def _by_rows(x: Tensor) -> Tensor:
    """[rows, columns] with columns side by side; rows may have gaps between them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(width: int) -> dict[str, int]:
    """Block of columns, a power of 2, and the warps that share it."""
    block = block_of(width)
    return {"block": block, "num_warps": min(max(block // _COLUMNS_OF_WARP, 1), _MOST_WARPS)}
