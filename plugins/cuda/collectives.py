"""Collectives over NCCL. Without a GPU nothing of NCCL runs; tests put gloo in its place at the seam."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from meshkit.errors import FailedPrecondition
from plugins.cuda.links import find_links
from plugins.cuda.nvml import Nvml
from plugins.cuda.runtime import Runtime
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.communication import Border
from plugins.sdk.process_group import ProcessGroupCollectives, check_parts
from plugins.sdk.torch_devices import ask_device

_BACKEND = "nccl"


class NcclCollectives(ProcessGroupCollectives):
    """Tensors of the runner's device. NCCL's `wait` orders streams only. Each rank needs a GPU of its own."""

    _wait_blocks: ClassVar[bool] = False

    def __init__(self, runtime: Runtime, *, border: Border | None = None) -> None:
        super().__init__(border=border)
        self._runtime = runtime

    @property
    def library(self) -> str:
        """NCCL and the torch that brings it."""
        return f"NCCL {self._runtime.nccl_version} (torch {torch.__version__})"

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        """NCCL's own: each rank receives its part only."""
        group = self._group(name)
        check_parts(tensor, group.world_size)
        source = self._carried(tensor.contiguous())
        result = torch.empty_like(source[: source.shape[0] // group.world_size])
        parts = list(source.chunk(group.world_size))
        self._run(name, timeout_s, lambda process_group: process_group.reduce_scatter([result], [parts]))
        return result

    def topology(self) -> Sequence[LinkCapability]:
        """From the runner's device to the other visible ones, by NVML; none where it is not installed."""
        nvml = self._runtime.nvml
        handles = [self._runtime.nvml_handle(index) for index in range(self._runtime.device_count)]
        if not isinstance(nvml, Nvml) or None in handles:
            return ()
        return tuple(find_links(nvml, handles, self._runtime.device))

    def _open_group(self, name: str, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        if not self._runtime.settled:
            # Tools make no runner: their ranks take the visible devices in turn, as they place their tensors.
            self._runtime.device = rank % self._runtime.device_count
        _refuse_shared_device(name, store, rank, world_size, self._identity(), timeout)
        return self._runtime.new_process_group(
            backend=_BACKEND, store=store, rank=rank, world_size=world_size, name=name, timeout=timeout
        )

    def _close_group(self, process_group: Any) -> None:
        self._runtime.close_process_group(process_group)

    def _device(self) -> torch.device:
        return self._runtime.place(self._runtime.device)

    def _synchronize(self) -> None:
        self._runtime.synchronize()

    def _identity(self) -> str:
        """The same for two processes exactly where both work on one GPU."""
        runtime = self._runtime
        return str(ask_device(runtime.device, runtime.cuda.get_device_properties).uuid)


def _refuse_shared_device(
    name: str, store: Any, rank: int, world_size: int, identity: str, timeout: timedelta
) -> None:
    """NCCL ends with an error that names no rank where two of them have one GPU."""
    store.set(f"device/{rank}", identity)
    store.wait([f"device/{each}" for each in range(world_size)], timeout)
    same = [each for each in range(world_size) if store.get(f"device/{each}").decode() == identity]
    if len(same) > 1:
        raise FailedPrecondition(
            f"ranks {', '.join(map(str, same))} of group {name!r} work on one GPU ({identity}); NCCL needs "
            "one for each rank: give each executor a device of its own, by its device index or by "
            "backend_options.visible_devices",
            field="rank",
            reason="DEVICE_SHARED",
        )
