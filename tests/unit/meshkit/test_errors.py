"""Translation of errors to statuses and back."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from meshkit import errors
from meshkit.errors import MeshError, ResourceExhausted, from_rpc_error, to_status

CLASSES: list[type[MeshError]] = [
    errors.InvalidArgument, errors.NotFound, errors.AlreadyExists, errors.FailedPrecondition,
    errors.ResourceExhausted, errors.Unavailable, errors.Aborted, errors.Unimplemented,
    errors.DeadlineExceeded, errors.Internal, errors.Cancelled,
]  # fmt: skip


def over_the_wire(error: MeshError) -> MeshError:
    """`error` after the trip that a server's abort and a client's exception make of it."""
    status = rpc_status.to_status(to_status(error))
    trailers = grpc.aio.Metadata(*status.trailing_metadata)
    return from_rpc_error(
        grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, details=status.details)
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_survives_the_wire(cls: type[MeshError]) -> None:
    back = over_the_wire(cls("what went wrong", field="a.b", reason="SOME_REASON", limit=3))
    assert type(back) is cls
    assert back.code is cls.code
    assert (back.message, back.field, back.reason) == ("what went wrong", "a.b", "SOME_REASON")
    assert back.metadata == {"limit": "3"}


def test_each_class_has_a_code_of_its_own() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)


def test_the_reason_is_the_name_of_the_code_unless_given() -> None:
    assert errors.Unavailable("x").reason == "UNAVAILABLE"


def test_an_error_without_field_carries_no_bad_request() -> None:
    names = [detail.TypeName() for detail in to_status(errors.NotFound("x")).details]
    assert names == ["google.rpc.ErrorInfo"]


def test_the_domain_is_chipmesh_dev() -> None:
    info = error_details_pb2.ErrorInfo()
    assert to_status(errors.NotFound("x")).details[0].Unpack(info)
    assert info.domain == "chipmesh.dev"


@given(st.floats(min_value=0, max_value=1e6))
def test_retry_after_survives_to_the_nanosecond(seconds: float) -> None:
    back = over_the_wire(ResourceExhausted("full", retry_after_s=seconds))
    assert isinstance(back, ResourceExhausted)
    assert back.retry_after_s == pytest.approx(seconds, abs=2e-9)


@given(st.text(max_size=2000), st.text(max_size=500))
def test_no_text_makes_a_status_that_does_not_fit_the_trailers(message: str, field: str) -> None:
    status = to_status(errors.InvalidArgument(message, field=field, **{f"k{i}": message for i in range(20)}))
    percent_encoded = 3 * len(status.message.encode())
    base64 = 4 * len(status.SerializeToString()) // 3
    assert percent_encoded + base64 < 8000


def test_a_long_message_is_cut_at_a_character_with_an_ellipsis() -> None:
    message = to_status(errors.Internal("\u4e2d" * 1000)).message
    assert message.endswith("\u4e2d\u2026")
    assert len(message.encode()) <= errors.MAX_MESSAGE_BYTES


def test_a_status_of_a_foreign_server_keeps_its_code_and_text() -> None:
    foreign = grpc.aio.AioRpcError(
        grpc.StatusCode.OUT_OF_RANGE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no"
    )
    error = from_rpc_error(foreign)
    assert type(error) is MeshError
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "OUT_OF_RANGE")
    assert error.message == "no"


def test_trailers_that_do_not_parse_leave_code_and_text() -> None:
    broken = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff")),
        details="gone",
    )
    error = from_rpc_error(broken)
    assert isinstance(error, errors.NotFound)
    assert (error.message, error.reason, error.field) == ("gone", "NOT_FOUND", None)


def test_an_error_without_any_trailers_is_translated() -> None:
    error = from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE))
    assert isinstance(error, errors.Unavailable)
    assert error.message == "UNAVAILABLE"
