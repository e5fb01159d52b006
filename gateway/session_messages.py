"""Translation between live requests and the messages of a session with the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chipmesh.device.v1alpha1 import sampling_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from gateway.generation_spec import FinishReason, GenerationSpec, Placed
from gateway.live_request import LiveRequest
from meshkit.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MeshError,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

_ERRORS: dict[int, type[MeshError]] = {
    int(cls.code.value[0]): cls
    for cls in (
        InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, ResourceExhausted, Unavailable, Aborted,
        Unimplemented, DeadlineExceeded, Internal, Cancelled,
    )
}  # fmt: skip

_REASONS = {
    pb.RequestFinished.REASON_STOP: FinishReason.STOP,
    pb.RequestFinished.REASON_LENGTH: FinishReason.LENGTH,
    pb.RequestFinished.REASON_CANCELLED: FinishReason.CANCELLED,
}

FULL_RETRY_AFTER_S = 1.0
"""Where a scheduler does not say itself when it has room."""


def submit_command(number: int, request: LiveRequest, *, now: float) -> pb.RequestCommand:
    """`request` with all that it has so far. now: monotonic seconds, for what is left of its deadline."""
    spec = request.spec
    submit = pb.SubmitRequest(
        request_id=spec.request_id,
        model=spec.model,
        prompt_token_ids=spec.prompt_token_ids,
        output_token_ids=request.token_ids,
        sampling=_sampling(spec),
        max_output_tokens=spec.stop.max_tokens,
        stop_token_ids=spec.end_token_ids,
        traceparent=request.traceparent,
        priority=spec.scheduling.priority,
        cache_salt=spec.scheduling.cache_salt,
        session_key=spec.scheduling.session_key,
        owner=spec.owner,
    )
    if request.deadline is not None:
        submit.deadline_ms = max(0, int((request.deadline - now) * 1000))
    return pb.RequestCommand(request_number=number, submit=submit)


def cancel_command(number: int) -> pb.RequestCommand:
    """The client has gone, or asked."""
    return pb.RequestCommand(request_number=number, cancel=pb.CancelRequest())


def stop_command(number: int) -> pb.RequestCommand:
    """The gateway has all that it wants."""
    return pb.RequestCommand(request_number=number, stop=pb.StopRequest())


def in_batches(
    commands: Iterable[pb.RequestCommand], *, limit_bytes: int
) -> Iterator[list[pb.RequestCommand]]:
    """`commands` in order, in batches of at most `limit_bytes`; one that is larger goes alone."""
    batch: list[pb.RequestCommand] = []
    size = 0
    for command in commands:
        size_of_command = command.ByteSize()
        if batch and size + size_of_command > limit_bytes:
            yield batch
            batch, size = [], 0
        batch.append(command)
        size += size_of_command
    if batch:
        yield batch


def apply_event(request: LiveRequest, event: pb.RequestEvent) -> None:
    """Tell `request` what the scheduler said about it."""
    kind = event.WhichOneof("event")
    if kind in ("tokens", "placed", "finished"):
        request.on_queued()  # Whoever is worked on is queued, also where the news of that was lost.
    if kind == "tokens":
        tokens = event.tokens
        request.on_tokens(tokens.first_index, tokens.token_ids, tokens.logprobs)
    elif kind == "queued":
        request.on_queued()
    elif kind == "placed":
        placed = event.placed
        placement = Placed(placed.group, placed.worker, placed.chip, placed.numeric_class)
        request.on_placed(placement, cached_tokens=placed.cached_tokens)
    elif kind == "finished":
        _apply_finished(request, event.finished)
    elif kind == "failed":
        request.fail(failure_error(event.failed))
    else:
        log.warning("event of an unknown kind; is the scheduler newer?", request=repr(request))


def is_last(event: pb.RequestEvent) -> bool:
    """Whether the scheduler says nothing more about the request."""
    return event.WhichOneof("event") in ("finished", "failed")


def failure_error(failed: pb.RequestFailed) -> MeshError:
    """The error that the scheduler meant, as the client should see it."""
    cls = _ERRORS.get(failed.code)
    if cls is None:
        log.error("failure with an unusable code", code=failed.code, message=failed.message)
        cls = Internal
    message = failed.message or f"the scheduler failed the request ({failed.reason or cls.code.name})"
    if cls is ResourceExhausted:
        return ResourceExhausted(
            message,
            field=failed.field or None,
            reason=failed.reason or None,
            retry_after_s=_retry_after_s(failed),
        )
    return cls(message, field=failed.field or None, reason=failed.reason or None)


def _retry_after_s(failed: pb.RequestFailed) -> float:
    return failed.retry_after_ms / 1000 if failed.HasField("retry_after_ms") else FULL_RETRY_AFTER_S


def _apply_finished(request: LiveRequest, finished: pb.RequestFinished) -> None:
    reason = _REASONS.get(finished.reason)
    if reason is None:
        request.fail(Internal("the scheduler ended the request without saying why", reason="REASON_MISSING"))
    else:
        request.finish(reason)


def _sampling(spec: GenerationSpec) -> sampling_pb2.SamplingParameters:
    suppressing = spec.stop.min_tokens > 0
    constraint = spec.sampling.constraint
    return sampling_pb2.SamplingParameters(
        **spec.sampling.numbers,
        constraint=None if constraint is None else constraint.to_proto(),
        choice=spec.choice,
        logprobs=spec.logprobs,
        suppressed_token_ids=spec.end_token_ids if suppressing else (),
        min_tokens=spec.stop.min_tokens if suppressing else 0,
    )
