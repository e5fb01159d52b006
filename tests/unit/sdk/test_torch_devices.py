"""Devices of an accelerator behind torch: what lives and dies, and how failures are told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from meshkit.errors import NotFound, Unavailable
from plugins.sdk.device import PHYSICAL_COUNT, DeviceProperties
from plugins.sdk.torch_devices import TorchDevices, ask_device, check_device
from plugins.sdk.visibility import Visibility


@dataclass
class Accelerator:
    """Two devices. done: calls, in order. failing: names of those that raise."""

    done: list[str] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)

    def device_count(self) -> int:
        return 2

    def synchronize(self, device: int) -> None:
        self.call("synchronize", f"device {device}")

    def Stream(self, device: int) -> Stream:
        self.call("create", f"on {device}")
        return Stream(self, device)

    def call(self, name: str, what: str) -> None:
        if name in self.failing:
            raise RuntimeError(f"{name}: an illegal memory access was encountered")
        self.done.append(f"{name} {what}")


@dataclass
class Stream:
    accelerator: Accelerator
    device: int

    def record_event(self) -> str:
        self.accelerator.call("record", f"on {self.device}")
        return f"mark of {self.device}"

    def wait_event(self, event: str) -> None:
        self.accelerator.call("wait", f"on {self.device} for {event}")

    def synchronize(self) -> None:
        self.accelerator.call("synchronize", f"stream on {self.device}")


class Devices(TorchDevices):
    """Of a driver that has three."""

    def properties(self, device: int) -> DeviceProperties:
        self._check(device)
        return DeviceProperties(device, "Acme 1", 2, 1, 3, self._host_attributes())

    def _physical_count(self) -> int | None:
        return 3


class Uncounted(TorchDevices):
    """Whose driver tells no count."""

    def properties(self, device: int) -> DeviceProperties:
        return DeviceProperties(device, "Acme 1", 2, 1, 3, self._host_attributes())


def devices_of(accelerator: Accelerator | None = None, **environment: str) -> Devices:
    """As a process has them that was started with all devices."""
    return Devices(accelerator or Accelerator(), Visibility(("ACME_VISIBLE_DEVICES",), None, environment))


def test_devices_are_listed_with_what_the_process_was_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        listed = devices_of(ACME_VISIBLE_DEVICES="1").list_devices()
    assert [each.index for each in listed] == [0, 1]
    assert listed[0].attributes == {"visible_devices": "all", PHYSICAL_COUNT: "3"}
    assert "no effect" in caplog.text, "a variable was changed later"
    named = Uncounted(Accelerator(), Visibility(("ACME_VISIBLE_DEVICES",), "4,5", {}))
    assert named.properties(0).attributes == {"visible_devices": "4,5"}
    assert not named.shares_host_memory


def test_a_stream_waits_for_an_event_of_another_on_the_device() -> None:
    accelerator = Accelerator()
    devices = devices_of(accelerator)
    first, second = devices.create_stream(0), devices.create_stream(1)
    event = devices.record_event(first)
    devices.wait_event(second, event)
    devices.synchronize(1, second)
    devices.synchronize(0)
    assert len({first, second, event}) == 3
    assert accelerator.done == [
        "create on 0", "create on 1", "record on 0", "wait on 1 for mark of 0", "synchronize stream on 1",
        "synchronize device 0",
    ]  # fmt: skip


def test_a_destroyed_stream_was_waited_for_once_and_takes_its_events_along() -> None:
    accelerator = Accelerator()
    devices = devices_of(accelerator)
    stream, other = devices.create_stream(0), devices.create_stream(0)
    event, kept = devices.record_event(stream), devices.record_event(other)
    for _ in range(3):
        devices.destroy_stream(stream)
    devices.destroy_stream("stream-99")
    assert accelerator.done.count("synchronize stream on 0") == 1
    with pytest.raises(NotFound) as error:
        devices.wait_event(other, event)
    assert error.value.field == "event_id"
    devices.wait_event(other, kept)


UNKNOWN: dict[str, tuple[Callable[[Devices], object], str]] = {
    "device of properties": (lambda devices: devices.properties(2), "device"),
    "device of a stream": (lambda devices: devices.create_stream(-1), "device"),
    "device to wait for": (lambda devices: devices.synchronize(2), "device"),
    "stream to record": (lambda devices: devices.record_event("stream-9"), "stream_id"),
    "stream that waits": (lambda devices: devices.wait_event("stream-9", "event-9"), "stream_id"),
    "stream to wait for": (lambda devices: devices.synchronize(0, "stream-9"), "stream_id"),
    "event": (lambda devices: devices.wait_event(devices.create_stream(0), "event-9"), "event_id"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_unknown_is_not_found_by_its_field(what: str) -> None:
    call, named = UNKNOWN[what]
    with pytest.raises(NotFound, match="does not exist") as error:
        call(devices_of())
    assert error.value.field == named


FAILURES: dict[str, tuple[str, Callable[[Devices, str, str], object]]] = {
    "a new stream": ("create", lambda devices, stream, event: devices.create_stream(1)),
    "an event": ("record", lambda devices, stream, event: devices.record_event(stream)),
    "waiting on the device": ("wait", lambda devices, stream, event: devices.wait_event(stream, event)),
    "waiting for a stream": ("synchronize", lambda devices, stream, event: devices.synchronize(1, stream)),
    "waiting for the device": ("synchronize", lambda devices, stream, event: devices.synchronize(1)),
    "the end of a stream": ("synchronize", lambda devices, stream, event: devices.destroy_stream(stream)),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_device_that_failed_is_unavailable_by_its_number(what: str) -> None:
    accelerator = Accelerator()
    devices = devices_of(accelerator)
    stream = devices.create_stream(1)
    event = devices.record_event(stream)
    name, call = FAILURES[what]
    accelerator.failing.add(name)
    with pytest.raises(Unavailable, match=r"device 1 does not answer: .* illegal memory access") as error:
        call(devices, stream, event)
    assert error.value.reason == "DEVICE_FAILED"


def test_a_stream_whose_device_failed_is_gone_all_the_same() -> None:
    accelerator = Accelerator()
    devices = devices_of(accelerator)
    stream = devices.create_stream(0)
    accelerator.failing.add("synchronize")
    with pytest.raises(Unavailable):
        devices.destroy_stream(stream)
    devices.destroy_stream(stream)
    with pytest.raises(NotFound):
        devices.record_event(stream)


def test_questions_to_a_device_are_answered_and_other_errors_pass() -> None:
    assert ask_device(1, lambda device: device + 1) == 2
    with pytest.raises(ZeroDivisionError):
        ask_device(0, lambda device: 1 // device)
    check_device(0, 1)
    with pytest.raises(NotFound, match="device 0 does not exist; there are 0"):
        check_device(0, 0)
