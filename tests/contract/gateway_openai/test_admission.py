"""Admission over HTTP: priority and deadline in headers, 429 and 504 with what a client needs."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1 import session_pb2
from tests.contract.gateway_openai.openai_mesh import HELLO, MeshFactory, OpenAiMesh, answer, wait_until

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **fields}


async def test_a_priority_comes_by_header_and_the_bodys_own_goes_before_it(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http(**{"x-priority": "-7"}) as http:
        for fields, expected in (({}, -7), ({"priority": 9}, 9), ({"priority": 0}, 0)):
            reply, request = await asyncio.gather(http.post(CHAT, json=body(**fields)), answer(session, "ok"))
            assert reply.status_code == 200
            assert request.submit.priority == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-priority", "high"),
        ("x-priority", "1001"),
        ("x-priority", "9" * 5000),
        ("x-priority", "--1"),
        ("x-request-timeout", "0"),
        ("x-request-timeout", "-1"),
        ("x-request-timeout", "nan"),
        ("x-request-timeout", "inf"),
        ("x-request-timeout", "soon"),
        ("x-envoy-expected-rq-timeout-ms", "1e99"),
    ],
)
async def test_a_header_that_says_nothing_usable_is_refused_by_its_name(
    mesh: OpenAiMesh, name: str, value: str
) -> None:
    session = await mesh.session()
    async with mesh.http(**{name: value}) as http:
        reply = await http.post(CHAT, json=body())
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name
    assert not session.has_commands


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "header",
    [{"x-request-timeout": "0.2"}, {"x-envoy-expected-rq-timeout-ms": "200", "x-request-timeout": "60"}],
)
async def test_a_deadline_that_passes_in_the_queue_is_504_also_for_a_stream(
    mesh: OpenAiMesh, stream: bool, header: dict[str, str]
) -> None:
    session = await mesh.session()
    async with mesh.http(**header) as http:
        posted = asyncio.create_task(http.post(CHAT, json=body(stream=stream)))
        request = await session.submitted()
        assert 0 < request.submit.deadline_ms <= 200
        request.queued()
        assert await request.ended_by_gateway() == "cancel"
        reply = await posted
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"


async def test_a_stream_whose_deadline_passes_after_tokens_ends_with_an_error_event(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http(**{"x-request-timeout": "0.3"}) as http:
        posted = asyncio.create_task(http.post(CHAT, json=body(stream=True)))
        request = await session.accepts()
        request.tokens(0, [100])
        assert await request.ended_by_gateway() == "cancel"
        reply = await posted
    assert reply.status_code == 200
    assert '"code":"deadline_exceeded"' in reply.text
    assert "[DONE]" not in reply.text


async def test_who_is_in_time_notices_nothing_of_a_deadline(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http(**{"x-request-timeout": "60"}) as http:
        for stream in (False, True):
            reply, _ = await asyncio.gather(
                http.post(CHAT, json=body(stream=stream, n=2)),
                asyncio.gather(answer(session, "ok"), answer(session, "ok")),
            )
            assert reply.status_code == 200
            assert "ok" in reply.text


async def test_a_full_queue_is_429_with_the_schedulers_time_in_whole_seconds(mesh: OpenAiMesh) -> None:
    session = await mesh.session()
    async with mesh.http() as http:
        posted = asyncio.create_task(http.post(CHAT, json=body(stream=True)))
        request = await session.submitted()
        session.send(request.failed_event(code=8, reason="QUEUE_FULL", message="full", retry_after_ms=7250))
        reply = await posted
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "8"


async def test_a_reader_of_one_message_a_second_costs_a_bounded_memory_and_loses_no_token(
    run_mesh: MeshFactory,
) -> None:
    """Case F7, by state: the socket is not read at all while tokens come, until the gateway has stopped
    writing; what was made meanwhile then comes in few events.
    """
    async with run_mesh(message_interval_s=0.0) as mesh:
        session = await mesh.session()
        reader, writer = await _raw_stream(mesh.address, limit=4096)
        request = await session.accepts()
        made = 0
        for _ in range(3000):  # A token's event is some 250 bytes: far more than socket and buffers hold.
            request.tokens(made, [120] * 20)
            made += 20
            await asyncio.sleep(0)
        live = _only_live(mesh)
        await wait_until(lambda: len(live.token_ids) == made, "the gateway has all tokens")
        request.finished(session_pb2.RequestFinished.REASON_LENGTH)
        text = (await asyncio.wait_for(reader.read(), 20)).decode()
        writer.close()
    assert text.count('"content":"x') < 3000 / 2  # Gathered: what was not read travelled together.
    assert sum(event.count("x") for event in _contents(text)) == made
    assert '"finish_reason":"length"' in text


def _only_live(mesh: OpenAiMesh) -> Any:
    generations: Any = mesh.gateway._generations
    (live,) = generations._table
    return live


async def _raw_stream(address: str, *, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A streamed chat whose client reads nothing before it is asked to."""
    host, port = address.split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limit)  # Else the kernel takes megabytes for it.
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=limit)
    content = (
        b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hello"}],"max_tokens":4000000}'
    )
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: "
        + str(len(content)).encode()
        + b"\r\n\r\n"
        + content
    )
    await writer.drain()
    return reader, writer


def _contents(text: str) -> list[str]:
    return [part.split('"', 1)[0] for part in text.split('"content":"')[1:]]
