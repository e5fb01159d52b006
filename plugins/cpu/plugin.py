"""The chip "cpu" behind the contract's four duties."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import torch

from plugins.cpu.collectives import PRIMITIVES, GlooCollectives, gloo_is_available
from plugins.cpu.memory import CpuMemory, onednn_is_available
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.host import HostDevices
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner

T = TypeVar("T")

DTYPES = ("float32", "bfloat16")
KV_LAYOUT = "layer_kv_page_token_head"
"""[layers, keys and values, pages, tokens of a page, key/value heads, head size]."""


class CpuBackend(Backend):
    """The host. Sets torch's thread count where asked, which is a setting of the process."""

    def __init__(self, options: CpuOptions) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._devices = HostDevices(
            threads=torch.get_num_threads(),
            attributes={
                "instruction_set": torch.backends.cpu.get_cpu_capability(),
                "onednn": str(onednn_is_available()).lower(),
            },
        )
        self._memory = CpuMemory()
        self._operators = CpuOperators(self._memory)
        self._collectives = GlooCollectives() if gloo_is_available() else None
        self._report = self._make_report()

    def info(self) -> PluginInfo:
        """Built and tested with torch 2.5 and later."""
        return PluginInfo(
            name="cpu",
            plugin_version=_package_version(),
            collective_library_version=self._collectives.library if self._collectives else "",
            framework_version=torch.__version__,
            framework_range=">=2.5,<3",
        )

    def capabilities(self) -> CapabilityReport:
        """The report made at start."""
        return self._report

    @property
    def devices(self) -> DeviceManager:
        """The host."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """The host's memory."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """oneDNN and torch's fused kernels."""
        return self._operators

    @property
    def collectives(self) -> Collectives | None:
        """gloo; None where torch was built without it."""
        return self._collectives

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework's runner serves."""
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run without gradients."""
        with torch.inference_mode():
            return runnable()

    def synchronize(self) -> None:
        """Work on the host has ended when its call returned."""

    def _make_report(self) -> CapabilityReport:
        return CapabilityReport(
            chip="cpu",
            operators=self._operators.capabilities(),
            compute_dtypes=DTYPES,
            accumulation_dtype="float32",
            kv_cache_dtypes=DTYPES,
            kv_layout=KV_LAYOUT,
            preferred_chunk_tokens=512,
            preferred_batch_size=64,
            numeric_classes=DTYPES,
            collectives=PRIMITIVES if self._collectives else (),
        )


def _package_version() -> str:
    try:
        return version("chipmesh")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"
