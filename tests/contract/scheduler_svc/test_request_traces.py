"""What a trace tells of a request that moves: each place that it ran at, and what became of that."""

from __future__ import annotations

from typing import Any

from meshkit.errors import Aborted
from tests.contract.scheduler_svc.fake_executor import expected_tokens

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def of_request(spans: Any) -> list[Any]:
    """Ended spans of the trace, by their begin."""
    own = [span for span in spans.get_finished_spans() if f"{span.context.trace_id:032x}" == TRACE]
    return sorted(own, key=lambda span: span.start_time)


async def test_a_lost_replica_is_a_failed_placement_and_a_second_one_follows(mesh: Any, spans: Any) -> None:
    async with mesh() as m:
        first, second = await m.worker("w0"), await m.worker("w1")
        first.hold_after(4)
        second.hold_after(4)
        gateway = await m.gateway()
        seen = await gateway.submit([1, 2, 3], 30, traceparent=PARENT)
        await seen.has_tokens(3)
        victim, other = (first, second) if seen.placed[-1].worker == "w0" else (second, first)
        await victim.stop()
        other.release()
        await seen.end()
        assert seen.tokens == expected_tokens([1, 2, 3], 30)
        request, *parts = of_request(spans)
        assert [part.name for part in parts] == ["queue", "placement", "queue", "placement"]
        assert {part.parent.span_id for part in parts} == {request.context.span_id}
        lost, kept = parts[1], parts[3]
        assert (lost.status.description, kept.status.description) == ("LOST", None)
        assert [part.attributes["chipmesh.placement"] for part in (lost, kept)] == [1, 2]
        assert [part.attributes["chipmesh.worker"] for part in (lost, kept)] == [
            p.worker for p in seen.placed
        ]
        (moved,) = request.events
        assert dict(moved.attributes) == {
            "chipmesh.lost": True,
            "gen_ai.usage.output_tokens": len_before(other),
        }
        assert request.status.is_unset
        # Each executor was told of its own placement: its spans have a parent that is sent.
        for executor, part in ((victim, lost), (other, kept)):
            (admitted,) = [a for plan in executor.plans for a in plan.admitted]
            assert admitted.traceparent.split("-")[2] == f"{part.context.span_id:016x}"


def len_before(executor: Any) -> int:
    """Output tokens that a request brought to an executor."""
    (admitted,) = [a for plan in executor.plans for a in plan.admitted]
    return int(admitted.output_count)


async def test_a_stream_that_was_attached_anew_is_no_failed_placement(mesh: Any, spans: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        executor.hold_after(6)
        seen = await gateway.submit([4, 5], 40, traceparent=PARENT)
        await seen.has_tokens(5)
        executor.break_stream(Aborted("a gap in step_seq"))
        executor.release()
        await seen.end()
        _, *parts = of_request(spans)
        assert [part.name for part in parts] == ["queue", "placement", "queue", "placement"]
        assert all(part.status.is_unset for part in parts)


async def test_a_retracted_request_has_a_second_placement(mesh: Any, spans: Any) -> None:
    async with mesh(schedule_conservativeness=0.01) as m:
        await m.worker(page_count=16, max_slots=4)
        gateway = await m.gateway()
        await gateway.send(*[gateway.command([i, i + 1], 30, traceparent=PARENT) for i in range(3)])
        for seen in gateway.requests.values():
            await seen.end()
        retracted = sum(batcher.retracted_count for _, _, batcher in m.service.engine.attached())
        assert retracted > 0, "the test has to provoke it"
        placements = [span for span in of_request(spans) if span.name == "placement"]
        assert len(placements) == 3 + retracted
        assert all(span.status.is_unset for span in placements)
