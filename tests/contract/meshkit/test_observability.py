"""`/health` and `/metrics` as a scraper sees them: raw HTTP over a real socket, in the service's own loop."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from meshkit.errors import FailedPrecondition, InvalidArgument
from meshkit.http import server as http_server
from meshkit.http.observability import HealthReport, ObservabilityServer
from meshkit.telemetry.metrics import Metrics

# One loop for all of them: grpc.aio keeps one poller per process, and its late events hit closed loops.
pytestmark = pytest.mark.asyncio(loop_scope="session")


def healthy() -> HealthReport:
    return HealthReport(serving=True, parts={"loop": "ok"})


async def get(address: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one GET."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
    raw = await asyncio.wait_for(reader.read(), timeout=5)
    writer.close()
    await writer.wait_closed()
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


async def test_health_is_200_with_its_parts_while_serving_and_503_when_not() -> None:
    report = HealthReport(serving=True, parts={"process": "ok", "step": "12 ms ago"})
    server = ObservabilityServer("127.0.0.1:0", Metrics().registry, lambda: report)
    address = await server.start()
    status, _, body = await get(address, "/health")
    assert status == 200
    assert json.loads(body) == {"serving": True, "parts": {"process": "ok", "step": "12 ms ago"}}
    report = HealthReport(serving=False, parts={"loop": "stalled"})
    status, _, body = await get(address, "/health")
    assert status == 503
    assert json.loads(body) == {"serving": False, "parts": {"loop": "stalled"}}
    assert (await get(address, "/live"))[0] == 200, "alive, and not to be started again"
    await server.stop()


async def test_metrics_scrape_parses_as_prometheus_text_and_holds_the_values() -> None:
    metrics = Metrics()
    metrics.counter("prompt_tokens_total", labels=("group",)).labels(group="g0").inc(7)
    metrics.gauge("num_running_reqs").set(3)
    metrics.histogram("time_to_first_token_seconds").observe(0.02)
    server = ObservabilityServer("127.0.0.1:0", metrics.registry, healthy)
    status, headers, body = await get(await server.start(), "/metrics")
    await server.stop()
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples["chipmesh_prompt_tokens_total", (("group", "g0"),)] == 7
    assert samples["chipmesh_num_running_reqs", ()] == 3
    assert samples["chipmesh_time_to_first_token_seconds_bucket", (("le", "0.025"),)] == 1
    assert samples["chipmesh_time_to_first_token_seconds_bucket", (("le", "0.01"),)] == 0


async def test_a_service_can_add_its_own_routes() -> None:
    async def hello(_: Request) -> Response:
        return PlainTextResponse("hello")

    server = ObservabilityServer(
        "127.0.0.1:0", Metrics().registry, healthy, routes=[Route("/v1/hello", hello)]
    )
    address = await server.start()
    assert (await get(address, "/v1/hello"))[2] == b"hello"
    assert (await get(address, "/v1/other"))[0] == 404
    await server.stop()


async def test_a_port_in_use_is_a_failed_precondition_that_names_field_and_address() -> None:
    first = ObservabilityServer("127.0.0.1:0", Metrics().registry, healthy)
    address = await first.start()
    second = ObservabilityServer(address, Metrics().registry, healthy)
    with pytest.raises(FailedPrecondition, match=address) as caught:
        await second.start()
    assert (caught.value.field, caught.value.reason) == ("http_listen", "ADDRESS_IN_USE")
    assert (await get(address, "/health"))[0] == 200
    await second.stop()
    await first.stop()


async def test_the_port_is_free_again_after_stop() -> None:
    first = ObservabilityServer("127.0.0.1:0", Metrics().registry, healthy)
    address = await first.start()
    await get(address, "/health")
    await first.stop()
    second = ObservabilityServer(address, Metrics().registry, healthy)
    assert await second.start() == address
    await second.stop()


async def test_a_unix_socket_serves(tmp_path: Path) -> None:
    server = ObservabilityServer(f"unix:{tmp_path}/http", Metrics().registry, healthy)
    assert (await get(await server.start(), "/health"))[0] == 200
    await server.stop()


async def test_a_listen_address_of_no_known_form_names_http_listen() -> None:
    with pytest.raises(InvalidArgument) as caught:
        ObservabilityServer("nowhere", Metrics().registry, healthy)
    assert caught.value.field == "http_listen"


async def test_an_idle_server_stops_at_once_however_rarely_it_looks_at_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "DATE_INTERVAL_S", 3600.0)
    server = ObservabilityServer("127.0.0.1:0", Metrics().registry, healthy)
    assert (await get(await server.start(), "/health"))[0] == 200
    await asyncio.wait_for(server.stop(), timeout=5)


async def test_the_date_of_answers_goes_on() -> None:
    server = ObservabilityServer("127.0.0.1:0", Metrics().registry, healthy)
    address = await server.start()
    dates = set()
    for _ in range(100):
        dates.add((await get(address, "/live"))[1]["date"])
        if len(dates) > 1:
            break
        await asyncio.sleep(0.05)
    await server.stop()
    assert len(dates) > 1
