"""One request, one trace, over real processes that export to a real collector, however the request ends."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from chipmesh.inference.v1alpha1 import inference_pb2 as pb
from tests.support.hash_model import write_hash_model
from tests.support.mesh import RunningMesh, running_mesh, token_request
from tests.support.otlp_sink import OtlpSink, SeenSpan, otlp_sink

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
OWN = ("chipmesh.gateway.generate", "chipmesh.scheduler.request", "queue", "placement",
       "chipmesh.executor.request", "prefill", "decode")  # fmt: skip
"""Spans that are made for requests only, one or more of each where a request ran well."""
LONG = 4000
"""Tokens; at 5 ms a step it does not end by itself while a test does something to it."""


@dataclass(frozen=True)
class ClientTrace:
    """A trace that a client began: its span is not exported, and is known to be there."""

    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def header(self, *, sampled: bool = True) -> str:
        """W3C traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if sampled else '00'}"


@dataclass
class TracedMesh:
    """A mesh, its collector, and the traces that tests have begun."""

    mesh: RunningMesh
    sink: OtlpSink
    model: str
    begun: list[ClientTrace] = field(default_factory=list)

    def begin(self) -> ClientTrace:
        """A new trace."""
        self.begun.append(ClientTrace())
        return self.begun[-1]

    def generate(self, request: pb.GenerateRequest, trace: ClientTrace, **options: Any) -> Any:
        """The running call of a generation."""
        metadata = (("traceparent", trace.header()),)
        return self.mesh.client.stub.Generate(request, metadata=metadata, **{"timeout": 60, **options})

    def chat(self, trace: ClientTrace, *, sampled: bool = True) -> tuple[Any, dict[str, Any]]:
        """Headers and body of a chat over HTTP."""
        address = self.mesh.description["gateway"]["openai_address"]
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://{address}/v1/chat/completions",
            data=json.dumps({"model": self.model, **asked}).encode(),
            headers={"content-type": "application/json", "traceparent": trace.header(sampled=sampled)},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.headers, json.loads(answer.read())

    def whole(self, trace: ClientTrace, *names: str) -> list[SeenSpan]:
        """The spans of a trace, once these are there and none lacks its parent; AssertionError if not."""

        def is_whole(spans: list[SeenSpan]) -> bool:
            own = [span for span in spans if span.trace_id == trace.trace_id]
            seen = [span.name for span in own]
            return all(seen.count(name) >= names.count(name) for name in names) and not orphans(own, trace)

        return [span for span in self.sink.wait_for(is_whole) if span.trace_id == trace.trace_id]


