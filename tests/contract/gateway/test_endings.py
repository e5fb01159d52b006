"""Streams that end before their time: cancel, disconnect, deadline, resume and shutdown."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from meshkit.errors import InvalidArgument, NotFound, Unavailable
from tests.contract.gateway.fake_scheduler import Submitted
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.unit.gateway.tiny_model import tokens_of


async def test_cancel_generation_ends_the_stream_and_reaches_the_scheduler(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", request_id="mine")
    request = await session.accepts()
    request.tokens(0, tokens_of("ab"))
    await stream.start()
    await stream.output()
    assert await mesh.cancel("mine") is True
    assert await mesh.cancel("mine") is False
    assert await mesh.cancel("never heard of") is False
    finished = await stream.end()
    assert finished.reason == pb.Finished.REASON_CANCELLED
    assert finished.usage.completion_tokens == 2
    assert await request.ended_by_gateway() == "cancel"
    assert not session.has_commands


@pytest.mark.parametrize("when", ["before accepted", "after accepted", "mid stream"])
async def test_a_client_that_goes_away_cancels_its_request(mesh: Mesh, when: str) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.submitted()
    if when != "before accepted":
        request.queued()
        await stream.start()
    if when == "mid stream":
        request.tokens(0, [97])
        await stream.output()
    stream.call.cancel()
    assert await request.ended_by_gateway() == "cancel"


async def test_a_connection_that_breaks_cancels_its_requests(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    await stream.start()
    await mesh.channel.close()
    assert await request.ended_by_gateway() == "cancel"


async def test_a_deadline_travels_and_its_end_cancels(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", timeout=0.5)
    request = await session.accepts()
    assert 0 < request.submit.deadline_ms <= 500
    await stream.start()
    error = await stream.error()
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await request.ended_by_gateway() == "cancel"
    without = mesh.generate("hi", timeout=None)
    request = await session.accepts()
    assert not request.submit.HasField("deadline_ms")
    request.finished()
    await without.end()


async def test_clients_that_go_away_at_any_moment_leave_nothing_behind(run_mesh: MeshFactory) -> None:
    count, draw = 150, random.Random(7)
    async with run_mesh(max_live_requests=count) as mesh:
        session = await mesh.session()

        async def answer() -> tuple[set[int], set[int]]:
            submitted: set[int] = set()
            ended: set[int] = set()
            while True:
                command = await session.next_command()
                if not command.HasField("submit"):
                    ended.add(command.request_number)
                elif list(command.submit.prompt_token_ids) == [9]:
                    Submitted(session, command.request_number, command.submit).finished()
                    return submitted, ended
                else:
                    submitted.add(command.request_number)
                    request = Submitted(session, command.request_number, command.submit)
                    request.queued()
                    request.tokens(0, tokens_of("abc"))

        async def go_away() -> None:
            stream = mesh.generate("hi")
            await asyncio.sleep(draw.random() * 0.05)
            stream.call.cancel()

        answering = asyncio.create_task(answer())
        await asyncio.gather(*(go_away() for _ in range(count)))
        while mesh.gateway.live_count:  # noqa: ASYNC110  # bounded by pytest's timeout
            await asyncio.sleep(0.001)
        await mesh.generate([9]).end()
        submitted, ended = await answering
        assert submitted == ended, "every request that reached the scheduler was ended there, and no other"


async def test_a_client_that_goes_away_just_after_the_end_changes_nothing(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, [97])
    request.finished()
    await stream.end()
    stream.call.cancel()
    other = mesh.generate([5])
    request = await session.accepts()  # And not a cancel of the first one.
    request.finished()
    await other.end()


async def test_an_ended_request_can_be_replayed_from_every_index(mesh: Mesh) -> None:
    session = await mesh.session()
    text = "a漢b🙂DE"
    tokens = tokens_of(text)
    stream = mesh.generate("hi", request_id="mine", stop={"stop_strings": ["DEF"]})
    request = await session.accepts()
    request.placed(cached_tokens=1)
    for index, token in enumerate(tokens):
        request.tokens(index, [token])
        if index == 0:
            await stream.start()
    request.finished()
    finished = await stream.end()
    for index in range(len(tokens) + 1):
        resumed = mesh.resume("mine", index)
        assert await resumed.start() == stream.accepted
        assert await resumed.end() == finished
        assert resumed.token_ids == tokens[index:]
        # What became certain with the tokens before `index` is not repeated; all else is there.
        assert stream.text.endswith(resumed.text)
    whole = mesh.resume("mine", 0)
    await whole.end()
    assert whole.text == text


async def test_a_resumed_stream_follows_the_live_one(run_mesh: MeshFactory) -> None:
    async with run_mesh(resume_window_s=30.0) as mesh:
        session = await mesh.session()
        stream = mesh.generate("hi", request_id="mine")
        request = await session.accepts()
        request.tokens(0, tokens_of("ab漢")[:3])
        await stream.start()
        await stream.output()
        assert stream.text == "ab"
        stream.call.cancel()
        request.tokens(3, tokens_of("ab漢")[3:])
        resumed = mesh.resume("mine", 3)
        await resumed.start()
        await resumed.until_text(1)
        request.tokens(5, tokens_of("c"))
        request.finished()
        await resumed.end()
        assert stream.text + resumed.text == "ab漢c"
        assert stream.token_ids + resumed.token_ids == tokens_of("ab漢c")
        assert not session.has_commands


async def test_nobody_who_resumes_in_time_means_cancel(run_mesh: MeshFactory) -> None:
    async with run_mesh(resume_window_s=0.02) as mesh:
        session = await mesh.session()
        stream = mesh.generate("hi")
        request = await session.accepts()
        await stream.start()
        stream.call.cancel()
        assert await request.ended_by_gateway() == "cancel"


async def test_a_second_reader_keeps_a_request_alive_when_the_first_goes(mesh: Mesh) -> None:
    session = await mesh.session()
    first = mesh.generate("hi", request_id="mine")
    request = await session.accepts()
    request.tokens(0, tokens_of("ab"))
    await first.start()
    await first.output()
    second = mesh.resume("mine", 2)
    await second.start()
    first.call.cancel()
    request.tokens(2, tokens_of("c"))
    assert (await second.output()).text == "c"
    request.finished()
    await second.end()
    assert not session.has_commands


async def test_what_cannot_be_resumed_says_why(run_mesh: MeshFactory) -> None:
    async with run_mesh(keep_finished_s=0.0) as mesh:
        session = await mesh.session()
        assert isinstance(await mesh.resume("never heard of", 0).error(), NotFound)
        stream = mesh.generate("hi", request_id="mine")
        request = await session.accepts()
        request.tokens(0, [97])
        await stream.start()
        await stream.output()
        error = await mesh.resume("mine", 2).error()
        assert isinstance(error, InvalidArgument)
        assert error.field == "next_index"
        assert "0 to 1" in error.message
        request.finished()
        await stream.end()
        assert isinstance(await mesh.resume("mine", 0).error(), NotFound)


async def test_draining_refuses_new_requests_and_lets_live_ones_end(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    await stream.start()
    stopping = asyncio.create_task(mesh.gateway.stop(20.0))
    await asyncio.sleep(0)
    error = await mesh.generate("hi").error()
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"
    request.tokens(0, tokens_of("bye"))
    request.finished()
    await stream.end()
    assert stream.text == "bye"
    began = time.monotonic()
    await stopping
    assert time.monotonic() - began < 5.0


async def test_what_does_not_end_within_the_grace_gets_a_terminal_status(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    await stream.start()
    request.tokens(0, [97])
    await stream.output()
    await mesh.gateway.stop(0.02)
    error = await stream.error()
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"
    assert error.metadata["retry_after_s"] == "1.0"
    assert "output_token_ids" in error.message
    assert await request.ended_by_gateway() == "cancel"
