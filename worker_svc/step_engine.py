"""What the device thread does: load a model, allocate pages, apply step plans and run them.

Every method runs on the device thread, save those that say otherwise.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from chipmesh.device.v1alpha1.execution_pb2 import (
    AllocateKvCacheRequest,
    AllocateKvCacheResponse,
    AttachResponse,
    LoadModelRequest,
    RankInfo,
    SlotFailure,
    StepPlan,
    StepResult,
)
from chipmesh.device.v1alpha1.execution_pb2 import LoadedModel as LoadedModelMessage
from meshkit.errors import FailedPrecondition, InvalidArgument, MeshError, Unavailable
from meshkit.telemetry.logging import get_logger
from plugins.sdk.runner import LoadedModel, ModelRunner, Progress, RowFailure, StepOutput
from worker_svc.agreement import Agreement, agree, make_offer
from worker_svc.constraints import StepConstraints
from worker_svc.model_messages import load_options, model_message
from worker_svc.profile.recorder import MOST_RUNS, Recording, StepRecorder
from worker_svc.request_spans import RequestSpans
from worker_svc.slots import AppliedPlan, SlotTable

log = get_logger(__name__)

_INT32_LIMIT = 2**31
SET_IS_OVER = ("RANKS_MISSING", "RANK_LOST")
"""Reasons of a runner's errors after which no step of its set can be right any more."""


class EngineState(enum.Enum):
    """How far the engine is; the value is for people."""

    EMPTY = "no model is loaded"
    LOADING = "loading a model"
    LOADED = "a model is loaded, its KV cache is not allocated"
    READY = "takes steps"
    FAILED = "the device failed, or the set is over"


@dataclass(frozen=True, slots=True)
class _Loaded:
    request: LoadModelRequest
    model: LoadedModel
    constraints: StepConstraints

    def to_proto(self) -> LoadedModelMessage:
        """The message, with what the shell adds to the runner's description."""
        message = model_message(self.model)
        message.no_constraints_reason = self.constraints.reason
        return message


