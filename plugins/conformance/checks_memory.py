"""Second duty: copies are bit-exact, buffers are their own, freeing is idempotent, statistics add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from plugins.conformance.recorder import Recorder, require, require_error
from plugins.conformance.report import Fault
from plugins.sdk.backend import Backend
from plugins.sdk.memory import Buffer, MemoryManager
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor, tensor_bytes

REPEATS = 10
_SEED = 20240229
_SIZES_BYTES = (1, 3, 64, 511, 4096, 65537, 1 << 20)
"""A byte, odd sizes, a page, and beyond each by a little."""
_MORE_THAN_ANY_CHIP = 1 << 50
_FILLER = 0xA5


def check_memory(backend: Backend, recorder: Recorder) -> None:
    """Run all checks of memory management, on device 0."""
    checks = {
        "memory/copy": _copy,
        "memory/copy_forms": _copy_forms,
        "memory/values": _values,
        "memory/scalars": _scalars,
        "memory/buffers_do_not_overlap": _no_overlap,
        "memory/devices_are_independent": _devices_are_independent,
        "memory/zeroed": _zeroed,
        "memory/free_is_idempotent": _free_is_idempotent,
        "memory/stats": _stats,
        "memory/refusals": _refusals,
        "memory/negative_size": _negative_size,
    }
    named = {name: partial(_with_devices, check, backend) for name, check in checks.items()}
    recorder.run_all({**named, "memory/views": partial(_views, backend)})


def _with_devices(check: Callable[[MemoryManager, int], str], backend: Backend) -> str:
    return check(backend.memory, len(backend.devices.list_devices()))


def _random_bytes(count: int, seed: int = _SEED) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size=count, dtype=np.uint8).tobytes()


def _allocate(
    stack: ExitStack, memory: MemoryManager, nbytes: int, device: int | None = 0, *, zeroed: bool = False
) -> Buffer:
    """A buffer of bytes that the stack frees, the last one first."""
    buffer = memory.allocate((nbytes,), "uint8", device, zeroed=zeroed)
    stack.callback(memory.free, buffer)
    return buffer


def _read(memory: MemoryManager, buffer: Buffer) -> bytes:
    received = bytearray(buffer.nbytes)
    memory.copy(buffer, received)
    return bytes(received)


def _differing_bits(sent: bytes, received: bytes) -> int:
    pair = (np.frombuffer(part, dtype=np.uint8) for part in (sent, received))
    return int(np.unpackbits(np.bitwise_xor(*pair)).sum())


def _copy(memory: MemoryManager, devices: int) -> str:
    """Host to device to device to host memory to host: every bit of every size comes back."""
    for device in range(devices):
        for size in _SIZES_BYTES if device == 0 else _SIZES_BYTES[:4]:
            sent = _random_bytes(size)
            with ExitStack() as stack:
                places = [_allocate(stack, memory, size, place) for place in (device, device, None)]
                memory.copy(sent, places[0])
                memory.copy(places[0], places[1])
                memory.copy(places[1], places[2])
                for buffer in places:
                    wrong = _differing_bits(sent, _read(memory, buffer))
                    require(
                        wrong == 0,
                        Fault.WRONG_RESULT,
                        f"{size} bytes by device {device}: {wrong} bits differ after a copy",
                    )
    return f"sizes of {_SIZES_BYTES[0]} to {_SIZES_BYTES[-1]} bytes on {devices} devices"


def _copy_forms(memory: MemoryManager, devices: int) -> str:
    """A copy between different forms is refused, and nothing is written."""
    del devices
    with ExitStack() as stack:
        small, large = _allocate(stack, memory, 64), _allocate(stack, memory, 128)
        sent = _random_bytes(128)
        memory.copy(sent, large)
        require_error(InvalidArgument, lambda: memory.copy(small, large), "a copy of 64 bytes into 128")
        require_error(InvalidArgument, lambda: memory.copy(sent[:64], large), "a copy of 64 bytes into 128")
        require(_read(memory, large) == sent, Fault.OUT_OF_BOUNDS_WRITE, "a refused copy wrote")
    return "64 into 128 bytes refused"


def _values(memory: MemoryManager, devices: int) -> str:
    """Values of every dtype come back from the framework's tensors as they went."""
    del devices
    for shape in ((1,), (3, 5), (0, 4)):
        _round_trip(memory, shape)
    return f"{len(DTYPE_BYTES)} dtypes"


def _scalars(memory: MemoryManager, devices: int) -> str:
    """A tensor without dimensions keeps none."""
    del devices
    _round_trip(memory, ())
    return f"{len(DTYPE_BYTES)} dtypes"


def _round_trip(memory: MemoryManager, shape: tuple[int, ...]) -> None:
    for dtype in DTYPE_BYTES:
        size = tensor_bytes(shape, dtype)
        data = _random_bytes(size) if dtype != "bool" else bytes(index % 2 for index in range(size))
        value = HostTensor(dtype, shape, data)
        received = memory.download(memory.upload(value, 0))
        require(
            received == value,
            Fault.WRONG_RESULT,
            f"a {dtype} tensor of shape {list(shape)} came back as {received.dtype} {list(received.shape)}"
            f"{'' if received.data == value.data else ' with other bytes'}",
        )


def _no_overlap(memory: MemoryManager, devices: int) -> str:
    """Writing one buffer leaves its neighbours alone."""
    del devices
    _write_all_then_read(memory, [(size, 0) for size in (100, 512, 513, 4096)])
    return "4 buffers"


