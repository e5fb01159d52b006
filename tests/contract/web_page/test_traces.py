"""Spans that services send to the gateway are traces on its page; or it says where they go instead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from meshkit.config import TracingConfig
from meshkit.errors import InvalidArgument
from meshkit.telemetry.tracing import configure_tracing, tracer
from tests.contract.web_page.page_mesh import PageMesh, page_mesh

HERE = {"page": {"traces_listen": "127.0.0.1:0"}}


async def endpoint_of(page: PageMesh) -> str:
    async with page.live() as view:
        last = await view.until(lambda last: "hello" in last, "facts")
        assert last["hello"]["traces"]["where"] == "here"
        return f"http://{last['hello']['traces']['endpoint']}"


async def test_a_services_spans_become_a_trace_with_parents_times_and_errors(tmp_path: Path) -> None:
    async with page_mesh(tmp_path, **HERE) as page:
        endpoint = await endpoint_of(page)
        handle = configure_tracing("chipmesh-test", TracingConfig(exporter="otlp", endpoint=endpoint))
        with tracer().start_as_current_span("request") as outer:
            outer.set_attribute("gen_ai.request.model", "m")
            inner = tracer().start_span("<b>decode</b>")
            inner.add_event("token", {"index": 3})
            inner.set_status(Status(StatusCode.ERROR, "CANCELLED"))
            inner.end()
        step = tracer().start_span("step", links=[trace.Link(outer.get_span_context())])
        step.end()
        await asyncio.to_thread(handle.shutdown)
        trace_id = f"{outer.get_span_context().trace_id:032x}"
        async with page.http() as http:
            (line,) = (await http.get("/page/api/traces")).json()["traces"]
            assert (line["trace_id"], line["name"], line["span_count"]) == (trace_id, "request", 2)
            assert (line["services"], line["error"]) == (["chipmesh-test"], "CANCELLED")
            whole = (await http.get(f"/page/api/traces/{trace_id}")).json()
            first, second = whole["spans"]
            assert (first["parent_id"], second["parent_id"]) == ("", first["span_id"])
            assert first["attributes"]["gen_ai.request.model"] == "m"
            assert second["name"] == "<b>decode</b>", "as it is: the page sets it as text"
            assert second["events"][0]["attributes"] == {"index": 3}
            assert 0 <= second["begin_s"] <= first["duration_s"] == whole["duration_s"]
            missing = await http.get("/page/api/traces/00")
            assert missing.status_code == 404
            assert "not sampled" in missing.json()["error"]["message"]


async def test_the_page_says_where_traces_go_that_do_not_come_here(tmp_path: Path) -> None:
    async def told(page: PageMesh) -> object:
        async with page.live() as view:
            return (await view.until(lambda last: "hello" in last, "facts"))["hello"]["traces"]

    async with page_mesh(tmp_path) as page:
        assert await told(page) == {"where": "off", "endpoint": ""}
    tracing = {"exporter": "otlp", "endpoint": "http://collector:4317"}
    async with page_mesh(tmp_path, tracing=tracing) as page:
        assert await told(page) == {"where": "elsewhere", "endpoint": "http://collector:4317"}


async def test_spans_are_taken_from_this_host_only(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"page\.traces_listen"):
        async with page_mesh(tmp_path, page={"traces_listen": "0.0.0.0:0"}):
            pass
