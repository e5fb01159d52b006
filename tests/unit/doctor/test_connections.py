"""What HTTP answers and metrics pages tell."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from meshkit.cli.doctor.connections import Page, fetch, narrowed
from meshkit.cli.doctor.facts import ClockFacts
from meshkit.cli.doctor.probe_services import read_samples


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the clock that its server has."""

    offset_s = 0.0

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + self.offset_s, usegmt=True)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
        del format, args


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("offset_s", [0.0, 3600.0, -3600.0])
def test_the_date_of_an_answer_bounds_the_other_sides_clock(
    address: str, offset_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "offset_s", offset_s)
    page = fetch(address, "/health")
    assert page.status == 200
    assert page.clock is not None
    assert page.clock.low_s <= offset_s <= page.clock.high_s
    assert page.clock.high_s - page.clock.low_s < 4.0


def test_no_skew_is_certain_that_nothing_makes_necessary() -> None:
    assert ClockFacts(-0.5, 1.5).certain_s == 0.0
    assert ClockFacts(2.0, 4.0).certain_s == 2.0
    assert ClockFacts(-4.0, -2.0).certain_s == -2.0


def test_two_readings_of_a_clock_narrow_it_and_one_that_was_set_is_read_anew() -> None:
    assert narrowed(ClockFacts(-0.5, 1.5), ClockFacts(-1.0, 1.0)) == ClockFacts(-0.5, 1.0)
    assert narrowed(ClockFacts(-0.5, 1.5), ClockFacts(99.0, 101.0)) == ClockFacts(99.0, 101.0)
    assert narrowed(None, ClockFacts(0.0, 1.0)) == ClockFacts(0.0, 1.0)


def test_samples_are_summed_over_labels_but_for_buckets_and_versions() -> None:
    text = """
# TYPE chipmesh_x counter
chipmesh_x_total{group="a"} 1
chipmesh_x_total{group="b"} 2
# TYPE chipmesh_lag histogram
chipmesh_lag_bucket{le="0.25"} 5
chipmesh_lag_bucket{le="+Inf"} 6
# TYPE chipmesh_build_info gauge
chipmesh_build_info{version="1.2",service="gateway"} 1
"""
    samples = read_samples(Page(200, text.encode(), None))
    assert samples["chipmesh_x_total"] == 3
    assert samples["chipmesh_lag_bucket{le=0.25}"] == 5
    assert samples["chipmesh_build_info{version=1.2}"] == 1


def test_a_page_that_holds_no_metrics_has_no_samples() -> None:
    assert read_samples(None) == {}
    assert read_samples(Page(200, b"<html> 1 2 3", None)) == {}