def _devices_are_independent(memory: MemoryManager, devices: int) -> str:
    """Equal buffers on all devices, each written with bytes of its own: no device sees another's."""
    _write_all_then_read(memory, [(4096, device) for device in range(devices)])
    return f"{devices} devices"


def _write_all_then_read(memory: MemoryManager, places: Sequence[tuple[int, int]]) -> None:
    """Buffers of (bytes, device); all are written before the first is read."""
    with ExitStack() as stack:
        buffers = [_allocate(stack, memory, size, device) for size, device in places]
        sent = [_random_bytes(buffer.nbytes, seed) for seed, buffer in enumerate(buffers)]
        for data, buffer in zip(sent, buffers, strict=True):
            memory.copy(data, buffer)
        for data, buffer in zip(sent, buffers, strict=True):
            require(
                _read(memory, buffer) == data,
                Fault.OUT_OF_BOUNDS_WRITE,
                f"{buffer.nbytes} bytes on device {buffer.device} were changed by a write to another buffer",
            )


def _zeroed(memory: MemoryManager, devices: int) -> str:
    """Zeroed memory is zero even after its place held something else."""
    del devices
    for _ in range(3):
        with ExitStack() as stack:
            buffer = _allocate(stack, memory, 4096, zeroed=True)
            require(
                _read(memory, buffer) == bytes(4096), Fault.WRONG_RESULT, "zeroed memory holds other bytes"
            )
            memory.copy(b"\xff" * 4096, buffer)
    return "3 times 4096 bytes"


def _free_is_idempotent(memory: MemoryManager, devices: int) -> str:
    """Freed ten times is freed once; what is freed can be used no more."""
    del devices
    with ExitStack() as stack:
        kept = _allocate(stack, memory, 4096)
        sent = _random_bytes(4096)
        memory.copy(sent, kept)
        before = memory.stats(0).allocated_bytes
        buffer = memory.allocate((4096,), "uint8", 0)
        for _ in range(REPEATS):
            memory.free(buffer)
        after = memory.stats(0).allocated_bytes
        require(
            after == before,
            Fault.WRONG_RESULT,
            f"{before} bytes allocated, then one buffer freed {REPEATS} times: {after}",
        )
        require_error(NotFound, lambda: memory.copy(sent, buffer), "a copy into a freed buffer")
        require(_read(memory, kept) == sent, Fault.OUT_OF_BOUNDS_WRITE, "freeing a buffer changed another")
    return f"freed {REPEATS} times"


def _stats(memory: MemoryManager, devices: int) -> str:
    """What is allocated is counted, and comes off the count when it is freed."""
    del devices
    before = memory.stats(0)
    with ExitStack() as stack:
        sizes = (1000, 4096, 1 << 20)
        for size in sizes:
            _allocate(stack, memory, size)
        during = memory.stats(0)
        grown = during.allocated_bytes - before.allocated_bytes
        told = f"{sum(sizes)} bytes allocated, the count grew by {grown}"
        require(grown >= sum(sizes), Fault.WRONG_RESULT, told)
        told = f"the peak is below what is allocated: {during}"
        require(during.peak_allocated_bytes >= during.allocated_bytes, Fault.CONTRADICTION, told)
    after = memory.stats(0)
    require(
        after.allocated_bytes == before.allocated_bytes,
        Fault.WRONG_RESULT,
        f"{before.allocated_bytes} bytes allocated, then as much again freed: {after.allocated_bytes}",
    )
    require(
        after.peak_allocated_bytes >= during.peak_allocated_bytes, Fault.CONTRADICTION, "the peak has fallen"
    )
    for stats in (before, during, after):
        sane = 0 <= stats.free_bytes <= stats.total_bytes and stats.pooled_bytes >= 0
        require(sane, Fault.CONTRADICTION, f"{stats}")
    return f"{after.free_bytes} of {after.total_bytes} bytes free"


def _refusals(memory: MemoryManager, devices: int) -> str:
    """Too much, a device that is not there, and forms that make no sense."""
    too_much = partial(memory.allocate, (_MORE_THAN_ANY_CHIP,), "uint8", 0)
    require_error(ResourceExhausted, too_much, f"{_MORE_THAN_ANY_CHIP} bytes")
    require_error(NotFound, partial(memory.allocate, (1,), "uint8", devices), f"memory of device {devices}")
    require_error(InvalidArgument, partial(memory.allocate, (1,), "float7", 0), "an unknown dtype")
    require_error(NotFound, partial(memory.stats, devices), f"statistics of device {devices}")
    return "4 refusals"


def _negative_size(memory: MemoryManager, devices: int) -> str:
    """A size below zero is a mistake of the caller, not an empty tensor."""
    del devices
    require_error(InvalidArgument, partial(memory.allocate, (-1,), "uint8", 0), "a negative size")
    return "refused"


def _views(backend: Backend) -> str:
    """A buffer's tensor lies over its memory: what is written on one side is there on the other."""
    memory = backend.memory
    for device in (0, None):
        where = "host memory" if device is None else f"device {device}"
        with ExitStack() as stack:
            buffer = _allocate(stack, memory, 4096, device)
            sent = _random_bytes(4096)
            memory.copy(sent, buffer)
            seen = memory.download(buffer.tensor).data
            told = f"{where}: what was copied into a buffer is not in its tensor"
            require(seen == sent, Fault.WRONG_RESULT, told)
            buffer.tensor[:] = _FILLER
            backend.synchronize()
            told = f"{where}: what was written to a buffer's tensor is not in the buffer: it is a copy"
            require(_read(memory, buffer) == bytes([_FILLER]) * 4096, Fault.WRONG_RESULT, told)
    return "4096 bytes, both ways, of a device and of the host"
