"""The ring of traces keeps to its bounds, whatever comes."""

from __future__ import annotations

from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from gateway.web_page.traces import MAX_ATTRIBUTES, MAX_EVENTS, MAX_SPANS_PER_TRACE, MAX_TEXT_CHARS, TraceRing

SECOND = 10**9


def span(trace: int, number: int, **fields: Any) -> Span:
    begin = 1000 * SECOND + trace * SECOND
    return Span(
        trace_id=trace.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"), name=f"span {number}",
        start_time_unix_nano=begin, end_time_unix_nano=begin + SECOND, **fields,
    )  # fmt: skip


def sent(*spans: Span, service: str = "s") -> list[ResourceSpans]:
    named = KeyValue(key="service.name", value=AnyValue(string_value=service))
    return [ResourceSpans(resource=Resource(attributes=[named]), scope_spans=[ScopeSpans(spans=list(spans))])]


def test_the_oldest_traces_go_first_and_the_newest_are_listed_first() -> None:
    ring = TraceRing(max_traces=3, max_spans=100)
    for trace in range(1, 6):
        ring.add(sent(span(trace, 1), span(trace, 2)))
    assert [int(line["trace_id"], 16) for line in ring.list()] == [5, 4, 3]
    assert ring.span_count == 6
    assert ring.get(f"{1:032x}") is None


def test_spans_are_bounded_over_all_traces_and_in_each() -> None:
    ring = TraceRing(max_traces=100, max_spans=700)
    for trace in range(1, 4):
        ring.add(sent(*(span(trace, number) for number in range(1, 301))))
    assert (ring.span_count, len(ring.list())) == (600, 2)
    ring.add(sent(*(span(3, number) for number in range(301, 1001))))
    whole = ring.get(f"{3:032x}")
    assert whole is not None
    assert (len(whole["spans"]), whole["left_out"]) == (MAX_SPANS_PER_TRACE, 1000 - MAX_SPANS_PER_TRACE)


def test_what_a_span_says_is_clipped() -> None:
    many = [KeyValue(key=f"k{number}", value=AnyValue(string_value="x" * 10_000)) for number in range(100)]
    events = [Span.Event(name="e" * 10_000) for _ in range(1000)]
    ring = TraceRing(max_traces=1, max_spans=10)
    ring.add(sent(span(1, 1, attributes=many, events=events)))
    whole = ring.get(f"{1:032x}")
    assert whole is not None
    (one,) = whole["spans"]
    assert len(one["attributes"]) == MAX_ATTRIBUTES
    assert len(one["events"]) == MAX_EVENTS
    assert max(map(len, [*one["attributes"].values(), one["events"][0]["name"]])) == MAX_TEXT_CHARS


def test_values_of_every_kind_become_plain_json() -> None:
    values = {
        "text": AnyValue(string_value="t"),
        "whole": AnyValue(int_value=7),
        "real": AnyValue(double_value=0.5),
        "yes": AnyValue(bool_value=True),
        "several": AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="stop")])),
        "nothing": AnyValue(),
    }
    attributes = [KeyValue(key=key, value=value) for key, value in values.items()]
    ring = TraceRing(max_traces=1, max_spans=10)
    ring.add(sent(span(1, 1, attributes=attributes)))
    whole = ring.get(f"{1:032x}")
    assert whole is not None
    assert whole["spans"][0]["attributes"] == {
        "text": "t", "whole": 7, "real": 0.5, "yes": True, "several": "stop", "nothing": "",
    }  # fmt: skip


def test_spans_of_several_services_in_any_order_are_one_trace_named_by_its_root() -> None:
    ring = TraceRing(max_traces=5, max_spans=10)
    parent = (1).to_bytes(8, "big")
    ring.add(sent(span(1, 2, parent_span_id=parent), service="executor"))
    assert ring.list()[0]["is_under_way"]
    ring.add(sent(span(1, 1), service="gateway"))
    (line,) = ring.list()
    assert (line["name"], line["service"], line["services"]) == ("span 1", "gateway", ["executor", "gateway"])
    assert not line["is_under_way"]


def test_a_trace_that_a_client_has_begun_is_named_by_where_it_enters_the_mesh() -> None:
    ring = TraceRing(max_traces=5, max_spans=10)
    client = b"\x09" * 8
    entry = span(1, 1, parent_span_id=client, kind=Span.SPAN_KIND_SERVER)
    inner = span(1, 2, parent_span_id=(1).to_bytes(8, "big"))
    ring.add(sent(inner, entry))
    (line,) = ring.list()
    assert (line["name"], line["is_under_way"]) == ("span 1", False)


def test_steps_which_link_to_requests_do_not_push_them_out() -> None:
    ring = TraceRing(max_traces=1, max_spans=10)
    ring.add(sent(span(1, 1)))
    ring.add(sent(span(2, 1, links=[Span.Link(trace_id=b"\x01" * 16, span_id=b"\x01" * 8)])))
    assert [int(line["trace_id"], 16) for line in ring.list()] == [1]
