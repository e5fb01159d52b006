"""AdminService.Profile: the scheduler asks the worker's executor, and passes on what that says."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.errors import AlreadyExists, MeshError


def asked(worker: str = "", seconds: int = 2) -> admin_pb2.ProfileRequest:
    return admin_pb2.ProfileRequest(worker=worker, duration=Duration(seconds=seconds))


async def test_the_only_worker_is_asked_and_its_trace_comes_as_it_is(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        response = await m.call(m.admin.Profile, asked())
        assert (response.worker, response.chrome_trace) == ("w0", b"the trace of i1")
        assert [request.duration.seconds for request in executor.profiles] == [2]


async def test_of_several_workers_one_is_named(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        await m.worker("w1")
        with pytest.raises(MeshError, match="w0, w1") as refused:
            await m.call(m.admin.Profile, asked())
        assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "worker")
        assert (await m.call(m.admin.Profile, asked("w1"))).chrome_trace == b"the trace of i2"
        with pytest.raises(MeshError) as refused:
            await m.call(m.admin.Profile, asked("w9"))
        assert refused.value.code is grpc.StatusCode.NOT_FOUND


async def test_what_the_executor_refuses_is_refused_with_its_words(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        executor.profile_error = AlreadyExists("it is being profiled", reason="PROFILE_RUNNING")
        with pytest.raises(AlreadyExists, match="it is being profiled") as refused:
            await m.call(m.admin.Profile, asked())
        assert refused.value.reason == "PROFILE_RUNNING"


async def test_requests_go_on_beside_a_profile(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        gateway = await m.gateway()
        seen = await gateway.submit([1, 2], 20)
        await m.call(m.admin.Profile, asked())
        assert len((await seen.end()).tokens) == 20
