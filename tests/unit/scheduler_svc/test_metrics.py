"""Series of replicas: kept when they go, within a bound."""

from __future__ import annotations

import pytest

from meshkit.telemetry.metrics import Metrics
from scheduler_svc import metrics as module
from scheduler_svc.core.structures import ReplicaId
from scheduler_svc.live_request import ReplicaInfo
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.step_time import StepTimes


def replica(number: int) -> ReplicaInfo:
    return ReplicaInfo(ReplicaId(f"i{number}"), f"w{number}", "g", "m", "chip", "float32", 100)


def tokens_of(metrics: Metrics, number: int) -> float | None:
    labels = {"group": "g", "worker": f"w{number}", "chip": "chip"}
    return metrics.registry.get_sample_value("chipmesh_generation_tokens_total", labels)


def test_of_too_many_replicas_that_are_gone_the_oldest_lose_their_series(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 3)
    metrics = Metrics()
    scheduler = SchedulerMetrics(metrics)
    for number in range(6):
        info = replica(number)
        scheduler.replica_added(info)
        scheduler.step_ended(info.replica, tokens=7, evicted_tokens=0, times=StepTimes(0.1, 0.1, 0.0))
        if number:  # The first one stays attached.
            scheduler.replica_removed(info.replica)
    assert [tokens_of(metrics, number) for number in range(6)] == [7, None, None, None, 7, 7]
    scheduler.replica_added(replica(4))
    assert tokens_of(metrics, 4) == 7, "one that comes back goes on"
