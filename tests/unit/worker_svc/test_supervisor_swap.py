"""Swaps as the supervisor tells of them; tests/e2e/test_swap.py has whole ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chipmesh.scheduler.v1alpha1.registry_pb2 import SwapOrder, SwapProgress
from worker_svc import executor_set
from worker_svc.config import WorkerConfig
from worker_svc.supervisor import Supervisor


class Told:
    """What a registrar would send with its next heartbeats."""

    def __init__(self) -> None:
        self.progress: list[SwapProgress] = []
        self.failed = asyncio.Event()

    def tell_swap(self, progress: SwapProgress) -> None:
        self.progress.append(progress)
        if progress.error:
            self.failed.set()


async def test_a_fault_of_ours_in_a_swap_is_told_and_the_next_order_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def spawn(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault that nobody foresaw")

    monkeypatch.setattr(executor_set, "spawn_executor", spawn)
    registrar = Told()
    config = WorkerConfig(worker_id="w0", model="m", scheduler_address="127.0.0.1:1", cache_dir=tmp_path)
    supervisor = Supervisor(config, registrar)  # type: ignore[arg-type]
    for swap_id in ("one", "two"):
        registrar.failed.clear()
        supervisor.order_swap(SwapOrder(swap_id=swap_id, backend="other"))
        await asyncio.wait_for(registrar.failed.wait(), 10)
        last = registrar.progress[-1]
        assert (last.swap_id, last.stage, last.reason) == (swap_id, "failed", "INTERNAL")
        assert "its log tells more" in last.error
        assert "RuntimeError" not in last.error  # Class names and texts of exceptions are for the log.
