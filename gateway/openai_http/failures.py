"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the right status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import grpc

from meshkit.errors import MeshError, ResourceExhausted, Unavailable

CLIENT_CLOSED_REQUEST = 499
_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON: Mapping[str, int] = {
    "BODY_TOO_LARGE": 413,
    "CONTENT_TYPE_UNSUPPORTED": 415,
    "METHOD_NOT_ALLOWED": 405,
}
# Where OpenAI has a word of its own.
_CODES: Mapping[str, str] = {
    "API_KEY_INVALID": "invalid_api_key",
    "BUDGET_EXHAUSTED": "rate_limit_exceeded",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "UNKNOWN_MODEL": "model_not_found",
    "INVALID_ARGUMENT": "invalid_value",
}
DEFAULT_RETRY_AFTER_S = 1.0


def status_of(error: MeshError) -> int:
    """The HTTP status. A request that no state of the mesh could serve is never a 5xx."""
    return _STATUS_OF_REASON.get(error.reason, _STATUS.get(error.code, 500))


def body_of(error: MeshError) -> dict[str, Any]:
    """The body, also of an error event in a stream."""
    return {
        "error": {
            "message": error.message,
            "type": _type_of(status_of(error)),
            "param": error.field,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def retry_after_s(error: MeshError) -> int | None:
    """Whole seconds until it may be tried again, at least 1; None where trying again is no use."""
    if isinstance(error, ResourceExhausted):
        return max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S))
    if status_of(error) != 503:
        return None
    told = error.metadata.get("retry_after_s") if isinstance(error, Unavailable) else None
    return max(1, math.ceil(float(told or DEFAULT_RETRY_AFTER_S)))


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
