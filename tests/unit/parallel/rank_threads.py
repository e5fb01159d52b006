"""Ranks of a set as threads of this process, each with a back end and gloo groups of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from meshkit.modelstore.sharding import ParallelLayout
from plugins.sdk.runner import ParallelOptions

T = TypeVar("T")

PATIENCE_S = 60.0
"""Of tests in which all ranks come: nobody waits for it."""


def free_rendezvous() -> str:
    """A place that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def run_ranks(
    layout: ParallelLayout,
    work: Callable[[ParallelOptions], T],
    *,
    step_timeout_s: float = PATIENCE_S,
    join_timeout_s: float = PATIENCE_S,
) -> list[T]:
    """What `work` returns on each rank, by rank; the first rank's error where it raises."""
    place = free_rendezvous()
    options = [
        ParallelOptions(rank, layout.tensor, layout.pipeline, place, join_timeout_s, step_timeout_s)
        for rank in range(layout.world_size)
    ]
    with ThreadPoolExecutor(layout.world_size, thread_name_prefix="rank") as threads:
        running = [threads.submit(work, each) for each in options]
    return [each.result() for each in running]


def errors_of_ranks(
    layout: ParallelLayout,
    work: Callable[[ParallelOptions], object],
    *,
    step_timeout_s: float = PATIENCE_S,
    join_timeout_s: float = PATIENCE_S,
) -> list[Exception | None]:
    """What `work` raises on each rank, by rank."""

    def caught(options: ParallelOptions) -> Exception | None:
        try:
            work(options)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error
        return None

    return run_ranks(layout, caught, step_timeout_s=step_timeout_s, join_timeout_s=join_timeout_s)
