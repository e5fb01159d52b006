"""The engine: owns the core and the clocks. Commands and results go in, events go out to the sessions.

Everything here runs on the event loop and returns at once, so nothing is locked. All events of one call
reach a session together, as its stream is flushed when the loop comes round.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from chipmesh.device.v1alpha1 import sampling_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import Cancelled, DeadlineExceeded, MeshError
from meshkit.telemetry.logging import get_logger
from scheduler_svc.change_feed import ChangeFeed
from scheduler_svc.core.batcher import Batcher
from scheduler_svc.core.errors import IdentityViolated, QueueFull, SchedulerError
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.structures import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Placed,
    ReplicaId,
    ReplicaLimits,
    Request,
    RequestId,
    StepPlan,
    StepResult,
    TokensMade,
)
from scheduler_svc.live_request import EventSink, LiveRequest, ReplicaInfo, RequestObserver
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.queue_drain import QueueDrain
from scheduler_svc.request_errors import error_of_failure, refusal
from scheduler_svc.request_trace import RequestTrace
from scheduler_svc.step_codec import needs_history
from scheduler_svc.step_time import StepTimes
from scheduler_svc.submission import check_vocabulary, read_submission

log = get_logger(__name__)

_TRIAL_PRIORITY = -(1 << 31)
"""Of requests that nobody waits for: they take what is left."""


@dataclass(slots=True)
class _Replica:
    info: ReplicaInfo
    limits: ReplicaLimits
    wake: Callable[[], None]
    identity_check: asyncio.TimerHandle | None = None


class Engine:
    """The one owner of a MeshCore.

    identity_check_delay_s: idle seconds of a replica after which its page identity is checked. Violations
        are logged, counted, and kept in `violations` for tests.
    """

    def __init__(self, core: MeshCore, *, metrics: SchedulerMetrics, identity_check_delay_s: float) -> None:
        self.core = core
        self.changes = ChangeFeed()
        self.violations: list[str] = []
        self.observers: list[RequestObserver] = []
        self.on_weights_set: Callable[[Mapping[str, float]], None] = _untold
        """Called after somebody set weights."""
        self._metrics = metrics
        self._identity_check_delay_s = identity_check_delay_s
        self._loop = asyncio.get_running_loop()
        self._drain = QueueDrain(clock=self._loop.time)
        self._numbers = itertools.count(1)
        self._live: set[LiveRequest] = set()
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"<Engine {len(self._live)} live requests on {len(self._replicas)} replicas>"

    @property
    def live_count(self) -> int:
        """Requests that have not had their last event."""
        return len(self._live)

    async def wait_until_empty(self) -> None:
        """Return once no request is live."""
        await self._empty.wait()

    # ------------------------------------------------------------ requests

    def submit(self, sink: EventSink, number: int, message: session_pb2.SubmitRequest) -> None:
        """Take a request, or tell the sink why not. The sink gets `queued` before anything else of it."""
        trace = RequestTrace(
            message.traceparent,
            request_id=message.request_id,
            model=message.model,
            prompt_tokens=len(message.prompt_token_ids),
        )
        try:
            self._admit(sink, number, message, trace)
            return
        except MeshError as error:
            refused = error
        except SchedulerError as error:
            refused = refusal(
                error,
                context_tokens=self._context_tokens(message.model),
                retry_after_s=self._retry_after_s(error, message),
            )
        self._metrics.refused(refused.reason)
        trace.failed(refused.code.name, refused.reason)
        sink.failed(number, refused)

    def _admit(
        self, sink: EventSink, number: int, message: session_pb2.SubmitRequest, trace: RequestTrace
    ) -> None:
        request = read_submission(RequestId(next(self._numbers)), message)
        self._check_vocabulary_of(request.model, request)
        live = LiveRequest(
            core=request,
            sink=sink,
            number=number,
            sampling=_own_copy(message.sampling),
            trace=trace,
            submitted_at=self._loop.time(),
        )
        request.payload = live
        placed = self.core.submit(request)
        self._live.add(live)
        self._empty.clear()
        self._drain.entered(request.length)
        if message.HasField("deadline_ms"):
            live.expiry = self._loop.call_later(message.deadline_ms / 1000, self._expire, live)
        sink.queued(live)
        if placed is not None:
            self._replicas[placed].wake()

    def _retry_after_s(self, error: SchedulerError, message: session_pb2.SubmitRequest) -> float:
        """When a full queue has room for the request that it refused; 0 for any other error."""
        if not isinstance(error, QueueFull):
            return 0.0
        tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        return self._drain.refuse(error.what, tokens)

    def submit_trial(
        self,
        prompt: Sequence[int],
        *,
        model: str,
        group: str,
        max_output_tokens: int,
        sampling: sampling_pb2.SamplingParameters,
        stop_token_ids: frozenset[int] = frozenset(),
        salt: str = "",
        sink: EventSink,
        replica: ReplicaId | None = None,
    ) -> LiveRequest | None:
        """Run a request of our own on one group, whatever its weight, or on one replica of it, also on trial;
        lowest priority. None if refused.
        """
        number = next(self._numbers)
        request = Request(
            RequestId(number), model, prompt, max_output_tokens, stop_token_ids, priority=_TRIAL_PRIORITY,
            salt=salt, needs_history=needs_history(sampling),
            is_constrained=sampling.HasField("constraint"), group=group, is_pinned=True,
            pinned_replica=replica,
        )  # fmt: skip
        trace = RequestTrace("", request_id=f"trial-{number}", model=model, prompt_tokens=len(prompt))
        live = LiveRequest(
            core=request,
            sink=sink,
            number=number,
            sampling=sampling,
            trace=trace,
            submitted_at=self._loop.time(),
        )
        request.payload = live
        try:
            placed = self.core.submit(request)
        except SchedulerError as error:
            trace.failed("FAILED_PRECONDITION", type(error).__name__)
            return None
        self._live.add(live)
        self._empty.clear()
        if placed is not None:
            self._replicas[placed].wake()
        return live

    def submit_copy(self, live: LiveRequest, group: str, sink: EventSink) -> LiveRequest | None:
        """Run a request's prompt once more, on another group, with the same seed and its logprobs."""
        sampling = _own_copy(live.sampling)
        sampling.logprobs = True
        return self.submit_trial(
            live.core.prompt,
            model=live.core.model,
            group=group,
            max_output_tokens=live.core.max_output_tokens,
            sampling=sampling,
            stop_token_ids=live.core.stop_token_ids,
            salt=live.core.salt,
            sink=sink,
        )

    def cancel(self, live: LiveRequest) -> None:
        """End a request at the gateway's wish. Idempotent."""
        if live in self._live:
            self._publish(self.core.cancel(live.core))
            self.wake_replicas()

    def fail(self, live: LiveRequest, error: MeshError) -> None:
        """End a request with an error of ours. Idempotent."""
        if live in self._live:
            live.ending = error
            self.cancel(live)

    def _expire(self, live: LiveRequest) -> None:
        waited_s = self._loop.time() - live.submitted_at
        made = len(live.core.output)
        self.fail(live, DeadlineExceeded(
            f"deadline_ms passed after {waited_s:.3f} s with {made} output tokens; "
            "allow more time or ask for less",
            field="deadline_ms",
        ))  # fmt: skip

    def _check_vocabulary_of(self, model: str, request: Request) -> None:
        sizes = [
            replica.info.vocab_size for replica in self._replicas.values() if replica.info.model == model
        ]
        if sizes:
            check_vocabulary(request, vocab_size=min(sizes))

    def _context_tokens(self, model: str) -> int | None:
        serving = [replica for replica in self._replicas.values() if replica.info.model == model]
        return max((replica.limits.context_tokens for replica in serving), default=None)

    # ------------------------------------------------------------ replicas

    def add_replica(
        self, info: ReplicaInfo, limits: ReplicaLimits, *, wake: Callable[[], None], on_trial: bool = False
    ) -> None:
        """A replica takes steps from now on; `wake` is called when it may have work. on_trial: no traffic
        until `admit_replica`.
        """
        self._replicas[info.replica] = _Replica(info, limits, wake)
        self._metrics.replica_added(info)
        self._publish(self.core.add_replica(info.replica, group=info.group, limits=limits, on_trial=on_trial))
        self.changes.bump()
        self.wake_replicas()

    def admit_replica(self, replica: ReplicaId) -> None:
        """A replica has passed its trial. Does nothing where it is gone meanwhile."""
        if replica in self._replicas:
            self._publish(self.core.admit_replica(replica))
            self.changes.bump()
            self.wake_replicas()

    def serving(self, group: str) -> list[ReplicaInfo]:
        """The replicas of a group that are attached."""
        return [known.info for known in self._replicas.values() if known.info.group == group]

    def remove_replica(self, replica: ReplicaId, *, blame: bool = True) -> None:
        """A replica is gone: its requests go on elsewhere, or wait. Does nothing where it is unknown.

        blame: a request that was running counts this as a death, and is quarantined after too many.
        """
        gone = self._replicas.pop(replica, None)
        if gone is None:
            return
        if gone.identity_check is not None:
            gone.identity_check.cancel()
        for live in self._live:
            if live.replica == replica:
                live.replica = None
                live.trace.moves(lost=blame, output_tokens=len(live.core.output))
        self._publish(self.core.remove_replica(replica, blame=blame))
        self._metrics.replica_removed(replica)
        self.changes.bump()
        self.wake_replicas()

    def forgive(self, replica: ReplicaId) -> None:
        """A replica that was lost is alive, only its connection was cut: no request is to blame for that."""
        for live in self._live:
            if live.core.blamed_for == replica:
                live.core.clear()

    def set_weights(self, model: str, weights: Mapping[str, float]) -> None:
        """Set the weights of all groups of a model; those left out get 0.

        Raises:
            ValueError: an unknown group, a wrong weight, or none above 0.
        """
        self.apply_weights(model, weights)
        self.on_weights_set(weights)

    def apply_weights(self, model: str, weights: Mapping[str, float]) -> None:
        """As `set_weights`, by ourselves: nobody is told that somebody wished it."""
        self._publish(self.core.set_weights(model, weights))
        self.changes.bump()
        self.wake_replicas()

    def set_all_weights(self, weights: Mapping[str, Mapping[str, float]]) -> None:
        """As `set_weights`, for several models: all or none. Raises ValueError."""
        for model, groups in weights.items():
            self.core.check_weights(model, groups)
        for model, groups in weights.items():
            self.set_weights(model, groups)

    def set_policy(self, group: str, policy: str) -> None:
        """Another order of a group's waiting requests. Raises UnknownPolicy."""
        self.core.set_policy(group, policy)
        self.changes.bump()
        self.wake_replicas()

    def set_ceilings(self, replica: ReplicaId, limits: ReplicaLimits) -> None:
        """Another window and chunk size of an attached replica, from its next step on."""
        self._replicas[replica].limits = limits
        self.core.batcher(replica).set_ceilings(
            max_running_requests=limits.max_running_requests, chunk_tokens=limits.chunk_tokens
        )
        self.changes.bump()
        self._replicas[replica].wake()

    def drain_replica(self, replica: ReplicaId) -> None:
        """Nothing new goes to a replica. Idempotent; does nothing where it is unknown."""
        if replica in self._replicas:
            self.core.drain_replica(replica)
            self.changes.bump()

    async def wait_until_unused(self, replica: ReplicaId) -> None:
        """Return once no request runs or waits on a replica."""
        while replica in self._replicas and not _is_idle(self.core.batcher(replica)):
            await self.changes.wait_beyond(self.changes.revision)

    def info(self, replica: ReplicaId) -> ReplicaInfo | None:
        """What is known of an attached replica."""
        known = self._replicas.get(replica)
        return known.info if known is not None else None

    def limits(self, replica: ReplicaId) -> ReplicaLimits | None:
        """The effective limits of an attached replica."""
        known = self._replicas.get(replica)
        return known.limits if known is not None else None

    def attached(self) -> Iterable[tuple[ReplicaInfo, ReplicaLimits, Batcher]]:
        """Every attached replica with its batcher."""
        for replica, known in self._replicas.items():
            yield known.info, known.limits, self.core.batcher(replica)

    def wake_replicas(self) -> None:
        """Let every link look for work; one without any goes back to sleep at once."""
        for replica in self._replicas.values():
            replica.wake()

    # ------------------------------------------------------------ steps

    def plan_step(self, replica: ReplicaId) -> StepPlan | None:
        """The next step of a replica, or None where there is nothing to do."""
        batcher = self.core.batcher(replica)
        plan = batcher.plan()
        self._publish(batcher.take_events())
        return plan

    def is_shared(self, replica: ReplicaId) -> bool:
        """Whether several requests run on a replica."""
        return self.core.batcher(replica).running > 1

    def apply_step(self, replica: ReplicaId, result: StepResult, times: StepTimes) -> None:
        """Apply the result of the oldest step in flight."""
        batcher = self.core.batcher(replica)
        events = batcher.apply(result)
        made = sum(len(event.requests) for event in events if isinstance(event, TokensMade))
        evicted = batcher.evicted_pages * batcher.limits.page_size
        self._metrics.step_ended(replica, tokens=made, evicted_tokens=evicted, times=times)
        self._publish(events)
        if _is_idle(batcher):
            self.changes.bump()
            self._check_identity_later(replica)

    def count_stale_result(self, replica: ReplicaId) -> None:
        """A result came that belongs to no step in flight; it was ignored."""
        self._metrics.stale_results.inc()
        log.warning("stale step result ignored", replica=replica)

    def _check_identity_later(self, replica: ReplicaId) -> None:
        known = self._replicas[replica]
        if known.identity_check is None:
            known.identity_check = self._loop.call_later(
                self._identity_check_delay_s, self._check_identity, replica
            )

    def _check_identity(self, replica: ReplicaId) -> None:
        known = self._replicas.get(replica)
        if known is None:
            return
        known.identity_check = None
        batcher = self.core.batcher(replica)
        if not _is_idle(batcher):
            return  # It will be idle again, and then this comes back.
        try:
            batcher.check_identity()
        except IdentityViolated as error:
            self.violations.append(f"{replica}: {error}")
            self._metrics.identity_violations.inc()
            log.error("page identity violated", replica=replica, error=str(error))

    # ------------------------------------------------------------ events

    def _publish(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TokensMade):
                self._on_tokens(event)
                continue
            live: LiveRequest = event.request.payload
            if isinstance(event, Placed):
                self._on_placed(live, event)
            elif isinstance(event, Finished):
                self._on_finished(live, event.reason)
            else:
                self._on_failed(live, event)

    def _on_tokens(self, event: TokensMade) -> None:
        """Once per token made: nothing is looked up here that is not needed."""
        now = self._loop.time()
        for request, logprob in zip(event.requests, event.logprobs, strict=False):  # None, or one for each.
            if request.payload.sampling.logprobs:
                request.payload.logprobs.append(logprob)
        for request in event.requests:
            live: LiveRequest = request.payload
            live.last_token_at = now
            if live.first_token_at is None:
                live.first_token_at = now
                self._metrics.first_token(live, now=now)
            live.sink.grew(live)

    def _on_placed(self, live: LiveRequest, event: Placed) -> None:
        info = self._replicas[event.replica].info
        live.replica = event.replica
        if live.placed_at is None:
            self._left_queue(live)
            live.placed_at = self._loop.time()
            self._metrics.placed_first(live, info, now=live.placed_at, cached_tokens=event.cached_tokens)
            for observer in self.observers:
                observer.placed(live, info)
        live.trace.placed(
            group=info.group, worker=info.worker, chip=info.chip, cached_tokens=event.cached_tokens
        )
        live.sink.placed(live.number, info, cached_tokens=event.cached_tokens)
        self.changes.bump()

    def _on_finished(self, live: LiveRequest, reason: FinishReason) -> None:
        if live.ending is not None:
            self._end_badly(live, live.ending)
            return
        self._forget(live)
        live.trace.finished(reason.value, completion_tokens=len(live.core.output))
        live.sink.finished(live.number, reason)
        if reason is not FinishReason.CANCELLED:
            self._tell_observers(live, None)
        else:
            self._tell_observers(live, Cancelled("cancelled by its client"))

    def _on_failed(self, live: LiveRequest, event: Failed) -> None:
        error = error_of_failure(event, request_id=live.trace.request_id)
        log.error("request failed", request_id=live.trace.request_id, reason=event.reason,
                  deaths=live.core.deaths_in_all, error=event.message)  # fmt: skip
        self._end_badly(live, error)

    def _end_badly(self, live: LiveRequest, error: MeshError) -> None:
        self._forget(live)
        live.trace.failed(error.code.name, error.reason)
        live.sink.failed(live.number, error)
        self._tell_observers(live, error)

    def _tell_observers(self, live: LiveRequest, error: MeshError | None) -> None:
        for observer in self.observers:
            observer.ended(live, error)

    def _forget(self, live: LiveRequest) -> None:
        self._live.discard(live)
        if live.placed_at is None:
            self._left_queue(live)
        if live.expiry is not None:
            live.expiry.cancel()
        if not self._live:
            self._empty.set()
        self.changes.bump()

    def _left_queue(self, live: LiveRequest) -> None:
        if live.core.priority != _TRIAL_PRIORITY:
            self._drain.left(live.core.length)


def _untold(weights: Mapping[str, float]) -> None:
    del weights


def _own_copy(sampling: sampling_pb2.SamplingParameters) -> sampling_pb2.SamplingParameters:
    """A part of a message keeps the whole message alive, with all the prompts of its batch."""
    copy = sampling_pb2.SamplingParameters()
    copy.CopyFrom(sampling)
    return copy


def _is_idle(batcher: Batcher) -> bool:
    return batcher.steps_in_flight == 0 and batcher.running == 0 and batcher.waiting == 0
