"""Clients with keys: who is let in, whose requests are whose, and what each may use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from chipmesh.inference.v1alpha1 import inference_pb2_grpc
from gateway.api_keys import KeyRing
from gateway.app import GatewayService
from gateway.config import GatewayConfig
from gateway.key_interceptor import KeyInterceptor
from gateway.servicer import SERVICE_NAME
from meshkit.config import parse_config
from meshkit.errors import Internal, InvalidArgument, NotFound, ResourceExhausted, from_rpc_error
from meshkit.rpc.channel import open_channel
from meshkit.rpc.server import RpcServer
from tests.contract.gateway.gateway_client import Mesh, MeshFactory, request_of
from tests.unit.gateway.tiny_model import tokens_of

A, B = "cmk_the-key-of-team-a", "cmk_the-key-of-team-b"
INSIDE = "RuntimeError at 10.0.0.7:5001 in /srv/models/m, pid 4711"


def key_of(name: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **fields}


def two_keys(**fields_of_a: Any) -> list[dict[str, Any]]:
    return [key_of("team-a", A, **fields_of_a), key_of("team-b", B)]


CALLS: list[Callable[[Mesh], Any]] = [
    lambda mesh: mesh.stub.Generate(request_of("hi"), metadata=mesh.metadata).read(),
    lambda mesh: mesh.stub.ResumeGeneration(
        pb.ResumeGenerationRequest(request_id="a"), metadata=mesh.metadata
    ).read(),
    lambda mesh: mesh.cancel("a"),
    lambda mesh: mesh.stub.ListModels(pb.ListModelsRequest(), metadata=mesh.metadata),
    lambda mesh: mesh.tokenize("hi"),
    lambda mesh: (
        reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
        .ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=mesh.metadata
        )
        .read()
    ),
]


async def test_every_call_but_health_needs_a_good_key(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys()) as mesh:
        session = await mesh.session()
        told: set[str] = set()
        for key in (None, "", "wrong", A[:-1], A + "x"):
            for call in CALLS:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(mesh.with_key(key))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                told.add(str(caught.value.details()))
        assert len(told) == 1
        assert not session.has_commands
        health = await health_pb2_grpc.HealthStub(mesh.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert "chipmesh_unauthenticated_calls_total 30.0" in await _metrics(mesh)
        assert SERVICE_NAME in str(await CALLS[-1](mesh.with_key(A)))
        served = mesh.with_key(A).generate("hi")
        (await session.accepts()).finished()
        await served.end()


async def test_another_keys_request_is_as_unknown_as_one_that_never_was(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys()) as mesh:
        session = await mesh.session()
        ours, theirs = mesh.with_key(A), mesh.with_key(B)
        stream = ours.generate("hi", request_id="mine")
        request = await session.accepts()
        await stream.start()
        for is_live in (True, False):
            if not is_live:
                request.tokens(0, tokens_of("ab"))
                request.finished()
                await stream.end()
            foreign, unknown = [await theirs.resume(name, 0).error() for name in ("mine", "none")]
            assert isinstance(foreign, NotFound)
            assert vars(foreign) | {"message": ""} == vars(unknown) | {"message": ""}
            assert foreign.message == unknown.message.replace("'none'", "'mine'")
            assert await theirs.cancel("mine") is await theirs.cancel("none") is False
        assert stream.text == "ab"
        again = ours.resume("mine", 0)
        await again.end()
        assert again.text == "ab"


async def test_a_request_id_is_each_keys_own(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys()) as mesh:
        session = await mesh.session()
        clients = [mesh.with_key(A), mesh.with_key(B)]
        streams, requests = [], []
        for client, text in zip(clients, ("first", "other"), strict=True):
            streams.append(client.generate("hi", request_id="one"))
            requests.append(await session.accepts())
            requests[-1].tokens(0, tokens_of(text))
        for stream, text in zip(streams, ("first", "other"), strict=True):
            await stream.start()
            await stream.until_text(5)
            assert stream.text == text
        # Sent again it is followed, each to its own.
        joined = clients[1].generate("hi", request_id="one")
        await joined.start()
        await joined.until_text(5)
        assert joined.text == "other"
        assert not session.has_commands
        assert await clients[0].cancel("one")
        await streams[0].end()
        assert not streams[1].call.done()
        requests[1].finished()
        await streams[1].end()
        await joined.end()


async def test_requests_beyond_the_budget_are_told_which_one_and_when_there_is_room(
    run_mesh: MeshFactory,
) -> None:
    async with run_mesh(api_keys=two_keys(requests_per_minute=2)) as mesh:
        session = await mesh.session()
        client = mesh.with_key(A)
        assert await client.tokenize("hi")
        stream = client.generate("hi")
        (await session.accepts()).finished()
        await stream.end()
        error = await client.generate("hi").error()
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, error.metadata) == (
            "BUDGET_EXHAUSTED",
            {"budget": "requests_per_minute", "limit": "2"},
        )
        assert error.retry_after_s == pytest.approx(30.0, abs=5.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.tokenize("hi")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not session.has_commands
        other = mesh.with_key(B).generate("hi")
        (await session.accepts()).finished()
        await other.end()


async def test_a_stream_that_began_is_not_cut_and_the_next_one_waits_its_tokens_out(
    run_mesh: MeshFactory,
) -> None:
    async with run_mesh(api_keys=two_keys(tokens_per_minute=10)) as mesh:
        session = await mesh.session()
        stream = mesh.with_key(A).generate("hello")
        request = await session.accepts()
        await stream.start()
        for index in range(25):
            request.tokens(index, [97])
        request.finished()
        await stream.end()
        assert len(stream.token_ids) == 25
        # 5 of the prompt and 25 of the output, of which 10 were there: 21 to go until there is room for one.
        error = await mesh.with_key(A).generate("hello").error()
        assert isinstance(error, ResourceExhausted)
        assert error.metadata["budget"] == "tokens_per_minute"
        assert error.retry_after_s == pytest.approx(126.0, abs=5.0)


async def test_a_prompt_that_no_chip_read_costs_nothing(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys(tokens_per_minute=10)) as mesh:
        session = await mesh.session()
        for _ in range(5):
            stream = mesh.with_key(A).generate("x" * 9)
            (await session.submitted()).failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full")
            assert (await stream.error()).reason == "QUEUE_FULL"
        assert 'chipmesh_key_prompt_tokens_total{key="team-a"} 0.0' in await _metrics(mesh)


async def test_who_gives_up_before_it_is_accepted_has_spent_its_prompt(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys(tokens_per_minute=10)) as mesh:
        session = await mesh.session()
        stream = mesh.with_key(A).generate("x" * 20)
        request = await session.submitted()
        stream.call.cancel()
        assert await request.ended_by_gateway() == "cancel"
        error = await mesh.with_key(A).generate("hi").error()
        assert error.metadata["budget"] == "tokens_per_minute"


async def test_output_that_is_brought_costs_what_a_prompt_does(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys(tokens_per_minute=10)) as mesh:
        session = await mesh.session()
        brought = tokens_of("x" * 20)
        stream = mesh.with_key(A).generate("hi", sampling={"temperature": 0.0}, output_token_ids=brought)
        stream.expect_from(len(brought))
        (await session.accepts()).finished()
        await stream.end()
        error = await mesh.with_key(A).generate("hi").error()
        assert error.metadata["budget"] == "tokens_per_minute"


async def test_live_requests_of_a_key_are_bounded_apart_from_all_others(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys(max_live_requests=1)) as mesh:
        session = await mesh.session()
        client = mesh.with_key(A)
        first = client.generate("hi")
        request = await session.accepts()
        error = await client.generate("hi").error()
        assert error.metadata == {"budget": "max_live_requests", "limit": "1"}
        others = [mesh.with_key(B).generate("hi") for _ in range(3)]
        for _ in others:
            (await session.accepts()).finished()
        for other in others:
            await other.end()
        request.finished()
        await first.end()
        next_one = client.generate("hi")
        (await session.accepts()).finished()
        await next_one.end()


async def test_each_key_has_its_own_part_of_the_cache_unless_it_shares(run_mesh: MeshFactory) -> None:
    keys = [*two_keys(), key_of("shared", "cmk_the-shared-key", share_cache=True)]
    async with run_mesh(api_keys=keys, allow_anonymous=True) as mesh:
        session = await mesh.session()
        salts = {}
        for key in (A, B, "cmk_the-shared-key", None):
            for own in ("", "mine"):
                stream = mesh.with_key(key).generate("hi", scheduling={"cache_salt": own})
                request = await session.accepts()
                request.finished()
                await stream.end()
                salts[key, own] = request.submit.cache_salt
        for own in ("", "mine"):
            assert salts["cmk_the-shared-key", own] == salts[None, own] == own
        assert len(set(salts.values())) == 6
        stolen = mesh.with_key("cmk_the-shared-key").generate("hi", scheduling={"cache_salt": salts[A, ""]})
        error = await stolen.error()
        assert isinstance(error, InvalidArgument)
        assert error.field == "scheduling.cache_salt"


async def test_a_failure_inside_tells_a_client_with_a_key_nothing_of_the_inside(
    run_mesh: MeshFactory, caplog: pytest.LogCaptureFixture
) -> None:
    cases = [
        (grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS"), (grpc.StatusCode.ABORTED, "POISONED"),
        (grpc.StatusCode.UNAVAILABLE, "NO_WORKER"), (grpc.StatusCode.INVALID_ARGUMENT, "NEW"),
    ]  # fmt: skip
    async with run_mesh(api_keys=two_keys(), allow_anonymous=True) as mesh:
        session = await mesh.session()
        for accepted in (False, True):
            for code, reason in cases:
                stream = mesh.with_key(A).generate("hi")
                request = await session.submitted()
                if accepted:
                    request.queued()
                    request.tokens(0, [97])
                request.failed(code, reason, INSIDE, "executor.listen")
                error = await stream.error()
                assert (error.code, error.reason, error.field) == (code, reason, None)
                told = f"{error.message} {error.metadata}"
                assert not any(part in told for part in ("RuntimeError", "10.0.0.7", "/srv", "4711"))
                assert any(
                    INSIDE in record.getMessage() and error.metadata["error_id"] in record.getMessage()
                    for record in caplog.records
                )
        local = mesh.generate("hi")
        (await session.submitted()).failed(grpc.StatusCode.INTERNAL, "NON_FINITE_LOGITS", INSIDE)
        assert (await local.error()).message == INSIDE


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> Any:
        raise Internal(INSIDE)

    Generate = ResumeGeneration = CancelGeneration = Tokenize = ListModels  # type: ignore[assignment]


@pytest.mark.parametrize("is_public", [True, False])
async def test_beyond_this_host_the_inside_is_hidden_from_who_has_no_key_too(is_public: bool) -> None:
    keys = KeyInterceptor(KeyRing(checks_keys=False), is_public=is_public)
    server = RpcServer(listen="127.0.0.1:0", interceptors=[keys])
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Failing(), SERVICE_NAME)
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert (from_rpc_error(caught.value).message == INSIDE) is not is_public
    finally:
        await server.stop(0)


async def test_a_key_is_in_no_log_trace_or_metric(
    run_mesh: MeshFactory, caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter
) -> None:
    caplog.set_level(logging.DEBUG)
    async with run_mesh(api_keys=two_keys(requests_per_minute=1)) as mesh:
        session = await mesh.session()
        stream = mesh.with_key(A).generate("hi")
        (await session.submitted()).failed(grpc.StatusCode.INTERNAL, "X", INSIDE)
        await stream.error()
        await mesh.with_key(A).generate("hi").error()
        wrong = "cmk_a-key-that-is-wrong"
        await mesh.with_key(wrong).generate("hi").error()
        metrics = await _metrics(mesh)
    seen = [record.getMessage() + str(vars(record)) for record in caplog.records]
    seen += [span.to_json() for span in spans.get_finished_spans()]
    assert "team-a" in [(span.attributes or {}).get("chipmesh.key") for span in spans.get_finished_spans()]
    assert any("API keys in effect" in text for text in seen)
    for text in [*seen, metrics]:
        for secret in (A, B, wrong, *(entry["sha256"] for entry in two_keys())):
            assert secret not in text
            assert secret.removeprefix("cmk_") not in text


async def test_each_key_is_measured_by_its_configured_name(run_mesh: MeshFactory) -> None:
    async with run_mesh(api_keys=two_keys(max_live_requests=1)) as mesh:
        session = await mesh.session()
        stream = mesh.with_key(A).generate("hello")
        request = await session.accepts()
        await stream.start()
        await mesh.with_key(A).generate("hello").error()
        request.tokens(0, tokens_of("abc"))
        request.finished()
        await stream.end()
        lines = (await _metrics(mesh)).splitlines()
        for line in (
            'chipmesh_key_num_requests_total{key="team-a"} 1.0',
            'chipmesh_key_num_requests_total{key="team-b"} 0.0',
            'chipmesh_key_prompt_tokens_total{key="team-a"} 5.0',
            'chipmesh_key_generation_tokens_total{key="team-a"} 3.0',
            'chipmesh_key_refused_requests_total{budget="max_live_requests",key="team-a"} 1.0',
            'chipmesh_key_refused_requests_total{budget="tokens_per_minute",key="team-a"} 0.0',
            "chipmesh_unauthenticated_calls_total 0.0",
        ):
            assert line in lines
        assert {line.split('key="')[1].split('"')[0] for line in lines if 'key="' in line} == {
            "team-a",
            "team-b",
        }


async def test_a_file_of_keys_counts_when_it_changes_and_streams_that_run_go_on(
    run_mesh: MeshFactory, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"

    def write(*keys: dict[str, Any]) -> None:
        replace_file(file, json.dumps(keys))

    await asyncio.to_thread(write, key_of("team-a", A))
    async with run_mesh(api_keys_file=str(file), api_keys_interval_s=0.01) as mesh:
        session = await mesh.session()
        stream = mesh.with_key(A).generate("hi")
        request = await session.accepts()
        await stream.start()
        assert not await _is_let_in(mesh.with_key(B))
        await asyncio.to_thread(write, key_of("team-b", B))
        await _until(lambda: _is_let_in(mesh.with_key(B)))
        assert not await _is_let_in(mesh.with_key(A))
        request.tokens(0, tokens_of("abc"))
        request.finished()
        await stream.end()
        assert stream.text == "abc"
        await asyncio.to_thread(replace_file, file, "[")
        await _until(lambda: _has_line(mesh, "chipmesh_api_keys_errors_total 1.0"))
        assert await _is_let_in(mesh.with_key(B))


async def test_a_key_that_lies_in_a_file_of_its_own_is_changed_with_an_overlap(
    run_mesh: MeshFactory, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    await asyncio.to_thread(file.write_text, A)
    keys = [{"name": "team", "file": str(file)}]
    async with run_mesh(api_keys=keys, api_keys_interval_s=0.01) as mesh:
        assert await _is_let_in(mesh.with_key(A))
        assert not await _is_let_in(mesh.with_key(B))
        await asyncio.to_thread(file.write_text, f"{A}\n{B}\n")
        await _until(lambda: _is_let_in(mesh.with_key(B)))
        assert await _is_let_in(mesh.with_key(A))
        await asyncio.to_thread(file.write_text, B)
        await _until(lambda: _is_shut_out(mesh.with_key(A)))
        assert await _is_let_in(mesh.with_key(B))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
async def test_a_listener_beyond_this_host_needs_keys_or_a_word(listen: str) -> None:
    raw: dict[str, Any] = {
        "scheduler_address": "127.0.0.1:1",
        "models": [{"name": "m", "context_length": 10}],
        "listen": listen,
    }
    service = GatewayService(parse_config(GatewayConfig, raw, source="test"))
    with pytest.raises(InvalidArgument) as caught:
        await service.start()
    assert caught.value.field == "listen"
    for part in (listen, "api_keys", "chipmesh keys new", "allow_anonymous: true"):
        assert part in caught.value.message
    for allowed in ({"api_keys": two_keys()}, {"allow_anonymous": True}, {"listen": "127.0.0.1:0"}):
        parse_config(GatewayConfig, {**raw, **allowed}, source="test").check_listener()


async def _metrics(mesh: Mesh) -> str:
    async with httpx.AsyncClient() as client:
        text: str = (await client.get(f"http://{mesh.http_address}/metrics")).text
        return text


async def _has_line(mesh: Mesh, line: str) -> bool:
    return line in await _metrics(mesh)


async def _is_let_in(mesh: Mesh) -> bool:
    code = await mesh.stub.ListModels(pb.ListModelsRequest(), metadata=mesh.metadata).code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
    return bool(code is grpc.StatusCode.OK)


async def _is_shut_out(mesh: Mesh) -> bool:
    return not await _is_let_in(mesh)


def replace_file(path: Path, text: str) -> None:
    """In one piece: whoever watches it never reads half of it."""
    other = path.with_suffix(".new")
    other.write_text(text, encoding="utf-8")
    other.replace(path)


async def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)  # the file is looked at again and again: there is no event to wait for
