"""Reports of the scheduler, and requests that they do not name."""

from __future__ import annotations

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from gateway.lost_messages import MOST_SILENT_REPORTS, SilenceWatch, is_report


def event(number: int, *token_ids: int) -> pb.RequestEvent:
    return pb.RequestEvent(request_number=number, tokens=pb.RequestTokens(first_index=3, token_ids=token_ids))


def report(*numbers: int) -> pb.OpenSessionResponse:
    """Of a scheduler that has these requests."""
    return pb.OpenSessionResponse(events=[event(number) for number in numbers])


def test_a_report_is_empty_or_ends_with_positions() -> None:
    assert is_report(pb.OpenSessionResponse())
    assert is_report(pb.OpenSessionResponse(events=[event(1, 5), event(1), event(2)]))
    assert not is_report(pb.OpenSessionResponse(events=[event(1, 5)]))
    assert not is_report(pb.OpenSessionResponse(welcome=pb.SessionWelcome(scheduler_id="s")))


def test_a_request_without_a_word_in_some_reports_in_a_row_is_silent() -> None:
    watch = SilenceWatch()
    for _ in range(MOST_SILENT_REPORTS):
        assert watch.find_missing(report(1), [1, 2]) is None
    assert watch.find_missing(report(1), [1, 2]) == 2


def test_one_word_in_time_is_enough() -> None:
    watch = SilenceWatch()
    for number in range(5 * MOST_SILENT_REPORTS):
        told = [7] if number % MOST_SILENT_REPORTS == 0 else []
        assert watch.find_missing(report(*told), [7]) is None


def test_a_request_that_is_not_carried_any_more_is_not_missed() -> None:
    watch = SilenceWatch()
    for _ in range(3 * MOST_SILENT_REPORTS):
        assert watch.find_missing(report(), []) is None
