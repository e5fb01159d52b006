"""The plugin's duties over the stand-in: devices, memory, report, and what of conformance needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshkit.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from plugins.conformance.kit import run_conformance
from plugins.cuda.devices import CudaDevices
from plugins.cuda.memory import CudaMemory
from plugins.cuda.plugin import CudaBackend
from plugins.sdk import registry
from plugins.sdk.backend import RunnerContext
from plugins.sdk.capabilities import Coverage
from plugins.sdk.catalogue import CATALOGUE
from plugins.sdk.registry import check_versions
from plugins.sdk.report_checks import find_contradictions
from plugins.sdk.self_test import run_self_test
from tests.unit.cuda_plugin.stand_in import StandInCuda, Stream, runtime_of

BACKEND = CudaBackend(runtime_of())


@pytest.fixture
def _a_device_with_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's allocator says that it is out of memory in another way than CUDA's."""
    zeros = torch.zeros

    def limited(size: Any, **rest: Any) -> Any:
        if isinstance(size, int) and size > 1 << 40:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        return zeros(size, **rest)

    monkeypatch.setattr(torch, "zeros", limited)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {"cuda-on-host": lambda options: BACKEND})
    return iter(())


@pytest.mark.usefixtures("_registered", "_a_device_with_an_end")
@pytest.mark.parametrize("area", ["capabilities", "device", "memory"])
def test_conformance_passes_over_the_stand_in(area: str) -> None:
    report = run_conformance("cuda-on-host", only=f"{area}/")
    assert len(report.results) >= 5
    assert report.failures == []


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", [each.name for each in BACKEND.capabilities().operators])
def test_conformance_of_an_operator_passes_with_torch_on_the_host(name: str) -> None:
    dtype = "bfloat16" if "bfloat16" in CATALOGUE[name].dtypes else "float32"
    report = run_conformance("cuda-on-host", only=f"operators/{name}/{dtype}/", quick=True)
    assert report.failures == []
    assert bool(report.coverage.tried) is (name != "qkv_rotary")


@pytest.mark.nightly
@pytest.mark.usefixtures("_registered")
def test_conformance_of_all_operators_passes_in_every_dtype_and_shape_class() -> None:
    report = run_conformance("cuda-on-host", only="operators/")
    assert report.failures == []
    assert {dtype for _, dtype, _ in report.coverage.tried} == {"bfloat16", "float16", "float32"}


def test_the_report_claims_what_was_tried_and_no_graphs() -> None:
    report = BACKEND.capabilities()
    assert find_contradictions(report, device_count=2) == []
    assert not report.emulated
    assert report.compute_dtypes == report.kv_cache_dtypes == ("bfloat16", "float16", "float32")
    assert report.kv_layout == "layer_kv_page_token_head_value"
    assert report.quantization_formats == ("w8a8", "w4a16")
    assert report.accumulation_dtype == "float32"
    assert not report.graph_capture
    assert report.preferred_chunk_tokens == 4096, "24 GiB"
    reference = [each.name for each in report.operators if each.coverage is Coverage.REFERENCE]
    assert reference == ["qkv_rotary"]


def test_an_older_gpu_has_no_bfloat16() -> None:
    report = CudaBackend(runtime_of(StandInCuda(capability=(7, 5)))).capabilities()
    assert report.compute_dtypes == ("float16", "float32")


def test_versions_are_those_of_cuda_and_nccl_and_in_range() -> None:
    info = BACKEND.info()
    check_versions(info)
    assert (info.runtime_version, info.collective_library_version) == ("12.8", "2.27.3")
    assert BACKEND.collectives is not None
    assert BACKEND.collectives.library == f"NCCL 2.27.3 (torch {torch.__version__})"


def test_a_torch_without_nccl_works_alone() -> None:
    backend = CudaBackend(runtime_of(nccl_version=""))
    check_versions(backend.info())
    assert backend.collectives is None
    assert backend.capabilities().collectives == ()


def test_what_was_chosen_is_an_attribute_of_the_devices() -> None:
    attributes = BACKEND.devices.properties(1).attributes
    assert attributes["attention_kernels"] == attributes["norm_kernels"] == "torch"
    assert attributes["compute_capability"] == "8.9"


