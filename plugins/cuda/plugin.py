"""The chip "cuda" behind the contract's four duties."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from plugins.cuda.collectives import NcclCollectives
from plugins.cuda.devices import CudaDevices
from plugins.cuda.memory import CudaMemory
from plugins.cuda.probes import start_operators
from plugins.cuda.runtime import Runtime
from plugins.sdk.backend import PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.communication import PLUGINS_CHOICE, CommunicationOptions
from plugins.sdk.operator_backend import OperatorBackend
from plugins.sdk.process_group import PRIMITIVES
from plugins.sdk.runner import ModelRunner
from plugins.sdk.versions import installed_version

NAME = "cuda"
_BFLOAT16_FROM = (8, 0)
_CHUNKS = ((20 << 30, 2048), (60 << 30, 4096), (160 << 30, 8192))
"""(bytes of memory below which, tokens of a prefill chunk): the steps that SGLang has by default."""
_LARGEST_CHUNK = 16384
_RUNTIME_RANGE = ">=12.1,<14"
_NCCL_RANGE = ">=2.18,<3"
_FRAMEWORK_RANGE = ">=2.5,<3"


class CudaBackend(OperatorBackend):
    """A runtime that has been opened, its kernels chosen and compared with the reference."""

    def __init__(self, runtime: Runtime, communication: CommunicationOptions = PLUGINS_CHOICE) -> None:
        self._runtime = runtime
        self._overlap_rows = communication.overlap_rows or 0
        self._dtypes = compute_dtypes(runtime)
        memory = CudaMemory(runtime)
        super().__init__(
            devices=CudaDevices(runtime),
            memory=memory,
            operators=start_operators(memory, runtime, self._dtypes),
            collectives=NcclCollectives(runtime, border=communication.border)
            if runtime.nccl_version
            else None,
        )

    def info(self) -> PluginInfo:
        """The runtime is the CUDA that torch was built with; the driver takes it or the start fails."""
        return PluginInfo(
            name=NAME,
            plugin_version=installed_version("chipmesh"),
            runtime_version=self._runtime.cuda_version,
            collective_library_version=self._runtime.nccl_version,
            framework_version=torch.__version__,
            runtime_range=_RUNTIME_RANGE,
            collective_library_range=_NCCL_RANGE if self._runtime.nccl_version else "",
            framework_range=_FRAMEWORK_RANGE,
        )

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves, on this device, which is the whole plugin's then."""
        runner = super().create_runner(context)
        self._runtime.device, self._runtime.settled = context.device, True
        return runner

    def _on_device(self, device: int) -> AbstractContextManager[object]:
        selected: AbstractContextManager[object] = self._runtime.cuda.device(device)
        return selected

    def _make_report(self) -> CapabilityReport:
        # graph_capture stays False: the framework's runner launches each operator by itself, and what a graph
        # would freeze changes from step to step (the width of the page table, FlashInfer's plan on the host).
        # links stay empty: a link names its peer only, and which device is ours is not known before
        # create_runner, while the report is frozen; Collectives.topology knows.
        return CapabilityReport(
            chip=NAME,
            operators=self._operators.capabilities(),
            compute_dtypes=self._dtypes,
            accumulation_dtype="float32",
            kv_cache_dtypes=self._dtypes,
            kv_layout=self._operators.kv_layout.name,
            quantization_formats=self._quantization_formats(),
            preferred_chunk_tokens=self._preferred_chunk(),
            numeric_classes=self._dtypes,
            collectives=PRIMITIVES if self._collectives else (),
            overlap_rows=self._overlap_rows,
        )

    def _quantization_formats(self) -> tuple[str, ...]:
        """Those whose product is native."""
        return tuple(each for each in ("w8a8", "w4a16") if f"linear_{each}" not in self._operators.declined)

    def _preferred_chunk(self) -> int:
        """By the smallest device's memory."""
        smallest = min(device.memory_total_bytes for device in self._devices.list_devices())
        return next((tokens for below, tokens in _CHUNKS if smallest < below), _LARGEST_CHUNK)


def compute_dtypes(runtime: Runtime) -> tuple[str, ...]:
    """Best first. bfloat16 on GPUs that have units for it; older ones emulate it slowly."""
    newer = ("bfloat16",) if runtime.capability >= _BFLOAT16_FROM else ()
    return (*newer, "float16", "float32")
