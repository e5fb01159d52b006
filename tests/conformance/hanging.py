"""Back ends that hang at one place each, and what makes them installed packages that a process finds."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.cpu.collectives import GlooCollectives
from plugins.cpu.memory import CpuMemory
from plugins.cpu.options import CpuOptions
from plugins.cpu.plugin import CpuBackend
from plugins.sdk.backend import Backend
from plugins.sdk.memory import MemoryStats
from tests.conformance.liars import PlantedBackend

_NEVER = threading.Event()


class HangsInStats(CpuMemory):
    """Waits for a driver that does not answer."""

    def stats(self, device: int) -> MemoryStats:
        _NEVER.wait()
        return super().stats(device)


class HangsWithTheLock(CpuMemory):
    """A native call that keeps the interpreter's lock: no thread of Python runs any more."""

    def stats(self, device: int) -> MemoryStats:
        ctypes.PyDLL(None).pause()
        return super().stats(device)


class HangsInReduceScatter(GlooCollectives):
    """Comes through all_reduce and all_gather, and no further."""

    def reduce_scatter(self, name: str, tensor: Any, *, timeout_s: float | None = None) -> Any:
        _NEVER.wait()
        return super().reduce_scatter(name, tensor, timeout_s=timeout_s)


def at_start(options: Mapping[str, str]) -> Backend:
    """Never comes back from its factory."""
    _NEVER.wait()
    return CpuBackend(CpuOptions())


def in_memory(options: Mapping[str, str]) -> Backend:
    """Hangs in memory/free_is_idempotent, the first check that asks for statistics."""
    return PlantedBackend(memory=HangsInStats)


def with_the_lock(options: Mapping[str, str]) -> Backend:
    """Hangs as `in_memory`, and takes the whole interpreter with it."""
    return PlantedBackend(memory=HangsWithTheLock)


def in_ranks(options: Mapping[str, str]) -> Backend:
    """Hangs in one primitive, on both ranks."""
    backend = CpuBackend(CpuOptions(threads=1))
    backend._collectives = HangsInReduceScatter()
    return backend


def install(folder: Path) -> None:
    """Make the functions of this module entry points of a package that lies in `folder`."""
    info = folder / "hanging-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hanging\nVersion: 1.0\n")
    factories = (at_start, in_memory, with_the_lock, in_ranks)
    points = "".join(f"{each.__name__} = {__name__}:{each.__name__}\n" for each in factories)
    (info / "entry_points.txt").write_text(f"[chipmesh.device_plugins]\n{points}")
