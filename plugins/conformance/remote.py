"""A running executor as a `Backend`: every duty goes over its RPCs, so that the same checks run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from chipmesh.device.v1alpha1 import collective_pb2, plugin_pb2
from chipmesh.device.v1alpha1.collective_pb2_grpc import CollectiveServiceStub
from chipmesh.device.v1alpha1.plugin_pb2_grpc import PluginServiceStub
from meshkit.address import parse_listen
from meshkit.errors import InvalidArgument, Unimplemented
from plugins.conformance.remote_calls import Calls
from plugins.conformance.remote_device import RemoteDevices
from plugins.conformance.remote_memory import RemoteMemory
from plugins.conformance.remote_report import info_from_proto, report_from_proto
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.memory import MemoryManager
from plugins.sdk.runner import ModelRunner

if TYPE_CHECKING:  # its signatures hold torch tensors
    from plugins.sdk.operators import OperatorSet

T = TypeVar("T")

OUT_OF_REACH = {
    "capabilities/declared_operators_exist": "the checks operators/NAME ask with each call which "
    "implementation ran",
    "capabilities/something_runs_models": "an executor that has nothing to run models with does not start",
    "device/execute_runnable": "work of this process does not travel; the executor runs its calls through it",
    "memory/values": "upload and download make the framework's tensors, which do not travel",
    "memory/scalars": "upload and download make the framework's tensors, which do not travel",
    "memory/zeroed": "Allocate has no zeroed memory",
    "memory/negative_size": "sizes on the wire have no sign",
    "memory/views": "a buffer's tensor does not travel",
    "operators/inputs_are_kept": "every call gets copies of its inputs, which end with it",
    "operators/writes_stay_inside": "memory around a cache is seen in the executor's process only",
}
"""Checks, and parts of the operators' checks, that cannot be made by address; and why."""


@contextmanager
def open_executor(address: str, *, limit_s: float | None) -> Iterator[RemoteBackend]:
    """Connect to the executor at "HOST:PORT" or "unix:PATH"; limit_s: seconds that one check may take.

    Raises:
        InvalidArgument: (address) it has no such form.
    """
    parse_listen(address, field="address")
    calls = Calls(address, limit_s=limit_s)
    try:
        yield RemoteBackend(calls)
    finally:
        calls.close()


class RemoteBackend(Backend):
    """One executor. Whatever it says is asked anew at each call."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._plugin = PluginServiceStub(calls.channel)
        self._devices = RemoteDevices(calls)
        self._memory = RemoteMemory(calls)

    def info(self) -> PluginInfo:
        """GetPluginInfo."""
        request = plugin_pb2.GetPluginInfoRequest()
        return info_from_proto(self._calls.call(self._plugin.GetPluginInfo, request))

    def capabilities(self) -> CapabilityReport:
        """GetCapabilities. Raises ValueError for a report that contradicts itself."""
        request = plugin_pb2.GetCapabilitiesRequest()
        return report_from_proto(self._calls.call(self._plugin.GetCapabilities, request).report)

    @property
    def devices(self) -> DeviceManager:
        """DeviceService."""
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        """MemoryService."""
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        """OperatorService; None where the report lists no operator: the plugin has a runner of its own."""
        report = self.capabilities()
        if not report.operators:
            return None
        # Only here, since it imports the tensor framework.
        from plugins.conformance.remote_operators import RemoteOperators  # noqa: PLC0415

        return RemoteOperators(self._calls, self._memory, report)

    @property
    def collectives(self) -> Collectives | None:
        """CollectiveService; None where the executor says that its chip works alone."""
        # Only here, since it imports the tensor framework.
        from plugins.conformance.remote_collectives import RemoteCollectives  # noqa: PLC0415

        nameless = collective_pb2.InitGroupRequest()
        stub = CollectiveServiceStub(self._calls.channel)
        try:
            self._calls.call(stub.InitGroup, nameless)
        except Unimplemented:
            return None
        except InvalidArgument:
            # As it has to: a group needs a name, which is looked at where there are collectives at all.
            pass
        return RemoteCollectives(self._calls, self.info().collective_library_version)

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        """None: a runner does not travel."""
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        """Run it here: each call that it makes runs under the chip's settings in the executor."""
        return runnable()

    def synchronize(self) -> None:
        """Wait for all devices."""
        for each in self._devices.list_devices():
            self._devices.synchronize(each.index)
