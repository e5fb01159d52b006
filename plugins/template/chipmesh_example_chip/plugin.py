"""The chip "example": the four duties in one place, who we are, and the capability report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from chipmesh_example_chip import __version__
from chipmesh_example_chip.collectives import open_collectives
from chipmesh_example_chip.memory import ExampleMemory
from chipmesh_example_chip.operators import ExampleOperators
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.host import HostDevices
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner

T = TypeVar("T")


class ExampleBackend(Backend):
    """One process on one chip. Raise a MeshError here where your runtime or device is missing."""

    def __init__(self) -> None:
        # REPLACE: a plugins.sdk.device.DeviceManager over your driver; HostDevices shows every method.
        self._devices = HostDevices()
        self._memory = ExampleMemory()
        self._operators = ExampleOperators(self._memory)
        self._collectives = open_collectives()
        self._report = self._make_report()

    def info(self) -> PluginInfo:
        """Who we are. REPLACE: add runtime_version and runtime_range of what you link against."""
        return PluginInfo(
            name="example",
            plugin_version=__version__,
            framework_version=torch.__version__,
            framework_range=">=2.5,<3",
        )

    def capabilities(self) -> CapabilityReport:
        """Made once: it never changes while the process lives."""
        return self._report

    @property
    def devices(self) -> DeviceManager:
        """The host's processors stand in for devices."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """See memory.py."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """See operators.py."""
        return self._operators

    @property
    def collectives(self) -> Collectives | None:
        """See collectives.py."""
        return self._collectives

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: the framework runs the model on `operators`."""
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Every step runs in here. REPLACE: select your device and stream around it."""
        with torch.inference_mode():
            return runnable()

    def synchronize(self) -> None:
        """REPLACE: wait for your chip. On the host work has ended when its call returned."""

    def _make_report(self) -> CapabilityReport:
        """What is not said here takes the conservative answer: no graph capture, no quantisation, any page
        size, no preferred sizes. Add what you can prove, dtypes first.
        """
        return CapabilityReport(
            chip="example",
            # REPLACE: delete both lines once work runs on your chip.
            emulated=True,
            emulation_note="The host stands in for the chip until its devices and memory are replaced.",
            operators=self._operators.capabilities(),
            compute_dtypes=("float32",),
            accumulation_dtype="float32",
            kv_cache_dtypes=("float32",),
            kv_layout=self._operators.kv_layout.name,
            numeric_classes=("float32",),
        )
