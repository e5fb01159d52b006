"""The one error family of the mesh, and its translation to and from gRPC statuses.

A `MeshError` becomes a `google.rpc.Status` with `ErrorInfo` (and `BadRequest`, `RetryInfo` where they apply)
in the server's interceptor; a client turns `AioRpcError` back into the same class with `from_rpc_error`.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

ERROR_DOMAIN = "chipmesh.dev"
STATUS_DETAILS_KEY = "grpc-status-details-bin"

# Trailers of a default gRPC peer may hold 8 KiB in all. The message travels twice, once percent-encoded
# (three bytes for one in the worst case) and once in base64, so it and the metadata are clipped to what
# surely fits.
MAX_MESSAGE_BYTES = 1200
MAX_METADATA_VALUE_BYTES = 200
MAX_METADATA_ENTRIES = 8


class MeshError(Exception):
    """Root of all errors that a caller may see.

    message: one sentence that names the field, the value, the limit and the way out; shown to users as is.
    field: path of the request or configuration field at fault, or None.
    reason: UPPER_SNAKE word that programs compare; by default the name of the code.
    metadata: further facts, values as text.
    code: the gRPC status code, fixed by the class.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self, message: str, *, field: str | None = None, reason: str | None = None, **metadata: object
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.reason = reason or self.code.name
        self.metadata: dict[str, str] = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(MeshError):
    """The request or configuration is wrong whatever the state of the mesh; `field` says where."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(MeshError):
    """The thing named does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(MeshError):
    """The thing named exists already and may not be made twice."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unauthenticated(MeshError):
    """The caller has not shown who it is. The message must not help to guess a secret."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(MeshError):
    """The caller is known, and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class FailedPrecondition(MeshError):
    """The request is right but the present state forbids it; retrying without a change is useless."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(MeshError):
    """No room now. `retry_after_s`, seconds, says when to come back; None where nobody knows."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message, field=field, reason=reason, **metadata)
        self.retry_after_s = retry_after_s


class Unavailable(MeshError):
    """The other side is not there now; the same call may work later."""

    code = grpc.StatusCode.UNAVAILABLE


class Aborted(MeshError):
    """The call lost a race (stale epoch, gap in a sequence); begin again one level higher."""

    code = grpc.StatusCode.ABORTED


class Unimplemented(MeshError):
    """This side does not offer the operation."""

    code = grpc.StatusCode.UNIMPLEMENTED


class DeadlineExceeded(MeshError):
    """The deadline passed before the answer was there."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(MeshError):
    """A fault of ours. The message must hold nothing that a client should not read."""

    code = grpc.StatusCode.INTERNAL


class Cancelled(MeshError):
    """The caller, or someone on its behalf, gave the call up."""

    code = grpc.StatusCode.CANCELLED


_CLASSES: tuple[type[MeshError], ...] = (
    InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, ResourceExhausted, Unavailable, Aborted,
    Unimplemented, DeadlineExceeded, Internal, Cancelled, Unauthenticated, PermissionDenied,
)  # fmt: skip
_CLASS_OF = {cls.code: cls for cls in _CLASSES}


def to_status(error: MeshError) -> status_pb2.Status:
    """The rich status of `error`; pass it through `grpc_status.rpc_status.to_status` to abort a call."""
    message = _clip(error.message, MAX_MESSAGE_BYTES)
    metadata = list(error.metadata.items())[:MAX_METADATA_ENTRIES]
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=ERROR_DOMAIN,
            metadata={key: _clip(value, MAX_METADATA_VALUE_BYTES) for key, value in metadata},
        )
    ]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(error.field, MAX_METADATA_VALUE_BYTES),
            description=_clip(message, MAX_METADATA_VALUE_BYTES),
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(retry)
    status = status_pb2.Status(code=_number(error.code), message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> MeshError:
    """The `MeshError` that the peer meant; without rich details, one made from code and text alone."""
    code = error.code()
    status = _rich_status(error)
    info, field, retry_after_s = _read_details(status.details if status is not None else ())
    cls = _CLASS_OF.get(code, MeshError)
    message = error.details() or code.name
    result = cls(message, field=field, reason=info.reason or code.name)
    result.metadata.update(info.metadata)
    result.code = code
    if isinstance(result, ResourceExhausted):
        result.retry_after_s = retry_after_s
    return result


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The `google.rpc.Status` in the trailers, or None where a peer sent none or one that does not parse."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None  # Trailers of a foreign peer: code and text still tell what happened.
    return None


def _read_details(
    details: Iterable[any_pb2.Any],
) -> tuple[error_details_pb2.ErrorInfo, str | None, float | None]:
    """ErrorInfo (empty if absent), the first field at fault, and the retry delay in seconds."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    field: str | None = None
    retry_after_s: float | None = None
    for detail in details:
        if detail.Unpack(info):
            continue
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return info, field, retry_after_s


def _number(code: grpc.StatusCode) -> int:
    """The wire number of a status code; grpc keeps it as the first half of the enum's value."""
    number: int = code.value[0]
    return number


def _clip(text: str, limit_bytes: int) -> str:
    """`text` cut at a character's edge to at most `limit_bytes` of UTF-8, with an ellipsis where cut."""
    raw = text.encode("utf-8", errors="replace")
    if len(raw) <= limit_bytes:
        return raw.decode("utf-8")
    return raw[: limit_bytes - 3].decode("utf-8", errors="ignore") + "\u2026"
