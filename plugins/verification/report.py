"""What a run found, check by check, and the two forms in which it is shown."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Status(enum.Enum):
    """How a check went."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


_STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.SKIP: "yellow"}


@dataclass(frozen=True)
class Check:
    """One check; `detail` says what was found, or why it was not run. Durations in seconds."""

    name: str
    status: Status
    detail: str
    duration_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the JSON report has it; `from_json` reads it back."""
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "duration_s": round(self.duration_s, 6),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Check:
        """Raises KeyError or ValueError for what `to_json` did not write."""
        return Check(value["name"], Status(value["status"]), value["detail"], value["duration_s"])


@dataclass(frozen=True)
class Report:
    """A whole run. `identity`: who the plugin says it is; empty where it did not load."""

    title: str
    backend: str
    checks: tuple[Check, ...]
    identity: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return self.count(Status.FAIL) > 0

    def count(self, status: Status) -> int:
        """How many checks ended so."""
        return sum(check.status is status for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "pass": self.count(Status.PASS),
            "fail": self.count(Status.FAIL),
            "skip": self.count(Status.SKIP),
            "backend": self.backend,
            **self.identity,
            "checks": [check.to_json() for check in self.checks],
        }

    def print_table(self, console: Console) -> None:
        """For a person."""
        emulated = " (emulated)" if self.identity.get("emulated") else ""
        table = Table(title=f"{self.title} of {self.backend}{emulated}")
        table.add_column("check", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("detail", overflow="fold")
        for check in self.checks:
            status = Text(check.status.value, style=_STYLES[check.status])
            table.add_row(check.name, status, Text(check.detail))
        console.print(table)
        console.print(", ".join(f"{self.count(status)} {status.value}" for status in Status), highlight=False)
