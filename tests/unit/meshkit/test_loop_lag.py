"""A loop's own health: how late it wakes up, and how many tasks it has."""

from __future__ import annotations

import asyncio
import time

import pytest

from meshkit.telemetry import loop_lag
from meshkit.telemetry.loop_lag import LoopLag
from meshkit.telemetry.metrics import Metrics

INTERVAL_S = 0.01


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr(loop_lag, "TASKS_INTERVAL", 1)


def sample(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(name)
    assert value is not None
    return value


async def until_measured(metrics: Metrics, count: float) -> None:
    deadline = time.monotonic() + 5
    while sample(metrics, "chipmesh_loop_lag_seconds_count") < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(INTERVAL_S)


async def test_a_loop_that_was_held_up_is_seen_in_the_histogram() -> None:
    metrics = Metrics()
    measuring = asyncio.create_task(LoopLag(metrics).measure())
    try:
        await until_measured(metrics, 1)
        before = sample(metrics, "chipmesh_loop_lag_seconds_sum")
        held_until = time.monotonic() + 0.12
        while time.monotonic() < held_until:  # What no coroutine should do.
            pass
        await until_measured(metrics, sample(metrics, "chipmesh_loop_lag_seconds_count") + 1)
        assert sample(metrics, "chipmesh_loop_lag_seconds_sum") - before > 0.05
    finally:
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)


async def test_tasks_that_have_not_ended_are_counted() -> None:
    metrics = Metrics()
    measuring = asyncio.create_task(LoopLag(metrics).measure())
    waiting = [asyncio.create_task(asyncio.Event().wait()) for _ in range(5)]
    try:
        await until_measured(metrics, 2)
        many = sample(metrics, "chipmesh_asyncio_tasks")
        for task in waiting:
            task.cancel()
        await until_measured(metrics, sample(metrics, "chipmesh_loop_lag_seconds_count") + 2)
        assert many - sample(metrics, "chipmesh_asyncio_tasks") == len(waiting)
    finally:
        for each in (measuring, *waiting):
            each.cancel()
        await asyncio.gather(measuring, *waiting, return_exceptions=True)
