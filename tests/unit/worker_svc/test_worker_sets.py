"""Sets in a worker's configuration: which sizes and places can be, and what follows from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chipmesh.device.v1alpha1.device_pb2 import DeviceProperties
from chipmesh.device.v1alpha1.plugin_pb2 import CapabilityReport
from chipmesh.scheduler.v1alpha1.registry_pb2 import SwapOrder
from meshkit.config import parse_config
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError
from meshkit.modelstore.sharding import ParallelLayout
from tests.support.hash_model import write_hash_model
from worker_svc import executor_set
from worker_svc.config import WorkerConfig
from worker_svc.executor.settings import ExecutorSettings
from worker_svc.executor_set import ExecutorSet, executor_environment, spawn_set
from worker_svc.set_layout import layout_of
from worker_svc.supervisor import _changed


def config_of(**given: Any) -> WorkerConfig:
    base = {"worker_id": "w0", "model": "m", "scheduler_address": "127.0.0.1:1"}
    return parse_config(WorkerConfig, {**base, **given}, source="test")


HOSTS: dict[str, Any] = {
    "rendezvous": "10.0.0.1:29600", "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
}  # fmt: skip


def test_a_worker_of_one_device_is_no_set() -> None:
    config = config_of(device=3)
    assert (config.own_devices, config.is_set, config.executors_here) == ((3,), False, 1)


def test_ranks_share_the_processors_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert executor_environment(config_of(devices=[0, 1]))["OMP_NUM_THREADS"] == "4"
    assert executor_environment(config_of(devices=[0, 1], executors_on_host=4))["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"device": 0, "devices": [0, 1]}, "device and devices are both given"),
        ({"devices": [1, 1]}, "serves once"),
        ({"devices": [0, -1]}, "index from 0"),
        ({"devices": [0, 1], "tensor_parallel_size": 3}, "there are 2 devices"),
        ({"devices": [0, 1], "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "there are 2 devices"),
        ({"devices": [0, 1, 2, 3], "tensor_parallel_size": 2, "pipeline_parallel_size": 1}, "4 devices"),
        ({"tensor_parallel_size": 2}, "there are 1 devices"),
        ({"first_rank": 1}, "set rendezvous"),
        ({"rendezvous": "10.0.0.1:1", "tensor_parallel_size": 2}, "both sizes have to be"),
        ({**HOSTS, "devices": [0, 1], "first_rank": 3}, "would need 5"),
        ({"devices": [0, 1], "executor": {"listen": "127.0.0.1:5000"}}, "port 0"),
        ({**HOSTS, "rendezvous": "10.0.0.1"}, "HOST:PORT"),
        ({**HOSTS, "rendezvous": "10.0.0.1:0"}, "HOST:PORT"),
    ],
)
def test_what_cannot_be_a_set_is_refused_with_the_cause(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        config_of(**given)


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({}, (1, 1)),
        ({"devices": [0, 1, 2, 3], "tensor_parallel_size": 2}, (2, 2)),
        ({"devices": [0, 1, 2, 3], "pipeline_parallel_size": 4}, (1, 4)),
        ({**HOSTS, "devices": [0, 1], "first_rank": 2}, (2, 2)),
        ({"devices": [0, 1]}, (2, 1)),
    ],
)
def test_a_layout_is_as_configured_and_what_is_left_is_derived(
    given: dict[str, Any], layout: tuple[int, int]
) -> None:
    assert layout_of(config_of(**given), []) == ParallelLayout(*layout)


def test_a_layout_that_nobody_configured_follows_from_the_model(tmp_path: Path) -> None:
    """Four heads go over two ranks, not over three: there it is stages."""
    model = write_hash_model(tmp_path)
    chip = (
        CapabilityReport(chip="x", compute_dtypes=["float32"]),
        DeviceProperties(memory_total_bytes=1 << 30),
    )
    found = layout_of(config_of(devices=[0, 1], model_path=str(model)), [chip, chip])
    assert found == ParallelLayout(tensor=2)
    with pytest.raises(InvalidArgument):  # Two layers: no stage for each of three.
        layout_of(config_of(devices=[0, 1, 2], model_path=str(model)), [chip] * 3)


# ---------------------------------------------------------------- swaps


def test_an_order_puts_a_set_in_one_chips_place_and_back() -> None:
    alone = config_of(device=2)
    order = SwapOrder(backend="x", devices=[0, 1], tensor_parallel_size=2)
    joined = _changed(alone, order)
    assert (joined.own_devices, joined.tensor_parallel_size, joined.is_set) == ((0, 1), 2, True)
    back = _changed(joined, SwapOrder(backend="x", device=5))
    assert (back.own_devices, back.tensor_parallel_size, back.is_set) == ((5,), None, False)


def test_an_order_without_a_backend_keeps_the_set() -> None:
    joined = config_of(devices=[0, 1], pipeline_parallel_size=2)
    loaded_anew = _changed(joined, SwapOrder(model_path="/other"))
    assert (loaded_anew.own_devices, loaded_anew.pipeline_parallel_size) == ((0, 1), 2)
    assert loaded_anew.model_path == "/other"


def test_an_order_whose_sizes_do_not_make_up_its_devices_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there are 2 devices"):
        _changed(config_of(), SwapOrder(backend="x", devices=[0, 1], tensor_parallel_size=3))


def test_ranks_over_hosts_are_not_swapped() -> None:
    with pytest.raises(FailedPrecondition) as caught:
        _changed(config_of(**HOSTS, devices=[0, 1]), SwapOrder(backend="x"))
    assert caught.value.reason == "SET_OVER_HOSTS"


# ---------------------------------------------------------------- processes


class FakeProcess:
    """An executor's process that nothing happens to."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self.instance_id = settings.instance_id
        self.settings = settings
        self.pid, self.address, self.alive = 1, "127.0.0.1:1", True
        self.ended = asyncio.Event()
        self.stopped = False

    async def wait(self) -> str:
        await self.ended.wait()
        return "was ended by signal 9"

    async def stop(self, *, timeout_s: float) -> None:
        del timeout_s
        self.stopped = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    return _fake(monkeypatch, lambda _: None)


