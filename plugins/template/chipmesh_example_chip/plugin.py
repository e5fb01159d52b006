"""The chip "example": the four duties in one place, who we are, and the capability report."""

from __future__ import annotations

import torch

from chipmesh_example_chip import __version__
from chipmesh_example_chip.collectives import open_collectives
from chipmesh_example_chip.memory import ExampleMemory
from chipmesh_example_chip.operators import ExampleOperators
from plugins.sdk.backend import PluginInfo
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.host import HostDevices
from plugins.sdk.operator_backend import OperatorBackend


class ExampleBackend(OperatorBackend):
    """One process on one chip. Raise a MeshError here where your runtime or device is missing."""

    def __init__(self) -> None:
        memory = ExampleMemory()
        super().__init__(
            # REPLACE: a plugins.sdk.device.DeviceManager over your driver; HostDevices shows every method.
            devices=HostDevices(),
            memory=memory,
            operators=ExampleOperators(memory),
            collectives=open_collectives(),
        )

    # REPLACE: override _on_device(self, device): a context manager that selects your device and stream. Every
    # step runs in it. plugins/kunlun/plugin.py has one.

    def info(self) -> PluginInfo:
        """Who we are. REPLACE: add runtime_version and runtime_range of what you link against."""
        return PluginInfo(
            name="example",
            plugin_version=__version__,
            # The contract that this code was written for: raise it when you use what a newer one added.
            contract_version="1.0",
            # The SDKs that it was tested with: widen it only after conformance passed on that contract.
            contract_range=">=1.0,<2",
            framework_version=torch.__version__,
            framework_range=">=2.5,<3",
        )

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
