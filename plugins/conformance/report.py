"""What a run found: results, their count, coverage, and the three forms in which they are shown."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from plugins.sdk.catalogue import CATALOGUE


class Status(enum.Enum):
    """How a check went. A skip always says which of the reasons it had."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP_UNDECLARED = "SKIP undeclared"
    SKIP_NO_HARDWARE = "SKIP no hardware"
    SKIP_OUT_OF_REACH = "SKIP out of reach"
    """Of an executor by its address: what the wire does not show."""
    SKIP_NOT_RUN = "SKIP not run"
    """The run ended before, since a check hung."""

    @property
    def skipped(self) -> bool:
        """Whether the check did not run."""
        return self not in (Status.PASS, Status.FAIL)


_ALWAYS_SHOWN = (Status.PASS, Status.FAIL, Status.SKIP_UNDECLARED, Status.SKIP_NO_HARDWARE)


class Fault(enum.Enum):
    """What kind of failure it is; programs compare it."""

    WRONG_RESULT = "WRONG_RESULT"
    WRONG_ACCUMULATION = "WRONG_ACCUMULATION"
    WRONG_FORM = "WRONG_FORM"
    NON_FINITE = "NON_FINITE"
    NON_DETERMINISTIC = "NON_DETERMINISTIC"
    INPUT_OVERWRITTEN = "INPUT_OVERWRITTEN"
    OUT_OF_BOUNDS_WRITE = "OUT_OF_BOUNDS_WRITE"
    DECLARED_BUT_MISSING = "DECLARED_BUT_MISSING"
    WRONG_COUNT = "WRONG_COUNT"
    CONTRADICTION = "CONTRADICTION"
    WRONG_BEHAVIOUR = "WRONG_BEHAVIOUR"
    DECLINED_AT_START = "DECLINED_AT_START"
    TIMED_OUT = "TIMED_OUT"
    RAISED = "RAISED"


@dataclass(frozen=True)
class Result:
    """One check: `name` is area/subject, for operators operators/NAME/DTYPE/SHAPE_CLASS."""

    name: str
    status: Status
    detail: str
    fault: Fault | None = None
    duration_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return {
            "name": self.name,
            "status": self.status.value,
            "fault": self.fault.value if self.fault else None,
            "detail": self.detail,
            "duration_s": round(self.duration_s, 6),
        }


Combination = tuple[str, str, str]
"""(operator, dtype, shape class)"""


@dataclass(frozen=True)
class Coverage:
    """Which combinations the plugin declares, and which of them were tried."""

    declared: frozenset[Combination] = frozenset()
    tried: frozenset[Combination] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """Counts in all and by operator."""
        operators = [name for name in CATALOGUE if any(name == one[0] for one in self.declared)]
        return {
            "catalogue_operators": len(CATALOGUE),
            "declared_operators": len(operators),
            "declared": len(self.declared),
            "tried": len(self.tried),
            "share": round(len(self.tried) / len(self.declared), 4) if self.declared else None,
            "operators": {name: self._of(name) for name in operators},
        }

    def _of(self, operator: str) -> dict[str, Any]:
        declared = [one for one in self.declared if one[0] == operator]
        tried = [one for one in self.tried if one[0] == operator]
        return {
            "declared": len(declared),
            "tried": len(tried),
            "dtypes": sorted({dtype for _, dtype, _ in tried}),
            "shape_classes": sorted({shape for _, _, shape in tried}),
        }


@dataclass(frozen=True)
class Report:
    """A whole run against one back end."""

    backend: str
    results: tuple[Result, ...]
    coverage: Coverage = Coverage()
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Versions, chip, and whether it is emulated, as the plugin reports them."""

    def count(self, *statuses: Status) -> int:
        """How many results have one of these statuses."""
        return sum(result.status in statuses for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """Every FAIL."""
        return [result for result in self.results if result.status is Status.FAIL]

    def to_json(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "pass": self.count(Status.PASS),
            "skip": sum(result.status.skipped for result in self.results),
            "fail": len(self.failures),
            **{_key(status): self.count(status) for status in Status if status.skipped},
            "backend": self.backend,
            **self.identity,
            "coverage": self.coverage.to_json(),
            "results": [result.to_json() for result in self.results],
        }


def _key(status: Status) -> str:
    """ "skip_undeclared" and so on."""
    return status.name.lower()


def write_junit(report: Report, path: Path) -> None:
    """JUnit XML, as continuous integration reads it: one suite, one case for each result."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"chipmesh conformance {report.backend}",
        tests=str(len(report.results)),
        failures=str(len(report.failures)),
        errors="0",
        skipped=str(sum(result.status.skipped for result in report.results)),
        time=f"{sum(result.duration_s for result in report.results):.3f}",
    )
    for result in report.results:
        area, _, subject = result.name.partition("/")
        case = ElementTree.SubElement(
            suite, "testcase", classname=area, name=subject, time=f"{result.duration_s:.3f}"
        )
        if result.status is Status.FAIL:
            fault = result.fault.value if result.fault else Status.FAIL.value
            ElementTree.SubElement(case, "failure", type=fault, message=printable(result.detail))
        elif result.status.skipped:
            message = printable(f"{result.status.value}: {result.detail}")
            ElementTree.SubElement(case, "skipped", message=message)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def printable(text: str) -> str:
    """`text` without what XML cannot hold: a vendor's message may carry anything."""
    return "".join(character if character.isprintable() else " " for character in text)


def print_table(report: Report, console: Console) -> None:
    """Counts by subject for a person, then every failure in full."""
    table = Table(title=f"conformance of {report.backend}{_where(report)}")
    table.add_column("checks", no_wrap=True)
    shown = [status for status in Status if status in _ALWAYS_SHOWN or report.count(status)]
    for status in shown:
        table.add_column(status.value.replace(" ", "\n", 1), justify="right")
    for subject, counts in _by_subject(report.results):
        table.add_row(subject, *(str(counts[status] or "") for status in shown))
    table.add_section()
    table.add_row("all", *(str(report.count(status)) for status in shown))
    console.print(table)
    for result in report.failures:
        fault = result.fault.value if result.fault else ""
        console.print(f"FAIL {result.name}: {fault}: {result.detail}", markup=False, soft_wrap=True)
    declared, tried = len(report.coverage.declared), len(report.coverage.tried)
    console.print(f"coverage: {tried} of {declared} declared operator x dtype x shape class", markup=False)


def _where(report: Report) -> str:
    emulated = " (emulated)" if report.identity.get("emulated") else ""
    address = report.identity.get("address")
    return f"{emulated} at {address}" if address else emulated


def _by_subject(results: Iterable[Result]) -> list[tuple[str, Counter[Status]]]:
    """Results by area, operators by operator, in the order of the run."""
    counts: dict[str, Counter[Status]] = {}
    for result in results:
        parts = result.name.split("/")
        subject = "/".join(parts[:2]) if parts[0] == "operators" else parts[0]
        counts.setdefault(subject, Counter())[result.status] += 1
    return list(counts.items())
