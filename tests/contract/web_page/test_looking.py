"""What the page shows: its files, the mesh as it changes, and as it was when the scheduler is away."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from chipmesh.scheduler.v1alpha1 import admin_pb2
from scheduler_svc.app import SchedulerService
from scheduler_svc.config import SchedulerConfig
from tests.contract.scheduler_svc.fake_peers import until
from tests.contract.web_page.page_mesh import PageMesh, page_mesh


def replicas_of(last: dict[str, Any]) -> dict[str, Any]:
    groups = (last.get("mesh", {}).get("mesh") or {"groups": []})["groups"]
    return {replica["worker"]: replica for group in groups for replica in group["replicas"]}


async def test_the_page_and_all_that_it_names_come_with_a_policy_against_foreign_code(page: PageMesh) -> None:
    async with page.http() as http:
        index = await http.get("/")
        named = re.findall(r'(?:src|href)="(/page/[^"]+)"', index.text)
        assert {"/page/main.js", "/page/theme.js", "/page/style.css", "/page/icon.svg"} <= set(named)
        imported = re.findall(r'from "\./([^"]+)"', (await http.get("/page/main.js")).text)
        assert imported
        for path in ["/", *named, *(f"/page/{name}" for name in imported)]:
            response = await http.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        # What the policy would refuse anyhow must not be there.
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|https?://", index.text)


async def test_a_file_that_the_browser_has_is_not_sent_again(page: PageMesh) -> None:
    async with page.http() as http:
        first = await http.get("/page/style.css")
        again = await http.get("/page/style.css", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.get("/page/nothing.js")).status_code == 404


async def test_a_viewer_sees_groups_workers_and_changes_as_they_come(page: PageMesh) -> None:
    async with page.live() as view:
        last = await view.until(lambda last: last.get("mesh", {}).get("status") == "live", "a mesh")
        assert [group["name"] for group in last["mesh"]["mesh"]["groups"]] == ["g", "h"]
        assert last["hello"]["needs_key"] is False
        assert last["hello"]["models"] == [{"name": "m", "context_tokens": 128, "has_text": False}]
        await page.mesh.worker("w0")
        last = await view.until(lambda last: replicas_of(last).get("w0", {}).get("state") == "ready", "w0")
        replica = replicas_of(last)["w0"]
        assert (replica["chip"], replica["emulated"], replica["executor_pid"]) == ("fake", True, 101)
        assert replica["pages"]["total"] == replica["pages"]["free"] > 0
        await page.mesh.admin.SetTraffic(admin_pb2.SetTrafficRequest(weights={"g": 3, "h": 1}))
        await view.until(lambda last: last["mesh"]["mesh"]["groups"][0]["weight"] == 3, "another weight")


async def test_figures_come_every_second_and_a_late_viewer_gets_the_past_too(page: PageMesh) -> None:
    async with page.live() as view:
        await view.until(lambda last: last.get("figures", {}).get("samples"), "a sample")
        figures = [event for event in view.events if event["kind"] == "figures"]
        assert figures[0]["samples"] == [], "nothing was measured when the gateway had just begun"
    async with page.live() as late:
        last = await late.until(lambda last: "figures" in last, "the past")
        (sample,) = last["figures"]["samples"][:1]
        assert sample["tokens_per_s"] == 0
        assert sample["ttft_p50_s"] is None


async def test_without_the_scheduler_the_last_mesh_is_shown_with_its_age_until_it_is_back(
    page: PageMesh,
) -> None:
    async with page.live() as view:
        await view.until(lambda last: last.get("mesh", {}).get("status") == "live", "a mesh")
        address = page.mesh.address
        await page.mesh.service.stop(0)
        last = await view.until(lambda last: last["mesh"]["status"] == "away", "no scheduler")
        assert [group["name"] for group in last["mesh"]["mesh"]["groups"]] == ["g", "h"]
        assert 0 <= last["mesh"]["age_s"] < 10
        assert last["mesh"]["problem"]
        page.mesh.service = SchedulerService(SchedulerConfig(listen=address))
        await page.mesh.service.start()
        last = await view.until(lambda last: last["mesh"]["status"] == "live", "the scheduler again")
        assert last["mesh"]["mesh"]["groups"] == []


async def test_the_stream_ends_when_the_gateway_stops(page: PageMesh) -> None:
    async with page.live() as view:
        await view.until(lambda last: "mesh" in last, "a mesh")
        await asyncio.wait_for(page.gateway.stop(0), 5)
        await until(lambda: view.is_over, "the stream is over")


async def test_a_gateway_without_the_page_has_no_such_path(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, page={"serve": False}) as running, running.http() as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.get("/page/api/live")).status_code == 404
        assert (await http.get("/v1/models")).status_code == 200
