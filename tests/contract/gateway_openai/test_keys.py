"""Keys, budgets and what callers may see: as at the gRPC listener, by the same mechanism."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.config import GatewayConfig
from meshkit.config import TracingConfig, parse_config
from meshkit.errors import InvalidArgument
from meshkit.telemetry.tracing import configure_tracing
from tests.contract.gateway_openai.openai_mesh import HELLO, MeshFactory, OpenAiMesh, answer
from tests.support.self_signed import write_self_signed

A, B = "cmk_the-key-of-team-a", "cmk_the-key-of-team-b"
CHAT = "/v1/chat/completions"


def keys(**fields_of_a: Any) -> dict[str, Any]:
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in (("team-a", A), ("team-b", B))
    ]
    return {"api_keys": [{**entries[0], **fields_of_a}, entries[1]]}


async def test_every_call_but_health_needs_a_good_key(run_mesh: MeshFactory) -> None:
    async with run_mesh(**keys()) as mesh:
        session = await mesh.session()
        told = set()
        async with mesh.http() as http:
            for value in (None, "", "Bearer", f"Bearer {A}x", A, f"Basic {A}"):
                headers = {} if value is None else {"authorization": value}
                for verb, path in (
                    ("POST", CHAT),
                    ("POST", "/v1/completions"),
                    ("GET", "/v1/models"),
                    ("GET", "/metrics"),
                ):
                    response = await http.request(verb, path, headers=headers)
                    assert response.status_code == 401
                    told.add(response.text)
            assert len(told) == 1
            assert '"invalid_api_key"' in told.pop()
            assert (await http.get("/health")).json() == {"status": "ok"}
        assert not session.has_commands
        async with mesh.client(A) as client:
            reply, request = await asyncio.gather(
                client.chat.completions.create(model="tiny", messages=HELLO), answer(session, "ok")
            )
        assert reply.choices[0].message.content == "ok"
        assert request.submit.cache_salt.startswith("chipmesh-key:6:team-a")


async def test_a_budget_that_is_used_up_is_429_with_the_time_to_wait(run_mesh: MeshFactory) -> None:
    async with run_mesh(**keys(requests_per_minute=2)) as mesh:
        session = await mesh.session()
        async with mesh.client(A) as a, mesh.client(B) as b:
            for client in (a, a, b):
                await asyncio.gather(
                    client.completions.create(model="tiny", prompt="x"), answer(session, "ok")
                )
            with pytest.raises(openai.RateLimitError) as caught:
                await a.completions.create(model="tiny", prompt="x")
            assert caught.value.code == "rate_limit_exceeded"
            assert 25 <= int(caught.value.response.headers["retry-after"]) <= 30
            # Each choice is a generation of its own.
            with pytest.raises(openai.RateLimitError):
                await a.completions.create(model="tiny", prompt="x", n=2)


async def test_internals_are_hidden_from_those_with_a_key_and_shown_on_this_host(
    run_mesh: MeshFactory,
) -> None:
    async def failure(mesh: OpenAiMesh, key: str) -> openai.APIStatusError:
        session = await mesh.session()
        async with mesh.client(key) as client:
            waiting = asyncio.create_task(client.completions.create(model="tiny", prompt="x"))
            (await session.submitted()).failed(
                grpc.StatusCode.INTERNAL, "BROKEN", "RuntimeError at 10.0.0.7:5001"
            )
            with pytest.raises(openai.APIStatusError) as caught:
                await waiting
            return caught.value

    async with run_mesh(**keys()) as mesh:
        error = await failure(mesh, A)
        assert "10.0.0.7" not in str(error.response.text)
        assert (error.status_code, error.code) == (500, "broken")
        async with mesh.http(authorization=f"Bearer {A}") as http:
            refused = await http.get("/metrics")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_not_public")
    async with run_mesh() as mesh:
        assert "10.0.0.7" in str((await failure(mesh, "none")).response.text)
        async with mesh.http() as http:
            metrics = await http.get("/metrics")
            assert "chipmesh_num_requests_total" in metrics.text


def test_a_listener_beyond_this_host_needs_keys_or_a_word_that_it_does_not() -> None:
    raw = {
        "scheduler_address": "127.0.0.1:1",
        "models": [{"name": "m", "context_length": 8}],
        "openai_listen": "0.0.0.0:0",
    }
    with pytest.raises(InvalidArgument) as caught:
        parse_config(GatewayConfig, raw, source="test").check_listener()
    assert (caught.value.field, caught.value.reason) == ("openai_listen", "LISTENER_WITHOUT_KEYS")
    for allowed in (keys(), {"allow_anonymous": True}, {"openai_listen": "unix:/tmp/x"}):
        parse_config(GatewayConfig, {**raw, **allowed}, source="test").check_listener()


async def test_tls_as_the_grpc_listener_has_it_and_a_changed_certificate_counts_at_once(
    run_mesh: MeshFactory, tmp_path: Path
) -> None:
    async def models(mesh: OpenAiMesh, authority: bytes, host: str) -> int:
        context = ssl.create_default_context(cadata=authority.decode())
        context.check_hostname = (
            False  # It is the address's, and must be shown by whatever name is asked for.
        )
        port = mesh.address.rpartition(":")[2]
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            return int((await http.get(f"https://{host}:{port}/v1/models")).status_code)

    folder = tmp_path / "tls"
    folder.mkdir()
    first = await asyncio.to_thread(write_self_signed, folder)
    files = {"certificate": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}
    async with run_mesh(listen_tls=files) as mesh:
        await mesh.session()
        for host in ("127.0.0.1", "localhost"):  # An address is not named in a hello, a name is.
            assert await models(mesh, first, host) == 200
        second = await asyncio.to_thread(write_self_signed, folder)
        for host in ("127.0.0.1", "localhost"):
            assert await models(mesh, second, host) == 200
            with pytest.raises(httpx.ConnectError):
                await models(mesh, first, host)
        with socket.create_connection(("127.0.0.1", int(mesh.address.rpartition(":")[2])), 5) as plain:
            plain.settimeout(5)
            await asyncio.to_thread(plain.sendall, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" not in await asyncio.to_thread(plain.recv, 100)


async def test_one_trace_from_the_clients_traceparent_to_the_scheduler(mesh: OpenAiMesh) -> None:
    exporter = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(), exporter=exporter)
    try:
        session = await mesh.session()
        trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        async with mesh.http(traceparent=f"00-{trace_id}-{parent_id}-01") as http:
            response, request = await asyncio.gather(
                http.post(CHAT, json={"messages": HELLO}), answer(session, "ok")
            )
        spans = {span.name: span for span in exporter.get_finished_spans()}
        server, generation = spans[f"POST {CHAT}"], spans["chipmesh.gateway.generate"]
        assert server.parent is not None
        assert f"{server.parent.span_id:016x}" == parent_id
        assert server.context is not None
        assert generation.parent is not None
        assert generation.parent.span_id == server.context.span_id
        assert (server.attributes or {})["http.response.status_code"] == 200
        assert request.submit.traceparent.split("-")[1] == trace_id
        assert response.headers["traceparent"] == f"00-{trace_id}-{server.context.span_id:016x}-01"
    finally:
        handle.shutdown()
