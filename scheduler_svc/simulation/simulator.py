"""Replays requests through the real core on a virtual clock: every decision is the one that would be made."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.errors import SchedulerError
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.structures import (
    Event,
    Failed,
    Finished,
    Placed,
    ReplicaId,
    Request,
    RequestId,
    StepResult,
    TokensMade,
)
from scheduler_svc.simulation.fleet import Fleet
from scheduler_svc.simulation.replica import SimulatedChip
from scheduler_svc.simulation.trace import Prompts, TracedRequest

MODEL = "model"


@dataclass(slots=True)
class RequestRecord:
    """What became of a request. Times are in seconds of the virtual clock; None: not reached."""

    arrived_s: float
    input_tokens: int
    group: str = ""
    cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    failure: str = ""


@dataclass(slots=True)
class _Replica:
    """A replica and the step that it computes; one step at a time, since planning takes no virtual time."""

    group: str
    batcher: Batcher
    chip: SimulatedChip
    result: StepResult | None = None
    busy_s: float = 0.0


@dataclass
class Outcome:
    """A whole run."""

    records: list[RequestRecord]
    end_s: float
    steps: int
    busy_s: dict[str, float] = field(default_factory=dict)
    """By group: time that its replicas computed."""


class Simulation:
    """One fleet and one trace. No clock but its own, no randomness: the same input gives the same outcome."""

    def __init__(self, fleet: Fleet, *, on_progress: Callable[[int], None] | None = None) -> None:
        """on_progress: called with the number of requests that have ended."""
        self._core = MeshCore(
            policy=fleet.schedule_policy, max_queued_requests=1 << 60, max_queued_tokens=1 << 60
        )
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._prompts = Prompts()
        self._due: list[tuple[float, int, ReplicaId]] = []
        self._tie = 0
        self._now = 0.0
        self._steps = 0
        self._ended = 0
        self._on_progress = on_progress or _unwatched
        for group in fleet.groups:
            self._core.configure_group(group.name, model=MODEL, weight=group.weight)
            for number in range(group.replicas):
                replica = ReplicaId(f"{group.name}-{number}")
                self._core.add_replica(replica, group=group.name, limits=group.chip.limits())
                batcher = self._core.batcher(replica)
                self._replicas[replica] = _Replica(group.name, batcher, SimulatedChip(group.chip))

    def run(self, requests: Iterable[TracedRequest]) -> Outcome:
        """Replay requests, which come ordered by time."""
        records: list[RequestRecord] = []
        for number, traced in enumerate(requests):
            self._advance_to(traced.at_s)
            record = RequestRecord(traced.at_s, traced.input_tokens)
            records.append(record)
            self._submit(RequestId(number), traced, record)
        self._advance_to(float("inf"))
        busy: dict[str, float] = {}
        for replica in self._replicas.values():
            busy[replica.group] = busy.get(replica.group, 0.0) + replica.busy_s
        return Outcome(records, self._now, self._steps, busy)

    def _submit(self, number: RequestId, traced: TracedRequest, record: RequestRecord) -> None:
        request = Request(number, MODEL, self._prompts.tokens(traced), traced.output_tokens, payload=record)
        try:
            replica = self._core.submit(request)
        except SchedulerError as error:
            record.failure = str(error)
            self._end_one()
            return
        assert replica is not None, "every replica of a simulation is ready"
        self._wake(replica)

    def _advance_to(self, time_s: float) -> None:
        """Apply every step that ends until then."""
        while self._due and self._due[0][0] <= time_s:
            self._now, _, name = heapq.heappop(self._due)
            replica = self._replicas[name]
            result, replica.result = replica.result, None
            assert result is not None
            self._take(replica.batcher.apply(result))
            self._wake(name)
        if time_s != float("inf"):
            self._now = max(self._now, time_s)

    def _wake(self, name: ReplicaId) -> None:
        """Start the next step of a replica that computes none."""
        replica = self._replicas[name]
        if replica.result is not None:
            return
        plan = replica.batcher.plan()
        self._take(replica.batcher.take_events())
        if plan is None:
            return
        replica.result, seconds = replica.chip.run(plan)
        replica.busy_s += seconds
        self._steps += 1
        self._tie += 1
        heapq.heappush(self._due, (self._now + seconds, self._tie, name))

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokensMade):
                self._take_tokens(event)
                continue
            record: Any = event.request.payload
            if isinstance(event, Placed):
                if not record.group:
                    record.cached_tokens = event.cached_tokens
                record.group = self._replicas[event.replica].group
            elif isinstance(event, Failed):
                record.failure = event.message
                self._end_one()
            elif isinstance(event, Finished):
                self._end_one()

    def _take_tokens(self, event: TokensMade) -> None:
        for request in event.requests:
            record: Any = request.payload
            if record.first_token_s is None:
                record.first_token_s = self._now
            record.last_token_s = self._now
            record.output_tokens += 1

    def _end_one(self) -> None:
        self._ended += 1
        self._on_progress(self._ended)


def _unwatched(ended: int) -> None:
    del ended
