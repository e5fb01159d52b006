"""Sessions that break: accepted requests go on, and their clients see nothing of it."""

from __future__ import annotations

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from meshkit.errors import Unavailable
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.unit.gateway.tiny_model import IM_END, tokens_of

BREAKS = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, None]


@pytest.mark.parametrize("code", BREAKS)
async def test_a_broken_session_is_opened_again_and_requests_go_on_from_their_tokens(
    mesh: Mesh, code: grpc.StatusCode | None
) -> None:
    session = await mesh.session()
    stream = mesh.generate("hello", sampling={"seed": 7}, stop={"max_tokens": 100})
    request = await session.accepts()
    request.tokens(0, tokens_of("漢")[:2])
    await stream.start()
    await stream.output()
    session.break_with(code)
    again = await mesh.scheduler.session()
    assert again.gateway_id == session.gateway_id
    resubmitted = await again.submitted()
    assert resubmitted.number != request.number
    assert list(resubmitted.submit.output_token_ids) == tokens_of("漢")[:2]
    assert resubmitted.submit.sampling == request.submit.sampling
    assert resubmitted.submit.max_output_tokens == request.submit.max_output_tokens == 100
    assert resubmitted.submit.prompt_token_ids == request.submit.prompt_token_ids
    resubmitted.queued()
    resubmitted.placed(cached_tokens=4)
    resubmitted.tokens(2, [*tokens_of("漢")[2:], *tokens_of("字")])
    resubmitted.finished()
    finished = await stream.end()
    assert stream.text == "漢字"
    assert stream.token_ids == tokens_of("漢字")
    assert finished.usage == pb.Usage(prompt_tokens=5, completion_tokens=6, cached_tokens=0)


async def test_a_scheduler_that_comes_back_at_its_address_gets_all_live_requests(mesh: Mesh) -> None:
    session = await mesh.session()
    streams = [mesh.generate([index + 1]) for index in range(8)]
    requests = [await session.accepts() for _ in streams]
    for request in requests:
        request.tokens(0, [*request.submit.prompt_token_ids, 65])
    for stream in streams:
        await stream.start()
        await stream.output()
    await mesh.scheduler.stop()
    mesh.scheduler.scheduler_id = "scheduler-2"
    await mesh.scheduler.start()
    again = await mesh.scheduler.session()
    for _ in streams:
        request = await again.accepts()
        prompt = list(request.submit.prompt_token_ids)
        assert list(request.submit.output_token_ids) == [*prompt, 65]
        request.tokens(2, [66, *prompt])
        request.finished()
    assert again.batches == [8], "commands of one turn of the loop travel together"
    for index, stream in enumerate(streams):
        await stream.end()
        assert stream.token_ids == [index + 1, 65, 66, index + 1]


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
async def test_an_accepted_request_that_a_new_scheduler_refuses_is_brought_again(
    mesh: Mesh, code: grpc.StatusCode
) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    (await session.accepts()).tokens(0, [97])
    await stream.start()
    await stream.output()
    session.break_with(grpc.StatusCode.UNAVAILABLE)
    again = await mesh.scheduler.session()
    (await again.submitted()).failed(code, "TOO_EARLY", "no worker has registered yet")
    request = await again.accepts()
    assert list(request.submit.output_token_ids) == [97]
    request.tokens(1, [98])
    request.finished()
    await stream.end()
    assert stream.text == "ab"


async def test_an_accepted_request_that_is_refused_for_good_fails(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    await session.accepts()
    await stream.start()
    session.break_with(grpc.StatusCode.UNAVAILABLE)
    again = await mesh.scheduler.session()
    (await again.submitted()).failed(grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE", "never fits")
    assert (await stream.error()).reason == "TOO_LARGE"


async def test_a_request_that_was_submitted_but_not_queued_is_submitted_again(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    await session.submitted()
    session.break_with(grpc.StatusCode.UNAVAILABLE)
    request = await (await mesh.scheduler.session()).accepts()
    request.finished()
    await stream.end()


async def test_a_request_whose_end_was_lost_with_the_session_ends_by_its_tokens(mesh: Mesh) -> None:
    session = await mesh.session()
    full = mesh.generate("hi", stop={"max_tokens": 2})
    (await session.accepts()).tokens(0, tokens_of("ab"))
    ended = mesh.generate("hi")
    (await session.accepts()).tokens(0, [97, IM_END])
    for stream in (full, ended):
        await stream.start()
        await stream.output()
    session.break_with(grpc.StatusCode.UNAVAILABLE)
    assert (await full.end()).reason == pb.Finished.REASON_LENGTH
    assert (await ended.end()).reason == pb.Finished.REASON_STOP
    again = await mesh.scheduler.session()
    assert not again.has_commands


async def test_a_new_request_waits_for_a_scheduler(run_mesh: MeshFactory) -> None:
    async with run_mesh(scheduler_up=False) as mesh:
        stream = mesh.generate("hi")
        await mesh.scheduler.start()
        request = await (await mesh.scheduler.session()).accepts()
        request.finished()
        await stream.end()


async def test_without_a_scheduler_a_new_request_is_unavailable_after_a_bounded_time(
    run_mesh: MeshFactory,
) -> None:
    async with run_mesh(scheduler_up=False, accept_timeout_s=0.05) as mesh:
        stream = mesh.generate("hi")
        error = await stream.error()
        assert stream.accepted is None
        assert isinstance(error, Unavailable)
        assert error.reason == "SCHEDULER_UNAVAILABLE"
        assert error.metadata["retry_after_s"] == "1.0"
        # The request is not carried on behind the client's back.
        await mesh.scheduler.start()
        session = await mesh.session()
        other = mesh.generate([5])
        request = await session.accepts()
        assert list(request.submit.prompt_token_ids) == [5]
        request.finished()
        await other.end()


async def test_accepted_requests_fail_when_no_scheduler_comes_back_in_time(run_mesh: MeshFactory) -> None:
    async with run_mesh(outage_limit_s=0.01) as mesh:
        session = await mesh.session()
        stream = mesh.generate("hi")
        (await session.accepts()).tokens(0, [97])
        await stream.start()
        await mesh.scheduler.stop()
        error = await stream.error()
        assert isinstance(error, Unavailable)
        assert error.reason == "SCHEDULER_LOST"
        assert stream.text == "a"


async def test_a_request_cancelled_while_there_is_no_session_is_not_submitted_again(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", request_id="gone")
    await session.accepts()
    await stream.start()
    await mesh.scheduler.stop()
    assert await mesh.cancel("gone")
    assert (await stream.end()).reason == pb.Finished.REASON_CANCELLED
    await mesh.scheduler.start()
    again = await mesh.scheduler.session()
    other = mesh.generate([5])
    request = await again.accepts()
    assert list(request.submit.prompt_token_ids) == [5]
    request.finished()
    await other.end()


async def test_a_long_prompt_travels_in_one_piece(run_mesh: MeshFactory) -> None:
    model = {"name": "long", "context_length": 4_000_000, "vocab_size": 300}
    async with run_mesh(models=[model]) as mesh:
        session = await mesh.session()
        stream = mesh.generate([299] * 2_000_000)
        request = await session.accepts()
        assert len(request.submit.prompt_token_ids) == 2_000_000
        request.finished()
        await stream.end()
