"""Finds out what the session has lost. Each of the scheduler's reports says of all requests that it has how
many tokens they have: so one that is missing there, or is further on than here, shows a lost message.
"""

from __future__ import annotations

from collections.abc import Iterable

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb

MOST_SILENT_REPORTS = 3
"""A request that was submitted just now may be missing in one, or in two where the scheduler is slow."""


def is_position(event: pb.RequestEvent) -> bool:
    """Whether an event is part of a report: it brings no token, only its place."""
    return event.WhichOneof("event") == "tokens" and not event.tokens.token_ids


def is_report(response: pb.OpenSessionResponse) -> bool:
    """Whether a message says of all requests how far they are; that of an idle scheduler is empty."""
    if not response.events:
        return not response.HasField("welcome")
    # Positions come last in a message.
    return is_position(response.events[-1])


class SilenceWatch:
    """For each request, the reports in a row that came without a word of it."""

    def __init__(self) -> None:
        self._silent_reports: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<SilenceWatch {self._silent_reports}>"

    def find_missing(self, report: pb.OpenSessionResponse, carried: Iterable[int]) -> int | None:
        """A request among those `carried` that the scheduler does not have, as this report too shows."""
        told = {event.request_number for event in report.events}
        silent = {number: self._silent_reports.get(number, 0) + 1 for number in carried if number not in told}
        self._silent_reports = silent
        return next((number for number, count in silent.items() if count > MOST_SILENT_REPORTS), None)
