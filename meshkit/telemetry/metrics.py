"""Prometheus metrics: one registry per service, and SGLang's well-known names under `chipmesh_`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from meshkit.telemetry.span_metrics import SpanMetrics

disable_created_metrics()  # type: ignore[no-untyped-call]
# They say when a series began: one more series for each, that nobody asks for.

PREFIX = "chipmesh_"
RELEASE = version("chipmesh")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. From a step on a fast chip to a request that waited for a model to load.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTER_TOKEN_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
    120.0,
)
TOKEN_GAPS = ("inter_token_latency_seconds", "time_per_output_token_seconds")

KNOWN = {
    "num_running_reqs": "Requests in the running batch",
    "num_queue_reqs": "Requests waiting to be admitted",
    "num_used_tokens": "Tokens held in KV pages by running requests",
    "token_usage": "Share of the KV capacity in use, 0 to 1",
    "gen_throughput": "Generated tokens per second",
    "cache_hit_rate": "Share of prompt tokens found in the radix cache, 0 to 1",
    "kv_available_tokens": "KV capacity that is free, in tokens",
    "kv_evictable_tokens": "KV capacity that is cached and may be evicted, in tokens",
    "num_retracted_reqs": "Requests taken out of the batch and queued again, for want of memory or preempted",
    "num_preempted_reqs": "Retracted requests that gave way to a higher priority",
    "prompt_tokens_total": "Prompt tokens of accepted requests",
    "generation_tokens_total": "Tokens generated",
    "cached_tokens_total": "Prompt tokens served from the radix cache",
    "num_requests_total": "Requests accepted",
    "num_aborted_requests_total": "Requests that ended by cancel, error or lost client",
    "evicted_tokens_total": "Tokens evicted from the radix cache",
    "time_to_first_token_seconds": "From receipt of a request to its first token",
    "inter_token_latency_seconds": "Time between two tokens of one request",
    "time_per_output_token_seconds": "Mean time between the tokens of one request that ended well",
    "e2e_request_latency_seconds": "From receipt of a request to its end",
    "queue_time_seconds": "From receipt of a request to its admission into a batch",
    "prefill_latency_seconds": "From admission of a request to its first token",
}


class Metrics:
    """The metrics of one service; `build_info` says its release, `spans_*` what became of its spans.

    Names are given without prefix; a known name brings its own help text.

    Declaring a name twice gives a ValueError from prometheus_client.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        build = self.gauge("build_info", "1; the release that runs is its label", labels=("version",))
        build.labels(version=RELEASE).set(1)
        self.registry.register(SpanMetrics(PREFIX))

    def counter(self, name: str, help_text: str | None = None, *, labels: Sequence[str] = ()) -> Counter:
        """A counter; `name` ends with `_total`."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r} must end with '_total', as it is shown with that ending")
        return Counter(PREFIX + name, _help(name, help_text), labels, registry=self.registry)

    def gauge(self, name: str, help_text: str | None = None, *, labels: Sequence[str] = ()) -> Gauge:
        """A gauge."""
        return Gauge(PREFIX + name, _help(name, help_text), labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        help_text: str | None = None,
        *,
        labels: Sequence[str] = (),
        buckets: Sequence[float] | None = None,
    ) -> Histogram:
        """A histogram. Default `buckets`: fine ones for times between tokens, else 5 ms to 300 s."""
        if buckets is None:
            buckets = INTER_TOKEN_BUCKETS if name in TOKEN_GAPS else LATENCY_BUCKETS
        return Histogram(
            PREFIX + name, _help(name, help_text), labels, registry=self.registry, buckets=tuple(buckets)
        )

    def expose(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)


def _help(name: str, help_text: str | None) -> str:
    text = help_text or KNOWN.get(name)
    if text is None:
        raise ValueError(f"metric {name!r} is none of the known names, so it needs a help text")
    return text
