"""A message of the session never arrives: the gateway sees it, and no client loses or repeats a token."""

from __future__ import annotations

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from gateway.lost_messages import MOST_SILENT_REPORTS
from tests.contract.gateway.fake_scheduler import FakeSession, Submitted
from tests.contract.gateway.gateway_client import Mesh

REPORTS = MOST_SILENT_REPORTS + 2
"""The first may follow a word of the request."""


def report(session: FakeSession, **tokens: Submitted) -> None:
    """What the scheduler says of all its requests: the number of their tokens; n3=request: it has three."""
    session.send(*(request.tokens_event(int(name[1:]), []) for name, request in tokens.items()))


async def test_lost_tokens_come_by_another_session(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", stop={"max_tokens": 3})
    request = await session.accepts()
    request.tokens(0, [97])
    request.tokens(2, [99])
    again = await (await mesh.scheduler.session()).accepts()
    assert list(again.submit.output_token_ids) == [97]
    again.tokens(1, [98, 99])
    again.finished()
    await stream.end()
    assert stream.token_ids == [97, 98, 99]


async def test_lost_tokens_show_by_the_next_report_where_nothing_else_comes(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, [97])
    report(session, n1=request)
    report(session, n2=request)
    again = await (await mesh.scheduler.session()).accepts()
    assert list(again.submit.output_token_ids) == [97]
    again.tokens(1, [98])
    again.finished()
    await stream.end()
    assert stream.token_ids == [97, 98]


async def test_a_lost_submission_is_made_again(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    await session.submitted()
    for _ in range(REPORTS):
        report(session)
    request = await (await mesh.scheduler.session()).accepts()
    request.tokens(0, [97])
    request.finished()
    await stream.end()
    assert stream.token_ids == [97]


async def test_a_request_whose_last_message_was_lost_is_ended_by_another_session(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi", stop={"max_tokens": 2})
    request = await session.accepts()
    request.tokens(0, [97])
    other = mesh.generate("ho")
    beside = await session.accepts()
    beside.tokens(0, [65])
    for _ in range(REPORTS):
        report(session, n1=beside)
    second = await mesh.scheduler.session()
    for submitted in (await second.accepts(), await second.accepts()):
        submitted.tokens(1, [98])
        submitted.finished()
    await stream.end()
    await other.end()
    assert stream.token_ids == [97, 98]
    assert other.token_ids == [65, 98]


async def test_reports_of_what_both_sides_have_change_nothing(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    for _ in range(2 * REPORTS):
        report(session, n0=request)
    request.tokens(0, [97, 98])
    for _ in range(2 * REPORTS):
        report(session, n2=request)
    request.finished()
    await stream.end()
    assert stream.token_ids == [97, 98]
    assert not session.has_commands


async def test_a_request_that_runs_is_accepted_though_the_news_of_that_was_lost(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.submitted()
    request.tokens(0, [97])
    await stream.start()
    request.finished()
    await stream.end()
    assert stream.token_ids == [97]


async def test_a_lost_cancel_is_said_again(mesh: Mesh) -> None:
    session = await mesh.session()
    stream = mesh.generate("hi")
    request = await session.accepts()
    request.tokens(0, [97])
    await stream.start()
    await stream.output()
    stream.call.cancel()
    assert await request.ended_by_gateway() == "cancel"
    request.tokens(1, [98])
    report(session, n2=request)
    assert await request.ended_by_gateway() == "cancel"
    request.finished(pb.RequestFinished.REASON_CANCELLED)
    report(session)
