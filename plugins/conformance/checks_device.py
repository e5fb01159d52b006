"""First duty: devices are there and real, streams and events live and die as the contract says."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from meshkit.errors import NotFound
from plugins.conformance.recorder import CheckFailed, Recorder, require, require_error
from plugins.conformance.report import Fault
from plugins.sdk.backend import Backend

REPEATS = 10
"""How often a call that the contract calls idempotent is made."""
_PLACEHOLDERS = frozenset({"unknown", "device", "default", "none", "n/a", "todo"})


def check_devices(backend: Backend, recorder: Recorder) -> None:
    """Run all checks of device management."""
    checks = {
        "device/count": _count,
        "device/properties": _properties,
        "device/streams_and_events": _streams_and_events,
        "device/destroy_is_idempotent": _destroy_is_idempotent,
        "device/synchronize": _synchronize,
        "device/execute_runnable": _execute_runnable,
    }
    recorder.run_all({name: partial(check, backend) for name, check in checks.items()})


def _count(backend: Backend) -> str:
    """Every device that is listed can be used, from 0 on, and none beyond the list."""
    devices, memory = backend.devices, backend.memory
    listed = [device.index for device in devices.list_devices()]
    require(
        listed == list(range(len(listed))), Fault.WRONG_COUNT, f"device ids run from 0; listed are {listed}"
    )
    for index in listed:
        try:
            devices.properties(index)
            memory.free(memory.allocate((16,), "uint8", index))
            devices.synchronize(index)
        except Exception as error:
            message = f"{len(listed)} devices are listed, but device {index} cannot be used: {error}"
            raise CheckFailed(Fault.WRONG_COUNT, message) from error
    beyond = len(listed)
    try:
        devices.properties(beyond)
    except NotFound:
        return f"{beyond} devices, each usable"
    raise CheckFailed(Fault.WRONG_COUNT, f"{beyond} devices are listed, but device {beyond} answers too")


def _properties(backend: Backend) -> str:
    """Properties are read from the device: no defaults, no contradictions."""
    names = set()
    for listed in backend.devices.list_devices():
        seen = backend.devices.properties(listed.index)
        where = f"device {listed.index}"
        name = seen.name.strip()
        require(
            bool(name) and name.lower() not in _PLACEHOLDERS,
            Fault.WRONG_RESULT,
            f"{where}: name {seen.name!r} was not read from a device",
        )
        require(seen.compute_units > 0, Fault.WRONG_RESULT, f"{where}: {seen.compute_units} compute units")
        require(
            0 <= seen.memory_free_bytes <= seen.memory_total_bytes and seen.memory_total_bytes > 0,
            Fault.WRONG_RESULT,
            f"{where}: {seen.memory_free_bytes} bytes free of {seen.memory_total_bytes}",
        )
        same = (seen.index, seen.name, seen.memory_total_bytes) == (
            listed.index,
            listed.name,
            listed.memory_total_bytes,
        )
        require(same, Fault.CONTRADICTION, f"{where}: list_devices says {listed}, properties says {seen}")
        names.add(name)
    return ", ".join(sorted(names))


def _streams_and_events(backend: Backend) -> str:
    """Ids are unique; events of a living stream are waited for; what is gone is NotFound."""
    devices = backend.devices
    with ExitStack() as stack:
        first, second = devices.create_stream(0), devices.create_stream(0)
        stack.callback(devices.destroy_stream, first)
        stack.callback(devices.destroy_stream, second)
        events = [devices.record_event(first) for _ in range(3)]
        ids = {first, second, *events}
        require(len(ids) == 5, Fault.CONTRADICTION, f"ids of 2 streams and 3 events are not unique: {ids}")
        for event in events:
            devices.wait_event(second, event)
        devices.synchronize(0, second)
        require_error(NotFound, lambda: devices.wait_event(second, "no-such-event"), "an unknown event")
        devices.destroy_stream(first)
        require_error(NotFound, lambda: devices.record_event(first), "an event on a destroyed stream")
        require_error(NotFound, lambda: devices.synchronize(0, first), "synchronising a destroyed stream")
        require_error(
            NotFound,
            lambda: devices.wait_event(second, events[0]),
            "waiting for an event of a destroyed stream",
        )
    return "2 streams, 3 events"


def _destroy_is_idempotent(backend: Backend) -> str:
    devices = backend.devices
    stream = devices.create_stream(0)
    for _ in range(REPEATS):
        devices.destroy_stream(stream)
    devices.destroy_stream("no-such-stream")
    return f"destroyed {REPEATS} times"


def _synchronize(backend: Backend) -> str:
    """The device, and the whole process; a device that does not exist is NotFound."""
    count = len(backend.devices.list_devices())
    for _ in range(REPEATS):
        backend.devices.synchronize(0)
        backend.synchronize()
    require_error(NotFound, lambda: backend.devices.synchronize(count), f"synchronising device {count}")
    return f"{REPEATS} times"


class _Raised(Exception):
    """Of a runnable: no plugin can know it."""


def _execute_runnable(backend: Backend) -> str:
    """Work runs once, its result comes back, and its exception passes as it is."""
    calls: list[object] = []
    wanted = object()

    def work() -> object:
        calls.append(wanted)
        return wanted

    def fail() -> None:
        raise _Raised

    result = backend.execute_runnable(work)
    require(len(calls) == 1, Fault.WRONG_BEHAVIOUR, f"the work ran {len(calls)} times")
    require(result is wanted, Fault.WRONG_RESULT, f"the work's result came back as {result!r}")
    try:
        backend.execute_runnable(fail)
    except _Raised:
        return "once, with its result or its exception"
    raise CheckFailed(Fault.WRONG_BEHAVIOUR, "an exception of the work was swallowed")
