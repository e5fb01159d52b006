"""The chip "kunlun" behind the contract's four duties."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from plugins.kunlun.collectives import XcclCollectives
from plugins.kunlun.devices import KunlunDevices
from plugins.kunlun.memory import KunlunMemory
from plugins.kunlun.operators import DTYPES, KV_LAYOUT, PAGE_SIZES
from plugins.kunlun.probes import start_operators
from plugins.kunlun.runtime import Runtime
from plugins.sdk.backend import PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport, Coverage
from plugins.sdk.communication import PLUGINS_CHOICE, CommunicationOptions
from plugins.sdk.operator_backend import OperatorBackend
from plugins.sdk.process_group import PRIMITIVES
from plugins.sdk.runner import ModelRunner
from plugins.sdk.versions import installed_version


class KunlunBackend(OperatorBackend):
    """A runtime that has been opened, its operators compared with the reference."""

    def __init__(self, runtime: Runtime, communication: CommunicationOptions = PLUGINS_CHOICE) -> None:
        self._runtime = runtime
        self._overlap_rows = communication.overlap_rows or 0
        memory = KunlunMemory(runtime)
        super().__init__(
            devices=KunlunDevices(runtime),
            memory=memory,
            operators=start_operators(memory, runtime),
            collectives=XcclCollectives(runtime, border=communication.border),
        )

    def info(self) -> PluginInfo:
        """The runtime's version is kunlun_ops': operators are what changes between its releases."""
        return PluginInfo(
            name="kunlun",
            plugin_version=installed_version("chipmesh"),
            runtime_version=self._runtime.versions["kunlun_ops"],
            framework_version=torch.__version__,
            runtime_range=">=0.1.58,<0.2" if self._runtime.versions["kunlun_ops"] else "",
            framework_range=">=2.5,<3",
        )

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves, on this device, which is the whole plugin's then."""
        runner = super().create_runner(context)
        self._runtime.device = context.device
        return runner

    def _on_device(self, device: int) -> AbstractContextManager[object]:
        selected: AbstractContextManager[object] = self._runtime.cuda.device(device)
        return selected

    def _make_report(self) -> CapabilityReport:
        # Not offered: fp8, which the chip lacks; int8 caches, whose scales per channel the framework does not
        # hand over yet; graph capture, since decode brings its lengths to the host in each step.
        return CapabilityReport(
            chip="kunlun",
            emulated=self._runtime.emulated,
            emulation_note=self._runtime.emulation_note,
            operators=self._operators.capabilities(),
            compute_dtypes=DTYPES,
            accumulation_dtype="float32",
            kv_cache_dtypes=DTYPES,
            kv_layout=KV_LAYOUT.name,
            quantization_formats=self._quantization_formats(),
            page_sizes_tokens=PAGE_SIZES,
            numeric_classes=DTYPES,
            collectives=PRIMITIVES,
            overlap_rows=self._overlap_rows,
        )

    def _quantization_formats(self) -> tuple[str, ...]:
        """Those whose product is native."""
        return ("w8a8",) if self._operators.coverage("linear_w8a8") is Coverage.NATIVE else ()
