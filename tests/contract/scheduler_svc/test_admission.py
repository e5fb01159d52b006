"""What a scheduler takes and refuses when there is more than it can serve: bounds, hints, fair shares."""

from __future__ import annotations

from typing import Any

import grpc
import httpx2

from tests.contract.scheduler_svc.fake_peers import until


async def test_a_full_queue_says_when_to_come_back_and_later_to_each_further_one(mesh: Any) -> None:
    async with mesh(max_queued_requests=1) as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 3)
        await until(lambda: running.placed, "the first runs")
        await until(lambda: running.queued, "it was told so")
        waiting = await gateway.submit([2], 3)
        refused = [(await (await gateway.submit([3], 3)).end()).failed for _ in range(2)]
        for failed in refused:
            assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert failed.reason == "QUEUE_FULL"
            assert failed.retry_after_ms >= 50
        executor.release()
        for seen in (running, waiting):
            assert not (await seen.end()).failed


async def test_prompt_tokens_that_wait_are_bounded_and_one_large_prompt_alone_is_taken(mesh: Any) -> None:
    async with mesh(max_queued_tokens=8) as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 3)
        await until(lambda: running.placed, "the first runs")
        large = await gateway.submit(list(range(12)), 3)
        await until(lambda: large.queued, "it waits")
        refused = (await (await gateway.submit([3], 3)).end()).failed
        assert refused.reason == "QUEUE_FULL"
        assert "12 tokens wait already" in refused.message
        executor.release()
        assert not (await large.end()).failed


async def test_a_flood_of_one_key_leaves_room_in_the_queue_and_turns_to_another(mesh: Any) -> None:
    async with mesh(max_queued_requests=8) as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 2, owner="flood")
        await until(lambda: running.placed, "the first runs")
        flood = [await gateway.submit([2, n], 2, owner="flood") for n in range(8)]
        over = (await (await gateway.submit([2, 9], 2, owner="flood")).end()).failed
        assert over.reason == "QUEUE_FULL"
        other = await gateway.submit([3, 1], 2, owner="other")
        await until(lambda: other.queued, "the other's is taken")
        executor.release()
        await other.end()
        assert not other.failed
        assert sum(bool(seen.finished) for seen in flood) <= 2, "it had to wait for the flood"
        for seen in flood:
            await seen.end()


async def test_refusals_are_counted_by_reason(mesh: Any) -> None:
    async with mesh(max_queued_requests=1) as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 3)
        await until(lambda: running.placed, "the first runs")
        await gateway.submit([2], 3)
        await (await gateway.submit([3], 3)).end()
        await (await gateway.submit([], 3)).end()
        async with httpx2.AsyncClient() as client:
            text = (await client.get(f"http://{m.http_address}/metrics")).text
        assert 'chipmesh_refused_requests_total{reason="QUEUE_FULL"} 1.0' in text
        assert 'chipmesh_refused_requests_total{reason="INVALID_ARGUMENT"} 1.0' in text
        executor.release()