@pytest.mark.parametrize("device", [0, 1])
def test_the_self_test_passes_on_each_device(device: int) -> None:
    assert [check.name for check in run_self_test(BACKEND, device) if not check.passed] == []


def test_work_runs_once_without_gradients_and_its_errors_pass() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not BACKEND.execute_runnable(lambda: (weight * 2).requires_grad)
    with pytest.raises(ZeroDivisionError):
        BACKEND.execute_runnable(lambda: 1 // 0)


def test_the_runners_device_is_the_one_that_is_synchronised() -> None:
    cuda = StandInCuda()
    backend = CudaBackend(runtime_of(cuda))
    cuda.synchronized.clear()
    assert backend.create_runner(RunnerContext(device=1)) is None
    backend.synchronize()
    assert cuda.synchronized == [1]
    with pytest.raises(NotFound, match="device 2 does not exist; there are 2"):
        backend.create_runner(RunnerContext(device=2))


def test_a_destroyed_stream_was_waited_for_and_takes_its_events_along() -> None:
    devices = CudaDevices(runtime_of())
    stream, other = devices.create_stream(0), devices.create_stream(1)
    event = devices.record_event(stream)
    devices.wait_event(other, event)
    kept: Stream = devices._streams[stream][1]
    assert devices._streams[other][1].waited == [devices._events[event][1]]
    for _ in range(2):
        devices.destroy_stream(stream)
    assert kept.synchronized == 1
    with pytest.raises(NotFound, match="event"):
        devices.wait_event(other, event)
    with pytest.raises(NotFound, match="stream"):
        devices.synchronize(0, stream)


@pytest.mark.parametrize("call", ["get_device_properties", "mem_get_info", "synchronize"])
def test_a_device_that_failed_is_unavailable(call: str) -> None:
    devices = CudaDevices(runtime_of(StandInCuda(failing=frozenset({call}))))
    with pytest.raises(Unavailable, match="illegal memory access") as error:
        (devices.synchronize if call == "synchronize" else devices.properties)(0)
    assert error.value.reason == "DEVICE_FAILED"


@pytest.mark.usefixtures("_a_device_with_an_end")
def test_a_full_device_gives_torchs_reserve_back_before_it_refuses() -> None:
    emptied: list[str] = []
    cuda = StandInCuda()
    cuda.empty_cache = lambda: emptied.append("once")  # type: ignore[method-assign]
    with pytest.raises(ResourceExhausted, match="CUDA out of memory") as error:
        CudaMemory(runtime_of(cuda)).allocate((1 << 50,), "uint8", 0)
    assert error.value.reason == "OUT_OF_MEMORY"
    assert len(emptied) == 2


def test_statistics_count_what_torch_keeps_for_reuse_as_pooled() -> None:
    memory = CudaMemory(runtime_of())
    memory.free(memory.allocate((512,), "uint8", 0))
    assert memory.stats(0).pooled_bytes == 512 + 96


def test_copies_of_other_sizes_are_refused_and_freed_buffers_are_gone() -> None:
    memory = CudaMemory(runtime_of())
    buffer = memory.allocate((3, 5), "uint8", 1)
    with pytest.raises(InvalidArgument, match="14 bytes does not fit"):
        memory.copy(bytes(14), buffer)
    memory.free(buffer)
    with pytest.raises(NotFound, match="not live"):
        memory.copy(bytes(15), buffer)


def test_host_memory_is_pinned_where_it_pays_and_not_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def zeros(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory
        asked.append(size)
        if len(asked) > 1:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return torch.empty(size, dtype=dtype)

    memory = CudaMemory(runtime_of(pins=True))
    monkeypatch.setattr("plugins.cuda.memory.torch.zeros", zeros)
    for size in (1 << 20, 100, 65 << 20, 2 << 20, 3 << 20):
        memory.allocate((size,), "uint8")
    assert asked == [1 << 20, 2 << 20], "small and very large blocks are not, and after a refusal none is"
    assert caplog.text.count("cannot be pinned") == 1


def test_a_whole_report_is_the_same_at_every_call() -> None:
    assert BACKEND.capabilities() is BACKEND.capabilities()
    assert replace(BACKEND.capabilities()).to_proto() == BACKEND.capabilities().to_proto()
