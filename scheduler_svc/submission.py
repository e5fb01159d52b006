"""Translation of a SubmitRequest to the core's Request, with every field checked."""

from __future__ import annotations

from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import InvalidArgument
from scheduler_svc.core.structures import Request, RequestId
from scheduler_svc.step_codec import needs_history


def read_submission(request_id: RequestId, message: session_pb2.SubmitRequest) -> Request:
    """The core's form of a submission; its payload is left to the caller.

    Raises:
        InvalidArgument: names the field.
    """
    if not message.model:
        raise InvalidArgument("model is empty; name the model that the request is for", field="model")
    if not message.prompt_token_ids:
        raise InvalidArgument("prompt_token_ids is empty; give at least one token", field="prompt_token_ids")
    if not message.HasField("sampling"):
        raise InvalidArgument("sampling is missing; the gateway fills it in", field="sampling")
    done = len(message.output_token_ids)
    if message.max_output_tokens <= done:
        raise InvalidArgument(
            f"max_output_tokens is {message.max_output_tokens}; it must be at least 1 and more than the "
            f"{done} output tokens that the request brings",
            field="max_output_tokens",
        )
    return Request(
        id=request_id,
        model=message.model,
        prompt=list(message.prompt_token_ids),
        max_output_tokens=message.max_output_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        output=list(message.output_token_ids),
        priority=message.priority,
        salt=message.cache_salt,
        session=message.session_key,
        owner=message.owner,
        needs_history=needs_history(message.sampling),
        is_constrained=message.sampling.HasField("constraint"),
    )


def check_vocabulary(request: Request, *, vocab_size: int) -> None:
    """Refuse token ids that the model does not have: they would reach past its embedding table.

    Raises:
        InvalidArgument: names the field, the id and the size.
    """
    for field, tokens in (("prompt_token_ids", request.prompt), ("output_token_ids", request.output)):
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise InvalidArgument(
                f"{field} holds {largest}, but model {request.model!r} has {vocab_size} tokens "
                f"(0 to {vocab_size - 1})",
                field=field,
            )
