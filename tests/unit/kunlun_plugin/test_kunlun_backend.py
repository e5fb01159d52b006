"""The backend as the framework sees it: report, devices, memory, collectives between ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshkit.errors import AlreadyExists, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted
from plugins.kunlun.collectives import XcclCollectives
from plugins.kunlun.plugin import KunlunBackend
from plugins.sdk.backend import RunnerContext
from plugins.sdk.registry import check_versions
from plugins.sdk.self_test import run_self_test
from tests.unit.kunlun_plugin.emulated import RUNTIME, runtime_with

BACKEND = KunlunBackend(RUNTIME)
WORLD = 2


def test_the_report_says_that_it_is_emulated_and_what_that_leaves_open() -> None:
    report = BACKEND.capabilities()
    assert report.emulated
    for unverified in ("device strings", "torch_xmlir", "unverified on hardware"):
        assert unverified in report.emulation_note
    assert report.compute_dtypes == report.kv_cache_dtypes == ("bfloat16", "float16", "float32")
    assert report.kv_layout == "layer_kv_page_head_token_value"
    assert report.page_sizes_tokens == (16, 64, 128)
    assert not report.graph_capture
    assert report.quantization_formats == ("w8a8",)
    attention = next(each for each in report.operators if each.name == "attention_decode")
    assert "S in (16, 64, 128)" in attention.constraints
    assert report.to_proto().emulated


def test_a_build_without_an_int8_product_reports_no_format() -> None:
    backend = KunlunBackend(runtime_with(without=("gemm_I8_I8_bf16_nt", "matmul")))
    assert backend.capabilities().quantization_formats == ()


def test_versions_are_in_the_ranges_that_it_declares() -> None:
    info = BACKEND.info()
    check_versions(info)
    assert info.runtime_version == "0.1.205+emulated"


@pytest.mark.parametrize("device", [0, 7])
def test_the_self_test_passes_on_each_device(device: int) -> None:
    assert [check.name for check in run_self_test(BACKEND, device) if not check.passed] == []


def test_a_device_that_is_not_there_is_not_found() -> None:
    with pytest.raises(NotFound, match="device 8 does not exist"):
        BACKEND.create_runner(RunnerContext(device=8))
    for call in (BACKEND.devices.properties, BACKEND.memory.stats, BACKEND.devices.create_stream):
        with pytest.raises(NotFound):
            call(8)


def test_copies_go_between_host_and_device_and_refuse_other_sizes() -> None:
    memory = BACKEND.memory
    buffer = memory.allocate((3, 5), "uint8", 1)
    sent = bytes(range(15))
    memory.copy(sent, buffer)
    received = bytearray(15)
    memory.copy(buffer, received)
    assert bytes(received) == sent
    with pytest.raises(InvalidArgument, match="14 bytes does not fit"):
        memory.copy(sent[:14], buffer)
    empty = memory.allocate((0,), "float32", 1)
    memory.copy(b"", empty)
    for freed in (buffer, empty):
        memory.free(freed)
    with pytest.raises(NotFound, match="not live"):
        memory.copy(sent, buffer)
    with pytest.raises(ResourceExhausted, match="cannot be allocated"):
        memory.allocate((1 << 50,), "uint8", 0)


def test_a_destroyed_stream_takes_its_events_along() -> None:
    devices = BACKEND.devices
    stream, other = devices.create_stream(0), devices.create_stream(0)
    event = devices.record_event(stream)
    devices.wait_event(other, event)
    devices.destroy_stream(stream)
    devices.destroy_stream(stream)
    with pytest.raises(NotFound, match="event"):
        devices.wait_event(other, event)
    with pytest.raises(NotFound, match="stream"):
        devices.synchronize(0, stream)


def on_ranks(folder: Path, work: Callable[[XcclCollectives, int], object]) -> list[object]:
    """What `work` returned on each rank, each on a thread of its own."""

    def run(rank: int) -> object:
        collectives = XcclCollectives(RUNTIME)
        collectives.init_group(
            "ring", rank=rank, world_size=WORLD, rendezvous=f"file://{folder}/meet", timeout_s=20.0
        )
        outcome = work(collectives, rank)
        collectives.barrier("ring")
        collectives.destroy_group("ring")
        return outcome

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, range(WORLD)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_primitives_do_what_they_say(tmp_path: Path, dtype: torch.dtype) -> None:
    own = [torch.tensor([[-1, 2], [3, -4]], dtype=dtype) + 10 * rank for rank in range(WORLD)]

    def work(collectives: XcclCollectives, rank: int) -> object:
        with pytest.raises(AlreadyExists):
            collectives.init_group("ring", rank=rank, world_size=WORLD, rendezvous="", timeout_s=1.0)
        mine = own[rank].clone()
        results = (
            collectives.all_reduce("ring", mine),
            collectives.all_gather("ring", mine),
            collectives.reduce_scatter("ring", mine),
            collectives.broadcast("ring", mine, root=1),
        )
        assert torch.equal(mine, own[rank])
        return results

    for rank, results in enumerate(on_ranks(tmp_path, work)):
        assert isinstance(results, tuple)
        total = own[0] + own[1]
        expected: list[Tensor] = [total, torch.stack(own), total[rank : rank + 1], own[1]]
        assert all(map(torch.equal, results, expected))


def test_types_that_do_not_travel_are_refused(tmp_path: Path) -> None:
    def work(collectives: XcclCollectives, rank: int) -> object:
        with pytest.raises(InvalidArgument, match="int16 does not travel over gloo in place of XCCL"):
            collectives.all_reduce("ring", torch.zeros(2, dtype=torch.int16))
        return True

    assert on_ranks(tmp_path, work) == [True] * WORLD


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="rank 1 did not come") as error:
        XcclCollectives(RUNTIME).init_group(
            "ring", rank=0, world_size=2, rendezvous=f"file://{tmp_path}/meet", timeout_s=0.2
        )
    assert error.value.metadata["missing"] == "1"


def test_an_unknown_group_is_not_found_and_leaving_it_is_fine() -> None:
    collectives = XcclCollectives(RUNTIME)
    collectives.destroy_group("ring")
    with pytest.raises(NotFound, match="InitGroup"):
        collectives.barrier("ring")
