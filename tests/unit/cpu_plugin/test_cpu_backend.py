"""The cpu plugin as a whole: options, report, memory, self test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted
from plugins.cpu.memory import CpuMemory
from plugins.cpu.options import read_options
from plugins.sdk.backend import Backend, RunnerContext
from plugins.sdk.host_limits import usable_cpus
from plugins.sdk.registry import load_backend
from plugins.sdk.self_test import run_self_test
from plugins.sdk.tensors import DTYPE_BYTES, HostTensor


@pytest.fixture
def backend() -> Iterator[Backend]:
    threads = torch.get_num_threads()
    yield load_backend("cpu", {"threads": "1"})
    torch.set_num_threads(threads)


def test_threads_are_set_and_reported(backend: Backend) -> None:
    assert torch.get_num_threads() == 1
    assert backend.devices.properties(0).compute_units == 1
    assert read_options({}).threads is None


def test_there_are_as_many_devices_as_were_asked_for_else_one_for_each_processor() -> None:
    assert len(load_backend("cpu", {}).devices.list_devices()) == usable_cpus()
    assert len(load_backend("cpu", {"devices": "5"}).devices.list_devices()) == 5
    with pytest.raises(InvalidArgument, match="devices"):
        load_backend("cpu", {"devices": "0"})


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "4096", "²"])
def test_threads_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="threads") as caught:
        load_backend("cpu", {"threads": text})
    assert caught.value.field == "backend_options.threads"


def test_unknown_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="takes: threads") as caught:
        load_backend("cpu", {"turbo": "1"})
    assert caught.value.field == "backend_options.turbo"


def test_the_report_and_the_identity_are_real(backend: Backend) -> None:
    report = backend.capabilities()
    assert report == backend.capabilities()
    assert (report.chip, report.emulated) == ("cpu", False)
    assert (report.preferred_chunk_tokens, report.preferred_batch_size, tuple(report.page_sizes_tokens)) == (
        128,
        64,
        (),
    )
    info = backend.info()
    assert info.framework_version == torch.__version__
    assert "gloo" in info.collective_library_version
    assert backend.create_runner(RunnerContext()) is None


def test_the_self_test_passes(backend: Backend) -> None:
    checks = run_self_test(backend, 0)
    assert {check.name for check in checks} >= {"copy_round_trip", "same_answer_same_operator"}
    assert all(check.passed for check in checks), checks


def test_work_runs_without_gradients(backend: Backend) -> None:
    weight = torch.ones(2, requires_grad=True)
    assert backend.execute_runnable(lambda: (weight * 2).requires_grad) is False
    backend.synchronize()


def test_buffers_are_tensors_over_pooled_memory() -> None:
    memory = CpuMemory()
    buffer = memory.allocate((3, 4), "bfloat16", 0)
    assert buffer.tensor.shape == (3, 4)
    assert buffer.tensor.data_ptr() % 64 == 0
    memory.copy(b"\x80\x3f" * 12, buffer)
    assert buffer.tensor.float().eq(1.0).all()
    address = buffer.tensor.data_ptr()
    memory.free(buffer)
    assert memory.allocate((6,), "float32", 0).tensor.data_ptr() == address


def test_large_blocks_go_back_to_the_system() -> None:
    memory = CpuMemory()
    memory.free(memory.allocate((65 << 20,), "uint8", 0))
    stats = memory.stats(0)
    assert (stats.allocated_bytes, stats.pooled_bytes) == (0, 0)
    assert stats.peak_allocated_bytes >= 65 << 20


def test_more_than_the_host_has_is_refused_with_the_bytes() -> None:
    with pytest.raises(ResourceExhausted, match=f"{1 << 50} bytes cannot be allocated"):
        CpuMemory().allocate((1 << 50,), "uint8", 0)


def test_values_of_every_dtype_come_back_as_they_went() -> None:
    memory = CpuMemory()
    for dtype, size in DTYPE_BYTES.items():
        value = HostTensor(dtype, (2, 3), bytes([0, 1] * 3 * size))
        assert memory.download(memory.upload(value, 0)) == value
        scalar = HostTensor(dtype, (), bytes(size))
        assert memory.download(memory.upload(scalar, 0)) == scalar
        empty = HostTensor(dtype, (0, 4), b"")
        assert memory.download(memory.upload(empty, 0)) == empty
    with pytest.raises(NotFound):
        memory.upload(HostTensor("int8", (1,), b"a"), usable_cpus())
