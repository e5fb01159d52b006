"""A back end without torch, of the SDK's own host parts: what the contract half is tested with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import DeviceManager
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.memory import MemoryManager
from plugins.sdk.operators import OperatorSet
from plugins.sdk.runner import ModelRunner

T = TypeVar("T")


class ToyBackend(Backend):
    """`info` is what the test says."""

    def __init__(self, info: PluginInfo) -> None:
        self._info = info
        self._devices = HostDevices(threads=3)
        self._memory = HostMemory()

    def info(self) -> PluginInfo:
        return self._info

    def capabilities(self) -> CapabilityReport:
        return CapabilityReport(chip="toy")

    @property
    def devices(self) -> DeviceManager:
        return self._devices

    @property
    def memory(self) -> MemoryManager:
        return self._memory

    @property
    def operators(self) -> OperatorSet | None:
        return None

    @property
    def collectives(self) -> Collectives | None:
        return None

    def create_runner(self, context: RunnerContext) -> ModelRunner | None:
        return None

    def execute_runnable(self, runnable: Callable[[], T]) -> T:
        return runnable()

    def synchronize(self) -> None:
        return


def toy_factory(**changes: str) -> Callable[[Mapping[str, str]], Backend]:
    """A factory whose plugin declares `changes` in its PluginInfo."""
    return lambda options: ToyBackend(PluginInfo(name="toy", plugin_version="1.2.3", **changes))
