"""Loads and caches of the mesh: what a router learns of them, and who may not."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc
import pytest

from chipmesh.scheduler.v1alpha1 import admin_pb2
from chipmesh.sglang_grpc import sglang_scheduler_pb2 as sgl
from chipmesh.sglang_grpc import smg_common_pb2 as common
from gateway.sglang_grpc.servicer import MOST_FEEDS
from meshkit.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from tests.contract.gateway_sglang.router_client import WAIT_S, MeshFactory, RouterMesh
from tests.unit.gateway.tiny_model import tokens_of

PLAIN, SHARING, OPERATOR = "cmk_plain", "cmk_sharing", "cmk_operator"


def key_of(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


KEYS = [
    key_of("plain", PLAIN),
    key_of("sharing", SHARING, share_cache=True),
    key_of("operator", OPERATOR, share_cache=True, operator=True),
]


def stored(*hashes: int, salt: str = "", snapshot: bool = False) -> admin_pb2.SubscribeKvEventsResponse:
    blocks = admin_pb2.KvBlocksStored(block_hashes=hashes, token_ids=hashes, block_size=1, cache_salt=salt)
    return admin_pb2.SubscribeKvEventsResponse(
        snapshot=snapshot, seq=1, events=[admin_pb2.KvEvent(stored=blocks)]
    )


async def subscribed(mesh: RouterMesh) -> str:
    return await asyncio.wait_for(mesh.admin.subscribed.get(), WAIT_S)


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code()


async def is_refused(call: Any) -> bool:
    """Whether there is no room, rather than a first batch."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return True
    return False


