"""Runs checks one by one and keeps how each went; a check that raises has failed, the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshkit.errors import MeshError
from plugins.conformance.report import Fault, Result, Status


class CheckFailed(Exception):
    """A check found a fault; `detail` says what was wanted and what was found."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


def require(condition: bool, fault: Fault, detail: str) -> None:
    """Raise CheckFailed unless `condition` holds."""
    if not condition:
        raise CheckFailed(fault, detail)


def require_error(error: type[MeshError], call: Callable[[], object], what: str) -> None:
    """Raise CheckFailed unless `call` raises `error`."""
    try:
        call()
    except error:
        return
    raise CheckFailed(Fault.WRONG_BEHAVIOUR, f"{what} has to raise {error.__name__}; it did not")


def judge(name: str, check: Callable[[], str]) -> Result:
    """Run a check; it returns a detail for people, or raises."""
    start = time.monotonic()
    fault: Fault | None = None
    try:
        detail = check()
    except CheckFailed as failure:
        fault, detail = failure.fault, failure.detail
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the outcome that is reported
        # The SDK translates what an operator raises; the cause says that there is none.
        absent = any(isinstance(each, NotImplementedError) for each in (error, error.__cause__))
        fault = Fault.DECLARED_BUT_MISSING if absent else Fault.RAISED
        detail = f"{type(error).__name__}: {error}"
    status = Status.FAIL if fault else Status.PASS
    return Result(name, status, detail, fault, time.monotonic() - start)


class Recorder:
    """Collects results of checks whose name contains `only` (upper or lower case; empty: all)."""

    def __init__(self, only: str = "") -> None:
        self._only = only.lower()
        self._results: list[Result] = []

    @property
    def results(self) -> tuple[Result, ...]:
        """In the order of the run."""
        return tuple(self._results)

    def wants(self, name: str) -> bool:
        """Whether the filter lets a check of that name through."""
        return self._only in name.lower()

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run a check, where the filter lets it through."""
        if self.wants(name):
            self._results.append(judge(name, check))

    def add(self, result: Result) -> None:
        """Take a result that was found elsewhere, where the filter lets it through."""
        if self.wants(result.name):
            self._results.append(result)

    def skip_undeclared(self, name: str, detail: str) -> None:
        """The plugin does not offer it, and says so."""
        self.add(Result(name, Status.SKIP_UNDECLARED, detail))
