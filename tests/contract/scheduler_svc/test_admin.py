"""AdminService, health and metrics of a running scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chipmesh.scheduler.v1alpha1 import admin_pb2
from meshkit.errors import InvalidArgument, NotFound
from scheduler_svc.metrics import GAUGES
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import until

DRAINING = admin_pb2.ReplicaStatus.STATE_DRAINING


async def test_get_mesh_shows_every_replica_and_its_pages_add_up(mesh: Any) -> None:
    async with mesh(groups=[{"name": "g", "model": "m", "weight": 2.0}]) as m:
        executor = await m.worker("w0", page_count=50)
        gateway = await m.gateway()
        executor.gate.clear()
        seen = await gateway.submit(list(range(9)), 5)
        await until(lambda: executor.plans, "it runs")
        replica = (await m.replicas())["w0"]
        assert (replica.running, replica.waiting) == (1, 0)
        assert replica.pages.held > 0
        executor.release()
        await seen.end()
        batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
        await until(lambda: batcher.pages.held == 0, "idle")
        mesh_now = (await m.admin.GetMesh(admin_pb2.GetMeshRequest())).mesh
        assert mesh_now.scheduler.pid > 0
        assert mesh_now.scheduler.scheduler_id == m.service.scheduler_id
        assert mesh_now.scheduler.gateways == 1
        (group,) = mesh_now.groups
        assert (group.name, group.model, group.weight) == ("g", "m", 2.0)
        (replica,) = group.replicas
        assert (replica.worker, replica.chip, replica.emulated) == ("w0", "fake", True)
        assert replica.instance_id == executor.instance_id
        assert replica.state == admin_pb2.ReplicaStatus.STATE_READY
        pages = replica.pages
        assert (replica.running, replica.waiting, pages.held) == (0, 0, 0)
        assert pages.free + pages.cached + pages.held == pages.total == 50
        assert pages.cached > 0
        assert replica.step_seq == len(executor.plans)


async def test_a_watch_sends_the_mesh_now_and_after_a_change_with_a_growing_revision(mesh: Any) -> None:
    async with mesh() as m:
        watch = m.admin.WatchMesh(admin_pb2.WatchMeshRequest())
        first = await watch.read()
        assert not first.mesh.groups
        await m.worker("w0")
        seen = first
        while not seen.mesh.groups or seen.mesh.groups[0].replicas[0].state != 2:
            newer = await watch.read()
            assert newer.revision > seen.revision
            seen = newer
        watch.cancel()


async def test_flush_cache_frees_cached_pages_of_one_worker_or_all(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", page_size=4)
        gateway = await m.gateway()
        await (await gateway.submit(list(range(20)), 2)).end()
        batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
        await until(lambda: batcher.pages.held == 0, "idle")
        with pytest.raises(NotFound, match="w0"):
            await m.call(m.admin.FlushCache, admin_pb2.FlushCacheRequest(worker="nobody"))
        cached = batcher.pages.cached
        assert cached > 0
        flushed = await m.call(m.admin.FlushCache, admin_pb2.FlushCacheRequest(worker="w0"))
        assert flushed.flushed_pages == cached
        assert (await m.call(m.admin.FlushCache, admin_pb2.FlushCacheRequest())).flushed_pages == 0
        again = await (await gateway.submit(list(range(20)), 2)).end()
        assert again.placed[0].cached_tokens == 0


async def test_set_traffic_moves_new_requests_to_the_group_that_has_the_weight(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", group="a")
        await m.worker("w1", group="b")
        gateway = await m.gateway()
        for name, worker in (("a", "w0"), ("b", "w1")):
            await m.call(m.admin.SetTraffic, admin_pb2.SetTrafficRequest(weights={name: 1.0}))
            for i in range(4):
                seen = await (await gateway.submit([i], 2)).end()
                assert seen.placed[0].worker == worker


@pytest.mark.parametrize("weights", [{"nobody": 1.0}, {"a": -1.0}, {"a": 0.0}])
async def test_weights_that_cannot_be_are_refused(mesh: Any, weights: dict[str, float]) -> None:
    async with mesh() as m:
        await m.worker("w0", group="a")
        with pytest.raises(InvalidArgument) as caught:
            await m.call(m.admin.SetTraffic, admin_pb2.SetTrafficRequest(model="m", weights=weights))
        assert caught.value.field == "weights"


async def test_weights_of_a_model_that_nobody_serves_are_refused_for_the_model(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", group="a")
        with pytest.raises(InvalidArgument, match="serves: m") as caught:
            await m.call(m.admin.SetTraffic, admin_pb2.SetTrafficRequest(model="n", weights={"a": 1.0}))
        assert caught.value.field == "model"


@pytest.mark.parametrize(
    "timeout",
    [
        Duration(seconds=-1),
        Duration(nanos=-1),
        Duration(nanos=10**9),
        Duration(seconds=1, nanos=-1),
        Duration(seconds=7 * 24 * 3600 + 1),
        Duration(seconds=2**62),
    ],
    ids=str,
)
async def test_a_drain_with_a_timeout_that_cannot_be_changes_nothing(mesh: Any, timeout: Duration) -> None:
    async with mesh() as m:
        await m.worker("w0")
        with pytest.raises(InvalidArgument, match="from 0 to 604800 seconds") as caught:
            await m.call(m.admin.DrainWorker, admin_pb2.DrainWorkerRequest(worker="w0", timeout=timeout))
        assert caught.value.field == "timeout"
        assert not m.service.pool.member("w0").draining


async def test_a_drained_worker_ends_what_it_has_and_gets_nothing_new(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        executor.hold_after(3)
        gateway = await m.gateway()
        seen = await gateway.submit([1], 60)
        await seen.has_tokens(2)
        await m.worker("w1")
        request = admin_pb2.DrainWorkerRequest(worker="w0", timeout=Duration(seconds=20))
        draining = asyncio.create_task(m.call(m.admin.DrainWorker, request))
        await until(lambda: m.service.pool.member("w0").draining, "it drains")
        assert not draining.done()
        executor.release()
        await draining
        await seen.end()
        assert [placed.worker for placed in seen.placed] == ["w0"]
        assert (await m.replicas())["w0"].state == DRAINING
        for i in range(4):
            after = await (await gateway.submit([i], 2)).end()
            assert after.placed[0].worker == "w1"


async def test_a_drain_that_runs_out_of_time_moves_the_requests_and_blames_none(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        gateway = await m.gateway()
        executor.hold_after(3)
        seen = await gateway.submit([1], 60)
        await seen.has_tokens(2)
        await m.worker("w1")
        (live,) = m.service.engine._live
        await m.call(m.admin.DrainWorker, admin_pb2.DrainWorkerRequest(worker="w0", timeout=Duration()))
        await seen.end()
        executor.release()
        assert [placed.worker for placed in seen.placed] == ["w0", "w1"]
        assert seen.tokens == expected_tokens([1], 60)
        assert live.core.deaths == 0


async def test_a_lower_window_holds_for_those_that_come_and_a_higher_one_lets_them_in(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        gateway = await m.gateway()
        executor.gate.clear()
        # In one message: what is in flight may else be planned before the second one is there.
        await gateway.send(*[gateway.command([number], 40) for number in range(2)])
        running = list(gateway.requests.values())
        batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
        await until(lambda: batcher.running == 2, "both run")
        await m.call(m.admin.SetGroup, admin_pb2.SetGroupRequest(group="g", max_running_requests=1))
        waiting = await gateway.submit([9], 4)
        (replica,) = (await m.replicas()).values()
        assert (replica.max_running_requests, replica.running, replica.waiting) == (1, 2, 1)
        await m.call(m.admin.SetGroup, admin_pb2.SetGroupRequest(group="g", max_running_requests=0))
        executor.release()
        await waiting.end()
        assert (await m.replicas())["w0"].max_running_requests > 2
        for each, number in zip(running, range(2), strict=True):
            await each.end()
            assert each.tokens == expected_tokens([number], 40)


async def test_wrong_settings_of_a_group_are_named_and_change_nothing(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        with pytest.raises(NotFound, match="there is: g"):
            await m.call(m.admin.SetGroup, admin_pb2.SetGroupRequest(group="nope", chunk_tokens=1))
        wrong = admin_pb2.SetGroupRequest(group="g", chunk_tokens=1, schedule_policy="best")
        with pytest.raises(InvalidArgument, match="'best' is unknown; known are: dfs-weight") as refused:
            await m.call(m.admin.SetGroup, wrong)
        assert refused.value.field == "schedule_policy"
        assert (await m.replicas())["w0"].chunk_tokens > 1


async def test_health_says_serving_and_http_shows_the_parts_and_the_known_metrics(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0", page_size=4, page_count=50)
        gateway = await m.gateway()
        for _ in range(2):
            await (await gateway.submit(list(range(20)), 3)).end()
        check = await health_pb2_grpc.HealthStub(m.channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        async with httpx2.AsyncClient(base_url=f"http://{m.http_address}") as http:
            health = (await http.get("/health")).json()
            text = (await http.get("/metrics")).text
        assert health["serving"] is True
        assert health["parts"].keys() == {"process", "loop", "replicas"}
        assert health["parts"]["replicas"] == "1 ready of 1"
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        by_name = {name.split("{")[0] for name in samples if 'worker="w0"' in name}
        for name in (*GAUGES, "queue_time_seconds_count",
                     "prefill_latency_seconds_count"):  # fmt: skip
            assert f"chipmesh_{name}" in by_name, name
        values = {name: next(float(v) for k, v in samples.items() if k.startswith(f"chipmesh_{name}{{"))
                  for name in ("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total",
                               "cache_hit_rate", "queue_time_seconds_count")}  # fmt: skip
        assert values == {
            "prompt_tokens_total": 40, "generation_tokens_total": 6, "cached_tokens_total": 16,
            "cache_hit_rate": 0.4, "queue_time_seconds_count": 2,
        }  # fmt: skip
