"""What NVML says, by answers put at the seam, and what is said where it is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshkit.errors import Unavailable
from plugins.cuda.collectives import NcclCollectives
from plugins.cuda.devices import CudaDevices
from plugins.cuda.memory import CudaMemory
from plugins.cuda.nvml import Nvml, NvmlAbsence, open_nvml
from plugins.sdk.capabilities import LinkCapability
from plugins.sdk.device import PHYSICAL_COUNT
from tests.unit.cuda_plugin.stand_in import GIB, runtime_of

SWITCH = "switch"


class NvmlError(Exception):
    """As pynvml.NVMLError."""


class StandInNvml:
    """pynvml, for a host with `uuids`. links: (device, link) -> what it leads to: a device, or SWITCH.

    levels: how far two devices are apart, PCIe generations and lanes by device.
    """

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_TOPOLOGY_SYSTEM = 50

    def __init__(
        self,
        uuids: tuple[str, ...] = ("GPU-uuid-0", "GPU-uuid-1"),
        links: dict[tuple[int, int], int | str] | None = None,
        *,
        level: int = 30,
        pcie: tuple[tuple[int, int], ...] = ((4, 16), (3, 16)),
        failing: frozenset[str] = frozenset(),
    ) -> None:
        self._uuids = uuids
        self._links = links or {}
        self._level = level
        self._pcie = pcie
        self._failing = failing

    def nvmlInit(self) -> None:
        self._check("nvmlInit")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self._uuids:
            raise NvmlError("Not Found")
        return self._uuids.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return self._uuids[handle].encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80 * GIB, free=(70 + handle) * GIB, used=0)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=_bus(handle).lower().encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 3:
            raise NvmlError("Invalid Argument")
        return int((handle, link) in self._links)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        remote = self._links[handle, link]
        return self.NVML_NVLINK_DEVICE_TYPE_SWITCH if remote == SWITCH else self.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        remote = self._links[handle, link]
        return SimpleNamespace(busId=_bus(99 if remote == SWITCH else int(remote)))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        assert (handle, fields) == (0, [90])
        value = SimpleNamespace(uiVal=25_000)
        return [SimpleNamespace(nvmlReturn=int("speed" in self._failing), value=value)]

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        assert one != other
        return self._level

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        self._check("pcie")
        return self._pcie[handle][0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._pcie[handle][1]

    def _check(self, name: str) -> None:
        if name in self._failing:
            raise NvmlError("Unknown Error")


def _bus(device: int) -> str:
    return f"0000000A:{device:02X}:00.0"


def nvml(*arguments: Any, **changes: Any) -> Nvml:
    return Nvml(StandInNvml(*arguments, **changes))


def test_nvml_is_opened_where_it_starts_and_its_absence_says_why() -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    assert open_nvml(missing) == NvmlAbsence("the package nvidia-ml-py is not installed")
    broken = open_nvml(lambda name: StandInNvml(failing=frozenset({"nvmlInit"})))
    assert broken == NvmlAbsence("NVML does not start: Unknown Error")
    assert isinstance(open_nvml(lambda name: StandInNvml()), Nvml)


def test_the_real_package_finds_no_library_on_a_host_without_a_driver() -> None:
    pynvml = pytest.importorskip("pynvml")
    opened = open_nvml()
    if isinstance(opened, Nvml):
        pytest.skip("this host has a driver")
    assert "NVML does not start" in opened.reason
    names = [name for name in vars(StandInNvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0", 1),
        ("1,5", 1),
        ("GPU-uuid-1", 1),
        ("GPU-uuid", 1),
        ("GPU-uuid-1,GPU-other", 1),
        ("1,GPU-uuid-0", 2),
    ],
)
def test_devices_are_counted_by_what_the_driver_has(visible: str | None, count: int) -> None:
    assert nvml().count(visible) == count


def test_properties_are_nvmls_and_say_so() -> None:
    devices = CudaDevices(runtime_of(nvml=nvml()))
    listed = devices.list_devices()
    assert [device.memory_free_bytes for device in listed] == [70 * GIB, 71 * GIB]
    attributes = listed[1].attributes
    assert attributes["memory_source"] == "nvml"
    assert attributes["driver_version"] == "570.86.15"
    assert attributes[PHYSICAL_COUNT] == "2"
    assert attributes["uuid"] == "uuid-1"
    assert "nvml" not in attributes


def test_without_nvml_the_numbers_are_torchs_and_the_reason_is_told() -> None:
    seen = CudaDevices(runtime_of()).properties(0)
    assert (seen.memory_total_bytes, seen.memory_free_bytes) == (24 * GIB, 20 * GIB)
    assert seen.attributes["memory_source"] == "torch"
    assert seen.attributes["nvml"] == "the package nvidia-ml-py is not installed"


def test_a_device_that_nvml_does_not_know_has_torchs_numbers() -> None:
    runtime = runtime_of(nvml=nvml(("GPU-other",)))
    assert CudaDevices(runtime).properties(0).attributes["memory_source"] == "torch"
    assert CudaMemory(runtime).stats(0).total_bytes == 24 * GIB


def test_a_part_of_a_gpu_is_found_by_its_own_prefix() -> None:
    assert nvml(("MIG-uuid-0",)).find("uuid-0") == 0
    assert nvml(("MIG-uuid-0",)).count("MIG-uuid-0") == 1


def test_a_device_that_stops_answering_is_unavailable() -> None:
    runtime = runtime_of(nvml=nvml(failing=frozenset({"nvmlDeviceGetMemoryInfo"})))
    with pytest.raises(Unavailable, match="nvmlDeviceGetMemoryInfo: Unknown Error"):
        CudaMemory(runtime).stats(0)


def topology(module: Nvml, device: int = 0) -> list[LinkCapability]:
    runtime = runtime_of(nvml=module)
    runtime.device = device
    return list(NcclCollectives(runtime).topology())


def test_links_are_nvlink_where_there_is_any() -> None:
    direct: dict[tuple[int, int], int | str] = {(0, 0): 1, (0, 2): 1, (1, 0): 0}
    assert topology(nvml(links=direct)) == [LinkCapability(1, 2 * 25_000_000_000)]
    switched: dict[tuple[int, int], int | str] = {(0, 0): SWITCH, (0, 1): SWITCH, (1, 1): SWITCH}
    assert topology(nvml(links=switched)) == [LinkCapability(1, 2 * 25_000_000_000)]
    one_sided: dict[tuple[int, int], int | str] = {(0, 0): SWITCH}
    assert topology(nvml(links=one_sided)) == [LinkCapability(1, 985_000_000 * 16)]


def test_links_over_pcie_are_as_wide_as_the_narrower_slot() -> None:
    assert topology(nvml()) == [LinkCapability(1, 985_000_000 * 16)]
    assert topology(nvml(), device=1) == [LinkCapability(0, 985_000_000 * 16)]


def test_a_bandwidth_that_nobody_tells_is_unknown() -> None:
    assert topology(nvml(level=50)) == [LinkCapability(1, 0)]
    assert topology(nvml(failing=frozenset({"pcie"}))) == [LinkCapability(1, 0)]
    direct: dict[tuple[int, int], int | str] = {(0, 0): 1}
    assert topology(nvml(links=direct, failing=frozenset({"speed"}))) == [LinkCapability(1, 0)]
    assert list(NcclCollectives(runtime_of()).topology()) == []
