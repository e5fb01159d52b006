"""A constraint goes through the scheduler unread, to executors that can follow it only."""

from __future__ import annotations

from typing import Any

import grpc

from chipmesh.device.v1alpha1 import sampling_pb2
from tests.contract.scheduler_svc.fake_executor import expected_tokens
from tests.contract.scheduler_svc.fake_peers import registration

SAMPLING = sampling_pb2.SamplingParameters(
    top_p=1.0, repetition_penalty=1.0, constraint=sampling_pb2.Constraint(grammar="opaque: \x00 ü")
)


async def test_a_constraint_reaches_the_executor_as_it_came_with_the_output_so_far(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        gateway = await m.gateway()
        output = expected_tokens([1, 2], 3)
        await (await gateway.submit([1, 2], 6, sampling=SAMPLING, output_token_ids=output)).end()
        (admitted,) = [each for plan in executor.plans for each in plan.admitted]
        assert admitted.sampling == SAMPLING
        assert list(admitted.output_token_ids) == output
        assert not admitted.penalty_prompt_token_ids


async def test_where_no_executor_can_follow_one_the_request_is_refused_and_others_are_served(
    mesh: Any,
) -> None:
    async with mesh() as m:
        executor = await m.executor()
        executor.model.no_constraints_reason = "no tokenizer"
        supervisor = await m.supervisor("w0")
        await supervisor.register(registration(executor, "w0"))
        await m.until_ready("w0", executor.instance_id)
        gateway = await m.gateway()
        seen = await (await gateway.submit([1, 2], 6, sampling=SAMPLING)).end()
        assert seen.failed is not None
        assert seen.failed.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert (seen.failed.reason, seen.failed.field) == ("CONSTRAINT_UNSUPPORTED", "sampling.constraint")
        assert (await (await gateway.submit([1, 2], 3)).end()).tokens == expected_tokens([1, 2], 3)


async def test_a_constraint_that_fails_in_the_executor_is_the_requests_own_fault(mesh: Any) -> None:
    async with mesh() as m:
        executor = await m.worker()
        executor.fail_slots[0] = "CONSTRAINT_FAILED"
        gateway = await m.gateway()
        seen = await (await gateway.submit([1, 2], 6, sampling=SAMPLING)).end()
        assert seen.failed is not None
        assert seen.failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert (seen.failed.reason, seen.failed.field) == ("CONSTRAINT_FAILED", "sampling.constraint")
