"""The scheduler is watched while somebody looks, by one stream for all, and asked again when it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any, cast

import grpc
import grpc.aio

from chipmesh.scheduler.v1alpha1 import admin_pb2
from gateway.web_page.admin import AdminStub
from gateway.web_page.mesh_watch import MeshWatch


class FakeStream:
    """One WatchMesh call; None ends it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[admin_pb2.WatchMeshResponse | Exception] = asyncio.Queue()
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[admin_pb2.WatchMeshResponse]:
        return self

    async def __anext__(self) -> admin_pb2.WatchMeshResponse:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self.cancelled = True


class FakeAdmin:
    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    def WatchMesh(self, _: admin_pb2.WatchMeshRequest) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


async def until(holds: Callable[[], Any]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


async def test_one_stream_serves_all_viewers_and_none_runs_without_them() -> None:
    admin, clock = FakeAdmin(), Clock()
    watch = MeshWatch(cast(AdminStub, admin), retry_s=0, clock=clock)
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    assert admin.streams == [], "nobody looks yet"
    with ExitStack() as viewers:
        for _ in range(3):
            viewers.enter_context(watch.viewer())
        await until(lambda: admin.streams)
        mesh = admin_pb2.Mesh(groups=[admin_pb2.GroupStatus(name="g")])
        admin.streams[0].messages.put_nowait(admin_pb2.WatchMeshResponse(mesh=mesh))
        await until(lambda: watch.state()["status"] == "live")
        assert len(admin.streams) == 1
    await until(lambda: watch.state()["status"] == "connecting")
    assert admin.streams[0].cancelled
    clock.now += 7
    state = watch.state()
    assert (state["status"], state["age_s"]) == ("connecting", 7)
    assert state["mesh"]["groups"][0]["name"] == "g"
    running.cancel()


async def test_a_scheduler_that_is_gone_is_asked_again_and_the_age_counts_from_its_last_sign() -> None:
    admin, clock = FakeAdmin(), Clock()
    watch = MeshWatch(cast(AdminStub, admin), retry_s=0, clock=clock)
    running = asyncio.create_task(watch.run())
    with watch.viewer():
        await until(lambda: admin.streams)
        admin.streams[0].messages.put_nowait(admin_pb2.WatchMeshResponse())
        await until(lambda: watch.state()["status"] == "live")
        clock.now += 100  # The mesh did not change, and the connection stood.
        empty = grpc.aio.Metadata()
        gone = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, "no route")
        admin.streams[0].messages.put_nowait(gone)
        await until(lambda: len(admin.streams) == 2)
        clock.now += 3
        state = watch.state()
        assert (state["status"], state["problem"], state["age_s"]) == ("away", "no route", 3)
        admin.streams[1].messages.put_nowait(admin_pb2.WatchMeshResponse())
        await until(lambda: watch.state()["status"] == "live")
        assert watch.state()["problem"] == ""
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_without_the_right_to_ask_it_says_what_is_missing() -> None:
    watch = MeshWatch(None, problem="no certificate")
    assert watch.state() == {"status": "away", "problem": "no certificate", "age_s": None, "mesh": None}
