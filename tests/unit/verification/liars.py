"""Back ends that lie, one lie each, and what makes them installed packages that a spawned process finds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshkit.errors import InvalidArgument, NotFound
from plugins.sdk.backend import Backend, PluginInfo, RunnerContext
from plugins.sdk.capabilities import CapabilityReport
from plugins.sdk.collectives import Collectives
from plugins.sdk.device import PHYSICAL_COUNT, DeviceManager, DeviceProperties
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.memory import Buffer, HostBytes, MemoryManager
from plugins.sdk.runner import ModelRunner

if TYPE_CHECKING:  # its signatures hold torch tensors: the spawned processes start faster without
    from plugins.sdk.operators import OperatorSet

T = TypeVar("T")
COUNT = 2


class HonestDevices(HostDevices):
    """Two devices, whatever the host; a test says what they claim."""

    def __init__(self, count: int = COUNT, **attributes: str) -> None:
        super().__init__(count=count, threads=1, attributes={PHYSICAL_COUNT: str(COUNT), **attributes})


class HonestBackend(Backend):
    """Tells the truth, unless it is given parts that do not."""

    def __init__(
        self,
        devices: DeviceManager | None = None,
        memory: MemoryManager | None = None,
        info: PluginInfo | None = None,
    ) -> None:
        self._devices = devices or HonestDevices()
        self._memory = memory or HostMemory(count=COUNT)
        self._info = info or PluginInfo(name="liar", plugin_version="1.0")

    def info(self) -> PluginInfo:
        return self._info

    def capabilities(self) -> CapabilityReport:
        return CapabilityReport(chip="liar")

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


class OneTooMany(HonestDevices):
    """Lists a device that nothing can use."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        return [*super().list_devices(), replace(self.properties(0), index=COUNT)]


class OneHidden(HonestDevices):
    """Lists one device less than answer."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        return super().list_devices()[:-1]


class Empty(HonestDevices):
    """Lists nothing."""

    def list_devices(self) -> Sequence[DeviceProperties]:
        return ()


class WithProperties(HonestDevices):
    """Properties that were never read from a device."""

    def __init__(self, *, name: str = "Chip 9", total: int = 1 << 30, free: int = 1 << 29) -> None:
        super().__init__()
        self._claimed = (name, total, free)

    def properties(self, device: int) -> DeviceProperties:
        super().properties(device)
        return DeviceProperties(device, *self._claimed, compute_units=4)


class BitFlip(HostMemory):
    """Flips the last bit of long copies into buffers."""

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        super().copy(source, destination)
        if isinstance(destination, Buffer) and destination.nbytes > 4096:
            self._bytes_at(destination)[-1] ^= 1


class MixedContexts(HostMemory):
    """Writes to any device go to the newest buffer of that size on device 0 as well."""

    def copy(self, source: Buffer | HostBytes, destination: Buffer | bytearray | memoryview) -> None:
        super().copy(source, destination)
        if not isinstance(destination, Buffer) or destination.device == 0:
            return
        for buffer, memory in self._live.values():
            if buffer.device == 0 and buffer.nbytes == destination.nbytes:
                self._bytes_of(memory)[: buffer.nbytes] = self._bytes_at(destination)


class WrongPlace(HostMemory):
    """Every buffer is on device 0."""

    def allocate(
        self, shape: Sequence[int], dtype: str, device: int | None = None, *, zeroed: bool = False
    ) -> Buffer:
        if device is not None and device >= COUNT:
            raise NotFound("no such device")
        return super().allocate(shape, dtype, 0, zeroed=zeroed)


def hang(options: Mapping[str, str]) -> Backend:
    """Never comes back from its start; its parent ends it."""
    threading.Event().wait()
    raise AssertionError("unreachable")


def crash(options: Mapping[str, str]) -> Backend:
    """Ends the process as a vendor's library may."""
    os.write(2, b"libvendor: fatal: no firmware\n")
    os.abort()


def honest(options: Mapping[str, str]) -> Backend:
    """`contract`: the version that it was built for."""
    if set(options) - {"contract"}:
        raise InvalidArgument("backend option is unknown", field="backend_options.x")
    version = options.get("contract", "1.0")
    return HonestBackend(info=PluginInfo(name="liar", plugin_version="1.0", contract_version=version))


def decline(options: Mapping[str, str]) -> Backend:
    """Its runtime is not there."""
    raise OSError("libvendor.so.5: cannot open shared object file")


def wrong_sum(options: Mapping[str, str]) -> Backend:
    """Its all_reduce is off by one in one element, on rank 1."""
    from plugins.cpu.collectives import GlooCollectives
    from plugins.cpu.options import CpuOptions
    from plugins.cpu.plugin import CpuBackend

    class WrongSum(GlooCollectives):
        def all_reduce(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
            result = super().all_reduce(name, tensor, timeout_s=timeout_s)
            if self._group(name).rank == 1:
                result[3] += 1
            return result

    backend = CpuBackend(CpuOptions(threads=1))
    backend._collectives = WrongSum()
    return backend


def install(folder: Path, *names: str) -> None:
    """Make functions of this module entry points of a package that lies in `folder`."""
    info = folder / "liars-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liars\nVersion: 1.0\n")
    points = "".join(f"{name} = {__name__}:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[chipmesh.device_plugins]\n{points}")
    assert str(folder) in sys.path, "the test puts it there, and undoes it"
