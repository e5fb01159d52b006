"""What each key used, as metrics: read from the tenants when somebody asks; a token costs one addition."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from gateway.tenant import Tally, Tenant
from meshkit.telemetry.metrics import PREFIX, Metrics

BUDGETS = ("requests_per_minute", "tokens_per_minute", "max_live_requests")

_COUNTERS: tuple[tuple[str, str, Callable[[Tally], int]], ...] = (
    ("key_num_requests", "Requests accepted, by the name of their key", lambda tally: tally.requests),
    ("key_prompt_tokens", "Prompt tokens of accepted requests, by key", lambda tally: tally.prompt_tokens),
    ("key_generation_tokens", "Tokens generated, by key", lambda tally: tally.generation_tokens),
)


class KeyMetrics(Collector):
    """One value for each configured key; names come from the configuration only, so they are few."""

    def __init__(self, metrics: Metrics, tenants: Callable[[], Iterable[Tenant]]) -> None:
        self._tenants = tenants
        self.unauthenticated = metrics.counter(
            "unauthenticated_calls_total", "Calls whose API key was missing or not good"
        )
        self.file_errors = metrics.counter(
            "api_keys_errors_total", "Contents of files of API keys that could not be used"
        )
        metrics.registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The families without values."""
        return [*(_family(name, text) for name, text, _ in _COUNTERS), _refused()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The families as they are now."""
        tenants = list(self._tenants())
        for name, text, value in _COUNTERS:
            family = _family(name, text)
            for tenant in tenants:
                family.add_metric([tenant.name], value(tenant.tally))
            yield family
        refused = _refused()
        for tenant in tenants:
            for budget in BUDGETS:
                refused.add_metric([tenant.name, budget], tenant.tally.refused[budget])
        yield refused


def _family(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=["key"])


def _refused() -> CounterMetricFamily:
    return CounterMetricFamily(
        PREFIX + "key_refused_requests", "Requests that a budget had no room for", labels=["key", "budget"]
    )
