"""Contexts are independent: work on one device changes nothing on another."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer
from plugins.verification.copy_check import allocate, read
from plugins.verification.outcome import CheckSkipped, require

_SIZE_BYTES = 1 << 16


def contexts(backend: Backend) -> str:
    """Each device holds a pattern of its own while every device in turn writes, copies and frees."""
    count = len(backend.devices.list_devices())
    if count < 2:
        raise CheckSkipped(f"it takes two devices; there is {count}")
    patterns = [np.random.default_rng(index).bytes(_SIZE_BYTES) for index in range(count)]
    with ExitStack() as stack:
        kept = [allocate(stack, backend, _SIZE_BYTES, index) for index in range(count)]
        for index, buffer in enumerate(kept):
            _require_on_device(backend, buffer, index)
            backend.memory.copy(patterns[index], buffer)
        _require_kept(backend, kept, patterns, "writing to each device once")
        for worker in range(count):
            _work(backend, worker)
            _require_kept(backend, kept, patterns, f"work on device {worker}")
    return f"{count} devices, each at work while the others kept {_SIZE_BYTES} bytes"


def _work(backend: Backend, device: int) -> None:
    """Fill, copy, free and reuse memory of one device, on a stream of its own."""
    stream = backend.devices.create_stream(device)
    for filler in (b"\x00", b"\xff"):
        with ExitStack() as stack:
            first, second = (allocate(stack, backend, _SIZE_BYTES, device) for _ in range(2))
            backend.memory.copy(filler * _SIZE_BYTES, first)
            backend.memory.copy(first, second)
            wrong = read(backend, second) != filler * _SIZE_BYTES
            require(not wrong, f"device {device} does not hold what was written to it")
    backend.devices.synchronize(device, stream)
    backend.devices.destroy_stream(stream)
    backend.devices.synchronize(device)


def _require_kept(backend: Backend, kept: list[Buffer], patterns: list[bytes], after: str) -> None:
    for index, (buffer, pattern) in enumerate(zip(kept, patterns, strict=True)):
        require(read(backend, buffer) == pattern, f"{after} changed a buffer of device {index}")


def _require_on_device(backend: Backend, buffer: Buffer, device: int) -> None:
    require(buffer.device == device, f"a buffer for device {device} says that it is on {buffer.device}")
    place: Any = getattr(buffer.tensor, "device", None)
    if backend.operators is None or place is None:
        return
    wanted = backend.operators.torch_device(device)
    require(place == wanted, f"a buffer for device {device}, which is {wanted}, lies on {place}")
