"""The notation of device groups: `cpu:0,cpu:1;hash:0` is two groups, the first with two replicas.

`+` joins chips into one replica, whose model is split over them: `cpu:0+cpu:1` is one replica of two ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshkit.errors import InvalidArgument

FIELD = "--device-groups"
_DEVICE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):([0-9]{1,4})")
_FORM = (
    "BACKEND:INDEX, replicas of a group split by ',', groups by ';', chips of one replica joined by '+' "
    "(for example cpu:0+cpu:1,cpu:2+cpu:3;hash:0)"
)


@dataclass(frozen=True)
class Device:
    """One chip: the plugin that drives it, and its index from 0 as that plugin counts."""

    backend: str
    index: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.index}"


@dataclass(frozen=True)
class DeviceGroup:
    """A named group. replicas: for each its chips, all of one backend, in the order of the ranks."""

    name: str
    replicas: tuple[tuple[Device, ...], ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The chips of all its replicas."""
        return tuple(device for replica in self.replicas for device in replica)


def parse_device_groups(text: str) -> tuple[DeviceGroup, ...]:
    """Reads the notation. One group is named "default", several "group-0", "group-1", ...

    Raises:
        InvalidArgument: a part has another form, a group is empty, a device occurs twice, or a replica's
            chips are of several backends.
    """
    groups = [tuple(_parse_replica(replica, text) for replica in part.split(",")) for part in text.split(";")]
    everything = [device for group in groups for replica in group for device in replica]
    repeated = sorted({str(device) for device in everything if everything.count(device) > 1})
    if repeated:
        raise InvalidArgument(
            f"{FIELD}: {', '.join(repeated)} occurs twice in {text!r}; one chip serves once", field=FIELD
        )
    if len(groups) == 1:
        return (DeviceGroup("default", groups[0]),)
    return tuple(DeviceGroup(f"group-{number}", group) for number, group in enumerate(groups))


def _parse_replica(replica: str, whole: str) -> tuple[Device, ...]:
    devices = tuple(_parse_device(member, whole) for member in replica.split("+"))
    backends = sorted({device.backend for device in devices})
    if len(backends) > 1:
        raise InvalidArgument(
            f"{FIELD}: {replica.strip()!r} joins chips of {' and '.join(backends)} into one replica; its "
            "ranks talk by one plugin's collectives, so they must be of one backend. Split them with ',' "
            "into replicas of their own",
            field=FIELD,
        )
    return devices


def _parse_device(member: str, whole: str) -> Device:
    match = _DEVICE.fullmatch(member.strip())
    if match is None:
        raise InvalidArgument(
            f"{FIELD}: {member.strip()!r} in {whole!r} is no device; expected {_FORM}", field=FIELD
        )
    return Device(match[1], int(match[2]))
