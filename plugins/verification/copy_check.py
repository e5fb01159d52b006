"""Copies are bit-exact: host to device, device to device, device to host."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer
from plugins.verification.outcome import CheckSkipped, require

_SIZES_BYTES = (1, 3, 4097, 1 << 20)
"""A byte, an odd few, one more than a page, and enough for a transfer in parts."""


def copies(backend: Backend) -> str:
    """Random bytes, all patterns among them, over each device and from each device to the next."""
    count = len(backend.devices.list_devices())
    if not count:
        raise CheckSkipped("the plugin lists no device")
    random = np.random.default_rng(7)
    for device in range(count):
        for size in _SIZES_BYTES:
            sent = random.integers(0, 256, size=size, dtype=np.uint8).tobytes()
            _round_trip(backend, sent, device, (device + 1) % count)
    between = "and to the next device" if count > 1 else "on one device"
    return f"{len(_SIZES_BYTES)} sizes up to {_SIZES_BYTES[-1]} bytes, host and back, {between}"


def allocate(stack: ExitStack, backend: Backend, size: int, device: int) -> Buffer:
    """A buffer of bytes that is freed when `stack` closes."""
    buffer = backend.memory.allocate((size,), "uint8", device)
    stack.callback(backend.memory.free, buffer)
    return buffer


def read(backend: Backend, buffer: Buffer) -> bytes:
    """The bytes of a buffer."""
    received = bytearray(buffer.nbytes)
    backend.memory.copy(buffer, received)
    return bytes(received)


def _round_trip(backend: Backend, sent: bytes, device: int, following: int) -> None:
    with ExitStack() as stack:
        places = [allocate(stack, backend, len(sent), where) for where in (device, device, following)]
        names = (f"host to device {device}", f"within device {device}", f"device {device} to {following}")
        source: Buffer | bytes = sent
        for name, place in zip(names, places, strict=True):
            backend.memory.copy(source, place)
            _require_equal(sent, read(backend, place), f"{name} and back to the host")
            source = place
        _require_equal(sent, read(backend, places[0]), f"device {device}, after it was copied from")


def _require_equal(sent: bytes, received: bytes, what: str) -> None:
    if sent == received:
        return
    differ = np.flatnonzero(np.frombuffer(sent, np.uint8) != np.frombuffer(received, np.uint8))
    first = int(differ[0])
    require(
        False,
        f"{what}: {differ.size} of {len(sent)} bytes differ, the first at {first}: sent "
        f"0x{sent[first]:02x}, received 0x{received[first]:02x}",
    )
