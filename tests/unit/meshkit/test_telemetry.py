"""Trace context as text, metric names and log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id, get_current_span, use_span

from meshkit.config import TracingConfig
from meshkit.telemetry.logging import configure_logging, get_logger
from meshkit.telemetry.metrics import INTER_TOKEN_BUCKETS, KNOWN, LATENCY_BUCKETS, Metrics
from meshkit.telemetry.tracing import (
    configure_tracing,
    context_from_traceparent,
    inject_traceparent,
    is_traced_method,
    tracer,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(), exporter=memory)
    yield memory
    handle.shutdown()


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Puts the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_traceparent_comes_back_as_it_went_in() -> None:
    assert inject_traceparent(context_from_traceparent(PARENT)) == PARENT


@pytest.mark.parametrize("text", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", UNSAMPLED])
def test_what_is_not_a_sampled_context_injects_nothing(text: str) -> None:
    assert inject_traceparent(context_from_traceparent(text)) == ""


def test_an_empty_traceparent_never_means_the_current_span(exporter: InMemorySpanExporter) -> None:
    with tracer().start_as_current_span("current"):
        assert inject_traceparent() != ""
        assert not get_current_span(context_from_traceparent("")).get_span_context().is_valid


def test_a_span_started_from_a_traceparent_is_its_child(exporter: InMemorySpanExporter) -> None:
    tracer().start_span("child", context=context_from_traceparent(PARENT)).end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert format_trace_id(span.parent.trace_id) == PARENT.split("-")[1]
    assert span.resource.attributes["service.name"] == "test"


def test_a_ratio_of_zero_keeps_no_new_trace_but_follows_a_sampled_caller() -> None:
    memory = InMemorySpanExporter()
    handle = configure_tracing("test", TracingConfig(sampling_ratio=0), exporter=memory)
    tracer().start_span("new", context=Context()).end()
    tracer().start_span("followed", context=context_from_traceparent(PARENT)).end()
    handle.shutdown()
    assert [span.name for span in memory.get_finished_spans()] == ["followed"]


def test_without_an_exporter_a_callers_context_still_passes_through() -> None:
    configure_tracing("test", TracingConfig()).shutdown()
    span = tracer().start_span("anything", context=context_from_traceparent(PARENT))
    assert not span.is_recording()
    with use_span(span):
        assert inject_traceparent() == PARENT


def test_after_shutdown_nothing_is_recorded(exporter: InMemorySpanExporter) -> None:
    second = configure_tracing("test", TracingConfig(), exporter=exporter)
    second.shutdown()
    second.shutdown()
    tracer().start_span("late").end()
    assert exporter.get_finished_spans() == ()


def test_health_checks_and_span_export_are_no_traced_methods() -> None:
    assert is_traced_method("/chipmesh.inference.v1alpha1.InferenceService/Generate")
    assert not is_traced_method("/grpc.health.v1.Health/Check")
    assert not is_traced_method("/opentelemetry.proto.collector.trace.v1.TraceService/Export")


def test_every_known_name_can_be_declared_and_is_shown_under_the_prefix() -> None:
    metrics = Metrics()
    for name in KNOWN:
        if name.endswith("_total"):
            metrics.counter(name)
        elif name.endswith("_seconds"):
            metrics.histogram(name)
        else:
            metrics.gauge(name)
    text = metrics.expose().decode()
    for name in KNOWN:
        assert f"# HELP chipmesh_{name.removesuffix('_total')}" in text


def test_a_name_that_nobody_knows_needs_a_help_text() -> None:
    with pytest.raises(ValueError, match="help text"):
        Metrics().gauge("my_own")
    Metrics().gauge("my_own", "What it means")


def test_a_counter_without_total_is_refused() -> None:
    with pytest.raises(ValueError, match="_total"):
        Metrics().counter("requests", "What it means")


def test_two_services_in_one_process_share_no_metric() -> None:
    first, second = Metrics(), Metrics()
    first.gauge("num_running_reqs").set(1)
    assert b"num_running_reqs" not in second.expose()


def test_buckets_rise_and_inter_token_latency_has_finer_ones() -> None:
    for buckets in (LATENCY_BUCKETS, INTER_TOKEN_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
    metrics = Metrics()
    metrics.histogram("inter_token_latency_seconds")
    assert b'le="0.0005"' in metrics.expose()


@pytest.mark.usefixtures("root_logger")
def test_a_log_line_is_json_with_service_and_trace_id_inside_a_span(exporter: InMemorySpanExporter) -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out)
    log = get_logger("a.module")
    with tracer().start_as_current_span("request") as span:
        log.info("request accepted", request_id="r1", name="any key may be used")
    log.info("outside")
    inside, outside = [json.loads(line) for line in out.getvalue().splitlines()]
    assert inside["event"] == "request accepted"
    assert (inside["service"], inside["level"], inside["logger"]) == ("gateway", "info", "a.module")
    assert (inside["request_id"], inside["name"]) == ("r1", "any key may be used")
    assert inside["trace_id"] == format_trace_id(span.get_span_context().trace_id)
    assert "trace_id" not in outside


@pytest.mark.usefixtures("root_logger")
def test_log_lines_of_other_libraries_have_the_same_shape() -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out)
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    line = json.loads(out.getvalue())
    assert (line["event"], line["service"], line["level"]) == ("port 80", "gateway", "warning")


@pytest.mark.usefixtures("root_logger")
def test_a_traceback_is_one_field_of_its_line() -> None:
    out = io.StringIO()
    configure_logging("gateway", stream=out)
    try:
        raise KeyError("lost")
    except KeyError:
        get_logger("a").exception("failed")
    line = json.loads(out.getvalue())
    assert "KeyError: 'lost'" in line["exception"]


@pytest.mark.usefixtures("root_logger")
def test_lines_below_the_level_are_left_out() -> None:
    out = io.StringIO()
    configure_logging("gateway", level="warning", stream=out)
    get_logger("a").info("not this")
    get_logger("a").warning("this")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["this"]


@pytest.mark.usefixtures("root_logger")
def test_a_terminal_gets_readable_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    configure_logging("gateway", stream=out)
    get_logger("a").info("request accepted", request_id="r1")
    assert "request accepted" in out.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(out.getvalue())
