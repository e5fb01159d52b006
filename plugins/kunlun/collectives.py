"""Collectives over XCCL, which torch.distributed knows on this chip as `nccl`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor

from plugins.kunlun.runtime import COLLECTIVE_BACKEND, Runtime
from plugins.sdk.communication import Border
from plugins.sdk.process_group import ProcessGroupCollectives, close_process_group


class XcclCollectives(ProcessGroupCollectives):
    """Tensors of the runner's device. XCCL's `wait` orders streams only."""

    _wait_blocks: ClassVar[bool] = False

    def __init__(self, runtime: Runtime, *, border: Border | None = None) -> None:
        super().__init__(border=border)
        self._runtime = runtime

    @property
    def library(self) -> str:
        """XCCL comes with the runtime and tells no version of its own."""
        kind = "gloo in place of XCCL, emulated" if self._runtime.emulated else "XCCL"
        return f"{kind} (torch {torch.__version__}, backend {COLLECTIVE_BACKEND})"

    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        return self._runtime.new_process_group(
            backend=COLLECTIVE_BACKEND,
            store=store,
            rank=rank,
            world_size=world_size,
            name=name,
            timeout=timeout,
        )

    def _close_group(self, process_group: Any) -> None:
        if not self._runtime.emulated:
            close_process_group(process_group)

    def _device(self) -> torch.device:
        return self._runtime.torch_device(self._runtime.device)

    def _synchronize(self) -> None:
        self._runtime.synchronize()

    def _carried(self, tensor: Tensor) -> Tensor:
        """int8 travels as uint8, whose sums wrap to the same bits."""
        return super()._carried(tensor.view(torch.uint8) if tensor.dtype == torch.int8 else tensor)
