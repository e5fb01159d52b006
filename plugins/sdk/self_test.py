"""The minimal check of a device before any model: real properties, bit-exact copies, pooled reuse,
streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chipmesh.device.v1alpha1 import device_pb2
from plugins.sdk.backend import Backend
from plugins.sdk.tensors import HostTensor

_REPEATS = 10


@dataclass(frozen=True)
class SelfTestCheck:
    """One check and how it went."""

    name: str
    passed: bool
    detail: str
    duration_s: float

    def to_proto(self) -> device_pb2.SelfTestCheck:
        """The message of the device contract."""
        check = device_pb2.SelfTestCheck(name=self.name, passed=self.passed, detail=self.detail)
        check.duration.FromNanoseconds(int(self.duration_s * 1e9))
        return check


def run_self_test(backend: Backend, device: int) -> list[SelfTestCheck]:
    """Run every check that this plugin can be asked; a check that raises has failed, with the error as
    detail.

    Raises:
        NotFound: unknown device.
    """
    backend.devices.properties(device)
    checks: list[tuple[str, Callable[[Backend, int], tuple[bool, str]]]] = [
        ("properties", _properties),
        ("copy_round_trip", _copy_round_trip),
        ("streams_and_events", _streams_and_events),
    ]
    if backend.operators is not None:
        checks.append(("same_answer_same_operator", _same_answer))
    return [_run(name, check, backend, device) for name, check in checks]


def _run(
    name: str, check: Callable[[Backend, int], tuple[bool, str]], backend: Backend, device: int
) -> SelfTestCheck:
    start = time.monotonic()
    try:
        passed, detail = backend.execute_runnable(lambda: check(backend, device))
    except Exception as error:  # noqa: BLE001 - whatever a device raises is the outcome that is reported
        passed, detail = False, f"{type(error).__name__}: {error}"
    return SelfTestCheck(name, passed, detail, time.monotonic() - start)


def _properties(backend: Backend, device: int) -> tuple[bool, str]:
    seen = backend.devices.properties(device)
    real = (
        bool(seen.name) and seen.compute_units > 0 and 0 <= seen.memory_free_bytes <= seen.memory_total_bytes
    )
    return real and seen.memory_total_bytes > 0, (
        f"{seen.name}, {seen.compute_units} compute units, {seen.memory_free_bytes} of "
        f"{seen.memory_total_bytes} bytes free"
    )


def _copy_round_trip(backend: Backend, device: int) -> tuple[bool, str]:
    """Random bytes, NaN patterns among them, host -> device -> device -> host."""
    sent = np.random.default_rng(7).integers(0, 256, size=4096 * 4, dtype=np.uint8).tobytes()
    memory = backend.memory
    first, second = (memory.allocate((4096,), "float32", device) for _ in range(2))
    try:
        memory.copy(sent, first)
        memory.copy(first, second)
        received = bytearray(len(sent))
        memory.copy(second, received)
    finally:
        memory.free(first)
        memory.free(second)
    wrong = sum(a != b for a, b in zip(sent, received, strict=True))
    return wrong == 0, f"{len(sent)} bytes, {wrong} differ"


def _streams_and_events(backend: Backend, device: int) -> tuple[bool, str]:
    devices = backend.devices
    first, second = devices.create_stream(device), devices.create_stream(device)
    devices.wait_event(second, devices.record_event(first))
    devices.synchronize(device, second)
    devices.synchronize(device)
    devices.destroy_stream(first)
    devices.destroy_stream(second)
    return first != second, "two streams, one waited for the other"


def _same_answer(backend: Backend, device: int) -> tuple[bool, str]:
    operators = backend.operators
    if operators is None:
        return False, "the plugin has no operators"
    values = np.random.default_rng(11).standard_normal((2, 16, 64)).astype(np.float32)
    x, weight = (
        backend.memory.upload(HostTensor("float32", (16, 64), part.tobytes()), device) for part in values
    )
    outcomes = {
        backend.memory.download(operators.run("linear", {"x": x, "weight": weight}, {})[0]).data
        for _ in range(_REPEATS)
    }
    return len(outcomes) == 1, f"linear, {_REPEATS} calls, {len(outcomes)} different results"
