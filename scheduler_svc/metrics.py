"""The scheduler's metrics under the known names; gauges are read from the engine when somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshkit.telemetry.metrics import KNOWN, PREFIX, Metrics
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.structures import ReplicaId, ReplicaLimits
from scheduler_svc.live_request import LiveRequest, ReplicaInfo
from scheduler_svc.step_time import StepTimes
from scheduler_svc.throughput import Throughput

if TYPE_CHECKING:  # the engine counts into this module
    from scheduler_svc.engine import Engine

LABELS = ("group", "worker", "chip")
MAX_SERIES = 1024
"""Replicas by their labels that have series; of those that are gone the oldest are dropped beyond it."""
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_used_tokens",
    "token_usage",
    "gen_throughput",
    "cache_hit_rate",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "num_retracted_reqs",
    "num_preempted_reqs",
)
_IDLE_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0, 10.0)
_MASK_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class _ReplicaSeries:
    """One replica's labelled series, looked up once, and what its hit rate is made of."""

    prompt_tokens: Counter
    generation_tokens: Counter
    cached_tokens: Counter
    evicted_tokens: Counter
    queue_time: Histogram
    prefill_latency: Histogram
    step_time: Histogram
    device_time: Histogram
    device_idle: Histogram
    constraint_mask: Histogram
    throughput: Throughput
    generated_sum: int = 0
    prompt_sum: int = 0
    cached_sum: int = 0
    evicted_sum: int = 0


class SchedulerMetrics:
    """What the engine counts as things happen."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prompt_tokens = metrics.counter("prompt_tokens_total", labels=LABELS)
        self._generation_tokens = metrics.counter("generation_tokens_total", labels=LABELS)
        self._cached_tokens = metrics.counter("cached_tokens_total", labels=LABELS)
        self._evicted_tokens = metrics.counter("evicted_tokens_total", labels=LABELS)
        self._queue_time = metrics.histogram("queue_time_seconds", labels=LABELS)
        self._prefill_latency = metrics.histogram("prefill_latency_seconds", labels=LABELS)
        self._step_time = metrics.histogram(
            "step_time_seconds",
            "Time of a step as the scheduler sees it",
            labels=LABELS,
            buckets=_STEP_BUCKETS,
        )
        self._device_time = metrics.histogram(
            "step_device_time_seconds",
            "Time that the device spent on a step",
            labels=LABELS,
            buckets=_STEP_BUCKETS,
        )
        self._device_idle = metrics.histogram(
            "device_idle_seconds",
            "Time that a device waited for a step after the one before it",
            labels=LABELS,
            buckets=_IDLE_BUCKETS,
        )
        self._constraint_mask = metrics.histogram(
            "constraint_mask_seconds",
            "Time of a step that went to the constraints of its requests, where it has any",
            labels=LABELS,
            buckets=_MASK_BUCKETS,
        )
        self.stale_results = metrics.counter(
            "stale_step_results_total", "Step results ignored, as they belong to no step in flight"
        )
        self.identity_violations = metrics.counter(
            "page_identity_violations_total", "Idle replicas whose pages did not add up"
        )
        self._refused = metrics.counter(
            "refused_requests_total", "Requests refused by this service", labels=("reason",)
        )
        self._refused.labels("QUEUE_FULL")  # Shown from the start: a rate misses where a series begins.
        self._rollbacks = metrics.counter(
            "group_rollbacks_total", "Groups that lost their traffic to their bounds", labels=("group",)
        )
        self.traffic_file_errors = metrics.counter(
            "traffic_file_errors_total", "Contents of the traffic file that could not be used"
        )
        self._series: dict[ReplicaId, _ReplicaSeries] = {}
        self._shown: dict[tuple[str, str, str], int] = {}
        """By labels, oldest first: how many of their replicas are attached."""
        self._labels: dict[ReplicaId, tuple[str, str, str]] = {}
        self._by_replica: tuple[Counter | Histogram, ...] = (
            self._prompt_tokens, self._generation_tokens, self._cached_tokens, self._evicted_tokens,
            self._queue_time, self._prefill_latency, self._step_time, self._device_time, self._device_idle,
            self._constraint_mask,
        )  # fmt: skip

    def refused(self, reason: str) -> None:
        """A request was not taken. reason: a word of ours, of which there are few."""
        self._refused.labels(reason).inc()

    def group_rolled_back(self, group: str) -> None:
        """A guard took a group's traffic away."""
        self._rollbacks.labels(group).inc()

    def replica_added(self, info: ReplicaInfo) -> None:
        """Make the series of a replica; those of an executor before it on the same worker go on."""
        labels = (info.group, info.worker, info.chip)
        self._shown[labels] = self._shown.pop(labels, 0) + 1
        self._labels[info.replica] = labels
        self._drop_old_series()
        self._series[info.replica] = _ReplicaSeries(
            throughput=Throughput(self._clock()),
            prompt_tokens=self._prompt_tokens.labels(*labels),
            generation_tokens=self._generation_tokens.labels(*labels),
            cached_tokens=self._cached_tokens.labels(*labels),
            evicted_tokens=self._evicted_tokens.labels(*labels),
            queue_time=self._queue_time.labels(*labels),
            prefill_latency=self._prefill_latency.labels(*labels),
            step_time=self._step_time.labels(*labels),
            device_time=self._device_time.labels(*labels),
            device_idle=self._device_idle.labels(*labels),
            constraint_mask=self._constraint_mask.labels(*labels),
        )

    def replica_removed(self, replica: ReplicaId) -> None:
        """Forget the look-up of a replica that is gone; what was counted stays, while it is not too much."""
        self._series.pop(replica, None)
        if (labels := self._labels.pop(replica, None)) is not None:
            self._shown[labels] -= 1

    def _drop_old_series(self) -> None:
        if len(self._shown) <= MAX_SERIES:
            return
        gone = next((labels for labels, attached in self._shown.items() if not attached), None)
        if gone is not None:
            del self._shown[gone]
            for metric in self._by_replica:
                metric.remove(*gone)

    def placed_first(self, live: LiveRequest, info: ReplicaInfo, *, now: float, cached_tokens: int) -> None:
        """A request entered a slot for the first time; replays are not counted again."""
        series = self._series[info.replica]
        series.queue_time.observe(now - live.submitted_at)
        series.prompt_sum += len(live.core.prompt)
        series.cached_sum += cached_tokens
        series.prompt_tokens.inc(len(live.core.prompt))
        series.cached_tokens.inc(cached_tokens)

    def cache_hit_rate(self, replica: ReplicaId) -> float:
        """Share of the prompt tokens of an attached replica that came from its cache, 0 to 1."""
        series = self._series[replica]
        return series.cached_sum / series.prompt_sum if series.prompt_sum else 0.0

    def gen_throughput(self, replica: ReplicaId) -> float:
        """Tokens a second that an attached replica made lately."""
        series = self._series[replica]
        return series.throughput.rate(series.generated_sum, now=self._clock())

    def first_token(self, live: LiveRequest, *, now: float) -> None:
        """A request made its first token here."""
        if live.replica is not None and live.placed_at is not None:
            self._series[live.replica].prefill_latency.observe(now - live.placed_at)

    def step_ended(self, replica: ReplicaId, *, tokens: int, evicted_tokens: int, times: StepTimes) -> None:
        """A step of a replica made `tokens` tokens; `evicted_tokens` is the sum since the replica came."""
        series = self._series[replica]
        series.step_time.observe(times.wall_s)
        series.device_time.observe(times.device_s)
        series.device_idle.observe(times.idle_s)
        if times.constraint_s is not None:
            series.constraint_mask.observe(times.constraint_s)
        if tokens:
            series.generation_tokens.inc(tokens)
            series.generated_sum += tokens
        if evicted_tokens > series.evicted_sum:
            series.evicted_tokens.inc(evicted_tokens - series.evicted_sum)
            series.evicted_sum = evicted_tokens


