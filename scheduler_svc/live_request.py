"""A request as the shell sees it: who asked, how it is sampled, its trace and its times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from chipmesh.device.v1alpha1 import sampling_pb2
from meshkit.errors import MeshError
from scheduler_svc.core.structures import FinishReason, ReplicaId, Request
from scheduler_svc.request_trace import RequestTrace


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica as people and clients know it."""

    replica: ReplicaId
    worker: str
    group: str
    model: str
    chip: str
    numeric_class: str
    vocab_size: int


class EventSink(Protocol):
    """Where the events of a session's requests go. Every call returns at once; events leave in batches."""

    def queued(self, live: LiveRequest) -> None:
        """The scheduler has the request."""

    def placed(self, number: int, info: ReplicaInfo, *, cached_tokens: int) -> None:
        """It runs on a replica, the first time or again."""

    def tokens(
        self, number: int, *, first_index: int, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """New tokens."""

    def finished(self, number: int, reason: FinishReason) -> None:
        """It ended well. Last event of a request."""

    def failed(self, number: int, error: MeshError) -> None:
        """It was refused or failed. Last event of a request."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """From submit to its last event. Times are of the loop's clock, in seconds."""

    core: Request
    sink: EventSink
    number: int
    sampling: sampling_pb2.SamplingParameters
    trace: RequestTrace
    submitted_at: float
    expiry: asyncio.TimerHandle | None = None
    placed_at: float | None = None
    has_tokens: bool = False
    replica: ReplicaId | None = None
    """Where it has a slot; None while it waits."""
    ending: MeshError | None = None
    """Why we cancel it, where it was not the gateway that asked."""

    @property
    def traceparent(self) -> str:
        """Trace context for the executor; empty where the request is not traced."""
        return self.trace.traceparent
