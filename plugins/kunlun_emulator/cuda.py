"""Stand-in for `torch.cuda`, as which the chip appears: devices, properties, memory, streams, events."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plugins.kunlun_emulator.limits import XpuError, require
from plugins.sdk.host_limits import read_memory_limit

NODE_DEVICES = 8
"""Chips of one P800 host."""
CLUSTERS = 12
CAPACITY_BYTES = 98304 << 20


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` gives, as seen on a P800."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 8
    minor: int = 6


class Event:
    """Work on a host has ended when its call returned: an event is always reached."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """A queue of work on one device."""

    _ids = itertools.count()

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.stream_id = next(self._ids)

    def record_event(self) -> Event:
        """The present end of the queue."""
        return Event()

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class EmulatedCuda:
    """The functions of `torch.cuda` that the plugin calls. Devices as XPU_VISIBLE_DEVICES says, from 0."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        visible = environment.get("XPU_VISIBLE_DEVICES")
        ids = range(NODE_DEVICES) if visible is None else [int(part) for part in visible.split(",") if part]
        # As the runtime does: a list ends at the first id that is not there.
        self._count = len(list(itertools.takewhile(lambda index: 0 <= index < NODE_DEVICES, ids)))

    def is_available(self) -> bool:
        """Whether any device is visible."""
        return self._count > 0

    def device_count(self) -> int:
        """Visible devices."""
        return self._count

    def get_device_properties(self, device: int) -> DeviceProperties:
        """Memory is the host's where that is less than a P800's."""
        self._check(device)
        return DeviceProperties("KL3 (emulated)", self.mem_get_info(device)[1], CLUSTERS)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes."""
        self._check(device)
        limit = read_memory_limit()
        total = min(limit.total_bytes, CAPACITY_BYTES)
        return min(limit.free_bytes, total), total

    def synchronize(self, device: int | None = None) -> None:
        """Nothing to wait for."""
        self._check(device or 0)

    def current_stream(self, device: int | None = None) -> Stream:
        """The default stream."""
        self._check(device or 0)
        return Stream(device or 0)

    def Stream(self, device: int = 0) -> Stream:  # noqa: N802 - torch's name
        """A new stream."""
        self._check(device)
        return Stream(device)

    @contextlib.contextmanager
    def device(self, device: int) -> Iterator[None]:
        """The current device for a while."""
        self._check(device)
        yield

    def zeros(self, nbytes: int, device: int) -> Tensor:
        """Zeroed device memory, uint8. A host's zero pages are taken when they are written."""
        free, _ = self.mem_get_info(device)
        if nbytes > free:
            raise torch.OutOfMemoryError(f"{nbytes} bytes wanted, {free} are free")
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))

    def _check(self, device: int) -> None:
        require(0 <= device < self._count, f"invalid device ordinal {device}; there are {self._count}")


__all__ = ["EmulatedCuda", "Event", "Stream", "XpuError"]
