"""Streams that break, leases that end, stale results: requests go on elsewhere with exact tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.errors import Aborted, Unavailable
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import registration, until

PROMPTS = [[i, i + 1, i + 2] for i in range(6)]


def stale_count(m: Any) -> float:
    return float(m.service.engine._metrics.stale_results._value.get())


async def test_requests_of_a_dead_executor_go_on_elsewhere_with_exact_tokens(mesh: Any) -> None:
    async with mesh() as m:
        first, second = await m.worker("w0", page_count=200), await m.worker("w1", page_count=200)
        first.hold_after(4)
        second.hold_after(4)
        gateway = await m.gateway()
        await gateway.send(*[gateway.command(prompt, 60) for prompt in PROMPTS])
        live = list(gateway.requests.values())
        for seen in live:
            await seen.has_tokens(3)
        on_first = [seen for seen in live if seen.placed[-1].worker == "w0"]
        assert 0 < len(on_first) < len(live), "both replicas have requests"
        await first.stop()
        second.release()
        for seen, prompt in zip(live, PROMPTS, strict=True):
            await seen.end()
            assert seen.tokens == expected_tokens(prompt, 60)
        for seen in on_first:
            assert [placed.worker for placed in seen.placed] == ["w0", "w1"]


async def test_a_broken_stream_of_a_living_executor_is_attached_again_with_a_new_epoch(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.hold_after(6)
        seen = await gateway.submit([4, 5], 80)
        await seen.has_tokens(5)
        executor.break_stream(Aborted("a gap in step_seq"))
        executor.release()
        (live,) = m.service.engine._live
        await seen.end()
        deaths = live.core.deaths
        assert seen.tokens == expected_tokens([4, 5], 80)
        assert executor.epoch == 2
        assert len(seen.placed) == 2
        assert deaths == 0, "a gap is no fault of the request"
        assert (await m.replicas())["w0"].epoch == 2


async def test_a_request_outlives_any_number_of_cut_connections_to_an_executor_that_lives(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.gate.clear()
        seen = await gateway.submit([4, 5], 20)
        for times in (1, 2, 3):
            await until(partial(_runs_again, seen, executor, times), "it is placed again")
            executor.cut_stream()
        executor.release()
        await seen.end()
        assert seen.tokens == expected_tokens([4, 5], 20)


def _runs_again(seen: Any, executor: Any, times: int) -> bool:
    return len(seen.placed) == times and executor.is_streaming


async def test_a_step_past_its_deadline_closes_the_link_and_the_request_goes_on(mesh: Any) -> None:
    async with mesh(step_deadline_floor_s=0.1) as m:
        first, second = await m.worker("w0"), await m.worker("w1")
        gateway = await m.gateway()
        first.hold_after(4)
        second.hold_after(4)
        seen = await gateway.submit([4, 5], 100)
        await seen.has_tokens(3)
        hung, other = (first, "w1") if seen.placed[0].worker == "w0" else (second, "w0")
        (first if other == "w0" else second).release()
        await seen.end()
        assert not hung.gate.is_set()
        assert seen.tokens == expected_tokens([4, 5], 100)
        assert seen.placed[-1].worker == other


async def test_a_lease_that_ends_takes_the_replica_away_though_its_stream_stands(mesh: Any) -> None:
    async with mesh(lease_duration_s=0.2, heartbeat_interval_s=0.05) as m:
        executor = await m.worker("w0")
        executor.hold_after(4)
        gateway = await m.gateway()
        seen = await gateway.submit([4, 5], 150)
        await seen.has_tokens(3)
        m.supervisors["w0"].stop_beating()
        await until(lambda: m.service.pool.member("w0").lost, "the lease ended")
        assert (await m.replicas())["w0"].state == 4
        await m.worker("w1")
        executor.release()
        await seen.end()
        assert seen.placed[-1].worker == "w1"
        assert seen.tokens == expected_tokens([4, 5], 150)


async def test_a_worker_whose_lease_ended_is_told_to_register_again_and_serves(mesh: Any) -> None:
    async with mesh(lease_duration_s=0.2, heartbeat_interval_s=0.05) as m:
        executor = await m.worker("w0")
        supervisor = m.supervisors["w0"]
        supervisor.stop_beating()
        await until(lambda: m.service.pool.member("w0").lost, "the lease ended")
        await supervisor.register(registration(executor, "w0"))
        await m.until_ready("w0", executor.instance_id)
        seen = await (await (await m.gateway()).submit([1], 5)).end()
        assert seen.tokens == expected_tokens([1], 5)


async def test_results_of_another_epoch_or_step_are_counted_and_ignored(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.hold_after(6)
        seen = await gateway.submit([7, 8], 60)
        await seen.has_tokens(5)
        for epoch, step_seq in ((executor.epoch + 1, len(executor.plans)), (executor.epoch, 1), (0, 10**9)):
            executor.send_with_next(
                execution_pb2.StepResult(epoch=epoch, step_seq=step_seq, slots=[0], token_ids=[1])
            )
        executor.release()
        await seen.end()
        assert seen.tokens == expected_tokens([7, 8], 60)
        assert stale_count(m) == 3
        assert executor.epoch == 1


async def test_a_result_that_contradicts_itself_costs_the_link_not_the_request(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        executor.gate.clear()
        gateway = await m.gateway()
        seen = await gateway.submit([7, 8], 20)
        await until(lambda: executor.plans, "a plan was sent")
        executor.send_with_next(execution_pb2.StepResult(epoch=1, step_seq=1, slots=[0, 1], token_ids=[1]))
        executor.release()
        await seen.end()
        assert seen.tokens == expected_tokens([7, 8], 20)
        assert executor.epoch == 2


async def test_a_request_that_two_executors_died_under_is_quarantined(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.gate.clear()
        seen = await gateway.submit([7, 8], 100)
        for epoch in (1, 2):
            await until(lambda: executor.plans and executor.plans[-1].epoch == epoch, "it runs")  # noqa: B023
            executor.break_stream(Unavailable("the device failed"))
        await seen.end()
        assert seen.failed is not None
        assert seen.failed.reason == "POISONED"
        assert "request 'r" in seen.failed.message
        executor.release()
        after = await (await gateway.submit([1], 3)).end()
        assert after.tokens == expected_tokens([1], 3)


async def test_a_new_executor_of_the_same_worker_replaces_the_old_one_at_once(mesh: Any) -> None:
    async with mesh() as m:
        old = await m.worker("w0")
        gateway = await m.gateway()
        old.hold_after(4)
        seen = await gateway.submit([4, 5], 150)
        await seen.has_tokens(3)
        new = await m.executor()
        await m.supervisors["w0"].register(registration(new, "w0"))
        await seen.end()
        old.release()
        assert seen.tokens == expected_tokens([4, 5], 150)
        replica = (await m.replicas())["w0"]
        assert replica.instance_id == new.instance_id
        assert len(await m.replicas()) == 1


async def test_a_heartbeat_that_says_dead_moves_requests_before_the_stream_breaks(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker("w0")
        gateway = await m.gateway()
        executor.hold_after(4)
        seen = await gateway.submit([4, 5], 100)
        await seen.has_tokens(3)
        supervisor = m.supervisors["w0"]
        supervisor.state = registry_pb2.HeartbeatRequest.EXECUTOR_STATE_DEAD
        await until(lambda: m.service.pool.member("w0").state.name == "LOST", "w0 is lost")
        await m.worker("w1")
        await seen.end()
        executor.release()
        assert seen.tokens == expected_tokens([4, 5], 100)
        assert seen.placed[-1].worker == "w1"


async def test_an_executor_at_the_address_with_another_instance_is_never_attached(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.executor()
        supervisor = await m.supervisor("w0")
        await supervisor.register(registration(executor, "w0", instance_id="somebody-else"))
        await until(lambda: m.service.pool.member("w0").broken, "an attempt ended")
        assert executor.epoch == 0


@pytest.mark.parametrize("how", ["closed", "replaced"])
async def test_the_requests_of_a_session_that_ends_are_cancelled(mesh: Any, how: str) -> None:
    async with mesh() as m:
        executor = await m.worker()
        first = await m.gateway("gw")
        executor.hold_after(3)
        seen = await first.submit([1], 150)
        await seen.has_tokens(2)
        if how == "closed":
            await first.close()
        else:
            await m.gateway("gw")
            await first.reading
            assert isinstance(first.end, Aborted)
        await until(lambda: m.service.engine.live_count == 0, "no live request")
        executor.release()
        batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
        await until(lambda: batcher.pages.held == 0, "no page is held")
        assert executor.epoch == 1
