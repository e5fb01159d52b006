"""Events of one turn of the loop leave together, in order, and none is lost when a session closes."""

from __future__ import annotations

import grpc

from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import Aborted, InvalidArgument
from scheduler_svc.core.structures import FinishReason
from scheduler_svc.session import Session


async def test_what_happens_in_one_turn_is_one_message() -> None:
    session = Session("gw")
    session.token(1, index=0, token_id=5, logprob=None)
    session.token(2, index=3, token_id=6, logprob=-1.0)
    session.finished(1, FinishReason.STOP)
    batch = await anext(session.batches())
    assert [event.request_number for event in batch.events] == [1, 2, 1]
    assert list(batch.events[1].tokens.token_ids) == [6]
    assert list(batch.events[1].tokens.logprobs) == [-1.0]
    assert batch.events[1].tokens.first_index == 3
    assert batch.events[2].finished.reason == session_pb2.RequestFinished.REASON_STOP


async def test_a_closed_session_sends_what_waits_and_ends() -> None:
    session = Session("gw")
    session.token(1, index=0, token_id=5, logprob=None)
    session.close()
    batches = [batch async for batch in session.batches()]
    assert [len(batch.events) for batch in batches] == [1]
    assert session.end is None


async def test_the_first_reason_for_an_end_stays() -> None:
    session = Session("gw")
    session.close(Aborted("first"))
    session.close(Aborted("second"))
    assert session.end is not None
    assert session.end.message == "first"


async def test_a_failure_carries_code_reason_text_and_field() -> None:
    session = Session("gw")
    session.failed(4, InvalidArgument("model is empty", field="model"))
    (event,) = (await anext(session.batches())).events
    assert event.failed == session_pb2.RequestFailed(
        code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
        reason="INVALID_ARGUMENT",
        message="model is empty",
        field="model",
    )


async def test_tokens_of_a_request_that_wait_together_are_one_event() -> None:
    session = Session("gw")
    for index in (3, 4):
        session.token(1, index=index, token_id=10 + index, logprob=-0.5)
        session.token(2, index=index, token_id=20 + index, logprob=None)
    first, second = (await anext(session.batches())).events
    assert (first.request_number, first.tokens.first_index) == (1, 3)
    assert list(first.tokens.token_ids) == [13, 14]
    assert list(first.tokens.logprobs) == [-0.5, -0.5]
    assert list(second.tokens.token_ids) == [23, 24]


async def test_tokens_never_join_those_of_before_another_event_or_message() -> None:
    session = Session("gw")
    batches = session.batches()
    session.token(1, index=0, token_id=5, logprob=None)
    session.failed(1, InvalidArgument("wrong", field="model"))
    session.token(1, index=0, token_id=6, logprob=None)
    kinds = [event.WhichOneof("event") for event in (await anext(batches)).events]
    assert kinds == ["tokens", "failed", "tokens"]
    session.token(1, index=1, token_id=7, logprob=None)
    session.report()
    events = (await anext(batches)).events
    assert [(event.tokens.first_index, list(event.tokens.token_ids)) for event in events] == [(1, [7])]
