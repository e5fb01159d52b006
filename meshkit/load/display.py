"""A run on a terminal: a bar on stderr while it goes on, a table on stdout when it is done."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshkit.load.sample import Sample

_TIMES = (
    ("time to first token", "ttft_ms"),
    ("time per output token", "tpot_ms"),
    ("inter-token latency", "itl_ms"),
    ("end to end", "e2e_ms"),
    ("sent late", "late_ms"),
)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99")


class RunDisplay:
    """A bar of requests done, on a terminal only. Enter it around the run."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._tokens = 0
        self._failed = 0

    def __enter__(self) -> RunDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, requests: int) -> None:
        """The workload is made; warm-up comes first."""
        self._task = self._progress.add_task("requests", total=requests, note="warming up")

    def add(self, sample: Sample) -> None:
        """One request is whole."""
        self._tokens += sample.output_tokens
        self._failed += sample.error is not None
        failed = f", {self._failed} failed" if self._failed else ""
        if self._task is not None:
            self._progress.update(self._task, advance=1, note=f"{self._tokens} tokens{failed}")


def print_report(report: dict[str, Any]) -> None:
    """The table, then errors and notes."""
    console = Console(highlight=False)
    console.print(_summary(report), _times(report))
    for error, told in report["errors"].items():
        console.print(f"{told['count']} x {error}: {told['example']}", markup=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, title=f"{report['model']}, {report['loop']} loop")
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "requests (failed)": f"{report['requests']} ({report['failed']})",
        "seconds": report["elapsed_s"],
        "prompt tokens": report["prompt_tokens"],
        "output tokens": report["output_tokens"],
        "requests/s": report["requests_per_s"],
        "output tokens/s": report["output_tokens_per_s"],
        "total tokens/s": report["total_tokens_per_s"],
        "tokens per message": report["tokens_per_message"],
        "share of prompts cached": report["cached_share"],
        "client CPU, µs per token": report["client_cpu_us_per_token"],
    }
    if report["goodput"] is not None:
        rows["goodput, requests/s"] = report["goodput"]["requests_per_s"]
    for name, value in rows.items():
        table.add_row(name, "-" if value is None else str(value))
    return table


def _times(report: dict[str, Any]) -> Table:
    table = Table(box=None, title="ms")
    table.add_column()
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, key in _TIMES:
        values = report[key]
        if values is not None:
            by = " (by message)" if key == "itl_ms" and report["itl_is_by"] == "message" else ""
            table.add_row(name + by, *(f"{values[column]:.2f}" for column in _COLUMNS))
    return table
