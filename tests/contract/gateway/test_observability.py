"""What an operator sees: health, metrics, reflection and traces."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import httpx2 as httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from gateway.servicer import SERVICE_NAME
from meshkit.telemetry.tracing import context_from_traceparent, tracer
from tests.contract.gateway.gateway_client import Mesh, MeshFactory
from tests.unit.gateway.tiny_model import tokens_of

NAMES = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
"""All that OpenTelemetry's conventions know of generations."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _get(mesh: Mesh, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        response: httpx.Response = await client.get(f"http://{mesh.http_address}{path}")
        return response


async def _watch_until(mesh: Mesh, wanted: int) -> None:
    call = health_pb2_grpc.HealthStub(mesh.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    while (await call.read()).status != wanted:
        pass
    call.cancel()


async def test_health_follows_the_session(mesh: Mesh) -> None:
    await mesh.session()
    await _watch_until(mesh, SERVING)
    health = await _get(mesh, "/health")
    assert health.status_code == 200
    assert health.json()["parts"] == {"models": "tiny", "scheduler": "scheduler-1", "requests": "accepted"}
    await mesh.scheduler.stop()
    await _watch_until(mesh, NOT_SERVING)
    health = await _get(mesh, "/health")
    assert health.status_code == 503
    assert mesh.scheduler.address in health.json()["parts"]["scheduler"]
    await mesh.scheduler.start()
    await _watch_until(mesh, SERVING)


async def test_metrics_count_requests_by_model_and_latencies_by_placement_too(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, tokens_of("ab"))
    request.tokens(2, tokens_of("cd"))
    request.finished()
    await stream.end()
    cancelled = mesh.generate("hi", request_id="mine")
    await session.accepts()
    await cancelled.start()
    await mesh.cancel("mine")
    await cancelled.end()
    await mesh.generate("").error()
    lines = (await _get(mesh, "/metrics")).text.splitlines()
    assert 'chipmesh_num_requests_total{model="tiny"} 2.0' in lines
    assert 'chipmesh_num_aborted_requests_total{model="tiny"} 1.0' in lines
    where = '{chip="hash",group="default",model="tiny",worker="worker-0"}'
    assert f"chipmesh_time_to_first_token_seconds_count{where} 1.0" in lines
    assert f"chipmesh_inter_token_latency_seconds_count{where} 3.0" in lines
    assert f"chipmesh_time_per_output_token_seconds_count{where} 1.0" in lines
    assert f"chipmesh_e2e_request_latency_seconds_count{where} 1.0" in lines


async def test_reflection_is_on_by_default_on_loopback_and_can_be_turned_off(run_mesh: MeshFactory) -> None:
    async with run_mesh() as mesh:
        assert SERVICE_NAME in await _reflected_services(mesh)
    async with run_mesh(reflection=False) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _reflected_services(mesh)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def _reflected_services(mesh: Mesh) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
    call: Any = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return [service.name for service in (await call.read()).list_services_response.service]


async def _spans(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """All spans once there are `count`: one ends a loop turn or two after its call."""
    deadline = time.monotonic() + 5
    while len(exporter.get_finished_spans()) < count:
        assert time.monotonic() < deadline, exporter.get_finished_spans()
        await asyncio.sleep(0.002)  # the exporter has no event to wait for
    return {f"{span.kind.name} {span.name}": span for span in exporter.get_finished_spans()}


async def test_client_gateway_and_scheduler_share_one_trace(mesh: Mesh, spans: InMemorySpanExporter) -> None:
    session = await mesh.session()
    with tracer().start_as_current_span("client"):
        stream = mesh.generate("hi", request_id="mine")
        request = await session.accepts()
        request.tokens(0, tokens_of("abc"))
        request.finished()
        await stream.end()
    found = await _spans(spans, 4)
    generate = found["INTERNAL chipmesh.gateway.generate"]
    server = found[f"SERVER {SERVICE_NAME}/Generate"]
    assert {span.context.trace_id for span in found.values()} == {generate.context.trace_id}
    assert generate.parent is not None
    assert generate.parent.span_id == server.context.span_id
    told = trace.get_current_span(context_from_traceparent(request.submit.traceparent)).get_span_context()
    assert (told.trace_id, told.span_id) == (generate.context.trace_id, generate.context.span_id)
    assert generate.attributes is not None
    attributes = dict(generate.attributes)
    waited_s = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(waited_s, float)
    assert 0 < waited_s < 5
    asked = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.request.")}
    assert asked["gen_ai.request.model"] == "tiny"
    assert asked.keys() <= NAMES
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "chipmesh",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "chipmesh.request_id": "mine",
        "chipmesh.group": "default",
        "chipmesh.worker": "worker-0",
        "chipmesh.chip": "hash",
    }
    assert {name for name in attributes if name.startswith("gen_ai.")} <= NAMES
    assert [event.name for event in generate.events] == ["placed", "first token"]
    assert generate.status.is_unset


async def test_an_accepted_call_is_told_its_trace_and_a_refused_one_is_not(
    mesh: Mesh, spans: InMemorySpanExporter
) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, tokens_of("a"))
    request.finished()
    await stream.end()
    told = dict(await stream.call.initial_metadata())["traceparent"]
    found = await _spans(spans, 3)
    server = found[f"SERVER {SERVICE_NAME}/Generate"]
    assert told.startswith(f"00-{server.context.trace_id:032x}-{server.context.span_id:016x}-0")
    refused = mesh.generate("")
    await refused.error()
    assert "traceparent" not in dict(await refused.call.initial_metadata())


async def test_the_span_of_a_cancelled_request_says_so(mesh: Mesh, spans: InMemorySpanExporter) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    await stream.start()
    stream.call.cancel()
    await request.ended_by_gateway()
    found = await _spans(spans, 3)
    generate = found["INTERNAL chipmesh.gateway.generate"]
    assert generate.attributes is not None
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert generate.status.description == generate.attributes["error.type"] == "CANCELLED"
    assert found[f"SERVER {SERVICE_NAME}/Generate"].status.description == "CANCELLED"


async def test_the_span_of_a_request_whose_time_is_over_says_so(
    mesh: Mesh, spans: InMemorySpanExporter
) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", timeout=0.2)
    request = await session.accepts()
    await request.ended_by_gateway()
    found = await _spans(spans, 3)
    assert (await stream.call.code()) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert {span.status.description for span in found.values()} == {"DEADLINE_EXCEEDED"}
