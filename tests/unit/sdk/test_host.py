"""The host as a device: limits read from control groups, memory pooled, copies exact."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from plugins.sdk.backend import PluginInfo
from plugins.sdk.device import PHYSICAL_COUNT
from plugins.sdk.host import HostDevices, HostMemory
from plugins.sdk.host_limits import read_memory_limit
from plugins.sdk.self_test import run_self_test
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor
from tests.unit.sdk.toy_backend import ToyBackend

GIB = 1 << 30


def make_host(root: Path, files: dict[str, str]) -> Path:
    everything = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n", **files}
    for name, text in everything.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def test_without_control_groups_the_limit_is_the_hosts_memory(tmp_path: Path) -> None:
    limit = read_memory_limit(make_host(tmp_path, {}))
    assert (limit.total_bytes, limit.free_bytes, limit.source) == (16 * GIB, 8 * GIB, "MemTotal")


def test_a_version_2_group_limits_memory_and_its_page_cache_counts_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod/box"
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    limit = read_memory_limit(make_host(tmp_path, files))
    assert (limit.total_bytes, limit.free_bytes) == (4 * GIB, 2 * GIB)


def test_an_ancestors_tighter_limit_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/pod/memory.current": "0\n",
    }
    assert read_memory_limit(make_host(tmp_path, files)).total_bytes == 2 * GIB


def test_a_version_1_group_seen_from_inside_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/host/path/that/is/not/mounted\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    limit = read_memory_limit(make_host(tmp_path, files))
    assert (limit.total_bytes, limit.free_bytes) == (3 * GIB, 2 * GIB)


def test_the_unlimited_value_of_version_1_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_memory_limit(make_host(tmp_path, files)).source == "MemTotal"


def test_the_real_hosts_properties_are_real() -> None:
    devices = HostDevices().list_devices()
    assert len(devices) == len(os.sched_getaffinity(0))
    device = devices[0]
    assert device.index == 0
    assert device.compute_units >= 1
    assert 0 < device.memory_free_bytes <= device.memory_total_bytes
    assert device.to_proto().memory_total_bytes == device.memory_total_bytes


def test_unknown_devices_streams_and_events_are_not_found() -> None:
    devices = HostDevices(count=1)
    stream = devices.create_stream(0)
    for call in (
        lambda: devices.properties(1),
        lambda: devices.create_stream(1),
        lambda: devices.record_event("stream-99"),
        lambda: devices.wait_event(stream, "event-99"),
        lambda: devices.synchronize(0, "stream-99"),
    ):
        with pytest.raises(NotFound):
            call()


def test_destroying_a_stream_twice_is_fine_and_ends_its_events() -> None:
    devices = HostDevices()
    first, second = devices.create_stream(0), devices.create_stream(0)
    event = devices.record_event(first)
    devices.wait_event(second, event)
    devices.destroy_stream(first)
    devices.destroy_stream(first)
    with pytest.raises(NotFound):
        devices.wait_event(second, event)


def test_devices_of_a_chosen_count_claim_no_physical_count() -> None:
    assert all(PHYSICAL_COUNT not in device.attributes for device in HostDevices(count=5).list_devices())
    told = {device.attributes[PHYSICAL_COUNT] for device in HostDevices().list_devices()}
    assert told == {str(len(HostDevices().list_devices()))}


def test_more_than_the_host_has_free_is_refused_before_it_is_promised() -> None:
    memory = HostMemory()
    for device in (None, 0):
        with pytest.raises(ResourceExhausted, match="bytes are free"):
            memory.allocate((1 << 50,), "uint8", device)


def test_freed_memory_is_reused_and_counted() -> None:
    memory = HostMemory()
    first = memory.allocate((8, 16), "float32", 0)
    assert memory.stats(0).allocated_bytes == 512
    memory.free(first)
    memory.free(first)
    stats = memory.stats(0)
    assert (stats.allocated_bytes, stats.pooled_bytes, stats.peak_allocated_bytes) == (0, 512, 512)
    second = memory.allocate((4, 16), "float64", 0)
    assert memory.stats(0).pooled_bytes == 0
    assert second.buffer_id != first.buffer_id


def test_zeroed_memory_is_zero_even_after_a_dirty_block_of_that_size() -> None:
    memory = HostMemory()
    dirty = memory.allocate((512,), "uint8", 0)
    memory.copy(b"\xff" * 512, dirty)
    memory.free(dirty)
    clean = memory.allocate((512,), "uint8", 0, zeroed=True)
    assert not clean.tensor.any()


def test_copies_are_bit_exact_in_every_direction_and_dtype() -> None:
    memory = HostMemory()
    for dtype, size in DTYPE_BYTES.items():
        sent = np.random.default_rng(1).integers(0, 2, 24 * size, dtype=np.uint8).tobytes()
        first, second = memory.allocate((2, 12), dtype), memory.allocate((2, 12), dtype, 0)
        received = bytearray(len(sent))
        memory.copy(sent, first)
        memory.copy(first, second)
        memory.copy(second, received)
        assert bytes(received) == sent, dtype
        held = memory.download(memory.upload(HostTensor(dtype, (2, 12), sent), 0))
        assert (held.dtype, held.shape, held.data) == (dtype, (2, 12), sent)


def test_copies_between_different_forms_and_dead_buffers_are_refused() -> None:
    memory = HostMemory()
    small, large = memory.allocate((2,), "float32"), memory.allocate((4,), "float32")
    with pytest.raises(InvalidArgument, match="destination"):
        memory.copy(small, large)
    with pytest.raises(InvalidArgument, match="3 bytes"):
        memory.copy(b"abc", small)
    memory.free(small)
    with pytest.raises(NotFound, match="not live"):
        memory.copy(small, bytearray(8))


def test_bad_forms_are_refused() -> None:
    memory = HostMemory(count=1)
    with pytest.raises(InvalidArgument, match="complex64"):
        memory.allocate((2,), "complex64")
    with pytest.raises(InvalidArgument, match="negative"):
        memory.allocate((2, -1), "float32")
    with pytest.raises(NotFound):
        memory.allocate((2,), "float32", 1)
    with pytest.raises(InvalidArgument, match="8 bytes, not 7"):
        HostTensor("float32", (2,), b"1234567")


class _SmallMemory(HostMemory):
    """Holds 1024 bytes, pooled ones included."""

    def _reserve(self, nbytes: int, device: int | None) -> object:
        if sum(self._allocated.values()) + self._pooled(device) + nbytes > 1024:
            raise MemoryError("1024 bytes in all")
        return super()._reserve(nbytes, device)


def test_a_full_device_drops_its_pool_before_it_refuses() -> None:
    memory = _SmallMemory()
    memory.free(memory.allocate((512,), "uint8", 0))
    memory.allocate((1024,), "uint8", 0)
    with pytest.raises(ResourceExhausted, match="512 bytes"):
        memory.allocate((1,), "uint8", 0)


def test_the_self_test_passes_on_a_well_device_and_names_a_sick_ones_fault() -> None:
    backend = ToyBackend(PluginInfo("toy", "1"))
    checks = run_self_test(backend, 0)
    assert [check.name for check in checks] == ["properties", "copy_round_trip", "streams_and_events"]
    assert all(check.passed for check in checks)

    class Corrupting(HostMemory):
        def _bytes_of(self, memory: object) -> memoryview:
            view = super()._bytes_of(memory)
            view[7] = (view[7] + 1) % 256
            return view

    backend._memory = Corrupting()
    sick = {check.name: check for check in run_self_test(backend, 0)}
    assert not sick["copy_round_trip"].passed
    assert "differ" in sick["copy_round_trip"].to_proto().detail
    with pytest.raises(NotFound):
        run_self_test(backend, 4)
