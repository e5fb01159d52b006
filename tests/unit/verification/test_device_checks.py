"""Each lie fails the check that is there for it, by name; a plugin that tells the truth passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plugins.cpu.memory import CpuMemory
from plugins.cpu.operators import CpuOperators
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.tensors import HostTensor
from plugins.verification.report import Check, Status
from plugins.verification.verify import check_devices
from tests.unit.verification.liars import (
    BitFlip,
    Empty,
    HonestBackend,
    HonestDevices,
    MixedContexts,
    OneHidden,
    OneTooMany,
    WithProperties,
    WrongPlace,
)


def outcomes(backend: HonestBackend | CpuBackend) -> dict[str, Check]:
    """The checks by name."""
    return {check.name: check for check in check_devices(backend)}


def test_the_truth_passes() -> None:
    found = outcomes(HonestBackend())
    assert {name: check.status.value for name, check in found.items()} == {
        "device_count": "PASS",
        "physical_count": "PASS",
        "properties": "PASS",
        "same_answer": "SKIP",
        "copies": "PASS",
        "contexts": "PASS",
        "self_test": "PASS",
    }


@pytest.mark.parametrize(
    ("make", "check", "words"),
    [
        (lambda: HonestBackend(OneTooMany()), "device_count", "device 2 cannot be used"),
        (lambda: HonestBackend(OneHidden()), "device_count", "device 1 answers too"),
        (lambda: HonestBackend(Empty()), "device_count", "lists no device"),
        (
            lambda: HonestBackend(HonestDevices(physical_device_count="8")),
            "physical_count",
            "2 devices are listed; physical_device_count is 8",
        ),
        (lambda: HonestBackend(HonestDevices(uuid="a1")), "physical_count", "uuid a1: one device is listed"),
        (lambda: HonestBackend(WithProperties(total=0, free=0)), "properties", "has 0 bytes of memory"),
        (lambda: HonestBackend(WithProperties(free=1 << 31)), "properties", "bytes are free of"),
        (lambda: HonestBackend(WithProperties(name="Unknown")), "properties", "'Unknown' was not read"),
        (lambda: HonestBackend(WithProperties(name="")), "properties", "'' was not read"),
        (
            lambda: HonestBackend(memory=BitFlip(count=2)),
            "copies",
            "host to device 0 and back to the host: 1 of 4097 bytes differ, the first at 4096",
        ),
        (lambda: HonestBackend(memory=MixedContexts(count=2)), "contexts", "changed a buffer of device 0"),
        (lambda: HonestBackend(memory=WrongPlace(count=2)), "contexts", "for device 1 says that it is on 0"),
    ],
)
def test_a_lie_fails_by_name(make: Callable[[], HonestBackend], check: str, words: str) -> None:
    found = outcomes(make())[check]
    assert found.status is Status.FAIL
    assert words in found.detail


def test_no_check_passes_where_there_is_no_device() -> None:
    assert not [check for check in check_devices(HonestBackend(Empty())) if check.status is Status.PASS]


def test_a_plugin_that_tells_no_physical_count_is_not_passed() -> None:
    check = outcomes(HonestBackend(WithProperties()))["physical_count"]
    assert check.status is Status.SKIP
    assert "physical_device_count" in check.detail


class OtherOnDeviceOne(CpuMemory):
    """The last element that device 1 gets is another one: a broken memory cell."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self._count = 2
        self._factor = factor

    def upload(self, value: HostTensor, device: int) -> Any:
        tensor = super().upload(value, device)
        if device == 1:
            tensor.view(-1)[-1] *= self._factor
        return tensor


def cpu_with_memory(memory: CpuMemory) -> CpuBackend:
    backend = CpuBackend(CpuOptions())
    backend._devices = HonestDevices()
    backend._memory = memory
    backend._operators = CpuOperators(memory)
    return backend


def test_devices_that_agree_pass() -> None:
    check = outcomes(cpu_with_memory(OtherOnDeviceOne(1)))["same_answer"]
    assert check.status is Status.PASS, check.detail


@pytest.mark.parametrize("factor", [-1, 0])
def test_a_device_that_answers_otherwise_is_found(factor: int) -> None:
    check = outcomes(cpu_with_memory(OtherOnDeviceOne(factor)))["same_answer"]
    assert check.status is Status.FAIL
    assert "2 different answers" in check.detail or "on device 1 is off by" in check.detail
