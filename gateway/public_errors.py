"""Errors as clients with a key may read them: what is the request's own passes, what tells of the inside not.

An error passes by its reason, which is one of a list: whatever is new, or comes from a service behind this
one, is kept back until somebody has read its texts.
"""

from __future__ import annotations

import secrets

from gateway.tenant import Tenant
from meshkit.errors import MeshError, ResourceExhausted
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

PASSING = frozenset({
    # About a field of the request; validation's own, and the scheduler's for what it checks again.
    "INVALID_ARGUMENT", "NOT_FOUND", "SEED_MISSING", "PROMPT_TOO_LONG", "TOKEN_ID_OUT_OF_VOCABULARY",
    "TEXT_NOT_UNICODE", "STOP_EMPTY", "CHAT_TEMPLATE_MISSING", "CHAT_REFUSED", "CHAT_SIZE", "CHAT_CONTENT",
    "CHAT_ROLE_UNKNOWN", "OUTPUT_DIFFERS", "OUTPUT_AFTER_END", "LOGPROBS_NOT_KNOWN", "REQUEST_ID_IN_USE",
    "REQUEST_NOT_FOUND", "MODEL_NOT_FOUND", "MODEL_HAS_NO_TOKENIZER", "UNKNOWN_MODEL", "CONTEXT_EXCEEDED",
    "REQUEST_TOO_LARGE", "CONSTRAINT_INVALID", "CONSTRAINT_TOO_COMPLEX", "CONSTRAINT_FAILED",
    "CONSTRAINT_CHECKS_FULL", "CONSTRAINT_CHECK_FAILED",
    # No room, or no time: said with the limit and when to come back.
    "TOO_MANY_REQUESTS", "TEXT_POOL_FULL", "QUEUE_FULL", "BUDGET_EXHAUSTED", "DEADLINE_EXCEEDED",
    # This gateway's words about the mesh, without names or addresses.
    "DRAINING", "SCHEDULER_UNAVAILABLE", "SCHEDULER_LOST", "TOKENS_LOST", "REASON_MISSING", "API_KEY_INVALID",
    "MALFORMED_MESSAGE",
    # Of the interface of routers, about what it has to offer.
    "UNSUPPORTED_CALL", "INSIDE_NOT_PUBLIC", "MODEL_NOT_CHOSEN", "NO_OPERATOR_CERTIFICATE",
    # Of the OpenAI interface, about what was sent to it.
    "UNSUPPORTED_VALUE", "UNSUPPORTED_ENDPOINT", "BODY_NOT_JSON", "BODY_TOO_LARGE",
    "CONTENT_TYPE_UNSUPPORTED", "METRICS_NOT_PUBLIC", "GENERATION_CANCELLED",
    # Of the page, about who asks and from where.
    "OPERATOR_REQUIRED", "CROSS_ORIGIN", "HOST_NOT_LOCAL", "TRACE_NOT_FOUND",
})  # fmt: skip
"""Reasons whose texts were read: no address, path, process or exception is in them."""

REWORDED: dict[str, tuple[str | None, str]] = {
    "CONSTRAINT_UNSUPPORTED": (
        "sampling.constraint",
        "sampling.constraint: the outputs of this model cannot be given a form here; leave it out",
    ),
    "CHAT_NOT_RENDERED": ("prompt.chat", "prompt.chat: the model's template cannot render this conversation"),
    "POISONED": (
        None,
        "the request was given up: each time that it ran, its worker died; it is not run again",
    ),
}
"""Reasons that say something to a client: the request's field at fault, and words that it may read."""

KEPT_BACK = "the mesh could not do this; send it again, and tell its operator the id where that does not help"


def readable_error(error: MeshError, tenant: Tenant, *, is_public: bool) -> MeshError:
    """`error` as the caller of a listener may read it.

    is_public: the listener is reached from beyond this host, so internals are hidden from everybody.
        Otherwise from those who come with a key: who calls without one is this host's own user.
    """
    return public_error(error) if is_public or not tenant.is_anonymous else error


def public_error(error: MeshError) -> MeshError:
    """`error` as a client may read it: itself, or another of its code and reason; the log has all of it."""
    if error.reason in PASSING:
        return error
    error_id = secrets.token_hex(4)
    log.warning(
        "error kept back from a client",
        error_id=error_id,
        code=error.code.name,
        reason=error.reason,
        field=error.field,
        message=error.message,
        metadata=error.metadata,
    )
    field, words = REWORDED.get(error.reason, (None, KEPT_BACK))
    public = _of_code(error, f"{words} (id {error_id})", field=field, error_id=error_id)
    public.code = error.code
    return public


def _of_code(error: MeshError, message: str, *, field: str | None, error_id: str) -> MeshError:
    if isinstance(error, ResourceExhausted):
        return ResourceExhausted(
            message,
            field=field,
            reason=error.reason,
            retry_after_s=error.retry_after_s,
            error_id=error_id,
        )
    return MeshError(message, field=field, reason=error.reason, error_id=error_id)
