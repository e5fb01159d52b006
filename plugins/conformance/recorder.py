"""Runs checks one by one and keeps how each went; a check that raises has failed, the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

from meshkit.errors import MeshError
from plugins.conformance.report import Combination, Coverage, Fault, Result, Status
from plugins.conformance.time_limit import TimeLimit


class CheckFailed(Exception):
    """A check found a fault; `detail` says what was wanted and what was found."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


class OutOfReach(Exception):
    """The check cannot be made of an executor by its address; the text says why."""


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
    status, fault = Status.PASS, None
    try:
        detail = check()
    except OutOfReach as reason:
        status, detail = Status.SKIP_OUT_OF_REACH, str(reason)
    except CheckFailed as failure:
        status, fault, detail = Status.FAIL, failure.fault, failure.detail
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the outcome that is reported
        # The SDK translates what an operator raises; the cause says that there is none.
        absent = any(isinstance(each, NotImplementedError) for each in (error, error.__cause__))
        status, fault = Status.FAIL, Fault.DECLARED_BUT_MISSING if absent else Fault.RAISED
        detail = f"{type(error).__name__}: {error}"
    return Result(name, status, detail, fault, time.monotonic() - start)


class Recorder:
    """Collects results of checks whose name contains `only` (upper or lower case; empty: all).

    limit: of each check; None: none. out_of_reach: checks that this target does not allow, and why.
    """

    def __init__(
        self, only: str = "", *, limit: TimeLimit | None = None, out_of_reach: Mapping[str, str] | None = None
    ) -> None:
        self._only = only.lower()
        self._limit = limit
        self._out_of_reach = out_of_reach or {}
        self._results: list[Result] = []
        self._areas: list[str] = []
        self._expected: dict[str, None] = {}
        self._declared: set[Combination] = set()
        self._tried: set[Combination] = set()

    @property
    def results(self) -> tuple[Result, ...]:
        """In the order of the run."""
        return tuple(self._results)

    @property
    def coverage(self) -> Coverage:
        """Of the operators, so far."""
        return Coverage(frozenset(self._declared), frozenset(self._tried))

    def wants(self, name: str) -> bool:
        """Whether the filter lets a check of that name through."""
        return self._only in name.lower()

    def expect_areas(self, areas: Iterable[str]) -> None:
        """These are to come: where the run has to end early, they are reported as not run."""
        self._areas = list(areas)

    def enter_area(self, area: str) -> None:
        """From now on its checks are expected by name."""
        self._areas.remove(area)

    def expect(self, names: Iterable[str]) -> None:
        """As `expect_areas`, for checks; those that the filter leaves out are not expected."""
        self._expected.update(dict.fromkeys(name for name in names if self.wants(name)))

    def give_up(self, name: str, detail: str) -> None:
        """The check `name` hangs: it has failed, and what is still expected was not run."""
        self._add(Result(name, Status.FAIL, detail, Fault.TIMED_OUT))
        for each in [*self._expected, *self._areas]:
            self._add(Result(each, Status.SKIP_NOT_RUN, f"not run, since {name} did not end"))

    def run_all(self, checks: Mapping[str, Callable[[], str]]) -> None:
        """Run checks by name, where the filter lets them through."""
        self.expect(checks)
        for name, check in checks.items():
            self.run(name, check)

    def run(self, name: str, check: Callable[[], str]) -> Result | None:
        """Run a check and return how it went; None where the filter does not let it through."""
        if not self.wants(name):
            return None
        reason = self._out_of_reach.get(name)
        if reason is not None:
            return self._add(Result(name, Status.SKIP_OUT_OF_REACH, reason))
        return self._add(self.judge(name, check))

    def judge(self, name: str, check: Callable[[], str]) -> Result:
        """Run a check within the limit, whatever the filter, and keep nothing of it."""
        with self._limit.watch(name) if self._limit else nullcontext():
            return judge(name, check)

    def run_combination(self, label: str, combination: Combination, check: Callable[[], str]) -> None:
        """Run the check of an operator's combination; one that could be made counts as tried."""
        result = self.run(label, check)
        if result is not None and not result.status.skipped:
            self._tried.add(combination)

    def declare(self, combination: Combination) -> None:
        """The plugin says that it has this operator in this dtype and shape class."""
        self._declared.add(combination)

    def add(self, result: Result) -> None:
        """Take a result that was found elsewhere, where the filter lets it through."""
        if self.wants(result.name):
            self._add(result)

    def skip_undeclared(self, name: str, detail: str) -> None:
        """The plugin does not offer it, and says so."""
        self.add(Result(name, Status.SKIP_UNDECLARED, detail))

    def skip_rest_out_of_reach(self) -> None:
        """Report what is out of reach and has no check of its own: parts of the operators' checks."""
        done = {result.name for result in self._results}
        for name, reason in self._out_of_reach.items():
            if name not in done:
                self.add(Result(name, Status.SKIP_OUT_OF_REACH, reason))

    def _add(self, result: Result) -> Result:
        self._expected.pop(result.name, None)
        self._results.append(result)
        return result