def _fake(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[ExecutorSettings], MeshError | None]
) -> list[FakeProcess]:
    made: list[FakeProcess] = []

    async def spawn(settings: ExecutorSettings, **_: Any) -> FakeProcess:
        await asyncio.sleep(0)
        if (error := fault(settings)) is not None:
            raise error
        made.append(FakeProcess(settings))
        return made[-1]

    monkeypatch.setattr(executor_set, "spawn_executor", spawn)
    return made


async def _spawned(config: WorkerConfig) -> ExecutorSet:
    return await spawn_set(config, instance_id="w0-1")


async def test_each_rank_gets_its_device_its_name_and_its_number_on_its_spans(
    processes: list[FakeProcess],
) -> None:
    executors = await _spawned(config_of(**HOSTS, devices=[4, 5], first_rank=2))
    assert [rank.label for rank in executors.ranks] == ["rank 2 (device 4)", "rank 3 (device 5)"]
    assert not executors.leads
    settings = [process.settings for process in processes]
    assert [each.device for each in settings] == [4, 5]
    assert [each.instance_id for each in settings] == ["w0-1", "w0-1-rank3"]
    assert [each.span_attributes["chipmesh.rank"] for each in settings] == ["2", "3"]


async def test_alone_nothing_is_said_of_ranks(processes: list[FakeProcess]) -> None:
    executors = await _spawned(config_of())
    assert (executors.first.label, executors.leads) == ("executor", True)
    assert "chipmesh.rank" not in processes[0].settings.span_attributes


async def test_the_first_death_is_told_by_rank(processes: list[FakeProcess]) -> None:
    executors = await _spawned(config_of(devices=[0, 1]))
    processes[1].ended.set()
    assert await asyncio.wait_for(executors.wait(), 5) == "rank 1 (device 1) was ended by signal 9"


async def test_where_one_rank_does_not_start_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FailedPrecondition("no such chip")
    made = _fake(monkeypatch, lambda settings: error if settings.device == 1 else None)
    with pytest.raises(FailedPrecondition) as caught:
        await _spawned(config_of(devices=[0, 1]))
    assert caught.value.message == "rank 1 (device 1): no such chip"
    assert all(process.stopped for process in made)
