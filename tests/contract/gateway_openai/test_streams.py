"""Streams as OpenAI's clients read them: every chunk valid, one end for each choice, nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from tests.contract.gateway.fake_scheduler import FakeSession, Submitted
from tests.contract.gateway_openai.openai_mesh import (
    HELLO,
    MeshFactory,
    OpenAiMesh,
    answer,
    events_of,
    say,
    wait_until,
)
from tests.unit.gateway.tiny_model import tokens_of


async def stream_of(mesh: OpenAiMesh, path: str, body: dict[str, Any]) -> list[Any]:
    async with mesh.http() as http:
        response = await http.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(response.content)


def check_chat_chunks(events: list[Any], *, count: int) -> list[str]:
    """The texts of `count` choices, after each chunk was looked at."""
    texts, ended = [""] * count, [False] * count
    for event in events:
        chunk = ChatCompletionChunk.model_validate(event, strict=False)
        assert chunk.object == "chat.completion.chunk"
        assert chunk.id == events[0]["id"]
        for choice in chunk.choices:
            assert not ended[choice.index], "a chunk after the last one"
            texts[choice.index] += choice.delta.content or ""
            ended[choice.index] = choice.finish_reason is not None
            assert "finish_reason" in event["choices"][0], "null is said"
    assert all(ended), "a choice without its end"
    return texts


async def test_a_chat_is_role_text_end_usage_done(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    events, _ = await asyncio.gather(stream_of(mesh, "/v1/chat/completions", body), answer(session, "Hi é!"))
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    prompt = 3 + len(tokens_of("user\nhello\nassistant\n"))  # with three tokens of markup
    assert usage["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 7,
        "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert all(event["usage"] is None for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert check_chat_chunks(events, count=1) == ["Hi é!"]


async def test_without_usage_asked_for_no_chunk_has_it(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    events, _ = await asyncio.gather(
        stream_of(mesh, "/v1/completions", {"prompt": "a", "max_tokens": 9}), answer(session, "b")
    )
    assert events.pop() == "[DONE]"
    assert all("usage" not in event for event in events)
    for event in events:
        Completion.model_validate(
            event | {"choices": [{**c, "finish_reason": "stop"} for c in event["choices"]]}
        )
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


async def test_usage_in_every_chunk_says_how_many_tokens_it_brings(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [1, 2], "stream_options": options, "return_token_ids": True}
    reading = asyncio.create_task(stream_of(mesh, "/v1/completions", body))
    request = await session.accepts()
    request.tokens(0, tokens_of("abc"))
    request.tokens(3, tokens_of("de"))
    request.finished()
    events = (await reading)[:-1]
    seen = 0
    for event in events:
        for choice in event["choices"]:
            seen += len(choice.get("token_ids", ()))
        assert event["usage"]["completion_tokens"] == seen
    assert seen == 5
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_choices_share_prompt_and_seed_and_differ_in_their_index(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    body = {"messages": HELLO, "n": 3, "stream_options": {"include_usage": True}}
    reading = asyncio.create_task(stream_of(mesh, "/v1/chat/completions", body))
    requests = [await session.accepts() for _ in range(3)]
    first = requests[0].submit
    assert [request.submit.sampling.choice for request in requests] == [0, 1, 2]
    assert {request.submit.sampling.seed for request in requests} == {first.sampling.seed}
    assert {tuple(request.submit.prompt_token_ids) for request in requests} == {tuple(first.prompt_token_ids)}
    assert len({request.submit.request_id for request in requests}) == 3
    for request, text in zip(reversed(requests), ("c", "bb", "aaa"), strict=True):
        say(request, text)
    events = (await reading)[:-1]
    assert check_chat_chunks(events, count=3) == ["aaa", "bb", "c"]
    assert events[-1]["usage"]["prompt_tokens"] == len(first.prompt_token_ids), "the prompt counts once"
    assert events[-1]["usage"]["completion_tokens"] == 9


async def until_cancelled(session: FakeSession, requests: list[Submitted]) -> None:
    """Until all of them were cancelled."""
    left = {request.number for request in requests}
    while left:
        command = await session.next_command()
        assert command.WhichOneof("command") == "cancel"
        left.remove(command.request_number)


async def test_a_client_that_goes_away_cancels_all_its_choices(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.client() as client:
        opening = asyncio.create_task(
            client.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True)
        )
        requests = [await session.accepts() for _ in range(2)]
        stream = await opening
        requests[0].tokens(0, tokens_of("a"))
        while not (chunk := await stream.__anext__()).choices[0].delta.content:
            assert chunk.choices[0].finish_reason is None
        await stream.close()
        await until_cancelled(session, requests)
    await wait_until(lambda: mesh.gateway.live_count == 0, "no generation lives")


async def test_a_client_that_goes_away_from_a_whole_answer_cancels_it(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.client() as client:
        waiting = asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO))
        request = await session.accepts()
        request.tokens(0, tokens_of("a"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until_cancelled(session, [request])


async def test_a_client_that_goes_away_before_it_was_accepted_cancels_it(run_mesh: MeshFactory) -> None:
    # A resume window is for clients that can come back, which those of this interface cannot.
    async with run_mesh(resume_window_s=30.0) as mesh, mesh.client() as client:
        session = await mesh.session()
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="a", stream=True))
        request = await session.submitted()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until_cancelled(session, [request])
        await wait_until(lambda: mesh.gateway.live_count == 0, "no generation lives")


async def test_a_failure_after_the_first_chunk_is_an_event_and_the_stream_is_not_done(
    mesh: OpenAiMesh,
) -> None:
    session = await mesh.session()
    async with mesh.client() as client:
        opening = asyncio.create_task(client.completions.create(model="tiny", prompt="a", stream=True))
        request = await session.accepts()
        stream = await opening
        request.tokens(0, tokens_of("ab"))
        assert (await stream.__anext__()).choices[0].text == "ab"
        request.failed(grpc.StatusCode.INTERNAL, "POISONED", "it killed its workers")
        with pytest.raises(openai.APIError) as caught:
            await stream.__anext__()
    assert (caught.value.code, caught.value.type) == ("poisoned", "server_error")


async def test_one_failed_choice_ends_the_call_and_the_others(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.client() as client:
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="a", n=3))
        requests = [await session.accepts() for _ in range(3)]
        requests[1].failed(grpc.StatusCode.UNAVAILABLE, "NO_REPLICA", "nobody serves it")
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        await until_cancelled(session, [requests[0], requests[2]])


async def test_tokens_of_a_client_that_reads_slowly_are_gathered(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    reader, writer = await asyncio.open_connection(*mesh.address.split(":"), limit=2**16)
    body = b'{"prompt": "a", "max_tokens": 100, "stream": true}'
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close"
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    request = await session.accepts()
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    for index in range(100):
        request.tokens(index, tokens_of("x"))
    request.finished()
    content = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert content.count(b"x") - content.count(b"index") - content.count(b"text_completion") >= 100
    assert content.count(b"data: ") < 60, "a message for each token"


async def test_a_generation_that_is_cancelled_by_its_id_is_an_error(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.client() as client:
        waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="a"))
        request = await session.accepts()
        request.finished(pb.RequestFinished.REASON_CANCELLED)
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
    assert caught.value.status_code == 499
    assert caught.value.code == "generation_cancelled"


async def test_a_connection_serves_one_call_after_the_other(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        for text in ("one", "two"):
            reply, _ = await asyncio.gather(
                http.post("/v1/completions", json={"prompt": "a"}), answer(session, text)
            )
            assert reply.json()["choices"][0]["text"] == text
    assert mesh.gateway.live_count == 0
