"""What the scheduler shows of groups, workers and shadows, also where something is missing."""

from __future__ import annotations

from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from chipmesh.scheduler.v1alpha1 import admin_pb2
from tests.contract.scheduler_svc.fake_peers import until

GROUPS = [{"name": "main", "model": "m", "weight": 1.0}, {"name": "canary", "model": "m", "weight": 0.0}]


async def samples(m: Any) -> dict[tuple[str, ...], float]:
    """Values by (metric, label values in order of their names)."""
    async with httpx2.AsyncClient(base_url=f"http://{m.http_address}") as http:
        page = (await http.get("/metrics")).text
    return {
        (
            sample.name.removeprefix("chipmesh_"),
            *(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_a_group_without_a_worker_is_shown_as_one(mesh: Any) -> None:
    async with mesh(groups=GROUPS) as m:
        before = await samples(m)
        assert before["workers", "main", "ready"] == before["workers", "canary", "ready"] == 0
        assert (before["group_weight", "main", "m"], before["group_weight", "canary", "m"]) == (1, 0)
        await m.worker("w0", group="main")
        executor = await m.worker("w1", group="main")
        assert (await samples(m))["workers", "main", "ready"] == 2
        await executor.stop()
        await m.supervisors["w1"].close()
        await until(lambda: m.service.pool.member("w1").lost, "the lease ended")
        after = await samples(m)
        assert (after["workers", "main", "ready"], after["workers", "main", "lost"]) == (1, 1)


async def test_what_a_shadow_answers_otherwise_is_counted(mesh: Any) -> None:
    async with mesh(groups=GROUPS) as m:
        await m.worker("w0", group="main")
        await m.worker("w1", group="canary", skew_after=5)
        request = admin_pb2.SetShadowRequest(source_group="main", shadow_group="canary", share=1.0)
        await m.call(m.admin.SetShadow, request)
        gateway = await m.gateway()
        await (await gateway.submit([1, 2, 3], 6)).end()
        await until(lambda: m.service.mirror.shadows["main"].count.compared == 1, "it was compared")
        shown = await samples(m)
        assert shown["shadow_tokens_total", "main", "canary"] == 6
        assert shown["shadow_equal_tokens_total", "main", "canary"] == 2
        assert shown["shadow_requests_total", "main", "different", "canary"] == 1
        assert shown["shadow_requests_total", "main", "identical", "canary"] == 0


async def test_a_group_that_its_guard_took_traffic_from_is_shown(mesh: Any) -> None:
    async with mesh(groups=GROUPS) as m:
        assert (await samples(m))["group_rolled_back", "main"] == 0
        m.service.guards.reasons["main"] = "too slow"
        assert (await samples(m))["group_rolled_back", "main"] == 1


async def test_throughput_is_shown_for_each_attached_replica(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker("w0")
        gateway = await m.gateway()
        await (await gateway.submit([1, 2, 3], 50)).end()
        shown = await samples(m)
        ((rate),) = [value for key, value in shown.items() if key[0] == "gen_throughput"]
        assert rate > 0
