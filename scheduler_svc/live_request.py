"""A request as the shell sees it: who asked, how it is sampled, its trace and its times."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
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

    def grew(self, live: LiveRequest) -> None:
        """It has one token more, the last of its output (and of its logprobs, where it asked for them)."""

    def finished(self, number: int, reason: FinishReason) -> None:
        """It ended well. Last event of a request."""

    def failed(self, number: int, error: MeshError) -> None:
        """It was refused or failed. Last event of a request."""


class RequestObserver(Protocol):
    """What wants to know of every request, beside whoever asked for it. Every call returns at once."""

    def placed(self, live: LiveRequest, info: ReplicaInfo) -> None:
        """It runs for the first time."""

    def ended(self, live: LiveRequest, error: MeshError | None) -> None:
        """It had its last event; error: where that was a bad one."""


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
    first_token_at: float | None = None
    last_token_at: float | None = None
    logprobs: list[float] = field(default_factory=list)
    """Of its output so far, where it asked for them."""
    replica: ReplicaId | None = None
    """Where it has a slot; None while it waits."""
    ending: MeshError | None = None
    """Why we cancel it, where it was not the gateway that asked."""

    @property
    def ttft_s(self) -> float | None:
        """Submit to first token, in seconds; None before."""
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between tokens; None for fewer than two."""
        count = len(self.core.output)
        if self.first_token_at is None or self.last_token_at is None or count < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (count - 1)

    @property
    def traceparent(self) -> str:
        """Trace context for the executor; empty where the request is not traced."""
        return self.trace.traceparent
