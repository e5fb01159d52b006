"""Messages of the session: batches within the limit, and failures as errors of their own kind."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from gateway.session_messages import failure_error, in_batches
from meshkit.errors import Internal, ResourceExhausted


@given(lengths=st.lists(st.integers(0, 40), max_size=20), limit=st.integers(1, 120))
def test_batches_keep_all_commands_in_order_and_within_the_limit(lengths: list[int], limit: int) -> None:
    commands = [
        pb.RequestCommand(request_number=number, submit=pb.SubmitRequest(prompt_token_ids=[1] * length))
        for number, length in enumerate(lengths)
    ]
    batches = list(in_batches(commands, limit_bytes=limit))
    assert [command for batch in batches for command in batch] == commands
    for batch in batches:
        assert len(batch) == 1 or sum(command.ByteSize() for command in batch) <= limit


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c not in (grpc.StatusCode.OK,)])
def test_a_failure_keeps_its_code_where_we_have_an_error_for_it(code: grpc.StatusCode) -> None:
    number: int = code.value[0]
    error = failure_error(pb.RequestFailed(code=number, reason="WHY", message="because", field="f"))
    unnamed = {"UNKNOWN", "OUT_OF_RANGE", "DATA_LOSS", "PERMISSION_DENIED", "UNAUTHENTICATED"}
    assert error.code is (grpc.StatusCode.INTERNAL if code.name in unnamed else code)
    assert (error.reason, error.message, error.field) == ("WHY", "because", "f")


def test_a_failure_without_words_still_says_something() -> None:
    error = failure_error(pb.RequestFailed(code=8))
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s
    assert "RESOURCE_EXHAUSTED" in error.message
    assert isinstance(failure_error(pb.RequestFailed(code=99)), Internal)