@dataclass(frozen=True, slots=True)
class _Allocated:
    request: AllocateKvCacheRequest
    agreed: Agreement
    allocated_bytes: int

    def to_proto(self) -> AllocateKvCacheResponse:
        return AllocateKvCacheResponse(
            allocated_bytes=self.allocated_bytes,
            page_count=self.agreed.page_count,
            max_slots=self.agreed.max_slots,
            ranks=self.agreed.ranks,
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the engine takes no steps any more: a sentence, and a word for programs."""

    message: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step made, in lists of its own: the runner may reuse its arrays for the next step.

    Times in seconds; idle_s: from the end of the step before, None for the first. constraint_s: of device_s,
    None where no slot has a constraint.
    """

    epoch: int
    step_seq: int
    device_s: float
    idle_s: float | None
    slots: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    failures: Sequence[RowFailure] = ()
    constraint_s: float | None = None

    def to_proto(self) -> StepResult:
        """The message; made off the device thread, which has the next step to run."""
        return StepResult(
            epoch=self.epoch,
            step_seq=self.step_seq,
            slots=self.slots,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            failures=[
                SlotFailure(slot=failure.slot, reason=failure.reason, message=failure.message)
                for failure in self.failures
            ],
            device_time=_duration(self.device_s),
            idle_time=None if self.idle_s is None else _duration(self.idle_s),
            constraint_time=None if self.constraint_s is None else _duration(self.constraint_s),
        )


class StepEngine:
    """Drives one runner.

    page_sizes: those that the chip's attention accepts; empty: any.
    span_attributes: put on every request's span.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        page_sizes: Sequence[int] = (),
        span_attributes: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._page_sizes = tuple(page_sizes)
        self._spans = RequestSpans(span_attributes or {})
        self._clock = clock
        self._loaded: _Loaded | None = None
        self._allocated: _Allocated | None = None
        self._table: SlotTable | None = None
        self._epoch = 0
        self._refused: set[tuple[int, int]] = set()
        """(epoch, step_seq) of plans that ended with an error since the last attach."""
        self._last_step_end: float | None = None
        self._state = EngineState.EMPTY
        self._failure: _Failure | None = None
        self._recorder: StepRecorder | None = None

    def __repr__(self) -> str:
        return f"<StepEngine {self._state.name} epoch={self._epoch}>"

    @property
    def state(self) -> EngineState:
        """May be read on any thread."""
        return self._state

    @property
    def failure(self) -> str:
        """Why no step is taken any more, for people; "" while they are. May be read on any thread."""
        failure = self._failure
        return "" if failure is None else failure.message

    @property
    def epoch(self) -> int:
        """Epoch of the last attach; 0 before the first. May be read on any thread."""
        return self._epoch

    @property
    def rank(self) -> int:
        """This one's number in its set; 0 where it is alone. May be read on any thread."""
        loaded = self._loaded
        return loaded.request.parallel.rank if loaded is not None else 0

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """All ranks of the set in order, once pages are allocated. May be read on any thread."""
        allocated = self._allocated
        return () if allocated is None else allocated.agreed.ranks

    @property
    def occupied_slots(self) -> int:
        """Slots that hold a request. May be read on any thread."""
        table = self._table
        return 0 if table is None else table.occupied

    def load(self, request: LoadModelRequest, progress: Progress) -> LoadedModelMessage:
        """Load a model; the same request again returns the loaded one.

        Raises:
            FailedPrecondition: another model is loaded, or the runner takes no ranks and is to be one.
            Unavailable: the device failed. Else as ModelRunner.load.
        """
        self._check_well()
        if self._loaded is not None:
            if self._loaded.request != request:
                raise FailedPrecondition(
                    f"model {self._loaded.request.model_path!r} is loaded; call UnloadModel first",
                    reason="MODEL_LOADED",
                )
            return self._loaded.to_proto()
        options = load_options(request)
        if options.parallel is not None and not self._runner.takes_ranks:
            raise FailedPrecondition(
                f"rank {options.parallel.rank} of {options.parallel.tensor * options.parallel.pipeline} was "
                "asked for, and this backend runs a model on one device only; give each replica one device",
                field="parallel",
                reason="TAKES_NO_RANKS",
            )
        self._state = EngineState.LOADING
        try:
            with self._device_failures("loading the model"):
                model = self._runner.load(options, progress)
                constraints = StepConstraints.of(model, runner_takes_them=self._runner.takes_constraints)
        except MeshError:
            if self._failure is None:
                self._state = EngineState.EMPTY
            raise
        self._loaded = _Loaded(request, model, constraints)
        self._state = EngineState.LOADED
        return self._loaded.to_proto()

    def allocate(self, request: AllocateKvCacheRequest) -> AllocateKvCacheResponse:
        """Allocate the pages, as many as each rank of the set has. The same request again returns the same.

        Raises:
            InvalidArgument: a number is out of range. FailedPrecondition: no model, or other pages are
            allocated.
            Unavailable: the device failed. Else as ModelRunner.allocate_kv_cache.
        """
        self._check_well()
        loaded = self._require_model()
        if self._allocated is not None:
            if self._allocated.request != request:
                raise FailedPrecondition(
                    "another KV cache is allocated; call UnloadModel first", reason="KV_CACHE_ALLOCATED"
                )
            return self._allocated.to_proto()
        self._check_sizes(request)
        with self._device_failures("allocating the KV cache"):
            agreed = agree(self._runner, make_offer(loaded.request, request))
            allocated_bytes = self._runner.allocate_kv_cache(
                page_count=agreed.page_count, page_size=agreed.page_size_tokens, max_slots=agreed.max_slots
            )
        self._table = SlotTable(
            page_count=agreed.page_count,
            page_size=agreed.page_size_tokens,
            max_slots=agreed.max_slots,
            vocab_size=loaded.model.vocab_size,
        )
        self._allocated = _Allocated(request, agreed, allocated_bytes)
        self._state = EngineState.READY
        return self._allocated.to_proto()

    def attach(self, epoch: int | None = None) -> AttachResponse:
        """Drop all slots and open a new epoch: the next one, or `epoch`, which is greater than all before.

        Raises:
            FailedPrecondition: no model or no KV cache. Unavailable: the device failed.
        """
        self._check_well()
        loaded = self._require_model()
        if self._table is None or self._allocated is None:
            raise FailedPrecondition(
                "no KV cache is allocated; call AllocateKvCache first", reason="NO_KV_CACHE"
            )
        self._spans.end_all("ATTACHED_ANEW")
        with self._device_failures("dropping all slots"):
            self._runner.reset()
        loaded.constraints.reset()
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._table.reset(epoch=self._epoch)
        self._refused.clear()
        self._last_step_end = None
        sizes = self._allocated.agreed
        return AttachResponse(
            epoch=self._epoch,
            page_count=sizes.page_count,
            page_size_tokens=sizes.page_size_tokens,
            max_slots=sizes.max_slots,
            model=loaded.to_proto(),
        )

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Apply one plan and run it.

        Raises:
            Aborted, InvalidArgument: as SlotTable.apply; nothing has changed. Unavailable: the device
            failed. A MeshError of the runner: the step is lost, and the scheduler must attach again.
        """
        self._check_well()
        table, loaded = self._table, self._loaded
        if table is None or loaded is None:
            raise FailedPrecondition(
                "no KV cache is allocated; call AllocateKvCache first", reason="NO_KV_CACHE"
            )
        start = self._clock()
        try:
            applied = table.apply(plan)
        except MeshError:
            self._refused.add((plan.epoch, plan.step_seq))
            raise
        try:
            with self._device_failures(f"step {plan.step_seq}"):
                output = self._run(applied, plan, loaded.constraints)
        except MeshError:
            # The table is a step ahead of the runner: nothing is right until a scheduler attaches anew.
            self._refused.add((plan.epoch, plan.step_seq))
            table.reset(epoch=0)
            self._spans.end_all("STEP_FAILED")
            raise
        return self._finish(plan, output, table, start, constraint_s=loaded.constraints.take_seconds())

    def start_profile(self) -> None:
        """Record all steps from now on, in place of whatever was being recorded.

        Raises:
            FailedPrecondition: no model is loaded. Unavailable: the device failed.
        """
        self._check_well()
        self._require_model()
        if self._recorder is not None:
            self._recorder.end(self._clock())
        stop = self._runner.start_timing(most_runs=MOST_RUNS)
        self._recorder = StepRecorder(stop, now=self._clock())

    def stop_profile(self) -> Recording:
        """What was recorded since `start_profile`, which must have been called."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise FailedPrecondition("nothing is being recorded", reason="NO_PROFILE")
        return recorder.end(self._clock())

    def end_stream(self, epoch: int) -> None:
        """The stream of an epoch has ended: its spans end. Its slots stay until the next attach."""
        if epoch == self._epoch:
            self._spans.end_all("STREAM_ENDED")

    def fail(self, message: str, *, reason: str) -> None:
        """Take no more steps; of several causes the first stays. May be called on any thread."""
        if self._failure is None:
            self._failure = _Failure(message, reason)
            self._state = EngineState.FAILED
            log.warning("no more steps are taken", cause=message, reason=reason)

    def has_refused(self, epoch: int, step_seq: int) -> bool:
        """Whether that plan, of the present epoch, ended with an error here. May be read on any thread."""
        return (epoch, step_seq) in self._refused

    def unload(self) -> None:
        """Free the model and the pages. Idempotent."""
        self._spans.end_all("UNLOADED")
        with self._device_failures("unloading the model"):
            self._runner.unload()
        if self._loaded is not None:
            self._loaded.constraints.close()
        self._loaded = self._allocated = self._table = None
        if self._failure is None:
            self._state = EngineState.EMPTY

    def _run(self, applied: AppliedPlan, plan: StepPlan, constraints: StepConstraints) -> StepOutput | None:
        for slot in applied.released:
            constraints.release(slot)
            self._spans.release(slot)
            self._runner.release(slot)
        for index, (admission, page_ids) in enumerate(applied.admitted):
            traceparent = plan.admitted[index].traceparent
            self._spans.admit(admission.slot, traceparent=traceparent, cached_tokens=admission.cached_tokens)
            constraints.admit(admission)
            self._runner.admit(admission, page_ids)
        if applied.batch is None:
            return None
        return constraints.follow(self._runner.run_step(constraints.apply(applied.batch)))

    def _finish(
        self,
        plan: StepPlan,
        output: StepOutput | None,
        table: SlotTable,
        start: float,
        *,
        constraint_s: float | None,
    ) -> StepOutcome:
        """The outcome; also what follows from it for slots, spans and times."""
        end = self._clock()
        idle_s = None if self._last_step_end is None else start - self._last_step_end
        self._last_step_end = end
        if self._recorder is not None:
            sampled = 0 if output is None else len(output.slots)
            self._recorder.step(plan, start, end, sampled_tokens=sampled, constraint_s=constraint_s)
        if output is None:
            self._spans.ran(plan, (), took_s=end - start)
            return StepOutcome(plan.epoch, plan.step_seq, end - start, idle_s)
        slots: list[int] = output.slots.tolist()
        for failure in output.failures:
            table.stop_decoding(failure.slot)
        self._spans.ran(plan, slots, took_s=end - start)
        logprobs = () if output.logprobs is None else output.logprobs.tolist()
        return StepOutcome(
            plan.epoch,
            plan.step_seq,
            end - start,
            idle_s,
            slots,
            output.token_ids.tolist(),
            logprobs,
            output.failures,
            constraint_s,
        )

    @contextmanager
    def _device_failures(self, doing: str) -> Iterator[None]:
        """What is no MeshError means that the device cannot be trusted any more; some are a set's end."""
        try:
            yield
        except MeshError as error:
            if error.reason not in SET_IS_OVER:
                raise
            self.fail(f"the set is over: {doing}: {error.message}", reason=error.reason)
            raise self._unavailable() from error
        except Exception as error:
            log.exception("the device failed", doing=doing)
            cause = f"{type(error).__name__}: {error}"
            self.fail(f"the device failed while {doing}: {cause}", reason="DEVICE_FAILED")
            raise self._unavailable() from error

    def _check_well(self) -> None:
        if self._failure is not None:
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        assert self._failure is not None
        return Unavailable(
            f"{self._failure.message}. The executor must be replaced", reason=self._failure.reason
        )

    def _require_model(self) -> _Loaded:
        if self._loaded is None:
            raise FailedPrecondition("no model is loaded; call LoadModel first", reason="NO_MODEL")
        return self._loaded

    def _check_sizes(self, request: AllocateKvCacheRequest) -> None:
        for name in ("page_count", "page_size_tokens", "max_slots"):
            value = getattr(request, name)
            if not 1 <= value < _INT32_LIMIT:
                raise InvalidArgument(f"{name} is {value}; it must be 1 to {_INT32_LIMIT - 1}", field=name)
        if request.page_count * request.page_size_tokens >= _INT32_LIMIT:
            raise InvalidArgument(
                f"page_count × page_size_tokens is {request.page_count * request.page_size_tokens}; "
                f"a cache holds at most {_INT32_LIMIT - 1} tokens",
                field="page_count",
            )
        if self._page_sizes and request.page_size_tokens not in self._page_sizes:
            sizes = ", ".join(str(size) for size in self._page_sizes)
            raise InvalidArgument(
                f"page_size_tokens is {request.page_size_tokens}; this chip's attention takes {sizes}",
                field="page_size_tokens",
            )


def _duration(seconds: float) -> Duration:
    nanos = max(int(seconds * 1e9), 0)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
