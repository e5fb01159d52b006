"""Chips that are being swapped: the order for the supervisor, and how far it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from chipmesh.scheduler.v1alpha1 import registry_pb2
from meshkit.errors import FailedPrecondition

_OURS = ("fence", "parity", "replay")
"""Stages that we see ourselves; what the supervisor tells then is older."""


@dataclass
class Swap:
    """One order, from its RPC to its end. stage: load and what the supervisor says, fence, replay, done."""

    order: registry_pb2.SwapOrder
    stage: str = "order"
    fraction: float = 0.0
    error: FailedPrecondition | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.stage == "done" or self.error is not None

    def reach(self, stage: str, fraction: float = 0.0) -> None:
        """The next stage, or more of this one."""
        self.stage, self.fraction = stage, fraction
        self.changed.set()

    def fail(self, message: str, *, reason: str, field: str = "") -> None:
        """The old executor serves on, or is loaded again. field: of the order, where one is at fault."""
        self.error = FailedPrecondition(message, field=field or None, reason=reason or "SWAP_FAILED")
        self.changed.set()


class Swaps:
    """Swaps by worker id, one at a time for each."""

    def __init__(self) -> None:
        self._swaps: dict[str, Swap] = {}

    def begin(self, worker: str, order: registry_pb2.SwapOrder) -> Swap:
        """Order a swap.

        Raises:
            FailedPrecondition: one of this worker is running.
        """
        running = self.running(worker)
        if running is not None:
            raise FailedPrecondition(
                f"worker {worker!r} is being swapped already ({running.order.swap_id}); wait for its end",
                field="worker",
                reason="SWAP_RUNNING",
            )
        swap = self._swaps[worker] = Swap(order)
        return swap

    def running(self, worker: str) -> Swap | None:
        """The swap of a worker that has not ended."""
        swap = self._swaps.get(worker)
        return swap if swap is not None and not swap.is_over else None

    def order_for(self, worker: str) -> registry_pb2.SwapOrder | None:
        """What a heartbeat is answered with."""
        swap = self.running(worker)
        return swap.order if swap is not None else None

    def heard(self, worker: str, progress: registry_pb2.SwapProgress) -> None:
        """What a heartbeat told of the worker's swap."""
        swap = self.running(worker)
        is_ours = swap is not None and progress.swap_id == swap.order.swap_id
        if swap is None or not is_ours or swap.stage in _OURS:
            return
        if progress.error:
            swap.fail(progress.error, reason=progress.reason, field=progress.field)
        else:
            swap.reach(progress.stage, progress.fraction)

    def lost(self, worker: str, reason: str) -> None:
        """The worker itself is gone."""
        swap = self.running(worker)
        if swap is not None:
            swap.fail(f"worker {worker!r} was lost while it was swapped: {reason}", reason="WORKER_LOST")
