"""Requests that were refused for want of room or time, by whose they were and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import grpc
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from gateway.tenant import Tenant
from meshkit.errors import MeshError
from meshkit.telemetry.metrics import PREFIX, Metrics

REASONS = (
    "BUDGET_EXHAUSTED", "TOO_MANY_REQUESTS", "TEXT_POOL_FULL", "QUEUE_FULL", "REQUEST_TOO_LARGE",
    "DEADLINE_EXCEEDED", "SCHEDULER_UNAVAILABLE", "SCHEDULER_LOST", "DRAINING",
)  # fmt: skip
OTHER = "OTHER"
_CODES = frozenset({
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
})  # fmt: skip


def count_refusal(tenant: Tenant, error: MeshError) -> None:
    """A request of `tenant` was not taken. One that was wrong itself is not counted."""
    if error.code in _CODES:
        tenant.tally.refusals[error.reason if error.reason in REASONS else OTHER] += 1


@contextmanager
def counted_refusals(tenant: Tenant) -> Iterator[None]:
    """Counts the error that leaves the block."""
    try:
        yield
    except MeshError as error:
        count_refusal(tenant, error)
        raise


class RefusalMetrics(Collector):
    """Read from the tenants when somebody asks. Reasons are these few, keys those of the configuration."""

    def __init__(self, metrics: Metrics, tenants: Callable[[], Iterable[Tenant]]) -> None:
        self._tenants = tenants
        metrics.registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The family without values."""
        return [_family()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The family as it is now; key is empty for requests without one."""
        family = _family()
        for tenant in self._tenants():
            for reason in (*REASONS, OTHER):
                family.add_metric([tenant.name, reason], tenant.tally.refusals[reason])
        yield family


def _family() -> CounterMetricFamily:
    return CounterMetricFamily(
        PREFIX + "refused_requests",
        "Requests refused for want of room or time, by key and reason",
        labels=["key", "reason"],
    )