async def test_loads_are_those_of_all_replicas(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0", "w1"]) as mesh:
        load = (await mesh.call("GetLoads", sgl.GetLoadsRequest(include=["core"]))).loads[0]
        assert (load.num_running_reqs, load.max_running_requests) == (2, 8)
        assert (load.num_used_tokens, load.max_total_num_tokens) == (64, 256)
        with pytest.raises(InvalidArgument, match=r"^dp_rank is 1"):
            await mesh.call("GetLoads", sgl.GetLoadsRequest(dp_rank=1))


async def test_a_flush_reaches_the_scheduler(mesh: RouterMesh) -> None:
    answer = await mesh.call("FlushCache", common.FlushCacheRequest())
    assert (answer.success, answer.message) == (True, "5 pages are free by it")
    assert mesh.admin.flushed == 1


async def test_a_subscriber_has_what_any_replica_has(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0", "w1"]) as mesh:
        caches = mesh.follow_caches()
        first = await caches.batch()
        assert first.sequence_number == 1
        assert (first.snapshot.index, first.snapshot.count, first.snapshot.blocks) == (0, 1, 0)
        assert first.events[0].HasField("cleared")
        assert {await subscribed(mesh), await subscribed(mesh)} == {"w0", "w1"}
        mesh.admin.messages["w0"].put_nowait(stored(1, 2, snapshot=True))
        await caches.until({1, 2})
        mesh.admin.messages["w1"].put_nowait(stored(2, 3, snapshot=True))
        await caches.until({1, 2, 3})
        mesh.admin.messages["w0"].put_nowait(None)
        await caches.until({2, 3})
        assert await subscribed(mesh) == "w0", "a replica that is still there is followed again"
        caches.call.cancel()


async def test_a_replica_that_comes_later_is_followed(run_mesh: MeshFactory) -> None:
    async with run_mesh() as mesh:
        caches = mesh.follow_caches()
        await caches.batch()
        mesh.admin.add_replica("other", model="another model")
        mesh.admin.add_replica("late")
        assert await subscribed(mesh) == "late"
        mesh.admin.messages["late"].put_nowait(stored(7))
        await caches.until({7})
        caches.call.cancel()


async def test_who_subscribes_again_gets_all_under_numbers_beyond_its_own(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"]) as mesh:
        caches = mesh.follow_caches(after=41)
        batch = await caches.batch()
        assert batch.sequence_number == 42
        assert batch.HasField("snapshot")
        caches.call.cancel()


async def test_while_the_scheduler_is_away_nothing_is_cached_and_then_all_is_said_again(
    run_mesh: MeshFactory,
) -> None:
    async with run_mesh(replicas=["w0"]) as mesh:
        caches = mesh.follow_caches()
        await subscribed(mesh)
        mesh.admin.messages["w0"].put_nowait(stored(1, snapshot=True))
        await caches.until({1})
        await mesh.scheduler.stop()
        await caches.until(set())
        await mesh.scheduler.start()
        await subscribed(mesh)
        mesh.admin.messages["w0"].put_nowait(stored(5, snapshot=True))
        await caches.until({5})
        caches.call.cancel()


async def test_a_subscriber_that_goes_leaves_no_stream_behind(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"]) as mesh:
        feeds = []
        for _ in range(MOST_FEEDS):
            feeds.append(mesh.follow_caches())
            await feeds[-1].batch()
        assert await refusal(mesh.follow_caches().call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for feed in feeds:
            feed.call.cancel()
        while (again := mesh.follow_caches()) and await is_refused(again.call):
            pass
        again.call.cancel()


async def test_a_gateway_that_ends_tells_its_subscribers(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"]) as mesh:
        caches = mesh.follow_caches()
        await subscribed(mesh)
        await caches.batch()
        await mesh.gateway.stop(0.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caches.batch()
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (Unavailable, "DRAINING")


async def test_a_key_of_its_own_cache_sees_that_one_only(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"], api_keys=KEYS) as mesh:
        session = await mesh.session()
        plain = mesh.with_key(PLAIN)
        answers = plain.generate(tokens_of("x"), params={})
        salt = (await session.submitted()).submit.cache_salt
        answers.call.cancel()
        assert salt
        caches = plain.follow_caches()
        await subscribed(mesh)
        for message in (stored(1), stored(2, salt="other"), stored(3, salt=salt)):
            mesh.admin.messages["w0"].put_nowait(message)
        await caches.until({3})
        caches.call.cancel()


async def test_keys_that_share_a_cache_are_not_shown_it_but_operators_are(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"], api_keys=KEYS) as mesh:
        call = mesh.with_key(SHARING).follow_caches().call
        assert await refusal(call) is grpc.StatusCode.UNIMPLEMENTED
        caches = mesh.with_key(OPERATOR).follow_caches()
        await subscribed(mesh)
        mesh.admin.messages["w0"].put_nowait(stored(1))
        await caches.until({1})
        caches.call.cancel()


async def test_the_inside_is_for_operators_and_every_call_needs_a_key(run_mesh: MeshFactory) -> None:
    async with run_mesh(replicas=["w0"], api_keys=KEYS) as mesh:
        requests = {"GetLoads": sgl.GetLoadsRequest(), "FlushCache": common.FlushCacheRequest()}
        for method, request in requests.items():
            for key in (PLAIN, SHARING):
                with pytest.raises(PermissionDenied, match=f"^{method} is about the whole mesh"):
                    await mesh.with_key(key).call(method, request)
            await mesh.with_key(OPERATOR).call(method, request)
        assert mesh.admin.flushed == 1
        for method, kind in {
            **requests,
            "HealthCheck": sgl.HealthCheckRequest(),
            "GetModelInfo": sgl.GetModelInfoRequest(),
            "Abort": sgl.AbortRequest(request_id="r"),
        }.items():
            with pytest.raises(Unauthenticated):
                await mesh.call(method, kind)


async def test_a_stranger_beyond_this_host_is_served_but_shown_nothing(
    run_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the listener were one: tests listen on loopback only.
    monkeypatch.setattr("gateway.app.is_local", lambda address: False)
    async with run_mesh(replicas=["w0"], allow_anonymous=True) as mesh:
        session = await mesh.session()
        with pytest.raises(PermissionDenied):
            await mesh.call("GetLoads", sgl.GetLoadsRequest())
        assert await refusal(mesh.follow_caches().call) is grpc.StatusCode.UNIMPLEMENTED
        answers = mesh.generate(params={})
        (await session.accepts()).finished()
        assert (await mesh.call("GetServerInfo", sgl.GetServerInfoRequest())).active_requests == 0
        assert (await answers.complete()).finish_reason == "length"


async def test_one_keys_abort_does_not_reach_anothers_request(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=KEYS) as mesh:
        session = await mesh.session()
        answers = mesh.with_key(PLAIN).generate(stream=True, request_id="r", params={})
        request = await session.accepts()
        await mesh.with_key(OPERATOR).abort("r")
        request.tokens(0, [65])
        request.finished()
        await answers.chunk()
        assert (await answers.complete()).finish_reason == "length"


async def test_without_an_operators_certificate_the_scheduler_is_not_asked() -> None:
    from gateway.sglang_grpc.mesh_reader import MeshReader

    reader = MeshReader(None)
    assert not reader.may_ask
    with pytest.raises(FailedPrecondition, match=r"page\.operator_tls"):
        await reader.mesh()
