"""A profile in a trace: beneath the call that asked for it, one span for each class of operators."""

from __future__ import annotations

import time
from typing import Any

from meshkit.telemetry.tracing import tracer

CLASS_SPAN = "chipmesh.executor.operators"


def emit_class_spans(summary: dict[str, Any], *, begin_s: float) -> None:
    """Spans as long as the class took in all, from the beginning of the recording on; children of the span at
    hand. begin_s: of the monotonic clock.
    """
    begin_ns = time.time_ns() - int((time.monotonic() - begin_s) * 1e9)
    for line in summary["classes"]:
        span = tracer().start_span(f"{CLASS_SPAN} {line['class']}", start_time=begin_ns)
        span.set_attribute("chipmesh.operator_class", line["class"])
        span.set_attribute("chipmesh.share", line["share"])
        if line["calls"] is not None:
            span.set_attribute("chipmesh.calls", line["calls"])
            span.set_attribute("chipmesh.native", line["native"])
        span.set_attribute("chipmesh.programs", line["programs"])
        span.end(begin_ns + int(line["seconds"] * 1e9))
