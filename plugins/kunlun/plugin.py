"""The chip "kunlun" behind the contract's four duties."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch

from plugins.kunlun.collectives import PRIMITIVES, XcclCollectives
from plugins.kunlun.devices import KunlunDevices
from plugins.kunlun.memory import KunlunMemory
from plugins.kunlun.operators import DTYPES, KV_LAYOUT, PAGE_SIZES
from plugins.kunlun.probes import start_operators
from plugins.kunlun.runtime import Runtime
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner

T = TypeVar("T")


class KunlunBackend(Backend):
    """A runtime that has been opened, its operators compared with the reference."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._devices = KunlunDevices(runtime)
        self._memory = KunlunMemory(runtime)
        self._operators = start_operators(self._memory, runtime)
        self._collectives = XcclCollectives(runtime)
        self._report = self._make_report()

    def info(self) -> PluginInfo:
        """The runtime's version is kunlun_ops': operators are what changes between its releases."""
        return PluginInfo(
            name="kunlun",
            plugin_version=_package_version(),
            runtime_version=self._runtime.versions["kunlun_ops"],
            framework_version=torch.__version__,
            runtime_range=">=0.1.58,<0.2" if self._runtime.versions["kunlun_ops"] else "",
            framework_range=">=2.5,<3",
        )

    def capabilities(self) -> CapabilityReport:
        """The report made at start."""
        return self._report

    @property
    def devices(self) -> DeviceManager:
        """Visible chips."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """The chips' memory."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """kunlun_ops."""
        return self._operators

    @property
    def collectives(self) -> Collectives | None:
        """XCCL."""
        return self._collectives

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves, on this device."""
        self._devices.properties(context.device)
        self._runtime.device = context.device
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run on the runner's device, without gradients."""
        with self._runtime.cuda.device(self._runtime.device), torch.inference_mode():
            return runnable()

    def synchronize(self) -> None:
        """The runner's device."""
        self._runtime.synchronize()

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
            page_sizes_tokens=PAGE_SIZES,
            numeric_classes=DTYPES,
            collectives=PRIMITIVES,
            links=self._collectives.topology(),
        )


def _package_version() -> str:
    try:
        return version("chipmesh")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"
