"""What the doctor says: one JSON object for programs, a table with marks for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshkit.cli.doctor.facts import Facts
from meshkit.cli.doctor.finding import CheckResult, Finding, Status

MARKS = {
    Status.SKIPPED: "[dim]–[/dim]",
    Status.OK: "[green]✓[/green]",
    Status.WARNING: "[yellow]![/yellow]",
    Status.FAULT: "[red]✗[/red]",
}


def describe(results: Sequence[CheckResult], facts: Facts, *, duration_s: float) -> dict[str, Any]:
    """{"status", "services": [...], "checks": [{"id", "status", "found", "why", "findings": [...]}]}."""
    return {
        "status": worst(results).word,
        "duration_s": round(duration_s, 2),
        "services": [
            {
                "name": target.name,
                "kind": target.kind,
                "address": target.address,
                "http_address": target.http_address,
                "pid": target.pid,
                "config": str(target.config_file) if target.config_file else None,
            }
            for target in facts.targets
        ],
        "checks": [
            {
                "id": result.check_id,
                "status": result.status.word,
                "found": result.verdict.looked_at,
                "why": result.why,
                "findings": [_describe_finding(finding) for finding in result.verdict.findings],
            }
            for result in results
        ],
    }


def _describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "status": finding.status.word,
        "subject": finding.subject,
        "found": finding.found,
        "mend": finding.mend,
        "consequences": list(finding.consequences),
    }


def worst(results: Sequence[CheckResult]) -> Status:
    """Of all checks; OK where none was found wrong."""
    return max((result.status for result in results if result.status > Status.OK), default=Status.OK)


def print_results(results: Sequence[CheckResult], *, duration_s: float) -> None:
    """A line for each check; below one that found something: what, why it matters, how to mend it."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        if not result.verdict.findings:
            table.add_row(MARKS[result.status], result.check_id, escape(result.verdict.looked_at))
        for finding in result.verdict.findings:
            table.add_row(MARKS[finding.status], result.check_id, _in_words(finding, why=result.why))
    console.print(table)
    console.print(_sum(results, duration_s=duration_s), markup=False)


def _in_words(finding: Finding, *, why: str) -> str:
    lines = [
        f"[bold]{escape(finding.subject)}[/bold]: {escape(finding.found)}",
        f"why:  {escape(why)}",
        f"mend: {escape(finding.mend)}",
        *(f"so:   {escape(consequence)}" for consequence in finding.consequences),
    ]
    return "\n".join(lines)


def _sum(results: Sequence[CheckResult], *, duration_s: float) -> str:
    findings = [finding for result in results for finding in result.verdict.findings]
    faults = sum(finding.status is Status.FAULT for finding in findings)
    skips = sum(result.status is Status.SKIPPED for result in results)
    return (
        f"{len(results)} checks in {duration_s:.1f} s: {faults} faults, {len(findings) - faults} warnings, "
        f"{skips} with nothing to look at"
    )
