"""What is checked of a started back end before any model. Each check returns a detail, or raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from meshkit.errors import NotFound
from plugins.sdk.backend import Backend
from plugins.sdk.device import PHYSICAL_COUNT, DeviceProperties
from plugins.sdk.self_test import run_self_test
from plugins.verification.arrays import FLOAT_DTYPES, decode, encode
from plugins.verification.context_check import contexts
from plugins.verification.copy_check import copies
from plugins.verification.outcome import CheckFailed, CheckSkipped, require

_PLACEHOLDERS = frozenset({"unknown", "device", "default", "none", "n/a", "todo"})
_IDENTITIES = ("uuid", "pci_bus_id", "serial")
"""Attributes that no two devices share, where a vendor reports them."""
_CALLS = 3
_TOLERANCE = {"float64": 1e-9, "float32": 1e-2, "float16": 2e-2, "bfloat16": 5e-2}
"""Of the largest value. Wide on purpose (a chip may round float32 to 10 bits): precision is conformance's
matter; here a device that computes something else is to be found.
"""


def device_count(backend: Backend) -> str:
    """Every listed device can be used, numbered from 0, and there is none beyond."""
    listed = [device.index for device in backend.devices.list_devices()]
    count = len(listed)
    require(count > 0, "the plugin lists no device")
    require(listed == list(range(count)), f"devices are numbered from 0; the plugin lists {listed}")
    for index in listed:
        try:
            backend.devices.properties(index)
            backend.memory.free(backend.memory.allocate((16,), "uint8", index))
            backend.devices.synchronize(index)
        except Exception as error:
            raise CheckFailed(
                f"{count} devices are listed, but device {index} cannot be used: {error}"
            ) from error
    try:
        backend.devices.properties(count)
    except NotFound:
        return f"{count}, each usable"
    raise CheckFailed(f"{count} devices are listed, but device {count} answers too")


def physical_count(backend: Backend) -> str:
    """As many devices as the driver has, and no device twice."""
    listed = _listed(backend)
    if backend.capabilities().emulated:
        raise CheckSkipped(f"the chip is emulated: {len(listed)} devices, none of them physical")
    for key in _IDENTITIES:
        seen = Counter(value for device in listed if (value := device.attributes.get(key)))
        twice = [value for value, times in seen.items() if times > 1]
        require(not twice, f"several devices have the {key} {', '.join(twice)}: one device is listed twice")
    told = {device.attributes.get(PHYSICAL_COUNT, "") for device in listed}
    if told == {""}:
        raise CheckSkipped(f"the plugin's properties hold no {PHYSICAL_COUNT} to compare with")
    require(
        told == {str(len(listed))}, f"{len(listed)} devices are listed; {PHYSICAL_COUNT} is {_join(told)}"
    )
    return f"{len(listed)} listed, {len(listed)} physical"


def properties(backend: Backend) -> str:
    """Properties were read from a device: no zeros, no defaults, no contradictions, the same when read
    again.
    """
    for listed in _listed(backend):
        seen = backend.devices.properties(listed.index)
        where = f"device {listed.index}"
        require(seen.index == listed.index, f"{where} says that it is device {seen.index}")
        _require_real(seen, where)
        same = (seen.name, seen.memory_total_bytes) == (listed.name, listed.memory_total_bytes)
        require(same, f"{where} is {listed.name}, {listed.memory_total_bytes} bytes in the list, but "
                f"{seen.name}, {seen.memory_total_bytes} bytes by itself")  # fmt: skip
        stats = backend.memory.stats(listed.index)
        require(
            0 <= stats.free_bytes <= stats.total_bytes and stats.total_bytes > 0,
            f"{where}: memory statistics say {stats.free_bytes} bytes free of {stats.total_bytes}",
        )
    names = Counter(device.name for device in _listed(backend))
    return ", ".join(f"{times} × {name}" for name, times in names.items())


def same_answer(backend: Backend) -> str:
    """The same operator on the same numbers gives the same bytes on every device, at every call, and they
    are the right ones to a few bits.
    """
    listed, operators = _listed(backend), backend.operators
    if operators is None:
        raise CheckSkipped("the plugin has no operators: it brings a runner of its own")
    dtype = next((name for name in FLOAT_DTYPES if name in backend.capabilities().compute_dtypes), None)
    if dtype is None:
        raise CheckSkipped("the chip computes in no float dtype")
    values = np.random.default_rng(11).standard_normal((2, 16, 64)).astype(np.float32)
    x, weight = (encode(part, dtype) for part in values)
    expected = decode(x) @ decode(weight).T
    answers: dict[bytes, list[int]] = {}
    for device in [each.index for each in listed for _ in range(_CALLS)]:
        inputs = {"x": backend.memory.upload(x, device), "weight": backend.memory.upload(weight, device)}
        answer = backend.memory.download(operators.run("linear", inputs, {})[0])
        require(answer.shape == expected.shape, f"linear on device {device} has shape {list(answer.shape)}")
        answers.setdefault(answer.data, []).append(device)
        error = float(np.abs(decode(answer) - expected).max() / np.abs(expected).max())
        require(
            error <= _TOLERANCE[dtype],  # a NaN is not
            f"linear in {dtype} on device {device} is off by {error:.2g} of the largest value",
        )
    groups = " | ".join(_join(map(str, sorted(set(devices)))) for devices in answers.values())
    require(len(answers) == 1, f"linear in {dtype}: {len(answers)} different answers, by devices {groups}")
    return f"linear in {dtype}: one answer from {len(listed)} devices, {_CALLS} calls each"


def self_test(backend: Backend) -> str:
    """The SDK's own test, on every device."""
    done, failures = 0, []
    for device in _listed(backend):
        checks = run_self_test(backend, device.index)
        done += len(checks)
        failures += [
            f"device {device.index}: {each.name}: {each.detail}" for each in checks if not each.passed
        ]
    require(not failures, "; ".join(failures))
    return f"{done} checks"


DEVICE_CHECKS: Mapping[str, Callable[[Backend], str]] = {
    "device_count": device_count,
    "physical_count": physical_count,
    "properties": properties,
    "same_answer": same_answer,
    "copies": copies,
    "contexts": contexts,
    "self_test": self_test,
}
"""By name, in the order in which they are run."""


def _listed(backend: Backend) -> list[DeviceProperties]:
    listed = list(backend.devices.list_devices())
    if not listed:
        raise CheckSkipped("the plugin lists no device")
    return listed


def _require_real(seen: DeviceProperties, where: str) -> None:
    name = seen.name.strip()
    real = bool(name) and name.lower() not in _PLACEHOLDERS
    require(real, f"{where}: name {seen.name!r} was not read from a device")
    require(seen.memory_total_bytes > 0, f"{where} has {seen.memory_total_bytes} bytes of memory")
    require(seen.compute_units > 0, f"{where} has {seen.compute_units} compute units")
    require(
        0 <= seen.memory_free_bytes <= seen.memory_total_bytes,
        f"{where}: {seen.memory_free_bytes} bytes are free of {seen.memory_total_bytes}",
    )


def _join(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "nothing"
