"""Metrics of groups and workers as the scheduler sees them, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshkit.telemetry.metrics import PREFIX
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.guards import GroupGuards
from scheduler_svc.mirror import Mirror, ShadowCount
from scheduler_svc.worker_pool import WorkerPool, WorkerState

_SHADOW = ("group", "shadow_group")


class FleetCollector(Collector):
    """One value for each group that is known, also where it has no worker: what is missing has to be seen."""

    def __init__(self, core: MeshCore, pool: WorkerPool, guards: GroupGuards, mirror: Mirror) -> None:
        self._core = core
        self._pool = pool
        self._guards = guards
        self._mirror = mirror

    def describe(self) -> Iterable[Metric]:
        """Nothing: their samples are known only at the scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families as they are now."""
        return [*self._groups(), *self._shadows()]

    def _groups(self) -> Iterable[Metric]:
        workers = _gauge("workers", "Workers of a group by their state", ("group", "state"))
        weight = _gauge("group_weight", "Weight of a group among those of its model", ("group", "model"))
        rolled_back = _gauge(
            "group_rolled_back", "1 where a group lost its traffic to its bounds", ("group",)
        )
        counts: dict[tuple[str, WorkerState], int] = {}
        for member in self._pool.members:
            key = (member.registration.group, member.state)
            counts[key] = counts.get(key, 0) + 1
        for group in self._core.snapshot().groups:
            for state in WorkerState:
                workers.add_metric([group.name, state.value], counts.get((group.name, state), 0))
            weight.add_metric([group.name, group.model], group.weight)
            rolled_back.add_metric([group.name], float(group.name in self._guards.reasons))
        return workers, weight, rolled_back

    def _shadows(self) -> Iterable[Metric]:
        requests = _counter("shadow_requests", "Mirrored requests by what came of them", (*_SHADOW, "result"))
        tokens = _counter("shadow_tokens", "Tokens of mirrored requests that were compared", _SHADOW)
        equal = _counter("shadow_equal_tokens", "Those of them before the first that differs", _SHADOW)
        for group, shadow in self._mirror.shadows.items():
            labels, count = (group, shadow.group), shadow.count
            for result, number in _results(count).items():
                requests.add_metric([*labels, result], number)
            tokens.add_metric(labels, count.tokens)
            equal.add_metric(labels, count.equal_tokens)
        return requests, tokens, equal


def _results(count: ShadowCount) -> dict[str, int]:
    return {
        "identical": count.identical,
        "different": count.compared - count.identical,
        "failed": count.failed,
    }


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)
