"""Swaps as the scheduler sees them: an order with each heartbeat, progress, and another executor."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2, registry_pb2
from meshkit.errors import FailedPrecondition, InvalidArgument, NotFound, from_rpc_error
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import registration, until

PROMPT = list(range(9))


class Watched:
    """A SwapChip call that is read in the background."""

    def __init__(self, mesh: Any, **request: Any) -> None:
        self.stages: list[str] = []
        self._call = mesh.admin.SwapChip(admin_pb2.SwapChipRequest(worker="w0", **request))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for progress in self._call:
            if not self.stages or self.stages[-1] != progress.stage:
                self.stages.append(progress.stage)

    async def error(self) -> Exception:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(self.task, 10)
        return from_rpc_error(caught.value)


async def order_of(mesh: Any) -> registry_pb2.SwapOrder:
    """The order that a heartbeat of w0 brings."""
    await until(lambda: mesh.service.pool.swaps.order_for("w0"), "a swap is ordered")
    order: registry_pb2.SwapOrder = mesh.service.pool.swaps.order_for("w0")
    return order


async def test_requests_go_on_with_the_new_executor_and_lose_nothing(mesh: Any) -> None:
    async with mesh() as m:
        old = await m.worker("w0")
        gateway = await m.gateway()
        old.hold_after(4)
        seen = await gateway.submit(PROMPT, 12)
        await seen.has_tokens(2)
        watched = Watched(m, backend="other", device=3, backend_options={"a": "b"})
        order = await order_of(m)
        assert (order.backend, order.device) == ("other", 3)
        assert dict(order.backend_options) == {"a": "b"}
        m.service.pool.swaps.heard(
            "w0", registry_pb2.SwapProgress(swap_id=order.swap_id, stage="load", fraction=0.5)
        )
        new = await m.executor()
        supervisor = await m.supervisor("w0")
        await supervisor.register(registration(new, "w0"))
        await asyncio.wait_for(watched.task, 10)
        old.release()
        assert (await seen.end()).tokens == expected_tokens(PROMPT, 12)
        assert watched.stages[-1] == "done"
        assert "load" in watched.stages
        assert m.service.pool.swaps.order_for("w0") is None


async def test_a_new_executor_that_does_not_start_is_told_and_the_old_one_serves_on(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        watched = Watched(m, backend="other")
        order = await order_of(m)
        m.service.pool.swaps.heard(
            "w0",
            registry_pb2.SwapProgress(
                swap_id=order.swap_id, stage="failed", error="no chip", reason="NO_DEVICE"
            ),
        )
        error = await watched.error()
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.message) == ("NO_DEVICE", "no chip")
        gateway = await m.gateway()
        assert (await (await gateway.submit(PROMPT, 3)).end()).tokens == expected_tokens(PROMPT, 3)


async def test_a_backend_that_the_worker_does_not_know_is_named_as_the_field_at_fault(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        watched = Watched(m, backend="other")
        swap_id = (await order_of(m)).swap_id
        failed = registry_pb2.SwapProgress(
            swap_id=swap_id, stage="failed", error="unknown", reason="UNKNOWN_BACKEND", field="backend"
        )
        m.service.pool.swaps.heard("w0", failed)
        error = await watched.error()
        assert isinstance(error, FailedPrecondition)
        assert error.field == "backend"


async def test_an_order_carries_the_devices_and_sizes_of_a_set(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        watched = Watched(m, backend="other", devices=[4, 5], tensor_parallel_size=2)
        order = await order_of(m)
        assert (list(order.devices), order.tensor_parallel_size, order.pipeline_parallel_size) == (
            [4, 5],
            2,
            0,
        )
        watched.task.cancel()


async def test_one_swap_of_a_worker_runs_at_a_time(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        first = Watched(m, backend="other")
        await order_of(m)
        error = await Watched(m, backend="third").error()
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "SWAP_RUNNING"
        first.task.cancel()


async def test_a_worker_that_is_lost_ends_its_swap(mesh: Any) -> None:
    async with mesh(lease_duration_s=0.3, heartbeat_interval_s=0.1) as m:
        await m.worker("w0")
        watched = Watched(m, backend="other")
        await order_of(m)
        (await m.supervisor("w0")).stop_beating()
        error = await watched.error()
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "WORKER_LOST"


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"device": 1}, InvalidArgument),
        ({"devices": [0, 1]}, InvalidArgument),
        ({"backend": "other", "device": 1, "devices": [0, 1]}, InvalidArgument),
        ({"backend": "other"}, NotFound),
    ],
)
async def test_a_swap_that_cannot_be_is_refused(mesh: Any, request_: dict[str, Any], kind: type) -> None:
    async with mesh() as m:
        if kind is InvalidArgument:
            await m.worker("w0")
        assert isinstance(await Watched(m, **request_).error(), kind)
