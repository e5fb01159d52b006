"""Links between GPUs with their bandwidth, as NVML tells them: NVLink where there is any, else PCIe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.cuda.nvml import Nvml
from plugins.sdk.capabilities import LinkCapability

_MEGABYTE = 1_000_000
# Bytes per second of one lane in one direction, by PCIe generation, line code taken off (PCI-SIG: 2.5 and 5
# GT/s at 8b/10b, 8 to 32 GT/s at 128b/130b, 64 GT/s in flits of 242 of 256 bytes).
_PCIE_LANE_BYTES = {
    1: 250 * _MEGABYTE,
    2: 500 * _MEGABYTE,
    3: 985 * _MEGABYTE,
    4: 1_969 * _MEGABYTE,
    5: 3_938 * _MEGABYTE,
    6: 7_563 * _MEGABYTE,
}
_SWITCH = "switch"


def find_links(nvml: Nvml, handles: Sequence[Any], device: int) -> list[LinkCapability]:
    """Links from `device` to each other one, bandwidth in one direction; 0: not known.

    handles: of the visible devices, by index.
    """
    own = _count_nvlinks(nvml, handles[device])
    peers = [index for index in range(len(handles)) if index != device]
    return [LinkCapability(peer, _bandwidth(nvml, handles, device, peer, own)) for peer in peers]


def _bandwidth(nvml: Nvml, handles: Sequence[Any], device: int, peer: int, own: Mapping[str, int]) -> int:
    links = own.get(_bus_id(nvml, handles[peer]), 0)
    if own.get(_SWITCH) and _count_nvlinks(nvml, handles[peer]).get(_SWITCH):
        links += own[_SWITCH]  # a switch carries all of a GPU's links to any one peer
    if links:
        return links * _nvlink_bytes(nvml, handles[device])
    return min(_pcie_bytes(nvml, handles, device, peer), _pcie_bytes(nvml, handles, peer, device))


def _count_nvlinks(nvml: Nvml, handle: Any) -> dict[str, int]:
    """Active links by what they lead to: a PCI bus id, or a switch."""
    module = nvml.module
    counts: dict[str, int] = {}
    for link in range(module.NVML_NVLINK_MAX_LINKS):
        try:
            if not module.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = module.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            remote = module.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
        except module.NVMLError:
            continue  # this GPU has no such link
        name = _SWITCH if kind == module.NVML_NVLINK_DEVICE_TYPE_SWITCH else _text(remote.busId)
        counts[name] = counts.get(name, 0) + 1
    return counts


def _nvlink_bytes(nvml: Nvml, handle: Any) -> int:
    """Of one active link in one direction; 0 where the driver does not tell."""
    module = nvml.module
    try:
        field = module.nvmlDeviceGetFieldValues(handle, [module.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])[0]
    except module.NVMLError:
        return 0
    return int(field.value.uiVal) * _MEGABYTE if field.nvmlReturn == module.NVML_SUCCESS else 0


def _pcie_bytes(nvml: Nvml, handles: Sequence[Any], device: int, peer: int) -> int:
    """What the slot of `device` carries; 0 where the path to `peer` crosses processors, whose link NVML does
    not know.
    """
    module = nvml.module
    try:
        level = module.nvmlDeviceGetTopologyCommonAncestor(handles[device], handles[peer])
        generation = module.nvmlDeviceGetMaxPcieLinkGeneration(handles[device])
        lanes = module.nvmlDeviceGetMaxPcieLinkWidth(handles[device])
    except module.NVMLError:
        return 0
    if level >= module.NVML_TOPOLOGY_SYSTEM:
        return 0
    return int(_PCIE_LANE_BYTES.get(generation, 0) * lanes)


def _bus_id(nvml: Nvml, handle: Any) -> str:
    try:
        return _text(nvml.module.nvmlDeviceGetPciInfo(handle).busId)
    except nvml.module.NVMLError:  # a part of a GPU (MIG) has no slot of its own, and no links
        return ""


def _text(value: Any) -> str:
    """Upper case: drivers write the hexadecimal digits of a bus id in both."""
    return (value.decode() if isinstance(value, bytes) else str(value)).upper()
