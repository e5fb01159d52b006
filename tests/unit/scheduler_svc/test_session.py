"""Events of one turn of the loop leave together, in order, and none is lost when a session closes."""

from __future__ import annotations

import grpc

from chipmesh.device.v1alpha1 import sampling_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import Aborted, InvalidArgument
from scheduler_svc.core.structures import FinishReason, Request, RequestId
from scheduler_svc.live_request import LiveRequest
from scheduler_svc.request_trace import RequestTrace
from scheduler_svc.session import Session


def make_request(session: Session, number: int, *, output: list[int] | None = None) -> LiveRequest:
    """One with `output` already, of which the gateway knows."""
    return LiveRequest(
        core=Request(RequestId(number), "m", [1, 2], 100, output=output or []),
        sink=session,
        number=number,
        sampling=sampling_pb2.SamplingParameters(),
        trace=RequestTrace("", request_id=str(number), model="m", prompt_tokens=2),
        submitted_at=0.0,
    )


def grow(live: LiveRequest, token_id: int, *, logprob: float | None = None) -> None:
    """As the engine does."""
    live.core.output.append(token_id)
    if logprob is not None:
        live.logprobs.append(logprob)
    live.sink.grew(live)


async def test_what_happens_in_one_turn_is_one_message() -> None:
    session = Session("gw")
    grow(make_request(session, 1), 5)
    grow(make_request(session, 2, output=[7, 8, 9]), 6, logprob=-1.0)
    session.finished(1, FinishReason.STOP)
    batch = await anext(session.batches())
    assert [event.request_number for event in batch.events] == [1, 1, 2]
    assert list(batch.events[0].tokens.token_ids) == [5]
    assert batch.events[1].finished.reason == session_pb2.RequestFinished.REASON_STOP
    assert list(batch.events[2].tokens.token_ids) == [6]
    assert list(batch.events[2].tokens.logprobs) == [-1.0]
    assert batch.events[2].tokens.first_index == 3


async def test_a_closed_session_sends_what_waits_and_ends() -> None:
    session = Session("gw")
    grow(make_request(session, 1), 5)
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
    first_request, second_request = make_request(session, 1, output=[0, 0, 0]), make_request(session, 2)
    for step in (3, 4):
        grow(first_request, 10 + step, logprob=-step)
        grow(second_request, 20 + step)
    first, second = (await anext(session.batches())).events
    assert (first.request_number, first.tokens.first_index) == (1, 3)
    assert list(first.tokens.token_ids) == [13, 14]
    assert list(first.tokens.logprobs) == [-3.0, -4.0]
    assert list(second.tokens.token_ids) == [23, 24]
    assert not second.tokens.logprobs


async def test_tokens_never_join_those_of_before_another_event_or_message() -> None:
    session = Session("gw")
    batches = session.batches()
    live = make_request(session, 1)
    session.queued(live)
    grow(live, 5, logprob=-0.5)
    session.queued(live)
    grow(live, 6, logprob=-0.25)
    sent = [(event.WhichOneof("event"), list(event.tokens.token_ids), list(event.tokens.logprobs))
            for event in (await anext(batches)).events]  # fmt: skip
    assert sent == [("queued", [], []), ("tokens", [5], [-0.5]), ("queued", [], []), ("tokens", [6], [-0.25])]
    grow(live, 7, logprob=-1.0)
    session.report()
    events = (await anext(batches)).events
    assert [(event.tokens.first_index, list(event.tokens.token_ids)) for event in events] == [
        (2, [7]),
        (3, []),
    ]
    assert list(events[0].tokens.logprobs) == [-1.0]


async def test_tokens_come_before_the_end_and_none_comes_after_it() -> None:
    session = Session("gw")
    live = make_request(session, 1)
    grow(live, 5)
    session.failed(1, InvalidArgument("wrong", field="model"))
    kinds = [event.WhichOneof("event") for event in (await anext(session.batches())).events]
    assert kinds == ["tokens", "failed"]
