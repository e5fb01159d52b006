"""What a check says: a verdict, and for each thing that is wrong what was found and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Status(IntEnum):
    """Of a check or a finding, the worst last. SKIPPED: it could not be looked at; the verdict says why."""

    SKIPPED = 0
    OK = 1
    WARNING = 2
    FAULT = 3

    @property
    def word(self) -> str:
        """As JSON and people read it."""
        return self.name.lower()


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    status: WARNING or FAULT. subject: what it is about ("worker-0", "group a", a file). explains: other
    subjects that suffer from it; follows_from: those that this one suffers from, where they have a fault (see
    `catalogue.fold`). consequences: what else of this was seen, by other checks.
    """

    status: Status
    subject: str
    found: str
    mend: str
    follows_from: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()


def fault(
    subject: str, found: str, mend: str, *, follows_from: Sequence[str] = (), explains: Sequence[str] = ()
) -> Finding:
    """Something is broken, or will be soon."""
    return Finding(Status.FAULT, subject, found, mend, tuple(follows_from), tuple(explains))


def warning(subject: str, found: str, mend: str, *, follows_from: Sequence[str] = ()) -> Finding:
    """Something costs speed or safety, or will be a fault later."""
    return Finding(Status.WARNING, subject, found, mend, tuple(follows_from))


@dataclass(frozen=True)
class Verdict:
    """What one check found. looked_at: one sentence on what was seen, or on why nothing could be."""

    looked_at: str
    findings: tuple[Finding, ...] = ()
    skipped: bool = False

    @property
    def status(self) -> Status:
        """The worst of its findings."""
        if self.skipped and not self.findings:
            return Status.SKIPPED
        return max((finding.status for finding in self.findings), default=Status.OK)


def verdict(looked_at: str, findings: Sequence[Finding] = ()) -> Verdict:
    """Of a check that could look."""
    return Verdict(looked_at, tuple(findings))


def skipped(why: str) -> Verdict:
    """Of a check that could not."""
    return Verdict(why, skipped=True)


@dataclass(frozen=True)
class CheckResult:
    """A check's verdict beside its id and why it matters."""

    check_id: str
    why: str
    verdict: Verdict

    @property
    def status(self) -> Status:
        """Of its verdict."""
        return self.verdict.status


def named(words: Sequence[str], *, most: int = 8) -> str:
    """Words with commas between them; "none" without any; of many the first ones, and how many more."""
    if not words:
        return "none"
    shown = ", ".join(words[:most])
    return shown if len(words) <= most else f"{shown} and {len(words) - most} more"
