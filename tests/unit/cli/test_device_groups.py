"""The notation of device groups."""

from __future__ import annotations

import pytest

from meshkit.cli.device_groups import Device, DeviceGroup, parse_device_groups
from meshkit.errors import InvalidArgument


def test_one_group_is_named_default_and_has_a_replica_per_device() -> None:
    assert parse_device_groups("cpu:0, cpu:1") == (
        DeviceGroup("default", ((Device("cpu", 0),), (Device("cpu", 1),))),
    )


def test_groups_split_by_a_semicolon_are_numbered() -> None:
    groups = parse_device_groups("cpu:0,hash:3;hash:12")
    assert groups == (
        DeviceGroup("group-0", ((Device("cpu", 0),), (Device("hash", 3),))),
        DeviceGroup("group-1", ((Device("hash", 12),),)),
    )


@pytest.mark.parametrize(
    "text",
    ["", "cpu", "cpu:", "cpu:-1", ":0", "cpu:0,", "cpu:0;", ";cpu:0", "cpu:x", "1:1", "cpu:0+", "+cpu:0"],
)
def test_anything_else_is_refused_with_the_form_that_is_expected(text: str) -> None:
    with pytest.raises(InvalidArgument, match="BACKEND:INDEX") as caught:
        parse_device_groups(text)
    assert caught.value.field == "--device-groups"


def test_a_chip_that_would_serve_twice_is_named() -> None:
    with pytest.raises(InvalidArgument, match="cpu:1 occurs twice"):
        parse_device_groups("cpu:0,cpu:1;cpu:1")


def test_a_plus_joins_chips_into_one_replica_whose_ranks_keep_their_order() -> None:
    group, other = parse_device_groups("cpu:3+cpu:1, cpu:2 + cpu:0;hash:0")
    assert [[device.index for device in replica] for replica in group.replicas] == [[3, 1], [2, 0]]
    assert group.devices == tuple(Device("cpu", index) for index in (3, 1, 2, 0))
    assert other.replicas == ((Device("hash", 0),),)


def test_a_chip_that_is_in_a_set_cannot_serve_alone_too() -> None:
    with pytest.raises(InvalidArgument, match="cpu:1 occurs twice"):
        parse_device_groups("cpu:0+cpu:1,cpu:1")


def test_chips_of_several_backends_cannot_be_one_replica() -> None:
    with pytest.raises(InvalidArgument, match="cpu and hash into one replica"):
        parse_device_groups("cpu:0+hash:1")
