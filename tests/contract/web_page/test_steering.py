"""What operators do by the page reaches the scheduler; what it refuses comes back in its own words."""

from __future__ import annotations

import asyncio
from typing import Any

from chipmesh.scheduler.v1alpha1 import registry_pb2
from tests.contract.scheduler_svc.fake_peers import registration, until
from tests.contract.web_page.page_mesh import PageMesh


async def weights(page: PageMesh) -> dict[str, float]:
    snapshot = page.mesh.service.engine.core.snapshot()
    return {group.name: group.weight for group in snapshot.groups}


def swap_of(last: dict[str, Any]) -> Any:
    """The one on the board."""
    (one,) = last.get("swaps", {}).get("swaps") or [{"stage": "", "over": False}]
    return one


async def order_of(page: PageMesh) -> registry_pb2.SwapOrder:
    """The order that a heartbeat of w0 brings."""
    swaps = page.mesh.service.pool.swaps
    await until(lambda: swaps.order_for("w0"), "a swap is ordered")
    order = swaps.order_for("w0")
    assert order is not None
    return order


async def test_traffic_is_split_as_the_sliders_say(page: PageMesh) -> None:
    answer = await page.post("traffic", {"model": "m", "weights": {"g": 80, "h": 20}})
    assert answer.status_code == 200
    assert await weights(page) == {"g": 80, "h": 20}


REFUSED: list[tuple[str, Any, int, str]] = [
    ("traffic", {"weights": {"x": 1}}, 400, "no group x"),
    ("traffic", {"weights": {"g": 0}}, 400, "0"),
    ("traffic", {"weights": {"g": -1, "h": 1}}, 400, "-1"),
    ("traffic", {"model": "none", "weights": {"g": 1}}, 400, "none"),
    ("traffic", {"weights": {"g": "much"}}, 400, "weights.g"),
    ("traffic", {}, 400, "weights"),
    ("traffic", {"weights": {"g": 1}, "wieghts": 1}, 400, "wieghts"),
    ("swap", {"worker": "w9", "backend": "other"}, 404, "w9"),
    ("swap", {"worker": "w9", "device": -1}, 400, "device"),
    ("drain", {"worker": "w9"}, 404, "w9"),
    ("drain", {"worker": "w0", "timeout_s": 1e9}, 400, "timeout_s"),
    ("flush", {"worker": "w9"}, 404, "w9"),
    ("flush", [], 400, "body"),
]
"""Path, body, status, and what the words must have."""


async def test_what_cannot_be_is_refused_and_the_field_or_value_is_named(page: PageMesh) -> None:
    async with page.http() as http:
        for path, body, status, words in REFUSED:
            answer = await http.post(f"/page/api/{path}", json=body)
            assert (answer.status_code, words in answer.text) == (status, True), (path, body, answer.text)
    assert await weights(page) == {"g": 1, "h": 1}


async def test_a_swap_goes_on_without_its_viewer_and_another_sees_how_far_it_is(page: PageMesh) -> None:
    await page.mesh.worker("w0")
    body = {"worker": "w0", "backend": "other", "device": 3, "options": {"a": "b"}}
    assert (await page.post("swap", body)).status_code == 202
    order = await order_of(page)
    assert (order.backend, order.device, dict(order.backend_options)) == ("other", 3, {"a": "b"})
    again = await page.post("swap", body)
    assert again.status_code == 400
    assert "being swapped already" in again.json()["error"]["message"]
    async with page.live() as view:
        swaps = page.mesh.service.pool.swaps
        swaps.heard("w0", registry_pb2.SwapProgress(swap_id=order.swap_id, stage="load", fraction=0.5))
        last = await view.until(lambda last: swap_of(last)["stage"] == "load", "the load")
        assert (swap_of(last)["worker"], swap_of(last)["backend"], swap_of(last)["fraction"]) == (
            "w0",
            "other",
            0.5,
        )
        new = await page.mesh.executor()
        supervisor = await page.mesh.supervisor("w0")
        await supervisor.register(registration(new, "w0"))
        last = await view.until(lambda last: swap_of(last)["over"], "its end")
        assert (swap_of(last)["stage"], swap_of(last)["error"]) == ("done", "")


async def test_a_swap_that_fails_keeps_its_cause_on_the_page(page: PageMesh) -> None:
    await page.mesh.worker("w0")
    async with page.live() as view:
        assert (await page.post("swap", {"worker": "w0", "backend": "other"})).status_code == 202
        order = await order_of(page)
        failed = registry_pb2.SwapProgress(swap_id=order.swap_id, stage="load", error="the chip is on fire")
        page.mesh.service.pool.swaps.heard("w0", failed)
        last = await view.until(lambda last: swap_of(last)["over"], "its end")
        assert "the chip is on fire" in swap_of(last)["error"]


async def test_a_drained_worker_takes_nothing_new_also_when_the_page_is_closed_meanwhile(
    page: PageMesh,
) -> None:
    await page.mesh.worker("w0")
    draining = asyncio.create_task(page.post("drain", {"worker": "w0", "timeout_s": 5}))
    answer = await draining
    assert answer.status_code == 200
    assert page.mesh.service.pool.member("w0").draining
    flushed = await page.post("flush", {})
    assert flushed.json() == {"flushed_pages": 0}
