"""A back end without torch, of the SDK's own host parts: what the contract half is tested with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plugins.sdk.assembled import AssembledBackend
from plugins.sdk.backend import Backend, PluginInfo
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.host import HostDevices, HostMemory


class ToyBackend(AssembledBackend):
    """`info` is what the test says."""

    def __init__(self, info: PluginInfo) -> None:
        super().__init__(devices=HostDevices(threads=3), memory=HostMemory())
        self._info = info

    def info(self) -> PluginInfo:
        return self._info

    def _make_report(self) -> CapabilityReport:
        return CapabilityReport(chip="toy")


def toy_factory(**changes: str) -> Callable[[Mapping[str, str]], Backend]:
    """A factory whose plugin declares `changes` in its PluginInfo."""
    return lambda options: ToyBackend(PluginInfo(name="toy", plugin_version="1.2.3", **changes))
