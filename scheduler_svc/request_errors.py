"""What the core refuses or gives up, in the terms of gRPC."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    MeshError,
    NotFound,
    ResourceExhausted,
)
from scheduler_svc.core.errors import (
    CannotConstrain,
    QueueFull,
    RequestTooLarge,
    SchedulerError,
    UnknownModel,
)
from scheduler_svc.core.structures import Failed

_KINDS: Mapping[str, type[MeshError]] = {
    "REQUEST_TOO_LARGE": ResourceExhausted,
    "CONSTRAINT_UNSUPPORTED": FailedPrecondition,
    "CONSTRAINT_FAILED": InvalidArgument,
}
"""Of failures by their reasons; all others are ours."""
_CONSTRAINT = "sampling.constraint"


def refusal(error: SchedulerError, *, context_tokens: int | None, retry_after_s: float) -> MeshError:
    """The error of a submission that the core refused.

    context_tokens: longest context among the replicas of the model, None where there is none.
    retry_after_s: when a queue that is full has room again.
    """
    if isinstance(error, UnknownModel):
        return NotFound(str(error), field="model", reason="UNKNOWN_MODEL", model=error.model)
    if isinstance(error, QueueFull):
        return ResourceExhausted(
            f"{error}; try again in {retry_after_s:.3g} s",
            reason="QUEUE_FULL",
            retry_after_s=retry_after_s,
            limit=error.limit,
            bound=f"max_queued_{error.what}",
        )
    if isinstance(error, CannotConstrain):
        return FailedPrecondition(str(error), field=_CONSTRAINT, reason="CONSTRAINT_UNSUPPORTED")
    if isinstance(error, RequestTooLarge):
        return _too_large(error, context_tokens)
    return Internal(f"the scheduler could not take the request: {type(error).__name__}")


def _too_large(error: RequestTooLarge, context_tokens: int | None) -> MeshError:
    """The context is a property of the model; memory is one of the mesh as it stands."""
    facts = {"tokens": error.tokens, "room_tokens": error.room_tokens}
    if context_tokens is not None and error.tokens >= context_tokens:
        return InvalidArgument(
            f"prompt and output so far have {error.tokens} tokens; the model's context is {context_tokens}, "
            f"so at most {context_tokens - 1} fit. Shorten the prompt",
            field="prompt_token_ids",
            reason="CONTEXT_EXCEEDED",
            **facts,
        )
    return ResourceExhausted(
        str(error), field="prompt_token_ids", reason="REQUEST_TOO_LARGE", retry_after_s=None, **facts
    )


def error_of_failure(event: Failed, *, request_id: str) -> MeshError:
    """The error of a request that failed after it was taken, and was called so by its client."""
    kind = _KINDS.get(event.reason, Internal)
    field = _CONSTRAINT if event.reason.startswith("CONSTRAINT_") else None
    return kind(f"request {request_id!r}: {event.message}", reason=event.reason, field=field)
