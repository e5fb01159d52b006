"""One request, one trace, over real processes that export to a real collector."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hash_model import write_hash_model
from tests.support.mesh import running_mesh
from tests.support.otlp_sink import SeenSpan, otlp_sink

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HOPS = ("chipmesh.gateway.generate", "chipmesh.scheduler.request", "chipmesh.executor.request")


def _all_hops(spans: list[SeenSpan]) -> bool:
    return {span.name for span in spans} >= set(HOPS)


def test_one_request_is_one_trace_over_all_hops_without_an_orphan(tmp_path: Path) -> None:
    model = write_hash_model(tmp_path)
    arguments = ("--backend", "hash", "--model-path", str(model), "--load-format", "dummy")
    with otlp_sink() as (sink, endpoint):
        with running_mesh(tmp_path / "state", *arguments, "--otlp-endpoint", endpoint) as mesh:
            answer = mesh.cli("generate", "hello", "--raw", "--max-tokens", "8", "--json")
            assert answer.returncode == 0, answer.stderr
            sink.wait_for(_all_hops)
        # The mesh is down: every service has flushed what it held.
        spans = sink.wait_for(_all_hops)
    traces = {span.trace_id for span in spans if span.name in HOPS}
    assert len(traces) == 1
    trace = [span for span in spans if span.trace_id in traces]
    known = {span.span_id for span in trace}
    roots = [span for span in trace if not span.parent_id]
    assert [(root.service, root.name) for root in roots] == [("chipmesh-cli", "chipmesh.generate")]
    orphans = [span for span in trace if span.parent_id and span.parent_id not in known]
    assert not orphans
    assert all(span.ended for span in trace)
    by_id = {span.span_id: span for span in trace}
    executor = next(span for span in trace if span.name == HOPS[2])
    assert by_id[executor.parent_id].service != executor.service
