"""ExecuteSteps over gRPC: exact tokens, order, fencing, refusals that harm nobody else."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from chipmesh.device.v1alpha1.execution_pb2 import AttachRequest, ExecuteStepsRequest, StepPlan
from plugins.hash.oracle import continue_tokens
from tests.contract.worker_svc.harness import PAGES, VOCAB, Driver, Harness, admit, chunk, failure_of


async def test_one_request_gets_the_oracles_tokens(driver: Driver) -> None:
    await driver.step(admitted=[admit(0, [3, 9, 1, 30])], prefill=[chunk(0, [5, 6, 7])])
    for _ in range(12):
        await driver.step(decode=True)
    assert driver.tokens[0] == continue_tokens([5, 6, 7], 13, VOCAB)


async def test_mixed_steps_of_many_slots_get_the_oracles_tokens(driver: Driver) -> None:
    prompts = {slot: [slot + 1] * (3 + slot) for slot in range(4)}
    for slot, prompt in prompts.items():
        pages = range(slot * 8, slot * 8 + 8)
        await driver.step(
            admitted=[admit(slot, pages)], prefill=[chunk(slot, prompt[:2], last=False)], decode=True
        )
        await driver.step(prefill=[chunk(slot, prompt[2:], start=2)], decode=True)
    for _ in range(5):
        await driver.step(decode=True)
    for slot, prompt in prompts.items():
        assert driver.tokens[slot] == continue_tokens(prompt, len(driver.tokens[slot]), VOCAB)
    assert [len(driver.tokens[slot]) for slot in range(4)] == [12, 10, 8, 6]


async def test_plans_sent_ahead_are_answered_in_order(driver: Driver) -> None:
    await driver.send(admitted=[admit(0, range(8))], prefill=[chunk(0, [1, 2])])
    for _ in range(20):
        await driver.send(decode=True)
    results = [await driver.result() for _ in range(21)]
    assert [result.step_seq for result in results] == list(range(1, 22))
    assert driver.tokens[0] == continue_tokens([1, 2], 21, VOCAB)


async def test_a_plan_is_on_the_device_before_the_result_before_it_was_read(driver: Driver) -> None:
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [1])])
    for _ in range(6):
        await driver.send(decode=True)
    idle = [(await driver.result()).idle_time.ToNanoseconds() for _ in range(6)]
    # The first waited for the test; those behind it were queued while it ran, so most waited far less.
    assert sorted(idle)[2] < 2_000_000


async def test_the_results_of_a_messages_plans_leave_together(driver: Driver) -> None:
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [1, 2])])
    plans = [StepPlan(epoch=driver.epoch, step_seq=seq, decode=True) for seq in (2, 3, 4)]
    await driver.call.write(ExecuteStepsRequest(plans=plans))
    response = await driver.call.read()
    assert [result.step_seq for result in response.results] == [2, 3, 4]
    made = [token for result in response.results for token in result.token_ids]
    assert driver.tokens[0] + made == continue_tokens([1, 2], 4, VOCAB)


async def test_a_message_without_plans_is_refused_by_name(driver: Driver) -> None:
    await driver.call.write(ExecuteStepsRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await driver.result()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "plan" in (refused.value.details() or "")


async def test_a_prefix_page_is_reused_by_another_slot(driver: Driver) -> None:
    prompt = list(range(50, 62))
    await driver.step(admitted=[admit(0, [10, 11, 12, 13])], prefill=[chunk(0, prompt)])
    await driver.step(
        admitted=[admit(1, [10, 11, 20, 21], cached=8)], prefill=[chunk(1, [*prompt[8:10], 7], start=8)]
    )
    await driver.step(decode=True)
    assert driver.tokens[0] == continue_tokens(prompt, 2, VOCAB)
    assert driver.tokens[1] == continue_tokens([*prompt[:10], 7], 2, VOCAB)


async def test_a_slot_released_and_taken_again_starts_anew(driver: Driver) -> None:
    await driver.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    await driver.step(released=[0], admitted=[admit(0, [0])], prefill=[chunk(0, [2])])
    await driver.step(decode=True)
    assert driver.tokens[0] == continue_tokens([1], 1, VOCAB) + continue_tokens([2], 2, VOCAB)


async def test_logprobs_come_where_a_slot_asked(driver: Driver) -> None:
    request = admit(0, [0])
    request.sampling.logprobs = True
    result = await driver.step(admitted=[request], prefill=[chunk(0, [1])])
    assert list(result.logprobs) == [0.0]


async def test_results_tell_device_and_idle_time(driver: Driver) -> None:
    first = await driver.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    assert first.HasField("device_time")
    assert not first.HasField("idle_time")
    assert (await driver.step(decode=True)).idle_time.ToNanoseconds() > 0


async def test_a_gap_in_step_seq_is_aborted(driver: Driver) -> None:
    await driver.step()
    await driver.send_plan(StepPlan(epoch=driver.epoch, step_seq=3))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await driver.result()
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert "step_seq is 3" in (refused.value.details() or "")


@pytest.mark.parametrize("epoch", [0, 1, 7])
async def test_a_stale_or_invented_epoch_is_aborted_and_leaves_the_live_stream_alone(
    harness: Harness, epoch: int
) -> None:
    await harness.attach()
    live = await harness.drive()
    await live.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    zombie = Driver(harness.execution.ExecuteSteps(), epoch)
    await zombie.send(decode=True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await zombie.result()
    assert refused.value.code() is grpc.StatusCode.ABORTED
    await live.step(decode=True)
    assert live.tokens[0] == continue_tokens([1], 2, VOCAB)
    live.call.cancel()


async def test_attaching_closes_the_stream_before_and_drops_its_slots(harness: Harness) -> None:
    old = await harness.drive()
    await old.step(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    new = await harness.drive()
    assert new.epoch > old.epoch
    with pytest.raises(grpc.aio.AioRpcError) as closed:
        await old.result()
    assert closed.value.code() is grpc.StatusCode.ABORTED
    await new.step(admitted=[admit(0, [0])], prefill=[chunk(0, [2])])
    assert new.tokens[0] == continue_tokens([2], 1, VOCAB)
    new.call.cancel()


async def test_attaching_closes_a_stream_that_never_sent_a_plan(harness: Harness) -> None:
    idle = await harness.drive()
    # The server must have seen the idle stream: a probe stream behind it on the same connection shows that.
    await harness.attach()
    assert await asyncio.wait_for(idle.call.code(), 5) is grpc.StatusCode.ABORTED


async def test_a_wrong_plan_is_refused_with_its_field_and_the_others_go_on(
    driver: Driver, harness: Harness
) -> None:
    await driver.step(
        admitted=[admit(0, range(8)), admit(1, range(8, 16))], prefill=[chunk(0, [1]), chunk(1, [2])]
    )
    await driver.step(decode=True)
    await driver.send(prefill=[chunk(5, [1])], decode=True)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await driver.result()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "plan.prefill[0].slot" in (refused.value.details() or "")
    again = Driver(harness.execution.ExecuteSteps(), driver.epoch, step_seq=driver.step_seq - 1)
    again.tokens = driver.tokens
    await again.step(decode=True)
    await again.step(released=[1], decode=True)
    assert again.tokens[0] == continue_tokens([1], 4, VOCAB)
    assert again.tokens[1] == continue_tokens([2], 3, VOCAB)
    again.call.cancel()


async def test_plans_queued_behind_a_wrong_one_are_not_run(driver: Driver, harness: Harness) -> None:
    await driver.step(admitted=[admit(0, range(8))], prefill=[chunk(0, [1])])
    await driver.send(released=[7])
    await driver.send(decode=True)
    await driver.send(decode=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await driver.result()
    again = Driver(harness.execution.ExecuteSteps(), driver.epoch, step_seq=1)
    again.tokens = driver.tokens
    await again.step(decode=True)
    assert again.tokens[0] == continue_tokens([1], 2, VOCAB)
    again.call.cancel()


async def test_ending_the_stream_in_order_ends_it_with_ok(driver: Driver) -> None:
    await driver.send(admitted=[admit(0, [0])], prefill=[chunk(0, [1])])
    await driver.call.done_writing()
    await driver.result()
    assert await driver.call.read() is grpc.aio.EOF
    assert await driver.call.code() is grpc.StatusCode.OK


async def test_another_instance_is_not_attached(harness: Harness) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.execution.Attach(AttachRequest(scheduler_id="s", instance_id="other"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_cancelled_stream_does_not_stop_the_next(harness: Harness) -> None:
    first = await harness.drive()
    await first.send(admitted=[admit(0, range(PAGES // 2))], prefill=[chunk(0, [1] * 90)])
    first.call.cancel()
    second = await harness.drive()
    await second.step(admitted=[admit(0, [0])], prefill=[chunk(0, [3])])
    assert second.tokens[0] == continue_tokens([3], 1, VOCAB)
    second.call.cancel()
    assert isinstance(await failure_of(second.call), grpc.aio.AioRpcError)