class MeshCollector(Collector):
    """Gauges of every attached replica, made at the scrape."""

    def __init__(self, engine: Engine, metrics: SchedulerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing: their samples are known only at the scrape."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One family per name, one sample per replica."""
        families = {name: GaugeMetricFamily(PREFIX + name, KNOWN[name], labels=LABELS) for name in GAUGES}
        for info, limits, batcher in self._engine.attached():
            values = _gauges(limits, batcher)
            values["cache_hit_rate"] = self._metrics.cache_hit_rate(info.replica)
            values["gen_throughput"] = self._metrics.gen_throughput(info.replica)
            for name, value in values.items():
                families[name].add_metric((info.group, info.worker, info.chip), value)
        # Requests that no replica has yet; they have none of the labels.
        families["num_queue_reqs"].add_metric(("", "", ""), self._engine.core.snapshot().waiting)
        return families.values()


def _gauges(limits: ReplicaLimits, batcher: Batcher) -> dict[str, float]:
    pages = batcher.pages
    used = pages.total - pages.free - batcher.evictable_pages
    return {
        "num_running_reqs": batcher.running,
        "num_queue_reqs": batcher.waiting,
        "num_used_tokens": used * limits.page_size,
        "token_usage": used / pages.total,
        "kv_available_tokens": pages.free * limits.page_size,
        "kv_evictable_tokens": batcher.evictable_pages * limits.page_size,
        "num_retracted_reqs": batcher.retracted_count,
        "num_preempted_reqs": batcher.preempted_count,
    }
