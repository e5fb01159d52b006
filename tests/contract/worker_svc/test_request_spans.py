"""Spans of traced requests in an executor: children of their request's trace, ended however the
request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshkit.config import TracingConfig
from meshkit.telemetry.tracing import configure_tracing
from tests.contract.worker_svc.harness import Driver, Harness, admit, chunk

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    handle = configure_tracing("executor", TracingConfig(), exporter=memory)
    yield memory
    handle.shutdown()


def request_spans(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    names = ("chipmesh.executor.request", "prefill", "decode")
    return [span for span in exporter.get_finished_spans() if span.name in names]


def step_spans(exporter: InMemorySpanExporter) -> Sequence[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == "chipmesh.executor.step"]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state, at most 5 s."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - the state changes in another task or process
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 5)


def assert_whole_family(spans: Sequence[ReadableSpan], *, names: set[str]) -> None:
    by_name = {span.name: span for span in spans}
    assert set(by_name) == names
    request = by_name["chipmesh.executor.request"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    for span in spans:
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.end_time is not None
        if span is not request:
            assert span.parent is not None
            assert request.context is not None
            assert span.parent.span_id == request.context.span_id


async def test_a_released_request_leaves_a_whole_family(
    driver: Driver, exporter: InMemorySpanExporter
) -> None:
    await driver.step(admitted=[admit(0, [0], traceparent=PARENT)], prefill=[chunk(0, [1], last=False)])
    await driver.step(prefill=[chunk(0, [2], start=1)])
    await driver.step(decode=True)
    assert request_spans(exporter) == [], "an executor that is killed now would leave an orphan"
    await driver.step(released=[0])
    spans = request_spans(exporter)
    assert_whole_family(spans, names={"chipmesh.executor.request", "prefill", "decode"})
    assert [span.name for span in spans] == ["chipmesh.executor.request", "prefill", "decode"]
    request, prefill, decode = spans
    assert request.attributes is not None
    assert request.attributes["gen_ai.usage.output_tokens"] == 2
    assert request.attributes["chipmesh.chip"] == "hash"
    chunks = [(event.name, dict(event.attributes or {})) for event in prefill.events]
    assert chunks == [
        ("chunk", {"chipmesh.tokens": 1, "chipmesh.step_seq": 1}),
        ("chunk", {"chipmesh.tokens": 1, "chipmesh.step_seq": 2}),
    ]
    assert [dict(event.attributes or {}) for event in decode.events] == [
        {"gen_ai.usage.output_tokens": 2, "chipmesh.step_seq": 3}
    ]
    assert prefill.start_time == request.start_time
    assert prefill.end_time == decode.start_time
    assert {span.status.is_unset for span in spans} == {True}


async def test_step_spans_link_to_the_traced_requests_they_served(
    driver: Driver, exporter: InMemorySpanExporter
) -> None:
    other = PARENT.replace(TRACE, TRACE[::-1])
    await driver.step(
        admitted=[
            admit(0, [0, 1, 2], traceparent=PARENT),
            admit(1, [3, 4, 5], traceparent=other),
            admit(2, [6, 7, 8]),
        ],
        prefill=[chunk(0, [1]), chunk(1, [2, 3]), chunk(2, [4])],
    )
    for _ in range(8):
        await driver.step(decode=True)
    first, *later = step_spans(exporter)
    assert first.parent is None
    assert {f"{link.context.trace_id:032x}" for link in first.links} == {TRACE, TRACE[::-1]}
    assert first.attributes is not None
    assert first.attributes["chipmesh.step.prefill_tokens"] == 4
    assert first.attributes["chipmesh.step.output_tokens"] == 3
    # 2nd, 4th and 8th token, not one for each step.
    assert [dict(span.attributes or {})["chipmesh.step_seq"] for span in later] == [2, 4, 8]


async def test_an_ending_without_release_is_the_status_of_the_spans(
    driver: Driver, harness: Harness, exporter: InMemorySpanExporter
) -> None:
    await driver.step(admitted=[admit(0, [0], traceparent=PARENT)], prefill=[chunk(0, [1])])
    await harness.attach()
    by_name = {span.name: span.status.description for span in request_spans(exporter)}
    assert by_name == {
        "chipmesh.executor.request": "ATTACHED_ANEW", "prefill": None, "decode": "ATTACHED_ANEW",
    }  # fmt: skip


async def test_attaching_anew_ends_the_spans(
    driver: Driver, harness: Harness, exporter: InMemorySpanExporter
) -> None:
    await driver.step(admitted=[admit(0, [0], traceparent=PARENT)], prefill=[chunk(0, [1])])
    await harness.attach()
    assert_whole_family(request_spans(exporter), names={"chipmesh.executor.request", "prefill", "decode"})


async def test_the_end_of_the_stream_ends_the_spans(driver: Driver, exporter: InMemorySpanExporter) -> None:
    await driver.step(admitted=[admit(0, [0], traceparent=PARENT)], prefill=[chunk(0, [1], last=False)])
    driver.call.cancel()
    await until(lambda: len(request_spans(exporter)) == 2)
    assert_whole_family(request_spans(exporter), names={"chipmesh.executor.request", "prefill"})


@pytest.mark.parametrize("traceparent", ["", "garbage", PARENT[:-2] + "00"])
async def test_an_untraced_request_leaves_no_span(
    driver: Driver, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    await driver.step(admitted=[admit(0, [0], traceparent=traceparent)], prefill=[chunk(0, [1])])
    await driver.step(released=[0])
    assert exporter.get_finished_spans() == () or not [*request_spans(exporter), *step_spans(exporter)]
