"""The notation of device groups: `cpu:0,cpu:1;hash:0` is two groups, the first with two replicas."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshkit.errors import InvalidArgument, Unimplemented

FIELD = "--device-groups"
_DEVICE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):([0-9]{1,4})")
_FORM = "BACKEND:INDEX, members of a group split by ',', groups by ';' (for example cpu:0,cpu:1;hash:0)"


@dataclass(frozen=True)
class Device:
    """One chip: the plugin that drives it, and its index from 0 as that plugin counts."""

    backend: str
    index: int


@dataclass(frozen=True)
class DeviceGroup:
    """A named group with one replica per device."""

    name: str
    devices: tuple[Device, ...]


def parse_device_groups(text: str) -> tuple[DeviceGroup, ...]:
    """Reads the notation. One group is named "default", several "group-0", "group-1", ...

    Raises:
        InvalidArgument: a part has another form, a group is empty, or a device occurs twice.
        Unimplemented: `+` joins devices into a tensor-parallel replica.
    """
    parts = text.split(";")
    devices = [tuple(_parse_device(member, text) for member in part.split(",")) for part in parts]
    everything = [device for group in devices for device in group]
    repeated = sorted({f"{d.backend}:{d.index}" for d in everything if everything.count(d) > 1})
    if repeated:
        raise InvalidArgument(
            f"{FIELD}: {', '.join(repeated)} occurs twice in {text!r}; one chip serves once", field=FIELD
        )
    if len(devices) == 1:
        return (DeviceGroup("default", devices[0]),)
    return tuple(DeviceGroup(f"group-{number}", group) for number, group in enumerate(devices))


def _parse_device(member: str, whole: str) -> Device:
    if "+" in member:
        raise Unimplemented(
            f"{FIELD}: {member.strip()!r} joins devices into one tensor-parallel replica, which is not "
            "served yet; split them with ',' into replicas of their own",
            field=FIELD,
        )
    match = _DEVICE.fullmatch(member.strip())
    if match is None:
        raise InvalidArgument(
            f"{FIELD}: {member.strip()!r} in {whole!r} is no device; expected {_FORM}", field=FIELD
        )
    return Device(match[1], int(match[2]))
