"""The life of a request through a real scheduler: tokens, prefixes, cancels, refusals, deadlines, traces."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from chipmesh.device.v1alpha1 import sampling_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from scheduler_svc.step_time import MOST_STEPS_AHEAD
from tests.contract.scheduler_svc.fake_executor import VOCAB_SIZE, expected_tokens
from tests.contract.scheduler_svc.fake_peers import until

Reason = session_pb2.RequestFinished


def code(failed: session_pb2.RequestFailed | None) -> grpc.StatusCode:
    assert failed is not None
    return next(code for code in grpc.StatusCode if code.value[0] == failed.code)


async def test_a_request_gets_the_models_tokens_in_order_and_says_where_it_ran(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        assert gateway.scheduler_id == m.service.scheduler_id
        seen = await (await gateway.submit([1, 2, 3, 4, 5], 20)).end()
        assert seen.queued
        assert seen.tokens == expected_tokens([1, 2, 3, 4, 5], 20)
        assert seen.finished == Reason.REASON_LENGTH
        (placed,) = seen.placed
        assert (placed.group, placed.worker, placed.chip) == ("g", "w0", "fake")
        assert placed.numeric_class == "exact"


async def test_many_requests_of_many_lengths_share_steps_and_none_mixes_with_another(mesh: Any) -> None:
    async with mesh(chunked_prefill_size=16) as m:
        await m.worker(page_count=200)
        gateway = await m.gateway()
        prompts = [[7 * n % VOCAB_SIZE for n in range(i, i + 3 + 5 * (i % 7))] for i in range(32)]
        await gateway.send(*[gateway.command(prompt, 3 + i % 11) for i, prompt in enumerate(prompts)])
        for i, (prompt, seen) in enumerate(zip(prompts, gateway.requests.values(), strict=True)):
            await seen.end()
            assert seen.tokens == expected_tokens(prompt, 3 + i % 11)


async def test_short_decode_steps_travel_together_as_the_chip_prefers_or_the_scheduler_says(
    mesh: Any,
) -> None:
    for window_s, most in ((None, MOST_STEPS_AHEAD), (1.0, MOST_STEPS_AHEAD), (0.0, 1)):
        async with mesh(step_window_s=window_s) as m:
            executor = await m.worker(context_tokens=150)
            gateway = await m.gateway()
            seen = await (await gateway.submit([1, 2, 3], 100)).end()
            assert seen.tokens == expected_tokens([1, 2, 3], 100)
            assert executor.message_sizes[0] == 1, "the prompt's step, whose token somebody waits for"
            assert max(executor.message_sizes) == most


async def test_two_messages_are_in_flight_where_each_is_a_prompts_step_and_a_window_holds_many(
    mesh: Any,
) -> None:
    async with mesh(step_window_s=1.0, chunked_prefill_size=4) as m:
        executor = await m.worker()
        gateway = await m.gateway()
        await (await gateway.submit([1, 2, 3], 40)).end()
        executor.gate.clear()
        before = len(executor.plans)
        seen = await gateway.submit(list(range(30)), 3)
        await until(lambda: len(executor.plans) == before + 2, "two messages")
        other = await gateway.submit([4, 5, 6], 3)
        assert len(executor.plans) == before + 2
        executor.release()
        assert (await seen.end()).tokens == expected_tokens(list(range(30)), 3)
        assert (await other.end()).tokens == expected_tokens([4, 5, 6], 3)


async def test_what_long_steps_are_followed_by_is_planned_late_so_that_who_comes_meanwhile_is_in_it(
    mesh: Any,
) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        _believe_in_steps_of(10.0, m)
        executor.gate.clear()
        await gateway.send(gateway.command([1, 2, 3], 20), gateway.command([4, 5, 6], 20))
        await until(lambda: len(executor.plans) == 1, "the prompts' step")
        late = await gateway.submit([7, 8, 9], 3)
        assert len(executor.plans) == 1
        executor.release()
        assert (await late.end()).tokens == expected_tokens([7, 8, 9], 3)
        assert [len(plan.admitted) for plan in executor.plans[:2]] == [2, 1]
        for seen in gateway.requests.values():
            await seen.end()


async def test_a_message_of_long_steps_ends_with_a_requests_last_token(mesh: Any) -> None:
    async with mesh(step_window_s=1.0) as m:
        executor = await m.worker()
        gateway = await m.gateway()
        _believe_in_steps_of(0.05, m)
        executor.gate.clear()
        await gateway.send(gateway.command([1, 2, 3], 6), gateway.command([4, 5, 6], 40))
        await until(lambda: len(executor.message_sizes) == 2, "the prompts' step, and the next message")
        assert executor.message_sizes == [1, 5]
        executor.release()
        for seen in gateway.requests.values():
            await seen.end()


def _believe_in_steps_of(seconds: float, mesh: Any) -> None:
    mesh.service.pool.member("w0").link._times.observe(seconds, prefill_tokens=0)


async def test_a_groups_own_window_goes_before_the_schedulers(mesh: Any) -> None:
    groups = [{"name": "g", "model": "m", "step_window_s": 0.0}]
    async with mesh(step_window_s=1.0, groups=groups) as m:
        executor = await m.worker(context_tokens=150)
        gateway = await m.gateway()
        seen = await (await gateway.submit([1, 2, 3], 50)).end()
        assert seen.tokens == expected_tokens([1, 2, 3], 50)
        assert set(executor.message_sizes) == {1}


async def test_without_overlap_no_step_is_planned_before_the_result_of_the_one_before(mesh: Any) -> None:
    async with mesh(step_window_s=1.0, enable_overlap=False) as m:
        executor = await m.worker()
        gateway = await m.gateway()
        seen = await (await gateway.submit([1, 2, 3], 20)).end()
        assert seen.tokens == expected_tokens([1, 2, 3], 20)
        assert set(executor.message_sizes) == {1}


async def test_a_stop_token_ends_a_request_and_is_part_of_its_output(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        expected = expected_tokens([9, 9], 10)
        seen = await (await gateway.submit([9, 9], 10, stop_token_ids=[expected[4]])).end()
        assert seen.tokens == expected[: expected.index(expected[4]) + 1]
        assert seen.finished == Reason.REASON_STOP


async def test_a_prompt_seen_before_reports_its_cached_pages_and_gives_the_same_tokens(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker(page_size=4)
        gateway = await m.gateway()
        prompt = list(range(21))
        first = await (await gateway.submit(prompt, 6)).end()
        second = await (await gateway.submit(prompt, 6)).end()
        assert first.placed[0].cached_tokens == 0
        assert second.placed[0].cached_tokens == 20
        assert first.tokens == second.tokens == expected_tokens(prompt, 6)


async def test_requests_of_other_salts_share_no_prefix(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker(page_size=4)
        gateway = await m.gateway()
        prompt = list(range(21))
        await (await gateway.submit(prompt, 2, cache_salt="a")).end()
        other = await (await gateway.submit(prompt, 2, cache_salt="b")).end()
        assert other.placed[0].cached_tokens == 0


async def test_a_request_that_brings_output_goes_on_after_it(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        whole = expected_tokens([5, 6, 7], 12)
        seen = await (await gateway.submit([5, 6, 7], 12, output_token_ids=whole[:5])).end()
        assert seen.tokens == whole
        assert seen.finished == Reason.REASON_LENGTH


async def test_history_goes_to_the_executor_only_where_a_penalty_needs_it(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        penal = sampling_pb2.SamplingParameters(top_p=1.0, repetition_penalty=1.2)
        output = expected_tokens([1, 2], 2)
        await (await gateway.submit([1, 2], 4, sampling=penal, output_token_ids=output)).end()
        await (await gateway.submit([3, 4], 4)).end()
        with_history, without = [a for plan in executor.plans for a in plan.admitted]
        assert list(with_history.penalty_prompt_token_ids) == [1, 2]
        assert list(with_history.output_token_ids) == output
        assert with_history.output_count == 2
        assert not without.penalty_prompt_token_ids


async def test_logprobs_come_where_they_are_asked_for_and_not_to_those_beside(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        sampling = sampling_pb2.SamplingParameters(top_p=1.0, repetition_penalty=1.0, logprobs=True)
        asked = await gateway.submit([1, 2], 5, sampling=sampling)
        beside = await gateway.submit([3, 4], 5)
        assert (await asked.end()).logprobs == [-0.5] * 5
        assert len((await beside.end()).tokens) == 5
        assert (await beside.end()).logprobs == []


async def test_two_steps_are_in_flight_with_overlap_and_one_without(mesh: Any) -> None:
    for overlap, depth in ((True, 2), (False, 1)):
        async with mesh(enable_overlap=overlap) as m:
            executor = await m.worker()
            executor.gate.clear()
            gateway = await m.gateway()
            seen = await gateway.submit([1, 2, 3], 10)
            await until(lambda: len(executor.plans) == depth, f"{depth} plans sent")  # noqa: B023
            member = m.service.pool.member("w0")
            assert len(member.link._steps) == depth
            executor.release()
            await seen.end()
            assert seen.tokens == expected_tokens([1, 2, 3], 10)


async def test_a_cancel_ends_the_request_and_its_pages_come_back(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker(page_count=40)
        gateway = await m.gateway()
        executor.hold_after(6)
        seen = await gateway.submit([1, 2, 3], 150)
        await seen.has_tokens(5)
        await gateway.cancel(seen)
        await seen.end()
        executor.release()
        assert seen.finished == Reason.REASON_CANCELLED
        batcher = m.service.engine.core.batcher(m.service.pool.member("w0").replica)
        await until(lambda: batcher.pages.held == 0 and batcher.running == 0, "no page is held")
        assert batcher.pages.free + batcher.pages.cached == 40


async def test_a_cancel_of_an_ended_or_unknown_request_is_nothing(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        first = await (await gateway.submit([1], 2)).end()
        await gateway.cancel(first)
        await gateway.send(session_pb2.RequestCommand(request_number=99, stop=session_pb2.StopRequest()))
        second = await (await gateway.submit([2], 2)).end()
        assert second.tokens == expected_tokens([2], 2)


async def test_a_failed_slot_fails_its_request_and_no_other(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        executor.gate.clear()
        executor.fail_slots[0] = "NON_FINITE_LOGITS"
        gateway = await m.gateway()
        first, second = await gateway.submit([1], 5), await gateway.submit([2], 5)
        executor.release()
        await asyncio.gather(first.end(), second.end())
        failed, well = (first, second) if first.failed else (second, first)
        assert failed.failed is not None
        assert failed.failed.reason == "NON_FINITE_LOGITS"
        assert code(failed.failed) is grpc.StatusCode.INTERNAL
        assert well.tokens == expected_tokens([well.number], 5)


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        seen = await (await gateway.submit([1], 2, model="nope")).end()
        assert code(seen.failed) is grpc.StatusCode.NOT_FOUND
        assert "nope" in seen.failed.message
        assert "served are: m" in seen.failed.message
        assert seen.failed.field == "model"


async def test_a_request_that_no_replica_can_ever_hold_is_refused_with_the_numbers(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker(page_count=8, page_size=4, context_tokens=100)
        gateway = await m.gateway()
        context = await (await gateway.submit([1] * 100, 10)).end()
        assert code(context.failed) is grpc.StatusCode.INVALID_ARGUMENT
        assert "100" in context.failed.message
        memory = await (await gateway.submit([1] * 40, 10)).end()
        assert code(memory.failed) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "40 tokens" in memory.failed.message
        assert "room for 32" in memory.failed.message
        assert (await (await gateway.submit([1], 2)).end()).tokens == expected_tokens([1], 2)


async def test_fields_that_cannot_be_are_refused_by_name(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        gateway = await m.gateway()
        for changes, field in (
            ({"model": ""}, "model"),
            ({"prompt_token_ids": []}, "prompt_token_ids"),
            ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"sampling": None}, "sampling"),
        ):
            seen = await (await gateway.submit([1], 2, **changes)).end()
            assert code(seen.failed) is grpc.StatusCode.INVALID_ARGUMENT, changes
            assert seen.failed.field == field
        assert m.service.engine.live_count == 0


async def test_a_full_queue_refuses_and_takes_requests_again_when_it_has_room(mesh: Any) -> None:
    async with mesh(max_queued_requests=2) as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 3)
        await until(lambda: running.placed, "the first runs")
        waiting = [await gateway.submit([2], 3), await gateway.submit([3], 3)]
        refused = await (await gateway.submit([4], 3)).end()
        assert code(refused.failed) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2" in refused.failed.message
        executor.release()
        for seen in [running, *waiting]:
            await seen.end()
            assert seen.tokens == expected_tokens([seen.number], 3)


async def test_requests_wait_for_the_first_replica_of_a_configured_group(mesh: Any) -> None:
    async with mesh(groups=[{"name": "g", "model": "m"}]) as m:
        gateway = await m.gateway()
        seen = await gateway.submit([1, 2], 4)
        await until(lambda: seen.queued, "queued")
        await m.worker()
        assert (await seen.end()).tokens == expected_tokens([1, 2], 4)


async def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        running = await gateway.submit([1], 50, deadline_ms=60)
        await until(lambda: running.placed, "it runs")
        waiting = await gateway.submit([2], 50, deadline_ms=60)
        for seen in (running, waiting):
            await seen.end()
            assert code(seen.failed) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert seen.failed.field == "deadline_ms"
        executor.release()
        after = await (await gateway.submit([3], 4, deadline_ms=60_000)).end()
        assert after.tokens == expected_tokens([3], 4)


async def test_a_request_is_one_trace_from_the_gateway_to_the_executor(mesh: Any, spans: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        await (await gateway.submit([1, 2], 3, traceparent=f"00-{trace_id}-{parent_id}-01")).end()
        seen = {
            span.name: span
            for span in spans.get_finished_spans()
            if f"{span.context.trace_id:032x}" == trace_id
        }
        request, queue, placement = seen["chipmesh.scheduler.request"], seen["queue"], seen["placement"]
        assert f"{request.parent.span_id:016x}" == parent_id
        assert queue.parent.span_id == placement.parent.span_id == request.context.span_id
        assert queue.end_time <= placement.start_time
        assert placement.attributes["chipmesh.worker"] == "w0"
        assert request.attributes["gen_ai.usage.output_tokens"] == 3
        (admitted,) = [a for plan in executor.plans for a in plan.admitted]
        assert admitted.traceparent == f"00-{trace_id}-{placement.context.span_id:016x}-01"


async def test_spans_end_on_refusal_cancel_deadline_and_lost_session(mesh: Any, spans: Any) -> None:
    async with mesh() as m:
        executor = await m.worker(max_slots=1)
        executor.gate.clear()
        gateway = await m.gateway()
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await (await gateway.submit([], 3, traceparent=traceparent)).end()
        cancelled = await gateway.submit([1], 3, traceparent=traceparent)
        await gateway.cancel(cancelled)
        await cancelled.end()
        await (await gateway.submit([2], 3, traceparent=traceparent, deadline_ms=1)).end()
        left = await gateway.submit([3], 3, traceparent=traceparent)
        await until(lambda: left.queued, "queued")
        await gateway.close()
        await until(lambda: m.service.engine.live_count == 0, "no live request")
        ended = spans.get_finished_spans()
        assert [span.name for span in ended].count("queue") == 4
        statuses = [span.status.description for span in ended if span.name == "chipmesh.scheduler.request"]
        assert sorted(statuses) == [
            "CANCELLED", "CANCELLED",
            "DEADLINE_EXCEEDED: DEADLINE_EXCEEDED", "INVALID_ARGUMENT: INVALID_ARGUMENT",
        ]  # fmt: skip


async def test_a_request_without_a_trace_begins_none(mesh: Any, spans: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        for traceparent in ("", "garbage", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"):
            await (await gateway.submit([1, 2], 3, traceparent=traceparent)).end()
        assert not [span for span in spans.get_finished_spans() if "Service/" not in span.name]
        assert {a.traceparent for plan in executor.plans for a in plan.admitted} == {""}


async def test_all_events_of_a_step_reach_a_gateway_as_one_message(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker(page_count=200)
        gateway = await m.gateway()
        await gateway.send(*[gateway.command([i, i], 12) for i in range(8)])
        for seen in gateway.requests.values():
            await seen.end()
        assert sum(len(batch.events) for batch in gateway.batches) >= 8 * 14
        assert len(gateway.batches) <= len(executor.plans) + 2


async def test_request_numbers_of_two_gateways_have_nothing_to_do_with_each_other(mesh: Any) -> None:
    async with mesh() as m:
        await m.worker()
        first, second = await m.gateway("a"), await m.gateway("b")
        ours, theirs = await first.submit([1], 30), await second.submit([2], 30)
        assert ours.number == theirs.number
        await first.cancel(ours)
        await theirs.end()
        assert theirs.tokens == expected_tokens([2], 30)