def orphans(spans: list[SeenSpan], trace: ClientTrace) -> list[SeenSpan]:
    """Those whose parent is neither among them nor the client."""
    known = {trace.span_id, *(span.span_id for span in spans)}
    return [span for span in spans if span.parent_id not in known]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedMesh]:
    """Two workers. At the end, when every service has sent all it had: no orphan, and no trace of ours
    besides those that clients began.
    """
    folder = write_hash_model(tmp_path_factory.mktemp("traces"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    with otlp_sink() as (sink, endpoint):
        with running_mesh(
            folder / "state", "--backend", "hash", "--device-groups", "hash:0,hash:1",
            "--model-path", str(folder), "--load-format", "dummy", "--backend-option", "step_ms=5",
            "--otlp-endpoint", endpoint,
        ) as mesh:  # fmt: skip
            found = TracedMesh(mesh, sink, mesh.status()["groups"][0]["model"])
            yield found
        spans = sink.wait_for(bool)
    for trace in found.begun:
        assert not orphans([span for span in spans if span.trace_id == trace.trace_id], trace)
    roots = {span.trace_id for span in spans if span.service == "chipmesh-cli" and not span.parent_id}
    begun = {trace.trace_id for trace in found.begun} | roots
    assert {span.trace_id for span in spans if span.name in OWN} <= begun
    assert all(span.ended for span in spans)
    for step in [span for span in spans if span.name == "chipmesh.executor.step"]:
        assert step.links
        assert set(step.links) <= begun


def test_a_request_by_the_command_line_is_one_trace_from_there_to_the_executor(traced: TracedMesh) -> None:
    answer = traced.mesh.cli("generate", "hello", "--raw", "--max-tokens", "8", "--json")
    assert answer.returncode == 0, answer.stderr

    def arrived(spans: list[SeenSpan]) -> bool:
        roots = [span.trace_id for span in spans if span.name == "chipmesh.generate"]
        return {span.name for span in spans if span.trace_id in roots} >= {*OWN}

    spans = traced.sink.wait_for(arrived)
    root = next(span for span in spans if span.name == "chipmesh.generate")
    assert (root.service, root.parent_id) == ("chipmesh-cli", "")
    services = {span.service for span in spans if span.trace_id == root.trace_id}
    assert services == {"chipmesh-cli", "chipmesh-gateway", "chipmesh-scheduler", "chipmesh-executor"}


def test_a_chat_over_grpc_is_one_trace_below_its_clients(traced: TracedMesh) -> None:
    trace = traced.begin()
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hello")])
    request = pb.GenerateRequest(prompt=pb.Prompt(chat=chat), stop=pb.StopOptions(max_tokens=8))
    call = traced.generate(request, trace)
    told = dict(call.initial_metadata())["traceparent"].split("-")
    assert len(list(call)) > 2
    spans = traced.whole(trace, *OWN)
    by_name = {span.name: span for span in spans}
    generate = by_name["chipmesh.gateway.generate"]
    assert generate.attributes["gen_ai.operation.name"] == "chat"
    assert generate.attributes["gen_ai.usage.output_tokens"] == 8
    server = by_name["chipmesh.inference.v1alpha1.InferenceService/Generate"]
    assert told[1:3] == [trace.trace_id, server.span_id]
    assert server.parent_id == trace.span_id
    assert by_name["chipmesh.executor.request"].parent_id == by_name["placement"].span_id
    assert not [span.name for span in spans if span.status]


def test_a_chat_over_http_is_one_trace_below_its_clients(traced: TracedMesh) -> None:
    trace = traced.begin()
    headers, answer = traced.chat(trace)
    assert answer["usage"]["completion_tokens"] == 8
    by_name = {span.name: span for span in traced.whole(trace, *OWN)}
    server = by_name["POST /v1/chat/completions"]
    assert server.parent_id == trace.span_id
    assert headers["traceparent"].split("-")[1:3] == [trace.trace_id, server.span_id]
    assert by_name["chipmesh.gateway.generate"].parent_id == server.span_id


def test_the_death_of_an_executor_is_seen_and_leaves_no_orphan(traced: TracedMesh) -> None:
    trace = traced.begin()
    call = traced.generate(token_request([5, 6, 7], max_tokens=1200), trace)
    first = [event.event for event in itertools.islice(call, 20)]
    assert first[-1].WhichOneof("kind") == "output"
    (victim,) = [replica for replica in traced.mesh.replicas() if replica["running"]]
    os.kill(victim["executor_pid"], signal.SIGKILL)
    rest = [event.event for event in call]
    assert rest[-1].finished.usage.completion_tokens == 1200
    spans = traced.whole(trace, *OWN, "queue", "placement")
    lost, kept = sorted(
        (span for span in spans if span.name == "placement"),
        key=lambda span: span.attributes["chipmesh.placement"],
    )
    assert lost.status == "LOST"
    assert lost.attributes["chipmesh.worker"] == victim["worker"] != kept.attributes["chipmesh.worker"]
    (executor,) = [span for span in spans if span.name == "chipmesh.executor.request"]
    assert (kept.status, executor.parent_id) == ("", kept.span_id)
    (generate,) = [span for span in spans if span.name == "chipmesh.gateway.generate"]
    assert generate.events == ("placed", "first token", "placed")


def test_a_cancelled_request_ends_with_that_status_everywhere(traced: TracedMesh) -> None:
    trace = traced.begin()
    call = traced.generate(token_request([8], max_tokens=LONG), trace)
    assert len(list(itertools.islice(call, 3))) == 3
    call.cancel()
    status = {span.name: span.status for span in traced.whole(trace, *OWN)}
    assert status["chipmesh.gateway.generate"] == status["chipmesh.scheduler.request"] == "CANCELLED"
    assert status["chipmesh.inference.v1alpha1.InferenceService/Generate"] == "CANCELLED"


def test_a_request_whose_time_is_over_ends_with_that_status(traced: TracedMesh) -> None:
    trace = traced.begin()
    call = traced.generate(token_request([9], max_tokens=LONG), trace, timeout=0.5)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    status = {span.name: span.status for span in traced.whole(trace, *OWN)}
    assert status["chipmesh.gateway.generate"] == "DEADLINE_EXCEEDED"
    assert status["chipmesh.inference.v1alpha1.InferenceService/Generate"] == "DEADLINE_EXCEEDED"
    assert status["chipmesh.scheduler.request"] in ("CANCELLED", "DEADLINE_EXCEEDED: DEADLINE_EXCEEDED")


def test_a_refused_request_ends_with_that_status_and_goes_no_further(traced: TracedMesh) -> None:
    trace = traced.begin()
    with pytest.raises(grpc.RpcError):
        list(traced.generate(token_request([], max_tokens=8), trace))
    spans = traced.whole(trace, "chipmesh.gateway.generate")
    assert {span.service for span in spans} == {"chipmesh-gateway"}
    assert {span.status for span in spans} == {"INVALID_ARGUMENT"}


def test_a_client_that_is_not_sampled_leaves_no_span(traced: TracedMesh) -> None:
    silent, after = traced.begin(), traced.begin()
    traced.chat(silent, sampled=False)
    traced.chat(after)
    traced.whole(after, *OWN)
    assert silent.trace_id not in {span.trace_id for span in traced.sink.wait_for(bool)}
