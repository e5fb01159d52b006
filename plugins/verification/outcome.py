"""How a check says what it found: it returns a detail, or raises one of two."""

from __future__ import annotations

import time
from collections.abc import Callable

from plugins.verification.report import Check, Status


class CheckFailed(Exception):
    """The check found a fault; the text says what was wanted and what was found."""


class CheckSkipped(Exception):
    """There is nothing here to check; the text says why."""


def require(condition: bool, detail: str) -> None:
    """Raise CheckFailed unless `condition` holds."""
    if not condition:
        raise CheckFailed(detail)


def run_check(name: str, check: Callable[[], str]) -> Check:
    """Run one check; whatever else it raises is a failure too, and is told."""
    start = time.monotonic()
    try:
        status, detail = Status.PASS, check()
    except CheckSkipped as skip:
        status, detail = Status.SKIP, str(skip)
    except CheckFailed as failure:
        status, detail = Status.FAIL, str(failure)
    except Exception as error:  # noqa: BLE001 - what a plugin raises is the outcome that is reported
        status, detail = Status.FAIL, f"{type(error).__name__}: {error}"
    return Check(name, status, detail, time.monotonic() - start)
