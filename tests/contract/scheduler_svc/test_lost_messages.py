"""Messages that never arrive: a missing result, and reports by which gateways see what they miss."""

from __future__ import annotations

from typing import Any

import pytest

from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import AlreadyExists
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import FakeGateway, registration, until


def reported(gateway: FakeGateway) -> list[dict[int, int]]:
    """Of each message the requests whose place it told, and how many tokens they have."""
    return [
        {
            event.request_number: event.tokens.first_index
            for event in batch.events
            if event.WhichOneof("event") == "tokens" and not event.tokens.token_ids
        }
        for batch in gateway.batches
    ]


async def test_a_missing_result_closes_the_link_at_once_and_is_no_fault_of_the_requests(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.hold_after(6)
        seen = await gateway.submit([7, 8], 60)
        await seen.has_tokens(5)
        later = execution_pb2.StepResult(epoch=executor.epoch, step_seq=10**6, slots=[0], token_ids=[1])
        executor.send_with_next(later)
        executor.release()
        (live,) = m.service.engine._live
        await seen.end()
        assert seen.tokens == expected_tokens([7, 8], 60)
        assert executor.epoch == 2
        assert live.core.deaths_in_all == 0


async def test_a_late_registration_of_an_executor_that_was_replaced_changes_nothing(mesh: Any) -> None:
    async with mesh() as m:
        old = await m.worker("w0", page_count=200)
        late = registration(old, "w0")
        gateway = await m.gateway()
        new = await m.executor(page_count=200)
        await m.supervisors["w0"].register(registration(new, "w0"))
        await m.until_ready("w0", new.instance_id)
        new.hold_after(6)
        seen = await gateway.submit([7, 8], 60)
        await seen.has_tokens(5)
        with pytest.raises(AlreadyExists):
            await m.call(m.supervisors["w0"].registry.Register, late)
        new.release()
        await seen.end()
        assert seen.tokens == expected_tokens([7, 8], 60)
        assert len(seen.placed) == 1, "it was never moved"
        assert (await m.replicas())["w0"].instance_id == new.instance_id


async def test_a_session_is_told_how_far_its_requests_are_also_where_nothing_happens(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        first, second = await m.gateway("first"), await m.gateway("second")
        executor.hold_after(6)
        running = await first.submit([7, 8], 60)
        await running.has_tokens(6)
        await until(lambda: {1: 6} in reported(first), "a report of six tokens")
        await until(lambda: session_pb2.OpenSessionResponse() in second.batches, "a report of no request")
        assert not any(reported(second))
        executor.release()
        await running.end()
        assert running.tokens == expected_tokens([7, 8], 60)
